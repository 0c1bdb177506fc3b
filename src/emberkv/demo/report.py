"""The figures of one run, the verdict, and reports/demo.json.

Laws: everything here was measured in this run or describes the machine it ran on; the verdict is computed from the
    figures and nothing else. Units stand in the names.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import msgspec

SPEEDUP_GOAL: Final = 10.0
BUSY_LOAD: Final = 2.0
"""Runnable tasks per core, as an average of one minute; the demo itself comes to about one and a half."""


class SessionFigures(msgspec.Struct):
    """One conversation: engine A filled the cache, the uncached reference R computed the same, engine B loaded it."""

    name: str
    topic: str
    question: str
    prompt_tokens: int
    prefix_tokens: int
    answer: str
    recompute_ttft_s: float
    uncached_ttft_s: float
    recompute_total_s: float
    hit_ttft_s: float = 0.0
    hit_total_s: float = 0.0
    hit_fetch_s: float = 0.0
    hit_import_s: float = 0.0
    loaded_tokens: int = 0
    blocks_near: int = 0
    blocks_wire: int = 0
    tokens_identical: bool = False
    logits_identical: bool = False

    @property
    def speedup(self) -> float:
        """How many times faster the first token came."""
        return self.recompute_ttft_s / self.hit_ttft_s if self.hit_ttft_s else 0.0


class Comparison(msgspec.Struct):
    """One answer held against the uncached reference with the same split."""

    scene: str
    session: str
    loaded_tokens: int
    tokens_identical: bool
    logits_identical: bool
    ttft_s: float


class SceneFigures(msgspec.Struct):
    """One scene: `ok` says whether what had to happen was seen to happen."""

    letter: str
    title: str
    outcome: str
    ok: bool
    seconds: float
    details: dict[str, Any] = {}


class FailoverFigures(msgspec.Struct):
    """The outage of session puts after the kill; `measured_s` None: a shard did not come back while the demo waited."""

    budget_s: float
    measured_s: float | None = None
    shards_lost: int = 0
    shards_probed: int = 0
    probe_interval_ms: float = 0.0
    put_deadline_ms: float = 0.0
    shards: dict[str, float | None] = {}
    epochs_rose: bool = False
    timeline: list[tuple[float, int, int]] = []
    """(seconds since the kill, shards of the lost node asked, acknowledged)"""
    timeline_others: list[tuple[float, int, int]] = []
    """The same for shards whose primary survived."""
    skipped_turns: int = 0


class Report(msgspec.Struct):
    """Everything about one run."""

    sessions: list[SessionFigures] = []
    comparisons: list[Comparison] = []
    scenes: list[SceneFigures] = []
    failover: FailoverFigures = msgspec.field(default_factory=lambda: FailoverFigures(budget_s=0.0))
    wire_ttft_s: float = 0.0
    """First token on engine B when its node held nothing and all blocks came from the other nodes (scene e)."""
    placement: dict[str, Any] = {}
    machine: dict[str, Any] = {}
    versions: dict[str, str] = {}
    model: dict[str, Any] = {}
    started: str = ""
    duration_s: float = 0.0
    clean_end: bool = False
    failure: str = ""
    """Why the demo could not go on; empty if it came to its end."""
    written: list[str] = []

    @property
    def recompute_ttft_p50_s(self) -> float:
        """Median time to the first token on engine A, which computes everything and fills the cache."""
        return _median([session.recompute_ttft_s for session in self.sessions])

    @property
    def uncached_ttft_p50_s(self) -> float:
        """The same in a process without any cache: the control."""
        return _median([session.uncached_ttft_s for session in self.sessions])

    @property
    def hit_ttft_p50_s(self) -> float:
        """Median time to the first token on engine B, which loads the prefix."""
        return _median([session.hit_ttft_s for session in self.sessions])

    @property
    def speedup(self) -> float:
        """Ratio of the medians."""
        return self.recompute_ttft_p50_s / self.hit_ttft_p50_s if self.hit_ttft_p50_s else 0.0

    @property
    def speedup_over_uncached(self) -> float:
        """The same against the process without any cache."""
        return self.uncached_ttft_p50_s / self.hit_ttft_p50_s if self.hit_ttft_p50_s else 0.0

    @property
    def busy(self) -> str:
        """A remark if other work ran on this machine, which lengthens every time in here; else empty."""
        load = max(self.machine.get("load_at_start", [0.0])[0], self.machine.get("load_at_end", [0.0])[0])
        if load <= BUSY_LOAD * self.machine.get("cores", 1):
            return ""
        return f"this machine was busy (load {load:g}): all times are longer than on a quiet one, and vary"

    @property
    def tokens_identical(self) -> bool:
        """Every answer of every scene has exactly the tokens of its reference."""
        return bool(self.comparisons) and all(one.tokens_identical for one in self.comparisons)

    @property
    def shortfalls(self) -> list[str]:
        """What fell short, one phrase each; empty if everything was kept."""
        if self.failure:
            return [f"the demo could not go on: {self.failure}"]
        found = []
        if not self.tokens_identical:
            wrong = [f"{one.session} in scene {one.scene}" for one in self.comparisons if not one.tokens_identical]
            found.append(f"tokens differ: {', '.join(wrong)}" if wrong else "no answer was compared")
        measured, budget = self.failover.measured_s, self.failover.budget_s
        if measured is None:
            found.append("session puts did not come back after the kill")
        elif measured > budget:
            found.append(f"the outage of session puts was {measured:.2f} s, the budget is {budget:.2f} s")
        if self.speedup < SPEEDUP_GOAL:
            found.append(
                f"the first token came {self.speedup:.1f} times faster than by recomputing, {SPEEDUP_GOAL:g} is "
                f"the goal"
            )
        found += [f"scene {scene.letter}: {scene.outcome}" for scene in self.scenes if not scene.ok]
        if not self.clean_end:
            found.append("something stayed behind after the end (see machine.left_behind in demo.json)")
        return found

    def summary(self) -> list[tuple[str, str]]:
        """Label and value of the closing lines."""
        measured = self.failover.measured_s
        outage = "not over while the demo waited" if measured is None else f"{measured:.2f} s"
        same_bits = sum(one.logits_identical for one in self.comparisons)
        return [
            ("first token, recomputed (A, median)", f"{self.recompute_ttft_p50_s:.2f} s"),
            ("first token, recomputed without any cache", f"{self.uncached_ttft_p50_s:.2f} s"),
            ("first token, loaded (B, median)", f"{self.hit_ttft_p50_s:.3f} s, {self.speedup:.1f} times faster"),
            ("first token, loaded over the wire (scene e)", f"{self.wire_ttft_s:.3f} s"),
            ("outage of session puts after the kill", f"{outage} of a budget of {self.failover.budget_s:.2f} s"),
            ("answers compared with the reference", f"{len(self.comparisons)}, {self._identical_text()}"),
            ("  of these with equal bits in the first logits", f"{same_bits}"),
        ]

    def _identical_text(self) -> str:
        wrong = sum(not one.tokens_identical for one in self.comparisons)
        return "tokens identical in all" if self.tokens_identical else f"tokens differ in {wrong}"

    def document(self) -> dict[str, Any]:
        """What demo.json holds."""
        body: dict[str, Any] = msgspec.to_builtins(self)
        body.pop("written")
        return {
            "recompute_ttft_p50_s": self.recompute_ttft_p50_s,
            "uncached_ttft_p50_s": self.uncached_ttft_p50_s,
            "hit_ttft_p50_s": self.hit_ttft_p50_s,
            "speedup": self.speedup,
            "speedup_over_uncached": self.speedup_over_uncached,
            "speedup_goal": SPEEDUP_GOAL,
            "tokens_identical": self.tokens_identical,
            "passed": not self.shortfalls,
            "shortfalls": self.shortfalls,
            **body,
        }


def write_json(report: Report, path: Path) -> None:
    """Writes demo.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.document(), indent=1) + "\n")


def describe_machine() -> dict[str, Any]:
    """The machine that the figures hold for."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "kernel": platform.release(),
        "load_at_start": load_average(),
    }


def load_average() -> list[float]:
    """Runnable tasks over 1, 5 and 15 minutes: a busy machine makes every figure of time larger."""
    return [round(value, 2) for value in os.getloadavg()]


def describe_versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of the packages that matter."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
