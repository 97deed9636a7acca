"""Domain randomisation: tasks that each environment draws for itself (arXiv:1703.06907). Option `env.randomize`.

A task is drawn from ranges at each reset, or once for each environment. It is part of the environment's state.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import InputError
from jrl.fields.env import EnvConfig
from jrl.ops import random
from jrl.types import Box, Dict, Key, PyTree, Space

TASK = "task"  # item of an observation

Ranges = Mapping[str, tuple[float, float]]  # name of a number -> its smallest and its largest value


class Tasks(NamedTuple):
    """Tasks of B environments, and the part of them that observations contain."""

    draw: Callable[[Key], PyTree]  # key -> tasks, leaves [B, ...]
    each_episode: bool = True  # whether each reset draws a new task; False: one task for the life of an environment
    # numbers of the task, a dict, that observations contain as item `task` [k] f32, by name in alphabetical order; each
    # range is mapped to [-1, 1]. None: observations do not contain the task
    observed: Ranges | None = None

    def add_to_space(self, space: Space) -> Space:
        """Returns the space of observations with the task. Raises InputError: it has an item `task` already."""
        if self.observed is None:
            return space
        items = space.items if isinstance(space, Dict) else (("obs", space),)
        if TASK in dict(items):
            raise InputError(f"env.observe_task: observations have an item {TASK} already: leave it out")
        return Dict((*items, (TASK, Box((len(self.observed),), "float32", -1.0, 1.0))))

    def add_to_observation(self, obs: PyTree, task: PyTree) -> PyTree:
        """Returns observations [B, *] with the item `task` [B, k] f32; the observations themselves if none is asked."""
        if self.observed is None:
            return obs
        scaled = [2 * (task[name] - low) / (high - low) - 1 for name, (low, high) in sorted(self.observed.items())]
        numbers = jnp.clip(jnp.stack(scaled, -1), -1.0, 1.0)  # rounding can leave the range
        return {**(obs if isinstance(obs, dict) else {"obs": obs}), TASK: numbers}


def draw_uniformly(cfg: EnvConfig, rest: Mapping[str, Any] = {}) -> Tasks:
    """Returns tasks whose numbers `cfg.randomize` are uniform in their ranges, drawn anew at each reset.

    Args:
      cfg: section of B environments.
      rest: the task's numbers; the numbers without a range are equal for all environments.
    """
    names, ranges = sorted(cfg.ranges), cfg.ranges
    low, high = (np.array([[ranges[name][end]] for name in names], np.float32) for end in (0, 1))
    shared = {name: np.asarray(x) for name, x in rest.items() if name not in ranges}

    def draw(key: Key) -> dict[str, Any]:
        drawn = low + (high - low) * random.uniform(key, (len(names), cfg.num_envs))
        equal = {name: jnp.broadcast_to(jnp.asarray(x), (cfg.num_envs, *x.shape)) for name, x in shared.items()}
        return {**equal, **dict(zip(names, drawn, strict=True))}

    return Tasks(draw, observed=ranges if cfg.observe_task else None)


def draw_models(
    function: Callable[[Any, Key], tuple[Any, Any]], model: Any, num_envs: int
) -> tuple[Tasks, Callable[[PyTree], Any]]:
    """Returns tasks drawn once for each environment, and the function from a task to its physics model.

    A task has only the arrays of the model that differ between environments.

    Args:
      function: (model, keys [B]) -> (model in which some arrays have a first axis B, tree of axes), as MuJoCo
        Playground's functions of domain randomisation.
      model: model of one environment, such as an mjx.Model.
      num_envs: B.
    Raises:
      InputError: the function returns another structure, or draws nothing.
    """
    shared = jax.tree.leaves(model)
    structure: Any = jax.tree.structure(model)

    def call(key: Key) -> list[Any]:
        drawn = function(model, jax.random.split(key, num_envs))[0]
        if jax.tree.structure(drawn) != structure:
            raise InputError("env.randomize: expected the model with changed arrays, got another: use tree_replace")
        return jax.tree.leaves(drawn)

    shapes = jax.eval_shape(call, jax.eval_shape(jax.random.key, 0))
    differs = [x.shape == (num_envs, *jnp.shape(one)) for x, one in zip(shapes, shared, strict=True)]
    if not any(differs):
        raise InputError(f"env.randomize: expected arrays with a first axis of {num_envs} environments, got none")
    draw = lambda key: [x for x, differ in zip(call(key), differs, strict=True) if differ]

    def model_of(task: PyTree) -> Any:
        own = iter(task)
        return structure.unflatten([next(own) if differ else x for x, differ in zip(shared, differs, strict=True)])

    return Tasks(draw, each_episode=False), model_of
