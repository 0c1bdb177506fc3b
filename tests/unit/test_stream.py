"""Replication: sending, the gate, merging in."""

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.hints import REJECTIONS_MAX
from emberkv.core.merge import AppliedVector
from emberkv.core.placement import ranked
from emberkv.core.stream import BACKLOG_ITEMS_MAX
from emberkv.messages import PutRequest, ReplicaItem, ReplicaStatus, Replicate, ReplicateReply, Span
from emberkv.types import EntryState, MissReason, Namespace, Version, checksum, shard_of
from harness.bare import MS, TTL, Bare, item, only, sends
from harness.world import World, key_of, keys_of_shard

K1, K2 = key_of(1), key_of(2)
S = ReplicaStatus


def backup(**settings: object) -> Bare:
    return Bare(**settings).join().own(primary="b", replicas=("b", "a"), in_sync=("b", "a"))


def begin(bare: Bare, *items: ReplicaItem, peer: str = "b", op: int = 50) -> fx.Fill:
    return only(bare.step(ev.ReplicaBegin(bare.now, op, peer, list(items), False)), fx.Fill)


def receive(bare: Bare, *pairs: tuple[ReplicaItem, bytes], **options: object) -> ReplicateReply:
    return only(bare.receive(*pairs, **options), fx.ReplicaDone).reply


def test_stored_then_stale_then_repeated():
    bare = backup()
    assert receive(bare, (item(K1, b"two", 2), b"two")).statuses == [S.STORED]
    assert receive(bare, (item(K1, b"one", 1), b"one")).statuses == [S.STALE]
    assert receive(bare, (item(K1, b"two", 2), b"two")).statuses == [S.STORED]
    assert bare.core.state.directory.get(K1).version == Version(5, 2)
    assert bare.live_slots() == 1
    assert bare.core.put.stream.vector(shard_of(K1)).spans() == [Span(5, 1, 2)]


def test_gate_refuses_lower_unheard_and_foreign_authority():
    bare = backup()
    low = receive(bare, (item(K1, b"x", authority=4), b"x"))
    assert (low.statuses, low.epochs) == ([S.FENCED], [5])
    unheard = receive(bare, (item(K1, b"x", authority=6), b"x"))
    assert (unheard.statuses, unheard.epochs) == ([S.FENCED], [0])
    assert receive(bare, (item(K1, b"x"), b"x"), peer="c").statuses == [S.FENCED]
    assert not bare.live_slots()


def test_gate_is_asked_again_when_the_bytes_are_here():
    bare = backup()
    fill = begin(bare, item(K1, b"x"))
    bare.tier.write(fill.slots[0], b"x")
    bare.own(epoch=9)
    reply = only(bare.step(ev.ReplicaFilled(bare.now, 50, [checksum(b"x")])), fx.ReplicaDone).reply
    assert (reply.statuses, reply.epochs) == ([S.FENCED], [9])
    assert not bare.live_slots()


def test_entry_of_an_older_epoch_is_merged_under_a_current_authority():
    bare = backup()
    assert receive(bare, (item(K1, b"x", epoch=3), b"x")).statuses == [S.STORED]


def test_wrong_bytes_and_lost_bytes_leave_nothing():
    bare = backup()
    fill = begin(bare, item(K1, b"x"), item(K2, b"y"))
    reply = only(bare.step(ev.ReplicaFilled(bare.now, 50, [b"?" * 16, None])), fx.ReplicaDone).reply
    assert (len(fill.slots), reply.statuses) == (2, [S.CHECKSUM, S.CHECKSUM])
    assert not bare.live_slots()


def test_tombstone_replaces_bytes():
    bare = backup()
    receive(bare, (item(K1, b"x", 1), b"x"))
    dead = item(K1, b"", 2, state=EntryState.TOMBSTONE, payload=False)
    assert receive(bare, (dead, b"")).statuses == [S.STORED]
    assert bare.core.state.directory.get(K1).info.reason == MissReason.DELETED
    assert not bare.live_slots()


def test_write_without_room_leaves_nothing_older_in_its_place():
    bare = backup(arena_slots=1)
    receive(bare, (item(K1, b"old", 1), b"old"))
    held = only(bare.get([K1]), fx.GetDone)
    assert receive(bare, (item(K1, b"new", 2), b"new")).statuses == [S.NO_SPACE]
    assert bare.core.state.directory.get(K1) is None
    assert bare.core.state.directory.evicted_version(K1) == Version(5, 2)
    assert bare.core.put.stream.vector(shard_of(K1)).spans() == [Span(5, 1, 2)]
    bare.unref(held.slots)
    assert not bare.live_slots()


