"""One number from the operator gives every timer (design 5). Pure arithmetic, in milliseconds.

    T' = T(1+d)/(1-d)              how long an observer waits, seen from a clock that runs slow
    outage <= T' + w + 2j + (1 + ceil(shards/128))c + w(map) + client try + back-off
    health:  T(1-d)/(1+d) - m >= T/3 + T/6 + c + j        a renewal may fail once and still be in time
    m = max(50, 3j)

T = lease ttl, d = clock-rate drift, w = watch, c = coordinator commit, j = loop lateness (both p99.9), m = margin.
"""

from __future__ import annotations

import math

import msgspec

from emberkv.errors import ConfigError
from emberkv.types import SHARDS

MARGIN_FLOOR_MS = 50.0


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


def plan(budget_ms: float, costs: Costs | None = None) -> Budget:
    """All timers of a budget. Raises ConfigError naming the smallest feasible one when it is infeasible."""
    costs = costs or Costs()
    if not math.isfinite(budget_ms) or budget_ms <= 0 or budget_ms > 3_600_000:
        raise ConfigError(f"failover budget {budget_ms:g} ms is not between 0 and 1 hour")
    smallest = smallest_budget_ms(costs)
    if budget_ms < smallest:
        raise ConfigError(
            f"failover budget {budget_ms / 1000:g}s is infeasible here: the smallest is "
            f"{math.ceil(smallest) / 1000:g}s (coordinator commit {costs.commit_ms:g} ms, loop lateness "
            f"{costs.lateness_ms:g} ms, drift {costs.drift:g})"
        )
    observer = budget_ms - fixed_ms(costs)
    ttl = observer * (1 - costs.drift) / (1 + costs.drift)
    double = budget_ms + costs.coordinator_election_ms
    if costs.coordinator_election_ms:
        # After the coordinator's own outage nobody is expired before the grace of own successful commits.
        double += ttl / 3 + 2 * costs.commit_ms
    return Budget(
        budget_ms=budget_ms,
        costs=costs,
        ttl_ms=ttl,
        heartbeat_ms=ttl / 3,
        margin_ms=margin_ms(costs),
        observer_ms=observer,
        takeover_ms=takeover_ms(costs),
        client_ms=costs.client_try_ms + costs.backoff_ms,
        worst_case_ms=observer + fixed_ms(costs),
        double_fault_ms=double,
    )


def parse_duration_ms(text: str) -> float:
    """'3s', '500ms', '2m' or a plain number of seconds, in milliseconds. Raises ConfigError."""
    units = {"ms": 1.0, "s": 1000.0, "m": 60_000.0}
    for unit in ("ms", "s", "m", ""):
        if text.endswith(unit):
            number = text[: len(text) - len(unit)].strip()
            try:
                return float(number) * units.get(unit, 1000.0)
            except ValueError:
                break
    raise ConfigError(f"{text!r} is not a duration: write it like 3s, 500ms or 2m")
