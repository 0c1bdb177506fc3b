"""Strong records: one commit decides, an unknown outcome is settled by looking, nothing is ever sent twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from emberkv.coord import StrongStore
from emberkv.errors import CoordinatorError
from emberkv.messages import BlockInfo, PutItem
from emberkv.node import strong
from emberkv.node.strong import ABSENT, StrongRecords, record_key
from emberkv.ports import CommitResult, CommitStatus, Record
from emberkv.types import NO_VERSION, MissReason, PutOutcome, PutStatus, RefuseReason, Version, checksum

SCOPE, KEY = b"scope..1", b"k" * 32
NAME = record_key(SCOPE, KEY)
END = 10**12


class FakeStore:
    """A store in memory. `faults` are taken one per write: "down", "lost" (UNKNOWN, not applied), "applied" (UNKNOWN,
    but applied), "late" (UNKNOWN, applied by `arrive`). `between` is called once before the next write."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.revision = 0
        self.faults: list[str] = []
        self.reads_down = False
        self.pending: list[Callable[[], CommitResult]] = []
        self.between: Callable[[], object] | None = None
        self.writes = 0
        self.deadlines: list[int] = []

    def get(self, key: str, *, deadline_ms: int) -> Record | None:
        self.deadlines.append(deadline_ms)
        if self.reads_down:
            raise CoordinatorError("no store")
        return self.records.get(key)

    def put_if(self, key: str, value: bytes, revision: int | None, *, deadline_ms: int) -> CommitResult:
        return self._write(key, value, revision, deadline_ms)

    def delete(self, key: str, revision: int | None, *, deadline_ms: int) -> CommitResult:
        return self._write(key, None, revision, deadline_ms)

    def _write(self, key: str, value: bytes | None, revision: int | None, deadline_ms: int) -> CommitResult:
        self.deadlines.append(deadline_ms)
        self.writes += 1
        if self.between is not None:
            act, self.between = self.between, None
            act()
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "down":
            raise CoordinatorError("no store")
        if fault == "late":
            self.pending.append(lambda: self.apply(key, value, revision))
        result = self.apply(key, value, revision) if fault in ("", "applied") else CommitResult(CommitStatus.UNKNOWN)
        return CommitResult(CommitStatus.UNKNOWN) if fault else result

    def apply(self, key: str, value: bytes | None, revision: int | None) -> CommitResult:
        there = self.records.get(key)
        if revision is not None and revision != (there.revision if there else 0):
            return CommitResult(CommitStatus.REFUSED, self.revision)
        if value is not None:
            self.revision += 1
            self.records[key] = Record(key, value, self.revision)
        elif there is not None:
            self.revision += 1
            del self.records[key]
        return CommitResult(CommitStatus.COMMITTED, self.revision)

    def arrive(self) -> None:
        """What was late is applied now."""
        for act in self.pending:
            act()
        self.pending.clear()


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


class Caller:
    """One writer; every put has a put_id of its own unless it says otherwise."""

    def __init__(self, store: FakeStore) -> None:
        self.now_ns = 0
        self.records = StrongRecords(store, lambda: self.now_ns)
        self._next = 0

    def item(self, data: bytes | None, seen: Version = NO_VERSION) -> PutItem:
        self._next += 1
        return PutItem(KEY, b"writer..........." + self._next.to_bytes(7, "big"), len(data or b""), seen=seen)

    def put(self, data: bytes | None, seen: Version = NO_VERSION) -> PutOutcome:
        return self.send(self.item(data, seen), data)

    def send(self, item: PutItem, data: bytes | None, *, fresh: bool = True, end: int = END) -> PutOutcome:
        return self.records.put(SCOPE, item, data, end, fresh=fresh)

    def get(self) -> bytes | MissReason:
        info, data = self.records.get(SCOPE, KEY, END)
        return MissReason(info.reason) if data is None else bytes(data)


@pytest.fixture
def caller(store: FakeStore) -> Caller:
    return Caller(store)


def stored(revision: int) -> PutOutcome:
    return PutOutcome(PutStatus.STORED, Version(1, revision), 1)


def test_put_get_delete(caller: Caller) -> None:
    assert caller.get() is MissReason.ABSENT
    assert caller.put(b"one") == stored(1)
    info, data = caller.records.get(SCOPE, KEY, END)
    assert data is not None
    assert info == BlockInfo(0, Version(1, 1), 3, checksum(b"one"))
    assert caller.put(b"two") == stored(2)
    assert caller.get() == b"two"
    assert caller.put(None) == stored(3)
    assert caller.get() is MissReason.ABSENT
    assert caller.put(None) == PutOutcome(PutStatus.STORED, ABSENT, 1)


