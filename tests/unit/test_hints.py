"""Hinted handoff."""

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.hints import REJECTIONS_MAX
from emberkv.messages import PutFlag, PutReply, PutRequest
from emberkv.types import NO_VERSION, PutOutcome, PutStatus, RefuseReason, Version, checksum, shard_of
from harness.bare import MS, Bare, all_of, only
from harness.world import World, key_of, keys_of_shard

K1, K2 = key_of(1), key_of(2)
STORED = PutOutcome(PutStatus.STORED, Version(5, 1), 1)
FENCED = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.FENCED)


def accepting(*, connected: bool = True, **settings: object) -> Bare:
    """Node a, next to an engine; b is primary of everything."""
    bare = Bare(**settings).join().own(primary="b", replicas=("b", "c"), in_sync=("b", "c"))
    if connected:
        bare.up("b")
    return bare


def forwards(effects: list[fx.Effect]) -> list[fx.Send]:
    return [send for send in all_of(effects, fx.Send) if isinstance(send.message, PutRequest)]


def reply(bare: Bare, send: fx.Send, *outcomes: PutOutcome) -> list[fx.Effect]:
    bare.unref(send.slots)
    return bare.step(ev.PutAnswered(bare.now, send.peer, send.request, PutReply(list(outcomes))))


def flags(send: fx.Send) -> int:
    return send.message.flags


def test_first_send_is_fresh_a_replay_is_a_hint():
    bare = accepting()
    (send,) = forwards(bare.put([K1], [b"one"]))
    assert flags(send) & PutFlag.FRESH
    bare.step(ev.PeerDown(bare.now, "b"))
    (again,) = forwards(bare.up("b"))
    assert flags(again) & PutFlag.HINT
    assert not flags(again) & PutFlag.FRESH


def test_what_waited_in_a_partition_is_not_fresh_unless_its_put_still_waits():
    bare = accepting(connected=False)
    bare.put([K1], [b"one"], session=False)
    bare.put([K2], [b"two"], op=2, deadline_ms=60_000)
    bare.now += 300 * MS
    sends = forwards(bare.up("b"))
    fresh = {send.message.items[0].key: bool(flags(send) & PutFlag.FRESH) for send in sends}
    assert fresh == {K1[8:]: False, K2[8:]: True}


def test_fenced_hint_is_kept_and_tried_once_a_tick_however_often():
    bare = accepting()
    (send,) = forwards(bare.put([K1], [b"one"], deadline_ms=60_000))
    for _ in range(100):
        assert not forwards(reply(bare, send, FENCED))
        # Traffic of others flushes again and again: the refused one must not go with it.
        others = forwards(bare.put([K2], [b"x"], op=7, session=False))
        for other in others:
            assert not forwards(reply(bare, other, STORED))
        (send,) = forwards(bare.tick(25))
    assert bare.core.put.hints.count() == 1
    assert all_of(reply(bare, send, STORED), fx.PutDone)
    assert bare.core.put.hints.count() == bare.core.put.hints.bytes == 0


def test_fenced_put_was_not_stored_so_it_stays_fresh_while_its_client_waits():
    bare = accepting()
    (send,) = forwards(bare.put([K1], [b"one"], deadline_ms=60_000))
    reply(bare, send, FENCED)
    (send,) = forwards(bare.tick(500))
    assert flags(send) & PutFlag.FRESH
    bare.step(ev.PeerDown(bare.now, "b"))
    (send,) = forwards(bare.up("b"))
    reply(bare, send, FENCED)
    (send,) = forwards(bare.tick(25))
    assert flags(send) & PutFlag.HINT  # one send before this one is unaccounted for


def test_bytes_that_never_match_their_checksum_are_given_up():
    bare = accepting()
    (send,) = forwards(bare.put([K1], [b"one"], session=False))
    bad = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.CHECKSUM)
    for _ in range(REJECTIONS_MAX - 1):
        reply(bare, send, bad)
        (send,) = forwards(bare.tick(25))
    reply(bare, send, bad)
    assert not forwards(bare.tick(25))
    assert bare.core.state.counters["hints_lost"] == 1
    assert not bare.live_slots()


def test_of_two_puts_in_flight_the_later_survives_a_lost_connection():
    bare = accepting()
    for op, data in enumerate((b"old", b"new"), 1):
        bare.unref(forwards(bare.put([K1], [data], op=op, session=False))[0].slots)
    bare.step(ev.PeerDown(bare.now, "b"))
    (send,) = forwards(bare.up("b"))
    assert [item.checksum for item in send.message.items] == [checksum(b"new")]
    assert bare.live_slots() == 1


def test_later_put_replaces_the_queued_one_and_its_waiter_is_told():
    bare = accepting(connected=False)
    bare.put([K1], [b"old"])
    effects = bare.put([K1], [b"new"], op=2)
    assert only(effects, fx.PutDone).outcomes[0].status is PutStatus.SUPERSEDED
    assert bare.live_slots() == 1


