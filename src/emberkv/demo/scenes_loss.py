"""Scenes (b) and (c): the node that holds the blocks is killed; a fresh engine B goes on from the surviving replicas.

Laws: the kill is SIGKILL, sent while a writer puts session blocks to shards of the victim; what is measured is what the
    writer's acknowledgements say (outage.py). Engine B is a process that never saw a token of these sessions.
Limits: PROBED_MAX shards of the lost node are probed, evenly spread over its shard numbers: all of them at every tick
    would make the writer, not the cluster, the bottleneck of two cores.
"""

from __future__ import annotations

import time
from typing import Any, Final

from emberkv.client import Client
from emberkv.demo import outage, probe, writer
from emberkv.demo.children import Child
from emberkv.demo.report import SceneFigures
from emberkv.demo.stage import ANSWER_S, ENGINE_START_S, NEAR_A, NEAR_B, NEW_TOKENS, OTHER, SURVIVORS, Stage
from emberkv.demo.texts import BLOCK_TOKENS, PREFIX_TOKENS
from emberkv.errors import Unavailable
from emberkv.messages import ShardOwner

TITLE_B: Final = "The node that holds the blocks is killed (SIGKILL)"
TITLE_C: Final = "A fresh engine B continues every session from the surviving replicas"
PROBED_MAX: Final = 16
CONTROLS: Final = 4
BASELINE_S: Final = 1.0
AFTERWARDS_S: Final = 0.3
"""The writer goes on to the end of the budget, or this long after the last shard is back."""
OUTAGE_WAIT_S: Final = 30.0
LOST: Final = "lost"
KEPT: Final = "kept"
LOAD_DEADLINE_MS: Final = 2_000


def kill(stage: Stage) -> None:
    """Scene (b)."""
    started = time.perf_counter()
    screen, figures = stage.screen, stage.report.failover
    screen.scene("b", TITLE_B)
    held = probe.held(stage.endpoint(NEAR_A), stage.all_keys())
    with Client([stage.endpoint(OTHER)], staging_bytes=writer.STAGING_BYTES) as client:
        owners = _owners(client)
        lost = [shard for shard, owner in owners.items() if owner.primary == NEAR_A]
        kept = [shard for shard, owner in owners.items() if owner.primary != NEAR_A]
        probed, controls = outage.spread(lost, PROBED_MAX), outage.spread(kept, CONTROLS)
        screen.say(f"{NEAR_A} holds {sum(held)} of {len(held)} blocks and is primary of {len(lost)} of 256 shards")
        child = stage.start_writer(OTHER)
        child.receive(ENGINE_START_S)
        child.ask("start", groups={LOST: probed, KEPT: controls})
        with screen.step(f"write 4 KiB session blocks to {len(probed)} of its shards every {writer.TICK_MS} ms"):
            stage.wait("every probed shard acknowledges", lambda: len(_acks(child, LOST, 0)) == len(probed), 20.0)
            time.sleep(BASELINE_S)
        # Looked at once more: a shard that moved by itself would make the outage look short.
        owners = _owners(client)
    if any(owners[shard].primary != NEAR_A for shard in probed):
        raise Unavailable(
            f"{NEAR_A} lost its shards before it was killed: this machine is too busy to measure an outage"
        )
    figures.shards_lost, figures.shards_probed = len(lost), len(probed)
    figures.probe_interval_ms, figures.put_deadline_ms = writer.TICK_MS, writer.DEADLINE_MS
    pid = stage.node_pid(NEAR_A)
    with screen.step(f"SIGKILL {NEAR_A} (process {pid}) and wait until every probed shard acknowledges again"):
        killed_ns = time.monotonic_ns()
        stage.cluster.kill(NEAR_A)
        dead_ns = time.monotonic_ns()
        deadline = time.perf_counter() + OUTAGE_WAIT_S
        while len(_acks(child, LOST, dead_ns)) < len(probed) and time.perf_counter() < deadline:
            time.sleep(0.1)
        acks = _acks(child, LOST, dead_ns)
        rest_s = figures.budget_s - (time.monotonic_ns() - killed_ns) / outage.NS
        time.sleep(max(AFTERWARDS_S, rest_s))
        record = child.ask("stop")
        stage.leave(child)
    per_shard = outage.outage_of_shards(probed, acks, killed_ns)
    figures.measured_s = outage.longest(per_shard)
    figures.shards = {str(shard): value for shard, value in per_shard.items()}
    figures.epochs_rose = bool(acks) and all(epoch > owners[shard].epoch for shard, _, epoch in acks)
    figures.skipped_turns = record["skipped"]
    figures.timeline = [b.plain() for b in outage.timeline(record["batches"], LOST, killed_ns, outage.BIN_S)]
    figures.timeline_others = [b.plain() for b in outage.timeline(record["batches"], KEPT, killed_ns, outage.BIN_S)]
    _conclude_kill(stage, started, pid)


