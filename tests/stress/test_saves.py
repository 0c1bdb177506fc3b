"""Saves on real nodes that end in the middle: clients killed while they save, nodes frozen while they copy."""

from __future__ import annotations

import random
import signal
import time

import pytest

from stress.board import Column
from stress.herd import Child, Herd, limit_s, storm_s, wait_for
from stress.nodes import Nodes
from stress.roles import BIG_SIZES

MORTALS = 3


@pytest.mark.timeout(limit_s(3))
@pytest.mark.parametrize("door", ["unix", "tcp"])
def test_clients_killed_in_the_middle_of_a_save(nodes: Nodes, herd: Herd, door: str) -> None:
    """Whatever others read meanwhile is whole, and nothing of the dead stays behind."""
    endpoints: list[str] | str = nodes.unix(0) if door == "unix" else nodes.tcp()
    readers = [herd.start("getter", nodes.unix(0)), herd.start("pinner", nodes.unix(1))]
    readers.append(herd.start("writer", nodes.unix(1)))

    def born() -> Child:
        child = herd.start("mortal", endpoints, sizes=BIG_SIZES)
        child.killed = True  # by itself, which is no failure
        return child

    alive = [born() for _ in range(MORTALS)]
    end = time.monotonic() + storm_s(2)
    died = 0
    while (time.monotonic() < end or died < MORTALS) and not herd.full:
        for at, child in enumerate(alive):
            if child.ended():
                died += 1
                alive[at] = born()
        time.sleep(0.005)
    for child in alive:
        wait_for(child.ended, "a mortal to kill itself")
    assert all(reader.get(Column.LOOKS) or reader.role == "writer" for reader in readers)
    herd.finish()
    assert sum(child.get(Column.SAVES) for child in herd.children if child.role == "mortal") > 0
    print("died", died, {column.name: herd.board.total(column) for column in Column})
    nodes.wait_unpinned()
    nodes.wait_empty(herd)


@pytest.mark.timeout(limit_s(3))
def test_nodes_frozen_while_they_copy(nodes: Nodes, herd: Herd) -> None:
    """Saves end unknown, their callers write new blocks into the same buffers, and the node wakes with the old ones."""
    for at in (0, 1):
        herd.start("writer", nodes.unix(at), deadline_ms=100)
        herd.start("pinner", nodes.unix(at))
    herd.start("crowd", nodes.unix(0), deadline_ms=100)
    herd.start("getter", nodes.unix(1))
    chance = random.Random(2)
    end = time.monotonic() + storm_s(3)
    while time.monotonic() < end:
        name = chance.choice(nodes.names)
        nodes.cluster.kill(name, signal.SIGSTOP)
        time.sleep(chance.uniform(0.01, 0.4))  # well below the lease, so that no failover hides what is looked for
        nodes.cluster.kill(name, signal.SIGCONT)
        time.sleep(chance.uniform(0.01, 0.2))
    herd.finish()
    totals = {column.name: herd.board.total(column) for column in Column}
    print(totals)
    assert totals["LOST_SAVES"] > 0, totals
    assert totals["SAVES"] > 100, totals
    assert totals["KEPT"] > 10, totals
    assert totals["VOID"] == 0, "a save that ends unknown ends no pin"
    nodes.wait_unpinned()
    nodes.wait_empty(herd)