def test_bytes_in_flight_are_not_reused_when_their_hint_is_replaced():
    bare = accepting()
    (send,) = forwards(bare.put([K1], [b"old"], session=False))
    bare.put([K1], [b"new"], op=2, session=False)
    assert bare.tier.read(send.slots[0]) == b"old"
    reply(bare, send, STORED)
    assert bare.core.state.directory.get(K1).checksum == checksum(b"old")


def test_bound_in_bytes_drops_the_oldest_and_counts():
    bare = accepting(connected=False, hint_bytes_max=25)
    for number in range(4):
        bare.put([key_of(number)], [b"0123456789"], op=number + 1, session=False)
    hints = bare.core.put.hints
    assert list(hints.queue) == [key_of(2), key_of(3)]
    assert (hints.bytes, bare.core.state.counters["hints_dropped"], bare.live_slots()) == (20, 2, 2)


def test_bound_holds_even_when_everything_is_in_flight():
    bare = accepting(hint_bytes_max=25)
    for number in range(2):
        bare.unref(forwards(bare.put([key_of(number)], [b"0123456789"], op=number + 1, session=False))[0].slots)
    outcome = only(bare.put([key_of(5)], [b"0123456789"], op=5, session=False), fx.PutDone).outcomes[0]
    assert outcome.reason is RefuseReason.NO_SPACE
    assert bare.live_slots() == 2


def test_bound_in_number(monkeypatch):
    monkeypatch.setattr("emberkv.core.hints.HINTS_MAX", 3)
    bare = accepting(connected=False)
    for number in range(5):
        bare.put([key_of(number)], [b"x"], op=number + 1, session=False)
    assert bare.core.put.hints.count() == 3


def test_hints_of_an_unreachable_primary_do_not_stand_before_the_others(monkeypatch):
    monkeypatch.setattr("emberkv.core.hints.FLUSH_MAX", 8)
    bare = Bare().join()
    bare.own(primary="b", replicas=("b",), in_sync=("b",), shards=range(128))
    bare.own(primary="c", replicas=("c",), in_sync=("c",), shards=range(128, 256))
    bare.up("c")
    stuck = keys_of_shard(3, 20)
    bare.put(stuck, [b"x"] * 20, session=False)
    (send,) = forwards(bare.put([keys_of_shard(200)[0]], [b"y"], op=2))
    assert send.peer == "c"


def test_primary_that_never_answers_is_asked_again_after_a_lease():
    bare = accepting()
    (send,) = forwards(bare.put([K1], [b"one"], session=False))
    assert not forwards(bare.tick(600))
    (again,) = forwards(bare.tick(1))
    assert flags(again) & PutFlag.HINT
    bare.unref(send.slots)
    reply(bare, again, STORED)
    assert not bare.step(ev.PutAnswered(bare.now, "b", send.request, PutReply([STORED])))
    assert bare.live_slots() == 1


def test_answer_of_the_wrong_length_settles_nothing():
    bare = accepting()
    (send,) = forwards(bare.put([K1], [b"one"], session=False))
    reply(bare, send, STORED, STORED)
    assert bare.core.put.hints.count() == 1


def test_pending_block_is_seen_by_eventual_reads_of_this_node_only():
    bare = accepting(connected=False)
    bare.put([K1], [b"one"], session=False)
    found = only(bare.get([K1], session=False), fx.GetDone)
    assert bare.tier.read(found.slots[0]) == b"one"
    assert found.infos[0].version == NO_VERSION
    asked = bare.get([K1], op=901)
    assert not all_of(asked, fx.GetDone)
    assert not only(bare.get([K1], op=902, session=True, local_only=True), fx.GetDone).slots[0]


def test_hints_survive_a_failover_and_reach_the_new_primary():
    world = World("abc", seed=8)
    world.settle()
    owner = world.nodes["a"].core.state.view.owners[shard_of(K1)]
    (accepting_node,) = set("abc") - set(owner.replicas)
    world.kill(owner.primary)
    op = world.put(accepting_node, [K1], [b"kept"], deadline_ms=50)
    world.run_ms(200)
    assert world.results[op][0].status is PutStatus.QUEUED
    world.settle()
    world.run_ms(500)
    assert world.nodes[accepting_node].core.put.hints.count() == 0
    assert world.get_now(owner.replicas[1], [K1])[0][1] == b"kept"


def test_an_old_primarys_answer_acknowledges_nothing():
    """It stamped under an epoch that has ended: the hint goes to the new primary instead."""
    bare = accepting()
    (send,) = forwards(bare.put([K1], [b"one"], deadline_ms=60_000))
    bare.core.state.view.epoch_seen[shard_of(K1)] = 9
    bare.unref(send.slots)
    effects = bare.step(ev.PutAnswered(bare.now, "b", send.request, PutReply([STORED], [8])))
    assert not all_of(effects, fx.PutDone)
    assert bare.core.put.hints.count() == 1
    assert bare.core.state.counters["fenced_replies"] == 1
