"""Namespaces of this node: who may open which, what its policy says now, and the scope that keeps its keys apart.

The truth is the record ns/<name> at the coordinator. It is created from the configuration file at the first start, or
by an operator (admin.py), reaches every node by the watch, and is never deleted: a dropped one stays as `dropped`, so
that its name goes on with the next generation. scope = first 8 bytes of SHA-256(tenant, name, generation): the prefix
of every internal key, so a raised generation makes all old keys unreachable at once, and no client can name another
namespace's keys.
Laws: a request is judged by the policy of now, not by that of its connection's handshake. A peer opens the generation
it means, or nothing: blocks of another generation are never an answer. A name that is not known here is looked for at
the coordinator before it is refused, since the watch may be a moment behind the operator.
Limits: a node that does not reach the coordinator serves what it knew; it learns of a drop when it does again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

import msgspec

from emberkv.config.cluster import ClusterConfig
from emberkv.config.namespace import is_token
from emberkv.core.view import NAMESPACE_PREFIX, encode_record
from emberkv.errors import ConfigError, CoordinatorError
from emberkv.messages import WIRE_VERSION, Hello, PutRequest, Role
from emberkv.ports import CommitStatus, Compare, Coordinator, Record, Write
from emberkv.types import DEFAULT_TENANT, Level, Namespace, RefuseReason, scope_of
from emberkv.wire.session import ServerSession

log = logging.getLogger(__name__)

START_DEADLINE_MS = 2000
LOOK_DEADLINE_MS = 200
"""A handshake that names an unknown namespace waits so long for the coordinator's word."""
START_TRIES = 3
CREATED_AT_ONCE = 100
"""Records of one commit; the next round creates the others."""
SCOPES_REMEMBERED = 1024
"""Of dropped namespaces; a read outlives the drop of its namespace by its deadline at most."""

_decode = msgspec.msgpack.Decoder(Namespace).decode


def decode_namespace(record: Record) -> Namespace:
    """The namespace of a record. Raises ConfigError for one that another version wrote."""
    try:
        return _decode(record.value)
    except (msgspec.MsgspecError, ValueError):
        raise ConfigError(f"coordinator record {record.key!r} cannot be decoded: is another version running?") from None


