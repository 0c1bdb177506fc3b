"""One core alone, stepped by hand: for tests that need a certain moment rather than a whole cluster."""

from __future__ import annotations

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.replica import Replica
from emberkv.core.state import Settings
from emberkv.core.view import encode_record, owner_key
from emberkv.messages import BlockInfo, HeartbeatRecord, LiveRecord, NodeAddress, PutItem, ReplicaItem, ShardOwner
from emberkv.ports import CommitStatus, Record, Slot
from emberkv.types import NO_VERSION, SHARDS, EntryState, Version, checksum
from harness.tier import MemoryTier

MS = 1_000_000
TTL = 600 * MS


def address(name: str) -> NodeAddress:
    return NodeAddress(name, f"{name}:1")


def live(name: str, epoch: int, incarnation: bytes = b"", *, dead: bool = False) -> bytes:
    return encode_record(LiveRecord(epoch, incarnation or checksum(name.encode()), address(name), dead))


def beat(epoch: int, counter: int) -> bytes:
    return encode_record(HeartbeatRecord(epoch, counter))


class Bare:
    """Node `a` of a cluster whose other members are only records."""

    def __init__(self, *, arena_slots: int = 64, **settings: object) -> None:
        self.now = 1_000 * MS
        self.tier = MemoryTier(arena_slots * 4096)
        values = {"ttl_ns": TTL, "margin_ns": 60 * MS, "commit_ns": 10 * MS, "members": ("a", "b", "c")} | settings
        self.core = Replica(
            Settings(name="a", incarnation=checksum(b"a"), address=address("a"), generation=1, **values),  # type: ignore[arg-type]
            self.tier,
        )
        self.revision = 0

    def step(self, event: ev.Event) -> list[fx.Effect]:
        effects = self.core.step(event)
        self.core.state.directory.check()
        self.tier.arena.check()
        return effects

    def tick(self, after_ms: float = 0, *, wall_ms: int = 0) -> list[fx.Effect]:
        self.now += int(after_ms * MS)
        return self.step(ev.Tick(self.now, wall_ms))

    def records(
        self, *records: tuple[str, bytes], full: bool = False, deleted: list[str] | None = None
    ) -> list[fx.Effect]:
        self.revision += 1
        found = [Record(key, value, self.revision) for key, value in records]
        return self.step(ev.Records(self.now, found, deleted or [], self.revision, full=full))

    def committed(
        self, commit: fx.Commit, status: CommitStatus = CommitStatus.COMMITTED, sent: int = -1
    ) -> list[fx.Effect]:
        self.revision += status is CommitStatus.COMMITTED
        return self.step(ev.Committed(self.now, commit.op, status, self.revision, self.now if sent < 0 else sent))

    def join(self) -> Bare:
        """Member with an open lease; peers b and c live."""
        effects = self.records(("live/b", live("b", 1)), ("live/c", live("c", 1)), full=True)
        self.committed(only(effects, fx.Commit))
        return self

    def own(self, *, epoch: int = 5, in_sync: tuple[str, ...] = ("a", "b"), replicas: tuple[str, ...] = ("a", "b"),
            primary: str = "a", shards: range = range(SHARDS), former: tuple[str, ...] = ()) -> Bare:  # fmt: skip
        """Owner records for these shards."""
        liveness = self.core.lease.liveness_epoch if primary == "a" else 1
        record = encode_record(ShardOwner(primary, liveness, epoch, replicas, in_sync, former))
        self.records(*((owner_key(shard), record) for shard in shards))
        return self

    def up(self, *peers: str) -> list[fx.Effect]:
        return [effect for peer in peers for effect in self.step(ev.PeerUp(self.now, peer))]

    def put(self, keys: list[bytes], datas: list[bytes], *, op: int = 1, session: bool = True, fresh: bool = True,
            min_copies: int = 1, peer: str = "", delete: bool = False, seen: Version = NO_VERSION,
            deadline_ms: int = 1000, ids: list[bytes] | None = None,
            relay: bool = False) -> list[fx.Effect]:  # fmt: skip
        """A whole put: begin, fill, filled; returns the effects of both steps without the Fill."""
        ids = ids or [checksum(b"%d" % op) + index.to_bytes(8, "big") for index in range(len(keys))]
        items = [PutItem(k[8:], i, len(d), checksum(d), seen) for k, i, d in zip(keys, ids, datas, strict=True)]
        deadline = self.now + deadline_ms * MS
        effects = self.step(
            ev.PutBegin(
                self.now, op, keys, items, deadline, session, fresh, min_copies, peer, delete=delete, relay=relay
            )
        )
        if delete:
            return effects
        fill = only(effects, fx.Fill)
        sums: list[bytes | None] = []
        for slot, data in zip(fill.slots, datas, strict=True):
            if slot is not None:
                self.tier.write(slot, data)
            sums.append(checksum(data) if slot is not None else None)
        rest = [effect for effect in effects if effect is not fill]
        return rest + self.step(ev.PutFilled(self.now, op, sums))

    def get(self, keys: list[bytes], *, op: int = 900, session: bool = True, verify: bool = False,
            local_only: bool = False, deadline_ms: int = 300, floors: list[Version] | None = None,
            if_newer: bool = False, relayed: bool = False) -> list[fx.Effect]:  # fmt: skip
        deadline = self.now + deadline_ms * MS
        return self.step(
            ev.Get(self.now, op, keys, deadline, session, local_only, verify, floors or [], if_newer, relayed)
        )

    def receive(self, *pairs: tuple[ReplicaItem, bytes], peer: str = "b", op: int = 50, fill: bool = False,
                surplus: bool = False) -> list[fx.Effect]:  # fmt: skip
        """A whole stream message: begin, fill, filled; returns the effects of the last step."""
        items = [item for item, _ in pairs]
        begun = only(self.step(ev.ReplicaBegin(self.now, op, peer, items, fill, surplus)), fx.Fill)
        sums: list[bytes | None] = []
        for slot, (_, data) in zip(begun.slots, pairs, strict=True):
            if slot is not None:
                self.tier.write(slot, data)
            sums.append(checksum(data) if slot is not None else None)
        return self.step(ev.ReplicaFilled(self.now, op, sums))

    def fetched(self, fetch: fx.Fetch, *answers: bytes | BlockInfo, version: Version = NO_VERSION,
                elapsed_ms: float = 1) -> list[fx.Effect]:  # fmt: skip
        """A peer answers a fetch: bytes are a hit of `version`."""
        infos: list[BlockInfo] = []
        slots: list[Slot | None] = []
        for answer in answers:
            if isinstance(answer, bytes):
                slot = self.core.state.directory.reserve(len(answer))
                self.tier.write(slot, answer)
                infos.append(BlockInfo(0, version, len(answer), checksum(answer)))
                slots.append(slot)
            else:
                infos.append(answer)
                slots.append(None)
        elapsed = int(elapsed_ms * MS)
        return self.step(ev.Fetched(self.now, fetch.op, fetch.peer, fetch.indices, infos, slots, elapsed))

    def unref(self, slots: list[Slot | None]) -> None:
        self.step(ev.Unref(self.now, [slot for slot in slots if slot is not None]))

    def live_slots(self) -> int:
        return len(self.tier.slots)


