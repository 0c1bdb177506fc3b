"""THE SEAM: what the core's runtime needs from the world, as Protocols of at most six verbs.

Laws: a port is implemented by a real part and by the simulator's part, and both pass one conformance suite.
A wait has a deadline; an outcome that is not known is reported as unknown, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, Protocol

import msgspec

from emberkv.messages import Message
from emberkv.types import MissReason, Version

COMMIT_OPERATIONS_MAX = 128
"""Compares and puts are bounded each by this, which is etcd's default `--max-txn-ops`."""


class Clock(Protocol):
    """Local time. CLOCK_BOOTTIME on a real node: it advances in suspend, unlike CLOCK_MONOTONIC."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin; never goes back."""
        ...


class Rng(Protocol):
    """Chance, so that a run can be replayed."""

    def token(self, count: int) -> bytes:
        """`count` random bytes."""
        ...

    def uniform(self) -> float:
        """A float in [0, 1)."""
        ...


class Record(msgspec.Struct, frozen=True, gc=False):
    """One key of the coordinator. `revision` is that of its last change (mod revision)."""

    key: str
    value: bytes
    revision: int


class Compare(msgspec.Struct, frozen=True, gc=False):
    """Guard of a commit: the key's mod revision must equal `revision`; 0 means the key must be absent."""

    key: str
    revision: int


class Write(msgspec.Struct, frozen=True, gc=False):
    """One change of a commit; `value` None deletes the key."""

    key: str
    value: bytes | None


class CommitStatus(Enum):
    """COMMITTED and REFUSED are known; UNKNOWN may have happened and is resolved by reading back."""

    COMMITTED = "committed"
    REFUSED = "refused"
    UNKNOWN = "unknown"


class CommitResult(msgspec.Struct, frozen=True, gc=False):
    """Outcome of a commit; `revision` is the store's after it (0 when unknown)."""

    status: CommitStatus
    revision: int = 0


class Listing(msgspec.Struct, frozen=True):
    """A consistent read of all records under a prefix, and the store revision it was taken at."""

    records: tuple[Record, ...]
    revision: int


class WatchBatch(msgspec.Struct, frozen=True):
    """Changes in revision order. `compacted` True: history was lost, list again and watch from there.

    A deleted key has value b"" and is listed in `deleted`.
    """

    records: tuple[Record, ...]
    deleted: tuple[str, ...]
    revision: int
    compacted: bool = False


class Coordinator(Protocol):
    """The one truth about who is alive and who owns what (design 4). Calls block up to `deadline_ms`.

    Raises CoordinatorError when the store cannot answer in time.
    """

    def get(self, key: str, *, deadline_ms: int) -> Record | None:
        """The key's record, or None."""
        ...

    def list(self, prefix: str, *, deadline_ms: int) -> Listing:
        """All records whose key starts with `prefix`."""
        ...

    def commit(self, compares: Sequence[Compare], writes: Sequence[Write], *, deadline_ms: int) -> CommitResult:
        """Atomically: if every compare holds, apply all writes at one new revision."""
        ...

    def watch(self, prefixes: Sequence[str], from_revision: int, *, deadline_ms: int) -> WatchBatch:
        """Changes with revision >= `from_revision` under any prefix; waits up to the deadline, then empty."""
        ...

    def generation(self) -> int:
        """High part of every epoch (types.EPOCH_GENERATION_SHIFT); rises when the store is created anew."""
        ...

    def close(self) -> None:
        """Releases the store; later calls raise CoordinatorError."""
        ...


class Slot(Protocol):
    """A place for one part's bytes in a tier. One owner; shared by reference count (runtime)."""

    offset: int
    length: int
    size_class: int
    """Bytes of the tier that it takes, at least `length`; 0 once it is released."""
    refs: int
    """Owners of the bytes: the entry, readers, senders. Only the core counts; 0 means released."""
    key: bytes
    """The core's note of the entry that owns it or owned it last; empty while it is being filled."""


class Tier(Protocol):
    """A place that holds bytes: reserve -> fill -> commit | abort (design 2)."""

    def reserve(self, length: int) -> Slot | None:
        """Room for `length` bytes, or None when there is none (the core then evicts)."""
        ...

    def view(self, slot: Slot) -> memoryview:
        """Writable view of exactly `length` bytes."""
        ...

    def release(self, slot: Slot) -> None:
        """Gives the room back; the slot must not be used again."""
        ...

    def usage(self) -> tuple[int, int]:
        """(bytes used, bytes configured)."""
        ...

    def size_class(self, length: int) -> int:
        """Bytes that a slot for `length` bytes takes. Releasing one slot makes room for one of its own class at once,
        and for another class only with all its neighbours (`slabs`)."""
        ...

    def slabs(self, length: int, cold: Iterable[Slot]) -> Iterator[Iterator[Slot]]:
        """Groups of slots to release together, each making room for `length` bytes of a class that has none; first that
        in which least is lost. `cold`, the coldest first: slots whose bytes would leave soon anyway."""
        ...


class Found(msgspec.Struct, frozen=True, gc=False):
    """A block on this node's own disk. `place` means something to the store that found it and to nobody else."""

    version: Version
    length: int
    checksum: bytes
    expiry_ms: int
    depth: int
    place: Any


class Saved(msgspec.Struct, gc=False):
    """A block on its way to disk, with one reference of its slot; `slot` None: the key was deleted at `version`."""

    key: bytes
    version: Version
    slot: Slot | None
    checksum: bytes
    prev: Version
    put_id: bytes
    depth: int
    parts: int
    expiry_ms: int


class BlockStore(Protocol):
    """Blocks on this node's own disks. Any thread may call it; no error of a disk ever comes out of it."""

    def find(self, keys: Sequence[bytes]) -> list[Found | None]:
        """What is here of each key, from the index alone. Nothing while the store is off."""
        ...

    def load(
        self, keys: Sequence[bytes], found: Sequence[Found], slots: Sequence[Slot], deadline_ns: int,
        on_late: Callable[[Slot], None],
    ) -> list[MissReason]:  # fmt: skip
        """Reads blocks into slots and checks their bytes; NONE where that worked, DEADLINE where it did not end in
        time: such a slot is the store's until it calls `on_late` with it, once, from any thread."""
        ...

    def save(self, blocks: Sequence[Saved]) -> None:
        """Takes blocks for writing behind; never blocks. The references come back through the `release` that the store
        was made with, when a block is durable or was given up."""
        ...

    def usage(self) -> tuple[int, int]:
        """(bytes on disk, bytes configured)."""
        ...

    def close(self) -> None:
        """Writes what is waiting, within a bound, and releases the disks."""
        ...


class Transport(Protocol):
    """Sends to peers; completions come back as events. Never blocks the caller."""

    def send(
        self, peer: str, request: int, message: Message, payload: Sequence[memoryview], on_sent: Callable[[], None]
    ) -> bool:
        """Queues a message with its payload by reference. `on_sent` is called exactly once if True is returned, when
        the payload is no longer needed. False: queue full or peer not connected."""
        ...

    def set_peers(self, peers: dict[str, str]) -> None:
        """Names and TCP addresses of the peers to stay connected to."""
        ...

    def close(self) -> None:
        """Ends all connections."""
        ...
