"""Faults that the checker finds in environments of several agents, and none in sound environments."""

import pytest
from agent_envs import Nim

from jrl import check_env

NAME = "agent_envs"


@pytest.mark.parametrize("name", ["Walkers", "Nim", "MaskedByInfos", "PatientTurns", "make_walkers", "Unequal", "Duel"])
def test_sound_environments_have_no_problems(name):
    report = check_env(f"{NAME}:{name}", steps=40)
    assert report.ok, report.problems
    assert [note for note in report.notes if "same stream" not in note and "ms: " not in note] == []


FAULTS = [  # environment, its fault, and words of the message; `test_multi_host` has the faults that end a run
    ("Faulty", "pair", "the first reset returned a dict: return (observations, infos)"),
    ("Faulty", "unseeded", "the same seed and actions gave another stream"),
    ("FaultyNim", "vanishes", "is no longer in agents, but has not ended: set its flags"),
    ("FaultyNim", "flag", "truncations['p_0'] is None, a NoneType"),
    ("FaultyNim", "unknown", "rewards has 'p_9', which is not in possible_agents: add it there"),
    ("Turns", None, "then had no observation, and has one again"),
    ("Undying", None, "has ended, but is in agents after its step(None)"),
]


@pytest.mark.parametrize(("name", "fault", "words"), FAULTS)
def test_a_fault_is_reported(name, fault, words):
    report = check_env(f"{NAME}:{name}", options={} if fault is None else {"fault": fault}, steps=40)
    assert any(words in line for line in report.problems), report
    assert any("turn_based = True" in note for note in report.notes) == (name == "Turns")


def test_environments_of_pettingzoos_classes_pass_its_own_test():
    pettingzoo = pytest.importorskip("pettingzoo")
    sound = type("Sound", (Nim, pettingzoo.AECEnv), {})
    assert check_env(sound, steps=40).problems == []

    def last(self, observe=True):
        seen, reward, *rest = Nim.last(self, observe)
        return seen, reward + 1, *rest

    (line,) = check_env(type("Wrong", (sound,), {"last": last}), steps=40).problems
    assert line.startswith("PettingZoo's api_test fails: AssertionError: ")


def test_a_game_of_mpe2():
    pytest.importorskip("mpe2")
    report = check_env("pettingzoo:mpe2.simple_spread_v3", options={"state": True}, steps=60)
    assert report.ok and [note for note in report.notes if "ms: " not in note] == []
