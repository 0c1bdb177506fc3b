"""Reads: near copy, replicas, a miss with its reason. Session reads are in test_session_reads.py."""

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.messages import BlockInfo
from emberkv.types import NO_VERSION, MissReason, Namespace, Version, checksum, shard_of
from harness.bare import MS, Bare, all_of, only
from harness.world import World, key_of

K1, K2 = key_of(1), key_of(2)
FIRST = Version(5, 1)


def replica(*, replicas: tuple[str, ...] = ("b", "c"), former: tuple[str, ...] = ()) -> Bare:
    return Bare().join().own(primary="b", replicas=replicas, in_sync=replicas, former=former)


def primary() -> Bare:
    return Bare().join().own(replicas=("a", "b"))


def done(effects: list[fx.Effect]) -> fx.GetDone:
    return only(effects, fx.GetDone)


def reasons(effects: list[fx.Effect]) -> list[int]:
    return [info.reason for info in done(effects).infos]


def fetched(bare: Bare, fetch: fx.Fetch, *answers: bytes | MissReason | BlockInfo, version: Version = FIRST,
            elapsed_ms: float = 1) -> list[fx.Effect]:  # fmt: skip
    infos = [BlockInfo(int(answer)) if isinstance(answer, MissReason) else answer for answer in answers]
    return bare.fetched(fetch, *infos, version=version, elapsed_ms=elapsed_ms)


def test_all_here_is_answered_in_one_step_and_the_reader_owns_the_bytes():
    bare = primary()
    bare.put([K1, K2], [b"one", b"two"])
    found = done(bare.get([K1, K2]))
    bare.put([K1], [b"newer"], op=2)
    assert [bare.tier.read(slot) for slot in found.slots] == [b"one", b"two"]
    bare.unref(found.slots)
    assert bare.live_slots() == 2


def test_missing_blocks_are_fetched_and_kept_as_near_copies():
    bare = replica()
    fetch = only(bare.get([K1]), fx.Fetch)
    found = done(fetched(bare, fetch, b"one"))
    assert bare.tier.read(found.slots[0]) == b"one"
    assert bare.core.state.directory.get(K1).version == Version(5, 1)
    bare.unref(found.slots)
    assert bare.live_slots() == 1


def test_first_source_gets_half_the_time_and_absent_needs_all():
    bare = replica()
    first = only(bare.get([K1], deadline_ms=100), fx.Fetch)
    assert first.deadline_ns == bare.now + 50 * MS
    second = only(fetched(bare, first, MissReason.ABSENT), fx.Fetch)
    assert {first.peer, second.peer} == {"b", "c"}
    assert second.deadline_ns == bare.now + 100 * MS
    assert reasons(fetched(bare, second, MissReason.ABSENT)) == [MissReason.ABSENT]


def test_a_replicas_reason_is_not_hidden_by_absent():
    bare = replica()
    first = only(bare.get([K1]), fx.Fetch)
    second = only(fetched(bare, first, MissReason.CHECKSUM), fx.Fetch)
    assert reasons(fetched(bare, second, MissReason.ABSENT)) == [MissReason.CHECKSUM]


def test_deleted_is_final():
    bare = replica()
    first = only(bare.get([K1]), fx.Fetch)
    assert reasons(fetched(bare, first, MissReason.DELETED)) == [MissReason.DELETED]


def test_tombstone_that_arrives_meanwhile_beats_an_older_hit():
    bare = replica(replicas=("a", "b"))
    fetch = only(bare.get([K1]), fx.Fetch)
    bare.own(epoch=6)
    bare.put([K1], [b""], delete=True)
    assert reasons(fetched(bare, fetch, b"old")) == [MissReason.DELETED]
    assert not bare.live_slots()


def test_pending_bytes_of_a_peer_are_served_but_not_kept():
    bare = replica()
    found = done(fetched(bare, only(bare.get([K1], session=False), fx.Fetch), b"one", version=NO_VERSION))
    assert bare.core.state.directory.get(K1) is None
    bare.unref(found.slots)
    assert not bare.live_slots()


def test_bad_copy_is_dropped_and_asked_for_elsewhere():
    bare = primary()
    bare.put([K1], [b"one"])
    verify = only(bare.get([K1], verify=True), fx.Verify)
    fetch = only(bare.step(ev.Verified(bare.now, 900, verify.indices)), fx.Fetch)
    assert bare.core.state.directory.get(K1) is None
    assert reasons(fetched(bare, fetch, MissReason.ABSENT)) == [MissReason.CHECKSUM]
    assert not bare.live_slots()


