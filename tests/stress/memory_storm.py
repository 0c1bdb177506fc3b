"""Arena, DRAM tier and staging under threads, as a node uses them: allocation under one lock, bytes without it.

Laws: a slot is written by the thread that reserved it, before anyone else knows it; then it is only read; it goes back
once. The tests run it on the real parts, the oracle's own tests on broken ones.
"""

from __future__ import annotations

import random
import threading
from typing import Any, Final

import numpy as np

from emberkv.client.connection import Arena
from emberkv.storage.dram import DramTier
from emberkv.storage.staging import StagingArea, StagingMap, copy_and_checksum
from emberkv.types import checksum
from stress.crew import Crew
from stress.oracle import GuardedTier, PageGuard
from stress.pattern import Bytes, key_of, make, same

LENGTHS: Final = (16, 4095, 4096, 4097, 12_288, 50_000, 65_536, 200_000, 700_000)
"""From a page to a sixth of a slab; nine sizes for four slabs, so that slabs are bound anew all the time."""
OWNED_MAX: Final = 12


class ArenaStorm:
    """Threads that reserve, write, look and release."""

    def __init__(self, tier: Any, data: Bytes, seed: int) -> None:
        """`data` is the arena as a client maps it: what is written through the tier is looked at through this."""
        self.tier, self.data, self.seed = tier, data, seed
        self.lock = threading.Lock()
        self.counts = [0, 0]
        """Slots handed out, refusals."""

    def body(self, crew: Crew, number: int) -> None:
        rng = random.Random(self.seed * 100 + number)
        owned: list[tuple[Any, int]] = []
        counter = number << 32
        while not crew.over:
            counter += 1
            if len(owned) < OWNED_MAX:
                slot = self._reserve(rng.choice(LENGTHS))
                if slot is not None:
                    view = self.tier.view(slot)
                    np.copyto(np.frombuffer(view, np.uint8), make(key_of(number), counter, slot.length))
                    owned.append((slot, counter))
            for slot, put in rng.sample(owned, min(3, len(owned))):
                same(key_of(number), put, self.data[slot.offset : slot.offset + slot.length])
            if owned and rng.random() < 0.6:
                self._release(number, *owned.pop(rng.randrange(len(owned))))
        for slot, put in owned:
            self._release(number, slot, put)

    def _reserve(self, length: int) -> Any:
        with self.lock:
            slot = self.tier.reserve(length)
            self.counts[slot is None] += 1
            return slot

    def _release(self, number: int, slot: Any, put: int) -> None:
        same(key_of(number), put, self.data[slot.offset : slot.offset + slot.length])
        with self.lock:
            self.tier.release(slot)

    def check(self, crew: Crew, arena: Any) -> None:
        """The sums, again and again, between the steps of the others."""
        while not crew.over:
            with self.lock:
                arena.check()


def guarded_dram(total_bytes: int) -> tuple[DramTier, GuardedTier, Bytes]:
    """A real tier, the guard around it, and its bytes as a client maps them."""
    dram = DramTier(total_bytes)
    return dram, GuardedTier(dram), Arena(dram.fd, dram.total_bytes, b"").data


class StagingStorm:
    """Client threads share one staging area and one node copies out of it into its tier."""

    def __init__(self, area: StagingArea, staging: Any, tier: Any, seed: int) -> None:
        self.area, self.staging, self.tier, self.seed = area, staging, tier, seed
        self.rooms = PageGuard(area.total_bytes)
        self.lock = threading.Lock()
        self.saves = self.full = 0

    def body(self, crew: Crew, number: int) -> None:
        rng = random.Random(self.seed * 100 + number)
        counter = number << 32
        while not crew.over:
            # Several rooms at a time, as a pipeline has them; each is filled again with something else once it is free.
            rooms: list[tuple[int, int, int, int]] = []
            for _ in range(rng.randint(1, 4)):
                counter += 1
                length = rng.choice(LENGTHS)
                offset = self.staging.reserve(length)
                if offset is None:
                    self.full += 1
                    continue
                ticket = self.rooms.taken(offset, length)
                np.copyto(self.staging.data[offset : offset + length], make(key_of(number), counter, length))
                rooms.append((offset, length, counter, ticket))
            rng.shuffle(rooms)
            for offset, length, put, ticket in rooms:
                self._copy(number, offset, length, put)
                self.rooms.given_back(ticket)
                self.staging.release(offset)

    def _copy(self, number: int, offset: int, length: int, put: int) -> None:
        """The node's part: a slot, the copy with its checksum, a look, and the slot back."""
        with self.lock:
            slot = self.tier.reserve(length)
        if slot is None:
            return
        digest = copy_and_checksum(self.tier.view(slot), self.area.view(offset, length))
        same(key_of(number), put, self.tier.view(slot))
        assert digest == checksum(self.tier.view(slot)), "the checksum is not that of the copy"
        self.saves += 1
        with self.lock:
            self.tier.release(slot)


def staging_pair(total_bytes: int) -> tuple[StagingArea, StagingMap]:
    """The node's side and the client's side of one area."""
    area = StagingArea(total_bytes)
    return area, StagingMap(area.fd, area.total_bytes)
