"""Giving a shard away while alive: the gate is closed before the commit, and until its outcome is certain."""

import msgspec
import pytest

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.handover import CLOSED_MAX, CLOSING_TTLS_MAX, PER_COMMIT_MAX, TRANSITIONS, Leaving
from emberkv.core.placement import ranked
from emberkv.core.view import encode_record, owner_key
from emberkv.errors import InvariantViolation
from emberkv.messages import PutFlag, PutRequest, ReplicaStatus, Replicate, ReplicateReply, ShardOwner
from emberkv.ports import CommitStatus
from emberkv.types import SHARDS, PutStatus, RefuseReason, shard_of
from harness.bare import MS, TTL, Bare, all_of, beats, live, only, sends
from harness.world import World, key_of, keys_of_shard

SHARD = 3
K1, K2, K3 = keys_of_shard(SHARD, 3)
COMMITTED, REFUSED, UNKNOWN = CommitStatus.COMMITTED, CommitStatus.REFUSED, CommitStatus.UNKNOWN


def primary(shards: range = range(SHARD, SHARD + 1)) -> Bare:
    """Primary of everything; b is complete and in sync in `shards`, which are to be handed to it."""
    bare = Bare().join().own()
    bare.core.put.repair.complete.update({shard: {"b"} for shard in range(SHARDS)})
    bare.core.put.repair.waiting.clear()
    bare.core.state.review.clear()
    bare.up("b")
    for shard in shards:
        bare.core.handover.begin(shard, "b")
    return bare


def gate_open(bare: Bare, shard: int = SHARD) -> bool:
    return bare.core.put._may_stamp(shard)


def given(effects: list[fx.Effect]) -> list[fx.Commit]:
    """Commits of owner records; those of a lease renewal are left out."""
    return [commit for commit in all_of(effects, fx.Commit) if commit not in beats(effects)]


def tick(bare: Bare, after_ms: float = 10) -> list[fx.Effect]:
    """Time passes, and the lease is renewed."""
    effects = bare.tick(after_ms)
    for commit in beats(effects):
        bare.committed(commit)
    return effects


def commit_of(bare: Bare) -> fx.Commit:
    (commit,) = given(tick(bare))
    return commit


# -- the gate --------------------------------------------------------------------------------------------------------


def test_gate_is_closed_before_the_commit_leaves_and_only_for_that_shard():
    bare = primary()
    assert not gate_open(bare)
    assert gate_open(bare, SHARD + 1)
    commit = commit_of(bare)
    assert not gate_open(bare)
    (write,) = commit.writes
    bare.committed(commit)
    assert write.value == encode_record(bare.core.state.view.owners[SHARD])
    owner = bare.core.state.view.owners[SHARD]
    assert (owner.primary, owner.replicas, owner.epoch) == ("b", ("b", "a"), 6)
    assert not gate_open(bare)
    assert bare.core.state.view.primary_epoch[SHARD] == 0
    assert not bare.core.handover.leaving
    assert not bare.core.state.closed


def test_commit_compares_both_lives_and_the_record_that_it_replaces():
    bare = primary()
    view = bare.core.state.view
    compares = {compare.key: compare.revision for compare in commit_of(bare).compares}
    assert compares == {
        "live/a": bare.core.lease.live_revision,
        "live/b": view.live_revision["b"],
        owner_key(SHARD): view.owner_revision[SHARD],
    }


def test_nothing_is_given_while_something_is_unanswered_by_the_next_primary():
    bare = primary(range(0))
    (flying,) = sends(bare.put([K1], [b"one"]), Replicate)
    bare.core.handover.begin(SHARD, "b")
    assert not given(tick(bare))
    bare.unref(flying.slots)
    reply = ReplicateReply([int(ReplicaStatus.STORED)], [0])
    bare.step(ev.ReplicateAnswered(bare.now, "b", flying.request, reply))
    assert given(tick(bare))


