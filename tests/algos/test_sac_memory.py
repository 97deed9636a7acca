"""SAC and TD3 with memory: against one step after the other, and what a gradient reaches."""

import dataclasses
import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import assert_close, rollouts

from jrl import networks
from jrl.algos import critics, observer, sac, td3
from jrl.fields import hyper
from jrl.networks import Head, NetworkConfig
from jrl.networks.critics import build_critics
from jrl.ops.exploration import allowed
from jrl.rollout.unroll import reset_where
from jrl.types import Box, Dict, Discrete, EnvSpec, SequenceBatch, Window

KEY = jax.random.key(3)
T, B = fakes.STEPS, fakes.COLUMNS
K, L = 2, 6
BOX = Box((2,), low=-1.0, high=1.0)
NETWORK = NetworkConfig(hidden=(8,), core=hyper.Gru(size=6))
MASKED = EnvSpec(Dict((("obs", Box((3,))), ("action_mask", Box((3,), "int8", 0, 1)))), Discrete(3), B)
CONTINUOUS = EnvSpec(Box((3,)), BOX, B)
SPECS = {"sac": MASKED, "td3": CONTINUOUS}
MODULES = {"sac": sac, "td3": td3}
slow = pytest.mark.slow


def sequences(made, first=T - K - 3):
    """A SequenceBatch of consecutive rollouts, one sequence for each column, over their border: K + L + 1 rows."""
    obs, action, reward, terminated, mask, carry = (
        jax.tree.map(lambda *x: np.concatenate(x), *parts)
        for parts in zip(
            *((r.obs, r.action, r.reward, r.terminated, r.mask, r.extras["carry"]) for r in made), strict=True
        )
    )
    rows = lambda tree, start, count: jax.tree.map(
        lambda x: jnp.asarray(np.swapaxes(x[start : start + count], 0, 1)), tree
    )
    window = Window(
        rows(obs, first, K + L + 1),
        jax.tree.map(lambda x: jnp.asarray(x[first]), carry),
        ~rows(mask, first, K + L + 1),
    )
    learned = lambda tree: rows(tree, first + K, L)
    weight = learned(mask).astype(jnp.float32)
    assert 0 < int((weight == 0).sum()) < weight.size / 2
    assert window.reset[:, :K].any()
    # some bootstrap from the next row but one, as of n steps
    ahead = jnp.minimum(jnp.arange(1, L + 1) + (jnp.arange(L) % 3 == 0), L)
    return SequenceBatch(
        window=window,
        action=learned(action),
        reward=learned(reward),
        discount=0.9 * (1.0 - learned(terminated)),
        ahead=jnp.broadcast_to(ahead[None], (B, L)).astype(jnp.int32),
        weight=weight / weight.mean(),
        index=jnp.arange(B),
    ), learned(carry)


def setting(name, spec=None, explore=True, network=NETWORK, loss=None, **overrides):
    """(algo, state, SequenceBatch, memory before each of its L rows [B, L, ...])"""
    spec, module = spec or SPECS[name], MODULES[name]
    algo = module.make(module.Config(**{"adam_eps": 1.0, "lr": 0.1, **overrides}), spec, network, loss=loss)
    state = fakes.perturbed(fakes.made_up_state(algo))
    return algo, state, *sequences(rollouts(algo, spec, algo.actor(state), explore=explore))


def policy_of(name, spec):
    watch = observer.make(spec, NETWORK, normalize_obs=False, axis_name=None)
    return MODULES[name].policy_network(watch, NETWORK)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sac", "td3"])
def test_learning_sees_what_acting_saw(name):
    """Across ends, the border of rollouts and the burn-in: memory and actions."""
    algo, state, batch, stored = setting(name, explore=False)
    assert algo.sequences
    policy = policy_of(name, SPECS[name])
    window = critics.policy_reads(policy, state.params["actor"], batch.window, K)
    start = jax.tree.map(lambda x: x[:, 0], stored)
    assert_close(window.carry, {"policy_torso": start["policy_torso"]}, atol=1e-5)
    chosen = jax.jit(policy.apply)(state.params["actor"], window)
    chosen = chosen.mode() if name == "sac" else chosen
    np.testing.assert_allclose(chosen[:, :L], batch.action, atol=1e-5)
    forgotten = dataclasses.replace(window, carry=jax.tree.map(jnp.zeros_like, window.carry))
    outputs = jax.jit(lambda window: jax.tree.leaves(policy.apply(state.params["actor"], window))[0])
    assert np.abs(outputs(forgotten) - outputs(window)).max() > 1e-3


