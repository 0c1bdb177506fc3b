"""Messages that nodes and clients exchange, as plain data. wire/codec.py turns them into bytes and back.

Laws: payload never stands in a message; it follows the frame, in the order of the items that carry it. A batch holds
at most BATCH_KEYS_MAX items. Every message fits one frame; docs/PROTOCOL.md has the byte layouts.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import NamedTuple

import msgspec

from emberkv.types import NO_VERSION, EntryState, Level, Namespace, PutOutcome, Version

WIRE_VERSION = 1


class Kind(IntEnum):
    """Frame kinds. Numbers are for ever; a retired one is not reused."""

    HELLO = 1
    WELCOME = 2
    ERROR = 3
    GET = 10
    GET_REPLY = 11
    UNPIN = 12
    EXISTS = 13
    EXISTS_REPLY = 14
    PUT = 20
    PUT_REPLY = 21
    DELETE = 22
    REPLICATE = 30
    REPLICATE_REPLY = 31
    OFFER = 32
    OFFER_REPLY = 33
    VECTOR = 34
    VECTOR_REPLY = 35
    MAP = 40
    MAP_REPLY = 41
    STATUS = 42
    STATUS_REPLY = 43
    ADMIN = 44
    ADMIN_REPLY = 45


class Role(IntEnum):
    """What a connection is for, stated in HELLO."""

    CLIENT = 1
    FETCH = 2
    """A peer's read connection: GET only, answered from this node's tiers alone."""
    STREAM = 3
    """A peer's in-order connection: PUT (forwarded), REPLICATE, VECTOR, OFFER."""


class GetFlag(IntFlag):
    """Options of a GET."""

    LOCAL_ONLY = 1
    """Answer from this node's tiers; never ask another node (a peer's fetch)."""
    PIN = 2
    """Local socket: answer with arena offsets and hold a pin, instead of payload."""
    FLOORS = 4
    """Session tokens: a version floor per key follows the keys; what is older is not served."""
    IF_NEWER = 8
    """Between nodes, with FLOORS: a copy that is exactly at the floor answers CURRENT and sends no bytes."""
    RELAY = 16
    """Between nodes: the asker reaches no replica itself; look where you can, but relay no further."""


class PutFlag(IntFlag):
    """Options of a PUT."""

    FRESH = 1
    """First send, never queued, within one RPC deadline: the primary stamps it unconditionally (design 3)."""
    HINT = 2
    """A replayed hint: may only fill."""
    FORWARD = 4
    """From an accepting node to the primary; is not forwarded again, except with RELAY."""
    RELAY = 8
    """With FORWARD: the sender does not reach the primary; pass it on, one hop and no more."""


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """First frame of every connection, from the side that opened it."""

    role: int
    wire_min: int
    wire_max: int
    cluster_id: str
    """Empty: any (a client that was given only an address)."""
    tenant: str
    node: str
    """Name of the peer that opens the connection; empty for clients."""
    incarnation: bytes
    """16 random bytes, one process life."""
    namespace: str = "default"
    """Empty: none; such a connection may ask for maps, status and administration, and carry peers' streams."""
    want_staging_bytes: int = 0
    generation: int = 0
    """Of the namespace, where a peer means a certain one: blocks of another generation are no answer. 0: any."""


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """Answer to HELLO. On the local socket the arena and staging descriptors travel with it, in this order."""

    wire: int
    cluster_id: str
    node: str
    incarnation: bytes
    namespace: Namespace
    arena_bytes: int = 0
    staging_bytes: int = 0
    pin_bytes_max: int = 0


class ErrorFrame(msgspec.Struct, frozen=True, array_like=True):
    """Last frame before the sender closes: one line that says what to do."""

    text: str
    refused: bool = False
    """True: retrying this endpoint is useless (HandshakeRefused)."""


class GetRequest(msgspec.Struct, gc=False):
    """Asks for blocks by key; answered by one GetReply with as many infos, payload of the hits behind it."""

    keys: list[bytes]
    deadline_ms: int = 1000
    level: int = int(Level.EVENTUAL)
    flags: int = 0
    part: int = 0
    floors: list[Version] = []
    """With FLOORS: one per key; NO_VERSION where the session has seen nothing."""


class BlockInfo(msgspec.Struct, gc=False, frozen=True):
    """What is known of one requested key. `reason` NONE means hit: `length` payload bytes follow (or `offset` in the
    arena for a pin)."""

    reason: int
    version: Version = NO_VERSION
    length: int = 0
    checksum: bytes = b"\0" * 16
    offset: int = 0


