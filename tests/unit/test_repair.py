"""Catching up, on the primary: applied vectors are compared, and only what is missing travels."""

import pytest

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.hints import REJECTIONS_MAX
from emberkv.core.repair import (
    LANES_PER_PEER_MAX,
    OFFERING_PER_PEER_MAX,
    PROBES_PER_MESSAGE_MAX,
    TRANSITIONS,
    CatchUp,
    Phase,
)
from emberkv.errors import InvariantViolation
from emberkv.messages import (
    Offer,
    OfferReply,
    ReplicaStatus,
    Replicate,
    ReplicateReply,
    Span,
    Vector,
    VectorAnswer,
    VectorReply,
    VectorStatus,
)
from emberkv.types import BATCH_KEYS_MAX, NO_VERSION, MissReason, PutStatus, Version, checksum, shard_of
from harness.bare import MS, TTL, Bare, all_of, item, live, only, sends
from harness.world import World, key_of, keys_of_shard

SHARD = 3
KEYS = keys_of_shard(SHARD, 5)
ONLY_SHARD = range(SHARD, SHARD + 1)
LEARNING, BUSY = VectorAnswer(int(VectorStatus.LEARNING)), VectorAnswer(int(VectorStatus.BUSY))


def primary(count: int = 2) -> Bare:
    """Holds `count` blocks of one shard; b is a replica of that shard only, and not known to be complete."""
    bare = Bare().join().own(replicas=("a",), in_sync=("a",))
    if count:
        bare.put(KEYS[:count], [b"%d" % n for n in range(count)])
    return bare.own(in_sync=("a",), shards=ONLY_SHARD)


def spans(*spans: Span) -> VectorAnswer:
    return VectorAnswer(int(VectorStatus.SPANS), 0, list(spans))


def fenced(epoch: int = 0) -> VectorAnswer:
    return VectorAnswer(int(VectorStatus.FENCED), epoch)


def said(bare: Bare, send: fx.Send, *answers: VectorAnswer) -> list[fx.Effect]:
    """b answers a comparison."""
    return bare.step(ev.VectorAnswered(bare.now, send.peer, send.request, VectorReply(list(answers))))


def wanted(bare: Bare, send: fx.Send, *indices: int, fenced: int = 0) -> list[fx.Effect]:
    return bare.step(ev.OfferAnswered(bare.now, send.peer, send.request, OfferReply(list(indices), fenced)))


def filled(bare: Bare, send: fx.Send, *statuses: ReplicaStatus) -> list[fx.Effect]:
    bare.unref(send.slots)
    reply = ReplicateReply([int(s) for s in statuses], [0] * len(statuses))
    return bare.step(ev.ReplicateAnswered(bare.now, send.peer, send.request, reply))


def asked(effects: list[fx.Effect]) -> fx.Send:
    """The one comparison among the effects."""
    (send,) = sends(effects, Vector)
    return send


def complete(bare: Bare) -> bool:
    return "b" in bare.core.put.repair.complete.get(SHARD, ())


# -- what is compared --------------------------------------------------------------------------------------------------


def test_primary_says_what_it_has_processed_under_its_epoch_and_above_which_floor():
    bare = primary()
    bare.core.state.directory.raise_floor(SHARD, Version(4, 9))
    (stated,) = asked(bare.up("b")).message.items
    assert (stated.shard, stated.authority, stated.floor) == (SHARD, 5, Version(4, 9))
    assert stated.spans == [Span(5, 1, 2)]
    assert not stated.adopt


def test_equal_vectors_are_complete_without_another_message():
    bare = primary()
    assert not all_of(said(bare, asked(bare.up("b")), spans(Span(5, 1, 2))), fx.Send)
    assert complete(bare)
    assert bare.core.put.repair.lag() == 0


