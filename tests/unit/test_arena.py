"""SlabArena: where slots lie, when a slab changes its size, and what releasing wrongly costs."""

from __future__ import annotations

import itertools

import pytest

from emberkv.errors import ConfigError, InvariantViolation
from emberkv.storage.arena import SLAB_BYTES, SlabArena, Slot, class_of

KIB, MIB = 1 << 10, 1 << 20


def fill(arena: SlabArena, length: int) -> list[Slot]:
    slots = []
    while (slot := arena.reserve(length)) is not None:
        slots.append(slot)
    return slots


def test_slots_are_pages_that_do_not_overlap() -> None:
    arena = SlabArena(64 * MIB)
    slots = [slot for length in (1, 4096, 4097, 100_000, 0) if (slot := arena.reserve(length))]
    assert [(s.length, s.size_class, s.refs) for s in slots] == [
        (1, 4096, 1),
        (4096, 4096, 1),
        (4097, 8192, 1),
        (100_000, 102_400, 1),
        (0, 4096, 1),
    ]
    spans = sorted((s.offset, s.offset + s.size_class) for s in slots)
    assert len(spans) == 5
    assert all(start % 4096 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    arena.check()


@pytest.mark.parametrize(
    ("total", "slab", "slot_max"),
    [
        (64 << 30, 64 * MIB, 32 * MIB),
        (512 * MIB, 64 * MIB, 32 * MIB),
        (256 * MIB, 32 * MIB, 32 * MIB),
        (64 * MIB, 8 * MIB, 8 * MIB),
        (8 * MIB, 4 * MIB, 4 * MIB),
        (1 * MIB, 1 * MIB, 1 * MIB),
        (4096, 4096, 4096),
    ],
)
def test_small_arenas_have_small_slabs(total: int, slab: int, slot_max: int) -> None:
    arena = SlabArena(total)
    assert (arena.slab_bytes, arena.slot_bytes_max, arena.total_bytes) == (slab, slot_max, total)
    largest = arena.reserve(slot_max)
    assert largest is not None
    assert arena.reserve(slot_max + 1) is None
    arena.check()


def test_default_slab_is_64_mib() -> None:
    assert SLAB_BYTES == 64 * MIB


@pytest.mark.parametrize(("total", "slab"), [(0, SLAB_BYTES), (4095, SLAB_BYTES), (-1, SLAB_BYTES), (MIB, 100)])
def test_sizes_that_hold_nothing_are_refused(total: int, slab: int) -> None:
    with pytest.raises(ConfigError, match="too small"):
        SlabArena(total, slab)


def test_odd_total_is_cut_to_pages_and_the_last_slab_is_used() -> None:
    arena = SlabArena(3 * MIB + 8192 + 5, slab_bytes=MIB)
    assert arena.total_bytes == 3 * MIB + 8192
    big = fill(arena, 512 * KIB)
    assert len(big) == 6
    small = fill(arena, 4096)
    assert [slot.offset for slot in small] == [3 * MIB, 3 * MIB + 4096]
    arena.check()
    for slot in big + small:
        arena.release(slot)
    arena.check()
    assert arena.usage() == (0, 3 * MIB + 8192)


def test_low_slabs_come_first_because_they_are_prefaulted_first() -> None:
    arena = SlabArena(4 * MIB, slab_bytes=MIB)
    first, second = arena.reserve(4096), arena.reserve(8192)
    assert first is not None
    assert second is not None
    assert (first.offset, second.offset) == (0, MIB)


def test_a_slab_serves_one_size_until_it_is_empty() -> None:
    arena = SlabArena(2 * MIB, slab_bytes=MIB)
    pages = fill(arena, 4096)
    assert len(pages) == 512
    assert arena.reserve(8192) is None
    for slot in pages[:255]:
        arena.release(slot)
    assert arena.reserve(8192) is None, "one page still holds the first slab"
    arena.release(pages[255])
    assert arena.reserve(8192) is not None
    arena.check()


def test_the_fuller_slab_is_filled_and_others_may_drain() -> None:
    arena = SlabArena(2 * MIB, slab_bytes=MIB)
    slots = fill(arena, 512 * KIB)
    arena.release(slots[3])
    arena.release(slots[0])
    again = arena.reserve(512 * KIB)
    assert again is not None
    assert again.offset == 3 * 512 * KIB, "the slab that had room first keeps being filled"


def test_release_twice_and_foreign_slots_are_our_own_bugs() -> None:
    arena = SlabArena(MIB)
    slot = arena.reserve(4096)
    assert slot is not None
    arena.reserve(4096)
    copy = Slot(slot.offset, slot.length, slot.size_class)
    arena.release(slot)
    assert slot.size_class == 0
    for wrong in (
        slot,
        copy,
        Slot(4096 + 1, 1, 4096),
        Slot(MIB, 1, 4096),
        Slot(-4096, 1, 4096),
        Slot(4096, 1, 8192),
    ):
        with pytest.raises(InvariantViolation, match="released twice or is not from"):
            arena.release(wrong)
    arena.check()


def test_a_slot_in_the_tail_of_a_slab_is_foreign() -> None:
    arena = SlabArena(MIB)
    assert arena.reserve(300 * KIB) is not None
    with pytest.raises(InvariantViolation):
        arena.release(Slot(900 * KIB, 300 * KIB, 300 * KIB))


def test_a_late_second_release_does_not_free_the_next_owner() -> None:
    arena = SlabArena(MIB)
    arena.reserve(4096)
    stale = arena.reserve(4096)
    assert stale is not None
    arena.release(stale)
    owner = arena.reserve(4096)
    assert owner is not None
    assert owner.offset == stale.offset
    with pytest.raises(InvariantViolation):
        arena.release(stale)
    arena.check()
    assert arena.usage()[0] == 2 * 4096


def test_usage_counts_whole_pages() -> None:
    arena = SlabArena(MIB)
    slot = arena.reserve(5000)
    assert slot is not None
    assert arena.usage() == (8192, MIB)
    arena.release(slot)
    assert arena.usage() == (0, MIB)


def test_what_a_slot_takes() -> None:
    assert (class_of(0), class_of(1), class_of(4096), class_of(4097)) == (4096, 4096, 4096, 8192)


def test_a_size_without_slab_is_told_which_slab_to_drain() -> None:
    arena = SlabArena(2 * MIB, slab_bytes=MIB)
    assert not list(arena.slabs(8192, []))
    pages, large = [arena.reserve(4096)], fill(arena, 512 * KIB)
    assert (arena.class_slots(4096), arena.class_slots(511 * KIB), arena.class_slots(8192)) == (1, 2, 0)
    assert arena.reserve(8192) is None
    assert [list(slots) for slots in arena.slabs(8192, [])] == [pages, large]
    assert pages[0] is not None
    arena.release(pages[0])
    assert arena.reserve(8192) is not None
    assert len(large) == 2
    arena.check()


@pytest.mark.parametrize("break_it", ["used", "live", "returned", "partial", "class"])
def test_check_sees_a_broken_sum(break_it: str) -> None:
    arena = SlabArena(MIB)
    first, second = arena.reserve(4096), arena.reserve(4096)
    assert first is not None
    assert second is not None
    arena.release(first)
    arena.check()
    slab = arena._slabs[0]
    if break_it == "used":
        arena._used_bytes += 4096
    elif break_it == "live":
        slab.live += 1
    elif break_it == "returned":
        slab.returned.append(1)
    elif break_it == "partial":
        arena._partial[4096].clear()
    else:
        arena._live_by_class[4096] = 7
    with pytest.raises(InvariantViolation, match="arena"):
        arena.check()


def test_the_slab_to_drain_is_that_in_which_least_is_lost_and_of_equal_ones_the_coldest() -> None:
    arena = SlabArena(3 * MIB, slab_bytes=MIB)
    slots = fill(arena, 256 * KIB)
    first, second, third = slots[:4], slots[4:8], slots[8:]

    def order(*cold: Slot) -> list[list[Slot]]:
        return [list(group) for group in arena.slabs(4096, cold)]

    assert order() == [first, second, third]
    assert order(third[2]) == [third, first, second], "a cold block counts half"
    assert order(second[0], third[1]) == [second, third, first], "of equal ones that with the coldest block"
    assert order(third[1], second[0]) == [third, second, first]
    arena.release(first[0])
    assert order(second[0], third[1])[0] == first[1:], "three blocks are less than three and a half"
    assert order(*third)[0] == third, "and more than four halves"


def test_a_slab_that_is_too_short_or_of_the_same_size_is_not_drained() -> None:
    arena = SlabArena(MIB + 8192, slab_bytes=MIB)
    large = fill(arena, MIB)
    short = fill(arena, 4096)
    assert (len(large), len(short)) == (1, 2)
    assert [list(slots) for slots in arena.slabs(8192, [])] == [short, large]
    assert [list(slots) for slots in arena.slabs(12288, [])] == [large]
    assert [list(slots) for slots in arena.slabs(4096, [])] == [large]
    assert not list(arena.slabs(MIB, []))
