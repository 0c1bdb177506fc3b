"""Makes a failing run small: fewer faults, shorter ones, a shorter storm, while the same law stays broken.

Laws: only the schedule and the length change, never the world, so what is left is what the violation needs. A smaller
run counts only if it breaks the same law: another violation is another bug.
Limits: RUNS_MAX runs.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from emberkv.sim.engine import Fault, Options
from emberkv.sim.faults import draw
from emberkv.sim.run import Outcome, run_seed

RUNS_MAX = 120
SHORTER = 0.6
"""A storm or a fault is cut to this share of its length at a time."""

Progress = Callable[[str], None]


class Shrunk(msgspec.Struct):
    """The smallest failing run that was found."""

    options: Options
    outcome: Outcome
    runs: int
    faults_before: int


def law_of(violation: str) -> str:
    """What a violation is about: the words before the first colon."""
    return violation.partition(":")[0]


def shrink(seed: int, options: Options | None = None, progress: Progress = lambda text: None) -> Shrunk | None:
    """The smallest run of a failing seed; None when it does not fail."""
    return _Shrinker(seed, options or draw(seed), progress).shrink()


class _Shrinker:
    def __init__(self, seed: int, options: Options, progress: Progress) -> None:
        self.seed, self.options, self.progress = seed, options, progress
        self.runs = 0
        self.best: Outcome | None = None
        self.law = ""

    def shrink(self) -> Shrunk | None:
        before = len(self.options.faults)
        first = self._run(self.options)
        if not first.violation:
            return None
        self.best, self.law = first, law_of(first.violation)
        while self.runs < RUNS_MAX and (self._fewer() or self._shorter()):
            self.progress(f"{len(self.options.faults)} faults, {self.options.phase1_ms:.0f} ms: {self.best.violation}")
        return Shrunk(self.options, self.best, self.runs, before)

    def _run(self, options: Options) -> Outcome:
        self.runs += 1
        return run_seed(self.seed, options)

    def _try(self, **changes: object) -> bool:
        """Keeps a change if the same law is still broken."""
        if self.runs >= RUNS_MAX:
            return False
        options = msgspec.structs.replace(self.options, **changes)
        outcome = self._run(options)
        if not outcome.violation or law_of(outcome.violation) != self.law:
            return False
        self.options, self.best = options, outcome
        return True

    def _fewer(self) -> bool:
        """Halves first, then single faults, from the last one on."""
        faults = self.options.faults
        half = len(faults) // 2
        if half > 1 and (self._try(faults=faults[:half]) or self._try(faults=faults[half:])):
            return True
        return any(self._try(faults=(*faults[:index], *faults[index + 1 :])) for index in reversed(range(len(faults))))

    def _shorter(self) -> bool:
        last_ms = max((fault.at_ms for fault in self.options.faults), default=0.0)
        shorter_ms = max(self.options.phase1_ms * SHORTER, last_ms + 1.0)
        if shorter_ms < 0.95 * self.options.phase1_ms and self._try(phase1_ms=shorter_ms):
            return True
        return any(self._shorter_fault(index) for index in range(len(self.options.faults)))

    def _shorter_fault(self, index: int) -> bool:
        faults = list(self.options.faults)
        fault: Fault = faults[index]
        if fault.for_ms < 20.0:
            return False
        faults[index] = msgspec.structs.replace(fault, for_ms=fault.for_ms * SHORTER)
        return self._try(faults=tuple(faults))
