"""The weights of the policy and of each worker; copied into another run.

    python examples/weights.py [NUM_ENV_RUNNERS]

With env runners (Ray) there is a worker per runner, and each has the weights that it was called with last.
Prints what the weights are made of, how many workers there are, and that the copy answers as the original.
"""

import sys

import jax
import numpy as np

from jrl.api import PPOConfig


def main(num_env_runners: int = 0) -> tuple[list[int], bool]:
    config = PPOConfig().environment("CartPole-v1", backend="jax").training(lr=1e-3)
    config.env_runners(num_env_runners=num_env_runners, num_envs=8)
    another = config.copy().env_runners(num_env_runners=0).debugging(seed=1)
    with config.build() as algo, another.build() as other:
        algo.train()
        weights = algo.get_policy().get_weights()  # the same as algo.get_weights()["default_policy"]
        print("fields:", ", ".join(weights))
        print("numbers:", sum(x.size for x in jax.tree.leaves(weights["params"])))

        of_workers = algo.workers.foreach_worker(lambda worker: worker.get_weights()["default_policy"])
        indices = algo.workers.foreach_worker_with_index(lambda worker, index: index)
        same = all(
            np.array_equal(mine, its)
            for found in of_workers
            for mine, its in zip(jax.tree.leaves(weights["params"]), jax.tree.leaves(found["params"]))
        )
        print("workers:", indices, "with the same weights:", same)

        other.set_weights(algo.get_weights())
        obs = np.array([[0.1, 0.2, 0.3, 0.4]], np.float32)
        alike = np.array_equal(algo.get_policy().value_function(obs), other.get_policy().value_function(obs))
        print("the copy says the same:", alike)
    return indices, same and alike


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
