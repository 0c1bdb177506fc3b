"""Short worlds full of faults, judged by oracles outside the core (harness/storm.py). One seed is one run.

Each bug that a storm or a reading found has its own short test in tests/unit, named for what went wrong.
"""

import random

import pytest

from emberkv.core.events import Verified
from emberkv.core.get import Reads
from emberkv.core.merge import AppliedVector
from emberkv.core.repair import Repair
from emberkv.types import PutStatus, Version, shard_of
from harness.storm import Storm, run_storm
from harness.world import World, key_of

BATCHES = 15
SEEDS_PER_BATCH = 4


def options(seed: int) -> dict:
    draw = random.Random(seed)
    return {
        "nodes": draw.choice([2, 3, 3, 4, 5]),
        "keys": draw.choice([3, 10, 40]),
        "fault_share": draw.choice([0.03, 0.06, 0.15]),
        "arena_slots": draw.choice([16, 256, 256]),
        "flips": draw.random() < 0.5,
        "forgetful": draw.random() < 0.3,
    }


@pytest.mark.parametrize("batch", range(BATCHES))
def test_storms(batch):
    hits = 0
    for seed in range(batch * SEEDS_PER_BATCH, (batch + 1) * SEEDS_PER_BATCH):
        try:
            hits += run_storm(seed, duration_ms=2000, quiet_ms=8000, **options(seed)).hits
        except Exception as error:
            raise AssertionError(f"seed {seed} {options(seed)}: {error}") from error
    assert hits > 20 * SEEDS_PER_BATCH, "a cache that never hits proves nothing"


def test_calm_world_loses_nothing():
    storm = Storm(5, fault_share=0.0)
    storm.run(3000)
    storm.finish(2000)
    assert storm.hits > 100
    assert storm.stored > 100


@pytest.mark.parametrize("seed", range(12))
def test_acked_with_two_copies_survives_one_loss(seed):
    world = World("abc", seed, account_every=50)
    world.settle()
    world.run_ms(1500)
    acked = {}
    for number in range(40):
        key, data = key_of(number), b"%d" % number
        (outcome,) = world.put_now(world.rng.choice("abc"), [key], [data], min_copies=2)
        if outcome.status is PutStatus.STORED:
            acked[key] = data
    assert len(acked) > 35
    lost = world.rng.choice("abc")
    world.kill(lost) if seed % 2 else world.restart(lost)
    world.settle()
    for name in set("abc") - {lost}:
        for key, data in acked.items():
            assert world.get_now(name, [key])[0][1] == data


@pytest.mark.parametrize("seed", range(4))
def test_acked_session_puts_hit_while_their_primary_lives(seed):
    """Backups come and go and links break; who can reach the primary reads what it acknowledged."""
    world = World("abc", seed, account_every=50)
    world.settle()
    world.run_ms(1000)
    rng = world.rng
    for number in range(150):
        key, data = key_of(number % 20), b"%d" % number
        primary = world.primary(shard_of(key))
        if rng.random() < 0.2:
            left, right = rng.sample("abc", 2)
            world.cut(left, right)
        if rng.random() < 0.2:
            world.heal()
        if primary is None:
            world.run_ms(20)
            continue
        (outcome,) = world.put_now(primary, [key], [data])
        if outcome.status is PutStatus.STORED:
            assert world.get_now(primary, [key])[0][1] == data


def test_same_seed_same_run():
    def trace(seed):
        storm, seen = Storm(seed), []
        storm.world.observers.append(lambda node, effect: seen.append((node.name, type(effect).__name__)))
        storm.run(1500)
        return seen

    assert trace(3) == trace(3)


# -- a storm that never failed is unproven: each of these mutations must be caught ------------------------------------


def caught_within(seeds: int) -> bool:
    for seed in range(seeds):
        try:
            run_storm(seed, duration_ms=2000, quiet_ms=8000, nodes=3, keys=10, fault_share=0.1, flips=seed % 2 == 0)
        except (AssertionError, KeyError):
            return True
    return False


def verify_nothing(self, effect):
    self.step(Verified(self.world.now, effect.op, []))


def read_without_token(self, event, on_get=Reads.on_get):
    event.floors = []
    on_get(self, event)


def read_as_eventual(self, event, on_get=Reads.on_get):
    event.floors, event.session = [], False
    on_get(self, event)


def complete_at_once(self, peer, lane, answer):
    self._complete(peer, lane, answer.spans)


MUTATIONS = {
    "what a peer missed is not noted": (Repair, "behind", lambda self, peer, shard: None),
    "the lease never lapses": ("emberkv.core.lease.Lease", "open", lambda self, now_ns: self.phase.value == "member"),
    "a primary starts its numbers anew in the same epoch": (
        "emberkv.core.put.Put", "_next_version", lambda self, shard: Version(self.state.view.primary_epoch[shard], 1),
    ),
    "a slot is released while it is in use": (
        "emberkv.core.directory.Directory", "unref", lambda self, slot: slot.size_class and self.tier.release(slot),
    ),
    "repair never starts": ("emberkv.core.repair.Repair", "start", lambda self: None),
    "vectors are compared and nothing is sent": (Repair, "_compared", complete_at_once),
    "whoever asks is told that nothing is lacking": (AppliedVector, "lacks", lambda self, spans: False),
    "a session's token is not looked at": (Reads, "on_get", read_without_token),
    "a session's read is an eventual one": (Reads, "on_get", read_as_eventual),
    "hints are never flushed": ("emberkv.core.hints.Hints", "flush", lambda self, apply_here: None),
    "bad bytes are not noticed": ("harness.world.Node", "_verify", verify_nothing),
    "nobody takes a vacant shard": ("emberkv.core.failover.Failover", "take", lambda self, now_ns: None),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_mutations_are_caught(name, monkeypatch):
    owner, attribute, replacement = MUTATIONS[name]
    monkeypatch.setattr(f"{owner}.{attribute}" if isinstance(owner, str) else owner, *(
        [replacement] if isinstance(owner, str) else [attribute, replacement]
    ))  # fmt: skip
    assert caught_within(25), name
