"""Where blocks lie in an arena: a pure slab allocator, without memory, locks or clock.

Why it exists: blocks of one model have a few exact sizes, so a slab that serves one size has no waste inside and no
fragmentation between slots; when it runs empty it may serve another size.

    slab:  FREE --first reserve of a size--> BOUND (size) --last release--> FREE
    slot:  (reserve) --> LIVE --(release)--> gone; releasing it again is an InvariantViolation

Laws: free + used + tails == total after every call (check() proves it). reserve and release are O(1); `slabs`, asked
only when a size has no slab and none is free, is O(slabs).
Limits: one lock outside (the runtime's) protects an arena. A slot lies in one slab: blocks larger than
`slot_bytes_max` never fit. What a slab cannot use at its end (less than a slot) is its tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from emberkv.errors import ConfigError, InvariantViolation
from emberkv.ports import Slot as AnySlot
from emberkv.types import BLOCK_BYTES_MAX, SLOT_ALIGN

SLAB_BYTES: Final = 64 << 20
"""Two of the largest blocks; 1,000 slabs manage 64 GiB."""
SLAB_BYTES_MIN: Final = 4 << 20
"""A small arena has smaller slabs, but not below this: every size that is in use needs one of them."""
SLABS_MIN: Final = 8
"""So many slabs even a small arena wants, to hold that many sizes at once."""
COLD_WORTH: Final = 0.5
"""What a byte that would leave soon anyway counts, when the slab is chosen in which least is lost."""


class Slot(msgspec.Struct, gc=False):
    """Place of one part. `length` is what was asked for, `size_class` the bytes it takes (4 KiB multiple).

    `refs` and `key` belong to the core, which releases the slot when `refs` reaches 0. `size_class` 0: released.
    """

    offset: int
    length: int
    size_class: int
    refs: int = 1
    key: bytes = b""


class _Slab(msgspec.Struct, gc=False):
    """One slab. `fresh` slots at its end were never used since it was bound; `returned` is a stack of freed ones."""

    start: int
    nbytes: int
    size_class: int
    capacity: int
    live: int
    fresh: int
    returned: list[int]
    slots: list[Slot | None]
    """Live slots by index."""


class SlabArena:
    """Allocator over `total_bytes`, in slabs of at most `slab_bytes`; raises ConfigError when that is no page."""

    def __init__(self, total_bytes: int, slab_bytes: int = SLAB_BYTES) -> None:
        total = total_bytes // SLOT_ALIGN * SLOT_ALIGN
        if total <= 0 or slab_bytes < SLOT_ALIGN:
            raise ConfigError(f"an arena of {total_bytes} bytes is too small; give it at least {SLOT_ALIGN}")
        slab = min(slab_bytes, max(total // SLABS_MIN, min(SLAB_BYTES_MIN, slab_bytes)), total)
        self.slab_bytes: Final = slab // SLOT_ALIGN * SLOT_ALIGN
        self.total_bytes: Final = total
        self.slot_bytes_max: Final = min(self.slab_bytes, BLOCK_BYTES_MAX)
        self._slabs: Final = [
            _Slab(start, min(self.slab_bytes, total - start), 0, 0, 0, 0, [], [])
            for start in range(0, total, self.slab_bytes)
        ]
        # A stack with the lowest slab on top: the prefault runs upwards from 0, so low memory is ready first. A last
        # slab that is cut short is kept apart, because not every size fits into it.
        self._free: Final = [slab for slab in reversed(self._slabs) if slab.nbytes == self.slab_bytes]
        self._short: _Slab | None = self._slabs[-1] if self._slabs[-1].nbytes < self.slab_bytes else None
        self._partial: Final[dict[int, dict[int, _Slab]]] = {}
        self._live_by_class: Final[dict[int, int]] = {}
        self._used_bytes = 0

    def reserve(self, length: int) -> Slot | None:
        """A slot for `length` bytes (0 takes one page too), or None when there is no room for that size."""
        size_class = -(-length // SLOT_ALIGN) * SLOT_ALIGN or SLOT_ALIGN  # class_of(), without the call
        partial = self._partial.get(size_class)
        if partial:
            # The slab that was touched first keeps being filled; later ones then have a chance to run empty.
            slab = next(iter(partial.values()))
        else:
            bound = self._bind(size_class)
            if bound is None:
                return None
            slab = bound
        if slab.returned:
            index = slab.returned.pop()
        else:
            index = slab.capacity - slab.fresh
            slab.fresh -= 1
        slab.live += 1
        if slab.live == slab.capacity:
            del self._partial[size_class][slab.start]
        self._live_by_class[size_class] += 1
        self._used_bytes += size_class
        slab.slots[index] = slot = Slot(slab.start + index * size_class, length, size_class)
        return slot

    def release(self, slot: Slot) -> None:
        """Gives the slot back. Raises InvariantViolation when it is not live (released before, or not from here)."""
        size_class = slot.size_class
        position = slot.offset // self.slab_bytes
        slab = self._slabs[position] if 0 <= position < len(self._slabs) else None
        if slab is None or not size_class or slab.size_class != size_class:
            raise InvariantViolation(f"slot at {slot.offset} is released twice or is not from this arena")
        index, rest = divmod(slot.offset - slab.start, size_class)
        if rest or index >= slab.capacity or slab.slots[index] is not slot:
            raise InvariantViolation(f"slot at {slot.offset} is released twice or is not from this arena")
        slot.size_class = 0
        slab.slots[index] = None
        slab.live -= 1
        self._live_by_class[size_class] -= 1
        self._used_bytes -= size_class
        if not slab.live:
            self._unbind(slab)
            return
        slab.returned.append(index)
        if slab.live == slab.capacity - 1:
            self._partial[size_class][slab.start] = slab

    def usage(self) -> tuple[int, int]:
        """(bytes in live slots, rounded to pages; bytes of the arena)."""
        return self._used_bytes, self.total_bytes

    def class_slots(self, length: int) -> int:
        """How many live slots have the size class of `length`. 0: evicting single blocks of this size is no way."""
        return self._live_by_class.get(class_of(length), 0)

    def slabs(self, length: int, cold: Iterable[AnySlot]) -> Iterator[Iterator[Slot]]:
        """Live slots of each slab that would have room for `length` bytes if all of them were released; first that in
        which least is lost. `cold`, the coldest first: slots whose bytes would leave soon anyway, and count less.

        Slabs of this very size are left out: there one slot is enough. Nothing may be reserved or released meanwhile.
        """
        size_class = class_of(length)
        # Its order, the slab with the coldest slot first, decides between slabs in which as much is lost.
        lost: dict[int, float] = {}
        for slot in cold:
            position = slot.offset // self.slab_bytes
            lost[position] = lost.get(position, 0.0) - slot.size_class * (1 - COLD_WORTH)
        for position, slab in enumerate(self._slabs):
            lost[position] = lost.get(position, 0.0) + slab.live * slab.size_class
        for position in sorted(lost, key=lost.__getitem__):
            slab = self._slabs[position]
            if slab.live and slab.nbytes >= size_class != slab.size_class:
                yield filter(None, slab.slots)

    def check(self) -> None:
        """Proves the sums from the slabs themselves, O(slots); raises InvariantViolation."""
        used = free = tails = 0
        live_by_class: dict[int, int] = {}
        idle = {slab.start for slab in self._free} | ({self._short.start} if self._short else set())
        for slab in self._slabs:
            if not slab.size_class:
                _must(slab.start in idle and slab.live == 0, f"slab {slab.start} is free but not in the pool")
                free += slab.nbytes
                continue
            _must(slab.start not in idle, f"slab {slab.start} is bound and in the pool")
            _must(
                0 < slab.live == len(slab.slots) - slab.slots.count(None),
                f"slab {slab.start} counts {slab.live} live slots",
            )
            _must(slab.live + len(slab.returned) + slab.fresh == slab.capacity, f"slots of slab {slab.start} are lost")
            _must(not any(slab.slots[i] for i in slab.returned), f"slab {slab.start} offers a live slot")
            in_partial = slab.start in self._partial[slab.size_class]
            _must(in_partial == (slab.live < slab.capacity), f"slab {slab.start} is in the wrong list")
            used += slab.live * slab.size_class
            free += (slab.capacity - slab.live) * slab.size_class
            tails += slab.nbytes - slab.capacity * slab.size_class
            live_by_class[slab.size_class] = live_by_class.get(slab.size_class, 0) + slab.live
        _must(used + free + tails == self.total_bytes, f"{used} used + {free} free + {tails} tails != total")
        _must(used == self._used_bytes, f"usage says {self._used_bytes}, slabs hold {used}")
        _must(live_by_class == {k: v for k, v in self._live_by_class.items() if v}, "slots per class do not add up")

    def _bind(self, size_class: int) -> _Slab | None:
        """Takes a free slab for a size; None when there is none that holds one slot."""
        if size_class > self.slot_bytes_max:
            return None
        short = self._short
        if self._free:
            slab = self._free.pop()
        elif short is not None and short.nbytes >= size_class:
            slab, self._short = short, None
        else:
            return None
        slab.size_class = size_class
        slab.capacity = slab.fresh = slab.nbytes // size_class
        slab.slots = [None] * slab.capacity
        self._partial.setdefault(size_class, {})[slab.start] = slab
        self._live_by_class.setdefault(size_class, 0)
        return slab

    def _unbind(self, slab: _Slab) -> None:
        """Gives an empty slab back to the pool, and forgets a size that nothing uses (so the maps stay bounded)."""
        size_class = slab.size_class
        partial = self._partial[size_class]
        partial.pop(slab.start, None)
        if not self._live_by_class[size_class]:
            del self._live_by_class[size_class]
            del self._partial[size_class]
        slab.size_class = slab.capacity = slab.fresh = 0
        slab.returned = []
        slab.slots = []
        if slab.nbytes < self.slab_bytes:
            self._short = slab
        else:
            self._free.append(slab)


def class_of(length: int) -> int:
    """Bytes that a slot for `length` bytes takes: the next multiple of a page, one page at least."""
    return -(-length // SLOT_ALIGN) * SLOT_ALIGN or SLOT_ALIGN


def _must(condition: bool, text: str) -> None:
    if not condition:
        raise InvariantViolation(f"arena: {text}")
