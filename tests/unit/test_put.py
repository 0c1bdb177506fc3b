"""Accepting, stamping and acknowledging."""

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.view import encode_record, owner_key
from emberkv.messages import (
    PutFlag,
    PutItem,
    PutReply,
    PutRequest,
    ReplicaStatus,
    Replicate,
    ReplicateReply,
    ShardOwner,
)
from emberkv.ports import CommitStatus
from emberkv.types import (
    NO_VERSION,
    Namespace,
    PutOutcome,
    PutStatus,
    RefuseReason,
    Version,
    checksum,
    scope_of,
    shard_of,
)
from harness.bare import MS, Bare, all_of, item, live, only, sends
from harness.world import World, key_of, keys_of_shard

K1, K2 = key_of(1), key_of(2)
STORED, UNKNOWN = PutStatus.STORED, PutStatus.UNKNOWN


def primary(*, in_sync: tuple[str, ...] = ("a", "b")) -> Bare:
    bare = Bare().join().own(in_sync=in_sync)
    bare.up("b")
    return bare


def done(effects: list[fx.Effect]) -> fx.PutDone:
    return only(effects, fx.PutDone)


def stream(effects: list[fx.Effect]) -> fx.Send:
    (send,) = sends(effects, Replicate)
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


def test_first_send_that_comes_after_its_retry_was_decided_is_a_replay():
    """It lay in a frozen node while its writer tried elsewhere, and others have put since."""
    bare = primary()
    bare.put([K1], [b"late"], fresh=False, ids=[b"l" * 24])
    newer = done(bare.put([K1], [b"newer"], op=2)).outcomes[0]
    outcome = done(bare.put([K1], [b"late"], op=3, ids=[b"l" * 24])).outcomes[0]
    assert (outcome.status, outcome.version) == (PutStatus.SUPERSEDED, newer.version)


def test_first_send_of_a_put_that_this_replica_stored_is_a_replay_when_it_is_primary():
    bare = Bare().join().own(primary="b", replicas=("b", "a"), in_sync=("b", "a"))
    bare.receive((item(K1, b"late", 1), b"late"), (item(K1, b"newer", 2), b"newer"))
    bare.own(epoch=6)
    outcome = done(bare.put([K1], [b"late"], op=3, ids=[b"p" * 24])).outcomes[0]
    assert (outcome.status, outcome.version) == (PutStatus.SUPERSEDED, Version(5, 2))


def test_memory_of_decided_puts_is_bounded(monkeypatch):
    monkeypatch.setattr("emberkv.core.state.PUTS_REMEMBERED_MAX", 2)
    state = primary().core.state
    for put_id in (b"1", b"2", b"3"):
        state.remember_put(put_id)
    assert [state.is_decided(put_id) for put_id in (b"1", b"2", b"3")] == [False, True, True]


def test_put_below_what_is_stored_is_refused_with_an_alarm_and_the_node_goes_on():
    """Only a record or a peer that lies can bring such a version here."""
    bare = primary()
    bare.put([K1], [b"one"])
    entry = bare.core.state.directory.get(K1)
    entry.version = Version(5, 1 << 62)
    outcome = done(bare.put([K1], [b"two"], op=2)).outcomes[0]
    assert (outcome.status, outcome.version) == (PutStatus.SUPERSEDED, Version(5, 1 << 62))
    assert bare.core.state.counters["version_conflicts"] == 1
    assert done(bare.put([K2], [b"other"], op=3)).outcomes[0].status is STORED


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


