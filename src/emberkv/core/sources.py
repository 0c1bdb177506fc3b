"""Whom a read asks next: a pure order over the live nodes that may hold a key, and what is known of each (design 6).

Laws: an eventual read takes the cheapest replica; a session read takes those who may speak for the key first, the
primary before the others. A peer that failed twice is asked last until its breaker closes. Former replicas come last of
all. The number of sources of one key is bounded.
"""

from __future__ import annotations

import msgspec

from emberkv.core.events import Fetched
from emberkv.core.state import State
from emberkv.types import MissReason, shard_of

BREAKER_FAILURES = 2
"""Failures in a row that open a peer's breaker."""
BREAKER_OPEN_NS = 500_000_000
"""How long an open breaker keeps a peer last; doubled at each failure, up to BREAKER_OPEN_MAX_NS."""
BREAKER_OPEN_MAX_NS = 8_000_000_000
SOURCES_PER_KEY_MAX = 6
"""Sources asked for one key: all replicas of a usual set and a former one; each more costs a round trip."""


class Source(msgspec.Struct):
    """What is known of a peer as a source of blocks."""

    latency_ns: float = 0.0
    failures: int = 0
    open_until_ns: int = 0


class Sources:
    """Peers as sources, judged by what they did."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.known: dict[str, Source] = {}

    def of(self, key: bytes, tried: tuple[str, ...], *, session: bool) -> list[str]:
        """Who else may hold a key, best first; empty when enough were tried."""
        if len(tried) >= SOURCES_PER_KEY_MAX:
            return []
        view = self.state.view
        owner = view.owners[shard_of(key)]
        if owner is None:
            return []
        name = self.state.settings.name
        named = [n for n in owner.replicas if n != name and n not in tried and view.is_live(n)]
        if session:
            named.sort(key=lambda n: (self._cost(n)[0], n != owner.primary, n not in owner.in_sync, self._cost(n)[1]))
        else:
            named.sort(key=self._cost)
        return named + [n for n in owner.former if n != name and n not in tried and view.is_live(n)]

    def relay(self, tried: tuple[str, ...]) -> str | None:
        """A live node that this one reaches and has not asked itself: the cheapest."""
        view, name = self.state.view, self.state.settings.name
        near = [n for n in view.live_nodes() if n != name and n not in tried and n in self.state.peers_up]
        return min(near, key=self._cost, default=None)

    def _cost(self, peer: str) -> tuple[bool, float]:
        source = self.known.get(peer)
        if source is None:
            return False, 0.0
        return source.open_until_ns > self.state.now_ns, source.latency_ns

    def judge(self, event: Fetched) -> None:
        """Keeps latency and breaker of a source."""
        source = self.known.setdefault(event.peer, Source())
        failed = any(info.reason in (MissReason.DEADLINE, MissReason.UNREACHABLE) for info in event.infos)
        if failed:
            source.failures += 1
            if source.failures >= BREAKER_FAILURES:
                doublings = min(source.failures - BREAKER_FAILURES, 4)
                open_ns = min(BREAKER_OPEN_NS << doublings, BREAKER_OPEN_MAX_NS)
                source.open_until_ns = self.state.now_ns + open_ns
                self.state.counters["breaker_opened"] += 1
            return
        source.failures = 0
        source.open_until_ns = 0
        per_key = event.elapsed_ns / max(len(event.infos), 1)
        source.latency_ns = per_key if source.latency_ns == 0.0 else 0.8 * source.latency_ns + 0.2 * per_key
