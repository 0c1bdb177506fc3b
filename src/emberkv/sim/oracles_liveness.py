"""What must happen in time, and what must not grow: P2, P5, P8, no trivial success, rest.

Why it exists: a cluster that refuses everything is safe. These laws say that it works: in time while faults go on, and
altogether when they have ended.
Limits: laws about time are judged where the faults of a run leave no doubt (calm, healthy); their bounds are wide.
"""

from __future__ import annotations

from typing import Any, Final

from emberkv.core.state import HINTS_MAX, OPS_MAX
from emberkv.messages import Offer, Replicate
from emberkv.sim.history import NEVER, SCOPE, Request
from emberkv.sim.oracle import Oracle, Passing
from emberkv.types import Level, MissReason, PutStatus, Version, shard_of

MS: Final = 1_000_000
PATIENT_MS: Final = 120.0
"""Requests with a shorter deadline may rightly end without."""
HIT_FLOOR: Final = {0: 0.9, 1: 0.5}
"""By number of faults of a run: share of reads of stored blocks that must be hits."""
STORED_FLOOR: Final = {0: 0.9, 1: 0.4}
"""By number of faults of a run: share of session puts that must be STORED."""
SAMPLE_MIN: Final = 40
"""Shares of fewer than so many requests say nothing."""
QUIET_TTLS: Final = 2.0
"""At the end of a run repair must have been quiet for so long."""


class InTime(Oracle):
    """P2."""

    law = "P2: every request ends by its deadline, on its node's clock; only a frozen node may be late"

    def _slack_ns(self, request: Request) -> float:
        """One tick and what may hold up a thread; the client's copy; the bytes of a put, which may take their time."""
        fill_ms = self.cluster.budget.ttl_ms / 4 if request.puts else 4.0
        return float(2 * self.cluster.tick_ms + self.cluster.lateness_ms + fill_ms) * MS

    def on_request(self, request: Request) -> None:
        process = self.cluster.processes[request.node]
        woken_ns = self.evidence.disturbed_ns.get(request.node, 0)
        if request.life != process.lives or not process.alive or process.paused:
            return
        if request.died:
            # A put without an answer may be one whose client vanished before its bytes were whole.
            if request.read and woken_ns < request.invoked_ns:
                self.broken(f"{request.told()} was never answered by a node that lives")
            return
        slack_ns = self._slack_ns(request)
        late_ns = request.local_returned_ns - request.local_ns - request.deadline_ms * MS
        if late_ns > slack_ns and request.returned_ns > woken_ns + slack_ns:
            self.broken(f"{request.told()} ended {late_ns / MS:.1f} ms after its deadline")

    def at_end(self) -> None:
        if self.history.open:
            self.broken(f"{next(iter(self.history.open.values())).told()} is still open")


class Agreement(Oracle):
    """P5."""

    law = "P5: after healing all live replicas have processed the same writes and hold the same versions"

    def at_end(self) -> None:
        for shard in sorted({shard_of(key) for key in self.history.by_key}):
            owner = self.evidence.owner(shard)
            if owner is None:
                continue
            vectors = {}
            for name in owner.replicas:
                vector = self.cluster.processes[name].core.put.stream.applied[shard]
                vectors[name] = {} if vector is None else vector.ranges
            if any(vector != vectors[owner.primary] for vector in vectors.values()):
                self.broken(f"shard {shard}: applied vectors differ at rest: {vectors}")
        for key in self.history.by_key:
            self._same(key)

    def _left_for_room(self, key: bytes, version: Version) -> bool:
        """May any node have given up this version for room? One that was read back later has forgotten that it was."""
        live = [process for process in self.cluster.processes.values() if process.alive]
        if any(process.core.state.directory.evictions for process in live):
            return True
        return any(process.core.state.directory.evicted_version(key) >= version for process in live)

    def _expired(self, name: str, entry: Any) -> bool:
        """Is it over, and only not swept yet?"""
        return bool(0 < entry.expiry_ms <= self.cluster.processes[name].core.state.wall_ms)

    def _same(self, key: bytes) -> None:
        entries = self.evidence.entries(key)
        held = {name: entry for name, entry in entries.items() if entry is not None and not self._expired(name, entry)}
        stamps = {(entry.version, int(entry.state), entry.checksum) for entry in held.values()}
        if len(stamps) > 1:
            told = {name: (tuple(entry.version), entry.state.name) for name, entry in held.items()}
            self.broken(f"key {key.hex()[16:24]} of shard {shard_of(key)} differs at rest: {told}")
        for name in entries:
            gone = self.cluster.processes[name].core.state.directory.evicted_version(key)
            for other, entry in held.items():
                if entry.version < gone:
                    what = f"{other} holds {tuple(entry.version)}, {name} had processed {tuple(gone)} and evicted it"
                    self.broken(f"key {key.hex()[16:24]}: {what}")
        if held and len(held) < len(entries) and key.startswith(SCOPE) and key not in self.cluster.damaged:
            newest = max(entry.version for entry in held.values())
            if self._left_for_room(key, newest):
                return  # whoever was primary then could not give it to those who joined later
            for name in entries.keys() - held.keys():
                directory = self.cluster.processes[name].core.state.directory
                gone = max(directory.evicted_version(key), directory.floors[shard_of(key)])
                if gone < newest:
                    self.broken(f"key {key.hex()[16:24]}: {name} lacks {tuple(newest)}, which {sorted(held)} hold")


