"""The command line with real processes: what works, what each mistake says, and that nothing is left behind."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from emberkv.cli.cluster import LocalCluster
from emberkv.cli.namespace import render as namespace_table
from emberkv.cli.output import human_count
from emberkv.cli.status import render, summarize
from emberkv.config import load, write
from emberkv.errors import ConfigError, NameInUse, Unavailable
from emberkv.types import BLOCK_BYTES_MAX

pytestmark = pytest.mark.timeout(90)
ARENA = 64 << 20
COMMAND = [sys.executable, "-m", "emberkv.cli.main"]


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EMBERKV_")}
    return {**clean, "XDG_STATE_HOME": str(tmp_path / "state"), "COLUMNS": "80", **more}


def run(tmp_path: Path, *arguments: object, stdin: bytes = b"", **more: str) -> subprocess.CompletedProcess[bytes]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60, env=environment(tmp_path, **more))


def refused(result: subprocess.CompletedProcess[bytes], code: int = 2) -> str:
    """The one line of a command that failed as it should."""
    error = result.stderr.decode()
    assert result.returncode == code, error
    assert error.startswith("emberkv: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error.strip()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cli"), 3, arena_bytes=ARENA) as started:
        started.wait_ready(30)
        yield started


@pytest.fixture
def endpoints(cluster: LocalCluster) -> str:
    return ",".join(cluster.endpoints())


# ------------------------------------------------------------------------------------------------ without a cluster


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pput"], "No such command 'pput'"),
        (["put"], "Missing argument 'KEY' (see `emberkv put --help`)"),
        (["get", "a", "--levle", "x"], "No such option"),
        (["up", "--nodes", "0"], "'--nodes': Input should be greater than or equal to 1"),
        (["up", "--nodes", "three"], "'--nodes': Input should be a valid integer"),
        (["up", "--arena", "huge"], "'huge' is not a size"),
        (["up", "--arena", "100TiB"], "lower --arena or --nodes"),
        (["up", "--budget", "100ms"], "the smallest is 1s"),
        (["up", "--cluster-id", "a/b"], "cluster_id: 'a/b' is not a name"),
        (["node", "--config", "/does/not/exist"], "cannot read the configuration /does/not/exist"),
        (["budget", "soon"], "'soon' is not a duration"),
        (["budget", "0"], "failover budget 0s: it must be above 0 and at most 1h"),
        (["budget", "10h"], "failover budget 36000s: it must be above 0 and at most 1h"),
        (["budget", "3s", "--drift", "0.5"], "drift"),
        (["sim", "--story"], "name it with --seed"),
        (["sim", "--seeds", "0"], "no seed to run: give --seeds, --fresh or --seed"),
        (["sim", "--seed", "-1"], "--seed: -1 is below 0"),
        (["budget", "3s", "--lateness-ms", "nan"], "lateness_ms"),
        (["get", "a"], "no cluster is known: start one with `emberkv up`"),
        (["status"], "no cluster is known"),
        (["get", "ab" * 31], "has 62 hex digits; a key has 64"),
        (["put", "ab" * 33, "-"], "has 66 hex digits; a key has 64"),
        (["get", ""], "the key is empty"),
        (["get", "a", "--level", "hard"], "'hard' is not one of eventual, session, strong"),
        (["get", "a", "--endpoint", "nowhere"], "'nowhere' is neither unix:/path nor tcp:host:port"),
        (["get", "a", "--endpoint", "unix:x.sock"], "must be absolute"),
        (["put", "a", "/does/not/exist"], "cannot read /does/not/exist: No such file"),
        (["put", "a", "-"], "standard input is empty"),
        (["bench", "wir"], "no benchmark is called 'wir'; did you mean 'wire'?"),
        (["bench", "wire", "--quik"], "did you mean --quick?"),
        (["bench", "wire", "extra"], "unexpected argument 'extra'"),
        (["demo", "--sessions", "many"], "--sessions: 'many' is not a number"),
        (["demo", "--sessions"], "--sessions needs a value"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(tmp_path, *arguments)
    assert message in refused(result)
    assert result.stdout == b""


def test_help_version_and_light_start(tmp_path: Path) -> None:
    assert b"Commands:" in run(tmp_path).stdout
    assert run(tmp_path, "--version").stdout.startswith(b"emberkv ")
    assert b"Usage: emberkv up" in run(tmp_path, "up", "--help").stdout
    assert b"Usage: emberkv namespace" in run(tmp_path, "namespace").stdout
    assert b"benchmarks: " in run(tmp_path, "bench").stdout
    assert b"--sessions INT" in run(tmp_path, "demo", "--help").stdout
    probe = "import sys, emberkv.cli.main; print([m for m in ('numpy', 'torch', 'transformers') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, env=environment(tmp_path))
    assert loaded.stdout == b"[]\n"


BROKEN_ROOMS = """
import sys

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("emberkv.sim", "emberkv.bench.", "emberkv.demo.", "emberkv.connectors")):
            raise SyntaxError(f"{name} is broken")

