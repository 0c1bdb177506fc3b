"""Looking at one node from outside: what it holds itself, where a block lies, how it is.

Why it exists: the client hides where a block comes from; the demo must know, to prove where it came from.
Laws: questions only, answered from that node's own memory (LOCAL_ONLY); nothing is retried. The arena is mapped
    read-only, as any client of the machine may.
Limits: local sockets. What cannot be asked raises an EmberError: nodes come and go here, and the caller knows which
may.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np

from emberkv.cli.probe import hello
from emberkv.errors import ProtocolError
from emberkv.messages import (
    ExistsReply,
    ExistsRequest,
    GetFlag,
    GetReply,
    GetRequest,
    Message,
    StatusReply,
    StatusRequest,
)
from emberkv.net.local_link import close_fds, connect_local
from emberkv.types import BATCH_KEYS_MAX, MissReason, checksum

TIMEOUT_MS: Final = 2_000
SAMPLE_BYTES: Final = 64 << 10
SAMPLE_WIDTH: Final = 16
"""A sample is this wide: that all of it is zero in a block's tensors by chance does not happen."""

Reply = TypeVar("Reply")


class Placed(NamedTuple):
    """Where a block lies in a node's arena, as the node says: it has just compared its bytes with `checksum`."""

    offset: int
    length: int
    checksum: bytes
    arena_inode: int
    intact: bool
    """The bytes, read through the shared map by the asker, have the checksum that the node states."""


class Look:
    """An open connection to one node. A context manager."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        asking = msgspec.structs.replace(hello(), namespace="default")
        link, welcome, arena_fd, staging_fd = connect_local(endpoint.removeprefix("unix:"), asking, TIMEOUT_MS)
        self._link = link
        self._requests = 0
        try:
            link.set_recv_timeout_ms(TIMEOUT_MS)
            self.arena_inode = os.fstat(arena_fd).st_ino
            self.arena = mmap.mmap(arena_fd, welcome.arena_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            link.close()
            raise
        finally:
            close_fds([fd for fd in (arena_fd, staging_fd) if fd >= 0])

    def _ask(self, message: Message, kind: type[Reply]) -> Reply:
        self._requests += 1
        self._link.send(message, self._requests)
        _, reply, _ = self._link.recv()
        if not isinstance(reply, kind):
            raise ProtocolError(f"{self._endpoint} answered {type(message).__name__} with {type(reply).__name__}")
        return reply

    def status(self) -> dict[str, Any]:
        """The node's status document."""
        return msgspec.json.decode(self._ask(StatusRequest(), StatusReply).document, type=dict[str, Any])

    def counter(self, name: str) -> int:
        """One of the node's own counters; 0 if it never counted."""
        return int(self.status()["counters"].get(name, 0))

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys this node holds in its own memory."""
        found: list[bool] = []
        for start in range(0, len(keys), BATCH_KEYS_MAX):
            batch = list(keys[start : start + BATCH_KEYS_MAX])
            reply = self._ask(ExistsRequest(batch, TIMEOUT_MS, int(GetFlag.LOCAL_ONLY)), ExistsReply)
            if len(reply.reasons) != len(batch):
                raise ProtocolError(f"{self._endpoint} gave {len(reply.reasons)} answers about {len(batch)} keys")
            found += [reason == MissReason.NONE for reason in reply.reasons]
        return found

    def placed(self, key: bytes) -> Placed | None:
        """Pins one block until this connection ends and says where it lies; None if the node has no good copy."""
        reply = self._ask(GetRequest([key], TIMEOUT_MS, flags=int(GetFlag.PIN | GetFlag.LOCAL_ONLY)), GetReply)
        info = reply.infos[0]
        if info.reason:
            return None
        block = np.frombuffer(self.arena, np.uint8, info.length, info.offset)
        return Placed(info.offset, info.length, info.checksum, self.arena_inode, checksum(block.data) == info.checksum)

    def __enter__(self) -> Look:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()  # ends the pins too
        self.arena.close()


class Arrivals:
    """Watches bytes arrive in the memory of a node that has just started, so that what was not written is zero.

    One sample per SAMPLE_BYTES of its arena tells how much of it was written.
    """

    def __init__(self, look: Look) -> None:
        rows = np.frombuffer(look.arena, np.uint8)
        self._samples = rows[: len(rows) // SAMPLE_BYTES * SAMPLE_BYTES].reshape(-1, SAMPLE_BYTES)[:, :SAMPLE_WIDTH]
        self._base_bytes = 0
        self._base_bytes = self.count_bytes()

    def count_bytes(self) -> int:
        """Bytes written since this watcher was made, to the next SAMPLE_BYTES."""
        return int(self._samples.any(axis=1).sum()) * SAMPLE_BYTES - self._base_bytes


def status(endpoint: str) -> dict[str, Any]:
    """As Look.status, on a connection of its own."""
    with Look(endpoint) as look:
        return look.status()


def counter(endpoint: str, name: str) -> int:
    """As Look.counter, on a connection of its own."""
    with Look(endpoint) as look:
        return look.counter(name)


def held(endpoint: str, keys: Sequence[bytes]) -> list[bool]:
    """As Look.held, on a connection of its own."""
    with Look(endpoint) as look:
        return look.held(keys)


def placed(endpoint: str, key: bytes) -> Placed | None:
    """As Look.placed, pinned for a moment only."""
    with Look(endpoint) as look:
        return look.placed(key)
