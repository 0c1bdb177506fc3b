"""The client's routing: which endpoint first, which node for which key."""

from __future__ import annotations

import os

import pytest

from emberkv.client.routing import (
    ANY_NODE,
    Endpoint,
    group_gets,
    group_puts,
    match,
    parse_endpoint,
    parse_endpoints,
    rank_endpoints,
    split_batches,
    split_by_bytes,
)
from emberkv.messages import MapReply, NodeAddress, ShardOwner
from emberkv.types import SHARDS, PrefixMatch, shard_of

HOST = "boot-1"


def cluster_map(*, primary: str = "a", vacant: bool = False) -> MapReply:
    nodes = (
        NodeAddress("a", "10.0.0.1:7000", "/run/a.sock", HOST),
        NodeAddress("b", "10.0.0.2:7000", "/run/b.sock", "boot-2"),
        NodeAddress("c", "10.0.0.1:7001", "/run/c.sock", HOST),
    )
    owner = ShardOwner(primary, 1, 1, (primary, "b", "c"), (primary, "b"), ("d",))
    return MapReply(1, nodes, (None if vacant else owner,) * SHARDS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unix:/run/node.sock", Endpoint("/run/node.sock", True)),
        ("tcp:host:7000", Endpoint("host:7000", False)),
        (" host:7000 ", Endpoint("host:7000", False)),
        ("[::1]:7000", Endpoint("[::1]:7000", False)),
    ],
)
def test_endpoint_is_parsed(text: str, expected: Endpoint) -> None:
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize(
    "text", ["", "unix:node.sock", "unix:", "host", "host:", "host:x", "host:0", "host:65536", ":7000"]
)
def test_bad_endpoint_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="endpoint") as caught:
        parse_endpoint(text)
    assert "\n" not in str(caught.value)


def test_endpoints_are_a_list_or_one_string() -> None:
    assert parse_endpoints("a:1,b:2,a:1") == parse_endpoints(["a:1", "b:2"])
    with pytest.raises(ValueError, match="at least one"):
        parse_endpoints([])


def test_rank_prefers_given_sockets_then_sockets_of_this_boot() -> None:
    given = (Endpoint("10.0.0.2:7000", False), Endpoint("/run/c.sock", True))
    ranked = rank_endpoints(given, cluster_map(), HOST)
    assert ranked == [
        (Endpoint("/run/c.sock", True), "c"),
        (Endpoint("/run/a.sock", True), "a"),
        (Endpoint("10.0.0.2:7000", False), "b"),
        (Endpoint("10.0.0.1:7000", False), "a"),
        (Endpoint("10.0.0.1:7001", False), "c"),
    ]


def test_rank_without_local_preference_learns_no_sockets() -> None:
    ranked = rank_endpoints((Endpoint("x:1", False),), cluster_map(), HOST, prefer_local=False)
    assert all(not endpoint.local for endpoint, _ in ranked)
    assert rank_endpoints((Endpoint("x:1", False),), None, HOST) == [(Endpoint("x:1", False), "")]


def test_an_unknown_boot_id_matches_nobody() -> None:
    nodes = (NodeAddress("a", "h:1", "/a.sock", ""),)
    ranked = rank_endpoints((), MapReply(1, nodes, ()), "")
    assert ranked == [(Endpoint("h:1", False), "a")]


@pytest.mark.parametrize(
    ("usable", "node"),
    [
        ({"a", "b", "c", "d"}, "a"),
        ({"b", "c", "d"}, "b"),
        ({"c", "d"}, "c"),
        ({"d"}, "d"),
        ({"x"}, ANY_NODE),
        (set(), ANY_NODE),
    ],
)
def test_get_asks_primary_then_in_sync_then_learner_then_former(usable: set[str], node: str) -> None:
    keys = [os.urandom(32) for _ in range(5)]
    assert group_gets(keys, range(5), cluster_map(), usable) == {node: [0, 1, 2, 3, 4]}


def test_vacant_shard_or_no_map_goes_to_any_node() -> None:
    keys = [os.urandom(32)]
    assert group_gets(keys, [0], cluster_map(vacant=True), {"a"}) == {ANY_NODE: [0]}
    assert group_gets(keys, [0], None, {"a"}) == {ANY_NODE: [0]}
    assert group_gets(keys, [0], MapReply(1, (), ()), {"a"}) == {ANY_NODE: [0]}


def test_gets_of_several_owners_are_split_and_keep_their_order() -> None:
    keys = [os.urandom(32) for _ in range(200)]
    owners = tuple(ShardOwner("ab"[shard % 2], 1, 1, ("a", "b"), ("a", "b")) for shard in range(SHARDS))
    groups = group_gets(keys, range(200), MapReply(1, (), owners), {"a", "b"})
    assert sorted(index for members in groups.values() for index in members) == list(range(200))
    for node, members in groups.items():
        assert members == sorted(members)
        assert all("ab"[shard_of(keys[index]) % 2] == node for index in members)


def test_puts_go_to_the_primary_only() -> None:
    keys = [os.urandom(32) for _ in range(3)]
    assert group_puts(keys, range(3), cluster_map(), {"a", "b"}) == {"a": [0, 1, 2]}
    assert group_puts(keys, range(3), cluster_map(), {"b"}) == {ANY_NODE: [0, 1, 2]}
    assert group_puts(keys, [], cluster_map(), {"a"}) == {}


def test_batches_are_cut_by_count_and_bytes() -> None:
    assert split_batches(range(5), 2) == [[0, 1], [2, 3], [4]]
    assert split_batches([], 2) == []
    assert split_by_bytes(range(4), [3, 3, 9, 1], 6) == [[0, 1], [2], [3]]
    assert split_by_bytes(range(4), [1, 1, 1, 1], 100, most=3) == [[0, 1, 2], [3]]
    assert split_by_bytes([], [], 6) == []


def test_match_is_hole_aware() -> None:
    assert match([True, True, False, True, False]) == PrefixMatch(2, (2, 4))
    assert match([True, True]) == PrefixMatch(2, ())
    assert match([]) == PrefixMatch(0, ())
