"""What a node answers on its connections: clients over TCP and the local socket, peers over TCP.

Why it exists: the edge between frames and the runtime.
Laws: tenant and namespace follow from the handshake, never from a field of a request; what the namespace allows is
looked up at each request, and a connection whose namespace is gone is told so and ended. A malformed frame ends its
connection with one logged reason. What a connection owns is given back when it ends, however it ends.
Limits: pins of one connection take at most an eighth of the arena, all pins together half of it. A thread per
connection; one request of a connection is worked on at a time, except that a put that waits for other nodes does not
hold up the requests behind it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from emberkv.core import events as ev
from emberkv.errors import ProtocolError, Unavailable
from emberkv.messages import (
    AdminReply,
    AdminRequest,
    BlockInfo,
    ErrorFrame,
    ExistsReply,
    ExistsRequest,
    GetFlag,
    GetReply,
    GetRequest,
    Hello,
    MapRequest,
    Message,
    Offer,
    OfferReply,
    PutFlag,
    PutReply,
    PutRequest,
    Replicate,
    ReplicateReply,
    Role,
    StatusReply,
    StatusRequest,
    Unpin,
    Vector,
    VectorReply,
    Welcome,
)
from emberkv.net.link import LinkClosed, LinkTimeout, hung_up
from emberkv.net.local_link import LocalLink
from emberkv.net.tcp import HANDSHAKE_TIMEOUT_MS, serve_handshake
from emberkv.net.tcp_link import TcpLink
from emberkv.node.connections import PinnedTotal, Pins, fill_from_link, fill_from_staging
from emberkv.node.namespaces import Namespaces, copies_wanted, put_refusal
from emberkv.node.pids import ProcessWatcher
from emberkv.node.runtime import Runtime
from emberkv.node.strong_edge import StrongEdge
from emberkv.ports import Slot
from emberkv.storage.dram import DramTier
from emberkv.storage.staging import StagingArea
from emberkv.types import SCOPE_BYTES, Level, MissReason, Namespace, PutOutcome, PutStatus, RefuseReason
from emberkv.wire.codec import Header

log = logging.getLogger(__name__)

NO_SCOPE = b""
# Plain numbers: an operation on an IntFlag makes a new member in Python, 1 us each.
LOCAL_ONLY = int(GetFlag.LOCAL_ONLY)
PIN = int(GetFlag.PIN)
IF_NEWER = int(GetFlag.IF_NEWER)
RELAYED_READ = int(GetFlag.RELAY)
FRESH = int(PutFlag.FRESH)
FORWARD = int(PutFlag.FORWARD)
RELAY = int(PutFlag.RELAY)
NEED_NAMESPACE = (GetRequest, PutRequest, ExistsRequest)
OPEN_WAIT_S = 2.0
SEND_TIMEOUT_MS = 2000
"""A client that takes no answer for this long loses its connection, not the node a thread."""


def refuse_abandoned(link: TcpLink | LocalLink) -> None:
    """Raises LinkClosed if the client has hung up. Its request may have lain here while this process was frozen: the
    client has tried elsewhere since, others have built on that, and a first send must not be taken for new now."""
    if hung_up(link.fileno()):
        raise LinkClosed("the client hung up before its request was decided")


class Server:
    """Handlers of one node's connections."""

    def __init__(self, tier: DramTier, namespaces: Namespaces, staging_bytes: int) -> None:
        self.tier = tier
        self.namespaces = namespaces
        self.staging_bytes = staging_bytes
        self.connections = 0
        self.pinned = PinnedTotal(tier.total_bytes // 2)
        self._opened = threading.Event()

    def open(
        self,
        runtime: Runtime,
        status: Callable[[], bytes],
        watcher: ProcessWatcher,
        strong: StrongEdge,
        admin: Callable[[AdminRequest], AdminReply],
    ) -> None:
        """Lets connections in: the listener exists before the runtime, which publishes its address."""
        self.runtime = runtime
        self.status = status
        self.watcher = watcher
        self.strong = strong
        self.admin = admin
        self.factor = runtime.core.state.settings.factor
        self._opened.set()

    def _wait_opened(self) -> None:
        if not self._opened.wait(OPEN_WAIT_S):
            raise Unavailable("this node is still starting")

    # -- TCP -----------------------------------------------------------------------------------------------------

    def serve_tcp(self, link: TcpLink) -> None:
        """A connection over TCP, of any role, until it ends."""
        self._wait_opened()
        session = self.namespaces.session()
        shaken = serve_handshake(link, session.answer)
        if shaken is None:
            return
        hello, welcome = shaken
        link.set_send_timeout_ms(SEND_TIMEOUT_MS)
        scope = self.namespaces.scope(welcome.namespace)
        self.connections += 1
        try:
            while True:
                header, message = link.recv()
                session.check(message)
                policy = self.namespaces.policy(scope)
                if policy is None and hello.role != Role.STREAM and isinstance(message, NEED_NAMESPACE):
                    self._say_gone(link, header.request_id, message, welcome.namespace)
                    return
                self._answer_tcp(link, header, message, hello, policy, scope)
        finally:
            self.connections -= 1

    def _answer_tcp(
        self, link: TcpLink, header: Header, message: Message, hello: Hello, policy: Namespace | None, scope: bytes
    ) -> None:
        """`policy` is None only where the message needs none."""
        request = header.request_id
        if isinstance(message, GetRequest) and policy is not None:
            self._get_tcp(link, request, message, policy, scope, fetch=hello.role == Role.FETCH)
        elif isinstance(message, PutRequest):
            self._put_tcp(link, request, message, hello, policy, scope)
        elif isinstance(message, Replicate):
            reply = self.runtime.replicate(
                hello.node,
                message.items,
                message.fill,
                lambda slots: fill_from_link(self.tier, link, message.items, slots),
                surplus=message.surplus,
            )
            link.send(reply, request)
        elif isinstance(message, Vector):
            arrived = ev.VectorArrived(self.runtime.now_ns(), self.runtime.op(), hello.node, message)
            link.send(self.runtime.vector(arrived), request)
        elif isinstance(message, Offer):
            event = ev.OfferArrived(self.runtime.now_ns(), self.runtime.op(), hello.node, message)
            link.send(self.runtime.offer(event), request)
        else:
            link.send(self._small(message, policy, scope), request)

    def _say_gone(self, link: TcpLink | LocalLink, request: int, message: Message, namespace: Namespace) -> None:
        """Last answer of a connection whose namespace was dropped or created anew: the next one opens what is there."""
        log.info("a connection to namespace %r ends: it was dropped or created anew", namespace.name)
        if isinstance(message, GetRequest):
            link.send(GetReply([BlockInfo(int(MissReason.NO_NAMESPACE))] * len(message.keys)), request)
        elif isinstance(message, ExistsRequest):
            link.send(ExistsReply([int(MissReason.NO_NAMESPACE)] * len(message.keys)), request)
        elif isinstance(message, PutRequest):
            self._refuse(link, request, message, RefuseReason.NO_NAMESPACE)

    def _refused(self, link: TcpLink | LocalLink, request: int, message: PutRequest, policy: Namespace) -> bool:
        """Answers a put that the policy of its namespace does not allow."""
        reason = put_refusal(policy, message, self.factor)
        if reason:
            self._refuse(link, request, message, reason)
        return bool(reason)

    def _refuse(self, link: TcpLink | LocalLink, request: int, message: PutRequest, reason: RefuseReason) -> None:
        """Stores nothing; payload that follows on the link is taken off it."""
        if not message.delete and not isinstance(link, LocalLink):
            fill_from_link(self.tier, link, message.items, [None] * len(message.items))
        link.send(PutReply([PutOutcome(PutStatus.REFUSED, reason=reason)] * len(message.items)), request)

    def _get_tcp(
        self, link: TcpLink, request: int, message: GetRequest, policy: Namespace, scope: bytes, *, fetch: bool
    ) -> None:
        if policy.level == Level.STRONG:
            self.strong.get_tcp(link, request, message, scope)
            return
        # Bytes that leave by TCP are checked where they arrive; a namespace may ask for a look before that.
        relayed = fetch and bool(message.flags & RELAYED_READ)
        infos, slots = self._read(message, scope, local_only=fetch and not relayed, verify=False, relayed=relayed)
        held = [slot for slot in slots if slot is not None]
        try:
            link.send(GetReply(infos), request, [self.tier.view(slot) for slot in held])
        finally:
            self.runtime.unref(held)

    def _read(
        self, message: GetRequest, scope: bytes, *, local_only: bool, verify: bool, relayed: bool = False
    ) -> tuple[list[BlockInfo], list[Slot | None]]:
        if message.level == Level.STRONG:
            # A level that this version does not serve is refused; a weaker answer could be wrong.
            return [BlockInfo(int(MissReason.FENCED))] * len(message.keys), [None] * len(message.keys)
        return self.runtime.read(
            [scope + key for key in message.keys],
            self.runtime.now_ns() + message.deadline_ms * 1_000_000,
            session=message.level == Level.SESSION,
            local_only=local_only or bool(message.flags & LOCAL_ONLY),
            verify=verify,
            floors=message.floors,
            if_newer=bool(message.flags & IF_NEWER),
            relayed=relayed,
        )

    def _put_tcp(
        self,
        link: TcpLink,
        request: int,
        message: PutRequest,
        hello: Hello,
        policy: Namespace | None,
        scope: bytes,
    ) -> None:
        forwarded = hello.role == Role.STREAM
        if forwarded:
            if len(message.scope) != SCOPE_BYTES or not message.flags & FORWARD:
                raise ProtocolError("a put on a stream connection must be a forward and carry its scope")
            scope = message.scope
        elif policy is None or self._refused(link, request, message, policy):
            return
        elif policy.level == Level.STRONG:
            link.send(self.strong.put_tcp(link, message, scope, lambda: refuse_abandoned(link)), request)
            return
        items = message.items
        self._put(
            link,
            request,
            message,
            scope,
            lambda slots: fill_from_link(self.tier, link, items, slots),
            from_peer=hello.node if forwarded else "",
            policy=None if forwarded else policy,
        )

    def _put(
        self,
        link: TcpLink | LocalLink,
        request: int,
        message: PutRequest,
        scope: bytes,
        fill: Callable[[list[Slot | None]], list[bytes | None]],
        *,
        from_peer: str = "",
        policy: Namespace | None = None,
    ) -> None:
        """A put from any connection; `fill` brings its bytes into the slots. `policy`: of a client's namespace; what a
        peer forwards was judged where it came in."""
        min_copies = message.min_copies if policy is None else copies_wanted(policy, message, self.factor)
        from_client = not from_peer

        def receive(slots: list[Slot | None]) -> list[bytes | None]:
            checksums = fill(slots)
            if from_client:
                refuse_abandoned(link)
            return checksums

        if from_client and message.delete:
            refuse_abandoned(link)
        self.runtime.put(
            [scope + item.key for item in message.items],
            message.items,
            receive,
            self._answer_of(link, request),
            deadline_ns=self.runtime.now_ns() + message.deadline_ms * 1_000_000,
            session=message.level == Level.SESSION,
            strong=message.level == Level.STRONG,
            fresh=bool(message.flags & FRESH),
            min_copies=min_copies,
            from_peer=from_peer,
            delete=message.delete,
            relay=bool(message.flags & RELAY),
        )

    def _answer_of(self, link: TcpLink | LocalLink, request: int) -> Callable[[PutReply], None]:
        """Sends the answer of a put from whatever thread completes it; the connection may be gone by then.

        Its own thread may wait for a client that is slow to read. Any other thread (the ticker, a peer's reader) works
        for the whole node: it never waits, and a client that has left no room for its answers loses the connection.
        """
        own = threading.get_ident()

        def answer(reply: PutReply) -> None:
            try:
                if threading.get_ident() == own:
                    link.send(reply, request)
                elif isinstance(link, LocalLink):
                    link.send(reply, request, wait=False)
                else:
                    link.send_now(reply, request)
            except LinkTimeout as error:
                log.warning("client connection closed: it does not take its answers (%s)", error)
                link.close()
            except LinkClosed:
                pass  # its own thread sees the end and cleans up

        return answer

    def _small(self, message: Message, policy: Namespace | None, scope: bytes) -> Message:
        """Questions that carry no payload."""
        if isinstance(message, ExistsRequest):
            keys = [scope + key for key in message.keys]
            deadline_ns = self.runtime.now_ns() + message.deadline_ms * 1_000_000
            local_only = bool(message.flags & LOCAL_ONLY)
            if policy is not None and policy.level == Level.STRONG:
                return ExistsReply(self.strong.exists(message.keys, scope, deadline_ns))
            return ExistsReply(self.runtime.exists(keys, deadline_ns, local_only=local_only))
        if isinstance(message, MapRequest):
            return self.runtime.cluster_map()
        if isinstance(message, StatusRequest):
            return StatusReply(self.status())
        if isinstance(message, AdminRequest):
            return self.admin(message)
        raise ProtocolError(f"{type(message).__name__} has no answer here")

    # -- local socket --------------------------------------------------------------------------------------------

    def serve_local(self, link: LocalLink) -> None:
        """An engine process of this host, until its connection or its process ends."""
        self._wait_opened()
        session = self.namespaces.session()
        link.set_recv_timeout_ms(HANDSHAKE_TIMEOUT_MS)
        _, hello, _ = link.recv()
        if not isinstance(hello, Hello):
            raise ProtocolError("a local connection began without HELLO")
        answer = session.answer(hello)
        if isinstance(answer, ErrorFrame):
            log.warning("local connection refused: %s", answer.text)
            link.send(answer, 0)
            return
        staging_bytes = min(hello.want_staging_bytes, self.staging_bytes)
        staging: StagingArea | None = None
        pin_bytes_max = self.tier.total_bytes // 8
        pins = Pins(self.runtime, self.pinned, pin_bytes_max)
        welcome = Welcome(
            answer.wire,
            answer.cluster_id,
            answer.node,
            answer.incarnation,
            answer.namespace,
            self.tier.total_bytes,
            staging_bytes,
            pin_bytes_max,
        )
        scope = self.namespaces.scope(answer.namespace)
        pidfd = self.watcher.add(link)
        self.connections += 1
        try:
            # Inside: whatever ends this connection, also one whose client is gone already, gives its staging back.
            if staging_bytes > 0:
                staging = StagingArea(staging_bytes)
            link.send(welcome, 0, [self.tier.fd, staging.fd] if staging is not None else [self.tier.fd])
            link.set_recv_timeout_ms(0)
            link.set_send_timeout_ms(SEND_TIMEOUT_MS)
            while True:
                header, message, _ = link.recv()
                session.check(message)
                policy = self.namespaces.policy(scope)
                if policy is None and isinstance(message, NEED_NAMESPACE):
                    self._say_gone(link, header.request_id, message, answer.namespace)
                    return
                self._answer_local(link, header.request_id, message, policy, scope, pins, staging)
        finally:
            self.connections -= 1
            self.watcher.remove(pidfd)
            # First: a client must see the end of its connection before bytes that it had pinned can change.
            link.close()
            pins.drop_all()
            if staging is not None:
                staging.close()

    def _answer_local(
        self,
        link: LocalLink,
        request: int,
        message: Message,
        policy: Namespace | None,
        scope: bytes,
        pins: Pins,
        staging: StagingArea | None,
    ) -> None:
        if isinstance(message, GetRequest) and policy is not None:
            if not message.flags & PIN:
                raise ProtocolError("a get on the local socket must ask for a pin")
            if policy.level == Level.STRONG:
                infos, slots = self.strong.get_local(message, scope)
            else:
                infos, slots = self._read(message, scope, local_only=False, verify=policy.verify_pin)
            pin, infos = pins.add(infos, slots)
            link.send(GetReply(infos, pin), request)
        elif isinstance(message, Unpin):
            pins.drop(message.pins)
        elif isinstance(message, PutRequest) and policy is not None:
            if staging is None and not message.delete:
                raise ProtocolError("a put on a connection that asked for no staging")
            if self._refused(link, request, message, policy):
                return
            if policy.level == Level.STRONG:
                link.send(self.strong.put_local(staging, message, scope, lambda: refuse_abandoned(link)), request)
                return
            items = message.items
            self._put(
                link,
                request,
                message,
                scope,
                lambda slots: fill_from_staging(self.tier, staging, items, slots),
                policy=policy,
            )
        else:
            link.send(self._small(message, policy, scope), request)


def handle_stream_answer(runtime: Runtime, peer: str, header: Header, message: Message) -> None:
    """An answer on one of our own streams becomes an event."""
    now_ns = runtime.now_ns()
    if isinstance(message, PutReply):
        runtime.handle(ev.PutAnswered(now_ns, peer, header.request_id, message))
    elif isinstance(message, ReplicateReply):
        runtime.handle(ev.ReplicateAnswered(now_ns, peer, header.request_id, message))
    elif isinstance(message, OfferReply):
        runtime.handle(ev.OfferAnswered(now_ns, peer, header.request_id, message))
    elif isinstance(message, VectorReply):
        runtime.handle(ev.VectorAnswered(now_ns, peer, header.request_id, message))
    else:
        raise ProtocolError(f"{type(message).__name__} is no answer on a stream")
