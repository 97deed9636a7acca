"""`jrl train ENV`: the choice as a function of inspected facts, and runs of the command."""

import json
import os
import signal
import threading
import time

import psutil
import pytest

from jrl import config, train
from jrl.auto import chooser, facts, ruleset, trials
from jrl.config import EnvConfig
from jrl.metrics import loggers

FACTS = {
    "backend": "envpool", "device": "cpu", "steps_per_s": 20_000, "agents": 1, "action": "discrete",
    "actions": 2, "mask": False, "observation": "vector", "arrays": 1, "elements": 4, "goals": False, "floats": True,
    "obs_largest": 1.8, "obs_smallest_std": 0.2, "symbols": False, "limit": 500, "length": 20.0, "ends_early": 1.0,
    "reward": "dense", "reward_std": 1.0, "return": 20.0, "minutes": 10.0,
}  # fmt: skip
SLOW = {"backend": "gymnasium", "steps_per_s": 50}
BOX = {"action": "continuous"}
# facts that differ from FACTS -> environment with such facts, and keys of the config
TABLE = [
    ({}, "CartPole-v1", {"algo.name": "ppo", "env.num_envs": 16, "algo.normalize_obs": False}),
    ({"obs_smallest_std": 0.01}, "CartPole-v1", {"algo.normalize_obs": True}),
    ({"obs_largest": 40.0}, "CartPole-v1", {"algo.normalize_obs": True, "algo.normalize_reward": True}),
    ({"reward": "sparse"}, "CartPole-v1", {"algo.normalize_reward": False, "algo.curiosity": None}),
    ({"reward": "constant", "ends_early": 0.0}, "MountainCar-v0", {"algo.curiosity.name": "rnd"}),
    ({"reward": "constant"}, "CartPole-v1", {"algo.curiosity": None, "algo.normalize_reward": True}),
    ({"limit": 25}, "CartPole-v1", {"algo.gamma": 0.95}),
    ({"limit": None}, "CartPole-v1", {"algo.gamma": 0.99}),
    ({"backend": "jax"}, "CartPole-v1", {"env.num_envs": 64}),
    ({"mask": True, **SLOW}, "CartPole-v1", {"algo.name": "ppo"}),
    (SLOW, "CartPole-v1", {"algo.name": "dqn", "replay.n_step": 3, "evaluation.duration": 5}),
    ({"observation": "image"}, "CartPole-v1", {"network.shared": True}),
    ({"observation": "image", "symbols": True}, "CartPole-v1", {"network.image_max": 10}),
    ({"action": "multi-discrete"}, "CartPole-v1", {"algo.name": "ppo"}),
    ({"action": "mixed"}, "CartPole-v1", {"algo.name": "ppo"}),
    ({**BOX, "minutes": 20}, "Pendulum-v1", {"algo.name": "sac", "env.num_envs": 1, "network.hidden": [256, 256]}),
    ({**BOX, **SLOW}, "Pendulum-v1", {"algo.name": "sac", "network.hidden": [256, 256]}),
    (BOX, "Pendulum-v1", {"algo.name": "ppo", "env.num_envs": 8}),
    ({**BOX, "observation": "image"}, "Pendulum-v1", {"algo.name": "ppo", "algo.num_epochs": 10}),
    ({**BOX, "goals": True}, "PointMaze-v0", {"algo.name": "sac", "replay.hindsight.strategy": "future"}),
    ({"goals": True}, "BitFlip-v0", {"algo.name": "dqn", "replay.hindsight.strategy": "future"}),
    ({"agents": 2}, "MultiAgentCartPole-v1", {"algo.name": "ppo", "multi_agent.mapping": None}),
    ({**BOX, "agents": 2}, "MultiAgentPendulum-v1", {"algo.name": "ppo"}),
]


@pytest.mark.parametrize(("changed", "env", "wanted"), TABLE, ids=lambda x: str(x)[:60])
def test_facts_choose_a_valid_config(changed, env, wanted):
    choice = ruleset.choose({**FACTS, **changed})
    data = {**choice.data, "env": {**choice.data["env"], "id": env}, "stop": {"env_steps": 100_000}}
    flat = config.to_dict(config.load(data))
    for key, value in wanted.items():
        found = flat
        for part in key.split("."):
            found = found[part]
        assert found == value, key
    assert set(choice.origins.values()) <= set(choice.reasons) and not any("{" in line for line in choice.reasons)


def test_each_rule_applies_to_a_row_of_the_table():
    applied = {reason for changed, _, _ in TABLE for reason in ruleset.choose({**FACTS, **changed}).reasons}
    assert all(any(reason.startswith(rule["why"].split("{")[0]) for reason in applied) for rule in ruleset.rules())


@pytest.mark.parametrize(
    ("changed", "env", "wanted"),
    [
        ({}, "CartPole-v1", ["rules", "memory", "far", "careful"]),
        ({"limit": 100}, "CartPole-v1", ["rules", "memory", "careful"]),
        ({**BOX, "minutes": 4.9}, "Pendulum-v1", ["rules"]),
        (BOX, "Pendulum-v1", ["rules", "memory", "far", "bold"]),
        ({**BOX, "minutes": 20}, "Pendulum-v1", ["rules"]),  # sac: too slow to compare in seconds
        ({**BOX, "observation": "image"}, "Pendulum-v1", ["rules", "far", "bold"]),
        ({"agents": 2}, "MultiAgentCartPole-v1", ["rules", "far", "careful"]),
    ],
)
def test_facts_choose_trials_with_valid_configs(changed, env, wanted):
    given = {**FACTS, **changed}
    candidates = ruleset.choose_trials(given, ruleset.choose(given))
    assert list(candidates) == wanted
    for one in candidates.values():
        config.load({**one.data, "env": {**one.data["env"], "id": env}, "stop": {"env_steps": 100_000}})


