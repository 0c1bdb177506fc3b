"""The coordinator in memory, each node's way to it, and all that can be wrong with both.

    Commits of a node:  QUEUED --one at a time--> SENT --answer, or deadline: UNKNOWN--> told as event Committed
    Watch of a node:    LISTING --all records--> WATCHING --changes--> ... --compacted--> LISTING

Why it exists: ports.Coordinator promises little, and each thing that it does not promise happens here: slowness, nodes
that do not reach it, outcomes that nobody learns (applied, not, or applied late), watches that fall silent without an
error, a history that is cut, lists that are older than they claim, and a store that is put back from a backup.
Laws: `records` is the truth, changed by commits (and a restore) alone; one revision per commit; compares name mod
revisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.view import LIVE_PREFIX, OWNER_PREFIX, PREFIXES, encode_record, owner_key
from emberkv.errors import CoordinatorError
from emberkv.messages import LiveRecord, ShardOwner
from emberkv.ports import COMMIT_OPERATIONS_MAX, CommitResult, CommitStatus, Compare, Listing, Record, WatchBatch, Write
from emberkv.sim.engine import MS, Engine, Options
from emberkv.types import EPOCH_GENERATION_SHIFT, SHARDS

if TYPE_CHECKING:
    from emberkv.sim.process import Process

COMMITS_QUEUED_MAX = 256
"""As in node/coordination.py."""
RETRY_MS = 100.0
"""Pause after a list that failed."""
LATE_MS = 600.0
"""How much later than its deadline a commit of unknown outcome may still be applied."""
RESTORED_REVISIONS = 1_000_000
"""How far a restored store's revision jumps, as `etcdutl snapshot restore --bump-revision` does, so that no revision
ever names two states."""


class CommitSeen(msgspec.Struct):
    """What an observer of 'commit' gets: records as they are after it."""

    writes: Sequence[Write]
    records: list[Record]
    revision: int
    restored: bool = False


class SimCoordinator:
    """The truth, its history, and the faults that hold for everybody."""

    def __init__(self, engine: Engine, options: Options) -> None:
        self.engine = engine
        self.options = options
        self.revision = 0
        self.records: dict[str, Record] = {}
        self.history: list[tuple[int, str, bytes | None]] = []
        self.compacted = 0
        """History up to this revision is gone."""
        self.generation_now = 1
        self.down = 0
        """Count of outages under way: nobody reaches it."""
        self.slower = 1.0
        self.unknown_share = options.unknown_share
        self.stale_ms = 0.0
        """How old lists may be."""
        self.accesses: list[Access] = []
        self.seen: Callable[[Process | None, CommitSeen], None] = lambda process, commit: None
        self._last_watch: tuple[int, int, WatchBatch] | None = None
        self._states: deque[tuple[int, int]] = deque(maxlen=4096)
        """(true time, revision) of commits, for lists that are too old."""

    # -- the truth -----------------------------------------------------------------------------------------------

    def commit(self, process: Process | None, compares: Sequence[Compare], writes: Sequence[Write]) -> CommitResult:
        """Performs a commit now."""
        assert len(compares) <= COMMIT_OPERATIONS_MAX, "more compares than etcd takes"
        assert len(writes) <= COMMIT_OPERATIONS_MAX, "more writes than etcd takes"
        assert len({write.key for write in writes}) == len(writes), "etcd refuses two writes of one key"
        for compare in compares:
            record = self.records.get(compare.key)
            if (record.revision if record is not None else 0) != compare.revision:
                return CommitResult(CommitStatus.REFUSED, self.revision)
        self.revision += 1
        self._write(writes)
        changed = [self.records[write.key] for write in writes if write.value is not None]
        self.seen(process, CommitSeen(writes, changed, self.revision))
        for access in self.accesses:
            access.notice()
        return CommitResult(CommitStatus.COMMITTED, self.revision)

    def _write(self, writes: Sequence[Write]) -> None:
        for write in writes:
            self.history.append((self.revision, write.key, write.value))
            if write.value is None:
                self.records.pop(write.key, None)
            else:
                self.records[write.key] = Record(write.key, write.value, self.revision)
        self._states.append((self.engine.now, self.revision))

    def at_revision(self, revision: int) -> dict[str, Record]:
        """All records as they were."""
        found: dict[str, Record] = {}
        for changed, key, value in self.history:
            if changed > revision:
                break
            if value is None:
                found.pop(key, None)
            else:
                found[key] = Record(key, value, changed)
        return found

    def revision_before(self, age_ms: float) -> int:
        """The revision of so long ago; the oldest that is remembered if that is younger."""
        then = self.engine.now - int(age_ms * MS)
        found = self._states[0][1] if self._states else 0
        for at_ns, revision in self._states:
            if at_ns > then:
                break
            found = revision
        return found

    def list(self) -> Listing:
        """All records; an older state while lists are stale."""
        if self.stale_ms and self.engine.rng.random() < 0.7:
            revision = self.revision_before(self.engine.rng.random() * self.stale_ms)
            records = self.at_revision(revision)
            return Listing(tuple(records[key] for key in sorted(records)), revision)
        return Listing(tuple(self.records[key] for key in sorted(self.records)), self.revision)

    def watch(self, from_revision: int) -> WatchBatch:
        """Changes since, the latest of each key."""
        if from_revision <= self.compacted:
            return WatchBatch((), (), self.revision, compacted=True)
        if self._last_watch is not None and self._last_watch[:2] == (from_revision, self.revision):
            return self._last_watch[2]  # all watches ask for the same changes, one after another
        last: dict[str, tuple[int, bytes | None]] = {}
        for revision, key, value in reversed(self.history):
            if revision < from_revision:
                break
            if key.startswith(PREFIXES):
                last.setdefault(key, (revision, value))
        records = [Record(key, value, revision) for key, (revision, value) in last.items() if value is not None]
        records.sort(key=lambda record: (record.revision, record.key))
        deleted = tuple(sorted(key for key, (_, value) in last.items() if value is None))
        batch = WatchBatch(tuple(records), deleted, self.revision)
        self._last_watch = (from_revision, self.revision, batch)
        return batch

    def compact(self) -> None:
        """Cuts the history: who has not seen it all must list again."""
        self.compacted = self.revision

    def restore(self, age_ms: float) -> None:
        """Puts a backup of so long ago in place, and lifts its epochs as `emberkv coordinator recover` does: every life
        that it names is over, and no epoch that was given out since the backup can come again."""
        state = self.at_revision(self.revision_before(age_ms))
        self.generation_now += 1
        floor = self.generation_now << EPOCH_GENERATION_SHIFT
        gone = [key for key in self.records if key not in state and not key.startswith(OWNER_PREFIX)]
        writes: list[Write] = [Write(key, None) for key in gone]
        for key, record in state.items():
            value = record.value
            if key.startswith(LIVE_PREFIX):
                live = msgspec.msgpack.decode(value, type=LiveRecord)
                value = encode_record(msgspec.structs.replace(live, epoch=floor, dead=True))
            elif key.startswith(OWNER_PREFIX):
                owner = msgspec.msgpack.decode(value, type=ShardOwner)
                value = encode_record(msgspec.structs.replace(owner, epoch=floor, in_sync=()))
            writes.append(Write(key, value))
        # Of a shard that the backup does not know somebody may have spoken since: its epochs must not come again.
        unknown = [key for key in map(owner_key, range(SHARDS)) if key not in state]
        writes += [Write(key, encode_record(ShardOwner("", 0, floor, (), ()))) for key in unknown]
        self.revision += RESTORED_REVISIONS
        self._write(writes)
        self.compact()
        self.seen(None, CommitSeen(writes, list(self.records.values()), self.revision, restored=True))
        for access in self.accesses:
            access.notice()


class Access:
    """One life's commits and watch: the Committer port, and what node/coordination.py does with threads."""

    def __init__(self, coordinator: SimCoordinator, process: Process, commit_deadline_ms: float) -> None:
        self.coordinator, self.engine = coordinator, coordinator.engine
        self.process, self.life = process, process.lives
        self.deadline_ms = commit_deadline_ms
        self._queue: deque[fx.Commit] = deque()
        self._serial = 0
        self._busy = False
        self._revision = -1
        self._noticed = False
        coordinator.accesses.append(self)

    def close(self) -> None:
        """The process ended; what is on its way may still be applied."""
        if self in self.coordinator.accesses:
            self.coordinator.accesses.remove(self)

    def _delay_ns(self) -> int:
        low, high = self.coordinator.options.coordinator_ms
        return int((low + (high - low) * self.engine.rng.random()) * MS * self.coordinator.slower)

    def _run(self, action: Callable[..., None], *arguments: Any) -> None:
        self.process.run(self.life, self, action, *arguments)

    # -- commits -------------------------------------------------------------------------------------------------

    def submit(self, commit: fx.Commit) -> None:
        """As runtime.Committer."""
        if len(self._queue) >= COMMITS_QUEUED_MAX:
            self.engine.after(0, self._run, self._tell, commit, CommitResult(CommitStatus.UNKNOWN), self._now())
            return
        self._queue.append(commit)
        if not self._busy:
            self._busy = True
            self.engine.after(0, self._run, self._next)

    def _now(self) -> int:
        return self.process.clock.now_ns()

    def _tell(self, commit: fx.Commit, result: CommitResult, sent_ns: int) -> None:
        self.process.handle(ev.Committed(self._now(), commit.op, result.status, result.revision, sent_ns))

    def _next(self) -> None:
        self._busy = bool(self._queue)
        if not self._queue:
            return
        commit = self._queue.popleft()
        self._serial += 1
        serial, sent_ns = self._serial, self._now()
        wait_ns = self.process.clock.until_ns(sent_ns + int(self.deadline_ms * MS))
        self.engine.after(
            wait_ns, self._run, self._answered, serial, commit, CommitResult(CommitStatus.UNKNOWN), sent_ns
        )
        rng, process = self.engine.rng, self.process
        if self.coordinator.down or process.away:
            # What did not get out is lost; a one-way fault lets the request through and loses the answer.
            if process.away and process.away_one_way and not self.coordinator.down:
                self.engine.after(self._delay_ns(), self._apply, serial, commit, sent_ns, False)
        elif rng.random() < self.coordinator.unknown_share:
            fate = rng.random()
            if fate < 0.4:
                self.engine.after(self._delay_ns(), self._apply, serial, commit, sent_ns, False)
            elif fate < 0.7:
                late = self.deadline_ms * MS + rng.random() * LATE_MS * MS
                self.engine.after(late, self._apply, serial, commit, sent_ns, False)
        else:
            self.engine.after(self._delay_ns(), self._apply, serial, commit, sent_ns, True)

    def _apply(self, serial: int, commit: fx.Commit, sent_ns: int, answered: bool) -> None:
        if self.coordinator.down:
            return
        result = self.coordinator.commit(self.process, commit.compares, commit.writes)
        if answered and not self.process.away:
            self.engine.after(self._delay_ns(), self._run, self._answered, serial, commit, result, sent_ns)

    def _answered(self, serial: int, commit: fx.Commit, result: CommitResult, sent_ns: int) -> None:
        if serial != self._serial:
            return  # it was given up, or answered, before
        self._serial += 1
        self._tell(commit, result, sent_ns)
        self._next()

    # -- watch ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Lists everything, then watches."""
        self.engine.after(self._delay_ns(), self._list)

    def _list(self) -> None:
        if not self.process.alive or self.process.lives != self.life:
            return
        if self.coordinator.down or self.process.away:
            self.engine.after(RETRY_MS * MS, self._list)
            return
        self.engine.after(self._delay_ns(), self._run, self._listed, self.coordinator.list())

    def _listed(self, listing: Listing) -> None:
        self._revision = listing.revision
        self.process.handle(ev.Records(self._now(), list(listing.records), [], listing.revision, full=True))
        self.notice()

    def notice(self) -> None:
        """Something may have changed: the watch hears of it a little later."""
        if self._noticed or self._revision < 0 or self.process.silent:
            return
        self._noticed = True
        self.engine.after(self._delay_ns(), self._run, self._look)

    def _look(self) -> None:
        self._noticed = False
        if self.coordinator.down or self.process.away or self.process.silent or self._revision < 0:
            return  # whoever ends the fault calls notice()
        batch = self.coordinator.watch(self._revision + 1)
        if batch.compacted:
            self._revision = -1
            self._list()
            return
        self._revision = batch.revision
        if batch.records or batch.deleted:
            records, deleted = list(batch.records), list(batch.deleted)
            self.process.handle(ev.Records(self._now(), records, deleted, batch.revision, full=False))


