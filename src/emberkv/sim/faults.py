"""What goes wrong in a run: drawn from the seed before it begins, performed at its time, ended by itself or by healing.

Laws: a fault is plain data (engine.Fault), so that a failing run can be repeated without it; performing one draws only
from the faults' own stream of chance. Faults overlap and are counted, so that the end of one does not end another.
Whatever a fault excuses (a paused virtual machine, a restored backup) is stated as a waiver when it begins.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from emberkv.core.budget import plan
from emberkv.core.view import DRAIN_PREFIX, encode_record
from emberkv.messages import DrainRecord
from emberkv.ports import Write
from emberkv.sim.cluster import Cluster, costs_of
from emberkv.sim.engine import MS, Fault, Options
from emberkv.sim.network import Link

Undo = Callable[[], None]
CRASH_SHARE = 0.7
"""Share of runs that end with a crash whose outage is measured."""
RESTORE_OUTAGE_TTLS = 1.4
"""Before a backup is put in place, the store stays away until every lease has run out; whoever recovers one has to wait
for as long."""


class Faults:
    """Performs a schedule on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.rng = cluster.engine.rng_faults
        self._active: dict[int, tuple[Fault, Undo]] = {}
        self._count = 0
        self.begun: list[tuple[int, Fault]] = []
        """(true time, fault) of all that have begun."""

    def schedule(self, faults: tuple[Fault, ...]) -> None:
        """Everything at its time, from now on."""
        for fault in faults:
            self.cluster.after(fault.at_ms * MS, self.begin, fault)

    def begin(self, fault: Fault) -> None:
        """Now."""
        self._count += 1
        number = self._count
        self.begun.append((self.cluster.now, fault))
        self.cluster.tell("fault", None, (fault.text(), fault))
        undo = KINDS[fault.kind](self, fault)
        if undo is None:
            return
        self._active[number] = (fault, undo)
        if fault.for_ms:
            self.cluster.after(fault.for_ms * MS, self.end, number)

    def end(self, number: int) -> None:
        """One fault is over."""
        found = self._active.pop(number, None)
        if found is not None:
            fault, undo = found
            self.cluster.tell("fault", None, (f"end of {fault.text()}", fault))
            undo()

    def active(self) -> bool:
        """Is anything still wrong?"""
        return bool(self._active)

    def heal(self, *, spare: str = "") -> None:
        """Everything is over now; a dead node named `spare` stays dead."""
        for number in list(self._active):
            fault, _ = self._active[number]
            if fault.kind == "crash" and fault.node == spare:
                del self._active[number]
            else:
                self.end(number)
        for name, process in self.cluster.processes.items():
            if process.alive and process.paused:
                process.wake()
            if not process.alive and name != spare:
                process.start()

    # -- processes -----------------------------------------------------------------------------------------------

    def crash(self, fault: Fault) -> Undo:
        """flag: it comes back with its data directory; amount 1: its host went too, so that peers hear nothing."""
        process = self.cluster.processes[fault.node]
        process.kill(silent=fault.amount > 0)
        life = process.lives

        def start() -> None:
            if not process.alive and process.lives == life:
                process.start(proof=fault.flag)

        return start

    def pause(self, fault: Fault) -> Undo:
        """SIGSTOP."""
        return self._pause(fault, machine=False)

    def vm_pause(self, fault: Fault) -> Undo:
        """A virtual machine stands still, and its clock with it."""
        self.cluster.waive("P3b")
        return self._pause(fault, machine=True)

    def _pause(self, fault: Fault, *, machine: bool) -> Undo:
        process = self.cluster.processes[fault.node]
        if process.paused:
            return lambda: None
        process.pause(machine=machine)
        life = process.lives

        def wake() -> None:
            if process.lives == life:
                process.wake()

        return wake

    def wall_jump(self, fault: Fault) -> None:
        """The wall clock jumps by `amount` ms, either way."""
        self.cluster.processes[fault.node].clock.wall_offset_ms += int(fault.amount)

    def flip(self, fault: Fault) -> None:
        """A byte changes in each of `amount` stored blocks, none that a reader has verified and holds."""
        process = self.cluster.processes[fault.node]
        if not process.alive:
            return
        tables = process.core.state.directory.shards
        entries = [e for table in tables for e in table.values() if e.slot and e.length and e.slot.refs == 1]
        for entry in self.rng.sample(entries, min(int(fault.amount), len(entries))):
            assert entry.slot is not None
            place = process.tier.bytes[entry.slot.offset]
            place[self.rng.randrange(len(place))] ^= 1 + self.rng.randrange(255)
            self.cluster.damaged.add(entry.key)

    # -- network -------------------------------------------------------------------------------------------------

    def _block(self, pairs: list[tuple[str, str]], *, clog: bool = False) -> Undo:
        network = self.cluster.network
        links = [network.link(source, target) for source, target in pairs]

        def count(by: int) -> None:
            for link in links:
                if clog:
                    link.clogged += by
                else:
                    link.cut += by
                network.freed(link)

        count(1)
        return lambda: count(-1)

    def _others(self, *names: str) -> list[str]:
        return [name for name in self.cluster.names if name not in names]

    def cut(self, fault: Fault) -> Undo:
        """Both directions between two nodes; flag: one only."""
        pairs = [(fault.node, fault.other)]
        return self._block(pairs if fault.flag else [*pairs, (fault.other, fault.node)])

    def isolate(self, fault: Fault) -> Undo:
        """A node hears no other node (and, without the flag, is not heard); it still reaches the coordinator."""
        others = self._others(fault.node)
        pairs = [(name, fault.node) for name in others]
        return self._block(pairs if fault.flag else [*pairs, *((fault.node, name) for name in others)])

    def split(self, fault: Fault) -> Undo:
        """Two nodes on one side, the rest on the other; flag: that side loses the coordinator, too."""
        side = (fault.node, fault.other)
        rest = self._others(*side)
        undo = self._block([pair for a in side for b in rest for pair in ((a, b), (b, a))])
        if not fault.flag:
            return undo
        undos = [undo, *(self._away(name, one_way=False) for name in side)]

        def undo_all() -> None:
            for action in undos:
                action()

        return undo_all

    def flap(self, fault: Fault) -> Undo:
        """A link that goes and comes every `amount` ms."""
        pairs = [(fault.node, fault.other), (fault.other, fault.node)]
        ended: list[bool] = []
        now: list[Undo] = []

        def turn() -> None:
            if now:
                now.pop()()
            elif not ended:
                now.append(self._block(pairs))
            if not ended:
                self.cluster.after(fault.amount * MS * (0.5 + self.rng.random()), turn)

        def stop() -> None:
            ended.append(True)
            if now:
                now.pop()()

        turn()
        return stop

    def clog(self, fault: Fault) -> Undo:
        """What is sent one way is delivered when it ends."""
        return self._block([(fault.node, fault.other)], clog=True)

    def slow(self, fault: Fault) -> Undo:
        """A direction takes `amount` times as long."""
        link: Link = self.cluster.network.link(fault.node, fault.other)
        link.slower *= fault.amount

        def undo() -> None:
            link.slower /= fault.amount

        return undo

    # -- coordinator ---------------------------------------------------------------------------------------------

    def _notice(self) -> None:
        for access in self.cluster.coordinator.accesses:
            access.notice()

    def _away(self, name: str, *, one_way: bool) -> Undo:
        process = self.cluster.processes[name]
        process.away += 1
        process.away_one_way = one_way

        def undo() -> None:
            process.away -= 1
            self._notice()

        return undo

    def away(self, fault: Fault) -> Undo:
        """A node does not reach the coordinator; flag: its requests arrive and the answers do not."""
        return self._away(fault.node, one_way=fault.flag)

    def outage(self, fault: Fault) -> Undo:
        """Nobody reaches the coordinator."""
        coordinator = self.cluster.coordinator
        coordinator.down += 1

        def undo() -> None:
            coordinator.down -= 1
            self._notice()

        return undo

    def slow_coordinator(self, fault: Fault) -> Undo:
        """Everything with it takes `amount` times as long."""
        coordinator = self.cluster.coordinator
        coordinator.slower *= fault.amount

        def undo() -> None:
            coordinator.slower /= fault.amount

        return undo

    def unknown(self, fault: Fault) -> Undo:
        """Of so many commits nobody learns the outcome: applied, not applied, or applied late."""
        coordinator = self.cluster.coordinator
        before, coordinator.unknown_share = coordinator.unknown_share, fault.amount

        def undo() -> None:
            coordinator.unknown_share = min(before, self.cluster.options.unknown_share)

        return undo

    def silent(self, fault: Fault) -> Undo:
        """A node's watch delivers nothing and says nothing."""
        process = self.cluster.processes[fault.node]
        process.silent += 1

        def undo() -> None:
            process.silent -= 1
            self._notice()

        return undo

    def compact(self, fault: Fault) -> None:
        """The history is cut; whoever is behind must list."""
        self.cluster.coordinator.compact()
        self._notice()

    def stale(self, fault: Fault) -> Undo:
        """Lists are up to `amount` ms old, though they claim to be linearizable; watches must begin anew."""
        coordinator = self.cluster.coordinator
        coordinator.stale_ms = fault.amount
        self.compact(fault)

        def undo() -> None:
            coordinator.stale_ms = 0.0

        return undo

    def restore(self, fault: Fault) -> Undo:
        """The store is lost and put back from a backup that was `amount` ms old when it went."""
        coordinator = self.cluster.coordinator
        for promise in ("P4", "P6b", "P6c"):
            self.cluster.waive(promise)
        down = self.outage(fault)
        begun = self.cluster.now

        def undo() -> None:
            coordinator.restore(fault.amount + (self.cluster.now - begun) / MS)
            down()

        return undo

    def drain(self, fault: Fault) -> Undo:
        """The operator drains a node, and changes his mind."""
        process, coordinator = self.cluster.processes[fault.node], self.cluster.coordinator
        key = DRAIN_PREFIX + fault.node
        coordinator.commit(None, [], [Write(key, encode_record(DrainRecord(process.incarnation)))])

        def undo() -> None:
            if key in coordinator.records:
                coordinator.commit(None, [], [Write(key, None)])

        return undo


