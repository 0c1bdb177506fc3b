"""Bodies of the node-to-node promises: REPLICATE, REPLICATE_REPLY, OFFER, OFFER_REPLY.

Why it exists: the stream of stamped writes and a learner's catch-up are as hot as the puts that cause them.
Laws: REPLICATE carries exactly the bytes of its items that say `payload`; keys here are internal, scope + block key.
Limits: BATCH_KEYS_MAX items per frame. Byte layouts: docs/PROTOCOL.md, chapter frames.
"""

from __future__ import annotations

import struct
from itertools import compress
from typing import Final

from emberkv.errors import InvariantViolation, ProtocolError
from emberkv.messages import (
    Kind,
    Offer,
    OfferHead,
    OfferReply,
    ReplicaItem,
    ReplicaStatus,
    Replicate,
    ReplicateReply,
)
from emberkv.types import BATCH_KEYS_MAX, KEY_BYTES, PUT_ID_BYTES, SCOPE_BYTES, SHARDS, EntryState
from emberkv.wire.frame import (
    check_count,
    check_epochs,
    check_lengths,
    check_most,
    check_payload,
    make_version,
    require_batch,
    unpack_head,
)

INTERNAL_KEY_BYTES: Final = SCOPE_BYTES + KEY_BYTES

_HEAD: Final = struct.Struct("<HBB4x")
"""count, fill, surplus."""
_ITEM: Final = struct.Struct("<40s24s16sQQQQQQIIHBBHBx")
"""key, put_id, checksum, authority, version, prev, expiry_ms, length, depth, parts, state, payload, part, skip."""
_COUNT: Final = struct.Struct("<H6x")
_OFFER: Final = struct.Struct("<QHHB3x")
"""authority, count, shard, last."""
_OFFERED: Final = struct.Struct("<40s16sQQ")
"""key, checksum, epoch, seq."""
_WANTED: Final = struct.Struct("<QH6x")
"""fenced_epoch, count."""

_STATUS_MAX: Final = int(max(ReplicaStatus))
_STATE_MAX: Final = int(max(EntryState))


def replicate_payload(message: Replicate) -> int:
    """Bytes that follow a REPLICATE."""
    return sum([item.length for item in message.items if item.payload])


def encode_replicate(message: Replicate) -> bytes:
    """Body of REPLICATE."""
    items = message.items
    require_batch(Kind.REPLICATE, len(items))
    if any(len(i.key) != INTERNAL_KEY_BYTES or len(i.put_id) != PUT_ID_BYTES for i in items):
        raise InvariantViolation(f"internal keys have {INTERNAL_KEY_BYTES} bytes and put ids {PUT_ID_BYTES}")
    pack = _ITEM.pack
    records = [
        pack(
            i.key,
            i.put_id,
            i.checksum,
            i.authority,
            *i.version,
            *i.prev,
            i.expiry_ms,
            i.length,
            i.depth,
            i.parts,
            i.state,
            i.payload,
            i.part,
            i.skip,
        )
        for i in items
    ]
    return b"".join((_HEAD.pack(len(items), message.fill, message.surplus), *records))


def decode_replicate(body: bytes, payload_len: int) -> Replicate:
    """Replicate from its body; raises ProtocolError."""
    count, fill, surplus = unpack_head(_HEAD, body, Kind.REPLICATE)
    check_count(Kind.REPLICATE, body, count, _HEAD.size, _ITEM.size)
    if fill > 1 or surplus > 1:
        raise ProtocolError(f"REPLICATE with fill {fill}, surplus {surplus}")
    if not count:
        check_payload(Kind.REPLICATE, payload_len, 0, may_be_none=False)
        return Replicate([], bool(fill), bool(surplus))
    (keys, put_ids, sums, authorities, epochs, seqs, prev_epochs, prev_seqs, expiries, lengths, depths, parts, states,
     flags, which, skips) = zip(*_ITEM.iter_unpack(body[_HEAD.size :]), strict=True)  # fmt: skip
    for column in (authorities, epochs, prev_epochs):
        check_epochs(Kind.REPLICATE, column)
    check_lengths(Kind.REPLICATE, lengths)
    check_most(Kind.REPLICATE, "state", states, _STATE_MAX)
    check_most(Kind.REPLICATE, "payload flag", flags, 1)
    check_most(Kind.REPLICATE, "skip flag", skips, 1)
    if not all(states) or not all(parts):
        raise ProtocolError("REPLICATE with an item of state 0 or of 0 parts")
    if any(part >= count for part, count in zip(which, parts, strict=True)):
        raise ProtocolError("REPLICATE with a part beyond its Block")
    check_payload(Kind.REPLICATE, payload_len, sum(compress(lengths, flags)), may_be_none=False)
    versions = map(make_version, zip(epochs, seqs, strict=True))
    prevs = map(make_version, zip(prev_epochs, prev_seqs, strict=True))
    items = map(
        ReplicaItem, keys, authorities, versions, put_ids, sums, prevs, lengths, depths, states, parts, expiries,
        map(bool, flags), which, map(bool, skips),
    )  # fmt: skip
    return Replicate(list(items), bool(fill), bool(surplus))