class Settled(Oracle):
    """Everything comes to rest."""

    law = "after healing every shard has a working primary and full in-sync replicas, and nothing waits or is held"

    def at_end(self) -> None:
        processes = {name: p for name, p in self.cluster.processes.items() if p.alive}
        factor = min(self.cluster.options.factor, len(processes))
        for shard in sorted(self.evidence.changes):
            owner = self.evidence.owner(shard)
            assert owner is not None
            record = self.evidence.live(owner.primary)
            current = record is not None and not record.dead and record.epoch == owner.liveness_epoch
            if not current or not self.evidence.may_act(processes.get(owner.primary)):
                self.broken(f"shard {shard} has no working primary at rest: {owner}")
            if len(owner.replicas) < factor or set(owner.in_sync) != set(owner.replicas):
                self.broken(f"shard {shard} has not {factor} in-sync replicas at rest: {owner}")
        for name, process in processes.items():
            self._nothing_waits(name, process.core)

    def _nothing_waits(self, name: str, core: Any) -> None:
        put = core.put
        waiting = {
            "hints": put.hints.count(),
            "puts": len(put.ops),
            "reads": len(core.reads.ops),
            "stream messages": len(put.stream.flights),
            "comparisons": put.repair.lag(),
            "held references": sum(
                entry.slot.refs - 1 for table in core.state.directory.shards for entry in table.values() if entry.slot
            ),
        }
        for what, count in waiting.items():
            if count:
                self.broken(f"{name} still has {count} {what} at rest")


class Bounds(Oracle):
    """P8."""

    law = "P8: hints, tombstones, requests in progress and the arena stay within their bounds"

    EVERY: Final = 16

    def watch(self, passing: Passing) -> None:
        self._requests = 0
        passing.on_kind("life", lambda process, what: self._look(process) if what != "kill" else None)

    def on_request(self, request: Request) -> None:
        self._requests += 1
        if self._requests % self.EVERY == 0:
            self._look(self.cluster.processes[request.node])

    def _look(self, process: Any) -> None:
        core = process.core
        hints, directory, settings = core.put.hints, core.state.directory, core.state.settings
        used, size = process.tier.usage()
        for what, found, bound in (
            ("bytes of hints", hints.bytes, settings.hint_bytes_max),
            ("hints", len(hints.pending), HINTS_MAX),
            ("tombstones", directory.tombstones, directory.TOMBSTONES_MAX),
            ("evicted keys remembered", len(directory.evicted), directory.EVICTED_MEMORY_MAX),
            ("puts in progress", len(core.put.ops), OPS_MAX),
            ("reads in progress", len(core.reads.ops), OPS_MAX + 1),
            ("bytes of the arena", used, size),
        ):
            if found > bound:
                self.broken(f"{process.name} has {found} {what}, the bound is {bound}")


class NotTrivial(Oracle):
    """No trivial success."""

    law = "a cluster with no fault or one serves most of what it stored, and stores most of what it is given"

    def watch(self, passing: Passing) -> None:
        self._hits = self._asked = self._stored = self._put = 0

    def on_request(self, request: Request) -> None:
        if request.died or request.deadline_ms < PATIENT_MS:
            return
        for key, info in zip(request.keys, request.infos or (), strict=request.infos is not None):
            puts = self.history.by_key.get(key, ())
            acked = any(put.stored_ns < request.invoked_ns and not put.delete for put in puts)
            deleted = any(put.delete and put.invoked_ns < request.returned_ns for put in puts)
            if acked and not deleted and key.startswith(SCOPE) and info.reason != MissReason.EVICTED:
                self._asked += 1
                self._hits += info.reason == MissReason.NONE
        if request.puts and request.level is Level.SESSION and request.fresh and request.outcomes is not None:
            self._put += len(request.outcomes)
            self._stored += sum(outcome.status is PutStatus.STORED for outcome in request.outcomes)

    def at_end(self) -> None:
        options, faults = self.cluster.options, len(self.cluster.options.faults)
        if faults not in HIT_FLOOR or options.unknown_share or options.lost_fetch_share:
            return
        if self._asked >= SAMPLE_MIN and self._hits < HIT_FLOOR[faults] * self._asked:
            self.broken(f"{self._hits} of {self._asked} reads of stored blocks were hits, with {faults} faults")
        if self._put >= SAMPLE_MIN and self._stored < STORED_FLOOR[faults] * self._put:
            self.broken(f"{self._stored} of {self._put} session puts were stored, with {faults} faults")


class Quiet(Oracle):
    """Repair ends."""

    law = "when nothing happens, repair sends nothing"

    def watch(self, passing: Passing) -> None:
        self._last: tuple[float, str] = (-NEVER, "")
        passing.on_kind("repair", self._on_repair)

    def _on_repair(self, process: Any, sent: tuple[str, Any]) -> None:
        peer, message = sent
        if isinstance(message, Offer | Replicate):
            self._last = (self.cluster.now, f"{type(message).__name__} from {process.name} to {peer}")

    def at_end(self) -> None:
        when_ns, what = self._last
        ago_ms = (self.cluster.now - when_ns) / MS
        if ago_ms < QUIET_TTLS * self.cluster.budget.ttl_ms:
            self.broken(f"{what} was sent {ago_ms:.0f} ms before the end, long after all faults")


LIVENESS: tuple[type[Oracle], ...] = (
    InTime,
    Agreement,
    Settled,
    Bounds,
    NotTrivial,
    Quiet,
)
