"""Environments of several agents that step on the host: each agent of each game has a slot in the batch.

Environment i's agent k is column i * A + k; see `jrl.types.Several`. An agent that waits for its turn has a row like
any other, whose action_mask allows the last action alone. Such rows are what is right for the learner: value,
advantages and memory run through them, and rewards stand where they came. An agent that is absent without having ended
(RLlib's interface without `turn_based`) breaks that off: the learner bootstraps from its last observation, and what it
earned meanwhile comes with its next action, or is lost where the game ends before.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jrl.envs import masks, several
from jrl.envs import spec as spaces
from jrl.envs.context import ENDS_RUN, EnvContext, OnFailure
from jrl.envs.gym_env import NotWaiting, OnHost, in_workers
from jrl.envs.precision import Precision
from jrl.envs.transform import index
from jrl.envs.vector import Infos, Restarts, Vector, said
from jrl.fields.env import EnvConfig
from jrl.gym.exceptions import of_making, own
from jrl.gym.faults import Fault, kind, refused
from jrl.gym.game import Begun, Kind, Layout, Maker, own_spaces
from jrl.gym.masked import shapes
from jrl.gym.plays import Play
from jrl.spaces import ACTION_MASK, STATE, columns, kinds
from jrl.types import EnvSpec, InputError, PyTree, Several, StepResult, Tuple


class MultiHostEnv(OnHost):
    """A `jrl.types.Env` over games of several agents, one after the other in this process, or in a process each.

    Args:
      cfg: checked by `jrl.envs.check`; `num_envs` games. `options.state` adds `state()` to each observation,
        `options.turn_based` says that agents of RLlib's interface wait for their turns.
      seed: game i gets seed + i at the first reset.
      context: of game 0, without our options; None: the environments know of their options only.
      on_failure: see there. One that fails eleven times in a row ends the run.
      first: environment 0, where it was made before.
    Raises:
      InputError: a space that cannot be handled, an environment that cannot be made; by
        `reset` and `step`, one that does not keep to its interface in its first steps.
      EnvironmentFailed: by `reset` and `step`, an environment failed.
    """

    def __init__(
        self,
        cfg: EnvConfig,
        *,
        seed: int,
        context: EnvContext | None = None,
        on_failure: OnFailure = ENDS_RUN,
        first: Any = None,
    ):
        options = several.own_options(cfg.options)
        made = several.maker(cfg, context or EnvContext(options, num_envs=cfg.num_envs, seed=seed))
        find_layout = functools.partial(
            layout, id=cfg.id, mask_info=cfg.action_mask_info, state=cfg.options.get("state", False), seed=seed
        )
        maker = Maker(
            cfg.id,
            made.raw,
            find_layout,
            horizon=cfg.horizon,
            check_steps=on_failure.check_steps,
            turn_based=cfg.options.get("turn_based"),
            first=first,
        )
        how: dict[str, Any] = {"id": cfg.id, "options": options, "num_envs": cfg.num_envs, "seed": seed}
        # games look at what they get themselves, agent by agent
        how |= {"restart_failed": on_failure.restart, "check_steps": 0}
        if cfg.remote_worker_envs:
            try:
                maker.settle()
            except BaseException as error:
                if isinstance(error, InputError) or not own(error):
                    raise
                restarts = Restarts(cfg.id, cfg.num_envs, seed, options)
                raise restarts.not_made(of_making(error), said(error)) from error
            self._vector: Any = in_workers(maker, step_timeout_s=on_failure.step_timeout_s, **how)
        else:
            self._vector = Vector(maker, **how)
        self._restart_failed, self._batch_wait_ms = on_failure.restart, cfg.batch_wait_ms
        found = maker.layout
        assert found is not None  # the first game was made
        of_kind = lambda one: spaces.with_flat_mask(spaces.observations(one.observation), spaces.actions(one.action))
        self._kinds, self._agents = [of_kind(one) for one in found.kinds], len(found.agents)
        whole = lambda parts: parts[0] if len(parts) == 1 else Tuple(tuple(parts))
        observation, action = (whole([part.space for part in parts]) for parts in zip(*self._kinds))
        kinds = tuple(one.numbers for one in found.kinds) if len(found.kinds) > 1 else ()
        self.spec = EnvSpec(
            observation, action, cfg.num_envs * self._agents, cfg.horizon, agents=found.names, kinds=kinds
        )
        self.there = np.ones(self.spec.num_envs, bool)  # agents that act after the latest reset
        self._ended = np.zeros(self.spec.num_envs, bool)
        shown, warns = self._vector.observation_space.spaces["obs"], on_failure.check_steps > 0
        self.precision = Precision(cfg.id, shown, cfg.num_envs, agents=found.names, kinds=kinds, warns=warns)
        self._infos = Infos(self.spec.num_envs)

    def reset(self) -> PyTree:
        """Begins new games and returns their observations [B, *]; the first reset seeds the environments."""
        self._begin_anew()
        self._vector.reset()
        self._tell()
        shown = self._vector.block.observations()
        self.there = shown["there"].reshape(-1).copy()
        return self._columns(shown["obs"])

    def step(self, action: PyTree) -> StepResult:
        """Steps all games. Raises ValueError for actions of another shape, dtype or range than `spec.action`."""
        failed = self._vector.step(self._action(action, self.spec.games))
        return self._result(None, failed)

    def _begin_anew(self) -> None:
        self._vector.infos.wanted = self._infos.wanted
        self._ended[:] = False

    def _action(self, action: PyTree, games: int) -> Any:
        """Returns the actions of so many games as these take them: arrays [n, A, *] for each kind."""
        action = spaces.on_host(action)
        spaces.check_action(self.spec.action, columns(self.spec, games), action)
        taken = self._each(action, [taken.convert for _, taken in self._kinds])
        return jax.tree.map(lambda x: x.reshape(games, -1, *x.shape[1:]), taken)

    def _result(self, rows: Any, failed: np.ndarray) -> StepResult:
        """Returns copies of the latest step of all games, or of `rows` [n]; `failed` [n] of games."""
        self._tell()
        block = self._vector.block
        told = block.observations(rows)
        if self.precision.looks:
            self.precision.look(told["obs"], rows)
        flags = ("terminated", "truncated", "absent", "there")
        terminated, truncated, absent, there = (told[name].reshape(-1) for name in flags)
        own = slice(None) if rows is None else index(rows, self._agents)
        broken = np.repeat(failed, self._agents) & ~self._ended[own]
        self._ended[own] = terminated | truncated
        over = np.array(block.terminated if rows is None else block.terminated[rows])
        return StepResult(
            self._columns(told["obs"]),
            told["reward"].reshape(-1).astype(np.float32),
            terminated,
            truncated,
            broken if self._restart_failed else None,
            Several(absent, over, there),
        )

    @property
    def infos(self) -> Infos:
        """Returns the infos of each agent."""
        return self._infos

    def _tell(self) -> None:
        if self._infos.wanted:
            games: Any = self._vector.infos.latest
            self._infos.latest = [dict(game.get(name) or {}) for game in games for name in self.spec.agents]

    def _columns(self, obs: Any) -> PyTree:
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)
        return self._each(flat, [seen.convert for seen, _ in self._kinds])

    def _each(self, tree: Any, converts: list[Callable[[Any], Any]]) -> Any:
        """Applies the function of each kind to the kind's part of a tree."""
        if not self.spec.kinds:
            return converts[0](tree)
        return tuple(convert(part) for convert, part in zip(converts, tree, strict=True))

    @property
    def games(self) -> list[Any]:
        """Returns the `jrl.gym.game.Game` of each environment."""
        return self._vector.foreach_env(lambda game: game)

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Returns `fn(env)` of each environment, which has all agents of a game."""

        def call(game: Any) -> Any:
            game.forget()  # what `fn` does may show in the reset
            return fn(game.env)

        return self._vector.foreach_env(call)


class AsyncMultiHostEnv(NotWaiting, MultiHostEnv):
    """Games in worker processes that do not wait for each other; a `jrl.types.AsyncEnv`."""


def games(
    cfg: EnvConfig, context: EnvContext, *, seed: int, on_failure: OnFailure, first: Any = None
) -> MultiHostEnv | AsyncMultiHostEnv:
    """Makes the environments of a section, in place of Gymnasium's; arguments and errors as of `MultiHostEnv`."""
    for name in several.OPTIONS:
        context.pop(name, None)
    made = MultiHostEnv if cfg.batch_wait_ms is None else AsyncMultiHostEnv
    return made(cfg, seed=seed, context=context, on_failure=on_failure, first=first)


