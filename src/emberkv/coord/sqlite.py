"""The embedded coordinator: SQLite files that the nodes of one machine open directly, so there is nothing to run.

Laws:
  - `control.db` (hb, live, own) lives in memory-backed storage with synchronous=OFF: no fsync, and so no busy disk,
    stands between a dead primary and its successor. What makes that safe is the generation: whenever the file is
    made anew, a number on the data disk is raised and fsynced first, and it is the high part of every epoch. What an
    operator decided (ns/) is written to the data disk as well (kept.py) and put back into a control.db that is new.
  - `strong.db` holds `strong` namespaces on the data disk with full sync, and is never on the failover path.
  - A commit is ONE SQL statement: triggers (sqlite_file.py) compare, write, log and compact. The write lock is held
    while SQLite runs and for one return to the interpreter, not for one per key, so a busy thread cannot stretch it.
  - All keys share one revision, as in etcd; `records` is the fold of `events`, which is cut to a bounded length.
Limits:
  - A process that is SIGSTOPped inside its statement blocks every other writer of the machine until it resumes
    (they get CoordinatorError by their deadline; readers go on). A SIGKILLed one blocks nobody.
  - A process frozen in the middle of a read keeps the write-ahead log from being reset until it resumes.
  - A call waits for locks no longer than its deadline, but cannot cut short an fsync (strong.db only).
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import msgspec

from emberkv.coord import kept, sqlite_file
from emberkv.coord.kept import KEPT_PREFIX
from emberkv.coord.sqlite_file import Meta, SqliteFile, until
from emberkv.errors import CoordinatorError, NotOurs, StoreFull
from emberkv.ports import (
    COMMIT_OPERATIONS_MAX,
    CommitResult,
    CommitStatus,
    Compare,
    Listing,
    Record,
    WatchBatch,
    Write,
)
from emberkv.types import EPOCH_GENERATION_SHIFT, EPOCH_MAX

KEY_CHARS_MAX: Final = 512
CONTROL_VALUE_BYTES_MAX: Final = 64 << 10
"""Control records are about 1 KiB; with EVENTS_KEPT this bounds the log's memory."""
STRONG_VALUE_BYTES_MAX: Final = (512 << 10) + 64
"""The largest record of a `strong` namespace (design 2), and the header that its node puts before it."""
EVENTS_KEPT: Final = 4096
"""Changes that a watcher may lag behind before it must list again: minutes of heartbeats of ten nodes."""
STRONG_BYTES_MAX: Final = 1 << 30
STRONG_EVENTS_KEPT: Final = COMMIT_OPERATIONS_MAX
"""Nobody watches strong.db, so it keeps the fewest that a commit may write."""
OPEN_DEADLINE_MS: Final = 5_000
POLL_MS: Final = 5
"""A watcher looks this often; one look costs about 5 us, and failover's budget counts it as w."""

_LAST_CHARACTER: Final = "\U0010ffff"
"""Sorts above every printable character, so `prefix + this` is an upper bound of the prefix's keys."""
_COMMIT: Final = (
    "INSERT INTO commits (compares, writes, payload) VALUES (?, ?, ?) RETURNING (SELECT revision FROM store)"
)
_GET: Final = "SELECT key, value, revision FROM records WHERE key = ?"
_USED_BYTES: Final = """
SELECT (count.page_count - free.freelist_count) * size.page_size
    FROM pragma_page_count AS count, pragma_freelist_count AS free, pragma_page_size AS size"""
_KEYS: Final = "SELECT key FROM records WHERE key >= ? AND key < ? ORDER BY key"
# A header row, then the rest, in one statement: one statement sees one snapshot.
_LIST: Final = """
SELECT '' AS key, x'' AS value, revision FROM store
UNION ALL SELECT key, value, revision FROM records WHERE key >= ? AND key < ? ORDER BY key"""
_EVENTS: Final = """
SELECT 0 AS id, revision, '' AS key, floor AS value FROM store
UNION ALL SELECT id, revision, key, value FROM events WHERE revision >= ? ORDER BY id"""


class _Identity(msgspec.Struct, frozen=True):
    """`coordinator.json` on the data disk: what must survive the loss of control.db."""

    format: int
    cluster_id: str
    generation: int = 0
    strong_store_id: str = ""
    """Set once strong.db was made: if the file is gone after that, records were lost and an empty one would lie."""


