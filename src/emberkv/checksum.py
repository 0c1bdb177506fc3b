"""Checksums of payload: xxh3-128, 16 bytes, big-endian digest (L0: the client and the node both need them).

Why it exists: how long a checksum holds the interpreter matters as much as what it costs. xxhash (>= 4.1) gives the
interpreter away for inputs above 64 KiB. In a node that is right, whose other threads then run. In an engine process
beside a busy Python thread each such return may cost a switch interval (5 ms by default), so there it is not wanted.
Laws: a checksum is taken of the bytes where they will stay, after they are there: their source may still change.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import xxhash

from emberkv.errors import InvariantViolation

HELD_PIECE_BYTES: Final = 64 << 10
"""Largest input for which xxhash keeps the interpreter."""
COPY_PIECE_BYTES: Final = 256 << 10
"""Copied, then hashed while still in the L2 cache. Measured on blocks of 1 and 3 MiB: 128 to 512 KiB are within 5 %,
64 KiB and 1 MiB lose 10 to 20 %."""


def checksum_held(view: memoryview) -> bytes:
    """Digest of contiguous bytes without ever giving the interpreter away.

    One call of 1 MiB takes about 50 microseconds here; between pieces the interpreter may still be asked for.
    """
    if view.nbytes <= HELD_PIECE_BYTES:
        return xxhash.xxh3_128_digest(view)
    if view.itemsize != 1 or view.ndim != 1:
        view = view.cast("B")
    state = xxhash.xxh3_128()
    for start in range(0, view.nbytes, HELD_PIECE_BYTES):
        state.update(view[start : start + HELD_PIECE_BYTES])
    return state.digest()


def copy_and_checksum(target: memoryview, source: memoryview) -> bytes:
    """Copies `source` into `target` (contiguous, equal lengths in bytes) and returns the digest of `target`'s bytes.

    One pass through memory; the interpreter is free for others meanwhile. What another process does to `source` during
    the copy cannot make digest and copy disagree.
    """
    if target.nbytes != source.nbytes:
        raise InvariantViolation(f"{source.nbytes} bytes are to be copied into a place of {target.nbytes}")
    if not target.nbytes:
        return xxhash.xxh3_128_digest(b"")
    to, come = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if target.nbytes <= COPY_PIECE_BYTES:
        np.copyto(to, come)
        return xxhash.xxh3_128_digest(to.data)
    state = xxhash.xxh3_128()
    for start in range(0, target.nbytes, COPY_PIECE_BYTES):
        piece = to[start : start + COPY_PIECE_BYTES]
        np.copyto(piece, come[start : start + COPY_PIECE_BYTES])
        state.update(piece.data)
    return state.digest()
