"""What a caller may pass in: everything else is a ValueError of one line, raised before anything is sent.

Why it exists: a wrong key or an oversized value is a bug of the caller, and must not travel to be found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from emberkv.client.connection import Bytes
from emberkv.messages import PutItem
from emberkv.types import KEY_BYTES, NO_VERSION, Version

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

DEADLINE_MS_MAX = 3_600_000
"""An hour; more is a mistake of units."""


class PutBlock(NamedTuple):
    """One block to store. `depth` is its position in the chain: of two equally old blocks the deeper is evicted first.
    `seen` is the version of the key that the writer knows."""

    key: bytes
    data: ReadableBuffer
    depth: int = 0
    seen: Version = NO_VERSION


def check_keys(keys: Iterable[bytes]) -> list[bytes]:
    """The keys as a list of bytes."""
    checked = list(keys)
    if set(map(type, checked)) <= {bytes} and set(map(len, checked)) <= {KEY_BYTES}:
        return checked  # C loops, for a load of 128 keys should not begin with 10 us of this
    for at, key in enumerate(checked):
        if type(key) is not bytes:
            if not isinstance(key, bytes | bytearray | memoryview):
                raise ValueError(f"key {at} is a {type(key).__name__}, a block key is {KEY_BYTES} bytes")
            checked[at] = bytes(key)
        if len(key) != KEY_BYTES:
            raise ValueError(f"key {at} has {len(key)} bytes, a block key has {KEY_BYTES}")
    return checked


def check_deadline(deadline_ms: int) -> int:
    """The deadline in nanoseconds."""
    if not 1 <= deadline_ms <= DEADLINE_MS_MAX:
        raise ValueError(f"deadline_ms is {deadline_ms}, it must be 1 to {DEADLINE_MS_MAX}")
    return int(deadline_ms * 1_000_000)


def check_value(at: int, data: Any, bytes_max: int) -> memoryview:
    """The value as a flat view of bytes."""
    try:
        view = memoryview(data)
    except TypeError:
        raise ValueError(f"value {at} is a {type(data).__name__}, which has no buffer of bytes") from None
    if not view.c_contiguous:
        raise ValueError(f"value {at} is not C-contiguous")
    if view.nbytes == 0:
        raise ValueError(f"value {at} is empty")
    if view.nbytes > bytes_max:
        raise ValueError(f"value {at} has {view.nbytes} bytes, the limit is {bytes_max}")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def check_items(
    items: Sequence[tuple[bytes, ReadableBuffer] | PutBlock], bytes_max: int
) -> tuple[list[PutItem], list[memoryview]]:
    """Put items without put ids, and the views of their values."""
    keys = check_keys(item[0] for item in items)
    views = [check_value(at, item[1], bytes_max) for at, item in enumerate(items)]
    made = []
    for key, view, item in zip(keys, views, items, strict=True):
        made.append(PutItem(key, b"", view.nbytes))
        if isinstance(item, PutBlock):
            made[-1].depth, made[-1].seen = item.depth, item.seen
    return made, views


def check_dest(dest: Bytes, count: int, bytes_max: int) -> None:
    """The destination of `get_into`: uint8 [>= count, block_bytes], C-contiguous and writable."""
    if dest.dtype != np.uint8 or dest.ndim != 2:
        raise ValueError("dest must be a numpy array of uint8 with shape [blocks, block_bytes]")
    if not dest.flags.c_contiguous or not dest.flags.writeable:
        raise ValueError("dest must be C-contiguous and writable")
    if dest.shape[0] < count:
        raise ValueError(f"dest has {dest.shape[0]} rows for {count} keys")
    if not 0 < dest.shape[1] <= bytes_max:
        raise ValueError(f"dest has rows of {dest.shape[1]} bytes, a block has 1 to {bytes_max}")
