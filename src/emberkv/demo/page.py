"""reports/demo.html: one page, nothing fetched from anywhere, made from the figures of one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Final

from emberkv.demo import plots
from emberkv.demo.report import Report

TEMPLATE: Final = "page.html"


def write_html(report: Report, path: Path) -> None:
    """Writes the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(report))


def render(report: Report) -> str:
    """The whole page. Sections whose scene did not take place say so."""
    template = resources.files("emberkv.demo").joinpath(TEMPLATE).read_text()
    near, wire = sum(s.blocks_near for s in report.sessions), sum(s.blocks_wire for s in report.sessions)
    nothing = "<p class='muted'>This scene did not take place.</p>"
    return Template(template).substitute(
        headline=escape(_headline(report)),
        started=escape(report.started),
        busy=escape(f"Note: {report.busy}." if report.busy else ""),
        duration=f"{report.duration_s:.0f} s in all",
        verdict_class="verdict short" if report.shortfalls else "verdict",
        verdict=escape(
            "fell short: " + "; ".join(report.shortfalls) if report.shortfalls else "every promise was kept"
        ),
        tiles=_tiles(report),
        bars=plots.first_token_bars(report.sessions) if report.sessions else nothing,
        bars_text=escape(_bars_text(report)),
        outage=plots.outage_timeline(report.failover) if report.failover.timeline else nothing,
        outage_text=escape(_outage_text(report)),
        cluster=plots.cluster_picture(report.placement, near, wire, report.failover.shards_lost),
        cluster_text=escape(_cluster_text(report, near, wire)),
        scenes=_scenes(report),
        reference_text=escape(_REFERENCE_TEXT),
        comparisons=_comparisons(report),
        answers=_rows(
            [(s.topic, s.question, f"<span class='answer'>{escape(s.answer)}</span>") for s in report.sessions]
        ),
        machine=_machine(report),
    )


_REFERENCE_TEXT: Final = (
    "The reference is a process of the same kind that never opens a client. It computes the whole prompt, cut at "
    "the same "
    "token as the loaded path, because matrix kernels choose their blocking by shape: with the same cut, "
    "equality is exact, "
    "down to the bits of the logits."
)


def _headline(report: Report) -> str:
    if not report.hit_ttft_p50_s:
        return "EmberKV demo"
    return f"First token {report.speedup:.0f} times sooner, after the cache lost a node"


def _tiles(report: Report) -> str:
    measured = report.failover.measured_s
    same = sum(one.tokens_identical for one in report.comparisons)
    tiles = (
        (
            f"{report.speedup:.1f} x",
            (
                f"sooner: first token after {report.hit_ttft_p50_s:.3f} s instead of "
                f"{report.recompute_ttft_p50_s:.2f} s (medians)"
            ),
        ),
        (
            "no end" if measured is None else f"{measured:.2f} s",
            f"outage of session puts after SIGKILL; the budget is {report.failover.budget_s:.2f} s",
        ),
        (f"{same} of {len(report.comparisons)}", "answers with exactly the tokens of the uncached reference"),
        (
            f"{sum(s.blocks_near + s.blocks_wire for s in report.sessions)}",
            f"blocks of {report.model.get('block_bytes', 0) / 1e6:.2f} MB loaded from the surviving replicas",
        ),
    )
    return "".join(
        f"<div class='tile'><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in tiles
    )


def _bars_text(report: Report) -> str:
    if not report.sessions:
        return ""
    first = report.sessions[0]
    return (
        f"Each prompt has {first.prompt_tokens} tokens: {first.prefix_tokens} that can be cached and "
        f"{first.prompt_tokens - first.prefix_tokens} new ones. "
        f"Engine A computes all of it and then saves in the background; engine R does the same without any cache, "
        f"to show "
        f"that saving does not distort the measurement; engine B loads {first.loaded_tokens} tokens and computes "
        f"the rest."
    )


def _outage_text(report: Report) -> str:
    figures = report.failover
    return (
        f"A writer put 4 KiB session blocks to {figures.shards_probed} of the {figures.shards_lost} shards whose "
        f"primary was "
        f"killed, every {figures.probe_interval_ms:g} ms, each put with a deadline of {figures.put_deadline_ms:g} "
        f"ms. A put "
        "counts only if the new primary stored it. The outage runs from the signal to the first such answer, and "
        "is that of "
        "the slowest shard."
    )


def _cluster_text(report: Report, near: int, wire: int) -> str:
    filled, later = report.placement.get("filled", {}), report.placement.get("before_b", {})
    blocks, fewest = filled.get("blocks", 0), later.get("fewest", 0)
    return (
        f"{blocks} blocks were stored, each on at least {filled.get('fewest', 0)} nodes. When engine B came, the "
        f"survivors had "
        f"brought every block to {fewest} {'copy' if fewest == 1 else 'copies'} again. Engine B loaded "
        f"{near + wire}: {near} "
        f"lay in the memory of the node beside it, {wire} came from the other survivor over TCP. In scene (e) its "
        f"node held "
        f"nothing, all came over TCP, and the first token after {report.wire_ttft_s:.3f} s."
    )


def _scenes(report: Report) -> str:
    return _rows(
        [
            (
                f"({scene.letter})",
                scene.title,
                scene.outcome,
                f"{scene.seconds:.1f}",
                _mark(scene.ok, "kept", "fell short"),
            )
            for scene in report.scenes
        ],
        numbers=(3,),
    )


def _comparisons(report: Report) -> str:
    return _rows(
        [
            (
                one.scene,
                one.session,
                str(one.loaded_tokens),
                f"{one.ttft_s:.3f}",
                _mark(one.tokens_identical, "identical", "DIFFER"),
                "equal" if one.logits_identical else "differ",
            )
            for one in report.comparisons
        ],
        numbers=(2, 3),
    )


def _machine(report: Report) -> str:
    machine, model = report.machine, report.model
    load = " / ".join(str(value) for value in machine.get("load_at_start", []))
    load_end = " / ".join(str(value) for value in machine.get("load_at_end", []))
    rows = [
        (
            "processor",
            f"{machine.get('cpu', '')}, {machine.get('cores', 0)} cores, {machine.get('memory_gib', 0)} GiB memory",
        ),
        ("load", f"{load} at the start, {load_end} at the end (runnable tasks over 1, 5 and 15 minutes)"),
        ("kernel", f"Linux {machine.get('kernel', '')}"),
        (
            "model",
            (
                f"{model.get('name', '')}, {model.get('parameters', 0) / 1e6:.1f} million parameters, "
                f"{model.get('threads', 0)} threads"
            ),
        ),
        ("block", f"{model.get('block_tokens', 0)} tokens, {model.get('block_bytes', 0):,} bytes"),
        ("versions", ", ".join(f"{name} {value}" for name, value in report.versions.items())),
        ("left behind", ", ".join(machine.get("left_behind", [])) or "nothing: no process, socket or directory"),
    ]
    return _rows(rows)


def _mark(good: bool, yes: str, no: str) -> str:
    return f"<span class='{'ok' if good else 'bad'}'>{yes if good else no}</span>"


def _rows(rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Table rows; a cell that begins with a tag of ours stays as it is, all others are escaped."""
    lines = []
    for row in rows:
        cells = []
        for index, cell in enumerate(row):
            content = cell if cell.startswith("<span class=") else escape(cell)
            cells.append(f"<td{' class=n' if index in numbers else ''}>{content}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join(lines)
