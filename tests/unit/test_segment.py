"""The NVMe format: round trip, hostile bytes, and recovery after every way of tearing the tail."""

from __future__ import annotations

import random

import pytest
import xxhash

from emberkv.errors import NotOurs, ProtocolError
from emberkv.storage import segment as fmt
from emberkv.types import NO_VERSION, Version


def _segment(lengths: list[int], rng: random.Random, number: int = 7) -> tuple[bytearray, list[fmt.BlockHeader]]:
    raw = bytearray(fmt.pack_segment_header(fmt.SegmentHeader(b"s" * 16, b"c" * 32, number, 1 << 30)))
    headers = []
    for at, length in enumerate(lengths):
        payload = rng.randbytes(length)
        header = fmt.BlockHeader(
            number, len(raw), rng.randbytes(40), 0, 1, Version(3, at + 1), NO_VERSION, rng.randbytes(24), at, length,
            0, xxhash.xxh3_128_digest(payload),
        )  # fmt: skip
        raw += fmt.pack_block_header(header) + payload
        raw += bytes(-len(raw) % fmt.PAGE)
        headers.append(header)
    return raw, headers


def _scan(raw: bytes | bytearray) -> list[fmt.BlockHeader]:
    return list(fmt.scan(lambda at, count: bytes(raw[at : at + count]), 7, len(raw)))


def test_headers_and_payloads_come_back() -> None:
    raw, headers = _segment([0, 1, 4096, 10_000], random.Random(1))
    assert fmt.unpack_segment_header(raw[: fmt.PAGE]).segment == 7
    assert _scan(raw) == headers
    for header in headers:
        payload = raw[header.payload_position : header.payload_position + header.length]
        assert fmt.payload_is_right(header, payload)
        assert not header.length or not fmt.payload_is_right(header, bytes(payload[:-1]) + bytes([payload[-1] ^ 1]))


def test_any_cut_leaves_the_whole_blocks_before_it() -> None:
    raw, headers = _segment([5000, 300, 9000], random.Random(2))
    for cut in [*range(0, len(raw), 512), len(raw)]:
        assert _scan(raw[:cut]) == [header for header in headers if header.end <= cut]


def test_any_flipped_header_byte_ends_the_scan_and_is_never_believed() -> None:
    raw, headers = _segment([100, 100, 100], random.Random(3))
    checked = fmt._BLOCK.size + 16
    for at in range(checked):
        hurt = bytearray(raw)
        hurt[headers[1].position + at] ^= 0x40
        assert _scan(hurt) == headers[:1]


def test_a_header_of_another_segment_or_place_is_refused() -> None:
    raw, headers = _segment([100, 100], random.Random(4))
    page = raw[headers[0].position : headers[0].position + fmt.PAGE]
    with pytest.raises(ProtocolError, match="elsewhere"):
        fmt.unpack_block_header(page, 8, headers[0].position)
    with pytest.raises(ProtocolError, match="elsewhere"):
        fmt.unpack_block_header(page, 7, headers[1].position)


def test_another_format_version_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmt, "FORMAT_VERSION", 2)
    page = fmt.pack_segment_header(fmt.SegmentHeader(b"s" * 16, b"c" * 32, 1, 1 << 30))
    monkeypatch.undo()
    with pytest.raises(NotOurs, match="format 2"):
        fmt.unpack_segment_header(page)


def test_lengths_beyond_the_bound_are_refused() -> None:
    header = _segment([10], random.Random(5))[1][0]
    page = fmt.pack_block_header(header._replace(length=(32 << 20) + 1))
    with pytest.raises(ProtocolError, match="names"):
        fmt.unpack_block_header(page, 7, header.position)


def test_noise_is_never_a_block() -> None:
    rng = random.Random(6)
    assert _scan(rng.randbytes(1 << 18)) == []
