"""Something that all processes of a run share: a counter that every environment increments, wherever it runs.

    python examples/global_counter.py [ITERATIONS] [NUM_ENV_RUNNERS]

A named Ray actor holds it; environments look it up by its name. Prints the count beside the run's own number of steps.
"""

import sys

import gymnasium
import numpy as np
import ray

from jrl.api import PPOConfig

NAME, NAMESPACE = "global_counter", "jrl-example"


class Counter:
    def __init__(self):
        self.count = 0

    def add(self, n):
        self.count += n

    def get(self):
        return self.count


class Counted(gymnasium.Env):
    """Twenty steps without a task; tells the counter how many it made."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.counter = ray.get_actor(NAME, namespace=NAMESPACE)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if ended := self.steps == 20:
            self.counter.add.remote(self.steps)  # not waited for
        return np.zeros(1, np.float32), 1.0, ended, False, {}


def main(iterations: int = 2, num_env_runners: int = 2) -> tuple[int, int]:
    if not ray.is_initialized():
        ray.init(num_cpus=max(1, num_env_runners) + 1, include_dashboard=False, log_to_driver=False)
    counter = ray.remote(Counter).options(name=NAME, namespace=NAMESPACE, num_cpus=0).remote()
    config = PPOConfig().environment(Counted)
    config.env_runners(num_env_runners=num_env_runners, num_envs=4, rollout_fragment_length=60)
    try:
        with config.build() as algo:
            for _ in range(iterations):
                algo.train()
            counted, steps = ray.get(counter.get.remote()), algo.env_steps
            print(f"the counter says {counted}, the run {steps} steps")
    finally:
        ray.kill(counter)
    return counted, steps


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
