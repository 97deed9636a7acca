"""One environment of several agents in the shape of a Gymnasium environment, whose arrays have an axis of agents.

`jrl.envs.vector` and worker processes step, seed and restart it like any other environment. An observation is a Dict of
`obs` [A, *], `reward` [A] f64, and `terminated`, `truncated`, `absent` and `there` [A] bool; what Gymnasium calls
terminated is that the game is over. Where agents have different spaces, `obs` and actions are tuples by kind (see
`jrl.types.EnvSpec`), arrays [A_k, *].
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jrl.gym import plays
from jrl.gym.block import element, leaves, row
from jrl.gym.faults import Breach, Fault, bounds, kind, of_observation, place_in_time, refused
from jrl.gym.masked import MaskError
from jrl.gym.plays import Play, Turn

ACTION_MASK, STATE = "action_mask", "state"  # as in `jrl.spaces`, which needs jax


class Kind(NamedTuple):
    """Agents of equal spaces, with their observations and actions in Gymnasium's spaces."""

    numbers: tuple[int, ...]  # the agents, among all
    own: tuple[Any, Any]  # the environment's observation and action space of an agent
    observation: Any  # of an agent, with what is added to it
    action: Any  # the same of actions
    mask_info: str | None  # the entry of the infos that is the mask
    waits: bool  # the last action is to wait, which is all that an agent can do whose turn it is not


