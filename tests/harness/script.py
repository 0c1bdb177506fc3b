"""What nodes say to each other, as text that people can read: one line per message, time since the script began."""

from __future__ import annotations

from emberkv.core import effects as fx
from emberkv.core.view import shard_of_key
from emberkv.messages import Offer, OfferReply, PutFlag, PutReply, PutRequest, Replicate, ReplicateReply
from emberkv.messages import ReplicaStatus as Status
from emberkv.types import EntryState, Level, MissReason, PutStatus, Version
from harness.world import MS, Node, World


class Script:
    """Records the traffic of a world about the keys that were given names."""

    def __init__(self, world: World, names: dict[bytes, str]) -> None:
        self.world, self.names = world, names
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

    def name(self, key: bytes) -> str:
        return next((name for full, name in self.names.items() if full.endswith(key)), "?")

    def version(self, version: Version) -> str:
        return f"{self.epoch(version.epoch)}.{version.seq}" if version.epoch else "none"

    def epoch(self, epoch: int) -> str:
        """Epochs as e1, e2, ... in the order in which the script meets them."""
        return self.epochs.setdefault(epoch, f"e{len(self.epochs) + 1}")

    def _observe(self, node: Node, effect: fx.Effect) -> None:
        if isinstance(effect, fx.Send):
            text = self._request(effect.message)
            if text:
                self._line(f"{node.name} -> {effect.peer}   {text}")
        elif isinstance(effect, fx.Fetch) and any(key in self.names for key in effect.keys):
            self._line(f"{node.name} -> {effect.peer}   GET {' '.join(map(self.name, effect.keys))}")
        elif isinstance(effect, fx.Commit):
            self._commit(node, effect)
        elif isinstance(effect, fx.PutDone) and effect.op in self.world.asked:
            self._line(f"{node.name} -> client  PUT {self._outcomes(effect.outcomes)}")
        elif isinstance(effect, fx.GetDone) and effect.op in self.world.asked:
            found = [
                f"hit {self.version(i.version)}" if not i.reason else MissReason(i.reason).label for i in effect.infos
            ]
            self._line(f"{node.name} -> client  GET {', '.join(found)}")

    def _commit(self, node: Node, effect: fx.Commit) -> None:
        lives = [write.key for write in effect.writes if write.key.startswith("live/")]
        shards = [
            shard for write in effect.writes if write.key.startswith("own/") and (shard := shard_of_key(write.key))
        ]
        if lives:
            self._line(f"{node.name} -> coordinator  COMMIT {' '.join(lives)}")
        elif shards:
            self._line(f"{node.name} -> coordinator  COMMIT owner of {len(effect.writes)} shard(s)")

    def _request(self, message: object) -> str:
        if isinstance(message, Replicate):
            items = [item for item in message.items if item.key in self.names]
            return self._replicate(message, items) if items else ""
        if isinstance(message, PutRequest):
            kind = "DELETE" if message.delete else "PUT"
            how = "fresh" if message.flags & PutFlag.FRESH else "hint"
            level = Level(message.level).name.lower()
            return f"{kind} {' '.join(self.name(item.key) for item in message.items)}  {level}, {how}"
        if isinstance(message, Offer) and any(head.key in self.names for head in message.heads):
            heads = " ".join(f"{self.name(head.key)}={self.version(head.version)}" for head in message.heads)
            return f"OFFER as {self.epoch(message.authority)}: {heads}{' (last)' if message.last else ''}"
        return ""

    def _replicate(self, message: Replicate, items: list) -> str:  # type: ignore[type-arg]
        said = []
        for item in items:
            what = "tombstone" if item.state == EntryState.TOMBSTONE else "bytes" if item.payload else "no bytes"
            said.append(f"{self.name(item.key)}={self.version(item.version)} ({what})")
        kind = "FILL" if message.fill else "REPLICATE"
        return f"{kind} as {self.epoch(items[0].authority)}: {' '.join(said)}"

    def _answer(self, source: Node, target: Node, request: object, reply: object) -> None:
        if isinstance(reply, PutReply):
            self._line(f"{source.name} -> {target.name}   {self._outcomes(reply.outcomes)}")
        elif isinstance(reply, ReplicateReply) and self._request(request):
            said = [
                Status(s).name + (f" {self.epoch(e)}" if e else "")
                for s, e in zip(reply.statuses, reply.epochs, strict=True)
            ]
            self._line(f"{source.name} -> {target.name}   {', '.join(said)}")
        elif isinstance(reply, OfferReply) and self._request(request):
            heads = request.heads  # type: ignore[attr-defined]
            fenced = f"FENCED {self.epoch(reply.fenced_epoch)}" if reply.fenced_epoch > 1 else "FENCED (unheard of)"
            wants = " ".join(self.name(heads[index].key) for index in reply.wanted) or "nothing"
            self._line(f"{source.name} -> {target.name}   {fenced if reply.fenced_epoch else 'wants ' + wants}")

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
