"""Who takes over, and who replaces a lost copy."""

import pytest

from emberkv.core import effects as fx
from emberkv.core.budget import plan
from emberkv.core.failover import takers
from emberkv.core.view import encode_record, owner_key
from emberkv.messages import LiveRecord, ShardOwner
from emberkv.ports import CommitStatus
from emberkv.types import PutStatus, shard_of
from harness.bare import MS, Bare, all_of, beat, live
from harness.world import World, key_of, keys_of_shard


def deaths(effects: list[fx.Effect]) -> list[fx.Commit]:
    return [c for c in all_of(effects, fx.Commit) if any(w.key == "live/b" for w in c.writes)]


def takes(effects: list[fx.Effect]) -> list[fx.Commit]:
    return [c for c in all_of(effects, fx.Commit) if any(w.key.startswith("own/") for w in c.writes)]


def member() -> Bare:
    """Node a, healthy for a long time, with peers that have just beaten."""
    bare = Bare().join()
    bare.records(("hb/b", beat(1, 1)), ("hb/c", beat(1, 1)))
    run(bare, 400)
    bare.records(("hb/b", beat(1, 2)), ("hb/c", beat(1, 2)))
    return bare


def run(
    bare: Bare, duration_ms: int, step_ms: int = 50, status: CommitStatus = CommitStatus.COMMITTED
) -> list[fx.Effect]:
    """Ticks; every renewal ends as told, other commits are only collected."""
    effects = []
    for _ in range(duration_ms // step_ms):
        for effect in bare.tick(step_ms):
            effects.append(effect)
            if isinstance(effect, fx.Commit) and effect.writes[0].key == "hb/a":
                bare.committed(effect, status)
    return effects


def test_silent_node_is_expired_once_comparing_the_revision_that_was_timed():
    bare = member()
    timed = bare.core.state.view.heartbeats["b"].revision
    assert not deaths(run(bare, 600))
    (commit, *rest) = deaths(run(bare, 100))
    assert not rest
    assert {c.key: c.revision for c in commit.compares}["hb/b"] == timed
    assert {c.key for c in commit.compares} == {"live/a", "live/b", "hb/b"}


def test_moving_heartbeat_is_not_expired():
    bare = member()
    for counter in range(3, 12):
        bare.records(("hb/b", beat(1, counter)), ("hb/c", beat(1, counter)))
        assert not deaths(run(bare, 400))


def test_an_observer_that_was_late_starts_its_timers_anew():
    bare = member()
    run(bare, 400)
    bare.now += 250 * MS
    assert not deaths(run(bare, 550))
    assert deaths(run(bare, 150))


def test_nobody_is_expired_right_after_a_coordinator_outage():
    bare = member()
    run(bare, 1000, status=CommitStatus.UNKNOWN)
    # The first success after the outage is no reason yet: the others need time to beat.
    assert not deaths(run(bare, 250))
    assert deaths(run(bare, 400))


def own(primary: str, in_sync: tuple[str, ...], replicas: tuple[str, ...], liveness: int = 1) -> bytes:
    return encode_record(ShardOwner(primary, liveness, 7, replicas, in_sync))


def test_in_sync_replicas_come_first_then_learners_then_restarted_ones():
    bare = Bare().join()
    view = bare.core.state.view
    bare.records((owner_key(0), own("b", ("b", "c"), ("b", "a", "c"))))
    bare.records(("live/b", live("b", 3)))
    assert takers(view, 0, ())[0] == "c"
    bare.records((owner_key(0), own("b", ("b",), ("b", "a"), liveness=3)))
    bare.records(("live/b", live("b", 5)))
    # b has restarted: what a learner holds is more than an empty memory.
    assert takers(view, 0, ()) == ["a", "b", "c"]


def test_takes_a_vacant_shard_at_once_with_a_higher_epoch_and_vouches_for_itself_only():
    bare = Bare().join()
    bare.own(primary="b", replicas=("b", "a"), in_sync=("b", "a"), shards=range(1))
    bare.records(*((owner_key(s), own("c", ("c",), ("c", "b"))) for s in range(1, 256)))
    (commit,) = takes(bare.records(("live/b", live("b", 2, dead=True))))
    (record,) = [w.value for w in commit.writes]
    bare.committed(commit)
    owner = bare.core.state.view.owners[0]
    assert encode_record(owner) == record
    assert (owner.primary, owner.in_sync, owner.replicas, owner.former) == ("a", ("a",), ("a", "c"), ("b",))
    assert owner.epoch > 5
    assert {c.key for c in commit.compares} == {"live/a", "live/b", owner_key(0)}
    assert bare.core.state.view.primary_epoch[0] == owner.epoch


def test_primary_whose_record_is_unknown_here_must_be_unknown_to_the_coordinator_too():
    """Else the vacancy is only ours: its live record has not come to us yet."""
    bare = Bare().join()
    commits = takes(bare.records(*((owner_key(s), own("x", ("x",), ("x", "a"))) for s in range(256))))
    assert sum(len(commit.writes) for commit in commits) == 256
    assert all({c.key: c.revision for c in commit.compares}["live/x"] == 0 for commit in commits)


def test_given_up_shard_names_no_primary_whose_life_could_be_compared():
    bare = Bare().join()
    commits = takes(bare.records(*((owner_key(s), own("", ("a",), ("a", "b"), liveness=0)) for s in range(256))))
    compares = {c.key for commit in commits for c in commit.compares}
    assert {key for key in compares if key.startswith("live/")} == {"live/a"}


def test_lower_rank_waits_and_unknown_take_is_not_believed():
    bare = Bare().join()
    bare.records(*((owner_key(s), own("b", ("b", "c"), ("b", "c"))) for s in range(256)))
    assert not takes(bare.records(("live/b", live("b", 2, dead=True))))
    assert not takes(bare.tick(19))
    commits = takes(bare.tick(2))
    assert sum(len(commit.writes) for commit in commits) == 256
    assert all(len(commit.compares) <= 128 for commit in commits)
    bare.committed(commits[0], CommitStatus.UNKNOWN)
    assert not any(bare.core.state.view.primary_epoch)


def test_without_a_lease_nothing_is_taken():
    bare = Bare().join()
    bare.now += 2000 * MS
    assert not takes(bare.records(("live/b", live("b", 2, dead=True))))
    assert not takes(bare.tick())


def test_reconcile_guards_the_incarnation_of_each_replica_it_vouches_for():
    bare = Bare().join().own(in_sync=("a",), replicas=("a", "b"))
    bare.core.put.repair.complete.update({shard: {"b"} for shard in range(256)})
    commits = takes(run(bare, 400))
    compares = {c.key: c.revision for c in commits[0].compares}
    assert compares["live/b"] == bare.core.state.view.live_revision["b"]
    assert sum(len(c.writes) for c in commits) == 256


def test_reconcile_replaces_the_dead_and_drops_who_fell_behind():
    bare = Bare().join().own()
    bare.core.put.repair.complete.update({shard: {"b"} for shard in range(256)})
    assert not takes(run(bare, 400))
    bare.core.put.repair.behind("b", 0)
    (commit,) = takes(run(bare, 250))
    assert [w.key for w in commit.writes] == [owner_key(0)]
    bare.committed(commit)
    assert bare.core.state.view.owners[0].in_sync == ("a",)
    bare.records(("live/b", live("b", 2, dead=True)))
    commits = takes(run(bare, 250))
    assert sum(len(c.writes) for c in commits) == 256
    bare.committed(commits[0])
    owner = bare.core.state.view.owners[0]
    assert (owner.replicas, owner.former, owner.epoch) == (("a", "c"), ("b",), 5)


def test_replica_that_left_and_came_back_is_compared_again():
    bare = Bare().join().own()
    bare.core.put.repair.complete.update({shard: {"b"} for shard in range(256)})
    bare.own(replicas=("a", "c"), in_sync=("a",))
    bare.own(replicas=("a", "b"), in_sync=("a",))
    assert "b" not in bare.core.put.repair.complete[0]
    assert 0 in bare.core.put.repair.waiting["b"]


def test_death_notice_keeps_the_address():
    bare = member()
    (commit,) = deaths(run(bare, 700))
    (dead,) = [w.value for w in commit.writes]
    assert dead == encode_record(
        LiveRecord(2, bare.core.state.view.live["b"].incarnation, bare.core.state.view.live["b"].address, dead=True)
    )


@pytest.mark.parametrize("budget_s", [1, 3, 10])
def test_outage_of_session_puts_is_within_the_budget_for_every_shard(budget_s):
    """Kill a node that serves a third of the shards; probe a put per lost shard every 20 ms through a survivor."""
    budget = plan(budget_s * 1000)
    costs = budget.costs
    world = World(
        "abc", seed=budget_s, account_every=1000, arena_bytes=8 << 20,
        tick_ms=int(costs.lateness_ms / 2), ttl_ns=int(budget.ttl_ms * MS), margin_ns=int(budget.margin_ms * MS),
        commit_ns=int(costs.commit_ms * MS),
    )  # fmt: skip
    world.delay_ms = (0.5, min(costs.watch_ms, costs.commit_ms / 2))
    world.settle(20_000)
    world.run_ms(budget.ttl_ms)
    world.kill("a")
    killed = world.now
    lost = {shard for shard in range(256) if world.nodes["b"].core.state.view.owners[shard].primary == "a"}
    assert len(lost) > 40
    keys = {shard: keys_of_shard(shard)[0] for shard in sorted(lost)[::16]}
    probes: dict[int, int] = {}
    waiting, worst = set(keys), 0.0
    while waiting and world.now - killed < 2 * budget_s * 1000 * MS:
        for shard in waiting:
            probes[world.put("b", [keys[shard]], [b"probe"], deadline_ms=costs.client_try_ms)] = shard
        world.run_ms(20)
        for op in [op for op in probes if op in world.results]:
            shard = probes.pop(op)
            if world.results.pop(op)[0].status is PutStatus.STORED:
                waiting.discard(shard)
                worst = max(worst, (world.now - killed) / MS)
    assert not waiting
    assert worst <= budget.worst_case_ms, f"outage of {worst:.0f} ms"
    world.run_until(world.settled, budget_s * 1000)


def test_primary_that_restarts_inside_its_lease_hands_over_to_who_has_the_data():
    world = World("abc", seed=5)
    world.settle()
    key = key_of(1)
    world.run_ms(1500)
    primary = world.primary(shard_of(key))
    world.put_now(primary, [key], [b"kept"], min_copies=2)
    world.restart(primary)
    world.settle()
    assert world.primary(shard_of(key)) != primary
    world.run_ms(2000)
    assert world.get_now(primary, [key])[0][1] == b"kept"