KINDS: dict[str, Callable[[Faults, Fault], Undo | None]] = {
    "crash": Faults.crash,
    "pause": Faults.pause,
    "vm-pause": Faults.vm_pause,
    "wall-jump": Faults.wall_jump,
    "flip": Faults.flip,
    "cut": Faults.cut,
    "isolate": Faults.isolate,
    "split": Faults.split,
    "flap": Faults.flap,
    "clog": Faults.clog,
    "slow": Faults.slow,
    "away": Faults.away,
    "outage": Faults.outage,
    "slow-coordinator": Faults.slow_coordinator,
    "unknown": Faults.unknown,
    "silent": Faults.silent,
    "compact": Faults.compact,
    "stale": Faults.stale,
    "restore": Faults.restore,
    "drain": Faults.drain,
}
PAIRED = frozenset({"cut", "split", "flap", "clog", "slow"})
"""Kinds that name two nodes."""
FREQUENT = ("crash", "crash", "pause", "cut", "isolate", "away", "unknown")
"""Drawn more often than the others: they meet most of the code."""


# -- drawing ---------------------------------------------------------------------------------------------------------


def draw(seed: int, *, seconds: float = 20.0) -> Options:
    """A world and its faults, all from the seed. `seconds`: virtual time of a usual run, with a budget of a second."""
    rng = random.Random(f"{seed}/draw")
    nodes = rng.choice((3, 3, 3, 4, 5))
    budget_ms = rng.choices((500.0, 1000.0, 3000.0, 10_000.0), (3, 4, 2, 1))[0]
    slow_link = rng.choice((0.3, 1.0, 1.0, 3.0))
    options = Options(
        nodes=nodes,
        factor=rng.choice((2, 2, 3)),
        budget_ms=budget_ms,
        drift=rng.choice((0.0, 0.001, 0.01)),
        arena_slots=rng.choice((24, 48, 512, 512, 512)),
        keys=rng.choice((4, 12, 40)),
        requests_per_s=rng.choice((10.0, 20.0, 30.0)) * min(1.0, 2000.0 / budget_ms),
        delay_ms=(0.05, slow_link),
        coordinator_ms=(0.2, rng.choice((1.0, 2.0))),
        tcp_timeout_ms=budget_ms * rng.choice((0.1, 0.4, 1.5)),
        preempt_share=rng.choice((0.0, 0.0, 0.05, 0.3)),
        lost_fetch_share=rng.choice((0.0, 0.0, 0.02, 0.2)),
        twice_share=rng.choice((0.0, 0.1)),
        queue_max=rng.choice((8, 1024, 1024)),
        ticks_per_ttl=rng.choice((15, 30)),
        tombstone_retention_ms=rng.choice((3_600_000.0, 3_600_000.0, budget_ms * 6, budget_ms * 2.5)),
        crash_at_end=rng.random() < CRASH_SHARE,
        phase1_ms=max(seconds * 400.0 * min(1.0, budget_ms / 1000.0), 2.5 * budget_ms),
    )
    return replace_faults(options, tuple(draw_faults(rng, options)))


