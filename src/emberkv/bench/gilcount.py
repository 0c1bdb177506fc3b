"""Counts how often a call gives up the interpreter lock, without asking the code that is counted.

Why it exists: "at most 4 returns to the GIL" is a promise of the client, so its own counter is no proof.
How: a profile hook sees each call into C of this thread. Those in RELEASING give the lock up whenever they are called,
those of xxhash for inputs above its threshold, locks only when they are contended (not counted: the load path of one
thread holds them uncontended).
Limits: one thread, the one that calls; slow, so never while time is taken.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

RELEASING: Final = frozenset(
    {
        # _socket.socket
        "send", "sendall", "sendmsg", "sendto", "recv", "recv_into", "recvmsg", "recvmsg_into", "recvfrom", "connect",
        "connect_ex", "accept", "_accept", "shutdown", "close",
        # numpy: everything that copies or gathers
        "take", "copyto", "copy", "tobytes", "choose", "compress", "astype", "__setitem__", "concatenate",
        # time, select, os, mmap
        "sleep", "poll", "select", "read", "write", "readv", "writev", "preadv", "pwritev", "flush", "madvise",
        # xxhash releases above about 100 KiB
        "xxh3_128_digest", "xxh3_128_intdigest", "xxh3_128_hexdigest", "xxh3_128", "update",
        # torch
        "index_select", "copy_",
    }
)  # fmt: skip
WAITING: Final = frozenset({"acquire"})
"""A lock's acquire gives the lock up only when it has to wait; listed apart in the details."""


class GilCounter:
    """Runs an action and counts by name the calls that give up the interpreter lock."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.locks = 0

    def run(self, action: Callable[[], object]) -> int:
        """Number of such calls that `action` made on this thread."""
        self.calls.clear()
        self.locks = 0

        def hook(_frame: FrameType, event: str, argument: Any) -> None:
            if event == "c_call":
                name = argument.__name__
                if name in RELEASING:
                    self.calls[name] += 1
                elif name in WAITING:
                    self.locks += 1

        before = sys.getprofile()
        sys.setprofile(hook)
        try:
            action()
        finally:
            sys.setprofile(before)
        return sum(self.calls.values())
