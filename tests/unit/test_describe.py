"""The diagrams in docs/PROTOCOL.md are the tables that the code runs on, and the tables have no dead ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from emberkv.core import handover, lease, repair
from emberkv.core.describe import MACHINES, diagram, rewritten
from emberkv.errors import ConfigError

PROTOCOL = Path(__file__).parents[2] / "docs" / "PROTOCOL.md"
PHASES = {"lease": lease.Phase, "repair": repair.Phase, "handover": handover.Phase}
"""Name of a machine -> all its states: a state that is missing in the table would be missing in the diagram."""


def first_of(name):
    return next(iter(MACHINES[name][1]))[0]


def test_every_machine_is_known_here():
    assert PHASES.keys() == MACHINES.keys()


@pytest.mark.parametrize("name", MACHINES)
def test_every_state_is_reachable(name):
    _, table, _ = MACHINES[name]
    reached, looked = {first_of(name)}, set()
    while reached - looked:
        state = (reached - looked).pop()
        looked.add(state)
        reached |= {following for (source, _), following in table.items() if source is state}
    assert reached == set(PHASES[name])


@pytest.mark.parametrize("name", MACHINES)
def test_from_every_state_there_is_a_way_to_an_end_or_to_a_state_that_lasts(name):
    """A member stays one; everything else must be able to end, or it would wait for ever in a state of passage."""
    _, table, ends = MACHINES[name]
    ending = {phase for phase in PHASES[name] if phase.value in ends or phase is lease.Phase.MEMBER}
    while grown := {source for (source, _), following in table.items() if following in ending} - ending:
        ending |= grown
    assert ending == set(PHASES[name])


@pytest.mark.parametrize("name", MACHINES)
def test_ends_are_of_states_that_exist(name):
    values = {phase.value for phase in PHASES[name]}
    assert set(MACHINES[name][2]) <= values


def test_a_diagram_shows_every_move_once():
    for name, (_, table, ends) in MACHINES.items():
        lines = diagram(name).splitlines()
        assert len(lines) == len(set(lines)), "the same move twice"
        for (state, what), following in table.items():
            assert f"    {state.value} --> {following.value}: {what}" in lines
        assert sum("-->" in line for line in lines) == 1 + len(table) + len(ends)


@pytest.mark.parametrize("name", MACHINES)
def test_words_on_the_arrows_are_ones_that_mermaid_takes(name):
    _, table, ends = MACHINES[name]
    for what in (*(what for _, what in table), *ends.values()):
        assert not set(what) & set(":;\n"), what


def test_the_protocol_shows_the_tables_as_they_are():
    text = PROTOCOL.read_text()
    for name in MACHINES:
        assert f"<!-- states: {name} -->" in text, "each machine has its place in the document"
    assert text == rewritten(text), f"run: python -m emberkv.core.describe {PROTOCOL}"


def test_an_old_diagram_is_noticed_and_made_anew(tmp_path):
    document = tmp_path / "some.md"
    document.write_text("before\n<!-- states: repair -->\nold\n<!-- end -->\nbetween <!-- end -->\n")
    subprocess.run([sys.executable, "-m", "emberkv.core.describe", str(document)], check=True)
    text = document.read_text()
    assert text == f"before\n<!-- states: repair -->\n{diagram('repair')}<!-- end -->\nbetween <!-- end -->\n"
    assert rewritten(text) == text


def test_an_unknown_machine_is_named():
    with pytest.raises(ConfigError, match=r"nothing.*lease, repair, handover"):
        rewritten("<!-- states: nothing -->\n<!-- end -->")
