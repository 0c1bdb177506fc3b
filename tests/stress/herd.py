"""The driver's side of many client processes: start, freeze, wake, kill, and a fair end with all findings.

Laws: only processes started here are signalled, by pidfd, so never one that took over a number; none outlives the
herd, however it ends (the breeder ends when its input does, and the kernel kills what it forked).
Limits: half of board.ROWS children in the herd's life; the other half of the rows is for what they fork.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from stress.board import ROWS, Board, Column, Order, State
from stress.oracle import Ledger, TwoValues

HANG_S: Final = 40.0
"""Nothing here needs a hundredth of it, even on a machine whose processors are taken: who needs more hangs."""
TESTS: Final = Path(__file__).resolve().parents[1]
RUN_S: Final = float(os.environ.get("EMBERKV_STRESS_S", "0"))


def storm_s(quick_s: float) -> float:
    """How long a storm runs: `quick_s` in the usual test run, EMBERKV_STRESS_S where that is set."""
    return RUN_S or quick_s


def limit_s(quick_s: float) -> float:
    """pytest's own limit for a storm's test: only a hang takes that long."""
    return storm_s(quick_s) + 110


def wait_for(condition: Callable[[], bool], what: str, limit: float = HANG_S) -> None:
    """Waits for something that must happen; the limit only tells a hang."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {limit:g} s"
        time.sleep(0.01)


class Child:
    """One process of the herd. Its numbers are on the board, whatever became of it."""

    def __init__(self, herd: Herd, row: int, role: str, pid: int) -> None:
        self.herd, self.row, self.role, self.pid = herd, row, role, pid
        self.killed = False
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended already
            self._pidfd = -1

    def get(self, column: Column) -> int:
        return self.herd.board.get(self.row, column)

    def signal(self, number: int) -> None:
        if self._pidfd >= 0 and not self.ended():
            signal.pidfd_send_signal(self._pidfd, number)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def wake(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.killed = True
        self.signal(signal.SIGKILL)
        wait_for(self.ended, f"the end of {self.role} {self.pid}")

    def release(self) -> None:
        self.herd.board.order(self.row, Order.RELEASE)

    def ended(self) -> bool:
        if self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if poll.poll(0):
                self.close()
        return self._pidfd < 0

    def wait_state(self, state: State) -> None:
        """Waits until it is there; a child that ended before is a failure."""
        wait_for(lambda: self.get(Column.STATE) >= state or self.ended(), f"{self.role} {self.row} to be {state.name}")
        assert self.get(Column.STATE) >= state, f"{self.role} {self.row} ended early; {self.herd.story()}"

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Herd:
    """Client processes around nodes. A context manager; `finish` is what makes a test of it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.board = Board(folder)
        self.children: list[Child] = []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
        with (folder / "breeder.log").open("wb") as log:
            self._breeder = subprocess.Popen(
                [sys.executable, "-m", "stress.breeder", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                process_group=0,
            )

    def __enter__(self) -> Herd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.board.end_all()
        for child in self.children:
            child.signal(signal.SIGKILL)
            child.close()
        assert self._breeder.stdin is not None
        self._breeder.stdin.close()
        try:
            self._breeder.wait(10)
        except subprocess.TimeoutExpired:
            self._breeder.kill()
            self._breeder.wait()
        assert self._breeder.stdout is not None
        self._breeder.stdout.close()

    def start(self, role: str, endpoints: str | list[str], **options: Any) -> Child:
        """Forks a child that plays `role` (a function of roles.py)."""
        row = len(self.children) + 1
        assert row < ROWS // 2, "the board is full"
        order = {"role": role, "row": row, "endpoints": endpoints, "options": options}
        assert self._breeder.stdin is not None
        assert self._breeder.stdout is not None
        self._breeder.stdin.write(json.dumps(order) + "\n")
        self._breeder.stdin.flush()
        answer = self._breeder.stdout.readline()
        assert answer, f"the breeder is gone: {self.log()}"
        child = Child(self, row, role, int(answer))
        self.children.append(child)
        return child

    def log(self) -> str:
        return (self.folder / "breeder.log").read_text()[-4000:]

    @property
    def full(self) -> bool:
        """Nearly as many children as it may have."""
        return len(self.children) > ROWS // 2 - 50

    def private_rows(self) -> list[int]:
        """Rows of children that save blocks of their own."""
        return [child.row for child in self.children if child.role in ("holder", "parent", "scribbler")]

    def story(self) -> str:
        return f"findings: {self.board.findings()}; log: {self.log()}"

    def finish(self) -> None:
        """Tells all to end, waits for it, and fails on any finding, any death that was not ours, and two values of one
        version that no single process could have seen."""
        self.board.end_all()
        for child in self.children:
            child.wake()
        for child in self.children:
            wait_for(child.ended, f"the end of {child.role} {child.row}")
            done = child.get(Column.STATE) == State.DONE
            assert done or child.killed, f"{child.role} {child.row} died; {self.story()}"
        findings = self.board.findings()
        assert not findings, f"{len(findings)} findings:\n" + "\n".join(findings[:20])
        ledger = Ledger()
        for path in sorted(self.folder.glob("ledger-*")):
            try:
                ledger.merge(json.loads(path.read_text()))
            except TwoValues as error:
                raise AssertionError(f"between processes: {error}") from error
