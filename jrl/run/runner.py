"""Runs that are driven to their ends, one or the members of a population: result rows, evaluations, checkpoints."""

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
_SECONDS_BETWEEN_CHECKPOINTS = 300.0  # unless checkpoint.every says otherwise


class Member:
    """One run: its session, its directory with rows and checkpoints, and its end.

    Args:
      session: of the run.
      directory: of the run.
      watchdog: is told of what takes long.
      note: is called before the last checkpoint with the reason for an end that is not the budget, and the steps.
    Attributes:
      checkpoints: writer of checkpoints; None: there is none, and nothing is saved.
      info: the latest call; None before the first.
      ended: why the run ended, in words; None: it goes on. `ended_at`: the iteration at which it did.
      reason: criterion or callback that ended the run, if there was one.
      fault: bundle of an update that was not finite.
      paused: whether it has come to the steps at which it pauses.
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
        """Prepares the directory of checkpoints; a pool, which runs may share, writes them until `stack` ends."""
        directory = self.directory / "checkpoints"
        self.checkpoints = stack.enter_context(Checkpointer(directory, self.session.config.checkpoint, pool))

    def open(
        self,
        stack: contextlib.ExitStack,
        rows_until: int | None,
        *sinks: reporter.Sink,
        told: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> None:
        """Opens the files of result rows until `stack` ends; the session has started.

        Args:
          stack: ends with the run.
          rows_until: env_steps of the last result row that counts, of a run that is continued; None: it begins.
          sinks: get each row after the files.
          told: what each row has besides; the run's own values count.
        """
        session, every = self.session, self.session.config.checkpoint.every
        if every is None:
            self._due = reporter.seconds_passed(_SECONDS_BETWEEN_CHECKPOINTS)
        else:
            most = math.inf if session.rows_wait else session.steps_per_call
            self._due = reporter.reached(every, most=most, env_steps=session.env_steps)
        self._files = stack.enter_context(contextlib.ExitStack())
        self.open_rows(rows_until, told)
        stop = reporter.stop_at(session.config.stop, session.config.run.smoothing_episodes)
        session.sinks += [lambda row: self._write(row), *sinks, stop]
        if (checkpoints := self.checkpoints) is not None and not session.rows_wait:
            ends = session.schedule.decides
            session.schedule.decides = lambda found: ends(found) or checkpoints.improves(found)

    def open_rows(self, rows_until: int | None, told: Mapping[str, Any]) -> None:
        """Opens the files of result rows anew: arguments as `open`."""
        self._files.close()
        with files.report_unwritable(self.directory):
            write = self._files.enter_context(run_directory.opened(self.session, self.directory, rows_until))

        def sink(row: dict[str, Any]) -> str | None:
            row.update({**told, **row})
            return write(row)

        self._write = sink

    # ------------------------------------------------------------ going on

    def after(self, made: tuple[Any, ...], until: float, *, lags: bool) -> None:
        """Takes the results of a call: makes the row, evaluation and checkpoint that are due; ends or pauses the run.

        Args:
          made: state, metrics and episodes, as `Program.advance` returns them.
          until: environment steps at which it pauses.
          lags: whether an update that is not finite is noticed when the next call is under way: nothing waits for it.
        """
        session, looked_at = self.session, self.info
        info = self.info = session.advanced(*made)
        if not lags:
            looked_at = info
        if looked_at is not None and reporter.not_finite(looked_at):
            self.finish()
            return
        reason = session.after(info)
        self.paused = info.env_steps + session.steps_per_call >= until and info.env_steps_after() >= until
        if self.paused and not reason and session.reporter.due():
            reason = session.reporter.flush()
        if reason and self._note:
            self._note(reason, info.env_steps_after())
        self.save_if_due(info)  # the last of all: a checkpoint knows of the row before it
        if reason:
            self.finish(reason)
        elif self.paused:
            self._save_last()

    def finish(self, reason: str | None = None, *, interrupted: bool = False) -> None:
        """Ends the run: makes its last row and saves it; does not wait for that."""
        self._watchdog.beat("the end of the run", grace=60.0)
        session, info = self.session, self.info
        if info is not None and reporter.not_finite(info):
            interrupted = False
            self.fault = session.write_fault(self.directory, info)
            reason = f"{interruption.NOT_FINITE}: {self.fault}"
            if self._note:
                self._note(reason, info.env_steps_after())
        if info is not None:
            if not interrupted:  # a row of its own would be one that an uninterrupted run does not have
                last = session.reporter.flush()
                reason = reason or last
            if self._note or not self.fault:  # of a run by itself, what was saved before is what it goes back to
                self._save_last(interrupted=interrupted)
        self.reason = None if self.fault else reason
        self.ended = "interrupted" if interrupted else reason or "env_steps"
        self.ended_at = session.iteration

    # ------------------------------------------------------------ checkpoints

    def _is_best(self) -> bool:
        session = self.session
        assert self.checkpoints is not None
        if session.rows_wait:  # its user saves the best
            return False
        return (session.evaluated or session.validated) and self.checkpoints.improves(session.reporter.row or {})

    def _save(self) -> None:
        assert self.checkpoints is not None
        self.checkpoints.save(self.session.iteration, *self.session.to_save())

    def save_if_due(self, info: StepInfo) -> None:
        """Saves after a call where it is time to, or where its weights are the best so far. Raises as `check`."""
        if self.checkpoints is None:
            return
        self.checkpoints.check()
        if not (self._due(info) or self._is_best()):
            return
        self._watchdog.beat("checkpoint", grace=60.0)
        self.checkpoints.wait()
        self._save()
        if self.session.config.checkpoint.exact:
            self.session.run.program.restart(self.session.iteration)

    def _save_last(self, *, interrupted: bool = False) -> None:
        """Saves the run where it is, if it is not saved yet; does not wait for it."""
        session = self.session
        if apart := parallel.find_diverged(session.state.learner):
            raise RuntimeError(f"the devices learned different things: {', '.join(apart)}: a reduction is missing")
        if self.checkpoints is None or (interrupted and session.config.checkpoint.exact):
            return
        if self.checkpoints.last_saved != session.iteration or self._is_best():
            self._save()

    def rescue(self) -> None:
        """Saves what was learned when environments break: they do before the state is donated."""
        session = self.session
        if self.info is None or self.checkpoints is None:
            return
        if any(x.is_deleted() for x in jax.tree.leaves(session.state.learner)):
            return
        self._watchdog.beat("checkpoint", grace=60.0)
        if self.checkpoints.rescue(session.iteration, *session.to_save()):
            print(f"saved: what was learned in {counted(session.counted(), 'step', ',')}")

    def check(self, *, whole: bool = False) -> None:
        """Raises InputError: it could not be saved. `whole`: waits until it is."""
        if self.checkpoints is not None:
            self.checkpoints.wait() if whole else self.checkpoints.check()


class Runner:
    """Drives runs to their ends or pauses, call by call.

    Args:
      members: of one program, which have begun or ended; or one whose program is its own.
      watchdog: is told of each call.
      interrupted: by a signal.
      population: the program of all; None: that of the one member's session.
      show: is called after each call.
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
    def _left(self) -> dict[int, Member]:
        return {i: member for i, member in enumerate(self.members) if member.ended is None}

    def run(self, until: float = math.inf) -> None:
        """Advances all members until each has ended or has come to so many environment steps, saved.

        A run ends by a criterion, its budget, a callback, a signal or an update that is not finite.
        """
        for member in self._left.values():
            member.paused = member.session.counted() >= until
        self._watchdog.beat("compilation and the first steps", grace=_COMPILATION, hint=self._hint)
        try:
            while live := {i: member for i, member in self._left.items() if not member.paused}:
                self._advance(live, until)
        except interruption.Interrupted:  # after a call, or while one waited: the state is that of the last call
            for member in self._left.values():
                member.finish(interrupted=True)
        except Exception:  # whatever it is, the run goes on from here once the state is kept
            if self._population is None:
                self.members[0].rescue()
            raise
        for member in self.members:
            member.check(whole=True)

    def _advance(self, live: Mapping[int, Member], until: float) -> None:
        """Makes a call of the members that are least far. Others wait, so that all make the calls of a whole run."""
        iteration = min(member.session.iteration for member in live.values())
        wait = {i for i, member in self._left.items() if member.paused or member.session.iteration > iteration}
        if self._population and not wait:
            self._population.narrow([member.ended_at for member in self.members], iteration)
        calls: dict[int, tuple[int, int]] = {}
        for i, member in live.items():
            if i in wait:
                continue
            if (count := member.session.ahead()) is None:
                member.finish()
            else:
                calls[i] = iteration, count
        if not calls:
            return
        if self._population is None:
            made: Mapping[int, Any] = {0: live[0].session.call(calls[0][1])}
        else:
            found = self._population.advance(calls, hold=bool(wait))
            made = {i: (live[i].session.state, *found[i]) for i in calls}
        self._watchdog.beat("result rows and evaluation", grace=60.0)  # the first evaluation compiles
        for i in calls:
            live[i].after(made[i], until, lags=self._population is None)
        for member in self.members:
            member.check()
        self._show()
        if self._interrupted:
            raise interruption.Interrupted
        self._watchdog.beat("environment steps and update", hint=self._hint)
