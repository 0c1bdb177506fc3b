"""Saves and loads in the background, for engine schedulers: submit, poll, wait.

Why it exists: an engine's thread may be held a millisecond at most, and a cache must drop before it blocks.
Laws: submitting only enqueues references; one thread saves and one loads; a full queue drops the save and says so; a
job ends exactly once, also when the client is closed. The caller's buffers belong to the job until it is done.
Limits: JOBS_MAX jobs and `bytes_max` bytes wait; a batch of saves merges at most BATCH_KEYS_MAX blocks of equal terms.
Life of a job: waiting -> running -> done ; waiting -> done (dropped, or the client was closed).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from emberkv.client.connection import Bytes
from emberkv.client.loads import LoadResult
from emberkv.client.saves import STAGING_FULL, UNKNOWN, UNREACHABLE
from emberkv.client.token import SessionToken
from emberkv.messages import PutItem
from emberkv.types import BATCH_KEYS_MAX, Level, MissReason, PutOutcome

JOB_BYTES_MAX: Final = 256 << 20
"""Engine memory that waiting saves may hold back: a few seconds of staging at the rate of one copying thread."""
JOBS_MAX: Final = 4096
JOIN_NS: Final = 1_000_000_000
FINISHED_MAX: Final = 65536
"""Ended jobs kept for `poll`; a caller that only waits never polls, so the oldest are forgotten."""

Result = TypeVar("Result")
Terms = tuple[Level | int | None, int, SessionToken | None]
"""Level, min_copies and the session of a save; what differs in them is never merged."""


class Job(Generic[Result]):
    """One submitted save (result: list[PutOutcome]) or load (result: LoadResult)."""

    def __init__(self, dropped: bool = False) -> None:
        self._done = threading.Event()
        self._result: Result | None = None
        self.dropped = dropped
        """True: the queue was full (or the client closed) and nothing was sent."""

    @property
    def done(self) -> bool:
        """True when the result is there and the caller's buffers are free."""
        return self._done.is_set()

    def wait(self, timeout_ms: int | None = None) -> bool:
        """Waits for the end of the job; False when `timeout_ms` passed first."""
        return self._done.wait(None if timeout_ms is None else timeout_ms / 1000)

    def result(self) -> Result:
        """The result; waits for it if need be (the job's own deadline bounds that)."""
        self._done.wait()
        assert self._result is not None
        return self._result

    def _end(self, result: Result) -> None:
        self._result = result
        self._done.set()


class PutJob(Job[list[PutOutcome]]):
    """A save that waits or runs."""

    def __init__(
        self, items: list[PutItem], views: list[memoryview], terms: Terms, deadline_ns: int, dropped: bool = False
    ) -> None:
        super().__init__(dropped)
        self.items = items
        self.views = views
        self.terms = terms
        self.deadline_ns = deadline_ns
        self.size = sum(item.length for item in items)

    def joins(self, first: PutJob) -> bool:
        """True when it may run under the terms of `first`, whose deadline is then a little early for it."""
        return self.terms == first.terms and 0 <= self.deadline_ns - first.deadline_ns <= JOIN_NS


class GetJob(Job[LoadResult]):
    """A load that waits or runs."""

    def __init__(
        self,
        keys: list[bytes],
        dest: Bytes,
        deadline_ns: int,
        level: Level | int | None,
        token: SessionToken | None = None,
    ) -> None:
        super().__init__()
        self.keys = keys
        self.dest = dest
        self.deadline_ns = deadline_ns
        self.level = level
        self.token = token

    def miss(self, reason: MissReason) -> LoadResult:
        """The result of a load that did not begin."""
        return LoadResult(0, [reason] * len(self.keys), 0)


