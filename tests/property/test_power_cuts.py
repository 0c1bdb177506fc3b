"""The tier's own code over a disk that loses power: nothing wrong is served, nothing that was synced is lost."""

from __future__ import annotations

import random

import pytest

from emberkv.storage.block_index import MemoryIndex
from emberkv.storage.disk import DiskPlace
from emberkv.storage.power_cuts import CutReport, cut_power
from emberkv.storage.segment_log import SegmentLog


@pytest.mark.parametrize("seed", range(150))
def test_a_power_cut_costs_only_what_was_not_synced(seed: int) -> None:
    report = CutReport()
    cut_power(random.Random(seed), report)
    assert (report.wrong_bytes, report.synced_lost) == (0, 0), report


def test_the_judge_notices_a_store_that_lies() -> None:
    """A disk that says it synced and did not: the same runs must then find a loss."""
    report = CutReport()
    for seed in range(30):
        cut_power(random.Random(seed), report, syncs_lie=True)
    assert report.synced_lost > 0


def test_the_log_never_exceeds_its_limit() -> None:
    rng = random.Random(5)
    log = SegmentLog(4 << 20, 256 << 10)
    for _ in range(2000):
        if log.place(4096 * rng.randrange(1, 30)) is None or log.wants_room():
            oldest = log.oldest()
            if oldest is not None:
                log.removed(oldest)
        assert log.used_bytes <= log.limit_bytes
        log.check()


def test_a_memory_index_is_an_index() -> None:
    index = MemoryIndex()
    assert index.find([b"k"]) == [None]
    assert index.marks() == {}
    assert DiskPlace(0, 1, 2) < DiskPlace(0, 1, 3)
