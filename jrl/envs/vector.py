"""Gymnasium environments stepped one after the other in this process, and the handling of failures."""

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jrl.envs.context import OnFailure
from jrl.envs.infos import Infos
from jrl.errors import EnvironmentFailed, InputError
from jrl.gym.block import StepMemory, get_row
from jrl.gym.exceptions import (
    Breach,
    SeveralAgents,
    explain_make_error,
    format_line,
    format_stack,
    is_environment_error,
)
from jrl.gym.faults import reset_with_seed
from jrl.gym.wrappers import list_numeric_shapes, wrap_with_mask

ATTEMPTS = 10  # attempts to make and reset an environment again before the run ends
_RESTARTED = 2**30  # seeds of restarts; first resets use smaller seeds (see `context.seed_range`)
_log = logging.getLogger(__name__)


class Restarts:
    """Seeds and count of environments that are made again, and the errors of a run that ends."""

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

    def count_restart(self, i: int, cause: str) -> None:
        """Counts a restart; report the first one, and each that doubles their number."""
        self.count += 1
        if self.count & (self.count - 1) == 0:
            _log.warning("%s failed and was made again, %d so far:\n%s", self.name(i), self.count, cause)

    # ------------------------------------------------------------ errors that end a run

    def breach(self, i: int, lines: Sequence[str]) -> InputError:
        """Returns the error of an environment that violates its interface: a line for each fault."""
        # a line that begins with a config key needs no other key before it
        prefix = lambda text: self.name(i) if text.startswith("env.") else f"env.id {self.id}: environment {i}:"
        return InputError(*(f"{prefix(text)} {text}" for text in lines))

    def make_error(self, fault: tuple[str, str] | None, texts: tuple[str, str, str]) -> InputError:
        """Returns the error of environments that cannot be made.

        Args:
          fault: result of `exceptions.explain_make_error`.
          texts: result of `format_error`.
        """
        what, text = fault or ("id", texts[0])
        if what == "options":
            return InputError(f"env.options: {self.id} cannot be made with options {self._options}: {text}")
        given = f" with options {self._options}" if self._options else ""
        found = InputError(f"env.id {self.id}: the environment cannot be made{given}: {text}")
        found.details = texts[2]
        return found

    def failure(self, i: int, texts: tuple[str, str, str], where: str = "") -> EnvironmentFailed:
        """Returns the error of an environment that raised. `texts`: result of `format_error`."""
        line, frames, details = texts
        fix = "env_runners.restart_failed_sub_environments=true makes a failed environment again"
        found = EnvironmentFailed(f"{line}{frames}\n{self.name(i)} failed{where}; {fix}")
        found.details = details
        return found

    def exhausted(self, i: int, cause: str, details: str = "") -> EnvironmentFailed:
        found = EnvironmentFailed(f"{self.name(i)} failed {ATTEMPTS + 1} times in a row, with a restart each: {cause}")
        found.details = details
        return found


