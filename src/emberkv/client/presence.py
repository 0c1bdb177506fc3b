"""Which keys are present: one question to the near node, or one to each node that owns some of the keys.

Why it exists: a scheduler asks before it decides; the question must not change what is cached and never raise.
Laws: "absent" is also the answer when nobody could be asked in time, for then the block cannot be used either.
Limits: TRIES_MAX rounds; requests of 128 keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from emberkv.client.asking import SlowAnswer, await_reply, node_deadline_ms
from emberkv.client.connection import Connection
from emberkv.client.pool import LOAD, Node, Pool, assigned
from emberkv.client.routing import Endpoint, group_gets, split_batches
from emberkv.errors import EmberError, ProtocolError
from emberkv.messages import ExistsReply, ExistsRequest
from emberkv.net import now_ns

TRIES_MAX: Final = 2


def present(pool: Pool, keys: Sequence[bytes], deadline_ns: int) -> list[bool]:
    """Whether each key is present, in order."""
    answers: list[bool | None] = [None] * len(keys)
    tried: set[Endpoint] = set()
    for _ in range(TRIES_MAX):
        pending = [index for index, answer in enumerate(answers) if answer is None]
        nodes = pool.candidates(tried)
        if not pending or not nodes or now_ns() >= deadline_ns:
            break
        _ask(pool, nodes, keys, pending, answers, tried, deadline_ns)
    return [bool(answer) for answer in answers]


def _ask(
    pool: Pool,
    nodes: list[Node],
    keys: Sequence[bytes],
    pending: list[int],
    answers: list[bool | None],
    tried: set[Endpoint],
    deadline_ns: int,
) -> None:
    """One round: all questions are sent before the first answer is awaited."""
    by_name = {node.name: node for node in reversed(nodes) if node.name and not node.endpoint.local}
    groups = {"": pending} if nodes[0].endpoint.local else group_gets(keys, pending, pool.cluster, by_name)
    sent: list[tuple[Node, Connection, list[tuple[int, list[int]]]]] = []
    for node, members in assigned(groups, by_name, nodes[0]):
        try:
            connection = pool.lend(node, LOAD, deadline_ns, fresh=True)
        except EmberError:
            tried.add(node.endpoint)
            continue
        try:
            questions = [
                (
                    connection.send(
                        ExistsRequest([keys[i] for i in batch], node_deadline_ms(deadline_ns)), deadline_ns
                    ),
                    batch,
                )
                for batch in split_batches(members)
            ]
        except EmberError as error:
            tried.add(node.endpoint)
            pool.drop(node, connection, error)
            continue
        sent.append((node, connection, questions))
    for node, connection, questions in sent:
        try:
            for request_id, batch in questions:
                reply = await_reply(pool, node, connection, ExistsReply, request_id, deadline_ns)
                if len(reply.reasons) != len(batch):
                    raise ProtocolError(f"{len(reply.reasons)} answers to {len(batch)} keys")
                for index, reason in zip(batch, reply.reasons, strict=True):
                    answers[index] = not reason
        except EmberError as error:
            tried.add(node.endpoint)
            pool.drop(node, connection, None if isinstance(error, SlowAnswer) else error)
        else:
            pool.give(node, connection)
