"""The samples of `bench consistency`: who is measured when, and against what.

Why it exists: puts go on after they were acknowledged and neighbours make noise, so what a sample says depends on what
ran before and beside it.
Laws: samples of all ways and references take turns one by one, in an order that is drawn anew each time (the same in
every run), so that a neighbour's noise and a predecessor's cache hit all alike. Each lone sample begins and ends with
all nodes at rest, so what a put sets in motion is counted to it and delays nobody else. A round during which a shard
moved is thrown away, since the places of its keys changed.
Limits: rounds thrown away are bounded by DISCARDED_MAX.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from emberkv.bench.bench_cluster import BenchCluster
from emberkv.bench.case import Progress, timed
from emberkv.bench.consistency_ways import CHECKS, WAYS, Clients, Scene, Shape, Way
from emberkv.bench.ref import SOURCE_BYTES, BarePair, prefaulted
from emberkv.errors import Unavailable

DISCARDED_MAX: Final = 3
REFERENCES: Final = {
    "memcpy": "memcpy of as many bytes",
    "tcp": "bare TCP over loopback: 64 bytes there, as many bytes back",
    "ping": "bare TCP over loopback: 64 bytes there, 64 bytes back",
    "fsync": "write and fsync of each block into a file of the same disk",
}


class Sample(msgspec.Struct):
    """What one way did with one shape, in one round or in all."""

    lone_s: list[float] = msgspec.field(default_factory=list)
    medians_s: list[float] = msgspec.field(default_factory=list)
    """One per round."""
    blocks: int = 0
    """Of the lone calls."""
    wire_bytes: int = 0
    strong_commits: int = 0
    control_commits: int = 0
    burst_s: list[float] = msgspec.field(default_factory=list)
    """Single calls of the bursts."""
    burst_rates: list[float] = msgspec.field(default_factory=list)
    """Blocks per second, one per burst: of the calls alone."""
    settled_rates: list[float] = msgspec.field(default_factory=list)
    """The same, with the time until all was at rest."""

    def take(self, other: Sample) -> None:
        """Adds one round."""
        self.lone_s += other.lone_s
        self.medians_s.append(statistics.median(other.lone_s))
        for name in ("blocks", "wire_bytes", "strong_commits", "control_commits"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.burst_s += other.burst_s
        self.burst_rates += other.burst_rates
        self.settled_rates += other.settled_rates


Samples = dict[tuple[str, str], Sample]
"""By shape and way (or reference)."""


class Bare:
    """The references; use as a context manager."""

    def __init__(self, directory: Path) -> None:
        self._source = np.frombuffer(prefaulted(SOURCE_BYTES), np.uint8)
        self._target = np.frombuffer(prefaulted(SOURCE_BYTES), np.uint8)
        self._at = 0
        self._path = directory / "fsync.bin"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        self._pair = BarePair()

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *_: object) -> None:
        self._pair.close()
        os.close(self._fd)
        self._path.unlink(missing_ok=True)

    def seconds(self, name: str, shape: Shape) -> float:
        """Of one call of a reference."""
        if name == "memcpy":
            # Through all of the memory in turn: a put's bytes are not in the cache either.
            self._at = (self._at + shape.nbytes) % (SOURCE_BYTES - shape.nbytes + 1)
            target = self._target[self._at : self._at + shape.nbytes]
            return timed(lambda: np.copyto(target, self._source[self._at : self._at + shape.nbytes]))
        if name == "tcp":
            return self._pair.batch_s(shape.count, shape.size)
        if name == "ping":
            return self._pair.ping_s(64)
        return timed(lambda: self._sync(shape))

    def _sync(self, shape: Shape) -> None:
        for index in range(shape.count):
            os.pwrite(self._fd, self._source[: shape.size].data, index * shape.size)
            os.fsync(self._fd)


def ways_of(shape: Shape) -> list[Way]:
    """Those that this shape can go: large blocks are no strong records."""
    return [way for way in WAYS if shape.slow or not way.strong]


def measure_lone(cluster: BenchCluster, scene: Scene, way: Way, sample: Sample) -> None:
    """One call with everything at rest before and after."""
    row = way.prepare(scene)
    before, wire, revision = cluster.settle(), cluster.wire_bytes(), scene.clients.strong_revision
    sample.lone_s.append(timed(partial(way.act, scene, row)))
    after = cluster.settle()
    sample.wire_bytes += cluster.wire_bytes() - wire
    sample.blocks += scene.shape.count
    sample.strong_commits += scene.clients.strong_revision - revision
    sample.control_commits += control_revision(after) - control_revision(before)
    if way.check is not None:
        way.check(scene, row)


def measure_burst(cluster: BenchCluster, scene: Scene, way: Way, sample: Sample) -> None:
    """Calls without a pause between, then until all is at rest. Preparing is not counted."""
    calls = scene.shape.slow if way.strong else scene.shape.burst
    cluster.settle()
    spent: list[float] = []
    for _ in range(calls):
        row = way.prepare(scene)
        if way.prepares_elsewhere:
            cluster.settle()
        spent.append(timed(partial(way.act, scene, row)))
    settling = timed(cluster.settle)
    sample.burst_s += spent
    sample.burst_rates.append(calls * scene.shape.count / sum(spent))
    sample.settled_rates.append(calls * scene.shape.count / (sum(spent) + settling))
    if way.check is not None:
        way.check(scene, row)


def measure_round(cluster: BenchCluster, scene: Scene, bare: Bare, turn: int, samples: Samples) -> None:
    """One round of one shape: lone samples in turns, then a burst of each way; in another order each time."""
    shape = scene.shape
    ways = ways_of(shape)
    references = [name for name in REFERENCES if shape.slow or name != "fsync"]
    sides: list[Way | str] = [*ways, *references]
    for side in sides:
        samples[shape.name, side if isinstance(side, str) else side.name] = Sample()
    # Drawn, not rotated: who always follows the same neighbour finds the cache as that one leaves it (measured: a read
    # took 15 % less after another one of the same blocks).
    order = random.Random(f"{shape.name} {turn}")
    for number in range(shape.lone):
        order.shuffle(sides)
        for side in sides:
            waits_for_disk = side == "fsync" if isinstance(side, str) else side.strong
            if waits_for_disk and number >= shape.slow:
                continue
            if isinstance(side, str):
                samples[shape.name, side].lone_s.append(bare.seconds(side, shape))
            else:
                measure_lone(cluster, scene, side, samples[shape.name, side.name])
    order.shuffle(ways)
    for way in ways:
        measure_burst(cluster, scene, way, samples[shape.name, way.name])
    cluster.settle()
    scene.check_everywhere()


def control_revision(statuses: Sequence[dict[str, Any]]) -> int:
    """The newest revision of control.db that a node has seen."""
    return max(int(status["revision"]) for status in statuses)


def measure_idle(cluster: BenchCluster, seconds: float) -> dict[str, float]:
    """What goes on without any request."""
    revision, wire, start = control_revision(cluster.settle()), cluster.wire_bytes(), time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - start
    return {
        "wire_bytes_per_s": (cluster.wire_bytes() - wire) / passed,
        "control_commits_per_s": (control_revision(cluster.statuses()) - revision) / passed,
    }


class Measured(msgspec.Struct):
    """All rounds that count, and what was seen beside them."""

    samples: Samples = msgspec.field(default_factory=dict)
    checked: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(CHECKS, 0))
    rounds: int = 0
    discarded: int = 0
    stale: bool = False
    """An eventual read returned what another node's put had replaced."""


