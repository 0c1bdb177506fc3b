"""The local link: frames, descriptors, limits, stale and taken paths, forks."""

from __future__ import annotations

import array
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emberkv.errors import ConfigError, HandshakeRefused, ProtocolError, Unavailable
from emberkv.messages import ErrorFrame, GetRequest, Hello, MapRequest, Role, StatusReply, Unpin, Welcome
from emberkv.net import LinkClosed, LinkTimeout
from emberkv.net.local import LocalLink, LocalListener, close_fds, connect_local
from emberkv.net.tcp import TcpLink, TcpListener
from emberkv.types import DEFAULT_NAMESPACE
from emberkv.wire.codec import BODY_BYTES_MAX, FRAME_BYTES_MAX, encode

HELLO = Hello(Role.CLIENT, 1, 1, "", "t", "", bytes(16))


def welcome(arena: int = 0, staging: int = 0, wire: int = 1, cluster: str = "test") -> Welcome:
    return Welcome(wire, cluster, "n", bytes(16), DEFAULT_NAMESPACE, arena, staging)


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def memory_file(size: int = 4096) -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    return fd


def wait_for(condition: Callable[[], bool], timeout_s: float = 3.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition did not come true"
        time.sleep(0.005)


@pytest.fixture
def pair() -> Iterator[tuple[LocalLink, LocalLink]]:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    links = LocalLink(one), LocalLink(two)
    yield links
    for link in links:
        link.close()


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ekv-") as folder:
        yield folder + "/node.sock"


def test_a_frame_arrives_whole_and_is_counted(pair: tuple[LocalLink, LocalLink]) -> None:
    here, there = pair
    keys = [os.urandom(32) for _ in range(128)]
    here.send(GetRequest(keys, 250), 7)
    header, message, fds = there.recv()
    assert (header.request_id, fds) == (7, ())
    assert isinstance(message, GetRequest)
    assert message.keys == keys
    assert (here.calls, there.calls) == (1, 1)


def test_the_largest_frame_fits(pair: tuple[LocalLink, LocalLink]) -> None:
    here, there = pair
    document = b"x" * (BODY_BYTES_MAX - 16)
    here.send(StatusReply(document), 1)
    _, message, _ = there.recv()
    assert isinstance(message, StatusReply)
    assert message.document == document


def test_descriptors_travel_and_belong_to_the_receiver(pair: tuple[LocalLink, LocalLink]) -> None:
    here, there = pair
    mine = [memory_file(), memory_file(8192)]
    here.send(welcome(4096, 8192), 0, mine)
    _, _, fds = there.recv(2)
    assert [os.fstat(fd).st_size for fd in fds] == [4096, 8192]
    assert all(not os.get_inheritable(fd) for fd in fds)
    for fd in (*fds, *mine):
        os.close(fd)


def test_unwanted_descriptors_are_dropped(pair: tuple[LocalLink, LocalLink]) -> None:
    here, there = pair
    fd = memory_file()
    before = open_fds()
    here.send(MapRequest(), 1, [fd])
    assert there.recv()[2] == ()
    assert open_fds() == before
    os.close(fd)


@pytest.mark.parametrize("fds_max", [1, 2])
def test_too_many_descriptors_end_the_link_and_none_stays(pair: tuple[LocalLink, LocalLink], fds_max: int) -> None:
    here, there = pair
    mine = [memory_file() for _ in range(5)]
    before = open_fds()
    here.send(welcome(), 0, mine)
    with pytest.raises(ProtocolError, match="descriptors"):
        there.recv(fds_max)
    assert open_fds() == before
    for fd in mine:
        os.close(fd)


def test_a_malformed_frame_with_descriptors_leaves_none_open(pair: tuple[LocalLink, LocalLink]) -> None:
    here, there = pair
    fd = memory_file()
    before = open_fds()
    here._socket.sendmsg([b"rubbish" * 10], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd, fd]))])
    with pytest.raises(ProtocolError):
        there.recv(2)
    assert open_fds() == before
    os.close(fd)


@pytest.mark.parametrize("cut", [1, 31, 32, 40])
def test_a_truncated_frame_is_a_protocol_error(pair: tuple[LocalLink, LocalLink], cut: int) -> None:
    here, there = pair
    here._socket.send(encode(GetRequest([bytes(32)]), 1)[:cut])
    with pytest.raises(ProtocolError):
        there.recv()


def test_a_frame_over_the_limit_is_a_protocol_error(pair: tuple[LocalLink, LocalLink]) -> None:
    here, there = pair
    here._socket.send(bytes(FRAME_BYTES_MAX + 1))
    with pytest.raises(ProtocolError, match="limit"):
        there.recv()


