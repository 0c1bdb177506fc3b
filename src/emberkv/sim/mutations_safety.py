"""Mutations that break what must never happen: each undoes one safeguard of the protocol (mutation.py, mutations.py).

The name of a mutation says what the broken code does.
"""

from __future__ import annotations

import random
from typing import Any

from emberkv.core import failover, hints, rebalance, stream
from emberkv.core.budget import plan
from emberkv.core.directory import Directory
from emberkv.core.failover import Failover
from emberkv.core.get import Reads
from emberkv.core.handover import Handover
from emberkv.core.hints import Hints
from emberkv.core.learner import Learner
from emberkv.core.lease import Lease
from emberkv.core.merge import AppliedVector, Stamp
from emberkv.core.put import Put
from emberkv.core.repair import Repair
from emberkv.core.stream import Stream
from emberkv.core.view import HEARTBEAT_PREFIX, LIVE_PREFIX
from emberkv.node.runtime import Runtime
from emberkv.ports import Compare, Record, Write
from emberkv.sim.cluster import costs_of
from emberkv.sim.engine import MS, Fault, Options
from emberkv.sim.faults import replace_faults
from emberkv.sim.mutation import (
    COORDINATOR,
    CRASHES,
    CROWDED,
    CUTS,
    FEW_KEYS,
    FLIPS,
    FREEZES,
    MOVES,
    Mutation,
    at_once,
    rewrite,
    swap,
    together,
    world,
)
from emberkv.sim.network import Reading
from emberkv.sim.process import Process
from emberkv.types import Version


def _yes(self: Any, *_: Any, **__: Any) -> bool:
    return True


def _no(self: Any, *_: Any, **__: Any) -> bool:
    return False


def _nothing(self: Any, *_: Any, **__: Any) -> list[int]:
    return []


def _gate_open(self: Stream, shard: int, peer: str, authority: int) -> tuple[bool, int]:
    return True, 0


def _ungated(self: Runtime, done: Any) -> Any:
    return done


def _by_arrival(left: Stamp, right: Stamp) -> Stamp:
    return right


def _across_epochs(self: AppliedVector, version: Version) -> bool:
    return any(low <= version.seq <= high for ranges in self.ranges.values() for low, high in ranges)


def _forget_soon(self: Directory, before_ns: int) -> None:
    """No floor remembers that there were some."""
    for key in [key for key, at_ns in self._tombstones.items() if self.now_ns - at_ns > 100 * MS]:
        entry = self.get(key)
        assert entry is not None
        self.remove(entry)


_pause = Process.pause


def _pause_but_beat(self: Process, *, machine: bool = False) -> None:
    """Somebody else than the core keeps the lease: its heartbeats go on while it is frozen."""
    _pause(self, machine=machine)
    coordinator, life = self.cluster.coordinator, self.lives

    def beat() -> None:
        if not self.paused or self.lives != life:
            return
        live: Record | None = coordinator.records.get(LIVE_PREFIX + self.name)
        last: Record | None = coordinator.records.get(HEARTBEAT_PREFIX + self.name)
        if live is not None and last is not None:
            guard = Compare(live.key, self.core.lease.live_revision)
            coordinator.commit(self, [guard], [Write(last.key, last.value)])
        self.engine.after(self.core.state.settings.heartbeat_ns, beat)

    self.engine.after(0, beat)


def _bystander_takes(seed: int) -> Options:
    """A primary that does not reach one of its backups is lost while the other one is frozen: who has missed the last
    puts takes over, and what they were is known to the frozen one alone."""
    rng = random.Random(f"{seed}/bystander")
    drawn = world(nodes=3, factor=3, keys=400, requests_per_s=60.0, arena_slots=512)(seed)
    ttl_ms = plan(drawn.budget_ms, costs_of(drawn)).ttl_ms
    primary, bystander, backup = rng.sample(drawn.names(), 3)
    at_ms = ttl_ms * (1 + rng.random())
    faults = (
        Fault(at_ms, "cut", primary, bystander, 4 * ttl_ms),
        Fault(at_ms + 1.5 * ttl_ms, "pause", backup, "", 3 * ttl_ms),
        Fault(at_ms + ttl_ms * (1.5 + rng.random() / 4), "crash", primary, "", 6 * ttl_ms),
    )
    return replace_faults(drawn, faults)


def _long_away(seed: int) -> Options:
    """A node reaches no other for longer than deletes are remembered, and its clients go on."""
    rng = random.Random(f"{seed}/away")
    busy: dict[str, Any] = {"keys": 40, "requests_per_s": 60.0, "arena_slots": 512, "tombstone_retention_ms": 300.0}
    drawn = world(nodes=4, factor=2, crash_at_end=False, **busy)(seed)
    ttl_ms = plan(drawn.budget_ms, costs_of(drawn)).ttl_ms
    at_ms = ttl_ms * (2 + rng.random())
    return replace_faults(drawn, (Fault(at_ms, "isolate", rng.choice(drawn.names()), "", 5 * ttl_ms),))


