"""Environments of jumanji (`jumanji:NAME`), if it is installed: of one agent, or of a team of several agents.

The discount of jumanji's TimeStep is 0 after a true end, and in most environments at the time limit, too. Their limit
is therefore removed and applied outside.
"""

import copy
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.envs.jax_env import check_time_limit
from jrl.envs.multi_agent import add_state_space
from jrl.envs.spec import make_box
from jrl.envs.suites import NEVER, import_suite, unknown, vectorize, vectorize_games
from jrl.errors import InputError
from jrl.fields.env import EnvConfig
from jrl.spaces import ACTION_MASK, STATE, num_choices, unstack_space
from jrl.types import Array, Box, Dict, Discrete, EnvSpec, JaxEnv, Key, MultiBinary, MultiDiscrete, PyTree, Space

_MOST_CHOICES = 64  # more values of an observed integer are a number, not a choice
# teams: id without its version -> fields of the observation that have an axis of agents, beside `action_mask`
_TEAMS = {
    "Cleaner": ("agents_locations",),
    "Connector": (),
    "LevelBasedForaging": ("agents_view",),
    "MultiCVRP": ("vehicles",),
    "RobotWarehouse": ("agents_view",),
    "SearchAndRescue": ("searcher_views", "positions"),
}


def is_team(name: str) -> bool:
    """Returns whether an environment has several agents."""
    return name.partition("-")[0] in _TEAMS


def make_jumanji(name: str, cfg: EnvConfig, options: dict[str, Any], state: bool) -> JaxEnv:
    """Makes B environments of jumanji; options: `max_episode_steps`, and arguments of jumanji's class.

    Observations are dicts of the fields of jumanji's observations, `action_mask` included. The agents of a team are
    agent_0, agent_1, ...: see `_make_team`.
    """
    jumanji = import_suite("jumanji")
    if name not in (known := jumanji.registered_environments()):
        raise unknown(f"env.id jumanji:{name}: jumanji has no such environment", name, known)
    limit = options.pop("max_episode_steps", None)
    try:
        env = jumanji.make(name, **options)
    except (TypeError, ValueError) as e:
        raise InputError(f"env.options: jumanji:{name}: {e}") from e
    limit = getattr(env, "time_limit", None) if limit is None else check_time_limit(limit)
    if is_team(name):
        return _make_team(env, _TEAMS[name.partition("-")[0]], limit, cfg.num_envs, state)
    action, to_env = _convert_action(env.action_spec, env.observation_spec)
    observation = _convert_observation(env.observation_spec, action)
    if hasattr(env, "time_limit"):
        env.time_limit = NEVER  # after the spaces, some of which contain the limit

    def reset_one(key: Key) -> tuple[Any, PyTree]:
        inner, timestep = env.reset(key)
        return inner, _read(observation, timestep.observation)

    def step_one(inner: Any, action: Array, key: Key) -> tuple[Any, PyTree, Array, Array]:
        inner, timestep = env.step(inner, to_env(action))
        obs = _read(observation, timestep.observation)
        return inner, obs, timestep.reward, timestep.last() & (timestep.discount == 0)

    return vectorize(EnvSpec(observation, action, cfg.num_envs, limit), reset_one, step_one, cfg.reset)


