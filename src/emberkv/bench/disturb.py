"""What a benchmark does to its machine on purpose: a busy Python thread, and processes kept on given cores.

Why it exists: an idle machine flatters everyone; an engine process is not idle.
Laws: what is disturbed is put back when the context ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class BusyThread:
    """A thread that runs plain Python all the time, as an engine's scheduler does. `turns` shows that it really ran."""

    def __init__(self) -> None:
        self.turns = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="busy", daemon=True)

    def _run(self) -> None:
        while not self._stop:
            for _ in range(1000):
                pass
            self.turns += 1

    def __enter__(self) -> BusyThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()


@contextmanager
def on_cores(ours: int, serving: int, pids: Sequence[int]) -> Iterator[None]:
    """Keeps this process's main thread on core `ours` and all threads of `pids` on core `serving`.

    Who shares a core with whom decides what a wake-up costs, so it must be the same for both sides of a comparison.
    """
    before: dict[int, set[int]] = {}
    try:
        _move(0, {ours}, before)
        for pid in pids:
            for thread in os.listdir(f"/proc/{pid}/task"):
                _move(int(thread), {serving}, before)
        yield
    finally:
        for thread_id, cores in before.items():
            try:
                os.sched_setaffinity(thread_id, cores)
            except OSError:
                pass  # that thread has ended


def _move(thread_id: int, cores: set[int], before: dict[int, set[int]]) -> None:
    try:
        before[thread_id] = os.sched_getaffinity(thread_id)
        os.sched_setaffinity(thread_id, cores)
    except OSError:
        before.pop(thread_id, None)  # ended, or a core that this container may not use: measure where it is


def two_cores() -> tuple[int, int]:
    """Two different cores that this process may use; twice the same when there is one."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[-1]