class Layout(NamedTuple):
    """Agents of all games of a vector, by kinds."""

    agents: tuple[Any, ...]
    kinds: tuple[Kind, ...]  # one, or where agents have different spaces those of `EnvSpec.kinds`
    state: Any  # the space of the global view, which each agent sees; None: none does

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the agents as texts."""
        return tuple(map(str, self.agents))


class Begun(NamedTuple):
    """A reset that was made early, to know the spaces."""

    seed: int
    turn: Turn
    looks: list[Callable[[], Iterator[Fault]]]  # what gives the faults of its result


class _Rows:
    """Observations of the agents of one kind: arrays [A_k, *], written in place.

    Attributes:
      rows: the arrays, as an element of the observation space has them.
      state, mask: those of them that are not the agents' own; `state` is looked at only where there is one.
    """

    def __init__(self, of: Kind, *, has_state: bool):
        parts = leaves(of.observation)
        self._arrays = [np.zeros((len(of.numbers), *space.shape), space.dtype) for _, space in parts]
        self.rows = element(of.observation, iter(self._arrays))
        self._nothing = [_nothing(path, space) for path, space in parts]
        added = {(name,): array for (name, *_), array in zip([path or ("",) for path, _ in parts], self._arrays)}
        self.state: Any = added.get((STATE,)) if has_state else None
        self.mask = added.get((ACTION_MASK,)) if of.waits or of.mask_info else None
        without = [array for array in (self.state, self.mask) if array is not None]
        cut = 1 if kind(of.observation) == "Dict" and kind(of.own[0]) != "Dict" else 0  # of what is wrapped: "obs"
        rest = [(path[cut:], array) for (path, _), array in zip(parts, self._arrays)]
        self._seen = [(path, array) for path, array in rest if all(array is not other for other in without)]

    def clear(self) -> None:
        """Writes the observations of agents that were not seen yet."""
        for array, nothing in zip(self._arrays, self._nothing):
            array[:] = nothing

    def show(self, j: int, agent: Any, obs: Any) -> None:
        """Writes the observation of agent j of the kind. Raises Breach: it has another shape."""
        for path, array in self._seen:
            value = np.asarray(_at(obs, path))
            if value.shape != array.shape[1:]:  # numpy would repeat a smaller one
                raise Breach(
                    f"agent {agent!r}: observation of shape {value.shape}, but its space has {array.shape[1:]}"
                )
            array[j] = value


class Game:
    """One environment of several agents; attributes and methods are those of a Gymnasium environment.

    Args:
      play: the environment.
      layout: of the first of its vector.
      horizon: steps after which those that are there are truncated, and the game is over.
      check_steps: how many of its first steps are looked at closely; 0: none is looked at.
    Attributes:
      turns: the AECEnv that was made parallel, where there is one (see `plays.Parallel`).
      found: takes each fault; None: a fault ends the run.
    """

    spec = None

    def __init__(self, play: Play, layout: Layout, *, horizon: int | None, check_steps: int):
        from gymnasium import spaces as gym
        from gymnasium.vector.utils import batch_space

        self.env, self._play, self._layout, self._horizon = play.env, play, layout, horizon
        self.metadata = getattr(play.env, "metadata", None) or {}
        self.turns: plays.TurnTaking | None = getattr(play, "turns", None)
        self.found: Callable[[Fault], None] | None = None
        self._begun: Begun | None = None
        self._unseen, self._checks = check_steps, check_steps > 0
        size = len(layout.agents)
        yes_or_no: Any = np.bool_
        flags = {name: gym.Box(0, 1, (size,), yes_or_no) for name in ("absent", "terminated", "there", "truncated")}
        reward: Any = gym.Box(-np.inf, np.inf, (size,), np.float64)
        whole = lambda parts: parts[0] if len(parts) == 1 else gym.Tuple(parts)
        seen = whole([batch_space(one.observation, len(one.numbers)) for one in layout.kinds])
        self.observation_space = gym.Dict(list({"obs": seen, "reward": reward, **flags}.items()))
        self.action_space = whole([batch_space(one.action, len(one.numbers)) for one in layout.kinds])
        self._kinds = [_Rows(one, has_state=layout.state is not None) for one in layout.kinds]
        rows = tuple(one.rows for one in self._kinds)
        self._rows = rows[0] if len(rows) == 1 else rows
        # by agent: the number of its kind, and its own in it
        self._seats = {k: (i, j) for i, one in enumerate(layout.kinds) for j, k in enumerate(one.numbers)}
        self._there = np.zeros(size, bool)
        self._owed = np.zeros(size)
        self._movers: tuple[Any, ...] = ()
        self._ended, self._steps = set[Any](), 0
        play.look = self._look

    def begin_with(self, begun: Begun) -> None:
        """Keeps a reset that was made already for the next `reset` with that seed."""
        self._begun = begun

    def forget(self) -> None:
        """Drops the kept reset: the next one resets the environment."""
        self._begun = None

    def reset(self, seed: int | None = None, **how: Any) -> tuple[Any, dict[str, Any]]:
        """Begins a game and returns its first row, on which all are absent."""
        begun, self._begun = self._begun, None
        if begun is not None and begun.seed == seed:
            turn = begun.turn
            for faults in begun.looks:
                self._look(faults)
        else:
            turn = self._play.reset(seed)
        self._ended, self._steps = set(), 0
        self._owed[:] = 0
        for one in self._kinds:
            one.clear()
        self._show(turn)
        size = len(self._there)
        nobody = np.zeros(size, bool)
        return self._row(np.zeros(size), nobody, nobody, ~nobody, self._there), self._infos(turn)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Steps the game; actions of agents that are absent or wait are not read."""
        layout, acted = self._layout, self._there.copy()
        given = {
            agent: self._action(agent, k, action) for k, agent in enumerate(layout.agents) if agent in self._movers
        }
        turn = self._play.step(given)
        self._steps += 1
        self._unseen -= 1
        reward, terminated, truncated = np.zeros(len(acted)), np.zeros_like(acted), np.zeros_like(acted)
        for k, agent in enumerate(layout.agents):
            earned = turn.reward.get(agent, 0.0)
            ends = bool(turn.terminated.get(agent, False)), bool(turn.truncated.get(agent, False))
            if acted[k]:
                reward[k], (terminated[k], truncated[k]) = float(earned) + self._owed[k], ends
            elif agent not in self._ended:
                self._owed[k] += float(earned)
            if any(ends):
                self._ended.add(agent)
            if acted[k] or any(ends):
                self._owed[k] = 0.0
        over = turn.over
        if not over and self._horizon is not None and self._steps >= self._horizon:
            truncated |= acted & ~terminated
            over = True
        self._show(turn)
        row = self._row(reward, terminated, truncated, ~acted, self._there & (not over))
        return row, 0.0, over, False, self._infos(turn)

    def _action(self, agent: Any, k: int, action: Any) -> Any:
        i, j = self._seats[k]
        own_kind = self._layout.kinds[i]
        space = own_kind.own[1]
        chosen = row(action if len(self._kinds) == 1 else action[i], j)
        if own_kind.waits and chosen >= space.start + space.n:
            raise ValueError(f"agent {agent!r} is to move, and its action was to wait, which its action_mask rules out")
        return chosen.copy() if isinstance(chosen, np.ndarray) else chosen

    def _row(self, reward: Any, terminated: Any, truncated: Any, absent: Any, there: Any) -> dict[str, Any]:
        flags = {"terminated": terminated, "truncated": truncated, "absent": absent, "there": there}
        return {"obs": self._rows, "reward": reward, **flags}

    def _infos(self, turn: Turn) -> dict[str, Any]:
        return {str(agent): info for agent, info in turn.infos.items()}

    def _show(self, turn: Turn) -> None:
        """Writes what each agent observes; one without a new observation keeps the latest."""
        self._movers = turn.movers
        for k, agent in enumerate(self._layout.agents):
            moves, waits = agent in turn.movers, agent in turn.waiting
            self._there[k] = moves or waits
            if self._there[k]:
                self._ended.discard(agent)  # one that comes back begins another episode, and earns while it is absent
            obs = turn.obs.get(agent)
            i, j = self._seats[k]
            rows = self._kinds[i]
            if obs is not None:
                rows.show(j, agent, obs)
            if rows.mask is not None and (moves or waits):
                rows.mask[j] = self._allowed(self._layout.kinds[i], turn, agent, obs, moves)
        if self._layout.state is not None:
            view = np.asarray(self.env.state())
            if self._unseen > 0 or self.found is not None:
                where = place_in_time(self._steps, reset=not self._steps)
                self._look(lambda: of_observation("state()", self._layout.state, view, where))
            for rows in self._kinds:
                rows.state[:] = view

    def _allowed(self, own_kind: Kind, turn: Turn, agent: Any, obs: Any, moves: bool) -> Any:
        """Returns an agent's mask: its own, with one more entry for waiting where some wait."""
        waits, mask_info, choices = own_kind.waits, own_kind.mask_info, own_kind.own[1]
        own: Any = np.ones(choices.n, bool) if waits else None
        if mask_info is not None and moves:
            info = turn.infos.get(agent) or {}
            if mask_info not in info:
                raise MaskError(
                    f"env.action_mask_info {mask_info}: the infos of agent {agent!r} have no such entry in a "
                    f"step or reset: they have {', '.join(map(str, info)) or 'nothing'}: put it there whenever it is "
                    "to move"
                )
            own = np.asarray(info[mask_info]) != 0
        elif waits and isinstance(obs, dict) and ACTION_MASK in obs:
            own = np.asarray(obs[ACTION_MASK]) != 0
        if not waits:
            return own if own is not None else True
        if own.size != choices.n:
            raise MaskError(f"agent {agent!r}: an {ACTION_MASK} of {own.size} entries for {choices.n} actions")
        return np.append(own.reshape(-1) & moves, not moves)

    def _look(self, faults: Callable[[], Iterator[Fault]], may_be: Callable[[], bool] | None = None) -> None:
        """Looks at a result: closely in the first steps, and later where a glance says that something may be wrong."""
        if self.found is not None:
            for fault in faults():
                self.found(fault)
        elif self._checks and (self._unseen > 0 or (may_be is not None and may_be())) and (lines := refused(faults())):
            raise Breach(*lines)

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        if callable(close := getattr(self.env, "close", None)):  # one that inherits from no library may have none
            close()


