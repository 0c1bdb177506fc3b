"""Everything the core can ask the runtime to do, as plain data. The core's only output.

Laws: effects are batches; slots in an effect carry one reference each, which whoever performs the effect gives back
with event Unref (Fill: with PutFilled/ReplicaFilled, which pass the slots back implicitly).
"""

from __future__ import annotations

import msgspec

from emberkv.messages import BlockInfo, Message, OfferReply, ReplicateReply, VectorReply
from emberkv.ports import Compare, Saved, Slot, Write
from emberkv.types import PutOutcome, Version


class Effect(msgspec.Struct):
    """Base of all effects."""


class Send(Effect):
    """Send a message to a peer on its in-order stream, with the payload of `slots` behind it."""

    peer: str
    request: int
    message: Message
    slots: list[Slot]


class Fetch(Effect):
    """Read blocks from a peer; the outcome comes back as event Fetched."""

    op: int
    peer: str
    indices: list[int]
    keys: list[bytes]
    session: bool
    deadline_ns: int
    floors: list[Version] = []
    """One per key, or empty: what is older is no answer."""
    if_newer: bool = False
    """What is exactly at its floor answers CURRENT, without bytes."""
    relay: bool = False
    """Ask the peer to look elsewhere too: we reach nobody better."""


class Load(Effect):
    """Read blocks from this node's own disk; the outcome comes back as event Loaded."""

    op: int
    indices: list[int]
    keys: list[bytes]
    floors: list[Version]
    """One per key: what is older is not wanted."""
    deadline_ns: int
    wall_ms: int
    """What expires until then is not wanted."""
    if_newer: bool = False
    """As in Fetch."""


class Persist(Effect):
    """Write these blocks behind, on this node's own disk."""

    blocks: list[Saved]


class Verify(Effect):
    """Compute checksums of these slots and compare; the outcome comes back as event Verified."""

    op: int
    indices: list[int]
    slots: list[Slot]
    checksums: list[bytes]


class Reserved(Effect):
    """Answer to Reserve: one slot per length, None where there is no room."""

    slots: list[Slot | None]


class GetDone(Effect):
    """A read ended. `slots[i]` is set exactly for hits."""

    op: int
    infos: list[BlockInfo]
    slots: list[Slot | None]


class ExistsDone(Effect):
    """Answer to Exists: one MissReason number per key, and which peer may know more of which indices."""

    op: int
    reasons: list[int]
    ask: dict[str, list[int]]
    on_disk: dict[int, Version] = {}
    """Which indices this node's own disk may hold, and from which version on that counts."""
    wall_ms: int = 0


class Fill(Effect):
    """Read the bytes into these slots (None: the item is refused or carries no bytes; skip its bytes)."""

    op: int
    slots: list[Slot | None]


class PutDone(Effect):
    """A put ended. If `gate_ns` is set and has passed when the answer leaves, STORED becomes UNKNOWN: the lease ran
    out between the store and the acknowledgement."""

    op: int
    outcomes: list[PutOutcome]
    gate_ns: int = 0
    authorities: list[int] = []
    """Shard epoch under which each item was stamped here; 0 where it was not."""


class ReplicaDone(Effect):
    """A stream message was processed."""

    op: int
    reply: ReplicateReply


class OfferDone(Effect):
    """An offer was processed."""

    op: int
    reply: OfferReply


class VectorDone(Effect):
    """A comparison of applied vectors was processed."""

    op: int
    reply: VectorReply


class Commit(Effect):
    """Commit at the coordinator; the outcome comes back as event Committed."""

    op: int
    compares: list[Compare]
    writes: list[Write]


class Connect(Effect):
    """The set of peers changed: name -> TCP address."""

    peers: dict[str, str]


class Note(Effect):
    """One line for the operator's log. `alarm` marks what must never happen."""

    text: str
    alarm: bool = False
