"""`emberkv drain NODE`: takes the shards off a node before it is stopped, so that no request fails."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from emberkv.cli.blocks import Endpoints, Json, connect
from emberkv.cli.output import emit_json, notes, results
from emberkv.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from emberkv.client import Client

LOOK_S: Final = 0.2


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.")],
    wait: Annotated[bool, typer.Option("--wait", help="Return when the node holds no shard any more.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Let the node take part again.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, max=86_400, help="Longest wait, in seconds.")] = 300,
    deadline_ms: Annotated[int, typer.Option("--deadline-ms", min=1, max=60_000, help="Of one command.")] = 5000,
    endpoint: Endpoints = None,
    as_json: Json = False,
) -> None:
    """Move all shards off a node; then it can be stopped without an outage."""
    if wait and undo:
        raise ConfigError("--undo has nothing to wait for: leave --wait out")
    with connect(endpoint, "") as client:
        document = client.drain(node, undo=undo, deadline_ms=deadline_ms)
        if wait:
            document = _wait(client, node, document, timeout_s, deadline_ms)
    if as_json:
        emit_json(document)
    elif undo:
        results().print(f"node {node}: takes part again", soft_wrap=True, markup=False)
    else:
        results().print(describe(document), soft_wrap=True, markup=False)


def _wait(client: Client, node: str, document: dict[str, Any], timeout_s: float, deadline_ms: int) -> dict[str, Any]:
    """Looks until nothing is left; each step forward is a line of progress."""
    end_s = time.monotonic() + timeout_s
    told, seen = "", bool(document["draining"])
    while not document["drained"]:
        if describe(document) != told:
            told = describe(document)
            notes().print(told, soft_wrap=True, markup=False)
        if time.monotonic() >= end_s:
            raise Unavailable(
                f"{told} after {timeout_s:g} s; it goes on: look again with `emberkv drain {node} --wait`"
            )
        time.sleep(LOOK_S)
        try:
            document = client.drain_status(node, deadline_ms=deadline_ms)
        except Unavailable as error:
            # The node that was asked may be the one that is drained and stopped; the next look asks another one.
            notes().print(f"look again: {error}", soft_wrap=True, markup=False)
            continue
        seen = seen or document["draining"]
        if document["live"] and seen and not document["draining"]:
            raise Unavailable(f"the drain of {node} was taken back (--undo), or the node has restarted: drain it again")
        if not document["live"]:
            raise Unavailable(f"node {node} is not alive any more: its shards are taken over as after a loss")
    return document


def describe(document: dict[str, Any]) -> str:
    """One line about how far a drain has come."""
    node, primary, replica = document["node"], document["primary"], document["replica"]
    if document["drained"]:
        return f"node {node}: drained, it can be stopped"
    state = "draining" if document["draining"] else "asked to drain"
    return f"node {node}: {state}, still primary of {primary} and replica of {replica} shards"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("drain")(drain)
