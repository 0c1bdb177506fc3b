"""The bugs that are put in on purpose fit the code that is there, are put back, and the simulator finds them.

`emberkv sim --mutations` runs all of them; here a few run whose seeds are quick, so that the machinery is exercised.
"""

from __future__ import annotations

import pytest

from emberkv.core.directory import Directory
from emberkv.core.failover import Failover
from emberkv.core.get import Reads
from emberkv.core.hints import Hints
from emberkv.core.learner import Learner
from emberkv.core.lease import Lease
from emberkv.core.put import Put
from emberkv.core.repair import Repair
from emberkv.core.stream import Stream
from emberkv.sim.mutation import CALM, Mutation, StaleMutation, rewrite, swap, together
from emberkv.sim.mutations import MUTATIONS, find, run_mutations
from emberkv.sim.mutations_liveness import LIVENESS
from emberkv.sim.mutations_safety import SAFETY

NAMES = [mutation.name for mutation in MUTATIONS]
QUICK = (
    "always miss",
    "serve copies that were not verified",
    "show PENDING blocks to session reads",
    "acknowledge before the copies are there",
    "expire without comparing the heartbeat that was timed",
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=NAMES)
def test_each_fits_the_code_and_is_taken_out_again(mutation: Mutation) -> None:
    owners = (Stream, Reads, Put, Hints, Lease, Failover, Learner, Repair, Directory)
    before = [dict(vars(owner)) for owner in owners]
    with mutation.apply():
        pass
    assert before == [dict(vars(owner)) for owner in owners]


def test_there_are_enough_and_their_names_differ() -> None:
    assert len(MUTATIONS) >= 32
    assert len(set(NAMES)) == len(NAMES)
    assert len(LIVENESS) >= 5
    assert all(mutation.kind == "safety" for mutation in SAFETY)
    assert all(mutation.kind == "liveness" for mutation in LIVENESS)
    assert all(mutation.law and mutation.seeds_max for mutation in MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=NAMES)
def test_worlds_are_functions_of_the_seed(mutation: Mutation) -> None:
    assert mutation.options(7) == mutation.options(7)


@pytest.mark.parametrize("name", QUICK)
def test_a_mutation_is_found(name: str) -> None:
    mutation = next(mutation for mutation in MUTATIONS if mutation.name == name)
    found = find(mutation, 20)
    assert found.caught, f"{name}: {found}"
    assert found.violation
    assert found.seeds <= 20


def test_code_that_is_not_broken_is_not_found() -> None:
    harmless = Mutation("harmless", "none", swap(Stream, "gate", Stream.gate), CALM, seeds_max=3)
    found = find(harmless, 10)
    assert not found.caught
    assert found.seeds == 3


def test_a_change_whose_line_is_gone_says_so() -> None:
    stale = rewrite(Stream, "gate", ("no such line", "pass"))
    with pytest.raises(StaleMutation, match="no such line"), stale():
        pass
    with pytest.raises(StaleMutation, match="has no nowhere"), swap(Stream, "nowhere", None)():
        pass


def test_a_change_that_fails_half_way_is_taken_back() -> None:
    gate = Stream.gate
    half = together(swap(Stream, "gate", None), rewrite(Stream, "flush", ("no such line", "pass")))
    with pytest.raises(StaleMutation), half():
        pass
    assert Stream.gate is gate


def test_the_report_names_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = tuple(mutation for mutation in MUTATIONS if mutation.name in QUICK[:2])
    monkeypatch.setattr("emberkv.sim.mutations.MUTATIONS", chosen)
    told: list[str] = []
    report = run_mutations(20, 1, told.append)
    assert report["mutations"] == report["caught"] == len(told) == 2
    assert 1 <= report["median_seeds"] <= 20
    assert {one["name"] for one in report["each"]} == set(QUICK[:2])
    assert all(one["violation"] for one in report["each"])
