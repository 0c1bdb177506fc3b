"""Entries, references and room."""

import pytest

from emberkv.core.directory import Directory, Entry, make_entry, restamped
from emberkv.errors import InvariantViolation
from emberkv.types import NO_VERSION, SCOPE_BYTES, EntryState, MissReason, Version, shard_of
from harness.tier import MemoryTier
from harness.world import key_of, keys_of_shard


def entry_of(directory: Directory, number: int, length: int = 10, seq: int = 1, prev: int = 0) -> Entry:
    return make_entry(
        key_of(number),
        state=EntryState.COMMITTED,
        version=Version(1, seq),
        put_id=b"",
        checksum=b"c" * 16,
        slot=directory.reserve(length),
        prev=Version(1, prev) if prev else NO_VERSION,
    )


def tombstone(number: int, seq: int = 2) -> Entry:
    return make_entry(
        key_of(number), state=EntryState.TOMBSTONE, version=Version(1, seq), put_id=b"", checksum=b"", slot=None
    )


def directory_of(slots: int) -> Directory:
    return Directory(MemoryTier(slots * 4096))


def test_replacing_an_entry_frees_its_room_unless_a_reader_holds_it():
    directory = directory_of(8)
    first = entry_of(directory, 1)
    directory.install(first)
    directory.ref(first.slot)
    directory.install(entry_of(directory, 1, seq=2))
    directory.check()
    assert len(directory.tier.slots) == 2
    directory.unref(first.slot)
    assert len(directory.tier.slots) == 1


def test_giving_back_too_much_is_an_alarm():
    directory = directory_of(8)
    slot = directory.reserve(10)
    slot.refs = 0
    with pytest.raises(InvariantViolation):
        directory.unref(slot)


def test_restamped_shares_the_bytes():
    directory = directory_of(8)
    first = entry_of(directory, 1)
    directory.install(first)
    directory.ref(first.slot)
    directory.install(restamped(first, Version(2, 1), first.version))
    assert directory.get(first.key).version == Version(2, 1)
    assert first.slot.refs == 1
    directory.check()


def test_full_tier_evicts_the_oldest_and_remembers_it():
    directory = directory_of(8)
    for number in range(9):
        directory.install(entry_of(directory, number))
    assert directory.get(key_of(0)) is None
    assert list(directory.evicted) == [key_of(0)]
    assert directory.evicted_version(key_of(0)) == Version(1, 1)
    assert directory.evictions == 1
    directory.install(entry_of(directory, 0, seq=3))
    assert directory.evicted_version(key_of(0)) == NO_VERSION
    directory.check()


def test_bytes_in_use_are_never_evicted():
    directory = directory_of(4)
    for number in range(4):
        directory.install(entry_of(directory, number))
        directory.ref(directory.get(key_of(number)).slot)
    assert directory.reserve(10) is None
    assert directory.count() == 4


def test_another_size_gets_a_slab_once_one_runs_empty():
    directory = directory_of(16)
    for number in range(16):
        directory.install(entry_of(directory, number))
    assert directory.reserve(2 * 4096) is not None
    directory.check()


def test_nothing_is_evicted_for_a_block_that_never_fits():
    directory = Directory(MemoryTier(8 * 4096), block_bytes_max=4096)
    for number in range(8):
        directory.install(entry_of(directory, number))
    assert directory.reserve(4097) is None
    assert (directory.count(), directory.evictions) == (8, 0)


def test_tombstones_hold_no_room_and_are_bounded(monkeypatch):
    monkeypatch.setattr(Directory, "TOMBSTONES_MAX", 3)
    directory = directory_of(8)
    directory.install(entry_of(directory, 0))
    for number in range(5):
        directory.install(tombstone(number))
    assert (directory.tombstones, directory.tombstones_dropped) == (3, 2)
    assert directory.get(key_of(0)) is None
    assert directory.get(key_of(4)).info.reason == MissReason.DELETED
    assert not directory.tier.slots
    directory.check()
    directory.install(entry_of(directory, 4, seq=9))
    assert directory.tombstones == 2
    directory.check()


def test_what_replaced_an_older_version_leaves_a_ghost_and_a_first_version_does_not():
    directory = directory_of(8)
    directory.install(entry_of(directory, 1))
    directory.evict(directory.get(key_of(1)))
    directory.install(entry_of(directory, 2, seq=2, prev=1))
    directory.evict(directory.get(key_of(2)))
    directory.install(entry_of(directory, 3))
    directory.evict(directory.get(key_of(3)), Version(1, 9))  # a newer version found no room
    (second,) = directory.ghosts(shard_of(key_of(2)), lambda version: version.epoch == 1)
    (third,) = directory.ghosts(shard_of(key_of(3)), lambda version: version.epoch == 1)
    assert [(ghost.key, ghost.version, ghost.slot) for ghost in (second, third)] == [
        (key_of(2), Version(1, 2), None),
        (key_of(3), Version(1, 9), None),
    ]
    assert not directory.ghosts(shard_of(key_of(1)), lambda version: True)
    assert not directory.ghosts(shard_of(key_of(2)), lambda version: False)
    directory.install(entry_of(directory, 2, seq=5))
    assert not directory.ghosts(shard_of(key_of(2)), lambda version: True)


