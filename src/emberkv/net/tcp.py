"""Opening and accepting TCP links: the handshake, a thread per connection, and what a stranger may cost.

Why it exists: a bad connection must end alone: one logged reason, its thread and descriptor given back, nothing else.
Laws: a stranger has HANDSHAKE_TIMEOUT_MS to say a whole HELLO; connections are bounded; `stop` returns in bounded time.
Limits: CONNECTIONS_MAX threads of THREAD_STACK_BYTES each, of which the kernel backs only the touched pages
(measured: 1,000 idle connections take 28 MB).
"""

from __future__ import annotations

import errno
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from emberkv.errors import ConfigError, EmberError, ProtocolError, Unavailable
from emberkv.messages import ErrorFrame, Hello, Welcome
from emberkv.net.link import LinkClosed
from emberkv.net.tcp_link import TcpLink, register_for_fork
from emberkv.wire.session import checked_welcome

__all__ = ["TcpLink", "TcpListener", "connect", "parse_address", "serve_handshake", "start_thread"]

HANDSHAKE_TIMEOUT_MS: Final = 2000
"""Time for a stranger to say HELLO, so that half-open and slow connections do not collect threads."""
ERROR_TEXT_MAX: Final = 300
"""Characters kept of a line that a stranger sent."""

CONNECTIONS_MAX: Final = 4096
"""Connections served at once; with a few hundred engines per node this leaves room for a reconnect storm."""
BACKLOG: Final = 512
"""Connections that wait to be accepted: a whole cluster's clients may reconnect in one second."""
THREAD_STACK_BYTES: Final = 512 << 10
"""Python frames live on the heap; this is room for the C calls below them."""
STOP_TIMEOUT_S: Final = 5.0
"""Longest time that `stop` waits for handlers, all together."""
ACCEPT_PAUSE_S: Final = 0.05
"""Pause after accept() failed for want of descriptors or memory, so that the thread does not spin."""

_log = logging.getLogger("emberkv.net")
_stack_size_lock = threading.Lock()


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"address {address!r} is not host:port with a port of 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def one_line(text: str) -> str:
    """A stranger's text as one bounded printable line."""
    return "".join(char if char.isprintable() else " " for char in text[:ERROR_TEXT_MAX])


