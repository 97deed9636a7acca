"""A checkpoint's policy as a pure function of observation and memory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl import config, spaces
from jrl.play import actor as play
from jrl.rollout.unroll import reset_where
from jrl.spaces_json import space_to_json
from jrl.types import Array, PyTree, Space


class PolicyFunction(NamedTuple):
    """Policy to export, as the pure function `step`:

        (obs [N, *], memory [N, ...], reward [N] f32, begins [N] bool) -> (actions [N, *], memory)

    Actions are in the environment's own units. `reward` is the reward before the observation. Where an episode
    `begins`, reward and memory are ignored.
    """

    step: Callable[[PyTree, PyTree, Array, Array], tuple[PyTree, PyTree]]
    memory: Callable[[int], PyTree]  # batch size N -> memory [N, ...]
    observation: Space  # the environment's observation space without parts that the policy does not read
    action: Space  # the environment's action space
    choices: tuple[int, ...]  # lengths of the parts of an action mask; (): no mask
    about: Mapping[str, Any]  # fields of policy.json


def load_function(path: Path, *, best: bool | None = None, policy_id: str | None = None) -> PolicyFunction:
    """Loads the deterministic policy of a checkpoint, without an environment.

    Args:
      path: a run directory, or a checkpoint.
      best: see `jrl.load`.
      policy_id: name of a policy, if the run has several.
    Raises:
      InputError: missing or damaged checkpoint.
    """
    actor = play.load(path, best=best, policy=policy_id, search=False)
    reader, start = actor.reader, actor.algo.carry(1)  # all environments start with the same memory

    def memory(num: int) -> PyTree:
        carry, past = actor.init_memory(num)
        return carry, () if past is None else (past.frames, past.action)

    def step(obs: PyTree, memory: PyTree, reward: Array, begins: Array) -> tuple[PyTree, PyTree]:
        carry, past = memory
        zeros = lambda leaf: jnp.zeros((*begins.shape, *leaf.shape), leaf.dtype)
        obs = spaces.fill_parts(reader.space, reader.unread, obs, zeros)
        before = play.Memory(reset_where(begins, start, carry), play.Past(past[0], past[1], begins) if past else None)
        acted = actor.step(actor.weights, obs, before, jax.random.key(0), reward, explore=False)
        after = acted.memory.past
        return acted.action, (acted.memory.carry, () if after is None else (after.frames, after.action))

    observation, action = spaces.without(reader.space, reader.unread), actor.spec.env_action or actor.spec.action
    about = {
        "algorithm": config.algo_name(actor.config),
        "env": actor.config.env.id,
        "env_steps": actor.env_steps,
        "observation": space_to_json(observation),
        "unread": reader.unread,
        "action": space_to_json(action),
    }
    return PolicyFunction(step, memory, observation, action, reader.choices, about)
