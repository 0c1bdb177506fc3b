"""Hinted handoff."""

import pytest

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.hints import REJECTIONS_MAX
from emberkv.errors import ConfigError
from emberkv.messages import PutFlag, PutReply, PutRequest
from emberkv.types import NO_VERSION, Namespace, PutOutcome, PutStatus, RefuseReason, Version, checksum, shard_of
from harness.bare import MS, Bare, all_of, live, only, sends
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
    return sends(effects, PutRequest)


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


def test_later_put_of_a_key_waits_for_the_one_in_flight_and_follows_its_version():
    bare = accepting()
    (first,) = forwards(bare.put([K1], [b"old"], session=False))
    assert not forwards(bare.put([K1], [b"new"], op=2, session=False))
    (second,) = forwards(reply(bare, first, STORED))
    (told,) = second.message.items
    assert (told.checksum, told.seen) == (checksum(b"new"), STORED.version)
    reply(bare, second, PutOutcome(PutStatus.STORED, Version(5, 2), 1))
    assert bare.core.state.directory.get(K1).version == Version(5, 2)
    assert bare.live_slots() == 1


def test_later_put_goes_alone_when_the_one_in_flight_was_lost():
    bare = accepting()
    bare.unref(forwards(bare.put([K1], [b"old"], session=False))[0].slots)
    bare.put([K1], [b"new"], op=2, session=False)
    bare.step(ev.PeerDown(bare.now, "b"))
    (send,) = forwards(bare.up("b"))
    assert [told.checksum for told in send.message.items] == [checksum(b"new")]
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


def test_hint_that_waited_too_long_is_dropped_counted_and_its_client_told():
    """Its key may have been deleted since, and the tombstone forgotten."""
    bare = accepting(connected=False, hint_age_max_ns=500 * MS)
    bare.put([K1], [b"old"], session=False)
    bare.put([K2], [b"old"], op=2, deadline_ms=60_000)
    bare.tick(400)
    bare.put([key_of(3)], [b"young"], op=3, session=False)
    assert bare.core.put.hints.count() == 3
    ended = only(bare.tick(101), fx.PutDone)
    assert ended.outcomes[0].reason is RefuseReason.NO_SPACE
    assert list(bare.core.put.hints.queue) == [key_of(3)]
    assert bare.core.state.counters["hints_aged"] == 2
    assert bare.live_slots() == 1
    assert [i.key for i in forwards(bare.up("b"))[0].message.items] == [key_of(3)[8:]]


def test_hint_must_not_outlive_the_memory_of_a_delete():
    with pytest.raises(ConfigError):
        Bare(hint_age_max_ns=500 * MS, tombstone_retention_ns=500 * MS)


# -- outcomes that are no answer ---------------------------------------------------------------------------------------


def test_queued_answer_of_a_relay_leaves_the_hint_here_as_a_fill():
    bare = accepting()
    (send,) = forwards(bare.put([K1], [b"one"], deadline_ms=60_000))
    assert not all_of(reply(bare, send, PutOutcome(PutStatus.QUEUED, copies=1)), fx.PutDone)
    (again,) = forwards(bare.tick(25))
    assert flags(again) & PutFlag.HINT
    assert all_of(reply(bare, again, STORED), fx.PutDone)


def test_unknown_answer_is_told_to_who_waits_and_else_tried_again():
    unknown = PutOutcome(PutStatus.UNKNOWN, Version(5, 1))
    bare = accepting()
    (send,) = forwards(bare.put([K1], [b"one"], deadline_ms=60_000))
    assert only(reply(bare, send, unknown), fx.PutDone).outcomes == [unknown]
    assert bare.core.put.hints.count() == 0
    bare = accepting()
    (send,) = forwards(bare.put([K1], [b"one"], session=False))
    reply(bare, send, unknown)
    (again,) = forwards(bare.tick(25))
    assert flags(again) & PutFlag.HINT


