"""Environments: `make(id, num_envs=...)` returns a JaxEnv, an Env or an AsyncEnv, for each library that steps it.

Importing this package imports no environment library.
"""

from jrl.envs.backends import BACKENDS, backends_of, ids, is_atari, resolve
from jrl.envs.context import ROLES, OnFailure, Place, seed_range
from jrl.envs.make import AgentOptions, check, goal_reward, is_multi_agent, make, section
from jrl.envs.scaling import action_transform, reward_transform
from jrl.fields.env import EnvConfig

__all__ = [
    "BACKENDS",
    "ROLES",
    "AgentOptions",
    "EnvConfig",
    "OnFailure",
    "Place",
    "action_transform",
    "backends_of",
    "check",
    "goal_reward",
    "ids",
    "is_atari",
    "is_multi_agent",
    "make",
    "resolve",
    "reward_transform",
    "section",
    "seed_range",
]
