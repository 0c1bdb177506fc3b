"""One process of a world: a real core, its tier, and the effects it performs truly (world.py has the rest)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.replica import Replica
from emberkv.core.state import Settings
from emberkv.messages import NodeAddress
from emberkv.ports import Slot
from emberkv.types import SHARDS, checksum, shard_of
from harness.tier import MemoryTier

if TYPE_CHECKING:
    from harness.world import World

MS = 1_000_000
DONE = (fx.Fill, fx.PutDone, fx.ReplicaDone, fx.OfferDone, fx.VectorDone, fx.GetDone, fx.ExistsDone)
SCOPE = b"scope..1"


def key_of(number: int) -> bytes:
    """Internal key of a test block."""
    return SCOPE + checksum(b"key%d" % number) * 2


def keys_of_shard(shard: int, count: int = 1) -> list[bytes]:
    """Internal keys of one shard."""
    found = [key for key in map(key_of, range(200 * SHARDS)) if shard_of(key) == shard]
    return found[:count]


class Node:
    """One process life and what outlives it (its name)."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.lives = 0
        self.alive = self.paused = False
        self.inbox: list[Callable[[], None]] = []
        self.incarnation = b""

    def start(self, *, proof: bool) -> None:
        world = self.world
        previous, self.lives = self.incarnation, self.lives + 1
        self.incarnation = checksum(f"{self.name}/{self.lives}/{world.seed}".encode())
        self.tier = MemoryTier(world.arena_bytes)
        settings = Settings(
            name=self.name,
            incarnation=self.incarnation,
            address=NodeAddress(self.name, f"{self.name}:1"),
            members=tuple(world.names),
            generation=1,
            previous_incarnation=previous if proof else b"",
            **world.settings,
        )
        self.core = Replica(settings, self.tier)
        self.alive, self.paused = True, False
        self.inbox = []
        self.held: Counter[int] = Counter()
        """Slot references that effects have handed to the world, by offset."""
        self.waiting: dict[int, Callable[[fx.Effect], None]] = {}
        self.peers: dict[str, str] = {}
        self.watch_revision = -1
        self.watch_due = 0
        self.notes: list[fx.Note] = []

    # -- stepping ------------------------------------------------------------------------------------------------

    def step(self, event: ev.Event) -> None:
        """One decision, and everything that follows from it at once."""
        world = self.world
        world.steps += 1
        effects = self.core.step(event)
        self.core.state.directory.check()
        self.tier.arena.check()
        for effect in effects:
            for slot in getattr(effect, "slots", None) or []:
                if slot is not None and not isinstance(effect, fx.Verify):
                    self.held[slot.offset] += 1
        if world.steps % world.account_every == 0:
            self.account()
        for effect in effects:
            world.observe(self, effect)
            self._perform(effect)

    def give_back(self, slots: Sequence[Slot | None]) -> list[Slot]:
        """References that leave the world's hands (by Unref, or with the event that passes them back)."""
        kept = [slot for slot in slots if slot is not None]
        for slot in kept:
            self.held[slot.offset] -= 1
            assert self.held[slot.offset] >= 0, "the world gives back what it does not hold"
        return kept

    def unref(self, slots: Sequence[Slot | None]) -> None:
        kept = self.give_back(slots)
        if kept:
            self.step(ev.Unref(self.world.now, kept))

    def account(self) -> None:
        """Each live slot's references are the entry's, the hints', the operations' and the world's: no more or less."""
        core = self.core
        expected: Counter[int] = Counter()
        for table in core.state.directory.shards:
            for entry in table.values():
                if entry.slot is not None:
                    expected[entry.slot.offset] += 1
        hints = core.put.hints
        flying = [hint for forward in hints.forwards.values() for hint in forward.hints]
        for hint in [*hints.queue.values(), *flying]:
            if hint.entry.slot is not None:
                expected[hint.entry.slot.offset] += 1
        for read in core.reads.ops.values():
            for slot in [*read.slots, *(entry.slot for entry in read.doubtful.values())]:
                if slot is not None:
                    expected[slot.offset] += 1
        for offset, count in self.held.items():
            expected[offset] += count
        found = {offset: slot.refs for offset, slot in self.tier.slots.items()}
        assert found == {o: n for o, n in expected.items() if n}, f"{self.name}: slots {found} expected {expected}"
        assert hints.bytes == sum(hint.entry.length for hint in [*hints.queue.values(), *flying])

    # -- effects -------------------------------------------------------------------------------------------------

    def _perform(self, effect: fx.Effect) -> None:
        world = self.world
        if isinstance(effect, fx.Commit):
            world.commit(self, effect)
        elif isinstance(effect, fx.Send):
            world.send(self, effect)
        elif isinstance(effect, fx.Connect):
            world.connect(self, effect.peers)
        elif isinstance(effect, fx.Note):
            self.notes.append(effect)
            assert not effect.alarm or "take" in effect.text or "alive" in effect.text, effect.text
        elif isinstance(effect, fx.Fetch):
            world.fetch(self, effect)
        elif isinstance(effect, fx.Verify):
            self.soon(lambda: self._verify(effect))
        elif isinstance(effect, DONE):
            self.waiting[effect.op](effect)
            if not isinstance(effect, fx.Fill):
                del self.waiting[effect.op]
        elif isinstance(effect, fx.Reserved):
            self.reserved = effect.slots

    def _verify(self, effect: fx.Verify) -> None:
        checks = zip(effect.indices, effect.slots, effect.checksums, strict=True)
        bad = [index for index, slot, expected in checks if checksum(self.tier.view(slot)) != expected]
        self.step(ev.Verified(self.world.now, effect.op, bad))

    def soon(self, action: Callable[[], None]) -> None:
        """Later on this node's own threads: other events may come between."""
        life = self.lives
        self.world.after(self.world.rng.randrange(0, MS // 2), lambda: self.run(life, action))

    def run(self, life: int, action: Callable[[], None], lost: Callable[[], None] | None = None) -> None:
        """In this life only; a paused process does it when it wakes."""
        if not self.alive or self.lives != life:
            if lost is not None:
                lost()
        elif self.paused:
            self.inbox.append(lambda: self.run(life, action, lost))
        else:
            action()

    def reserve(self, lengths: list[int]) -> list[Slot | None]:
        self.step(ev.Reserve(self.world.now, lengths))
        return self.reserved


class Connection:
    """One in-order stream connection from a node to a peer; a new one after each loss."""

    def __init__(self, source: Node, target: Node) -> None:
        self.source, self.target = source, target
        self.lives = (source.lives, target.lives)
        self.open = True
        self.busy_until = 0
        self.back_until = 0
