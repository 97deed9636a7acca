"""A metric of your own: how far the pole leans, on average over each episode.

    python examples/custom_metric.py [ITERATIONS]

The environment steps inside a compiled program; its episodes are replayed to the callbacks. Prints mean, min and max
over the episodes of each iteration, as they stand in the result and in all logs.
"""

import sys

import numpy as np

from jrl.api import Callbacks, PPOConfig


class PoleAngle(Callbacks):
    def on_episode_start(self, *, episode, **kwargs):
        episode.user_data["angles"] = []

    def on_episode_step(self, *, episode, **kwargs):
        episode.user_data["angles"].append(abs(episode.last_obs[2]))  # radians

    def on_episode_end(self, *, episode, **kwargs):
        episode.custom_metrics["pole_angle"] = np.mean(episode.user_data["angles"])


def main(iterations: int = 3) -> list[dict[str, float]]:
    config = (
        PPOConfig()
        .environment("CartPole-v1", backend="jax")
        .env_runners(num_envs=8)
        .training(lr=1e-3)
        .callbacks(PoleAngle)
    )
    rows = []
    with config.build() as algo:
        for _ in range(iterations):
            rows.append(algo.train()["custom_metrics"])
            print(", ".join(f"{name} {value:.4f}" for name, value in rows[-1].items()))
    return rows


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
