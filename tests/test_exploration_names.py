"""RLlib's exploration configs in our spelling: the numbers worked out by hand, and each result fits its algorithm."""

import subprocess
import sys

import pytest

from jrl import registry
from jrl.migrate.exploration_names import from_rllib


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"type": "EpsilonGreedy", "initial_epsilon": 1.0, "final_epsilon": 0.1, "epsilon_timesteps": 5000},
            {"name": "epsilon_greedy", "epsilon": [[0, 1.0], [5000, 0.1]]},
        ),
        ({"type": "EpsilonGreedy"}, {"name": "epsilon_greedy", "epsilon": [[0, 1.0], [10_000, 0.02]]}),
        (
            {"type": "EpsilonGreedy", "warmup_timesteps": 200, "epsilon_timesteps": 1000},
            {"name": "epsilon_greedy", "epsilon": [[0, 1.0], [200, 1.0], [1200, 0.02]]},
        ),
        (
            {"type": "EpsilonGreedy", "initial_epsilon": 0.3, "final_epsilon": 0.3},
            {"name": "epsilon_greedy", "epsilon": 0.3},
        ),
        ({"type": "EpsilonGreedy", "epsilon_timesteps": 0}, {"name": "epsilon_greedy", "epsilon": 0.02}),
        (
            {"type": "EpsilonGreedy", "epsilon_schedule": [[0, 1], [50, 0.5], [90, 0.1]]},
            {"name": "epsilon_greedy", "epsilon": [[0, 1.0], [50, 0.5], [90, 0.1]]},
        ),
        ({"type": "PerWorkerEpsilonGreedy", "final_epsilon": 0.1}, {"name": "epsilon_greedy", "ladder": True}),
        ({"type": "SoftQ", "temperature": 0.5}, {"name": "soft_q", "temperature": 0.5}),
        ({"type": "StochasticSampling"}, {"name": "stochastic"}),
        ({"type": "StochasticSampling", "random_timesteps": 500}, {"name": "stochastic", "random_timesteps": 500}),
        (
            {"type": "GaussianNoise", "stddev": 0.5, "initial_scale": 1.0, "final_scale": 0.1, "scale_timesteps": 200},
            {"name": "gaussian", "std": [[0, 0.5], [200, 0.05]], "random_timesteps": 1000},
        ),
        (
            {"type": "GaussianNoise", "final_scale": 1.0, "random_timesteps": 0},
            {"name": "gaussian", "std": 0.1},
        ),
        (
            {"type": "OrnsteinUhlenbeckNoise", "ou_sigma": 0.5, "ou_base_scale": 0.25, "scale_timesteps": 100},
            # 0.5 x 0.25 x the width of [-1, 1], and 0.02 of it
            {
                "name": "ornstein_uhlenbeck",
                "theta": 0.15,
                "sigma": [[0, 0.25], [100, 0.005]],
                "random_timesteps": 1000,
            },
        ),
        (
            {"type": "ParameterNoise", "initial_stddev": 0.5, "random_timesteps": 0},
            {"name": "parameter_noise", "std": 0.5},
        ),
        (
            {"type": "ParameterNoise", "sub_exploration": {"type": "EpsilonGreedy", "epsilon_timesteps": 7}},
            {
                "name": "parameter_noise",
                "std": 1.0,
                "random_timesteps": 10_000,
                "epsilon": [[0, 1.0], [7, 0.02]],
            },
        ),
        (
            {"type": "ParameterNoise", "sub_exploration": {"type": "OrnsteinUhlenbeckNoise", "ou_sigma": 0.3}},
            {"name": "parameter_noise", "std": 1.0, "random_timesteps": 10_000, "target_std": 0.3},
        ),
        ({"type": "Random"}, {"name": "random"}),
        ({"type": "ray.rllib.utils.exploration.soft_q.SoftQ"}, {"name": "soft_q", "temperature": 1.0}),
        ({"type": "my_project.noise.Mine", "depth": 3}, {"name": "custom", "path": "my_project.noise.Mine",
                                                        "options": {"depth": 3}}),
    ],
    ids=lambda x: str(x)[:60],
)  # fmt: skip
def test_each_type(given, expected):
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
    from jrl.fields import schema

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
    code = "import sys, jrl.migrate.exploration_names; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
