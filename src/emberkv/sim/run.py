"""One seed, one run: faults and requests, then healing, then proof that the cluster came to rest and still fails over.

    STARTING --every shard served--> PHASE 1 (faults, requests; safety) --heal--> SETTLING --every shard served-->
    WORKING (requests, no faults) --no more requests--> RESTING (P5) --quiet--> AT REST --crash--> OUTAGE (P4) --> done

Laws: a run is a pure function of (seed, options); safety is judged at every step, progress only after healing; an error
of the code under test ends the run like a broken promise does.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import msgspec
import xxhash

from emberkv.core import placement
from emberkv.core.lease import Phase
from emberkv.core.merge import AppliedVector
from emberkv.core.view import HEARTBEAT_PREFIX
from emberkv.errors import EmberError
from emberkv.sim.cluster import Cluster
from emberkv.sim.engine import MS, Fault, Options, Violation
from emberkv.sim.faults import Faults, draw
from emberkv.sim.history import History
from emberkv.sim.oracles import Oracles
from emberkv.sim.prober import Prober
from emberkv.sim.story import Story
from emberkv.sim.workload import Workload
from emberkv.types import SHARDS

START_LIMIT_MS = 30_000.0
"""A cluster whose nodes all start must serve every shard within so long."""
WORK_TTLS = 1.5
"""How long requests go on after healing."""
QUIET_TTLS = 1.5
"""How long the cluster is then left alone before it is judged: with the calm before, over two leases of silence."""
CALM_ROUNDS = 2.2
"""Heartbeats without repair or rebalance after which nothing is under way."""
DOUBLE_SHARE = 0.25
"""Share of the crashes at the end at which the coordinator goes out as well, for up to a budget (E of P4)."""
SPARED_SHARE = 0.25
"""Share of runs in which one dead node stays dead when the rest is healed."""
SETTLE_BUDGETS = 3.0
"""After healing, every shard is served within so many budgets (a double fault takes two; starting takes one)."""
RESTORED_MS = 12_000.0
"""A backup from before the first owner records makes the cluster start anew, and a first start waits for the members
that it expects (failover.FIRST_START_PATIENCE_NS)."""
AGREE_HEARTBEATS = 2.0
"""Two repair rounds: a shard that a reconcile has changed is compared at the latest a heartbeat later."""
TRANSFER_MS = 500.0
"""What the filling of a replica may take on top, many pages of heads and bytes."""
COLLECTOR = (50_000, 50, 1000)
"""Thresholds of the cyclic collector during a run, which frees nearly all by reference counts: with the usual ones it
takes a quarter of the time."""
BUGS = (AssertionError, EmberError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""What ends a run: a Violation is an AssertionError; everything else here is a bug of the code under test."""


class Outcome(msgspec.Struct):
    """What became of one run."""

    seed: int
    violation: str = ""
    """One line; empty: nothing was found."""
    phase: str = ""
    """Where the run ended."""
    steps: int = 0
    """Steps of all cores."""
    virtual_ms: float = 0.0
    wall_s: float = 0.0
    outage_ms: float = -1.0
    """Of the crash at the end; -1: not measured."""
    budget_ms: float = 0.0
    bound_ms: float = 0.0
    """What the outage may take: the budget, and E with its grace when the coordinator was lost at the same time."""
    settle_ms: float = -1.0
    """From healing until every shard was served and every node connected."""
    agree_ms: float = -1.0
    """From then until all live replicas of every shard had processed the same writes."""
    rest_ms: float = -1.0
    """From the last request until nothing was under way, all shards where placement proposes them."""
    faults: int = 0
    waived: tuple[str, ...] = ()
    hits: int = 0
    stored: int = 0
    digest: str = ""
    """Of all events and effects, when traced."""

    @property
    def outage_within_budget(self) -> bool | None:
        """P4; None when it was not measured."""
        return None if self.outage_ms < 0 else self.outage_ms <= self.bound_ms


