"""Catching up, on the replica: what it lacks it is given, what only it has it hands in (design 2, 3).

Laws: the primary's vector is compared with our own. What we hold, the primary has not processed, and lies above the
primary's floor is sent to it with its original version: merge = max decides there, and everybody gets it from there.
What lies at or below the floor and the primary does not have is gone for good: the tombstone that ended it may be
forgotten, so it is dropped here. A learner that knew nothing keeps of its old copies only what the primary offers or
has never processed. We never ask for what we gave up for room.
"""

from __future__ import annotations

import msgspec

from emberkv.core.directory import Entry, restamped
from emberkv.core.effects import OfferDone, VectorDone
from emberkv.core.events import OfferArrived, VectorArrived
from emberkv.core.merge import AppliedVector
from emberkv.core.repair import Repair
from emberkv.core.state import State
from emberkv.core.stream import Stream, Why
from emberkv.messages import (
    SPANS_MAX,
    Offer,
    OfferHead,
    OfferReply,
    ReplicaStatus,
    Vector,
    VectorAnswer,
    VectorItem,
    VectorReply,
    VectorStatus,
)
from emberkv.types import NO_VERSION, EntryState, Version

_PROCESSED = (ReplicaStatus.STORED, ReplicaStatus.STALE, ReplicaStatus.NO_SPACE)


class Compared(msgspec.Struct):
    """What the primary of a shard has said of itself, and which heads it has offered since."""

    authority: int
    theirs: AppliedVector
    floor: Version
    offered: set[bytes]


