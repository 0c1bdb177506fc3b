"""Pins: blocks read where they lie, in the near node's memory.

Why it exists: an engine that can use the bytes in place needs no copy at all.
Laws: a view may be read only until `unpin`; the node keeps the bytes until then, or until this process or the
connection ends. What was read is to be believed only if `unpin` returned True.
Limits: a connection pins at most what the node allows; keys beyond that have reason QUOTA.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from emberkv.client.asking import await_reply, node_deadline_ms, passed
from emberkv.client.connection import Connection
from emberkv.client.loads import FLOORS, miss_reason
from emberkv.client.pool import PIN, Node, Pool
from emberkv.errors import EmberError, ProtocolError
from emberkv.messages import GetFlag, GetReply, GetRequest, Unpin
from emberkv.types import NO_VERSION, MissReason, Version

PIN_FLAG = int(GetFlag.PIN)


class Pinned:
    """Pinned blocks: `views[i]` is a read-only view of the i-th block, or None with a reason; `versions[i]` is its
    version, or that of the tombstone (DELETED). A context manager."""

    def __init__(
        self,
        connection: Connection | None,
        pin: int,
        views: list[memoryview | None],
        reasons: list[MissReason],
        versions: list[Version],
    ) -> None:
        self.views = views
        self.reasons = reasons
        self.versions = versions
        self._connection = connection
        self._pin = pin
        self._whole = True

    def unpin(self) -> bool:
        """Gives the blocks back; the views must not be used any more. Idempotent.

        False: the pin had ended before (the connection was lost), so what was read since may be wrong.
        """
        connection, self._connection = self._connection, None
        if connection is None:
            return self._whole
        for view in self.views:
            if view is not None:
                try:
                    view.release()
                except BufferError:
                    pass  # an array of the caller still looks through it
        if self._pin:
            try:
                # Room for an unpin is always there, unless the node has stood still for thousands of them.
                connection.post_at_once(Unpin([self._pin]))
            except EmberError:
                connection.close()
                self._whole = False
        return self._whole

    def __enter__(self) -> Pinned:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unpin()


def pin_blocks(
    pool: Pool, keys: Sequence[bytes], deadline_ns: int, level: int, floors: Sequence[Version] = ()
) -> Pinned:
    """Pins what the near node has of `keys` (at most 128). Never raises for a missing block or node."""
    nodes = [node for node in pool.candidates() if node.endpoint.local]
    request = GetRequest(list(keys), 1, level, PIN_FLAG | FLOORS if floors else PIN_FLAG, 0, list(floors))
    for node in nodes[:2]:
        try:
            connection = pool.lend(node, PIN, deadline_ns)
        except EmberError:
            continue
        try:
            request.deadline_ms = node_deadline_ms(deadline_ns)
            pinned = _ask(pool, node, connection, request, deadline_ns)
        except EmberError as error:
            pool.drop(node, connection, error)
            continue
        pool.give(node, connection)
        return pinned
    reason = MissReason.DEADLINE if passed(deadline_ns) else MissReason.UNREACHABLE
    return not_pinned(len(keys), reason)


def not_pinned(count: int, reason: MissReason) -> Pinned:
    """The result when nobody could be asked for any of `count` keys."""
    return Pinned(None, 0, [None] * count, [reason] * count, [NO_VERSION] * count)


def _ask(pool: Pool, node: Node, connection: Connection, request: GetRequest, deadline_ns: int) -> Pinned:
    request_id = connection.send(request, deadline_ns)
    reply = await_reply(pool, node, connection, GetReply, request_id, deadline_ns)
    if connection.arena is None or len(reply.infos) != len(request.keys):
        raise ProtocolError(f"{node.endpoint} answered {len(reply.infos)} of {len(request.keys)} keys")
    arena = connection.arena.view
    size = len(arena)
    views: list[memoryview | None] = []
    for info in reply.infos:
        if info.reason:
            views.append(None)
            continue
        end = info.offset + info.length
        if end > size:
            raise ProtocolError("the node named a block outside its arena")
        views.append(arena[info.offset : end])
    reasons = [miss_reason(info.reason) for info in reply.infos]
    return Pinned(connection, reply.pin, views, reasons, [info.version for info in reply.infos])
