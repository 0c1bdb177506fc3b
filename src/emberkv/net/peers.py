"""Streams to the other nodes: one in-order connection per peer, whatever the network does.

Why it exists: replication needs order and bounded memory towards peers that may be slow, frozen or gone.
Laws: `send` never blocks; every accepted send ends in exactly one `on_sent`; what was accepted before a loss is gone
when `on_down` is called, and nothing is accepted until `on_up`; callbacks run in the peer's own threads and never
under a lock of this file.
Limits: OUTBOX_ITEMS_MAX messages and OUTBOX_BYTES_MAX payload bytes wait per peer; two threads per peer.

    Life of a peer:  CONNECTING --handshake: on_up--> UP --EOF, stall, bad frame: on_sent for all, on_down--> CONNECTING
                     any --removed by set_peers, or stop--> gone (with on_down if it was up)
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from emberkv.errors import EmberError, HandshakeRefused, ProtocolError, Unavailable
from emberkv.messages import Hello, Message
from emberkv.net import now_ns
from emberkv.net.fetch import FetchPool, FetchResult
from emberkv.net.link import LinkClosed, LinkTimeout
from emberkv.net.tcp import connect, start_thread
from emberkv.net.tcp_link import TcpLink
from emberkv.wire.codec import Header

__all__ = ["FetchPool", "FetchResult", "PeerStreams"]

OUTBOX_ITEMS_MAX: Final = 1024
"""Messages waiting for one peer: about a second of batches at full rate."""
OUTBOX_BYTES_MAX: Final = 256 << 20
"""Payload bytes waiting for one peer; they hold slots of the arena, so this is memory that eviction cannot have."""
CONNECT_TIMEOUT_MS: Final = 1000
"""For the connection and again for the handshake; well under the failover budget."""
BACK_OFF_MIN_S: Final = 0.02
BACK_OFF_MAX_S: Final = 0.5
"""Reconnect pauses double between these, each with jitter, so that a node that returns is not hit by all at once."""
SEND_TIMEOUT_MS: Final = 2000
"""A peer that takes no byte for this long is frozen: the link goes down and its slots are freed."""
STEADY_S: Final = 1.0
"""A stream that lasted this long was sound: the next pause starts from the least again."""
JOIN_TIMEOUT_S: Final = 5.0
"""Longest wait for a reader whose callback does not return."""

_log = logging.getLogger("emberkv.net")

OnMessage = Callable[[str, Header, Message, TcpLink], None]
OnPeer = Callable[[str], None]


class _Item(NamedTuple):
    request_id: int
    message: Message
    payload: Sequence[memoryview]
    on_sent: Callable[[], None] | None
    payload_bytes: int


class _Stream:
    """One peer: its outbox, the thread that connects and sends, and a reader thread while it is up."""

    def __init__(self, owner: PeerStreams, peer: str, address: str, before: threading.Thread | None = None) -> None:
        self.peer = peer
        self.address = address
        self._owner = owner
        self._before = before
        """The stream to the peer's last address: its end must be told before a new beginning."""
        self._wake = threading.Condition(threading.Lock())
        # Guarded by _wake: the outbox, its bytes, and whether there is a link to send on.
        self._outbox: deque[_Item] = deque()
        self._bytes = 0
        self._up = False
        self._stopped = False
        self._link: TcpLink | None = None
        self._last_error = ""
        self.thread = start_thread(f"stream {peer}", self._run)

    @property
    def up(self) -> bool:
        return self._up

    @property
    def queued(self) -> tuple[int, int]:
        """(messages, payload bytes) that wait."""
        return len(self._outbox), self._bytes

    def push(self, item: _Item) -> bool:
        """Queues an item; False when there is no link or no room."""
        with self._wake:
            if not self._up:
                return False
            # One message may be larger than the bound by itself; it then waits alone.
            crowded = self._outbox and self._bytes + item.payload_bytes > OUTBOX_BYTES_MAX
            if not crowded and len(self._outbox) < OUTBOX_ITEMS_MAX:
                self._outbox.append(item)
                self._bytes += item.payload_bytes
                self._wake.notify()
                return True
            link = self._link
        # A gap in an in-order stream is a loss: the link goes down; what was missed is compared when it is up again.
        if link is not None:
            self._lost(link, "its queue is full")
        return False

    def stop(self) -> None:
        """Asks the threads to end; does not wait."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
            if self._link is not None:
                self._link.shutdown()

    def _run(self) -> None:
        with self._owner.entering:
            pass  # what `on_up` leads to is sent through this stream, so it must be found first
        if self._before is not None:
            self._before.join()  # stopped already; its own bounds end it
            self._before = None
        back_off_s = BACK_OFF_MIN_S
        while not self._stopped:
            link = self._open()
            if link is not None:
                since_ns = now_ns()
                self._serve(link)
                if now_ns() - since_ns > STEADY_S * 1e9:
                    back_off_s = BACK_OFF_MIN_S
            with self._wake:
                if not self._stopped:
                    self._wake.wait(back_off_s * random.uniform(0.5, 1.0))
            back_off_s = min(2 * back_off_s, BACK_OFF_MAX_S)

    def _open(self) -> TcpLink | None:
        """A link after the handshake, or None; a reason is logged when it differs from the last one."""
        try:
            link, welcome = connect(self.address, self._owner.hello, CONNECT_TIMEOUT_MS)
        except (Unavailable, HandshakeRefused, ProtocolError) as error:
            self._note(str(error))
            return None
        if welcome.node != self.peer:
            link.close()
            self._note(f"{self.address} is node {welcome.node!r}, not {self.peer!r}")
            return None
        link.set_send_timeout_ms(SEND_TIMEOUT_MS)
        self._last_error = ""
        return link

    def _note(self, reason: str) -> None:
        if reason != self._last_error and not self._stopped:
            _log.warning("no stream to peer %s: %s", self.peer, reason)
        self._last_error = reason

    def _serve(self, link: TcpLink) -> None:
        """From up to down. The caller's thread sends; a second one reads."""
        with self._wake:
            if self._stopped:
                link.close()
                return
            self._link = link
            self._up = True
        reader: threading.Thread | None = None
        try:
            # First, so that no message of this connection is handed over before the peer is known to be up.
            self._owner.on_up(self.peer)
            reader = start_thread(f"replies {self.peer}", lambda: self._read(link))
            self._send_until_down(link)
        finally:
            self._go_down(link, reader)

    def _send_until_down(self, link: TcpLink) -> None:
        while True:
            with self._wake:
                while not self._outbox and self._up and not self._stopped:
                    self._wake.wait()
                if not self._up or self._stopped:
                    return
                item = self._outbox.popleft()
                self._bytes -= item.payload_bytes
            try:
                link.send(item.message, item.request_id, item.payload)
            except (LinkClosed, LinkTimeout) as error:
                self._lost(link, str(error))
                return
            finally:
                if item.on_sent is not None:
                    item.on_sent()

    def _read(self, link: TcpLink) -> None:
        try:
            while True:
                header, message = link.recv()
                self._owner.on_message(self.peer, header, message, link)
        except EmberError as error:
            self._lost(link, str(error))
        finally:
            self._lost(link, "its reader ended")

    def _lost(self, link: TcpLink, reason: str) -> None:
        """Refuses new sends and wakes both threads; the first reason is logged."""
        with self._wake:
            first, self._up = self._up, False
            self._wake.notify()
        link.shutdown()
        if first and not self._stopped:
            _log.warning("stream to peer %s lost: %s", self.peer, reason)

    def _go_down(self, link: TcpLink, reader: threading.Thread | None) -> None:
        self._lost(link, "stopped")
        if reader is not None:
            reader.join(JOIN_TIMEOUT_S)
            if reader.is_alive():
                _log.error("a message handler for peer %s did not return in %.0f s", self.peer, JOIN_TIMEOUT_S)
        link.close()
        with self._wake:
            self._link = None
            dropped = list(self._outbox)
            self._outbox.clear()
            self._bytes = 0
        for item in dropped:
            if item.on_sent is not None:
                item.on_sent()
        self._owner.on_down(self.peer)


