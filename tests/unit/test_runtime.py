"""The monitor: what happens when a read outlives its deadline, and when a peer takes no message."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.messages import BlockInfo, Offer, PutItem, PutReply
from emberkv.node.runtime import Runtime
from emberkv.types import MissReason, PutStatus, checksum, shard_of
from harness.world import World, key_of

MS = 1_000_000


class RunningClock:
    """The world's time, which goes on by itself from here."""

    def __init__(self, start_ns: int) -> None:
        self.offset_ns = start_ns - time.monotonic_ns()

    def now_ns(self) -> int:
        return time.monotonic_ns() + self.offset_ns


class SlowPeers:
    """Every read from a peer ends a little after its deadline, with nothing."""

    def __init__(self, clock: RunningClock) -> None:
        self.clock = clock

    def start(self, peer: str, keys: list[bytes], session: bool, deadline_ns: int, *_: Any) -> Any:
        clock = self.clock

        class Pending:
            def finish(self, place: Any) -> tuple[list[BlockInfo], list[None], int]:
                time.sleep(max(0.0, (deadline_ns - clock.now_ns()) / 1e9) + 0.03)
                return [BlockInfo(int(MissReason.DEADLINE))] * len(keys), [None] * len(keys), 1

        return Pending()

    def finish_all(self, pending: list[Any], place: Any) -> list[Any]:
        return [read.finish(place) for read in pending]

    def exists(self, peer: str, keys: list[bytes], deadline_ns: int) -> list[int]:
        return [int(MissReason.UNREACHABLE)] * len(keys)


class Ports:
    """Transport and committer that take nothing."""

    def __init__(self) -> None:
        self.refuse = False

    def send(self, *_: Any) -> bool:
        return not self.refuse

    def set_peers(self, _: dict[str, str]) -> None:
        pass

    def close(self) -> None:
        pass

    def submit(self, _: Any) -> None:
        pass


@pytest.fixture
def world() -> World:
    made = World(["a", "b", "c"], seed=5)
    made.run_ms(3000)
    return made


def runtime_of(world: World) -> tuple[Runtime, Ports]:
    node, ports = world.nodes["a"], Ports()
    clock = RunningClock(world.now)
    return Runtime(node.core, node.tier, clock, ports, SlowPeers(clock), ports, lambda text, alarm: None), ports


def test_a_read_that_the_ticker_ends_returns_to_its_thread(world: World) -> None:
    runtime, _ = runtime_of(world)
    owners = world.nodes["a"].core.state.view.owners
    key = next(key_of(n) for n in range(1000) if "a" not in owners[shard_of(key_of(n))].replicas)
    found: list[Any] = []

    def read() -> None:
        deadline_ns = runtime.now_ns() + 100 * MS
        found.append(runtime.read([key], deadline_ns, session=False, local_only=False, verify=False))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    give_up = time.monotonic() + 8
    while thread.is_alive() and time.monotonic() < give_up:
        runtime.handle(ev.Tick(runtime.now_ns()))
        time.sleep(0.005)
    assert found, "the read never came back"
    infos, slots = found[0]
    assert infos[0].reason in (MissReason.DEADLINE, MissReason.ABSENT, MissReason.UNREACHABLE)
    assert slots == [None]
    assert not runtime.core.reads.ops


def test_a_peer_that_takes_no_message_is_treated_as_lost(world: World) -> None:
    runtime, ports = runtime_of(world)
    core = world.nodes["a"].core
    assert "b" in core.state.peers_up
    ports.refuse = True
    core.state.send("b", Offer(0, 1, [], last=True), [])
    runtime.handle(ev.Tick(runtime.now_ns()))
    assert "b" not in core.state.peers_up


def test_a_refused_message_never_outlives_the_peers_return(world: World) -> None:
    runtime, ports = runtime_of(world)
    core, clock = world.nodes["a"].core, runtime.now_ns
    returns = threading.Thread(target=lambda: runtime.handle(ev.PeerUp(clock(), "b")))

    def refused(*_: Any) -> bool:
        returns.start()
        return False

    def slow_clock() -> int:
        time.sleep(0.1)
        return clock()

    ports.send, runtime.now_ns = refused, slow_clock  # type: ignore[method-assign]
    core.state.send("b", Offer(0, 1, [], last=True), [])
    tick = ev.Tick(clock())
    runtime.handle(tick)
    returns.join(5)
    assert "b" in core.state.peers_up


# -- dialogues: what takes time is asked for, never waited for --------------------------------------------------------


