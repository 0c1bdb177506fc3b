"""The seams inside the NVMe tier: files of one directory, and the index. Plain data and Protocols of few verbs.

Why it exists: the tier's logic (segment_store.py) runs over real files, over files that fail on purpose and over the
simulator's disk, and must not notice which.
Laws: an OSError of the system comes out of a verb as it is; the tier decides what it means. What was written is durable
after `sync` returned and not before. Nothing is ever written twice at one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from emberkv.types import Version


class SegmentFiles(Protocol):
    """Segment files of one directory. Offsets and lengths are multiples of a page; buffers start on a page.

    `read` may be called by many threads at once; the other verbs by one thread at a time (the tier's writer).
    """

    def segments(self) -> list[tuple[int, int]]:
        """(number, size in bytes) of each segment file there is, ascending."""
        ...

    def read(self, segment: int, offset: int, into: Sequence[memoryview]) -> int:
        """Fills the buffers one after another; returns how many bytes came, less only at the end of the file."""
        ...

    def write(self, segment: int, offset: int, pieces: Sequence[memoryview]) -> None:
        """Writes all of the pieces one after another; creates the file when it is not there."""
        ...

    def sync(self, segment: int) -> None:
        """Everything written to the segment so far, and its name, survives a power cut once this returns."""
        ...

    def remove(self, segment: int) -> None:
        """Removes the file and gives its room back."""
        ...

    def close(self) -> None:
        """Releases descriptors; reads that are under way end first."""
        ...


class DiskPlace(NamedTuple):
    """Where a block lies: which directory of the tier, which segment, and the offset of its header page."""

    directory: int
    segment: int
    position: int


class DiskEntry(NamedTuple):
    """What the index knows of a key: enough to decide whether its bytes are wanted, without reading them."""

    place: DiskPlace
    version: Version
    length: int
    depth: int
    expiry_ms: int
    checksum: bytes


class BlockIndex(Protocol):
    """Key -> DiskEntry, and how far it knows each segment. `find` by any thread; the rest by the writer alone."""

    def find(self, keys: Sequence[bytes]) -> list[DiskEntry | None]:
        """One answer per key (40 bytes: scope + block key)."""
        ...

    def apply(
        self,
        puts: Iterable[tuple[bytes, DiskEntry]],
        deletes: Iterable[bytes],
        marks: Iterable[tuple[int, int, int]],
        removed: Iterable[tuple[int, int]],
        notes: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """All of it at once and durable when it returns. `marks` (directory, segment, end): the index knows the segment
        up to `end`; `removed` (directory, segment): forget these marks; `notes`: small values by name."""
        ...

    def marks(self) -> dict[tuple[int, int], int]:
        """(directory, segment) -> end, as last applied."""
        ...

    def note(self, name: bytes) -> bytes | None:
        """A small value by name."""
        ...

    def count(self) -> int:
        """Keys in the index."""
        ...

    def close(self) -> None:
        """Releases the index; what was applied stays."""
        ...