def test_bad_copy_that_was_replaced_meanwhile_does_not_cost_the_new_one():
    bare = primary()
    bare.put([K1], [b"one"])
    bare.get([K1], verify=True)
    bare.put([K1], [b"two"], op=2)
    bare.step(ev.Verified(bare.now, 900, [0]))
    assert bare.core.state.directory.get(K1).checksum == checksum(b"two")


def test_read_ends_at_its_deadline_and_late_bytes_are_given_back():
    bare = replica()
    fetch = only(bare.get([K1], deadline_ms=40), fx.Fetch)
    assert not all_of(bare.tick(39), fx.GetDone)
    assert reasons(bare.tick(2)) == [MissReason.DEADLINE]
    assert not fetched(bare, fetch, b"late")
    assert not bare.live_slots()
    assert not bare.core.reads.ops


def test_deadline_that_passed_while_absent_was_not_certain_is_a_deadline():
    bare = replica()
    first = only(bare.get([K1], deadline_ms=40), fx.Fetch)
    bare.now += 41 * MS
    assert reasons(fetched(bare, first, MissReason.ABSENT)) == [MissReason.DEADLINE]


def test_local_only_asks_nobody_and_names_what_was_evicted():
    bare = Bare(arena_slots=4).join().own(replicas=("a",), in_sync=("a",))
    for number in range(6):
        bare.put([key_of(number)], [b"x"], op=number + 1)
    assert reasons(bare.get([key_of(0), key_of(77)], local_only=True)) == [MissReason.EVICTED, MissReason.ABSENT]


def test_copy_that_is_older_than_what_was_evicted_here_is_not_served():
    bare = replica(replicas=("b",))
    bare.core.state.directory.remember_evicted(K1, Version(5, 3), replaced=True)
    fetch = only(bare.get([K1], session=False), fx.Fetch)
    assert reasons(fetched(bare, fetch, b"old", version=Version(5, 2))) == [MissReason.BEHIND]
    assert not bare.live_slots()
    fetch = only(bare.get([K1], session=False, op=901), fx.Fetch)
    assert reasons(fetched(bare, fetch, b"same", version=Version(5, 3))) == [MissReason.NONE]


def test_miss_of_an_evicted_block_says_up_to_which_version():
    bare = primary()
    bare.core.state.directory.remember_evicted(K1, Version(5, 3), replaced=True)
    (info,) = done(bare.get([K1], session=False, local_only=True)).infos
    assert (info.reason, info.version) == (MissReason.EVICTED, Version(5, 3))


def test_expired_block_is_not_served_though_it_is_not_swept_yet():
    bare = primary()
    bare.core.state.view.policies[K1[:8]] = Namespace("ns", expiry_ms=500)
    bare.tick(1, wall_ms=1000)
    bare.put([K1], [b"one"])
    for session in (False, True):
        bare.tick(0, wall_ms=1499)
        assert reasons(bare.get([K1], session=session, local_only=True)) == [MissReason.NONE]
        bare.now += MS  # no tick comes between: a node that was just woken knows the time all the same
        assert reasons(bare.get([K1], session=session, local_only=True)) == [MissReason.ABSENT]
        assert only(bare.step(ev.Exists(bare.now, 1, [K1])), fx.ExistsDone).reasons == [MissReason.ABSENT]


def test_what_was_read_elsewhere_is_not_kept_where_blocks_expire():
    bare = replica()
    bare.core.state.view.policies[K1[:8]] = Namespace("ns", expiry_ms=500)
    found = done(fetched(bare, only(bare.get([K1], session=False), fx.Fetch), b"one"))
    assert bare.tier.read(found.slots[0]) == b"one"
    bare.unref(found.slots)
    assert not bare.live_slots()


def test_delete_heard_of_elsewhere_takes_the_older_near_copy_with_it():
    bare = replica()
    bare.unref(done(fetched(bare, only(bare.get([K1], session=False), fx.Fetch), b"one")).slots)
    assert bare.core.state.directory.get(K1) is not None
    fetch = only(bare.get([K1]), fx.Fetch)
    assert reasons(fetched(bare, fetch, BlockInfo(int(MissReason.DELETED), Version(5, 2)))) == [MissReason.DELETED]
    assert not bare.live_slots()


