"""The same-host door: pins, copied loads, saves through staging, and what they cost the engine's own threads.

Laws: what has to be cold is cold because the samples go round through several sets of blocks, for both sides alike, so
that data leaves the caches and code stays; references use the very same memory.
Returns to the interpreter lock are counted by a hook of our own, not by the client.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Final

import numpy as np

from emberkv.bench.case import Case, Goal, Progress, make_case, percentile, take_turns, timed
from emberkv.bench.disturb import BusyThread, on_cores, two_cores
from emberkv.bench.gilcount import GilCounter
from emberkv.bench.node_process import ENTRY_NAMESPACE, BenchNode
from emberkv.bench.ref import prefaulted
from emberkv.bench.ref_local import BareLocalPair, copy_s, hash_then_copy_s
from emberkv.bench.workload import DEADLINE_MS, Blocks, Scale, check, load, make_blocks, store
from emberkv.client import Client
from emberkv.errors import Unavailable
from emberkv.messages import GetFlag, GetRequest
from emberkv.wire.codec import encode, get_reply_bytes

PIN_SIZES: Final = {"4KiB": 4 << 10, "64KiB": 64 << 10, "1MiB": 1 << 20}
PIN_KEYS: Final = 32
GIL_RETURNS_MAX: Final = 4
GIL_COUNTS: Final = (1, 32, 128)
"""Blocks of a load for which the returns to the interpreter lock are counted."""
BUSY_BOUND_MS: Final = 30


def run(node: BenchNode, scale: Scale, progress: Progress) -> list[Case]:
    """All same-host cases against a started node."""
    endpoint = f"unix:{node.socket_path}"
    cases: list[Case] = []
    with Client([endpoint], namespace=ENTRY_NAMESPACE) as client:
        for name, size in PIN_SIZES.items():
            progress(f"local_pin_32_{name}: pins without a copy, verify=entry")
            cases += _pins(name, node, client, make_blocks(PIN_KEYS, size, "pin"), scale)
    with Client([endpoint]) as client:
        sets = cold_sets(scale)
        for blocks in sets:
            store(client, blocks)
            check(client, blocks)
        progress("local_pin_copy: pin and copy of 32 x 1 MiB, verify=pin, cold blocks")
        cases.append(_pin_copy(node, client, sets, scale))
        progress("save_through_staging: put of 32 x 1 MiB, cold source")
        cases += _saves(node, client, sets, scale)
        progress("local_get_32x1MiB_busy, local_get_64x64KiB_busy: copied loads beside a busy Python thread")
        cases.append(_busy("32x1MiB", client, sets[0], scale))
        small = make_blocks(64, 64 << 10, "local")
        store(client, small)
        check(client, small)
        cases.append(_busy("64x64KiB", client, small, scale))
        progress("gil_returns: counted by a profile hook")
        cases += _gil_returns(client)
    return cases


def cold_sets(scale: Scale) -> list[Blocks]:
    """Sets of 32 x 1 MiB that share one place to load into, so that only what is read is cold."""
    first = make_blocks(32, 1 << 20, "cold 0")
    return [first] + [make_blocks(32, 1 << 20, f"cold {at}", dest=first.dest) for at in range(1, scale.cold_sets)]


def _pins(name: str, node: BenchNode, client: Client, blocks: Blocks, scale: Scale) -> list[Case]:
    store(client, blocks)
    check(client, blocks)
    keys = blocks.keys
    request_bytes = len(encode(GetRequest(keys, flags=int(GetFlag.PIN)), 1))
    answer_bytes = get_reply_bytes(len(keys))
    medians: list[float] = []
    tails: list[float] = []
    sample: list[float] = []

    def pin() -> float:
        start = time.perf_counter()
        pinned = client.pin_many(keys, deadline_ms=DEADLINE_MS)
        taken = time.perf_counter() - start
        if any(pinned.reasons) or not pinned.unpin():
            raise Unavailable(f"a pin of present blocks failed: {set(pinned.reasons)}")
        sample.append(taken)
        return taken

    with BareLocalPair() as bare:

        def end_round() -> None:
            medians.append(percentile(sample, 50))
            tails.append(percentile(sample, 99))
            sample.clear()

        with on_cores(*two_cores(), [node.pid, bare.pid]):
            pin()
            sample.clear()
            rounds = take_turns(
                pin,
                lambda: bare.ping_s(request_bytes, answer_bytes),
                repeats=scale.pings,
                rounds=scale.rounds,
                between=end_round,
            )
    reference = "bare SEQPACKET ping-pong of the same sizes"
    return [
        make_case(
            f"local_pin_32_{name}_p50",
            statistics.median(medians) * 1e6,
            "us",
            reference=reference,
            reference_value=rounds.reference_s * 1e6,
            goal=Goal("value", "<=", 100),
        ),
        make_case(
            f"local_pin_32_{name}_p99",
            statistics.median(tails) * 1e6,
            "us",
            reference=reference,
            reference_value=rounds.reference_s * 1e6,
            goal=Goal("value", "<=", 300),
            p99_best_us=min(tails) * 1e6,
            p99_worst_us=max(tails) * 1e6,
        ),
    ]


def _pin_copy(node: BenchNode, client: Client, sets: list[Blocks], scale: Scale) -> Case:
    # The reference reads the same pages of the arena, under pins of its own: a client each, since pins are bounded.
    with ExitStack() as stack:
        sources = []
        for blocks in sets:
            holder = stack.enter_context(Client([f"unix:{node.socket_path}"]))
            pinned = stack.enter_context(holder.pin_many(blocks.keys, deadline_ms=DEADLINE_MS))
            views = [view for view in pinned.views if view is not None]
            if len(views) != len(blocks.keys):
                raise Unavailable(f"the reference cannot pin its blocks: {set(pinned.reasons)}")
            sources.append(views)
        ours, theirs = _turns(len(sets))
        dest = sets[0].dest
        with on_cores(*two_cores(), [node.pid]):
            rounds = take_turns(
                lambda: timed(lambda: load(client, sets[next(ours)])),
                lambda: hash_then_copy_s(sources[next(theirs)], dest),
                repeats=scale.cold,
                rounds=scale.rounds,
            )
        del views
        sources.clear()
    gb = sets[0].nbytes / 1e9
    return make_case(
        "local_pin_copy",
        gb / rounds.ours_s,
        "GB/s",
        reference="xxh3-128 of the same cold 32 MiB, then memcpy",
        reference_value=gb / rounds.reference_s,
        ratio=rounds.speed_ratio,
        goal=Goal("ratio", ">=", 0.8),
        ours_ms=rounds.ours_s * 1e3,
        reference_ms=rounds.reference_s * 1e3,
        gil_returns=load(client, sets[0]),
        **rounds.spread(),
    )


def _turns(count: int) -> tuple[Iterator[int], Iterator[int]]:
    """Which set each side takes next: half the cycle apart, so that neither finds what the other has just read."""
    return itertools.cycle(range(count)), itertools.cycle([(at + count // 2) % count for at in range(count)])


def _busy(name: str, client: Client, blocks: Blocks, scale: Scale) -> Case:
    with BusyThread():
        times = [
            statistics.median(timed(lambda: load(client, blocks)) for _ in range(scale.batches))
            for _ in range(scale.rounds)
        ]
    return make_case(
        f"local_get_{name}_busy",
        statistics.median(times) * 1e3,
        "ms",
        goal=Goal("value", "<=", BUSY_BOUND_MS) if len(blocks.keys) == 64 else None,
        gil_returns=load(client, blocks),
        best_ms=min(times) * 1e3,
        worst_ms=max(times) * 1e3,
    )


def _saves(node: BenchNode, client: Client, sets: list[Blocks], scale: Scale) -> list[Case]:
    for blocks in sets:  # staging is in memory then, and slots that were freed once, as after an engine's first minute
        store(client, blocks)
    check(client, sets[0])
    shape = sets[0].data.shape
    target = np.frombuffer(prefaulted(sets[0].nbytes), np.uint8).reshape(shape)
    sources = [[memoryview(row) for row in blocks.data] for blocks in sets]
    ours, theirs = _turns(len(sets))
    with on_cores(*two_cores(), [node.pid]):
        rounds = take_turns(
            lambda: timed(lambda: store(client, sets[next(ours)])),
            lambda: copy_s(sources[next(theirs)], target),
            repeats=scale.cold,
            rounds=scale.rounds,
        )
    gb = sets[0].nbytes / 1e9
    return [
        make_case(
            "save_through_staging",
            gb / rounds.ours_s,
            "GB/s",
            reference="memcpy of the same cold source into prefaulted memory",
            reference_value=gb / rounds.reference_s,
            ratio=rounds.speed_ratio,
            goal=Goal("ratio", ">=", 0.7),
            ours_ms=rounds.ours_s * 1e3,
            reference_ms=rounds.reference_s * 1e3,
            **rounds.spread(),
        ),
        _submit(client, sets, scale),
    ]


def _submit(client: Client, sets: list[Blocks], scale: Scale) -> Case:
    """How long submit_put holds its caller, and the longest pause of a thread that goes on computing meanwhile."""
    worst: list[float] = []
    held_all: list[float] = []
    pauses: list[float] = []
    batches = itertools.cycle([list(zip(blocks.keys, blocks.data, strict=True)) for blocks in sets])
    client.submit_put(next(batches), deadline_ms=DEADLINE_MS).wait()  # starts the thread
    for _ in range(scale.rounds):
        held_round: list[float] = []
        for _ in range(scale.cold):
            items = next(batches)
            start = time.perf_counter()
            job = client.submit_put(items, deadline_ms=DEADLINE_MS)
            last = time.perf_counter()
            held_round.append(last - start)
            pause = 0.0
            while not job.done:
                now = time.perf_counter()
                pause = max(pause, now - last)
                last = now
            pauses.append(pause)
            if not all(job.result()):
                raise Unavailable("a submitted save was dropped")
        worst.append(max(held_round))
        held_all += held_round
    return make_case(
        "save_submit_held",
        statistics.median(worst) * 1e3,
        "ms",
        goal=Goal("value", "<=", 1.0),
        p50_ms=statistics.median(held_all) * 1e3,
        worst_ms=max(held_all) * 1e3,
        engine_pause_p50_ms=statistics.median(pauses) * 1e3,
    )


def _gil_returns(client: Client) -> list[Case]:
    """The largest count over loads of few and many blocks, into rows and as new memory."""
    counter = GilCounter()
    seen: dict[str, int] = {}
    stated: dict[str, int] = {}
    names: dict[str, int] = {}
    for count in GIL_COUNTS:
        blocks = make_blocks(count, 64 << 10, "gil")
        store(client, blocks)
        check(client, blocks)
        stated[f"into_{count}"] = load(client, blocks)
        seen[f"into_{count}"] = counter.run(partial(load, client, blocks))
        names = dict(counter.calls)
        seen[f"many_{count}"] = counter.run(partial(client.get_many, blocks.keys, deadline_ms=DEADLINE_MS))
    return [
        make_case(
            "local_load_gil_returns",
            max(seen.values()),
            "returns",
            reference="the client's own count",
            reference_value=max(stated.values()),
            goal=Goal("value", "<=", GIL_RETURNS_MAX),
            by_load=seen,
            calls=names,
        )
    ]
