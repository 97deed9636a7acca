"""Saving of a run that is under way: when, and with what."""

import jax

from jrl.errors import counted
from jrl.host import interruption
from jrl.learn.clock import StepInfo
from jrl.run import reporter
from jrl.run.session import Session
from jrl.run.store.writer import Checkpointer

_SECONDS_BETWEEN_CHECKPOINTS = 300.0  # unless checkpoint.every says otherwise


class Saving:
    """Saves one run when it is time to.

    Args:
      session: of the run.
      checkpoints: where it is saved.
      watchdog: is told of what takes long.
      done: environment steps before the run.
    """

    def __init__(self, session: Session, checkpoints: Checkpointer, watchdog: interruption.Watchdog, done: int):
        self._session, self._checkpoints, self._watchdog = session, checkpoints, watchdog
        self._exact, every = session.config.checkpoint.exact, session.config.checkpoint.every
        if every is None:
            self._due = reporter.seconds_passed(_SECONDS_BETWEEN_CHECKPOINTS)
        else:
            self._due = reporter.reached(every, most=session.steps_per_call, env_steps=done)

    def _is_best(self) -> bool:
        session = self._session
        return (session.evaluated or session.validated) and self._checkpoints.improves(session.reporter.row or {})

    def _save(self, info: StepInfo) -> None:
        self._checkpoints.save(info.iteration, *self._session.to_save())

    def if_due(self, info: StepInfo) -> None:
        """Saves after an iteration where it is time to, or where its weights are the best so far."""
        self._checkpoints.check()
        if not (self._due(info) or self._is_best()):
            return
        self._watchdog.beat("checkpoint", grace=60.0)
        self._checkpoints.wait()
        self._checkpoints.check()
        self._save(info)
        if self._exact:
            self._session.run.program.restart(info.iteration)

    def rescue(self, info: StepInfo) -> None:
        """Saves what was learned when environments break: they do before the state is donated."""
        session = self._session
        if any(x.is_deleted() for x in jax.tree.leaves(session.state.learner)):
            return
        self._watchdog.beat("checkpoint", grace=60.0)
        if self._checkpoints.rescue(info.iteration, *session.to_save()):
            print(f"saved: what was learned in {counted(session.counted(), 'step', ',')}")

    def pause(self, info: StepInfo) -> None:
        """Saves the run where it is, if it is not saved yet; does not wait for it."""
        if self._checkpoints.last_saved != info.iteration:
            self._save(info)

    def last(self, info: StepInfo, *, interrupted: bool) -> None:
        """Saves the end of the run, if it is not saved yet; does not wait for it: leaving the checkpointer does."""
        if (self._checkpoints.last_saved != info.iteration or self._is_best()) and not (interrupted and self._exact):
            self._save(info)
