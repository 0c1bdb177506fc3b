"""The bare reference of the same-host door: a Unix SEQPACKET ping-pong, and what one thread can hash and copy.

Why it exists: a pin costs two wake-ups and two small messages before any of our code runs, and a copied load cannot be
faster than reading and writing its bytes.
Laws: two processes, blocking sockets; messages as large as a real request and answer; nothing is parsed. Memory is
touched before it is timed.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["BareLocalPair", "copy_s", "hash_then_copy_s"]

MESSAGE_BYTES_MAX: Final = 64 << 10
ANSWER_SIZE: Final = struct.Struct("<I")
"""A request begins with the number of bytes that it wants back."""
TIMEOUT_S: Final = 10

Bytes = npt.NDArray[np.uint8]


def serve(descriptor: int) -> None:
    """The answering process: one message back for each that comes, until the other side ends."""
    connection = socket.socket(fileno=descriptor)
    buffer = bytearray(MESSAGE_BYTES_MAX)
    answers = memoryview(bytes(MESSAGE_BYTES_MAX))
    while connection.recv_into(buffer):
        (size,) = ANSWER_SIZE.unpack_from(buffer)
        connection.send(answers[:size])


class BareLocalPair:
    """An answering process and a SEQPACKET connection to it; use as a context manager."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "emberkv.bench.ref_local", str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        timeout = struct.pack("@ll", TIMEOUT_S, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._buffer = bytearray(MESSAGE_BYTES_MAX)

    @property
    def pid(self) -> int:
        """The answering process."""
        return self._process.pid

    def __enter__(self) -> BareLocalPair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and the process."""
        self._socket.close()
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ping_s(self, request_bytes: int, answer_bytes: int) -> float:
        """Seconds of one exchange."""
        request = ANSWER_SIZE.pack(answer_bytes).ljust(request_bytes, b"\0")
        start = time.perf_counter()
        self._socket.send(request)
        if self._socket.recv_into(self._buffer) != answer_bytes:
            raise ConnectionError("the bare local reference ended")
        return time.perf_counter() - start


def hash_then_copy_s(sources: Sequence[memoryview], target: Bytes) -> float:
    """Seconds to take xxh3-128 of all sources, then to copy them all into the rows of `target`."""
    start = time.perf_counter()
    for view in sources:
        xxhash.xxh3_128_digest(view)
    for index, view in enumerate(sources):
        np.copyto(target[index], np.frombuffer(view, np.uint8))
    return time.perf_counter() - start


def copy_s(sources: Sequence[memoryview], target: Bytes) -> float:
    """Seconds to copy all sources into the rows of `target`."""
    start = time.perf_counter()
    for index, view in enumerate(sources):
        np.copyto(target[index], np.frombuffer(view, np.uint8))
    return time.perf_counter() - start


if __name__ == "__main__":
    serve(int(sys.argv[1]))
