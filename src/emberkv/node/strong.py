"""Strong namespaces: small records that are linearizable, one at a time, on the coordinator's own engine (design 2).

They never touch the core: no shard, no primary, no lease. What one commit of the store decides is the truth, and what
the store does not say is not guessed. The store is a port with three verbs, so that the simulator runs this file too.

    put, delete:   fresh ---> Replace ---> COMMITTED: STORED        REFUSED: SUPERSEDED(what is there)
                                  |  UNKNOWN                        no store: REFUSED(unreachable), nothing written
                                  v
                   retry ---> Look: the record carries my put_id? ---> STORED, else UNKNOWN

Laws: a write that may have been applied is never sent again: a retry without a condition only looks. Every write names
a revision or is blind; a revision names one value for ever, so a conditional write applies at most once. Each record
carries the put_id of its writer, so that reading back settles an unknown outcome, and its checksum, so that a bad page
is a miss and not a value. Nothing waits past the deadline, except for the one sync of the disk that is under way.
Requests are dialogues, generators that yield what the store has to do and are sent its outcome; `get` and `put` drive
them on the calling thread.
Limits: 512 KiB a record. A version is (1, revision of the store); (1, 0) says "absent". A blind delete whose retry
finds nothing stays UNKNOWN: nobody can say any more who deleted it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from emberkv.errors import CoordinatorError, StoreFull
from emberkv.messages import BlockInfo, PutItem
from emberkv.ports import CommitResult, CommitStatus, Record
from emberkv.types import (
    CHECKSUM_BYTES,
    NO_VERSION,
    PUT_ID_BYTES,
    MissReason,
    PutOutcome,
    PutStatus,
    RefuseReason,
    Version,
    checksum,
)

STRONG_EPOCH: Final = 1
"""Epoch of every strong version: revisions of one store never go back, so no epoch has to tell two of them apart."""
ABSENT: Final = Version(STRONG_EPOCH, 0)
"""As `seen`: store only if there is no record. As an outcome's version: there is none."""
DATA_BYTES_MAX: Final = 512 << 10
DELETE_TRIES: Final = 8
"""A blind delete looks and deletes what it saw; so many writers between the two are more than a cache's ledger has."""
_FORMAT: Final = b"\x01"
_HEADER_BYTES: Final = len(_FORMAT) + PUT_ID_BYTES + CHECKSUM_BYTES

_UNKNOWN: Final = PutOutcome(PutStatus.UNKNOWN)
_UNREACHABLE: Final = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.UNREACHABLE)
_NO_SPACE: Final = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.NO_SPACE)
_LATE: Final = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.DEADLINE)
_TOO_LARGE: Final = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.TOO_LARGE)
_BAD_BYTES: Final = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.CHECKSUM)


class Store(Protocol):
    """What holds the records: coord.StrongStore, or the simulator's. Calls end by `deadline_ms` and raise
    CoordinatorError when it is known that nothing was read or written, StoreFull among them."""

    def get(self, key: str, *, deadline_ms: int) -> Record | None:
        """The key's record as of now, or None."""
        ...

    def put_if(self, key: str, value: bytes, revision: int | None, *, deadline_ms: int) -> CommitResult:
        """Stores if the key's revision is `revision` (0: absent; None: whatever it is); durable when it returns."""
        ...

    def delete(self, key: str, revision: int | None, *, deadline_ms: int) -> CommitResult:
        """Deletes, under the same condition."""
        ...


class Look(NamedTuple):
    """Asks the store for a record; it is sent back, or None."""

    key: str


class Replace(NamedTuple):
    """Asks the store to put (or, with value None, delete) a record; the CommitResult is sent back."""

    key: str
    value: bytes | None
    revision: int | None


T = TypeVar("T")
Dialogue = Generator[Look | Replace, Any, T]
"""Yields what the store has to do; is sent its outcome, or thrown the CoordinatorError that it ended with."""


class Found(NamedTuple):
    """A decoded record. `data` is its value; None when the bytes do not match their checksum."""

    put_id: bytes
    version: Version
    data: memoryview | None


def record_key(scope: bytes, key: bytes) -> str:
    """Key of a record in the store: hex of the namespace's scope, then hex of the block key."""
    return scope.hex() + key.hex()


