"""Gets: from the near node by pin and one copy, or from several nodes over TCP.

Why it exists: a load must end by its deadline with what arrived intact, and cost the engine's process few returns to
its interpreter lock: request, answer, one copy, unpin.
Laws: a get never raises for a missing or unreachable block; each key ends as a hit or with a reason. A pinned block is
believed only if the connection that guards it was still whole when the copy had ended. Over TCP every block is checked
against its checksum on arrival; a bad one is asked for elsewhere, else it is a miss. With a session's floors, a copy
below its floor is no hit, and a node that is behind or reaches nobody does not have the last word.
Limits: TRIES_MAX nodes per key and call; a round pins at most what the node allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from emberkv.client.asking import SlowAnswer, await_reply, node_deadline_ms, passed
from emberkv.client.connection import Connection
from emberkv.client.pool import LOAD, Node, Pool, assigned
from emberkv.client.routing import Endpoint, group_gets, split_batches
from emberkv.client.sinks import Pick, Sink
from emberkv.errors import EmberError, ProtocolError
from emberkv.messages import BlockInfo, GetFlag, GetReply, GetRequest, Unpin
from emberkv.net import LinkTimeout, now_ns
from emberkv.types import BATCH_KEYS_MAX, NO_VERSION, Level, MissReason, Version, round_up
from emberkv.wire.codec import get_reply_bytes

TRIES_MAX: Final = 3
"""The factor of most namespaces and one more: beyond it a miss is cheaper than another wait."""

REASONS: Final = tuple(MissReason)
PIN: Final = int(GetFlag.PIN)
FLOORS: Final = int(GetFlag.FLOORS)
ELSEWHERE: Final = frozenset((int(MissReason.BEHIND), int(MissReason.UNREACHABLE)))
"""What a session asks another node about: this one lacks what the session has seen, or was cut off from those who have
it, and the client may still reach them."""
ASK_AGAIN: Final = frozenset((MissReason.UNREACHABLE, MissReason.CHECKSUM, MissReason.QUOTA, MissReason.BEHIND))
"""Not the last word: nobody answered, the bytes were bad, the pin bound was reached, or another node was behind."""


class LoadResult(NamedTuple):
    """Result of `get_into`.

    `usable` leading blocks are in place and intact. `reasons` has one entry per key: NONE means that its row is intact,
    also behind a hole; the content of any other row is unspecified. `gil_returns` counts how often the load gave the
    interpreter lock away.
    """

    usable: int
    reasons: list[MissReason]
    gil_returns: int


def miss_reason(number: int) -> MissReason:
    """The reason that a node stated for a miss. Raises ProtocolError for the one that is meant for nodes."""
    if number == MissReason.CURRENT:
        raise ProtocolError("the node answered like to another node, without the bytes")
    return REASONS[number]


class Load:
    """One get call. `reasons` and `versions` are per key; the bytes are in the sink."""

    def __init__(
        self,
        pool: Pool,
        keys: Sequence[bytes],
        sink: Sink,
        deadline_ns: int,
        level: int,
        floors: Sequence[Version] = (),
    ) -> None:
        """`floors`: one per key, or empty."""
        self.pool = pool
        self.keys = keys
        self.sink = sink
        self.deadline_ns = deadline_ns
        self.level = level
        self.floors = floors
        self.reasons = [MissReason.UNREACHABLE] * len(keys)
        self.versions: list[Version] = [NO_VERSION] * len(keys)
        self.gil_returns = 0
        self.tries = 0
        self._tried: set[Endpoint] = set()
        self._restarted: list[Node] = []
        self._alone = False
        """The node that is asked over TCP was the only one to ask."""

    def run(self) -> None:
        """Tries nodes until every key is answered, the deadline has come, or nobody is left to ask."""
        pending: list[int] = list(range(len(self.keys)))
        while pending and self.tries < TRIES_MAX and now_ns() < self.deadline_ns:
            nodes = self._candidates()
            if not nodes:
                break
            self.tries += 1
            pending = self._near(nodes[0], pending) if nodes[0].endpoint.local else self._far(nodes, pending)
        if pending and passed(self.deadline_ns):
            for index in pending:
                if self.reasons[index] is not MissReason.BEHIND:
                    self.reasons[index] = MissReason.DEADLINE

    def _candidates(self) -> list[Node]:
        nodes = [node for node in self.pool.candidates() if node.endpoint not in self._tried]
        if not nodes and self._restarted:
            nodes = [self._restarted.pop()]
        return nodes

    def _lost(self, node: Node, connection: Connection, error: EmberError) -> None:
        """Ends a connection that failed; one that had worked may be lost to a restart, so the node may be redialled."""
        if isinstance(error, SlowAnswer):
            self.pool.drop(node, connection, None)
        else:
            if connection.reused and not isinstance(error, LinkTimeout) and node.endpoint not in self._tried:
                self._restarted.append(node)
            self.pool.drop(node, connection, error)
        self._tried.add(node.endpoint)

    def _lend(self, node: Node) -> Connection | None:
        try:
            return self.pool.lend(node, LOAD, self.deadline_ns)
        except EmberError:
            self._tried.add(node.endpoint)
            return None

    def _request(self, indices: Sequence[int], flags: int) -> GetRequest:
        keys = [self.keys[index] for index in indices]
        request = GetRequest(keys, node_deadline_ms(self.deadline_ns), self.level, flags)
        if self.floors:
            request.flags |= FLOORS
            request.floors = [self.floors[index] for index in indices]
        return request

    def _sort(self, indices: Sequence[int], infos: Sequence[BlockInfo]) -> list[Pick]:
        """Notes the reasons of an answer and returns its hits."""
        if len(infos) != len(indices):
            raise ProtocolError(f"{len(infos)} answers to {len(indices)} keys")
        picks: list[Pick] = []
        for index, info in zip(indices, infos, strict=True):
            reason = info.reason
            if reason:
                self.reasons[index] = miss_reason(reason)
                self.versions[index] = info.version
            else:
                picks.append((index, info))
        return picks

    def _open(self, indices: Iterable[int]) -> list[int]:
        """Those without a final answer."""
        return [index for index in indices if self.reasons[index] in ASK_AGAIN]

    def _done(self, picks: Sequence[Pick]) -> None:
        for index, info in picks:
            self.reasons[index] = MissReason.NONE
            self.versions[index] = info.version

    def _behind(self, node: Node, indices: Iterable[int]) -> list[int]:
        """Of what a node answered in full, the indices that a session asks another node about."""
        if self.level != Level.SESSION and not self.floors:
            return []
        found = [index for index in indices if self.reasons[index] in ELSEWHERE]
        if found:
            self._tried.add(node.endpoint)
        return found

    # -- near: pin, one copy, unpin -----------------------------------------------------------------------------------

    def _near(self, node: Node, indices: list[int]) -> list[int]:
        """Loads from a node of this machine; returns the indices to ask elsewhere."""
        connection = self._lend(node)
        if connection is None:
            return indices
        most = BATCH_KEYS_MAX
        if self.sink.block_bytes and connection.welcome.pin_bytes_max:
            most = min(most, max(1, connection.welcome.pin_bytes_max // round_up(self.sink.block_bytes)))
        batches = split_batches(indices, most)
        calls = connection.link.calls
        try:
            while batches and now_ns() < self.deadline_ns:
                over = self._near_batch(node, connection, batches[0])
                batches = [over, *batches[1:]] if over else batches[1:]
        except EmberError as error:
            self.gil_returns += connection.link.calls - calls
            self._lost(node, connection, error)
            left = self._open(index for batch in batches for index in batch)
            return sorted({*left, *self._behind(node, indices)})
        self.gil_returns += connection.link.calls - calls
        self.pool.give(node, connection)
        left = [index for batch in batches for index in batch]
        behind = self._behind(node, indices)
        return sorted({*left, *behind}) if behind else left

    def _near_batch(self, node: Node, connection: Connection, indices: list[int]) -> list[int]:
        """One round; returns what exceeded the pin bound and is to be asked for again, now that pins are back."""
        if connection.arena is None:
            raise ProtocolError(f"{node.endpoint} sent no arena")
        request_id = connection.send(self._request(indices, PIN), self.deadline_ns)
        reply = await_reply(self.pool, node, connection, GetReply, request_id, self.deadline_ns)
        picks = self._sort(indices, reply.infos)
        good, size = picks, self.sink.block_bytes
        if size and {info.length for _, info in picks} - {size}:
            good = [pick for pick in picks if not self._refused(pick)]
        if good and now_ns() < self.deadline_ns:
            self.gil_returns += self.sink.copy(connection.arena, good, indices)
            copied = good
        else:
            copied = []
            for index, _ in good:
                self.reasons[index] = MissReason.DEADLINE
        if reply.pin:
            # Also proves that the node had not ended this connection, and with it our pins, while we copied.
            connection.post_at_once(Unpin([reply.pin]))
        self._done(copied)
        return [index for index in indices if self.reasons[index] is MissReason.QUOTA] if picks else []

    def _refused(self, pick: Pick) -> bool:
        reason = self.sink.refuse(pick[1])
        if reason:
            self.reasons[pick[0]] = reason
        return bool(reason)

    # -- far: requests to several nodes at once, payload straight into place ------------------------------------------

    def _far(self, nodes: list[Node], indices: list[int]) -> list[int]:
        """Loads over TCP; returns the indices to ask elsewhere."""
        self._alone = len(nodes) == 1
        if self._alone and len(indices) <= BATCH_KEYS_MAX:
            return self._far_one(nodes[0], indices)
        asked: list[tuple[Node, Connection, list[tuple[int, list[int]]]]] = []
        again: list[int] = []
        for node, members in self._choose(nodes, indices):
            connection = self._lend(node)
            if connection is None:
                again += members
                continue
            calls = connection.link.calls
            try:
                sent = [
                    (connection.send(self._request(batch, 0), self.deadline_ns), batch)
                    for batch in split_batches(members)
                ]
            except EmberError as error:
                self._lost(node, connection, error)
                again += members
                continue
            finally:
                self.gil_returns += connection.link.calls - calls
            asked.append((node, connection, sent))
        for node, connection, sent in asked:
            again += self._far_answers(node, connection, sent)
        again.sort()
        return again

    def _far_one(self, node: Node, indices: list[int]) -> list[int]:
        """One request to the only node, written straight: what a single get may cost is counted in microseconds."""
        connection = self._lend(node)
        if connection is None:
            return indices
        calls = connection.link.calls
        try:
            request_id = connection.send(self._request(indices, 0), self.deadline_ns)
            again = self._far_batch(node, connection, request_id, indices)
        except EmberError as error:
            self._lost(node, connection, error)
            again = self._open(indices)
        else:
            self.pool.give(node, connection)
        self.gil_returns += connection.link.calls - calls
        return again

    def _choose(self, nodes: list[Node], indices: list[int]) -> list[tuple[Node, list[int]]]:
        """Whom to ask for what."""
        if self._alone:  # nothing to choose, and no key to hash for it
            return [(nodes[0], indices)]
        by_name = {node.name: node for node in reversed(nodes) if node.name and not node.endpoint.local}
        return assigned(group_gets(self.keys, indices, self.pool.cluster, by_name), by_name, nodes[0])

    def _far_answers(self, node: Node, connection: Connection, sent: list[tuple[int, list[int]]]) -> list[int]:
        again: list[int] = []
        calls = connection.link.calls
        try:
            while sent:
                again += self._far_batch(node, connection, *sent[0])
                sent.pop(0)
        except EmberError as error:
            self._lost(node, connection, error)
            again += self._open(index for _, batch in sent for index in batch)
        else:
            self.pool.give(node, connection)
        self.gil_returns += connection.link.calls - calls
        return again

    def _far_batch(self, node: Node, connection: Connection, request_id: int, indices: list[int]) -> list[int]:
        """One answer with its payload; returns the indices to ask elsewhere."""
        reply_bytes = get_reply_bytes(len(indices))
        reply = await_reply(self.pool, node, connection, GetReply, request_id, self.deadline_ns, reply_bytes)
        picks = self._sort(indices, reply.infos)
        for index, _ in picks:  # nothing is believed before it was checked
            self.reasons[index] = MissReason.UNREACHABLE
        size = self.sink.block_bytes
        if size and {info.length for _, info in picks} - {size}:
            refused = [self._refused(pick) for pick in picks]
            rest = iter(self.sink.place([pick for pick, no in zip(picks, refused, strict=True) if not no]))
            buffers = [
                memoryview(bytearray(info.length)) if no else next(rest)
                for (_, info), no in zip(picks, refused, strict=True)
            ]
        else:
            buffers = self.sink.place(picks)
        bad, arrived = self._take(node, connection, picks, buffers)
        if not arrived:
            raise LinkTimeout(f"{node.endpoint} stopped in the middle of an answer")
        if bad:
            self._tried.add(node.endpoint)
        return bad + self._behind(node, indices)

    def _take(
        self, node: Node, connection: Connection, picks: list[Pick], buffers: list[memoryview]
    ) -> tuple[list[int], bool]:
        """Receives and checks the payload: (indices with a bad checksum, whether all of it arrived).

        A block that was refused before is received, because it is on the way, and forgotten.
        """
        if not buffers:
            return [], True
        reasons, versions = self.reasons, self.versions
        bad: list[int] = []
        digests = connection.receive_blocks(buffers, self._payload_deadline_ns(node))
        for (index, info), digest in zip(picks, digests, strict=False):
            if reasons[index] is not MissReason.UNREACHABLE:
                continue
            if digest == info.checksum:
                reasons[index] = MissReason.NONE
                versions[index] = info.version
            else:
                reasons[index] = MissReason.CHECKSUM
                bad.append(index)
        return bad, len(digests) == len(buffers)

    def _payload_deadline_ns(self, node: Node) -> int:
        """A node that stops in the middle leaves time to ask another one for the rest."""
        if self._alone or not self.pool.candidates((node.endpoint, *self._tried)):
            return self.deadline_ns
        now = now_ns()
        return now + (self.deadline_ns - now) * 6 // 10
