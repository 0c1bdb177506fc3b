"""The nodes that a client knows, whether they answer, and the open connections to them.

Why it exists: calls from many threads, nodes that die, freeze and come back, and forks, all meet here and only here.
Laws: a connection is lent to one caller at a time; a node that failed a call is passed over until the keeper has shaken
hands with it again, so that one dead node costs one call its patience, not each; nothing here waits past a deadline.
A failed call ends no pin: connections of the PIN lane live on until the node itself has ended them or begun a new life.
A forked child starts with no connection and opens its own.
Limits: CONNECTIONS_MAX per node and lane; back-off 20 to 500 ms, jittered; learned nodes as the map has them.
Life of a node here: untried -> up <-> failed (keeper re-dials) ; refused (only after REFUSED_RETRY_MS again).
"""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeVar

from emberkv.client.connection import Arena, Connection, dial, ms_left
from emberkv.client.counters import Counters
from emberkv.client.routing import Endpoint, rank_endpoints
from emberkv.errors import EmberError, HandshakeRefused, Unavailable
from emberkv.messages import Hello, MapReply, MapRequest, Message, Welcome
from emberkv.net import now_ns

Reply = TypeVar("Reply")

LOAD: Final = "load"
SAVE: Final = "save"
PIN: Final = "pin"
CONTROL: Final = "control"
CONNECTIONS_MAX: Final = {LOAD: 4, SAVE: 2, PIN: 2, CONTROL: 2}
"""Per node. Loads overlap in a few threads; each save connection has staging of its own; pins live on their own
connections so that they do not use up the byte bound of loads."""
BACKOFF_MIN_MS: Final = 20
BACKOFF_MAX_MS: Final = 500
REFUSED_RETRY_MS: Final = 5000
"""A node that refused the handshake says the same again until somebody changes its configuration."""
MAP_PERIOD_MS: Final = 5000
"""The map is asked again this often even when nothing failed, to learn of nodes that joined."""
PROBE_MS: Final = 50
"""A live node answers a map request from memory in well under a millisecond; this is two bad scheduler delays."""

_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _reset_in_child() -> None:
    for pool in list(_pools):
        pool.reset()


os.register_at_fork(after_in_child=_reset_in_child)


def host_boot_id() -> str:
    """The kernel's boot id: equal means same machine. Empty when it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def named(endpoint: Endpoint, reason: str) -> str:
    """A reason with the endpoint before it, unless it names the address itself."""
    reason = reason.removeprefix("no node answers at ")
    return reason if endpoint.address in reason else f"{endpoint}: {reason}"


class Node:
    """One endpoint of a node, and its connections. All fields are the pool's, under its lock."""

    __slots__ = ("arena", "endpoint", "failures", "idle", "name", "open", "reason", "retry_at_ns", "welcome")

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self.endpoint = endpoint
        self.name = name
        self.idle: dict[str, list[Connection]] = {}
        self.open: dict[str, int] = {}
        self.arena: Arena | None = None
        self.welcome: Welcome | None = None
        self.failures = 0
        self.retry_at_ns = 0
        self.reason = ""


def assigned(
    groups: Mapping[str, list[int]], by_name: Mapping[str, Node], anyone: Node
) -> list[tuple[Node, list[int]]]:
    """Whom to ask for which indices, of groups by name; `anyone` takes those of names that are not usable.

    Each node once, and in one order for all callers: so no two of them hold a connection that the other waits for.
    """
    merged: dict[Endpoint, tuple[Node, list[int]]] = {}
    for name, members in groups.items():
        node = by_name.get(name, anyone)
        merged.setdefault(node.endpoint, (node, []))[1].extend(members)
    return [(node, sorted(members)) for _, (node, members) in sorted(merged.items())]


