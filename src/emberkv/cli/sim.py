"""`emberkv sim`: runs simulated clusters, one per seed, and says which promise broke in which.

Laws: stdout has the result (one JSON document with --json), stderr everything else; the exit code is 1 when anything
was found. A failing seed is told in few lines and with the command that repeats it.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emberkv.cli.output import emit_error, emit_json, notes, results
from emberkv.errors import ConfigError

if TYPE_CHECKING:
    from emberkv.sim.engine import Options
    from emberkv.sim.run import Outcome
    from emberkv.sim.story import Story

# The simulator is imported where it runs: it loads the core and the node, which no other command should wait for.

FRESH_FROM = 1_000_000
"""Fresh seeds lie above all fixed ones."""
PROGRESS_S = 2.0
STORIES_MAX = 3
"""Failing seeds whose story is told; the others are named."""
JOBS_MAX = 64


def sim_command(
    seeds: Annotated[int, typer.Option(help="How many seeds to run, from --first on; 0 only with --fresh.")] = 100,
    first: Annotated[int, typer.Option(help="First of them.")] = 0,
    fresh: Annotated[int, typer.Option(help="So many more, drawn by real chance; they are named at the end.")] = 0,
    jobs: Annotated[int, typer.Option(help=f"Processes that run seeds, 1 to {JOBS_MAX}.")] = 2,
    seconds: Annotated[float, typer.Option(help="Virtual seconds of a usual run, 1 to 3600.")] = 20.0,
    seed: Annotated[int | None, typer.Option(help="Run this one seed only, instead of --seeds.")] = None,
    story: Annotated[bool, typer.Option("--story", help="Tell what happened in it; needs --seed.")] = False,
    shrink_it: Annotated[
        bool, typer.Option("--shrink", help="For what failed, find the fewest faults that still make it fail.")
    ] = False,
    mutations: Annotated[
        bool,
        typer.Option("--mutations", help="Break the code on purpose, one way at a time; all must be found (minutes)."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Simulate clusters under faults and check every promise; one seed is one run."""
    if seeds < 0 or fresh < 0 or first < 0 or not 1 <= jobs <= JOBS_MAX or not 1 <= seconds <= 3600:
        raise ConfigError(f"seeds, fresh and first are at least 0, jobs 1 to {JOBS_MAX}, seconds 1 to 3600")
    if seed is not None and seed < 0:
        raise ConfigError(f"--seed: {seed} is below 0")
    if story and seed is None:
        raise ConfigError("--story tells of one run: name it with --seed (seeds that fail are told without it)")
    if seed is None and not mutations and seeds + fresh == 0:
        raise ConfigError("no seed to run: give --seeds, --fresh or --seed")
    if mutations:
        raise typer.Exit(_mutations(jobs, as_json=as_json))
    if seed is not None:
        raise typer.Exit(_one(seed, seconds, story=story, smaller=shrink_it, as_json=as_json))
    chosen = list(range(first, first + seeds)) + fresh_seeds(fresh)
    raise typer.Exit(_many(chosen, fresh, jobs, seconds, smaller=shrink_it, as_json=as_json))


def fresh_seeds(count: int) -> list[int]:
    """Seeds out of real chance."""
    chance = random.SystemRandom()
    return [chance.randrange(FRESH_FROM, 1 << 40) for _ in range(count)]


# -- one seed ----------------------------------------------------------------------------------------------------------


def _one(seed: int, seconds: float, *, story: bool, smaller: bool, as_json: bool) -> int:
    from emberkv.sim.faults import draw
    from emberkv.sim.run import run_seed
    from emberkv.sim.story import Story

    options = draw(seed, seconds=seconds)
    teller = Story()
    outcome = run_seed(seed, options, story=teller)
    if smaller and outcome.violation:
        options = _shrink(seed, options)
        teller = Story()
        outcome = run_seed(seed, options, story=teller)
    if story or outcome.violation:
        _tell(seed, seconds, options, teller, smaller=smaller)
    if as_json:
        emit_json(one_document(outcome))
    elif not outcome.violation:
        results().print(
            f"seed {seed}: nothing found in {outcome.virtual_ms / 1000:.1f} virtual seconds, {outcome.steps} steps, "
            f"{outcome.faults} faults; outage {outcome.outage_ms:.0f} of {outcome.bound_ms:.0f} ms"
        )
    return 1 if outcome.violation else 0


def _shrink(seed: int, options: Options) -> Options:
    from emberkv.sim.shrink import shrink

    shrunk = shrink(seed, options, lambda text: notes().print(f"  {text}", soft_wrap=True, markup=False))
    if shrunk is None:
        return options
    notes().print(f"{shrunk.faults_before} faults became {len(shrunk.options.faults)} after {shrunk.runs} runs")
    return shrunk.options


def _tell(seed: int, seconds: float, options: Options, teller: Story, *, smaller: bool) -> None:
    console = notes()
    world = ", ".join(f"{name}={getattr(options, name)}" for name in options.__struct_fields__ if name != "faults")
    console.print(f"seed {seed}: {world}", soft_wrap=True, markup=False)
    begin_ms = teller.faults_begin_ms
    if options.faults:
        told = "none had begun" if begin_ms is None else "all times: ms since the start of the cluster"
        console.print(f"  faults that were drawn ({told}):", soft_wrap=True, markup=False)
    for fault in options.faults:
        # A fault is drawn for so long after the moment at which the cluster serves; the story begins at its start.
        at = f"{fault.at_ms:.0f} ms after it serves" if begin_ms is None else f"{begin_ms + fault.at_ms:.1f} ms"
        console.print(f"  at {at}: {fault.text()}", soft_wrap=True, markup=False)
    for line in teller.lines():
        console.print(line, soft_wrap=True, markup=False)
    console.print(
        f"again: emberkv sim --seed {seed} --seconds {seconds:g} --story{' --shrink' if smaller else ''}",
        soft_wrap=True,
        markup=False,
    )