def test_a_replica_that_has_processed_more_is_complete_and_its_vector_is_ours_too():
    """What it had more of was handed in before it answered."""
    bare = primary()
    said(bare, asked(bare.up("b")), spans(Span(4, 1, 7), Span(5, 1, 2)))
    assert complete(bare)
    assert bare.core.put.stream.vector(SHARD).spans() == [Span(4, 1, 7), Span(5, 1, 2)]


def test_only_the_missing_write_is_filled_then_the_replica_adopts_the_vector():
    bare = primary(3)
    (fill,) = sends(said(bare, asked(bare.up("b")), spans(Span(5, 1, 1), Span(5, 3, 3))), Replicate)
    assert [(i.key, i.version, i.payload) for i in fill.message.items] == [(KEYS[1], Version(5, 2), True)]
    assert fill.message.fill
    assert not fill.message.surplus
    adopt = asked(filled(bare, fill, ReplicaStatus.STORED))
    assert adopt.message.items[0].adopt
    assert adopt.message.items[0].spans == [Span(5, 1, 3)]
    assert not complete(bare)
    assert not all_of(said(bare, adopt, spans(Span(5, 1, 3))), fx.Send)
    assert complete(bare)


def test_adoption_is_asked_for_only_when_every_item_is_answered():
    bare = primary(2)
    (fill,) = sends(said(bare, asked(bare.up("b")), spans()), Replicate)
    assert len(fill.message.items) == 2
    repair = bare.core.put.repair
    repair.filled("b", SHARD, True)
    assert repair.lanes[("b", SHARD)].phase is Phase.FILLING
    assert not complete(bare)


def test_hole_without_a_block_behind_it_is_adopted_at_once():
    """The write that is missing there was replaced here by a later one, which the replica has."""
    bare = primary(1)
    bare.put(KEYS[:1], [b"later"], op=2)
    adopt = asked(said(bare, asked(bare.up("b")), spans(Span(5, 2, 2))))
    assert adopt.message.items[0].adopt


def test_write_stamped_during_a_comparison_is_not_adopted_unseen():
    """It reaches the replica by the stream; what the replica takes for processed is what stood in the question."""
    bare = primary()
    first = asked(bare.up("b"))
    bare.put([KEYS[3]], [b"new"], op=2)
    effects = said(bare, first, spans(Span(5, 1, 1)))
    (fill,) = sends(effects, Replicate)
    assert [i.key for i in fill.message.items] == [KEYS[1]]
    assert asked(filled(bare, fill, ReplicaStatus.STORED)).message.items[0].spans == [Span(5, 1, 2)]


def test_pending_and_expired_blocks_are_not_repaired():
    bare = primary(3)
    directory = bare.core.state.directory
    directory.get(KEYS[1]).expiry_ms = 1000
    bare.tick(1, wall_ms=999)
    (fill,) = sends(said(bare, asked(bare.up("b")), spans()), Replicate)
    assert [i.key for i in fill.message.items] == KEYS[:3]
    bare = primary(3)
    bare.core.state.directory.get(KEYS[1]).expiry_ms = 1000
    bare.core.state.wall_ms = 1000
    (fill,) = sends(said(bare, asked(bare.up("b")), spans()), Replicate)
    assert [i.key for i in fill.message.items] == [KEYS[0], KEYS[2]]


def test_evicted_overwritten_version_is_told_without_bytes():
    """A ghost: the primary gave it up for room, the replica may still hold the older one and must not."""
    bare = primary(1)
    bare.put(KEYS[:1], [b"later"], op=2)
    directory = bare.core.state.directory
    directory.evict(directory.get(KEYS[0]))
    (fill,) = sends(said(bare, asked(bare.up("b")), spans(Span(5, 1, 1))), Replicate)
    (ghost,) = fill.message.items
    assert (ghost.key, ghost.version, ghost.skip, ghost.payload) == (KEYS[0], Version(5, 2), True, False)
    assert not fill.slots
    assert asked(filled(bare, fill, ReplicaStatus.NO_SPACE)).message.items[0].adopt


