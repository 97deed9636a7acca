"""A multi-agent environment as a Gymnasium environment whose arrays have an agent axis.

`jrl.envs.vector` and worker processes step, seed and restart it like any other environment. An observation is a Dict
of `obs` [A, *], `reward` [A] f64, and `terminated`, `truncated`, `absent` and `there` [A] bool. Gymnasium's
`terminated` means that the game is over. If agents have different spaces, `obs` and actions are tuples by kind (see
`jrl.types.EnvSpec`) of arrays [A_k, *].
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jrl.gym import interfaces, space_kind
from jrl.gym.block import build_element, flatten_space, get_part, get_row
from jrl.gym.exceptions import Breach
from jrl.gym.faults import Fault, check_observation, describe_time, get_bounds, report_or_raise
from jrl.gym.interfaces import AgentInterface, GameStep
from jrl.gym.wrappers import MaskError

ACTION_MASK, STATE = "action_mask", "state"  # as in `jrl.spaces`, which needs jax


class Kind(NamedTuple):
    """Agents with equal spaces; all spaces are Gymnasium's."""

    numbers: tuple[int, ...]  # agent indices
    own: tuple[Any, Any]  # the environment's observation and action space
    observation: Any  # observation space with mask and state added
    action: Any  # action space with the waiting action added
    mask_info: str | None  # key of the mask in the infos
    waits: bool  # the last action is to wait, the only valid action out of turn