def encode_replicate_reply(message: ReplicateReply) -> bytes:
    """Body of REPLICATE_REPLY: the epochs, then a status byte per item."""
    count = len(message.statuses)
    require_batch(Kind.REPLICATE_REPLY, count)
    if len(message.epochs) != count:
        raise InvariantViolation("a REPLICATE_REPLY has one epoch per status")
    return _COUNT.pack(count) + struct.pack(f"<{count}Q", *message.epochs) + bytes(message.statuses)


def decode_replicate_reply(body: bytes, _payload_len: int) -> ReplicateReply:
    """ReplicateReply from its body; raises ProtocolError."""
    (count,) = unpack_head(_COUNT, body, Kind.REPLICATE_REPLY)
    check_count(Kind.REPLICATE_REPLY, body, count, _COUNT.size, 9)
    if not count:
        return ReplicateReply([], [])
    epochs = list(struct.unpack_from(f"<{count}Q", body, _COUNT.size))
    statuses = list(body[_COUNT.size + 8 * count :])
    check_epochs(Kind.REPLICATE_REPLY, epochs)
    check_most(Kind.REPLICATE_REPLY, "status", statuses, _STATUS_MAX)
    return ReplicateReply(statuses, epochs)


def encode_offer(message: Offer) -> bytes:
    """Body of OFFER."""
    require_batch(Kind.OFFER, len(message.heads))
    if any(len(head.key) != INTERNAL_KEY_BYTES for head in message.heads):
        raise InvariantViolation(f"offered keys have {INTERNAL_KEY_BYTES} bytes")
    pack = _OFFERED.pack
    records = [pack(head.key, head.checksum, *head.version) for head in message.heads]
    return b"".join((_OFFER.pack(message.authority, len(records), message.shard, message.last), *records))


def decode_offer(body: bytes, _payload_len: int) -> Offer:
    """Offer from its body; raises ProtocolError."""
    authority, count, shard, last = unpack_head(_OFFER, body, Kind.OFFER)
    check_count(Kind.OFFER, body, count, _OFFER.size, _OFFERED.size)
    check_epochs(Kind.OFFER, (authority,))
    if shard >= SHARDS or last > 1:
        raise ProtocolError(f"OFFER of shard {shard}, last {last}")
    if not count:
        return Offer(shard, authority, [], bool(last))
    keys, checksums, epochs, seqs = zip(*_OFFERED.iter_unpack(body[_OFFER.size :]), strict=True)
    check_epochs(Kind.OFFER, epochs)
    versions = map(make_version, zip(epochs, seqs, strict=True))
    return Offer(shard, authority, list(map(OfferHead, keys, versions, checksums)), bool(last))


def encode_offer_reply(message: OfferReply) -> bytes:
    """Body of OFFER_REPLY."""
    count = len(message.wanted)
    require_batch(Kind.OFFER_REPLY, count)
    return _WANTED.pack(message.fenced_epoch, count) + struct.pack(f"<{count}H", *message.wanted)


def decode_offer_reply(body: bytes, _payload_len: int) -> OfferReply:
    """OfferReply from its body; raises ProtocolError."""
    fenced_epoch, count = unpack_head(_WANTED, body, Kind.OFFER_REPLY)
    check_count(Kind.OFFER_REPLY, body, count, _WANTED.size, 2)
    check_epochs(Kind.OFFER_REPLY, (fenced_epoch,))
    wanted = list(struct.unpack_from(f"<{count}H", body, _WANTED.size))
    if count:
        check_most(Kind.OFFER_REPLY, "index", wanted, BATCH_KEYS_MAX - 1)
    return OfferReply(wanted, fenced_epoch)
