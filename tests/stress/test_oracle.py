"""The oracles can fail: each is shown what it must notice, by broken parts inside the very storms that use it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from emberkv.errors import InvariantViolation
from emberkv.messages import BlockInfo
from emberkv.node.connections import Pins
from emberkv.ports import Slot
from emberkv.storage.arena import Slot as ArenaSlot
from emberkv.types import NO_VERSION, Version, checksum
from stress.crew import Crew
from stress.herd import Herd
from stress.memory_storm import ArenaStorm, StagingStorm, guarded_dram, staging_pair
from stress.oracle import (
    POISON,
    GuardedTier,
    LateWrite,
    Ledger,
    OverlapFound,
    PageGuard,
    TwoValues,
    lay_canary,
    look_again,
)
from stress.pattern import WrongBytes, key_of, make, same, whole
from stress.runtime_storm import RuntimeStorm

LONG_S = 30.0
"""A broken part must show itself before; it takes a fraction of a second."""
LENGTHS = (16, 17, 4095, 4096, 5000, 65_536, 1 << 20)


# -- the pattern -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_a_whole_block_names_its_put(length: int) -> None:
    assert whole(key_of(1), make(key_of(1), 77, length)) == 77
    same(key_of(1), 77, make(key_of(1), 77, length).data)


@pytest.mark.parametrize("length", LENGTHS)
def test_any_single_wrong_byte_is_noticed(length: int) -> None:
    chance = random.Random(length)
    for at in {0, length - 1, *(chance.randrange(length) for _ in range(40))}:
        block = make(key_of(1), 77, length)
        block[at] ^= 1 << chance.randrange(8)
        with pytest.raises(WrongBytes):
            whole(key_of(1), block)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_torn_block_is_noticed_wherever_it_is_torn(length: int) -> None:
    old, new = make(key_of(1), 77, length), make(key_of(1), 78, length)
    for cut in {9, length // 2, length - 1}:
        for first, second in ((old, new), (new, old)):
            with pytest.raises(WrongBytes):
                whole(key_of(1), np.concatenate([first[:cut], second[cut:]]))


def test_another_key_place_length_or_nothing_at_all_is_noticed() -> None:
    block = make(key_of(1), 77, 65_536)
    strange = {
        "of another key": make(key_of(2), 77, 65_536),
        "a page further": np.roll(block, 4096),
        "too short": block[:65_528],
        "one page of itself twice": np.concatenate([block[:8192], block[4096:61_440]]),
        "zeros": np.zeros(65_536, np.uint8),
        "poison": np.full(65_536, POISON, np.uint8),
    }
    for name, found in strange.items():
        with pytest.raises(WrongBytes):
            pytest.fail(f"{name} was taken for put {whole(key_of(1), found):#x}")


def test_a_later_put_over_a_pinned_one_is_noticed_though_it_is_whole() -> None:
    with pytest.raises(WrongBytes, match="a later put of the same key"):
        same(key_of(1), 77, make(key_of(1), 78, 4096))


# -- guards ------------------------------------------------------------------------------------------------------------


def test_the_page_guard_notices_shared_pages_and_false_returns() -> None:
    guard = PageGuard(1 << 20)
    ticket = guard.taken(8192, 5000)
    for offset, length in ((8192, 16), (12_288, 4096), (0, 8193)):
        with pytest.raises(OverlapFound, match="handed out"):
            guard.taken(offset, length)
    with pytest.raises(OverlapFound, match="pages of the area"):
        guard.taken((1 << 20) - 4096, 4097)
    guard.taken(16_384, 1)
    guard.given_back(ticket)
    with pytest.raises(OverlapFound, match="owns nothing"):
        guard.given_back(ticket)
    guard.taken(8192, 5000)


def test_the_ledger_notices_two_values_of_one_version() -> None:
    ledger, other = Ledger(), Ledger()
    for _ in range(2):
        ledger.note(1, Version(1, 5), 77)
    ledger.note(2, Version(1, 5), 78)
    ledger.note(1, NO_VERSION, 1)
    ledger.note(1, NO_VERSION, 2)
    with pytest.raises(TwoValues):
        ledger.note(1, Version(1, 5), 79)
    other.note(1, Version(1, 5), 80)
    with pytest.raises(TwoValues):
        ledger.merge(other.rows())


def test_a_late_write_is_noticed() -> None:
    buffer = np.zeros((4, 4096), np.uint8)
    late = threading.Timer(0.02, buffer[3, 4000:].fill, (0,))
    lay_canary(buffer)
    look_again(buffer)
    late.start()
    late.join()
    with pytest.raises(LateWrite, match="96 bytes"):
        look_again(buffer)


def test_a_child_that_dies_or_finds_something_fails_its_herd(herd: Herd) -> None:
    herd.start("no such role", "unix:/nowhere")
    with pytest.raises(AssertionError, match="no such role"):
        herd.finish()


# -- broken parts in the storms ----------------------------------------------------------------------------------------


class TwiceTier:
    """A tier that now and then hands out a slot a second time. The twin is never released, so that no other check
    comes first."""

    def __init__(self, tier: Any) -> None:
        self._tier = tier
        self._calls = 0
        self._last: dict[int, Slot] = {}
        self._twins: list[Slot] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def reserve(self, length: int) -> Slot | None:
        self._calls += 1
        last = self._last.get(length)
        if self._calls % 25 == 0 and last is not None:
            self._twins.append(ArenaSlot(last.offset, length, 0))
            return self._twins[-1]
        slot: Slot | None = self._tier.reserve(length)
        if slot is not None:
            self._last[length] = slot
        return slot

    def release(self, slot: Slot) -> None:
        if not any(slot is twin for twin in self._twins):
            self._tier.release(slot)


def run(storm: Any) -> None:
    crew = Crew(LONG_S)
    bodies: list[Callable[[], None]] = [lambda number=number: storm.body(crew, number) for number in range(1, 5)]  # type: ignore[misc]
    crew.run(bodies)


def test_a_slot_that_is_handed_out_twice_is_noticed_by_the_guard() -> None:
    dram, _, data = guarded_dram(16 << 20)
    with pytest.raises(OverlapFound):
        run(ArenaStorm(GuardedTier(TwiceTier(dram)), data, seed=1))


def test_a_slot_that_is_handed_out_twice_is_noticed_by_its_bytes() -> None:
    dram, _, data = guarded_dram(16 << 20)
    with pytest.raises(WrongBytes):
        run(ArenaStorm(TwiceTier(dram), data, seed=1))


class EarlyPins(Pins):
    """Gives the references back as soon as the client has its answer."""

    def add(self, infos: list[BlockInfo], slots: Sequence[Slot | None]) -> tuple[int, list[BlockInfo]]:
        pin, infos = super().add(infos, slots)
        super().drop([pin])
        return pin, infos


def test_a_pin_that_ends_early_is_noticed() -> None:
    with pytest.raises(WrongBytes):
        run(RuntimeStorm(seed=1, pins_of=EarlyPins))


class ForgetfulPins(Pins):
    """Does not give back what a connection held at its end."""

    def drop_all(self) -> None:
        pass


def test_a_pin_that_never_ends_is_noticed() -> None:
    storm, crew = RuntimeStorm(seed=1, pins_of=ForgetfulPins), Crew(0.5)
    crew.run([lambda: storm.body(crew, 1), lambda: storm.body(crew, 2)])
    with pytest.raises(AssertionError, match="stay pinned"):
        storm.wait_empty()


def test_a_reference_that_is_never_given_back_is_noticed() -> None:
    storm, crew = RuntimeStorm(seed=1), Crew(0.3)
    crew.run([lambda: storm.body(crew, 1)])
    entry = next(entry for shard in storm.core.state.directory.shards for entry in shard.values() if entry.slot)
    storm.core.state.directory.ref(entry.slot)
    with pytest.raises(AssertionError, match="1 slots stay in use"):
        storm.wait_empty()


def test_a_torn_write_is_noticed() -> None:
    storm = RuntimeStorm(seed=1)

    def torn(tier: Any, area: Any, items: Any, slots: Any) -> list[bytes | None]:
        digests: list[bytes | None] = []
        for item, slot in zip(items, slots, strict=True):
            if slot is not None:
                half = item.length // 2
                to, come = tier.view(slot), area.view(item.offset, item.length)
                np.copyto(np.frombuffer(to[:half], np.uint8), np.frombuffer(come[:half], np.uint8))
            digests.append(None if slot is None else checksum(tier.view(slot)))
        return digests

    storm.fill = torn
    with pytest.raises(WrongBytes):
        run(storm)


def test_a_copy_that_follows_its_source_is_noticed() -> None:
    """The answer goes out before the copy: the client writes its next block into the room that is still being read."""
    storm = RuntimeStorm(seed=1)
    fill = storm.fill

    def late(tier: Any, area: Any, items: Any, slots: Any) -> list[bytes | None]:
        digests = fill(tier, area, items, slots)
        sources = [area.view(item.offset, item.length) for item in items]
        filled = [(slot, source) for slot, source in zip(slots, sources, strict=True) if slot is not None]

        def again() -> None:
            time.sleep(0.002)
            for slot, source in filled:
                if slot.size_class:
                    np.copyto(np.frombuffer(tier.view(slot), np.uint8), np.frombuffer(source, np.uint8))

        threading.Thread(target=again, daemon=True).start()
        return digests

    storm.fill = late
    with pytest.raises((WrongBytes, AssertionError), match=r"wrong|checksum"):
        run(storm)


def test_staging_room_that_is_handed_out_twice_is_noticed() -> None:
    _, tier, _ = guarded_dram(16 << 20)
    area, staging = staging_pair(2 << 20)

    class Twice:
        """Room for the same bytes as the last time, every now and then."""

        def __init__(self) -> None:
            self.data = staging.data
            self.last = self.calls = 0

        def reserve(self, length: int) -> int | None:
            self.calls += 1
            if self.calls % 30 == 0:
                return self.last
            offset = staging.reserve(length)
            self.last = self.last if offset is None else offset
            return offset

        def release(self, offset: int) -> None:
            try:
                staging.release(offset)
            except InvariantViolation:
                pass  # of the second owner; here the guard has to notice, not the second release

    with pytest.raises(OverlapFound):
        run(StagingStorm(area, Twice(), tier, seed=1))