AUTHORITY = (
    Mutation(
        "skip the authority gate",
        "P3a",
        together(swap(Stream, "gate", _gate_open), rewrite(Stream, "_take", ("item.authority < seen", "False"))),
        FREEZES,
    ),
    Mutation(
        "gate data by the epoch of the entry",
        "P5",
        rewrite(
            Stream,
            "_admits",
            ("self.gate(shard, event.peer, item.authority)", "self.gate(shard, event.peer, item.version.epoch)"),
        ),
        CRASHES,
    ),
    Mutation(
        "believe an old primary's answer",
        "P3a",
        rewrite(Hints, "on_answer", ("0 < authority < self.state.view.epoch_seen[hint.entry.shard]", "False")),
        world("drain", "drain", "drain", count=6, nodes=4, delay_ms=(1.0, 60.0)),
    ),
    Mutation(
        "no liveness bump at restart",
        "P3a",
        rewrite(
            Lease,
            "_join",
            (
                "max(record.epoch if record is not None else 0, floor) + 1",
                "record.epoch if record is not None else floor + 1",
            ),
        ),
        CRASHES,
    ),
    Mutation(
        "the version counter starts again in the same epoch",
        "versions",
        rewrite(Put, "_next_version", ("seq + 1 if known == epoch else 1", "seq % 5 + 1")),
        CUTS,
    ),
)

LEASES = (
    Mutation(
        "look at the gate before the store only",
        "P3b",
        swap(Runtime, "_gated", _ungated),
        at_once("away", "clog", "clog", groups=4, tcp_timeout_ms=1500.0),
    ),
    Mutation(
        "acknowledge under an epoch that is over",
        "P3b",
        together(
            swap(Put, "_spoke_too_late", _no),
            swap(Runtime, "_gated", _ungated),
        ),
        world("pause", "clog", "clog", "away", count=8),
        seeds_max=200,  # many things have to meet within the time of one answer
    ),
    Mutation(
        "date the lease from the answer to the renewal",
        "P3b",
        rewrite(Lease, "_extended", ("self.deadline_ns = event.sent_ns", "self.deadline_ns = event.now_ns")),
        world("pause", count=8, coordinator_ms=(5.0, 25.0)),
    ),
    Mutation(
        "heartbeat without progress of the core", "P4", swap(Process, "pause", _pause_but_beat), world("pause", count=2)
    ),
    Mutation(
        "take an unknown renewal for done",
        "P3b",
        rewrite(Lease, "on_committed", ("self._read_back()", "self._extended(event)")),
        COORDINATOR,
    ),
    Mutation(
        "take an unknown takeover for done",
        "P3a",
        rewrite(
            Failover,
            "on_committed",
            ("event.status is not CommitStatus.COMMITTED", "event.status is CommitStatus.REFUSED"),
            ("record, event.revision)", "record, event.revision or self.state.view.owner_revision[shard] + 1)"),
        ),
        world("unknown", "crash", "crash", "pause"),
    ),
    Mutation(
        "take an unknown hand-over for refused",
        "P3b",
        rewrite(Handover, "on_committed", ('leaving.move("unknown")', "self._end(shard)")),
        at_once("drain", "unknown", "silent", groups=4, nodes=4),
    ),
    Mutation(
        "expire without comparing the heartbeat that was timed",
        "no needless expiry",
        rewrite(Failover, "_commit_death", ("Compare(HEARTBEAT_PREFIX + name, timed_revision),", "")),
        world("silent", count=4),
    ),
    Mutation(
        "no grace after an outage of the coordinator",
        "no needless expiry",
        rewrite(
            Failover,
            "_expire",
            ("healthy_since is None or now_ns - healthy_since < settings.grace_ns", "healthy_since is None"),
        ),
        world("outage", count=3, unknown_share=0.0),
    ),
)

WRITES = (
    Mutation("stamp a replayed hint anew", "P6a", swap(Hints, "is_fresh", _yes), FEW_KEYS),
    Mutation(
        "let a relayed put follow what the relay holds",
        "P6a",
        rewrite(Put, "_accept", ("begin.fresh and not begin.session and not begin.from_peer", "True")),
        FEW_KEYS,
    ),
    Mutation(
        "acknowledge a session put before it is stored",
        "P6b",
        rewrite(
            Put,
            "_accept",
            (
                "return None if waits else _ACCEPTED",
                """if not waits:
        return _ACCEPTED
    owner = self.state.view.owners[entry.shard]
    return PutOutcome(PutStatus.STORED, Version(owner.epoch, 1), 1) if owner is not None else None""",
            ),
        ),
        CUTS,
    ),
    Mutation(
        "acknowledge before the copies are there",
        "P6c",
        rewrite(
            Put,
            "_decide",
            (
                """if not copies_wanted:
            return outcome""",
                """if True:
            return outcome._replace(copies=max(begin.min_copies, 1))""",
            ),
        ),
        CUTS,
    ),
    Mutation("relay a put on", "one hop", rewrite(Hints, "_choose", ("hint.relayed and not direct", "False")), CUTS),
    Mutation(
        "merge by arrival",
        "P5",
        together(swap(stream, "merge", _by_arrival), swap(hints, "merge", _by_arrival)),
        CUTS,
    ),
)

