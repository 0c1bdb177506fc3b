"""Bad input, one test each: a clear line, an end that is not a traceback, and nothing else affected."""

from __future__ import annotations

import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from emberkv import Client, Level, MissReason, PutStatus, RefuseReason
from emberkv.cli.cluster import LocalCluster
from emberkv.cli.probe import fetch_status
from emberkv.config import ClusterConfig, NodeConfig, write
from emberkv.errors import Unavailable
from emberkv.messages import GetRequest, Hello, PutFlag, PutItem, PutRequest, Role
from emberkv.net.local_link import LocalLink, close_fds, connect_local
from emberkv.net.tcp import TcpLink, connect
from emberkv.types import BLOCK_BYTES_MAX
from emberkv.wire.codec import encode
from harness.blocks import eventually, key_of, names_in_shards, value_of

MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("bad"), 1, arena_bytes=64 * MIB) as started:
        started.wait_ready(30)
        yield started


def node_config(directory: Path, name: str = "n1", **settings: object) -> Path:
    """A node of its own cluster, as a file for `emberkv node --config`."""
    file = directory / f"{name}.toml"
    cluster = ClusterConfig(
        cluster_id="bad-input",
        members=["n1"],
        factor=1,
        control_dir=str(directory / "control"),
        data_dir=str(directory / "coordinator"),
    )
    fields = {"name": name, "data_dir": str(directory / name), "arena_bytes": 16 * MIB, **settings}
    write(file, cluster, NodeConfig(**fields))  # type: ignore[arg-type]
    return file


def run_node(file: Path, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "emberkv.cli.main", "node", "--config", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def assert_one_clear_line(ended: subprocess.CompletedProcess[str], *words: str) -> None:
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("emberkv:")]
    assert len(lines) == 1, ended.stderr
    for word in words:
        assert word in lines[0]


def test_unknown_config_key(tmp_path: Path) -> None:
    file = node_config(tmp_path)
    file.write_text(file.read_text().replace("arena_bytes", "arena_byte"))
    assert_one_clear_line(run_node(file), "arena_byte", "arena_bytes")


def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_one_clear_line(run_node(node_config(tmp_path, listen=f"127.0.0.1:{port}")), str(port), "use")


def test_arena_larger_than_memory(tmp_path: Path) -> None:
    assert_one_clear_line(run_node(node_config(tmp_path, arena_bytes=1 << 45)), "arena")


def test_a_node_started_twice_with_one_name(tmp_path: Path) -> None:
    file = node_config(tmp_path)
    first = subprocess.Popen(
        [sys.executable, "-m", "emberkv.cli.main", "node", "--config", str(file)], stderr=subprocess.PIPE
    )
    try:
        sock = tmp_path / "n1" / "node.sock"
        eventually("the first one runs", sock.exists)
        assert_one_clear_line(run_node(file), "n1", "runs already")
        # The same name with another data directory holds no proof that the first is gone: it moves, so it is refused.
        (tmp_path / "other_dir_of").mkdir()
        other = node_config(tmp_path / "other_dir_of", "n1")
        text = other.read_text().replace(str(tmp_path / "other_dir_of" / "control"), str(tmp_path / "control"))
        text = text.replace(str(tmp_path / "other_dir_of" / "coordinator"), str(tmp_path / "coordinator"))
        other.write_text(text)
        assert_one_clear_line(run_node(other), "n1", "alive")
        assert first.poll() is None
        assert fetch_status(f"unix:{sock}", 1000)["lease_open"]
    finally:
        first.terminate()
        first.wait(10)


def test_a_node_whose_cluster_table_differs(tmp_path: Path) -> None:
    file = node_config(tmp_path)
    first = subprocess.Popen([sys.executable, "-m", "emberkv.cli.main", "node", "--config", str(file)])
    try:
        eventually("the first one runs", (tmp_path / "n1" / "node.sock").exists)
        (tmp_path / "second").mkdir()
        other = tmp_path / "second" / "n2.toml"
        text = file.read_text().replace(str(tmp_path / "n1"), str(tmp_path / "second" / "n2"))
        other.write_text(text.replace('"3s"', '"5s"'))
        assert_one_clear_line(run_node(other), "differs")
        assert first.poll() is None
    finally:
        first.terminate()
        first.wait(10)


def test_a_data_directory_that_cannot_be_written(tmp_path: Path) -> None:
    file = node_config(tmp_path)
    (tmp_path / "n1" / "identity.json.new").mkdir(parents=True)
    assert_one_clear_line(run_node(file), "identity.json", "directory")
    (tmp_path / "n1" / "identity.json").mkdir()
    assert_one_clear_line(run_node(file), "identity.json", "directory")