class JobQueue:
    """The two queues of a client and their threads, started by the first job."""

    def __init__(
        self,
        put: Callable[
            [list[PutItem], list[memoryview], Level | int | None, int, int, SessionToken | None], list[PutOutcome]
        ],
        get: Callable[[list[bytes], Bytes, int, Level | int | None, SessionToken | None], LoadResult],
        bytes_max: int,
    ) -> None:
        self._put = put
        self._get = get
        self._bytes_max = bytes_max
        self._changed = threading.Condition(threading.Lock())
        self._puts: deque[PutJob] = deque()
        self._gets: deque[GetJob] = deque()
        self._bytes = 0
        self._closed = False
        self._threads: dict[str, threading.Thread] = {}
        self._finished: deque[Job[list[PutOutcome]] | Job[LoadResult]] = deque(maxlen=FINISHED_MAX)

    def submit_put(
        self,
        items: list[PutItem],
        views: list[memoryview],
        level: Level | int | None,
        deadline_ns: int,
        min_copies: int,
        token: SessionToken | None = None,
    ) -> PutJob:
        """Enqueues a save; one that finds no room is returned done and `dropped`."""
        job = PutJob(items, views, (level, min_copies, token), deadline_ns)
        with self._changed:
            # A job larger than the bound may still run alone: the bound is about what waits.
            full = len(self._puts) >= JOBS_MAX or (self._bytes and self._bytes + job.size > self._bytes_max)
            if not (self._closed or full):
                self._bytes += job.size
                self._puts.append(job)
                self._start("emberkv-saves", self._save_all)
                self._changed.notify_all()
                return job
        job.dropped = True
        self._finish(job, [UNREACHABLE if self._closed else STAGING_FULL] * len(items))
        return job

    def submit_get(
        self,
        keys: list[bytes],
        dest: Bytes,
        deadline_ns: int,
        level: Level | int | None,
        token: SessionToken | None = None,
    ) -> GetJob:
        """Enqueues a load; one that finds no room is returned done, all misses with QUOTA."""
        job = GetJob(keys, dest, deadline_ns, level, token)
        with self._changed:
            if not self._closed and len(self._gets) < JOBS_MAX:
                self._gets.append(job)
                self._start("emberkv-loads", self._load_all)
                self._changed.notify_all()
                return job
        job.dropped = True
        self._finish(job, job.miss(MissReason.UNREACHABLE if self._closed else MissReason.QUOTA))
        return job

    def _start(self, name: str, body: Callable[[], None]) -> None:
        thread = self._threads.get(name)
        if thread is None or not thread.is_alive():
            self._threads[name] = threading.Thread(target=body, name=name, daemon=True)
            self._threads[name].start()

    def _finish(self, job: Job[Result], result: Result) -> None:
        job._end(result)
        self._finished.append(job)  # type: ignore[arg-type]

    def poll(self) -> list[Job[list[PutOutcome]] | Job[LoadResult]]:
        """Jobs that ended since the last poll."""
        ended = []
        while self._finished:
            ended.append(self._finished.popleft())
        return ended

    # -- the two threads ----------------------------------------------------------------------------------------------

    def _save_all(self) -> None:
        while True:
            with self._changed:
                while not self._puts and not self._closed:
                    self._changed.wait()
                if not self._puts:
                    return
                batch = self._next_batch()
            self._save(batch)

    def _save(self, batch: list[PutJob]) -> None:
        items = [item for job in batch for item in job.items]
        views = [view for job in batch for view in job.views]
        level, min_copies, token = batch[0].terms
        outcomes = [UNKNOWN] * len(items)
        try:
            outcomes = self._put(items, views, level, batch[0].deadline_ns, min_copies, token)
        finally:  # whatever went wrong, nobody waits for ever
            start = 0
            for job in batch:
                with self._changed:
                    self._bytes -= job.size
                job.views = []  # the caller's memory is not held longer than promised
                self._finish(job, outcomes[start : start + len(job.items)])
                start += len(job.items)

    def _next_batch(self) -> list[PutJob]:
        """The first waiting save and those behind it that can share its requests. Called with the lock held."""
        batch = [self._puts.popleft()]
        count = len(batch[0].items)
        while self._puts and self._puts[0].joins(batch[0]) and count + len(self._puts[0].items) <= BATCH_KEYS_MAX:
            batch.append(self._puts.popleft())
            count += len(batch[-1].items)
        return batch

    def _load_all(self) -> None:
        while True:
            with self._changed:
                while not self._gets and not self._closed:
                    self._changed.wait()
                if not self._gets:
                    return
                job = self._gets.popleft()
            result = job.miss(MissReason.UNREACHABLE)
            try:
                result = self._get(job.keys, job.dest, job.deadline_ns, job.level, job.token)
            finally:
                self._finish(job, result)

    def close(self) -> None:
        """Ends waiting jobs as refused or missed; those that run end by their deadlines. Idempotent."""
        with self._changed:
            self._closed = True
            puts, gets = list(self._puts), list(self._gets)
            self._puts.clear()
            self._gets.clear()
            self._bytes -= sum(job.size for job in puts)
            self._changed.notify_all()
        for save in puts:
            save.dropped = True
            self._finish(save, [UNREACHABLE] * len(save.items))
        for load in gets:
            load.dropped = True
            self._finish(load, load.miss(MissReason.UNREACHABLE))
