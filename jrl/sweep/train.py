"""Training of a population, from its start or resumed, with the decisions of its scheduler."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.config import RunConfig, checks
from jrl.errors import InputError, counted
from jrl.host import files, interruption, output
from jrl.metrics import loggers, progress
from jrl.sweep import members as populations
from jrl.sweep import schedule, search, summary
from jrl.sweep.members import FAILED, MemberSpec, Record
from jrl.sweep.settings import SweepPlan, read_stored_plan
from jrl.sweep.space import add_seeds
from jrl.sweep.trainer import Trainer, check_pbt


def train(
    cfg: RunConfig,
    directory: Path,
    record: Record | None,
    transcript: output.Transcript,
    *,
    processes: int | None = None,
) -> int:
    """Trains the members of a population, and writes `sweep.csv` and `best/` to its directory.

    Args:
      cfg: config that members share.
      directory: directory of the population.
      record: record of a new population; None: resume the population in `directory`.
      transcript: transcript of the printed output.
      processes: number of processes at once, one for each member; None: one program, if possible.
    Returns:
      The exit status: 0; 1 if a member failed; 129, 130 or 143 after a signal.
    Raises:
      InputError: a config that cannot run, or an objective that no row has.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(files.lock_directory(directory))
        is_new, record = record is not None, record or populations.read_record(directory)
        sweep = Sweep(cfg, record)
        if is_new:
            populations.create_directory(cfg, record)
        interrupted = stack.enter_context(interruption.watch_signals("saving all members after this call"))
        stack.enter_context(interruption.enable_stack_dumps())
        trainer = Trainer(
            record, transcript, interrupted, processes=processes,
            max_members=sweep.plan.settings.max_members if sweep.plan else None, later_configs=sweep.later_configs(),
        )  # fmt: skip
        stack.callback(trainer.close)
        ended = sweep.train_rounds(trainer, interrupted)
        status = summary.report_end(directory, sweep.members, ended, sweep.objective, interrupted)
        if not interrupted:
            sweep.check_objective(sweep.members)
        return status


