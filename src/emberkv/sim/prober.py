"""Measures an outage as clients see it: from the loss of a node to the first acknowledged session put of each shard.

Laws: it knows nothing of the cluster's inside but which shards the lost node was primary of. It asks all other nodes in
turn, at least PROBES_PER_BUDGET times in a budget; a probe waits no longer than a client's try.
Limits: SHARDS_MAX of the lost shards are probed, drawn from the faults' stream of chance.
"""

from __future__ import annotations

from functools import cache

from emberkv.sim.cluster import Cluster, key_of
from emberkv.sim.engine import MS
from emberkv.types import SHARDS, Level, PutOutcome, PutStatus, shard_of

PROBES_PER_BUDGET = 60
SHARDS_MAX = 8
PATIENCE = 3.0
"""An outage of so many times what is allowed is not measured further."""
FIRST_KEY = 1_000_000
"""The workload's keys lie below."""


@cache
def probe_keys() -> tuple[bytes, ...]:
    """One key of each shard."""
    found: dict[int, bytes] = {}
    number = FIRST_KEY
    while len(found) < SHARDS:
        key = key_of(number)
        found.setdefault(shard_of(key), key)
        number += 1
    return tuple(found[shard] for shard in range(SHARDS))


class Prober:
    """Probes the shards of one lost node."""

    def __init__(self, cluster: Cluster, victim: str) -> None:
        self.cluster = cluster
        self.victim = victim
        owned = [s for s, epoch in enumerate(cluster.processes[victim].core.state.view.primary_epoch) if epoch]
        self.shards = sorted(cluster.engine.rng_faults.sample(owned, min(SHARDS_MAX, len(owned))))
        self.begun_ns = cluster.now
        self.bound_ms = cluster.budget.budget_ms
        self.acked_ms: dict[int, float] = {}
        """Shard -> milliseconds until a session put of it was acknowledged."""
        self._turn = 0
        self._try_ms = cluster.budget.costs.client_try_ms

    def start(self, bound_ms: float) -> None:
        """The node is lost now; the outage is expected to end within `bound_ms`."""
        self.begun_ns, self.bound_ms = self.cluster.now, bound_ms
        self._probe()

    def ended(self) -> bool:
        """Was every shard written, or is it beyond all patience?"""
        waited_ms = (self.cluster.now - self.begun_ns) / MS
        return len(self.acked_ms) == len(self.shards) or waited_ms > PATIENCE * self.bound_ms

    def outage_ms(self) -> float:
        """Of the shard that was out for longest; what has been waited, when one never came back."""
        if len(self.acked_ms) < len(self.shards):
            return (self.cluster.now - self.begun_ns) / MS
        return max(self.acked_ms.values(), default=0.0)

    def _probe(self) -> None:
        if self.ended():
            return
        cluster = self.cluster
        cluster.after(cluster.budget.budget_ms / PROBES_PER_BUDGET * MS, self._probe)
        alive = [name for name, process in cluster.processes.items() if process.alive and name != self.victim]
        self._turn += 1
        node = alive[self._turn % len(alive)]
        shards = [shard for shard in self.shards if shard not in self.acked_ms]
        keys = [probe_keys()[shard] for shard in shards]

        def done(outcomes: list[PutOutcome] | None) -> None:
            for shard, outcome in zip(shards, outcomes or [], strict=outcomes is not None):
                if outcome.status is PutStatus.STORED:
                    self.acked_ms.setdefault(shard, (cluster.now - self.begun_ns) / MS)

        datas = [b"probe %d" % self._turn] * len(keys)
        cluster.put(node, keys, datas, level=Level.SESSION, deadline_ms=self._try_ms, done=done)
