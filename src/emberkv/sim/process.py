"""One node of a simulated cluster over all its lives: the real Runtime and Replica, and ports of virtual time.

    start --> RUNNING --pause--> FROZEN --wake--> RUNNING --kill--> DEAD --start--> RUNNING (next life)

Laws: what runs is node/runtime.py itself; this file brings bytes, answers and time to the dialogues that it yields,
with other events in between. A frozen process does nothing: what arrives waits, and when it wakes, the order of what
came on one connection is kept while connections come in any order, as threads do. Nothing of a dead life acts any more.
Limits: sums of directory and arena are checked every CHECK_STEPS steps, and at rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.replica import Replica
from emberkv.core.state import Settings
from emberkv.messages import (
    BlockInfo,
    Message,
    NodeAddress,
    Offer,
    PutFlag,
    PutReply,
    PutRequest,
    Replicate,
    Vector,
)
from emberkv.node.runtime import Answer, FetchOutcome, Filling, Reading, Runtime
from emberkv.ports import Slot, Tier
from emberkv.sim.coordinator import Access
from emberkv.sim.engine import MS, NodeClock, Violation
from emberkv.sim.network import Reading as PeerReading
from emberkv.sim.network import Stream, Transport
from emberkv.storage.arena import SlabArena, class_of
from emberkv.storage.arena import Slot as ArenaSlot
from emberkv.types import Level, PutOutcome, PutStatus, Version, checksum

if TYPE_CHECKING:
    from emberkv.sim.cluster import Cluster

CHECK_STEPS = 101
"""Full sums cost more than a step, so they are taken now and then; a prime, so that no rhythm hides from it."""
NAME_TAKEN = ("is alive", "took over")
"""Alarms that say that another process lives under this name: then this one ends, as the real one does."""
NO_CHECKSUM = b"\0" * 16
BROKEN = ConnectionError("the simulated connection broke in the middle of a payload")


class MemoryTier:
    """The real slab allocator with bytes beside it: a use after release is seen at once."""

    def __init__(self, slots: int) -> None:
        total = slots * 4096
        self.arena = SlabArena(total, slab_bytes=max(4096, total // 8))
        self.bytes: dict[int, bytearray] = {}
        self.slots: dict[int, ArenaSlot] = {}

    def reserve(self, length: int) -> ArenaSlot | None:
        """As ports.Tier; fresh room holds nothing that anybody wrote."""
        slot = self.arena.reserve(length)
        if slot is not None:
            if slot.offset in self.bytes:
                raise Violation("the arena gave one place to two owners")
            self.bytes[slot.offset] = bytearray(b"\xee" * length)
            self.slots[slot.offset] = slot
        return slot

    def view(self, slot: Slot) -> memoryview:
        """As ports.Tier."""
        if self.slots.get(slot.offset) is not slot:
            raise Violation("bytes of a slot are touched after it was given back")
        return memoryview(self.bytes[slot.offset])

    def read(self, slot: Slot) -> bytes:
        """A copy of the bytes."""
        return bytes(self.view(slot))

    def write(self, slot: Slot, data: bytes) -> None:
        """Fills the slot."""
        self.view(slot)[:] = data

    def release(self, slot: Slot) -> None:
        """As ports.Tier."""
        own = self.slots.pop(slot.offset, None)
        if own is None or own is not slot:
            raise Violation("a slot is given back twice")
        del self.bytes[slot.offset]
        self.arena.release(own)

    def usage(self) -> tuple[int, int]:
        """As ports.Tier."""
        return self.arena.usage()

    def size_class(self, length: int) -> int:
        """As ports.Tier."""
        return class_of(length)

    def slabs(self, length: int, cold: Iterable[Slot]) -> Iterator[Iterator[Slot]]:
        """As ports.Tier."""
        return self.arena.slabs(length, cold)


class WatchedReplica(Replica):
    """The core, with somebody who sees each step."""

    def __init__(self, settings: Settings, tier: Tier, process: Process) -> None:
        super().__init__(settings, tier)
        self._process = process

    def step(self, event: ev.Event) -> list[fx.Effect]:
        """As Replica.step."""
        process = self._process
        process.steps += 1
        for observer in process.cluster.event_observers:
            observer("event", process, event)
        effects = super().step(event)
        if process.steps % CHECK_STEPS == 0:
            process.check()
        for observer in process.cluster.effect_observers:
            for effect in effects:
                observer("effect", process, effect)
        return effects


class SimRuntime(Runtime):
    """The runtime on a thread that may be put aside between a decision and the answer that follows from it."""

    process: Process

    def perform(self, effects: list[fx.Effect]) -> None:
        """As Runtime.perform."""
        process = self.process
        share = process.cluster.options.preempt_share
        if share and process.cluster.engine.rng.random() < share:
            late = [effect for effect in effects if type(effect) is fx.PutDone]
            if late:
                pause = process.cluster.engine.between_ns(0, process.cluster.lateness_ms)
                process.cluster.engine.after(pause, process.run, process.lives, None, super().perform, late)
                effects = [effect for effect in effects if type(effect) is not fx.PutDone]
        super().perform(effects)


class Process:
    """One node, over all its lives."""

    core: Replica
    runtime: Runtime
    tier: MemoryTier
    access: Access

    def __init__(self, cluster: Cluster, name: str, clock: NodeClock) -> None:
        self.cluster, self.name, self.clock = cluster, name, clock
        self.engine = cluster.engine
        self.alive = self.paused = False
        self.lives = 0
        self.incarnation = b""
        self.away = 0
        """Count of faults that keep it from the coordinator."""
        self.away_one_way = False
        self.silent = 0
        """Count of faults that make its watch deliver nothing."""
        self.peers: dict[str, str] = {}
        self.steps = 0
        self.woke_ns = 0
        """True time of the last start or wake: since then it could act."""
        self._inbox: list[tuple[object, Callable[..., None], tuple[Any, ...]]] = []

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self, *, proof: bool = True) -> None:
        """A new life, empty; `proof`: it finds its data directory, which names the incarnation before."""
        cluster = self.cluster
        previous, self.lives = self.incarnation, self.lives + 1
        self.incarnation = checksum(f"{self.name}/{self.lives}/{self.engine.seed}".encode())
        self.tier = MemoryTier(cluster.options.arena_slots)
        settings = Settings(
            name=self.name,
            incarnation=self.incarnation,
            address=NodeAddress(self.name, f"{self.name}:1"),
            members=tuple(cluster.names),
            generation=cluster.coordinator.generation_now,
            previous_incarnation=previous if proof else b"",
            **cluster.times(),
        )
        self.core = WatchedReplica(settings, self.tier, self)
        self.access = Access(cluster.coordinator, self, cluster.commit_deadline_ms)
        transport = Transport(cluster.network, self)
        self.runtime = SimRuntime(
            self.core, self.tier, self.clock, transport, cluster.no_fetcher, self.access, self._note
        )
        self.runtime.process = self
        self.alive, self.paused = True, False
        self.woke_ns = self.engine.now
        self._inbox = []
        self.peers = {}
        cluster.tell("life", self, "start")
        self.access.start()
        self._tick(self.lives)

    def kill(self, *, silent: bool = False) -> None:
        """The process ends at once; `silent`: with its host, so that no peer is told."""
        if not self.alive:
            return
        self.alive = self.paused = False
        self._inbox = []
        self.access.close()
        if self.clock.stopped:
            self.clock.resume()
        self.cluster.tell("life", self, "kill")
        self.cluster.network.gone(self, silent=silent)

    def pause(self, *, machine: bool = False) -> None:
        """SIGSTOP, or (`machine`) a virtual machine that stands still with its clock."""
        if not self.alive or self.paused:
            return
        self.paused = True
        if machine:
            self.clock.stop()
        self.cluster.tell("life", self, "vm-pause" if machine else "pause")

    def wake(self) -> None:
        """What arrived meanwhile is taken in: in order on each connection, in any order between them."""
        if not self.alive or not self.paused:
            return
        self.paused = False
        self.woke_ns = self.engine.now
        if self.clock.stopped:
            self.clock.resume()
        self.cluster.tell("life", self, "wake")
        lanes: dict[object, deque[tuple[object, Callable[..., None], tuple[Any, ...]]]] = {}
        inbox, self._inbox = self._inbox, []
        for number, (lane, action, arguments) in enumerate(inbox):
            lanes.setdefault(number if lane is None else lane, deque()).append((lane, action, arguments))
        queues, life = list(lanes.values()), self.lives
        while queues:
            index = self.engine.rng.randrange(len(queues))
            lane, action, arguments = queues[index].popleft()
            if not queues[index]:
                queues.pop(index)
            self.run(life, lane, action, *arguments)

    def run(self, life: int, lane: object, action: Callable[..., None], *arguments: Any) -> None:
        """In this life only; a frozen process does it when it wakes. `lane`: whose order is to be kept."""
        if not self.alive or self.lives != life:
            return
        if self.paused:
            self._inbox.append((lane, action, arguments))
        else:
            action(*arguments)

    def _tick(self, life: int) -> None:
        if not self.alive or self.lives != life:
            return
        if not self.paused:
            self.handle(ev.Tick(self.clock.now_ns(), self.clock.wall_ms()))
        elif not any(lane == "tick" for lane, _, _ in self._inbox):
            self._inbox.append(("tick", self._late_tick, ()))
        period = self.cluster.tick_ms * MS
        self.engine.after(period + period * self.cluster.tick_jitter * self.engine.rng.random(), self._tick, life)

    def _late_tick(self) -> None:
        self.handle(ev.Tick(self.clock.now_ns(), self.clock.wall_ms()))

    # -- steps ---------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> None:
        """One event into the runtime."""
        self.runtime.handle(event)

    def unref(self, slots: list[Slot]) -> None:
        """References back."""
        self.runtime.unref(slots)

    def check(self) -> None:
        """Sums that always hold."""
        self.core.state.directory.check()
        self.tier.arena.check()

    def sending(self, peer: str, message: Message) -> None:
        """A message is queued to a peer."""
        repair = type(message) is Offer or type(message) is Vector
        if repair or (type(message) is Replicate and (message.fill or message.surplus)):
            self.cluster.tell("repair", self, (peer, message))

    def _note(self, text: str, alarm: bool) -> None:
        if not alarm:
            return
        if any(words in text for words in NAME_TAKEN):
            self.engine.after(0, self._end_life, self.lives)
            return
        raise Violation(f"{self.name} raised an alarm: {text}")

    def _end_life(self, life: int) -> None:
        if self.alive and self.lives == life:
            self.kill()
            self.cluster.name_was_taken(self)

    # -- reads ---------------------------------------------------------------------------------------------------

    def read(
        self,
        keys: list[bytes],
        deadline_ns: int,
        *,
        session: bool,
        local_only: bool,
        verify: bool,
        floors: Sequence[Version] = (),
        if_newer: bool = False,
        relayed: bool = False,
        done: Callable[[list[BlockInfo], list[Slot | None]], None],
    ) -> None:
        """A read; `done` gets infos and slots, each slot with a reference that it owns."""
        drive = ReadDrive(self, done)
        drive.begin(
            self.runtime.reading(
                drive.ended,
                keys,
                deadline_ns,
                session=session,
                local_only=local_only,
                verify=verify,
                floors=floors,
                if_newer=if_newer,
                relayed=relayed,
            )
        )

    # -- what peers send -----------------------------------------------------------------------------------------

    def receive(self, stream: Stream, request: int, message: Message, data: list[bytes]) -> None:
        """One message of a stream; the next is taken when its bytes are in."""
        runtime, peer, now_ns = self.runtime, stream.source.name, self.clock.now_ns()
        if isinstance(message, Replicate):
            sums = [item.checksum for item in message.items]
            dialogue = runtime.replicating(peer, message.items, message.fill, surplus=message.surplus)
            carried = [item.payload for item in message.items]
            drive = FillDrive(self, stream, carried, sums, data, lambda reply: stream.answer(request, reply))
            drive.begin(dialogue)
        elif isinstance(message, PutRequest):
            self._receive_put(stream, request, message, data)
        elif isinstance(message, Offer):
            stream.answer(request, runtime.offer(ev.OfferArrived(now_ns, runtime.op(), peer, message)))
            stream.next()
        elif isinstance(message, Vector):
            stream.answer(request, runtime.vector(ev.VectorArrived(now_ns, runtime.op(), peer, message)))
            stream.next()
        else:
            raise Violation(f"{peer} sent {type(message).__name__} on a stream")

    def _receive_put(self, stream: Stream, request: int, message: PutRequest, data: list[bytes]) -> None:
        runtime, now_ns = self.runtime, self.clock.now_ns()
        event = ev.PutBegin(
            now_ns,
            runtime.op(),
            [message.scope + item.key for item in message.items],
            message.items,
            now_ns + message.deadline_ms * MS,
            message.level == Level.SESSION,
            bool(message.flags & PutFlag.FRESH),
            message.min_copies,
            stream.source.name,
            message.delete,
            relay=bool(message.flags & PutFlag.RELAY),
        )

        def done(reply: PutReply) -> None:
            self.acked(event, reply)
            stream.answer(request, reply)

        carried = [not message.delete] * len(message.items)
        sums = [item.checksum for item in message.items]
        FillDrive(self, stream, carried, sums, data, lambda _: None).begin(runtime.putting(event, done))

    def acked(self, event: ev.PutBegin, reply: PutReply) -> None:
        """Outcomes leave this node."""
        self.cluster.tell("ack", self, Ack(event, reply.outcomes, reply.authorities))


class Ack:
    """Outcomes of a put as they leave a node: `keys`, `outcomes`, `authorities`, `session`, `from_peer`, `put_ids`."""

    __slots__ = ("authorities", "delete", "from_peer", "keys", "min_copies", "outcomes", "put_ids", "session")

    def __init__(self, event: ev.PutBegin, outcomes: list[PutOutcome], authorities: list[int]) -> None:
        self.keys = event.keys
        self.put_ids = [item.put_id for item in event.items]
        self.outcomes = outcomes
        self.authorities = authorities
        self.session = event.session
        self.from_peer = event.from_peer
        self.min_copies = event.min_copies
        self.delete = event.delete

    def stored(self) -> bool:
        """Was any of it acknowledged as stamped?"""
        return any(outcome.status is PutStatus.STORED for outcome in self.outcomes)


class ReadDrive:
    """Drives one read dialogue over virtual time."""

    def __init__(self, process: Process, done: Callable[[list[BlockInfo], list[Slot | None]], None]) -> None:
        self.process, self.life = process, process.lives
        self.done = done
        self.dialogue: Reading
        self._end: fx.Effect | None = None
        self._waits = False
        self._outcomes: list[FetchOutcome | None] = []

    def ended(self, effect: fx.Effect) -> None:
        """A step of somebody else has ended the read."""
        self._end = effect
        if self._waits:
            self._waits = False
            self._send(effect)

    def begin(self, dialogue: Reading) -> None:
        """Runs up to the first wait."""
        self.dialogue = dialogue
        self._send(None)

    def _send(self, result: Any) -> None:
        try:
            wants = self.dialogue.send(result)
        except StopIteration as stop:
            answer: Answer = stop.value
            self.done(*answer)
            return
        process = self.process
        if wants is None:
            if self._end is not None:
                self._send(self._end)
            else:
                self._waits = True
        elif isinstance(wants, fx.Verify):
            pause = process.engine.between_ns(0, 0.3)
            process.engine.after(pause, process.run, self.life, None, self._verified, wants)
        elif isinstance(wants, fx.Load):
            pause = process.engine.between_ns(0, 3)
            process.engine.after(pause, process.run, self.life, None, self._loaded, wants)
        else:
            self._outcomes = [None] * len(wants)
            for index, fetch in enumerate(wants):
                PeerReading(process.cluster.network, process, fetch, self._taker(index)).start()

    def _verified(self, verify: fx.Verify) -> None:
        self._send(self.process.runtime.bad_copies(verify))

    def _loaded(self, load: fx.Load) -> None:
        self._send(self.process.runtime.load(load))

    def _taker(self, index: int) -> Callable[[FetchOutcome], None]:
        def take(outcome: FetchOutcome) -> None:
            self._outcomes[index] = outcome
            if None not in self._outcomes:
                self._send(self._outcomes)

        return take


class FillDrive:
    """Drives a write dialogue whose bytes come by stream: they arrive a little later, or the stream breaks first."""

    def __init__(
        self,
        process: Process,
        stream: Stream,
        carried: list[bool],
        sums: list[bytes],
        data: list[bytes],
        done: Callable[[Any], None],
    ) -> None:
        self.process, self.life, self.stream = process, process.lives, stream
        self.carried, self.sums, self.data = carried, sums, data
        self.done = done
        self.dialogue: Filling[Any]

    def begin(self, dialogue: Filling[Any]) -> None:
        """Runs up to the wait for bytes, or to the end."""
        self.dialogue = dialogue
        process = self.process
        try:
            slots = next(dialogue)
        except StopIteration as stop:
            self._end(stop.value)
            return
        pause = process.engine.between_ns(0, 0.3)
        process.engine.after(pause, process.run, self.life, self.stream, self._bytes, slots)

    def _bytes(self, slots: list[Slot | None]) -> None:
        stream = self.stream
        if not stream.open and self.process.engine.rng.random() < 0.5:
            try:
                self.dialogue.throw(BROKEN)
            except ConnectionError:
                stream.next()
                return
        try:
            self.dialogue.send(fill(self.process.tier, slots, self.carried, self.sums, self.data))
        except StopIteration as stop:
            self._end(stop.value)

    def _end(self, result: Any) -> None:
        self.done(result)
        self.stream.next()


def fill(
    tier: MemoryTier, slots: list[Slot | None], carried: list[bool], sums: list[bytes], data: list[bytes]
) -> list[bytes | None]:
    """Puts the payload of a frame into slots, as connections.fill_from_link does."""
    checks: list[bytes | None] = []
    rest = iter(data)
    for slot, carries, stated in zip(slots, carried, sums, strict=True):
        payload = next(rest) if carries else b""
        if slot is None:
            checks.append(None if carries else stated)
            continue
        tier.write(slot, payload)
        found = checksum(payload)
        checks.append(found if stated in (found, NO_CHECKSUM) else None)
    if next(rest, None) is not None:
        raise Violation("payload and items of a message differ in number")
    return checks
