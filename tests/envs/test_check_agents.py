"""What the checker finds in environments of several agents, and that it finds nothing in sound ones."""

import sys
import types

import numpy as np
import pytest

from jrl import check_env
from jrl.envs.checker import check_agent_steps

NAME = "agent_envs"


@pytest.mark.parametrize("name", ["Walkers", "Nim", "MaskedByInfos", "PatientTurns", "make_walkers"])
def test_sound_ones_have_no_problems(name):
    report = check_env(f"{NAME}:{name}", steps=40)
    assert report.ok, report.problems
    assert [note for note in report.notes if "same stream" not in note] == []


FAULTS = [  # environment, its fault, who reports it, in which words
    ("Faulty", "pair", "problem", "the first reset returned a dict: return (observations, infos)"),
    ("Faulty", "stranger", "problem", "agent 'w_9' is not in possible_agents"),
    ("Faulty", "no observation", "problem", "observations has no entry for agent 'w_2'"),
    ("Faulty", "no reward", "problem", "rewards has no entry for agent 'w_1'"),
    ("Faulty", "shape", "problem", "agent 'w_1': observation of shape (3,)"),
    ("Faulty", "flag", "problem", "terminations['w_2'] is 2"),
    ("Faulty", "stays", "problem", "agent 'w_0' has ended, but is still in agents"),
    ("Faulty", "leaves", "problem", "agent 'w_1' is no longer in agents, but has not ended"),
    ("Faulty", "new space", "problem", "observation_space('w_0') is another object at each call"),
    ("Faulty", "unseeded", "problem", "the same seed and actions gave another stream"),
    ("Faulty", "back", "note", "agent 'w_0' has ended in this episode before"),
    ("Faulty", "dead reward", "note", "rewards has agent 'w_0'"),
    ("Faulty", "dead seen", "note", "the first reset: observations has agent 'w_2', which is not in agents"),
    ("FaultyNim", "begins terminated", "problem", "the first reset: agent 'p_0' has ended already: set its flags"),
    ("FaultyNim", "begins truncated", "problem", "the first reset: agent 'p_1' has ended already: set its flags"),
    ("FaultyNim", "info", "problem", "infos['p_1'] is a NoneType: set it to a dict"),
    ("FaultyNim", "count", "problem", "num_agents is 9, but agents has 2"),
    ("FaultyNim", "half", "problem", "num_agents is 2.0, but agents has 2"),
    ("FaultyNim", "unasked", "problem", "last(observe=False) returns an observation"),
    ("FaultyNim", "reward", "problem", "last() of agent 'p_0' has reward 1, but its rewards sum to 0"),
    ("FaultyNim", "terminated", "problem", "last() of agent 'p_0' has True, but terminations['p_0'] is False"),
    ("FaultyNim", "truncated", "problem", "last() of agent 'p_0' has True, but truncations['p_0'] is False"),
    ("FaultyNim", "other info", "problem", "last() of agent 'p_0' has another info than infos['p_0']"),
    ("FaultyNim", "four", "problem", "last() returned a tuple, not 5 values"),
    ("FaultyNim", "vanishes", "problem", "is no longer in agents, but has not ended: set its flags"),
    ("FaultyNim", "skipped", "problem", "has ended, but was skipped: select it"),
    ("FaultyNim", "flag", "problem", "truncations['p_0'] is None, a NoneType"),
    ("FaultyNim", "unknown", "problem", "rewards has 'p_9', which is not in possible_agents: add it there"),
    ("FaultyNim", "returns", "problem", "returned a int: step of an AECEnv returns nothing"),
    ("FaultyNim", "stale", "note", "rewards has agent 'p_2', which is not in agents"),
    ("FaultyNim", "no count", "note", "num_agents is missing"),
    ("FaultyNim", "no possible agents", "note", "possible_agents is missing, agents is used instead"),
    ("Turns", None, "problem", "then had no observation, and has one again"),
    ("Turns", None, "note", "turn_based = True"),
    ("Undying", None, "problem", "has ended, but is in agents after its step(None)"),
    ("Drawn", None, "note", "render is defined, but not close"),
]


@pytest.mark.parametrize(("name", "fault", "level", "words"), FAULTS)
def test_a_fault_is_reported(name, fault, level, words):
    report = check_env(f"{NAME}:{name}", options={} if fault is None else {"fault": fault}, steps=40)
    assert any(words in line for line in getattr(report, f"{level}s")), report
    assert level == "problem" or report.ok or name == "Turns", report


def test_turns_that_are_made_parallel_are_looked_at_too(monkeypatch):
    from agent_envs import Pair

    utils = types.ModuleType("pettingzoo.utils")
    utils.conversions = types.SimpleNamespace(aec_to_parallel=lambda env: Pair())
    monkeypatch.setitem(sys.modules, "pettingzoo", types.ModuleType("pettingzoo"))
    monkeypatch.setitem(sys.modules, "pettingzoo.utils", utils)
    report = check_env(f"{NAME}:Parallelizable", steps=20)
    assert [line for line in report.problems if "last() of agent 'p_0' has reward 1" in line] == report.problems
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
    return [fault.message for fault in check_agent_steps(("a", "b"), **told)]


def test_columns_that_keep_to_the_contract():
    assert columns() == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"reward": ((2, 0), 1.0)}, "step 3: agent a of environment 0 is absent, but has a reward"),
        ({"absent": ((2, 0), False)}, "step 3: agent a of environment 0 has ended on the previous step"),
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
