"""How much a device is asked at once: found by measuring, not by its data sheet. Pure: samples in, a number out.

    GROWING --bandwidth rose--> GROWING (twice as deep)      GROWING --it did not--> HOLDING (one step back)
    HOLDING --HOLD_SAMPLES later--> GROWING                  (writes) any --reads or syncs suffer--> HOLDING (half)

Laws: it starts low. Deeper queues that bring no bandwidth bring only latency, so a step that did not pay is taken back.
"""

from __future__ import annotations

from typing import Final

READ_DEPTH_FIRST: Final = 4
READ_DEPTH_MAX: Final = 64
READ_GAIN: Final = 1.05
"""A deeper queue has to bring this much more bandwidth to be kept, for reads."""
WRITE_DEPTH_MAX: Final = 8
WRITE_GAIN: Final = 1.10
HOLD_SAMPLES: Final = 64
"""Samples after which a deeper queue is tried again: another device may be behind the name, or other load."""
SUFFER_FACTOR: Final = 3.0
"""Foreground reads and syncs may become so much slower during writes, not more."""


class Depth:
    """Hill climbing over one depth."""

    def __init__(self, first: int, highest: int, gain: float) -> None:
        """`highest` is never exceeded; a step up is kept if bandwidth grows by the factor `gain`."""
        self.depth = first
        self._first, self._highest, self._gain = first, highest, gain
        self._growing = True
        self._before: float | None = None
        """Bandwidth before the last step up."""
        self._held = 0

    def sample(self, nbytes: int, seconds: float) -> None:
        """So much went through in a time in which the queue was never empty."""
        if seconds <= 0 or nbytes <= 0:
            return
        bandwidth = nbytes / seconds
        if not self._growing:
            self._held += 1
            if self._held >= HOLD_SAMPLES and self.depth < self._highest:
                self._growing, self._before = True, None
            return
        if self._before is not None and bandwidth < self._before * self._gain:
            self.depth = max(self.depth // 2, 1)
            self._hold()
            return
        if self.depth >= self._highest:
            self._hold()
            return
        self._before = bandwidth
        self.depth = min(self.depth * 2, self._highest)

    def suffer(self) -> None:
        """Somebody more important has become slow: half as deep."""
        self.depth = max(self.depth // 2, 1)
        self._hold()

    def _hold(self) -> None:
        self._growing, self._held, self._before = False, 0, None


def read_depth() -> Depth:
    """Of one directory's reads."""
    return Depth(READ_DEPTH_FIRST, READ_DEPTH_MAX, READ_GAIN)


class WriteDepth(Depth):
    """Of all writes, which yield to reads: `judge` compares what reads and syncs take with what they took at rest."""

    def __init__(self) -> None:
        super().__init__(1, WRITE_DEPTH_MAX, WRITE_GAIN)
        self._read_s = self._sync_s = 0.0

    def judge(self, read_p99_s: float, sync_s: float, *, writing: bool) -> None:
        """Takes one look; at rest it is remembered, while writing it is compared. Zero: nothing was seen."""
        if not writing:
            self._read_s = read_p99_s or self._read_s
            return
        slow_read = self._read_s > 0 and read_p99_s > self._read_s * SUFFER_FACTOR
        slow_sync = self._sync_s > 0 and sync_s > self._sync_s * SUFFER_FACTOR
        if sync_s > 0:
            # The fastest seen, slowly forgotten: a device that got slower for good must not hold writes down for ever.
            self._sync_s = min(self._sync_s * 1.05, sync_s) if self._sync_s else sync_s
        if slow_read or slow_sync:
            self.suffer()
