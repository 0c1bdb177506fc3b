"""Catching up, on the replica: what it lacks it is given, what only it has it hands in, what is gone it gives up."""

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.messages import (
    SPANS_MAX,
    Offer,
    OfferHead,
    OfferReply,
    ReplicaItem,
    ReplicaStatus,
    Replicate,
    ReplicateReply,
    Span,
    Vector,
    VectorAnswer,
    VectorItem,
    VectorStatus,
)
from emberkv.types import NO_VERSION, EntryState, MissReason, Namespace, PutStatus, Version, checksum
from harness.bare import Bare, all_of, item, only, sends
from harness.world import World, keys_of_shard

SHARD = 3
KEYS = keys_of_shard(SHARD, 5)
ONLY_SHARD = range(SHARD, SHARD + 1)
S, R = VectorStatus, ReplicaStatus


def replica(*writes: tuple[bytes, bytes, int], near: bool = False, new: bool = False) -> Bare:
    """Node a, replica of one shard of b under epoch 7; it took `writes` (key, bytes, seq) under epoch 5, and was then
    found complete, unless it is `new`. `near`: it holds them as near copies only, and has just become a replica."""
    bare = Bare(arena_slots=256).join()
    bare.own(primary="c" if near else "b", replicas=("c",) if near else ("b", "a"), in_sync=("c",) if near else ("b",))
    bare.up("b")
    directory = bare.core.state.directory
    for key, data, seq in writes:
        if near:
            fetch = all_of(bare.get([key], session=False), fx.Fetch)[0]
            bare.unref(only(bare.fetched(fetch, data, version=Version(5, seq)), fx.GetDone).slots)
        else:
            bare.receive((item(key, data, seq), data))
        assert directory.get(key).version == Version(5, seq)
    if writes and not near and not new:
        spans = bare.core.put.stream.vector(SHARD).spans()
        assert compare(bare, *spans, authority=5)[0].spans == spans
    bare.own(primary="b", replicas=("b", "a"), in_sync=("b",), epoch=7, shards=ONLY_SHARD)
    return bare


def compare(bare: Bare, *spans: Span, floor: Version = NO_VERSION, adopt: bool = False, authority: int = 7,
            peer: str = "b") -> tuple[VectorAnswer, list[fx.Effect]]:  # fmt: skip
    """The primary compares; returns the answer and everything that the step did."""
    vector = Vector([VectorItem(SHARD, authority, floor, list(spans), adopt)])
    effects = bare.step(ev.VectorArrived(bare.now, 1, peer, vector))
    (answer,) = only(effects, fx.VectorDone).reply.answers
    return answer, effects


def offer(bare: Bare, *heads: OfferHead, last: bool = True, authority: int = 7) -> tuple[OfferReply, list[fx.Effect]]:
    effects = bare.step(ev.OfferArrived(bare.now, 1, "b", Offer(SHARD, authority, list(heads), last)))
    return only(effects, fx.OfferDone).reply, effects


def handed_in(effects: list[fx.Effect]) -> list[ReplicaItem]:
    return [sent for send in sends(effects, Replicate) for sent in send.message.items]


def answered(bare: Bare, effects: list[fx.Effect], *statuses: ReplicaStatus) -> list[fx.Effect]:
    (send,) = sends(effects, Replicate)
    bare.unref(send.slots)
    reply = ReplicateReply([int(status) for status in statuses], [0] * len(statuses))
    return bare.step(ev.ReplicateAnswered(bare.now, send.peer, send.request, reply))


def held(bare: Bare) -> set[bytes]:
    return {entry.key for entry in bare.core.state.directory.entries(SHARD)}


# -- who may ask -------------------------------------------------------------------------------------------------------


def test_old_unheard_of_and_foreign_authority_is_fenced():
    bare = replica()
    assert compare(bare, authority=6)[0] == VectorAnswer(int(S.FENCED), 7)
    assert compare(bare, authority=8)[0] == VectorAnswer(int(S.FENCED), 0)
    assert compare(bare, peer="c")[0].status == S.FENCED
    assert offer(bare, authority=6)[0].fenced_epoch == 7
    assert offer(bare, authority=8)[0].fenced_epoch == 1


