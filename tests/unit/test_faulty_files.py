"""Power cuts, faults on demand and the played device: what they do, and that one seed does one thing."""

from __future__ import annotations

import errno
import random
import threading
import time
from itertools import pairwise

import pytest

from emberkv.storage.disk import SegmentFiles
from emberkv.storage.faulty_files import BURST_S, SECTOR, FaultyFiles, MemoryFiles, SlowFiles, Verb
from emberkv.storage.mapping import page_buffer
from emberkv.storage.segment import PAGE

HANG_S = 30.0
CUTS = 200


def filled(count: int, byte: int) -> memoryview:
    view = page_buffer(count * PAGE)
    view[:] = bytes([byte]) * (count * PAGE)
    return view


def read(files: SegmentFiles, segment: int, offset: int, count: int) -> bytes:
    view = page_buffer(count * PAGE)
    return bytes(view[: files.read(segment, offset, [view])])


def sectors(data: bytes) -> list[int]:
    """The one byte that each sector is filled with; fails if a sector mixes two."""
    each = [data[at : at + SECTOR] for at in range(0, len(data), SECTOR)]
    assert all(len(set(sector)) == 1 for sector in each), "torn within a sector"
    return [sector[0] for sector in each]


# ------------------------------------------------------------------------------------------------------- power cuts


def test_what_was_synced_survives_every_cut() -> None:
    for seed in range(CUTS):
        files = MemoryFiles()
        files.write(1, 0, [filled(4, 1)])
        files.sync(1)
        files.write(1, 4 * PAGE, [filled(4, 2)])
        files.write(2, 0, [filled(1, 3)])
        files.power_cut(random.Random(seed))
        assert read(files, 1, 0, 4) == bytes(filled(4, 1))
        assert files.segments()[0][0] == 1