def test_version_that_came_over_an_evicted_one_is_a_ghost_when_it_is_evicted_too():
    bare = primary(1)
    directory = bare.core.state.directory
    directory.evict(directory.get(KEYS[0]))
    bare.put(KEYS[:1], [b"later"], op=2)
    directory.evict(directory.get(KEYS[0]))
    (fill,) = sends(said(bare, asked(bare.up("b")), spans(Span(5, 1, 1))), Replicate)
    assert [(i.version, i.skip) for i in fill.message.items] == [(Version(5, 2), True)]


def test_evicted_first_version_is_adopted_without_a_word():
    bare = primary(1)
    directory = bare.core.state.directory
    directory.evict(directory.get(KEYS[0]))
    assert asked(said(bare, asked(bare.up("b")), spans())).message.items[0].adopt


# -- learners ----------------------------------------------------------------------------------------------------------


def test_replica_that_knows_nothing_is_offered_all_heads_and_filled_what_it_wants():
    bare = primary(3)
    (offer,) = sends(said(bare, asked(bare.up("b")), LEARNING), Offer)
    assert [(h.key, h.version) for h in offer.message.heads] == [(KEYS[n], Version(5, n + 1)) for n in range(3)]
    assert (offer.message.authority, offer.message.last) == (5, True)
    (fill,) = sends(wanted(bare, offer, 1), Replicate)
    assert [i.key for i in fill.message.items] == [KEYS[1]]
    said(bare, asked(filled(bare, fill, ReplicaStatus.STORED)), spans(Span(5, 1, 3)))
    assert complete(bare)


def test_nothing_wanted_is_adopted_at_once():
    bare = primary()
    (offer,) = sends(said(bare, asked(bare.up("b")), LEARNING), Offer)
    assert asked(wanted(bare, offer)).message.items[0].adopt


def test_heads_are_offered_a_page_at_a_time():
    bare = Bare(arena_slots=512).join().own(replicas=("a",), in_sync=("a",))
    keys = keys_of_shard(SHARD, BATCH_KEYS_MAX + 5)
    bare.put(keys[:100], [b"x"] * 100)
    bare.put(keys[100:], [b"x"] * 33, op=2)
    bare.own(in_sync=("a",), shards=ONLY_SHARD)
    (page,) = sends(said(bare, asked(bare.up("b")), LEARNING), Offer)
    assert (len(page.message.heads), page.message.last) == (BATCH_KEYS_MAX, False)
    (fill,) = sends(wanted(bare, page, 0), Replicate)
    (last,) = sends(filled(bare, fill, ReplicaStatus.STORED), Offer)
    assert (len(last.message.heads), last.message.last) == (5, True)
    assert asked(wanted(bare, last)).message.items[0].adopt


def test_learner_that_asks_for_heads_when_it_should_adopt_starts_over():
    bare = primary()
    (offer,) = sends(said(bare, asked(bare.up("b")), LEARNING), Offer)
    adopt = asked(wanted(bare, offer))
    assert not all_of(said(bare, adopt, LEARNING), fx.Send)
    assert not complete(bare)
    assert asked(bare.tick(10))


def test_learners_of_many_shards_leave_the_stream_to_fresh_writes():
    bare = Bare().join().own(in_sync=("a",))
    first = sends(bare.up("b"), Vector)[0]
    offers = sends(said(bare, first, *[LEARNING] * len(first.message.items)), Offer)
    assert len(offers) == OFFERING_PER_PEER_MAX
    assert first.message.items[-1].shard in bare.core.put.repair.waiting["b"]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [fenced(), BUSY], ids=["unheard of", "busy"])
def test_replica_that_cannot_be_compared_now_is_asked_once_a_tick(answer):
    bare = primary()
    question = asked(bare.up("b"))
    for _ in range(20):
        assert not sends(said(bare, question, answer), Vector)
        bare.put([key_of(1)], [b"x"], op=2)  # traffic of others does not start it either
        question = asked(bare.tick(10))
    said(bare, question, spans(Span(5, 1, 2)))
    assert complete(bare)


