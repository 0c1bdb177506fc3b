"""Waiting for an answer with patience: a slow node is waited for, a frozen one is left.

Why it exists: a socket timeout cannot tell "busy" from "stopped"; asking the node for something trivial can.
Laws: no wait passes the deadline; a frozen node costs a call at most a quarter of its time and one probe.
Limits: one probe per answer (pool.PROBE_MS).
"""

from __future__ import annotations

from typing import Final, TypeVar

from emberkv.client.connection import Connection, ms_left
from emberkv.client.pool import Node, Pool
from emberkv.net import LinkTimeout, now_ns

Reply = TypeVar("Reply")

PATIENCE_MIN_NS: Final = 20_000_000
"""Below this a probe would mostly find nodes that were about to answer."""
MARGIN_MS_MAX: Final = 100
"""A node whose peers froze answers at its deadline with what arrived, which it must check and the client must copy: for
94 MB, 10 ms were too few, and the whole prefix was lost (seen in the demo, scene e)."""
TICK_NS: Final = 10_000_000
"""A socket timeout may end up to one kernel tick (10 ms at most) early; a wait that ended so is still the deadline."""


class SlowAnswer(LinkTimeout):
    """The deadline came first, but the node is alive: the connection is dropped, the node is not blamed."""


def passed(deadline_ns: int) -> bool:
    """Whether a wait until `deadline_ns` can be called over."""
    return now_ns() >= deadline_ns - TICK_NS


def node_deadline_ms(deadline_ns: int) -> int:
    """Deadline to give to the node: a little before ours, so that its partial answer still arrives."""
    left = ms_left(deadline_ns)
    return max(1, left - min(MARGIN_MS_MAX, left // 10))


def await_reply(
    pool: Pool, node: Node, connection: Connection, kind: type[Reply], request_id: int, deadline_ns: int, size: int = 0
) -> Reply:
    """The answer to a request. Raises LinkTimeout for a node that seems frozen (early if another one could be asked),
    SlowAnswer for one that is alive and late, and what Connection.receive raises."""
    now = now_ns()
    patience_ns = min(deadline_ns, now + max(PATIENCE_MIN_NS, (deadline_ns - now) // 4))
    try:
        return connection.receive(kind, request_id, patience_ns, size)
    except LinkTimeout:
        if connection.link.closed or passed(deadline_ns):
            raise
    alive = pool.alive(node, deadline_ns)
    if not alive and pool.candidates((node.endpoint,)):
        raise LinkTimeout(f"{node.endpoint} does not answer")
    try:
        return connection.receive(kind, request_id, deadline_ns, size)
    except LinkTimeout as error:
        if alive and not connection.link.closed:
            raise SlowAnswer(f"{node.endpoint} did not answer in time") from error
        raise
