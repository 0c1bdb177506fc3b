"""The client: batches of blocks in and out of the cache, from any thread.

Why it exists: engines and tools need one door that splits, retries, reconnects and counts, and never holds them up.
Laws: a missing or unreachable block is an outcome, not an error; ValueError is a bug of the caller, found before
anything is sent; every call ends by its deadline; after it ended nothing writes into the caller's buffers.
Limits: requests of 128 keys (larger batches are split); values up to the namespace's block size.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from emberkv.client.admin import Administration
from emberkv.client.checks import PutBlock, check_deadline, check_dest, check_items, check_keys
from emberkv.client.connection import Bytes
from emberkv.client.counters import Counters
from emberkv.client.jobs import JOB_BYTES_MAX, Job, JobQueue
from emberkv.client.loads import Load, LoadResult
from emberkv.client.pins import Pinned, not_pinned, pin_blocks
from emberkv.client.pool import SAVE, Pool
from emberkv.client.presence import present
from emberkv.client.routing import match, parse_endpoints
from emberkv.client.saves import UNREACHABLE, PutIds, Save
from emberkv.client.session import Carried, Session
from emberkv.client.sinks import NewSink, RowsSink
from emberkv.client.token import SessionToken
from emberkv.errors import EmberError, Unavailable
from emberkv.messages import (
    WIRE_VERSION,
    Hello,
    MapReply,
    PutItem,
    Role,
    StatusReply,
    StatusRequest,
)
from emberkv.net import now_ns
from emberkv.types import (
    BATCH_KEYS_MAX,
    BLOCK_BYTES_MAX,
    Hit,
    Level,
    Miss,
    MissReason,
    Namespace,
    PrefixMatch,
    PutOutcome,
    scope_of,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

CONNECT_TIMEOUT_MS: Final = 250
"""Connect and handshake, each: a hundred times what a live node needs, a quarter of a get's usual deadline."""
STAGING_BYTES: Final = 64 << 20

_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _renew_in_child() -> None:
    for client in list(_clients):
        client._renew()


os.register_at_fork(after_in_child=_renew_in_child)


