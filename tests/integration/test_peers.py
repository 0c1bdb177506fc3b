"""Streams and fetches between real processes, which are killed and frozen in the middle."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from emberkv.messages import (
    WIRE_VERSION,
    BlockInfo,
    ErrorFrame,
    GetFlag,
    GetReply,
    GetRequest,
    Hello,
    Message,
    PutItem,
    PutReply,
    PutRequest,
    Role,
    Welcome,
)
from emberkv.net import now_ns, peers
from emberkv.net.peers import FetchPool, PeerStreams
from emberkv.net.tcp import TcpLink, TcpListener, serve_handshake
from emberkv.types import DEFAULT_NAMESPACE, MissReason, PutOutcome, PutStatus, Version, checksum
from emberkv.wire.codec import Header

FETCH = Hello(Role.FETCH, WIRE_VERSION, WIRE_VERSION, "c", "default", "me", bytes(16))
STREAM = Hello(Role.STREAM, WIRE_VERSION, WIRE_VERSION, "c", "default", "me", bytes(16))
SECOND = 1_000_000_000
MISS_PART = 1
LIE_PART = 2
REFUSE_PART = 3
CURRENT_PART = 4


# -- the peer: `python test_peers.py PORT` serves GETs of 8 MiB per key[0], and takes PUTs ---------------------------


def block(index: int, length: int) -> bytes:
    return bytes([index + 1]) * length


def length_of(key: bytes) -> int:
    """Length in 4 KiB units stands in the key."""
    return int.from_bytes(key[1:3], "little") << 12


def serve(link: TcpLink) -> None:
    if serve_handshake(link, lambda hello: Welcome(1, "c", "peer", bytes(16), DEFAULT_NAMESPACE)) is None:
        return
    blocks: dict[bytes, bytes] = {}
    while True:
        header, message = link.recv()
        if isinstance(message, GetRequest):
            answer_get(link, header, message, blocks)
        elif isinstance(message, PutRequest):
            taken = [memoryview(bytearray(item.length)) for item in message.items]
            link.recv_payload(taken)
            good = all(checksum(view) == item.checksum for view, item in zip(taken, message.items, strict=True))
            status = PutStatus.STORED if good else PutStatus.REFUSED
            link.send(PutReply([PutOutcome(status) for _ in message.items]), header.request_id)


def answer_get(link: TcpLink, header: Header, message: GetRequest, blocks: dict[bytes, bytes]) -> None:
    if message.part == LIE_PART:
        link.send(GetReply([BlockInfo(int(MissReason.ABSENT))] * (len(message.keys) + 1)), header.request_id)
        return
    if message.part == REFUSE_PART:
        link.send(ErrorFrame("going down"), header.request_id)
        link.close()
        return
    infos, payload = [], []
    for key in message.keys:
        if message.part == CURRENT_PART and key[0] % 2:
            infos.append(BlockInfo(int(MissReason.CURRENT), Version(1, 1)))
            continue
        if message.part == MISS_PART and key[0] % 2:
            infos.append(BlockInfo(int(MissReason.ABSENT)))
            continue
        data = blocks.setdefault(key, block(key[0], length_of(key)))
        infos.append(BlockInfo(0, Version(1, 1), len(data)))
        payload.append(memoryview(data))
    link.send(GetReply(infos), header.request_id, payload)


# -- helpers ----------------------------------------------------------------------------------------------------------


class Peer:
    """A peer in a process of its own."""

    def __init__(self, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    one = Peer()
    yield one
    one.end()


@pytest.fixture
def pool(peer: Peer) -> Iterator[FetchPool]:
    one = FetchPool(FETCH)
    one.set_peers({"peer": peer.address})
    yield one
    one.close()


def request(count: int, mebibytes: int = 1, part: int = 0, small: int = 0) -> GetRequest:
    """The first `small` of the blocks have 4 KiB, so that they arrive before anything can stop."""
    units = [1 if index < small else mebibytes << 8 for index in range(count)]
    keys = [bytes([index]) + unit.to_bytes(2, "little") + bytes(29) for index, unit in enumerate(units)]
    return GetRequest(keys, flags=int(GetFlag.LOCAL_ONLY), part=part)


class Area:
    """Where fetched blocks go."""

    def __init__(self, on_first: Callable[[], None] | None = None, refuse: frozenset[int] = frozenset()) -> None:
        self.views: dict[int, memoryview] = {}
        self._on_first = on_first
        self._refuse = refuse

    def place(self, index: int, info: BlockInfo) -> memoryview | None:
        if self._on_first is not None:
            self._on_first()
            self._on_first = None
        if index in self._refuse:
            return None
        self.views[index] = memoryview(bytearray(info.length))
        return self.views[index]

    def check(self, infos: list[BlockInfo]) -> int:
        hits = [index for index, info in enumerate(infos) if not info.reason]
        for index in hits:
            assert bytes(self.views[index]) == block(index, len(self.views[index]))
        return len(hits)


def idle_links(pool: FetchPool) -> list[TcpLink]:
    return [link for _, link in pool._idle.get("peer", [])]


def wait_for(condition: Callable[[], object], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


# -- fetching ---------------------------------------------------------------------------------------------------------


def test_fetch_places_blocks_and_reuses_the_connection(pool: FetchPool) -> None:
    area = Area()
    result = pool.get("peer", request(8), area.place, now_ns() + 5 * SECOND)
    assert area.check(result.infos) == 8
    assert result.arrived_bytes == 8 << 20
    (link,) = idle_links(pool)
    before = link.calls
    assert area.check(pool.get("peer", request(8), area.place, now_ns() + 5 * SECOND).infos) == 8
    assert idle_links(pool) == [link]
    assert link.calls - before <= 3 + 1  # request, answer, payload (it may need a second call), no more


def test_misses_and_refused_places(pool: FetchPool) -> None:
    area = Area(refuse=frozenset({2}))
    result = pool.get("peer", request(6, 3, MISS_PART), area.place, now_ns() + 5 * SECOND)
    none, absent, quota = int(MissReason.NONE), int(MissReason.ABSENT), int(MissReason.QUOTA)
    assert [info.reason for info in result.infos] == [none, absent, quota, absent, none, absent]
    assert area.check(result.infos) == 2
    assert result.arrived_bytes == 6 << 20
    assert len(idle_links(pool)) == 1  # the unwanted bytes were read, so the connection is good


def test_several_fetches_start_before_the_first_is_awaited(pool: FetchPool) -> None:
    deadline = now_ns() + 5 * SECOND
    fetches = [pool.start("peer", request(4), deadline) for _ in range(6)]
    areas = [Area() for _ in fetches]
    for fetch, area in zip(fetches, areas, strict=True):
        assert area.check(fetch.finish(area.place).infos) == 4
    assert len(idle_links(pool)) == 4


def test_cancelled_fetch_closes_its_connection(pool: FetchPool) -> None:
    pool.start("peer", request(4), now_ns() + 5 * SECOND).cancel()
    assert not idle_links(pool)


@pytest.mark.parametrize("part", [LIE_PART, REFUSE_PART])
def test_answer_that_does_not_fit(pool: FetchPool, part: int) -> None:
    start = now_ns()
    result = pool.get("peer", request(4, 1, part), Area().place, start + 2 * SECOND)
    assert {info.reason for info in result.infos} == {int(MissReason.UNREACHABLE)}
    assert not idle_links(pool)


@pytest.mark.parametrize(
    ("flags", "floors", "believed"),
    [
        (GetFlag.FLOORS | GetFlag.IF_NEWER, [Version(1, 1)] * 4, True),
        (GetFlag.FLOORS | GetFlag.IF_NEWER, [Version(1, 1)] * 3 + [Version(1, 2)], False),
        (GetFlag.FLOORS, [Version(1, 1)] * 4, False),
        (GetFlag(0), [], False),
    ],
)
def test_current_is_believed_only_of_the_version_that_was_named(
    pool: FetchPool, flags: GetFlag, floors: list[Version], believed: bool
) -> None:
    area = Area()
    asked = request(4, 1, CURRENT_PART)
    asked.flags |= int(flags)
    asked.floors = floors
    result = pool.get("peer", asked, area.place, now_ns() + 5 * SECOND)
    if believed:
        none, current = int(MissReason.NONE), int(MissReason.CURRENT)
        assert [info.reason for info in result.infos] == [none, current, none, current]
        assert [info.version for info in result.infos] == [Version(1, 1)] * 4
        assert (area.check(result.infos), result.arrived_bytes) == (2, 2 << 20)
        assert len(idle_links(pool)) == 1
    else:
        assert {info.reason for info in result.infos} == {int(MissReason.UNREACHABLE)}
        assert not area.views
        assert not idle_links(pool)


def test_peer_frozen_in_the_middle_of_the_payload(peer: Peer, pool: FetchPool) -> None:
    area = Area(on_first=lambda: peer.signal(signal.SIGSTOP))
    start = now_ns()
    result = pool.get("peer", request(32, 8, small=4), area.place, start + SECOND)
    assert now_ns() - start < 1.5 * SECOND
    hits = area.check(result.infos)
    assert 4 <= hits < 32
    assert [info.reason for info in result.infos] == [0] * hits + [int(MissReason.DEADLINE)] * (32 - hits)
    assert result.arrived_bytes == sum(info.length for info in result.infos if not info.reason)
    assert not idle_links(pool)
    # And the next one, to the peer that is still frozen: its kernel accepts, nobody shakes hands.
    start = now_ns()
    again = pool.get("peer", request(2), area.place, start + SECOND // 2)
    assert now_ns() - start < SECOND
    assert {info.reason for info in again.infos} <= {int(MissReason.DEADLINE), int(MissReason.UNREACHABLE)}


def test_peer_killed_in_the_middle_of_the_payload(peer: Peer, pool: FetchPool) -> None:
    area = Area(on_first=lambda: peer.signal(signal.SIGKILL))
    start = now_ns()
    result = pool.get("peer", request(32, 8), area.place, start + 10 * SECOND)
    assert now_ns() - start < 2 * SECOND
    hits = area.check(result.infos)
    assert hits < 32
    assert [info.reason for info in result.infos] == [0] * hits + [int(MissReason.UNREACHABLE)] * (32 - hits)


def test_unreachable_peers_cost_little(pool: FetchPool, peer: Peer) -> None:
    peer.end()
    pool.set_peers({"peer": peer.address, "typo": "127.0.0.1:1"})
    for name in ("peer", "typo", "unknown"):
        start = now_ns()
        result = pool.get(name, request(3), Area().place, start + 5 * SECOND)
        assert [info.reason for info in result.infos] == [int(MissReason.UNREACHABLE)] * 3
        assert now_ns() - start < SECOND


def test_an_unreachable_peer_is_logged_once(pool: FetchPool, peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    peer.signal(signal.SIGSTOP)
    for _ in range(3):  # the wait, and so the text of the reason, differs each time
        pool.get("peer", request(1), Area().place, now_ns() + SECOND // 10)
        time.sleep(0.21)
    assert sum("cannot fetch from peer" in record.message for record in caplog.records) == 1
    peer.signal(signal.SIGCONT)


def test_restarted_peer_is_reached_through_a_stale_connection(pool: FetchPool, peer: Peer) -> None:
    area = Area()
    pool.get("peer", request(2), area.place, now_ns() + 5 * SECOND)
    peer.end()
    second = Peer(int(peer.address.rpartition(":")[2]))
    try:
        assert area.check(pool.get("peer", request(2), area.place, now_ns() + 5 * SECOND).infos) == 2
    finally:
        second.end()


# -- streams ----------------------------------------------------------------------------------------------------------


class Recorder:
    """Keeps what the callbacks say."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.replies: list[int] = []
        self.sent: dict[int, int] = {}
        self.lock = threading.Lock()

    def on_message(self, peer: str, header: Header, message: Message, link: TcpLink) -> None:
        assert isinstance(message, PutReply)
        assert all(outcome.status is PutStatus.STORED for outcome in message.outcomes)
        self.replies.append(header.request_id)

    def on_up(self, peer: str) -> None:
        self.events.append(f"up {peer}")

    def on_down(self, peer: str) -> None:
        self.events.append(f"down {peer}, {sum(self.sent.values())} sent")

    def count(self, request_id: int) -> Callable[[], None]:
        def on_sent() -> None:
            with self.lock:
                self.sent[request_id] = self.sent.get(request_id, 0) + 1

        return on_sent


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def streams(recorder: Recorder, peer: Peer) -> Iterator[PeerStreams]:
    one = PeerStreams(STREAM, recorder.on_message, recorder.on_up, recorder.on_down)
    one.set_peers({"peer": peer.address})
    wait_for(lambda: one.peers_up() == ["peer"])
    yield one
    assert one.stop()


