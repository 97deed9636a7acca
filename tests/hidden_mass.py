"""Pendulum-v1 with a mass that each episode draws: item `task` of the observation, for a teacher."""

import jax.numpy as jnp

from jrl.envs import classic
from jrl.envs.jax_env import Definition
from jrl.types import Box, Dict

LOW, HIGH = 0.5, 2.0  # kg


def pendulum() -> Definition:
    """A mass from 0.5 to 2 kg divides the torque; `task` is the mass, scaled to [-1, 1]."""
    plain = classic.pendulum()

    def step(state, action, draws):
        *own, mass = state
        torque = jnp.clip(action, -2.0, 2.0)
        after, reward, terminated = plain.step(tuple(own), torque / mass[:, None], draws)
        reward = reward + 0.001 * ((torque[:, 0] / mass) ** 2 - torque[:, 0] ** 2)
        return (*after, mass), reward, terminated

    return Definition(
        observation=Dict((("obs", plain.observation), ("task", Box((1,), low=-1.0, high=1.0)))),
        action=plain.action,
        max_episode_steps=plain.max_episode_steps,
        num_draws=plain.num_draws + 1,
        reset=lambda draws: (*plain.reset(draws[:-1]), LOW + (HIGH - LOW) * draws[-1]),
        step=step,
        observe=lambda state: {
            "obs": plain.observe(state[:-1]),
            "task": (2.0 * (state[-1] - LOW) / (HIGH - LOW) - 1.0)[:, None],
        },
    )
