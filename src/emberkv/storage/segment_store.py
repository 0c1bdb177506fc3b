"""The NVMe tier's logic without threads, clock or chance: blocks appended to segments, named by an index.

Why it exists: the node runs it behind its writer thread (nvme.py), the tests over files that lose what was not synced,
the simulator over its own disk. What is proven there is what runs here.

    block:  (plan) --write--> written --sync, index--> DURABLE --reclaimed | deleted | newer version--> gone

Laws: the index never names what is not durable: data is synced first, then the index commits. Of two blocks of one key
the higher version counts, also after the index was lost and is built again from the headers; but one that is torn never
hides an older one that is whole. All blocks of a key lie in one directory, so a deletion outlives what it deletes.
Limits: one thread calls what changes anything; `find` may be called by any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec
import xxhash

from emberkv.errors import NotOurs, ProtocolError
from emberkv.storage.disk import BlockIndex, DiskEntry, DiskPlace, SegmentFiles
from emberkv.storage.mapping import page_buffer
from emberkv.storage.segment import (
    PAGE,
    BlockHeader,
    SegmentHeader,
    pack_block_header,
    pack_segment_header,
    payload_is_right,
    scan,
    unpack_segment_header,
)
from emberkv.storage.segment_log import SegmentLog
from emberkv.types import CHECKSUM_BYTES, NO_VERSION, PUT_ID_BYTES, Version, round_up

T = TypeVar("T")

EXTENT_BYTES: Final = 4 << 20
"""One write: blocks that follow one another in a batch lie side by side up to this."""
KEYS_PER_LOOKUP: Final = 1024
"""While segments are scanned: bounds what is held at a time, and one transaction of the index."""
HOT_SHARE_MAX: Final = 0.25
"""At most this share of a segment is written again when it leaves: reclaiming must free more than it costs."""


class DiskBlock(msgspec.Struct, gc=False):
    """A block on its way to disk. `payload`: its bytes and their padding up to whole pages, starting on a page; None:
    the key was deleted at `version`."""

    key: bytes
    version: Version
    payload: memoryview | None
    length: int = 0
    checksum: bytes = b"\0" * CHECKSUM_BYTES
    prev: Version = NO_VERSION
    put_id: bytes = b"\0" * PUT_ID_BYTES
    depth: int = 0
    parts: int = 1
    expiry_ms: int = 0


class Extent(NamedTuple):
    """One write: pieces that lie one after another in a segment."""

    directory: int
    segment: int
    offset: int
    pieces: list[memoryview]
    nbytes: int


class Plan(msgspec.Struct):
    """What has to be written for a batch, and what the index will say after it."""

    extents: list[Extent] = msgspec.field(default_factory=list)
    puts: list[tuple[bytes, DiskEntry]] = msgspec.field(default_factory=list)
    deletes: list[bytes] = msgspec.field(default_factory=list)
    refused: int = 0
    """Blocks that found no room: they stay where they are, in memory."""


class Tail(NamedTuple):
    """A part of a segment that the index does not know."""

    directory: int
    segment: int
    start: int
    size: int


Scanned = tuple[Tail, dict[bytes, list[tuple[Version, DiskEntry | None]]], int]
"""A tail, what it says of each key, the newest first (without an entry: deleted), and how many headers were read."""


class Recovered(NamedTuple):
    """What `recover` found."""

    segments: int
    scanned: int
    """Blocks read from headers, because the index did not know them yet."""
    foreign: int
    """Segment files of another store or format: left alone, and not counted into the size."""


class SegmentStore:
    """Blocks in the segments of one or more directories, and the index over them."""

    def __init__(
        self,
        files: Sequence[SegmentFiles],
        logs: Sequence[SegmentLog],
        index: BlockIndex,
        store_ids: Sequence[bytes],
        cluster: bytes,
    ) -> None:
        """One log and store id (16 bytes) per directory; `cluster`: 32-byte digest of the cluster's id."""
        self.files: Final = list(files)
        self.logs: Final = list(logs)
        self.index: Final = index
        self._store_ids: Final = list(store_ids)
        self._cluster: Final = cluster
        self.off: set[int] = set()
        """Directories that take no writes now."""
        self._unsynced: dict[tuple[int, int], None] = {}
        self._written: list[Plan] = []
        self._headed: set[tuple[int, int]] = set()

    # -- questions -----------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[DiskEntry | None]:
        """What is durable of each key."""
        return self.index.find(keys)

    def inherited(self, place: DiskPlace) -> bool:
        """Was it written by an earlier life of this node?"""
        return place.segment < self.logs[place.directory].first_of_life

    def usage(self) -> tuple[int, int]:
        """(bytes in segments, bytes configured)."""
        return sum(log.used_bytes for log in self.logs), sum(log.limit_bytes for log in self.logs)

    def wants_room(self) -> list[int]:
        """Directories whose oldest segment should leave."""
        return [at for at, log in enumerate(self.logs) if at not in self.off and log.wants_room()]

    # -- writing -------------------------------------------------------------------------------------------------

    def plan(self, blocks: Iterable[DiskBlock]) -> Plan:
        """Gives each block its place. The caller writes all extents (`write`), then tells `written` or `failed`."""
        plan = Plan()
        runs: list[list[DiskBlock]] = [[] for _ in self.logs]
        sizes = [0] * len(self.logs)
        for block in blocks:
            directory = self.home(block.key)
            nbytes = _disk_bytes(block)
            if runs[directory] and sizes[directory] + nbytes > EXTENT_BYTES:
                self._plan_run(plan, directory, runs[directory], sizes[directory])
                runs[directory], sizes[directory] = [], 0
            runs[directory].append(block)
            sizes[directory] += nbytes
        for directory, run in enumerate(runs):
            if run:
                self._plan_run(plan, directory, run, sizes[directory])
        return plan

    def home(self, key: bytes) -> int:
        """The directory of a key: always the same, so what ends a block is behind it in the same row of segments. A
        chain is spread over all directories, and read from all of them at once."""
        return xxhash.xxh3_64_intdigest(key) % len(self.logs)

    def _plan_run(self, plan: Plan, directory: int, run: list[DiskBlock], nbytes: int) -> None:
        """Blocks side by side; singly where they do not fit together."""
        place = self.logs[directory].place(nbytes) if directory not in self.off else None
        if place is not None:
            self._lay_out(plan, directory, *place, run)
        elif len(run) == 1:
            plan.refused += 1
            plan.deletes.append(run[0].key)  # what is older there does not count either
        else:
            for block in run:
                self._plan_run(plan, directory, [block], _disk_bytes(block))

    def _lay_out(self, plan: Plan, directory: int, segment: int, offset: int, run: list[DiskBlock]) -> None:
        # Header pages begin on a page too, as direct writes want it.
        pages = page_buffer((len(run) + 1) * PAGE)
        pieces: list[memoryview] = []
        position = offset
        if (directory, segment) not in self._headed:
            self._headed.add((directory, segment))
            pieces.append(_page(pages, 0, self._segment_header(directory, segment)))
            offset = 0
        for number, block in enumerate(run):
            header = BlockHeader(
                segment, position, block.key, 0, block.parts, block.version, block.prev, block.put_id, block.depth,
                block.length, block.expiry_ms, block.checksum, block.payload is None,
            )  # fmt: skip
            pieces.append(_page(pages, number + 1, pack_block_header(header)))
            if block.payload is None:
                plan.deletes.append(block.key)
            else:
                pieces.append(block.payload)
                place = DiskPlace(directory, segment, position)
                entry = DiskEntry(place, block.version, block.length, block.depth, block.expiry_ms, block.checksum)
                plan.puts.append((block.key, entry))
            position = header.end
        plan.extents.append(Extent(directory, segment, offset, pieces, position - offset))

    def _segment_header(self, directory: int, segment: int) -> bytes:
        log = self.logs[directory]
        return pack_segment_header(SegmentHeader(self._store_ids[directory], self._cluster, segment, log.segment_bytes))

    def write(self, extent: Extent) -> None:
        """Performs one write; several threads may. OSError comes out as it is: then the plan has `failed`."""
        self.files[extent.directory].write(extent.segment, extent.offset, extent.pieces)

    def written(self, plan: Plan) -> None:
        """All extents are in the files; `sync` makes them count."""
        for extent in plan.extents:
            self._unsynced[extent.directory, extent.segment] = None
        self._written.append(plan)

    def failed(self, plan: Plan) -> None:
        """An extent was not written: nothing of the plan counts, and nothing is appended behind the hole."""
        for extent in plan.extents:
            if self.logs[extent.directory].active == extent.segment:
                self.logs[extent.directory].seal()

    def sync(self, notes: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Makes everything that was written durable, then lets the index name it. After an OSError nothing has changed
        but that the segments concerned take no more blocks; what they hold is forgotten here, since a failed sync may
        have lost it for good."""
        touched, self._unsynced = list(self._unsynced), {}
        plans, self._written = self._written, []
        notes = list(notes)
        if not touched and not notes and not plans:
            return
        try:
            for directory, segment in touched:
                self.files[directory].sync(segment)
        except OSError:
            for plan in plans:
                self.failed(plan)
            raise
        newest: dict[bytes, DiskEntry | None] = {}
        for plan in plans:
            newest.update(dict.fromkeys(plan.deletes))
            newest.update(plan.puts)
        puts = [(key, entry) for key, entry in newest.items() if entry is not None]
        deletes = [key for key, entry in newest.items() if entry is None]
        marks = [(at, segment, self.logs[at].sizes[segment]) for at, segment in touched]
        self.index.apply(puts, deletes, marks, (), notes)

    def append(self, blocks: Iterable[DiskBlock]) -> Plan:
        """Plans and writes a batch in one go, without syncing it; for callers that need no parallel writes."""
        plan = self.plan(blocks)
        try:
            for extent in plan.extents:
                self.write(extent)
        except OSError:
            self.failed(plan)
            raise
        self.written(plan)
        return plan

    # -- reading back --------------------------------------------------------------------------------------------

    def headers(self, directory: int, segment: int, start: int, end: int, page: memoryview) -> Iterator[BlockHeader]:
        """Headers of a segment from a known block's offset on; `page` is a page-aligned buffer of one page."""
        files = self.files[directory]

        def read(offset: int, count: int) -> bytes:
            try:
                return bytes(page[: files.read(segment, offset, [page[:count]])])
            except FileNotFoundError:
                return b""  # its first write failed

        return scan(read, segment, end, start)

    def payload(self, place: DiskPlace, length: int, into: memoryview) -> BlockHeader | None:
        """Reads one block into a page-aligned buffer of its header page and its payload's pages; None when what is
        there is not this block or its bytes are not what was put."""
        count = PAGE + round_up(length)
        came = self.files[place.directory].read(place.segment, place.position, [into[:count]])
        if came < PAGE + length:
            return None
        for header in scan(lambda offset, _: bytes(into[:PAGE]), place.segment, place.position + count, place.position):
            right = header.length == length and payload_is_right(header, into[PAGE : PAGE + length])
            return header if right else None
        return None

    def _is_whole(self, entry: DiskEntry) -> bool:
        return self.payload(entry.place, entry.length, page_buffer(PAGE + round_up(entry.length))) is not None

    # -- reclaiming ----------------------------------------------------------------------------------------------

    def reclaim(self, directory: int, is_hot: Callable[[list[bytes]], list[bool]]) -> int:
        """Lets the oldest segment of a directory leave and returns the bytes that came free; what is hot in it is
        written again first. OSError: nothing of it has left."""
        log = self.logs[directory]
        segment = log.oldest()
        if segment is None:
            return 0
        size = log.sizes[segment]
        self.sync()
        live = list(self._live(directory, segment, size, page_buffer(PAGE)))
        again, left = [], int(size * HOT_SHARE_MAX)
        hot = is_hot([header.key for header in live]) if live else []
        for header, wanted in zip(live, hot, strict=True):
            nbytes = PAGE + round_up(header.length)
            if not wanted or nbytes > left:
                continue
            into = page_buffer(nbytes)
            if self.payload(DiskPlace(directory, segment, header.position), header.length, into) is not None:
                again.append(_block_of(header, into[PAGE:nbytes]))
                left -= nbytes
        if again:
            self.append(again)
            self.sync()
        places = [DiskPlace(directory, segment, header.position) for header in live]
        found = self.index.find([header.key for header in live])
        gone = [
            header.key
            for header, place, entry in zip(live, places, found, strict=True)
            if entry is not None and entry.place == place
        ]
        self.index.apply((), gone, (), [(directory, segment)])
        self.files[directory].remove(segment)
        log.removed(segment)
        self._headed.discard((directory, segment))
        return size

    def _live(self, directory: int, segment: int, size: int, page: memoryview) -> Iterator[BlockHeader]:
        """Blocks of a segment that the index still names."""
        for batch in _batches(self.headers(directory, segment, PAGE, size, page), KEYS_PER_LOOKUP):
            found = self.index.find([header.key for header in batch])
            for header, entry in zip(batch, found, strict=True):
                if entry is not None and entry.place == DiskPlace(directory, segment, header.position):
                    yield header

    # -- after a restart -----------------------------------------------------------------------------------------

    def recover(
        self,
        each: Callable[[Callable[[Tail], Scanned], list[Tail]], Iterable[Scanned]] = map,
        progress: Callable[[int, int], None] = lambda done, count: None,
    ) -> Recovered:
        """Takes what earlier lives left: every segment is scanned from where the index ends, and the index forgets
        segments that are not there. `each` may scan several at once but gives the results in order, a bounded number
        ahead; `progress(segments done, of all)`."""
        marks = self.index.marks()
        todo: list[Tail] = []
        foreign = 0
        there: set[tuple[int, int]] = set()
        for directory, (files, log) in enumerate(zip(self.files, self.logs, strict=True)):
            found = files.segments()
            ours = []
            for number, size in found:
                start = marks.get((directory, number), 0)
                if not start:
                    whose = self._whose(directory, number, page_buffer(PAGE))
                    if whose is None:
                        files.remove(number)  # its first page never became durable, so nothing in it did
                        continue
                    if not whose:
                        foreign += 1
                        continue
                ours.append((number, size))
                there.add((directory, number))
                if start < size:
                    todo.append(Tail(directory, number, start or PAGE, size))
            named = [segment for at, segment in marks if at == directory]
            log.adopt(ours, max([number for number, _ in found] + [*named, 0]))
        self.index.apply((), (), (), [mark for mark in marks if mark not in there])
        scanned = 0
        for done, (tail, newest, blocks) in enumerate(each(lambda tail: self._scan(tail, page_buffer(PAGE)), todo)):
            self._index_again(tail, newest)
            scanned += blocks
            progress(done + 1, len(todo))
        return Recovered(len(there), scanned, foreign)

    def _whose(self, directory: int, number: int, page: memoryview) -> bool | None:
        """Is a segment that the index does not know ours (True) or another store's (False)? None: nobody's."""
        if self.files[directory].read(number, 0, [page]) < PAGE:
            return None
        try:
            header = unpack_segment_header(page)
        except ProtocolError:
            return None
        except NotOurs:
            return False
        return (header.store_id, header.segment) == (self._store_ids[directory], number)

    def _scan(self, tail: Tail, page: memoryview) -> Scanned:
        """What a part of a segment says of each key; any thread."""
        words: dict[bytes, list[tuple[Version, DiskEntry | None]]] = {}
        blocks = 0
        for header in self.headers(tail.directory, tail.segment, tail.start, tail.size, page):
            blocks += 1
            word = header.version, None if header.tombstone else _entry_of(tail.directory, header)
            words.setdefault(header.key, []).insert(0, word)
        for said in words.values():
            if len(said) > 1:
                said.sort(key=lambda word: word[0], reverse=True)  # stable: of equal versions the later one
        return tail, words, blocks

    def _index_again(self, tail: Tail, words: dict[bytes, list[tuple[Version, DiskEntry | None]]]) -> None:
        puts: list[tuple[bytes, DiskEntry]] = []
        deletes: list[bytes] = []
        for keys in _batches(words, KEYS_PER_LOOKUP):
            for key, known in zip(keys, self.index.find(keys), strict=True):
                said = [word for word in words[key] if known is None or word[0] >= known.version]
                for version, entry in said:
                    if entry is None:
                        deletes.append(key)
                        break
                    # Only a block that hides another one is read: a torn one that hides nothing is a miss anyway.
                    hides = known is not None or (version, entry) != said[-1]
                    if not hides or self._is_whole(entry):
                        puts.append((key, entry))
                        break
        # Up to the file's end: what lies behind the last block is none, and need not be looked at ever again.
        self.index.apply(puts, deletes, [(tail.directory, tail.segment, tail.size)], ())


def _disk_bytes(block: DiskBlock) -> int:
    return PAGE + (block.payload.nbytes if block.payload is not None else 0)


def _page(pages: memoryview, number: int, raw: bytes) -> memoryview:
    page = pages[number * PAGE : (number + 1) * PAGE]
    page[:] = raw  # control bytes
    return page


def _entry_of(directory: int, header: BlockHeader) -> DiskEntry:
    place = DiskPlace(directory, header.segment, header.position)
    return DiskEntry(place, header.version, header.length, header.depth, header.expiry_ms, header.checksum)


def _block_of(header: BlockHeader, payload: memoryview) -> DiskBlock:
    return DiskBlock(
        header.key, header.version, payload, header.length, header.checksum, header.prev, header.put_id, header.depth,
        header.parts, header.expiry_ms,
    )  # fmt: skip


def _batches(items: Iterable[T], count: int) -> Iterator[list[T]]:
    batch: list[T] = []
    for item in items:
        batch.append(item)
        if len(batch) == count:
            yield batch
            batch = []
    if batch:
        yield batch
