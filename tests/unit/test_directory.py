"""Entries, references and room."""

import pytest

from emberkv.core.directory import Directory, Entry, make_entry, restamped
from emberkv.errors import InvariantViolation
from emberkv.types import EntryState, MissReason, Version
from harness.tier import MemoryTier
from harness.world import key_of


def entry_of(directory: Directory, number: int, length: int = 10, seq: int = 1, slot=None) -> Entry:
    slot = slot or directory.reserve(length)
    return make_entry(
        key_of(number), state=EntryState.COMMITTED, version=Version(1, seq), put_id=b"", checksum=b"c" * 16, slot=slot
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
    assert directory.evicted == {key_of(0): Version(1, 1)}
    assert directory.evictions == 1
    directory.install(entry_of(directory, 0, seq=3))
    assert key_of(0) not in directory.evicted
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
