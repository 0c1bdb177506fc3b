"""Segment files of one directory on a real disk.

Why it exists: the only place of the NVMe tier that opens files of blocks. Blocks go past the page cache (O_DIRECT):
they would push out what the machine needs, and come back slower.

    ROOT/STORE                                whose directory it is: format, cluster, store id
    ROOT/lock                                 locked (flock) while a process uses the directory
    ROOT/<segment / 256, 8 hex>/<segment, 16 hex>.seg

    descriptor:  open --dropped | pushed out | failed--> retired --last user gone--> closed

Laws: a directory that holds anything else, or belongs to another cluster or format version, is refused and nothing in
it is touched; one process uses it at a time. A file that is being read or written is closed only after that
(descriptors.py). OSError comes out as it is (Python itself repeats what a signal interrupts). What was written before a
mount vanished, and not synced, is never called durable after it came back.
Limits: DESCRIPTORS_MAX files stay open; more are opened again when asked for. SEGMENTS_MAX files are listed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from emberkv.errors import ConfigError, NameInUse, NotOurs
from emberkv.storage.descriptors import Descriptors
from emberkv.storage.mapping import page_buffer
from emberkv.storage.segment import FORMAT_VERSION, PAGE, STORE_ID_BYTES
from emberkv.types import round_up

SEGMENTS_PER_FOLDER: Final = 256
"""No folder grows so large that listing or changing it becomes slow, on whatever file system."""
SEGMENTS_MAX: Final = 1 << 20
"""Bounds what a listing may hold: far more than a full directory has."""
DESCRIPTORS_MAX: Final = 256
"""A quarter of the usual limit of a process (1024)."""
STORE_FILE: Final = "STORE"
LOCK_FILE: Final = "lock"
STORE_BYTES_MAX: Final = 4096
BOUNCE_BYTES: Final = 4 << 20
"""Buffers that do not start on a page are copied in pieces of this size."""
_IOV_MAX: Final = 1024
_SUFFIX: Final = ".seg"
_TOLERATED: Final = (LOCK_FILE, STORE_FILE, f"{STORE_FILE}.new", "lost+found")
"""What a directory may hold before it is ours."""


class _Store(msgspec.Struct, frozen=True):
    """Contents of the file STORE: whose directory it is."""

    format: int
    cluster: str
    store_id: str


class RealFiles:
    """The SegmentFiles port over the directory `root`, made if absent. Raises NotOurs, NameInUse, ConfigError."""

    def __init__(self, root: Path, *, cluster: bytes, direct: bool = True) -> None:
        """`cluster`: 32-byte digest of the cluster's id. `direct`: O_DIRECT where the file system takes it."""
        self.root: Final = root
        self.bounced = 0
        """Requests that had to be copied because a buffer did not start on a page; a count for people."""
        self._cluster: Final = cluster.hex()
        self._asked_direct: Final = direct
        self._taking: Final = threading.Lock()
        self._named: set[int] = set()
        """Segments whose names are durable."""
        self._unsynced: set[int] = set()
        self._lost: set[int] = set()
        """Segments that were written, but not synced, when the mount vanished."""
        try:
            _make_durably(root)
            self._known_store_id()  # a foreign directory is refused before the lock file would be made in it
            lock_fd = self._take_lock()
            try:
                self.store_id: Final = self._known_store_id() or self._found()
                """Random, 16 bytes, drawn when the directory was made ours."""
                self.fallback_reason = self._probe()
                """Why the page cache is used; empty while it is not."""
                self._place = _place_of(root)
            except BaseException:
                os.close(lock_fd)
                raise
        except OSError as error:
            raise ConfigError(f"cannot use the NVMe directory {root}: {error.strerror or error}") from error
        self._open: Final = Descriptors(lock_fd, DESCRIPTORS_MAX)

    @property
    def direct(self) -> bool:
        """Do reads and writes go past the page cache?"""
        return not self.fallback_reason

    # -- whose directory it is -----------------------------------------------------------------------------------

    def _known_store_id(self) -> bytes | None:
        """The store id; None when the directory is empty. Raises NotOurs for whatever else it may be."""
        file = self.root / STORE_FILE
        try:
            with file.open("rb") as stream:
                text = stream.read(STORE_BYTES_MAX)
        except FileNotFoundError:
            with os.scandir(self.root) as entries:
                foreign = next((entry.name for entry in entries if entry.name not in _TOLERATED), None)
            if foreign is None:
                return None
            raise NotOurs(
                f"{self.root} holds something else ({foreign}): give nvme_dirs an empty directory of its own"
            ) from None
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
        if store.cluster != self._cluster or len(store_id) != STORE_ID_BYTES:
            raise NotOurs(f"{self.root} holds blocks of another cluster: choose another directory or move it away")
        return store_id

    def _found(self) -> bytes:
        """Marks an empty directory as ours."""
        store_id = os.urandom(STORE_ID_BYTES)
        temporary = self.root / f"{STORE_FILE}.new"
        with temporary.open("wb") as stream:
            stream.write(msgspec.json.encode(_Store(FORMAT_VERSION, self._cluster, store_id.hex())))
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(self.root / STORE_FILE)
        _sync_directory(self.root)
        return store_id

    def _take_lock(self) -> int:
        # On a file, not on the directory: NFS locks only what is open for writing.
        fd = os.open(self.root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise NameInUse(f"the NVMe directory {self.root} is in use by another node: give each its own") from None
        except OSError:
            os.close(fd)
            raise
        return fd

    def _probe(self) -> str:
        """Why not O_DIRECT; empty if it works. Some file systems refuse it at open, others at the first request: the
        lock file tells."""
        if not self._asked_direct:
            return "not asked for"
        try:
            fd = os.open(self.root / LOCK_FILE, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            return f"the file system refuses O_DIRECT: {error.strerror}"
        try:
            if os.fstat(fd).st_size < PAGE:
                os.pwritev(fd, [page_buffer(PAGE)], 0)
            os.preadv(fd, [page_buffer(PAGE)], 0)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return ""  # it was taken at open; a full disk is no reason not to start
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            return f"the file system refuses O_DIRECT: {error.strerror}"
        finally:
            os.close(fd)
        return ""

    # -- the port ------------------------------------------------------------------------------------------------

    def segments(self) -> list[tuple[int, int]]:
        """As disk.SegmentFiles. What is named differently is left alone."""
        self.check_there()
        found: list[tuple[int, int]] = []
        with os.scandir(self.root) as folders:
            for folder in folders:
                number = _number(folder.name, 8)
                if number is not None and folder.is_dir(follow_symlinks=False):
                    found += self._segments_of(folder.path, number)
                    if len(found) > SEGMENTS_MAX:
                        raise OSError(errno.EFBIG, f"{self.root} holds more than {SEGMENTS_MAX} segment files")
        return sorted(found)

    def _segments_of(self, path: str, folder: int) -> Iterator[tuple[int, int]]:
        with os.scandir(path) as files:
            for file in files:
                stem, dot, ending = file.name.partition(".")
                number = _number(stem, 16) if dot + ending == _SUFFIX else None
                if number is None or number // SEGMENTS_PER_FOLDER != folder:
                    continue
                if file.is_file(follow_symlinks=False):
                    yield number, file.stat(follow_symlinks=False).st_size

    def read(self, segment: int, offset: int, into: Sequence[memoryview]) -> int:
        """As disk.SegmentFiles."""
        done = 0
        pieces = list(into)
        with self._using(segment) as fd:
            while pieces:
                try:
                    came = os.preadv(fd, pieces[:_IOV_MAX], offset + done)
                except OSError as error:
                    if error.errno != errno.EINVAL or not self.direct:
                        raise
                    came = self._bounced_read(fd, pieces, offset + done)
                if came <= 0:
                    break
                done += came
                pieces = _rest(pieces, came)
        return done

    def write(self, segment: int, offset: int, pieces: Sequence[memoryview]) -> None:
        """As disk.SegmentFiles; several threads may write different places at once."""
        self.check_there()
        self._unsynced.add(segment)
        done = 0
        left = list(pieces)
        with self._using(segment, writing=True, create=True) as fd:
            while left:
                try:
                    went = os.pwritev(fd, left[:_IOV_MAX], offset + done)
                except OSError as error:
                    if error.errno != errno.EINVAL or not self.direct:
                        raise
                    went = self._bounced_write(fd, left, offset + done)
                if went <= 0:
                    raise OSError(errno.EIO, "a write took nothing")
                done += went
                left = _rest(left, went)

    def sync(self, segment: int) -> None:
        """As disk.SegmentFiles. FileNotFoundError when there is no such file."""
        self.check_there()
        if segment in self._lost:
            self._lost.discard(segment)
            raise OSError(errno.ESTALE, f"{self.root} was mounted anew before segment {segment} was synced")
        with self._using(segment, writing=True) as fd:
            os.fdatasync(fd)
        self._unsynced.discard(segment)
        if segment not in self._named:
            _sync_directory(self._path(segment).parent)
            _sync_directory(self.root)
            self._named.add(segment)

    def remove(self, segment: int) -> None:
        """As disk.SegmentFiles. Durable when it returns: what was deleted must not come back with an old segment. A
        file that is not there is no error."""
        self.check_there()
        for known in (self._named, self._unsynced, self._lost):
            known.discard(segment)
        self._open.drop(segment)
        path = self._path(segment)
        path.unlink(missing_ok=True)
        folder = path.parent
        try:
            # Numbers only rise: a folder that has become empty is not needed again.
            folder.rmdir()
            folder = self.root
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _sync_directory(folder)

    def close(self) -> None:
        """As disk.SegmentFiles; repeatable. Does not wait: descriptors that are in use, and the directory's lock, go
        with their last read or write."""
        self._open.close()

    def check_there(self) -> None:
        """Raises OSError (ESTALE) when something else stands where the directory was: its mount vanished. One that was
        mounted anew, and is the same by its store id, is taken again."""
        try:
            place = _place_of(self.root)
        except FileNotFoundError:
            raise OSError(errno.ESTALE, f"{self.root} is no longer there") from None
        # A device number is given out again: a file system served by a process may come back under the same one.
        if place == self._place and self._open.lock_is_alive():
            return
        with self._taking:
            if _place_of(self.root) != self._place or not self._open.lock_is_alive():
                self._take_again()

    def _take_again(self) -> None:
        # With the node running, what stands there now is the disk's trouble and not the operator's mistake: an OSError.
        try:
            same = self._known_store_id() == self.store_id
        except NotOurs:
            same = False
        if not same:
            raise OSError(errno.ESTALE, f"{self.root} is no longer mounted")
        try:
            lock_fd = self._take_lock()
        except NameInUse as error:
            raise OSError(errno.EBUSY, str(error)) from error
        try:
            reason, place = self._probe(), _place_of(self.root)
        except OSError:
            os.close(lock_fd)
            raise
        self._lost |= self._unsynced
        self._unsynced.clear()
        self._named.clear()
        self.fallback_reason, self._place = reason, place
        self._open.begin_anew(lock_fd)

    # -- descriptors and buffers ---------------------------------------------------------------------------------

    def _path(self, segment: int) -> Path:
        return self.root / f"{segment // SEGMENTS_PER_FOLDER:08x}" / f"{segment:016x}{_SUFFIX}"

    @contextmanager
    def _using(self, segment: int, *, writing: bool = False, create: bool = False) -> Iterator[int]:
        """A descriptor of the segment's file that stays open meanwhile. After an error the next use opens it anew: a
        handle that is stale once stays so."""
        opened = self._open.borrow(segment, writing, lambda: self._open_file(segment, writing, create))
        try:
            yield opened.fd
        except OSError:
            self._open.forget(opened)
            raise
        finally:
            self._open.give_back(opened)

    def _open_file(self, segment: int, writing: bool, create: bool) -> int:
        path = self._path(segment)
        flags = os.O_CLOEXEC | os.O_NOATIME | (os.O_DIRECT if self.direct else 0)
        flags |= (os.O_RDWR if writing else os.O_RDONLY) | (os.O_CREAT if create else 0)
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            if not create:
                raise
            path.parent.mkdir(exist_ok=True)
        except PermissionError:
            flags &= ~os.O_NOATIME  # only the owner of a file may ask for it
        return os.open(path, flags, 0o600)

    def _bounced_read(self, fd: int, pieces: list[memoryview], position: int) -> int:
        """Reads whole pages beside the buffers and copies; bytes that came, 0 at the end of the file.

        Comes here when a buffer does not start on a page, and when a read ended within one and is to go on there.
        """
        self.bounced += 1
        start = position - position % PAGE
        wanted = sum(piece.nbytes for piece in pieces)
        scratch = page_buffer(min(round_up(position - start + wanted), BOUNCE_BYTES))
        came = min(os.preadv(fd, [scratch], start) - (position - start), wanted)
        source = np.frombuffer(scratch, np.uint8)[position - start :]
        done = 0
        for piece in pieces:
            count = min(piece.nbytes, came - done)
            if count <= 0:
                break
            np.frombuffer(piece, np.uint8)[:count] = source[done : done + count]  # numpy copy
            done += count
        return done

    def _bounced_write(self, fd: int, pieces: list[memoryview], position: int) -> int:
        """Copies pieces that do not start on pages and writes them; bytes that went. OSError (EINVAL) when that is not
        what is wrong with the request."""
        total = sum(piece.nbytes for piece in pieces)
        if position % PAGE or total % PAGE or all(_on_pages(piece) for piece in pieces):
            raise OSError(errno.EINVAL, f"the file system refuses to write {total} bytes at {position}")
        self.bounced += 1
        scratch = page_buffer(min(total, BOUNCE_BYTES))
        target = np.frombuffer(scratch, np.uint8)
        done = 0
        for piece in pieces:
            count = min(piece.nbytes, target.nbytes - done)
            target[done : done + count] = np.frombuffer(piece, np.uint8)[:count]  # numpy copy
            done += count
        return os.pwritev(fd, [scratch], position)


def _on_pages(piece: memoryview) -> bool:
    return piece.nbytes % PAGE == 0 and np.frombuffer(piece, np.uint8).ctypes.data % PAGE == 0


def _rest(pieces: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of buffers after `nbytes` of them were read or written."""
    for index, piece in enumerate(pieces):
        if nbytes < piece.nbytes:
            return [piece[nbytes:], *pieces[index + 1 :]]
        nbytes -= piece.nbytes
    return []


def _number(name: str, digits: int) -> int | None:
    """The number that a name of ours stands for; None for names that are not exactly as we write them."""
    try:
        number = int(name, 16)
    except ValueError:
        return None
    return number if name == f"{number:0{digits}x}" else None


def _place_of(path: Path) -> tuple[int, int]:
    """What a path leads to: (device, inode)."""
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _make_durably(path: Path) -> None:
    """Makes a directory and those above it, so that a power cut does not take them away with all they hold."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        _sync_directory(each.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot sync directories has nothing to wait for
            raise
    finally:
        os.close(fd)
