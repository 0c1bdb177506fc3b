"""A whole cluster in one thread: real cores and the real runtime over virtual time, and what the outside may ask of it.

    cluster = Cluster(Options(), seed=1)
    cluster.run_ms(2000)                       # nodes start, join, take their shards
    cluster.put("a", [key_of(1)], [b"bytes"], level=Level.SESSION, done=print)
    cluster.run_ms(50)

Why it exists: the workload, the prober and the oracles (sim/workload.py, sim/oracles.py) see the cluster through this
file alone. Files below it: engine.py (time, chance, options), network.py (links, streams, reads between nodes),
coordinator.py (records, commits, watches, strong store), process.py (one life of a node: runtime, core, ports),
faults.py (what goes wrong, drawn up front). Above it: run.py (one seed), shrink.py, story.py.

What run.py expects of workload.py and oracles.py (both see only this API):

    history = History(cluster)                    sim/history.py: what clients asked and heard
    oracles = Oracles(cluster, history)           sim/oracles.py: subscribes with cluster.observe, raises Violation
    workload = Workload(cluster, history)         sim/workload.py: asks through cluster.put/get/strong
    workload.start()                              from now on, until ...
    workload.stop()                               ... no new requests; those under way end by themselves
    workload.open() -> int                        requests that have not ended
    oracles.on_healed()                           phase 2 begins: every fault has ended, dead nodes are back
    oracles.at_end()                              the cluster is at rest: raise Violation for what must hold now

Laws: `done` is called exactly once per request, never from inside the call that made it. Keys are internal (40 bytes).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from emberkv.core import events as ev
from emberkv.core.budget import Budget, Costs, plan
from emberkv.core.state import Settings
from emberkv.messages import BlockInfo, PutItem, PutReply
from emberkv.node.runtime import FetchOutcome, Place
from emberkv.ports import Slot
from emberkv.sim.coordinator import CommitSeen, SimCoordinator, SimStrongStore, Strong
from emberkv.sim.engine import MS, Engine, NodeClock, Options, Violation
from emberkv.sim.network import Network
from emberkv.sim.process import BROKEN, Ack, Process, fill
from emberkv.sim.strong import StrongNode
from emberkv.types import NO_VERSION, SHARDS, Level, PutOutcome, Version, checksum

SCOPE = b"scope..1"
"""Scope of the namespace that the workload uses (a namespace without a policy record)."""
CLIENT_MS = (0.01, 0.1)
"""Between a client and the node on its host, one way."""
SLOW_FILL_SHARE = 0.05
"""Share of puts whose bytes take long to arrive, up to the whole time that the client gave."""
BROKEN_PUT_SHARE = 0.01
"""Share of puts whose client vanishes before its bytes are whole."""
PIN_MS = (0.0, 3.0)
"""How long a client holds what it read."""
CLIENT_PATIENCE_MS = 20.0
"""After its deadline a client waits so much longer for the answer of a node."""
NODE_PATIENCE_MS = 130.0
"""A node that could act and has not answered by then is caught hanging."""

TICK_MS_MAX = 80.0
"""A real node ticks at least every 50 ms; here a little less often, since idle ticks are most of a long run."""

PutDone = Callable[[list[PutOutcome] | None], None]
"""Outcomes in the order of the keys; None: the process died, the connection broke or the client gave up first."""
GetDone = Callable[[list[BlockInfo] | None, list[bytes | None]], None]
"""Infos and bytes (None for misses); (None, []) as for a put."""
Observer = Callable[[str, Any, Any], None]
"""(kind, process or None, detail); kinds are listed at Cluster.observe."""
KINDS = ("event", "effect", "ack", "fault", "commit", "repair", "life", "late-bytes")


def key_of(number: int) -> bytes:
    """Internal key of the workload's block of this number."""
    return SCOPE + checksum(b"key%d" % number) * 2


def costs_of(options: Options) -> Costs:
    """What the simulated environment costs, in proportion to the budget."""
    budget = options.budget_ms
    return Costs(
        commit_ms=max(5.0, 0.02 * budget),
        watch_ms=max(3.0, 0.01 * budget),
        lateness_ms=max(8.0, 0.04 * budget),
        drift=options.drift,
        client_try_ms=max(20.0, 0.08 * budget),
        backoff_ms=max(5.0, 0.02 * budget),
    )