sys.meta_path.insert(0, Broken())
from emberkv.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--help", "Commands:"),
        ("budget 3s", "outage"),
        ("sim --help", "Usage: emberkv sim"),
        ("put --help", "Usage: emberkv put"),
        ("up --help", "Usage: emberkv up"),
    ],
)
def test_a_broken_tool_breaks_no_other_command(tmp_path: Path, arguments: str, words: str) -> None:
    command = [sys.executable, "-c", BROKEN_ROOMS, *arguments.split()]
    result = subprocess.run(command, capture_output=True, timeout=60, env=environment(tmp_path))
    assert result.returncode == 0, result.stderr.decode()
    assert words in result.stdout.decode()


def test_the_tool_that_is_broken_says_so(tmp_path: Path) -> None:
    """Which also shows that the rooms of the test above are truly broken."""
    command = [sys.executable, "-c", BROKEN_ROOMS, "sim", "--seeds", "1", "--jobs", "1"]
    result = subprocess.run(command, capture_output=True, timeout=60, env=environment(tmp_path))
    assert result.returncode != 0
    assert b"is broken" in result.stderr


def test_budget(tmp_path: Path) -> None:
    table = run(tmp_path, "budget", "3s").stdout.decode()
    assert all(word in table for word in ("worst case", "double fault", "back-off", "smallest feasible budget"))
    assert "embedded coordinator has no leader" in table
    document = json.loads(run(tmp_path, "budget", "3s", "--json").stdout)
    assert document["budget_ms"] == 3000
    assert sum(term["ms"] for term in document["terms"]) == pytest.approx(document["worst_case_ms"])
    assert document["smallest_budget_ms"] < 3000
    slow = json.loads(run(tmp_path, "budget", "9s", "--commit-ms", 400, "--election-ms", 2000, "--json").stdout)
    assert slow["smallest_budget_ms"] > document["smallest_budget_ms"]
    assert slow["double_fault_ms"] > 11_000


