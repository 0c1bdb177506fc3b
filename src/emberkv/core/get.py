"""Gets: near copy -> replicas -> former replicas -> a miss with its reason (design 6).

                 all here                      verified
    Get ----> LOCAL -------> (Verify) ---------------------> GetDone
                |  missing            bad copy dropped |
                v                                      v
             FETCHING <--------------------------- next source
                |  answered, all sources asked, or deadline
                v
             (Verify of what was here before) --> GetDone

Laws: a question changes nothing but the eviction order. `deleted` from a named replica is final. PENDING blocks are
seen by eventual reads of their accepting node only. A source that failed is asked last until its breaker closes. The
head of the prefix is asked first, so that what arrives by the deadline is a usable prefix.
"""

from __future__ import annotations

import msgspec

from emberkv.core.directory import Entry, make_entry
from emberkv.core.effects import ExistsDone, Fetch, GetDone, Reserved, Verify
from emberkv.core.events import Exists, Fetched, Get, Reserve, Verified
from emberkv.core.hints import Hints
from emberkv.core.state import OPS_MAX, State
from emberkv.messages import BlockInfo
from emberkv.ports import Slot
from emberkv.types import NO_VERSION, EntryState, MissReason, shard_of

BREAKER_FAILURES = 2
"""Failures in a row that open a peer's breaker."""
BREAKER_OPEN_NS = 500_000_000
"""How long an open breaker keeps a peer last; doubled at each failure, up to BREAKER_OPEN_MAX_NS."""
BREAKER_OPEN_MAX_NS = 8_000_000_000
FIRST_TRY_SHARE = 0.5
"""Share of the time left that a first source gets while a second one exists."""
SOURCES_PER_KEY_MAX = 3
"""Sources asked for one key: one, one retry, one former replica."""

_ABSENT = BlockInfo(int(MissReason.ABSENT))
_LATE = BlockInfo(int(MissReason.DEADLINE))
_MISSES = {int(reason): f"miss_{reason.name.lower()}" for reason in MissReason}
_HIT = int(MissReason.NONE)


class Source(msgspec.Struct):
    """What is known of a peer as a source of blocks."""

    latency_ns: float = 0.0
    failures: int = 0
    open_until_ns: int = 0


class GetOp(msgspec.Struct, gc=False):
    """One read in progress."""

    op: int
    begin: Get
    infos: list[BlockInfo]
    slots: list[Slot | None]
    tried: list[tuple[str, ...]]
    fetching: int = 0
    to_verify: bool = False


