"""Gymnasium environments one after the other in this process; and what to do with one that failed."""

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jrl.envs import spec as spaces
from jrl.envs.context import SeveralAgents
from jrl.errors import EnvironmentFailed, InputError
from jrl.gym.block import Block, row, sizes
from jrl.gym.exceptions import line, of_making, own, stack
from jrl.gym.faults import FIRST_STEPS, Breach, seeded
from jrl.gym.masked import put_around, shapes
from jrl.host.room import check_observations

ATTEMPTS = 10  # to make and reset an environment anew, until the run ends
_RESTARTED = 2**30  # seeds from here on belong to no pool's first reset (see `context.seed_range`)
_log = logging.getLogger(__name__)


class Infos:
    """Infos of the latest step or reset.

    `latest` is kept only once `wanted`: by environment a dict, or None for one that has not answered.
    """

    def __init__(self, num_envs: int):
        self.wanted = False
        self.latest: Sequence[Any] | Mapping[int, Any] = [None] * num_envs

    def of_pool(self, info: Mapping[str, Any]) -> None:
        """Takes EnvPool's infos, of the environments `info["env_id"]`."""
        if self.wanted:
            self.latest = PoolInfos(info, info["env_id"])


class PoolInfos(Mapping[int, dict[str, Any]]):
    """Infos of a pool, arrays [n, ...], by environment: a dict that is made when it is asked for.

    Args:
      arrays: name -> array, or a dict of them; they are copied. Those without a row per environment are left out.
      env_id: [n] environments of the rows.
    """

    def __init__(self, arrays: Mapping[str, Any], env_id: np.ndarray):
        self._rows = {int(i): row for row, i in enumerate(env_id)}
        self._arrays = self._copied(arrays)

    def _copied(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, x in arrays.items():
            if isinstance(x, Mapping):
                found[name] = self._copied(x)
            elif np.shape(x)[:1] == (len(self._rows),):
                found[name] = np.array(x)
        return found

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self._picked(self._arrays, self._rows[i])

    def _picked(self, arrays: Mapping[str, Any], row: int) -> dict[str, Any]:
        return {name: self._picked(x, row) if isinstance(x, dict) else x[row] for name, x in arrays.items()}

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class Restarts:
    """Seeds of environments that are made anew, and how many were."""

    def __init__(self, id: str, num_envs: int, seed: int, options: Mapping[str, Any] | None = None):
        self.id, self.num_envs, self.count, self._options = id, num_envs, 0, dict(options or {})
        self._seed, self._tries, self._used = seed, [0] * num_envs, set[int]()

    def next_seed(self, i: int) -> int:
        """Returns a seed for environment i that no environment of the pool has had; it depends on i's restarts only."""
        while True:
            self._tries[i] += 1
            draw = np.random.SeedSequence((self._seed + i, self._tries[i])).generate_state(1)[0]
            seed = _RESTARTED + int(draw) % _RESTARTED
            if seed not in self._used:
                self._used.add(seed)
                return seed

    def name(self, i: int) -> str:
        return f"environment {i} of {self.num_envs}, {self.id},"

    def done(self, i: int, cause: str) -> None:
        """Counts one more; reports the first, and each that doubles their number."""
        self.count += 1
        if self.count & (self.count - 1) == 0:
            _log.warning("%s failed and was made anew, %d so far:\n%s", self.name(i), self.count, cause)

    # ------------------------------------------------------------ what a run ends with

    def breach(self, i: int, lines: Sequence[str]) -> InputError:
        """Returns the error of an environment that does not keep to its interface: a line for each fault."""
        return InputError(*(f"{self._before(i, text)} {text}" for text in lines))

    def _before(self, i: int, text: str) -> str:
        # of a key of the config, the text begins with that
        return self.name(i) if text.startswith("env.") else f"env.id {self.id}: environment {i}:"

    def not_made(self, fault: tuple[str, str] | None, said: tuple[str, str, str]) -> InputError:
        """Returns the error where environments cannot be made; `fault` of `exceptions.of_making`, `said` as below."""
        what, text = fault or ("id", said[0])
        if what == "options":
            return InputError(f"env.options: {self.id} cannot be made with options {self._options}: {text}")
        given = f" with options {self._options}" if self._options else ""
        found = InputError(f"env.id {self.id}: it cannot be made{given}: {text}")
        found.details = said[2]
        return found

    def failure(self, i: int, said: tuple[str, str, str], where: str = "") -> EnvironmentFailed:
        """Returns the error of an environment that raised. `said`: the user's line, user's frames, the traceback."""
        line, frames, details = said
        mend = "env_runners.restart_failed_sub_environments=true makes one that fails anew"
        found = EnvironmentFailed(f"{line}{frames}\n{self.name(i)} failed{where}; {mend}")
        found.details = details
        return found

    def ended(self, i: int, cause: str) -> EnvironmentFailed:
        """Returns the error of an environment whose process is gone."""
        return EnvironmentFailed(f"{self.name(i)} failed: {cause}")

    def exhausted(self, i: int, cause: str, details: str = "") -> EnvironmentFailed:
        found = EnvironmentFailed(
            f"{self.name(i)} failed {ATTEMPTS + 1} times in a row, also when it was made anew: {cause}"
        )
        found.details = details
        return found


class Vector:
    """B environments, one after the other; rows as `jrl.types.StepResult` says, actions and observations unconverted.

    Args:
      make: makes environment i, at first and in the place of one that failed; all must have the spaces of the first.
      id, options: for errors.
      num_envs, seed: environment i is seeded with seed + i at the first reset.
      restart_failed: an environment that raises is made anew.
      check_steps: how many of the first steps of each are looked at: see `jrl.gym.block.Block`.
    Raises:
      InputError: an environment cannot be made, or does not keep to its interface; here and in all methods.
      EnvironmentFailed: one raised, in all methods; with restart_failed, one that fails again and again.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        *,
        id: str,
        options: Mapping[str, Any],
        num_envs: int,
        seed: int,
        restart_failed: bool,
        check_steps: int = FIRST_STEPS,
    ):
        self.restarts = Restarts(id, num_envs, seed, options)
        self._make, self._restart_failed, self._num_envs = make, restart_failed, num_envs
        self._check_steps = check_steps
        self._seed: int | None = seed
        self._ended = [False] * num_envs
        self._mask: tuple[str, tuple[int, ...], bool] | None = None
        self._begun: Any = None  # the result of the first environment's first reset, until it is used
        self._envs: list[Any] = []
        try:
            first = make(0)
        except BaseException as error:
            if isinstance(error, InputError | SeveralAgents) or not own(error):
                raise
            raise self.restarts.not_made(of_making(error), said(error)) from error
        self._envs = [first, *[None] * (num_envs - 1)]
        try:
            check_observations(id, sizes(first.observation_space), num_envs)
            spaces.observations(first.observation_space), spaces.actions(first.action_space)
            self.observation_space, self.action_space = first.observation_space, first.action_space
            # a class that does not inherit from gymnasium.Env may lack both
            self.max_episode_steps = getattr(getattr(first, "spec", None), "max_episode_steps", None)
            self.metadata = getattr(first, "metadata", None) or {}
            self._spaces = self.observation_space, self.action_space  # of those that are made
            self._allocate()
            self.infos = Infos(num_envs)
            self._told: list[Any] = [None] * num_envs
            for i in range(1, num_envs):
                try:
                    self._envs[i] = self._made(i)
                except BaseException as error:
                    if not self._restart_failed and own(error):
                        raise self.restarts.not_made(of_making(error), said(error)) from error
                    self._made_anew(i, error)
        except BaseException:
            self.close()
            raise

    def _allocate(self) -> None:
        self.block = Block(self.observation_space, self.action_space, self._num_envs, check_steps=self._check_steps)

    def look(self) -> dict[str, tuple[int, ...]] | None:
        """Returns the shapes of the first environment's infos at its first reset, by name; None where that fails.

        The reset is the one that `reset` would make, and stands in its place unless `foreach_env` comes in between.
        """
        try:
            begun = self._envs[0].reset(seed=self._seed)
            found = shapes(begun[1])
        except BaseException as error:  # of which `reset` will tell
            if not own(error):
                raise
            _log.debug("%s cannot be reset: %s", self.restarts.name(0), error)
            return None
        self._begun = begun
        return found

    def mask(self, name: str, shape: tuple[int, ...], *, limited: bool) -> None:
        """Puts the mask of the infos into observations; see `masked.put_around`. Call it before the first reset."""
        self._mask = (name, shape, limited)
        first, around = put_around(self._envs[0], self._mask)
        self._envs = [first, *(put_around(env, self._mask)[0] for env in self._envs[1:])]
        if self._begun is not None:
            self._begun = around.joined(*self._begun), self._begun[1]
        self.observation_space = first.observation_space
        self._allocate()

    def reset(self) -> None:
        """Begins new episodes; the first call seeds the environments, i with seed + i."""
        self._told = [None] * self._num_envs
        begun, self._begun = self._begun, None
        for i, env in enumerate(self._envs):
            try:
                if i == 0 and begun is not None:
                    result = begun
                else:
                    result = env.reset() if self._seed is None else seeded(env, self._seed + i)
                self._told[i] = self.block.take(i, result, reset=True)
            except BaseException as error:
                self._made_anew(i, error)
        self._tell()
        self._seed, self._ended = None, [False] * self._num_envs

    def step(self, action: Any) -> np.ndarray:
        """Steps all, and returns which failed in the middle of an episode, [B] bool; the rest is in `block`."""
        if not isinstance(action, np.ndarray):
            action = [row(action, i) for i in range(self._num_envs)]
        block, ended, failed = self.block, self._ended, np.zeros(self._num_envs, bool)
        told = self._told = [None] * self._num_envs
        for i, env in enumerate(self._envs):
            try:
                if ended[i]:
                    told[i] = block.take(i, env.reset(), reset=True)
                else:
                    told[i] = block.take(i, env.step(action[i]))
            except BaseException as error:
                self._made_anew(i, error)
                failed[i] = not ended[i]
        self._ended = (block.terminated | block.truncated).tolist()
        self._tell()
        return failed

    def _tell(self) -> None:
        if self.infos.wanted:  # copies: an environment may go on writing to its dict
            self.infos.latest = [dict(info) for info in self._told]

    def _made(self, i: int) -> Any:
        env = self._make(i)
        if (env.observation_space, env.action_space) != self._spaces:
            env.close()
            raise ValueError(f"spaces {env.observation_space}, {env.action_space} unlike those of the others")
        return env if self._mask is None else put_around(env, self._mask)[0]

    def _made_anew(self, i: int, error: BaseException) -> None:
        """Makes environment i again, which raised; or raises what the run ends with."""
        self._own(i, error)
        if not self._restart_failed:
            raise self.restarts.failure(i, said(error)) from error
        first = error
        for _ in range(ATTEMPTS):
            _close(self._envs[i])
            self._envs[i] = None
            try:
                self._envs[i] = self._made(i)
                result = seeded(self._envs[i], self.restarts.next_seed(i))
                self._told[i] = self.block.take(i, result, reset=True)
            except BaseException as another:
                self._own(i, another)
                error = another
            else:
                self.restarts.done(i, "".join(traceback.format_exception(first)))
                return
        raise self.restarts.exhausted(i, line(error), said(error)[2]) from error

    def _own(self, i: int, error: BaseException) -> None:
        """Raises what no restart mends: a Ctrl-C as it is, and a breach of the interface."""
        if not own(error):
            raise error
        if isinstance(error, Breach):
            raise self.restarts.breach(i, error.args) from error

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        self._begun = None  # what `fn` does to the environments may show in the reset
        return [fn(env) for env in self._envs]

    def render(self) -> list[Any]:
        return [env.render() for env in self._envs]

    def close(self) -> None:
        for env in self._envs:
            _close(env)
        self._envs = []


def said(error: BaseException) -> tuple[str, str, str]:
    """Returns the user's line of an exception, the user's frames and the whole traceback."""
    return line(error), stack(error), "".join(traceback.format_exception(error))


def _close(env: Any) -> None:
    try:
        if env is not None:
            env.close()
    except BaseException as e:  # it is not needed any more
        if not own(e):
            raise
        _log.debug("%s cannot be closed: %s", env, e)
