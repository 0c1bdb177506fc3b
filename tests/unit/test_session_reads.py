"""Session reads: nothing below the floor, and nothing that only a near copy vouches for."""

import pytest

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.directory import make_entry
from emberkv.core.view import encode_record, owner_key
from emberkv.messages import BlockInfo, ShardOwner, Vector
from emberkv.types import NO_VERSION, SHARDS, EntryState, MissReason, PutStatus, Version, checksum, shard_of
from harness.bare import TTL, Bare, all_of, item, live, only, sends
from harness.world import World, key_of

K1, K2 = key_of(1), key_of(2)
V1, V2, V3 = Version(5, 1), Version(5, 2), Version(5, 3)
R = MissReason


def said(reason: MissReason, version: Version = NO_VERSION) -> BlockInfo:
    return BlockInfo(int(reason), version)


def done(effects: list[fx.Effect]) -> fx.GetDone:
    return only(effects, fx.GetDone)


def outcome(effects: list[fx.Effect]) -> tuple[int, Version]:
    (info,) = done(effects).infos
    return info.reason, info.version


def asked(effects: list[fx.Effect]) -> fx.Fetch:
    return only(effects, fx.Fetch)


def speaker(role: str = "primary") -> Bare:
    """Node a, which holds K1 at V2 and may speak for it."""
    if role == "primary":
        bare = Bare().join().own()
        bare.put([K1], [b"old"])
        bare.put([K1], [b"new"], op=2)
        return bare
    bare = Bare().join().own(primary="b", replicas=("b", "a"), in_sync=("b", "a"))
    bare.receive((item(K1, b"new", 2), b"new"))
    return bare


def near(version: Version = V2) -> Bare:
    """Node a, no replica of anything, with a near copy of K1; b is primary, c the other replica."""
    bare = Bare().join().own(primary="b", replicas=("b", "c"), in_sync=("b", "c"))
    bare.records(("live/d", live("d", 1)))
    directory = bare.core.state.directory
    slot = directory.reserve(4)
    bare.tier.write(slot, b"near")
    directory.install(
        make_entry(K1, state=EntryState.COMMITTED, version=version, put_id=b"", checksum=checksum(b"near"), slot=slot)
    )
    return bare


# -- who may speak for the key ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["primary", "backup"])
def test_copy_at_or_above_the_floor_is_served_at_once(role):
    for floor in (NO_VERSION, V1, V2):
        bare = speaker(role)
        found = done(bare.get([K1], floors=[floor]))
        assert found.infos[0].version == V2
        assert bare.tier.read(found.slots[0]) == b"new"


def test_copy_below_the_floor_is_not_served_and_the_primary_is_asked_for_a_better_one():
    bare = speaker("backup")
    fetch = asked(bare.get([K1], floors=[V3]))
    assert (fetch.peer, fetch.floors, fetch.session, fetch.if_newer, fetch.relay) == ("b", [V3], True, False, False)
    found = done(bare.fetched(fetch, b"newest", version=V3))
    assert (found.infos[0].version, bare.tier.read(found.slots[0])) == (V3, b"newest")


def test_floor_that_nobody_reaches_is_a_miss_that_says_behind_and_what_there_is():
    bare = speaker("backup")
    ended = bare.fetched(asked(bare.get([K1], floors=[V3])), said(R.BEHIND, V2))
    assert outcome(ended) == (R.BEHIND, V2)
    assert bare.live_slots() == 1


def test_answer_below_the_floor_is_not_served_whoever_gives_it():
    bare = speaker("backup")
    assert outcome(bare.fetched(asked(bare.get([K1], floors=[V3])), b"old", version=V2)) == (R.BEHIND, V2)
    assert bare.live_slots() == 1


def test_floors_are_per_key():
    bare = Bare().join().own(replicas=("a",), in_sync=("a",))
    bare.put([K1, K2], [b"one", b"two"])
    found = done(bare.get([K1, K2], floors=[V1, V3], local_only=True))
    assert [info.reason for info in found.infos] == [R.NONE, R.BEHIND]


