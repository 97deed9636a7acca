"""Several callbacks in one run, called in the order in which they are named.

    python examples/several_callbacks.py [ITERATIONS]

`callbacks([A, B])` does the same as `callbacks(make_multi_callbacks([A, B]))`. Prints the result's own entries: the
second class reads what the first has written.
"""

import sys

from jrl.api import Callbacks, PPOConfig, make_multi_callbacks


class Best(Callbacks):
    """The best episode so far."""

    def on_algorithm_init(self, *, algorithm, **kwargs):
        self.best = 0.0

    def on_train_result(self, *, result, **kwargs):
        self.best = max(self.best, result["episode_return_max"])
        result["best_return"] = self.best


class Gap(Callbacks):
    """How far the mean is from it."""

    def on_train_result(self, *, result, **kwargs):
        result["gap_to_best"] = result["best_return"] - result["episode_return_mean"]


def main(iterations: int = 3) -> list[tuple[float, float]]:
    config = PPOConfig().environment("CartPole-v1", backend="jax").env_runners(num_envs=8).training(lr=1e-3)
    config.callbacks(make_multi_callbacks([Best, Gap]))
    rows = []
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
            rows.append((result["best_return"], result["gap_to_best"]))
            print(f"best {rows[-1][0]:.0f}, the mean is {rows[-1][1]:.1f} below")
    return rows


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
