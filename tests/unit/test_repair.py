"""Catching up."""

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.repair import LANES_PER_PEER_MAX
from emberkv.messages import Offer, OfferHead, OfferReply, PutRequest, ReplicaStatus, Replicate, ReplicateReply
from emberkv.types import MissReason, PutStatus, Version, checksum, shard_of
from harness.bare import TTL, Bare, all_of, live, only
from harness.world import World, key_of, keys_of_shard

SHARD = 3
KEYS = keys_of_shard(SHARD, 5)


def primary(count: int = 2) -> Bare:
    """Holds `count` blocks of one shard; replica b is a learner of that shard only."""
    bare = Bare().join().own(replicas=("a",), in_sync=("a",))
    if count:
        bare.put(KEYS[:count], [b"%d" % n for n in range(count)])
    bare.own(replicas=("a", "b"), in_sync=("a",), shards=range(SHARD, SHARD + 1))
    return bare


def offers(effects: list[fx.Effect]) -> list[fx.Send]:
    return [send for send in all_of(effects, fx.Send) if isinstance(send.message, Offer)]


def fills(effects: list[fx.Effect]) -> list[fx.Send]:
    return [send for send in all_of(effects, fx.Send) if isinstance(send.message, Replicate)]


def offered(bare: Bare, send: fx.Send, *wanted: int, fenced: int = 0) -> list[fx.Effect]:
    return bare.step(ev.OfferAnswered(bare.now, send.peer, send.request, OfferReply(list(wanted), fenced)))


def filled(bare: Bare, send: fx.Send, *statuses: ReplicaStatus) -> list[fx.Effect]:
    bare.unref(send.slots)
    reply = ReplicateReply([int(s) for s in statuses], [0] * len(statuses))
    return bare.step(ev.ReplicateAnswered(bare.now, send.peer, send.request, reply))


def complete(bare: Bare) -> bool:
    return "b" in bare.core.put.repair.complete.get(SHARD, ())


def test_learner_is_offered_filled_and_named_complete():
    bare = primary()
    (offer,) = offers(bare.up("b"))
    assert [head.key for head in offer.message.heads] == KEYS[:2]
    assert offer.message.last
    (fill,) = fills(offered(bare, offer, 1))
    assert [item.key for item in fill.message.items] == KEYS[1:2]
    assert fill.message.fill
    assert not complete(bare)
    filled(bare, fill, ReplicaStatus.STORED)
    assert complete(bare)
    assert bare.core.put.repair.lag() == 0


def test_empty_shard_is_offered_too_so_that_a_learner_can_hand_in_what_it_has():
    bare = primary(0)
    (offer,) = offers(bare.up("b"))
    assert (offer.message.heads, offer.message.last) == ([], True)
    offered(bare, offer)
    assert complete(bare)


def test_fenced_offer_is_tried_once_a_tick():
    bare = primary()
    (offer,) = offers(bare.up("b"))
    for _ in range(20):
        assert not offers(offered(bare, offer, fenced=1))
        bare.put([key_of(1)], [b"x"], op=2)
        (offer,) = offers(bare.tick(10))
    offered(bare, offer)
    assert complete(bare)


def test_heartbeats_and_other_records_do_not_restart_a_comparison_under_way():
    bare = primary()
    (offer,) = offers(bare.up("b"))
    for counter in range(5):
        bare.records(("live/c", live("c", 2 + counter)))
    offered(bare, offer)
    assert complete(bare)


def test_lost_fill_starts_the_comparison_anew_at_the_next_tick():
    bare = primary()
    (fill,) = fills(offered(bare, offers(bare.up("b"))[0], 0, 1))
    assert not offers(filled(bare, fill, ReplicaStatus.STORED, ReplicaStatus.CHECKSUM))
    assert not complete(bare)
    assert len(offers(bare.tick(10))) == 1


def test_write_lost_during_a_comparison_keeps_the_learner_incomplete():
    bare = primary()
    (offer,) = offers(bare.up("b"))
    (write,) = fills(bare.put([KEYS[3]], [b"new"], op=2))
    filled(bare, write, ReplicaStatus.FENCED)
    offered(bare, offer)
    assert not complete(bare)
    (again,) = offers(bare.tick(10))
    assert KEYS[3] in [head.key for head in again.message.heads]