class Maker:
    """`maker(i)` makes game i of a vector; the first decides what all agents see and do.

    Args:
      id: for errors.
      make: makes environment i.
      find_layout: gives the layout of the first game, and its first reset where the layout needs one.
      horizon, check_steps: as of `Game`.
      turn_based: as of `plays.of`.
      first: environment 0, where it was made before.
    """

    def __init__(
        self,
        id: str,
        make: Callable[[int], Any],
        find_layout: Callable[[Play], tuple[Layout, Begun | None]],
        *,
        horizon: int | None,
        check_steps: int,
        turn_based: bool | None,
        first: Any = None,
    ):
        self._id, self._make, self._first = id, make, first
        self._find_layout: Callable[[Play], tuple[Layout, Begun | None]] | None = find_layout
        self._of_game: dict[str, Any] = {"horizon": horizon, "check_steps": check_steps}
        self._turn_based = turn_based
        self.layout: Layout | None = None

    def settle(self) -> None:
        """Makes game 0 once and closes it, so that processes which get this maker know the layout without jax."""
        self(0).close()
        self._find_layout = None

    def __call__(self, i: int) -> Game:
        first, self._first = self._first, None
        play = plays.of(self._make(i) if first is None else first, self._id, self._turn_based)
        begun = None
        if self.layout is None:
            assert self._find_layout is not None
            self.layout, begun = self._find_layout(play)
        elif not _alike(play, self.layout):
            raise ValueError(f"agents {list(play.agents)} or their spaces unlike those of the others")
        game = Game(play, self.layout, **self._of_game)
        if begun is not None:
            game.begin_with(begun)
        return game


def own_spaces(play: Play) -> list[tuple[Any, Any]]:
    """Returns each agent's observation and action space."""
    return [(play.observation_space(agent), play.action_space(agent)) for agent in play.agents]


def _alike(play: Play, layout: Layout) -> bool:
    """Returns whether a game has the agents and spaces of a layout."""
    own = {k: one.own for one in layout.kinds for k in one.numbers}
    return play.agents == layout.agents and all(found == own[k] for k, found in enumerate(own_spaces(play)))


def _nothing(path: tuple[Any, ...], space: Any) -> Any:
    """Returns what stands for an agent that was not seen yet: numbers nearest to 0; of a mask, all allowed."""
    if path == (ACTION_MASK,):
        return np.ones(space.shape, space.dtype)
    low, high = bounds(space)
    return np.clip(np.zeros(space.shape), low, high).astype(space.dtype)


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value
