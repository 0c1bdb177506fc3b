"""The failover budget's arithmetic."""

import pytest

from emberkv.core.budget import Costs, parse_duration_ms, plan, smallest_budget_ms
from emberkv.errors import ConfigError


def test_terms_add_up_to_the_budget():
    budget = plan(3000)
    assert sum(ms for _, _, ms in budget.terms()) == pytest.approx(3000)
    assert budget.worst_case_ms == pytest.approx(3000)
    assert budget.heartbeat_ms == pytest.approx(budget.ttl_ms / 3)


def test_infeasible_budget_names_the_smallest_and_that_one_works():
    smallest = smallest_budget_ms(Costs())
    with pytest.raises(ConfigError, match="smallest is"):
        plan(smallest - 1)
    assert plan(smallest).ttl_ms > 0


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), 3_600_001])
def test_absurd_budget_is_refused(bad):
    with pytest.raises(ConfigError):
        plan(bad)


def test_drift_that_leaves_no_lease_is_refused():
    with pytest.raises(ConfigError, match="drift"):
        plan(3000, Costs(drift=0.4))


def test_drift_shortens_the_lease_and_the_election_counts_double():
    assert plan(3000, Costs(drift=0.01)).ttl_ms < plan(3000).ttl_ms
    assert plan(3000, Costs(coordinator_election_ms=1000)).double_fault_ms > 4000
    assert plan(3000).double_fault_ms == 3000


@pytest.mark.parametrize(("text", "ms"), [("3s", 3000), ("500ms", 500), ("2m", 120_000), ("1.5", 1500), (" 3 s", 3000)])
def test_durations(text, ms):
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "s", "3h", "three", "3 s s"])
def test_bad_durations(text):
    with pytest.raises(ConfigError):
        parse_duration_ms(text)
