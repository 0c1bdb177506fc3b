"""Who is on stage: the cluster, the engines, the writer, and the order in which they leave.

Why it exists: every scene needs the same few parts, and whatever ends the demo, all of them must end with it.
Laws: what was started here is ended here, last started first; a part that fails to end does not keep the others up.
    Everything lives in one temporary directory, which is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from emberkv.cli.cluster import LocalCluster
from emberkv.demo import probe
from emberkv.demo.children import Child, Message
from emberkv.demo.report import Comparison, Report
from emberkv.demo.screen import Screen
from emberkv.demo.texts import PREFIX_TOKENS
from emberkv.errors import EmberError, Unavailable
from emberkv.types import SHARDS

NEAR_A: Final = "n1"
NEAR_B: Final = "n2"
OTHER: Final = "n3"
SURVIVORS: Final = (NEAR_B, OTHER)
ARENA_BYTES: Final = 1 << 30
"""Holds every block of every session twice over; a load of 32 blocks (94 MB) fits one connection's pins (an eighth)."""
THREADS: Final = 2
ENGINE_ENVIRONMENT: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Torch's threads sleep while they wait for each other. The nodes share these cores; spinning threads take from them,
and a forward beside any other work then takes several times as long (measured). All engines alike."""
NEW_TOKENS: Final = 24
ENGINE_START_S: Final = 120.0
"""The first start of all converts the model."""
ANSWER_S: Final = 120.0
SETTLE_S: Final = 60.0
POLL_S: Final = 0.05


class Stage:
    """All parts of one run."""

    def __init__(self, screen: Screen, directory: str | None, session_count: int) -> None:
        self.screen = screen
        self.report = Report()
        self.session_count = session_count
        self.own_directory = directory is None
        # Short, because a Unix socket's path is (107 bytes).
        self.directory = Path(tempfile.mkdtemp(prefix="emberkv-demo-") if directory is None else directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.cluster = LocalCluster(self.directory / "cluster", 3, arena_bytes=ARENA_BYTES)
        self.children: list[Child] = []
        self.sessions: list[dict[str, Any]] = []
        self._references: dict[tuple[int, int], Message] = {}
        self._pids: set[int] = set()

    # -- parts ---------------------------------------------------------------------------------------------------

    def start_engine(self, name: str) -> Child:
        """Starts an engine process; its first answer is still to be received."""
        arguments = ["--model-cache", str(model_cache()), "--threads", str(THREADS)]
        arguments += ["--sessions", str(self.session_count)]
        return self._start(name, "emberkv.demo.engine", arguments, ENGINE_ENVIRONMENT)

    def start_writer(self, node: str) -> Child:
        """Starts the writer process, connected to one node."""
        return self._start("writer", "emberkv.demo.writer", [self.endpoint(node)])

    def _start(
        self, name: str, module: str, arguments: list[str], environment: Mapping[str, str] | None = None
    ) -> Child:
        child = Child(name, module, arguments, self.directory, environment)
        self.children.append(child)
        self._pids.add(child.pid)
        return child

    def leave(self, child: Child) -> None:
        """Ends one child early."""
        child.stop()
        self.children.remove(child)

    def endpoint(self, node: str) -> str:
        """unix:/path of a node."""
        return self.cluster.node(node).endpoint

    def node_pid(self, node: str) -> int:
        """Process id of a node now."""
        pid = self.cluster.node(node).pid
        self._pids.add(pid)
        return pid

    def keys(self, session: int) -> list[bytes]:
        """Block keys of a session's prompt."""
        return [bytes.fromhex(key) for key in self.sessions[session]["keys"]]

    def all_keys(self) -> list[bytes]:
        """Block keys of all sessions, each once."""
        return list(dict.fromkeys(key for index in range(len(self.sessions)) for key in self.keys(index)))

    # -- waiting -------------------------------------------------------------------------------------------------

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float = SETTLE_S) -> float:
        """Polls until `condition` holds; returns the seconds it took. Raises Unavailable after `timeout_s`.

        An EmberError inside counts as "not yet": nodes come and go here.
        """
        started = time.perf_counter()
        while True:
            with contextlib.suppress(EmberError):
                if condition():
                    return time.perf_counter() - started
            if time.perf_counter() - started > timeout_s:
                raise Unavailable(f"waited {timeout_s:g} s in vain: {what}")
            time.sleep(POLL_S)

    def settled(self, nodes: Sequence[str]) -> bool:
        """Nothing waits to be sent or repaired, and every shard has a primary among `nodes`."""
        documents = [probe.status(self.endpoint(node)) for node in nodes]
        idle = all(not document["hints"] and not document["lag"] for document in documents)
        return idle and sum(document["shards"]["primary"] for document in documents) == SHARDS

    def copies(self, nodes: Sequence[str]) -> dict[str, int]:
        """Blocks of all sessions that each node holds itself, and "fewest": copies of the worst block among them."""
        keys = self.all_keys()
        held = {node: probe.held(self.endpoint(node), keys) for node in nodes}
        counts = {node: sum(found) for node, found in held.items()}
        fewest = min(sum(held[node][index] for node in nodes) for index in range(len(keys)))
        return {**counts, "fewest": fewest, "blocks": len(keys)}

    # -- the reference -------------------------------------------------------------------------------------------

    def remember_reference(self, session: int, answer: Message) -> None:
        """An uncached full recompute. It runs the very forwards of a full load, so it is the reference for both."""
        self._references[session, 0] = self._references[session, PREFIX_TOKENS] = answer

    def reference(self, engine: Child, session: int, split: int) -> Message:
        """The answer without any cache, cut at `split` tokens; computed once."""
        known = self._references.get((session, split))
        if known is None:
            known = engine.ask("recompute", ANSWER_S, session=session, new_tokens=NEW_TOKENS, split=split)
            self._references[session, split] = known
        return known

    def compare(self, scene: str, session: int, answer: Message, reference: Message) -> Comparison:
        """Holds an answer against its reference, token by token, and keeps the result."""
        comparison = Comparison(
            scene=scene,
            session=str(self.sessions[session]["name"]),
            loaded_tokens=int(answer["loaded_tokens"]),
            tokens_identical=answer["tokens"] == reference["tokens"],
            logits_identical=answer["logits"] == reference["logits"],
            ttft_s=float(answer["ttft_s"]),
        )
        self.report.comparisons.append(comparison)
        return comparison

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends every process and removes the directory. Safe to call twice."""
        while self.children:
            self.children.pop().stop()
        self._pids.update(node.pid for node in self.cluster.nodes if node.pid)
        self.cluster.stop()
        if self.own_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def left_behind(self) -> list[str]:
        """What is still there after `close`: processes, sockets, directories."""
        found = [f"process {pid}" for pid in sorted(self._pids) if _is_ours(pid)]
        found += [str(node.config.socket_path) for node in self.cluster.nodes if node.config.socket_path.exists()]
        if self.cluster.config.control_path.exists():
            found.append(str(self.cluster.config.control_path))
        if self.own_directory and self.directory.exists():
            found.append(str(self.directory))
        return found


def model_cache() -> Path:
    """Where the converted model is kept between runs: inside the environment when there is one here."""
    if Path(".venv").is_dir():
        return Path(".venv").absolute() / "emberkv-models"
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else Path.home() / ".cache") / "emberkv" / "models"


def _is_ours(pid: int) -> bool:
    """Whether a process with this id still is a child of ours (ids are given again)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return int(fields[1]) == os.getpid()
