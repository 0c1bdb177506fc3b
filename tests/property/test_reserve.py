"""Room in a full arena: what a reservation may evict, whatever sizes come and whatever is in use.

Why it exists: one block of a size without a slab once evicted a whole arena, and was then refused.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from emberkv.core.directory import Directory, Entry, make_entry
from emberkv.ports import Slot
from emberkv.storage.arena import class_of
from emberkv.types import EntryState, Version
from harness.tier import MemoryTier
from harness.world import key_of

PAGE = 4096


class ReserveMachine(RuleBasedStateMachine):
    """A directory over the real arena, with readers that pin and puts that are still being filled."""

    @initialize(pages=st.integers(1, 60))
    def start(self, pages: int) -> None:
        self.tier = MemoryTier(pages * PAGE)
        self.directory = Directory(self.tier, self.tier.arena.slot_bytes_max)
        self.filling: list[Slot] = []
        self.pinned: list[Slot] = []
        self.number = 0

    def entries(self) -> list[Entry]:
        return [entry for table in self.directory.shards for entry in table.values()]

    def slab(self, slot: Slot) -> int:
        return slot.offset // self.tier.arena.slab_bytes

    def could_help(self, length: int) -> bool:
        """From the slots alone: a block of this size that nobody uses, or a slab in which nobody uses any."""
        owned = {id(entry.slot) for entry in self.entries()}
        idle = {id(slot) for slot in self.tier.slots.values() if slot.refs == 1 and id(slot) in owned}
        if any(id(slot) in idle and slot.size_class == class_of(length) for slot in self.tier.slots.values()):
            return True
        slab_bytes, total = self.tier.arena.slab_bytes, self.tier.arena.total_bytes
        for start in range(0, total, slab_bytes):
            inside = [slot for slot in self.tier.slots.values() if start <= slot.offset < start + slab_bytes]
            if min(slab_bytes, total - start) >= class_of(length) and all(id(slot) in idle for slot in inside):
                return True
        return False

    @rule(length=st.sampled_from([PAGE, 2 * PAGE, 3 * PAGE]) | st.integers(0, 9 * PAGE), times=st.integers(1, 8))
    def put(self, length: int, times: int) -> None:
        for _ in range(times):
            self.reserve(length)

    def reserve(self, length: int) -> None:
        before = {entry.key: entry for entry in self.entries()}
        held = {id(slot): (slot.size_class, self.slab(slot)) for slot in self.tier.slots.values()}
        could = self.could_help(length)
        slot = self.directory.reserve(length)
        left = {entry.key for entry in self.entries()}
        gone = [held[id(entry.slot)] for key, entry in before.items() if key not in left]
        if slot is None:
            assert not gone, "a refused block evicts nothing"
            assert not could or length > self.tier.arena.slot_bytes_max, "there was a way"
            return
        if gone and gone[0][0] == class_of(length):
            assert len(gone) == 1, "one block of the same size is enough"
        else:
            assert len({slab for _, slab in gone}) <= 1, "one slab is enough"
        assert all(other.refs for other in self.pinned + self.filling)
        self.filling.append(slot)

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), again=st.booleans())
    def fill(self, data: st.DataObject, again: bool) -> None:
        slot = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        keys = sorted(entry.key for entry in self.entries())
        self.number += 1
        key = data.draw(st.sampled_from(keys)) if again and keys else key_of(self.number)
        self.directory.install(
            make_entry(
                key, state=EntryState.COMMITTED, version=Version(1, self.number), put_id=b"", checksum=b"", slot=slot
            )
        )

    @precondition(lambda self: self.filling)
    @rule()
    def fill_all(self) -> None:
        while self.filling:
            self.number += 1
            self.directory.install(
                make_entry(
                    key_of(self.number), state=EntryState.COMMITTED, version=Version(1, self.number), put_id=b"",
                    checksum=b"", slot=self.filling.pop(),
                )
            )  # fmt: skip

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """A put is aborted, or a reader leaves."""
        slots = data.draw(st.sampled_from([self.filling, self.pinned]))
        if slots:
            self.directory.unref(slots.pop(data.draw(st.integers(0, len(slots) - 1))))

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        keys = sorted(entry.key for entry in self.entries())
        if keys:
            key = data.draw(st.sampled_from(keys))
            self.directory.residency.touch([key])
            entry = self.directory.get(key)
            if data.draw(st.booleans()) and entry is not None and entry.slot is not None:
                self.pinned.append(self.directory.ref(entry.slot))

    @invariant()
    def sums_hold(self) -> None:
        if hasattr(self, "tier"):
            self.directory.check()
            self.tier.arena.check()


TestReserve = ReserveMachine.TestCase
TestReserve.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