def test_higher_epoch_stated_by_a_replica_stills_the_primary():
    bare = primary()
    said(bare, asked(bare.up("b")), fenced(9))
    assert not bare.core.put._may_stamp(SHARD)
    assert bare.core.put._may_stamp(SHARD + 1)


def test_heartbeats_and_other_records_do_not_restart_a_comparison_under_way():
    bare = primary()
    question = asked(bare.up("b"))
    for counter in range(5):
        assert not sends(bare.records(("live/c", live("c", 2 + counter))), Vector)
    said(bare, question, spans(Span(5, 1, 2)))
    assert complete(bare)


def test_lost_fill_starts_the_comparison_anew_at_the_next_tick():
    bare = primary()
    (fill,) = sends(said(bare, asked(bare.up("b")), spans()), Replicate)
    assert not all_of(filled(bare, fill, ReplicaStatus.STORED, ReplicaStatus.CHECKSUM), fx.Send)
    assert not complete(bare)
    assert asked(bare.tick(10))


def test_write_whose_bytes_are_bad_here_is_told_without_them_so_that_nothing_older_stays():
    bare = primary()
    (fill,) = sends(said(bare, asked(bare.up("b")), spans(Span(5, 2, 2))), Replicate)
    for _ in range(REJECTIONS_MAX):
        assert not complete(bare)
        filled(bare, fill, ReplicaStatus.CHECKSUM)
        (fill,) = sends(said(bare, asked(bare.tick(10)), spans(Span(5, 2, 2))), Replicate)
    (told,) = sends(filled(bare, fill, ReplicaStatus.CHECKSUM), Replicate)
    assert [(i.version, i.skip, i.payload) for i in told.message.items] == [(Version(5, 1), True, False)]
    assert asked(filled(bare, told, ReplicaStatus.NO_SPACE)).message.items[0].adopt


def test_what_one_replica_had_more_of_the_others_have_to_hear_of():
    """Nothing was left of it to be handed in, but their vectors must come to be equal."""
    bare = Bare(factor=3).join().own(replicas=("a",), in_sync=("a",))
    bare.own(replicas=("a", "b", "c"), in_sync=("a",), shards=ONLY_SHARD)
    for question in sends(bare.up("c"), Vector):
        said(bare, question, spans())
    assert bare.core.put.repair.complete[SHARD] == {"c"}
    question = asked(said(bare, asked(bare.up("b")), spans(Span(4, 1, 7))))
    assert (question.peer, bare.core.put.repair.complete[SHARD]) == ("c", {"b"})
    adopt = asked(said(bare, question, spans()))
    said(bare, adopt, spans(Span(4, 1, 7)))
    assert bare.core.put.repair.complete[SHARD] == {"b", "c"}


def test_write_lost_during_a_comparison_keeps_the_replica_incomplete():
    bare = primary()
    question = asked(bare.up("b"))
    (write,) = sends(bare.put([KEYS[3]], [b"new"], op=2), Replicate)
    filled(bare, write, ReplicaStatus.FENCED)
    said(bare, question, spans(Span(5, 1, 2)))
    assert not complete(bare)
    (fill,) = sends(said(bare, asked(bare.tick(10)), spans(Span(5, 1, 2))), Replicate)
    assert [i.key for i in fill.message.items] == [KEYS[3]]


def test_write_lost_after_a_comparison_is_found_by_the_next():
    bare = primary()
    said(bare, asked(bare.up("b")), spans(Span(5, 1, 2)))
    (write,) = sends(bare.put([KEYS[3]], [b"new"], op=2), Replicate)
    bare.unref(write.slots)
    bare.step(ev.PeerDown(bare.now, "b"))
    assert not complete(bare)
    assert asked(bare.up("b")).message.items[0].spans == [Span(5, 1, 3)]