def _conclude_kill(stage: Stage, started: float, pid: int) -> None:
    figures = stage.report.failover
    measured = figures.measured_s
    if measured is None:
        outcome = f"session puts did not come back within {OUTAGE_WAIT_S:g} s"
    else:
        outcome = f"session puts work again after {measured:.2f} s, of a budget of {figures.budget_s:.2f} s"
    ok = measured is not None and measured <= figures.budget_s and figures.epochs_rose
    stage.screen.say(outcome, good=ok)
    if measured is not None and not figures.epochs_rose:
        outcome = "an acknowledgement after the kill did not carry a higher epoch"
    details = {"killed": NEAR_A, "pid": pid, "shards_lost": figures.shards_lost, "epochs_rose": figures.epochs_rose}
    stage.report.scenes.append(SceneFigures("b", TITLE_B, outcome, ok, time.perf_counter() - started, details))


def continue_on_b(stage: Stage, engine_r: Child) -> Child:
    """Scene (c); returns engine B."""
    started = time.perf_counter()
    screen = stage.screen
    screen.scene("c", TITLE_C)
    with screen.step("start engine B, a new process"):
        engine_b = stage.start_engine("engine B")
        engine_b.receive(ENGINE_START_S)
        engine_b.ask("attach", endpoints=[stage.endpoint(NEAR_B)], mode="both", load_deadline_ms=LOAD_DEADLINE_MS)
    stage.report.placement["before_b"] = stage.copies(SURVIVORS)
    for index in range(len(stage.sessions)):
        _continue_session(stage, index, engine_b, engine_r)
    sessions = stage.report.sessions
    identical = all(session.tokens_identical for session in sessions)
    whole = all(session.loaded_tokens == PREFIX_TOKENS for session in sessions)
    near, wire = sum(s.blocks_near for s in sessions), sum(s.blocks_wire for s in sessions)
    outcome = (
        f"{near + wire} blocks loaded ({near} from {NEAR_B} beside the engine, {wire} over the wire from {OTHER}), "
        f"{stage.report.speedup:.1f} times faster, tokens {'identical' if identical else 'DIFFER'}"
    )
    if not whole:
        outcome += "; some blocks were missing"
    screen.say(outcome, good=identical and whole)
    details: dict[str, Any] = {"blocks_near": near, "blocks_wire": wire}
    stage.report.scenes.append(
        SceneFigures("c", TITLE_C, outcome, identical and whole, time.perf_counter() - started, details)
    )
    return engine_b


def _continue_session(stage: Stage, index: int, engine_b: Child, engine_r: Child) -> None:
    session = stage.report.sessions[index]
    before = probe.counter(stage.endpoint(OTHER), "get_hits")
    answer = engine_b.ask("generate", ANSWER_S, session=index, new_tokens=NEW_TOKENS)
    wire = probe.counter(stage.endpoint(OTHER), "get_hits") - before
    blocks = answer["loaded_tokens"] // BLOCK_TOKENS
    session.hit_ttft_s, session.hit_total_s = answer["ttft_s"], answer["total_s"]
    session.hit_fetch_s, session.hit_import_s = answer["fetch_s"], answer["import_s"]
    session.loaded_tokens = answer["loaded_tokens"]
    session.blocks_wire, session.blocks_near = min(wire, blocks), max(0, blocks - wire)
    reference = stage.reference(engine_r, index, answer["loaded_tokens"])
    comparison = stage.compare("c", index, answer, reference)
    session.tokens_identical, session.logits_identical = comparison.tokens_identical, comparison.logits_identical
    stage.screen.say(
        f"{session.name}: first token after {session.hit_ttft_s:.3f} s instead of {session.recompute_ttft_s:.2f} s "
        f"({session.speedup:.1f} times faster), {blocks} blocks loaded",
        good=comparison.tokens_identical,
    )
    stage.screen.quote("B:", session.question, answer["text"])


def _acks(child: Child, group: str, since_ns: int) -> list[list[int]]:
    acks: list[list[int]] = child.ask("first_acks", group=group, since_ns=since_ns)["acks"]
    return acks


def _owners(client: Client) -> dict[int, ShardOwner]:
    """Shard -> who owns it now; vacant shards are left out."""
    owners = client.cluster_map(deadline_ms=2_000).owners
    return {shard: owner for shard, owner in enumerate(owners) if owner is not None}