def test_fenced_adoption_changes_nothing():
    bare = replica((KEYS[0], b"mine", 1))
    compare(bare, Span(5, 1, 1))
    compare(bare, Span(5, 1, 9), adopt=True, authority=6)
    assert bare.core.put.stream.vector(SHARD).spans() == [Span(5, 1, 1)]


def test_heads_that_nobody_asked_for_are_refused():
    assert offer(replica())[0].fenced_epoch


# -- equal, lacking, learning ------------------------------------------------------------------------------------------


def test_replica_that_has_processed_all_says_so_and_takes_the_floor():
    bare = replica((KEYS[0], b"mine", 1))
    answer, effects = compare(bare, Span(5, 1, 1), floor=Version(4, 9))
    assert answer == VectorAnswer(int(S.SPANS), 0, [Span(5, 1, 1)])
    assert not all_of(effects, fx.Send)
    assert bare.core.state.directory.floors[SHARD] == Version(4, 9)


def test_replica_that_lacks_some_says_what_it_has():
    bare = replica((KEYS[0], b"mine", 1))
    assert compare(bare, Span(5, 1, 3))[0] == VectorAnswer(int(S.SPANS), 0, [Span(5, 1, 1)])


def test_replica_that_has_processed_nothing_learns_by_heads():
    assert compare(replica(), Span(5, 1, 3))[0].status == S.LEARNING


def test_new_replica_learns_by_heads_whatever_has_come_by_the_stream_since():
    """Beside that it may hold near copies, of whose end it may have missed anything."""
    bare = replica((KEYS[0], b"streamed", 4), new=True)
    assert compare(bare, Span(5, 1, 4))[0].status == S.LEARNING
    offer(bare, OfferHead(KEYS[0], Version(5, 4), checksum(b"streamed")))
    compare(bare, Span(5, 1, 4), adopt=True)
    assert compare(bare, Span(5, 1, 5))[0] == VectorAnswer(int(S.SPANS), 0, [Span(5, 1, 4)])


def test_replica_that_was_none_for_a_while_is_new_again():
    bare = replica((KEYS[0], b"mine", 1))
    bare.own(primary="b", replicas=("b", "c"), in_sync=("b",), epoch=7, shards=ONLY_SHARD)
    bare.own(primary="b", replicas=("b", "a"), in_sync=("b",), epoch=7, shards=ONLY_SHARD)
    assert compare(bare, Span(5, 1, 3))[0].status == S.LEARNING


def test_new_replica_of_a_shard_in_which_nothing_was_ever_written_has_all_of_it():
    assert compare(replica())[0] == VectorAnswer(int(S.SPANS), 0, [])


def test_replica_that_was_away_while_tombstones_were_forgotten_learns_by_heads():
    bare = replica((KEYS[0], b"mine", 1))
    assert compare(bare, Span(5, 1, 3), floor=Version(5, 2))[0].status == S.LEARNING
    # One that has seen them end itself needs no heads.
    bare = replica((KEYS[0], b"mine", 1))
    bare.core.state.directory.raise_floor(SHARD, Version(5, 2))
    assert compare(bare, Span(5, 1, 3), floor=Version(5, 2))[0].status == S.SPANS


