"""What the documents name exists: links, tests, commands and options, oracles, wire numbers, bounds."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from emberkv.cli.main import app
from emberkv.client import token
from emberkv.core import directory, failover, get, handover, hints, put, repair, sources, state, stream
from emberkv.core.merge import AppliedVector
from emberkv.messages import SPANS_MAX, Kind
from emberkv.sim import oracles
from emberkv.sim.faults import KINDS as FAULTS
from emberkv.types import MissReason, PutStatus, RefuseReason

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TEXTS = {path: path.read_text() for path in DOCUMENTS}
PROTOCOL, TESTING = TEXTS[ROOT / "docs/PROTOCOL.md"], TEXTS[ROOT / "docs/TESTING.md"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def outside_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(text: str) -> set[str]:
    """The targets of a document: its headings, as they are written in links, and named places."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)"', text))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", outside_code(TEXTS[path])):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{target}: there is no such file"
        if anchor:
            assert anchor in anchors(found.read_text()), f"{target}: there is no such heading"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_tests_that_are_named_exist(path: Path) -> None:
    for file, test in re.findall(r"`(tests/[\w/.]+\.(?:py|txt))(?:::(\w+))?`", TEXTS[path]):
        assert (ROOT / file).exists(), file
        assert not test or f"def {test}(" in (ROOT / file).read_text(), f"{file} has no {test}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_files_that_are_named_exist(path: Path) -> None:
    """Names of source files with their room, like `core/put.py`, and of other files of the repository."""
    for room, file in re.findall(r"(?<![/\w])(core|node|client|sim|wire|net|coord|storage|cli)/(\w+\.py)", TEXTS[path]):
        assert (ROOT / "src/emberkv" / room / file).exists(), f"{room}/{file}"
    for file in re.findall(r"`((?:src|docs|tests|scripts)/[\w/.]+\.\w+)`", TEXTS[path]):
        assert (ROOT / file).exists(), file


def command_lines(text: str) -> list[list[str]]:
    """Every `emberkv ...` of fenced blocks and of code in running text, in words."""
    fenced = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    lines = [line for block in fenced for line in block.splitlines()]
    lines += re.findall(r"`(emberkv [^`\n]+)`", text)
    found = []
    for line in lines:
        bare = re.sub(r"^\s*(\$ )?(\.venv/bin/)?", "", line).split(" #")[0].split(" | ")[0]
        if bare.startswith("emberkv "):
            found.append(shlex.split(bare)[1:])
    return found