class NoFetcher:
    """The runtime's Fetcher is for its own synchronous driver; here reads between nodes are network.Reading."""

    def start(
        self,
        peer: str,
        keys: list[bytes],
        session: bool,
        deadline_ns: int,
        floors: Sequence[Version] = (),
        if_newer: bool = False,
        relay: bool = False,
    ) -> Any:
        """Never called."""
        raise AssertionError("a simulated read is driven by process.ReadDrive")

    def finish_all(self, pending: Sequence[Any], place: Place) -> list[FetchOutcome]:
        """Never called."""
        raise AssertionError("a simulated read is driven by process.ReadDrive")

    def exists(self, peer: str, keys: list[bytes], deadline_ns: int) -> list[int]:
        """Not simulated."""
        raise AssertionError("exists is not simulated")


class Call:
    """One request of a client: ends once."""

    __slots__ = ("begun_ns", "deadline_ms", "done", "ended", "lost", "node")

    def __init__(self, node: str, begun_ns: int, deadline_ms: float, done: Callable[..., None], lost: Any) -> None:
        self.node, self.begun_ns, self.deadline_ms = node, begun_ns, deadline_ms
        self.done, self.lost = done, lost
        self.ended = False

    def end(self, *result: Any) -> None:
        """The answer arrived, unless the client has left."""
        if not self.ended:
            self.ended = True
            self.done(*result)

    def lose(self) -> None:
        """No answer will come."""
        self.end(*self.lost)


