"""SPO: what particles find where the answer is known, and the losses by hand."""

import dataclasses
import functools
import json
from pathlib import Path

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from cases import some_quick
from scipy import special

from jrl import config, train
from jrl.algos import spo
from jrl.errors import InputError
from jrl.run import build, preflight
from jrl.types import Box, Discrete, EnvSpec, JaxEnv, StepResult

KEY = jax.random.key(5)
ROOT = Path(__file__).parents[2]
CFG = spo.Config(num_particles=4, num_epochs=1, num_minibatches=1, sample_kl=0.2, mean_kl=0.01, std_kl=0.002)


# ---------------------------------------------------------------- the search


def corridor(rewards, num_envs=2, stops=None):
    """Environments whose first action chooses a lane: `rewards[lane, t]` is earned on step t, whatever comes later.

    The observation is the time alone, so that no network knows the lane. A lane ends before step `stops[lane]`.
    """
    rewards = jnp.asarray(rewards, jnp.float32)
    stops = jnp.full((len(rewards),), 99) if stops is None else jnp.asarray(stops)

    def step(state, action, key):
        lane, time = state
        lane = jnp.where(time == 0, action, lane)
        reward = rewards[lane, jnp.minimum(time, rewards.shape[1] - 1)]
        terminated = time + 1 == stops[lane]
        result = StepResult(observe(time + 1), reward, terminated, jnp.zeros_like(terminated))
        return (lane, time + 1), result

    observe = lambda time: time.astype(jnp.float32)[:, None]
    start = (jnp.zeros(num_envs, jnp.int32), jnp.zeros(num_envs, jnp.int32))
    spec = EnvSpec(Box((1,)), Discrete(len(rewards)), num_envs)
    return JaxEnv(spec, lambda key: (start, observe(start[1])), step)


def find(env, temperature, value=lambda time: jnp.zeros_like(time), key=KEY, **options):
    """Search of a uniform policy, with values by the time."""
    cfg = dataclasses.replace(CFG, **options)
    env_state, obs = env.reset(key)
    logits = jnp.zeros(env.spec.action.n)
    look = lambda obs: (
        spo.distributions.Categorical(jnp.broadcast_to(logits, (*obs.shape[:-1], *logits.shape))),
        value(obs[..., 0]),
    )
    return jax.device_get(jax.jit(lambda: spo.find(cfg, env, look, temperature, env_state, obs, key))())


def test_weights_of_a_search_by_hand():
    """Lane 0 earns 1, 0, 2; lane 1 earns 0, 0, 1. V is 0, 3, 5, 7 after 0 to 3 steps, gamma 0.5."""
    value = lambda time: jnp.array([0.0, 3.0, 5.0, 7.0])[time.astype(jnp.int32)]
    found = find(
        corridor([[1, 0, 2], [0, 0, 1]]),
        0.7,
        value,
        num_particles=6,
        search_depth=3,
        resample_every=3,
        gamma=0.5,
    )
    # sum of reward + 0.5 V' - V: (1 + 1.5 - 0) + (0 + 2.5 - 3) + (2 + 3.5 - 5), and lane 1 earns 1 + 1 less
    by_lane = np.array([2.5 - 0.5 + 0.5, 0.5])
    assert set(found.actions.ravel().tolist()) == {0, 1}
    np.testing.assert_allclose(found.advantage, by_lane[found.actions], rtol=1e-5)
    np.testing.assert_allclose(found.share, special.softmax(by_lane[found.actions] / 0.7, 0), rtol=1e-5)


def test_nothing_counts_after_an_end():
    """Lane 1 ends with its second step: V counts no more there, and rewards of the next episode are not its own."""
    env = corridor([[1, 1, 1, 1], [2, 0, 50, 50]], stops=[99, 2])
    found = find(env, 1.0, lambda time: 10.0 + 0 * time, num_particles=8, search_depth=4, gamma=1.0)
    np.testing.assert_allclose(found.advantage, np.array([4.0, 2.0 - 10.0])[found.actions], rtol=1e-5)


def test_look_ahead_finds_the_better_action():
    """The first step pays for lane 0, the third one more for lane 1; neither network nor first reward shows it."""
    env = corridor([[1, 0, 0], [0, 0, 3]], num_envs=4)
    share_of_1 = lambda found: (found.share * (found.actions == 1)).sum(0)
    short = find(env, 0.2, num_particles=16, search_depth=1)
    deep = find(env, 0.2, num_particles=16, search_depth=3)
    assert (share_of_1(short) < 0.1).all() and (share_of_1(deep) > 0.9).all()
    chosen = lambda found: found.actions[spo.best(found), np.arange(4)].tolist()
    assert chosen(short) == [0] * 4 and chosen(deep) == [1] * 4


