"""Trains a population from its beginning, or on from where it was, and tells how it ended."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.config import RunConfig, Sizes, checks
from jrl.errors import InputError, counted
from jrl.host import files, interruption, output
from jrl.metrics import loggers, progress
from jrl.sweep import ends, schedule, search
from jrl.sweep import members as populations
from jrl.sweep.members import Ends, Member, Record
from jrl.sweep.settings import Plan, stored
from jrl.sweep.space import with_seeds
from jrl.sweep.trainer import Trainer, refused_pbt


def train(
    cfg: RunConfig,
    directory: Path,
    record: Record | None,
    transcript: output.Transcript,
    *,
    processes: int | None = None,
) -> int:
    """Trains the members of a population; `sweep.csv` and `best/` of its directory say how they ended.

    Args:
      cfg: what members have in common.
      directory: of the population.
      record: of a population that begins; None: one that was begun before goes on.
      transcript: of what is printed.
      processes: so many members at once in processes of their own; None: one program, where that can be.
    Returns:
      The exit status: 0; 1 where a member failed; 129, 130 or 143 after a signal.
    Raises:
      InputError: what cannot be run, or an objective that no row has.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(files.lock_directory(directory))
        begins, record = record is not None, record or populations.read(directory)
        sweep = Sweep(cfg, directory, record)
        if begins:
            populations.begin(cfg, directory, sweep.record)
        interrupted = stack.enter_context(interruption.watch_signals("saving all members after this call"))
        stack.enter_context(interruption.enable_stack_dumps())
        trainer = Trainer(
            directory, transcript, interrupted, Ends(lambda member: sweep.record.why_ended(member), sweep.note_end),
            processes=processes, most=sweep.plan.settings.max_members if sweep.plan else None, also=sweep.also(),
        )  # fmt: skip
        stack.callback(trainer.close)
        ended = sweep.trained(trainer, interrupted)
        status = ends.tell(directory, sweep.members, ended, sweep.objective, interrupted)
        if not interrupted:
            sweep.check_objective(sweep.members)
        return status


