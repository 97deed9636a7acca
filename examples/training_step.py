"""A training step of your own: PPO that goes on with a rollout until the policy has moved.

    python examples/training_step.py [ITERATIONS]

`step.sample()` collects with the state as it is, `step.learn(rollout)` is one step of the learner; the method decides
what is called how often. Prints how often each rollout was learned from, and the return.
"""

import sys

from jrl.api import PPO, PPOConfig


class Persistent(PPO):
    def training_step(self, step):
        rollout, passes = step.sample(), 0
        moved = 0.0
        while moved < 0.01 and passes < 5:
            moved = float(step.learn(rollout)["policy/approx_kl"])  # from the policy that collected
            passes += 1
        step.metrics["train/passes"] = passes


def main(iterations: int = 15) -> tuple[list[float], float]:
    config = PPOConfig(algo_class=Persistent).environment("CartPole-v1", backend="jax")
    config.env_runners(num_envs=8).training(lr=1e-3)
    passes = []
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
            passes.append(result["learners"]["default_policy"]["train/passes"])
            print(f"{passes[-1]:.0f} passes, return {result['episode_return_mean']:.1f}")
    return passes, result["episode_return_mean"]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
