"""Scene (d): one byte of a stored block is flipped behind the node's back.

Laws: the block is one that another live node holds too; the byte is changed in the memory of the node that engine B
    loads from; what happened is read from that node's counters and from its memory afterwards.
"""

from __future__ import annotations

import time
from typing import Final

from emberkv.demo import probe
from emberkv.demo.children import Child
from emberkv.demo.corrupt import flip_byte
from emberkv.demo.report import SceneFigures
from emberkv.demo.stage import ANSWER_S, NEAR_B, NEW_TOKENS, OTHER, SURVIVORS, Stage
from emberkv.demo.texts import PREFIX_TOKENS
from emberkv.errors import Unavailable

TITLE_D: Final = "One byte of a stored block is flipped"
FLIPPED_BLOCK: Final = 20
"""Position in the chain: behind the shared system prompt, before the end."""


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
    found, fetched = -probe.counter(near, "bad_copies"), -probe.counter(stage.endpoint(OTHER), "get_hits")
    answer = engine_b.ask("generate", ANSWER_S, session=0, new_tokens=NEW_TOKENS)
    found += probe.counter(near, "bad_copies")
    fetched += probe.counter(stage.endpoint(OTHER), "get_hits")
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
