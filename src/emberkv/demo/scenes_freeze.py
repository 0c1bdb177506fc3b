"""Scene (e): replicas are frozen (SIGSTOP) in the middle of a load.

Laws: the loads go over the wire: the killed node is started again with empty memory, and engine B moves to it. A freeze
    happens when a stated share of the load's bytes is seen to have arrived in that node's memory. What was loaded is
    continued exactly as it is; the reference is cut at the same token. Engine B saves nothing here.
Limits: a load that was over before the freeze, or had not begun, shows nothing and is played again, ATTEMPTS_MAX times.
    The node knows how fast each holder is once it has loaded from both, and then asks the faster one for all blocks; so
    each freeze is preceded by a load of the first session.

    part            frozen           what has to happen
    over the wire   nobody           the whole prefix arrives
    one frozen      who is sending   the load ends in time; the other holder is asked for what is missing
    all frozen      both holders     the load ends at its deadline with the prefix that arrived; the rest is computed
    thawed          nobody           the whole prefix arrives
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from emberkv.client import Client
from emberkv.demo import probe
from emberkv.demo.children import Child, Message
from emberkv.demo.report import SceneFigures
from emberkv.demo.stage import ANSWER_S, NEAR_A, NEW_TOKENS, SURVIVORS, Stage
from emberkv.demo.texts import PREFIX_TOKENS

TITLE_E: Final = "Replicas are frozen (SIGSTOP) in the middle of a load"
ATTEMPTS_MAX: Final = 3
DEADLINE_MS: Final = 1_000
"""Deadline of the loads that meet a freeze: shorter than a lease, so that the freeze does not become a failover too."""
FREEZE_SHARE: Final = 0.1
"""Share of a load's bytes that has arrived when the freeze comes."""
DEADLINE_SLACK_S: Final = 0.35
"""How far behind its deadline a load may end on two busy cores."""
STALL_S: Final = 0.1
"""A load that ended this soon after the freeze did not wait for the frozen node."""
FROZEN_FOR_S: Final = DEADLINE_MS / 1000 + 0.1
NEAR: Final = NEAR_A
"""The node that was killed in scene (b), started again."""


class Frozen(NamedTuple):
    """One load that met a freeze."""

    session: int
    answer: Message
    victims: Sequence[str]
    frozen_after_s: float
    arrived_bytes: int
    blocks_wanted: int

    @property
    def loaded(self) -> int:
        """Tokens that came from the cache."""
        return int(self.answer["loaded_tokens"])

    @property
    def broken(self) -> bool:
        """Whether a part of what had to come over the wire came, and a part did not."""
        return self.arrived_bytes > 0 and 0 < self.loaded < PREFIX_TOKENS

    @property
    def in_time(self) -> bool:
        """Whether the load ended by its deadline."""
        return float(self.answer["fetch_s"]) <= DEADLINE_MS / 1000 + DEADLINE_SLACK_S


def play(stage: Stage, engine_b: Child, engine_r: Child) -> None:
    """All parts."""
    started = time.perf_counter()
    stage.screen.scene("e", TITLE_E)
    count = len(stage.sessions)
    wire, wire_ok = _over_the_wire(stage, engine_b, engine_r)
    one, one_ok = _one_frozen(stage, engine_b, engine_r, 1)
    everyone, all_ok = _all_frozen(stage, engine_b, engine_r, 2 if count > 2 else 1)
    thawed, thawed_ok = _thawed(stage, engine_b, engine_r, everyone["session"])
    ok = wire_ok and one_ok and all_ok and thawed_ok
    alone = f"{one['loaded_tokens']} tokens after {one['load_s']:.2f} s"
    if not one["met_the_load"]:
        alone = "the load was over before the freeze, which shows nothing"
    outcome = (
        f"one of two holders frozen: {alone}; both frozen: the "
        f"{everyone['loaded_tokens']} tokens that had arrived after {everyone['load_s']:.2f} s, the rest "
        f"computed; thawed: "
        f"{thawed['loaded_tokens']}; tokens {'identical in all' if ok or _identical(stage) else 'DIFFER'}"
    )
    details: dict[str, Any] = {"over_the_wire": wire, "one_frozen": one, "all_frozen": everyone, "thawed": thawed}
    details["deadline_s"] = DEADLINE_MS / 1000
    stage.report.scenes.append(SceneFigures("e", TITLE_E, outcome, ok, time.perf_counter() - started, details))