def test_copy_at_a_learner_counts_when_it_turns_out_to_hold_all_else_too():
    bare = primary(in_sync=("a",))
    effects = bare.put([K1], [b"one"], min_copies=2)
    send = stream(effects)
    assert not all_of(answer(bare, send, ReplicaStatus.STORED), fx.PutDone)
    bare.core.put.completed("b", shard_of(K2) if shard_of(K2) != shard_of(K1) else shard_of(K1) ^ 1)
    bare.core.put.completed("c", shard_of(K1))
    assert 1 in bare.core.put.ops
    bare.core.put.completed("b", shard_of(K1))
    outcome = done(bare.tick()).outcomes[0]
    assert (outcome.status, outcome.copies) == (STORED, 2)


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
    bare.records(("live/c", live("c", 2, dead=True)))  # else it would be asked to relay
    bare.up("c")
    effects = bare.records(("live/c", live("c", 3)), *own_records(bare, 9, replicas=("a", "c"), in_sync=("a", "c")))
    assert not all_of(effects, fx.PutDone)
    assert done(answer(bare, stream(effects), ReplicaStatus.STORED)).outcomes[0].copies == 2


def own_records(bare: Bare, epoch: int, replicas=("a", "b"), in_sync=("a",)) -> list[tuple[str, bytes]]:
    record = encode_record(ShardOwner("a", bare.core.lease.liveness_epoch, epoch, replicas, in_sync))
    return [(owner_key(shard), record) for shard in range(256)]


# -- eventual puts -----------------------------------------------------------------------------------------------------


def outsider() -> Bare:
    """Node a, next to an engine; b is primary of everything, and a holds no shard."""
    bare = Bare().join().own(primary="b", replicas=("b", "c"), in_sync=("b", "c"))
    bare.up("b")
    return bare


def forwarded(effects: list[fx.Effect]) -> fx.Send:
    (send,) = sends(effects, PutRequest)
    return send


def test_eventual_put_is_never_fresh_at_the_primary_but_has_seen_what_its_node_holds():
    bare = outsider()
    send = forwarded(bare.put([K1], [b"one"], session=False))
    assert (bool(send.message.flags & PutFlag.FRESH), send.message.items[0].seen) == (False, NO_VERSION)
    bare.unref(send.slots)
    bare.step(ev.PutAnswered(bare.now, "b", send.request, PutReply([PutOutcome(STORED, Version(5, 4), 1)])))
    send = forwarded(bare.put([K1], [b"two"], op=2, session=False))
    assert send.message.items[0].seen == Version(5, 4)
    send = forwarded(bare.put([K2], [b"two"], op=3, session=False, seen=Version(3, 3)))
    assert send.message.items[0].seen == Version(3, 3)


def test_session_put_and_eventual_delete_are_fresh_on_their_first_way():
    bare = outsider()
    assert forwarded(bare.put([K1], [b"one"])).message.flags & PutFlag.FRESH
    assert forwarded(bare.put([K2], [b""], op=2, session=False, delete=True)).message.flags & PutFlag.FRESH


def test_delete_is_answered_by_the_primary_at_every_level():
    """It means nothing before it is there; and what comes after it must not fall to it."""
    bare = outsider()
    effects = bare.put([K1], [b""], session=False, delete=True)
    assert not all_of(effects, fx.PutDone)
    send = forwarded(effects)
    deleted = PutOutcome(STORED, Version(5, 2), 1)
    assert done(bare.step(ev.PutAnswered(bare.now, "b", send.request, PutReply([deleted])))).outcomes == [deleted]
    bare.put([K2], [b""], op=2, session=False, delete=True)
    # It left as a first send and may still be stamped as new: it is not over.
    assert done(bare.tick(1001)).outcomes[0].status is PutStatus.UNKNOWN


def test_put_is_called_queued_only_if_it_can_do_no_more_than_fill():
    """What a primary may yet stamp as new would come over what its writer, told that it is over, puts next."""
    bare = outsider()
    bare.step(ev.PeerDown(bare.now, "b"))
    bare.put([K1], [b"never sent"])
    assert done(bare.tick(1001)).outcomes[0].status is PutStatus.QUEUED
    bare.up("b")
    bare.put([K2], [b"sent, and lost with the connection"], op=2)
    bare.step(ev.PeerDown(bare.now, "b"))
    assert done(bare.tick(1001)).outcomes[0].status is PutStatus.UNKNOWN
    bare.up("b")
    send = forwarded(bare.put([key_of(77)], [b"refused for certain"], op=3))
    refused = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.FENCED)
    bare.step(ev.PutAnswered(bare.now, "b", send.request, PutReply([refused])))
    bare.step(ev.PeerDown(bare.now, "b"))
    assert done(bare.tick(1001)).outcomes[0].status is PutStatus.QUEUED


