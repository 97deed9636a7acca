"""`python -m jrl.config show --network`: numbers of parameters that are known from elsewhere."""

from jrl import config
from jrl.config import __main__ as config_command
from jrl.run import network_table
from jrl.run.network_table import LayerRow


def test_ppo_has_as_many_as_rllib_prints(capsys):
    """4-256-256-2, and as much for the value: 134,915."""
    sets = ["--set", "env.backend=jax", "--set", "network.hidden=[256, 256]"]
    arguments = ["show", "--algo", "ppo", "--env", "CartPole-v1", "--stop", "env_steps=1e6", *sets, "--network"]
    assert config_command.main(arguments) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["name", "shape", "dtype", "parameters"]
    assert ["policy_torso.Dense_1.kernel", "[256,", "256]", "float32", "65,536"] in lines
    assert ["value_head.bias", "[1]", "float32", "1"] in lines
    # 4 * 256 + 256 + 256 * 256 + 256 = 67,072, and the heads 256 * 2 + 2 and 256 + 1
    sums = [["policy_head", "514"], ["policy_torso", "67,072"], ["value_head", "257"], ["value_torso", "67,072"]]
    assert lines[-5:] == [*sums, ["all", "134,915"]]


def test_dueling_dqn_has_as_many_as_rllib_prints():
    """RLlib's table of a DQN's base model, 4-256-256 and one value: 67,329. Advantages are not in it: 256 * 2 + 2."""
    cfg = config.load(
        None,
        ["env.backend=jax", "network.hidden=[256, 256]", "algo.dueling=true"],
        algo="dqn",
        env="CartPole-v1",
        stop=["env_steps=1e6"],
    )
    found = network_table.totals(network_table.rows(cfg))
    assert found["torso"] + found["value_head"] == 67_329
    assert sum(found.values()) == 67_329 + 514


def test_a_table_by_hand():
    found = [
        LayerRow("actor.a", (2, 3), "float32"),
        LayerRow("actor.b", (), "float32"),
        LayerRow("critic", (1500,), "bfloat16"),
    ]
    assert list(network_table.lines(found)) == [
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
