"""A thousand connections that do nothing, and 64 that do: what they cost the node in memory and in punctuality.

Laws: memory is the growth of the node's resident set after its arena was fully in memory, so the arena is not in it.
Lateness is the node's own figure, over a life that consists mostly of the load.
Limits: the 64 active connections are threads of one process of their own, which makes as many requests as it can.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any, Final

from emberkv.bench.case import Case, Goal, Progress, make_case
from emberkv.bench.node_process import BenchNode, make_hello, raise_descriptor_limit
from emberkv.bench.workload import Scale, load, make_blocks, store
from emberkv.client import Client
from emberkv.errors import EmberError
from emberkv.net.local_link import LocalLink, close_fds, connect_local
from emberkv.net.tcp import connect
from emberkv.net.tcp_link import TcpLink

ARENA_BYTES: Final = 256 << 20
CONNECT_TIMEOUT_MS: Final = 5000
SETTLE_S: Final = 0.5
MEMORY_BOUND_MB: Final = 60
STAGING_BYTES: Final = 64 << 20
"""Half of the local connections could save: their staging is mapped, and empty until they do."""
BLOCKS: Final = 4
BLOCK_BYTES: Final = 64 << 10
"""An active connection asks for 4 x 64 KiB again and again: small enough that requests, not bytes, load the node."""


def run(scale: Scale, progress: Progress) -> list[Case]:
    """Both cases, on a node of their own."""
    raise_descriptor_limit()
    with BenchNode(ARENA_BYTES) as node:
        progress(f"idle_connections: {scale.connections} connections, half of them local")
        before = node.memory()
        links = _open_idle(node, scale.connections)
        try:
            time.sleep(SETTLE_S)
            after = node.memory()
            connected = node.status()["connections"]
            progress(f"heartbeat_lateness: {scale.active} of them active for {scale.active_s:g} s")
            requests = _make_busy(node, scale)
            status = node.status()
        finally:
            for link in links:
                link.close()
        ttl_ms = node.budget.ttl_ms
    growth_mb = (after["VmRSS"] - before["VmRSS"]) / 1e6
    lateness = status["heartbeat_lateness_ms"]
    return [
        make_case(
            "idle_connections",
            growth_mb,
            "MB",
            goal=Goal("value", "<=", MEMORY_BOUND_MB),
            connections=connected,
            kb_each=growth_mb * 1e3 / max(1, scale.connections),
            anonymous_mb=(after["RssAnon"] - before["RssAnon"]) / 1e6,
            shared_mb=(after["RssShmem"] - before["RssShmem"]) / 1e6,
        ),
        make_case(
            "heartbeat_lateness_p99",
            lateness["p99"],
            "ms",
            reference="ttl of the failover budget",
            reference_value=ttl_ms,
            goal=Goal("ratio", "<=", 0.1),
            p50_ms=lateness["p50"],
            max_ms=lateness["max"],
            active=scale.active,
            requests_per_s=requests / scale.active_s,
        ),
    ]


def _open_idle(node: BenchNode, count: int) -> list[TcpLink | LocalLink]:
    links: list[TcpLink | LocalLink] = []
    try:
        for index in range(count):
            if index % 2:
                links.append(connect(node.tcp_address, make_hello(), CONNECT_TIMEOUT_MS)[0])
            else:
                hello = make_hello(want_staging_bytes=0 if index % 4 else STAGING_BYTES)
                local, _, *fds = connect_local(node.socket_path, hello, CONNECT_TIMEOUT_MS)
                links.append(local)
                close_fds([fd for fd in fds if fd >= 0])
    except BaseException:
        for link in links:
            link.close()
        raise
    return links


def _make_busy(node: BenchNode, scale: Scale) -> int:
    """Runs the active connections in a process of their own; returns how many requests were answered."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "emberkv.bench.wire_idle",
            node.tcp_address,
            node.socket_path,
            str(scale.active),
            str(scale.active_s),
        ],
        stdout=subprocess.PIPE,
        text=True,
        timeout=scale.active_s + 60,
        check=True,
    )
    return int(done.stdout)


def work(tcp_address: str, socket_path: str, active: int, seconds: float) -> int:
    """The process of the active connections: a client and a thread for each; returns the number of requests."""
    counts = [0] * active
    failures: list[Exception] = []
    end = time.monotonic() + seconds

    def body(number: int) -> None:
        options: dict[str, Any] = {"prefer_local": number % 2 == 0}
        try:
            with Client([f"unix:{socket_path}" if number % 2 == 0 else f"tcp:{tcp_address}"], **options) as client:
                blocks = make_blocks(BLOCKS, BLOCK_BYTES, "active")
                while time.monotonic() < end:
                    load(client, blocks)
                    counts[number] += 1
        except (EmberError, AssertionError, OSError, ValueError) as error:  # the main thread reports it
            failures.append(error)

    with Client([f"unix:{socket_path}"]) as client:
        store(client, make_blocks(BLOCKS, BLOCK_BYTES, "active"))
    threads = [threading.Thread(target=body, args=(number,)) for number in range(active)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(counts)


if __name__ == "__main__":
    sys.stdout.write(f"{work(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))}\n")