def run_seed(seed: int, options: Options | None = None, *, story: Story | None = None, trace: bool = False) -> Outcome:
    """Runs one seed; `options` replaces what the seed would draw, `story` listens, `trace` computes the digest."""
    begun_s = time.perf_counter()
    run = Run(seed, options or draw(seed), story, trace=trace)
    thresholds = gc.get_threshold()
    gc.set_threshold(*COLLECTOR)
    try:
        run.perform()
    except BUGS as error:
        run.outcome.violation = told(error)
    finally:
        gc.set_threshold(*thresholds)
    outcome = run.outcome
    outcome.steps = sum(process.steps for process in run.cluster.processes.values())
    outcome.virtual_ms = (run.cluster.now - run.begun_ns) / MS
    outcome.wall_s = time.perf_counter() - begun_s
    outcome.waived = tuple(sorted(run.cluster.waivers))
    outcome.digest = run.digest.hexdigest() if trace else ""
    if story is not None and outcome.violation:
        story.violated(run.cluster.now, outcome.violation)
    return outcome


def told(error: BaseException) -> str:
    """One line about what ended a run; a bug says where it stands."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, Violation):
        return text
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = ""
    if trace is not None:
        name = trace.tb_frame.f_code.co_filename.rpartition("emberkv/")[2]
        where = f" ({name}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {text}{where}"


class Run:
    """One run, phase by phase."""

    def __init__(self, seed: int, options: Options, story: Story | None, *, trace: bool) -> None:
        self.options = options
        self.cluster = Cluster(options, seed)
        self.faults = Faults(self.cluster)
        self.history = History(self.cluster)
        self.begun_ns = self.cluster.now
        self.outcome = Outcome(seed, budget_ms=options.budget_ms, faults=len(options.faults))
        self.digest = xxhash.xxh3_128()
        self._stirred_ns = 0
        """True time of the last repair message or change of an owner record."""
        self.cluster.observe(self._on_stir, "repair", "commit")
        if story is not None:
            story.listen(self.cluster, self.history)
        if trace:
            self.cluster.observe(self._trace, "event", "effect", "ack", "life")
        self.oracles = Oracles(self.cluster, self.history)
        self.workload = Workload(self.cluster, self.history)

    def _trace(self, kind: str, process: object, detail: object) -> None:
        name = getattr(process, "name", "")
        self.digest.update(f"{self.cluster.now} {name} {kind} {type(detail).__name__}".encode())
        if kind in ("event", "effect"):
            self.digest.update(msgspec.json.encode(detail, enc_hook=repr))

    def _on_stir(self, kind: str, _: object, detail: Any) -> None:
        if kind == "repair" or any(not write.key.startswith(HEARTBEAT_PREFIX) for write in detail.writes):
            self._stirred_ns = self.cluster.now

    def perform(self) -> None:
        """Everything, in order. Raises Violation, or whatever the code under test raises."""
        self._start()
        self._storm()
        spare = self._heal()
        self._settle()
        self._agree()
        self._work()
        self._rest()
        self.outcome.phase = "at rest"
        self._check_sums()
        self.oracles.at_end()
        if self.options.crash_at_end:
            self._crash(spare)
        self.outcome.phase = "done"

    def _start(self) -> None:
        self.outcome.phase = "starting"
        if self.cluster.run_until(self.cluster.settled, START_LIMIT_MS) is None:
            raise Violation(f"the cluster did not serve every shard {START_LIMIT_MS / 1000:.0f} s after its start")

    def _storm(self) -> None:
        self.outcome.phase = "phase 1"
        self.workload.start()
        self.faults.schedule(self.options.faults)
        self.cluster.run_ms(self.options.phase1_ms)

    def _heal(self) -> str:
        """Ends all faults; returns the name of a dead node that stays dead, or nothing."""
        self.outcome.phase = "healed"
        cluster = self.cluster
        self.workload.stop()
        dead = [name for name, process in cluster.processes.items() if not process.alive]
        spare = dead[0] if dead and cluster.engine.rng_faults.random() < SPARED_SHARE else ""
        self.faults.heal(spare=spare)
        self.oracles.on_healed()
        return spare

    def _settle(self) -> None:
        """P4, coarsely: every shard is served, every live node is a member and connected to the others."""
        self.outcome.phase = "settling"
        limit_ms = SETTLE_BUDGETS * self.options.budget_ms
        if "P4" in self.cluster.waivers:
            limit_ms += RESTORED_MS
        found = self.cluster.run_until(lambda: self.cluster.settled() and apart(self.cluster) == "", limit_ms)
        if found is None:
            why = apart(self.cluster) or f"{self._unserved()} shards have no working primary"
            raise Violation(f"P4: {why}, {limit_ms:.0f} ms after healing")
        self.outcome.settle_ms = found

    def _unserved(self) -> int:
        cluster = self.cluster
        return sum(cluster.primary(shard) is None for shard in range(SHARDS))

    def _agree(self) -> None:
        """P5: with every shard served and every stream up, replicas have soon processed the same writes."""
        self.outcome.phase = "agreeing"
        cluster = self.cluster
        limit_ms = AGREE_HEARTBEATS * cluster.budget.heartbeat_ms + TRANSFER_MS
        found = cluster.run_until(lambda: disagreement(cluster) == "", limit_ms)
        if found is None:
            raise Violation(f"P5: {disagreement(cluster)}, {limit_ms:.0f} ms after every shard was served again")
        self.outcome.agree_ms = found

    def _work(self) -> None:
        """Progress: requests go on in the healed cluster, and every one of them ends."""
        self.outcome.phase = "working"
        cluster = self.cluster
        self.workload.start()
        cluster.run_ms(WORK_TTLS * cluster.budget.ttl_ms)
        self.workload.stop()
        if cluster.run_until(lambda: not self.workload.open(), 20_000.0) is None:
            raise Violation(f"P2: {self.workload.open()} requests have not ended 20 s after the last was asked")

    def _rest(self) -> None:
        """Repair and rebalance go in rounds of a heartbeat: only when two of them have passed with nothing to do is the
        cluster at rest, since the last thing that was done."""
        self.outcome.phase = "resting"
        cluster, begun_ns = self.cluster, self.cluster.now
        limit_ms = self.options.quiet_ttls * cluster.budget.ttl_ms
        calm_ns = int(CALM_ROUNDS * cluster.budget.heartbeat_ms * MS)

        def at_rest() -> bool:
            return cluster.now - self._stirred_ns > calm_ns and unrest(cluster) == ""

        if cluster.run_until(at_rest, limit_ms, step_ms=cluster.budget.heartbeat_ms / 3) is None:
            why = unrest(cluster) or "repair or rebalance is still busy"
            raise Violation(f"P5: {why}, {limit_ms:.0f} ms after the last request of a healed cluster")
        self.outcome.rest_ms = max(0.0, (self._stirred_ns - begun_ns) / MS)
        self.outcome.phase = "quiet"
        cluster.run_ms(QUIET_TTLS * cluster.budget.ttl_ms)

    def _check_sums(self) -> None:
        """Each slot's references are exactly those of the entries: nobody else holds any at rest."""
        for process in self.cluster.processes.values():
            if not process.alive:
                continue
            process.check()
            refs: dict[int, int] = {}
            for table in process.core.state.directory.shards:
                for entry in table.values():
                    if entry.slot is not None:
                        refs[entry.slot.offset] = refs.get(entry.slot.offset, 0) + 1
            found = {offset: slot.refs for offset, slot in process.tier.slots.items()}
            if found != refs:
                leaked = sorted(offset for offset in found if found[offset] != refs.get(offset, 0))
                raise Violation(f"{process.name} holds {len(leaked)} slots at rest that no entry owns: {leaked[:4]}")

    def _crash(self, spare: str) -> None:
        """P4, as a client measures it: all is well, then one node is gone, sometimes with the coordinator."""
        self.outcome.phase = "crash"
        cluster, rng = self.cluster, self.cluster.engine.rng_faults
        alive = [name for name, process in cluster.processes.items() if process.alive]
        if len(alive) < 2 or self.options.factor < 2 or (spare and len(alive) <= self.options.factor - 1):
            return
        victim, silent = rng.choice(alive), rng.random() < 0.3
        bound_ms = self.options.budget_ms
        prober = Prober(cluster, victim)
        if rng.random() < DOUBLE_SHARE:
            election_ms = rng.random() * self.options.budget_ms
            # After the coordinator's own outage nobody is expired before the grace of own successful commits.
            bound_ms += election_ms + cluster.budget.ttl_ms / 3 + 2 * cluster.budget.costs.commit_ms
            self.faults.begin(Fault(0.0, "outage", for_ms=election_ms))
        cluster.processes[victim].kill(silent=silent)
        prober.start(bound_ms)
        cluster.run_until(prober.ended, 10 * bound_ms)
        self.outcome.outage_ms, self.outcome.bound_ms = prober.outage_ms(), bound_ms
        if not self.outcome.outage_within_budget:
            missing = [shard for shard in prober.shards if shard not in prober.acked_ms]
            raise Violation(
                f"P4: {victim} was lost and session puts were out for {self.outcome.outage_ms:.0f} ms, "
                f"over the {bound_ms:.0f} ms allowed (shards never acknowledged: {missing})"
            )