def test_what_was_not_synced_is_kept_lost_or_torn_page_by_page() -> None:
    seen: set[str] = set()
    for seed in range(CUTS):
        files = MemoryFiles()
        files.write(1, 0, [filled(8, 1)])
        files.sync(1)
        files.write(1, 0, [filled(8, 2)])  # over what is there: sizes play no part
        files.power_cut(random.Random(seed))
        found = sectors(read(files, 1, 0, 8))
        assert len(found) == 8 * PAGE // SECTOR
        assert set(found) <= {1, 2}
        for at in range(0, len(found), PAGE // SECTOR):
            page = set(found[at : at + PAGE // SECTOR])
            seen.add("torn" if len(page) == 2 else "kept" if page == {2} else "lost")
        pages = [tuple(found[at : at + PAGE // SECTOR]) for at in range(0, len(found), PAGE // SECTOR)]
        if any(set(later) == {2} and set(earlier) == {1} for earlier, later in pairwise(pages)):
            seen.add("a later page without an earlier one")
    assert seen == {"kept", "lost", "torn", "a later page without an earlier one"}


def test_size_and_name_that_were_not_synced_may_go() -> None:
    names, sizes = set(), set()
    for seed in range(CUTS):
        files = MemoryFiles()
        files.write(1, 0, [filled(2, 1)])
        files.sync(1)
        files.write(1, 2 * PAGE, [filled(4, 2)])
        files.write(2, 0, [filled(1, 3)])
        files.power_cut(random.Random(seed))
        found = dict(files.segments())
        names.add(2 in found)
        sizes.add(found[1])
        assert 2 * PAGE <= found[1] <= 6 * PAGE
        assert len(read(files, 1, 0, 10)) == found[1]
    assert names == {True, False}
    assert {2 * PAGE, 6 * PAGE} < sizes
    assert any(size % PAGE for size in sizes), "the end never falls within a page"


def test_a_lost_page_may_hold_what_an_older_segment_left() -> None:
    seen = set()
    for seed in range(CUTS):
        files = MemoryFiles()
        files.write(1, 0, [filled(2, 7)])
        files.sync(1)
        files.remove(1)
        files.write(2, 0, [filled(2, 9)])
        files.write(2, 2 * PAGE, [filled(2, 9)])
        files.power_cut(random.Random(seed))
        if dict(files.segments()).get(2) == 4 * PAGE:
            found = sectors(read(files, 2, 0, 4))
            seen.update(found)
            assert 7 not in found[2 * PAGE // SECTOR :], "bytes of another place"
    assert seen == {0, 7, 9}


def test_a_removal_is_durable() -> None:
    files = MemoryFiles()
    files.write(1, 0, [filled(1, 1)])
    files.sync(1)
    files.remove(1)
    files.power_cut(random.Random(1))
    assert files.segments() == []


def test_one_seed_gives_one_outcome_and_another_gives_others() -> None:
    def outcome(seed: int) -> list[tuple[int, bytes]]:
        files = MemoryFiles()
        for segment in (3, 1, 2):
            files.write(segment, 0, [filled(4, segment)])
            files.write(segment, 4 * PAGE, [filled(4, 10 + segment)])
        assert files.unsynced_pages() == 24
        files.power_cut(random.Random(seed))
        assert files.unsynced_pages() == 0
        return [(segment, read(files, segment, 0, 8)) for segment, _ in files.segments()]

    assert all(outcome(seed) == outcome(seed) for seed in range(20))
    assert len({str(outcome(seed)) for seed in range(20)}) > 10


def test_after_a_cut_what_is_there_is_durable_and_a_second_cut_takes_nothing() -> None:
    for seed in range(CUTS):
        files = MemoryFiles()
        files.write(1, 0, [filled(8, 1)])
        files.power_cut(random.Random(seed))
        before = [(segment, read(files, segment, 0, 8)) for segment, _ in files.segments()]
        files.power_cut(random.Random(seed + 1))
        assert [(segment, read(files, segment, 0, 8)) for segment, _ in files.segments()] == before


def test_a_killed_process_loses_nothing() -> None:
    files = MemoryFiles()
    files.write(1, 0, [filled(2, 1)])
    files.close()
    files.reopen()
    assert read(files, 1, 0, 2) == bytes(filled(2, 1))


def test_memory_refuses_what_a_direct_request_refuses() -> None:
    files = MemoryFiles()
    files.write(1, 0, [filled(2, 1)])
    for offset, view in ((1, filled(1, 1)), (0, filled(1, 1)[:100])):
        with pytest.raises(OSError, match="not whole pages"):
            files.write(1, offset, [view])
    with pytest.raises(OSError, match="not whole pages"):
        files.read(1, 1, [filled(1, 1)])


def test_memory_keeps_its_own_copy() -> None:
    files = MemoryFiles()
    view = filled(1, 1)
    files.write(1, 0, [view])
    view[:] = bytes(PAGE)
    assert read(files, 1, 0, 1) == bytes(filled(1, 1))


# ------------------------------------------------------------------------------------------------- faults on demand


def call(files: SegmentFiles, verb: Verb) -> None:
    if verb == "segments":
        files.segments()
    elif verb == "read":
        read(files, 1, 0, 1)
    elif verb == "write":
        files.write(1, 0, [filled(1, 1)])
    elif verb == "sync":
        files.sync(1)
    else:
        files.remove(99)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE])
@pytest.mark.parametrize("verb", ["segments", "read", "write", "sync", "remove"])
def test_one_verb_fails_and_heals(verb: Verb, error: int) -> None:
    files = FaultyFiles(MemoryFiles())
    verbs: tuple[Verb, ...] = ("write", "segments", "read", "sync", "remove")
    for each in verbs:
        call(files, each)
    files.fail(verb, error)
    for each in verbs:
        if each == verb:
            for _ in range(2):
                with pytest.raises(OSError, match=r"\[Errno") as raised:
                    call(files, each)
                assert raised.value.errno == error
        else:
            call(files, each)
    files.heal()
    for each in verbs:
        call(files, each)
    assert files.calls[verb] == 4


def test_after_so_many_calls_and_so_many_times() -> None:
    files = FaultyFiles(MemoryFiles())
    files.fail("write", errno.EIO, after=2, count=2)
    outcomes = []
    for _ in range(6):
        try:
            call(files, "write")
            outcomes.append(True)
        except OSError:
            outcomes.append(False)
    assert outcomes == [True, True, False, False, True, True]


def test_a_disk_becomes_full_in_the_middle_of_a_write() -> None:
    files = FaultyFiles(MemoryFiles())
    files.fail("write", errno.ENOSPC, count=1, partial_bytes=3 * PAGE)
    with pytest.raises(OSError, match="No space"):
        files.write(1, 0, [filled(2, 1), filled(2, 2)])
    assert files.segments() == [(1, 3 * PAGE)]
    assert read(files, 1, 0, 4) == bytes(filled(2, 1)) + bytes(filled(1, 2))


def test_short_reads_and_their_end() -> None:
    files = FaultyFiles(MemoryFiles())
    files.write(1, 0, [filled(4, 1)])
    files.shorten_reads(PAGE + 10)
    assert read(files, 1, 0, 4) == bytes(filled(4, 1))[: PAGE + 10]
    files.heal("write")
    assert len(read(files, 1, 0, 4)) == PAGE + 10
    files.heal("read")
    assert len(read(files, 1, 0, 4)) == 4 * PAGE


def test_damage_stays_at_its_place() -> None:
    files = FaultyFiles(MemoryFiles())
    files.write(1, 0, [filled(4, 0)])
    files.write(2, 0, [filled(4, 0)])
    files.damage(1, 2 * PAGE + 5, 0x81)
    for _ in range(2):
        found = read(files, 1, 0, 4)
        assert [(at, byte) for at, byte in enumerate(found) if byte] == [(2 * PAGE + 5, 0x81)]
    assert read(files, 1, 2 * PAGE, 1)[5] == 0x81
    assert not any(read(files, 1, 0, 2))
    assert not any(read(files, 2, 0, 4))
    first, second = filled(1, 1), filled(3, 1)
    files.read(1, 0, [first, second])
    assert second[PAGE + 5] == 0x81
    files.heal()
    assert not any(read(files, 1, 0, 4))


def test_a_share_of_the_reads_comes_with_one_bit_flipped() -> None:
    files = FaultyFiles(MemoryFiles())
    files.write(1, 0, [filled(2, 0)])
    files.flip_reads(random.Random(1), 0.5)
    bits = [sum(byte.bit_count() for byte in read(files, 1, 0, 2)) for _ in range(100)]
    assert set(bits) == {0, 1}
    assert 20 < sum(bits) < 80
    files.heal()
    assert not any(read(files, 1, 0, 2))


def test_a_held_verb_waits_until_it_is_healed() -> None:
    files = FaultyFiles(MemoryFiles())
    files.write(1, 0, [filled(1, 1)])
    files.hold("sync")
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (files.sync(1), ended.set()), daemon=True)
    thread.start()
    assert not ended.wait(0.05)
    assert read(files, 1, 0, 1)
    files.heal("sync")
    assert ended.wait(HANG_S)
    thread.join(HANG_S)


def test_what_only_some_files_have_shows_through() -> None:
    around = SlowFiles(FaultyFiles(MemoryFiles(b"i" * 16)), 0.0, 1e9)
    assert around.store_id == b"i" * 16
    assert around.direct is False
    with pytest.raises(AttributeError):
        _ = around.nothing_of_this_name


# ----------------------------------------------------------------------------------------------- the played device


class Clock:
    """Time that passes by sleeping only."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def sleep(self, for_s: float) -> None:
        self.now_s += for_s


def slow(clock: Clock, latency_s: float = 0.002, bytes_per_s: float = 8e9) -> SlowFiles:
    inner = MemoryFiles()
    inner.write(1, 0, [filled(256, 1)])
    return SlowFiles(inner, latency_s, bytes_per_s, clock_s=lambda: clock.now_s, sleep_s=clock.sleep)


def test_a_single_request_takes_latency_and_transfer() -> None:
    clock = Clock()
    files = slow(clock, 0.002, 1e9)
    for count in (1, 256, 16):
        before = clock.now_s
        read(files, 1, 0, count)
        assert clock.now_s - before == pytest.approx(0.002 + count * PAGE / 1e9)
    before = clock.now_s
    files.write(1, 0, [filled(64, 2), filled(64, 3)])
    assert clock.now_s - before == pytest.approx(0.002 + 128 * PAGE / 1e9)
    before = clock.now_s
    files.sync(1)
    assert clock.now_s - before == pytest.approx(0.002)


def at_once(files: SlowFiles, clock: Clock, requests: int, count: int) -> list[float]:
    """How long each of so many requests takes that all begin now."""
    start_s, took_s = clock.now_s, []
    for _ in range(requests):
        read(files, 1, 0, count)
        took_s.append(clock.now_s - start_s)
        clock.now_s = start_s
    return took_s


def test_requests_at_once_overlap_in_latency_and_share_bandwidth() -> None:
    clock = Clock()
    took_s = at_once(slow(clock, 0.002, 1e9), clock, 100, 256)  # 100 MiB at 1 GB/s
    assert took_s == sorted(took_s)
    assert took_s[-1] == pytest.approx(0.002 + 100 * 256 * PAGE / 1e9, abs=BURST_S * 1.01)
    # With nothing to transfer to speak of, a hundred take as long as one.
    clock = Clock()
    assert at_once(slow(clock, 0.002, 1e15), clock, 100, 1) == pytest.approx([0.002] * 100)


def test_an_idle_device_saves_up_no_more_than_its_burst() -> None:
    clock = Clock()
    files = slow(clock, 0.0, 1e9)
    read(files, 1, 0, 1)
    clock.now_s += 1000.0
    assert at_once(files, clock, 50, 256)[-1] >= 50 * 256 * PAGE / 1e9 - BURST_S * 1.01


def test_real_threads_sleep_side_by_side() -> None:
    inner = MemoryFiles()
    inner.write(1, 0, [filled(1, 1)])
    files = SlowFiles(inner, 0.1, 8e9)
    threads = [threading.Thread(target=read, args=(files, 1, 0, 1)) for _ in range(32)]
    started_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    took_s = time.monotonic() - started_s
    assert took_s >= 0.1
    assert took_s < 3.2 / 2, "32 requests waited one after another"
