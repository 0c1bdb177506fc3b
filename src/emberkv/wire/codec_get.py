"""Bodies of the read promise: GET, GET_REPLY, UNPIN, EXISTS, EXISTS_REPLY.

Why it exists: a get is the hottest exchange, so that its frames are fixed-size records that C code packs and slices.
Laws: the count and the length of the body must agree exactly; columns are checked as a whole, before an object is made.
Limits: BATCH_KEYS_MAX items per frame. Byte layouts: docs/PROTOCOL.md, chapter frames.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import chain
from typing import Final

from emberkv.errors import InvariantViolation, ProtocolError
from emberkv.messages import (
    BlockInfo,
    ExistsReply,
    ExistsRequest,
    GetFlag,
    GetReply,
    GetRequest,
    Kind,
    Unpin,
)
from emberkv.types import BATCH_KEYS_MAX, BLOCK_BYTES_MAX, EPOCH_MAX, KEY_BYTES, Level, MissReason, Version
from emberkv.wire.frame import (
    HEADER_BYTES,
    check_count,
    check_epochs,
    check_lengths,
    check_most,
    check_payload,
    make_version,
    require_batch,
    unpack_head,
)

_ASK: Final = struct.Struct("<IHHBxH4x")
"""deadline_ms, count, flags, level, part: front of GET and EXISTS."""
_REPLY: Final = struct.Struct("<QH6x")
"""pin, count: front of GET_REPLY."""
_INFO: Final = struct.Struct("<QQ16sQIB3x")
"""epoch, seq, checksum, offset, length, reason: one BlockInfo."""
_COUNT: Final = struct.Struct("<H6x")

_FLOOR_BYTES: Final = 16
_FLOORS: Final = int(GetFlag.FLOORS)
_IF_NEWER: Final = int(GetFlag.IF_NEWER)
_BETWEEN_NODES: Final = int(GetFlag.IF_NEWER | GetFlag.RELAY)
_ELSEWHERE: Final = int(GetFlag.LOCAL_ONLY | GetFlag.RELAY)
_GET_FLAGS: Final = int(GetFlag.LOCAL_ONLY | GetFlag.PIN | GetFlag.FLOORS | GetFlag.IF_NEWER | GetFlag.RELAY)
_EXISTS_FLAGS: Final = int(GetFlag.LOCAL_ONLY)
_LEVEL_MAX: Final = int(max(Level))
_REASON_MAX: Final = int(max(MissReason))
_CURRENT: Final = int(MissReason.CURRENT)
"""Answers a named version; EXISTS names none."""


def get_reply_bytes(key_count: int) -> int:
    """Exact size of header + body of a GET_REPLY to `key_count` keys, so that one receive takes it whole."""
    return HEADER_BYTES + _REPLY.size + key_count * _INFO.size


def _join_keys(kind: Kind, keys: list[bytes]) -> bytes:
    require_batch(kind, len(keys))
    if not set(map(len, keys)) <= {KEY_BYTES}:
        raise InvariantViolation(f"keys have {KEY_BYTES} bytes; callers check that")
    return b"".join(keys)


@lru_cache(maxsize=BATCH_KEYS_MAX + 1)
def _keys_layout(count: int) -> struct.Struct:
    """One layout per count, so that a single C call cuts all keys (twice as fast as slices)."""
    return struct.Struct(f"<{_ASK.size}x" + f"{KEY_BYTES}s" * count)


def _split_keys(kind: Kind, body: bytes, count: int) -> list[bytes]:
    check_count(kind, body, count, _ASK.size, KEY_BYTES)
    return list(_keys_layout(count).unpack(body))


def _contradict(flags: int) -> bool:
    """IF_NEWER compares with the floors; RELAY looks elsewhere, which LOCAL_ONLY forbids."""
    return bool(flags & _IF_NEWER and not flags & _FLOORS) or flags & _ELSEWHERE == _ELSEWHERE


def encode_get(message: GetRequest) -> bytes:
    """Body of GET."""
    keys = _join_keys(Kind.GET, message.keys)
    flags = int(message.flags)  # an operation on an IntFlag makes a new member in Python, 1 us each
    if flags & _BETWEEN_NODES and _contradict(flags):
        raise InvariantViolation(f"GET with flags {flags:#x}, which contradict each other")
    head = _ASK.pack(message.deadline_ms, len(message.keys), flags, message.level, message.part)
    floors = message.floors
    if not flags & _FLOORS:
        if floors:
            raise InvariantViolation("GET with floors and without the flag that says so")
        return head + keys
    if len(floors) != len(message.keys):
        raise InvariantViolation(f"GET with {len(floors)} floors for {len(message.keys)} keys")
    return b"".join((head, keys, struct.pack(f"<{2 * len(floors)}Q", *chain.from_iterable(floors))))


def decode_get(body: bytes, _payload_len: int) -> GetRequest:
    """GetRequest from its body; raises ProtocolError."""
    deadline_ms, count, flags, level, part = unpack_head(_ASK, body, Kind.GET)
    if flags & ~_GET_FLAGS or level > _LEVEL_MAX:
        raise ProtocolError(f"GET with unknown flags {flags:#x} or level {level}")
    if flags & _BETWEEN_NODES and _contradict(flags):
        raise ProtocolError(f"GET with flags {flags:#x}, which contradict each other")
    if not flags & _FLOORS:
        return GetRequest(_split_keys(Kind.GET, body, count), deadline_ms, level, flags, part)
    check_count(Kind.GET, body, count, _ASK.size, KEY_BYTES + _FLOOR_BYTES)
    keys = list(_keys_layout(count).unpack_from(body))
    return GetRequest(keys, deadline_ms, level, flags, part, _split_floors(body, count))


def _split_floors(body: bytes, count: int) -> list[Version]:
    """The floors behind the keys; the body's length has been checked."""
    if not count:
        return []
    numbers = struct.unpack_from(f"<{2 * count}Q", body, _ASK.size + count * KEY_BYTES)
    epochs = numbers[::2]
    check_epochs(Kind.GET, epochs)
    return list(map(make_version, zip(epochs, numbers[1::2], strict=True)))