# ---------------------------------------------------------------- what agents see and do


def layout(play: Play, id: str, *, mask_info: str | None, state: bool, seed: int) -> tuple[Layout, Begun | None]:
    """Returns the layout of the agents of `play`, and the first reset where one was needed for that.

    Args:
      play: an environment.
      id: for errors.
      mask_info: `env.action_mask_info`.
      state: observations have the global view.
      seed: of the reset.
    Raises:
      InputError: a space that is not supported, a mask or a global view that is not there.
    """
    each = own_spaces(play)
    groups = kinds(each) or (tuple(range(len(each))),)
    looked_for = []
    for observation, action in (each[numbers[0]] for numbers in groups):
        ours = spaces.actions(action).space
        spaces.observations(observation)
        looked_for.append(masks.looked_for(mask_info, observation, ours, id))
    begun = _first_turn(play, id, seed) if any(looked_for) or state else None
    view = _state_space(play, id) if state else None
    found = []
    for numbers, wanted in zip(groups, looked_for, strict=True):
        own, mask = each[numbers[0]], None
        if wanted and begun is not None:
            agents = [play.agents[k] for k in numbers]
            first = [agent for agent in agents if agent in begun.turn.movers] or agents
            there = next((info for info in map(begun.turn.infos.get, first) if isinstance(info, dict)), {})
            mask = masks.shape(mask_info, shapes(there), spaces.actions(own[1]).space, id)
        waits = play.waits and kind(own[1]) == "Discrete"  # others have no action more: what they choose is not read
        found.append(_kind(numbers, own, mask, view, id, waits=waits))
    return Layout(play.agents, tuple(found), view), begun


