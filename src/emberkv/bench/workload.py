"""The blocks that benchmarks store and load, and the scale at which they run.

Laws: keys and bytes are the same in every run; what was loaded is compared with what was stored, but never
while time is taken.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from emberkv.bench.ref import prefaulted
from emberkv.client import Client
from emberkv.errors import Unavailable

Bytes = npt.NDArray[np.uint8]

DEADLINE_MS: Final = 20_000
"""Long: a benchmark on a crowded machine shall be slow, not wrong."""


class Scale(msgspec.Struct, frozen=True):
    """How much of everything: the full run's figures are for people, the quick one's only prove that it works."""

    rounds: int = 5
    batches: int = 15
    """Batched gets of each kind per round."""
    pings: int = 400
    cold: int = 16
    """Samples per round of cases that read cold memory."""
    cold_sets: int = 8
    """Sets of 32 MiB that they go round through: eight times the largest last-level cache that we measured on."""
    arena_bytes: int = 1024 << 20
    iperf3_s: float = 1.0
    connections: int = 1000
    active: int = 64
    active_s: float = 15.0


FULL: Final = Scale()
QUICK: Final = Scale(
    rounds=2,
    batches=2,
    pings=20,
    cold=2,
    cold_sets=2,
    arena_bytes=512 << 20,
    iperf3_s=0.0,
    connections=40,
    active=8,
    active_s=1.0,
)


class Blocks(msgspec.Struct, frozen=True):
    """`count` blocks of `size` bytes: their keys, their bytes (uint8 [count, size]) and a place to load them into."""

    keys: list[bytes]
    data: Bytes
    dest: Bytes

    @property
    def nbytes(self) -> int:
        """All blocks together."""
        return int(self.data.nbytes)

    def wrong(self) -> int:
        """Rows of `dest` that differ from what was stored."""
        return int((self.dest != self.data).any(axis=1).sum())


def make_blocks(count: int, size: int, salt: str = "", dest: Bytes | None = None) -> Blocks:
    """Blocks whose bytes no compressor or zero page could help with; `dest` defaults to memory of their own."""
    keys = [hashlib.sha256(f"{salt} {size} {index}".encode()).digest() for index in range(count)]
    seed = np.random.default_rng([size, *salt.encode()])
    data = np.frombuffer(prefaulted(count * size), np.uint8).reshape(count, size)
    data[:] = seed.integers(0, 256, (count, size), np.uint8)
    if dest is None:
        dest = np.frombuffer(prefaulted(count * size), np.uint8).reshape(count, size)
    return Blocks(keys, data, dest)


def store(client: Client, blocks: Blocks) -> None:
    """Puts all blocks. Raises Unavailable when one was not taken."""
    outcomes = client.put_many(list(zip(blocks.keys, blocks.data, strict=True)), deadline_ms=DEADLINE_MS)
    refused = [outcome for outcome in outcomes if not outcome]
    if refused:
        raise Unavailable(f"{len(refused)} of {len(outcomes)} blocks were not stored: {refused[0]}")


def load(client: Client, blocks: Blocks) -> int:
    """Loads all blocks into `dest`; returns the returns to the GIL as the client counts them."""
    result = client.get_into(blocks.keys, blocks.dest, deadline_ms=DEADLINE_MS)
    if result.usable != len(blocks.keys):
        raise Unavailable(f"only {result.usable} of {len(blocks.keys)} blocks were loaded: {set(result.reasons)}")
    return result.gil_returns


def check(client: Client, blocks: Blocks) -> None:
    """Loads once into cleared rows and compares. Raises Unavailable if a byte differs."""
    blocks.dest[:] = 0
    load(client, blocks)
    if blocks.wrong():
        raise Unavailable(f"{blocks.wrong()} of {len(blocks.keys)} blocks came back with other bytes")
