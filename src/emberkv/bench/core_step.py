"""What a decision costs: core steps for 128 keys, without wire, disk or lock (the budget is in docs/ARCHITECTURE.md).

Each case runs several times and the least time counts: what is measured is the code, not the neighbours' load.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

from emberkv.core import events as ev
from emberkv.core.effects import Commit, Effect, Fill, Send
from emberkv.core.replica import Replica
from emberkv.core.state import Settings
from emberkv.core.view import encode_record, owner_key
from emberkv.messages import LiveRecord, NodeAddress, PutItem, Replicate, ReplicateReply, ShardOwner
from emberkv.ports import CommitStatus, Record, Slot, Tier
from emberkv.storage.arena import SlabArena, class_of
from emberkv.types import BATCH_KEYS_MAX, SHARDS, checksum

ROUNDS = 7
STEPS_PER_ROUND = 60
BLOCK_BYTES = 4096
GET_GOAL_US = 1.5
PUT_GOAL_US = 5.0
NOW_NS = 1_000_000_000


class _Tier(SlabArena):
    """The real allocator without memory behind it: the core never touches bytes."""

    def view(self, slot: Slot) -> memoryview:
        """Nothing here has bytes."""
        raise NotImplementedError

    def size_class(self, length: int) -> int:
        """As the DRAM tier."""
        return class_of(length)


def _primary(arena_blocks: int) -> Replica:
    """A core that is primary of everything, with an open lease and one backup that is connected and in sync."""
    settings = Settings("a", b"a" * 16, NodeAddress("a", "a:1"), ("a", "b"), generation=1, ttl_ns=3_600_000_000_000)
    tier = cast(Tier, _Tier(arena_blocks * BLOCK_BYTES, slab_bytes=1 << 20))
    core = Replica(settings, tier)
    backup = Record("live/b", encode_record(LiveRecord(1, b"b" * 16, NodeAddress("b", "b:1"))), 1)
    join = next(e for e in core.step(ev.Records(NOW_NS, [backup], [], 1, full=True)) if isinstance(e, Commit))
    core.step(ev.Committed(NOW_NS, join.op, CommitStatus.COMMITTED, 2, NOW_NS))
    owner = encode_record(ShardOwner("a", core.lease.liveness_epoch, 1 << 41, ("a", "b"), ("a", "b")))
    core.step(ev.Records(NOW_NS, [Record(owner_key(s), owner, 3) for s in range(SHARDS)], [], 3, full=False))
    core.step(ev.PeerUp(NOW_NS, "b"))
    return core


def _put(core: Replica, op: int, keys: list[bytes], items: list[PutItem], sums: list[bytes | None]) -> list[Effect]:
    effects = core.step(ev.PutBegin(NOW_NS, op, keys, items, NOW_NS * 10, True, True, 1, ""))
    assert isinstance(effects[0], Fill)
    return core.step(ev.PutFilled(NOW_NS, op, sums))


def _answer(core: Replica, effects: list[Effect]) -> None:
    """The backup stores everything; not part of what is timed."""
    for effect in effects:
        if isinstance(effect, Send):
            core.step(ev.Unref(NOW_NS, effect.slots))
            if isinstance(effect.message, Replicate):
                count = len(effect.message.items)
                reply = ReplicateReply([0] * count, [0] * count)
                core.step(ev.ReplicateAnswered(NOW_NS, effect.peer, effect.request, reply))


def _batch(first: int) -> tuple[list[bytes], list[PutItem], list[bytes | None]]:
    keys = [b"scope..1" + checksum(b"%d" % (first + i)) * 2 for i in range(BATCH_KEYS_MAX)]
    items = [PutItem(key[8:], key[:24], BLOCK_BYTES, key[:16], depth=i) for i, key in enumerate(keys)]
    return keys, items, [item.checksum for item in items]


def _least_us(timed: Callable[[], float]) -> float:
    """Microseconds per key: the least of all steps of all rounds."""
    return min(timed() for _ in range(ROUNDS * STEPS_PER_ROUND)) / BATCH_KEYS_MAX / 1000


def _time_get() -> float:
    core = _primary(4 * BATCH_KEYS_MAX)
    keys, items, sums = _batch(0)
    _answer(core, _put(core, 1, keys, items, sums))

    def timed() -> float:
        begun = time.perf_counter_ns()
        effects = core.step(ev.Get(NOW_NS, 2, keys, NOW_NS * 10))
        took = time.perf_counter_ns() - begun
        core.step(ev.Unref(NOW_NS, effects[0].slots))  # type: ignore[attr-defined]
        return took

    return _least_us(timed)


def _time_put(arena_blocks: int) -> float:
    """New keys each time; when the arena is smaller than what is put, each one evicts another."""
    core = _primary(arena_blocks)
    state = {"op": 0}

    def timed() -> float:
        state["op"] += 1
        keys, items, sums = _batch(state["op"] * BATCH_KEYS_MAX)
        begun = time.perf_counter_ns()
        effects = _put(core, state["op"], keys, items, sums)
        took = time.perf_counter_ns() - begun
        _answer(core, effects)
        return took

    for _ in range(2 + min(arena_blocks, 8 * BATCH_KEYS_MAX) // BATCH_KEYS_MAX):
        timed()
    return _least_us(timed)


def run() -> list[dict[str, object]]:
    """One row per case: name, us_per_key (least of several), goal (microseconds per key)."""
    everything = (ROUNDS * STEPS_PER_ROUND + 16) * BATCH_KEYS_MAX
    cases = [
        ("get 128 local hits", _time_get(), GET_GOAL_US),
        ("put 128, primary with one backup", _time_put(everything), PUT_GOAL_US),
        ("put 128, arena full", _time_put(8 * BATCH_KEYS_MAX), PUT_GOAL_US),
    ]
    return [{"name": name, "us_per_key": round(value, 3), "goal": goal} for name, value, goal in cases]
