"""What a policy thinks of an observation: its action distribution and its value; and the parameters behind that.

    python examples/action_distribution.py

Prints samples, probabilities and values of two observations, and the parameter table.
"""

import jax
import numpy as np

from jrl.api import PPOConfig


def main() -> dict[str, np.ndarray]:
    config = PPOConfig().environment("CartPole-v1", backend="jax").env_runners(num_envs=8).training(lr=1e-3)
    with config.build() as algo:
        algo.train()
        policy = algo.get_policy()
        obs = np.array([[0.1, 0.2, 0.3, 0.4], [0.0, 0.0, -0.1, 0.0]], np.float32)  # a batch: [N, *]

        dist = policy.distribution(obs)
        print("distribution:", policy.dist_class.__name__)
        actions = dist.sample(jax.random.key(0))
        log_probs = np.stack([dist.log_prob(np.full(len(obs), a)) for a in range(2)], -1)
        print("sampled:", actions, "most likely:", dist.mode(), "entropy:", dist.entropy())
        print("probabilities:", *(f"{left:.3f} {right:.3f}" for left, right in np.exp(log_probs)), sep="  ")
        print("value:", policy.value_function(obs))
        print(policy.summary())
        return {"actions": np.asarray(actions), "probabilities": np.exp(log_probs)}


if __name__ == "__main__":
    main()
