"""Mirror images of CartPole and Pendulum, for `algo.symmetry` of PPO.

    python -m jrl.train configs/ppo.yaml --set "algo.symmetry={path: examples.symmetry:cartpole}"
    python examples/symmetry.py [ITERATIONS]

Prints what PPO has learned on Pendulum-v1 with both kinds of symmetry: the return, and the squared error between the
policy's action for a mirror image and the mirror image of its action.
"""

import sys

import jax.numpy as jnp

from jrl import registry
from jrl.api import PPOConfig


def cartpole(obs, action):
    """Left becomes right: position, velocity, angle and angular velocity change sign."""
    return -obs, 1 - action


def pendulum(obs, action):
    """Clockwise becomes anticlockwise: sine, speed and torque change sign, and the cosine of the angle stays."""
    return jnp.stack([obs[:, 0], -obs[:, 1], -obs[:, 2]], 1), -action


def main(iterations: int = 40) -> tuple[float, float]:
    symmetry = {"path": registry.reference(pendulum), "mirror_loss": 0.1}
    config = (
        PPOConfig()
        .environment("Pendulum-v1", backend="jax")
        .env_runners(num_envs=16, rollout_fragment_length=128)
        .training(symmetry=symmetry, lr=1e-3, gamma=0.9, num_epochs=10, num_minibatches=16)
    )
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
    mean_return, error = result["episode_return_mean"], result["learners"]["default_policy"]["loss/mirror"]
    print(f"return {mean_return:.0f}, mirror loss {error:.2g}")
    return mean_return, error


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
