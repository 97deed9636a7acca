"""Environment options: pure functions between environments and policy, and the shells that apply them.

An option is a function from the spec of environments to a `Transform`, or to None if it changes nothing. A Transform's
functions take numpy and jax arrays; `xp` is the library. `transformed` applies options from the environments outwards.
Random numbers are an argument: inside a program they come from the environments' keys, on the host from a seed.
`jrl.envs.make.list_options` lists all options in their order.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.envs.spec import check_action, to_numpy
from jrl.ops import random
from jrl.spaces import columns, elements
from jrl.types import Array, AsyncEnv, EnvSpec, JaxEnv, Key, PyTree, Several, StepResult

State = dict[str, PyTree]  # state of all options: name -> arrays [G * c, *], c indices per game


class Draws(NamedTuple):
    """Random numbers f32 [B, size] that an option gets with each step."""

    size: int
    normal: bool = False  # standard normal; False: uniform in [0, 1)


class Transform(NamedTuple):
    """An environment option for environments of one spec.

    Steps obey `jrl.types.StepResult`: the step after an end is masked. The observation of a reset is passed as a step,
    too: reward 0, no ends, all agents absent. On the host, functions may get some games only.
    """

    spec: EnvSpec  # the policy's spec
    # (xp, state, actions in `spec`) -> actions in the inner spec; None: unchanged
    act: Callable[[Any, State, PyTree], PyTree] | None = None
    # (xp, state, actions in `spec` of this step, the step) -> (state, the step in `spec`); None: unchanged
    observe: Callable[..., tuple[State, StepResult]] | None = None
    init: Callable[[Any], State] | None = None  # xp -> state before a reset; None: no state
    draws: Draws | None = None  # random numbers, the last argument of `observe`; None: no such argument


Option = Callable[[EnvSpec], Transform | None]


def transformed(env: Any, *options: Option, seed: int = 0) -> Any:
    """Returns a JaxEnv, Env or AsyncEnv with options applied, the first one innermost; `env` itself without changes.

    Args:
      env: environments of the host or in JAX.
      options: options.
      seed: seed of the options' random numbers on the host; environments in JAX use their keys.
    """
    chain = build_transforms(env.spec, *options)
    if not chain:
        return env
    if isinstance(env, JaxEnv):
        return _wrap_jax(env, chain)
    return (_AsyncEnv if isinstance(env, AsyncEnv) else _SyncEnv)(env, chain, seed)


def build_transforms(spec: EnvSpec, *options: Option) -> list[Transform]:
    """Returns the Transforms of the options that change environments of a spec."""
    chain: list[Transform] = []
    for option in options:
        if (found := option(spec)) is not None:
            chain.append(found)
            spec = found.spec
    return chain


def environment_action(chain: Sequence[Transform], action: PyTree) -> PyTree:
    """Returns the environments' actions, numpy or jax, for the policy's actions; no Transform may have a state."""
    return _act(np if isinstance(jax.tree.leaves(action)[0], np.ndarray) else jnp, chain, {}, action)[0]


def _act(xp: Any, chain: Sequence[Transform], state: State, action: PyTree) -> tuple[PyTree, list[PyTree]]:
    """Returns the environments' actions, and the actions passed to each Transform."""
    taken = []
    for transform in reversed(chain):
        taken.append(action)
        if transform.act is not None:
            action = transform.act(xp, state, action)
    return action, taken[::-1]


def _observe(
    xp: Any,
    chain: Sequence[Transform],
    state: State,
    actions: Sequence[PyTree],
    result: StepResult,
    draw: Callable[[int, Draws], Array],
) -> tuple[State, StepResult]:
    """Returns state and step after all Transforms; `draw` returns the random numbers of Transform i."""
    for i, (transform, action) in enumerate(zip(chain, actions, strict=True)):
        if transform.observe is not None:
            drawn = () if transform.draws is None else (draw(i, transform.draws),)
            state, result = transform.observe(xp, state, action, result, *drawn)
    return state, result


def _init(xp: Any, chain: Sequence[Transform]) -> tuple[State, list[PyTree]]:
    """Returns the state before a reset, and zeros as the actions before it."""
    inits = [transform.init for transform in chain if transform.init is not None]
    zeros = lambda spec: jax.tree.map(lambda x: xp.zeros(x.shape, x.dtype), elements(spec.action, columns(spec)))
    return {name: x for init in inits for name, x in init(xp).items()}, [zeros(one.spec) for one in chain]


def _reset_as_step(xp: Any, spec: EnvSpec, obs: PyTree, there: Array | None) -> StepResult:
    """Returns a reset as a step. `there` [B] bool: agents that act next; None: all."""
    no = xp.zeros(spec.num_envs, bool)
    several = Several(~no, xp.zeros(spec.games, bool), there) if spec.agents else None
    return StepResult(obs, xp.zeros(spec.num_envs, "float32"), no, no, several=several)


# ---------------------------------------------------------------- inside a program


