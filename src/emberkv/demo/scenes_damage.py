"""Scenes (d) and (e): a stored byte is flipped; a replica is frozen in the middle of a load.

Laws: the byte is flipped behind the node's back, in a block that another live node holds too. The load that is frozen goes
    over the wire, because the engine's own node has just restarted with empty memory and the frozen node is then the only
    one that holds the blocks: the worst case, since with a second holder the load would simply ask there. What was loaded
    is continued exactly; the reference is cut at the same token.
Limits: if the load was over before the freeze, or nothing had arrived, the scene is played again with another session,
    ATTEMPTS_MAX times.
"""

from __future__ import annotations

import signal
import time
from typing import Final, NamedTuple

from emberkv.demo import probe
from emberkv.demo.children import Child, Message
from emberkv.demo.corrupt import flip_byte
from emberkv.demo.report import SceneFigures
from emberkv.demo.stage import ANSWER_S, NEAR_B, NEW_TOKENS, OTHER, Stage
from emberkv.demo.texts import PREFIX_TOKENS
from emberkv.errors import Unavailable

TITLE_D: Final = "One byte of a stored block is flipped"
TITLE_E: Final = "The only replica is frozen (SIGSTOP) in the middle of a load"
SURVIVORS: Final = (NEAR_B, OTHER)
FLIPPED_BLOCK: Final = 20
"""Position in the chain: behind the shared system prompt, before the end."""
ATTEMPTS_MAX: Final = 3
FREEZE_DEADLINE_MS: Final = 1_000
"""Deadline of the load that is frozen: shorter than a lease, so that the freeze does not become a failover too."""
FREEZE_AFTER_BLOCKS: Final = 4
DEADLINE_SLACK_S: Final = 0.35
"""How far behind its deadline a load may end on two busy cores; the freeze itself costs nothing beyond the deadline."""


def flip(stage: Stage, engine_b: Child, engine_r: Child) -> None:
    """Scene (d)."""
    started = time.perf_counter()
    screen, near = stage.screen, stage.endpoint(NEAR_B)
    screen.scene("d", TITLE_D)
    with screen.step("wait until both survivors hold every block"):
        stage.wait("both survivors hold every block", lambda: stage.copies(SURVIVORS)["fewest"] == len(SURVIVORS))
        stage.wait("the survivors are idle", lambda: stage.settled(SURVIVORS))
    key = stage.keys(0)[FLIPPED_BLOCK]
    place = probe.placed(near, key)
    if place is None or not probe.held(stage.endpoint(OTHER), [key])[0]:
        raise Unavailable(f"block {FLIPPED_BLOCK} of the first session is not on both survivors")
    at = place.length // 2
    was, is_now = flip_byte(stage.node_pid(NEAR_B), place.arena_inode, place.offset + at)
    screen.say(f"byte {at} of block {FLIPPED_BLOCK} in the memory of {NEAR_B}: {was:#04x} is now {is_now:#04x}")
    before_near, before_other = probe.counters(near), probe.counters(stage.endpoint(OTHER))
    answer = engine_b.ask("generate", ANSWER_S, session=0, new_tokens=NEW_TOKENS)
    after_near, after_other = probe.counters(near), probe.counters(stage.endpoint(OTHER))
    found = after_near.get("bad_copies", 0) - before_near.get("bad_copies", 0)
    fetched = after_other.get("get_hits", 0) - before_other.get("get_hits", 0)
    repaired = probe.placed(near, key)
    mended = repaired is not None and repaired.intact and repaired.checksum == place.checksum
    same = stage.compare("d", 0, answer, stage.reference(engine_r, 0, answer["loaded_tokens"])).tokens_identical
    whole = answer["loaded_tokens"] == PREFIX_TOKENS
    ok = found == 1 and fetched >= 1 and mended and same and whole
    outcome = (
        f"{found} bad copy found by its checksum, {fetched} block taken from {OTHER}, "
        f"{'repaired' if mended else 'NOT repaired'} on {NEAR_B}, tokens {'identical' if same else 'DIFFER'}"
    )
    screen.say(outcome, good=ok)
    details = {
        "block": FLIPPED_BLOCK,
        "byte": at,
        "bad_copies": found,
        "fetched_from_other": fetched,
        "repaired": mended,
        "loaded_tokens": answer["loaded_tokens"],
        "ttft_s": answer["ttft_s"],
    }
    stage.report.scenes.append(SceneFigures("d", TITLE_D, outcome, ok, time.perf_counter() - started, details))


class Frozen(NamedTuple):
    """One frozen load: `blocks_there` were on the engine's node before it began."""

    session: int
    answer: Message
    blocks_there: int
    frozen_after_s: float


