"""Catching up: a replica that missed writes, restarted, or is new compares heads with the primary (design 2, 4).

    BEHIND --(peer up, a lane free)--> OFFERING page --(wanted)--> FILLING --(acked)--> next page ... last --> COMPLETE
       ^                                   |                           |
       +------ connection lost, fenced ----+---------------------------+

Laws: the primary offers what it holds, a page at a time; the learner asks for what it lacks and has not evicted; new
writes reach it by the stream meanwhile, and merge = max makes the order irrelevant. Complete learners are named to
failover, which commits them as in sync.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from emberkv.core.directory import Entry, restamped
from emberkv.core.effects import OfferDone
from emberkv.core.events import OfferArrived
from emberkv.core.state import State
from emberkv.messages import Offer, OfferHead, OfferReply
from emberkv.types import BATCH_KEYS_MAX, NO_VERSION, EntryState

if TYPE_CHECKING:
    from emberkv.core.stream import Stream

LANES_PER_PEER_MAX = 4
"""Shards compared at once with one peer: repair must leave the stream to fresh writes."""


class CatchUp(msgspec.Struct):
    """One shard being compared with one peer."""

    shard: int
    keys: list[bytes]
    cursor: int = 0
    page: list[bytes] = msgspec.field(default_factory=list)
    filling: int = 0
    lost: bool = False


class Repair:
    """The primary's side and the learner's side of catching up."""

    stream: Stream

    def __init__(self, state: State) -> None:
        self.state = state
        self.waiting: dict[str, OrderedDict[int, None]] = {}
        self.lanes: dict[tuple[str, int], CatchUp] = {}
        self.complete: dict[int, set[str]] = {}
        self._offers: dict[int, tuple[str, int]] = {}

    def behind(self, peer: str, shard: int) -> None:
        """A peer may lack something of a shard."""
        self.complete.get(shard, set()).discard(peer)
        self.waiting.setdefault(peer, OrderedDict())[shard] = None
        lane = self.lanes.get((peer, shard))
        if lane is not None:
            lane.lost = True

    def lag(self) -> int:
        """(peer, shard) pairs that are not known to be complete."""
        return sum(map(len, self.waiting.values())) + len(self.lanes)

    def on_roles(self, shards: list[int]) -> None:
        """This node speaks for these shards under a new record: every other replica is compared."""
        for shard in shards:
            owner = self.state.view.owners[shard]
            if owner is None or owner.primary != self.state.settings.name:
                continue
            for peer in owner.replicas:
                if peer != self.state.settings.name and peer not in self.complete.get(shard, ()):
                    self.behind(peer, shard)

    def forget_peer(self, peer: str) -> None:
        """A peer lives under a new incarnation: nothing that it held before counts."""
        for names in self.complete.values():
            names.discard(peer)

    def on_tick(self) -> None:
        """Starts comparisons where a lane is free."""
        view = self.state.view
        for peer, shards in self.waiting.items():
            if peer not in self.state.peers_up:
                continue
            busy = sum(1 for name, _ in self.lanes if name == peer)
            while shards and busy < LANES_PER_PEER_MAX:
                shard, _ = shards.popitem(last=False)
                owner = view.owners[shard]
                if not view.primary_epoch[shard] or owner is None or peer not in owner.replicas:
                    continue
                if (peer, shard) in self.lanes:
                    shards[shard] = None
                    break
                keys = [entry.key for entry in self.state.directory.entries(shard)]
                if not keys:
                    self.complete.setdefault(shard, set()).add(peer)
                    continue
                lane = self.lanes[(peer, shard)] = CatchUp(shard, keys)
                self._offer(peer, lane)
                busy += 1

    def _offer(self, peer: str, lane: CatchUp) -> None:
        lane.page = lane.keys[lane.cursor : lane.cursor + BATCH_KEYS_MAX]
        lane.cursor += len(lane.page)
        entries = [entry for entry in map(self.state.directory.get, lane.page) if entry is not None]
        entries = [entry for entry in entries if entry.version != NO_VERSION]
        lane.page = [entry.key for entry in entries]
        heads = [OfferHead(entry.key, entry.version, entry.checksum) for entry in entries]
        authority = self.state.view.primary_epoch[lane.shard]
        offer = Offer(lane.shard, authority, heads, last=lane.cursor >= len(lane.keys))
        self._offers[self.state.send(peer, offer, [])] = (peer, lane.shard)

    def on_answer(self, peer: str, request: int, reply: OfferReply) -> None:
        """The learner says what it wants."""
        lane = self.lanes.get(self._offers.pop(request, ("", -1)))
        if lane is None:
            return
        if reply.fenced_epoch or any(index >= len(lane.page) for index in reply.wanted):
            self._drop_lane(peer, lane, again=True)
            return
        wanted: list[Entry] = []
        for index in reply.wanted:
            entry = self.state.directory.get(lane.page[index])
            if entry is not None:
                wanted.append(entry)
        lane.filling = len(wanted)
        self.stream.fill(peer, wanted)
        self._advance(peer, lane)

    def filled(self, peer: str, shard: int, arrived: bool) -> None:
        """One filled item was answered."""
        lane = self.lanes.get((peer, shard))
        if lane is None:
            return
        lane.filling -= 1
        lane.lost = lane.lost or not arrived
        self._advance(peer, lane)

    def _advance(self, peer: str, lane: CatchUp) -> None:
        if lane.filling > 0:
            return
        if lane.lost:
            self._drop_lane(peer, lane, again=True)
        elif lane.cursor < len(lane.keys):
            self._offer(peer, lane)
        else:
            self.complete.setdefault(lane.shard, set()).add(peer)
            self._drop_lane(peer, lane, again=False)

    def _drop_lane(self, peer: str, lane: CatchUp, *, again: bool) -> None:
        self.lanes.pop((peer, lane.shard), None)
        if again:
            self.waiting.setdefault(peer, OrderedDict())[lane.shard] = None

    def on_peer_down(self, peer: str) -> None:
        """Comparisons with this peer start over when it is back."""
        for (name, _), lane in list(self.lanes.items()):
            if name == peer:
                self._drop_lane(peer, lane, again=True)
        for request in [number for number, (name, _) in self._offers.items() if name == peer]:
            del self._offers[request]

    # -- the learner's side ----------------------------------------------------------------------------------

    def on_offer(self, event: OfferArrived) -> None:
        """Compares a page of heads with what is here."""
        offer = event.offer
        allowed, epoch = self.stream.gate(offer.shard, event.peer, offer.authority)
        if not allowed:
            # 1 stands for "unheard of": the sender tries again when our view has caught up.
            self.state.out.append(OfferDone(event.op, OfferReply([], epoch or 1)))
            return
        wanted = [index for index, head in enumerate(offer.heads) if self._wants(head)]
        self.state.out.append(OfferDone(event.op, OfferReply(wanted)))

    def _wants(self, head: OfferHead) -> bool:
        directory = self.state.directory
        current = directory.get(head.key)
        if current is not None and current.version >= head.version:
            return False
        if directory.evicted.get(head.key, NO_VERSION) >= head.version:
            return False  # repair never fetches what this node evicted
        slot = self.stream.adopt(head.key, head.checksum)
        if slot is None:
            return True
        hint = self.stream.hints.pending.get(head.key)
        source = current if current is not None and current.slot is slot else hint.entry if hint is not None else None
        if source is None or source.state is EntryState.TOMBSTONE:
            directory.unref(slot)
            return True
        directory.install(restamped(source, head.version, source.version))
        return False
