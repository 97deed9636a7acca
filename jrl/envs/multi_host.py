"""Multi-agent environments stepped on the host: each agent of each game has an index in the batch.

Agent k of environment i has index i * A + k; see `jrl.types.Several`. An agent that waits for its turn has an ordinary
transition whose action_mask allows only the last action. The learner needs these transitions: value, advantages and
memory run through them, and each reward stays on its step. An agent that is absent without having ended (RLlib's
interface without `turn_based`) interrupts its trajectory: the learner bootstraps from its last observation. Rewards
earned while absent are added to its next step, or lost if the game ends first.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jrl.envs import spec as spaces
from jrl.envs.context import OnFailure
from jrl.envs.gym_env import AsyncMethods, HostEnv, SyncMethods
from jrl.envs.infos import Infos, find_mask
from jrl.envs.precision import Precision
from jrl.envs.transform import agent_indices
from jrl.envs.vector import Restarts, format_error
from jrl.fields.env import EnvConfig
from jrl.gym import space_kind
from jrl.gym.exceptions import explain_make_error, is_environment_error
from jrl.gym.factory import EnvFactory
from jrl.gym.faults import Fault, list_fatal
from jrl.gym.game import AgentLayout, GameFactory, Kind, PendingReset, list_spaces
from jrl.gym.interfaces import AgentInterface
from jrl.gym.wrappers import list_numeric_shapes
from jrl.spaces import ACTION_MASK, STATE, columns, from_parts, kinds, parts_by_kind
from jrl.types import EnvSpec, InputError, PyTree, Several, StepResult, Tuple


class _Games(HostEnv):
    """Multi-agent environments, one after the other in this process, or in one process each.

    `cfg.num_envs` counts games. `options.state` adds `state()` to each observation. `options.turn_based`: agents of
    RLlib's interface wait for their turns. `first` is environment 0, if it exists already.
    """

    def __init__(self, cfg: EnvConfig, make: EnvFactory, *, seed: int, on_failure: OnFailure, first: Any = None):
        layout_of = functools.partial(
            find_layout, id=cfg.id, mask_info=cfg.action_mask_info, state=cfg.options.get("state", False), seed=seed
        )
        games = GameFactory(
            cfg.id,
            make.raw,
            layout_of,
            turn_based=cfg.options.get("turn_based"),
            first=first,
            horizon=cfg.horizon,
            check_steps=on_failure.check_steps,
            report=on_failure.report,
        )
        if cfg.remote_worker_envs:
            try:
                games.fix_layout()
            except BaseException as error:
                if isinstance(error, InputError) or not is_environment_error(error):
                    raise
                restarts = Restarts(cfg.id, cfg.num_envs, seed, make.options)
                raise restarts.make_error(explain_make_error(error), format_error(error)) from error
        # games check their results themselves, agent by agent
        unchecked = dataclasses.replace(on_failure, check_steps=0, report=None)
        super().__init__(cfg, games, make.options, seed, unchecked)
        found = games.layout
        assert found is not None  # the first game was made
        self._kinds = [
            spaces.flatten_mask(
                spaces.convert_observation_space(kind.observation), spaces.convert_action_space(kind.action)
            )
            for kind in found.kinds
        ]
        self._agents = len(found.agents)
        whole = lambda parts: parts[0] if len(parts) == 1 else Tuple(tuple(parts))
        observation, action = (whole([part.space for part in parts]) for parts in zip(*self._kinds))
        kinds = tuple(kind.numbers for kind in found.kinds) if len(found.kinds) > 1 else ()
        self.spec = EnvSpec(
            observation, action, cfg.num_envs * self._agents, cfg.horizon, agents=found.names, kinds=kinds
        )
        self._ended = np.zeros(self.spec.num_envs, bool)
        observed, warns = self._vector.observation_space.spaces["obs"], on_failure.check_steps > 0
        self.precision = Precision(cfg.id, observed, cfg.num_envs, agents=found.names, kinds=kinds, warns=warns)
        self._infos = Infos(self.spec.num_envs)

    @property
    def there(self) -> np.ndarray:
        """Agents that act next [B] bool."""
        return self._vector.block.observations()["there"].reshape(-1)

    def _prepare_reset(self) -> None:
        self._vector.infos.wanted = self._infos.wanted
        self._ended[:] = False

    def _action(self, action: PyTree, games: int) -> Any:
        """Returns the actions of the games as `Game.step` takes them: arrays [n, A, *] for each kind."""
        action = spaces.to_numpy(action)
        spaces.check_action(self.spec.action, columns(self.spec, games), action)
        taken = self._convert_by_kind(action, [taken.convert for _, taken in self._kinds])
        return jax.tree.map(lambda x: x.reshape(games, -1, *x.shape[1:]), taken)

    def _result(self, rows: Any, failed: np.ndarray) -> StepResult:
        """Returns a copy of the latest step of all games, or of games `rows` [n]; `failed` [n] is by game."""
        block = self._vector.block
        latest = block.observations(rows)
        if self.precision.is_active:
            self.precision.record(latest["obs"], rows)
        flags = ("terminated", "truncated", "absent", "there")
        terminated, truncated, absent, there = (latest[name].reshape(-1) for name in flags)
        own = slice(None) if rows is None else agent_indices(rows, self._agents)
        broken = np.repeat(failed, self._agents) & ~self._ended[own]
        self._ended[own] = terminated | truncated
        over = np.array(block.terminated if rows is None else block.terminated[rows])
        return StepResult(
            self._observe(latest),
            latest["reward"].reshape(-1).astype(np.float32),
            terminated,
            truncated,
            broken if self._restart_failed else None,
            Several(absent, over, there),
        )

    @property
    def infos(self) -> Infos:
        """Infos of each agent."""
        return self._infos

    def _observe(self, latest: Any) -> PyTree:
        if self._infos.wanted:
            games: Any = self._vector.infos.latest
            self._infos.latest = [dict(game.get(name) or {}) for game in games for name in self.spec.agents]
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), latest["obs"])
        return self._convert_by_kind(flat, [seen.convert for seen, _ in self._kinds])

    def _convert_by_kind(self, tree: Any, converts: list[Callable[[Any], Any]]) -> Any:
        parts = zip(converts, parts_by_kind(self.spec, tree), strict=True)
        return from_parts(self.spec, [convert(part) for convert, part in parts])

    @property
    def games(self) -> list[Any]:
        """The `jrl.gym.game.Game` of each environment."""
        return self._vector.foreach_env(lambda game: game)

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Returns `fn(env)` of each environment; an environment has all agents of a game."""

        def call(game: Any) -> Any:
            game.set_pending_reset(None)  # `fn` may change the environment
            return fn(game.env)

        return self._vector.foreach_env(call)