def encode_exists(message: ExistsRequest) -> bytes:
    """Body of EXISTS: that of GET with level and part 0."""
    return _ASK.pack(message.deadline_ms, len(message.keys), message.flags, 0, 0) + _join_keys(
        Kind.EXISTS, message.keys
    )


def decode_exists(body: bytes, _payload_len: int) -> ExistsRequest:
    """ExistsRequest from its body; raises ProtocolError."""
    deadline_ms, count, flags, level, part = unpack_head(_ASK, body, Kind.EXISTS)
    keys = _split_keys(Kind.EXISTS, body, count)
    if flags & ~_EXISTS_FLAGS or level or part:
        raise ProtocolError(f"EXISTS with unknown flags {flags:#x}, level {level} or part {part}")
    return ExistsRequest(keys, deadline_ms, flags)


def reply_payload(message: GetReply) -> int:
    """Bytes that follow a GET_REPLY which is not a pin: the lengths of the hits."""
    return sum([info.length for info in message.infos])


def encode_get_reply(message: GetReply) -> bytes:
    """Body of GET_REPLY."""
    require_batch(Kind.GET_REPLY, len(message.infos))
    missed = [info for info in message.infos if info.reason]
    if missed and any(info.length for info in missed):
        raise InvariantViolation("GET_REPLY would state a length for a miss")
    pack = _INFO.pack
    records = [pack(*i.version, i.checksum, i.offset, i.length, i.reason) for i in message.infos]
    return b"".join((_REPLY.pack(message.pin, len(records)), *records))


def decode_get_reply(body: bytes, payload_len: int) -> GetReply:
    """GetReply from its body; raises ProtocolError. Payload is 0 (a pin) or exactly the lengths of the hits."""
    pin, count = unpack_head(_REPLY, body, Kind.GET_REPLY)
    check_count(Kind.GET_REPLY, body, count, _REPLY.size, _INFO.size)
    if not count:
        check_payload(Kind.GET_REPLY, payload_len, 0, may_be_none=True)
        return GetReply([], pin)
    if count == 1:
        epoch, seq, digest, offset, length, reason = _INFO.unpack_from(body, _REPLY.size)
        # Most likely a ping-pong of one block, which the columns below cost a microsecond; they also say what is wrong.
        if epoch <= EPOCH_MAX and length <= BLOCK_BYTES_MAX and not reason and payload_len in (0, length):
            return GetReply([BlockInfo(reason, make_version((epoch, seq)), length, digest, offset)], pin)
    # Columns, so that the checks and the objects are made by C loops: about 250 ns a record.
    epochs, seqs, checksums, offsets, lengths, reasons = zip(*_INFO.iter_unpack(body[_REPLY.size :]), strict=True)
    check_epochs(Kind.GET_REPLY, epochs)
    check_lengths(Kind.GET_REPLY, lengths)
    if any(reasons):
        check_most(Kind.GET_REPLY, "reason", reasons, _REASON_MAX)
        if any(length for length, reason in zip(lengths, reasons, strict=True) if reason):
            raise ProtocolError("GET_REPLY states a length for a miss")
    check_payload(Kind.GET_REPLY, payload_len, sum(lengths), may_be_none=True)
    versions = map(make_version, zip(epochs, seqs, strict=True))
    return GetReply(list(map(BlockInfo, reasons, versions, lengths, checksums, offsets)), pin)


def encode_unpin(message: Unpin) -> bytes:
    """Body of UNPIN."""
    require_batch(Kind.UNPIN, len(message.pins))
    return _COUNT.pack(len(message.pins)) + struct.pack(f"<{len(message.pins)}Q", *message.pins)


def decode_unpin(body: bytes, _payload_len: int) -> Unpin:
    """Unpin from its body; raises ProtocolError."""
    (count,) = unpack_head(_COUNT, body, Kind.UNPIN)
    check_count(Kind.UNPIN, body, count, _COUNT.size, 8)
    return Unpin(list(struct.unpack_from(f"<{count}Q", body, _COUNT.size)))


def encode_exists_reply(message: ExistsReply) -> bytes:
    """Body of EXISTS_REPLY: a byte per key."""
    require_batch(Kind.EXISTS_REPLY, len(message.reasons))
    return _COUNT.pack(len(message.reasons)) + bytes(message.reasons)


def decode_exists_reply(body: bytes, _payload_len: int) -> ExistsReply:
    """ExistsReply from its body; raises ProtocolError."""
    (count,) = unpack_head(_COUNT, body, Kind.EXISTS_REPLY)
    check_count(Kind.EXISTS_REPLY, body, count, _COUNT.size, 1)
    reasons = list(body[_COUNT.size :])
    if count:
        check_most(Kind.EXISTS_REPLY, "reason", reasons, _REASON_MAX)
        if _CURRENT in reasons:
            raise ProtocolError(f"EXISTS_REPLY with reason {_CURRENT}")
    return ExistsReply(reasons)
