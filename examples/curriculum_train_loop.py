"""Curriculum, third way: the training loop is yours, and so are the environments between two iterations.

    python examples/curriculum_train_loop.py [MAX_ITERATIONS] [NUM_ENV_RUNNERS]

An environment of your own, in Python, with `get_task` and `set_task`. The loop decides; `foreach_env` reaches every
environment wherever it lives, in env runners too. Prints the task and the return of each iteration.
"""

import sys

import gymnasium
import numpy as np

from jrl.api import PPOConfig, TaskSettableEnv


class GuessTheSign(TaskSettableEnv, gymnasium.Env):
    """Say whether a number is positive, ten times; task 0, 1, 2: the numbers become smaller."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    task = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._next(), {}

    def step(self, action):
        reward = float(action == (self.number > 0))
        self.steps += 1
        return self._next(), reward, self.steps == 10, False, {}

    def _next(self):
        self.number = self.np_random.choice([-1.0, 1.0]) * self.np_random.uniform(0.5, 1.0) * 0.3**self.task
        return np.array([self.number], np.float32)


def main(max_iterations: int = 60, num_env_runners: int = 0) -> list[tuple[list[int], float]]:
    config = PPOConfig().environment(GuessTheSign).training(lr=3e-3)
    config.env_runners(num_env_runners=num_env_runners, num_envs=8, rollout_fragment_length=32)
    config.reporting(min_sample_timesteps_per_iteration=256, metrics_num_episodes_for_smoothing=16)
    history = []
    with config.build() as algo:
        for _ in range(max_iterations):
            mean = algo.train()["episode_return_mean"]
            tasks = sorted(set(algo.workers.foreach_env(lambda env: env.get_task())))
            history.append((tasks, mean))
            print(f"iteration {algo.iteration}: task {tasks}, return {mean:.1f} of 10")
            task = tasks[0]
            if mean > 9.0 and task == 2:
                break
            if mean > 9.0:
                harder = lambda env, task=task: env.set_task(task + 1)
                algo.workers.foreach_worker(lambda worker, fn=harder: worker.foreach_env(fn))
    return history


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
