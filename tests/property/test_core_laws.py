"""Laws of the pure parts, over all inputs that hypothesis thinks of."""

import math
from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from emberkv.core.budget import Costs, plan, smallest_budget_ms
from emberkv.core.eviction import PROTECTED_SHARE, Residency
from emberkv.core.merge import AppliedVector, merge, stamp_of
from emberkv.core.placement import ranked, replicas
from emberkv.core.rebalance import handed_to, is_home, proposed, reconciled, successor
from emberkv.core.view import ClusterView, encode_record, owner_key
from emberkv.errors import ConfigError
from emberkv.messages import DrainRecord, ShardOwner
from emberkv.ports import Record
from emberkv.storage.arena import Slot
from emberkv.types import SHARDS, EntryState, Version, checksum
from harness.bare import live

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


writes = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40)), max_size=60)


def vector_of(versions: Iterable[tuple[int, int]]) -> AppliedVector:
    vector = AppliedVector()
    for version in versions:
        vector.add(Version(*version))
    return vector


def held(vector: AppliedVector) -> set[tuple[int, int]]:
    return {(span.epoch, seq) for span in vector.spans() for seq in range(span.first, span.last + 1)}


@given(writes)
def test_applied_vector_holds_exactly_what_was_added_in_ranges_that_are_apart(added):
    vector = vector_of(added)
    assert held(vector) == set(added)
    for left, right in pairwise(vector.spans()):
        assert left.epoch < right.epoch or left.last + 1 < right.first
    assert all(vector.covers(Version(e, s)) is ((e, s) in added) for e in range(1, 5) for s in range(1, 42))


@given(writes, writes)
def test_union_of_vectors_is_that_of_their_writes_and_order_does_not_matter(left, right):
    one, other = vector_of(left), vector_of(right)
    assert one.lacks(other.spans()) is not set(right).issubset(left)
    one.union(other.spans())
    other.union(vector_of(left).spans())
    assert one.spans() == other.spans()
    assert held(one) == {*left, *right}
    assert not one.lacks(other.spans())
    before = one.spans()
    one.union(before)
    assert one.spans() == before


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 8)), max_size=150))
def test_a_vector_is_bounded_and_says_up_to_what_it_has_forgotten_epochs(added):
    vector, floor = AppliedVector(), Version(0, 0)
    for version in added:
        floor = max(floor, vector.add(Version(*version)) or floor)
    assert len(vector.ranges) <= AppliedVector.EPOCHS_MAX
    assert all(vector.covers(Version(*version)) or Version(*version) <= floor for version in added)


@given(
    names.filter(lambda nodes: len(nodes) > 1),
    st.integers(0, SHARDS - 1),
    st.integers(1, 3),
    st.data(),
)
def test_moves_end_at_placement_and_never_leave_fewer_copies(nodes, shard, factor, data):
    """Whatever the replicas are and whoever joined, drains or died: the primaries' policy, applied again and again."""
    start = data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=4, unique=True))
    dead = {name for name in nodes if name != start[0] and data.draw(st.booleans()) and data.draw(st.booleans())}
    draining = {name for name in nodes if data.draw(st.booleans())}
    view = ClusterView("any")
    records = [Record(f"live/{name}", live(name, 1, dead=name in dead), 1) for name in nodes]
    records += [Record(f"drain/{name}", encode_record(DrainRecord(checksum(name.encode()))), 1) for name in draining]
    owner = ShardOwner(start[0], 1, 5, tuple(start), tuple(start))
    view.apply([*records, Record(owner_key(shard), encode_record(owner), 2)], [], full=True, now_ns=1, revision=2)
    complete = {name for name in start if name not in dead}
    for revision in range(3, 60):
        owner = view.owners[shard]
        assert owner.primary in owner.replicas
        record = reconciled(view, shard, factor, complete, may_move=True)
        if record is None:
            target = successor(view, shard, factor, complete)
            if target is None:
                if complete >= set(owner.replicas):
                    break
                complete = set(owner.replicas) - dead  # repair has compared them meanwhile
                continue
            record = handed_to(view, shard, target, complete, factor)
            assert (record.primary, record.epoch) == (target, owner.epoch + 1)
        copies = len(complete.intersection(owner.replicas))
        assert len(complete.intersection(record.replicas)) >= min(len(proposed(view, shard, factor)), copies)
        assert set(record.in_sync) <= set(record.replicas)
        assert len(record.former) <= factor
        view.apply([Record(owner_key(shard), encode_record(record), revision)], [], full=False, now_ns=1)
    else:
        raise AssertionError(f"it moves for ever: {view.owners[shard]}")
    assert is_home(view, shard, factor, complete), (view.owners[shard], proposed(view, shard, factor))


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
                residency.add(key, Slot(0, 1, 4096)) if action == "add" else residency.discard(key)
                (held.add if action == "add" else held.discard)(key)
        else:
            getattr(residency, action)(keys)
        assert sorted(key for key, _ in residency.order(1000)) == sorted(held)
        assert len(residency) == len(held)


@given(st.integers(5, 60), st.integers(1, 5))
def test_head_of_a_touched_chain_leaves_last(count, chain):
    residency, keys = Residency(), [b"%02d" % n for n in range(count)]
    for key in keys:
        residency.add(key, Slot(0, 1, 4096))
    touched = keys[:chain]
    residency.touch(touched)
    order = [key for key, _ in residency.order(1000)]
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
