"""Exploration of your own: random actions that last (Dabney et al., arXiv:2006.01782).

    python examples/custom_exploration.py [ITERATIONS]

Epsilon-greedy turns at every step, and seldom gets far. Here an exploring agent repeats its random action for a random
number of steps; what it is about to do is the exploration's own state, which begins anew with each episode. Prints
what DQN has learned in a corridor of 16 fields, and what the exploration does to the actions in the first.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from jrl.api import DQNConfig


class Persistent:
    """With probability epsilon, begins to repeat a random action; stops with probability 1 / mean_length per step."""

    def __init__(self, epsilon=0.2, mean_length=8.0):
        self.epsilon, self.mean_length = epsilon, mean_length

    def carry(self, batch_size):
        return jnp.full((batch_size,), -1, jnp.int32)  # the action that is repeated; -1: none

    def __call__(self, q, key, env_steps, carry):
        begin_key, stop_key, action_key = jax.random.split(key, 3)
        random = jax.random.randint(action_key, carry.shape, 0, q.shape[-1])
        begins = (carry < 0) & jax.random.bernoulli(begin_key, self.epsilon, carry.shape)
        repeated = jnp.where(begins, random, carry)
        action = jnp.where(repeated >= 0, repeated, q.argmax(-1))
        stops = jax.random.bernoulli(stop_key, 1.0 / self.mean_length, carry.shape)
        return action, jnp.where(stops, -1, repeated)


def main(iterations: int = 25) -> tuple[int, list[int]]:
    config = (
        DQNConfig()
        .environment("Corridor-v0", env_config={"length": 16}, backend="jax")
        .training(replay_buffer_config={"capacity": 20_000, "updates_per_step": 0.25}, target_update_every=50, lr=1e-3)
        .exploration(exploration_config={"type": Persistent, "mean_length": 8.0})
        .reporting(metrics_num_episodes_for_smoothing=32)
    )
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
        fields = np.stack([np.arange(16), np.full(16, 16)], -1).astype(np.float32)  # position, length
        right = int(algo.compute_actions(fields, explore=False).sum())
        start = np.tile(fields[:1], (1000, 1))
        chosen = np.bincount(algo.compute_actions(start, explore=True), minlength=2).tolist()
    print(f"return {result['episode_return_mean']:.2f}; the best action is right in {right} of 16 fields")
    print("of 1000 first actions, exploring:", dict(zip(("left", "right"), chosen)))
    return right, chosen


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
