"""Everything that can happen to a node, as plain data. The core's only input.

Laws: an event carries the time at which it happened (`now_ns`, CLOCK_BOOTTIME) and everything that chance or I/O
produced. Keys in events are internal: 8-byte scope + 32-byte block key.
"""

from __future__ import annotations

import msgspec

from emberkv.messages import (
    BlockInfo,
    Offer,
    OfferReply,
    PutItem,
    PutReply,
    ReplicaItem,
    ReplicateReply,
    Vector,
    VectorReply,
)
from emberkv.ports import CommitStatus, Record, Slot
from emberkv.types import Version


class Event(msgspec.Struct):
    """Base of all events. `now_ns` is local CLOCK_BOOTTIME in nanoseconds."""

    now_ns: int


class Tick(Event):
    """Time passed. `wall_ms` is the wall clock, used for nothing but the expiry of blocks; 0: unchanged."""

    wall_ms: int = 0


class Get(Event):
    """A read of up to 128 blocks arrived."""

    op: int
    keys: list[bytes]
    deadline_ns: int
    session: bool = False
    """False: an eventual read, which may also see PENDING blocks of this node."""
    local_only: bool = False
    verify: bool = False
    """Check bytes before they are answered (namespace `verify=pin`)."""
    floors: list[Version] = []
    """One per key, or empty: a session's token. What is older is not served."""
    if_newer: bool = False
    """A peer asks: what is exactly at the floor answers CURRENT, without bytes."""
    relayed: bool = False
    """Asked on behalf of another node: relay no further."""


class Verified(Event):
    """The checksums asked for by effect Verify were computed; `bad` are indices into the op's keys."""

    op: int
    bad: list[int]


class Fetched(Event):
    """A peer answered (or failed) effect Fetch. `slots[i]` holds verified bytes exactly when infos[i] is a hit."""

    op: int
    peer: str
    indices: list[int]
    infos: list[BlockInfo]
    slots: list[Slot | None]
    elapsed_ns: int


class Loaded(Event):
    """Effect Load ended. `slots[i]` holds verified bytes exactly when infos[i] is a hit; `expiry_ms[i]` and `depth[i]`
    are those of the block."""

    op: int
    indices: list[int]
    infos: list[BlockInfo]
    slots: list[Slot | None]
    expiry_ms: list[int]
    depth: list[int]


class Reserve(Event):
    """Runtime needs room for bytes that a peer is about to send for a Fetch; answered by effect Reserved."""

    lengths: list[int]


class Unref(Event):
    """References to slots are given back (reply sent, pin ended, send finished or failed)."""

    slots: list[Slot]


class Exists(Event):
    """Which keys are present here? Changes nothing. Answered by effect ExistsDone."""

    op: int
    keys: list[bytes]


class PutBegin(Event):
    """A put arrived; room is needed before its bytes can be read. Answered by effect Fill (or PutDone for a delete)."""

    op: int
    keys: list[bytes]
    items: list[PutItem]
    deadline_ns: int
    session: bool
    fresh: bool
    min_copies: int
    from_peer: str
    """Name of the forwarding node, or empty when a client speaks to this node."""
    delete: bool = False
    strong: bool = False
    """Asked for a level that blocks do not have: refused, never taken for a lower one."""
    relay: bool = False
    """A forward whose sender does not reach the primary: pass it on."""


class VectorArrived(Event):
    """A primary compares applied vectors."""

    op: int
    peer: str
    vector: Vector


class VectorAnswered(Event):
    """A replica answered a comparison of applied vectors."""

    peer: str
    request: int
    reply: VectorReply


class PutFilled(Event):
    """Bytes of a put are in the slots; `checksums[i]` was taken from them, None where they were not received whole
    or did not match what the sender stated."""

    op: int
    checksums: list[bytes | None]


class ReplicaBegin(Event):
    """A stream of stamped writes arrived; answered by effect Fill."""

    op: int
    peer: str
    items: list[ReplicaItem]
    fill: bool
    surplus: bool = False


class ReplicaFilled(Event):
    """Bytes of a stream are in the slots; None as in PutFilled."""

    op: int
    checksums: list[bytes | None]


class OfferArrived(Event):
    """A primary offers what it holds of a shard."""

    op: int
    peer: str
    offer: Offer


class PutAnswered(Event):
    """The primary answered a forwarded put."""

    peer: str
    request: int
    reply: PutReply


class ReplicateAnswered(Event):
    """A backup answered a stream message."""

    peer: str
    request: int
    reply: ReplicateReply


class OfferAnswered(Event):
    """A learner answered an offer."""

    peer: str
    request: int
    reply: OfferReply


class PeerUp(Event):
    """The stream connection to a peer is open."""

    peer: str


class PeerDown(Event):
    """The stream connection to a peer ended: whatever was not answered may or may not have arrived."""

    peer: str


class Records(Event):
    """Coordinator records changed. `full`: this is everything there is."""

    records: list[Record]
    deleted: list[str]
    revision: int
    full: bool


class Committed(Event):
    """A commit ended. `sent_ns` is the time before it was sent."""

    op: int
    status: CommitStatus
    revision: int
    sent_ns: int


class PutAborted(Event):
    """The sender of a put vanished before its bytes were whole."""

    op: int
