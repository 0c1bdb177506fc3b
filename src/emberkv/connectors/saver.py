"""Saving blocks behind the engine's back: a bounded queue, one thread, and the rule "drop before you block".

Why it exists: an engine must never wait for its cache. It hands over references; everything that takes time (asking
    what is present, copying, sending) happens here.
Laws: `submit` never waits for I/O and never raises; what does not fit is dropped and counted by reason; a client that
    fails costs the job, never the thread. The client has copied the bytes when `put_many` returns, so one buffer serves
    all batches.
Limits: one thread; `jobs_max` jobs holding at most `held_bytes_max` bytes of engine memory; `known_max` remembered
    keys.

    submit -> (all known: skip | full: drop) -> queued -> exists_many -> export + put_many per batch -> done | dropped
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from emberkv.types import Level, MissReason, PutOutcome

log = logging.getLogger(__name__)

Rows = npt.NDArray[np.uint8]


class LoadOutcome(Protocol):
    """What `get_into` answers: leading rows that arrived intact, and one reason per key (NONE for a hit)."""

    @property
    def usable(self) -> int: ...
    @property
    def reasons(self) -> Sequence[MissReason]: ...


class BlockClient(Protocol):
    """The part of `emberkv.Client` that connectors use."""

    def get_into(self, keys: Sequence[bytes], dest: Rows, *, deadline_ms: int) -> LoadOutcome: ...
    def exists_many(self, keys: Sequence[bytes], *, deadline_ms: int) -> list[bool]: ...
    def put_many(
        self, items: Sequence[tuple[bytes, Any]], *, level: Level | None, deadline_ms: int
    ) -> list[PutOutcome]: ...


class SaveJob(NamedTuple):
    """Blocks to save: `export(first, last, rows)` writes blocks first..last-1; `held_bytes` is what the job keeps
    alive."""

    keys: Sequence[bytes]
    held_bytes: int
    export: Callable[[int, int, Rows], None]


class SaverStats(NamedTuple):
    """Counts of blocks since the start; `dropped` by reason."""

    saved: int
    skipped_known: int
    skipped_present: int
    dropped: dict[str, int]
    queued_jobs: int
    held_bytes: int


class BackgroundSaver:
    """Owns the thread, the queue and the memory of which keys the cluster is known to hold."""

    def __init__(
        self,
        client: BlockClient,
        block_bytes: int,
        *,
        level: Level | None = None,
        deadline_ms: int = 5_000,
        batch_blocks: int = 8,
        jobs_max: int = 4,
        held_bytes_max: int = 1 << 30,
        known_max: int = 65_536,
    ) -> None:
        self._client = client
        self._level = level
        self._deadline_ms = deadline_ms
        self._jobs_max = jobs_max
        self._held_bytes_max = held_bytes_max
        self._known_max = known_max
        # Zeroed by hand: the first touch of a page is several times dearer than the copy, so it is paid before the
        # first job.
        self._rows: Rows = np.empty((batch_blocks, block_bytes), np.uint8)
        self._rows.fill(0)
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._jobs: deque[SaveJob] = deque()
        self._held_bytes = 0
        self._busy = False
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="emberkv-saver", daemon=True)
        self._thread.start()

    def submit(self, job: SaveJob) -> bool:
        """Queue a job, or drop it if the queue is full. Mutates; True if there is nothing left to worry about."""
        with self._changed:
            unknown = sum(key not in self._known for key in job.keys)
            if not unknown:
                self._counts["skipped_known"] += len(job.keys)
                return True
            reason = self._refusal(job)
            if reason:
                self._dropped[reason] += unknown
                return False
            self._jobs.append(job)
            self._held_bytes += job.held_bytes
            self._changed.notify_all()
            return True

    def remember(self, keys: Iterable[bytes]) -> None:
        """The cluster holds these keys: do not ask again."""
        with self._changed:
            for key in keys:
                self._known[key] = None
                self._known.move_to_end(key)
            while len(self._known) > self._known_max:
                self._known.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """A read missed these keys (evicted, lost): the next save asks again."""
        with self._changed:
            for key in keys:
                self._known.pop(key, None)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all jobs are done; False if `timeout_s` ended first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Drop what is queued, let the running job end, stop the thread."""
        with self._changed:
            self._closed = True
            for job in self._jobs:
                self._dropped["closed"] += len(job.keys)
                self._held_bytes -= job.held_bytes
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def stats(self) -> SaverStats:
        """A consistent snapshot; changes nothing."""
        with self._changed:
            return SaverStats(
                saved=self._counts["saved"],
                skipped_known=self._counts["skipped_known"],
                skipped_present=self._counts["skipped_present"],
                dropped=dict(self._dropped),
                queued_jobs=len(self._jobs) + self._busy,
                held_bytes=self._held_bytes,
            )

    def _refusal(self, job: SaveJob) -> str:
        if self._closed:
            return "closed"
        if len(self._jobs) + self._busy >= self._jobs_max:
            return "queue-jobs"
        if self._held_bytes + job.held_bytes > self._held_bytes_max:
            return "queue-bytes"
        return ""

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._busy = True
            try:
                self._save(job)
            except Exception as error:  # the engine boundary: whatever a client does, saving goes on with the next job
                log.warning("save of %d blocks dropped: %s: %s", len(job.keys), type(error).__name__, error)
                with self._changed:
                    self._dropped["client-error"] += sum(key not in self._known for key in job.keys)
            finally:
                held_bytes = job.held_bytes
                del job  # before `flush` returns, so that the engine's tensors are free by then
                with self._changed:
                    self._held_bytes -= held_bytes
                    self._busy = False
                    self._changed.notify_all()

    def _save(self, job: SaveJob) -> None:
        with self._changed:
            unknown = [index for index, key in enumerate(job.keys) if key not in self._known]
            self._counts["skipped_known"] += len(job.keys) - len(unknown)
        answers = self._client.exists_many([job.keys[i] for i in unknown], deadline_ms=self._deadline_ms)
        present = [index for index, there in zip(unknown, answers, strict=True) if there]
        self.remember(job.keys[i] for i in present)
        with self._changed:
            self._counts["skipped_present"] += len(present)
        there_set = set(present)
        missing = [index for index in unknown if index not in there_set]
        deadline = time.monotonic() + self._deadline_ms / 1000
        for first, last in _runs(missing, len(self._rows)):
            if time.monotonic() > deadline:
                with self._changed:
                    self._dropped["deadline"] += sum(i >= first for i in missing)
                return
            self._save_run(job, first, last)

    def _save_run(self, job: SaveJob, first: int, last: int) -> None:
        rows = self._rows[: last - first]
        job.export(first, last, rows)
        keys = job.keys[first:last]
        outcomes = self._client.put_many(
            [(key, memoryview(rows[i])) for i, key in enumerate(keys)], level=self._level, deadline_ms=self._deadline_ms
        )
        stored = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome]
        self.remember(stored)
        with self._changed:
            self._counts["saved"] += len(stored)
            for outcome in outcomes:
                if not outcome:
                    self._dropped[_put_failure(outcome)] += 1


def _put_failure(outcome: PutOutcome) -> str:
    return outcome.reason.label if outcome.reason else outcome.status.name.lower()


def _runs(indices: Sequence[int], length_max: int) -> Iterator[tuple[int, int]]:
    """Consecutive indices as half-open ranges of at most `length_max`: one export and one put per range."""
    start = 0
    for position in range(1, len(indices) + 1):
        ended = position == len(indices) or indices[position] != indices[position - 1] + 1
        if ended or position - start == length_max:
            yield indices[start], indices[position - 1] + 1
            start = position
