"""What one connection owns: pins over a local socket, and the bytes of puts on their way in.

Laws: a pin ends by unpin or with the connection; a slot's reference is given back exactly once. Payload of refused
items is read into scratch memory and dropped, so the connection stays in step.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np

from emberkv.errors import Unavailable
from emberkv.messages import BlockInfo, PutItem, ReplicaItem
from emberkv.net.overlap import recv_digests
from emberkv.net.tcp_link import TcpLink, transfer_deadline_ns
from emberkv.node.runtime import Runtime
from emberkv.ports import Slot, Tier
from emberkv.storage.staging import StagingArea, copy_and_checksum
from emberkv.types import MissReason, checksum

SCRATCH_BYTES = 1 << 20
SEGMENT_SLOW_NS = 1_000_000
"""A segment of payload that took this long met a node whose threads wait for the interpreter, or a slow network: the
rest is then received in one call."""
NO_CHECKSUM = b"\0" * 16
PINS_MAX = 1024
"""Open pins of one connection; a client that needs more does not unpin."""

_scratch = threading.local()


class PinnedTotal:
    """Bytes pinned over all connections: bounded, so that readers never leave writers without room."""

    def __init__(self, bytes_max: int) -> None:
        self._lock = threading.Lock()
        self._bytes_max = bytes_max
        self.bytes = 0

    def take(self, count: int) -> bool:
        """Adds bytes if they fit the bound."""
        with self._lock:
            if self.bytes + count > self._bytes_max:
                return False
            self.bytes += count
            return True

    def give_back(self, count: int) -> None:
        """Takes bytes away."""
        with self._lock:
            self.bytes -= count


class Pins:
    """Pins of one connection, bounded in bytes and number."""

    def __init__(self, runtime: Runtime, total: PinnedTotal, bytes_max: int) -> None:
        self._total = total
        self._runtime = runtime
        self._bytes_max = bytes_max
        self._pins: dict[int, list[Slot]] = {}
        self._ids = itertools.count(1)
        self.bytes = 0

    def add(self, infos: list[BlockInfo], slots: Sequence[Slot | None]) -> tuple[int, list[BlockInfo]]:
        """Keeps the references of all hits that fit the bound; the others become QUOTA and are given back."""
        kept = [slot for slot in slots if slot is not None]
        size = sum([slot.length for slot in kept])
        fits = self.bytes + size <= self._bytes_max and len(self._pins) < PINS_MAX
        if not (fits and self._total.take(size)):
            kept, size = self._fitting(infos, slots)
        if not kept:
            return 0, infos
        self.bytes += size
        pin = next(self._ids)
        self._pins[pin] = kept
        return pin, infos

    def _fitting(self, infos: list[BlockInfo], slots: Sequence[Slot | None]) -> tuple[list[Slot], int]:
        """Those that fit both bounds, in order, and their bytes; the others are given back."""
        kept: list[Slot] = []
        surplus: list[Slot] = []
        size = 0
        for index, slot in enumerate(slots):
            if slot is None:
                continue
            fits = self.bytes + size + slot.length <= self._bytes_max and len(self._pins) < PINS_MAX
            if not (fits and self._total.take(slot.length)):
                surplus.append(slot)
                infos[index] = BlockInfo(int(MissReason.QUOTA), infos[index].version)
                continue
            size += slot.length
            kept.append(slot)
        self._runtime.unref(surplus)
        return kept, size

    def drop(self, pins: Sequence[int]) -> None:
        """Gives pins back; unknown ids are ignored, since a client may repeat itself after a reconnect."""
        slots: list[Slot] = []
        for pin in pins:
            slots += self._pins.pop(pin, [])
        freed = sum(slot.length for slot in slots)
        self.bytes -= freed
        self._total.give_back(freed)
        self._runtime.unref(slots)

    def drop_all(self) -> None:
        """The connection ended."""
        self.drop(list(self._pins))


def fill_from_staging(
    tier: Tier, staging: StagingArea | None, items: Sequence[PutItem], slots: Sequence[Slot | None]
) -> list[bytes | None]:
    """Copies each item out of the client's staging in one pass; returns checksums of what was copied."""
    if staging is None:
        return [None] * len(items)
    return [
        None if slot is None else copy_and_checksum(tier.view(slot), staging.view(item.offset, item.length))
        for item, slot in zip(items, slots, strict=True)
    ]


def scratch(length: int) -> list[memoryview]:
    """Views for `length` unwanted bytes, all on the same memory of this thread."""
    view = getattr(_scratch, "view", None)
    if view is None:
        view = _scratch.view = np.empty(SCRATCH_BYTES, np.uint8).data
    views = [view] * (length // SCRATCH_BYTES)
    if length % SCRATCH_BYTES:
        views.append(view[: length % SCRATCH_BYTES])
    return views


def fill_from_link(
    tier: Tier, link: TcpLink, items: Sequence[PutItem | ReplicaItem], slots: Sequence[Slot | None]
) -> list[bytes | None]:
    """Receives each item's payload straight into its slot; returns checksums, None where they differ from what the
    sender stated. Items without payload (ReplicaItem.payload False) are skipped. Raises Unavailable when the payload
    did not come whole: then nothing of this frame is stored."""
    buffers: list[memoryview] = []
    places: dict[int, int] = {}
    total = 0
    carried = [not isinstance(item, ReplicaItem) or item.payload for item in items]
    for index, (item, slot, carries) in enumerate(zip(items, slots, carried, strict=True)):
        if not carries or not item.length:
            continue
        total += item.length
        if slot is None:
            buffers += scratch(item.length)
        else:
            places[index] = len(buffers)
            buffers.append(tier.view(slot))
    received, digests = recv_digests(link, buffers, transfer_deadline_ns(total), SEGMENT_SLOW_NS)
    if received != total:
        raise Unavailable(f"{link.peer_address} stopped in the middle of a payload")
    checksums: list[bytes | None] = []
    for index, (item, slot, carries) in enumerate(zip(items, slots, carried, strict=True)):
        if slot is None:
            checksums.append(None if carries else item.checksum)
            continue
        taken = digests[places[index]] if index in places else checksum(tier.view(slot))
        checksums.append(taken if item.checksum in (taken, NO_CHECKSUM) else None)
    return checksums
