"""Environments: `make(id, num_envs=...)` gives a GraphEnv, an Env or an AsyncEnv, whatever library steps it.

Importing this package imports no environment library.
"""

from jrl.envs.make import BACKENDS, GRAPH, ROLES, backends_of, check, ids, is_atari, make, resolve, seed_range
from jrl.envs.wrappers import action_transform, reward_transform

__all__ = [
    "BACKENDS",
    "GRAPH",
    "ROLES",
    "action_transform",
    "backends_of",
    "check",
    "ids",
    "is_atari",
    "make",
    "resolve",
    "reward_transform",
    "seed_range",
]
