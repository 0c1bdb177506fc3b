"""The DRAM tier: one sealed memory file that the node writes and its clients map read-only.

Why it exists: a block of the near node is read in place, without a copy and without trust in the reader.
Laws: the file is mapped writable once, before F_SEAL_FUTURE_WRITE; after it nobody, not even the node through a new
descriptor, can map or write it; it can neither shrink nor grow, so no reader faults. Its memory is touched in the
background after the start.
Limits: not larger than MEMORY_SHARE_MAX of the memory that is free at the start (P8); one lock outside protects
reserve and release (the runtime's).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Final

from emberkv.errors import ConfigError, InvariantViolation
from emberkv.ports import Slot as AnySlot
from emberkv.storage.arena import SlabArena, Slot, class_of
from emberkv.storage.mapping import (
    F_SEAL_FUTURE_WRITE,
    SIZE_SEALS,
    Prefault,
    available_bytes,
    close_map,
    huge_bytes_of,
    huge_page_policy,
    memory_file,
)

MEMORY_SHARE_MAX: Final = 0.9
"""An arena may take this much of the memory that is available now; the rest is for the process and its peers."""
_NAME: Final = "emberkv-arena"


class DramTier:
    """The Tier port over a sealed memfd of `total_bytes`. Raises ConfigError when the memory is not there.

    `fd` may be given to any local process. `view` may be called from any thread that owns the slot.
    """

    def __init__(self, total_bytes: int) -> None:
        available = available_bytes()
        if total_bytes > available * MEMORY_SHARE_MAX:
            raise ConfigError(
                f"arena_bytes: {total_bytes >> 20} MiB is more than this machine can give "
                f"({available >> 20} MiB available): make the arena smaller"
            )
        self.arena: Final = SlabArena(total_bytes)
        self.total_bytes: Final = self.arena.total_bytes
        self.block_bytes_max: Final = self.arena.slot_bytes_max
        """Longest block that ever fits: a small arena has small slabs."""
        self.fd = memory_file(_NAME, self.total_bytes)
        try:
            self._map = mmap.mmap(self.fd, self.total_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            # Only now: the seal refuses every map or write that comes after it, and spares the one that exists.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE | SIZE_SEALS)
        except OSError as error:
            os.close(self.fd)
            raise ConfigError(f"arena_bytes: cannot map {self.total_bytes >> 20} MiB: {error.strerror}") from error
        self._view = memoryview(self._map)
        self._prefault: Prefault | None = None
        self._huge_bytes = -1

    def reserve(self, length: int) -> Slot | None:
        """As ports.Tier."""
        return self.arena.reserve(length)

    def view(self, slot: AnySlot) -> memoryview:
        """As ports.Tier."""
        return self._view[slot.offset : slot.offset + slot.length]

    def pages(self, slot: AnySlot) -> memoryview:
        """The slot's bytes and all its room behind them: whole pages, for direct reads and writes."""
        return self._view[slot.offset : slot.offset + slot.size_class]

    def release(self, slot: AnySlot) -> None:
        """As ports.Tier. Raises InvariantViolation for a slot that is not live here."""
        if not isinstance(slot, Slot):
            raise InvariantViolation(f"a slot of another tier was given to the DRAM tier: {slot!r}")
        self.arena.release(slot)

    def usage(self) -> tuple[int, int]:
        """As ports.Tier."""
        return self.arena.usage()

    def size_class(self, length: int) -> int:
        """As ports.Tier."""
        return class_of(length)

    def slabs(self, length: int, cold: Iterable[AnySlot]) -> Iterator[Iterator[AnySlot]]:
        """As ports.Tier."""
        return self.arena.slabs(length, cold)

    def prefault(self) -> None:
        """Begins to touch the whole arena in the background; `stats` shows how far it is. Once."""
        if self._prefault is None:
            self._prefault = Prefault(self._map, self.total_bytes, "prefault")

    def stats(self) -> dict[str, object]:
        """What `status` shows.

        `prefaulted_bytes` of `total` touched so far; `thp`: the system's policy for huge pages behind memory files;
        `thp_bytes`: what it came to, -1 until the prefault is through; `hugetlb`: reserved huge pages, never used.
        """
        done = self._prefault.done_bytes if self._prefault is not None else 0
        if done == self.total_bytes and self._huge_bytes < 0:
            self._huge_bytes = huge_bytes_of(_NAME)
        return {
            "prefaulted_bytes": done,
            "total": self.total_bytes,
            "thp": huge_page_policy(),
            "thp_bytes": self._huge_bytes,
            "hugetlb": False,
        }

    def close(self) -> None:
        """Stops touching and gives the descriptor back; the map lives until its last view is gone. Repeatable."""
        if self.fd < 0:
            return
        if self._prefault is not None:
            self._prefault.stop()
        os.close(self.fd)
        self.fd = -1
        try:
            self._view.release()
        except BufferError:
            return  # numpy or a socket call still reads a slot: the last view takes the map with it
        close_map(self._map)
