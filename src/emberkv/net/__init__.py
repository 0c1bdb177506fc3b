"""Links between processes: TCP between machines, Unix sockets within one.

Why it exists: the names that both kinds of link share. An engine process loads net/local only, so nothing of TCP is
imported here.
Laws: every wait has a deadline; a malformed frame closes its own connection with one logged reason and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

from emberkv.net.link import LinkClosed, LinkTimeout

__all__ = ["LinkClosed", "LinkTimeout", "now_ns"]


now_ns: Final[Callable[[], int]] = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)
"""Nanoseconds of CLOCK_BOOTTIME, the clock of every `deadline_ns` in this room and of ports.Clock.

Not a function of ours, because a get asks eight times: 0.1 us each instead of 0.3."""
