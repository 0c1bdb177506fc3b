"""One number from the operator gives every timer (design 5). Pure arithmetic, in milliseconds.

    T' = T(1+d)/(1-d)              how long an observer waits, seen from a clock that runs slow
    outage <= T' + w + 2j + (1 + ceil(shards/128))c + w(map) + client try + back-off
    health:  T(1-d)/(1+d) - m >= T/3 + T/6 + c + j        a renewal may fail once and still be in time
    m = max(50, 3j)

T = lease ttl, d = clock-rate drift, w = watch, c = coordinator commit, j = loop lateness (both p99.9), m = margin.
An operator may state ttl, heartbeat or margin instead (Timers); the same lines are then checked, never assumed.
"""

from __future__ import annotations

import math

import msgspec

from emberkv.errors import ConfigError
from emberkv.types import SHARDS

MARGIN_FLOOR_MS = 50.0
BUDGET_MS_MAX = 3_600_000
ROUNDING_MS = 1e-6
"""A budget that is exactly the smallest one must pass its own check."""


class Costs(msgspec.Struct, frozen=True):
    """What was measured or assumed of the environment, in milliseconds (p99.9)."""

    commit_ms: float = 50.0
    watch_ms: float = 25.0
    lateness_ms: float = 40.0
    drift: float = 0.0
    client_try_ms: float = 250.0
    backoff_ms: float = 50.0
    coordinator_election_ms: float = 0.0
    """Longest time without a coordinator leader; 0 for the embedded one, which has none."""


class Timers(msgspec.Struct, frozen=True):
    """Timers that an operator states instead of having them derived, in milliseconds; 0: derived."""

    ttl_ms: float = 0.0
    heartbeat_ms: float = 0.0
    margin_ms: float = 0.0


class Budget(msgspec.Struct, frozen=True):
    """A feasible budget and what follows from it. All times in milliseconds."""

    budget_ms: float
    costs: Costs
    ttl_ms: float
    heartbeat_ms: float
    margin_ms: float
    observer_ms: float
    takeover_ms: float
    client_ms: float
    worst_case_ms: float
    double_fault_ms: float

    def terms(self) -> list[tuple[str, str, float]]:
        """(term, meaning, ms) in the order in which they pass during an outage."""
        costs = self.costs
        return [
            ("T'", "observer sees the heartbeat stand still for ttl(1+d)/(1-d)", self.observer_ms),
            ("w", "watch: the last heartbeat reaches the observer", costs.watch_ms),
            ("2j", "two late loops: the observer's and the taker's", 2 * costs.lateness_ms),
            ("(1+k)c", "commits: expire the node, then take its shards", self.takeover_ms),
            ("w(map)", "watch: the others learn the new primaries", costs.watch_ms),
            ("try", "a client's attempt that was under way", costs.client_try_ms),
            ("back-off", "before the client's next attempt", costs.backoff_ms),
        ]


def margin_ms(costs: Costs) -> float:
    """Check-to-use gap of the gate: max(50 ms, 3j)."""
    return max(MARGIN_FLOOR_MS, 3 * costs.lateness_ms)


def takeover_ms(costs: Costs) -> float:
    """Commits until all shards of a lost node are taken."""
    return (1 + math.ceil(SHARDS / 128)) * costs.commit_ms


def fixed_ms(costs: Costs) -> float:
    """All of the outage that does not depend on the lease."""
    return 2 * costs.watch_ms + 2 * costs.lateness_ms + takeover_ms(costs) + costs.client_try_ms + costs.backoff_ms


def smallest_ttl_ms(costs: Costs) -> float:
    """Shortest lease that a healthy node keeps although one renewal fails."""
    slack = (1 - costs.drift) / (1 + costs.drift) - 1 / 3 - 1 / 6
    if slack <= 0:
        raise ConfigError(f"clock drift {costs.drift:g} leaves no room for any lease: it must be far below 1/3")
    return (margin_ms(costs) + costs.commit_ms + costs.lateness_ms) / slack


def smallest_budget_ms(costs: Costs) -> float:
    """Smallest feasible budget under these costs."""
    return smallest_ttl_ms(costs) * (1 + costs.drift) / (1 - costs.drift) + fixed_ms(costs)


def check_costs(costs: Costs) -> None:
    """Raises ConfigError, beginning with the field's name, for a cost that no environment has."""
    for name in costs.__struct_fields__:
        value = getattr(costs, name)
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"{name}: {value:g} is not a positive number")
    if costs.drift >= 1 / 3:
        raise ConfigError(f"drift: {costs.drift:g} leaves no room for any lease: it must be far below 1/3")


