"""Each oracle refuses a history that breaks its law and accepts one beside it that does not."""

from __future__ import annotations

import pytest

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.view import encode_record, owner_key
from emberkv.messages import (
    Offer,
    PutFlag,
    PutItem,
    PutReply,
    PutRequest,
    ReplicaItem,
    Replicate,
    ReplicateReply,
    ShardOwner,
)
from emberkv.sim.engine import Fault, Options, Violation
from emberkv.sim.history import Put
from emberkv.sim.lincheck import StrongOp
from emberkv.sim.oracle import Oracle
from emberkv.sim.process import Ack
from emberkv.types import Level, MissReason, PutOutcome, PutStatus, Version, checksum
from harness.sim_stage import KEY, MISSED, SHARD, Stage

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)
LATER = Version(2, 1)


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def served(stage: Stage) -> Stage:
    """Node a is primary of the key's shard under epoch 1, with b and c."""
    for name in "abc":
        stage.alive(name)
    stage.beat("a")
    stage.own("a", 1)
    for name in "abc":
        stage.processes[name].open_lease()
        stage.know(name)
    stage.pass_ms(1500)
    stage.beat("a")
    return stage


def refused(name: str) -> pytest.RaisesExc[Violation]:
    return pytest.raises(Violation, match=f"^{name}: ")


def oracle_of(stage: Stage, name: str) -> Oracle:
    return next(oracle for oracle in stage.oracles.oracles if type(oracle).__name__ == name)


def at_end(stage: Stage, name: str) -> None:
    oracle_of(stage, name).at_end()


# -- P1, versions --------------------------------------------------------------------------------------------------


def test_bytes_that_nobody_put_are_refused(served: Stage) -> None:
    put = served.put(version=V1)
    served.get(put, V1)
    with refused("RightBytes"):
        served.get(None, V1, data=put.data[:-1] + b"?")


def test_bytes_of_another_key_are_refused(served: Stage) -> None:
    other = served.put(version=V1, key=b"scope..1" + checksum(b"other") * 2)
    with refused("RightBytes"):
        served.get(None, V2, data=other.data)


def test_one_version_names_one_content(served: Stage) -> None:
    first = served.put(version=V1, holders="b")
    served.get(first, V1)
    with refused("OneContent"):
        served.put(version=V1)


def test_one_version_names_one_content_in_streams_too(served: Stage) -> None:
    first, second = served.put(version=V1, holders="b"), served.put(version=V2, holders="b")
    served.stream("a", "c", first, V1, authority=1)
    with refused("OneContent"):
        served.stream("a", "c", second, V1, authority=1)


# -- P3 ------------------------------------------------------------------------------------------------------------


def test_an_epoch_is_given_to_one_life(served: Stage) -> None:
    served.own("a", 1)  # the same one again: its record was reconciled
    with refused("OneVoice"):
        served.own("b", 1)


def test_nobody_speaks_under_an_epoch_that_was_not_given_to_it(served: Stage) -> None:
    put = served.put(version=V1, holders="bc")
    with refused("OneVoice"):
        served.stream("b", "c", put, V1, authority=1)
    offer = Offer(SHARD, 7, [])
    with refused("OneVoice"):
        served.tell("effect", "a", fx.Send("b", 1, offer, []))


def test_who_learned_of_a_higher_epoch_takes_nothing_from_a_lower_one(served: Stage) -> None:
    put = served.put(version=V1, holders="b")
    served.processes["a"].core.lease.deadline_ns = 0
    served.own("c", 2)
    served.stream("a", "b", put, V2, authority=1)  # b has not heard of it yet
    served.know("b")
    with refused("OneVoice"):
        served.stream("a", "b", put, V3, authority=1)


