"""Plain data: what must be the same in every process."""

from __future__ import annotations

import subprocess
import sys

from emberkv.types import EPOCH_GENERATION_SHIFT, NO_VERSION, SHARDS, MissReason, Version, shard_of


def test_a_key_has_one_shard_with_and_without_its_scope() -> None:
    """Clients route by the bare key, nodes keep it behind its scope; they once disagreed on who is its primary."""
    for number in range(200):
        key = number.to_bytes(32, "big")
        assert shard_of(key) == shard_of(b"scope---" + key)


def test_shards_are_the_same_in_every_process_and_all_are_used() -> None:
    keys = [number.to_bytes(32, "big") for number in range(4096)]
    assert {shard_of(key) for key in keys} == set(range(SHARDS))
    code = "from emberkv.types import shard_of; print([shard_of(n.to_bytes(32, 'big')) for n in range(64)])"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == str([shard_of(key) for key in keys[:64]])


def test_versions_are_ordered_by_epoch_then_sequence() -> None:
    assert NO_VERSION < Version(1, 1) < Version(1, 2) < Version(2, 1) < Version(1 << EPOCH_GENERATION_SHIFT, 1)


def test_every_reason_has_a_label() -> None:
    assert MissReason.SLOWER_THAN_RECOMPUTE.label == "slower-than-recompute"
    assert len({reason.label for reason in MissReason}) == len(MissReason)
