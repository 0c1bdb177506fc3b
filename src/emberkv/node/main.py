"""Composition root of a node: one straight function, and the order in which it is taken down.

Start: lock the data directory, open the coordinator, map the arena, build core and runtime, listen, join.
Stop, in this order, so that nothing acts on what is gone: stop accepting (no new work), stop the ticker (no renewals:
the lease runs out by itself), stop streams and reads to peers, stop the coordinator's threads, close the coordinator,
unmap the arena, give the lock back.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from emberkv.config.cluster import ClusterConfig
from emberkv.config.node import NodeConfig
from emberkv.coord import SqliteCoordinator, StrongStore
from emberkv.core import events as ev
from emberkv.core.budget import Budget
from emberkv.core.effects import Commit
from emberkv.core.lease import Phase
from emberkv.core.replica import Replica
from emberkv.core.state import Settings
from emberkv.core.view import NAMESPACE_PREFIX
from emberkv.errors import ConfigError, CoordinatorError, InvariantViolation, NameInUse, Unavailable
from emberkv.messages import Message, NodeAddress, Role
from emberkv.net.local import LocalListener
from emberkv.net.peers import PeerStreams
from emberkv.net.tcp import TcpListener
from emberkv.node.admin import Admin
from emberkv.node.coordination import Coordination
from emberkv.node.fetcher import PeerFetcher
from emberkv.node.identity import DataDirectory
from emberkv.node.metrics import BudgetWatch, CollectorPauses
from emberkv.node.namespaces import Namespaces, settle
from emberkv.node.pids import ProcessWatcher
from emberkv.node.runtime import Runtime
from emberkv.node.serve import Server, handle_stream_answer
from emberkv.node.status import document
from emberkv.node.strong import StrongRecords
from emberkv.node.strong_edge import StrongEdge
from emberkv.node.timers import Ticker
from emberkv.ports import Compare, Record, Slot, Write
from emberkv.storage.dram import DramTier
from emberkv.storage.nvme import NvmeDirectory, NvmeTier

log = logging.getLogger("emberkv.node")

SWITCH_INTERVAL_S = 0.0002
"""A thread that wants the interpreter gets it after this long: the heartbeat must not wait behind 64 readers."""
WATCH_DEADLINE_MS = 200
"""One wait of the watch: bounds how long a stop has to wait for its thread."""
DIRTY_SHARE = 0.25
"""Share of the arena that may wait to be written to disk: it cannot be evicted meanwhile."""
CONFIG_KEY = "config/digest"
CONFIG_DEADLINE_MS = 2000
CONNECTION_THREADS = ("tcp ", "local ")
"""Names of threads that serve one stranger each; all other threads are vital."""
TICKS_PER_TTL = 60
"""Tick period = ttl / 60, between 5 and 50 ms: fine enough that a tick adds little to a failover."""


class BootClock:
    """CLOCK_BOOTTIME: advances in suspend, so a lease cannot outlive one."""

    def now_ns(self) -> int:
        """Nanoseconds since boot."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Streams:
    """The Transport port over PeerStreams, plus the read connections' addresses."""

    def __init__(self, streams: PeerStreams, fetcher: PeerFetcher) -> None:
        self._streams = streams
        self._fetcher = fetcher

    def send(
        self, peer: str, request: int, message: Message, payload: Sequence[memoryview], on_sent: Callable[[], None]
    ) -> bool:
        """As ports.Transport."""
        return self._streams.send(peer, request, message, payload, on_sent)

    def set_peers(self, peers: dict[str, str]) -> None:
        """As ports.Transport."""
        self._fetcher.set_peers(peers)
        self._streams.set_peers(peers)

    def close(self) -> None:
        """As ports.Transport."""
        self._streams.stop()
        self._fetcher.close()


class LateCommitter:
    """Commits can only be performed once the coordinator's threads exist, which need the runtime."""

    def __init__(self) -> None:
        self.target: Coordination | None = None

    def submit(self, commit: Commit) -> None:
        """As runtime.Committer."""
        if self.target is not None:
            self.target.submit(commit)


