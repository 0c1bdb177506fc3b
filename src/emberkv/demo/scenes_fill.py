"""Scene (a): three nodes start, engine A computes every session once and so fills the cache.

Laws: nothing else runs while a first token is timed: the cache is idle again, the other engine waits. The order of
    engine A and the uncached reference R alternates, so that a machine that slows down favours neither.
Limits: fewer sessions than asked for when the machine is so slow that the whole demo would take too long; never fewer
    than SESSIONS_MIN.
"""

from __future__ import annotations

import time
from typing import Final

from emberkv.demo import probe
from emberkv.demo.children import Child, Message
from emberkv.demo.report import SceneFigures, SessionFigures
from emberkv.demo.stage import ANSWER_S, ENGINE_START_S, NEAR_A, NEW_TOKENS, Stage
from emberkv.demo.texts import BLOCK_TOKENS, PREFIX_TOKENS

NODES: Final = ("n1", "n2", "n3")
TITLE: Final = "Three nodes start; engine A computes every session and fills the cache"
SESSIONS_MIN: Final = 2
FACTOR: Final = 2
RUN_TARGET_S: Final = 210.0
"""Leaves half a minute of the four that a demo may take."""
REST_S: Final = 45.0
"""What the scenes after this one take beside recomputing: starts, waits, loads, the report."""
REST_RECOMPUTES: Final = 2.0
"""How many recomputes the later scenes need: the remainder of a broken load and its reference."""


def play(stage: Stage) -> tuple[Child, Child]:
    """Returns engine A and the reference engine R."""
    started = time.perf_counter()
    screen = stage.screen
    screen.scene("a", TITLE)
    with screen.step("start three nodes, engine A and an uncached engine R"):
        engine_a, engine_r = stage.start_engine("engine A"), stage.start_engine("engine R")
        stage.cluster.start()
        hello = engine_a.receive(ENGINE_START_S)
        engine_r.receive(ENGINE_START_S)
        stage.cluster.wait_ready(60.0)
        stage.wait("the nodes' memory is touched", lambda: _prefaulted(stage))
    stage.sessions = hello["sessions"]
    _describe(stage, hello)
    # A's loads are off: each of its passes is a full recompute.
    engine_a.ask("attach", endpoints=[stage.endpoint(NEAR_A)], mode="fill", load_deadline_ms=1_000)
    for index in range(stage.session_count):
        if index >= SESSIONS_MIN and not _time_for_another(stage):
            screen.say(f"this machine is slow: {index} sessions instead of {stage.session_count}")
            stage.sessions = stage.sessions[:index]
            break
        _session(stage, index, engine_a, engine_r)
    _conclude(stage, engine_a.ask("stats"), started)
    return engine_a, engine_r


def _conclude(stage: Stage, saver: Message, started: float) -> None:
    copies = stage.copies(NODES)
    stage.report.placement["filled"] = copies
    whole = all(session.prefix_tokens == PREFIX_TOKENS for session in stage.report.sessions)
    ok = copies["fewest"] >= FACTOR and not saver["dropped"] and whole
    holders = ", ".join(f"{node} holds {copies[node]}" for node in NODES)
    block_mb = stage.report.model["block_bytes"] / 1e6
    outcome = f"{copies['blocks']} blocks of {block_mb:.2f} MB stored, each on {copies['fewest']} or more nodes"
    stage.screen.say(f"{outcome}: {holders}", good=ok)
    details = {"saver": saver, "copies": copies}
    stage.report.scenes.append(SceneFigures("a", TITLE, outcome, ok, time.perf_counter() - started, details))


def _session(stage: Stage, index: int, engine_a: Child, engine_r: Child) -> None:
    """One cold pass on A, and the same without any cache on R."""
    session = stage.sessions[index]
    answers: dict[str, Message] = {}
    with stage.screen.step(f"{session['name']} ({session['topic']}): {session['prompt_tokens']} tokens on A and on R"):
        for who in ("A", "R") if index % 2 == 0 else ("R", "A"):
            if who == "A":
                answers["A"] = engine_a.ask("generate", ANSWER_S, session=index, new_tokens=NEW_TOKENS)
                engine_a.ask("flush", ANSWER_S, within_s=ANSWER_S / 2)
                stage.wait("the cluster has replicated the session", lambda: stage.settled(NODES))
            else:
                answers["R"] = engine_r.ask("recompute", ANSWER_S, session=index, new_tokens=NEW_TOKENS, split=0)
    cold, control = answers["A"], answers["R"]
    stage.remember_reference(index, control)
    stage.compare("a", index, cold, control)
    stage.report.sessions.append(
        SessionFigures(
            name=session["name"],
            topic=session["topic"],
            question=session["question"],
            prompt_tokens=session["prompt_tokens"],
            prefix_tokens=len(session["keys"]) * BLOCK_TOKENS,
            answer=cold["text"],
            recompute_ttft_s=cold["ttft_s"],
            uncached_ttft_s=control["ttft_s"],
            recompute_total_s=cold["total_s"],
        )
    )
    stage.screen.say(f"first token after {cold['ttft_s']:.2f} s on A, {control['ttft_s']:.2f} s on R without any cache")
    stage.screen.quote("A:", session["question"], cold["text"])


def _time_for_another(stage: Stage) -> bool:
    """Whether one more session fits, judged by the slowest so far."""
    done = stage.report.sessions
    slowest_s = max(max(session.recompute_total_s, session.uncached_ttft_s) for session in done)
    elapsed_s = time.perf_counter() - stage.screen.started
    return elapsed_s + (2 + REST_RECOMPUTES) * slowest_s + REST_S < RUN_TARGET_S


def _prefaulted(stage: Stage) -> bool:
    documents = [probe.status(stage.endpoint(node)) for node in NODES]
    return all(document["prefaulted_bytes"] >= document["bytes_total"] for document in documents)


def _describe(stage: Stage, hello: Message) -> None:
    stage.report.model = {
        "name": "SmolLM2-135M-Instruct, float32",
        "parameters": hello["parameters"],
        "threads": hello["threads"],
        "block_tokens": BLOCK_TOKENS,
        "block_bytes": hello["block_bytes"],
        "load_s": hello["load_s"],
        "fingerprint": hello["fingerprint"],
    }
    stage.report.failover.budget_s = probe.status(stage.endpoint(NEAR_A))["budget_ms"] / 1000
