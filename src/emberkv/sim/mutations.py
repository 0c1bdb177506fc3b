"""Bugs put into the real code on purpose, and how many seeds it takes to find each.

Why it exists: a simulator that never failed is unproven, so it must find every one of these. If no seed finds one, an
oracle or a kind of fault is missing.
Laws: a seed counts only if the same world, unmutated, breaks nothing. A run that does not end by itself counts as
found: nothing but the mutation makes it so.
"""

from __future__ import annotations

import multiprocessing
import signal
import statistics
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, NoReturn

import msgspec

from emberkv.sim.engine import Options, Violation
from emberkv.sim.mutation import Mutation
from emberkv.sim.mutations_liveness import LIVENESS
from emberkv.sim.mutations_safety import SAFETY
from emberkv.sim.run import Outcome, run_seed

MUTATIONS: Final[tuple[Mutation, ...]] = (*SAFETY, *LIVENESS)
RUN_LIMIT_S: Final = 30
"""A mutated run that takes so long goes round in circles; a usual one takes a fifth of a second."""


class Found(msgspec.Struct):
    """What became of one mutation. `seeds`: how many were run, the last of which found it if `caught`."""

    name: str
    kind: str
    law: str
    caught: bool
    seeds: int
    seed: int = -1
    violation: str = ""


def find(mutation: Mutation, seeds_max: int, first: int = 0) -> Found:
    """Runs seeds under a mutation until one finds it."""
    bound = min(seeds_max, mutation.seeds_max)
    for count, seed in enumerate(range(first, first + bound), 1):
        options = mutation.options(seed)
        with mutation.apply():
            outcome = _limited(seed, options)
        if outcome.violation and not run_seed(seed, options).violation:
            return Found(mutation.name, mutation.kind, mutation.law, True, count, seed, outcome.violation)
    return Found(mutation.name, mutation.kind, mutation.law, False, bound)


def _limited(seed: int, options: Options) -> Outcome:
    """Ends a run that goes round in circles; only where this process may set an alarm (its main thread)."""

    def ring(_number: int, _frame: FrameType | None) -> NoReturn:
        raise Violation(f"seed {seed} did not end within {RUN_LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(RUN_LIMIT_S)
    try:
        return run_seed(seed, options)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _find_named(task: tuple[str, int]) -> Found:
    name, seeds_max = task
    return find(next(mutation for mutation in MUTATIONS if mutation.name == name), seeds_max)


def find_all(seeds_max: int, jobs: int, names: tuple[str, ...] = ()) -> Iterator[Found]:
    """Every mutation (or those named), as they end, in `jobs` processes."""
    tasks = [(mutation.name, seeds_max) for mutation in MUTATIONS if not names or mutation.name in names]
    if jobs == 1:
        yield from map(_find_named, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_find_named, tasks, chunksize=1)


def run_mutations(seeds_max: int, jobs: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """All mutations: {"mutations", "caught", "median_seeds", "each": [...]}; the median is of the seeds needed."""
    found: list[Found] = []
    for one in find_all(seeds_max, jobs):
        found.append(one)
        end = f"seed {one.seed}: {one.violation}" if one.caught else "NOT FOUND"
        progress(f"{one.name}: {one.seeds} seeds, {end}"[:200])
    needed = [one.seeds for one in found if one.caught]
    order = {mutation.name: number for number, mutation in enumerate(MUTATIONS)}
    return {
        "mutations": len(found),
        "caught": len(needed),
        "median_seeds": statistics.median(needed) if needed else 0,
        "seeds_needed_max": max(needed, default=0),
        "each": [msgspec.to_builtins(one) for one in sorted(found, key=lambda one: order[one.name])],
    }