def test_an_old_primarys_word_is_no_acknowledgement(served: Stage) -> None:
    item = PutItem(KEY[8:], b"x" * 24, 100)
    begin = ev.PutBegin(served.now, 77, [KEY], [item], 0, True, True, 1, "")
    served.tell("effect", "b", fx.Send("a", 5, PutRequest([item], scope=KEY[:8]), []))
    reply = PutReply([PutOutcome(PutStatus.STORED, V1, 1)], [1])
    served.tell("event", "b", ev.PutAnswered(served.now, "a", 5, reply))
    served.tell("ack", "b", Ack(begin, reply.outcomes, []))  # nothing newer is known: fine
    served.processes["a"].core.lease.deadline_ns = 0
    served.own("c", 2)
    served.know("b")
    served.tell("event", "b", ev.PutAnswered(served.now, "a", 5, reply))
    with refused("OneVoice"):
        served.tell("ack", "b", Ack(begin, reply.outcomes, []))


def test_two_open_gates_are_refused(served: Stage) -> None:
    served.processes["a"].core.lease.deadline_ns = 0
    served.own("b", 2)  # a's lease is over: one gate
    served.processes["a"].open_lease()
    with refused("OneGate"):
        served.own("c", 3)


def test_two_open_gates_are_excused_while_a_clock_stood_still(served: Stage) -> None:
    served.waivers["P3b"] = served.now
    served.own("b", 2)


def test_a_gate_that_is_closed_for_a_hand_over_is_not_open(served: Stage) -> None:
    served.processes["a"].core.state.closed[SHARD] = 1
    served.own("b", 2)


def test_nobody_acknowledges_a_whole_lease_after_its_last_heartbeat(served: Stage) -> None:
    served.put(version=V1)
    served.pass_ms(599)
    with refused("OneGate"):
        served.put(version=V2)


def test_acknowledgements_follow_the_epochs(served: Stage) -> None:
    served.processes["a"].core.lease.deadline_ns = 0
    served.beat("b")
    served.own("b", 2)
    served.put("b", version=LATER)
    with refused("OneGate"):
        served.put("a", version=V2)


# -- P6a -----------------------------------------------------------------------------------------------------------


def test_a_token_is_not_served_from_below(served: Stage) -> None:
    old, new = served.put(version=V1), served.put(version=V2)
    served.get(new, V2, token="t", floor=V2)
    served.get(old, V1, token="t")  # its token has forgotten the key: there is no floor
    with refused("Session"):
        served.get(old, V1, token="t", floor=V2)


def test_a_put_that_was_over_does_not_come_back_under_a_higher_version(served: Stage) -> None:
    old = served.put(status=PutStatus.ACCEPTED, level=Level.EVENTUAL)
    new = served.put(version=V1)
    served.get(new, V1, token="t")
    with refused("Session"):
        served.get(old, V2, token="t", floor=V1)


def test_a_put_that_was_not_over_may_come_later(served: Stage) -> None:
    adrift = served.put(status=PutStatus.UNKNOWN)
    new = served.put(version=V1)
    served.get(new, V1, token="t")
    served.get(adrift, V2, token="t", floor=V1)


def test_a_queued_put_is_over_and_must_not_come_later(served: Stage) -> None:
    queued = served.put(status=PutStatus.QUEUED)
    new = served.put(version=V1)
    served.get(new, V1, token="t")
    with refused("Session"):
        served.get(queued, V2, token="t", floor=V1)


def test_a_put_may_come_back_if_the_later_one_was_lost_with_its_primary(served: Stage) -> None:
    old = served.put(status=PutStatus.ACCEPTED, level=Level.EVENTUAL)
    new = served.put(version=V1, token="t", holders="b")
    served.processes["a"].core.lease.deadline_ns = 0
    served.own("c", 2)  # c did not hold the later put, b did
    served.get(old, LATER, token="t", floor=V1)
    assert new.stored == V1


def test_a_taker_that_held_the_later_put_must_keep_it(served: Stage) -> None:
    old = served.put(status=PutStatus.ACCEPTED, level=Level.EVENTUAL)
    served.put(version=V1, token="t", holders="b")
    served.processes["a"].core.lease.deadline_ns = 0
    served.own("b", 2)
    with refused("Session"):
        served.get(old, LATER, token="t", floor=V1)