class SimStrongStore:
    """The verbs of coord.StrongStore in memory, at once: delay and loss are the caller's (Strong, below)."""

    def __init__(self) -> None:
        self.revision = 0
        self.records: dict[str, Record] = {}

    def get(self, key: str, *, deadline_ms: int) -> Record | None:
        """As coord.StrongStore."""
        return self.records.get(key)

    def put_if(self, key: str, value: bytes, revision: int | None, *, deadline_ms: int) -> CommitResult:
        """As coord.StrongStore."""
        return self._replace(key, value, revision)

    def delete(self, key: str, revision: int | None, *, deadline_ms: int) -> CommitResult:
        """As coord.StrongStore."""
        return self._replace(key, None, revision)

    def _replace(self, key: str, value: bytes | None, revision: int | None) -> CommitResult:
        record = self.records.get(key)
        if revision is not None and (record.revision if record is not None else 0) != revision:
            return CommitResult(CommitStatus.REFUSED, self.revision)
        self.revision += 1
        if value is None:
            self.records.pop(key, None)
        else:
            self.records[key] = Record(key, value, self.revision)
        return CommitResult(CommitStatus.COMMITTED, self.revision)


StrongDone = Callable[[Any], None]
"""Gets what the verb returned, or the CoordinatorError that it raised (nothing was written)."""