def test_behind_replica_asks_to_be_compared():
    """Read repair: the session knows a write that this replica has missed."""
    bare = speaker("backup")
    bare.up("b")
    assert [send.peer for send in sends(bare.get([K1], floors=[V3]), Vector)] == ["b"]
    assert not sends(bare.get([K1], op=901, floors=[V2]), Vector)


def test_tombstone_at_the_floor_is_deleted_and_final_below_it_is_behind():
    bare = Bare().join().own()
    bare.put([K1], [b""], delete=True)
    for floor, reason in ((NO_VERSION, R.DELETED), (V1, R.DELETED), (V2, R.BEHIND)):
        assert outcome(bare.get([K1], floors=[floor], local_only=True)) == (reason, V1)
    assert asked(bare.get([K1], floors=[V2])).floors == [V2]


def test_delete_that_the_session_has_seen_past_is_not_final():
    bare = Bare().join().own(primary="b", replicas=("b", "c"), in_sync=("b", "c"))
    second = asked(bare.fetched(asked(bare.get([K1], floors=[V3])), said(R.DELETED, V2)))
    assert second.peer == "c"
    found = done(bare.fetched(second, b"put again", version=V3))
    assert bare.tier.read(found.slots[0]) == b"put again"


def test_delete_at_the_floor_ends_the_read():
    bare = Bare().join().own(primary="b", replicas=("b", "c"), in_sync=("b", "c"))
    assert outcome(bare.fetched(asked(bare.get([K1], floors=[V2])), said(R.DELETED, V2))) == (R.DELETED, V2)


def test_primary_is_asked_before_the_others():
    bare = Bare().join().own(primary="c", replicas=("b", "c"), in_sync=("b", "c"))
    assert asked(bare.get([K1])).peer == "c"


# -- peers ask ---------------------------------------------------------------------------------------------------------


def test_peer_that_has_our_version_is_told_so_without_bytes():
    bare = speaker()
    (info,) = done(bare.get([K1], floors=[V2], if_newer=True, local_only=True)).infos
    assert (info.reason, info.version) == (R.CURRENT, V2)
    assert outcome(bare.get([K1], floors=[V1], if_newer=True, local_only=True)) == (R.NONE, V2)
    assert outcome(bare.get([K1], floors=[V3], if_newer=True, local_only=True)) == (R.BEHIND, V2)


def test_node_that_does_not_speak_for_the_key_says_behind_whatever_it_holds():
    bare = near()
    assert outcome(bare.get([K1], floors=[V1], local_only=True)) == (R.BEHIND, V2)
    assert outcome(bare.get([K2], local_only=True)) == (R.BEHIND, NO_VERSION)
    assert bare.live_slots() == 1


def test_learner_does_not_speak():
    bare = speaker("backup").own(primary="b", replicas=("b", "a"), in_sync=("b",), epoch=5)
    assert outcome(bare.get([K1], local_only=True)) == (R.BEHIND, V2)


def test_replica_that_restarted_since_the_record_was_written_does_not_speak():
    """The record still calls it in sync, but that was its last life: what it lacks says nothing."""
    bare = Bare()
    record = encode_record(ShardOwner("b", 1, 5, ("b", "a"), ("b", "a")))
    known = [(owner_key(shard), record) for shard in range(SHARDS)]
    effects = bare.records(("live/b", live("b", 1)), ("live/c", live("c", 1)), *known, full=True)
    bare.committed(only(effects, fx.Commit))
    assert outcome(bare.get([K1], local_only=True)) == (R.BEHIND, NO_VERSION)
    bare.own(primary="b", replicas=("b", "a"), in_sync=("b", "a"))  # written since: it has been compared
    assert outcome(bare.get([K1], local_only=True)) == (R.ABSENT, NO_VERSION)


