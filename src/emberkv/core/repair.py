"""Catching up, on the primary: a replica that missed writes, restarted or is new is compared until it is complete.

              spans equal
    +-----------------------------------------------------------------------+
    |                                                                       v
    PROBING --it lacks some--> FILLING --all answered--> ADOPTING --> (COMPLETE)
      ^  |                      ^   |
      |  +--it knows nothing--> OFFERING page --(wanted)
      |
    (BEHIND): peer down, fenced, busy, lost or overdue (asked again at the next tick)

Laws: the primary sends its applied vector; the replica answers with its own, and what it lacks is filled. One that
knows nothing (new, restarted, away for longer than the floor) is offered the heads of all that the primary holds, a
page at a time, and asks for what it lacks and has not evicted. When all is answered the replica adopts the vector:
then both have processed the same writes. New writes reach it by the stream meanwhile; merge = max makes the order
irrelevant. Complete replicas are named to failover, which commits them as in sync. The replica's side: learner.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum

import msgspec

from emberkv.core.directory import Entry
from emberkv.core.machine import moved
from emberkv.core.merge import AppliedVector
from emberkv.core.state import ANSWER_OVERDUE_LEASES, State
from emberkv.core.stream import Stream, Why
from emberkv.messages import (
    SPANS_MAX,
    Offer,
    OfferHead,
    OfferReply,
    Span,
    Vector,
    VectorAnswer,
    VectorItem,
    VectorReply,
    VectorStatus,
)
from emberkv.types import BATCH_KEYS_MAX, NO_VERSION

LANES_PER_PEER_MAX = 64
"""Shards compared at once with one peer."""
OFFERING_PER_PEER_MAX = 4
"""Of these, shards whose heads are offered: repair must leave the stream to fresh writes."""
PROBES_PER_MESSAGE_MAX = 32
"""Shards of one Vector: their spans fit a frame, and so do the answers."""


class Phase(Enum):
    """State of one comparison."""

    PROBING = "probing"
    OFFERING = "offering"
    FILLING = "filling"
    ADOPTING = "adopting"


TRANSITIONS = {
    (Phase.PROBING, "lacks"): Phase.FILLING,
    (Phase.PROBING, "knows nothing"): Phase.OFFERING,
    (Phase.OFFERING, "wanted"): Phase.FILLING,
    (Phase.FILLING, "next page"): Phase.OFFERING,
    (Phase.OFFERING, "all answered"): Phase.ADOPTING,
    (Phase.FILLING, "all answered"): Phase.ADOPTING,
}
"""A comparison ends in COMPLETE or goes back to BEHIND from every phase; all other moves are bugs."""


class CatchUp(msgspec.Struct):
    """One shard being compared with one peer."""

    shard: int
    phase: Phase = Phase.PROBING
    heads: bool = False
    """It knew nothing: heads are offered before anything is filled."""
    spans: list[Span] = []
    """Our vector when the replica was asked, which it may adopt once all of it is answered. What is stamped later
    reaches it by the stream, or makes this comparison void."""
    todo: list[bytes] = []
    ghosts: list[Entry] = []
    """What this primary gave up for room and the replica has not processed: told without bytes."""
    cursor: int = 0
    page: list[bytes] = []
    filling: int = 0
    lost: bool = False

    def move(self, what: str) -> None:
        """Takes one of the listed transitions."""
        self.phase = moved(TRANSITIONS, self.phase, what, "a comparison")


class Repair:
    """The primary's side of catching up."""

    stream: Stream

    def __init__(self, state: State, completed: Callable[[str, int], None]) -> None:
        """`completed(peer, shard)`: a replica holds all that this primary holds."""
        self.state = state
        self.completed = completed
        self.waiting: dict[str, OrderedDict[int, None]] = {}
        self.lanes: dict[tuple[str, int], CatchUp] = {}
        self.complete: dict[int, set[str]] = {}
        """Peers that hold all that this primary holds, per shard: nothing sent to them since was lost."""
        self._to_adopt: dict[str, list[CatchUp]] = {}
        """Comparisons whose last question leaves at the end of this step: many shards in one message."""
        self._resting: set[tuple[str, int]] = set()
        """Comparisons that failed since the last tick: a peer that refuses is asked once a tick, not in a loop."""
        self._questions: dict[int, tuple[str, list[int], int]] = {}
        """Request -> (peer, shards, sent_ns): vectors and offers without an answer."""

    def behind(self, peer: str, shard: int) -> None:
        """A peer may lack something of a shard."""
        self.complete.get(shard, set()).discard(peer)
        self.state.review.add(shard)
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
        if self._questions:
            self._give_up_overdue()
        if not self.waiting:
            return
        for peer in list(self.waiting):
            shards = self.waiting[peer]
            for shard in [shard for shard in shards if not self._concerns(peer, shard)]:
                del shards[shard]
            if not shards:
                del self.waiting[peer]
        self.start()

    def _give_up_overdue(self) -> None:
        limit_ns = ANSWER_OVERDUE_LEASES * self.state.settings.ttl_ns
        for request in [n for n, (_, _, sent_ns) in self._questions.items() if self.state.now_ns - sent_ns > limit_ns]:
            peer, shards, _ = self._questions.pop(request)
            for shard in shards:
                self._drop_lane(peer, self.lanes.get((peer, shard)), again=True)

    def _concerns(self, peer: str, shard: int) -> bool:
        """Is the peer a live replica of a shard that this node speaks for? If it comes back, on_roles asks again."""
        view = self.state.view
        owner = view.owners[shard]
        return view.primary_epoch[shard] != 0 and owner is not None and peer in owner.replicas and view.is_live(peer)

    def start(self) -> None:
        """Starts comparisons where a lane is free: one message for many shards."""
        for peer, shards in self.waiting.items():
            if peer not in self.state.peers_up or not shards:
                continue
            room = LANES_PER_PEER_MAX - sum(1 for name, _ in self.lanes if name == peer)
            chosen = [s for s in shards if (peer, s) not in self._resting and (peer, s) not in self.lanes]
            chosen = [shard for shard in chosen if self._concerns(peer, shard)][: max(room, 0)]
            for shard in chosen:
                del shards[shard]
                self.lanes[(peer, shard)] = CatchUp(shard, spans=self.stream.vector(shard).spans()[:SPANS_MAX])
            for first in range(0, len(chosen), PROBES_PER_MESSAGE_MAX):
                lanes = [self.lanes[(peer, shard)] for shard in chosen[first : first + PROBES_PER_MESSAGE_MAX]]
                self._ask(peer, [self._item(lane, adopt=False) for lane in lanes])

    def flush(self) -> None:
        """Ends a step: what became ready to be adopted is told."""
        if not self._to_adopt:
            return
        ready, self._to_adopt = self._to_adopt, {}
        for peer, lanes in ready.items():
            alive = [lane for lane in lanes if self.lanes.get((peer, lane.shard)) is lane]
            for first in range(0, len(alive), PROBES_PER_MESSAGE_MAX):
                piece = alive[first : first + PROBES_PER_MESSAGE_MAX]
                self._ask(peer, [self._item(lane, adopt=True) for lane in piece])

    def _item(self, lane: CatchUp, *, adopt: bool) -> VectorItem:
        epoch, floor = self.state.view.primary_epoch[lane.shard], self.state.directory.floors[lane.shard]
        return VectorItem(lane.shard, epoch, floor, lane.spans, adopt)

    def _ask(self, peer: str, items: list[VectorItem]) -> None:
        pieces: list[list[VectorItem]] = [[]]
        for item in items:
            if pieces[-1] and sum(len(other.spans) for other in pieces[-1]) + len(item.spans) > SPANS_MAX:
                pieces.append([])
            pieces[-1].append(item)
        for piece in pieces:
            request = self.state.send(peer, Vector(piece), [])
            self._questions[request] = (peer, [item.shard for item in piece], self.state.now_ns)

    def on_vector_answer(self, peer: str, request: int, reply: VectorReply) -> None:
        """A replica says what it has processed."""
        _, shards, _ = self._questions.pop(request, ("", [], 0))
        if len(shards) != len(reply.answers):
            for shard in shards:
                self._drop_lane(peer, self.lanes.get((peer, shard)), again=True)
            return
        for shard, answer in zip(shards, reply.answers, strict=True):
            lane = self.lanes.get((peer, shard))
            if lane is not None:
                self._compared(peer, lane, answer)
        self.start()

    def _compared(self, peer: str, lane: CatchUp, answer: VectorAnswer) -> None:
        shard = lane.shard
        if answer.status == VectorStatus.FENCED:
            self.stream.doubt(shard, answer.epoch)
        if answer.status in (VectorStatus.FENCED, VectorStatus.BUSY) or lane.lost or not self._concerns(peer, shard):
            self._drop_lane(peer, lane, again=True)
        elif answer.status == VectorStatus.LEARNING:
            self._offer_all(peer, lane)
        elif lane.phase is Phase.ADOPTING:
            self._complete(peer, lane, answer.spans)
        else:
            theirs, asked = AppliedVector(), AppliedVector()
            theirs.union(answer.spans)
            if not theirs.lacks(lane.spans):
                self._complete(peer, lane, answer.spans)
                return
            asked.union(lane.spans)
            lane.todo = [
                entry.key
                for entry in self._entries(shard)
                if asked.covers(entry.version) and not theirs.covers(entry.version)
            ]
            lane.ghosts = self.state.directory.ghosts(shard, lambda v: asked.covers(v) and not theirs.covers(v))
            lane.move("lacks")
            self._advance(peer, lane)

    def _entries(self, shard: int) -> list[Entry]:
        """What this primary holds under a version and has not expired."""
        wall_ms = self.state.wall_ms
        return [
            entry
            for entry in self.state.directory.entries(shard)
            if entry.version != NO_VERSION and not (entry.expiry_ms and entry.expiry_ms <= wall_ms)
        ]

    def _offer_all(self, peer: str, lane: CatchUp) -> None:
        offering = sum(1 for (name, _), other in self.lanes.items() if name == peer and other.heads)
        if lane.phase is not Phase.PROBING or offering >= OFFERING_PER_PEER_MAX:
            self._drop_lane(peer, lane, again=True)
            return
        lane.heads = True
        lane.todo = [entry.key for entry in self._entries(lane.shard)]
        lane.move("knows nothing")
        self._offer(peer, lane)

    def _next_page(self, lane: CatchUp) -> list[Entry]:
        keys = lane.todo[lane.cursor : lane.cursor + BATCH_KEYS_MAX]
        lane.cursor += len(keys)
        entries = [entry for entry in map(self.state.directory.get, keys) if entry is not None]
        return [entry for entry in entries if entry.version != NO_VERSION]

    def _offer(self, peer: str, lane: CatchUp) -> None:
        entries = self._next_page(lane)
        lane.page = [entry.key for entry in entries]
        heads = [OfferHead(entry.key, entry.version, entry.checksum) for entry in entries]
        authority = self.state.view.primary_epoch[lane.shard]
        offer = Offer(lane.shard, authority, heads, last=lane.cursor >= len(lane.todo))
        self._questions[self.state.send(peer, offer, [])] = (peer, [lane.shard], self.state.now_ns)

    def on_offer_answer(self, peer: str, request: int, reply: OfferReply) -> None:
        """The learner says which of the offered heads it wants."""
        _, shards, _ = self._questions.pop(request, ("", [], 0))
        lane = self.lanes.get((peer, shards[0])) if shards else None
        if lane is None or lane.phase is not Phase.OFFERING:
            return
        if reply.fenced_epoch or any(index >= len(lane.page) for index in reply.wanted):
            self.stream.doubt(lane.shard, reply.fenced_epoch)
            self._drop_lane(peer, lane, again=True)
            return
        wanted = [self.state.directory.get(lane.page[index]) for index in reply.wanted]
        lane.move("wanted")
        self._fill(peer, lane, [entry for entry in wanted if entry is not None])

    def _fill(self, peer: str, lane: CatchUp, entries: list[Entry]) -> None:
        lane.filling += len(entries)
        self.stream.send_all(peer, entries, Why.FILL)
        if not lane.filling:
            self._advance(peer, lane)

    def filled(self, peer: str, shard: int, arrived: bool) -> None:
        """One filled item was answered."""
        lane = self.lanes.get((peer, shard))
        if lane is None or lane.phase is not Phase.FILLING:
            return
        lane.filling -= 1
        lane.lost = lane.lost or not arrived
        if lane.filling <= 0:
            self._advance(peer, lane)

    def _advance(self, peer: str, lane: CatchUp) -> None:
        """All that was asked for so far is answered."""
        if lane.lost or not self._concerns(peer, lane.shard):
            self._drop_lane(peer, lane, again=True)
        elif lane.cursor < len(lane.todo) and lane.heads:
            lane.move("next page")
            self._offer(peer, lane)
        elif lane.cursor < len(lane.todo):
            self._fill(peer, lane, self._next_page(lane))
        elif lane.ghosts:
            ghosts, lane.ghosts = lane.ghosts[:BATCH_KEYS_MAX], lane.ghosts[BATCH_KEYS_MAX:]
            self._fill(peer, lane, ghosts)
        else:
            lane.move("all answered")
            self._to_adopt.setdefault(peer, []).append(lane)

    def _complete(self, peer: str, lane: CatchUp, theirs: list[Span]) -> None:
        """Both have processed the same. What the replica had more of was handed in before it answered, so its vector
        is ours too."""
        news = self.stream.vector(lane.shard).lacks(theirs)
        self.stream.mark_all_applied(lane.shard, theirs)
        if news:
            # Writes that were superseded before we heard of them: the other replicas have to hear of them as well.
            self.stream.others_behind(lane.shard, peer)
        self.complete.setdefault(lane.shard, set()).add(peer)
        self.completed(peer, lane.shard)
        self.state.review.add(lane.shard)
        self._drop_lane(peer, lane, again=False)

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
        for request in [number for number, (name, _, _) in self._questions.items() if name == peer]:
            del self._questions[request]