def test_forward_that_a_policy_of_ours_forbids_is_fenced_since_the_policy_may_be_the_old_one():
    bare = primary()
    bare.core.state.view.policies[K1[:8]] = Namespace("ns", factor=1)
    outcome = done(bare.put([K1], [b"one"], min_copies=2, peer="c")).outcomes[0]
    assert outcome.reason is RefuseReason.FENCED


def test_eventual_put_does_not_overwrite_what_was_put_after_it_was_accepted():
    """It waits at the outsider in a partition; a session put of the same key is acknowledged meanwhile."""
    world = World("abc", seed=6)
    world.settle()
    world.run_ms(2500)
    primary = world.primary(shard_of(K1))
    (near,) = set("abc") - set(world.nodes["a"].core.state.view.owners[shard_of(K1)].replicas)
    for other in set("abc") - {near}:
        world.cut(near, other)
    assert world.put_now(near, [K1], [b"accepted first"], session=False)[0].status is PutStatus.ACCEPTED
    assert world.put_now(primary, [K1], [b"acknowledged"])[0].status is STORED
    world.heal()
    world.run_ms(500)
    assert world.nodes[near].core.put.hints.count() == 0
    for reader in "abc":
        assert world.get_now(reader, [K1])[0][1] == b"acknowledged"


# -- expiry ------------------------------------------------------------------------------------------------------------


def expiring(bare: Bare, expiry_ms: int = 500) -> Bare:
    bare.core.state.view.policies[K1[:8]] = Namespace("ns", expiry_ms=expiry_ms)
    bare.tick(1, wall_ms=10_000)
    return bare


def test_primary_stamps_when_a_block_expires_by_the_wall_clock_and_never_for_a_delete():
    bare = expiring(primary())
    assert stream(bare.put([K1], [b"one"])).message.items[0].expiry_ms == 10_500
    assert bare.core.state.directory.get(K1).expiry_ms == 10_500
    assert stream(bare.put([K1], [b""], op=2, delete=True)).message.items[0].expiry_ms == 0
    bare.core.state.view.policies.clear()
    assert stream(bare.put([K1], [b"for ever"], op=3)).message.items[0].expiry_ms == 0


def test_expired_block_stands_in_nobodys_way():
    bare = expiring(primary())
    bare.put([K1], [b"old"])
    bare.tick(1, wall_ms=10_499)
    assert done(bare.put([K1], [b"new"], op=2, fresh=False)).outcomes[0].status is PutStatus.SUPERSEDED
    bare.tick(1, wall_ms=10_500)
    outcome = done(bare.put([K1], [b"new"], op=3, fresh=False)).outcomes[0]
    assert (outcome.status, outcome.version) == (STORED, Version(5, 2))


def test_eventual_put_of_bytes_whose_copy_here_has_expired_is_sent_on():
    bare = outsider()
    directory = bare.core.state.directory
    fetch = only(bare.get([K1]), fx.Fetch)
    bare.unref(done_get(bare.fetched(fetch, b"one", version=Version(5, 1))).slots)
    directory.get(K1).expiry_ms = 10_500
    bare.tick(1, wall_ms=10_499)
    assert not all_of(bare.put([K1], [b"one"], session=False), fx.Send)
    bare.tick(1, wall_ms=10_500)
    assert forwarded(bare.put([K1], [b"one"], op=2, session=False)).message.items[0].checksum == checksum(b"one")


def done_get(effects: list[fx.Effect]) -> fx.GetDone:
    return only(effects, fx.GetDone)