class Sweep:
    """Population in training: rounds of members, which pause where a scheduler compares them.

    Attributes:
      record: content of population.json.
      members: members with their latest values.
      plan: plan of a sweep; None: a population with given members.
      objective: key of result rows; None: chosen from the rows.
    Raises:
      InputError: a config that cannot run.
    """

    def __init__(self, cfg: RunConfig, record: Record):
        if cfg.devices.platform == "auto":
            raise InputError(
                "devices.platform: expected cpu or null, since auto measures one run, got auto: train one run, and set "
                "devices=cpu if that is faster"
            )
        self._cfg, self.record = cfg, record
        self.plan: SweepPlan | None = read_stored_plan(record.sweep) if record.sweep else None
        self._scheduler = self.plan.scheduler if self.plan else None
        self.objective = self.plan.find_objective(cfg) if self.plan else None
        self._rounds = search.list_round_sizes(self.plan) if self.plan else [len(record.member_values)]
        if not record.member_values:
            self._add_round()
        # report invalid settings of every round before any directory exists
        self._pauses = [self.plan.list_pauses(cfg, count) if self.plan else [] for count in self._rounds]
        self.members = self._build_members()
        if isinstance(self._scheduler, schedule.Pbt):
            check_pbt(self.members)

    def _build_members(self) -> list[MemberSpec]:
        values = [dict(own) for own in self.record.member_values]
        if not isinstance(self._scheduler, schedule.Pbt):
            return populations.build_members(self._cfg, self.record.directory, values)
        sources, copies = list(range(len(values))), [0] * len(values)
        for copy in (copy for decision in self.record.decisions for copy in decision["copies"]):
            i = int(copy["member"])
            values[i], sources[i], copies[i] = copy["changed"], int(copy["source"]), copies[i] + 1
        members = populations.build_members(self._cfg, self.record.directory, values)
        columns = ({f"pbt/{key}": value for key, value in own.items() if key != "run.seed"} for own in values)
        return [
            member._replace(row_extras={"pbt/source": source, "pbt/copies": count, **own})
            for member, source, count, own in zip(members, sources, copies, columns, strict=True)
        ]

    def later_configs(self) -> list[RunConfig]:
        """Returns configs with the extreme values that a scheduler may give to members."""
        if not isinstance(self._scheduler, schedule.Pbt) or self.plan is None:
            return []
        corners = [{key: space.to_value(share) for key, space in self.plan.spaces.items()} for share in (0.0, 1 - 1e-9)]
        return [member.config for member in populations.build_members(self._cfg, self.record.directory, corners)]

    def _add_round(self) -> None:
        assert self.plan is not None
        settings, number, seed = self.plan.settings, len(self.record.rounds), self._cfg.run.seed
        scores = self._read_scores([*self.members]) if number else {}
        tried: dict[str, tuple[dict[str, Any], list[float]]] = {}
        for member in self.members if number else ():
            point = {key: value for key, value in member.values.items() if key != "run.seed"}
            tried.setdefault(schedule.format_point(point), (point, []))[1].append(scores[member.name])
        points = search.propose_points(
            self.plan, self._rounds[number], seed=seed, number=number,
            tried=[(point, sum(own) / len(own)) for point, own in tried.values()],
        )  # fmt: skip
        values = add_seeds(points, [seed + i for i in range(settings.seeds)])
        if isinstance(self._scheduler, schedule.Pbt):  # else copies of a member would draw the same numbers
            values = [{**own, "run.seed": seed + i} for i, own in enumerate(values)]
        self.record.member_values += values
        self.record.rounds.append(len(values))

    def _read_scores(self, members: Sequence[MemberSpec]) -> dict[str, float]:
        """Returns the last objective in each member's rows by name; NaN: no objective, or a failed member."""
        assert self.objective is not None
        self.check_objective(members)
        scores = {}
        for member in members:
            rows = loggers.read_rows(member.directory / "result.jsonl")
            values = [row[self.objective] for row in rows if summary.is_finite_number(row.get(self.objective))]
            is_failed = (self.record.find_end_reason(member) or "").startswith(FAILED)
            scores[member.name] = float(values[-1]) if values and not is_failed else math.nan
        return scores

    def check_objective(self, members: Sequence[MemberSpec]) -> None:
        """Raises InputError if members have rows, but no row has the objective of the settings."""
        objective = self.plan.settings.objective if self.plan else None
        if objective is None:
            return
        rows = (row for member in members for row in loggers.read_rows(member.directory / "result.jsonl"))
        names = dict.fromkeys(name for row in rows for name in row)
        if names and (fault := checks.missing_metric("--objective", objective, [*names])):
            raise InputError(f"{fault} (members stay as they are: start again in another --out)")

    # ------------------------------------------------------------ training

    def train_rounds(self, trainer: Trainer, interrupted: interruption.Signals) -> dict[str, str]:
        """Trains all rounds to their ends, or resumes them; returns the end reason of each member by name."""
        ended: dict[str, str] = {}
        for number in range(len(self._rounds)):
            if number == len(self.record.rounds):
                self._add_round()
                self.members = self._build_members()
                self.record.write()
            first = sum(self.record.rounds[:number])
            members = range(first, first + self.record.rounds[number])
            if number + 1 == len(self.record.rounds):
                ended |= self._train_round(trainer, interrupted, number, members)
            else:  # the round was complete when the next round was added
                reasons = {self.members[i].name: self.record.find_end_reason(self.members[i]) for i in members}
                ended |= {name: reason or "complete" for name, reason in reasons.items()}
            if interrupted:
                return {**dict.fromkeys((member.name for member in self.members), "interrupted"), **ended}
            trainer.close()
        return {**ended, **self._find_stopped()}

    def _find_stopped(self) -> dict[str, str]:
        return {
            name: f"{summary.STOPPED} {decision['at']}"
            for decision in self.record.decisions
            for name in decision.get("stopped", ())
        }

    def _train_round(
        self, trainer: Trainer, interrupted: interruption.Signals, number: int, indices: range
    ) -> dict[str, str]:
        members = [self.members[i] for i in indices]
        decisions = [decision for decision in self.record.decisions if decision["round"] == number]
        if decisions and not decisions[-1].get("applied", True):
            self._apply_decision(trainer, decisions[-1])
        # after a rung the program holds only the members that continue
        last = decisions[-1]["at"] if decisions and isinstance(self._scheduler, schedule.Asha) else 0
        before = [member for member in members if self.record.ended.get(member.name, {}).get("at", math.inf) <= last]
        ended = {member.name: why for member in before if (why := self.record.find_end_reason(member))}
        for pause in [*self._pauses[number][len(decisions) :], math.inf]:
            removed = {**self._find_stopped(), **ended}
            left = [self.members[i] for i in indices if self.members[i].name not in removed]
            reasons = {member.name: self.record.find_end_reason(member) for member in left}
            if all(reasons.values()):
                return ended | {name: why or "" for name, why in reasons.items()}
            ended |= trainer.train_until(left, pause)
            if interrupted:
                break
            paused = [member for member in left if member.name not in ended]
            if pause < math.inf and paused:
                current = [self.members[i] for i in indices]
                failed = [member for member in current if ended.get(member.name, "").startswith(FAILED)]
                self._decide(trainer, paused, failed, self._find_finished(indices), number, int(pause))
        return ended

    def _find_finished(self, indices: range) -> list[MemberSpec]:
        if not isinstance(self._scheduler, schedule.Asha):  # PBT cannot copy an ended member
            return []
        stopped = self._find_stopped()
        stopped_points = {schedule.format_point(member.values) for member in self.members if member.name in stopped}
        finished = {name for name, end in self.record.ended.items() if not end["why"].startswith(FAILED)}
        members = [self.members[i] for i in indices]
        return [m for m in members if m.name in finished and schedule.format_point(m.values) not in stopped_points]

    def _decide(
        self, trainer: Trainer, paused: Sequence[MemberSpec], failed: Sequence[MemberSpec],
        finished: Sequence[MemberSpec], number: int, at: int,
    ) -> None:  # fmt: skip
        """Compares paused and finished members. The decision is written before it is applied."""
        assert self.plan is not None and self._scheduler is not None
        compared = sorted([*paused, *finished], key=lambda member: member.name)
        failed_points = {schedule.format_point(member.values) for member in failed}  # have no score
        scores = self._read_scores(compared)
        for member in compared:
            if schedule.format_point(member.values) in failed_points:
                scores[member.name] = math.nan
        values = {member.name: member.values for member in compared}
        finite = {name: score if math.isfinite(score) else None for name, score in scores.items()}
        decision: dict[str, Any] = {"round": number, "at": at, "scores": finite}
        if isinstance(self._scheduler, schedule.Asha):
            stopped = self._scheduler.decide(values, scores)["stopped"]
            decision["stopped"] = [name for name in stopped if name not in {member.name for member in finished}]
        else:
            seed = [self._cfg.run.seed, number, at]
            decision |= {**self._scheduler.decide(values, scores, self.plan.spaces, seed), "applied": False}
        self.record.update(decisions=[*self.record.decisions, decision])
        self._apply_decision(trainer, decision)

    def _warn_few_episodes(self, decision: Mapping[str, Any]) -> str:
        """Returns a warning if compared scores are means over few episodes, which depend on luck; "": no warning."""
        assert self.objective is not None
        window, few = self._cfg.run.smoothing_episodes, []
        for member in self.members:
            if decision["scores"].get(member.name) is None or member.name in self.record.ended:
                continue
            rows = loggers.read_rows(member.directory / "result.jsonl")
            scored = [row for row in rows if summary.is_finite_number(row.get(self.objective))]
            if scored and not progress.is_reliable(self.objective, scored[-1], window):
                few.append(int(progress.window_size(self.objective, scored[-1])))
        if not few:
            return ""
        setting = "first" if isinstance(self._scheduler, schedule.Asha) else "interval"
        steps = self._pauses[decision["round"]][0] * window // max(1, min(few))
        return (
            f"warning: {len(few)} of {len(decision['scores'])} scores are means over as few as "
            f"{counted(min(few), 'episode')}, run.smoothing_episodes is {window}: to compare later, raise {setting} of "
            f"--scheduler to about {steps:,} steps"
        )

    def _apply_decision(self, trainer: Trainer, decision: dict[str, Any]) -> None:
        print(_format_decision(decision), flush=True)
        if warning := self._warn_few_episodes(decision):
            print(warning, flush=True)
        if "stopped" in decision:
            trainer.stop({name: self._find_stopped()[name] for name in decision["stopped"]})
            return
        before, self.members = self.members, self._build_members()
        sources = {copy["member"]: copy["source"] for copy in decision["copies"]}
        trainer.copy_members(sources, before, self.members)
        self.record.update(decisions=[*self.record.decisions[:-1], {**decision, "applied": True}])


def _format_decision(decision: Mapping[str, Any]) -> str:
    scores = [score for score in decision["scores"].values() if score is not None]
    best = f", the best of them at {max(scores):.4g}" if scores else ""
    at = f"{decision['at']:,} steps: {counted(len(decision['scores']), 'member')}{best}"
    if "stopped" in decision:
        left = len(decision["scores"]) - len(decision["stopped"])
        return f"{at}; {left} continue, {len(decision['stopped'])} are stopped"
    copies = ", ".join(f"{copy['member']} from {copy['source']}" for copy in decision["copies"])
    return f"{at}; {copies or 'no member is replaced'}"