class SqliteCoordinator:
    """`ports.Coordinator` for the nodes of one machine. Any thread may call; a watch does not hold up a commit."""

    def __init__(self, file: SqliteFile, generation: int, poll_ms: int, data_dir: Path, cluster_id: str) -> None:
        self._file = file
        self._generation = generation
        self._poll_s = poll_ms / 1000
        self._data_dir = data_dir
        self._cluster_id = cluster_id

    @classmethod
    def open(
        cls,
        control_dir: Path,
        data_dir: Path,
        cluster_id: str,
        *,
        deadline_ms: int = OPEN_DEADLINE_MS,
        poll_ms: int = POLL_MS,
        events_kept: int = EVENTS_KEPT,
    ) -> SqliteCoordinator:
        """Opens `control_dir`/control.db, making it (and the generation rise) when it is absent or of another boot.

        All nodes of a cluster name the same two directories. `events_kept` matters to the one that creates.
        Raises NotOurs for a stranger's file or directory, CoordinatorError when something cannot be used now.
        """
        if events_kept < COMMIT_OPERATIONS_MAX:
            raise ValueError(f"events_kept {events_kept} is less than one commit of {COMMIT_OPERATIONS_MAX} may write")
        path = control_dir / "control.db"
        deadline = until(deadline_ms)
        try:
            _claim_directory(control_dir)
            data_dir.mkdir(parents=True, exist_ok=True)
            with sqlite_file.creation_lock(data_dir, deadline):
                meta = sqlite_file.inspect(path, cluster_id, deadline)
                identity = _load_identity(data_dir, cluster_id)
                if meta is None or meta.boot_id != sqlite_file.boot_id():
                    known = max(identity.generation, meta.generation if meta else 0)
                    _save_identity(data_dir, identity, generation=known + 1)
                    meta = _new_meta(cluster_id, known + 1)
                    sqlite_file.create(path, meta, events_kept=events_kept)
                elif meta.generation > identity.generation:  # the data directory was emptied or restored
                    _save_identity(data_dir, identity, generation=meta.generation)
                file = SqliteFile(path, meta.store_id, full_sync=False)
                opened = cls(file, meta.generation, poll_ms, data_dir, cluster_id)
                opened._restore_kept(deadline)
                return opened
        except (OSError, sqlite3.Error) as error:
            raise CoordinatorError(f"the coordinator's {path} cannot be opened: {error}") from error

    def get(self, key: str, *, deadline_ms: int) -> Record | None:
        """The key's record, or None. Raises CoordinatorError."""
        return _get(self._file, key, deadline_ms)

    def list(self, prefix: str, *, deadline_ms: int) -> Listing:
        """All records whose key starts with `prefix`, in key order, at one revision. Raises CoordinatorError."""
        bounds = (prefix, prefix + _LAST_CHARACTER)
        rows = self._file.call(lambda connection: connection.execute(_LIST, bounds).fetchall(), until(deadline_ms))
        (_, _, revision), *records = rows
        return Listing(tuple(Record(*row) for row in records), revision)

    def commit(self, compares: Sequence[Compare], writes: Sequence[Write], *, deadline_ms: int) -> CommitResult:
        """If every compare holds, applies all writes at one new revision, which the result names.

        The revision does not move when nothing changes: no writes, or only deletes of absent keys. REFUSED names a
        revision at which a compare did not hold any more, or a later one. Raises CoordinatorError when it is known
        that nothing was written, ValueError for more than COMMIT_OPERATIONS_MAX compares or writes, a repeated
        key among the writes, or a key or value that the store does not take.
        """
        result = _commit(self._file, compares, writes, CONTROL_VALUE_BYTES_MAX, deadline_ms)
        if result.status is CommitStatus.COMMITTED and any(write.key.startswith(KEPT_PREFIX) for write in writes):
            try:
                with sqlite_file.creation_lock(self._data_dir, until(deadline_ms)):
                    self._keep(until(deadline_ms))
            except (OSError, CoordinatorError):
                # Written, but the next boot may not know of it: nobody may rely on that.
                return CommitResult(CommitStatus.UNKNOWN)
        return result

    def _keep(self, deadline: float) -> None:
        """Writes all kept records to the data disk; listed under the lock, so an older list never replaces a newer."""
        kept.save(self._data_dir, self._cluster_id, self._kept_records(deadline))

    def _kept_records(self, deadline: float) -> dict[str, bytes]:
        left_ms = max(1, int((deadline - time.monotonic()) * 1000))
        return {record.key: record.value for record in self.list(KEPT_PREFIX, deadline_ms=left_ms).records}

    def _restore_kept(self, deadline: float) -> None:
        """Puts back what a control.db of an earlier life held, and keeps what a process that died did not get to."""
        known, here = kept.load(self._data_dir, self._cluster_id), self._kept_records(deadline)
        lost = [Write(key, value) for key, value in known.items() if key not in here]
        for first in range(0, len(lost), COMMIT_OPERATIONS_MAX):
            writes = lost[first : first + COMMIT_OPERATIONS_MAX]
            compares = [Compare(write.key, 0) for write in writes]
            _commit(self._file, compares, writes, CONTROL_VALUE_BYTES_MAX, OPEN_DEADLINE_MS)
        if here and here != known:
            self._keep(deadline)

    def watch(self, prefixes: Sequence[str], from_revision: int, *, deadline_ms: int) -> WatchBatch:
        """Changes under any prefix with revision >= `from_revision`, waiting for the first one until the deadline.

        Continue from the batch's revision + 1, also after an empty batch. A batch never holds both a put and a
        delete of one key: it ends before the revision that would mix them. Raises CoordinatorError.
        """
        wanted = tuple(prefixes)
        deadline = until(deadline_ms)
        return self._file.call(
            lambda connection: self._await_changes(connection, wanted, from_revision, deadline), deadline
        )

    def generation(self) -> int:
        """High part of every epoch; rises whenever control.db is made anew. Raises CoordinatorError once closed."""
        self._file.check()
        return self._generation

    def close(self) -> None:
        """Releases the store; a running watch ends within one poll. Later calls raise CoordinatorError."""
        self._file.close()

    def _await_changes(
        self, connection: sqlite3.Connection, prefixes: tuple[str, ...], from_revision: int, deadline: float
    ) -> WatchBatch:
        covered = from_revision - 1
        seen: int | None = None
        while True:
            self._file.check()
            # Read before the events: a commit in between is then seen by this look and noticed by the next.
            (version,) = connection.execute("PRAGMA data_version").fetchone()
            if version != seen:
                batch = _changes(connection.execute(_EVENTS, (covered + 1,)).fetchall(), prefixes, covered + 1)
                if batch.records or batch.compacted:
                    return batch
                seen, covered = version, batch.revision
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return WatchBatch((), (), covered)
            time.sleep(min(self._poll_s, remaining))


