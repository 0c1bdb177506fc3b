"""Where the next block of a directory goes, and which segment leaves first: pure arithmetic, no file.

    segment:  (number) --> ACTIVE --full, failed or a new life--> SEALED --oldest, room wanted--> removed

Laws: the sizes of all segments stay within the limit (P8): a block that has no room gets none. Segments leave in the
order of their numbers, so when a deletion's record leaves, all that it deleted has left before. A number is never given
twice. Nothing is appended to a segment of an earlier life, or behind a write that failed, so no block that counts lies
behind a hole.
Limits: SPARE_SEGMENTS are kept free, so that what is hot in the oldest segment can be written again before it leaves.
"""

from __future__ import annotations

from typing import Final

from emberkv.errors import ConfigError, InvariantViolation
from emberkv.storage.segment import PAGE
from emberkv.types import BLOCK_BYTES_MAX, round_up

SEGMENT_BYTES_MAX: Final = 256 << 20
"""A segment is read and removed as a whole: larger ones make reclaiming bursty and give nothing to the device."""
SEGMENT_BYTES_MIN: Final = 64 << 10
SEGMENTS_PER_LIMIT: Final = 32
"""So many segments a small limit is divided into; then one of them is 3 % of what is kept."""
SPARE_SEGMENTS: Final = 2
"""One for what is being written, one for what is hot in the segment that leaves."""
SEGMENTS_MIN: Final = 4


def segment_bytes_of(limit_bytes: int) -> int:
    """Size of a segment for a directory of `limit_bytes`; raises ConfigError where no block would fit."""
    size = min(SEGMENT_BYTES_MAX, max(limit_bytes // SEGMENTS_PER_LIMIT, min(limit_bytes // SEGMENTS_MIN, 64 << 20)))
    size = size // PAGE * PAGE
    if size < SEGMENT_BYTES_MIN:
        smallest = SEGMENTS_MIN * SEGMENT_BYTES_MIN
        raise ConfigError(f"an NVMe directory of {limit_bytes} bytes is too small; give it at least {smallest}")
    return size


class SegmentLog:
    """Sizes of the segments of one directory, and the place for the next block."""

    def __init__(self, limit_bytes: int, segment_bytes: int = 0) -> None:
        """`segment_bytes` 0: as fits the limit. Raises ConfigError for a limit that is too small."""
        self.segment_bytes: Final = segment_bytes or segment_bytes_of(limit_bytes)
        self.limit_bytes: Final = limit_bytes
        self.block_bytes_max: Final = min(BLOCK_BYTES_MAX, self.segment_bytes - 2 * PAGE)
        self.sizes: dict[int, int] = {}
        """Segment -> bytes, ascending by number."""
        self.used_bytes = 0
        self.active: int | None = None
        self.next_number = 1
        self.first_of_life = 1
        """Segments below were written by earlier lives of the node."""

    def adopt(self, segments: list[tuple[int, int]], highest_known: int = 0) -> None:
        """Takes what earlier lives left: (number, bytes), ascending; `highest_known`: the highest number ever given."""
        if self.sizes:
            raise InvariantViolation("segments were adopted twice")
        self.sizes = dict(segments)
        self.used_bytes = sum(self.sizes.values())
        self.next_number = self.first_of_life = max([number for number, _ in segments] + [highest_known, 0]) + 1

    def place(self, nbytes: int) -> tuple[int, int] | None:
        """(segment, offset) for `nbytes` more bytes in a row, header pages included; None when there is no room.

        An offset of one PAGE in a segment that was not there before means that its header is to be written too.
        """
        nbytes = round_up(nbytes)
        if nbytes > self.segment_bytes - PAGE:
            return None
        if self.active is not None and self.sizes[self.active] + nbytes > self.segment_bytes:
            self.seal()
        fresh = self.active is None
        if self.used_bytes + nbytes + (PAGE if fresh else 0) > self.limit_bytes:
            return None
        if self.active is None:
            self.active = self.next_number
            self.next_number += 1
            self.sizes[self.active] = PAGE
            self.used_bytes += PAGE
        offset = self.sizes[self.active]
        self.sizes[self.active] += nbytes
        self.used_bytes += nbytes
        return self.active, offset

    def seal(self) -> None:
        """Nothing more is appended to the active segment."""
        self.active = None

    def wants_room(self) -> bool:
        """Should the oldest segment leave now?"""
        return self.used_bytes > self.limit_bytes - SPARE_SEGMENTS * self.segment_bytes and self.oldest() is not None

    def oldest(self) -> int | None:
        """The segment that leaves next; None when there is none but the active one."""
        for number in self.sizes:
            return number if number != self.active else None
        return None

    def removed(self, number: int) -> None:
        """The file of a segment is gone."""
        if number == self.active:
            self.active = None
        self.used_bytes -= self.sizes.pop(number)

    def check(self) -> None:
        """The sums, from the segments themselves; raises InvariantViolation."""
        if self.used_bytes != sum(self.sizes.values()):
            raise InvariantViolation(f"segments: {self.used_bytes} bytes are counted, {sum(self.sizes.values())} there")
        if list(self.sizes) != sorted(self.sizes):
            raise InvariantViolation("segments: their order is lost")
