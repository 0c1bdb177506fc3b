"""The same-host door: where a node accepts the engines of its machine, and the names of the link (local_link.py).

Why it exists: a socket file outlives its process and can be taken by two nodes at once; both are settled here.
Laws: a lock file beside the socket tells a live owner from a stale file; one connection's fault ends that connection
with one logged line and nothing else.
Limits: CONNECTIONS_MAX connections, a thread each.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable

from emberkv.errors import ConfigError, EmberError
from emberkv.messages import ErrorFrame
from emberkv.net.link import LinkClosed
from emberkv.net.local_link import DESCRIPTORS_MAX, PATH_BYTES_MAX, LocalLink, check_path, close_fds, connect_local

__all__ = [
    "LocalLink",
    "LocalListener",
    "connect_local",
    "check_path",
    "close_fds",
    "DESCRIPTORS_MAX",
    "PATH_BYTES_MAX",
]

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 1024
"""Per listener: a thread each (28 KiB resident), so a runaway engine cannot use up the node's memory."""
BACKLOG = 128

_listeners: weakref.WeakSet[LocalListener] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A child that kept the lock would make the path look taken after its parent, the node, died.
    for listener in list(_listeners):
        listener.forget()


os.register_at_fork(after_in_child=_forget_in_child)


class LocalListener:
    """Accepts local connections at `path`; `handler(link)` runs in a thread of its own per connection.

    The link is closed when the handler returns. Raises ConfigError for a path that is too long, is not a socket, or is
    in use by a live process; a socket file left by a dead one is replaced.
    """

    def __init__(
        self,
        path: str,
        handler: Callable[[LocalLink], None],
        *,
        mode: int = 0o600,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self.path = check_path(path)
        self._handler = handler
        self._connections_max = connections_max
        self._links: dict[LocalLink, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._lock_fd = lock_path(path)
        try:
            self._socket = bind_path(path, mode)
        except BaseException:
            os.close(self._lock_fd)
            raise
        _listeners.add(self)
        self._thread = threading.Thread(target=self._accept, name="accept local", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        troubled = False
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                # Out of descriptors or memory: the waiting peer stays in the backlog until there is room again.
                if not troubled:
                    log.warning("local socket %s cannot accept now: %s", self.path, error.strerror)
                troubled = True
                time.sleep(0.1)
                continue
            troubled = False
            try:
                link = LocalLink(connection)
            except OSError as error:
                connection.close()
                log.warning("local connection refused: %s", error.strerror or error)
                continue
            self._begin(link)

    def _begin(self, link: LocalLink) -> None:
        thread = threading.Thread(target=self._serve, args=(link,), name="local ", daemon=True)
        with self._lock:
            admitted = len(self._links) < self._connections_max and not self._closing.is_set()
            if admitted:
                self._links[link] = thread
        if not admitted:
            refuse(link, f"the node has its limit of {self._connections_max} local connections; close some")
            return
        try:
            thread.start()
        except RuntimeError as error:  # no more threads; the one that accepts is vital and must go on
            log.warning("local connection refused: %s", error)
            with self._lock:
                self._links.pop(link, None)
            refuse(link, f"the node has no room for another connection: {error}")

    def _serve(self, link: LocalLink) -> None:
        try:
            self._handler(link)
        except LinkClosed:
            pass  # the usual end
        except (EmberError, OSError) as error:
            log.warning("local connection closed: %s", error)
        finally:
            link.close()
            with self._lock:
                self._links.pop(link, None)

    def connections(self) -> int:
        """How many connections are open."""
        with self._lock:
            return len(self._links)

    def forget(self) -> None:
        """Closes this process's descriptors only: for a forked child, whose parent goes on listening."""
        self._closing.set()
        self._socket.close()
        with contextlib.suppress(OSError):
            os.close(self._lock_fd)

    def close(self, timeout_s: float = 2.0) -> None:
        """Stops accepting, ends all connections, waits for their threads, removes the socket file. Idempotent."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            links = dict(self._links)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() alone would not
        self._socket.close()
        for link in links:
            link.close()
        for thread in (self._thread, *links.values()):
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(timeout_s)
        os.close(self._lock_fd)


def refuse(link: LocalLink, text: str) -> None:
    """Sends one error line to a peer that is not served, and closes."""
    try:
        link.set_send_timeout_ms(100)
        link.send(ErrorFrame(text), 0)
    except EmberError:
        pass  # it learns the same from the closed connection
    link.close()


def lock_path(path: str) -> int:
    """Takes the lock file beside a socket path; returns its descriptor. Raises ConfigError when a live process has it.

    A lock dies with its process, so it tells a live owner from a stale file even when that owner is frozen, and two
    starters never remove each other's socket.
    """
    try:
        fd = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot listen at unix:{path}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"unix:{path} is in use by a live node: stop it or choose another path") from error
    return fd


def bind_path(path: str, mode: int) -> socket.socket:
    """Listening socket at `path`, replacing a stale socket file. Raises ConfigError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        remove_stale(path)
        os.fchmod(listener.fileno(), mode)  # before bind, so the file never exists with wider rights
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at unix:{path}: {error.strerror}") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def remove_stale(path: str) -> None:
    """Removes a socket file that nobody listens at; raises ConfigError if it is something else or somebody does."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"{path} exists and is not a socket: remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError:
            pass  # a full backlog or another kind of socket: somebody has it
    raise ConfigError(f"unix:{path} is in use by a live process: stop it or choose another path")
