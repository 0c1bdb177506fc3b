"""Accepting, stamping and acknowledging."""

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.messages import PutReply, ReplicaStatus, Replicate, ReplicateReply
from emberkv.ports import CommitStatus
from emberkv.types import NO_VERSION, PutOutcome, PutStatus, RefuseReason, Version, checksum, shard_of
from harness.bare import MS, Bare, all_of, only
from harness.world import World, key_of

K1, K2 = key_of(1), key_of(2)
STORED, UNKNOWN = PutStatus.STORED, PutStatus.UNKNOWN


def primary(*, in_sync: tuple[str, ...] = ("a", "b")) -> Bare:
    bare = Bare().join().own(in_sync=in_sync)
    bare.up("b")
    return bare


def done(effects: list[fx.Effect]) -> fx.PutDone:
    return only(effects, fx.PutDone)


def stream(effects: list[fx.Effect]) -> fx.Send:
    (send,) = [send for send in all_of(effects, fx.Send) if isinstance(send.message, Replicate)]
    return send


def answer(bare: Bare, send: fx.Send, *statuses: ReplicaStatus, epoch: int = 0) -> list[fx.Effect]:
    bare.unref(send.slots)
    reply = ReplicateReply([int(status) for status in statuses], [epoch] * len(statuses))
    return bare.step(ev.ReplicateAnswered(bare.now, send.peer, send.request, reply))


def test_primary_stamps_in_order_and_streams_each_once():
    bare = primary()
    effects = bare.put([K1, K2], [b"one", b"two"])
    assert [o.version.seq for o in done(effects).outcomes] == [1, 1 + (shard_of(K1) == shard_of(K2))]
    assert done(effects).gate_ns == bare.core.lease.deadline_ns
    send = stream(effects)
    assert [item.key for item in send.message.items] == [K1, K2]
    assert all(item.authority == 5 for item in send.message.items)
    assert bare.put([K1], [b"more"], op=2)[-1].message.items[0].version == Version(5, 2)


def test_block_over_the_arenas_slabs_is_too_large_and_costs_no_other_block():
    bare = Bare(arena_slots=8, block_bytes_max=4096).join().own(in_sync=("a",), replicas=("a",))
    for number in range(8):
        assert done(bare.put([key_of(number)], [b"x"], op=number + 1)).outcomes[0].status is STORED
    outcome = done(bare.put([key_of(9)], [bytes(8192)], op=99)).outcomes[0]
    assert (outcome.status, outcome.reason) == (PutStatus.REFUSED, RefuseReason.TOO_LARGE)
    assert bare.core.state.directory.count() == 8


def test_put_that_is_not_fresh_only_fills():
    bare = primary()
    first = done(bare.put([K1], [b"one"])).outcomes[0]
    same = done(bare.put([K1], [b"one"], op=2, fresh=False)).outcomes[0]
    assert (same.status, same.version) == (STORED, first.version)
    other = done(bare.put([K1], [b"two"], op=3, fresh=False)).outcomes[0]
    assert (other.status, other.version) == (PutStatus.SUPERSEDED, first.version)
    assert bare.core.state.counters["conflicts"] == 1
    seen = done(bare.put([K1], [b"two"], op=4, fresh=False, seen=first.version)).outcomes[0]
    assert seen.version == Version(5, 2)
    assert bare.core.state.directory.get(K1).prev == first.version


def test_equal_put_id_with_other_bytes_never_takes_the_version():
    bare = primary()
    bare.put([K1], [b"one"], ids=[b"\0" * 24])
    outcome = done(bare.put([K1], [b"two"], op=2, fresh=False, ids=[b"\0" * 24])).outcomes[0]
    assert outcome.status is PutStatus.SUPERSEDED


def test_delete_stamps_a_tombstone_and_a_replayed_one_is_stored_already():
    bare = primary()
    bare.put([K1], [b"one"])
    effects = bare.put([K1], [b""], op=2, delete=True, ids=[b"d" * 24])
    assert done(effects).outcomes[0].version == Version(5, 2)
    assert bare.core.state.directory.get(K1).slot is None
    again = done(bare.put([K1], [b""], op=3, delete=True, fresh=False, ids=[b"d" * 24])).outcomes[0]
    assert (again.status, again.version) == (STORED, Version(5, 2))