# -- P6b, P6c ------------------------------------------------------------------------------------------------------


def test_an_acknowledged_put_is_found(served: Stage) -> None:
    served.get(None, reason=MissReason.ABSENT)
    served.put(version=V1)
    served.get(None, reason=MissReason.DEADLINE)
    with refused("Acknowledged"):
        served.get(None, reason=MissReason.ABSENT)


def test_an_acknowledged_put_need_not_be_found_after_its_primary_was_lost(served: Stage) -> None:
    served.put(version=V1)
    served.kill("a")
    served.get(None, name="b", reason=MissReason.ABSENT)


def test_deleted_says_that_somebody_deleted(served: Stage) -> None:
    served.put(version=V1)
    with refused("Acknowledged"):
        served.get(None, V2, reason=MissReason.DELETED)
    delete = served.put(version=V3, delete=True)
    served.get(delete, V3)


def test_copies_that_were_acknowledged_must_have_been_seen(served: Stage) -> None:
    served.put(version=V1, min_copies=2, copies=2, holders="b")
    with refused("Copies"):
        served.put(version=V2, min_copies=2, copies=2)


def test_copies_survive_the_loss_of_one_less(served: Stage) -> None:
    put = served.put(version=V1, min_copies=2, copies=2, holders="b")
    served.processes["b"].hold(put, V1)
    served.kill("a")
    copies = oracle_of(served, "Copies")
    copies.at_end()
    entry = served.processes["b"].core.state.directory.get(KEY)
    served.processes["b"].core.state.directory.remove(entry)
    with refused("Copies"):
        copies.at_end()
    served.kill("b")
    copies.at_end()  # both holders are gone: that was not promised


# -- deletes, PENDING, evicted -------------------------------------------------------------------------------------


def deleted_everywhere(stage: Stage) -> tuple[Put, Put]:
    put = stage.put(version=V1, holders="bc")
    delete = stage.put(version=V2, delete=True, holders="bc")
    return put, delete


def test_no_session_read_returns_what_was_deleted_everywhere(served: Stage) -> None:
    put, _ = deleted_everywhere(served)
    with refused("Deleted"):
        served.get(put, V3, name="b")


def test_a_delete_that_one_replica_lacks_may_not_be_seen_there(served: Stage) -> None:
    put = served.put(version=V1, holders="bc")
    served.put(version=V2, delete=True, holders="b")
    served.get(put, V1, name="c")


def test_a_reader_that_does_not_know_the_replicas_is_not_judged(served: Stage) -> None:
    put, _ = deleted_everywhere(served)
    served.processes["b"].core.lease.deadline_ns = 0
    served.get(put, V1, name="b")


def test_no_replica_keeps_what_was_deleted_everywhere(served: Stage) -> None:
    put, delete = deleted_everywhere(served)
    served.pass_ms(1)
    served.processes["b"].hold(delete, V2)
    at_end(served, "Deleted")
    served.processes["b"].hold(put, V3)
    with refused("Deleted"):
        at_end(served, "Deleted")


def test_session_reads_see_stamped_blocks_only(served: Stage) -> None:
    put = served.put(status=PutStatus.ACCEPTED, level=Level.EVENTUAL)
    served.get(put, level=Level.EVENTUAL)
    with refused("NoPending"):
        served.get(put)


@pytest.mark.parametrize("fill", [False, True])
def test_repair_brings_nothing_back_that_was_evicted(served: Stage, fill: bool) -> None:
    put = served.put(version=V1, holders="b")
    node = served.processes["b"]
    node.hold(put, V1)
    node.core.state.directory.evict(node.core.state.directory.get(KEY))
    items = [served.item(put, V1, 1)]
    served.tell("event", "b", ev.ReplicaBegin(served.now, 900, "a", items, fill))
    node.hold(put, V1)
    done = fx.ReplicaDone(900, ReplicateReply([0], [0]))
    if not fill:
        served.tell("effect", "b", done)  # a fresh write is no repair
        return
    with refused("NotFetchedBack"):
        served.tell("effect", "b", done)


