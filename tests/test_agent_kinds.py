"""Agents of different spaces in one environment: what they are as columns, and policies of a kind each."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import jrl
from jrl import envs, evaluate, train
from jrl.envs.multi_agent import MultiDefinition
from jrl.errors import InputError
from jrl.rollout import unroll
from jrl.run import network_table, several
from jrl.run.session import Session
from jrl.settings import config, multi_agent
from jrl.types import ActOut, Box, Dict, Discrete, Tuple

HUNTER, PREY = Box((6,)), Dict((("me", Box((2,))), ("hunters", Box((2, 2)))))
VELOCITY = Box((2,), low=-0.5, high=0.5)
AGENTS, KINDS = ("hunter_0", "prey_0", "hunter_1"), ((0, 2), (1,))
_WAYS = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)


@struct.dataclass
class Places:
    hunters: jax.Array  # [G, 2, 2]
    prey: jax.Array  # [G, 2]


def pursuit(noise: float = 1.0) -> MultiDefinition:
    """Two hunters on a grid are paid minus their distance to the prey, which flies, pays its nearest hunter's and ends
    once it is caught; the hunters go on until the time is over."""

    def reset(draws):
        moved = noise * draws.T.reshape(-1, 3, 2)
        start = jnp.array([[-2.0, 0.0], [2.0, 0.0], [0.0, 1.0]])[None]
        return Places(start[:, :2] + moved[:, :2], start[:, 2] + moved[:, 2])

    def apart(state):
        return jnp.abs(state.hunters - state.prey[:, None]).sum(-1)  # [G, 2]

    def step(state, actions, draws):
        ways, velocity = actions
        state = Places(state.hunters + jnp.asarray(_WAYS)[ways], state.prey + velocity[:, 0])
        away = apart(state)
        nearest, caught = away.min(-1), away.min(-1) < 0.6
        reward = jnp.stack([-away[:, 0], nearest, -away[:, 1]], 1)
        never = jnp.zeros_like(caught)
        return state, reward, jnp.stack([never, caught, never], 1)

    def observe(state):
        others = state.hunters[:, ::-1]
        prey = jnp.broadcast_to(state.prey[:, None], others.shape)
        return (
            jnp.concatenate([state.hunters, prey, others], -1),
            {"me": state.prey[:, None], "hunters": state.hunters[:, None]},
        )

    return MultiDefinition(
        agents=AGENTS,
        observation={"hunter_0": HUNTER, "prey_0": PREY, "hunter_1": HUNTER},
        action={"hunter_0": Discrete(5), "prey_0": VELOCITY, "hunter_1": Discrete(5)},
        max_episode_steps=6,
        num_draws=6,
        reset=reset,
        step=step,
        observe=observe,
        state=Box((6,)),
        view=lambda state: jnp.concatenate([state.hunters.reshape(-1, 4), state.prey], -1),
    )


ID = f"{__name__}:pursuit"
GAMES, STEPS = 4, 16
SMALL = {
    "env": {"id": ID, "num_envs": GAMES},
    "algo": {"name": "ppo", "num_epochs": 2, "num_minibatches": 2},
    "network": {"hidden": [8]},
    "rollout": {"length": STEPS, "iterations_per_call": 1},
    "run": {"compile_cache": False, "log": []},
}
