"""SlabArena under any order of calls: sums hold, live slots never overlap, and what is free can be had."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from emberkv.storage.arena import SlabArena, Slot, class_of
from emberkv.storage.mapping import SIZE_SEALS, memory_file
from emberkv.storage.staging import StagingMap

PAGE = 4096


class ArenaMachine(RuleBasedStateMachine):
    """Against the plainest model: a list of live slots."""

    slots = Bundle("slots")

    @initialize(pages=st.integers(1, 90), slab_pages=st.integers(1, 40))
    def start(self, pages: int, slab_pages: int) -> None:
        self.arena = SlabArena(pages * PAGE, slab_pages * PAGE)
        self.live: list[Slot] = []

    @rule(target=slots, length=st.integers(0, 9 * PAGE) | st.sampled_from([PAGE, 2 * PAGE, 3 * PAGE]))
    def reserve(self, length: int) -> Slot | None:
        slot = self.arena.reserve(length)
        if slot is None:
            self.refusal_is_true(length)
            return None
        assert slot.length == length
        assert slot.size_class == class_of(length)
        assert slot.offset % PAGE == 0
        assert slot.offset >= 0
        assert slot.offset + slot.size_class <= self.arena.total_bytes
        assert slot.offset // self.arena.slab_bytes == (slot.offset + slot.size_class - 1) // self.arena.slab_bytes
        for other in self.live:
            assert other.offset + other.size_class <= slot.offset or slot.offset + slot.size_class <= other.offset
        self.live.append(slot)
        return slot

    def refusal_is_true(self, length: int) -> None:
        """None only when every slab is in use for another size, full, or too short."""
        size, slab_bytes = class_of(length), self.arena.slab_bytes
        for start in range(0, self.arena.total_bytes, slab_bytes):
            nbytes = min(slab_bytes, self.arena.total_bytes - start)
            inside = [slot for slot in self.live if start <= slot.offset < start + nbytes]
            if not inside:
                assert nbytes < size, "an empty slab was there"
            elif inside[0].size_class == size:
                assert len(inside) == nbytes // size, "a slot of this size was free"

    @rule(slot=slots)
    def release(self, slot: Slot | None) -> None:
        if slot is None or slot not in self.live or not slot.size_class:
            return
        length, offset = slot.length, slot.offset
        self.live = [other for other in self.live if other is not slot]
        self.arena.release(slot)
        # One victim of the same class makes room at once.
        again = self.arena.reserve(length)
        assert again is not None
        assert again.size_class == class_of(length)
        self.arena.release(again)
        assert offset < self.arena.total_bytes

    @rule(length=st.integers(0, 9 * PAGE), data=st.data())
    def drain_a_slab(self, length: int, data: st.DataObject) -> None:
        cold = data.draw(st.lists(st.sampled_from(self.live), unique_by=id)) if self.live else []
        groups = [list(slots) for slots in self.arena.slabs(length, cold)]
        offered = [slot for group in groups for slot in group]
        assert len({slot.offset for slot in offered}) == len(offered)
        for slot in self.live:
            start = slot.offset // self.arena.slab_bytes * self.arena.slab_bytes
            fits = min(self.arena.slab_bytes, self.arena.total_bytes - start) >= class_of(length)
            assert any(slot is other for other in offered) == (fits and slot.size_class != class_of(length))
        if groups:
            self.live = [slot for slot in self.live if not any(slot is other for other in groups[0])]
            for slot in groups[0]:
                self.arena.release(slot)
            room = self.arena.reserve(length)
            assert room is not None, "a drained slab takes any size that fits it"
            self.arena.release(room)

    @invariant()
    def sums_hold(self) -> None:
        if not hasattr(self, "arena"):
            return
        self.arena.check()
        assert self.arena.usage() == (sum(slot.size_class for slot in self.live), self.arena.total_bytes)
        for length in (PAGE, 2 * PAGE):
            assert self.arena.class_slots(length) == sum(slot.size_class == length for slot in self.live)


class StagingMachine(RuleBasedStateMachine):
    """The client's allocator: rooms never overlap, and all room comes back."""

    rooms = Bundle("rooms")

    @initialize(pages=st.integers(1, 40), odd=st.integers(0, PAGE - 1))
    def start(self, pages: int, odd: int) -> None:
        import fcntl
        import os

        fd = memory_file("test-staging", pages * PAGE + odd)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
        self.map = StagingMap(fd, pages * PAGE + odd)
        os.close(fd)
        self.pages = pages
        self.live: dict[int, int] = {}

    @rule(target=rooms, length=st.integers(0, 6 * PAGE))
    def reserve(self, length: int) -> int | None:
        offset = self.map.reserve(length)
        if offset is None:
            taken = {page for start, size in self.live.items() for page in range(start // PAGE, (start + size) // PAGE)}
            runs = "".join("x" if page in taken else "." for page in range(self.pages)).split("x")
            assert max(map(len, runs)) * PAGE < class_of(length), "there was room"
            return None
        assert offset % PAGE == 0
        assert offset + class_of(length) <= self.pages * PAGE
        for start, size in self.live.items():
            assert start + size <= offset or offset + class_of(length) <= start
        self.live[offset] = class_of(length)
        assert len(self.map.view(offset, length)) == length
        return offset

    @rule(room=rooms)
    def release(self, room: int | None) -> None:
        if room is not None and self.live.pop(room, 0):
            self.map.release(room)

    @invariant()
    def sums_hold(self) -> None:
        if hasattr(self, "map"):
            self.map.check()
            assert self.map.usage()[0] == sum(self.live.values())

    def teardown(self) -> None:
        if not hasattr(self, "map"):
            return
        for room in self.live:
            self.map.release(room)
        whole = self.map.reserve(self.pages * PAGE)
        assert whole == 0, "after all releases the area is one span again"
        self.map.close()


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestStaging = StagingMachine.TestCase
TestStaging.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