def test_offer_that_is_never_answered_does_not_hold_its_lane_for_ever():
    bare = primary()
    assert offers(bare.up("b"))
    bare.tick(4 * TTL / 1e6)
    assert not offers(bare.tick(1))
    assert offers(bare.tick(1))


def test_lost_connection_frees_the_lanes():
    bare = primary()
    (offer,) = offers(bare.up("b"))
    bare.step(ev.PeerDown(bare.now, "b"))
    assert not bare.core.put.repair.lanes
    assert not offers(bare.tick(10))
    assert not bare.step(ev.OfferAnswered(bare.now, "b", offer.request, OfferReply([])))
    assert offers(bare.up("b"))


def test_peer_that_left_the_replicas_is_waited_for_no_longer():
    bare = primary()
    assert bare.core.put.repair.lag() == 1
    bare.own(replicas=("a", "c"), in_sync=("a",), shards=range(SHARD, SHARD + 1))
    bare.tick(10)
    assert "b" not in bare.core.put.repair.waiting
    bare.own(primary="c", epoch=6)
    bare.tick(10)
    assert bare.core.put.repair.lag() == 0


def test_new_incarnation_is_compared_again_even_if_a_comparison_was_under_way():
    bare = primary()
    (offer,) = offers(bare.up("b"))
    bare.records(("live/b", live("b", 2, checksum(b"another life"))))
    offered(bare, offer)
    assert not complete(bare)
    assert offers(bare.tick(10))


def test_lanes_are_bounded_and_go_on_without_a_tick():
    bare = Bare().join().own(in_sync=("a",))
    first = offers(bare.up("b"))
    assert len(first) == LANES_PER_PEER_MAX
    assert len(offers(offered(bare, first[0]))) == 1


def test_bad_index_in_an_answer_is_survived():
    bare = primary()
    (offer,) = offers(bare.up("b"))
    assert not fills(offered(bare, offer, 7))
    assert offers(bare.tick(10))


# -- the learner's side ------------------------------------------------------------------------------------------------


def learner() -> Bare:
    bare = Bare().join().own(replicas=("a", "b"), shards=range(SHARD, SHARD + 1))
    bare.put(KEYS[:1], [b"mine"])  # version (5, 1)
    bare.own(primary="b", replicas=("b", "a"), in_sync=("b",), epoch=7)
    bare.up("b")
    return bare


def ask(bare: Bare, *heads: OfferHead, last: bool = True, authority: int = 7) -> tuple[OfferReply, list[fx.Effect]]:
    effects = bare.step(ev.OfferArrived(bare.now, 1, "b", Offer(SHARD, authority, list(heads), last)))
    return only(effects, fx.OfferDone).reply, effects


def test_learner_wants_what_is_newer_and_not_what_it_evicted():
    bare = learner()
    bare.core.state.directory.remember_evicted(KEYS[1], Version(6, 5))
    heads = [OfferHead(key, Version(6, 5), checksum(b"x")) for key in KEYS[:3]]
    reply, _ = ask(bare, *heads)
    assert reply.wanted == [0, 2]


def test_equal_bytes_are_adopted_instead_of_fetched():
    bare = learner()
    reply, _ = ask(bare, OfferHead(KEYS[0], Version(6, 5), checksum(b"mine")))
    assert reply.wanted == []
    assert bare.core.state.directory.get(KEYS[0]).version == Version(6, 5)
    assert bare.live_slots() == 1


def test_offer_without_authority_is_fenced():
    bare = learner()
    assert ask(bare, authority=6)[0].fenced_epoch == 7
    assert ask(bare, authority=8)[0].fenced_epoch == 1


def test_what_the_primary_lacks_or_has_older_is_handed_in_as_a_fill():
    for heads in ([], [OfferHead(KEYS[0], Version(4, 9), checksum(b"older"))]):
        bare = learner()
        _, effects = ask(bare, *heads)
        effects += bare.tick(10)
        (send,) = [s for s in all_of(effects, fx.Send) if isinstance(s.message, PutRequest)]
        (item,) = send.message.items
        assert (item.seen, send.message.min_copies) == (Version(5, 1), 0)
        assert bare.live_slots() == 1


