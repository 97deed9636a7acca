"""MARWIL against the equations spelled out."""

import dataclasses
import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_sac_memory
from cases import some_quick
from fakes import assert_close, assert_same, differ
from sac_reference import forward
from test_bc import adam, log_prob_and_entropy

from jrl.algos import awr, marwil
from jrl.fields.data import Replay
from jrl.networks import NetworkConfig
from jrl.types import Box, Discrete, EnvSpec

KEY = jax.random.key(6)
BOX = Box((2,), low=-1.0, high=1.0)
BASE = marwil.Config(
    lr=0.1, adam_eps=1.0, ent_coef=0.3, vf_coef=0.7, beta=1.5, adv_norm_start=4.0, adv_norm_rate=0.25, weight_clip=2.0
)


def setting(cfg=BASE, action=Discrete(3), network=fakes.NETWORK):  # noqa: B008
    spec = EnvSpec(fakes.VECTOR, action, 8)
    algo = marwil.make(cfg, spec, network)
    state = fakes.perturbed(fakes.made_up_state(algo))
    return algo, state, fakes.batch(algo, spec, algo.actor(state))


@pytest.mark.parametrize(  # what a weight is does not depend on the action
    ("kind", "action"),
    some_quick([("exp", BOX), ("softmax", Discrete(3)), ("binary", Discrete(3))], ("exp", BOX)),
    ids=["exp-box", "softmax-discrete", "binary-discrete"],
)
def test_one_update_is_that_of_the_equations(kind, action):
    cfg = dataclasses.replace(BASE, weight=kind)
    algo, state, batch = setting(cfg, action)
    batch = jax.device_get(batch)
    counts, mean = batch.weight > 0, lambda x: (batch.weight * x).sum() / 64

    def value(params, x):
        return forward({"value_torso": params["value_torso"], "value_head": params["value_head"]}, x)[:, 0]

    now, after = jax.device_get(jax.jit(lambda p: (value(p, batch.obs), value(p, batch.next_obs)))(state.params))
    target = batch.reward + batch.discount * after
    advantage = target - now
    square = 4.0 + 0.25 * (mean(advantage**2) - 4.0)
    odds = np.exp(1.5 * advantage / np.sqrt(square))
    weight = {
        "exp": np.minimum(odds, 2.0),
        "softmax": np.minimum(odds / mean(odds), 2.0),
        "binary": 1.0 * (advantage > 0),
    }[kind]
    assert len(set(weight[counts].round(5))) > 1 and (kind == "binary" or (weight[counts] == 2.0).any())

    def loss(params):
        log_prob, entropy, best = log_prob_and_entropy(params, batch.obs, batch.action)
        off = best - batch.action
        near = {"policy/accuracy": mean(off == 0)} if off.ndim == 1 else {"policy/mse": mean((off**2).mean(-1))}
        policy, error = -mean(weight * log_prob), mean(0.5 * (value(params, batch.obs) - target) ** 2)
        total = policy + 0.7 * error - 0.3 * mean(entropy)
        return total, {"loss/policy": policy, "loss/value": error, "policy/entropy": mean(entropy), **near}

    gradient, metrics = jax.jit(jax.grad(loss, has_aux=True))(state.params)
    after, aux = jax.jit(algo.update)(state, batch, KEY)
    assert_close(after.params, adam(cfg, state.params, gradient), atol=3e-6)
    np.testing.assert_allclose(after.own["adv_norm"], square, rtol=1e-5)
    metrics |= {"policy/imitation": mean(weight), "policy/adv_norm": np.sqrt(square), "value/target": mean(target)}
    for name, wanted in metrics.items():
        np.testing.assert_allclose(aux.metrics[name], wanted, rtol=1e-4, atol=1e-6, err_msg=name)


def test_awr_is_marwil_on_transitions_of_replay():
    cfg = awr.Config(**vars(BASE))
    algo, state, batch = setting()
    own = awr.make(cfg, fakes.spec(), fakes.NETWORK)
    assert own.data == Replay() and not cfg.to_end
    assert_same(jax.jit(own.update)(state, batch, KEY), jax.jit(algo.update)(state, batch, KEY))


