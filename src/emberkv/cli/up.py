"""`emberkv up` (a cluster of child processes in the foreground) and `emberkv node` (one node in this process)."""

from __future__ import annotations

import ctypes
import os
import resource
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from emberkv.cli.cluster import NODES_MAX, LocalCluster
from emberkv.cli.endpoints import VARIABLE, leave_note, remove_note
from emberkv.cli.output import emit_error, emit_json, human_bytes, notes, results
from emberkv.config import load, parse_size, state_home
from emberkv.errors import ConfigError, Unavailable
from emberkv.types import SHARDS

READY_S: Final = 60.0
"""A cluster is ready within seconds; a machine that swaps gets a minute before it is told so."""
LOOK_S: Final = 0.5
PR_SET_PDEATHSIG: Final = 1


def up(
    nodes: Annotated[int, typer.Option(min=1, max=NODES_MAX, help="How many nodes.")] = 3,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Files of the cluster. Default: in the user's state directory.")
    ] = None,
    arena: Annotated[str, typer.Option(help="Memory for blocks, of each node.")] = "512MiB",
    budget: Annotated[str, typer.Option(help="Longest outage of session puts after a node is lost.")] = "3s",
    cluster_id: Annotated[
        str, typer.Option(help="Name of the cluster. Default: one that belongs to the directory.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document when the cluster is ready.")] = False,
) -> None:
    """Start a cluster on this machine and keep it until Ctrl-C."""
    cluster = LocalCluster(
        directory or state_home() / "up",
        nodes,
        cluster_id=cluster_id,
        arena_bytes=parse_size(arena),
        failover_budget=budget,
    )
    with _first_signal_raises():
        try:
            with cluster:
                _serve(cluster, as_json)
        except _Asked as asked:
            notes().print("stopped")
            raise typer.Exit(128 + asked.number) from None


def _serve(cluster: LocalCluster, as_json: bool) -> None:
    """From started processes to the signal that ends them."""
    documents = _wait_ready(cluster)
    leave_note(cluster.config.cluster_id, cluster.directory, cluster.endpoints())
    try:
        if as_json:
            emit_json(describe(cluster, documents))
        else:
            _print(cluster, documents)
        _stay(cluster)
    finally:
        remove_note()
        notes().print("stopping ...")


class _Asked(BaseException):
    """The first signal, raised wherever the command is."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _first_signal_raises() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end the block once, in order; what comes after does not disturb the stopping."""
    asked: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) == 1:
            raise _Asked(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_ready(cluster: LocalCluster) -> list[dict[str, Any]]:
    console = notes()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting nodes", total=2 * SHARDS)

        def show(counts: dict[str, int]) -> None:
            text = f"{counts['up']} of {counts['nodes']} nodes, {counts['primaries']} of {SHARDS} shards"
            progress.update(task, description=text, completed=counts["primaries"] + counts["backups"])

        return cluster.wait_ready(READY_S, show)


def describe(cluster: LocalCluster, documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The running cluster as a JSON document."""
    by_name = {document["node"]: document for document in documents}
    return {
        "cluster_id": cluster.config.cluster_id,
        "directory": str(cluster.directory),
        "budget_ms": cluster.config.budget().budget_ms,
        "endpoints": cluster.endpoints(),
        "nodes": [
            {
                "name": node.name,
                "pid": node.pid,
                "local": node.endpoint,
                "tcp": by_name[node.name]["addresses"]["tcp"],
                "shards": by_name[node.name]["shards"],
                "arena_bytes": node.config.arena_bytes,
                "config": str(node.config_path),
                "log": str(node.log_path),
            }
            for node in cluster.nodes
        ],
    }


def _print(cluster: LocalCluster, documents: list[dict[str, Any]]) -> None:
    document = describe(cluster, documents)
    table = Table(title=f"cluster {document['cluster_id']} is ready", title_justify="left")
    for name in ("node", "pid", "socket", "TCP", "primary of", "arena"):
        table.add_column(name, overflow="fold", justify="right" if name in ("pid", "primary of", "arena") else "left")
    for node in document["nodes"]:
        primary, arena = str(node["shards"]["primary"]), human_bytes(node["arena_bytes"])
        table.add_row(node["name"], str(node["pid"]), node["local"].removeprefix("unix:"), node["tcp"], primary, arena)
    console = results()
    console.print(table)
    victim = document["nodes"][0]
    console.print("Try, in another terminal:", style="bold")
    for line in (
        "emberkv put greeting /etc/hostname --level session --min-copies 2"
        if len(cluster.nodes) > 1
        else "emberkv put greeting /etc/hostname --level session",
        "emberkv get greeting",
        "emberkv status",
        f"kill -9 {victim['pid']}   # node {victim['name']}; then get and status again",
        f"{_start_again(victim['config'])}   # brings it back; Ctrl-C ends it",
    ):
        console.print(f"  {line}", soft_wrap=True)
    console.print("Programs find it with:", style="bold")
    console.print(f"  export {VARIABLE}={','.join(document['endpoints'])}", soft_wrap=True)
    console.print("Ctrl-C stops it.", style="bold")
    console.file.flush()


def _start_again(config: str) -> str:
    """The command that brings a node back; in a terminal of its own, since it then no longer belongs to `up`."""
    return f"emberkv node --config {shlex.quote(config)}"


def _stay(cluster: LocalCluster) -> None:
    """Until no node is left. One that ends is reported, not restarted: watching that is what people come for."""
    known = {node.name for node in cluster.nodes}
    while known:
        time.sleep(LOOK_S)
        for node in cluster.nodes:
            if node.name in known and not node.alive:
                known.discard(node.name)
                code = node.exit_code or 0
                how = f"signal {-code}" if code < 0 else f"code {code}: {node.last_words()}"
                again = f"start it again with `{_start_again(str(node.config_path))}`"
                emit_error(f"node {node.name} (pid {node.pid}) ended with {how}; {again}")
    raise Unavailable(f"all nodes have ended; see the logs in {cluster.directory}")


def node(
    config: Annotated[Path, typer.Option("--config", help="TOML file with the tables [cluster] and [node].")],
    listen: Annotated[str, typer.Option(help="TCP address instead of the file's.")] = "",
    arena: Annotated[str, typer.Option(help="Memory for blocks instead of the file's.")] = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "",
    parent: Annotated[int, typer.Option(hidden=True, help="End when this process does.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checked configuration as JSON and exit.")] = False,
) -> None:
    """Run one node in the foreground until SIGTERM or Ctrl-C."""
    if parent and not _tie_to(parent):
        raise Unavailable(f"process {parent}, which started this node, is gone")
    given = {"node.listen": listen, "node.arena_bytes": arena, "node.log_level": log_level}
    cluster, local = load(config, overrides={key: value for key, value in given.items() if value})
    if as_json:
        emit_json({"cluster": _plain(cluster), "node": _plain(local), "digest": cluster.digest()})
        return
    # A connection needs three descriptors; the usual soft limit of 1,024 would end at a third of `connections_max`.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    from emberkv.node.main import run

    run(cluster, local)


def _plain(config: Any) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(config)
    return plain


def _tie_to(parent: int) -> bool:
    """The kernel kills this process when the thread that forked it ends. False: it ended before we could ask."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise ConfigError(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    return os.getppid() == parent


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("up")(up)
    app.command("node")(node)