def test_memory_of_an_eviction_only_rises():
    directory = directory_of(8)
    directory.remember_evicted(key_of(1), Version(2, 5), replaced=True)
    directory.remember_evicted(key_of(1), Version(1, 9), replaced=False)
    assert directory.evicted_version(key_of(1)) == Version(2, 5)
    assert len(directory.ghosts(shard_of(key_of(1)), lambda version: version == Version(2, 5))) == 1


def test_floor_only_rises_and_is_per_shard():
    directory = directory_of(8)
    directory.raise_floor(3, Version(2, 5))
    directory.raise_floor(3, Version(1, 9))
    assert directory.floors[3] == Version(2, 5)
    assert directory.floors[4] == NO_VERSION


def test_tombstone_that_is_forgotten_for_its_number_raises_the_floor(monkeypatch):
    monkeypatch.setattr(Directory, "TOMBSTONES_MAX", 1)
    directory = directory_of(8)
    directory.install(tombstone(1, seq=7))
    assert directory.floors[shard_of(key_of(1))] == NO_VERSION
    directory.install(tombstone(2))
    assert directory.get(key_of(1)) is None
    assert directory.floors[shard_of(key_of(1))] == Version(1, 7)
    assert directory.floors[shard_of(key_of(2))] == NO_VERSION


def test_tombstones_are_forgotten_by_age_each_from_when_it_came_in(monkeypatch):
    directory = directory_of(8)
    for number in range(3):
        directory.now_ns = number * 100
        directory.install(tombstone(number, seq=number + 1))
    directory.now_ns = 250
    directory.install(tombstone(0, seq=9))  # deleted again: remembered from now on
    directory.forget_tombstones(100)
    assert directory.tombstones == 3  # one that came in at the very moment stays
    directory.forget_tombstones(101)
    assert directory.get(key_of(1)) is None
    assert directory.floors[shard_of(key_of(1))] == Version(1, 2)
    assert {n for n in range(3) if directory.get(key_of(n)) is not None} == {0, 2}
    monkeypatch.setattr(Directory, "TOMBSTONES_PER_TICK_MAX", 1)
    directory.forget_tombstones(1000)
    assert directory.tombstones == 1
    directory.forget_tombstones(1000)
    assert directory.tombstones == 0
    directory.check()


def test_forgetting_that_an_overwritten_key_was_evicted_raises_the_floor(monkeypatch):
    """Some node may still hold the older version: nothing else says any more that it is gone."""
    monkeypatch.setattr(Directory, "EVICTED_MEMORY_MAX", 2)
    directory = directory_of(8)
    directory.remember_evicted(key_of(1), Version(1, 5), replaced=True)
    directory.remember_evicted(key_of(2), Version(1, 6), replaced=False)
    directory.remember_evicted(key_of(3), Version(1, 7), replaced=False)
    assert directory.floors[shard_of(key_of(1))] == Version(1, 5)
    assert not directory.ghosts(shard_of(key_of(1)), lambda version: True)
    directory.remember_evicted(key_of(4), Version(1, 8), replaced=False)
    assert directory.floors[shard_of(key_of(2))] == NO_VERSION


def test_sweep_takes_what_expired_and_what_belongs_to_a_dropped_namespace_of_one_shard():
    directory = directory_of(32)
    shard = 3
    keys = keys_of_shard(shard, 4)
    foreign = b"dropped." + keys[3][SCOPE_BYTES:]
    for key, expiry_ms in ((keys[0], 0), (keys[1], 1000), (keys[2], 1001), (foreign, 0)):
        directory.install(
            make_entry(
                key, state=EntryState.COMMITTED, version=Version(1, 1), put_id=b"", checksum=b"c" * 16,
                slot=directory.reserve(10), expiry_ms=expiry_ms,
            )
        )  # fmt: skip
    directory.install(entry_of(directory, 1))
    assert directory.sweep(shard + 1, 5000, {b"dropped."}) == 0
    assert directory.sweep(shard, 1000, {b"dropped."}) == 2
    assert {entry.key for entry in directory.entries(shard)} == {keys[0], keys[2]}
    assert len(directory.tier.slots) == 3
    directory.check()


