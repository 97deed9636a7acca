"""Training of a population's members: one program where possible, otherwise one process each."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.config import RunConfig
from jrl.errors import InputError, counted, format_names
from jrl.host import files, interruption, machine, output
from jrl.sweep.member_processes import train_processes
from jrl.sweep.members import MemberSpec, Record, copy_checkpoint

Group = tuple[Sequence[MemberSpec], str]  # members, and why they cannot be one program; "": they can


@dataclasses.dataclass
class Trainer:
    """Trains members to their ends or to a pause. The caller closes it."""

    record: Record  # members and decisions of the population
    transcript: output.Transcript  # transcript of the printed output
    interrupted: interruption.Signals
    processes: int | None = None  # number of processes at once; None: one program, if possible
    max_members: int | None = None  # members in one program at once; None: as many as the memory holds
    later_configs: Sequence[RunConfig] = ()  # configs that members may get later
    program: Any = None  # OneProgram of paused members; None: no such members
    process_members: set[str] = dataclasses.field(default_factory=set)  # names of members that cannot be one program
    is_announced: bool = False  # the plan was printed

    def train_until(self, members: Sequence[MemberSpec], pause: float = math.inf) -> dict[str, str]:
        """Trains members to `pause` environment steps, program by program.

        With several programs, the members of each are read from their checkpoints at its turn.

        Returns:
          End reason of each member that ended, by name, as `OneProgram.train_until` and `train_processes` return it.
        """
        from jrl.run import build_population
        from jrl.sweep.one_program import DoNotFit, OneProgram

        ended, groups = dict[str, str](), self._build_groups(members)
        take_turns = len(groups) > 1
        while groups and not self.interrupted:
            group = groups.pop(0)
            names = [member.name for member in group]
            if take_turns or not self._holds(group):
                self.close()
            try:
                if self.program is None:
                    shared = self.record, self.transcript, self.interrupted, self.later_configs
                    self.program = OneProgram(group, *shared)
                ended |= self.program.train_until(pause)
            except build_population.NotOneProgram as e:
                print(f"{format_members(names)}: not vmapped: {e}")
                self.process_members.update(names)
            except DoNotFit as e:
                print(f"{len(group)} members take more memory than is free: {e.max_members} at once")
                self.max_members, take_turns = e.max_members, True
                groups = [*self._split(group), *groups]
            except BaseException:
                self.close()
                raise
        if self.interrupted:
            return {**dict.fromkeys((member.name for member in members), "interrupted"), **ended}
        if rest := [member for member in members if member.name in self.process_members]:
            with files.report_unwritable(self.record.directory):
                self.transcript.open(self.record.directory / "log.txt")
            count = self.processes or max(1, machine.usable_cpus() // 2)
            ended |= train_processes(rest, self.record, count, self.interrupted, pause)
        return ended

    def _holds(self, members: Sequence[MemberSpec]) -> bool:
        return self.program is not None and {member.name for member in members} <= self.program.runs.keys()

    def _split(self, group: Sequence[MemberSpec]) -> list[Sequence[MemberSpec]]:
        size = self.max_members or len(group)
        return [group[i : i + size] for i in range(0, len(group), size)]

    def _build_groups(self, members: Sequence[MemberSpec]) -> list[Sequence[MemberSpec]]:
        """Returns groups of members that may be one program; notes the other members, and prints the plan once."""
        from jrl.run import build_population

        left = [member for member in members if member.name not in self.process_members]
        if not left or self._holds(left):
            return [left] if left else []
        if self.processes is None:
            indices = build_population.grouped([member.config for member in left])
            groups: list[Group] = [([left[i] for i in group], why) for group, why in indices]
        else:
            groups = [(left, "--processes gives each member its own process")]
        if not self.is_announced:
            print(*format_plan(groups, self.max_members), sep="\n", flush=True)
            self.is_announced = True
        self.process_members.update(member.name for group, why in groups if why for member in group)
        return [part for group, why in groups if not why for part in self._split(group)]

    def stop(self, reasons: Mapping[str, str]) -> None:
        """Ends paused members. `reasons`: end reason by name."""
        if self.program:
            self.program.stop(reasons)

    def copy_members(
        self, sources: Mapping[str, str], before: Sequence[MemberSpec], after: Sequence[MemberSpec]
    ) -> None:
        """Continues paused members from the states of other members. A resumed sweep may repeat the call.

        Args:
          sources: member -> member whose state it takes.
          before: all members before the copy.
          after: all members after the copy, with their next values.
        """
        old, new = ({member.name: member for member in members} for members in (before, after))
        for name, source in sources.items():
            copy_checkpoint(old[source], new[name])
        if self.program:
            self.program.copy_members(sources, after)

    def close(self) -> None:
        """Closes the program of paused members, and its environments."""
        program, self.program = self.program, None
        if program:
            program.close()


def check_pbt(members: Sequence[MemberSpec]) -> None:
    """Raises InputError if members cannot take over each other's checkpoints."""
    from jrl.run import build_population

    if len(build_population.grouped([member.config for member in members])) > 1:
        raise InputError("--scheduler pbt: expected spaces of floats of the algorithm only: leave out the others")


# ---------------------------------------------------------------- printed plan


def format_plan(groups: Sequence[Group], max_members: int | None = None) -> list[str]:
    """Returns the lines of a plan: a line for each key that differs between members, and the number of programs.

    Args:
      groups: groups of members.
      max_members: limit of members in one program; None: as many as the memory holds.
    """
    from jrl.run import build_population

    values: dict[str, set[str]] = {}
    for member in (member for group, _ in groups for member in group):
        for key, value in member.values.items():
            values.setdefault(key, set()).add(repr(value))
    programs = [group for group, why in groups if not why]
    in_processes = [(group, why) for group, why in groups if why]
    vmapped = {name for group in programs for name in build_population.vmapped(group[0].config)}
    reasons = "; ".join(dict.fromkeys(why for _, why in in_processes))
    lines = [f"plan: {counted(sum(len(group) for group, _ in groups), 'member')}"]
    for key in sorted(key for key, own in values.items() if len(own) > 1):
        is_vmapped = any(name == key or name.startswith(f"{key}.") for name in vmapped)
        how = "vmapped" if is_vmapped else f"a program for each of its {len(values[key])} values"
        how = how if programs else f"not vmapped: {reasons}"
        lines.append(f"  {key}: {how}")
    if programs:
        lines += [f"  {format_members([m.name for m in group])}: not vmapped: {why}" for group, why in in_processes]
    count = sum(-(-len(group) // (max_members or len(group))) for group in programs)
    if count > 1:
        largest = max(min(len(group), max_members or len(group)) for group in programs)
        lines.append(f"  {count} programs, one after the other, of at most {counted(largest, 'member')}")
    return lines


def format_members(names: Sequence[str]) -> str:
    """Returns `members 00, 01 and 4 more`."""
    return f"member{'s' if len(names) > 1 else ''} {format_names(names)}"
