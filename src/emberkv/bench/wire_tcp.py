"""Gets over loopback TCP against a bare Python pair, a quiet and a busy process, and iperf3 beside them.

Laws: client and bare pair write into the same memory, ask for the same sizes in the same requests, and each has one
serving process; both serving processes are kept on one core and both callers on another, except beside a busy thread,
where the scheduler decides for both. The client checks every block; the bare pair checks nothing.
"""

from __future__ import annotations

import statistics
from typing import Final

from emberkv.bench.case import Case, Goal, Progress, Rounds, make_case, percentile, take_turns, timed
from emberkv.bench.disturb import BusyThread, on_cores, two_cores
from emberkv.bench.node_process import BenchNode
from emberkv.bench.ref import BarePair, iperf3_rate
from emberkv.bench.workload import Blocks, Scale, check, load, make_blocks, store
from emberkv.client import Client

SHAPES: Final = {"32x1MiB": (32, 1 << 20), "64x64KiB": (64, 64 << 10)}
SMALL_BYTES: Final = 8 << 20
SMALL_REPEATS: Final = 6
BUSY_BOUND_MS: Final = 30
BARE: Final = "bare sendmsg/recv_into pair"


def run(node: BenchNode, scale: Scale, progress: Progress) -> list[Case]:
    """All TCP cases against a started node."""
    cases: list[Case] = []
    # prefer_local: this process is on the node's host, and would be told so.
    with Client([f"tcp:{node.tcp_address}"], prefer_local=False) as client:
        for name, (count, size) in SHAPES.items():
            blocks = make_blocks(count, size, "tcp")
            store(client, blocks)
            check(client, blocks)
            with BarePair(blocks.dest.reshape(-1).data) as bare:
                progress(f"tcp_get_{name}: batches in turn with the bare pair")
                cases += _batches(name, node, client, bare, blocks, scale)
                progress(f"tcp_get_{name}_busy: the same beside a busy Python thread")
                cases.append(_busy(name, client, bare, blocks, scale))
            check(client, blocks)
        progress("tcp_get_4KiB: single gets in turn with a bare ping-pong")
        cases += _pings(node, client, scale)
    return cases


def _batches(name: str, node: BenchNode, client: Client, bare: BarePair, blocks: Blocks, scale: Scale) -> list[Case]:
    count, size = blocks.data.shape
    # A small batch is over in a millisecond, so it takes more of them to see through the noise.
    repeats = scale.batches * (1 if blocks.nbytes > SMALL_BYTES else SMALL_REPEATS)
    iperf3_rates: list[float] = []
    # Round by round: iperf3 inherits where we run, so it must start outside of the context.
    rounds = Rounds([], [])
    for _ in range(scale.rounds):
        with on_cores(*two_cores(), [node.pid, bare.pid]):
            one = take_turns(
                lambda: timed(lambda: load(client, blocks)),
                lambda: bare.batch_s(count, size),
                repeats=repeats,
                rounds=1,
            )
        rounds.ours += one.ours
        rounds.reference += one.reference
        rate = iperf3_rate(scale.iperf3_s) if scale.iperf3_s else None
        if rate is not None:
            iperf3_rates.append(rate / 1e9)
    gb = blocks.nbytes / 1e9
    value = gb / rounds.ours_s
    cases = [
        make_case(
            f"tcp_get_{name}",
            value,
            "GB/s",
            reference=BARE,
            reference_value=gb / rounds.reference_s,
            ratio=rounds.speed_ratio,
            goal=Goal("ratio", ">=", 0.9),
            ours_ms=rounds.ours_s * 1e3,
            reference_ms=rounds.reference_s * 1e3,
            gil_returns=load(client, blocks),
            **rounds.spread(),
        )
    ]
    if iperf3_rates:
        cases.append(
            make_case(
                f"tcp_get_{name}_iperf3",
                value,
                "GB/s",
                reference="iperf3, one stream",
                reference_value=statistics.median(iperf3_rates),
                goal=Goal("ratio", ">=", 0.7),
            )
        )
    return cases


def _busy(name: str, client: Client, bare: BarePair, blocks: Blocks, scale: Scale) -> Case:
    count, size = blocks.data.shape
    with BusyThread() as busy:
        rounds = take_turns(
            lambda: timed(lambda: load(client, blocks)),
            lambda: bare.batch_s(count, size),
            repeats=scale.batches,
            rounds=scale.rounds,
        )
        turns = busy.turns
    return make_case(
        f"tcp_get_{name}_busy",
        rounds.ours_s * 1e3,
        "ms",
        reference=f"{BARE} beside the same thread",
        reference_value=rounds.reference_s * 1e3,
        ratio=rounds.time_ratio,
        goal=Goal("value", "<=", BUSY_BOUND_MS) if count == 64 else None,
        gil_returns=load(client, blocks),
        busy_turns=turns,
        **rounds.spread(),
    )


def _pings(node: BenchNode, client: Client, scale: Scale) -> list[Case]:
    blocks = make_blocks(1, 4096, "tcp")
    store(client, blocks)
    check(client, blocks)
    cases = []
    first, second = two_cores()
    with BarePair(blocks.dest.reshape(-1).data) as bare:
        for name, serving in (("tcp_get_4KiB", second), ("tcp_get_4KiB_one_core", first)):
            tail: list[float] = []

            def ours(tail: list[float] = tail) -> float:
                tail.append(timed(lambda: load(client, blocks)))
                return tail[-1]

            with on_cores(first, serving, [node.pid, bare.pid]):
                rounds = take_turns(ours, bare.ping_s, repeats=scale.pings, rounds=scale.rounds)
            cases.append(
                make_case(
                    name,
                    rounds.ours_s * 1e6,
                    "us",
                    reference="bare ping-pong on the same cores",
                    reference_value=rounds.reference_s * 1e6,
                    ratio=rounds.time_ratio,
                    # On one core no wake-up of another one hides the interpreter: reported, not judged.
                    goal=Goal("ratio", "<=", 2.0) if serving == second else None,
                    p99_us=percentile(tail, 99) * 1e6,
                    **rounds.spread(),
                )
            )
    return cases