def test_expired_and_dropped_blocks_are_swept_a_shard_a_tick():
    bare = expiring(Bare().join().own(replicas=("a",), in_sync=("a",)))
    bare.put([K1], [b"one"])
    for _ in range(256):
        bare.tick(0, wall_ms=10_499)
    assert bare.live_slots() == 1
    assert not any(len(all_of(bare.tick(0, wall_ms=10_500), fx.GetDone)) for _ in range(257))
    assert not bare.live_slots()
    assert bare.core.state.counters["swept"] == 1


def test_dropped_namespace_is_swept_also_on_a_node_that_was_idle_before():
    bare = Bare().join().own(replicas=("a",), in_sync=("a",))
    for _ in range(5):
        bare.tick(0)
    mine, other = scope_of("ns", 1) + K1[8:], scope_of("other", 1) + K1[8:]
    bare.records(("ns/ns", encode_record(Namespace("ns"))), ("ns/other", encode_record(Namespace("other"))))
    bare.put([mine, other], [b"one", b"two"])
    bare.records(("ns/ns", encode_record(Namespace("ns", dropped=True))))
    for _ in range(257):
        bare.tick(0)
    assert bare.core.state.directory.get(mine) is None
    assert bare.core.state.directory.get(other) is not None
    assert not bare.core.state.view.dead_scopes


# -- a closed gate -----------------------------------------------------------------------------------------------------


def test_puts_wait_while_the_shard_is_handed_over_and_are_stamped_when_it_stays():
    bare = primary()
    first, second = keys_of_shard(9, 2)
    bare.core.handover.begin(9, "b")
    assert not all_of(bare.put([first], [b"of a client"]), fx.PutDone)
    assert not all_of(bare.put([second], [b"forwarded"], op=2, peer="c"), fx.PutDone)
    assert done(bare.put([K1], [b"of another shard"], op=3)).outcomes[0].status is STORED
    bare.core.handover._end(9)
    ended = all_of(bare.tick(1), fx.PutDone)
    assert [(e.outcomes[0].status, e.outcomes[0].version) for e in ended] == [
        (STORED, Version(5, 1)),
        (STORED, Version(5, 2)),
    ]
    assert ended[1].authorities == [5]


def test_forwarded_eventual_put_has_seen_only_what_its_own_node_had():
    """Neither a relay nor a primary with a closed gate may say that it follows what they hold themselves."""
    bare = primary()
    bare.put([K1], [b"acknowledged"])
    bare.core.handover.begin(shard_of(K1), "b")
    bare.put([K1], [b"accepted before that"], op=2, peer="c", session=False, fresh=False)
    bare.core.handover._end(shard_of(K1))
    assert done(bare.tick(1)).outcomes[0].status is PutStatus.SUPERSEDED


def test_put_that_was_stored_before_the_gate_closed_is_acknowledged_while_the_epoch_lasts():
    bare = primary()
    effects = bare.put([K1], [b"one"], min_copies=2)
    bare.core.handover.begin(shard_of(K1), "b")
    assert done(answer(bare, stream(effects), ReplicaStatus.STORED)).outcomes[0].status is STORED


# -- levels ------------------------------------------------------------------------------------------------------------


def test_strong_is_refused_and_never_taken_for_a_lower_level():
    bare = primary()
    effects = bare.step(ev.PutBegin(bare.now, 1, [K1], bare_item(K1), bare.now + MS, True, True, 1, "", strong=True))
    assert not any(only(effects, fx.Fill).slots)
    outcome = done(bare.step(ev.PutFilled(bare.now, 1, [None]))).outcomes[0]
    assert (outcome.status, outcome.reason) == (PutStatus.REFUSED, RefuseReason.LEVEL_UNSUPPORTED)


def test_more_copies_than_the_namespace_keeps_is_refused():
    bare = primary()
    bare.core.state.view.policies[K1[:8]] = Namespace("ns", factor=1)
    outcome = done(bare.put([K1], [b"one"], min_copies=2)).outcomes[0]
    assert (outcome.status, outcome.reason) == (PutStatus.REFUSED, RefuseReason.LEVEL_UNSUPPORTED)


