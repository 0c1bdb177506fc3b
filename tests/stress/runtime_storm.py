"""Runtime, core, pins and staging of one node under threads, without sockets: what serve_local does per connection.

Laws: a real core that is primary of everything, a real arena with poison on release, pins of each thread on their own
and one total for all. The clock stands still, so no lease or deadline ends anything: threads are all that is tried.
Limits: one node; what peers do to slots is the business of the storms on real nodes.
"""

from __future__ import annotations

import queue
import random
import time
from typing import Any, Final

import numpy as np

from emberkv.core.replica import Replica
from emberkv.messages import BlockInfo, PutItem, PutReply
from emberkv.node.connections import PinnedTotal, Pins, fill_from_staging
from emberkv.node.runtime import Runtime
from emberkv.types import MissReason, PutStatus
from harness.bare import Bare
from harness.node import SCOPE
from stress.crew import Crew
from stress.memory_storm import guarded_dram, staging_pair
from stress.pattern import key_of, make, same, whole

KEYS: Final = 1200
HOT: Final = 40
LENGTHS: Final = (4096, 5000, 30_000, 65_536, 200_000)
ARENA_BYTES: Final = 40 << 20
"""Eight slabs for five sizes: with fewer, a size without a slab evicts nearly all for one block."""
STAGING_BYTES: Final = 2 << 20
PIN_BYTES: Final = 1 << 20
PINNED_BYTES: Final = 4 * PIN_BYTES
"""Less than a node allows, so that both bounds are met all the time."""
SECOND_NS: Final = 1_000_000_000
CHECK_EVERY_S: Final = 0.02


def _numbers(rng: random.Random, most: int) -> list[int]:
    """Up to `most` different blocks, half of them hot."""
    count = rng.randint(1, most)
    return [*rng.sample(range(HOT), count // 2), *rng.sample(range(HOT, KEYS), count - count // 2)]


class StillClock:
    """Always the same moment."""

    def __init__(self, now_ns: int) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        return self._now_ns


class Nobody:
    """Peers and a coordinator that are not there."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: False


class RuntimeStorm:
    """One node's monitor and memory; `body` is one connection's thread with its client."""

    def __init__(self, seed: int, pins_of: type[Pins] = Pins) -> None:
        self.seed, self.pins_of = seed, pins_of
        self.dram, self.tier, self.data = guarded_dram(ARENA_BYTES)
        bare = Bare()
        # The same settings over the real arena; the records then make it primary of every shard, alone.
        bare.core = Replica(bare.core.state.settings, self.tier)
        bare.join().own(in_sync=("a",), replicas=("a",))
        nobody = Nobody()
        self.core = bare.core
        self.runtime = Runtime(self.core, self.tier, StillClock(bare.now), nobody, nobody, nobody, lambda *_: None)
        self.total = PinnedTotal(PINNED_BYTES)
        self.fill: Any = fill_from_staging
        self.puts = self.pinned = self.refused = self.quota = 0

    def body(self, crew: Crew, number: int) -> None:
        rng = random.Random(self.seed * 100 + number)
        area, staging = staging_pair(STAGING_BYTES)
        pins = self.pins_of(self.runtime, self.total, PIN_BYTES)
        held: list[tuple[int, list[tuple[bytes, int, BlockInfo]]]] = []
        counter = number << 32
        try:
            while not crew.over:
                counter = self._put(rng, area, staging, counter)
                if len(held) < 4:
                    self._pin(rng, pins, held)
                for _, blocks in held:
                    self._look(blocks)
                if held and rng.random() < 0.6:
                    pin, blocks = held.pop(rng.randrange(len(held)))
                    self._look(blocks)
                    pins.drop([pin])
                if rng.random() < 0.05:
                    self._delete([rng.randrange(KEYS)], counter)
            for _, blocks in held:
                self._look(blocks)
        finally:
            pins.drop_all()
            staging.close()
            area.close()

    def _put(self, rng: random.Random, area: Any, staging: Any, counter: int) -> int:
        items: list[PutItem] = []
        for number in _numbers(rng, 4):
            counter += 1
            key, length = key_of(number), rng.choice(LENGTHS)
            offset = staging.reserve(length)
            if offset is None:
                continue
            np.copyto(staging.data[offset : offset + length], make(key, counter, length))
            items.append(PutItem(key, counter.to_bytes(24, "big"), length, offset=offset))
        answer = self._run(items, lambda slots: self.fill(self.tier, area, items, slots))
        self.puts += sum(outcome.status is PutStatus.STORED for outcome in answer.outcomes)
        self.refused += sum(outcome.status is PutStatus.REFUSED for outcome in answer.outcomes)
        for item in items:
            staging.release(item.offset)
        return counter

    def _delete(self, numbers: list[int], counter: int) -> None:
        items = [PutItem(key_of(n), (counter + (1 << 80) + n).to_bytes(24, "big"), 0) for n in numbers]
        self._run(items, None, delete=True)

    def _run(self, items: list[PutItem], fill: Any, *, delete: bool = False) -> PutReply:
        ended: queue.SimpleQueue[PutReply] = queue.SimpleQueue()
        keys = [SCOPE + item.key for item in items]
        deadline_ns = self.runtime.now_ns() + SECOND_NS
        self.runtime.put(
            keys, items, fill, ended.put, deadline_ns=deadline_ns, session=True, fresh=True, min_copies=1, delete=delete
        )
        return ended.get(timeout=20)

    def _pin(self, rng: random.Random, pins: Pins, held: list[Any]) -> None:
        numbers = _numbers(rng, 8)
        infos, slots = self.runtime.read(
            [SCOPE + key_of(number) for number in numbers],
            self.runtime.now_ns() + SECOND_NS,
            session=rng.random() < 0.5,
            local_only=False,
            verify=rng.random() < 0.5,
        )
        assert not any(info.reason == MissReason.CHECKSUM for info in infos), "a block does not fit its checksum"
        pin, infos = pins.add(infos, slots)
        self.quota += sum(info.reason == MissReason.QUOTA for info in infos)
        blocks = []
        for number, info in zip(numbers, infos, strict=True):
            if not info.reason:
                blocks.append((key_of(number), whole(key_of(number), self._bytes(info)), info))
        self.pinned += len(blocks)
        if pin:
            held.append((pin, blocks))

    def _bytes(self, info: BlockInfo) -> memoryview:
        """Where the client would look: through its own map of the arena."""
        return self.data[info.offset : info.offset + info.length].data

    def _look(self, blocks: list[tuple[bytes, int, BlockInfo]]) -> None:
        for key, counter, info in blocks:
            same(key, counter, self._bytes(info))

    def check(self, crew: Crew) -> None:
        """Full sums of arena and directory, between the steps of all."""
        while not crew.over:
            with self.runtime.lock:
                self.dram.arena.check()
                self.core.state.directory.check()
            assert 0 <= self.total.bytes <= PINNED_BYTES, self.total.bytes
            time.sleep(CHECK_EVERY_S)  # thousands of entries under the lock: the others want it too

    def wait_empty(self) -> None:
        """All threads are gone: pins must be, and after the deletes of all blocks every byte of the arena."""
        assert self.total.bytes == 0, f"{self.total.bytes} bytes stay pinned"
        for first in range(0, KEYS, 100):
            self._delete(list(range(first, min(KEYS, first + 100))), first)
        left = [slot for slot, _ in self.tier.slots()]
        assert self.dram.usage()[0] == 0, f"{len(left)} slots stay in use: {left[:5]}"
        self.dram.arena.check()
        self.core.state.directory.check()
