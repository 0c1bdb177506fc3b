"""Laws of the pure parts, over all inputs that hypothesis thinks of."""

import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from emberkv.core.budget import Costs, plan, smallest_budget_ms
from emberkv.core.eviction import PROTECTED_SHARE, Residency
from emberkv.core.merge import AppliedVector, merge, stamp_of
from emberkv.core.placement import ranked, replicas
from emberkv.errors import ConfigError
from emberkv.types import SHARDS, EntryState, Version

stamps = st.builds(
    stamp_of,
    st.builds(Version, st.integers(0, 3), st.integers(0, 3)),
    st.sampled_from(EntryState),
    st.sampled_from([b"a" * 16, b"b" * 16, b"\0" * 16]),
)
names = st.lists(st.text("abcdef0123", min_size=1, max_size=6), min_size=1, max_size=12, unique=True)


@given(stamps, stamps, stamps)
def test_merge_is_commutative_associative_idempotent(a, b, c):
    assert merge(a, b) == merge(b, a)
    assert merge(a, merge(b, c)) == merge(merge(a, b), c)
    assert merge(a, a) == a
    assert merge(a, b) in (a, b)


@given(st.lists(stamps, min_size=1, max_size=8), st.randoms())
def test_order_and_repetition_of_deliveries_do_not_matter(found, random):
    shuffled = found * 2
    random.shuffle(shuffled)

    def fold(items):
        state = items[0]
        for item in items:
            state = merge(state, item)
        return state

    assert fold(found) == fold(shuffled)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40)), max_size=60))
def test_applied_vector_holds_exactly_what_was_added(added):
    vector = AppliedVector()
    for version in added:
        vector.add(Version(*version))
    held = {(e, s) for e, spans in vector.ranges.items() for low, high in spans for s in range(low, high + 1)}
    assert held == set(added)
    for epoch, spans in vector.ranges.items():
        assert all(left[1] + 1 < right[0] for left, right in pairwise(spans))
        missing = {s for low, high in vector.holes(epoch) for s in range(low, high + 1)}
        assert missing == set(range(1, spans[-1][1])) - {s for e, s in added if e == epoch}


@given(names, st.integers(0, SHARDS - 1))
def test_a_node_that_leaves_moves_only_its_own_shards(nodes, shard):
    gone = nodes[0]
    before, after = ranked(shard, nodes), ranked(shard, nodes[1:])
    assert [name for name in before if name != gone] == after
    assert len(set(replicas(shard, nodes, 2))) == min(2, len(nodes))


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "touch", "discard", "arrived"]), st.lists(st.integers(0, 30), max_size=6))
    )
)
def test_residency_holds_exactly_what_came_and_did_not_leave(steps):
    residency, held = Residency(), set()
    for action, numbers in steps:
        keys = [b"%d" % number for number in numbers]
        if action in ("add", "discard"):
            for key in keys:
                getattr(residency, action)(key)
                (held.add if action == "add" else held.discard)(key)
        else:
            getattr(residency, action)(keys)
        assert sorted(residency.order(1000)) == sorted(held)
        assert len(residency) == len(held)


@given(st.integers(5, 60), st.integers(1, 5))
def test_head_of_a_touched_chain_leaves_last(count, chain):
    residency, keys = Residency(), [b"%02d" % n for n in range(count)]
    for key in keys:
        residency.add(key)
    touched = keys[:chain]
    residency.touch(touched)
    order = list(residency.order(1000))
    assert order[-1] == touched[0]
    assert [key for key in order if key in touched] == touched[::-1]
    assert len(residency._protected) <= max(int(PROTECTED_SHARE * count), 0) or chain > count


costs = st.builds(
    Costs,
    commit_ms=st.floats(0.1, 500),
    watch_ms=st.floats(0, 500),
    lateness_ms=st.floats(0, 300),
    drift=st.floats(0, 0.3),
    client_try_ms=st.floats(1, 2000),
    backoff_ms=st.floats(0, 500),
    coordinator_election_ms=st.floats(0, 5000),
)


@given(costs, st.floats(1, 3_600_000))
@settings(max_examples=300)
def test_every_feasible_plan_keeps_the_budget_and_the_health_inequality(cost, budget_ms):
    try:
        found = plan(budget_ms, cost)
    except ConfigError:
        smallest = None
        try:
            smallest = smallest_budget_ms(cost)
        except ConfigError:
            assert (1 - cost.drift) / (1 + cost.drift) <= 1 / 2 + 1e-9
        assert smallest is None or budget_ms < smallest
        return
    t, d, m, c, j = found.ttl_ms, cost.drift, found.margin_ms, cost.commit_ms, cost.lateness_ms
    assert math.isclose(t * (1 + d) / (1 - d), found.observer_ms)
    k = math.ceil(SHARDS / 128)
    worst = found.observer_ms + 2 * cost.watch_ms + 2 * j + (1 + k) * c + cost.client_try_ms + cost.backoff_ms
    assert worst <= budget_ms * (1 + 1e-9)
    assert math.isclose(worst, found.worst_case_ms)
    assert t * (1 - d) / (1 + d) - m >= t / 3 + t / 6 + c + j - 1e-6
    assert m >= max(50, 3 * j)
    # A right that a holder still uses is over before an observer with the fastest clock may act.
    assert t * (1 - d) - m < t * (1 + d) / (1 + d)
