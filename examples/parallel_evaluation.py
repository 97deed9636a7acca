"""Evaluation beside training: ten episodes with the best actions, while the next iteration is under way.

    python examples/parallel_evaluation.py [ITERATIONS]

`weights_version` counts the iterations whose updates the evaluated weights have seen: one less than the row's.
Prints both returns, and the version.
"""

import sys

from jrl.api import PPOConfig


def main(iterations: int = 5) -> list[tuple[int, dict[str, float]]]:
    config = PPOConfig().environment("CartPole-v1", backend="jax").env_runners(num_envs=8).training(lr=1e-3)
    config.evaluation(
        evaluation_interval=1,
        evaluation_duration=10,
        evaluation_duration_unit="episodes",
        evaluation_parallel_to_training=True,
        evaluation_config=config.overrides(explore=False),
    )
    rows = []
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
            found = result["evaluation"]
            rows.append((result["training_iteration"], found))
            print(
                f"iteration {result['training_iteration']}: training {result['episode_return_mean']:.1f}, evaluation "
                f"{found['episode_return_mean']:.1f} over {found['num_episodes']} episodes of weights "
                f"{found['weights_version']}"
            )
    return rows


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
