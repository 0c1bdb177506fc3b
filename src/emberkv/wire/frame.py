"""The 32-byte frame header, its CRC, and the checks that every body shares.

Why it exists: what must be true of any frame, before anybody looks at what it says.
Laws: a length is bounded before it is believed; nothing is allocated by a number that the peer chose; the only error
that bytes can cause is ProtocolError; no call here gives the GIL away.
Limits: a body is at most BODY_BYTES_MAX, which 128 records of the widest kind (144 bytes) fill to 7 %, and a cluster
map of 1,000 nodes to about half.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple, cast

from emberkv.errors import InvariantViolation, ProtocolError
from emberkv.messages import WIRE_VERSION, Kind
from emberkv.types import BATCH_KEYS_MAX, BLOCK_BYTES_MAX, EPOCH_MAX, Version

MAGIC: Final = b"EKV1"
HEADER_BYTES: Final = 32
BODY_BYTES_MAX: Final = 256 << 10
PAYLOAD_BYTES_MAX: Final = BATCH_KEYS_MAX * BLOCK_BYTES_MAX
FRAME_BYTES_MAX: Final = HEADER_BYTES + BODY_BYTES_MAX
"""Largest frame without its payload: what a receiver of whole frames (SEQPACKET) has to be ready for."""

_CRC_PIECE_BYTES: Final = 5120
"""zlib.crc32 releases the GIL above this size, which beside a busy Python thread costs a switch interval."""

_FIXED: Final = struct.Struct("<4sBBHIIQI")
_CRC: Final = struct.Struct("<I")
_CRC_AT: Final = _FIXED.size

_KINDS: Final[dict[int, Kind]] = {int(kind): kind for kind in Kind}
_WITH_PAYLOAD: Final = frozenset((Kind.GET_REPLY, Kind.PUT, Kind.REPLICATE))
_VERSIONLESS: Final = frozenset((Kind.HELLO, Kind.WELCOME, Kind.ERROR))
"""Their header and meaning stay for ever, so that two builds without a common version can say so in words."""

Buffer = bytes | bytearray | memoryview


class Header(NamedTuple):
    """A checked frame header. `body_len` and `payload_len` are within their bounds; the CRC is not checked yet."""

    kind: Kind
    flags: int
    request_id: int
    body_len: int
    payload_len: int


def frame_crc(fixed: Buffer, body: Buffer) -> int:
    """CRC-32 of the first 28 header bytes and the body."""
    crc = zlib.crc32(fixed)
    if len(body) <= _CRC_PIECE_BYTES:
        return zlib.crc32(body, crc)
    view = memoryview(body)
    for start in range(0, len(view), _CRC_PIECE_BYTES):
        crc = zlib.crc32(view[start : start + _CRC_PIECE_BYTES], crc)
    return crc


def join_frame(kind: Kind, request_id: int, body: bytes, payload_len: int) -> bytes:
    """Header and body as they go on the wire. `request_id` is taken modulo 2**32."""
    fixed = _FIXED.pack(MAGIC, WIRE_VERSION, kind, 0, request_id & 0xFFFFFFFF, len(body), payload_len, 0)
    return b"".join((fixed, _CRC.pack(frame_crc(fixed, body)), body))


def decode_header(buffer: Buffer) -> Header:
    """Reads and bounds the first 32 bytes of a frame; raises ProtocolError."""
    if len(buffer) < HEADER_BYTES:
        raise ProtocolError(f"frame header has {len(buffer)} bytes, needs {HEADER_BYTES}")
    magic, version, number, flags, request_id, body_len, payload_len, reserved = _FIXED.unpack_from(buffer)
    if magic != MAGIC:
        raise ProtocolError(f"not an EmberKV frame: it starts with {bytes(magic)!r}")
    kind = _KINDS.get(number)
    if kind is None:
        raise ProtocolError(f"unknown frame kind {number}")
    if version != WIRE_VERSION and kind not in _VERSIONLESS:
        raise ProtocolError(f"frame of wire version {version}, this side speaks {WIRE_VERSION}")
    if flags or reserved:
        raise ProtocolError(f"reserved header fields are not 0 in a {kind.name} frame")
    if body_len > BODY_BYTES_MAX:
        raise ProtocolError(f"body of {body_len} bytes is over the limit of {BODY_BYTES_MAX}")
    if payload_len and (payload_len > PAYLOAD_BYTES_MAX or kind not in _WITH_PAYLOAD):
        raise ProtocolError(f"a {kind.name} frame cannot carry {payload_len} payload bytes")
    return Header(kind, flags, request_id, body_len, payload_len)


def check_crc(header: Header, header_bytes: Buffer, body: Buffer) -> None:
    """Raises ProtocolError unless the body has the stated length and the frame its CRC."""
    if len(body) != header.body_len:
        raise ProtocolError(f"truncated {header.kind.name} frame: {len(body)} of {header.body_len} body bytes")
    if len(header_bytes) < HEADER_BYTES:
        raise ProtocolError(f"frame header has {len(header_bytes)} bytes, needs {HEADER_BYTES}")
    if frame_crc(header_bytes[:_CRC_AT], body) != _CRC.unpack_from(header_bytes, _CRC_AT)[0]:
        raise ProtocolError(f"CRC of a {header.kind.name} frame does not match")


def unpack_head(layout: struct.Struct, body: bytes, kind: Kind) -> tuple[int, ...]:
    """The fixed front part of a body; raises ProtocolError when it is cut short."""
    if len(body) < layout.size:
        raise ProtocolError(f"{kind.name} body has {len(body)} bytes, needs {layout.size}")
    return layout.unpack_from(body)


def check_count(kind: Kind, body: bytes, count: int, head_bytes: int, record_bytes: int) -> None:
    """Raises ProtocolError unless the body holds exactly `count` records and count is within the batch limit."""
    if count > BATCH_KEYS_MAX:
        raise ProtocolError(f"{kind.name} of {count} items is over the limit of {BATCH_KEYS_MAX}")
    if len(body) != head_bytes + count * record_bytes:
        raise ProtocolError(f"{kind.name} body of {len(body)} bytes does not hold {count} items")


def require_batch(kind: Kind, count: int) -> None:
    """On the sending side: raises InvariantViolation when a batch is larger than any receiver would take."""
    if count > BATCH_KEYS_MAX:
        raise InvariantViolation(f"{kind.name} of {count} items is over the limit of {BATCH_KEYS_MAX}: split it")


def check_most(kind: Kind, what: str, values: Iterable[int], most: int) -> None:
    """Raises ProtocolError when any of the values (not negative, at least one) is above `most`."""
    largest = max(values)
    if largest > most:
        raise ProtocolError(f"{kind.name} has {what} {largest}, at most {most} is allowed")


def check_lengths(kind: Kind, lengths: Iterable[int]) -> None:
    """Raises ProtocolError when a block is longer than BLOCK_BYTES_MAX."""
    check_most(kind, "length", lengths, BLOCK_BYTES_MAX)


def check_epochs(kind: Kind, epochs: Iterable[int]) -> None:
    """Raises ProtocolError when an epoch is above EPOCH_MAX, which no coordinator ever gives out."""
    check_most(kind, "epoch", epochs, EPOCH_MAX)


def check_payload(kind: Kind, payload_len: int, stated: int, *, may_be_none: bool) -> None:
    """Raises ProtocolError unless the payload is exactly what the body states (or 0, when it lies in shared memory)."""
    if payload_len != stated and (payload_len or not may_be_none):
        raise ProtocolError(f"{kind.name} states {stated} payload bytes, its header says {payload_len}")


make_version: Final = cast("Callable[[tuple[int, int]], Version]", partial(tuple.__new__, Version))
"""Version from a pair, without the Python frame that a named tuple's own constructor costs."""