def test_bytes_behind_a_frame_are_a_protocol_error(pair: tuple[LocalLink, LocalLink]) -> None:
    here, there = pair
    here._socket.send(encode(MapRequest(), 1) + b"x")
    with pytest.raises(ProtocolError):
        there.recv()


def test_waits_end_in_time_and_the_link_lives_on(pair: tuple[LocalLink, LocalLink]) -> None:
    here, there = pair
    there.set_recv_timeout_ms(40)
    begin = time.monotonic()
    with pytest.raises(LinkTimeout):
        there.recv()
    assert 0.03 < time.monotonic() - begin < 0.5
    here.send(Unpin([1]), 3)
    assert there.recv()[0].request_id == 3


def test_a_peer_that_does_not_read_ends_the_send_in_time(pair: tuple[LocalLink, LocalLink]) -> None:
    here, _ = pair
    here.set_send_timeout_ms(40)
    begin = time.monotonic()

    def fill() -> None:
        for number in range(10_000):
            here.send(StatusReply(bytes(100_000)), number)

    with pytest.raises(LinkTimeout):
        fill()
    assert time.monotonic() - begin < 3


def test_end_of_connection_is_link_closed(pair: tuple[LocalLink, LocalLink]) -> None:
    here, there = pair
    here.close()
    with pytest.raises(LinkClosed):
        there.recv()
    with pytest.raises(LinkClosed):
        there.send(MapRequest(), 1)
    assert not there.is_fresh()
    here.close()


def test_close_wakes_a_receiver(pair: tuple[LocalLink, LocalLink]) -> None:
    here, _ = pair
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(LinkClosed):
            here.recv()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.05)
    here.close()
    assert ended.wait(2)


def serve(answer: Welcome | ErrorFrame, fds: tuple[int, ...] = ()) -> Callable[[LocalLink], None]:
    def handler(link: LocalLink) -> None:
        link.recv()
        link.send(answer, 0, fds)
        try:
            link.recv()
        except LinkClosed:
            pass

    return handler


def test_handshake_hands_over_both_memories(path: str) -> None:
    fds = memory_file(4096), memory_file(8192)
    listener = LocalListener(path, serve(welcome(4096, 8192), fds))
    link, answer, arena, staging = connect_local(path, HELLO, 500)
    assert answer.node == "n"
    assert [os.fstat(fd).st_size for fd in (arena, staging)] == [4096, 8192]
    assert link.peer_pid() == os.getpid()
    pidfd = link.peer_pidfd()
    for fd in (arena, staging, pidfd, *fds):
        os.close(fd)
    link.close()
    listener.close()


def test_staging_alone_is_not_taken_for_the_arena(path: str) -> None:
    fd = memory_file(8192)
    listener = LocalListener(path, serve(welcome(0, 8192), (fd,)))
    link, _, arena, staging = connect_local(path, HELLO, 500)
    assert arena == -1
    assert os.fstat(staging).st_size == 8192
    os.close(staging)
    os.close(fd)
    link.close()
    listener.close()


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (ErrorFrame("wrong tenant", True), HandshakeRefused, "wrong tenant"),
        (ErrorFrame("busy", False), Unavailable, "busy"),
        (welcome(4096), ProtocolError, "descriptors"),
        (welcome(wire=9), HandshakeRefused, "version"),
    ],
)
def test_handshake_failures(path: str, answer: Welcome | ErrorFrame, error: type[Exception], text: str) -> None:
    listener = LocalListener(path, serve(answer))
    before = len(open_fds())
    with pytest.raises(error, match=text):
        connect_local(path, HELLO, 500)
    wait_for(lambda: listener.connections() == 0)
    assert len(open_fds()) == before
    listener.close()


def test_wrong_cluster_is_refused_by_the_client_too(path: str) -> None:
    listener = LocalListener(path, serve(welcome(cluster="other")))
    with pytest.raises(HandshakeRefused, match="cluster"):
        connect_local(path, Hello(Role.CLIENT, 1, 1, "mine", "t", "", bytes(16)), 500)
    listener.close()


def test_a_silent_node_is_unavailable_in_time(path: str) -> None:
    listener = LocalListener(path, lambda link: time.sleep(1))
    begin = time.monotonic()
    with pytest.raises(Unavailable):
        connect_local(path, HELLO, 60)
    assert time.monotonic() - begin < 0.5
    listener.close()


def test_nobody_there_is_unavailable(path: str) -> None:
    with pytest.raises(Unavailable, match="no node answers"):
        connect_local(path, HELLO, 100)


def test_a_path_that_is_too_long_is_a_config_error(path: str) -> None:
    long = path + "x" * 108
    for call in (lambda: LocalListener(long, lambda link: None), lambda: connect_local(long, HELLO, 100)):
        with pytest.raises(ConfigError, match="107"):
            call()


