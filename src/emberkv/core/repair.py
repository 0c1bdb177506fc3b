"""Catching up: a replica that missed writes, restarted, or is new compares heads with the primary (design 2, 4).

    BEHIND --(peer up, a lane free)--> OFFERING page --(wanted)--> FILLING --(acked)--> next page ... last --> COMPLETE
       ^                                   |                           |
       +-- connection lost, fenced, overdue (not before the next tick) +

Laws: the primary offers what it holds, a page at a time; the learner asks for what it lacks and has not evicted; new
writes reach it by the stream meanwhile, and merge = max makes the order irrelevant. What the learner holds above the
primary (stamped by an earlier epoch that nobody else heard of) it hands in as a hint: the primary stamps it anew, so
that all replicas process it, or keeps what it has by then. Complete learners are named to failover, which commits them
as in sync.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from emberkv.core.directory import Entry, restamped
from emberkv.core.effects import OfferDone
from emberkv.core.events import OfferArrived
from emberkv.core.state import ANSWER_OVERDUE_LEASES, State
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


class Offered(msgspec.Struct):
    """On the learner: which keys of a shard its primary has offered so far."""

    authority: int
    keys: set[bytes]


class Repair:
    """The primary's side and the learner's side of catching up."""

    stream: Stream

    def __init__(self, state: State) -> None:
        self.state = state
        self.waiting: dict[str, OrderedDict[int, None]] = {}
        self.lanes: dict[tuple[str, int], CatchUp] = {}
        self.complete: dict[int, set[str]] = {}
        """Peers that hold all that this primary holds, per shard: nothing sent to them since was lost."""
        self._resting: set[tuple[str, int]] = set()
        """Comparisons that failed since the last tick: a peer that refuses is asked once a tick, not in a loop."""
        self._offers: dict[int, tuple[str, int, int]] = {}
        """Request -> (peer, shard, sent_ns)."""
        self._offered: dict[int, Offered] = {}

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

    def on_roles(self, shards: list[int], renewed: set[int]) -> None:
        """This node speaks for these shards, for `renewed` ones under a new epoch: every other replica is compared
        until it is complete. A comparison under way goes on; one that left the replicas is no longer complete."""
        for shard in shards:
            owner = self.state.view.owners[shard]
            if owner is None or owner.primary != self.state.settings.name:
                continue
            complete = self.complete.setdefault(shard, set())
            complete.intersection_update(owner.replicas)
            for peer in owner.replicas:
                if peer == owner.primary:
                    continue
                under_way = (peer, shard) in self.lanes or shard in self.waiting.get(peer, ())
                if shard in renewed or (peer not in complete and not under_way):
                    self.behind(peer, shard)

    def forget_peer(self, peer: str) -> None:
        """A peer lives under a new incarnation: nothing that it held before counts."""
        for names in self.complete.values():
            names.discard(peer)
        for (name, _), lane in self.lanes.items():
            lane.lost = lane.lost or name == peer

    def on_tick(self) -> None:
        """Starts comparisons where a lane is free; forgets those that are no longer this node's."""
        self._resting.clear()
        limit_ns = ANSWER_OVERDUE_LEASES * self.state.settings.ttl_ns
        for request in [n for n, (_, _, sent_ns) in self._offers.items() if self.state.now_ns - sent_ns > limit_ns]:
            peer, shard, _ = self._offers.pop(request)
            self._drop_lane(peer, self.lanes.get((peer, shard)), again=True)
        for peer in list(self.waiting):
            shards = self.waiting[peer]
            for shard in [shard for shard in shards if not self._concerns(peer, shard)]:
                del shards[shard]
            if not shards:
                del self.waiting[peer]
        self.start()

    def _concerns(self, peer: str, shard: int) -> bool:
        """Is the peer a live replica of a shard that this node speaks for? If it comes back, on_roles asks again."""
        view = self.state.view
        owner = view.owners[shard]
        return view.primary_epoch[shard] != 0 and owner is not None and peer in owner.replicas and view.is_live(peer)

    def start(self) -> None:
        """Starts comparisons where a lane is free."""
        for peer, shards in self.waiting.items():
            if peer not in self.state.peers_up:
                continue
            room = LANES_PER_PEER_MAX - sum(1 for name, _ in self.lanes if name == peer)
            for shard in list(shards) if room > 0 else ():
                if (peer, shard) in self._resting or (peer, shard) in self.lanes or not self._concerns(peer, shard):
                    continue
                del shards[shard]
                keys = [entry.key for entry in self.state.directory.entries(shard)]
                lane = self.lanes[(peer, shard)] = CatchUp(shard, keys)
                self._offer(peer, lane)
                room -= 1
                if room == 0:
                    break

    def _offer(self, peer: str, lane: CatchUp) -> None:
        lane.page = lane.keys[lane.cursor : lane.cursor + BATCH_KEYS_MAX]
        lane.cursor += len(lane.page)
        entries = [entry for entry in map(self.state.directory.get, lane.page) if entry is not None]
        entries = [entry for entry in entries if entry.version != NO_VERSION]
        lane.page = [entry.key for entry in entries]
        heads = [OfferHead(entry.key, entry.version, entry.checksum) for entry in entries]
        authority = self.state.view.primary_epoch[lane.shard]
        offer = Offer(lane.shard, authority, heads, last=lane.cursor >= len(lane.keys))
        self._offers[self.state.send(peer, offer, [])] = (peer, lane.shard, self.state.now_ns)

    def on_answer(self, peer: str, request: int, reply: OfferReply) -> None:
        """The learner says what it wants."""
        name, shard, _ = self._offers.pop(request, ("", -1, 0))
        lane = self.lanes.get((name, shard))
        if lane is None:
            return
        if reply.fenced_epoch or any(index >= len(lane.page) for index in reply.wanted):
            self.stream.doubt(shard, reply.fenced_epoch)
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
            self.start()

    def _drop_lane(self, peer: str, lane: CatchUp | None, *, again: bool) -> None:
        if lane is None:
            return
        self.lanes.pop((peer, lane.shard), None)
        if again:
            self._resting.add((peer, lane.shard))
            self.waiting.setdefault(peer, OrderedDict())[lane.shard] = None

    def on_peer_down(self, peer: str) -> None:
        """Comparisons with this peer start over when it is back."""
        for (name, _), lane in list(self.lanes.items()):
            if name == peer:
                self._drop_lane(peer, lane, again=True)
        for request in [number for number, (name, _, _) in self._offers.items() if name == peer]:
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
        wanted = [index for index, head in enumerate(offer.heads) if self._wants(head, offer.authority)]
        self._note_offered(offer)
        self.state.out.append(OfferDone(event.op, OfferReply(wanted)))

    def _wants(self, head: OfferHead, authority: int) -> bool:
        directory = self.state.directory
        current = directory.get(head.key)
        if current is not None and current.version >= head.version:
            if current.version > head.version and current.version.epoch < authority:
                self.stream.hand_in(current)
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

    def _note_offered(self, offer: Offer) -> None:
        """After the last page: what is here of an earlier epoch and was not offered, the primary does not have."""
        offered = self._offered.get(offer.shard)
        if offered is None or offered.authority != offer.authority:
            offered = self._offered[offer.shard] = Offered(offer.authority, set())
        offered.keys.update(head.key for head in offer.heads)
        if not offer.last:
            return
        del self._offered[offer.shard]
        for entry in self.state.directory.entries(offer.shard):
            if entry.version != NO_VERSION and entry.version.epoch < offer.authority and entry.key not in offered.keys:
                self.stream.hand_in(entry)
