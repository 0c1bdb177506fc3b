"""What must hold beside the bytes themselves: no two owners of one place, one value per version, silence after an end.

Laws: an oracle only looks; it shares no code with what it judges. Each is shown to fail in test_oracle.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from emberkv.ports import Slot
from emberkv.types import NO_VERSION, SLOT_ALIGN, Version
from stress.pattern import Bytes

CANARY: Final = 0xC5
POISON: Final = 0xDD
"""What a released slot is filled with, so that whoever still reads it sees it at once and not at the next reuse."""


class OverlapFound(AssertionError):
    """Two live slots share a page, or a slot was given back that nobody owned."""


class TwoValues(AssertionError):
    """One version names two values."""


class LateWrite(AssertionError):
    """A buffer changed after the call that was allowed to write it had ended."""


class PageGuard:
    """Who owns which page of an area, kept from reserve and release alone. Safe for several threads."""

    def __init__(self, total_bytes: int) -> None:
        self._owner = np.zeros(-(-total_bytes // SLOT_ALIGN), np.int64)
        self._lock = threading.Lock()
        self._next = 0
        self.live: dict[int, tuple[int, int]] = {}

    def taken(self, offset: int, length: int) -> int:
        """Notes that [offset, offset + length) has an owner now; returns its ticket. Raises OverlapFound."""
        first, end = offset // SLOT_ALIGN, -(-(offset + max(length, 1)) // SLOT_ALIGN)
        with self._lock:
            pages = self._owner[first:end]
            if offset % SLOT_ALIGN or len(pages) != end - first:
                raise OverlapFound(f"{offset}+{length} does not lie on pages of the area")
            if pages.any():
                raise OverlapFound(f"{offset}+{length} was handed out while {int(pages.max())} owns a part of it")
            self._next += 1
            pages.fill(self._next)
            self.live[self._next] = (first, end)
            return self._next

    def given_back(self, ticket: int) -> None:
        """The owner has no more use for it. Call it before the place can be handed out again. Raises OverlapFound."""
        with self._lock:
            first, end = self.live.pop(ticket, (0, 0))
            if end == first or not (self._owner[first:end] == ticket).all():
                raise OverlapFound(f"ticket {ticket} is given back and owns nothing, or not all that it was given")
            self._owner[first:end] = 0


class GuardedTier:
    """A tier (ports.Tier) with a page guard around it; what is released is poisoned first."""

    def __init__(self, tier: object) -> None:
        self.tier = tier
        self.guard = PageGuard(tier.usage()[1])  # type: ignore[attr-defined]
        self._tickets: dict[int, tuple[Slot, int]] = {}
        self.reserved = 0

    def reserve(self, length: int) -> Slot | None:
        slot: Slot | None = self.tier.reserve(length)  # type: ignore[attr-defined]
        if slot is not None:
            self._tickets[id(slot)] = slot, self.guard.taken(slot.offset, length)
            self.reserved += 1
        return slot

    def view(self, slot: Slot) -> memoryview:
        return self.tier.view(slot)  # type: ignore[attr-defined, no-any-return]

    def release(self, slot: Slot) -> None:
        np.frombuffer(self.view(slot), np.uint8).fill(POISON)
        _, ticket = self._tickets.pop(id(slot), (slot, 0))
        self.guard.given_back(ticket)
        self.tier.release(slot)  # type: ignore[attr-defined]

    def slots(self) -> list[tuple[Slot, int]]:
        """Live slots and their tickets."""
        return list(self._tickets.values())

    def usage(self) -> tuple[int, int]:
        return self.tier.usage()  # type: ignore[attr-defined, no-any-return]

    def size_class(self, length: int) -> int:
        return self.tier.size_class(length)  # type: ignore[attr-defined, no-any-return]

    def slabs(self, length: int, cold: Iterable[Slot]) -> Iterator[Iterator[Slot]]:
        return self.tier.slabs(length, cold)  # type: ignore[attr-defined, no-any-return]


class Ledger:
    """(key, version) -> counter, for ever. Pending blocks have no version and are not judged."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int, int], int] = {}

    def note(self, number: int, version: Version, counter: int) -> None:
        """Raises TwoValues."""
        if version == NO_VERSION:
            return
        known = self.seen.setdefault((number, *version), counter)
        if known != counter:
            raise TwoValues(f"version {tuple(version)} of key {number} was put {known:#x} and is now {counter:#x}")

    def merge(self, rows: list[list[int]]) -> None:
        """What another process saw: rows of (number, epoch, seq, counter)."""
        for number, epoch, seq, counter in rows:
            self.note(number, Version(epoch, seq), counter)

    def rows(self) -> list[list[int]]:
        """For `merge`."""
        return [[*key, counter] for key, counter in self.seen.items()]


def lay_canary(buffer: Bytes) -> None:
    """From here on nobody may write into `buffer`."""
    buffer.fill(CANARY)


def look_again(buffer: Bytes) -> None:
    """Raises LateWrite when somebody did."""
    changed = np.flatnonzero(buffer.reshape(-1) != CANARY)
    if len(changed):
        raise LateWrite(f"{len(changed)} bytes from {int(changed[0])} on were written after the call had ended")
