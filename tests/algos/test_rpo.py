"""RPO: noise on the means of Gaussians in the gradient steps of PPO, and nowhere else."""

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import distributions
from jrl.algos import actor_critic, ppo
from jrl.distributions import Categorical, DiagGaussian, Joint
from jrl.errors import InputError
from jrl.types import Box, Dict, Discrete

KEY = jax.random.key(3)
ALPHA = 0.5


def test_the_noise_is_uniform_and_on_gaussians_alone():
    mean = jnp.zeros((5000, 2))
    parts = {"a": DiagGaussian(mean, jnp.ones(2)), "b": Categorical(mean), "c": DiagGaussian(mean + 1, jnp.ones(2))}
    noisy = jax.device_get(distributions.shift_means(Joint(parts), ALPHA, KEY)).parts
    np.testing.assert_array_equal(noisy["b"].logits, mean)
    np.testing.assert_array_equal(noisy["a"].log_std, np.ones(2))
    noise = np.concatenate([noisy["a"].mean, noisy["c"].mean - 1], 1)
    assert np.abs(noise).max() <= ALPHA + 1e-6
    np.testing.assert_allclose(np.quantile(noise, [0.25, 0.5, 0.75], axis=0).T, [[-0.25, 0.0, 0.25]] * 4, atol=0.03)
    np.testing.assert_allclose(np.corrcoef(noise.T), np.eye(4), atol=0.06)


def test_the_surrogate_reads_noisy_means_and_the_kl_does_not():
    cfg = ppo.Config(rpo_alpha=ALPHA, kl_coef=0.3, num_epochs=1, num_minibatches=1)
    env_spec, seen = fakes.spec(Box((2,))), {}

    def loss(default, net, params, batch):
        value, metrics = default(params, batch)
        (dist, _), mean = net.apply(params, batch.obs), lambda x: jnp.mean(batch.weight * x)
        away = {"kl": mean(batch.dist.kl(dist)), "plain": mean((dist.log_prob(batch.action) - batch.log_prob) ** 2)}
        return value, metrics | {f"mine/{name}": x for name, x in away.items()}

    algo = ppo.make(cfg, env_spec, fakes.NETWORK, loss=loss)
    state = fakes.perturbed(fakes.made_up_state(algo))
    rollout = fakes.rollout(algo, env_spec, algo.actor(state))
    update = jax.jit(algo.update)
    for key in (0, 1):
        _, aux = update(state, rollout, jax.random.key(key))
        seen[key] = jax.device_get(aux.metrics)
        # acting had no noise, so that the first step has no KL, and ratios of 1 without noise
        np.testing.assert_allclose(
            [seen[key]["mine/kl"], seen[key]["mine/plain"], seen[key]["policy/kl"]], 0, atol=1e-6
        )
        assert seen[key]["policy/approx_kl"] > 1e-2
    assert seen[0]["loss/policy"] != seen[1]["loss/policy"]

    @jax.jit
    def of_rows():
        agent = actor_critic.make_agent(cfg, env_spec, fakes.NETWORK)
        rows, _, _ = ppo.targets(cfg, agent, state, rollout)
        rows = ppo.measured(cfg, agent, state.params, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows))
        scalars = {"clip_eps": 0.2, "ent_coef": 0.0, "kl_coef": 0.3}
        _, metrics = ppo.loss(cfg, agent, state.params, rows, **scalars, key=KEY)
        return rows, agent.net.apply(state.params, rows.obs)[0], metrics

    rows, dist, metrics = jax.device_get(of_rows())
    noisy = jax.device_get(distributions.shift_means(dist, ALPHA, jax.random.fold_in(KEY, 1)))
    log_std = np.broadcast_to(dist.log_std, noisy.mean.shape)
    z = (rows.action - noisy.mean) / np.exp(log_std)
    ratio = np.exp((-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1) - rows.log_prob)
    want = -np.minimum(ratio * rows.advantage, np.clip(ratio, 0.8, 1.2) * rows.advantage)
    np.testing.assert_allclose(metrics["loss/policy"], np.mean(rows.weight * want), rtol=1e-4)


def test_refusals():
    with pytest.raises(InputError, match=r"^algo\.rpo_alpha: expected a float Box .*: leave algo\.rpo_alpha out"):
        ppo.make(ppo.Config(rpo_alpha=ALPHA), fakes.spec(Discrete(3)))
    ppo.make(ppo.Config(rpo_alpha=ALPHA), fakes.spec(Dict((("a", Discrete(2)), ("b", Box((2,)))))))
