"""What sessions are promised: P6a (never back), P6b (acknowledged is found), P6c (copies), and that deletes stay.

Why it exists: see oracles.py. These laws speak of puts in real time, so they are judged on put_ids: which put did a
read return, and was that put over before the one that it should have seen began.
Laws: an excuse (a put that was lost together with its primary, a reader that cannot know who the replicas are) is
judged from evidence, never taken from the code.
Limits: a read is judged against puts that had finished before it began; what overlaps may go either way.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from emberkv.sim.history import Put, Request
from emberkv.sim.oracle import Oracle, Passing
from emberkv.types import NO_VERSION, Level, MissReason, PutStatus, Version, shard_of

CALM_NS: Final = 1_000_000_000
"""P6b is judged where nothing has gone wrong for so long: streams are dialled again and views are up to date."""
STREAM_MS: Final = 10.0
"""What a stamped write takes to the backups at most while all is calm, beside the network's delay."""


class Session(Oracle):
    """P6a."""

    law = "P6a: a session never goes back: nothing below its token, and no put that was over before what it saw began"

    def watch(self, passing: Passing) -> None:
        self._saw: dict[tuple[str, bytes], list[tuple[float, Put, Version]]] = defaultdict(list)

    def on_request(self, request: Request) -> None:
        if not request.token:
            return
        for index, info in enumerate(request.infos or ()):
            if info.reason not in (MissReason.NONE, MissReason.DELETED):
                continue
            key = request.keys[index]
            if request.floors and info.version < request.floors[index]:
                floor = tuple(request.floors[index])
                self.broken(f"{request.told()} got version {tuple(info.version)}, below its token's {floor}")
            put = request.found[index] or self.evidence.put_named(self.history, key, info.version)
            if put is not None:
                floor = request.floors[index] if request.floors else NO_VERSION
                self._in_order(request, key, put, floor)
                self._saw[(request.token, key)].append((request.returned_ns, put, info.version))
        for put, outcome in zip(request.puts, request.outcomes or (), strict=request.outcomes is not None):
            if outcome.status is PutStatus.STORED:
                self._saw[(request.token, put.key)].append((request.returned_ns, put, outcome.version))

    def _in_order(self, request: Request, key: bytes, put: Put, floor: Version) -> None:
        """A token that has forgotten a key asks without a floor, and then nothing was promised."""
        for seen_ns, seen, version in self._saw[(request.token, key)]:
            if version > floor or seen is put or seen_ns >= request.invoked_ns or put.finished_ns >= seen.invoked_ns:
                continue
            if not self.evidence.lost(key, version, request.returned_ns):
                self.broken(f"{request.told()} got {put.told()}, over before {seen.told()} began, which it had seen")


class Acknowledged(Oracle):
    """P6b."""

    law = "P6b: while its primary keeps its lease and nothing is evicted, an acknowledged put is found"

    NO_VERDICT: Final = (
        MissReason.NONE,
        MissReason.DEADLINE,
        MissReason.UNREACHABLE,
        MissReason.BREAKER,
        MissReason.QUOTA,
        MissReason.SLOWER_THAN_RECOMPUTE,
    )

    def on_request(self, request: Request) -> None:
        calm = request.invoked_ns - CALM_NS
        if request.level is not Level.SESSION or not request.infos or not self.evidence.calm(calm):
            return
        if self.evidence.excused("P6b"):
            return
        for key, info in zip(request.keys, request.infos, strict=True):
            put = self._newest(key, request.invoked_ns)
            if info.reason in self.NO_VERDICT or put is None or self.evidence.gave_up(key):
                continue
            if not self.evidence.kept_by_primary(shard_of(key), put.stored.epoch, put.stored_ns):
                continue
            if self.cluster.options.lost_fetch_share and self.evidence.primary_at(key) != request.node:
                continue  # the question may have been lost, and somebody else's answer be what is left
            if info.reason == MissReason.EVICTED and info.version >= put.stored:
                continue  # it says itself that the condition does not hold
            reason = MissReason(info.reason).label
            if info.reason == MissReason.DELETED:
                ends = [p for p in self.history.by_key[key] if p.delete and p.invoked_ns < request.returned_ns]
                streamed_ns = put.stored_ns + STREAM_MS * 1e6 + 4 * self.cluster.options.delay_ms[1] * 1e6
                if ends and (info.version >= put.stored or request.invoked_ns < streamed_ns):
                    continue  # a backup that the put is still on its way to may know of an earlier delete only
            elif put.delete or self._forgotten(key, put.stored):
                continue
            self.broken(f"{request.told()} missed ({reason}) {put.told()}, acknowledged before it began")

    def _forgotten(self, key: bytes, version: Version) -> bool:
        """May the put have been deleted since, and that be forgotten by now?"""
        return any(put.delete for put in self.history.by_key[key]) and self.evidence.floor(key) >= version

    def _newest(self, key: bytes, before_ns: int) -> Put | None:
        acked = [put for put in self.history.by_key.get(key, ()) if put.stored_ns < before_ns]
        return max(acked, key=lambda put: put.stored, default=None)


