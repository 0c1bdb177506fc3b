"""Staging: where an engine process lays the bytes of a save for its node to copy.

Why it exists: clients cannot write the arena. Each connection has a small memory file of its own that the client writes
and the node only reads.

    room:  FREE --reserve--> the client fills it --PUT--> the node copies it --PUT_REPLY--> release --> FREE

Laws: the file cannot shrink, so the node never faults; what the client changes while the node copies is the client's
own loss, since the checksum is taken from the node's copy. Freed with the connection.
Limits: rooms are pages; at most size / 4 KiB of them.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from bisect import bisect_left
from typing import Final

import numpy as np

from emberkv.checksum import copy_and_checksum
from emberkv.errors import InvariantViolation, ProtocolError
from emberkv.storage.mapping import SIZE_SEALS, Prefault, close_map, memory_file, require_sealed
from emberkv.types import SLOT_ALIGN, round_up

__all__ = ["StagingArea", "StagingMap", "copy_and_checksum"]


class StagingArea:
    """The node's side: makes the file of at least `total_bytes` and only reads it. Raises ConfigError."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes: Final = round_up(max(total_bytes, 1))
        self.fd = memory_file("emberkv-staging", self.total_bytes)
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
            self._map = mmap.mmap(self.fd, self.total_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            os.close(self.fd)
            raise
        self._view = memoryview(self._map)

    def view(self, offset: int, length: int) -> memoryview:
        """Read-only view of the bytes that a client named. Raises ProtocolError outside the area."""
        if offset < 0 or length < 0 or offset + length > self.total_bytes:
            raise ProtocolError(f"staging bytes {offset}+{length} lie outside its {self.total_bytes}")
        return self._view[offset : offset + length]

    def close(self) -> None:
        """Gives the memory back, at the end of a copy that is under way. Safe to call twice."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            self._view.release()
        except BufferError:
            return  # a copy is under way; the map goes with its last view
        close_map(self._map)


class StagingMap:
    """The client's side: maps the node's file, writes it, and hands out room by first fit.

    `data` is the whole area as a uint8 array, for np.copyto. Safe for several threads. Keeps no hold on `fd`.
    Raises ProtocolError when the file is not what the node announced, OSError when it cannot be mapped.
    """

    def __init__(self, fd: int, total_bytes: int) -> None:
        require_sealed(fd, total_bytes)
        self.total_bytes: Final = total_bytes
        self._map = mmap.mmap(fd, total_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.data = np.frombuffer(self._map, np.uint8)
        self._lock = threading.Lock()
        self._usable = total_bytes // SLOT_ALIGN * SLOT_ALIGN
        # Free spans by ascending start, never touching one another; and their lengths.
        self._starts: list[int] = [0] if self._usable else []
        self._sizes: list[int] = [self._usable] if self._usable else []
        self._live: dict[int, int] = {}
        self._prefault: Prefault | None = None

    def reserve(self, length: int) -> int | None:
        """Offset (a multiple of 4 KiB) of room for `length` bytes, or None when staging is full."""
        size = round_up(max(length, 1))
        with self._lock:
            for index, room in enumerate(self._sizes):
                if room < size:
                    continue
                start = self._starts[index]
                if room == size:
                    del self._starts[index], self._sizes[index]
                else:
                    self._starts[index] = start + size
                    self._sizes[index] = room - size
                self._live[start] = size
                return start
        return None

    def release(self, offset: int) -> None:
        """Gives room back. Raises InvariantViolation when it is not live."""
        with self._lock:
            size = self._live.pop(offset, 0)
            if not size:
                raise InvariantViolation(f"staging room at {offset} is released twice or was never reserved")
            at = bisect_left(self._starts, offset)
            if at < len(self._starts) and self._starts[at] == offset + size:
                size += self._sizes[at]
                del self._starts[at], self._sizes[at]
            if at and self._starts[at - 1] + self._sizes[at - 1] == offset:
                self._sizes[at - 1] += size
            else:
                self._starts.insert(at, offset)
                self._sizes.insert(at, size)

    def view(self, offset: int, length: int) -> memoryview:
        """Writable view of room that was reserved at `offset`; InvariantViolation beyond it."""
        if length > self._live.get(offset, 0):
            raise InvariantViolation(f"staging bytes {offset}+{length} were not reserved")
        return self.data[offset : offset + length].data

    def usage(self) -> tuple[int, int]:
        """(bytes reserved, bytes of the area)."""
        with self._lock:
            return sum(self._live.values()), self.total_bytes

    def check(self) -> None:
        """Proves that spans are sorted, apart, and that free + reserved == all; raises InvariantViolation."""
        with self._lock:
            ends = [start + size for start, size in zip(self._starts, self._sizes, strict=True)]
            apart = all(end < start for end, start in zip(ends, self._starts[1:], strict=False))
            if not apart or sum(self._sizes) + sum(self._live.values()) != self._usable:
                raise InvariantViolation(f"staging spans do not add up: {self._starts} {self._sizes} {self._live}")

    def prefault(self) -> None:
        """Touches the area in the background, so that the first saves need not (a first touch runs at 1.6 GB/s)."""
        if self._prefault is None:
            self._prefault = Prefault(self._map, self.total_bytes, "staging-prefault")

    def close(self) -> None:
        """Unmaps once no view of it is left. Safe to call twice."""
        if self._prefault is not None:
            self._prefault.stop()
        self.data = np.empty(0, np.uint8)
        close_map(self._map)
