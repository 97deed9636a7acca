"""Environments written in JAX: the dynamics of one step, and the reset contract around them.

A definition may have a task: numbers passed to its functions as the last argument. They are part of the state, and can
be set between two calls of a program without recompiling it. With `env.randomize` each environment draws its own task.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.envs.spec import check_action
from jrl.gym.exceptions import format_definition
from jrl.ops import random
from jrl.spaces import elements
from jrl.types import Array, EnvSpec, InputError, JaxEnv, Key, PyTree, Space, StepResult

if TYPE_CHECKING:  # imported with `env.randomize` only
    from jrl.envs.randomization import Tasks

ENDED = -1  # JaxState.elapsed of an environment whose next step resets


class Definition(NamedTuple):
    """Definition of an environment written in JAX: functions of B environments at once.

    `draws` [num_draws, B] f32 are uniform numbers in [0, 1), the only randomness. State leaves are [B, ...]; jrl's own
    definitions keep one [B] array per variable, which XLA fuses into one loop over the environments.

    `task` is None, or a pytree of numbers (or arrays) passed to `reset`, `step` and `observe` as the last argument, its
    leaves with B first. A new task takes effect at once, even mid-episode. To change a number at the next episode only,
    let `reset` copy it into the state. With `env.randomize` numbers of a dict differ between environments.
    """

    observation: Space
    action: Space
    max_episode_steps: int | None
    num_draws: int
    reset: Callable[..., PyTree]  # draws -> state
    step: Callable[..., tuple[PyTree, Array, Array]]  # (state, action, draws) -> state, reward, end
    observe: Callable[..., PyTree]  # state -> [B, *]
    task: PyTree = None  # initial task
    # (achieved [N, *], desired [N, *]) -> reward [N] f32, end [N] bool: what `step` returns after a step to `achieved`,
    # for `replay.hindsight`; None: rewards do not follow from goals alone
    goal_reward: Callable[[Array, Array], tuple[Array, Array]] | None = None


@struct.dataclass
class JaxState:
    """State of B environments."""

    inner: PyTree  # the definition's own state, leaves [B, ...]
    elapsed: Array  # [B] i32, steps since the reset; -1 after an end: the next step resets
    task: PyTree = ()  # leaves [B, ...]; (): no task


def build(definition: Definition, num_envs: int, tasks: "Tasks | None" = None) -> JaxEnv:
    """Returns B environments of a definition; `tasks` as in `under_contract`.

    Raises:
      InputError: while tracing, the functions return other arrays than the definition declares.
    """

    def observe(inner: PyTree, *extra: PyTree) -> PyTree:
        obs = definition.observe(inner, *extra)
        check_arrays(
            f"Definition.observe{format_definition(definition.observe)}",
            obs,
            elements(definition.observation, num_envs),
        )
        return obs

    def reset(key: Key, *extra: PyTree) -> tuple[PyTree, PyTree]:
        inner = definition.reset(random.uniform(key, (definition.num_draws, num_envs)), *extra)
        return inner, observe(inner, *extra)

    def advance(
        inner: PyTree, action: PyTree, key: Key, fresh: Array, *extra: PyTree
    ) -> tuple[PyTree, PyTree, Array, Array]:
        # each environment either resets or steps, so both may use the same draws
        draws = random.uniform(key, (definition.num_draws, num_envs))
        stepped = definition.step(inner, action, draws, *extra)
        name = f"Definition.step{format_definition(definition.step)}"
        inner, reward, terminated = check_step(name, inner, fresh, definition.reset(draws, *extra), stepped)
        return inner, observe(inner, *extra), reward, terminated

    spec = EnvSpec(definition.observation, definition.action, num_envs, definition.max_episode_steps)
    return under_contract(spec, reset, advance, task=definition.task, tasks=tasks)


def under_contract(
    spec: EnvSpec,
    reset: Callable[..., tuple[PyTree, PyTree]],
    advance: Callable[..., Any],
    *,
    task: PyTree = None,
    tasks: "Tasks | None" = None,
) -> JaxEnv:
    """Adds the reset contract and the time limit to the functions of a definition (see `jrl.types.StepResult`).

    An episode that ends by itself on its last allowed step is terminated, not truncated.

    Args:
      spec: spec with the time limit to apply.
      reset: key -> (inner, obs).
      advance: (inner, action, key, fresh) -> (inner, obs, reward, terminated). Environments with `fresh` [B] are reset;
        their reward and terminated are ignored.
      task: initial task of all environments, passed to both functions as the last argument; None: no task.
      tasks: tasks that environments draw, instead of `task`. They cannot be set.
    """
    like = () if task is None else jax.tree.map(_to_array, task)
    extra = lambda state_task: () if task is None and tasks is None else (state_task,)
    if tasks is not None:
        spec = spec._replace(observation=tasks.add_to_space(spec.observation))

    def first(key: Key) -> tuple[JaxState, PyTree]:
        if tasks is None:
            initial = jax.tree.map(lambda x: jnp.array(jnp.broadcast_to(x, (spec.num_envs, *x.shape))), like)
        else:
            key, task_key = jax.random.split(key)
            initial = tasks.draw(task_key)
        inner, obs = reset(key, *extra(initial))
        obs = obs if tasks is None else tasks.add_to_observation(obs, initial)
        # a copy: the caller donates state and observation, which must not share a buffer
        return JaxState(inner, jnp.zeros((spec.num_envs,), jnp.int32), initial), jax.tree.map(jnp.copy, obs)

    def step(state: JaxState, action: PyTree, key: Key) -> tuple[JaxState, StepResult]:
        check_action(spec.action, spec.num_envs, action)  # while tracing: shape and dtype
        fresh, elapsed, at_limit = count_step(state.elapsed, spec.max_episode_steps)
        own = state.task
        if tasks is not None and tasks.each_episode:
            key, task_key = jax.random.split(key)
            own = select(fresh, tasks.draw(task_key), own)
        inner, obs, reward, terminated = advance(state.inner, action, key, fresh, *extra(own))
        obs = obs if tasks is None else tasks.add_to_observation(obs, own)
        terminated, truncated, reward = find_ends(fresh, terminated, at_limit, reward)
        elapsed = jnp.where(terminated | truncated, ENDED, elapsed)
        return JaxState(inner, elapsed, own), StepResult(obs, reward, terminated, truncated)

    if task is None or tasks is not None:
        return JaxEnv(spec, first, step)

    def set_task(state: Any, new: PyTree) -> Any:
        return state.replace(task=jax.tree.map(_fill, state.task, _check_task(new, like)))

    def get_task(state: Any) -> PyTree:
        return jax.tree.map(lambda x, one: x.reshape(-1, *one.shape)[0], state.task, like)

    return JaxEnv(spec, first, step, set_task=set_task, get_task=get_task)


def check_arrays(name: str, extra: PyTree, expected: PyTree) -> None:
    """Raises InputError, while tracing, unless arrays have the expected structure, shapes and dtypes."""
    pairs = [("", extra, expected)]
    structure: Any = jax.tree.structure
    if structure(extra) == structure(expected):
        found = zip(jax.tree.leaves(extra), jax.tree.leaves_with_path(expected), strict=True)
        named = [(jax.tree_util.keystr(path), x, y) for x, (path, y) in found]
        pairs = [(path, x, y) for path, x, y in named if (jnp.shape(x), jnp.result_type(x)) != (y.shape, y.dtype)]
    if pairs:
        fix = "return arrays of the space, for all environments at once, or change the space"
        raise InputError(
            *(f"{name}{path}: expected {_describe_arrays(y)}, got {_describe_arrays(x)}: {fix}" for path, x, y in pairs)
        )


def check_step(name: str, before: PyTree, fresh: Array, begun: PyTree, stepped: Any) -> tuple[PyTree, Array, Array]:
    """Returns state, rewards and ends of a definition's step; the state is a reset's where `fresh` [n] is True.

    Args:
      name: function name, for errors.
      before: state before the step.
      begun: state of a reset.
      stepped: result of the definition's step.
    Raises:
      InputError: while tracing, the result has other parts, or its state other arrays.
    """
    if not isinstance(stepped, tuple) or len(stepped) != 3:
        found = f"{len(stepped)} values" if isinstance(stepped, tuple) else f"a {type(stepped).__name__}"
        raise InputError(f"{name}: expected (state, reward, end), got {found}: return all three")
    moved, reward, end = stepped[0], *map(jnp.asarray, stepped[1:])
    if end.dtype != bool:
        raise InputError(f"{name}: expected ends of bool, got {end.dtype}: compare with a number, such as `x > 0`")
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)
    fits = shapes(moved) == shapes(begun)
    after = select(fresh, begun, moved) if fits else moved
    dtypes = lambda tree: jax.tree.map(jnp.result_type, tree)
    if not fits or (shapes(after), dtypes(after)) != (shapes(before), dtypes(before)):
        raise InputError(
            f"{name}: expected a state as reset returns it, {_describe_arrays(begun)}, each array with an axis of "
            f"environments first, got {_describe_arrays(moved)}: return arrays of the same structure, shapes and dtypes"
        )
    return after, reward, end


def _describe_arrays(tree: PyTree) -> str:
    """Describes arrays in at most 300 characters: {'x': float32 (4, 2)}."""
    text = repr(jax.tree.map(lambda x: _Repr(f"{jnp.result_type(x)} {jnp.shape(x)}"), tree))
    return text if len(text) <= 300 else text[:297] + "..."


class _Repr(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def count_step(elapsed: Array, limit: int | None) -> tuple[Array, Array, Array]:
    """Counts a step of environments that reset on the step after an end.

    Args:
      elapsed: [n] i32, steps since the reset, `ENDED` after an end.
      limit: steps of an episode; None: no limit.
    Returns:
      Three arrays [n]: whether this step resets (bool), the steps including this one (i32), whether they reach the
      limit (bool).
    """
    fresh = elapsed == ENDED
    elapsed = jnp.where(fresh, 0, elapsed + 1)
    return fresh, elapsed, jnp.zeros_like(fresh) if limit is None else elapsed >= limit


def find_ends(idle: Array, ended: Array, at_limit: Array, reward: Array) -> tuple[Array, Array, Array]:
    """Returns (terminated, truncated, reward) [...]: a true end takes precedence over the time limit.

    Steps that are `idle`, without an action, have reward 0 and no end; they must not be `at_limit`.
    """
    terminated = ended & ~idle
    return terminated, at_limit & ~terminated, jnp.where(idle, 0.0, reward.astype(jnp.float32))


def _to_array(x: Any) -> jax.Array:
    return jnp.asarray(x, "float32" if isinstance(x, float) else None)


def _fill(held: Array, new: Array) -> Array:
    """Returns `new` [*] repeated to the shape of `held` [..., *], with its sharding, so as not to recompile."""
    filled = jnp.broadcast_to(jnp.asarray(new, held.dtype), held.shape)
    traced = isinstance(held, jax.core.Tracer)
    return filled if traced or not isinstance(held, jax.Array) else jax.device_put(filled, held.sharding)


def _check_task(new: PyTree, like: PyTree) -> PyTree:
    """Returns `new`. Raises InputError unless it is numbers in the structure and shapes of `like`."""
    numbers = lambda x: isinstance(x, bool | int | float | np.ndarray | np.generic | jax.Array)
    structure: Any = jax.tree.structure
    same = structure(new) == structure(like)
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(like)) if same else ()
    if not same or not all(numbers(x) and np.shape(x) == y.shape for x, y in pairs):
        raise InputError(f"set_task: expected a task such as {to_python(like)}, got {new!r}")
    return new


def to_python(task: PyTree) -> PyTree:
    """Returns a task with numbers as Python's and arrays as numpy's."""
    arrays = (jax.Array, np.ndarray, np.generic)
    plain = lambda x: x.item() if x.ndim == 0 else np.asarray(x)
    return jax.tree.map(lambda x: plain(x) if isinstance(x, arrays) else x, task)


def select(mask: Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    """Returns leaves [B, ...] of `on_true` where mask [B] is True, of `on_false` elsewhere."""
    pick = lambda a, b: jnp.where(jnp.expand_dims(mask, tuple(range(1, jnp.ndim(a)))), a, b)
    return jax.tree.map(pick, on_true, on_false)


def index(draw: Array, size: int) -> Array:
    """Returns integers 0 .. size - 1 i32, equally likely, of uniform numbers in [0, 1)."""
    return jnp.minimum(jnp.floor(draw * size).astype(jnp.int32), size - 1)


def check_time_limit(value: Any) -> int:
    """Returns the option `max_episode_steps`. Raises InputError unless it is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise InputError(f"env.options.max_episode_steps: expected a positive integer, got {value!r}")
    return int(value)
