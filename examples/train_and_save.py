"""Ten iterations of PPO, a checkpoint, and three ways to go on from it.

    python examples/train_and_save.py [ITERATIONS]

Prints the mean return after each iteration, where the checkpoint lies, and where each continuation stands.
"""

import sys

import numpy as np

import jrl
from jrl.api import Algorithm, PPOConfig


def main(iterations: int = 10, path: str | None = None) -> list[float]:
    config = PPOConfig().environment("CartPole-v1", backend="jax").env_runners(num_envs=8).training(lr=1e-3)
    returns = []
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
            returns.append(result["episode_return_mean"])
            print(f"iteration {result['training_iteration']}: return {returns[-1]:.1f}")
        path = algo.save(path)
        print("checkpoint:", path)

        algo.train()
        algo.restore(path)  # the same object, back where it was
        print("restored: iteration", algo.iteration)

    with Algorithm.from_checkpoint(path) as again:  # another object, with the config of the checkpoint
        print("from_checkpoint: iteration", again.train()["training_iteration"], "is next")

    policy = jrl.load(path)  # to act only: no environment, no learner
    print("jrl.load: action", policy.act(np.zeros(4, np.float32)))
    return returns


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
