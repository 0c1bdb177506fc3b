"""Segment files that lose, fail and dawdle on purpose: for tests, benchmarks and the simulator.

Why it exists: what a power cut leaves behind, what a dying disk answers and how a slow device feels cannot be had on
demand from a real one. MemoryFiles is a directory in memory that forgets at a power cut what a disk may forget;
FaultyFiles and SlowFiles stand around any other.

    page of MemoryFiles:  written --sync--> synced
                             |  power cut
                             v
                          kept | lost (what was there before) | torn (by sectors of 512 bytes)

Laws: without faults each of them keeps the contract of disk.SegmentFiles (one conformance suite runs over all).
MemoryFiles knows no clock, thread or chance of its own: one seed gives one outcome. A power cut takes nothing that was
synced, and never invents bytes: a page holds what was once written at its place, in this segment or in one that was
removed, or zeros.
Limits: MemoryFiles holds everything in memory, and a second copy, by reference, of what was synced.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final, Literal

import numpy as np

from emberkv.storage.disk import SegmentFiles
from emberkv.storage.segment import PAGE, STORE_ID_BYTES

SECTOR: Final = 512
"""What a device writes all of or nothing."""
KEPT_SHARES: Final = (0.0, 0.5, 0.9, 0.99, 1.0)
"""One is drawn per power cut: the share of pages that were not synced and survive whole. With a single share nearly all
cuts would end alike, at the first lost header."""
BURST_S: Final = 0.001
"""Idle time of a device that later requests may catch up: threads are late by less, and would lose it for good."""

Verb = Literal["segments", "read", "write", "sync", "remove"]
VERBS: Final[tuple[Verb, ...]] = ("segments", "read", "write", "sync", "remove")

_ZEROS: Final = bytes(PAGE)


class _MemoryFile:
    """One segment: what is read from it, what a power cut leaves, and the writes between the two."""

    __slots__ = ("is_named", "pages", "size", "synced", "synced_size", "writes")

    def __init__(self) -> None:
        self.pages: dict[int, bytes] = {}
        self.size = 0
        self.synced: dict[int, bytes] = {}
        self.synced_size = 0
        self.writes: list[tuple[int, list[bytes]]] = []
        """(first page, pages) of each write that was not synced, in order."""
        self.is_named = False
        """Does its name survive a power cut?"""


class MemoryFiles:
    """The SegmentFiles port in memory, with power cuts. A removal is durable at once, as RealFiles makes it."""

    direct: Final = False
    fallback_reason: Final = "in memory"

    def __init__(self, store_id: bytes = bytes(STORE_ID_BYTES)) -> None:
        self.store_id: Final = store_id
        self._files: dict[int, _MemoryFile] = {}
        self._remains: dict[int, bytes] = {}
        """Pages of the segment that was removed last: a new one may be given its place on the device."""
        self._closed = False

    # -- the port ------------------------------------------------------------------------------------------------

    def segments(self) -> list[tuple[int, int]]:
        """As disk.SegmentFiles."""
        self._require_open()
        return sorted((number, file.size) for number, file in self._files.items())

    def read(self, segment: int, offset: int, into: Sequence[memoryview]) -> int:
        """As disk.SegmentFiles. OSError (EINVAL) for an offset within a page, as O_DIRECT refuses it."""
        file = self._file(segment)
        _require_pages(offset)
        pages = file.pages
        done = 0
        for piece in into:
            count = max(0, min(piece.nbytes, file.size - offset - done))
            if count == 0:
                break
            first, skip = divmod(offset + done, PAGE)
            last = (offset + done + count - 1) // PAGE
            source = b"".join([pages.get(page, _ZEROS) for page in range(first, last + 1)])
            np.frombuffer(piece, np.uint8)[:count] = np.frombuffer(source, np.uint8)[skip : skip + count]  # numpy copy
            done += count
        return done

    def write(self, segment: int, offset: int, pieces: Sequence[memoryview]) -> None:
        """As disk.SegmentFiles. OSError (EINVAL) for what is not whole pages."""
        self._require_open()
        data = b"".join(pieces)
        _require_pages(offset, len(data))
        file = self._files.setdefault(segment, _MemoryFile())
        first = offset // PAGE
        written = [data[at : at + PAGE] for at in range(0, len(data), PAGE)]
        file.writes.append((first, written))
        file.pages.update(enumerate(written, first))
        file.size = max(file.size, offset + len(data))

    def sync(self, segment: int) -> None:
        """As disk.SegmentFiles."""
        file = self._file(segment)
        for first, written in file.writes:
            file.synced.update(enumerate(written, first))
        file.writes.clear()
        file.synced_size, file.is_named = file.size, True

    def remove(self, segment: int) -> None:
        """As disk.SegmentFiles. A file that is not there is no error."""
        self._require_open()
        file = self._files.pop(segment, None)
        if file is not None:
            self._remains = file.pages

    def close(self) -> None:
        """As disk.SegmentFiles. The bytes stay: see `reopen`."""
        self._closed = True

    def check_there(self) -> None:
        """Memory does not vanish."""

    # -- what a disk does not offer ------------------------------------------------------------------------------

    def reopen(self) -> None:
        """The next life of a process begins over the same bytes; un-synced ones are still there."""
        self._closed = False

    def unsynced_pages(self) -> int:
        """Pages that the next power cut decides upon; a page that was written twice counts twice."""
        return sum(len(written) for file in self._files.values() for _, written in file.writes)

    def power_cut(self, rng: Random) -> None:
        """The power goes and comes back. Each page that was not synced is kept, lost or torn on its own, whatever was
        written before or after it; a size that was not synced ends anywhere between the old and the new one; a file
        whose name was never synced is there or not. The files are open afterwards."""
        kept = rng.choice(KEPT_SHARES)
        for number in sorted(self._files):
            file = self._files[number]
            if not file.is_named and rng.random() < 0.5:
                del self._files[number]
                continue
            for first, written in file.writes:
                for page, data in enumerate(written, first):
                    before = file.synced.get(page, self._remains.get(page, _ZEROS))
                    file.synced[page] = _after_cut(rng, kept, before, data)
            if file.writes and file.size > file.synced_size:
                sectors = (file.size - file.synced_size) // SECTOR
                grown = rng.choice((0, sectors, rng.randint(0, sectors)))
                file.synced_size += grown * SECTOR
            end = -(-file.synced_size // PAGE)
            file.synced = {page: data for page, data in file.synced.items() if page < end}
            file.pages, file.size = dict(file.synced), file.synced_size
            file.writes, file.is_named = [], True
        self._closed = False

    def _require_open(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "the directory is closed")

    def _file(self, segment: int) -> _MemoryFile:
        self._require_open()
        file = self._files.get(segment)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, f"there is no segment {segment}")
        return file


def _after_cut(rng: Random, kept: float, before: bytes, after: bytes) -> bytes:
    """What a power cut makes of a page that was being written."""
    if rng.random() < kept:
        return after
    if rng.random() < 0.5:
        return before
    sectors = rng.getrandbits(PAGE // SECTOR)
    return b"".join(
        (after if sectors >> at & 1 else before)[at * SECTOR : (at + 1) * SECTOR] for at in range(PAGE // SECTOR)
    )


def _require_pages(*numbers: int) -> None:
    if any(number % PAGE for number in numbers):
        raise OSError(errno.EINVAL, f"not whole pages: {numbers}")


class _Around:
    """Passes all on to other files."""

    def __init__(self, inner: SegmentFiles) -> None:
        self.inner: Final = inner

    def __getattr__(self, name: str) -> Any:
        # What only some files have, as `store_id` and `direct`.
        return getattr(self.inner, name)

    def segments(self) -> list[tuple[int, int]]:
        """As disk.SegmentFiles."""
        return self.inner.segments()

    def read(self, segment: int, offset: int, into: Sequence[memoryview]) -> int:
        """As disk.SegmentFiles."""
        return self.inner.read(segment, offset, into)

    def write(self, segment: int, offset: int, pieces: Sequence[memoryview]) -> None:
        """As disk.SegmentFiles."""
        self.inner.write(segment, offset, pieces)

    def sync(self, segment: int) -> None:
        """As disk.SegmentFiles."""
        self.inner.sync(segment)

    def remove(self, segment: int) -> None:
        """As disk.SegmentFiles."""
        self.inner.remove(segment)

    def close(self) -> None:
        """As disk.SegmentFiles."""
        self.inner.close()


class _Fault:
    """An error that a verb answers with: after `after` more calls, `count` times (None: until healed)."""

    __slots__ = ("after", "count", "error", "partial_bytes")

    def __init__(self, error: int, after: int, count: int | None, partial_bytes: int) -> None:
        self.error, self.after, self.count, self.partial_bytes = error, after, count, partial_bytes


class FaultyFiles(_Around):
    """Errors, short reads, flipped bits and waiting, on demand, around other files. Any thread may turn them on."""

    def __init__(self, inner: SegmentFiles) -> None:
        super().__init__(inner)
        self.calls: Final[dict[Verb, int]] = dict.fromkeys(VERBS, 0)
        """How often each verb was asked, also in vain."""
        self._lock: Final = threading.Lock()
        self._faults: dict[Verb, _Fault] = {}
        self._held: dict[Verb, threading.Event] = {}
        self._read_bytes_max: int | None = None
        self._damage: dict[tuple[int, int], int] = {}
        self._flips: tuple[Random, float] | None = None

    # -- turning faults on and off -------------------------------------------------------------------------------

    def fail(self, verb: Verb, error: int, *, after: int = 0, count: int | None = None, partial_bytes: int = 0) -> None:
        """`verb` raises OSError with this errno: after `after` calls that still work, `count` times (None: until
        `heal`). A write puts `partial_bytes` (whole pages) down first, as a disk that becomes full."""
        with self._lock:
            self._faults[verb] = _Fault(error, after, count, partial_bytes)

    def hold(self, verb: Verb) -> None:
        """Calls of `verb` wait, as on a dead network mount, until `heal`."""
        with self._lock:
            self._held.setdefault(verb, threading.Event())

    def shorten_reads(self, nbytes: int) -> None:
        """A read brings at most so many bytes, whatever the file holds."""
        self._read_bytes_max = nbytes

    def damage(self, segment: int, position: int, mask: int = 1) -> None:
        """The byte at `position` of a segment is read with these bits flipped, each time, until `heal`."""
        with self._lock:
            self._damage[segment, position] = mask

    def flip_reads(self, rng: Random, share: float) -> None:
        """This share of the reads comes with one bit flipped, anywhere in it."""
        self._flips = rng, share

    def heal(self, verb: Verb | None = None) -> None:
        """The verb works again, what waits goes on; without a verb: all of them. Reads are whole and right again."""
        with self._lock:
            for each in VERBS if verb is None else (verb,):
                self._faults.pop(each, None)
                held = self._held.pop(each, None)
                if held is not None:
                    held.set()
            if verb in (None, "read"):
                self._read_bytes_max, self._flips = None, None
                self._damage.clear()

    # -- the port ------------------------------------------------------------------------------------------------

    def segments(self) -> list[tuple[int, int]]:
        """As disk.SegmentFiles."""
        self._meet("segments")
        return self.inner.segments()

    def read(self, segment: int, offset: int, into: Sequence[memoryview]) -> int:
        """As disk.SegmentFiles."""
        self._meet("read")
        limit = self._read_bytes_max
        pieces = list(into) if limit is None else _cut(into, limit)
        came = self.inner.read(segment, offset, pieces)
        with self._lock:
            for (where, position), mask in self._damage.items():
                if where == segment and offset <= position < offset + came:
                    _flip(pieces, position - offset, mask)
            if self._flips is not None and came:
                rng, share = self._flips
                if rng.random() < share:
                    _flip(pieces, rng.randrange(came), 1 << rng.randrange(8))
        return came

    def write(self, segment: int, offset: int, pieces: Sequence[memoryview]) -> None:
        """As disk.SegmentFiles."""
        try:
            self._meet("write")
        except _Injected as fault:
            if fault.partial_bytes:
                self.inner.write(segment, offset, _cut(pieces, fault.partial_bytes))
            raise
        self.inner.write(segment, offset, pieces)

    def sync(self, segment: int) -> None:
        """As disk.SegmentFiles."""
        self._meet("sync")
        self.inner.sync(segment)

    def remove(self, segment: int) -> None:
        """As disk.SegmentFiles."""
        self._meet("remove")
        self.inner.remove(segment)

    def _meet(self, verb: Verb) -> None:
        """Waits or raises as was asked for."""
        with self._lock:
            self.calls[verb] += 1
            held = self._held.get(verb)
        if held is not None:
            held.wait()
        with self._lock:
            fault = self._faults.get(verb)
            if fault is None:
                return
            if fault.after > 0:
                fault.after -= 1
                return
            if fault.count is not None:
                fault.count -= 1
                if fault.count <= 0:
                    del self._faults[verb]
        raise _Injected(fault)


class _Injected(OSError):
    """An error that was asked for; to its catcher an OSError like any other."""

    def __init__(self, fault: _Fault) -> None:
        super().__init__(fault.error, os.strerror(fault.error))
        self.partial_bytes = fault.partial_bytes


class SlowFiles(_Around):
    """A device with a latency per request, and a bandwidth that all requests share, around faster files.

    Requests of many threads overlap in their latency and queue for the bandwidth. The work of the inner files is part
    of the time that is waited for, so they must be faster than the device that is played.
    """

    def __init__(
        self,
        inner: SegmentFiles,
        latency_s: float,
        bytes_per_s: float,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        sleep_s: Callable[[float], None] = time.sleep,
    ) -> None:
        """A request of n bytes on an idle device takes latency_s + n / bytes_per_s; a sync takes the latency."""
        super().__init__(inner)
        self._latency_s: Final = latency_s
        self._bytes_per_s: Final = bytes_per_s
        self._clock_s, self._sleep_s = clock_s, sleep_s
        self._lock: Final = threading.Lock()
        self._free_s = float("-inf")
        """When the bandwidth that was promised so far will have been used."""

    def read(self, segment: int, offset: int, into: Sequence[memoryview]) -> int:
        """As disk.SegmentFiles."""
        done_s = self._promise(sum(piece.nbytes for piece in into))
        came = self.inner.read(segment, offset, into)
        self._wait(done_s)
        return came

    def write(self, segment: int, offset: int, pieces: Sequence[memoryview]) -> None:
        """As disk.SegmentFiles."""
        done_s = self._promise(sum(piece.nbytes for piece in pieces))
        self.inner.write(segment, offset, pieces)
        self._wait(done_s)

    def sync(self, segment: int) -> None:
        """As disk.SegmentFiles."""
        done_s = self._promise(0)
        self.inner.sync(segment)
        self._wait(done_s)

    def _promise(self, nbytes: int) -> float:
        """When a request that comes now will be done. A token bucket: its level is how far `_free_s` lies back."""
        cost_s = nbytes / self._bytes_per_s
        with self._lock:
            now_s = self._clock_s()
            self._free_s = max(self._free_s, now_s - BURST_S) + cost_s
            return max(self._free_s, now_s + cost_s) + self._latency_s

    def _wait(self, done_s: float) -> None:
        """Sleeping gives the interpreter to the other threads."""
        while (left_s := done_s - self._clock_s()) > 0:
            self._sleep_s(left_s)


def _cut(pieces: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of pieces."""
    cut: list[memoryview] = []
    for piece in pieces:
        if nbytes <= 0:
            break
        cut.append(piece[:nbytes])
        nbytes -= piece.nbytes
    return cut


def _flip(pieces: Sequence[memoryview], position: int, mask: int) -> None:
    """Changes one byte of pieces that lie one after another."""
    for piece in pieces:
        if position < piece.nbytes:
            piece[position] ^= mask
            return
        position -= piece.nbytes