class MultiHostEnv(SyncMethods, _Games):
    """Games that wait for each other; a `jrl.types.Env`."""


class AsyncMultiHostEnv(AsyncMethods, _Games):
    """Games in worker processes that run asynchronously; a `jrl.types.AsyncEnv`."""


# ---------------------------------------------------------------- agents and their spaces


def find_layout(
    play: AgentInterface, id: str, *, mask_info: str | None, state: bool, seed: int
) -> tuple[AgentLayout, PendingReset | None]:
    """Returns the agent layout of an environment, and its first reset if that was needed.

    Args:
      id: environment id, for errors.
      mask_info: `env.action_mask_info`.
      state: whether observations have the global state.
      seed: seed of the first reset.
    Raises:
      InputError: an unsupported space, or a missing mask or global state.
    """
    each = list_spaces(play)
    groups = kinds(each) or (tuple(range(len(each))),)
    actions = []
    for observation, action in (each[numbers[0]] for numbers in groups):
        spaces.convert_observation_space(observation)
        actions.append(spaces.convert_action_space(action).space)
    reset_early = functools.cache(lambda: _reset_early(play, id, seed))
    if state:
        reset_early()
    state_space = _find_state_space(play, id) if state else None

    def peek(numbers: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        turn, agents = reset_early().turn, [play.agents[k] for k in numbers]
        first = [agent for agent in agents if agent in turn.movers] or agents
        info = next((info for info in map(turn.infos.get, first) if isinstance(info, dict)), {})
        return list_numeric_shapes(info)

    found = []
    for numbers, action in zip(groups, actions, strict=True):
        own = each[numbers[0]]
        mask = find_mask(mask_info, own[0], action, id, functools.partial(peek, numbers))
        # only a Discrete space gets a waiting action; other waiting agents' actions are ignored
        waits = play.waits and space_kind(own[1]) == "Discrete"
        found.append(_build_kind(numbers, own, mask, state_space, id, waits=waits))
    pending = reset_early() if reset_early.cache_info().currsize else None
    return AgentLayout(play.agents, tuple(found), state_space), pending


def _build_kind(numbers: tuple[int, ...], own: tuple[Any, Any], mask: Any, state: Any, id: str, *, waits: bool) -> Kind:
    """Returns a kind of agents, its observations with the mask and the global state."""
    from gymnasium import spaces as gym

    observation, action = own
    named = dict(observation.spaces) if space_kind(observation) == "Dict" else None
    added: dict[str, Any] = {}
    yes_or_no: Any = np.bool_
    if waits:
        added[ACTION_MASK] = gym.Box(0, 1, (int(action.n) + 1,), yes_or_no)
        action = gym.Discrete(int(action.n) + 1, start=action.start)
    elif mask is not None:
        added[ACTION_MASK] = gym.Box(0, 1, mask[1], yes_or_no)
    if state is not None:
        if named is not None and STATE in named:
            raise InputError(f"env.options.state: the observations of {id} have a part {STATE} already: leave it out")
        added[STATE] = state
    if added:
        # a list keeps its order, a dict is sorted
        observation = gym.Dict(list({**({"obs": observation} if named is None else named), **added}.items()))
    return Kind(numbers, own, observation, action, None if mask is None else mask[0], waits)


def _reset_early(play: AgentInterface, id: str, seed: int) -> PendingReset:
    """Returns the first reset. Raises InputError: its result cannot be read."""
    checks: list[Callable[[], Iterator[Fault]]] = []
    play.check = lambda list_faults, is_suspicious=None: checks.append(list_faults)
    try:
        return PendingReset(seed, play.reset(seed), checks)
    except Exception:  # a wrong result can fail anywhere; if it has no fault, the environment itself raised
        lines = [line for list_faults in checks for line in list_fatal(list_faults())]
        if not lines:
            raise
        raise InputError(*(f"env.id {id}: environment 0: {line}" for line in lines)) from None


def _find_state_space(play: AgentInterface, id: str) -> Any:
    from gymnasium import spaces as gym

    env = play.env
    if not callable(getattr(env, "state", None)):
        raise InputError(f"env.options.state: {id} has no method state(): define it, or leave the option out")
    if (given := getattr(env, "state_space", None)) is not None:
        spaces.convert_observation_space(given)
        return given
    try:
        value = np.asarray(env.state())
    except Exception as e:  # a user's method can raise anything
        raise InputError(f"env.options.state: state() of {id} raises {type(e).__name__}: {e}: fix it") from e
    return gym.Box(-np.inf, np.inf, value.shape, np.float32)
