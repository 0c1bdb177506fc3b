"""Segment files of one directory on a real disk.

Why it exists: the only place of the NVMe tier that opens files. Blocks go past the page cache (O_DIRECT): they would
push out what the machine needs, and come back slower.
Laws: a directory that holds anything else, or belongs to another cluster or format version, is refused and not touched;
one process uses it at a time (flock). A file that is being read is closed only after the read. OSError comes out as it
is.
Limits: DESCRIPTORS_MAX files are open for reading; more are opened again when asked for.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from emberkv.errors import ConfigError, NameInUse, NotOurs
from emberkv.storage.mapping import page_buffer
from emberkv.storage.segment import FORMAT_VERSION, PAGE, STORE_ID_BYTES

SEGMENTS_PER_FOLDER: Final = 256
DESCRIPTORS_MAX: Final = 256
WRITERS_MAX: Final = 32
STORE_FILE: Final = "STORE"
LOCK_FILE: Final = "lock"
STORE_BYTES_MAX: Final = 4096
_IOV_MAX: Final = 1024
_SUFFIX: Final = ".seg"
_TOLERATED: Final = (LOCK_FILE, STORE_FILE, f"{STORE_FILE}.new", "lost+found")


class _Store(msgspec.Struct, frozen=True):
    """Contents of the file STORE: whose directory it is."""

    format: int
    cluster: str
    store_id: str


class _Reading:
    """An open descriptor and how many reads use it."""

    __slots__ = ("fd", "retired", "users")

    def __init__(self, fd: int) -> None:
        self.fd, self.users, self.retired = fd, 0, False


class RealFiles:
    """The SegmentFiles port over the directory `root`, made if absent. Raises NotOurs, NameInUse, ConfigError."""

    def __init__(self, root: Path, *, cluster: bytes, direct: bool = True) -> None:
        """`cluster`: 32-byte digest of the cluster's id. `direct`: O_DIRECT where the file system takes it."""
        self.root: Final = root
        self.fallback_reason = "" if direct else "not asked for"
        """Why the page cache is used; empty while it is not."""
        self._lock: Final = threading.Lock()
        self._readers: OrderedDict[int, _Reading] = OrderedDict()
        self._writing: OrderedDict[int, int] = OrderedDict()
        self._named: set[int] = set()
        """Segments whose names are durable."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot use the NVMe directory {root}: {error.strerror or error}") from error
        try:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise NameInUse(f"the NVMe directory {root} is in use by another node: give each its own") from None
            try:
                self.store_id = self._identify(cluster)
                if direct:
                    self._try_direct()
            except OSError as error:
                raise ConfigError(f"cannot use the NVMe directory {root}: {error.strerror or error}") from error
            self._device = os.stat(root).st_dev
        except BaseException:
            os.close(self._lock_fd)
            raise

    @property
    def direct(self) -> bool:
        """Do reads and writes go past the page cache?"""
        return not self.fallback_reason

    def _identify(self, cluster: bytes) -> bytes:
        file = self.root / STORE_FILE
        try:
            with file.open("rb") as stream:
                text = stream.read(STORE_BYTES_MAX)
        except FileNotFoundError:
            return self._found(cluster)
        try:
            store = msgspec.json.decode(text, type=_Store)
            store_id = bytes.fromhex(store.store_id)
        except (msgspec.MsgspecError, ValueError):
            raise NotOurs(f"{file} cannot be read: choose another nvme_dirs, or move {self.root} away") from None
        if store.format != FORMAT_VERSION:
            raise NotOurs(
                f"{self.root} has format {store.format}, this version reads {FORMAT_VERSION}: choose another directory "
                "or move it away"
            )
        if store.cluster != cluster.hex() or len(store_id) != STORE_ID_BYTES:
            raise NotOurs(f"{self.root} holds blocks of another cluster: choose another directory or move it away")
        return store_id

    def _found(self, cluster: bytes) -> bytes:
        """Marks an empty directory as ours."""
        foreign = sorted(name for name in os.listdir(self.root) if name not in _TOLERATED)
        if foreign:
            raise NotOurs(
                f"{self.root} holds something else ({foreign[0]}): give nvme_dirs an empty directory of its own"
            )
        store_id = os.urandom(STORE_ID_BYTES)
        temporary = self.root / f"{STORE_FILE}.new"
        with temporary.open("wb") as stream:
            stream.write(msgspec.json.encode(_Store(FORMAT_VERSION, cluster.hex(), store_id.hex())))
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(self.root / STORE_FILE)
        _sync_directory(self.root)
        return store_id

    def _try_direct(self) -> None:
        """O_DIRECT is refused by some file systems at open, by others at the first read: the lock file tells."""
        try:
            fd = os.open(self.root / LOCK_FILE, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            self.fallback_reason = f"the file system refuses O_DIRECT: {error.strerror}"
            return
        try:
            os.pwritev(fd, [page_buffer(PAGE)], 0)
            os.preadv(fd, [page_buffer(PAGE)], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.fallback_reason = f"the file system refuses O_DIRECT: {error.strerror}"
        finally:
            os.close(fd)

    # -- the port ------------------------------------------------------------------------------------------------

    def segments(self) -> list[tuple[int, int]]:
        """As disk.SegmentFiles. What is named differently is left alone."""
        found: list[tuple[int, int]] = []
        for folder in self.root.glob("[0-9a-f]*"):
            if not folder.is_dir():
                continue
            for file in folder.glob(f"*{_SUFFIX}"):
                try:
                    number = int(file.stem, 16)
                except ValueError:
                    continue
                if file == self._path(number):
                    found.append((number, file.stat().st_size))
        self._named.update(number for number, _ in found)
        return sorted(found)

    def read(self, segment: int, offset: int, into: Sequence[memoryview]) -> int:
        """As disk.SegmentFiles."""
        reading = self._borrow(segment)
        try:
            done = 0
            pieces = list(into)
            while pieces:
                came = os.preadv(reading.fd, pieces[:_IOV_MAX], offset + done)
                if came <= 0:
                    break
                done += came
                pieces = _rest(pieces, came)
            return done
        finally:
            self._give_back(reading)

    def write(self, segment: int, offset: int, pieces: Sequence[memoryview]) -> None:
        """As disk.SegmentFiles."""
        fd = self._writer(segment)
        left, done = list(pieces), 0
        while left:
            went = os.pwritev(fd, left[:_IOV_MAX], offset + done)
            if went <= 0:
                raise OSError(errno.EIO, "a write took nothing")
            done += went
            left = _rest(left, went)

    def sync(self, segment: int) -> None:
        """As disk.SegmentFiles."""
        os.fdatasync(self._writer(segment))
        if segment not in self._named:
            _sync_directory(self._path(segment).parent)
            _sync_directory(self.root)
            self._named.add(segment)

    def remove(self, segment: int) -> None:
        """As disk.SegmentFiles. A file that is not there is no error."""
        with self._lock:
            fd = self._writing.pop(segment, -1)
            reading = self._readers.pop(segment, None)
            if reading is not None:
                self._retire(reading)
        if fd >= 0:
            os.close(fd)
        self._named.discard(segment)
        self._path(segment).unlink(missing_ok=True)

    def close(self) -> None:
        """As disk.SegmentFiles. Repeatable."""
        with self._lock:
            for reading in self._readers.values():
                self._retire(reading)
            self._readers.clear()
            fds = [*self._writing.values(), *([self._lock_fd] if self._lock_fd >= 0 else [])]
            self._writing.clear()
            self._lock_fd = -1
        for fd in fds:
            os.close(fd)

    def check_there(self) -> None:
        """Raises OSError (ESTALE) when another file system stands where the directory was: its mount vanished."""
        if os.stat(self.root).st_dev != self._device or not (self.root / STORE_FILE).exists():
            raise OSError(errno.ESTALE, f"{self.root} is no longer mounted")

    # -- descriptors ---------------------------------------------------------------------------------------------

    def _path(self, segment: int) -> Path:
        return self.root / f"{segment // SEGMENTS_PER_FOLDER:08x}" / f"{segment:016x}{_SUFFIX}"

    def _flags(self) -> int:
        return os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)

    def _borrow(self, segment: int) -> _Reading:
        with self._lock:
            reading = self._readers.get(segment)
            if reading is not None:
                reading.users += 1
                self._readers.move_to_end(segment)
                return reading
        fd = os.open(self._path(segment), os.O_RDONLY | self._flags())
        with self._lock:
            reading = self._readers.get(segment)
            if reading is not None or self._lock_fd < 0:
                os.close(fd)
                if reading is None:
                    raise OSError(errno.EBADF, "the directory is closed")
            else:
                reading = self._readers[segment] = _Reading(fd)
                if len(self._readers) > DESCRIPTORS_MAX:
                    self._retire(self._readers.popitem(last=False)[1])
            reading.users += 1
            return reading

    def _give_back(self, reading: _Reading) -> None:
        with self._lock:
            reading.users -= 1
            if reading.retired and reading.users == 0:
                os.close(reading.fd)

    def _retire(self, reading: _Reading) -> None:
        """Closes a descriptor after its last read; under the lock."""
        reading.retired = True
        if reading.users == 0:
            os.close(reading.fd)

    def _writer(self, segment: int) -> int:
        with self._lock:
            fd = self._writing.get(segment)
        if fd is not None:
            return fd
        self.check_there()
        path = self._path(segment)
        path.parent.mkdir(exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | self._flags(), 0o600)
        with self._lock:
            known = self._writing.setdefault(segment, fd)
            # Far more than one batch of writes touches: the oldest is full and synced, nobody writes it again.
            old = [self._writing.popitem(last=False)[1]] if len(self._writing) > WRITERS_MAX else []
        for spare in old if known == fd else [*old, fd]:
            os.close(spare)
        return known


def _rest(pieces: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of buffers after `nbytes` of them were read or written."""
    for index, piece in enumerate(pieces):
        if nbytes < piece.nbytes:
            return [piece[nbytes:], *pieces[index + 1 :]]
        nbytes -= piece.nbytes
    return []


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
