"""Environments in JAX that are not finite: a plain record of counters, one of which breaks at its third step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import __main__, config, envs
from jrl.envs.jax_env import Definition
from jrl.learn import parallel
from jrl.run import build, build_collect
from jrl.run.session import Session
from jrl.run.store import checkpoint
from jrl.types import Box, Discrete, InputError

LIMIT, BREAKS = 5, 3


def leaky(where: str = "state", every: bool = False) -> Definition:
    """Shows its steps since the reset, and pays 1. Column 0 (or each one) breaks at step 3, and ends there, too.

    NaN is in the state and thereby in everything, in the reward alone or in the observation alone.
    """

    def step(state, action, draws):
        state = {**state, "count": state["count"] + 1}
        broken = (state["count"] == BREAKS) & ((state["column"] == 0) | every)
        nan = lambda name, x: jnp.where(broken & (where == name), jnp.nan, x)
        state |= {"hidden": nan("state", 0.0), "shown": nan("obs", 0.0)}
        return state, nan("reward", state["hidden"] + 1), broken

    def reset(draws):
        count = jnp.zeros_like(draws[0])
        return {"count": count, "column": jnp.arange(len(count)), "hidden": count, "shown": count}

    observe = lambda state: (state["count"] + state["hidden"] + state["shown"])[:, None]
    return Definition(Box((1,)), Discrete(2), LIMIT, 1, reset, step, observe)


def lost() -> Definition:
    """Is never finite."""
    state = lambda draws: jnp.full_like(draws[0], jnp.nan)
    step = lambda state, action, draws: (state, draws[0], draws[0] < 0)
    return Definition(Box((1,)), Discrete(2), LIMIT, 1, state, step, lambda state: state[:, None])


def load(where, *overrides, algo="ppo", every=False):
    env = {"id": "test_nonfinite:leaky", "options": {"where": where, "every": every}, "num_envs": 2}
    replay = ["replay.learning_starts=4", "replay.capacity=100", "replay.batch_size=8"]
    small = ["rollout.length=8", "network.hidden=[8]", "stop.env_steps=64"]
    small += replay if algo == "dqn" else ["algo.num_minibatches=1"]
    return config.load({"algo": {"name": algo}, "env": env}, [*small, "env.on_nonfinite=reset", *overrides])


def collect(cfg, rollouts=1):
    source, actor = build_collect.collector(cfg)
    for i in range(rollouts):
        rollout, report = source.next(actor, jax.random.key(i))
    source.close()
    return jax.tree.map(np.asarray, rollout), report


@pytest.mark.parametrize("where", ["state", "reward", "obs"])
def test_a_step_that_is_not_finite_is_masked_and_begins_an_episode(where):
    rollout, report = collect(load(where, "env.frame_stack=2", "network.use_prev_reward=true", "network.core.name=gru"))
    now, before = rollout.obs["obs"][..., 1, 0], rollout.obs["obs"][..., 0, 0]
    assert now[:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1] and now[:, 1].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert before[:, 0].tolist() == [0, 0, 1, 0, 0, 1, 0, 0]  # the stack, too, begins with the episode
    assert rollout.mask[:, 0].tolist() == [True, True, False, True, True, False, True, True]
    assert rollout.reward[:, 0].tolist() == [1, 1, 0] * 2 + [1, 1]
    assert rollout.obs["prev_reward"][:, 0].tolist() == [0, 1, 1, 0, 1, 1, 0, 1]
    assert not rollout.terminated.any()
    assert rollout.truncated[:, 0].tolist() == [False, True, False] * 2 + [False, False]  # the learner bootstraps
    assert rollout.truncated[:, 1].tolist() == [False] * 4 + [True] + [False] * 3
    # statistics: one episode of the other environment; the broken ones are none
    assert (int(report.count), float(report.return_sum), int(report.steps)) == (1, 5.0, 6 + 7)
    assert int(report.nonfinite) == 2
    chosen = np.exp(rollout.extras["log_prob"][:, 0])
    first = np.where(rollout.action[:, 0] == 0, chosen, 1 - chosen)  # the policy's probability of action 0
    np.testing.assert_allclose(first[[0, 1, 2]], first[[3, 4, 5]], rtol=1e-5)  # the memory, too, begins
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(rollout) if x.dtype.kind == "f")


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_nothing_that_is_not_finite_is_learned_from(algo):
    """One step of the learner on rollouts of which each column breaks: its State is finite, and so are its losses."""
    more = ["algo.normalize_obs=true", "algo.normalize_reward=true"] if algo == "ppo" else []
    cfg = load("state", *more, algo=algo, every=True)
    rollout, _ = collect(cfg, rollouts=2)
    learner = build.run(cfg).learn
    once = lambda key: learner.step(learner.init(key), learner.init_replay(), rollout, key)
    learned = jax.device_get(jax.jit(jax.vmap(once, axis_name=parallel.AXIS))(jax.random.key(0)[None]))
    numbers = [x for x in jax.tree.leaves(learned) if x.dtype.kind == "f"]
    assert numbers and all(np.isfinite(x).all() for x in numbers)
    assert learned[2].get("train/not_finite", 0) == 0


def test_repetitions_and_soft_horizons():
    """The check is outside of all: the second action of two steps breaks at its first, and all of it is masked."""
    rollout, report = collect(load("reward", "env.action_repeat=2", "env.horizon=4", "env.soft_horizon=true"))
    assert rollout.obs[:, 0, 0].tolist() == [0, 2] * 4 and rollout.mask[:, 0].tolist() == [True, False] * 4
    assert rollout.obs[:, 1, 0].tolist() == [0, 2, 4, 4, 5, 0, 2, 4] and int(report.nonfinite) == 4


def test_a_first_observation_that_is_not_finite_is_zero():
    env = envs.make("test_nonfinite:lost", num_envs=2, on_nonfinite="reset", backend="jax")
    state, obs = jax.jit(env.reset)(jax.random.key(0))
    state, result = jax.jit(env.step)(state, np.zeros(2, np.int32), jax.random.key(1))
    assert not obs.any() and not result.obs.any() and result.failed.all()


@pytest.mark.slow
def test_rows_count_them_and_the_run_goes_on():
    played = ["evaluation.every=32", "evaluation.num_envs=2", "evaluation.duration=24", "evaluation.unit=timesteps"]
    with Session(load("state", "run.report_every=16", *played)) as session:
        rows = []
        session.sinks.append(lambda row: rows.append(row))
        session.start()
        while info := session.advance():
            session.finish_call(info)
        session.reporter.flush()
    assert sum(row["env/nonfinite"] for row in rows) > 8 and rows[-1]["env_steps"] >= 64
    assert all(np.isfinite(row["loss/policy"]) for row in rows)
    assert rows[-1]["evaluation/return"] == LIMIT  # the return of the environment that does not break


@pytest.mark.slow
@pytest.mark.parametrize(
    ("id", "on_nonfinite", "message"),
    [
        (
            "leaky",
            "stop",
            "not finite after 2 steps up to step 13; env.on_nonfinite=reset begins a new episode",
        ),
        ("lost", "reset", "not finite after each step of 10 calls in a row"),
    ],
)
def test_the_run_ends_with_an_error(id, on_nonfinite, message, tmp_path, capsys):
    words = ["--algo", "ppo", "--env", f"test_nonfinite:{id}", "--stop", "env_steps=64", "--out", str(tmp_path / "run")]
    sets = [f"env.on_nonfinite={on_nonfinite}", "env.num_envs=2", "rollout.length=8", "network.hidden=[8]"]
    sets += ["rollout.iterations_per_call=1", "run.report_every=8"]
    assert __main__.main(["train", *words, *(x for text in sets for x in ("--set", text))]) == 1
    error = capsys.readouterr().err
    assert f"error: env.id test_nonfinite:{id}: state, observation or reward are {message}" in error, error
    assert checkpoint.locate(tmp_path / "run").is_dir()


@pytest.mark.parametrize(
    ("id", "message"),
    [
        ("Pong-v5", "env.on_nonfinite: only environments in JAX are checked, and Pong-v5 is stepped by the envpool"),
        ("TwoStepGame-v0", "env.on_nonfinite: TwoStepGame-v0 has several agents, .* leave it out"),
    ],
)
def test_what_cannot_be_checked_is_refused(id, message):
    with pytest.raises(InputError, match=message):
        envs.make(id, num_envs=2, on_nonfinite="reset")
