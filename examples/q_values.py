"""The Q values of a DQN.

    python examples/q_values.py [ITERATIONS]

Prints Q of each action and the value of a state (that of its best action), and the parameters of a dueling network.
"""

import sys

import numpy as np

from jrl.api import DQNConfig


def main(iterations: int = 10) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    config = (
        DQNConfig()
        .environment("CartPole-v1", backend="jax")
        .training(dueling=True, double=True, replay_buffer_config={"capacity": 10_000})
    )
    with config.build() as algo:
        for _ in range(iterations):
            algo.train()
        policy = algo.get_policy()
        obs = np.array([[0.1, 0.2, 0.3, 0.4], [0.0, 0.0, -0.1, 0.0]], np.float32)
        q = policy.q_values(obs)  # [N, actions]
        print("Q:", *(f"{left:.2f} {right:.2f}" for left, right in q), sep="  ")
        print("state value:", policy.value_function(obs))
        greedy = algo.compute_actions(obs, explore=False)
        print("greedy actions:", greedy)
        print(policy.summary())
        return q, policy.value_function(obs), greedy


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
