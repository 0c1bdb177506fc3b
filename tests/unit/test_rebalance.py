"""Shards move to where placement proposes them, with never fewer copies than before, and the moves end."""

import pytest

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.failover import MOVES_MAX, takers
from emberkv.core.rebalance import given_up, handed_to, is_home, proposed, reconciled, successor
from emberkv.core.view import ClusterView, encode_record, owner_key
from emberkv.messages import DrainRecord, ShardOwner
from emberkv.ports import Record
from emberkv.types import SHARDS, PutStatus, checksum
from harness.bare import MS, TTL, Bare, all_of, live
from harness.world import World, key_of

SHARD = 3


def drained(name: str) -> bytes:
    return encode_record(DrainRecord(checksum(name.encode())))


def view_of(nodes: str, owner: ShardOwner, *, draining: str = "", dead: str = "") -> ClusterView:
    view = ClusterView("a")
    records = [Record(f"live/{name}", live(name, 1), 1) for name in nodes]
    records += [Record(f"live/{name}", live(name, 2, dead=True), 2) for name in dead]
    records += [Record(f"drain/{name}", drained(name), 3) for name in draining]
    view.apply([*records, Record(owner_key(SHARD), encode_record(owner), 9)], [], full=True, now_ns=1, revision=9)
    return view


def owned(*replicas: str, in_sync: tuple[str, ...] | None = None, former: tuple[str, ...] = ()) -> ShardOwner:
    return ShardOwner(replicas[0], 1, 5, replicas, replicas if in_sync is None else in_sync, former)


def step(view: ClusterView, caught_up: set[str], *, may_move: bool = True) -> tuple[tuple[str, ...], ...] | None:
    """(replicas, in sync, former) of the next record."""
    record = reconciled(view, SHARD, 2, caught_up, may_move=may_move)
    return (record.replicas, record.in_sync, record.former) if record is not None else None


BEST, SECOND, THIRD, FOURTH = proposed(view_of("abcd", owned("a")), SHARD, 4)
"""The four nodes in the order in which placement wants them for the shard."""


# -- the policy ------------------------------------------------------------------------------------------------------


def test_who_drains_is_no_home_unless_all_do():
    assert list(view_of("abc", owned("a"), draining="b").homes()) == ["a", "c"]
    assert list(view_of("abc", owned("a"), draining="abc").homes()) == ["a", "b", "c"]
    assert list(view_of("abc", owned("a"), dead="c", draining="b").homes()) == ["a"]
    assert BEST not in proposed(view_of("abcd", owned("a"), draining=BEST), SHARD, 2)


def test_better_placed_node_is_added_as_learner_then_the_other_is_dropped_to_former():
    view = view_of("abcd", owned(BEST, THIRD))
    assert step(view, {THIRD}) == ((BEST, THIRD, SECOND), (BEST, THIRD), ())
    view = view_of("abcd", owned(BEST, THIRD, SECOND, in_sync=(BEST, THIRD)))
    assert step(view, {THIRD}) is None  # the learner is not complete: nothing is given up for it
    assert step(view, {THIRD, SECOND}) == ((BEST, SECOND), (BEST, SECOND), (THIRD,))


def test_primary_moves_last_and_only_to_a_complete_replica():
    view = view_of("abcd", owned(SECOND, BEST))
    assert step(view, {BEST}) is None
    assert successor(view, SHARD, 2, set()) is None
    assert successor(view, SHARD, 2, {BEST}) == BEST
    assert successor(view_of("abcd", owned(SECOND, THIRD)), SHARD, 2, {THIRD, BEST}) is None
    assert successor(view_of("abcd", owned(BEST, SECOND)), SHARD, 2, {SECOND}) is None