class Learner:
    """The replica's side of catching up."""

    stream: Stream

    def __init__(self, state: State, repair: Repair) -> None:
        self.state = state
        self.repair = repair
        self.known: set[int] = set()
        """Shards of which this replica has processed all that some primary had: elsewhere its old copies are near
        copies, of whose end it may have missed anything, whatever has come by the stream since."""
        self._compared: dict[int, Compared] = {}
        self._handing_in: dict[int, int] = {}
        """Items on their way to the primary, per shard."""

    # -- vectors -----------------------------------------------------------------------------------------------

    def on_vector(self, event: VectorArrived) -> None:
        """Answers each shard; answers that would not fit a frame become LEARNING, which needs no spans."""
        answers: list[VectorAnswer] = []
        room = SPANS_MAX
        for item in event.vector.items:
            answer = self._answer(event.peer, item)
            room -= len(answer.spans)
            answers.append(answer if room >= 0 else VectorAnswer(int(VectorStatus.BUSY)))
        self.state.out.append(VectorDone(event.op, VectorReply(answers)))

    def _answer(self, peer: str, item: VectorItem) -> VectorAnswer:
        shard = item.shard
        if self.state.view.primary_epoch[shard]:
            return self._asked_to_compare(peer, shard)
        allowed, epoch = self.stream.gate(shard, peer, item.authority)
        if not allowed:
            return VectorAnswer(int(VectorStatus.FENCED), epoch)
        floor = self.state.directory.floors[shard]
        vector = self.stream.applied[shard]
        if item.adopt:
            return self._adopt(item)
        theirs = AppliedVector()
        theirs.union(item.spans)
        self._compared[shard] = Compared(item.authority, theirs, item.floor, set())
        lacks = bool(item.spans) and (vector is None or vector.lacks(item.spans))
        if lacks and (shard not in self.known or floor < item.floor):
            return VectorAnswer(int(VectorStatus.LEARNING))
        if not self._hand_in(peer, shard, drop_processed=False):
            return VectorAnswer(int(VectorStatus.BUSY))
        vector = self.stream.vector(shard)
        if not lacks:
            self.known.add(shard)
            self.state.directory.raise_floor(shard, item.floor)
        return VectorAnswer(int(VectorStatus.SPANS), 0, vector.spans())

    def _asked_to_compare(self, peer: str, shard: int) -> VectorAnswer:
        """A replica of ours has noticed that it is behind (read repair): it is compared."""
        owner = self.state.view.owners[shard]
        if owner is not None and peer in owner.replicas:
            self.repair.behind(peer, shard)
            self.repair.start()
        return VectorAnswer(int(VectorStatus.BUSY))

    def _adopt(self, item: VectorItem) -> VectorAnswer:
        shard = item.shard
        if shard not in self._compared or self._compared[shard].authority != item.authority:
            return VectorAnswer(int(VectorStatus.BUSY))
        self.known.add(shard)
        self.stream.mark_all_applied(shard, item.spans)
        self._doubt_disk(shard, item.floor)
        self.state.directory.raise_floor(shard, item.floor)
        if self._handing_in.get(shard):
            return VectorAnswer(int(VectorStatus.BUSY))
        return VectorAnswer(int(VectorStatus.SPANS), 0, self.stream.vector(shard).spans())

    def _doubt_disk(self, shard: int, floor: Version) -> None:
        """This replica caught up by heads: deletes that the primary has forgotten may have passed it by."""
        state = self.state
        if floor > max(state.directory.floors[shard], state.remembered_floors[shard], state.disk_floors[shard]):
            state.disk_floors[shard] = floor

    def ask_to_compare(self, shard: int) -> None:
        """Read repair: a session knows a newer version than this replica holds, so something was missed."""
        owner, name = self.state.view.owners[shard], self.state.settings.name
        if owner is None or owner.primary == name or name not in owner.replicas:
            return
        if owner.primary in self.state.peers_up:
            item = VectorItem(shard, owner.epoch, NO_VERSION, [])
            self.state.send(owner.primary, Vector([item]), [])
            self.state.counters["read_repairs"] += 1

    # -- handing in --------------------------------------------------------------------------------------------

    def _hand_in(self, peer: str, shard: int, *, drop_processed: bool) -> bool:
        """Sends the primary what it lacks, and drops what is gone for good. True: nothing is under way."""
        compared, directory = self._compared[shard], self.state.directory
        oldest = min(compared.theirs.ranges, default=0)
        settled = directory.floors[shard] >= compared.floor
        surplus: list[Entry] = []
        for entry in list(directory.entries(shard)):
            version = entry.version
            if version == NO_VERSION or entry.key in compared.offered:
                continue
            if compared.theirs.covers(version):
                # The primary has processed it. One that compares heads would have been offered it if it were alive.
                if drop_processed:
                    directory.drop(entry)
            elif version.epoch >= compared.authority:
                continue  # the primary's own, on its stream since it was asked
            elif version > compared.floor:
                surplus.append(entry)
            elif not (settled and version.epoch < oldest and not drop_processed):
                directory.drop(entry)
        surplus += directory.ghosts(
            shard,
            lambda v: compared.floor < v and v.epoch < compared.authority and not compared.theirs.covers(v),
        )
        if self._handing_in.get(shard):
            return False
        if not surplus:
            return True
        if peer in self.state.peers_up:
            self._handing_in[shard] = len(surplus)
            self.stream.send_all(peer, surplus, Why.SURPLUS)
            self.state.counters["handed_in"] += len(surplus)
        return False

    def handed_in(self, entry: Entry, status: int | None) -> None:
        """The primary answered one item (None: it was lost, and is found again at the next comparison)."""
        left = self._handing_in.get(entry.shard, 0) - 1
        if left > 0:
            self._handing_in[entry.shard] = left
        else:
            self._handing_in.pop(entry.shard, None)
        if status in _PROCESSED:
            self.stream.mark_applied(entry.shard, entry.version)
        # STALE: the primary holds something newer, or knows that this is gone. Nobody else may find it here.
        if status == ReplicaStatus.STALE and self.state.directory.is_current(entry):
            self.state.directory.drop(entry)

    # -- heads -------------------------------------------------------------------------------------------------

    def on_offer(self, event: OfferArrived) -> None:
        """Compares a page of heads with what is here."""
        offer = event.offer
        allowed, epoch = self.stream.gate(offer.shard, event.peer, offer.authority)
        compared = self._compared.get(offer.shard)
        if not allowed or compared is None or compared.authority != offer.authority:
            # 1 stands for "unheard of": the sender tries again when our view has caught up.
            self.state.out.append(OfferDone(event.op, OfferReply([], epoch or 1)))
            return
        wanted = [index for index, head in enumerate(offer.heads) if self._wants(head)]
        self._note_offered(event.peer, offer, compared)
        self.state.out.append(OfferDone(event.op, OfferReply(wanted)))

    def _wants(self, head: OfferHead) -> bool:
        directory = self.state.directory
        current = directory.get(head.key)
        if current is not None and current.version >= head.version:
            return False
        if directory.evicted_version(head.key) >= head.version:
            return False  # repair never fetches what this node evicted
        slot = self.stream.adopt(head.key, head.checksum)
        if slot is None:
            return True
        hint = self.stream.hints.pending.get(head.key)
        source = current if current is not None and current.slot is slot else hint.entry if hint is not None else None
        if source is None or source.state is EntryState.TOMBSTONE or self.state.expiry_of(head.key):
            directory.unref(slot)
            return True  # also where blocks expire: only the primary's item says when
        directory.install(restamped(source, head.version, source.version))
        return False

    def _note_offered(self, peer: str, offer: Offer, compared: Compared) -> None:
        """What the primary offers is alive, also where our copy is newer: that one is surplus. After the last page
        everything else is settled."""
        for head in offer.heads:
            current = self.state.directory.get(head.key)
            if current is None or current.version <= head.version:
                compared.offered.add(head.key)
        if offer.last:
            self._hand_in(peer, offer.shard, drop_processed=True)

    def on_roles(self, shards: list[int], renewed: set[int]) -> None:
        """Who speaks for a shard has processed all there is; who is no replica of it any more knows nothing."""
        name, view = self.state.settings.name, self.state.view
        for shard in shards:
            owner = view.owners[shard]
            if owner is None or name not in owner.replicas:
                self.known.discard(shard)
                self._compared.pop(shard, None)
        for shard in renewed:
            self._compared.pop(shard, None)
            if view.primary_epoch[shard]:
                self.known.add(shard)