class Cluster:
    """The cluster and its clients' door."""

    def __init__(self, options: Options, seed: int, *, start: bool = True) -> None:
        self.options = options
        self.engine = Engine(seed)
        self.rng_workload = self.engine.rng_workload
        self.names: tuple[str, ...] = options.names()
        costs = costs_of(options)
        self.budget: Budget = plan(options.budget_ms, costs)
        self.lateness_ms = costs.lateness_ms
        self.commit_deadline_ms = max(20.0, self.budget.ttl_ms / 6)
        self.tick_ms = min(costs.lateness_ms * 0.6, self.budget.ttl_ms / options.ticks_per_ttl, TICK_MS_MAX)
        self.tick_jitter = 0.5
        self.no_fetcher = NoFetcher()
        self.coordinator = SimCoordinator(self.engine, options)
        """`.records` (key -> ports.Record) is the truth; `.revision`."""
        self.coordinator.seen = self._committed
        self.strong_store = SimStrongStore()
        self.network = Network(self.engine, options)
        self.network.late = lambda process, text: self.tell("late-bytes", process, text)
        self.waivers: dict[str, int] = {}
        """Promise ('P3b', 'P6b', 'P6c', 'P4') -> true time from which the faults of this run excuse it."""
        self.damaged: set[bytes] = set()
        """Keys of which a copy was flipped in some node's memory: a copy dropped for that is no broken promise."""
        self._observers: dict[str, list[Observer]] = {kind: [] for kind in KINDS}
        self.event_observers = self._observers["event"]
        self.effect_observers = self._observers["effect"]
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self.processes: dict[str, Process] = {}
        """By name; a restart keeps the object. `.name .alive .paused .lives .clock .core .runtime .tier .woke_ns`"""
        for name in self.names:
            self.processes[name] = Process(self, name, self._clock())
        self.network.processes = self.processes
        self.observe(self._on_life, "life")
        if start:
            for process in self.processes.values():
                self.after(self.engine.between_ns(0, 5), self._first_start, process)

    def _first_start(self, process: Process) -> None:
        if not process.lives:
            process.start()

    def _clock(self) -> NodeClock:
        """Rates reach the ends of what is allowed."""
        rng, drift = self.engine.rng, self.options.drift
        rate = 1.0 + drift * rng.choice((-1.0, 1.0, rng.random() * 2 - 1))
        return NodeClock(self.engine, rng.randrange(10**12), rate)

    def times(self) -> dict[str, Any]:
        """The core's settings that all lives of all nodes share."""
        options, budget = self.options, self.budget
        values = {
            "factor": options.factor,
            "ttl_ns": int(budget.ttl_ms * MS),
            "drift": options.drift,
            "margin_ns": int(budget.margin_ms * MS),
            "commit_ns": int(budget.costs.commit_ms * MS),
            "hint_bytes_max": options.arena_slots * 4096 // 4,
            "hint_age_max_ns": int(options.tombstone_retention_ms * MS / 2),
            "tombstone_retention_ns": int(options.tombstone_retention_ms * MS),
            "block_bytes_max": 4096,
        }
        return {name: value for name, value in values.items() if name in Settings.__struct_fields__}

    # -- time ----------------------------------------------------------------------------------------------------

    @property
    def now(self) -> int:
        """True time, ns."""
        return self.engine.now

    def after(self, delay_ns: float, action: Callable[..., None], *arguments: Any) -> None:
        """Runs `action(*arguments)` later."""
        self.engine.after(delay_ns, action, *arguments)

    def run_ms(self, duration_ms: float) -> None:
        """Lets time pass."""
        self.engine.run_ms(duration_ms)

    def run_until(self, condition: Callable[[], bool], limit_ms: float, step_ms: float = 0.0) -> float | None:
        """Milliseconds until the condition holds, looked at every `step_ms` (default: one tick); None: it never did."""
        begun, step = self.now, step_ms or self.tick_ms
        while not condition():
            if self.now - begun >= limit_ms * MS:
                return None
            self.run_ms(step)
        return (self.now - begun) / MS

    # -- observers -----------------------------------------------------------------------------------------------

    def observe(self, observer: Observer, *kinds: str) -> None:
        """Calls `observer(kind, process, detail)` for these kinds (none named: all but 'event' and 'effect'):

        'event'      before a step: the ev.Event
        'effect'     after a step: each fx.Effect, Send included
        'ack'        a process.Ack: outcomes of a put as they leave a node, after the gate's second look
        'fault'      (text, Fault): something goes wrong, or ends
        'commit'     a coordinator.CommitSeen: what was truly written (process None: a restore)
        'repair'     (peer, message) as it is sent: Offer, Vector, Replicate with fill or surplus
        'life'       "start" | "kill" | "pause" | "vm-pause" | "wake"
        'late-bytes' text: bytes of a read that had ended arrived and were dropped
        """
        for kind in kinds or tuple(kind for kind in KINDS if kind not in ("event", "effect")):
            self._observers[kind].append(observer)

    def tell(self, kind: str, process: Process | None, detail: Any) -> None:
        """Something that observers may want to see."""
        for observer in self._observers[kind]:
            observer(kind, process, detail)

    def _committed(self, process: Process | None, commit: CommitSeen) -> None:
        self.tell("commit", process, commit)

    def _on_life(self, _: str, process: Process, what: str) -> None:
        if what != "kill":
            return
        for call in self._calls.values():
            if call.node == process.name:
                self.after(self.engine.between_ns(*CLIENT_MS), call.lose)

    def name_was_taken(self, process: Process) -> None:
        """A process ended because its name lives elsewhere; its operator starts it again later."""
        self.after(self.budget.ttl_ms * MS, self._start_again, process)

    def _start_again(self, process: Process) -> None:
        if not process.alive:
            process.start()

    def waive(self, promise: str) -> None:
        """From now on this run's faults excuse a promise."""
        self.waivers.setdefault(promise, self.now)

    # -- clients -------------------------------------------------------------------------------------------------

    def put(
        self,
        node: str,
        keys: Sequence[bytes],
        datas: Sequence[bytes] = (),
        *,
        level: Level = Level.SESSION,
        fresh: bool = True,
        min_copies: int = 1,
        deadline_ms: float = 500,
        seen: Sequence[Version] = (),
        delete: bool = False,
        put_ids: Sequence[bytes] = (),
        done: PutDone,
    ) -> None:
        """A client's put at a node: `seen` per key (default: none), `put_ids` of 24 bytes per key (or made here)."""
        count = len(keys)
        ids = put_ids or [b"client......put." + next(self._numbers).to_bytes(8, "big") for _ in range(count)]
        datas = [b""] * count if delete else datas
        items = [
            PutItem(key[8:], ident, len(data), b"\0" * 16, version)
            for key, ident, data, version in zip(keys, ids, datas, seen or [NO_VERSION] * count, strict=True)
        ]
        process = self.processes[node]
        call = self._call(process, deadline_ms, done, (None,))

        def arrived() -> None:
            now_ns = process.clock.now_ns()
            event = ev.PutBegin(
                now_ns,
                process.runtime.op(),
                list(keys),
                items,
                now_ns + int(deadline_ms * MS),
                level == Level.SESSION,
                fresh,
                min_copies,
                "",
                delete,
                level == Level.STRONG,
            )
            self._put(process, event, list(datas), call)

        self.after(self.engine.between_ns(*CLIENT_MS), process.run, process.lives, None, arrived)

    def _put(self, process: Process, event: ev.PutBegin, datas: list[bytes], call: Call) -> None:
        rng, life = self.engine.rng, process.lives

        def answered(reply: PutReply) -> None:
            process.acked(event, reply)
            self.after(self.engine.between_ns(*CLIENT_MS), call.end, reply.outcomes)

        dialogue = process.runtime.putting(event, answered)
        try:
            slots = next(dialogue)
        except StopIteration:
            return

        def bring() -> None:
            try:
                if broken:
                    dialogue.throw(BROKEN)
                sums = [item.checksum for item in event.items]
                dialogue.send(fill(process.tier, slots, [True] * len(slots), sums, datas))
            except StopIteration:
                pass
            except ConnectionError:
                call.lose()

        broken = rng.random() < BROKEN_PUT_SHARE
        slow = rng.random() < SLOW_FILL_SHARE
        pause = self.engine.between_ns(0, min(self.budget.ttl_ms / 4, call.deadline_ms) if slow else 0.5)
        self.after(pause, process.run, life, None, bring)

    def get(
        self,
        node: str,
        keys: Sequence[bytes],
        *,
        level: Level = Level.SESSION,
        floors: Sequence[Version] = (),
        verify: bool = True,
        local_only: bool = False,
        deadline_ms: float = 200,
        done: GetDone,
    ) -> None:
        """A client's read at a node; `floors` per key or empty. Bytes are copied while the client holds its pin."""
        process = self.processes[node]
        call = self._call(process, deadline_ms, done, (None, []))

        def found(infos: list[BlockInfo], slots: list[Slot | None]) -> None:
            tier, life = process.tier, process.lives
            held = [slot for slot in slots if slot is not None]

            def copied() -> None:
                if process.lives == life and process.alive:
                    call.end(infos, [tier.read(slot) if slot is not None else None for slot in slots])
                else:
                    call.lose()
                if held:
                    process.run(life, None, process.unref, held)

            self.after(self.engine.between_ns(*PIN_MS), copied)

        def arrived() -> None:
            process.read(
                list(keys),
                process.clock.now_ns() + int(deadline_ms * MS),
                session=level == Level.SESSION,
                local_only=local_only,
                verify=verify,
                floors=floors,
                done=found,
            )

        self.after(self.engine.between_ns(*CLIENT_MS), process.run, process.lives, None, arrived)

    def _call(self, process: Process, deadline_ms: float, done: Callable[..., None], lost: tuple[Any, ...]) -> Call:
        number = next(self._numbers)
        call = self._calls[number] = Call(process.name, self.now, deadline_ms, done, lost)
        if not process.alive:
            self.after(self.engine.between_ns(*CLIENT_MS), call.lose)
        wait_ms = deadline_ms * (1 + 2 * self.options.drift) + CLIENT_PATIENCE_MS
        self.after(wait_ms * MS, self._client_leaves, number, process)
        return call

    def _client_leaves(self, number: int, process: Process) -> None:
        """The client's own deadline: it does not wait for a node that was frozen meanwhile. A node that could act has
        to answer by itself, and gets all the time that its late loop may need."""
        call = self._calls[number]
        if call.ended or self._could_not_act(call, process):
            del self._calls[number]
            call.lose()
        else:
            self.after((NODE_PATIENCE_MS + 4 * self.lateness_ms) * MS, self._give_up, number, process)

    def _could_not_act(self, call: Call, process: Process) -> bool:
        return not process.alive or process.paused or process.woke_ns >= call.begun_ns

    def _give_up(self, number: int, process: Process) -> None:
        call = self._calls.pop(number)
        if not call.ended and not self._could_not_act(call, process):
            late_ms = (self.now - call.begun_ns) / MS - call.deadline_ms
            raise Violation(f"P2: {process.name} has not ended a request {late_ms:.0f} ms after its deadline")
        call.lose()

    def strong(self, node: str) -> StrongNode:
        """Strong records as this node serves them: get and put, each with `deadline_ms` and `done`."""
        process = self.processes[node]
        return StrongNode(Strong(self.strong_store, self.coordinator, process), process.clock.now_ns)

    # -- what holds ----------------------------------------------------------------------------------------------

    def primary(self, shard: int) -> str | None:
        """The live node whose gate for the shard is open now; Violation when there are two and no waiver."""
        found = [name for name, process in self.processes.items() if process.alive and gate_open(process, shard)]
        if len(found) > 1 and "P3b" not in self.waivers:
            raise Violation(f"P3b: shard {shard} has open gates at {found}")
        return found[0] if found else None

    def settled(self) -> bool:
        """Does every shard have a primary that may act?"""
        open_now = [process for process in self.processes.values() if process.alive and not process.paused]
        served = [0] * SHARDS
        for process in open_now:
            if process.core.lease.open(process.clock.now_ns()):
                for shard, epoch in enumerate(process.core.state.view.primary_epoch):
                    served[shard] |= epoch
        return all(served)


def gate_open(process: Process, shard: int) -> bool:
    """May this node acknowledge session puts of the shard at this moment, by its own clock?"""
    core = process.core
    return bool(core.state.view.primary_epoch[shard]) and core.lease.open(process.clock.now_ns())


__all__ = ["NO_VERSION", "SCOPE", "Ack", "Cluster", "GetDone", "Observer", "Options", "PutDone", "gate_open", "key_of"]