def test_an_endpoint_where_nobody_answers(tmp_path: Path) -> None:
    refused(run(tmp_path, "status", "--endpoint", f"unix:{tmp_path}/no.sock", "--json"), 1)
    result = run(tmp_path, "get", "a", "--endpoint", f"unix:{tmp_path}/no.sock", "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["reason"] == "unreachable"
    # Each address once, with the reason, whatever the command.
    where = ["--endpoint", f"unix:{tmp_path}/no.sock", "--endpoint", "127.0.0.1:1"]
    for words in (["put", "a", "-"], ["get", "a"], ["status"], ["namespace", "list"], ["drain", "n1"]):
        message = refused(run(tmp_path, *words, *where, stdin=b"x"), 1)
        assert message.count(f"{tmp_path}/no.sock") == 1, message
        assert message.count("127.0.0.1:1") == 1, message
        assert "No such file or directory" in message
        assert "Connection refused" in message


# --------------------------------------------------------------------------------------------------- with a cluster


def test_put_get_delete(tmp_path: Path, endpoints: str) -> None:
    data = os.urandom(300_000)
    (tmp_path / "in").write_bytes(data)
    stored = run(
        tmp_path,
        "put",
        "greeting",
        tmp_path / "in",
        "--level",
        "session",
        "--min-copies",
        2,
        "--json",
        EMBERKV_ENDPOINTS=endpoints,
    )
    document = json.loads(stored.stdout)
    assert (stored.returncode, document["status"], document["copies"], document["bytes"]) == (0, "stored", 2, len(data))
    assert document["key"] == hashlib.sha256(b"greeting").hexdigest()
    for endpoint in endpoints.split(","):  # any node serves it; the key may be given as digits, too
        assert run(tmp_path, "get", document["key"], "--endpoint", endpoint).stdout == data
    result = run(tmp_path, "get", "greeting", "-o", tmp_path / "out", EMBERKV_ENDPOINTS=endpoints)
    assert (result.returncode, result.stdout) == (0, b"")
    assert (tmp_path / "out").read_bytes() == data
    found = json.loads(run(tmp_path, "get", "greeting", "--json", EMBERKV_ENDPOINTS=endpoints).stdout)
    assert base64.b64decode(found["data_base64"]) == data
    assert found["version"] == document["version"]
    deleted = run(tmp_path, "delete", "greeting", "--level", "session", EMBERKV_ENDPOINTS=endpoints)
    assert deleted.returncode == 0
    assert deleted.stdout.startswith(b"delete: deleted, version ")
    assert "miss: deleted" in refused(run(tmp_path, "get", "greeting", EMBERKV_ENDPOINTS=endpoints), 1)
    assert "miss: absent" in refused(run(tmp_path, "get", "never", EMBERKV_ENDPOINTS=endpoints), 1)


def test_what_a_namespace_cannot_do_is_refused_with_the_fix(tmp_path: Path, endpoints: str) -> None:
    for words, message in (
        (["--level", "session", "--min-copies", "3"], "factor of namespace 'default' is 2"),
        (["--min-copies", "2"], "an eventual put waits for no copies: say --level session"),
        (["--level", "strong"], "namespace 'default' is eventual: say --level session, or create"),
    ):
        assert message in refused(run(tmp_path, "put", "k", "-", *words, stdin=b"v", EMBERKV_ENDPOINTS=endpoints))
    said = run(tmp_path, "put", "one", "-", "--level", "session", stdin=b"v", EMBERKV_ENDPOINTS=endpoints).stdout
    assert said.startswith(b"put: stored, version ")


def test_put_from_standard_input_and_over_tcp(tmp_path: Path, cluster: LocalCluster) -> None:
    tcp = cluster.statuses()[1]["addresses"]["tcp"]
    assert (
        run(tmp_path, "put", "piped", "-", "--level", "session", "--endpoint", f"tcp:{tcp}", stdin=b"abc").returncode
        == 0
    )
    assert run(tmp_path, "get", "piped", "--endpoint", tcp).stdout == b"abc"


def test_values_over_the_limit(tmp_path: Path, endpoints: str) -> None:
    (tmp_path / "big").write_bytes(bytes(BLOCK_BYTES_MAX + 1))
    message = refused(run(tmp_path, "put", "big", tmp_path / "big", EMBERKV_ENDPOINTS=endpoints))
    assert f"larger than one block may have ({BLOCK_BYTES_MAX} bytes)" in message


def test_status(tmp_path: Path, cluster: LocalCluster, endpoints: str) -> None:
    document = json.loads(run(tmp_path, "status", "--json", EMBERKV_ENDPOINTS=endpoints).stdout)
    assert document["cluster"]["nodes_up"] == 3
    assert document["cluster"]["primaries"] == 256
    assert document["cluster"]["cluster_id"] == [cluster.config.cluster_id]
    assert sorted(node["node"] for node in document["nodes"]) == ["n1", "n2", "n3"]
    # The same node by two names counts once; one that does not answer is shown as such.
    tcp = cluster.statuses()[0]["addresses"]["tcp"]
    more = f"{endpoints},tcp:{tcp},unix:{tmp_path}/gone.sock"
    text = run(tmp_path, "status", EMBERKV_ENDPOINTS=more).stdout.decode()
    assert "3 of 4 nodes answer" in text
    assert any(line.split()[:2] == ["gone", "down"] for line in text.splitlines())
    assert all(word in text for word in ("n1", "member", "epochs", "misses:"))
    assert all(len(line) <= 80 or "gone.sock" in line for line in text.splitlines())
    assert "…" not in text


def test_status_of_a_loaded_cluster_fits_into_a_terminal(cluster: LocalCluster) -> None:
    """While nodes drain, are down and hold much, is every count still there, uncut?"""
    busy = {
        "node": "storage-07",
        "phase": "member",
        "draining": True,
        "shards": {"primary": 131, "backup": 125, "learner": 104},
        "entries": 1_234_567,
        "bytes_used": 1001 << 20,
        "bytes_total": 1001 << 30,
        "prefaulted_bytes": 1001 << 30,
        "hints": 16_384,
        "lag": 12_345,
        "misses": {"absent": 7_654_321},
        "counters": {"get_hits": 123_456_789},
    }
    nodes = [{**document, **busy} for document in cluster.statuses()]
    nodes.append({"endpoint": "tcp:127.0.0.1:65535", "error": "cannot reach 127.0.0.1:65535: Connection refused"})
    table, _ = render({"cluster": summarize(nodes), "nodes": nodes})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("\u2026" in line for line in lines)
    (down,) = [line for line in lines if " down " in line]
    assert down.split()[1] == "down"
    for line in (line for line in lines if "draining" in line):
        assert "131+125+104" in line
        assert "1001M/1001G" in line


def test_namespaces_fit_into_a_terminal() -> None:
    long = {"name": "a" * 64, "level": "eventual", "owner": "o" * 64, "dropped": True, "factor": 2, "min_copies": 1}
    long |= {"block_bytes_max": 1000 << 10, "verify": "entry", "expiry": "1500ms", "generation": 12, "revision": 345}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(namespace_table([long, {**long, "name": "chat", "owner": ""}]))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "\u2026" not in text
    words = {word for line in text.splitlines() for word in line.split()}
    assert {"namespace", "owner", "factor", "copies", "verify", "expiry", "(dropped)", "1000", "KiB", "1500ms"} <= words
    folded = [word for line in text.splitlines() for word in line.split()[:1] if set(word) == {"a"}]
    assert "".join(folded) == "a" * 64
    assert human_count(9999) == "9999"
    assert [human_count(n) for n in (10_000, 99_999, 100_000, 999_999, 1_000_000)] == [
        "10.0k", "99.9k", "100k", "999k", "1.0M",
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------------------- emberkv up


class Up:
    """`emberkv up --json` as a user runs it, in a terminal's place."""

    def __init__(self, tmp_path: Path, *arguments: object, **more: str) -> None:
        command = [*COMMAND, "up", "--json", "--arena", "32MiB", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(tmp_path, **more)
        )
        self.document: dict[str, Any] = {}

    def ready(self) -> Up:
        """Reads until the JSON document is complete."""
        assert self.process.stdout is not None
        text = b""
        for line in self.process.stdout:
            text += line
            if line == b"}\n":
                break
        if not text:
            pytest.fail(f"up said nothing: {self.process.communicate()[1].decode()}")
        self.document = json.loads(text)
        return self

    @property
    def pids(self) -> list[int]:
        return [node["pid"] for node in self.document["nodes"]]

    @property
    def sockets(self) -> list[Path]:
        return [Path(node["local"].removeprefix("unix:")) for node in self.document["nodes"]]

    def end(self, number: int) -> tuple[int, str]:
        """Sends a signal; the exit code and what was said, with nothing more on stdout."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=20)
        assert out == b""
        return self.process.returncode, err.decode()

    def __enter__(self) -> Up:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    """Do all these processes end within the time?"""
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=seconds)
    return not alive


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_up_and_ctrl_c_leave_nothing_behind(tmp_path: Path, number: int, code: int) -> None:
    with Up(tmp_path, "--cluster-id", "mine").ready() as up:
        assert up.document["cluster_id"] == "mine"
        assert sum(node["shards"]["primary"] for node in up.document["nodes"]) == 256
        assert str(tmp_path / "state") in up.document["directory"]
        control = load(up.document["nodes"][0]["config"])[0].control_path
        assert all(path.is_socket() for path in up.sockets)
        assert (control / "control.db").exists()
        # Without an endpoint, commands find the cluster that runs.
        assert run(tmp_path, "put", "k", "-", "--level", "session", stdin=b"v").returncode == 0
        assert run(tmp_path, "get", "k").stdout == b"v"
        returned, said = up.end(number)
    assert (returned, said.splitlines()) == (code, ["stopping ...", "stopped"])
    assert not any(psutil.pid_exists(pid) for pid in up.pids)
    assert not any(path.exists() for path in up.sockets)
    assert not control.exists()
    assert "no cluster is known" in refused(run(tmp_path, "get", "k"))


def test_up_again_on_the_same_directory(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    with Up(tmp_path, "--dir", directory, "--nodes", 1).ready() as up:
        assert "a cluster runs already in" in refused(run(tmp_path, "up", "--dir", directory))
        assert up.end(signal.SIGINT)[0] == 130
    with Up(tmp_path, "--dir", directory, "--nodes", 2).ready() as up:
        assert len(up.pids) == 2
        assert up.end(signal.SIGINT)[0] == 130


@pytest.mark.parametrize("delay_s", [0.05, 0.3, 0.6, 0.9])
def test_ctrl_c_while_starting(tmp_path: Path, delay_s: float) -> None:
    with Up(tmp_path, "--dir", tmp_path / "d") as up:
        time.sleep(delay_s)
        children = psutil.Process(up.process.pid).children()
        up.process.send_signal(signal.SIGINT)
        up.process.communicate(timeout=20)
        assert up.process.returncode in (130, -signal.SIGINT)  # the latter: before Python itself had started
    assert gone([child.pid for child in children], 0)
    assert not list((tmp_path / "d").glob("*.sock"))


def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with Up(tmp_path).ready() as up:
        os.kill(up.pids[1], signal.SIGSTOP)  # a frozen one, too
        up.process.kill()
        up.process.wait()
        assert gone(up.pids)
    # What it left (sockets, locks, a note) does not stop the next one.
    assert "no cluster is known" in refused(run(tmp_path, "get", "k"))
    with Up(tmp_path).ready() as up:
        assert up.end(signal.SIGINT)[0] == 130


def test_a_frozen_child_is_stopped(tmp_path: Path) -> None:
    with Up(tmp_path).ready() as up:
        os.kill(up.pids[0], signal.SIGSTOP)
        started = time.monotonic()
        assert up.end(signal.SIGINT)[0] == 130
        assert time.monotonic() - started < 8
        assert gone(up.pids, 0)


def test_a_killed_node_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    with Up(tmp_path).ready() as up:
        assert run(tmp_path, "put", "k", "-", "--level", "session", "--min-copies", 2, stdin=b"v").returncode == 0
        os.kill(up.pids[2], signal.SIGKILL)
        time.sleep(4)
        assert run(tmp_path, "get", "k").stdout == b"v"
        assert run(tmp_path, "put", "k", "-", "--level", "session", stdin=b"w").returncode == 0
        document = json.loads(run(tmp_path, "status", "--json").stdout)
        assert document["cluster"]["nodes_up"] == 2
        assert document["cluster"]["primaries"] == 256
        _, said = up.end(signal.SIGINT)
    assert f"node n3 (pid {up.pids[2]}) ended with signal 9; start it again with `emberkv node --config " in said


def test_progress_and_table_in_a_terminal(tmp_path: Path) -> None:
    main, other = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "up", "--arena", "32MiB"],
        stdin=other, stdout=other, stderr=other, env=environment(tmp_path, TERM="xterm"), start_new_session=True,
    )  # fmt: skip
    os.close(other)
    shown = b""
    try:
        while b"Ctrl-C stops it" not in shown:
            shown += os.read(main, 65536)
        process.send_signal(signal.SIGINT)
        while True:
            shown += os.read(main, 65536)
    except OSError:  # EIO: the other side is closed
        pass
    finally:
        os.close(main)
        assert process.wait(20) == 130
    assert b"is ready" in shown
    assert b"emberkv status" in shown
    assert b"Traceback" not in shown


# ------------------------------------------------------------------------------------------------------ emberkv node


def written(cluster: LocalCluster, tmp_path: Path, **changes: Any) -> Path:
    """A file for one more process like n1 of the running cluster, with other settings."""
    import msgspec

    agreed, local = load(cluster.node("n1").config_path)
    fresh = {"data_dir": str(tmp_path / "fresh"), "socket": str(tmp_path / "fresh.sock")}
    write(tmp_path / "node.toml", agreed, msgspec.structs.replace(local, **{**fresh, **changes}))
    return tmp_path / "node.toml"


def test_node_prints_its_checked_configuration(tmp_path: Path, cluster: LocalCluster) -> None:
    path = cluster.node("n2").config_path
    document = json.loads(run(tmp_path, "node", "--config", path, "--arena", "1GiB", "--json").stdout)
    assert document["node"]["arena_bytes"] == 1 << 30
    assert document["digest"] == cluster.config.digest()


def test_unknown_key_in_the_file(tmp_path: Path, cluster: LocalCluster) -> None:
    path = written(cluster, tmp_path)
    path.write_text(path.read_text().replace("arena_bytes", "arena_size"))
    message = refused(run(tmp_path, "node", "--config", path))
    assert f"{path}:" in message
    assert "unknown key 'arena_size'; did you mean 'arena_bytes'?" in message


def test_port_in_use(tmp_path: Path, cluster: LocalCluster) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = written(cluster, tmp_path, listen=f"127.0.0.1:{port}")
        message = refused(run(tmp_path, "node", "--config", path))
    assert str(port) in message
    assert "in use" in message


def test_arena_larger_than_memory(tmp_path: Path, cluster: LocalCluster) -> None:
    message = refused(run(tmp_path, "node", "--config", written(cluster, tmp_path), "--arena", "1TiB"))
    assert "more than this machine can give" in message


def test_a_directory_that_is_in_use(tmp_path: Path, cluster: LocalCluster) -> None:
    path = written(cluster, tmp_path, data_dir=str(cluster.directory / "n1"))
    assert "node 'n1' runs already on" in refused(run(tmp_path, "node", "--config", path))


def test_a_name_that_is_in_use(tmp_path: Path, cluster: LocalCluster) -> None:
    message = refused_last(run(tmp_path, "node", "--config", written(cluster, tmp_path)))
    assert "n1" in message
    assert cluster.node("n1").alive
    assert {document["phase"] for document in cluster.statuses()} == {"member"}


def refused_last(result: subprocess.CompletedProcess[bytes]) -> str:
    """As `refused`, for a node that had logged before it gave up."""
    assert result.returncode == 2, result.stderr.decode()
    assert b"Traceback" not in result.stderr
    last = result.stderr.decode().splitlines()[-1]
    assert last.startswith("emberkv: ")
    return last


def test_a_data_directory_of_another_node(tmp_path: Path, cluster: LocalCluster) -> None:
    directory = tmp_path / "stranger"
    directory.mkdir()
    (directory / "identity.json").write_text('{"format": 1, "cluster_id": "other", "node": "n1", "incarnation": "00"}')
    path = written(cluster, tmp_path, data_dir=str(directory))
    assert "belongs to node 'n1' of cluster 'other'" in refused(run(tmp_path, "node", "--config", path))


# ------------------------------------------------------------------------------------------------------ LocalCluster


def test_local_cluster_freeze_kill_restart(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "c", ["a", "b"], arena_bytes=ARENA) as cluster:
        cluster.wait_ready(30)
        first = cluster.node("a").pid
        cluster.kill("a", signal.SIGSTOP)
        assert cluster.node("a").alive
        assert len(cluster.statuses()) == 1
        cluster.kill("a")
        assert not cluster.node("a").alive
        cluster.kill("a")  # a second time harms nobody
        with pytest.raises(Unavailable, match="node a ended with signal 9"):
            cluster.wait_ready(1)
        cluster.restart("a")
        with pytest.raises(NameInUse):
            cluster.restart("a")
        cluster.wait_ready(30)
        assert cluster.node("a").pid != first
    cluster.stop()
    assert not any(node.alive for node in cluster.nodes)


def test_local_cluster_says_why_a_node_did_not_start(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = {"n2": {"listen": listen}}
        cluster = LocalCluster(tmp_path / "c", 2, arena_bytes=ARENA, settings_of=settings)
        with cluster, pytest.raises(ConfigError, match=r"node n2 ended with code 2: .*in use"):
            cluster.wait_ready(30)


def test_local_cluster_in_a_deep_directory(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / ("d" * 120), 1, arena_bytes=ARENA) as cluster:
        cluster.wait_ready(30)
        path = cluster.node("n1").config.socket_path
        assert path.is_socket()
    assert not path.parent.exists()
