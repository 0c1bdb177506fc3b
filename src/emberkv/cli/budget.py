"""`emberkv budget`: what the one number of the operator turns into, term by term (core/budget.py)."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer
from rich.table import Table

from emberkv.cli.output import emit_json, results
from emberkv.core.budget import Budget, Costs, check_costs, parse_duration_ms, plan, smallest_budget_ms

DEFAULTS = Costs()


def budget_command(
    budget: Annotated[str, typer.Argument(help="Longest outage of session puts, like 3s or 1500ms.")] = "3s",
    commit_ms: Annotated[
        float, typer.Option("--commit-ms", "--coordinator-p99-ms", help="One coordinator commit, p99.9.")
    ] = DEFAULTS.commit_ms,
    watch_ms: Annotated[float, typer.Option(help="From a commit to its watchers, p99.9.")] = DEFAULTS.watch_ms,
    lateness_ms: Annotated[float, typer.Option(help="Lateness of a node's loop, p99.9.")] = DEFAULTS.lateness_ms,
    drift: Annotated[
        float, typer.Option(help="Difference of clock rates (0.0005 = 500 ppm; 0 on one machine).")
    ] = DEFAULTS.drift,
    client_try_ms: Annotated[float, typer.Option(help="A client's attempt under way.")] = DEFAULTS.client_try_ms,
    backoff_ms: Annotated[float, typer.Option(help="Before a client's next attempt.")] = DEFAULTS.backoff_ms,
    election_ms: Annotated[
        float, typer.Option(help="Longest time without a coordinator leader (0: embedded, it has none).")
    ] = DEFAULTS.coordinator_election_ms,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show every term of a failover budget, its worst case, and the smallest that is feasible here."""
    costs = Costs(
        commit_ms=commit_ms,
        watch_ms=watch_ms,
        lateness_ms=lateness_ms,
        drift=drift,
        client_try_ms=client_try_ms,
        backoff_ms=backoff_ms,
        coordinator_election_ms=election_ms,
    )
    check_costs(costs)
    planned = plan(parse_duration_ms(budget), costs)
    document = describe(planned)
    if as_json:
        emit_json(document)
    else:
        _print(planned, document)


def describe(planned: Budget) -> dict[str, Any]:
    """The budget as a JSON document."""
    return {
        "budget_ms": planned.budget_ms,
        "ttl_ms": round(planned.ttl_ms, 3),
        "heartbeat_ms": round(planned.heartbeat_ms, 3),
        "margin_ms": planned.margin_ms,
        "terms": [{"term": term, "meaning": meaning, "ms": round(ms, 3)} for term, meaning, ms in planned.terms()],
        "worst_case_ms": round(planned.worst_case_ms, 3),
        "double_fault_ms": round(planned.double_fault_ms, 3),
        "smallest_budget_ms": math.ceil(smallest_budget_ms(planned.costs)),
        "costs": {name: getattr(planned.costs, name) for name in planned.costs.__struct_fields__},
    }


def _print(planned: Budget, document: dict[str, Any]) -> None:
    console = results()
    table = Table(title=f"failover budget {planned.budget_ms / 1000:g} s", title_justify="left")
    table.add_column("term")
    table.add_column("what passes during an outage of session puts")
    table.add_column("ms", justify="right")
    for term, meaning, ms in planned.terms():
        table.add_row(term, meaning, f"{ms:.1f}")
    table.add_section()
    table.add_row("", "worst case", f"{planned.worst_case_ms:.1f}")
    if planned.costs.coordinator_election_ms:
        both = "double fault: the primary's host and the coordinator's leader"
        table.add_row("", both, f"{planned.double_fault_ms:.1f}")
    else:
        table.add_row("", "double fault: an embedded coordinator has no leader", "-")
    console.print(table)
    console.print(
        f"lease ttl {planned.ttl_ms:.0f} ms, renewed every {planned.heartbeat_ms:.0f} ms, "
        f"given up {planned.margin_ms:.0f} ms early"
    )
    console.print(f"smallest feasible budget under these costs: {document['smallest_budget_ms'] / 1000:g}s")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("budget")(budget_command)
