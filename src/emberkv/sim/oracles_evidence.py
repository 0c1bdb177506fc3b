"""What the oracles know: who was given which epoch and who learned of it, who held which version, who was in trouble.

Why it exists: several laws need the same facts, and a fact should be gathered once.
Laws: every fact here is read from what passes by (events, effects, true commits), never from what a core believes of
itself; a core's memory is looked at only where a law is about that memory (who stands at an open gate, what a
directory holds at the end).
Limits: a node that came to a copy in a way that is not listed at `held` counts as not holding it, which only makes the
oracles milder.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final, NamedTuple

import msgspec

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.view import DRAIN_PREFIX, HEARTBEAT_PREFIX, LIVE_PREFIX, OWNER_PREFIX, owner_key, shard_of_key
from emberkv.messages import DrainRecord, LiveRecord, PutRequest, ReplicaStatus, Replicate, ShardOwner
from emberkv.sim.engine import Fault
from emberkv.sim.history import NEVER, SCOPE, History, Put
from emberkv.types import NO_VERSION, PutStatus, Version, shard_of

Life = tuple[str, int]
"""One process life: node name and number."""
HOLDS: Final = (int(ReplicaStatus.STORED), int(ReplicaStatus.STALE))
"""Answers after which a replica holds this version or a newer one."""

MOMENTARY: Final = frozenset({"flip", "wall-jump", "compact"})
"""Kinds of faults that are over when they have begun."""
OF_A_PROCESS: Final = frozenset({"crash", "pause", "vm-pause"})
COMMITS_FAIL: Final = frozenset({"unknown", "slow-coordinator", "restore"})
"""Kinds that make some commits fail, whoever sends them."""

_decode_owner = msgspec.msgpack.Decoder(ShardOwner).decode
_decode_drain = msgspec.msgpack.Decoder(DrainRecord).decode
_decode_live = msgspec.msgpack.Decoder(LiveRecord).decode


class Change(NamedTuple):
    """A shard's owner record was written."""

    at_ns: int
    owner: ShardOwner
    revision: int


class Takeover(NamedTuple):
    """A shard got a new epoch."""

    at_ns: int
    owner: ShardOwner
    life: Life


class Copy(NamedTuple):
    """Since when a node was seen to hold a version of a key."""

    at_ns: int
    version: Version


class FaultSpan(msgspec.Struct):
    """A fault of the run, from its beginning to its end."""

    fault: Fault
    began_ns: int
    ended_ns: float = NEVER


def life_of(process: Any) -> Life:
    """The process life that is running now."""
    return (process.name, process.lives)