def test_weights_by_hand():
    """Of advantages 2, -1 and 0, c = 2 and beta = 2, of which the last row does not count."""
    advantage, counts, square = jnp.array([2.0, -1.0, 0.0, 1e30]), jnp.array([1.0, 1.0, 2.0, 0.0]), jnp.array(4.0)
    imitation_weight = jax.jit(lambda cfg: marwil.imitation_weight(cfg, advantage, counts, square, None))
    weight = lambda **options: np.asarray(imitation_weight(marwil.Config(beta=2.0, **options)))
    e = np.e
    np.testing.assert_allclose(weight()[:3], [e**2, 1 / e, 1.0], rtol=1e-5)
    np.testing.assert_allclose(weight(weight_clip=3.0)[:3], [3.0, 1 / e, 1.0], rtol=1e-5)
    np.testing.assert_allclose(weight(weight="binary")[:3], [1.0, 0.0, 0.0])
    mean = (e**2 + 1 / e + 2.0) / 4
    np.testing.assert_allclose(weight(weight="softmax")[:3], np.array([e**2, 1 / e, 1.0]) / mean, rtol=1e-5)
    for kind in ("exp", "binary", "softmax"):
        assert np.isfinite(weight(weight=kind, weight_clip=np.inf)).all()
    # far beyond what exp holds
    far = marwil.Config(beta=1e4, weight="softmax", weight_clip=np.inf)
    np.testing.assert_allclose(imitation_weight(far), [4.0, 0.0, 0.0, 0.0], atol=1e-6)


@functools.cache
def drawn(network):
    """What is learned from, which a policy of that network acted."""
    algo = marwil.make(marwil.Config(), test_sac_memory.MASKED, network)
    return fakes.drawn(algo, test_sac_memory.MASKED, algo.actor(fakes.perturbed(fakes.made_up_state(algo))))


@pytest.mark.slow
def test_of_sequences_a_target_bootstraps_where_the_sequence_says():
    """`ahead` names the row whose value follows; a row's own value is that of the same pass."""
    spec, network = test_sac_memory.MASKED, test_sac_memory.NETWORK
    algo = marwil.make(marwil.Config(adv_norm_rate=0.0), spec, network)
    state = fakes.perturbed(fakes.made_up_state(algo))
    data = drawn(network)
    rows, length = data.weight.shape
    net = marwil.actor_critic.make(spec, network, lambda obs: obs["action_mask"])
    window = data.window.replace(carry=net.carry(rows))
    value = np.asarray(jax.jit(net.value)(state.params, window))[:, -length - 1 :]
    assert int((data.ahead != jnp.arange(1, length + 1)[None]).sum()) > 3
    target = np.asarray(data.reward) + np.asarray(data.discount) * np.take_along_axis(value, np.asarray(data.ahead), 1)
    weight = np.asarray(data.weight)
    _, aux = jax.jit(algo.update)(state, data, KEY)
    valid = weight > 0
    np.testing.assert_allclose(aux.metrics["value/target"], (weight * target)[valid].sum() / weight.size, rtol=1e-4)
    error = 0.5 * (value[:, :-1] - target) ** 2
    np.testing.assert_allclose(aux.metrics["loss/value"], (weight * error)[valid].sum() / weight.size, rtol=1e-4)


def test_a_shared_torso_learns_from_both_losses():
    network = NetworkConfig(hidden=(8,), shared=True)
    _, state, batch = setting(network=network)

    @jax.jit
    def params(vf_coef):
        cfg = dataclasses.replace(BASE, vf_coef=vf_coef)
        return marwil.make(cfg, EnvSpec(fakes.VECTOR, Discrete(3), 8), network).update(state, batch, KEY)[0].params

    changed = [params(0.7), params(0.0)]
    assert_same(changed[0]["policy_head"], changed[1]["policy_head"])
    assert differ(changed[0]["torso"], changed[1]["torso"])
