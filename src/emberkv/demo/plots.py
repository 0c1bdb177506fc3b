"""The pictures of the report: plain SVG text, drawn from the figures.

Laws: pure; nothing is fetched from anywhere, so that the page can be read without a network; every axis has its unit;
    text that came from outside is escaped. Colours differ in lightness too, and each mark has a label.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final

from emberkv.demo.outage import BIN_S
from emberkv.demo.report import FailoverFigures, SessionFigures

INK: Final = "#2b2620"
MUTED: Final = "#6b6353"
LINE: Final = "#d8d0c0"
RECOMPUTE: Final = "#c9b79a"
CONTROL: Final = "#e3d9c6"
HIT: Final = "#14568c"
FETCH: Final = "#8fb0cc"
KILL: Final = "#b4430f"
GOOD: Final = "#3e7a2f"
FONT: Final = "font-family='DejaVu Sans, Verdana, Helvetica, Arial, sans-serif'"

ARROW_TIP: Final = (
    "<defs><marker id='tip' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' "
    f"orient='auto'><path d='M0 0 L10 5 L0 10 z' fill='{INK}'/></marker></defs>"
)


class Axis:
    """Data to pixels along one direction."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = low, high, start, end

    def at(self, value: float) -> float:
        """Pixel of a value, kept inside the plot."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self, count: int = 6) -> list[float]:
        """Round values, about `count` of them."""
        raw = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
        first = math.ceil(self.low / step)
        return [index * step for index in range(first, math.floor(self.high / step) + 1)]


def text(
    x: float, y: float, content: str, *, size: int = 12, fill: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    """One line of text."""
    weight = " font-weight='600'" if bold else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{fill}' text-anchor='{anchor}'{weight}>"
        f"{escape(content)}</text>"
    )


def rect(x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "none", radius: float = 2) -> str:
    """One box."""
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{max(0.0, width):.1f}' height='{height:.1f}' rx='{radius}' "
        f"fill='{fill}' stroke='{stroke}'/>"
    )


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, *, width: float = 1.0, dash: str = "") -> str:
    """One straight line."""
    dashes = f" stroke-dasharray='{dash}'" if dash else ""
    ends = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
    return f"<line {ends} stroke='{stroke}' stroke-width='{width}'{dashes}/>"


def svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """A whole picture."""
    body = "\n".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' {FONT}>"
        f"<title>{escape(title)}</title>\n{body}\n</svg>"
    )


def first_token_bars(sessions: Sequence[SessionFigures]) -> str:
    """Time to the first token per session: recomputed, recomputed without a cache, loaded (fetch, import, rest)."""
    width, left, right, row, top = 1000, 190, 90, 92, 44
    height = top + row * len(sessions) + 46
    longest = max(max(s.recompute_ttft_s, s.uncached_ttft_s) for s in sessions)
    axis = Axis(0.0, longest * 1.02, left, width - right)
    bottom = height - 44
    parts = _legend(left, 20)
    for tick in axis.ticks(8):
        parts.append(line(axis.at(tick), top - 6, axis.at(tick), bottom, LINE))
        parts.append(text(axis.at(tick), bottom + 18, f"{tick:g}", fill=MUTED, anchor="middle"))
    parts.append(
        text((left + width - right) / 2, height - 6, "seconds to the first token", fill=MUTED, anchor="middle")
    )
    for index, session in enumerate(sessions):
        y = top + index * row
        parts.append(text(left - 12, y + 30, session.name, anchor="end", bold=True, size=14))
        parts.append(text(left - 12, y + 49, session.topic, anchor="end", fill=MUTED))
        bars = ((session.recompute_ttft_s, RECOMPUTE), (session.uncached_ttft_s, CONTROL))
        for number, (value, colour) in enumerate(bars):
            parts.append(rect(left, y + number * 24, axis.at(value) - left, 20, colour))
            parts.append(text(axis.at(value) + 6, y + number * 24 + 15, f"{value:.2f} s"))
        parts += _hit_bar(axis, left, y + 48, session)
    return svg(width, height, "Time to the first token per session", parts)


def _hit_bar(axis: Axis, left: float, y: float, session: SessionFigures) -> list[str]:
    loaded_s = session.hit_fetch_s + session.hit_import_s
    edge, end = axis.at(loaded_s), axis.at(session.hit_ttft_s)
    label = f"{session.hit_ttft_s:.3f} s, {session.speedup:.0f} times faster"
    return [
        rect(left, y, edge - left, 20, FETCH, radius=1),
        rect(edge, y, max(end - edge, 1.5), 20, HIT, radius=1),
        text(end + 8, y + 15, label, fill=HIT, bold=True),
    ]


def _legend(x: float, y: float) -> list[str]:
    entries = (
        (RECOMPUTE, "A: recompute, then save"),
        (CONTROL, "R: recompute, no cache"),
        (FETCH, "B: load the prefix"),
        (HIT, "B: compute the rest"),
    )
    parts = []
    for colour, label in entries:
        parts.append(rect(x, y - 11, 14, 14, colour))
        parts.append(text(x + 20, y, label, fill=MUTED))
        x += 38 + 6.7 * len(label)
    return parts


def outage_timeline(figures: FailoverFigures) -> str:
    """Acknowledged session puts around the kill: lost shards above, kept shards below, first acks as marks."""
    width, left, right, top, bottom = 1000, 64, 24, 40, 316
    points = figures.timeline
    low = max(-1.2, min((p[0] for p in points), default=-1.0))
    last = max((p[0] for p in points), default=1.0)
    high = max(figures.budget_s * 1.08, min(last, figures.budget_s * 2), figures.measured_s or 0.0)
    axis = Axis(low, high, left, width - right)
    parts = [rect(axis.at(0), top, axis.at(figures.budget_s) - axis.at(0), bottom - top, "#faf3ea", radius=0)]
    for tick in axis.ticks(10):
        parts.append(line(axis.at(tick), top, axis.at(tick), bottom, LINE))
        parts.append(text(axis.at(tick), bottom + 18, f"{tick:g}", fill=MUTED, anchor="middle"))
    parts.append(text((left + width - right) / 2, bottom + 40, "seconds since the kill", fill=MUTED, anchor="middle"))
    parts += _acks("shards of the killed node", points, axis, 78, 120, KILL)
    parts += _first_acks(figures, axis, 216)
    parts += _acks("shards of the survivors", figures.timeline_others, axis, 262, 44, GOOD)
    at = axis.at(0)
    parts += [line(at, 24, at, bottom, KILL, width=2), text(at + 6, 30, "SIGKILL", fill=KILL, bold=True)]
    at = axis.at(figures.budget_s)
    parts += [
        line(at, 24, at, bottom, INK, width=1.5, dash="6 4"),
        text(at - 6, 30, f"budget {figures.budget_s:.2f} s", anchor="end", bold=True),
    ]
    if figures.measured_s is not None:
        at = axis.at(figures.measured_s)
        side, anchor = (-6.0, "end") if figures.measured_s > figures.budget_s * 0.3 else (6.0, "start")
        parts += [
            line(at, 24, at, bottom, HIT, width=2),
            text(at + side, 30, f"every shard is back: {figures.measured_s:.2f} s", fill=HIT, anchor=anchor, bold=True),
        ]
    return svg(width, bottom + 50, "Acknowledged session puts around the kill", parts)


def _acks(
    title: str, points: Sequence[tuple[float, int, int]], axis: Axis, top: float, height: float, colour: str
) -> list[str]:
    """Share of acknowledged puts per slice of time as columns."""
    base = top + height
    step = BIN_S * (axis.end - axis.start) / (axis.high - axis.low)
    parts = [text(axis.start, top - 10, f"{title}: puts acknowledged, by the time of the answer", fill=MUTED)]
    for share, label in ((0.0, "0 %"), (1.0, "100 %")):
        y = base - share * height
        parts.append(line(axis.start, y, axis.end, y, LINE))
        parts.append(text(axis.start - 8, y + 4, label, fill=MUTED, anchor="end", size=11))
    for start_s, asked, acked in points:
        if asked and axis.low <= start_s <= axis.high:
            share = acked / asked
            parts.append(rect(axis.at(start_s), base - share * height, step * 0.8, share * height, colour, radius=0))
            if not acked:
                parts.append(rect(axis.at(start_s), base - 2, step * 0.8, 2, "#8a8271", radius=0))
    return parts


def _first_acks(figures: FailoverFigures, axis: Axis, y: float) -> list[str]:
    parts = [text(axis.start, y + 4, "first ack of each shard", fill=MUTED)]
    values = [value for value in figures.shards.values() if value is not None]
    parts += [
        f"<circle cx='{axis.at(value):.1f}' cy='{y}' r='4' fill='{HIT}' fill-opacity='0.45'/>" for value in values
    ]
    return parts


def cluster_picture(placement: dict[str, dict[str, int]], near: int, wire: int, shards_lost: int) -> str:
    """Who talked to whom: engine A's node was killed, engine B loaded from the survivors."""
    filled, later = placement.get("filled", {}), placement.get("before_b", {})
    parts = [ARROW_TIP]
    for name, (x, y) in {"n1": (380, 34), "n2": (380, 144), "n3": (380, 254)}.items():
        dead = name == "n1"
        parts.append(
            rect(x, y, 240, 84, "#f7ebe4" if dead else "#e8f1e4", stroke=KILL if dead else "#9dbf8d", radius=8)
        )
        parts.append(text(x + 16, y + 26, f"node {name}", bold=True, size=14))
        parts.append(text(x + 16, y + 48, f"{filled.get(name, 0)} of {filled.get('blocks', 0)} blocks after the fill"))
        after = f"was primary of {shards_lost} of 256 shards" if dead else f"{later.get(name, 0)} when B came"
        parts.append(text(x + 16, y + 68, after, fill=MUTED))
    parts += [
        rect(546, 42, 66, 22, KILL, radius=4),
        text(579, 57, "SIGKILL", fill="#ffffff", anchor="middle", bold=True),
    ]
    parts += _engine(30, 44, "engine A", "computes, fills the cache", RECOMPUTE)
    parts += _engine(770, 154, "engine B", "a fresh process, loads", FETCH)
    parts += _engine(30, 264, "writer", "4 KiB session puts, 50 Hz", CONTROL)
    parts += [_arrow(230, 76, 378, 76), text(304, 68, "saves", anchor="middle", fill=MUTED)]
    parts += [_arrow(230, 296, 378, 296), text(304, 288, "puts", anchor="middle", fill=MUTED)]
    parts += [_arrow(622, 186, 768, 186), text(695, 178, f"{near + wire} blocks", anchor="middle", bold=True, fill=HIT)]
    if wire:
        parts += [_arrow(500, 252, 500, 230), text(512, 246, f"{wire} of them over the wire", fill=HIT)]
    return svg(1000, 360, "The cluster during the demo", parts)


def _engine(x: float, y: float, name: str, what: str, fill: str) -> list[str]:
    return [
        rect(x, y, 200, 64, fill, radius=8),
        text(x + 16, y + 27, name, bold=True, size=14),
        text(x + 16, y + 47, what),
    ]


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{INK}' stroke-width='1.6' marker-end='url(#tip)'/>"
