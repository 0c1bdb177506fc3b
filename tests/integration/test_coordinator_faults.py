"""The embedded coordinator under real faults: killed and stopped processes, lost and foreign files, a busy disk.

What every coordinator promises is in tests/conformance/test_coordinator.py; this is what SQLite files add to it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from conformance.coordinators import (
    DEADLINE_MS,
    SqliteStore,
    process_inside_transaction,
    processes,
    put,
    write_many,
    write_times,
)
from emberkv.coord import SqliteCoordinator, StrongStore, sqlite, sqlite_file
from emberkv.errors import CoordinatorError, NotOurs
from emberkv.ports import COMMIT_OPERATIONS_MAX, CommitStatus, Compare, Record, Write


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore.make(tmp_path)
    yield made
    made.remove()


@pytest.fixture
def coordinator(store: SqliteStore) -> Iterator[SqliteCoordinator]:
    opened = store.open()
    yield opened
    opened.close()


def one_line(error: BaseException) -> bool:
    return "\n" not in str(error) and 20 < len(str(error)) < 300


# ------------------------------------------------------------------------------------- killed and stopped processes


def test_a_writer_killed_inside_its_transaction_blocks_nobody(
    store: SqliteStore, coordinator: SqliteCoordinator
) -> None:
    before = put(coordinator, "own/1", b"old")
    with process_inside_transaction(store.path) as writer:
        writer.kill()
        writer.wait()
        started = time.monotonic()
        guard, write = Compare("own/1", before.revision), Write("own/1", b"new")
        result = coordinator.commit([guard], [write], deadline_ms=DEADLINE_MS)
    assert time.monotonic() - started < 1
    assert (result.status, result.revision) == (CommitStatus.COMMITTED, before.revision + 1)


def test_a_writer_stopped_inside_its_transaction_blocks_writes_only(
    store: SqliteStore, coordinator: SqliteCoordinator
) -> None:
    before = put(coordinator, "own/1", b"old")
    with process_inside_transaction(store.path) as writer:
        writer.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(CoordinatorError, match="locked by another process") as caught:
            coordinator.commit([], [Write("own/1", b"new")], deadline_ms=300)
        assert 0.29 < time.monotonic() - started < 1.5
        assert one_line(caught.value)
        assert coordinator.get("own/1", deadline_ms=300) == Record("own/1", b"old", before.revision)
        newcomer = store.open()
        assert newcomer.list("own/", deadline_ms=300).revision == before.revision
        newcomer.close()
        # Once it resumes and ends, a commit that waits goes through.
        threading.Timer(0.2, writer.kill).start()
        assert put(coordinator, "own/1", b"new").status is CommitStatus.COMMITTED


def test_writers_killed_at_random_leave_a_store_that_works(store: SqliteStore, coordinator: SqliteCoordinator) -> None:
    for round_number in range(3):
        prefix = f"w{round_number}/"
        with processes((write_many, (store, prefix, 1_000_000)), exit_code=-signal.SIGKILL) as (writer,):
            while not coordinator.list(prefix, deadline_ms=DEADLINE_MS).records:
                time.sleep(0.01)
            writer.kill()
        listing = coordinator.list(prefix, deadline_ms=DEADLINE_MS)
        numbers = [int(record.value) for record in listing.records]
        assert numbers == list(range(len(numbers)))
        assert put(coordinator, "after", b"").revision == listing.revision + 1


def test_everything_killed_at_once_and_opened_again_goes_on(store: SqliteStore) -> None:
    """All connections die without closing, so the last commits are only in the write-ahead log."""
    script = (
        "import os, sys; from pathlib import Path; from emberkv.coord import SqliteCoordinator;"
        "from emberkv.ports import Write;"
        "c = SqliteCoordinator.open(Path(sys.argv[1]), Path(sys.argv[2]), 'conformance');"
        "c.commit([], [Write('a', b'1')], deadline_ms=5000); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", script, str(store.control_dir), str(store.data_dir)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    coordinator = store.open()
    assert coordinator.get("a", deadline_ms=DEADLINE_MS) == Record("a", b"1", 1)
    assert coordinator.generation() == 1
    coordinator.close()


# --------------------------------------------------------------------------------------- lost, foreign, broken files


def test_a_file_removed_under_a_node_is_an_error_and_its_successor_is_left_alone(store: SqliteStore) -> None:
    old = store.open()
    put(old, "own/1", b"old")
    generation = old.generation()
    store.lose()
    for call in (lambda: put(old, "own/1", b"lost"), lambda: old.get("own/1", deadline_ms=DEADLINE_MS)):
        with pytest.raises(CoordinatorError, match="removed or replaced") as caught:
            call()
        assert one_line(caught.value)
    new = store.open()
    assert new.generation() == generation + 1
    put(new, "own/1", b"new")
    with pytest.raises(CoordinatorError, match="removed or replaced"):
        put(old, "own/1", b"lost")
    old.close()
    # SQLite's last close deletes the log by its path: here that would be the successor's.
    assert Path(f"{store.path}-wal").exists()
    third = store.open()
    assert third.get("own/1", deadline_ms=DEADLINE_MS) == new.get("own/1", deadline_ms=DEADLINE_MS)
    for coordinator in (new, third):
        coordinator.close()


def test_a_waiting_watch_notices_that_the_file_is_gone(store: SqliteStore, coordinator: SqliteCoordinator) -> None:
    threading.Timer(0.1, store.lose).start()
    started = time.monotonic()
    with pytest.raises(CoordinatorError, match="removed or replaced"):
        coordinator.watch(["hb/"], 1, deadline_ms=10_000)
    assert time.monotonic() - started < 2


def test_a_file_of_another_boot_is_made_anew(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = store.open()
    put(before, "hb/a", b"1")
    generation = before.generation()
    before.close()
    monkeypatch.setattr(sqlite_file, "boot_id", lambda: "the boot after that")
    after = store.open()
    assert after.generation() == generation + 1
    assert after.get("hb/a", deadline_ms=DEADLINE_MS) is None
    after.close()


def test_the_generation_outlives_either_directory(store: SqliteStore) -> None:
    for _ in range(3):
        store.open().close()
        store.lose()
    store.open().close()
    (store.data_dir / "coordinator.json").unlink()
    kept = store.open()
    assert kept.generation() == 4
    kept.close()
    store.lose()
    risen = store.open()
    assert risen.generation() == 5
    risen.close()


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format": 1}'])
def test_a_damaged_generation_file_is_not_guessed(store: SqliteStore, damage: bytes) -> None:
    store.open().close()
    (store.data_dir / "coordinator.json").write_bytes(damage)
    store.lose()
    with pytest.raises(NotOurs, match=r"coordinator\.json is damaged") as caught:
        store.open()
    assert one_line(caught.value)
    assert not store.path.exists()


def foreign_database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE somebody (elses INTEGER)")
    connection.close()


def newer_format(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA application_id = {sqlite_file.APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {sqlite_file.FORMAT + 1}")
    connection.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_bytes(b"not a database, but somebody's text " * 100),
        lambda path: path.write_bytes(b""),
        foreign_database,
        newer_format,
    ],
    ids=["text", "empty", "foreign", "newer"],
)
@pytest.mark.parametrize("name", ["control.db", "strong.db"])
def test_a_file_that_is_not_ours_is_named_and_left_alone(
    store: SqliteStore, name: str, make: Callable[[Path], object]
) -> None:
    path = store.path if name == "control.db" else store.data_dir / name
    path.parent.mkdir(exist_ok=True)
    make(path)
    before = path.read_bytes()
    strong = StrongStore(store.data_dir, store.cluster_id)
    opening = store.open if name == "control.db" else lambda: strong.get("k", deadline_ms=DEADLINE_MS)
    with pytest.raises(NotOurs, match=name) as caught:
        opening()
    assert one_line(caught.value)
    assert path.read_bytes() == before


def test_another_clusters_files_are_refused(store: SqliteStore, tmp_path: Path) -> None:
    store.open().close()
    with pytest.raises(NotOurs, match=r"control\.db belongs to cluster 'conformance'") as caught:
        SqliteCoordinator.open(store.control_dir, tmp_path / "other", "other")
    assert one_line(caught.value)
    store.lose()
    with pytest.raises(NotOurs, match=r"coordinator\.json belongs to cluster 'conformance'"):
        SqliteCoordinator.open(store.control_dir, store.data_dir, "other")


def test_a_directory_or_file_in_the_wrong_place_is_one_clear_line(store: SqliteStore, tmp_path: Path) -> None:
    store.path.mkdir()
    with pytest.raises(CoordinatorError, match=r"control\.db") as caught:
        store.open()
    assert one_line(caught.value)
    (tmp_path / "file").write_bytes(b"")
    for control_dir, data_dir in ((tmp_path / "file", tmp_path / "d"), (tmp_path / "c", tmp_path / "file")):
        with pytest.raises(CoordinatorError, match="cannot be opened") as caught:
            SqliteCoordinator.open(control_dir, data_dir, "conformance")
        assert one_line(caught.value)


def test_a_file_that_somebody_locked_is_an_error_by_the_deadline(store: SqliteStore) -> None:
    store.open().close()
    locker = sqlite3.connect(store.path, isolation_level=None)
    locker.execute("PRAGMA locking_mode = EXCLUSIVE")
    locker.execute("BEGIN EXCLUSIVE")
    started = time.monotonic()
    with pytest.raises(CoordinatorError, match=r"control\.db") as caught:
        SqliteCoordinator.open(store.control_dir, store.data_dir, store.cluster_id, deadline_ms=300)
    assert one_line(caught.value)
    assert time.monotonic() - started < 2
    locker.close()
    store.open().close()


def test_a_damaged_file_is_an_error_not_a_crash(store: SqliteStore) -> None:
    coordinator = store.open()
    for number in range(500):
        put(coordinator, f"k{number}", b"x" * 1000)
    coordinator.close()
    with open(store.path, "r+b") as file:
        file.seek(4096)
        file.write(os.urandom(64 * 4096))
    with pytest.raises(CoordinatorError, match=r"control\.db") as caught:
        store.open().list("", deadline_ms=DEADLINE_MS)
    assert one_line(caught.value)


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A memory file system of 2 MiB; needs the right to mount."""
    directory = tmp_path / "small"
    directory.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(directory)], capture_output=True
    ).returncode:
        pytest.skip("mounting is not permitted here")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_a_full_file_system_never_leaves_half_a_commit(small_memory: Path, tmp_path: Path) -> None:
    coordinator = SqliteCoordinator.open(small_memory, tmp_path / "data", "conformance")
    put(coordinator, "a/0", b"kept")
    failed: object = None
    for number in range(100):
        writes = [Write("pair/1", b"%d" % number * 20_000), Write("pair/2", b"%d" % number * 20_000)]
        try:
            result = coordinator.commit([], writes, deadline_ms=DEADLINE_MS)
        except CoordinatorError as error:
            failed = error
            break
        if result.status is not CommitStatus.COMMITTED:
            failed = result.status
            break
    assert failed is CommitStatus.UNKNOWN or (isinstance(failed, CoordinatorError) and one_line(failed))
    # The read-back that resolves it: both or none, and what was there before stays readable.
    first, second = coordinator.list("pair/", deadline_ms=DEADLINE_MS).records
    assert (first.value, first.revision) == (second.value, second.revision)
    kept = coordinator.get("a/0", deadline_ms=DEADLINE_MS)
    assert kept is not None
    assert kept.value == b"kept"
    print(f"outcome of the commit that met the full file system: {failed}")
    coordinator.close()