def _identical(stage: Stage) -> bool:
    return all(one.tokens_identical for one in stage.report.comparisons if one.scene.startswith("e"))


def _over_the_wire(stage: Stage, engine_b: Child, engine_r: Child) -> tuple[dict[str, Any], bool]:
    """The node that was killed is back, empty; every block comes from the two survivors."""
    _start_empty(stage)
    _attach(stage, engine_b)
    answer = engine_b.ask("generate", ANSWER_S, session=0, new_tokens=NEW_TOKENS)
    same = _compare(stage, "e, over the wire", 0, answer, engine_r)
    ok = same and answer["loaded_tokens"] == PREFIX_TOKENS
    stage.report.wire_ttft_s = float(answer["ttft_s"])
    stage.screen.say(
        f"{NEAR} is back with empty memory; engine B, moved to it, loads {answer['loaded_tokens']} tokens over "
        f"the wire: "
        f"first token after {answer['ttft_s']:.3f} s",
        good=ok,
    )
    return _details(0, answer), ok


def _one_frozen(stage: Stage, engine_b: Child, engine_r: Child, session: int) -> tuple[dict[str, Any], bool]:
    for attempt in range(1, ATTEMPTS_MAX + 1):
        if attempt > 1:
            _warm(stage, engine_b)
        frozen = _frozen_load(stage, engine_b, session, everyone=False)
        met = bool(frozen.arrived_bytes) and float(frozen.answer["fetch_s"]) > frozen.frozen_after_s + STALL_S
        if met:
            break
        stage.screen.say(f"the load was over before the node froze, which shows nothing{_again(attempt)}")
    same = _compare(stage, "e, one frozen", session, frozen.answer, engine_r)
    ok = same and frozen.in_time and frozen.loaded > 0
    stage.screen.say(
        f"the load ended after {frozen.answer['fetch_s']:.2f} s with {frozen.loaded} of {PREFIX_TOKENS} tokens", good=ok
    )
    return {**_details(session, frozen.answer), **_freeze_details(frozen, attempt), "met_the_load": met}, ok


def _all_frozen(stage: Stage, engine_b: Child, engine_r: Child, session: int) -> tuple[dict[str, Any], bool]:
    for attempt in range(1, ATTEMPTS_MAX + 1):
        if attempt > 1 or session == 1:  # the node has this session's blocks
            _warm(stage, engine_b)
        frozen = _frozen_load(stage, engine_b, session, everyone=True)
        if frozen.broken:
            break
        stage.screen.say(f"the load came to {frozen.loaded} tokens, which shows nothing{_again(attempt)}")
    same = _compare(stage, "e, all frozen", session, frozen.answer, engine_r)
    ok = same and frozen.in_time and frozen.broken
    stage.screen.say(
        f"the load ended after {frozen.answer['fetch_s']:.2f} s (deadline {DEADLINE_MS / 1000:.1f} s) with the "
        f"{frozen.loaded} "
        f"of {PREFIX_TOKENS} tokens that had arrived; engine B computed the rest",
        good=ok,
    )
    return {**_details(session, frozen.answer), **_freeze_details(frozen, attempt)}, ok


def _thawed(stage: Stage, engine_b: Child, engine_r: Child, session: int) -> tuple[dict[str, Any], bool]:
    nodes = (NEAR, *SURVIVORS)
    with stage.screen.step("the frozen nodes go on (SIGCONT); load the same session once more"):
        stage.wait("the nodes are idle again", lambda: stage.settled(nodes))
        answer = engine_b.ask("generate", ANSWER_S, session=session, new_tokens=NEW_TOKENS)
    same = _compare(stage, "e, thawed", session, answer, engine_r)
    ok = same and answer["loaded_tokens"] == PREFIX_TOKENS
    stage.screen.say(f"{answer['loaded_tokens']} tokens loaded, first token after {answer['ttft_s']:.3f} s", good=ok)
    return _details(session, answer), ok


def _again(attempt: int) -> str:
    return ": once more" if attempt < ATTEMPTS_MAX else f" (tried {attempt} times)"


