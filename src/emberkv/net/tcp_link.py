"""One TCP connection as a link that speaks frames.

Why it exists: the few socket calls of a batched transfer, made so that payload goes straight between the kernel and
its place in memory.
Laws: sockets stay blocking (a Python timeout makes them poll and breaks MSG_WAITALL), waits end by SO_RCVTIMEO and
SO_SNDTIMEO; each length is bounded by the codec before it is believed; a link that stopped inside a frame is closed,
because nobody knows where the next frame starts.
Limits: one thread receives; any thread sends, one frame at a time; `close` may come from any thread.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from emberkv.errors import ConfigError, ProtocolError
from emberkv.messages import Kind, Message
from emberkv.net import LinkClosed, LinkTimeout, now_ns
from emberkv.wire.codec import HEADER_BYTES, Header, decode, decode_header, encode, payload_bytes

__all__ = ["TcpLink", "register_for_fork"]

IOV_MAX: Final = 1024
"""Most buffers that Linux takes in one vectored call."""
FRAME_TIMEOUT_MS: Final = 2000
"""Time for the rest of a header or body once its first byte came: both fit one small burst of packets."""
STALL_TIMEOUT_MS: Final = 5000
"""Longest time without progress while sending, and grace of a transfer without a deadline of its own."""
RATE_MIN_BYTES_PER_S: Final = 64 << 20
"""Slowest payload that is still called alive: 0.5 Gb/s. Bounds the time that a dripping peer can hold a thread."""
TIMEOUT_STEP_US: Final = 4000
TIMEOUT_STEP_NS: Final = TIMEOUT_STEP_US * 1000
ARMED_MIN_US: Final = 100_000
"""A receive timeout of at least this that is armed already serves a later deadline too: whoever waits looks at the
clock and waits again. Saves two system calls per get."""
"""Receive timeouts are rounded up to this, about the kernel's tick, so that equal budgets need no new setsockopt."""
USER_TIMEOUT_MS: Final = 3000
"""TCP_USER_TIMEOUT: unacknowledged data this old ends the connection, so a half-open one is noticed."""


class _Forgets(Protocol):
    def forget(self) -> None: ...


_descriptors: weakref.WeakSet[_Forgets] = weakref.WeakSet()


def register_for_fork(holder: _Forgets) -> None:
    """A forked child calls `holder.forget()`."""
    _descriptors.add(holder)


def _close_in_child() -> None:
    # A copy in a child would keep the connection open after its parent died. No shutdown: the parent goes on using it.
    for holder in list(_descriptors):
        holder.forget()


os.register_at_fork(after_in_child=_close_in_child)


def transfer_deadline_ns(byte_count: int, grace_ms: int = STALL_TIMEOUT_MS) -> int:
    """When a transfer of `byte_count` bytes that has no deadline of its own is given up."""
    return now_ns() + grace_ms * 1_000_000 + byte_count * 1_000_000_000 // RATE_MIN_BYTES_PER_S


