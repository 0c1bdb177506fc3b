"""Puts and deletes: through staging to the near node, or as payload over TCP.

Why it exists: a save must never be acknowledged wrongly, not even when its connection ends in the middle.
Laws: every item ends with one outcome. A first send carries FRESH; once any byte of it may have reached a node, the one
retry goes without it and with the same put_id, so it may only fill. An item that was sent and not answered is UNKNOWN.
A staging slot is reused only after the node answered for it; a connection with unanswered slots is dropped.
Limits: CHUNKS_AHEAD requests in flight per connection; a chunk is at most CHUNK_BYTES_MAX and an eighth of the staging,
or one item.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from emberkv.checksum import checksum_held
from emberkv.client.asking import SlowAnswer, await_reply, node_deadline_ms, passed
from emberkv.client.connection import Connection
from emberkv.client.pool import SAVE, Node, Pool, assigned
from emberkv.client.routing import Endpoint, group_puts, split_batches, split_by_bytes
from emberkv.errors import EmberError, ProtocolError
from emberkv.messages import PutFlag, PutItem, PutReply, PutRequest
from emberkv.net import LinkTimeout, now_ns
from emberkv.types import PUT_ID_BYTES, PutOutcome, PutStatus, RefuseReason

CHUNKS_AHEAD: Final = 3
"""While the node copies one chunk out of staging, two may wait and a fourth is being filled (with one less a save of 32
MiB took 6 % longer, with one more no less)."""
STAGING_PARTS: Final = 8
CHUNK_BYTES_MAX: Final = 4 << 20
"""Few rooms that are used again and again stay in the processor's cache between the two copies: measured with two
processes that do nothing else, 32 MiB took 2.3 ms in 4 rooms of 1 MiB, 2.5 in 2 of 4, 3.0 when none was used twice."""
CHUNK_BYTES_FIRST: Final = 1 << 20
"""The node, whose part is the longer one, begins early; chunks then double, since each costs it a request."""
TCP_CHUNK_BYTES: Final = 32 << 20
"""One frame's payload: bounds what a node must hold for one request."""

UNREACHABLE: Final = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.UNREACHABLE)
LATE: Final = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.DEADLINE)
STAGING_FULL: Final = PutOutcome(PutStatus.REFUSED, reason=RefuseReason.STAGING_FULL)
UNKNOWN: Final = PutOutcome(PutStatus.UNKNOWN)

Flying = deque[tuple[int, list[int]]]
"""Requests without an answer yet: id and the indices of their items."""


class PutIds:
    """Makes put ids: 16 random bytes of this client's life, then a counter. A forked child must make its own."""

    def __init__(self) -> None:
        self.incarnation = os.urandom(16)
        self._lock = threading.Lock()
        self._next = 0

    def take(self, count: int) -> list[bytes]:
        """`count` new ids of 24 bytes."""
        with self._lock:
            first = self._next
            self._next += count
        width = PUT_ID_BYTES - len(self.incarnation)
        return [self.incarnation + number.to_bytes(width, "little") for number in range(first, first + count)]


