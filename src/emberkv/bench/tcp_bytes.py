"""How many bytes went over the TCP connections between nodes, as the kernel counted them.

Why it exists: what a level costs on the wire must be counted by somebody who does not believe our code.
Laws: counted is what each end received (tcp_info.tcpi_bytes_received, both ends summed): the stream's bytes, frames
included, TCP and IP headers not. Received bytes are counted when they arrive; acknowledged ones, up to 40 ms later.
Limits: Linux, IPv4, connections of this network namespace. What a connection received between the last look and its end
is not seen; `vanished` counts such connections.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Collection, Iterator
from typing import Final

from emberkv.errors import Unavailable

NETLINK_SOCK_DIAG: Final = 4
SOCK_DIAG_BY_FAMILY: Final = 20
REQUEST_AND_DUMP: Final = 0x301
MESSAGE_ERROR: Final = 2
MESSAGE_DONE: Final = 3
INFO: Final = 2
"""INET_DIAG_INFO: a struct tcp_info beside each socket."""
ESTABLISHED: Final = 1 << 1
HEADER: Final = struct.Struct("=IHHII")
QUESTION: Final = struct.Struct("=BBBxI48x")
"""inet_diag_req_v2: family, protocol, extensions, states; the rest is a filter for one socket."""
SOCKET_BYTES: Final = 72
"""inet_diag_msg; the ports are at 4 (big endian), the cookie that names the socket for ever at 44."""
RECEIVED_AT: Final = 128
"""tcpi_bytes_received in struct tcp_info, since Linux 4.2."""
TIMEOUT_S: Final = 5.0
ANSWER_BYTES: Final = 1 << 18


class TcpBytes:
    """A counter over all connections with an end on one of `ports`. Raises Unavailable if the kernel does not tell."""

    def __init__(self, ports: Collection[int]) -> None:
        self._ports = frozenset(ports)
        self._received: dict[bytes, int] = {}
        """Bytes received by each socket ever seen, by its cookie."""
        self.vanished = 0
        """Sockets that ended after they were seen."""
        self._open: set[bytes] = set()
        try:
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG)
        except OSError as error:
            raise Unavailable(f"the kernel does not tell about TCP connections: {error.strerror}") from error
        self._socket.settimeout(TIMEOUT_S)

    def close(self) -> None:
        """Ends the conversation with the kernel."""
        self._socket.close()

    def total(self) -> int:
        """Bytes received since the connections began; never falls. Raises Unavailable."""
        seen = dict(self._look())
        self.vanished += len(self._open - seen.keys())
        self._open = set(seen)
        self._received.update(seen)
        return sum(self._received.values())

    def _look(self) -> Iterator[tuple[bytes, int]]:
        body = QUESTION.pack(socket.AF_INET, socket.IPPROTO_TCP, 1 << (INFO - 1), ESTABLISHED)
        try:
            self._socket.send(HEADER.pack(HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, REQUEST_AND_DUMP, 1, 0) + body)
            more = True
            while more:
                answer = self._socket.recv(ANSWER_BYTES)
                at = 0
                while at < len(answer):
                    size, kind, *_ = HEADER.unpack_from(answer, at)
                    if kind == MESSAGE_ERROR:
                        raise Unavailable("the kernel does not tell about TCP connections")
                    if kind == MESSAGE_DONE:
                        more = False
                        break
                    yield from self._socket_of(answer[at + HEADER.size : at + size])
                    at += (size + 3) & ~3
        except OSError as error:
            raise Unavailable(f"the kernel does not tell about TCP connections: {error}") from error

    def _socket_of(self, entry: bytes) -> Iterator[tuple[bytes, int]]:
        if not self._ports.intersection(struct.unpack_from("!HH", entry, 4)):
            return
        at = SOCKET_BYTES
        while at + 4 <= len(entry):
            size, kind = struct.unpack_from("=HH", entry, at)
            if kind == INFO and size >= 4 + RECEIVED_AT + 8:
                yield entry[44:52], struct.unpack_from("=Q", entry, at + 4 + RECEIVED_AT)[0]
            at += (max(size, 4) + 3) & ~3
