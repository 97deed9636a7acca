"""Values that learn before the policy does: for a policy that was trained elsewhere."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import appo, ppo
from jrl.errors import InputError
from jrl.networks import NetworkConfig
from jrl.rollout import unroll
from jrl.types import Algo


@pytest.fixture(scope="module")
def env():
    from jrl import envs

    return envs.make("CartPole-v1", backend="jax", num_envs=4)


def learned(algo: Algo, env, updates: int):
    """The States after each of so many updates on rollouts of the policy as it is."""
    collect = unroll.make(env, algo.act, length=8, carry=algo.carry)
    source, state, found = collect.init(jax.random.key(1), 0), algo.init(jax.random.key(0)), []
    step, update = jax.jit(collect.step), jax.jit(algo.update)
    for i in range(updates):
        source, rollout, _ = step(source, algo.actor(state), jax.random.key(i), 0)
        state, _ = update(state, dataclasses.replace(rollout, count=None), jax.random.key(i))
        found.append(state)
    return found


def of_policy(state):
    """Parameters that the policy reads, and those that it does not."""
    named = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(state.params)}
    return ({k: x for k, x in named.items() if "value" not in k}, {k: x for k, x in named.items() if "value" in k})


@pytest.mark.parametrize("module", [ppo, appo])
def test_the_policy_begins_to_learn_after_the_value(module, env):
    cfg = module.Config(policy_after=2, num_epochs=2, num_minibatches=2, ent_coef=0.01, lr=1e-3)
    first = module.make(cfg, env.spec, NetworkConfig(hidden=(8,))).init(jax.random.key(0))
    one, two, three = learned(module.make(cfg, env.spec, NetworkConfig(hidden=(8,))), env, 3)
    (policy, value), (policy_1, value_1), (policy_2, _), (policy_3, value_3) = map(of_policy, (first, one, two, three))
    assert policy and value
    jax.tree.map(np.testing.assert_array_equal, (policy, policy), (policy_1, policy_2))
    assert all(np.any(value[k] != value_1[k]) for k in value)
    # no step of the first four, which Adam takes whole, is longer than the step size
    moved = max(float(jnp.abs(policy_3[k] - policy[k]).max()) for k in policy)
    assert 0 < moved <= 4 * 1e-3 * 1.01
    assert all(np.any(value_1[k] != value_3[k]) for k in value)


def test_without_it_the_policy_learns_at_once(env):
    learn = functools.partial(ppo.make, spec=env.spec, network=NetworkConfig(hidden=(8,)))
    first, (one,) = learn(ppo.Config()).init(jax.random.key(0)), learned(learn(ppo.Config()), env, 1)
    assert any(np.any(a != b) for a, b in zip(*(jax.tree.leaves(of_policy(s)[0]) for s in (first, one)), strict=True))


def test_a_shared_torso_is_refused(env):
    with pytest.raises(InputError, match="policy_after"):
        ppo.make(ppo.Config(policy_after=1), env.spec, NetworkConfig(shared=True))
