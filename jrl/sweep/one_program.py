"""Members of a population that train as one program. Each member is a run with its own run directory."""

import concurrent.futures
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jrl.config import RunConfig
from jrl.errors import InputError, counted
from jrl.host import interruption, output
from jrl.run import build, build_population, run_directory, runner
from jrl.run.session import Session
from jrl.run.store import checkpoint, resume
from jrl.sweep.members import MemberSpec, Record, is_complete


class DoNotFit(InputError):
    """The members need more memory than is free. `max_members` fit at once, at least one."""

    def __init__(self, max_members: int):
        super().__init__(f"members take more memory than is free: {max_members} would fit")
        self.max_members = max(max_members, 1)


class MemberRun(runner.Member):
    """Run of a member.

    Attributes:
      member: the member with its latest values.
      saved: checkpoint from which the run resumes; None: the run starts.
      notes: lines of text about the resume.
    """

    def __init__(self, member: MemberSpec, parts: build.Run, watchdog: interruption.Watchdog, record: Record):
        self.member, self._record = member, record
        self.saved = checkpoint.locate(member.directory) if checkpoint.exists(member.directory) else None
        self._meta = checkpoint.read_meta(self.saved, resumable=True) if self.saved else None
        cfg, self.notes = member.config, list[str]()
        if self._meta:
            cfg, lines = resume.drop_met_criteria(self._meta, member.config, is_requested=False)
            self.notes = [] if cfg is member.config else lines
        session = Session(cfg, directory=member.directory, run=parts)
        super().__init__(session, member.directory, watchdog, lambda why, at: record.add_end(self.member, why, at))

    def start(self, stack: contextlib.ExitStack, writer: concurrent.futures.ThreadPoolExecutor) -> None:
        """Starts the run, or resumes it from the latest checkpoint. Its files are open until `stack` ends."""
        meta = self._meta
        stack.enter_context(self.session)
        self.ended = self._record.find_end_reason(self.member) or ("complete" if is_complete(self.member) else None)
        if self.ended:
            self.ended_at = meta["iteration"] if meta else 0
            return
        self.open_checkpoints(stack, writer)
        self.session.start(self.saved, starts_over=meta is None)
        self.open(stack, self.session.reporter.row_steps if meta else 0, extra=self.member.row_extras)

    def copy_from(self, source: "MemberRun", member: MemberSpec) -> None:
        """Continues from the state of another member with the config of `member`, as from a copied checkpoint."""
        self.member = member
        self.session.go_on_as(source.session, member.config)
        self.open_rows(self.session.reporter.row_steps, member.row_extras)


class OneProgram:
    """Runs of members in one program. The caller closes it.

    Args:
      members: members whose configs `build_population.grouped` puts into one group.
      record, transcript, interrupted, later_configs: see `trainer.Trainer`.
    Attributes:
      runs: run of each member by name.
    Raises:
      InputError: a config that cannot run.
      DoNotFit: the memory holds fewer members at once.
    """

    def __init__(
        self,
        members: Sequence[MemberSpec],
        record: Record,
        transcript: output.Transcript,
        interrupted: interruption.Signals,
        later_configs: Sequence[RunConfig] = (),
    ):
        cfg = members[0].config
        if cfg.run.compile_cache:
            build.enable_compile_cache()
        with contextlib.ExitStack() as stack:
            self._population, parts = build_population.make([member.config for member in members], later_configs)
            stack.callback(self._population.close)
            fit = self._population.fits() if len(members) > 1 else None
            if fit is not None and fit < len(members):
                raise DoNotFit(fit)
            watchdog = stack.enter_context(interruption.Watchdog(cfg.run.stall_seconds))
            runs = [MemberRun(member, own, watchdog, record) for member, own in zip(members, parts, strict=True)]
            self.runs = {run.member.name: run for run in runs}
            for run in runs[1:]:
                run.session.schedule.evaluations.share_environments(runs[0].session.schedule.evaluations)
            print(*_describe_population(runs, fit), sep="\n")
            writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoints")  # shared: many writers slow each other
            stack.callback(writer.shutdown)
            for run in runs:
                run.start(stack, writer)
            show = MeanRow(runs, run_directory.open_displays(stack, record.directory, transcript, cfg.stop))
            self._runner = runner.Runner(runs, watchdog, interrupted, self._population, show)
            self.close = stack.pop_all().close

    def train_until(self, pause: float = math.inf) -> dict[str, str]:
        """Trains all members to `pause` environment steps; returns the end reason of each ended member by name."""
        self._runner.run(pause)
        return {name: run.ended for name, run in self.runs.items() if run.ended is not None}

    def stop(self, reasons: Mapping[str, str]) -> None:
        """Ends the paused members in `reasons` (end reason by name); the others continue in a smaller program."""
        for name, run in self.runs.items():
            if run.ended is None and name in reasons:
                run.ended, run.ended_at = reasons[name], run.session.iteration
        if left := [i for i, run in enumerate(self.runs.values()) if run.ended is None]:
            self._population.keep_alone(left)

    def copy_members(self, sources: Mapping[str, str], members: Sequence[MemberSpec]) -> None:
        """Continues paused members from the states of other members, as `trainer.Trainer.copy_members`.

        `members`: all members after the copy.
        """
        by_name, find_index = {member.name: member for member in members}, [*self.runs].index
        for name, source in sources.items():
            numbers = build_population.numbers(by_name[name].config)
            self._population.copy(find_index(source), find_index(name), numbers)
            self.runs[name].copy_from(self.runs[source], by_name[name])


class MeanRow:
    """Shows the mean of the members' latest rows once each member has a row; called after each call of the program."""

    def __init__(self, runs: Sequence[runner.Member], displays: Sequence[Callable[[dict[str, Any]], object]]):
        self._runs, self._displays = runs, displays
        self._start_time, self._num_rows, self._steps = time.monotonic(), -1, 0

    def __call__(self) -> None:
        active = [run for run in self._runs if run.ended is None]
        # runs without checkpoints were complete before this process
        reporters = [run.session.reporter for run in active or self._runs if run.checkpoints]
        rows = [reporter.row for reporter in reporters if reporter.row]
        num_rows = sum(reporter.count for reporter in reporters)
        if self._num_rows == num_rows or len(rows) < len(reporters):
            return
        self._num_rows, first = num_rows, rows[0]
        means = {
            name: float(np.nanmean([row[name] for row in rows]))
            for name, value in first.items()
            if isinstance(value, int | float) and not all(np.isnan(row.get(name, np.nan)) for row in rows)
        }
        # ended members no longer count, so the minimum over the active members may fall: never show fewer steps
        self._steps = max(self._steps, min(row["env_steps"] for row in rows))
        progress = {"env_steps": self._steps, "time_s": time.monotonic() - self._start_time}
        for show in self._displays:
            show({**first, **means, **progress})


def _describe_population(runs: Sequence[MemberRun], fit: int | None) -> list[str]:
    keys = sorted({key for run in runs for key in run.member.values})
    lines = list(run_directory.describe(runs[0].session))
    resumed = sum(run.saved is not None for run in runs)
    lines.append(f"{counted(len(runs), 'member')}, each with its {', '.join(keys)}, in one program: vmap over members")
    if fit is not None:
        lines[-1] += f"; {fit:,} would fit the memory"
    if not resumed:
        return lines
    notes = dict.fromkeys(note for run in runs for note in run.notes)
    return [*lines, f"resume: {resumed} of them from their checkpoints", *(f"resume: {note}" for note in notes)]
