"""Environments of gymnax, craftax, brax and MuJoCo Playground (`gymnax:NAME`, `playground:NAME`, ...), if installed.

A suite is a function that returns `vectorize(spec, reset_one, step_one, cfg.reset)`, and its line in `backends.SUITES`.
"""

import contextlib
import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.envs import spec as spaces
from jrl.envs.jax_env import check_time_limit, count_step, select, under_contract
from jrl.envs.multi_agent import GamesState, end_step
from jrl.errors import cannot_import
from jrl.fields.env import EnvConfig
from jrl.registry import load as load_function
from jrl.spaces import map_leaves
from jrl.types import (
    Array,
    Box,
    Dict,
    Discrete,
    EnvSpec,
    InputError,
    JaxEnv,
    Key,
    MultiDiscrete,
    PyTree,
    Space,
    StepResult,
    Tuple,
)

if TYPE_CHECKING:  # imported with `env.randomize` only
    from jrl.envs.randomization import Tasks

NEVER = 2**30  # steps of an episode whose time limit is applied outside
_CHUNKS = 64  # a step computes resets for B / 64 environments at a time


def import_suite(module: str, load: Callable[[str], Any] = importlib.import_module) -> Any:
    """Returns a module of a suite. Raises InputError: it, or a package that it needs, is not installed or too old."""
    package = module.partition(".")[0]
    suite = package.removeprefix("mujoco_")  # playground is the module mujoco_playground
    try:
        return load(module)
    except (ImportError, AttributeError) as e:  # AttributeError: a package that does not fit this jax
        raise InputError(f"env.id {suite}:...: {cannot_import(package, e, suite)}") from e


def vectorize(
    spec: EnvSpec,
    reset_one: Callable[[Key], tuple[PyTree, PyTree]],
    step_one: Callable[[PyTree, PyTree, Key], tuple[PyTree, PyTree, Array, Array]],
    reset_mode: str = "each",
    tasks: "Tasks | None" = None,
) -> JaxEnv:
    """Returns B environments under the contract from the functions of one environment.

    Args:
      spec: spec of the B environments, with the time limit to apply.
      reset_one: key -> (state, obs).
      step_one: (state, action, key) -> (state, obs, reward, true end), without a reset and without a time limit.
      reset_mode: `env.reset`. "each": each environment that ended gets its own fresh state. "shared(k)": environments
        that ended on the same step share k fresh states. "first": each returns to its first state.
      tasks: tasks that environments draw; both functions get the task of one environment as the last argument.
    """
    reset_one, step_one = _make_storable(reset_one, step_one)
    keys = lambda key: jax.random.split(key, spec.num_envs)
    num_shared = int(reset_mode[len("shared(") : -1]) if reset_mode.startswith("shared(") else None

    def reset(key: Key, *task: PyTree) -> tuple[PyTree, PyTree]:
        first = jax.vmap(reset_one)(keys(key), *task)
        return ((first[0], first), first[1]) if reset_mode == "first" else first

    def advance(
        inner: PyTree, action: PyTree, key: Key, fresh: Array, *task: PyTree
    ) -> tuple[PyTree, PyTree, Array, Array]:
        step_key, reset_key = jax.random.split(key)
        inner, first = inner if reset_mode == "first" else (inner, None)
        inner, obs, reward, end = jax.vmap(step_one)(inner, action, keys(step_key), *task)
        if reset_mode == "first":
            inner, obs = select(fresh, first, (inner, obs))
            return (inner, first), obs, reward, end
        if num_shared is None:
            inner, obs = _reset_each(reset_one, (keys(reset_key), *task), fresh, (inner, obs))
        else:
            inner, obs = _reset_shared(reset_one, jax.random.split(reset_key, num_shared), fresh, (inner, obs))
        return inner, obs, reward, end

    return under_contract(spec, reset, advance, tasks=tasks)


@struct.dataclass
class _Key:
    """A random key as the numbers of `jax.random.key_data`."""

    data: Array  # u32
    impl: str = struct.field(pytree_node=False)


@struct.dataclass
class _Empty:
    """An array without elements, which needs no storage."""

    like: jax.ShapeDtypeStruct = struct.field(pytree_node=False)


def _make_storable(reset_one: Callable[..., Any], step_one: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """Returns functions of one environment whose state consists of arrays that Orbax can save."""

    def pack(x: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            return _Key(jax.random.key_data(x), str(jax.random.key_impl(x)))
        return x if jnp.size(x) else _Empty(jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)))

    def unpack(x: Any) -> Any:
        if isinstance(x, _Key):
            return jax.random.wrap_key_data(jnp.asarray(x.data), impl=x.impl)
        return jnp.zeros(x.like.shape, x.like.dtype) if isinstance(x, _Empty) else x

    def reset(*given: Any) -> tuple[PyTree, PyTree]:
        state, obs = reset_one(*given)
        return jax.tree.map(pack, state), obs

    def step(state: PyTree, *given: Any) -> tuple[PyTree, PyTree, Array, Array]:
        state = jax.tree.map(unpack, state, is_leaf=lambda x: isinstance(x, _Key | _Empty))
        state, *result = step_one(state, *given)
        return jax.tree.map(pack, state), *result

    return reset, step


