"""Codec: every message comes back equal; no bytes do anything but come back or be a ProtocolError."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emberkv import messages as m
from emberkv.errors import ProtocolError
from emberkv.messages import Kind
from emberkv.types import (
    BATCH_KEYS_MAX,
    BLOCK_BYTES_MAX,
    EPOCH_MAX,
    SHARDS,
    Level,
    MissReason,
    Namespace,
    PutOutcome,
    PutStatus,
    RefuseReason,
    Version,
)
from emberkv.wire import codec

U16, U32, U64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
EPOCHS = st.integers(0, EPOCH_MAX)
VERSIONS = st.builds(Version, EPOCHS, U64)
KEYS = st.binary(min_size=32, max_size=32)
INNER = st.binary(min_size=40, max_size=40)
PUT_IDS = st.binary(min_size=24, max_size=24)
SUMS = st.binary(min_size=16, max_size=16)
LENGTHS = st.integers(0, BLOCK_BYTES_MAX)
LEVELS = st.sampled_from([int(level) for level in Level])
TEXT = st.text(max_size=40)
BYTES16 = st.binary(min_size=16, max_size=16)
BIG = st.integers(0, 2**63 - 1)


def some(items: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(items, max_size=5) | st.lists(items, max_size=1).map(lambda x: x * BATCH_KEYS_MAX)


def hit(version: Version, length: int, checksum: bytes, offset: int) -> m.BlockInfo:
    return m.BlockInfo(0, version, length, checksum, offset)


def miss(reason: int, version: Version) -> m.BlockInfo:
    return m.BlockInfo(reason, version)


def put_item(item: m.PutItem, extra: int) -> m.PutItem:
    item.parts = min(item.part + 1 + extra, 65535)
    item.part = min(item.part, item.parts - 1)
    return item


def replicate_reply(pairs: list[tuple[int, int]]) -> m.ReplicateReply:
    return m.ReplicateReply([status for status, _ in pairs], [epoch for _, epoch in pairs])


def get(keys: list[bytes], floors: list[Version], flags: int, rest: tuple[int, int, int]) -> m.GetRequest:
    """With FLOORS, as many floors as keys: the drawn ones over and over."""
    deadline_ms, level, part = rest
    flags &= ~1 if flags & 16 else ~0
    if not flags & 4:
        return m.GetRequest(keys, deadline_ms, level, flags & ~8, part)
    return m.GetRequest(keys, deadline_ms, level, flags, part, (floors * len(keys))[: len(keys)])


def span(epoch: int, first: int, length: int) -> m.Span:
    return m.Span(epoch, first, min(first + length, 2**64 - 1))


SPAN_LISTS = st.lists(st.builds(span, EPOCHS, st.integers(1, 2**64 - 1), U64), max_size=4)
PUT_ITEMS = st.builds(put_item, st.builds(m.PutItem, KEYS, PUT_IDS, LENGTHS, SUMS, VERSIONS, U32, U16, U16, U64), U16)
DELETE_ITEMS = st.builds(m.PutItem, KEYS, PUT_IDS, st.just(0), SUMS, VERSIONS)
NAMESPACES = st.builds(Namespace, TEXT, expiry_ms=BIG, owner=TEXT, revision=BIG, dropped=st.booleans())
OWNERS = st.builds(
    m.ShardOwner, TEXT, BIG, BIG, st.lists(TEXT, max_size=3).map(tuple), st.lists(TEXT, max_size=2).map(tuple)
)
MESSAGES: dict[Kind, st.SearchStrategy[Any]] = {
    Kind.HELLO: st.builds(m.Hello, BIG, BIG, BIG, TEXT, TEXT, TEXT, BYTES16, TEXT, BIG),
    Kind.WELCOME: st.builds(m.Welcome, BIG, TEXT, TEXT, BYTES16, NAMESPACES, BIG, BIG, BIG),
    Kind.ERROR: st.builds(m.ErrorFrame, TEXT, st.booleans()),
    Kind.GET: st.builds(
        get,
        some(KEYS),
        st.lists(VERSIONS, min_size=1, max_size=5),
        st.integers(0, 31),
        st.tuples(U32, LEVELS, U16),
    ),
    Kind.GET_REPLY: st.builds(
        m.GetReply,
        some(st.builds(hit, VERSIONS, LENGTHS, SUMS, U64) | st.builds(miss, st.integers(1, max(MissReason)), VERSIONS)),
        U64,
    ),
    Kind.UNPIN: st.builds(m.Unpin, some(U64)),
    Kind.EXISTS: st.builds(m.ExistsRequest, some(KEYS), U32, st.integers(0, 1)),
    Kind.EXISTS_REPLY: st.builds(
        m.ExistsReply,
        some(st.sampled_from([int(reason) for reason in MissReason if reason is not MissReason.CURRENT])),
    ),
    Kind.PUT: st.builds(
        m.PutRequest,
        some(PUT_ITEMS),
        LEVELS,
        U32,
        st.integers(0, 15).filter(lambda flags: flags & 12 != 8),
        st.integers(0, 255),
        st.just(b"") | st.binary(min_size=8, max_size=8),
    ),
    Kind.DELETE: st.builds(m.PutRequest, some(DELETE_ITEMS), delete=st.just(True)),
    Kind.PUT_REPLY: st.builds(
        m.PutReply,
        some(st.builds(PutOutcome, st.sampled_from(PutStatus), VERSIONS, U16, st.sampled_from(RefuseReason))),
    ),
    Kind.REPLICATE: st.builds(
        m.Replicate,
        some(
            st.builds(
                m.ReplicaItem,
                INNER,
                EPOCHS,
                VERSIONS,
                PUT_IDS,
                SUMS,
                VERSIONS,
                LENGTHS,
                U32,
                st.integers(1, 3),
                st.integers(1, 65535),
                U64,
                st.booleans(),
                st.just(0),
                st.booleans(),
            )
        ),
        st.booleans(),
        st.booleans(),
    ),
    Kind.REPLICATE_REPLY: st.builds(replicate_reply, some(st.tuples(st.integers(0, 5), EPOCHS))),
    Kind.OFFER: st.builds(
        m.Offer,
        st.integers(0, SHARDS - 1),
        EPOCHS,
        some(st.builds(m.OfferHead, INNER, VERSIONS, SUMS)),
        st.booleans(),
    ),
    Kind.OFFER_REPLY: st.builds(m.OfferReply, some(st.integers(0, BATCH_KEYS_MAX - 1)), EPOCHS),
    Kind.MAP: st.builds(m.MapRequest, BIG),
    Kind.MAP_REPLY: st.builds(
        m.MapReply,
        BIG,
        st.lists(st.builds(m.NodeAddress, TEXT, TEXT, TEXT, TEXT, BIG), max_size=3).map(tuple),
        st.just(()) | (st.none() | OWNERS).map(lambda owner: (owner,) * SHARDS),
    ),
    Kind.STATUS: st.just(m.StatusRequest()),
    Kind.STATUS_REPLY: st.builds(m.StatusReply, st.binary(max_size=200)),
    Kind.VECTOR: st.builds(
        m.Vector,
        some(st.builds(m.VectorItem, st.integers(0, SHARDS - 1), EPOCHS, VERSIONS, SPAN_LISTS, st.booleans())),
    ),
    Kind.VECTOR_REPLY: st.builds(
        m.VectorReply, some(st.builds(m.VectorAnswer, st.integers(0, max(m.VectorStatus)), EPOCHS, SPAN_LISTS))
    ),
    Kind.ADMIN: st.builds(m.AdminRequest, st.text(max_size=64), st.binary(max_size=200), U32),
    Kind.ADMIN_REPLY: st.builds(m.AdminReply, st.booleans(), st.binary(max_size=200), TEXT),
}
ANY = st.one_of(*MESSAGES.values())


def decode(frame: bytes) -> Any:
    return codec.decode(codec.decode_header(frame[:32]), frame[:32], frame[32:])


def with_crc(frame: bytes) -> bytes:
    """The same frame with body length and CRC made right, so that what lies behind them is reached."""
    head = bytearray(frame[:32].ljust(32, b"\0"))
    struct.pack_into("<I", head, 12, len(frame[32:]))
    struct.pack_into("<I", head, 28, zlib.crc32(bytes(head[:28]) + frame[32:]))
    return bytes(head) + frame[32:]


def only_protocol_error(frame: bytes) -> None:
    """Decodes; a frame that is accepted must be one that we could have sent."""
    try:
        header = codec.decode_header(frame[:32])
        message = codec.decode(header, frame[:32], frame[32:])
    except ProtocolError:
        return
    again = codec.encode(message, header.request_id, header.payload_len)
    assert decode(again) == message


def test_every_kind_is_drawn() -> None:
    assert set(MESSAGES) == set(Kind)


@given(ANY, U32)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_round_trip(message: Any, request_id: int) -> None:
    payload = codec.payload_bytes(message)
    frame = codec.encode(message, request_id, payload)
    header, back = codec.decode_frame(frame)
    assert back == message
    assert (header.request_id, header.payload_len, header.kind) == (request_id, payload, codec.kind_of(message))


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_random_bytes(data: bytes) -> None:
    only_protocol_error(data)


@given(st.sampled_from(Kind), st.binary(max_size=600), U64)
@settings(max_examples=600, deadline=None)
def test_random_bodies_behind_a_true_header(kind: Kind, body: bytes, payload_len: int) -> None:
    only_protocol_error(with_crc(struct.pack("<4sBBHIIQII", b"EKV1", 1, kind, 0, 1, 0, payload_len, 0, 0) + body))


@given(ANY, st.data())
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_mutated_frames(message: Any, data: st.DataObject) -> None:
    frame = bytearray(codec.encode(message, 1, codec.payload_bytes(message)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(frame)))
    only_protocol_error(bytes(frame[:cut]))
    only_protocol_error(with_crc(bytes(frame[:cut])))


@given(st.sampled_from(Kind), st.sampled_from([b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xff" * 40]))
@settings(max_examples=80, deadline=None)
def test_nothing_is_allocated_by_a_length_that_is_only_claimed(kind: Kind, body: bytes) -> None:
    claims = struct.pack("<4sBBHIIQII", b"EKV1", 1, kind, 0, 1, 0, 0, 0, 0) + body
    for prefix in (b"", b"\x95", b"\x97\x01\x01\x01"):
        frame = with_crc(claims[:32] + prefix + body)
        tracemalloc.start()
        try:
            only_protocol_error(frame)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 256 << 10
