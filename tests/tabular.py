"""Decision processes of a few states, whose values a linear solve gives, and episodes that are played in them."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

GAMMA = 0.9


class Process(NamedTuple):
    """A decision process of S states and A actions with two policies."""

    begin: np.ndarray  # [S], the first state
    move: np.ndarray  # [S, A, S], sums to the probability that the episode goes on
    reward: np.ndarray  # [S, A], mean
    pi: np.ndarray  # [S, A]
    mu: np.ndarray  # [S, A]


def values(process, policy):
    """Q [S, A] and V [S] of a policy, by a linear solve."""
    step = np.einsum("sa,sat->st", policy, process.move)
    v = np.linalg.solve(np.eye(len(step)) - GAMMA * step, (policy * process.reward).sum(1))
    return process.reward + GAMMA * process.move @ v, v


def chain():
    """Three states at random; an end at each step with probability 0.2."""
    rng = np.random.default_rng(0)
    pi, mu = ([[p, 1 - p] for p in first] for first in ((0.65, 0.55, 0.5), (0.5, 0.4, 0.6)))
    move = 0.8 * rng.dirichlet([1.0] * 3, (3, 2))
    return Process(np.array([0.5, 0.3, 0.2]), move, rng.normal(size=(3, 2)), np.array(pi), np.array(mu))


@functools.partial(jax.jit, static_argnums=(2, 3))
def played(process, key, num_episodes, steps):
    """Episodes of mu, padded: states [E, T + 1], actions, rewards, mask and log ratios [E, T]; all end truly but for
    a share of 1e-5 or less."""
    first, key = jax.random.split(key)
    going = process.move.sum(-1)

    def step(carry, key):
        state, alive = carry
        keys = jax.random.split(key, 4)
        action = jax.random.categorical(keys[0], jnp.log(process.mu)[state])
        reward = process.reward[state, action] + 0.5 * jax.random.normal(keys[1], state.shape)
        goes_on = jax.random.uniform(keys[2], state.shape) < going[state, action]
        after = jax.random.categorical(keys[3], jnp.log(process.move)[state, action])
        ratio = jnp.log(process.pi / process.mu)[state, action]
        return (jnp.where(goes_on, after, state), alive & goes_on), (state, action, reward, alive, ratio)

    begin = jax.random.categorical(first, jnp.log(process.begin), shape=(num_episodes,))
    (last, _), rows = jax.lax.scan(step, (begin, jnp.ones(num_episodes, bool)), jax.random.split(key, steps))
    state, action, reward, mask, ratio = (x.T for x in rows)
    return jnp.concatenate([state, last[:, None]], 1), action, reward, mask, ratio


def as_jax(process):
    return Process(*(jnp.asarray(x, jnp.float32) for x in process))