def apart(cluster: Cluster) -> str:
    """Which live node is no member, or not connected to all others; empty when all are."""
    live = {name: process for name, process in cluster.processes.items() if process.alive}
    for name, process in live.items():
        if process.core.lease.phase is not Phase.MEMBER:
            return f"{name} is {process.core.lease.phase.value}"
        missing = live.keys() - process.core.state.peers_up - {name}
        if missing:
            return f"{name} is not connected to {min(missing)}"
    return ""


def disagreement(cluster: Cluster) -> str:
    """Which replicas of a shard have not processed the same writes; empty when all that live have."""
    live = {name: process for name, process in cluster.processes.items() if process.alive}
    for name, process in live.items():
        view = process.core.state.view
        mine = process.core.put.stream.applied
        for shard, epoch in enumerate(view.primary_epoch):
            owner = view.owners[shard]
            if not epoch or owner is None:
                continue
            ranges = ranges_of(mine[shard])
            for peer in owner.replicas:
                if peer in live and ranges_of(live[peer].core.put.stream.applied[shard]) != ranges:
                    return f"{peer} has not processed what {name} has of shard {shard}"
    return ""


def ranges_of(vector: AppliedVector | None) -> dict[int, list[list[int]]]:
    """What a vector covers; one that does not exist yet covers nothing."""
    return vector.ranges if vector is not None else {}