def test_a_coordinator_file_that_is_not_ours(tmp_path: Path) -> None:
    file = node_config(tmp_path)
    (tmp_path / "control").mkdir()
    stranger = tmp_path / "control" / "control.db"
    with sqlite3.connect(stranger) as database:
        database.execute("CREATE TABLE recipes(name TEXT)")
    before = stranger.read_bytes()
    assert_one_clear_line(run_node(file), "control.db")
    assert stranger.read_bytes() == before, "it is never overwritten"


def test_key_of_the_wrong_length_and_a_value_over_the_limit(cluster: LocalCluster) -> None:
    with Client([cluster.node("n1").endpoint]) as client:
        with pytest.raises(ValueError, match="32"):
            client.get_many([b"short"])
        with pytest.raises(ValueError, match="32"):
            client.put_many([(b"k" * 31, b"x")])
        with pytest.raises(ValueError, match=str(BLOCK_BYTES_MAX)):
            client.put_many([(key_of("big"), bytes(BLOCK_BYTES_MAX + 1))])
        assert client.put_many([(key_of("fine"), b"x")])[0]


def test_a_level_that_is_not_served_is_refused_not_lowered(cluster: LocalCluster) -> None:
    with Client([cluster.node("n1").endpoint]) as client:
        outcome = client.put_many([(key_of("strong"), b"x")], level=Level.STRONG)[0]
        assert (outcome.status, outcome.reason) == (PutStatus.REFUSED, RefuseReason.LEVEL_UNSUPPORTED)
        assert not client.get_many([key_of("strong")])[0]


def still_serves(cluster: LocalCluster) -> None:
    with Client([cluster.node("n1").endpoint]) as client:
        assert client.put_many([(key_of("alive"), b"yes")], level=Level.SESSION)[0].status is PutStatus.STORED
        assert bytes(client.get_many([key_of("alive")])[0].data) == b"yes"


def hello() -> Hello:
    return Hello(int(Role.CLIENT), 1, 1, "", "default", "", os.urandom(16), want_staging_bytes=64 * MIB)


def test_hostile_frames_close_their_connection_and_nothing_else(cluster: LocalCluster) -> None:
    chance = random.Random(7)
    address = fetch_status(cluster.node("n1").endpoint, 1000)["addresses"]["tcp"]
    host, port = address.rsplit(":", 1)
    good = encode(hello(), 0)
    with Client([f"tcp:{address}"]) as bystander:
        assert bystander.put_many([(key_of("bystander"), b"b")])[0]
        for turn in range(60):
            with socket.create_connection((host, int(port)), timeout=5) as raw:
                if turn % 3 == 0:
                    raw.sendall(chance.randbytes(chance.randrange(1, 200)))
                elif turn % 3 == 1:  # a good handshake, then a damaged frame
                    raw.sendall(good)
                    raw.recv(4096)
                    frame = bytearray(encode(GetRequest([key_of("x")] * 8), 1))
                    frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
                    raw.sendall(frame)
                else:  # a frame that stops in the middle
                    raw.sendall(good[: chance.randrange(1, len(good))])
                raw.settimeout(5)
                try:
                    raw.shutdown(socket.SHUT_WR)
                    while raw.recv(65536):
                        pass
                except OSError:
                    pass  # the node was first
        assert bytes(bystander.get_many([key_of("bystander")])[0].data) == b"b"
    still_serves(cluster)


def test_hostile_local_frames(cluster: LocalCluster) -> None:
    chance = random.Random(8)
    path = str(cluster.node("n1").config.socket_path)
    for _ in range(30):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
            raw.connect(path)
            try:
                raw.send(chance.randbytes(chance.randrange(1, 300)))
                raw.settimeout(5)
                raw.recv(65536)
            except (ConnectionResetError, BrokenPipeError):
                pass
    for request in (
        PutRequest([PutItem(key_of("oob"), os.urandom(24), 4096, offset=1 << 40)]),
        PutRequest([PutItem(key_of("oob"), os.urandom(24), 4 * MIB, offset=62 * MIB)]),
        GetRequest([key_of("nopin")]),
    ):
        link, _, arena_fd, staging_fd = connect_local(path, hello(), 2000)
        link.send(request, 1)
        link.set_recv_timeout_ms(5000)
        with pytest.raises(Exception, match=r"closed|lost|ended"):
            link.recv()
        link.close()
        close_fds([fd for fd in (arena_fd, staging_fd) if fd >= 0])
    still_serves(cluster)


