"""Blocks on their way to their primary: hinted handoff (design 2).

In health a hint is sent at once; in a partition it waits. So degraded mode is no special path: hints wait.

            sent fresh            answered
    QUEUED -----------> IN FLIGHT --------> settled (COMMITTED here as a near copy, or dropped)
       ^                    |
       +--------------------+  connection lost, overdue: never fresh again; fenced: not stored, so it still may be

Laws: bounded in count, bytes and age, the oldest dropped and counted; a later put or delete of the same key through
this node replaces its queued hint, and waits for the one in flight; a replayed hint may only fill, so it cannot rewrite
history. A node that does not reach the primary sends through one that does: one hop, and what came so goes no further.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

import msgspec

from emberkv.core.directory import Entry, restamped
from emberkv.core.merge import merge, stamp_of
from emberkv.core.state import HINTS_MAX, SEND_BYTES_MAX, State
from emberkv.messages import PutFlag, PutItem, PutReply, PutRequest
from emberkv.ports import Slot
from emberkv.types import BATCH_KEYS_MAX, KEY_BYTES, EntryState, Level, PutOutcome, PutStatus, RefuseReason, Version

Settled = Callable[[int, int, PutOutcome, int], None]
"""Called with (op, index, outcome, authority) when a put that waits for its primary is answered; authority: the epoch
of the primary that spoke, 0 where none did."""

FORWARDS_PER_PEER_MAX = 8
"""Messages in flight to one primary: enough to fill the pipe, few enough that a stuck primary holds little."""
FLUSH_MAX = 1024
"""Hints looked at in one flush: bounds the time under the lock while many wait in a partition."""
REJECTIONS_MAX = 4
"""After so many checksum failures a hint is dropped: its bytes are bad here, and repetition does not mend that."""

_BOUNCES = (RefuseReason.FENCED, RefuseReason.CHECKSUM, RefuseReason.DEADLINE)
_NO_ROOM = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.NO_SPACE)


class Hint(msgspec.Struct, gc=False):
    """One block (or delete) that waits for its primary; owns one reference of its entry's slot."""

    entry: Entry
    item: PutItem
    session: bool
    fresh: bool
    min_copies: int
    op: int = 0
    """Put that waits for the answer; 0 when nobody does."""
    index: int = 0
    born_ns: int = 0
    rejections: int = 0
    sent_fresh: bool = False
    """Left as a first send and was not certainly refused: it may yet be stamped over whatever came since, so its put is
    not over."""
    relayed: bool = False
    """Came from a node that does not reach the primary: goes to the primary itself or nowhere."""


class Forward(msgspec.Struct, gc=False):
    """One message in flight to a primary."""

    peer: str
    hints: list[Hint]
    sent_ns: int
    fresh: bool


