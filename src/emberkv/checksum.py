"""Checksums of payload, and how long they hold the interpreter (L0: the client and the node both need them).

xxhash gives the interpreter away for inputs above about 100 KiB. That is right in a node, whose other threads then
run; in an engine process beside a busy thread each return costs up to a switch interval, so there it is not wanted.
"""

from __future__ import annotations

import xxhash

HELD_PIECE_BYTES = 64 << 10
"""Below xxhash's threshold for giving the interpreter away."""


def checksum_held(view: memoryview) -> bytes:
    """xxh3-128 digest (16 bytes) of contiguous bytes, without ever giving the interpreter away."""
    if view.nbytes <= HELD_PIECE_BYTES:
        return xxhash.xxh3_128_digest(view)
    state = xxhash.xxh3_128()
    for start in range(0, view.nbytes, HELD_PIECE_BYTES):
        state.update(view[start : start + HELD_PIECE_BYTES])
    return state.digest()