def test_scopes_are_apart(caller: Caller) -> None:
    caller.put(b"one")
    assert caller.records.get(b"scope..2", KEY, END)[0].reason == MissReason.ABSENT


def test_a_put_with_seen_compares(caller: Caller) -> None:
    assert caller.put(b"one", ABSENT) == stored(1)
    assert caller.put(b"two", ABSENT) == PutOutcome(PutStatus.SUPERSEDED, Version(1, 1))
    assert caller.put(b"two", Version(1, 1)) == stored(2)
    assert caller.put(b"three", Version(1, 1)) == PutOutcome(PutStatus.SUPERSEDED, Version(1, 2))
    assert caller.put(None, Version(1, 1)) == PutOutcome(PutStatus.SUPERSEDED, Version(1, 2))
    assert caller.put(None, Version(1, 2)) == stored(3)
    assert caller.put(b"four", Version(1, 2)) == PutOutcome(PutStatus.SUPERSEDED, ABSENT)
    assert caller.put(b"four", Version(7, 2)).status is PutStatus.SUPERSEDED, "a version of another kind never holds"
    assert caller.get() is MissReason.ABSENT


@pytest.mark.parametrize("seen", [NO_VERSION, ABSENT])
def test_an_unknown_commit_that_was_applied_is_found_by_its_put_id(
    store: FakeStore, caller: Caller, seen: Version
) -> None:
    store.faults = ["applied"]
    assert caller.put(b"one", seen) == stored(1)
    assert store.writes == 1


@pytest.mark.parametrize("seen", [NO_VERSION, ABSENT])
@pytest.mark.parametrize("fault", ["lost", "late"])
def test_an_unknown_commit_that_is_not_found_stays_unknown(
    store: FakeStore, caller: Caller, fault: str, seen: Version
) -> None:
    store.faults = [fault]
    item = caller.item(b"one", seen)
    assert caller.send(item, b"one").status is PutStatus.UNKNOWN
    assert store.writes == 1, "never sent again by itself"
    assert caller.records.resolve(SCOPE, KEY, item.put_id, END).status is PutStatus.UNKNOWN
    store.arrive()
    resolved = caller.records.resolve(SCOPE, KEY, item.put_id, END)
    assert resolved == (stored(1) if fault == "late" else PutOutcome(PutStatus.UNKNOWN))


def test_an_unknown_outcome_that_cannot_be_looked_at_stays_unknown(store: FakeStore, caller: Caller) -> None:
    store.faults = ["applied"]
    store.reads_down = True
    assert caller.put(b"one").status is PutStatus.UNKNOWN


def test_a_blind_retry_looks_and_never_writes(store: FakeStore, caller: Caller) -> None:
    item = caller.item(b"one")
    assert caller.send(item, b"one", fresh=False).status is PutStatus.UNKNOWN
    assert store.writes == 0
    caller.send(item, b"one")
    assert caller.send(item, b"one", fresh=False) == stored(1)
    caller.put(b"two")
    assert caller.send(item, b"one", fresh=False).status is PutStatus.UNKNOWN
    assert caller.get() == b"two", "the retry did not undo what came after its first send"


def test_a_retry_with_a_condition_applies_at_most_once(store: FakeStore, caller: Caller) -> None:
    caller.put(b"zero")
    item = caller.item(b"one", Version(1, 1))
    assert caller.send(item, b"one", fresh=False) == stored(2), "its first send never arrived"
    assert caller.send(item, b"one", fresh=False) == stored(2), "it did: its own record is there"
    caller.put(b"two")
    assert caller.send(item, b"one", fresh=False).status is PutStatus.UNKNOWN
    assert caller.get() == b"two"


def test_a_late_delete_cannot_take_what_was_put_after_it(store: FakeStore, caller: Caller) -> None:
    caller.put(b"one")
    store.faults = ["late"]
    assert caller.put(None).status is PutStatus.UNKNOWN
    caller.put(b"two")
    store.arrive()
    assert caller.get() == b"two"


def test_an_unknown_delete_is_settled_when_nothing_is_left(store: FakeStore, caller: Caller) -> None:
    caller.put(b"one")
    store.faults = ["applied"]
    assert caller.put(None) == PutOutcome(PutStatus.STORED, ABSENT, 1)
    caller.put(b"two")
    store.faults = ["lost"]
    assert caller.put(None).status is PutStatus.UNKNOWN
    caller.put(b"three")
    assert caller.send(caller.item(None), None, fresh=False).status is PutStatus.UNKNOWN, (
        "a retry of a delete looks only"
    )
    assert caller.get() == b"three"


def test_a_blind_delete_follows_writers_but_not_for_ever(store: FakeStore, caller: Caller) -> None:
    caller.put(b"one")
    store.between = lambda: caller.put(b"two")
    assert caller.put(None).status is PutStatus.STORED
    caller.put(b"three")

    def again() -> None:
        caller.put(b"more")
        store.between = again

    store.between = again
    outcome = caller.put(None)
    assert outcome.status is PutStatus.SUPERSEDED
    assert store.writes < 40