def test_copies_are_asked_for_only_while_somebody_waits_for_them():
    """Else a hint whose second copy finds no room is replayed for ever."""
    bare = accepting(connected=False)
    bare.put([K1], [b"one"], min_copies=2, deadline_ms=100)
    bare.put([K2], [b"two"], op=2, min_copies=2, deadline_ms=60_000)
    assert only(bare.tick(101), fx.PutDone).outcomes[0].status is PutStatus.QUEUED
    asked = {told.key: send.message.min_copies for send in forwards(bare.up("b")) for told in send.message.items}
    assert asked == {K1[8:]: 1, K2[8:]: 2}


def test_stored_delete_takes_the_older_near_copy_with_it():
    bare = accepting()
    (send,) = forwards(bare.put([K1], [b"one"], session=False))
    reply(bare, send, STORED)
    (send,) = forwards(bare.put([K1], [b""], op=2, delete=True, session=False))
    reply(bare, send, PutOutcome(PutStatus.STORED, Version(5, 2), 1))
    assert bare.core.state.directory.get(K1) is None
    assert not bare.live_slots()


def test_near_copy_is_kept_only_where_it_is_the_newest_and_does_not_expire():
    for reason in ("newer", "evicted", "expires"):
        bare = accepting()
        (send,) = forwards(bare.put([K1], [b"one"], session=False))
        if reason == "newer":
            fetch = only(bare.get([K1]), fx.Fetch)
            bare.unref(only(bare.fetched(fetch, b"newer", version=Version(5, 2)), fx.GetDone).slots)
        elif reason == "evicted":
            bare.core.state.directory.remember_evicted(K1, Version(5, 2), replaced=True)
        else:
            bare.core.state.view.policies[K1[:8]] = Namespace("ns", expiry_ms=1000)
        reply(bare, send, STORED)
        entry = bare.core.state.directory.get(K1)
        assert (entry.version if entry is not None else None) == (Version(5, 2) if reason == "newer" else None)
        assert bare.live_slots() == (reason == "newer")


# -- over another node -------------------------------------------------------------------------------------------------


def relaying(*up: str) -> Bare:
    """Node a, which does not reach b, the primary of everything; c is the other replica, d holds nothing."""
    bare = Bare(members=("a", "b", "c", "d")).join()
    bare.records(("live/d", live("d", 1)))
    bare.own(primary="b", replicas=("b", "c"), in_sync=("b", "c"))
    bare.up(*up)
    return bare


def test_put_goes_over_a_replica_that_is_reached_flagged_and_counted():
    bare = relaying("c", "d")
    (send,) = forwards(bare.put([K1], [b"one"]))
    assert send.peer == "c"
    assert flags(send) & PutFlag.FORWARD
    assert flags(send) & PutFlag.RELAY
    assert flags(send) & PutFlag.FRESH
    assert bare.core.state.counters["relayed_puts"] == 1
    ended = only(reply(bare, send, STORED), fx.PutDone)
    assert ended.outcomes == [STORED]
    assert bare.core.state.directory.get(K1).version == STORED.version


def test_primary_that_is_reached_is_never_relayed_to():
    (send,) = forwards(relaying("b", "c").put([K1], [b"one"]))
    assert (send.peer, flags(send) & PutFlag.RELAY) == ("b", 0)


def test_any_live_node_that_is_reached_will_do_and_a_dead_one_will_not():
    (send,) = forwards(relaying("d").put([K1], [b"one"]))
    assert send.peer == "d"
    bare = relaying("d")
    bare.records(("live/d", live("d", 2, dead=True)))
    assert not forwards(bare.put([K1], [b"one"]))


def test_relay_that_does_not_reach_the_primary_either_is_left_for_another():
    bare = relaying("c", "d")
    (send,) = forwards(bare.put([K1], [b"one"], deadline_ms=60_000))
    assert send.peer == "c"
    reply(bare, send, FENCED)
    (send,) = forwards(bare.tick(25))
    assert (send.peer, bool(flags(send) & PutFlag.FRESH)) == ("d", True)
    reply(bare, send, FENCED)
    asked = [send.peer for _ in range(20) for send in forwards(bare.tick(25))]
    assert asked[:1] == ["c"]  # after a while it is worth another try