class Strong:
    """The strong store as one node reaches it: each verb ends by its deadline, once, through `done`."""

    def __init__(self, store: SimStrongStore, coordinator: SimCoordinator, process: Process) -> None:
        self.store, self.coordinator, self.process = store, coordinator, process
        self.engine = coordinator.engine

    def get(self, key: str, *, deadline_ms: int, done: StrongDone) -> None:
        """`done(Record | None | CoordinatorError)`."""
        self._perform(lambda: self.store.get(key, deadline_ms=deadline_ms), deadline_ms, done, writes=False)

    def put_if(self, key: str, value: bytes, revision: int | None, *, deadline_ms: int, done: StrongDone) -> None:
        """`done(CommitResult | CoordinatorError)`."""
        self._perform(
            lambda: self.store.put_if(key, value, revision, deadline_ms=deadline_ms), deadline_ms, done, writes=True
        )

    def delete(self, key: str, revision: int | None, *, deadline_ms: int, done: StrongDone) -> None:
        """`done(CommitResult | CoordinatorError)`."""
        self._perform(lambda: self.store.delete(key, revision, deadline_ms=deadline_ms), deadline_ms, done, writes=True)

    def _perform(self, verb: Callable[[], Any], deadline_ms: int, done: StrongDone, *, writes: bool) -> None:
        engine, rng = self.engine, self.engine.rng
        ended: list[bool] = []
        unknown: Any = CommitResult(CommitStatus.UNKNOWN) if writes else CoordinatorError("no answer in time")

        def end(result: Any) -> None:
            if not ended:
                ended.append(True)
                done(result)

        def act(answered: bool) -> None:
            result = verb()
            if answered:
                engine.after(self._delay_ns(), end, result)

        engine.after(deadline_ms * MS, end, unknown)
        if self.coordinator.down or self.process.away or not self.process.alive:
            engine.after(self._delay_ns(), end, CoordinatorError("the strong store is not reached"))
        elif rng.random() < self.coordinator.unknown_share:
            if rng.random() < 0.6:
                engine.after(self._delay_ns() + rng.random() * 2 * deadline_ms * MS, act, False)
        else:
            engine.after(self._delay_ns(), act, True)

    def _delay_ns(self) -> int:
        low, high = self.coordinator.options.coordinator_ms
        return int((low + (high - low) * self.engine.rng.random()) * MS * self.coordinator.slower)