def put(data: bytes) -> tuple[PutRequest, list[memoryview]]:
    return PutRequest([PutItem(bytes(32), bytes(24), len(data), checksum(data))]), [memoryview(data)]


def push(streams: PeerStreams, recorder: Recorder, request_id: int, data: bytes) -> bool:
    message, payload = put(data)
    return streams.send("peer", request_id, message, payload, recorder.count(request_id))


def test_stream_keeps_order_and_reports_each_send_once(streams: PeerStreams, recorder: Recorder) -> None:
    for number in range(500):
        wait_for(lambda n=number: push(streams, recorder, n, bytes([n % 251]) * (1 + n * 37)))  # type: ignore[misc]
    wait_for(lambda: len(recorder.replies) == 500)
    assert recorder.replies == list(range(500))
    assert recorder.sent == dict.fromkeys(range(500), 1)
    assert recorder.events == ["up peer"]


def test_unknown_peer_is_refused(streams: PeerStreams) -> None:
    message, payload = put(b"x")
    assert not streams.send("nobody", 1, message, payload, lambda: pytest.fail("called"))


def fill(streams: PeerStreams, recorder: Recorder, data: bytes) -> int:
    """Sends until refused; the number accepted."""
    accepted = 0
    while push(streams, recorder, accepted, data):
        accepted += 1
    return accepted


