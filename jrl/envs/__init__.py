"""Environments: `make(id, num_envs=...)` gives a JaxEnv, an Env or an AsyncEnv, whatever library steps it.

Importing this package imports no environment library.
"""

from jrl.envs.context import OnFailure, Place
from jrl.envs.make import (
    BACKENDS,
    IN_JAX,
    ROLES,
    AgentOptions,
    backends_of,
    check,
    ids,
    is_atari,
    is_multi_agent,
    make,
    resolve,
    section,
    seed_range,
)
from jrl.envs.scaling import action_transform, reward_transform
from jrl.fields.env import EnvConfig

__all__ = [
    "BACKENDS",
    "IN_JAX",
    "ROLES",
    "AgentOptions",
    "EnvConfig",
    "OnFailure",
    "Place",
    "action_transform",
    "backends_of",
    "check",
    "ids",
    "is_atari",
    "is_multi_agent",
    "make",
    "resolve",
    "reward_transform",
    "section",
    "seed_range",
]
