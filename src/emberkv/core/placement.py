"""Which nodes should hold a shard: rendezvous hashing, a proposal only (own/ records are the truth).

Each (shard, node) pair has a fixed pseudo-random weight; the nodes with the highest weights serve the shard. A node
that leaves moves only its own shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import xxhash

RANKINGS_KEPT = 8192
"""Rankings remembered: 256 shards for some dozens of sets of live nodes, a few MB at most."""


def ranked(shard: int, nodes: Iterable[str]) -> list[str]:
    """All nodes, best first; the same in every process."""
    return list(ranking(shard, tuple(nodes)))


@lru_cache(RANKINGS_KEPT)
def ranking(shard: int, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """As `ranked`, for a set of nodes that is asked about again and again."""
    return tuple(sorted(nodes, key=lambda node: (-xxhash.xxh3_64_intdigest(f"{shard}/{node}".encode()), node)))


def replicas(shard: int, nodes: Iterable[str], factor: int) -> tuple[str, ...]:
    """The best `factor` nodes; the first is proposed as primary."""
    return tuple(ranked(shard, nodes)[:factor])
