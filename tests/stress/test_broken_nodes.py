"""The storms on real nodes can fail: nodes that are broken on purpose, and what the readers find."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stress.board import Column, State
from stress.herd import Herd, wait_for
from stress.nodes import Nodes, running

BROKEN = Path(__file__).parent / "broken"


@contextmanager
def broken(monkeypatch: pytest.MonkeyPatch, what: str) -> Iterator[Nodes]:
    """One node of which `what` is broken (a function of broken/sitecustomize.py)."""
    with monkeypatch.context() as patched, tempfile.TemporaryDirectory(prefix="ekv-") as folder:
        patched.setenv("PYTHONPATH", os.pathsep.join([str(BROKEN), os.environ.get("PYTHONPATH", "")]))
        patched.setenv("EMBERKV_STRESS_BREAK", what)
        with running(Path(folder), 1, sound=False) as nodes:
            patched.undo()  # the readers are sound
            yield nodes


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("slot_is_handed_out_twice", "wrong"),
        ("write_is_torn", "wrong"),
    ],
)
def test_readers_find_what_is_broken(monkeypatch: pytest.MonkeyPatch, herd: Herd, what: str, words: str) -> None:
    with broken(monkeypatch, what) as nodes:
        for role in ("pinner", "pinner", "writer", "getter"):
            herd.start(role, nodes.unix(0))
        wait_for(lambda: any(words in finding for finding in herd.board.findings()), f"the readers to notice: {what}")
        with pytest.raises(AssertionError, match="findings"):
            herd.finish()


def test_running_and_frozen_readers_find_pins_that_end_early(monkeypatch: pytest.MonkeyPatch, herd: Herd) -> None:
    with broken(monkeypatch, "pin_ends_early") as nodes:
        holder = herd.start("holder", nodes.unix(0))
        holder.wait_state(State.HOLDING)
        assert nodes.status(0)["pinned_bytes"] < holder.get(Column.HELD_BYTES)
        holder.freeze()
        since = nodes.evictions()
        running_readers = [herd.start("pinner", nodes.unix(0)) for _ in range(2)]
        herd.start("writer", nodes.unix(0))
        wait_for(lambda: nodes.evictions() - since > 1000, "evictions under the feet of the readers")
        wait_for(lambda: bool(herd.board.findings()), "the running readers to notice")
        holder.wake()
        with pytest.raises(AssertionError, match="findings"):
            herd.finish()
        found = [int(line.split(",")[0].removeprefix("row ")) for line in herd.board.findings() if "under the" in line]
        assert holder.row in found
        assert {reader.row for reader in running_readers} & set(found)


@pytest.mark.parametrize("what", ["pins_are_forgotten", "staging_is_forgotten"])
def test_what_dead_clients_leave_behind_is_noticed(monkeypatch: pytest.MonkeyPatch, herd: Herd, what: str) -> None:
    with broken(monkeypatch, what) as nodes:
        holder = herd.start("holder", nodes.unix(0))
        holder.wait_state(State.HOLDING)
        holder.kill()
        herd.finish()
        words = "pins of gone" if what == "pins_are_forgotten" else "staging of gone"
        with pytest.raises(AssertionError, match=words):
            nodes.wait_unpinned(limit=1)
