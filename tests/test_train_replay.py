"""python -m jrl.train with algorithms that learn from replay, and every config that was not tried elsewhere."""

import functools
from pathlib import Path

import numpy as np
import pytest

from jrl import algos, config, evaluate, train
from jrl.config import Sizes, datasets
from jrl.data import __main__ as data_command
from jrl.fields import hyper
from jrl.fields.data import Replay, learns_from
from jrl.metrics import loggers
from jrl.run.session import Session
from jrl.run.store import checkpoint
from jrl.types import Box

CONFIGS = Path(__file__).parent.parent / "configs"
NAMES = sorted(p.stem for p in CONFIGS.glob("*.yaml") if not p.stem.startswith("ppo"))
SMALL = [
    "--set=env.backend=jax", "--set=env.num_envs=4", "--set=network.hidden=[8]", "--set=replay.batch_size=16",
    "--set=replay.learning_starts=64", "--set=replay.capacity=400", "--set=replay.train_every=8",
    "--set=replay.updates_per_step=0.25", "--set=rollout.iterations_per_call=4", "--set=run.log=[jsonl]",
    "--set=run.compile_cache=false", "--set=run.report_every=100", "--set=run.smoothing_episodes=1",
]  # fmt: skip
CLASSES = {name: algos.get_config_class(name) for name in algos.names()}
TASKS = {
    name: "Pendulum-v1" if issubclass(Box, cls.acts_in) else "CartPole-v1"
    for name, cls in CLASSES.items()
    if learns_from(cls) is Replay
}


def run(name, *args, out):
    return train.main(["--algo", name, "--env", TASKS[name], *SMALL, "--out", str(out), *args])


