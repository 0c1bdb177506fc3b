"""`emberkv bench consistency`: what each consistency level costs: latency, throughput, bytes on the wire, commits.

Why it exists: people choose a level by what it promises and by what it costs; the second is measured here, on three
real nodes, beside what the same machine does for the least that the level has to do.
Laws: what is read is what was put, or the benchmark ends (consistency_ways.py); samples take turns
(consistency_samples.py). Progress goes to stderr, the result to stdout. A quick run proves that everything works and
says nothing about speed.
Limits: one machine, three nodes, factor 2, one client with one call at a time; about three minutes.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console, Group
from rich.table import Table

import emberkv
from emberkv.bench.bench_cluster import BenchCluster, filesystem_of
from emberkv.bench.case import Case, Progress, make_case, percentile
from emberkv.bench.consistency_samples import REFERENCES, Samples, control_revision, measure, measure_idle, ways_of
from emberkv.bench.consistency_ways import WAYS, Clients, Shape
from emberkv.bench.wire import append, commit, machine, rounded, stderr_progress
from emberkv.errors import ConfigError, EmberError

KIB: Final = 1 << 10
MIB: Final = 1 << 20
FULL: Final = (
    Shape(1, 4 * KIB, lone=40, slow=20, burst=150),
    Shape(1, 256 * KIB, lone=25, slow=10, burst=40),
    Shape(1, MIB, lone=20, slow=0, burst=15),
    Shape(32, 4 * KIB, lone=20, slow=4, burst=20),
    Shape(32, 256 * KIB, lone=8, slow=2, burst=6),
    Shape(32, MIB, lone=4, slow=0, burst=3),
)
QUICK: Final = (Shape(1, 4 * KIB, lone=3, slow=1, burst=4), Shape(4, 256 * KIB, lone=2, slow=1, burst=2))
ROUNDS: Final = 5
ARENA_BYTES: Final = 1 << 30
"""All rows fit three times over: nothing is evicted while it is measured."""
QUICK_ARENA_BYTES: Final = 128 << 20
IDLE_S: Final = 4.0
HOW: Final = {
    "latency": "p50: median over the rounds of each round's median; p99: over all samples; before each, all is at rest",
    "throughput": "one client, calls without a pause, median over the rounds; settled: puts, until no node has a hint "
    "or an unanswered item",
    "wire": "tcpi_bytes_received at both ends of each connection between nodes (netlink sock_diag), from before the "
    "call until all is at rest, without TCP and IP headers",
    "commits": "strong: revisions of strong.db; control: revisions of control.db meanwhile, heartbeats among them",
    "places": "what the near node is to the shards of the keys: primary, backup, outside (it has a near copy)",
}


def make_cases(shapes: Sequence[Shape], samples: Samples, counts_wire: bool) -> list[Case]:
    """The report's lines."""
    cases = []
    for shape in shapes:
        for way in ways_of(shape):
            sample = samples[shape.name, way.name]
            bare = samples[shape.name, way.reference].medians_s
            than = samples[shape.name, way.than].medians_s
            blocks_per_s = statistics.median(sample.burst_rates)
            wire = sample.wire_bytes / sample.blocks if counts_wire else None
            case = make_case(
                f"{way.name}_{shape.name}",
                statistics.median(sample.medians_s) * 1e6,
                "us",
                reference=REFERENCES[way.reference],
                reference_value=statistics.median(bare) * 1e6,
                ratio=_ratio(sample.medians_s, bare),
                p99_us=percentile(sample.lone_s, 99) * 1e6,
                samples=len(sample.lone_s),
                to_eventual=_ratio(sample.medians_s, than),
                blocks_per_s=blocks_per_s,
                mb_per_s=blocks_per_s * shape.size / 1e6,
                settled_blocks_per_s=statistics.median(sample.settled_rates) if way.is_put else None,
                burst_p50_us=statistics.median(sample.burst_s) * 1e6,
                wire_bytes_per_block=wire,
                strong_commits_per_block=sample.strong_commits / sample.blocks,
                control_commits=sample.control_commits,
            )
            cases.append(case)
    return cases


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over the rounds: each round's noise is in both."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def run(*, quick: bool = False, rounds: int = ROUNDS, progress: Progress = lambda _line: None) -> dict[str, Any]:
    """All ways with all shapes; plain JSON types. Raises EmberError in one line when something cannot be run or a
    promise did not hold."""
    shapes, rounds = (QUICK, 1) if quick else (FULL, rounds)
    start, place = time.monotonic(), machine()
    progress("starting three nodes")
    with BenchCluster(QUICK_ARENA_BYTES if quick else ARENA_BYTES) as cluster, Clients(cluster) as clients:
        idle = measure_idle(cluster, 0.5 if quick else IDLE_S)
        revision, began = control_revision(cluster.statuses()), time.monotonic()
        found = measure(cluster, clients, shapes, rounds, progress)
        commits = control_revision(cluster.statuses()) - revision
        busy = {"control_commits_per_s": commits / (time.monotonic() - began)}
        wire = cluster.wire
        return {
            "benchmark": "consistency",
            "version": emberkv.__version__,
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "quick": quick,
            "machine": place | {"filesystem": filesystem_of(cluster.directory)},
            "seconds": round(time.monotonic() - start, 1),
            "rounds": rounds,
            "rounds_discarded": found.discarded,
            "how": HOW | ({"wire": f"not counted: {cluster.wire_note}"} if wire is None else {}),
            "idle": rounded(idle),
            "busy": rounded(busy),
            "connections_vanished": wire.vanished if wire is not None else 0,
            "evictions": sum(status["evictions"] for status in cluster.statuses()),
            "checked_blocks": found.checked,
            "eventual_read_may_be_old": found.stale,
            "cases": [
                rounded(msgspec.to_builtins(case)) for case in make_cases(shapes, found.samples, wire is not None)
            ],
        }