def _start_empty(stage: Stage) -> None:
    """(Re)starts the engine's node: its memory is empty, and it is nobody's replica."""
    with stage.screen.step(f"start {NEAR} with empty memory"):
        if stage.cluster.node(NEAR).alive:
            stage.cluster.kill(NEAR, signal.SIGTERM)
            stage.wait(f"{NEAR} has ended", lambda: not stage.cluster.node(NEAR).alive)
        stage.cluster.restart(NEAR)
        stage.node_pid(NEAR)
        stage.wait(f"{NEAR} has joined", lambda: _joined(stage))
        # Otherwise it would be given shards again, and the blocks of this scene would come out of its own memory.
        with Client([stage.endpoint(name) for name in SURVIVORS]) as operator:
            operator.drain(NEAR)


def _warm(stage: Stage, engine_b: Child) -> None:
    """Empties the engine's node and loads the first session through it."""
    _start_empty(stage)
    _attach(stage, engine_b)
    engine_b.ask("generate", ANSWER_S, session=0, new_tokens=1)


def _joined(stage: Stage) -> bool:
    document = probe.status(stage.endpoint(NEAR))
    ready = document["prefaulted_bytes"] >= document["bytes_total"]
    return ready and document["lease_open"] and set(SURVIVORS) <= set(document["peers_up"])


def _attach(stage: Stage, engine_b: Child) -> None:
    engine_b.ask("attach", endpoints=[stage.endpoint(NEAR)], mode="load", load_deadline_ms=DEADLINE_MS)


def _frozen_load(stage: Stage, engine_b: Child, session: int, *, everyone: bool) -> Frozen:
    """Starts a load and freezes the holder that sends, or all of them, while its bytes arrive."""
    _attach(stage, engine_b)
    with probe.Look(stage.endpoint(NEAR)) as near, probe.Look(stage.endpoint(SURVIVORS[0])) as holder:
        wanted = near.held(stage.keys(session)).count(False)
        load_bytes = wanted * int(stage.report.model["block_bytes"])
        arrivals = probe.Arrivals(near)
        served = holder.counter("get_hits")
        engine_b.send("generate", session=session, new_tokens=NEW_TOKENS)
        begun = time.perf_counter()
        while arrivals.count_bytes() < FREEZE_SHARE * load_bytes:
            if time.perf_counter() - begun > DEADLINE_MS / 1000:
                break
        victims: Sequence[str] = SURVIVORS
        if not everyone:  # a holder counts before it sends
            victims = SURVIVORS[:1] if holder.counter("get_hits") > served else SURVIVORS[1:]
        try:
            for victim in victims:
                stage.cluster.kill(victim, signal.SIGSTOP)
            frozen_after_s = time.perf_counter() - begun
            arrived = arrivals.count_bytes()
            time.sleep(max(0.0, FROZEN_FOR_S - frozen_after_s))
        finally:
            for victim in victims:
                stage.cluster.kill(victim, signal.SIGCONT)
        del arrivals
    stage.screen.say(
        f"SIGSTOP {' and '.join(victims)} {frozen_after_s * 1000:.0f} ms into the load of "
        f"{stage.sessions[session]['name']}: {arrived / 1e6:.0f} of {load_bytes / 1e6:.0f} MB had arrived"
    )
    return Frozen(session, engine_b.receive(ANSWER_S), victims, frozen_after_s, arrived, wanted)


def _compare(stage: Stage, scene: str, session: int, answer: Message, engine_r: Child) -> bool:
    reference = stage.reference(engine_r, session, answer["loaded_tokens"])
    return stage.compare(scene, session, answer, reference).tokens_identical


def _details(session: int, answer: Message) -> dict[str, Any]:
    return {
        "session": session,
        "load_s": answer["fetch_s"],
        "loaded_tokens": answer["loaded_tokens"],
        "ttft_s": answer["ttft_s"],
        "misses": answer["misses"],
    }


def _freeze_details(frozen: Frozen, attempt: int) -> dict[str, Any]:
    return {
        "frozen": list(frozen.victims),
        "frozen_after_s": frozen.frozen_after_s,
        "blocks_wanted_over_the_wire": frozen.blocks_wanted,
        "arrived_bytes": frozen.arrived_bytes,
        "attempts": attempt,
    }
