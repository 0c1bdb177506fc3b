"""How two copies of one key become one, and what a replica has processed (design 3).

merge = max: by version, then tombstone, then checksum. It is commutative, associative and idempotent, so order and
repetition of deliveries do not matter.
"""

from __future__ import annotations

from typing import NamedTuple

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
    """Per epoch, which sequence numbers of a shard this replica has processed: {epoch: [(first, last), ...]}.

    In-order streams keep each list at one range; holes show what a pull has to ask for. Ranges are bounded: beyond
    RANGES_MAX the highest one is forgotten, which is safe, since forgetting only means to process again.
    """

    RANGES_MAX = 64
    EPOCHS_MAX = 16

    def __init__(self) -> None:
        self.ranges: dict[int, list[tuple[int, int]]] = {}

    def add(self, version: Version) -> None:
        """Marks one stamped write as processed."""
        spans = self.ranges.setdefault(version.epoch, [])
        seq = version.seq
        if spans and spans[-1][1] + 1 == seq:
            spans[-1] = (spans[-1][0], seq)
            return
        if spans and spans[-1][0] <= seq <= spans[-1][1]:
            return
        self._insert(spans, seq)
        if len(spans) > self.RANGES_MAX:
            spans.pop()
        while len(self.ranges) > self.EPOCHS_MAX:
            del self.ranges[min(self.ranges)]

    @staticmethod
    def _insert(spans: list[tuple[int, int]], seq: int) -> None:
        merged: list[tuple[int, int]] = []
        first, last = seq, seq
        for low, high in spans:
            if high + 1 < first or last + 1 < low:
                merged.append((low, high))
            else:
                first, last = min(first, low), max(last, high)
        merged.append((first, last))
        merged.sort()
        spans[:] = merged

    def holes(self, epoch: int) -> list[tuple[int, int]]:
        """Missing ranges below the highest processed number of an epoch."""
        found, expected = [], 1
        for low, high in self.ranges.get(epoch, []):
            if low > expected:
                found.append((expected, low - 1))
            expected = high + 1
        return found