def test_nothing_is_given_while_a_put_of_it_waits_for_its_copies():
    """It was stored under our epoch, and is acknowledged under it or not at all."""
    bare = Bare(factor=3).join().own(replicas=("a", "b", "c"), in_sync=("a", "b", "c"))
    bare.core.put.repair.complete.update({shard: {"b", "c"} for shard in range(SHARDS)})
    bare.core.put.repair.waiting.clear()
    bare.core.state.review.clear()
    bare.up("b", "c")
    flying = {send.peer: send for send in sends(bare.put([K1], [b"one"], min_copies=3), Replicate)}
    bare.core.handover.begin(SHARD, "b")

    def stored(peer: str) -> list[fx.Effect]:
        bare.unref(flying[peer].slots)
        reply = ReplicateReply([int(ReplicaStatus.STORED)], [0])
        return bare.step(ev.ReplicateAnswered(bare.now, peer, flying[peer].request, reply))

    stored("b")
    assert not given(tick(bare))
    assert only(stored("c"), fx.PutDone).outcomes[0].status is PutStatus.STORED
    assert given(tick(bare))


def test_nothing_is_given_while_the_rest_of_a_batch_is_unanswered():
    """The answer of a batch is one message: what is stored here waits in it for the other keys."""
    bare = Bare(factor=3).join().own()
    other = next(key_of(number) for number in range(999) if shard_of(key_of(number)) != SHARD)
    bare.own(primary="c", replicas=("c", "b"), in_sync=("c", "b"), shards=range(shard_of(other), shard_of(other) + 1))
    bare.core.put.repair.complete.update({shard: {"b"} for shard in range(SHARDS)})
    bare.core.put.repair.waiting.clear()
    bare.core.state.review.clear()
    bare.up("b", "c")
    effects = bare.put([K1, other], [b"one", b"two"], deadline_ms=60)
    assert not all_of(effects, fx.PutDone)
    (copy,) = sends(effects, Replicate)
    bare.core.handover.begin(SHARD, "b")
    bare.unref(copy.slots)
    reply = ReplicateReply([int(ReplicaStatus.STORED)], [0])
    bare.step(ev.ReplicateAnswered(bare.now, "b", copy.request, reply))
    assert not given(tick(bare))
    outcomes = only(tick(bare, 60), fx.PutDone).outcomes
    assert [outcome.status is PutStatus.STORED for outcome in outcomes] == [True, False]
    assert given(tick(bare))


def test_put_that_is_answered_after_the_commit_has_left_is_unknown():
    """From then on another may speak for the shard."""
    bare = alone()
    effects = bare.put([K1], [b"one"], min_copies=2, deadline_ms=60_000)
    assert not all_of(effects, fx.PutDone)
    bare.core.handover.begin(SHARD, "")
    (commit,) = [commit for commit in given(tick(bare)) if commit.writes[0].key == owner_key(SHARD)]
    assert SHARD in bare.core.state.given
    bare.core.put.copied(1, 0, "b")
    assert only(bare.tick(), fx.PutDone).outcomes[0].status is PutStatus.UNKNOWN
    bare.committed(commit, REFUSED)
    assert SHARD not in bare.core.state.given


def test_what_flies_of_another_shard_holds_nothing_up():
    bare = primary(range(0))
    bare.put(keys_of_shard(SHARD + 1), [b"one"])
    bare.core.handover.begin(SHARD, "b")
    assert given(tick(bare))


# -- what becomes of the commit --------------------------------------------------------------------------------------


def test_refused_opens_the_gate_again():
    bare = primary()
    bare.committed(commit_of(bare), REFUSED)
    assert gate_open(bare)
    assert not bare.core.handover.leaving


