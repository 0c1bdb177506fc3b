"""One same-host connection: a frame per message of a Unix SEQPACKET socket, descriptors beside the frame.

Why it exists: an engine next to its node must not push payload through a socket. Frames carry offsets; the bytes lie in
two memory files whose descriptors ride on WELCOME (SCM_RIGHTS): the arena, then the connection's staging.
Laws: a message is one frame and is sent whole or not at all, so any thread may send; one thread at a time receives. A
descriptor that arrives has an owner or is closed, on every path. The socket is never made non-blocking: waits end by
SO_RCVTIMEO / SO_SNDTIMEO, which raises LinkTimeout and leaves the link usable (a message cannot stop in the middle).
Limits: a message is at most FRAME_BYTES_MAX, with at most DESCRIPTORS_MAX descriptors; a path at most 107 bytes.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
import struct
import weakref
from array import array
from collections.abc import Sequence

from emberkv.errors import ConfigError, EmberError, ProtocolError, Unavailable
from emberkv.messages import Hello, Message, Welcome
from emberkv.net import LinkClosed, LinkTimeout
from emberkv.wire.codec import FRAME_BYTES_MAX, HEADER_BYTES, Header, decode, decode_header, encode
from emberkv.wire.session import checked_welcome

PATH_BYTES_MAX = 107
"""sun_path has 108 bytes, the last one for the terminating zero."""
DESCRIPTORS_MAX = 2
"""Arena and staging. CMSG_SPACE rounds up to 8 bytes, so this is also exactly what the buffer has room for."""
SEND_BUFFER_BYTES = 1 << 20
"""A SEQPACKET message must fit the send buffer whole; this holds three of the largest frame."""
SO_PEERPIDFD = 77
"""Linux 6.5: the peer's pidfd, without the race between reading a pid and opening it."""
TIMEVAL = struct.Struct("@ll")
CREDENTIALS = struct.Struct("@iII")


_owners: weakref.WeakSet[LocalLink] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A descriptor that lives on in a child would keep the node from seeing the end of its parent, and so its pins.
    for owner in list(_owners):
        owner.forget()


os.register_at_fork(after_in_child=_forget_in_child)


class LocalLink:
    """One connected SEQPACKET socket.

    `send` may be called by any thread; `recv` by one thread at a time (it reuses one buffer). `calls` counts the socket
    calls that gave the interpreter lock away.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # Pages of this are touched only by frames that need them, so an idle connection costs one page, not 256 KiB.
        self._buffer = mmap.mmap(-1, FRAME_BYTES_MAX, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._buffer)
        self._recv_timeout_ms = 0
        self._send_timeout_ms = 0
        self.calls = 0
        self.closed = False
        # Without the right to exceed wmem_max the kernel gives less; a frame that does not fit is then EMSGSIZE.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        _owners.add(self)

    def fileno(self) -> int:
        """The descriptor of the socket; -1 after close."""
        return self._socket.fileno()

    def send(self, message: Message, request_id: int, fds: Sequence[int] = (), *, wait: bool = True) -> int:
        """Sends one frame with `fds` beside it; returns the number of socket calls made (1).

        Raises LinkClosed when the peer is gone, LinkTimeout after the send timeout (without `wait`: at once) if the
        peer takes nothing, ProtocolError if the frame is larger than the socket takes.
        """
        frame = encode(message, request_id)
        self.calls += 1
        try:
            if fds:
                self._socket.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))])
            else:
                self._socket.send(frame, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError as error:
            waited_ms = self._send_timeout_ms if wait else 0
            raise LinkTimeout(f"the peer took no message for {waited_ms} ms") from error
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                raise ProtocolError(f"a frame of {len(frame)} bytes does not fit the local socket") from error
            raise LinkClosed(f"local connection lost while sending: {error.strerror}") from error
        return 1

    def recv(self, fds_max: int = 0) -> tuple[Header, Message, tuple[int, ...]]:
        """Receives one frame: (header, message, descriptors). The caller owns and closes the descriptors.

        Descriptors are taken only when `fds_max` says so; else the kernel drops what the peer attached. Raises
        LinkClosed at the end of the connection, LinkTimeout after the receive timeout, ProtocolError for a frame
        that is cut, malformed or carries more than `fds_max` descriptors.
        """
        fds: tuple[int, ...] = ()
        self.calls += 1
        try:
            if fds_max:
                size, fds = self._recv_with_fds(fds_max)
            else:
                # MSG_TRUNC as an argument: the true size of the message, even when the buffer was too small.
                size = self._socket.recv_into(self._buffer, 0, socket.MSG_TRUNC)
        except BlockingIOError as error:
            raise LinkTimeout(f"no answer for {self._recv_timeout_ms} ms") from error
        except OSError as error:
            raise LinkClosed(f"local connection lost: {error.strerror}") from error
        try:
            if size == 0:
                raise LinkClosed("the peer closed the local connection")
            header, message = self._parse(size)
        except EmberError:
            close_fds(fds)
            raise
        return header, message, fds

    def _recv_with_fds(self, fds_max: int) -> tuple[int, tuple[int, ...]]:
        room = socket.CMSG_SPACE(min(fds_max, DESCRIPTORS_MAX) * 4)
        size, ancillary, flags, _ = self._socket.recvmsg_into(
            [self._buffer], room, socket.MSG_TRUNC | socket.MSG_CMSG_CLOEXEC
        )
        fds: list[int] = []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = array("i")
                whole.frombytes(data[: len(data) - len(data) % whole.itemsize])
                fds.extend(whole)
        if flags & socket.MSG_CTRUNC or len(fds) > fds_max:
            close_fds(fds)
            raise ProtocolError(f"a local frame carries more than {fds_max} descriptors")
        return size, tuple(fds)

    def _parse(self, size: int) -> tuple[Header, Message]:
        if size > FRAME_BYTES_MAX:
            raise ProtocolError(f"a local frame of {size} bytes is over the limit of {FRAME_BYTES_MAX}")
        if size < HEADER_BYTES:
            raise ProtocolError(f"a local frame of {size} bytes is shorter than its header")
        head = self._view[:HEADER_BYTES]
        header = decode_header(head)
        if header.body_len != size - HEADER_BYTES:
            raise ProtocolError(f"a local frame states {header.body_len} body bytes and has {size - HEADER_BYTES}")
        return header, decode(header, head, self._view[HEADER_BYTES:size])

    def set_recv_timeout_ms(self, timeout_ms: int) -> None:
        """Longest wait of one recv in milliseconds; 0 waits for ever."""
        if timeout_ms != self._recv_timeout_ms:
            self._set_timeout(socket.SO_RCVTIMEO, timeout_ms)
            self._recv_timeout_ms = timeout_ms

    def set_send_timeout_ms(self, timeout_ms: int) -> None:
        """Longest wait of one send in milliseconds; 0 waits for ever."""
        if timeout_ms != self._send_timeout_ms:
            self._set_timeout(socket.SO_SNDTIMEO, timeout_ms)
            self._send_timeout_ms = timeout_ms

    def _set_timeout(self, option: int, timeout_ms: int) -> None:
        try:
            self._socket.setsockopt(
                socket.SOL_SOCKET, option, TIMEVAL.pack(timeout_ms // 1000, timeout_ms % 1000 * 1000)
            )
        except OSError as error:
            raise LinkClosed(f"local connection lost: {error.strerror}") from error

    def peer_pid(self) -> int:
        """Process id of the peer when it connected (SO_PEERCRED)."""
        data = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        pid, _, _ = CREDENTIALS.unpack(data)
        return int(pid)

    def peer_pidfd(self) -> int:
        """A new pidfd of the peer, readable once it exited; the caller closes it. Raises LinkClosed if it is gone."""
        try:
            return self._socket.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        except OSError:
            pass  # before Linux 6.5; or the peer is gone, which the next line finds too
        try:
            return os.pidfd_open(self.peer_pid())
        except OSError as error:
            raise LinkClosed(f"the peer process is gone: {error.strerror}") from error

    def close(self) -> None:
        """Ends the connection for both sides and wakes a thread that waits in `recv`. Idempotent."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def is_fresh(self) -> bool:
        """True when the link is idle and sound: open, with nothing waiting to be read. Does not wait."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return not self.closed
        except OSError:
            return False
        return False

    def forget(self) -> None:
        """Closes this process's descriptor only: for a forked child, whose parent goes on using the connection."""
        self.closed = True
        self._socket.close()


