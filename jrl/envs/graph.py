"""The former name of `jrl.envs.jax_env`, kept so that users' imports stay valid."""

from jrl.envs.jax_env import Definition as Definition
from jrl.envs.jax_env import JaxState as GraphState
from jrl.envs.jax_env import build as build
from jrl.envs.jax_env import select as select
from jrl.envs.jax_env import under_contract as under_contract

__all__ = ["Definition", "GraphState", "build", "select", "under_contract"]
