"""V-MPO against its equations in numpy."""

import dataclasses
import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from scipy import optimize, special

from jrl.algos import vmpo
from jrl.types import Box, Discrete, EnvSpec

KEY = jax.random.key(5)
BOX = Box((2,))
CFG = vmpo.Config(num_epochs=1, num_minibatches=1, sample_kl=0.2, mean_kl=0.01, std_kl=0.002)


@functools.cache
def setting(action):
    spec = EnvSpec(fakes.VECTOR, action, 8)
    algo = vmpo.make(CFG, spec, fakes.NETWORK)
    state = fakes.perturbed(fakes.made_up_state(algo), 0.1)
    return algo.update.args[1], state, fakes.rollout(algo, spec, algo.actor(state)), jax.jit(algo.update)


def test_the_best_half_of_the_unmasked_rows_is_chosen():
    agent = setting(BOX)[0]
    advantage = jnp.array([[3.0, -1.0, 9.0], [0.5, 2.0, 1.0]])
    mask = jnp.array([[True, True, False], [True, True, True]])
    best = lambda share: vmpo.is_best(dataclasses.replace(CFG, top_share=share), agent, advantage, mask).tolist()
    assert best(0.5) == [[True, False, False], [False, True, True]]  # 3 of 5, rounded up
    assert best(0.2) == [[True, False, False], [False, False, False]]
    assert best(1.0) == mask.tolist()
    assert not vmpo.is_best(CFG, agent, advantage, jnp.zeros_like(mask)).any()


def test_psi_and_the_slope_of_the_temperature():
    """sample_kl - KL is the derivative of the temperature's loss; where that is least, the KL is its bound."""
    rng = np.random.default_rng(0)
    advantage, best = rng.normal(size=12), np.arange(12) % 3 > 0
    agent, state, rollout, _ = setting(BOX)
    rows = vmpo.targets(CFG, agent, state, rollout)[0]
    rows = jax.tree.map(lambda x: x[:12], rows)
    rows = dataclasses.replace(rows, advantage=jnp.float32(advantage), psi=jnp.float32(best))
    weighed, kl = vmpo.weigh(rows, jnp.float32(0.7), None)
    psi = special.softmax(advantage[best] / 0.7)
    np.testing.assert_allclose(weighed.psi[best], 12 * psi, rtol=1e-5)
    assert (np.asarray(weighed.psi)[~best] == 0).all()
    np.testing.assert_allclose(kl, (psi * np.log(psi * best.sum())).sum(), rtol=1e-4)

    def loss(eta):
        return eta * (CFG.sample_kl + special.logsumexp(advantage[best] / eta) - np.log(best.sum()))

    np.testing.assert_allclose(CFG.sample_kl - kl, (loss(0.7001) - loss(0.6999)) / 2e-4, rtol=1e-3)
    least = optimize.minimize_scalar(loss, bounds=(1e-2, 10), method="bounded").x
    np.testing.assert_allclose(vmpo.weigh(rows, jnp.float32(least), None)[1], CFG.sample_kl, rtol=1e-2)


@pytest.mark.parametrize("action", some_quick([BOX, Discrete(3)], BOX), ids=str)
def test_the_loss(action):
    agent, state, rollout, _ = setting(action)
    rows = vmpo.targets(CFG, agent, state, rollout)[0]
    rows, _ = vmpo.weigh(rows, jnp.float32(0.5), None)
    params = fakes.perturbed(state, 0.2).params  # away from the policy before the update
    dual = {name: jnp.log(x) for name, x in {"temperature": 0.5, "mean": 1.5, "std": 2.5}.items()}
    run = jax.jit(jax.value_and_grad(lambda dual: vmpo.loss(CFG, agent, params, dual, rows), has_aux=True))
    (total, metrics), slope = jax.device_get(run(dual))
    dist, value = agent.net.apply(params, rows.obs)
    old, weight, psi = rows.dist, np.asarray(rows.weight, np.float64), np.asarray(rows.psi, np.float64)
    as64 = lambda x: np.broadcast_to(np.asarray(x, np.float64), np.shape(old.mean))
    if isinstance(action, Discrete):
        log_p, before = (special.log_softmax(np.asarray(d.logits, np.float64), -1) for d in (dist, old))
        log_prob = np.take_along_axis(log_p, np.asarray(rows.action)[:, None], -1)[:, 0]
        kls = {"mean": (np.exp(before) * (before - log_p)).sum(-1)}
    else:
        mean, log_std, old_mean, old_std = map(as64, (dist.mean, dist.log_std, old.mean, old.log_std))
        z = (np.asarray(rows.action) - mean) / np.exp(log_std)
        log_prob = (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)
        ratio = np.exp(2 * (old_std - log_std))
        kls = {"mean": (0.5 * ((mean - old_mean) / np.exp(old_std)) ** 2).sum(-1)}
        kls["std"] = (log_std - old_std + 0.5 * ratio - 0.5).sum(-1)
    fit = -(psi * log_prob).mean()
    value_loss = (weight * 0.5 * (np.asarray(value) - np.asarray(rows.target)) ** 2).mean()
    alphas, bounds, want = {"mean": 1.5, "std": 2.5}, {"mean": 0.01, "std": 0.002}, fit + 0.5 * value_loss
    for name, kl in kls.items():
        kl = (weight * kl).mean()
        assert kl > 1e-3
        np.testing.assert_allclose(metrics[f"policy/{name}_kl"], kl, rtol=1e-3)
        # the multiplier grows where the KL exceeds its bound
        np.testing.assert_allclose(slope[name], alphas[name] * (bounds[name] - kl), rtol=1e-3)
        want += alphas[name] * bounds[name]
    np.testing.assert_allclose(metrics["loss/policy"], fit, rtol=1e-4)
    np.testing.assert_allclose(total, want, rtol=1e-4)
    assert slope["temperature"] == 0


def test_the_target_policy_is_that_before_the_update():
    """In the only step of the update the KL is 0, so its multipliers fall; the temperature moves to its bound."""
    _, state, rollout, update = setting(BOX)
    after, aux = update(state, rollout, KEY)
    np.testing.assert_allclose([aux.metrics["policy/mean_kl"], aux.metrics["policy/std_kl"]], 0.0, atol=1e-6)
    assert fakes.differ(after.params, state.params)
    moved = {name: float(after.own["dual"][name] - state.own["dual"][name]) for name in state.own["dual"]}
    assert moved["mean"] < 0 and moved["std"] < 0
    assert (moved["temperature"] > 0) == bool(aux.metrics["policy/sample_kl"] > CFG.sample_kl)