class Client(Administration):
    """A connection to the cache, for many threads.

    `endpoints`: "unix:/path/node.sock", "tcp:host:port" or "host:port"; a list, or one string with commas. `namespace`
    and `tenant` name what is stored; `cluster_id` "" accepts any cluster. Sizes are bytes, times milliseconds.
    Raises ValueError for impossible arguments and HandshakeRefused when a node was reached and refuses this client
    (wrong cluster, tenant, namespace, version). Nodes that cannot be reached now are tried again in the background.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        namespace: str = "default",
        tenant: str = "default",
        cluster_id: str = "",
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        staging_bytes: int = STAGING_BYTES,
        job_bytes_max: int = JOB_BYTES_MAX,
        prefer_local: bool = True,
    ) -> None:
        check_deadline(connect_timeout_ms)
        self.namespace, self.tenant, self.cluster_id = namespace, tenant, cluster_id
        self._staging_bytes = staging_bytes
        self._job_bytes_max = job_bytes_max
        self.counters = Counters()
        self._renew()
        self._pool = Pool(
            parse_endpoints(endpoints),
            self._hello,
            self.counters,
            connect_timeout_ms=connect_timeout_ms,
            prefer_local=prefer_local,
        )
        self._pool.open(now_ns() + connect_timeout_ms * 1_000_000)
        _clients.add(self)

    def _renew(self) -> None:
        """A writer's life of its own: at the start, and in a forked child (two writers must not share put ids)."""
        self.counters.renew()
        self._put_ids = PutIds()
        self._jobs = JobQueue(self._run_puts, self._run_get_into, self._job_bytes_max)

    def _hello(self, lane: str) -> Hello:
        return Hello(
            Role.CLIENT,
            WIRE_VERSION,
            WIRE_VERSION,
            self.cluster_id,
            self.tenant,
            "",
            self._put_ids.incarnation,
            self.namespace,
            self._staging_bytes if lane == SAVE else 0,
        )

    def _geometry(self) -> Namespace | None:
        """The namespace as a node described it last, for policies change; None until one did."""
        welcome = self._pool.welcome()
        return welcome.namespace if welcome else None

    @property
    def policy(self) -> Namespace | None:
        """The namespace as a node described it when it was dialled last; None until one answered."""
        return self._geometry()

    @property
    def block_bytes_max(self) -> int:
        """Largest value that the namespace takes, in bytes."""
        namespace = self._geometry()
        return namespace.block_bytes_max if namespace else BLOCK_BYTES_MAX

    def _level(self, level: Level | int | None, token: SessionToken | None = None) -> int:
        if level is not None:
            return int(Level(level))
        namespace = self._geometry()
        usual = namespace.level if namespace else int(Level.EVENTUAL)
        return usual if token is None else max(usual, int(Level.SESSION))

    # -- sessions -----------------------------------------------------------------------------------------------------

    def session(self, token: SessionToken | bytes | str | None = None) -> Session:
        """A session that goes on with a token (its bytes or text will do) or begins anew.

        Raises ConfigError for a token that is corrupted, of a newer format or of another cluster.
        """
        if isinstance(token, str):
            token = SessionToken.from_text(token)
        elif token is not None and not isinstance(token, SessionToken):
            token = SessionToken.from_bytes(token)
        elif token is None:
            token = SessionToken()
        self._check_token(token)
        return Session(self, token)

    def _check_token(self, token: SessionToken | None) -> None:
        """Refuses a token of another cluster as soon as ours is known; does not wait."""
        welcome = self._pool.welcome()
        if token is not None and welcome is not None:
            token.bind(welcome.cluster_id)

    def _carry(self, token: SessionToken, keys: Sequence[bytes], deadline_ns: int) -> Carried | None:
        """The token as one call carries it; None when no node ever said which cluster and namespace this is, without
        which it would not be known what the token says of these keys. Raises ConfigError."""
        if self._pool.welcome() is None:
            self._pool.refresh_map(deadline_ns)
        welcome = self._pool.welcome()
        if welcome is None:
            return None
        token.bind(welcome.cluster_id)
        return Carried(token, self._scope, keys)

    def _scope(self) -> bytes:
        """What stands before this client's keys in a token; only after a node was reached."""
        namespace = self._geometry()
        assert namespace is not None
        return scope_of(namespace.name, namespace.generation, self.tenant)

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_many(
        self,
        keys: Sequence[bytes],
        *,
        deadline_ms: int = 1000,
        level: Level | int | None = None,
        token: SessionToken | None = None,
    ) -> list[Hit | Miss]:
        """A Hit or a Miss with its reason per key, in order. The bytes are copies that the caller owns.

        With a `token`, nothing older than what its session saw is a hit, and what is found enters it; the level is then
        at least `session` unless it is stated. Raises ConfigError for a token of another cluster, as all verbs do.
        """
        deadline_ns = now_ns() + check_deadline(deadline_ms)
        sink = NewSink(len(keys))
        load = self._load(check_keys(keys), sink, deadline_ns, level, token)
        found: list[Hit | Miss] = []
        for reason, version, data in zip(load.reasons, load.versions, sink.data, strict=True):
            if reason or data is None:
                found.append(Miss(reason, version))
            else:
                found.append(Hit(data, version))
        return found

    def get_into(
        self,
        keys: Sequence[bytes],
        dest: Bytes,
        *,
        deadline_ms: int = 1000,
        level: Level | int | None = None,
        token: SessionToken | None = None,
    ) -> LoadResult:
        """Loads blocks of equal size into the rows of `dest` (uint8 [>= len(keys), block_bytes], C-contiguous)."""
        deadline_ns = now_ns() + check_deadline(deadline_ms)
        checked = check_keys(keys)
        check_dest(dest, len(checked), self.block_bytes_max)
        return self._run_get_into(checked, dest, deadline_ns, level, token)

    def _run_get_into(
        self, keys: list[bytes], dest: Bytes, deadline_ns: int, level: Level | int | None, token: SessionToken | None
    ) -> LoadResult:
        load = self._load(keys, RowsSink(dest), deadline_ns, level, token)
        usable = next((at for at, reason in enumerate(load.reasons) if reason), len(keys))
        return LoadResult(usable, load.reasons, load.gil_returns)

    def _load(
        self, keys: list[bytes], sink: Any, deadline_ns: int, level: Level | int | None, token: SessionToken | None
    ) -> Load:
        carried = self._carry(token, keys, deadline_ns) if token is not None else None
        load = Load(self._pool, keys, sink, deadline_ns, self._level(level, token), carried.floors if carried else ())
        if keys:
            if carried is not None or token is None:
                load.run()
            if carried is not None:
                carried.saw(load.reasons, load.versions)
            self.counters.load(load.reasons, load.gil_returns)
            if load.tries > 1:
                self.counters.add("retries", load.tries - 1)
        return load

    def pin_many(
        self,
        keys: Sequence[bytes],
        *,
        deadline_ms: int = 1000,
        level: Level | int | None = None,
        token: SessionToken | None = None,
    ) -> Pinned:
        """Pins up to 128 blocks in the near node's memory and shows them in place; see Pinned. Local sockets only."""
        deadline_ns = now_ns() + check_deadline(deadline_ms)
        checked = check_keys(keys)
        if len(checked) > BATCH_KEYS_MAX:
            raise ValueError(f"{len(checked)} keys, one pin holds at most {BATCH_KEYS_MAX}")
        carried = self._carry(token, checked, deadline_ns) if token is not None else None
        if carried is None and token is not None:
            pinned = not_pinned(len(checked), MissReason.UNREACHABLE)
        else:
            floors = carried.floors if carried is not None else ()
            pinned = pin_blocks(self._pool, checked, deadline_ns, self._level(level, token), floors)
        if carried is not None:
            for index in carried.saw(pinned.reasons, pinned.versions):
                pinned.views[index] = None
        self.counters.load(pinned.reasons, 0)
        return pinned

    def exists_many(self, keys: Sequence[bytes], *, deadline_ms: int = 1000) -> list[bool]:
        """Whether each key is present somewhere; changes nothing. False also when nobody could be asked."""
        deadline_ns = now_ns() + check_deadline(deadline_ms)
        return present(self._pool, check_keys(keys), deadline_ns)

    def match_prefix(self, keys: Sequence[bytes], *, deadline_ms: int = 1000) -> PrefixMatch:
        """How many leading keys are present, and which later ones are not; changes nothing."""
        return match(self.exists_many(keys, deadline_ms=deadline_ms))

    # -- writing ------------------------------------------------------------------------------------------------------

    def put_many(
        self,
        items: Sequence[tuple[bytes, ReadableBuffer] | PutBlock],
        *,
        level: Level | int | None = None,
        deadline_ms: int = 1000,
        min_copies: int = 1,
        token: SessionToken | None = None,
    ) -> list[PutOutcome]:
        """Stores blocks; an outcome per item, in order. The buffers may be reused when this returns.

        With a `token`, versions that were stored enter it; the level is then at least `session` unless it is stated.
        """
        deadline_ns = now_ns() + check_deadline(deadline_ms)
        made, views = self._items(items, min_copies)
        return self._run_puts(made, views, level, deadline_ns, min_copies, token)

    def _items(
        self, items: Sequence[tuple[bytes, ReadableBuffer] | PutBlock], min_copies: int
    ) -> tuple[list[PutItem], list[memoryview]]:
        if not 1 <= min_copies <= 255:
            raise ValueError(f"min_copies is {min_copies}, it must be 1 to 255")
        return check_items(items, self.block_bytes_max)

    def _run_puts(
        self,
        items: list[PutItem],
        views: list[memoryview],
        level: Level | int | None,
        deadline_ns: int,
        min_copies: int,
        token: SessionToken | None,
        delete: bool = False,
    ) -> list[PutOutcome]:
        if not items:
            return []
        carried = self._carry(token, [item.key for item in items], deadline_ns) if token is not None else None
        if carried is not None:
            carried.known_to(items)
        elif token is not None:
            refused = [UNREACHABLE] * len(items)
            self.counters.save(refused)
            return refused
        for item, put_id in zip(items, self._put_ids.take(len(items)), strict=True):
            item.put_id = put_id
        save = Save(
            self._pool,
            items,
            views,
            level=self._level(level, token),
            deadline_ns=deadline_ns,
            min_copies=min_copies,
            delete=delete,
        )
        outcomes = save.run()
        if carried is not None:
            carried.wrote(outcomes)
        self.counters.save(outcomes)
        if save.retries:
            self.counters.add("retries", save.retries)
        return outcomes

    def delete_many(
        self,
        keys: Sequence[bytes],
        *,
        level: Level | int | None = None,
        deadline_ms: int = 1000,
        token: SessionToken | None = None,
    ) -> list[PutOutcome]:
        """Deletes blocks; the primary stamps tombstones. An outcome per key, in order."""
        deadline_ns = now_ns() + check_deadline(deadline_ms)
        items = [PutItem(key, b"", 0) for key in check_keys(keys)]
        return self._run_puts(items, [], level, deadline_ns, 1, token, delete=True)

    # -- in the background --------------------------------------------------------------------------------------------

    def submit_put(
        self,
        items: Sequence[tuple[bytes, ReadableBuffer] | PutBlock],
        *,
        level: Level | int | None = None,
        deadline_ms: int = 10_000,
        min_copies: int = 1,
        token: SessionToken | None = None,
    ) -> Job[list[PutOutcome]]:
        """Enqueues a save and returns at once (<= 1 ms); the buffers must stay unchanged until the job is done.

        A save that finds the queue full is dropped: its outcomes are REFUSED (STAGING_FULL).
        """
        deadline_ns = now_ns() + check_deadline(deadline_ms)
        made, views = self._items(items, min_copies)
        self._check_token(token)
        job = self._jobs.submit_put(made, views, level, deadline_ns, min_copies, token)
        if job.dropped:
            self.counters.save(job.result())
        return job

    def submit_get(
        self,
        keys: Sequence[bytes],
        dest: Bytes,
        *,
        deadline_ms: int = 1000,
        level: Level | int | None = None,
        token: SessionToken | None = None,
    ) -> Job[LoadResult]:
        """Enqueues a `get_into`; `dest` belongs to the job until it is done. The deadline runs from now."""
        deadline_ns = now_ns() + check_deadline(deadline_ms)
        checked = check_keys(keys)
        check_dest(dest, len(checked), self.block_bytes_max)
        self._check_token(token)
        return self._jobs.submit_get(checked, dest, deadline_ns, level, token)

    def poll(self) -> list[Job[Any]]:
        """Jobs that ended since the last poll, in the order in which they ended. Does not wait."""
        return self._jobs.poll()

    # -- about the cluster --------------------------------------------------------------------------------------------

    def status(self, *, deadline_ms: int = 1000) -> dict[str, Any]:
        """The status document of the node that answers first. Raises Unavailable when none does."""
        deadline_ns = now_ns() + check_deadline(deadline_ms)
        for node in self._pool.candidates():
            try:
                document: dict[str, Any] = json.loads(
                    self._pool.ask(node, StatusRequest(), StatusReply, deadline_ns).document
                )
            except EmberError:
                continue
            return document
        raise Unavailable("no node answers: " + self._pool.reasons())

    def cluster_map(self, *, deadline_ms: int = 1000) -> MapReply:
        """The newest cluster map, or the last known one. Raises Unavailable when there never was one."""
        self._pool.refresh_map(now_ns() + check_deadline(deadline_ms))
        if self._pool.cluster is None:
            raise Unavailable("no node answers: " + self._pool.reasons())
        return self._pool.cluster

    def close(self) -> None:
        """Ends background work and all connections. Jobs that have not begun end as refused or missed. Idempotent."""
        self._jobs.close()
        self._pool.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
