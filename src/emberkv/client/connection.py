"""One open connection to a node, and the memory that came with it.

Why it exists: the two kinds of link differ in how bytes travel, not in how a question is asked.
Laws: one thread uses a connection at a time (pool.py lends it out); an answer that is not the one asked for ends the
connection; a connection whose answer was given up is dropped, so that its pins end and no late answer is mistaken.
Limits: the arena map is read-only and never outlives its last reader; its size is checked against what the node states.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from emberkv.client.routing import Endpoint
from emberkv.errors import ProtocolError, Unavailable
from emberkv.messages import ErrorFrame, Hello, Message, Welcome
from emberkv.net import now_ns
from emberkv.net.local_link import LocalLink, close_fds, connect_local
from emberkv.storage.staging import StagingMap
from emberkv.types import SLOT_ALIGN
from emberkv.wire.codec import Header

if TYPE_CHECKING:
    from emberkv.net.tcp_link import TcpLink

Reply = TypeVar("Reply")
Bytes = npt.NDArray[np.uint8]


def ms_left(deadline_ns: int) -> int:
    """Milliseconds until `deadline_ns`, rounded up, at least 1 (0 would mean for ever to a socket)."""
    return max(1, (deadline_ns - now_ns() + 999_999) // 1_000_000)


class Arena:
    """A node's memory of blocks, mapped read-only: `data` uint8 [arena_bytes].

    It stays mapped as long as somebody holds it or a view of it, also after the node died: the file is sealed against
    shrinking, so no read can fault.
    """

    def __init__(self, fd: int, size: int, incarnation: bytes) -> None:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if os.fstat(fd).st_size < size or not seals & fcntl.F_SEAL_SHRINK:
            raise ProtocolError(f"the node's arena is not a sealed file of {size} bytes")
        self.incarnation = incarnation
        self.data: Bytes = np.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
        self.view = self.data.data
        self._rows: dict[int, Bytes] = {}

    def rows(self, width: int = SLOT_ALIGN) -> Bytes:
        """The arena as rows of `width` bytes: uint8 [arena_bytes // width, width]. A block size has a few widths."""
        found = self._rows.get(width)
        if found is None:
            found = self._rows[width] = self.data[: len(self.data) // width * width].reshape(-1, width)
        return found


class Connection:
    """A link after its handshake. `arena` and `staging` are None unless the link is local and the node sent them."""

    __slots__ = (
        "_next_id",
        "_open",
        "_receive_blocks",
        "arena",
        "early",
        "endpoint",
        "lane",
        "link",
        "local",
        "reused",
        "staging",
        "tcp",
        "unix",
        "welcome",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        lane: str,
        link: LocalLink | TcpLink,
        welcome: Welcome,
        arena: Arena | None = None,
        staging: StagingMap | None = None,
        receive_blocks: Callable[[TcpLink, Sequence[memoryview], int], tuple[int, list[bytes]]] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.lane = lane
        self.link = link
        self.unix = link if isinstance(link, LocalLink) else None
        self.tcp = None if isinstance(link, LocalLink) else link
        self.local = self.unix is not None
        self.welcome = welcome
        self.arena = arena
        self.staging = staging
        self._receive_blocks = receive_blocks
        self.reused = False
        """True once a call ended well on it: a loss at the next use may then only mean that the node restarted."""
        self.early: dict[int, Message] = {}
        self._next_id = 0
        self._open: set[int] = set()

    def send(self, message: Message, deadline_ns: int, payload: Sequence[memoryview] = ()) -> int:
        """Sends a request and returns its id. Raises LinkClosed or LinkTimeout."""
        self._next_id = request_id = (self._next_id + 1) & 0xFFFFFFFF
        self._open.add(request_id)
        self.link.set_send_timeout_ms(ms_left(deadline_ns))
        if self.tcp is not None:
            self.tcp.send(message, request_id, payload, deadline_ns)
        else:
            self.link.send(message, request_id)
        return request_id

    def post(self, message: Message, deadline_ns: int) -> None:
        """Sends a message that has no answer; any thread may. Raises LinkClosed or LinkTimeout."""
        self.link.set_send_timeout_ms(ms_left(deadline_ns))
        self.link.send(message, 0)

    def post_at_once(self, message: Message) -> None:
        """`post` over a local link that never waits: LinkTimeout when the node's queue is full."""
        assert self.unix is not None
        self.unix.send(message, 0, wait=False)

    def receive(self, kind: type[Reply], request_id: int, deadline_ns: int, size: int = 0) -> Reply:
        """The answer to `request_id`; `size` is its exact length if known, which saves a call over TCP.

        Answers to other requests that are open may come first (a put waits for its copies, the next one may not): they
        are kept in `early`. Raises LinkTimeout at the deadline (it may be called again), LinkClosed, Unavailable (the
        node said goodbye), ProtocolError.
        """
        while True:
            message = self.early.pop(request_id, None)
            if message is None:
                header, message = self._next(deadline_ns, size)
                if isinstance(message, ErrorFrame):
                    raise Unavailable(f"{self.endpoint}: {message.text}")
                if header.request_id not in self._open:
                    raise ProtocolError(f"{self.endpoint} answered {header.request_id}, which was not asked")
                self._open.discard(header.request_id)
                if header.request_id != request_id:
                    self.early[header.request_id] = message
                    continue
            if not isinstance(message, kind):
                raise ProtocolError(f"{self.endpoint} answered with {type(message).__name__}, not {kind.__name__}")
            return message

    def _next(self, deadline_ns: int, size: int) -> tuple[Header, Message]:
        if self.unix is not None:
            self.unix.set_recv_timeout_ms(ms_left(deadline_ns))
            header, message, _ = self.unix.recv()
            return header, message
        assert self.tcp is not None
        if size:
            return self.tcp.recv_sized(size, deadline_ns)
        self.tcp.set_recv_timeout_ms(ms_left(deadline_ns))
        return self.tcp.recv()

    def receive_blocks(self, buffers: Sequence[memoryview], deadline_ns: int) -> list[bytes]:
        """Over TCP: the payload of an answer, into `buffers`; the checksum of each that arrived whole, in order."""
        assert self._receive_blocks is not None
        assert self.tcp is not None
        return self._receive_blocks(self.tcp, buffers, deadline_ns)[1]

    def close(self) -> None:
        """Ends the connection; the node then gives back its pins and staging."""
        self.link.close()


def dial(endpoint: Endpoint, hello: Hello, lane: str, timeout_ms: int, known: Arena | None) -> Connection:
    """Opens a connection. An arena of the same node life that is mapped already (`known`) is shared.

    Raises Unavailable, HandshakeRefused, ProtocolError.
    """
    if not endpoint.local:
        # An engine beside its node never loads TCP.
        from emberkv.net.overlap import recv_digests
        from emberkv.net.tcp import connect

        tcp, welcome = connect(endpoint.address, hello, timeout_ms)
        return Connection(endpoint, lane, tcp, welcome, receive_blocks=recv_digests)
    link, welcome, arena_fd, staging_fd = connect_local(endpoint.address, hello, timeout_ms)
    try:
        arena = known if known is not None and known.incarnation == welcome.incarnation else None
        if arena is None and arena_fd >= 0:
            arena = Arena(arena_fd, welcome.arena_bytes, welcome.incarnation)
        staging = StagingMap(staging_fd, welcome.staging_bytes) if staging_fd >= 0 else None
    except OSError as error:
        link.close()
        raise Unavailable(f"{endpoint}: cannot map the node's memory: {error.strerror}") from error
    except BaseException:
        link.close()
        raise
    finally:
        close_fds([fd for fd in (arena_fd, staging_fd) if fd >= 0])
    return Connection(endpoint, lane, link, welcome, arena, staging)
