"""Curriculum, second way: a callback changes the environments when a result is there.

    python examples/curriculum_callback.py [MAX_ITERATIONS]

As curriculum_env_task.py, with levels instead of a formula. Prints the level of each iteration until the last is
mastered.
"""

import sys

from jrl.api import Callbacks, PPOConfig

LENGTHS = (3.0, 6.0, 12.0, 24.0, 48.0)


class Levels(Callbacks):
    def on_algorithm_init(self, *, algorithm, **kwargs):
        self.level = 0
        algorithm.set_task(LENGTHS[0])

    def on_train_result(self, *, algorithm, result, **kwargs):
        result["level"] = self.level
        if result["episode_return_mean"] > 0.4 and self.level < len(LENGTHS) - 1:
            self.level += 1
            algorithm.set_task(LENGTHS[self.level])


def main(max_iterations: int = 100) -> tuple[int, float]:
    config = (
        PPOConfig()
        .environment("Corridor-v0", backend="jax")
        .env_runners(num_envs=16)
        .training(lr=1e-3)
        .callbacks(Levels)
        .reporting(metrics_num_episodes_for_smoothing=32)
    )
    with config.build() as algo:
        for _ in range(max_iterations):
            result = algo.train()
            level, mean = result["level"], result["episode_return_mean"]
            print(f"iteration {algo.iteration}: {LENGTHS[level]:.0f} fields, return {mean:.2f}")
            if level == len(LENGTHS) - 1 and mean > 0.4:
                break
    return level, mean


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
