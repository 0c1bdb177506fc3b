"""Blocks whose bytes follow from their name, and a way to spoil one byte in a node's arena."""

from __future__ import annotations

import hashlib
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

from emberkv.messages import GetFlag, GetReply, GetRequest, Hello, Role
from emberkv.net.local_link import close_fds, connect_local
from emberkv.types import shard_of


def key_of(name: str) -> bytes:
    """32-byte key of a test block."""
    return hashlib.sha256(name.encode()).digest()


def value_of(name: str, length: int) -> bytes:
    """Bytes of a test block; the same in every process."""
    return random.Random(name).randbytes(length)


def names_in_shards(prefix: str, shards: set[int], per_shard: int = 1) -> dict[str, int]:
    """Names whose keys fall into the given shards: name -> shard."""
    found: dict[str, int] = {}
    counts = dict.fromkeys(shards, 0)
    number = 0
    while any(count < per_shard for count in counts.values()):
        name = f"{prefix}-{number}"
        number += 1
        shard = shard_of(key_of(name))
        if shard in counts and counts[shard] < per_shard:
            counts[shard] += 1
            found[name] = shard
    return found


def eventually(what: str, check: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Polls until `check` holds; fails with `what` when it never does."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def arena_address(pid: int) -> int:
    """Where a node process maps its arena writable."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:emberkv-arena" in line and re.search(r" rw.s ", line):
            return int(line.split("-")[0], 16)
    raise AssertionError(f"process {pid} maps no arena")


def flip_byte(pid: int, offset: int) -> None:
    """Flips all bits of one byte of a node's arena, as a failing memory cell would."""
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(arena_address(pid) + offset)
        byte = memory.read(1)[0]
        memory.seek(arena_address(pid) + offset)
        memory.write(bytes([byte ^ 0xFF]))


def arena_offsets(socket_path: Path, keys: list[bytes], namespace: str = "default") -> list[int]:
    """Where a node keeps blocks: offsets in its arena, asked for by a raw pin that ends at once."""
    hello = Hello(int(Role.CLIENT), 1, 1, "", "default", "", os.urandom(16), namespace=namespace)
    link, _, arena_fd, staging_fd = connect_local(str(socket_path), hello, 2000)
    try:
        link.send(GetRequest(keys, flags=int(GetFlag.PIN)), 1)
        _, reply, _ = link.recv()
        assert isinstance(reply, GetReply)
        assert not any(info.reason for info in reply.infos), "a block is not there"
        return [info.offset for info in reply.infos]
    finally:
        link.close()
        close_fds([fd for fd in (arena_fd, staging_fd) if fd >= 0])
