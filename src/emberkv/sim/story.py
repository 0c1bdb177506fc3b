"""A failing run told in few lines: what went wrong when, who was primary, which answers mattered, and what broke.

Laws: it only listens; a run with a story is the same run. Times are milliseconds since the run began. Faults and lives
come first; owner records, acknowledgements and reads are told where they concern what the violation names: a shard, a
key, or a put by its number.
Limits: LINES_MAX lines; KEPT_MAX things are remembered.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from emberkv.core.view import LIVE_PREFIX, OWNER_PREFIX
from emberkv.messages import ShardOwner
from emberkv.sim.engine import MS
from emberkv.sim.history import History, Request
from emberkv.types import MissReason, PutOutcome, PutStatus, shard_of

LINES_MAX = 40
KEPT_MAX = 20_000
TOGETHER_MS = 400.0
"""Owner records written in so short a time by many nodes are told as one line."""
_NAMED = re.compile(r"shard (\d+)|\b([0-9a-f]{8})\b|(?:put|delete) #(\d+)")


class Told(msgspec.Struct):
    """One thing that happened. `about`: shards and keys that it concerns; empty: everybody."""

    at_ns: int
    text: str
    about: frozenset[str] = frozenset()
    counts: dict[str, int] = {}
    """Owner records by who wrote them, for a line that sums up many."""


def key_name(key: bytes) -> str:
    """How stories and oracles call a key."""
    return key[8:12].hex()


def version_name(version: tuple[int, int]) -> str:
    """An epoch without its generation, and the number."""
    return f"{version[0] & 0xFFFFFFFFFF}.{version[1]}"


class Story:
    """Listens to one run."""

    def __init__(self) -> None:
        self._all: list[Told] = []
        self._begun_ns = 0
        self.faults_begin_ms: float | None = None
        """When the clock of the schedule (Fault.at_ms) began, in the story's milliseconds; None: no fault has begun."""
        self._end: Told | None = None

    def listen(self, cluster: Any, history: History) -> None:
        """Attaches itself to a cluster that has not begun."""
        self._begun_ns = cluster.now
        self._cluster, self._history = cluster, history
        history.ended.append(self._on_request)
        cluster.observe(self._on_fault, "fault")
        cluster.observe(self._on_life, "life")
        cluster.observe(self._on_commit, "commit")
        cluster.observe(self._on_ack, "ack")

    def _add(self, text: str, about: frozenset[str] = frozenset()) -> None:
        self._all.append(Told(self._cluster.now, text, about))
        if len(self._all) > KEPT_MAX:
            del self._all[: KEPT_MAX // 2]

    def _on_fault(self, _: str, __: Any, detail: Any) -> None:
        if self.faults_begin_ms is None:
            self.faults_begin_ms = (self._cluster.now - self._begun_ns) / MS - detail[1].at_ms
        self._add(f"fault: {detail[0]}" if not detail[0].startswith("end of") else detail[0])

    def _on_life(self, _: str, process: Any, what: str) -> None:
        if what not in ("pause", "vm-pause"):  # the fault has been told
            self._add(f"{process.name}: {what}" + (f", life {process.lives}" if what == "start" else ""))

    def _on_commit(self, _: str, process: Any, seen: Any) -> None:
        name = process.name if process is not None else "the operator"
        if seen.restored:
            self._add(f"the coordinator is put back from a backup; its revision is {seen.revision} now")
            return
        owners = 0
        for record in seen.records:
            if record.key.startswith(LIVE_PREFIX):
                whose = record.key[len(LIVE_PREFIX) :]
                self._add(f"{name} joins" if whose == name else f"{name} declares {whose} dead")
            elif record.key.startswith(OWNER_PREFIX):
                owners += 1
                self._on_owner(name, record)
        if owners:
            self._sum_up(name, owners)

    def _on_owner(self, name: str, record: Any) -> None:
        shard = int(record.key[len(OWNER_PREFIX) :])
        owner = msgspec.msgpack.decode(record.value, type=ShardOwner)
        epoch = owner.epoch & 0xFFFFFFFFFF
        text = f"{name}: shard {shard} primary {owner.primary or 'nobody'}, epoch {epoch}, replicas "
        text += ",".join(f"{node}{'' if node in owner.in_sync else '?'}" for node in owner.replicas)
        self._add(text, frozenset({str(shard)}))

    def _sum_up(self, name: str, owners: int) -> None:
        last = next((told for told in reversed(self._all) if not told.about), None)
        if last is None or not last.counts or (self._cluster.now - last.at_ns) > TOGETHER_MS * MS:
            last = Told(self._cluster.now, "", counts={})
            self._all.append(last)
        last.counts[name] = last.counts.get(name, 0) + owners
        each = ", ".join(f"{count} by {node}" for node, count in sorted(last.counts.items()))
        last.text = f"owner records written: {each}"

    def _on_ack(self, _: str, process: Any, ack: Any) -> None:
        for key, outcome in zip(ack.keys, ack.outcomes, strict=True):
            if outcome.status in (PutStatus.STORED, PutStatus.ACCEPTED, PutStatus.QUEUED):
                about = frozenset({str(shard_of(key)), key_name(key)})
                self._add(self._ack_text(process.name, ack, key, outcome), about)

    def _ack_text(self, name: str, ack: Any, key: bytes, outcome: PutOutcome) -> str:
        what = "delete" if ack.delete else "put"
        whom = f"to {ack.from_peer}" if ack.from_peer else "to its client"
        text = f"{name} answers {outcome.status.name} {whom}: {what} of {key_name(key)}"
        if outcome.status is PutStatus.STORED:
            text += f" as {version_name(outcome.version)}, {outcome.copies} copies"
        return text

    def _on_request(self, request: Request) -> None:
        for key, info in zip(request.keys, request.infos or (), strict=request.infos is not None):
            hit = info.reason == MissReason.NONE
            found = f"hit {version_name(info.version)}" if hit else f"miss ({MissReason(info.reason).label})"
            level = request.level.name.lower()
            text = f"{request.client} reads {key_name(key)} at {request.node}, {level}: {found}"
            self._add(text, frozenset({str(shard_of(key)), key_name(key)}))

    def violated(self, now_ns: int, text: str) -> None:
        """The last line."""
        self._end = Told(now_ns, f"VIOLATION {text}")

    def lines(self) -> list[str]:
        """At most LINES_MAX of them, in order of time."""
        named: set[str] = set()
        if self._end is not None:
            for shard, key, number in _NAMED.findall(self._end.text):
                named.add(shard or key or key_name(self._history.puts[int(number)].key))
        told = [one for one in self._all if not one.about or one.about & named]
        room = LINES_MAX - 2
        left_out = len(told) - room
        lines = [f"{'':9}     ({left_out} earlier lines are left out)"] if left_out > 0 else []
        lines += [self._line(one) for one in told[-room:]]
        return lines + ([self._line(self._end)] if self._end is not None else [])

    def _line(self, told: Told) -> str:
        return f"{(told.at_ns - self._begun_ns) / MS:9.1f} ms  {told.text}"
