"""A tier in memory: the real slab allocator with bytes beside it, so that a use after release is seen at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from emberkv.storage.arena import SlabArena, Slot, class_of


class MemoryTier:
    """Bytes by offset; a released slot has none."""

    def __init__(self, total_bytes: int) -> None:
        self.arena = SlabArena(total_bytes, slab_bytes=max(4096, total_bytes // 8))
        self.bytes: dict[int, bytearray] = {}
        self.slots: dict[int, Slot] = {}

    def reserve(self, length: int) -> Slot | None:
        slot = self.arena.reserve(length)
        if slot is not None:
            assert slot.offset not in self.bytes, "the arena gave one place to two owners"
            self.bytes[slot.offset] = bytearray(b"\xee" * length)
            self.slots[slot.offset] = slot
        return slot

    def view(self, slot: Slot) -> memoryview:
        assert slot.size_class, "bytes of a released slot are touched"
        assert self.slots.get(slot.offset) is slot, "a slot is used after its place was given to another"
        return memoryview(self.bytes[slot.offset])

    def read(self, slot: Slot) -> bytes:
        return bytes(self.view(slot))

    def write(self, slot: Slot, data: bytes) -> None:
        self.view(slot)[:] = data

    def release(self, slot: Slot) -> None:
        assert self.slots.pop(slot.offset) is slot
        del self.bytes[slot.offset]
        self.arena.release(slot)

    def usage(self) -> tuple[int, int]:
        return self.arena.usage()

    def size_class(self, length: int) -> int:
        return class_of(length)

    def slabs(self, length: int, cold: Iterable[Slot]) -> Iterator[Iterator[Slot]]:
        return self.arena.slabs(length, cold)
