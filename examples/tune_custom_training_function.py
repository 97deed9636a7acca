"""A training function of one's own as a trial of Ray Tune: a curriculum in it, and checkpoints to continue from.

    python examples/tune_custom_training_function.py [ITERATIONS] [NUM_ENV_RUNNERS]

The function decides after each iteration how difficult the environments are, wherever they live. Environment runners
are placed in what the trial has reserved. Prints task and return of each trial.
"""

import sys
import tempfile
from typing import Any

import gymnasium
import numpy as np

from jrl.api import PPOConfig, TaskSettableEnv, tune


class Corridor(TaskSettableEnv, gymnasium.Env):
    """A step to the right is worth 1 where it ends; task 0, 1, 2: the corridor has 3, 6, 12 fields."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    task = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length, self.position, self.steps = 3 * 2**self.task, 0, 0
        return self._seen(), {}

    def step(self, action):
        self.position = max(0, self.position + (1 if action == 1 else -1))
        self.steps += 1
        arrived = self.position == self.length
        return self._seen(), float(arrived), arrived, self.steps >= 3 * self.length, {}

    def _seen(self):
        return np.array([self.position / self.length, self.length / 12], np.float32)


def train_fn(config: dict[str, Any]) -> None:
    settings = PPOConfig().environment(Corridor).update_from_dict(config)
    with settings.build() as algo:
        if checkpoint := tune.get_checkpoint():  # of a trial that was interrupted
            with checkpoint.as_directory() as directory:
                algo.restore(directory)
        task = 0
        while True:  # until Tune's `stop` is met
            result = algo.train()
            if result["episode_return_mean"] > 0.9 and task < 2:
                task += 1
                algo.workers.foreach_worker(
                    lambda worker, task=task: worker.foreach_env(lambda env: env.set_task(task))
                )
            with tempfile.TemporaryDirectory() as directory:
                saved = algo.save(f"{directory}/checkpoint")
                tune.report({**result, "task": task}, checkpoint=tune.Checkpoint.from_directory(saved))


def main(iterations: int = 10, num_env_runners: int = 0, storage_path: str | None = None) -> list[tuple[int, float]]:
    bundles = [{"CPU": 1}] + [{"CPU": 1}] * num_env_runners
    tuner = tune.Tuner(
        tune.with_resources(train_fn, tune.PlacementGroupFactory(bundles)),
        param_space={
            "lr": tune.grid_search([3e-3, 3e-5]),
            "num_env_runners": num_env_runners,
            "num_envs": 8,
            "rollout_fragment_length": 64,
            "metrics_num_episodes_for_smoothing": 30,
        },
        run_config=tune.RunConfig(
            storage_path=storage_path,
            stop={"training_iteration": iterations},
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
            verbose=1,
        ),
    )
    found = []
    for result in tuner.fit():
        found.append((result.metrics["task"], result.metrics["episode_return_mean"]))
        print(f"lr {result.config['lr']:g}: task {found[-1][0]}, return {found[-1][1]:.2f}")
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