def open_socket(address: str, timeout_ms: int) -> socket.socket:
    """A connected blocking socket. Raises Unavailable. A host name is resolved without a deadline: prefer addresses."""
    host, port = parse_address(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        connection = socket.socket(family, kind, protocol)
    except OSError as error:
        raise Unavailable(f"cannot reach {address}: {error.strerror or error}") from error
    try:
        # Linux ends a blocking connect() after the send timeout.
        value = struct.pack("@ll", timeout_ms // 1000, timeout_ms % 1000 * 1000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        connection.connect(target)
    except BlockingIOError:
        connection.close()
        raise Unavailable(f"cannot reach {address}: no answer in {timeout_ms} ms") from None
    except OSError as error:
        connection.close()
        raise Unavailable(f"cannot reach {address}: {error.strerror or error}") from error
    return connection


def connect(address: str, hello: Hello, timeout_ms: int) -> tuple[TcpLink, Welcome]:
    """Opens a link and shakes hands within `timeout_ms` for each of the two.

    Raises Unavailable (try later or elsewhere), HandshakeRefused (useless to retry), ProtocolError (not one of us).
    """
    timeout_ms = max(1, timeout_ms)
    link = TcpLink(open_socket(address, timeout_ms), address)
    try:
        link.send(hello, 0)
        link.set_recv_timeout_ms(timeout_ms)
        _, answer = link.recv()
        welcome = checked_welcome(hello, answer, address)
    except BaseException:
        link.close()
        raise
    link.set_recv_timeout_ms(0)
    return link, welcome


def start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """Starts a daemon thread with a small stack. Raises RuntimeError when the system has no more threads."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    with _stack_size_lock:
        # The setting is the process's; it is put back at once for threads that are not ours.
        before = threading.stack_size(THREAD_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def serve_handshake(link: TcpLink, answer: Callable[[Hello], Welcome | ErrorFrame]) -> tuple[Hello, Welcome] | None:
    """The accepting side of the handshake: takes HELLO, sends what `answer` says.

    None: `answer` gave an ErrorFrame, which was sent; close the link. Raises ProtocolError when something else than
    HELLO came or it did not come whole within HANDSHAKE_TIMEOUT_MS, LinkClosed when the other side left.
    """
    link.set_recv_timeout_ms(HANDSHAKE_TIMEOUT_MS)
    header, hello = link.recv()
    if not isinstance(hello, Hello):
        raise ProtocolError(f"{link.peer_address} began with {header.kind.name} instead of HELLO")
    reply = answer(hello)
    link.send(reply, header.request_id)
    if isinstance(reply, ErrorFrame):
        _log.warning("connection from %s refused: %s", link.peer_address, reply.text)
        return None
    link.set_recv_timeout_ms(0)
    return hello, reply


class TcpListener:
    """Accepts connections and runs `handler(link)` in a thread of its own for each.

    Life: listening -> stopped. The handler begins with `serve_handshake`; when it returns or raises an EmberError or
    OSError the link is closed. `address` is where it really listens (the port may have been given as 0).
    Raises ConfigError when the address cannot be used.
    """

    def __init__(
        self, address: str, handler: Callable[[TcpLink], None], *, connections_max: int = CONNECTIONS_MAX
    ) -> None:
        self._handler = handler
        self._connections_max = connections_max
        self._lock = threading.Lock()
        self._links: dict[TcpLink, threading.Thread | None] = {}
        self._stopped = threading.Event()
        self._socket = _listening_socket(address)
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        register_for_fork(self)
        self._thread = start_thread(f"accept {self.address}", self._accept_all)

    @property
    def connections(self) -> int:
        """Connections being served now."""
        return len(self._links)

    def forget(self) -> None:
        """Closes this process's descriptor only (a forked child; its parent goes on listening)."""
        self._socket.close()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Ends listening and all connections; waits for the handlers. False: some did not end in time."""
        with self._lock:
            self._stopped.set()
            threads = [self._thread, *(thread for thread in self._links.values() if thread is not None)]
            for link in self._links:
                link.shutdown()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
        except OSError:
            pass  # stopped before
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._socket.close()
        late = [thread.name for thread in threads if thread.is_alive() and thread is not threading.current_thread()]
        if late:
            _log.error("%d handlers of %s did not end in %.1f s: %s", len(late), self.address, timeout_s, late[:3])
        return not late

    def _accept_all(self) -> None:
        troubled = False
        while not self._stopped.is_set():
            try:
                connection, peer = self._socket.accept()
            except OSError as error:
                if self._stopped.is_set() or error.errno in (errno.EINVAL, errno.EBADF):
                    return
                if error.errno != errno.ECONNABORTED:
                    if not troubled:
                        _log.warning("cannot accept on %s until there is room again: %s", self.address, error)
                    troubled = True
                    time.sleep(ACCEPT_PAUSE_S)
                continue
            troubled = False
            self._begin(connection, f"{peer[0]}:{peer[1]}")

    def _begin(self, connection: socket.socket, peer: str) -> None:
        try:
            link = TcpLink(connection, peer)
        except OSError:
            connection.close()  # reset before it was served
            return
        with self._lock:
            admitted = not self._stopped.is_set() and len(self._links) < self._connections_max
            if admitted:
                self._links[link] = None
        if not admitted:
            _log.warning("connection from %s refused: %d connections is the limit", peer, self._connections_max)
            link.close()
            return
        link.set_recv_timeout_ms(HANDSHAKE_TIMEOUT_MS)
        try:
            thread = start_thread(f"tcp {peer}", lambda: self._serve(link))
        except RuntimeError as error:
            _log.warning("connection from %s refused: %s", peer, error)
            self._end(link)
            return
        with self._lock:
            if link in self._links:
                self._links[link] = thread

    def _serve(self, link: TcpLink) -> None:
        try:
            self._handler(link)
        except LinkClosed:
            pass  # the usual end
        except (EmberError, OSError) as error:
            if not self._stopped.is_set():
                _log.warning("connection from %s closed: %s", link.peer_address, error)
        finally:
            self._end(link)

    def _end(self, link: TcpLink) -> None:
        with self._lock:
            self._links.pop(link, None)
        link.close()


def _listening_socket(address: str) -> socket.socket:
    host, port = parse_address(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror or error}") from error
    try:
        # A restarted node takes its port back from connections that are still in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        hint = " (is another node running there? choose another port)" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {address}: {error.strerror or error}{hint}") from error
    return listener