@pytest.mark.parametrize("question", ["vector", "offer", "adopt"])
def test_question_that_is_never_answered_does_not_hold_its_lane_for_ever(question):
    bare = primary()
    effects = bare.up("b")
    if question != "vector":
        effects = said(bare, asked(effects), LEARNING)
    if question == "adopt":
        effects = wanted(bare, sends(effects, Offer)[0])
    bare.tick(4 * TTL / MS)
    assert ("b", SHARD) in bare.core.put.repair.lanes
    bare.tick(1)
    assert ("b", SHARD) not in bare.core.put.repair.lanes
    assert asked(bare.tick(1))


def test_lost_connection_frees_the_lanes_and_a_late_answer_changes_nothing():
    bare = primary()
    question = asked(bare.up("b"))
    bare.step(ev.PeerDown(bare.now, "b"))
    assert not bare.core.put.repair.lanes
    assert not sends(bare.tick(10), Vector)
    assert not said(bare, question, spans(Span(5, 1, 2)))
    assert not complete(bare)
    assert asked(bare.up("b"))


def test_peer_that_left_the_replicas_is_waited_for_no_longer():
    bare = primary()
    assert bare.core.put.repair.lag() == 1
    bare.own(replicas=("a", "c"), in_sync=("a",), shards=ONLY_SHARD)
    bare.tick(10)
    assert "b" not in bare.core.put.repair.waiting
    bare.own(primary="c", epoch=6)
    bare.tick(10)
    assert bare.core.put.repair.lag() == 0


def test_answer_of_a_peer_that_left_the_replicas_meanwhile_does_not_make_it_complete():
    bare = primary()
    question = asked(bare.up("b"))
    bare.own(replicas=("a", "c"), in_sync=("a",), shards=ONLY_SHARD)
    assert not all_of(said(bare, question, spans(Span(5, 1, 2))), fx.Send)
    assert not complete(bare)


def test_new_incarnation_is_compared_again_even_if_a_comparison_was_under_way():
    bare = primary()
    question = asked(bare.up("b"))
    bare.records(("live/b", live("b", 2, checksum(b"another life"))))
    said(bare, question, spans(Span(5, 1, 2)))
    assert not complete(bare)
    assert asked(bare.tick(10))


def test_new_incarnation_of_a_complete_peer_is_no_longer_complete():
    bare = primary()
    said(bare, asked(bare.up("b")), spans(Span(5, 1, 2)))
    bare.records(("live/b", live("b", 2, checksum(b"another life"))))
    assert not complete(bare)


def test_new_epoch_of_ours_compares_everybody_anew():
    bare = primary()
    said(bare, asked(bare.up("b")), spans(Span(5, 1, 2)))
    bare.own(epoch=6, in_sync=("a",), shards=ONLY_SHARD)
    assert not complete(bare)
    assert asked(bare.tick(10)).message.items[0].authority == 6


def test_lanes_are_bounded_share_messages_and_go_on_without_a_tick():
    bare = Bare().join().own(in_sync=("a",))
    first = sends(bare.up("b"), Vector)
    assert [len(send.message.items) for send in first] == [PROBES_PER_MESSAGE_MAX] * (
        LANES_PER_PEER_MAX // PROBES_PER_MESSAGE_MAX
    )
    more = asked(said(bare, first[0], *[spans()] * PROBES_PER_MESSAGE_MAX))
    assert len(more.message.items) == PROBES_PER_MESSAGE_MAX
    assert not {i.shard for i in more.message.items} & {i.shard for send in first for i in send.message.items}


def test_answers_that_do_not_fit_the_question_are_survived():
    bare = primary()
    assert not all_of(said(bare, asked(bare.up("b")), spans(), spans()), fx.Send)
    assert not complete(bare)
    (offer,) = sends(said(bare, asked(bare.tick(10)), LEARNING), Offer)
    assert not sends(wanted(bare, offer, 7), Replicate)
    (offer,) = sends(said(bare, asked(bare.tick(10)), LEARNING), Offer)
    assert not sends(wanted(bare, offer, fenced=1), Replicate)
    assert asked(bare.tick(10))