def settle(coordinator: Coordinator, cluster: ClusterConfig) -> list[Namespace]:
    """All namespaces of the cluster, after those of the configuration that have no record were created.

    Raises ConfigError when the configuration states something else than an existing record, CoordinatorError when the
    coordinator does not keep them.
    """
    for _ in range(START_TRIES + len(cluster.namespaces) // CREATED_AT_ONCE):
        listing = coordinator.list(NAMESPACE_PREFIX, deadline_ms=START_DEADLINE_MS)
        known = {namespace.name: namespace for namespace in map(decode_namespace, listing.records)}
        missing: list[Namespace] = []
        number = max((namespace.id for namespace in known.values()), default=0)
        for stated in cluster.namespaces:
            record = known.get(stated.name)
            if record is None:
                number += 1
                missing.append(stated.namespace(cluster.factor, number))
            elif record.dropped:
                log.warning("namespace %r of the configuration was dropped in the cluster and stays so", stated.name)
            elif differences := stated.differences(record):
                raise ConfigError(
                    f"namespace {stated.name!r} differs: {'; '.join(differences)}; leave it out of the configuration, "
                    f"or change it in the cluster with `emberkv namespace set {stated.name} ...`"
                )
        if not missing:
            return list(known.values())
        keys = [NAMESPACE_PREFIX + namespace.name for namespace in missing]
        writes = [Write(key, encode_record(made)) for key, made in zip(keys, missing, strict=True)][:CREATED_AT_ONCE]
        compares = [Compare(write.key, 0) for write in writes]
        status = coordinator.commit(compares, writes, deadline_ms=START_DEADLINE_MS).status
        if status is CommitStatus.COMMITTED and len(writes) == len(missing):
            return [*known.values(), *missing]
    raise CoordinatorError("the coordinator does not keep the namespaces' records; try again")


class Namespaces:
    """What this node knows of the namespaces; `take` is fed with the view, everything else reads without a lock,
    because both tables are only ever replaced as a whole."""

    def __init__(self, namespaces: list[Namespace], *, cluster_id: str, node: str, incarnation: bytes) -> None:
        self._cluster_id = cluster_id
        self._node = node
        self._incarnation = incarnation
        self._look: Callable[[str], None] | None = None
        self._by_name: dict[str, Namespace] = {}
        self._by_scope: dict[bytes, Namespace] = {}
        self._meant: dict[bytes, tuple[str, int]] = {}
        """Scopes that were open here: a read of one that was just dropped must still find its name."""
        self.take({namespace.name: namespace for namespace in namespaces})

    def look_at(self, coordinator: Coordinator, learn: Callable[[Record], None]) -> None:
        """Asks there for names that are not known here, and passes what it finds on to the core, whose view comes back
        through `take`. Both are safe to use from any thread."""

        def look(name: str) -> None:
            record = coordinator.get(NAMESPACE_PREFIX + name, deadline_ms=LOOK_DEADLINE_MS)
            if record is not None:
                learn(record)

        self._look = look

    def take(self, namespaces: Mapping[str, Namespace]) -> None:
        """All namespaces there are, dropped ones among them. The caller holds the lock under which they were read, so
        that an older picture never replaces a newer one."""
        there = [namespace for namespace in namespaces.values() if not namespace.dropped]
        self._by_scope = {scope_of(space.name, space.generation): space for space in there}
        self._by_name = {space.name: space for space in there}
        for scope, space in self._by_scope.items():
            self._meant[scope] = (space.name, space.generation)
        while len(self._meant) > len(there) + SCOPES_REMEMBERED:
            gone = next(scope for scope in self._meant if scope not in self._by_scope)
            del self._meant[gone]

    def all(self) -> list[Namespace]:
        """Namespaces that are there, by name."""
        return sorted(self._by_name.values(), key=lambda namespace: namespace.name)

    def scope(self, namespace: Namespace, tenant: str = DEFAULT_TENANT) -> bytes:
        """8 bytes that every internal key of the namespace begins with."""
        return scope_of(namespace.name, namespace.generation, tenant)

    def policy(self, scope: bytes) -> Namespace | None:
        """What the namespace of a connection says now; None once it was dropped or created anew."""
        return self._by_scope.get(scope)

    def find(self, name: str) -> Namespace | None:
        """The namespace as it is here, or at the coordinator if it is unknown here."""
        known = self._by_name.get(name)
        if known is not None or self._look is None or not is_token(name):
            return known
        try:
            self._look(name)
        except CoordinatorError as error:
            log.warning("namespace %r is unknown here, and the coordinator cannot be asked: %s", name, error)
        return self._by_name.get(name)

    def session(self) -> ServerSession:
        """The accepting side of one connection's handshake and message rules."""
        return ServerSession(
            cluster_id=self._cluster_id, node=self._node, incarnation=self._incarnation, namespaces=_Openable(self)
        )

    def hello(self, role: Role, scope: bytes = b"") -> Hello:
        """What this node says when it opens a connection to a peer; a stream has no namespace, since each of its
        messages carries its scope. A scope that never was open here gets a name that no namespace has."""
        name, generation = self._meant.get(scope, (f".{scope.hex()}", 0)) if scope else ("", 0)
        return Hello(
            int(role),
            WIRE_VERSION,
            WIRE_VERSION,
            self._cluster_id,
            DEFAULT_TENANT,
            self._node,
            self._incarnation,
            namespace=name,
            generation=generation,
        )


class _Openable(Mapping[str, Namespace]):
    """What one HELLO may name: looked up once, so that a drop in between cannot make two answers of it."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces
        self._found: dict[str, Namespace | None] = {}

    def __getitem__(self, name: str) -> Namespace:
        if name not in self._found:
            self._found[name] = self._namespaces.find(name)
        found = self._found[name]
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (namespace.name for namespace in self._namespaces.all())

    def __len__(self) -> int:
        return len(self._namespaces.all())


def put_refusal(policy: Namespace | None, request: PutRequest, cluster_factor: int) -> RefuseReason:
    """Why a client's put or delete cannot be done under the policy of its namespace; NONE when it can."""
    if policy is None:
        return RefuseReason.NO_NAMESPACE
    if (request.level == Level.STRONG) != (policy.level == Level.STRONG):
        return RefuseReason.LEVEL_UNSUPPORTED
    if request.min_copies > min(policy.factor, cluster_factor):
        return RefuseReason.LEVEL_UNSUPPORTED
    if any(item.length > policy.block_bytes_max for item in request.items):
        return RefuseReason.TOO_LARGE
    return RefuseReason.NONE


def copies_wanted(policy: Namespace, request: PutRequest, cluster_factor: int) -> int:
    """Copies that a put waits for: what it asks, and no less than the policy says. A factor that the cluster no longer
    has does not make every put wait for ever."""
    floor = policy.min_copies if request.level == Level.SESSION else 1
    return max(request.min_copies, min(floor, policy.factor, cluster_factor))
