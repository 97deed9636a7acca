"""Intrinsic rewards next to a plain numpy record of the networks, statistics, returns and value heads."""

import dataclasses
import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import assert_same, differ

from jrl import config
from jrl.algos import a2c, actor_critic, curiosity, ppo
from jrl.algos import agent as agents
from jrl.algos.curiosity import Icm, Rnd
from jrl.fields.hyper import Gru
from jrl.networks import NetworkConfig
from jrl.types import Box, Dict, Discrete, EnvSpec, MultiBinary

KEY = jax.random.key(3)
SMALL = {"hidden": (8,), "features": 4, "lr": 1e-2, "share": 0.5, "num_minibatches": 2}
EVERY_ROW = {**SMALL, "share": 1.0, "num_minibatches": 1}


class Made:
    """PPO or A2C with curiosity, a state away from its start, and consecutive rollouts."""

    def __init__(self, options, module=ppo, network=fakes.NETWORK, observation=fakes.VECTOR, action=None, **more):
        self.cfg = module.Config(curiosity=options, max_grad_norm=None, gae_lambda=0.9, **more)
        self.spec = EnvSpec(observation, action or Discrete(3), fakes.COLUMNS)
        self.algo = module.make(self.cfg, self.spec, network)
        self.agent = actor_critic.make_agent(self.cfg, self.spec, network)
        self.state = fakes.perturbed(fakes.made_up_state(self.algo))
        self.rollouts = fakes.rollouts(self.algo, self.spec, self.algo.actor(self.state))
        self.update = jax.jit(self.algo.update)


