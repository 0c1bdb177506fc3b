"""Readers on real nodes: pins under eviction and overwriting, frozen and killed readers, forked children, threads."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from stress.board import Column, State
from stress.herd import Child, Herd, limit_s, storm_s, wait_for
from stress.nodes import Nodes

CHURN_EVICTIONS = 1200
"""Blocks that had to go before a churn counts: the arena of a node holds about 950 of middle size."""


def churn(nodes: Nodes, herd: Herd) -> list[Child]:
    """Writers at both nodes."""
    return [herd.start("writer", nodes.unix(at)) for at in (0, 1)]


def wait_churned(nodes: Nodes, since: int) -> None:
    wait_for(lambda: nodes.evictions() - since >= CHURN_EVICTIONS, "evictions under the feet of the readers")


@pytest.mark.timeout(limit_s(3))
def test_storm_of_readers_writers_and_deletes(nodes: Nodes, herd: Herd) -> None:
    """Anybody may be frozen or killed at any moment; who is killed gets a successor."""
    before = nodes.evictions()
    cast = [("pinner", 0), ("pinner", 1), ("getter", 0), ("writer", 0), ("writer", 1), ("crowd", 0), ("scribbler", 1)]
    alive = [herd.start(role, nodes.unix(at), node=at) for role, at in cast]
    chance = random.Random(1)
    end = time.monotonic() + storm_s(3)
    while time.monotonic() < end:
        at = chance.randrange(len(alive))
        alive[at].freeze()
        time.sleep(chance.uniform(0.002, 0.15))
        alive[at].wake()
        if chance.random() < 0.15 and not herd.full:
            alive[at].kill()
            role, node = cast[at]
            alive[at] = herd.start(role, nodes.unix(node))
        time.sleep(chance.uniform(0, 0.1))
    herd.finish()
    totals = {column.name: herd.board.total(column) for column in Column}
    print(totals, "evictions", nodes.evictions() - before)
    assert totals["KEPT"] > 20, totals  # without them nothing was tried
    assert totals["SAVES"] > 100, totals
    assert totals["LOOKS"] > 100, totals
    nodes.wait_unpinned()
    nodes.wait_empty(herd)


@pytest.mark.timeout(limit_s(3))
def test_frozen_readers_keep_their_pins(nodes: Nodes, herd: Herd) -> None:
    holders = [herd.start("holder", nodes.unix(at), sizes=[16 << 10, 40_000]) for at in (0, 0, 1)]
    writers = churn(nodes, herd)
    for holder in holders:
        holder.wait_state(State.HOLDING)
    for holder in holders:
        holder.freeze()
    held = [sum(one.get(Column.HELD_BYTES) for one in holders[:2]), holders[2].get(Column.HELD_BYTES)]
    end = time.monotonic() + storm_s(0)
    while True:
        wait_churned(nodes, nodes.evictions())
        for at in (0, 1):
            assert nodes.status(at)["pinned_bytes"] >= held[at], "a frozen reader lost its pins"
        if time.monotonic() >= end:
            break
    for holder in holders:
        holder.wake()
    for holder in holders:
        holder.release()
        holder.wait_state(State.DONE)
        assert holder.get(Column.KEPT) >= 3
    assert all(writer.get(Column.SAVES) for writer in writers)
    herd.finish()
    nodes.wait_unpinned()
    nodes.wait_empty(herd)


@pytest.mark.timeout(limit_s(3))
def test_killed_readers_give_back_all_that_they_held(nodes: Nodes, herd: Herd) -> None:
    """While running, while frozen, and several at once; others that hold pins meanwhile keep theirs."""
    witness = herd.start("holder", nodes.unix(0), sizes=[16 << 10])
    churn(nodes, herd)
    witness.wait_state(State.HOLDING)
    end = time.monotonic() + storm_s(1.5)
    rounds = 0
    while time.monotonic() < end or rounds < 2:
        victims = [herd.start("holder", nodes.unix(0)) for _ in range(2)] + [herd.start("pinner", nodes.unix(0))]
        for victim in victims[:2]:
            victim.wait_state(State.HOLDING)
        held = [witness.get(Column.HELD_BYTES), *(one.get(Column.HELD_BYTES) for one in victims[:2])]
        assert nodes.status(0)["pinned_bytes"] >= sum(held)
        if rounds % 2:
            victims[0].freeze()
        for victim in victims:
            victim.kill()
        wait_for(lambda: nodes.status(0)["pinned_bytes"] == held[0], "the pins of killed readers to end")  # noqa: B023
        wait_for(lambda: nodes.stagings(0) <= 2, "the staging of killed readers to be given back")  # witness and writer
        rounds += 1
        if herd.full:
            break
    witness.release()
    witness.wait_state(State.DONE)
    herd.finish()
    nodes.wait_unpinned()
    nodes.wait_empty(herd)


@pytest.mark.parametrize("kind", ["works", "idle"])
def test_a_forked_child_and_its_parent_read_right_bytes(nodes: Nodes, herd: Herd, kind: str) -> None:
    family = herd.start("parent", nodes.unix(0), child=kind)
    since = nodes.evictions()
    churn(nodes, herd)
    family.wait_state(State.HOLDING)
    wait_churned(nodes, since)
    family.release()
    family.wait_state(State.DONE)
    herd.finish()
    nodes.wait_unpinned()
    nodes.wait_empty(herd)


@pytest.mark.parametrize("kind", ["works", "idle", "leak"])
def test_pins_end_with_the_parent_though_its_child_lives(nodes: Nodes, herd: Herd, kind: str) -> None:
    family = herd.start("parent", nodes.unix(1), child=kind)
    churn(nodes, herd)
    family.wait_state(State.HOLDING)
    wait_for(lambda: family.get(Column.CHILD) > 0, "the fork")
    child = os.pidfd_open(family.get(Column.CHILD))
    try:
        assert nodes.status(1)["pinned_bytes"] >= family.get(Column.HELD_BYTES) > 0
        family.kill()
        # A child that works has pins of its own, one at a time; between two of them nothing is pinned.
        wait_for(lambda: nodes.status(1)["pinned_bytes"] == 0, "the pins of the dead parent to end")
        signal.pidfd_send_signal(child, 0)  # the child lives
    finally:
        if kind == "leak":
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
    herd.finish()
    nodes.wait_unpinned()
    nodes.wait_empty(herd)
