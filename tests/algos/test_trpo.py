"""TRPO against plain numpy: the Fisher matrix in full, conjugate gradient, line search; and its refusals."""

import dataclasses

import fakes
import jax
import numpy as np
import pytest
from cases import some_quick
from fakes import assert_same, differ
from ppo_reference import reference_gae

from jrl.algos import actor_critic, gradients, optimizers, trpo
from jrl.algos.optimizers import AdamW
from jrl.errors import InputError
from jrl.networks import NetworkConfig
from jrl.types import Box, Discrete

KEY = jax.random.key(2)
T, B = 8, 8
NETWORK = NetworkConfig(hidden=(4,))
CFG = trpo.Config(cg_steps=5, cg_damping=0.03, line_search_steps=6, num_epochs=1, num_minibatches=2)


def setting(action=None):
    env_spec = fakes.spec(action, num_envs=B)
    algo = trpo.make(CFG, env_spec, NETWORK)
    state = fakes.perturbed(fakes.made_up_state(algo))
    return env_spec, state, jax.device_get(fakes.rollout(algo, env_spec, algo.actor(state), T=T))


def update(cfg, env_spec, state, rollout):
    after, aux = fakes.update(trpo, cfg, env_spec, NETWORK, state, rollout, KEY)
    return jax.device_get(after), jax.device_get(aux.metrics)


def policy_of(params):
    return {name: x for name, x in params.items() if not name.startswith("value_")}


def conjugate_gradient(matrix, b, steps):
    """Hestenes and Stiefel (1952), from 0."""
    x, r = np.zeros_like(b), b.copy()
    p = r.copy()
    for _ in range(steps):
        size = r @ r / (p @ matrix @ p)
        x, new = x + size * p, r - size * matrix @ p
        p, r = new + (new @ new) / (r @ r) * p, new
    return x


@pytest.mark.parametrize("action", some_quick([Discrete(3), Box((2,))], Box((2,))), ids=str)
def test_the_step_is_the_reference(action):
    env_spec, state, rollout = setting(action)
    net, mask = actor_critic.make(env_spec, NETWORK), np.asarray(rollout.mask)
    value = np.asarray(net.value(state.params, np.concatenate([rollout.obs, rollout.last_obs[None]])), np.float64)
    done = rollout.terminated | rollout.truncated
    advantage = reference_gae(CFG, np.asarray(rollout.reward, np.float64), rollout.terminated, done, value)[mask]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    obs, taken, old = rollout.obs[mask], rollout.action[mask], np.asarray(rollout.extras["log_prob"], np.float64)[mask]
    start, unflatten = jax.flatten_util.ravel_pytree(policy_of(state.params))

    @jax.jit
    def parameters(flat):  # [N, K], parameters of the distributions of all rows
        dist = net.apply({**state.params, **unflatten(flat)}, obs)[0]
        return (
            dist.logits
            if isinstance(action, Discrete)
            else jax.numpy.concatenate([dist.mean, jax.numpy.broadcast_to(dist.log_std, dist.mean.shape)], -1)
        )

    rows, jacobian = np.arange(len(obs)), np.asarray(jax.jit(jax.jacobian(parameters))(start), np.float64)

    def judge(flat):  # log-probability [N] and its gradient [N, K], KL's Hessian [N, K, K], and parts of KL
        out = np.asarray(parameters(np.float32(flat)), np.float64)
        if isinstance(action, Discrete):
            log_p = out - np.log(np.exp(out).sum(-1, keepdims=True))
            p = np.exp(log_p)
            hessian = p[:, :, None] * np.eye(3) - p[:, :, None] * p[:, None]
            return log_p[rows, taken], np.eye(3)[taken] - p, hessian, log_p
        mean, log_std = np.split(out, 2, -1)
        z = (taken - mean) / np.exp(log_std)
        log_prob = (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)
        hessian = np.concatenate([np.exp(-2 * log_std), np.full_like(log_std, 2.0)], -1)[:, :, None] * np.eye(4)
        return log_prob, np.concatenate([z / np.exp(log_std), z**2 - 1], -1), hessian, (mean, log_std)

    def kl(before, after):
        if isinstance(action, Discrete):
            return (np.exp(before) * (before - after)).sum(-1).mean()
        (mean, log_std), (other, other_std) = before, after
        distance = (np.exp(2 * log_std) + (mean - other) ** 2) / (2 * np.exp(2 * other_std))
        return (other_std - log_std + distance - 0.5).sum(-1).mean()

    log_prob, slope, hessian, before = judge(start)
    surrogate = lambda log_prob: -(np.exp(log_prob - old) * advantage).mean()
    weight = np.exp(log_prob - old) * advantage / len(obs)
    gradient = -np.einsum("n,nk,nkp->p", weight, slope, jacobian)
    matrix = np.einsum("nkp,nkl,nlq->pq", jacobian, hessian, jacobian) / len(obs) + CFG.cg_damping * np.eye(len(start))
    x = conjugate_gradient(matrix, gradient, CFG.cg_steps)
    step = np.sqrt(2 * CFG.target_kl / (x @ matrix @ x)) * x
    tried = [start - CFG.line_search_shrink**k * step for k in range(CFG.line_search_steps)]
    found = [(kl(before, after), surrogate(p)) for p, _, _, after in map(judge, tried)]
    first = next(k for k, (d, loss) in enumerate(found) if d <= CFG.target_kl and loss < surrogate(log_prob))

    after, metrics = update(CFG, env_spec, state, rollout)
    got = jax.flatten_util.ravel_pytree(policy_of(after.params))[0]
    assert np.abs(step).max() > 1e-2
    np.testing.assert_allclose(got, tried[first], atol=2e-5)
    np.testing.assert_allclose(metrics["policy/kl"], found[first][0], rtol=1e-3)
    np.testing.assert_allclose(metrics["loss/policy"], surrogate(log_prob), rtol=1e-3, atol=1e-6)
    assert (metrics["policy/line_search_steps"], metrics["policy/line_search_success"]) == (first + 1, 1)