def test_a_phase_takes_only_the_moves_of_its_table():
    lane = CatchUp(SHARD)
    with pytest.raises(InvariantViolation):
        lane.move("all answered")
    for phase, what in TRANSITIONS:
        lane.phase = phase
        lane.move(what)
        assert lane.phase is TRANSITIONS[phase, what]


# -- whole clusters ----------------------------------------------------------------------------------------------------


def vectors(world: World, shard: int) -> dict[str, list[Span]]:
    """What each replica of a shard has processed."""
    owner = world.nodes[world.primary(shard)].core.state.view.owners[shard]
    return {name: world.nodes[name].core.put.stream.vector(shard).spans() for name in owner.replicas}


def replicas_agree(world: World, shard: int) -> bool:
    found = list(vectors(world, shard).values())
    return all(spans == found[0] for spans in found)


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
        assert replicas_agree(world, shard_of(key))


def test_replica_that_was_cut_off_is_sent_only_what_it_missed():
    world = World("abc", seed=4)
    world.settle()
    world.run_ms(2500)
    keys = keys_of_shard(SHARD, 30)
    name = world.primary(SHARD)
    (backup,) = set(world.nodes[name].core.state.view.owners[SHARD].replicas) - {name}
    world.put_now(name, keys[:20], [b"known to both"] * 20, min_copies=2)
    world.cut(name, backup)
    world.put_now(name, keys[20:], [b"missed"] * 10)
    sent: list[tuple[str, bytes]] = []
    world.observers.append(
        lambda node, effect: (
            sent.extend((node.name, i.key) for i in effect.message.items)
            if isinstance(effect, fx.Send) and isinstance(effect.message, Replicate)
            else None
        )
    )
    world.heal()
    world.run_ms(1500)
    assert sorted(sent) == sorted((name, key) for key in keys[20:])
    assert replicas_agree(world, SHARD)


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
    (outcome,) = world.put_now(primary_name, [key], [b"known to one"])
    assert outcome.status is PutStatus.STORED
    world.pause(primary_name)
    world.run_until(lambda: world.nodes[backup].core.state.view.primary_of(SHARD) not in (None, primary_name))
    world.heal()
    world.run_ms(4000)
    replicas = world.nodes[backup].core.state.view.owners[SHARD].replicas
    assert primary_name in replicas
    entries = [world.nodes[name].core.state.directory.get(key) for name in replicas]
    assert {entry.version for entry in entries} == {outcome.version}  # handed in as it was stamped
    assert {entry.checksum for entry in entries} == {checksum(b"known to one")}
    assert replicas_agree(world, SHARD)


def test_quiet_cluster_sends_nothing_but_heartbeats():
    world = World("abc", seed=9)
    world.settle()
    world.put_now("a", [key_of(n) for n in range(50)], [b"x"] * 50)
    world.restart("c")
    world.run_ms(6000)
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


def test_ghost_that_a_replica_hands_in_ends_the_older_version_at_the_third_too():
    """b overwrote and evicted while it was primary; a, the primary now, has neither version; c has the older one."""
    bare = Bare(factor=3).join().own(replicas=("a",), in_sync=("a",))
    bare.own(replicas=("a", "b", "c"), in_sync=("a",), shards=ONLY_SHARD)
    for question in sends(bare.up("b", "c"), Vector):
        said(bare, question, spans(Span(4, 1, 1)))
    overwritten = item(KEYS[0], b"", 2, epoch=4, skip=True)
    assert overwritten.prev == NO_VERSION
    only(bare.receive((overwritten, b""), surplus=True), fx.ReplicaDone)
    question = asked(bare.tick(10))
    assert question.peer == "c"
    (fill,) = sends(said(bare, question, spans(Span(4, 1, 1))), Replicate)
    assert [(i.key, i.version, i.skip) for i in fill.message.items] == [(KEYS[0], Version(4, 2), True)]