class BrokenCommit:
    """A connection whose statement did its work but whose commit fails."""

    def execute(self, statement: str, arguments: object) -> BrokenCommit:
        return self

    def fetchall(self) -> list[tuple[int]]:
        raise sqlite3.OperationalError("disk I/O error")


def test_a_failure_while_committing_is_unknown_and_not_an_error() -> None:
    connection = cast("sqlite3.Connection", BrokenCommit())
    assert sqlite._apply(connection, ("[]", "[]", b"")).status is CommitStatus.UNKNOWN


# ---------------------------------------------------------------------------------------------------- strong.db


def test_strong_records_survive_the_loss_of_the_control_store(store: SqliteStore) -> None:
    strong = StrongStore(store.data_dir, store.cluster_id)
    assert not (store.data_dir / "strong.db").exists(), "made by the first call"
    assert strong.get("quota/a", deadline_ms=DEADLINE_MS) is None
    first = strong.put_if("quota/a", b"x" * (512 << 10), 0, deadline_ms=DEADLINE_MS)
    assert first.status is CommitStatus.COMMITTED
    assert strong.put_if("quota/a", b"2", 0, deadline_ms=DEADLINE_MS).status is CommitStatus.REFUSED
    with pytest.raises(ValueError, match="over the limit"):
        strong.put_if("quota/a", b"x" * (sqlite.STRONG_VALUE_BYTES_MAX + 1), 0, deadline_ms=DEADLINE_MS)
    strong.close()
    with pytest.raises(CoordinatorError):
        strong.get("quota/a", deadline_ms=DEADLINE_MS)
    store.open().close()
    store.lose()
    store.open().close()
    again = StrongStore(store.data_dir, store.cluster_id)
    kept = again.get("quota/a", deadline_ms=DEADLINE_MS)
    assert kept is not None
    assert (len(kept.value), kept.revision) == (512 << 10, first.revision)
    assert again.delete("quota/a", kept.revision, deadline_ms=DEADLINE_MS).status is CommitStatus.COMMITTED
    assert again.get("quota/a", deadline_ms=DEADLINE_MS) is None
    again.close()


