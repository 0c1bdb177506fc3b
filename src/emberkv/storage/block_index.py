"""The index of the NVMe tier: an LMDB file that is asked, never loaded; and its twin in memory, for tests.

Why it exists: a million keys cost file pages, which the system may drop, instead of memory; a restart costs nothing.
Laws: it is never the only witness: whatever is wrong with it (another identity, a short or damaged file), it starts
empty, says why, and the tier builds it again from the segments. Each `apply` is one transaction, durable when it
returns.
Limits: a file whose inner pages were overwritten by somebody else is not noticed here; what it then says of a block is
checked against the block's own header before a byte is served.
"""

from __future__ import annotations

import errno
import struct
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import lmdb

from emberkv.storage.disk import DiskEntry, DiskPlace
from emberkv.storage.segment import DISK_KEY_BYTES, PAGE
from emberkv.types import CHECKSUM_BYTES, Version

_VALUE: Final = struct.Struct(f"<HQIQQIIQ{CHECKSUM_BYTES}s")
_MARK: Final = struct.Struct("<HQ")
_END: Final = struct.Struct("<Q")
_IDENTITY_NOTE: Final = b"identity"
_READERS_MAX: Final = 2048
"""Threads that may look something up at the same time: one a connection."""
_LMDB_MAGIC: Final = 0xBEEFC0DE
_META: Final = struct.Struct("<16xII8x8xI")
"""Of a meta page: magic, format version, page size."""
_META_LAST: Final = struct.Struct("<136xQQ")
"""Of a meta page: the last page in use, the transaction."""


