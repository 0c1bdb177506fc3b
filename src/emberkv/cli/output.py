"""What a command says, and where: results on stdout, everything else on stderr.

Laws: with --json exactly one JSON document goes to stdout, at once and with a line end; progress and errors never do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import Console


def results() -> Console:
    """The console for results (made per use, so that a redirected stdout is honoured)."""
    return Console(highlight=False)


def notes() -> Console:
    """The console for progress and remarks."""
    return Console(stderr=True, highlight=False)


def emit_json(document: Mapping[str, Any]) -> None:
    """The one JSON document of a command."""
    encoded = msgspec.json.format(msgspec.json.encode(document), indent=2)
    sys.stdout.write(encoded.decode() + "\n")
    sys.stdout.flush()


def emit_error(text: str) -> None:
    """One line on stderr, whatever the text holds."""
    sys.stderr.write(f"emberkv: {' '.join(text.split())}\n")
    sys.stderr.flush()


def human_count(count: int) -> str:
    """'1.2M': five characters at most, for a column that must not grow."""
    if count < 10_000:
        return str(count)
    for unit, size in (("k", 10**3), ("M", 10**6), ("G", 10**9), ("T", 10**12)):
        if count < 1000 * size:
            return f"{count // (size // 10) / 10}{unit}" if count < 100 * size else f"{count // size}{unit}"
    return f"{count:.0e}"


def human_bytes(count: float) -> str:
    """'512 MiB': three digits are enough to read."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
