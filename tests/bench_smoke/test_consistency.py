"""`bench consistency` runs, ends cleanly, and counts what levels must cost. No time is judged: the machine is busy."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from emberkv.bench import consistency, plot, wire
from emberkv.bench.consistency_ways import CHECKS, WAYS
from emberkv.bench.tcp_bytes import TcpBytes
from emberkv.errors import ConfigError

FRAME_BYTES_MAX = 600
"""Beside the bytes of a block that travels twice: two frames and their answers, each of about 200 bytes."""


class Done(NamedTuple):
    """One quick run."""

    report: dict[str, Any]
    pid: int
    left: list[str]

    def case(self, name: str) -> dict[str, Any]:
        """The case of one way with one 4 KiB block."""
        found: dict[str, Any] = next(case for case in self.report["cases"] if case["name"] == f"{name}_1x4KiB")
        return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    home = tmp_path_factory.mktemp("consistency")
    process = subprocess.Popen(
        [sys.executable, "-m", "emberkv.bench.consistency", "--json", "--quick"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(home)},
    )
    try:
        output, errors = process.communicate(timeout=200)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors[-2000:]
    assert "1x4KiB" in errors  # progress
    return Done(json.loads(output), process.pid, [path.name for path in home.iterdir()])


@pytest.mark.timeout(240)
def test_every_way_is_reported(done: Done) -> None:
    names = [case["name"] for case in done.report["cases"]]
    assert names == [f"{way.name}_{shape.name}" for shape in consistency.QUICK for way in WAYS]
    for case in done.report["cases"]:
        assert case["value"] > 0
        assert case["reference_value"] > 0
        assert case["ratio"] > 0
        for figure in ("p99_us", "to_eventual", "blocks_per_s", "mb_per_s", "burst_p50_us", "samples"):
            assert case["details"][figure] > 0, case
        settled = case["details"]["settled_blocks_per_s"]
        assert settled > 0 if case["name"].startswith("put_") else settled is None


def test_promises_were_looked_at(done: Done) -> None:
    """That none was broken is what the exit code says."""
    assert set(done.report["checked_blocks"]) == set(CHECKS)
    assert all(done.report["checked_blocks"].values()), done.report["checked_blocks"]
    assert done.report["evictions"] == 0


def test_wire_bytes_are_those_of_the_level(done: Done) -> None:
    if done.case("put_session_outside")["details"]["wire_bytes_per_block"] is None:
        pytest.skip("this kernel does not tell about TCP connections")

    def travelled(name: str) -> float:
        return float(done.case(name)["details"]["wire_bytes_per_block"])

    for level in ("eventual", "session", "copies2"):
        assert 4096 < travelled(f"put_{level}_primary") < 4096 + FRAME_BYTES_MAX
        assert 2 * 4096 < travelled(f"put_{level}_outside") < 2 * 4096 + FRAME_BYTES_MAX
        assert travelled(f"get_{'token' if level == 'copies2' else level}_backup") < FRAME_BYTES_MAX
    assert 4096 < travelled("get_token_behind") < 4096 + FRAME_BYTES_MAX
    for name in ("get_session_outside", "get_token_outside"):
        assert 0 < travelled(name) < FRAME_BYTES_MAX  # asked about, not sent again
    assert travelled("put_strong") < FRAME_BYTES_MAX


def test_only_strong_puts_commit(done: Done) -> None:
    for case in done.report["cases"]:
        assert case["details"]["strong_commits_per_block"] == (1 if case["name"].startswith("put_strong") else 0)


def test_nothing_is_left_behind(done: Done) -> None:
    assert done.left == []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        assert not (b"--parent" in command and command[command.index(b"--parent") + 1] == str(done.pid).encode())


def test_tables_fit_a_narrow_terminal(done: Done) -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(consistency.tables(done.report))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert all(shown.count(way.title) == len(consistency.QUICK) for way in WAYS)


def test_history_keeps_the_wire_bytes_and_the_plot_leaves_it_out(done: Done, tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    wire.append(done.report, history, details=True)
    (line,) = plot.read(history)
    assert line["benchmark"] == "consistency"
    assert "wire_bytes_per_block" in line["cases"][0]["details"]
    with pytest.raises(ConfigError, match="no run was recorded"):
        plot.run_cli(history=history, output=tmp_path / "history.svg")


def test_wrong_options_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--record"):
        consistency.run_cli(quick=True, record=tmp_path / "x")
    with pytest.raises(ConfigError, match="--rounds: 0"):
        consistency.run_cli(rounds=0)


def test_the_kernels_count_is_exact() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as stranger:
        counter = TcpBytes([server.getsockname()[1]])
        sent = 0
        for listener, counted in ((server, True), (stranger, False), (server, True)):
            with socket.create_connection(listener.getsockname()) as ours, listener.accept()[0] as theirs:
                before = counter.total()
                for sender, receiver, size in ((ours, theirs, 40_000), (theirs, ours, 7)):
                    sender.sendall(b"x" * size)
                    assert len(receiver.recv(size, socket.MSG_WAITALL)) == size
                assert counter.total() - before == (40_007 if counted else 0)
                sent += 40_007 if counted else 0
        assert counter.total() == sent
        assert counter.vanished == 4
        counter.close()
