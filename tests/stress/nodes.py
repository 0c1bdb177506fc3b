"""Two real nodes with small arenas, seen from outside: what they say of themselves and what the kernel says of them.

Laws: what a client owned is counted by the node (pinned bytes) and by the kernel (staging maps); both must fall to zero
when the clients are gone, and the arena to empty when every block is deleted: a reference that somebody forgot stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from emberkv.cli.cluster import LocalCluster
from emberkv.cli.probe import fetch_status
from emberkv.client import Client
from emberkv.errors import EmberError
from emberkv.types import Level
from stress.herd import HANG_S, Herd, wait_for
from stress.pattern import key_of
from stress.roles import COLD, HOT, PRIVATE

ARENA_BYTES: Final = 24 << 20
"""Six slabs, a third of what the roles keep writing: room for five usual sizes, not for three big ones beside them."""
STAGING_BYTES: Final = 4 << 20
PROBE_MS: Final = 5000


class Nodes:
    """A running cluster of n1, n2."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.names = [node.name for node in cluster.nodes]

    def unix(self, at: int) -> str:
        return self.cluster.nodes[at].endpoint

    def tcp(self) -> list[str]:
        return [f"tcp:{self.status(at)['addresses']['tcp']}" for at in range(len(self.names))]

    def status(self, at: int) -> dict[str, Any]:
        """Waits for a node that is busy, or was frozen a moment ago."""
        found: list[dict[str, Any]] = []

        def asked() -> bool:
            try:
                found.append(fetch_status(self.unix(at), PROBE_MS))
            except EmberError:
                return False
            return True

        wait_for(asked, f"the status of {self.names[at]}")
        self._sums(found[0])
        return found[0]

    def _sums(self, status: dict[str, Any]) -> None:
        """What must hold at any moment."""
        assert 0 <= status["bytes_used"] <= status["bytes_total"] == status["arena"]["total"], status
        assert 0 <= status["pinned_bytes"] <= status["bytes_total"] // 2, status

    def evictions(self) -> int:
        return sum(int(self.status(at)["evictions"]) for at in range(len(self.names)))

    def stagings(self, at: int) -> int:
        """Staging areas that the node maps, as the kernel counts them."""
        return Path(f"/proc/{self.cluster.nodes[at].pid}/maps").read_text().count("emberkv-staging")

    def wait_unpinned(self, limit: float = HANG_S) -> None:
        """All clients are gone: so must be all that they held."""

        def pinned() -> list[int]:
            return [int(self.status(at)["pinned_bytes"]) for at in range(len(self.names))]

        wait_for(lambda: not any(pinned()), "the pins of gone clients to end", limit)
        wait_for(lambda: not any(map(self.stagings, range(len(self.names)))), "staging of gone clients to go", limit)

    def wait_empty(self, herd: Herd) -> None:
        """Deletes every block that a herd may have put; then no byte of any arena may stay in use."""
        private = [PRIVATE + row * 1000 + n for row in herd.private_rows() for n in range(8)]
        keys = [key_of(number) for number in [*range(HOT + COLD), *private]]

        def emptied() -> bool:
            with Client(self.unix(0), connect_timeout_ms=PROBE_MS) as client:
                client.delete_many(keys, level=Level.SESSION, deadline_ms=PROBE_MS)
            for _ in range(20):  # backups follow in a moment; a hint that arrives later needs one more delete
                left = [self.status(at)["bytes_used"] for at in range(len(self.names))]
                if not any(left):
                    return True
            return False

        wait_for(emptied, "an arena without blocks, pins and clients to be empty")
        assert all(node.alive for node in self.cluster.nodes)


@contextmanager
def running(folder: Path, nodes: int = 2, *, sound: bool = True) -> Iterator[Nodes]:
    """Nodes that end with the block; of `sound` ones, one that ended before is a failure with its last words."""
    settings = {"staging_bytes": STAGING_BYTES}
    with LocalCluster(folder, nodes, arena_bytes=ARENA_BYTES, node_settings=settings) as cluster:
        cluster.wait_ready()
        made = Nodes(cluster)
        yield made
        for node in cluster.nodes if sound else []:
            assert node.alive, f"{node.name} ended: {node.last_words()}"
            log = node.log_path.read_text()
            assert "CRITICAL" not in log, log[log.index("CRITICAL") - 100 :][:4000]
