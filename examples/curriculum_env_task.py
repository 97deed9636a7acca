"""Curriculum, first way: a function of the latest result gives the next task (`env_task_fn`).

    python examples/curriculum_env_task.py [MAX_ITERATIONS]

A corridor of 48 fields is too long for a random walk; one of 3 is not. Whenever the policy walks well, the corridor
becomes longer. The environment is part of the compiled program, and a new task compiles nothing. Prints the length
after each iteration until the goal is reached and mastered.
"""

import sys

from jrl.api import PPOConfig

GOAL = 48.0
lengths = [3.0]


def longer(result, env, context):
    """The next length; called after each iteration. For environments in Python: once for each of them."""
    if result["episode_return_mean"] > 0.4:
        lengths.append(min(2 * env.get_task(), GOAL))
    return lengths[-1]


def main(max_iterations: int = 100) -> tuple[float, float]:
    lengths[:] = [3.0]
    config = (
        PPOConfig()
        .environment("Corridor-v0", env_config={"length": lengths[0]}, backend="jax", env_task_fn=longer)
        .env_runners(num_envs=16)
        .training(lr=1e-3)
        .reporting(metrics_num_episodes_for_smoothing=32)
    )
    with config.build() as algo:
        for _ in range(max_iterations):
            walked = lengths[-1]
            mean = algo.train()["episode_return_mean"]
            print(f"iteration {algo.iteration}: {walked:.0f} fields, return {mean:.2f}")
            if walked == GOAL and mean > 0.4:
                break
    return walked, mean


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
