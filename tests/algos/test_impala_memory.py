"""IMPALA and APPO with memory, dictionaries and masks: against A2C and PPO, and acting against learning."""

import dataclasses
import math

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import assert_close, differ, rollouts

from jrl.algos import a2c, actor_critic, appo, impala, ppo
from jrl.fields import hyper
from jrl.networks import NetworkConfig
from jrl.rollout import unroll
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
def test_on_policy_the_gradient_is_that_of_a2c():
    common = {"lr": 3e-3, "gamma": 0.95, "vf_coef": 0.7, "ent_coef": 0.02, "max_grad_norm": None}
    whole = dataclasses.replace(NETWORK, max_seq_len=None)
    algo, other = impala.make(impala.Config(**common), MASKED, whole), a2c.make(a2c.Config(**common), MASKED, whole)
    state = fakes.perturbed(fakes.made_up_state(algo))
    rollout = rollouts(algo, MASKED, algo.actor(state))[1]
    got, aux = jax.jit(algo.update)(state, rollout, KEY)
    want, want_aux = jax.jit(other.update)(state, rollout, KEY)
    moment = lambda state: next(x for x in jax.tree.leaves(state.opt_state) if x.ndim)
    assert np.abs(moment(want)).max() > 1e-2
    np.testing.assert_allclose(moment(got), moment(want), rtol=1e-4, atol=1e-6)
    for name in ("loss/policy", "loss/value", "policy/entropy"):
        np.testing.assert_allclose(aux.metrics[name], want_aux.metrics[name], rtol=1e-4, atol=1e-5, err_msg=name)


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


@pytest.mark.slow
@pytest.mark.parametrize("limit", [4, None])
def test_of_the_targets_own_rollouts_appo_is_ppo(limit):
    common = {"lr": 3e-3, "gamma": 0.95, "num_epochs": 2, "num_minibatches": 2, "ent_coef": 0.02}
    options = {"kl_coef": 0.5, "kl_target": 0.01, "value_clip_eps": 0.02}
    network = dataclasses.replace(NETWORK, max_seq_len=limit)
    algo = appo.make(appo.Config(**common, **options, vtrace_lambda=0.9), PLAIN, network)
    other = ppo.make(ppo.Config(**common, **options, gae_lambda=0.9), PLAIN, network)
    state = fakes.perturbed(fakes.made_up_state(algo))
    state = state.replace(target_params=jax.tree.map(jnp.copy, state.params))
    want = state.replace(target_params=())
    rollout = rollouts(other, PLAIN, other.actor(want))[1]
    got, aux = jax.jit(fakes.learn(algo))(state, rollout, KEY)
    want, want_aux = jax.jit(other.update)(want, rollout, KEY)
    assert differ(want.params, state.params)
    assert_close(got.params, want.params, atol=1e-5)
    for name, x in want_aux.metrics.items():
        np.testing.assert_allclose(aux.metrics[name], x, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_user_gets_the_window_of_the_columns():
    """Rows before the first of the next rollout: the memory of each environment stays with its columns."""
    algo = impala.make(impala.Config(), PLAIN, NETWORK)
    net = actor_critic.make(PLAIN, NETWORK, lambda obs: None)
    state = fakes.perturbed(fakes.made_up_state(algo))
    rollout = rollouts(algo, PLAIN, algo.actor(state))[1]
    nothing = dict.fromkeys(("action", "log_prob", "reward", "terminated", "done", "weight"))
    first = jax.tree.map(lambda x: x[None], (rollout.last_obs, rollout.carry.memory))
    columns = impala.Columns(obs=rollout.obs, last_obs=first[0], mask=rollout.mask, carry=first[1], **nothing)
    window = impala.window(columns)
    np.testing.assert_array_equal(window.obs[:, :-1], np.swapaxes(rollout.obs, 0, 1))
    np.testing.assert_array_equal(window.obs[:, -1], rollout.last_obs)
    np.testing.assert_array_equal(window.reset[:, :-1], ~np.asarray(rollout.mask).T)
    assert not window.reset[:, -1].any()
    memory, step = window.carry, jax.jit(net.step)
    for t in range(T):  # one step after the other
        _, _, memory = step(state.params, rollout.obs[t], memory)
        memory = unroll.reset_where(~rollout.mask[t], net.carry(B), memory)
    _, value, _ = step(state.params, rollout.last_obs, memory)
    whole = jax.jit(net.apply)(state.params, window)[1]
    np.testing.assert_allclose(whole[:, -1], value, rtol=1e-4, atol=1e-5)