def test_a_lost_strong_file_is_never_replaced_by_an_empty_one(store: SqliteStore) -> None:
    strong = StrongStore(store.data_dir, store.cluster_id)
    strong.put_if("ledger", b"1", 0, deadline_ms=DEADLINE_MS)
    strong.close()
    (store.data_dir / "strong.db").unlink()
    with pytest.raises(CoordinatorError, match=r"strong\.db is gone") as caught:
        StrongStore(store.data_dir, store.cluster_id).get("ledger", deadline_ms=DEADLINE_MS)
    assert one_line(caught.value)


# ---------------------------------------------------------------------------------------------------- a busy disk


@contextmanager
def busy_disk(directory: Path) -> Iterator[None]:
    """fio writes 4 MiB at depth 16, past the page cache, to the file system of `directory`."""
    command = ["fio", "--name=busy", f"--directory={directory}", "--rw=write", "--bs=4M", "--iodepth=16", "--size=512M"]
    command += ["--ioengine=libaio", "--direct=1", "--time_based", "--runtime=60"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as load:
        time.sleep(1)
        assert load.poll() is None, "fio ended early"
        try:
            yield
        finally:
            load.terminate()
            load.wait()


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
@pytest.mark.parametrize("load", ["idle", "busy"])
def test_commits_and_watches_stay_fast_while_the_data_disk_is_busy(
    store: SqliteStore, coordinator: SqliteCoordinator, load: str, capsys: pytest.CaptureFixture[str]
) -> None:
    count = 400
    commits: list[float] = []
    notices: list[float] = []
    put(coordinator, "fill", b"")
    if load == "busy":
        with busy_disk(store.data_dir):
            measure(store, coordinator, count, commits, notices)
    else:
        measure(store, coordinator, count, commits, notices)
    with capsys.disabled():
        print(f"\n  {load} disk, control.db in {store.control_dir.parent}, two processes, {count} commits each")
        for name, values in (("commit", commits), ("watch notice", notices)):
            p50, p99 = statistics.median(values), sorted(values)[len(values) * 99 // 100]
            print(f"  {name:>12}: p50 {p50:6.2f} ms  p99 {p99:6.2f} ms  max {max(values):6.2f} ms  n={len(values)}")
    assert statistics.median(commits) < 20
    assert sorted(commits)[len(commits) * 99 // 100] < 300
    assert statistics.median(notices) < 100


def test_a_busy_thread_in_the_writers_process_does_not_hold_up_other_writers(
    store: SqliteStore, coordinator: SqliteCoordinator
) -> None:
    """A commit of 128 keys gives up the interpreter once while it holds the lock, not once per key."""
    ended = threading.Event()

    def burn() -> None:
        while not ended.is_set():
            sum(range(1000))

    writes = [Write(f"own/{number}", b"x" * 200) for number in range(COMMIT_OPERATIONS_MAX)]
    threading.Thread(target=burn, daemon=True).start()
    took: list[float] = []
    try:
        for _ in range(40):
            started = time.perf_counter()
            coordinator.commit([], writes, deadline_ms=DEADLINE_MS)
            took.append(time.perf_counter() - started)
    finally:
        ended.set()
    # A return per key would wait for the switch interval (5 ms) 128 times.
    assert statistics.median(took) < 0.2


def measure(
    store: SqliteStore, coordinator: SqliteCoordinator, count: int, commits: list[float], notices: list[float]
) -> None:
    """Times our commits, beside another process's, whose commits we also watch; milliseconds."""
    following = coordinator.list("", deadline_ms=DEADLINE_MS).revision + 1

    def follow() -> None:
        at = following
        while len(notices) < count:
            batch = coordinator.watch(["time"], at, deadline_ms=DEADLINE_MS)
            now = time.monotonic_ns()
            notices.extend((now - int(record.value)) / 1e6 for record in batch.records)
            assert batch.records, "the writer stopped"
            at = batch.revision + 1

    watcher = threading.Thread(target=follow, daemon=True)
    with processes((write_times, (store, "time", count, 0.005))):
        watcher.start()
        for number in range(count):
            started = time.perf_counter()
            put(coordinator, f"hb/{number % 3}", b"x" * 200)
            commits.append((time.perf_counter() - started) * 1e3)
            time.sleep(0.005)
        watcher.join(60)
    assert len(notices) == count