class PeerStreams:
    """In-order streams to named peers (role STREAM), opened again by themselves whenever they end.

    `on_message(peer, header, message, link)` must take the message's payload, if any, from the link with
    `recv_payload`; `on_up(peer)` comes before the first message and may send; `on_down(peer)` comes once per loss,
    after everything queued was given up. `on_message` may raise, which ends that connection; the others must not.
    """

    def __init__(self, hello: Hello, on_message: OnMessage, on_up: OnPeer, on_down: OnPeer) -> None:
        self.hello = hello
        self.on_message = on_message
        self.on_up = on_up
        self.on_down = on_down
        self._lock = self.entering = threading.Lock()
        """Held while streams are made and entered; a new stream waits for it before it begins."""
        self._streams: dict[str, _Stream] = {}
        self._leaving: list[_Stream] = []
        self._stopped = False

    def set_peers(self, addresses: Mapping[str, str]) -> None:
        """Name -> "host:port" of all peers. Opens new ones, ends those that left or moved. Does not wait."""
        with self._lock:
            if self._stopped:
                return
            for peer, stream in list(self._streams.items()):
                if addresses.get(peer) != stream.address:
                    stream.stop()
                    self._leaving.append(self._streams.pop(peer))
            self._leaving = [stream for stream in self._leaving if stream.thread.is_alive()]
            # Of several that still end, each waits for the one before it.
            ending = {stream.peer: stream.thread for stream in self._leaving}
            for peer, address in addresses.items():
                if peer not in self._streams:
                    self._streams[peer] = _Stream(self, peer, address, ending.get(peer))

    def send(
        self,
        peer: str,
        request_id: int,
        message: Message,
        payload: Sequence[memoryview] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> bool:
        """Queues one frame. False: the peer is unknown or down, or its queue is full; `on_sent` is then not called.

        True: `on_sent` is called once, when the kernel took the bytes or the link died first, and until then the
        payload must stay as it is.
        """
        stream = self._streams.get(peer)
        if stream is None:
            return False
        return stream.push(_Item(request_id, message, payload, on_sent, sum([view.nbytes for view in payload])))

    def peers_up(self) -> list[str]:
        """Names of the peers whose stream is up."""
        return [peer for peer, stream in list(self._streams.items()) if stream.up]

    def queued(self, peer: str) -> tuple[int, int]:
        """(messages, payload bytes) that wait for a peer."""
        stream = self._streams.get(peer)
        return stream.queued if stream is not None else (0, 0)

    def stop(self) -> bool:
        """Ends all streams and waits for their threads, JOIN_TIMEOUT_S in all beyond their own bounds."""
        with self._lock:
            self._stopped = True
            streams = [*self._streams.values(), *self._leaving]
            self._streams.clear()
        for stream in streams:
            stream.stop()
        for stream in streams:
            if stream.thread is not threading.current_thread():
                stream.thread.join(JOIN_TIMEOUT_S + CONNECT_TIMEOUT_MS / 500)
        return not any(stream.thread.is_alive() for stream in streams)