def test_silent_local_connections_are_ended(cluster: LocalCluster) -> None:
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(5)]
    begun = time.monotonic()
    for one in silent:
        one.connect(str(cluster.node("n1").config.socket_path))
        one.settimeout(8)
    for one in silent:
        assert one.recv(65536) == b""
        one.close()
    assert time.monotonic() - begun < 6
    still_serves(cluster)


def delete_without_reading(link: LocalLink | TcpLink, keys: list[bytes]) -> None:
    """Sends session deletes as fast as they are taken, until the node ends the connection, and reads no answer."""
    link.set_send_timeout_ms(500)
    try:
        for number in range(4000):
            items = [PutItem(key, os.urandom(24), 0) for key in keys]
            link.send(PutRequest(items, int(Level.SESSION), 2000, int(PutFlag.FRESH), 1, b"", True), number)
    except Unavailable:
        pass


def test_clients_that_take_no_answers_do_not_hold_up_the_node(tmp_path: Path) -> None:
    """Answers of puts leave from the threads that serve peers and time; those must never wait for a client."""
    with LocalCluster(tmp_path, 2, arena_bytes=32 * MIB, failover_budget="1.5s") as pair:
        pair.wait_ready(30)
        path, address = str(pair.node("n1").config.socket_path), pair.statuses()[0]["addresses"]["tcp"]
        with Client([pair.node("n1").endpoint]) as client:
            owners = client.cluster_map().owners
        far = {shard for shard, owner in enumerate(owners) if owner is not None and owner.primary == "n2"}
        keys = [key_of(name) for name in names_in_shards("far", far, per_shard=2)][:128]
        local, _, arena_fd, staging_fd = connect_local(path, hello(), 2000)
        close_fds([arena_fd, staging_fd])
        tcp, _ = connect(address, hello(), 2000)
        for link in (local, tcp):
            delete_without_reading(link, keys)
        eventually("nothing waits", lambda: all(d["writes"] == d["hints"] == 0 for d in pair.statuses()), 10)
        assert all(d["lease_open"] and not d["counters"].get("lease_lost") for d in pair.statuses())
        local.close()
        tcp.close()
        assert "does not take its answers" in pair.node("n1").log_path.read_text()


def test_truncated_put_over_tcp_stores_nothing(cluster: LocalCluster) -> None:
    address = fetch_status(cluster.node("n1").endpoint, 1000)["addresses"]["tcp"]
    used = fetch_status(cluster.node("n1").endpoint, 1000)["bytes_used"]
    link, _ = connect(address, hello(), 2000)
    frame = encode(PutRequest([PutItem(key_of("cut"), os.urandom(24), MIB)]), 1, MIB)
    os.write(link.fileno(), frame + bytes(1000))
    link.close()
    eventually("room is given back", lambda: fetch_status(cluster.node("n1").endpoint, 1000)["bytes_used"] <= used)
    with Client([cluster.node("n1").endpoint]) as client:
        assert not client.get_many([key_of("cut")])[0]


CLIENT_KILLED = """
import os, signal, sys, threading, time
from emberkv import Client
client = Client([sys.argv[1]], staging_bytes=32 << 20)
blob = os.urandom(4 << 20)
save = lambda: [client.put_many([(os.urandom(32), blob)] * 4) for _ in range(1000)]
threading.Thread(target=save, daemon=True).start()
time.sleep(0.3)
print("saving", flush=True)
time.sleep(60)
"""


def memfds(pid: int) -> int:
    count = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += "memfd" in os.readlink(fd)
        except OSError:
            continue
    return count


def test_a_client_killed_in_the_middle_of_a_save_leaves_no_staging(cluster: LocalCluster) -> None:
    node = cluster.node("n1")
    eventually("others are gone", lambda: fetch_status(node.endpoint, 1000)["connections"] <= 1)
    before = memfds(node.pid)
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", CLIENT_KILLED, node.endpoint], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline().strip() == b"saving"
        child.send_signal(signal.SIGKILL)
        child.wait()
    eventually("its staging is freed", lambda: memfds(node.pid) <= before)
    rss = psutil.Process(node.pid).memory_info().rss
    assert rss < 400 * MIB
    still_serves(cluster)


CLIENT_PINNED = """
import os, subprocess, sys, time
from emberkv import Client
client = Client([sys.argv[1]])
keys = [os.urandom(32) for _ in range(4)]
client.put_many([(key, b"x" * 4096) for key in keys])
pinned = client.pin_many(keys)
print(sum(view is not None for view in pinned.views), flush=True)
time.sleep(60)
"""