def _rest(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of `buffers` after their first `done` bytes."""
    for index, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer[done:], *buffers[index + 1 :]]
        done -= buffer.nbytes
    return []


class TcpLink:
    """Frames over one connected socket.

    Life: open -> closed (by `close`, by EOF, or by a frame that stopped in the middle). `calls` counts the socket
    calls that give up the interpreter lock; getting it back beside a busy thread costs up to 5 ms each.
    """

    __slots__ = (
        "__weakref__",
        "_armed_recv_us",
        "_late",
        "_recv_timeout_ms",
        "_send_lock",
        "_send_timeout_ms",
        "_socket",
        "calls",
        "closed",
        "eof",
        "peer_address",
        "send_ns",
    )

    def __init__(self, connection: socket.socket, peer_address: str = "") -> None:
        self._socket = connection
        self._send_lock = threading.Lock()
        self._late: deque[bytes] = deque()
        self._armed_recv_us = -1
        self._recv_timeout_ms = 0
        self._send_timeout_ms = 0
        self.calls = 0
        self.closed = False
        self.eof = False
        """The other side ended the connection (as opposed to a deadline that passed)."""
        self.peer_address = peer_address
        self.send_ns = 0
        """How long the last `send` took: a small one that took milliseconds waited for the interpreter lock."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Idle for 5 s, then three probes a second apart: a machine that vanished is noticed in 8 s.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self.set_send_timeout_ms(STALL_TIMEOUT_MS)
        register_for_fork(self)

    # -- settings ---------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """The descriptor, -1 after `close`."""
        return self._socket.fileno()

    def set_recv_timeout_ms(self, timeout_ms: int) -> None:
        """Longest wait of `recv` for the first byte of a frame; 0 waits until the link is closed."""
        self._recv_timeout_ms = timeout_ms

    def set_send_timeout_ms(self, timeout_ms: int) -> None:
        """Longest time without progress while sending; more than 0, so that a frozen peer cannot hold a thread."""
        if timeout_ms == self._send_timeout_ms:
            return
        if timeout_ms <= 0:
            raise ConfigError("a send timeout must be more than 0 ms")
        self._send_timeout_ms = timeout_ms
        value = struct.pack("@ll", timeout_ms // 1000, timeout_ms % 1000 * 1000)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def _arm_recv(self, timeout_us: int) -> None:
        """Sets SO_RCVTIMEO; 0 is no limit. The kernel rounds up to its tick of 1 to 10 ms."""
        if timeout_us == self._armed_recv_us:
            return
        value = struct.pack("@ll", timeout_us // 1_000_000, timeout_us % 1_000_000)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        except OSError as error:
            raise self._gone(error) from error
        self._armed_recv_us = timeout_us

    def _arm_until(self, deadline_ns: int) -> bool:
        """Arms a receive timeout for what is left, or a part of it; False when nothing is left."""
        left_ns = deadline_ns - now_ns()
        if left_ns <= 0:
            return False
        if ARMED_MIN_US <= self._armed_recv_us <= left_ns // 1000:
            return True
        self._arm_recv((left_ns // TIMEOUT_STEP_NS + 1) * TIMEOUT_STEP_US)
        return True

    # -- ending -----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Wakes whoever waits on this link, in this or another thread, which then sees LinkClosed. Keeps the number."""
        self.closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # never connected, or the other side was first

    def close(self) -> None:
        """Ends the connection and gives the descriptor back. May be called twice and from any thread."""
        self.shutdown()
        self._socket.close()

    def forget(self) -> None:
        """Closes this process's descriptor only: for a forked child, whose parent goes on using the connection."""
        self.closed = True
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

    def _gone(self, error: OSError | None = None) -> LinkClosed:
        self.eof = not self.closed
        self.shutdown()
        return LinkClosed(f"connection to {self.peer_address or 'peer'} ended" + (f": {error}" if error else ""))

    def _stalled(self, what: str) -> LinkTimeout:
        self.shutdown()
        return LinkTimeout(f"{self.peer_address or 'peer'} {what}; connection closed")

    # -- sending ----------------------------------------------------------------------------------------------------

    def send(self, message: Message, request_id: int, payload: Sequence[memoryview] = (), deadline_ns: int = 0) -> int:
        """Sends one frame, header, body and payload slices together; returns the number of socket calls made.

        `payload` are contiguous byte views. Raises LinkClosed, or LinkTimeout (the link is then closed): after a send
        timeout without progress, or at `deadline_ns`, where the send timeout is to be what was left before the call.
        """
        total = 0
        for view in payload:
            total += view.nbytes
        frame = encode(message, request_id, total)
        with self._send_lock:
            start_ns = now_ns()
            made = self._send_all([frame, *payload] if payload else [frame], len(frame) + total, deadline_ns)
            self.send_ns = now_ns() - start_ns
        if self._late:
            self._send_waiting()
        return made

    def send_now(self, message: Message, request_id: int) -> None:
        """Sends a frame without payload and never waits: for threads that serve others too.

        While another thread is sending, the frame is left to it. Raises LinkClosed, or LinkTimeout when the other side
        has left no room for it (the link is then closed).
        """
        self._late.append(encode(message, request_id))
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Whoever gets the lock sends what was left by those who did not; looked at again after it is given back."""
        while self._late and self._send_lock.acquire(blocking=False):
            try:
                while self._late:
                    frame = self._late.popleft()
                    self.calls += 1
                    if self._socket.send(frame, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT) < len(frame):
                        raise self._stalled("takes no answers")
            except BlockingIOError:
                raise self._stalled("takes no answers") from None
            except OSError as error:
                raise self._gone(error) from error
            finally:
                self._send_lock.release()

    def _send_all(self, buffers: Sequence[bytes | memoryview], total: int, deadline_ns: int) -> int:
        """Sends all buffers in order: in one call, unless they are over IOV_MAX or the kernel stops short."""
        connection = self._socket
        bounded = deadline_ns != 0
        made = 0
        while True:
            made += 1
            self.calls += 1
            try:
                if len(buffers) == 1:
                    sent = connection.send(buffers[0], socket.MSG_NOSIGNAL)
                else:
                    sent = connection.sendmsg(buffers[:IOV_MAX], (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                raise self._stalled(f"took no byte for {self._send_timeout_ms} ms") from None
            except OSError as error:
                raise self._gone(error) from error
            total -= sent
            if total == 0:
                return made
            if deadline_ns == 0:
                deadline_ns = transfer_deadline_ns(total, self._send_timeout_ms)
            elif now_ns() > deadline_ns:
                raise self._stalled("reads too slowly")
            elif bounded:  # each call would wait for the whole time anew
                self.set_send_timeout_ms(max(1, (deadline_ns - now_ns()) // 1_000_000))
            buffers = _rest([memoryview(buffer) for buffer in buffers], sent)

    # -- receiving --------------------------------------------------------------------------------------------------

    def recv(self) -> tuple[Header, Message]:
        """The next frame without its payload, which must then be taken with `recv_payload`.

        Waits at most the receive timeout for the first byte: LinkTimeout, and the link can still be used. Raises
        LinkClosed at EOF between frames and ProtocolError for a bad or truncated frame.
        """
        head = self._recv_head()
        header = decode_header(head)
        body = self._recv_body(header.body_len) if header.body_len else b""
        return header, self._checked(header, decode(header, head, body))

    def _recv_head(self) -> bytes:
        self._arm_recv(self._recv_timeout_ms * 1000)
        self.calls += 1
        try:
            head = self._socket.recv(HEADER_BYTES)
        except BlockingIOError:
            raise LinkTimeout(f"{self.peer_address or 'peer'} sent nothing for {self._recv_timeout_ms} ms") from None
        except OSError as error:
            raise self._gone(error) from error
        if not head:
            raise self._gone()
        if len(head) < HEADER_BYTES:
            head += self._recv_rest(HEADER_BYTES - len(head))
        return head

    def _recv_body(self, size: int) -> bytes:
        # Header and body leave the sender in one call, so the body is nearly always here.
        self.calls += 1
        try:
            body = self._socket.recv(size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return self._recv_rest(size)
        except OSError as error:
            raise self._gone(error) from error
        if len(body) == size:
            return body
        return body + self._recv_rest(size - len(body))

    def _recv_rest(self, size: int) -> bytes:
        """Exactly `size` more bytes of a frame that has begun, within FRAME_TIMEOUT_MS."""
        deadline_ns = now_ns() + FRAME_TIMEOUT_MS * 1_000_000
        pieces: list[bytes] = []
        while size:
            if not self._arm_until(deadline_ns):
                raise self._truncated("stopped in the middle of a frame")
            self.calls += 1
            try:
                piece = self._socket.recv(size, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._gone(error) from error
            if not piece:
                self.eof = True
                raise self._truncated("ended in the middle of a frame")
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def _truncated(self, what: str) -> ProtocolError:
        self.shutdown()
        return ProtocolError(f"{self.peer_address or 'peer'} {what}; connection closed")

    def recv_sized(self, size: int, deadline_ns: int | None = None) -> tuple[Header, Message]:
        """A frame whose header and body are `size` bytes together, taken in one call (a GET_REPLY).

        Also takes a shorter ERROR frame that ends the connection. Without `deadline_ns` the receive timeout counts.
        Raises LinkClosed, ProtocolError, or LinkTimeout; the link is closed if part of the frame had come.
        """
        data = self._recv_exact(size, deadline_ns)
        header = decode_header(data[:HEADER_BYTES])
        if HEADER_BYTES + header.body_len != len(data):
            raise self._truncated(f"sent a frame of {HEADER_BYTES + header.body_len} bytes where {size} were due")
        return header, self._checked(header, decode(header, data[:HEADER_BYTES], data[HEADER_BYTES:]))

    def _checked(self, header: Header, message: Message) -> Message:
        # The codec also accepts frames whose payload lies in shared memory, which cannot be meant here.
        if header.payload_len == 0 and header.kind in (Kind.GET_REPLY, Kind.PUT) and payload_bytes(message):
            raise ProtocolError(f"{self.peer_address or 'peer'} sent {header.kind.name} without its payload")
        return message

    def _recv_exact(self, size: int, deadline_ns: int | None) -> bytes:
        """Up to `size` bytes: all, or what came before EOF if that can hold a frame."""
        data = b""
        while len(data) < size:
            if deadline_ns is None:
                self._arm_recv(self._recv_timeout_ms * 1000)
            elif not self._arm_until(deadline_ns):
                break
            self.calls += 1
            try:
                piece = self._socket.recv(size - len(data), socket.MSG_WAITALL)
            except BlockingIOError:
                if deadline_ns is None:
                    break
                continue  # what was armed may have been less than what is left
            except OSError as error:
                raise self._gone(error) from error
            if not piece:
                if len(data) < HEADER_BYTES:
                    raise self._gone()
                return data
            data = data + piece if data else piece
        if len(data) == size:
            return data
        if not data:
            raise LinkTimeout(f"{self.peer_address or 'peer'} did not answer in time")
        raise self._stalled("stopped in the middle of an answer")

    def recv_payload(self, buffers: Sequence[memoryview], deadline_ns: int | None = None) -> int:
        """Fills `buffers` (contiguous writable byte views) in order, straight from the kernel, in one call if it can.

        Returns the bytes received: all of them, or fewer at the deadline or EOF (`eof` tells which); the link is then
        shut, for the rest of the payload would be read as a frame. Never raises for a lost connection.
        """
        total = 0
        for view in buffers:
            total += view.nbytes
        if deadline_ns is None:
            deadline_ns = transfer_deadline_ns(total)
        connection, received = self._socket, 0
        while received < total:
            try:
                if not self._arm_until(deadline_ns):
                    break
                self.calls += 1
                count = connection.recvmsg_into(buffers[:IOV_MAX], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            except LinkClosed:
                break
            except OSError:
                self.eof = True
                break
            if count == 0:
                self.eof = True
                break
            received += count
            if received < total:
                buffers = _rest(buffers, count)
        if received < total:
            self.shutdown()
        return received
