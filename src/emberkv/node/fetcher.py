"""Reads from peers for the runtime: internal keys in, verified bytes in slots out.

Why it exists: connections carry one namespace, so that its keys stay 32 bytes; the core's keys carry their scope. A
block enters this node's memory here, so here its checksum is checked.
Limits: connections of POOLS_MAX namespaces are kept. A read that began in one which had to go meanwhile is a miss.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from emberkv.errors import EmberError
from emberkv.messages import BlockInfo, ExistsReply, ExistsRequest, GetFlag, GetRequest, Hello
from emberkv.net import now_ns
from emberkv.net.fetch import FetchPool
from emberkv.ports import Slot, Tier
from emberkv.types import SCOPE_BYTES, Level, MissReason, Version, checksum

HELPERS_MAX = 64
"""Reads from second and further peers under way at once; more wait, within their deadlines."""
POOLS_MAX = 256
"""Namespaces with connections of their own. The one that was read least recently goes first, so those of dropped
namespaces and of earlier generations do not stay; if it is still there, its next read shakes hands anew."""
RELAY_SHARE = 0.8
"""Of the time left, what a peer that asks others gets: its answer must still travel here."""
# Plain numbers: an operation on an IntFlag makes a new member in Python, 1 us each.
LOCAL_ONLY = int(GetFlag.LOCAL_ONLY)
FLOORS = int(GetFlag.FLOORS)
IF_NEWER = int(GetFlag.IF_NEWER)
RELAY = int(GetFlag.RELAY)


def _relay_deadline_ms(deadline_ns: int) -> int:
    return max(1, int((deadline_ns - now_ns()) * RELAY_SHARE) // 1_000_000)


class PeerFetcher:
    """The runtime's Fetcher over TCP."""

    def __init__(self, tier: Tier, hello_for: Callable[[bytes], Hello]) -> None:
        self._tier = tier
        self._hello_for = hello_for
        """Scope -> HELLO of role FETCH that opens the right namespace."""
        self._lock = threading.Lock()
        self._pools: OrderedDict[bytes, FetchPool] = OrderedDict()
        """By scope, that of the last read last."""
        self._addresses: dict[str, str] = {}
        self._helpers = ThreadPoolExecutor(HELPERS_MAX, thread_name_prefix="fetch")

    def set_peers(self, addresses: Mapping[str, str]) -> None:
        """Name -> TCP address of all peers."""
        with self._lock:
            self._addresses = dict(addresses)
            pools = list(self._pools.values())
        for pool in pools:
            pool.set_peers(addresses)

    def start(
        self,
        peer: str,
        keys: list[bytes],
        session: bool,
        deadline_ns: int,
        floors: Sequence[Version] = (),
        if_newer: bool = False,
        relay: bool = False,
    ) -> PeerRead:
        """A read that `finish_all` performs; never raises for an unreachable peer.

        `floors`: one per key, or empty; what is older comes back as BEHIND. `if_newer`: what is exactly at its floor
        comes back as CURRENT, without bytes. `relay`: the peer may ask others too, else it answers from its own memory.
        """
        pool = self._pool(keys[0][:SCOPE_BYTES])
        flags = RELAY if relay else LOCAL_ONLY
        if floors:
            flags |= FLOORS | IF_NEWER if if_newer else FLOORS
        request = GetRequest(
            [key[SCOPE_BYTES:] for key in keys],
            deadline_ms=_relay_deadline_ms(deadline_ns) if relay else 1,
            level=int(Level.SESSION if session else Level.EVENTUAL),
            flags=flags,
            floors=list(floors),
        )
        return PeerRead(self._tier, pool, peer, request, deadline_ns)

    def finish_all(
        self, pending: Sequence[PeerRead], place: Callable[[Sequence[int]], list[Slot | None]]
    ) -> list[tuple[list[BlockInfo], list[Slot | None], int]]:
        """Performs reads side by side, the first in this thread and the others in helpers: a peer that froze before its
        handshake or in the middle of its payload holds its reader until the deadline, and must hold nobody else."""
        others = [self._helpers.submit(read.finish, place) for read in pending[1:]]
        return [pending[0].finish(place), *(other.result() for other in others)]

    def exists(self, peer: str, keys: list[bytes], deadline_ns: int) -> list[int]:
        """MissReason numbers of the peer's own tiers; UNREACHABLE for all when it does not answer in time."""
        pool = self._pool(keys[0][:SCOPE_BYTES])
        unreachable = [int(MissReason.UNREACHABLE)] * len(keys)
        link, _ = pool.take(peer, deadline_ns, fresh=False)
        if link is None:
            return unreachable
        try:
            link.set_recv_timeout_ms(max(1, (deadline_ns - now_ns()) // 1_000_000))
            request = ExistsRequest([key[SCOPE_BYTES:] for key in keys], flags=int(GetFlag.LOCAL_ONLY))
            link.send(request, pool.next_id())
            _, reply = link.recv()
        except EmberError:
            link.close()
            return unreachable
        if not isinstance(reply, ExistsReply) or len(reply.reasons) != len(keys):
            link.close()
            return unreachable
        pool.give(peer, link)
        return reply.reasons

    def _pool(self, scope: bytes) -> FetchPool:
        with self._lock:
            pool = self._pools.get(scope)
            if pool is not None:
                self._pools.move_to_end(scope)
                return pool
            pool = self._pools[scope] = FetchPool(self._hello_for(scope))
            pool.set_peers(self._addresses)
            over = self._pools.popitem(last=False)[1] if len(self._pools) > POOLS_MAX else None
        if over is not None:
            over.close()
        return pool

    def close(self) -> None:
        """Closes idle connections; reads under way end at their deadline."""
        with self._lock:
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()
        self._helpers.shutdown(wait=False, cancel_futures=True)


class PeerRead:
    """One read from one peer."""

    def __init__(self, tier: Tier, pool: FetchPool, peer: str, request: GetRequest, deadline_ns: int) -> None:
        self._tier = tier
        self._pool = pool
        self._peer = peer
        self._request = request
        self._deadline_ns = deadline_ns

    def finish(
        self, place: Callable[[Sequence[int]], list[Slot | None]]
    ) -> tuple[list[BlockInfo], list[Slot | None], int]:
        """Infos per key, slots (verified bytes for hits; room to give back beside misses), elapsed nanoseconds."""
        sent_ns = now_ns()
        placed: dict[int, Slot] = {}

        def place_one(index: int, info: BlockInfo) -> memoryview | None:
            slot = place([info.length])[0]
            if slot is None:
                return None
            placed[index] = slot
            return self._tier.view(slot)

        result = self._pool.get(self._peer, self._request, place_one, self._deadline_ns)
        infos = result.infos
        slots: list[Slot | None] = [None] * len(infos)
        for index, slot in placed.items():
            info = infos[index]
            if info.reason == MissReason.NONE and checksum(self._tier.view(slot)) != info.checksum:
                infos[index] = BlockInfo(int(MissReason.CHECKSUM), info.version)
            # Kept also for misses, so that whoever reserved the room gives it back in one place.
            slots[index] = slot
        return infos, slots, now_ns() - sent_ns
