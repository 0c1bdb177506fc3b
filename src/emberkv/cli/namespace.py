"""`emberkv namespace list | create | set | drop`: what is kept how, changed while the cluster runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from emberkv.cli.blocks import Endpoints, Json, connect
from emberkv.cli.output import emit_json, human_bytes, results
from emberkv.config import parse_size
from emberkv.errors import ConfigError

namespaces = typer.Typer(name="namespace", help="List, create, change and drop namespaces.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the namespace.")]
Factor = Annotated[int | None, typer.Option(help="Replicas that keep the bytes. Default: the cluster's.")]
MinCopies = Annotated[int | None, typer.Option(help="Copies that a session put waits for at least.")]
Verify = Annotated[str | None, typer.Option(help="pin: checksum before each local answer; entry: at entry only.")]
Expiry = Annotated[str | None, typer.Option(help="Life of a block, like 10m; 0: for ever.")]
Owner = Annotated[str | None, typer.Option(help="Who answers for it.")]
Revision = Annotated[int | None, typer.Option(help="Only if the policy still has this revision.")]
Deadline = Annotated[int, typer.Option("--deadline-ms", min=1, max=60_000, help="The answer comes by then.")]


@namespaces.callback(invoke_without_command=True)
def _group(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@namespaces.command("list")
def list_command(
    everything: Annotated[bool, typer.Option("--all", help="Dropped ones too.")] = False,
    deadline_ms: Deadline = 5000,
    endpoint: Endpoints = None,
    as_json: Json = False,
) -> None:
    """Show all namespaces and their policies."""
    with connect(endpoint, "") as client:
        found = client.namespaces(deadline_ms=deadline_ms)
    shown = [space for space in found if everything or not space["dropped"]]
    if as_json:
        emit_json({"namespaces": shown})
    else:
        results().print(render(shown))


@namespaces.command("create")
def create_command(
    name: Name,
    level: Annotated[str | None, typer.Option(help="eventual, session or strong; fixed for ever.")] = None,
    factor: Factor = None,
    min_copies: MinCopies = None,
    verify: Verify = None,
    expiry: Expiry = None,
    owner: Owner = None,
    block_bytes_max: Annotated[str | None, typer.Option(help="Largest block, like 4MiB; fixed for ever.")] = None,
    deadline_ms: Deadline = 5000,
    endpoint: Endpoints = None,
    as_json: Json = False,
) -> None:
    """Create a namespace. A name that was dropped begins anew and empty."""
    with connect(endpoint, "") as client:
        made = client.create_namespace(
            name,
            deadline_ms=deadline_ms,
            level=level,
            factor=factor,
            min_copies=min_copies,
            verify=verify,
            expiry=expiry,
            owner=owner,
            block_bytes_max=None if block_bytes_max is None else parse_size(block_bytes_max),
        )
    _report("created", made, as_json)


@namespaces.command("set")
def set_command(
    name: Name,
    factor: Factor = None,
    min_copies: MinCopies = None,
    verify: Verify = None,
    expiry: Expiry = None,
    owner: Owner = None,
    revision: Revision = None,
    deadline_ms: Deadline = 5000,
    endpoint: Endpoints = None,
    as_json: Json = False,
) -> None:
    """Change the policy of a namespace; what is not named stays."""
    with connect(endpoint, "") as client:
        made = client.set_namespace(
            name,
            revision=revision,
            deadline_ms=deadline_ms,
            factor=factor,
            min_copies=min_copies,
            verify=verify,
            expiry=expiry,
            owner=owner,
        )
    _report("changed", made, as_json)


@namespaces.command("drop")
def drop_command(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Without this nothing is dropped.")] = False,
    revision: Revision = None,
    deadline_ms: Deadline = 5000,
    endpoint: Endpoints = None,
    as_json: Json = False,
) -> None:
    """Drop a namespace with everything in it, at once and for good."""
    if not yes:
        raise ConfigError(f"this drops every block of namespace {name!r} for good: say --yes to do it")
    with connect(endpoint, "") as client:
        document = client.drop_namespace(name, revision=revision, deadline_ms=deadline_ms)
    if as_json:
        emit_json(document)
    else:
        results().print(f"namespace {name}: dropped", soft_wrap=True, markup=False)


def render(found: list[dict[str, Any]]) -> Table:
    """Namespaces as a table of at most 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    # Names have room for their heading and "(dropped)" and are folded where they are longer; nothing else ever is.
    table.add_column("namespace", overflow="fold", min_width=len("(dropped)"))
    table.add_column("level", no_wrap=True)
    table.add_column("owner", overflow="fold", min_width=len("owner"))
    for title in ("factor", "min\ncopies", "block\nmax", "verify", "expiry", "gen", "rev"):
        table.add_column(title, justify="right", no_wrap=True)
    for space in found:
        strong = space["level"] == "strong"
        replicas = ["-", "-"] if strong else [str(space["factor"]), str(space["min_copies"])]
        table.add_row(
            space["name"] + (" (dropped)" if space["dropped"] else ""),
            space["level"],
            space["owner"] or "-",
            *replicas,
            human_bytes(space["block_bytes_max"]),
            "-" if strong else space["verify"],
            "-" if space["expiry"] == "0" else space["expiry"],
            str(space["generation"]),
            str(space["revision"]),
        )
    return table


def _report(what: str, made: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json({"namespace": made})
    else:
        text = f"namespace {made['name']}: {what}, generation {made['generation']}, revision {made['revision']}"
        results().print(text, soft_wrap=True, markup=False)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.add_typer(namespaces)
