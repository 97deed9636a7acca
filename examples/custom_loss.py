"""A loss of your own: PPO's, and a penalty on large parameters.

    python examples/custom_loss.py [ITERATIONS]

A pure function in the place of the algorithm's loss; `default` is that, at the present values of all schedules. What it
reports stands in the result. Prints the sum of squares of the parameters, with the penalty and without.
"""

import sys

import jax
import jax.numpy as jnp

from jrl.api import PPOConfig


def with_decay(default, net, params, batch):
    value, metrics = default(params, batch)
    squares = sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
    return value + 0.01 * squares, metrics | {"loss/squares": squares}


def main(iterations: int = 10) -> tuple[float, float, float]:
    config = PPOConfig().environment("CartPole-v1", backend="jax").env_runners(num_envs=8).training(lr=1e-3)
    norms = []
    for each in (config, config.copy().training(loss_fn=with_decay)):
        with each.build() as algo:
            for _ in range(iterations):
                result = algo.train()
            params = algo.get_weights()["default_policy"]["params"]
            norms.append(float(sum((x**2).sum() for x in jax.tree.leaves(params))))
    reported = result["learners"]["default_policy"]["loss/squares"]
    print(f"sum of squares: {norms[0]:.1f}, with the penalty {norms[1]:.1f} (reported: {reported:.1f})")
    return norms[0], norms[1], reported


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
