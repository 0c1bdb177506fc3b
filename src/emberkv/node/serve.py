"""What a node answers on its connections: clients over TCP and the local socket, peers over TCP.

Why it exists: the edge between frames and the runtime.
Laws: tenant and namespace follow from the handshake, never from a field of a request. A malformed frame ends its
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
    Welcome,
)
from emberkv.net.link import LinkClosed, LinkTimeout
from emberkv.net.local_link import LocalLink
from emberkv.net.tcp import HANDSHAKE_TIMEOUT_MS, serve_handshake
from emberkv.net.tcp_link import TcpLink
from emberkv.node.connections import PinnedTotal, Pins, fill_from_link, fill_from_staging
from emberkv.node.fetcher import SCOPE_BYTES
from emberkv.node.namespaces import Namespaces
from emberkv.node.pids import ProcessWatcher
from emberkv.node.runtime import Runtime
from emberkv.ports import Slot
from emberkv.storage.dram import DramTier
from emberkv.storage.staging import StagingArea
from emberkv.types import Level, MissReason, Namespace
from emberkv.wire.codec import Header

log = logging.getLogger(__name__)

NO_SCOPE = b""
# Plain numbers: an operation on an IntFlag makes a new member in Python, 1 us each.
LOCAL_ONLY = int(GetFlag.LOCAL_ONLY)
PIN = int(GetFlag.PIN)
FRESH = int(PutFlag.FRESH)
FORWARD = int(PutFlag.FORWARD)
OPEN_WAIT_S = 2.0
SEND_TIMEOUT_MS = 2000
"""A client that takes no answer for this long loses its connection, not the node a thread."""


class Server:
    """Handlers of one node's connections."""

    def __init__(self, tier: DramTier, namespaces: Namespaces, staging_bytes: int) -> None:
        self.tier = tier
        self.namespaces = namespaces
        self.staging_bytes = staging_bytes
        self.connections = 0
        self.pinned = PinnedTotal(tier.total_bytes // 2)
        self._opened = threading.Event()

    def open(self, runtime: Runtime, status: Callable[[], bytes], watcher: ProcessWatcher) -> None:
        """Lets connections in: the listener exists before the runtime, which publishes its address."""
        self.runtime = runtime
        self.status = status
        self.watcher = watcher
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
                self._answer_tcp(link, header, message, hello, welcome.namespace, scope)
        finally:
            self.connections -= 1

    def _answer_tcp(
        self, link: TcpLink, header: Header, message: Message, hello: Hello, namespace: Namespace, scope: bytes
    ) -> None:
        request = header.request_id
        if isinstance(message, GetRequest):
            self._get_tcp(link, request, message, namespace, scope, fetch=hello.role == Role.FETCH)
        elif isinstance(message, PutRequest):
            self._put_tcp(link, request, message, hello, scope)
        elif isinstance(message, Replicate):
            reply = self.runtime.replicate(
                hello.node,
                message.items,
                message.fill,
                lambda slots: fill_from_link(self.tier, link, message.items, slots),
            )
            link.send(reply, request)
        elif isinstance(message, Offer):
            event = ev.OfferArrived(self.runtime.now_ns(), self.runtime.op(), hello.node, message)
            link.send(self.runtime.offer(event), request)
        else:
            link.send(self._small(message, scope), request)

    def _get_tcp(
        self, link: TcpLink, request: int, message: GetRequest, namespace: Namespace, scope: bytes, *, fetch: bool
    ) -> None:
        # Bytes that leave by TCP are checked where they arrive; a namespace may ask for a look before that.
        infos, slots = self._read(message, scope, local_only=fetch, verify=False)
        held = [slot for slot in slots if slot is not None]
        try:
            link.send(GetReply(infos), request, [self.tier.view(slot) for slot in held])
        finally:
            self.runtime.unref(held)

    def _read(
        self, message: GetRequest, scope: bytes, *, local_only: bool, verify: bool
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
        )

    def _put_tcp(self, link: TcpLink, request: int, message: PutRequest, hello: Hello, scope: bytes) -> None:
        forwarded = hello.role == Role.STREAM
        if forwarded:
            if len(message.scope) != SCOPE_BYTES or not message.flags & FORWARD:
                raise ProtocolError("a put on a stream connection must be a forward and carry its scope")
            scope = message.scope
        items = message.items
        self._put(
            link,
            request,
            message,
            scope,
            lambda slots: fill_from_link(self.tier, link, items, slots),
            from_peer=hello.node if forwarded else "",
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
    ) -> None:
        """A put from any connection; `fill` brings its bytes into the slots."""
        self.runtime.put(
            [scope + item.key for item in message.items],
            message.items,
            fill,
            self._answer_of(link, request),
            deadline_ns=self.runtime.now_ns() + message.deadline_ms * 1_000_000,
            session=message.level == Level.SESSION,
            strong=message.level == Level.STRONG,
            fresh=bool(message.flags & FRESH),
            min_copies=message.min_copies,
            from_peer=from_peer,
            delete=message.delete,
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

    def _small(self, message: Message, scope: bytes) -> Message:
        """Questions that carry no payload."""
        if isinstance(message, ExistsRequest):
            keys = [scope + key for key in message.keys]
            deadline_ns = self.runtime.now_ns() + message.deadline_ms * 1_000_000
            local_only = bool(message.flags & LOCAL_ONLY)
            return ExistsReply(self.runtime.exists(keys, deadline_ns, local_only=local_only))
        if isinstance(message, MapRequest):
            return self.runtime.cluster_map()
        if isinstance(message, StatusRequest):
            return StatusReply(self.status())
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
                self._answer_local(link, header.request_id, message, answer.namespace, scope, pins, staging)
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
        namespace: Namespace,
        scope: bytes,
        pins: Pins,
        staging: StagingArea | None,
    ) -> None:
        if isinstance(message, GetRequest):
            if not message.flags & PIN:
                raise ProtocolError("a get on the local socket must ask for a pin")
            infos, slots = self._read(message, scope, local_only=False, verify=namespace.verify_pin)
            pin, infos = pins.add(infos, slots)
            link.send(GetReply(infos, pin), request)
        elif isinstance(message, Unpin):
            pins.drop(message.pins)
        elif isinstance(message, PutRequest):
            if staging is None and not message.delete:
                raise ProtocolError("a put on a connection that asked for no staging")
            items = message.items
            self._put(link, request, message, scope, lambda slots: fill_from_staging(self.tier, staging, items, slots))
        else:
            link.send(self._small(message, scope), request)


def handle_stream_answer(runtime: Runtime, peer: str, header: Header, message: Message) -> None:
    """An answer on one of our own streams becomes an event."""
    now_ns = runtime.now_ns()
    if isinstance(message, PutReply):
        runtime.handle(ev.PutAnswered(now_ns, peer, header.request_id, message))
    elif isinstance(message, ReplicateReply):
        runtime.handle(ev.ReplicateAnswered(now_ns, peer, header.request_id, message))
    elif isinstance(message, OfferReply):
        runtime.handle(ev.OfferAnswered(now_ns, peer, header.request_id, message))
    else:
        raise ProtocolError(f"{type(message).__name__} is no answer on a stream")
