"""What the checker finds in environments of several agents, and that it finds nothing in sound ones."""

import sys
import types

import numpy as np
import pytest

from jrl import check_env
from jrl.envs.checker import of_columns

NAME = "agent_envs"


@pytest.mark.parametrize("name", ["Walkers", "Nim", "MaskedByInfos", "PatientTurns", "make_walkers"])
def test_sound_ones_have_no_problems(name):
    report = check_env(f"{NAME}:{name}", steps=40)
    assert report.ok, report.problems
    assert [note for note in report.notes if "same stream" not in note] == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("pair", "the first reset returned a dict: return (observations, infos)"),
        ("stranger", "agent 'w_9' is not in possible_agents"),
        ("no observation", "observations has nothing of agent 'w_2'"),
        ("no reward", "rewards has nothing of agent 'w_1'"),
        ("shape", "agent 'w_1': observation of shape (3,)"),
        ("flag", "terminations['w_2'] is 2"),
        ("stays", "agent 'w_0' has ended, but is in agents still"),
        ("leaves", "agent 'w_1' is not in agents any more, but has not ended"),
        ("new space", "observation_space('w_0') is another object at each call"),
        ("unseeded", "the same seed and actions gave another stream"),
    ],
)
def test_problems(fault, words):
    report = check_env(f"{NAME}:Faulty", options={"fault": fault}, steps=20)
    assert any(words in line for line in report.problems), report


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("back", "agent 'w_0' has ended in this episode before"),
        ("dead reward", "rewards has agent 'w_0'"),
        ("dead seen", "the first reset: observations has agent 'w_2', which is not in agents"),
    ],
)
def test_notes(fault, words):
    report = check_env(f"{NAME}:Faulty", options={"fault": fault}, steps=20)
    assert report.ok and any(words in line for line in report.notes), report


def test_turns_that_nobody_declared_are_a_problem():
    report = check_env(f"{NAME}:Turns", steps=20)
    assert any("had no observation since, and has one again" in line for line in report.problems)
    assert any("turn_based = True" in line for line in report.notes)


def test_an_agent_that_stays_after_its_end_is_a_problem():
    report = check_env(f"{NAME}:Undying", steps=40)
    assert any("has ended, but is in agents after its step(None)" in line for line in report.problems)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("begins terminated", "the first reset: agent 'p_0' has ended already: set its flags"),
        ("begins truncated", "the first reset: agent 'p_1' has ended already: set its flags"),
        ("info", "infos['p_1'] is a NoneType: put a dict there"),
        ("count", "num_agents is 9, but agents has 2"),
        ("half", "num_agents is 2.0, but agents has 2"),
        ("unasked", "last(observe=False) gives an observation"),
        ("reward", "last() tells agent 'p_0' of a reward of 1, but its rewards sum to 0"),
        ("terminated", "last() tells agent 'p_0' True, but terminations['p_0'] is False"),
        ("truncated", "last() tells agent 'p_0' True, but truncations['p_0'] is False"),
        ("other info", "last() tells agent 'p_0' another info than infos['p_0']"),
        ("four", "last() returned a tuple, no 5 values"),
        ("vanishes", "is not in agents any more, but has not ended: set its flags"),
        ("skipped", "has ended, but was skipped: select it"),
        ("flag", "truncations['p_0'] is None, a NoneType"),
        ("unknown", "rewards has 'p_9', which is not in possible_agents: add it to them"),
        ("returns", "returned a int: step of an AECEnv returns nothing"),
    ],
)
def test_problems_of_those_that_take_turns(fault, words):
    report = check_env(f"{NAME}:FaultyNim", options={"fault": fault}, steps=40)
    assert any(words in line for line in report.problems), report


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("stale", "rewards has agent 'p_2', which is not in agents"),
        ("no count", "num_agents is missing"),
        ("no possible agents", "possible_agents is missing, and agents stands for it"),
    ],
)
def test_notes_of_those_that_take_turns(fault, words):
    report = check_env(f"{NAME}:FaultyNim", options={"fault": fault}, steps=20)
    assert report.ok and any(words in line for line in report.notes), report


def test_a_picture_that_nobody_closes_is_noted():
    report = check_env(f"{NAME}:Drawn", steps=5)
    assert report.ok and any("render is there, but no close" in line for line in report.notes), report


def test_turns_that_are_made_parallel_are_looked_at_too(monkeypatch):
    from agent_envs import Pair

    utils = types.ModuleType("pettingzoo.utils")
    utils.conversions = types.SimpleNamespace(aec_to_parallel=lambda env: Pair())
    monkeypatch.setitem(sys.modules, "pettingzoo", types.ModuleType("pettingzoo"))
    monkeypatch.setitem(sys.modules, "pettingzoo.utils", utils)
    report = check_env(f"{NAME}:Parallelizable", steps=20)
    assert [line for line in report.problems if "last() tells agent 'p_0' of a reward of 1" in line] == report.problems
    assert len(report.problems) == 1


def columns(**changed):
    """A game of two agents: a ends at step 2, b and the game at step 3, and step 4 begins another."""
    told = {
        "reward": np.array([[1, 1], [1, 1], [0, 1], [0, 0], [1, 1]], float),
        "done": np.array([[0, 0], [1, 0], [0, 1], [0, 0], [0, 0]], bool),
        "absent": np.array([[0, 0], [0, 0], [1, 0], [1, 1], [0, 0]], bool),
        "over": np.array([[0], [0], [1], [0], [0]], bool),
    }
    for name, (at, value) in changed.items():
        told[name][at] = value
    return [fault.message for fault in of_columns(("a", "b"), **told)]


def test_columns_that_keep_to_the_contract():
    assert columns() == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"reward": ((2, 0), 1.0)}, "step 3: agent a of environment 0 is absent, but has a reward"),
        ({"absent": ((2, 0), False)}, "step 3: agent a of environment 0 has ended on the step before"),
        ({"absent": ((3, 1), False)}, "step 4: agent b of environment 0"),
        ({"done": ((2, 1), False)}, "step 3: agent b of environment 0 has not ended, but the game is over"),
        ({"over": ((2, 0), False)}, "step 3: agent a of environment 0 and all others have ended"),
    ],
)
def test_columns_that_do_not(changed, words):
    assert any(words in line for line in columns(**changed)), columns(**changed)


def test_one_of_pettingzoos_own():
    pytest.importorskip("mpe2")
    report = check_env("pettingzoo:mpe2.simple_spread_v3", options={"state": True}, steps=60)
    assert report == ([], [])
