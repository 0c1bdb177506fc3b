"""What must never happen, whatever fails: P1, P3, and the laws of versions, evictions and strong namespaces.

Why it exists: see oracles.py; what sessions are promised is in oracles_session.py.
Limits: P3b is looked at when something is acknowledged and when an owner record changes, not between.
"""

from __future__ import annotations

from typing import Any, Final

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.messages import Offer, PutFlag, PutRequest, Replicate, Vector
from emberkv.sim.history import Request
from emberkv.sim.lincheck import check
from emberkv.sim.oracle import Oracle, Passing
from emberkv.sim.oracles_evidence import HOLDS, life_of
from emberkv.types import NO_VERSION, Level, MissReason, PutStatus, Version, checksum, shard_of

NO_CHECKSUM: Final = b"\0" * 16


class RightBytes(Oracle):
    """P1."""

    law = "P1: a hit is exactly the bytes that some put stored under that key"

    def on_request(self, request: Request) -> None:
        for index, info in enumerate(request.infos or ()):
            if info.reason != MissReason.NONE:
                continue
            put = request.found[index]
            if put is None:
                self.broken(f"{request.told()} got bytes that nobody put under key {request.keys[index].hex()[16:24]}")
            if put.invoked_ns > request.returned_ns:
                self.broken(f"{request.told()} got {put.told()} before it was put")


class OneContent(Oracle):
    """Versions are names."""

    law = "(shard, epoch, seq) names one key and one content for ever"

    def watch(self, passing: Passing) -> None:
        self._named: dict[tuple[int, Version], tuple[bytes, bytes, str]] = {}
        passing.on_type(fx.Send, self._on_send)

    def _name(self, key: bytes, version: Version, digest: bytes, who: str) -> None:
        if version == NO_VERSION:
            return
        first = self._named.setdefault((shard_of(key), version), (key, digest, who))
        if first[:2] != (key, digest):
            what = f"version {tuple(version)} of shard {shard_of(key)} names two contents"
            self.broken(f"{what}: {first[1].hex()[:8]} by {first[2]}, {digest.hex()[:8]} by {who}")

    def _on_send(self, process: Any, send: fx.Send) -> None:
        if isinstance(send.message, Replicate):
            for item in send.message.items:
                if not item.skip:  # such an item only says that the version was processed
                    self._name(item.key, item.version, item.checksum, f"a stream of {process.name}")

    def on_request(self, request: Request) -> None:
        for key, info in zip(request.keys, request.infos or (), strict=request.infos is not None):
            if info.reason == MissReason.NONE:
                self._name(key, info.version, info.checksum, f"a read at {request.node}")
            elif info.reason == MissReason.DELETED:
                self._name(key, info.version, NO_CHECKSUM, f"a read at {request.node}")
        for put, outcome in zip(request.puts, request.outcomes or (), strict=request.outcomes is not None):
            if outcome.status is PutStatus.STORED:
                digest = NO_CHECKSUM if put.delete else checksum(put.data)
                self._name(put.key, outcome.version, digest, f"an acknowledgement of {put.told()}")


