"""Reads: near copy, replicas, a miss with its reason."""

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.get import BREAKER_FAILURES
from emberkv.messages import BlockInfo
from emberkv.types import NO_VERSION, MissReason, Version, checksum, shard_of
from harness.bare import MS, Bare, all_of, only
from harness.world import World, key_of

K1, K2 = key_of(1), key_of(2)
FIRST = Version(5, 1)


def replica(*, replicas: tuple[str, ...] = ("b", "c"), former: tuple[str, ...] = ()) -> Bare:
    return Bare().join().own(primary="b", replicas=replicas, in_sync=replicas)


def primary() -> Bare:
    return Bare().join().own(replicas=("a", "b"))


def done(effects: list[fx.Effect]) -> fx.GetDone:
    return only(effects, fx.GetDone)


def reasons(effects: list[fx.Effect]) -> list[int]:
    return [info.reason for info in done(effects).infos]


def fetched(bare: Bare, fetch: fx.Fetch, *answers: bytes | MissReason, version: Version = FIRST,
            elapsed_ms: float = 1) -> list[fx.Effect]:  # fmt: skip
    infos, slots = [], []
    for answer in answers:
        if isinstance(answer, bytes):
            slot = bare.core.state.directory.reserve(len(answer))
            bare.tier.write(slot, answer)
            infos.append(BlockInfo(0, version, len(answer), checksum(answer)))
            slots.append(slot)
        else:
            infos.append(BlockInfo(int(answer)))
            slots.append(None)
    event = ev.Fetched(bare.now, fetch.op, fetch.peer, fetch.indices, infos, slots, int(elapsed_ms * MS))
    return bare.step(event)


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


def test_source_that_fails_is_asked_last_until_its_breaker_closes():
    bare = replica()
    shy = only(bare.get([K1]), fx.Fetch).peer
    for number in range(BREAKER_FAILURES):
        fetch = all_of(bare.get([key_of(10 + number)], op=950 + number), fx.Fetch)[0]
        assert fetch.peer == shy
        fetched(bare, fetch, MissReason.DEADLINE)
    assert only(bare.get([K2], op=960), fx.Fetch).peer != shy
    assert bare.core.state.counters["breaker_opened"] == 1
    bare.now += 501 * MS
    fetch = only(bare.get([K2], op=961), fx.Fetch)
    assert fetch.peer == shy
    fetched(bare, fetch, b"ok")
    assert bare.core.reads.sources[shy].failures == 0


def test_faster_source_is_asked_first():
    bare = replica()
    first = only(bare.get([K1]), fx.Fetch)
    second = only(fetched(bare, first, MissReason.ABSENT, elapsed_ms=9), fx.Fetch)
    fetched(bare, second, MissReason.ABSENT, elapsed_ms=1)
    assert only(bare.get([K2], op=901), fx.Fetch).peer == second.peer


def test_local_only_asks_nobody_and_names_what_was_evicted():
    bare = Bare(arena_slots=4).join().own(replicas=("a",), in_sync=("a",))
    for number in range(6):
        bare.put([key_of(number)], [b"x"], op=number + 1)
    assert reasons(bare.get([key_of(0), key_of(77)], local_only=True)) == [MissReason.EVICTED, MissReason.ABSENT]


def test_reads_in_progress_are_bounded(monkeypatch):
    monkeypatch.setattr("emberkv.core.get.OPS_MAX", 2)
    bare = replica()
    assert all_of(bare.get([K1], op=1), fx.Fetch)
    assert all_of(bare.get([K1], op=2), fx.Fetch)
    assert reasons(bare.get([K1], op=3)) == [MissReason.ABSENT]


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