def test_own_put_comes_back_without_payload_and_keeps_its_bytes():
    bare = backup()
    bare.up("b")
    (send,) = sends(bare.put([K1], [b"mine"], session=False), PutRequest)
    bare.unref(send.slots)
    assert receive(bare, (item(K1, b"mine", payload=False), b"")).statuses == [S.STORED]
    assert bare.core.state.directory.get(K1).slot.refs == 2  # entry and hint
    assert receive(bare, (item(K2, b"other", payload=False), b"")).statuses == [S.NEED_PAYLOAD]


def test_write_that_its_namespace_keeps_elsewhere_is_processed_and_takes_no_room():
    bare = backup()
    receive(bare, (item(K1, b"old", 1), b"old"))
    assert receive(bare, (item(K1, b"new", 2, skip=True), b"")).statuses == [S.NO_SPACE]
    assert not bare.live_slots()
    assert bare.core.state.directory.evicted_version(K1) == Version(5, 2)
    assert bare.core.put.stream.vector(shard_of(K1)).spans() == [Span(5, 1, 2)]


def test_skipped_write_that_is_older_than_what_is_here_changes_nothing():
    bare = backup()
    receive(bare, (item(K1, b"new", 2), b"new"))
    receive(bare, (item(K1, b"old", 1, skip=True), b""))
    assert bare.core.state.directory.get(K1).version == Version(5, 2)


def test_expired_block_is_not_accepted_and_nothing_older_stays_for_it():
    bare = backup()
    receive(bare, (item(K1, b"old", 1), b"old"))
    bare.tick(1, wall_ms=2000)
    assert receive(bare, (item(K1, b"new", 2, expiry_ms=2000), b"new")).statuses == [S.STALE]
    assert bare.core.state.directory.get(K1) is None
    assert bare.core.put.stream.vector(shard_of(K1)).covers(Version(5, 2))
    assert not bare.live_slots()
    assert receive(bare, (item(K1, b"new", 3, expiry_ms=2001), b"new")).statuses == [S.STORED]
    assert bare.core.state.directory.get(K1).expiry_ms == 2001


def test_repair_brings_nothing_back_that_this_node_gave_up_for_room_but_the_stream_may():
    bare = backup()
    bare.core.state.directory.remember_evicted(K1, Version(5, 2), replaced=False)
    assert receive(bare, (item(K1, b"x", 2), b"x"), fill=True).statuses == [S.STALE]
    assert not bare.live_slots()
    assert bare.core.put.stream.vector(shard_of(K1)).covers(Version(5, 2))
    assert receive(bare, (item(K1, b"x", 3), b"x"), fill=True).statuses == [S.STORED]


# -- what a replica hands in -----------------------------------------------------------------------------------------


def owner(**options: object) -> Bare:
    """Primary of everything, with a complete replica b and one more, c."""
    bare = Bare(factor=3).join().own(replicas=("a", "b", "c"), in_sync=("a", "b", "c"), **options)
    bare.core.put.repair.complete.update({shard: {"b", "c"} for shard in range(256)})
    bare.core.put.repair.waiting.clear()
    bare.up("b", "c")
    return bare


def test_surplus_is_merged_under_its_own_version_and_the_other_replicas_are_compared():
    bare = owner(epoch=6)
    assert receive(bare, (item(K1, b"x", 4, authority=6), b"x"), surplus=True).statuses == [S.STORED]
    entry = bare.core.state.directory.get(K1)
    assert (entry.version, entry.checksum, entry.put_id) == (Version(5, 4), checksum(b"x"), b"p" * 24)
    assert bare.core.put.repair.complete[shard_of(K1)] == {"b"}
    assert shard_of(K1) in bare.core.put.repair.waiting["c"]
    assert bare.core.put.stream.vector(shard_of(K1)).covers(Version(5, 4))


def test_surplus_that_was_known_already_troubles_nobody():
    bare = owner(epoch=6)
    bare.core.put.stream.mark_applied(shard_of(K1), Version(5, 4))
    assert receive(bare, (item(K1, b"x", 4, authority=6), b"x"), surplus=True).statuses == [S.STORED]
    assert bare.core.put.repair.complete[shard_of(K1)] == {"b", "c"}


def test_surplus_that_is_older_than_what_the_primary_has_is_stale():
    bare = owner(epoch=6)
    bare.put([K1], [b"mine"])
    assert receive(bare, (item(K1, b"x", 4, authority=6), b"x"), surplus=True).statuses == [S.STALE]
    assert bare.core.state.directory.get(K1).version == Version(6, 1)
    assert bare.live_slots() == 1


