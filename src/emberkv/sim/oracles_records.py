"""What the coordinator's records may come to say: who is expired, who takes over and when, who is dropped (P4, P6c).

Why it exists: a wrong record often does no visible harm in the same run; it has only made a loss possible.
Limits: judged where the faults of a run leave no doubt about who was able to act.
"""

from __future__ import annotations

from typing import Any, Final

from emberkv.core.view import LIVE_PREFIX
from emberkv.sim.engine import Fault
from emberkv.sim.history import NEVER
from emberkv.sim.oracle import Oracle, Passing
from emberkv.sim.oracles_evidence import Change, life_of

MS: Final = 1_000_000
CALM_NS: Final = 1_000_000_000
"""Takeovers are judged where nothing else has gone wrong for so long before."""


class TakenOver(Oracle):
    """P4, as the records show it; run.py's prober measures it as clients see it."""

    law = "P4: a node that is gone or frozen for the whole budget is primary of nothing, if another replica lives"

    def watch(self, passing: Passing) -> None:
        passing.on_kind("life", self._on_life)

    def _on_life(self, process: Any, what: str) -> None:
        record = self.evidence.live(process.name)
        if what not in ("kill", "pause") or record is None or record.dead:
            return
        if self.evidence.excused("P4") or not self.evidence.calm(self.cluster.now - CALM_NS, process.name):
            return
        budget = self.cluster.budget
        wait_ns = (budget.observer_ms + 2 * budget.takeover_ms + 300) * MS
        self.cluster.after(wait_ns, self._look, life_of(process), record.epoch, self.cluster.now)

    def _look(self, life: tuple[str, int], epoch: int, since_ns: int) -> None:
        name, lives = life
        process = self.cluster.processes[name]
        gone = not process.alive or name in self.evidence.frozen
        if not gone or process.lives != lives or self.evidence.disturbed_ns[name] != since_ns:
            return
        if not self.evidence.calm(since_ns, name):
            return
        for shard in self.evidence.changes:
            owner = self.evidence.owner(shard)
            if owner is not None and (owner.primary, owner.liveness_epoch) == (name, epoch):
                self.broken(f"{name} has been out for {(self.cluster.now - since_ns) / 1e6:.0f} ms and keeps {shard}")


class GivenUp(Oracle):
    """A primary that is cut off from all nodes, but not from the coordinator."""

    law = "a node that has reached no other for some leases is primary of no shard that has another live replica"

    TTLS: Final = 5.0

    def watch(self, passing: Passing) -> None:
        passing.on_kind("fault", self._on_fault)

    def _on_fault(self, _process: Any, told: tuple[str, Fault]) -> None:
        text, fault = told
        if fault.kind == "isolate" and not fault.flag and not text.startswith("end of "):
            self.cluster.after(self.TTLS * self.cluster.budget.ttl_ms * MS, self._look, fault, self.cluster.now)

    def _look(self, fault: Fault, since_ns: int) -> None:
        spans = [span for span in self.evidence.faults if span.ended_ns > since_ns]
        if (
            len(spans) != 1
            or spans[0].ended_ns != NEVER
            or spans[0].fault != fault
            or not self.evidence.calm_nodes(since_ns - CALM_NS)
        ):
            return  # it ended before, or something else was wrong too
        for shard in self.evidence.changes:
            owner = self.evidence.owner(shard)
            if owner is None or owner.primary != fault.node:
                continue
            others = [name for name in owner.replicas if name != fault.node]
            if any(record is not None and not record.dead for record in map(self.evidence.live, others)):
                self.broken(f"{fault.node} reaches nobody and keeps shard {shard}: {owner}")


class NoNeedlessExpiry(Oracle):
    """Nobody healthy is declared dead."""

    law = "a node is not expired within a ttl of its last heartbeat, nor while it is healthy and connected"

    def watch(self, passing: Passing) -> None:
        passing.on_kind("commit", self._on_commit)

    def _on_commit(self, process: Any, seen: Any) -> None:
        if seen.restored or process is None:
            return
        for record in seen.records:
            name = record.key[len(LIVE_PREFIX) :]
            if record.key.startswith(LIVE_PREFIX) and name != process.name:
                # A life that is over may be expired although the next one runs already and has not joined yet.
                self._expired(name, process, self.evidence.live_incarnation(name))

    def _expired(self, name: str, by: Any, incarnation: bytes) -> None:
        now, victim = self.cluster.now, self.cluster.processes[name]
        beat_ns = self.evidence.heartbeats.get(name, 0)
        ttl_ns = by.core.state.settings.ttl_ns
        if now - beat_ns < ttl_ns:
            self.broken(f"{by.name} expired {name}, whose heartbeat was {(now - beat_ns) / MS:.0f} ms old")
        awake = victim.alive and victim.incarnation == incarnation and name not in self.evidence.frozen
        healthy = awake and not self.evidence.cut_off(name, now - 2 * ttl_ns)
        if healthy and self.evidence.disturbed_ns.get(name, 0) < now - 2 * ttl_ns:
            self.broken(f"{by.name} expired {name}, which is healthy and connected")


class Heir(Oracle):
    """Who takes over."""

    law = "P6c: a lost primary's shard goes to a replica that is in sync, while one lives and is able to take it"

    def watch(self, passing: Passing) -> None:
        passing.on_kind("commit", self._on_commit)

    def _on_commit(self, process: Any, seen: Any) -> None:
        if seen.restored or process is None:
            return
        for shard, owner in self.evidence.owners_of(seen):
            changes = self.evidence.changes[shard]
            if len(changes) > 1 and changes[-2].owner.epoch < owner.epoch and process.name == owner.primary:
                self._judge(shard, changes[-2], owner.primary, process.core.state.settings.ttl_ns)

    def _judge(self, shard: int, before: Change, taker: str, ttl_ns: int) -> None:
        heirs = [name for name in before.owner.in_sync if name != before.owner.primary]
        able = [name for name in heirs if self.evidence.unbroken(name, before.revision)]
        if taker in able or not self.evidence.calm(self.cluster.now - 2 * ttl_ns, before.owner.primary):
            return
        for name in able:
            if self.evidence.may_act(self.cluster.processes[name]):
                self.broken(f"shard {shard} went to {taker}, which was not in sync; {name} is: {before.owner}")


class NeverFewer(Oracle):
    """Who is dropped."""

    law = "a live replica is dropped only when as many as the factor (or all that do not drain) are in sync without it"

    def watch(self, passing: Passing) -> None:
        passing.on_kind("commit", self._on_commit)

    def _on_commit(self, process: Any, seen: Any) -> None:
        if seen.restored or process is None:
            return
        for shard, owner in self.evidence.owners_of(seen):
            changes = self.evidence.changes[shard]
            if len(changes) < 2 or changes[-2].owner.epoch != owner.epoch or not owner.primary:
                continue
            dropped = [name for name in changes[-2].owner.replicas if name not in owner.replicas]
            live = [name for name in dropped if self.evidence.unbroken(name, changes[-2].revision)]
            if live and len(owner.in_sync) < min(self.cluster.options.factor, len(self.evidence.homes())):
                self.broken(f"shard {shard} dropped {live} with {owner.in_sync} in sync: {changes[-2].owner}")


RECORDS: tuple[type[Oracle], ...] = (TakenOver, GivenUp, NoNeedlessExpiry, Heir, NeverFewer)
