"""Three learning rates by Ray Tune, each in a process of its own; then the best policy acts.

    python examples/tune_three_learning_rates.py [ITERATIONS]

Tune prints a table of the trials. `pip install "ray[tune]"` is needed.
"""

import sys

import gymnasium

import jrl
from jrl.api import PPOConfig, tune


def main(iterations: int = 10, storage_path: str | None = None) -> tuple[float, float]:
    config = (
        PPOConfig()
        .environment("CartPole-v1", backend="jax")
        .env_runners(num_envs=16, rollout_fragment_length=64)
        .training(lr=tune.grid_search([1e-2, 1e-3, 1e-5]), gamma=0.98)
        .reporting(min_sample_timesteps_per_iteration=8192)
    )
    tuner = tune.Tuner(
        "PPO",
        param_space=config,
        run_config=tune.RunConfig(
            storage_path=storage_path,  # None: ~/ray_results
            stop={"training_iteration": iterations, "env_runners/episode_return_mean": 475},
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
            verbose=1,
        ),
    )
    results = tuner.fit()
    print(results.get_dataframe()[["config/lr", "training_iteration", "episode_return_mean"]])
    best = results.get_best_result(metric="env_runners/episode_return_mean", mode="max")

    policy = jrl.load(best.checkpoint.path)
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=1)
    total, done = 0.0, False
    while not done:
        obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
        total, done = total + float(reward), terminated or truncated
    print(f"the best lr is {best.config['lr']}; an episode of its policy: {total:.0f}")
    return best.config["lr"], total


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
