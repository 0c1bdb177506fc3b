"""Bodies of the repair promise between a primary and its replicas: VECTOR, VECTOR_REPLY.

Why it exists: applied vectors are the one message of variable shape; all their spans lie in one run behind the items,
so that a frame is still two C loops.
Laws: each item states how many spans are its own, and their sum is the head's count, which with the items gives the
length of the body exactly. A span is 1 <= first <= last.
Limits: BATCH_KEYS_MAX items and SPANS_MAX spans per frame. Byte layouts: docs/PROTOCOL.md, chapter frames.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import gt
from typing import Final, cast

from emberkv.errors import InvariantViolation, ProtocolError
from emberkv.messages import SPANS_MAX, Kind, Span, Vector, VectorAnswer, VectorItem, VectorReply, VectorStatus
from emberkv.types import BATCH_KEYS_MAX, SHARDS, Version
from emberkv.wire.frame import check_epochs, check_most, require_batch, unpack_head

_HEAD: Final = struct.Struct("<HH4x")
"""count of items, count of all spans."""
_ITEM: Final = struct.Struct("<HHB3xQQQ")
"""shard, spans of this item, adopt, authority, floor."""
_ANSWER: Final = struct.Struct("<HB5xQ")
"""spans of this answer, status, epoch."""
_SPAN: Final = struct.Struct("<QQQ")
"""epoch, first, last."""

_STATUS_MAX: Final = int(max(VectorStatus))
_make_span: Final = cast("Callable[[tuple[int, int, int]], Span]", partial(tuple.__new__, Span))


def _join_spans(kind: Kind, lists: Sequence[Sequence[Span]]) -> bytes:
    """All spans of a frame, one after another."""
    require_batch(kind, len(lists))
    spans = [span for one in lists for span in one]
    if len(spans) > SPANS_MAX:
        raise InvariantViolation(f"{kind.name} of {len(spans)} spans is over the limit of {SPANS_MAX}: split it")
    if any(not 1 <= span.first <= span.last for span in spans):
        raise InvariantViolation(f"{kind.name} with a span that is none")
    return struct.pack(f"<{3 * len(spans)}Q", *chain.from_iterable(spans))


def _counts(kind: Kind, body: bytes, record_bytes: int) -> tuple[int, int]:
    """How many items and spans the body has, after its length agreed. Raises ProtocolError."""
    count, span_count = unpack_head(_HEAD, body, kind)
    if count > BATCH_KEYS_MAX or span_count > SPANS_MAX:
        raise ProtocolError(
            f"{kind.name} of {count} items, {span_count} spans is over the limit of {BATCH_KEYS_MAX}, {SPANS_MAX}"
        )
    if len(body) != _HEAD.size + count * record_bytes + span_count * _SPAN.size:
        raise ProtocolError(f"{kind.name} body of {len(body)} bytes does not hold {count} items, {span_count} spans")
    return count, span_count


def _split_spans(kind: Kind, body: bytes, start: int, span_count: int, counts: Sequence[int]) -> list[list[Span]]:
    """The spans of each item. Raises ProtocolError."""
    if sum(counts) != span_count:
        raise ProtocolError(f"{kind.name} has {span_count} spans, its items name {sum(counts)}")
    if not span_count:
        return [[] for _ in counts]
    epochs, firsts, lasts = zip(*_SPAN.iter_unpack(body[start:]), strict=True)
    check_epochs(kind, epochs)
    if not all(firsts) or any(map(gt, firsts, lasts)):
        raise ProtocolError(f"{kind.name} with a span that begins at 0 or ends before it begins")
    spans = list(map(_make_span, zip(epochs, firsts, lasts, strict=True)))
    lists: list[list[Span]] = []
    at = 0
    for number in counts:
        lists.append(spans[at : at + number])
        at += number
    return lists


def encode_vector(message: Vector) -> bytes:
    """Body of VECTOR."""
    spans = _join_spans(Kind.VECTOR, [item.spans for item in message.items])
    pack = _ITEM.pack
    records = [pack(i.shard, len(i.spans), i.adopt, i.authority, *i.floor) for i in message.items]
    return b"".join((_HEAD.pack(len(records), len(spans) // _SPAN.size), *records, spans))


def decode_vector(body: bytes, _payload_len: int) -> Vector:
    """Vector from its body; raises ProtocolError."""
    count, span_count = _counts(Kind.VECTOR, body, _ITEM.size)
    end = _HEAD.size + count * _ITEM.size
    records = list(_ITEM.iter_unpack(body[_HEAD.size : end]))
    lists = _split_spans(Kind.VECTOR, body, end, span_count, [record[1] for record in records])
    items: list[VectorItem] = []
    for (shard, _, adopt, authority, epoch, seq), spans in zip(records, lists, strict=True):
        if shard >= SHARDS or adopt > 1:
            raise ProtocolError(f"VECTOR of shard {shard}, adopt {adopt}")
        check_epochs(Kind.VECTOR, (authority, epoch))
        items.append(VectorItem(shard, authority, Version(epoch, seq), spans, bool(adopt)))
    return Vector(items)


def encode_vector_reply(message: VectorReply) -> bytes:
    """Body of VECTOR_REPLY."""
    spans = _join_spans(Kind.VECTOR_REPLY, [answer.spans for answer in message.answers])
    pack = _ANSWER.pack
    records = [pack(len(answer.spans), answer.status, answer.epoch) for answer in message.answers]
    return b"".join((_HEAD.pack(len(records), len(spans) // _SPAN.size), *records, spans))


def decode_vector_reply(body: bytes, _payload_len: int) -> VectorReply:
    """VectorReply from its body; raises ProtocolError."""
    count, span_count = _counts(Kind.VECTOR_REPLY, body, _ANSWER.size)
    end = _HEAD.size + count * _ANSWER.size
    records = list(_ANSWER.iter_unpack(body[_HEAD.size : end]))
    lists = _split_spans(Kind.VECTOR_REPLY, body, end, span_count, [record[0] for record in records])
    if records:
        check_most(Kind.VECTOR_REPLY, "status", [record[1] for record in records], _STATUS_MAX)
        check_epochs(Kind.VECTOR_REPLY, [record[2] for record in records])
    return VectorReply(
        [VectorAnswer(status, epoch, spans) for (_, status, epoch), spans in zip(records, lists, strict=True)]
    )
