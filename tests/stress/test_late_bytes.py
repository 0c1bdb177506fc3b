"""A node that freezes during loads over TCP and wakes with late bytes: after a load ended, nobody writes its buffer."""

from __future__ import annotations

import random
import signal
import threading
import time

import numpy as np
import pytest

from emberkv.client import Client
from emberkv.types import Level, MissReason
from stress.herd import limit_s, storm_s
from stress.nodes import Nodes
from stress.oracle import lay_canary, look_again
from stress.pattern import key_of, make, whole

BLOCKS, SIZE = 32, 64 << 10
"""2 MiB: more than a socket holds, so that a node can be stopped in the middle of an answer."""
DEADLINE_MS = 250
NUMBERS = range(100_000_000, 100_000_000 + BLOCKS)
KEYS = [key_of(number) for number in NUMBERS]


def fill(client: Client) -> None:
    blocks = [(key, make(key, 1 + at, SIZE)) for at, key in enumerate(KEYS)]
    assert all(client.put_many(blocks, level=Level.SESSION, deadline_ms=10_000, min_copies=2))


def load(client: Client, dest: np.ndarray, *, background: bool) -> list[MissReason]:
    """One load; when it says that it ended, the buffer is ours again. What it says is there must be whole."""
    if background:
        job = client.submit_get(KEYS, dest, deadline_ms=DEADLINE_MS)
        result = job.result()
    else:
        result = client.get_into(KEYS, dest, deadline_ms=DEADLINE_MS)
    for key, row, reason in zip(KEYS, dest, result.reasons, strict=True):
        if reason is MissReason.NONE:
            whole(key, row)
    lay_canary(dest)
    return result.reasons


@pytest.mark.timeout(limit_s(2))
@pytest.mark.parametrize("door", ["tcp", "unix"])
def test_no_late_byte_reaches_a_buffer_after_its_load_ended(nodes: Nodes, door: str) -> None:
    endpoints = nodes.tcp() if door == "tcp" else [nodes.unix(0)]
    chance = random.Random(3)
    buffers = [np.zeros((BLOCKS, SIZE), np.uint8) for _ in range(4)]
    hits = cut = rounds = 0
    end = time.monotonic() + storm_s(2)
    with Client(endpoints, prefer_local=door == "unix", connect_timeout_ms=2000) as client:
        fill(client)
        while time.monotonic() < end or rounds < 4:
            name = chance.choice(nodes.names) if rounds % 3 else "n1"
            first = rounds % 3 == 0  # frozen before it is asked: everything that it sends is late
            delay = 0.0 if first else chance.uniform(0, 0.004)
            if first:
                nodes.cluster.kill(name, signal.SIGSTOP)
            freezer = threading.Timer(delay, nodes.cluster.kill, (name, signal.SIGSTOP))
            freezer.start()
            try:
                for at, buffer in enumerate(buffers):
                    reasons = load(client, buffer, background=bool(at % 2))
                    hits += reasons.count(MissReason.NONE)
                    cut += any(reason is not MissReason.NONE for reason in reasons)
            finally:
                freezer.join()
                nodes.cluster.kill(name, signal.SIGCONT)
            for _ in range(5):  # the node wakes, and answers what it was asked long ago
                time.sleep(0.02)
                for buffer in buffers:
                    look_again(buffer)
            rounds += 1
        for buffer in buffers:
            look_again(buffer)
        client.delete_many(KEYS, level=Level.SESSION, deadline_ms=10_000)
    print("rounds", rounds, "hits", hits, "cut loads", cut)
    assert hits
    assert cut, "no load was ever cut short: nothing could have been late"
    nodes.wait_unpinned()
