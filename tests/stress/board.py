"""What driver and children know of one another: a page of numbers that outlives a killed child, and a list of findings.

Laws: each row has one writer (its child), except the orders, which the driver writes; numbers are single words, so a
stopped or killed child leaves them whole. A finding is one line, appended with one write.
"""

from __future__ import annotations

import os
from enum import IntEnum
from pathlib import Path
from typing import Final

import numpy as np

ROWS: Final = 8192
"""Children of one herd in its life, and as many rows for what they fork: a minute of killing uses 2,000."""


class Column(IntEnum):
    STATE = 0
    PINS = 1
    """Pins taken."""
    LOOKS = 2
    """Blocks of which every byte was compared."""
    VOID = 3
    """Pins that had ended before they were given back: what was read through them is not believed."""
    KEPT = 4
    """Pins that were whole to their end."""
    SAVES = 5
    """Blocks whose save was accepted."""
    LOST_SAVES = 6
    """Blocks whose save ended unknown or refused."""
    HELD_BYTES = 7
    CHILD = 8
    """Pid of a process that this one forked."""


class State(IntEnum):
    NEW = 0
    BUSY = 1
    HOLDING = 2
    """Has pinned and read all that it wants, and keeps it until it is told to release."""
    DONE = 3


class Order(IntEnum):
    GO_ON = 0
    RELEASE = 1


class Board:
    """Rows of int64 in a file that all map. Row 0 is the driver's: its first word tells all to end."""

    def __init__(self, folder: Path) -> None:
        path = folder / "board"
        if not path.exists():
            path.write_bytes(bytes(ROWS * len(Column) * 2 * 8))
        cells = np.memmap(path, np.int64, "r+", shape=(2, ROWS, len(Column)))
        self.cells, self.orders = cells[0], cells[1]
        self._findings = folder / "findings"

    def end_all(self) -> None:
        self.cells[0, 0] = 1

    @property
    def ending(self) -> bool:
        return bool(self.cells[0, 0])

    def get(self, row: int, column: Column) -> int:
        return int(self.cells[row, column])

    def add(self, row: int, column: Column, count: int = 1) -> None:
        self.cells[row, column] += count

    def put(self, row: int, column: Column, value: int) -> None:
        self.cells[row, column] = value

    def total(self, column: Column) -> int:
        return int(self.cells[1:, column].sum())

    def order(self, row: int, order: Order) -> None:
        self.orders[row, 0] = order

    def ordered(self, row: int) -> Order:
        return Order(int(self.orders[row, 0]))

    def find(self, row: int, text: str) -> None:
        """A violation, for the driver to fail on."""
        line = f"row {row}, process {os.getpid()}: {text}".replace("\n", " | ")
        fd = os.open(self._findings, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, line.encode() + b"\n")
        os.close(fd)

    def findings(self) -> list[str]:
        return self._findings.read_text().splitlines() if self._findings.exists() else []
