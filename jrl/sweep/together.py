"""Members of a population whose program is one: each a session with rows, evaluations and checkpoints of its own."""

import concurrent.futures
import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.config import RunConfig
from jrl.errors import InputError, counted
from jrl.host import files, interruption, output
from jrl.metrics import progress
from jrl.run import build, build_population, reporter, run_directory
from jrl.run.session import Session
from jrl.run.store import checkpoint, resume
from jrl.run.store.schedule import Saving
from jrl.run.store.writer import Checkpointer
from jrl.sweep.members import NOT_FINITE, Ends, Member, is_complete

_FEW = 4  # the part of a program's members that is few enough for a smaller program
_PATIENCE = 1.25  # until so many times the iterations at which they became few: they may end before it is compiled
_COMPILATION = 900.0  # seconds that the first call may take beyond run.stall_seconds


class DoNotFit(InputError):
    """The members of a population take more memory together than there is; `most` fit at once, at least one."""

    def __init__(self, most: int):
        super().__init__(f"members take more memory than is free: {most} would fit")
        self.most = max(most, 1)


class Running:
    """A member whose run is under way, with a session of its own.

    Attributes:
      ended, ended_at: why its run ended (None: it goes on), and the iteration at which it did.
      began: whether it was under way in this process.
      paused: whether it is saved at a pause, where the scheduler compares members.
      saved: the checkpoint from which it goes on.
    """

    def __init__(self, member: Member, number: int, run: build.Run, watchdog: interruption.Watchdog, ends: Ends):
        self.member, self.number = member, number
        self.saved = checkpoint.locate(member.directory) if checkpoint.exists(member.directory) else None
        self._meta = checkpoint.read_meta(self.saved, resumable=True) if self.saved else None
        self.config, self.notes = member.config, list[str]()
        if self._meta:
            self.config, lines = resume.without_met_criteria(self._meta, member.config, asked=False)
            self.notes = [] if self.config is member.config else lines
        self.session = Session(self.config, directory=member.directory, run=run)
        self.ended: str | None = None
        self.ended_at = math.inf
        self.paused = self.began = False
        self._watchdog, self._ends = watchdog, ends

    def start(self, stack: contextlib.ExitStack, writer: concurrent.futures.ThreadPoolExecutor) -> None:
        """Begins, or goes on from the latest checkpoint; the files are open until `stack` ends."""
        cfg, directory = self.config, self.member.directory
        done = self._meta["env_steps"] if self._meta else 0
        stack.enter_context(self.session)
        if why := self._ends.why(self.member) or ("complete" if is_complete(self.member) else None):
            self.ended, self.ended_at = why, self._meta["iteration"] if self._meta else 0
            return
        self.began = True
        checkpoints = Checkpointer(directory / "checkpoints", cfg.checkpoint, writer)
        self._checkpoints = stack.enter_context(checkpoints)
        self.session.start(self.saved, anew=self._meta is None)
        self._files = stack.enter_context(contextlib.ExitStack())
        self._open_files(self._meta["rows"]["env_steps"] if self._meta else 0)
        self.session.sinks += [self._write, reporter.stop_at(cfg.stop, cfg.run.smoothing_episodes)]
        self.session.schedule.decides = lambda found: (
            reporter.evaluation_ends(cfg.stop, found) or self._checkpoints.improves(found)
        )
        self._saving = Saving(self.session, self._checkpoints, self._watchdog, done)

    def _open_files(self, rows_until: int) -> None:
        self._files.close()
        with files.report_unwritable(self.member.directory):
            opened = run_directory.opened(self.session, self.member.directory, rows_until)
            self._log = self._files.enter_context(opened)

    def _write(self, row: dict[str, Any]) -> str | None:
        row.update(self.member.told)
        return self._log(row)

    def after(self, made: tuple[Any, Any], pause: float) -> None:
        """Takes a call's results: writes what is due; ends the run, or pauses it at so many steps."""
        session = self.session
        info = session.advanced(session.state, *made)
        self._info = info
        if reporter.not_finite(info):
            path = session.write_fault(self.member.directory, info)
            why = f"{NOT_FINITE}: {path}"
            self._ends.note(self.member, why, info.env_steps_after())
            self.finish(why)  # where the guard has kept it: the program goes on with its place
            return
        reason = session.after(info)
        self.paused = info.env_steps_after() >= pause
        if self.paused and session.reporter.due():
            reason = session.reporter.flush() or reason
        if reason:
            self._ends.note(self.member, reason, info.env_steps_after())
            self._saving.if_due(info)
            self.finish(reason)
        elif self.paused:
            self._saving.pause(info)
        else:
            self._saving.if_due(info)

    def check(self, *, whole: bool = False) -> None:
        """Raises InputError: it could not be saved. `whole`: waits until it is."""
        if self.began and whole:
            self._checkpoints.wait()
        elif self.began:
            self._checkpoints.check()

    def finish(self, reason: str | None, *, interrupted: bool = False) -> None:
        """Saves the end of the run; does not wait for it."""
        if not interrupted:
            last = self.session.reporter.flush()
            reason = reason or last
        self._saving.last(self._info, interrupted=interrupted)
        self.ended = "interrupted" if interrupted else reason or "env_steps"
        self.ended_at = self.session.iteration

    def take_over(self, source: "Running", member: Member) -> None:
        """Goes on from where another member is, with a config of its own, as if from a copy of its checkpoint."""
        self.member = member
        self.session.go_on_as(source.session, member.config)
        self._open_files(self.session.reporter.state()["env_steps"])


