"""The DRAM tier: one sealed memory file that the node writes and its clients map read-only.

Laws: the file is mapped writable once, before F_SEAL_FUTURE_WRITE; after it nobody, not even the node through a new
descriptor, can map or write it; it can neither shrink nor grow, so no reader faults. Memory is touched in the background
after the start, because first touch costs an order of magnitude more than later copies.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from pathlib import Path

from emberkv.errors import ConfigError
from emberkv.ports import Slot as AnySlot
from emberkv.storage.arena import SlabArena, Slot, victim_helps

F_SEAL_FUTURE_WRITE = 0x0010
MADV_POPULATE_WRITE = 23
PREFAULT_PIECE_BYTES = 16 << 20
"""Small enough that `close` and other threads wait milliseconds, large enough that the call costs nothing."""
MEMORY_SHARE_MAX = 0.9
"""An arena may take this much of the memory that is available now; the rest is for the process and its peers."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def available_bytes() -> int:
    """MemAvailable, or the cgroup's limit if that is lower."""
    available = 1 << 62
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            available = min(available, int(text))
    return available


class DramTier:
    """The Tier port over a sealed memfd. Raises ConfigError when the memory is not there."""

    def __init__(self, total_bytes: int) -> None:
        available = available_bytes()
        if total_bytes > available * MEMORY_SHARE_MAX:
            raise ConfigError(
                f"arena_bytes: {total_bytes >> 20} MiB is more than this machine can give "
                f"({available >> 20} MiB available): make the arena smaller"
            )
        self.arena = SlabArena(total_bytes)
        self.total_bytes = self.arena.total_bytes
        self.fd = os.memfd_create("emberkv-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.total_bytes)
        self._map = mmap.mmap(self.fd, self.total_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        fcntl.fcntl(
            self.fd,
            fcntl.F_ADD_SEALS,
            F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
        )
        self._view = memoryview(self._map)
        self._prefaulted = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def reserve(self, length: int) -> Slot | None:
        """As ports.Tier."""
        return self.arena.reserve(length)

    def view(self, slot: AnySlot) -> memoryview:
        """As ports.Tier."""
        return self._view[slot.offset : slot.offset + slot.length]

    def release(self, slot: AnySlot) -> None:
        """As ports.Tier."""
        assert isinstance(slot, Slot)
        self.arena.release(slot)

    def usage(self) -> tuple[int, int]:
        """As ports.Tier."""
        return self.arena.usage()

    def victim_helps(self, slot: AnySlot, length: int) -> bool:
        """As ports.Tier."""
        return victim_helps(slot.length, length)

    def prefault(self) -> None:
        """Begins to touch the whole arena in the background."""
        self._thread = threading.Thread(target=self._prefault, name="prefault", daemon=True)
        self._thread.start()

    def _prefault(self) -> None:
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        while self._prefaulted < self.total_bytes and not self._stop.is_set():
            size = min(PREFAULT_PIECE_BYTES, self.total_bytes - self._prefaulted)
            # ctypes gives the interpreter away during the call. A kernel without this advice touches at first use.
            if _libc.madvise(base + self._prefaulted, size, MADV_POPULATE_WRITE) != 0:
                return
            self._prefaulted += size

    def stats(self) -> dict[str, object]:
        """What `status` shows: bytes touched so far, and whether huge pages may back the file."""
        try:
            text = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
            thp = text[text.index("[") + 1 : text.index("]")]
        except (OSError, ValueError):
            thp = "unknown"
        return {"prefaulted_bytes": self._prefaulted, "total": self.total_bytes, "thp": thp, "hugetlb": False}

    def close(self) -> None:
        """Stops touching and gives the descriptor back; the map lives until its last view is gone."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        os.close(self.fd)