def test_unknown_keeps_the_gate_closed_until_our_own_record_is_committed_on_the_same_revision():
    bare = primary()
    first = commit_of(bare)
    bare.committed(first, UNKNOWN)
    assert not gate_open(bare)
    again = commit_of(bare)
    # Its success proves that the first can take effect no more.
    assert again.writes[0].value == encode_record(bare.core.state.view.owners[SHARD])
    assert {c.key: c.revision for c in again.compares}[owner_key(SHARD)] == {c.key: c.revision for c in first.compares}[
        owner_key(SHARD)
    ]
    assert not gate_open(bare)
    bare.committed(again, UNKNOWN)
    assert not gate_open(bare)
    bare.committed(commit_of(bare))
    assert gate_open(bare)
    assert bare.core.state.view.owners[SHARD].primary == "a"
    assert bare.core.state.counters["handed_over"] == 0


def test_refused_proof_leaves_the_gate_closed_until_the_watch_says_why():
    bare = primary()
    bare.committed(commit_of(bare), UNKNOWN)
    bare.committed(commit_of(bare), REFUSED)
    assert not gate_open(bare)
    bare.own(primary="b", replicas=("b", "a"), in_sync=("b", "a"), epoch=6, shards=range(SHARD, SHARD + 1))
    assert not bare.core.handover.leaving
    assert not gate_open(bare)
    bare.own(epoch=7, shards=range(SHARD, SHARD + 1))
    assert gate_open(bare)


def test_record_that_the_watch_brings_settles_an_unanswered_commit():
    bare = primary()
    commit = commit_of(bare)
    bare.own(primary="b", replicas=("b", "a"), in_sync=("b", "a"), epoch=6, shards=range(SHARD, SHARD + 1))
    assert not bare.core.handover.leaving
    bare.own(epoch=9, shards=range(SHARD, SHARD + 1))
    assert gate_open(bare)
    bare.step(ev.Committed(bare.now, commit.op, COMMITTED, 3, bare.now))  # late, and long overtaken
    assert gate_open(bare)
    assert bare.core.state.view.owners[SHARD].epoch == 9


def test_heartbeats_and_records_of_others_settle_nothing():
    bare = primary()
    commit_of(bare)
    bare.records(("live/c", live("c", 2)))
    bare.own(epoch=6, shards=range(SHARD + 1, SHARD + 2))
    assert not gate_open(bare)


def test_lapsed_lease_gives_nothing():
    bare = primary()
    bare.now += 2 * TTL
    assert not given(bare.tick())


# -- who is no longer the right one ----------------------------------------------------------------------------------


def test_next_primary_that_died_or_fell_behind_is_not_given_the_shard():
    for loss in ("died", "behind"):
        bare = primary()
        if loss == "died":
            bare.records(("live/b", live("b", 2, dead=True)))
        else:
            bare.core.put.repair.behind("b", SHARD)
        records = [msgspec.msgpack.decode(w.value, type=ShardOwner) for c in given(tick(bare)) for w in c.writes]
        assert all(record.primary == "a" for record in records)
        assert gate_open(bare), loss


def test_gate_that_is_closed_for_too_long_is_opened_again():
    bare = primary(range(0))
    bare.put([K1], [b"never answered"])
    bare.core.handover.begin(SHARD, "b")
    bare.core.state.review.clear()
    shut_ms = 0
    while not gate_open(bare):
        assert shut_ms * MS <= 2 * CLOSING_TTLS_MAX * TTL
        tick(bare, 10)
        shut_ms += 10
    assert shut_ms * MS >= CLOSING_TTLS_MAX * TTL


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_few_shards_are_closed_at_once_and_share_commits():
    bare = primary(range(100))
    assert len(bare.core.state.closed) == CLOSED_MAX
    commits = given(tick(bare))
    assert [len(commit.writes) for commit in commits] == [PER_COMMIT_MAX]
    rest = given(tick(bare))
    assert [len(commit.writes) for commit in rest] == [CLOSED_MAX - PER_COMMIT_MAX]
    assert not given(tick(bare))


def test_a_hand_over_takes_only_the_moves_of_its_table():
    leaving = Leaving(SHARD, "b", 0)
    with pytest.raises(InvariantViolation):
        leaving.move("unknown")
    for phase, what in TRANSITIONS:
        leaving.phase = phase
        leaving.move(what)
        assert leaving.phase is TRANSITIONS[phase, what]


