"""Reads from peers' memory: a batch of blocks, straight into their place, by a deadline.

Why it exists: a node answers its clients from other nodes' copies; a slow or dead one may cost the deadline, no more.
Laws: never raises for an unreachable, slow or lying peer: every block has a reason; a connection that stopped inside an
answer is closed, never reused; a frame's payload is placed by one socket call where the kernel allows.
Limits: IDLE_LINKS_MAX idle connections per peer, newest first, closed after IDLE_S.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from emberkv.errors import EmberError, HandshakeRefused, ProtocolError, Unavailable
from emberkv.messages import BlockInfo, ErrorFrame, GetFlag, GetReply, GetRequest, Hello
from emberkv.net import now_ns
from emberkv.net.link import LinkClosed, LinkTimeout
from emberkv.net.tcp import connect, one_line
from emberkv.net.tcp_link import TcpLink
from emberkv.types import MissReason
from emberkv.wire.codec import get_reply_bytes

__all__ = ["Fetch", "FetchPool", "FetchResult", "Place"]

IDLE_LINKS_MAX: Final = 4
"""Idle connections kept per peer: as many fetches at once as keep a link of 25 Gb/s busy."""
IDLE_S: Final = 30
"""Age at which an idle connection is closed; burst after burst of one engine step stays well below."""
CONNECT_TIMEOUT_MS: Final = 500
"""A peer that needs longer to shake hands is of no use to a read."""
PAUSE_MS: Final = 200
"""After a failed connection a peer is taken to be unreachable this long, so that not each fetch pays the timeout."""
SCRATCH_BYTES: Final = 1 << 20
"""Where unwanted payload goes; the same bytes stand in the vector as often as needed."""
CURRENT: Final = int(MissReason.CURRENT)
IF_NEWER: Final = int(GetFlag.IF_NEWER)

_log = logging.getLogger("emberkv.net")

Place = Callable[[int, BlockInfo], memoryview | None]


class FetchResult(NamedTuple):
    """`infos`: one per key; reason NONE means that all `length` bytes lie in the view that `place` gave.

    `arrived_bytes`: sum of those lengths. Checksums are not verified here.
    """

    infos: list[BlockInfo]
    arrived_bytes: int


def _missed(request: GetRequest, reason: MissReason) -> FetchResult:
    info = BlockInfo(int(reason))
    return FetchResult([info] * len(request.keys), 0)


class Fetch:
    """One request on its way. Call `finish` exactly once, or `cancel`."""

    __slots__ = ("_deadline_ns", "_link", "_peer", "_pool", "_request", "_request_id", "_reused")

    def __init__(self, pool: FetchPool, peer: str, request: GetRequest, deadline_ns: int) -> None:
        self._pool = pool
        self._peer = peer
        self._request = request
        self._request_id = 0
        self._deadline_ns = deadline_ns
        self._link: TcpLink | None = None
        self._reused = False

    def begin(self, *, fresh: bool = False) -> None:
        """Sends the request on an idle or new connection; on failure `finish` will say unreachable."""
        while True:
            self._link, self._reused = self._pool.take(self._peer, self._deadline_ns, fresh=fresh)
            if self._link is None:
                return
            self._request_id = self._pool.next_id()
            try:
                self._link.send(self._request, self._request_id)
                return
            except (LinkClosed, LinkTimeout):
                self._drop()
                if not self._reused:
                    return
                fresh = True

    def cancel(self) -> None:
        """Gives up; the connection is closed, since its answer is on the way."""
        self._drop()

    def finish(self, place: Place) -> FetchResult:
        """Waits for the answer until the deadline and has the payload written where `place` says.

        `place(index, info)` is called for each hit before any payload is read, and returns a contiguous writable view
        of exactly `info.length` bytes, or None for no room (the block is dropped, reason QUOTA).
        """
        try:
            reply = self._reply()
            if isinstance(reply, MissReason):
                return _missed(self._request, reply)
            return self._fill(reply, place)
        finally:
            self._drop()  # no-op when the link went back to the pool

    def _reply(self) -> GetReply | MissReason:
        while self._link is not None:
            try:
                header, reply = self._link.recv_sized(get_reply_bytes(len(self._request.keys)), self._deadline_ns)
                return self._check(header.request_id, reply)
            except LinkTimeout:
                return MissReason.DEADLINE
            except LinkClosed:
                # The peer had closed an idle connection (it restarted, say): once more on a new one.
                again = self._reused and now_ns() < self._deadline_ns
                self._drop()
                if again:
                    self.begin(fresh=True)
            except EmberError as error:
                _log.warning("fetch from peer %s failed, connection closed: %s", self._peer, error)
                return MissReason.UNREACHABLE
        return MissReason.UNREACHABLE if now_ns() < self._deadline_ns else MissReason.DEADLINE

    def _check(self, request_id: int, reply: object) -> GetReply:
        if isinstance(reply, ErrorFrame):
            raise Unavailable(one_line(reply.text))
        if not isinstance(reply, GetReply) or request_id != self._request_id & 0xFFFFFFFF or reply.pin:
            raise ProtocolError("the answer does not fit the request")
        if len(reply.infos) != len(self._request.keys):
            raise ProtocolError(f"{len(reply.infos)} answers to {len(self._request.keys)} keys")
        if CURRENT in [info.reason for info in reply.infos]:
            self._check_current(reply)
        return reply

    def _check_current(self, reply: GetReply) -> None:
        """CURRENT means "the version that you named": said of another one, it would keep an old copy alive."""
        request = self._request
        if not request.flags & IF_NEWER:
            raise ProtocolError("an answer without bytes to a request that wants them")
        for info, floor in zip(reply.infos, request.floors, strict=True):
            if info.reason == CURRENT and info.version != floor:
                raise ProtocolError(f"version {tuple(info.version)} is called current, {tuple(floor)} was asked for")

    def _fill(self, reply: GetReply, place: Place) -> FetchResult:
        link = self._link
        assert link is not None
        infos = reply.infos
        buffers: list[memoryview] = []
        dropped: list[int] = []
        total = 0
        for index, info in enumerate(infos):
            if info.reason or not info.length:
                continue
            total += info.length
            view = place(index, info)
            if view is None:
                dropped.append(index)
                buffers.extend(self._pool.scratch(info.length))
            elif view.nbytes != info.length:
                raise ValueError(f"place gave {view.nbytes} bytes for a block of {info.length}")
            else:
                buffers.append(view)
        received = link.recv_payload(buffers, self._deadline_ns) if total else 0
        if received == total:
            self._link = None
            self._pool.give(self._peer, link)
        else:
            reason = MissReason.UNREACHABLE if link.eof else MissReason.DEADLINE
            infos = _cut(infos, received, reason)
        for index in dropped:
            infos[index] = BlockInfo(int(MissReason.QUOTA))
        return FetchResult(infos, sum([info.length for info in infos if not info.reason]))

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def _cut(infos: list[BlockInfo], received: int, reason: MissReason) -> list[BlockInfo]:
    """`infos` of an answer of which only `received` payload bytes came: blocks that are not whole become misses."""
    cut = BlockInfo(int(reason))
    kept: list[BlockInfo] = []
    for info in infos:
        if not info.reason:
            received -= info.length
            if received < 0:
                kept.append(cut)
                continue
        kept.append(info)
    return kept


class FetchPool:
    """Connections of role FETCH to peers, shared by all threads."""

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}
        self._idle: dict[str, list[tuple[int, TcpLink]]] = {}
        """Per peer, oldest first: (when it became idle, link)."""
        self._pause_until_ns: dict[str, int] = {}
        self._troubled: set[str] = set()
        """Peers that could not be reached: said once, until one of their connections works or they move."""
        self._request_id = 0
        self._scratch: memoryview | None = None
        self._closed = False

    def set_peers(self, addresses: Mapping[str, str]) -> None:
        """Name -> "host:port" of all peers; idle connections to those that left or moved are closed."""
        with self._lock:
            gone = [peer for peer in self._idle if addresses.get(peer) != self._addresses.get(peer)]
            stale = [link for peer in gone for _, link in self._idle.pop(peer)]
            self._addresses = dict(addresses)
            self._pause_until_ns.clear()
            self._troubled.clear()
        for link in stale:
            link.close()

    def get(self, peer: str, request: GetRequest, place: Place, deadline_ns: int) -> FetchResult:
        """`start` and `finish` in one. `deadline_ns` is a time of net.now_ns()."""
        return self.start(peer, request, deadline_ns).finish(place)

    def start(self, peer: str, request: GetRequest, deadline_ns: int) -> Fetch:
        """Sends the request and returns at once when a connection is idle; else connects first. Never raises."""
        fetch = Fetch(self, peer, request, deadline_ns)
        fetch.begin()
        return fetch

    def close(self) -> None:
        """Closes the idle connections; fetches under way end at their deadline."""
        with self._lock:
            self._closed = True
            links = [link for idle in self._idle.values() for _, link in idle]
            self._idle.clear()
        for link in links:
            link.close()

    # -- for Fetch --------------------------------------------------------------------------------------------------

    def next_id(self) -> int:
        """A request id; equal ones on one connection are 2**32 requests apart."""
        with self._lock:
            self._request_id += 1
            return self._request_id

    def scratch(self, length: int) -> list[memoryview]:
        """Views for `length` unwanted bytes, all on the same memory."""
        if self._scratch is None:
            self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        views = [self._scratch] * (length // SCRATCH_BYTES)
        if length % SCRATCH_BYTES:
            views.append(self._scratch[: length % SCRATCH_BYTES])
        return views

    def take(self, peer: str, deadline_ns: int, *, fresh: bool) -> tuple[TcpLink | None, bool]:
        """(link, whether it was idle before); (None, False) when the peer cannot be reached in time."""
        stale: list[TcpLink] = []
        found: TcpLink | None = None
        with self._lock:
            address = self._addresses.get(peer)
            idle = self._idle.get(peer, [])
            stale.extend(self._overdue())
            if fresh:
                stale.extend(link for _, link in idle)
                idle.clear()
            while idle and found is None:
                link = idle.pop()[1]
                if link.is_fresh():
                    found = link
                else:
                    stale.append(link)
            paused = now_ns() < self._pause_until_ns.get(peer, 0)
        for link in stale:
            link.close()
        if found is not None:
            return found, True
        left_ms = (deadline_ns - now_ns()) // 1_000_000
        if address is None or paused or left_ms <= 0 or self._closed:
            return None, False
        return self._connect(peer, address, min(left_ms, CONNECT_TIMEOUT_MS)), False

    def _connect(self, peer: str, address: str, timeout_ms: int) -> TcpLink | None:
        try:
            link, welcome = connect(address, self._hello, timeout_ms)
        except (Unavailable, HandshakeRefused, ProtocolError) as error:
            self._pause(peer, str(error))
            return None
        if welcome.node == peer:
            self._troubled.discard(peer)
            return link
        link.close()
        self._pause(peer, f"{address} is node {one_line(welcome.node)}")
        return None

    def _pause(self, peer: str, reason: str) -> None:
        with self._lock:
            first = peer not in self._troubled
            self._troubled.add(peer)
            self._pause_until_ns[peer] = now_ns() + PAUSE_MS * 1_000_000
        if first:
            _log.info("cannot fetch from peer %s: %s", peer, reason)

    def give(self, peer: str, link: TcpLink) -> None:
        """Takes back a link whose answer was read whole."""
        stale: list[TcpLink] = []
        with self._lock:
            if self._closed or link.peer_address != self._addresses.get(peer):
                stale.append(link)
            else:
                self._idle.setdefault(peer, []).append((now_ns(), link))
            stale.extend(self._overdue())
        for old in stale:
            old.close()

    def _overdue(self) -> list[TcpLink]:
        """Takes out the idle links that are too many or too old; the caller holds the lock and closes them."""
        oldest_ns = now_ns() - IDLE_S * 1_000_000_000
        links: list[TcpLink] = []
        for idle in self._idle.values():
            while idle and (len(idle) > IDLE_LINKS_MAX or idle[0][0] < oldest_ns):
                links.append(idle.pop(0)[1])
        return links
