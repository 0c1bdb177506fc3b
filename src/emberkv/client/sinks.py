"""Where loaded blocks go: rows of the caller's array, or new memory that the caller will own.

Why it exists: the copy is the largest part of a load and must be one call that gives the interpreter lock away once,
whatever the number of blocks (beside a busy Python thread each return to the lock costs up to 5 ms).
Laws: bytes are written only while the call that owns the sink runs; a slice assignment of a memoryview holds the lock
and is never used. What a sink holds for a miss is unspecified.
Limits: blocks of the arena start on 4 KiB pages and are contiguous, so a block is a run of rows of 4096 bytes, or of
wider ones where its place allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from emberkv.client.connection import Arena, Bytes
from emberkv.errors import ProtocolError
from emberkv.messages import BlockInfo
from emberkv.types import SLOT_ALIGN, MissReason, round_up

ROW_BYTES_MIN: Final = 64
"""Rows below a cache line make the gather slower than a call per block."""
UFUNC_HELD_MAX: Final = 500
"""numpy keeps the interpreter lock for element-wise work up to this many elements."""

Pick = tuple[int, BlockInfo]
"""Index of the key in the call, and what the node said of it (a hit)."""


class Sink(Protocol):
    """Takes the bytes of one get call."""

    block_bytes: int
    """Expected length of each block; 0 when not known beforehand."""

    def refuse(self, info: BlockInfo) -> MissReason:
        """NONE, or why this hit cannot be taken."""
        ...

    def copy(self, arena: Arena, picks: Sequence[Pick], asked: Sequence[int]) -> int:
        """Copies pinned blocks out of the arena; returns how often that gave the interpreter lock away."""
        ...

    def place(self, picks: Sequence[Pick]) -> list[memoryview]:
        """Writable views for the payload of the picks, in order."""
        ...


def row_width(picks: Sequence[Pick], lengths: Sequence[int]) -> int:
    """Widest rows, in bytes, that all picks (blocks of `lengths` bytes) begin and end on: for blocks of one size in
    slabs mostly the block itself, so that a gather is a few long copies."""
    return gcd(*[info.offset for _, info in picks], *lengths)


def row_index(arena: Arena, picks: Sequence[Pick], width: int, lengths: Sequence[int]) -> npt.NDArray[np.intp]:
    """Numbers of the arena rows (of `width` bytes) that hold the picks one after another. Raises ProtocolError.

    In steps of at most UFUNC_HELD_MAX elements, because above that numpy gives the interpreter lock away.
    """
    offsets = [info.offset for _, info in picks]
    size = len(arena.data)
    for offset, length in zip(offsets, lengths, strict=True):
        if offset % SLOT_ALIGN or offset + length > size:
            raise ProtocolError("the node named a block outside its arena")
    starts = np.array(offsets, np.intp) // width
    counts = [length // width for length in lengths]
    if max(counts) == 1:
        return starts
    index = np.empty(sum(counts), np.intp)
    at = 0
    for start, count in zip(starts.tolist(), counts, strict=True):
        for first in range(0, count, UFUNC_HELD_MAX):
            step = min(count - first, UFUNC_HELD_MAX)
            index[at : at + step] = np.arange(start + first, start + first + step)  # numpy copy
            at += step
    return index


class RowsSink:
    """Rows of the caller's array: uint8 [n, block_bytes], C-contiguous."""

    def __init__(self, dest: Bytes) -> None:
        self.dest = dest
        self.block_bytes = int(dest.shape[1])
        self._view = dest.reshape(-1).data

    def refuse(self, info: BlockInfo) -> MissReason:
        """A block of another length is of another layout: its bytes would be nonsense in these rows."""
        return MissReason.NONE if info.length == self.block_bytes else MissReason.FINGERPRINT

    def copy(self, arena: Arena, picks: Sequence[Pick], asked: Sequence[int]) -> int:
        """One gather, if the picks lie dense among what was asked for; else one per run of neighbours."""
        if gcd(self.block_bytes, SLOT_ALIGN) < ROW_BYTES_MIN:
            return self._copy_each(arena, picks)
        first, last = picks[0][0], picks[-1][0]
        if last - first == len(picks) - 1:
            return self._gather(arena, picks, first, len(picks))
        # Rows between two picks that were asked for and missed may be overwritten: fill them from a pinned neighbour.
        span = [index for index in asked if first <= index <= last]
        if last - first == len(span) - 1 and len(span) <= 2 * len(picks):
            found = dict(picks)
            filled = [(index, found.get(index, picks[0][1])) for index in span]
            return self._gather(arena, filled, first, len(filled))
        calls = start = 0
        for at in range(1, len(picks) + 1):
            if at == len(picks) or picks[at][0] != picks[at - 1][0] + 1:
                calls += self._gather(arena, picks[start:at], picks[start][0], at - start)
                start = at
        return calls

    def _gather(self, arena: Arena, picks: Sequence[Pick], first: int, count: int) -> int:
        lengths = [self.block_bytes] * count
        width = row_width(picks, lengths)
        index = row_index(arena, picks, width, lengths)
        out = self.dest[first : first + count].reshape(-1, width)
        # mode="raise" would buffer the output; the index has been checked.
        arena.rows(width).take(index, axis=0, out=out, mode="clip")
        return 1

    def _copy_each(self, arena: Arena, picks: Sequence[Pick]) -> int:
        for index, info in picks:
            if info.offset + self.block_bytes > len(arena.data):
                raise ProtocolError("the node named a block outside its arena")
            np.copyto(self.dest[index], arena.data[info.offset : info.offset + self.block_bytes])
        return len(picks)

    def place(self, picks: Sequence[Pick]) -> list[memoryview]:
        """The rows themselves: the kernel writes into them."""
        size = self.block_bytes
        return [self._view[index * size : (index + 1) * size] for index, _ in picks]


class NewSink:
    """New memory, one allocation per answer; `data[i]` is a read-only view of the i-th block once it was loaded."""

    def __init__(self, count: int) -> None:
        self.block_bytes = 0
        self.data: list[memoryview | None] = [None] * count

    def refuse(self, _info: BlockInfo) -> MissReason:
        """Any length will do."""
        return MissReason.NONE

    def copy(self, arena: Arena, picks: Sequence[Pick], asked: Sequence[int]) -> int:
        """One gather of whole pages; the views are trimmed to the blocks' lengths."""
        del asked
        padded = [round_up(info.length) for _, info in picks]
        width = row_width(picks, padded)
        index = row_index(arena, picks, width, padded)
        out = np.empty((len(index), width), np.uint8)
        arena.rows(width).take(index, axis=0, out=out, mode="clip")
        self._cut(out.reshape(-1).data.toreadonly(), picks, padded)
        return 1

    def place(self, picks: Sequence[Pick]) -> list[memoryview]:
        """Slices of one new buffer, without gaps."""
        lengths = [info.length for _, info in picks]
        buffer = np.empty(sum(lengths), np.uint8).data
        self._cut(buffer.toreadonly(), picks, lengths)
        places, start = [], 0
        for length in lengths:
            places.append(buffer[start : start + length])
            start += length
        return places

    def _cut(self, view: memoryview, picks: Sequence[Pick], strides: Sequence[int]) -> None:
        start = 0
        for (index, info), stride in zip(picks, strides, strict=True):
            self.data[index] = view[start : start + info.length]
            start += stride
