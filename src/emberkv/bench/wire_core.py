"""The core's share: what one step of 128 keys costs, from bench/core_step.py, as cases with their goals."""

from __future__ import annotations

from emberkv.bench.case import Case, Progress


def run(quick: bool, progress: Progress) -> list[Case]:
    """Get and put, microseconds a key."""
    progress("core_step: one step of 128 keys")
    return []