def test_in_sync_replica_answers_peers_though_its_lease_has_lapsed():
    bare = speaker("backup")
    bare.now += 2 * TTL
    assert outcome(bare.get([K1], local_only=True)) == (R.NONE, V2)


def test_absent_answer_says_below_which_version_all_is_gone():
    bare = speaker()
    bare.core.state.directory.raise_floor(shard_of(K2), Version(4, 4))
    assert outcome(bare.get([K2], local_only=True)) == (R.ABSENT, Version(4, 4))


# -- near copies -------------------------------------------------------------------------------------------------------


def test_near_copy_is_validated_at_a_replica_without_fetching_its_bytes():
    bare = near()
    fetch = asked(bare.get([K1]))
    assert (fetch.peer, fetch.floors, fetch.if_newer) == ("b", [V2], True)
    found = done(bare.fetched(fetch, said(R.CURRENT, V2)))
    assert bare.tier.read(found.slots[0]) == b"near"
    bare.unref(found.slots)
    assert bare.live_slots() == 1


def test_near_copy_below_the_floor_is_not_even_offered():
    fetch = asked(near().get([K1], floors=[V3]))
    assert (fetch.floors, fetch.if_newer) == ([V3], False)


def test_newer_bytes_replace_the_near_copy():
    bare = near()
    found = done(bare.fetched(asked(bare.get([K1])), b"newer", version=V3))
    assert bare.tier.read(found.slots[0]) == b"newer"
    bare.unref(found.slots)
    assert bare.core.state.directory.get(K1).version == V3
    assert bare.live_slots() == 1


@pytest.mark.parametrize(
    ("answer", "served"),
    [
        (said(R.ABSENT), True),
        (said(R.ABSENT, V1), True),  # its floor is below ours
        (said(R.ABSENT, V2), False),  # the tombstone that ended ours may be forgotten
        (said(R.EVICTED, V1), True),
        (said(R.EVICTED, V2), True),  # it had to give up the very same
        (said(R.EVICTED, V3), False),  # there was something newer
        (said(R.DELETED, V3), False),
        (said(R.BEHIND, V1), False),
        (said(R.UNREACHABLE), False),
        (said(R.FENCED), False),
    ],
    ids=lambda value: f"{R(value.reason).label} {value.version.seq}" if isinstance(value, BlockInfo) else None,
)
def test_near_copy_is_served_exactly_when_a_replica_vouches_for_it(answer, served):
    bare = near()
    effects = bare.fetched(asked(bare.get([K1])), answer)
    while all_of(effects, fx.Fetch):
        effects = bare.fetched(asked(effects), said(R.UNREACHABLE))
    assert (done(effects).infos[0].reason == R.NONE) is served
    bare.unref(done(effects).slots)
    assert bare.live_slots() == (answer.reason != R.DELETED)


def test_vouched_copy_is_verified_like_any_other_and_a_bad_one_is_not_served():
    bare = near()
    verify = only(bare.fetched(asked(bare.get([K1], verify=True)), said(R.CURRENT, V2)), fx.Verify)
    found = done(bare.step(ev.Verified(bare.now, verify.op, [])))
    assert bare.tier.read(found.slots[0]) == b"near"
    bare.unref(found.slots)
    verify = only(bare.fetched(asked(bare.get([K1], verify=True)), said(R.CURRENT, V2)), fx.Verify)
    fetch = asked(bare.step(ev.Verified(bare.now, verify.op, [0])))
    assert outcome(bare.fetched(fetch, b"good", version=V2)) == (R.NONE, V2)
    assert bare.core.state.counters["bad_copies"] == 1


def test_read_ends_at_its_deadline_although_one_copy_is_vouched_for_already():
    bare = near()
    first, second = all_of(bare.get([K1, K2], verify=True, deadline_ms=100), fx.Fetch)
    doubtful = first if first.if_newer else second
    assert not all_of(bare.fetched(doubtful, said(R.CURRENT, V2)), fx.GetDone)
    ended = done(bare.tick(101))
    assert [info.reason for info in ended.infos][1] == R.DEADLINE
    bare.unref(ended.slots)
    assert not bare.core.reads.ops
    assert bare.live_slots() == 1


