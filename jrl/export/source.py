"""A checkpoint's policy as one pure function of an observation and of what is remembered."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl import config, spaces
from jrl.data.spaces_json import space_to_json
from jrl.play import actor as play
from jrl.rollout.unroll import reset_where
from jrl.types import Array, PyTree, Space


class Source(NamedTuple):
    """Policy that is exported. `step` is

    (obs [N, *], memory [N, ...], reward [N] f32, begins [N] bool) -> (actions [N, *], memory)

    with actions in the environment's own units. `reward` came with the observation; where an episode `begins` with it,
    neither reward nor memory count.
    """

    step: Callable[[PyTree, PyTree, Array, Array], tuple[PyTree, PyTree]]
    memory: Callable[[int], PyTree]  # batch_size -> what is remembered [N, ...]
    observation: Space  # the environment's own, but for what the policy does not read
    choices: tuple[int, ...]  # the lengths of the parts of an action mask; () without one
    about: Mapping[str, Any]  # for policy.json


def load(path: Path, *, best: bool | None = None, policy_id: str | None = None) -> Source:
    """Loads the deterministic policy of a checkpoint; no environment is made.

    Args:
      path: a run directory, or a checkpoint.
      best: see `jrl.load`.
      policy_id: which policy, of a run with several.
    Raises:
      InputError: there is none, or it is damaged.
    """
    actor = play.load(path, best=best, policy=policy_id)
    reader, start = actor.reader, actor.algo.carry(1)  # of any number of environments the same

    def memory(num: int) -> PyTree:
        carry, past = actor.init_memory(num)
        return carry, () if past is None else (past.frames, past.action)

    def step(obs: PyTree, memory: PyTree, reward: Array, begins: Array) -> tuple[PyTree, PyTree]:
        carry, past = memory
        zeros = lambda leaf: jnp.zeros((*begins.shape, *leaf.shape), leaf.dtype)
        obs = spaces.fill_parts(reader.space, reader.unread, obs, zeros)
        before = play.Memory(reset_where(begins, start, carry), play.Past(past[0], past[1], begins) if past else None)
        found = actor.step(actor.weights, obs, before, jax.random.key(0), reward, explore=False)
        after = found.memory.past
        return found.action, (found.memory.carry, () if after is None else (after.frames, after.action))

    observation = spaces.without(reader.space, reader.unread)
    about = {
        "algorithm": config.algo_name(actor.config),
        "env": actor.config.env.id,
        "env_steps": actor.env_steps,
        "observation": space_to_json(observation),
        "unread": reader.unread,
        "action": space_to_json(actor.spec.env_action or actor.spec.action),
    }
    return Source(step, memory, observation, reader.choices, about)