def measure(
    cluster: BenchCluster, clients: Clients, shapes: Sequence[Shape], rounds: int, progress: Progress
) -> Measured:
    """Rounds until enough count. Raises Unavailable when shards keep moving or a promise did not hold."""
    found = Measured()
    scenes: list[Scene] = []
    with Bare(cluster.directory) as bare:
        while found.rounds < rounds:
            layout = cluster.layout()
            scenes = scenes or [Scene(cluster, clients, shape, f"try {found.discarded}") for shape in shapes]
            fresh: Samples = {}
            for scene in scenes:
                progress(f"round {found.rounds + 1} of {rounds}: {scene.shape.name}")
                measure_round(cluster, scene, bare, found.rounds, fresh)
            found.stale = scenes[0].stale_seen() or found.stale
            for scene in scenes:
                for what, count in scene.checked.items():
                    found.checked[what] += count
                scene.checked = dict.fromkeys(CHECKS, 0)
            if cluster.layout() == layout:
                found.rounds += 1
                for key, sample in fresh.items():
                    found.samples.setdefault(key, Sample()).take(sample)
                continue
            found.discarded += 1
            progress("a shard moved: this round does not count")
            if found.discarded > DISCARDED_MAX:
                raise Unavailable("shards kept moving while it was measured: the machine is too busy")
            scenes = []
            cluster.wait_still()
    return found