def check_health(costs: Costs, ttl_ms: float, heartbeat_ms: float, kept_ms: float) -> None:
    """The inequality that lets one renewal fail without costing the lease. Raises ConfigError with its numbers."""
    left = ttl_ms * (1 - costs.drift) / (1 + costs.drift) - kept_ms
    right = heartbeat_ms + ttl_ms / 6 + costs.commit_ms + costs.lateness_ms
    if left < right - ROUNDING_MS:
        raise ConfigError(
            f"a healthy node would lose its lease: T(1-d)/(1+d) - m >= heartbeat + T/6 + c + j does not hold, as "
            f"{left:.1f} < {heartbeat_ms:.1f} + {ttl_ms / 6:.1f} + {costs.commit_ms:g} + {costs.lateness_ms:g} = "
            f"{right:.1f} ms (T {ttl_ms:.1f} ms, m {kept_ms:.1f} ms): raise ttl, or lower heartbeat or margin"
        )


def _checked_timers(budget_ms: float, costs: Costs, timers: Timers) -> tuple[float, float, float]:
    """(ttl, heartbeat, margin) with what the operator stated, all lines checked. Raises ConfigError."""
    derived = (budget_ms - fixed_ms(costs)) * (1 - costs.drift) / (1 + costs.drift)
    ttl = timers.ttl_ms or derived
    outage = ttl * (1 + costs.drift) / (1 - costs.drift) + fixed_ms(costs)
    if outage > budget_ms + ROUNDING_MS:
        raise ConfigError(
            f"ttl {ttl:g} ms makes an outage of {outage:.1f} ms, longer than the failover budget of {budget_ms:g} ms: "
            f"T(1+d)/(1-d) + w + 2j + (1+k)c + w(map) + try + back-off; the longest ttl is {derived:.1f} ms"
        )
    heartbeat = timers.heartbeat_ms or max(ttl - costs.commit_ms - margin_ms(costs), ttl / 2) / 3
    if heartbeat > ttl / 3 + ROUNDING_MS:
        raise ConfigError(f"heartbeat {heartbeat:g} ms is longer than a third of the ttl of {ttl:g} ms")
    margin = timers.margin_ms or margin_ms(costs)
    if margin < margin_ms(costs):
        raise ConfigError(
            f"margin {margin:g} ms is shorter than max({MARGIN_FLOOR_MS:g}, 3j) = {margin_ms(costs):g} ms"
        )
    # The derived period is shorter than a third, but the room of a third is what the lease is sized by.
    check_health(costs, ttl, timers.heartbeat_ms or ttl / 3, margin)
    return ttl, heartbeat, margin


def plan(budget_ms: float, costs: Costs | None = None, timers: Timers | None = None) -> Budget:
    """All timers of a budget. Raises ConfigError naming the smallest feasible one when it is infeasible, or the line
    that timers which were stated do not satisfy."""
    costs, timers = costs or Costs(), timers or Timers()
    if not math.isfinite(budget_ms) or budget_ms <= 0 or budget_ms > BUDGET_MS_MAX:
        raise ConfigError(f"failover budget {budget_ms / 1000:g}s: it must be above 0 and at most 1h")
    smallest = smallest_budget_ms(costs)
    if budget_ms < smallest:
        raise ConfigError(
            f"failover budget {budget_ms / 1000:g}s is infeasible here: the smallest is "
            f"{math.ceil(smallest) / 1000:g}s (coordinator commit {costs.commit_ms:g} ms, loop lateness "
            f"{costs.lateness_ms:g} ms, drift {costs.drift:g})"
        )
    ttl, heartbeat, margin = _checked_timers(budget_ms, costs, timers)
    observer = ttl * (1 + costs.drift) / (1 - costs.drift)
    double = budget_ms + costs.coordinator_election_ms
    if costs.coordinator_election_ms:
        # After the coordinator's own outage nobody is expired before the grace of own successful commits.
        double += heartbeat + margin + 2 * costs.commit_ms
    return Budget(
        budget_ms=budget_ms,
        costs=costs,
        ttl_ms=ttl,
        heartbeat_ms=heartbeat,
        margin_ms=margin,
        observer_ms=observer,
        takeover_ms=takeover_ms(costs),
        client_ms=costs.client_try_ms + costs.backoff_ms,
        worst_case_ms=observer + fixed_ms(costs),
        double_fault_ms=double,
    )


def parse_duration_ms(text: str) -> float:
    """'3s', '500ms', '2m', '1h' or a plain number of seconds, in milliseconds. Raises ConfigError."""
    units = {"ms": 1.0, "s": 1000.0, "m": 60_000.0, "h": 3_600_000.0}
    for unit in ("ms", "s", "m", "h", ""):
        if text.endswith(unit):
            number = text[: len(text) - len(unit)].strip()
            try:
                return float(number) * units.get(unit, 1000.0)
            except ValueError:
                break
    raise ConfigError(f"{text!r} is not a duration: write it like 3s, 500ms, 2m or 1h")
