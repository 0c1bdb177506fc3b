"""Flipping one byte of a stored block in a node's memory, as a failing memory chip would.

Why it exists: a checksum that never failed proves nothing.
Laws: the arena is sealed, so nobody but the node itself can map it for writing; the byte is changed through the node's
    own map, /proc/<pid>/mem, which the kernel allows a process of the same user for its own children. Nothing else of
    the node is touched.
Limits: Linux.
"""

from __future__ import annotations

from pathlib import Path

from emberkv.errors import Unavailable


def flip_byte(pid: int, arena_inode: int, offset: int) -> tuple[int, int]:
    """Inverts the byte at `offset` of the arena of process `pid`; returns it before and after. Raises Unavailable."""
    address = address_of(Path(f"/proc/{pid}/maps").read_text(), arena_inode, offset)
    try:
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            before = memory.read(1)[0]
            memory.seek(address)
            memory.write(bytes([before ^ 0xFF]))
            memory.seek(address)
            return before, memory.read(1)[0]
    except OSError as error:
        raise Unavailable(f"the memory of process {pid} cannot be written here: {error.strerror}") from error


def address_of(maps: str, inode: int, offset: int) -> int:
    """Address of file offset `offset` in the writable shared map of the file with `inode`, from the text of
    /proc/<pid>/maps. Raises Unavailable."""
    for line in maps.splitlines():
        fields = line.split()
        if len(fields) < 5 or int(fields[4]) != inode or not fields[1].startswith("rw-s"):
            continue
        start, _, end = fields[0].partition("-")
        first, size = int(fields[2], 16), int(end, 16) - int(start, 16)
        if first <= offset < first + size:
            return int(start, 16) + offset - first
    raise Unavailable("the node has no writable map of its arena")