def test_min_copies_waits_for_an_in_sync_replica():
    bare = primary()
    effects = bare.put([K1], [b"one"], min_copies=2)
    assert not all_of(effects, fx.PutDone)
    outcome = done(answer(bare, stream(effects), ReplicaStatus.STORED)).outcomes[0]
    assert (outcome.status, outcome.copies) == (STORED, 2)


def test_copy_at_a_learner_does_not_count():
    bare = primary(in_sync=("a",))
    effects = bare.put([K1], [b"one"], min_copies=2)
    assert not all_of(answer(bare, stream(effects), ReplicaStatus.STORED), fx.PutDone)
    ends = bare.tick(1001)
    assert done(ends).outcomes[0].status is UNKNOWN


def test_copy_that_was_refused_for_space_does_not_count():
    bare = primary()
    effects = bare.put([K1], [b"one"], min_copies=2)
    assert not all_of(answer(bare, stream(effects), ReplicaStatus.NO_SPACE), fx.PutDone)


def test_replay_of_a_stored_put_still_waits_for_its_copies():
    bare = primary()
    bare.unref(stream(bare.put([K1], [b"one"])).slots)
    effects = bare.put([K1], [b"one"], op=2, fresh=False, min_copies=2, peer="c")
    assert not all_of(effects, fx.PutDone)
    assert done(answer(bare, stream(effects), ReplicaStatus.STORED)).outcomes[0].copies == 2


def test_more_copies_than_replicas_is_refused():
    outcome = done(primary().put([K1], [b"one"], min_copies=3)).outcomes[0]
    assert (outcome.status, outcome.reason) == (PutStatus.REFUSED, RefuseReason.LEVEL_UNSUPPORTED)


def test_lapsed_primary_refuses_peers_and_queues_for_clients():
    bare = primary()
    bare.now += 2000 * MS
    assert done(bare.put([K1], [b"one"], peer="c")).outcomes[0].reason is RefuseReason.FENCED
    assert not all_of(bare.put([K1], [b"one"], op=2), fx.PutDone)
    outcome = done(bare.tick(1001)).outcomes[0]
    assert outcome.status is PutStatus.QUEUED
    assert bare.core.put.hints.count() == 1


def lose_lease(bare: Bare) -> None:
    bare.now += 250 * MS
    for commit in all_of(bare.tick(), fx.Commit):
        bare.committed(commit, CommitStatus.REFUSED)
    assert not bare.core.lease.open(bare.now)


def test_ack_after_the_lease_was_lost_is_unknown_though_copies_arrived():
    bare = primary()
    effects = bare.put([K1], [b"one"], min_copies=2)
    lose_lease(bare)
    ended = done(answer(bare, stream(effects), ReplicaStatus.STORED))
    assert ended.outcomes[0].status is UNKNOWN
    assert ended.gate_ns == 1


def test_ack_under_a_later_epoch_of_its_own_is_unknown_too():
    bare = primary()
    effects = bare.put([K1], [b"one"], min_copies=2)
    bare.own(epoch=6)
    assert done(answer(bare, stream(effects), ReplicaStatus.STORED)).outcomes[0].status is UNKNOWN


def test_peer_that_claims_a_higher_epoch_stills_the_primary_for_a_lease_and_no_longer():
    bare = primary()
    effects = bare.put([K1], [b"one"])
    answer(bare, stream(effects), ReplicaStatus.FENCED, epoch=1 << 60)
    assert not bare.core.put._may_stamp(shard_of(K1))
    for _ in range(14):
        for commit in all_of(bare.tick(50), fx.Commit):
            bare.committed(commit)
    assert bare.core.put._may_stamp(shard_of(K1))


def test_bad_bytes_are_refused_and_leave_nothing():
    bare = primary()
    begun = bare.step(ev.PutBegin(bare.now, 1, [K1], bare_item(K1), bare.now + MS, True, True, 1, ""))
    only(begun, fx.Fill)
    ended = done(bare.step(ev.PutFilled(bare.now, 1, [None])))
    assert ended.outcomes[0].reason is RefuseReason.CHECKSUM
    assert not bare.live_slots()


def bare_item(key: bytes) -> list:
    from emberkv.messages import PutItem

    return [PutItem(key[8:], b"i" * 24, 3, checksum(b"one"))]