class LmdbIndex:
    """The BlockIndex port over one LMDB file at `path`. Raises OSError where no file can be made."""

    def __init__(self, path: Path, *, identity: bytes, map_bytes: int) -> None:
        """`identity`: of what the index is an index. `map_bytes`: address space, and with it the largest file."""
        self.rebuilt_reason = ""
        """Why the index began empty although there was one; empty when all was well."""
        self._path, self._map_bytes = path, map_bytes // PAGE * PAGE
        self._lock: Final = threading.Lock()
        self._closed = False
        path.parent.mkdir(parents=True, exist_ok=True)
        reason = _damage(path) if path.exists() else ""
        if not reason:
            try:
                self._open()
                reason = self._other_identity(identity)
                if reason:
                    self._env.close()
            except lmdb.Error as error:
                reason = f"it cannot be opened: {error}"
        if reason:
            self.rebuilt_reason = reason
            path.unlink(missing_ok=True)
            Path(f"{path}-lock").unlink(missing_ok=True)
            try:
                self._open()
            except lmdb.Error as error:
                raise OSError(errno.EIO, f"cannot create the index {path}: {error}") from error
        self.apply((), (), (), (), [(_IDENTITY_NOTE, identity)])

    def _open(self) -> None:
        self._env = lmdb.open(
            str(self._path), map_size=self._map_bytes, subdir=False, max_dbs=3, max_readers=_READERS_MAX,
            readahead=False, max_spare_txns=16,
        )  # fmt: skip
        self._env.reader_check()
        self._blocks = self._env.open_db(b"blocks")
        self._marks = self._env.open_db(b"marks")
        self._notes = self._env.open_db(b"notes")

    def _other_identity(self, identity: bytes) -> str:
        known = self.note(_IDENTITY_NOTE)
        if known is None:
            return "it was never finished" if self.count() else ""
        return "" if known == identity else "it belongs to other directories"

    def find(self, keys: Sequence[bytes]) -> list[DiskEntry | None]:
        """As disk.BlockIndex."""
        with self._lock:  # so that nothing is looked up while it closes
            if self._closed:
                return [None] * len(keys)
            with self._env.begin(self._blocks) as txn:
                values = list(map(txn.get, keys))
        return [_unpacked(value) if value is not None else None for value in values]

    def apply(
        self,
        puts: Iterable[tuple[bytes, DiskEntry]],
        deletes: Iterable[bytes],
        marks: Iterable[tuple[int, int, int]],
        removed: Iterable[tuple[int, int]],
        notes: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """As disk.BlockIndex. Raises OSError: then nothing of it was applied."""
        try:
            with self._env.begin(write=True) as txn:
                for key, entry in sorted(puts):
                    txn.put(key, _packed(entry), db=self._blocks)
                for key in deletes:
                    txn.delete(key, db=self._blocks)
                for directory, segment, end in marks:
                    txn.put(_MARK.pack(directory, segment), _END.pack(end), db=self._marks)
                for directory, segment in removed:
                    txn.delete(_MARK.pack(directory, segment), db=self._marks)
                for name, value in notes:
                    txn.put(name, value, db=self._notes)
        except lmdb.MapFullError as error:
            raise OSError(errno.ENOSPC, f"the index {self._path} is full") from error
        except lmdb.Error as error:
            raise OSError(errno.EIO, f"the index {self._path} cannot be written: {error}") from error

    def marks(self) -> dict[tuple[int, int], int]:
        """As disk.BlockIndex."""
        with self._env.begin(self._marks) as txn:
            return {_mark(key): _END.unpack(value)[0] for key, value in txn.cursor()}

    def note(self, name: bytes) -> bytes | None:
        """As disk.BlockIndex."""
        with self._env.begin(self._notes) as txn:
            value: bytes | None = txn.get(name)
            return value

    def items(self, after: bytes, limit: int) -> list[tuple[bytes, DiskEntry]]:
        """Up to `limit` blocks in the order of their keys, from behind `after` on; for the scrubber."""
        found: list[tuple[bytes, DiskEntry]] = []
        with self._env.begin(self._blocks) as txn:
            cursor: Any = txn.cursor()
            there = cursor.set_range(after + b"\0")
            while there and len(found) < limit:
                entry = _unpacked(cursor.value())
                if entry is not None:
                    found.append((cursor.key(), entry))
                there = cursor.next()
        return found

    def count(self) -> int:
        """As disk.BlockIndex."""
        with self._lock:
            if self._closed:
                return 0
            with self._env.begin() as txn:
                entries: int = txn.stat(self._blocks)["entries"]
                return entries

    def close(self) -> None:
        """As disk.BlockIndex. Repeatable."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._env.close()


class MemoryIndex:
    """The BlockIndex port in a dict: what was applied is durable as long as the object lives."""

    rebuilt_reason = ""

    def __init__(self) -> None:
        self._blocks: dict[bytes, DiskEntry] = {}
        self._marks: dict[tuple[int, int], int] = {}
        self._notes: dict[bytes, bytes] = {}

    def find(self, keys: Sequence[bytes]) -> list[DiskEntry | None]:
        """As disk.BlockIndex."""
        return [self._blocks.get(key) for key in keys]

    def apply(
        self,
        puts: Iterable[tuple[bytes, DiskEntry]],
        deletes: Iterable[bytes],
        marks: Iterable[tuple[int, int, int]],
        removed: Iterable[tuple[int, int]],
        notes: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """As disk.BlockIndex."""
        self._blocks.update(puts)
        for key in deletes:
            self._blocks.pop(key, None)
        self._marks.update({(directory, segment): end for directory, segment, end in marks})
        for mark in removed:
            self._marks.pop(mark, None)
        self._notes.update(notes)

    def marks(self) -> dict[tuple[int, int], int]:
        """As disk.BlockIndex."""
        return dict(self._marks)

    def note(self, name: bytes) -> bytes | None:
        """As disk.BlockIndex."""
        return self._notes.get(name)

    def items(self, after: bytes, limit: int) -> list[tuple[bytes, DiskEntry]]:
        """As LmdbIndex."""
        return sorted(item for item in self._blocks.items() if item[0] > after)[:limit]

    def count(self) -> int:
        """As disk.BlockIndex."""
        return len(self._blocks)

    def close(self) -> None:
        """As disk.BlockIndex."""


def _packed(entry: DiskEntry) -> bytes:
    place, version = entry.place, entry.version
    return _VALUE.pack(
        place.directory, place.segment, place.position // PAGE, version.epoch, version.seq, entry.length, entry.depth,
        entry.expiry_ms, entry.checksum,
    )  # fmt: skip


def _unpacked(value: bytes) -> DiskEntry | None:
    """None for a value of another shape."""
    if len(value) != _VALUE.size:
        return None
    directory, segment, page, epoch, seq, length, depth, expiry_ms, checksum = _VALUE.unpack(value)
    return DiskEntry(
        DiskPlace(directory, segment, page * PAGE), Version(epoch, seq), length, depth, expiry_ms, checksum
    )


def _mark(raw: bytes) -> tuple[int, int]:
    directory, segment = _MARK.unpack(raw)
    return directory, segment


def _damage(path: Path) -> str:
    """Why a file must not be mapped: a map over a file that is too short ends the process at the first touch."""
    with path.open("rb") as stream:
        head = stream.read(2 * PAGE)
        size = stream.seek(0, 2)
    if len(head) < 2 * PAGE:
        return "its file is cut off"
    magic, _, page_bytes = _META.unpack_from(head)
    if magic != _LMDB_MAGIC or page_bytes != PAGE or _META.unpack_from(head, PAGE)[0] != _LMDB_MAGIC:
        return "its file is damaged"
    last = max(_META_LAST.unpack_from(head, at) for at in (0, PAGE))
    newest = max((_META_LAST.unpack_from(head, at) for at in (0, PAGE)), key=lambda meta: meta[1])
    if (max(last[0], newest[0]) + 1) * PAGE > size:
        return "its file is cut off"
    return ""


assert DISK_KEY_BYTES <= 511, "LMDB's longest key"
