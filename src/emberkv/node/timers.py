"""The node's clock tick, and how late it comes: the lateness is j of the failover budget, so it is measured.

Laws: one thread; a tick that was missed is not made up for; lateness is kept in a fixed-size sample.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from emberkv.node.metrics import percentile

SAMPLE_MAX = 4096


class Lateness(msgspec.Struct):
    """Milliseconds by which ticks came late: percentiles over the last SAMPLE_MAX ticks, maximum since the start."""

    p50: float
    p99: float
    max: float
    p999: float = 0.0


class Ticker:
    """Calls `tick` every `period_ms` until stopped."""

    def __init__(self, period_ms: float, tick: Callable[[], None]) -> None:
        self._period_s = period_ms / 1000
        self._tick = tick
        self._stop = threading.Event()
        self._late_ms: deque[float] = deque(maxlen=SAMPLE_MAX)
        self._worst_ms = 0.0
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)

    def start(self) -> None:
        """Begins to tick."""
        self._thread.start()

    def _run(self) -> None:
        due = time.monotonic() + self._period_s
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            late_ms = max(0.0, (time.monotonic() - due) * 1000)
            self._late_ms.append(late_ms)
            self._worst_ms = max(self._worst_ms, late_ms)
            self._tick()
            due = max(due + self._period_s, time.monotonic())

    def lateness(self) -> Lateness:
        """Percentiles of the sample; zeros before the first tick."""
        sample = sorted(self._late_ms)
        if not sample:
            return Lateness(0.0, 0.0, 0.0)
        return Lateness(percentile(sample, 0.5), percentile(sample, 0.99), self._worst_ms, percentile(sample, 0.999))

    def late_ms(self) -> list[float]:
        """The sample: by how many milliseconds the last ticks were late, oldest first."""
        return list(self._late_ms)

    def stop(self) -> None:
        """Ends the thread; returns when it has ended."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)
