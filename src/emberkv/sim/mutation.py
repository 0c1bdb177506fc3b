"""What a mutation is: one bug put into the real code, and the ways to put it in and take it out again.

Laws: a mutation changes the real function, by attribute or in its source, and puts it back; it says which law it breaks
and which world and faults make that show.
Limits: a source change names a line of the code; when that line is gone it raises StaleMutation, which a test shows.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from emberkv.core.budget import plan
from emberkv.sim.cluster import costs_of
from emberkv.sim.engine import Fault, Options
from emberkv.sim.faults import draw, draw_fault, replace_faults

SEEDS_MAX: Final = 60
"""Seeds within which a mutation must be found, unless it states another bound."""

Applied = contextlib.AbstractContextManager[None]
Apply = Callable[[], Applied]


class StaleMutation(AssertionError):
    """What a mutation changes is not in the code any more."""


class Mutation(msgspec.Struct, frozen=True):
    """One bug. `apply()` puts it in for the length of a `with`."""

    name: str
    law: str
    """What it breaks: a promise or an oracle."""
    apply: Apply
    options: Callable[[int], Options] = draw
    """World and faults per seed that make the mistake likely."""
    kind: str = "safety"
    """Or `liveness`: which sort of law it breaks."""
    seeds_max: int = SEEDS_MAX


@contextlib.contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    if name not in vars(owner):
        raise StaleMutation(f"{owner.__name__} has no {name}")
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def swap(owner: Any, name: str, value: Any) -> Apply:
    """Another function, constant or attribute in its place."""
    return lambda: _swapped(owner, name, value)


def rewrite(owner: Any, name: str, *changes: tuple[str, str]) -> Apply:
    """The same function with pieces of its source replaced; each piece must be there exactly once."""
    function = vars(owner).get(name)
    # Read now, while the file is sure to be the one that was imported.
    original = textwrap.dedent(inspect.getsource(function)) if function is not None else ""

    def apply() -> Applied:
        if function is None:
            raise StaleMutation(f"{owner.__name__} has no {name}")
        source = original
        for old, new in changes:
            if source.count(old) != 1:
                raise StaleMutation(f"{owner.__name__}.{name} has {source.count(old)} times: {old}")
            source = source.replace(old, new)
        space: dict[str, Any] = {}
        exec(compile(source, f"<mutated {name}>", "exec"), function.__globals__, space)
        return _swapped(owner, name, space[name])

    return apply


def together(*parts: Apply) -> Apply:
    """Several changes that make one bug."""

    @contextlib.contextmanager
    def apply() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.enter_context(part())
            yield

    return apply


def world(*kinds: str, count: int = 5, **changes: Any) -> Callable[[int], Options]:
    """Options per seed: the seed's own world with some settings changed and `count` faults of these kinds only."""

    def options(seed: int) -> Options:
        rng = random.Random(f"{seed}/mutation")
        drawn = draw(seed)
        settings = {"budget_ms": 500.0, "phase1_ms": 4000.0, "tcp_timeout_ms": 200.0, "requests_per_s": 30.0} | changes
        if settings["budget_ms"] != drawn.budget_ms and drawn.tombstone_retention_ms < 1e6:
            settings.setdefault("tombstone_retention_ms", 6 * settings["budget_ms"])
        drawn = msgspec.structs.replace(drawn, faults=(), **settings)
        faults = [draw_fault(rng, drawn, rng.choice(kinds)) for _ in range(count if kinds else 0)]
        return replace_faults(drawn, tuple(sorted(faults, key=lambda fault: fault.at_ms)))

    return options


def at_once(*kinds: str, groups: int = 3, **changes: Any) -> Callable[[int], Options]:
    """As `world`, but the faults come together: each group hits one node with all of these kinds within half a lease,
    for a lease or two."""

    def options(seed: int) -> Options:
        rng = random.Random(f"{seed}/at once")
        drawn = world(**changes)(seed)
        ttl_ms = plan(drawn.budget_ms, costs_of(drawn)).ttl_ms
        faults: list[Fault] = []
        for _ in range(groups):
            node = rng.choice(drawn.names())
            begin_ms = rng.random() * 0.7 * drawn.phase1_ms
            for kind in kinds:
                fault = draw_fault(rng, drawn, kind)
                other = rng.choice([name for name in drawn.names() if name != node]) if fault.other else ""
                at_ms, for_ms = begin_ms + rng.random() * ttl_ms / 2, ttl_ms * (0.7 + 1.5 * rng.random())
                faults.append(Fault(at_ms, kind, node, other, for_ms, fault.amount, fault.flag))
        return replace_faults(drawn, tuple(sorted(faults, key=lambda fault: fault.at_ms)))

    return options


CALM = world()
CRASHES = world("crash", count=4)
FREEZES = world("pause", "pause", "crash", count=4)
CUTS = world("cut", "isolate", "flap", "clog")
COORDINATOR = world("away", "unknown", "slow-coordinator", "outage", "pause")
CROWDED = world("crash", "cut", "pause", count=4, arena_slots=24, keys=40)
FEW_KEYS = world("cut", "isolate", "crash", "pause", keys=4)
MOVES = world("drain", "drain", "crash", "unknown", nodes=4)
FLIPS = world("flip", "flip", "crash", "cut", count=8)