@pytest.mark.slow
def test_targets_are_those_of_one_step_after_the_other():
    """Discrete SAC with masks: policy from the stored memory, critics from an episode's start K rows before."""
    seen = {}

    def loss(default, net, params, batch):
        assert batch.next_obs == ()
        q = jax.lax.stop_gradient(net.apply(params, batch.obs))
        jax.debug.callback(lambda target, q: seen.update(target=target, q=q), batch.target, q)
        return default(params, batch)

    algo, state, batch, _ = setting("sac", loss=loss)
    jax.block_until_ready(jax.jit(algo.update)(state, batch, KEY))
    jax.effects_barrier()
    net = {name: networks.build(MASKED, NETWORK, {name: Head(3)}) for name in ("policy", "value")}
    step = {name: jax.jit(lambda p, o, c, name=name: net[name].step(p, o, c, name)) for name in net}

    def by_hand(name, params, memory):
        """Outputs [B, L + 1, 3] behind the burn-in."""
        out = []
        for t in range(K + L + 1):
            (y,), memory = step[name](params, jax.tree.map(lambda x, t=t: x[:, t], batch.window.obs), memory)
            out.append(y)
            memory = reset_where(batch.window.reset[:, t], net[name].carry(B), memory)
        return np.stack(out[K:], 1).astype(np.float64)

    mask = np.asarray(allowed(batch.window.obs["action_mask"] != 0))[:, K:]
    outputs = by_hand("policy", state.params["actor"], batch.window.carry)
    prob = np.where(mask, np.exp(outputs), 0)
    prob /= prob.sum(-1, keepdims=True)
    log_prob = np.log(np.where(mask, prob, 1))
    each = lambda params: np.stack(
        [by_hand("value", jax.tree.map(lambda x, i=i: x[i], params), net["value"].carry(B)) for i in range(2)]
    )
    temperature = float(jnp.exp(state.params["log_ent_coef"]))
    soft = (prob * (each(state.target_params["critic"]).min(0) - temperature * log_prob)).sum(-1)
    valid = np.asarray(batch.weight) > 0
    want = batch.reward + batch.discount * np.take_along_axis(soft, np.asarray(batch.ahead), 1)
    np.testing.assert_allclose(seen["target"][valid], want[valid], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(seen["q"], each(state.params["critic"])[:, :, :L], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_no_gradient_goes_back_into_the_burn_in():
    """A memory that came of parameters is a constant; the rows that are learned from are not."""
    spec = CONTINUOUS
    critic = build_critics(spec, NETWORK, 2)
    policy = policy_of("td3", spec)
    obs = jax.random.normal(KEY, (3, 4, 3))
    window = Window(obs, policy.carry(3), jnp.zeros((3, 4), bool))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def gradient(net, read, params):
        total = lambda params: sum(x.sum() for x in jax.tree.leaves(read(net, params, window, 2).carry))
        return jax.value_and_grad(total)(params)

    for net, read in ((policy, critics.policy_reads), (critic, critics.critics_read)):
        value, zeros = gradient(net, read, net.init(KEY))
        assert abs(float(value)) > 0
        assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(zeros))


def test_priorities_are_of_sequences():
    """0.9 of the greatest error and 0.1 of the mean one over rows that are not void."""
    x, weight = jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[1.5, 0.0, 1.5]])
    window = Window(x[..., None], (), weight == 0)
    batch = critics.Sequences(
        window, x, x, x, window, weight, jnp.zeros(1, jnp.int32), ahead=jnp.zeros((1, 3), jnp.int32)
    )
    q = lambda a, batch: a * batch.obs.obs[None, ..., 0]
    gradient, metrics, priority = critics.td_gradient(q, jnp.float32(2.0), batch, jnp.array([[1.0, 0.0, 9.0]]), None)
    np.testing.assert_allclose(priority, [0.9 * 3 + 0.1 * 2])  # errors 1, void, -3
    np.testing.assert_allclose(metrics["loss/value"], 0.5 * (1.5 * 1 + 1.5 * 9) / 3)
    np.testing.assert_allclose(gradient, (1.5 * 1 * 1 - 1.5 * 3 * 3) / 3)
