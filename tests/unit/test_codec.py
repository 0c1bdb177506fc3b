"""Frames: exact layouts, limits on both sides, and one clear ProtocolError for each way to be wrong."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import msgspec
import pytest

from emberkv import messages as m
from emberkv.errors import InvariantViolation, ProtocolError
from emberkv.messages import Kind
from emberkv.types import (
    BATCH_KEYS_MAX,
    BLOCK_BYTES_MAX,
    EPOCH_MAX,
    MissReason,
    Namespace,
    PutOutcome,
    PutStatus,
    RefuseReason,
    Version,
)
from emberkv.wire import codec
from emberkv.wire.frame import frame_crc

KEY = bytes(range(32))
INNER = b"scope---" + KEY
PUT_ID = b"incarnation-16by" + struct.pack("<Q", 7)
SUM = b"checksum-16bytes"
VERSION = Version((3 << 40) | 5, 77)
FLOOR = Version((3 << 40) | 4, 2**64 - 1)
SPANS = [m.Span(VERSION.epoch, 1, 76), m.Span(VERSION.epoch, 78, 2**64 - 1)]
NODE = m.NodeAddress("a", "10.0.0.1:7000", "/run/a.sock", "boot", 4)
POLICY = Namespace("chat", 7, 2, 1, 3, 2, False, 2, 1 << 20, 60_000, "team kv", 9, True)

# Every kind, with a value in every field that is not its default.
SAMPLES: list[tuple[Kind, Any, int]] = [
    (Kind.HELLO, m.Hello(1, 1, 1, "cluster", "default", "n1", b"i" * 16, "chat", 1 << 20), 0),
    (Kind.WELCOME, m.Welcome(1, "cluster", "n1", b"i" * 16, POLICY, 1 << 30, 1 << 20, 1 << 27), 0),
    (Kind.ERROR, m.ErrorFrame("go away: ünïcode", True), 0),
    (Kind.GET, m.GetRequest([KEY, KEY[::-1]], 250, 1, 3, 2), 0),
    (Kind.GET_REPLY, m.GetReply([m.BlockInfo(0, VERSION, 4096, SUM, 8192), m.BlockInfo(3)], 9), 4096),
    (Kind.UNPIN, m.Unpin([1, 2**64 - 1]), 0),
    (Kind.EXISTS, m.ExistsRequest([KEY] * 3, 10, 1), 0),
    (Kind.EXISTS_REPLY, m.ExistsReply([0, 13, 1]), 0),
    (
        Kind.PUT,
        m.PutRequest([m.PutItem(KEY, PUT_ID, 100, SUM, VERSION, 5, 1, 2, 4096)] * 2, 1, 9, 5, 2, b"8 bytes."),
        200,
    ),
    (Kind.DELETE, m.PutRequest([m.PutItem(KEY, PUT_ID, 0)], delete=True), 0),
    (
        Kind.PUT_REPLY,
        m.PutReply(
            [
                PutOutcome(PutStatus.STORED, VERSION, 2),
                PutOutcome(PutStatus.REFUSED, reason=RefuseReason.NO_SPACE),
            ]
        ),
        0,
    ),
    (
        Kind.REPLICATE,
        m.Replicate(
            [
                m.ReplicaItem(INNER, 6, VERSION, PUT_ID, SUM, Version(1, 2), 100, 9, 2, 3, 1234567890123, True),
                m.ReplicaItem(INNER, 6, VERSION, PUT_ID, SUM, length=100, payload=False),
                m.ReplicaItem(INNER, 6, VERSION, PUT_ID, SUM, state=3, skip=True),
            ],
            True,
            True,
        ),
        100,
    ),
    (Kind.REPLICATE_REPLY, m.ReplicateReply([0, 1, 5], [0, EPOCH_MAX, 0]), 0),
    (Kind.OFFER, m.Offer(255, 8, [m.OfferHead(INNER, VERSION, SUM)] * 2, True), 0),
    (Kind.OFFER_REPLY, m.OfferReply([0, 127], 11), 0),
    (Kind.MAP, m.MapRequest(42), 0),
    (Kind.MAP_REPLY, m.MapReply(43, (NODE,), (m.ShardOwner("a", 4, 9, ("a", "b"), ("a",), ("c",)), *[None] * 255)), 0),
    (Kind.STATUS, m.StatusRequest(), 0),
    (Kind.STATUS_REPLY, m.StatusReply(b'{"node": "a"}'), 0),
    (
        Kind.VECTOR,
        m.Vector([m.VectorItem(255, 8, FLOOR, SPANS, True), m.VectorItem(0, 0, VERSION, [], False)]),
        0,
    ),
    (
        Kind.VECTOR_REPLY,
        m.VectorReply([m.VectorAnswer(1, EPOCH_MAX), m.VectorAnswer(0, 0, SPANS), m.VectorAnswer(3)]),
        0,
    ),
    (Kind.ADMIN, m.AdminRequest("namespace.create", b'{"name": "chat"}', 900), 0),
    (Kind.ADMIN_REPLY, m.AdminReply(False, b"[]", "there is no such namespace"), 0),
    (Kind.GET, m.GetRequest([KEY, KEY[::-1]], 250, 1, 4 | 8 | 16, 0, [FLOOR, VERSION]), 0),
    (Kind.PUT, m.PutRequest([m.PutItem(KEY, PUT_ID, 100)], 1, 9, 4 | 8, 2, b"8 bytes."), 100),
]
IDS = [kind.name for kind, _, _ in SAMPLES]
IDS[-2:] = ["GET with floors", "PUT relayed"]


def split(frame: bytes) -> tuple[codec.Header, bytes, bytes]:
    return codec.decode_header(frame[:32]), frame[:32], frame[32:]


def reframe(frame: bytes, body: bytes, payload_len: int | None = None) -> bytes:
    """The frame with another body and a header that is right for it, CRC included."""
    header = bytearray(frame[:32])
    struct.pack_into("<I", header, 12, len(body))
    if payload_len is not None:
        struct.pack_into("<Q", header, 16, payload_len)
    struct.pack_into("<I", header, 28, zlib.crc32(bytes(header[:28]) + body))
    return bytes(header) + body


def decode(frame: bytes) -> Any:
    header, head, body = split(frame)
    return codec.decode(header, head, body)


@pytest.mark.parametrize(("kind", "message", "payload"), SAMPLES, ids=IDS)
def test_every_kind_comes_back_equal(kind: Kind, message: Any, payload: int) -> None:
    frame = codec.encode(message, 0xDEADBEEF, payload)
    header, head, body = split(frame)
    assert header == (kind, 0, 0xDEADBEEF, len(body), payload)
    assert codec.kind_of(message) is kind
    assert codec.payload_bytes(message) == payload
    for as_buffer in (bytes, bytearray, memoryview):
        assert codec.decode(header, as_buffer(head), as_buffer(body)) == message
    assert codec.decode_frame(frame) == (header, message)


def test_every_kind_has_a_sample() -> None:
    assert {kind for kind, _, _ in SAMPLES} == set(Kind)


def test_decoded_outcomes_are_enum_members() -> None:
    reply = decode(codec.encode(m.PutReply([PutOutcome(s, reason=r) for s in PutStatus for r in RefuseReason]), 1))
    assert all(type(o) is PutOutcome and type(o.version) is Version for o in reply.outcomes)
    assert [o.status for o in reply.outcomes][:: len(RefuseReason)] == list(PutStatus)
    assert all(isinstance(o.status, PutStatus) and isinstance(o.reason, RefuseReason) for o in reply.outcomes)


def test_decoded_versions_are_versions() -> None:
    info = decode(codec.encode(m.GetReply([m.BlockInfo(0, VERSION, 1)]), 1)).infos[0]
    assert type(info.version) is Version
    assert info.version.epoch == VERSION.epoch


@pytest.mark.parametrize("count", [0, 1, 2, 127, 128])
def test_get_reply_bytes_is_exact(count: int) -> None:
    assert len(codec.encode(m.GetReply([m.BlockInfo(1)] * count), 1)) == codec.get_reply_bytes(count)
    assert codec.get_reply_bytes(count) == 32 + 16 + 48 * count


def test_the_layout_of_a_get_is_what_the_protocol_says() -> None:
    frame = codec.encode(m.GetRequest([KEY], 1000, 1, 2, 3), 7)
    body = struct.pack("<IHHBBHI", 1000, 1, 2, 1, 0, 3, 0) + KEY
    fixed = struct.pack("<4sBBHIIQI", b"EKV1", 1, 10, 0, 7, len(body), 0, 0)
    assert frame == fixed + struct.pack("<I", zlib.crc32(fixed + body)) + body


def test_floors_stand_behind_the_keys_as_the_protocol_says() -> None:
    frame = codec.encode(m.GetRequest([KEY, KEY], 1000, 1, 4, 0, [VERSION, FLOOR]), 7)
    head = struct.pack("<IHHBBHI", 1000, 2, 4, 1, 0, 0, 0)
    assert frame[32:] == head + KEY + KEY + struct.pack("<4Q", *VERSION, *FLOOR)
    floors = decode(frame).floors
    assert all(type(floor) is Version for floor in floors)


def test_the_layout_of_a_vector_is_what_the_protocol_says() -> None:
    items = [m.VectorItem(3, 8, FLOOR, SPANS, True), m.VectorItem(4, 9, VERSION, [m.Span(1, 2, 3)])]
    body = struct.pack("<HHI", 2, 3, 0)
    body += struct.pack("<HHBBHQQQ", 3, 2, 1, 0, 0, 8, *FLOOR) + struct.pack("<HHBBHQQQ", 4, 1, 0, 0, 0, 9, *VERSION)
    body += struct.pack("<9Q", *SPANS[0], *SPANS[1], 1, 2, 3)
    assert codec.encode(m.Vector(items), 1)[32:] == body
    answers = [m.VectorAnswer(2), m.VectorAnswer(0, 5, SPANS)]
    body = struct.pack("<HHI", 2, 2, 0) + struct.pack("<HBBIQ", 0, 2, 0, 0, 0) + struct.pack("<HBBIQ", 2, 0, 0, 0, 5)
    assert codec.encode(m.VectorReply(answers), 1)[32:] == body + struct.pack("<6Q", *SPANS[0], *SPANS[1])


def test_a_full_vector_fits_its_frame() -> None:
    share = m.SPANS_MAX // BATCH_KEYS_MAX
    spans = [m.Span(1, at, at) for at in range(1, share + 1)]
    full = m.Vector([m.VectorItem(0, 1, VERSION, spans)] * BATCH_KEYS_MAX)
    frame = codec.encode(full, 1)
    assert len(frame) == 32 + 8 + 32 * BATCH_KEYS_MAX + 24 * m.SPANS_MAX <= codec.FRAME_BYTES_MAX
    assert decode(frame) == full
    with pytest.raises(InvariantViolation, match="over the limit of 4096"):
        codec.encode(m.VectorReply([m.VectorAnswer(0, 1, [m.Span(1, 1, 1)] * (m.SPANS_MAX + 1))]), 1)


@pytest.mark.parametrize("size", [0, 1, 5119, 5120, 5121, 10240, 20000])
def test_crc_in_pieces_is_the_crc(size: int) -> None:
    body = bytes(i * 31 & 255 for i in range(size))
    assert frame_crc(b"h" * 28, body) == zlib.crc32(b"h" * 28 + body)


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [
        (0, b"HTTP", "not an EmberKV frame"),
        (4, b"\x02", "wire version 2"),
        (5, b"\xff", "unknown frame kind 255"),
        (6, b"\x01\x00", "reserved"),
        (12, struct.pack("<I", codec.BODY_BYTES_MAX + 1), "over the limit"),
        (16, struct.pack("<Q", 1), "cannot carry 1 payload bytes"),
        (24, b"\x01", "reserved"),
    ],
)
def test_a_bad_header_says_what_is_wrong(at: int, value: bytes, text: str) -> None:
    frame = bytearray(codec.encode(m.GetRequest([KEY]), 1))
    frame[at : at + len(value)] = value
    with pytest.raises(ProtocolError, match=text):
        codec.decode_header(frame[:32])


def test_a_short_header_and_a_huge_payload_are_refused() -> None:
    frame = bytearray(codec.encode(m.PutRequest([m.PutItem(KEY, PUT_ID, 5)]), 1, 5))
    with pytest.raises(ProtocolError, match="31 bytes, needs 32"):
        codec.decode_header(frame[:31])
    struct.pack_into("<Q", frame, 16, codec.PAYLOAD_BYTES_MAX + 1)
    with pytest.raises(ProtocolError, match="cannot carry"):
        codec.decode_header(frame[:32])


def test_a_hello_of_a_later_version_can_still_be_read() -> None:
    frame = bytearray(codec.encode(m.Hello(1, 2, 9, "", "default", "", b"i" * 16), 1))
    frame[4] = 9
    struct.pack_into("<I", frame, 28, zlib.crc32(bytes(frame[:28]) + bytes(frame[32:])))
    assert decode(bytes(frame)).wire_max == 9


@pytest.mark.parametrize(("kind", "message", "payload"), SAMPLES, ids=IDS)
def test_a_flipped_bit_anywhere_is_seen(kind: Kind, message: Any, payload: int) -> None:
    frame = codec.encode(message, 1, payload)
    for at in {0, 4, 5, 8, 12, 16, 24, 28, 31, 32, len(frame) - 1} & set(range(len(frame))):
        broken = bytearray(frame)
        broken[at] ^= 0x40
        with pytest.raises(ProtocolError):
            decode(bytes(broken))


@pytest.mark.parametrize(("kind", "message", "payload"), SAMPLES, ids=IDS)
def test_a_truncated_or_extended_body_is_refused(kind: Kind, message: Any, payload: int) -> None:
    frame = codec.encode(message, 1, payload)
    header, head, body = split(frame)
    if body:
        with pytest.raises(ProtocolError, match="truncated"):
            codec.decode(header, head, body[:-1])
        with pytest.raises(ProtocolError):
            decode(reframe(frame, body[:-1]))
    with pytest.raises(ProtocolError):
        decode(reframe(frame, body + b"\0"))


@pytest.mark.parametrize(("kind", "message", "payload"), SAMPLES, ids=IDS)
def test_every_byte_of_a_body_may_be_wrong(kind: Kind, message: Any, payload: int) -> None:
    """Also behind a CRC that fits: the frame is refused, or is one that somebody could have sent."""
    frame = codec.encode(message, 1, payload)
    seen_other = 0
    for at in range(32, len(frame)):
        for mask in (0x01, 0x80, 0xFF):
            body = bytearray(frame[32:])
            body[at - 32] ^= mask
            changed = reframe(frame, bytes(body))
            try:
                other = decode(changed)
            except ProtocolError:
                continue
            assert decode(codec.encode(other, 1, payload)) == other
            seen_other += other != message
    assert seen_other or len(frame) < 34  # what no flip can change is not encoded


def body_with(sample: int, at: int, layout: str, *values: int) -> bytes:
    """A sample's frame with values written into its body and the CRC made right again."""
    _, message, payload = SAMPLES[sample]
    frame = codec.encode(message, 1, payload)
    body = bytearray(frame[32:])
    struct.pack_into("<" + layout, body, at, *values)
    return reframe(frame, bytes(body))