# -- strong --------------------------------------------------------------------------------------------------------


def test_strong_histories_are_judged_at_the_end(served: Stage) -> None:
    oracle = oracle_of(served, "StrongOrder")
    served.history.strong.append(StrongOp("write", "k", 1, 0, 1))
    oracle.at_end()
    served.history.strong.append(StrongOp("read", "k", None, 2, 3))
    with refused("StrongOrder"):
        oracle.at_end()


# -- P2, P4 --------------------------------------------------------------------------------------------------------


def test_a_request_ends_by_its_deadline(served: Stage) -> None:
    served.get(None, reason=MissReason.DEADLINE, took_ms=170)
    with refused("InTime"):
        served.get(None, reason=MissReason.DEADLINE, took_ms=400)


def test_a_node_that_was_frozen_may_be_late(served: Stage) -> None:
    request = served.history.begin("client", "b", Level.SESSION, [KEY], 100.0)
    served.freeze("b")
    served.pass_ms(5000)
    served.processes["b"].paused = False
    served.tell("life", "b", "wake")
    served.pass_ms(1)
    served.history.get_ended(request, [MISSED], [None])


def test_a_read_is_answered_unless_its_node_died(served: Stage) -> None:
    lost = served.history.begin("client", "b", Level.SESSION, [KEY], 100.0)
    silent = served.history.begin("client", "c", Level.SESSION, [KEY], 100.0)
    served.kill("b")
    served.history.get_ended(lost, None, [])
    with refused("InTime"):
        served.history.get_ended(silent, None, [])


def test_no_request_is_left_open(served: Stage) -> None:
    oracle = oracle_of(served, "InTime")
    oracle.at_end()
    served.history.begin("client", "b", Level.SESSION, [KEY], 100.0)
    with refused("InTime"):
        oracle.at_end()


def test_shards_of_a_lost_node_are_taken_in_time(served: Stage) -> None:
    served.kill("a")
    served.pass_ms(500)
    served.own("b", 2, "bc")
    served.pass_ms(5000)


def test_shards_of_a_frozen_node_must_not_stay_its_own(served: Stage) -> None:
    served.freeze("a")
    with refused("TakenOver"):
        served.pass_ms(5000)


def test_other_faults_excuse_a_late_takeover(served: Stage) -> None:
    served.fault(Fault(0, "outage", "b", for_ms=9999))
    served.kill("a")
    served.pass_ms(5000)


def test_who_reaches_nobody_must_give_its_shards_up(served: Stage) -> None:
    served.pass_ms(5000)
    served.fault(Fault(0, "isolate", "a", for_ms=9999))
    with refused("GivenUp"):
        served.pass_ms(5000)


def test_who_reaches_nobody_may_keep_what_nobody_else_has() -> None:
    stage = Stage()
    for name in "abc":
        stage.alive(name)
    stage.own("a", 1, "a")
    stage.pass_ms(5000)
    stage.fault(Fault(0, "isolate", "a", for_ms=9999))
    stage.pass_ms(5000)


# -- P5, rest ------------------------------------------------------------------------------------------------------


def agreeing(stage: Stage) -> None:
    put = stage.put(version=V1, holders="bc")
    for name in "abc":
        stage.processes[name].hold(put, V1)


def test_replicas_hold_the_same_versions(served: Stage) -> None:
    agreeing(served)
    at_end(served, "Agreement")
    second = served.put(version=V2)
    for name in "abc":
        served.processes[name].core.put.stream.mark_applied(SHARD, V2)
    served.processes["a"].hold(second, V2)
    with refused("Agreement"):
        at_end(served, "Agreement")


def test_replicas_have_processed_the_same_writes(served: Stage) -> None:
    agreeing(served)
    served.processes["b"].core.put.stream.mark_applied(SHARD, V3)
    with refused("Agreement"):
        at_end(served, "Agreement")