def encode_value(put_id: bytes, data: bytes | bytearray | memoryview) -> bytes:
    """A record's value: format (1), put_id (24), checksum (16), data."""
    return b"".join((_FORMAT, put_id, checksum(data), data))


def decode_value(record: Record) -> Found:
    """The parts of a record's value, checked."""
    view = memoryview(record.value)
    version = Version(STRONG_EPOCH, record.revision)
    put_id = bytes(view[len(_FORMAT) : len(_FORMAT) + PUT_ID_BYTES])
    data = view[_HEADER_BYTES:]
    whole = len(view) >= _HEADER_BYTES and bytes(view[: len(_FORMAT)]) == _FORMAT
    stated = bytes(view[_HEADER_BYTES - CHECKSUM_BYTES : _HEADER_BYTES])
    return Found(put_id, version, data if whole and checksum(data) == stated else None)


class StrongRecords:
    """The records of all strong namespaces, as one node serves them."""

    def __init__(self, store: Store, now_ns: Callable[[], int]) -> None:
        self._store = store
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def counters(self) -> dict[str, int]:
        """Outcomes since the start, by name."""
        with self._lock:
            return dict(self._counts)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    # -- on the calling thread -----------------------------------------------------------------------------------

    def get(self, scope: bytes, key: bytes, deadline_ns: int) -> tuple[BlockInfo, memoryview | None]:
        """One record, or the miss and its reason."""
        return self._drive(self.reading(scope, key, deadline_ns), deadline_ns)

    def put(
        self, scope: bytes, item: PutItem, data: memoryview | bytes | None, deadline_ns: int, *, fresh: bool
    ) -> PutOutcome:
        """Stores one record; `data` None deletes it. `item.seen` is the condition: NO_VERSION none, ABSENT no record,
        else the version that must be there. Not `fresh`: a retry."""
        return self._drive(self.writing(scope, item, data, deadline_ns, fresh=fresh), deadline_ns)

    def resolve(self, scope: bytes, key: bytes, put_id: bytes, deadline_ns: int) -> PutOutcome:
        """What became of a put whose outcome is unknown: STORED if the record there is its own, else UNKNOWN still."""
        return self._drive(self._settling(record_key(scope, key), put_id, deadline_ns), deadline_ns)

    def _drive(self, dialogue: Dialogue[T], deadline_ns: int) -> T:
        sent: Any = None
        failure: CoordinatorError | None = None
        while True:
            try:
                wanted = dialogue.send(sent) if failure is None else dialogue.throw(failure)
            except StopIteration as done:
                result: T = done.value
                return result
            sent, failure = None, None
            try:
                sent = self._perform(wanted, deadline_ns)
            except CoordinatorError as error:
                failure = error

    def _perform(self, wanted: Look | Replace, deadline_ns: int) -> Record | CommitResult | None:
        left_ms = max(1, (deadline_ns - self._now_ns() + 999_999) // 1_000_000)
        if isinstance(wanted, Look):
            return self._store.get(wanted.key, deadline_ms=left_ms)
        if wanted.value is None:
            return self._store.delete(wanted.key, wanted.revision, deadline_ms=left_ms)
        return self._store.put_if(wanted.key, wanted.value, wanted.revision, deadline_ms=left_ms)

    # -- dialogues -----------------------------------------------------------------------------------------------

    def reading(self, scope: bytes, key: bytes, deadline_ns: int) -> Dialogue[tuple[BlockInfo, memoryview | None]]:
        """`get` as a dialogue."""
        if self._now_ns() >= deadline_ns:
            return self._miss(MissReason.DEADLINE)
        try:
            record = yield Look(record_key(scope, key))
        except CoordinatorError:
            return self._miss(MissReason.UNREACHABLE)
        if record is None:
            return self._miss(MissReason.ABSENT)
        found = decode_value(record)
        if found.data is None:
            return self._miss(MissReason.CHECKSUM)
        self._count("strong_hits")
        return BlockInfo(0, found.version, found.data.nbytes, checksum(found.data)), found.data

    def _miss(self, reason: MissReason) -> tuple[BlockInfo, None]:
        self._count(f"strong_miss_{reason.name.lower()}")
        return BlockInfo(int(reason)), None

    def writing(
        self, scope: bytes, item: PutItem, data: memoryview | bytes | None, deadline_ns: int, *, fresh: bool
    ) -> Dialogue[PutOutcome]:
        """`put` as a dialogue."""
        outcome = yield from self._writing(record_key(scope, item.key), item, data, deadline_ns, fresh)
        self._count(f"strong_{outcome.status.name.lower()}")
        return outcome

    def _writing(
        self, key: str, item: PutItem, data: memoryview | bytes | None, deadline_ns: int, fresh: bool
    ) -> Dialogue[PutOutcome]:
        if data is not None and len(data) > DATA_BYTES_MAX:
            return _TOO_LARGE
        if data is not None and any(item.checksum) and checksum(data) != item.checksum:
            return _BAD_BYTES
        if self._now_ns() >= deadline_ns:
            # Of a retry nobody knows whether its first send arrived.
            return _LATE if fresh else _UNKNOWN
        blind = item.seen == NO_VERSION
        if blind and not fresh:
            return (yield from self._settling(key, item.put_id, deadline_ns))
        if blind and data is None:
            return (yield from self._deleting(key, deadline_ns))
        if not blind and item.seen.epoch != STRONG_EPOCH:
            return (yield from self._refused(key, item.put_id, fresh, deadline_ns))
        value = None if data is None else encode_value(item.put_id, data)
        try:
            result: CommitResult = yield Replace(key, value, None if blind else item.seen.seq)
        except StoreFull:
            return _NO_SPACE if fresh else _UNKNOWN
        except CoordinatorError:
            return _UNREACHABLE if fresh else _UNKNOWN
        if result.status is CommitStatus.COMMITTED:
            return PutOutcome(PutStatus.STORED, Version(STRONG_EPOCH, result.revision), 1)
        if result.status is CommitStatus.UNKNOWN:
            return (yield from self._settling(key, item.put_id, deadline_ns))
        return (yield from self._refused(key, item.put_id, fresh, deadline_ns))

    def _refused(self, key: str, put_id: bytes, fresh: bool, deadline_ns: int) -> Dialogue[PutOutcome]:
        """The condition did not hold. At the first send that is certain; a retry may meet its own first send."""
        if not fresh:
            return (yield from self._settling(key, put_id, deadline_ns))
        try:
            record = yield Look(key)
        except CoordinatorError:
            return PutOutcome(PutStatus.SUPERSEDED)
        return PutOutcome(PutStatus.SUPERSEDED, _version_of(record))

    def _settling(self, key: str, put_id: bytes, deadline_ns: int) -> Dialogue[PutOutcome]:
        """Reads back. Another writer's record proves nothing: ours may have been there before it, or may still come."""
        if self._now_ns() >= deadline_ns:
            return _UNKNOWN
        try:
            record = yield Look(key)
        except CoordinatorError:
            return _UNKNOWN
        if record is not None and decode_value(record).put_id == put_id:
            return PutOutcome(PutStatus.STORED, _version_of(record), 1)
        return _UNKNOWN

    def _deleting(self, key: str, deadline_ns: int) -> Dialogue[PutOutcome]:
        """A blind delete, made of conditional ones, so that none can be applied late to a record that came after."""
        version = NO_VERSION
        for _ in range(DELETE_TRIES):
            try:
                record = yield Look(key)
                if record is None:
                    return PutOutcome(PutStatus.STORED, ABSENT, 1)
                version = _version_of(record)
                result: CommitResult = yield Replace(key, None, record.revision)
            except CoordinatorError:
                return _UNREACHABLE
            if result.status is CommitStatus.COMMITTED:
                return PutOutcome(PutStatus.STORED, Version(STRONG_EPOCH, result.revision), 1)
            if result.status is CommitStatus.UNKNOWN:
                return (yield from self._deleted(key, deadline_ns))
            if self._now_ns() >= deadline_ns:
                return _LATE
        return PutOutcome(PutStatus.SUPERSEDED, version)

    def _deleted(self, key: str, deadline_ns: int) -> Dialogue[PutOutcome]:
        """After an unknown outcome: if nothing is there now, then what this delete named can never come back."""
        if self._now_ns() >= deadline_ns:
            return _UNKNOWN
        try:
            record = yield Look(key)
        except CoordinatorError:
            return _UNKNOWN
        return PutOutcome(PutStatus.STORED, ABSENT, 1) if record is None else _UNKNOWN


def _version_of(record: Record | None) -> Version:
    return ABSENT if record is None else Version(STRONG_EPOCH, record.revision)