def test_a_store_that_cannot_be_used_refuses(store: FakeStore, caller: Caller) -> None:
    store.faults = ["down", "down"]
    assert caller.put(b"one") == PutOutcome(PutStatus.REFUSED, reason=RefuseReason.UNREACHABLE)
    item = caller.item(b"one", ABSENT)
    assert caller.send(item, b"one", fresh=False).status is PutStatus.UNKNOWN, "its first send may have arrived"
    store.reads_down = True
    assert caller.get() is MissReason.UNREACHABLE
    assert caller.put(None) == PutOutcome(PutStatus.REFUSED, reason=RefuseReason.UNREACHABLE)


def test_nothing_is_asked_after_the_deadline(store: FakeStore, caller: Caller) -> None:
    caller.now_ns = END
    assert caller.put(b"one") == PutOutcome(PutStatus.REFUSED, reason=RefuseReason.DEADLINE)
    assert caller.send(caller.item(b"one"), b"one", fresh=False).status is PutStatus.UNKNOWN
    assert caller.get() is MissReason.DEADLINE
    assert store.deadlines == []
    caller.now_ns = END - 1_500_000
    caller.put(b"one")
    assert store.deadlines == [2], "the store gets what is left"


def test_damaged_bytes_are_a_miss_and_wrong_ones_are_refused(store: FakeStore, caller: Caller) -> None:
    item = caller.item(b"one")
    item.checksum = checksum(b"two")
    assert caller.send(item, b"one") == PutOutcome(PutStatus.REFUSED, reason=RefuseReason.CHECKSUM)
    caller.put(b"one")
    record = store.records[NAME]
    for bad in (record.value[:-1] + b"x", b"\x02" + record.value[1:], b"", b"\x01short"):
        store.records[NAME] = Record(NAME, bad, record.revision)
        assert caller.get() is MissReason.CHECKSUM


def test_the_largest_record_fits_the_real_store_and_one_byte_more_does_not(tmp_path: Path) -> None:
    real = StrongStore(tmp_path, "c1")
    records = StrongRecords(real, lambda: 0)
    item = PutItem(KEY, b"p" * 24, strong.DATA_BYTES_MAX)
    data = bytes(strong.DATA_BYTES_MAX)
    assert records.put(SCOPE, item, data, END, fresh=True) == stored(1)
    info, found = records.get(SCOPE, KEY, END)
    assert info.version == Version(1, 1)
    assert found == data
    too_large = records.put(SCOPE, item, data + b"x", END, fresh=True)
    assert too_large == PutOutcome(PutStatus.REFUSED, reason=RefuseReason.TOO_LARGE)
    real.close()


def test_a_full_store_takes_nothing_until_something_is_deleted(tmp_path: Path) -> None:
    real = StrongStore(tmp_path, "c1", bytes_max=2 << 20)
    records = StrongRecords(real, lambda: 0)

    def put(number: int) -> PutOutcome:
        item = PutItem(number.to_bytes(32, "big"), b"p" * 24, 256 << 10)
        return records.put(SCOPE, item, bytes(256 << 10), END, fresh=True)

    outcomes = [put(number) for number in range(12)]
    full = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.NO_SPACE)
    assert outcomes[0].status is PutStatus.STORED
    assert outcomes[-1] == full
    assert records.get(SCOPE, bytes(32), END)[0].reason == MissReason.NONE, "what is there is served"
    assert real.clear(SCOPE.hex(), deadline_ms=20_000) == 0
    assert put(1000).status is PutStatus.STORED
    assert records.get(SCOPE, (1000).to_bytes(32, "big"), END)[0].reason == MissReason.NONE
    real.close()


def test_a_dropped_scope_is_cleared_from_the_real_store(tmp_path: Path) -> None:
    real = StrongStore(tmp_path, "c1")
    assert real.clear("ab", deadline_ms=1000) == 0
    assert not (tmp_path / "strong.db").exists()
    records = StrongRecords(real, lambda: 0)
    for number in range(150):
        item = PutItem(number.to_bytes(32, "big"), b"p" * 24, 1)
        assert records.put(SCOPE, item, b"x", END, fresh=True).status is PutStatus.STORED
    records.put(b"scope..2", PutItem(KEY, b"p" * 24, 1), b"y", END, fresh=True)
    assert real.clear(SCOPE.hex(), deadline_ms=20_000) == 0
    assert records.get(SCOPE, bytes(32), END)[0].reason == MissReason.ABSENT
    assert records.get(b"scope..2", KEY, END)[0].reason == MissReason.NONE
    real.close()
