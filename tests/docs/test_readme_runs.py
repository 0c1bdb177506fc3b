"""What README and OPERATIONS tell people to type works as it stands there, against a real cluster."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkv.cli.cluster import LocalCluster

ROOT = Path(__file__).parents[2]
EMBERKV = str(Path(sys.executable).with_name("emberkv"))
README = (ROOT / "README.md").read_text()
OPERATIONS = (ROOT / "docs/OPERATIONS.md").read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), 3, arena_bytes=64 << 20) as started:
        started.wait_ready(60)
        yield started


def fenced(text: str, heading: str, language: str) -> list[str]:
    """Blocks of one language below a heading."""
    part = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [block for found, block in re.findall(r"```(\w*)\n(.*?)```", part, re.DOTALL) if found == language]


def run(words: list[str], cluster: LocalCluster, folder: Path) -> str:
    environment = os.environ | {"EMBERKV_ENDPOINTS": ",".join(cluster.endpoints())}
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def emberkv_lines(block: str) -> list[list[str]]:
    lines = [line.split(" #")[0] for line in block.splitlines() if line.startswith("emberkv ")]
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.integration
def test_the_python_example(cluster: LocalCluster, tmp_path: Path) -> None:
    example = fenced(README, "Use it", "python")[0]
    said = run([sys.executable, "-c", example], cluster, tmp_path)
    assert "STORED" in said
    assert "some KV bytes" in said
    assert said.splitlines()[-1] == "b'newer bytes'"


@pytest.mark.integration
@pytest.mark.slow
def test_the_commands(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(README)
    commands = [words for block in fenced(README, "Use it", "") for words in emberkv_lines(block)]
    assert {"put", "get", "status", "namespace", "drain", "sim"} <= {words[0] for words in commands}
    for words in commands:
        if words[0] != "sim":  # it has a stage of its own
            run([EMBERKV, *words], cluster, tmp_path)
    assert (tmp_path / "copy.md").read_text() == README
    # Those of OPERATIONS come after them in the same cluster; what the first ones left is cleared away.
    run([EMBERKV, "drain", "n2", "--undo"], cluster, tmp_path)
    run([EMBERKV, "namespace", "drop", "chat", "--yes"], cluster, tmp_path)
    commands = emberkv_lines(fenced(OPERATIONS, "Namespaces", "")[0])
    assert len(commands) >= 4
    for words in commands:
        run([EMBERKV, *words], cluster, tmp_path)
