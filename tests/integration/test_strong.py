"""Strong namespaces on real nodes: linearizable from every node, kept by the disk, refused when the store is not there.

The history of the concurrent test is judged by the store's own order: a version is the place of a write in it, so a
history is linearizable if nothing that began after an operation ended has a lower version than it saw, and each read
returns the bytes of the write whose version it names.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.coordinators import process_inside_transaction
from emberkv import Client, Level, MissReason, PutBlock, PutStatus, RefuseReason
from emberkv.cli.cluster import LocalCluster
from emberkv.config import NamespaceConfig
from emberkv.node.strong import ABSENT, DATA_BYTES_MAX
from emberkv.types import NO_VERSION, Hit, Miss, PutOutcome, Version
from harness.blocks import eventually, key_of

pytestmark = pytest.mark.timeout(120)
MIB = 1 << 20
SPACES = [NamespaceConfig(name="default"), NamespaceConfig(name="ledger", level="strong")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("strong"), 3, arena_bytes=64 * MIB, namespaces=SPACES) as started:
        started.wait_ready(60)
        yield started


def client_of(cluster: LocalCluster, name: str, *, tcp: bool = False) -> Client:
    """A client of one node only, over its socket or over TCP."""
    endpoint = cluster.node(name).endpoint
    if tcp:
        status = next(document for document in cluster.statuses() if document["node"] == name)
        endpoint = f"tcp:{status['addresses']['tcp']}"
    return Client([endpoint], namespace="ledger", prefer_local=not tcp)


@pytest.fixture(params=["unix", "tcp"])
def client(request: pytest.FixtureRequest, cluster: LocalCluster) -> Iterator[Client]:
    with client_of(cluster, "n1", tcp=request.param == "tcp") as made:
        yield made


def read(client: Client, key: bytes) -> Hit | Miss:
    return client.get_many([key], deadline_ms=10_000)[0]


def write(client: Client, key: bytes, data: bytes, seen: Version = NO_VERSION) -> PutOutcome:
    return client.put_many([PutBlock(key, data, 0, seen)], deadline_ms=10_000)[0]


def test_put_get_compare_delete(client: Client) -> None:
    key = os.urandom(32)
    assert read(client, key) == Miss(MissReason.ABSENT)
    first = write(client, key, b"one", ABSENT)
    assert first.status is PutStatus.STORED
    assert write(client, key, b"two", ABSENT) == PutOutcome(PutStatus.SUPERSEDED, first.version)
    second = write(client, key, b"two", first.version)
    assert second.version > first.version
    found = read(client, key)
    assert isinstance(found, Hit)
    assert (bytes(found.data), found.version) == (b"two", second.version)
    assert client.exists_many([key, os.urandom(32)]) == [True, False]
    assert client.delete_many([key], deadline_ms=10_000)[0].status is PutStatus.STORED
    assert read(client, key) == Miss(MissReason.ABSENT)


def test_batches_and_the_largest_record(client: Client) -> None:
    keys = [os.urandom(32) for _ in range(20)]
    values = [random.Random(number).randbytes(1 + 997 * number) for number in range(19)] + [bytes(DATA_BYTES_MAX)]
    assert all(client.put_many(list(zip(keys, values, strict=True)), deadline_ms=60_000))
    found = client.get_many([*keys, os.urandom(32)], deadline_ms=10_000)
    assert [bytes(hit.data) for hit in found[:20] if isinstance(hit, Hit)] == values
    assert found[20] == Miss(MissReason.ABSENT)
    with pytest.raises(ValueError, match="the limit is 524288"):
        client.put_many([(keys[0], bytes(DATA_BYTES_MAX + 1))])


def test_other_levels_and_copies_are_refused(client: Client) -> None:
    unsupported = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.LEVEL_UNSUPPORTED)
    item = [(os.urandom(32), b"x")]
    assert client.put_many(item, level=Level.SESSION) == [unsupported]
    assert client.put_many(item, level=Level.EVENTUAL) == [unsupported]
    assert client.put_many(item, min_copies=2) == [unsupported]
    assert client.put_many(item, deadline_ms=10_000)[0].status is PutStatus.STORED, "the connection is still in step"


def test_namespaces_do_not_see_one_another(cluster: LocalCluster) -> None:
    key = os.urandom(32)
    with client_of(cluster, "n1") as ledger, Client([cluster.node("n1").endpoint]) as blocks:
        assert write(ledger, key, b"mine")
        assert not blocks.get_many([key])[0]
        assert blocks.put_many([(key, b"x")], level=Level.STRONG)[0].reason is RefuseReason.LEVEL_UNSUPPORTED


def test_counting_from_all_nodes_loses_nothing(cluster: LocalCluster) -> None:
    key, threads, each = os.urandom(32), 6, 8
    failures: list[str] = []

    def count(number: int) -> None:
        with client_of(cluster, f"n{number % 3 + 1}", tcp=number >= 3) as client:
            done = 0
            while done < each:
                found = read(client, key)
                value, seen = (int(found.data.tobytes()), found.version) if isinstance(found, Hit) else (0, ABSENT)
                outcome = write(client, key, str(value + 1).encode(), seen)
                if outcome.status is PutStatus.STORED:
                    done += 1
                elif outcome.status is not PutStatus.SUPERSEDED:
                    failures.append(str(outcome))
                    return

    running = [threading.Thread(target=count, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(90)
    assert failures == []
    with client_of(cluster, "n2") as client:
        found = read(client, key)
        assert isinstance(found, Hit)
        assert int(found.data.tobytes()) == threads * each


def test_a_request_that_a_frozen_node_finds_later_is_not_performed(cluster: LocalCluster) -> None:
    """Its client went elsewhere, and the record was deleted since: the condition holds again, the lock stays free."""
    key = key_of("lock")
    endpoints = [cluster.node(name).endpoint for name in ("n1", "n3")]
    with Client(endpoints, namespace="ledger", prefer_local=False) as first, client_of(cluster, "n2") as second:
        first.put_many([PutBlock(key_of("warm"), b"w")], deadline_ms=10_000)
        cluster.kill("n1", signal.SIGSTOP)
        try:
            taken = first.put_many([PutBlock(key, b"mine", 0, ABSENT)], deadline_ms=4000)[0]
            assert taken.status is PutStatus.STORED
            assert second.delete_many([key], deadline_ms=10_000)[0].status is PutStatus.STORED
        finally:
            cluster.kill("n1", signal.SIGCONT)
        with client_of(cluster, "n1", tcp=True) as woken:
            read(woken, key)  # by then the old request, which came before, has had its turn as well
            time.sleep(0.5)
            found = read(woken, key)
    assert isinstance(found, Miss)
    assert found.reason is MissReason.ABSENT


def test_concurrent_reads_and_writes_are_linearizable(cluster: LocalCluster) -> None:
    key = os.urandom(32)
    history: list[tuple[float, float, bool, Version, bytes]] = []
    lock = threading.Lock()
    end = time.monotonic() + 4

    def act(number: int) -> None:
        rng = random.Random(number)
        with client_of(cluster, f"n{number % 3 + 1}", tcp=bool(number & 4)) as client:
            while time.monotonic() < end:
                began = time.monotonic()
                if rng.random() < 0.3:
                    data = b"%d/%f" % (number, began)
                    outcome = write(client, key, data)
                    assert outcome.status is PutStatus.STORED
                    entry = (True, outcome.version, data)
                else:
                    found = read(client, key)
                    entry = (False, found.version, bytes(found.data) if isinstance(found, Hit) else b"")
                with lock:
                    history.append((began, time.monotonic(), *entry))

    running = [threading.Thread(target=act, args=(number,)) for number in range(6)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    written = {version: data for _, _, is_write, version, data in history if is_write}
    assert len(written) == sum(is_write for _, _, is_write, _, _ in history), "a version names one write"
    assert len(written) > 5
    assert any(not is_write and data for _, _, is_write, _, data in history)
    highest, ended = Version(0, 0), sorted(history, key=lambda entry: entry[1])
    at = 0
    for began, _, is_write, version, data in sorted(history):
        while ended[at][1] < began:  # everything that was over before this one began
            highest, at = max(highest, ended[at][3]), at + 1
        assert version >= highest, "it went back"
        assert not (is_write and version == highest)
        assert is_write or data == (written[version] if data else b"")


def test_a_store_that_another_process_holds_refuses_in_time(cluster: LocalCluster) -> None:
    key = os.urandom(32)
    with client_of(cluster, "n1") as client, client_of(cluster, "n2", tcp=True) as other:
        before = write(client, key, b"before")
        assert before
        with process_inside_transaction(cluster.config.data_path / "strong.db"):
            began = time.monotonic()
            for each in (client, other):
                outcome = each.put_many([(key, b"during")], deadline_ms=2000)[0]
                # UNKNOWN on a machine so slow that the refusal came after the client's own deadline.
                assert outcome.status in (PutStatus.REFUSED, PutStatus.UNKNOWN)
                assert outcome.reason is RefuseReason.UNREACHABLE or outcome.status is PutStatus.UNKNOWN
                found = read(each, key)
                assert isinstance(found, Hit)
                assert (bytes(found.data), found.version) == (b"before", before.version), "reads go on"
            assert time.monotonic() - began < 20
        eventually("it works again", lambda: write(client, key, b"after").status is PutStatus.STORED)
        found = read(other, key)
        assert isinstance(found, Hit)
        assert bytes(found.data) == b"after"


def test_acknowledged_records_survive_every_kill_and_the_loss_of_the_memory(tmp_path: Path) -> None:
    acked: dict[bytes, bytes] = {}
    with LocalCluster(tmp_path, 2, arena_bytes=64 * MIB, namespaces=SPACES) as cluster:
        cluster.wait_ready(60)
        stop = threading.Event()

        def fill() -> None:
            number = 0
            with client_of(cluster, "n1") as client:
                while not stop.is_set():
                    number += 1
                    key, data = key_of(f"kept-{number}"), b"value %d" % number
                    if write(client, key, data).status is PutStatus.STORED:
                        acked[key] = data

        writer = threading.Thread(target=fill)
        writer.start()
        eventually("some are acknowledged", lambda: len(acked) >= 20)
        cluster.kill("n1", signal.SIGKILL)
        stop.set()
        writer.join(30)
        with client_of(cluster, "n2") as client:
            assert [bytes(hit.data) for hit in client.get_many(list(acked), deadline_ms=20_000) if hit] == list(
                acked.values()
            )
            client.create_namespace("more", level="strong", owner="kept")
    with LocalCluster(tmp_path, 2, arena_bytes=64 * MIB, namespaces=SPACES) as cluster:
        cluster.wait_ready(60)
        with client_of(cluster, "n1") as client:
            found = client.get_many(list(acked), deadline_ms=20_000)
            assert [bytes(hit.data) for hit in found if hit] == list(acked.values())
            assert [space["name"] for space in client.namespaces()] == ["default", "ledger", "more"]


def test_a_dropped_strong_namespace_begins_anew_and_empty(cluster: LocalCluster) -> None:
    with Client(cluster.endpoints(), namespace="") as admin:
        admin.create_namespace("quotas", level="strong")
        with Client([cluster.node("n2").endpoint], namespace="quotas") as client:
            key = os.urandom(32)
            assert write(client, key, b"old")
            assert admin.drop_namespace("quotas")["records_left"] == 0
            # The node hears of it with its next look at the records; from then on nothing is stored or found.
            eventually("its connection is told", lambda: not client.put_many([(key, b"x")])[0])
            assert not client.get_many([key])[0]
            assert not client.put_many([(key, b"x")])[0]
        admin.create_namespace("quotas", level="strong")
        with Client([cluster.node("n2").endpoint], namespace="quotas") as client:
            assert read(client, key) == Miss(MissReason.ABSENT)
            assert write(client, key, b"new")
