"""Hindsight experience replay: a part of each sample gets desired goals that its episodes achieved later.

Observations are dicts with `achieved_goal` and `desired_goal`, as Gymnasium-Robotics has them. The ring stores the
environment's goals; `reading` relabels each sample anew (Andrychowicz et al., arXiv:1707.01495).
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jrl.ops import random
from jrl.types import Array, Key, PyTree

ACHIEVED = "achieved_goal"  # keys of observations, of one shape and dtype
DESIRED = "desired_goal"


class Hindsight(NamedTuple):
    """Relabelling of a ring's samples."""

    # new goal of a transition. future: an achieved goal after it; final: the last of its episode; episode: any of its
    # episode but that of the first observation. Each with equal probability
    strategy: Literal["future", "final", "episode"]
    share: float  # probability that a transition is relabelled; k new goals for each stored goal are k / (k + 1)
    # (achieved [M, *], desired [M, *]) -> (reward [M] f32 of the learner, whether the goal ends the episode [M] bool)
    reward: Callable[[Array, Array], tuple[Array, Array]]
    max_steps: int | None = None  # most steps of an episode, which make samples cheaper; None: no limit


class Goals(NamedTuple):
    """Desired goals of N transitions."""

    new: Array  # [N, *]
    is_new: Array  # [N] bool, the new goal replaces the stored goal


def draw(hindsight: Hindsight, key: Key, ahead: Array, behind: Array) -> tuple[Array, Array]:
    """Draws the observation whose achieved goal each transition gets.

    Args:
      ahead: [N] i32, steps of the episode from the transition on, at least 1.
      behind: [N] i32, steps of the episode before the transition; only the strategy `episode` reads them.
    Returns:
      Steps from the transition's first observation to the drawn observation [N] i32, and whether it is relabelled [N].
    """
    share_draw, goal_draw = random.uniform(key, (2, *ahead.shape))
    is_new = share_draw < hindsight.share
    if hindsight.strategy == "final":
        return ahead, is_new
    first, count = (1 - behind, behind + ahead) if hindsight.strategy == "episode" else (1, ahead)
    return first + jnp.minimum((goal_draw * count).astype(jnp.int32), count - 1), is_new


def relabel(goals: Goals, obs: PyTree) -> PyTree:
    """Returns observations [N, *] with the new goals."""
    return {**obs, DESIRED: _choose(goals.is_new, goals.new, obs[DESIRED])}


def recompute(
    hindsight: Hindsight, goals: Goals, achieved: Array, desired: Array, reward: Array, terminated: Array
) -> tuple[Array, Array]:
    """Returns the rewards and true ends of n steps under the new goals.

    An end that the stored goal does not explain, such as a fall, stays an end.

    Args:
      achieved: [N, n, *], achieved goals after the steps.
      desired: [N, n, *], stored goals.
      reward: [N, n] f32, stored rewards.
      terminated: [N, n] bool, stored ends.
    """
    shape, goal = reward.shape, goals.new.shape[1:]
    flat = lambda x: x.reshape(-1, *goal)
    new = jnp.broadcast_to(goals.new[:, None], (*shape, *goal))
    new_reward, at_new = (x.reshape(shape) for x in hindsight.reward(flat(achieved), flat(new)))
    _, at_stored = hindsight.reward(flat(achieved), flat(desired))
    ends = at_new | (terminated & ~at_stored.reshape(shape))
    return _choose(goals.is_new, new_reward, reward), _choose(goals.is_new, ends, terminated)


def _choose(mask: Array, on_true: Array, on_false: Array) -> Array:
    return jnp.where(jnp.expand_dims(mask, tuple(range(1, on_true.ndim))), on_true, on_false)
