"""The name under which `jrl.envs.jax_env` was imported before: what a file of one's own takes from here stays valid."""

from jrl.envs.jax_env import Definition as Definition
from jrl.envs.jax_env import JaxState as GraphState
from jrl.envs.jax_env import build as build
from jrl.envs.jax_env import select as select
from jrl.envs.jax_env import under_contract as under_contract

__all__ = ["Definition", "GraphState", "build", "select", "under_contract"]
