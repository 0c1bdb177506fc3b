"""Three real nodes for as long as a benchmark lasts, watched from outside.

Why it exists: what a level costs shows only between nodes, and only once everything that a put set in motion is over.
Laws: nodes and files are gone when this is left. A look at a node goes over a connection that was opened before, so
that looking costs the same each time. Nothing here changes what the nodes hold.
Limits: one machine; factor 2. The near node is `near`; a key's place says what that node is to it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from enum import Enum
from pathlib import Path
from typing import Any, Final

from emberkv.bench.tcp_bytes import TcpBytes
from emberkv.cli.cluster import LocalCluster
from emberkv.cli.probe import hello
from emberkv.config import NamespaceConfig
from emberkv.errors import Unavailable
from emberkv.messages import MapReply, MapRequest, ShardOwner, StatusReply, StatusRequest
from emberkv.net.local_link import close_fds, connect_local
from emberkv.types import shard_of

NODES: Final = ("n1", "n2", "n3")
NEAR: Final = "n1"
OTHER: Final = "n2"
STRONG_NAMESPACE: Final = "ledger"
START_S: Final = 60.0
"""Prefault of three arenas included."""
STILL_S: Final = 2.0
"""Two heartbeat periods of the usual budget without a moved shard: placement has come to rest."""
SETTLE_S: Final = 60.0
ANSWER_MS: Final = 5000
SETTLE_POLL_S: Final = 0.001


class Place(Enum):
    """What the near node is to the shard of a key."""

    PRIMARY = "primary"
    BACKUP = "backup"
    OUTSIDE = "outside"
    """No replica: what it holds is a near copy."""


def place_of(owner: ShardOwner | None, node: str) -> Place | None:
    """None: the shard is vacant or not in rest, and nothing is measured on it."""
    if owner is None or set(owner.in_sync) != set(owner.replicas):
        return None
    if owner.primary == node:
        return Place.PRIMARY
    return Place.BACKUP if node in owner.replicas else Place.OUTSIDE


class Watcher:
    """One connection to one node that only asks."""

    def __init__(self, socket_path: Path) -> None:
        self._link, _, *fds = connect_local(str(socket_path), hello(), ANSWER_MS)
        close_fds([fd for fd in fds if fd >= 0])
        self._link.set_recv_timeout_ms(ANSWER_MS)

    def close(self) -> None:
        """Ends the connection."""
        self._link.close()

    def status(self) -> dict[str, Any]:
        """The node's status document. Raises Unavailable."""
        self._link.send(StatusRequest(), 1)
        reply = self._link.recv()[1]
        if not isinstance(reply, StatusReply):
            raise Unavailable(f"asked for the status, got {type(reply).__name__}")
        document: dict[str, Any] = json.loads(reply.document)
        return document

    def owners(self) -> tuple[ShardOwner | None, ...]:
        """Who serves each shard, as this node sees it. Raises Unavailable."""
        self._link.send(MapRequest(0), 1)
        reply = self._link.recv()[1]
        if not isinstance(reply, MapReply):
            raise Unavailable(f"asked for the map, got {type(reply).__name__}")
        return reply.owners