class Copies(Oracle):
    """P6c."""

    law = "P6c: a put acknowledged with n copies is still served after n-1 of its holders are lost, until evicted"

    def watch(self, passing: Passing) -> None:
        self._promised: list[tuple[bytes, Version, int, float, set[tuple[str, int]]]] = []

    def on_request(self, request: Request) -> None:
        if request.min_copies < 2:
            return
        for put, outcome in zip(request.puts, request.outcomes or (), strict=request.outcomes is not None):
            if outcome.status is not PutStatus.STORED:
                continue
            if outcome.copies < request.min_copies:
                self.broken(f"{put.told()} was acknowledged with {outcome.copies} copies, not {request.min_copies}")
            holders = self.evidence.holders(put.key, outcome.version, request.returned_ns)
            if len(holders) < request.min_copies:
                self.broken(f"{put.told()} was acknowledged for {request.min_copies} copies; at {sorted(holders)}")
            self._promised.append((put.key, outcome.version, request.min_copies, request.returned_ns, holders))

    def at_end(self) -> None:
        if self.evidence.excused("P6c"):
            return
        for key, version, copies, acked_ns, holders in self._promised:
            gone = [life for at_ns, life in self.evidence.kills if life in holders and at_ns >= acked_ns]
            if len(gone) >= copies:
                continue
            entries = self.evidence.entries(key)
            best = max((entry.version for entry in entries.values() if entry is not None), default=NO_VERSION)
            forgotten = any(put.delete for put in self.history.by_key[key]) and self.evidence.floor(key) >= version
            if best < version and not forgotten and not self.evidence.gave_up(key):
                self.broken(f"{tuple(version)} was at {sorted(holders)}, lost {gone}; at the end {tuple(best)}")


class Deleted(Oracle):
    """A delete stays. A reader that cannot know who the replicas are now (cut off, its watch silent) is not judged."""

    law = "after a delete that all replicas have, no session read returns, and no replica keeps, a put from before it"

    def on_request(self, request: Request) -> None:
        if request.level is not Level.SESSION or self.evidence.excused("P3b"):
            return  # a replica whose clock stood still takes its lease for open and answers as one in sync
        for index, put in enumerate(request.found):
            if put is not None and self.evidence.knows_owner(request.node, shard_of(request.keys[index])):
                self._older(request.keys[index], put, request.invoked_ns, request.told())

    def at_end(self) -> None:
        for key in self.history.by_key:
            for name, entry in self.evidence.entries(key).items():
                put = self.history.by_id.get(entry.put_id) if entry is not None else None
                if put is not None and not put.delete:
                    self._older(key, put, self.cluster.now, f"replica {name} at the end")

    def _older(self, key: bytes, put: Put, at_ns: int, where: str) -> None:
        for delete in self.history.by_key.get(key, ()):
            ended = delete.delete and delete.stored_ns < at_ns and put.finished_ns < delete.invoked_ns
            if not ended or self.evidence.lost(key, delete.stored, at_ns):
                continue
            replicas = self.evidence.replicas_at(shard_of(key), delete.stored_ns)
            if replicas and all(self.evidence.held_by(key, delete.stored, name, at_ns) for name in replicas):
                self.broken(f"{where} has {put.told()}, which {delete.told()} had ended everywhere")


SESSION: tuple[type[Oracle], ...] = (Session, Acknowledged, Copies, Deleted)
