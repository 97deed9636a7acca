"""A checkpoint's policy as one function of observations."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jrl import config, policy
from jrl.types import Array, PyTree, Space


class Source(NamedTuple):
    """What is exported. `act` maps (obs [N, *], carry [N, ...]) to actions [N, *] in the environment's own units."""

    act: Callable[[Array, PyTree], Array]
    carry: Callable[[int], PyTree]  # batch_size -> the carry at the start of an episode; () if none
    observation: Space
    about: Mapping[str, Any]  # for policy.json


def load(path: Path, *, best: bool = False) -> Source:
    """The deterministic policy of a checkpoint; no environment is made.

    Args:
      path: a run directory, whose latest checkpoint is taken, or a checkpoint.
      best: of a run directory, the best checkpoint by the run's `checkpoint.keep_best_by`.
    Raises:
      InputError: there is none, or it is damaged.
    """
    trained = policy.restore(path, best=best)
    algo, transform, meta = trained.algo, trained.to_env, trained.meta

    def act(obs: Array, carry: PyTree) -> Array:
        action = algo.act(trained.actor, obs, carry, jax.random.key(0), explore=False).action
        return transform(action) if transform else action

    about = {
        "algorithm": config.algo_name(trained.config),
        "env": trained.config.env.id,
        "env_steps": meta["env_steps"],
        "observation": meta["spec"]["observation"],
        "action": meta["spec"]["env_action"] or meta["spec"]["action"],
    }
    return Source(act, algo.carry, trained.spec.observation, about)
