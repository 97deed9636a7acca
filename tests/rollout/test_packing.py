"""`jrl.ops.scans.pack`: a loop that stacks words has the results of one that stacks each array."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import envs
from jrl.algos import ppo
from jrl.fields.hyper import Gru
from jrl.networks import NetworkConfig
from jrl.ops import scans
from jrl.rollout import unroll


def test_each_array_is_the_same_after_a_loop():
    def body(carry, key):
        bits = jax.random.bits(key, (40, 6))
        tree = {
            "floats": [jax.lax.bitcast_convert_type(bits[i], jnp.float32) for i in range(3)],  # NaN and infinities, too
            "whole": bits[3].astype(jnp.int32),
            "flags": tuple(bits[i] % 2 == 0 for i in range(40)),  # more than the bits of a word
            "scalars": (bits[0, 0], bits[0, 1] % 2 == 0),
            "wide": bits[:4].reshape(6, 4),
            "bytes": bits[4].astype(jnp.uint8),
            "none": None,
        }
        return carry, (tree, scans.pack(tree))

    _, (plain, packed) = jax.jit(lambda keys: jax.lax.scan(body, 0, keys))(jax.random.split(jax.random.key(0), 5))
    assert len(jax.tree.leaves(packed)) == 4  # words of [6] and of scalars, and two arrays that are alone
    same = lambda a, b: np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
    jax.tree.map(same, plain, scans.unpack(packed))
    assert jax.tree.map(lambda x: x.dtype, plain) == jax.tree.map(lambda x: x.dtype, scans.unpack(packed))


@pytest.mark.parametrize("id", ["CartPole-v1", "SimpleSpread-v0"])
def test_a_rollout_is_the_same(id):
    """With memory, and with the results of several agents; fused in another way, numbers are rounded differently."""
    env = envs.make(id, num_envs=4, backend="jax")
    algo = ppo.make(ppo.Config(), env.spec, NetworkConfig(hidden=(8,), core=Gru(size=4)))
    actor, found = algo.actor(algo.init(jax.random.key(0))), []
    for packs in (False, True):
        step = unroll.make(env, algo.act, carry=algo.carry, length=40, packs=packs)
        state, out = step.init(jax.random.key(1)), []
        for i in range(2):
            state, *result = jax.jit(step.step)(state, actor, jax.random.key(2 + i))
            out.append(result)
        found.append(jax.device_get((state, out)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *found)
