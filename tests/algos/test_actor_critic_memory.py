"""Actor-critics with memory: what acting said, learning says again; sequences, chunks, devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import actor_critic, ppo, sequences
from jrl.algos.agent import split_carry
from jrl.envs import jax_env, toys
from jrl.fields import hyper
from jrl.networks import NetworkConfig
from jrl.rollout import unroll
from jrl.types import InputError, Window

CORES = {
    "lstm": hyper.Lstm(size=8),
    "gru": hyper.Gru(size=8),
    "gtrxl": hyper.Gtrxl(size=8, layers=2, heads=2, head_size=4, memory=5, mlp=8),
    "lru": hyper.Lru(size=8, state=4, layers=2),
}
STEPS, ENVS = 16, 4


def env(num_envs=ENVS, **options):
    """Episodes end all the time, by a true end and by the limit of 9 steps."""
    definition = toys.stateless_cartpole()._replace(max_episode_steps=9)
    return jax_env.build(definition, num_envs)


def collect(algo, world, rollouts, key=None):
    """(state, the last of several rollouts in a row): it begins within episodes."""
    unrolled = unroll.make(world, algo.act, length=STEPS, carry=algo.carry)
    key = jax.random.key(0) if key is None else key
    state, where = jax.jit(algo.init)(key), jax.jit(unrolled.init)(key)
    # a policy that is not nearly the same everywhere
    head = jax.tree.map(lambda x: 100.0 * x, state.params["policy_head"])
    state = state.replace(params={**state.params, "policy_head": head})
    step = jax.jit(unrolled.step)
    for i in range(rollouts):
        where, rollout, _ = step(where, algo.actor(state), jax.random.fold_in(key, i))
    return state, rollout


def gap(default, net, params, rows):
    """How far the log-probability of the learner is from the one that was stored."""
    value, metrics = default(params, rows)
    dist, _ = net.apply(params, rows.obs)
    away = jnp.abs(dist.log_prob(rows.action) - rows.log_prob)
    return value, metrics | {"gap": jnp.max(jnp.where(rows.weight > 0, away, 0.0))}


@pytest.mark.parametrize(
    ("core", "options"),
    [
        ("lstm", {}),
        pytest.param("gtrxl", {"max_seq_len": 8}, marks=pytest.mark.slow),
        pytest.param("lstm", {"shared": True, "max_seq_len": 4}, marks=pytest.mark.slow),
        pytest.param("gru", {"max_seq_len": 8}, marks=pytest.mark.slow),
        pytest.param("lru", {}, marks=pytest.mark.slow),
    ],
)
def test_first_minibatch_says_what_acting_said(core, options):
    network = NetworkConfig(hidden=(8,), core=CORES[core], **options)
    cfg = ppo.Config(num_epochs=1, num_minibatches=1)
    algo = ppo.make(cfg, env().spec, network, loss=gap)
    state, rollout = collect(algo, env(), 3)
    assert (~rollout.mask).sum() > 3 and rollout.truncated.any() and rollout.terminated.any()
    assert any(np.abs(x).max() > 0 for x in jax.tree.leaves(rollout.carry))  # it begins within episodes
    _, aux = jax.jit(algo.update)(state, rollout, jax.random.key(1))
    assert float(aux.metrics["gap"]) < 1e-5
    # and it is no accident: with another memory before the rollout, they differ
    lost = rollout.replace(carry=algo.carry(ENVS))
    _, aux = jax.jit(algo.update)(state, lost, jax.random.key(1))
    assert float(aux.metrics["gap"]) > 1e-4


@pytest.mark.slow
def test_values_are_those_of_single_steps():
    network = NetworkConfig(hidden=(8,), core=CORES["gru"], max_seq_len=4)
    cfg = ppo.Config(normalize_obs=True)
    world = env()
    agent = actor_critic.make_agent(cfg, world.spec, network, axis_name=None)
    algo = ppo.make(cfg, world.spec, network)
    state, rollout = collect(algo, world, 2)
    value, starts = jax.jit(functools.partial(actor_critic.values, agent))(state, rollout)
    step = jax.jit(
        lambda state, obs, memory: agent.net.step(state.params, agent.observer.see(state.obs_stats, obs), memory)
    )
    memory, fresh = split_carry(rollout.carry)[0], agent.net.carry(ENVS)
    obs = [*np.asarray(rollout.obs), rollout.last_obs]
    for t in range(STEPS + 1):
        if t % 4 == 0 and t < STEPS:
            for mine, theirs in zip(jax.tree.leaves(memory), jax.tree.leaves(starts), strict=True):
                np.testing.assert_allclose(mine, theirs[t // 4], atol=1e-6)
        _, expected, memory = step(state, obs[t], memory)
        np.testing.assert_allclose(value[t], expected, atol=1e-5)
        if t < STEPS:
            memory = unroll.reset_where(~rollout.mask[t], fresh, memory)


def test_sequences_are_stretches_of_columns():
    x = jnp.arange(6 * 2).reshape(6, 2)
    np.testing.assert_array_equal(sequences.split(x, 3), [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]])


def test_sequences_that_do_not_fit():
    algo = ppo.make(ppo.Config(), env().spec, NetworkConfig(hidden=(8,), core=CORES["gru"], max_seq_len=5))
    with pytest.raises(InputError, match=r"max_seq_len 5 does not divide rollouts of 16 steps: use 4, or .* 20"):
        jax.eval_shape(lambda: algo.update(*collect(algo, env(), 1), jax.random.key(0)))


def test_a_network_with_memory_wants_windows():
    world = env()
    net = actor_critic.make_agent(
        ppo.Config(), world.spec, NetworkConfig(hidden=(8,), core=CORES["gru"]), axis_name=None
    ).net
    params = jax.eval_shape(net.init, jax.random.key(0))
    with pytest.raises(TypeError, match="Window"):
        jax.eval_shape(net.apply, params, np.zeros((3, 2), np.float32))
    window = Window(np.zeros((3, 5, 2), np.float32), net.carry(3), np.zeros((3, 5), bool))
    dist, value = jax.eval_shape(net.apply, params, window)
    assert dist.logits.shape == (3, 5, 2) and value.shape == (3, 5)
