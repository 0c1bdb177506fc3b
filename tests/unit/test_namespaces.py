"""Namespaces: what the configuration may create, what a connection may open, what a policy refuses, what may change."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from emberkv.config import ClusterConfig, NamespaceConfig
from emberkv.coord import SqliteCoordinator, kept
from emberkv.core.view import NAMESPACE_PREFIX, ClusterView, encode_record
from emberkv.errors import ConfigError, CoordinatorError, NotOurs
from emberkv.messages import (
    AdminRequest,
    DrainRecord,
    ErrorFrame,
    Hello,
    LiveRecord,
    NodeAddress,
    PutItem,
    PutRequest,
    Role,
    Welcome,
)
from emberkv.node.admin import Admin, Changes, changed
from emberkv.node.namespaces import Namespaces, copies_wanted, decode_namespace, put_refusal, settle
from emberkv.ports import CommitResult, CommitStatus, Compare, Record, Write
from emberkv.types import Level, Namespace, RefuseReason, scope_of

DEADLINE_MS = 5000
KV = Namespace("kv", factor=2, level=int(Level.SESSION))


@pytest.fixture
def coordinator(tmp_path: Path) -> SqliteCoordinator:
    return SqliteCoordinator.open(tmp_path / "control", tmp_path / "data", "c1")


def cluster(*namespaces: NamespaceConfig, factor: int = 2) -> ClusterConfig:
    return ClusterConfig(cluster_id="c1", members=["a", "b", "c"], factor=factor, namespaces=list(namespaces))


def recorded(coordinator: SqliteCoordinator) -> dict[str, Namespace]:
    listing = coordinator.list(NAMESPACE_PREFIX, deadline_ms=DEADLINE_MS)
    return {space.name: space for space in map(decode_namespace, listing.records)}


def write(coordinator: SqliteCoordinator, namespace: Namespace) -> None:
    change = Write(NAMESPACE_PREFIX + namespace.name, encode_record(namespace))
    coordinator.commit([], [change], deadline_ms=DEADLINE_MS)


# -- the configuration proposes, the record decides ------------------------------------------------------------------


def test_the_first_node_creates_and_the_next_one_agrees(coordinator: SqliteCoordinator) -> None:
    stated = cluster(NamespaceConfig(name="default"), NamespaceConfig(name="kv", level="session", min_copies=2))
    created = settle(coordinator, stated)
    assert [(space.name, space.id) for space in created] == [("default", 1), ("kv", 2)]
    assert recorded(coordinator) == {space.name: space for space in created}
    assert settle(coordinator, stated) == created
    assert settle(coordinator, cluster(NamespaceConfig(name="kv"))) == created, "what is not stated is not compared"
    more = settle(coordinator, cluster(NamespaceConfig(name="logs", expiry="1m")))
    assert [(space.name, space.id) for space in more] == [("default", 1), ("kv", 2), ("logs", 3)]


def test_many_are_created_in_more_than_one_commit(coordinator: SqliteCoordinator) -> None:
    names = [f"n{number:03d}" for number in range(250)]
    settle(coordinator, cluster(*(NamespaceConfig(name=name) for name in names)))
    assert sorted(recorded(coordinator)) == names
    assert sorted(space.id for space in recorded(coordinator).values()) == list(range(1, 251))


def test_another_policy_in_the_file_is_refused_in_one_line(coordinator: SqliteCoordinator) -> None:
    settle(coordinator, cluster(NamespaceConfig(name="kv", factor=3, level="session"), factor=3))
    with pytest.raises(ConfigError) as caught:
        settle(coordinator, cluster(NamespaceConfig(name="kv", factor=2, level="eventual"), factor=3))
    assert str(caught.value) == (
        "namespace 'kv' differs: level eventual here, session in the cluster; factor 2 here, 3 in the cluster; leave "
        "it out of the configuration, or change it in the cluster with `emberkv namespace set kv ...`"
    )


def test_a_dropped_namespace_does_not_come_back_with_a_restart(coordinator: SqliteCoordinator) -> None:
    stated = cluster(NamespaceConfig(name="kv"))
    (created,) = settle(coordinator, stated)
    write(coordinator, msgspec.structs.replace(created, dropped=True, revision=1))
    (found,) = settle(coordinator, stated)
    assert found.dropped


def test_nodes_that_start_at_the_same_time_create_each_once(tmp_path: Path) -> None:
    stated = cluster(NamespaceConfig(name="a"), NamespaceConfig(name="b"))
    results: list[list[Namespace]] = []

    def start() -> None:
        opened = SqliteCoordinator.open(tmp_path / "control", tmp_path / "data", "c1")
        results.append(settle(opened, stated))
        opened.close()

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 6
    assert all(result == results[0] for result in results)


def test_a_record_of_another_version_is_named(coordinator: SqliteCoordinator) -> None:
    coordinator.commit([], [Write("ns/kv", b"\xc1")], deadline_ms=DEADLINE_MS)
    with pytest.raises(ConfigError, match="'ns/kv' cannot be decoded"):
        settle(coordinator, cluster())


# -- what was decided survives the coordinator's memory --------------------------------------------------------------


def test_namespaces_outlive_control_db(tmp_path: Path) -> None:
    control, data = tmp_path / "control", tmp_path / "data"
    first = SqliteCoordinator.open(control, data, "c1")
    (created,) = settle(first, cluster(NamespaceConfig(name="kv")))
    again = msgspec.structs.replace(created, generation=4, revision=9, owner="team")
    write(first, again)
    first.commit([], [Write("live/a", b"x")], deadline_ms=DEADLINE_MS)
    first.close()
    for file in control.iterdir():
        file.unlink()
    second = SqliteCoordinator.open(control, data, "c1")
    assert second.generation() == 2
    assert recorded(second) == {"kv": again}
    assert second.get("live/a", deadline_ms=DEADLINE_MS) is None
    third = SqliteCoordinator.open(control, data, "c1")
    assert recorded(third) == {"kv": again}


def test_a_change_that_its_process_did_not_get_to_keep_is_kept_by_the_next(tmp_path: Path) -> None:
    first = SqliteCoordinator.open(tmp_path / "control", tmp_path / "data", "c1")
    settle(first, cluster(NamespaceConfig(name="kv")))
    (tmp_path / "data" / kept.FILE_NAME).unlink()
    SqliteCoordinator.open(tmp_path / "control", tmp_path / "data", "c1")
    assert set(kept.load(tmp_path / "data", "c1")) == {"ns/kv"}


def test_a_kept_file_that_is_damaged_or_a_strangers_is_refused(tmp_path: Path) -> None:
    opened = SqliteCoordinator.open(tmp_path / "control", tmp_path / "data", "c1")
    settle(opened, cluster(NamespaceConfig(name="kv")))
    file = tmp_path / "data" / kept.FILE_NAME
    before = file.read_text()
    file.write_text(before[:-10])
    with pytest.raises(NotOurs, match="damaged"):
        SqliteCoordinator.open(tmp_path / "control", tmp_path / "data", "c1")
    file.write_text(before.replace('"c1"', '"c2"'))
    with pytest.raises(NotOurs, match="belongs to cluster 'c2'"):
        SqliteCoordinator.open(tmp_path / "control", tmp_path / "data", "c1")


# -- who may open what -----------------------------------------------------------------------------------------------


def known(*namespaces: Namespace) -> Namespaces:
    return Namespaces(list(namespaces), cluster_id="c1", node="a", incarnation=b"a" * 16)


def opened(namespaces: Namespaces, name: str, role: Role = Role.CLIENT, generation: int = 0) -> Welcome | ErrorFrame:
    hello = Hello(int(role), 1, 1, "c1", "default", "b", b"b" * 16, name, 0, generation)
    return namespaces.session().answer(hello)


def test_scope_of_the_first_generation_is_what_it_was() -> None:
    # SHA-256("default\0default\0" "1"), cut: what every block stored by an earlier version begins with.
    assert known(KV).scope(Namespace("default")) == bytes.fromhex("bc30a13e2c9c4fe0")


def test_policy_follows_the_records_and_ends_with_the_drop() -> None:
    namespaces = known(KV)
    scope = scope_of("kv", 1)
    assert namespaces.policy(scope) == KV
    stricter = msgspec.structs.replace(KV, min_copies=2, revision=1)
    namespaces.take({"kv": stricter})
    assert namespaces.policy(scope) == stricter
    namespaces.take({"kv": msgspec.structs.replace(stricter, dropped=True)})
    assert namespaces.policy(scope) is None
    assert isinstance(opened(namespaces, "kv"), ErrorFrame)
    namespaces.take({"kv": msgspec.structs.replace(KV, generation=2)})
    assert namespaces.policy(scope) is None, "the old generation's connections are not moved over"
    welcome = opened(namespaces, "kv")
    assert isinstance(welcome, Welcome)
    assert welcome.namespace.generation == 2


def test_a_peer_opens_the_generation_that_it_means_or_nothing() -> None:
    behind, ahead = known(KV), known(msgspec.structs.replace(KV, generation=2))
    hello = msgspec.structs.replace(ahead.hello(Role.FETCH, scope_of("kv", 2)), node="another")
    assert (hello.namespace, hello.generation) == ("kv", 2)
    answer = behind.session().answer(hello)
    assert isinstance(answer, ErrorFrame)
    assert "another generation than 2" in answer.text
    assert isinstance(ahead.session().answer(hello), Welcome)


def test_a_read_of_a_namespace_just_dropped_still_finds_its_name() -> None:
    namespaces = known(KV)
    namespaces.take({})
    assert namespaces.hello(Role.FETCH, scope_of("kv", 1)).namespace == "kv"
    unknown = namespaces.hello(Role.FETCH, b"x" * 8)
    assert isinstance(known(KV).session().answer(unknown), ErrorFrame)


def test_no_namespace_is_needed_for_streams_and_questions() -> None:
    namespaces = known()
    assert namespaces.hello(Role.STREAM).namespace == ""
    for role in (Role.STREAM, Role.CLIENT):
        welcome = opened(namespaces, "", role)
        assert isinstance(welcome, Welcome)
        assert namespaces.policy(namespaces.scope(welcome.namespace)) is None, "nothing can be stored there"


def test_an_unknown_name_is_looked_for_once_before_it_is_refused(coordinator: SqliteCoordinator) -> None:
    namespaces, view, asked = known(), ClusterView("a"), []

    def learn(record: Record) -> None:
        asked.append(record.key)
        view.apply([record], [], full=False, now_ns=0)
        namespaces.take(view.namespaces)

    namespaces.look_at(coordinator, learn)
    assert isinstance(opened(namespaces, "kv"), ErrorFrame)
    write(coordinator, KV)
    assert isinstance(opened(namespaces, "kv"), Welcome)
    assert isinstance(opened(namespaces, "kv"), Welcome)
    assert asked == ["ns/kv"]
    assert isinstance(opened(namespaces, "../etc\n"), ErrorFrame)
    write(coordinator, Namespace("gone", dropped=True))
    assert isinstance(opened(namespaces, "gone"), ErrorFrame)


# -- what a policy refuses -------------------------------------------------------------------------------------------


def request(level: Level, min_copies: int = 1, length: int = 10) -> PutRequest:
    return PutRequest([PutItem(b"k" * 32, b"p" * 24, length)], int(level), min_copies=min_copies)


@pytest.mark.parametrize(
    ("policy", "wanted", "reason"),
    [
        (None, request(Level.EVENTUAL), RefuseReason.NO_NAMESPACE),
        (KV, request(Level.EVENTUAL), RefuseReason.NONE),
        (KV, request(Level.SESSION, 2), RefuseReason.NONE),
        (KV, request(Level.SESSION, 3), RefuseReason.LEVEL_UNSUPPORTED),
        (KV, request(Level.STRONG), RefuseReason.LEVEL_UNSUPPORTED),
        (Namespace("s", level=2, factor=1), request(Level.SESSION), RefuseReason.LEVEL_UNSUPPORTED),
        (Namespace("s", level=2, factor=1), request(Level.EVENTUAL), RefuseReason.LEVEL_UNSUPPORTED),
        (Namespace("s", level=2, factor=1), request(Level.STRONG), RefuseReason.NONE),
        (Namespace("s", level=2, factor=1), request(Level.STRONG, 2), RefuseReason.LEVEL_UNSUPPORTED),
        (Namespace("e", factor=1), request(Level.SESSION, 2), RefuseReason.LEVEL_UNSUPPORTED),
        (Namespace("e", factor=4), request(Level.SESSION, 3), RefuseReason.LEVEL_UNSUPPORTED),
        (Namespace("e", block_bytes_max=9), request(Level.EVENTUAL), RefuseReason.TOO_LARGE),
    ],
)
def test_what_a_put_may_ask_in_a_cluster_of_factor_2(policy: Namespace, wanted: PutRequest, reason: int) -> None:
    assert put_refusal(policy, wanted, 2) == reason


def test_min_copies_of_the_policy_is_a_floor_for_session_puts() -> None:
    strict = Namespace("kv", factor=3, min_copies=2, level=int(Level.SESSION))
    assert copies_wanted(strict, request(Level.SESSION), 3) == 2
    assert copies_wanted(strict, request(Level.SESSION, 3), 3) == 3
    assert copies_wanted(strict, request(Level.EVENTUAL), 3) == 1
    assert copies_wanted(strict, request(Level.SESSION), 1) == 1, "a cluster with a lower factor still answers"


# -- what may change -------------------------------------------------------------------------------------------------


def test_a_change_keeps_what_it_does_not_name() -> None:
    after = changed(KV, Changes(min_copies=2, expiry="2m"), 3)
    assert after == msgspec.structs.replace(KV, min_copies=2, expiry_ms=120_000, revision=1)
    assert changed(after, Changes(owner="", verify="entry", expiry="0"), 3) == msgspec.structs.replace(
        after, expiry_ms=0, verify_pin=False, revision=2
    )


@pytest.mark.parametrize(
    ("before", "changes", "words"),
    [
        (KV, Changes(), "nothing to change: give one of min_copies, factor, expiry, verify, owner"),
        (KV, Changes(factor=1, min_copies=2), "min_copies: 2 copies asked by namespace 'kv', but factor is 1"),
        (KV, Changes(factor=4), "factor: namespace 'kv' asks for 4 replicas, but each shard has 3"),
        (KV, Changes(factor=0), "factor: must be at least 1"),
        (KV, Changes(min_copies=0), "min_copies: must be at least 1"),
        (KV, Changes(verify="maybe"), "verify: 'maybe' is not one of pin, entry"),
        (KV, Changes(owner="a\nb"), "owner: 'a\\nb' is not a name"),
        (KV, Changes(expiry="-5"), "expiry: '-5' is neither 0"),
        (KV, Changes(expiry="nan"), "expiry: 'nan' is neither 0"),
        (Namespace("e"), Changes(min_copies=2), "min_copies: namespace 'e' is eventual"),
        (Namespace("s", level=2, factor=1), Changes(factor=2), "factor: namespace 's' is strong"),
    ],
)
def test_a_change_that_does_not_fit_is_refused(before: Namespace, changes: Changes, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(before, changes, 3)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# -- commands whose commits go wrong ---------------------------------------------------------------------------------


class Unsure:
    """A coordinator whose next commit ends as `fault` says: "applied" or "lost" (unknown), "raced" (somebody else wrote
    first), "down"."""

    def __init__(self, real: SqliteCoordinator) -> None:
        self.real, self.fault = real, ""
        self.get, self.list = real.get, real.list

    def commit(self, compares: list[Compare], writes: list[Write], *, deadline_ms: int) -> CommitResult:
        fault, self.fault = self.fault, ""
        if fault == "down":
            raise CoordinatorError("the coordinator is gone")
        if fault == "raced":
            self.real.commit([], [Write(writes[0].key, encode_record(KV))], deadline_ms=deadline_ms)
        if fault != "lost":
            result = self.real.commit(compares, writes, deadline_ms=deadline_ms)
        return CommitResult(CommitStatus.UNKNOWN) if fault in ("applied", "lost") else result


class Office:
    """An Admin over a real embedded coordinator; `learned` are the keys that it passed on to the core."""

    def __init__(self, coordinator: SqliteCoordinator) -> None:
        self.coordinator = Unsure(coordinator)
        self.learned: list[str] = []
        self.view = ClusterView("a")
        core = SimpleNamespace(state=SimpleNamespace(view=self.view, settings=SimpleNamespace(factor=2)))
        runtime = SimpleNamespace(lock=threading.Lock(), core=core)
        cleared = SimpleNamespace(clear=lambda prefix, *, deadline_ms: 0)
        self.admin = Admin(runtime, self.coordinator, cleared, self.learn)  # type: ignore[arg-type]

    def learn(self, record: Record) -> None:
        self.learned.append(record.key)

    def say(self, verb: str, **arguments: object) -> tuple[bool, dict[str, Any], str]:
        reply = self.admin.answer(AdminRequest(verb, msgspec.json.encode(arguments)))
        assert "\n" not in reply.error
        return reply.ok, msgspec.json.decode(reply.document), reply.error


@pytest.fixture
def office(coordinator: SqliteCoordinator) -> Office:
    return Office(coordinator)


def test_an_unknown_outcome_of_a_command_is_read_back(office: Office) -> None:
    office.coordinator.fault = "applied"
    ok, document, _ = office.say("namespace-create", name="kv", level="session")
    assert ok
    assert document["namespace"]["revision"] == 0
    assert office.learned == ["ns/kv"]
    office.coordinator.fault = "lost"
    ok, document, error = office.say("namespace-set", name="kv", changes={"owner": "x"})
    assert (ok, document) == (False, {"retry": True})
    assert "did not say whether it was done; look" in error
    assert recorded(office.coordinator.real)["kv"].owner == ""


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"owner": "o" * 60_000}, "beginning with a letter or digit"),
        ({"expiry": "9" * 60_000 + "x"}, "write it like 3s, 500ms, 2m or 1h"),
        ({"k" * 60_000: 1}, "what can be is min_copies, factor, expiry, verify, owner"),
    ],
)
def test_an_error_echoes_only_a_line_of_what_was_asked(office: Office, changes: dict[str, object], end: str) -> None:
    office.say("namespace-create", name="kv", level="session")
    ok, _, error = office.say("namespace-set", name="kv", changes=changes)
    assert not ok
    assert error.endswith(end)
    assert len(error) < 700


def test_a_command_that_comes_second_is_told_to_look_again(office: Office) -> None:
    office.say("namespace-create", name="kv", level="session")
    for verb, arguments in (
        ("namespace-set", {"name": "kv", "changes": {"owner": "x"}}),
        ("namespace-drop", {"name": "kv"}),
        ("namespace-create", {"name": "other"}),
    ):
        office.coordinator.fault = "raced"
        ok, document, error = office.say(verb, **arguments)
        assert (ok, document) == (False, {"retry": True})
        assert "changed meanwhile: look and try again" in error
    office.coordinator.fault = "down"
    ok, document, error = office.say("namespace-drop", name="kv")
    assert (ok, document, error) == (False, {"retry": True}, "the coordinator is gone")
    assert not recorded(office.coordinator.real)["kv"].dropped


def test_arguments_that_are_no_json_are_refused(office: Office) -> None:
    for raw in (b"{", b"\xff", b"[" * 100_000, b'{"name": 5}', b'"x"'):
        reply = office.admin.answer(AdminRequest("namespace-create", raw))
        assert not reply.ok
        assert reply.error.startswith("arguments: ")
        assert len(reply.error) < 300


def test_a_drain_names_the_life_that_was_seen(office: Office) -> None:
    real = office.coordinator.real

    def live(name: str, incarnation: bytes) -> None:
        record = LiveRecord(1, incarnation, NodeAddress(name, "h:1"))
        real.commit([], [Write(f"live/{name}", encode_record(record))], deadline_ms=DEADLINE_MS)

    live("a", b"a" * 16)
    assert "only one that is alive" in office.say("drain", node="a")[2]
    live("b", b"b" * 16)
    assert office.say("drain", node="a")[0]
    record = real.get("drain/a", deadline_ms=DEADLINE_MS)
    assert record is not None
    assert record.value == encode_record(DrainRecord(b"a" * 16))
    assert "only one that is alive" in office.say("drain", node="b")[2], "a is draining"
    live("a", b"A" * 16)
    assert office.say("drain", node="b")[0], "the next life of a is not"
    assert office.say("undrain", node="b")[0]
    assert office.say("undrain", node="b")[0]
    assert real.get("drain/b", deadline_ms=DEADLINE_MS) is None
