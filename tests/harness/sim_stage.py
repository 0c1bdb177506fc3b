"""A stage for oracles: nodes that do nothing, on which a test plays what an oracle shall see."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.directory import make_entry
from emberkv.core.lease import Phase
from emberkv.core.replica import Replica
from emberkv.core.state import Settings
from emberkv.core.view import encode_record, owner_key
from emberkv.messages import (
    BlockInfo,
    HeartbeatRecord,
    LiveRecord,
    NodeAddress,
    PutItem,
    ReplicaItem,
    Replicate,
    ReplicateReply,
    ShardOwner,
)
from emberkv.ports import Record, Write
from emberkv.sim.coordinator import CommitSeen
from emberkv.sim.engine import MS, Fault, Options
from emberkv.sim.history import History, Put, Request
from emberkv.sim.oracles import Oracles
from emberkv.sim.process import Ack, MemoryTier
from emberkv.types import NO_VERSION, EntryState, Level, MissReason, PutOutcome, PutStatus, Version, checksum, shard_of

KEY = b"scope..1" + checksum(b"a key") * 2
SHARD = shard_of(KEY)
MISSED = BlockInfo(int(MissReason.ABSENT))


class Node:
    """As much of a Process as oracles look at."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.name, self.lives, self.alive, self.paused = name, 1, True, False
        self.incarnation = name.encode() * 16
        self.clock = SimpleNamespace(now_ns=lambda: stage.now)
        self.tier = MemoryTier(64)
        times = {"ttl_ns": 600 * MS, "margin_ns": 60 * MS, "commit_ns": 10 * MS}
        settings = Settings(name, name.encode() * 16, NodeAddress(name, f"{name}:1"), ("a", "b", "c"), 1, **times)
        self.core = Replica(settings, self.tier)
        self.core.state.view.set_membership(1)

    def open_lease(self, until_ns: int = 1 << 60) -> None:
        self.core.lease.phase, self.core.lease.deadline_ns = Phase.MEMBER, until_ns

    def hold(self, put: Put, version: Version) -> None:
        """Puts an entry into the directory."""
        slot = None
        if not put.delete:
            slot = self.tier.reserve(len(put.data))
            assert slot is not None
            self.tier.write(slot, put.data)
        state = EntryState.TOMBSTONE if put.delete else EntryState.COMMITTED
        digest = checksum(put.data) if put.data else b"\0" * 16
        entry = make_entry(put.key, state=state, version=version, put_id=put.put_id, checksum=digest, slot=slot)
        self.core.state.directory.install(entry)
        self.core.put.stream.mark_applied(entry.shard, version)