def test_answer_that_fits_no_frame_is_busy_and_the_others_are_answered():
    bare = replica()
    bare.own(primary="b", replicas=("b", "a"), in_sync=("b",), epoch=7)
    for shard in (SHARD, SHARD + 1):
        for epoch in range(1, SPANS_MAX // 128):
            for seq in range(1, 160, 2):
                bare.core.put.stream.mark_applied(shard, Version(epoch, seq))
    assert len(bare.core.put.stream.vector(SHARD).spans()) > SPANS_MAX // 3
    items = [VectorItem(shard, 7, NO_VERSION, []) for shard in (SHARD, SHARD + 1, SHARD, SHARD + 2)]
    reply = only(bare.step(ev.VectorArrived(bare.now, 1, "b", Vector(items))), fx.VectorDone).reply
    assert [answer.status for answer in reply.answers] == [S.SPANS, S.SPANS, S.BUSY, S.BUSY]


# -- handing in --------------------------------------------------------------------------------------------------------


def test_surplus_is_handed_in_with_its_original_version_under_the_primarys_epoch():
    bare = replica((KEYS[0], b"mine", 1), (KEYS[1], b"known", 2))
    answer, effects = compare(bare, Span(5, 2, 2))
    assert answer.status == S.BUSY
    (send,) = sends(effects, Replicate)
    assert (send.peer, send.message.surplus, send.message.fill) == ("b", True, False)
    (surplus,) = send.message.items
    assert (surplus.key, surplus.version, surplus.authority) == (KEYS[0], Version(5, 1), 7)
    assert surplus.payload
    assert surplus.put_id == b"p" * 24
    assert [bare.tier.read(slot) for slot in send.slots] == [b"mine"]
    assert bare.core.put.hints.count() == 0  # it is not put anew


def test_busy_until_the_surplus_is_answered_and_it_is_sent_once():
    bare = replica((KEYS[0], b"mine", 1))
    _, effects = compare(bare)
    for _ in range(3):
        again, more = compare(bare)
        assert again.status == S.BUSY
        assert not handed_in(more)
    answered(bare, effects, R.STORED)
    answer, more = compare(bare, Span(5, 1, 1))
    assert (answer.status, handed_in(more)) == (S.SPANS, [])
    assert bare.live_slots() == 1


def test_surplus_that_was_lost_is_found_again():
    bare = replica((KEYS[0], b"mine", 1))
    _, effects = compare(bare)
    bare.unref(sends(effects, Replicate)[0].slots)
    bare.step(ev.PeerDown(bare.now, "b"))
    assert compare(bare)[0].status == S.BUSY  # nobody to send it to
    bare.up("b")
    assert [sent.key for sent in handed_in(compare(bare)[1])] == [KEYS[0]]


def test_surplus_that_the_primary_has_newer_is_given_up_here():
    for status, left in ((R.STALE, set()), (R.STORED, {KEYS[0]}), (R.FENCED, {KEYS[0]}), (R.NO_SPACE, {KEYS[0]})):
        bare = replica((KEYS[0], b"mine", 1))
        answered(bare, compare(bare)[1], status)
        assert held(bare) == left, status


def test_tombstones_are_handed_in_too():
    bare = replica()
    bare.own(primary="b", replicas=("b", "a"), in_sync=("b", "a"), epoch=7)
    bare.receive((item(KEYS[0], b"", 4, authority=7, state=EntryState.TOMBSTONE), b""))
    (surplus,) = handed_in(compare(bare)[1])
    assert (surplus.state, surplus.version, surplus.payload) == (EntryState.TOMBSTONE, Version(5, 4), False)


def test_ghosts_are_handed_in_so_that_nobody_keeps_what_they_replaced():
    bare = replica((KEYS[0], b"old", 1))
    directory = bare.core.state.directory
    bare.own(primary="b", replicas=("b", "a"), in_sync=("b", "a"), epoch=7)
    bare.receive((item(KEYS[0], b"new", 2, authority=7, prev=Version(5, 1)), b"new"))
    directory.evict(directory.get(KEYS[0]))
    (ghost,) = handed_in(compare(bare, Span(5, 1, 1))[1])
    assert (ghost.key, ghost.version, ghost.skip, ghost.payload) == (KEYS[0], Version(5, 2), True, False)


def test_what_the_primary_itself_has_stamped_is_never_handed_in():
    """It came by the stream while the question was on its way."""
    bare = replica()
    bare.receive((item(KEYS[0], b"fresh", 1, authority=7, epoch=7), b"fresh"))
    answer, effects = compare(bare)
    assert answer == VectorAnswer(int(S.SPANS), 0, [Span(7, 1, 1)])
    assert not handed_in(effects)


def test_blocks_without_a_version_are_not_handed_in():
    bare = replica()
    bare.step(ev.PeerDown(bare.now, "b"))
    bare.put([KEYS[0]], [b"pending"], session=False)
    bare.up("b")
    assert compare(bare)[0].status == S.SPANS


def test_near_copies_of_a_new_replica_are_handed_in_where_the_primary_knows_nothing_of_them():
    bare = replica((KEYS[0], b"near", 1), near=True)
    answer, effects = compare(bare)
    assert answer.status == S.BUSY
    assert [sent.version for sent in handed_in(effects)] == [Version(5, 1)]


# -- the floor ---------------------------------------------------------------------------------------------------------


def test_old_block_of_a_late_returner_is_dropped_and_not_brought_back():
    """Its tombstone may be forgotten: what lies at or below the floor and the primary lacks is gone for good."""
    bare = replica((KEYS[0], b"deleted long ago", 1), (KEYS[1], b"above", 4))
    answer, effects = compare(bare, Span(6, 1, 5), floor=Version(5, 3))
    assert answer.status == S.LEARNING
    reply, effects = offer(bare)
    assert reply.wanted == []
    assert held(bare) == {KEYS[1]}
    assert [sent.key for sent in handed_in(effects)] == [KEYS[1]]


def test_floor_alone_drops_nothing_that_the_primary_has_processed():
    bare = replica((KEYS[0], b"kept", 1))
    compare(bare, Span(5, 1, 1), floor=Version(5, 1))
    assert held(bare) == {KEYS[0]}


def test_old_block_is_dropped_where_spans_are_compared_too():
    bare = replica((KEYS[0], b"x", 1), (KEYS[1], b"y", 2))
    bare.core.state.directory.raise_floor(SHARD, Version(5, 1))
    answer, effects = compare(bare, Span(5, 2, 2), floor=Version(5, 1))
    assert answer.status == S.SPANS
    assert (held(bare), handed_in(effects)) == ({KEYS[1]}, [])


def test_blocks_of_epochs_that_both_have_forgotten_stay():
    """A vector names the latest epochs only; both floors cover the older ones, and nothing says that these are gone."""
    bare = replica((KEYS[0], b"very old", 1))
    bare.core.state.directory.raise_floor(SHARD, Version(5, 9))
    answer, effects = compare(bare, Span(6, 1, 5), floor=Version(5, 9))
    assert answer.status == S.SPANS
    assert (held(bare), handed_in(effects)) == ({KEYS[0]}, [])


# -- heads -------------------------------------------------------------------------------------------------------------


def learner(*writes: tuple[bytes, bytes, int], spans: tuple[Span, ...] = (Span(6, 1, 9),)) -> Bare:
    """A new replica with near copies that has been told the primary's vector and is now offered heads."""
    bare = replica(*writes, near=True)
    assert compare(bare, *spans)[0].status == S.LEARNING
    return bare


def test_learner_wants_what_is_newer_and_not_what_it_evicted():
    bare = learner((KEYS[3], b"newer here", 9))
    bare.core.state.directory.remember_evicted(KEYS[1], Version(6, 5), replaced=False)
    heads = [OfferHead(key, Version(6, 5), checksum(b"x")) for key in KEYS[:3]]
    assert offer(bare, *heads, OfferHead(KEYS[3], Version(4, 1), checksum(b"x")))[0].wanted == [0, 2]


def test_equal_bytes_are_adopted_instead_of_fetched():
    bare = learner((KEYS[0], b"mine", 1))
    reply, _ = offer(bare, OfferHead(KEYS[0], Version(6, 5), checksum(b"mine")))
    assert reply.wanted == []
    assert bare.core.state.directory.get(KEYS[0]).version == Version(6, 5)
    assert bare.live_slots() == 1


def test_equal_bytes_of_a_waiting_hint_are_adopted():
    bare = learner()
    bare.step(ev.PeerDown(bare.now, "b"))
    bare.put([KEYS[0]], [b"mine"], session=False)
    assert offer(bare, OfferHead(KEYS[0], Version(6, 5), checksum(b"mine")))[0].wanted == []
    assert bare.core.state.directory.get(KEYS[0]).version == Version(6, 5)
    assert bare.live_slots() == 1


def test_where_blocks_expire_equal_bytes_are_fetched_since_only_the_primary_says_when():
    bare = learner((KEYS[0], b"mine", 1))
    scope = KEYS[0][:8]
    bare.core.state.view.policies[scope] = Namespace("ns", expiry_ms=1000)
    assert offer(bare, OfferHead(KEYS[0], Version(6, 5), checksum(b"mine")))[0].wanted == [0]
    assert bare.live_slots() == 1


def test_after_the_last_page_what_the_primary_processed_and_did_not_offer_is_dropped():
    spans = (Span(5, 1, 2), Span(6, 1, 1))
    bare = learner((KEYS[0], b"deleted", 1), (KEYS[1], b"alive", 2), (KEYS[2], b"only here", 3), spans=spans)
    effects = offer(bare, OfferHead(KEYS[1], Version(5, 2), checksum(b"alive")), last=False)[1]
    assert (held(bare), handed_in(effects)) == (set(KEYS[:3]), [])
    effects = offer(bare, OfferHead(KEYS[3], Version(6, 1), checksum(b"x")))[1]
    assert held(bare) == {KEYS[1], KEYS[2]}
    assert [sent.key for sent in handed_in(effects)] == [KEYS[2]]


def test_copy_that_is_newer_than_what_the_primary_offers_is_handed_in():
    bare = learner((KEYS[0], b"mine", 3), spans=(Span(5, 1, 1),))
    reply, effects = offer(bare, OfferHead(KEYS[0], Version(5, 1), checksum(b"older")))
    assert reply.wanted == []
    assert [(sent.key, sent.version) for sent in handed_in(effects)] == [(KEYS[0], Version(5, 3))]


def test_old_copy_of_the_current_epoch_goes_too_and_a_write_of_the_stream_stays():
    """The primary never changed while this replica was away; what it stamps now arrives between the pages."""
    bare = replica()
    bare.own(primary="c", replicas=("c",), in_sync=("c",), epoch=7)
    fetch = all_of(bare.get([KEYS[0]], session=False), fx.Fetch)[0]
    bare.unref(only(bare.fetched(fetch, b"deleted since", version=Version(7, 1)), fx.GetDone).slots)
    bare.own(primary="b", replicas=("b", "a"), in_sync=("b",), epoch=7, shards=ONLY_SHARD)
    assert compare(bare, Span(7, 1, 5), floor=Version(7, 3))[0].status == S.LEARNING
    bare.receive((item(KEYS[1], b"fresh", 6, authority=7, epoch=7), b"fresh"))
    effects = offer(bare)[1]
    assert (held(bare), handed_in(effects)) == ({KEYS[1]}, [])


# -- adopting ----------------------------------------------------------------------------------------------------------


def test_adopted_vector_is_ours_and_so_is_the_floor():
    bare = replica((KEYS[0], b"mine", 1))
    compare(bare, Span(5, 1, 3), Span(6, 1, 2))
    answer, _ = compare(bare, Span(5, 1, 3), Span(6, 1, 2), floor=Version(4, 4), adopt=True)
    assert answer == VectorAnswer(int(S.SPANS), 0, [Span(5, 1, 3), Span(6, 1, 2)])
    assert bare.core.state.directory.floors[SHARD] == Version(4, 4)


def test_nothing_is_adopted_that_was_not_compared_in_this_epoch():
    bare = replica()
    assert compare(bare, Span(5, 1, 3), adopt=True)[0].status == S.BUSY
    compare(bare, Span(5, 1, 3))
    bare.own(primary="b", replicas=("b", "a"), in_sync=("b",), epoch=8, shards=ONLY_SHARD)
    assert compare(bare, Span(5, 1, 3), adopt=True, authority=8)[0].status == S.BUSY
    assert bare.core.put.stream.vector(SHARD).spans() == []


def test_learner_is_not_complete_while_its_surplus_is_under_way():
    bare = learner((KEYS[0], b"mine", 1))
    effects = offer(bare)[1]
    assert compare(bare, Span(6, 1, 9), adopt=True)[0].status == S.BUSY
    answered(bare, effects, R.STORED)
    assert compare(bare, Span(5, 1, 1), Span(6, 1, 9))[0].status == S.SPANS


# -- read repair -------------------------------------------------------------------------------------------------------


def test_replica_that_noticed_that_it_is_behind_asks_its_primary_to_compare():
    bare = replica()
    bare.core.put.learner.ask_to_compare(SHARD)
    (send,) = sends(bare.tick(1), Vector)
    assert (send.peer, send.message.items[0].spans, send.message.items[0].authority) == ("b", [], 7)
    assert bare.core.state.counters["read_repairs"] == 1


def test_nobody_else_asks():
    bare = replica(near=True)
    bare.core.put.learner.ask_to_compare(SHARD + 1)  # of c alone
    bare.own(shards=ONLY_SHARD, epoch=9)
    bare.core.put.learner.ask_to_compare(SHARD)  # our own
    assert bare.core.state.counters["read_repairs"] == 0


def test_primary_that_is_asked_compares_that_replica_and_no_other_node():
    bare = Bare().join().own(replicas=("a",), in_sync=("a",))
    bare.own(replicas=("a", "b"), in_sync=("a", "b"), shards=ONLY_SHARD)
    bare.up("b", "c")
    bare.core.put.repair.lanes.clear()
    bare.core.put.repair.complete[SHARD] = {"b"}
    answer, effects = compare(bare, authority=5)
    assert answer.status == S.BUSY
    assert [(send.peer, send.message.items[0].authority) for send in sends(effects, Vector)] == [("b", 5)]
    answer, effects = compare(bare, authority=5, peer="c")
    assert (answer.status, sends(effects, Vector)) == (S.BUSY, [])


# -- whole clusters ----------------------------------------------------------------------------------------------------


def test_deleted_block_does_not_come_back_with_a_node_that_was_away_for_too_long():
    """The backup slept through the delete and through the life of its tombstone."""
    world = World("abc", seed=7, tombstone_retention_ns=1_500_000_000, hint_age_max_ns=500_000_000)
    world.settle()
    world.run_ms(2500)
    name = world.primary(SHARD)
    (backup,) = set(world.nodes[name].core.state.view.owners[SHARD].replicas) - {name}
    assert world.put_now(name, KEYS[:2], [b"deleted", b"kept"], min_copies=2)[0].status is PutStatus.STORED
    for other in set("abc") - {backup}:
        world.cut(backup, other)
    world.isolate_coordinator(backup)
    world.put_now(name, KEYS[:1], delete=True)
    world.run_ms(3000)
    new = world.primary(SHARD)
    assert world.nodes[new].core.state.directory.get(KEYS[0]) is None
    assert world.nodes[new].core.state.directory.floors[SHARD] > NO_VERSION
    assert world.nodes[backup].core.state.directory.get(KEYS[0]) is not None
    world.heal()
    world.run_ms(6000)
    for reader in "abc":
        found = world.get_now(reader, KEYS[:2])
        assert [data for _, data in found] == [None, b"kept"], reader
        assert found[0][0].reason == MissReason.ABSENT
    owner = world.nodes["a"].core.state.view.owners[SHARD]
    assert not any(world.nodes[holder].core.state.directory.get(KEYS[0]) for holder in owner.replicas)


def test_behind_replica_that_a_session_read_finds_is_repaired():
    """Its stream message was swallowed without a word: only the reader's token tells."""
    world = World("abc", seed=7)
    world.settle()
    world.run_ms(2500)
    name = world.primary(SHARD)
    (backup,) = set(world.nodes[name].core.state.view.owners[SHARD].replicas) - {name}
    (first,) = world.put_now(name, KEYS[:1], [b"old"], min_copies=2)
    node = world.nodes[backup]
    (second,) = world.put_now(name, KEYS[:1], [b"new"], min_copies=2)
    # As if the second write had never arrived, and nobody noticed.
    entry = node.core.state.directory.get(KEYS[0])
    node.core.state.directory.get(KEYS[0]).version = first.version
    node.core.put.stream.vector(SHARD).ranges[second.version.epoch] = [[first.version.seq, first.version.seq]]
    assert entry.version < second.version
    ((info, data),) = world.get_now(backup, KEYS[:1], floors=[second.version])
    assert (info.version, data) == (second.version, b"new")
    assert node.core.state.counters["read_repairs"] >= 1
    world.run_ms(200)
    assert node.core.state.directory.get(KEYS[0]).version == second.version
