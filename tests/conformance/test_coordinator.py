"""What every `ports.Coordinator` promises, whatever stands behind it. The stores are listed in coordinators.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance.coordinators import (
    DEADLINE_MS,
    SPAWN,
    STORES,
    Store,
    open_and_report,
    processes,
    put,
    race,
    write_many,
)
from emberkv.errors import CoordinatorError
from emberkv.ports import COMMIT_OPERATIONS_MAX, CommitResult, CommitStatus, Compare, Coordinator, Record, Write

COMMITTED, REFUSED, UNKNOWN = CommitStatus.COMMITTED, CommitStatus.REFUSED, CommitStatus.UNKNOWN


@pytest.fixture(params=sorted(STORES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = STORES[request.param](tmp_path)
    yield made
    made.remove()


@pytest.fixture
def coordinator(store: Store) -> Iterator[Coordinator]:
    opened = store.open()
    yield opened
    opened.close()


def get(coordinator: Coordinator, key: str) -> Record | None:
    return coordinator.get(key, deadline_ms=DEADLINE_MS)


def commit(
    coordinator: Coordinator, compares: list[tuple[str, int]], writes: list[tuple[str, bytes | None]]
) -> CommitResult:
    guards = [Compare(*compare) for compare in compares]
    return coordinator.commit(guards, [Write(*write) for write in writes], deadline_ms=DEADLINE_MS)


def keys(coordinator: Coordinator, prefix: str = "") -> list[str]:
    return [record.key for record in coordinator.list(prefix, deadline_ms=DEADLINE_MS).records]


# ------------------------------------------------------------------------------------------------------ get, list


def test_get_returns_what_was_written(coordinator: Coordinator) -> None:
    assert get(coordinator, "hb/a") is None
    result = put(coordinator, "hb/a", b"\x00\xff bytes")
    assert get(coordinator, "hb/a") == Record("hb/a", b"\x00\xff bytes", result.revision)


def test_an_empty_value_is_not_an_absent_key(coordinator: Coordinator) -> None:
    result = put(coordinator, "k", b"")
    assert get(coordinator, "k") == Record("k", b"", result.revision)


def test_list_takes_exactly_the_prefix_in_key_order(coordinator: Coordinator) -> None:
    for key in ("own/2", "own/10", "own", "own0", "owm/~", "own/é"):
        put(coordinator, key, key.encode())
    listing = coordinator.list("own/", deadline_ms=DEADLINE_MS)
    assert [record.key for record in listing.records] == ["own/10", "own/2", "own/é"]
    assert listing.revision == 6
    assert len(keys(coordinator)) == 6


def test_list_of_nothing_tells_the_revision(coordinator: Coordinator) -> None:
    before = coordinator.list("x/", deadline_ms=DEADLINE_MS).revision
    assert put(coordinator, "y", b"").revision == before + 1
    listing = coordinator.list("x/", deadline_ms=DEADLINE_MS)
    assert (listing.records, listing.revision) == ((), before + 1)


# --------------------------------------------------------------------------------------------------------- commit


def test_revisions_rise_by_one_for_each_commit_and_mark_the_keys_it_wrote(coordinator: Coordinator) -> None:
    first = commit(coordinator, [], [("a", b"1"), ("b", b"1")])
    second = commit(coordinator, [], [("b", b"2")])
    assert second == CommitResult(COMMITTED, first.revision + 1)
    listing = coordinator.list("", deadline_ms=DEADLINE_MS)
    assert listing.records == (Record("a", b"1", first.revision), Record("b", b"2", second.revision))


def test_compare_zero_means_absent(coordinator: Coordinator) -> None:
    assert commit(coordinator, [("a", 0)], [("a", b"1")]).status is COMMITTED
    assert commit(coordinator, [("a", 0)], [("a", b"2")]).status is REFUSED
    commit(coordinator, [], [("a", None)])
    assert commit(coordinator, [("a", 0)], [("a", b"3")]).status is COMMITTED


def test_compare_wants_the_revision_of_the_last_change(coordinator: Coordinator) -> None:
    first = put(coordinator, "a", b"1")
    second = commit(coordinator, [("a", first.revision)], [("a", b"2")])
    assert second.status is COMMITTED
    assert commit(coordinator, [("a", first.revision)], [("a", b"3")]) == CommitResult(REFUSED, second.revision)
    assert get(coordinator, "a") == Record("a", b"2", second.revision)


def test_one_failed_compare_and_nothing_is_written(coordinator: Coordinator) -> None:
    a = put(coordinator, "a", b"1").revision
    before = coordinator.list("", deadline_ms=DEADLINE_MS)
    refused = commit(coordinator, [("a", a), ("b", 7)], [("a", b"2"), ("c", b"2"), ("d", None)])
    assert refused.status is REFUSED
    assert coordinator.list("", deadline_ms=DEADLINE_MS) == before


def test_compares_see_the_state_before_the_commits_own_writes(coordinator: Coordinator) -> None:
    a = put(coordinator, "a", b"1").revision
    result = commit(coordinator, [("a", a), ("b", 0)], [("a", None), ("b", b"2")])
    assert result.status is COMMITTED
    assert keys(coordinator) == ["b"]


def test_a_commit_that_changes_nothing_keeps_the_revision(coordinator: Coordinator) -> None:
    a = put(coordinator, "a", b"1")
    assert commit(coordinator, [("a", a.revision)], []) == CommitResult(COMMITTED, a.revision)
    assert commit(coordinator, [], [("never there", None)]) == CommitResult(COMMITTED, a.revision)
    assert commit(coordinator, [("a", 0)], []).status is REFUSED


def test_a_commit_may_hold_128_compares_and_128_writes(coordinator: Coordinator) -> None:
    names = [f"own/{number:03}" for number in range(COMMIT_OPERATIONS_MAX)]
    first = commit(coordinator, [(name, 0) for name in names], [(name, b"x" * 1024) for name in names])
    assert first.status is COMMITTED
    second = commit(coordinator, [(name, first.revision) for name in names], [(name, None) for name in names])
    assert second == CommitResult(COMMITTED, first.revision + 1)
    assert keys(coordinator) == []


def test_a_129th_operation_is_the_callers_error(coordinator: Coordinator) -> None:
    over = COMMIT_OPERATIONS_MAX + 1
    with pytest.raises(ValueError, match="128"):
        commit(coordinator, [], [(f"k{number}", b"") for number in range(over)])
    with pytest.raises(ValueError, match="128"):
        commit(coordinator, [(f"k{number}", 0) for number in range(over)], [("k", b"")])
    assert keys(coordinator) == []


@pytest.mark.parametrize("bad", [[("k", b"1"), ("k", b"2")], [("", b"")], [("k\0", b"")], [("k" * 513, b"")]])
def test_writes_that_have_no_single_meaning_are_the_callers_error(
    coordinator: Coordinator, bad: list[tuple[str, bytes | None]]
) -> None:
    with pytest.raises(ValueError, match="key"):
        commit(coordinator, [], bad)
    assert keys(coordinator) == []


@pytest.mark.parametrize("key", ['quote"s', "back\\slash", "it's", "%_*?[", "é/日本", "a b", "[1,2]", "null", "1"])
def test_keys_are_plain_text_to_the_store(coordinator: Coordinator, key: str) -> None:
    result = commit(coordinator, [(key, 0)], [(key, b"v")])
    assert get(coordinator, key) == Record(key, b"v", result.revision)
    assert commit(coordinator, [(key, result.revision)], [(key, None)]).status is COMMITTED
    assert get(coordinator, key) is None


KEYS = st.sampled_from(["a", "b", "c/1", "c/2"])
STEPS = st.lists(
    st.tuples(
        st.dictionaries(KEYS, st.sampled_from(["now", "stale", "absent"]), max_size=2),
        st.dictionaries(KEYS, st.none() | st.binary(max_size=8), max_size=4),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_the_store_does_what_a_dictionary_would(
    store: Store, steps: list[tuple[dict[str, str], dict[str, bytes | None]]]
) -> None:
    coordinator = store.open()
    start = coordinator.list("", deadline_ms=DEADLINE_MS)
    model = {record.key: record for record in start.records}
    revision = start.revision
    for compares, writes in steps:
        current = {key: model[key].revision if key in model else 0 for key in compares}
        wanted = {
            key: {"now": current[key], "stale": current[key] - 1, "absent": 0}[how] for key, how in compares.items()
        }
        result = commit(coordinator, list(wanted.items()), list(writes.items()))
        if wanted != current:
            assert result == CommitResult(REFUSED, revision)
            continue
        revision += any(value is not None or key in model for key, value in writes.items())
        assert result == CommitResult(COMMITTED, revision)
        for key, value in writes.items():
            if value is None:
                model.pop(key, None)
            else:
                model[key] = Record(key, value, revision)
        listing = coordinator.list("", deadline_ms=DEADLINE_MS)
        assert (listing.records, listing.revision) == (tuple(model[key] for key in sorted(model)), revision)
    changes = [change for change in replay(coordinator, start.revision + 1) if change[0] in model]
    assert {change[0]: change for change in changes} == {
        key: (key, record.value, record.revision) for key, record in model.items() if record.revision > start.revision
    }
    coordinator.close()


def replay(coordinator: Coordinator, from_revision: int) -> Iterator[tuple[str, bytes | None, int]]:
    """All changes since, as (key, value or None, revision)."""
    while True:
        batch = coordinator.watch([""], from_revision, deadline_ms=0)
        assert not batch.compacted
        if not batch.records:
            return
        for record in batch.records:
            yield record.key, None if record.key in batch.deleted else record.value, record.revision
        from_revision = batch.revision + 1


# ---------------------------------------------------------------------------------------------------------- watch


def test_watch_returns_past_changes_in_order_and_only_of_its_prefixes(coordinator: Coordinator) -> None:
    first = put(coordinator, "hb/a", b"1").revision
    put(coordinator, "own/1", b"x")
    put(coordinator, "live/a", b"2")
    last = put(coordinator, "hb/a", b"3").revision
    batch = coordinator.watch(["hb/", "live/"], first, deadline_ms=DEADLINE_MS)
    assert [(record.key, record.value) for record in batch.records] == [
        ("hb/a", b"1"),
        ("live/a", b"2"),
        ("hb/a", b"3"),
    ]
    assert (batch.revision, batch.deleted, batch.compacted) == (last, (), False)


def test_watch_starts_at_the_revision_it_is_told(coordinator: Coordinator) -> None:
    revisions = [put(coordinator, f"k{number}", b"").revision for number in range(4)]
    batch = coordinator.watch(["k"], revisions[2], deadline_ms=DEADLINE_MS)
    assert [record.revision for record in batch.records] == revisions[2:]


def test_deletes_are_events(coordinator: Coordinator) -> None:
    commit(coordinator, [], [("a", b"1"), ("b", b"1")])
    revision = commit(coordinator, [], [("a", None), ("b", b"2"), ("never there", None)]).revision
    batch = coordinator.watch([""], revision, deadline_ms=DEADLINE_MS)
    assert sorted(batch.records, key=lambda record: record.key) == [
        Record("a", b"", revision),
        Record("b", b"2", revision),
    ]
    assert batch.deleted == ("a",)


def test_a_batch_never_holds_both_a_put_and_a_delete_of_a_key(coordinator: Coordinator) -> None:
    steps: list[tuple[str, bytes | None]] = [
        ("a", b"1"),
        ("a", None),
        ("a", b""),
        ("a", b"2"),
        ("b", b"1"),
        ("a", None),
    ]
    start = coordinator.list("", deadline_ms=DEADLINE_MS).revision + 1
    for step in steps:
        commit(coordinator, [], [step])
    assert [(key, value) for key, value, _ in replay(coordinator, start)] == steps


def test_watch_waits_until_its_deadline_and_then_says_how_far_it_saw(coordinator: Coordinator) -> None:
    revision = put(coordinator, "other", b"").revision
    started = time.monotonic()
    batch = coordinator.watch(["hb/"], revision, deadline_ms=200)
    assert 0.19 < time.monotonic() - started < 2
    assert (batch.records, batch.revision, batch.compacted) == ((), revision, False)


def test_watch_of_a_future_revision_never_goes_back(coordinator: Coordinator) -> None:
    revision = put(coordinator, "a", b"").revision
    assert coordinator.watch(["a"], revision + 10, deadline_ms=0).revision == revision + 9


def test_a_waiting_watch_does_not_hold_up_the_same_clients_commits(coordinator: Coordinator) -> None:
    revision = put(coordinator, "a", b"").revision
    seen: list[Record] = []
    watcher = threading.Thread(
        target=lambda: seen.extend(coordinator.watch(["b"], revision, deadline_ms=DEADLINE_MS).records)
    )
    watcher.start()
    started = time.monotonic()
    put(coordinator, "a", b"")
    result = put(coordinator, "b", b"")
    watcher.join(DEADLINE_MS / 1000)
    assert seen == [Record("b", b"", result.revision)]
    assert time.monotonic() - started < 1


def test_watch_sees_all_commits_of_other_processes_in_order(store: Store, coordinator: Coordinator) -> None:
    # Fewer than the log keeps at least, so that a slow machine cannot make this one lag behind it.
    count, writers = 40, 3
    seen: list[tuple[str, int]] = []
    following = coordinator.list("", deadline_ms=DEADLINE_MS).revision + 1
    with processes(*((write_many, (store, f"w/{writer}/", count)) for writer in range(writers))):
        give_up = time.monotonic() + 30
        while len(seen) < count * writers and time.monotonic() < give_up:
            batch = coordinator.watch(["w/"], following, deadline_ms=500)
            assert not batch.compacted
            seen.extend((record.key, record.revision) for record in batch.records)
            following = batch.revision + 1
    revisions = [revision for _, revision in seen]
    assert revisions == sorted(set(revisions))
    for writer in range(writers):
        mine = [key for key, _ in seen if key.startswith(f"w/{writer}/")]
        assert mine == [f"w/{writer}/{number:05}" for number in range(count)]


def test_history_below_the_floor_is_reported_as_compacted(store: Store, coordinator: Coordinator) -> None:
    first = put(coordinator, "a", b"1").revision
    store.compact()
    batch = coordinator.watch(["a"], first, deadline_ms=DEADLINE_MS)
    assert (batch.records, batch.compacted) == ((), True)
    listing = coordinator.list("a", deadline_ms=DEADLINE_MS)
    assert listing.records == (Record("a", b"1", first),), "compaction forgets history, never a record"
    last = put(coordinator, "a", b"2").revision
    batch = coordinator.watch(["a"], listing.revision + 1, deadline_ms=DEADLINE_MS)
    assert batch.records == (Record("a", b"2", last),)


# ------------------------------------------------------------------------------------------- contention, deadlines


def test_of_concurrent_compare_and_sets_exactly_one_wins_each_revision(store: Store, coordinator: Coordinator) -> None:
    racers, wins = 4, 50
    with processes(*((race, (store, "lock", wins, f"p{racer}")) for racer in range(racers))):
        pass
    records = coordinator.list("won/", deadline_ms=DEADLINE_MS).records
    replaced = [int(record.value) for record in records]
    assert len(replaced) == len(set(replaced)) == racers * wins
    # Each win replaced the revision that another one made: one unbroken chain from absent to the last.
    made = {record.revision for record in records}
    last = get(coordinator, "lock")
    assert last is not None
    assert (made | {0}) - set(replaced) == {last.revision}


def test_a_commit_ends_by_its_deadline_and_reads_go_on_while_writes_are_held(
    store: Store, coordinator: Coordinator
) -> None:
    before = put(coordinator, "a", b"1")
    with store.hold_writes():
        started = time.monotonic()
        try:
            outcome = coordinator.commit([], [Write("a", b"2")], deadline_ms=300).status
        except CoordinatorError:
            outcome = None
        assert outcome in (None, UNKNOWN)
        assert time.monotonic() - started < 1.5
        assert get(coordinator, "a") == Record("a", b"1", before.revision)
        assert coordinator.watch(["a"], before.revision, deadline_ms=300).records
    # The caller's way out of a commit that did not say: read back, and compare with the revision found.
    current = get(coordinator, "a")
    assert current is not None
    assert current.value in ((b"1",) if outcome is None else (b"1", b"2"))
    assert commit(coordinator, [("a", current.revision)], [("a", b"3")]).status is COMMITTED


# ----------------------------------------------------------------------------------------------- generation, close


def test_processes_that_race_to_create_agree_on_one_generation(store: Store) -> None:
    answers = SPAWN.Queue()
    with processes(*((open_and_report, (store, answers)) for _ in range(4))):
        generations = {answers.get(timeout=30) for _ in range(4)}
    assert len(generations) == 1


def test_generation_stays_while_the_store_does(store: Store, coordinator: Coordinator) -> None:
    put(coordinator, "a", b"1")
    again = store.open()
    assert again.generation() == coordinator.generation() >= 1
    assert get(again, "a") == get(coordinator, "a")
    again.close()


def test_generation_rises_when_the_store_is_created_anew(store: Store) -> None:
    generations = []
    for _ in range(3):
        coordinator = store.open()
        generations.append(coordinator.generation())
        assert keys(coordinator) == []
        put(coordinator, "a", b"1")
        coordinator.close()
        store.lose()
    assert generations == sorted(set(generations))


def test_after_close_every_call_raises_and_closing_again_does_nothing(store: Store) -> None:
    coordinator = store.open()
    put(coordinator, "a", b"1")
    coordinator.close()
    coordinator.close()
    calls = [
        lambda: get(coordinator, "a"),
        lambda: keys(coordinator),
        lambda: put(coordinator, "a", b"2"),
        lambda: coordinator.watch(["a"], 1, deadline_ms=DEADLINE_MS),
        coordinator.generation,
    ]
    for call in calls:
        with pytest.raises(CoordinatorError):
            call()
    again = store.open()
    assert get(again, "a") is not None
    again.close()


def test_close_ends_a_waiting_watch(store: Store) -> None:
    coordinator = store.open()
    ended: list[float] = []

    def wait() -> None:
        with pytest.raises(CoordinatorError):
            coordinator.watch(["a"], 1, deadline_ms=20_000)
        ended.append(time.monotonic())

    watcher = threading.Thread(target=wait)
    watcher.start()
    time.sleep(0.1)
    closed = time.monotonic()
    coordinator.close()
    watcher.join(10)
    assert len(ended) == 1
    assert ended[0] - closed < 2
