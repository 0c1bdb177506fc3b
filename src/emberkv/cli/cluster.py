"""A cluster of child processes on this machine: `emberkv up`, the demo and the tests start theirs here.

Laws: children never outlive the process that started them, however it ends (the kernel sends them SIGKILL when the
thread that forked them ends; that thread lives as long as the LocalCluster); only processes started here are ever
signalled, by pid, and never after they were reaped. A directory has one cluster at a time (a lock).
Life: new -start-> running -stop-> stopped. stop() may be called in any state, twice, and after a failed start.
Limits: one machine, NODES_MAX nodes, since each is a process with its own arena.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from emberkv.cli.probe import fetch_status
from emberkv.config import ClusterConfig, NamespaceConfig, NodeConfig, write
from emberkv.config.node import SOCKET_BYTES_MAX
from emberkv.errors import ConfigError, EmberError, NameInUse, Unavailable
from emberkv.types import SHARDS

NODES_MAX: Final = 16
STOP_S: Final = 5.0
"""A node needs well under a second to end; one that does not is killed."""
REAP_S: Final = 5.0
POLL_S: Final = 0.05
PROBE_MS: Final = 500
LOG_TAIL_BYTES: Final = 4096

Progress = Callable[[dict[str, int]], None]
"""Called with {nodes, up, members, primaries, backups} at each look."""


class LocalNode:
    """One child: its configuration, its process, its log."""

    def __init__(self, config: NodeConfig, config_path: Path, log_path: Path) -> None:
        self.config = config
        self.config_path = config_path
        self.log_path = log_path
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """Its name in the cluster."""
        return self.config.name

    @property
    def pid(self) -> int:
        """Process id of the current (or last) process; 0 before the start."""
        return self.process.pid if self.process else 0

    @property
    def endpoint(self) -> str:
        """unix:/path of its socket."""
        return f"unix:{self.config.socket_path}"

    @property
    def exit_code(self) -> int | None:
        """None while it runs (a frozen process runs); negative: ended by that signal."""
        return self.process.poll() if self.process else None

    @property
    def alive(self) -> bool:
        """Started and not ended."""
        return self.process is not None and self.process.poll() is None

    def last_words(self) -> str:
        """Last line of its log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class LocalCluster:
    """N node processes with their files in `directory`. A context manager: leaving it stops them.

    `nodes` is a count (n1, n2, ...) or names. `cluster_id` defaults to one that belongs to the directory, so that a
    second start there finds its own files. `node_settings` are further NodeConfig fields for every node.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        nodes: int | Sequence[str] = 3,
        *,
        cluster_id: str = "",
        arena_bytes: int = 512 << 20,
        failover_budget: str = "3s",
        namespaces: Sequence[NamespaceConfig] | None = None,
        node_settings: dict[str, Any] | None = None,
        settings_of: dict[str, dict[str, Any]] | None = None,
        cluster_settings: dict[str, Any] | None = None,
        nvme_bytes: int = 0,
    ) -> None:
        """`settings_of`: NodeConfig fields of single nodes, by name; `cluster_settings`: further ClusterConfig fields;
        `nvme_bytes`: disk that each node may take for blocks, in its own directory. Raises ConfigError."""
        names = [f"n{index}" for index in range(1, nodes + 1)] if isinstance(nodes, int) else list(nodes)
        if not 1 <= len(names) <= NODES_MAX:
            raise ConfigError(f"--nodes: {len(names)} is not between 1 and {NODES_MAX}")
        self.directory = Path(directory).expanduser().absolute()
        label = f"local-{hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:12]}"
        memory = Path("/dev/shm")
        self.config = ClusterConfig(
            cluster_id=cluster_id or label,
            members=names,
            failover_budget=failover_budget,
            namespaces=list(namespaces or [NamespaceConfig(name="default")]),
            # Named for the directory, whatever the cluster is called: the lock on the one guards the other.
            control_dir=str(memory / f"emberkv-{label}" if memory.is_dir() else self.directory / "control"),
            data_dir=str(self.directory / "coordinator"),
            **{"factor": min(2, len(names)), **(cluster_settings or {})},
        )
        self._arena_bytes = arena_bytes
        self._settings = node_settings or {}
        self._nvme_bytes = nvme_bytes
        self._settings_of = settings_of or {}
        self._nodes: dict[str, LocalNode] = {}
        self._socket_dir: Path | None = None
        self._lock_fd = -1
        self._forker: ThreadPoolExecutor | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Writes the configuration files and starts all processes; does not wait for them. Raises ConfigError."""
        if self._forker is not None:
            raise ConfigError(f"the cluster in {self.directory} was started already")
        self._claim_directory()
        try:
            self._check_memory()
            self._nodes = {name: self._make_node(name) for name in self.config.members}
            self._forker = ThreadPoolExecutor(1, thread_name_prefix="cluster-forker")
            atexit.register(self.stop)
            for node in self._nodes.values():
                write(node.config_path, self.config, node.config)
                self._spawn(node)
        except BaseException:
            self.stop()
            raise

    def wait_ready(self, timeout: float = 30.0, progress: Progress | None = None) -> list[dict[str, Any]]:
        """Waits until each node sees all others, every shard has its primary and every backup is in sync.

        Returns the status documents. Raises ConfigError or Unavailable with a dead node's last words; Unavailable
        after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            for node in self._nodes.values():
                self._raise_if_ended(node)
            documents = self.statuses()
            counts = self._count(documents)
            if progress is not None:
                progress(counts)
            count = len(self._nodes)
            backups = SHARDS * (self.config.factor - 1)
            if counts["members"] == count and counts["primaries"] == SHARDS and counts["backups"] == backups:
                return documents
            if time.monotonic() >= deadline:
                raise Unavailable(
                    f"the cluster was not ready after {timeout:g} s: {counts['up']} of {count} nodes answer, "
                    f"{counts['primaries']} of {SHARDS} shards have a primary; see the logs in {self.directory}"
                )
            time.sleep(POLL_S)

    def stop(self) -> None:
        """SIGTERM, STOP_S seconds, SIGKILL; then removes the sockets and the coordinator's memory files."""
        if self._forker is not None:
            self._forker.submit(int).result()  # a fork that a signal interrupted us in has ended after this
        running = [node for node in self._nodes.values() if node.alive]
        for node in running:
            self._signal(node, signal.SIGTERM)
            self._signal(node, signal.SIGCONT)  # a frozen process could not end
        deadline = time.monotonic() + STOP_S
        for node in running:
            self._wait(node, deadline)
            if node.alive:
                self._signal(node, signal.SIGKILL)
                self._wait(node, time.monotonic() + REAP_S)
        for node in self._nodes.values():
            node.config.socket_path.unlink(missing_ok=True)
            node.config.socket_path.with_name(f"{node.config.socket_path.name}.lock").unlink(missing_ok=True)
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir = None
        if self._lock_fd >= 0:
            # Nothing of a stopped cluster may stay in memory. control.db is made anew with a higher generation.
            for suffix in ("", "-wal", "-shm"):
                (self.config.control_path / f"control.db{suffix}").unlink(missing_ok=True)
            if self.config.control_path.is_dir() and not any(self.config.control_path.iterdir()):
                self.config.control_path.rmdir()
            os.close(self._lock_fd)
            self._lock_fd = -1
        if self._forker is not None:
            self._forker.shutdown()
            self._forker = None
            atexit.unregister(self.stop)

    # -- nodes ---------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[LocalNode]:
        """All nodes, in the order of their names given."""
        return list(self._nodes.values())

    def node(self, name: str) -> LocalNode:
        """One node. Raises KeyError."""
        return self._nodes[name]

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal to one node; waits for its end if it is SIGKILL. A node that ended already is left alone."""
        node = self.node(name)
        self._signal(node, number)
        if number == signal.SIGKILL:
            self._wait(node, time.monotonic() + REAP_S)

    def restart(self, name: str) -> None:
        """Starts a node that has ended once more, on the same files."""
        node = self.node(name)
        if node.alive:
            raise NameInUse(f"node {name!r} is still running")
        self._spawn(node)

    def endpoints(self) -> list[str]:
        """unix:/path of every node, running or not."""
        return [node.endpoint for node in self._nodes.values()]

    def statuses(self) -> list[dict[str, Any]]:
        """Status documents of the nodes that answer now."""
        documents = []
        for node in self._nodes.values():
            if not node.alive:
                continue
            try:
                documents.append(fetch_status(node.endpoint, PROBE_MS))
            except EmberError:
                continue  # starting, frozen or gone: the caller sees that it is missing
        return documents

    # -- inside --------------------------------------------------------------------------------------------------

    def _claim_directory(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(self.directory / "cluster.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_fd)
            self._lock_fd = -1
            raise NameInUse(f"a cluster runs already in {self.directory}: stop it, or choose another --dir") from None
        except OSError as error:
            raise ConfigError(f"cannot use directory {self.directory}: {error.strerror}") from None

    def _check_memory(self) -> None:
        from emberkv.storage.mapping import available_bytes

        wanted, available = self._arena_bytes * len(self.config.members), available_bytes()
        if wanted > available:
            raise ConfigError(
                f"{len(self.config.members)} arenas of {self._arena_bytes >> 20} MiB are more than the "
                f"{available >> 20} MiB that this machine can give: lower --arena or --nodes"
            )

    def _make_node(self, name: str) -> LocalNode:
        settings: dict[str, Any] = {
            "name": name,
            "data_dir": str(self.directory / name),
            "socket": str(self._socket_path(name)),
            "arena_bytes": self._arena_bytes,
            "nvme_dirs": [str(self.directory / name / "nvme")] if self._nvme_bytes else [],
            "nvme_bytes": self._nvme_bytes,
            **self._settings,
            **self._settings_of.get(name, {}),
        }
        return LocalNode(NodeConfig(**settings), self.directory / f"{name}.toml", self.directory / f"{name}.log")

    def _socket_path(self, name: str) -> Path:
        longest = max(len(os.fsencode(self.directory / f"{member}.sock")) for member in self.config.members)
        if longest <= SOCKET_BYTES_MAX:
            return self.directory / f"{name}.sock"
        if self._socket_dir is None:  # a deep directory: the sockets get a short one of their own
            self._socket_dir = Path(tempfile.mkdtemp(prefix="emberkv-"))
        return self._socket_dir / f"{name}.sock"

    def _spawn(self, node: LocalNode) -> None:
        assert self._forker is not None
        command = [sys.executable, "-m", "emberkv.cli.main", "node", "--config", str(node.config_path)]
        command += ["--parent", str(os.getpid())]

        def fork() -> None:
            with node.log_path.open("wb") as log:
                # process_group: Ctrl-C in a terminal reaches the parent only, which ends its children in order.
                node.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
                )

        self._forker.submit(fork).result()

    def _signal(self, node: LocalNode, number: int) -> None:
        if node.process is not None:
            node.process.send_signal(number)  # polls first: never a pid that was reaped

    def _wait(self, node: LocalNode, deadline: float) -> None:
        if node.process is None:
            return
        try:
            node.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass  # the caller looks at `alive`

    def _raise_if_ended(self, node: LocalNode) -> None:
        code = node.exit_code
        if code is None:
            return
        text = node.last_words().removeprefix("emberkv: ") or f"it left no word in {node.log_path}"
        kind = ConfigError if code == 2 else Unavailable
        raise kind(f"node {node.name} ended with {'signal' if code < 0 else 'code'} {abs(code)}: {text}")

    def _count(self, documents: list[dict[str, Any]]) -> dict[str, int]:
        def total(role: str) -> int:
            return sum(int(document["shards"].get(role, 0)) for document in documents)

        everyone = set(self._nodes)
        members = sum(everyone <= set(document["live_nodes"]) for document in documents)
        return {
            "nodes": len(self._nodes),
            "up": len(documents),
            "members": members,
            "primaries": total("primary"),
            "backups": total("backup"),
        }