class Reads:
    """All reads in progress, and what is known of the sources."""

    def __init__(self, state: State, hints: Hints) -> None:
        self.state = state
        self.hints = hints
        self.ops: dict[int, GetOp] = {}
        self.sources: dict[str, Source] = {}

    # -- here ------------------------------------------------------------------------------------------------

    def on_get(self, event: Get) -> None:
        """Answers what is here; asks others for the rest."""
        keys = event.keys
        infos: list[BlockInfo] = []
        slots: list[Slot | None] = []
        missing = False
        shards = self.state.directory.shards
        for key in keys:
            entry = shards[shard_of(key)].get(key)
            if entry is None:
                entry = self._pending(key, event)
            if entry is None:
                missing = True
                infos.append(self._why_absent(key))
                slots.append(None)
                continue
            slot = entry.slot
            if slot is not None:
                slot.refs += 1
            infos.append(entry.info)
            slots.append(slot)
        self.state.directory.residency.touch(keys)
        if not missing and not event.verify:
            self._done(event.op, infos, slots)
            return
        op = GetOp(event.op, event, infos, slots, [()] * len(keys), to_verify=event.verify)
        self.ops[event.op] = op
        self._verify_or_fetch(op)

    def _pending(self, key: bytes, event: Get) -> Entry | None:
        if event.session or not self.hints.pending:
            return None
        hint = self.hints.pending.get(key)
        return hint.entry if hint is not None and hint.entry.slot is not None else None

    def _why_absent(self, key: bytes) -> BlockInfo:
        if key in self.state.directory.evicted:
            return BlockInfo(int(MissReason.EVICTED), self.state.directory.evicted[key])
        if key in self.hints.pending:
            return BlockInfo(int(MissReason.PENDING))
        return _ABSENT

    def _verify_or_fetch(self, op: GetOp) -> None:
        if op.to_verify:
            indices = [index for index, slot in enumerate(op.slots) if slot is not None]
            if indices:
                slots = [slot for slot in op.slots if slot is not None]
                self.state.out.append(Verify(op.op, indices, slots, [op.infos[index].checksum for index in indices]))
                return
            op.to_verify = False
        self._fetch(op)

    def on_verified(self, event: Verified) -> None:
        """Bad copies are dropped and asked for elsewhere."""
        op = self.ops.get(event.op)
        if op is None:
            return
        op.to_verify = False
        for index in event.bad:
            slot = op.slots[index]
            if slot is None:
                continue
            self.state.counters["bad_copies"] += 1
            self.drop_copy(op.begin.keys[index], slot)
            self.state.directory.unref(slot)
            op.slots[index] = None
            op.infos[index] = BlockInfo(int(MissReason.CHECKSUM), op.infos[index].version)
        self._fetch(op)

    def drop_copy(self, key: bytes, slot: Slot) -> None:
        """Forgets the entry whose bytes are bad, if it is still the one that was read."""
        entry = self.state.directory.get(key)
        if entry is not None and entry.slot is slot:
            self.state.directory.remove(entry)

    # -- elsewhere -------------------------------------------------------------------------------------------

    def _fetch(self, op: GetOp) -> None:
        """Groups what is missing by its best source; ends the read when nothing more can be asked."""
        groups: dict[str, list[int]] = {}
        more_sources = False
        if self.state.now_ns >= op.begin.deadline_ns:
            self._end_late(op)
            return
        if not op.begin.local_only and len(self.ops) <= OPS_MAX:
            for index, info in enumerate(op.infos):
                if op.slots[index] is not None or info.reason == MissReason.DELETED:
                    continue
                sources = self._sources(op.begin.keys[index], op.tried[index])
                if sources:
                    groups.setdefault(sources[0], []).append(index)
                    more_sources = more_sources or len(sources) > 1
        if not groups:
            del self.ops[op.op]
            self._done(op.op, op.infos, op.slots)
            return
        left_ns = op.begin.deadline_ns - self.state.now_ns
        deadline_ns = self.state.now_ns + int(left_ns * (FIRST_TRY_SHARE if more_sources else 1.0))
        for peer, indices in groups.items():
            for index in indices:
                op.tried[index] += (peer,)
            keys = [op.begin.keys[index] for index in indices]
            op.fetching += 1
            self.state.out.append(Fetch(op.op, peer, indices, keys, op.begin.session, deadline_ns))

    def on_tick(self, now_ns: int) -> None:
        """Ends reads whose sources did not answer in time; what still arrives finds no read and is given back."""
        for op in [op for op in self.ops.values() if now_ns >= op.begin.deadline_ns and not op.to_verify]:
            self._end_late(op)

    def _end_late(self, op: GetOp) -> None:
        """The deadline passed: what nobody was asked about in time is not known to be absent."""
        del self.ops[op.op]
        for index, info in enumerate(op.infos):
            unsure = info.reason in (MissReason.ABSENT, MissReason.PENDING) and op.slots[index] is None
            if unsure and not op.begin.local_only and self._sources(op.begin.keys[index], op.tried[index]):
                op.infos[index] = _LATE
        self._done(op.op, op.infos, op.slots)

    def _sources(self, key: bytes, tried: tuple[str, ...]) -> list[str]:
        """Who else may hold a key, best first."""
        if len(tried) >= SOURCES_PER_KEY_MAX:
            return []
        view = self.state.view
        owner = view.owners[shard_of(key)]
        if owner is None:
            return []
        name = self.state.settings.name
        named = [n for n in owner.replicas if n != name and n not in tried and view.is_live(n)]
        named.sort(key=self._cost)
        return named + [n for n in owner.former if n != name and n not in tried and view.is_live(n)]

    def _cost(self, peer: str) -> tuple[bool, float]:
        source = self.sources.get(peer)
        if source is None:
            return False, 0.0
        return source.open_until_ns > self.state.now_ns, source.latency_ns

    def on_fetched(self, event: Fetched) -> None:
        """Takes what arrived as near copies; looks on for the rest."""
        self._judge(event)
        op = self.ops.get(event.op)
        for position, index in enumerate(event.indices):
            info, slot = event.infos[position], event.slots[position]
            if op is None or op.slots[index] is not None:
                if slot is not None:
                    self.state.directory.unref(slot)
                continue
            self._take(op, index, info, slot)
        if op is None:
            return
        op.fetching -= 1
        if op.fetching == 0:
            self._fetch(op)

    def _take(self, op: GetOp, index: int, info: BlockInfo, slot: Slot | None) -> None:
        key = op.begin.keys[index]
        if slot is None:
            # A replica's own reason says more than what we knew; `absent` must not hide a checksum failure.
            if info.reason != MissReason.ABSENT or op.infos[index].reason == MissReason.NONE:
                op.infos[index] = info
            return
        local = BlockInfo(_HIT, info.version, slot.length, info.checksum, slot.offset)
        current = self.state.directory.get(key)
        if current is not None and current.slot is None and current.version >= info.version:
            op.infos[index] = current.info  # deleted meanwhile: that beats a hit of an older version
            self.state.directory.unref(slot)
            return
        op.infos[index], op.slots[index] = local, slot
        if info.version == NO_VERSION or (current is not None and current.version >= info.version):
            return  # a PENDING block of its accepting node, or nothing newer than what is here: served, not kept
        self.state.directory.ref(slot)
        self.state.directory.install(
            make_entry(
                key,
                state=EntryState.COMMITTED,
                version=info.version,
                put_id=b"\0" * 24,
                checksum=info.checksum,
                slot=slot,
            )
        )

    def _judge(self, event: Fetched) -> None:
        """Keeps latency and breaker of a source."""
        source = self.sources.setdefault(event.peer, Source())
        failed = any(info.reason in (MissReason.DEADLINE, MissReason.UNREACHABLE) for info in event.infos)
        if failed:
            source.failures += 1
            if source.failures >= BREAKER_FAILURES:
                doublings = min(source.failures - BREAKER_FAILURES, 4)
                open_ns = min(BREAKER_OPEN_NS << doublings, BREAKER_OPEN_MAX_NS)
                source.open_until_ns = self.state.now_ns + open_ns
                self.state.counters["breaker_opened"] += 1
            return
        source.failures = 0
        source.open_until_ns = 0
        per_key = event.elapsed_ns / max(len(event.infos), 1)
        source.latency_ns = per_key if source.latency_ns == 0.0 else 0.8 * source.latency_ns + 0.2 * per_key

    def _done(self, op: int, infos: list[BlockInfo], slots: list[Slot | None]) -> None:
        counters = self.state.counters
        misses = slots.count(None)
        counters["get_hits"] += len(slots) - misses
        if misses:
            for info in infos:
                if info.reason != _HIT:
                    counters[_MISSES[info.reason]] += 1
        self.state.out.append(GetDone(op, infos, slots))

    # -- smaller questions -----------------------------------------------------------------------------------

    def on_reserve(self, event: Reserve) -> None:
        """Room for bytes that a peer is about to send."""
        self.state.out.append(Reserved([self.state.directory.reserve(length) for length in event.lengths]))

    def on_exists(self, event: Exists) -> None:
        """Presence here, without touching the eviction order, and whom to ask about the rest."""
        reasons: list[int] = []
        ask: dict[str, list[int]] = {}
        for index, key in enumerate(event.keys):
            entry = self.state.directory.get(key)
            if entry is None:
                hint = self.hints.pending.get(key)
                entry = hint.entry if hint is not None and hint.entry.slot is not None else None
            if entry is not None:
                reasons.append(entry.info.reason)
                continue
            reasons.append(self._why_absent(key).reason)
            sources = self._sources(key, ())
            if sources:
                ask.setdefault(sources[0], []).append(index)
        self.state.out.append(ExistsDone(event.op, reasons, ask))
