"""RLlib's exploration configs in our spelling: the numbers worked out by hand, and each result fits its algorithm."""

import subprocess
import sys
from pathlib import Path

import pytest

from jrl import registry
from jrl.fields import schema
from jrl.rllib.exploration import from_rllib

TABLE = schema.parse((Path(__file__).parent / "migrations.yaml").read_text())


@pytest.mark.parametrize("row", TABLE["exploration_config"], ids=lambda row: str(row["given"])[:60])
def test_each_type(row):
    given, expected = row["given"], row["becomes"]
    found = from_rllib(given)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, list):
            assert [step for step, _ in found[key]] == [step for step, _ in value]
            assert [v for _, v in found[key]] == pytest.approx([v for _, v in value])
        else:
            assert found[key] == (pytest.approx(value) if isinstance(value, float) else value)


def test_the_defaults_are_the_algorithms():
    assert from_rllib({"epsilon_timesteps": 50}, "DQN")["epsilon"] == [[0, 1.0], [50, 0.02]]
    td3 = from_rllib({"stddev": 0.2}, "TD3")
    assert td3 == {"name": "gaussian", "std": 0.2, "random_timesteps": 10_000}
    assert from_rllib({"type": "GaussianNoise"}, "DDPG")["std"] == [[0, 0.1], [10_000, pytest.approx(0.002)]]
    assert from_rllib({}, "PPO") == {"name": "stochastic"}


class Mine:
    pass


def test_a_class_as_type():
    assert from_rllib({"type": Mine, "x": 1}) == {"name": "custom", "path": f"{__name__}:Mine", "options": {"x": 1}}
    registry.register("my-noise", Mine)
    assert from_rllib({"type": "my-noise"})["path"] == "my-noise"
    theirs = type("SoftQ", (), {"__module__": "ray.rllib.utils.exploration.soft_q"})
    assert from_rllib({"type": theirs}) == {"name": "soft_q", "temperature": 1.0}


def test_every_result_is_a_section_of_an_algorithm():
    from jrl.algos.exploration import OverActions, OverDistributions, OverQ

    fits = {
        OverQ: ("EpsilonGreedy", "PerWorkerEpsilonGreedy", "SoftQ", "ParameterNoise", "Random"),
        OverActions: ("GaussianNoise", "OrnsteinUhlenbeckNoise", "ParameterNoise", "Random"),
        OverDistributions: ("StochasticSampling", "Random"),
    }
    for union, types in fits.items():
        classes = {cls.name: cls for cls in union.__args__}
        for given in types:
            section = from_rllib({"type": given})
            problems: list = []
            made = schema.build(classes[section["name"]], section, problems, prefix="algo.exploration.")
            assert problems == []
            assert made.name == section["name"]


def test_it_loads_without_jax():
    code = "import sys, jrl.rllib.exploration; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
