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
from emberkv.core.hints import Hints
from emberkv.core.merge import AppliedVector, merge, same_version_other_bytes, stamp_of
from emberkv.core.state import OPS_MAX, SEND_BYTES_MAX, State
from emberkv.messages import ReplicaItem, ReplicaStatus, Replicate, ReplicateReply
from emberkv.ports import Slot
from emberkv.types import BATCH_KEYS_MAX, SHARDS, EntryState, shard_of

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
        copied: Callable[[int, int], None],
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
        self.flights[request] = Flight(peer, piece)

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
                self.copied(sent.op, sent.index)
        elif status == ReplicaStatus.NEED_PAYLOAD and not sent.payload and self.state.directory.is_current(sent.entry):
            self._queue(peer, Sent(sent.entry, sent.op, sent.index, sent.fill))
        else:
            if status == ReplicaStatus.FENCED and epoch > self.state.view.epoch_seen[shard]:
                # Somebody speaks for a higher epoch: this node's own record is out of date, whatever its lease says.
                self.state.view.epoch_seen[shard] = epoch
                self.state.counters["fenced_by_peer"] += 1
            self._lost(peer, sent)

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
        for index, (item, slot, checksum) in enumerate(
            zip(receiving.items, receiving.slots, event.checksums, strict=True)
        ):
            if receiving.statuses[index] != ReplicaStatus.STORED:
                continue
            if item.payload and checksum != item.checksum:
                receiving.statuses[index] = int(ReplicaStatus.CHECKSUM)
                if slot is not None:
                    self.state.directory.unref(slot)
                continue
            receiving.statuses[index] = int(self._merge_in(item, slot))
        self.state.out.append(ReplicaDone(event.op, ReplicateReply(receiving.statuses, receiving.epochs)))

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
            slot = self._bytes_already_here(item, current)
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

    def _bytes_already_here(self, item: ReplicaItem, current: Entry | None) -> Slot | None:
        """This node accepted the put itself, or holds equal bytes under a lower version: one more reference of them."""
        hint = self.hints.pending.get(item.key)
        for entry in (hint.entry if hint is not None else None, current):
            if entry is not None and entry.slot is not None and entry.checksum == item.checksum:
                return self.state.directory.ref(entry.slot)
        return None

    def adopt(self, item_key: bytes, checksum: bytes) -> Slot | None:
        """As `_bytes_already_here`, for heads that a primary offers."""
        hint = self.hints.pending.get(item_key)
        for entry in (hint.entry if hint is not None else None, self.state.directory.get(item_key)):
            if entry is not None and entry.slot is not None and entry.checksum == checksum:
                return self.state.directory.ref(entry.slot)
        return None

    def _mark_applied(self, item: ReplicaItem) -> None:
        self.mark_applied(shard_of(item.key), item)

    def mark_applied(self, shard: int, item: ReplicaItem | Entry) -> None:
        """Notes a stamped write as processed."""
        vector = self.applied[shard]
        if vector is None:
            vector = self.applied[shard] = AppliedVector()
        vector.add(item.version)