def close_fds(fds: Sequence[int]) -> None:
    """Closes descriptors; one that is closed already is no error."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def check_path(path: str) -> str:
    """Returns `path`; raises ConfigError when a Unix socket cannot have it."""
    size = len(os.fsencode(path))
    if not path or size > PATH_BYTES_MAX:
        raise ConfigError(
            f"socket path has {size} bytes, 1 to {PATH_BYTES_MAX} are possible: {path!r}; choose a shorter one"
        )
    return path


def exchange_hello(link: LocalLink, hello: Hello) -> tuple[Message, tuple[int, ...]]:
    """Sends HELLO and takes the answer with its descriptors.

    A node that is full answers before it was asked and closes: then sending fails, and the first receive reports the
    reset, but the reason is still there to be read.
    """
    lost: LinkClosed | None = None
    try:
        link.send(hello, 0)
    except LinkClosed as error:
        lost = error
    for _ in range(2):
        try:
            _, answer, fds = link.recv(DESCRIPTORS_MAX)
        except LinkClosed as error:
            lost = lost or error
        else:
            return answer, fds
    assert lost is not None
    raise lost


def connect_local(path: str, hello: Hello, timeout_ms: int) -> tuple[LocalLink, Welcome, int, int]:
    """Connects and shakes hands: (link, welcome, arena descriptor, staging descriptor); -1 for one that was not sent.

    The caller owns the descriptors. Raises Unavailable (nobody answers), HandshakeRefused (do not retry here),
    ProtocolError, ConfigError (impossible path).
    """
    check_path(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = LocalLink(connection)
    fds: tuple[int, ...] = ()
    try:
        link.set_send_timeout_ms(timeout_ms)  # also bounds connect() to a node that does not accept
        link.set_recv_timeout_ms(timeout_ms)
        try:
            connection.connect(path)
        except OSError as error:
            raise Unavailable(f"no node answers at unix:{path}: {error.strerror}") from error
        answer, fds = exchange_hello(link, hello)
        welcome = checked_welcome(hello, answer, f"unix:{path}")
        expected = bool(welcome.arena_bytes) + bool(welcome.staging_bytes)
        if len(fds) != expected:
            raise ProtocolError(f"unix:{path} sent {len(fds)} descriptors where its welcome states {expected}")
    except BaseException:
        close_fds(fds)
        link.close()
        raise
    rest = list(fds)
    arena_fd = rest.pop(0) if welcome.arena_bytes else -1
    staging_fd = rest.pop(0) if welcome.staging_bytes else -1
    return link, welcome, arena_fd, staging_fd