def dense(params, x):
    """A network of `networks.build` with relu in numpy."""
    for name in sorted(params["out_torso"]):
        layer = params["out_torso"][name]
        x = np.maximum(x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"]), 0.0)
    return x @ np.asarray(params["out_head"]["kernel"]) + np.asarray(params["out_head"]["bias"])


class Record:
    """A record in float64: the observations and running sums of all rollouts so far."""

    def __init__(self, options):
        self.options, self.seen, self.sums, self.mean = options, np.zeros((0, 4)), np.zeros(0), 0.0

    def of(self, own, rollout):
        """Scaled rewards [T, B] of a rollout for the networks of `own`, and their unscaled mean loss."""
        mask, obs = np.asarray(rollout.mask), np.asarray(rollout.obs, np.float64)
        after = np.concatenate([obs[1:], np.asarray(rollout.last_obs)[None]])
        self.seen = np.concatenate([self.seen, after[mask]])
        scale = lambda x: np.clip((x - self.seen.mean(0)) / self.seen.std(0), -10, 10)
        reward, loss = (np.where(mask, x, 0.0) for x in self.errors(own, scale(obs), rollout, scale(after)))
        x, sums = np.full(mask.shape[1], self.mean), np.zeros(mask.shape)
        for t in range(len(mask)):
            x = np.where(mask[t], self.options.gamma * x + reward[t], x)
            sums[t] = x
        self.sums, self.mean = np.concatenate([self.sums, sums[mask]]), x.mean()
        return reward / self.sums.std(), loss[mask].mean()

    def errors(self, own, obs, rollout, after):
        if isinstance(self.options, Icm):
            before, after = (dense(own.params["features"], x) for x in (obs, after))
            action = np.eye(3)[np.asarray(rollout.action)]
            error = 0.5 * ((dense(own.params["forward"], np.concatenate([action, before], -1)) - after) ** 2).sum(-1)
            logits = dense(own.params["inverse"], np.concatenate([before, after], -1))
            inferred = np.log(np.exp(logits).sum(-1)) - (logits * action).sum(-1)
            return error, 0.2 * error + 0.8 * inferred
        error = ((dense(own.params, after) - dense(own.fixed, after)) ** 2).mean(-1)
        return error, error


@functools.cache
def made(kind, module=ppo):
    return Made(kind(**EVERY_ROW), module)


@pytest.mark.parametrize("kind", (Rnd, Icm))
def test_intrinsic_rewards_are_those_of_numpy(kind):
    """The second of two rollouts is scored by the statistics of both, by the predictor that the first one trained."""
    m, state = made(kind), made(kind).state
    record = Record(m.cfg.curiosity)
    explore = jax.jit(functools.partial(curiosity.explore, m.cfg, m.agent))
    for rollout in m.rollouts:
        before = state.own["curiosity"]
        state, reward, metrics = explore(state, rollout, KEY)
        expected, loss = record.of(before, rollout)
        np.testing.assert_allclose(reward, expected, rtol=2e-3, atol=1e-4)
        np.testing.assert_allclose(metrics["curiosity/reward"], expected[np.asarray(rollout.mask)].mean(), rtol=1e-3)
        np.testing.assert_allclose(metrics["loss/curiosity"], loss, rtol=1e-3)
        after = state.own["curiosity"]
        assert differ(before.params, after.params)
        assert_same(before.fixed, after.fixed)
        np.testing.assert_allclose(after.mean_return, record.mean, rtol=1e-3)


def test_two_value_heads_have_the_targets_of_their_rewards():
    """The rewards' targets stop at ends; those of intrinsic rewards do not. The policy learns from the sum."""
    m = made(Rnd)
    rollout, mask = m.rollouts[1], np.asarray(m.rollouts[1].mask)
    _, reward, _ = curiosity.explore(m.cfg, m.agent, m.state, rollout, KEY)
    values = np.asarray(actor_critic.values(m.agent, m.state, rollout)[0])
    assert values.shape == (*np.add(mask.shape, (1, 0)), 2)
    cfg = dataclasses.replace(m.cfg, normalize_advantage=False)
    rows, _, _ = ppo.targets(cfg, m.agent, m.state, rollout, reward)
    terminated, done = np.asarray(rollout.terminated), np.asarray(rollout.terminated | rollout.truncated)
    after, advantages, expected = np.zeros(mask.shape[1]), np.zeros((*mask.shape, 2)), np.zeros(mask.shape[1])
    last = values[-1, :, 1]
    for t in reversed(range(len(mask))):
        following = np.where(terminated[t], 0.0, values[t + 1, :, 0])
        error = np.asarray(rollout.reward)[t] + 0.99 * following - values[t, :, 0]
        after = advantages[t, :, 0] = error + 0.99 * 0.9 * np.where(done[t], 0.0, after)
        error = np.asarray(reward)[t] + 0.99 * last - values[t, :, 1] + 0.99 * 0.9 * expected
        advantages[t, :, 1] = error
        expected, last = np.where(mask[t], error, expected), np.where(mask[t], values[t, :, 1], last)
    np.testing.assert_allclose(rows.target[mask], (advantages + values[:-1])[mask], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(rows.advantage[mask], (advantages @ [1.0, 0.5])[mask], rtol=1e-4, atol=1e-4)
    assert (np.asarray(rows.target)[~mask] == 0).all()
    names = {"clip_eps": 0.2, "ent_coef": 0.0, "kl_coef": 0.0}
    rows = agents.cut(m.agent, rows, ())
    _, value = m.agent.net.apply(m.state.params, rows.obs)
    found = ppo.loss(m.cfg, m.agent, m.state.params, rows, **names)[1]["loss/value"]
    squared = 0.5 * np.square(np.asarray(value) - np.asarray(rows.target)).sum(-1)
    np.testing.assert_allclose(found, (squared * np.asarray(rows.weight)).mean(), rtol=1e-4)
    out = m.algo.outputs(m.state, rollout.obs[0])
    np.testing.assert_allclose(out["value"], m.agent.net.step(m.state.params, rollout.obs[0], ())[1][:, 0])


@pytest.mark.parametrize("module", (ppo, a2c))
def test_the_first_rollouts_only_add_to_the_statistics_of_observations(module):
    m = Made(Rnd(**SMALL, statistics_rollouts=1), module)
    first, _ = m.update(m.state, m.rollouts[0], KEY)
    own, before = first.own["curiosity"], m.state.own["curiosity"]
    assert_same((first.params, first.opt_state), (m.state.params, m.state.opt_state))
    assert_same(dataclasses.replace(own, obs_stats=before.obs_stats), before)
    assert own.obs_stats.count == np.asarray(m.rollouts[0].mask).sum() and first.env_steps > 0 and first.updates == 1
    second, _ = m.update(first, m.rollouts[1], KEY)
    assert differ(second.params, first.params) and differ(second.own["curiosity"].params, own.params)


def test_only_a_share_of_the_steps_trains_the_predictor():
    """One step of eight: the predictor of a rollout whose other rows are different learns the same."""
    m = Made(Rnd(**{**SMALL, "share": 0.1, "num_minibatches": 1}))
    model, own = m.agent.net.curiosity, m.state.own["curiosity"]
    rows = jnp.arange(8.0)[:, None] + jnp.zeros((8, 4)), jnp.ones((8, 4))
    used = []

    def error(params, step):
        jax.debug.callback(lambda x: used.append(np.asarray(x)), step)
        return step, model.error(params, own.fixed, None, None, step[:, None] * jnp.ones((1, 4)))[1]

    curiosity._train(m.cfg, m.agent, m.state, error, rows, KEY)
    jax.effects_barrier()
    assert len(np.unique(np.concatenate(used))) == 1 and used[0].shape == (4,)


IMAGE = Box((9, 9, 3), "uint8", 0, 255)
SPACES = [
    (IMAGE, Box((2,), low=-1.0, high=1.0)),
    (Dict((("camera", IMAGE), ("at", Discrete(4)))), Dict((("a", Discrete(2)), ("b", Box((1,)))))),
    (Dict((("action_mask", MultiBinary((3,))), ("x", Box((3,))))), Discrete(3)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("observation", "action"), SPACES, ids=("image", "dict", "mask"))
def test_images_dictionaries_and_masks_with_memory(observation, action):
    """Each pixel is scaled by its own statistics; the errors of a rollout shrink while it is learned again."""
    network = NetworkConfig(hidden=(8,), core=Gru(size=4), shared=True)
    m = Made(Icm(**EVERY_ROW), network=network, observation=observation, action=action, num_epochs=1)
    state, losses = m.state, []
    for i in range(20):
        state, aux = m.update(state, m.rollouts[1], jax.random.fold_in(KEY, i))
        losses.append(float(aux.metrics["loss/curiosity"]))
    assert np.isfinite(jax.flatten_util.ravel_pytree(state.params)[0]).all() and losses[-1] < 0.9 * losses[0]
    stats, image = state.own["curiosity"].obs_stats, lambda obs: obs["camera"] if isinstance(obs, dict) else obs
    if "action_mask" not in str(observation):
        rollout, counts = m.rollouts[1], np.asarray(m.rollouts[1].mask)
        after = np.concatenate([image(rollout.obs)[1:], image(rollout.last_obs)[None]])[counts]
        mean = stats.mean["camera"] if isinstance(stats.mean, dict) else stats.mean
        np.testing.assert_allclose(mean, after.mean(0), rtol=1e-4, atol=1e-3)


def test_a_config_has_the_section():
    given = ["algo.curiosity={name: icm, forward_share: 0.5}", "algo.curiosity.coef=[[0, 1.0], [50, 0.0]]"]
    cfg = config.load(None, given, algo="a2c", env="CartPole-v1", stop=["env_steps=100"])
    assert cfg.algo.curiosity == Icm(forward_share=0.5, coef=((0, 1.0), (50, 0.0)))
    assert config.load(None, [], algo="ppo", env="CartPole-v1", stop=["env_steps=100"]).algo.curiosity is None


@pytest.mark.slow
def test_deep_sea_is_explored():
    """The reward is behind ten steps to the right, each of which costs: found by chance in one of 1,024 episodes."""
    pytest.importorskip("gymnax")
    from agent_runs import trained

    given = [
        "env.options={size: 10}", "env.num_envs=16", "rollout.length=33", "algo.lr=2e-3", "algo.gamma=0.999",
        "algo.curiosity={name: rnd, hidden: [64], features: 16, lr: 1e-3}",
    ]  # fmt: skip
    run = config.load(None, given, algo="ppo", env="gymnax:DeepSea-bsuite", stop=["env_steps=60000"])
    assert trained(run, calls=100)[1]["episode/return"] > 0.9
