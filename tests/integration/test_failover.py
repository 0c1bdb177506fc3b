"""Failover on real processes: under disk load, of several nodes in turn, and back."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from emberkv import Client, Level, PutStatus
from emberkv.cli.cluster import LocalCluster
from emberkv.types import shard_of
from harness.blocks import eventually, key_of, names_in_shards, value_of

MIB = 1 << 20
BUDGET_S = 3.0


def shards_of(client: Client, node: str) -> set[int]:
    """Shards that a node is primary of."""
    return {s for s, owner in enumerate(client.cluster_map().owners) if owner is not None and owner.primary == node}


def outage_s(cluster: LocalCluster, victim: str, number: int, give_up_s: float = 20.0) -> float:
    """Seconds from the signal to the first acknowledged session put, maximum over the victim's shards."""
    others = [node.endpoint for node in cluster.nodes if node.name != victim]
    with Client(others) as client:
        names = names_in_shards(f"outage-{victim}-{time.monotonic()}", shards_of(client, victim))
        assert names, "the victim must be primary of something"
        assert client.put_many([(key_of("warm"), b"w")], level=Level.SESSION)[0]
        begun = time.monotonic()
        cluster.kill(victim, number)
        waiting, last = list(names), 0.0
        while waiting and time.monotonic() - begun < give_up_s:
            items = [(key_of(name), value_of(name, 4096)) for name in waiting]
            outcomes = client.put_many(items, level=Level.SESSION, deadline_ms=50)
            acked = {name for name, out in zip(waiting, outcomes, strict=True) if out.status is PutStatus.STORED}
            if acked:
                last = time.monotonic() - begun
            waiting = [name for name in waiting if name not in acked]
            time.sleep(0.01)
        assert not waiting, f"{len(waiting)} shards never came back"
        return last


