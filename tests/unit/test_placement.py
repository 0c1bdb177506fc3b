"""Rendezvous hashing: balanced, stable, the same everywhere."""

from collections import Counter

from emberkv.core.placement import ranked, replicas
from emberkv.types import SHARDS


def test_known_answer_so_that_no_release_moves_data():
    assert [replicas(shard, ["a", "b", "c"], 2) for shard in (0, 1, 2)] == [("c", "b"), ("a", "c"), ("c", "b")]


def test_order_of_names_does_not_matter():
    assert ranked(17, ["c", "a", "b"]) == ranked(17, ["a", "b", "c"])


def test_balanced_over_nodes():
    names = [f"node{i}" for i in range(8)]
    shares = Counter(replicas(shard, names, 1)[0] for shard in range(SHARDS))
    assert min(shares.values()) > SHARDS / 8 * 0.4
    assert max(shares.values()) < SHARDS / 8 * 1.8
