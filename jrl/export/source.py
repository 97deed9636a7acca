"""A checkpoint's policy as one pure function of an observation and of what is remembered."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl import config, spaces
from jrl.data.spaces_json import space_to_json
from jrl.play import policy
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
      best: see `policy.load`.
      policy_id: which policy, of a run with several.
    Raises:
      InputError: there is none, or it is damaged.
    """
    trained = policy.restore(path, best=best, policy=policy_id)
    algo, transform, meta = trained.algo, trained.to_env(), trained.meta
    inputs = policy.Inputs(trained.spec, trained.config, trained.observation)

    def memory(num: int) -> PyTree:
        past = inputs.past(num)
        return algo.carry(num), () if past is None else (past.frames, past.action)

    def step(obs: PyTree, memory: PyTree, reward: Array, begins: Array) -> tuple[PyTree, PyTree]:
        carry, past = memory
        zeros = lambda leaf: jnp.zeros((*begins.shape, *leaf.shape), leaf.dtype)
        obs = spaces.fill_parts(inputs.observation, inputs.unread, obs, zeros)
        start = algo.carry(1)  # of any number of environments the same
        fresh = lambda x: jnp.expand_dims(begins, tuple(range(1, x.ndim)))
        carry = jax.tree.map(lambda first, x: jnp.where(fresh(x), first, x), start, carry)
        if inputs.history is not None:
            frames, action = past
            frames, obs = inputs.history.see(frames, obs, action, reward, begins)
        out = algo.act(trained.actor, obs, carry, jax.random.key(0), explore=False)
        if inputs.history is not None:
            past = frames, out.action if inputs.remembers else None
        return transform(out.action) if transform else out.action, (out.carry, past)

    own = trained.spec._replace(observation=inputs.observation)
    observation = spaces.without(inputs.observation, inputs.unread)
    about = {
        "algorithm": config.algo_name(trained.config),
        "env": trained.config.env.id,
        "env_steps": meta["env_steps"],
        "observation": space_to_json(observation),
        "unread": inputs.unread,
        "action": space_to_json(trained.spec.env_action or trained.spec.action),
    }
    choices = policy.num_choices_each(own.action) if spaces.masks_actions(own) else ()
    return Source(step, memory, observation, choices, about)
