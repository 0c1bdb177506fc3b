"""`emberkv bench wire`: the data plane measured against what the same machine does without us.

Why it exists: the goals of the data plane are ratios, so each is measured beside its reference in one run and judged by
code.
Laws: what is measured is a real node in a process of its own, started and ended here; progress goes to stderr, the
result to stdout. A quick run proves that everything works and says nothing about speed.
Limits: one machine; about two minutes.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

import emberkv
from emberkv.bench import wire_core, wire_idle, wire_local, wire_tcp
from emberkv.bench.case import Case, Progress
from emberkv.bench.node_process import BenchNode
from emberkv.bench.workload import FULL, QUICK
from emberkv.errors import ConfigError, EmberError

GROUPS: Final = ("tcp", "local", "core", "idle")


def machine() -> dict[str, Any]:
    """What the figures depend on: processors, memory, kernel, interpreter, how busy the machine was, our priority."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
    }


def commit() -> str:
    """The commit of the working tree that this package lies in, with "+" when it was changed; empty without one."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--", "."],
            cwd=here.parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return head + ("+" if changed else "")


def run(
    *, quick: bool = False, groups: Sequence[str] = GROUPS, progress: Progress = lambda _line: None
) -> dict[str, Any]:
    """All cases of the chosen groups; plain JSON types. Raises EmberError in one line when something cannot be run."""
    scale = QUICK if quick else FULL
    start = time.monotonic()
    before = machine()
    cases: list[Case] = []
    if "tcp" in groups or "local" in groups:
        progress(f"starting a node with {scale.arena_bytes >> 20} MiB")
        with BenchNode(scale.arena_bytes) as node:
            if "tcp" in groups:
                cases += wire_tcp.run(node, scale, progress)
            if "local" in groups:
                cases += wire_local.run(node, scale, progress)
    if "core" in groups:
        cases += wire_core.run(progress)
    if "idle" in groups:
        cases += wire_idle.run(scale, progress)
    judged = [case for case in cases if case.ok is not None]
    return {
        "benchmark": "wire",
        "version": emberkv.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "machine": before,
        "seconds": round(time.monotonic() - start, 1),
        "goals_met": sum(bool(case.ok) for case in judged),
        "goals": len(judged),
        "cases": [rounded(msgspec.to_builtins(case)) for case in cases],
    }


def rounded(value: Any) -> Any:
    """Floats with five significant digits: more is noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value


def table(report: dict[str, Any]) -> Table:
    """The cases for people."""
    # Narrow, so that a line fits 80 columns.
    title = f"emberkv bench wire: {report['goals_met']} of {report['goals']} goals met"
    if report["quick"]:
        title = "emberkv bench wire: everything works (a quick run; its figures say nothing)"
    shown = Table(title=title, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("case", "measured", "reference", "ratio", "goal", ""):
        shown.add_column(name, justify="right" if name in ("measured", "reference", "ratio") else "left", no_wrap=True)
    for case in report["cases"]:
        amount = case["reference_value"]
        verdict = {True: "[green]ok[/]", False: "[red]missed[/]", None: ""}[case["ok"]]
        shown.add_row(
            case["name"],
            f"{case['value']:.4g} {case['unit']}",
            f"{amount:.4g}" if amount is not None else "",
            f"{case['ratio']:.2f}" if case["ratio"] is not None else "",
            case["goal"],
            verdict,
        )
    shown.caption = "What each reference is, and the figures behind a case: --json"
    return shown


def append(report: dict[str, Any], path: Path, *, details: bool = False) -> None:
    """Appends the run as one JSON line: date, commit, machine and the cases, without their details unless asked for."""
    line = {key: report[key] for key in ("benchmark", "date", "commit", "version", "machine", "seconds")}
    line["cases"] = [
        {key: item for key, item in case.items() if details or key != "details"} for case in report["cases"]
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(msgspec.json.encode(line).decode() + "\n")


def stderr_progress() -> Progress:
    """Progress lines on stderr, with the seconds since the start."""
    start = time.monotonic()
    console = Console(stderr=True, highlight=False)
    return lambda line: console.print(f"[dim]{time.monotonic() - start:6.1f} s[/]  {line}")


def run_cli(json: bool = False, *, quick: bool = False, only: str = "", record: Path | None = None) -> int:
    """Measures gets, saves, pins, the core and idle connections beside what the machine does without us.

    json: print the report as JSON instead of a table
    quick: few repetitions; proves that everything works, says nothing about speed
    only: groups to run, with commas: tcp, local, core, idle
    record: append the run to this history file, one JSON line
    """
    groups = [name.strip() for name in only.split(",") if name.strip()] or list(GROUPS)
    unknown = [name for name in groups if name not in GROUPS]
    if unknown:
        raise ConfigError(f"--only: no group {unknown[0]!r}, there are {', '.join(GROUPS)}")
    if record is not None and quick:
        raise ConfigError("--record: a quick run measures nothing; leave --quick out")
    report = run(quick=quick, groups=groups, progress=stderr_progress())
    if record is not None:
        append(report, record)
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    else:
        Console().print(table(report))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m emberkv.bench.wire`: 0 when it ran (missed goals stand in the report), 2 when it could not."""
    parser = argparse.ArgumentParser(prog="python -m emberkv.bench.wire")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help=", ".join(GROUPS))
    parser.add_argument("--record", type=Path)
    options = parser.parse_args(arguments)
    try:
        return run_cli(options.json, quick=options.quick, only=options.only, record=options.record)
    except EmberError as error:
        sys.stderr.write(f"bench wire: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