def freeze(stage: Stage, engine_b: Child, engine_r: Child) -> None:
    """Scene (e)."""
    started = time.perf_counter()
    screen = stage.screen
    screen.scene("e", TITLE_E)
    for attempt in range(1, ATTEMPTS_MAX + 1):
        _restart_near(stage)
        frozen = _frozen_load(stage, engine_b)
        loaded = frozen.answer["loaded_tokens"]
        if 0 < loaded < PREFIX_TOKENS:
            break
        screen.say(f"{loaded} tokens had arrived when the node froze, which shows nothing: once more")
    answer = frozen.answer
    same = stage.compare(
        "e", frozen.session, answer, stage.reference(engine_r, frozen.session, loaded)
    ).tokens_identical
    in_time = answer["fetch_s"] <= FREEZE_DEADLINE_MS / 1000 + DEADLINE_SLACK_S
    screen.say(
        f"the load ended after {answer['fetch_s']:.2f} s (deadline {FREEZE_DEADLINE_MS / 1000:.1f} s) with {loaded} of "
        f"{PREFIX_TOKENS} tokens, engine B computed the rest",
        good=in_time and same,
    )
    with screen.step(f"{OTHER} goes on (SIGCONT); load the same session once more"):
        stage.wait("the survivors are idle", lambda: stage.settled(SURVIVORS))
        again = engine_b.ask("generate", ANSWER_S, session=frozen.session, new_tokens=NEW_TOKENS)
    reference = stage.reference(engine_r, frozen.session, again["loaded_tokens"])
    same_again = stage.compare("e, thawed", frozen.session, again, reference).tokens_identical
    whole_again = again["loaded_tokens"] == PREFIX_TOKENS
    partial = 0 < loaded < PREFIX_TOKENS
    ok = partial and in_time and same and same_again and whole_again
    outcome = (
        f"load ended after {answer['fetch_s']:.2f} s with the {loaded} tokens that had arrived, rest computed, tokens "
        f"{'identical' if same else 'DIFFER'}; thawed: {again['loaded_tokens']} tokens loaded, "
        f"{'identical' if same_again else 'DIFFER'}"
    )
    screen.say(outcome, good=ok)
    details = {
        "session": frozen.session,
        "attempts": attempt,
        "frozen_after_s": frozen.frozen_after_s,
        "blocks_already_near": frozen.blocks_there,
        "deadline_s": FREEZE_DEADLINE_MS / 1000,
        "load_s": answer["fetch_s"],
        "loaded_tokens": loaded,
        "misses": answer["misses"],
        "ttft_s": answer["ttft_s"],
        "thawed_loaded_tokens": again["loaded_tokens"],
        "thawed_ttft_s": again["ttft_s"],
    }
    stage.report.scenes.append(SceneFigures("e", TITLE_E, outcome, ok, time.perf_counter() - started, details))


def _restart_near(stage: Stage) -> None:
    """Engine B's node is stopped and started, as for an upgrade: its memory is empty, `OTHER` alone holds the blocks."""
    with stage.screen.step(f"restart {NEAR_B} with empty memory: {OTHER} is the only holder"):
        stage.wait("both survivors hold every block", lambda: stage.copies(SURVIVORS)["fewest"] == len(SURVIVORS))
        stage.cluster.kill(NEAR_B, signal.SIGTERM)
        stage.wait(f"{NEAR_B} has ended", lambda: not stage.cluster.node(NEAR_B).alive)
        stage.cluster.restart(NEAR_B)
        stage.node_pid(NEAR_B)
        stage.wait(f"{NEAR_B} knows {OTHER}", lambda: OTHER in probe.status(stage.endpoint(NEAR_B))["peers_up"])


def _frozen_load(stage: Stage, engine_b: Child) -> Frozen:
    """Starts a load and freezes the only holder while its bytes arrive."""
    near, block_bytes = stage.endpoint(NEAR_B), int(stage.report.model["block_bytes"])
    engine_b.ask("attach", endpoints=[near], mode="load", load_deadline_ms=FREEZE_DEADLINE_MS)
    there = {index: sum(probe.held(near, stage.keys(index))) for index in range(len(stage.sessions))}
    session = min(there, key=lambda index: there[index])
    base_bytes = probe.status(near)["bytes_used"]
    engine_b.send("generate", session=session, new_tokens=NEW_TOKENS)
    begun = time.perf_counter()
    try:
        while True:
            document = probe.status(near)
            arriving = document["reads"] and document["bytes_used"] - base_bytes >= FREEZE_AFTER_BLOCKS * block_bytes
            if arriving or time.perf_counter() - begun > FREEZE_DEADLINE_MS / 1000:
                break
        stage.cluster.kill(OTHER, signal.SIGSTOP)
        frozen_after_s = time.perf_counter() - begun
        stage.screen.say(
            f"SIGSTOP {OTHER} {frozen_after_s * 1000:.0f} ms into the load of {session_name(stage, session)}"
        )
        time.sleep(max(0.0, FREEZE_DEADLINE_MS / 1000 + 0.2 - frozen_after_s))
    finally:
        stage.cluster.kill(OTHER, signal.SIGCONT)
    answer = engine_b.receive(ANSWER_S)
    return Frozen(session, answer, there[session], frozen_after_s)


def session_name(stage: Stage, session: int) -> str:
    """Name of a session as the tables have it."""
    return str(stage.sessions[session]["name"])
