"""A coordinator in memory with the semantics of ports.Coordinator: one revision per commit, compares on mod revisions.

The world adds what a network adds: delay, unknown outcomes, watches that stall.
"""

from __future__ import annotations

from collections.abc import Sequence

from emberkv.ports import (
    COMMIT_OPERATIONS_MAX,
    CommitResult,
    CommitStatus,
    Compare,
    Listing,
    Record,
    WatchBatch,
    Write,
)


class MemoryCoordinator:
    """All records and their whole history."""

    def __init__(self, generation: int = 1) -> None:
        self.revision = 0
        self.records: dict[str, Record] = {}
        self.history: list[tuple[int, str, bytes | None]] = []
        self.commits = 0
        self.refused = 0
        self._generation = generation

    def get(self, key: str, *, deadline_ms: int = 0) -> Record | None:
        return self.records.get(key)

    def list(self, prefix: str, *, deadline_ms: int = 0) -> Listing:
        found = tuple(record for key, record in sorted(self.records.items()) if key.startswith(prefix))
        return Listing(found, self.revision)

    def commit(self, compares: Sequence[Compare], writes: Sequence[Write], *, deadline_ms: int = 0) -> CommitResult:
        assert len(compares) <= COMMIT_OPERATIONS_MAX, "more compares than etcd takes"
        assert len(writes) <= COMMIT_OPERATIONS_MAX, "more writes than etcd takes"
        assert len({write.key for write in writes}) == len(writes), "etcd refuses two writes of one key"
        for compare in compares:
            record = self.records.get(compare.key)
            if (record.revision if record is not None else 0) != compare.revision:
                self.refused += 1
                return CommitResult(CommitStatus.REFUSED, self.revision)
        self.revision += 1
        self.commits += 1
        for write in writes:
            self.history.append((self.revision, write.key, write.value))
            if write.value is None:
                self.records.pop(write.key, None)
            else:
                self.records[write.key] = Record(write.key, write.value, self.revision)
        return CommitResult(CommitStatus.COMMITTED, self.revision)

    def watch(self, prefixes: Sequence[str], from_revision: int, *, deadline_ms: int = 0) -> WatchBatch:
        last: dict[str, tuple[int, bytes | None]] = {}
        for revision, key, value in reversed(self.history):
            if revision < from_revision:
                break
            if key.startswith(tuple(prefixes)):
                last.setdefault(key, (revision, value))
        records = [Record(key, value, revision) for key, (revision, value) in last.items() if value is not None]
        records.sort(key=lambda record: (record.revision, record.key))
        deleted = tuple(sorted(key for key, (_, value) in last.items() if value is None))
        return WatchBatch(tuple(records), deleted, self.revision)

    def generation(self) -> int:
        return self._generation

    def close(self) -> None:
        """Nothing to release."""
