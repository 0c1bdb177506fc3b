"""The failover budget's arithmetic."""

import pytest

from emberkv.core.budget import Costs, Timers, check_costs, check_health, parse_duration_ms, plan, smallest_budget_ms
from emberkv.errors import ConfigError
from emberkv.node import metrics
from emberkv.node.metrics import BudgetWatch, tail_above


def test_terms_add_up_to_the_budget():
    budget = plan(3000)
    assert sum(ms for _, _, ms in budget.terms()) == pytest.approx(3000)
    assert budget.worst_case_ms == pytest.approx(3000)
    # Three periods, each late by j (a third of the margin), and a commit fit into a lease.
    assert 3 * budget.heartbeat_ms + budget.margin_ms + budget.costs.commit_ms == pytest.approx(budget.ttl_ms)


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


@pytest.mark.parametrize(
    ("text", "ms"), [("3s", 3000), ("500ms", 500), ("2m", 120_000), ("1.5", 1500), (" 3 s", 3000), ("1h", 3_600_000)]
)
def test_durations(text, ms):
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "s", "3d", "h", "banana", "3 s s"])
def test_bad_durations(text):
    with pytest.raises(ConfigError):
        parse_duration_ms(text)


def test_stated_timers_are_checked_and_used():
    budget = plan(3000, timers=Timers(ttl_ms=2000, heartbeat_ms=400, margin_ms=300))
    assert (budget.ttl_ms, budget.heartbeat_ms, budget.margin_ms) == (2000, 400, 300)
    assert budget.worst_case_ms == pytest.approx(2580)
    assert sum(ms for _, _, ms in budget.terms()) == pytest.approx(budget.worst_case_ms)


@pytest.mark.parametrize(
    ("timers", "words"),
    [
        (Timers(ttl_ms=2500), "outage of 3080.0 ms, longer than the failover budget of 3000 ms.*longest ttl is 2420.0"),
        (Timers(ttl_ms=400), "280.0 < 133.3 [+] 66.7 [+] 50 [+] 40 = 290.0 ms"),
        (Timers(margin_ms=1400), "m 1400.0 ms.: raise ttl, or lower heartbeat or margin"),
        (Timers(heartbeat_ms=900), "longer than a third"),
        (Timers(margin_ms=100), "shorter than max"),
    ],
)
def test_stated_timers_that_do_not_hold_name_the_line(timers, words):
    with pytest.raises(ConfigError, match=words):
        plan(3000, timers=timers)


def test_a_shorter_heartbeat_lets_a_shorter_lease_live():
    with pytest.raises(ConfigError, match="healthy node"):
        plan(3000, timers=Timers(ttl_ms=410))
    assert plan(3000, timers=Timers(ttl_ms=410, heartbeat_ms=100)).ttl_ms == 410


def test_health_is_exactly_the_line():
    check_health(Costs(), 600, 200, 210)
    with pytest.raises(ConfigError, match=r"389.0 < 200.0 \+ 100.0 \+ 50 \+ 40 = 390.0"):
        check_health(Costs(), 600, 200, 211)


@pytest.mark.parametrize("bad", [Costs(commit_ms=-1), Costs(watch_ms=float("nan")), Costs(drift=1 / 3)])
def test_costs_of_no_environment_are_refused(bad):
    with pytest.raises(ConfigError, match=r"^(commit_ms|watch_ms|drift): "):
        check_costs(bad)


def test_one_late_tick_is_no_tail():
    assert tail_above([1.0] * 100 + [90.0], 40) == 0
    assert tail_above([1.0] * 100 + [90.0, 80.0, 85.0], 40) == 80
    assert tail_above([1.0] * 9000 + [90.0] * 8, 40) == 0
    assert tail_above([], 40) == 0


def test_budget_at_risk_is_said_once_per_episode(monkeypatch):
    now, said = [100.0], []
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    watch = BudgetWatch(50, 40, said.append)

    def look(late):
        now[0] += 10
        watch.look(lambda: late)

    look([1.0] * 50)
    assert said == []
    for took in (10, 60, 70, 80):
        watch.committed(took)
    look([1.0] * 50)
    look([1.0] * 50)
    assert len(said) == 1
    assert said[0].startswith("budget at risk: coordinator commit is 60 ms at p99.9, the failover budget assumes 50 ms")
    assert len(watch.document()["at_risk"]) == 1
    look([1.0] * 50 + [100.0] * 5)
    assert len(said) == 2
    assert "loop lateness is 100 ms" in said[1]
    for _ in range(metrics.COMMITS_KEPT):
        watch.committed(1)
    look([1.0] * 50)
    assert [line.partition(":")[0] for line in said[2:]] == ["budget no longer at risk"] * 2
    assert watch.document()["at_risk"] == []
