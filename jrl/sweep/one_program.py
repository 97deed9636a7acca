"""Members of a population whose program is one: each a run of its own, which a Runner drives with the others."""

import concurrent.futures
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl.config import RunConfig
from jrl.errors import InputError, counted
from jrl.host import interruption, output
from jrl.run import build, build_population, run_directory, runner
from jrl.run.session import Session
from jrl.run.store import checkpoint, resume
from jrl.sweep.members import Ends, Member, is_complete


class DoNotFit(InputError):
    """The members of a population take more memory together than there is; `most` fit at once, at least one."""

    def __init__(self, most: int):
        super().__init__(f"members take more memory than is free: {most} would fit")
        self.most = max(most, 1)


class MemberRun(runner.Member):
    """The run of a member.

    Attributes:
      member: as it is now.
      saved: the checkpoint from which it goes on.
      notes: lines of text on how it goes on.
    """

    def __init__(self, member: Member, parts: build.Run, watchdog: interruption.Watchdog, ends: Ends):
        self.member, self._ends = member, ends
        self.saved = checkpoint.locate(member.directory) if checkpoint.exists(member.directory) else None
        self._meta = checkpoint.read_meta(self.saved, resumable=True) if self.saved else None
        cfg, self.notes = member.config, list[str]()
        if self._meta:
            cfg, lines = resume.drop_met_criteria(self._meta, member.config, is_requested=False)
            self.notes = [] if cfg is member.config else lines
        session = Session(cfg, directory=member.directory, run=parts)
        super().__init__(session, member.directory, watchdog, lambda why, at: ends.note(self.member, why, at))

    def start(self, stack: contextlib.ExitStack, writer: concurrent.futures.ThreadPoolExecutor) -> None:
        """Begins, or goes on from the latest checkpoint; the files are open until `stack` ends."""
        meta = self._meta
        stack.enter_context(self.session)
        self.ended = self._ends.why(self.member) or ("complete" if is_complete(self.member) else None)
        if self.ended:
            self.ended_at = meta["iteration"] if meta else 0
            return
        self.open_checkpoints(stack, writer)
        self.session.start(self.saved, starts_over=meta is None)
        self.open(stack, self.session.reporter.row_steps if meta else 0, extra=self.member.told)

    def take_over(self, source: "MemberRun", member: Member) -> None:
        """Goes on from where another member is, with a config of its own, as if from a copy of its checkpoint."""
        self.member = member
        self.session.go_on_as(source.session, member.config)
        self.open_rows(self.session.reporter.row_steps, member.told)


class OneProgram:
    """Members whose runs are under way in one program. `close` it.

    Args:
      members: whose configs `build_population.grouped` finds alike.
      directory, transcript, interrupted, ends, also: as of `trainer.Trainer`.
    Attributes:
      runs: of the members, by name.
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
        if cfg.run.compile_cache:
            build.enable_compile_cache()
        with contextlib.ExitStack() as stack:
            self._population, parts = build_population.make([member.config for member in members], also)
            stack.callback(self._population.close)
            fit = self._population.fits() if len(members) > 1 else None
            if fit is not None and fit < len(members):
                raise DoNotFit(fit)
            watchdog = stack.enter_context(interruption.Watchdog(cfg.run.stall_seconds))
            runs = [MemberRun(member, own, watchdog, ends) for member, own in zip(members, parts, strict=True)]
            self.runs = {run.member.name: run for run in runs}
            for run in runs[1:]:
                run.session.schedule.evaluations.share_environments(runs[0].session.schedule.evaluations)
            print(*introduction(runs, fit), sep="\n")
            writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoints")  # of all: many would hold one another up
            stack.callback(writer.shutdown)
            for run in runs:
                run.start(stack, writer)
            show = MeanRow(runs, run_directory.displays(stack, directory, transcript, cfg.stop))
            self._runner = runner.Runner(runs, watchdog, interrupted, self._population, show)
            self.close = stack.pop_all().close

    def until(self, pause: float = math.inf) -> dict[str, str]:
        """Trains all members to their ends or to so many steps; returns why each ended that did, by name."""
        self._runner.run(pause)
        return {name: run.ended for name, run in self.runs.items() if run.ended is not None}

    def stop(self, why: Mapping[str, str]) -> None:
        """Ends members that have paused, whose names say why; the others go on in a smaller program."""
        for name, run in self.runs.items():
            if run.ended is None and name in why:
                run.ended, run.ended_at = why[name], run.session.iteration
        if left := [i for i, run in enumerate(self.runs.values()) if run.ended is None]:
            self._population.keep_alone(left)

    def take_over(self, sources: Mapping[str, str], members: Sequence[Member]) -> None:
        """Lets members that have paused go on from others, as `trainer.Trainer.take_over`; `members`: all, as now."""
        own, number = {member.name: member for member in members}, [*self.runs].index
        for name, source in sources.items():
            self._population.copy(number(source), number(name), build_population.numbers(own[name].config))
            self.runs[name].take_over(self.runs[source], own[name])


class MeanRow:
    """Shows the mean of the members' latest rows, where each has one. Called after each call of their program."""

    def __init__(self, runs: Sequence[runner.Member], displays: Sequence[Callable[[dict[str, Any]], object]]):
        self._runs, self._displays = runs, displays
        self._started, self._rows, self._steps = time.monotonic(), -1, 0

    def __call__(self) -> None:
        going_on = [run for run in self._runs if run.ended is None]
        of = [run.session.reporter for run in going_on or self._runs if run.checkpoints]  # what began in this process
        numbers = [each.row for each in of if each.row]
        if self._rows == (rows := sum(each.count for each in of)) or len(numbers) < len(of):
            return
        self._rows, first = rows, numbers[0]
        of_all = {
            name: float(np.nanmean([row[name] for row in numbers]))
            for name, value in first.items()
            if isinstance(value, int | float) and not all(np.isnan(row.get(name, np.nan)) for row in numbers)
        }
        # members that have ended stand still: the least of those left may be less than what was shown before
        self._steps = max(self._steps, min(row["env_steps"] for row in numbers))
        now = {"env_steps": self._steps, "time_s": time.monotonic() - self._started}
        for show in self._displays:
            show({**first, **of_all, **now})


def introduction(runs: Sequence[MemberRun], fit: int | None) -> list[str]:
    """Describes a population whose program holds `fit` members at most (None: unknown), in lines of text."""
    keys = sorted({key for run in runs for key in run.member.changed})
    lines = list(run_directory.introduction(runs[0].session))
    resumed = sum(run.saved is not None for run in runs)
    lines.append(f"{counted(len(runs), 'member')}, each with its {', '.join(keys)}, in one program: vmap over members")
    if fit is not None:
        lines[-1] += f"; {fit:,} would fit the memory"
    if not resumed:
        return lines
    notes = dict.fromkeys(note for run in runs for note in run.notes)
    return [*lines, f"resume: {resumed} of them from their checkpoints", *(f"resume: {note}" for note in notes)]
