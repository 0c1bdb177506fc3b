"""Plain data that every room shares: keys, versions, levels, outcomes.

Why it exists: one vocabulary, importable from anywhere, that depends on nothing.
Laws: no I/O, no clock, no randomness; values are immutable; what can leave the process has a stated encoding.
Limits: sizes that the formats fix live here, with their reason.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import Final, NamedTuple, NewType

import msgspec
import xxhash

KEY_BYTES: Final = 32
"""A block key is a 32-byte digest: the width of SHA-256, which every engine's chained hash fits."""
SHARDS: Final = 256
"""Placement granularity: enough to spread over 100 nodes, few enough that own/ records fit three commits."""
BLOCK_BYTES_MAX: Final = 32 << 20
"""Largest value of one part; bounds what one frame may ask of a receiver."""
BATCH_KEYS_MAX: Final = 128
"""Most keys of one request; bounds the time that the core holds its lock (design 9)."""
SLOT_ALIGN: Final = 4096
"""Slots start on pages, so a vectored copy can address them as rows and O_DIRECT can fill them."""
CHECKSUM_BYTES: Final = 16
PUT_ID_BYTES: Final = 24
"""Random 128-bit incarnation of the writer, then a 64-bit counter."""

NodeName = NewType("NodeName", str)
Epoch = NewType("Epoch", int)
"""Shard or liveness epoch: (coordinator generation << 40) | counter, so it only ever rises."""
EPOCH_GENERATION_SHIFT: Final = 40
EPOCH_MAX: Final = (1 << 63) - 1


class Version(NamedTuple):
    """Total order of one key's values: the primary's shard epoch, then its sequence number.

    Encoded as two little-endian u64. (0, 0) is "no version": a PENDING block, below every stamped one.
    """

    epoch: int
    seq: int


NO_VERSION: Final = Version(0, 0)


class EntryState(IntEnum):
    """Life of an entry: PENDING -> COMMITTED -> (evicted | TOMBSTONE)."""

    PENDING = 1
    COMMITTED = 2
    TOMBSTONE = 3


class Level(IntEnum):
    """Where a put is acknowledged and what a get may be served from (design 2)."""

    EVENTUAL = 0
    SESSION = 1
    STRONG = 2


class MissReason(IntEnum):
    """Why a get was not a hit; one value per cause that an operator can act on."""

    NONE = 0
    ABSENT = 1
    PENDING = 2
    EVICTED = 3
    BEHIND = 4
    DELETED = 5
    DEADLINE = 6
    CHECKSUM = 7
    FENCED = 8
    BREAKER = 9
    SLOWER_THAN_RECOMPUTE = 10
    FINGERPRINT = 11
    QUOTA = 12
    UNREACHABLE = 13
    CURRENT = 14
    """Between nodes only: the copy that the asker named is the newest here too, so its bytes are not sent."""
    NO_NAMESPACE = 15
    """The namespace was dropped, or created anew since this connection was opened."""

    @property
    def label(self) -> str:
        """Lower-case word with dashes, as printed and as used for metric labels."""
        return self.name.lower().replace("_", "-")


class PutStatus(IntEnum):
    """How a put ended. QUEUED and ACCEPTED are not session acks: nothing enters a token."""

    ACCEPTED = 0
    """Eventual: the accepting node holds it; a hint carries it to the primary."""
    STORED = 1
    """Session: the primary stamped `version`; `copies` replicas hold it."""
    QUEUED = 2
    """Session asked, but no primary could be reached: accepted as eventual."""
    REFUSED = 3
    """Nothing was stored; `reason` says why."""
    SUPERSEDED = 4
    """A retry met a newer value; `version` is the current one; nothing was stored."""
    UNKNOWN = 5
    """The connection or the deadline ended first: it may or may not have been stored."""


class RefuseReason(IntEnum):
    """Why a put was refused."""

    NONE = 0
    NO_SPACE = 1
    FENCED = 2
    TOO_LARGE = 3
    BAD_KEY = 4
    NO_NAMESPACE = 5
    LEVEL_UNSUPPORTED = 6
    DEADLINE = 7
    STAGING_FULL = 8
    CHECKSUM = 9
    UNREACHABLE = 10
    EXPIRED = 11

    @property
    def label(self) -> str:
        """Lower-case word with dashes, as printed and as used for metric labels."""
        return self.name.lower().replace("_", "-")


class Hit(NamedTuple):
    """A block that was found. `data` is a read-only view of `length` bytes owned by the caller."""

    data: memoryview
    version: Version

    def __bool__(self) -> bool:
        return True


class Miss(NamedTuple):
    """A block that was not served, and why. `version` is set for DELETED and BEHIND when known."""

    reason: MissReason
    version: Version = NO_VERSION

    def __bool__(self) -> bool:
        return False


class PutOutcome(NamedTuple):
    """Result of one put; truthy when the bytes were accepted somewhere."""

    status: PutStatus
    version: Version = NO_VERSION
    copies: int = 0
    reason: RefuseReason = RefuseReason.NONE

    def __bool__(self) -> bool:
        return self.status in (PutStatus.ACCEPTED, PutStatus.STORED, PutStatus.QUEUED)


class PrefixMatch(NamedTuple):
    """Result of `match_prefix`: blocks usable from the start, and which later ones are missing.

    `usable` counts leading keys present; `holes` are the indices (ascending) of absent keys at or after it.
    """

    usable: int
    holes: tuple[int, ...]


class Namespace(msgspec.Struct, frozen=True, array_like=True):
    """Geometry and policy of one namespace, fixed at creation (design 8)."""

    name: str
    id: int = 1
    generation: int = 1
    level: int = int(Level.EVENTUAL)
    factor: int = 2
    min_copies: int = 1
    verify_pin: bool = True
    parts: int = 1
    block_bytes_max: int = BLOCK_BYTES_MAX
    expiry_ms: int = 0
    """Blocks are served for so long after they were stamped; 0: for ever."""
    owner: str = ""
    """Who answers for it; a name for people, not a right."""
    revision: int = 0
    """Rises with each change of the policy."""
    dropped: bool = False
    """Its keys are gone; created again, it goes on with the next generation."""


DEFAULT_NAMESPACE: Final = Namespace(name="default")


def shard_of(key: bytes) -> int:
    """Shard 0..255 of a block key, bare (32 bytes) or with its scope before it (40 bytes): the same for both, because
    clients route by the bare key. xxh3 because keys need not be uniform; the same in every process."""
    return xxhash.xxh3_64_intdigest(key[-KEY_BYTES:]) & (SHARDS - 1)


SCOPE_BYTES: Final = 8
DEFAULT_TENANT: Final = "default"


def scope_of(name: str, generation: int, tenant: str = DEFAULT_TENANT) -> bytes:
    """8 bytes in front of every internal key of a namespace: no client can name another namespace's keys, and a raised
    generation makes all old keys unreachable at once."""
    return hashlib.sha256(f"{tenant}\0{name}\0{generation}".encode()).digest()[:SCOPE_BYTES]


def checksum(data: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 of a part's payload, 16 bytes big-endian digest."""
    return xxhash.xxh3_128_digest(data)


def round_up(value: int, align: int = SLOT_ALIGN) -> int:
    """Smallest multiple of `align` that is >= value."""
    return (value + align - 1) // align * align