# -- whole clusters ----------------------------------------------------------------------------------------------------


def test_namespace_of_one_copy_keeps_one_and_all_replicas_process_it():
    world = World("abc", seed=3)
    world.settle()
    world.run_ms(2500)
    world.write("ns/ns", Namespace("ns", factor=1))
    world.run_ms(50)
    key = scope_of("ns", 1) + K1[8:]
    primary_name = world.primary(shard_of(key))
    world.put_now(primary_name, [key], [b"one"])
    world.run_ms(200)
    replicas = world.nodes["a"].core.state.view.owners[shard_of(key)].replicas
    held = {name for name in replicas if world.nodes[name].core.state.directory.get(key) is not None}
    assert held == {primary_name}
    vectors = [world.nodes[name].core.put.stream.vector(shard_of(key)).spans() for name in replicas]
    assert vectors[0] == vectors[1]


def test_block_of_an_expiring_namespace_ends_on_every_node():
    world = World("abc", seed=3)
    world.settle()
    world.run_ms(1000)
    world.write("ns/ns", Namespace("ns", expiry_ms=1000))
    world.run_ms(50)
    key = scope_of("ns", 1) + K1[8:]
    world.put_now("a", [key], [b"one"], min_copies=2)
    world.run_ms(500)
    assert [world.get_now(name, [key])[0][1] for name in "abc"] == [b"one"] * 3
    world.run_ms(600)
    assert [world.get_now(name, [key])[0][1] for name in "abc"] == [None] * 3
    world.run_ms(256 * 27)
    assert not any(node.core.state.directory.count() for node in world.nodes.values())


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


def test_forward_under_a_policy_that_is_not_here_yet_is_to_come_again():
    bare = primary()
    bare.core.state.view.policies[K1[:8]] = Namespace("ns", factor=1)
    outcome = done(bare.put([K1], [b"one"], min_copies=2, peer="c")).outcomes[0]
    assert (outcome.status, outcome.reason) == (PutStatus.REFUSED, RefuseReason.FENCED)
    assert not bare.tier.slots
    bare.core.state.view.policies[K1[:8]] = Namespace("ns", factor=2)
    effects = bare.put([K1], [b"one"], op=2, min_copies=2, peer="c")
    assert done(answer(bare, stream(effects), ReplicaStatus.STORED)).outcomes[0].copies == 2


def raised_policy_that_travels() -> tuple[World, str, bytes]:
    """A policy of two copies that has reached a node, and not yet the primary of a key."""
    world = World("abc", seed=3)
    world.settle()
    world.run_ms(2500)
    world.write("ns/ns", Namespace("ns", factor=1))
    world.run_ms(50)
    key = scope_of("ns", 1) + K1[8:]
    name = next(name for name in "abc" if name != world.primary(shard_of(key)))
    world.nodes[name].core.state.view.policies[key[:8]] = Namespace("ns", factor=2, min_copies=2)
    return world, name, key


def test_put_under_a_raised_policy_waits_until_its_primary_has_heard_of_it():
    world, name, key = raised_policy_that_travels()
    op = world.put(name, [key], [b"one"], min_copies=2, deadline_ms=1000)
    world.run_ms(200)
    assert op not in world.results, "neither refused nor acknowledged with fewer copies"
    world.write("ns/ns", Namespace("ns", factor=2, min_copies=2, revision=2))
    world.run_until(lambda: op in world.results, 500)
    (outcome,) = world.results[op]
    assert (outcome.status, outcome.copies) == (STORED, 2)


def test_put_under_a_policy_that_never_comes_is_queued_at_its_deadline_and_not_lost():
    world, name, key = raised_policy_that_travels()
    (outcome,) = world.put_now(name, [key], [b"one"], min_copies=2, deadline_ms=300)
    assert outcome.status is PutStatus.QUEUED
    world.run_ms(500)
    primary_name = world.primary(shard_of(key))
    assert world.get_now(primary_name, [key])[0][1] == b"one", "nobody waits for copies any more, so one is enough"
