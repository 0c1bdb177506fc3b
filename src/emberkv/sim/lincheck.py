"""Is a history of strong reads and writes linearizable? One register per key, since linearizability is local.

Why it exists: `strong` promises that each operation takes effect at one moment between its call and its return. What
clients saw either fits such an order or it does not, whatever the store did inside.
Laws: an operation whose outcome is unknown has no return: it may take effect at any time after its call, or never; an
unknown read says nothing. Work is counted in states, never in seconds, so the verdict is a function of the history.
Limits: with compare-and-set, deletes or equal values the search may give up (Verdict.ok is None) after `states_max`
states; a history that writes each value once is decided in n log n, always.

Two judges. `decide_by_zones` (Gibbons and Korach) needs each value to be written once: every value owns a zone of time,
and it is enough to compare zones. `decide_by_search` (Wing and Gong, with Lowe's memo of states seen) takes the rest.
The tests let them judge the same histories.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, Literal, NamedTuple

UNKNOWN: Final = math.inf
"""Return time of an operation whose outcome is not known."""
STATES_MAX: Final = 200_000
"""States that one key's search may visit: about a second, far more than a simulated history needs."""

Value = Hashable


class StrongOp(NamedTuple):
    """One operation as its client saw it. Times are in nanoseconds of true time, on one clock for all clients."""

    kind: Literal["read", "write", "swap"]
    key: Value
    value: Value
    """What was read (None: nothing there) or written (None: deleted)."""
    called: float
    returned: float
    """UNKNOWN for a write or swap whose outcome was not learned."""
    client: str = ""
    expected: Value = None
    """A swap's condition: the value that must be there."""
    swapped: bool = True
    """A swap's answer; means nothing while `returned` is UNKNOWN."""


class Verdict(NamedTuple):
    """`ok` None: undecided within the bound. `why` names the key and the operations that do not fit."""

    ok: bool | None
    why: str = ""


def check(history: Iterable[StrongOp], initial: Value = None, states_max: int = STATES_MAX) -> Verdict:
    """Judges every key; the first one that is wrong decides, else the first undecided one."""
    keys: dict[Value, list[StrongOp]] = {}
    for op in history:
        keys.setdefault(op.key, []).append(op)
    undecided = Verdict(True)
    for key, ops in keys.items():
        verdict = check_key(ops, initial, states_max)
        if verdict.ok is False:
            return Verdict(False, f"key {key!r}: {verdict.why}")
        if verdict.ok is None and undecided.ok:
            undecided = Verdict(None, f"key {key!r}: {verdict.why}")
    return undecided


def check_key(ops: Sequence[StrongOp], initial: Value = None, states_max: int = STATES_MAX) -> Verdict:
    """Judges the operations of one key."""
    told = [op for op in ops if op.kind != "read" or op.returned != UNKNOWN]
    written = [op.value for op in told if op.kind == "write"]
    simple = len(set(written)) == len(written) and initial not in written
    if simple and not any(op.kind == "swap" for op in told):
        return decide_by_zones(told, initial)
    return decide_by_search(told, initial, states_max)


# -- each value written once: zones ------------------------------------------------------------------------------


class _Zone(NamedTuple):
    """Of one value: its write and reads. `first` is the earliest return, `last` the latest call among them. If
    first < last the value certainly holds all of that time; else it can hold at one moment within [last, first]."""

    first: float
    last: float
    value: Value


