"""Forks the children of a herd: a process without threads that has loaded everything, so that a child costs a fork.

One line of JSON in (what to play), one line out (its pid). When it ends, which is at the end of its input or with its
driver, the kernel kills what it forked.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from stress import roles
from stress.board import Board, Column, State

PR_SET_PDEATHSIG = 1


def play(folder: Path, order: dict[str, Any], breeder: int) -> int:
    """A child, from its first breath to its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != breeder:
        return 1
    board = Board(folder)
    row = order["row"]
    board.put(row, Column.STATE, State.BUSY)
    try:
        me = roles.Actor(board, folder, row, order["endpoints"], order["options"])
        roles.ROLES[order["role"]](me)
        me.end()
    except BaseException:  # the boundary of a process: whatever it was, the driver must learn of it
        board.find(row, f"{order['role']} died: {traceback.format_exc()}")
        return 1
    board.put(row, Column.STATE, State.DONE)
    return 0


def main() -> None:
    folder, breeder = Path(sys.argv[1]), os.getpid()
    faulthandler.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps; the driver watches by pidfd
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = play(folder, json.loads(line), breeder)
            finally:
                os._exit(code)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
