"""Ends a local connection when the process that opened it exits, even if a child still holds the socket.

Why it exists: pins end with the process. EOF normally says so, but a descriptor that leaked into a child would keep
the socket, and so the pins, alive.
"""

from __future__ import annotations

import os
import select
import threading

from emberkv.net.link import LinkClosed
from emberkv.net.local_link import LocalLink

POLL_S = 0.25
"""The thread looks up this often so that `stop` returns."""


class ProcessWatcher:
    """One thread over the pidfds of all local clients."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._links: dict[int, LocalLink] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="process-watcher", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def add(self, link: LocalLink) -> int:
        """Watches the peer of a connection; returns a token for `remove`. Raises LinkClosed if it is gone already."""
        pidfd = link.peer_pidfd()
        self._links[pidfd] = link
        try:
            self._epoll.register(pidfd, select.EPOLLIN)
        except OSError as error:
            self._links.pop(pidfd, None)
            os.close(pidfd)
            raise LinkClosed(f"cannot watch the client process: {error.strerror}") from error
        return pidfd

    def remove(self, pidfd: int) -> None:
        """The connection ended."""
        if self._links.pop(pidfd, None) is not None:
            try:
                self._epoll.unregister(pidfd)
            except (OSError, ValueError):
                pass  # stopping
            os.close(pidfd)

    def _run(self) -> None:
        while not self._stop.is_set():
            for pidfd, _ in self._epoll.poll(POLL_S):
                link = self._links.get(pidfd)
                if link is not None:
                    try:
                        self._epoll.modify(pidfd, 0)
                    except OSError:
                        pass  # removed meanwhile
                    link.close()

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=2 * POLL_S)
        self._epoll.close()
