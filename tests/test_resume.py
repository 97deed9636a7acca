"""Continuing a run: on other devices, from other weights, and after being killed."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import algos, config, load, train
from jrl.algos import ppo
from jrl.fields.data import DataSets, Replay, learns_from
from jrl.metrics import loggers
from jrl.networks import NetworkConfig
from jrl.replay import prioritized, ring, sum_tree
from jrl.replay.regroup import convert, regroup
from jrl.run.store import checkpoint, resume
from jrl.types import Box, Discrete, EnvSpec, Rollout

SCRIPT = Path(__file__).parent.parent / "scripts" / "prove_resume.py"
SMALL = [
    "--set=env.backend=jax", "--set=env.num_envs=4", "--set=network.hidden=[8]", "--set=run.log=[jsonl]",
    "--set=run.compile_cache=false", "--set=rollout.iterations_per_call=2",
]  # fmt: skip
REPLAY = [
    "--set=replay.batch_size=8", "--set=replay.learning_starts=32", "--set=replay.capacity=400",
    "--set=replay.train_every=8", "--set=replay.updates_per_step=0.25", "--set=replay.prioritized=true",
]  # fmt: skip
TASKS = {"sac": "Pendulum-v1", "td3": "Pendulum-v1", "vdn": "TwoStepGame-v0"}
TEAM = [
    "--set=multi_agent.group={team: [agent_0, agent_1]}", "--set=network.core={name: gru, size: 4}",
    "--set=network.max_seq_len=4", "--set=replay.burn_in=2",
]  # fmt: skip


def run(algo, *args, out):
    more = REPLAY if learns_from(algos.get_config_class(algo)) is Replay else ["--set=rollout.length=16"]
    if algos.get_config_class(algo).in_teams:
        more = [*more, *TEAM]
    return train.main(
        ["--algo", algo, "--env", TASKS.get(algo, "CartPole-v1"), *SMALL, *more, "--out", str(out), *args]
    )


# ---------------------------------------------------------------- on another number of devices


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["dqn", "ppo", "sac", "appo"])
def test_a_run_goes_on_with_fewer_devices_and_with_more(algo, tmp_path, capsys):
    out = tmp_path / "a"
    steps = 400
    assert run(algo, "--set=devices.learners=[0,1,2,3]", f"--stop=env_steps={steps}", out=out) == 0
    for devices in (1, 2):
        before = checkpoint.read(checkpoint.locate(out), "learner")
        steps += 400
        args = [f"--set=devices.learners={list(range(devices))}", f"--stop=env_steps={steps}", "--resume=auto"]
        assert run(algo, *args, out=out) == 0
        assert f"devices to {devices}: the environments are dealt out anew" in capsys.readouterr().out
        row = loggers.read_rows(out / "result.jsonl")[-1]
        assert row["env_steps"] >= steps and row["episode/length"] > 5
        after = checkpoint.read(checkpoint.locate(out), "learner")
        assert jax.tree.structure(before) == jax.tree.structure(after)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "backend"),
    [("ppo", "gymnasium"), *(pytest.param(a, "jax", marks=pytest.mark.slow) for a in ("ppo", "appo", "dqn"))],
)
def test_a_run_goes_on_with_another_number_of_environments(algo, backend, tmp_path, capsys):
    """Their learner goes on, they begin anew; a replay, which has a column for each, has to be left out."""
    out, more = tmp_path / "a", [f"--set=env.backend={backend}"]
    more += ["--set=algo.circular_buffer_num_batches=2"] if algo == "appo" else []
    assert run(algo, *more, "--stop=env_steps=200", out=out) == 0
    for i, envs in enumerate((8, 2)):
        again = [*more, f"--set=env.num_envs={envs}", f"--stop=env_steps={500 + 300 * i}", "--resume=auto"]
        capsys.readouterr()
        if algo == "dqn":
            again.append("--set=checkpoint.replay=none")
        before = checkpoint.read(checkpoint.locate(out), "learner")["updates"]
        assert run(algo, *again, out=out) == 0
        assert f"-> {envs}: the environments and their statistics start anew" in capsys.readouterr().out
        assert checkpoint.read(checkpoint.locate(out), "learner")["updates"] > before
        row = loggers.read_rows(out / "result.jsonl")[-1]
        assert row["env_steps"] >= 500 + 300 * i and row["episode/length"] > 5


@pytest.mark.slow
def test_a_run_goes_on_with_environments_in_another_place(tmp_path, capsys):
    """In the program that learns, beside it, and there again: what is kept of them is another kind of thing."""
    out, ways = tmp_path / "a", ("sync", "async", "sync")
    for i, mode in enumerate(ways):
        args = [
            "--set=replay.prioritized=false",
            f"--set=rollout.mode={mode}",
            f"--stop=env_steps={300 * (i + 1)}",
            *["--resume=auto"][: i > 0],
        ]
        assert run("dqn", *args, out=out) == 0, capsys.readouterr().err
    rows = loggers.read_rows(out / "result.jsonl")
    assert rows[-1]["env_steps"] >= 900 and rows[-1]["replay/size"] == 396  # of 400 slots 4 are heads: none was lost
    windows = [row["episode/window"] for row in rows]
    assert windows == sorted(windows) and windows[-1] > 15  # the latest episodes of all three
    assert run("dqn", "--set=env.num_envs=8", "--stop=env_steps=1200", "--resume=auto", out=out) == 2
    told = capsys.readouterr().err
    assert "env.num_envs: expected 4, got 8: the replay of" in told and told.count("\n") == 1


def rollout(start, num_envs):
    """One step of `num_envs` environments, in which every number tells of its time and column."""
    rows = jnp.arange(num_envs, dtype=jnp.float32)[None] + 100 * start
    no = jnp.zeros(rows.shape, bool)
    last = rows[0, :, None] + 100
    actions = jnp.zeros(rows.shape, jnp.int32)
    count = jnp.arange(num_envs, dtype=jnp.int32) % (start + 1) % 2  # of those that have a clock of their own
    return Rollout(rows[..., None], last, actions, rows, no, no, ~no, jnp.ones(num_envs, bool), {}, (), count)


def part_of(rollout, columns):
    by_column = {name: getattr(rollout, name)[columns] for name in ("last_obs", "contiguous", "count")}
    rows = {n: getattr(rollout, n)[:, columns] for n in ("obs", "action", "reward", "terminated", "truncated", "mask")}
    return rollout.replace(**rows, **by_column)


def filled(make, devices, num_envs=8, steps=7, slots=5, in_step=True):
    """The states of a replay over so many devices, one behind the other; the columns in order."""
    per_device = num_envs // devices
    options = {"in_step": in_step} | ({"alpha": 1.0, "beta": 0.4} if make is prioritized.make else {})
    args = (jax.ShapeDtypeStruct((1,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))
    buffer = make(*args, capacity=slots * per_device, num_envs=per_device, batch_size=4, gamma=0.9, **options)
    states, add = [], jax.jit(buffer.add)
    for d in range(devices):
        mine, state = slice(d * per_device, (d + 1) * per_device), buffer.init()
        for t in range(steps):
            state = add(state, part_of(rollout(t, num_envs), mine))
        if buffer.set_priority is not None:
            index = jnp.arange(slots * per_device)
            column = index % per_device + d * per_device
            state = buffer.set_priority(state, index, (column + 1.0) * (index // per_device + 1))
        states.append(jax.device_get(state))
    join = lambda *xs: np.stack(xs) if np.ndim(xs[0]) == 0 else np.concatenate(xs)
    return jax.tree.map(join, *states)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "in_step"), [*itertools.product((ring.make, prioritized.make), (True, False))])
@pytest.mark.parametrize("devices", [(4, 2), (4, 1), (2, 4)])
def test_a_replay_is_dealt_out_anew(make, in_step, devices):
    old, new = devices
    found, expected = regroup(filled(make, old, in_step=in_step), old, new), filled(make, new, in_step=in_step)
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        if jax.tree_util.keystr(path).endswith(("highest", ".steps")):
            assert (a >= b).all()  # the most that any device has seen
        else:
            np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
    if make is prioritized.make:
        tree = jnp.asarray(found.priorities.tree.reshape(new, -1)[0])
        leaves = tree[tree.size // 2 :]
        np.testing.assert_allclose(sum_tree.total(tree), leaves.sum(), rtol=1e-6)


def test_a_replay_of_an_earlier_version_goes_on():
    """It counted no rows that are not void, and had one head for all columns."""
    state = filled(ring.make, 2, steps=3)
    saved = {**vars(state), "stale": np.zeros(2, np.int32)}
    assert saved.pop("live").tolist() == [12, 12]
    assert jax.tree.all(jax.tree.map(np.array_equal, convert(saved, state, 2), vars(state)))
    own = convert({"rows": saved, "other": np.zeros(3)}, filled(ring.make, 2, steps=3, in_step=False), 2)["rows"]
    assert own["head"].tolist() == own["length"].tolist() == [[3] * 4] * 2


# ---------------------------------------------------------------- from other weights


STILL = ("--set=algo.normalize_obs=true", "--set=algo.lr=0")  # weights that stay as the seed made them


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    assert run("ppo", *STILL, "--stop=env_steps=200", out=out / "a") == 0
    return out / "a"


def test_init_from_takes_weights_and_statistics_and_nothing_else(trained, tmp_path, capsys):
    out = tmp_path / "b"
    assert run("ppo", f"--init-from={trained}", *STILL, "--set=run.seed=5", "--stop=env_steps=100", out=out) == 0
    text = capsys.readouterr().out
    assert "init-from: 12 of 12 arrays from" in text and "not taken" not in text
    before, after = (checkpoint.read(checkpoint.locate(d), "learner") for d in (trained, out))
    jax.tree.map(np.testing.assert_array_equal, before["params"], after["params"])
    assert after["env_steps"] < before["env_steps"]
    assert before["obs_stats"]["count"] < after["obs_stats"]["count"]


def test_init_from_lists_what_does_not_fit(trained):
    spec = EnvSpec(Box((6,)), Discrete(3), 4)  # of Acrobot
    fresh = jax.eval_shape(ppo.make(ppo.Config(), spec, NetworkConfig(hidden=(8,))).init, jax.random.key(0))
    _, lines = resume.transfer_weights(
        checkpoint.locate(trained), jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), fresh)
    )
    text = "\n".join(lines)
    assert "not taken: params.policy_torso.Dense_0.kernel ([6, 8] here, [4, 8] there)" in text
    assert "not taken: params.policy_head.kernel ([8, 3] here, [8, 2] there)" in text
    assert "not used: obs_stats." in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--init-from=nowhere"], "does not exist"),
        (["--set=network.hidden=[16,16,16]", "--env=Acrobot-v1"], "holds no weights that fit"),
        (["--resume=auto"], "give one of them"),
    ],
)
def test_init_from_with_nothing_to_take(args, message, trained, tmp_path, capsys):
    args = args if args[0].startswith("--init-from") else [f"--init-from={trained}", *args]
    assert run("ppo", *args, "--stop=env_steps=100", out=tmp_path / "b") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "b" / "config.yaml").exists()  # corrected, the same directory will do


def test_weights_leave_the_rest_as_it_is(trained):
    fresh = {"params": {"policy_torso": {"Dense_0": {"kernel": np.zeros((4, 8), np.float32)}}}, "opt_state": np.ones(3)}
    state, lines = resume.transfer_weights(checkpoint.locate(trained), fresh)
    assert (state["params"]["policy_torso"]["Dense_0"]["kernel"] != 0).any()
    np.testing.assert_array_equal(state["opt_state"], np.ones(3))
    assert lines[0].startswith("1 of 1 arrays from")


# ---------------------------------------------------------------- after a kill


@pytest.mark.slow
def test_a_killed_and_resumed_run_is_the_same_to_the_last_bit(tmp_path):
    settings = [s.removeprefix("--set=") for s in SMALL + REPLAY]
    cfg = config.load(None, settings, algo="dqn", env="CartPole-v1", stop=["env_steps=8000"])
    (tmp_path / "c.yaml").write_text(config.to_yaml(cfg))
    command = [sys.executable, str(SCRIPT), str(tmp_path / "c.yaml"), "--kills=2"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.stdout, done.stderr[-3000:]
    verdict = json.loads(done.stdout)
    assert (done.returncode, verdict["guarantee"], verdict["differences"]) == (0, "bitwise", [])
    assert [kill["in_save"] for kill in verdict["kills"]] == [False, True, False]
    assert [kill["signal"] for kill in verdict["kills"]] == ["SIGKILL", "SIGKILL", "SIGTERM"]


ON_IN_JAX = [
    pytest.param(algo, "jax", "bitwise", marks=[] if algo == "dqn" else [pytest.mark.slow])
    for algo in algos.names()
    # no environment teaches these; tests/algos/test_distill.py resumes the other
    if learns_from(algos.get_config_class(algo)) is not DataSets and not algos.get_config_class(algo).has_teacher
]


@pytest.mark.parametrize(
    ("algo", "backend", "guarantee"),
    [
        *ON_IN_JAX,
        pytest.param("ppo", "envpool", "restarted", marks=pytest.mark.slow),
        pytest.param("dqn", "gymnasium", "restarted", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_lost_its_latter_half_becomes_the_same_again(algo, backend, guarantee, tmp_path, monkeypatch):
    """As if killed after its third checkpoint; environments that cannot be stored start anew at each."""
    lose_latter_half(algo, [f"--set=env.backend={backend}"], guarantee, tmp_path, monkeypatch)


ROBOTICS = [
    "--env=Pendulum-v1", "--set=env.randomize={mass: [0.5, 2.0]}", "--set=env.observe_task=true",
    "--set=env.observation_noise={obs: 0.1}", "--set=env.action_delay=[0, 3]", "--set=env.frame_stack=2",
    "--set=env.options.max_episode_steps=20", "--set=network.value_inputs=[task]",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "core"), [("ppo", ["--set=network.core={name: gru, size: 8}"]), ("sac", [])])
def test_random_options_of_environments_resume_exactly(algo, core, tmp_path, monkeypatch):
    """Tasks and waiting actions are part of a checkpoint; the policy acts without the task."""
    out = lose_latter_half(algo, [*ROBOTICS, *core], "bitwise", tmp_path, monkeypatch)
    states = checkpoint.read(checkpoint.locate(out), "source")
    names = {"/".join(str(key) for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(states)}
    assert any("waiting" in name for name in names) and any("mass" in name for name in names)
    acting = load(out)
    assert acting.act({"obs": np.zeros(3, np.float32)}).shape == (1,)


@pytest.mark.slow
def test_hindsight_resumes_exactly(tmp_path, monkeypatch):
    """The steps of episodes are part of the stored replay."""
    settings = ["--env=BitFlip-v0", "--set=env.options={bits: 6}", "--set=replay.hindsight={strategy: episode}"]
    lose_latter_half("dqn", settings, "bitwise", tmp_path, monkeypatch)


def lose_latter_half(algo, more, guarantee, tmp_path, monkeypatch):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    exact = [*more, "--set=checkpoint.exact=true", "--set=checkpoint.every=200"]
    exact += ["--set=evaluation.every=300", "--set=evaluation.duration=2", "--set=run.report_every=100"]
    exact += ["--set=checkpoint.keep_last=20", "--stop=env_steps=1000"]
    assert run(algo, *exact, out=whole) == 0
    shutil.copytree(whole, halves)
    kept = sorted((halves / "checkpoints").iterdir(), key=lambda p: int(p.name))
    assert len(kept) > 4
    for later in kept[2:]:
        shutil.rmtree(later)
    assert checkpoint.read_meta(kept[1])["guarantee"] == guarantee
    assert run(algo, *exact, "--resume=auto", out=halves) == 0
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import prove_resume

    assert prove_resume.differences(whole, halves) == []
    # and the comparison can fail
    (halves / "result.jsonl").write_text(
        (halves / "result.jsonl").read_text().replace('"iteration": ', '"iteration": 1')
    )
    assert prove_resume.differences(whole, halves)
    return halves


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "guarantee", "words"),
    [
        ([], "learner", "with other seeds"),
        (["--set=checkpoint.exact=true", "--set=checkpoint.every=50"], "restarted", "interrupted or not"),
    ],
)
def test_the_guarantee_is_told_and_stored(more, guarantee, words, tmp_path, capsys):
    """With environments outside of the program, `-v` prints the guarantee, and the checkpoint stores it."""
    settings = ["--set=env.backend=gymnasium", *more, "-v", "--stop=env_steps=100"]
    assert run("ppo", *settings, out=tmp_path / "a") == 0
    said = capsys.readouterr().out
    assert words in said and " collects" in said
    assert checkpoint.read_meta(checkpoint.locate(tmp_path / "a"))["guarantee"] == guarantee