class Save:
    """One put or delete call. `outcomes` has one entry per item once `run` returned."""

    def __init__(
        self,
        pool: Pool,
        items: Sequence[PutItem],
        views: Sequence[memoryview],
        *,
        level: int,
        deadline_ns: int,
        min_copies: int,
        delete: bool = False,
    ) -> None:
        self.pool = pool
        self.items = items
        self.views = views
        self.level = level
        self.deadline_ns = deadline_ns
        self.min_copies = min_copies
        self.delete = delete
        self.outcomes: list[PutOutcome | None] = [None] * len(items)
        self.retries = 0
        self._sends = [0] * len(items)
        self._tried: set[Endpoint] = set()
        self._restarted: list[Node] = []

    def run(self) -> list[PutOutcome]:
        """Sends everything; an item is sent at most twice. Never raises for an unreachable node."""
        while now_ns() < self.deadline_ns:
            pending = [
                index for index, outcome in enumerate(self.outcomes) if outcome is None and self._sends[index] < 2
            ]
            nodes = self._candidates() if pending else []
            if not nodes:
                break
            self.retries += any(self._sends)
            if nodes[0].endpoint.local:
                self._to_near(nodes[0], pending)
            else:
                self._to_far(nodes, pending)
        unsent = LATE if passed(self.deadline_ns) else UNREACHABLE
        return [
            outcome if outcome is not None else (UNKNOWN if self._sends[index] else unsent)
            for index, outcome in enumerate(self.outcomes)
        ]

    def _candidates(self) -> list[Node]:
        nodes = self.pool.candidates(self._tried)
        if not nodes and self._restarted:
            nodes = [self._restarted.pop()]
        return nodes

    def _lend(self, node: Node) -> Connection | None:
        try:
            return self.pool.lend(node, SAVE, self.deadline_ns, fresh=True)
        except EmberError:
            self._tried.add(node.endpoint)
            return None

    def _lost(self, node: Node, connection: Connection, error: EmberError, flying: Flying) -> None:
        for request_id, chunk in flying:  # an answer may have overtaken the one that never came
            early = connection.early.get(request_id)
            if isinstance(early, PutReply) and len(early.outcomes) == len(chunk):
                self._answered(chunk, early)
        if connection.reused and not isinstance(error, LinkTimeout) and node.endpoint not in self._tried:
            self._restarted.append(node)
        self.pool.drop(node, connection, None if isinstance(error, SlowAnswer) else error)
        self._tried.add(node.endpoint)

    def _by_flag(self, indices: Sequence[int]) -> list[list[int]]:
        """First sends and retries apart, for FRESH is a flag of the whole request."""
        fresh = [index for index in indices if not self._sends[index]]
        again = [index for index in indices if self._sends[index]]
        return [part for part in (fresh, again) if part]

    def _request(self, indices: Sequence[int]) -> PutRequest:
        """A request for items of one kind (`_by_flag`); notes them as sent, because from here on they may arrive."""
        flags = 0 if self._sends[indices[0]] else int(PutFlag.FRESH)
        for index in indices:
            self._sends[index] += 1
        return PutRequest(
            [self.items[index] for index in indices],
            self.level,
            node_deadline_ms(self.deadline_ns),
            flags,
            self.min_copies,
            b"",
            self.delete,
        )

    def _answered(self, indices: Sequence[int], reply: PutReply) -> None:
        if len(reply.outcomes) != len(indices):
            raise ProtocolError(f"{len(reply.outcomes)} outcomes for {len(indices)} puts")
        for index, outcome in zip(indices, reply.outcomes, strict=True):
            self.outcomes[index] = outcome

    # -- near: copy into staging while the node works on the chunk before ---------------------------------------------

    def _to_near(self, node: Node, indices: list[int]) -> None:
        connection = self._lend(node)
        if connection is None:
            return
        flying: Flying = deque()
        try:
            self._pipeline(node, connection, indices, flying)
        except EmberError as error:
            self._lost(node, connection, error, flying)
        else:
            self.pool.give(node, connection)

    def _pipeline(self, node: Node, connection: Connection, indices: list[int], flying: Flying) -> None:
        lengths = [item.length for item in self.items]
        size = connection.staging.total_bytes if connection.staging is not None else 0
        chunk_bytes = max(1, min(CHUNK_BYTES_MAX, size // STAGING_PARTS))
        chunks = deque(
            chunk
            for part in self._by_flag(indices)
            for chunk in split_by_bytes(part, lengths, chunk_bytes, bytes_first=CHUNK_BYTES_FIRST)
        )
        while chunks or flying:
            if chunks and now_ns() >= self.deadline_ns:
                chunks.clear()
            elif chunks and len(flying) < CHUNKS_AHEAD:
                staged = self._stage(connection, chunks[0])
                chunks[0] = chunks[0][len(staged) :]
                if staged:
                    flying.append((connection.send(self._request(staged), self.deadline_ns), staged))
                elif not flying:  # it will never fit: this save is dropped, and counted
                    self.outcomes[chunks[0].pop(0)] = STAGING_FULL
                if not chunks[0]:
                    chunks.popleft()
                if staged or not flying:
                    continue
            if flying:
                chunk = flying[0][1]
                self._take_answer(node, connection, flying)
                self._unstage(connection, chunk)

    def _stage(self, connection: Connection, chunk: list[int]) -> list[int]:
        """Copies the items of a chunk into staging as far as there is room; returns those that are there."""
        if self.delete:
            return chunk
        staged: list[int] = []
        for index in chunk:
            item = self.items[index]
            offset = connection.staging.reserve(item.length) if connection.staging is not None else None
            if offset is None or connection.staging is None:
                break
            item.offset = offset
            # numpy gives the interpreter lock away while it copies; a slice assignment would hold it.
            target = connection.staging.data[offset : offset + item.length]
            np.copyto(target, np.frombuffer(self.views[index], np.uint8))
            staged.append(index)
        return staged

    def _unstage(self, connection: Connection, indices: Sequence[int]) -> None:
        if not self.delete and connection.staging is not None:
            for index in indices:
                connection.staging.release(self.items[index].offset)

    # -- far: requests to several nodes at once, then their answers ---------------------------------------------------

    def _to_far(self, nodes: list[Node], indices: list[int]) -> None:
        by_name = {node.name: node for node in reversed(nodes) if node.name and not node.endpoint.local}
        keys = [item.key for item in self.items]
        groups = group_puts(keys, indices, self.pool.cluster, by_name)
        sent: list[tuple[Node, Connection, Flying]] = []
        for node, members in assigned(groups, by_name, nodes[0]):
            connection = self._lend(node)
            if connection is None:
                continue
            flying: Flying = deque()
            try:
                self._send_chunks(node, connection, members, flying)
            except EmberError as error:
                self._lost(node, connection, error, flying)
                continue
            sent.append((node, connection, flying))
        for node, connection, flying in sent:
            try:
                while flying:
                    self._take_answer(node, connection, flying)
            except EmberError as error:
                self._lost(node, connection, error, flying)
            else:
                self.pool.give(node, connection)

    def _send_chunks(self, node: Node, connection: Connection, members: list[int], flying: Flying) -> None:
        """Sends all chunks of one node, with at most CHUNKS_AHEAD unanswered."""
        lengths = [item.length for item in self.items]
        for part in self._by_flag(members):
            chunks = split_batches(part) if self.delete else split_by_bytes(part, lengths, TCP_CHUNK_BYTES)
            for chunk in chunks:
                if now_ns() >= self.deadline_ns:
                    return
                while len(flying) >= CHUNKS_AHEAD:
                    self._take_answer(node, connection, flying)
                payload = [] if self.delete else [self.views[index] for index in chunk]
                for index, view in zip(chunk, payload, strict=not self.delete):
                    self.items[index].checksum = checksum_held(view)
                    self.items[index].offset = 0
                flying.append((connection.send(self._request(chunk), self.deadline_ns, payload), chunk))

    def _take_answer(self, node: Node, connection: Connection, flying: Flying) -> None:
        request_id, chunk = flying[0]
        self._answered(chunk, await_reply(self.pool, node, connection, PutReply, request_id, self.deadline_ns))
        flying.popleft()