class Stage:
    """The cluster that oracles are given, and the hand that moves it."""

    def __init__(self, names: str = "abc", options: Options | None = None) -> None:
        self.now = 10_000 * MS
        self.options = options or Options(nodes=len(names))
        self.names = tuple(names)
        self.waivers: dict[str, int] = {}
        self.damaged: set[bytes] = set()
        self.tick_ms, self.lateness_ms = 10.0, 20.0
        self.budget = SimpleNamespace(ttl_ms=600.0, observer_ms=650.0, takeover_ms=30.0)
        self.coordinator = SimpleNamespace(records={}, revision=0)
        self.later: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []
        self._observers: list[tuple[Callable[..., None], tuple[str, ...]]] = []
        self.processes: dict[str, Any] = {name: Node(self, name) for name in names}
        self.history = History(self)
        self.oracles = Oracles(self, self.history)
        self._op = 0

    # -- what oracles call ---------------------------------------------------------------------------------------

    def observe(self, observer: Callable[..., None], *kinds: str) -> None:
        self._observers.append((observer, kinds))

    def after(self, delay_ns: float, action: Callable[..., None], *arguments: Any) -> None:
        self.later.append((self.now + delay_ns, action, arguments))

    # -- what tests play -----------------------------------------------------------------------------------------

    def tell(self, kind: str, name: str, detail: Any) -> None:
        for observer, kinds in self._observers:
            if kind in kinds:
                observer(kind, self.processes.get(name), detail)

    def pass_ms(self, duration_ms: float) -> None:
        self.now += int(duration_ms * MS)
        due, self.later = [x for x in self.later if x[0] <= self.now], [x for x in self.later if x[0] > self.now]
        for _, action, arguments in due:
            action(*arguments)

    def commit(self, name: str, records: dict[str, bytes], *, restored: bool = False) -> None:
        self.coordinator.revision += 1
        revision = self.coordinator.revision
        changed = [Record(key, value, revision) for key, value in records.items()]
        self.coordinator.records |= {record.key: record for record in changed}
        writes = [Write(key, value) for key, value in records.items()]
        self.tell("commit", name, CommitSeen(writes, changed, revision, restored))

    def own(self, name: str, epoch: int, replicas: str = "abc", *, shard: int = SHARD, liveness: int = 1) -> ShardOwner:
        """`name` becomes primary by the true record; its own view and lease follow."""
        owner = ShardOwner(name, liveness, epoch, tuple(replicas), tuple(replicas))
        view = self.processes[name].core.state.view
        view.primary_epoch[shard] = view.epoch_seen[shard] = epoch
        self.processes[name].open_lease()
        self.commit(name, {owner_key(shard): encode_record(owner)})
        return owner

    def know(self, name: str, shard: int = SHARD) -> None:
        """A node is told of the shard's record as it is now."""
        record = self.coordinator.records[owner_key(shard)]
        self.processes[name].core.state.view.apply([record], [], full=False, now_ns=self.now)
        self.tell("event", name, ev.Records(self.now, [record], [], record.revision, full=False))

    def alive(self, name: str, *, dead: bool = False, by: str = "", liveness: int = 1) -> None:
        live = LiveRecord(liveness, name.encode() * 16, NodeAddress(name, f"{name}:1"), dead)
        self.commit(by or name, {f"live/{name}": encode_record(live)})

    def beat(self, name: str) -> None:
        self.commit(name, {f"hb/{name}": encode_record(HeartbeatRecord(1, self.coordinator.revision))})

    def kill(self, name: str) -> None:
        self.processes[name].alive = False
        self.tell("life", name, "kill")

    def freeze(self, name: str) -> None:
        self.processes[name].paused = True
        self.tell("life", name, "pause")

    def fault(self, fault: Fault, *, ends: bool = False) -> None:
        self.tell("fault", "", ((f"end of {fault.text()}" if ends else fault.text()), fault))

    # -- replication ---------------------------------------------------------------------------------------------

    def item(self, put: Put, version: Version, authority: int) -> ReplicaItem:
        state = EntryState.TOMBSTONE if put.delete else EntryState.COMMITTED
        digest = checksum(put.data) if put.data else b"\0" * 16
        return ReplicaItem(put.key, authority, version, put.put_id, digest, state=int(state), length=put.length)

    def stream(
        self, source: str, target: str, put: Put, version: Version, *, authority: int, fill: bool = False
    ) -> None:
        """A stamped write leaves one node and is taken in by another."""
        items = [self.item(put, version, authority)]
        self.tell("effect", source, fx.Send(target, 1, Replicate(items, fill=fill), []))
        self._op += 1
        self.tell("event", target, ev.ReplicaBegin(self.now, self._op, source, items, fill))
        self.tell("effect", target, fx.ReplicaDone(self._op, ReplicateReply([0], [0])))

    # -- clients -------------------------------------------------------------------------------------------------

    def put(
        self,
        name: str = "a",
        *,
        status: PutStatus = PutStatus.STORED,
        version: Version = NO_VERSION,
        copies: int = 1,
        level: Level = Level.SESSION,
        token: str = "",
        delete: bool = False,
        min_copies: int = 1,
        key: bytes = KEY,
        took_ms: float = 1.0,
        deadline_ms: float = 150.0,
        holders: str = "",
        authority: int = 0,
    ) -> Put:
        """A client's put from its call to its return; `holders` are streamed to by the node, which is its primary."""
        self.pass_ms(0.1)
        put = self.history.new_put(key, "client", delete=delete, length=100)
        request = self.history.begin("client", name, level, [key], deadline_ms, puts=[put], token=token)
        request.min_copies = min_copies
        self._op += 1
        item = PutItem(key[8:], put.put_id, put.length)
        begin = ev.PutBegin(self.now, self._op, [key], [item], 0, level is Level.SESSION, True, min_copies, "", delete)
        self.tell("event", name, begin)
        outcomes = [PutOutcome(status, version, copies)]
        self.tell("effect", name, fx.PutDone(self._op, outcomes))
        for holder in holders:
            self.stream(name, holder, put, version, authority=authority or version.epoch)
        self.pass_ms(took_ms)
        self.tell("ack", name, Ack(begin, outcomes, []))
        self.history.put_ended(request, outcomes)
        return put

    def get(
        self,
        found: Put | None,
        version: Version = NO_VERSION,
        name: str = "a",
        *,
        reason: MissReason = MissReason.NONE,
        level: Level = Level.SESSION,
        token: str = "",
        floor: Version | None = None,
        key: bytes = KEY,
        took_ms: float = 1.0,
        data: bytes | None = None,
    ) -> Request:
        """A client's read; `found` None with reason NONE: bytes are `data`."""
        self.pass_ms(0.1)
        floors = [floor] if floor is not None else []
        request = self.history.begin("client", name, level, [key], 150.0, token=token, floors=floors)
        self.pass_ms(took_ms)
        if found is not None and not found.delete:
            data = found.data
        if found is not None and found.delete:
            reason = MissReason.DELETED
        digest = checksum(data) if data is not None else b"\0" * 16
        self.history.get_ended(request, [BlockInfo(int(reason), version, len(data or b""), digest)], [data])
        return request
