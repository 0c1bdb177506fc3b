"""The monitor around the core: one lock, any thread may step, effects are performed by the thread that caused them.

Why it exists: the core decides, this file does. The simulator runs this file too, so it knows no socket, no asyncio and
no wall clock: only the ports it was given.
Laws: messages to peers are queued while the lock is held, so their order is the order of the decisions; everything else
happens outside the lock. Each slot reference that an effect carries is given back exactly once. What takes time (bytes
that arrive, peers that answer, checksums of many blocks) is never waited for by the code that decides: requests are
dialogues, generators that yield what has to be done and are sent its outcome. `read`, `put` and `replicate` drive them
on the calling thread; the simulator drives the same ones over virtual time.
Limits: a step is bounded by 128 keys; what waits for an answer is bounded by the core.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.replica import Replica
from emberkv.messages import (
    BlockInfo,
    MapReply,
    OfferReply,
    PutItem,
    PutReply,
    ReplicaItem,
    ReplicateReply,
    VectorReply,
)
from emberkv.ports import BlockStore, Clock, Found, Slot, Tier, Transport
from emberkv.types import NO_VERSION, MissReason, PutStatus, Version, checksum

Place = Callable[[Sequence[int]], list[Slot | None]]
"""Makes room for blocks of the given lengths; None where there is none."""
FetchOutcome = tuple[list[BlockInfo], list[Slot | None], int]
"""Infos per key, slots, elapsed nanoseconds. Verified bytes of hits are in slots; a slot beside a miss is room that was
reserved and must be given back."""


class Fetcher(Protocol):
    """Reads from peers' tiers."""

    def start(
        self,
        peer: str,
        keys: list[bytes],
        session: bool,
        deadline_ns: int,
        floors: Sequence[Version] = (),
        if_newer: bool = False,
        relay: bool = False,
    ) -> Any:
        """Prepares a read for `finish_all`; never raises for an unreachable peer. Keys are internal (scope + key), of
        one scope; `floors`, `if_newer` and `relay` as in effect Fetch."""
        ...

    def finish_all(self, pending: Sequence[Any], place: Place) -> list[FetchOutcome]:
        """Waits for reads, each until its own deadline and all at the same time, so that a frozen peer costs the others
        nothing. `place` may be called by several threads."""
        ...

    def exists(self, peer: str, keys: list[bytes], deadline_ns: int) -> list[int]:
        """MissReason numbers of the peer's own tiers; UNREACHABLE for all when it does not answer in time."""
        ...


class Committer(Protocol):
    """Commits at the coordinator in another thread; the outcome comes back as event Committed."""

    def submit(self, commit: fx.Commit) -> None:
        """Queues a commit; never blocks."""
        ...


READ_LOST_S = 10.0
"""A read whose end is nowhere to be seen for so long is a bug; its thread then says so instead of hanging."""

Reply = Callable[[fx.Effect], None]
"""Called once, by any thread, with the effect that ends an operation."""
Answer = tuple[list[BlockInfo], list[Slot | None]]
"""What a read found: infos and slots per key; each slot carries a reference that the reader owns."""
Reading = Generator[fx.Verify | fx.Load | list[fx.Fetch] | None, Any, Answer]
"""A read under way. It yields a Verify and is sent the bad indices; or a Load and is sent what came; or fetches and is
sent one FetchOutcome for each, when all have ended; or None, and is sent the GetDone that another thread's step has
caused or will cause (`ended`)."""
Loading = list[tuple[MissReason, Found | None, Slot | None]]
"""What came of a Load, per key: a slot exactly beside NONE."""
T = TypeVar("T")
Filling = Generator[list[Slot | None], list[bytes | None], T]
"""A write under way. It yields at most once: slots to bring bytes into, and is sent their checksums. An exception
thrown in at that moment means that the bytes do not come: nothing is stored."""


