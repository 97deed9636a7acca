"""Options of environments with several agents: what agents observe, and whose rewards count."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl import registry, spaces
from jrl.envs.transform import State, Transform, part
from jrl.errors import InputError
from jrl.types import Box, Dict, Discrete, EnvSpec, PyTree, Space, StepResult, Tuple, element

AGENT_ID = "agent_id"  # leaf of an observation
OBS, GAME = "obs", "game"  # leaves of an observation that tells which game of its environment this is


def agent_ids(spec: EnvSpec) -> Transform:
    """Option `multi_agent.agent_id`: each agent observes its number among the A of its environment, a leaf `agent_id`.

    A policy that several agents share can tell them apart by it. A plain observation becomes Dict{obs, agent_id}.

    Raises:
      InputError: observations have such a leaf already.
    """
    numbers = spaces.rows_by_kind(spec, np.tile(np.arange(len(spec.agents), dtype=np.int32), spec.games))
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

    def with_ids(xp: Any, k: int, obs: PyTree) -> PyTree:
        own_numbers = numbers[k][: len(jax.tree.leaves(obs)[0])]  # fewer games have the first of them
        return {**(obs if isinstance(own[k], Dict) else {"obs": obs}), AGENT_ID: xp.asarray(own_numbers)}

    def look(xp: Any, obs: PyTree) -> PyTree:
        seen = spaces.parts_by_kind(spec, obs)
        return spaces.from_parts(spec, [with_ids(xp, k, x) for k, x in enumerate(seen)])

    before = None if spec.env_observation is None else shown(spec.env_observation)
    return _looking(spec._replace(observation=shown(spec.observation), env_observation=before), look)


def observation_fn(spec: EnvSpec, *, path: str) -> Transform:
    """Option `multi_agent.observation_fn`: each agent observes what a user's function makes of all observations.

    Args:
      spec: of several agents.
      path: of a pure function `fn(obs)`, traced by jax: from one environment's observations, a dict by agent, to a dict
        by agent of what each sees, all of a kind in one structure. A leaf `action_mask` stays what it is.
    Raises:
      InputError: it cannot be loaded or traced, or gives something else.
    """
    key = f"multi_agent.observation_fn {path}"
    fn, agents = registry.load(path, "multi_agent.observation_fn"), spec.agents
    kinds = spec.groups
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

    own = spaces.by_kind(spec)
    kind_of = {i: k for k, kind in enumerate(kinds) for i in kind}
    try:
        shown = jax.eval_shape(of_one, {agent: element(own[kind_of[i]].observation) for i, agent in enumerate(agents)})
    except InputError:
        raise
    except Exception as e:  # the user's function, and all that jax says of one that cannot be traced
        told = str(e).splitlines()[0] if str(e) else ""
        raise InputError(f"{key}: it cannot be traced for observations {spec.observation}: {told}") from e
    without = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
    found = tuple(_space_of(without(tree), one.observation) for tree, one in zip(shown, own, strict=True))

    @jax.jit
    def in_jax(obs: PyTree) -> PyTree:
        each: dict[str, PyTree] = {}
        for kind, seen in zip(kinds, spaces.parts_by_kind(spec, obs), strict=True):
            size = len(kind)
            split = jax.tree.map(lambda x, n=size: x.reshape(-1, n, *x.shape[1:]), seen)
            each |= {agents[i]: jax.tree.map(lambda x, j=j: x[:, j], split) for j, i in enumerate(kind)}
        seen = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.vmap(of_one)(each))
        return spaces.from_parts(spec, seen)

    def look(xp: Any, obs: PyTree) -> PyTree:
        if xp is not np:
            return in_jax(obs)
        size = sum(len(jax.tree.leaves(one)[0]) for one in spaces.parts_by_kind(spec, obs))
        games, given = spec.games, size // len(agents)
        if given == games:
            return jax.tree.map(np.asarray, in_jax(obs))
        # fewer games, by the same compiled program: the last of them stands for those that are missing
        numbers = np.minimum(np.arange(games), given - 1)
        seen = in_jax(part(obs, numbers, given))
        return part(jax.tree.map(np.asarray, seen), np.arange(given), games)

    space = Tuple(found) if spec.kinds else found[0]
    return _looking(spec._replace(observation=space), look)


def game_numbers(spec: EnvSpec) -> Transform:
    """Option of a policy mapping that changes between games: observations become Dict{obs, game: [] i32}.

    Games count from 0, those of each environment for themselves. The mapping is called once per game with this number.
    """
    number = Box((), "int32", 0, np.iinfo(np.int32).max)

    def init(xp: Any) -> State:
        return {"game": xp.zeros(spec.games, "int32"), "over": xp.zeros(spec.games, bool)}

    def observe(xp: Any, state: State, action: PyTree, result: StepResult) -> tuple[State, StepResult]:
        begins = state["over"]  # this step resets them
        if result.failed is not None:  # a game that broke goes on with another
            begins = begins | result.failed.reshape(len(begins), -1).any(-1)
        game = state["game"] + begins
        assert result.several is not None
        obs = {OBS: result.obs, GAME: xp.repeat(game, len(spec.agents))}
        return {**state, "game": game, "over": result.several.over}, result._replace(obs=obs)

    seen = spec._replace(observation=Dict(((OBS, spec.observation), (GAME, number))))
    return Transform(seen, observe=observe, init=init)


def rewards_of(spec: EnvSpec, columns: np.ndarray, block: int) -> Transform:
    """Option of an evaluation of self-play: rewards of all but some agents are 0, so that a game's return is theirs.

    Args:
      spec: of several agents.
      columns: those that keep their rewards, of the first `block`; the others follow in the same pattern.
      block: columns after which the pattern repeats.
    """
    kept = np.tile(np.isin(np.arange(block), columns), spec.num_envs // block).astype(np.float32)

    def observe(xp: Any, state: State, action: PyTree, result: StepResult) -> tuple[State, StepResult]:
        return state, result._replace(reward=result.reward * state["kept"])

    return Transform(spec, observe=observe, init=lambda xp: {"kept": xp.asarray(kept)})


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


def _looking(spec: EnvSpec, look: Callable[[Any, PyTree], PyTree]) -> Transform:
    """Makes the Transform of a function (xp, observations) -> observations in `spec`."""
    return Transform(spec, observe=lambda xp, state, action, result: (state, result._replace(obs=look(xp, result.obs))))