def unrest(cluster: Cluster) -> str:
    """What is still under way, in words; empty when nothing is."""
    live = {name: process for name, process in cluster.processes.items() if process.alive}
    if not cluster.settled():
        return "some shards have no primary"
    for name, process in live.items():
        put = process.core.put
        waits = {
            "hints": put.hints.count(),
            "puts": len(put.ops),
            "reads": len(process.core.reads.ops),
            "unanswered stream messages": len(put.stream.flights),
            "comparisons of replicas": put.repair.lag(),
        }
        for what, count in waits.items():
            if count:
                return f"{name} still has {count} {what}"
    for process in live.values():
        view = process.core.state.view
        homes = [node for node in view.live_nodes() if not view.is_draining(node)] or view.live_nodes()
        for shard, owner in enumerate(view.owners):
            if owner is None or not view.primary_epoch[shard]:
                continue
            ideal = placement.ranked(shard, homes)[: cluster.options.factor]
            if set(owner.in_sync) != set(owner.replicas):
                return f"shard {shard} has not all replicas in sync: {owner.in_sync} of {owner.replicas}"
            if owner.primary != ideal[0] or set(owner.replicas) != set(ideal):
                return f"shard {shard} is at {owner.replicas}, not where placement proposes it: {ideal}"
    return ""
