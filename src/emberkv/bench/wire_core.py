"""The core's share: what one step of 128 keys costs, from bench/core_step.py, as cases with their goals.

Laws: the least of several steps counts, because the code is measured here and not the neighbours' load.
"""

from __future__ import annotations

from typing import Final

from emberkv.bench import core_step
from emberkv.bench.case import Case, Goal, Progress, make_case

NAMES: Final = {
    "get 128 local hits": "core_step_get_128",
    "put 128, primary with one backup": "core_step_put_128",
    "put 128, arena full": "core_step_put_128_full",
}


def run(progress: Progress) -> list[Case]:
    """Get and put, microseconds a key."""
    progress("core_step: one step of 128 keys, without wire, disk or lock")
    cases = []
    for row in core_step.run():
        name, value, goal = str(row["name"]), float(str(row["us_per_key"])), float(str(row["goal"]))
        cases.append(make_case(NAMES.get(name, name), value, "us/key", goal=Goal("value", "<=", goal), what=name))
    return cases