def test_a_path_in_use_is_a_config_error_in_one_line(path: str) -> None:
    listener = LocalListener(path, lambda link: None)
    with pytest.raises(ConfigError, match="in use") as caught:
        LocalListener(path, lambda link: None)
    assert "\n" not in str(caught.value)
    listener.close()
    LocalListener(path, lambda link: None).close()


def test_a_socket_of_a_foreign_program_is_not_taken(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(path)
        other.listen()
        with pytest.raises(ConfigError, match="in use"):
            LocalListener(path, lambda link: None)


def test_a_plain_file_is_not_replaced(path: str) -> None:
    Path(path).write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        LocalListener(path, lambda link: None)
    assert Path(path).read_text() == "precious"


def test_a_missing_folder_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        LocalListener("/nonexistent-folder/node.sock", lambda link: None)


NODE = """
import sys, time
from emberkv.net.local import LocalListener
LocalListener(sys.argv[1], lambda link: link.recv())
print("up", flush=True)
time.sleep(60)
"""


def test_the_socket_of_a_killed_node_is_replaced_and_of_a_frozen_one_is_not(path: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", NODE, path], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ConfigError, match="in use"):
            LocalListener(path, lambda link: None)
    finally:
        process.kill()
        process.wait()
    assert os.path.exists(path)
    LocalListener(path, lambda link: None).close()
    assert not os.path.exists(path)


def test_connections_are_bounded_and_the_refusal_says_so(path: str) -> None:
    release = threading.Event()
    listener = LocalListener(path, lambda link: release.wait(5) and None, connections_max=2)
    sockets = []
    for _ in range(2):
        sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        sockets[-1].connect(path)
    wait_for(lambda: listener.connections() == 2)
    with pytest.raises(Unavailable, match="limit"):
        connect_local(path, HELLO, 500)
    release.set()
    for each in sockets:
        each.close()
    listener.close()


def test_want_of_threads_costs_one_connection_not_the_door(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener = LocalListener(path, lambda link: link.recv() and None)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(Unavailable, match="room"):
        connect_local(path, HELLO, 500)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert listener.connections() == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as second:
        second.connect(path)
        wait_for(lambda: listener.connections() == 1)
    assert [record.message for record in caplog.records] == ["local connection refused: can't start new thread"]
    listener.close()


def test_want_of_descriptors_is_logged_once(path: str, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def hold(link: LocalLink | TcpLink) -> None:
        release.wait(5)

    listener, tcp = LocalListener(path, hold), TcpListener("127.0.0.1:0", hold)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), socket.socket()]
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, open_fds())) + 8, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        waiting[0].connect(path)
        waiting[1].connect(("127.0.0.1", int(tcp.address.rpartition(":")[2])))
        time.sleep(0.4)
    finally:
        release.set()
        close_fds(taken)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_for(lambda: all(one.recv(1) == b"" for one in waiting))
    assert sorted("local" in record.message for record in caplog.records) == [False, True]
    for one in waiting:
        one.close()
    listener.close()
    tcp.stop()


def test_a_bad_connection_ends_alone(path: str, caplog: pytest.LogCaptureFixture) -> None:
    def handler(link: LocalLink) -> None:
        while True:
            link.recv()
            link.send(welcome(), 0)

    listener = LocalListener(path, handler)
    good, *_ = connect_local(path, HELLO, 500)
    bad = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bad.connect(path)
    bad.send(b"\xff" * 64)
    assert bad.recv(10) == b""
    bad.close()
    good.send(MapRequest(), 1)
    assert isinstance(good.recv()[1], Welcome)
    wait_for(lambda: listener.connections() == 1)
    assert ["connection closed" in record.message for record in caplog.records] == [True]
    good.close()
    listener.close()


def test_a_forked_child_does_not_keep_the_connection_open(path: str) -> None:
    ended = threading.Event()

    def handler(link: LocalLink) -> None:
        link.recv()
        link.send(welcome(), 0)
        try:
            link.recv()
        except LinkClosed:
            ended.set()

    listener = LocalListener(path, handler)
    link, *_ = connect_local(path, HELLO, 500)
    pid = os.fork()
    if pid == 0:
        time.sleep(3)
        os._exit(0)
    try:
        time.sleep(0.1)
        assert not ended.is_set()  # the child closed its copy without ending ours
        link.close()
        assert ended.wait(1)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        listener.close()


def test_many_idle_links_touch_little_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(200)]
    links = [LocalLink(each) for pair in pairs for each in pair]
    assert resident() - before < len(links) * 16_384
    for link in links:
        link.close()