def test_pins_end_with_their_process(cluster: LocalCluster) -> None:
    node = cluster.node("n1")
    eventually("others are gone", lambda: fetch_status(node.endpoint, 1000)["connections"] <= 1)
    child = subprocess.Popen([sys.executable, "-c", CLIENT_PINNED, node.endpoint], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == b"4"
    assert fetch_status(node.endpoint, 1000)["pinned_bytes"] == 4 * 4096
    child.send_signal(signal.SIGKILL)
    child.wait()
    eventually("pins are gone", lambda: fetch_status(node.endpoint, 1000)["pinned_bytes"] == 0)


def test_a_forked_client_opens_its_own_connection(cluster: LocalCluster) -> None:
    with Client([cluster.node("n1").endpoint]) as client:
        assert client.put_many([(key_of("fork"), value_of("fork", 4096))])[0]
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:  # the child: its own connection, its own answer
            ok = bytes(client.get_many([key_of("fork")])[0].data) == value_of("fork", 4096)
            ok = ok and bool(client.put_many([(key_of("child"), b"c")])[0])
            os.write(writing, b"y" if ok else b"n")
            os._exit(0)
        os.close(writing)
        dest = np.zeros((1, 4096), np.uint8)
        for _ in range(50):
            assert client.get_into([key_of("fork")], dest, deadline_ms=2000).usable == 1
        assert os.read(reading, 1) == b"y"
        os.waitpid(pid, 0)
        assert bytes(client.get_many([key_of("child")])[0].data) == b"c"


def test_an_unreachable_cluster_is_a_miss_not_an_error(tmp_path: Path) -> None:
    with Client([f"unix:{tmp_path}/nobody.sock"]) as client:
        begun = time.monotonic()
        assert not client.get_many([key_of("x")], deadline_ms=300)[0]
        assert not client.put_many([(key_of("x"), b"x")], deadline_ms=300)[0]
        assert client.exists_many([key_of("x")], deadline_ms=300) == [False]
        assert time.monotonic() - begun < 5


def test_a_locked_coordinator_does_not_stop_reads(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, 2, arena_bytes=32 * MIB, failover_budget="1.5s") as pair:
        pair.wait_ready(30)
        with Client([pair.node("n1").endpoint]) as client:
            assert client.put_many([(key_of("kept"), b"k")], level=Level.SESSION, min_copies=2)[0].copies == 2
            database = sqlite3.connect(pair.config.control_path / "control.db", isolation_level=None)
            database.execute("BEGIN IMMEDIATE")  # a writer that was stopped inside its transaction
            time.sleep(2.5)
            assert not any(document["lease_open"] for document in pair.statuses()), "nobody can renew"
            assert bytes(client.get_many([key_of("kept")])[0].data) == b"k"
            assert client.put_many([(key_of("hinted"), b"h")])[0].status is PutStatus.ACCEPTED
            database.execute("ROLLBACK")
            database.close()
            eventually("leases again", lambda: all(document["lease_open"] for document in pair.statuses()))
            eventually("hints are delivered", lambda: all(document["hints"] == 0 for document in pair.statuses()))
            assert all(len(document["live_nodes"]) == 2 for document in pair.statuses()), "nobody was expired"


def test_pins_never_take_the_whole_arena(tmp_path: Path) -> None:
    """Many readers that pin what they may leave half of the arena to writers."""
    blob = os.urandom(MIB)
    keys = [key_of(f"held-{number}") for number in range(40)]
    with LocalCluster(tmp_path, 1, arena_bytes=64 * MIB) as alone:
        alone.wait_ready(30)
        endpoint = alone.node("n1").endpoint
        clients = [Client([endpoint], staging_bytes=4 * MIB) for _ in range(10)]
        try:
            assert all(clients[0].put_many([(key, blob) for key in keys], deadline_ms=5000))
            pinned = [client.pin_many(keys[at * 4 : at * 4 + 4]) for at, client in enumerate(clients)]
            assert fetch_status(endpoint, 1000)["pinned_bytes"] == 32 * MIB
            reasons = [reason for pins in pinned for reason in pins.reasons]
            assert reasons.count(MissReason.NONE) == 32
            assert reasons.count(MissReason.QUOTA) == 8
            assert all(clients[1].put_many([(key_of(f"room-{n}"), blob) for n in range(8)], deadline_ms=5000))
        finally:
            for client in clients:
                client.close()