def packed(sample: int, fields: list[Any]) -> bytes:
    """A sample's frame with another MessagePack array as its body."""
    return reframe(codec.encode(SAMPLES[sample][1], 1), msgspec.msgpack.encode(fields))


GET, GET_REPLY, PUT, DELETE, PUT_REPLY, REPLICATE, OFFER = 3, 4, 8, 9, 10, 11, 13
VECTOR, VECTOR_REPLY, ADMIN, ADMIN_REPLY, FLOORS = 19, 20, 21, 22, 23


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (body_with(GET, 4, "H", 129), "over the limit of 128"),
        (body_with(GET, 4, "H", 1), "does not hold 1 items"),
        (body_with(GET, 6, "H", 32), "unknown flags"),
        (body_with(GET, 6, "H", 4), "does not hold 2 items"),
        (body_with(GET, 6, "H", 8), "contradict"),
        (body_with(GET, 6, "H", 1 | 16), "contradict"),
        (body_with(FLOORS, 6, "H", 0), "does not hold 2 items"),
        (body_with(FLOORS, 4, "H", 129), "over the limit of 128"),
        (body_with(FLOORS, 16 + 64, "Q", 1 << 63), "epoch"),
        (body_with(FLOORS, 16 + 64 + 16, "Q", EPOCH_MAX + 1), "epoch"),
        (body_with(GET, 8, "B", 3), "level 3"),
        (body_with(GET_REPLY, 16, "Q", EPOCH_MAX + 1), "epoch"),
        (body_with(GET_REPLY, 16 + 40, "I", BLOCK_BYTES_MAX + 1), "length"),
        (body_with(GET_REPLY, 16 + 44, "B", len(MissReason)), "reason"),
        (body_with(GET_REPLY, 16 + 44, "B", 1), "length for a miss"),
        (body_with(GET_REPLY, 16 + 40, "I", 4095), "states 4095 payload bytes, its header says 4096"),
        (body_with(6, 8, "B", 1), "EXISTS"),
        (body_with(7, 8, "B", 99), "reason"),
        (body_with(7, 8, "B", MissReason.CURRENT), "reason"),
        (body_with(PUT, 6, "H", 16), "unknown flags"),
        (body_with(PUT, 6, "H", 8), "relay"),
        (body_with(DELETE, 6, "H", 8 | 1), "relay"),
        (body_with(PUT, 8, "B", 7), "level 7"),
        (body_with(PUT, 10, "B", 4), "scope of 4 bytes"),
        (body_with(PUT, 24 + 72, "Q", 1 << 63), "epoch"),
        (body_with(PUT, 24 + 96, "I", BLOCK_BYTES_MAX + 1), "length"),
        (body_with(PUT, 24 + 96, "I", 99), "states 199"),
        (body_with(PUT, 24 + 104, "HH", 2, 2), "part beyond"),
        (body_with(PUT, 24 + 104, "HH", 0, 0), "part beyond"),
        (body_with(DELETE, 24 + 96, "I", 1), "DELETE states 1"),
        (body_with(PUT_REPLY, 8 + 26, "B", 6), "status"),
        (body_with(PUT_REPLY, 8 + 27, "B", len(RefuseReason)), "reason"),
        (body_with(PUT_REPLY, 8 + 16, "Q", 1 << 63), "epoch"),
        (body_with(REPLICATE, 8 + 140, "H", 3), "part beyond"),
        (body_with(REPLICATE, 2, "B", 2), "fill 2"),
        (body_with(REPLICATE, 3, "B", 2), "surplus 2"),
        (body_with(REPLICATE, 8 + 142, "B", 2), "skip flag"),
        (body_with(REPLICATE, 8 + 80, "Q", 1 << 63), "epoch"),
        (body_with(REPLICATE, 8 + 138, "B", 0), "state 0"),
        (body_with(REPLICATE, 8 + 138, "B", 4), "state"),
        (body_with(REPLICATE, 8 + 139, "B", 2), "payload flag"),
        (body_with(REPLICATE, 8 + 136, "H", 0), "0 parts"),
        (body_with(REPLICATE, 8 + 139, "B", 0), "states 0 payload bytes"),
        (body_with(12, 8 + 24, "B", 6), "status"),
        (body_with(OFFER, 10, "H", 256), "shard 256"),
        (body_with(OFFER, 12, "B", 2), "last 2"),
        (body_with(14, 16, "H", 128), "index"),
        (body_with(VECTOR, 0, "H", 129), "over the limit of 128"),
        (body_with(VECTOR, 2, "H", 4097), "over the limit of 128, 4096"),
        (body_with(VECTOR, 0, "H", 1), "does not hold 1 items"),
        (body_with(VECTOR, 2, "H", 1), "does not hold 2 items, 1 spans"),
        (body_with(VECTOR, 8 + 2, "H", 3), "its items name 3"),
        (body_with(VECTOR, 8 + 32 + 2, "H", 65535), "its items name 65537"),
        (body_with(VECTOR, 8, "H", 256), "shard 256"),
        (body_with(VECTOR, 8 + 4, "B", 2), "adopt 2"),
        (body_with(VECTOR, 8 + 8, "Q", 1 << 63), "epoch"),
        (body_with(VECTOR, 8 + 16, "Q", 1 << 63), "epoch"),
        (body_with(VECTOR, 8 + 64, "Q", 1 << 63), "epoch"),
        (body_with(VECTOR, 8 + 64 + 8, "Q", 0), "begins at 0"),
        (body_with(VECTOR, 8 + 64 + 24 + 16, "Q", 77), "ends before it begins"),
        (body_with(VECTOR_REPLY, 0, "H", 129), "over the limit of 128"),
        (body_with(VECTOR_REPLY, 2, "H", 4097), "over the limit"),
        (body_with(VECTOR_REPLY, 8, "H", 1), "its items name 3"),
        (body_with(VECTOR_REPLY, 8 + 2, "B", 4), "status"),
        (body_with(VECTOR_REPLY, 8 + 8, "Q", 1 << 63), "epoch"),
        (body_with(VECTOR_REPLY, 8 + 48 + 8, "Q", 0), "begins at 0"),
        (packed(ADMIN, ["v" * 65]), "verb of 65 characters"),
        (packed(ADMIN, ["v", b"x" * 65537]), "65537 bytes of arguments"),
        (packed(ADMIN, ["v", b"", -1]), "deadline of -1 ms"),
        (packed(ADMIN, ["v", b"", 1 << 32]), "deadline"),
    ],
)
def test_a_bad_field_says_what_is_wrong(frame: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text) as caught:
        decode(frame)
    assert "\n" not in str(caught.value)


