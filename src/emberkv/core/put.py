"""Puts: reserve -> fill -> decide -> acknowledge (design 2, 3).

                    room                bytes + checksum            stamped / hinted
    PutBegin ----> RESERVED --> Fill --> PutFilled ------> WAITING --------------------> PutDone
                      |                                       |  deadline: QUEUED (session), UNKNOWN (min_copies)
                      +--> refused items carry no slot        +-----------------------------------------------

Laws: only a primary with an open lease makes versions. It stamps a put if the key is absent, or its current version is
not above what the writer had seen, or the put is fresh; a retry or replay may only fill. What was acknowledged before
it was stamped (an eventual put) is never fresh: it has seen what its accepting node held. The gate is asked before the
local store and again before the acknowledgement leaves (PutDone.gate_ns). A degraded session put is never "acked" by
a hint: it is QUEUED.
"""

from __future__ import annotations

import msgspec

from emberkv.core.directory import Entry, make_entry
from emberkv.core.effects import Fill, PutDone
from emberkv.core.events import PutBegin, PutFilled
from emberkv.core.hints import Hint, Hints
from emberkv.core.learner import Learner
from emberkv.core.lease import Lease
from emberkv.core.repair import Repair
from emberkv.core.state import OPS_MAX, State
from emberkv.core.stream import Stream
from emberkv.messages import PutItem
from emberkv.ports import Slot
from emberkv.types import (
    NO_VERSION,
    SHARDS,
    EntryState,
    PutOutcome,
    PutStatus,
    RefuseReason,
    Version,
    shard_of,
)

_NO_SPACE = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.NO_SPACE)
_TOO_LARGE = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.TOO_LARGE)
_FENCED = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.FENCED)
_BAD_BYTES = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.CHECKSUM)
_UNSUPPORTED = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.LEVEL_UNSUPPORTED)
_ACCEPTED = PutOutcome(PutStatus.ACCEPTED, copies=1)
_COUNTER = {status: f"put_{status.name.lower()}" for status in PutStatus}


class PutOp(msgspec.Struct, gc=False):
    """One put request in progress. `outcomes[i]` None means: not answered yet."""

    op: int
    begin: PutBegin
    slots: list[Slot | None]
    outcomes: list[PutOutcome | None]
    filled: bool = False
    open_items: int = 0
    copies: dict[int, PutOutcome] = msgspec.field(default_factory=dict)
    """Items that this primary has stored and that wait for more copies: index -> outcome so far."""
    epochs: dict[int, int] = msgspec.field(default_factory=dict)
    """Shards that this node has spoken for as primary, and under which epoch: the acknowledgement needs the same."""
    unsure: dict[int, set[str]] = msgspec.field(default_factory=dict)
    """Of `copies`: replicas that hold an item and were not known to hold all else when they said so."""
    spoken: dict[int, int] = msgspec.field(default_factory=dict)
    """Items that another primary has answered for -> its epoch: what a relay passes on."""