class OneVoice(Oracle):
    """P3a."""

    law = "P3a: an epoch belongs to one life of one node, and who has learned of a higher one turns it away"

    def watch(self, passing: Passing) -> None:
        self._barred: dict[tuple[tuple[str, int], bytes], int] = {}
        """(life, put_id) -> old epoch under which it was answered."""
        passing.on_kind("commit", self._on_commit)
        passing.on_type(fx.Send, self._on_send)
        passing.on_type(fx.ReplicaDone, self._on_replica_done)
        passing.on_type(ev.PutAnswered, self._on_put_answered)
        passing.on_kind("ack", self._on_ack)

    def _on_commit(self, _process: Any, seen: Any) -> None:
        for shard, owner in self.evidence.owners_of(seen):
            first = self.evidence.given.get((shard, owner.epoch))
            if owner.primary and first != (owner.primary, owner.liveness_epoch):
                self.broken(f"shard {shard} epoch {owner.epoch} was given to {first} and to {owner.primary}")

    def _on_send(self, process: Any, send: fx.Send) -> None:
        message = send.message
        if isinstance(message, Replicate) and not message.surplus:
            for authority, shard in {(item.authority, shard_of(item.key)) for item in message.items}:
                self._may_speak(process.name, shard, authority)
        elif isinstance(message, Offer):
            self._may_speak(process.name, message.shard, message.authority)
        elif isinstance(message, Vector):
            for item in message.items:
                if item.spans:  # without spans it only asks its primary to compare
                    self._may_speak(process.name, item.shard, item.authority)

    def _may_speak(self, name: str, shard: int, authority: int) -> None:
        given = self.evidence.given.get((shard, authority))
        if authority and (given is None or given[0] != name):
            self.broken(f"{name} speaks for shard {shard} under epoch {authority}, which is {given}")

    def _on_replica_done(self, process: Any, done: fx.ReplicaDone) -> None:
        begin = self.evidence.receiving.get((life_of(process), done.op))
        learned = self.evidence.learned[life_of(process)]
        for item, status in zip(begin.items if begin else (), done.reply.statuses, strict=False):
            shard = shard_of(item.key)
            if status in HOLDS and item.authority < learned.get(shard, 0):
                what = f"shard {shard} from epoch {item.authority}, knowing of {learned[shard]}"
                self.broken(f"{process.name} took a write of {what}")

    def _on_put_answered(self, process: Any, event: ev.PutAnswered) -> None:
        """An old primary's answer must not become an acknowledgement."""
        life = life_of(process)
        forward = self.evidence.forwards.get((life, event.request))
        learned = self.evidence.learned[life]
        for item, authority in zip(forward.items if forward else (), event.reply.authorities, strict=False):
            shard = shard_of(item.key)
            if 0 < authority < learned.get(shard, 0):
                self._barred[(life, item.put_id)] = authority
            else:
                self._barred.pop((life, item.put_id), None)

    def _on_ack(self, process: Any, ack: Any) -> None:
        if not self._barred or ack.from_peer:
            return
        own = process.core.state.view.primary_epoch
        for key, put_id, outcome in zip(ack.keys, ack.put_ids, ack.outcomes, strict=True):
            authority = self._barred.get((life_of(process), put_id), 0)
            if own[shard_of(key)]:
                continue  # it has become the primary itself, and vouches for what it holds
            if outcome.status is PutStatus.STORED and outcome.version.epoch == authority != 0:
                self.broken(f"{process.name} acknowledged a put on the word of an old primary, epoch {authority}")


class OneGate(Oracle):
    """P3b."""

    law = "P3b: at any instant at most one node, of whatever epoch, may acknowledge session puts of a shard"

    def watch(self, passing: Passing) -> None:
        self._highest: dict[int, int] = {}
        passing.on_kind("ack", self._on_ack)
        passing.on_kind("commit", self._on_commit)

    def _on_commit(self, _process: Any, seen: Any) -> None:
        shards = [shard for shard, _ in self.evidence.owners_of(seen)]
        if shards:
            self._sample(shards)

    def _on_ack(self, process: Any, ack: Any) -> None:
        if self.evidence.excused("P3b"):
            return
        own: set[int] = set()
        for key, epoch in self._spoken_for(process, ack):
            shard = shard_of(key)
            given = self.evidence.given.get((shard, epoch))
            if given is not None and given[0] == process.name:
                own.add(shard)
                self._in_order(process, shard, epoch)
                self._in_time(process, shard)
        if own:
            self._sample(sorted(own))

    def _spoken_for(self, process: Any, ack: Any) -> list[tuple[bytes, int]]:
        """(key, epoch) of what this node acknowledges as the primary, not on another one's word."""
        authorities = ack.authorities or [0] * len(ack.keys)
        found: list[tuple[bytes, int]] = []
        for key, outcome, authority in zip(ack.keys, ack.outcomes, authorities, strict=True):
            if outcome.status is not PutStatus.STORED:
                continue
            if authority:
                found.append((key, authority))
            elif process.core.state.view.primary_epoch[shard_of(key)] == outcome.version.epoch:
                found.append((key, outcome.version.epoch))
        return found

    def _in_order(self, process: Any, shard: int, epoch: int) -> None:
        if epoch < self._highest.get(shard, 0):
            what = f"shard {shard} under epoch {epoch} after somebody had under {self._highest[shard]}"
            self.broken(f"{process.name} acknowledged {what}")
        self._highest[shard] = epoch

    def _in_time(self, process: Any, shard: int) -> None:
        """The lease in true time: nobody acknowledges a whole ttl after its last heartbeat was written."""
        beat_ns = self.evidence.heartbeats.get(process.name)
        ttl_ns = process.core.state.settings.ttl_ns
        if beat_ns is not None and self.cluster.now - beat_ns >= ttl_ns:
            late_ms = (self.cluster.now - beat_ns) / 1e6
            self.broken(f"{process.name} acknowledged for shard {shard} {late_ms:.0f} ms after its last heartbeat")

    def _sample(self, shards: list[int]) -> None:
        if self.evidence.excused("P3b"):
            return
        able = [process for process in self.cluster.processes.values() if self.evidence.may_act(process)]
        if len(able) < 2:
            return
        for shard in shards:
            at_gate = [process.name for process in able if self.evidence.at_gate(process, shard)]
            if len(at_gate) > 1:
                self.broken(f"shard {shard} has open gates at {' and '.join(at_gate)}")


