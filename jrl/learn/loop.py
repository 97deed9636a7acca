"""The one training loop: the calls of a Program, which collects and learns, and their results.

program = Staged(learner, source, make_mesh(), ...) or Fused(learner, unroll, make_mesh(), iterations=16, ...)
for info in run(program, program.init(seed), seed=seed, total_env_steps=300_000): ...
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from jrl.learn.clock import Clock, StepInfo
from jrl.learn.program import LoopState, Program
from jrl.metrics.timers import Timers
from jrl.types import Episodes, Metrics

_START = Clock()


class Calls:
    """Calls of a run's program, one after the other: the iterations of the next one, and the results of each.

    Args:
      rows, most: of an iteration, and iterations of a call, see `Program`.
      state: `init` of the program, or a checkpoint.
      total_env_steps: the budget; the iteration that reaches it is the last. None: there is none.
      iteration, clock: to continue from.
      timers: handed on.
      prepare: makes of the state that of the next call, before each; None: it stays.
    Attributes:
      state: for the next call.
      iteration: those made so far.
    """

    def __init__(
        self,
        rows: int,
        most: int,
        state: LoopState,
        *,
        total_env_steps: int | None,
        iteration: int = 0,
        clock: Clock = _START,
        timers: Timers | None = None,
        prepare: Callable[[LoopState], LoopState] | None = None,
    ):
        self.state, self.iteration = state, iteration
        self._rows, self._most, self._clock, self._prepare = rows, most, clock, prepare
        self._timers = timers or Timers()
        self._total = math.inf if total_env_steps is None else total_env_steps
        self._uncounted: Episodes | None = None  # of the call under way
        self._count = 0  # its iterations

    def ahead(self) -> int | None:
        """Counts the iterations that the next call makes; None: the budget is spent."""
        total, most = self._total, self._most
        # to count a call is to wait for it: only where the next one might go beyond the budget
        if self._uncounted is not None and self._clock.env_steps + (self._count + most) * self._rows > total:
            before, self._clock, self._uncounted = self._clock, self._clock.after(self._uncounted), None
            # a user's training step may sample more
            self._rows = max(self._rows, -(-(self._clock.env_steps - before.env_steps) // self._count))
        if self._uncounted is None and self._clock.env_steps >= total:
            return None
        left = total - self._clock.env_steps
        unlimited = self._uncounted is not None or total == math.inf
        # the last iteration of the call is the first that may reach the budget
        self._count = most if unlimited else int(min(most, max(1, -(-left // self._rows))))
        if self._prepare is not None:
            self.state = self._prepare(self.state)
        return self._count

    def made(self, state: LoopState, metrics: Metrics, report: Episodes) -> StepInfo:
        """Counts what the latest call made."""
        self.state = state
        self.iteration += self._count
        if self._uncounted is not None:
            self._clock = self._clock.after(self._uncounted)
        self._uncounted = report
        return StepInfo(state, metrics, report, self.iteration, self._clock, self._timers)


def run(program: Program, state: LoopState, *, seed: int, **more: Any) -> Iterator[StepInfo]:
    """Advances the program, a Fused or a Staged, until the budget is spent; `more`: as `Calls`."""
    calls = Calls(program.rows, program.iterations, state, **more)
    while (count := calls.ahead()) is not None:
        yield calls.made(*program.advance(calls.state, seed, calls.iteration, count))
