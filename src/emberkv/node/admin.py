"""What an operator may tell a node: namespaces and drains. One verb, JSON arguments, JSON document back.

    namespace-list                       namespace-create  {name, level, factor, ...}     drain         {node}
    namespace-drop  {name, revision?}    namespace-set     {name, changes, revision?}     undrain       {node}
                                                                                          drain-status  {node?}

Laws: every change is one commit that compares the record it was decided on, so of two changes at the same time one is
told to look again and none is lost. An unknown outcome is read back. An error is one line that says what to do, and
whether trying again can help (`retry`). Performed on the connection's thread; nothing here is on the path of a block.
Limits: whoever reaches the socket may say these things; connections are not authenticated in this version.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import msgspec

from emberkv.config.namespace import (
    CHANGEABLE,
    NAMESPACES_MAX,
    NamespaceConfig,
    check_namespace,
    check_token,
    parse_expiry_ms,
    policy_document,
)
from emberkv.core.view import DRAIN_PREFIX, LIVE_PREFIX, NAMESPACE_PREFIX, ClusterView, encode_record
from emberkv.errors import ConfigError, Unavailable
from emberkv.messages import AdminReply, AdminRequest, DrainRecord, LiveRecord
from emberkv.node.namespaces import decode_namespace
from emberkv.node.runtime import Runtime
from emberkv.ports import CommitStatus, Compare, Coordinator, Record, Write
from emberkv.types import SHARDS, Level, Namespace, scope_of

log = logging.getLogger(__name__)

DEADLINE_MS_MAX: Final = 60_000
GENERATIONS_CLEARED: Final = 16
ERROR_CHARS_MAX: Final = 600
"""An error is a line for a terminal, whatever was asked; without a bound it would echo 60,000 characters of a name."""
UNCERTAIN: Final = "the coordinator did not say whether it was done; look, and say it again if it was not"
CHANGED: Final = "changed meanwhile: look and try again"

Arguments = TypeVar("Arguments", bound=msgspec.Struct)
_decode_live = msgspec.msgpack.Decoder(LiveRecord).decode
_decode_drain = msgspec.msgpack.Decoder(DrainRecord).decode


class Changes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may change in the life of a namespace; None: stays."""

    factor: int | None = None
    min_copies: int | None = None
    verify: str | None = None
    expiry: str | None = None
    owner: str | None = None


class SetArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of namespace-set. `revision`: of the policy that the operator looked at; None: whichever it is."""

    name: str
    changes: dict[str, Any]
    revision: int | None = None


class DropArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of namespace-drop."""

    name: str
    revision: int | None = None


class NodeArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the drain verbs."""

    node: str = ""


class StrongStore(Protocol):
    """Where strong records lie: coord.StrongStore."""

    def clear(self, prefix: str, *, deadline_ms: int) -> int:
        """Deletes what begins with `prefix` until the deadline; how many are left. Raises CoordinatorError."""
        ...


class Admin:
    """Performs the verbs. `learn` passes a record on to the core that this node has just read or written itself."""

    def __init__(
        self, runtime: Runtime, coordinator: Coordinator, strong: StrongStore, learn: Callable[[Record], None]
    ) -> None:
        self._runtime = runtime
        self._coordinator = coordinator
        self._strong = strong
        self._learn = learn
        self._factor = runtime.core.state.settings.factor
        self._verbs: dict[str, Callable[[bytes, _Deadline], dict[str, Any]]] = {
            "namespace-list": self._list,
            "namespace-create": self._create,
            "namespace-set": self._set,
            "namespace-drop": self._drop,
            "drain": self._drain,
            "undrain": self._undrain,
            "drain-status": self._drain_status,
        }

    def answer(self, request: AdminRequest) -> AdminReply:
        """Performs one command; never raises for what an operator or the coordinator can cause."""
        verb = self._verbs.get(request.verb)
        try:
            if verb is None:
                raise ConfigError(f"{request.verb[:64]!r} is no command of this version: {', '.join(self._verbs)}")
            document = verb(request.arguments, _Deadline(request.deadline_ms))
        except ConfigError as error:
            return _failed(str(error), retry=False)
        except Unavailable as error:
            return _failed(str(error), retry=True)
        return AdminReply(True, msgspec.json.encode(document))

    # -- namespaces ----------------------------------------------------------------------------------------------

    def _list(self, arguments: bytes, deadline: _Deadline) -> dict[str, Any]:
        _decoded(arguments, NodeArguments)
        listing = self._coordinator.list(NAMESPACE_PREFIX, deadline_ms=deadline.left_ms())
        return {"namespaces": [namespace_document(decode_namespace(record)) for record in listing.records]}

    def _create(self, arguments: bytes, deadline: _Deadline) -> dict[str, Any]:
        wanted = _decoded(arguments, NamespaceConfig)
        listing = self._coordinator.list(NAMESPACE_PREFIX, deadline_ms=deadline.left_ms())
        known = {record.key: record for record in listing.records}
        record = known.get(NAMESPACE_PREFIX + wanted.name)
        before = decode_namespace(record) if record is not None else None
        if before is not None and not before.dropped:
            raise ConfigError(f"namespace {wanted.name!r} exists already; change it with `emberkv namespace set`")
        if record is None and len(known) >= NAMESPACES_MAX:
            raise ConfigError(f"there are {len(known)} namespaces already, the most that a cluster keeps")
        number = (
            before.id if before is not None else 1 + max((decode_namespace(r).id for r in known.values()), default=0)
        )
        generation, revision = (before.generation + 1, before.revision + 1) if before is not None else (1, 0)
        made = wanted.namespace(self._factor, number, generation, revision)
        self._write(record, made, deadline)
        return {"namespace": namespace_document(made)}

    def _set(self, arguments: bytes, deadline: _Deadline) -> dict[str, Any]:
        wanted = _decoded(arguments, SetArguments)
        record, before = self._existing(wanted.name, wanted.revision, deadline)
        for key in wanted.changes:
            if key not in CHANGEABLE:
                raise ConfigError(
                    f"{key}: cannot be changed, it is fixed at creation; what can be is {', '.join(CHANGEABLE)}"
                )
        after = changed(before, _converted(wanted.changes, Changes), self._factor)
        self._write(record, after, deadline)
        return {"namespace": namespace_document(after)}

    def _drop(self, arguments: bytes, deadline: _Deadline) -> dict[str, Any]:
        wanted = _decoded(arguments, DropArguments)
        record, before = self._existing(wanted.name, wanted.revision, deadline)
        after = msgspec.structs.replace(before, dropped=True, revision=before.revision + 1)
        self._write(record, after, deadline)
        document: dict[str, Any] = {"namespace": namespace_document(after)}
        if before.level == Level.STRONG:
            try:
                document["records_left"] = self._clear(before, deadline)
            except Unavailable as error:
                log.warning("records of the dropped namespace %r stay on the disk: %s", before.name, error)
        return document

    def _clear(self, dropped: Namespace, deadline: _Deadline) -> int:
        """Gives the room of records back that nobody can name any more, also of earlier generations whose drop did not
        get so far; how many are left at the deadline."""
        left = 0
        for generation in range(max(1, dropped.generation - GENERATIONS_CLEARED + 1), dropped.generation + 1):
            prefix = scope_of(dropped.name, generation).hex()
            left += self._strong.clear(prefix, deadline_ms=deadline.left_ms())
        return left

    def _existing(self, name: str, revision: int | None, deadline: _Deadline) -> tuple[Record, Namespace]:
        """The record to change, if it is there and is the one that the operator looked at."""
        check_token("name", name)
        record = self._coordinator.get(NAMESPACE_PREFIX + name, deadline_ms=deadline.left_ms())
        namespace = decode_namespace(record) if record is not None else None
        if record is None or namespace is None or namespace.dropped:
            raise ConfigError(f"namespace {name!r} does not exist; see `emberkv namespace list`")
        if revision is not None and namespace.revision != revision:
            raise Unavailable(f"namespace {name!r} {CHANGED} (it has revision {namespace.revision}, not {revision})")
        return record, namespace

    def _write(self, record: Record | None, after: Namespace, deadline: _Deadline) -> None:
        key, value = NAMESPACE_PREFIX + after.name, encode_record(after)
        self._commit(
            [Compare(key, record.revision if record else 0)], Write(key, value), f"namespace {after.name!r}", deadline
        )

    def _commit(self, compares: list[Compare], write: Write, what: str, deadline: _Deadline) -> None:
        """Commits and tells the core at once. Raises Unavailable when others were faster or nobody knows."""
        result = self._coordinator.commit(compares, [write], deadline_ms=deadline.left_ms())
        if result.status is CommitStatus.REFUSED:
            raise Unavailable(f"{what} {CHANGED}")
        assert write.value is not None
        record: Record | None = Record(write.key, write.value, result.revision)
        if result.status is CommitStatus.UNKNOWN:
            record = self._coordinator.get(write.key, deadline_ms=deadline.left_ms())
            if record is None or record.value != write.value:
                raise Unavailable(f"{what}: {UNCERTAIN}")
            # It is there, but perhaps not yet where it outlasts a reboot (a full data disk): only a commit that is
            # certain says so.
            again = self._coordinator.commit(
                [Compare(write.key, record.revision)], [write], deadline_ms=deadline.left_ms()
            )
            if again.status is not CommitStatus.COMMITTED:
                raise Unavailable(f"{what}: {UNCERTAIN}")
            record = Record(write.key, write.value, again.revision)
        if record is not None:
            self._learn(record)

    # -- drain ---------------------------------------------------------------------------------------------------

    def _drain(self, arguments: bytes, deadline: _Deadline) -> dict[str, Any]:
        name = _decoded(arguments, NodeArguments).node
        live = self._live(deadline)
        if name not in live:
            raise ConfigError(f"node {name[:64]!r} is not alive; alive: {', '.join(sorted(live)) or 'none'}")
        record, node = live[name]
        drains = self._drains(deadline)
        others = [
            other
            for other, (_, state) in live.items()
            if other != name and not (other in drains and drains[other] == state.incarnation)
        ]
        if not others:
            raise ConfigError(
                f"node {name!r} is the only one that is alive and not draining: nobody could take its shards"
            )
        copies = max((namespace.min_copies for namespace in self._policies()), default=1)
        if len(others) < copies:
            raise ConfigError(
                f"{len(others)} node(s) would be left to hold shards, but a namespace asks for min_copies {copies}: "
                "lower it, or start another node first"
            )
        if drains.get(name) != node.incarnation:
            # For this life only: compared with the live record, so that a restart in between is not drained.
            write = Write(DRAIN_PREFIX + name, encode_record(DrainRecord(node.incarnation)))
            self._commit([Compare(record.key, record.revision)], write, f"node {name!r}", deadline)
        return self._shards_of(name)

    def _undrain(self, arguments: bytes, deadline: _Deadline) -> dict[str, Any]:
        name = _decoded(arguments, NodeArguments).node
        check_token("node", name)
        record = self._coordinator.get(DRAIN_PREFIX + name, deadline_ms=deadline.left_ms())
        if record is not None:
            result = self._coordinator.commit(
                [Compare(record.key, record.revision)], [Write(record.key, None)], deadline_ms=deadline.left_ms()
            )
            if result.status is CommitStatus.REFUSED:
                raise Unavailable(f"node {name!r} {CHANGED}")
            again = self._coordinator.get(record.key, deadline_ms=deadline.left_ms())
            if result.status is CommitStatus.UNKNOWN and again is not None:
                raise Unavailable(f"node {name!r}: {UNCERTAIN}")
        return {"node": name, "draining": False}

    def _drain_status(self, arguments: bytes, deadline: _Deadline) -> dict[str, Any]:
        name = _decoded(arguments, NodeArguments).node
        with self._runtime.lock:
            view = self._runtime.core.state.view
            draining = sorted(node for node in view.live_nodes() if view.is_draining(node))
        if not name:
            return {"nodes": [self._shards_of(node) for node in draining]}
        return self._shards_of(name)

    def _policies(self) -> list[Namespace]:
        with self._runtime.lock:
            return list(self._runtime.core.state.view.policies.values())

    def _live(self, deadline: _Deadline) -> dict[str, tuple[Record, LiveRecord]]:
        listing = self._coordinator.list(LIVE_PREFIX, deadline_ms=deadline.left_ms())
        found = {record.key[len(LIVE_PREFIX) :]: (record, _decode_live(record.value)) for record in listing.records}
        return {name: pair for name, pair in found.items() if not pair[1].dead}

    def _drains(self, deadline: _Deadline) -> dict[str, bytes]:
        listing = self._coordinator.list(DRAIN_PREFIX, deadline_ms=deadline.left_ms())
        return {r.key[len(DRAIN_PREFIX) :]: _decode_drain(r.value).incarnation for r in listing.records}

    def _shards_of(self, name: str) -> dict[str, Any]:
        """What a node still holds by the records; drained when that is nothing."""
        with self._runtime.lock:
            return drain_document(self._runtime.core.state.view, name)


def drain_document(view: ClusterView, name: str) -> dict[str, Any]:
    """How far the drain of a node has come, as the view has it."""
    owners = [view.owners[shard] for shard in range(SHARDS)]
    primary = sum(owner is not None and owner.primary == name for owner in owners)
    replica = sum(owner is not None and owner.primary != name and name in owner.replicas for owner in owners)
    draining = view.is_draining(name)
    return {
        "node": name,
        "live": view.is_live(name),
        "draining": draining,
        "primary": primary,
        "replica": replica,
        "drained": draining and primary == 0 and replica == 0,
    }


def namespace_document(namespace: Namespace) -> dict[str, Any]:
    """A namespace as JSON."""
    return {
        "name": namespace.name,
        **policy_document(namespace),
        "expiry_ms": namespace.expiry_ms,
        "generation": namespace.generation,
        "revision": namespace.revision,
        "dropped": namespace.dropped,
    }


def changed(before: Namespace, changes: Changes, cluster_factor: int) -> Namespace:
    """The namespace with the changes and a higher revision. Raises ConfigError for what does not fit together."""
    if before.level == Level.STRONG:
        for key in ("factor", "min_copies", "verify", "expiry"):
            if getattr(changes, key) is not None:
                raise ConfigError(
                    f"{key}: namespace {before.name!r} is strong, its records are kept by the coordinator"
                )
    if changes.verify not in (None, "pin", "entry"):
        raise ConfigError(f"verify: {changes.verify!r} is not one of pin, entry")
    if changes.owner:
        check_token("owner", changes.owner)
    fields: dict[str, Any] = {
        "factor": changes.factor,
        "min_copies": changes.min_copies,
        "verify_pin": None if changes.verify is None else changes.verify == "pin",
        "expiry_ms": None if changes.expiry is None else parse_expiry_ms(changes.expiry),
        "owner": changes.owner,
    }
    stated = {key: value for key, value in fields.items() if value is not None}
    if not stated:
        raise ConfigError(f"nothing to change: give one of {', '.join(CHANGEABLE)}")
    after = msgspec.structs.replace(before, revision=before.revision + 1, **stated)
    if after.factor < 1 or after.min_copies < 1:
        raise ConfigError(f"{'factor' if after.factor < 1 else 'min_copies'}: must be at least 1")
    check_namespace(after, cluster_factor)
    return after


class _Deadline:
    """Time that one command has left, over all its calls."""

    def __init__(self, deadline_ms: int) -> None:
        self._end = time.monotonic() + min(max(deadline_ms, 1), DEADLINE_MS_MAX) / 1000

    def left_ms(self) -> int:
        """At least 1. Raises Unavailable when it is over."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise Unavailable("the deadline was over before it was done; look, and try again with a longer one")
        return max(1, int(left * 1000))


def _decoded(arguments: bytes, kind: type[Arguments]) -> Arguments:
    try:
        return msgspec.json.decode(arguments or b"{}", type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"arguments: {' '.join(str(error).split())[:200]}") from None


def _converted(values: dict[str, Any], kind: type[Arguments]) -> Arguments:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"changes: {' '.join(str(error).split())[:200]}") from None


def _failed(text: str, *, retry: bool) -> AdminReply:
    if len(text) > ERROR_CHARS_MAX:
        # The beginning names the key, the end says what to do; between them stands what the caller sent.
        half = ERROR_CHARS_MAX // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return AdminReply(False, msgspec.json.encode({"retry": retry}), text)
