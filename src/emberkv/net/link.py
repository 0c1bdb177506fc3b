"""How a link ends: the two errors that TCP and local links share.

Why it exists: an engine process loads net/local only, so what both kinds of link raise must not live beside TCP.
Laws: both are nobody's fault (Unavailable): the caller goes on without the link or opens another one.
"""

from __future__ import annotations

import select
from typing import Final

from emberkv.errors import Unavailable

_GONE: Final = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class LinkClosed(Unavailable):
    """The other side went away, or this side closed the link; nothing more can be sent or received on it."""


class LinkTimeout(Unavailable):
    """Nothing came, or nothing could be sent, in time. `closed` of the link says whether it can still be used."""


def hung_up(descriptor: int) -> bool:
    """Has the other side closed this socket, although what it sent before may still lie here unread? Does not wait."""
    if descriptor < 0:
        return True
    poller = select.poll()
    poller.register(descriptor, select.POLLRDHUP)
    return any(events & _GONE for _, events in poller.poll(0))
