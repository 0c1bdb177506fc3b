"""What the failover budget assumes, measured: pauses of Python's collector, coordinator commits, lateness of the loop.

Laws: one observer of the collector per process; a pause is measured between the collector's own callbacks, in the
thread that it stops. Samples have a fixed size.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence

COMMITS_KEPT = 2048
"""Half an hour of heartbeats with the default budget."""
TAIL_MIN = 3
LOOK_S = 2.0
"""Sorting the samples takes under a millisecond, so this costs nothing that lateness would show."""


class CollectorPauses:
    """Counts collections and their pauses since `start`."""

    def __init__(self) -> None:
        self.count = 0
        self.max_ms = 0.0
        self.total_ms = 0.0
        self._begun_ns = 0

    def start(self) -> None:
        """Begins to observe."""
        gc.callbacks.append(self._on_collection)

    def stop(self) -> None:
        """Ends observing."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._begun_ns = time.monotonic_ns()
            return
        pause_ms = (time.monotonic_ns() - self._begun_ns) / 1e6
        self.count += 1
        self.total_ms += pause_ms
        self.max_ms = max(self.max_ms, pause_ms)

    def document(self) -> dict[str, float]:
        """What `status` shows: number of collections, longest and summed pause in milliseconds."""
        return {"count": self.count, "max": round(self.max_ms, 3), "total": round(self.total_ms, 3)}


class BudgetWatch:
    """Compares what the failover budget assumed with what is measured: coordinator commits (c) and loop lateness (j).

        FINE --(p99.9 above what was assumed)--> AT RISK --(p99.9 below it again)--> FINE

    One line in the log at each of the two changes. Timers are never changed by it: that is the operator's decision.
    """

    def __init__(self, commit_ms: float, lateness_ms: float, tell: Callable[[str], None]) -> None:
        self._assumed = {"coordinator commit": commit_ms, "loop lateness": lateness_ms}
        self._tell = tell
        self._commits: deque[float] = deque(maxlen=COMMITS_KEPT)
        self._risky: dict[str, str] = {}
        self._looked_s = 0.0

    def committed(self, took_ms: float) -> None:
        """One commit ended, whatever its outcome: a slow refusal would have been a slow success."""
        self._commits.append(took_ms)

    def look(self, late_ms: Callable[[], Sequence[float]]) -> None:
        """Compares the samples; `late_ms` gives the latest ticks'. Does so at most once in LOOK_S seconds."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for what, sample in (("coordinator commit", list(self._commits)), ("loop lateness", late_ms())):
            assumed = self._assumed[what]
            slow = tail_above(sample, assumed)
            if slow and what not in self._risky:
                self._risky[what] = (
                    f"{what} is {slow:.0f} ms at p99.9, the failover budget assumes {assumed:g} ms: an outage can last "
                    "longer than the budget; find what slows it, or state the cost in [cluster.costs]"
                )
                self._tell(f"budget at risk: {self._risky[what]}")
            elif not slow and what in self._risky:
                del self._risky[what]
                self._tell(f"budget no longer at risk: {what} is below {assumed:g} ms at p99.9 again")

    def document(self) -> dict[str, object]:
        """What `status` shows."""
        sample = sorted(self._commits)
        return {
            "at_risk": sorted(self._risky.values()),
            "commit_ms": {
                "p50": round(percentile(sample, 0.5), 3),
                "p999": round(percentile(sample, 0.999), 3),
                "max": round(sample[-1], 3) if sample else 0.0,
                "assumed": self._assumed["coordinator commit"],
            },
            "lateness_ms": {"assumed": self._assumed["loop lateness"]},
        }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of an ascending sample does not exceed; 0 for none."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def tail_above(sample: Sequence[float], limit: float) -> float:
    """The value at p99.9 if it is above `limit`, else 0. A single late one is no tail: it takes TAIL_MIN of them."""
    above = sorted(value for value in sample if value > limit)
    return above[0] if len(above) >= max(TAIL_MIN, len(sample) / 1000) else 0.0
