"""The bare reference: what this machine does for plain Python sockets, without any of our code in between.

Why it exists: a rate means nothing without what the same machine does, in the same minute, for the least possible work.
Laws: two processes, blocking sockets, TCP_NODELAY; a batch is one small request and one sendmsg of slices of prefaulted
memory, received with recvmsg_into(MSG_WAITALL) into prefaulted memory; nothing is checked or copied again.
Limits: replies of at most 1,024 slices. `python -m emberkv.bench.ref` prints JSON.
"""

from __future__ import annotations

import json
import mmap
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["BarePair", "iperf3_rate", "prefaulted"]

REQUEST: Final = struct.Struct("<II56x")
"""Number of slices and bytes of each: 64 bytes on the wire, as small as a request can matter."""
SOURCE_BYTES: Final = 64 << 20
"""Memory that the serving side sends from; a reply may not be larger."""
SLICES_MAX: Final = 1024
TIMEOUT_S: Final = 10
"""Longest wait for the other process, in every call."""


def prefaulted(size: int) -> memoryview:
    """Anonymous shared memory of `size` bytes whose pages are all there and not the zero page."""
    area = mmap.mmap(-1, size)
    for at in range(0, size, 4096):
        area[at] = 1 + at // 4096 % 255
    return memoryview(area)


def _prepare(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", TIMEOUT_S, 0))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", TIMEOUT_S, 0))
    return connection


def _send_slices(connection: socket.socket, slices: Sequence[memoryview], total: int) -> None:
    sent = connection.sendmsg(slices)
    if sent < total:  # a signal came between
        for piece in slices:
            if sent < piece.nbytes:
                connection.sendall(piece[sent:])
            sent = max(0, sent - piece.nbytes)


def _recv_slices(connection: socket.socket, slices: Sequence[memoryview], total: int) -> None:
    received = connection.recvmsg_into(slices, 0, socket.MSG_WAITALL)[0]
    while received < total:
        skipped, rest = received, []
        for piece in slices:
            rest.append(piece[min(skipped, piece.nbytes) :])
            skipped = max(0, skipped - piece.nbytes)
        count = connection.recvmsg_into([piece for piece in rest if piece.nbytes], 0, socket.MSG_WAITALL)[0]
        if count == 0:
            raise ConnectionError("the bare reference server ended")
        received += count


def serve() -> None:
    """The serving process: prints its port, answers one connection until it ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    source = prefaulted(SOURCE_BYTES)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    connection = _prepare(listener.accept()[0])
    # It waits as long as the measuring process lives: EOF ends it.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 0))
    slices: list[memoryview] = []
    shape = (0, 0)
    while True:
        request = connection.recv(REQUEST.size, socket.MSG_WAITALL)
        if len(request) < REQUEST.size:
            return
        count, size = REQUEST.unpack(request)
        if (count, size) != shape:
            shape = (count, size)
            slices = [source[index * size : (index + 1) * size] for index in range(count)]
        if count == 1:
            connection.sendall(slices[0])
        else:
            _send_slices(connection, slices, count * size)


class BarePair:
    """A serving process and a connection to it; use as a context manager, and interleave its calls with yours.

    `destination` is any writable memory (default: fresh prefaulted memory); give the same kind that you compare with.
    """

    def __init__(self, destination: memoryview | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "emberkv.bench.ref", "--serve"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert self._process.stdout is not None
            port = int(self._process.stdout.readline())
            self._socket = _prepare(socket.create_connection(("127.0.0.1", port)))
            self._socket.setblocking(True)
        except (OSError, ValueError):
            self._process.kill()
            self._process.wait()
            raise
        self._destination = destination if destination is not None else prefaulted(SOURCE_BYTES)
        self._slices: dict[tuple[int, int], list[memoryview]] = {}

    @property
    def pid(self) -> int:
        """The serving process. Latencies depend on which core it runs on (measured here: 13 us for a ping-pong on one
        core, 37 to 65 on two), so a comparison pins both serving processes alike with os.sched_setaffinity."""
        return self._process.pid

    def __enter__(self) -> BarePair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and the serving process."""
        self._socket.close()
        try:
            self._process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def batch_s(self, count: int, size: int) -> float:
        """Seconds of one batch: request sent until `count` slices of `size` bytes have arrived."""
        slices = self._slices.get((count, size))
        if slices is None:
            if count > SLICES_MAX or count * size > min(SOURCE_BYTES, self._destination.nbytes):
                raise ValueError(f"{count} x {size} bytes do not fit the reference's memory")
            slices = [self._destination[index * size : (index + 1) * size] for index in range(count)]
            self._slices[(count, size)] = slices
        start = time.perf_counter()
        self._socket.sendall(REQUEST.pack(count, size))
        _recv_slices(self._socket, slices, count * size)
        return time.perf_counter() - start

    def ping_s(self, size: int = 4096) -> float:
        """Seconds of one ping-pong: small request, `size` bytes back by recv_into."""
        target = self._destination[:size]
        start = time.perf_counter()
        self._socket.sendall(REQUEST.pack(1, size))
        if self._socket.recv_into(target, size, socket.MSG_WAITALL) != size:
            raise ConnectionError("the bare reference server ended")
        return time.perf_counter() - start


def iperf3_rate(seconds: float = 1.0) -> float | None:
    """Bytes per second of one iperf3 stream over loopback; None when iperf3 is missing or fails."""
    if shutil.which("iperf3") is None:
        return None
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(
        ["iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        command = ["iperf3", "-c", "127.0.0.1", "-p", port, "-t", str(max(1, round(seconds))), "--json"]
        # iperf3's server has no way to say that it listens: the client tries again for a second.
        for _ in range(20):
            time.sleep(0.05)
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + TIMEOUT_S, check=False)
            if done.returncode == 0:
                return _received_rate(done.stdout)
            if server.poll() is not None:
                return None
    except subprocess.TimeoutExpired:
        return None
    finally:
        server.kill()
        server.wait()
    return None


def _received_rate(text: str) -> float | None:
    try:
        return float(json.loads(text)["end"]["sum_received"]["bits_per_second"]) / 8
    except (ValueError, KeyError, TypeError):
        return None


def measure(rounds: int = 5, repeats: int = 20, pings: int = 2000) -> dict[str, Any]:
    """All reference cases: medians over `rounds` of the median of `repeats`. Rates in bytes/s, times in seconds."""
    shapes = {"batch_32x1MiB": (32, 1 << 20), "batch_64x64KiB": (64, 64 << 10)}
    result: dict[str, Any] = {}
    with BarePair() as pair:
        for name, (count, size) in shapes.items():
            pair.batch_s(count, size)
            times = [statistics.median(pair.batch_s(count, size) for _ in range(repeats)) for _ in range(rounds)]
            result[name] = {"seconds_p50": statistics.median(times), "rate": count * size / statistics.median(times)}
        times = sorted(pair.ping_s() for _ in range(pings))
        result["ping_4KiB"] = {"seconds_p50": times[len(times) // 2], "seconds_p99": times[len(times) * 99 // 100]}
    result["iperf3_rate"] = iperf3_rate()
    return result


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        sys.stdout.write(json.dumps(measure(), indent=2) + "\n")