READS = (
    Mutation(
        "ignore the floors of a token",
        "P6a",
        rewrite(Reads, "_on_session_get", ("event.floors or [NO_VERSION] * count", "[NO_VERSION] * count")),
        world("clog", "cut", "clog", "isolate", count=8, keys=4, tcp_timeout_ms=1500.0),
    ),
    Mutation("let any copy answer a session", "deletes, P6a", swap(Reads, "_speaks_for", _yes), FEW_KEYS),
    Mutation(
        "show PENDING blocks to session reads",
        "no PENDING",
        rewrite(
            Reads,
            "_on_session_get",
            (
                "entry = self.state.directory.shards[shard].get(key)",
                """entry = self.state.directory.shards[shard].get(key)
        if entry is None and key in self.hints.pending and self.hints.pending[key].entry.slot:
            entry = self.hints.pending[key].entry""",
            ),
            ("elif not speaks:", "elif False:"),
        ),
        CUTS,
    ),
    Mutation("serve copies that were not verified", "P1", swap(Runtime, "bad_copies", _nothing), FLIPS),
    Mutation(
        "let a former replica beat a tombstone",
        "deletes",
        together(
            rewrite(
                Reads,
                "_fetch",
                ("info.reason in (MissReason.DELETED, MissReason.CURRENT)", "info.reason == MissReason.CURRENT"),
            ),
            rewrite(Reads, "_take", ("current.slot is None and current.version >= info.version", "False")),
            rewrite(Reads, "_missed", ("op.least[index] = max(op.least[index], _above(info))", "pass")),
        ),
        world("drain", "drain", "cut", "crash", keys=4, nodes=4),
    ),
    Mutation(
        "bytes land after their read has ended",
        "P2",
        rewrite(
            Reading,
            "_rest",
            ("if self.ended:", "if self.ended and self._take(infos, data, begin, len(infos)) is None:"),
        ),
        world("slow", "slow", "pause", count=6),
    ),
    Mutation(
        "serve what has expired",
        "expiry",
        together(
            rewrite(Reads, "_on_session_get", ("entry.expiry_ms and entry.expiry_ms <= wall_ms", "False")),
            rewrite(Reads, "on_get", ("entry.expiry_ms and entry.expiry_ms <= wall_ms", "False")),
            rewrite(Directory, "sweep", ("(entry.expiry_ms and entry.expiry_ms <= wall_ms)", "False")),
        ),
        world("crash", count=1),
    ),
)

MEMORY = (
    Mutation(
        "reuse a slot while it is read",
        "P1, P2",
        rewrite(
            Directory,
            "remove",
            ("self.unref(removed.slot)", "removed.slot.refs = 1\n        self.unref(removed.slot)"),
        ),
        CROWDED,
    ),
    Mutation("drop tombstones early", "deletes", swap(Directory, "forget_tombstones", _forget_soon), FEW_KEYS),
    Mutation(
        "keep hints for longer than deletes",
        "deletes",
        swap(Hints, "_drop_aged", _nothing),
        _long_away,
    ),
    Mutation(
        "do not tell that an overwritten block was evicted",
        "P5",
        swap(Directory, "ghosts", _nothing),
        world("crash", "cut", "pause", "isolate", count=6, arena_slots=24, keys=40),
        seeds_max=200,
    ),
    Mutation(
        "fetch back what was evicted",
        "evictions",
        together(
            rewrite(Learner, "_wants", ("directory.evicted_version(head.key) >= head.version", "False")),
            rewrite(
                Stream,
                "_is_gone",
                ("evicted > item.version or (repairing and evicted == item.version)", "False"),
            ),
        ),
        CROWDED,
    ),
)

REPAIR = (
    Mutation(
        "compare watermarks across epochs",
        "P5",
        swap(AppliedVector, "covers", _across_epochs),
        world("crash", "pause", "cut", "isolate"),
    ),
    Mutation(
        "a replica without the data takes over first",
        "deletes, P6c",
        rewrite(
            failover,
            "takers",
            ("order = unbroken(view, shard, owner.in_sync)", "order = []"),
            ("order += [name for name in unbroken(view, shard, owner.replicas) if name not in order]", ""),
        ),
        world("crash", count=2),
    ),
    Mutation(
        "drop what only a replica has",
        "P5, P6c",
        rewrite(Learner, "_hand_in", ("surplus.append(entry)", "directory.remove(entry)")),
        _bystander_takes,
    ),
    Mutation(
        "call a replica complete without filling it",
        "P5",
        rewrite(Repair, "on_offer_answer", ("[entry for entry in wanted if entry is not None]", "[]")),
        CRASHES,
    ),
    Mutation(
        "drop a replica before the new one is complete",
        "P6c",
        rewrite(
            rebalance,
            "reconciled",
            ("if extra and (len(staying) >= factor or settled):", "if extra:"),
        ),
        MOVES,
    ),
)

SAFETY: tuple[Mutation, ...] = (*AUTHORITY, *LEASES, *WRITES, *READS, *MEMORY, *REPAIR)