def test_surplus_at_or_below_the_floor_is_gone_for_good():
    bare = owner(epoch=6)
    bare.core.state.directory.raise_floor(shard_of(K1), Version(5, 4))
    assert receive(bare, (item(K1, b"x", 4, authority=6), b"x"), surplus=True).statuses == [S.STALE]
    assert bare.core.state.directory.get(K1) is None
    assert receive(bare, (item(K1, b"x", 5, authority=6), b"x"), surplus=True).statuses == [S.STORED]


def test_surplus_is_taken_only_by_the_primary_that_it_is_meant_for():
    for bare in (owner(epoch=7), backup()):
        reply = receive(bare, (item(K1, b"x", 4, authority=6), b"x"), surplus=True)
        assert reply.statuses == [S.FENCED]
        assert not bare.live_slots()


def test_surplus_is_taken_only_from_replicas_and_only_of_epochs_before_ours():
    bare = owner(epoch=6)
    for peer, epoch in (("evil", 5), ("a", 5), ("b", 6), ("b", 7)):
        written = item(K1, b"x", 1 << 62, authority=6, epoch=epoch)
        assert receive(bare, (written, b"x"), surplus=True, peer=peer).statuses == [S.FENCED], (peer, epoch)
    assert not bare.live_slots()
    assert receive(bare, (item(K1, b"x", 4, authority=6), b"x"), surplus=True).statuses == [S.STORED]


def test_version_above_the_authority_that_speaks_is_fenced():
    bare = backup()
    assert receive(bare, (item(K1, b"x", 1, authority=5, epoch=6), b"x")).statuses == [S.FENCED]
    assert bare.core.state.directory.get(K1) is None


# -- what is processed -----------------------------------------------------------------------------------------------


def test_vector_ends_with_the_role_and_a_new_primary_speaks_for_all_that_it_holds():
    bare = backup()
    shard = shard_of(K1)
    receive(bare, (item(K1, b"x", 7), b"x"))
    bare.own(primary="b", replicas=("b", "c"), in_sync=("b",), epoch=5)
    assert bare.core.put.stream.applied[shard] is None
    assert bare.core.state.directory.get(K1) is not None  # as a near copy
    bare.own(epoch=9)
    assert bare.core.put.stream.vector(shard).spans() == [Span(5, 7, 7)]


def test_epoch_that_a_vector_forgets_raises_the_floor():
    bare = backup()
    for epoch in range(1, AppliedVector.EPOCHS_MAX + 2):
        bare.core.put.stream.mark_applied(3, Version(epoch, 4))
    assert bare.core.state.directory.floors[3] == Version(1, 4)


# -- the sending side ----------------------------------------------------------------------------------------------


def primary() -> Bare:
    bare = Bare().join().own()
    bare.core.put.repair.complete.update({shard: {"b"} for shard in range(256)})
    bare.core.put.repair.waiting.clear()
    bare.up("b")
    return bare


def sent(effects: list[fx.Effect]) -> list[fx.Send]:
    return sends(effects, Replicate)


def answer(bare: Bare, send: fx.Send, *statuses: ReplicaStatus, epochs: list[int] | None = None) -> list[fx.Effect]:
    bare.unref(send.slots)
    reply = ReplicateReply([int(s) for s in statuses], epochs or [0] * len(statuses))
    return bare.step(ev.ReplicateAnswered(bare.now, "b", send.request, reply))


def is_behind(bare: Bare, key: bytes) -> bool:
    return shard_of(key) in bare.core.put.repair.waiting.get("b", ())


def test_payload_is_left_out_for_who_has_it_and_sent_when_asked_for():
    bare = primary()
    (send,) = sent(bare.put([K1], [b"one"], peer="b"))
    assert (send.message.items[0].payload, send.slots) == (False, [])
    (again,) = sent(answer(bare, send, S.NEED_PAYLOAD))
    assert again.message.items[0].payload
    assert not sent(answer(bare, again, S.NEED_PAYLOAD))
    assert is_behind(bare, K1)
    assert not bare.core.put.stream.flights


