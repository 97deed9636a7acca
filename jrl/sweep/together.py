"""Members of a population whose program is one: each a session with rows, evaluations and checkpoints of its own."""

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.errors import counted
from jrl.host import faults, files, output
from jrl.metrics import progress
from jrl.run import build, build_population, checkpoint, reporter, run_directory
from jrl.run.saving import Saving
from jrl.run.session import Session
from jrl.sweep.members import Member, is_complete

_COMPILATION = 900.0  # seconds that the first call may take beyond run.stall_seconds


class Running:
    """A member whose run is under way.

    Attributes:
      member: which.
      session: of its run.
      ended: why its run ended; None: it goes on.
      saved: the iteration of the checkpoint from which it goes on; it waits until the others come there.
    """

    def __init__(self, member: Member, number: int, run: build.Run, watchdog: faults.Watchdog):
        self.member, self.number = member, number
        self.saved = checkpoint.locate(member.directory) if checkpoint.exists(member.directory) else None
        self._meta = checkpoint.read_meta(self.saved, resumable=True) if self.saved else None
        self.session = Session(member.config, directory=member.directory, run=run)
        self.ended: str | None = None
        self._watchdog = watchdog

    def start(self, stack: contextlib.ExitStack) -> None:
        """Begins, or goes on from the latest checkpoint; the files are open until `stack` ends."""
        cfg, directory = self.member.config, self.member.directory
        done = self._meta["env_steps"] if self._meta else 0
        stack.enter_context(self.session)
        if is_complete(self.member):
            self.ended = "complete"
            return
        self._checkpoints = stack.enter_context(checkpoint.Checkpointer(directory / "checkpoints", cfg.checkpoint))
        self.session.start(self.saved, anew=self._meta is None)
        rows_until = self._meta["rows"]["env_steps"] if self._meta else 0
        with files.opening(directory):
            more = {"make_room": self._checkpoints.make_room}
            write = stack.enter_context(run_directory.opened(self.session, directory, rows_until, **more))
        self.session.sinks += [write, reporter.stop_at(cfg.stop, cfg.run.smoothing_episodes)]
        self.session.schedule.decides = lambda found: (
            reporter.evaluation_ends(cfg.stop, found) or self._checkpoints.improves(found)
        )
        self._saving = Saving(self.session, self._checkpoints, self._watchdog, done)

    def after(self, made: tuple[Any, Any]) -> None:
        """Takes what a call made: the row, evaluation and checkpoint that are due; the end, where it is one."""
        session = self.session
        info = session.advanced(session.state, *made)
        self._info = info
        if reporter.not_finite(info):
            path = session.write_fault(self.member.directory, info)
            session.reporter.flush()
            self.ended = f"not finite: {path}"
            return
        reason = session.after(info)
        self._saving.if_due(info)
        if reason:
            self.finish(reason)

    def finish(self, reason: str | None, *, interrupted: bool = False) -> None:
        """Saves the end of the run."""
        if not interrupted:
            last = self.session.reporter.flush()
            reason = reason or last
        self._saving.last(self._info, interrupted=interrupted)
        self.ended = "interrupted" if interrupted else reason or "env_steps"
        if not interrupted:
            try:
                run_directory.plot(self.session, self.member.directory)
            except OSError as e:  # the run itself is whole
                print(f"learning_curve.png of {self.member.name} was not drawn: {e.strerror or e}", file=sys.stderr)


