"""A real node in a process of its own, in a temporary directory, for as long as a benchmark lasts.

Why it exists: what is measured must be the program that people run, started by its own composition root.
Laws: nothing is left behind: the node is ended by its pid, also by the kernel when the benchmark dies first, and its
directory goes with it.
Limits: one node, factor 1: a client's batch goes to one process, like the reference's. Namespaces: `default`
(verify=pin) and `entry` (verify=entry).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from emberkv.config import ClusterConfig, NamespaceConfig
from emberkv.config.node import NodeConfig
from emberkv.errors import EmberError, Unavailable
from emberkv.messages import Hello, Role, StatusReply, StatusRequest
from emberkv.net.local_link import LocalLink, close_fds, connect_local

START_TIMEOUT_S: Final = 60.0
"""Prefault of the arena included: 1.3 GB/s, slower on a busy machine."""
STOP_TIMEOUT_S: Final = 15.0
DESCRIPTORS: Final = 16_384
"""1,000 local connections take three each; the usual soft limit is 1,024."""
PR_SET_PDEATHSIG: Final = 1
ENTRY_NAMESPACE: Final = "entry"
HEAD_BYTES: Final = 2000
"""Tail of the node's log that goes into an error."""


class Launch(msgspec.Struct, frozen=True):
    """What the child process is told: both configurations, validated again there."""

    cluster: ClusterConfig
    node: NodeConfig


def make_hello(namespace: str = "default", want_staging_bytes: int = 0) -> Hello:
    """HELLO of a client that takes any cluster."""
    return Hello(int(Role.CLIENT), 1, 1, "", "default", "", os.urandom(16), namespace, want_staging_bytes)


class BenchNode:
    """A started node that is primary of all its shards and whose arena is in memory; use as a context manager."""

    def __init__(self, arena_bytes: int, *, staging_bytes: int = 64 << 20, connections_max: int = 4096) -> None:
        self.arena_bytes = arena_bytes
        self._directory = Path(tempfile.mkdtemp(prefix="emberkv-bench-"))
        cluster = ClusterConfig(
            cluster_id=f"bench-{os.getpid()}-{self._directory.name[-8:].replace('_', 'x')}",
            members=["bench"],
            factor=1,
            namespaces=[NamespaceConfig(name="default"), NamespaceConfig(name=ENTRY_NAMESPACE, verify="entry")],
            control_dir=str(self._directory / "control"),
            data_dir=str(self._directory / "coordinator"),
        )
        node = NodeConfig(
            name="bench",
            data_dir=str(self._directory / "node"),
            arena_bytes=arena_bytes,
            staging_bytes=staging_bytes,
            connections_max=connections_max,
            log_level="warning",
        )
        self.socket_path = str(node.socket_path)
        self.budget = cluster.budget()
        self._log_path = self._directory / "node.log"
        launch = msgspec.json.encode(Launch(cluster, node)).decode()
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "emberkv.bench.node_process", str(os.getpid()), launch],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # An interrupt from the keyboard goes to a whole group; the benchmark decides when its node ends.
                process_group=0,
            )
        try:
            self.tcp_address = self._wait_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The node's process."""
        return self._process.pid

    def __enter__(self) -> BenchNode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_ready(self) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        state = "does not answer"
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise Unavailable(f"the node ended at its start: {self.log_tail()}")
            try:
                body = self.status()
            except EmberError as error:
                state = str(error)
                time.sleep(0.05)
                continue
            if body["shards"]["primary"] and not body["shards"]["vacant"] and self._prefaulted(body):
                return str(body["addresses"]["tcp"])
            state = f"shards {body['shards']}, prefaulted {body['prefaulted_bytes']} bytes"
            time.sleep(0.05)
        raise Unavailable(f"the node was not ready after {START_TIMEOUT_S:.0f} s ({state}): {self.log_tail()}")

    def _prefaulted(self, body: dict[str, Any]) -> bool:
        return bool(body["prefaulted_bytes"] >= body["bytes_total"])

    def status(self) -> dict[str, Any]:
        """The node's status document. Raises Unavailable."""
        link, _, *fds = connect_local(self.socket_path, make_hello(), 2000)
        try:
            close_fds([fd for fd in fds if fd >= 0])
            link.send(StatusRequest(), 1)
            return _status_of(link)
        finally:
            link.close()

    def rss_bytes(self) -> int:
        """Resident memory of the process, the arena's pages included."""
        return memory_of(self.pid)["VmRSS"]

    def memory(self) -> dict[str, int]:
        """Resident memory in bytes by kind: VmRSS, RssAnon, RssFile, RssShmem."""
        return memory_of(self.pid)

    def log_tail(self) -> str:
        """What the node said last, in one line."""
        try:
            text = self._log_path.read_text(errors="replace")[-HEAD_BYTES:]
        except OSError:
            return "(no log)"
        return " | ".join(text.strip().splitlines()[-5:]) or "(it said nothing)"

    def close(self) -> None:
        """Ends the node and removes its directory. May be called twice."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def _status_of(link: LocalLink) -> dict[str, Any]:
    _, reply, _ = link.recv()
    if not isinstance(reply, StatusReply):
        raise Unavailable(f"asked for the status, got {type(reply).__name__}")
    body: dict[str, Any] = json.loads(reply.document)
    return body


def memory_of(pid: int) -> dict[str, int]:
    """Resident memory of a process in bytes: VmRSS, RssAnon, RssFile, RssShmem."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmRSS", "RssAnon", "RssFile", "RssShmem"):
            found[name] = int(rest.split()[0]) * 1024
    return found


def raise_descriptor_limit(wanted: int = DESCRIPTORS) -> int:
    """Raises the soft limit of open files towards `wanted`; returns what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = min(wanted, hard) if hard != resource.RLIM_INFINITY else wanted
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def main(arguments: list[str]) -> None:
    """The child: ends with its parent, then is a node like any other."""
    parent, text = int(arguments[0]), arguments[1]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return  # it died before we asked to be told
    raise_descriptor_limit()
    from emberkv.node.main import run  # after the checks above: loading a node takes a while

    launch = msgspec.json.decode(text, type=Launch)
    try:
        run(launch.cluster, launch.node)
    finally:
        if os.getppid() != parent:  # nobody else is left to do it
            shutil.rmtree(launch.node.data_path.parent, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
