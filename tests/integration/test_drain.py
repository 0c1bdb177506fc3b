"""Planned drain on real nodes: the shards move while requests go on, then the node can be stopped unnoticed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emberkv import Client, Level, PutStatus
from emberkv.cli.cluster import LocalCluster
from emberkv.errors import ConfigError
from emberkv.types import SHARDS
from harness.blocks import eventually, key_of, value_of

pytestmark = pytest.mark.timeout(180)
MIB = 1 << 20
SIZE = 64 << 10
COMMAND = [sys.executable, "-m", "emberkv.cli.main"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path, 3, arena_bytes=128 * MIB) as started:
        started.wait_ready(60)
        yield started


def run(cluster: LocalCluster, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "EMBERKV_ENDPOINTS": ",".join(cluster.endpoints()), "COLUMNS": "80"}
    ended = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended


def status(cluster: LocalCluster, name: str) -> dict[str, Any]:
    return next(document for document in cluster.statuses() if document["node"] == name)


def test_a_drained_node_is_stopped_without_a_failed_request(cluster: LocalCluster) -> None:
    names = [f"drain-{number}" for number in range(64)]
    with Client(cluster.endpoints()) as client:
        blocks = [(key_of(name), value_of(name, SIZE)) for name in names]
        assert all(client.put_many(blocks, level=Level.SESSION, min_copies=2, deadline_ms=10_000))
    stop = threading.Event()
    outcomes: Counter[PutStatus] = Counter()
    lost: list[str] = []

    def load() -> None:
        number = 0
        with Client([cluster.node("n2").endpoint, cluster.node("n3").endpoint]) as client:
            while not stop.is_set():
                number += 1
                item = (key_of(f"during-{number}"), b"x" * SIZE)
                outcomes[client.put_many([item], level=Level.SESSION, deadline_ms=5000)[0].status] += 1
                name = names[number % len(names)]
                if not client.get_many([key_of(name)], level=Level.SESSION, deadline_ms=5000)[0]:
                    lost.append(name)

    worker = threading.Thread(target=load)
    worker.start()
    try:
        document = json.loads(run(cluster, "drain", "n1", "--wait", "--timeout-s", "90", "--json").stdout)
        assert (document["primary"], document["replica"], document["drained"]) == (0, 0, True)
        eventually("n1 knows", lambda: status(cluster, "n1")["draining"])
        assert status(cluster, "n1")["shards"]["primary"] == 0
        assert status(cluster, "n2")["draining_nodes"] == ["n1"]
        cluster.kill("n1", signal.SIGTERM)
        eventually("n1 is gone", lambda: not cluster.node("n1").alive)
        eventually("the rest goes on", lambda: outcomes[PutStatus.STORED] > 20)
    finally:
        stop.set()
        worker.join(30)
    assert set(outcomes) == {PutStatus.STORED}, outcomes
    assert lost == []


def test_undo_lets_the_node_take_part_again(cluster: LocalCluster) -> None:
    with Client(cluster.endpoints(), namespace="") as admin:
        admin.drain("n2")
        eventually("it gives shards away", lambda: admin.drain_status("n2")["primary"] < SHARDS // 4)
        assert admin.drain("n2", undo=True) == {"node": "n2", "draining": False}
        eventually("it is not draining", lambda: not admin.drain_status("n2")["draining"])
        assert "takes part again" in run(cluster, "drain", "n2", "--undo").stdout, "twice is no mistake"
        eventually("it takes shards again", lambda: admin.drain_status("n2")["primary"] > 0, 60)


def test_a_drain_is_of_one_life(cluster: LocalCluster) -> None:
    with Client(cluster.endpoints(), namespace="") as admin:
        admin.drain("n3")
        assert admin.drain_status("n3")["draining"]
        cluster.kill("n3")
        cluster.restart("n3")
        eventually("its next life takes part", lambda: status_or_none(cluster, "n3").get("phase") == "member")
        eventually("and is not draining", lambda: not admin.drain_status("n3")["draining"])


def status_or_none(cluster: LocalCluster, name: str) -> dict[str, Any]:
    return next((document for document in cluster.statuses() if document["node"] == name), {})


def test_what_cannot_be_drained_is_said(cluster: LocalCluster) -> None:
    with Client(cluster.endpoints(), namespace="") as admin:
        with pytest.raises(ConfigError, match="node 'n9' is not alive; alive: n1, n2, n3"):
            admin.drain("n9")
        admin.drain("n1")
        admin.drain("n2")
        with pytest.raises(ConfigError, match="node 'n3' is the only one that is alive and not draining"):
            admin.drain("n3")
    assert "--undo has nothing to wait for" in run(cluster, "drain", "n1", "--undo", "--wait", code=2).stderr
    assert "'n9' is not alive" in run(cluster, "drain", "n9", code=2).stderr
