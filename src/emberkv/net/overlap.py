"""Receiving blocks and checking them at the same time.

Why it exists: checksumming 32 MiB after they arrived costs a tenth of the transfer; done in segments, while the kernel
goes on receiving and the segment is still in the processor's cache, it costs about half of that.
Laws: the blocks, their order and their deadline are those of one `recv_payload`; beside a busy Python thread, where
each call's return may cost a switch interval, all that is left is received in one call.
Limits: up to WHOLE_BYTES_MAX one call is made in any case, above it about SEGMENTS, of SEGMENT_BYTES_MAX at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from emberkv.net import now_ns
from emberkv.net.tcp_link import TcpLink

__all__ = ["recv_checked"]

WHOLE_BYTES_MAX: Final = 1 << 20
"""Small loads keep to one payload call: checking 1 MiB takes 40 us."""
SEGMENTS: Final = 8
SEGMENT_BYTES_MAX: Final = 2 << 20
"""Measured against a bare pair that checks nothing: 32 x 1 MiB in one call 0.79 to 0.83 of its rate, in segments of
8 MiB 0.90, of 1 to 4 MiB 0.92 to 0.97; 64 x 64 KiB in one call 0.88, in segments of 0.5 or 1 MiB 0.93."""
CONTENDED_NS: Final = 1_000_000
"""A small send that took this long waited for the interpreter lock: it needs 20 to 100 us otherwise."""
SEGMENT_SLOW_NS: Final = 4_000_000
"""A segment that took this long met a busy thread, or a network so slow that checking does not matter."""


def recv_checked(
    link: TcpLink, buffers: Sequence[memoryview], deadline_ns: int, check: Callable[[int, int], None]
) -> int:
    """Like `link.recv_payload`; returns the bytes received. A short count means the link is shut.

    `check(first, last)` is called for groups of buffers [first, last) that are wholly received, in order; it should
    not give up the interpreter lock (hash in pieces below 100 KB). It may raise: then close the link.
    """
    total = sum([view.nbytes for view in buffers])
    first = received = 0
    if total > WHOLE_BYTES_MAX and link.send_ns < CONTENDED_NS:
        segment_bytes = min(SEGMENT_BYTES_MAX, total // SEGMENTS)
        since_ns = now_ns()
        while first < len(buffers):
            last, size = first, 0
            while last < len(buffers) and size < segment_bytes:
                size += buffers[last].nbytes
                last += 1
            count = link.recv_payload(buffers[first:last], deadline_ns)
            received += count
            if count < size:
                check(first, _whole(buffers, first, count))
                return received
            check(first, last)
            first = last
            before_ns, since_ns = since_ns, now_ns()
            if since_ns - before_ns > SEGMENT_SLOW_NS:
                break
    if first < len(buffers):
        count = link.recv_payload(buffers[first:], deadline_ns)
        received += count
        check(first, _whole(buffers, first, count))
    return received


def _whole(buffers: Sequence[memoryview], first: int, received: int) -> int:
    """Index after the last of the buffers from `first` on that `received` bytes fill."""
    while first < len(buffers) and received >= buffers[first].nbytes:
        received -= buffers[first].nbytes
        first += 1
    return first