class Runtime:
    """Steps the core and performs its effects through ports."""

    def __init__(
        self,
        core: Replica,
        tier: Tier,
        clock: Clock,
        transport: Transport,
        fetcher: Fetcher,
        committer: Committer,
        note: Callable[[str, bool], None],
        disk: BlockStore | None = None,
    ) -> None:
        self.core = core
        self.tier = tier
        self.clock = clock
        self.transport = transport
        self.fetcher = fetcher
        self.committer = committer
        self.note = note
        self.disk = disk
        self.lock = threading.Lock()
        self.now_ns: Callable[[], int] = clock.now_ns
        """CLOCK_BOOTTIME, as events carry it."""
        self._ops = itertools.count()
        self._waiting: dict[int, Reply] = {}

    # -- stepping ------------------------------------------------------------------------------------------------

    def op(self) -> int:
        """A number for an operation: 1 to 2**31 - 1, for 0 means nobody and above it the core's own numbers begin."""
        return next(self._ops) % 0x7FFFFFFF + 1

    def step(self, event: ev.Event) -> list[fx.Effect]:
        """One decision; messages to peers are queued at once, the other effects are the caller's to perform."""
        with self.lock:
            effects = self.core.step(event)
            sends = [effect for effect in effects if type(effect) is fx.Send]
            if not sends:
                return effects
            failed = [send for send in sends if not self._send(send)]
            rest = [effect for effect in effects if type(effect) is not fx.Send]
            for send in failed:  # grows while what follows from a loss cannot be sent either
                # Not queued: as if the connection had been lost, which is what the core must learn. Under the same
                # lock, or it could learn of the peer's return first and take it for down ever after.
                for effect in self.core.step(ev.PeerDown(self.now_ns(), send.peer)):
                    if not isinstance(effect, fx.Send):
                        rest.append(effect)
                    elif not self._send(effect):
                        failed.append(effect)
        for send in failed:
            self.unref(send.slots)
        return rest

    def _send(self, send: fx.Send) -> bool:
        payload = [self.tier.view(slot) for slot in send.slots]
        slots = send.slots
        return self.transport.send(send.peer, send.request, send.message, payload, lambda: self.unref(slots))

    def unref(self, slots: list[Slot]) -> None:
        """Gives references back."""
        if slots:
            self.perform(self.step(ev.Unref(self.now_ns(), slots)))

    def handle(self, event: ev.Event) -> None:
        """Steps and performs everything that follows."""
        self.perform(self.step(event))

    def perform(self, effects: list[fx.Effect]) -> None:
        """Performs effects that belong to no read of this thread."""
        for effect in effects:
            kind = type(effect)
            if kind is fx.Fill or kind is fx.GetDone:  # the usual ones first
                self._reply(effect.op, effect)  # type: ignore[attr-defined]
            elif isinstance(effect, fx.PutDone):
                self._reply(effect.op, self._gated(effect))
            elif kind is fx.Persist:
                assert self.disk is not None
                self.disk.save(effect.blocks)  # type: ignore[attr-defined]
            elif isinstance(effect, fx.Commit):
                self.committer.submit(effect)
            elif isinstance(effect, fx.Note):
                self.note(effect.text, effect.alarm)
            elif isinstance(effect, fx.Connect):
                self.transport.set_peers(effect.peers)
            elif isinstance(effect, fx.ReplicaDone | fx.OfferDone | fx.VectorDone | fx.ExistsDone):
                self._reply(effect.op, effect)
            else:
                raise AssertionError(f"effect {type(effect).__name__} belongs to a read and reached the wrong thread")

    def _reply(self, op: int, effect: fx.Effect) -> None:
        reply = self._waiting.get(op)
        if reply is not None:
            if not isinstance(effect, fx.Fill):
                del self._waiting[op]
            reply(effect)

    def _gated(self, done: fx.PutDone) -> fx.PutDone:
        """The gate's second look, as late as it can be: the lease may have ended since the store."""
        if done.gate_ns and self.now_ns() >= done.gate_ns:
            late = [
                outcome._replace(status=PutStatus.UNKNOWN) if outcome.status is PutStatus.STORED else outcome
                for outcome in done.outcomes
            ]
            return fx.PutDone(done.op, late, 0, done.authorities)
        return done

    # -- reads: on the thread that asks --------------------------------------------------------------------------

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
    ) -> Answer:
        """Infos and slots of up to 128 internal keys; each returned slot carries a reference that the caller owns.
        `floors` (one per key, or none), `if_newer` and `relayed` as in event Get."""
        op = self.op()
        # The core may end an overdue read in another thread's step, so the end is waited for like a put's.
        ended: queue.SimpleQueue[fx.Effect] = queue.SimpleQueue()
        self._waiting[op] = ended.put
        get = ev.Get(self.now_ns(), op, keys, deadline_ns, session, local_only, verify)
        if floors or relayed:
            get.floors, get.if_newer, get.relayed = list(floors), if_newer, relayed
        effects = self.step(get)
        first = effects[0]
        if len(effects) == 1 and type(first) is fx.GetDone:  # everything was here: the case that has to be fast
            del self._waiting[op]
            return first.infos, first.slots
        return self._drive_read(self._reading(op, effects), ended)

    def reading(
        self,
        ended: Reply,
        keys: list[bytes],
        deadline_ns: int,
        *,
        session: bool,
        local_only: bool,
        verify: bool,
        floors: Sequence[Version] = (),
        if_newer: bool = False,
        relayed: bool = False,
    ) -> Reading:
        """`read` as a dialogue. `ended` is called if the read is ended by a step of somebody else; that effect is then
        what the dialogue wants when it yields None."""
        op = self.op()
        self._waiting[op] = ended
        get = ev.Get(self.now_ns(), op, keys, deadline_ns, session, local_only, verify, list(floors), if_newer, relayed)
        return (yield from self._reading(op, self.step(get)))

    def _reading(self, op: int, effects: list[fx.Effect]) -> Reading:
        """The dialogue, from the effects of its first step on."""
        while True:
            fetches: list[fx.Fetch] = []
            following: list[fx.Effect] = []
            for effect in effects:
                if isinstance(effect, fx.GetDone) and effect.op == op:
                    del self._waiting[op]
                    return effect.infos, effect.slots
                if isinstance(effect, fx.Verify):
                    bad: list[int] = yield effect
                    following += self.step(ev.Verified(self.now_ns(), op, bad))
                elif isinstance(effect, fx.Load):
                    loaded: Loading = yield effect
                    following += self._loaded(effect, loaded)
                elif isinstance(effect, fx.Fetch):
                    fetches.append(effect)
                else:
                    self.perform([effect])
            if fetches:
                outcomes: list[FetchOutcome] = yield fetches
                for fetch, outcome in zip(fetches, outcomes, strict=True):
                    following += self._fetched(fetch, outcome)
            if not following:
                done = yield None
                assert isinstance(done, fx.GetDone)
                return done.infos, done.slots
            effects = following

    def _drive_read(self, dialogue: Reading, ended: queue.SimpleQueue[fx.Effect]) -> Answer:
        """Does on this thread what a read asks for."""
        try:
            wants = next(dialogue)
            while True:
                if isinstance(wants, fx.Verify):
                    wants = dialogue.send(self.bad_copies(wants))
                elif isinstance(wants, fx.Load):
                    wants = dialogue.send(self.load(wants))
                elif wants is None:
                    wants = dialogue.send(ended.get(timeout=READ_LOST_S))
                else:
                    wants = dialogue.send(self._fetch_all(wants))
        except StopIteration as end:
            answer: Answer = end.value
            return answer

    def bad_copies(self, verify: fx.Verify) -> list[int]:
        """Indices of the blocks whose bytes are not what their checksums say."""
        view = self.tier.view
        return [
            index
            for index, slot, expected in zip(verify.indices, verify.slots, verify.checksums, strict=True)
            if checksum(view(slot)) != expected
        ]

    def load(self, load: fx.Load) -> Loading:
        """Reads from this node's own disk what is there and wanted."""
        assert self.disk is not None
        outcome: Loading = []
        wanted: list[int] = []
        for index, found in enumerate(self.disk.find(load.keys)):
            reason = judge(found, load.floors[index], load.wall_ms, if_newer=load.if_newer)
            outcome.append((reason, found, None))
            if reason is MissReason.NONE:
                wanted.append(index)
        if not wanted:
            return outcome
        slots = self.place([_length(outcome[index]) for index in wanted])
        jobs = [(index, slot) for index, slot in zip(wanted, slots, strict=True) if slot is not None]
        for index in set(wanted) - {index for index, _ in jobs}:
            outcome[index] = (MissReason.EVICTED, outcome[index][1], None)  # no room to read it into
        keys = [load.keys[index] for index, _ in jobs]
        sought = [found for index, _ in jobs if (found := outcome[index][1]) is not None]
        reasons = self.disk.load(
            keys, sought, [slot for _, slot in jobs], load.deadline_ns, lambda slot: self.unref([slot])
        )
        spoilt: list[Slot] = []
        for (index, slot), reason in zip(jobs, reasons, strict=True):
            hit = reason is MissReason.NONE
            outcome[index] = (reason, outcome[index][1], slot if hit else None)
            if not hit and reason is not MissReason.DEADLINE:
                spoilt.append(slot)
        self.unref(spoilt)
        return outcome

    def _loaded(self, load: fx.Load, outcome: Loading) -> list[fx.Effect]:
        infos: list[BlockInfo] = []
        for reason, found, slot in outcome:
            version, digest = (found.version, found.checksum) if found is not None else (NO_VERSION, b"")
            length, offset = (slot.length, slot.offset) if slot is not None else (0, 0)
            infos.append(BlockInfo(int(reason), version, length, digest, offset))
        slots = [slot for _, _, slot in outcome]
        expiry_ms = [found.expiry_ms if found is not None else 0 for _, found, _ in outcome]
        depth = [found.depth if found is not None else 0 for _, found, _ in outcome]
        return self.step(ev.Loaded(self.now_ns(), load.op, load.indices, infos, slots, expiry_ms, depth))

    def _fetch_all(self, fetches: list[fx.Fetch]) -> list[FetchOutcome]:
        """All peers are asked at the same time."""
        start = self.fetcher.start
        started = [start(f.peer, f.keys, f.session, f.deadline_ns, f.floors, f.if_newer, f.relay) for f in fetches]
        return self.fetcher.finish_all(started, self.place)

    def _fetched(self, fetch: fx.Fetch, outcome: FetchOutcome) -> list[fx.Effect]:
        """One peer's answer goes in; room that was reserved for what did not come is given back."""
        infos, reserved, elapsed_ns = outcome
        self.unref([slot for info, slot in zip(infos, reserved, strict=True) if info.reason and slot is not None])
        slots = [None if info.reason else slot for info, slot in zip(infos, reserved, strict=True)]
        return self.step(ev.Fetched(self.now_ns(), fetch.op, fetch.peer, fetch.indices, infos, slots, elapsed_ns))

    def place(self, lengths: Sequence[int]) -> list[Slot | None]:
        """Room for bytes that a peer is about to send, one slot per length; None where there is none."""
        effects = self.step(ev.Reserve(self.now_ns(), list(lengths)))
        reserved = next(effect for effect in effects if isinstance(effect, fx.Reserved))
        self.perform([effect for effect in effects if effect is not reserved])
        return reserved.slots

    def exists(self, keys: list[bytes], deadline_ns: int, *, local_only: bool) -> list[int]:
        """MissReason numbers, NONE where the key is present here or at the best other source; changes nothing."""
        op = self.op()
        effects = self.step(ev.Exists(self.now_ns(), op, keys))
        done = next(effect for effect in effects if isinstance(effect, fx.ExistsDone))
        self.perform([effect for effect in effects if effect is not done])
        if self.disk is not None and done.on_disk:
            indices = list(done.on_disk)
            for index, found in zip(indices, self.disk.find([keys[index] for index in indices]), strict=True):
                if judge(found, done.on_disk[index], done.wall_ms) is MissReason.NONE:
                    done.reasons[index] = int(MissReason.NONE)
        if local_only:
            return done.reasons
        for peer, indices in done.ask.items():
            answers = self.fetcher.exists(peer, [keys[index] for index in indices], deadline_ns)
            for index, reason in zip(indices, answers, strict=True):
                if reason != MissReason.ABSENT:
                    done.reasons[index] = reason
        return done.reasons

    # -- writes: begun by a connection's thread, ended by any ----------------------------------------------------

    def put(
        self,
        keys: list[bytes],
        items: list[PutItem],
        fill: Callable[[list[Slot | None]], list[bytes | None]],
        done: Callable[[PutReply], None],
        *,
        deadline_ns: int,
        session: bool,
        fresh: bool,
        min_copies: int,
        from_peer: str = "",
        delete: bool = False,
        strong: bool = False,
        relay: bool = False,
    ) -> None:
        """Runs a put up to the point where it waits for others; `done` is called once, by any thread.

        `fill` reads the bytes into slots and returns their checksums; if it raises, the put is aborted and nothing is
        stored.
        """
        event = ev.PutBegin(
            self.now_ns(),
            self.op(),
            keys,
            items,
            deadline_ns,
            session,
            fresh,
            min_copies,
            from_peer,
            delete,
            strong,
            relay,
        )
        _drive(self.putting(event, done), fill)

    def putting(self, begin: ev.PutBegin, done: Callable[[PutReply], None]) -> Filling[None]:
        """`put` as a dialogue; `begin.op` comes from `op()`."""
        op = begin.op
        fills: list[list[Slot | None]] = []

        def reply(effect: fx.Effect) -> None:
            if isinstance(effect, fx.Fill):
                fills.append(effect.slots)
            elif isinstance(effect, fx.PutDone):
                done(PutReply(effect.outcomes, effect.authorities))

        self._waiting[op] = reply
        self.handle(begin)
        if not fills:
            return
        try:
            checksums = yield fills[0]
        except GeneratorExit:
            raise  # dropped with its whole process: there is nobody left to tell
        except BaseException:
            self._waiting.pop(op, None)
            self.handle(ev.PutAborted(self.now_ns(), op))
            raise
        self.handle(ev.PutFilled(self.now_ns(), op, checksums))

    def replicate(
        self,
        peer: str,
        items: list[ReplicaItem],
        is_fill: bool,
        fill: Callable[[list[Slot | None]], list[bytes | None]],
        *,
        surplus: bool = False,
    ) -> ReplicateReply:
        """Takes one stream message in; the answer is known at once."""
        return _drive(self.replicating(peer, items, is_fill, surplus=surplus), fill)

    def replicating(
        self, peer: str, items: list[ReplicaItem], is_fill: bool, *, surplus: bool = False
    ) -> Filling[ReplicateReply]:
        """`replicate` as a dialogue."""
        op = self.op()
        effects = self.step(ev.ReplicaBegin(self.now_ns(), op, peer, items, is_fill, surplus))
        begun = next(effect for effect in effects if isinstance(effect, fx.Fill))
        self.perform([effect for effect in effects if effect is not begun])
        try:
            checksums = yield begun.slots
        except GeneratorExit:
            raise  # as in putting
        except BaseException:
            # The connection broke in the middle: items without bytes are not stored, their room is given back.
            self._replicated(op, [None] * len(items))
            raise
        return self._replicated(op, checksums)

    def _replicated(self, op: int, checksums: list[bytes | None]) -> ReplicateReply:
        effects = self.step(ev.ReplicaFilled(self.now_ns(), op, checksums))
        done = next(effect for effect in effects if isinstance(effect, fx.ReplicaDone))
        self.perform([effect for effect in effects if effect is not done])
        return done.reply

    def offer(self, event: ev.OfferArrived) -> OfferReply:
        """Takes one page of heads in; the answer is known at once."""
        effects = self.step(event)
        done = next(effect for effect in effects if isinstance(effect, fx.OfferDone))
        self.perform([effect for effect in effects if effect is not done])
        return done.reply

    def vector(self, event: ev.VectorArrived) -> VectorReply:
        """Compares applied vectors with a primary's; the answer is known at once."""
        effects = self.step(event)
        done = next(effect for effect in effects if isinstance(effect, fx.VectorDone))
        self.perform([effect for effect in effects if effect is not done])
        return done.reply

    def cluster_map(self) -> MapReply:
        """What clients need to route."""
        with self.lock:
            return self.core.state.view.cluster_map()


def judge(found: Found | None, floor: Version, wall_ms: int, *, if_newer: bool = False) -> MissReason:
    """Is what the disk holds of a key wanted? NONE: yes; CURRENT: the asker has it already."""
    if found is None:
        return MissReason.ABSENT
    if found.version < floor:
        return MissReason.BEHIND
    if found.expiry_ms and found.expiry_ms <= wall_ms:
        return MissReason.ABSENT
    return MissReason.CURRENT if if_newer and found.version == floor else MissReason.NONE


def _length(loading: tuple[MissReason, Found | None, Slot | None]) -> int:
    found = loading[1]
    return found.length if found is not None else 0


def _drive(dialogue: Filling[T], fill: Callable[[list[Slot | None]], list[bytes | None]]) -> T:
    """Brings the bytes of a write in on this thread."""
    try:
        slots = next(dialogue)
        try:
            checksums = fill(slots)
        except BaseException as error:
            dialogue.throw(error)
            raise
        dialogue.send(checksums)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a write that has its bytes asked for more")
