"""The writer: session puts of 4 KiB blocks, 50 times a second, in a process of its own, through a kill.

Why it exists: an outage is what a client sees, so a client measures it.
Laws: only STORED is an acknowledgement; QUEUED, UNKNOWN and refusals are not. A put counts for the time after a moment
    only if it BEGAN after it. Every probed shard is written at every tick, by lanes that take turns, so that a put
    which waits for its deadline does not delay the next tick.
Limits: started by the demo (`python -m emberkv.demo.writer`), spoken to in lines of JSON. Times are CLOCK_MONOTONIC in
    nanoseconds, which all processes of a machine share.

    lane 0  |--put--|.....................|--put--|              a lane is due every LANES ticks; one that is still
    lane 1     |--put--|.....................|--put--|           waiting then skips its turn, which is counted
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import threading
import time
from typing import Any, Final

from emberkv.client import Client
from emberkv.demo.children import Message, answer_all
from emberkv.types import SHARDS, Level, PutStatus, shard_of

TICK_MS: Final = 20
DEADLINE_MS: Final = 100
"""Five ticks: a put to a lost shard gives up and is tried anew; the client's own retries are not what is measured."""
LANES: Final = 6
"""One more than a deadline has ticks, so that a lane that waited to the end is free again when it is due."""
BLOCK_BYTES: Final = 4096
STAGING_BYTES: Final = 1 << 20
BATCHES_MAX: Final = 20_000
"""Four minutes of ticks of both groups; the writer stops recording beyond it."""


class Record:
    """All batches so far, for all lanes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.batches: list[dict[str, Any]] = []
        self.skipped = 0

    def add(self, batch: dict[str, Any]) -> None:
        """Keeps one batch."""
        with self.lock:
            if len(self.batches) < BATCHES_MAX:
                self.batches.append(batch)

    def first_acks(self, group: str, since_ns: int) -> dict[int, tuple[int, int]]:
        """Shard -> (time of the first ack of a put that began at or after `since_ns`, epoch of its version)."""
        found: dict[int, tuple[int, int]] = {}
        with self.lock:
            batches = [b for b in self.batches if b["group"] == group and b["begun_ns"] >= since_ns]
        for batch in sorted(batches, key=lambda b: int(b["ended_ns"])):
            for shard, epoch in batch["acked"].items():
                found.setdefault(shard, (batch["ended_ns"], epoch))
        return found


class Lane:
    """One thread with a client of its own, writing one block to each shard of a group whenever it is due."""

    def __init__(self, endpoints: list[str], group: str, shards: list[int], index: int, lanes: int, record: Record):
        self._client = Client(endpoints, staging_bytes=STAGING_BYTES)
        self._group = group
        self._shards = shards
        self._keys = [key_for(shard, f"{group} lane {index}") for shard in shards]
        self._period_ns = lanes * TICK_MS * 1_000_000
        self._phase_ns = index * TICK_MS * 1_000_000
        self._record = record
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{group} lane {index}", daemon=True)

    def start(self) -> None:
        """Begins to write."""
        self._thread.start()

    def stop(self) -> None:
        """Ends after the put under way."""
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        due_ns = time.monotonic_ns() // self._period_ns * self._period_ns + self._phase_ns
        turn = 0
        while not self._stop.is_set():
            now_ns = time.monotonic_ns()
            if now_ns > due_ns:
                late = (now_ns - due_ns) // self._period_ns
                self._record.skipped += late
                due_ns += late * self._period_ns
            if now_ns < due_ns and self._stop.wait((due_ns - now_ns) / 1e9):
                return
            turn += 1
            self._put(turn)
            due_ns += self._period_ns

    def _put(self, turn: int) -> None:
        data = turn.to_bytes(8, "little") * (BLOCK_BYTES // 8)
        begun_ns = time.monotonic_ns()
        outcomes = self._client.put_many(
            [(key, data) for key in self._keys], level=Level.SESSION, deadline_ms=DEADLINE_MS
        )
        self._record.add(
            {
                "group": self._group,
                "begun_ns": begun_ns,
                "ended_ns": time.monotonic_ns(),
                "asked": len(outcomes),
                "acked": {
                    shard: outcome.version.epoch
                    for shard, outcome in zip(self._shards, outcomes, strict=True)
                    if outcome.status is PutStatus.STORED
                },
                "other": _tally([outcome.status.name.lower() for outcome in outcomes]),
            }
        )


def key_for(shard: int, salt: str) -> bytes:
    """A key of the given shard, the same in every process."""
    for number in range(64 * SHARDS):
        key = hashlib.sha256(f"emberkv demo writer {salt} {shard} {number}".encode()).digest()
        if shard_of(key) == shard:
            return key
    raise AssertionError(f"no key found for shard {shard}")


def _tally(names: list[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names)) if name != "stored"}


class Writer:
    """Answers the parent."""

    def __init__(self, endpoints: list[str]) -> None:
        self._endpoints = endpoints
        self._record = Record()
        self._lanes: list[Lane] = []

    def start(self, groups: dict[str, list[int]]) -> Message:
        """Begins to write to the shards of each group."""
        for group, shards in groups.items():
            for index in range(LANES):
                self._lanes.append(Lane(self._endpoints, group, shards, index, LANES, self._record))
        for lane in self._lanes:
            lane.start()
        return {}

    def first_acks(self, group: str, since_ns: int) -> Message:
        """First acks after a moment: [[shard, ack_ns, epoch], ...]."""
        found = self._record.first_acks(group, since_ns)
        return {"acks": [[shard, ack_ns, epoch] for shard, (ack_ns, epoch) in sorted(found.items())]}

    def stop(self) -> Message:
        """Ends all lanes and hands over what they recorded."""
        for lane in self._lanes:
            lane.stop()
        self._lanes.clear()
        batches = [{**batch, "acked": sorted(batch["acked"])} for batch in self._record.batches]
        return {"batches": batches, "skipped": self._record.skipped}


def main() -> None:
    """Body of the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoints", nargs="+")
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    writer = Writer(options.endpoints)
    answer_all({"start": writer.start, "first_acks": writer.first_acks, "stop": writer.stop}, {"ready": True})


if __name__ == "__main__":
    main()
