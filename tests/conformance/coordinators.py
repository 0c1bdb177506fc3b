"""The implementations that the coordinator's conformance suite runs against, and what other processes do to them.

A new implementation is one class with the methods of `Store` and one line in STORES. A store is pickled to the
processes of a test, so it holds names and paths, never a connection.
"""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from emberkv.coord import SqliteCoordinator
from emberkv.ports import CommitResult, CommitStatus, Compare, Coordinator, Write

DEADLINE_MS = 5_000
SPAWN = multiprocessing.get_context("spawn")
"""Never fork: a connection of the parent must not exist in the child."""


class Store(Protocol):
    """One empty store made for one test."""

    def open(self) -> Coordinator:
        """Another client of the store."""
        ...

    def lose(self) -> None:
        """Loses everything that the store may lose, as its machines' restart would."""
        ...

    def compact(self) -> None:
        """Makes the store forget the history before this call, by its own means."""
        ...

    def hold_writes(self) -> AbstractContextManager[None]:
        """For the length of the block no commit can succeed, because of another process."""
        ...

    def remove(self) -> None:
        """Leaves nothing behind."""
        ...


HOLD_WRITES = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE store SET revision = revision + 1000")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def process_inside_transaction(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands inside a write transaction of an SQLite file until the block ends."""
    command = [sys.executable, "-c", HOLD_WRITES, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


@dataclass(frozen=True)
class SqliteStore:
    """The embedded coordinator, in shared memory where there is some, as in production."""

    control_dir: Path
    data_dir: Path
    cluster_id: str = "conformance"
    events_kept: int = 128

    @classmethod
    def make(cls, directory: Path) -> SqliteStore:
        memory = Path("/dev/shm")
        control_dir = Path(tempfile.mkdtemp(prefix="emberkv-test-", dir=memory if memory.is_dir() else directory))
        return cls(control_dir, directory / "data")

    @property
    def path(self) -> Path:
        return self.control_dir / "control.db"

    def open(self) -> SqliteCoordinator:
        return SqliteCoordinator.open(self.control_dir, self.data_dir, self.cluster_id, events_kept=self.events_kept)

    def lose(self) -> None:
        shutil.rmtree(self.control_dir)

    def compact(self) -> None:
        coordinator = self.open()
        for _ in range(4 * self.events_kept):
            put(coordinator, "compact/filler", b"")
        coordinator.close()

    @contextmanager
    def hold_writes(self) -> Iterator[None]:
        with process_inside_transaction(self.path):
            yield

    def remove(self) -> None:
        shutil.rmtree(self.control_dir, ignore_errors=True)


STORES: dict[str, Callable[[Path], Store]] = {
    "sqlite": SqliteStore.make,
}


def put(coordinator: Coordinator, key: str, value: bytes) -> CommitResult:
    """An unconditional write."""
    return coordinator.commit([], [Write(key, value)], deadline_ms=DEADLINE_MS)


def write_many(store: Store, prefix: str, count: int) -> None:
    """Body of a process: writes `count` keys of its own, each once."""
    coordinator = store.open()
    for number in range(count):
        assert put(coordinator, f"{prefix}{number:05}", str(number).encode()).status is CommitStatus.COMMITTED
    coordinator.close()


def write_times(store: Store, key: str, count: int, pause_s: float) -> None:
    """Body of a process: writes the machine-wide monotonic time, ns, from just before each commit."""
    coordinator = store.open()
    for _ in range(count):
        put(coordinator, key, str(time.monotonic_ns()).encode())
        time.sleep(pause_s)
    coordinator.close()


def race(store: Store, key: str, wins: int, mine: str) -> None:
    """Body of a process: replaces `key` by compare-and-set until `wins` of its attempts won; each win is recorded.

    Win and record are one commit, so that the record proves which revision was replaced.
    """
    coordinator = store.open()
    won = 0
    while won < wins:
        current = coordinator.get(key, deadline_ms=DEADLINE_MS)
        seen = 0 if current is None else current.revision
        writes = [Write(key, mine.encode()), Write(f"won/{mine}/{won:05}", str(seen).encode())]
        result = coordinator.commit([Compare(key, seen)], writes, deadline_ms=DEADLINE_MS)
        won += result.status is CommitStatus.COMMITTED
    coordinator.close()


def open_and_report(store: Store, answers: multiprocessing.Queue[int]) -> None:
    """Body of a process: opens the store and tells its generation."""
    coordinator = store.open()
    answers.put(coordinator.generation())
    coordinator.close()


@contextmanager
def processes(
    *bodies: tuple[Callable[..., None], tuple[object, ...]], exit_code: int = 0
) -> Iterator[list[multiprocessing.process.BaseProcess]]:
    """Runs each body in its own process; at the end of the block all must have ended with `exit_code`."""
    running: list[multiprocessing.process.BaseProcess] = [
        SPAWN.Process(target=target, args=args, daemon=True) for target, args in bodies
    ]
    for process in running:
        process.start()
    try:
        yield running
        for process in running:
            process.join(60)
        assert {process.exitcode for process in running} == {exit_code}
    finally:
        for process in running:
            process.kill()
