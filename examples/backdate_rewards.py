"""A batch transform between collecting and learning: rewards go back to the actions that earned them.

    python examples/backdate_rewards.py [ITERATIONS]

The environment pays for an action two steps later. A learner that looks one step ahead (gamma 0) cannot see what for,
unless the rollout is rewritten first: a pure function Rollout -> Rollout, compiled into the training program. Prints
the mean return without the transform and with it; 0 is chance, 38 of 40 steps can be paid.
"""

import sys

import jax.numpy as jnp

from jrl.api import PPOConfig, register_env
from jrl.envs.jax_env import Definition
from jrl.types import Box, Discrete

DELAY, STEPS = 2, 40


def late_pay() -> Definition:
    """Say whether the number you see is positive; DELAY steps later you get 1 if you were right, -1 if not."""

    def reset(draws):
        nothing = jnp.zeros_like(draws[0])
        return 2 * draws[0] - 1, [nothing] * DELAY, nothing  # what is seen, what is owed (the oldest first), steps

    def step(state, action, draws):
        seen, owed, steps = state
        owed = [*owed, jnp.where(action == (seen > 0), 1.0, -1.0)]
        return (2 * draws[0] - 1, owed[1:], steps + 1), owed[0], steps + 1 >= STEPS

    return Definition(Box((1,), "float32", -1.0, 1.0), Discrete(2), None, 1, reset, step, lambda s: s[0][:, None])


def backdate(rollout):
    """Rewards [T, B] DELAY rows up, within episodes. What the last rows earned is not known: they are left out."""
    ended, row = rollout.terminated | rollout.truncated, jnp.arange(len(rollout.reward))[:, None]
    reward = rollout.reward
    for _ in range(DELAY):
        following = jnp.concatenate([reward[1:], jnp.zeros_like(reward[:1])])
        reward = jnp.where(ended, 0.0, following)
    known = row < len(row) - DELAY
    cut = (row == len(row) - DELAY - 1) & ~rollout.terminated  # as at a time limit: bootstrap there
    return rollout.replace(reward=reward, mask=rollout.mask & known, truncated=rollout.truncated | cut)


def main(iterations: int = 15) -> dict[str, float]:
    register_env("LatePay", late_pay)
    config = PPOConfig().environment("LatePay", backend="jax").env_runners(num_envs=16)
    config.training(gamma=0.0, gae_lambda=0.0, lr=1e-3)
    found = {}
    for name, each in (("as paid", config), ("backdated", config.copy().training(learner_connector=[backdate]))):
        with each.build() as algo:
            for _ in range(iterations):
                result = algo.train()
        found[name] = result["episode_return_mean"]
        print(f"{name}: return {found[name]:.1f}")
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
