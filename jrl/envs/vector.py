"""Gymnasium environments one after the other in this process; and what to do with one that failed."""

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jrl.envs.worker_process import Block, MaskError, masked, row, shapes
from jrl.errors import InputError

ATTEMPTS = 10  # to make and reset an environment anew, until the run ends
_RESTARTED = 2**30  # seeds from here on belong to no pool's first reset (see `make.seed_range`)
_log = logging.getLogger(__name__)


class Infos:
    """What environments say beside the results of their latest step or reset.

    `latest` is kept only once `wanted`: by environment a dict, or None for one that has not answered.
    """

    def __init__(self, num_envs: int):
        self.wanted = False
        self.latest: Sequence[Any] | Mapping[int, Any] = [None] * num_envs

    def of_pool(self, info: Mapping[str, Any]) -> None:
        """What EnvPool says of the environments `info["env_id"]`."""
        if self.wanted:
            self.latest = PoolInfos(info, info["env_id"])


class PoolInfos(Mapping[int, dict[str, Any]]):
    """What a pool says as arrays [n, ...], by environment: a dict that is made when it is asked for.

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

    def __init__(self, id: str, num_envs: int, seed: int):
        self.id, self.num_envs, self.count = id, num_envs, 0
        self._seed, self._tries, self._used = seed, [0] * num_envs, set[int]()

    def next_seed(self, i: int) -> int:
        """A seed for environment i that no environment of the pool had before; it depends on i's restarts only."""
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
        """Counts one more; the first is reported, and each that doubles their number."""
        self.count += 1
        if self.count & (self.count - 1) == 0:
            _log.warning("%s failed and was made anew, %d so far:\n%s", self.name(i), self.count, cause)

    def exhausted(self, i: int) -> str:
        return f"{self.name(i)} failed {ATTEMPTS + 1} times in a row, also when it was made anew"


class Vector:
    """B environments, one after the other; rows as `jrl.types.StepResult` says, actions and observations unconverted.

    `first` is the first of them, whose spaces all must have; `make(i)` makes the others, and those that take the place
    of one that failed.
    """

    def __init__(
        self, make: Callable[[int], Any], first: Any, *, id: str, num_envs: int, seed: int, restart_failed: bool
    ):
        self.observation_space, self.action_space = first.observation_space, first.action_space
        self.max_episode_steps = getattr(first.spec, "max_episode_steps", None)
        self.metadata, self.restarts = first.metadata, Restarts(id, num_envs, seed)
        self._make, self._restart_failed, self._num_envs = make, restart_failed, num_envs
        self._seed: int | None = seed
        self._ended = [False] * num_envs
        self._spaces = self.observation_space, self.action_space  # of those that are made
        self._mask: tuple[str, tuple[int, ...], bool] | None = None
        self._begun: Any = None  # the result of a first reset of the first, which nobody has seen yet
        self.block, self.infos = Block(*self._spaces, num_envs), Infos(num_envs)
        self._told: list[Any] = [None] * num_envs
        self._envs = [first, *[None] * (num_envs - 1)]
        try:
            for i in range(1, num_envs):
                try:
                    self._envs[i] = self._made(i)
                except Exception as error:
                    self._made_anew(i, error)
        except BaseException:
            self.close()
            raise

    def look(self) -> dict[str, tuple[int, ...]] | None:
        """Shapes of what the first environment says at its first reset, by name; None where that fails.

        The reset is the one that `reset` would make, and stands in its place unless `foreach_env` comes in between.
        """
        try:
            begun = self._envs[0].reset(seed=self._seed)
            found = shapes(begun[1])
        except Exception as error:  # of which `reset` will tell
            _log.debug("%s cannot be reset: %s", self.restarts.name(0), error)
            return None
        self._begun = begun
        return found

    def mask(self, name: str, shape: tuple[int, ...], *, limited: bool) -> None:
        """Observations have the mask that infos bring; see `worker_process.masked`. Before the first reset."""
        self._mask = (name, shape, limited)
        first, around = masked(self._envs[0], self._mask)
        self._envs = [first, *(masked(env, self._mask)[0] for env in self._envs[1:])]
        if self._begun is not None:
            self._begun = around.joined(*self._begun), self._begun[1]
        self.observation_space = first.observation_space
        self.block = Block(self.observation_space, self.action_space, self._num_envs)

    def reset(self) -> None:
        """New episodes; the first call seeds the environments, i with seed + i."""
        self._told = [None] * self._num_envs
        begun, self._begun = self._begun, None
        for i, env in enumerate(self._envs):
            try:
                if i == 0 and begun is not None:
                    obs, self._told[i] = begun
                else:
                    obs, self._told[i] = env.reset() if self._seed is None else env.reset(seed=self._seed + i)
                self.block.put(i, obs, 0.0, False, False)
            except Exception as error:
                self._made_anew(i, error)
        self._tell()
        self._seed, self._ended = None, [False] * self._num_envs

    def step(self, action: Any) -> np.ndarray:
        """Which environments failed [B] bool, in the middle of an episode; the rest is in `block`."""
        if not isinstance(action, np.ndarray):
            action = [row(action, i) for i in range(self._num_envs)]
        block, ended, failed = self.block, self._ended, np.zeros(self._num_envs, bool)
        told = self._told = [None] * self._num_envs
        for i, env in enumerate(self._envs):
            try:
                if ended[i]:
                    obs, told[i] = env.reset()
                    block.put(i, obs, 0.0, False, False)
                else:
                    obs, reward, terminated, truncated, told[i] = env.step(action[i])
                    block.put(i, obs, reward, terminated, truncated)
            except Exception as error:
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
        return env if self._mask is None else masked(env, self._mask)[0]

    def _made_anew(self, i: int, error: Exception) -> None:
        if isinstance(error, MaskError):
            raise InputError(f"{self.restarts.name(i)} {error}") from error
        if not self._restart_failed:
            error.add_note(f"in {self.restarts.name(i)}")
            raise error
        first = error
        for _ in range(ATTEMPTS):
            _close(self._envs[i])
            self._envs[i] = None
            try:
                self._envs[i] = self._made(i)
                obs, self._told[i] = self._envs[i].reset(seed=self.restarts.next_seed(i))
                self.block.put(i, obs, 0.0, False, False)
            except Exception as another:
                error = another
            else:
                self.restarts.done(i, "".join(traceback.format_exception(first)))
                return
        raise RuntimeError(self.restarts.exhausted(i)) from error

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        self._begun = None  # what `fn` does to the environments may show in the reset
        return [fn(env) for env in self._envs]

    def render(self) -> list[Any]:
        return [env.render() for env in self._envs]

    def close(self) -> None:
        for env in self._envs:
            _close(env)
        self._envs = []


def _close(env: Any) -> None:
    try:
        if env is not None:
            env.close()
    except Exception as e:  # it is not needed any more
        _log.debug("%s cannot be closed: %s", env, e)
