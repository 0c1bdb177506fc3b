"""What nodes say to each other, as text that people can read: one line per message, time since the script began."""

from __future__ import annotations

import msgspec

from emberkv.core import effects as fx
from emberkv.core.view import owner_key, shard_of_key
from emberkv.messages import (
    Offer,
    OfferReply,
    PutFlag,
    PutReply,
    PutRequest,
    Replicate,
    ReplicateReply,
    ShardOwner,
    Span,
    Vector,
    VectorAnswer,
    VectorItem,
    VectorReply,
    VectorStatus,
)
from emberkv.messages import ReplicaStatus as Status
from emberkv.types import EntryState, Level, MissReason, PutStatus, Version, shard_of
from harness.world import MS, Node, World


class Script:
    """Records the traffic of a world about the keys that were given names, and about their shards."""

    def __init__(self, world: World, names: dict[bytes, str]) -> None:
        self.world, self.names = world, names
        self.shards = sorted({shard_of(key) for key in names})
        self.begun = world.now
        self.lines: list[str] = []
        self.epochs: dict[int, str] = {}
        world.observers.append(self._observe)
        world.answers.append(self._answer)

    def say(self, text: str) -> None:
        self.lines.append(f"{'':>9}  -- {text}")

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    def _line(self, text: str) -> None:
        self.lines.append(f"{(self.world.now - self.begun) / MS:>9.1f}  {text}")

    # -- names -----------------------------------------------------------------------------------------------------

    def name(self, key: bytes) -> str:
        return next((name for full, name in self.names.items() if full.endswith(key)), "?")

    def version(self, version: Version) -> str:
        return f"{self.epoch(version.epoch)}.{version.seq}" if version.epoch else "none"

    def epoch(self, epoch: int) -> str:
        """Epochs as e1, e2, ... in the order in which the script meets them."""
        return self.epochs.setdefault(epoch, f"e{len(self.epochs) + 1}")

    def spans(self, spans: list[Span]) -> str:
        said = (f"{self.epoch(s.epoch)}.{s.first}" + (f"-{s.last}" if s.last != s.first else "") for s in sorted(spans))
        return " ".join(said) or "nothing"

    # -- what nodes do -----------------------------------------------------------------------------------------------

    def _observe(self, node: Node, effect: fx.Effect) -> None:
        if isinstance(effect, fx.Send):
            for text in self._request(effect.message):
                self._line(f"{node.name} -> {effect.peer}   {text}")
        elif isinstance(effect, fx.Fetch) and any(key in self.names for key in effect.keys):
            self._line(f"{node.name} -> {effect.peer}   GET {self._fetch(effect)}")
        elif isinstance(effect, fx.Commit):
            self._commit(node, effect)
        elif isinstance(effect, fx.PutDone) and effect.op in self.world.asked:
            self._line(f"{node.name} -> client  PUT {self._outcomes(effect.outcomes)}")
        elif isinstance(effect, fx.GetDone) and effect.op in self.world.asked:
            found = [
                f"hit {self.version(i.version)}" if not i.reason else MissReason(i.reason).label for i in effect.infos
            ]
            self._line(f"{node.name} -> client  GET {', '.join(found)}")

    def _fetch(self, effect: fx.Fetch) -> str:
        floors = effect.floors or [Version(0, 0)] * len(effect.keys)
        keys = [
            self.name(key) + (f">={self.version(floor)}" if floor.epoch else "")
            for key, floor in zip(effect.keys, floors, strict=True)
        ]
        how = [word for word, said in (("if newer", effect.if_newer), ("relay", effect.relay)) if said]
        return " ".join(keys) + f"  {', '.join(['session' if effect.session else 'eventual', *how])}"

    def _commit(self, node: Node, effect: fx.Commit) -> None:
        lives = [write.key for write in effect.writes if write.key.startswith("live/")]
        owners = {shard_of_key(write.key): write for write in effect.writes if write.key.startswith("own/")}
        if lives:
            self._line(f"{node.name} -> coordinator  COMMIT {' '.join(lives)}")
        for shard in self.shards:
            if shard in owners:
                record = msgspec.msgpack.decode(owners[shard].value, type=ShardOwner)
                self._line(f"{node.name} -> coordinator  COMMIT {owner_key(shard)}: {self._owner(record)}")

    def _owner(self, record: ShardOwner) -> str:
        roles = [name + ("" if name in record.in_sync else " (learner)") for name in record.replicas]
        former = f"; former {' '.join(record.former)}" if record.former else ""
        return (
            f"primary {record.primary or 'none'} under {self.epoch(record.epoch)}; replicas {', '.join(roles)}{former}"
        )

    # -- what they say -----------------------------------------------------------------------------------------------

    def _request(self, message: object) -> list[str]:
        if isinstance(message, Replicate):
            items = [item for item in message.items if item.key in self.names]
            return [self._replicate(message, items)] if items else []
        if isinstance(message, PutRequest):
            kind = "DELETE" if message.delete else "PUT"
            how = "fresh" if message.flags & PutFlag.FRESH else "hint"
            relay = ", relay" if message.flags & PutFlag.RELAY else ""
            keys = [
                self.name(item.key) + (f" (seen {self.version(item.seen)})" if item.seen.epoch else "")
                for item in message.items
            ]
            return [f"{kind} {' '.join(keys)}  {Level(message.level).name.lower()}, {how}{relay}"]
        if isinstance(message, Offer) and message.shard in self.shards:
            heads = " ".join(f"{self.name(head.key)}={self.version(head.version)}" for head in message.heads)
            last = " (last)" if message.last else ""
            return [f"OFFER as {self.epoch(message.authority)}: {heads or 'nothing'}{last}"]
        if isinstance(message, Vector):
            return [self._vector(item) for item in message.items if item.shard in self.shards]
        return []

    def _vector(self, item: VectorItem) -> str:
        floor = f", floor {self.version(item.floor)}" if item.floor.epoch else ""
        kind = "ADOPT" if item.adopt else "VECTOR"
        return f"{kind} as {self.epoch(item.authority)}{floor}: {self.spans(item.spans)}"

    def _replicate(self, message: Replicate, items: list) -> str:  # type: ignore[type-arg]
        said = []
        for item in items:
            what = "bytes" if item.payload else "no bytes"
            if item.state == EntryState.TOMBSTONE:
                what = "tombstone"
            elif item.skip:
                what = "keep no copy"
            said.append(f"{self.name(item.key)}={self.version(item.version)} ({what})")
        kind = "HAND IN" if message.surplus else "FILL" if message.fill else "REPLICATE"
        return f"{kind} as {self.epoch(items[0].authority)}: {' '.join(said)}"

    # -- what they answer --------------------------------------------------------------------------------------------

    def _answer(self, source: Node, target: Node, request: object, reply: object) -> None:
        said: list[str] = []
        if isinstance(reply, PutReply):
            said = [self._outcomes(reply.outcomes)]
        elif isinstance(request, Replicate) and isinstance(reply, ReplicateReply):
            found = [
                Status(status).name + (f" {self.epoch(epoch)}" if epoch else "")
                for item, status, epoch in zip(request.items, reply.statuses, reply.epochs, strict=True)
                if item.key in self.names
            ]
            said = [", ".join(found)] if found else []
        elif isinstance(request, Offer) and isinstance(reply, OfferReply) and request.shard in self.shards:
            fenced = f"FENCED {self.epoch(reply.fenced_epoch)}" if reply.fenced_epoch > 1 else "FENCED (unheard of)"
            wants = " ".join(self.name(request.heads[index].key) for index in reply.wanted) or "nothing"
            said = [fenced if reply.fenced_epoch else f"wants {wants}"]
        elif isinstance(request, Vector) and isinstance(reply, VectorReply):
            pairs = zip(request.items, reply.answers, strict=True)
            said = [self._vector_answer(answer) for item, answer in pairs if item.shard in self.shards]
        for text in said:
            self._line(f"{source.name} -> {target.name}   {text}")

    def _vector_answer(self, answer: VectorAnswer) -> str:
        status = VectorStatus(answer.status)
        if status is VectorStatus.SPANS:
            return f"has {self.spans(answer.spans)}"
        return status.name + (f" {self.epoch(answer.epoch)}" if answer.epoch else "")

    def _outcomes(self, outcomes: list) -> str:  # type: ignore[type-arg]
        said = []
        for outcome in outcomes:
            text = outcome.status.name
            if outcome.status is PutStatus.REFUSED:
                text += f" {outcome.reason.label}"
            if outcome.version.epoch:
                text += f" {self.version(outcome.version)} copies={outcome.copies}"
            said.append(text)
        return ", ".join(said)
