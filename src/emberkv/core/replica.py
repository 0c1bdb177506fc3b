"""The one door of the core: every event comes in through `step`, every decision leaves as effects.

Laws: bounded at 128 keys a step; no clock, chance, socket, thread or disk; the same events in the same order give the
same effects. Fencing of peers stands in stream.gate, of ourselves in lease.open: nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emberkv.core import events as ev
from emberkv.core.effects import Connect, Effect
from emberkv.core.failover import Failover
from emberkv.core.get import Reads
from emberkv.core.handover import Handover
from emberkv.core.lease import Lease
from emberkv.core.put import Put
from emberkv.core.state import Settings, State
from emberkv.ports import Tier
from emberkv.types import SHARDS


class Replica:
    """One node's whole protocol state."""

    def __init__(self, settings: Settings, tier: Tier) -> None:
        self.state = State(settings, tier)
        self.lease = Lease(self.state)
        self.put = Put(self.state, self.lease)
        self.handover = Handover(self.state, self.lease, self.put.repair, self.put.stream, self.put.owes_an_answer)
        self.failover = Failover(self.state, self.lease, self.handover)
        self.failover.caught_up = self.put.repair.complete
        self.reads = Reads(self.state, self.put.hints, self.put.stream, self.put.learner.ask_to_compare)
        self._swept = 0
        """Next shard to be looked through for what has expired or was dropped."""
        self._sweeping: set[bytes] = set()
        """Dropped scopes that this round of the sweep removes."""
        self._peers: dict[str, str] = {}
        self._incarnations: dict[str, bytes] = {}
        self._handlers: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.Get: self.reads.on_get,
            ev.Verified: self.reads.on_verified,
            ev.Fetched: self.reads.on_fetched,
            ev.Loaded: self.reads.on_loaded,
            ev.Reserve: self.reads.on_reserve,
            ev.Exists: self.reads.on_exists,
            ev.Unref: self._on_unref,
            ev.PutBegin: self.put.on_begin,
            ev.PutFilled: self.put.on_filled,
            ev.PutAborted: lambda event: self.put.abort(event.op),
            ev.ReplicaBegin: self.put.stream.on_begin,
            ev.ReplicaFilled: self.put.stream.on_filled,
            ev.OfferArrived: self.put.learner.on_offer,
            ev.VectorArrived: self.put.learner.on_vector,
            ev.PutAnswered: self._on_put_answered,
            ev.ReplicateAnswered: lambda event: self.put.stream.on_answer(event.peer, event.request, event.reply),
            ev.OfferAnswered: lambda event: self.put.repair.on_offer_answer(event.peer, event.request, event.reply),
            ev.VectorAnswered: lambda event: self.put.repair.on_vector_answer(event.peer, event.request, event.reply),
            ev.PeerUp: self._on_peer_up,
            ev.PeerDown: self._on_peer_down,
            ev.Records: self._on_records,
            ev.Committed: self._on_committed,
            ev.Tick: self._on_tick,
        }

    def step(self, event: ev.Event) -> list[Effect]:
        """Takes one event in; returns what has to be done, in order."""
        state = self.state
        state.now_ns = event.now_ns
        if state.wall_tick_ms:
            # A node that has just been woken may be asked before its next tick tells it how late it is.
            state.wall_ms = state.wall_tick_ms + (event.now_ns - state.wall_tick_ns) // 1_000_000
        self._handlers[type(event)](event)
        self.put.repair.flush()
        self.put.stream.flush()
        self.reads.disk.persist()
        effects, state.out = state.out, []
        return effects

    def _on_put_answered(self, event: ev.PutAnswered) -> None:
        self.put.hints.on_answer(event.peer, event.request, event.reply)
        self.put.hints.flush(self.put.apply_hint)

    def _on_unref(self, event: ev.Unref) -> None:
        unref = self.state.directory.unref
        for slot in event.slots:
            unref(slot)

    def _on_tick(self, event: ev.Tick) -> None:
        state = self.state
        if event.wall_ms:
            state.wall_ms = state.wall_tick_ms = event.wall_ms
            state.wall_tick_ns = event.now_ns
        state.directory.now_ns = event.now_ns
        state.directory.forget_tombstones(event.now_ns - state.settings.tombstone_retention_ns)
        self._sweep()
        self.lease.on_tick(event.now_ns)
        self.failover.on_tick(event.now_ns)
        self.put.on_tick(event.now_ns)
        self.put.repair.on_tick()
        self.reads.on_tick(event.now_ns)

    def _sweep(self) -> None:
        """One shard a tick: room taken by what nobody can read any more."""
        view = self.state.view
        if self._swept == 0:
            if not view.dead_scopes and not view.expiring:
                return
            self._sweeping = set(view.dead_scopes)
        dead = self._sweeping & view.dead_scopes
        self.state.counters["swept"] += self.state.directory.sweep(self._swept, self.state.wall_ms, dead)
        self._swept = (self._swept + 1) % SHARDS
        if self._swept == 0:
            view.dead_scopes -= self._sweeping

    def _on_peer_up(self, event: ev.PeerUp) -> None:
        self.state.peers_up.add(event.peer)
        self.put.repair.start()
        self.put.hints.flush(self.put.apply_hint)

    def _on_peer_down(self, event: ev.PeerDown) -> None:
        self.state.peers_up.discard(event.peer)
        self.put.hints.on_peer_down(event.peer)
        self.put.stream.on_peer_down(event.peer)
        self.put.repair.on_peer_down(event.peer)

    def _on_records(self, event: ev.Records) -> None:
        view = self.state.view
        before = list(view.primary_epoch)
        view.apply(event.records, event.deleted, full=event.full, now_ns=event.now_ns, revision=event.revision)
        for key in view.undecodable:
            self.state.note(f"coordinator record {key!r} cannot be decoded: is another version running?")
        view.undecodable.clear()
        if view.touched:
            self._notice_restarts()
        self.lease.on_records(event.now_ns, full=event.full)
        if not view.touched:
            return  # heartbeats only, several times a lease: nothing else follows from them
        self.handover.on_records()
        self._after_roles(before, sorted(view.touched))
        if self.lease.open(event.now_ns):
            self.failover.take(event.now_ns)
        self.put.hints.flush(self.put.apply_hint)

    def _notice_restarts(self) -> None:
        """A peer under a new incarnation has lost what it held in memory."""
        view = self.state.view
        for name, record in view.live.items():
            known = self._incarnations.get(name)
            if known == record.incarnation:
                continue
            self._incarnations[name] = record.incarnation
            if known is not None and name != self.state.settings.name:
                self.put.repair.forget_peer(name)
        peers = view.peer_addresses()
        if peers != self._peers:
            self._peers = peers
            self.state.out.append(Connect(dict(peers)))

    def _after_roles(self, before: list[int], shards: list[int]) -> None:
        """New epochs of ours start with nothing known to be complete."""
        after = self.state.view.primary_epoch
        renewed = {shard for shard in shards if after[shard] != before[shard]}
        for shard in renewed:
            self.put.repair.complete.pop(shard, None)
        self.put.stream.on_roles(shards, renewed)
        self.put.learner.on_roles(shards, renewed)
        self.state.review.update(shard for shard in shards if after[shard])
        self.put.repair.on_roles([shard for shard in shards if after[shard]], renewed)

    def _on_committed(self, event: ev.Committed) -> None:
        before = list(self.state.view.primary_epoch)
        if self.lease.on_committed(event):
            return
        given = self.handover.on_committed(event)
        written = self.failover.on_committed(event)
        if given:
            written = [shard for shard, epoch in enumerate(self.state.view.primary_epoch) if epoch != before[shard]]
        if written or given:
            self._after_roles(before, written)
            self.put.hints.flush(self.put.apply_hint)