def test_abort_gives_the_room_back_once():
    bare = primary()
    bare.step(ev.PutBegin(bare.now, 1, [K1], bare_item(K1), bare.now + MS, True, True, 1, ""))
    assert bare.live_slots() == 1
    for _ in range(2):
        assert not bare.step(ev.PutAborted(bare.now, 1))
    assert not bare.live_slots()
    assert not bare.core.put.ops
    bare.step(ev.PutFilled(bare.now, 1, [checksum(b"one")]))


def test_no_room_is_said_and_nothing_is_kept():
    bare = Bare(arena_slots=1).join().own(replicas=("a",), in_sync=("a",))
    bare.core.state.directory.ref(bare.core.state.directory.reserve(5))
    assert done(bare.put([K1], [b"one"])).outcomes[0].reason is RefuseReason.NO_SPACE
    assert not bare.core.put.ops


def test_eventual_put_elsewhere_is_accepted_at_once_and_known_bytes_are_not_sent_again():
    bare = Bare().join().own(primary="b", replicas=("b", "a"), in_sync=("b", "a"))
    bare.up("b")
    effects = bare.put([K1], [b"one"], session=False)
    assert done(effects).outcomes[0].status is PutStatus.ACCEPTED
    send = only(effects, fx.Send)
    bare.unref(send.slots)
    reply = PutReply([PutOutcome(STORED, Version(5, 1), 1)])
    bare.step(ev.PutAnswered(bare.now, "b", send.request, reply))
    assert bare.core.state.directory.get(K1).version == Version(5, 1)
    assert not all_of(bare.put([K1], [b"one"], op=2, session=False), fx.Send)
    bare.put([K1], [b"two"], op=3, session=False)
    # Bytes equal to the stored ones, but a later put is on its way: this one must follow it.
    bare.put([K1], [b"one"], op=4, session=False)
    assert checksum(b"one") in [h.entry.checksum for h in bare.core.put.hints.pending.values()]


def test_waiting_session_put_is_stamped_here_when_this_node_becomes_primary():
    bare = Bare().join().own(primary="b", replicas=("b", "a"), in_sync=("b", "a"))
    assert not all_of(bare.put([K1], [b"one"]), fx.PutDone)
    ended = done(bare.records(*own_records(bare, 9)))
    assert ended.outcomes[0].version == Version(9, 1)
    assert ended.gate_ns == bare.core.lease.deadline_ns


def test_waiting_put_with_min_copies_is_not_acked_by_the_taker_alone():
    bare = Bare().join().own(primary="b", replicas=("b", "a"), in_sync=("b", "a"))
    bare.put([K1], [b"one"], min_copies=2)
    bare.up("c")
    effects = bare.records(*own_records(bare, 9, replicas=("a", "c"), in_sync=("a", "c")))
    assert not all_of(effects, fx.PutDone)
    assert done(answer(bare, stream(effects), ReplicaStatus.STORED)).outcomes[0].copies == 2


def own_records(bare: Bare, epoch: int, replicas=("a", "b"), in_sync=("a",)) -> list[tuple[str, bytes]]:
    from emberkv.core.view import encode_record, owner_key
    from emberkv.messages import ShardOwner

    record = encode_record(ShardOwner("a", bare.core.lease.liveness_epoch, epoch, replicas, in_sync))
    return [(owner_key(shard), record) for shard in range(256)]


def test_one_batch_with_the_same_key_twice_keeps_the_later_and_leaks_nothing():
    world = World("abc", seed=3)
    world.settle()
    world.put_now("a", [K1, K2, K1], [b"one", b"two", b"three"])
    world.run_ms(2000)
    assert [data for _, data in world.get_now("b", [K1, K2])] == [b"three", b"two"]
    world.check_all()


def test_session_put_of_every_node_reads_back_everywhere():
    world = World("abc", seed=4)
    world.settle()
    for number, name in enumerate("abc"):
        keys = [key_of(number * 100 + i) for i in range(20)]
        outcomes = world.put_now(name, keys, [b"%d" % i for i in range(20)])
        assert all(outcome.status is STORED and outcome.version > NO_VERSION for outcome in outcomes)
        for reader in "abc":
            assert [d for _, d in world.get_now(reader, keys)] == [b"%d" % i for i in range(20)]
