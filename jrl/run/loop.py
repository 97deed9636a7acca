"""The one training loop: a generator of StepInfo over a Program, which collects and learns.

program = Staged(learner, source, make_mesh(), ...) or Fused(learner, unroll, make_mesh(), iterations=16, ...)
for info in run(program, program.init(seed), seed=seed, total_env_steps=300_000): ...
"""

import math
from collections.abc import Callable, Iterator

from jrl.metrics.timers import Timers
from jrl.run.clock import Clock, StepInfo
from jrl.run.program import LoopState, Program
from jrl.types import Episodes

_START = Clock()


def run(
    program: Program,
    state: LoopState,
    *,
    seed: int,
    total_env_steps: int | None,
    iteration: int = 0,
    clock: Clock = _START,
    timers: Timers | None = None,
    prepare: Callable[[LoopState], LoopState] | None = None,
) -> Iterator[StepInfo]:
    """Advances the program until `total_env_steps` environment steps have been counted; None: for ever.

    Args:
      program, state: a Fused or a Staged, and its `init` or a checkpoint.
      seed: of the run.
      total_env_steps: the budget; the iteration that reaches it is the last.
      iteration, clock: to continue from.
      prepare: makes of the state that of the next call, before each; None: it stays.
    """
    timers = timers or Timers()
    total = math.inf if total_env_steps is None else total_env_steps
    rows, most = program.rows, program.iterations
    uncounted: Episodes | None = None  # of the call under way
    count = 0  # its iterations
    while uncounted is not None or clock.env_steps < total:
        # to count a call is to wait for it: only where this one might go beyond the budget
        if uncounted is not None and clock.env_steps + (count + most) * rows > total:
            before, clock, uncounted = clock, clock.after(uncounted), None
            # a user's training step may sample more
            rows = max(rows, -(-(clock.env_steps - before.env_steps) // count))
            if clock.env_steps >= total:
                return
        left = total - clock.env_steps
        count = most if uncounted is not None or total == math.inf else _iterations(left, rows, most)
        state = state if prepare is None else prepare(state)
        state, metrics, report = program.advance(state, seed, iteration, count)
        iteration += count
        if uncounted is not None:
            clock = clock.after(uncounted)
        yield StepInfo(state, metrics, report, iteration, clock, timers)
        uncounted = report


def _iterations(left: float, rows: int, most: int) -> int:
    """The iterations of a call that may count `left` more steps: the last of them is the first that may reach it."""
    return int(min(most, max(1, -(-left // rows))))
