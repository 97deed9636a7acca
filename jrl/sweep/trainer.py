"""Training of members of a population: those that can be one program together, the others in processes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.config import RunConfig
from jrl.errors import InputError
from jrl.host import files, interruption, machine, output
from jrl.sweep import members as populations
from jrl.sweep import processes as apart
from jrl.sweep import told
from jrl.sweep.members import Ends, Member


@dataclasses.dataclass
class Trainer:
    """Trains members to their ends, or to where they pause. `close` it."""

    directory: Path  # of the population
    transcript: output.Transcript  # of what is printed
    interrupted: interruption.Signals
    ends: Ends  # who keeps which members ended
    processes: int | None = None  # so many members at once in processes of their own; None: one program, if possible
    most: int | None = None  # members that are one program at once; None: as many as the memory holds
    also: Sequence[RunConfig] = ()  # configs such as members may come to have
    running: Any = None  # OneProgram: members whose program waits for them
    apart: set[str] = dataclasses.field(default_factory=set)  # members that cannot be one program
    is_announced: bool = False  # the plan was printed

    def until(self, members: Sequence[Member], pause: float = math.inf) -> dict[str, str]:
        """Trains members to so many environment steps, one program after the other; where there are several, members
        come back from their checkpoints when it is their turn again.

        Returns:
          Why each ended that did, by name, as `OneProgram.until` and `processes.train` say it.
        """
        from jrl.run import build_population
        from jrl.sweep.one_program import DoNotFit, OneProgram

        ended, groups = dict[str, str](), self._groups(members)
        in_turn = len(groups) > 1
        while groups and not self.interrupted:
            group = groups.pop(0)
            names = [member.name for member in group]
            if in_turn or not self._is_running(group):
                self.close()
            try:
                if self.running is None:
                    shared = self.directory, self.transcript, self.interrupted, self.ends, self.also
                    self.running = OneProgram(group, *shared)
                ended |= self.running.until(pause)
            except build_population.NotOneProgram as e:
                print(f"{told.named(names)}: not vmapped: {e}")
                self.apart.update(names)
            except DoNotFit as e:
                print(f"{len(group)} members take more memory than is free: {e.most} at once")
                self.most, in_turn = e.most, True
                groups = [*self._chunks(group), *groups]
            except BaseException:
                self.close()
                raise
        if self.interrupted:
            return {**dict.fromkeys((member.name for member in members), "interrupted"), **ended}
        if alone := [member for member in members if member.name in self.apart]:
            with files.report_unwritable(self.directory):
                self.transcript.open(self.directory / "log.txt")
            count = self.processes or max(1, machine.usable_cpus() // 2)
            ended |= apart.train(alone, self.directory, count, self.interrupted, self.ends, pause)
        return ended

    def _is_running(self, members: Sequence[Member]) -> bool:
        return self.running is not None and {member.name for member in members} <= self.running.runs.keys()

    def _chunks(self, group: Sequence[Member]) -> list[Sequence[Member]]:
        most = self.most or len(group)
        return [group[i : i + most] for i in range(0, len(group), most)]

    def _groups(self, members: Sequence[Member]) -> list[Sequence[Member]]:
        """Groups members that may be one program, notes those that may not, and prints the plan once."""
        from jrl.run import build_population

        left = [member for member in members if member.name not in self.apart]
        if not left or self._is_running(left):
            return [left] if left else []
        if self.processes is None:
            dealt = build_population.grouped([member.config for member in left])
            groups: list[told.Group] = [([left[i] for i in numbers], why) for numbers, why in dealt]
        else:
            groups = [(left, "--processes asks for processes of their own")]
        if not self.is_announced:
            print(*told.plan(groups, self.most), sep="\n", flush=True)
            self.is_announced = True
        self.apart.update(member.name for group, why in groups if why for member in group)
        return [chunk for group, why in groups if not why for chunk in self._chunks(group)]

    def stop(self, why: Mapping[str, str]) -> None:
        """Ends members that have paused."""
        if self.running:
            self.running.stop(why)

    def take_over(self, sources: Mapping[str, str], before: Sequence[Member], members: Sequence[Member]) -> None:
        """Lets members that have paused go on from where others are. May be done again, of a sweep that was killed.

        Args:
          sources: member -> the member that it goes on from.
          before, members: all members as they were and as they are from now on.
        """
        was, now = ({member.name: member for member in each} for each in (before, members))
        for name, source in sources.items():
            populations.copied(was[source], now[name])
        if self.running:
            self.running.take_over(sources, members)

    def close(self) -> None:
        """Ends the program that waits, and its environments."""
        running, self.running = self.running, None
        if running:
            running.close()


def refused_pbt(members: Sequence[Member]) -> None:
    """Raises InputError: members could not go on from one another's checkpoints."""
    from jrl.run import build_population

    if len(build_population.grouped([member.config for member in members])) > 1:
        raise InputError("--scheduler pbt: members differ in more than seeds and floats of the algorithm")
