"""Mutations that make a cluster safe and useless: each leaves out something that has to happen (mutations.py)."""

from __future__ import annotations

from typing import Any

from emberkv.core import rebalance
from emberkv.core.failover import Failover
from emberkv.core.get import Reads
from emberkv.core.hints import Hints
from emberkv.core.lease import Lease
from emberkv.core.put import Put
from emberkv.core.repair import Repair
from emberkv.messages import BlockInfo
from emberkv.sim.engine import Fault, Options
from emberkv.sim.faults import replace_faults
from emberkv.sim.mutation import CALM, CRASHES, CUTS, FREEZES, Mutation, rewrite, swap, together, world
from emberkv.types import MissReason


def _never(self: Any, *_: Any, **__: Any) -> None:
    return None


def _always_miss(self: Reads, event: Any) -> None:
    count = len(event.keys)
    self._done(event.op, [BlockInfo(int(MissReason.ABSENT))] * count, [None] * count)


def _liveness(name: str, law: str, apply: Any, options: Any) -> Mutation:
    return Mutation(name, law, apply, options, kind="liveness")


def _alone(seed: int) -> Options:
    """One node reaches the coordinator and nobody else, for long."""
    drawn = world(crash_at_end=False)(seed)
    node = drawn.names()[seed % len(drawn.names())]
    return replace_faults(drawn, (Fault(1300.0, "isolate", node, "", 2600.0),))


LIVENESS: tuple[Mutation, ...] = (
    _liveness("always miss", "no trivial success", swap(Reads, "on_get", _always_miss), CALM),
    _liveness(
        "refuse all puts",
        "no trivial success",
        rewrite(Put, "on_begin", ("len(self.ops) >= OPS_MAX", "True")),
        CALM,
    ),
    _liveness("read from nobody else", "P6b", rewrite(Reads, "_fetch", ("not op.begin.local_only", "False")), CALM),
    _liveness(
        "never take over",
        "P4",
        rewrite(Failover, "take", ("alone and view.owners[shard] is not None", "view.owners[shard] is not None")),
        CRASHES,
    ),
    _liveness("expire nobody", "P4", swap(Failover, "_expire", _never), CRASHES),
    _liveness(
        "never promote a learner",
        "P5",
        rewrite(Repair, "_complete", ("self.complete.setdefault(lane.shard, set()).add(peer)", "pass")),
        CRASHES,
    ),
    _liveness("never move a shard to its better home", "rest", swap(rebalance, "successor", _never), CRASHES),
    _liveness("hold on to shards while nobody can be reached", "P4", swap(Failover, "_give_up_alone", _never), _alone),
    _liveness("never repair", "P5", swap(Repair, "start", _never), CUTS),
    _liveness("never send hints", "no trivial success", swap(Hints, "flush", _never), CALM),
    _liveness("never renew the lease", "P4", swap(Lease, "_renew", _never), CALM),
    _liveness("never join again after an expiry", "P4", swap(Lease, "_consider_lost", _never), FREEZES),
    _liveness(
        "reads wait as long as their sources like",
        "P2",
        together(
            swap(Reads, "on_tick", _never),
            rewrite(
                Reads, "_fetch", ("left_ns = op.begin.deadline_ns - self.state.now_ns", "left_ns = 20_000_000_000")
            ),
        ),
        CUTS,
    ),
    _liveness("puts outlive their deadline", "P2", rewrite(Put, "on_tick", ("self._expire(op)", "pass")), CUTS),
)
