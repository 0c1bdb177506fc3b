"""The judge of strong histories judges known ones rightly, and its two ways agree."""

from __future__ import annotations

import random
from typing import Any

import pytest

from emberkv.sim.lincheck import UNKNOWN, StrongOp, check, check_key, decide_by_search, decide_by_zones


def write(value: Any, called: float, returned: float = UNKNOWN, key: str = "x") -> StrongOp:
    return StrongOp("write", key, value, called, returned)


def read(value: Any, called: float, returned: float = UNKNOWN, key: str = "x") -> StrongOp:
    return StrongOp("read", key, value, called, returned)


def swap(expected: Any, value: Any, called: float, returned: float = UNKNOWN, *, swapped: bool = True) -> StrongOp:
    return StrongOp("swap", "x", value, called, returned, expected=expected, swapped=swapped)


GOOD = {
    "empty": [],
    "one after another": [write(1, 0, 1), read(1, 2, 3), write(2, 4, 5), read(2, 6, 7)],
    "a read beside a write sees either": [write(1, 0, 10), read(None, 1, 2), read(1, 3, 4)],
    "two writes at once, in either order": [write(1, 0, 10), write(2, 0, 10), read(2, 1, 3), read(1, 4, 6)],
    "an unknown write seen later": [write(1, 0), read(None, 2, 3), read(1, 4, 5)],
    "an unknown write never seen": [write(1, 0), write(2, 1, 2), read(2, 3, 4)],
    "an unknown write late, over a newer one": [write(1, 0), write(2, 1, 2), read(2, 3, 4), read(1, 5, 6)],
    "an unknown read says nothing": [write(1, 0, 1), read("never", 2)],
    "deleted": [write(1, 0, 1), write(None, 2, 3), read(None, 4, 5)],
    "a swap that holds": [write(1, 0, 1), swap(1, 2, 2, 3), read(2, 4, 5)],
    "a swap that does not": [write(1, 0, 1), swap(7, 2, 2, 3, swapped=False), read(1, 4, 5)],
    "an unknown swap": [write(1, 0, 1), swap(1, 2, 2), read(1, 3, 4), read(2, 5, 6)],
    "equal values": [write(1, 0, 1), write(2, 2, 3), write(1, 4, 5), read(1, 6, 7)],
    "touching times": [write(1, 0, 1), read(None, 1, 2), read(1, 2, 3)],
}

BAD = {
    "new, then old": [write(1, 0, 10), read(1, 2, 3), read(None, 4, 5)],
    "a lost write": [write(1, 0, 1), read(None, 2, 3)],
    "stale read": [write(1, 0, 1), write(2, 2, 3), read(1, 4, 5)],
    "a value from nowhere": [write(1, 0, 1), read(2, 2, 3)],
    "read before it was written": [read(1, 0, 1), write(1, 2, 3)],
    "an unknown write seen before its call": [read(1, 0, 1), write(1, 2)],
    "an unknown write, seen and gone again": [write(1, 0), read(1, 1, 2), read(None, 3, 4)],
    "two readers, two orders": [write(1, 0, 9), write(2, 0, 9), read(1, 10, 11), read(2, 12, 13)],
    "each after the other": [
        write(1, 0, 100), write(2, 0, 100), read(1, 1, 2), read(2, 3, 4), read(1, 5, 6), read(2, 7, 8),
    ],
    "two swaps from the same value": [swap(None, 1, 0, 1), swap(None, 2, 0.5, 2)],
    "a swap that says no and had to hold": [write(1, 0, 1), swap(1, 2, 2, 3, swapped=False)],
    "deleted and seen again": [write(1, 0, 1), write(None, 2, 3), read(1, 4, 5)],
    "a lost delete": [write(1, 0, 1), write(None, 2, 3), write(2, 4, 5), write(None, 6, 7), read(2, 8, 9)],
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_is_accepted(name: str) -> None:
    assert check(GOOD[name]).ok is True
    assert decide_by_search(GOOD[name]).ok is True


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_refused_and_the_key_is_named(name: str) -> None:
    verdict = check(BAD[name])
    assert verdict.ok is False
    assert "'x'" in verdict.why
    assert decide_by_search(BAD[name]).ok is False


def test_keys_are_judged_apart() -> None:
    # As one register this history is wrong; as two it is right.
    history = [write(1, 0, 1, "x"), write(2, 2, 3, "y"), read(1, 4, 5, "x"), read(2, 6, 7, "y")]
    assert check(history).ok is True
    assert check([*history, read(1, 8, 9, "y")]).ok is False


def register_history(rng: random.Random, operations: int, damage: float) -> list[StrongOp]:
    """What clients of a real register see, with wrong answers mixed in at times."""
    value: int | None = None
    now, history = 0.0, []
    for number in range(operations):
        called = now + rng.random()
        effect = called + rng.random() * 3
        returned = effect + rng.random() * 3
        now += rng.random() * 1.5
        history.append((effect, called, returned, number))
    answers: list[StrongOp] = []
    last: list[int | None] = [None]
    for _, called, returned, number in sorted(history):
        if rng.random() < 0.4:
            unknown, happens = rng.random() < 0.2, rng.random() < 0.5
            if not unknown or happens:
                value = number
                last.append(number)
            answers.append(write(number, called, UNKNOWN if unknown else returned))
        else:
            seen = rng.choice(last) if rng.random() < damage else value
            answers.append(read(seen, called, returned))
    return answers


def test_both_ways_agree() -> None:
    verdicts = []
    for seed in range(300):
        history = register_history(random.Random(seed), 14, damage=0.0 if seed % 2 else 0.25)
        zones, search = decide_by_zones(history), decide_by_search(history)
        assert zones.ok == search.ok, f"seed {seed}: {zones} {search} {history}"
        if seed % 2:
            assert zones.ok, f"seed {seed}: a true register was refused"
        verdicts.append(zones.ok)
    assert 50 < verdicts.count(False) < 250  # both verdicts are exercised


def test_a_long_history_of_single_writes_is_always_decided() -> None:
    history = register_history(random.Random(1), 4000, damage=0.0)
    assert check_key(history, states_max=1).ok is True


def test_the_search_gives_up_at_its_bound_and_says_so() -> None:
    history = [write(0, 0, 100), write(0, 0, 100), *(write(n, 0, 100) for n in range(1, 20)), read(99, 200, 201)]
    verdict = check(history, states_max=500)
    assert verdict.ok is None
    assert "500" in verdict.why
