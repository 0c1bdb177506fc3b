"""One SQLite file of the embedded coordinator: how it is made, recognised, and reached from many threads.

Laws:
  - A file is made aside and renamed, under a lock on the data directory: nobody ever sees half of one.
  - A file that is not provably ours (format, cluster) is opened read-only to find that out, and never written.
  - A file that was removed or replaced under a running node is an error, never a private copy that others cannot see.
  - No descriptor but SQLite's own is ever opened on a live file: closing one would drop the process's locks on it.
Limits: local file systems only (SQLite's shared-memory index does not work over NFS); not usable across fork().
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

import msgspec

from emberkv.errors import ConfigError, CoordinatorError, NotOurs

FORMAT: Final = 1
APPLICATION_ID: Final = 0x456D4B56
"""'EmKV' in SQLite's application_id: how a file is known to be one of ours."""
SQLITE_OLDEST: Final = (3, 38)
"""The first SQLite with both RETURNING and the `->>` operator."""
BUSY_RETRY_S: Final = 0.0005
"""Pause between tries for a lock. SQLite's own back-off sleeps up to 100 ms, which a failover would feel."""
CONNECTIONS_KEPT: Final = 8
"""Idle connections kept for reuse: a node has a handful of threads that talk to its coordinator."""

_BUSY: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_SCHEMA: Final = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
BEGIN;
CREATE TABLE meta (cluster_id TEXT, store_id TEXT, boot_id TEXT, generation INTEGER);
CREATE TABLE store (revision INTEGER NOT NULL, floor INTEGER NOT NULL, events_kept INTEGER NOT NULL);
CREATE TABLE records (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE events (id INTEGER PRIMARY KEY, revision INTEGER NOT NULL, key TEXT NOT NULL, value BLOB);
CREATE INDEX events_by_revision ON events (revision);

-- A commit is an insert into this view. compares: [[key, revision]...]; writes: [[key, offset, length]...], where
-- the value is a slice of payload (offset from 1; substr of an empty blob is null) and a null length deletes the key.
CREATE VIEW commits AS SELECT '' AS compares, '' AS writes, x'' AS payload;
CREATE TRIGGER commits_insert INSTEAD OF INSERT ON commits BEGIN
    SELECT raise(ABORT, 'refused')
        FROM json_each(NEW.compares) AS wanted LEFT JOIN records ON records.key = wanted.value ->> 0
        WHERE ifnull(records.revision, 0) <> wanted.value ->> 1;
    INSERT INTO events (revision, key, value)
        SELECT (SELECT revision + 1 FROM store), change.value ->> 0,
               CASE WHEN change.value ->> 2 IS NULL THEN NULL
                    ELSE ifnull(substr(NEW.payload, change.value ->> 1, change.value ->> 2), x'') END
        FROM json_each(NEW.writes) AS change
        WHERE change.value ->> 2 IS NOT NULL OR EXISTS (SELECT 1 FROM records WHERE key = change.value ->> 0);
    UPDATE store SET revision = revision + 1
        WHERE EXISTS (SELECT 1 FROM events WHERE revision = store.revision + 1);
END;
CREATE TRIGGER events_put AFTER INSERT ON events WHEN NEW.value IS NOT NULL BEGIN
    INSERT OR REPLACE INTO records (key, value, revision) VALUES (NEW.key, NEW.value, NEW.revision);
END;
CREATE TRIGGER events_delete AFTER INSERT ON events WHEN NEW.value IS NULL BEGIN
    DELETE FROM records WHERE key = NEW.key;
END;
-- Every 64 revisions, so that its cost is spread. A revision is dropped whole: floor is the oldest complete one.
CREATE TRIGGER store_compact AFTER UPDATE OF revision ON store WHEN NEW.revision % 64 = 0 BEGIN
    UPDATE store SET floor = ifnull((SELECT revision + 1 FROM events
        WHERE id <= (SELECT max(id) FROM events) - store.events_kept ORDER BY id DESC LIMIT 1), floor);
    DELETE FROM events WHERE revision < (SELECT floor FROM store);
END;
COMMIT;
"""
_T = TypeVar("_T")


class Meta(msgspec.Struct, frozen=True):
    """What a file says about itself. `boot_id` names the machine's boot that it was made in."""

    cluster_id: str
    store_id: str
    boot_id: str
    generation: int


def boot_id() -> str:
    """The kernel's random id of this boot: a file of another boot describes processes that cannot exist any more."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def is_busy(error: sqlite3.Error) -> bool:
    """True when another connection holds the lock: nothing happened, the same call may be tried again."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _BUSY


def until(deadline_ms: int) -> float:
    """The moment on time.monotonic(), in seconds, at which a call of `deadline_ms` must have ended."""
    return time.monotonic() + deadline_ms / 1000


@contextmanager
def creation_lock(data_dir: Path, deadline: float) -> Iterator[None]:
    """Serialises the opening and creation of a cluster's files; ends with the process, however it dies."""
    path = data_dir / "coordinator.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise CoordinatorError(f"{path} is held by another process; see who with `fuser {path}`") from None
            time.sleep(BUSY_RETRY_S)
        yield
    finally:
        os.close(descriptor)


def replace_durably(path: Path, content: bytes) -> None:
    """Writes `path` so that a power cut leaves the old bytes or the new ones; when it returns, the new ones."""
    fresh = path.with_name(path.name + ".new")
    with open(fresh, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create(path: Path, meta: Meta, *, events_kept: int) -> None:
    """Makes a new, empty store at `path`, replacing a dead one. The caller holds the creation lock."""
    if sqlite3.sqlite_version_info < SQLITE_OLDEST:
        raise ConfigError(f"SQLite {sqlite3.sqlite_version} is too old for the embedded coordinator; 3.38 is needed")
    fresh = path.with_name(path.name + ".new")
    # A write-ahead log left by the dead store would be replayed into the new one.
    for stale in (fresh, *(Path(f"{file}{end}") for file in (path, fresh) for end in ("-wal", "-shm"))):
        stale.unlink(missing_ok=True)
    with closing(sqlite3.connect(fresh, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.executescript(_SCHEMA)
        connection.execute("INSERT INTO store VALUES (0, 1, ?)", (events_kept,))
        connection.execute("INSERT INTO meta VALUES (?, ?, ?, ?)", msgspec.structs.astuple(meta))
    os.replace(fresh, path)
    _sync_directory(path.parent)


def inspect(path: Path, cluster_id: str, deadline: float) -> Meta | None:
    """What the file at `path` says of itself; None when there is none. Changes nothing.

    Raises NotOurs when it is something else or another cluster's, CoordinatorError when it cannot be read now.
    """
    if not path.exists():
        return None
    advice = "move it away, or configure another directory"
    while True:
        try:
            meta = _read_meta(path)
            break
        except sqlite3.DatabaseError as error:
            if is_busy(error) and time.monotonic() < deadline:
                time.sleep(BUSY_RETRY_S)
            elif getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
                raise NotOurs(f"{path} is not an SQLite file and is left alone; {advice}") from error
            else:
                raise CoordinatorError(f"{path} cannot be read: {error}; check the file and who uses it") from error
    if meta is None:
        raise NotOurs(f"{path} is not an EmberKV coordinator file of format {FORMAT} and is left alone; {advice}")
    if meta.cluster_id != cluster_id:
        raise NotOurs(f"{path} belongs to cluster {meta.cluster_id!r}, not to {cluster_id!r}; {advice}")
    return meta


def _read_meta(path: Path) -> Meta | None:
    # Read-only, because opening a stranger's file for writing could already roll back its journal.
    connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None, timeout=0)
    with closing(connection):
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if (application, version) != (APPLICATION_ID, FORMAT):
            return None
        row = connection.execute("SELECT cluster_id, store_id, boot_id, generation FROM meta").fetchone()
        return Meta(*row)


class SqliteFile:
    """A live file and its pool of connections; any thread may call. A call has a connection to itself while it runs."""

    def __init__(self, path: Path, store_id: str, *, full_sync: bool) -> None:
        self.path = path
        self._store_id = store_id
        self._synchronous = "FULL" if full_sync else "OFF"
        self._lock = threading.Lock()
        self._closed = False
        status = path.stat()
        self._identity = (status.st_dev, status.st_ino)
        # Held from the start, so that the inode number cannot be given to another file while we compare it.
        self._idle: list[sqlite3.Connection] = [self._connect()]

    def call(self, operation: Callable[[sqlite3.Connection], _T], deadline: float) -> _T:
        """Runs `operation` on a connection, again while the file is busy. Raises CoordinatorError by the deadline."""
        connection: sqlite3.Connection | None = None
        try:
            while True:
                try:
                    self.check()
                    connection = connection or self._take() or self._connect()
                    return operation(connection)
                except sqlite3.Error as error:
                    if not is_busy(error):
                        connection = self._discard(connection)
                        raise CoordinatorError(f"{self.path} cannot be used: {error}") from error
                    if time.monotonic() >= deadline:
                        raise CoordinatorError(
                            f"{self.path} is locked by another process, perhaps a stopped one; "
                            f"see who with `fuser {self.path}`"
                        ) from error
                time.sleep(BUSY_RETRY_S)
        finally:
            if connection is not None:
                self._give_back(connection)

    def check(self) -> None:
        """Raises CoordinatorError when this was closed, or the file is not the one that was opened (2 us)."""
        if self._closed:
            raise CoordinatorError(f"{self.path} was closed by this process")
        if not self.is_present():
            raise CoordinatorError(f"{self.path} was removed or replaced while in use; restart this node")

    def is_present(self) -> bool:
        """True while the path still names the file that was opened."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def close(self) -> None:
        """Idempotent. A call that is running ends with its result or CoordinatorError, then its connection closes."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connect(self) -> sqlite3.Connection:
        # mode=rw: a missing file must be an error, never a new empty one. timeout=0: waiting is done by call().
        uri = f"file:{quote(str(self.path))}?mode=rw"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=0, check_same_thread=False)
        try:
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            (store_id,) = connection.execute("SELECT store_id FROM meta").fetchone()
            if store_id != self._store_id:
                raise CoordinatorError(f"{self.path} was replaced while in use; restart this node")
        except BaseException:
            connection.close()
            raise
        return connection

    def _take(self) -> sqlite3.Connection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < CONNECTIONS_KEPT:
                self._idle.append(connection)
                return
        connection.close()

    @staticmethod
    def _discard(connection: sqlite3.Connection | None) -> None:
        """After an unexplained error a connection is not trusted again."""
        if connection is not None:
            connection.close()
