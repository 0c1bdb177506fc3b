"""The parts of a node that share memory, in one process, with real threads and real bytes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from emberkv.storage.staging import copy_and_checksum
from stress.crew import Crew
from stress.herd import limit_s, storm_s
from stress.memory_storm import ArenaStorm, StagingStorm, guarded_dram, staging_pair
from stress.pattern import key_of, make, same
from stress.runtime_storm import RuntimeStorm

THREADS = range(1, 7)


@pytest.mark.timeout(limit_s(2))
def test_threads_on_one_arena() -> None:
    dram, tier, data = guarded_dram(16 << 20)
    crew, storm = Crew(storm_s(1)), ArenaStorm(tier, data, seed=1)
    bodies: list[Callable[[], None]] = [lambda number=number: storm.body(crew, number) for number in THREADS]  # type: ignore[misc]
    crew.run([*bodies, lambda: storm.check(crew, dram.arena)])
    taken, refused = storm.counts
    print("slots", taken, "refused", refused)
    assert taken > 200
    assert dram.usage() == (0, dram.total_bytes)
    assert not tier.guard.live
    dram.arena.check()


@pytest.mark.timeout(limit_s(2))
def test_threads_on_one_staging_area() -> None:
    dram, tier, _ = guarded_dram(16 << 20)
    area, staging = staging_pair(2 << 20)
    crew, storm = Crew(storm_s(1)), StagingStorm(area, staging, tier, seed=2)

    def check() -> None:
        while not crew.over:
            staging.check()

    bodies: list[Callable[[], None]] = [lambda number=number: storm.body(crew, number) for number in THREADS]  # type: ignore[misc]
    crew.run([*bodies, check])
    print("saves", storm.saves, "full", storm.full)
    assert storm.saves > 200
    assert storm.full, "staging was never full, so first fit was never tried hard"
    assert staging.usage()[0] == 0
    assert not storm.rooms.live
    assert dram.usage()[0] == 0
    staging.check()


@pytest.mark.timeout(limit_s(2))
def test_staging_closed_in_the_middle_of_a_copy() -> None:
    """The connection ends while its thread, or another one, still copies: the memory goes after the copy."""
    rng = random.Random(4)
    length = 1 << 20
    crew = Crew(storm_s(0.5))
    rounds = 0
    while not crew.over:
        area, staging = staging_pair(length)
        np.copyto(staging.data, make(key_of(1), 1 + rounds, length))
        target = np.empty(length, np.uint8)
        view = area.view(0, length)
        copier = threading.Thread(target=copy_and_checksum, args=(target.data, view))
        copier.start()
        for _ in range(rng.randrange(200)):
            pass  # a moment, of a length that the scheduler does not choose
        area.close()
        staging.close()
        copier.join()
        same(key_of(1), 1 + rounds, target)
        rounds += 1
    assert rounds


@pytest.mark.timeout(limit_s(2))
def test_threads_on_one_runtime_with_pins_and_staging() -> None:
    storm, crew = RuntimeStorm(seed=3), Crew(storm_s(2))
    bodies: list[Callable[[], None]] = [lambda number=number: storm.body(crew, number) for number in THREADS]  # type: ignore[misc]
    crew.run([*bodies, lambda: storm.check(crew)])
    print("puts", storm.puts, "refused", storm.refused, "pinned", storm.pinned, "quota", storm.quota)
    evictions = storm.core.state.directory.evictions
    assert storm.puts > 100
    assert storm.pinned > 100
    assert storm.quota, "the bound of pins was never met"
    assert evictions > 20, evictions
    storm.wait_empty()