class Put:
    """Accepting, stamping and acknowledging."""

    def __init__(self, state: State, lease: Lease) -> None:
        self.state = state
        self.lease = lease
        self.hints = Hints(state, self.settled)
        self.repair = Repair(state, self.completed)
        self.learner = Learner(state, self.repair)
        self.stream = Stream(
            state, self.hints, self.copied, self.repair.behind, self.repair.filled, self.learner.handed_in
        )
        self.repair.stream = self.learner.stream = self.stream
        self.ops: dict[int, PutOp] = {}
        self._seq: list[tuple[int, int]] = [(0, 0)] * SHARDS
        """(epoch, last sequence number) this node has used per shard as primary."""

    # -- a request arrives -----------------------------------------------------------------------------------

    def on_begin(self, event: PutBegin) -> None:
        """Makes room. A delete has no bytes and goes straight on."""
        count = len(event.items)
        too_many = count > 0 and event.min_copies > self.state.factor_of(event.keys[0])
        if event.strong or too_many:
            # Its accepting node has checked a forward, by a policy that may not have arrived here: it shall come again.
            travels = bool(event.from_peer) and not event.strong
            outcomes: list[PutOutcome | None] = [_FENCED if travels else _UNSUPPORTED] * count
        elif len(self.ops) >= OPS_MAX:
            outcomes = [_NO_SPACE] * count
        else:
            outcomes = [None] * count
        slots: list[Slot | None] = [None] * count
        for index, item in enumerate(event.items):
            if outcomes[index] is not None:
                continue
            if event.from_peer and not self._takes_forward(event, shard_of(event.keys[index])):
                outcomes[index] = _FENCED
            elif not event.delete:
                slots[index] = slot = self.state.directory.reserve(item.length)
                if slot is None:
                    outcomes[index] = _TOO_LARGE if item.length > self.state.settings.block_bytes_max else _NO_SPACE
        op = PutOp(event.op, event, slots, outcomes)
        self.ops[event.op] = op
        if event.delete:
            self._decide_all(op, [b""] * count)
        else:
            self.state.out.append(Fill(event.op, slots))

    def on_filled(self, event: PutFilled) -> None:
        """The bytes are in the slots."""
        op = self.ops.get(event.op)
        if op is None or op.filled:
            return
        self._decide_all(op, event.checksums)

    def _decide_all(self, op: PutOp, checksums: list[bytes | None] | list[bytes]) -> None:
        op.filled = True
        for index, checksum in enumerate(checksums):
            if op.outcomes[index] is not None:
                continue
            if checksum is None:
                slot = op.slots[index]
                if slot is not None:
                    self.state.directory.unref(slot)
                op.outcomes[index] = _BAD_BYTES
            else:
                op.outcomes[index] = self._decide(op, index, checksum)
        op.open_items = op.outcomes.count(None)
        if not op.begin.delete:
            self.state.directory.residency.arrived(op.begin.keys)
        self.hints.flush(self.apply_hint)
        self._finish(op)

    def _may_stamp(self, shard: int) -> bool:
        view = self.state.view
        epoch, now_ns = view.primary_epoch[shard], self.state.now_ns
        known = epoch != 0 and view.epoch_seen[shard] <= epoch and now_ns >= view.doubt_until_ns[shard]
        return known and shard not in self.state.closed and self.lease.open(now_ns)

    def _takes_forward(self, event: PutBegin, shard: int) -> bool:
        """A forward is for the primary. One that asks to be relayed is taken if this node reaches the primary, one that
        meets a primary which is handing its shard over waits for the next one."""
        if self._may_stamp(shard):
            return True
        primary = self.state.view.primary_of(shard)
        if primary == self.state.settings.name:
            return shard in self.state.closed
        return event.relay and primary is not None and primary in self.state.peers_up

    def _decide(self, op: PutOp, index: int, checksum: bytes) -> PutOutcome | None:
        begin = op.begin
        key, item, slot = begin.keys[index], begin.items[index], op.slots[index]
        shard = shard_of(key)
        if self._may_stamp(shard):
            op.epochs[shard] = self.state.view.primary_epoch[shard]
            outcome, entry = self._stamp(shard, key, item, slot, checksum, begin.fresh, begin.delete)
            copies_wanted = begin.session and begin.min_copies > 1 and outcome.status is PutStatus.STORED
            if entry is None and copies_wanted:
                # A replay of what is stored already still has to hear of its copies: they are asked once more.
                entry = self.state.directory.get(key)
            if entry is not None:
                self.stream.replicate(entry, op.op, index, begin.from_peer)
            if not copies_wanted:
                return outcome
            op.copies[index] = outcome
            return None
        if begin.from_peer and not self._takes_forward(begin, shard):
            if slot is not None:
                self.state.directory.unref(slot)
            return _FENCED
        return self._accept(op, index, checksum)

    # -- as the primary --------------------------------------------------------------------------------------

    def _stamp(
        self, shard: int, key: bytes, item: PutItem, slot: Slot | None, checksum: bytes, fresh: bool, delete: bool
    ) -> tuple[PutOutcome, Entry | None]:
        """Stores under a new version, or (None) says what is there already; takes over the slot's reference."""
        directory = self.state.directory
        current = directory.shards[shard].get(key)
        if current is not None and current.expiry_ms and current.expiry_ms <= self.state.wall_ms:
            directory.remove(current)
            current = None
        fresh = fresh and not self.state.is_decided(item.put_id)
        self.state.remember_put(item.put_id)
        if current is not None and not fresh and current.version > item.seen:
            if slot is not None:
                directory.unref(slot)
            # Bytes decide, not the put_id alone: a version that names the writer's bytes is what it may keep.
            if delete:
                same = current.slot is None and current.put_id == item.put_id
            else:
                same = current.slot is not None and current.checksum == checksum
            if same:
                return PutOutcome(PutStatus.STORED, current.version, 1), None
            self.state.counters["conflicts"] += 1
            return PutOutcome(PutStatus.SUPERSEDED, current.version), None
        evicted = directory.evicted.get(key) if current is None else None
        replay = not fresh and evicted is not None and evicted.version > item.seen
        if replay and evicted is not None and evicted.checksum != checksum:
            # What came after this put was given up for room; only the very same bytes may come back by a replay.
            if slot is not None:
                directory.unref(slot)
            self.state.counters["conflicts"] += 1
            return PutOutcome(PutStatus.SUPERSEDED, evicted.version), None
        version = self._next_version(shard)
        if current is not None and current.version >= version:
            # Only a record or a peer that lies can bring this about; one put is refused for it, not the node lost.
            self.state.note(f"ALARM: {current.version} is above {version}, which comes after all", alarm=True)
            self.state.counters["version_conflicts"] += 1
            if slot is not None:
                directory.unref(slot)
            return PutOutcome(PutStatus.SUPERSEDED, current.version), None
        entry = make_entry(
            key,
            shard=shard,
            state=EntryState.TOMBSTONE if delete else EntryState.COMMITTED,
            version=version,
            put_id=item.put_id,
            checksum=checksum or b"\0" * 16,
            slot=slot,
            prev=current.version if current is not None else directory.evicted_version(key),
            depth=item.depth,
            parts=item.parts,
            expiry_ms=0 if delete else self.state.expiry_of(key),
        )
        directory.install(entry)
        self.stream.mark_applied(shard, version)
        return PutOutcome(PutStatus.STORED, version, 1), entry

    def _next_version(self, shard: int) -> Version:
        epoch = self.state.view.primary_epoch[shard]
        known, seq = self._seq[shard]
        seq = seq + 1 if known == epoch else 1
        self._seq[shard] = (epoch, seq)
        return Version(epoch, seq)

    def apply_hint(self, hint: Hint) -> PutOutcome | None:
        """This node is the primary of a block that it was keeping for one: a fill. None while its lease is lapsed."""
        shard = hint.entry.shard
        if not self._may_stamp(shard):
            return None
        slot, op = hint.entry.slot, self.ops.get(hint.op)
        if slot is not None:
            self.state.directory.ref(slot)
        key, fresh = hint.entry.key, self.hints.is_fresh(hint)
        outcome, entry = self._stamp(shard, key, hint.item, slot, hint.entry.checksum, fresh, slot is None)
        copies_wanted = op is not None and hint.min_copies > 1 and outcome.status is PutStatus.STORED
        if entry is None and copies_wanted:
            entry = self.state.directory.get(key)
        if entry is not None:
            self.stream.replicate(entry, hint.op, hint.index, "")
        if op is not None:
            op.epochs[shard] = self.state.view.primary_epoch[shard]
            if copies_wanted:
                op.copies[hint.index] = outcome
                hint.op = 0  # the copies settle it
        return outcome

    def copied(self, op_number: int, index: int, peer: str) -> None:
        """One more replica holds an item; it counts if it holds all else too, so that it is the next to take over."""
        op = self.ops.get(op_number)
        if op is None or index not in op.copies:
            return
        shard = shard_of(op.begin.keys[index])
        owner = self.state.view.owners[shard]
        if peer not in self.repair.complete.get(shard, ()) and (owner is None or peer not in owner.in_sync):
            op.unsure.setdefault(index, set()).add(peer)
            return
        self._count_copy(op, index)

    def completed(self, peer: str, shard: int) -> None:
        """A replica holds all that this primary holds: what it said before of single items counts now."""
        for op in [op for op in self.ops.values() if op.unsure]:
            for index in [index for index, peers in op.unsure.items() if peer in peers]:
                if shard_of(op.begin.keys[index]) == shard and index in op.copies:
                    op.unsure[index].discard(peer)
                    self._count_copy(op, index)

    def _count_copy(self, op: PutOp, index: int) -> None:
        outcome = op.copies[index]
        op.copies[index] = outcome = outcome._replace(copies=outcome.copies + 1)
        if outcome.copies >= op.begin.min_copies:
            self.settled(op.op, index, op.copies.pop(index), 0)

    # -- as an accepting node --------------------------------------------------------------------------------

    def _accept(self, op: PutOp, index: int, checksum: bytes) -> PutOutcome | None:
        """Keeps the block for its primary. Takes over the slot's reference."""
        begin = op.begin
        key, item, slot = begin.keys[index], begin.items[index], op.slots[index]
        directory = self.state.directory
        current = directory.get(key)
        same = current is not None and current.state is EntryState.COMMITTED and current.checksum == checksum
        expired = current is not None and 0 < current.expiry_ms <= self.state.wall_ms
        plain = not begin.session and not begin.from_peer and key not in self.hints.pending
        if same and plain and slot is not None and not expired:
            directory.unref(slot)
            directory.residency.touch([key])
            return _ACCEPTED
        entry = make_entry(
            key,
            state=EntryState.TOMBSTONE if begin.delete else EntryState.PENDING,
            version=NO_VERSION,
            put_id=item.put_id,
            checksum=checksum or b"\0" * 16,
            slot=slot,
            depth=item.depth,
            parts=item.parts,
        )
        # Its writer is told that it is accepted before the primary has heard of it, so it must not overwrite what is
        # put after that; it follows what this node holds. A delete has to reach the primary to mean anything, and what
        # came after it must not fall to it either: so it is answered by the primary at every level.
        waits = op.op if begin.session or begin.from_peer or begin.delete else 0
        fresh = begin.fresh and waits != 0
        # What is retried or relayed was accepted earlier: it follows only what it followed then.
        follows = begin.fresh and not begin.session and not begin.from_peer
        seen = max(item.seen, current.version) if follows and current is not None else item.seen
        stated = PutItem(item.key, item.put_id, item.length, entry.checksum, seen, item.depth, item.part, item.parts)
        copies = max(begin.min_copies, 1)
        hint = Hint(
            entry, stated, begin.session, fresh, copies, waits, index, self.state.now_ns, relayed=bool(begin.from_peer)
        )
        if not self.hints.add(hint):
            return _NO_SPACE
        return None if waits else _ACCEPTED

    # -- acknowledging ---------------------------------------------------------------------------------------

    def settled(self, op_number: int, index: int, outcome: PutOutcome, authority: int) -> None:
        """An item that was waited for has its outcome, from the primary of this epoch (0: none spoke)."""
        op = self.ops.get(op_number)
        if op is None or op.outcomes[index] is not None:
            return
        op.outcomes[index] = outcome
        if authority:
            op.spoken[index] = authority
        if op.filled and op.open_items:
            op.open_items -= 1
            self._finish(op)

    def _finish(self, op: PutOp) -> None:
        if op.open_items or op.op not in self.ops:
            return
        del self.ops[op.op]
        outcomes = [outcome for outcome in op.outcomes if outcome is not None]
        if any(self._spoke_too_late(shard, epoch) for shard, epoch in op.epochs.items()):
            self._withdraw(op, outcomes)
        for outcome in outcomes:
            self.state.counters[_COUNTER[outcome.status]] += 1
        # At least 1: a lease that is lost altogether must not look like no gate.
        gate_ns = max(self.lease.deadline_ns, 1) if op.epochs else 0
        authorities: list[int] = []
        if op.begin.from_peer:
            shards = enumerate(map(shard_of, op.begin.keys))
            authorities = [op.spoken.get(index) or op.epochs.get(shard, 0) for index, shard in shards]
        self.state.out.append(PutDone(op.op, outcomes, gate_ns, authorities))

    def _spoke_too_late(self, shard: int, epoch: int) -> bool:
        """Another may speak for the shard by now: it has another epoch, or it is on its way to somebody else."""
        return self.state.view.primary_epoch[shard] != epoch or shard in self.state.given

    def owes_an_answer(self, shard: int) -> bool:
        """Is a put that this node stored for the shard not acknowledged yet? It may wait for copies, or for other keys
        of its batch."""
        return any(shard in op.epochs for op in self.ops.values())

    def _withdraw(self, op: PutOp, outcomes: list[PutOutcome]) -> None:
        """A shard has another epoch than when this node stored for it: that store must not be acknowledged."""
        for index, outcome in enumerate(outcomes):
            shard = shard_of(op.begin.keys[index])
            epoch = op.epochs.get(shard, 0)
            if epoch and outcome.status is PutStatus.STORED and self._spoke_too_late(shard, epoch):
                outcomes[index] = outcome._replace(status=PutStatus.UNKNOWN)

    def on_tick(self, now_ns: int) -> None:
        """Ends what is overdue; sends what can be sent now."""
        self.hints.on_tick(now_ns)
        self.stream.on_tick(now_ns)
        for op in [op for op in self.ops.values() if op.filled and now_ns >= op.begin.deadline_ns]:
            self._expire(op)
        self.hints.flush(self.apply_hint)

    def _expire(self, op: PutOp) -> None:
        for index, outcome in enumerate(op.outcomes):
            if outcome is not None:
                continue
            if index in op.copies:
                # Stored here, but not yet on as many replicas as were asked for: the caller must not count on it.
                op.outcomes[index] = op.copies[index]._replace(status=PutStatus.UNKNOWN)
            else:
                hint = self.hints.pending.get(op.begin.keys[index])
                adrift = hint is not None and hint.op == op.op and hint.index == index and hint.sent_fresh
                # What may still be stamped as new is not over, and must not be called so.
                op.outcomes[index] = PutOutcome(PutStatus.UNKNOWN if adrift else PutStatus.QUEUED, copies=1)
        op.open_items = 0
        if op.begin.from_peer:
            self.hints.cancel(op.op, op.begin.keys)
        self.hints.release(op.op, op.begin.keys)
        self._finish(op)

    def abort(self, op_number: int) -> None:
        """The sender vanished before its bytes were whole: room is given back, nothing is stored."""
        op = self.ops.get(op_number)
        if op is None or op.filled:
            return  # what is stored already goes its way; its end is told, though nobody listens
        del self.ops[op_number]
        for slot in op.slots:
            if slot is not None:
                self.state.directory.unref(slot)
