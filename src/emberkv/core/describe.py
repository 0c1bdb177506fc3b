"""The state machines of the core as diagrams, made from the very tables that the code runs on.

docs/PROTOCOL.md carries what this prints between markers; a test compares the two, so that a diagram cannot be out of
date. `python -m emberkv.core.describe FILE` rewrites the marked parts of a document.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emberkv.core import handover, lease, repair
from emberkv.errors import ConfigError

_MARK = re.compile(r"(<!-- states: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

MACHINES: dict[str, tuple[str, Mapping[Any, Any], Mapping[str, str]]] = {
    "lease": ("one incarnation of a node", lease.TRANSITIONS, {"refused": "the process ends"}),
    "repair": (
        "one shard compared with one replica",
        repair.TRANSITIONS,
        {"probing": "spans equal, so complete", "adopting": "answered, so complete"},
    ),
    "handover": (
        "one shard given to another primary",
        handover.TRANSITIONS,
        {
            "closing": "the next one is lost, gate open again",
            "committing": "committed, or the record moved, or refused (gate open again)",
            "settling": "own commit, or the record moved",
        },
    ),
}
"""Name -> (what it is about, its table, how it ends from a state). Mermaid takes neither ":" nor ";" in these words."""


def diagram(name: str) -> str:
    """A Mermaid state diagram of one machine."""
    about, table, ends = MACHINES[name]
    states = [state for (state, _), _ in table.items()]
    lines = ["```mermaid", "stateDiagram-v2", f"    %% {about}", f"    [*] --> {states[0].value}"]
    lines += [f"    {state.value} --> {following.value}: {what}" for (state, what), following in table.items()]
    lines += [f"    {state} --> [*]: {what}" for state, what in ends.items()]
    return "\n".join([*lines, "```", ""])


def rewritten(text: str) -> str:
    """The document with every marked part made anew. Raises ConfigError for an unknown machine."""

    def fill(found: re.Match[str]) -> str:
        if found[2] not in MACHINES:
            raise ConfigError(f"no state machine is called {found[2]!r}: there are {', '.join(MACHINES)}")
        return found[1] + diagram(found[2]) + found[3]

    return _MARK.sub(fill, text)


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(rewritten(document.read_text()))
