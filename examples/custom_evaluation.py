"""An evaluation of your own: the same policy in corridors of length 4 and 7.

    python examples/custom_evaluation.py [ITERATIONS]

The function gets the algorithm and the workers that evaluate, which have the present weights; what it returns stands
under `evaluation` in the result. Prints that.
"""

import sys

import gymnasium
import numpy as np

from jrl.api import PPOConfig


class SimpleCorridor(gymnasium.Env):
    """Walk to the end: actions left and right, the position is observed; 1 at the end, -0.01 per step before."""

    observation_space = gymnasium.spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, config):
        self.length = config["length"]

    def set_length(self, length):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.steps = 0, 0
        return self._seen(), {}

    def step(self, action):
        self.position = max(0, self.position + (1 if action == 1 else -1))
        self.steps += 1
        there = self.position >= self.length
        return self._seen(), 1.0 if there else -0.01, there, self.steps >= 200, {}

    def _seen(self):
        return np.array([self.position], np.float32)


def lengths_4_and_7(algorithm, evaluation_workers):
    found = {}
    for length in (4, 7):
        evaluation_workers.foreach_env(lambda env, length=length: env.set_length(length))
        played = evaluation_workers.play(episodes=10)  # returns [10], lengths [10]
        found[f"length_{length}"] = {"return": played.returns.mean(), "steps": played.lengths.mean()}
    return found


def main(iterations: int = 6) -> list[dict[str, float]]:
    config = (
        PPOConfig()
        .environment(SimpleCorridor, env_config={"length": 5})
        .env_runners(num_envs=8)
        .training(lr=1e-3)
        .evaluation(evaluation_interval=2, custom_evaluation_function=lengths_4_and_7)
    )
    found = []
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
            if algo.iteration % 2 == 0:
                found.append({k: v for k, v in result["evaluation"].items() if k.startswith("length")})
                print(f"iteration {algo.iteration}:", found[-1])
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
