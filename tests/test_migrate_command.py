"""python -m jrl.migrate, and RLlib's flags where jrl's commands take them."""

import json
from pathlib import Path

import pytest

from jrl import config, train
from jrl.config import __main__ as command
from jrl.errors import InputError
from jrl.fields import schema
from jrl.migrate import main

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures" / "rllib"
FILES = schema.parse((HERE / "migrations.yaml").read_text())["files"]


def test_command_writes_yaml_that_can_be_read_and_a_line_for_each_key(capsys):
    assert main([str(FIXTURES / "cartpole-ppo.yaml")]) == 0
    out, err = capsys.readouterr()
    assert schema.parse(out) == FILES["cartpole-ppo.yaml"]["config"]
    assert "num_epochs: 6                         # num_sgd_iter" in out
    lines = FILES["cartpole-ppo.yaml"]["lines"]
    assert err.splitlines()[: len(lines)] == lines


def test_command_reads_json_with_what_it_lacks(capsys, tmp_path):
    path = tmp_path / "params.json"
    path.write_text(json.dumps({"num_env_runners": 6}, indent="\t"))
    assert main([str(path), "--algo", "A2C", "--env", "Pong-v5"]) == 0
    found = schema.parse(capsys.readouterr().out)
    assert found == {
        "algo": {"name": "a2c"}, "env": {"id": "Pong-v5", "num_envs": 6}, "env_runners": {"num": 6},
    }  # fmt: skip


def test_command_drops_only_when_it_is_told_to(capsys):
    name = str(FIXTURES / "impala.yaml")
    assert main([name, "--algo", "IMPALA"]) == 2
    out, err = capsys.readouterr()
    own = "impala learns from its own rollouts: bc, marwil, iql, cql and dqn learn from data"
    assert not out and f"error: input: {own}: remove it" in err
    assert main([name, "--algo", "IMPALA", "--drop"]) == 0
    out, err = capsys.readouterr()
    assert schema.parse(out) == FILES["impala.yaml"]["config"]
    assert f"dropped, as was asked:\n  input: {own}\n" in err
    assert "for RLlib's set network.hidden: [256, 256]" in err


def test_the_flags_of_rllibs_command():
    """`rllib train --run=A2C --config '{...}' --stop '{...}'`, and the same over a file."""
    said = []

    def load(path=None, algo=None, env=None, drop=False, over_it=None, **more):
        data = command.given(path, algo=algo, env=env, drop=drop, over_it=over_it, tell=said.append)
        return config.load(data, algo=algo, env=env, **more)

    given = {"num_workers": 0, "lambda": 0.5}
    stop = ['{"training_iteration": 2, "env_runners": {"episode_return_mean": 150}}']
    cfg = load(None, algo="A2C", env="CartPole-v1", over_it=given, stop=stop)
    assert (cfg.env.num_envs, cfg.algo.gae_lambda) == (8, 0.5)
    assert cfg.stop == {"env_steps": 2048, "episode/return": 150}
    assert "migrated: lambda -> algo.gae_lambda: 0.5" in said
    cfg = load(FIXTURES / "cartpole-ppo.yaml", over_it={"lambda": 0.5, "model": {"fcnet_hiddens": [8]}})
    assert (cfg.algo.gae_lambda, cfg.network.hidden, cfg.network.shared) == (0.5, (8,), True)
    with pytest.raises(InputError, match="is a configuration of jrl: use --set"):
        load(HERE.parent / "configs" / "ppo.yaml", over_it=given)
    with pytest.raises(InputError, match="--drop: expected a configuration of RLlib"):
        load(HERE.parent / "configs" / "ppo.yaml", drop=True)
    with pytest.raises(InputError, match=r"--stop {nonsense: expected metric=number, or JSON"):
        config.load(None, algo="ppo", env="CartPole-v1", stop=["{nonsense"])
    with pytest.raises(InputError, match="--config: expected JSON such as"):
        train._read_mapping("--config", "ppo.yaml", "{}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1, 2]", "expected a mapping"),
        ("{", "not valid"),
        ("algo: {name: ppo}\nenv: {id: CartPole-v1}", "expected a configuration of RLlib"),
        ("env: CartPole-v1", "--algo"),
    ],
)
@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_command_refuses_bad_input(capsys, tmp_path, text, expected, kind):
    if kind == "json" and text[0] not in "[{":
        text = json.dumps(schema.parse(text))
    path = tmp_path / f"old.{kind}"
    path.write_text(text)
    assert main([str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert expected in err
    assert err.count("\n") == 1


def test_command_without_a_file(capsys, tmp_path):
    assert main([str(tmp_path / "params.json")]) == 2
    assert "there is no such file" in capsys.readouterr().err