def only(effects: list[fx.Effect], kind: type) -> object:  # type: ignore[type-arg]
    """The one effect of a kind."""
    found = [effect for effect in effects if type(effect) is kind]
    assert len(found) == 1, f"{len(found)} {kind.__name__} in {effects}"
    return found[0]


def beats(effects: list[fx.Effect]) -> list:  # type: ignore[type-arg]
    """Commits of membership: renewals and joins."""
    return [commit for commit in all_of(effects, fx.Commit) if any(write.key == "hb/a" for write in commit.writes)]


def item(key: bytes, data: bytes, seq: int = 1, *, authority: int = 5, epoch: int = 5, payload: bool = True,
         state: EntryState = EntryState.COMMITTED, prev: Version = NO_VERSION, skip: bool = False,
         expiry_ms: int = 0) -> ReplicaItem:  # fmt: skip
    """One stamped write as a peer would send it; `skip` stands for bytes that are not sent at all."""
    digest = checksum(data) if state is EntryState.COMMITTED else b"\0" * 16
    return ReplicaItem(
        key, authority, Version(epoch, seq), b"p" * 24, digest, prev, len(data), state=int(state),
        payload=payload and not skip and state is EntryState.COMMITTED, skip=skip, expiry_ms=expiry_ms,
    )  # fmt: skip


def sends(effects: list[fx.Effect], kind: type) -> list[fx.Send]:
    """Messages of one kind among the effects."""
    return [effect for effect in effects if isinstance(effect, fx.Send) and isinstance(effect.message, kind)]


def all_of(effects: list[fx.Effect], kind: type) -> list:  # type: ignore[type-arg]
    return [effect for effect in effects if type(effect) is kind]
