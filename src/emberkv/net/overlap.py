"""Receiving blocks and taking their checksums at the same time.

Why it exists: checksumming 32 MiB after they arrived costs a tenth of the transfer. Done in small segments, while the
kernel goes on receiving and the segment is still in the processor's cache, it costs next to nothing; and small receives
hold the socket for shorter times, so that the sender waits less.
Laws: the blocks, their order and their deadline are those of one `recv_payload`; beside a busy Python thread, where
each call's return may cost a switch interval, all that is left is received in one call.
Limits: up to SEGMENT_BYTES one call is made in any case. A digest is taken of the bytes where they stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import xxhash

from emberkv.checksum import HELD_PIECE_BYTES, checksum_held
from emberkv.net import now_ns
from emberkv.net.tcp_link import TcpLink

__all__ = ["recv_digests"]

SEGMENT_BYTES: Final = 128 << 10
"""Measured on loopback, 32 x 1 MiB, against a bare pair that receives all in one call and checks nothing: one call and
checksums 0.80 of its rate, segments of 2 MiB 0.93, of 512 KiB 1.00, of 256 KiB 1.09, of 128 KiB 1.20."""
CONTENDED_NS: Final = 1_000_000
"""A small send that took this long waited for the interpreter lock: it needs 20 to 100 us otherwise."""
SEGMENT_SLOW_NS: Final = 4_000_000
"""A segment that took this long met a busy thread, or a network so slow that checksums do not matter."""


def recv_digests(
    link: TcpLink, buffers: Sequence[memoryview], deadline_ns: int, slow_ns: int | None = None
) -> tuple[int, list[bytes]]:
    """Like `link.recv_payload`: (bytes received, xxh3-128 of each buffer that arrived whole). A short count means that
    the link is shut. `slow_ns` replaces SEGMENT_SLOW_NS."""
    total = sum([view.nbytes for view in buffers])
    if total <= SEGMENT_BYTES or link.send_ns >= CONTENDED_NS:
        received = link.recv_payload(buffers, deadline_ns)
        whole = buffers if received == total else _whole(buffers, received)
        return received, [checksum_held(view) for view in whole]
    return _recv_overlapped(link, buffers, deadline_ns, SEGMENT_SLOW_NS if slow_ns is None else slow_ns)


def _recv_overlapped(
    link: TcpLink, buffers: Sequence[memoryview], deadline_ns: int, slow_ns: int
) -> tuple[int, list[bytes]]:
    """Segment by segment, until one shows that the interpreter lock or the network is slow to come by."""
    received = 0
    digests: list[bytes] = []
    state: xxhash.xxh3_128 | None = None
    since_ns = now_ns()
    for views, ends in _segments(buffers):
        size = sum([view.nbytes for view in views])
        count = link.recv_payload(views, deadline_ns)
        received += count
        if count < size:
            if ends and state is None:
                digests += [checksum_held(view) for view in _whole(views, count)]
            return received, digests
        if ends and state is None:
            digests += [xxhash.xxh3_128_digest(view) for view in views]
        else:
            state = state or xxhash.xxh3_128()
            state.update(views[0])
            if ends:
                digests.append(state.digest())
                state = None
        before_ns, since_ns = since_ns, now_ns()
        if since_ns - before_ns > slow_ns:
            break
    rest = _rest(buffers, received)
    if rest:
        count = link.recv_payload(rest, deadline_ns)
        received += count
        for view in _whole(rest, count):
            digests.append(checksum_held(view) if state is None else _ended(state, view))
            state = None
    return received, digests


def _segments(buffers: Sequence[memoryview]) -> Iterator[tuple[list[memoryview], bool]]:
    """Several small buffers, or a part of a large one; with it, whether it ends what it is of."""
    group: list[memoryview] = []
    room = SEGMENT_BYTES
    for view in buffers:
        size = view.nbytes
        if group and size > room:
            yield group, True
            group, room = [], SEGMENT_BYTES
        if size <= SEGMENT_BYTES:
            group.append(view)
            room -= size
            continue
        for start in range(0, size, SEGMENT_BYTES):
            yield [view[start : start + SEGMENT_BYTES]], start + SEGMENT_BYTES >= size
    if group:
        yield group, True


def _rest(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of `buffers` after their first `done` bytes."""
    for index, view in enumerate(buffers):
        if done < view.nbytes:
            return [view[done:], *buffers[index + 1 :]]
        done -= view.nbytes
    return []


def _whole(views: Sequence[memoryview], received: int) -> Iterator[memoryview]:
    """Those views that the first `received` bytes fill."""
    for view in views:
        received -= view.nbytes
        if received < 0:
            return
        yield view


def _ended(state: xxhash.xxh3_128, view: memoryview) -> bytes:
    """Digest of a block whose first part is in `state`, without giving the interpreter away."""
    for start in range(0, view.nbytes, HELD_PIECE_BYTES):
        state.update(view[start : start + HELD_PIECE_BYTES])
    return state.digest()