def test_near_copy_of_who_reaches_no_replica_is_not_served():
    bare = near()
    effects = bare.get([K1])
    while all_of(effects, fx.Fetch):
        effects = bare.fetched(asked(effects), said(R.UNREACHABLE))
    assert done(effects).slots == [None]
    assert done(effects).infos[0].reason in (R.UNREACHABLE, R.BEHIND)


def test_replica_whose_lease_lapsed_asks_and_serves_its_own_copy_only_if_it_reaches_nobody():
    bare = speaker("backup")
    bare.now += 2 * TTL
    fetch = asked(bare.get([K1]))
    assert (fetch.peer, fetch.if_newer, fetch.floors) == ("b", True, [V2])
    found = done(bare.fetched(fetch, said(R.UNREACHABLE)))
    assert bare.tier.read(found.slots[0]) == b"new"
    assert outcome(bare.fetched(asked(bare.get([K1], op=901)), b"newer", version=V3)) == (R.NONE, V3)
    deleted = bare.fetched(asked(bare.get([K1], op=902)), said(R.DELETED, V3))
    assert outcome(deleted) == (R.DELETED, V3)


def test_replica_that_reaches_nobody_serves_nothing_below_the_floor():
    bare = speaker("backup")
    bare.now += 2 * TTL
    assert outcome(bare.fetched(asked(bare.get([K1], floors=[V3])), said(R.UNREACHABLE)))[0] != R.NONE


# -- blocks without a version ------------------------------------------------------------------------------------------


def test_pending_bytes_are_never_served_to_a_session():
    bare = Bare().join().own(primary="b", replicas=("b", "c"), in_sync=("b", "c"))
    bare.put([K1], [b"pending"], session=False)
    effects = bare.fetched(asked(bare.get([K1])), b"pending elsewhere", version=NO_VERSION)
    while all_of(effects, fx.Fetch):
        effects = bare.fetched(asked(effects), said(R.PENDING))
    assert done(effects).slots == [None]
    assert bare.live_slots() == 1  # the hint


# -- nobody says it is absent without knowing --------------------------------------------------------------------------


def test_absent_needs_somebody_who_may_say_so():
    bare = Bare().join().own(primary="b", replicas=("b", "c"), in_sync=("b", "c"))
    effects = bare.get([K1])
    for _ in range(2):
        effects = bare.fetched(asked(effects), said(R.UNREACHABLE))
    assert outcome(effects)[0] == R.UNREACHABLE
    effects = bare.get([K1], op=901)
    for reason in (R.UNREACHABLE, R.ABSENT):
        effects = bare.fetched(asked(effects), said(reason))
    assert outcome(effects)[0] in (R.ABSENT, R.UNREACHABLE)
    assert done(effects).slots == [None]


def test_once_a_replica_has_spoken_a_former_replicas_copy_will_do():
    bare = Bare().join().own(primary="b", replicas=("b",), in_sync=("b",), former=("c",))
    second = asked(bare.fetched(asked(bare.get([K1], floors=[V1])), said(R.ABSENT)))
    assert (second.peer, second.session) == ("c", False)
    assert outcome(bare.fetched(second, b"kept", version=V1)) == (R.NONE, V1)


def test_former_replicas_copy_that_a_replica_has_outlived_will_not():
    for answer in (said(R.EVICTED, V2), said(R.ABSENT, V1)):
        bare = Bare().join().own(primary="b", replicas=("b",), in_sync=("b",), former=("c",))
        second = asked(bare.fetched(asked(bare.get([K1])), answer))
        assert outcome(bare.fetched(second, b"old", version=V1))[0] != R.NONE
        assert not bare.live_slots()


# -- over another node -------------------------------------------------------------------------------------------------


