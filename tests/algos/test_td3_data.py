"""What TD3 has for data sets, TD3+BC and ReBRAC, against the equations written out, and what cannot be together."""

import dataclasses
import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_td3
from cases import some_quick
from fakes import assert_close, assert_same
from test_td3 import forward, q_of

from jrl.algos import critics, td3
from jrl.networks import NetworkConfig
from jrl.types import NEXT_ACTION, Batch, Box, EnvSpec, InputError

KEY, N = test_td3.KEY, test_td3.N
BASE = dataclasses.replace(test_td3.BASE, num_critics=2)
FLAGS = {
    "TD3+BC": {"bc_alpha": 2.5},
    "actor": {"actor_bc": 0.7},
    "critic": {"critic_bc": 0.4},
    "ReBRAC": {"actor_bc": 0.7, "critic_bc": 0.4},
    "online": {},
}


def start():
    """(state, batch) of `test_td3`; of a third of the transitions the data have no next action."""
    _, state, batch = test_td3.setting(BASE)
    assert 5 < int(batch.extras[NEXT_ACTION]["valid"].sum()) < N - 5
    return state, batch


def update(cfg, state, batch):
    return jax.jit(td3.make(cfg, test_td3.SPEC, fakes.NETWORK).update)(state, batch, KEY)


@functools.partial(jax.jit, static_argnums=0)
def reference(cfg, state, batch):
    """(params after one update with Adam's first step, mean target, the policy's loss)."""
    mean = lambda x: jnp.sum(batch.weight * x) / N
    noise = jnp.clip(cfg.target_noise * critics.noise(KEY, N, (2,), None), -0.4, 0.4)
    after = jnp.clip(jnp.tanh(forward(state.target_params["actor"], batch.next_obs)) + noise, -1, 1)
    q = q_of(cfg, state.target_params["critic"], batch.next_obs, after).min(0)
    if cfg.critic_bc is not None:
        known = batch.extras[NEXT_ACTION]
        far = jnp.square(after - known["action"]).sum(1)
        q = q - cfg.critic_bc * jnp.where(known["valid"], far, 0.0)
    target = batch.reward + batch.discount * q  # a constant

    def critic_loss(critic):
        values = q_of(cfg, critic, batch.obs, batch.action)
        return sum(mean(0.5 * (values[i] - target) ** 2) for i in range(2))

    adam = lambda params, gradient, lr: jax.tree.map(lambda p, g: p - lr * g / (jnp.abs(g) + 1.0), params, gradient)
    critic = adam(state.params["critic"], jax.grad(critic_loss)(state.params["critic"]), cfg.lr)
    of_policy = lambda actor: q_of(cfg, critic, batch.obs, jnp.tanh(forward(actor, batch.obs)))[0]
    size = mean(jnp.abs(of_policy(state.params["actor"])))  # a constant

    def actor_loss(actor):
        apart = jnp.tanh(forward(actor, batch.obs)) - batch.action
        if cfg.bc_alpha is not None:
            return mean(-cfg.bc_alpha / size * of_policy(actor) + (apart**2).mean(1))
        if cfg.actor_bc is not None:
            return mean(-of_policy(actor) / size + cfg.actor_bc * (apart**2).sum(1))
        return -mean(of_policy(actor))

    loss, gradient = jax.value_and_grad(actor_loss)(state.params["actor"])
    return {"critic": critic, "actor": adam(state.params["actor"], gradient, cfg.actor_lr)}, mean(target), loss


@pytest.mark.parametrize("flags", some_quick(FLAGS, "TD3+BC"))
def test_one_update_by_hand(flags):
    cfg = dataclasses.replace(BASE, **FLAGS[flags])
    state, batch = start()
    after, aux = update(cfg, state, batch)
    params, target, loss = reference(cfg, state, batch)
    assert_close(dict(after.params), params, atol=2e-6, rtol=3e-5)
    np.testing.assert_allclose(aux.metrics["value/target"], target, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(aux.metrics["loss/policy"], loss, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_scale_of_the_rewards_does_not_matter_to_the_policy():
    """Of a critic ten times as large TD3+BC's first step of the policy is the same."""
    cfg = dataclasses.replace(BASE, bc_alpha=2.5, lr=0.0)
    state, batch = start()
    head = jax.tree.map(lambda x: 10 * x, state.params["critic"]["head"])
    larger = state.replace(params={**state.params, "critic": {**state.params["critic"], "head": head}})
    moved = lambda state: update(cfg, state, batch)[0].params["actor"]
    assert_close(moved(larger), moved(state), atol=1e-6, rtol=1e-4)


def test_what_stands_where_the_data_have_no_next_action_is_not_read():
    cfg = dataclasses.replace(BASE, critic_bc=0.4)
    state, batch = start()
    known = batch.extras[NEXT_ACTION]
    other = jnp.where(known["valid"][:, None], known["action"], jnp.nan)
    spoiled = batch.replace(extras={NEXT_ACTION: {**known, "action": other}})
    assert_same(update(cfg, state, batch), update(cfg, state, spoiled))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"bc_alpha": 1.32}, {"actor_bc": 1 / 1.32}], ids=str)
def test_the_policy_comes_to_where_both_pull_alike(options):
    """Reward 2 + a and data around -0.1: alpha / (2 + a), by Q and its mean size, is 2 (a + 0.1) at a = 0.2."""
    spec = EnvSpec(Box((1,)), Box((1,), low=-1.0, high=1.0), 1)
    algo = td3.make(td3.Config(lr=3e-3, **options), spec, NetworkConfig(hidden=(32, 32)))

    def step(state, key):
        action = jax.random.uniform(key, (64, 1), minval=-0.6, maxval=0.4)
        obs, reward = jnp.ones((64, 1)), 2.0 + action[:, 0]
        batch = Batch(obs, action, reward, jnp.zeros(64), obs, jnp.ones(64), jnp.arange(64))
        return algo.update(state, batch, jax.random.fold_in(key, 1))[0], None

    state, _ = jax.jit(lambda state: jax.lax.scan(step, state, jax.random.split(KEY, 1500)))(fakes.made_up_state(algo))
    act = jax.jit(algo.act, static_argnames="explore")
    action = act(algo.actor(state), jnp.ones((1, 1)), (), KEY, explore=False).action
    np.testing.assert_allclose(action, [[0.2]], atol=0.03)


def test_what_cannot_be_together():
    both = td3.Config(bc_alpha=2.5, actor_bc=0.1).validate()
    assert len(both) == 1
    assert "set bc_alpha (TD3+BC) or actor_bc (ReBRAC), and the other to null" in both[0]
    assert td3.Config(bc_alpha=2.5, critic_bc=0.1).validate() == td3.Config(actor_bc=0.1).validate() == []


def test_a_buffer_without_the_next_action_is_named():
    state, batch = start()
    with pytest.raises(
        InputError, match=r"critic_bc: the batch has no next action.*next_action=True, or set critic_bc"
    ):
        update(dataclasses.replace(BASE, critic_bc=0.4), state, batch.replace(extras={}))


def test_it_reads_what_its_options_need():
    assert td3.Config(bc_alpha=2.5, actor_bc=None).reads == td3.Config(actor_bc=0.5).reads == ()
    assert td3.Config(critic_bc=0.0).reads == (NEXT_ACTION,)