class AgentLayout(NamedTuple):
    """Agents of each game of a vector, by kinds."""

    agents: tuple[Any, ...]
    kinds: tuple[Kind, ...]  # one kind, or `EnvSpec.kinds` if agents have different spaces
    state: Any  # space of the global state, part of each observation; None: no global state

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the agents."""
        return tuple(map(str, self.agents))


class PendingReset(NamedTuple):
    """Result of a reset made early to learn the spaces."""

    seed: int
    turn: GameStep
    checks: list[Callable[[], Iterator[Fault]]]  # functions that yield faults of the result


class _KindArrays:
    """Observations of the agents of one kind: arrays [A_k, *], written in place.

    Attributes:
      rows: the arrays as an element of the observation space.
      state, mask: arrays of the global state and the action mask; None: not part of the observation.
    """

    def __init__(self, agents: Kind, *, has_state: bool):
        parts = flatten_space(agents.observation)
        self._arrays = [np.zeros((len(agents.numbers), *space.shape), space.dtype) for _, space in parts]
        self.rows = build_element(agents.observation, iter(self._arrays))
        self._fill_values = [_fill_value(path, space) for path, space in parts]
        added = {(name,): array for (name, *_), array in zip([path or ("",) for path, _ in parts], self._arrays)}
        self.state: Any = added.get((STATE,)) if has_state else None
        self.mask = added.get((ACTION_MASK,)) if agents.waits or agents.mask_info else None
        without = [array for array in (self.state, self.mask) if array is not None]
        # an own observation that is not a Dict is wrapped as "obs": drop that key
        cut = 1 if space_kind(agents.observation) == "Dict" and space_kind(agents.own[0]) != "Dict" else 0
        rest = [(path[cut:], array) for (path, _), array in zip(parts, self._arrays)]
        self._own_arrays = [(path, array) for path, array in rest if all(array is not other for other in without)]

    def clear(self) -> None:
        """Writes the fill values of agents without an observation."""
        for array, value in zip(self._arrays, self._fill_values):
            array[:] = value

    def write(self, j: int, agent: Any, obs: Any) -> None:
        """Writes the observation of agent j of the kind. Raises Breach: the shape is wrong."""
        for path, array in self._own_arrays:
            value = np.asarray(get_part(obs, path))
            if value.shape != array.shape[1:]:  # numpy would broadcast a smaller array
                raise Breach(
                    f"agent {agent!r}: observation of shape {value.shape}, but its space has {array.shape[1:]}"
                )
            array[j] = value


class Game:
    """A multi-agent environment with the attributes and methods of a Gymnasium environment.

    Args:
      play: the environment.
      layout: layout of the vector's first game.
      horizon: steps after which the present agents are truncated and the game is over; None: no limit.
      check_steps: number of first steps that get all checks; 0: no step is checked.
      report: callback for the faults of all steps, which then do not raise; None: a fault raises.
    """

    spec = None

    def __init__(
        self,
        play: AgentInterface,
        layout: AgentLayout,
        *,
        horizon: int | None,
        check_steps: int,
        report: Callable[[Fault], None] | None,
    ):
        from gymnasium import spaces as gym
        from gymnasium.vector.utils import batch_space

        self.env, self._play, self._layout, self._horizon = play.env, play, layout, horizon
        self.metadata = getattr(play.env, "metadata", None) or {}
        self._pending: PendingReset | None = None
        self._checks_left, self._checks = check_steps, check_steps > 0
        self._report = report
        size = len(layout.agents)
        yes_or_no: Any = np.bool_
        flags = {name: gym.Box(0, 1, (size,), yes_or_no) for name in ("absent", "terminated", "there", "truncated")}
        reward: Any = gym.Box(-np.inf, np.inf, (size,), np.float64)
        whole = lambda parts: parts[0] if len(parts) == 1 else gym.Tuple(parts)
        obs = whole([batch_space(agents.observation, len(agents.numbers)) for agents in layout.kinds])
        self.observation_space = gym.Dict(list({"obs": obs, "reward": reward, **flags}.items()))
        self.action_space = whole([batch_space(agents.action, len(agents.numbers)) for agents in layout.kinds])
        self._kinds = [_KindArrays(agents, has_state=layout.state is not None) for agents in layout.kinds]
        rows = tuple(arrays.rows for arrays in self._kinds)
        self._rows = rows[0] if len(rows) == 1 else rows
        # agent index -> index of its kind, index within the kind
        self._kind_index = {k: (i, j) for i, agents in enumerate(layout.kinds) for j, k in enumerate(agents.numbers)}
        self._present = np.zeros(size, bool)
        self._unpaid_reward = np.zeros(size)  # earned while absent, added to the agent's next step
        self._movers: tuple[Any, ...] = ()
        self._ended, self._steps = set[Any](), 0
        play.check = self._check

    def set_pending_reset(self, pending: PendingReset | None) -> None:
        """Sets the result that the next `reset` with its seed returns; None: the next reset resets the environment."""
        self._pending = pending

    def reset(self, seed: int | None = None, **how: Any) -> tuple[Any, dict[str, Any]]:
        """Begins a game; returns its first row, on which all agents are absent."""
        pending, self._pending = self._pending, None
        if pending is not None and pending.seed == seed:
            turn = pending.turn
            for list_faults in pending.checks:
                self._check(list_faults)
        else:
            turn = self._play.reset(seed)
        self._ended, self._steps = set(), 0
        self._unpaid_reward[:] = 0
        for arrays in self._kinds:
            arrays.clear()
        self._write_observations(turn)
        size = len(self._present)
        none = np.zeros(size, bool)
        return self._build_row(np.zeros(size), none, none, ~none, self._present), self._infos(turn)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Steps the game. Actions of absent and waiting agents are ignored."""
        layout, acted = self._layout, self._present.copy()
        turn = self._play.step(
            {agent: self._action(agent, k, action) for k, agent in enumerate(layout.agents) if agent in self._movers}
        )
        self._steps += 1
        self._checks_left -= 1
        reward, terminated, truncated = np.zeros(len(acted)), np.zeros_like(acted), np.zeros_like(acted)
        for k, agent in enumerate(layout.agents):
            earned = turn.reward.get(agent, 0.0)
            ends = bool(turn.terminated.get(agent, False)), bool(turn.truncated.get(agent, False))
            if acted[k]:
                reward[k], (terminated[k], truncated[k]) = float(earned) + self._unpaid_reward[k], ends
            elif agent not in self._ended:
                self._unpaid_reward[k] += float(earned)
            if any(ends):
                self._ended.add(agent)
            if acted[k] or any(ends):
                self._unpaid_reward[k] = 0.0
        over = turn.over
        if not over and self._horizon is not None and self._steps >= self._horizon:
            truncated |= acted & ~terminated
            over = True
        self._write_observations(turn)
        row = self._build_row(reward, terminated, truncated, ~acted, self._present & (not over))
        return row, 0.0, over, False, self._infos(turn)

    def _action(self, agent: Any, k: int, action: Any) -> Any:
        i, j = self._kind_index[k]
        own_kind = self._layout.kinds[i]
        space = own_kind.own[1]
        chosen = get_row(action if len(self._kinds) == 1 else action[i], j)
        if own_kind.waits and chosen >= space.start + space.n:
            raise ValueError(f"agent {agent!r}: expected a move, got the waiting action, which its action_mask forbids")
        return chosen.copy() if isinstance(chosen, np.ndarray) else chosen

    def _build_row(self, reward: Any, terminated: Any, truncated: Any, absent: Any, there: Any) -> dict[str, Any]:
        flags = {"terminated": terminated, "truncated": truncated, "absent": absent, "there": there}
        return {"obs": self._rows, "reward": reward, **flags}

    def _infos(self, turn: GameStep) -> dict[str, Any]:
        return {str(agent): info for agent, info in turn.infos.items()}

    def _write_observations(self, turn: GameStep) -> None:
        """Writes the new observations; an agent without a new observation keeps the latest."""
        self._movers = turn.movers
        for k, agent in enumerate(self._layout.agents):
            moves, waits = agent in turn.movers, agent in turn.waiting
            self._present[k] = moves or waits
            if self._present[k]:
                self._ended.discard(agent)  # an agent that joins again begins a new episode
            obs = turn.obs.get(agent)
            i, j = self._kind_index[k]
            arrays = self._kinds[i]
            if obs is not None:
                arrays.write(j, agent, obs)
            if arrays.mask is not None and (moves or waits):
                arrays.mask[j] = self._find_mask(self._layout.kinds[i], turn, agent, obs, moves)
        if self._layout.state is not None:
            state = np.asarray(self.env.state())
            if self._checks_left > 0 or self._report is not None:
                where = describe_time(self._steps, reset=not self._steps)
                self._check(lambda: check_observation("state()", self._layout.state, state, where))
            for arrays in self._kinds:
                arrays.state[:] = state

    def _find_mask(self, own_kind: Kind, turn: GameStep, agent: Any, obs: Any, moves: bool) -> Any:
        """Returns an agent's mask of valid actions, with a last entry for waiting if agents take turns."""
        waits, mask_info, choices = own_kind.waits, own_kind.mask_info, own_kind.own[1]
        own: Any = np.ones(choices.n, bool) if waits else None
        if mask_info is not None and moves:
            info = turn.infos.get(agent) or {}
            if mask_info not in info:
                raise MaskError(
                    f"env.action_mask_info {mask_info}: the infos of agent {agent!r} in a step or reset have no such "
                    f"entry, only {', '.join(map(str, info)) or 'nothing'}: add it whenever the agent acts next"
                )
            own = np.asarray(info[mask_info]) != 0
        elif waits and isinstance(obs, dict) and ACTION_MASK in obs:
            own = np.asarray(obs[ACTION_MASK]) != 0
        if not waits:
            return own if own is not None else True
        if own.size != choices.n:
            raise MaskError(f"agent {agent!r}: {ACTION_MASK}: expected {choices.n} entries, got {own.size}")
        return np.append(own.reshape(-1) & moves, not moves)

    def _check(
        self, list_faults: Callable[[], Iterator[Fault]], is_suspicious: Callable[[], bool] | None = None
    ) -> None:
        """Checks a result: fully in the first steps, later only if the cheap test `is_suspicious` is true."""
        if (self._report is not None or self._checks_left > 0) or (
            self._checks and is_suspicious is not None and is_suspicious()
        ):
            report_or_raise(list_faults(), self._report)

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        if callable(close := getattr(self.env, "close", None)):  # a user's class need not define close
            close()