def options_of(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_and_their_options_exist(path: Path) -> None:
    for words in command_lines(TEXTS[path]):
        command: click.Command = typer.main.get_command(app)
        rest = list(words)
        while hasattr(command, "commands") and rest and not rest[0].startswith("-") and re.match(r"[a-z]", rest[0]):
            assert rest[0] in command.commands, f"emberkv {' '.join(words)}: there is no {rest[0]}"
            command = command.commands[rest.pop(0)]
            if rest[:1] == ["/"]:
                rest = []  # a list of verbs, as in `namespace list / create`
        for word in rest:
            option = word.strip("[]").partition("=")[0]
            if option.startswith("--") and len(option) > 2:
                assert option in options_of(command), f"emberkv {' '.join(words)}: there is no {option}"


def test_a_command_that_does_not_exist_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in ("emberkv fly", "emberkv sim --sedes 3", "emberkv namespace rename x"):
        monkeypatch.setitem(TEXTS, ROOT, f"```\n{line}\n```")
        with pytest.raises(AssertionError, match="there is no"):
            test_commands_and_their_options_exist(ROOT)


def test_the_oracles_are_those_of_the_simulator() -> None:
    """Every tuple of oracles that oracles.py puts together, in one table."""
    tuples = [value for value in vars(oracles).values() if isinstance(value, tuple)]
    kinds = [kind for kind in (kind for one in tuples for kind in one) if hasattr(kind, "law")]
    table = "".join(f"| {kind.__name__} | {kind.law} |\n" for kind in kinds)
    found = TESTING.partition("| oracle | law |\n|---|---|\n")[2].partition("\n\n")[0] + "\n"
    assert sorted(found.splitlines()) == sorted(table.splitlines())


def test_every_kind_of_fault_is_named() -> None:
    table = TESTING.partition("| kind | what goes wrong |\n|---|---|\n")[2].partition("\n\n")[0]
    named = [kind for row in table.splitlines() for kind in row.split("|")[1].strip().split(", ")]
    assert sorted(named) == sorted(FAULTS)


def test_wire_numbers_are_the_codes() -> None:
    rows = dict(re.findall(r"^\| ([A-Z_]+) \| (\d+) \|", PROTOCOL, re.MULTILINE))
    assert rows == {kind.name: str(int(kind)) for kind in Kind}
    for kind, first in (
        (MissReason, "MissReason: 1 absent"),
        (PutStatus, "Status: 0 accepted"),
        (RefuseReason, "Reason: 0 none"),
    ):
        words = PROTOCOL[PROTOCOL.index(first) : PROTOCOL.index(first) + 500]
        for one in kind:
            if one or kind is not MissReason:
                label = one.name.lower().replace("_", "-")
                assert f"{int(one)} {label}" in re.sub(r"\s+", " ", words), f"{kind.__name__} {one.name}"


def test_every_reason_and_outcome_is_explained() -> None:
    get_chapter, put_chapter = PROTOCOL.partition("## 4. Get")[2], PROTOCOL.partition("## 3. Put")[2]
    for reason in MissReason:
        assert not reason or reason.label in get_chapter.partition("## 5.")[0], reason.label
    for status in PutStatus:
        assert f"`{status.name}" in put_chapter.partition("## 4.")[0], status.name


BOUNDS = {
    f"{put.OPS_MAX} puts in": "puts in progress",
    f"{state.HINTS_MAX:,} hints": "hints",
    f"{hints.FORWARDS_PER_PEER_MAX} messages unanswered": "forwards",
    f"{stream.BACKLOG_ITEMS_MAX:,} items per peer": "backlog",
    f"for {state.ANSWER_OVERDUE_LEASES} ttl is taken as lost": "overdue",
    f"at up to {sources.SOURCES_PER_KEY_MAX} sources": "sources",
    f"last for {sources.BREAKER_OPEN_NS / 1e9:g} s, doubling to {sources.BREAKER_OPEN_MAX_NS / 1e9:g} s": "breaker",
    f"beyond {AppliedVector.RANGES_MAX} ranges of an epoch": "ranges",
    f"beyond {AppliedVector.EPOCHS_MAX} epochs": "epochs",
    f"or {directory.Directory.TOMBSTONES_MAX:,} later ones": "tombstones",
    f"{directory.Directory.EVICTED_MEMORY_MAX:,} later evictions": "evictions",
    f"at most {token.KEYS_MAX:,} keys": "token",
    f"up to {state.SHARDS_PER_COMMIT} shards": "takeover",
    f"(at most {failover.GUARD_COMPARES_MAX})": "guards",
    f"Up to {failover.RECONCILES_PER_HEARTBEAT} times per heartbeat period": "reconciles",
    f"At most {failover.MOVES_MAX} shards of a primary": "moves",
    f"put_ids of the last {state.PUTS_REMEMBERED_MAX:,} puts": "decided puts",
    f"at most {directory.Directory.CLEARED_PER_TICK_MAX:,} blocks leave with their slabs": "cleared slabs",
    f"At most {handover.CLOSED_MAX} gates are closed at a time, {handover.PER_COMMIT_MAX} to a commit": "hand-overs",
    f"waits in step 2 for {handover.CLOSING_TTLS_MAX} ttl": "closing",
    f"{repair.PROBES_PER_MESSAGE_MAX} shards to a message, {repair.LANES_PER_PEER_MAX} at a time": "comparisons",
    f"{repair.OFFERING_PER_PEER_MAX} shards at a time with one peer": "heads",
    f"spans in all (<= {SPANS_MAX:,})": "spans",
}


@pytest.mark.parametrize("words", BOUNDS, ids=BOUNDS.get)
def test_bounds_are_the_codes(words: str) -> None:
    assert words in re.sub(r"\s+", " ", PROTOCOL)


def test_the_first_source_gets_half() -> None:
    assert get.FIRST_TRY_SHARE == 0.5
    assert "the first gets half of the time left" in PROTOCOL
