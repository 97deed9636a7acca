"""MPO against its equations in numpy, and the path of its multipliers."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from scipy import optimize, special

from jrl.algos import mpo
from jrl.algos.iql import ClippedGaussian
from jrl.distributions import Categorical
from jrl.types import Box, Discrete, EnvSpec

KEY = jax.random.key(7)
CFG = mpo.Config(sample_kl=0.2, mean_kl=0.01, std_kl=0.002, num_samples=4)
DUAL = {"temperature": 0.7, "mean": 1.5, "std": 2.5}
N, K = 6, 4
BOX = Box((2,), low=-1.0, high=1.0)


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def density(x, mean, log_std):
    """[..., A] -> [...]: the logarithm."""
    return (-0.5 * ((x - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)


def gaussian_kl(mean, log_std, other, other_std):
    distance = np.exp(2 * log_std) + (mean - other) ** 2
    return (other_std - log_std + distance / (2 * np.exp(2 * other_std)) - 0.5).sum(-1)


def log_dual():
    return {name: jnp.log(x) for name, x in DUAL.items()}


def test_loss_of_a_gaussian():
    """Mean and deviation each move against the target policy's other half, each under its own bound."""
    rng = np.random.default_rng(0)
    mean, old = normal(rng, N, 2), normal(rng, N, 2)
    log_std, old_std = 0.3 * normal(rng, N, 2), 0.3 * normal(rng, N, 2)
    action, q, weight = normal(rng, N, K, 2), normal(rng, N, K), np.array([0.0, 1, 1, 2, 1, 1], np.float32)
    share = np.full((N, K), -np.log(K), np.float32)
    make = lambda mean, log_std: ClippedGaussian(jnp.asarray(mean), jnp.asarray(log_std), 1)

    def loss(log_dual, mean, log_std):
        return mpo.policy_loss(CFG, make(mean, log_std), make(old, old_std), log_dual, action, share, q, weight)

    gradient, metrics = jax.device_get(jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(log_dual(), mean, log_std))

    average = lambda x: (weight * x).mean()
    chance = special.softmax(q / 0.7, -1)
    by_mean = lambda mean: density(action, mean[:, None], old_std[:, None])
    by_std = lambda log_std: density(action, old[:, None], log_std[:, None])
    fit = -average((chance * (by_mean(mean) + by_std(log_std))).sum(-1))
    kl = average(gaussian_kl(old, old_std, mean, old_std)), average(gaussian_kl(old, old_std, old, log_std))
    np.testing.assert_allclose(metrics["loss/policy"], fit, rtol=1e-4)
    np.testing.assert_allclose([metrics["policy/mean_kl"], metrics["policy/std_kl"]], kl, rtol=1e-4)
    np.testing.assert_allclose(metrics["policy/sample_kl"], average((chance * np.log(chance * K)).sum(-1)), rtol=1e-4)
    # the multipliers rise where KL is above its bound; the derivative is that to their logarithms
    np.testing.assert_allclose(gradient[0]["mean"], 1.5 * (CFG.mean_kl - kl[0]), rtol=1e-4)
    np.testing.assert_allclose(gradient[0]["std"], 2.5 * (CFG.std_kl - kl[1]), rtol=1e-4)

    def temperature_loss(eta):
        return eta * (CFG.sample_kl + average(special.logsumexp(q / eta, -1) - np.log(K)))

    slope = (temperature_loss(0.7 * 1.001) - temperature_loss(0.7 / 1.001)) / (2 * np.log(1.001))
    np.testing.assert_allclose(gradient[0]["temperature"], slope, rtol=1e-3)
    # where the loss of eta is least, the weighted samples are as far from the target policy as the bound says
    best = optimize.minimize_scalar(temperature_loss, bounds=(1e-2, 10), method="bounded").x
    chance = special.softmax(q / best, -1)
    np.testing.assert_allclose(average((chance * np.log(chance * K)).sum(-1)), CFG.sample_kl, rtol=1e-2)

    chance, row = special.softmax(q / 0.7, -1)[..., None], weight[:, None] / N
    z = (action - mean[:, None]) / np.exp(2 * old_std)[:, None]
    kl_slope = (mean - old) / np.exp(2 * old_std)
    want = row * (1.5 * kl_slope - (chance * z).sum(1))
    np.testing.assert_allclose(gradient[1], want, rtol=1e-3, atol=1e-6)
    square = (action - old[:, None]) ** 2 / np.exp(2 * log_std)[:, None] - 1
    distance = 1 - np.exp(2 * (old_std - log_std))
    want = row * (2.5 * distance - (chance * square).sum(1))
    np.testing.assert_allclose(gradient[2], want, rtol=1e-3, atol=1e-6)


def test_loss_of_a_categorical_with_a_forbidden_action():
    rng = np.random.default_rng(1)
    logits, old, q = normal(rng, N, 3), normal(rng, N, 3), normal(rng, N, 3)
    logits[:, 2], old[:, 2], q[:, 2] = -1e9, -1e9, 50.0  # its value is not read
    share, weight = jax.nn.log_softmax(old), np.ones(N, np.float32)
    dist, target = Categorical(jnp.asarray(logits)), Categorical(jnp.asarray(old))
    dual = {name: x for name, x in log_dual().items() if name != "std"}
    loss, metrics = jax.device_get(mpo.policy_loss(CFG, dist, target, dual, None, share, q, weight))
    p, new = (special.softmax(x[:, :2].astype(np.float64), -1) for x in (old, logits))
    chance = p * np.exp(q[:, :2] / 0.7)
    total = chance.sum(-1, keepdims=True)
    fit, kl = -(chance / total * np.log(new)).sum(-1).mean(), (p * np.log(p / new)).sum(-1).mean()
    np.testing.assert_allclose(metrics["loss/policy"], fit, rtol=1e-4)
    np.testing.assert_allclose(metrics["policy/mean_kl"], kl, rtol=1e-3)
    np.testing.assert_allclose(loss, fit + 0.7 * (0.2 + np.log(total).mean()) + 1.5 * CFG.mean_kl, rtol=1e-4)


@pytest.mark.parametrize("action", some_quick([BOX, Discrete(3)], BOX), ids=str)
def test_the_targets_move_together_and_critics_learn_the_mean_of_the_samples(action):
    """An end has no value after it; the policy improves on the states of ends, too."""
    spec = EnvSpec(fakes.VECTOR, action, 8)
    algo = mpo.make(dataclasses.replace(CFG, target_update_every=2), spec, fakes.NETWORK)
    state = fakes.perturbed(fakes.made_up_state(algo))
    batch, update = fakes.batch(algo, spec, algo.actor(state)), jax.jit(algo.update)
    ended = batch.replace(discount=jnp.zeros_like(batch.discount))
    after, aux = update(state, ended, KEY)
    assert fakes.differ(after.params["actor"], state.params["actor"])
    np.testing.assert_allclose(aux.metrics["value/target"], jnp.mean(batch.weight * batch.reward), rtol=1e-5)
    once, _ = update(state, batch, KEY)
    twice, _ = update(once, batch, KEY)
    fakes.assert_same(once.target_params, state.target_params)
    fakes.assert_same(twice.target_params, {name: twice.params[name] for name in ("actor", "critic")})
    assert fakes.differ(twice.params["actor"], state.params["actor"])