def test_a_failed_line_search_leaves_the_policy_and_a_longer_one_shortens_the_step():
    """A step of such a KL is far outside of the quadratic model."""
    env_spec, state, rollout = setting()
    cfg = dataclasses.replace(CFG, target_kl=5.0, line_search_shrink=0.99)
    after, metrics = update(cfg, env_spec, state, rollout)
    assert_same(policy_of(after.params), policy_of(jax.device_get(state.params)))
    assert differ(after.params, state.params)  # the value
    assert (metrics["policy/kl"], metrics["policy/line_search_success"]) == (0, 0)
    after, metrics = update(dataclasses.replace(cfg, line_search_shrink=0.5), env_spec, state, rollout)
    assert differ(policy_of(after.params), policy_of(state.params))
    assert metrics["policy/line_search_success"] == 1 and 1 < metrics["policy/line_search_steps"] <= 6
    assert 0.1 < metrics["policy/kl"] <= 5.0


def test_the_optimizer_fits_the_value_alone():
    env_spec, state, rollout = setting()
    adam, _ = update(CFG, env_spec, state, rollout)
    cfg = dataclasses.replace(CFG, optimizer=AdamW(weight_decay=0.5))
    state = state.replace(opt_state=optimizers.make(cfg).init(state.params))
    decayed, _ = update(cfg, env_spec, state, rollout)
    assert_same(policy_of(adam.params), policy_of(decayed.params))
    assert differ(adam.params, decayed.params)


def test_refusals():
    env_spec = fakes.spec()
    with pytest.raises(InputError, match=r"^network\.shared: .*: set it to false"):
        trpo.make(CFG, env_spec, dataclasses.replace(NETWORK, shared=True))
    with pytest.raises(InputError, match=r"^custom\.loss: .*: use ppo or a2c, or leave it out"):
        trpo.make(CFG, env_spec, NETWORK, loss=lambda default, net, params, batch: default(params, batch))
    with gradients.taken(), pytest.raises(InputError, match="use learn_on_batch"):
        trpo.make(CFG, env_spec, NETWORK)
