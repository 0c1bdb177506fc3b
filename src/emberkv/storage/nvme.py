"""The NVMe tier of a node: index, segments, parallel reads and write-behind behind the BlockStore port.

Why it exists: what left memory, or was there before a restart, is read at the speed of the medium instead of computed.
Laws: no error of a disk comes out of here: it is a miss, counted, and after READ_FAILURES_MAX in a row the directory is
not asked for a while. While the index is built again nothing is answered. A block that fails its checksum is forgotten.
Limits: a directory is used by one process (locked). Its size is never exceeded; one that shrank is honoured at start.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from emberkv.ports import Found, Saved, Slot
from emberkv.storage.block_index import LmdbIndex
from emberkv.storage.disk import DiskEntry
from emberkv.storage.disk_reader import DiskReader, Outcome, Wanted
from emberkv.storage.segment_files import RealFiles
from emberkv.storage.segment_log import SegmentLog
from emberkv.storage.segment_store import Recovered, Scanned, SegmentStore, Tail
from emberkv.storage.write_behind import WriteBehind
from emberkv.types import NO_VERSION, PUT_ID_BYTES, SHARDS, MissReason, Version

log = logging.getLogger("emberkv.storage")

READ_FAILURES_MAX: Final = 3
"""Reads that fail one after another before a directory is left alone."""
READ_PAUSE_S: Final = 5.0
HOT_MAX: Final = 65_536
"""Keys that were read from disk lately: written again when their segment leaves."""
SCANNERS: Final = 8
"""Segments that are scanned at once while the index is built again."""
INDEX_BYTES_PER_BLOCK: Final = 320
FLOORS_NOTE: Final = b"floors"
DISK_FLOORS_NOTE: Final = b"disk-floors"


class NvmeDirectory(msgspec.Struct, frozen=True):
    """One directory of the tier and the bytes that it may take."""

    path: str
    limit_bytes: int


class NvmeTier:
    """The BlockStore port over directories of segments. Raises NotOurs, NameInUse or ConfigError at construction when
    a directory cannot be used; errors that come later turn it off instead."""

    def __init__(
        self,
        directories: Sequence[NvmeDirectory],
        index_path: Path,
        cluster_id: str,
        *,
        dirty_bytes_max: int,
        pages: Callable[[Slot], memoryview],
        release: Callable[[list[Slot]], None],
        floors: Callable[[], tuple[list[Version], list[Version]]],
    ) -> None:
        """`pages(slot)`: the slot's bytes and its padding to whole pages. `release` gives references of slots back.
        `floors()`: the core's floors of deletes and of what is believed here; kept with each sync."""
        cluster = hashlib.sha256(cluster_id.encode()).digest()
        self._pages, self._floors = pages, floors
        self.files: Final[list[RealFiles]] = []
        try:
            for directory in directories:
                self.files.append(RealFiles(Path(directory.path), cluster=cluster))
            identity = hashlib.sha256(cluster + b"".join(files.store_id for files in self.files)).digest()
            limit_bytes = sum(directory.limit_bytes for directory in directories)
            self.index: Final = LmdbIndex(index_path, identity=identity, map_bytes=_map_bytes(limit_bytes))
        except BaseException:
            for files in self.files:
                files.close()
            raise
        store_ids = [files.store_id for files in self.files]
        logs = [SegmentLog(directory.limit_bytes) for directory in directories]
        self.store: Final = SegmentStore(self.files, logs, self.index, store_ids, cluster)
        self.reader: Final = DiskReader(self.files)
        self._hot: OrderedDict[bytes, None] = OrderedDict()
        self.writer: Final = WriteBehind(
            self.store,
            dirty_bytes_max=dirty_bytes_max,
            pages=pages,
            release=release,
            is_hot=lambda keys: [key in self._hot for key in keys],
            reads_under_way=self.reader.busy,
            notes=self._notes,
        )
        self._noted: tuple[list[Version], list[Version]] | None = None
        self.recovered: Recovered | None = None
        """None until the index can be believed."""
        self.progress = (0, 0)
        """Segments scanned, of all that have to be."""
        self._failures = [0] * len(self.files)
        self._read_again_s = [0.0] * len(self.files)
        self.counters: dict[str, int] = dict.fromkeys(("reads", "read_bytes", "bad_blocks", "read_errors", "late"), 0)
        self._closed = False
        self._recovery: Final = threading.Thread(target=self._recover, name="nvme recovery", daemon=True)

    def start(self) -> None:
        """Takes what is on the disks, in the background, and begins to write."""
        self._recovery.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Is the index usable, now or within the time given?"""
        self._recovery.join(timeout_s)
        return self.recovered is not None

    def kept_floors(self) -> tuple[list[Version], list[Version]]:
        """As the last life of this node left them: (floors of deletes, floors of what is believed here)."""
        return _unpack_floors(self.index.note(FLOORS_NOTE)), _unpack_floors(self.index.note(DISK_FLOORS_NOTE))

    def _recover(self) -> None:
        started_s = time.monotonic()

        def progress(done: int, count: int) -> None:
            self.progress = (done, count)

        with ThreadPoolExecutor(SCANNERS, "nvme scan") as pool:
            try:
                recovered = self.store.recover(_ahead(pool), progress)
            except OSError as error:
                self.writer.reasons[-1] = f"the index could not be built again: {error.strerror or error}"
                log.error("NVMe tier stays off: %s", self.writer.reasons[-1])
                return
        self.recovered = recovered
        log.info(
            "NVMe tier: %d segments, %d blocks indexed again in %.1f s",
            recovered.segments,
            recovered.scanned,
            time.monotonic() - started_s,
        )
        self.writer.start()

    # -- the port ------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[Found | None]:
        """As ports.BlockStore."""
        if self.recovered is None or self._closed:
            return [None] * len(keys)
        entries = self.store.find(keys)
        now_s = time.monotonic()
        return [
            _found(entry)
            if entry is not None and counts and now_s >= self._read_again_s[entry.place.directory]
            else None
            for entry, counts in zip(entries, self.writer.counts(keys), strict=True)
        ]

    def load(
        self,
        keys: Sequence[bytes],
        found: Sequence[Found],
        slots: Sequence[Slot],
        deadline_ns: int,
        on_late: Callable[[Slot], None],
    ) -> list[MissReason]:
        """As ports.BlockStore."""
        wanted = [
            Wanted(index, key, known.place, known.version, known.length, self._pages(slot))
            for index, (key, known, slot) in enumerate(zip(keys, found, slots, strict=True))
        ]
        left_s = (deadline_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) / 1e9
        outcomes = self.reader.read(wanted, time.monotonic() + left_s, lambda index: on_late(slots[index]))
        return [self._judge(wants, outcome) for wants, outcome in zip(wanted, outcomes, strict=True)]

    def _judge(self, wants: Wanted, outcome: Outcome) -> MissReason:
        directory = wants.place.directory
        if outcome is Outcome.OK:
            self._failures[directory] = 0
            self.counters["reads"] += 1
            self.counters["read_bytes"] += wants.length
            self._hot[wants.key] = None
            self._hot.move_to_end(wants.key)
            if len(self._hot) > HOT_MAX:
                self._hot.popitem(last=False)
            return MissReason.NONE
        if outcome is Outcome.MISMATCH:
            self.counters["bad_blocks"] += 1
            self.writer.save([Saved(wants.key, wants.version, None, b"", NO_VERSION, b"\0" * PUT_ID_BYTES, 0, 1, 0)])
            return MissReason.CHECKSUM
        if outcome is Outcome.LATE:
            self.counters["late"] += 1
            return MissReason.DEADLINE
        self.counters["read_errors"] += 1
        self._failures[directory] += 1
        if self._failures[directory] >= READ_FAILURES_MAX:
            self._read_again_s[directory] = time.monotonic() + READ_PAUSE_S
        return MissReason.BREAKER

    def save(self, blocks: Sequence[Saved]) -> None:
        """As ports.BlockStore."""
        self.writer.save(blocks)

    def usage(self) -> tuple[int, int]:
        """As ports.BlockStore."""
        return self.store.usage()

    def close(self) -> None:
        """As ports.BlockStore."""
        if self._closed:
            return
        self._closed = True
        self._recovery.join()
        self.writer.stop()
        self.reader.close()
        self.index.close()
        for files in self.files:
            files.close()

    # -- for people ----------------------------------------------------------------------------------------------

    def document(self) -> dict[str, object]:
        """What `status` shows."""
        used, limit = self.usage()
        done, count = self.progress
        return {
            "ready": self.recovered is not None,
            "recovery": {"segments_done": done, "segments": count},
            "used_bytes": used,
            "limit_bytes": limit,
            "keys": self.index.count(),
            "index_rebuilt": self.index.rebuilt_reason,
            "direct": [files.direct for files in self.files],
            "buffered_because": [files.fallback_reason for files in self.files],
            **self.counters,
            "write": self.writer.document(),
        }

    def _notes(self) -> Iterable[tuple[bytes, bytes]]:
        floors = self._floors()
        if floors == self._noted:
            return ()
        self._noted = floors
        return ((FLOORS_NOTE, _pack_floors(floors[0])), (DISK_FLOORS_NOTE, _pack_floors(floors[1])))


def _found(entry: DiskEntry) -> Found:
    return Found(entry.version, entry.length, entry.checksum, entry.expiry_ms, entry.depth, entry.place)


def _map_bytes(limit_bytes: int) -> int:
    """Room for the index of blocks of 16 KiB, and no less than 1 GiB: it is address space, taken only as it fills."""
    return max(1 << 30, limit_bytes // (16 << 10) * INDEX_BYTES_PER_BLOCK)


def _ahead(pool: ThreadPoolExecutor) -> Callable[[Callable[[Tail], Scanned], list[Tail]], Iterable[Scanned]]:
    """A map over a pool that runs a bounded number of items ahead of what was taken."""

    def each(scan: Callable[[Tail], Scanned], tails: list[Tail]) -> Iterable[Scanned]:
        waiting = [pool.submit(scan, tail) for tail in tails[:SCANNERS]]
        for index in range(len(tails)):
            future = waiting.pop(0)
            if index + SCANNERS < len(tails):
                waiting.append(pool.submit(scan, tails[index + SCANNERS]))
            yield future.result()

    return each


def _pack_floors(floors: list[Version]) -> bytes:
    return b"".join(floor.epoch.to_bytes(8, "little") + floor.seq.to_bytes(8, "little") for floor in floors)


def _unpack_floors(raw: bytes | None) -> list[Version]:
    if raw is None or len(raw) != 16 * SHARDS:
        return [NO_VERSION] * SHARDS
    numbers = [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]
    return [Version(epoch, seq) for epoch, seq in zip(numbers[::2], numbers[1::2], strict=True)]