def test_hand_over_names_the_next_primary_under_the_next_epoch_and_keeps_the_copies():
    view = view_of("abcd", owned(SECOND, BEST, former=(FOURTH,)))
    record = handed_to(view, SHARD, BEST, {BEST}, 2)
    assert record == ShardOwner(BEST, 1, 6, (BEST, SECOND), (BEST, SECOND), (FOURTH,)) or (
        record.primary,
        record.epoch,
        record.replicas,
        set(record.in_sync),
        record.former,
    ) == (BEST, 6, (BEST, SECOND), {BEST, SECOND}, (FOURTH,))
    view.epoch_seen[SHARD] = 40
    assert handed_to(view, SHARD, BEST, {BEST}, 2).epoch == 41


def test_given_up_is_vacant_with_the_giver_as_last_choice_and_no_new_epoch():
    view = view_of("abcd", owned(BEST, SECOND))
    record = given_up(view, SHARD)
    assert (record.primary, record.epoch) == ("", 5)
    assert (record.replicas, record.in_sync) == ((SECOND, BEST), (SECOND, BEST))
    view.apply([Record(owner_key(SHARD), encode_record(record), 10)], [], full=False, now_ns=1)
    assert view.is_vacant(SHARD)
    assert takers(view, SHARD, ())[:2] == [SECOND, BEST]


def test_dead_replica_is_replaced_at_once_whether_things_may_move_or_not():
    for may_move in (False, True):
        view = view_of("abcd", owned(BEST, FOURTH), dead=FOURTH)
        assert step(view, set(), may_move=may_move) == ((BEST, SECOND), (BEST,), (FOURTH,))


def test_without_steadiness_live_replicas_stay():
    assert step(view_of("abcd", owned(BEST, THIRD)), {THIRD}, may_move=False) is None


def test_third_replica_that_is_one_too_many_goes_though_nothing_may_move():
    """A move that was under way when a node came or went is brought to its end."""
    view = view_of("abcd", owned(BEST, THIRD, SECOND))
    assert step(view, {THIRD, SECOND}, may_move=False) == ((BEST, SECOND), (BEST, SECOND), (THIRD,))


def test_who_drains_is_dropped_also_where_fewer_nodes_than_copies_stay():
    view = view_of(BEST + SECOND, owned(BEST, SECOND), draining=SECOND)
    assert step(view, {SECOND}) == ((BEST,), (BEST,), (SECOND,))
    view = view_of(BEST + SECOND, owned(SECOND, BEST), draining=SECOND)
    assert step(view, {BEST}) is None
    assert successor(view, SHARD, 2, {BEST}) == BEST


def test_who_fell_behind_is_in_sync_no_longer():
    view = view_of("abcd", owned(BEST, SECOND))
    assert step(view, set(), may_move=False) == ((BEST, SECOND), (BEST,), ())
    assert step(view, {SECOND}, may_move=False) is None


def test_former_replicas_are_bounded_and_newest_first():
    view = view_of("abcd", owned(BEST, THIRD, SECOND, former=(FOURTH, "x", "y")))
    assert step(view, {THIRD, SECOND})[2] == (THIRD, FOURTH)


def test_home_is_where_placement_says_with_all_in_sync_by_record_and_in_fact():
    assert is_home(view_of("abcd", owned(BEST, SECOND)), SHARD, 2, {SECOND})
    assert not is_home(view_of("abcd", owned(BEST, SECOND)), SHARD, 2, set())
    assert not is_home(view_of("abcd", owned(BEST, SECOND, in_sync=(BEST,))), SHARD, 2, {SECOND})
    assert not is_home(view_of("abcd", owned(SECOND, BEST)), SHARD, 2, {BEST})
    assert not is_home(view_of("abcd", owned(BEST, THIRD)), SHARD, 2, {THIRD})
    assert not is_home(view_of("abcd", owned(BEST, SECOND, THIRD)), SHARD, 2, {SECOND, THIRD})


def test_record_that_is_older_than_a_replicas_restart_is_written_anew():
    """Else that replica would never count as in sync again, however complete it is."""
    view = view_of("abcd", owned(BEST, SECOND))
    view.apply([Record(f"live/{SECOND}", live(SECOND, 2), 10)], [], full=False, now_ns=1)
    assert not is_home(view, SHARD, 2, {SECOND})
    assert step(view, set()) == ((BEST, SECOND), (BEST,), ())
    assert step(view, {SECOND}) == ((BEST, SECOND), (BEST, SECOND), ())
    view.apply([Record(owner_key(SHARD), encode_record(owned(BEST, SECOND)), 11)], [], full=False, now_ns=1)
    assert step(view, {SECOND}) is None


