"""Which nodes should hold a shard: rendezvous hashing, a proposal only (own/ records are the truth).

Each (shard, node) pair has a fixed pseudo-random weight; the nodes with the highest weights serve the shard. A node
that leaves moves only its own shards.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def ranked(shard: int, nodes: Iterable[str]) -> list[str]:
    """All nodes, best first; the same in every process."""
    return sorted(nodes, key=lambda node: (-xxhash.xxh3_64_intdigest(f"{shard}/{node}".encode()), node))


def replicas(shard: int, nodes: Iterable[str], factor: int) -> tuple[str, ...]:
    """The best `factor` nodes; the first is proposed as primary."""
    return tuple(ranked(shard, nodes)[:factor])
