"""The models under docs/models: each rule holds, and each broken rule is found, or the model could not fail.

Limits: seconds and some hundred MB for the largest; skipped only where spin or gcc is not installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[2] / "docs" / "models"
NAMES = subprocess.run([MODELS / "run.sh", "--list"], check=True, capture_output=True, text=True).stdout.split()
TIMEOUT_S = 600
"""Never hangs; the slowest takes some seconds on an idle core."""


@pytest.fixture(autouse=True)
def tools() -> None:
    missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed (scripts/system_packages.sh installs spin)")


@pytest.mark.parametrize("name", NAMES)
def test_rule_holds_or_its_mutation_is_found(name: str) -> None:
    done = subprocess.run([MODELS / "run.sh", name], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unknown_run_is_an_error() -> None:
    done = subprocess.run([MODELS / "run.sh", "no-such-run"], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 2, done.stdout + done.stderr


@pytest.mark.parametrize("model", sorted(MODELS.glob("*.pml")), ids=lambda path: path.stem)
def test_every_mutation_of_a_model_is_run_and_described(model: Path) -> None:
    """A #define that changes a rule and is never set would be a mutation that nobody checks."""
    switches = set(re.findall(r"^#ifn?def (\w+)", model.read_text(), re.M))
    bounds = set(re.findall(r"^#ifndef (\w+)\n#define \1", model.read_text(), re.M))
    used = set(re.findall(r"-D(\w+)", (MODELS / "run.sh").read_text()))
    described = (MODELS / "README.md").read_text()
    assert switches - bounds <= used
    assert [switch for switch in sorted(switches - bounds) if switch not in described] == []


def test_a_broken_rule_where_one_should_hold_fails(tmp_path: Path) -> None:
    """The runner itself can fail: a model whose rule is broken makes the run that expects it to hold an error."""
    for file in MODELS.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    model = tmp_path / "outage.pml"
    model.write_text("#define NO_GRACE\n" + model.read_text())
    done = subprocess.run([tmp_path / "run.sh", "outage"], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL outage " in done.stdout
