"""Order and marks for all tests: cheap stages first, so that a plain mistake is reported in seconds."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

# A folder that is not listed runs just before the integration stage: unknown cost, most likely small.
STAGES = (
    "lint",
    "unit",
    "golden",
    "property",
    "conformance",
    "models",
    "sim",
    "",
    "integration",
    "stress",
    "engine",
    "acceptance",
    "bench_smoke",
)
# The folder says what a test is, so a forgotten mark cannot put it in the wrong selection (-m "not engine").
MARKS = {"integration": "integration", "stress": "integration", "engine": "engine", "acceptance": "acceptance"}
ROOT = Path(__file__).parent

# A shell that starts `make test &` lets its children ignore Ctrl-C, which the tests that send it would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def stage_of(item: pytest.Item) -> str:
    """The top folder of a test below tests/."""
    parts = item.path.relative_to(ROOT).parts if item.path.is_relative_to(ROOT) else ()
    return parts[0] if len(parts) > 1 else ""


def rank(item: pytest.Item) -> int:
    stage = stage_of(item)
    return STAGES.index(stage if stage in STAGES else "")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        mark = MARKS.get(stage_of(item))
        if mark is not None:
            item.add_marker(mark)
    items.sort(key=rank)  # stable: the order inside a stage stays as written


class StageNames:
    """Prints the name of each stage when its first test starts, so that a long run shows where it is."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.shown: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        parts = nodeid.split("::")[0].split("/")
        stage = parts[1] if len(parts) > 2 and parts[0] == ROOT.name else "other"
        if stage in self.shown:
            return
        self.shown.add(stage)
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(f"[stage] {stage}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist have no terminal
        config.pluginmanager.register(StageNames(config), "emberkv-stage-names")
