"""The benchmarks run, end cleanly and say what they are asked for. No figure is judged here: a test machine is busy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from emberkv.bench import plot, wire
from emberkv.bench.case import Goal, Rounds, make_case, percentile, take_turns
from emberkv.bench.gilcount import GilCounter
from emberkv.bench.node_process import BenchNode
from emberkv.bench.workload import make_blocks
from emberkv.errors import ConfigError

EXPECTED = {
    "tcp_get_32x1MiB",
    "tcp_get_64x64KiB",
    "tcp_get_4KiB",
    "tcp_get_32x1MiB_busy",
    "tcp_get_64x64KiB_busy",
    "local_pin_32_4KiB_p50",
    "local_pin_32_64KiB_p99",
    "local_pin_32_1MiB_p50",
    "local_pin_copy",
    "local_get_64x64KiB_busy",
    "save_through_staging",
    "save_submit_held",
    "local_load_gil_returns",
    "core_step_get_128",
    "core_step_put_128",
    "idle_connections",
    "heartbeat_lateness_p99",
}
REQUIRED = {"name", "value", "unit", "reference", "reference_value", "ratio", "goal", "ok"}


def children(pid: int) -> set[str]:
    """Command lines of the processes that have `pid` as their parent and are nodes or references of a benchmark."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, ValueError, IndexError):
            continue
        if parent == pid and "emberkv.bench" in command:
            found.add(command)
    return found


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "emberkv.bench.wire", "--json", "--quick"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tcp_get_32x1MiB" in done.stderr  # progress
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


@pytest.mark.timeout(300)
def test_wire_reports_every_case(report: dict[str, Any]) -> None:
    names = [case["name"] for case in report["cases"]]
    assert len(names) == len(set(names))
    assert set(names) >= EXPECTED
    for case in report["cases"]:
        assert set(case) >= REQUIRED
        assert case["value"] > 0, case
        assert bool(case["goal"]) == (case["ok"] is not None)
        if case["reference"]:
            assert case["reference_value"] > 0
            assert case["ratio"] > 0
    assert report["goals"] == sum(case["ok"] is not None for case in report["cases"])


def test_wire_is_not_absurd(report: dict[str, Any]) -> None:
    """Bounds that only a broken program misses, however busy the machine is."""
    cases = {case["name"]: case for case in report["cases"]}
    assert cases["local_load_gil_returns"]["value"] <= 4
    assert cases["tcp_get_32x1MiB"]["ratio"] > 0.02
    assert cases["local_pin_copy"]["ratio"] > 0.01
    assert cases["save_submit_held"]["value"] < 1000
    assert cases["heartbeat_lateness_p99"]["value"] < 2000
    assert cases["idle_connections"]["value"] < 60


def test_wire_leaves_nothing_behind(report: dict[str, Any], tmp_path: Path) -> None:
    assert report["cases"]
    with BenchNode(64 << 20, staging_bytes=1 << 20) as node:
        pid, directory = node.pid, Path(node.socket_path).parents[1]
        assert node.status()["shards"]["primary"] == 256
        assert children(os.getpid())
    assert not directory.exists()
    assert not Path(f"/proc/{pid}").exists()
    assert not children(os.getpid())


def test_a_node_ends_with_its_benchmark() -> None:
    """Killed without a chance to clean up, the benchmark takes its node along."""
    code = (
        "import os, signal\n"
        "from emberkv.bench.node_process import BenchNode\n"
        "node = BenchNode(64 << 20)\n"
        "print(node.pid, node.socket_path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid, socket_path = done.stdout.split()
    end = time.monotonic() + 20
    while time.monotonic() < end and Path(f"/proc/{pid}/cmdline").exists():
        if not Path(f"/proc/{pid}/cmdline").read_bytes():
            break  # a zombie that waits for init
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{pid}").exists()
    assert not Path(socket_path).parents[1].exists()


def test_wrong_options_are_one_line() -> None:
    with pytest.raises(ConfigError, match="no group 'disk'"):
        wire.run_cli(only="disk")
    with pytest.raises(ConfigError, match="--record"):
        wire.run_cli(quick=True, record=Path("x"))


def test_history_is_recorded_and_drawn(report: dict[str, Any], tmp_path: Path) -> None:
    history, drawing = tmp_path / "history.jsonl", tmp_path / "out" / "history.svg"
    for _ in range(3):
        wire.append(report, history)
    runs = plot.read(history)
    assert len(runs) == 3
    assert {"date", "commit", "machine", "cases"} <= set(runs[0])
    assert plot.run_cli(history=history, output=drawing) == 0
    svg = drawing.read_text()
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    for case in report["cases"]:
        assert case["name"] in svg
    history.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"history\.jsonl:1"):
        plot.read(history)


