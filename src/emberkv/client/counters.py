"""What a client counts about itself.

Why it exists: an operator asks why blocks were missed; the answer must not need a debugger.
Laws: counting never fails and never blocks longer than a dictionary update; names are those of the outcomes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from emberkv.types import MissReason, PutOutcome, PutStatus


class Counters:
    """Running totals of one client since it was made; read them with `snapshot`."""

    def __init__(self) -> None:
        self.renew()
        self.hits = 0
        self.misses: Counter[MissReason] = Counter()
        self.puts: Counter[str] = Counter()
        self.gil_returns = 0
        self.connects = 0
        self.reconnects = 0
        self.retries = 0
        self.map_refreshes = 0

    def renew(self) -> None:
        """At the start, and in a forked child: a thread that the child does not have may have held the lock."""
        self._lock = threading.Lock()

    def load(self, reasons: Sequence[MissReason], gil_returns: int) -> None:
        """Counts one get call: a reason per key, NONE for a hit."""
        missed = [reason for reason in reasons if reason]
        with self._lock:
            self.hits += len(reasons) - len(missed)
            self.gil_returns += gil_returns
            if missed:
                self.misses.update(missed)

    def save(self, outcomes: Iterable[PutOutcome]) -> None:
        """Counts the outcomes of puts; a refusal under its reason, as in "refused:staging-full"."""
        tally = Counter(
            f"refused:{outcome.reason.label}" if outcome.status is PutStatus.REFUSED else outcome.status.name.lower()
            for outcome in outcomes
        )
        with self._lock:
            self.puts.update(tally)

    def add(self, name: str, count: int = 1) -> None:
        """Adds to one of the plain totals."""
        with self._lock:
            setattr(self, name, getattr(self, name) + count)

    def snapshot(self) -> dict[str, int | dict[str, int]]:
        """All totals, ready for JSON."""
        with self._lock:
            return {
                "hits": self.hits,
                "misses": {reason.label: count for reason, count in self.misses.items()},
                "puts": dict(self.puts),
                "gil_returns": self.gil_returns,
                "connects": self.connects,
                "reconnects": self.reconnects,
                "retries": self.retries,
                "map_refreshes": self.map_refreshes,
            }
