"""Training of members of a population: those that can be one program together, the others in processes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.errors import InputError
from jrl.host import faults, files, output, room
from jrl.settings.config import RunConfig
from jrl.sweep import members as populations
from jrl.sweep import processes as apart
from jrl.sweep import told
from jrl.sweep.members import Ends, Member


class Trainer:
    """Trains members to their ends, or to where they pause. `close` it.

    Args:
      directory: of the population.
      transcript: of what is printed.
      interrupted: by a signal.
      ends: who keeps which members ended.
      processes: so many members at once in processes of their own; None: one program, where that can be.
      most: members that are one program at once; None: as many as the memory holds.
      also: configs such as members may come to have.
    """

    def __init__(
        self,
        directory: Path,
        transcript: output.Transcript,
        interrupted: faults.Signals,
        ends: Ends,
        *,
        processes: int | None = None,
        most: int | None = None,
        also: Sequence[RunConfig] = (),
    ):
        self._directory, self._transcript, self._interrupted = directory, transcript, interrupted
        self._ends = ends
        self._processes, self._most, self._also = processes, most, also
        self._open: Any = None  # Together: members whose program waits for them
        self._apart: set[str] = set()  # members that cannot be one program
        self._told = False

    def until(self, members: Sequence[Member], pause: float = math.inf) -> dict[str, str]:
        """Trains members to so many environment steps.

        Returns:
          Why each ended that did, by name, as `Together.ended` and `processes.train` say it.
        """
        groups = self._groups(members)
        ended = self._together(groups[0], pause) if len(groups) == 1 else self._in_turn(groups, pause)
        if self._interrupted:
            return {**dict.fromkeys((member.name for member in members), "interrupted"), **ended}
        if alone := [member for member in members if member.name in self._apart]:
            with files.opening(self._directory):
                self._transcript.open(self._directory / "log.txt")
            count = self._processes or max(1, room.usable_cpus() // 2)
            ended |= apart.train(alone, self._directory, count, self._interrupted, self._ends, pause)
        return ended

    def _in_turn(self, groups: Sequence[Sequence[Member]], pause: float) -> dict[str, str]:
        """Trains members of several programs, which come back from their checkpoints when it is their turn again."""
        ended: dict[str, str] = {}
        for group in groups:
            self.close()
            ended |= self._together(group, pause)
            if self._interrupted:
                break
        return ended

    def _chunks(self, group: Sequence[Member]) -> list[Sequence[Member]]:
        most = self._most or len(group)
        return [group[i : i + most] for i in range(0, len(group), most)]

    def _groups(self, members: Sequence[Member]) -> list[Sequence[Member]]:
        """Groups members that may be one program, notes those that may not, and prints the plan once."""
        from jrl.run import build_population

        left = [member for member in members if member.name not in self._apart]
        if not left or (self._open and {member.name for member in left} <= set(self._open.names)):
            return [left] if left else []
        if self._processes is None:
            dealt = build_population.grouped([member.config for member in left])
            groups: list[told.Group] = [([left[i] for i in numbers], why) for numbers, why in dealt]
        else:
            groups = [(left, "--processes asks for processes of their own")]
        if not self._told:
            print(*told.plan(groups, self._most), sep="\n", flush=True)
            self._told = True
        self._apart.update(member.name for group, why in groups if why for member in group)
        return [chunk for group, why in groups if not why for chunk in self._chunks(group)]

    def _together(self, group: Sequence[Member], pause: float) -> dict[str, str]:
        """Trains members in one program, if they are one after all; in several, in turn, if they do not fit."""
        from jrl.run import build_population
        from jrl.sweep.together import DoNotFit, Together

        if self._open is None or not {member.name for member in group} <= set(self._open.names):
            self.close()
            args = group, self._directory, self._transcript, self._interrupted, self._ends, self._also
            try:
                self._open = Together(*args)
            except build_population.NotOneProgram as e:
                print(f"{told.named([member.name for member in group])}: not vmapped: {e}")
                self._apart.update(member.name for member in group)
                return {}
            except DoNotFit as e:
                print(f"{len(group)} members take more memory than is free: {e.most} at once")
                self._most = e.most
                return self._in_turn(self._chunks(group), pause)
        try:
            self._open.until(pause)
        except BaseException:
            self.close()
            raise
        return dict(self._open.ended)

    def stop(self, why: Mapping[str, str]) -> None:
        """Ends members that have paused."""
        if self._open:
            self._open.stop(why)

    def take_over(self, sources: Mapping[str, str], before: Sequence[Member], members: Sequence[Member]) -> None:
        """Lets members that have paused go on from where others are. May be done again, of a sweep that was killed.

        Args:
          sources: member -> whom it goes on from.
          before: all members as they were.
          members: as they are from now on.
        """
        was, now = ({member.name: member for member in each} for each in (before, members))
        for name, source in sources.items():
            populations.copied(was[source], now[name])
        if self._open:
            self._open.take_over(sources, members)

    def close(self) -> None:
        """Ends the program that waits, and its environments."""
        open_, self._open = self._open, None
        if open_:
            open_.__exit__(None, None, None)


def refused_pbt(members: Sequence[Member]) -> None:
    """Raises InputError: members could not go on from one another's checkpoints."""
    from jrl.run import build_population

    if len(build_population.grouped([member.config for member in members])) > 1:
        raise InputError("--scheduler pbt: members differ in more than seeds and floats of the algorithm")