def test_a_copy_may_be_missing_where_it_was_evicted(served: Stage) -> None:
    agreeing(served)
    directory = served.processes["b"].core.state.directory
    directory.evict(directory.get(KEY))
    at_end(served, "Agreement")
    directory.evicted.clear()
    directory.evictions = 0  # as if it had only been lost
    with refused("Agreement"):
        at_end(served, "Agreement")


def settled(stage: Stage) -> None:
    for name in "abc":
        stage.alive(name)
    stage.options = Options(nodes=3, factor=3)
    stage.own("a", 1)


def test_at_rest_every_shard_has_its_primary_and_its_replicas(served: Stage) -> None:
    settled(served)
    at_end(served, "Settled")
    served.kill("a")
    served.pass_ms(1000)
    served.alive("a", dead=True, by="b")
    with refused("Settled"):
        at_end(served, "Settled")


def test_at_rest_no_replica_is_still_learning(served: Stage) -> None:
    settled(served)
    owner = ShardOwner("a", 1, 1, ("a", "b", "c"), ("a", "b"))
    served.commit("a", {owner_key(SHARD): encode_record(owner)})
    with refused("Settled"):
        at_end(served, "Settled")


def test_at_rest_nothing_is_held(served: Stage) -> None:
    settled(served)
    agreeing(served)
    at_end(served, "Settled")
    entry = served.processes["b"].core.state.directory.get(KEY)
    assert entry is not None
    assert entry.slot is not None
    entry.slot.refs += 1
    with refused("Settled"):
        at_end(served, "Settled")


def test_at_rest_repair_is_quiet(served: Stage) -> None:
    served.tell("repair", "a", ("b", Offer(SHARD, 1, [])))
    with refused("Quiet"):
        at_end(served, "Quiet")
    served.pass_ms(5000)
    at_end(served, "Quiet")


# -- P8, no trivial success, no needless expiry --------------------------------------------------------------------


def test_bounds_are_looked_at(served: Stage) -> None:
    served.tell("life", "b", "start")
    served.processes["b"].core.put.hints.bytes = 1 << 60
    with refused("Bounds"):
        served.tell("life", "b", "start")


def many(stage: Stage, hits: int, misses: int) -> None:
    put = stage.put(version=V1)
    for _ in range(hits):
        stage.get(put, V1)
    for _ in range(misses):
        stage.get(None, reason=MissReason.DEADLINE)


@pytest.mark.parametrize(("hits", "misses", "good"), [(95, 5, True), (80, 20, False), (0, 100, False)])
def test_a_calm_cluster_serves_what_it_stored(served: Stage, hits: int, misses: int, good: bool) -> None:
    many(served, hits, misses)
    if good:
        at_end(served, "NotTrivial")
        return
    with refused("NotTrivial"):
        at_end(served, "NotTrivial")


def test_a_calm_cluster_stores_what_it_is_given(served: Stage) -> None:
    for number in range(50):
        served.beat("a")
        served.put(version=Version(1, number + 1))
    at_end(served, "NotTrivial")
    for _ in range(50):
        served.put(status=PutStatus.REFUSED)
    with refused("NotTrivial"):
        at_end(served, "NotTrivial")


def test_nobody_is_expired_within_a_ttl_of_its_heartbeat(served: Stage) -> None:
    served.kill("a")
    served.pass_ms(599)
    with refused("NoNeedlessExpiry"):
        served.alive("a", dead=True, by="b")


def test_nobody_healthy_is_expired(served: Stage) -> None:
    served.pass_ms(700)
    with refused("NoNeedlessExpiry"):
        served.alive("a", dead=True, by="b")


def test_a_life_that_is_over_is_expired_rightly_beside_the_next_one(served: Stage) -> None:
    served.pass_ms(700)
    served.processes["a"].incarnation = b"the next life..."
    served.alive("a", dead=True, by="b")


def test_who_is_gone_or_cut_off_is_expired_rightly(served: Stage) -> None:
    served.kill("a")
    served.beat("c")
    served.fault(Fault(0, "away", "c", for_ms=2000))
    served.pass_ms(700)
    served.alive("a", dead=True, by="b")
    served.alive("c", dead=True, by="b")