def elsewhere(world: World) -> bytes:
    """A key whose shard node a has no part in."""
    owners = world.nodes["a"].core.state.view.owners
    return next(key_of(n) for n in range(1000) if "a" not in owners[shard_of(key_of(n))].replicas)


def ours(world: World) -> bytes:
    """A key whose primary is node a."""
    owners = world.nodes["a"].core.state.view.owners
    return next(key_of(n) for n in range(1000) if owners[shard_of(key_of(n))].primary == "a")


def put_event(runtime: Runtime, key: bytes, data: bytes) -> ev.PutBegin:
    item = PutItem(key[8:], checksum(b"put") + b"\0" * 8, len(data))
    deadline_ns = runtime.now_ns() + 500 * MS
    return ev.PutBegin(runtime.now_ns(), runtime.op(), [key], [item], deadline_ns, True, True, 1, "")


def test_a_read_asks_for_its_fetches_and_takes_what_they_bring(world: World) -> None:
    runtime, _ = runtime_of(world)
    key, data = elsewhere(world), b"from a peer"
    ended: list[fx.Effect] = []
    deadline_ns = runtime.now_ns() + 500 * MS
    dialogue = runtime.reading(ended.append, [key], deadline_ns, session=True, local_only=False, verify=False)
    fetches = next(dialogue)
    assert isinstance(fetches, list)
    assert [fetch.keys for fetch in fetches] == [[key]]
    assert runtime.core.reads.ops, "the read is under way while its fetch is"
    (slot,) = runtime.place([len(data)])
    assert slot is not None
    runtime.tier.view(slot)[:] = data
    info = BlockInfo(int(MissReason.NONE), (1, 1), len(data), checksum(data))  # type: ignore[arg-type]
    with pytest.raises(StopIteration) as end:
        dialogue.send([([info], [slot], 1000)])
    infos, slots = end.value.value
    assert infos[0].reason == MissReason.NONE
    assert bytes(runtime.tier.view(slots[0])) == data
    assert not ended
    runtime.unref(slots)


def test_a_read_that_somebody_else_ends_wants_that_end(world: World) -> None:
    runtime, _ = runtime_of(world)
    ended: list[fx.Effect] = []
    deadline_ns = runtime.now_ns() + 5 * MS
    dialogue = runtime.reading(
        ended.append, [elsewhere(world)], deadline_ns, session=True, local_only=False, verify=False
    )
    assert isinstance(next(dialogue), list)
    time.sleep(0.006)
    runtime.handle(ev.Tick(runtime.now_ns()))
    assert isinstance(ended[0], fx.GetDone)
    late = BlockInfo(int(MissReason.DEADLINE))
    assert dialogue.send([([late], [None], 1000)]) is None, "there is nothing more to do than to take the end"
    with pytest.raises(StopIteration) as end:
        dialogue.send(ended[0])
    assert end.value.value[1] == [None]


def test_a_put_whose_bytes_do_not_come_stores_nothing(world: World) -> None:
    runtime, _ = runtime_of(world)
    key, replies = ours(world), []
    used = runtime.tier.usage()[0]
    dialogue = runtime.putting(put_event(runtime, key, b"never whole"), replies.append)
    assert next(dialogue)[0] is not None
    with pytest.raises(ConnectionError):
        dialogue.throw(ConnectionError("gone"))
    assert not replies
    assert runtime.core.state.directory.get(key) is None
    assert runtime.tier.usage()[0] == used


def test_a_put_is_answered_when_its_bytes_are_there(world: World) -> None:
    runtime, _ = runtime_of(world)
    node, key, data = world.nodes["a"], ours(world), b"whole"
    # The world's lease is dated by the world's clock, which this runtime goes on with.
    runtime.core.lease.deadline_ns = runtime.now_ns() + 10_000 * MS
    replies: list[PutReply] = []
    dialogue = runtime.putting(put_event(runtime, key, data), replies.append)
    slots = next(dialogue)
    assert not replies
    node.tier.write(slots[0], data)
    with pytest.raises(StopIteration):
        dialogue.send([checksum(data)])
    assert replies[0].outcomes[0].status is PutStatus.STORED


def test_an_acknowledgement_after_the_lease_is_unknown(world: World) -> None:
    runtime, _ = runtime_of(world)
    done = fx.PutDone(1, [], gate_ns=runtime.now_ns() - 1)
    done.outcomes = [fx.PutOutcome(PutStatus.STORED, copies=1)]
    heard: list[fx.Effect] = []
    runtime._waiting[1] = heard.append
    runtime.perform([done])
    assert [outcome.status for outcome in heard[0].outcomes] == [PutStatus.UNKNOWN]  # type: ignore[attr-defined]