def test_what_was_offered_on_an_earlier_page_is_not_handed_in():
    bare = learner()
    ask(bare, OfferHead(KEYS[0], Version(5, 1), checksum(b"mine")), last=False)
    ask(bare, OfferHead(KEYS[1], Version(5, 1), checksum(b"x")))
    assert bare.core.put.hints.count() == 0
    assert not bare.core.put.repair._offered


def test_primary_does_not_take_back_what_it_evicted():
    bare = primary(0)
    bare.core.state.directory.remember_evicted(KEYS[0], Version(5, 1))
    effects = bare.put([KEYS[0]], [b"x"], op=5, fresh=False, min_copies=0, peer="b", seen=Version(5, 1), session=False)
    assert only(effects, fx.PutDone).outcomes[0].status is PutStatus.SUPERSEDED
    assert not bare.live_slots()
    effects = bare.put([KEYS[0]], [b"x"], op=6, fresh=False, min_copies=0, peer="b", seen=Version(5, 2), session=False)
    assert only(effects, fx.PutDone).outcomes[0].status is PutStatus.STORED


# -- whole clusters ----------------------------------------------------------------------------------------------------


def test_restarted_backup_is_filled_and_in_sync_again():
    world = World("abc", seed=1)
    world.settle()
    world.run_ms(1500)
    keys = [key_of(number) for number in range(60)]
    world.put_now("a", keys, [b"%d" % n for n in range(60)])
    world.restart("b")
    world.run_ms(3000)
    assert all(node.core.put.repair.lag() == 0 for node in world.nodes.values())
    for key in keys:
        owner = world.nodes["a"].core.state.view.owners[shard_of(key)]
        assert set(owner.in_sync) == set(owner.replicas)
        assert all(world.nodes[name].core.state.directory.get(key) is not None for name in owner.replicas)


def test_write_that_only_a_paused_old_primary_heard_of_reaches_all_after_healing():
    world = World("abc", seed=1)
    world.settle()
    world.run_ms(1500)
    key = KEYS[0]
    primary_name = world.primary(SHARD)
    (backup,) = set(world.nodes["a"].core.state.view.owners[SHARD].replicas) - {primary_name}
    world.put_now(primary_name, [key], [b"known to both"])
    world.run_ms(100)
    for other in set("abc") - {primary_name}:
        world.cut(primary_name, other)
    assert world.put_now(primary_name, [key], [b"known to one"])[0].status is PutStatus.STORED
    world.pause(primary_name)
    world.run_until(lambda: world.nodes[backup].core.state.view.primary_of(SHARD) not in (None, primary_name))
    world.heal()
    world.run_ms(4000)
    replicas = world.nodes[backup].core.state.view.owners[SHARD].replicas
    entries = [world.nodes[name].core.state.directory.get(key) for name in replicas]
    assert len({(entry.version, entry.checksum) for entry in entries}) == 1
    if primary_name in replicas:
        assert entries[0].checksum == checksum(b"known to one")


def test_quiet_cluster_sends_nothing_but_heartbeats():
    world = World("abc", seed=9)
    world.settle()
    world.put_now("a", [key_of(n) for n in range(50)], [b"x"] * 50)
    world.restart("c")
    world.run_ms(4000)
    seen: list[fx.Effect] = []
    world.observers.append(lambda node, effect: seen.append(effect))
    world.run_ms(3000)
    assert not all_of(seen, fx.Send)
    assert all(w.key.startswith("hb/") for commit in all_of(seen, fx.Commit) for w in commit.writes)


def test_miss_reason_of_a_repaired_delete():
    world = World("abc", seed=9)
    world.settle()
    world.run_ms(1000)
    world.put_now("a", KEYS[:1], [b"x"])
    primary_name = world.primary(SHARD)
    (backup,) = set(world.nodes["a"].core.state.view.owners[SHARD].replicas) - {primary_name}
    world.cut(primary_name, backup)
    world.put_now(primary_name, KEYS[:1], delete=True)
    world.heal()
    world.run_ms(1500)
    assert world.get_now(backup, KEYS[:1])[0][0].reason == MissReason.DELETED