def test_resampling_keeps_shares_and_resets_the_sums():
    """A first step that pays decides the draw; without later rewards all survivors have equal weights."""
    env = corridor([[5, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], num_envs=3)
    found = find(env, 0.1, num_particles=16, search_depth=4, resample_every=1)
    assert (found.share[found.actions != 0] == 0).all()
    np.testing.assert_allclose(found.share.sum(0), 1.0, rtol=1e-6)
    np.testing.assert_allclose(found.share * 16, np.round(found.share * 16), atol=1e-5)  # counts of descendants
    np.testing.assert_allclose(found.advantage, np.array([5.0, 0, 0])[found.actions])  # the first step alone
    # the sums of a draw begin anew: both lanes 0 and 1 survive it here, and only the last step tells them apart
    late = find(corridor([[0, 0, 0, 1], [0, 0, 0, 0]]), 0.1, num_particles=16, search_depth=4, resample_every=2)
    assert (late.share[late.actions == 1] < 1e-3).all() and (late.advantage == 0).all()


def test_descendants_of_a_draw_act_on_their_own_state():
    """Lane 0 or 1 is kept by every later step: a descendant with another particle's lane would earn its rewards."""
    env = corridor([[4, 4, 4, 4], [0, 0, 0, 0]], num_envs=2)
    found = find(env, 10.0, num_particles=8, search_depth=4, resample_every=2)
    weight = (found.share * (found.actions == 0)).sum(0)
    # counts k of lane 0 after the draw, then weights e^(8/10) against 1
    k = np.round(8 * weight / (weight + (1 - weight) * np.exp(0.8)))
    np.testing.assert_allclose(weight, k * np.exp(0.8) / (k * np.exp(0.8) + 8 - k), rtol=1e-4)


def test_acting_draws_from_the_shares_and_is_greedy_without_exploration():
    env = corridor([[1, 0, 0], [0, 0, 3]], num_envs=64)
    algo = spo.make(dataclasses.replace(CFG, search_depth=3, num_particles=8, temperature=2.0), env.spec, fakes.NETWORK)
    state = algo.init(KEY)
    env_state, obs = env.reset(KEY)
    act = jax.jit(algo.act_in(env), static_argnums=4)
    acted = lambda explore: jax.device_get(act(algo.actor(state), obs, (), KEY, explore, env_state))
    drawn, greedy = acted(True), acted(False)
    share, actions = drawn.extras["search_share"], drawn.extras["search_actions"]
    assert share.shape == actions.shape == (64, 8)
    better = (share * (actions == 1)).sum(-1)
    assert abs(drawn.action.mean() - better.mean()) < 0.15 and 0.5 < better.mean() < 0.95
    np.testing.assert_array_equal(greedy.action, better > 0.5)
    # a lower temperature, which learning moves, makes the shares of the same particles steeper
    cold = state.replace(own={**state.own, "dual": {**state.own["dual"], "temperature": jnp.log(0.1)}})
    cold = jax.device_get(act(algo.actor(cold), obs, (), KEY, True, env_state))
    assert cold.extras["search_share"].max(-1).mean() > share.max(-1).mean() + 0.1


# ---------------------------------------------------------------- learning


@functools.cache
def setting(action):
    spec = EnvSpec(fakes.VECTOR, action, 8)
    algo = spo.make(CFG, spec, fakes.NETWORK)
    state = fakes.perturbed(fakes.made_up_state(algo), 0.1)
    rollout = fakes.rollout(algo, spec, algo.actor(state))
    share, advantage = (np.random.default_rng(i).normal(size=(*rollout.reward.shape, 4)) for i in range(2))
    extras = {"search_share": special.softmax(share, -1), "search_advantage": advantage}
    extras = rollout.extras | jax.tree.map(jnp.float32, extras)
    return algo.update.args[1], state, rollout.replace(extras=extras), jax.jit(algo.update)


@pytest.mark.parametrize("action", some_quick([Box((2,)), Discrete(3)], Discrete(3)), ids=str)
def test_the_loss(action):
    agent, state, rollout, _ = setting(action)
    rows = spo.targets(CFG, agent, state, rollout)[0]
    params = fakes.perturbed(state, 0.2).params  # away from the policy before the update
    dual = {name: jnp.log(x) for name, x in {"temperature": 0.5, "mean": 1.5, "std": 2.5}.items()}
    run = jax.jit(jax.value_and_grad(lambda dual: spo.loss(CFG, agent, params, dual, rows), has_aux=True))
    (total, metrics), slope = jax.device_get(run(dual))
    dist, value = agent.net.apply(params, rows.obs)
    old, weight, share = rows.dist, np.asarray(rows.weight, np.float64), np.asarray(rows.share, np.float64)
    as64 = lambda x: np.broadcast_to(np.asarray(x, np.float64), np.shape(old.mean))
    if isinstance(action, Discrete):
        log_p, before = (special.log_softmax(np.asarray(d.logits, np.float64), -1) for d in (dist, old))
        log_prob = np.take_along_axis(log_p, np.asarray(rows.action), -1)
        kls = {"mean": (np.exp(before) * (before - log_p)).sum(-1)}
    else:
        density = lambda mean, log_std: (
            -0.5 * ((np.asarray(rows.action) - mean[:, None]) / np.exp(log_std[:, None])) ** 2
            - log_std[:, None] - 0.5 * np.log(2 * np.pi)
        ).sum(-1)  # fmt: skip
        mean, log_std, old_mean, old_std = map(as64, (dist.mean, dist.log_std, old.mean, old.log_std))
        log_prob = density(mean, old_std) + density(old_mean, log_std)
        ratio = np.exp(2 * (old_std - log_std))
        kls = {"mean": (0.5 * ((mean - old_mean) / np.exp(old_std)) ** 2).sum(-1)}
        kls["std"] = (log_std - old_std + 0.5 * ratio - 0.5).sum(-1)
    average = lambda x: (weight * x).mean()
    fit = -average((share * log_prob).sum(-1))
    scores = np.asarray(rows.advantage, np.float64) / 0.5
    want = 0.5 * (0.2 + average(special.logsumexp(scores, -1) - np.log(4)))
    np.testing.assert_allclose(metrics["loss/policy"], fit, rtol=1e-4)
    want += fit + 0.5 * average(0.5 * (np.asarray(value) - np.asarray(rows.target)) ** 2)
    psi = special.softmax(scores, -1)
    kl = average((psi * np.log(4 * psi)).sum(-1))
    np.testing.assert_allclose(metrics["policy/sample_kl"], kl, rtol=1e-3)
    # the slope by the logarithm of eta: eta shrinks while the KL of the weights is below its bound
    np.testing.assert_allclose(slope["temperature"], 0.5 * (0.2 - kl), rtol=1e-3)
    for name, kl in kls.items():
        alpha, bound = {"mean": (1.5, 0.01), "std": (2.5, 0.002)}[name]
        np.testing.assert_allclose(metrics[f"policy/{name}_kl"], average(kl), rtol=1e-3)
        np.testing.assert_allclose(slope[name], alpha * (bound - average(kl)), rtol=1e-3)
        want += alpha * bound
    np.testing.assert_allclose(total, want, rtol=1e-4)


def test_an_update_makes_the_best_first_action_likelier():
    agent, state, rollout, update = setting(Discrete(3))
    actions = rollout.extras["search_actions"]
    share = (actions == 2) / jnp.maximum((actions == 2).sum(-1, keepdims=True), 1)
    share = jnp.where((actions == 2).any(-1, keepdims=True), share, 0.25)
    after, aux = update(state, rollout.replace(extras={**rollout.extras, "search_share": share}), KEY)
    chance = lambda state: jax.nn.softmax(agent.net.apply(state.params, rollout.obs)[0].logits)[..., 2]
    assert chance(after).mean() > chance(state).mean()
    np.testing.assert_allclose(aux.metrics["policy/mean_kl"], 0.0, atol=1e-6)  # its one step begins at the old policy
    assert after.own["dual"]["mean"] < state.own["dual"]["mean"]


# ---------------------------------------------------------------- runs

SMALL = {
    "env": {"id": "CartPole-v1", "num_envs": 4, "backend": "jax"},
    "algo": {"name": "spo", "num_particles": 3, "search_depth": 2, "num_epochs": 1, "num_minibatches": 2},
    "network": {"hidden": [8]},
    "rollout": {"length": 8, "iterations_per_call": 1},
    "run": {"compile_cache": False, "log": ["jsonl"]},
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"env": {"backend": "gymnasium"}},
            r"algo.name spo: expected environments written in JAX, which its search steps, got CartPole-v1 of "
            r"gymnasium: set env.backend=jax",
        ),
        ({"env": {"id": "SimpleSpread-v0"}}, r"algo.name spo: expected one agent, .*, got 3 agents: use ppo"),
        ({"algo": {"normalize_reward": True}}, r"normalize_reward: expected false, because the search adds rewards"),
        ({"network": {"core": {"name": "lstm"}}}, r"network.core.name: expected none for spo, whose search has no"),
    ],
)
def test_runs_that_cannot_be_searched(changed, message):
    with pytest.raises(InputError, match=message):
        build.run(preflight.check(config.from_dict(config.merge(SMALL, changed))))


@pytest.mark.slow
def test_a_run_and_its_evaluation(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(SMALL))
    sets = ["--set", "stop.env_steps=64", "--set", "evaluation.every=32", "--set", "evaluation.duration=4"]
    train.main([str(tmp_path / "config.yaml"), "--out", str(tmp_path / "run"), *sets])
    rows = (tmp_path / "run" / "result.jsonl").read_text().splitlines()
    assert any('"evaluation/return"' in row for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "goal"), [("spo", 475), ("spo_pendulum", -200)])
def test_the_configs_learn(name, goal, tmp_path):
    """The configs' comments have the measured numbers; a run ends where its evaluation reaches the goal."""
    train.main([str(ROOT / "configs" / f"{name}.yaml"), "--out", str(tmp_path / "run")])
    rows = map(json.loads, (tmp_path / "run" / "result.jsonl").read_text().splitlines())
    assert max(row.get("evaluation/return") or -1e9 for row in rows) >= goal