class NoPending(Oracle):
    """Session reads see stamped blocks."""

    law = "a session read never returns a block without a version"

    def on_request(self, request: Request) -> None:
        if request.level is Level.SESSION:
            for info in request.infos or ():
                if info.reason == MissReason.NONE and info.version == NO_VERSION:
                    self.broken(f"{request.told()} got a PENDING block")


class NotFetchedBack(Oracle):
    """What was given up stays given up."""

    law = "repair never brings back to a node what it evicted"

    def watch(self, passing: Passing) -> None:
        self._given_up: dict[tuple[tuple[str, int], int], list[tuple[bytes, Version]]] = {}
        passing.on_type(ev.ReplicaBegin, self._on_begin)
        passing.on_type(fx.ReplicaDone, self._on_done)

    def _on_begin(self, process: Any, event: ev.ReplicaBegin) -> None:
        evicted = process.core.state.directory.evicted
        if not (event.fill or event.surplus) or not evicted:
            return
        given_up = process.core.state.directory.evicted_version
        found = [(item.key, item.version) for item in event.items if given_up(item.key) >= item.version]
        if found:
            self._given_up[(life_of(process), event.op)] = found

    def _on_done(self, process: Any, done: fx.ReplicaDone) -> None:
        for key, version in self._given_up.pop((life_of(process), done.op), ()):
            entry = process.core.state.directory.get(key)
            if entry is not None and entry.version == version and entry.slot is not None:
                self.broken(f"{process.name} took {tuple(version)} back in, which it had evicted")


class Expired(Oracle):
    """Namespaces with an end."""

    law = "a block is not served after its namespace's expiry, counted from its stamp"

    def on_request(self, request: Request) -> None:
        if not self.history.expiry_ms or self.evidence.excused("P6b") or self.evidence.jumped():
            return
        slack_ms = 3 * self.cluster.tick_ms + 2 * self.cluster.lateness_ms
        age_max_ns = (self.history.expiry_ms + slack_ms) * 1e6
        awake_ns = request.invoked_ns - slack_ms * 1e6
        if self.evidence.disturbed_ns.get(request.node, 0) > awake_ns:
            return  # its last tick may be old
        for put, info in zip(request.found, request.infos or (), strict=request.infos is not None):
            if put is None or not put.expires or info.version != put.stored:
                continue
            if request.invoked_ns - put.stored_ns > age_max_ns:
                age_ms = (request.invoked_ns - put.stored_ns) / 1e6
                self.broken(f"{request.told()} got {put.told()} {age_ms:.0f} ms after it was stored")


class OneHop(Oracle):
    """Relays."""

    law = "a put that was relayed to a node is not relayed on by it"

    def watch(self, passing: Passing) -> None:
        self._relayed: set[tuple[tuple[str, int], bytes]] = set()
        self._own: set[tuple[tuple[str, int], bytes]] = set()
        passing.on_type(ev.PutBegin, self._on_begin)
        passing.on_type(fx.Send, self._on_send)

    def _on_begin(self, process: Any, begin: ev.PutBegin) -> None:
        life = life_of(process)
        if begin.from_peer and begin.relay:
            self._relayed.update((life, item.put_id) for item in begin.items)
        elif not begin.from_peer:
            self._own.update((life, item.put_id) for item in begin.items)

    def _on_send(self, process: Any, send: fx.Send) -> None:
        if isinstance(send.message, PutRequest) and send.message.flags & PutFlag.RELAY:
            for item in send.message.items:
                ident = (life_of(process), item.put_id)
                if ident in self._relayed and ident not in self._own:
                    self.broken(f"{process.name} relays a put on to {send.peer} that was relayed to it")


class StrongOrder(Oracle):
    """Strong namespaces."""

    law = "P6: what clients saw of a strong namespace fits one order of operations, each between its call and return"

    def at_end(self) -> None:
        verdict = check(self.history.strong)
        if verdict.ok is False:
            self.broken(verdict.why)


SAFETY: tuple[type[Oracle], ...] = (
    RightBytes,
    OneContent,
    OneVoice,
    OneGate,
    NoPending,
    NotFetchedBack,
    Expired,
    OneHop,
    StrongOrder,
)