class GetReply(msgspec.Struct, gc=False):
    """Answer to GetRequest, same order. `pin` is the id to give back with Unpin; 0 when nothing is pinned."""

    infos: list[BlockInfo]
    pin: int = 0


class Unpin(msgspec.Struct, gc=False):
    """Gives pins back; no answer."""

    pins: list[int]


class ExistsRequest(msgspec.Struct, gc=False):
    """Asks which keys are present; changes nothing."""

    keys: list[bytes]
    deadline_ms: int = 1000
    flags: int = 0


class ExistsReply(msgspec.Struct, gc=False):
    """One MissReason per key; NONE means present."""

    reasons: list[int]


class PutItem(msgspec.Struct, gc=False):
    """One block of a PUT. `offset` is the staging offset on the local socket, else 0. A zero checksum means: the
    receiver takes it (local socket: the node checksums while it copies)."""

    key: bytes
    put_id: bytes
    length: int
    checksum: bytes = b"\0" * 16
    seen: Version = NO_VERSION
    depth: int = 0
    """Position of the block in its chain; deeper ones are evicted first."""
    part: int = 0
    parts: int = 1
    offset: int = 0


class PutRequest(msgspec.Struct, gc=False):
    """Stores blocks; payload of all items follows in order (TCP) or lies in staging (local socket)."""

    items: list[PutItem]
    level: int = int(Level.EVENTUAL)
    deadline_ms: int = 1000
    flags: int = int(PutFlag.FRESH)
    min_copies: int = 1
    scope: bytes = b""
    """Peer streams only: the 8-byte namespace scope of all items. Clients' scope follows from their connection."""
    delete: bool = False
    """DELETE: items carry no payload; the primary stamps tombstones."""


class PutReply(msgspec.Struct, gc=False):
    """Outcomes in the order of the request's items."""

    outcomes: list[PutOutcome]
    authorities: list[int] = []
    """Answers to a forward: the shard epoch under which each item was stamped, so that a node which knows of a newer
    one does not believe an old primary. Empty (all 0 on the wire): no primary speaks here."""


class ReplicaItem(msgspec.Struct, gc=False):
    """One stamped write on its way to a backup or learner."""

    key: bytes
    """40-byte internal key: scope + block key."""
    authority: int
    """The sender's epoch for the key's shard; the receiver's gate checks it."""
    version: Version
    put_id: bytes
    checksum: bytes
    prev: Version = NO_VERSION
    length: int = 0
    depth: int = 0
    state: int = int(EntryState.COMMITTED)
    parts: int = 1
    expiry_ms: int = 0
    """Wall-clock milliseconds; 0 never expires."""
    payload: bool = True
    """False: the receiver accepted this put itself and should still hold the bytes."""
    part: int = 0
    """Which part of the Block travels; 0 while all parts of a Block lie in one value."""
    skip: bool = False
    """The block's namespace wants fewer copies than the shard has replicas: process the write, keep no copy."""


class Replicate(msgspec.Struct, gc=False):
    """In-order stream of stamped writes, many shards in one frame; payload of items with `payload` follows."""

    items: list[ReplicaItem]
    fill: bool = False
    """True: catch-up of a learner; does not count for the stream order."""
    surplus: bool = False
    """True: from a replica to its primary, what it holds and the primary has not processed; `authority` is the
    primary's own epoch, which the replica follows."""


class ReplicaStatus(IntEnum):
    """What became of one replicated item."""

    STORED = 0
    FENCED = 1
    NO_SPACE = 2
    NEED_PAYLOAD = 3
    CHECKSUM = 4
    STALE = 5
    """A newer version of the key is here; counts as processed."""


class ReplicateReply(msgspec.Struct, gc=False):
    """One ReplicaStatus per item, and the highest epoch known for FENCED ones (0 else)."""

    statuses: list[int]
    epochs: list[int]


class OfferHead(msgspec.Struct, gc=False):
    """What a primary holds, in short."""

    key: bytes
    version: Version
    checksum: bytes


class Offer(msgspec.Struct, gc=False):
    """A primary tells a learner which entries of a shard exist, a page at a time; `last` closes the shard."""

    shard: int
    authority: int
    heads: list[OfferHead]
    last: bool = False


class OfferReply(msgspec.Struct, gc=False):
    """Indices of the heads whose bytes the learner wants; `fenced` with a higher epoch when it refuses."""

    wanted: list[int]
    fenced_epoch: int = 0


