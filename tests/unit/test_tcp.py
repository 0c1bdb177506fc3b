"""TCP links: frames and payload, and what hostile or broken connections may cost."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from emberkv.errors import ConfigError, HandshakeRefused, ProtocolError, Unavailable
from emberkv.messages import (
    WIRE_VERSION,
    BlockInfo,
    ErrorFrame,
    ExistsReply,
    ExistsRequest,
    GetReply,
    GetRequest,
    Hello,
    Kind,
    PutItem,
    PutRequest,
    Role,
    Welcome,
)
from emberkv.net import LinkClosed, LinkTimeout, now_ns
from emberkv.net.link import hung_up
from emberkv.net.overlap import recv_digests
from emberkv.net.tcp import TcpLink, TcpListener, connect, parse_address, serve_handshake
from emberkv.types import DEFAULT_NAMESPACE, Version, checksum
from emberkv.wire.codec import encode, get_reply_bytes

HELLO = Hello(Role.CLIENT, WIRE_VERSION, WIRE_VERSION, "", "default", "", bytes(16))
WELCOME = Welcome(WIRE_VERSION, "c1", "n1", bytes(16), DEFAULT_NAMESPACE)


def pair() -> tuple[TcpLink, TcpLink]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far = listener.accept()[0]
    return TcpLink(near, "far"), TcpLink(far, "near")


@pytest.fixture
def links() -> Iterator[tuple[TcpLink, TcpLink]]:
    near, far = pair()
    yield near, far
    near.close()
    far.close()


def answer_exists(link: TcpLink) -> None:
    """A server that says of each key that it is present."""
    if serve_handshake(link, lambda hello: WELCOME) is None:
        return
    while True:
        header, message = link.recv()
        assert isinstance(message, ExistsRequest)
        link.send(ExistsReply([0] * len(message.keys)), header.request_id)


@pytest.fixture
def listener() -> Iterator[TcpListener]:
    server = TcpListener("127.0.0.1:0", answer_exists)
    yield server
    assert server.stop()


def raw(listener: TcpListener) -> socket.socket:
    return socket.create_connection(parse_address(listener.address), timeout=10)


def ask(link: TcpLink) -> None:
    link.send(ExistsRequest([bytes(32)] * 3), 7)
    header, reply = link.recv()
    assert header.request_id == 7
    assert reply == ExistsReply([0, 0, 0])


def reply_of(sizes: list[int]) -> GetReply:
    return GetReply([BlockInfo(0, Version(1, 2), size, bytes(16)) for size in sizes])


def test_batch_costs_three_calls(links: tuple[TcpLink, TcpLink]) -> None:
    near, far = links
    source = os.urandom(32 << 16)
    views = [memoryview(source)[at : at + (1 << 16)] for at in range(0, len(source), 1 << 16)]

    def serve() -> None:
        header, _ = far.recv()
        far.send(reply_of([1 << 16] * 32), header.request_id, views)

    thread = threading.Thread(target=serve)
    thread.start()
    target = bytearray(len(source))
    places = [memoryview(target)[at : at + (1 << 16)] for at in range(0, len(source), 1 << 16)]
    before = near.calls
    assert near.send(GetRequest([bytes(32)] * 32), 5) == 1
    header, reply = near.recv_sized(get_reply_bytes(32), now_ns() + 5_000_000_000)
    assert near.recv_payload(places, now_ns() + 5_000_000_000) == len(source)
    thread.join()
    assert near.calls - before == 3
    assert header.request_id == 5
    assert isinstance(reply, GetReply)
    assert bytes(target) == source


def test_more_buffers_than_one_call_takes(links: tuple[TcpLink, TcpLink]) -> None:
    near, far = links
    source = os.urandom(3000 * 7)
    pieces = [memoryview(source)[at : at + 7] for at in range(0, len(source), 7)]
    assert near.send(reply_of([len(source)]), 1, pieces) == 3
    far.recv()
    target = bytearray(len(source))
    assert far.recv_payload([memoryview(target)[at : at + 3] for at in range(0, len(source), 3)]) == len(source)
    assert bytes(target) == source


def test_partial_sends_and_receives_are_completed(links: tuple[TcpLink, TcpLink]) -> None:
    near, far = links
    source = os.urandom(24 << 20)
    near.set_send_timeout_ms(50)  # the kernel stops in the middle, with progress
    sender = threading.Thread(target=near.send, args=(reply_of([len(source)]), 1, [memoryview(source)]))
    sender.start()
    far.recv()
    target = bytearray(len(source))
    for at in range(0, len(source), 3 << 20):
        time.sleep(0.02)
        assert far.recv_payload([memoryview(target)[at : at + (3 << 20)]]) == 3 << 20
    sender.join()
    assert bytes(target) == source


def test_timeout_between_frames_leaves_the_link_usable(links: tuple[TcpLink, TcpLink]) -> None:
    near, far = links
    near.set_recv_timeout_ms(30)
    with pytest.raises(LinkTimeout):
        near.recv()
    assert not near.closed
    far.send(ExistsReply([0]), 1)
    assert near.recv()[1] == ExistsReply([0])


def test_close_from_another_thread_wakes_recv(links: tuple[TcpLink, TcpLink]) -> None:
    near, _ = links
    timer = threading.Timer(0.1, near.close)
    timer.start()
    with pytest.raises(LinkClosed):
        near.recv()
    timer.join()
    with pytest.raises(LinkClosed):
        near.send(ExistsReply([0]), 1)


def fill_up(link: TcpLink) -> None:
    """Sends to a side that does not read."""
    while True:
        link.send_now(ExistsReply([0] * 128), 1)


def test_send_now_waits_neither_for_a_sender_nor_for_a_reader(links: tuple[TcpLink, TcpLink]) -> None:
    near, far = links
    data = os.urandom(16 << 20)
    sender = threading.Thread(target=near.send, args=(reply_of([len(data)]), 1, [memoryview(data)]))
    sender.start()
    far.recv()  # the sender stands in the middle of its payload
    start = time.monotonic()
    for number in range(3):
        near.send_now(ExistsReply([0]), 10 + number)
    assert time.monotonic() - start < 0.5
    target = bytearray(len(data))
    assert far.recv_payload([memoryview(target)]) == len(data)
    assert bytes(target) == data, "a late frame got into the payload"
    assert [far.recv()[0].request_id for _ in range(3)] == [10, 11, 12]
    sender.join()
    start = time.monotonic()
    with pytest.raises(LinkTimeout):
        fill_up(near)
    assert near.closed
    assert time.monotonic() - start < 5


def test_frozen_reader_does_not_hold_the_sender(links: tuple[TcpLink, TcpLink]) -> None:
    near, _ = links
    near.set_send_timeout_ms(200)
    start = time.monotonic()
    block = memoryview(bytearray(32 << 20))
    with pytest.raises(LinkTimeout, match="took no byte"):
        near.send(reply_of([32 << 20] * 4), 1, [block] * 4)
    assert time.monotonic() - start < 3
    assert near.closed


@pytest.mark.parametrize("contended", [False, True])
def test_blocks_are_checked_while_the_rest_arrives(links: tuple[TcpLink, TcpLink], contended: bool) -> None:
    near, far = links
    source = os.urandom(12 << 20)
    sender = threading.Thread(target=far.send, args=(reply_of([1 << 20] * 12), 1, [memoryview(source)]))
    sender.start()
    near.recv()
    sender_calls, near.send_ns = near.calls, 10_000_000 if contended else 0
    target = memoryview(bytearray(len(source)))
    views = [target[at : at + (1 << 20)] for at in range(0, len(source), 1 << 20)]
    received, digests = recv_digests(near, views, now_ns() + 5_000_000_000)
    sender.join()
    assert received == len(source)
    assert target == source
    assert digests == [checksum(view) for view in views]
    if contended:
        assert near.calls - sender_calls == 1


@pytest.mark.parametrize("contended", [False, True])
def test_blocks_of_any_size_are_checked(
    links: tuple[TcpLink, TcpLink], contended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = links
    # Each segment seems slow: a busy thread came in the middle, so the rest of a block already begun is taken at once.
    monkeypatch.setattr("emberkv.net.overlap.SEGMENT_SLOW_NS", -1 if contended else 1 << 60)
    sizes = [1, 128 << 10, 100_000, 30_000, (128 << 10) + 1, 700_001, 5, 64 << 10, 65_537]
    source = os.urandom(sum(sizes))
    sender = threading.Thread(target=far.send, args=(reply_of(sizes), 1, [memoryview(source)]))
    sender.start()
    near.recv()
    target = memoryview(bytearray(len(source)))
    ends = list(itertools.accumulate(sizes))
    views = [target[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    received, digests = recv_digests(near, views, now_ns() + 5_000_000_000)
    sender.join()
    assert received == len(source)
    assert target == source
    assert digests == [checksum(view) for view in views]


@pytest.mark.parametrize("sent", [0, 1, 3 << 20, (4 << 20) + 1])
def test_only_whole_blocks_are_checked(links: tuple[TcpLink, TcpLink], sent: int) -> None:
    near, far = links
    sender = threading.Thread(target=lambda: (far._socket.sendall(bytes(sent)), far.close()))
    sender.start()
    views = [memoryview(bytearray(1 << 20)) for _ in range(12)]
    received, digests = recv_digests(near, views, now_ns() + 5_000_000_000)
    sender.join()
    assert received == sent
    assert digests == [checksum(bytes(1 << 20))] * (sent >> 20)


@pytest.mark.parametrize("ending", ["deadline", "eof"])
def test_payload_that_stops(links: tuple[TcpLink, TcpLink], ending: str) -> None:
    near, far = links
    far._socket.sendall(bytes(1000))
    if ending == "eof":
        far.close()
    target = memoryview(bytearray(3000))
    start = now_ns()
    assert near.recv_payload([target[:500], target[500:]], start + 200_000_000) == 1000
    assert near.eof is (ending == "eof")
    assert near.closed
    assert now_ns() - start < 1_000_000_000


def test_sized_receive_takes_a_last_error_frame(links: tuple[TcpLink, TcpLink]) -> None:
    near, far = links
    far.send(ErrorFrame("node is stopping; try another"), 0)
    far.close()
    assert near.recv_sized(get_reply_bytes(64), now_ns() + 5_000_000_000)[1] == ErrorFrame(
        "node is stopping; try another"
    )


def test_sized_receive_refuses_another_size(links: tuple[TcpLink, TcpLink]) -> None:
    near, far = links
    far.send(reply_of([0] * 9), 0)
    with pytest.raises(ProtocolError):
        near.recv_sized(get_reply_bytes(4), now_ns() + 1_000_000_000)
    assert near.closed


def test_sized_receive_with_no_answer_keeps_its_deadline(links: tuple[TcpLink, TcpLink]) -> None:
    near, far = links
    start = now_ns()
    with pytest.raises(LinkTimeout):
        near.recv_sized(get_reply_bytes(4), start + 100_000_000)
    assert not near.closed
    far._socket.sendall(b"EKV1")
    with pytest.raises(LinkTimeout, match="middle"):
        near.recv_sized(get_reply_bytes(4), now_ns() + 100_000_000)
    assert near.closed
    assert now_ns() - start < 1_000_000_000


def test_put_that_points_into_shared_memory_is_refused(links: tuple[TcpLink, TcpLink]) -> None:
    near, far = links
    near.send(PutRequest([PutItem(bytes(32), bytes(24), 4096)]), 1)
    with pytest.raises(ProtocolError, match="without its payload"):
        far.recv()


def test_idle_link_is_fresh_until_something_came(links: tuple[TcpLink, TcpLink]) -> None:
    near, far = links
    assert near.is_fresh()
    far.send(ExistsReply([0]), 1)
    time.sleep(0.05)
    assert not near.is_fresh()
    assert far.is_fresh()
    near.close()
    time.sleep(0.05)
    assert not far.is_fresh()


def damaged(**fields: int) -> bytes:
    """A GET header with a right CRC field position but the given fields changed (the CRC is then wrong or unread)."""
    frame = bytearray(encode(GetRequest([bytes(32)]), 1))
    if "body_len" in fields:
        struct.pack_into("<I", frame, 12, fields["body_len"])
    if "payload_len" in fields:
        struct.pack_into("<Q", frame, 16, fields["payload_len"])
    if "crc" in fields:
        frame[28] ^= fields["crc"]
    return bytes(frame)


HOSTILE = {
    "garbage": b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" * 4,
    "huge body": damaged(body_len=0xFFFFFFFF),
    "huge payload": damaged(payload_len=1 << 62),
    "wrong CRC": damaged(crc=1),
    "no HELLO": encode(GetRequest([bytes(32)]), 1),
    "truncated": encode(HELLO, 1)[:-3],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_end_their_own_connection_only(
    name: str, listener: TcpListener, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "emberkv.net")
    good, _ = connect(listener.address, HELLO, 2000)
    with raw(listener) as bad:
        bad.sendall(HOSTILE[name])
        if name == "truncated":
            bad.shutdown(socket.SHUT_WR)
        try:
            assert bad.recv(10) == b""
        except ConnectionResetError:
            pass  # it closed with bytes of ours unread
    wait_for(lambda: listener.connections == 1)
    assert len([record for record in caplog.records if record.name == "emberkv.net"]) == 1
    assert "\n" not in caplog.records[0].getMessage()
    ask(good)
    good.close()


@pytest.mark.parametrize("begin", [b"", b"EKV1\x01", encode(HELLO, 1)[:40]])
def test_slow_handshake_is_ended(begin: bytes, listener: TcpListener) -> None:
    start = time.monotonic()
    with raw(listener) as slow:
        slow.sendall(begin)
        assert slow.recv(10) == b""
    assert 1.5 < time.monotonic() - start < 4


def test_dripping_bytes_do_not_extend_the_deadline(listener: TcpListener) -> None:
    start = time.monotonic()
    with raw(listener) as slow:
        try:
            for byte in encode(HELLO, 1)[:31]:
                slow.sendall(bytes([byte]))
                time.sleep(0.2)
        except OSError:
            pass
    assert time.monotonic() - start < 4
    wait_for(lambda: listener.connections == 0)


def test_port_in_use_is_one_clear_line(listener: TcpListener) -> None:
    with pytest.raises(ConfigError, match="choose another port") as caught:
        TcpListener(listener.address, answer_exists)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:70000", "host:-1"])
def test_bad_address(address: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(address)


def test_ipv6_address() -> None:
    assert parse_address("[::1]:80") == ("::1", 80)


def test_stop_wakes_idle_connections() -> None:
    listener = TcpListener("127.0.0.1:0", answer_exists)
    links = [connect(listener.address, HELLO, 2000)[0] for _ in range(20)]
    start = time.monotonic()
    assert listener.stop()
    assert time.monotonic() - start < 2
    for link in links:
        with pytest.raises(LinkClosed):
            link.recv()
        link.close()
    with pytest.raises(Unavailable):
        connect(listener.address, HELLO, 500)


def test_connections_are_bounded() -> None:
    listener = TcpListener("127.0.0.1:0", answer_exists, connections_max=2)
    links = [connect(listener.address, HELLO, 2000)[0] for _ in range(2)]
    with pytest.raises(Unavailable):
        connect(listener.address, HELLO, 2000)
    ask(links[0])
    for link in links:
        link.close()
    assert listener.stop()


def refusing(reply: Welcome | ErrorFrame) -> TcpListener:
    def handle(link: TcpLink) -> None:
        serve_handshake(link, lambda hello: reply)

    return TcpListener("127.0.0.1:0", handle)


def test_refusals_are_told_apart() -> None:
    for reply, error in (
        (ErrorFrame("tenant unknown", refused=True), HandshakeRefused),
        (ErrorFrame("starting"), Unavailable),
        (Welcome(9, "c1", "n1", bytes(16), DEFAULT_NAMESPACE), HandshakeRefused),
    ):
        listener = refusing(reply)
        with pytest.raises(error):
            connect(listener.address, HELLO, 2000)
        listener.stop()


def test_another_cluster_is_refused(listener: TcpListener) -> None:
    hello = Hello(Role.CLIENT, WIRE_VERSION, WIRE_VERSION, "c2", "default", "", bytes(16))
    with pytest.raises(HandshakeRefused, match="cluster 'c1'"):
        connect(listener.address, hello, 2000)


def test_nobody_answers_the_handshake() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        start = time.monotonic()
        with pytest.raises(Unavailable):
            connect(f"127.0.0.1:{mute.getsockname()[1]}", HELLO, 200)
        assert time.monotonic() - start < 1


def test_forked_child_does_not_hold_the_connection(links: tuple[TcpLink, TcpLink]) -> None:
    near, far = links
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os._exit(0 if near.fileno() == -1 and os.read(reader, 1) == b"x" else 1)
    near.send(ExistsReply([0]), 1)  # the parent goes on
    assert far.recv()[0].kind is Kind.EXISTS_REPLY
    near.close()
    far.set_recv_timeout_ms(2000)
    with pytest.raises(LinkClosed):  # though the child lives
        far.recv()
    os.write(writer, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(reader)
    os.close(writer)


def wait_for(condition: object, timeout_s: float = 5) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_who_has_hung_up_is_seen_although_its_bytes_lie_here_unread() -> None:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        near, far = socket.socketpair(socket.AF_UNIX, kind)
        with far:
            near.sendall(b"a request")
            assert not hung_up(far.fileno())
            near.close()
            assert hung_up(far.fileno())
            assert far.recv(100) == b"a request"
        assert hung_up(-1)
