"""PPO as functions: jit, many seeds, many learning rates, many devices. Runs in half a minute on a laptop.

    python examples/functions.py [ITERATIONS]

Prints the mean return of the latest episodes at the end of training: of one seed, of four, of three learning rates, and
of several devices that learn together.
"""

import os
import sys

# two devices on a CPU, for the last part
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp

from jrl.algos import ppo
from jrl.envs import make
from jrl.rollout import unroll

env = make("CartPole-v1", backend="jax", num_envs=16)
config = ppo.Config(lr=2.5e-3, gamma=0.98, gae_lambda=0.9)


def train(key, config=config, iterations=40):
    """Mean return of the latest episodes, after each iteration of 16 x 128 steps."""
    algo = ppo.make(config, env.spec)
    collect = unroll.make(env, algo.act, length=128)

    def iteration(carry, key):
        state, envs = carry
        envs, rollout, episodes = collect.step(envs, algo.actor(state), key)
        state, _ = algo.update(state, rollout, key)
        return (state, envs), jnp.nanmean(episodes.window_return)

    start = (algo.init(key), collect.init(key))
    return jax.lax.scan(iteration, start, jax.random.split(key, iterations))[1]


def on_devices(keys, iterations=20):
    """The algorithm's own update on every device: gradients and statistics are reduced over the axis."""
    algo = ppo.make(config, env.spec, axis_name="d")
    collect = unroll.make(env, algo.act, length=128)
    devices = jax.local_device_count()
    state = jax.tree.map(lambda x: jnp.stack([x] * devices), algo.init(keys[0]))
    envs = jax.vmap(collect.init)(jax.random.split(keys[1], devices))

    def iteration(state, envs, key, update_key):
        envs, rollout, episodes = collect.step(envs, algo.actor(state), key)
        state, _ = algo.update(state, rollout, update_key)
        return state, envs, jnp.nanmean(episodes.window_return)

    step = jax.pmap(iteration, axis_name="d", donate_argnums=(0, 1))
    for i in range(iterations):
        each = jax.random.split(jax.random.fold_in(keys[2], i), devices)
        same = jnp.stack([jax.random.fold_in(keys[3], i)] * devices)  # the shuffle must be the same everywhere
        state, envs, returns = jax.block_until_ready(step(state, envs, each, same))
    return returns


def main(iterations: int = 40) -> dict[str, jax.Array]:
    seeds = jax.random.split(jax.random.key(0), 4)
    rates = ppo.Config(lr=jnp.array([1e-4, 1e-3, 2.5e-3]), gamma=0.98, gae_lambda=0.9)
    along_lr = jax.tree.map(lambda x: 0 if jnp.ndim(x) else None, rates)
    each = lambda key, config=config: train(key, config, iterations)[-1]
    found = {
        "one seed": jax.jit(each)(jax.random.key(0)),
        "four seeds": jax.jit(jax.vmap(each))(seeds),
        "three learning rates": jax.jit(jax.vmap(each, in_axes=(None, along_lr)))(seeds[0], rates),
        f"{jax.local_device_count()} devices": on_devices(seeds, iterations // 2),
    }
    for name, returns in found.items():
        print(name, returns)
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
