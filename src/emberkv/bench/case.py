"""One benchmark case: a value, what the same machine does for its reference in the same run, and a goal for either.

Why it exists: an absolute figure says more about the machine than about us, and a single one says more about the minute
than about either.
Laws: a case and its reference take turns, sample by sample, so that a neighbour's noise hits both; a round gives one
median of each, the reported figures are medians over the rounds; a goal is a number that code compares, not prose.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec

ROUNDS: Final = 5
"""Reported figures are medians over this many rounds."""

Progress = Callable[[str], None]
"""Takes one line that says what is being measured now."""


class Goal(msgspec.Struct, frozen=True):
    """What must hold: `of` the case (its ratio or its value) `sense` `bound`."""

    of: Literal["ratio", "value"]
    sense: Literal[">=", "<="]
    bound: float

    def met(self, value: float, ratio: float | None) -> bool:
        """False also when the ratio that it speaks of is not known."""
        measured = ratio if self.of == "ratio" else value
        if measured is None:
            return False
        return measured >= self.bound if self.sense == ">=" else measured <= self.bound

    def text(self, unit: str) -> str:
        """As printed: "ratio >= 0.9" or "<= 30 ms"."""
        if self.of == "ratio":
            return f"ratio {self.sense} {self.bound:g}"
        return f"{self.sense} {self.bound:g} {unit}"


class Case(msgspec.Struct, kw_only=True, omit_defaults=False):
    """One line of the report. `ok` is None for a case without a goal; `details` are figures beside it."""

    name: str
    value: float
    unit: str
    reference: str = ""
    reference_value: float | None = None
    ratio: float | None = None
    goal: str = ""
    ok: bool | None = None
    details: dict[str, Any] = msgspec.field(default_factory=dict)


def make_case(
    name: str,
    value: float,
    unit: str,
    *,
    reference: str = "",
    reference_value: float | None = None,
    ratio: float | None = None,
    goal: Goal | None = None,
    **details: Any,
) -> Case:
    """A case with its goal judged. `ratio` defaults to value / reference_value."""
    if ratio is None and reference_value:
        ratio = value / reference_value
    return Case(
        name=name,
        value=value,
        unit=unit,
        reference=reference,
        reference_value=reference_value,
        ratio=ratio,
        goal=goal.text(unit) if goal else "",
        ok=goal.met(value, ratio) if goal else None,
        details=details,
    )


class Rounds(msgspec.Struct):
    """Medians per round of a case (`ours`) and of its reference, in seconds; same length."""

    ours: list[float]
    reference: list[float]

    @property
    def ours_s(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.ours)

    @property
    def reference_s(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.reference)

    @property
    def time_ratio(self) -> float:
        """Median over the rounds of ours / reference: each round's noise is in both."""
        return statistics.median(a / b for a, b in zip(self.ours, self.reference, strict=True))

    @property
    def speed_ratio(self) -> float:
        """Median over the rounds of how much faster than the reference: reference / ours."""
        return statistics.median(b / a for a, b in zip(self.ours, self.reference, strict=True))

    def spread(self) -> dict[str, float]:
        """Smallest and largest round of the speed ratio: how far one run may be believed."""
        ratios = [b / a for a, b in zip(self.ours, self.reference, strict=True)]
        return {"ratio_min": round(min(ratios), 3), "ratio_max": round(max(ratios), 3)}


def take_turns(
    ours: Callable[[], float],
    reference: Callable[[], float],
    *,
    repeats: int,
    rounds: int = ROUNDS,
    before: Callable[[], None] | None = None,
    between: Callable[[], None] | None = None,
) -> Rounds:
    """Calls both in turn; each returns the seconds that it took. `before` runs before every single call, `between`
    after each round.

    One call of each is thrown away first.
    """
    pair = (ours, reference)
    for measure in pair:
        measure()
    result = Rounds([], [])
    for number in range(rounds):
        times: tuple[list[float], list[float]] = ([], [])
        for repeat in range(repeats):
            # Who goes first changes each time: whoever follows may find caches warmed or memory bandwidth taken.
            for index in (0, 1) if (number + repeat) % 2 == 0 else (1, 0):
                if before is not None:
                    before()
                times[index].append(pair[index]())
        result.ours.append(statistics.median(times[0]))
        result.reference.append(statistics.median(times[1]))
        if between is not None:
            between()
    return result


def timed(action: Callable[[], object]) -> float:
    """Seconds that `action` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the sample lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