# one of each way to get data: rollouts, replay, a data set; all others in the slow set
QUICK = ("impala", "dqn", "discrete_cql")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A function that gives a data set of random play in an environment, recorded once for all configs."""

    @functools.cache
    def of(env):
        out = tmp_path_factory.mktemp("set") / "set"
        random = ["--env", env, "--random", "1", "--steps", "100", "--num-envs", "2"]
        assert data_command.main(["record", *random, "--out", str(out)]) == 0
        return out

    return of


@pytest.fixture(scope="module")
def teacher(recorded, tmp_path_factory):
    """A function that trains the teacher of distill.yaml."""

    @functools.cache
    def of():
        out = tmp_path_factory.mktemp("teacher") / "run"
        settings = [f"--set={s}" for s in small("distill_teacher", recorded, None)]
        assert (
            train.main([str(CONFIGS / "distill_teacher.yaml"), *settings, "--stop=env_steps=16", "--out", str(out)])
            == 0
        )
        return out

    return of


def small(name, recorded, teacher):
    """What makes a config quick: as few numbers and rows as it can have."""
    cfg = config.load(CONFIGS / f"{name}.yaml")
    made = ["network.head_hidden=[]", "env.num_envs=2", "evaluation.every=1000000000", "run.log=[jsonl]"]
    made.append("rollout.iterations_per_call=1")
    norms = "layer" in (cfg.network.norm, cfg.network.critic_norm)  # these need hidden layers
    blocks = cfg.network.torso in hyper.RESIDUAL or cfg.network.critic_torso is not None
    made.append(f"network.hidden={[8] if norms or blocks else []}")
    made += ["network.critic_hidden=[8]"] if cfg.network.critic_hidden else []
    made += ["algo.num_epochs=1"] if hasattr(cfg.algo, "num_epochs") else []
    if cfg.replay is None and not hasattr(cfg.algo, "num_minibatches"):
        made += ["rollout.length=4"]
    elif cfg.replay is None:
        made += ["rollout.length=8", "algo.num_minibatches=2"]
    else:
        made += ["replay.capacity=400", "replay.batch_size=4", "replay.learning_starts=16", "replay.train_every=8"]
        made += ["replay.updates_per_step=0.25"]
        made += ["network.max_seq_len=4", "replay.burn_in=2"] if cfg.network.recurrent else []
    if cfg.multi_agent and cfg.multi_agent.self_play:
        made.append("multi_agent.self_play.pool=1")
    if cfg.data.input:
        path = recorded(cfg.env.id)
        mixed = f"{{sampler: 0.5, '{path}': 0.5}}"
        made.append(f"data.input={mixed if datasets.is_mixed(cfg.data) else path}")
    if config.algo_name(cfg) == "distill":
        made += ["network.max_seq_len=8", f"algo.teacher={teacher()}"]
    if config.algo_name(cfg) == "dt":  # whose sequences are read from their first row on
        made.append("replay.burn_in=0")
    return made


@pytest.mark.parametrize("name", [n for n in NAMES if n not in QUICK])
def test_every_config_is_built(name, recorded, teacher):
    """Its environment, algorithm, programs and replay; what is compiled is in the slow set."""
    with Session(config.load(CONFIGS / f"{name}.yaml", small(name, recorded, teacher))) as session:
        assert session.run.program is not None


@pytest.mark.parametrize("name", [n for n in TASKS if CLASSES[n].has_memory])
def test_every_replay_is_built_with_memory(name):
    """Replay of sequences, with the recurrent states that acting records, or without."""
    overrides = ["network.hidden=[8]", "network.max_seq_len=4", "replay.capacity=400", "replay.batch_size=4"]
    tree = {"algo": {"name": name}, "env": {"id": TASKS[name], "backend": "jax"}, "network": {"core": {"name": "gru"}}}
    if CLASSES[name].in_teams:
        tree["env"]["id"], tree["multi_agent"] = "MultiAgentCartPole-v1", {"group": {"team": ["agent_0", "agent_1"]}}
    with Session(config.override(tree, overrides)) as session:
        assert session.run.program is not None


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in NAMES])
def test_every_config_trains(name, tmp_path, recorded, teacher):
    cfg = config.load(CONFIGS / f"{name}.yaml")
    settings, budget = [f"--set={s}" for s in small(name, recorded, teacher)], Sizes(cfg).counts_by
    stop = [f"--stop={budget}=60", *(f"--stop={c}=1e9" for c in cfg.stop if c != budget)]
    assert train.main([str(CONFIGS / f"{name}.yaml"), *settings, *stop, "--out", str(tmp_path / "a")]) == 0
    last = loggers.read_rows(tmp_path / "a" / "result.jsonl")[-1]
    assert last["env_steps"] >= 60 and last["updates"] >= 8
    losses = [k for k in last if "loss/" in k]
    assert losses and all(np.isfinite(last[k]) for k in losses)


@pytest.mark.slow
def test_envpool_trains_in_one_program_and_its_runs_continue(tmp_path, capsys):
    envpool = ("--set=env.backend=envpool", "--set=run.compile_cache=true")
    assert run("dqn", "--stop=env_steps=300", *envpool, out=tmp_path / "a") == 0
    assert "(envpool), 1 x" in capsys.readouterr().out
    saved = checkpoint.locate(tmp_path / "a")
    kept = checkpoint.read(saved, "source")
    assert "window_return" in kept and "env_state" not in kept  # no address of a pool in a checkpoint
    assert run("dqn", "--stop=env_steps=600", *envpool, "--resume=auto", "-v", out=tmp_path / "a") == 0
    assert "the environments start anew, with other seeds" in capsys.readouterr().out
    rows = loggers.read_rows(tmp_path / "a" / "result.jsonl")
    assert rows[-1]["updates"] == 2 * (rows[-1]["iteration"] - 64 // 8 + 1)
    assert rows[-1]["env_steps"] >= 600 and rows[-1]["episode/length"] > 5


def test_learning_begins_with_enough_data_and_without_the_replay_a_resumed_run_fills_it_anew(tmp_path, capsys):
    none = ("--set=checkpoint.replay=none", "--set=replay.learning_starts=200")
    assert run("dqn", "--stop=env_steps=400", *none, out=tmp_path / "a") == 0
    rows = loggers.read_rows(tmp_path / "a" / "result.jsonl")
    assert rows[0]["updates"] == 0 and rows[0]["loss/value"] is None  # a key from the first row on
    assert rows[-1]["loss/value"] is not None
    # 4 environments x 2 steps, 2 updates: from 200 rows on
    updates = rows[-1]["updates"]
    assert updates == 2 * (rows[-1]["iteration"] - 200 // 8 + 1)
    out = capsys.readouterr().out
    assert "2 updates per iteration on 16 transitions from replay, once it holds 200 of at most 400" in out
    assert "replay: 400 transitions take" in out
    assert not (checkpoint.locate(tmp_path / "a") / "replay").exists()
    assert run("dqn", "--stop=env_steps=800", *none, "--resume=auto", out=tmp_path / "a") == 0
    assert "replay starts empty, learning waits until it is filled" in capsys.readouterr().out
    assert loggers.read_rows(tmp_path / "a" / "result.jsonl")[-1]["updates"] > updates
    assert evaluate.main([str(tmp_path / "a"), "--episodes", "3", "--per-episode"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said[:3]] == ["episode 1", "episode 2", "episode 3"]
    mean = np.mean([float(line.split()[3].strip(",")) for line in said[:3]])
    assert said[3].startswith(f"return {mean:.2f} ± ") and said[3].endswith(", 3 episodes")
    assert said[4].endswith("steps of training") and len(said) == 5
    # and one that is asked for where there is none is told of
    assert run("dqn", "--stop=env_steps=900", "--set=checkpoint.replay=full", "--resume=auto", out=tmp_path / "a") == 2
    assert "checkpoint.replay=none" in capsys.readouterr().err


NO_UPDATE = ("--stop=env_steps=400", "--stop=episode/return=1", "--set=replay.learning_starts=200")
WHY = (
    "updates: expected at least 1 in",
    "learning begins with replay.learning_starts 200: lower it, or raise stop.env_steps",
)


def test_a_run_that_made_no_update_says_so_and_fails(tmp_path, capsys):
    assert run("dqn", *NO_UPDATE, out=tmp_path / "one") == 1
    said = capsys.readouterr().err
    assert all(part in said for part in WHY)


@pytest.mark.slow
def test_members_that_made_no_update_say_so_and_fail_whenever_they_are_looked_at(tmp_path, capsys):
    assert run("dqn", *NO_UPDATE, "--seeds=2", out=tmp_path / "two") == 1
    said = capsys.readouterr().err
    assert all(part in said for part in (*WHY, "failed: 00, 01"))
    assert f"failed: {WHY[0]}" in (tmp_path / "two" / "sweep.csv").read_text()
    assert train.main([f"--resume={tmp_path / 'two'}"]) == 1