def test_payload_rules() -> None:
    put = m.PutRequest([m.PutItem(KEY, PUT_ID, 10, offset=4096)])
    pinned = m.GetReply([m.BlockInfo(0, VERSION, 10, SUM, 4096)], pin=3)
    for message in (put, pinned):
        assert decode(codec.encode(message, 1, 0)) == message
        assert decode(codec.encode(message, 1, 10)) == message
        with pytest.raises(InvariantViolation, match="states 10 payload bytes, 9 given"):
            codec.encode(message, 1, 9)
    stream = m.Replicate([m.ReplicaItem(INNER, 1, VERSION, PUT_ID, SUM, length=10)])
    for wrong in (0, 9, 11):
        with pytest.raises(InvariantViolation):
            codec.encode(stream, 1, wrong)
    frame = codec.encode(stream, 1, 10)
    with pytest.raises(ProtocolError, match="its header says 0"):
        decode(reframe(frame, frame[32:], 0))
    with pytest.raises(InvariantViolation):
        codec.encode(m.GetRequest([KEY]), 1, 1)


@pytest.mark.parametrize("kind", [Kind.GET_REPLY, Kind.PUT, Kind.REPLICATE])
def test_no_items_carry_no_payload(kind: Kind) -> None:
    empty: dict[Kind, Any] = {
        Kind.GET_REPLY: m.GetReply([]),
        Kind.PUT: m.PutRequest([]),
        Kind.REPLICATE: m.Replicate([]),
    }
    frame = codec.encode(empty[kind], 1)
    assert decode(frame) == empty[kind]
    with pytest.raises(ProtocolError, match="states 0 payload bytes"):
        decode(reframe(frame, frame[32:], 1))


