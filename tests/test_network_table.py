"""`python -m jrl.config show --network`: numbers of parameters that are known from elsewhere."""

import jax
import numpy as np

from jrl.config import __main__ as config_command
from jrl.run import network_table


def shown(algo, capsys, *sets):
    sets = [f"--set={x}" for x in ("env.backend=jax", "network.hidden=[256, 256]", *sets)]
    arguments = ["show", "--algo", algo, "--env", "CartPole-v1", "--stop", "env_steps=1e6", *sets, "--network"]
    assert config_command.main(arguments) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_networks_have_as_many_as_rllib_prints(capsys):
    """PPO 4-256-256-2, and as much for the value: 134,915. DQN 4-256-256 and one value: 67,329; advantages not."""
    lines = shown("ppo", capsys)
    assert lines[0] == ["name", "shape", "dtype", "parameters"]
    assert ["policy_torso.Dense_1.kernel", "[256,", "256]", "float32", "65,536"] in lines
    assert ["value_head.bias", "[1]", "float32", "1"] in lines
    # 4 * 256 + 256 + 256 * 256 + 256 = 67,072, and the heads 256 * 2 + 2 and 256 + 1
    sums = [["policy_head", "514"], ["policy_torso", "67,072"], ["value_head", "257"], ["value_torso", "67,072"]]
    assert lines[-5:] == [*sums, ["all", "134,915"]]
    lines = shown("dqn", capsys, "algo.dueling=true")
    assert ["torso", "67,072"] in lines and ["value_head", "257"] in lines
    assert lines[-1] == ["all", f"{67_329 + 514:,}"]


def test_a_table_by_hand():
    shapes = {"actor.a": ((2, 3), np.float32), "actor.b": ((), np.float32), "critic": ((1500,), jax.numpy.bfloat16)}
    assert list(network_table.lines({name: jax.ShapeDtypeStruct(*x) for name, x in shapes.items()})) == [
        "name     shape   dtype     parameters",
        "-------------------------------------",
        "actor.a  [2, 3]  float32            6",
        "actor.b  []      float32            1",
        "critic   [1500]  bfloat16       1,500",
        "-------------------------------------",
        "actor                               7",
        "critic                          1,500",
        "all                             1,507",
    ]
