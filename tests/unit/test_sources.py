"""Whom a read asks next."""

import pytest

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.sources import BREAKER_FAILURES, BREAKER_OPEN_MAX_NS, BREAKER_OPEN_NS, SOURCES_PER_KEY_MAX, Sources
from emberkv.messages import BlockInfo
from emberkv.types import MissReason, Version
from harness.bare import MS, Bare, live, only
from harness.world import key_of

K1, K2 = key_of(1), key_of(2)
NODES = ("b", "c", "d", "e")


def reader(*, primary: str = "c", replicas: tuple[str, ...] = ("b", "c", "d"), in_sync: tuple[str, ...] = (),
           former: tuple[str, ...] = ("e",)) -> Bare:  # fmt: skip
    """Node a, no replica of anything; b to e live."""
    bare = Bare().join()
    bare.records(("live/d", live("d", 1)), ("live/e", live("e", 1)))
    return bare.own(primary=primary, replicas=replicas, in_sync=in_sync or replicas, former=former)


def sources(bare: Bare) -> Sources:
    return bare.core.reads.sources


def judge(bare: Bare, peer: str, reason: MissReason = MissReason.NONE, *, ms: float = 1, keys: int = 1) -> None:
    infos = [BlockInfo(int(reason), Version(5, 1))] * keys
    sources(bare).judge(ev.Fetched(bare.now, 1, peer, list(range(keys)), infos, [None] * keys, int(ms * MS)))


def test_eventual_read_takes_the_cheapest_replica_and_former_ones_last():
    bare = reader()
    for peer, ms in (("b", 9), ("c", 5), ("d", 1), ("e", 0.1)):
        judge(bare, peer, ms=ms)
    assert sources(bare).of(K1, (), session=False) == ["d", "c", "b", "e"]


def test_cost_is_per_key():
    bare = reader()
    judge(bare, "b", ms=10, keys=100)
    judge(bare, "c", ms=5)
    judge(bare, "d", ms=5)
    assert sources(bare).of(K1, (), session=False)[0] == "b"


def test_session_read_asks_the_primary_then_who_is_in_sync_then_learners_then_former_ones():
    bare = reader(in_sync=("c", "d"))
    for peer, ms in (("b", 1), ("c", 9), ("d", 5)):
        judge(bare, peer, ms=ms)
    assert sources(bare).of(K1, (), session=True) == ["c", "d", "b", "e"]


def test_nobody_is_asked_twice_nor_ourselves_nor_the_dead():
    bare = reader(replicas=("a", "b", "c", "d"))
    bare.records(("live/d", live("d", 2, dead=True)))
    assert set(sources(bare).of(K1, (), session=False)) == {"b", "c", "e"}
    assert sources(bare).of(K1, ("c",), session=True) == ["b", "e"]
    assert sources(bare).of(K1, ("b", "c", "e"), session=True) == []


def test_number_of_sources_of_a_key_is_bounded():
    assert sources(reader()).of(K1, ("x",) * SOURCES_PER_KEY_MAX, session=True) == []
    assert sources(reader()).of(K1, ("x",) * (SOURCES_PER_KEY_MAX - 1), session=True)


def test_shard_without_a_record_has_no_sources():
    assert sources(Bare().join()).of(K1, (), session=False) == []


@pytest.mark.parametrize("session", [False, True])
def test_source_that_failed_twice_is_asked_last_even_if_it_is_the_primary(session):
    bare = reader(former=())
    for failures in range(1, BREAKER_FAILURES + 1):
        assert sources(bare).of(K1, (), session=True)[0] == "c"
        judge(bare, "c", MissReason.DEADLINE)
        assert sources(bare).known["c"].failures == failures
    assert sources(bare).of(K1, (), session=session)[-1] == "c"
    assert bare.core.state.counters["breaker_opened"] == 1
    bare.now += BREAKER_OPEN_NS
    bare.tick()
    assert sources(bare).of(K1, (), session=True)[0] == "c"
    judge(bare, "c")
    assert (sources(bare).known["c"].failures, sources(bare).known["c"].open_until_ns) == (0, 0)


def test_breaker_stays_open_longer_at_each_failure_up_to_a_bound():
    bare = reader()
    spans = []
    for _ in range(BREAKER_FAILURES + 8):
        judge(bare, "b", MissReason.UNREACHABLE)
        spans.append(sources(bare).known["b"].open_until_ns - bare.now)
    assert spans[BREAKER_FAILURES - 1 : BREAKER_FAILURES + 1] == [BREAKER_OPEN_NS, 2 * BREAKER_OPEN_NS]
    assert max(spans) == spans[-1] <= BREAKER_OPEN_MAX_NS


def test_answer_that_is_no_failure_opens_no_breaker():
    bare = reader()
    for reason in (MissReason.ABSENT, MissReason.BEHIND, MissReason.DELETED, MissReason.CURRENT) * 2:
        judge(bare, "b", reason)
    assert sources(bare).known["b"].failures == 0


def test_one_slow_answer_does_not_undo_what_is_known_of_a_source():
    bare = reader(former=())
    for peer, ms in (("b", 1), ("c", 3), ("d", 9)):
        for _ in range(20):
            judge(bare, peer, ms=ms)
    judge(bare, "b", ms=8)
    assert sources(bare).of(K1, (), session=False)[0] == "b"


def test_relay_is_the_cheapest_live_node_that_is_reached_and_was_not_asked():
    bare = reader()
    assert sources(bare).relay(()) is None
    bare.up("b", "d", "e")
    for peer, ms in (("b", 1), ("d", 5), ("e", 3)):
        judge(bare, peer, ms=ms)
    assert sources(bare).relay(()) == "b"
    assert sources(bare).relay(("b",)) == "e"
    bare.records(("live/e", live("e", 2, dead=True)))
    assert sources(bare).relay(("b",)) == "d"
    assert sources(bare).relay(("b", "d")) is None


def test_faster_source_is_asked_first():
    bare = Bare().join().own(primary="b", replicas=("b", "c"), in_sync=("b", "c"))
    first = only(bare.get([K1], session=False), fx.Fetch)
    second = only(bare.fetched(first, BlockInfo(int(MissReason.ABSENT)), elapsed_ms=9), fx.Fetch)
    bare.fetched(second, BlockInfo(int(MissReason.ABSENT)), elapsed_ms=1)
    assert only(bare.get([K2], op=901, session=False), fx.Fetch).peer == second.peer
