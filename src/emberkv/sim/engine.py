"""Virtual time, chance and the inputs of a run: what makes a simulated cluster a pure function of its seed.

Laws: nothing here or above it reads a real clock, real randomness or `hash()`. Three streams of chance (schedule,
faults, workload) are separate, so that dropping one fault does not reshuffle what clients ask. Time is true time in
nanoseconds; each node sees it through its own clock.
Limits: actions due at the same nanosecond run in the order in which they were asked for.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import msgspec

MS = 1_000_000
"""Nanoseconds of a millisecond."""
START_NS = 10_000 * MS
"""True time does not begin at 0, so that a forgotten 'since 0' shows."""
WALL_START_MS = 1_700_000_000_000
"""The wall clock of a node that never jumped, at true time 0."""


FLAG_WORDS = {
    "crash": "keeps its data directory",
    "cut": "one way",
    "isolate": "it is heard, but hears nobody",
    "split": "that side loses the coordinator",
    "away": "requests arrive, answers do not",
}
"""What Fault.flag means."""


class Violation(AssertionError):
    """A promise was broken: one line that says which, where and by what. Every oracle raises it."""


class Fault(msgspec.Struct, frozen=True):
    """One thing that goes wrong, for a while. Drawn before the run, so that shrinking can take it out."""

    at_ms: float
    """Milliseconds after the start of phase 1."""
    kind: str
    """One of faults.KINDS."""
    node: str = ""
    other: str = ""
    """The other end of a link, where there is one."""
    for_ms: float = 0.0
    """It ends by itself after so long; at the latest when the cluster is healed."""
    amount: float = 0.0
    """How much of it: a share, a factor or milliseconds, as the kind says."""
    flag: bool = False
    """The variant of the kind: with its data directory, silent, bytes and all."""

    def text(self) -> str:
        """One phrase for the story."""
        where = f"{self.node}->{self.other}" if self.other else self.node
        parts = [self.kind, where, f"for {self.for_ms:.0f} ms" if self.for_ms else ""]
        parts.append(f"amount {self.amount:g}" if self.amount else "")
        parts.append(f"({FLAG_WORDS[self.kind]})" if self.flag and self.kind in FLAG_WORDS else "")
        return " ".join(part for part in parts if part)


class Options(msgspec.Struct, frozen=True):
    """What one run looks like. The defaults are a calm world; faults.draw makes a wild one from a seed."""

    nodes: int = 3
    factor: int = 2
    budget_ms: float = 1000.0
    drift: float = 0.0
    """Bound of the clock rates: each node's lies within 1 - drift .. 1 + drift."""
    arena_slots: int = 512
    """Room of a node, in blocks of up to 4096 bytes."""
    keys: int = 24
    """Size of the workload's key space."""
    requests_per_s: float = 20.0
    """Client requests per virtual second."""
    delay_ms: tuple[float, float] = (0.05, 1.0)
    """One message, one way."""
    coordinator_ms: tuple[float, float] = (0.2, 2.0)
    """To and from the coordinator, one way."""
    tcp_timeout_ms: float = 400.0
    """How long a stream whose bytes do not get through stays open."""
    preempt_share: float = 0.0
    """Share of decisions between which and their effects another thread runs for a while."""
    lost_fetch_share: float = 0.0
    """Share of reads between nodes whose request or answer never arrives."""
    twice_share: float = 0.0
    """Share of reads between nodes that arrive twice."""
    unknown_share: float = 0.0
    """Share of commits whose outcome is not learned, outside of faults too."""
    queue_max: int = 1024
    """Messages that wait for one peer; beyond it a send is refused."""
    ticks_per_ttl: int = 30
    tombstone_retention_ms: float = 3_600_000.0
    phase1_ms: float = 6000.0
    """Faults and requests; then the cluster is healed."""
    quiet_ttls: float = 12.0
    """How many leases the healed cluster may take to come to rest."""
    crash_at_end: bool = True
    """Measure the outage of a crash (P4) after healing."""
    faults: tuple[Fault, ...] = ()

    def names(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return tuple("abcdefgh"[: self.nodes])


class NodeClock:
    """A node's CLOCK_BOOTTIME: offset + rate * true time; stands still while its virtual machine is paused."""

    def __init__(self, engine: Engine, offset_ns: int, rate: float) -> None:
        self._engine = engine
        self._true_ns = engine.now
        self._local_ns = engine.now + offset_ns
        self.rate = rate
        self.stopped = False
        self.wall_offset_ms = 0
        """What jumps of the wall clock have added up to."""

    def now_ns(self) -> int:
        """As ports.Clock."""
        if self.stopped:
            return self._local_ns
        return self._local_ns + int((self._engine.now - self._true_ns) * self.rate)

    def wall_ms(self) -> int:
        """The wall clock, in milliseconds: it may jump both ways."""
        return WALL_START_MS + self._engine.now // MS + self.wall_offset_ms

    def until_ns(self, local_ns: int) -> int:
        """True nanoseconds until this clock shows `local_ns`, if it neither stops nor jumps."""
        return max(0, int((local_ns - self.now_ns()) / self.rate))

    def stop(self) -> None:
        """The machine is paused: its clock stands still."""
        self._local_ns, self._true_ns, self.stopped = self.now_ns(), self._engine.now, True

    def resume(self) -> None:
        """The machine goes on where it stopped."""
        self._true_ns, self.stopped = self._engine.now, False


class Engine:
    """The heap of what is still to happen."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = START_NS
        self.rng = random.Random(f"{seed}/schedule")
        self.rng_faults = random.Random(f"{seed}/faults")
        self.rng_workload = random.Random(f"{seed}/workload")
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def after(self, delay_ns: float, action: Callable[..., None], *arguments: Any) -> None:
        """Runs `action(*arguments)` so much true time from now."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + int(delay_ns), self._order, action, arguments))

    def run_until(self, end_ns: int) -> None:
        """Performs everything that is due up to `end_ns`, which is the time afterwards."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= end_ns:
            self.now, _, action, arguments = pop(heap)
            action(*arguments)
        self.now = max(self.now, end_ns)

    def run_ms(self, duration_ms: float) -> None:
        """Performs what is due in the next milliseconds."""
        self.run_until(self.now + int(duration_ms * MS))

    def between_ns(self, low_ms: float, high_ms: float) -> int:
        """A duration out of the schedule's chance."""
        return int((low_ms + (high_ms - low_ms) * self.rng.random()) * MS)