def vectorize_games(
    spec: EnvSpec,
    reset_one: Callable[[Key], tuple[PyTree, PyTree]],
    step_one: Callable[[PyTree, PyTree, Key], tuple[PyTree, PyTree, Array, Array]],
) -> JaxEnv:
    """Returns G games of A agents under the contract of `jrl.types.Several` from the functions of one game.

    Args:
      spec: spec of the G * A agents, all of the same spaces, with the time limit to apply.
      reset_one: key -> (state, obs [A, *]).
      step_one: (state, actions [A, *], key) -> (state, obs [A, *], reward [A], true ends [A]), without a reset and
        without a time limit. Actions of agents that have ended are arbitrary.
    """
    reset_one, step_one = _make_storable(reset_one, step_one)
    size = spec.num_agents
    keys = lambda key: jax.random.split(key, spec.games)
    flat = lambda tree: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)

    def reset(key: Key) -> tuple[GamesState, PyTree]:
        inner, obs = jax.vmap(reset_one)(keys(key))
        state = GamesState(inner, jnp.zeros(spec.games, jnp.int32), jnp.ones((spec.games, size), bool))
        # copies: the caller donates state and observation, which must not share a buffer
        return state, jax.tree.map(jnp.copy, flat(obs))

    def step(state: GamesState, action: PyTree, key: Key) -> tuple[GamesState, StepResult]:
        spaces.check_action(spec.action, spec.num_envs, action)  # while tracing: shape and dtype
        step_key, reset_key = jax.random.split(key)
        by_game = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), action)
        counted = count_step(state.elapsed, spec.max_episode_steps)
        inner, obs, reward, ended = jax.vmap(step_one)(state.inner, by_game, keys(step_key))
        inner, obs = _reset_each(reset_one, (keys(reset_key),), counted[0], (inner, obs))
        return end_step(state.there, counted, inner, obs, reward, ended)

    return JaxEnv(spec, reset, step)


