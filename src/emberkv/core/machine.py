"""How a state machine of the core moves: by its table and nothing else, so that a missing cell is an error."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from emberkv.errors import InvariantViolation

State = TypeVar("State", bound=Enum)


def moved(table: Mapping[tuple[State, str], State], state: State, what: str, subject: str) -> State:
    """The state that follows. Raises InvariantViolation naming the `subject` when the table does not know the move."""
    following = table.get((state, what))
    if following is None:
        raise InvariantViolation(f"{subject} that is {state.value} cannot take {what!r}")
    return following
