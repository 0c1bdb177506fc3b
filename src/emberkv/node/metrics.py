"""How long Python's cyclic collector stopped the node: part of j in the failover budget, so it is measured.

Laws: one observer per process; a pause is measured between the collector's own callbacks, in the thread that it stops.
"""

from __future__ import annotations

import gc
import time


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
