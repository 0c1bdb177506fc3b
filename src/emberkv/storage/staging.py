"""Staging: where an engine process lays the bytes of a save for its node to copy.

Why it exists: clients cannot write the arena. Each connection has a small memory file of its own that the client writes
and the node only reads.
Laws: the file cannot shrink, so the node never faults; what the client changes while the node copies is the client's
own loss, since the checksum is taken from the node's copy. Freed with the connection.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque

import numpy as np
import xxhash

from emberkv.errors import ProtocolError
from emberkv.types import round_up

PIECE_BYTES = 256 << 10
"""Copied and checksummed in pieces that stay in the L2 cache between the two."""


def copy_and_checksum(target: memoryview, source: memoryview) -> bytes:
    """Copies `source` into `target` (equal lengths) and returns the xxh3-128 digest of the bytes in `target`."""
    if target.nbytes != source.nbytes:
        raise ProtocolError(f"{source.nbytes} bytes for a slot of {target.nbytes}")
    to, come = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if target.nbytes <= PIECE_BYTES:
        np.copyto(to, come)
        return xxhash.xxh3_128_digest(to)
    state = xxhash.xxh3_128()
    for start in range(0, target.nbytes, PIECE_BYTES):
        piece = to[start : start + PIECE_BYTES]
        np.copyto(piece, come[start : start + PIECE_BYTES])
        state.update(piece)
    return state.digest()


class StagingArea:
    """The node's side: reads only."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = round_up(total_bytes)
        self.fd = os.memfd_create("emberkv-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.total_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._map = mmap.mmap(self.fd, self.total_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._view = memoryview(self._map)

    def view(self, offset: int, length: int) -> memoryview:
        """Bytes that a client named. Raises ProtocolError outside the area."""
        if offset < 0 or length < 0 or offset + length > self.total_bytes:
            raise ProtocolError(f"staging bytes {offset}+{length} lie outside its {self.total_bytes}")
        return self._view[offset : offset + length]

    def close(self) -> None:
        """Gives the memory back."""
        self._view.release()
        os.close(self.fd)
        try:
            self._map.close()
        except BufferError:
            pass  # a copy is under way; the map goes with its last view


class StagingMap:
    """The client's side: writes, and hands out room by first fit in page steps."""

    def __init__(self, fd: int, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._map = mmap.mmap(fd, total_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.data = np.frombuffer(self._map, np.uint8)
        self._free: deque[tuple[int, int]] = deque([(0, total_bytes)])
        self._used: dict[int, int] = {}

    def reserve(self, length: int) -> int | None:
        """Offset of room for `length` bytes, or None."""
        size = round_up(max(length, 1))
        for index, (start, room) in enumerate(self._free):
            if room >= size:
                if room == size:
                    del self._free[index]
                else:
                    self._free[index] = (start + size, room - size)
                self._used[start] = size
                return start
        return None

    def release(self, offset: int) -> None:
        """Gives room back."""
        spans = sorted([*self._free, (offset, self._used.pop(offset))])
        merged: list[tuple[int, int]] = []
        for start, size in spans:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = deque(merged)
