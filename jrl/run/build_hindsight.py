"""Relabelling of replayed goals, by the section `replay.hindsight`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrl import envs, registry
from jrl.config import RunConfig
from jrl.envs.scaling import learner_reward
from jrl.errors import InputError
from jrl.replay.hindsight import ACHIEVED, DESIRED, Hindsight
from jrl.types import Array, Dict, EnvSpec, Leaf, Tuple

GoalReward = Callable[[Array, Array], tuple[Array, Array]]
_KEY = "replay.hindsight"


def relabelling(cfg: RunConfig, spec: EnvSpec) -> Hindsight:
    """Returns the relabelling of a run's replay.

    Raises:
      InputError: observations without goals, or no valid reward function.
    """
    assert cfg.replay is not None and cfg.replay.hindsight is not None
    goal = _find_goal_space(cfg.env.id, spec)
    own, section = _find_reward(cfg), cfg.replay.hindsight
    name = f"{_KEY}.reward" + (f" {section.reward}" if section.reward else f": {cfg.env.id}")
    _check_reward(name, own, goal)
    custom = registry.load(cfg.custom.reward, "custom.reward") if cfg.custom.reward else None
    reward = functools.partial(_goal_reward, own, learner_reward(cfg.env, custom), spec.bootstraps is True)
    return Hindsight(section.strategy, section.share, reward, spec.max_episode_steps)


def _goal_reward(
    own: GoalReward, transform: Callable[[Array], Array] | None, bootstraps: bool, achieved: Array, desired: Array
) -> tuple[Array, Array]:
    """Returns the learner's rewards and true ends [M]; `bootstraps`: no end is a true end."""
    reward, end = own(achieved, desired)
    reward = reward.astype(jnp.float32)
    if transform is not None:
        reward = transform(reward[:, None])[:, 0]
    return reward, end & (not bootstraps)


def _find_goal_space(id: str, spec: EnvSpec) -> Leaf:
    """Returns the space of goals. Raises InputError: observations have no goals of one space."""
    items: dict[str, Any] = dict(spec.observation.items) if isinstance(spec.observation, Dict) else {}
    expected = f"{_KEY}: expected observations with {ACHIEVED} and {DESIRED}, arrays of one shape and dtype"
    if not {ACHIEVED, DESIRED} <= items.keys():
        found = ", ".join(items) or type(spec.observation).__name__
        raise InputError(f"{expected}, {id} has {found}: leave {_KEY} out, or add these to its Dict")
    achieved, desired = items[ACHIEVED], items[DESIRED]
    if isinstance(achieved, Dict | Tuple) or (achieved.shape, achieved.dtype) != (
        getattr(desired, "shape", None), getattr(desired, "dtype", None)
    ):  # fmt: skip
        raise InputError(f"{expected}, {id} has {achieved} and {desired}: make both spaces equal")
    return achieved


def _find_reward(cfg: RunConfig) -> GoalReward:
    """Returns the user's function, or the environment's own. Raises InputError: there is none."""
    assert cfg.replay is not None and cfg.replay.hindsight is not None
    if (path := cfg.replay.hindsight.reward) is not None:
        found = registry.load(path, f"{_KEY}.reward")
        registry.check_call(found, f"{_KEY}.reward {path}", ("achieved", "desired"))
        return found
    own = envs.goal_reward(cfg.env)
    if own is None:
        signature = "(achieved [N, *], desired [N, *]) -> (reward [N], end [N] bool)"
        raise InputError(
            f"{_KEY}.reward: {cfg.env.id} does not say how rewards follow from goals: name a function {signature} as "
            "package.module:function"
        )
    return own


def _check_reward(name: str, reward: GoalReward, goal: Leaf) -> None:
    """Raises InputError, while tracing, unless the function returns rewards and ends of N goals."""
    like = jax.ShapeDtypeStruct((3, *goal.shape), jnp.dtype(goal.dtype))
    try:
        found: Any = jax.eval_shape(reward, like, like)
    except InputError:
        raise
    except Exception as e:
        text = f"{type(e).__name__}: {str(e)[:200]}"
        raise InputError(f"{name}: tracing it with goals {like.dtype} {like.shape} fails: {text}: use jax.numpy") from e
    fits = isinstance(found, tuple | list) and [getattr(x, "shape", None) for x in found] == [(3,), (3,)]
    if not fits or found[1].dtype != bool:
        given = jax.tree.map(lambda x: f"{x.dtype} {x.shape}", found)
        raise InputError(f"{name}: expected (reward [N], end [N] bool) of N = 3 goals, got {given}: return both")