class Pool:
    """Lends connections; learns nodes from the map; brings failed ones back in a background thread (the keeper)."""

    def __init__(
        self,
        endpoints: tuple[Endpoint, ...],
        make_hello: Callable[[str], Hello],
        counters: Counters,
        *,
        connect_timeout_ms: int,
        prefer_local: bool = True,
    ) -> None:
        self.given = endpoints
        self.cluster: MapReply | None = None
        self._welcome: Welcome | None = None
        """Outlives a fork: what the namespace is does not depend on who asks."""
        self._make_hello = make_hello
        self._counters = counters
        self._connect_timeout_ms = connect_timeout_ms
        self._prefer_local = prefer_local
        self._host_id = host_boot_id()
        self._closed = False
        self.reset()
        _pools.add(self)

    def reset(self) -> None:
        """Forgets every connection without closing it: at the start, and in a forked child (net closes its copies)."""
        # The lock itself where nobody waits: a Condition is entered and left in Python.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        """Callers that wait for a connection."""
        self._wake = threading.Event()
        self._keeper: threading.Thread | None = None
        self._map_due = True
        self._map_at_ns = 0
        self._nodes: list[Node] = []
        self._rank(None)

    def open(self, deadline_ns: int) -> None:
        """First contact: a node that answers, and its map. Raises HandshakeRefused when nothing but refusals came."""
        refused: HandshakeRefused | None = None
        for node in self.candidates():
            try:
                self.give(node, self.lend(node, CONTROL, deadline_ns))
                self._ask_map(node, deadline_ns)
                return
            except HandshakeRefused as error:
                refused = error
            except Unavailable:
                continue
        if refused is not None:
            self.close()
            raise refused

    def reasons(self) -> str:
        """Why the nodes that failed did, in one line."""
        with self._changed:
            return "; ".join(named(node.endpoint, node.reason) for node in self._nodes if node.reason) or "none known"

    # -- which nodes --------------------------------------------------------------------------------------------------

    def _rank(self, cluster: MapReply | None) -> None:
        known = {node.endpoint: node for node in self._nodes}
        ranked: list[Node] = []
        for endpoint, name in rank_endpoints(self.given, cluster, self._host_id, prefer_local=self._prefer_local):
            node = known.pop(endpoint, None) or Node(endpoint, name)
            node.name = name or node.name
            ranked.append(node)
        self._nodes = ranked
        self.cluster = cluster
        for gone in known.values():  # the map no longer has it; connections out on loan end when they come back
            gone.reason = "left the map"
            self._close_idle(gone)

    def candidates(self, tried: Collection[Endpoint] = ()) -> list[Node]:
        """Nodes worth asking, best first: up or never tried, and not in `tried`."""
        # Without the lock: the list is only ever replaced as a whole, and `failures` is one number.
        return [node for node in self._nodes if not node.failures and node.endpoint not in tried]

    def nodes(self) -> list[Node]:
        """All known nodes, best first."""
        with self._changed:
            return list(self._nodes)

    def welcome(self) -> Welcome | None:
        """What the node that was dialled last said of the cluster and the namespace; None before any answered."""
        return self._welcome

    # -- lending ------------------------------------------------------------------------------------------------------

    def lend(self, node: Node, lane: str, deadline_ns: int, *, fresh: bool = False) -> Connection:
        """A connection for one caller; `fresh` looks first whether an idle one is still alive (one more call).

        Raises Unavailable when the node does not answer, refuses, or all its connections stay busy.
        """
        with self._lock:
            while True:
                if self._closed:
                    raise Unavailable("the client is closed")
                idle = node.idle.get(lane)
                if idle:
                    connection = idle.pop()
                    if not connection.link.closed and (not fresh or connection.link.is_fresh()):
                        return connection
                    self._discard(node, connection)
                    continue
                if node.open.get(lane, 0) < CONNECTIONS_MAX[lane]:
                    node.open[lane] = node.open.get(lane, 0) + 1
                    break
                left_ns = deadline_ns - now_ns()
                if left_ns <= 0 or not self._wait(left_ns):
                    raise Unavailable(f"all {CONNECTIONS_MAX[lane]} {lane} connections to {node.endpoint} are busy")
        return self._dial(node, lane, min(self._connect_timeout_ms, ms_left(deadline_ns)))

    def _wait(self, left_ns: int) -> bool:
        """Waits for a connection to come back, with the lock held; False after `left_ns`."""
        self._waiting += 1
        try:
            return self._changed.wait(left_ns / 1e9)
        finally:
            self._waiting -= 1

    def _dial(self, node: Node, lane: str, timeout_ms: int) -> Connection:
        """Opens a connection whose place in `open` is taken already."""
        try:
            connection = dial(node.endpoint, self._make_hello(lane), lane, timeout_ms, node.arena)
        except EmberError as error:
            with self._changed:
                node.open[lane] -= 1
                self._changed.notify()
            self.fail(node, error)
            if isinstance(error, Unavailable | HandshakeRefused):
                raise
            raise Unavailable(f"{node.endpoint}: {error}") from error
        with self._changed:
            self._counters.add("connects")
            before = node.welcome
            restarted = before is not None and before.incarnation != connection.welcome.incarnation
            if before is not None and (node.failures or restarted):
                self._counters.add("reconnects")
            if restarted:
                self._close_idle(node)
            node.welcome = self._welcome = connection.welcome
            node.name = connection.welcome.node
            node.arena = connection.arena or node.arena
            node.failures, node.reason = 0, ""
            self._changed.notify_all()
        return connection

    def give(self, node: Node, connection: Connection) -> None:
        """Takes a connection back after a call that ended well."""
        connection.reused = True
        with self._lock:
            if self._closed or node not in self._nodes or connection.link.closed:
                self._discard(node, connection)
            else:
                node.idle.setdefault(connection.lane, []).append(connection)
            if self._waiting:
                self._changed.notify()

    def drop(self, node: Node, connection: Connection, error: EmberError | None) -> None:
        """Takes a connection back that cannot be used again; with `error`, the node failed and is passed over.

        A loss of a connection that had worked before may mean no more than a restart: its idle sisters go too, but for
        those that may hold pins.
        """
        with self._changed:
            self._discard(node, connection)
            self._changed.notify()
        if error is not None:
            self.fail(node, error)

    def _discard(self, node: Node, connection: Connection) -> None:
        connection.close()
        node.open[connection.lane] = max(0, node.open.get(connection.lane, 0) - 1)

    def _close_idle(self, node: Node, *, spare_pins: bool = False) -> None:
        """Ends the idle connections; with `spare_pins` not those of PIN that are sound, as far as can be seen here."""
        idle, node.idle = node.idle, {}
        for lane, connections in idle.items():
            for connection in connections:
                if spare_pins and lane == PIN and connection.link.is_fresh():
                    node.idle.setdefault(PIN, []).append(connection)
                else:
                    self._discard(node, connection)

    def fail(self, node: Node, error: EmberError) -> None:
        """Passes the node over until the keeper has shaken hands with it again; asks for a new map."""
        with self._changed:
            node.failures += 1
            node.reason = str(error)
            backoff_ms = min(BACKOFF_MAX_MS, BACKOFF_MIN_MS << min(node.failures - 1, 10))
            if isinstance(error, HandshakeRefused):
                backoff_ms = REFUSED_RETRY_MS
            node.retry_at_ns = now_ns() + int(backoff_ms * (0.5 + random.random() / 2) * 1e6)
            # A node that stood still for a moment has kept every pin, and their callers still read through them.
            self._close_idle(node, spare_pins=True)
            self._map_due = True
            self._changed.notify_all()
        self.keep()

    def alive(self, node: Node, deadline_ns: int) -> bool:
        """Asks the node for its map within PROBE_MS: tells a slow answer from a frozen node, which then counts as
        failed."""
        return self._ask_map(node, min(deadline_ns, now_ns() + PROBE_MS * 1_000_000))

    # -- the keeper ---------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Starts the keeper if it does not run, and wakes it."""
        with self._changed:
            if self._keeper is None and not self._closed:
                self._keeper = threading.Thread(
                    target=_keep, args=(weakref.ref(self), self._wake), name="emberkv-keeper", daemon=True
                )
                self._keeper.start()
        self._wake.set()

    def step(self) -> float:
        """One round of the keeper: revive what is due, ask for the map when due. Returns seconds until the next."""
        if self._closed:
            return -1.0
        now = now_ns()
        wait_ns = MAP_PERIOD_MS * 1_000_000
        for node in self.nodes():
            if node.failures and node.retry_at_ns <= now:
                self._revive(node)
            if node.failures:
                wait_ns = min(wait_ns, max(1_000_000, node.retry_at_ns - now_ns()))
        if self._map_due or now >= self._map_at_ns + MAP_PERIOD_MS * 1_000_000:
            self.refresh_map(now_ns() + self._connect_timeout_ms * 1_000_000)
        return wait_ns / 1e9

    def _revive(self, node: Node) -> None:
        with self._changed:
            if node.open.get(CONTROL, 0) >= CONNECTIONS_MAX[CONTROL] or self._closed:
                return
            node.open[CONTROL] = node.open.get(CONTROL, 0) + 1
        try:
            self.give(node, self._dial(node, CONTROL, self._connect_timeout_ms))
        except (Unavailable, HandshakeRefused):
            pass  # counted as a further failure; the next try is later

    def refresh_map(self, deadline_ns: int) -> bool:
        """Asks the nodes in turn for the cluster map; True when one answered."""
        for node in self.candidates():
            if now_ns() >= deadline_ns:
                break
            if self._ask_map(node, deadline_ns):
                return True
        return False

    def _ask_map(self, node: Node, deadline_ns: int) -> bool:
        known = self.cluster.revision if self.cluster else 0
        try:
            reply = self.ask(node, MapRequest(known), MapReply, deadline_ns)
        except (Unavailable, HandshakeRefused):
            return False
        with self._changed:
            self._map_due, self._map_at_ns = False, now_ns()
            # An unchanged map may come back without content; a restored coordinator may begin again below ours.
            if reply.nodes and reply.revision != known:
                self._rank(reply)
                self._counters.add("map_refreshes")
        return True

    def ask(self, node: Node, message: Message, kind: type[Reply], deadline_ns: int) -> Reply:
        """One exchange on the control connection, for maps and status. Raises Unavailable, HandshakeRefused."""
        connection = self.lend(node, CONTROL, deadline_ns, fresh=True)
        try:
            reply = connection.receive(kind, connection.send(message, deadline_ns), deadline_ns)
        except EmberError as error:
            self.drop(node, connection, error)
            if isinstance(error, Unavailable):
                raise
            raise Unavailable(f"{node.endpoint}: {error}") from error
        self.give(node, connection)
        return reply

    def close(self) -> None:
        """Ends every idle connection and the keeper; those on loan end when they come back. Idempotent."""
        with self._changed:
            self._closed = True
            for node in self._nodes:
                self._close_idle(node)
                node.arena = None
            self._changed.notify_all()
        self._wake.set()


def _keep(ref: weakref.ref[Pool], wake: threading.Event) -> None:
    """Body of the keeper's thread; it holds the pool only while it works, so that a forgotten client can be freed."""
    wait_s = 0.0
    while True:
        wake.wait(min(wait_s, 1.0))
        wake.clear()
        pool = ref()
        if pool is None or pool._wake is not wake:
            return
        wait_s = pool.step()
        del pool
        if wait_s < 0:
            return