def test_frozen_peer_goes_down_once_and_frees_everything(peer: Peer, streams: PeerStreams, recorder: Recorder) -> None:
    peer.signal(signal.SIGSTOP)
    start = time.monotonic()
    accepted = fill(streams, recorder, bytes(8 << 20))
    assert time.monotonic() - start < 1  # send never blocks
    assert accepted <= peers.OUTBOX_BYTES_MAX // (8 << 20) + 2
    wait_for(lambda: len(recorder.events) == 2)
    assert time.monotonic() - start < 2 * peers.SEND_TIMEOUT_MS / 1000 + 2
    assert recorder.events[1] == f"down peer, {accepted} sent"
    assert recorder.sent == dict.fromkeys(range(accepted), 1)
    assert not push(streams, recorder, -1, b"x")
    peer.signal(signal.SIGCONT)
    wait_for(lambda: recorder.events[-1] == "up peer")
    assert push(streams, recorder, -2, b"x")
    wait_for(lambda: recorder.replies[-1:] == [-2 & 0xFFFFFFFF])


def test_killed_peer_goes_down_and_its_successor_up(peer: Peer, streams: PeerStreams, recorder: Recorder) -> None:
    peer.signal(signal.SIGSTOP)
    accepted = fill(streams, recorder, bytes(1 << 20))
    peer.signal(signal.SIGKILL)
    wait_for(lambda: len(recorder.events) == 2)
    assert recorder.events[1] == f"down peer, {accepted} sent"
    assert recorder.sent == dict.fromkeys(range(accepted), 1)
    assert streams.queued("peer") == (0, 0)
    second = Peer(int(peer.address.rpartition(":")[2]))
    try:
        wait_for(lambda: streams.peers_up() == ["peer"])
        assert push(streams, recorder, 9999, b"y" * 5000)
        wait_for(lambda: recorder.replies[-1:] == [9999])
        streams.set_peers({})
        wait_for(lambda: recorder.events[-1].startswith("down"))
        assert [event[:4] for event in recorder.events] == ["up p", "down", "up p", "down"]
    finally:
        second.end()