def tables(report: dict[str, Any]) -> Group:
    """The cases for people, a table for each shape; narrow, so that a line fits 80 columns."""
    found: dict[str, Table] = {}
    titles = {way.name: way.title for way in WAYS}
    for case in report["cases"]:
        name, _, shape = case["name"].rpartition("_")
        table = found.get(shape)
        if table is None:
            count, _, size = shape.partition("x")
            table = found[shape] = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
            table.title = f"{count} block{'s' if count != '1' else ''} of {size} a call"
            table.add_column("", no_wrap=True)
            for column in ("p50 us", "p99 us", "x ev.", "blocks/s", "MB/s", "wire B", "syncs"):
                table.add_column(column, justify="right", no_wrap=True)
        details = case["details"]
        wire = details["wire_bytes_per_block"]
        table.add_row(
            titles[name],
            f"{case['value']:.0f}",
            f"{details['p99_us']:.0f}",
            f"{details['to_eventual']:.2f}",
            f"{details['blocks_per_s']:.0f}",
            f"{details['mb_per_s']:.0f}",
            "?" if wire is None else f"{wire:,.0f}",
            f"{details['strong_commits_per_block']:.0f}",
        )
    lines: list[Any] = ["emberkv bench consistency: three nodes, factor 2, one client"]
    if report["quick"]:
        lines = ["emberkv bench consistency: everything works (a quick run; its figures say nothing)"]
    for table in found.values():
        lines += ["", table]
    lines.append(
        "\nprimary, backup, outside: what the near node is to the keys; near copy: it is outside and has a copy.\n"
        "x ev.: latency against the eventual way of the same place. References, settled rates: --json"
    )
    return Group(*lines)


def run_cli(json: bool = False, *, quick: bool = False, rounds: int = ROUNDS, record: Path | None = None) -> int:
    """Measures what each consistency level costs: latency, throughput, bytes between nodes, synced commits.

    json: print the report as JSON instead of tables
    quick: few repetitions; proves that everything works, says nothing about speed
    rounds: reported figures are medians over this many
    record: append the run to this history file, one JSON line
    """
    if record is not None and quick:
        raise ConfigError("--record: a quick run measures nothing; leave --quick out")
    if not 1 <= rounds <= 100:
        raise ConfigError(f"--rounds: {rounds} is not between 1 and 100")
    report = run(quick=quick, rounds=rounds, progress=stderr_progress())
    if record is not None:
        append(report, record, details=True)
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    else:
        Console().print(tables(report))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m emberkv.bench.consistency`: 0 when it ran, 2 when it could not or a promise did not hold."""
    parser = argparse.ArgumentParser(prog="python -m emberkv.bench.consistency")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args(arguments)
    try:
        return run_cli(options.json, quick=options.quick, rounds=options.rounds, record=options.record)
    except EmberError as error:
        sys.stderr.write(f"bench consistency: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
