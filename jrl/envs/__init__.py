"""Environments: `make(id, num_envs=...)` gives a GraphEnv or an Env, whatever library steps it.

Importing this package imports no environment library.
"""

from jrl.envs.make import BACKENDS, GRAPH, check, is_atari, make, resolve, seed_range
from jrl.envs.wrappers import action_transform, reward_transform

__all__ = [
    "BACKENDS",
    "GRAPH",
    "action_transform",
    "check",
    "is_atari",
    "make",
    "resolve",
    "reward_transform",
    "seed_range",
]