def test_a_shard_goes_to_a_replica_that_was_in_sync(served: Stage) -> None:
    served.commit("a", {owner_key(SHARD): encode_record(ShardOwner("a", 1, 1, ("a", "b", "c"), ("a", "b")))})
    served.kill("a")
    served.processes["a"].core.lease.deadline_ns = 0
    served.pass_ms(610)
    with refused("Heir"):
        served.own("c", 2, "bc")


def test_a_shard_goes_elsewhere_when_nobody_in_sync_can_take_it(served: Stage) -> None:
    served.commit("a", {owner_key(SHARD): encode_record(ShardOwner("a", 1, 1, ("a", "b", "c"), ("a", "b")))})
    served.kill("a")
    served.processes["a"].core.lease.deadline_ns = 0
    served.processes["b"].core.lease.deadline_ns = 0
    served.pass_ms(610)
    served.own("c", 2, "bc")


def test_a_live_replica_is_dropped_only_when_enough_are_in_sync_without_it() -> None:
    stage = Stage("abcd", Options(nodes=4, factor=2))
    for name in "abcd":
        stage.alive(name)
    stage.own("a", 1, "abc")
    stage.commit("a", {owner_key(SHARD): encode_record(ShardOwner("a", 1, 1, ("a", "c"), ("a", "c")))})
    with refused("NeverFewer"):
        stage.commit("a", {owner_key(SHARD): encode_record(ShardOwner("a", 1, 1, ("a", "d"), ("a",)))})


# -- expiry, relays ------------------------------------------------------------------------------------------------


def test_what_has_expired_is_not_served(served: Stage) -> None:
    served.history.expiry_ms = 1000
    put = served.put(version=V1, key=b"scope..2" + checksum(b"short") * 2)
    served.pass_ms(900)
    served.get(put, V1, key=put.key)
    served.pass_ms(1000)
    with refused("Expired"):
        served.get(put, V1, key=put.key)


def test_a_wall_clock_that_jumped_excuses_expiry(served: Stage) -> None:
    served.history.expiry_ms = 1000
    served.fault(Fault(0, "wall-jump", "b"))
    put = served.put(version=V1, key=b"scope..2" + checksum(b"short") * 2)
    served.pass_ms(5000)
    served.get(put, V1, key=put.key)


def test_a_put_is_relayed_once(served: Stage) -> None:
    item = PutItem(KEY[8:], b"x" * 24, 100)
    relayed = PutRequest([item], scope=KEY[:8], flags=int(PutFlag.FORWARD | PutFlag.RELAY))
    served.tell("event", "b", ev.PutBegin(served.now, 1, [KEY], [item], 0, True, True, 1, ""))
    served.tell("effect", "b", fx.Send("c", 1, relayed, []))  # a client's put: the first hop
    served.tell("event", "c", ev.PutBegin(served.now, 1, [KEY], [item], 0, True, True, 1, "b", relay=True))
    with refused("OneHop"):
        served.tell("effect", "c", fx.Send("b", 1, relayed, []))


# -- all together --------------------------------------------------------------------------------------------------


def test_every_oracle_states_its_law(served: Stage) -> None:
    laws = served.oracles.laws()
    assert len(laws) == len(served.oracles.oracles)
    assert all(laws.values())
    promises = " ".join(laws.values())
    assert all(promise in promises for promise in ("P1", "P2", "P3a", "P3b", "P4", "P5", "P6a", "P6b", "P6c", "P8"))


def test_an_item_that_is_only_processed_names_no_content(served: Stage) -> None:
    put = served.put(version=V1, holders="b")
    item = ReplicaItem(put.key, 1, V1, b"\0" * 24, b"\0" * 16, skip=True)
    served.tell("effect", "a", fx.Send("c", 1, Replicate([item]), []))
    assert ("c", 1) not in served.oracles.evidence.copies[KEY]
