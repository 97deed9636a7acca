"""One episode with a trained policy, in an environment that is not the run's.

    python examples/one_episode.py [ITERATIONS]

Trains for so many iterations, then plays with `compute_single_action` and prints the episode's return.
"""

import sys

import gymnasium

from jrl.api import PPOConfig


def main(iterations: int = 40) -> float:
    config = PPOConfig().environment("CartPole-v1", backend="jax").env_runners(num_envs=8).training(lr=1e-3)
    with config.build() as algo:
        for _ in range(iterations):
            algo.train()

        env = gymnasium.make("CartPole-v1")
        obs, _ = env.reset(seed=1)
        total, terminated, truncated = 0.0, False, False
        while not (terminated or truncated):
            action = algo.compute_single_action(obs, explore=False)  # the best action; without: as `explore` says
            obs, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
    print("return", total)
    return total


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