def test_goals_and_medians() -> None:
    assert Goal("ratio", ">=", 0.9).met(1.0, 0.91)
    assert not Goal("ratio", ">=", 0.9).met(1.0, None)
    assert Goal("value", "<=", 30).met(29.0, None)
    case = make_case("x", 2.0, "GB/s", reference="r", reference_value=4.0, goal=Goal("ratio", ">=", 0.9))
    assert (case.ratio, case.ok, case.goal) == (0.5, False, "ratio >= 0.9")
    rounds = Rounds([1.0, 2.0, 4.0], [2.0, 2.0, 2.0])
    assert (rounds.ours_s, rounds.reference_s, rounds.speed_ratio, rounds.time_ratio) == (2.0, 2.0, 1.0, 1.0)
    assert percentile(range(100), 99) == 99


def test_sides_take_turns() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return 1.0

    take_turns(lambda: side("ours"), lambda: side("bare"), repeats=2, rounds=2)
    assert order[2:] == ["ours", "bare", "bare", "ours", "bare", "ours", "ours", "bare"]


def test_the_hook_counts_what_gives_the_lock_up() -> None:
    counter = GilCounter()
    blocks = make_blocks(4, 4096)
    assert counter.run(lambda: blocks.data.take([1, 0], axis=0)) == 1
    assert counter.run(lambda: len(blocks.keys)) == 0
    assert sys.getprofile() is None


LOADS = """
import os, sys
from emberkv.bench.workload import check, load, make_blocks, store
from emberkv.client import Client
with Client([f"unix:{sys.argv[1]}"]) as client:
    for count, size in ((1, 4096), (32, 1 << 20), (128, 65536)):
        blocks = make_blocks(count, size, "gdb")
        store(client, blocks)
        check(client, blocks)
        load(client, blocks)
        os.getppid()
        client.get_into(blocks.keys, blocks.dest)
        os.getppid()
        client.get_many(blocks.keys)
        os.getppid()
"""
GDB = r"""
set pagination off
set confirm off
set breakpoint pending on
set $count = 0
break os_getppid
commands 1
silent
printf "MARK %d\n", $count
set $count = 0
continue
end
break PyEval_SaveThread
commands 2
silent
set $count = $count + 1
continue
end
run
quit
"""


@pytest.mark.skipif(shutil.which("gdb") is None, reason="needs gdb")
def test_the_interpreter_itself_counts_four_returns(tmp_path: Path) -> None:
    """Where it is really given away: PyEval_SaveThread, in all threads, whatever the profile hook cannot see."""
    (tmp_path / "loads.py").write_text(LOADS)
    (tmp_path / "commands").write_text(GDB)
    python = os.path.realpath(sys.executable)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with BenchNode(512 << 20) as node:
        command = ["gdb", "-batch", "-x", str(tmp_path / "commands"), "--args", python]
        done = subprocess.run(
            [*command, str(tmp_path / "loads.py"), node.socket_path],
            capture_output=True,
            text=True,
            timeout=100,
            env=environment,
        )
    counts = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("MARK ")]
    if not counts or not any(counts):
        pytest.skip("gdb cannot trace this interpreter")
    assert len(counts) == 9
    loads = [count for at, count in enumerate(counts) if at % 3]
    assert max(loads) <= 4, counts
