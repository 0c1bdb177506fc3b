"""`pytest tests/golden --record-golden` writes the scripts anew; without it they are compared word for word."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-golden", action="store_true", help="write the golden scripts from what happens now")


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compares text with tests/golden/<name>.txt, or records it."""

    def check(name: str, text: str) -> None:
        path = FOLDER / f"{name}.txt"
        # The option is known only when this folder was named on the command line.
        if request.config.getoption("--record-golden", default=False):
            path.write_text(text)
            return
        assert path.exists(), f"{path.name} was never recorded: run pytest tests/golden --record-golden"
        assert text == path.read_text(), f"the nodes speak differently; if that is meant, record {path.name} anew"

    return check
