"""Parallel reads from the directories of the NVMe tier, each as deep as it pays.

    extent:  queued --a thread of its directory--> reading --checked--> done
               |  deadline                            |  deadline
               v                                      v
             given back at once            late: given back when the read has ended

Laws: `read` returns by its deadline. What it says is OK was checked: header, key, version, checksum. A target whose
read is under way belongs to this file until the read has ended, whatever the deadline says (`on_late`); nobody can take
a read back that the kernel has begun. Threads are started when the depth asks for them.
Limits: QUEUE_MAX extents wait per directory; more are answered LATE at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

import numpy as np

from emberkv.errors import ProtocolError
from emberkv.storage.depth import READ_DEPTH_MAX, Depth, read_depth
from emberkv.storage.disk import SegmentFiles
from emberkv.storage.extents import Extent, Wanted, buffers, extents_of, scratch_bytes
from emberkv.storage.mapping import page_buffer
from emberkv.storage.segment import PAGE, payload_is_right, unpack_block_header

__all__ = ["DiskReader", "Outcome", "Wanted"]

QUEUE_MAX: Final = 16_384
SAMPLE_BYTES: Final = 64 << 20
"""Read in one busy stretch before its bandwidth says anything."""
LATENCIES_KEPT: Final = 512


class Outcome(Enum):
    """What became of one block."""

    OK = "ok"
    MISMATCH = "mismatch"
    """Another block, or bytes that are not what was put."""
    FAILED = "failed"
    LATE = "late"


class _Batch:
    """One call of `read`."""

    def __init__(self, count: int, on_late: Callable[[int], None]) -> None:
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.outcomes: list[Outcome | None] = [None] * count
        self.left = 0
        self.is_over = False
        self.on_late = on_late


class _Directory:
    """Queue, threads and depth of one directory."""

    def __init__(self, files: SegmentFiles) -> None:
        self.files = files
        self.work = threading.Condition()
        self.queue: deque[tuple[Extent, _Batch]] = deque()
        self.threads = 0
        self.reading = 0
        self.depth: Depth = read_depth()
        self.busy_since_s = 0.0
        self.busy_bytes = 0


class DiskReader:
    """Reads blocks; any thread may call it."""

    def __init__(self, files: Sequence[SegmentFiles]) -> None:
        self._directories: Final = [_Directory(each) for each in files]
        self._latencies = np.zeros(LATENCIES_KEPT)
        self._latency_count = 0
        self._closing = False

    def read(self, wanted: Sequence[Wanted], deadline_s: float, on_late: Callable[[int], None]) -> list[Outcome]:
        """Reads blocks into their targets until `deadline_s` (time.monotonic); one outcome per block, in the order
        given. For each that is LATE, `on_late(position)` is called once, by any thread, when its target is free."""
        batch = _Batch(len(wanted), on_late)
        # Extents know blocks by their position in this call, which is also their order in the prefix.
        blocks = [block._replace(order=position) for position, block in enumerate(wanted)]
        extents = extents_of(blocks)
        batch.left = len(extents)
        for extent in extents:
            self._queue(extent, batch)
        if extents:
            batch.done.wait(max(0.0, deadline_s - time.monotonic()))
        with batch.lock:
            batch.is_over = True
            return [Outcome.LATE if outcome is None else outcome for outcome in batch.outcomes]

    def _queue(self, extent: Extent, batch: _Batch) -> None:
        directory = self._directories[extent.directory]
        with directory.work:
            if len(directory.queue) < QUEUE_MAX and not self._closing:
                directory.queue.append((extent, batch))
                running = directory.reading + len(directory.queue)
                if directory.threads < min(running, directory.depth.depth, READ_DEPTH_MAX):
                    directory.threads += 1
                    threading.Thread(target=self._run, args=(directory,), name="nvme read", daemon=True).start()
                directory.work.notify()
                return
        _finish(extent, batch, [Outcome.FAILED] * len(extent.blocks))

    def busy(self) -> bool:
        """Is anything being read or waiting for it?"""
        return any(directory.reading or directory.queue for directory in self._directories)

    def depths(self) -> list[int]:
        """Reads at the same time, per directory, as found so far."""
        return [directory.depth.depth for directory in self._directories]

    def p99_s(self) -> float:
        """Time of the slowest hundredth of the last reads; 0 when there were none."""
        count = min(self._latency_count, LATENCIES_KEPT)
        return float(np.percentile(self._latencies[:count], 99)) if count else 0.0

    def close(self) -> None:
        """Ends the threads after what they are reading; what waits is answered FAILED."""
        self._closing = True
        for directory in self._directories:
            with directory.work:
                waiting, directory.queue = list(directory.queue), deque()
                directory.work.notify_all()
            for extent, batch in waiting:
                _finish(extent, batch, [Outcome.FAILED] * len(extent.blocks))
            with directory.work:
                directory.work.wait_for(lambda held=directory: held.threads == 0, timeout=10.0)  # type: ignore[misc]

    # -- the threads ---------------------------------------------------------------------------------------------

    def _run(self, directory: _Directory) -> None:
        scratch = page_buffer(2 << 20)
        while True:
            with directory.work:
                while not directory.queue or directory.reading >= directory.depth.depth:
                    if self._closing or directory.threads > max(directory.depth.depth, 1):
                        directory.threads -= 1
                        directory.work.notify_all()
                        return
                    directory.work.wait(5.0)
                extent, batch = directory.queue.popleft()
                directory.reading += 1
                if directory.reading == 1 and not directory.queue:
                    directory.busy_bytes = 0
                if directory.busy_bytes == 0:
                    directory.busy_since_s = time.monotonic()
            if scratch.nbytes < scratch_bytes(extent):
                scratch = page_buffer(scratch_bytes(extent))
            outcomes = self._read(directory, extent, batch, scratch)
            with directory.work:
                directory.reading -= 1
                self._measure(directory, extent.nbytes)
                directory.work.notify()
            _finish(extent, batch, outcomes)

    def _measure(self, directory: _Directory, nbytes: int) -> None:
        """Under the directory's lock. Only a stretch in which more was waiting than could be read says anything."""
        if not directory.queue:
            directory.busy_bytes = 0
            return
        directory.busy_bytes += nbytes
        if directory.busy_bytes < SAMPLE_BYTES:
            return
        before = directory.depth.depth
        directory.depth.sample(directory.busy_bytes, time.monotonic() - directory.busy_since_s)
        directory.busy_bytes = 0
        for _ in range(directory.depth.depth - before):
            if directory.threads < directory.depth.depth:
                directory.threads += 1
                threading.Thread(target=self._run, args=(directory,), name="nvme read", daemon=True).start()

    def _read(self, directory: _Directory, extent: Extent, batch: _Batch, scratch: memoryview) -> list[Outcome]:
        if batch.is_over:
            return [Outcome.LATE] * len(extent.blocks)
        started_s = time.monotonic()
        try:
            came = directory.files.read(extent.segment, extent.offset, buffers(extent, scratch))
        except OSError:
            return [Outcome.FAILED] * len(extent.blocks)
        self._latencies[self._latency_count % LATENCIES_KEPT] = time.monotonic() - started_s
        self._latency_count += 1
        return [
            _check(block, scratch[number * PAGE : (number + 1) * PAGE], came - (block.place.position - extent.offset))
            for number, block in enumerate(extent.blocks)
        ]


def _check(block: Wanted, page: memoryview, came: int) -> Outcome:
    """`came`: bytes that arrived from the block's header on."""
    if came < PAGE + block.length:
        return Outcome.MISMATCH
    try:
        header = unpack_block_header(page, block.place.segment, block.place.position)
    except ProtocolError:
        return Outcome.MISMATCH
    same = (header.key, header.version, header.length) == (block.key, block.version, block.length)
    same = same and not header.tombstone
    return Outcome.OK if same and payload_is_right(header, block.target[: block.length]) else Outcome.MISMATCH


def _finish(extent: Extent, batch: _Batch, outcomes: list[Outcome]) -> None:
    """Tells the caller, or, if it has gone, gives the targets back."""
    with batch.lock:
        late = batch.is_over
        if not late:
            for block, outcome in zip(extent.blocks, outcomes, strict=True):
                batch.outcomes[block.order] = outcome
            batch.left -= 1
            if batch.left == 0:
                batch.done.set()
    if late:
        for block in extent.blocks:
            batch.on_late(block.order)