class GameFactory:
    """`factory(i)` makes game i of a vector; game 0 decides the layout.

    Args:
      id: environment id, for errors.
      make: function from i to environment i.
      find_layout: function from the first game to its layout, and to its first reset if that was needed.
      turn_based: as in `interfaces.wrap`.
      first: environment 0, if it exists already.
      options: of `Game`.
    """

    def __init__(
        self,
        id: str,
        make: Callable[[int], Any],
        find_layout: Callable[[AgentInterface], tuple[AgentLayout, PendingReset | None]],
        *,
        turn_based: bool | None,
        first: Any = None,
        **options: Any,
    ):
        self._id, self._make, self._first = id, make, first
        self._find_layout: Callable[[AgentInterface], tuple[AgentLayout, PendingReset | None]] | None = find_layout
        self._options, self._turn_based = options, turn_based
        self.layout: AgentLayout | None = None

    def fix_layout(self) -> None:
        """Makes game 0 once and close it: worker processes, which have no jax, then need not find the layout."""
        self(0).close()
        self._find_layout = None

    def __call__(self, i: int) -> Game:
        first, self._first = self._first, None
        play = interfaces.wrap(self._make(i) if first is None else first, self._id, self._turn_based)
        pending = None
        if self.layout is None:
            assert self._find_layout is not None
            self.layout, pending = self._find_layout(play)
        elif not _matches(play, self.layout):
            raise ValueError(f"agents {list(play.agents)} or their spaces differ from those of the other games")
        game = Game(play, self.layout, **self._options)
        game.set_pending_reset(pending)
        return game


def list_spaces(play: AgentInterface) -> list[tuple[Any, Any]]:
    """Returns each agent's observation and action space."""
    return [(play.observation_space(agent), play.action_space(agent)) for agent in play.agents]


def _matches(play: AgentInterface, layout: AgentLayout) -> bool:
    """Returns whether a game has the agents and spaces of a layout."""
    own = {k: agents.own for agents in layout.kinds for k in agents.numbers}
    return play.agents == layout.agents and all(found == own[k] for k, found in enumerate(list_spaces(play)))


def _fill_value(path: tuple[Any, ...], space: Any) -> Any:
    """Returns the value of an agent without an observation: the numbers nearest to 0; for a mask, all ones."""
    if path == (ACTION_MASK,):
        return np.ones(space.shape, space.dtype)
    low, high = get_bounds(space)
    return np.clip(np.zeros(space.shape), low, high).astype(space.dtype)
