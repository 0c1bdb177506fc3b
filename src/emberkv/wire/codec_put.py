"""Bodies of the write promise between client, accepting node and primary: PUT, DELETE, PUT_REPLY.

Why it exists: a save sends one record of 112 bytes per block; the blocks themselves follow the frame or lie in staging.
Laws: PUT carries 0 payload bytes (staging) or exactly the sum of its lengths; DELETE carries none and states none.
Limits: BATCH_KEYS_MAX items per frame. Byte layouts: docs/PROTOCOL.md, chapter frames.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from operator import ge
from typing import Final, cast

from emberkv.errors import InvariantViolation, ProtocolError
from emberkv.messages import Kind, PutFlag, PutItem, PutReply, PutRequest
from emberkv.types import (
    KEY_BYTES,
    PUT_ID_BYTES,
    SCOPE_BYTES,
    Level,
    PutOutcome,
    PutStatus,
    RefuseReason,
    Version,
)
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

_HEAD: Final = struct.Struct("<IHHBBBx8s4x")
"""deadline_ms, count, flags, level, min_copies, scope length, scope."""
_ITEM: Final = struct.Struct("<32s24s16sQQQIIHH4x")
"""key, put_id, checksum, seen epoch, seen seq, offset, length, depth, part, parts."""
_COUNT: Final = struct.Struct("<H6x")
_OUTCOME: Final = struct.Struct("<QQQHBB4x")
"""epoch, seq, authority, copies, status, reason."""

_FLAGS: Final = int(PutFlag.FRESH | PutFlag.HINT | PutFlag.FORWARD | PutFlag.RELAY)
_RELAY: Final = int(PutFlag.RELAY)
_RELAYED: Final = int(PutFlag.FORWARD | PutFlag.RELAY)
_LEVEL_MAX: Final = int(max(Level))
_STATUSES: Final = tuple(PutStatus)
_REASONS: Final = tuple(RefuseReason)
_make_outcome = cast(
    "Callable[[tuple[PutStatus, Version, int, RefuseReason]], PutOutcome]", partial(tuple.__new__, PutOutcome)
)


def put_payload(message: PutRequest) -> int:
    """Bytes that follow a PUT which does not point into staging."""
    return sum([item.length for item in message.items])


def encode_put(message: PutRequest) -> bytes:
    """Body of PUT or DELETE."""
    items, scope = message.items, message.scope
    require_batch(Kind.PUT, len(items))
    if len(scope) not in (0, SCOPE_BYTES):
        raise InvariantViolation(f"the scope of a put is empty or has {SCOPE_BYTES} bytes")
    if any(len(i.key) != KEY_BYTES or len(i.put_id) != PUT_ID_BYTES for i in items):
        raise InvariantViolation(f"keys have {KEY_BYTES} bytes and put ids {PUT_ID_BYTES}; callers check that")
    if message.delete and put_payload(message):
        raise InvariantViolation("a delete carries no bytes")
    if int(message.flags) & _RELAYED == _RELAY:
        raise InvariantViolation("only a forward can ask for a relay")
    head = _HEAD.pack(
        message.deadline_ms, len(items), message.flags, message.level, message.min_copies, len(scope), scope
    )
    pack = _ITEM.pack
    records = [pack(i.key, i.put_id, i.checksum, *i.seen, i.offset, i.length, i.depth, i.part, i.parts) for i in items]
    return b"".join((head, *records))


def decode_put(body: bytes, payload_len: int) -> PutRequest:
    """PutRequest of a PUT from its body; raises ProtocolError."""
    return _decode(body, payload_len, Kind.PUT)


def decode_delete(body: bytes, payload_len: int) -> PutRequest:
    """PutRequest of a DELETE from its body; raises ProtocolError."""
    return _decode(body, payload_len, Kind.DELETE)


def _decode(body: bytes, payload_len: int, kind: Kind) -> PutRequest:
    if len(body) < _HEAD.size:
        raise ProtocolError(f"{kind.name} body has {len(body)} bytes, needs {_HEAD.size}")
    deadline_ms, count, flags, level, min_copies, scope_len, scope = _HEAD.unpack_from(body)
    check_count(kind, body, count, _HEAD.size, _ITEM.size)
    if flags & ~_FLAGS or level > _LEVEL_MAX:
        raise ProtocolError(f"{kind.name} with unknown flags {flags:#x} or level {level}")
    if flags & _RELAYED == _RELAY:
        raise ProtocolError(f"{kind.name} asks for a relay and is no forward")
    if scope_len not in (0, SCOPE_BYTES):
        raise ProtocolError(f"{kind.name} with a scope of {scope_len} bytes")
    items = _decode_items(body, payload_len, kind) if count else []
    if not count:
        check_payload(kind, payload_len, 0, may_be_none=False)
    return PutRequest(items, level, deadline_ms, flags, min_copies, scope[:scope_len], kind is Kind.DELETE)


def _decode_items(body: bytes, payload_len: int, kind: Kind) -> list[PutItem]:
    keys, put_ids, checksums, epochs, seqs, offsets, lengths, depths, part, parts = zip(
        *_ITEM.iter_unpack(body[_HEAD.size :]), strict=True
    )
    check_epochs(kind, epochs)
    check_lengths(kind, lengths)
    if any(map(ge, part, parts)):
        raise ProtocolError(f"{kind.name} names a part beyond its block's parts")
    stated = sum(lengths)
    if kind is Kind.DELETE and stated:
        raise ProtocolError(f"DELETE states {stated} bytes")
    check_payload(kind, payload_len, stated, may_be_none=True)
    seen = map(make_version, zip(epochs, seqs, strict=True))
    return list(map(PutItem, keys, put_ids, lengths, checksums, seen, depths, part, parts, offsets))


def encode_put_reply(message: PutReply) -> bytes:
    """Body of PUT_REPLY."""
    require_batch(Kind.PUT_REPLY, len(message.outcomes))
    pack = _OUTCOME.pack
    authorities = message.authorities or (0,) * len(message.outcomes)
    records = [
        pack(*version, authority, copies, status, reason)
        for (status, version, copies, reason), authority in zip(message.outcomes, authorities, strict=True)
    ]
    return b"".join((_COUNT.pack(len(records)), *records))


def decode_put_reply(body: bytes, _payload_len: int) -> PutReply:
    """PutReply from its body, with the enums as members; raises ProtocolError."""
    (count,) = unpack_head(_COUNT, body, Kind.PUT_REPLY)
    check_count(Kind.PUT_REPLY, body, count, _COUNT.size, _OUTCOME.size)
    if not count:
        return PutReply([])
    epochs, seqs, authorities, copies, statuses, reasons = zip(*_OUTCOME.iter_unpack(body[_COUNT.size :]), strict=True)
    check_epochs(Kind.PUT_REPLY, epochs)
    check_epochs(Kind.PUT_REPLY, authorities)
    check_most(Kind.PUT_REPLY, "status", statuses, len(_STATUSES) - 1)
    check_most(Kind.PUT_REPLY, "reason", reasons, len(_REASONS) - 1)
    versions = map(make_version, zip(epochs, seqs, strict=True))
    rows = zip(map(_STATUSES.__getitem__, statuses), versions, copies, map(_REASONS.__getitem__, reasons), strict=True)
    return PutReply(list(map(_make_outcome, rows)), list(authorities) if any(authorities) else [])
