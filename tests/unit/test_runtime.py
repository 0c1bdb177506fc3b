"""The monitor: what happens when a read outlives its deadline, and when a peer takes no message."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from emberkv.core import events as ev
from emberkv.messages import BlockInfo, Offer
from emberkv.node.runtime import Runtime
from emberkv.types import MissReason, shard_of
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

    def start(self, peer: str, keys: list[bytes], session: bool, deadline_ns: int) -> Any:
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