class Hints:
    """The queue, and what is in flight."""

    def __init__(self, state: State, settled: Settled) -> None:
        self.state = state
        self.settled = settled
        self.queue: OrderedDict[bytes, Hint] = OrderedDict()
        """All that wait, oldest first: the order in which they are dropped when there are too many."""
        self.pending: dict[bytes, Hint] = {}
        """Latest hint per key, queued or in flight: what an eventual read of this node may see."""
        self.forwards: dict[int, Forward] = {}
        self.bytes = 0
        self._by_shard: dict[int, OrderedDict[bytes, Hint]] = {}
        """The queue by shard, so that those of an unreachable primary never stand before the others."""
        self._flying: dict[bytes, Hint] = {}
        """Latest hint in flight per key: a later one of this node waits for its answer and builds on its version."""
        self._useless: dict[tuple[str, int], int] = {}
        """(Relay, shard) -> until when it is not asked again, because it does not reach the primary either."""
        self._resting: set[int] = set()
        """Shards whose primary has just refused: asked again after the next tick, not at once."""
        self._per_peer: dict[str, int] = {}

    def count(self) -> int:
        """Hints queued and in flight."""
        return len(self.queue) + sum(len(forward.hints) for forward in self.forwards.values())

    def add(self, hint: Hint) -> bool:
        """Queues a hint and takes over its slot reference; False (and the reference is given back): no room for it."""
        key = hint.entry.key
        older = self.queue.get(key)
        if older is not None:
            self._dequeue(older)
            self._forget(older, PutOutcome(PutStatus.SUPERSEDED))
        while self.queue and self._full(hint):
            oldest = next(iter(self.queue.values()))
            self._dequeue(oldest)
            self.state.counters["hints_dropped"] += 1
            self._forget(oldest, _NO_ROOM)
        if self._full(hint):
            # What is in flight fills the bound alone, so there is nothing older to drop for this one.
            self.state.counters["hints_dropped"] += 1
            if hint.entry.slot is not None:
                self.state.directory.unref(hint.entry.slot)
            return False
        self._enqueue(hint)
        self.pending[key] = hint
        self.bytes += hint.entry.length
        return True

    def _full(self, hint: Hint) -> bool:
        over = self.bytes + hint.entry.length > self.state.settings.hint_bytes_max
        return over or len(self.pending) >= HINTS_MAX

    def _enqueue(self, hint: Hint, *, first: bool = False) -> None:
        key = hint.entry.key
        waiting = self._by_shard.setdefault(hint.entry.shard, OrderedDict())
        self.queue[key] = waiting[key] = hint
        if first:
            self.queue.move_to_end(key, last=False)
            waiting.move_to_end(key, last=False)

    def _dequeue(self, hint: Hint) -> None:
        key, shard = hint.entry.key, hint.entry.shard
        del self.queue[key]
        waiting = self._by_shard[shard]
        del waiting[key]
        if not waiting:
            del self._by_shard[shard]

    def _forget(self, hint: Hint, outcome: PutOutcome, authority: int = 0) -> None:
        """Ends a hint: its bytes' reference is given back and whoever waits is told."""
        self.bytes -= hint.entry.length
        if self.pending.get(hint.entry.key) is hint:
            del self.pending[hint.entry.key]
        if hint.entry.slot is not None:
            self.state.directory.unref(hint.entry.slot)
        if hint.op:
            op, hint.op = hint.op, 0
            self.settled(op, hint.index, outcome, authority)

    def is_fresh(self, hint: Hint) -> bool:
        """Never sent, and still waited for: so it is not over, and nothing that is stamped before it came after it."""
        return hint.fresh and hint.op != 0

    def flush(self, apply_here: Callable[[Hint], PutOutcome | None]) -> None:
        """Sends what can be sent: to each reachable primary, or to ourselves where we have become primary."""
        if not self.queue:
            return
        view, room = self.state.view, FLUSH_MAX
        batches: dict[tuple[object, ...], list[Hint]] = {}
        for shard in list(self._by_shard):
            if shard in self._resting:
                continue
            primary = view.primary_of(shard)
            if primary is None:
                continue
            if primary == view.name:
                room -= self._apply(shard, room, apply_here)
            else:
                room -= self._choose(shard, primary, room, batches)
            if room <= 0:
                break
        for kind, hints in batches.items():
            self._send_in_pieces(str(kind[0]), hints, relay=bool(kind[1]))

    def _choose(self, shard: int, primary: str, room: int, batches: dict[tuple[object, ...], list[Hint]]) -> int:
        """Adds the hints of a shard that can leave now to the messages; returns how many were looked at."""
        direct = primary in self.state.peers_up
        target = primary if direct else self._relay(shard, primary)
        if target is None or self._per_peer.get(target, 0) >= FORWARDS_PER_PEER_MAX:
            return 0
        looked = 0
        for hint in islice(self._by_shard[shard].values(), room):
            looked += 1
            if hint.entry.key in self._flying or (hint.relayed and not direct):
                continue
            batches.setdefault(self._kind(target, hint, relay=not direct), []).append(hint)
        return looked

    def _relay(self, shard: int, primary: str) -> str | None:
        """A live node that may reach the primary when this one does not; the shard's replicas first."""
        view = self.state.view
        owner = view.owners[shard]
        near = [name for name in (*owner.replicas, *owner.former) if name != primary] if owner is not None else []
        for name in [*near, *sorted(self.state.peers_up)]:
            if name == primary or name not in self.state.peers_up or not view.is_live(name):
                continue
            if self._useless.get((name, shard), 0) <= self.state.now_ns:
                return name
        return None

    def _kind(self, target: str, hint: Hint, *, relay: bool) -> tuple[object, ...]:
        """Hints that may share one message."""
        scope, delete = hint.entry.key[:-KEY_BYTES], hint.entry.slot is None
        copies = hint.min_copies if hint.op else 1
        return target, relay, hint.session, self.is_fresh(hint), copies, delete, scope

    def _apply(self, shard: int, room: int, apply_here: Callable[[Hint], PutOutcome | None]) -> int:
        """Hints of a shard that this node has become primary of; returns how many were looked at."""
        hints = list(islice(self._by_shard[shard].values(), room))
        for hint in hints:
            outcome = apply_here(hint)
            if outcome is None:
                break
            self._dequeue(hint)
            self._forget(hint, outcome)
        return len(hints)

    def _send_in_pieces(self, target: str, hints: list[Hint], *, relay: bool) -> None:
        piece: list[Hint] = []
        size = 0
        for hint in hints:
            if piece and (len(piece) == BATCH_KEYS_MAX or size + hint.entry.length > SEND_BYTES_MAX):
                self._send(target, piece, relay=relay)
                piece, size = [], 0
            if self._per_peer.get(target, 0) >= FORWARDS_PER_PEER_MAX:
                return
            piece.append(hint)
            size += hint.entry.length
        self._send(target, piece, relay=relay)

    def _send(self, target: str, hints: list[Hint], *, relay: bool) -> None:
        head = hints[0]
        fresh = self.is_fresh(head)
        flags = PutFlag.FORWARD | (PutFlag.FRESH if fresh else PutFlag.HINT) | (PutFlag.RELAY if relay else 0)
        if relay:
            self.state.counters["relayed_puts"] += len(hints)
        # Copies are for whoever waits for them; a hint that nobody waits for is done when the primary has it.
        copies = head.min_copies if head.op else 1
        slots: list[Slot] = [hint.entry.slot for hint in hints if hint.entry.slot is not None]
        request = PutRequest(
            [hint.item for hint in hints],
            level=int(Level.SESSION if head.session else Level.EVENTUAL),
            deadline_ms=self.state.settings.ttl_ns // 1_000_000,
            flags=int(flags),
            min_copies=copies,
            scope=head.entry.key[:-KEY_BYTES],
            delete=head.entry.slot is None,
        )
        for hint in hints:
            self._dequeue(hint)
            hint.fresh = False
            hint.sent_fresh = hint.sent_fresh or fresh
            self._flying[hint.entry.key] = hint
        number = self.state.send(target, request, slots)
        self.forwards[number] = Forward(target, hints, self.state.now_ns, fresh)
        self._per_peer[target] = self._per_peer.get(target, 0) + 1

    def on_answer(self, peer: str, request: int, reply: PutReply) -> None:
        """The primary answered; each hint is settled or queued again."""
        forward = self._take_forward(request)
        if forward is None:
            return
        if len(reply.outcomes) != len(forward.hints):
            self._requeue(forward.hints, rest=True)
            return
        bounced: list[Hint] = []
        authorities = reply.authorities or [0] * len(forward.hints)
        for hint, outcome, authority in zip(forward.hints, reply.outcomes, authorities, strict=True):
            if 0 < authority < self.state.view.epoch_seen[hint.entry.shard]:
                # An old primary speaks: what it stamped may be superseded already, so nothing is acknowledged by it.
                self.state.counters["fenced_replies"] += 1
                bounced.append(hint)
                continue
            relayed = peer != self.state.view.primary_of(hint.entry.shard)
            unsure = outcome.status is PutStatus.UNKNOWN and (relayed or not hint.op)
            if outcome.status is PutStatus.QUEUED or unsure:
                # A relay that did not hear from the primary, or a gate that closed: it may be stored, so from now on
                # it only fills.
                bounced.append(hint)
                continue
            if outcome.status is not PutStatus.REFUSED or outcome.reason not in _BOUNCES:
                self._settle(hint, outcome, authority)
                continue
            # A lapsed lease mends itself, however long it takes; bytes that do not match their checksum do not.
            hint.rejections += outcome.reason is RefuseReason.CHECKSUM
            if relayed:
                self._useless[(peer, hint.entry.shard)] = self.state.now_ns + self.state.settings.heartbeat_ns
            # Refused means certainly not stored, so the next send is a first one again.
            hint.fresh = forward.fresh
            hint.sent_fresh = hint.sent_fresh and not forward.fresh
            if hint.rejections < REJECTIONS_MAX:
                bounced.append(hint)
            else:
                self._settle(hint, outcome, authority)
        self._requeue(bounced, rest=True)

    def _take_forward(self, request: int) -> Forward | None:
        forward = self.forwards.pop(request, None)
        if forward is not None:
            self._per_peer[forward.peer] -= 1
            for hint in forward.hints:
                if self._flying.get(hint.entry.key) is hint:
                    del self._flying[hint.entry.key]
        return forward

    def _settle(self, hint: Hint, outcome: PutOutcome, authority: int) -> None:
        if outcome.status is PutStatus.STORED:
            self._keep_near_copy(hint, outcome.version)
            later = self.queue.get(hint.entry.key)
            if later is not None and not hint.sent_fresh:
                # The next put of this key through this node knows what it follows. Not where the one before it may have
                # been stamped over something unknown: what came between may be younger than the next one.
                later.item.seen = max(later.item.seen, outcome.version)
        else:
            self.state.counters["hints_lost"] += outcome.status is not PutStatus.SUPERSEDED
        self._forget(hint, outcome, authority)

    def _keep_near_copy(self, hint: Hint, version: Version) -> None:
        """The bytes have a version now: they stay here as a copy, unless something newer is here already."""
        directory, entry = self.state.directory, hint.entry
        current = directory.get(entry.key)
        if entry.slot is None:
            if current is not None and current.version < version:
                directory.remove(current)
            directory.end(entry.key, version)
            return
        if current is not None:
            mine = stamp_of(version, EntryState.COMMITTED, entry.checksum)
            if merge(stamp_of(current.version, current.state, current.checksum), mine) != mine:
                return
            if current.version == version:
                return
        if directory.evicted_version(entry.key) > version:
            return  # something newer was here and had to go
        if self.state.expiry_of(entry.key):
            return  # when it expires is for the primary to say: a copy without that would live too long
        directory.ref(entry.slot)
        directory.install(restamped(entry, version, entry.prev))

    def _requeue(self, hints: list[Hint], *, rest: bool = False) -> None:
        """Back to the front, in their order; one that a later put of its key has replaced meanwhile ends here."""
        for hint in reversed(hints):
            if self.pending.get(hint.entry.key) is not hint:
                self._forget(hint, PutOutcome(PutStatus.SUPERSEDED))
                continue
            if rest:
                self._resting.add(hint.entry.shard)
            self._enqueue(hint, first=True)

    def on_peer_down(self, peer: str) -> None:
        """What was in flight may or may not have arrived: it waits again, as a fill."""
        for request in [number for number, forward in self.forwards.items() if forward.peer == peer]:
            forward = self._take_forward(request)
            if forward is not None:
                self._requeue(forward.hints)

    def on_tick(self, now_ns: int) -> None:
        """A primary that does not answer for a whole lease is treated like a lost connection."""
        self._resting.clear()
        if self._useless:
            self._useless = {pair: until for pair, until in self._useless.items() if until > now_ns}
        if self.queue:
            self._drop_aged(now_ns - self.state.settings.hint_age_max_ns)
        if not self.forwards:
            return
        limit_ns = self.state.settings.ttl_ns
        for request in [number for number, f in self.forwards.items() if now_ns - f.sent_ns > limit_ns]:
            forward = self._take_forward(request)
            if forward is not None:
                self._requeue(forward.hints)

    def _drop_aged(self, born_before_ns: int) -> None:
        """A hint that is older than this might bring back what was deleted and is forgotten by now."""
        for hint in list(islice(self.queue.values(), FLUSH_MAX)):
            if hint.born_ns >= born_before_ns:
                return
            self._dequeue(hint)
            self.state.counters["hints_aged"] += 1
            self._forget(hint, _NO_ROOM)

    def cancel(self, op: int, keys: list[bytes]) -> None:
        """The node that a put was relayed for keeps its own hint: ours ends, unless it is in flight."""
        for key in keys:
            hint = self.queue.get(key)
            if hint is not None and hint.op == op:
                hint.op = 0
                self._dequeue(hint)
                self._forget(hint, _NO_ROOM)

    def release(self, op: int, keys: list[bytes]) -> None:
        """Nobody waits for this put any more; its hints go on by themselves."""
        for key in keys:
            hint = self.pending.get(key)
            if hint is not None and hint.op == op:
                hint.op = 0
