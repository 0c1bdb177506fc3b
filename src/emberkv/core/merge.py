"""How two copies of one key become one, and what a replica has processed (design 3).

merge = max: by version, then tombstone, then checksum. It is commutative, associative and idempotent, so order and
repetition of deliveries do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from emberkv.messages import Span
from emberkv.types import NO_VERSION, EntryState, Version


class Stamp(NamedTuple):
    """What decides between two copies; ordered as a tuple."""

    version: Version
    tombstone: bool
    checksum: bytes


def stamp_of(version: Version, state: EntryState, checksum: bytes) -> Stamp:
    """The deciding part of an entry."""
    return Stamp(version, state is EntryState.TOMBSTONE, checksum)


def merge(left: Stamp, right: Stamp) -> Stamp:
    """The one that stays."""
    return max(left, right)


def same_version_other_bytes(left: Stamp, right: Stamp) -> bool:
    """True when one version names two contents: must never happen; raises an alarm where seen."""
    return left.version == right.version != NO_VERSION and left != right


class AppliedVector:
    """What this replica has processed of one shard: {epoch: [[first, last], ...]}, ranges ascending and apart.

    In-order streams keep each epoch at one range; a lost message leaves a hole, which a comparison with the primary
    closes. Bounds: beyond RANGES_MAX the highest range of an epoch is forgotten, which only means to process it again;
    beyond EPOCHS_MAX the oldest epoch is forgotten and `add` and `union` say so, since what is older counts as
    processed from then on (the caller raises the shard's floor).
    """

    RANGES_MAX = 64
    EPOCHS_MAX = 32

    def __init__(self) -> None:
        self.ranges: dict[int, list[list[int]]] = {}

    def add(self, version: Version) -> Version | None:
        """Marks one stamped write as processed; returns the highest version of an epoch that was forgotten for it."""
        ranges = self.ranges.get(version.epoch)
        if ranges is not None and ranges and ranges[-1][1] + 1 == version.seq:
            ranges[-1][1] += 1  # the usual case: the next one of the stream
            return None
        return self._cover(version.epoch, version.seq, version.seq)

    def _cover(self, epoch: int, first: int, last: int) -> Version | None:
        ranges = self.ranges.setdefault(epoch, [])
        merged: list[list[int]] = []
        for low, high in ranges:
            if high + 1 < first or last + 1 < low:
                merged.append([low, high])
            else:
                first, last = min(first, low), max(last, high)
        merged.append([first, last])
        merged.sort()
        ranges[:] = merged[: self.RANGES_MAX]
        if len(self.ranges) <= self.EPOCHS_MAX:
            return None
        oldest = min(self.ranges)
        return Version(oldest, self.ranges.pop(oldest)[-1][1])

    def covers(self, version: Version) -> bool:
        """Was this write processed?"""
        return any(low <= version.seq <= high for low, high in self.ranges.get(version.epoch, ()))

    def union(self, spans: Iterable[Span]) -> Version | None:
        """Takes all of `spans` as processed; returns the highest version that was forgotten for it."""
        forgotten: Version | None = None
        for span in spans:
            dropped = self._cover(span.epoch, span.first, span.last)
            forgotten = max(forgotten, dropped) if forgotten and dropped else dropped or forgotten
        return forgotten

    def lacks(self, spans: Iterable[Span]) -> bool:
        """Is anything of `spans` not processed here?"""
        return any(
            not any(low <= span.first and span.last <= high for low, high in self.ranges.get(span.epoch, ()))
            for span in spans
        )

    def spans(self) -> list[Span]:
        """All ranges, ascending."""
        return [Span(epoch, low, high) for epoch in sorted(self.ranges) for low, high in self.ranges[epoch]]