def _kind(numbers: tuple[int, ...], own: tuple[Any, Any], mask: Any, view: Any, id: str, *, waits: bool) -> Kind:
    """Returns a kind of agents, whose observations have the mask and the global view."""
    from gymnasium import spaces as gym

    observation, action = own
    named = dict(observation.spaces) if kind(observation) == "Dict" else None
    added: dict[str, Any] = {}
    yes_or_no: Any = np.bool_
    if waits:
        added[ACTION_MASK] = gym.Box(0, 1, (int(action.n) + 1,), yes_or_no)
        action = gym.Discrete(int(action.n) + 1, start=action.start)
    elif mask is not None:
        added[ACTION_MASK] = gym.Box(0, 1, mask[1], yes_or_no)
    if view is not None:
        if named is not None and STATE in named:
            raise InputError(f"env.options.state: the observations of {id} have a part {STATE} already: leave it out")
        added[STATE] = view
    if added:
        # a list keeps its order
        observation = gym.Dict(list({**({"obs": observation} if named is None else named), **added}.items()))
    return Kind(numbers, own, observation, action, None if mask is None else mask[0], waits)


def _first_turn(play: Play, id: str, seed: int) -> Begun:
    """Returns the first reset. Raises InputError: it cannot be read."""
    looks: list[Callable[[], Iterator[Fault]]] = []
    play.look = lambda faults, may_be=None: looks.append(faults)
    try:
        return Begun(seed, play.reset(seed), looks)
    except Exception:  # what cannot be read may fail in any way; without a fault it is the environment's own
        lines = [line for faults in looks for line in refused(faults())]
        if not lines:
            raise
        raise InputError(*(f"env.id {id}: environment 0: {line}" for line in lines)) from None


def _state_space(play: Play, id: str) -> Any:
    from gymnasium import spaces as gym

    env = play.env
    if not callable(getattr(env, "state", None)):
        raise InputError(f"env.options.state: {id} has no method state(): give it one, or leave this out")
    if (given := getattr(env, "state_space", None)) is not None:
        spaces.observations(given)
        return given
    try:
        value = np.asarray(env.state())
    except Exception as e:  # the user's method: it may raise whatever it likes
        raise InputError(f"env.options.state: state() of {id} raises {type(e).__name__}: {e}: mend it") from e
    return gym.Box(-np.inf, np.inf, value.shape, np.float32)