# -- requests meanwhile ----------------------------------------------------------------------------------------------


def test_puts_wait_and_are_forwarded_to_the_next_primary_as_first_sends():
    bare = primary()
    assert not all_of(bare.put([K1], [b"of a client"]), fx.PutDone)
    assert not all_of(bare.put([K2], [b"of a peer"], op=2, peer="c"), fx.PutDone)
    effects = bare.committed(commit_of(bare))
    asked = {item.key: send for send in sends(effects, PutRequest) for item in send.message.items}
    assert set(asked) == {K1[8:], K2[8:]}
    assert all(send.peer == "b" and send.message.flags & PutFlag.FRESH for send in asked.values())


def test_forward_to_a_node_that_gave_the_shard_away_is_fenced():
    bare = primary()
    bare.committed(commit_of(bare))
    outcome = only(bare.put([K1], [b"late"], peer="c"), fx.PutDone).outcomes[0]
    assert outcome.reason is RefuseReason.FENCED


def test_put_that_waits_for_copies_over_a_hand_over_is_unknown_and_never_acknowledged():
    bare = primary(range(0))
    (flying,) = sends(bare.put([K1], [b"one"], min_copies=2), Replicate)
    bare.own(primary="b", replicas=("b", "a"), in_sync=("b", "a"), epoch=6, shards=range(SHARD, SHARD + 1))
    bare.unref(flying.slots)
    reply = ReplicateReply([int(ReplicaStatus.STORED)], [0])
    ended = only(bare.step(ev.ReplicateAnswered(bare.now, "b", flying.request, reply)), fx.PutDone)
    assert ended.outcomes[0].status is PutStatus.UNKNOWN


def test_giver_stays_a_replica_and_hands_nothing_in_that_the_next_one_has():
    bare = primary(range(0))
    (flying,) = sends(bare.put([K3], [b"kept"]), Replicate)
    bare.unref(flying.slots)
    bare.step(ev.ReplicateAnswered(bare.now, "b", flying.request, ReplicateReply([0], [0])))
    bare.core.handover.begin(SHARD, "b")
    bare.committed(commit_of(bare))
    assert bare.core.put.stream.applied[SHARD] is not None
    assert SHARD not in bare.core.put.repair.complete
    assert bare.core.state.directory.get(K3) is not None


# -- alone -----------------------------------------------------------------------------------------------------------


