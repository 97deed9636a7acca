"""Actor-critics with memory: what acting said, learning says again; sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import ppo, sequences
from jrl.envs import jax_env, toys
from jrl.fields import hyper
from jrl.networks import NetworkConfig
from jrl.rollout import unroll
from jrl.types import InputError

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
        pytest.param("lru", {"shared": True, "max_seq_len": 4}, marks=pytest.mark.slow),
    ],
)
def test_first_minibatch_says_what_acting_said(core, options):
    network = NetworkConfig(hidden=(8,) if options else (), core=CORES[core], **options)
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


def test_sequences_are_stretches_of_columns():
    x = jnp.arange(6 * 2).reshape(6, 2)
    np.testing.assert_array_equal(sequences.split(x, 3), [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]])


def test_sequences_that_do_not_fit():
    algo = ppo.make(ppo.Config(), env().spec, NetworkConfig(hidden=(8,), core=CORES["gru"], max_seq_len=5))
    with pytest.raises(InputError, match=r"max_seq_len 5 does not divide rollouts of 16 steps: use 4, or .* 20"):
        jax.eval_shape(lambda: algo.update(*collect(algo, env(), 1), jax.random.key(0)))
