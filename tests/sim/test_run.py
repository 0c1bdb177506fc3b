"""Whole runs: the same seed is the same run, anywhere; a broken promise ends it, is told, and shrinks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import msgspec
import pytest

from emberkv.cli import sim as cli
from emberkv.core.repair import Repair
from emberkv.sim import run as running
from emberkv.sim.engine import Fault, Options, Violation
from emberkv.sim.faults import KINDS, draw
from emberkv.sim.run import Run, run_seed
from emberkv.sim.shrink import law_of, shrink
from emberkv.sim.story import LINES_MAX, Story

SHORT = Options(budget_ms=500.0, phase1_ms=1500.0)
PROGRAM = """
import sys
from emberkv.sim.run import run_seed
for seed in map(int, sys.argv[1:]):
    print(seed, run_seed(seed, trace=True).digest)
"""


def test_a_calm_run_finds_nothing_and_measures_the_outage():
    outcome = run_seed(1, SHORT)
    assert outcome.violation == ""
    assert outcome.phase == "done"
    assert 0 < outcome.outage_ms <= outcome.bound_ms
    assert outcome.steps > 100


def test_the_same_seed_is_the_same_run_whatever_ran_before():
    first = run_seed(11, trace=True).digest
    run_seed(12)
    assert run_seed(11, trace=True).digest == first
    assert run_seed(12, trace=True).digest != first


@pytest.mark.timeout(240)
def test_the_same_seed_is_the_same_run_in_another_process():
    seeds = ["4", "9", "21"]
    found = []
    for hash_seed in ("0", "12345"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *seeds], env=environment, capture_output=True, text=True, timeout=110
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert found[0] == found[1]
    assert len(set(found[0].split())) == 2 * len(seeds)


def test_a_story_changes_nothing():
    assert run_seed(11, trace=True, story=Story()).digest == run_seed(11, trace=True).digest


def test_dropping_a_fault_does_not_change_what_clients_ask():
    fault = Fault(300.0, "slow", "a", "b", 200.0, 3.0)
    asked = []
    for faults in ((), (fault,)):
        run = Run(5, msgspec.structs.replace(SHORT, faults=faults), None, trace=False)
        run._start()
        requests = []
        run.history.ended.append(lambda request, to=requests: to.append((request.client, tuple(request.keys))))
        run._storm()
        asked.append(set(requests))
    common = asked[0] & asked[1]
    assert len(common) > 0.8 * max(map(len, asked))


def test_seeds_draw_every_kind_of_fault_and_every_budget():
    drawn = [draw(seed) for seed in range(400)]
    assert {fault.kind for options in drawn for fault in options.faults} == set(KINDS)
    assert {options.budget_ms for options in drawn} == {500.0, 1000.0, 3000.0, 10_000.0}
    assert any(not options.faults for options in drawn)
    assert draw(7) == draw(7)


def broken_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Repair, "on_tick", lambda self: None)
    monkeypatch.setattr(Repair, "start", lambda self: None)


WITH_CRASH = msgspec.structs.replace(
    SHORT,
    faults=(
        Fault(200.0, "slow", "a", "b", 100.0, 2.0),
        Fault(400.0, "crash", "c", for_ms=300.0, flag=True),
        Fault(900.0, "wall-jump", "b", amount=50.0),
    ),
)


def test_a_violation_is_told_in_few_lines(monkeypatch):
    broken_repair(monkeypatch)
    story = Story()
    outcome = run_seed(2, WITH_CRASH, story=story)
    assert outcome.violation
    lines = story.lines()
    assert len(lines) <= LINES_MAX
    assert "VIOLATION" in lines[-1]
    assert any("crash c" in line for line in lines)


def test_a_failing_run_shrinks_to_less_that_fails_alike(monkeypatch):
    monkeypatch.setattr(running, "START_LIMIT_MS", 30_000.0)
    first = run_seed(2, WITH_CRASH)
    assert first.violation == ""

    def crashed_once(self: Run) -> None:
        if self.cluster.processes["c"].lives > 1:
            raise Violation("Toy: c has lived twice")

    monkeypatch.setattr(Run, "_settle", crashed_once)
    shrunk = shrink(2, WITH_CRASH)
    assert shrunk is not None
    assert [fault.kind for fault in shrunk.options.faults] == ["crash"]
    assert law_of(shrunk.outcome.violation) == "Toy"
    assert shrunk.options.phase1_ms < WITH_CRASH.phase1_ms


def test_a_run_that_does_not_fail_does_not_shrink():
    assert shrink(1, SHORT) is None


def test_an_error_of_the_code_is_a_violation_that_says_where(monkeypatch):
    def breaks(self: Repair) -> None:
        raise KeyError("oh")

    monkeypatch.setattr(Repair, "on_tick", breaks)
    outcome = run_seed(1, SHORT)
    assert "KeyError" in outcome.violation
    assert "test_run.py" in outcome.violation


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_counts_and_fails_when_something_was_found(monkeypatch, capsys):
    assert cli._many([1, 2], 0, 1, 5.0, smaller=False, as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["seeds"] == 2
    assert document["violations"] == 0
    assert document["seeds_per_s"] > 0
    assert document["outage_within_budget"] == 1.0
    broken_repair(monkeypatch)
    assert cli._many([1], 0, 1, 5.0, smaller=False, as_json=True) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["failed"][0][0] == 1
    assert "emberkv sim --seed 1 --seconds 5" in told.err


def test_fresh_seeds_are_new_and_named():
    seeds = cli.fresh_seeds(5)
    assert len(set(seeds)) == 5
    assert min(seeds) >= cli.FRESH_FROM
