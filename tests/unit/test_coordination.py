"""The two threads before the coordinator: what the operator is told."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from emberkv.core import events as ev
from emberkv.core.effects import Commit
from emberkv.node.coordination import Coordination
from emberkv.ports import CommitResult, CommitStatus, Listing, Record, WatchBatch


class Clock:
    def now_ns(self) -> int:
        return time.monotonic_ns()


class Unsure:
    """Commits end as the list says, then COMMITTED; there is nothing to watch."""

    def __init__(self, *outcomes: CommitStatus) -> None:
        self.outcomes = list(outcomes)

    def commit(self, compares: Any, writes: Any, *, deadline_ms: int) -> CommitResult:
        return CommitResult(self.outcomes.pop(0) if self.outcomes else CommitStatus.COMMITTED, 1)

    def list(self, prefix: str, *, deadline_ms: int) -> Listing:
        return Listing((), 0)

    def watch(self, prefixes: Any, from_revision: int, *, deadline_ms: int) -> WatchBatch:
        time.sleep(deadline_ms / 1000)
        return WatchBatch((), (), from_revision - 1)


def test_unknown_outcomes_are_told_once_and_their_end_too(caplog: pytest.LogCaptureFixture) -> None:
    """A full control directory ends commits so: without a line the leases would run out in silence."""
    done, ended = threading.Event(), []

    def handle(event: ev.Event) -> None:
        if isinstance(event, ev.Committed):
            ended.append(event.status)
            if len(ended) == 5:
                done.set()

    store: Any = Unsure(CommitStatus.COMMITTED, CommitStatus.UNKNOWN, CommitStatus.UNKNOWN, CommitStatus.REFUSED)
    coordination = Coordination(store, Clock(), handle, commit_deadline_ms=50, watch_deadline_ms=20)
    coordination.start()
    for number in range(5):
        coordination.submit(Commit(number + 1, [], []))
    assert done.wait(5)
    coordination.stop()
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2, lines
    assert "unknown outcome" in lines[0]
    assert lines[1] == "coordinator: works again"


class Deleting(Unsure):
    """The watch brings one deleted key the way the embedded coordinator tells it, beside a record."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = [WatchBatch((Record("drain/a", b"", 7), Record("live/b", b"x", 7)), ("drain/a",), 7)]

    def watch(self, prefixes: Any, from_revision: int, *, deadline_ms: int) -> WatchBatch:
        return self.batches.pop() if self.batches else super().watch(prefixes, from_revision, deadline_ms=deadline_ms)


def test_a_deleted_key_is_no_record_to_decode() -> None:
    """Each undone drain was logged as a record of another version."""
    told, done = [], threading.Event()

    def handle(event: ev.Event) -> None:
        if isinstance(event, ev.Records) and not event.full:
            told.append(([record.key for record in event.records], event.deleted))
            done.set()

    store: Any = Deleting()
    coordination = Coordination(store, Clock(), handle, commit_deadline_ms=50, watch_deadline_ms=20)
    coordination.start()
    assert done.wait(5)
    coordination.stop()
    assert told == [(["live/b"], ["drain/a"])]