def test_memory_of_evictions_is_bounded(monkeypatch):
    monkeypatch.setattr(Directory, "EVICTED_MEMORY_MAX", 4)
    directory = directory_of(8)
    for number in range(30):
        directory.install(entry_of(directory, number))
    assert list(directory.evicted) == [key_of(n) for n in range(18, 22)]


def test_check_sees_a_wrong_sum():
    directory = directory_of(8)
    directory.install(entry_of(directory, 1))
    directory.entry_bytes += 1
    with pytest.raises(InvariantViolation):
        directory.check()


def filled_with(sizes: list[int], slabs: int = 8, slab_pages: int = 4) -> tuple[Directory, dict[int, list[Entry]]]:
    """An arena full of blocks of these sizes, in pages, one slab of each in turn."""
    directory = directory_of(slabs * slab_pages)
    entries: dict[int, list[Entry]] = {size: [] for size in sizes}
    number = 0
    for slab in range(slabs):
        size = sizes[slab % len(sizes)]
        for _ in range(slab_pages // size):
            number += 1
            directory.install(entry_of(directory, number, size * 4096))
            entries[size].append(directory.get(key_of(number)))
    assert not directory.evictions
    return directory, entries


def test_new_size_clears_one_slab_the_coldest_and_no_other():
    directory, entries = filled_with([1, 2])
    directory.residency.touch([entry.key for entry in entries[1][:4]])  # the first slab was read again
    assert directory.reserve(3 * 4096) is not None
    assert list(directory.evicted) == [entry.key for entry in entries[2][:2]]
    directory.check()


@pytest.mark.parametrize("size", [3, 4])
def test_refused_block_of_a_new_size_evicts_nothing(size):
    """One pinned block in each slab: no slab can come free."""
    directory, entries = filled_with([1, 2])
    pinned = [directory.ref(entry.slot) for entry in entries[1][::4] + entries[2][1::2]]
    before = directory.count()
    assert directory.reserve(size * 4096) is None
    assert (directory.count(), directory.evictions) == (before, 0)
    directory.unref(pinned[2])
    assert directory.reserve(size * 4096) is not None, "a reader has left the third slab of pages"
    assert list(directory.evicted) == [entry.key for entry in entries[1][8:12]]
    directory.check()


def test_slab_with_a_block_that_is_being_filled_is_not_cleared():
    directory = directory_of(2)  # two slabs of a page, so nothing but whole slabs
    filling = directory.reserve(10)
    directory.install(entry_of(directory, 1))
    assert directory.reserve(10) is not None
    assert directory.reserve(10) is None, "both are being filled"
    assert filling.refs == 1


def test_refusal_is_remembered_until_anything_changes(monkeypatch):
    directory, entries = filled_with([1])
    pinned = [directory.ref(entry.slot) for entry in entries[1]]
    asked = []
    order = directory.residency.order
    monkeypatch.setattr(directory.residency, "order", lambda limit: asked.append(limit) or order(limit))
    for _ in range(128):
        assert directory.reserve(2 * 4096) is None
    assert len(asked) == 2, "one look for a victim and one for a slab, for the whole batch"
    for slot in pinned[:4]:
        directory.unref(slot)
    assert directory.reserve(2 * 4096) is not None
    pending = directory.reserve(2 * 4096)
    assert directory.reserve(2 * 4096) is None
    directory.install(
        make_entry(
            key_of(99), state=EntryState.COMMITTED, version=Version(1, 1), put_id=b"", checksum=b"", slot=pending
        )
    )
    assert directory.reserve(2 * 4096) is not None, "what was being filled may now leave"
    directory.check()


def test_search_for_a_slab_is_bounded(monkeypatch):
    directory, entries = filled_with([1])
    for entry in entries[1][3::4][:-1]:
        directory.ref(entry.slot)  # the last slot of each slab but the last one
    monkeypatch.setattr(Directory, "NEIGHBOURS_PER_RESERVE_MAX", 12)
    assert directory.reserve(2 * 4096) is None
    assert not directory.evictions
    directory.unref(entries[1][3].slot)
    assert directory.reserve(2 * 4096) is not None
    directory.check()


def test_slabs_that_are_cleared_between_two_ticks_are_bounded(monkeypatch):
    monkeypatch.setattr(Directory, "CLEARED_PER_TICK_MAX", 5)
    directory, _ = filled_with([1])
    sizes = [4 * 4096] * 3
    assert [directory.reserve(size) is not None for size in sizes] == [True, True, False]
    assert directory.evictions == 8
    assert directory.reserve(4096) is not None, "one of its own size is always to be had"
    directory.now_ns += 1
    assert [directory.reserve(size) is not None for size in sizes] == [True, True, False]
    directory.check()
