"""From the writer's record to an outage: pure arithmetic over batches of puts.

Laws: the outage of a shard runs from just BEFORE the signal was sent to the first acknowledgement of a session put that
    began after the process was known to be dead; so it is never measured too short. The outage is the maximum over the
    probed shards, and unknown (None) while one of them has no acknowledgement.
Limits: resolution is a tick, plus at most the deadline of one put; both only lengthen what is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

NS: Final = 1_000_000_000
BIN_S: Final = 0.04
"""Width of the slices in the plot: two ticks, so that a late tick leaves no empty slice."""


class Bin(NamedTuple):
    """Puts that were answered in one time slice: `start_s` relative to the kill, shards asked and acknowledged."""

    start_s: float
    asked: int
    acked: int

    def plain(self) -> tuple[float, int, int]:
        """As the report keeps it."""
        return round(self.start_s, 3), self.asked, self.acked


def outage_of_shards(shards: Sequence[int], acks: Iterable[Sequence[int]], killed_ns: int) -> dict[int, float | None]:
    """Seconds per shard; `acks` are [shard, ack_ns, epoch] of puts that began after the death."""
    first = {shard: ack_ns for shard, ack_ns, _ in acks}
    return {shard: (first[shard] - killed_ns) / NS if shard in first else None for shard in shards}


def longest(outages: dict[int, float | None]) -> float | None:
    """The outage: the longest of all shards; None if a shard did not come back, or none was probed."""
    values = list(outages.values())
    if not values or any(value is None for value in values):
        return None
    return max(value for value in values if value is not None)


def timeline(batches: Iterable[dict[str, Any]], group: str, killed_ns: int, width_s: float) -> list[Bin]:
    """Puts of one group in slices of `width_s`, by the time of the answer (or its deadline); empty slices are left
    out."""
    asked: dict[int, int] = {}
    acked: dict[int, int] = {}
    for batch in batches:
        if batch["group"] != group:
            continue
        at = int((batch["ended_ns"] - killed_ns) / NS // width_s)
        asked[at] = asked.get(at, 0) + batch["asked"]
        acked[at] = acked.get(at, 0) + len(batch["acked"])
    return [Bin(at * width_s, asked[at], acked[at]) for at in sorted(asked)]


def spread(items: Sequence[int], count: int) -> list[int]:
    """At most `count` of `items`, evenly spread, first and last included."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[0]]
    step = (len(items) - 1) / (count - 1)
    return [items[round(index * step)] for index in range(count)]
