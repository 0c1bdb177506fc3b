"""The NVMe tier's format (docs/FORMATS.md): pure bytes in, plain records out; no file, clock or lock.

Why it exists: every block on disk says itself what it is, so an index is never the only witness, and the simulator's
disk runs this very code.

    segment:  header page | (block header page | payload, padded to pages) ...

Laws: everything starts on a 4 KiB page, so a payload can be read with O_DIRECT straight into an arena slot. A header is
believed only if its own checksum, its segment's id and the position it names are right: what an older life of the same
disk area left behind is never taken for a block. A payload is believed only if its checksum is right.
Limits: no length is believed beyond its named bound. Integers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import xxhash

from emberkv.errors import NotOurs, ProtocolError
from emberkv.types import (
    BLOCK_BYTES_MAX,
    CHECKSUM_BYTES,
    KEY_BYTES,
    NO_VERSION,
    PUT_ID_BYTES,
    SCOPE_BYTES,
    SLOT_ALIGN,
    Version,
    round_up,
)

FORMAT_VERSION: Final = 1
PAGE: Final = SLOT_ALIGN
SEGMENT_MAGIC: Final = b"EMBRSEG\0"
BLOCK_MAGIC: Final = b"EMBRBLK\0"
STORE_ID_BYTES: Final = 16
DISK_KEY_BYTES: Final = SCOPE_BYTES + KEY_BYTES
"""An internal key: the namespace's scope, then the block key."""
TOMBSTONE_FLAG: Final = 1
PARTS_MAX: Final = 1024
"""More KV partitions than any engine has ranks."""

_SEGMENT: Final = struct.Struct(f"<8sHH4x{STORE_ID_BYTES}s32sQQ")
_BLOCK: Final = struct.Struct(f"<8sHHHHQQ{DISK_KEY_BYTES}sQQQQ{PUT_ID_BYTES}sIIQ{CHECKSUM_BYTES}s")


class SegmentHeader(NamedTuple):
    """First page of a segment file: whose it is, and which one. `cluster` is the 32-byte digest of the cluster id."""

    store_id: bytes
    cluster: bytes
    segment: int
    nbytes: int
    """Size up to which the segment may grow, in bytes."""


class BlockHeader(NamedTuple):
    """The page in front of a payload of `length` bytes; `position` is that page's own offset in its segment."""

    segment: int
    position: int
    key: bytes
    part: int
    parts: int
    version: Version
    prev: Version
    put_id: bytes
    depth: int
    length: int
    expiry_ms: int
    checksum: bytes
    tombstone: bool = False
    """The key was deleted at this version; there is no payload."""

    @property
    def payload_position(self) -> int:
        """Offset of the payload's first byte in the segment."""
        return self.position + PAGE

    @property
    def end(self) -> int:
        """Offset of the page after the payload: where the next block begins."""
        return self.position + PAGE + round_up(self.length)


def pack_segment_header(header: SegmentHeader) -> bytes:
    """One page."""
    return _page(
        _SEGMENT.pack(
            SEGMENT_MAGIC, FORMAT_VERSION, PAGE, header.store_id, header.cluster, header.segment, header.nbytes
        )
    )


def unpack_segment_header(page: bytes | memoryview) -> SegmentHeader:
    """Raises ProtocolError for damage and NotOurs for another format version."""
    raw = _checked(page, _SEGMENT.size, SEGMENT_MAGIC, "segment header")
    _, version, page_bytes, store_id, cluster, segment, nbytes = _SEGMENT.unpack(raw)
    if version != FORMAT_VERSION or page_bytes != PAGE:
        raise NotOurs(
            f"segment format {version} with pages of {page_bytes}: this version reads {FORMAT_VERSION}/{PAGE}"
        )
    return SegmentHeader(store_id, cluster, segment, nbytes)


def pack_block_header(header: BlockHeader) -> bytes:
    """One page."""
    return _page(
        _BLOCK.pack(
            BLOCK_MAGIC,
            FORMAT_VERSION,
            TOMBSTONE_FLAG if header.tombstone else 0,
            header.part,
            header.parts,
            header.segment,
            header.position,
            header.key,
            *header.version,
            *header.prev,
            header.put_id,
            header.depth,
            header.length,
            header.expiry_ms,
            header.checksum,
        )
    )


def unpack_block_header(page: bytes | memoryview, segment: int, position: int) -> BlockHeader:
    """The header found at `position` of `segment`; raises ProtocolError if it is damaged or from elsewhere."""
    raw = _checked(page, _BLOCK.size, BLOCK_MAGIC, "block header")
    (_, version, flags, part, parts, own_segment, own_position, key, epoch, seq, prev_epoch, prev_seq, put_id, depth,
     length, expiry_ms, checksum) = _BLOCK.unpack(raw)  # fmt: skip
    if version != FORMAT_VERSION or flags & ~TOMBSTONE_FLAG:
        raise ProtocolError(f"block header of format {version} with flags {flags:#x}")
    if (own_segment, own_position) != (segment, position):
        raise ProtocolError(f"block header of segment {own_segment} at {own_position} was found elsewhere")
    if length > BLOCK_BYTES_MAX or not 1 <= parts <= PARTS_MAX or part >= parts:
        raise ProtocolError(f"block header names {length} bytes, part {part} of {parts}")
    prev = Version(prev_epoch, prev_seq) if prev_epoch or prev_seq else NO_VERSION
    tombstone = bool(flags)
    if tombstone and length:
        raise ProtocolError(f"block header of a deleted key names {length} bytes")
    own = Version(epoch, seq)
    return BlockHeader(
        segment, position, key, part, parts, own, prev, put_id, depth, length, expiry_ms, checksum, tombstone
    )


def payload_is_right(header: BlockHeader, payload: bytes | memoryview) -> bool:
    """Are these the bytes that were put? `payload` is exactly the header's length."""
    return len(payload) == header.length and xxhash.xxh3_128_digest(payload) == header.checksum


def scan(read: Callable[[int, int], bytes], segment: int, nbytes: int, start: int = PAGE) -> Iterator[BlockHeader]:
    """Headers of a segment of `nbytes` bytes, from the block at `start` on, up to the first that is torn, absent or cut
    off.

    `read(offset, count)` may return less at the end of the file. Payloads are not read: a torn one is found by its
    checksum when it is asked for. Where the iterator ends, the tail is cut: blocks are appended one after another, so
    nothing that was synced lies behind a place that was not written.
    """
    position = start
    while position + PAGE <= nbytes:
        try:
            header = unpack_block_header(read(position, PAGE), segment, position)
        except ProtocolError:
            return
        if header.end > nbytes:
            return
        yield header
        position = header.end


def _page(raw: bytes) -> bytes:
    """`raw`, its own checksum, and zeros up to a page."""
    return (raw + xxhash.xxh3_128_digest(raw)).ljust(PAGE, b"\0")


def _checked(page: bytes | memoryview, count: int, magic: bytes, what: str) -> bytes:
    """The first `count` bytes of a page, after its magic and checksum were found right."""
    raw = bytes(page[: count + CHECKSUM_BYTES])
    if len(page) < PAGE or raw[:8] != magic or xxhash.xxh3_128_digest(raw[:count]) != raw[count:]:
        raise ProtocolError(f"{what} is absent, torn or damaged")
    return raw[:count]