def _wrap_jax(env: JaxEnv, chain: Sequence[Transform]) -> JaxEnv:
    spec, has_state = chain[-1].spec, any(transform.init is not None for transform in chain)
    is_random = any(transform.draws is not None for transform in chain)

    def split(key: Key) -> tuple[Key, Callable[[int, Draws], Array]]:
        """Returns the key of the environments, and the function that draws the options' random numbers."""
        key, own = jax.random.split(key) if is_random else (key, key)

        def draw(i: int, draws: Draws) -> Array:
            return (random.normal if draws.normal else random.uniform)(
                jax.random.fold_in(own, i), (spec.num_envs, draws.size)
            )

        return key, draw

    def reset(key: Key) -> tuple[PyTree, PyTree]:
        key, draw = split(key)
        inner, obs = env.reset(key)
        state, actions = _init(jnp, chain)
        there = None
        if env.spec.agents:
            from jrl.envs.multi_agent import acting_next

            there = acting_next(inner)
        state, result = _observe(jnp, chain, state, actions, _reset_as_step(jnp, env.spec, obs, there), draw)
        # copies: the caller donates state and observation, which must not share a buffer
        return {"env": inner, **state} if has_state else inner, jax.tree.map(jnp.copy, result.obs)

    def step(state: PyTree, action: PyTree, key: Key) -> tuple[PyTree, StepResult]:
        check_action(spec.action, columns(spec), action)  # before transforms, which would broadcast it
        inner, own = (state["env"], {k: v for k, v in state.items() if k != "env"}) if has_state else (state, {})
        key, draw = split(key)
        taken, actions = _act(jnp, chain, own, action)
        inner, result = env.step(inner, taken, key)
        own, result = _observe(jnp, chain, own, actions, result, draw)
        return {"env": inner, **own} if has_state else inner, result

    return wrap_state(env, spec, reset, step) if has_state else env._replace(spec=spec, reset=reset, step=step)


def wrap_state(env: JaxEnv, spec: EnvSpec, reset: Callable[..., Any], step: Callable[..., Any]) -> JaxEnv:
    """Returns environments whose state is a dict that holds the state of `env` under the key `env`."""
    wrapped = env._replace(spec=spec, reset=reset, step=step)
    if (draw := env.draw) is not None:
        wrapped = wrapped._replace(draw=lambda state, number: draw(state["env"], number))
    if (set_task := env.set_task) is None or (get_task := env.get_task) is None:
        return wrapped
    return wrapped._replace(
        set_task=lambda state, task: {**state, "env": set_task(state["env"], task)},
        get_task=lambda state: get_task(state["env"]),
    )


# ---------------------------------------------------------------- on the host


class _OnHost:
    """Host environments with options applied; other members are passed through."""

    def __init__(self, env: Any, chain: Sequence[Transform], seed: int):
        self._env, self._chain, self.spec = env, chain, chain[-1].spec
        self._random = np.random.default_rng(seed)
        self._changes = any(transform.act is not None for transform in chain)
        self._acts_by_state = any(transform.act is not None and transform.init is not None for transform in chain)
        self._init_state()

    def _init_state(self) -> None:
        self._state, self._actions = _init(np, self._chain)

    def _act(self, action: PyTree, rows: Array | None) -> PyTree:
        """Returns the environments' actions of the games `rows` [n]; None: all games."""
        action = to_numpy(action)
        if self._changes:  # otherwise the environments check the action
            games = self.spec.games if rows is None else len(rows)
            check_action(self.spec.action, columns(self.spec, games), action)  # transforms would broadcast it
        state = select_games(self._state, rows, self.spec.games) if self._acts_by_state else {}
        taken, actions = _act(np, self._chain, state, action)
        self._actions = write_games(self._actions, rows, actions, self.spec.games)
        return taken

    def _observe(self, result: StepResult, rows: Array | None) -> StepResult:
        state, actions = select_games((self._state, self._actions), rows, self.spec.games)
        num = len(result.reward)

        def draw(i: int, draws: Draws) -> Array:
            fn = self._random.standard_normal if draws.normal else self._random.random
            return fn((num, draws.size), np.float32)

        state, result = _observe(np, self._chain, state, actions, result, draw)
        self._state = write_games(self._state, rows, state, self.spec.games)
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    def close(self) -> None:
        self._env.close()


class _SyncEnv(_OnHost):
    def reset(self) -> PyTree:
        self._init_state()
        obs = self._env.reset()
        return self._observe(_reset_as_step(np, self._env.spec, obs, getattr(self._env, "there", None)), None).obs

    def step(self, action: PyTree) -> StepResult:
        return self._observe(self._env.step(self._act(action, None)), None)


class _AsyncEnv(_OnHost):
    def __init__(self, env: AsyncEnv, chain: Sequence[Transform], seed: int):
        super().__init__(env, chain, seed)
        self.batch_size, self.least = env.batch_size, env.least

    def reset(self) -> None:
        self._init_state()
        self._env.reset()

    def send(self, action: PyTree, env_id: Array) -> None:
        self._env.send(self._act(action, env_id), env_id)

    def recv(self) -> tuple[Array, StepResult]:
        env_id, result = self._env.recv()
        return env_id, self._observe(result, env_id)


# ---------------------------------------------------------------- agent indices of some games


def agent_indices(rows: Array, count: int) -> np.ndarray:
    """Returns the agent indices of games, each of which has `count` consecutive indices.

    >>> agent_indices(np.array([2, 0]), 3)
    array([6, 7, 8, 0, 1, 2])
    """
    rows = np.asarray(rows)
    return rows if count == 1 else (rows[:, None] * count + np.arange(count)).reshape(-1)


def select_games(tree: PyTree, rows: Array | None, games: int) -> PyTree:
    """Returns the games `rows` [n] of arrays [G * c, *]: copies [n * c, *]. None: `tree` itself."""
    return tree if rows is None else jax.tree.map(lambda x: x[agent_indices(rows, len(x) // games)], tree)


def write_games(tree: PyTree, rows: Array | None, new: PyTree, games: int) -> PyTree:
    """Writes the games `rows` into arrays [G * c, *]; return the arrays. None: return `new`."""
    if rows is None:
        return new
    for x, own in zip(jax.tree.leaves(tree), jax.tree.leaves(new), strict=True):
        x[agent_indices(rows, len(x) // games)] = own
    return tree
