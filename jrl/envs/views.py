"""Views of agents: with their numbers, with what a user's function shows, with the rewards of some alone."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl import registry, spaces
from jrl.envs.behind import View, part, put, through
from jrl.errors import InputError
from jrl.types import (
    Array,
    Box,
    Dict,
    Discrete,
    Env,
    EnvSpec,
    JaxEnv,
    Key,
    PyTree,
    Space,
    StepResult,
    Tuple,
    element,
)

AGENT_ID = "agent_id"  # leaf of an observation
OBS, GAME = "obs", "game"  # leaves of an observation that tells which game of its environment this is
Look = Callable[[PyTree], PyTree]  # observations [B, *] -> what is seen, [B, *]


def with_agent_ids(env: JaxEnv | Env) -> JaxEnv | Env:
    """Shows each agent its number among the A of its environment, as the leaf `agent_id`.

    A policy that several agents share can tell them apart by it. A plain observation becomes Dict{obs, agent_id}.

    Raises:
      InputError: observations have such a leaf already.
    """
    spec = env.spec
    numbers = spaces.of_kinds(spec.kinds, np.tile(np.arange(len(spec.agents), dtype=np.int32), spec.games))
    own = [one.observation for one in spaces.by_kind(spec)]
    if any(isinstance(part, Dict) and AGENT_ID in dict(part.items) for part in own):
        raise InputError(f"multi_agent.agent_id: observations have a leaf {AGENT_ID} already: leave it out")

    def shown(space: Space) -> Space:
        if spec.kinds and isinstance(space, Tuple):
            return Tuple(tuple(map(of_one, space.items)))
        return of_one(space)

    def of_one(space: Space) -> Dict:
        items = space.items if isinstance(space, Dict) else (("obs", space),)
        return Dict((*items, (AGENT_ID, Discrete(len(spec.agents)))))

    def with_ids(k: int, obs: PyTree) -> PyTree:
        first = jax.tree.leaves(obs)[0]
        own_numbers = numbers[k][: len(first)]  # fewer games have the first of them
        of_agents = own_numbers if isinstance(first, np.ndarray) else jnp.asarray(own_numbers)
        return {**(obs if isinstance(own[k], Dict) else {"obs": obs}), AGENT_ID: of_agents}

    def look(obs: PyTree) -> PyTree:
        return tuple(with_ids(k, x) for k, x in enumerate(obs)) if spec.kinds else with_ids(0, obs)

    before = None if spec.env_observation is None else shown(spec.env_observation)
    return _seen(env, spec._replace(observation=shown(spec.observation), env_observation=before), look)


def with_function(env: JaxEnv | Env, path: str) -> JaxEnv | Env:
    """Shows each agent what a user's function makes of all their observations (RLlib's `observation_fn`).

    Args:
      env: of several agents.
      path: of a pure function `fn(obs)`, traced by jax: from one environment's observations, a dict by agent, to a dict
        by agent of what each sees, all of a kind in one structure. A leaf `action_mask` stays what it is.
    Raises:
      InputError: it cannot be loaded or traced, or gives something else.
    """
    key = f"multi_agent.observation_fn {path}"
    fn, agents = registry.load(path, "multi_agent.observation_fn"), env.spec.agents
    kinds = env.spec.kinds or (tuple(range(len(agents))),)
    if not _takes_one(fn):
        raise InputError(
            f"{key}: expected a pure function of one argument, {{agent: observation}} -> {{agent: what it sees}}, "
            f"got one of {', '.join(inspect.signature(fn).parameters)}: as RLlib calls its own; jax traces it, so "
            "that no worker or episode is there: leave them out"
        )

    def of_one(obs: dict[str, PyTree]) -> PyTree:
        found = fn(obs)
        if not isinstance(found, dict) or set(found) != set(agents):
            got = ", ".join(map(str, found)) if isinstance(found, dict) else type(found).__name__
            raise InputError(f"{key}: expected a dict of {', '.join(agents)}, got {got}")
        stacked = lambda *x: jnp.stack([jnp.asarray(one) for one in x])
        return tuple(jax.tree.map(stacked, *(found[agents[i]] for i in kind)) for kind in kinds)

    own = spaces.by_kind(env.spec)
    kind_of = {i: k for k, kind in enumerate(kinds) for i in kind}
    try:
        shown = jax.eval_shape(of_one, {agent: element(own[kind_of[i]].observation) for i, agent in enumerate(agents)})
    except InputError:
        raise
    except Exception as e:  # the user's function, and all that jax says of one that cannot be traced
        told = str(e).splitlines()[0] if str(e) else ""
        raise InputError(f"{key}: it cannot be traced for observations {env.spec.observation}: {told}") from e
    without = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
    found = tuple(_space_of(without(tree), one.observation) for tree, one in zip(shown, own, strict=True))

    @jax.jit
    def look(obs: PyTree) -> PyTree:
        each: dict[str, PyTree] = {}
        for kind, seen in zip(kinds, obs if env.spec.kinds else (obs,), strict=True):
            size = len(kind)
            split = jax.tree.map(lambda x, n=size: x.reshape(-1, n, *x.shape[1:]), seen)
            each |= {agents[i]: jax.tree.map(lambda x, j=j: x[:, j], split) for j, i in enumerate(kind)}
        seen = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.vmap(of_one)(each))
        return seen if env.spec.kinds else seen[0]

    def from_host(obs: PyTree) -> PyTree:
        """As `look`, of fewer games, too, by the same compiled program."""
        size = sum(len(jax.tree.leaves(one)[0]) for one in (obs if env.spec.kinds else (obs,)))
        games, given = env.spec.games, size // len(agents)
        if given == games:
            return jax.tree.map(np.asarray, look(obs))
        numbers = np.minimum(np.arange(games), given - 1)  # the last of them stands for those that are missing
        seen = look(part(obs, numbers, given))
        return part(jax.tree.map(np.asarray, seen), np.arange(given), games)

    space = Tuple(found) if env.spec.kinds else found[0]
    return _seen(env, env.spec._replace(observation=space), look if isinstance(env, JaxEnv) else from_host)


def with_rewards_of(env: Any, columns: np.ndarray, block: int) -> Any:
    """Sets the rewards of all but some agents to 0, so that the return of a game, which is a sum, is theirs.

    Args:
      env: a JaxEnv or Env of several agents.
      columns: those that keep their rewards, of the first `block`; the others follow in the same pattern.
      block: columns after which the pattern repeats.
    """
    kept = np.tile(np.isin(np.arange(block), columns), env.spec.num_envs // block).astype(np.float32)
    if not isinstance(env, JaxEnv):
        return through(env, _Earning(env.spec, kept))

    def step(state: PyTree, action: PyTree, key: Key) -> tuple[PyTree, StepResult]:
        state, result = env.step(state, action, key)
        return state, result._replace(reward=result.reward * kept)

    return env._replace(step=step)


class _Earning(View):
    """Environments with the rewards of some agents alone."""

    def __init__(self, spec: EnvSpec, kept: np.ndarray):
        super().__init__(spec)
        self._kept = kept

    def told(self, result: StepResult, rows: Array | None) -> StepResult:
        return result._replace(reward=result.reward * part(self._kept, rows, self.spec.games))


def with_game_numbers(env: JaxEnv | Env) -> JaxEnv | Env:
    """Adds the number of the game to observations: Dict{obs: what they were, game: [] i32}.

    Games count from 0, those of each environment for themselves; who is asked for each game who acts goes by it.
    """
    spec = env.spec
    number = Box((), "int32", 0, np.iinfo(np.int32).max)
    shown = spec._replace(observation=Dict(((OBS, spec.observation), (GAME, number))))
    if not isinstance(env, JaxEnv):
        return through(env, _Numbered(shown))
    by_column = lambda game: jnp.repeat(game, len(spec.agents))

    def reset(key: Key) -> tuple[PyTree, PyTree]:
        state, obs = env.reset(key)
        game, over = jnp.zeros(spec.games, jnp.int32), jnp.zeros(spec.games, bool)
        return (state, game, over), {OBS: obs, GAME: jnp.copy(by_column(game))}  # donated beside the state

    def step(state: PyTree, action: PyTree, key: Key) -> tuple[PyTree, StepResult]:
        inner, game, over = state
        inner, result = env.step(inner, action, key)
        game = game + over  # a game that was over is reset by this step
        assert result.several is not None
        obs = {OBS: result.obs, GAME: by_column(game)}
        return (inner, game, result.several.over), result._replace(obs=obs)

    if env.set_task is None or env.get_task is None:
        return env._replace(spec=shown, reset=reset, step=step)
    inner_set, inner_get = env.set_task, env.get_task
    set_task = lambda state, task: (inner_set(state[0], task), *state[1:])
    return env._replace(
        spec=shown, reset=reset, step=step, set_task=set_task, get_task=lambda state: inner_get(state[0])
    )


class _Numbered(View):
    """Environments whose observations have the number of the game."""

    def __init__(self, spec: EnvSpec):
        super().__init__(spec)
        self._game = np.zeros(spec.games, np.int32)
        self._over = np.zeros(spec.games, bool)

    def begin(self) -> None:
        self._game, self._over = np.zeros_like(self._game), np.zeros_like(self._over)

    def first(self, obs: PyTree) -> PyTree:
        return self._with_number(obs, self._game)

    def told(self, result: StepResult, rows: Array | None) -> StepResult:
        game, began = part((self._game, self._over), rows, self.spec.games)
        if result.failed is not None:  # a game that broke goes on with another
            began = began | result.failed.reshape(len(began), -1).any(-1)
        assert result.several is not None
        self._game = put(self._game, rows, game + began, self.spec.games)
        self._over = put(self._over, rows, np.array(result.several.over), self.spec.games)
        return result._replace(obs=self._with_number(result.obs, game + began))

    def _with_number(self, obs: PyTree, game: np.ndarray) -> PyTree:
        return {OBS: obs, GAME: np.repeat(game, len(self.spec.agents))}


def _takes_one(fn: Callable[..., Any]) -> bool:
    """Returns whether a function can be called with one argument; True where its signature is not known."""
    try:
        inspect.signature(fn).bind(None)
    except TypeError:
        return False
    except ValueError:  # of a builtin
        return True
    return True


def _space_of(tree: PyTree, before: Space) -> Space:
    """Returns the space of a function's result; a leaf with the name and shape of one of `before` keeps its space."""
    known = dict(before.items) if isinstance(before, Dict) else {}
    if isinstance(tree, dict):
        of = lambda name, x: known[name] if name in known and element(known[name]) == x else _space_of(x, Tuple(()))
        return Dict(tuple((name, of(name, x)) for name, x in tree.items()))
    if isinstance(tree, tuple | list):
        return Tuple(tuple(_space_of(x, Tuple(())) for x in tree))
    return Box(tuple(tree.shape), str(np.dtype(tree.dtype)))


def _seen(env: JaxEnv | Env, spec: EnvSpec, look: Look) -> JaxEnv | Env:
    if not isinstance(env, JaxEnv):
        return through(env, _Looking(spec, look))

    def reset(key: Key) -> tuple[PyTree, PyTree]:
        state, obs = env.reset(key)
        return state, look(obs)

    def step(state: PyTree, action: PyTree, key: Key) -> tuple[PyTree, StepResult]:
        state, result = env.step(state, action, key)
        return state, result._replace(obs=look(result.obs))

    return env._replace(spec=spec, reset=reset, step=step)


class _Looking(View):
    """Environments whose agents see what a function makes of their observations."""

    def __init__(self, spec: EnvSpec, look: Look):
        super().__init__(spec)
        self._look = look

    def first(self, obs: PyTree) -> PyTree:
        return self._look(obs)

    def told(self, result: StepResult, rows: Array | None) -> StepResult:
        return result._replace(obs=self._look(result.obs))


__all__ = ["AGENT_ID", "GAME", "OBS", "with_agent_ids", "with_function", "with_game_numbers", "with_rewards_of"]