def cut_off() -> tuple[Bare, fx.Fetch]:
    """A read at near a node that reaches no replica, but d."""
    bare = near()
    bare.up("d")
    effects = bare.get([K1])
    for _ in range(2):
        effects = bare.fetched(asked(effects), said(R.UNREACHABLE))
    return bare, asked(effects)


def test_who_reaches_no_replica_asks_one_other_node_to_look():
    bare, relay = cut_off()
    assert (relay.peer, relay.relay, relay.session, relay.if_newer, relay.floors) == ("d", True, True, True, [V2])
    assert bare.core.state.counters["relayed_reads"] == 1
    found = done(bare.fetched(relay, said(R.CURRENT, V2)))
    assert bare.tier.read(found.slots[0]) == b"near"


def test_relay_is_asked_once_and_its_bytes_are_taken():
    bare, relay = cut_off()
    assert outcome(bare.fetched(relay, b"newer", version=V3)) == (R.NONE, V3)
    bare, relay = cut_off()
    ended = bare.fetched(relay, said(R.UNREACHABLE))
    assert not all_of(ended, fx.Fetch)
    assert done(ended).slots == [None]


def test_relay_has_the_time_that_is_left():
    _, relay = cut_off()
    assert relay.deadline_ns == 1_000_000_000 + 300_000_000


def test_relayed_read_looks_at_replicas_and_relays_no_further():
    bare = near()
    bare.up("d")
    effects = bare.get([K2], relayed=True)
    assert asked(effects).peer == "b"
    for _ in range(2):
        effects = bare.fetched(asked(effects), said(R.UNREACHABLE))
    assert outcome(effects)[0] == R.UNREACHABLE


def test_eventual_reads_and_peers_reads_are_not_relayed():
    bare = near()
    bare.up("d")
    effects = bare.get([K2], session=False)
    for _ in range(2):
        effects = bare.fetched(asked(effects), said(R.UNREACHABLE))
    assert done(effects).slots == [None]
    assert not all_of(bare.get([K2], op=901, local_only=True), fx.Fetch)


# -- whole clusters ----------------------------------------------------------------------------------------------------


def test_session_never_reads_below_what_it_wrote_wherever_it_asks():
    """Puts at one node, reads at another with the version as floor: the new value or a miss, never the old one."""
    world = World("abcd", seed=13)
    world.settle()
    world.run_ms(2500)
    floors: dict[bytes, Version] = {}
    last: dict[bytes, bytes] = {}
    keys = [key_of(number) for number in range(6)]
    hits = 0
    for number in range(120):
        key = world.rng.choice(keys)
        if number % 10 == 0:
            world.cut(*world.rng.sample("abcd", 2))
        if number % 25 == 24:
            world.heal()
            world.run_ms(100)
        value = b"%d" % number
        (put,) = world.put_now(world.rng.choice("abcd"), [key], [value], deadline_ms=300)
        if put.status is PutStatus.STORED:
            floors[key], last[key] = put.version, value
        if key in floors:
            ((info, data),) = world.get_now(world.rng.choice("abcd"), [key], floors=[floors[key]])
            assert info.reason != R.NONE or info.version >= floors[key]
            if info.version == floors[key] and info.reason == R.NONE:
                assert data == last[key]
                hits += 1
    assert hits > 60


def test_reader_beside_a_near_copy_does_not_miss_an_overwrite():
    world = World("abc", seed=5)
    world.settle()
    world.run_ms(2500)
    shard = shard_of(K1)
    primary = world.primary(shard)
    (near_node,) = set("abc") - set(world.nodes["a"].core.state.view.owners[shard].replicas)
    world.put_now(primary, [K1], [b"old"])
    assert world.get_now(near_node, [K1])[0][1] == b"old"
    assert world.nodes[near_node].core.state.directory.get(K1) is not None
    world.put_now(primary, [K1], [b"new"])
    assert world.get_now(near_node, [K1])[0][1] == b"new"
    world.put_now(primary, [K1], delete=True)
    assert world.get_now(near_node, [K1])[0][0].reason == R.DELETED
