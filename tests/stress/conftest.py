"""Nodes and herds for the storms: nodes are shared by all, each test has a herd of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stress.herd import Herd
from stress.nodes import Nodes, running


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="ekv-") as folder, running(Path(folder)) as made:
        yield made


@pytest.fixture
def herd(tmp_path: Path) -> Iterator[Herd]:
    with Herd(tmp_path / "herd") as made:
        yield made