def test_draining_nodes_take_vacant_shards_last():
    view = view_of("abcd", owned("x", "x"), draining=BEST)
    assert takers(view, SHARD, ()) == [SECOND, THIRD, FOURTH]
    view = view_of("abcd", owned("x", BEST), draining=BEST)
    assert takers(view, SHARD, ())[0] == BEST  # unless nobody else has the data


# -- when it moves -----------------------------------------------------------------------------------------------------


def primary() -> Bare:
    """Primary of everything with a complete replica b; c lives too, and nothing is where placement wants it."""
    bare = Bare().join().own()
    bare.core.put.repair.complete.update({shard: {"b"} for shard in range(SHARDS)})
    bare.up("b")
    return bare


def moved(bare: Bare, duration_ms: int) -> list[fx.Commit]:
    """Commits of owner records while the time passes; all commits succeed, nobody answers anything else."""
    found = []
    for _ in range(duration_ms // 50):
        for commit in all_of(bare.tick(50), fx.Commit):
            bare.committed(commit)
            if any(write.key.startswith("own/") for write in commit.writes):
                found.append(commit)
    return found


def test_nothing_moves_while_nodes_come_and_go():
    bare = primary()
    for counter in range(8):
        assert not moved(bare, 500), counter
        bare.records(("live/d", live("d", 1 + counter, dead=counter % 2 == 1)))
    assert moved(bare, 1200)


def test_moves_are_bounded_at_any_time():
    bare = primary()
    most = 0
    for _ in range(60):
        moved(bare, 50)
        owners = enumerate(bare.core.state.view.owners)
        learning = {shard for shard, owner in owners if owner.primary == "a" and len(owner.replicas) > 2}
        most = max(most, len(learning | set(bare.core.handover.leaving)))
    assert 0 < most <= MOVES_MAX


def test_drain_of_this_life_is_a_reason_to_move_and_one_of_another_life_is_not():
    bare = primary()
    ours = bare.core.state.settings.incarnation
    assert not bare.core.state.view.is_draining("a")
    bare.records(("drain/a", encode_record(DrainRecord(b"another life...."))))
    assert not bare.core.state.view.is_draining("a")
    bare.records(("drain/a", encode_record(DrainRecord(ours))))
    assert bare.core.state.view.is_draining("a")
    moved(bare, TTL // MS + 600)
    assert bare.core.state.counters["handed_over"] > 0
    owners = bare.core.state.view.owners
    assert {owner.primary for owner in owners} == {"a", "b"}
    assert all(owner.replicas[0] == owner.primary for owner in owners)


# -- whole clusters ----------------------------------------------------------------------------------------------------


def at_home(world: World) -> bool:
    """Every shard is where placement proposes it, by its primary's own view."""
    names = [world.primary(shard) for shard in range(SHARDS)]
    return all(
        name is not None
        and is_home(
            world.nodes[name].core.state.view,
            shard,
            world.settings.get("factor", 2),
            world.nodes[name].core.put.repair.complete.get(shard, set()),
        )
        for shard, name in enumerate(names)
    )


def run_home(world: World, limit_ms: float = 60_000) -> float:
    world.run_ms(200)  # until the record that moves them has come round
    return world.run_until(lambda: at_home(world), limit_ms, 100)


def filled(world: World, count: int = 120) -> dict[bytes, bytes]:
    world.run_ms(2500)
    blocks = {key_of(number): b"%d" % number for number in range(count)}
    keys = list(blocks)
    for start in range(0, count, 60):
        part = keys[start : start + 60]
        outcomes = world.put_now("a", part, [blocks[key] for key in part], min_copies=2)
        assert all(outcome.status is PutStatus.STORED for outcome in outcomes)
    return blocks


def read_everywhere(world: World, blocks: dict[bytes, bytes], but: str = "") -> None:
    keys = list(blocks)
    for name in world.names:
        if name not in but and world.nodes[name].alive:
            for start in range(0, len(keys), 60):
                part = keys[start : start + 60]
                found = world.get_now(name, part, deadline_ms=1000)
                assert [data for _, data in found] == [blocks[key] for key in part], name


class Putter:
    """Puts and reads without a pause, so that a request which fails for a move is seen."""

    def __init__(self, world: World, keys: list[bytes], at: str) -> None:
        self.world, self.keys, self.at = world, keys, at
        self.ops: dict[int, bytes] = {}
        self.ended: list[PutStatus] = []

    def run(self, duration_ms: float) -> None:
        world = self.world
        end = world.now + int(duration_ms * MS)
        while world.now < end:
            key = world.rng.choice(self.keys)
            self.ops[world.put(world.rng.choice(self.at), [key], [b"again"], deadline_ms=2000)] = key
            world.run_ms(10)
            for op in [op for op in self.ops if op in world.results]:
                del self.ops[op]
                self.ended.append(world.results.pop(op)[0].status)


def test_shards_move_to_a_node_that_joins_and_reads_and_puts_go_on():
    world = World("abc", seed=2, account_every=500)
    world.settle()
    blocks = filled(world)
    world.join("d")
    putter = Putter(world, list(blocks)[:40], "abc")
    putter.run(500)
    while not at_home(world) and world.now < 100_000 * MS:
        putter.run(500)
    run_home(world)
    world.run_ms(2500)
    assert set(putter.ended) == {PutStatus.STORED}
    assert len(putter.ended) > 60
    owners = [world.nodes["a"].core.state.view.owners[shard] for shard in range(SHARDS)]
    assert sum(owner.primary == "d" for owner in owners) > SHARDS // 8
    assert any("d" in owner.replicas and owner.former for owner in owners)
    blocks.update(dict.fromkeys(list(blocks)[:40], b"again"))
    for key in list(blocks)[:40]:
        ((_, data),) = world.get_now("d", [key])
        assert data in (b"again", b"%d" % list(blocks).index(key))
    read_everywhere(world, {key: data for key, data in blocks.items() if data != b"again"})
    world.check_all()


@pytest.mark.parametrize("leaving", ["a", "b"])
def test_drained_node_holds_no_shard_afterwards_and_no_request_fails(leaving):
    world = World("abcd", seed=3, account_every=500)
    world.settle()
    run_home(world)
    blocks = filled(world)
    world.drain(leaving)
    putter = Putter(world, [key_of(number) for number in range(1000, 1040)], "abcd")
    while any(leaving in owner.replicas for owner in world.nodes["c"].core.state.view.owners) and world.now < 100e9:
        putter.run(500)
    run_home(world)
    assert set(putter.ended) == {PutStatus.STORED}
    view = world.nodes["c"].core.state.view
    assert not any(leaving in owner.replicas for owner in view.owners)
    world.kill(leaving)
    read_everywhere(world, blocks)
    assert world.nodes["c"].core.state.counters["expired_peers"] == 0


def test_two_joins_at_once_end_at_placement_too():
    """More than one proposed replica may be missing from a record."""
    world = World("abc", seed=4, account_every=1000)
    world.settle()
    blocks = filled(world, 60)
    world.join("d")
    world.join("e")
    world.join("f")
    run_home(world)
    read_everywhere(world, blocks)


def test_cluster_at_home_is_quiet():
    world = World("abcd", seed=5, account_every=500)
    world.settle()
    run_home(world)
    world.run_ms(2000)
    seen: list[fx.Effect] = []
    world.observers.append(lambda node, effect: seen.append(effect))
    world.run_ms(3000)
    assert not all_of(seen, fx.Send)
    assert all(w.key.startswith("hb/") for commit in all_of(seen, fx.Commit) for w in commit.writes)
    assert not any(node.core.state.review for node in world.nodes.values())
    world.nodes["a"].step(ev.Tick(world.now))