class BenchCluster:
    """Use as a context manager; entered, all nodes serve, no shard moves and all arenas are in memory."""

    def __init__(self, arena_bytes: int) -> None:
        self._arena_bytes = arena_bytes
        self.directory = Path()
        self._cluster: LocalCluster | None = None
        self._watchers: list[Watcher] = []
        self.wire: TcpBytes | None = None
        """None where the kernel does not tell; `wire_note` says why."""
        self.wire_note = ""

    def __enter__(self) -> BenchCluster:
        self.directory = Path(tempfile.mkdtemp(prefix="emberkv-bench-"))
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._cluster = LocalCluster(
            self.directory,
            NODES,
            arena_bytes=self._arena_bytes,
            namespaces=[NamespaceConfig(name="default"), NamespaceConfig(name=STRONG_NAMESPACE, level="strong")],
            node_settings={"log_level": "warning"},
        )
        self._cluster.start()
        self._cluster.wait_ready(START_S)
        self._watchers = [Watcher(node.config.socket_path) for node in self._cluster.nodes]
        deadline = time.monotonic() + START_S
        while any(status["prefaulted_bytes"] < status["bytes_total"] for status in self.statuses()):
            if time.monotonic() > deadline:
                raise Unavailable(f"the arenas were not in memory after {START_S:.0f} s")
            time.sleep(0.1)
        self.wait_still()
        ports = [int(status["addresses"]["tcp"].rpartition(":")[2]) for status in self.statuses()]
        try:
            self.wire = TcpBytes(ports)
            self.wire.total()
        except Unavailable as error:
            self.wire, self.wire_note = None, str(error)

    def close(self) -> None:
        """Ends the nodes and removes their files. May be called twice."""
        for watcher in self._watchers:
            watcher.close()
        self._watchers = []
        if self.wire is not None:
            self.wire.close()
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None
        shutil.rmtree(self.directory, ignore_errors=True)

    def endpoint(self, name: str) -> str:
        """unix:/path of one node."""
        assert self._cluster is not None
        return self._cluster.node(name).endpoint

    # -- looking ------------------------------------------------------------------------------------------------------

    def statuses(self) -> list[dict[str, Any]]:
        """Of all nodes, the near one first."""
        return [watcher.status() for watcher in self._watchers]

    def owners(self) -> tuple[ShardOwner | None, ...]:
        """Who serves each shard, as the near node sees it."""
        return self._watchers[0].owners()

    def layout(self) -> list[tuple[str, tuple[str, ...]] | None]:
        """Primary and replicas of each shard: what must not change while it is measured."""
        return [(owner.primary, owner.replicas) if owner is not None else None for owner in self.owners()]

    def wire_bytes(self) -> int:
        """Bytes between the nodes until now; 0 where they cannot be counted."""
        return self.wire.total() if self.wire is not None else 0

    def settle(self) -> list[dict[str, Any]]:
        """Waits until no put is on its way anywhere; returns the last status documents. Raises Unavailable.

        The near node is asked first: a put that is no hint there any more is at its primary, in flight or over.
        """
        deadline = time.monotonic() + SETTLE_S
        while True:
            found = self.statuses()
            if not any(status["hints"] or status["lag"] or status["reads"] or status["writes"] for status in found):
                return found
            if time.monotonic() > deadline:
                lag = [(status["node"], status["hints"], status["lag"]) for status in found]
                raise Unavailable(f"puts were still on their way after {SETTLE_S:.0f} s (node, hints, lag): {lag}")
            time.sleep(SETTLE_POLL_S)

    def wait_still(self) -> None:
        """Waits until no shard has moved for STILL_S. Raises Unavailable."""
        deadline = time.monotonic() + START_S
        known, since = self.owners(), time.monotonic()
        while time.monotonic() - since < STILL_S:
            time.sleep(0.1)
            now = self.owners()
            if now != known or any(place_of(owner, NEAR) is None for owner in now):
                known, since = now, time.monotonic()
            if time.monotonic() > deadline:
                raise Unavailable(f"shards were still moving after {START_S:.0f} s: the machine is too busy")

    # -- keys ---------------------------------------------------------------------------------------------------------

    def make_keys(self, place: Place, count: int, salt: str) -> list[bytes]:
        """Keys to whose shards the near node is `place` now. Raises Unavailable if there is no such shard."""
        owners = self.owners()
        places = [place_of(owner, NEAR) for owner in owners]
        if place not in places:
            raise Unavailable(f"node {NEAR} is {place.value} of no shard: a node was late at the start; try again")
        keys: list[bytes] = []
        number = 0
        while len(keys) < count:
            key = hashlib.sha256(f"{salt} {place.value} {number}".encode()).digest()
            number += 1
            if places[shard_of(key)] is place:
                keys.append(key)
        return keys


def filesystem_of(path: Path) -> str:
    """Kind of the filesystem that holds a path, like ext4; empty when it cannot be told."""
    best = ("", "")
    try:
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mounted, kind, *_ = line.split()
            if path.is_relative_to(mounted) and len(mounted) >= len(best[0]):
                best = (mounted, kind)
    except (OSError, ValueError):
        return ""
    return best[1]