class Together:
    """Members whose runs are under way in one program. `close` it.

    Args:
      members: whose configs `build_population.grouped` finds alike.
      directory, transcript, interrupted, ends, also: as of `trainer.Trainer`.
    Raises:
      InputError: what cannot be run.
      DoNotFit: the memory holds fewer members at once.
    """

    def __init__(
        self,
        members: Sequence[Member],
        directory: Path,
        transcript: output.Transcript,
        interrupted: interruption.Signals,
        ends: Ends,
        also: Sequence[RunConfig] = (),
    ):
        cfg = members[0].config
        self.names = [member.name for member in members]
        self._interrupted = interrupted
        if cfg.run.compile_cache:
            build.enable_compile_cache()
        with contextlib.ExitStack() as stack:
            self._population, runs = build_population.make([member.config for member in members], also)
            stack.callback(self._population.close)
            fit = self._population.fits() if len(members) > 1 else None
            if fit is not None and fit < len(members):
                raise DoNotFit(fit)
            self._watchdog = stack.enter_context(interruption.Watchdog(cfg.run.stall_seconds))
            self.every = [Running(member, i, runs[i], self._watchdog, ends) for i, member in enumerate(members)]
            for one in self.every[1:]:
                one.session.schedule.evaluations.share(self.every[0].session.schedule.evaluations)
            print(*introduction(self.every, fit), sep="\n")
            writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoints")  # of all: many would hold one another up
            stack.callback(writer.shutdown)
            for one in self.every:
                one.start(stack, writer)
            with files.report_unwritable(directory):
                transcript.open(directory / "log.txt")
            outs = (transcript.screen, transcript.file)
            self._shown = [progress.open_progress(cfg.stop, out) for out in outs]
            for display in self._shown:
                stack.callback(display.close)
            transcript.listen()
            self._started, self._rows, self._steps = time.monotonic(), -1, 0
            self.close = stack.pop_all().close

    @property
    def ended(self) -> dict[str, str]:
        """Ends of members, by name: `complete`, a criterion, `not finite: PATH`, `interrupted`, or as `stop` said."""
        return {one.member.name: one.ended for one in self.every if one.ended is not None}

    def stop(self, why: Mapping[str, str]) -> None:
        """Ends members that have paused, whose names say why; the others go on in a smaller program."""
        for one in self.every:
            if one.ended is None and one.member.name in why:
                one.ended, one.ended_at = why[one.member.name], one.session.iteration
        left = [one.number for one in self.every if one.ended is None]
        if left:
            self._population.keep_alone(left)

    def take_over(self, sources: Mapping[str, str], members: Sequence[Member]) -> None:
        """Lets members that have paused go on from others, as `trainer.Trainer.take_over`; `members`: all, as now."""
        of = {one.member.name: one for one in self.every}
        own = {member.name: member for member in members}
        for name, source in sources.items():
            taker = of[name]
            self._population.copy(of[source].number, taker.number, build_population.numbers(own[name].config))
            taker.take_over(of[source], own[name])

    def until(self, pause: float = math.inf) -> None:
        """Advances all members, call by call, until each has ended or has come to so many environment steps."""
        for one in self.every:
            one.paused = one.ended is None and one.session.counted() >= pause
        # those of a later checkpoint wait for the others, so that all make the calls of a run that was not interrupted
        waiting = {one.number: one.session.iteration for one in self.every if one.ended is None}
        least = min(waiting.values(), default=0)
        held = {n: self._population.of(n) for n, iteration in waiting.items() if iteration > least}
        self._drive(pause, least, held)
        for one in self.every:
            one.check(whole=True)
        for number, state in held.items():
            self._population.put(number, state)

    def _drive(self, pause: float, iteration: int, held: dict[int, Any]) -> None:
        self._watchdog.beat("compilation and the first steps", grace=_COMPILATION, hint=interruption.IN_A_PROGRAM)
        while live := [one for one in self.every if one.ended is None and not one.paused]:
            calls: dict[int, tuple[int, int]] = {}
            for one in live:
                if one.session.iteration > iteration:
                    continue
                if one.number in held:
                    self._population.put(one.number, held.pop(one.number))
                count = one.session.ahead()
                if count is None:
                    one.finish(None)
                else:
                    calls[one.number] = one.session.iteration, count
            if calls:
                made = self._population.advance(calls)
                self._watchdog.beat("result rows and evaluation", grace=60.0)
                for one in live:
                    if one.number in made:
                        one.after(made[one.number], pause)
                # the calls of those behind would take them further
                behind = any(one.ended is None and not one.paused for one in self.every)
                held |= {one.number: self._population.of(one.number) for one in live if one.paused and behind}
                for one in self.every:
                    one.check()
                self._show()
                self._watchdog.beat("environment steps and update", hint=interruption.IN_A_PROGRAM)
            iteration = min((one.session.iteration for one in live if one.ended is None), default=iteration)
            if not held:
                self._narrow(iteration)
            if self._interrupted:
                for one in live:
                    if one.ended is None and one.number in calls and not one.paused:
                        one.finish(None, interrupted=True)
                for one in self.every:
                    one.ended = one.ended or "interrupted"

    def _narrow(self, iteration: int) -> None:
        """Goes on in a smaller program where few have been left for long.

        When it does is told by iterations alone: members that come back from their checkpoints are as many to a program
        as they were, whose number may be in the last bit of what is computed.
        """
        while any(one.ended is None for one in self.every):
            ends = sorted(self.every[number].ended_at for number in self._population.members)
            few = len(ends) // _FEW
            until = _PATIENCE * ends[len(ends) - few - 1]
            if not few or iteration < until:
                return
            self._population.keep_alone([n for n in self._population.members if self.every[n].ended_at > until])

    def _show(self) -> None:
        """Shows the mean of the members' latest rows, where each has one."""
        going_on = [one for one in self.every if one.ended is None]
        of = [one.session.reporter for one in going_on or self.every if one.began]
        if self._rows == (rows := sum(each.count for each in of)) or any(each.row is None for each in of):
            return
        self._rows = rows
        numbers = [row for each in of if (row := each.row)]
        first = numbers[0]
        of_all = {
            name: float(np.nanmean([row[name] for row in numbers]))
            for name, value in first.items()
            if isinstance(value, int | float) and not all(np.isnan(row.get(name, np.nan)) for row in numbers)
        }
        # members that have ended stand still: the least of those left may be less than what was shown before
        self._steps = max(self._steps, min(row["env_steps"] for row in numbers))
        of_all["env_steps"] = self._steps
        of_all["time_s"] = time.monotonic() - self._started
        for display in self._shown:
            display.update({**first, **of_all})


def introduction(every: Sequence[Running], fit: int | None) -> list[str]:
    """Describes a population whose program holds `fit` members at most (None: unknown), in lines of text."""
    first = every[0].session
    keys = sorted({key for one in every for key in one.member.changed})
    lines = list(run_directory.introduction(first))
    resumed = sum(one.saved is not None for one in every)
    lines.append(f"{counted(len(every), 'member')}, each with its {', '.join(keys)}, in one program: vmap over members")
    if fit is not None:
        lines[-1] += f"; {fit:,} would fit the memory"
    if not resumed:
        return lines
    notes = dict.fromkeys(note for one in every for note in one.notes)
    return [*lines, f"resume: {resumed} of them from their checkpoints", *(f"resume: {note}" for note in notes)]