class Span(NamedTuple):
    """Sequence numbers first..last (both included) of one epoch."""

    epoch: int
    first: int
    last: int


class VectorItem(msgspec.Struct, gc=False):
    """What the primary of one shard has processed, for a replica to compare with its own."""

    shard: int
    authority: int
    floor: Version
    """What is at or below it and not held by the primary is gone for good: its tombstone may be forgotten."""
    spans: list[Span]
    adopt: bool = False
    """True: everything in `spans` was sent and answered before; take it as processed."""


class Vector(msgspec.Struct, gc=False):
    """A primary compares applied vectors with one replica, up to BATCH_KEYS_MAX shards and SPANS_MAX spans a frame."""

    items: list[VectorItem]


class VectorStatus(IntEnum):
    """What a replica answers to one item of a Vector."""

    SPANS = 0
    """`spans` is what this replica has processed: send what is missing."""
    FENCED = 1
    """The primary's authority is old (`epoch` says the highest known) or unheard of (0)."""
    LEARNING = 2
    """Nothing is known here, or too old: offer all heads."""
    BUSY = 3
    """What this replica has and the primary lacks is still under way: ask again."""


class VectorAnswer(msgspec.Struct, gc=False):
    """Answer to one VectorItem."""

    status: int
    epoch: int = 0
    spans: list[Span] = []


class VectorReply(msgspec.Struct, gc=False):
    """Answers in the order of the items."""

    answers: list[VectorAnswer]


SPANS_MAX = 4096
"""Spans in one Vector or VectorReply: 96 KiB, well inside a frame's body."""


class NodeAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a live node listens."""

    name: str
    tcp: str
    local: str = ""
    """Path of the Unix socket; empty when the node offers none."""
    host_id: str = ""
    """Boot id: equal means same machine, so the local socket can be used."""
    liveness_epoch: int = 0


class ShardOwner(msgspec.Struct, frozen=True, array_like=True):
    """Record own/<shard>: the one truth about who serves a shard (design 4)."""

    primary: str
    liveness_epoch: int
    epoch: int
    replicas: tuple[str, ...]
    """Includes the primary; those outside `in_sync` are learners."""
    in_sync: tuple[str, ...]
    former: tuple[str, ...] = ()


class LiveRecord(msgspec.Struct, frozen=True, array_like=True):
    """Record live/<node>: changes only at birth and death of an incarnation."""

    epoch: int
    incarnation: bytes
    address: NodeAddress
    dead: bool = False
    """An observer expired this incarnation."""


class HeartbeatRecord(msgspec.Struct, frozen=True, array_like=True):
    """Record hb/<node>: moves every heartbeat period."""

    liveness_epoch: int
    counter: int


class DrainRecord(msgspec.Struct, frozen=True, array_like=True):
    """Record drain/<node>: this life of the node gives its shards away and takes no new ones."""

    incarnation: bytes


class MapRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the cluster map if it is newer than `known_revision`."""

    known_revision: int = 0


class MapReply(msgspec.Struct, frozen=True, array_like=True):
    """Cluster map: live nodes and the owner of each shard (index = shard; None: vacant)."""

    revision: int
    nodes: tuple[NodeAddress, ...]
    owners: tuple[ShardOwner | None, ...]


class StatusRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the node's status document."""


class StatusReply(msgspec.Struct, frozen=True, array_like=True):
    """`document` is JSON; its fields are listed in docs/OPERATIONS.md."""

    document: bytes


class AdminRequest(msgspec.Struct, frozen=True, array_like=True):
    """An operator's command to a node: namespaces, drain. `arguments` is JSON."""

    verb: str
    arguments: bytes = b"{}"
    deadline_ms: int = 5000


class AdminReply(msgspec.Struct, frozen=True, array_like=True):
    """`document` is JSON when `ok`; otherwise `error` is one line that says what to do."""

    ok: bool
    document: bytes = b"{}"
    error: str = ""


Message = (
    Hello
    | Welcome
    | ErrorFrame
    | GetRequest
    | GetReply
    | Unpin
    | ExistsRequest
    | ExistsReply
    | PutRequest
    | PutReply
    | Replicate
    | ReplicateReply
    | Offer
    | OfferReply
    | Vector
    | VectorReply
    | MapRequest
    | MapReply
    | StatusRequest
    | StatusReply
    | AdminRequest
    | AdminReply
)
