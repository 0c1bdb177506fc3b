"""Which block leaves first: a pure policy (design 7: last chain touch, deeper first; scan-resistant).

New blocks enter on probation; a second touch protects them, up to a share of all. A batch is touched deepest first,
so that within one chain the head of the prefix is the most recent and leaves last. A long scan of blocks that are
never touched again therefore only pushes out other probation blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, islice

ORDER_STEP = 16
"""Victims looked at before the whole order is copied."""
PROTECTED_SHARE = 0.8
"""Share of resident blocks that may be protected; the rest is left to newcomers, as in segmented LRU."""


class Residency:
    """Order of eviction over keys that hold bytes."""

    def __init__(self) -> None:
        self._probation: OrderedDict[bytes, None] = OrderedDict()
        self._protected: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def add(self, key: bytes) -> None:
        """A block came in, or got new bytes; a protected one keeps its place."""
        if key in self._protected:
            self._protected.move_to_end(key)
        else:
            self._probation[key] = None
            self._probation.move_to_end(key)

    def discard(self, key: bytes) -> None:
        """A block lost its bytes."""
        if self._probation.pop(key, 0) == 0:
            self._protected.pop(key, None)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Blocks were read, given in chain order (head of the prefix first)."""
        protected, probation = self._protected, self._probation
        for key in reversed(keys):
            if key in protected:
                protected.move_to_end(key)
            elif key in probation:
                del probation[key]
                protected[key] = None
        excess = len(protected) - int(PROTECTED_SHARE * len(self))
        for _ in range(min(excess, len(keys))):
            demoted, _ = protected.popitem(last=False)
            probation[demoted] = None

    def arrived(self, keys: Sequence[bytes]) -> None:
        """A batch came in, in chain order: its head shall leave last, though it was stored first."""
        probation = self._probation
        for key in reversed(keys):
            if key in probation:
                probation.move_to_end(key)

    def order(self, limit: int) -> Iterator[bytes]:
        """Up to `limit` keys, first to leave first. The caller may discard what it was given while it iterates."""
        # Most reservations need one victim, so few keys are copied before many.
        few = list(islice(chain(self._probation, self._protected), min(limit, ORDER_STEP)))
        yield from few
        if len(few) < ORDER_STEP:
            return
        seen = set(few)
        for key in list(islice(chain(self._probation, self._protected), limit)):
            if key not in seen:
                yield key
