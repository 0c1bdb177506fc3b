"""What a world's nodes send each other: stream connections in order, reads from peers, delays, cuts and lost bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.messages import (
    BlockInfo,
    Offer,
    OfferReply,
    PutFlag,
    PutReply,
    PutRequest,
    Replicate,
    ReplicateReply,
    Vector,
    VectorReply,
)
from emberkv.ports import Slot
from emberkv.types import Level, MissReason, PutStatus, checksum
from harness.node import MS, Connection, Node


class Network:
    """The part of a world that delivers messages; time and processes are the world's."""

    now: int
    rng: random.Random
    nodes: dict[str, Node]
    cuts: set[tuple[str, str]]
    connections: dict[tuple[str, str], Connection]
    answers: list[Callable[[Node, Node, Any, Any], None]]
    after: Callable[[int, Callable[[], None]], None]
    delay: Callable[[], int]
    op: Callable[[], int]

    # -- network -------------------------------------------------------------------------------------------------

    def reaches(self, left: str, right: str) -> bool:
        return (left, right) not in self.cuts and self.nodes[left].alive and self.nodes[right].alive

    def cut(self, left: str, right: str) -> None:
        self.cuts |= {(left, right), (right, left)}
        for connection in list(self.connections.values()):
            if {connection.source.name, connection.target.name} == {left, right}:
                self._break(connection)

    def connect(self, node: Node, peers: dict[str, str]) -> None:
        node.peers = dict(peers)
        for connection in list(self.connections.values()):
            if connection.source is node and connection.target.name not in peers:
                self._break(connection)
        for peer in peers:
            self._dial(node, peer, node.lives)

    def _dial(self, node: Node, peer: str, life: int) -> None:
        if not node.alive or node.lives != life or peer not in node.peers or (node.name, peer) in self.connections:
            return
        if not self.reaches(node.name, peer):
            self.after(20 * MS, lambda: self._dial(node, peer, life))
            return
        connection = self.connections[(node.name, peer)] = Connection(node, self.nodes[peer])

        def up() -> None:
            if connection.open:
                node.step(ev.PeerUp(self.now, peer))

        self.after(self.delay(), lambda: node.run(life, up))

    def _break(self, connection: Connection) -> None:
        if not connection.open:
            return
        connection.open = False
        node, peer, life = connection.source, connection.target.name, connection.source.lives
        self.connections.pop((node.name, peer), None)
        if node.alive:
            node.run(life, lambda: node.step(ev.PeerDown(self.now, peer)))
            self.after(20 * MS, lambda: self._dial(node, peer, life))

    def send(self, node: Node, send: fx.Send) -> None:
        """Payload stays by reference until it is delivered or the connection is lost."""
        connection = self.connections.get((node.name, send.peer))
        life = node.lives

        def give_back() -> None:
            node.run(life, lambda: node.unref(send.slots))

        if connection is None or not connection.open:
            self.after(0, give_back)
            return
        due = max(connection.busy_until, self.now + self.delay())
        connection.busy_until = due + 1000

        def deliver() -> None:
            if not connection.open:
                give_back()
                return
            data = [node.tier.read(slot) for slot in send.slots]
            give_back()
            target = connection.target
            target.run(connection.lives[1], lambda: self._receive(connection, send, data))

        self.after(due - self.now, deliver)

    def _receive(self, connection: Connection, send: fx.Send, data: list[bytes]) -> None:
        target, peer, message = connection.target, connection.source.name, send.message
        op = self.op()

        def answer(reply: PutReply | ReplicateReply | OfferReply | VectorReply) -> None:
            for told in self.answers:
                told(target, connection.source, message, reply)
            self._answer(connection, send.request, reply)

        if isinstance(message, Offer):
            target.waiting[op] = lambda effect: answer(effect.reply)  # type: ignore[attr-defined]
            target.step(ev.OfferArrived(self.now, op, peer, message))
        elif isinstance(message, Vector):
            target.waiting[op] = lambda effect: answer(effect.reply)  # type: ignore[attr-defined]
            target.step(ev.VectorArrived(self.now, op, peer, message))
        elif isinstance(message, Replicate):
            stated = [item.length if item.payload and item.state != 3 else None for item in message.items]
            sums = [item.checksum for item in message.items]

            def replicated(effect: fx.Effect) -> None:
                if isinstance(effect, fx.Fill):
                    self._fill(
                        connection, effect, stated, sums, data,
                        lambda checks: target.step(ev.ReplicaFilled(self.now, op, checks)),
                    )  # fmt: skip
                elif isinstance(effect, fx.ReplicaDone):
                    answer(effect.reply)

            target.waiting[op] = replicated
            target.step(ev.ReplicaBegin(self.now, op, peer, message.items, message.fill, message.surplus))
        elif isinstance(message, PutRequest):
            self._receive_put(connection, op, message, data, answer)

    def _receive_put(
        self,
        connection: Connection,
        op: int,
        message: PutRequest,
        data: list[bytes],
        answer: Callable[[PutReply], None],
    ) -> None:
        target = connection.target
        stated: list[int | None] = [None if message.delete else item.length for item in message.items]
        sums = [item.checksum for item in message.items]

        def put(effect: fx.Effect) -> None:
            if isinstance(effect, fx.Fill):
                self._fill(
                    connection, effect, stated, sums, data,
                    lambda checks: target.step(ev.PutFilled(self.now, op, checks)),
                )  # fmt: skip
            elif isinstance(effect, fx.PutDone):
                answer(PutReply(self.gated(effect), effect.authorities))

        target.waiting[op] = put
        target.step(
            ev.PutBegin(
                self.now,
                op,
                [message.scope + item.key for item in message.items],
                message.items,
                self.now + message.deadline_ms * MS,
                message.level == Level.SESSION,
                bool(message.flags & PutFlag.FRESH),
                message.min_copies,
                connection.source.name,
                delete=message.delete,
                relay=bool(message.flags & PutFlag.RELAY),
            )
        )

    def _fill(
        self,
        connection: Connection,
        fill: fx.Fill,
        stated: list[int | None],
        sums: list[bytes],
        data: list[bytes],
        filled: Callable[[list[bytes | None]], None],
    ) -> None:
        """Bytes of a frame go into the slots a moment later; a connection that is lost meanwhile gives none."""
        target = connection.target

        def act() -> None:
            checks: list[bytes | None] = []
            rest = iter(data)
            whole = connection.open or self.rng.random() < 0.5
            for length, expected, slot in zip(stated, sums, fill.slots, strict=True):
                payload = next(rest) if length is not None else None
                if payload is None or slot is None or not whole:
                    checks.append(None)
                    continue
                assert slot.length == len(payload) == length
                target.tier.write(slot, payload)
                found = checksum(payload)
                checks.append(found if found == expected else None)
            assert next(rest, None) is None, "payload and items differ in number"
            target.give_back(fill.slots)
            filled(checks)

        delay = self.rng.randrange(0, MS // 2)
        connection.busy_until = max(connection.busy_until, self.now + delay)
        self.after(delay, lambda: target.run(connection.lives[1], act))

    def _answer(
        self, connection: Connection, request: int, reply: PutReply | ReplicateReply | OfferReply | VectorReply
    ) -> None:
        if not connection.open:
            return
        source, peer = connection.source, connection.target.name
        kinds = {
            PutReply: ev.PutAnswered,
            ReplicateReply: ev.ReplicateAnswered,
            OfferReply: ev.OfferAnswered,
            VectorReply: ev.VectorAnswered,
        }
        due = connection.back_until = max(connection.back_until + 1, self.now + self.delay())

        def arrive() -> None:
            if connection.open:
                source.step(kinds[type(reply)](self.now, peer, request, reply))  # type: ignore[arg-type]

        self.after(due - self.now, lambda: source.run(connection.lives[0], arrive))

    def gated(self, done: fx.PutDone) -> list[Any]:
        if done.gate_ns and self.now >= done.gate_ns:
            unknown = PutStatus.UNKNOWN
            return [o._replace(status=unknown) if o.status is PutStatus.STORED else o for o in done.outcomes]
        return done.outcomes

    # -- reads from peers ----------------------------------------------------------------------------------------

    def fetch(self, node: Node, fetch: fx.Fetch) -> None:
        """Every fetch ends by its deadline with infos for all keys; late bytes are dropped."""
        sent, life, state = self.now, node.lives, {"ended": False}

        def end(infos: list[BlockInfo], slots: list[Slot | None]) -> None:
            state["ended"] = True
            node.give_back(slots)
            node.step(ev.Fetched(self.now, fetch.op, fetch.peer, fetch.indices, infos, slots, self.now - sent))

        def fail(reason: MissReason) -> None:
            if not state["ended"]:
                end([BlockInfo(int(reason))] * len(fetch.keys), [None] * len(fetch.keys))

        self.after(max(fetch.deadline_ns - self.now, 0), lambda: node.run(life, lambda: fail(MissReason.DEADLINE)))
        if not self.reaches(node.name, fetch.peer):
            node.soon(lambda: fail(MissReason.UNREACHABLE))
            return
        peer = self.nodes[fetch.peer]

        def asked(done: fx.Effect) -> None:
            assert isinstance(done, fx.GetDone)
            held = [slot for slot in done.slots if slot is not None]
            data = [peer.tier.read(slot) if slot is not None else None for slot in done.slots]
            peer.soon(lambda: peer.unref(held))
            if self.reaches(node.name, peer.name):
                self.after(self.delay(), lambda: node.run(life, lambda: arrive(done.infos, data)))

        def arrive(infos: list[BlockInfo], data: list[bytes | None]) -> None:
            if state["ended"]:
                return
            found = list(infos)
            slots: list[Slot | None] = []
            for index, payload in enumerate(data):
                slot = node.reserve([len(payload)])[0] if payload is not None else None
                if payload is not None and slot is None:
                    found[index] = BlockInfo(int(MissReason.QUOTA))
                if payload is not None and slot is not None:
                    node.tier.write(slot, payload)
                    if checksum(payload) != infos[index].checksum:
                        node.unref([slot])
                        slot, found[index] = None, BlockInfo(int(MissReason.CHECKSUM), infos[index].version)
                slots.append(slot)
            end(found, slots)

        def ask() -> None:
            op = self.op()
            peer.waiting[op] = asked
            peer.step(
                ev.Get(
                    self.now, op, fetch.keys, fetch.deadline_ns, fetch.session, local_only=not fetch.relay,
                    floors=fetch.floors, if_newer=fetch.if_newer, relayed=fetch.relay,
                )
            )  # fmt: skip

        peer_life = peer.lives
        self.after(self.delay(), lambda: peer.run(peer_life, ask))