class Vector:
    """B environments stepped one after the other, as `jrl.types.StepResult`; actions and observations are unconverted.

    Args:
      make: function that makes environment i, at first and after a failure; all need the spaces of environment 0.
      id, options: for errors.
      num_envs, seed: environment i is seeded with seed + i at the first reset.
      on_failure: whether an environment that raises is made again, and the checks of `jrl.gym.block.StepMemory`.
    Raises:
      InputError: by all methods, an environment cannot be made, or violates its interface.
      EnvironmentFailed: by all methods, an environment raised; with restarts, again and again.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        *,
        id: str,
        options: Mapping[str, Any],
        num_envs: int,
        seed: int,
        on_failure: OnFailure,
    ):
        self.restarts = Restarts(id, num_envs, seed, options)
        self._make, self._on_failure, self._num_envs = make, on_failure, num_envs
        self.block: StepMemory  # allocated by the first reset
        self.infos, self._latest = Infos(num_envs), list[Any]()
        self._seed: int | None = seed
        self._ended = [False] * num_envs
        self._mask: tuple[str, tuple[int, ...]] | None = None
        self._pending_reset: Any = None  # result of environment 0's first reset, until it is used
        self._envs: list[Any] = []
        try:
            first = make(0)
        except BaseException as error:
            if isinstance(error, InputError | SeveralAgents) or not is_environment_error(error):
                raise
            raise self.restarts.make_error(explain_make_error(error), format_error(error)) from error
        self._envs = [first, *[None] * (num_envs - 1)]
        try:
            self.observation_space, self.action_space = first.observation_space, first.action_space
            # a class that does not inherit from gymnasium.Env may lack both
            self.max_episode_steps = getattr(getattr(first, "spec", None), "max_episode_steps", None)
            self.metadata = getattr(first, "metadata", None) or {}
            self._spaces = self.observation_space, self.action_space  # without the mask
            for i in range(1, num_envs):
                try:
                    self._envs[i] = self._make_env(i)
                except BaseException as error:
                    if not on_failure.restart and is_environment_error(error):
                        raise self.restarts.make_error(explain_make_error(error), format_error(error)) from error
                    self._restart(i, error, reset=False)
        except BaseException:
            self.close()
            raise

    def peek_info_shapes(self) -> dict[str, tuple[int, ...]] | None:
        """Resets environment 0 early; returns the shapes of its infos by name. None: the reset failed.

        The next `reset` uses this result, unless `foreach_env` is called before.
        """
        try:
            result = self._envs[0].reset(seed=self._seed)
            found = list_numeric_shapes(result[1])
        except BaseException as error:  # `reset` will report the error
            if not is_environment_error(error):
                raise
            _log.debug("%s cannot be reset: %s", self.restarts.name(0), error)
            return None
        self._pending_reset = result
        return found

    def add_mask(self, name: str, shape: tuple[int, ...]) -> None:
        """Adds the mask of the infos to observations. Call it before the first reset."""
        self._mask = (name, shape)
        first, wrapper = wrap_with_mask(self._envs[0], self._mask)
        self._envs = [first, *(wrap_with_mask(env, self._mask)[0] for env in self._envs[1:])]
        if self._pending_reset is not None:
            self._pending_reset = wrapper.add_mask(*self._pending_reset), self._pending_reset[1]
        self.observation_space = first.observation_space

    def reset(self) -> None:
        """Begins new episodes; the first call seeds environment i with seed + i."""
        if self._seed is not None:
            spaces, checks = (self.observation_space, self.action_space), self._on_failure
            self.block = StepMemory(*spaces, self._num_envs, check_steps=checks.check_steps, report=checks.report)
        self._latest = [None] * self._num_envs
        pending, self._pending_reset = self._pending_reset, None
        for i, env in enumerate(self._envs):
            try:
                if i == 0 and pending is not None:
                    result = pending
                else:
                    result = env.reset() if self._seed is None else reset_with_seed(env, self._seed + i)
                self._latest[i] = self.block.take(i, result, reset=True)
            except BaseException as error:
                self._restart(i, error)
        self._publish_infos()
        self._seed, self._ended = None, [False] * self._num_envs

    def step(self, action: Any) -> np.ndarray:
        """Steps all environments; returns which failed mid-episode [B] bool. The result is in `block`."""
        if not isinstance(action, np.ndarray):
            action = [get_row(action, i) for i in range(self._num_envs)]
        block, ended, failed = self.block, self._ended, np.zeros(self._num_envs, bool)
        infos = self._latest = [None] * self._num_envs
        for i, env in enumerate(self._envs):
            try:
                if ended[i]:
                    infos[i] = block.take(i, env.reset(), reset=True)
                else:
                    infos[i] = block.take(i, env.step(action[i]))
            except BaseException as error:
                self._restart(i, error)
                failed[i] = not ended[i]
        self._ended = (block.terminated | block.truncated).tolist()
        self._publish_infos()
        return failed

    def _publish_infos(self) -> None:
        if self.infos.wanted:  # copies: an environment may reuse its dict
            self.infos.latest = [dict(info) for info in self._latest]

    def _make_env(self, i: int) -> Any:
        env = self._make(i)
        if (env.observation_space, env.action_space) != self._spaces:
            env.close()
            raise ValueError(f"spaces {env.observation_space}, {env.action_space} differ from environment 0's")
        return env if self._mask is None else wrap_with_mask(env, self._mask)[0]

    def _restart(self, i: int, error: BaseException, *, reset: bool = True) -> None:
        """Makes environment i again after an error; raise if the run must end."""
        self._raise_if_final(i, error)
        if not self._on_failure.restart:
            raise self.restarts.failure(i, format_error(error)) from error
        first = error
        for _ in range(ATTEMPTS):
            _close(self._envs[i])
            self._envs[i] = None
            try:
                self._envs[i] = self._make_env(i)
                if reset:
                    result = reset_with_seed(self._envs[i], self.restarts.next_seed(i))
                    self._latest[i] = self.block.take(i, result, reset=True)
            except BaseException as another:
                self._raise_if_final(i, another)
                error = another
            else:
                self.restarts.count_restart(i, "".join(traceback.format_exception(first)))
                return
        raise self.restarts.exhausted(i, format_line(error), format_error(error)[2]) from error

    def _raise_if_final(self, i: int, error: BaseException) -> None:
        """Raises errors that a restart cannot fix: Ctrl-C unchanged, and a breach of the interface."""
        if not is_environment_error(error):
            raise error
        if isinstance(error, Breach):
            raise self.restarts.breach(i, error.args) from error

    def foreach_env(self, fn: Callable[[Any], Any]) -> list[Any]:
        self._pending_reset = None  # `fn` may change the environments
        return [fn(env) for env in self._envs]

    def render(self) -> list[Any]:
        return [env.render() for env in self._envs]

    def close(self) -> None:
        for env in self._envs:
            _close(env)
        self._envs = []


def format_error(error: BaseException) -> tuple[str, str, str]:
    """Returns the user's line of an exception, the user's frames, and the whole traceback."""
    return format_line(error), format_stack(error), "".join(traceback.format_exception(error))


def _close(env: Any) -> None:
    try:
        if env is not None:
            env.close()
    except BaseException as e:  # a failure to close an unused environment must not end the run
        if not is_environment_error(e):
            raise
        _log.debug("%s cannot be closed: %s", env, e)
