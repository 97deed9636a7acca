"""Plan of a population as text: which keys are vmapped, and the number of programs."""

import pytest

from jrl import config
from jrl.run import build_population
from jrl.sweep import members, trainer

EACH = "a program for each of its 2 values"
OUTSIDE = "not vmapped: gymnasium steps the environments, outside the program that learns"


def programs(count, most):
    return f"{count} programs, one after the other, of at most {most} member{'s' * (most > 1)}"


CASES = {  # shared settings, values of each member, maximum members in a program, lines of the plan
    "one": ({}, [{"run.seed": 3}], None, []),
    "chunks": ({}, [{"run.seed": i} for i in range(5)], 2, ["run.seed: vmapped", programs(3, 2)]),
    "structure": (
        {},
        [
            {"algo.normalize_obs": on, "network.activation": name, "algo.lr": lr}
            for on, name, lr in ((True, "tanh", 0.1), (False, "relu", 0.2))
        ],
        None,
        ["algo.lr: vmapped", f"algo.normalize_obs: {EACH}", f"network.activation: {EACH}", programs(2, 1)],
    ),
    "replay": (
        {"algo.name": "dqn", "replay.learning_starts": 32, "replay.prioritized": True},
        [{"replay.priority_alpha": a, "replay.updates_per_step": n} for a, n in ((0.5, 0.5), (0.7, 1.0))],
        None,
        ["replay.priority_alpha: vmapped", f"replay.updates_per_step: {EACH}", programs(2, 1)],
    ),
    "outside": (
        {"env.backend": "gymnasium"},
        [{"algo.lr": 1e-3}, {"algo.lr": 1e-2}],
        None,
        [f"algo.lr: {OUTSIDE}"],
    ),
    "some": (
        {},
        [{"env.backend": backend, "algo.lr": lr} for backend in ("jax", "gymnasium") for lr in (0.1, 0.2)],
        None,
        ["algo.lr: vmapped", f"env.backend: {EACH}", f"members 02, 03: {OUTSIDE}"],
    ),
    "in two programs": (
        {"rollout.mode": "async"},
        [{"run.seed": 0}, {"run.seed": 1}],
        None,
        ["run.seed: not vmapped: one program collects, another learns: rollout.mode async"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_has_a_line_for_each_key(name, tmp_path):
    shared, values, most, lines = CASES[name]
    settings = {"algo.name": "ppo", "env.backend": "jax", "env.num_envs": 2, **shared}
    overrides = [f"{key}={value}" for key, value in settings.items()]
    cfg = config.load(None, overrides, env="CartPole-v1", stop=["env_steps=64"])
    population = members.build_members(cfg, tmp_path, values)
    groups = build_population.grouped([member.config for member in population])
    first, *others = trainer.format_plan([([population[i] for i in own], why) for own, why in groups], most)
    assert first == f"plan: {len(values)} member{'s' * (len(values) > 1)}"
    assert others == [f"  {line}" for line in lines]


def test_a_long_list_of_members_is_shortened():
    names = [f"{i:02}" for i in range(12)]
    assert trainer.format_members(names) == "members 00, 01, 02, 03, 04, 05, 06, 07 and 4 more"
    assert trainer.format_members(names[:1]) == "member 00"
