"""Two threads between the core and the coordinator: one commits, one watches.

Why it exists: the coordinator's calls block; the core must not. Commits go in order, one at a time, so a heartbeat is
never overtaken by an older one.
Laws: a coordinator that cannot be used now never stops reads: failures come back as unknown outcomes, are logged once
per outage, and the watch lists everything anew when it works again.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from emberkv.core import events as ev
from emberkv.core.effects import Commit
from emberkv.core.view import PREFIXES
from emberkv.errors import CoordinatorError
from emberkv.ports import Clock, CommitResult, CommitStatus, Coordinator

log = logging.getLogger(__name__)

COMMITS_QUEUED_MAX = 256
"""More wait only when the coordinator is gone; the core retries what matters, so the rest is refused as unknown."""
RETRY_PAUSE_S = 0.1


class Coordination:
    """Performs commits and turns changes into events."""

    def __init__(
        self,
        coordinator: Coordinator,
        clock: Clock,
        handle: Callable[[ev.Event], None],
        *,
        commit_deadline_ms: int,
        watch_deadline_ms: int,
    ) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._handle = handle
        self._commit_deadline_ms = commit_deadline_ms
        self._watch_deadline_ms = watch_deadline_ms
        self._queue: queue.Queue[Commit | None] = queue.Queue(COMMITS_QUEUED_MAX)
        self._stop = threading.Event()
        self._troubled = False
        self._threads = [
            threading.Thread(target=self._commit_all, name="coordinator-commit", daemon=True),
            threading.Thread(target=self._watch_all, name="coordinator-watch", daemon=True),
        ]

    def start(self) -> None:
        """Begins with a full listing."""
        for thread in self._threads:
            thread.start()

    def submit(self, commit: Commit) -> None:
        """Queues a commit; when too many wait, its outcome is unknown at once."""
        try:
            self._queue.put_nowait(commit)
        except queue.Full:
            # Told by another thread: the caller may hold what the event needs.
            now_ns = self._clock.now_ns()
            unknown = ev.Committed(now_ns, commit.op, CommitStatus.UNKNOWN, 0, now_ns)
            threading.Thread(target=self._handle, args=(unknown,), daemon=True).start()

    def _commit_all(self) -> None:
        while not self._stop.is_set():
            commit = self._queue.get()
            if commit is None:
                return
            # Dated from this send: what waited in the queue must not lengthen a lease, nor may it shorten its use.
            sent_ns = self._clock.now_ns()
            result = self._commit(commit)
            self._handle(ev.Committed(self._clock.now_ns(), commit.op, result.status, result.revision, sent_ns))

    def _commit(self, commit: Commit) -> CommitResult:
        try:
            result = self._coordinator.commit(commit.compares, commit.writes, deadline_ms=self._commit_deadline_ms)
        except CoordinatorError as error:
            self._trouble(error)
            return CommitResult(CommitStatus.UNKNOWN)
        if result.status is CommitStatus.UNKNOWN:
            self._trouble("a commit ended with an unknown outcome: is the control directory full?")
        else:
            self._recovered()
        return result

    def _watch_all(self) -> None:
        revision = self._list_all()
        while not self._stop.is_set():
            try:
                batch = self._coordinator.watch(PREFIXES, revision + 1, deadline_ms=self._watch_deadline_ms)
            except CoordinatorError as error:
                self._trouble(error)
                self._stop.wait(RETRY_PAUSE_S)
                continue
            if batch.compacted:
                revision = self._list_all()
                continue
            # A deleted key comes with an empty value and is named: that is no record to decode.
            gone = set(batch.deleted)
            records = [record for record in batch.records if record.key not in gone]
            if records or gone:
                self._handle(ev.Records(self._clock.now_ns(), records, list(batch.deleted), batch.revision, full=False))
            revision = batch.revision

    def _list_all(self) -> int:
        while not self._stop.is_set():
            try:
                listing = self._coordinator.list("", deadline_ms=self._commit_deadline_ms)
            except CoordinatorError as error:
                self._trouble(error)
                self._stop.wait(RETRY_PAUSE_S)
                continue
            self._recovered()
            self._handle(ev.Records(self._clock.now_ns(), list(listing.records), [], listing.revision, full=True))
            return listing.revision
        return 0

    def _trouble(self, error: CoordinatorError | str) -> None:
        if not self._troubled:
            self._troubled = True
            log.warning("coordinator: %s (reads go on; this line is not repeated until it works again)", error)

    def _recovered(self) -> None:
        if self._troubled:
            self._troubled = False
            log.warning("coordinator: works again")

    def stop(self) -> None:
        """Ends both threads; returns when they have ended or are past their deadlines."""
        self._stop.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=2 + (self._commit_deadline_ms + self._watch_deadline_ms) / 1000)
