"""Breaks a node on purpose: Python imports this file before the node's own, if this folder is in PYTHONPATH.

Why it exists: the storms on real nodes must be seen to fail. EMBERKV_STRESS_BREAK says what is broken.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def pin_ends_early() -> None:
    from emberkv.node.connections import Pins

    add = Pins.add

    def early(self: Pins, infos: Any, slots: Any) -> Any:
        pin, infos = add(self, infos, slots)
        slots = self._pins.pop(pin, [])
        size = sum(slot.length for slot in slots)
        self.bytes -= size
        self._total.give_back(size)
        self._runtime.unref(slots)
        return pin, infos

    Pins.add = early  # type: ignore[method-assign]


def slot_is_handed_out_twice() -> None:
    from emberkv.errors import InvariantViolation
    from emberkv.storage.arena import SlabArena, Slot

    reserve = SlabArena.reserve
    last: dict[int, Slot] = {}
    calls = [0]

    def twice(self: SlabArena, length: int) -> Slot | None:
        slot = reserve(self, length)
        calls[0] += 1
        if slot is not None and calls[0] % 10 == 0 and slot.size_class in last:
            slot = Slot(last[slot.size_class].offset, length, slot.size_class)  # and the right one is lost
        if slot is not None:
            last[slot.size_class] = slot
        return slot

    def forgiving(self: SlabArena, slot: Slot) -> None:
        if slot.size_class and last.get(slot.size_class) is not slot:
            try:
                release(self, slot)
            except InvariantViolation:
                pass  # the node would end at once, and nobody would have to read to find it

    release = SlabArena.release
    SlabArena.reserve = twice  # type: ignore[method-assign]
    SlabArena.release = forgiving  # type: ignore[method-assign]


def write_is_torn() -> None:
    import numpy as np

    from emberkv.node import serve
    from emberkv.types import checksum

    def torn(tier: Any, staging: Any, items: Any, slots: Any) -> list[bytes | None]:
        digests: list[bytes | None] = []
        for item, slot in zip(items, slots, strict=True):
            if slot is None:
                digests.append(None)
                continue
            to, come = tier.view(slot), staging.view(item.offset, item.length)
            half = item.length // 2
            np.copyto(np.frombuffer(to[:half], np.uint8), np.frombuffer(come[:half], np.uint8))
            digests.append(checksum(to))
        return digests

    serve.fill_from_staging = torn  # type: ignore[attr-defined]


def pins_are_forgotten() -> None:
    from emberkv.node.connections import Pins

    Pins.drop_all = lambda self: None  # type: ignore[method-assign]


def staging_is_forgotten() -> None:
    from emberkv.storage.staging import StagingArea

    def forgotten(self: StagingArea) -> None:
        kept.append(self)

    StagingArea.close = forgotten  # type: ignore[method-assign]


kept: list[Any] = []
what = os.environ.get("EMBERKV_STRESS_BREAK", "")
if what and "node" in sys.orig_argv:
    globals()[what]()
