"""Which reads serve a batch of blocks: sorted by place, neighbours merged, the head of the prefix first. Pure.

Why it exists: a device is fast when it is asked for few long pieces at once, whatever the order of the keys.
Laws: every wanted block is in exactly one extent. An extent's buffers lie in the order of its bytes: the header page of
each block (scratch), then its slot; what lies between two blocks is read into scratch and thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from emberkv.storage.disk import DiskPlace
from emberkv.storage.segment import PAGE
from emberkv.types import Version, round_up

EXTENT_BYTES_MAX: Final = 4 << 20
GAP_BYTES_MAX: Final = 64 << 10
"""Reading over so much that nobody wants costs less than one more request."""


class Wanted(NamedTuple):
    """A block to be read. `target`: page-aligned room for its bytes, in whole pages."""

    order: int
    """Its position in the request: the head of the prefix is 0."""
    key: bytes
    place: DiskPlace
    version: Version
    length: int
    target: memoryview


class Extent(NamedTuple):
    """One read of `nbytes` from `offset` on."""

    directory: int
    segment: int
    offset: int
    nbytes: int
    blocks: list[Wanted]


def extents_of(wanted: Sequence[Wanted], extent_bytes_max: int = EXTENT_BYTES_MAX) -> list[Extent]:
    """Extents that bring all of `wanted`; that with the head of the prefix first."""
    extents: list[Extent] = []
    run: list[Wanted] = []
    start = end = 0
    where = (-1, -1)
    for block in sorted(wanted, key=lambda block: block.place):
        place, after = block.place, block.place.position + PAGE + round_up(block.length)
        near = (place.directory, place.segment) == where and end <= place.position <= end + GAP_BYTES_MAX
        if run and (not near or after - start > extent_bytes_max):
            extents.append(Extent(*where, start, end - start, run))
            run = []
        if not run:
            start, where = place.position, (place.directory, place.segment)
        run.append(block)
        end = after
    if run:
        extents.append(Extent(*where, start, end - start, run))
    extents.sort(key=lambda extent: min(block.order for block in extent.blocks))
    return extents


def buffers(extent: Extent, scratch: memoryview) -> list[memoryview]:
    """Where the bytes of an extent go, one buffer after another; header pages are the first pages of `scratch`, in the
    order of the blocks, and gaps share what lies behind them (GAP_BYTES_MAX)."""
    into: list[memoryview] = []
    at = extent.offset
    gap = scratch[len(extent.blocks) * PAGE :]
    for number, block in enumerate(extent.blocks):
        if block.place.position > at:
            into.append(gap[: block.place.position - at])
        into.append(scratch[number * PAGE : (number + 1) * PAGE])
        if block.length:
            into.append(block.target[: round_up(block.length)])
        at = block.place.position + PAGE + round_up(block.length)
    return into


def scratch_bytes(extent: Extent) -> int:
    """How large `scratch` has to be."""
    return len(extent.blocks) * PAGE + GAP_BYTES_MAX
