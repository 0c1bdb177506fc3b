"""Virtual time and node clocks: what every run stands on."""

from __future__ import annotations

import pytest

from emberkv.sim.engine import MS, START_NS, Engine, NodeClock


def test_actions_run_in_order_of_time_then_of_asking():
    engine, seen = Engine(1), []
    engine.after(2 * MS, seen.append, "later")
    engine.after(1 * MS, seen.append, "first")
    engine.after(1 * MS, seen.append, "second")
    engine.run_ms(1)
    assert seen == ["first", "second"]
    assert engine.now == START_NS + MS
    engine.run_ms(5)
    assert seen == ["first", "second", "later"]


def test_what_an_action_asks_for_runs_in_the_same_call_when_it_is_due():
    engine, seen = Engine(1), []
    engine.after(MS, lambda: engine.after(MS, seen.append, engine.now))
    engine.run_ms(2)
    assert seen == [START_NS + MS]


def test_streams_of_chance_do_not_disturb_one_another():
    left, right = Engine(7), Engine(7)
    left.rng_faults.random()
    assert left.rng.random() == right.rng.random()
    assert left.rng_workload.random() == right.rng_workload.random()
    assert Engine(8).rng.random() != Engine(7).rng.random()


@pytest.mark.parametrize("rate", [0.99, 1.0, 1.01])
def test_a_clock_keeps_its_rate_and_says_when_it_will_show_a_time(rate):
    engine = Engine(1)
    clock = NodeClock(engine, 5_000, rate)
    begun = clock.now_ns()
    assert begun == START_NS + 5_000
    engine.run_ms(clock.until_ns(begun + 100 * MS) / MS)
    assert abs(clock.now_ns() - begun - 100 * MS) < 10


def test_the_clock_of_a_paused_machine_stands_still():
    engine = Engine(1)
    clock = NodeClock(engine, 0, 1.0)
    clock.stop()
    stopped = clock.now_ns()
    engine.run_ms(50)
    assert clock.now_ns() == stopped
    clock.resume()
    engine.run_ms(50)
    assert clock.now_ns() == stopped + 50 * MS