def _reset_each(reset_one: Callable[..., PyTree], given: tuple[PyTree, ...], fresh: Array, stepped: PyTree) -> PyTree:
    """Returns `stepped`, leaves [B, ...], with a reset of each environment that is `fresh` [B].

    `given` has the arguments of `reset_one`, leaves [B, ...]: a key, and the task if there is one.

    Resets are computed in chunks of B / 64 environments, as many as this step needs: few environments end on a step.
    """
    num = len(fresh)
    size = -(-num // _CHUNKS)
    order = jnp.argsort(~fresh, stable=True)  # environments that reset come first
    order = jnp.concatenate([order, jnp.full(-num % size, num)])
    count = fresh.sum()

    def body(carry: Any) -> Any:
        start, tree = carry
        index = jax.lax.dynamic_slice(order, (start,), (size,))
        new = jax.vmap(reset_one)(*jax.tree.map(lambda x: x[jnp.minimum(index, num - 1)], given))
        index = jnp.where(start + jnp.arange(size) < count, index, num)  # out of range: not written
        return start + size, jax.tree.map(lambda x, y: x.at[index].set(y, mode="drop"), tree, new)

    return jax.lax.while_loop(lambda carry: carry[0] < count, body, (jnp.zeros_like(count), stepped))[1]


def _reset_shared(reset_one: Callable[[Key], PyTree], keys: Key, fresh: Array, stepped: PyTree) -> PyTree:
    """As `_reset_each`, but the environments share the states of k resets by `keys` [k], in turn."""

    def reset() -> PyTree:
        index = (jnp.cumsum(fresh) - 1) % len(keys)
        return select(fresh, jax.tree.map(lambda x: x[index], jax.vmap(reset_one)(keys)), stepped)

    return jax.lax.cond(fresh.any(), reset, lambda: stepped)


def unknown(what: str, name: str, known: Iterable[str]) -> InputError:
    """Returns the error of a name that is not among the known."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 3)
    return InputError(f"{what}: " + (f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(known)}"))


def make_gymnax(name: str, cfg: EnvConfig, options: dict[str, Any], state: bool) -> JaxEnv:
    """Makes B environments of gymnax; options: `max_episode_steps`, gymnax's parameters, arguments of its class."""
    gymnax = import_suite("gymnax")
    known = list(gymnax.registered_envs)
    if name not in known:
        raise unknown(f"env.id gymnax:{name}: gymnax has no such environment", name, known)
    env, params = gymnax.make(name)
    sizes = [p.name for p in inspect.signature(type(env)).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if given := {key: options.pop(key) for key in sizes if key in options}:
        try:
            env, params = gymnax.make(name, **given)
        except (TypeError, ValueError) as e:
            raise InputError(f"env.options: gymnax:{name} refuses {given}: {str(e).splitlines()[0]}") from e
    own = getattr(params, "max_steps_in_episode", None)
    limit = options.pop("max_episode_steps", options.get("max_steps_in_episode", own))
    limit = None if limit is None else check_time_limit(limit)
    fields = list(params.__dataclass_fields__)
    for key in options:
        if key not in fields:
            raise unknown(f"env.options.{key}: gymnax:{name} has no such parameter", key, [*fields, *sizes])
    params = params.replace(**options)
    endless = params
    if own is not None:
        # keep the type: BernoulliBandit's is a float
        params, endless = (params.replace(max_steps_in_episode=type(own)(x)) for x in (limit, NEVER))
    observation = convert_space(env.observation_space(params))
    action = convert_space(env.action_space(params))
    typed = lambda obs: map_leaves(lambda leaf, x: x.astype(leaf.dtype), observation, obs)

    def reset_one(key: Key, task: Mapping[str, Any] = {}) -> tuple[Any, PyTree]:
        obs, state = env.reset_env(key, params.replace(**task))
        return state, typed(obs)

    def step_one(
        state: Any, action: PyTree, key: Key, task: Mapping[str, Any] = {}
    ) -> tuple[Any, PyTree, Array, Array]:
        # gymnax 0.0.9: obs, state, reward, done, info; 1.0: obs, state, reward, terminated, truncated, info
        obs, state, reward, end = env.step_env(key, state, action, params.replace(**task))[:4]
        if not hasattr(env, "is_truncated"):  # gymnax 0.0.9 reports its limit as an end
            end = env.is_terminal(state, endless.replace(**task))
        return state, typed(obs), reward, end

    spec = EnvSpec(observation, action, cfg.num_envs, limit)
    return vectorize(spec, reset_one, step_one, cfg.reset, _draw_parameters(cfg, params))


def _draw_parameters(cfg: EnvConfig, params: Any) -> "Tasks | None":
    """Returns the tasks of `env.randomize`, parameters of a suite. Raises InputError: an unknown parameter."""
    if not cfg.ranges:
        return None
    known = [name for name in params.__dataclass_fields__ if isinstance(getattr(params, name), float)]
    for name in cfg.ranges:
        if name not in known:
            raise unknown(f"env.randomize.{name}: {cfg.id} has no such number", name, known)
    from jrl.envs.randomization import draw_uniformly

    return draw_uniformly(cfg)


def make_craftax(name: str, cfg: EnvConfig, options: dict[str, Any], state: bool) -> JaxEnv:
    """Makes B environments of craftax; options: `max_episode_steps`, and craftax's parameters."""
    names = import_suite("craftax.craftax_env")
    try:
        env = names.make_craftax_env_from_name(name, auto_reset=False)
    except ValueError as e:
        known = [f"Craftax-{kind}-v1" for kind in ("Symbolic", "Pixels", "Classic-Symbolic", "Classic-Pixels")]
        raise unknown(f"env.id craftax:{name}: craftax has no such environment", name, known) from e
    params = env.default_params
    limit = check_time_limit(options.pop("max_episode_steps", params.max_timesteps))
    fields = list(params.__dataclass_fields__)
    for key in options:
        if key not in fields:
            raise unknown(f"env.options.{key}: craftax:{name} has no such parameter", key, fields)
    params = params.replace(**{**options, "max_timesteps": NEVER})
    observation, action = convert_space(env.observation_space(params)), convert_space(env.action_space(params))

    def reset_one(key: Key, task: Mapping[str, Any] = {}) -> tuple[Any, PyTree]:
        obs, inner = env.reset_env(key, params.replace(**task))
        return inner, obs

    def step_one(inner: Any, action: Array, key: Key, task: Mapping[str, Any] = {}) -> tuple[Any, PyTree, Array, Array]:
        obs, inner, reward, end, _ = env.step_env(key, inner, action, params.replace(**task))
        return inner, obs, reward, end

    spec = EnvSpec(observation, action, cfg.num_envs, limit)
    return vectorize(spec, reset_one, step_one, cfg.reset, _draw_parameters(cfg, params))


def convert_space(space: Any) -> Space:
    """Returns jrl's space for gymnax's or JaxMARL's."""
    kind = type(space).__name__
    if kind == "Discrete":
        return Discrete(int(space.n))
    if kind == "Box":
        dtype = np.dtype(space.dtype).name
        return spaces.make_box(tuple(space.shape), space.low, space.high, spaces.NARROW.get(dtype, dtype))
    if kind == "MultiDiscrete":  # JaxMARL only
        return MultiDiscrete(tuple(int(n) for n in space.num_categories))
    if kind == "Dict":
        return Dict(tuple((name, convert_space(part)) for name, part in space.spaces.items()))
    if kind == "Tuple":
        return Tuple(tuple(convert_space(part) for part in space.spaces))
    raise InputError(f"space {kind} is not supported: use an environment with Box, Discrete, Dict or Tuple spaces")


def _brax_space(size: Any) -> Space:
    """Returns the space of a size, a shape, or a dict of these."""
    if isinstance(size, Mapping):
        return Dict(tuple((name, _brax_space(part)) for name, part in size.items()))
    return Box(tuple(size) if isinstance(size, tuple | list) else (int(size),))


def make_brax(name: str, cfg: EnvConfig, options: dict[str, Any], state: bool) -> JaxEnv:
    """Makes B environments of brax; options: `max_episode_steps`, and arguments of brax's class."""
    envs = import_suite("brax.envs")
    if name not in envs._envs:
        raise unknown(f"env.id brax:{name}: brax has no such environment", name, envs._envs)
    limit = check_time_limit(options.pop("max_episode_steps", 1000))
    try:
        env = envs.get_environment(name, **options)
    except (TypeError, ValueError) as e:
        raise InputError(f"env.options: brax:{name}: {e}") from e
    return _from_state_env(env, cfg, limit)


def make_playground(name: str, cfg: EnvConfig, options: dict[str, Any], state: bool) -> JaxEnv:
    """Makes B environments of MuJoCo Playground; options: `max_episode_steps`, and keys of playground's config.

    `impl`, the physics engine, is `warp` with CUDA and warp-lang, else `jax`. An `action_repeat` in playground's config
    is not applied: `env.action_repeat` does that. With `env.randomize` each environment has a model, drawn once.
    """
    registry = import_suite("mujoco_playground").registry
    if name not in registry.ALL_ENVS:
        raise unknown(f"env.id playground:{name}: playground has no such environment", name, registry.ALL_ENVS)
    config = registry.get_default_config(name)
    limit = check_time_limit(options.pop("max_episode_steps", config.episode_length))
    if "impl" in config:
        has_warp = jax.default_backend() == "gpu" and importlib.util.find_spec("warp") is not None
        options = {"impl": "warp" if has_warp else "jax", **options}
    try:
        env = registry.load(name, config_overrides=options)
    except (KeyError, TypeError, ValueError) as e:
        raise InputError(f"env.options: playground:{name}: {e}") from e
    if not cfg.randomize:
        return _from_state_env(env, cfg, limit)
    if isinstance(cfg.randomize, str):
        function = load_function(cfg.randomize, "env.randomize")
    elif (function := registry.get_domain_randomizer(name)) is None:
        raise InputError(f"env.randomize: playground draws no models of {name}: use a function package.module:name")
    from jrl.envs.randomization import draw_models

    tasks, model_of = draw_models(function, env.mjx_model, cfg.num_envs)

    @contextlib.contextmanager
    def use_model(task: PyTree) -> Iterator[None]:
        inner = env.unwrapped
        shared = inner._mjx_model  # as playground's own wrapper does: there is no public way
        inner._mjx_model = model_of(task)
        try:
            yield
        finally:
            inner._mjx_model = shared

    return _from_state_env(env, cfg, limit, tasks, use_model)


def _from_state_env(
    env: Any,
    cfg: EnvConfig,
    limit: int,
    tasks: "Tasks | None" = None,
    use: Callable[[PyTree], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> JaxEnv:
    """Returns B environments of brax's interface: reset(key) -> State, step(State, action) -> State.

    Args:
      env, cfg, limit: environment, section, and time limit.
      tasks: tasks that environments draw.
      use: context in which `env` has the task of one environment.
    """
    action = Box((env.action_size,), "float32", -1.0, 1.0)
    spec = EnvSpec(_brax_space(env.observation_size), action, cfg.num_envs, limit)

    def reset_one(key: Key, task: PyTree = None) -> tuple[Any, PyTree]:
        with use(task):
            state = env.reset(key)
        return state, state.obs

    def step_one(state: Any, action: Array, key: Key, task: PyTree = None) -> tuple[Any, PyTree, Array, Array]:
        with use(task):
            state = env.step(state, action)
        return state, state.obs, state.reward, jnp.asarray(state.done, bool)

    return vectorize(spec, reset_one, step_one, cfg.reset, tasks)
