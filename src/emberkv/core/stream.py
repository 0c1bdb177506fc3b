"""The in-order stream of stamped writes from a primary to its backups and learners (design 2, 3).

Sending: the entries that one step stamps leave as one message per peer. A copy counts when the backup says STORED
or STALE. What cannot be sent, or is lost with a connection, marks the (peer, shard) as behind; repair compares.
Receiving: one gate (authority against the highest epoch known), then merge = max. An authority that this node has not
heard of is not believed: it is answered FENCED with epoch 0, and the sender tries again through repair. The epoch
inside an item's version is data: it is merged and never gated.
Law: on a replica, what the directory holds under a version the applied vector covers.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import msgspec

from emberkv.core import rebalance
from emberkv.core.directory import Entry, make_entry
from emberkv.core.effects import Fill, ReplicaDone
from emberkv.core.events import ReplicaBegin, ReplicaFilled
from emberkv.core.hints import REJECTIONS_MAX, Hints
from emberkv.core.merge import AppliedVector, merge, same_version_other_bytes, stamp_of
from emberkv.core.state import ANSWER_OVERDUE_LEASES, OPS_MAX, SEND_BYTES_MAX, State
from emberkv.messages import ReplicaItem, ReplicaStatus, Replicate, ReplicateReply, Span
from emberkv.ports import Slot
from emberkv.types import BATCH_KEYS_MAX, NO_VERSION, SHARDS, EntryState, Version, shard_of

REJECTED_MEMORY_MAX = 1024
"""Keys whose checksum failures are counted; all are forgotten beyond it, which only means to try again."""
BACKLOG_ITEMS_MAX = 8192
"""Unanswered items per peer; who falls out of it catches up by repair."""


class Why(IntEnum):
    """Why an entry is sent."""

    STREAM = 0
    """Just stamped here."""
    FILL = 1
    """Repair: the replica lacks it."""
    SURPLUS = 2
    """From a replica to its primary, which lacks it."""


class Sent(msgspec.Struct, gc=False):
    """One stamped entry on its way to one peer."""

    entry: Entry
    op: int = 0
    index: int = 0
    why: Why = Why.STREAM
    payload: bool = True
    skip: bool = False
    """The write is told without its bytes."""


class Flight(msgspec.Struct, gc=False):
    """One stream message in flight."""

    peer: str
    sent: list[Sent]
    sent_ns: int


class Receiving(msgspec.Struct, gc=False):
    """One stream message whose payload is being read."""

    peer: str
    items: list[ReplicaItem]
    statuses: list[int]
    epochs: list[int]
    slots: list[Slot | None]
    fill: bool
    surplus: bool


class Stream:
    """Both ends of replication on this node."""

    def __init__(
        self,
        state: State,
        hints: Hints,
        copied: Callable[[int, int, str], None],
        behind: Callable[[str, int], None],
        filled: Callable[[str, int, bool], None],
        handed_in: Callable[[Entry, int | None], None],
    ) -> None:
        """`copied(op, index, peer)`: a replica holds an item. `behind(peer, shard)`: it may lack something.
        `filled(peer, shard, arrived)`: one item of repair was answered. `handed_in(entry, status)`: the primary
        answered one item of our surplus; None: it was lost."""
        self.state = state
        self.hints = hints
        self.copied = copied
        self.behind = behind
        self.filled = filled
        self.handed_in = handed_in
        self.applied: list[AppliedVector | None] = [None] * SHARDS
        self.flights: dict[int, Flight] = {}
        self._batch: dict[str, list[Sent]] = {}
        self._backlog: dict[str, int] = {}
        self._receiving: dict[int, Receiving] = {}
        self._rejected: dict[bytes, int] = {}
        """Checksum failures per key that repair sent."""

    # -- sending ---------------------------------------------------------------------------------------------

    def replicate(self, entry: Entry, op: int, index: int, accepted_at: str) -> None:
        """Sends a freshly stamped entry to every other replica of its shard."""
        owner = self.state.view.owners[entry.shard]
        if owner is None:
            return
        for peer in owner.replicas:
            if peer == self.state.settings.name:
                continue
            if peer not in self.state.peers_up or self._backlog.get(peer, 0) >= BACKLOG_ITEMS_MAX:
                self.behind(peer, entry.shard)
                continue
            self._queue(peer, Sent(entry, op, index, payload=peer != accepted_at))

    def send_all(self, peer: str, entries: list[Entry], why: Why) -> None:
        """Sends entries that repair has found missing at the other side."""
        for entry in entries:
            self._queue(peer, Sent(entry, why=why))

    def flying(self, peer: str, shard: int) -> bool:
        """Is anything of a shard on its way to a peer and not answered yet?"""
        return any(
            flight.peer == peer and any(sent.entry.shard == shard for sent in flight.sent)
            for flight in self.flights.values()
        )

    def _queue(self, peer: str, sent: Sent) -> None:
        self._batch.setdefault(peer, []).append(sent)
        self._backlog[peer] = self._backlog.get(peer, 0) + 1

    def flush(self) -> None:
        """Ends a step: everything queued leaves, in order."""
        if not self._batch:
            return
        batches, self._batch = self._batch, {}
        for peer, queued in batches.items():
            piece: list[Sent] = []
            size = 0
            for sent in queued:
                full = len(piece) == BATCH_KEYS_MAX or size + sent.entry.length > SEND_BYTES_MAX
                if piece and (full or sent.why != piece[0].why):
                    self._send(peer, piece)
                    piece, size = [], 0
                piece.append(sent)
                size += sent.entry.length
            self._send(peer, piece)

    def _keeps(self, peer: str, entry: Entry) -> bool:
        """Does the block's namespace want a copy at this replica? One that wants fewer than the shard has replicas is
        kept by the first ones after the primary, and by those where placement would have it (a move is under way)."""
        factor = self.state.factor_of(entry.key)
        owner = self.state.view.owners[entry.shard]
        if owner is None or factor >= self.state.settings.factor:
            return True
        others = [name for name in owner.replicas if name != owner.primary]
        return peer in others[: factor - 1] or peer in rebalance.proposed(self.state.view, entry.shard, factor)

    def _send(self, peer: str, piece: list[Sent]) -> None:
        view, why = self.state.view, piece[0].why
        # A replica that hands in speaks under its primary's epoch, which is the highest that it knows.
        epochs = view.epoch_seen if why is Why.SURPLUS else view.primary_epoch
        items, slots = [], []
        for sent in piece:
            entry = sent.entry
            here = entry.slot is not None and self.state.directory.is_current(entry)
            wanted = not sent.skip and (why is Why.SURPLUS or self._keeps(peer, entry))
            # Bytes that were replaced or evicted since cannot be sent: the other side still has to know of the write,
            # so that it keeps nothing older.
            skip = entry.state is EntryState.COMMITTED and (not wanted or (sent.payload and not here))
            payload = sent.payload and here and not skip
            if payload and entry.slot is not None:
                slots.append(entry.slot)
            items.append(
                ReplicaItem(
                    entry.key,
                    epochs[entry.shard],
                    entry.version,
                    entry.put_id,
                    entry.checksum,
                    entry.prev,
                    entry.length,
                    entry.depth,
                    int(entry.state),
                    entry.parts,
                    entry.expiry_ms,
                    payload,
                    skip=skip,
                )
            )
        message = Replicate(items, fill=why is Why.FILL, surplus=why is Why.SURPLUS)
        request = self.state.send(peer, message, slots)
        self.flights[request] = Flight(peer, piece, self.state.now_ns)

    def on_answer(self, peer: str, request: int, reply: ReplicateReply) -> None:
        """A backup answered."""
        flight = self.flights.pop(request, None)
        if flight is None:
            return
        self._backlog[peer] = self._backlog.get(peer, 0) - len(flight.sent)
        if len(reply.statuses) != len(flight.sent):
            for sent in flight.sent:
                self._lost(peer, sent)
            return
        for sent, status, epoch in zip(flight.sent, reply.statuses, reply.epochs, strict=True):
            self._answered(peer, sent, status, epoch)

    def _answered(self, peer: str, sent: Sent, status: int, epoch: int) -> None:
        shard = sent.entry.shard
        if status == ReplicaStatus.FENCED:
            self.doubt(shard, epoch)
        if sent.why is Why.SURPLUS:
            if status == ReplicaStatus.CHECKSUM and self._hopeless(sent.entry):
                status = ReplicaStatus.STALE  # the bytes are bad here, and nobody has others of this version
            self.handed_in(sent.entry, status)
        elif status in (ReplicaStatus.STORED, ReplicaStatus.STALE, ReplicaStatus.NO_SPACE):
            if sent.why is Why.FILL:
                self.filled(peer, shard, True)
            elif sent.op and status != ReplicaStatus.NO_SPACE:
                self.copied(sent.op, sent.index, peer)
        elif status == ReplicaStatus.NEED_PAYLOAD and not sent.payload:
            self._queue(peer, Sent(sent.entry, sent.op, sent.index, sent.why))
        elif status == ReplicaStatus.CHECKSUM and sent.why is Why.FILL and self._hopeless(sent.entry):
            # Nobody gets bad bytes, but nothing older may stay there either.
            self._queue(peer, Sent(sent.entry, why=Why.FILL, skip=True))
        else:
            self._lost(peer, sent)

    def _hopeless(self, entry: Entry) -> bool:
        """Bytes that fail again and again are bad in this node's memory: repair must not send them for ever. They
        stay until a read verifies them, which drops them."""
        if len(self._rejected) >= REJECTED_MEMORY_MAX:
            self._rejected.clear()
        self._rejected[entry.key] = count = self._rejected.get(entry.key, 0) + 1
        self.state.counters["fills_rejected"] += 1
        return count > REJECTIONS_MAX

    def doubt(self, shard: int, epoch: int) -> None:
        """A peer claims that somebody speaks for a higher epoch. Only the coordinator's record makes that true, so
        until it had time to arrive this node keeps still, whatever its lease says; then it believes its own record."""
        view = self.state.view
        if epoch > max(view.epoch_seen[shard], view.primary_epoch[shard]):
            view.doubt_until_ns[shard] = self.state.now_ns + self.state.settings.ttl_ns
            self.state.counters["fenced_by_peer"] += 1

    def _lost(self, peer: str, sent: Sent) -> None:
        if sent.why is Why.SURPLUS:
            self.handed_in(sent.entry, None)
        elif sent.why is Why.FILL:
            self.filled(peer, sent.entry.shard, False)
        else:
            self.behind(peer, sent.entry.shard)

    def on_peer_down(self, peer: str) -> None:
        """Unanswered items are unknown: their shards are compared when the peer is back."""
        for request in [number for number, flight in self.flights.items() if flight.peer == peer]:
            for sent in self.flights.pop(request).sent:
                self._lost(peer, sent)
        self._backlog.pop(peer, None)

    def on_tick(self, now_ns: int) -> None:
        """What was never answered is taken as lost; a late answer finds no flight and changes nothing."""
        limit_ns = ANSWER_OVERDUE_LEASES * self.state.settings.ttl_ns
        for request in [number for number, f in self.flights.items() if now_ns - f.sent_ns > limit_ns]:
            flight = self.flights.pop(request)
            self._backlog[flight.peer] = self._backlog.get(flight.peer, 0) - len(flight.sent)
            for sent in flight.sent:
                self._lost(flight.peer, sent)

    # -- receiving -------------------------------------------------------------------------------------------

    def gate(self, shard: int, peer: str, authority: int) -> tuple[bool, int]:
        """May this peer speak for the shard? (yes, 0), or (no, higher epoch known; 0 when the peer's is unheard of)."""
        view = self.state.view
        seen = view.epoch_seen[shard]
        if authority < seen:
            self.state.counters["fenced"] += 1
            return False, seen
        owner = view.owners[shard]
        if authority > seen or owner is None or owner.primary != peer:
            return False, 0
        return True, 0

    def _admits(self, event: ReplicaBegin, item: ReplicaItem) -> tuple[bool, int]:
        """The gate for one item: its primary speaks, or (surplus) a replica speaks to its primary."""
        shard = shard_of(item.key)
        if not event.surplus:
            allowed, epoch = self.gate(shard, event.peer, item.authority)
            return allowed and item.version.epoch <= item.authority, epoch
        view = self.state.view
        owner, epoch = view.owners[shard], view.primary_epoch[shard]
        ours = epoch != 0 and item.authority == epoch and event.peer != view.name
        # What is of our own epoch we have stamped ourselves, or nobody has.
        known = owner is not None and event.peer in owner.replicas and item.version.epoch < epoch
        return ours and known, view.epoch_seen[shard]

    def on_begin(self, event: ReplicaBegin) -> None:
        """Checks authority and makes room; the bytes come next."""
        first = ReplicaStatus.NO_SPACE if len(self._receiving) >= OPS_MAX else ReplicaStatus.STORED
        statuses = [int(first)] * len(event.items)
        epochs = [0] * len(event.items)
        slots: list[Slot | None] = []
        for index, item in enumerate(event.items):
            allowed, epoch = self._admits(event, item)
            slot = None
            if not allowed:
                statuses[index], epochs[index] = int(ReplicaStatus.FENCED), epoch
            elif item.skip:
                statuses[index] = int(ReplicaStatus.NO_SPACE)
            elif statuses[index] == ReplicaStatus.STORED and item.payload:
                slot = self.state.directory.reserve(item.length)
                if slot is None:
                    statuses[index] = int(ReplicaStatus.NO_SPACE)
            slots.append(slot)
        self._receiving[event.op] = Receiving(
            event.peer, event.items, statuses, epochs, slots, event.fill, event.surplus
        )
        self.state.out.append(Fill(event.op, slots))

    def on_filled(self, event: ReplicaFilled) -> None:
        """The bytes are here: merges and answers."""
        receiving = self._receiving.pop(event.op, None)
        if receiving is None:
            return
        grown: set[int] = set()
        for index, checksum in enumerate(event.checksums):
            shard = shard_of(receiving.items[index].key)
            vector = self.vector(shard)
            before = vector.covers(receiving.items[index].version)
            self._take(receiving, index, shard, checksum)
            if receiving.surplus and not before and vector.covers(receiving.items[index].version):
                grown.add(shard)
        self.state.directory.residency.arrived([item.key for item in receiving.items])
        self.state.out.append(ReplicaDone(event.op, ReplicateReply(receiving.statuses, receiving.epochs)))
        for shard in sorted(grown):
            # What one replica handed in, the others have to process too: the next comparison finds it missing there.
            self.others_behind(shard, receiving.peer)

    def others_behind(self, shard: int, but: str) -> None:
        """This primary has processed something that it did not stamp: its other replicas are compared anew."""
        owner = self.state.view.owners[shard]
        for peer in owner.replicas if owner is not None else ():
            if peer not in (but, self.state.settings.name):
                self.behind(peer, shard)

    def _take(self, receiving: Receiving, index: int, shard: int, checksum: bytes | None) -> None:
        """Decides one item whose bytes are here; its slot is kept by the entry or given back."""
        item, slot = receiving.items[index], receiving.slots[index]
        seen = self.state.view.epoch_seen[shard]
        if receiving.statuses[index] == ReplicaStatus.STORED and item.authority < seen:
            # A higher epoch was learned while the bytes came in.
            receiving.statuses[index], receiving.epochs[index] = int(ReplicaStatus.FENCED), seen
            self._drop(slot)
        elif receiving.statuses[index] == ReplicaStatus.NO_SPACE:
            self._no_space(item, slot, replaced=receiving.surplus)
        elif receiving.statuses[index] == ReplicaStatus.STORED:
            if item.payload and checksum != item.checksum:
                receiving.statuses[index] = int(ReplicaStatus.CHECKSUM)
                self._drop(slot)
            elif self._is_gone(receiving, item, shard):
                receiving.statuses[index] = int(ReplicaStatus.STALE)
                self._drop(slot)
                self.mark_applied(shard, item.version)
            else:
                receiving.statuses[index] = int(self._merge_in(shard, item, slot))

    def _drop(self, slot: Slot | None) -> None:
        if slot is not None:
            self.state.directory.unref(slot)

    def _is_gone(self, receiving: Receiving, item: ReplicaItem, shard: int) -> bool:
        """Is it certain that this version shall not be stored here, whatever is?"""
        directory = self.state.directory
        if item.expiry_ms and item.expiry_ms <= self.state.wall_ms:
            current = directory.get(item.key)
            if current is not None and current.version < item.version:
                directory.remove(current)
            return True
        evicted = directory.evicted_version(item.key)
        repairing = receiving.fill or receiving.surplus
        if evicted > item.version or (repairing and evicted == item.version):
            return True  # repair never brings back what this node gave up for room, and nothing older comes after it
        return receiving.surplus and item.version <= directory.floors[shard]

    def _no_space(self, item: ReplicaItem, slot: Slot | None, *, replaced: bool) -> None:
        """The write counts as processed although it is not kept: nothing older may stay in its place. `replaced`: it is
        sure that there was something older, though the item does not say what."""
        directory = self.state.directory
        self._drop(slot)
        current = directory.get(item.key)
        if current is None:
            directory.remember_evicted(item.key, item.version, replaced=replaced or item.prev != NO_VERSION)
            directory.end(item.key, item.version)
        elif current.version < item.version:
            directory.evict(current, item.version)
        self.mark_applied(shard_of(item.key), item.version)

    def _merge_in(self, shard: int, item: ReplicaItem, slot: Slot | None) -> ReplicaStatus:
        directory = self.state.directory
        current = directory.get(item.key)
        state = EntryState(item.state)
        theirs = stamp_of(item.version, state, item.checksum)
        if current is not None:
            mine = stamp_of(current.version, current.state, current.checksum)
            if same_version_other_bytes(mine, theirs):
                self.state.note(f"ALARM: version {item.version} names two contents of one key", alarm=True)
                self.state.counters["version_conflicts"] += 1
            if merge(mine, theirs) == mine:
                self._drop(slot)
                self.mark_applied(shard, item.version)
                return ReplicaStatus.STORED if mine == theirs else ReplicaStatus.STALE
        if state is EntryState.COMMITTED and slot is None:
            slot = self.adopt(item.key, item.checksum)
            if slot is None:
                return ReplicaStatus.NEED_PAYLOAD
        directory.install(
            make_entry(
                item.key,
                state=state,
                version=item.version,
                put_id=item.put_id,
                checksum=item.checksum,
                slot=slot,
                prev=item.prev,
                depth=item.depth,
                parts=item.parts,
                expiry_ms=item.expiry_ms,
                shard=shard,
            )
        )
        self.mark_applied(shard, item.version)
        self.state.remember_put(item.put_id)
        return ReplicaStatus.STORED

    def adopt(self, key: bytes, checksum: bytes) -> Slot | None:
        """This node accepted the put itself, or holds equal bytes under a lower version: one more reference of them."""
        hint = self.hints.pending.get(key)
        for entry in (hint.entry if hint is not None else None, self.state.directory.get(key)):
            if entry is not None and entry.slot is not None and entry.checksum == checksum:
                return self.state.directory.ref(entry.slot)
        return None

    # -- what is processed -----------------------------------------------------------------------------------

    def vector(self, shard: int) -> AppliedVector:
        """The applied vector of a shard, made when it is first asked for."""
        vector = self.applied[shard]
        if vector is None:
            vector = self.applied[shard] = AppliedVector()
        return vector

    def mark_applied(self, shard: int, version: Version) -> None:
        """Notes a stamped write as processed."""
        self._forgotten(shard, self.vector(shard).add(version))

    def mark_all_applied(self, shard: int, spans: list[Span]) -> None:
        """Notes ranges of stamped writes as processed."""
        self._forgotten(shard, self.vector(shard).union(spans))

    def _forgotten(self, shard: int, version: Version | None) -> None:
        if version is not None:
            self.state.directory.raise_floor(shard, version)

    def on_roles(self, shards: list[int], renewed: set[int]) -> None:
        """A node that is no replica of a shard keeps no vector of it: its copies are near copies then. One that speaks
        for a shard anew speaks for all that it holds of it."""
        name, view = self.state.settings.name, self.state.view
        for shard in shards:
            owner = view.owners[shard]
            if owner is None or name not in owner.replicas:
                self.applied[shard] = None
        for shard in renewed:
            if view.primary_epoch[shard]:
                for entry in self.state.directory.entries(shard):
                    if entry.version != NO_VERSION and not self.vector(shard).covers(entry.version):
                        self.mark_applied(shard, entry.version)