def test_conditions_name_facts_or_keys():
    keys = {name for rule in [*ruleset.rules(), *ruleset.trial_rules()] for name in rule.get("when", {})}
    assert keys <= {*FACTS, "algo.name"}


def test_an_inspection_has_the_facts_of_the_table():
    """The values are CartPole's: pushes at random end an episode after about 20 steps."""
    found = facts.inspect(EnvConfig("CartPole-v1", backend="jax"), seconds=0.5)
    assert found.keys() | {"minutes"} == FACTS.keys() and found["reward"] == "constant" and found["ends_early"] == 1.0
    assert (found["action"], found["actions"], found["elements"], found["limit"]) == ("discrete", 2, 4, 500)
    assert 10 < found["length"] < 40 and found["return"] == pytest.approx(found["length"], abs=2)
    json.dumps(found)


_WALK = """
import gymnasium, numpy as np

class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict({"at": gymnasium.spaces.Box(0.0, 8.0, (1,), np.float32)})
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.t = 0, 0
        return {"at": np.array([self.at], np.float32)}, {}

    def step(self, action):
        self.at, self.t = max(0, self.at + (1 if action else -1)), self.t + 1
        return {"at": np.array([self.at], np.float32)}, float(self.at == 8), self.at == 8, self.t == 100, {}

class Wide(Walk):
    def step(self, action):
        obs, *rest = super().step(action)
        return {"at": np.array([self.at, 0], np.float32)}, *rest
"""


def test_a_run_from_an_id_and_from_its_yaml(tmp_path, monkeypatch, capsys):
    (tmp_path / "walk_here.py").write_text(_WALK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    small = ["--set=env.num_envs=2", "--set=run.report_every_s=0", "--stop=env_steps=2000"]
    assert train.main(["walk_here:Walk", "--minutes=1", "--out=run", *small]) == 0
    out = capsys.readouterr().out
    assert "chosen:" in out and "discrete actions (2)" in out and "stopped:" in out
    chosen = config.load("run/auto.yaml")  # without the options of the command line
    assert (chosen.env.num_envs, chosen.env.id, chosen.algo.normalize_obs) == (16, "walk_here:Walk", True)
    assert train.main(["run/config.yaml", "--out=again"]) == 0
    capsys.readouterr()
    assert train.main(["walk_here:Wide"]) == 2
    assert "shape (2,), but the space has (1,)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trial_with_memory_wins_where_velocities_are_hidden(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(["StatelessCartPole-v1", "--minutes=5", "--out=run"]) == 0
    out = capsys.readouterr().out
    assert "memory continues" in out and config.load("run/auto.yaml").network.core.name == "gru"
    rows = loggers.read_rows("run/result.jsonl")
    assert rows[0]["env_steps"] < 20_000 and rows[-1]["time_s"] > 100  # the rows of the trial and of its continuation
    assert train.main(["StatelessCartPole-v1", "--minutes=5", "--out=run"]) == 2
    assert "holds a run already" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_trials(number, tmp_path):
    """Each trial is a process in a session of its own, which no signal of a terminal reaches."""
    console = tmp_path / trials.DIRECTORY / "rules" / "console.txt"

    def interrupt():
        while not console.exists():
            time.sleep(0.01)
        time.sleep(0.5)
        found.extend(child for child in psutil.Process().children() if str(tmp_path / "trials") in str(child.cmdline()))
        os.kill(os.getpid(), number)

    found = []
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(SystemExit) as ended:
        trials.run(tmp_path, {"rules": "algo: {name: ppo}\n"}, [], seconds=60, at_once=1)
    thread.join()
    assert ended.value.code == 128 + number and found
    assert psutil.wait_procs(found, timeout=10)[1] == []


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["CartPol-v1"], ["CartPol-v1: there is no such config", "env.id CartPol-v1", "did you mean CartPole-v1"]),
        (["ppoo"], ["there is no such config: did you mean ppo", "not in any backend"]),
        (["none_here:Env"], ["none_here:Env", "cannot import none_here"]),
        (["ppo", "--minutes=5"], ["--minutes: expected an environment's id", "--stop time_s=600"]),
        (["--minutes=5"], ["--minutes: expected an environment's id"]),
        (["CartPole-v1", "--minutes=0"], ["--minutes: expected a number in [0.1, 100,000], got 0"]),
        (["CartPole-v1", "--algo=sac"], ["--algo: expected no such option", "--env CartPole-v1"]),
        (["CartPole-v1", "--set=algo.name=sac"], ["--set algo.name: expected no such key"]),
        (["CartPole-v1", "--resume=auto"], ["--resume: expected no such option beside CartPole-v1"]),
        (["CartPole-v1", "--set=env.nmu_envs=2"], ["env.nmu_envs: did you mean env.num_envs?"]),
    ],
)
def test_bad_words_are_one_error(words, parts, capsys):
    assert train.main(words) == 2
    error = capsys.readouterr().err
    for part in parts:
        assert part in error


def test_the_facts_in_words():
    lines = chooser.describe({**FACTS, "agents": 2, "mask": True, "limit": None, "return": None})
    assert lines[1] == "  2 agents, discrete actions (2), with masks" and "no limit" in lines[3]