def test_the_end_at_an_old_address_is_told_before_the_beginning_at_a_new_one(peer: Peer) -> None:
    """Else the core would take a peer that is up for one that is down, until the next loss."""
    working = threading.Event()

    class Slow(Recorder):
        def on_message(self, peer: str, header: Header, message: Message, link: TcpLink) -> None:
            working.set()
            time.sleep(0.7)

    recorder, second = Slow(), Peer()
    streams = PeerStreams(STREAM, recorder.on_message, recorder.on_up, recorder.on_down)
    try:
        streams.set_peers({"peer": peer.address})
        wait_for(lambda: push(streams, recorder, 1, b"x"))
        assert working.wait(5)
        streams.set_peers({"peer": second.address})
        wait_for(lambda: len(recorder.events) == 3)
        assert [event[:4] for event in recorder.events] == ["up p", "down", "up p"]
        assert streams.peers_up() == ["peer"]
    finally:
        assert streams.stop()
        second.end()


def test_what_a_peers_arrival_leads_to_is_sent(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal there made the core take the peer, whose stream was up, for down: it was never repaired."""
    start = peers.start_thread

    def slow_start(name: str, target: Callable[[], None]) -> threading.Thread:
        thread = start(name, target)
        time.sleep(0.3)  # the new thread is long up before its maker goes on
        return thread

    class Eager(Recorder):
        def on_up(self, peer: str) -> None:
            self.events.append(f"sent {push(streams, self, 1, b'x')}")

    monkeypatch.setattr(peers, "start_thread", slow_start)
    recorder = Eager()
    streams = PeerStreams(STREAM, recorder.on_message, recorder.on_up, recorder.on_down)
    streams.set_peers({"peer": peer.address})
    wait_for(lambda: recorder.events)
    assert recorder.events == ["sent True"]
    assert streams.stop()


def test_hostile_peer_is_dropped(recorder: Recorder) -> None:
    def babble(link: TcpLink) -> None:
        serve_handshake(link, lambda hello: Welcome(1, "c", "peer", bytes(16), DEFAULT_NAMESPACE))
        link._socket.sendall(b"\0" * 64)
        link.recv()

    listener = TcpListener("127.0.0.1:0", babble)
    streams = PeerStreams(STREAM, recorder.on_message, recorder.on_up, recorder.on_down)
    streams.set_peers({"peer": listener.address})
    wait_for(lambda: len(recorder.events) >= 4)
    assert streams.stop()
    assert {event[:2] for event in recorder.events[::2]} == {"up"}
    assert {event[:4] for event in recorder.events[1::2]} == {"down"}
    assert not recorder.replies
    listener.stop()


def test_wrong_node_at_the_address_is_not_used(peer: Peer, recorder: Recorder) -> None:
    streams = PeerStreams(STREAM, recorder.on_message, recorder.on_up, recorder.on_down)
    streams.set_peers({"other": peer.address})
    time.sleep(0.3)
    assert not recorder.events
    assert streams.stop()


def test_stop_is_quick_towards_a_black_hole(recorder: Recorder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        streams = PeerStreams(STREAM, recorder.on_message, recorder.on_up, recorder.on_down)
        streams.set_peers({"peer": f"127.0.0.1:{mute.getsockname()[1]}"})
        time.sleep(0.1)
        start = time.monotonic()
        assert streams.stop()
        assert time.monotonic() - start < 3


if __name__ == "__main__":
    listening = TcpListener(f"127.0.0.1:{sys.argv[1]}", serve)
    sys.stdout.write(listening.address + "\n")
    sys.stdout.flush()
    sys.stdin.read()
