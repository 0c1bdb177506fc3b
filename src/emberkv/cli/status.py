"""`emberkv status`: how each node is, and the cluster as a whole, from all nodes that answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from emberkv.cli.blocks import Endpoints, Json
from emberkv.cli.endpoints import choose
from emberkv.cli.output import emit_json, human_bytes, human_count, results
from emberkv.cli.probe import STATUS_TIMEOUT_MS, fetch_status
from emberkv.errors import EmberError, Unavailable
from emberkv.types import EPOCH_GENERATION_SHIFT, SHARDS

ASKED_AT_ONCE = 16


def status(
    endpoint: Endpoints = None,
    timeout_ms: Annotated[
        int, typer.Option(min=1, max=60_000, help="A node that answers later is down.")
    ] = STATUS_TIMEOUT_MS,
    as_json: Json = False,
) -> None:
    """Show nodes, shards, primaries, epochs, bytes, prefault, lag, and misses by reason."""
    document = collect(choose(endpoint), timeout_ms)
    if as_json:
        emit_json(document)
    else:
        table, lines = render(document)
        console = results()
        console.print(table)
        for line in lines:
            # An address stays whole, so that it can be copied.
            console.print(line, soft_wrap="/" in line and ".sock" in line, markup=False)
    if not document["cluster"]["nodes_up"]:
        reasons = (node["error"].removeprefix("no node answers at ") for node in document["nodes"])
        raise Unavailable("no node answers: " + "; ".join(reasons))


def collect(endpoints: Sequence[str], timeout_ms: int = STATUS_TIMEOUT_MS) -> dict[str, Any]:
    """{"cluster": totals, "nodes": [status document | {"endpoint", "error"}]}; each node once."""

    def ask(endpoint: str) -> dict[str, Any]:
        try:
            return {"endpoint": endpoint, **fetch_status(endpoint, timeout_ms)}
        except EmberError as error:
            return {"endpoint": endpoint, "error": " ".join(str(error).split())}

    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        answers = list(pool.map(ask, endpoints))
    nodes: dict[str, dict[str, Any]] = {}
    for answer in answers:  # two endpoints of one node count once
        nodes.setdefault(answer.get("node", answer["endpoint"]), answer)
    return {"cluster": summarize(list(nodes.values())), "nodes": list(nodes.values())}


def summarize(nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the nodes that answered."""
    up = [node for node in nodes if "error" not in node]
    misses: Counter[str] = Counter()
    counters: Counter[str] = Counter()
    for node in up:
        misses.update(node.get("misses", {}))
        counters.update(node.get("counters", {}))
    primaries = sum(node["shards"].get("primary", 0) for node in up)
    live = {name for node in up for name in node.get("live_nodes", [])}
    return {
        "cluster_id": sorted({node["cluster_id"] for node in up}),
        "nodes_up": len(up),
        "nodes_asked": len(nodes),
        "live_nodes": sorted(live),
        "primaries": primaries,
        "shards": SHARDS,
        "epoch_min": min((node["epochs"]["min"] for node in up if node["shards"].get("primary")), default=0),
        "epoch_max": max((node["epochs"]["max"] for node in up), default=0),
        "entries": sum(node.get("entries", 0) for node in up),
        "bytes_used": sum(node.get("bytes_used", 0) for node in up),
        "bytes_total": sum(node.get("bytes_total", 0) for node in up),
        "hints": sum(node.get("hints", 0) for node in up),
        "lag": sum(node.get("lag", 0) for node in up),
        "misses": dict(misses),
        "counters": dict(counters),
    }


def render(document: dict[str, Any]) -> tuple[Table, list[str]]:
    """The document as a table of at most 80 columns, and lines below it."""
    cluster = document["cluster"]
    title = f"cluster {', '.join(cluster['cluster_id']) or '(no answer)'}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    # Long names are folded, and very large counts if it must be; nothing is cut.
    table.add_column("node", overflow="fold")
    table.add_column("state", no_wrap=True)
    for name in ("lease", "shards\np+b+l", "ent-\nries", "used/\ntotal"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("pre-\nfault", "hints/\nlag", "hits/\nmisses", "late\np99"):
        table.add_column(name, justify="right", overflow="fold")
    for node in document["nodes"]:
        table.add_row(*_row(node))
    misses = sorted(cluster["misses"].items(), key=lambda item: -item[1])
    epochs = f"{show_epoch(cluster['epoch_min'])} to {show_epoch(cluster['epoch_max'])}"
    lines = [
        f"{cluster['nodes_up']} of {cluster['nodes_asked']} nodes answer; shards: primary + backup + learner",
        f"{cluster['primaries']} of {cluster['shards']} shards have their primary here; epochs {epochs}",
        "misses: " + (", ".join(f"{reason} {count}" for reason, count in misses) or "none"),
        *(f"{_short_name(node['endpoint'])}: {node['error']}" for node in document["nodes"] if "error" in node),
        *(f"{node['node']}: budget at risk: {risk}" for node in document["nodes"] for risk in _risks(node)),
    ]
    return table, lines


def _risks(node: dict[str, Any]) -> list[str]:
    """What is slower on a node than the failover budget assumes."""
    risks: list[str] = node.get("budget", {}).get("at_risk", [])
    return risks


def show_epoch(epoch: int) -> str:
    """'generation/counter'."""
    return f"{epoch >> EPOCH_GENERATION_SHIFT}/{epoch & ((1 << EPOCH_GENERATION_SHIFT) - 1)}"


def _row(node: dict[str, Any]) -> list[str]:
    if "error" in node:
        return [_short_name(node["endpoint"]), "down", *["-"] * 8]
    shards, total, left_ms = node["shards"], node["bytes_total"], node["lease_left_ms"]
    return [
        node["node"],
        "draining" if node.get("draining") else node["phase"],
        f"{left_ms / 1000:.1f}s" if left_ms else "none",
        "+".join(str(shards.get(role, 0)) for role in ("primary", "backup", "learner")),
        human_count(node["entries"]),
        f"{_compact(node['bytes_used'])}/{_compact(total)}",
        f"{100 * node['prefaulted_bytes'] // total}%" if total else "-",
        f"{human_count(node['hints'])}/{human_count(node['lag'])}",
        f"{human_count(node['counters'].get('get_hits', 0))}/{human_count(sum(node['misses'].values()))}",
        f"{node['heartbeat_lateness_ms']['p99']:.0f}ms",
    ]


def _short_name(endpoint: str) -> str:
    """A socket is named for its node."""
    return endpoint.rpartition("/")[2].removesuffix(".sock").removeprefix("tcp:")


def _compact(count: int) -> str:
    """'4.1M'."""
    number, unit = human_bytes(count).split()
    return number + unit[0].removesuffix("B")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("status")(status)