def host_id() -> str:
    """Boot id: equal means same machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def core_settings(
    cluster: ClusterConfig,
    config: NodeConfig,
    address: NodeAddress,
    incarnation: bytes,
    generation: int,
    directory: DataDirectory,
    block_bytes_max: int,
) -> Settings:
    """What the core must know of the configuration; its times follow from the failover budget."""
    budget = cluster.budget()
    return Settings(
        name=config.name,
        incarnation=incarnation,
        address=address,
        members=tuple(sorted(cluster.members)),
        generation=generation,
        factor=cluster.factor,
        ttl_ns=int(budget.ttl_ms * 1e6),
        drift=budget.costs.drift,
        margin_ns=int(budget.margin_ms * 1e6),
        heartbeat_every_ns=int(budget.heartbeat_ms * 1e6) if cluster.heartbeat else 0,
        commit_ns=int(budget.costs.commit_ms * 1e6),
        hint_bytes_max=config.arena_bytes // 4,
        hint_age_max_ns=int(cluster.duration_ms("hint_age_max") * 1e6),
        tombstone_retention_ns=int(cluster.duration_ms("tombstone_retention") * 1e6),
        block_bytes_max=block_bytes_max,
        nvme=bool(config.nvme_dirs),
        nvme_depth_min=config.nvme_depth_min,
        previous_incarnation=directory.previous_incarnation,
    )


def agree_on_config(coordinator: SqliteCoordinator, cluster: ClusterConfig) -> None:
    """The first node writes the digest of what all must agree on; a node that differs is refused, not merged. The
    namespaces are not part of it: they have records of their own, which change while nodes run (namespaces.settle)."""
    mine = cluster.digest().encode()
    for _ in range(3):
        record = coordinator.get(CONFIG_KEY, deadline_ms=CONFIG_DEADLINE_MS)
        if record is None:
            write = Write(CONFIG_KEY, mine)
            coordinator.commit([Compare(CONFIG_KEY, 0)], [write], deadline_ms=CONFIG_DEADLINE_MS)
        elif record.value == mine:
            return
        else:
            raise ConfigError(
                "the [cluster] table differs from that of the nodes that started before: make them equal; to change "
                f"it, stop all nodes, remove {cluster.control_path} and start them again"
            )
    raise CoordinatorError("the coordinator does not keep the cluster's configuration record; try again")


class Node:
    """A running node. `stopped` is set when it has to end (signal, or its name was taken)."""

    def __init__(self, cluster: ClusterConfig, config: NodeConfig) -> None:
        self.stopped = threading.Event()
        self.failure: Exception | None = None
        self._listed = False
        self._closers: list[tuple[str, Callable[[], object]]] = []
        started_s = time.monotonic()
        try:
            self._build(cluster, config, started_s)
        except BaseException:
            self.close()
            raise

    def _on_close(self, what: str, closer: Callable[[], object]) -> None:
        self._closers.append((what, closer))

    def _build(self, cluster: ClusterConfig, config: NodeConfig, started_s: float) -> None:
        budget = cluster.budget()
        directory = DataDirectory(config.data_path, cluster.cluster_id, config.name)
        self._on_close("lock", directory.close)
        coordinator = SqliteCoordinator.open(cluster.control_path, cluster.data_path, cluster.cluster_id)
        self._on_close("coordinator", coordinator.close)
        agree_on_config(coordinator, cluster)
        incarnation = os.urandom(16)
        self.namespaces = Namespaces(
            settle(coordinator, cluster), cluster_id=cluster.cluster_id, node=config.name, incarnation=incarnation
        )
        tier = DramTier(config.arena_bytes)
        self._on_close("arena", tier.close)
        fetcher = PeerFetcher(tier, lambda scope: self.namespaces.hello(Role.FETCH, scope))
        streams = PeerStreams(
            self.namespaces.hello(Role.STREAM),
            lambda peer, header, message, _link: handle_stream_answer(self.runtime, peer, header, message),
            lambda peer: self.runtime.handle(ev.PeerUp(clock.now_ns(), peer)),
            lambda peer: self.runtime.handle(ev.PeerDown(clock.now_ns(), peer)),
        )
        clock = self.clock = BootClock()
        transport = Streams(streams, fetcher)
        committer = LateCommitter()
        # The listener comes before the core, because the core publishes the port that was really taken.
        server = Server(tier, self.namespaces, config.staging_bytes)
        listener = TcpListener(config.listen, server.serve_tcp, connections_max=config.connections_max)
        self._on_close("peers", transport.close)
        self._on_close("TCP listener", listener.stop)
        address = NodeAddress(config.name, listener.address, str(config.socket_path), host_id())
        generation = coordinator.generation()
        settings = core_settings(cluster, config, address, incarnation, generation, directory, tier.block_bytes_max)
        core = Replica(settings, tier)
        disk = self._open_disk(cluster, config, core, tier)
        self.runtime = Runtime(core, tier, clock, transport, fetcher, committer, self._note, disk)
        self._start_clockwork(budget, coordinator, committer)
        watcher = ProcessWatcher()
        self._on_close("process watcher", watcher.stop)
        # Opened by the first request that needs it.
        store = StrongStore(cluster.data_path, cluster.cluster_id, cluster.strong_bytes_max)
        self._on_close("strong store", store.close)
        strong = StrongEdge(StrongRecords(store, clock.now_ns), self.runtime, tier)
        admin = Admin(self.runtime, coordinator, store, self.learn)

        def status() -> bytes:
            body = document(self.runtime, tier, self.ticker, streams, server.connections, started_s)
            body["cluster_id"] = cluster.cluster_id
            body["collector_pause_ms"] = self.pauses.document()
            body["pinned_bytes"] = server.pinned.bytes
            body["budget_ms"] = budget.budget_ms
            body["budget"] = self.budget_watch.document()
            body["counters"] |= strong.records.counters()
            if disk is not None:
                body["nvme"] = disk.document()
            body["addresses"] = {"tcp": address.tcp, "local": address.local}
            return msgspec.json.encode(body)

        server.open(self.runtime, status, watcher, strong, admin.answer)
        local = LocalListener(str(config.socket_path), server.serve_local, connections_max=config.connections_max)
        self._on_close("local listener", local.close)
        directory.claim(incarnation)
        if config.prefault:
            tier.prefault()
        if disk is not None:
            disk.start()
        watcher.start()
        self.namespaces.look_at(coordinator, self.learn)
        self.coordination.start()
        self.ticker.start()

    def _open_disk(self, cluster: ClusterConfig, config: NodeConfig, core: Replica, tier: DramTier) -> NvmeTier | None:
        """The NVMe tier, if one is configured; the floors that the last life left go into the core."""
        if not config.nvme_dirs:
            return None
        state = core.state
        disk = NvmeTier(
            [NvmeDirectory(path, config.nvme_bytes) for path in config.nvme_dirs],
            config.data_path / "nvme-index",
            cluster.cluster_id,
            dirty_bytes_max=int(config.arena_bytes * DIRTY_SHARE),
            pages=tier.pages,
            release=self._give_back,
            floors=lambda: (list(map(max, state.directory.floors, state.remembered_floors)), list(state.disk_floors)),
        )
        # Just above the arena, in which lies what still waits to be written: it ends after whoever might read it.
        self._closers.insert(3, ("NVMe tier", disk.close))
        floors, doubted = disk.kept_floors()
        state.remembered_floors, state.disk_floors = floors, doubted
        return disk

    def _give_back(self, slots: list[Slot]) -> None:
        self.runtime.unref(slots)

    def _start_clockwork(self, budget: Budget, coordinator: SqliteCoordinator, committer: LateCommitter) -> None:
        """What moves the core by itself: ticks, and the coordinator's threads; and what measures both."""
        self.budget_watch = BudgetWatch(
            budget.costs.commit_ms, budget.costs.lateness_ms, lambda text: log.warning("%s", text)
        )
        period_ms = min(50.0, max(5.0, budget.ttl_ms / TICKS_PER_TTL))
        self.ticker = Ticker(period_ms, self._tick)
        self._on_close("ticker", self.ticker.stop)
        self.coordination = Coordination(
            coordinator,
            self.clock,
            self._on_coordinator,
            commit_deadline_ms=max(50, int(budget.ttl_ms / 6)),
            watch_deadline_ms=WATCH_DEADLINE_MS,
        )
        # Just above the coordinator itself, whose threads must have ended before it closes.
        self._closers.insert(3, ("coordinator threads", self.coordination.stop))
        committer.target = self.coordination
        self.pauses = CollectorPauses()
        self.pauses.start()
        self._on_close("collector metrics", self.pauses.stop)

    def _tick(self) -> None:
        # The wall clock is for the expiry of blocks alone.
        self.runtime.handle(ev.Tick(self.clock.now_ns(), time.time_ns() // 1_000_000))
        self.budget_watch.look(self.ticker.late_ms)

    def _on_coordinator(self, event: ev.Event) -> None:
        """An event from the coordinator's threads: the core's, and what else follows the records."""
        self.runtime.handle(event)
        if isinstance(event, ev.Committed):
            self.budget_watch.committed((event.now_ns - event.sent_ns) / 1e6)
        elif isinstance(event, ev.Records):
            self._listed = self._listed or event.full
            changed = event.full or any(record.key.startswith(NAMESPACE_PREFIX) for record in event.records)
            if changed and self._listed:  # before the first listing the view knows less than was found at the start
                with self.runtime.lock:
                    self.namespaces.take(self.runtime.core.state.view.namespaces)

    def learn(self, record: Record) -> None:
        """Takes in a record that this node has just read or written itself, before the watch brings it."""
        self._on_coordinator(ev.Records(self.clock.now_ns(), [record], [], record.revision, full=False))

    def _note(self, text: str, alarm: bool) -> None:
        log.log(logging.ERROR if alarm else logging.INFO, "%s", text)
        if alarm and self.runtime.core.lease.phase is Phase.REFUSED:
            self.failure = NameInUse(text)
            self.stopped.set()

    def on_thread_death(self, death: threading.ExceptHookArgs) -> None:
        """A bug ended a thread. A connection's thread ends alone; without any other one the node would be half alive,
        renewing leases that it cannot serve, so it ends as a whole and its shards are taken over."""
        name = death.thread.name if death.thread is not None else "?"
        error = death.exc_value
        log.critical("thread %s died: %r", name, error, exc_info=error)
        if isinstance(error, InvariantViolation) or not name.startswith(CONNECTION_THREADS):
            self.failure = Unavailable(f"node stopped: thread {name} died: {error!r}")
            self.stopped.set()

    def close(self) -> None:
        """Takes everything down, last built first; one part that fails does not keep the others up."""
        while self._closers:
            what, closer = self._closers.pop()
            try:
                closer()
            except OSError as error:
                log.warning("closing %s: %s", what, error)


def run(cluster: ClusterConfig, config: NodeConfig) -> None:
    """Runs a node until SIGTERM or SIGINT. Raises ConfigError or Unavailable in one line when it cannot."""
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level.upper(),
        format=f"%(asctime)s {config.name} %(levelname)s %(name)s: %(message)s",
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    node = Node(cluster, config)
    threading.excepthook = node.on_thread_death
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: node.stopped.set())
    # What was built lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    log.info("node %s of cluster %s listens on %s", config.name, cluster.cluster_id, config.socket_path)
    try:
        node.stopped.wait()
    finally:
        node.close()
    if node.failure is not None:
        raise node.failure
