"""Namespaces at run time on real nodes: created here, open there, changed and dropped under load, one truth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emberkv import Client, Level, MissReason, PutStatus, RefuseReason
from emberkv.cli.cluster import LocalCluster
from emberkv.config import NamespaceConfig, load, write
from emberkv.core.budget import Costs
from emberkv.errors import ConfigError, HandshakeRefused, Unavailable
from emberkv.types import Hit, PutOutcome
from harness.blocks import eventually, key_of, value_of

pytestmark = pytest.mark.timeout(120)
MIB = 1 << 20
SIZE = 16 << 10
COMMAND = [sys.executable, "-m", "emberkv.cli.main"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    spaces = [NamespaceConfig(name="first", owner="file")]
    with LocalCluster(tmp_path_factory.mktemp("spaces"), 3, arena_bytes=64 * MIB, namespaces=spaces) as started:
        started.wait_ready(60)
        yield started


@pytest.fixture
def admin(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.endpoints(), namespace="") as client:
        yield client


def client_of(cluster: LocalCluster, name: str, namespace: str) -> Client:
    return Client([cluster.node(name).endpoint], namespace=namespace)


def put(client: Client, name: str, **options: Any) -> PutOutcome:
    return client.put_many([(key_of(name), value_of(name, SIZE))], deadline_ms=5000, **options)[0]


def run(cluster: LocalCluster, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "EMBERKV_ENDPOINTS": ",".join(cluster.endpoints()), "COLUMNS": "80"}
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended


def settled(cluster: LocalCluster, space: dict[str, Any]) -> None:
    """Waits until every node has this policy."""
    wanted = [space["generation"], space["revision"]]
    eventually(
        "every node has it", lambda: all(s["namespaces"].get(space["name"]) == wanted for s in cluster.statuses())
    )


# -- one truth for all nodes -----------------------------------------------------------------------------------------


def test_created_through_one_node_it_is_open_on_all_at_once(cluster: LocalCluster, admin: Client) -> None:
    with client_of(cluster, "n1", "") as creator:
        made = creator.create_namespace("everywhere", level="session", min_copies=2, owner="team-a")
    assert (made["generation"], made["revision"], made["factor"], made["dropped"]) == (1, 0, 2, False)
    for name in ("n3", "n2", "n1"):
        with client_of(cluster, name, "everywhere") as client:
            outcome = put(client, f"at-{name}")
            assert (outcome.status, outcome.copies) == (PutStatus.STORED, 2), "level and copies are the policy's"
    with pytest.raises(HandshakeRefused, match="'nowhere' does not exist"):
        client_of(cluster, "n1", "nowhere")
    shown = {space["name"]: space for space in admin.namespaces()}
    assert shown["everywhere"] == made
    assert shown["first"]["owner"] == "file"


def test_what_a_namespace_cannot_do_is_refused_with_its_reason(cluster: LocalCluster, admin: Client) -> None:
    admin.create_namespace("single", factor=1)
    with client_of(cluster, "n1", "single") as client:
        unsupported = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.LEVEL_UNSUPPORTED)
        assert put(client, "a", level=Level.SESSION, min_copies=2) == unsupported
        assert put(client, "a", level=Level.STRONG) == unsupported
        assert put(client, "a", level=Level.SESSION).status is PutStatus.STORED
    for arguments, words in (
        ({"name": "first"}, "namespace 'first' exists already"),
        ({"name": "bad name"}, "name: 'bad name' is not a name"),
        ({"name": "bad", "level": "best"}, "arguments: Invalid enum value 'best'"),
        ({"name": "bad", "factor": 3}, "factor: namespace 'bad' asks for 3 replicas, but each shard has 2"),
        ({"name": "bad", "min_copies": 2}, "min_copies: namespace 'bad' is eventual"),
        ({"name": "bad", "level": "strong", "expiry": "1m"}, "expiry: namespace 'bad' is strong"),
        ({"name": "bad", "level": "strong", "block_bytes_max": MIB}, "block_bytes_max: 1048576 is more than a record"),
        ({"name": "bad", "parts": 2}, "parts: namespace 'bad' asks for 2, this version serves 1"),
        ({"name": "bad", "expiry": "1ms"}, "expiry: '1ms' is neither 0"),
        ({"name": "bad", "colour": "red"}, "arguments: Object contains unknown field `colour`"),
    ):
        with pytest.raises(ConfigError) as caught:
            admin.create_namespace(**arguments)  # type: ignore[arg-type]
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="level: cannot be changed, it is fixed at creation"):
        admin.set_namespace("first", level="session")
    with pytest.raises(ConfigError, match="namespace 'nowhere' does not exist"):
        admin.drop_namespace("nowhere")
    with pytest.raises(ConfigError, match="'explode' is no command of this version"):
        admin.admin("explode")
    assert "bad" not in {space["name"] for space in admin.namespaces()}


def test_a_node_whose_file_states_another_policy_is_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    stated, node = load(cluster.node("n1").config_path, environment={})
    for number, (space, words) in enumerate(
        (
            (
                NamespaceConfig(name="first", owner="other"),
                "namespace 'first' differs: owner other here, file in the cl",
            ),
            (NamespaceConfig(name="first", factor=1), "namespace 'first' differs: factor 1 here, 2 in the cluster"),
        )
    ):
        file = tmp_path / f"{number}.toml"
        local = msgspec.structs.replace(node, data_dir=str(tmp_path / "n1"), socket=str(tmp_path / "x.sock"))
        write(file, msgspec.structs.replace(stated, namespaces=[space]), local)
        ended = subprocess.run([*COMMAND, "node", "--config", str(file)], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2
        (line,) = [line for line in ended.stderr.splitlines() if line.startswith("emberkv:")]
        assert words in line
        assert "emberkv namespace set first" in line
        assert "Traceback" not in ended.stderr


# -- changed under load ----------------------------------------------------------------------------------------------


class Load:
    """Session puts and reads of what was put, without pause, until the block ends."""

    def __init__(self, cluster: LocalCluster, node: str, namespace: str, *, prefix: str) -> None:
        self._client = client_of(cluster, node, namespace)
        self._prefix = prefix
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.outcomes: list[tuple[float, PutOutcome]] = []
        self.wrong: list[str] = []
        self.reasons: Counter[MissReason] = Counter()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            name = f"{self._prefix}-{number}"
            number += 1
            began = time.monotonic()
            self.outcomes.append((began, put(self._client, name, level=Level.SESSION)))
            found = self._client.get_many([key_of(name)], deadline_ms=2000)[0]
            if isinstance(found, Hit):
                if bytes(found.data) != value_of(name, SIZE):
                    self.wrong.append(name)
            else:
                self.reasons[found.reason] += 1

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        self._client.close()

    def since(self, moment: float) -> list[PutOutcome]:
        return [outcome for began, outcome in self.outcomes if began >= moment]


def test_a_policy_that_changes_under_load_loses_no_put(cluster: LocalCluster, admin: Client) -> None:
    admin.create_namespace("changing", level="session")
    with Load(cluster, "n1", "changing", prefix="c1") as near, Load(cluster, "n3", "changing", prefix="c3") as far:
        for factor, copies in ((2, 2), (2, 1), (1, 1), (2, 1), (2, 2)):
            settled(cluster, admin.set_namespace("changing", factor=factor, min_copies=copies))
            time.sleep(0.3)
        moment = time.monotonic()
        eventually("puts under the last policy", lambda: min(len(near.since(moment)), len(far.since(moment))) >= 5)
    for load_ in (near, far):
        assert load_.wrong == []
        assert {outcome.status for _, outcome in load_.outcomes} == {PutStatus.STORED}
        assert all(outcome.copies >= 2 for outcome in load_.since(moment)), "the last policy asks for two copies"
        assert set(load_.reasons) <= {MissReason.BEHIND, MissReason.ABSENT, MissReason.EVICTED}
    assert {s["name"]: s["revision"] for s in admin.namespaces()}["changing"] == 5


def test_of_two_changes_at_once_none_is_lost(cluster: LocalCluster, admin: Client) -> None:
    admin.create_namespace("contended", level="session")
    done: list[str] = []
    refused: list[str] = []

    def change(number: int) -> None:
        with client_of(cluster, f"n{number % 3 + 1}", "") as client:
            for turn in range(5):
                owner = f"o{number}-{turn}"
                try:
                    client.set_namespace("contended", owner=owner)
                    done.append(owner)
                except Unavailable as error:
                    refused.append(str(error))

    threads = [threading.Thread(target=change, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) + len(refused) == 30
    assert all("changed meanwhile: look and try again" in text for text in refused)
    (space,) = [space for space in admin.namespaces() if space["name"] == "contended"]
    assert space["revision"] == len(done), "each acknowledged change is one revision"
    assert space["owner"] in done
    with pytest.raises(Unavailable, match="changed meanwhile"):
        admin.set_namespace("contended", owner="late", revision=space["revision"] - 1)
    assert admin.set_namespace("contended", owner="now", revision=space["revision"])["owner"] == "now"


def test_dropped_under_load_and_created_anew(cluster: LocalCluster, admin: Client) -> None:
    admin.create_namespace("doomed", level="session")
    with client_of(cluster, "n2", "doomed") as reader:
        with Load(cluster, "n1", "doomed", prefix="d") as load_:
            eventually("some puts", lambda: len(load_.outcomes) >= 20)
            assert reader.get_many([key_of("d-0")])[0]
            dropped = admin.drop_namespace("doomed")["namespace"]
            assert dropped["dropped"]
            moment = time.monotonic() + 0.2
            eventually("puts after the drop", lambda: len(load_.since(moment)) >= 3)
        assert load_.wrong == []
        assert {outcome.status for outcome in load_.since(moment)} == {PutStatus.REFUSED}
        assert not any(load_.since(moment))
        told = reader.get_many([key_of("d-0")])[0]
        assert not told
        assert told.reason is MissReason.NO_NAMESPACE, "an old connection hears why"
    with pytest.raises(HandshakeRefused, match="does not exist"):
        client_of(cluster, "n3", "doomed")
    made = admin.create_namespace("doomed", level="session")
    assert (made["generation"], made["revision"]) == (2, 2)
    keys = [key_of(f"d-{number}") for number in range(20)]
    for name in ("n1", "n2", "n3"):
        with client_of(cluster, name, "doomed") as client:
            assert not any(client.get_many(keys, deadline_ms=2000)), "the new generation is empty"
            assert not any(client.exists_many(keys))
    with client_of(cluster, "n1", "doomed") as client:
        assert put(client, "d-0").status is PutStatus.STORED
        assert client.get_many([key_of("d-0")])[0]


def test_blocks_expire_by_their_namespace(cluster: LocalCluster, admin: Client) -> None:
    admin.create_namespace("short", level="session", expiry="2s")
    with client_of(cluster, "n1", "short") as client, client_of(cluster, "n2", "short") as other:
        assert put(client, "old")
        assert client.get_many([key_of("old")])[0]
        for each in (client, other):
            eventually("it expires", lambda each=each: not each.get_many([key_of("old")])[0])
        settled(cluster, admin.set_namespace("short", expiry="0"))
        assert put(client, "new")
        time.sleep(3)
        assert client.get_many([key_of("new")])[0], "blocks put under the new policy stay"


# -- the command line ------------------------------------------------------------------------------------------------


def test_commands(cluster: LocalCluster) -> None:
    made = json.loads(
        run(cluster, "namespace", "create", "cli", "--level", "session", "--expiry", "90s", "--json").stdout
    )
    assert (made["namespace"]["name"], made["namespace"]["expiry"]) == ("cli", "90s")
    table = run(cluster, "namespace", "list").stdout
    assert "cli" in table
    assert "session" in table
    assert max(map(len, table.splitlines())) <= 80
    changed = run(cluster, "namespace", "set", "cli", "--min-copies", "2", "--owner", "me")
    assert "namespace cli: changed, generation 1, revision 1" in changed.stdout
    refused = run(cluster, "namespace", "set", "cli", "--min-copies", "3", code=2).stderr
    assert refused.startswith("emberkv: min_copies: 3 copies asked by namespace 'cli', but factor is 2")
    assert (
        "changed meanwhile" in run(cluster, "namespace", "set", "cli", "--owner", "x", "--revision", "0", code=1).stderr
    )
    assert "say --yes" in run(cluster, "namespace", "drop", "cli", code=2).stderr
    run(cluster, "namespace", "drop", "cli", "--yes")
    shown = json.loads(run(cluster, "namespace", "list", "--json").stdout)["namespaces"]
    assert "cli" not in {space["name"] for space in shown}
    everything = json.loads(run(cluster, "namespace", "list", "--all", "--json").stdout)["namespaces"]
    assert {space["name"]: space["dropped"] for space in everything}["cli"] is True
    assert "does not exist" in run(cluster, "namespace", "drop", "cli", "--yes", code=2).stderr
    assert json.loads(run(cluster, "status", "--json").stdout)["cluster"]["nodes_up"] == 3, "no namespace is needed"


def test_a_budget_that_is_at_risk_is_said_once(tmp_path: Path) -> None:
    settings = {"costs": Costs(commit_ms=0.001), "heartbeat": "100ms"}
    with LocalCluster(tmp_path, 1, arena_bytes=16 * MIB, cluster_settings=settings) as single:
        single.wait_ready(60)
        eventually("it is noticed", lambda: bool(single.statuses()[0]["budget"]["at_risk"]))
        time.sleep(3)  # the next looks say nothing new
        assert "coordinator commit" in single.statuses()[0]["budget"]["at_risk"][0]
        lines = single.node("n1").log_path.read_text().splitlines()
        assert len([line for line in lines if "budget at risk: coordinator commit" in line]) == 1