class Evidence:
    """Facts of one run, kept up to date by the handlers below."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.given: dict[tuple[int, int], tuple[str, int]] = {}
        """(shard, epoch) -> (node, its liveness epoch) that the coordinator gave it to."""
        self.changes: dict[int, list[Change]] = defaultdict(list)
        """Owner records per shard, with the time of each."""
        self.takeovers: dict[int, list[Takeover]] = defaultdict(list)
        """Those that began an epoch."""
        self.learned: dict[Life, dict[int, int]] = defaultdict(dict)
        """Highest epoch per shard that this life has been told of by the coordinator."""
        self.copies: dict[bytes, dict[Life, list[Copy]]] = defaultdict(dict)
        """Per key and life, rising versions."""
        self.named: dict[tuple[bytes, Version], bytes] = {}
        """Which put_id a version of a key stands for, as told in streams."""
        self.kills: list[tuple[int, Life]] = []
        self.heartbeats: dict[str, int] = {}
        """When a node's own heartbeat was last truly written."""
        self.begun: dict[tuple[Life, int], ev.PutBegin] = {}
        self.receiving: dict[tuple[Life, int], ev.ReplicaBegin] = {}
        self.forwards: dict[tuple[Life, int], PutRequest] = {}
        self.disturbed_ns: dict[str, int] = {}
        """When a process last started, ended, froze or woke."""
        self.frozen: set[str] = set()
        self.faults: list[FaultSpan] = []
        self._evicted: set[bytes] = set()
        """Keys that lives which are over had evicted."""
        self._decoded: dict[tuple[str, int], ShardOwner] = {}
        self._epochs_at: dict[int, list[tuple[int, int]]] = {}
        """(shard, epoch) of the owner records that were written at a revision."""
        self._last_owners: tuple[int, list[tuple[int, ShardOwner]]] = (-1, [])

    def owner_record(self, key: str, revision: int, value: bytes) -> ShardOwner:
        """Decodes each record once, however many nodes are told of it."""
        known = self._decoded.get((key, revision))
        if known is None:
            known = self._decoded[(key, revision)] = _decode_owner(value)
        return known

    def owners_of(self, seen: Any) -> list[tuple[int, ShardOwner]]:
        """The owner records of a commit."""
        if self._last_owners[0] == seen.revision:
            return self._last_owners[1]
        found: list[tuple[int, ShardOwner]] = []
        for write in seen.writes:
            if write.value is not None and write.key.startswith(OWNER_PREFIX):
                shard = shard_of_key(write.key)
                if shard is not None:
                    found.append((shard, self.owner_record(write.key, seen.revision, write.value)))
        self._last_owners = (seen.revision, found)
        return found

    # -- handlers ------------------------------------------------------------------------------------------------

    def on_commit(self, process: Any, seen: Any) -> None:
        """Records were truly written."""
        now = self.cluster.now
        if process is not None and len(seen.writes) <= 2:
            beat = HEARTBEAT_PREFIX + process.name
            if any(write.key == beat for write in seen.writes):
                self.heartbeats[process.name] = now
        owners = self.owners_of(seen)
        if owners:
            self._epochs_at[seen.revision] = [(shard, owner.epoch) for shard, owner in owners]
        for shard, owner in owners:
            self.changes[shard].append(Change(now, owner, seen.revision))
            if owner.primary and (shard, owner.epoch) not in self.given:
                self.given[(shard, owner.epoch)] = (owner.primary, owner.liveness_epoch)
                if not seen.restored:  # nobody takes what a backup names: every life in it is over
                    life = (owner.primary, self.cluster.processes[owner.primary].lives)
                    self.takeovers[shard].append(Takeover(now, owner, life))

    def on_records(self, process: Any, event: ev.Records) -> None:
        """A node is told of records."""
        learned = self.learned[life_of(process)]
        for revision in {record.revision for record in event.records}:
            # Of what that commit wrote, a part may have been written again since: then with an epoch that is not lower,
            # and told here too.
            for shard, epoch in self._epochs_at.get(revision, ()):
                if epoch > learned.get(shard, 0):
                    learned[shard] = epoch

    def on_put_begin(self, process: Any, event: ev.PutBegin) -> None:
        """A put arrives at a node, from a client or another node."""
        self.begun[(life_of(process), event.op)] = event

    def on_put_done(self, process: Any, done: fx.PutDone) -> None:
        """What this node says it stamped, it holds."""
        life = life_of(process)
        begin = self.begun.get((life, done.op))
        for key, outcome in zip(begin.keys if begin else (), done.outcomes, strict=False):
            if outcome.status is PutStatus.STORED:
                given = self.given.get((shard_of(key), outcome.version.epoch))
                if given is not None and given[0] == process.name:
                    self._holds(key, life, outcome.version)

    def on_replica_begin(self, process: Any, event: ev.ReplicaBegin) -> None:
        """A stream message arrives."""
        self.receiving[(life_of(process), event.op)] = event

    def on_replica_done(self, process: Any, done: fx.ReplicaDone) -> None:
        """A stream message was processed."""
        life = life_of(process)
        begin = self.receiving.pop((life, done.op), None)
        for item, status in zip(begin.items if begin else (), done.reply.statuses, strict=False):
            if status in HOLDS and not item.skip:
                self._holds(item.key, life, item.version)

    def on_send(self, process: Any, send: fx.Send) -> None:
        """A message leaves: what a primary streams, it holds."""
        message = send.message
        life = life_of(process)
        if isinstance(message, Replicate):
            for item in message.items:
                if not item.skip:
                    self._holds(item.key, life, item.version)
                    self.named.setdefault((item.key, item.version), item.put_id)
        elif isinstance(message, PutRequest):
            self.forwards[(life, send.request)] = message

    def _holds(self, key: bytes, life: Life, version: Version) -> None:
        copies = self.copies[key].setdefault(life, [])
        if not copies or copies[-1].version < version:
            copies.append(Copy(self.cluster.now, version))

    def on_life(self, process: Any, what: str) -> None:
        """A process starts, ends, freezes or wakes."""
        name = process.name
        self.disturbed_ns[name] = self.cluster.now
        if what == "kill":
            self.kills.append((self.cluster.now, life_of(process)))
            self._evicted.update(process.core.state.directory.evicted)
            self.frozen.discard(name)
        elif what in ("pause", "vm-pause"):
            self.frozen.add(name)
        elif what in ("wake", "vm-wake"):
            self.frozen.discard(name)

    def on_fault(self, _process: Any, told: tuple[str, Fault]) -> None:
        """Something goes wrong, or ends. What happens once (a flip, a jump) has no end to be told."""
        text, fault = told
        now = self.cluster.now
        if not text.startswith("end of "):
            self.faults.append(FaultSpan(fault, now, now if fault.kind in MOMENTARY else NEVER))
            return
        for span in self.faults:
            if span.fault == fault and span.ended_ns == NEVER:
                span.ended_ns = now

    # -- questions about faults ----------------------------------------------------------------------------------

    def excused(self, promise: str, at_ns: float | None = None) -> bool:
        """Do the faults of this run excuse a promise at that time (default: now)?"""
        since = self.cluster.waivers.get(promise)
        return since is not None and since <= (self.cluster.now if at_ns is None else at_ns)

    def calm(self, since_ns: float, but_for: str = "") -> bool:
        """Has nothing been wrong since then, and no process started, stopped or frozen? `but_for`: whose own crashes
        and freezes do not count."""
        return self.calm_nodes(since_ns, but_for) and not any(
            span.ended_ns > since_ns
            for span in self.faults
            if not (but_for and span.fault.node == but_for and span.fault.kind in OF_A_PROCESS)
        )

    def calm_nodes(self, since_ns: float, but_for: str = "") -> bool:
        """Has no process started, stopped or frozen since then?"""
        last = max((at_ns for name, at_ns in self.disturbed_ns.items() if name != but_for), default=0)
        return last <= since_ns and not self.frozen - {but_for}

    def jumped(self) -> bool:
        """Has a wall clock jumped in this run?"""
        return any(span.fault.kind == "wall-jump" for span in self.faults)

    def cut_off(self, name: str, since_ns: float) -> bool:
        """Could commits of this node have failed since then, for a reason that others did not share?"""
        if self.cluster.options.unknown_share:
            return True
        for span in self.faults:
            fault = span.fault
            own = fault.kind == "away" and fault.node == name
            own = own or (fault.kind == "split" and fault.flag and name in (fault.node, fault.other))
            if span.ended_ns > since_ns and (own or fault.kind in COMMITS_FAIL):
                return True
        return False

    def kept_by_primary(self, shard: int, epoch: int, since_ns: float) -> bool:
        """Has the primary of this epoch been the primary ever since, with its lease open, awake and in one life?"""
        changes = self.changes.get(shard)
        if not changes or changes[-1].owner.epoch != epoch or not changes[-1].owner.primary:
            return False
        process = self.cluster.processes[changes[-1].owner.primary]
        awake = process.alive and process.name not in self.frozen
        return awake and self.disturbed_ns.get(process.name, 0) <= since_ns and self.may_act(process)

    def may_act(self, process: Any) -> bool:
        """Is its lease open on its own clock?"""
        return bool(process.alive and process.core.lease.open(process.clock.now_ns()))

    def at_gate(self, process: Any, shard: int) -> bool:
        """Would a process whose lease is open stamp a put of this shard now?"""
        state = process.core.state
        epoch = state.view.primary_epoch[shard]
        believed = epoch != 0 and state.view.epoch_seen[shard] <= epoch and shard not in state.closed
        return believed and process.clock.now_ns() >= state.view.doubt_until_ns[shard]

    # -- questions about copies ----------------------------------------------------------------------------------

    def held(self, key: bytes, version: Version, life: Life, until_ns: float) -> bool:
        """Was this life seen to hold the version, or a newer one, by then? Seen: it stamped, streamed or took it."""
        copies = self.copies.get(key, {}).get(life, ())
        return any(copy.version >= version and copy.at_ns <= until_ns for copy in copies)

    def holders(self, key: bytes, version: Version, until_ns: float) -> set[Life]:
        """All lives that were seen to hold it by then."""
        return {life for life in self.copies.get(key, ()) if self.held(key, version, life, until_ns)}

    def lost(self, key: bytes, version: Version, until_ns: float) -> bool:
        """May the version have been lost: evicted, or with its primary, which means that a later taker of the shard was
        not seen to hold it, or a newer one, when it took the shard?"""
        if self.excused("P6b", until_ns) or self.gave_up(key):
            return True
        for taken in self.takeovers[shard_of(key)]:
            later = taken.owner.epoch > version.epoch and taken.at_ns <= until_ns
            if later and not self.held(key, version, taken.life, taken.at_ns):
                return True
        return False

    def gave_up(self, key: bytes) -> bool:
        """May a copy be gone for a reason of its own: evicted for want of room, damaged and therefore dropped, or
        expired?"""
        if key in self._evicted or key in self.cluster.damaged or not key.startswith(SCOPE):
            return True
        return any(key in process.core.state.directory.evicted for process in self.cluster.processes.values())

    def put_named(self, history: History, key: bytes, version: Version) -> Put | None:
        """The put that a version of a key stands for, as far as a stream told it."""
        return history.by_id.get(self.named.get((key, version), b""))

    # -- questions about records and directories -----------------------------------------------------------------

    def owner(self, shard: int) -> ShardOwner | None:
        """The true record, now."""
        record = self.cluster.coordinator.records.get(owner_key(shard))
        return None if record is None else self.owner_record(record.key, record.revision, record.value)

    def live(self, name: str) -> LiveRecord | None:
        """The true record of a node, now."""
        record = self.cluster.coordinator.records.get(LIVE_PREFIX + name)
        return None if record is None else _decode_live(record.value)

    def live_incarnation(self, name: str) -> bytes:
        """Which life of a node its true record speaks of."""
        record = self.live(name)
        return b"" if record is None else record.incarnation

    def unbroken(self, name: str, revision: int) -> bool:
        """Does this node live, and has neither restarted nor rejoined since that revision?"""
        record = self.cluster.coordinator.records.get(LIVE_PREFIX + name)
        return record is not None and record.revision < revision and not _decode_live(record.value).dead

    def homes(self) -> list[str]:
        """Nodes that should hold shards by the true records: those that live and do not drain, else all that live."""
        records = self.cluster.coordinator.records
        live = {name: record for name in self.cluster.names if (record := self.live(name)) and not record.dead}
        staying = []
        for name, record in live.items():
            drain = records.get(DRAIN_PREFIX + name)
            if drain is None or _decode_drain(drain.value).incarnation != record.incarnation:
                staying.append(name)
        return staying or list(live)

    def replicas_at(self, shard: int, at_ns: float) -> tuple[str, ...]:
        """Who was a replica by the true record then."""
        found: tuple[str, ...] = ()
        for change in self.changes.get(shard, ()):
            if change.at_ns <= at_ns:
                found = change.owner.replicas
        return found

    def held_by(self, key: bytes, version: Version, name: str, until_ns: float) -> bool:
        """Was the life that runs under this name now seen to hold it by then?"""
        process = self.cluster.processes[name]
        return bool(process.alive) and self.held(key, version, life_of(process), until_ns)

    def primary_at(self, key: bytes) -> str:
        """The primary of a key's shard by the true record."""
        owner = self.owner(shard_of(key))
        return "" if owner is None else owner.primary

    def knows_owner(self, name: str, shard: int) -> bool:
        """Is this node in contact with the coordinator, and its view of the shard the true one?"""
        process = self.cluster.processes[name]
        return self.may_act(process) and process.core.state.view.owners[shard] == self.owner(shard)

    def floor(self, key: bytes) -> Version:
        """Up to where deletes of this key's shard may be forgotten, as its primary says."""
        shard = shard_of(key)
        owner = self.owner(shard)
        process = self.cluster.processes.get(owner.primary) if owner is not None else None
        return NO_VERSION if process is None else process.core.state.directory.floors[shard]

    def entries(self, key: bytes) -> dict[str, Any]:
        """What each live replica by the true record has in its directory (None: nothing)."""
        owner = self.owner(shard_of(key))
        found: dict[str, Any] = {}
        for name in owner.replicas if owner is not None else ():
            process = self.cluster.processes[name]
            if process.alive:
                found[name] = process.core.state.directory.get(key)
        return found
