"""One core alone, stepped by hand: for tests that need a certain moment rather than a whole cluster."""

from __future__ import annotations

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.replica import Replica
from emberkv.core.state import Settings
from emberkv.core.view import encode_record, owner_key
from emberkv.messages import HeartbeatRecord, LiveRecord, NodeAddress, PutItem, ShardOwner
from emberkv.ports import CommitStatus, Record, Slot
from emberkv.types import NO_VERSION, SHARDS, Version, checksum
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

    def tick(self, after_ms: float = 0) -> list[fx.Effect]:
        self.now += int(after_ms * MS)
        return self.step(ev.Tick(self.now))

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
            primary: str = "a", shards: range = range(SHARDS)) -> Bare:  # fmt: skip
        """Owner records for these shards."""
        liveness = self.core.lease.liveness_epoch if primary == "a" else 1
        record = encode_record(ShardOwner(primary, liveness, epoch, replicas, in_sync))
        self.records(*((owner_key(shard), record) for shard in shards))
        return self

    def up(self, *peers: str) -> list[fx.Effect]:
        return [effect for peer in peers for effect in self.step(ev.PeerUp(self.now, peer))]

    def put(self, keys: list[bytes], datas: list[bytes], *, op: int = 1, session: bool = True, fresh: bool = True,
            min_copies: int = 1, peer: str = "", delete: bool = False, seen: Version = NO_VERSION,
            deadline_ms: int = 1000, ids: list[bytes] | None = None) -> list[fx.Effect]:  # fmt: skip
        """A whole put: begin, fill, filled; returns the effects of both steps without the Fill."""
        ids = ids or [checksum(b"%d" % op) + index.to_bytes(8, "big") for index in range(len(keys))]
        items = [PutItem(k[8:], i, len(d), checksum(d), seen) for k, i, d in zip(keys, ids, datas, strict=True)]
        deadline = self.now + deadline_ms * MS
        effects = self.step(
            ev.PutBegin(self.now, op, keys, items, deadline, session, fresh, min_copies, peer, delete=delete)
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
            local_only: bool = False, deadline_ms: int = 300) -> list[fx.Effect]:  # fmt: skip
        return self.step(ev.Get(self.now, op, keys, self.now + deadline_ms * MS, session, local_only, verify))

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


def all_of(effects: list[fx.Effect], kind: type) -> list:  # type: ignore[type-arg]
    return [effect for effect in effects if type(effect) is kind]