class StrongStore:
    """Records of `strong` namespaces on one machine: linearizable, and on the disk before a call returns.

    An UNKNOWN outcome is resolved by reading back. A call may outlast its deadline by one fsync of a busy disk. The
    file stops growing at about `bytes_max`: then records can be read and deleted, and puts raise StoreFull.
    """

    def __init__(self, data_dir: Path, cluster_id: str, bytes_max: int = STRONG_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._data_dir = data_dir
        self._cluster_id = cluster_id
        self._lock = threading.Lock()
        self._opened: SqliteFile | None = None
        self._closed = False

    def get(self, key: str, *, deadline_ms: int) -> Record | None:
        """The key's record, or None. Raises CoordinatorError."""
        return _get(self._file(deadline_ms), key, deadline_ms)

    def put_if(self, key: str, value: bytes, revision: int | None, *, deadline_ms: int) -> CommitResult:
        """Stores a record if the key's revision is still `revision` (0: absent; None: whatever it is). Raises
        CoordinatorError when it is known that nothing was written."""
        return self._replace(key, value, revision, deadline_ms)

    def delete(self, key: str, revision: int | None, *, deadline_ms: int) -> CommitResult:
        """Deletes the key if its revision is still `revision` (None: whatever it is). Raises as `put_if`."""
        return self._replace(key, None, revision, deadline_ms)

    def clear(self, prefix: str, *, deadline_ms: int) -> int:
        """Deletes all records whose key starts with `prefix`, until the deadline; returns how many are left. Raises
        CoordinatorError. A store that was never made is not made for this."""
        if not (self._data_dir / "strong.db").exists():
            return 0
        deadline, file = until(deadline_ms), self._file(deadline_ms)
        bounds = (prefix, prefix + _LAST_CHARACTER)
        while True:
            rows = file.call(lambda connection: connection.execute(_KEYS, bounds).fetchall(), deadline)
            if not rows or time.monotonic() >= deadline:
                return len(rows)
            writes = [Write(key, None) for (key,) in rows[:COMMIT_OPERATIONS_MAX]]
            _commit(file, [], writes, STRONG_VALUE_BYTES_MAX, deadline_ms)

    def close(self) -> None:
        """Idempotent; later calls raise CoordinatorError."""
        with self._lock:
            self._closed = True
            if self._opened is not None:
                self._opened.close()

    def _replace(self, key: str, value: bytes | None, revision: int | None, deadline_ms: int) -> CommitResult:
        compares = [] if revision is None else [Compare(key, revision)]
        file = self._file(deadline_ms)
        if value is not None:
            (used,) = file.call(lambda connection: connection.execute(_USED_BYTES).fetchone(), until(deadline_ms))
            if used + len(value) > self._bytes_max:
                raise StoreFull(f"{file.path} has reached its size of {self._bytes_max} bytes: delete records")
        return _commit(file, compares, [Write(key, value)], STRONG_VALUE_BYTES_MAX, deadline_ms)

    def _file(self, deadline_ms: int) -> SqliteFile:
        # Made by the first call, so that a cluster without strong namespaces never pays for one.
        with self._lock:
            if self._closed:
                raise CoordinatorError(f"the strong store in {self._data_dir} was closed by this process")
            if self._opened is None:
                self._opened = self._open(until(deadline_ms))
            return self._opened

    def _open(self, deadline: float) -> SqliteFile:
        path = self._data_dir / "strong.db"
        try:
            self._data_dir.mkdir(parents=True, exist_ok=True)
            with sqlite_file.creation_lock(self._data_dir, deadline):
                meta = sqlite_file.inspect(path, self._cluster_id, deadline)
                identity = _load_identity(self._data_dir, self._cluster_id)
                if meta is None and identity.strong_store_id:
                    raise CoordinatorError(f"{path} is gone and its records with it; put back the file or a backup")
                if meta is None:
                    meta = _new_meta(self._cluster_id, 0)
                    sqlite_file.create(path, meta, events_kept=STRONG_EVENTS_KEPT)
                if identity.strong_store_id != meta.store_id:
                    _save_identity(self._data_dir, identity, strong_store_id=meta.store_id)
                return SqliteFile(path, meta.store_id, full_sync=True)
        except (OSError, sqlite3.Error) as error:
            raise CoordinatorError(f"the strong store {path} cannot be opened: {error}") from error


def _get(file: SqliteFile, key: str, deadline_ms: int) -> Record | None:
    row = file.call(lambda connection: connection.execute(_GET, (key,)).fetchone(), until(deadline_ms))
    return None if row is None else Record(*row)


def _commit(
    file: SqliteFile, compares: Sequence[Compare], writes: Sequence[Write], value_bytes_max: int, deadline_ms: int
) -> CommitResult:
    request = _encode(compares, writes, value_bytes_max)
    result = file.call(lambda connection: _apply(connection, request), until(deadline_ms))
    # A file that vanished meanwhile took the commit with it: nobody else may ever see it.
    return result if file.is_present() else CommitResult(CommitStatus.UNKNOWN)


def _apply(connection: sqlite3.Connection, request: tuple[str, str, bytes]) -> CommitResult:
    """Performs an encoded commit. A sqlite3.Error that leaves here means that nothing was written."""
    try:
        cursor = connection.execute(_COMMIT, request)
    except sqlite3.IntegrityError:  # raise(ABORT, 'refused'): all of the statement is undone
        (revision,) = connection.execute("SELECT revision FROM store").fetchone()
        return CommitResult(CommitStatus.REFUSED, revision)
    try:
        # The first step did all changes; taking the rest of the rows is what commits.
        ((revision,),) = cursor.fetchall()
    except sqlite3.Error:
        return CommitResult(CommitStatus.UNKNOWN)
    return CommitResult(CommitStatus.COMMITTED, revision)


def _encode(compares: Sequence[Compare], writes: Sequence[Write], value_bytes_max: int) -> tuple[str, str, bytes]:
    """The statement's arguments, all made before the write lock is asked for. Raises ValueError."""
    if max(len(compares), len(writes)) > COMMIT_OPERATIONS_MAX:
        raise ValueError(f"a commit takes {COMMIT_OPERATIONS_MAX} compares and writes at most; split it")
    if len({write.key for write in writes}) != len(writes):
        raise ValueError("a commit may write a key only once")
    changes: list[tuple[str, int, int | None]] = []
    offset = 1
    for write in writes:
        # Printable: the JSON functions cut text at NUL, and list's upper bound needs a character that no key has.
        if not write.key.isprintable() or not 1 <= len(write.key) <= KEY_CHARS_MAX:
            raise ValueError(f"key {write.key[:40]!r} must be 1 to {KEY_CHARS_MAX} printable characters")
        if write.value is not None and len(write.value) > value_bytes_max:
            raise ValueError(f"value of {write.key!r} has {len(write.value)} bytes, over the limit {value_bytes_max}")
        length = None if write.value is None else len(write.value)
        changes.append((write.key, offset, length))
        offset += length or 0
    guards = [(compare.key, compare.revision) for compare in compares]
    payload = b"".join(write.value or b"" for write in writes)
    return msgspec.json.encode(guards).decode(), msgspec.json.encode(changes).decode(), payload


def _changes(rows: Sequence[tuple[int, int, str, Any]], prefixes: tuple[str, ...], from_revision: int) -> WatchBatch:
    """The batch of _EVENTS' rows: a header (store revision, floor), then events in order."""
    (_, revision, _, floor), *events = rows
    if from_revision < floor:
        return WatchBatch((), (), revision, compacted=True)
    matching = (event for event in events if event[2].startswith(prefixes))
    records: list[Record] = []
    put: set[str] = set()
    deleted: dict[str, None] = {}
    for changed_at, group in groupby(matching, key=lambda event: event[1]):
        changes = list(group)
        gone = [key for _, _, key, value in changes if value is None]
        kept = [key for _, _, key, value in changes if value is not None]
        if not put.isdisjoint(gone) or not deleted.keys().isdisjoint(kept):
            return WatchBatch(tuple(records), tuple(deleted), changed_at - 1)
        put.update(kept)
        deleted.update(dict.fromkeys(gone))
        records.extend(Record(key, value or b"", changed_at) for _, _, key, value in changes)
    return WatchBatch(tuple(records), tuple(deleted), max(revision, from_revision - 1))


def _new_meta(cluster_id: str, generation: int) -> Meta:
    return Meta(cluster_id, uuid.uuid4().hex, sqlite_file.boot_id(), generation)


def _claim_directory(control_dir: Path) -> None:
    """Makes the directory, private; refuses one that another user put there first (/dev/shm is open to all)."""
    control_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = control_dir.stat().st_uid
    if owner not in (os.geteuid(), 0):
        raise NotOurs(f"{control_dir} belongs to user id {owner}; remove it, or configure another control directory")


def _load_identity(data_dir: Path, cluster_id: str) -> _Identity:
    path = data_dir / "coordinator.json"
    try:
        identity = msgspec.json.decode(path.read_bytes(), type=_Identity)
    except FileNotFoundError:
        return _Identity(sqlite_file.FORMAT, cluster_id)
    except msgspec.DecodeError as error:
        # Starting again from 0 would let epochs go back, so nothing is guessed here.
        raise NotOurs(f"{path} is damaged ({error}); restore it, or use an empty data directory") from error
    if identity.format != sqlite_file.FORMAT:
        raise NotOurs(f"{path} has format {identity.format}, not {sqlite_file.FORMAT}; use another data directory")
    if identity.cluster_id != cluster_id:
        raise NotOurs(f"{path} belongs to cluster {identity.cluster_id!r}, not {cluster_id!r}; use another directory")
    return identity


def _save_identity(
    data_dir: Path, identity: _Identity, *, generation: int | None = None, strong_store_id: str | None = None
) -> None:
    changed = _Identity(
        identity.format,
        identity.cluster_id,
        identity.generation if generation is None else generation,
        identity.strong_store_id if strong_store_id is None else strong_store_id,
    )
    if changed.generation > EPOCH_MAX >> EPOCH_GENERATION_SHIFT:
        raise CoordinatorError(f"{data_dir}/coordinator.json has no generation left; start a new cluster")
    sqlite_file.replace_durably(data_dir / "coordinator.json", msgspec.json.encode(changed))
