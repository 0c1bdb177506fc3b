"""Looking at one node from outside: what it holds itself, where a block lies, how it is.

Why it exists: the client hides where a block comes from; the demo must know, to prove where it came from.
Laws: questions only, answered from that node's own memory (LOCAL_ONLY); nothing is retried, nothing stays open.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from emberkv.cli.probe import fetch_status, hello
from emberkv.errors import EmberError, ProtocolError
from emberkv.messages import ExistsReply, ExistsRequest, GetFlag, GetReply, GetRequest
from emberkv.net.local_link import close_fds, connect_local
from emberkv.types import BATCH_KEYS_MAX, MissReason, checksum

TIMEOUT_MS: Final = 2_000
SAMPLE_BYTES: Final = 64 << 10
SAMPLE_WIDTH: Final = 16
"""A sample is this wide: that all of it is zero in a block's tensors by chance does not happen."""


class Placed(NamedTuple):
    """Where a block lies in a node's arena, as the node says: it has just compared its bytes with `checksum`."""

    offset: int
    length: int
    checksum: bytes
    arena_inode: int
    intact: bool
    """The bytes, read through the shared map by the asker, have the checksum that the node states."""


def status(endpoint: str) -> dict[str, Any]:
    """The node's status document. Raises an EmberError when it does not answer."""
    return fetch_status(endpoint, TIMEOUT_MS)


def counters(endpoint: str) -> dict[str, int]:
    """The node's own counters; missing ones are zero, so use `.get(name, 0)`."""
    return dict(status(endpoint)["counters"])


def answers(endpoint: str) -> bool:
    """Whether the node answers at all now."""
    try:
        status(endpoint)
    except EmberError:
        return False
    return True


def held(endpoint: str, keys: Sequence[bytes]) -> list[bool]:
    """Which keys this node holds in its own memory."""
    link, _, arena_fd, staging_fd = connect_local(_path(endpoint), hello(), TIMEOUT_MS)
    try:
        close_fds([fd for fd in (arena_fd, staging_fd) if fd >= 0])
        link.set_recv_timeout_ms(TIMEOUT_MS)
        found: list[bool] = []
        for start in range(0, len(keys), BATCH_KEYS_MAX):
            batch = list(keys[start : start + BATCH_KEYS_MAX])
            link.send(ExistsRequest(batch, TIMEOUT_MS, int(GetFlag.LOCAL_ONLY)), start)
            _, reply, _ = link.recv()
            if not isinstance(reply, ExistsReply) or len(reply.reasons) != len(batch):
                raise ProtocolError(f"{endpoint} answered a presence question with {type(reply).__name__}")
            found += [reason == MissReason.NONE for reason in reply.reasons]
        return found
    finally:
        link.close()


def placed(endpoint: str, key: bytes) -> Placed | None:
    """Pins one block in the node's own memory for a moment and says where it lies; None if it is not there."""
    link, welcome, arena_fd, staging_fd = connect_local(_path(endpoint), hello(), TIMEOUT_MS)
    try:
        link.set_recv_timeout_ms(TIMEOUT_MS)
        link.send(GetRequest([key], TIMEOUT_MS, flags=int(GetFlag.PIN | GetFlag.LOCAL_ONLY)), 1)
        _, reply, _ = link.recv()
        if not isinstance(reply, GetReply) or len(reply.infos) != 1:
            raise ProtocolError(f"{endpoint} answered a get with {type(reply).__name__}")
        info = reply.infos[0]
        if info.reason:
            return None
        with mmap.mmap(arena_fd, welcome.arena_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as arena:
            block = np.frombuffer(arena, np.uint8, info.length, info.offset).copy()
        intact = checksum(block.data) == info.checksum
        return Placed(info.offset, info.length, info.checksum, os.fstat(arena_fd).st_ino, intact)
    finally:
        close_fds([fd for fd in (arena_fd, staging_fd) if fd >= 0])
        link.close()  # the pin ends with the connection


class Arrivals:
    """Watches bytes arrive in the memory of a node that has just started, so that its arena was all zero.

    The arena is mapped read-only, as any client may; one sample per SAMPLE_BYTES tells how much of it was written. A
    context manager.
    """

    def __init__(self, endpoint: str) -> None:
        self._link, welcome, arena_fd, staging_fd = connect_local(_path(endpoint), hello(), TIMEOUT_MS)
        try:
            self._map = mmap.mmap(arena_fd, welcome.arena_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            close_fds([fd for fd in (arena_fd, staging_fd) if fd >= 0])
        rows = np.frombuffer(self._map, np.uint8)
        self._samples = rows[: len(rows) // SAMPLE_BYTES * SAMPLE_BYTES].reshape(-1, SAMPLE_BYTES)[:, :SAMPLE_WIDTH]
        self._base_bytes = 0
        self._base_bytes = self.count_bytes()

    def count_bytes(self) -> int:
        """Bytes written since this watcher was made, to the next SAMPLE_BYTES."""
        return int(self._samples.any(axis=1).sum()) * SAMPLE_BYTES - self._base_bytes

    def __enter__(self) -> Arrivals:
        return self

    def __exit__(self, *_: object) -> None:
        del self._samples
        self._map.close()
        self._link.close()


def _path(endpoint: str) -> str:
    return endpoint.removeprefix("unix:")
