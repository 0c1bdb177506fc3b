"""Memory files and maps: sealing, touching memory ahead of use, and how much memory there is.

Why it exists: dram.py and staging.py share exactly these calls to the kernel, and nobody else makes them.
Laws: a file that another process maps can neither shrink nor grow, so that no reader can be made to fault.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from emberkv.errors import ConfigError, ProtocolError

F_SEAL_FUTURE_WRITE: Final = 0x0010
"""Linux 5.1: maps that exist stay writable, no new one can be; absent from Python's fcntl."""
SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PREFAULT_PIECE_BYTES: Final = 16 << 20
"""About 10 ms at the 1.6 GB/s of a first touch: how long closing may wait; large enough that the call costs nothing."""

_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int


def page_buffer(nbytes: int) -> memoryview:
    """Private memory that begins on a page, for direct reads and writes."""
    return memoryview(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def memory_file(name: str, total_bytes: int) -> int:
    """Descriptor of a new, unsealed memory file. Raises ConfigError when the system gives none."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ConfigError(f"cannot create a memory file for {name}: {error.strerror}") from error
    try:
        os.ftruncate(fd, total_bytes)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"cannot create a memory file of {total_bytes} bytes for {name}: {error.strerror}") from error
    return fd


def require_sealed(fd: int, total_bytes: int) -> None:
    """For a descriptor that came from a peer: raises ProtocolError unless it is that long and can never shrink."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
    except OSError as error:
        raise ProtocolError(f"the peer sent a descriptor that is no memory file: {error.strerror}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("the peer sent a memory file that it could shrink under its readers")
    if not 0 < total_bytes <= size:
        raise ProtocolError(f"the peer announced {total_bytes} bytes and sent a memory file of {size}")


def close_map(area: mmap.mmap) -> None:
    """Unmaps, or leaves it to the last view that is still in use."""
    try:
        area.close()
    except BufferError:
        pass  # a copy is under way; the map ends with its view


class Prefault:
    """Touches a writable map from its start in the background, so that later copies run at memory speed.

    First touch costs an order of magnitude more than a copy (measured: 1.6 GB/s against 20).
    `done_bytes` only rises. A kernel without MADV_POPULATE_WRITE (before 5.14) leaves it at 0: first use touches.
    """

    def __init__(self, area: mmap.mmap, total_bytes: int, name: str) -> None:
        self.done_bytes = 0
        self._area = area
        self._total_bytes = total_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # The buffer object keeps the map from being closed under the kernel's feet.
        held = ctypes.c_char.from_buffer(self._area)
        base = ctypes.addressof(held)
        _libc.madvise(base, self._total_bytes, _MADV_HUGEPAGE)  # a wish: refused where huge pages are off
        while self.done_bytes < self._total_bytes and not self._stop.is_set():
            size = min(PREFAULT_PIECE_BYTES, self._total_bytes - self.done_bytes)
            # ctypes gives the interpreter away during the call.
            if _libc.madvise(base + self.done_bytes, size, _MADV_POPULATE_WRITE) != 0:
                return
            self.done_bytes += size

    def stop(self) -> None:
        """Ends after the piece that is being touched; safe to call twice."""
        self._stop.set()
        self._thread.join()


def populate_read(address: int, total_bytes: int) -> bool:
    """Fills the page table of a read-only map at `address` (its pages must be there: no memory is allocated twice).

    Doubles the rate of the first read of each page (measured: 20 GB/s against 10). The interpreter is free meanwhile.
    False: this kernel cannot; first use does it.
    """
    return bool(_libc.madvise(address, total_bytes, _MADV_POPULATE_READ) == 0)


def huge_page_policy() -> str:
    """What the system allows for memory files: always, within_size, advise, never, deny, force; or unknown."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
        return text[text.index("[") + 1 : text.index("]")]
    except (OSError, ValueError):
        return "unknown"


def huge_bytes_of(path: str) -> int:
    """Bytes that this process maps by huge pages, of the maps whose name contains `path`. Reads all of smaps."""
    total, ours = 0, False
    try:
        with Path("/proc/self/smaps").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line[:1] in "0123456789abcdef":
                    ours = path in line
                elif ours and line.startswith("ShmemPmdMapped:"):
                    total += int(line.split()[1]) * 1024
    except OSError:
        return 0
    return total


def available_bytes() -> int:
    """Memory that can be taken now without swapping: MemAvailable, or what the tightest cgroup above us has left."""
    available = 1 << 62
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass  # not a Linux that tells; the cgroup may
    for folder in _cgroup_folders():
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(folder / limit_name)
            if limit is not None:
                used = (_number(folder / usage_name) or 0) - _inactive_file_bytes(folder)
                available = min(available, max(0, limit - max(0, used)))
    return available


def _cgroup_folders() -> Iterator[Path]:
    """Folders of our memory cgroup (v2 or v1) and of all above it, as far as this mount namespace shows them."""
    yield from (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup/memory") if "memory" in controllers.split(",") else Path("/sys/fs/cgroup")
        if controllers and "memory" not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), 0, -1):
            yield root.joinpath(*parts[:depth])


def _number(path: Path) -> int | None:
    """Content of a one-number file; None when it is absent or says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file_bytes(folder: Path) -> int:
    """Page cache of a cgroup that the kernel drops before anything is short."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split()[:2] for line in lines if " " in line)
    return int(values.get("total_inactive_file", values.get("inactive_file", "0")))