def one_document(outcome: Outcome) -> dict[str, Any]:
    """One run as JSON."""
    fields = {name: getattr(outcome, name) for name in outcome.__struct_fields__}
    return fields | {"outage_within_budget": outcome.outage_within_budget}


# -- many seeds --------------------------------------------------------------------------------------------------------


def _run(task: tuple[int, float]) -> Outcome:
    from emberkv.sim.faults import draw
    from emberkv.sim.run import run_seed

    seed, seconds = task
    return run_seed(seed, draw(seed, seconds=seconds))


def run_all(seeds: Iterable[int], jobs: int, seconds: float) -> Iterator[Outcome]:
    """Outcomes as they come, from `jobs` processes."""
    tasks = [(seed, seconds) for seed in seeds]
    if jobs == 1:
        yield from map(_run, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_run, tasks, chunksize=4)


def _many(seeds: list[int], fresh: int, jobs: int, seconds: float, *, smaller: bool, as_json: bool) -> int:
    console, begun_s = notes(), time.monotonic()
    said_s = begun_s
    outcomes: list[Outcome] = []
    for outcome in run_all(seeds, jobs, seconds):
        outcomes.append(outcome)
        if outcome.violation:
            emit_error(f"seed {outcome.seed} ({outcome.phase}): {outcome.violation}")
        if time.monotonic() - said_s > PROGRESS_S:
            said_s = time.monotonic()
            rate = len(outcomes) / (said_s - begun_s)
            console.print(f"{len(outcomes)} of {len(seeds)} seeds, {rate:.1f} a second")
    took_s = time.monotonic() - begun_s
    failed = sorted(outcome.seed for outcome in outcomes if outcome.violation)
    for seed in failed[:STORIES_MAX]:
        _one(seed, seconds, story=True, smaller=smaller, as_json=False)
    if fresh:
        console.print(f"fresh seeds: {' '.join(str(seed) for seed in seeds[-fresh:])}", soft_wrap=True, markup=False)
    document = many_document(outcomes, took_s)
    if as_json:
        emit_json(document)
    else:
        results().print(
            f"{document['seeds']} seeds, {document['violations']} violations, {document['seeds_per_s']:.1f} seeds a "
            f"second; outages within budget: {document['outage_within_budget']:.1%} of {document['outages']}"
        )
    return 1 if failed else 0


def many_document(outcomes: list[Outcome], took_s: float) -> dict[str, Any]:
    """All runs as JSON."""
    measured = [outcome for outcome in outcomes if outcome.outage_ms >= 0]
    within = sum(bool(outcome.outage_within_budget) for outcome in measured)
    rested = [outcome.rest_ms for outcome in outcomes if outcome.rest_ms >= 0]
    return {
        "seeds": len(outcomes),
        "violations": sum(bool(outcome.violation) for outcome in outcomes),
        "seeds_per_s": round(len(outcomes) / max(took_s, 1e-9), 2),
        "outage_within_budget": within / len(measured) if measured else 1.0,
        "outages": len(measured),
        "outage_share_of_bound_max": max((outcome.outage_ms / outcome.bound_ms for outcome in measured), default=0.0),
        "outages_by_budget_ms": _by_budget(measured),
        "rest_ms_median": statistics.median(rested) if rested else 0.0,
        "steps": sum(outcome.steps for outcome in outcomes),
        "virtual_s": round(sum(outcome.virtual_ms for outcome in outcomes) / 1000, 1),
        "failed": [[outcome.seed, outcome.violation] for outcome in outcomes if outcome.violation],
    }


def _by_budget(measured: list[Outcome]) -> dict[str, dict[str, Any]]:
    """Outages of the crashes at the end, for each failover budget that the seeds drew."""
    found: dict[str, dict[str, Any]] = {}
    for budget_ms in sorted({outcome.budget_ms for outcome in measured}):
        runs = [outcome for outcome in measured if outcome.budget_ms == budget_ms]
        found[f"{budget_ms:g}"] = {
            "outages": len(runs),
            "within": sum(bool(outcome.outage_within_budget) for outcome in runs),
            "share_of_bound_max": round(max(outcome.outage_ms / outcome.bound_ms for outcome in runs), 3),
        }
    return found


def _mutations(jobs: int, *, as_json: bool) -> int:
    from emberkv.sim.mutations import run_mutations

    report = run_mutations(MUTATION_SEEDS_MAX, jobs, lambda text: notes().print(text, soft_wrap=True, markup=False))
    if as_json:
        emit_json(report)
    else:
        results().print(f"{report['caught']} of {report['mutations']} caught, median {report['median_seeds']} seeds")
    return 0 if report["caught"] == report["mutations"] else 1


MUTATION_SEEDS_MAX = 200
"""A mutation that so many seeds do not find is not found."""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("sim")(sim_command)
