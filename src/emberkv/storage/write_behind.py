"""The one thread that changes a node's disks: it writes behind, syncs, lets segments leave, and survives bad disks.

Why it exists: a put must never wait for a disk, and a disk that fails must cost nothing but its own hits.

    save:       queued --written--> unsynced --synced, indexed--> durable
                  |  queue full, disk off                          (the slot's reference goes back at each end)
                  v
                forgotten: what is older on disk does not count either
    directory:  ON --OSError--> OFF (reason shown) --after a pause, doubling--> ON

Laws: `save` never blocks and never raises. From the moment of `save` until the block is durable the tier answers
nothing for its key: in memory it is there, and what the disk holds is older. Reads go before writes. Only this thread
calls what changes the store.
Limits: `dirty_bytes_max` of memory wait at most; FORGOTTEN_MAX keys whose old copies are to be forgotten while no disk
takes that: beyond it the tier is emptied before it is used again, because nobody knows what in it still counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from errno import ENOSPC
from itertools import islice
from typing import Final

from emberkv.ports import Saved, Slot
from emberkv.storage.segment import PAGE
from emberkv.storage.segment_store import EXTENT_BYTES, DiskBlock, Extent, Plan, SegmentStore
from emberkv.types import NO_VERSION, Version

log = logging.getLogger("emberkv.storage")

SYNC_BYTES: Final = 64 << 20
SYNC_AFTER_S: Final = 1.0
"""What a crash costs at most; each sync holds up reads for some milliseconds."""
FORGOTTEN_MAX: Final = 262_144
FORGETS_PER_BATCH: Final = 1024
PAUSE_FIRST_S: Final = 1.0
PAUSE_LAST_S: Final = 60.0
YIELD_S: Final = 0.002
YIELDS_MAX: Final = 10
"""A write waits for reads under way in steps of YIELD_S, so often at most: reads must not starve it for good."""
CLOSE_S: Final = 5.0


class WriteBehind:
    """Queue and thread of writes to a SegmentStore."""

    def __init__(
        self,
        store: SegmentStore,
        *,
        dirty_bytes_max: int,
        pages: Callable[[Slot], memoryview],
        release: Callable[[list[Slot]], None],
        is_hot: Callable[[list[bytes]], list[bool]],
        reads_under_way: Callable[[], bool],
        notes: Callable[[], Iterable[tuple[bytes, bytes]]],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pages(slot)`: the slot's bytes and padding, page-aligned. `release` gives references back. `notes`: small
        values that are kept with each sync."""
        self._store: Final = store
        self._dirty_bytes_max: Final = dirty_bytes_max
        self._pages, self._release, self._is_hot = pages, release, is_hot
        self._reads_under_way, self._notes, self._clock_s = reads_under_way, notes, clock_s
        self._lock: Final = threading.Lock()
        self._work: Final = threading.Condition(self._lock)
        self._queue: deque[Saved] = deque()
        """Blocks with bytes, in the order in which they were saved."""
        self._forgets: dict[bytes, Saved] = {}
        """Keys whose copies on disk are to be forgotten."""
        self._versions: dict[bytes, Version] = {}
        """Keys of which the disk's word does not count, and what was last said of them."""
        self._dirty_bytes = 0
        self._unsynced: list[Saved] = []
        self._unsynced_bytes, self._unsynced_since_s = 0, 0.0
        self._stopping = False
        self._lost_track = False
        self.depth = 1
        """Extents of EXTENT_BYTES written at the same time."""
        self._writers: ThreadPoolExecutor | None = None
        self.reasons: dict[int, str] = {}
        """Directory -> why it is off."""
        self._retry_s: dict[int, float] = {}
        self._pauses: dict[int, float] = {}
        self.counters: dict[str, int] = dict.fromkeys(
            ("written", "written_bytes", "dropped", "refused", "syncs", "reclaimed_bytes", "errors"), 0
        )
        self._thread: Final = threading.Thread(target=self._run, name="nvme writer", daemon=True)

    def start(self) -> None:
        """Begins to write; after the store was recovered."""
        self._thread.start()

    # -- any thread ----------------------------------------------------------------------------------------------

    def save(self, blocks: Sequence[Saved]) -> None:
        """Queues blocks; those that find no room in the queue give their slots back at once."""
        back: list[Slot] = []
        with self._work:
            for block in blocks:
                if block.slot is None and self._versions.get(block.key, NO_VERSION) > block.version:
                    continue  # it ends only what is older than what waits here
                if block.slot is not None and (
                    self._dirty_bytes + block.slot.size_class > self._dirty_bytes_max or not self.is_on()
                ):
                    back.append(block.slot)
                    block.slot = None
                    self.counters["dropped"] += 1
                if block.slot is not None:
                    self._dirty_bytes += block.slot.size_class
                    self._queue.append(block)
                    self._forgets.pop(block.key, None)
                elif len(self._forgets) >= FORGOTTEN_MAX and block.key not in self._versions:
                    self._lost_track = True
                    continue
                else:
                    self._forgets[block.key] = block
                self._versions[block.key] = block.version
            self._work.notify()
        if back:
            self._release(back)

    def is_on(self) -> bool:
        """Does any directory take writes?"""
        return len(self._store.off) < len(self._store.logs) and not self._stopping

    def counts(self, keys: Sequence[bytes]) -> list[bool]:
        """Per key: may the index's word be believed now?"""
        if self._lost_track:
            return [False] * len(keys)
        versions = self._versions
        return [key not in versions for key in keys]

    def document(self) -> dict[str, object]:
        """What `status` shows of writing."""
        with self._lock:
            return {
                "dirty_bytes": self._dirty_bytes,
                "queued": len(self._queue),
                "to_forget": len(self._forgets),
                "not_durable": len(self._versions),
                "write_depth": self.depth,
                "off": {str(at): reason for at, reason in self.reasons.items()},
                "emptied_before_use": self._lost_track,
                **self.counters,
            }

    def stop(self) -> None:
        """Writes what is waiting, for CLOSE_S at most, and ends the thread. Repeatable."""
        with self._work:
            self._stopping = True
            self._work.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        if self._writers is not None:
            self._writers.shutdown(wait=False)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        deadline_s = float("inf")
        while True:
            self._turn_on_again()
            with self._work:
                if not (self._queue or self._forgets) and not self._stopping and not self._store.wants_room():
                    self._work.wait(SYNC_AFTER_S / 4)
                if self._stopping:
                    deadline_s = min(deadline_s, self._clock_s() + CLOSE_S / 2)
                batch, back = self._take_batch()
                ends = self._stopping and (not batch or self._clock_s() > deadline_s)
            if back:
                self._release(back)
            if batch:
                self._write(batch)
            if self._unsynced and (ends or self._sync_is_due()):
                self._sync()
            if ends:
                return
            self._make_room()

    def _take_batch(self) -> tuple[list[Saved], list[Slot]]:
        """Up to `depth` extents, in the order in which they were saved, so that blocks of one chain come together; one
        word per key, the newest. And slots to give back: of what was said anew, and, while nothing can be written, of
        all."""
        back: list[Slot] = []
        batch: list[Saved] = []
        if len(self._store.off) == len(self._store.logs):
            for block in self._queue:
                self._drop_bytes(block, back)
                if self._versions.get(block.key) == block.version:
                    self._forgets[block.key] = block
            self.counters["dropped"] += len(back)
            self._queue.clear()
            return batch, back
        batch += [self._forgets.pop(key) for key in list(islice(self._forgets, FORGETS_PER_BATCH))]
        nbytes = 0
        while self._queue and nbytes < self.depth * EXTENT_BYTES:
            block = self._queue.popleft()
            assert block.slot is not None
            if self._versions.get(block.key) != block.version:
                self._drop_bytes(block, back)
                continue
            nbytes += PAGE + block.slot.size_class
            batch.append(block)
        return batch, back

    def _drop_bytes(self, block: Saved, back: list[Slot]) -> None:
        """Gives a block's bytes up; the caller releases them, not under our lock, because that takes the runtime's."""
        if block.slot is not None:
            back.append(block.slot)
            self._dirty_bytes -= block.slot.size_class
            block.slot = None

    def _write(self, batch: list[Saved]) -> None:
        for _ in range(YIELDS_MAX):
            if not self._reads_under_way():
                break
            time.sleep(YIELD_S)
        forgets = [block for block in batch if block.slot is None]
        known = self._known(forgets)
        blocks = []
        for block in batch:
            if block.slot is not None:
                blocks.append(self._disk_block(block, block.slot))
            elif block.key in known:
                blocks.append(DiskBlock(block.key, block.version, None))
        plan = self._store.plan(blocks)
        error = self._write_all(plan)
        if not self._unsynced:
            self._unsynced_since_s = self._clock_s()
        if error is not None:
            self._store.failed(plan)
            self._fail(*error)
            self._requeue_forgets(batch)
            return
        self._store.written(plan)
        self.counters["refused"] += plan.refused
        self.counters["written"] += len(plan.puts)
        self.counters["written_bytes"] += sum(extent.nbytes for extent in plan.extents)
        self._unsynced += batch
        self._unsynced_bytes += sum(extent.nbytes for extent in plan.extents)

    def _known(self, forgets: list[Saved]) -> set[bytes]:
        """Which of these keys the disk holds, or will hold after the next sync."""
        keys = [block.key for block in forgets]
        found = zip(forgets, self._store.find(keys), strict=True)
        held = {block.key for block, entry in found if entry is not None and entry.version <= block.version}
        return held | ({block.key for block in self._unsynced if block.slot is not None} & set(keys))

    def _disk_block(self, block: Saved, slot: Slot) -> DiskBlock:
        return DiskBlock(
            block.key, block.version, self._pages(slot), slot.length, block.checksum, block.prev, block.put_id,
            block.depth, block.parts, block.expiry_ms,
        )  # fmt: skip

    def _write_all(self, plan: Plan) -> tuple[int, OSError] | None:
        """Writes all extents, several at a time; the directory and error of the first that failed."""
        if len(plan.extents) > 1 and self.depth > 1:
            if self._writers is None:
                self._writers = ThreadPoolExecutor(8, "nvme write")
            results: Iterable[tuple[int, OSError] | None] = list(self._writers.map(self._write_one, plan.extents))
        else:
            results = map(self._write_one, plan.extents)
        return next((result for result in results if result is not None), None)

    def _write_one(self, extent: Extent) -> tuple[int, OSError] | None:
        try:
            self._store.write(extent)
        except OSError as error:
            return extent.directory, error
        return None

    def _sync_is_due(self) -> bool:
        return self._unsynced_bytes >= SYNC_BYTES or self._clock_s() - self._unsynced_since_s >= SYNC_AFTER_S

    def _sync(self) -> None:
        batch, self._unsynced, self._unsynced_bytes = self._unsynced, [], 0
        try:
            self._store.sync(self._notes())
        except OSError as error:
            for directory in range(len(self._store.logs)):
                self._fail(directory, error)
            self._requeue_forgets(batch)
            return
        self.counters["syncs"] += 1
        self._done(batch)

    def _done(self, batch: list[Saved]) -> None:
        """What was said of these keys is on disk now, unless something newer was said meanwhile."""
        slots: list[Slot] = []
        with self._lock:
            for block in batch:
                self._drop_bytes(block, slots)
                if self._versions.get(block.key) == block.version:
                    del self._versions[block.key]
        if slots:
            self._release(slots)

    def _requeue_forgets(self, batch: list[Saved]) -> None:
        """Bytes that were not written are given up; that older copies of their keys do not count must still be said."""
        slots: list[Slot] = []
        with self._lock:
            for block in batch:
                self._drop_bytes(block, slots)
                if self._versions.get(block.key) == block.version:
                    self._forgets[block.key] = block
            self.counters["dropped"] += len(slots)
        if slots:
            self._release(slots)

    def _make_room(self) -> None:
        """Lets the oldest segments leave where room runs out."""
        for directory in self._store.wants_room():
            try:
                self._store_sync_first()
                self.counters["reclaimed_bytes"] += self._store.reclaim(directory, self._is_hot)
            except OSError as error:
                self._fail(directory, error)

    def _store_sync_first(self) -> None:
        if self._unsynced:
            self._sync()

    # -- bad disks -----------------------------------------------------------------------------------------------

    def _fail(self, directory: int, error: OSError) -> None:
        """Turns a directory off for a while."""
        self.counters["errors"] += 1
        if directory in self._store.off:
            return
        pause_s = min(PAUSE_LAST_S, self._pauses.get(directory, PAUSE_FIRST_S / 2) * 2)
        self._pauses[directory] = pause_s
        self._retry_s[directory] = self._clock_s() + pause_s
        what = "full" if error.errno == ENOSPC else error.strerror or str(error)
        self.reasons[directory] = what
        self._store.off.add(directory)
        log.warning("NVMe directory %d is off: %s; next try in %.0f s", directory, what, pause_s)

    def _turn_on_again(self) -> None:
        for directory in [at for at in self._store.off if self._clock_s() >= self._retry_s.get(at, 0.0)]:
            self._store.off.discard(directory)
            reason = self.reasons.pop(directory, "")
            log.info("NVMe directory %d is tried again (was off: %s)", directory, reason)
        if self._lost_track and not self._store.off:
            self._empty()

    def _empty(self) -> None:
        """All segments leave: too much was said while nothing could be written down."""
        try:
            for directory, files_log in enumerate(self._store.logs):
                files_log.seal()
                while files_log.oldest() is not None:
                    self._store.reclaim(directory, lambda keys: [False] * len(keys))
        except OSError as error:
            self._fail(directory, error)
            return
        with self._lock:
            self._lost_track = False
