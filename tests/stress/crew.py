"""Threads of one test: start together, end together, and the first failure of any is the test's."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence

from stress.herd import HANG_S

SWITCH_INTERVAL_S = 0.00002
"""A tenth of a node's: threads change places in the middle of everything."""


class Crew:
    """Runs bodies until `seconds` have passed or one fails. A body asks `over` between its rounds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._failed: list[BaseException] = []
        self._seconds = seconds

    @property
    def over(self) -> bool:
        return bool(self._failed) or time.monotonic() >= self._end

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # carried over to the test's thread, which raises it
            self._failed.append(error)

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Raises what the first failing body raised."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        threads = [threading.Thread(target=self._guarded, args=(body,), daemon=True) for body in bodies]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(self._seconds + HANG_S)
                assert not thread.is_alive(), "a thread hangs"
        finally:
            sys.setswitchinterval(before)
        if self._failed:
            raise self._failed[0]