def train(
    members: Sequence[Member], directory: Path, transcript: output.Transcript, interrupted: faults.Signals
) -> dict[str, str]:
    """Trains all members to their ends.

    Args:
      members: whose configs `build_population.grouped` finds alike.
      directory: of the population.
      transcript: what is printed.
      interrupted: by a signal, after which the members are saved where they are.
    Returns:
      Why each ended, by name: its criterion, `complete`, `not finite: PATH` or `interrupted`.
    Raises:
      InputError: what cannot be run.
    """
    cfg = members[0].config
    if cfg.run.compile_cache:
        build.enable_compile_cache()
    population, runs = build_population.make([member.config for member in members])
    with contextlib.ExitStack() as stack:
        stack.callback(population.close)
        watchdog = stack.enter_context(faults.Watchdog(cfg.run.stall_seconds))
        every = [Running(member, i, runs[i], watchdog) for i, member in enumerate(members)]
        for one in every[1:]:
            one.session.schedule.evaluations.share(every[0].session.schedule.evaluations)
        print(*introduction(every), sep="\n")
        for one in every:
            one.start(stack)
        with files.opening(directory):
            transcript.open(directory / "log.txt")
        shown = [progress.open_progress(cfg.stop, out) for out in (transcript.screen, transcript.file)]
        for display in shown:
            stack.callback(display.close)
        transcript.listen()
        _drive(population, every, shown, watchdog, interrupted)
    return {one.member.name: one.ended or "" for one in every}


def introduction(every: Sequence[Running]) -> list[str]:
    """Tells in lines of text what a population is going to do."""
    first = every[0].session
    keys = sorted({key for one in every for key in one.member.changed})
    lines = list(run_directory.introduction(first))
    resumed = sum(one.saved is not None for one in every)
    lines.append(f"{counted(len(every), 'member')}, each with its {', '.join(keys)}, in one program: vmap over members")
    return [*lines, f"resume: {resumed} of them from their checkpoints"] if resumed else lines


def _drive(
    population: Any, every: Sequence[Running], shown: Sequence[Any], watchdog: faults.Watchdog, interrupted: Any
) -> None:
    """Advances all members, call by call, until each has ended."""
    # those of a later checkpoint wait for the others, so that all make the calls of a run that was not interrupted
    waiting = {one.number: one.session.iteration for one in every if one.ended is None}
    held = {n: population.of(n) for n, iteration in waiting.items() if iteration > min(waiting.values())}
    iteration, started, rows = min(waiting.values(), default=0), time.monotonic(), -1
    watchdog.beat("compilation and the first steps", grace=_COMPILATION, hint=faults.IN_A_PROGRAM)
    while live := [one for one in every if one.ended is None]:
        calls: dict[int, tuple[int, int]] = {}
        for one in live:
            if one.session.iteration > iteration:
                continue
            if one.number in held:
                population.put(one.number, held.pop(one.number))
            count = one.session.ahead()
            if count is None:
                one.finish(None)
            else:
                calls[one.number] = one.session.iteration, count
        if calls:
            made = population.advance(calls)
            watchdog.beat("result rows and evaluation", grace=60.0)
            for one in live:
                if one.number in made:
                    one.after(made[one.number])
            if rows != (rows := sum(one.session.reporter.count for one in every if one.ended != "complete")):
                _show(every, shown, started)
            watchdog.beat("environment steps and update", hint=faults.IN_A_PROGRAM)
        iteration = min((one.session.iteration for one in live if one.ended is None), default=iteration)
        left = [one.number for one in live if one.ended is None]
        if left and not held and 2 * len(left) <= population.size:
            population.keep_alone(left)
        if interrupted:
            for one in live:
                if one.ended is None and one.number in calls:
                    one.finish(None, interrupted=True)
                elif one.ended is None:
                    one.ended = "interrupted"
            return


def _show(every: Sequence[Running], shown: Sequence[Any], started: float) -> None:
    """Shows the mean of the members' latest rows, where each has one."""
    rows = [one.session.reporter.row for one in every if one.ended != "complete"]
    if any(row is None for row in rows):
        return
    first, numbers = rows[0], [row for row in rows if row]
    assert first is not None
    of_all = {
        name: float(np.nanmean([row[name] for row in numbers]))
        for name, value in first.items()
        if isinstance(value, int | float) and not all(np.isnan(row.get(name, np.nan)) for row in numbers)
    }
    of_all["env_steps"] = min(row["env_steps"] for row in numbers)
    of_all["time_s"] = time.monotonic() - started
    for display in shown:
        display.update({**first, **of_all})
