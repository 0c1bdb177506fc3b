"""One life of a disk after another, each ended by a power cut, and the judge of what came back. Pure.

Why it exists: the property tests and `emberkv bench crash` run the same story; the tier's own code runs in it.
Laws: the judge keeps its own record of what was said and when it was synced; it never asks the store.
"""

from __future__ import annotations

import random

import msgspec

from emberkv.errors import InvariantViolation
from emberkv.storage.block_index import MemoryIndex
from emberkv.storage.faulty_files import MemoryFiles
from emberkv.storage.mapping import page_buffer
from emberkv.storage.segment import PAGE
from emberkv.storage.segment_log import SegmentLog
from emberkv.storage.segment_store import DiskBlock, SegmentStore
from emberkv.types import Version, checksum, round_up

LIVES = 3
STEPS = 40
LIMIT_BYTES = 4 << 20
SEGMENT_BYTES = 256 << 10


class CutReport(msgspec.Struct):
    """Sums over all stories so far."""

    power_cuts: int = 0
    wrong_bytes: int = 0
    """Blocks that came back with bytes or a version that nobody wrote, or older than what was synced."""
    synced_lost: int = 0
    served: int = 0
    torn: int = 0
    """Blocks that the index named and whose bytes were refused: misses."""


class _Judge:
    """What was said of each key, in order, and how much of that was synced."""

    def __init__(self) -> None:
        self.said: dict[bytes, list[bytes | None]] = {}
        """Key -> contents by version (1, 2, ...); None: deleted."""
        self.synced: dict[bytes, int] = {}
        self.fresh: set[bytes] = set()
        """Keys of which something was said since the last sync or cut."""
        self.maybe_gone: set[bytes] = set()
        """Keys that a reclaimed segment may have held."""

    def say(self, key: bytes, content: bytes | None) -> Version:
        """The next version of a key."""
        self.said.setdefault(key, []).append(content)
        self.fresh.add(key)
        return Version(1, len(self.said[key]))

    def all_synced(self) -> None:
        """Everything said in this life is durable."""
        self.synced.update({key: len(self.said[key]) for key in self.fresh})
        self.fresh.clear()


def cut_power(rng: random.Random, report: CutReport, *, syncs_lie: bool = False) -> None:
    """Some lives of one disk, a power cut after each, and what is found then. `syncs_lie`: the disk is a bad one, which
    the judge has to notice."""
    files = [MemoryFiles() for _ in range(rng.choice((1, 2)))]
    judge = _Judge()
    index = MemoryIndex()
    for _ in range(LIVES):
        if rng.random() < 0.4:
            index = MemoryIndex()  # lost, damaged or refused: built again from the segments
        store = _store(files, index)
        store.recover()
        _look(store, judge, report)
        _live(rng, store, judge, syncs_lie=syncs_lie)
        for each in files:
            each.power_cut(rng)
        judge.fresh.clear()
        report.power_cuts += 1
    store = _store(files, index)
    store.recover()
    _look(store, judge, report)


def _store(files: list[MemoryFiles], index: MemoryIndex) -> SegmentStore:
    logs = [SegmentLog(LIMIT_BYTES, SEGMENT_BYTES) for _ in files]
    ids = [bytes([number]) * 16 for number in range(len(files))]
    return SegmentStore(files, logs, index, ids, b"c" * 32)


def _live(rng: random.Random, store: SegmentStore, judge: _Judge, *, syncs_lie: bool) -> None:
    for _ in range(rng.randrange(STEPS)):
        blocks: list[DiskBlock] = []
        for key in {bytes([rng.randrange(30)]) * 40 for _ in range(rng.randrange(1, 6))}:
            if rng.random() < 0.15:
                blocks.append(DiskBlock(key, judge.say(key, None), None))
                continue
            content = rng.randbytes(rng.choice((1, 4096, 9000, 40_000)))
            payload = page_buffer(round_up(len(content)))
            payload[: len(content)] = content  # control bytes (of a simulated disk)
            version = judge.say(key, content)
            blocks.append(DiskBlock(key, version, payload, len(content), checksum(content)))
        store.append(blocks)
        if rng.random() < 0.3:
            if syncs_lie:
                store.index.apply((), (), (), ())
            else:
                store.sync()
            judge.all_synced()
        for directory in store.wants_room():
            store.reclaim(directory, lambda keys: [rng.random() < 0.2 for _ in keys])
            judge.all_synced()
            judge.maybe_gone.update(judge.said)
    for log in store.logs:
        log.check()
        if log.used_bytes > log.limit_bytes:
            raise InvariantViolation("the segments exceed their limit")


def _look(store: SegmentStore, judge: _Judge, report: CutReport) -> None:
    """Reads every key and judges what comes back."""
    keys = list(judge.said)
    for key, entry in zip(keys, store.find(keys), strict=True):
        contents, synced = judge.said[key], judge.synced.get(key, 0)
        owed = synced > 0 and contents[synced - 1] is not None and key not in judge.maybe_gone
        if entry is None:
            # What was said after the last sync may have arrived: then a later deletion ends what was owed.
            if owed and None not in contents[synced:]:
                report.synced_lost += 1
            continue
        into = page_buffer(PAGE + round_up(entry.length))
        header = store.payload(entry.place, entry.length, into)
        if header is None:
            report.torn += 1
            if owed:
                report.synced_lost += 1
            continue
        report.served += 1
        known = contents[header.version.seq - 1] if header.version.seq <= len(contents) else None
        right = known is not None and bytes(into[PAGE : PAGE + entry.length]) == known and header.key == key
        if not right or header.version != entry.version or entry.version.seq < synced:
            report.wrong_bytes += 1