@pytest.mark.parametrize(
    "message",
    [
        m.GetRequest([KEY] * (BATCH_KEYS_MAX + 1)),
        m.GetRequest([KEY, b"short"]),
        m.GetRequest([b"x" * 31, b"y" * 33]),
        m.GetRequest([KEY], deadline_ms=-1),
        m.GetRequest([KEY], deadline_ms=1 << 32),
        m.ExistsRequest([b""]),
        m.ExistsReply([256]),
        m.GetReply([m.BlockInfo(0, Version(-1, 0))]),
        m.GetReply([m.BlockInfo(0)] * 129),
        m.GetReply([m.BlockInfo(2, length=7)]),
        m.Unpin(list(range(129))),
        m.PutRequest([m.PutItem(KEY, b"short", 1)]),
        m.PutRequest([m.PutItem(INNER, PUT_ID, 1)]),
        m.PutRequest([], scope=b"123"),
        m.PutRequest([m.PutItem(KEY, PUT_ID, 1)], delete=True),
        m.PutReply([PutOutcome(PutStatus.STORED)] * 129),
        m.Replicate([m.ReplicaItem(KEY, 1, VERSION, PUT_ID, SUM)]),
        m.Replicate([m.ReplicaItem(INNER, 1, VERSION, b"short", SUM)]),
        m.ReplicateReply([0], []),
        m.Offer(0, 1, [m.OfferHead(KEY, VERSION, SUM)]),
        m.Offer(0, 1, [m.OfferHead(INNER, VERSION, SUM)] * 129),
        m.OfferReply(list(range(129))),
        m.GetRequest([KEY], flags=4),
        m.GetRequest([KEY], flags=4, floors=[VERSION] * 2),
        m.GetRequest([KEY], flags=4, floors=[Version(-1, 0)]),
        m.GetRequest([KEY], floors=[VERSION]),
        m.GetRequest([KEY], flags=8),
        m.GetRequest([KEY], flags=1 | 16),
        m.PutRequest([m.PutItem(KEY, PUT_ID, 1)], flags=8),
        m.Vector([m.VectorItem(0, 1, VERSION, [])] * 129),
        m.Vector([m.VectorItem(0, 1, VERSION, [m.Span(1, 0, 5)])]),
        m.Vector([m.VectorItem(0, 1, Version(-1, 0), [])]),
        m.VectorReply([m.VectorAnswer(0, 1, [m.Span(1, 6, 5)])]),
        m.VectorReply([m.VectorAnswer(0)] * 129),
        m.AdminRequest("v" * 65),
        m.AdminRequest("v", b"x" * 65537),
        m.AdminRequest("v", b"", -1),
        m.StatusReply(b"x" * codec.BODY_BYTES_MAX),
    ],
    ids=lambda message: type(message).__name__,
)
def test_our_own_mistakes_stop_at_the_sender(message: Any) -> None:
    with pytest.raises(InvariantViolation):
        codec.encode(message, 1)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xffxx",
        b"\x91" * 200_000,
        b"\x99" + b"\xa1\xff" * 9,
        msgspec.msgpack.encode([1, 1, 1, "c", "default", "n", "not bytes!"]),
        msgspec.msgpack.encode({"role": 1}),
        msgspec.msgpack.encode([2**64 - 1] * 9),
    ],
    ids=["empty", "reserved", "array", "string", "bin", "nested", "utf8", "type", "map", "numbers"],
)
@pytest.mark.parametrize("sample", [0, 1, 2, 16, 18, ADMIN, ADMIN_REPLY])
def test_hostile_messagepack_is_a_protocol_error(sample: int, body: bytes) -> None:
    frame = codec.encode(SAMPLES[sample][1], 1)
    with pytest.raises(ProtocolError):
        decode(reframe(frame, body))


def test_a_map_has_all_shards_or_none() -> None:
    frame = codec.encode(m.MapReply(1, (), (None,) * 3), 1)
    with pytest.raises(ProtocolError, match="3 shards"):
        decode(frame)
    assert decode(codec.encode(m.MapReply(1, (), ()), 1)) == m.MapReply(1, (), ())