class Sweep:
    """A population that is trained: rounds of members, which pause where a scheduler compares them.

    Attributes:
      record: what is kept of it.
      members: as they are now.
      plan: of a sweep; None: the members are given.
      objective: key of result rows; None: as the rows tell.
    Raises:
      InputError: what cannot be run.
    """

    def __init__(self, cfg: RunConfig, directory: Path, record: Record):
        self._cfg, self._directory = cfg, directory
        self.plan: Plan | None = stored(record.sweep) if record.sweep else None
        self._scheduler = self.plan.scheduler if self.plan else None
        self.objective = self.plan.objective(cfg) if self.plan else None
        self._rounds = search.rounds(self.plan) if self.plan else [len(record.changes)]
        self.record = record
        if not record.changes:
            self._propose()
        # of all settings that can be wrong, before anything is made
        self._pauses = [self.plan.pauses(cfg, count) if self.plan else [] for count in self._rounds]
        self.members = self._made()
        if isinstance(self._scheduler, schedule.Pbt):
            refused_pbt(self.members)

    def _made(self) -> list[Member]:
        changes = [dict(changed) for changed in self.record.changes]
        if not isinstance(self._scheduler, schedule.Pbt):
            return populations.of(self._cfg, self._directory, changes)
        sources, copies = list(range(len(changes))), [0] * len(changes)
        for copy in (copy for decision in self.record.decisions for copy in decision["copies"]):
            i = int(copy["member"])
            changes[i], sources[i], copies[i] = copy["changed"], int(copy["source"]), copies[i] + 1
        found = populations.of(self._cfg, self._directory, changes)
        values = ({f"pbt/{key}": value for key, value in one.items() if key != "run.seed"} for one in changes)
        told = [{"pbt/source": i, "pbt/copies": n, **own} for i, n, own in zip(sources, copies, values)]
        return [member._replace(told=own) for member, own in zip(found, told)]

    def also(self) -> list[RunConfig]:
        """Configs such as members may come to have beside those that they have."""
        if not isinstance(self._scheduler, schedule.Pbt) or self.plan is None:
            return []
        corners = [{key: space.at(share) for key, space in self.plan.spaces.items()} for share in (0.0, 1 - 1e-9)]
        return [member.config for member in populations.of(self._cfg, self._directory, corners)]

    def _propose(self) -> None:
        assert self.plan is not None
        settings, number, seed = self.plan.settings, len(self.record.rounds), self._cfg.run.seed
        scores = self._scores([*self.members]) if number else {}
        tried: dict[str, tuple[dict[str, Any], list[float]]] = {}
        for member in self.members if number else ():
            point = {key: value for key, value in member.changed.items() if key != "run.seed"}
            tried.setdefault(schedule.point_of(point), (point, []))[1].append(scores[member.name])
        points = search.points(
            self.plan, self._rounds[number], seed=seed, number=number,
            tried=[(point, sum(values) / len(values)) for point, values in tried.values()],
        )  # fmt: skip
        changes = with_seeds(points, [seed + i for i in range(settings.seeds)])
        if isinstance(self._scheduler, schedule.Pbt):  # of one seed, copies of one member would draw alike for ever
            changes = [{**changed, "run.seed": seed + i} for i, changed in enumerate(changes)]
        self.record = self.record._replace(
            changes=[*self.record.changes, *changes], rounds=[*self.record.rounds, len(changes)]
        )

    def _scores(self, members: Sequence[Member]) -> dict[str, float]:
        """Returns the objective of members as their rows tell it; NaN where none has, and of those that failed."""
        assert self.objective is not None
        self.check_objective(members)
        found = {}
        for member in members:
            rows = loggers.read_rows(member.directory / "result.jsonl")
            values = [row[self.objective] for row in rows if ends.is_number(row.get(self.objective))]
            failed = (self.record.why_ended(member) or "").startswith(ends.FAILED)
            found[member.name] = float(values[-1]) if values and not failed else math.nan
        return found

    def check_objective(self, members: Sequence[Member]) -> None:
        """Raises InputError: members have rows, and none of them has the objective that was asked for."""
        asked = self.plan.settings.objective if self.plan else None
        if asked is None:
            return
        of = (loggers.read_rows(member.directory / "result.jsonl") for member in members)
        names = dict.fromkeys(name for rows in of for row in rows for name in row)
        if names and (fault := checks.missing_metric("--objective", asked, [*names])):
            raise InputError(f"{fault} (members stay as they are: begin anew in another --out)")

    # ------------------------------------------------------------ training

    def trained(self, trainer: Trainer, interrupted: interruption.Signals) -> dict[str, str]:
        """Trains all rounds to their ends, or goes on with them; why each member ended, by name."""
        ended: dict[str, str] = {}
        for number in range(len(self._rounds)):
            if number == len(self.record.rounds):
                self._propose()
                self.members = self._made()
                self.record.write(self._directory)
            first = sum(self.record.rounds[:number])
            places = range(first, first + self.record.rounds[number])
            if number + 1 == len(self.record.rounds):
                ended |= self._round(trainer, interrupted, number, places)
            else:  # it was over when the next began
                ended |= {self.members[i].name: self.record.why_ended(self.members[i]) or "complete" for i in places}
            if interrupted:
                return {**dict.fromkeys((member.name for member in self.members), "interrupted"), **ended}
            trainer.close()
        return {**ended, **self._stopped()}

    def _stopped(self) -> dict[str, str]:
        return {
            name: f"{ends.STOPPED} {decision['at']}"
            for decision in self.record.decisions
            for name in decision.get("stopped", ())
        }

    def _round(self, trainer: Trainer, interrupted: interruption.Signals, number: int, places: range) -> dict[str, str]:
        members = [self.members[i] for i in places]
        made = [decision for decision in self.record.decisions if decision["round"] == number]
        if made and not made[-1].get("applied", True):
            self._apply(trainer, made[-1])
        # at a rung the program becomes one of those who go on, without who had ended before
        last = made[-1]["at"] if made and isinstance(self._scheduler, schedule.Asha) else 0
        before = [member for member in members if self.record.ended.get(member.name, {}).get("at", math.inf) <= last]
        ended = {member.name: why for member in before if (why := self.record.why_ended(member))}
        for pause in [*self._pauses[number][len(made) :], math.inf]:
            gone = {**self._stopped(), **ended}
            left = [self.members[i] for i in places if self.members[i].name not in gone]
            whys = {member.name: self.record.why_ended(member) for member in left}
            if all(whys.values()):
                return ended | {name: why or "" for name, why in whys.items()}
            ended |= trainer.until(left, pause)
            if interrupted:
                break
            paused = [member for member in left if member.name not in ended]
            if pause < math.inf and paused:
                now = [self.members[i] for i in places]
                failed = [member for member in now if ended.get(member.name, "").startswith(ends.FAILED)]
                self._decide(trainer, paused, failed, self._counted(places), number, int(pause))
        return ended

    def note_end(self, member: Member, why: str, at: int) -> None:
        """Keeps that a member ended by a criterion of its own or by a fault; of its budget its checkpoint tells."""
        if why.startswith(ends.FAILED) or at < member.config.stop.get(Sizes(member.config).counts_by, math.inf):
            end = {"why": why, "at": at, "stop": dict(member.config.stop)}
            self.record = self.record._replace(ended={**self.record.ended, member.name: end})
            self.record.write(self._directory)

    def _counted(self, places: range) -> list[Member]:
        """Members of a round that met a criterion and count at its rungs: of points that nobody has stopped."""
        if not isinstance(self._scheduler, schedule.Asha):  # nobody can go on from where they are
            return []
        stopped = self._stopped()
        gone = {schedule.point_of(member.changed) for member in self.members if member.name in stopped}
        members = [self.members[i] for i in places]
        over = {name for name, end in self.record.ended.items() if not end["why"].startswith(ends.FAILED)}
        return [m for m in members if m.name in over and schedule.point_of(m.changed) not in gone]

    def _decide(
        self, trainer: Trainer, paused: Sequence[Member], failed: Sequence[Member], over: Sequence[Member],
        number: int, at: int,
    ) -> None:  # fmt: skip
        """Compares members that have paused, and those whose runs are over. A decision is kept before it is applied."""
        assert self.plan is not None and self._scheduler is not None
        compared = sorted([*paused, *over], key=lambda member: member.name)
        of_failed = {schedule.point_of(member.changed) for member in failed}  # a point that failed has no score
        scores = {
            member.name: math.nan if schedule.point_of(member.changed) in of_failed else score
            for member, score in zip(compared, self._scores(compared).values(), strict=True)
        }
        changed = {member.name: member.changed for member in compared}
        finite = {name: score if math.isfinite(score) else None for name, score in scores.items()}
        decision: dict[str, Any] = {"round": number, "at": at, "scores": finite}
        if isinstance(self._scheduler, schedule.Asha):
            stopped = self._scheduler.decided(changed, scores)["stopped"]
            decision["stopped"] = [name for name in stopped if name not in {member.name for member in over}]
        else:
            seed = [self._cfg.run.seed, number, at]
            decision |= {**self._scheduler.decided(changed, scores, self.plan.spaces, seed), "applied": False}
        self._keep([*self.record.decisions, decision])
        self._apply(trainer, decision)

    def _few_episodes(self, decision: Mapping[str, Any]) -> str:
        """Returns a warning where scores that a scheduler compared are means over a few episodes, which is luck."""
        assert self.objective is not None
        window, few = self._cfg.run.smoothing_episodes, []
        for member in self.members:
            if decision["scores"].get(member.name) is None or member.name in self.record.ended:
                continue
            rows = loggers.read_rows(member.directory / "result.jsonl")
            having = [row for row in rows if ends.is_number(row.get(self.objective))]
            if having and not progress.is_reliable(self.objective, having[-1], window):
                few.append(int(progress.window_size(self.objective, having[-1])))
        if not few:
            return ""
        setting = "first" if isinstance(self._scheduler, schedule.Asha) else "interval"
        steps = self._pauses[decision["round"]][0] * window // max(1, min(few))
        return (
            f"warning: {len(few)} of {len(decision['scores'])} scores are means over as few as "
            f"{counted(min(few), 'episode')}, run.smoothing_episodes is {window}: to compare later, raise {setting} of "
            f"--scheduler to about {steps:,} steps"
        )

    def _keep(self, decisions: list[dict[str, Any]]) -> None:
        self.record = self.record._replace(decisions=decisions)
        self.record.write(self._directory)

    def _apply(self, trainer: Trainer, decision: dict[str, Any]) -> None:
        print(_told(decision), flush=True)
        if few := self._few_episodes(decision):
            print(few, flush=True)
        if "stopped" in decision:
            trainer.stop({name: self._stopped()[name] for name in decision["stopped"]})
            return
        before, self.members = self.members, self._made()
        sources = {copy["member"]: copy["source"] for copy in decision["copies"]}
        trainer.take_over(sources, before, self.members)
        self._keep([*self.record.decisions[:-1], {**decision, "applied": True}])


def _told(decision: Mapping[str, Any]) -> str:
    """Returns a decision in a line of text."""
    scores = [score for score in decision["scores"].values() if score is not None]
    best = f", the best of them at {max(scores):.4g}" if scores else ""
    at = f"{decision['at']:,} steps: {counted(len(decision['scores']), 'member')}{best}"
    if "stopped" in decision:
        left = len(decision["scores"]) - len(decision["stopped"])
        return f"{at}; {left} go on, {len(decision['stopped'])} are stopped"
    copies = ", ".join(f"{copy['member']} from {copy['source']}" for copy in decision["copies"])
    return f"{at}; {copies or 'nobody is replaced'}"
