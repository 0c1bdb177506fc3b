"""Replication: sending, the gate, merging in."""

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.hints import REJECTIONS_MAX
from emberkv.core.stream import BACKLOG_ITEMS_MAX
from emberkv.messages import ReplicaItem, ReplicaStatus, Replicate, ReplicateReply
from emberkv.types import EntryState, MissReason, Version, checksum, shard_of
from harness.bare import TTL, Bare, all_of, only
from harness.world import World, key_of

K1, K2 = key_of(1), key_of(2)
S = ReplicaStatus


def backup() -> Bare:
    return Bare().join().own(primary="b", replicas=("b", "a"), in_sync=("b", "a"))


def item(key: bytes, data: bytes, seq: int = 1, *, authority: int = 5, epoch: int = 5, payload: bool = True,
         state: EntryState = EntryState.COMMITTED) -> ReplicaItem:  # fmt: skip
    digest = checksum(data) if state is EntryState.COMMITTED else b"\0" * 16
    return ReplicaItem(
        key, authority, Version(epoch, seq), b"p" * 24, digest, length=len(data), state=int(state), payload=payload
    )


def begin(bare: Bare, *items: ReplicaItem, peer: str = "b", op: int = 50) -> fx.Fill:
    return only(bare.step(ev.ReplicaBegin(bare.now, op, peer, list(items), False)), fx.Fill)


def receive(bare: Bare, *pairs: tuple[ReplicaItem, bytes], peer: str = "b") -> ReplicateReply:
    fill = begin(bare, *(i for i, _ in pairs), peer=peer)
    sums: list[bytes | None] = []
    for slot, (_, data) in zip(fill.slots, pairs, strict=True):
        if slot is not None:
            bare.tier.write(slot, data)
        sums.append(checksum(data) if slot is not None else None)
    return only(bare.step(ev.ReplicaFilled(bare.now, 50, sums)), fx.ReplicaDone).reply


def test_stored_then_stale_then_repeated():
    bare = backup()
    assert receive(bare, (item(K1, b"two", 2), b"two")).statuses == [S.STORED]
    assert receive(bare, (item(K1, b"one", 1), b"one")).statuses == [S.STALE]
    assert receive(bare, (item(K1, b"two", 2), b"two")).statuses == [S.STORED]
    assert bare.core.state.directory.get(K1).version == Version(5, 2)
    assert bare.live_slots() == 1
    assert bare.core.put.stream.applied[shard_of(K1)].ranges == {5: [(1, 2)]}


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
    bare = Bare(arena_slots=1).join().own(primary="b", replicas=("b", "a"), in_sync=("b", "a"))
    receive(bare, (item(K1, b"old", 1), b"old"))
    held = only(bare.get([K1]), fx.GetDone)
    assert receive(bare, (item(K1, b"new", 2), b"new")).statuses == [S.NO_SPACE]
    assert bare.core.state.directory.get(K1) is None
    assert bare.core.state.directory.evicted[K1] == Version(5, 2)
    bare.unref(held.slots)
    assert not bare.live_slots()


def test_own_put_comes_back_without_payload_and_keeps_its_bytes():
    bare = backup()
    bare.up("b")
    send = only(bare.put([K1], [b"mine"], session=False), fx.Send)
    bare.unref(send.slots)
    assert receive(bare, (item(K1, b"mine", payload=False), b"")).statuses == [S.STORED]
    assert bare.core.state.directory.get(K1).slot.refs == 2  # entry and hint
    assert receive(bare, (item(K2, b"other", payload=False), b"")).statuses == [S.NEED_PAYLOAD]


# -- the sending side ----------------------------------------------------------------------------------------------


def primary() -> Bare:
    bare = Bare().join().own()
    bare.core.put.repair.complete.update({shard: {"b"} for shard in range(256)})
    bare.core.put.repair.waiting.clear()
    bare.up("b")
    return bare


def sent(effects: list[fx.Effect]) -> list[fx.Send]:
    return [send for send in all_of(effects, fx.Send) if isinstance(send.message, Replicate)]


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


def test_message_that_is_never_answered_is_lost_after_some_leases():
    bare = primary()
    (send,) = sent(bare.put([K1], [b"one"]))
    bare.tick(4 * TTL / 1e6)
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