def replace_faults(options: Options, faults: tuple[Fault, ...]) -> Options:
    """The same world under other faults."""
    fields = {name: getattr(options, name) for name in options.__struct_fields__}
    return Options(**fields | {"faults": faults})


def draw_faults(rng: random.Random, options: Options) -> list[Fault]:
    """None, one, or several of a few kinds that this seed allows."""
    profile = rng.random()
    if profile < 0.06:
        return []
    enabled = rng.sample(sorted(KINDS), rng.randint(2, 8)) + [rng.choice(FREQUENT)] * 2
    if profile < 0.3:
        return [draw_fault(rng, options, rng.choice([*FREQUENT, *enabled]))]
    count = rng.randint(2, 8)
    faults = [draw_fault(rng, options, rng.choice(enabled)) for _ in range(count)]
    return sorted(faults, key=lambda fault: fault.at_ms)


def draw_fault(rng: random.Random, options: Options, kind: str) -> Fault:
    """One fault: where, when, for how long."""
    ttl_ms = plan(options.budget_ms, costs_of(options)).ttl_ms
    node, other = rng.sample(options.names(), 2)
    at_ms = rng.random() * 0.8 * options.phase1_ms
    for_ms = ttl_ms * 0.1 * 60 ** rng.random()
    amount, flag = 0.0, rng.random() < 0.5
    if kind == "crash":
        amount, flag = float(rng.random() < 0.3), rng.random() < 0.7
        for_ms = rng.choice((0.0, for_ms, ttl_ms * 0.2 * rng.random()))
    elif kind == "wall-jump":
        amount = rng.choice((-1, 1)) * 10 ** (2 + 5 * rng.random())
    elif kind == "flap":
        amount = 2 + rng.random() * ttl_ms / 2
    elif kind in ("slow", "slow-coordinator"):
        amount = 2 * 20 ** rng.random()
    elif kind == "flip":
        amount = float(rng.choice((1, 4, 16)))
    elif kind == "unknown":
        amount = rng.choice((0.1, 0.3, 0.6))
    elif kind in ("stale", "restore"):
        amount = rng.random() * 3 * ttl_ms
    if kind == "restore":
        for_ms = ttl_ms * RESTORE_OUTAGE_TTLS + rng.random() * ttl_ms
        at_ms = min(at_ms, max(0.0, options.phase1_ms - for_ms - ttl_ms))
    if kind in ("flip", "compact", "wall-jump"):
        for_ms = 0.0
    return Fault(at_ms, kind, node, other if kind in PAIRED else "", for_ms, amount, flag)
