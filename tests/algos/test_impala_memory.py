"""IMPALA and APPO with memory, dictionaries and masks: what acting saw, learning sees."""

import dataclasses
import math

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import assert_close, differ, rollouts

from jrl.algos import appo, impala
from jrl.fields import hyper
from jrl.networks import NetworkConfig
from jrl.types import Box, Dict, Discrete, EnvSpec

KEY = jax.random.key(3)
T, B = fakes.STEPS, fakes.COLUMNS
NETWORK = NetworkConfig(hidden=(8,), core=hyper.Gru(size=6), max_seq_len=4)
MASKED = EnvSpec(Dict((("obs", Box((3,))), ("action_mask", Box((3,), "int8", 0, 1)))), Discrete(3), B)
PLAIN = EnvSpec(Box((3,)), Discrete(3), B)


FAR = 8.0  # so far above the acting policy's is APPO's reference log-probability: nothing is left of the target's


def differences(default, net, params, batch):
    """The greatest difference between log-probabilities when learning and when acting."""
    value, metrics = default(params, batch)
    if isinstance(batch, impala.Columns):
        dist = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1)[:-1], net.apply(params, impala.window(batch))[0])
    else:
        dist = net.apply(params, batch.obs)[0]
    acting = batch.log_prob if isinstance(batch, impala.Columns) else batch.log_prob - FAR
    error = jnp.where(batch.weight > 0, jnp.abs(dist.log_prob(batch.action) - acting), 0.0)
    return value, metrics | {"difference": error.max()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["impala", "appo"])
def test_learning_sees_what_acting_saw(name):
    """Across ends and borders, of rollouts and of sequences; with a learning rate of 0 in all minibatches."""
    module = {"impala": impala, "appo": appo}[name]
    options = {"clip_target_ratio": math.exp(-FAR)} if name == "appo" else {}
    cfg = module.Config(lr=0.0, num_minibatches=2, **options)
    algo = module.make(cfg, MASKED, NETWORK, loss=differences)
    state = fakes.perturbed(fakes.made_up_state(algo))
    if name == "appo":
        state = state.replace(target_params=state.params)
    update = jax.jit(algo.update)
    made = rollouts(algo, MASKED, algo.actor(state))
    for rollout in made:
        mask = np.asarray(rollout.mask)
        taken = np.take_along_axis(np.asarray(rollout.obs["action_mask"]), np.asarray(rollout.action)[..., None], -1)
        assert (taken[mask] == 1).all()
        after, aux = update(state, rollout, KEY)
        assert float(aux.metrics["difference"]) < 1e-5
        np.testing.assert_allclose(aux.metrics["policy/rho"], 1.0, atol=1e-5)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((after, aux)))
    forgotten = made[1].replace(carry=jax.tree.map(jnp.zeros_like, made[1].carry))
    assert float(update(state, forgotten, KEY)[1].metrics["difference"]) > 1e-3


@pytest.mark.slow
def test_gradients_go_back_so_many_steps():
    """With max_seq_len 1 a step learns nothing from the memory before it; the losses are the same."""
    cfg, after, aux = impala.Config(max_grad_norm=None), {}, {}
    for limit in (1, T + 1, None):
        algo = impala.make(cfg, PLAIN, dataclasses.replace(NETWORK, max_seq_len=limit))
        state = fakes.perturbed(fakes.made_up_state(algo))
        rollout = rollouts(algo, PLAIN, algo.actor(state))[1]
        after[limit], aux[limit] = jax.jit(algo.update)(state, rollout, KEY)
    assert_close(aux[1].metrics, aux[None].metrics, atol=1e-5)
    assert_close(after[T + 1].params, after[None].params, atol=1e-6)
    assert differ(after[1].params["policy_torso_core"], after[None].params["policy_torso_core"])
