"""A whole cluster in one thread: real cores, virtual time, a seeded network, and effects performed truly.

    world = World(["a", "b", "c"], seed=1); world.run_ms(2000)
    op = world.put("a", [key], [b"bytes"], session=True); world.run_ms(500); world.results[op]

Laws: the same seed gives the same run. Payload is copied when it is delivered, not when it is sent, so a slot that is
reused too early shows as wrong bytes. After every step the directory and the tier are checked; `account()` proves that
each slot's references are exactly those that somebody is known to hold.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import Any

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.view import DRAIN_PREFIX, PREFIXES, encode_record
from emberkv.messages import (
    BlockInfo,
    DrainRecord,
    PutItem,
)
from emberkv.ports import CommitStatus, Slot, Write
from emberkv.types import NO_VERSION, SHARDS, Namespace, Version, checksum
from harness.coordinator import MemoryCoordinator
from harness.network import Network
from harness.node import MS, Connection, Node, key_of, keys_of_shard

__all__ = ["MS", "Connection", "Node", "World", "key_of", "keys_of_shard"]

ZERO = b"\0" * 16


class World(Network):
    """The cluster, its clock and its faults."""

    def __init__(
        self,
        names: Sequence[str],
        seed: int = 0,
        *,
        arena_bytes: int = 256 * 4096,
        tick_ms: int = 25,
        account_every: int = 1,
        start: bool = True,
        **settings: Any,
    ) -> None:
        self.names, self.seed = list(names), seed
        self.rng = random.Random(seed)
        self.arena_bytes, self.tick_ms, self.account_every = arena_bytes, tick_ms, account_every
        times = {"ttl_ns": 600 * MS, "margin_ns": 60 * MS, "commit_ns": 10 * MS}
        self.settings: dict[str, Any] = times | settings
        self.now = 10_000 * MS
        self.steps = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0
        self._op = 0
        self.coordinator = MemoryCoordinator()
        self.unknown_share = 0.0
        """Share of commits whose outcome the node does not learn."""
        self.delay_ms = (0.1, 2.0)
        self.cuts: set[tuple[str, str]] = set()
        self.cut_off: set[str] = set()
        """Nodes that do not reach the coordinator."""
        self.connections: dict[tuple[str, str], Connection] = {}
        self.results: dict[int, Any] = {}
        self.asked: dict[int, tuple[int, str]] = {}
        """Operation -> (deadline, node)."""
        self.observers: list[Callable[[Node, fx.Effect], None]] = []
        self.answers: list[Callable[[Node, Node, Any, Any], None]] = []
        """Called with (who answers, who asked, request, reply) when a reply leaves."""
        self.nodes = {name: Node(self, name) for name in names}
        if start:
            for name in names:
                self.start(name)

    # -- time ----------------------------------------------------------------------------------------------------

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay_ns, self._order, action))

    def run_ms(self, duration_ms: float) -> None:
        end = self.now + int(duration_ms * MS)
        while self._heap and self._heap[0][0] <= end:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = end

    def run_until(self, condition: Callable[[], bool], limit_ms: float = 10_000, step_ms: float = 5) -> float:
        """Milliseconds until the condition holds; fails when it does not within the limit."""
        begun = self.now
        while not condition():
            assert self.now - begun < limit_ms * MS, "it did not happen in time"
            self.run_ms(step_ms)
        return (self.now - begun) / MS

    def wall_ms(self) -> int:
        """The wall clock that all nodes share: for the expiry of blocks."""
        return 1_700_000_000_000 + self.now // MS

    def delay(self) -> int:
        low, high = self.delay_ms
        return int(self.rng.uniform(low, high) * MS)

    def observe(self, node: Node, effect: fx.Effect) -> None:
        for observer in self.observers:
            observer(node, effect)

    # -- operators ----------------------------------------------------------------------------------------------

    def write(self, key: str, record: DrainRecord | Namespace) -> None:
        """A record that an operator writes."""
        self.coordinator.commit([], [Write(key, encode_record(record))])
        self._notify()

    def drain(self, name: str) -> None:
        """This life of the node shall give its shards away."""
        self.write(DRAIN_PREFIX + name, DrainRecord(self.nodes[name].incarnation))

    def undrain(self, name: str) -> None:
        """It shall take part again."""
        if self.coordinator.get(DRAIN_PREFIX + name) is not None:
            self.coordinator.commit([], [Write(DRAIN_PREFIX + name, None)])
            self._notify()

    def join(self, name: str) -> None:
        """A node that nobody expected joins."""
        self.names.append(name)
        self.nodes[name] = Node(self, name)
        self.start(name)

    # -- processes -----------------------------------------------------------------------------------------------

    def start(self, name: str, *, proof: bool = True) -> None:
        node = self.nodes[name]
        node.start(proof=proof)
        life = node.lives
        self.after(self.rng.randrange(0, 3 * MS), lambda: node.run(life, lambda: self._list(node)))
        self._tick(node, life)

    def _tick(self, node: Node, life: int) -> None:
        if not node.alive or node.lives != life:
            return
        if not node.paused:
            node.step(ev.Tick(self.now, self.wall_ms()))
        self.after(self.tick_ms * MS + self.rng.randrange(0, MS), lambda: self._tick(node, life))

    def kill(self, name: str) -> None:
        node = self.nodes[name]
        node.alive = False
        for connection in list(self.connections.values()):
            if node in (connection.source, connection.target):
                self._break(connection)

    def restart(self, name: str, *, proof: bool = True) -> None:
        if self.nodes[name].alive:
            self.kill(name)
        self.start(name, proof=proof)

    def pause(self, name: str) -> None:
        self.nodes[name].paused = True

    def wake(self, name: str) -> None:
        node = self.nodes[name]
        node.paused = False
        inbox, node.inbox = node.inbox, []
        for action in inbox:
            action()

    # -- coordinator ---------------------------------------------------------------------------------------------

    def commit(self, node: Node, commit: fx.Commit) -> None:
        """Outcome as a real client would learn it; unknown may mean applied, not applied, or applied late."""
        sent, life = self.now, node.lives
        limit = 3 * self.settings["commit_ns"]

        def tell(status: CommitStatus, revision: int) -> None:
            node.run(life, lambda: node.step(ev.Committed(self.now, commit.op, status, revision, sent)))

        def apply(*, answered: bool) -> None:
            result = self.coordinator.commit(commit.compares, commit.writes)
            self._notify()
            if answered:
                self.after(self.delay(), lambda: tell(result.status, result.revision))

        if node.name in self.cut_off:
            self.after(limit, lambda: tell(CommitStatus.UNKNOWN, 0))
        elif self.rng.random() < self.unknown_share:
            self.after(limit, lambda: tell(CommitStatus.UNKNOWN, 0))
            fate = self.rng.random()
            if fate < 0.4:
                self.after(self.delay(), lambda: apply(answered=False))
            elif fate < 0.7:
                self.after(limit + self.rng.randrange(0, 500 * MS), lambda: apply(answered=False))
        else:
            self.after(self.delay(), lambda: apply(answered=True))

    def _notify(self) -> None:
        for node in self.nodes.values():
            if node.alive and node.watch_revision >= 0 and node.name not in self.cut_off and node.watch_due <= self.now:
                node.watch_due = self.now + self.delay()
                life = node.lives
                self.after(node.watch_due - self.now, lambda n=node, x=life: n.run(x, lambda: self._watch(n)))

    def _watch(self, node: Node) -> None:
        if node.name in self.cut_off or node.watch_revision < 0:
            return
        batch = self.coordinator.watch(PREFIXES, node.watch_revision + 1)
        node.watch_revision = batch.revision
        if batch.records or batch.deleted:
            records, deleted = list(batch.records), list(batch.deleted)
            node.step(ev.Records(self.now, records, deleted, batch.revision, full=False))

    def _list(self, node: Node) -> None:
        if node.name in self.cut_off:
            life = node.lives
            self.after(50 * MS, lambda: node.run(life, lambda: self._list(node)))
            return
        listing = self.coordinator.list("")
        node.watch_revision = listing.revision
        node.step(ev.Records(self.now, list(listing.records), [], listing.revision, full=True))

    def isolate_coordinator(self, name: str) -> None:
        self.cut_off.add(name)

    def rejoin_coordinator(self, name: str) -> None:
        if name in self.cut_off:
            self.cut_off.discard(name)
            node = self.nodes[name]
            node.watch_due = 0
            if node.alive:
                node.run(node.lives, lambda: self._list(node))

    def heal(self) -> None:
        """All links and the coordinator work; paused nodes wake; dead ones stay dead."""
        self.cuts.clear()
        self.unknown_share = 0.0
        for name in sorted(self.cut_off):
            self.rejoin_coordinator(name)
        for name, node in self.nodes.items():
            if node.alive and node.paused:
                self.wake(name)

    # -- clients -------------------------------------------------------------------------------------------------

    def op(self) -> int:
        self._op += 1
        return self._op

    def put(
        self,
        name: str,
        keys: Sequence[bytes],
        datas: Sequence[bytes] = (),
        *,
        session: bool = True,
        fresh: bool = True,
        min_copies: int = 1,
        deadline_ms: float = 1000,
        seen: Version = NO_VERSION,
        delete: bool = False,
        abort: bool = False,
        put_ids: Sequence[bytes] = (),
    ) -> int:
        """A client's put at a node; `results[op]` gets the outcomes."""
        node, op = self.nodes[name], self.op()
        ids = put_ids or [b"client......put." + (op * 1000 + index).to_bytes(8, "big") for index in range(len(keys))]
        datas = [b""] * len(keys) if delete else datas
        items = [PutItem(key[8:], ident, len(d), ZERO, seen) for key, ident, d in zip(keys, ids, datas, strict=True)]
        deadline = self.now + int(deadline_ms * MS)
        self.asked[op] = (deadline, name)

        def filled(slots: list[Slot | None]) -> None:
            node.give_back(slots)
            if abort:
                del node.waiting[op]
                self.results[op] = "aborted"
                node.step(ev.PutAborted(self.now, op))
                return
            checks: list[bytes | None] = []
            for slot, data in zip(slots, datas, strict=True):
                if slot is not None:
                    node.tier.write(slot, data)
                checks.append(checksum(data) if slot is not None else None)
            node.step(ev.PutFilled(self.now, op, checks))

        def answered(effect: fx.Effect) -> None:
            if isinstance(effect, fx.Fill):
                node.soon(lambda: filled(effect.slots))
            elif isinstance(effect, fx.PutDone):
                self.results[op] = self.gated(effect)
                del self.asked[op]

        node.waiting[op] = answered
        event = ev.PutBegin(
            self.now, op, list(keys), items, deadline, session, fresh, min_copies, "", delete=delete
        )  # fmt: skip
        life = node.lives
        node.run(life, lambda: node.step(event))
        return op

    def get(
        self,
        name: str,
        keys: Sequence[bytes],
        *,
        session: bool = True,
        local_only: bool = False,
        verify: bool = True,
        deadline_ms: float = 300,
        floors: Sequence[Version] = (),
    ) -> int:
        """A client's get; `results[op]` gets a list of (BlockInfo, bytes or None)."""
        node, op = self.nodes[name], self.op()
        deadline = self.now + int(deadline_ms * MS)
        self.asked[op] = (deadline, name)

        def done(effect: fx.Effect) -> None:
            assert isinstance(effect, fx.GetDone)
            data = [node.tier.read(slot) if slot is not None else None for slot in effect.slots]
            self.results[op] = list(zip(effect.infos, data, strict=True))
            del self.asked[op]
            node.soon(lambda: node.unref(effect.slots))

        node.waiting[op] = done
        event = ev.Get(self.now, op, list(keys), deadline, session, local_only, verify, list(floors))
        node.run(node.lives, lambda: node.step(event))
        return op

    def put_now(self, name: str, keys: Sequence[bytes], datas: Sequence[bytes] = (), **options: Any) -> list[Any]:
        op = self.put(name, keys, datas, **options)
        self.run_until(lambda: op in self.results)
        return self.results.pop(op)

    def get_now(self, name: str, keys: Sequence[bytes], **options: Any) -> list[tuple[BlockInfo, bytes | None]]:
        op = self.get(name, keys, **options)
        self.run_until(lambda: op in self.results)
        return self.results.pop(op)

    # -- what holds ----------------------------------------------------------------------------------------------

    def settle(self, limit_ms: float = 5000) -> None:
        """Until every shard has a primary with an open lease."""
        self.run_until(self.settled, limit_ms, 25)

    def settled(self) -> bool:
        return all(self.primary(shard) is not None for shard in range(SHARDS))

    def primary(self, shard: int) -> str | None:
        """The one live node whose gate for the shard is open; fails when there are two."""
        found = [name for name, node in self.nodes.items() if node.alive and self.gate_open(node, shard)]
        assert len(found) <= 1, f"shard {shard} has open gates at {found}"
        return found[0] if found else None

    def gate_open(self, node: Node, shard: int) -> bool:
        state = node.core.state
        return bool(state.view.primary_epoch[shard]) and shard not in state.closed and node.core.lease.open(self.now)

    def check_gates(self) -> None:
        """At most one open gate per shard, whatever the epoch."""
        taken: dict[int, str] = {}
        for name, node in self.nodes.items():
            if node.alive and node.core.lease.open(self.now):
                for shard, epoch in enumerate(node.core.state.view.primary_epoch):
                    if epoch and shard not in node.core.state.closed:
                        assert shard not in taken, f"shard {shard}: open gates at {taken[shard]} and {name}"
                        taken[shard] = name

    def check_all(self) -> None:
        self.check_gates()
        for node in self.nodes.values():
            if node.alive:
                node.account()
