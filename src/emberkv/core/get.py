"""Gets: near copy -> replicas -> former replicas -> a miss with its reason (design 6).

                 all here                      verified
    Get ----> LOCAL -------> (Verify) ---------------------> GetDone
                |  missing            bad copy dropped |
                v                                      v
              (Load from this node's own disk) ---> FETCHING <--- next source
                |  answered, all sources asked, or deadline
                v
             (Verify of what was here before) --> GetDone

Laws: a question changes nothing but the eviction order. `deleted` from a named replica is final. PENDING blocks are
seen by eventual reads of their accepting node only. A source that failed is asked last until its breaker closes. The
head of the prefix is asked first, so that what arrives by the deadline is a usable prefix.
Session reads: nothing below the reader's floor is served. Only the primary and in-sync replicas speak for a key; any
other copy is served only after one of them said that it knows nothing newer, or, on a replica that reaches nobody, as
the best there is. Who reaches neither asks one other node to look (a relay), and no further.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from emberkv.core.directory import Entry, make_entry
from emberkv.core.effects import ExistsDone, Fetch, GetDone, Load, Reserved, Verify
from emberkv.core.events import Exists, Fetched, Get, Loaded, Reserve, Verified
from emberkv.core.hints import Hints
from emberkv.core.nvme import OwnDisk
from emberkv.core.sources import Sources
from emberkv.core.state import OPS_MAX, State
from emberkv.core.stream import Stream
from emberkv.messages import BlockInfo
from emberkv.ports import Slot
from emberkv.types import NO_VERSION, EntryState, MissReason, Version, shard_of

FIRST_TRY_SHARE = 0.5
"""Share of the time left that a first source gets while a second one exists."""

_ABSENT = BlockInfo(int(MissReason.ABSENT))
_LATE = BlockInfo(int(MissReason.DEADLINE))
_CANNOT_TELL = BlockInfo(int(MissReason.BEHIND))
"""A node that does not speak for a key has no copy of it: that says nothing."""
_NOBODY = BlockInfo(int(MissReason.UNREACHABLE))
_MISSES = {int(reason): f"miss_{reason.name.lower()}" for reason in MissReason}
_HIT = int(MissReason.NONE)
_FAILED = (MissReason.DEADLINE, MissReason.UNREACHABLE, MissReason.FENCED)
_MAY_BE_ON_DISK = (MissReason.ABSENT, MissReason.EVICTED, MissReason.CHECKSUM)
_UNSURE = (MissReason.ABSENT, MissReason.PENDING, MissReason.BEHIND)


class GetOp(msgspec.Struct, gc=False):
    """One read in progress."""

    op: int
    begin: Get
    infos: list[BlockInfo]
    slots: list[Slot | None]
    tried: list[tuple[str, ...]]
    least: list[Version] = []
    """Per key: what is below it is not served (a session's floor, and what replicas said is gone). Empty: anything."""
    doubtful: dict[int, Entry] = {}
    """Copies that a session read found here and that only a replica can vouch for; each holds a slot reference."""
    answered: set[int] = set()
    """Keys of which somebody who may speak for them has said something: any copy from `least` on will do then."""
    vouched: set[int] = set()
    """Keys whose doubtful copy was vouched for; its bytes are still to be verified."""
    fetching: int = 0
    to_verify: bool = False
    loaded: bool = False
    """This node's own disk was asked."""
    relayed: bool = False
    """One other node was asked to look where this one does not reach."""


def _above(info: BlockInfo) -> Version:
    """From which version on a copy found elsewhere may be alive, after a node said this of a key that it lacks: an
    evicted version may come back, what lies at or below a floor may not."""
    if info.reason == MissReason.EVICTED:
        return info.version
    if info.reason == MissReason.ABSENT and info.version != NO_VERSION:
        return Version(info.version.epoch, info.version.seq + 1)
    return NO_VERSION


class Reads:
    """All reads in progress."""

    def __init__(self, state: State, hints: Hints, stream: Stream, ask_to_compare: Callable[[int], None]) -> None:
        """`ask_to_compare(shard)`: this replica has missed something (read repair)."""
        self.state = state
        self.hints = hints
        self.stream = stream
        self.ask_to_compare = ask_to_compare
        self.disk = OwnDisk(state, stream, ask_to_compare)
        self.ops: dict[int, GetOp] = {}
        self.sources = Sources(state)

    # -- here ------------------------------------------------------------------------------------------------

    def on_get(self, event: Get) -> None:
        """Answers what is here; asks others for the rest."""
        if event.session or event.floors:
            self._on_session_get(event)
            return
        keys = event.keys
        infos: list[BlockInfo] = []
        slots: list[Slot | None] = []
        missing = False
        shards, wall_ms = self.state.directory.shards, self.state.wall_ms
        for key in keys:
            entry = shards[shard_of(key)].get(key)
            if entry is None or (entry.expiry_ms and entry.expiry_ms <= wall_ms):
                hint = self.hints.pending.get(key) if self.hints.pending else None
                entry = hint.entry if hint is not None and hint.entry.slot is not None else None
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
        least = [_above(info) for info in infos] if missing else []
        op = GetOp(event.op, event, infos, slots, [()] * len(keys), least, to_verify=event.verify)
        self.ops[event.op] = op
        self._verify_or_fetch(op)

    def _on_session_get(self, event: Get) -> None:
        """Nothing below the floors; nothing that only a near copy vouches for."""
        count = len(event.keys)
        floors = event.floors or [NO_VERSION] * count
        op = GetOp(event.op, event, [_ABSENT] * count, [None] * count, [()] * count, list(floors), {}, set())
        op.to_verify = event.verify
        wall_ms = self.state.wall_ms
        for index, key in enumerate(event.keys):
            shard = shard_of(key)
            entry = self.state.directory.shards[shard].get(key)
            speaks = self._speaks_for(shard, may_be_cut_off=event.local_only)
            if entry is None or (entry.expiry_ms and entry.expiry_ms <= wall_ms):
                op.infos[index] = info = self._why_absent(key) if speaks or not event.local_only else _CANNOT_TELL
                op.least[index] = max(op.least[index], _above(info))
                if speaks:
                    op.answered.add(index)
            elif entry.version < floors[index]:
                op.infos[index] = BlockInfo(int(MissReason.BEHIND), entry.version)
                self.ask_to_compare(shard)
            elif not speaks:
                op.infos[index] = BlockInfo(int(MissReason.BEHIND), entry.version)
                if not event.local_only and entry.slot is not None:
                    op.doubtful[index] = entry
                    self.state.directory.ref(entry.slot)
            elif event.if_newer and entry.version == floors[index] and entry.slot is not None:
                op.infos[index] = BlockInfo(int(MissReason.CURRENT), entry.version, 0, entry.checksum)
            else:
                op.infos[index] = entry.info
                if entry.slot is not None:
                    op.slots[index] = self.state.directory.ref(entry.slot)
        self.state.directory.residency.touch(event.keys)
        self.ops[event.op] = op
        self._verify_or_fetch(op)

    def _speaks_for(self, shard: int, *, may_be_cut_off: bool) -> bool:
        """May this node's own copy answer a session read? A node whose lease has lapsed may have left the replicas
        unnoticed: it answers those who ask it, and asks others before it answers for itself."""
        view, name = self.state.view, self.state.settings.name
        owner = view.owners[shard]
        if owner is None or name not in owner.in_sync:
            return False
        if owner.primary != name and view.live_revision.get(name, 0) > view.owner_revision[shard]:
            return False  # restarted since the record was written: what it was in sync with is gone
        return may_be_cut_off or self.state.lease_open()

    def _why_absent(self, key: bytes) -> BlockInfo:
        if key in self.state.directory.evicted:
            return BlockInfo(int(MissReason.EVICTED), self.state.directory.evicted_version(key))
        if key in self.hints.pending:
            return BlockInfo(int(MissReason.PENDING))
        floor = self.state.directory.floors[shard_of(key)]
        # Whoever asks learns with it which old copies are gone for good.
        return BlockInfo(int(MissReason.ABSENT), floor) if floor != NO_VERSION else _ABSENT

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
        """Forgets the entry whose bytes are bad, if it is still the one that was read; nothing older may take its
        place."""
        directory = self.state.directory
        entry = directory.get(key)
        if entry is not None and entry.slot is slot:
            directory.remove(entry)
            directory.remember_evicted(key, entry.version, replaced=entry.prev != NO_VERSION, checksum=entry.checksum)

    # -- elsewhere -------------------------------------------------------------------------------------------

    def _fetch(self, op: GetOp) -> None:
        """Groups what is missing by its best source; ends the read when nothing more can be asked."""
        if self.state.now_ns >= op.begin.deadline_ns:
            self._end_late(op)
            return
        if self.disk.is_on and not op.loaded and self._load(op):
            return
        groups: dict[tuple[str, bool, bool], list[int]] = {}
        more_sources = False
        if not op.begin.local_only and len(self.ops) <= OPS_MAX:
            for index, info in enumerate(op.infos):
                if op.slots[index] is not None or info.reason in (MissReason.DELETED, MissReason.CURRENT):
                    continue
                sources = self.sources.of(op.begin.keys[index], op.tried[index], session=op.begin.session)
                if sources:
                    session = op.begin.session and index not in op.answered
                    groups.setdefault((sources[0], session, index in op.doubtful), []).append(index)
                    more_sources = more_sources or len(sources) > 1
        if groups:
            left_ns = op.begin.deadline_ns - self.state.now_ns
            deadline_ns = self.state.now_ns + int(left_ns * (FIRST_TRY_SHARE if more_sources else 1.0))
            for (peer, session, doubtful), indices in groups.items():
                self._ask(op, peer, indices, deadline_ns, session=session, if_newer=doubtful and session)
        elif not self._relay(op):
            self._settle_doubtful(op)
            self._admit_ignorance(op)
            if op.to_verify:
                self._verify_or_fetch(op)
                return
            del self.ops[op.op]
            self._done(op.op, op.infos, op.slots)

    def _load(self, op: GetOp) -> bool:
        """Asks this node's own disk, once. A session read believes it only where this node speaks for the key."""
        op.loaded = True
        begin = op.begin
        indices = [
            index
            for index, info in enumerate(op.infos)
            if op.slots[index] is None
            and info.reason in _MAY_BE_ON_DISK
            and (index in op.answered or not (begin.session or begin.floors))
        ]
        if not indices:
            return False
        keys = [begin.keys[index] for index in indices]
        floors = [self.disk.floor(key) for key in keys]
        if begin.floors:
            floors = [max(floor, begin.floors[index]) for floor, index in zip(floors, indices, strict=True)]
        op.fetching += 1
        wall_ms, if_newer = self.state.wall_ms, begin.if_newer
        self.state.out.append(Load(op.op, indices, keys, floors, begin.deadline_ns, wall_ms, if_newer))
        return True

    def on_loaded(self, event: Loaded) -> None:
        """Takes what the disk had; others are asked for the rest."""
        op = self.ops.get(event.op)
        for position, index in enumerate(event.indices):
            info, slot = event.infos[position], event.slots[position]
            if op is None or op.slots[index] is not None:
                if slot is not None:
                    self.state.directory.unref(slot)
            elif slot is not None:
                key, expiry_ms, depth = op.begin.keys[index], event.expiry_ms[position], event.depth[position]
                op.infos[index] = info = self.disk.take(key, info, slot, expiry_ms, depth)
                op.slots[index] = slot if info.reason == _HIT else None
            elif info.reason in (MissReason.CURRENT, MissReason.CHECKSUM):
                op.infos[index] = info
        if op is None:
            return
        op.fetching -= 1
        if op.fetching == 0:
            self._fetch(op)

    def _ask(
        self,
        op: GetOp,
        peer: str,
        indices: list[int],
        deadline_ns: int,
        *,
        session: bool,
        if_newer: bool = False,
        relay: bool = False,
    ) -> None:
        floors: list[Version] = []
        if session:
            floors = [op.doubtful[i].version if i in op.doubtful else op.least[i] for i in indices]
        for index in indices:
            op.tried[index] += (peer,)
        keys = [op.begin.keys[index] for index in indices]
        op.fetching += 1
        self.state.out.append(Fetch(op.op, peer, indices, keys, session, deadline_ns, floors, if_newer, relay))

    def _relay(self, op: GetOp) -> bool:
        """One other node is asked to look for what nobody who may speak for it could be asked about."""
        begin = op.begin
        if not begin.session or begin.local_only or begin.relayed or op.relayed or len(self.ops) > OPS_MAX:
            return False
        lost = [i for i, info in enumerate(op.infos) if op.slots[i] is None and self._unheard(op, i, info.reason)]
        groups: dict[bool, list[int]] = {}
        for index in lost:
            groups.setdefault(index in op.doubtful, []).append(index)
        peer = self.sources.relay(op.tried[lost[0]]) if lost else None
        if peer is None:
            return False
        op.relayed = True
        self.state.counters["relayed_reads"] += len(lost)
        for doubtful, indices in groups.items():
            self._ask(op, peer, indices, begin.deadline_ns, session=True, if_newer=doubtful, relay=True)
        return True

    def _unheard(self, op: GetOp, index: int, reason: int) -> bool:
        """Did nobody who may speak for this key say anything, although somebody should know?"""
        return index not in op.answered and reason != MissReason.DELETED and len(op.tried[index]) > 0

    def _settle_doubtful(self, op: GetOp) -> None:
        """Copies that nobody vouched for: served by a replica that reached nobody, else given back."""
        for index, entry in op.doubtful.items():
            assert entry.slot is not None
            alone = index not in op.answered and self._speaks_for(entry.shard, may_be_cut_off=True)
            # It may have become a replica since this read began: then only what it holds now counts.
            alone = alone and self.state.directory.is_current(entry)
            if op.slots[index] is None and alone and entry.version >= op.least[index]:
                self._serve_doubtful(op, index, entry)
            else:
                self.state.directory.unref(entry.slot)
        op.doubtful = {}

    def _serve_doubtful(self, op: GetOp, index: int, entry: Entry) -> None:
        op.infos[index], op.slots[index] = entry.info, entry.slot
        op.vouched.add(index)
        op.to_verify = op.begin.verify

    def _admit_ignorance(self, op: GetOp) -> None:
        """A session read for whose key nobody could speak must not say that it is absent."""
        if not op.begin.session or op.begin.local_only:
            return
        for index, info in enumerate(op.infos):
            silent = op.slots[index] is None and index not in op.answered
            if silent and info.reason in (MissReason.ABSENT, MissReason.PENDING):
                op.infos[index] = _NOBODY

    def on_tick(self, now_ns: int) -> None:
        """Ends reads whose sources did not answer in time; what still arrives finds no read and is given back."""
        overdue = [op for op in self.ops.values() if now_ns >= op.begin.deadline_ns]
        for op in [op for op in overdue if op.fetching or not op.to_verify]:
            self._end_late(op)

    def _end_late(self, op: GetOp) -> None:
        """The deadline passed: what nobody was asked about in time is not known to be absent."""
        del self.ops[op.op]
        for entry in op.doubtful.values():
            if entry.slot is not None:
                self.state.directory.unref(entry.slot)
        for index in op.vouched if op.to_verify else ():
            slot = op.slots[index]
            if slot is not None:
                self.state.directory.unref(slot)
                op.infos[index], op.slots[index] = _LATE, None
        for index, info in enumerate(op.infos):
            unsure = info.reason in _UNSURE and op.slots[index] is None
            key, tried = op.begin.keys[index], op.tried[index]
            if unsure and not op.begin.local_only and self.sources.of(key, tried, session=op.begin.session):
                op.infos[index] = _LATE
        self._done(op.op, op.infos, op.slots)

    def on_fetched(self, event: Fetched) -> None:
        """Takes what arrived as near copies; looks on for the rest."""
        self.sources.judge(event)
        op = self.ops.get(event.op)
        for position, index in enumerate(event.indices):
            info, slot = event.infos[position], event.slots[position]
            if op is None or op.slots[index] is not None:
                if slot is not None:
                    self.state.directory.unref(slot)
            elif slot is None:
                self._missed(op, index, info)
            else:
                self._take(op, index, info, slot)
        if op is None:
            return
        op.fetching -= 1
        if op.fetching == 0:
            self._fetch(op)

    def _missed(self, op: GetOp, index: int, info: BlockInfo) -> None:
        """A source answered without bytes."""
        entry = op.doubtful.get(index)
        if info.reason not in _FAILED and info.reason != MissReason.BEHIND:
            op.answered.add(index)
        vouched = info.reason == MissReason.CURRENT
        if info.reason in (MissReason.ABSENT, MissReason.EVICTED) and entry is not None:
            # Who speaks for the key has let it go for room, or never had it: what it would know of a later end lies
            # at or below what it states.
            vouched = entry.version > info.version
            vouched = vouched or (info.reason == MissReason.EVICTED and entry.version == info.version)
        if entry is not None and vouched and entry.version >= op.least[index]:
            del op.doubtful[index]
            self._serve_doubtful(op, index, entry)
            return
        if op.least:
            op.least[index] = max(op.least[index], _above(info))
        if info.reason == MissReason.DELETED:
            self._deleted(op, index, info)
        elif info.reason == MissReason.CURRENT:
            op.infos[index] = BlockInfo(int(MissReason.BEHIND), info.version)
        elif info.reason == MissReason.ABSENT:
            # It must not hide what says more, like a checksum failure.
            if op.infos[index].reason == _HIT or entry is not None:
                op.infos[index] = _ABSENT
        elif info.reason != MissReason.BEHIND or (
            index not in op.answered and op.infos[index].reason not in (MissReason.DEADLINE, MissReason.UNREACHABLE)
        ):
            # Who does not speak for the key must not hide that nobody else could be asked.
            op.infos[index] = info

    def _deleted(self, op: GetOp, index: int, info: BlockInfo) -> None:
        """Final, unless this session has seen something newer. A near copy that it ended goes."""
        if op.least and info.version < op.least[index]:
            op.infos[index] = BlockInfo(int(MissReason.BEHIND), info.version)
            return
        op.infos[index] = info
        key = op.begin.keys[index]
        current = self.state.directory.get(key)
        if not self._is_replica(shard_of(key)):
            if current is not None and current.version < info.version:
                self.state.directory.remove(current)
            self.state.directory.end(key, info.version)

    def _is_replica(self, shard: int) -> bool:
        owner = self.state.view.owners[shard]
        return owner is not None and self.state.settings.name in owner.replicas

    def _take(self, op: GetOp, index: int, info: BlockInfo, slot: Slot) -> None:
        """Bytes arrived."""
        op.answered.add(index)
        key = op.begin.keys[index]
        current = self.state.directory.get(key)
        if current is not None and current.slot is None and current.version >= info.version:
            op.infos[index] = current.info  # deleted meanwhile: that beats a hit of an older version
            self.state.directory.unref(slot)
            return
        stale = bool(op.least) and info.version < op.least[index]
        if stale or (op.begin.session and info.version == NO_VERSION):
            op.infos[index] = BlockInfo(int(MissReason.BEHIND), info.version)
            self.state.directory.unref(slot)
            return
        op.infos[index] = BlockInfo(_HIT, info.version, slot.length, info.checksum, slot.offset)
        op.slots[index] = slot
        if info.version == NO_VERSION or (current is not None and current.version >= info.version):
            return  # a PENDING block of its accepting node, or nothing newer than what is here: served, not kept
        if self._keeps(key, info.version):
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

    def _keeps(self, key: bytes, version: Version) -> bool:
        """May what was read elsewhere stay here as a copy? Not where blocks expire, since only the primary knows when.
        A replica keeps only what it has processed; what it has missed reaches it through repair, in order. A primary
        takes what a former replica still had as if it had been handed in."""
        shard = shard_of(key)
        if self.state.expiry_of(key):
            return False
        if self.state.directory.evicted_version(key) > version:
            return False
        if not self._is_replica(shard) or self.stream.vector(shard).covers(version):
            return True
        if not self.state.view.primary_epoch[shard]:
            self.ask_to_compare(shard)
            return False
        if version <= self.state.directory.floors[shard]:
            return False
        self.stream.mark_applied(shard, version)
        self.stream.others_behind(shard, "")
        return True

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
        on_disk: dict[int, Version] = {}
        wall_ms = self.state.wall_ms
        for index, key in enumerate(event.keys):
            entry = self.state.directory.get(key)
            if entry is None or (entry.expiry_ms and entry.expiry_ms <= wall_ms):
                hint = self.hints.pending.get(key)
                entry = hint.entry if hint is not None and hint.entry.slot is not None else None
            if entry is not None:
                reasons.append(entry.info.reason)
                continue
            reasons.append(self._why_absent(key).reason)
            if self.disk.is_on and reasons[-1] in _MAY_BE_ON_DISK:
                on_disk[index] = self.disk.floor(key)
            sources = self.sources.of(key, (), session=False)
            if sources:
                ask.setdefault(sources[0], []).append(index)
        self.state.out.append(ExistsDone(event.op, reasons, ask, on_disk, wall_ms))