@contextmanager
def disk_load(directory: Path) -> Iterator[None]:
    """fio writes 4 MiB blocks at depth 16 around the page cache, on the disk of `directory`."""
    fio = shutil.which("fio")
    if fio is None:
        pytest.skip("fio is not installed (scripts/system_packages.sh installs it)")
    command = [fio, "--name=load", f"--directory={directory}", "--rw=write", "--bs=4M", "--iodepth=16", "--direct=1"]
    command += ["--ioengine=libaio", "--size=512M", "--time_based", "--runtime=40", "--end_fsync=1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(1.0)
        assert process.poll() is None, "fio did not start"
        yield
    finally:
        process.terminate()
        process.wait(20)


def test_failover_within_budget_while_the_disk_is_saturated(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, 3, arena_bytes=64 * MIB, failover_budget=f"{BUDGET_S}s") as cluster:
        cluster.wait_ready(60)
        with disk_load(tmp_path):
            measured = [outage_s(cluster, "n1", signal.SIGKILL)]
            cluster.restart("n1")
            eventually("n1 is back", lambda: len(cluster.statuses()) == 3)
            eventually("a third member", lambda: all(len(d["live_nodes"]) == 3 for d in cluster.statuses()))
            eventually("in sync again", lambda: all(d["lag"] == 0 for d in cluster.statuses()))
            measured.append(outage_s(cluster, "n2", signal.SIGKILL))
    print(f"outage under disk load: {measured} s, budget {BUDGET_S} s")
    # Both are meant to be inside; a shared machine may stall one of them, but not both and not for twice the budget.
    assert min(measured) <= BUDGET_S
    assert max(measured) <= 2 * BUDGET_S


def test_a_frozen_primary_is_replaced_and_comes_back_as_a_learner(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, 3, arena_bytes=64 * MIB, failover_budget=f"{BUDGET_S}s") as cluster:
        cluster.wait_ready(60)
        assert outage_s(cluster, "n3", signal.SIGSTOP) <= 2 * BUDGET_S
        cluster.kill("n3", signal.SIGCONT)
        eventually("a member again", lambda: all(len(d["live_nodes"]) == 3 for d in cluster.statuses()))
        eventually("lease open", lambda: all(d["lease_open"] for d in cluster.statuses()))
        frozen = next(d for d in cluster.statuses() if d["node"] == "n3")
        assert frozen["counters"]["lease_lost"] == 1
        assert frozen["shards"]["primary"] == 0


def test_a_put_that_a_frozen_node_finds_later_overwrites_nothing(tmp_path: Path) -> None:
    """Its client went elsewhere and was answered; others have put since."""
    with LocalCluster(tmp_path, 3, arena_bytes=64 * MIB, failover_budget="20s") as cluster:
        cluster.wait_ready(60)
        endpoints = {node.name: node.endpoint for node in cluster.nodes}
        with Client([endpoints["n1"], endpoints["n3"]], prefer_local=False) as early, Client([endpoints["n2"]]) as late:
            key = key_of(next(iter(names_in_shards("frozen", shards_of(late, "n2")))))
            assert early.put_many([(key_of("warm"), b"w")], level=Level.SESSION)[0]
            cluster.kill("n1", signal.SIGSTOP)
            try:
                first = early.put_many([(key, b"early")], level=Level.SESSION, deadline_ms=4000)[0]
                assert first.status is PutStatus.STORED
                session = late.session()
                assert session.put_many([(key, b"later")])[0].status is PutStatus.STORED
            finally:
                cluster.kill("n1", signal.SIGCONT)
            with Client([endpoints["n1"]]) as woken:
                woken.exists_many([key])  # by then the old request, which came before, has had its turn as well
            time.sleep(0.5)
            (found,) = session.get_many([key])
            assert found
            assert bytes(found.data) == b"later"


def test_the_cluster_survives_the_loss_of_all_but_one(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, 3, arena_bytes=64 * MIB, failover_budget="1.5s") as cluster:
        cluster.wait_ready(60)
        outage_s(cluster, "n1", signal.SIGKILL)
        outage_s(cluster, "n2", signal.SIGKILL)
        with Client([cluster.node("n3").endpoint]) as client:
            assert len(shards_of(client, "n3")) == 256
            outcome = client.put_many([(key_of("alone"), b"a")], level=Level.SESSION)[0]
            assert (outcome.status, outcome.copies) == (PutStatus.STORED, 1)


def test_a_frozen_peer_costs_a_healthy_one_nothing(tmp_path: Path) -> None:
    """A load through an empty near node asks both holders at once: what the healthy one has arrives in time."""
    names = [f"far-{index}" for index in range(32)]
    keys = [key_of(name) for name in names]
    # A long budget, so that nobody is expired while frozen: the holders stay the sources that are asked.
    with LocalCluster(tmp_path, 3, arena_bytes=64 * MIB, failover_budget="20s") as cluster:
        cluster.wait_ready(60)
        with Client([cluster.node("n1").endpoint]) as client:
            owners = client.cluster_map().owners
            items = [(key, value_of(name, 65536)) for key, name in zip(keys, names, strict=True)]
            assert all(client.put_many(items, level=Level.SESSION, min_copies=2, deadline_ms=5000))
        with Client([cluster.node("n3").endpoint]) as near:
            near.exists_many(keys)  # connected
            here = [at for at, key in enumerate(keys) if "n3" in owners[shard_of(key)].replicas]
            only_n1_n2 = [at for at in range(len(keys)) if at not in here]
            assert only_n1_n2, "some blocks must lie elsewhere alone"
            cluster.kill("n2", signal.SIGSTOP)
            try:
                found = near.get_many(keys, deadline_ms=8000)
            finally:
                cluster.kill("n2", signal.SIGCONT)
            missed = [names[at] for at, block in enumerate(found) if not block]
            assert not missed, "n1 holds every block and is healthy"
            for name, block in zip(names, found, strict=True):
                assert bytes(block.data) == value_of(name, 65536)
