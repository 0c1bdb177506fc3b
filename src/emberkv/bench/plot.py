"""`emberkv bench plot`: the history of benchmark runs as one SVG file, a small panel per case.

Why it exists: a slow decline shows in a line, not in a single run. Written by hand: no plotting package is needed.
Laws: a panel shows what its goal speaks of (the ratio to the reference, or the value), with the goal as a dashed line;
runs stand in the order of the file, whatever their distance in time. The file is self-contained and the same for the
same history.
Limits: the newest RUNS_MAX runs; other benchmarks' lines in the same file are left out.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from emberkv.errors import ConfigError, EmberError

RUNS_MAX: Final = 100
HISTORY: Final = Path("bench/history.jsonl")
OUTPUT: Final = Path("bench/history.svg")
COLUMNS: Final = 3
PANEL: Final = (380, 150)
"""Width and height of one panel."""
PLOT: Final = (52, 34, 310, 92)
"""Left, top, width and height of the axes within a panel."""
GOOD, BAD, PLAIN = "#2a9d5c", "#d1495b", "#4a6fa5"


class Point(NamedTuple):
    """One case of one run."""

    run: int
    shown: float
    ok: bool | None


class Series(NamedTuple):
    """One panel: what is shown, in which unit, and the goal if there is one."""

    name: str
    unit: str
    bound: float | None
    sense: str
    points: list[Point]


def read(path: Path) -> list[dict[str, Any]]:
    """The runs of a history file, oldest first. Raises ConfigError with the line that cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    runs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            run = msgspec.json.decode(line)
            run["cases"]
        except (msgspec.MsgspecError, KeyError, TypeError):
            raise ConfigError(f"{path}:{number}: not a line of `emberkv bench NAME --record`") from None
        runs.append(run)
    return runs[-RUNS_MAX:]


def series(runs: Sequence[dict[str, Any]]) -> list[Series]:
    """A series per case name, in the order of their first appearance."""
    found: dict[str, Series] = {}
    for number, run in enumerate(runs):
        for case in run["cases"]:
            of_ratio = case["goal"].startswith("ratio") or (not case["goal"] and case["ratio"] is not None)
            shown = case["ratio"] if of_ratio else case["value"]
            if shown is None:
                continue
            goal = re.search(r"(>=|<=) ([0-9.e+-]+)", case["goal"])
            unit = "x" if of_ratio else case["unit"]
            bound, sense = (float(goal[2]), goal[1]) if goal else (None, "")
            known = found.get(case["name"])
            points = known.points if known else []
            points.append(Point(number, float(shown), case["ok"]))
            found[case["name"]] = Series(case["name"], unit, bound, sense, points)  # the newest goal counts
    return list(found.values())


def short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def panel(line: Series, runs: int) -> str:
    """The drawing of one series, with its top left corner at 0, 0."""
    left, top, width, height = PLOT
    values = [point.shown for point in line.points] + ([line.bound] if line.bound is not None else [])
    low, high = min(0.0, *values), max(values) * 1.08 or 1.0

    def x(run: int) -> float:
        return left + (width * run / (runs - 1) if runs > 1 else width / 2)

    def y(value: float) -> float:
        return top + height * (high - value) / (high - low)

    last = line.points[-1]
    colour = {True: GOOD, False: BAD, None: PLAIN}[last.ok]
    figure = f"{short(last.shown)} {escape(line.unit)}"
    parts = [
        f'<text x="{left}" y="16" class="name">{escape(line.name)}</text>',
        f'<text x="{left + width}" y="16" class="last" style="fill:{colour}">{figure}</text>',
        f'<path d="M{left} {top}V{top + height}H{left + width}" class="axis"/>',
        f'<text x="{left - 6}" y="{top + 9}" class="tick">{short(high)}</text>',
        f'<text x="{left - 6}" y="{top + height}" class="tick">{short(low)}</text>',
    ]
    if line.bound is not None:
        at = y(line.bound)
        parts.append(f'<path d="M{left} {at:.1f}H{left + width}" class="goal"/>')
        goal = escape(f"{line.sense} {line.bound:g}")
        parts.append(f'<text x="{left + 4}" y="{at - 3:.1f}" class="goaltext">{goal}</text>')
    path = " ".join(f"{x(point.run):.1f},{y(point.shown):.1f}" for point in line.points)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{PLAIN}" stroke-width="1.5"/>')
    for point in line.points:
        fill = {True: GOOD, False: BAD, None: PLAIN}[point.ok]
        parts.append(f'<circle cx="{x(point.run):.1f}" cy="{y(point.shown):.1f}" r="2.6" fill="{fill}"/>')
    return "".join(parts)


def draw(runs: Sequence[dict[str, Any]]) -> str:
    """The whole SVG document."""
    lines = series(runs)
    rows = -(-len(lines) // COLUMNS)
    width, height = COLUMNS * PANEL[0], rows * PANEL[1] + 48
    first, last = runs[0]["date"][:10], runs[-1]["date"][:10]
    machine = runs[-1].get("machine", {})
    title = f"emberkv bench wire: {len(runs)} run{'s' if len(runs) > 1 else ''}, {first} to {last}"
    place = f"{machine.get('cores', '?')} cores, {machine.get('cpu', '')}, Python {machine.get('python', '?')}"
    legend = f"{place}; x: ratio to the reference; dashed: the goal; green met, red missed"
    style = (
        "text{font:12px system-ui,sans-serif;fill:#222}.name{font-weight:600}.last{text-anchor:end;font-weight:600}"
        ".tick{text-anchor:end;font-size:10px;fill:#777}.axis{fill:none;stroke:#999}"
        ".goal{stroke:#e09f3e;stroke-dasharray:4 3}.goaltext{font-size:10px;fill:#b07a1e}"
    )
    panels = "".join(
        f'<g transform="translate({index % COLUMNS * PANEL[0]},{index // COLUMNS * PANEL[1] + 44})">'
        f"{panel(line, len(runs))}</g>"
        for index, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="16" y="20" style="font-size:15px;font-weight:600">{escape(title)}</text>'
        f'<text x="16" y="37" style="fill:#666">{escape(legend)}</text>'
        f"{panels}</svg>\n"
    )


def run_cli(json: bool = False, *, history: Path = HISTORY, output: Path = OUTPUT) -> int:
    """Draws the recorded runs of `emberkv bench wire --record` as one SVG file.

    json: print what was drawn as JSON
    history: the file with one run per line
    output: where the drawing goes
    """
    runs = [run for run in read(history) if run.get("benchmark", "wire") == "wire"]
    if not runs:
        raise ConfigError(f"{history}: no run was recorded yet (emberkv bench wire --record {history})")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(draw(runs), encoding="utf-8")
    if json:
        sys.stdout.write(msgspec.json.encode({"runs": len(runs), "output": str(output)}).decode() + "\n")
    else:
        sys.stdout.write(f"{output}: {len(runs)} runs\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m emberkv.bench.plot`; 2 when there is nothing to draw."""
    parser = argparse.ArgumentParser(prog="python -m emberkv.bench.plot")
    parser.add_argument("--history", type=Path, default=HISTORY)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        return run_cli(options.json, history=options.history, output=options.output)
    except EmberError as error:
        sys.stderr.write(f"bench plot: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