def test_what_cannot_be_sent_or_is_lost_is_compared_later():
    for loss in ("down", "answer down", "fenced", "short"):
        bare = primary()
        if loss == "down":
            bare.step(ev.PeerDown(bare.now, "b"))
        sends = sent(bare.put([K1], [b"one"]))
        if loss == "answer down":
            bare.unref(sends[0].slots)
            bare.step(ev.PeerDown(bare.now, "b"))
        elif loss == "fenced":
            answer(bare, sends[0], S.FENCED)
        elif loss == "short":
            answer(bare, sends[0])
        assert is_behind(bare, K1), loss
        assert "b" not in bare.core.put.repair.complete[shard_of(K1)]
        assert not bare.core.put.stream.flights
        assert bare.live_slots() == 1


def test_stream_says_everything_that_a_copy_must_know():
    bare = primary()
    bare.put([K1], [b"one"], ids=[b"1" * 24])
    bare.core.state.view.policies[K1[:8]] = Namespace("ns", expiry_ms=500)
    bare.tick(1, wall_ms=10_000)
    (send,) = sent(bare.put([K1], [b"three"], op=2, ids=[b"2" * 24]))
    (told,) = send.message.items
    assert told == ReplicaItem(
        K1, 5, Version(5, 2), b"2" * 24, checksum(b"three"), Version(5, 1), 5, 0, EntryState.COMMITTED, 1, 10_500, True
    )
    assert (send.message.fill, send.message.surplus) == (False, False)


def keepers(order: str, factor: int, *, delete: bool = False) -> dict[str, bool]:
    """Which replicas of a are sent bytes (or a tombstone), in a shard for which placement has this order."""
    shard = next(shard for shard in range(256) if ranked(shard, "abc") == list(order))
    bare = Bare(factor=3).join().own(replicas=("c", "a", "b"), in_sync=("a", "b", "c"))
    bare.core.put.repair.waiting.clear()
    bare.up("b", "c")
    (key,) = keys_of_shard(shard)
    bare.core.state.view.policies[key[:8]] = Namespace("ns", factor=factor)
    told = sent(bare.put([key], [b"" if delete else b"one"], delete=delete))
    assert all(send.message.items[0].skip or delete or len(send.slots) == 1 for send in told)
    return {send.peer: not send.message.items[0].skip for send in told}


def test_namespace_with_fewer_copies_leaves_the_last_replicas_without_bytes():
    assert keepers("acb", 3) == {"c": True, "b": True}
    assert keepers("acb", 2) == {"c": True, "b": False}
    assert keepers("acb", 1) == {"c": False, "b": False}
    assert keepers("acb", 1, delete=True) == {"c": True, "b": True}  # no bytes that could be left out


def test_replica_that_placement_wants_keeps_the_bytes_before_the_shard_has_moved_to_it():
    assert keepers("bac", 2) == {"c": True, "b": True}
    assert keepers("bac", 1) == {"c": False, "b": True}


def test_bytes_that_were_replaced_meanwhile_are_not_sent_but_their_write_is():
    bare = primary()
    (first,) = sent(bare.put([K1], [b"one"], peer="b"))
    bare.put([K1], [b"two"], op=2)
    (again,) = sent(answer(bare, first, S.NEED_PAYLOAD))
    assert (again.message.items[0].skip, again.message.items[0].version, again.slots) == (True, Version(5, 1), [])


def test_message_that_is_never_answered_is_lost_after_some_leases():
    bare = primary()
    (send,) = sent(bare.put([K1], [b"one"]))
    bare.tick(4 * TTL / MS)
    assert not is_behind(bare, K1)
    bare.tick(1)
    assert not bare.core.put.stream.flights
    assert bare.core.put.stream._backlog["b"] == 0
    assert not answer(bare, send, S.STORED)


def test_backlog_is_bounded():
    bare = primary()
    bare.core.put.stream._backlog["b"] = BACKLOG_ITEMS_MAX
    assert not sent(bare.put([K1], [b"one"]))
    assert is_behind(bare, K1)


def test_repair_gives_up_on_bytes_that_never_match():
    bare = primary()
    bare.put([K1], [b"one"])
    entry = bare.core.state.directory.get(K1)
    lost = [bare.core.put.stream._hopeless(entry) for _ in range(REJECTIONS_MAX + 1)]
    assert lost == [False] * REJECTIONS_MAX + [True]


def test_long_batches_are_split_and_stay_in_order():
    world = World("ab", seed=6, arena_bytes=1024 * 4096, account_every=50)
    world.settle()
    keys = [key_of(number) for number in range(500)]
    for start in range(0, 500, 100):
        world.put_now("a", keys[start : start + 100], [b"%d" % n for n in range(100)])
    world.run_ms(1500)
    for name in "ab":
        held = world.nodes[name].core.state.directory
        assert all(held.get(key) is not None for key in keys)
