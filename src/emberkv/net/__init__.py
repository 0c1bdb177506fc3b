"""Links between processes: TCP between machines, Unix sockets within one.

Why it exists: the names that both kinds of link share. An engine process loads net/local only, so nothing of TCP is
imported here.
Laws: every wait has a deadline; a malformed frame closes its own connection with one logged reason and nothing else.
"""

from __future__ import annotations

import time

from emberkv.net.link import LinkClosed, LinkTimeout

__all__ = ["LinkClosed", "LinkTimeout", "now_ns"]


def now_ns() -> int:
    """Nanoseconds of CLOCK_BOOTTIME, the clock of every `deadline_ns` in this room and of ports.Clock."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
