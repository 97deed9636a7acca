"""DQN with memory (R2D2): what the update computes against acting and against a plain walk over the rows."""

import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dqn_reference import change, first_adam_step
from fakes import assert_close

from jrl import networks
from jrl.algos import dqn
from jrl.envs.jax_env import Definition, build
from jrl.fields.hyper import Gru
from jrl.networks import NetworkConfig
from jrl.replay import sequences
from jrl.rollout import unroll
from jrl.types import Box, Discrete, element

KEY = jax.random.key(3)
A, B, T, L, K, GAMMA = 3, 2, 7, 6, 3, 0.9
NETWORK = NetworkConfig(hidden=(6,), core=Gru(size=5), shared=True)
BASE = dqn.Config(
    gamma=GAMMA, loss="mse", double=True, max_grad_norm=None, lr=1e-2, adam_eps=1e-2, num_atoms=6, num_quantiles=5
)


@functools.cache
def world():
    """Episodes of 4 steps that end by themselves or at a time limit, with observations at random."""
    definition = Definition(
        observation=Box((2,)),
        action=Discrete(A),
        max_episode_steps=4,
        num_draws=3,
        reset=lambda draws: draws.T,
        step=lambda state, action, draws: (draws.T, draws[0] + action, draws[2] < 0.1),
        observe=lambda state: state[:, :2] - 0.5,
    )
    return build(definition, B)


def setting(cfg=BASE, network=NETWORK, loss=None):
    """(algo, state, rollouts, batch): two rollouts in a ring, and sequences of it across their border and ends."""
    env = world()
    algo = dqn.make(cfg, env.spec, network, loss=loss)
    state = fakes.perturbed(fakes.made_up_state(algo))
    state = state.replace(target_params=fakes.perturbed(fakes.made_up_state(algo, 4), 0.4).params)
    collect = unroll.make(env, algo.act, length=T, carry=algo.carry)
    step = jax.jit(collect.step)
    kept = jax.eval_shape(lambda: algo.carry(1))
    kept = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), kept.memory)
    buffer = sequences.make(
        element(env.spec.observation), element(env.spec.action), capacity=100, num_envs=B, batch_size=4, gamma=GAMMA,
        length=L, burn_in=K, n_step=2, extras={"carry": kept},
    )  # fmt: skip
    where, replay, rollouts = jax.jit(collect.init)(KEY), buffer.init(), []
    for i in range(2):
        where, rollout, _ = step(where, algo.actor(state), jax.random.fold_in(KEY, i))
        rollouts.append(rollout)
        replay = jax.jit(buffer.add)(replay, rollout)
    rollout = jax.tree.map(lambda *x: np.concatenate(x), *rollouts)
    return algo, state, rollout, jax.jit(buffer.sample)(replay, jax.random.key(9))


def net_of(network=NETWORK):
    return networks.build(world().spec, network, {"q": networks.Head(A)})


@jax.jit
def walk(params, carry, obs, reset):
    """(Q [N, M, A], the memory after them) of rows [N, M, *] one after the other, from `carry` [N, *]."""
    net, q = net_of(), []
    for t in range(obs.shape[1]):
        (now,), carry = net.step(params, obs[:, t], carry, "q")
        carry = jax.tree.map(lambda x, t=t: jnp.where(reset[:, t, None], 0.0, x), carry)
        q.append(now)
    return jnp.stack(q, 1), carry


def reference_targets(state, batch):
    """[N, L], double Q-learning from the observation ahead, each network with its own memory."""
    window, target = batch.window, np.zeros(batch.reward.shape)
    q, after = (walk(p, window.carry, window.obs, window.reset)[0][:, K:] for p in (state.params, state.target_params))
    q, after, ahead = np.asarray(q), np.asarray(after), np.asarray(batch.ahead)
    for n in range(target.shape[0]):
        for t in range(L):
            j = ahead[n, t]
            target[n, t] = batch.reward[n, t] + batch.discount[n, t] * after[n, j, np.argmax(q[n, j])]
    return target


def test_the_update_sees_what_acting_saw():
    """Across ends and the border of two rollouts: acting's Q, and that of the update from the memory in the ring."""
    algo, state, rollout, batch = setting()
    obs, memory = rollout.obs.reshape(-1, 2), jax.tree.map(lambda x: x.reshape(-1, 5), rollout.extras["carry"])
    (acted,), _ = jax.jit(lambda *args: net_of().step(*args, "q"))(state.params, obs, memory)
    acted = np.asarray(acted).reshape(2 * T, B, A)
    assert not rollout.mask.all() and rollout.terminated.any() and rollout.truncated.any()

    @jax.jit
    def q_of_each(state, batch):
        one = lambda weight: algo.update(state, batch.replace(weight=weight), KEY)[1].metrics["value/q"] * 4 * L
        return jax.vmap(one)(jnp.eye(4 * L).reshape(-1, 4, L)).reshape(4, L)

    seen, compared, batch = np.asarray(q_of_each(state, batch)), 0, jax.device_get(batch)
    for n in range(4):
        slot, column = divmod(int(batch.index[n]), B)
        for t in range(L):
            if batch.weight[n, t] > 0:
                want = acted[slot + K + t, column, batch.action[n, t]]
                np.testing.assert_allclose(seen[n, t], want, atol=1e-5)
                compared += 1
    assert compared > 12 and batch.window.reset[:, K:].any()
    assert {int(i) // B for i in batch.index} & set(range(1, T))  # some across the border


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_an_update_is_that_of_a_walk_over_the_rows(loss):
    """Targets by the two networks' own memories; no gradient goes back into the burn-in."""
    cfg = change(BASE, loss=loss)
    algo, state, _, batch = setting(cfg)
    target = reference_targets(state, batch)
    window, rows = batch.window, slice(K, -1)
    # the memory that the online network has after the burn-in, as a constant
    _, warm = walk(state.params, window.carry, window.obs[:, :K], window.reset[:, :K])

    def value(params):
        q, _ = walk(params, warm, window.obs[:, rows], window.reset[:, rows])
        q = jnp.take_along_axis(q, batch.action[..., None], 2)[..., 0]
        error = jnp.abs(q - jnp.asarray(target, jnp.float32))
        distance = 0.5 * error**2 if loss == "mse" else jnp.where(error <= 1, 0.5 * error**2, error - 0.5)
        return jnp.mean(batch.weight * distance), error

    (loss_value, error), gradient = jax.value_and_grad(value, has_aux=True)(state.params)
    after, aux = jax.jit(algo.update)(state, batch, KEY)
    np.testing.assert_allclose(aux.metrics["loss/value"], loss_value, rtol=1e-4)
    assert_close(after.params, first_adam_step(cfg, state.params, gradient), atol=2e-5)
    live = np.asarray(batch.weight) > 0
    rows = [np.asarray(error[n])[live[n]] for n in range(4)]
    np.testing.assert_allclose(aux.priority, [0.9 * e.max() + 0.1 * e.mean() for e in rows], rtol=1e-4)
