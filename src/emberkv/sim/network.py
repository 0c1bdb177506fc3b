"""What lies between the nodes: links that fail one way, in-order streams over them, reads on connections of their own.

    Stream:  DIALLING --handshake: PeerUp--> UP --bytes stuck for tcp_timeout, peer gone: PeerDown--> gone, dialled anew
    Reading: ASKED --answer, or its deadline--> ENDED; what arrives later is dropped and told ('late-bytes')

Laws: a stream is TCP: what it delivers is in order and once, and what it had not delivered when it broke may be lost
from its end. Payload is copied when it is delivered, not when it is sent: a slot that is reused early shows as wrong
bytes. A cut link loses reads and stalls streams; a clogged one stalls both. Reads may be lost, doubled and reordered.
Limits: no bandwidth; one message takes one delay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.messages import BlockInfo, Message, OfferReply, PutReply, ReplicateReply, VectorReply
from emberkv.ports import Slot
from emberkv.sim.engine import MS, Engine, Options
from emberkv.types import MissReason, checksum

if TYPE_CHECKING:
    from emberkv.node.runtime import FetchOutcome
    from emberkv.sim.process import Process

CONNECT_TIMEOUT_MS = 300.0
"""A handshake that is not answered is tried anew."""
BACK_OFF_MS = (20.0, 80.0)
"""Pause before a stream is dialled again."""
STALL_SHARE = 0.15
"""Share of answers to reads whose bytes stop half-way for a while."""
KEPT_AFTER_LOSS = 0.5
"""Share of broken streams whose receiver still finds what had been delivered before the end."""

ANSWERS: dict[type, Any] = {
    PutReply: ev.PutAnswered,
    ReplicateReply: ev.ReplicateAnswered,
    OfferReply: ev.OfferAnswered,
    VectorReply: ev.VectorAnswered,
}


class Link:
    """One direction from a host to another. Faults count, because they overlap."""

    __slots__ = ("clogged", "cut", "slower", "waiting")

    def __init__(self) -> None:
        self.cut = 0
        self.clogged = 0
        self.slower = 1.0
        self.waiting: list[Callable[[], None]] = []

    @property
    def blocked(self) -> bool:
        """Does nothing get through now?"""
        return self.cut > 0 or self.clogged > 0


class Item:
    """One message on a stream. `data`: its bytes, where they no longer lie with the sender."""

    __slots__ = ("data", "message", "on_sent", "payload", "request")

    def __init__(
        self, request: int, message: Message, payload: Sequence[memoryview], on_sent: Callable[[], None]
    ) -> None:
        self.request = request
        self.message = message
        self.payload = payload
        self.on_sent = on_sent
        self.data: list[bytes] | None = None

    def copied(self) -> list[bytes]:
        """The bytes as they are now."""
        return self.data if self.data is not None else [bytes(view) for view in self.payload]


class Network:
    """All links, streams and reads under way."""

    def __init__(self, engine: Engine, options: Options) -> None:
        self.engine = engine
        self.options = options
        self.links: dict[tuple[str, str], Link] = {}
        self.streams: dict[tuple[str, str], Stream] = {}
        self.late: Callable[[Process, str], None] = lambda process, text: None
        self.processes: dict[str, Process] = {}

    def link(self, source: str, target: str) -> Link:
        """The direction from source to target."""
        found = self.links.get((source, target))
        if found is None:
            found = self.links[(source, target)] = Link()
        return found

    def delay_ns(self, link: Link) -> int:
        """How long one message takes."""
        low, high = self.options.delay_ms
        return int((low + (high - low) * self.engine.rng.random()) * MS * link.slower)

    def freed(self, link: Link) -> None:
        """A fault of the link has ended: what waited goes on, if nothing else holds it."""
        if link.blocked:
            return
        waiting, link.waiting = link.waiting, []
        for action in waiting:
            self.engine.after(self.delay_ns(link), action)

    # -- streams -------------------------------------------------------------------------------------------------

    def set_peers(self, source: Process, peers: dict[str, str]) -> None:
        """Keeps one stream to each of them, and to nobody else."""
        source.peers = dict(peers)
        for name in [target for origin, target in self.streams if origin == source.name and target not in peers]:
            self.streams[(source.name, name)].break_()
        for name in peers:
            self.dial(source, name, source.lives)

    def dial(self, source: Process, peer: str, life: int) -> None:
        """Opens a stream, or tries again later."""
        if not source.alive or source.lives != life or peer not in source.peers or (source.name, peer) in self.streams:
            return
        target = self.processes[peer]
        there, back = self.link(source.name, peer), self.link(peer, source.name)
        if not target.alive or there.blocked or back.blocked:
            self.engine.after(self.engine.between_ns(*BACK_OFF_MS), self.dial, source, peer, life)
            return
        Stream(self, source, target).dial()

    def gone(self, process: Process, *, silent: bool) -> None:
        """A process died. Silent: its host too, so that peers hear nothing and find out by waiting."""
        for stream in list(self.streams.values()):
            if stream.source is process:
                stream.orphaned()
            elif stream.target is process:
                wait_ms = self.options.tcp_timeout_ms if silent else 0.0
                self.engine.after(wait_ms * MS + self.delay_ns(stream.there), stream.break_)


class Stream:
    """One in-order connection between two lives, dialled by `source`."""

    def __init__(self, network: Network, source: Process, target: Process) -> None:
        self.network, self.engine = network, network.engine
        self.source, self.target = source, target
        self.lives = (source.lives, target.lives)
        self.lane = f"to {target.name}"
        """At the source: the end of a connection is told before the beginning of the next, as by one thread a peer."""
        self.there = network.link(source.name, target.name)
        self.back = network.link(target.name, source.name)
        self.open, self.up, self.full, self.orphan, self.doomed = True, False, False, False, False
        self.out: deque[Item] = deque()
        self.answers: deque[tuple[int, Message]] = deque()
        self.received: deque[tuple[Item, list[bytes]]] = deque()
        self.busy = False
        self._out_due = self._back_due = 0
        network.streams[(source.name, target.name)] = self

    # -- life ----------------------------------------------------------------------------------------------------

    def dial(self) -> None:
        """HELLO, WELCOME, up; or a timeout."""
        self.engine.after(CONNECT_TIMEOUT_MS * MS, self._dial_timed_out)
        self.engine.after(self.network.delay_ns(self.there), self._hello)

    def _dial_timed_out(self) -> None:
        if not self.up:
            self.break_()

    def _hello(self) -> None:
        if not self.there.blocked:
            self.target.run(self.lives[1], self, self._welcome)

    def _welcome(self) -> None:
        self.engine.after(self.network.delay_ns(self.back), self._established)

    def _established(self) -> None:
        if self.open and not self.back.blocked:
            self.source.run(self.lives[0], self.lane, self._peer_up)

    def _peer_up(self) -> None:
        if self.open and not self.up:
            self.up = True
            self.source.handle(ev.PeerUp(self.source.clock.now_ns(), self.target.name))

    def break_(self) -> None:
        """Both ends find the connection gone; the source dials anew."""
        if not self.open:
            return
        self.open = False
        self.network.streams.pop((self.source.name, self.target.name), None)
        if self.engine.rng.random() >= KEPT_AFTER_LOSS:
            self.received.clear()
        life = self.lives[0]
        if self.source.alive and self.source.lives == life:
            self.engine.after(0, self.source.run, life, self.lane, self._peer_down)

    def _peer_down(self) -> None:
        source = self.source
        out, self.out = self.out, deque()
        for item in out:
            item.on_sent()
        if self.up:
            source.handle(ev.PeerDown(source.clock.now_ns(), self.target.name))
        pause = self.engine.between_ns(*BACK_OFF_MS)
        self.engine.after(pause, self.network.dial, source, self.target.name, source.lives)

    def orphaned(self) -> None:
        """The source died: of what it had sent, some is on its way, from the beginning on."""
        self.open, self.orphan = False, True
        self.network.streams.pop((self.source.name, self.target.name), None)
        for _ in range(self.engine.rng.randrange(len(self.out) + 1), len(self.out)):
            self.out.pop()
        for item in self.out:
            item.data = item.copied()

    def _doom(self) -> None:
        """Bytes do not get through: the connection ends unless they do in time."""
        if not self.doomed:
            self.doomed = True
            self.engine.after(self.network.options.tcp_timeout_ms * MS, self._doomed)

    def _doomed(self) -> None:
        self.doomed = False
        stuck = (self.there.blocked and self.out) or (self.back.blocked and self.answers)
        if stuck or not self._target_lives():
            self.break_()

    def _target_lives(self) -> bool:
        return self.target.alive and self.target.lives == self.lives[1]

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, item: Item) -> None:
        """From source to target, in order."""
        self.out.append(item)
        self._out_due = max(self._out_due, self.engine.now + self.network.delay_ns(self.there))
        self.engine.after(self._out_due - self.engine.now, self._deliver)

    def _deliver(self) -> None:
        if not self.out or not (self.open or self.orphan):
            return
        if not self.orphan and self.source.paused:
            self.source.run(self.lives[0], self.lane, self._deliver)  # it had not come to hand the bytes over yet
            return
        if self.there.blocked:
            self.there.waiting.append(self._deliver)
            self._doom()
            return
        item = self.out.popleft()
        data = item.copied()
        if not self.orphan:
            item.on_sent()
        if self._target_lives():
            self.target.run(self.lives[1], self, self._arrived, item, data)
        elif self.target.alive:
            self.engine.after(self.network.delay_ns(self.back), self.break_)  # its host knows no such connection: RST
        else:
            self._doom()

    def _arrived(self, item: Item, data: list[bytes]) -> None:
        self.received.append((item, data))
        if not self.busy:
            self.next()

    def next(self) -> None:
        """The receiver takes one message at a time."""
        self.busy = bool(self.received)
        if self.received:
            item, data = self.received.popleft()
            self.target.receive(self, item.request, item.message, data)

    def answer(self, request: int, reply: Message) -> None:
        """From target to source, in order."""
        if not self.open:
            return
        self.answers.append((request, reply))
        self._back_due = max(self._back_due, self.engine.now + self.network.delay_ns(self.back))
        self.engine.after(self._back_due - self.engine.now, self._bring_back)

    def _bring_back(self) -> None:
        if not self.open or not self.answers:
            return
        if self.back.blocked:
            self.back.waiting.append(self._bring_back)
            self._doom()
            return
        request, reply = self.answers.popleft()
        self.source.run(self.lives[0], self.lane, self._answered, request, reply)

    def _answered(self, request: int, reply: Message) -> None:
        if self.open:
            event = ANSWERS[type(reply)]
            self.source.handle(event(self.source.clock.now_ns(), self.target.name, request, reply))


class Transport:
    """The Transport port of one life."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    def send(
        self, peer: str, request: int, message: Message, payload: Sequence[memoryview], on_sent: Callable[[], None]
    ) -> bool:
        """As ports.Transport."""
        stream = self._network.streams.get((self._process.name, peer))
        if stream is None or not stream.up or stream.full:
            return False
        if len(stream.out) >= self._network.options.queue_max:
            # A gap in an in-order stream is a loss: the connection goes down, as net/peers.py does it.
            stream.full = True
            self._network.engine.after(0, stream.break_)
            return False
        self._process.sending(peer, message)
        stream.send(Item(request, message, payload, on_sent))
        return True

    def set_peers(self, peers: dict[str, str]) -> None:
        """As ports.Transport."""
        self._network.set_peers(self._process, peers)

    def close(self) -> None:
        """Connections end with their process."""