def _make_team(env: Any, fields: tuple[str, ...], limit: int | None, num_envs: int, state: bool) -> JaxEnv:
    """Makes games of a team. Each agent observes its own row of `fields` and `action_mask`, and all of the rest.

    A reward that jumanji gives to the team is each agent's reward. An agent ends as soon as its discount is 0, such as
    a connected agent of Connector. With `state` the global state is the whole observation but the mask, flat f32.
    """
    count = env.action_spec.shape[0]
    mask = _parts(env.observation_spec).get(ACTION_MASK)
    action = unstack_space(_convert_action(env.action_spec, env.observation_spec)[0], count)
    if mask is not None:  # MultiCVRP's own bound has one action too many
        action = Discrete(mask.shape[-1])
    assert action is not None
    whole = _convert_observation(env.observation_spec, action)
    assert isinstance(whole, Dict)
    own_fields = {*fields, ACTION_MASK}
    own = Dict(tuple((k, (k in own_fields and unstack_space(part, count)) or part) for k, part in whole.items))
    unlimited = copy.copy(env)
    if hasattr(env, "time_limit"):
        env.time_limit, unlimited.time_limit = limit, NEVER  # SearchAndRescue's rewards depend on its limit

    def observe(obs: Any) -> PyTree:
        """Returns the observations of all agents of a game, leaves [A, *]."""
        repeat = lambda x: jnp.broadcast_to(x, (count, *x.shape))
        read = _read(whole, obs)
        found = {name: x if name in own_fields else jax.tree.map(repeat, x) for name, x in read.items()}
        if state:
            seen = [x.astype(jnp.float32).reshape(-1) for x in jax.tree.leaves({**read, ACTION_MASK: ()})]
            found[STATE] = repeat(jnp.concatenate(seen))
        return found

    def reset_one(key: Key) -> tuple[Any, PyTree]:
        inner, timestep = env.reset(key)
        return inner, observe(timestep.observation)

    def step_one(inner: Any, actions: PyTree, key: Key) -> tuple[Any, PyTree, Array, Array]:
        after, timestep = env.step(inner, actions)
        ended = unlimited.step(inner, actions)[1].discount == 0
        each = lambda x: jnp.broadcast_to(x, (count,))
        return after, observe(timestep.observation), each(timestep.reward), each(ended)

    observation = own
    if state:
        first = jax.eval_shape(lambda key: reset_one(key)[1], jax.random.key_data(jax.random.key(0)))
        observation = add_state_space(own, Box(first[STATE].shape[1:]))
    agents = tuple(f"agent_{i}" for i in range(count))
    spec = EnvSpec(observation, action, num_envs * count, limit, agents=agents)
    return vectorize_games(spec, reset_one, step_one)


# ---------------------------------------------------------------- spaces of jumanji


def _parts(spec: Any) -> dict[str, Any]:
    """Returns the named specs of a nested spec; {}: a spec of one array."""
    return dict(spec._specs) if type(spec).__name__ == "Spec" else {}


def _convert_action(spec: Any, observed: Any) -> tuple[Space, Any]:
    """Returns the space of actions, and the function from its elements to jumanji's actions.

    A mask over all combinations of a MultiDiscrete action makes it Discrete.
    """
    unchanged = lambda action: action
    if hasattr(spec, "num_values"):
        sizes = tuple(int(n) for n in np.asarray(spec.num_values).reshape(-1))
        if np.ndim(spec.num_values) == 0:
            return Discrete(sizes[0]), unchanged
        mask = _parts(observed).get(ACTION_MASK)
        if mask is not None and tuple(mask.shape) == sizes:
            return Discrete(math.prod(sizes)), lambda action: jnp.stack(jnp.unravel_index(action, sizes), -1)
        return MultiDiscrete(sizes), lambda action: action.reshape(np.shape(spec.num_values))
    return make_box(tuple(spec.shape), spec.minimum, spec.maximum), unchanged


def _convert_observation(spec: Any, action: Space) -> Space:
    if parts := _parts(spec):
        found = {name: _convert_observation(part, action) for name, part in parts.items()}
        if ACTION_MASK in found and (choices := num_choices(action)) == math.prod(parts[ACTION_MASK].shape):
            found[ACTION_MASK] = MultiBinary((choices,))
        return Dict(tuple(found.items()))
    dtype = np.dtype(spec.dtype)
    if dtype.kind == "b":
        return MultiBinary(tuple(spec.shape))
    if type(spec).__name__ == "DiscreteArray" and int(spec.num_values) <= _MOST_CHOICES:
        return Discrete(int(spec.num_values))
    low, high = getattr(spec, "minimum", -np.inf), getattr(spec, "maximum", np.inf)
    return make_box(tuple(spec.shape), low, high)


def _read(space: Any, obs: Any) -> PyTree:
    """Returns an observation of jumanji, nested named tuples, as an element of the space.

    A mask without allowed actions, as after an end, allows all.
    """
    if not isinstance(space, Dict):
        return jnp.asarray(obs).reshape(space.shape).astype(space.dtype)
    found = {name: _read(part, getattr(obs, name)) for name, part in space.items}
    if (mask := found.get(ACTION_MASK)) is not None and isinstance(space[ACTION_MASK], MultiBinary):
        found[ACTION_MASK] = jnp.where(mask.any(-1, keepdims=True), mask, 1).astype(mask.dtype)
    return found