def decide_by_zones(ops: Sequence[StrongOp], initial: Value = None) -> Verdict:
    """For reads and writes only, where no value is written twice and none equals `initial`."""
    writes = {op.value: op for op in ops if op.kind == "write"}
    first: dict[Value, float] = {initial: -UNKNOWN}
    last: dict[Value, float] = {initial: -UNKNOWN}
    for op in ops:
        if op.kind == "read":
            write = writes.get(op.value)
            if op.value != initial:
                if write is None:
                    return Verdict(False, f"read {op.value!r}, which nobody wrote")
                if op.returned < write.called:
                    return Verdict(False, f"read {op.value!r} before it was written")
        elif op.returned == UNKNOWN and op.value not in first:
            first[op.value] = UNKNOWN  # may never have happened; a read below may say that it did
            last[op.value] = op.called
            continue
        first[op.value] = min(first.get(op.value, UNKNOWN), op.returned)
        last[op.value] = max(last.get(op.value, -UNKNOWN), op.called)
    zones = [_Zone(first[value], last[value], value) for value in first if first[value] != UNKNOWN]
    return _compare_zones(zones)


def _compare_zones(zones: list[_Zone]) -> Verdict:
    """No two forward zones overlap, and no backward zone lies within a forward one."""
    forward = sorted((zone for zone in zones if zone.first < zone.last), key=lambda zone: zone.first)
    for left, right in itertools.pairwise(forward):
        if right.first < left.last:
            return Verdict(False, f"values {left.value!r} and {right.value!r} were each seen after the other")
    backward = sorted((zone for zone in zones if zone.first >= zone.last), key=lambda zone: zone.last)
    at = 0
    for zone in backward:
        while at < len(forward) and forward[at].last <= zone.last:
            at += 1
        if at < len(forward) and forward[at].first < zone.last and zone.first < forward[at].last:
            why = f"value {zone.value!r} came and went while {forward[at].value!r} was seen before and after it"
            return Verdict(False, why)
    return Verdict(True)


# -- anything else: search ---------------------------------------------------------------------------------------


def decide_by_search(ops: Sequence[StrongOp], initial: Value = None, states_max: int = STATES_MAX) -> Verdict:
    """Tries the orders that real time allows, each (operations done, value) once."""
    ordered = sorted(
        (op for op in ops if op.kind != "read" or op.returned != UNKNOWN), key=lambda op: (op.called, op.returned)
    )
    must = sum(1 << index for index, op in enumerate(ordered) if op.returned != UNKNOWN)
    seen: set[tuple[int, Value]] = set()
    stack: list[tuple[int, Value]] = [(0, initial)]
    furthest, stuck = -1, ""
    while stack:
        done, value = stack.pop()
        if done & must == must:
            return Verdict(True)
        if (done, value) in seen:
            continue
        if len(seen) >= states_max:
            return Verdict(None, f"undecided after {states_max} states")
        seen.add((done, value))
        candidates = _candidates(ordered, done)
        if (done & must).bit_count() > furthest:
            furthest = (done & must).bit_count()
            names = ", ".join(_told(ordered[index]) for index in candidates[:4])
            stuck = f"after {furthest} operations the value is {value!r} and none of these fits: {names}"
        for index in reversed(candidates):
            stack.extend((done | 1 << index, following) for following in _effects(ordered[index], value))
    return Verdict(False, stuck)


def _candidates(ordered: Sequence[StrongOp], done: int) -> list[int]:
    """What may come next: called before anything that is not done returned."""
    found: list[int] = []
    earliest = UNKNOWN
    rest = ~done
    for index in range((rest & -rest).bit_length() - 1, len(ordered)):
        op = ordered[index]
        if op.called > earliest:
            break
        if not done >> index & 1:
            found.append(index)
            earliest = min(earliest, op.returned)
    return [index for index in found if ordered[index].called <= earliest]


def _effects(op: StrongOp, value: Value) -> list[Value]:
    """Values after the operation takes effect here; none if its answer does not fit."""
    if op.kind == "write":
        return [op.value]
    if op.kind == "read":
        return [value] if op.value == value else []
    holds = value == op.expected
    if op.returned != UNKNOWN and op.swapped != holds:
        return []
    return [op.value if holds else value]


def _told(op: StrongOp) -> str:
    return f"{op.client or 'somebody'} {op.kind} {op.value!r} [{op.called:g}, {op.returned:g}]"