class Reading:
    """One effect Fetch: asks a peer, takes in what arrives by the deadline."""

    def __init__(self, network: Network, asker: Process, fetch: fx.Fetch, done: Callable[[FetchOutcome], None]) -> None:
        self.network, self.engine = network, network.engine
        self.asker, self.fetch, self.done = asker, fetch, done
        self.life = asker.lives
        self.peer = network.processes[fetch.peer]
        self.there = network.link(asker.name, fetch.peer)
        self.back = network.link(fetch.peer, asker.name)
        self.begun_ns = asker.clock.now_ns()
        self.ended = False
        self.answered = False
        count = len(fetch.keys)
        self.infos = [BlockInfo(int(MissReason.DEADLINE))] * count
        self.slots: list[Slot | None] = [None] * count

    def start(self) -> None:
        """Sends the request; whatever happens, the read ends by its deadline."""
        engine, rng, options = self.engine, self.engine.rng, self.network.options
        wait_ns = self.asker.clock.until_ns(self.fetch.deadline_ns)
        engine.after(wait_ns, self.asker.run, self.life, self, self._timed_out)
        if not self.peer.alive and not self.there.blocked:
            engine.after(self.network.delay_ns(self.there), self.asker.run, self.life, self, self._unreachable)
            return
        for _ in range(2 if rng.random() < options.twice_share else 1):
            if not self.there.cut and rng.random() >= options.lost_fetch_share:
                engine.after(self.network.delay_ns(self.there), self._ask, self.peer.lives)

    def _end(self) -> None:
        self.ended = True
        self.done((self.infos, self.slots, self.asker.clock.now_ns() - self.begun_ns))

    def _timed_out(self) -> None:
        if not self.ended:
            self._end()

    def _unreachable(self) -> None:
        if not self.ended:
            self.infos = [BlockInfo(int(MissReason.UNREACHABLE))] * len(self.infos)
            self._end()

    def _ask(self, peer_life: int) -> None:
        if self.there.blocked:
            self.there.waiting.append(lambda: self._ask(peer_life))
            return
        self.peer.run(peer_life, self, self._serve)

    def _serve(self) -> None:
        fetch, peer = self.fetch, self.peer
        left_ns = max(fetch.deadline_ns - self.begun_ns, MS)
        peer.read(
            fetch.keys,
            peer.clock.now_ns() + left_ns,
            session=fetch.session,
            local_only=not fetch.relay,
            verify=False,
            floors=fetch.floors,
            if_newer=fetch.if_newer,
            relayed=fetch.relay,
            done=self._served,
        )

    def _served(self, infos: list[BlockInfo], slots: list[Slot | None]) -> None:
        peer = self.peer
        held = [slot for slot in slots if slot is not None]
        data = [peer.tier.read(slot) if slot is not None else None for slot in slots]
        self.engine.after(self.engine.between_ns(0, 0.2), peer.run, peer.lives, self, peer.unref, held)
        if not self.back.cut and self.engine.rng.random() >= self.network.options.lost_fetch_share:
            self.engine.after(self.network.delay_ns(self.back), self._bring_back, infos, data)

    def _bring_back(self, infos: list[BlockInfo], data: list[bytes | None]) -> None:
        if self.back.blocked:
            self.back.waiting.append(lambda: self._bring_back(infos, data))
            return
        self.asker.run(self.life, self, self._arrived, infos, data)

    def _arrived(self, infos: list[BlockInfo], data: list[bytes | None]) -> None:
        """The head of the answer is here; its bytes follow, at once or after a stall."""
        if self.ended or self.answered:
            if any(data):
                self.network.late(self.asker, f"{self.peer.name}'s answer to a read that had its answer or its end")
            return
        self.answered = True
        for index, (info, payload) in enumerate(zip(infos, data, strict=True)):
            if payload is None:
                self.infos[index] = info
            elif self.slots[index] is None:
                self.slots[index] = self.asker.runtime.place([len(payload)])[0]
        rng = self.engine.rng
        count = len(infos)
        whole = rng.randrange(count) if rng.random() < STALL_SHARE else count
        self._take(infos, data, 0, whole)
        if whole == count:
            self._end()
        else:
            pause = self.engine.between_ns(0, 60)
            self.engine.after(pause, self.asker.run, self.life, self, self._rest, infos, data, whole)

    def _rest(self, infos: list[BlockInfo], data: list[bytes | None], begin: int) -> None:
        if self.ended:
            self.network.late(self.asker, f"the rest of {self.peer.name}'s answer to a read that had ended")
            return
        self._take(infos, data, begin, len(infos))
        self._end()

    def _take(self, infos: list[BlockInfo], data: list[bytes | None], begin: int, end: int) -> None:
        """Bytes into slots, each block checked when it is whole."""
        for index in range(begin, end):
            info, payload, slot = infos[index], data[index], self.slots[index]
            if payload is None:
                continue
            if slot is None:
                self.infos[index] = BlockInfo(int(MissReason.QUOTA))
                continue
            self.asker.tier.write(slot, payload)
            good = checksum(payload) == info.checksum
            self.infos[index] = info if good else BlockInfo(int(MissReason.CHECKSUM), info.version)
