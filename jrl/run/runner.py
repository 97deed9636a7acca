"""Runner: advances one run or the members of a population to their ends, with result rows and checkpoints."""

import contextlib
import math
import types
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jrl.errors import counted
from jrl.host import files, interruption
from jrl.learn import parallel
from jrl.learn.program import StepInfo
from jrl.run import reporter, run_directory
from jrl.run.session import Session
from jrl.run.store.writer import Checkpointer

if TYPE_CHECKING:
    from jrl.learn.population import Population

_COMPILATION = 900.0  # seconds that the first call may take beyond run.stall_seconds
_SECONDS_BETWEEN_CHECKPOINTS = 300.0  # unless checkpoint.every is set


class Member:
    """One run: its session, its directory with rows and checkpoints, and its end.

    Args:
      note: called with (reason, environment steps) before the last checkpoint, unless the step budget ended the run.
    Attributes:
      checkpoints: writer of checkpoints; None: nothing is saved.
      info: latest call; None before the first call.
      ended: why the run ended; None: it is running. `ended_at`: the iteration of the end.
      reason: criterion or callback that ended the run; None: another end.
      fault: directory of the bundle of an update that was not finite.
      paused: whether the run has reached the steps of its pause.
    """

    def __init__(
        self,
        session: Session,
        directory: Path,
        watchdog: interruption.Watchdog | None = None,
        note: Callable[[str, int], None] | None = None,
    ):
        self.session, self.directory, self._note = session, directory, note
        self._watchdog = watchdog or interruption.Watchdog(None)
        self.checkpoints: Checkpointer | None = None
        self.info: StepInfo | None = None
        self.ended: str | None = None
        self.ended_at = math.inf
        self.reason: str | None = None
        self.fault: Path | None = None
        self.paused = False

    # ------------------------------------------------------------ files

    def open_checkpoints(self, stack: contextlib.ExitStack, pool: ThreadPoolExecutor | None = None) -> None:
        """Opens the directory of checkpoints until `stack` ends; `pool`: writer pool shared by runs."""
        directory = self.directory / "checkpoints"
        self.checkpoints = stack.enter_context(Checkpointer(directory, self.session.config.checkpoint, pool))

    def open(
        self,
        stack: contextlib.ExitStack,
        rows_until: int | None,
        *sinks: reporter.Sink,
        extra: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> None:
        """Opens the files of result rows until `stack` ends; call it after the session has started.

        Args:
          stack: closes the files.
          rows_until: env_steps of the last valid row of a continued run; None: a new run.
          sinks: functions called with each row after it is written.
          extra: further keys of each row; metrics of the run take precedence.
        """
        session, every = self.session, self.session.config.checkpoint.every
        if every is None:
            self._due = reporter.every_seconds(_SECONDS_BETWEEN_CHECKPOINTS)
        else:
            most = math.inf if session.rows_wait else session.steps_per_call
            self._due = reporter.every_steps(every, most=most, env_steps=session.env_steps)
        self._files = stack.enter_context(contextlib.ExitStack())
        self.open_rows(rows_until, extra)
        stop = reporter.end_by_criteria(session.config.stop, session.config.run.smoothing_episodes)
        session.sinks += [lambda row: self._write(row), *sinks, stop]
        if (checkpoints := self.checkpoints) is not None and not session.rows_wait:
            ends = session.schedule.decides
            session.schedule.decides = lambda metrics: ends(metrics) or checkpoints.improves(metrics)

    def open_rows(self, rows_until: int | None, extra: Mapping[str, Any]) -> None:
        """Opens the files of result rows again; arguments as `open`."""
        self._files.close()
        with files.report_unwritable(self.directory):
            write = self._files.enter_context(run_directory.open_files(self.session, self.directory, rows_until))

        def sink(row: dict[str, Any]) -> str | None:
            row.update({**extra, **row})
            return write(row)

        self._write = sink

    # ------------------------------------------------------------ calls

    def finish_call(self, result: tuple[Any, ...], until: float, *, lags: bool) -> None:
        """Makes the row, evaluation and checkpoint that are due after a call; ends or pauses the run.

        Args:
          result: state, metrics and episodes from `Program.advance`.
          until: environment steps of the pause.
          lags: check the previous call for updates that are not finite, so that nothing waits for this call.
        """
        session, checked = self.session, self.info
        info = self.info = session.count_call(*result)
        if not lags:
            checked = info
        if checked is not None and reporter.is_not_finite(checked):
            self.finish()
            return
        reason = session.finish_call(info)
        self.paused = info.env_steps + session.steps_per_call >= until and info.env_steps_after() >= until
        if self.paused and not reason and session.reporter.due():
            reason = session.reporter.flush()
        if reason and self._note:
            self._note(reason, info.env_steps_after())
        self.save_if_due(info)  # last, since a checkpoint contains the state of the rows
        if reason:
            self.finish(reason)
        elif self.paused:
            self._save_last()

    def finish(self, reason: str | None = None, *, interrupted: bool = False) -> None:
        """Ends the run: makes the last row and starts the last save."""
        self._watchdog.beat("the end of the run", grace=60.0)
        session, info = self.session, self.info
        if info is not None and reporter.is_not_finite(info):
            interrupted = False
            self.fault = session.write_fault(self.directory, info)
            reason = f"{interruption.NOT_FINITE}: {self.fault}"
            if self._note:
                self._note(reason, info.env_steps_after())
        if info is not None:
            if not interrupted:  # an uninterrupted run has no row here
                row_reason = session.reporter.flush()
                reason = reason or row_reason
            if self._note or not self.fault:  # a single run rolls back to its previous checkpoint
                self._save_last(interrupted=interrupted)
        self.reason = None if self.fault else reason
        self.ended = "interrupted" if interrupted else reason or "env_steps"
        self.ended_at = session.iteration

    # ------------------------------------------------------------ checkpoints

    def _is_best(self, checkpoints: Checkpointer) -> bool:
        session = self.session
        if session.rows_wait:  # the caller saves the best
            return False
        return (session.evaluated or session.validated) and checkpoints.improves(session.reporter.row or {})

    def save_if_due(self, info: StepInfo) -> None:
        """Saves after a call if a save is due or the weights are the best so far. Raises as `check`."""
        session, checkpoints = self.session, self.checkpoints
        if checkpoints is None:
            return
        checkpoints.check()
        if self._due(info) or self._is_best(checkpoints):
            self._watchdog.beat("checkpoint", grace=60.0)
            checkpoints.wait()
            checkpoints.save(session.iteration, *session.to_save())
            if session.config.checkpoint.exact:
                session.run.program.restart(session.iteration)

    def _save_last(self, *, interrupted: bool = False) -> None:
        """Starts a save of the present state, unless it is already saved."""
        session, checkpoints = self.session, self.checkpoints
        if diverged := parallel.find_diverged(session.state.learner):
            raise RuntimeError(f"the devices learned different things: {', '.join(diverged)}: a reduction is missing")
        if checkpoints is None or (interrupted and session.config.checkpoint.exact):
            return
        if checkpoints.last_saved != session.iteration or self._is_best(checkpoints):
            checkpoints.save(session.iteration, *session.to_save())

    def rescue(self) -> None:
        """Saves the state after a failure of environments, which happens before the state is donated."""
        session = self.session
        if self.info is None or self.checkpoints is None:
            return
        if any(x.is_deleted() for x in jax.tree.leaves(session.state.learner)):
            return
        self._watchdog.beat("checkpoint", grace=60.0)
        if self.checkpoints.rescue(session.iteration, *session.to_save()):
            print(f"saved: the state after {counted(session.counted(), 'step', ',')}")

    def check(self, *, wait: bool = False) -> None:
        """Raises InputError: a save failed. `wait`: wait for the unfinished save."""
        if self.checkpoints is not None:
            self.checkpoints.wait() if wait else self.checkpoints.check()


class Runner:
    """Advances runs to their ends or pauses, call by call.

    Args:
      members: members of a population, or a single run.
      population: program of all members; None: the program of the single run.
      show: called after each call.
    """

    def __init__(
        self,
        members: Sequence[Member],
        watchdog: interruption.Watchdog,
        interrupted: interruption.Signals,
        population: "Population | None" = None,
        show: Callable[[], None] = lambda: None,
    ):
        self.members, self._watchdog, self._interrupted = members, watchdog, interrupted
        self._population, self._show = population, show
        in_program = members[0].session.run.in_program
        self._hint = interruption.IN_A_PROGRAM if in_program else interruption.FROM_THE_HOST

    @property
    def _running(self) -> dict[int, Member]:
        return {i: member for i, member in enumerate(self.members) if member.ended is None}

    def run(self, until: float = math.inf) -> None:
        """Advances all members until each has ended or is saved at its pause, at `until` environment steps.

        A run ends by a criterion, its budget, a callback, a signal or an update that is not finite.
        """
        for member in self._running.values():
            member.paused = member.session.counted() >= until
        self._watchdog.beat("compilation and the first steps", grace=_COMPILATION, hint=self._hint)
        try:
            while live := {i: member for i, member in self._running.items() if not member.paused}:
                self._advance(live, until)
        except interruption.Interrupted:  # after or during a call: the state is that of the last call
            for member in self._running.values():
                member.finish(interrupted=True)
        except Exception:  # after any error, a resume can continue from the saved state
            if self._population is None:
                self.members[0].rescue()
            raise
        for member in self.members:
            member.check(wait=True)

    def _advance(self, live: Mapping[int, Member], until: float) -> None:
        """Makes a call of the members with the fewest iterations. Others wait, so each run has calls of equal sizes."""
        iteration = min(member.session.iteration for member in live.values())
        wait = {i for i, member in self._running.items() if member.paused or member.session.iteration > iteration}
        if self._population and not wait:
            self._population.narrow([member.ended_at for member in self.members], iteration)
        calls: dict[int, tuple[int, int]] = {}
        for i, member in live.items():
            if i in wait:
                continue
            if (count := member.session.next_count()) is None:
                member.finish()
            else:
                calls[i] = iteration, count
        if not calls:
            return
        if self._population is None:
            results: Mapping[int, Any] = {0: live[0].session.dispatch(calls[0][1])}
        else:
            outputs = self._population.advance(calls, hold=bool(wait))
            results = {i: (live[i].session.state, *outputs[i]) for i in calls}
        self._watchdog.beat("result rows and evaluation", grace=60.0)  # the first evaluation compiles
        for i in calls:
            live[i].finish_call(results[i], until, lags=self._population is None)
        for member in self.members:
            member.check()
        self._show()
        if self._interrupted:
            raise interruption.Interrupted
        self._watchdog.beat("environment steps and update", hint=self._hint)