def test_former_replica_is_asked_last_and_its_copy_becomes_the_primarys():
    """As if it had been handed in: the other replicas have to process it too."""
    bare = Bare().join().own(replicas=("a", "b"), former=("c",))
    bare.core.put.repair.complete[shard_of(K1)] = {"b"}
    first = only(bare.get([K1]), fx.Fetch)
    second = only(fetched(bare, first, MissReason.ABSENT), fx.Fetch)
    assert (first.peer, second.peer) == ("b", "c")
    assert reasons(fetched(bare, second, b"kept by c", version=Version(4, 7))) == [MissReason.NONE]
    assert bare.core.state.directory.get(K1).version == Version(4, 7)
    assert bare.core.put.stream.vector(shard_of(K1)).covers(Version(4, 7))
    assert bare.core.put.repair.complete[shard_of(K1)] == set()


def test_former_replicas_copy_at_or_below_the_floor_is_neither_served_nor_kept():
    for session in (True, False):
        bare = Bare().join().own(replicas=("a",), in_sync=("a",), former=("c",))
        bare.core.state.directory.raise_floor(shard_of(K1), Version(5, 9))
        fetch = only(bare.get([K1], session=session), fx.Fetch)
        ended = fetched(bare, fetch, b"deleted long ago", version=Version(5, 9))
        assert reasons(ended) != [MissReason.NONE]
        assert not bare.live_slots()
        fetch = only(bare.get([K1], session=session), fx.Fetch)
        assert reasons(fetched(bare, fetch, b"alive", version=Version(5, 10))) == [MissReason.NONE]


def test_replica_does_not_keep_what_it_has_not_processed_but_asks_to_be_compared():
    bare = replica(replicas=("b", "a"))
    bare.up("b")
    effects = fetched(bare, only(bare.get([K1], session=False), fx.Fetch), b"missed")
    assert reasons(effects) == [MissReason.NONE]
    assert [send.peer for send in all_of(effects, fx.Send)] == ["b"]
    bare.unref(done(effects).slots)
    assert not bare.live_slots()
    # What it has processed and dropped for bad bytes may come back.
    bare.core.put.stream.mark_applied(shard_of(K1), FIRST)
    effects = fetched(bare, only(bare.get([K1], session=False), fx.Fetch), b"known")
    bare.unref(done(effects).slots)
    assert bare.core.state.directory.get(K1).version == FIRST


def test_reads_in_progress_are_bounded(monkeypatch):
    monkeypatch.setattr("emberkv.core.get.OPS_MAX", 2)
    bare = replica()
    assert all_of(bare.get([K1], op=1), fx.Fetch)
    assert all_of(bare.get([K1], op=2), fx.Fetch)
    assert reasons(bare.get([K1], op=3)) == [MissReason.UNREACHABLE]  # nobody was asked, so it may be anywhere
    assert reasons(bare.get([K1], op=4, session=False)) == [MissReason.ABSENT]


def test_exists_changes_nothing():
    bare = primary()
    bare.put([K1, K2], [b"one", b"two"])
    before = list(bare.core.state.directory.residency.order(10))
    answer = only(bare.step(ev.Exists(bare.now, 1, [K1, key_of(9)])), fx.ExistsDone)
    assert answer.reasons == [MissReason.NONE, MissReason.ABSENT]
    assert answer.ask == {"b": [1]}
    assert list(bare.core.state.directory.residency.order(10)) == before


def test_frozen_replica_costs_a_read_no_more_than_its_deadline():
    world = World("abc", seed=2)
    world.settle()
    owner = world.nodes["a"].core.state.view.owners[shard_of(K1)]
    (near,) = set("abc") - set(owner.replicas)
    world.put_now(owner.primary, [K1], [b"one"], min_copies=1)
    world.run_ms(1000)
    world.pause(owner.replicas[1])
    begun = world.now
    assert world.get_now(near, [K1], deadline_ms=100)[0][1] == b"one"
    assert world.now - begun <= 150 * MS


def test_flipped_byte_is_repaired_from_the_other_replica():
    world = World("abc", seed=2)
    world.settle()
    world.run_ms(1000)
    owner = world.nodes["a"].core.state.view.owners[shard_of(K1)]
    world.put_now(owner.primary, [K1], [b"truth"], min_copies=2)
    node = world.nodes[owner.primary]
    node.tier.bytes[node.core.state.directory.get(K1).slot.offset][0] ^= 1
    assert world.get_now(owner.primary, [K1])[0][1] == b"truth"
    assert node.tier.read(node.core.state.directory.get(K1).slot) == b"truth"
