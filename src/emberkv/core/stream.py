"""The in-order stream of stamped writes from a primary to its backups and learners (design 2, 3).

Sending: the entries that one step stamps leave as one message per peer. A copy counts when the backup says STORED
or STALE. What cannot be sent, or is lost with a connection, marks the (peer, shard) as behind; repair compares heads.
Receiving: one gate (authority against the highest epoch known), then merge = max. An authority that this node has not
heard of is not believed: it is answered FENCED with epoch 0, and the sender tries again through repair.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from emberkv.core.directory import Entry, make_entry
from emberkv.core.effects import Fill, ReplicaDone
from emberkv.core.events import ReplicaBegin, ReplicaFilled
from emberkv.core.hints import REJECTIONS_MAX, Hint, Hints
from emberkv.core.merge import AppliedVector, merge, same_version_other_bytes, stamp_of
from emberkv.core.state import ANSWER_OVERDUE_LEASES, OPS_MAX, SEND_BYTES_MAX, State
from emberkv.messages import PutItem, ReplicaItem, ReplicaStatus, Replicate, ReplicateReply
from emberkv.ports import Slot
from emberkv.types import BATCH_KEYS_MAX, KEY_BYTES, SHARDS, EntryState, shard_of

HANDED_IN_MAX = 1024
"""Hints beyond which a learner hands nothing in: fresh puts go first, and reads find its copies anyway."""
REJECTED_MEMORY_MAX = 1024
"""Keys whose checksum failures are counted; all are forgotten beyond it, which only means to try again."""
BACKLOG_ITEMS_MAX = 8192
"""Unanswered items per peer; who falls out of it catches up by repair."""


class Sent(msgspec.Struct, gc=False):
    """One stamped entry on its way to one peer."""

    entry: Entry
    op: int = 0
    index: int = 0
    fill: bool = False
    payload: bool = True


class Flight(msgspec.Struct, gc=False):
    """One stream message in flight."""

    peer: str
    sent: list[Sent]
    sent_ns: int


class Receiving(msgspec.Struct, gc=False):
    """One stream message whose payload is being read."""

    items: list[ReplicaItem]
    statuses: list[int]
    epochs: list[int]
    slots: list[Slot | None]


class Stream:
    """Both ends of replication on this node."""

    def __init__(
        self,
        state: State,
        hints: Hints,
        copied: Callable[[int, int, str], None],
        behind: Callable[[str, int], None],
        filled: Callable[[str, int, bool], None],
    ) -> None:
        self.state = state
        self.hints = hints
        self.copied = copied
        self.behind = behind
        self.filled = filled
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

    def fill(self, peer: str, entries: list[Entry]) -> None:
        """Sends entries to a learner that asked for them."""
        for entry in entries:
            self._queue(peer, Sent(entry, fill=True))

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
                if piece and (full or sent.fill != piece[0].fill):
                    self._send(peer, piece)
                    piece, size = [], 0
                piece.append(sent)
                size += sent.entry.length
            self._send(peer, piece)

    def _send(self, peer: str, piece: list[Sent]) -> None:
        epochs = self.state.view.primary_epoch
        items, slots = [], []
        for sent in piece:
            entry = sent.entry
            # Bytes that were replaced or evicted between stamping and sending are not sent: repair compares later.
            payload = sent.payload and entry.slot is not None and self.state.directory.is_current(entry)
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
                    payload=payload,
                )
            )
        request = self.state.send(peer, Replicate(items, fill=piece[0].fill), slots)
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
        if status in (ReplicaStatus.STORED, ReplicaStatus.STALE, ReplicaStatus.NO_SPACE):
            if sent.fill:
                self.filled(peer, shard, True)
            elif sent.op and status != ReplicaStatus.NO_SPACE:
                self.copied(sent.op, sent.index, peer)
        elif status == ReplicaStatus.NEED_PAYLOAD and not sent.payload and self.state.directory.is_current(sent.entry):
            self._queue(peer, Sent(sent.entry, sent.op, sent.index, sent.fill))
        else:
            if status == ReplicaStatus.FENCED:
                self.doubt(shard, epoch)
            if status == ReplicaStatus.CHECKSUM and sent.fill and self._hopeless(sent.entry):
                self.filled(peer, shard, True)
                return
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
        if sent.fill:
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

    def on_begin(self, event: ReplicaBegin) -> None:
        """Checks authority and makes room; the bytes come next."""
        if len(self._receiving) >= OPS_MAX:
            statuses = [int(ReplicaStatus.NO_SPACE)] * len(event.items)
        else:
            statuses = [int(ReplicaStatus.STORED)] * len(event.items)
        epochs = [0] * len(event.items)
        slots: list[Slot | None] = []
        for index, item in enumerate(event.items):
            allowed, epoch = self.gate(shard_of(item.key), event.peer, item.authority)
            slot = None
            if not allowed:
                statuses[index], epochs[index] = int(ReplicaStatus.FENCED), epoch
            elif statuses[index] == ReplicaStatus.STORED and item.payload:
                slot = self.state.directory.reserve(item.length)
                if slot is None:
                    statuses[index] = int(ReplicaStatus.NO_SPACE)
            slots.append(slot)
        self._receiving[event.op] = Receiving(event.items, statuses, epochs, slots)
        self.state.out.append(Fill(event.op, slots))

    def on_filled(self, event: ReplicaFilled) -> None:
        """The bytes are here: merges and answers."""
        receiving = self._receiving.pop(event.op, None)
        if receiving is None:
            return
        epoch_seen = self.state.view.epoch_seen
        for index, (item, slot, checksum) in enumerate(
            zip(receiving.items, receiving.slots, event.checksums, strict=True)
        ):
            if receiving.statuses[index] == ReplicaStatus.STORED and item.authority < epoch_seen[shard_of(item.key)]:
                # A higher epoch was learned while the bytes came in.
                receiving.statuses[index] = int(ReplicaStatus.FENCED)
                receiving.epochs[index] = epoch_seen[shard_of(item.key)]
                if slot is not None:
                    self.state.directory.unref(slot)
            if receiving.statuses[index] == ReplicaStatus.NO_SPACE:
                self._no_space(item)
            if receiving.statuses[index] != ReplicaStatus.STORED:
                continue
            if item.payload and checksum != item.checksum:
                receiving.statuses[index] = int(ReplicaStatus.CHECKSUM)
                if slot is not None:
                    self.state.directory.unref(slot)
                continue
            receiving.statuses[index] = int(self._merge_in(item, slot))
        self.state.directory.residency.arrived([item.key for item in receiving.items])
        self.state.out.append(ReplicaDone(event.op, ReplicateReply(receiving.statuses, receiving.epochs)))

    def _no_space(self, item: ReplicaItem) -> None:
        """The write counts as processed although there was no room for it: nothing older may stay in its place."""
        directory = self.state.directory
        current = directory.get(item.key)
        if current is None:
            directory.remember_evicted(item.key, max(item.version, directory.evicted.get(item.key, item.version)))
        elif current.version < item.version:
            directory.evict(current, item.version)
        self._mark_applied(item)

    def _merge_in(self, item: ReplicaItem, slot: Slot | None) -> ReplicaStatus:
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
                if slot is not None:
                    directory.unref(slot)
                self._mark_applied(item)
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
            )
        )
        self._mark_applied(item)
        return ReplicaStatus.STORED

    def adopt(self, key: bytes, checksum: bytes) -> Slot | None:
        """This node accepted the put itself, or holds equal bytes under a lower version: one more reference of them."""
        hint = self.hints.pending.get(key)
        for entry in (hint.entry if hint is not None else None, self.state.directory.get(key)):
            if entry is not None and entry.slot is not None and entry.checksum == checksum:
                return self.state.directory.ref(entry.slot)
        return None

    def hand_in(self, entry: Entry) -> None:
        """Asks the primary to stamp anew what this learner holds above it (repair.py)."""
        if self.hints.count() >= HANDED_IN_MAX or entry.key in self.hints.pending:
            return
        if entry.slot is not None:
            self.state.directory.ref(entry.slot)
        # It has seen its own version, so it wins against anything lower; min_copies 0: nobody waits for it, and a
        # primary that evicted it on purpose need not take it back.
        item = PutItem(
            entry.key[-KEY_BYTES:],
            entry.put_id,
            entry.length,
            entry.checksum,
            entry.version,
            entry.depth,
            0,
            entry.parts,
        )
        self.hints.add(Hint(entry, item, session=False, fresh=False, min_copies=0))
        self.state.counters["handed_in"] += 1

    def _mark_applied(self, item: ReplicaItem) -> None:
        self.mark_applied(shard_of(item.key), item)

    def mark_applied(self, shard: int, item: ReplicaItem | Entry) -> None:
        """Notes a stamped write as processed."""
        vector = self.applied[shard]
        if vector is None:
            vector = self.applied[shard] = AppliedVector()
        vector.add(item.version)
