"""Options of multi-agent environments: the agents' observations, and the agents whose rewards count."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl import registry, spaces
from jrl.envs.transform import State, Transform, select_games
from jrl.errors import InputError
from jrl.types import Box, Dict, Discrete, EnvSpec, PyTree, Space, StepResult, Tuple, element

AGENT_ID = "agent_id"  # leaf of an observation
OBS, GAME = "obs", "game"  # leaves of an observation with the number of the environment's game


def add_agent_ids(spec: EnvSpec) -> Transform:
    """Option `multi_agent.agent_id`: add the agent's number among the A agents to its observation, as leaf `agent_id`.

    A shared policy tells its agents apart by this leaf. A plain observation becomes Dict{obs, agent_id}.

    Raises:
      InputError: observations have such a leaf already.
    """
    numbers = spaces.rows_by_kind(spec, np.tile(np.arange(len(spec.agents), dtype=np.int32), spec.games))
    own = [one.observation for one in spaces.by_kind(spec)]
    if any(isinstance(part, Dict) and AGENT_ID in dict(part.items) for part in own):
        raise InputError(f"multi_agent.agent_id: observations have a leaf {AGENT_ID} already: leave it out")

    def add_to_spaces(space: Space) -> Space:
        if spec.kinds and isinstance(space, Tuple):
            return Tuple(tuple(map(add_to_space, space.items)))
        return add_to_space(space)

    def add_to_space(space: Space) -> Dict:
        items = space.items if isinstance(space, Dict) else (("obs", space),)
        return Dict((*items, (AGENT_ID, Discrete(len(spec.agents)))))

    def add_ids(xp: Any, k: int, obs: PyTree) -> PyTree:
        own_numbers = numbers[k][: len(jax.tree.leaves(obs)[0])]  # the batch may hold some games only
        return {**(obs if isinstance(own[k], Dict) else {"obs": obs}), AGENT_ID: xp.asarray(own_numbers)}

    def observe(xp: Any, obs: PyTree) -> PyTree:
        parts = spaces.parts_by_kind(spec, obs)
        return spaces.from_parts(spec, [add_ids(xp, k, x) for k, x in enumerate(parts)])

    before = None if spec.env_observation is None else add_to_spaces(spec.env_observation)
    changed = spec._replace(observation=add_to_spaces(spec.observation), env_observation=before)
    return _observation_transform(changed, observe)


def apply_observation_fn(spec: EnvSpec, *, path: str) -> Transform:
    """Option `multi_agent.observation_fn`: compute each agent's observation from all agents' by a user's function.

    Args:
      path: path of a pure function `fn(obs)`, traced by jax. It maps one environment's observations, a dict by agent,
        to the new ones, a dict by agent. Agents of a kind need the same structure. A leaf `action_mask` keeps its
        space.
    Raises:
      InputError: the function cannot be loaded or traced, or returns something else.
    """
    key = f"multi_agent.observation_fn {path}"
    fn, agents = registry.load(path, "multi_agent.observation_fn"), spec.agents
    kinds = spec.groups
    if not _accepts_one_argument(fn):
        raise InputError(
            f"{key}: expected a pure function of one argument, {{agent: observation}} -> {{agent: observation}}, "
            f"got parameters {', '.join(inspect.signature(fn).parameters)}: leave out those that RLlib passes (worker, "
            "episode, ...); jax traces the function"
        )

    def call(obs: dict[str, PyTree]) -> PyTree:
        found = fn(obs)
        if not isinstance(found, dict) or set(found) != set(agents):
            got = ", ".join(map(str, found)) if isinstance(found, dict) else type(found).__name__
            raise InputError(f"{key}: expected a dict of {', '.join(agents)}, got {got}")
        stack = lambda *x: jnp.stack([jnp.asarray(leaf) for leaf in x])
        return tuple(jax.tree.map(stack, *(found[agents[i]] for i in kind)) for kind in kinds)

    own = spaces.by_kind(spec)
    kind_of = {i: k for k, kind in enumerate(kinds) for i in kind}
    try:
        traced = jax.eval_shape(call, {agent: element(own[kind_of[i]].observation) for i, agent in enumerate(agents)})
    except InputError:
        raise
    except Exception as e:  # the user's function or jax's tracing can raise anything
        reason = str(e).splitlines()[0] if str(e) else ""
        raise InputError(f"{key}: the function cannot be traced for observations {spec.observation}: {reason}") from e
    drop_agents = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
    found = tuple(_infer_space(drop_agents(tree), kind.observation) for tree, kind in zip(traced, own, strict=True))

    @jax.jit
    def in_jax(obs: PyTree) -> PyTree:
        each: dict[str, PyTree] = {}
        for kind, part in zip(kinds, spaces.parts_by_kind(spec, obs), strict=True):
            size = len(kind)
            split = jax.tree.map(lambda x, n=size: x.reshape(-1, n, *x.shape[1:]), part)
            each |= {agents[i]: jax.tree.map(lambda x, j=j: x[:, j], split) for j, i in enumerate(kind)}
        return spaces.from_parts(spec, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.vmap(call)(each)))

    def observe(xp: Any, obs: PyTree) -> PyTree:
        if xp is not np:
            return in_jax(obs)
        size = sum(len(jax.tree.leaves(part)[0]) for part in spaces.parts_by_kind(spec, obs))
        games, present = spec.games, size // len(agents)
        if present == games:
            return jax.tree.map(np.asarray, in_jax(obs))
        # some games only: pad with copies of the last game, so that one compiled program serves all sizes
        numbers = np.minimum(np.arange(games), present - 1)
        result = in_jax(select_games(obs, numbers, present))
        return select_games(jax.tree.map(np.asarray, result), np.arange(present), games)

    space = Tuple(found) if spec.kinds else found[0]
    return _observation_transform(spec._replace(observation=space), observe)


def add_game_numbers(spec: EnvSpec) -> Transform:
    """Option of a policy mapping that changes between games: observations become Dict{obs, game: [] i32}.

    Each environment counts its games from 0. The policy mapping is called once per game with this number.
    """
    number = Box((), "int32", 0, np.iinfo(np.int32).max)

    def init(xp: Any) -> State:
        return {"game": xp.zeros(spec.games, "int32"), "over": xp.zeros(spec.games, bool)}

    def observe(xp: Any, state: State, action: PyTree, result: StepResult) -> tuple[State, StepResult]:
        begins = state["over"]  # this step resets these games
        if result.failed is not None:  # a new game replaces a failed one
            begins = begins | result.failed.reshape(len(begins), -1).any(-1)
        game = state["game"] + begins
        assert result.several is not None
        obs = {OBS: result.obs, GAME: xp.repeat(game, len(spec.agents))}
        return {**state, "game": game, "over": result.several.over}, result._replace(obs=obs)

    numbered = spec._replace(observation=Dict(((OBS, spec.observation), (GAME, number))))
    return Transform(numbered, observe=observe, init=init)


def keep_rewards(spec: EnvSpec, columns: np.ndarray, block: int) -> Transform:
    """Option of a self-play evaluation: set rewards to 0 except for some agents, so that a game's return is theirs.

    Args:
      columns: agent indices below `block` that keep their rewards; the pattern repeats.
      block: number of agent indices after which the pattern repeats.
    """
    kept = np.tile(np.isin(np.arange(block), columns), spec.num_envs // block).astype(np.float32)

    def observe(xp: Any, state: State, action: PyTree, result: StepResult) -> tuple[State, StepResult]:
        return state, result._replace(reward=result.reward * state["kept"])

    return Transform(spec, observe=observe, init=lambda xp: {"kept": xp.asarray(kept)})


def _accepts_one_argument(fn: Callable[..., Any]) -> bool:
    """Returns whether a function can be called with one argument; True if its signature is unknown."""
    try:
        inspect.signature(fn).bind(None)
    except TypeError:
        return False
    except ValueError:  # a builtin has no signature
        return True
    return True


def _infer_space(tree: PyTree, before: Space) -> Space:
    """Returns the space of a result; a leaf with the name and shape of a leaf of `before` keeps its space."""
    known = dict(before.items) if isinstance(before, Dict) else {}
    if isinstance(tree, dict):
        infer = lambda name, x: (
            known[name] if name in known and element(known[name]) == x else _infer_space(x, Tuple(()))
        )
        return Dict(tuple((name, infer(name, x)) for name, x in tree.items()))
    if isinstance(tree, tuple | list):
        return Tuple(tuple(_infer_space(x, Tuple(())) for x in tree))
    return Box(tuple(tree.shape), str(np.dtype(tree.dtype)))


def _observation_transform(spec: EnvSpec, convert: Callable[[Any, PyTree], PyTree]) -> Transform:
    """Returns the Transform of a function (xp, observations) -> observations in `spec`."""
    return Transform(
        spec, observe=lambda xp, state, action, result: (state, result._replace(obs=convert(xp, result.obs)))
    )
