"""Which block leaves first: a pure policy (design 7: last chain touch, deeper first; scan-resistant).

New blocks enter on probation; a second touch protects them, up to a share of all. A batch is touched deepest first,
so that within one chain the head of the prefix is the most recent and leaves last. A long scan of blocks that are
never touched again therefore only pushes out other probation blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from emberkv.ports import Slot

PROTECTED_SHARE = 0.8
"""Share of resident blocks that may be protected; the rest is left to newcomers, as in segmented LRU."""


class Residency:
    """Order of eviction over keys that hold bytes, and where these lie."""

    def __init__(self) -> None:
        self._probation: OrderedDict[bytes, Slot] = OrderedDict()
        self._protected: OrderedDict[bytes, Slot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def add(self, key: bytes, slot: Slot) -> None:
        """A block came in, or got new bytes; a protected one stays so."""
        held = self._protected if key in self._protected else self._probation
        held[key] = slot
        held.move_to_end(key)

    def discard(self, key: bytes) -> None:
        """A block lost its bytes."""
        if self._probation.pop(key, None) is None:
            self._protected.pop(key, None)

    def slot(self, key: bytes) -> Slot | None:
        """Where the bytes of a key lie; None when it has none."""
        return self._probation.get(key) or self._protected.get(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Blocks were read, given in chain order (head of the prefix first)."""
        protected, probation = self._protected, self._probation
        for key in reversed(keys):
            if key in protected:
                protected.move_to_end(key)
            elif key in probation:
                protected[key] = probation.pop(key)
        excess = len(protected) - int(PROTECTED_SHARE * len(self))
        for _ in range(min(excess, len(keys))):
            demoted, slot = protected.popitem(last=False)
            probation[demoted] = slot

    def arrived(self, keys: Sequence[bytes]) -> None:
        """A batch came in, in chain order: its head shall leave last, though it was stored first."""
        probation = self._probation
        for key in reversed(keys):
            if key in probation:
                probation.move_to_end(key)

    def order(self, limit: int) -> Iterator[tuple[bytes, Slot]]:
        """Up to `limit` keys and their places, first to leave first. Nothing may change while it is iterated."""
        return islice(chain(self._probation.items(), self._protected.items()), limit)