def ticks(bare: Bare, duration_ms: int) -> list[fx.Commit]:
    """Time passes; renewals and hand-overs are committed."""
    found = []
    for _ in range(duration_ms // 50):
        effects = tick(bare, 50)
        found += given(effects)
        for commit in given(effects):
            bare.committed(commit)
    return found


FEW = range(20)


def alone() -> Bare:
    """Node a, primary of a few shards, which has reached b and reaches nobody from now on."""
    bare = Bare().join().own(primary="b", replicas=("b", "c"), in_sync=("b", "c")).own(shards=FEW)
    bare.up("b")
    bare.step(ev.PeerDown(bare.now, "b"))
    return bare


def owners(bare: Bare) -> set[tuple[str, int]]:
    return {(owner.primary, owner.epoch) for owner in bare.core.state.view.owners[: len(FEW)]}


def given_up(bare: Bare) -> None:
    """The time until all of them are vacant."""
    for _ in range(40):
        ticks(bare, 50)
        if owners(bare) == {("", 5)}:
            return
    raise AssertionError(owners(bare))


def test_primary_that_reaches_nobody_for_a_lease_gives_its_shards_up():
    bare = alone()
    ticks(bare, 600)
    assert owners(bare) == {("a", 5)}
    given_up(bare)
    ours = bare.core.state.view.owners[: len(FEW)]
    assert {(owner.liveness_epoch, owner.replicas) for owner in ours} == {
        (0, ("b", "a"))
    }  # its copy is the last choice
    assert not any(bare.core.state.view.primary_epoch)


def test_it_takes_them_again_last_of_all_and_keeps_what_nobody_else_wanted():
    """If nobody reaches anybody, one voice is better than none."""
    bare = alone()
    given_up(bare)
    assert not ticks(bare, TTL // MS)
    ticks(bare, 1000)
    (owner,) = owners(bare)
    assert owner[0] == "a"
    assert owner[1] > 5
    assert not ticks(bare, 5000)  # once in a spell of being alone is enough
    bare.up("b")
    ticks(bare, 100)
    bare.step(ev.PeerDown(bare.now, "b"))
    ticks(bare, 3000)
    assert owners(bare) == {("a", owner[1] + 1)}


def test_one_that_reaches_somebody_again_takes_what_nobody_else_wanted_as_usual():
    bare = alone()
    given_up(bare)
    bare.up("c")
    ticks(bare, 300)
    assert {name for name, _ in owners(bare)} == {"a"}


def test_primary_that_reaches_anybody_keeps_its_shards():
    bare = alone()
    bare.up("c")
    ticks(bare, 2000)
    assert owners(bare) == {("a", 5)}


def test_shards_without_another_live_replica_are_kept():
    bare = Bare(factor=1).join().own(primary="b", replicas=("b",), in_sync=("b",))
    mine = [shard for shard in range(SHARDS) if ranked(shard, "abc")[0] == "a"]
    for shard in mine:
        bare.own(replicas=("a",), in_sync=("a",), shards=range(shard, shard + 1))
    ticks(bare, 3000)
    assert [shard for shard, epoch in enumerate(bare.core.state.view.primary_epoch) if epoch] == mine


def test_single_node_is_not_alone():
    bare = Bare(members=("a",))
    bare.committed(only(bare.records(full=True), fx.Commit))
    bare.own(replicas=("a",), in_sync=("a",))
    ticks(bare, 3000)
    assert {owner.primary for owner in bare.core.state.view.owners} == {"a"}


# -- whole clusters --------------------------------------------------------------------------------------------------


def test_isolated_primary_makes_way_for_those_who_reach_one_another():
    """It still reaches the coordinator: nobody expires it, and yet its clients' peers could put nothing."""
    world = World("abc", seed=3)
    world.settle()
    world.run_ms(2500)
    lost = world.primary(SHARD)
    rest = sorted(set("abc") - {lost})
    for other in rest:
        world.cut(lost, other)
    took = world.run_until(lambda: world.primary(SHARD) in rest, 10_000)
    assert took > 600
    for name in rest:
        assert world.put_now(name, [K1], [b"by %s" % name.encode()])[0].status is PutStatus.STORED
    assert world.put_now(lost, [K2], [b"kept"], deadline_ms=200)[0].status is PutStatus.QUEUED
    world.heal()
    world.run_ms(4000)
    for reader in "abc":
        assert [data for _, data in world.get_now(reader, [K1, K2])] == [b"by %s" % rest[-1].encode(), b"kept"]
    assert all(
        node.core.lease.liveness_epoch == world.nodes["a"].core.lease.liveness_epoch for node in world.nodes.values()
    )


def test_hand_overs_with_unknown_outcomes_leave_one_gate_and_lose_nothing():
    world = World("abc", seed=8, account_every=100)
    world.settle()
    world.run_ms(2500)
    blocks = {key_of(number): b"%d" % number for number in range(60)}
    outcomes = world.put_now("a", list(blocks), list(blocks.values()), min_copies=2)
    assert all(outcome.status is PutStatus.STORED for outcome in outcomes)
    world.unknown_share = 0.4
    world.join("d")
    for _ in range(400):
        world.run_ms(20)
        world.check_gates()
    world.unknown_share = 0.0
    world.run_ms(6000)
    world.check_all()
    assert world.settled()
    assert not any(node.core.handover.leaving for node in world.nodes.values())
    for name in "abcd":
        found = world.get_now(name, list(blocks), deadline_ms=1000)
        assert [data for _, data in found] == list(blocks.values())
