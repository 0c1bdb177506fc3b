"""Strong records between connections and the store: what serve.py calls for a strong namespace.

Why it exists: these bytes do not live in the arena, so their way in and out differs from a block's: one record at a
time, on the connection's thread, each with its own commit.
Laws: a request that is refused still has its payload taken off the wire, so that the connection stays in step.
Limits: HELD_BYTES_MAX of record bytes in this node's memory for all connections, REPLY_BYTES_MAX in one answer; beyond
them a read is a miss with reason quota and a write is refused for want of space.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.errors import Unavailable
from emberkv.messages import BlockInfo, GetReply, GetRequest, PutFlag, PutItem, PutReply, PutRequest
from emberkv.net.tcp_link import TcpLink, transfer_deadline_ns
from emberkv.node.connections import PinnedTotal, scratch
from emberkv.node.runtime import Runtime
from emberkv.node.strong import DATA_BYTES_MAX, StrongRecords
from emberkv.ports import Slot, Tier
from emberkv.storage.staging import StagingArea
from emberkv.types import MissReason, PutOutcome, PutStatus, RefuseReason

HELD_BYTES_MAX: Final = 64 << 20
"""128 records of the largest size, or thousands of the usual ones, at the same moment."""
REPLY_BYTES_MAX: Final = 16 << 20
FRESH: Final = int(PutFlag.FRESH)

_NO_SPACE: Final = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.NO_SPACE)
_TOO_LARGE: Final = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.TOO_LARGE)
_QUOTA: Final = BlockInfo(int(MissReason.QUOTA))


class StrongEdge:
    """Requests on strong namespaces, for all connections of a node."""

    def __init__(self, records: StrongRecords, runtime: Runtime, tier: Tier) -> None:
        self.records = records
        self._runtime = runtime
        self._tier = tier
        self._held = PinnedTotal(HELD_BYTES_MAX)

    # -- reads ---------------------------------------------------------------------------------------------------

    def get_tcp(self, link: TcpLink, request: int, message: GetRequest, scope: bytes) -> None:
        """Answers a read over TCP."""
        infos, found = self._read(message, scope)
        payload = [data for data in found if data is not None]
        try:
            link.send(GetReply(infos), request, payload)
        finally:
            self._held.give_back(sum(data.nbytes for data in payload))

    def get_local(self, message: GetRequest, scope: bytes) -> tuple[list[BlockInfo], list[Slot | None]]:
        """Copies into slots of the arena, which the caller owns: the local socket answers with places, not bytes."""
        infos, found = self._read(message, scope)
        slots: list[Slot | None] = [None] * len(infos)
        try:
            hits = [index for index, data in enumerate(found) if data is not None]
            for index, slot in zip(hits, self._reserve([infos[index].length for index in hits]), strict=True):
                slots[index], data = slot, found[index]
                if slot is None or data is None:
                    infos[index] = _QUOTA
                else:
                    infos[index] = msgspec.structs.replace(infos[index], offset=slot.offset)
                    np.copyto(np.frombuffer(self._tier.view(slot), np.uint8), np.frombuffer(data, np.uint8))
        finally:
            self._held.give_back(sum(data.nbytes for data in found if data is not None))
        return infos, slots

    def exists(self, keys: list[bytes], scope: bytes, deadline_ns: int) -> list[int]:
        """MissReason numbers; NONE where a record is there."""
        return [self.records.get(scope, key, deadline_ns)[0].reason for key in keys]

    def _read(self, message: GetRequest, scope: bytes) -> tuple[list[BlockInfo], list[memoryview | None]]:
        """Infos and bytes; the bytes of hits are counted as held until the caller gives them back."""
        deadline_ns = self._runtime.now_ns() + message.deadline_ms * 1_000_000
        infos: list[BlockInfo] = []
        found: list[memoryview | None] = []
        total = 0
        for key in message.keys:
            info, data = self.records.get(scope, key, deadline_ns)
            if data is not None and (total + data.nbytes > REPLY_BYTES_MAX or not self._held.take(data.nbytes)):
                info, data = _QUOTA, None
            total += data.nbytes if data is not None else 0
            infos.append(info)
            found.append(data)
        return infos, found

    def _reserve(self, lengths: list[int]) -> list[Slot | None]:
        if not lengths:
            return []
        effects = self._runtime.step(ev.Reserve(self._runtime.now_ns(), lengths))
        reserved = next(effect for effect in effects if isinstance(effect, fx.Reserved))
        self._runtime.perform([effect for effect in effects if effect is not reserved])
        return reserved.slots

    # -- writes --------------------------------------------------------------------------------------------------

    def put_tcp(
        self, link: TcpLink, message: PutRequest, scope: bytes, refuse_abandoned: Callable[[], None]
    ) -> PutReply:
        """Stores or deletes records whose bytes follow on the link. Raises Unavailable when they do not come whole:
        those before are stored then, and nobody is told. `refuse_abandoned` raises
        when the client has hung up."""

        def take(item: PutItem) -> memoryview | None:
            fits = item.length <= DATA_BYTES_MAX and self._held.take(item.length)
            buffers = [memoryview(bytearray(item.length))] if fits else scratch(item.length)
            received = link.recv_payload(buffers, transfer_deadline_ns(item.length))
            if received != item.length:
                if fits:
                    self._held.give_back(item.length)
                raise Unavailable(f"{link.peer_address} stopped in the middle of a payload")
            return buffers[0] if fits else None

        return self._put(message, scope, take, refuse_abandoned)

    def put_local(
        self,
        staging: StagingArea | None,
        message: PutRequest,
        scope: bytes,
        refuse_abandoned: Callable[[], None],
    ) -> PutReply:
        """Stores or deletes records whose bytes lie in the client's staging."""

        def take(item: PutItem) -> memoryview | None:
            if staging is None or item.length > DATA_BYTES_MAX:
                return None
            view = staging.view(item.offset, item.length)
            # A copy first: what the client writes meanwhile must not come between checksum and store.
            return memoryview(bytes(view)) if self._held.take(item.length) else None

        return self._put(message, scope, take, refuse_abandoned)

    def _put(
        self,
        message: PutRequest,
        scope: bytes,
        take: Callable[[PutItem], memoryview | None],
        refuse_abandoned: Callable[[], None],
    ) -> PutReply:
        deadline_ns = self._runtime.now_ns() + message.deadline_ms * 1_000_000
        fresh = bool(message.flags & FRESH)
        outcomes: list[PutOutcome] = []
        for item in message.items:
            if message.delete:
                refuse_abandoned()
                outcomes.append(self.records.put(scope, item, None, deadline_ns, fresh=fresh))
                continue
            data = take(item)
            if data is None:
                outcomes.append(_TOO_LARGE if item.length > DATA_BYTES_MAX else _NO_SPACE)
                continue
            try:
                refuse_abandoned()
                outcomes.append(self.records.put(scope, item, data, deadline_ns, fresh=fresh))
            finally:
                self._held.give_back(item.length)
        return PutReply(outcomes)
