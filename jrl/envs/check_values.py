"""Checks of one step of an environment: shapes, dtypes, bounds, rewards, flags, exceptions. For `jrl.envs.checker`."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jrl.gym import faults as step_faults
from jrl.gym.faults import Fault, described, place
from jrl.spaces import ACTION_MASK, leaves
from jrl.types import Box, Dict, Discrete, MultiDiscrete, PyTree, Space, StepResult, Tuple


class Findings:
    """The first fault of each kind, so that a fault in every step is one line."""

    def __init__(self) -> None:
        self._problems: dict[str, str] = {}
        self._notes: dict[str, str] = {}

    def problem(self, kind: str, message: str) -> None:
        self._problems.setdefault(kind, message)

    def note(self, kind: str, message: str) -> None:
        self._notes.setdefault(kind, message)

    def add(self, kind: str, wrong: bool, message: str) -> None:
        """Takes a fault as `jrl.gym.faults` tells it."""
        (self.problem if wrong else self.note)(kind, message)

    def __len__(self) -> int:
        return len(self._problems)

    @property
    def problems(self) -> list[str]:
        return list(self._problems.values())

    @property
    def notes(self) -> list[str]:
        return list(self._notes.values())


class Watch:
    """Looks at what one Gymnasium environment returns, and how long it takes."""

    def __init__(self, i: int, env: Any, found: Findings):
        self._i, self._found, self._count = i, found, 0
        self._space, self._reset, self._step = env.observation_space, env.reset, env.step
        self._takes_seed = step_faults.takes_seed(env)
        self.seconds: list[float] = []
        self.attached = True
        try:
            env.reset, env.step = self.reset, self.step
        except AttributeError:  # a class of its own kind, with __slots__
            self.attached = False

    def reset(self, **kwargs: Any) -> Any:
        where = step_faults.place_in_time(self._count, reset=True)
        if "seed" in kwargs and not self._takes_seed:
            self._found.problem("seed", step_faults.NO_SEED)
            raise step_faults.Breach(step_faults.NO_SEED)
        result = self._timed(where, self._reset, **kwargs)
        self._look(step_faults.of_reset(self._space, result, where))
        return result

    def step(self, action: Any) -> Any:
        self._count += 1
        where = step_faults.place_in_time(self._count, reset=False)
        result = self._timed(where, self._step, action)
        self._look(step_faults.of_step(self._space, result, where))
        return result

    def _timed(self, where: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            result = fn(*args, **kwargs)
        except BaseException as e:
            if step_faults.own(e):
                self._found.problem(
                    f"raises in {'step' if args else 'reset'}",
                    f"environment {self._i} raises in {where}: {described(e)}: mend it; with "
                    "env_runners.restart_failed_sub_environments a run goes on and makes it anew",
                )
            raise
        if self._count:  # what is made ready at the first reset is no measure
            self.seconds.append(time.perf_counter() - began)
        return result

    def _look(self, faults: Iterable[step_faults.Fault]) -> None:
        for fault in faults:
            self._found.add(*fault)


# ---------------------------------------------------------------- looking at one row


def look_at_row(found: Findings, space: Space, num_envs: int, where: str, obs: PyTree) -> None:
    """Looks at observations of B environments that were not looked at before their conversion."""
    for kind, message in _row_faults("observation", space, num_envs, obs):
        found.problem(kind, f"{where}: {message}")


def look_at_rest(found: Findings, num_envs: int, where: str, result: StepResult) -> None:
    """Looks at rewards and flags of B environments."""
    rewards: Any = result.reward
    if rewards.shape != (num_envs,):
        found.problem("reward", f"{where}: rewards of shape {rewards.shape}, not ({num_envs},): one per environment")
    else:
        for reward in rewards:
            for kind, message in step_faults.of_reward(reward):
                found.problem(kind, f"{where}: {message}")
    for name in ("terminated", "truncated"):
        flags = getattr(result, name)
        if flags.shape != (num_envs,) or flags.dtype != bool:
            message = f"{where}: {name} is {flags.dtype} {flags.shape}, not bool ({num_envs},): one per environment"
            found.problem(name, message)


def _row_faults(name: str, space: Space, num_envs: int, obs: PyTree) -> Iterator[tuple[str, str]]:
    """Yields faults in the observations of B environments, in our space, as (kind, message)."""
    if isinstance(space, Dict | Tuple):
        parts: Any = dict(space.items) if isinstance(space, Dict) else dict(enumerate(space.items))
        named = isinstance(space, Dict)
        fits = isinstance(obs, dict) and set(obs) == set(parts) if named else isinstance(obs, tuple)
        if not fits or len(obs) != len(parts):
            has = f"a dict of {sorted(obs)}" if isinstance(obs, dict) else f"a {type(obs).__name__}"
            yield (
                name,
                f"{name} is {has}, but the space has {sorted(parts) if named else len(parts)}: return such a one",
            )
            return
        for key, part in parts.items():
            yield from _row_faults(f"{name}[{key!r}]", part, num_envs, obs[key])
        return
    low, high = space.bounds() if isinstance(space, Box) else step_faults.bounds(space)
    if obs.dtype != space.dtype:  # nothing converts it
        yield f"{name} dtype", f"{name} of {obs.dtype}, but the space has {space.dtype}: convert it with astype"
    batched = (num_envs, *space.shape)
    for kind, wrong, message in step_faults.of_array(name, np.asarray(obs), batched, obs.dtype, low[None], high[None]):
        if wrong:
            yield kind, message


def look_at_mask(found: Findings, action: Space, where: str, mask: np.ndarray, done: np.ndarray) -> None:
    """Looks for environments [B] that go on with no action that `mask` [B, K] bool allows, for one of the choices."""
    at = 0
    for path, size in choices(action):
        none = ~mask[:, at : at + size].any(axis=-1) & ~done
        at += size
        if none.any():
            (i,) = place(none)
            what = f" for {path}" if path else ""
            found.problem(
                "action_mask",
                f"{where}: the action_mask of environment {i} allows no action{what}, but its episode goes on: allow "
                "one, or end the episode on this step",
            )


def look_at_columns(
    found: Findings, agents: tuple[str, ...], reward: np.ndarray, done: np.ndarray, absent: np.ndarray, over: np.ndarray
) -> None:
    """Looks at steps of several agents, whose slots must keep to `jrl.types.Several`.

    Args:
      agents: A names.
      reward, done, absent: [T, B]; done is terminated or truncated.
      over: [T, B / A].
    """
    size = len(agents)
    games = lambda x: x.reshape(len(x), -1, size)
    of_games = np.repeat(over, size, axis=1)
    after_over = np.zeros_like(done)
    after_over[1:] = of_games[:-1]
    ended = np.zeros_like(done)  # by now, in this game
    for t in range(1, len(done)):
        ended[t] = (ended[t - 1] | done[t - 1]) & ~after_over[t] & absent[t]  # one that acts is back
    after_end = np.zeros_like(done)
    after_end[1:] = done[:-1]
    rules = (
        (
            "acts nothing",
            absent & ((reward != 0) | done),
            "is absent, but has a reward or an end: give it neither",
        ),
        ("after an end", after_end & ~absent, "has ended on the step before, but is not absent: mark it absent"),
        ("new game", after_over & ~absent, "is not absent on the step that begins a new game: mark all absent"),
        ("over", of_games & ~done & ~absent, "has not ended, but the game is over: terminate or truncate it"),
        (
            "not over",
            (games(ended | done).all(-1) & ~over & games(done).any(-1)).repeat(size, axis=1),
            "and all others have ended, but the game is not over: say so in Several.over",
        ),
    )
    for kind, wrong, message in rules:
        if wrong.any():
            t, column = place(wrong)
            where = f"step {t + 1}: agent {agents[column % size]} of environment {column // size}"
            found.problem(f"columns {kind}", f"{where} {message}")


def choices(action: Space) -> list[tuple[str, int]]:
    """Returns the choices that a mask is of, in its order: the path to each and how many values it has."""
    found: list[tuple[str, int]] = []
    for path, leaf in leaves(action):
        if isinstance(leaf, Discrete):
            found.append((path, leaf.n))
        elif isinstance(leaf, MultiDiscrete):
            found += [(f"{path}/{i}" if path else str(i), n) for i, n in enumerate(leaf.nvec)]
    return found


def look_at_turns(found: Findings, play: Any, steps: int, seed: int) -> None:
    """Plays a `jrl.gym.plays.TurnTaking` with random actions that its masks allow, and looks at each result."""

    def look(faults: Callable[[], Iterator[Fault]], may_be: Any = None) -> None:
        for fault in faults():
            found.add(*fault)

    play.look = look
    turn = play.reset(seed)
    for agent in play.agents:
        play.action_space(agent).seed(seed)
    for _ in range(steps):
        if turn.over:
            turn = play.reset(None)
            continue
        agent = turn.movers[0]
        seen, info, space = turn.obs.get(agent), turn.infos.get(agent), play.action_space(agent)
        masks = [part[ACTION_MASK] for part in (seen, info) if isinstance(part, Mapping) and ACTION_MASK in part]
        drawn = (
            space.sample(np.asarray(masks[0], np.int8))
            if masks and step_faults.kind(space) == "Discrete"
            else space.sample()
        )
        turn = play.step({agent: drawn})