def test_what_was_relayed_to_us_goes_to_the_primary_itself_or_nowhere():
    bare = relaying("b", "c", "d")
    (send,) = forwards(bare.put([K1], [b"one"], peer="d", relay=True))
    assert (send.peer, flags(send) & PutFlag.RELAY) == ("b", 0)
    bare.unref(send.slots)
    bare.step(ev.PeerDown(bare.now, "b"))
    assert not forwards(bare.tick(25))
    assert bare.core.put.hints.count() == 1
    # A put of our own clients goes over c meanwhile.
    assert forwards(bare.put([K2], [b"two"], op=2))[0].peer == "c"


def test_node_that_does_not_reach_the_primary_takes_no_relay():
    bare = relaying("c", "d")
    outcome = only(bare.put([K1], [b"one"], peer="d", relay=True), fx.PutDone).outcomes[0]
    assert outcome == FENCED
    assert not bare.live_slots()


def test_forward_that_asks_for_no_relay_is_not_passed_on():
    outcome = only(relaying("b").put([K1], [b"one"], peer="d"), fx.PutDone).outcomes[0]
    assert outcome == FENCED


def test_relay_passes_the_primarys_answer_and_its_epoch_on():
    bare = relaying("b")
    (send,) = forwards(bare.put([K1], [b"one"], peer="d", relay=True))
    bare.unref(send.slots)
    ended = only(bare.step(ev.PutAnswered(bare.now, "b", send.request, PutReply([STORED], [5]))), fx.PutDone)
    assert (ended.outcomes, ended.authorities) == ([STORED], [5])


def test_relay_forgets_at_the_deadline_what_its_sender_keeps_itself():
    bare = relaying("b")
    bare.unref(forwards(bare.put([K1], [b"one"], peer="d", relay=True, deadline_ms=100))[0].slots)
    bare.step(ev.PeerDown(bare.now, "b"))
    ended = only(bare.tick(101), fx.PutDone)
    assert ended.outcomes[0].status is PutStatus.UNKNOWN, "its first send may still be stamped"
    assert bare.core.put.hints.count() == 0
    assert not bare.live_slots()


def test_relayed_put_in_flight_at_the_deadline_is_settled_by_its_answer():
    bare = relaying("b")
    (send,) = forwards(bare.put([K1], [b"one"], peer="d", relay=True, deadline_ms=100))
    assert only(bare.tick(101), fx.PutDone).outcomes[0].status is PutStatus.UNKNOWN
    assert bare.core.put.hints.count() == 1
    assert not all_of(reply(bare, send, STORED), fx.PutDone)
    assert bare.core.put.hints.count() == 0


@pytest.mark.parametrize("level", ["session", "eventual"])
def test_node_cut_from_the_primary_alone_puts_and_reads_over_another(level):
    world = World("abc", seed=11)
    world.settle()
    world.run_ms(2500)
    primary = world.primary(shard_of(K1))
    (outsider,) = set("abc") - set(world.nodes["a"].core.state.view.owners[shard_of(K1)].replicas)
    world.cut(outsider, primary)
    (outcome,) = world.put_now(outsider, [K1], [b"over one hop"], session=level == "session", deadline_ms=500)
    assert outcome.status is (PutStatus.STORED if level == "session" else PutStatus.ACCEPTED)
    world.run_ms(100)
    entry = world.nodes[primary].core.state.directory.get(K1)
    assert entry.checksum == checksum(b"over one hop")
    assert world.get_now(outsider, [K1], floors=[entry.version])[0][1] == b"over one hop"
    assert world.nodes[outsider].core.put.hints.count() == 0


# -- reads -------------------------------------------------------------------------------------------------------------


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
