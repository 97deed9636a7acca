"""A session that is driven to its end, as a command does: rows, evaluations and checkpoints between its calls."""

from jrl.host import interruption
from jrl.learn.clock import StepInfo
from jrl.run import reporter
from jrl.run.session import Session
from jrl.run.store.schedule import Saving

_COMPILATION = 900.0  # seconds that the first call may take beyond run.stall_seconds


def to_the_end(
    session: Session, saving: Saving, watchdog: interruption.Watchdog, interrupted: interruption.Signals, until: float
) -> tuple[StepInfo | None, str | None, bool]:
    """Advances a session until a criterion, the step budget, a signal or an update that is not finite.

    Args:
      session: that has started.
      saving: of it.
      watchdog: is told of each call.
      interrupted: by a signal.
      until: environment steps at which it pauses.
    Returns:
      The last iteration, None where a signal came before the first; the criterion that was met; and whether it is but a
      pause.
    """
    reason, before, paused = None, None, False
    hint = interruption.IN_A_PROGRAM if session.run.in_program else interruption.FROM_THE_HOST
    watchdog.beat("compilation and the first steps", grace=_COMPILATION, hint=hint)
    info: StepInfo | None = None
    try:
        while (latest := session.advance()) is not None:
            info = latest
            watchdog.beat("result rows and evaluation", grace=60.0)  # the first evaluation compiles
            if before is not None and reporter.not_finite(before):
                break
            before = info._replace(state=None)  # looked at when the next call is under way
            reason = session.after(info)
            paused = info.env_steps + session.steps_per_call >= until and info.env_steps_after() >= until
            if paused and not reason and session.reporter.due():
                reason = session.reporter.flush()
            saving.if_due(info)  # the last of all: a checkpoint knows of the row before it
            if reason or interrupted or paused:
                break
            watchdog.beat("environment steps and update", hint=hint)
    except interruption.Interrupted:  # while it waited: the state is that of the last call
        pass
    except Exception:  # whatever it is, it goes on from here once the state is kept
        if info is not None:
            saving.rescue(info)
        raise
    return info, reason, paused and not reason
