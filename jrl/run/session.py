"""Session: the parts, state and progress of a run, and changes between two calls of its program.

    with Session(cfg) as session:
        session.start()
        while info := session.advance():
            ...

`jrl.run.runner` advances a session to its end; `jrl.api.Algorithm` advances it by `train()`. Callbacks, curricula and
custom evaluation functions get the session, or its Algorithm, as `algorithm`.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jrl import agents, config, registry
from jrl.config import EnvConfig, RunConfig, Sizes, datasets
from jrl.errors import EnvironmentFailed, InputError, counted
from jrl.host import runtime
from jrl.learn.program import Calls, Clock, LoopState, StepInfo
from jrl.metrics import loggers, progress, results
from jrl.metrics.timers import RECOMPILES, Timers
from jrl.run import build, reporter
from jrl.run.base_session import BaseSession
from jrl.run.evaluation_schedule import Schedule
from jrl.run.preflight import resolved
from jrl.run.store import checkpoint
from jrl.types import EnvSpec, Episodes, Metrics, PyTree, Rollout

if TYPE_CHECKING:
    from jrl.learn.staged import Step
    from jrl.run.manual_steps import ManualSteps
    from jrl.run.workers import Workers

_log = logging.getLogger(__name__)
_MOST_BAD_CALLS = 10


class Session(BaseSession):
    """Parts, state and progress of one run.

    Args:
      cfg: config of the run.
      restarts, training_step, external: see `build.run`.
      callback_target: object that callbacks get as `algorithm`; None: this session.
      sinks: functions called with each result row, after callbacks; more can be appended.
      endless: continue beyond `stop.env_steps`.
      directory: run directory, for videos of evaluations; None: `run.out`.
      run: parts of the run; None: built from the config.
    Attributes:
      state: LoopState, donated to the next call.
      iteration, clock: progress, up to the counted calls.
      workers, evaluation_workers: environments of training and of evaluations.
      rows_wait: whether each row waits for the latest call and includes it.
      version: version of the weights, increased by each change.
      result: latest result, after callbacks.
      met: name -> target of stop criteria that a row has met.
    Raises:
      InputError: the config cannot be run.
    """

    def __init__(
        self,
        cfg: RunConfig,
        *,
        restarts: int = 0,
        callback_target: Any = None,
        sinks: list[reporter.Sink] | None = None,
        endless: bool = False,
        training_step: "Callable[[Step], Any] | None" = None,
        directory: Path | None = None,
        run: build.Run | None = None,
        external: build.MakeSource | None = None,
    ):
        if errors := loggers.check(cfg.run.log):
            raise InputError(*errors)
        self.platform_note = ""  # measurements of `devices.platform: auto`, in words
        if cfg.devices.platform == "auto":  # before anything starts jax
            from jrl.run import platform_choice

            cfg, self.platform_note = platform_choice.choose(cfg)
        cfg = resolved(cfg)
        self.config, self.timers = cfg, Timers()
        _set_log_level(cfg.run.log_level)
        self._callback_target = callback_target or self
        self.sinks: list[reporter.Sink] = [] if sinks is None else sinks
        self._total = None if endless else Sizes(cfg).total_steps
        self.version, self.callback_list = 0, None
        if cfg.custom.callbacks:
            from jrl import callbacks

            if loaded := callbacks.load(cfg.custom.callbacks):
                self.callback_list = callbacks.CallbackList(loaded, keep_per_episode=cfg.run.keep_per_episode_metrics)
        self._task_fn = cfg.custom.env_task and registry.load(cfg.custom.env_task, "custom.env_task")
        self._training_step, self._external = training_step, external
        self._directory = directory or (Path(cfg.run.out) if cfg.run.out else None)
        self._build(cfg, restarts, run)
        self.iteration, self.clock = 0, Clock()
        self.result: dict[str, Any] | None = None
        self.met: dict[str, float] = {}
        self._policies_changed = False  # policies were added or removed
        self._row: dict[str, Any] | None = None  # the latest row
        self._tasks = 0
        self._bad_calls = 0  # calls in a row without a finite step: see `env.on_nonfinite`
        # the best checkpoint is chosen by metrics on validation data
        self._validates = (cfg.checkpoint.keep_best_by or "").startswith("validation/")
        self.rows_wait = False

    @functools.cached_property
    def manual_steps(self) -> "ManualSteps":
        from jrl.run.manual_steps import ManualSteps

        return ManualSteps(self)

    @functools.cached_property
    def workers(self) -> "Workers":
        from jrl.run.workers import Workers

        return Workers(self)

    def _build(self, cfg: RunConfig, restarts: int, run: build.Run | None = None) -> None:
        self.config = cfg
        self._recompiles = runtime.Recompiles(cfg.run.max_recompiles)
        self.schedule = Schedule(self, self.callback_list, self._callback_target, self._directory)
        self.run = run or build.run(
            cfg, timers=self.timers, restarts=restarts, callback_list=self.callback_list,
            training_step=self._training_step, external=self._external,
        )  # fmt: skip

    # ------------------------------------------------------------ start and end

    def start(
        self,
        saved: Path | None = None,
        weights: Path | None = None,
        *,
        policy_only: bool = False,
        begin: bool = True,
        starts_over: bool = False,
    ) -> list[str]:
        """Sets the initial state: from a checkpoint, with the weights of one, or new. Returns notes for the user.

        Args:
          saved: checkpoint to continue from.
          weights: checkpoint whose weights are copied.
          policy_only: copy no weights of value functions.
          begin: call `on_algorithm_init` of the callbacks.
          starts_over: whether this run replaces an attempt without a checkpoint; its files are deleted.
        Raises:
          InputError: the checkpoint does not fit, or the evaluation environments cannot be made.
        """
        meta = checkpoint.read_meta(saved, resumable=True) if saved else None
        if meta and (self.run.policies.in_checkpoint or meta.get("policies_changed")):
            self._take_policies(meta)
        cfg, program, notes = self.config, self.run.program, list[str]()
        self._recompiles.start()
        self.schedule.prepare()
        state = program.init(cfg.run.seed)
        if saved and meta:
            from jrl.run.store import resume

            changes = resume.describe_resume(saved, cfg, self.run.plan.learners, self.run.checksums)
            notes = [f"resume: {note}" for note in changes]
            kept = resume.restore_state(saved, cfg, program.keep(state), self.run.plan.learners)
            state = program.place(kept)
            notes.append(f"resume: from {saved} at {meta['env_steps']:,} steps")
            steps = meta["env_steps"]
            self.iteration, self.clock = meta["iteration"], Clock(steps, meta.get("agent_steps", steps))
            self.met = dict(meta.get("met") or {})
        elif weights:
            kept = jax.device_get(program.keep(state).learner)
            from jrl.run.store import resume

            learner, lines = resume.transfer_weights(weights, kept, policy_only=policy_only)
            notes = [f"init-from: {line}" for line in lines]
            state = program.assign(state, learner)
        notes += self.run.inputs.notes if self.run.inputs else ()
        self.state = self.run.policies.prepare(program, state)
        if self.run.recorder:
            notes += self.run.recorder.begin(self._directory, self.iteration, starts_over=starts_over)
        self.reporter = reporter.Reporter(
            [self._finish_row, lambda row: next(filter(None, [sink(row) for sink in self.sinks]), None)],
            every=self.run.plan.report_every,
            seconds=cfg.run.report_every_s or 0.0,
            trained=cfg.run.report_every_trained or 0,
            rows_per_update=cfg.replay.batch_size if cfg.replay else None,
            updates_per_iteration=self.run.plan.updates or 1,
            before=lambda: self.schedule.before_row(),  # `rebuild` replaces the schedule
            agents=self.run.spec.agents,
            policies=self.run.policies.reported,
            env_steps=self.env_steps,
            time_s=meta["time_s"] if meta else 0.0,
        )
        if elo := self.schedule.elo:
            elo.begin(self.actor())
            if saved and meta and "elo" in meta.get("checksums", {}):
                elo.latest = checkpoint.restore(saved, "elo", elo.latest)
        self.schedule.start()
        if self.run.estimates:
            self.run.estimates.begin(self.env_steps, self.steps_per_call)
        if saved and meta:
            try:
                self.reporter.restore(meta["rows"], self.timers)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
                raise checkpoint.damaged_error(saved, f"rows: {e}") from e
        if self.callback_list:
            if begin:
                named = getattr(self._callback_target, "get_policy", lambda name: self._callback_target)
                from jrl.callbacks import DEFAULT_POLICY

                ids = self.run.policies.names or (DEFAULT_POLICY,)
                self.callback_list.begin(self._callback_target, {name: named(name) for name in ids})
            if saved:
                self.callback_list.call("on_checkpoint_loaded", algorithm=self._callback_target)
        self.schedule.begin_first()
        return notes

    def _take_policies(self, meta: Mapping[str, Any]) -> None:
        """Rebuilds the run with the policies of a checkpoint, if policies were added or removed."""
        names = ("policies", "mapping", "policies_to_train")
        found = config.override({**meta["config"]}, []).multi_agent
        given = self.config.multi_agent
        assert found is not None and given is not None
        if any(getattr(found, name) != getattr(given, name) for name in names):
            given = dataclasses.replace(given, **{name: getattr(found, name) for name in names})
            self.schedule.close()
            self.run.program.close()
            cfg = resolved(dataclasses.replace(self.config, multi_agent=given))
            self._build(cfg, meta["iteration"])
        self._policies_changed = bool(meta.get("policies_changed"))

    def rebuild(self, cfg: RunConfig, given: Mapping[str, PyTree]) -> None:
        """Rebuilds the run with other policies; `given`: policy -> initial State.

        Policies keep their States and replays by name; counters and statistics are kept. Environments are reset.

        Raises:
          InputError: the mapping names an unknown policy, or the run cannot be built.
        """
        agents.make(cfg).check()
        now, kept = self.clock_now(), jax.device_get(self.run.program.keep(self.state))
        before = self.run.policies
        self._recompiles.close()
        self.schedule.close()
        self.run.program.close()
        self._build(cfg, self.iteration + 1)
        self.manual_steps.programs.clear()
        self._recompiles.start()
        self.schedule.prepare()
        program = self.run.program
        fresh = jax.device_get(program.keep(program.init(cfg.run.seed)))
        merged = self.run.policies.continued(fresh, kept, before, given, self.run.plan.learners)
        self.clock = now
        self.replace_state(self.run.policies.prepare(program, program.place(merged)))
        self._policies_changed = True
        self.reporter.policies = self.run.policies.reported
        self.schedule.start()

    def close(self) -> None:
        """Closes environments, evaluations and threads of the run. Can be called twice."""
        self._calls = None
        self._recompiles.close()
        self.schedule.close()
        self.run.program.close()
        if self.run.recorder:
            self.run.recorder.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # ------------------------------------------------------------ calls of the program

    def advance(self) -> StepInfo | None:
        """Dispatches one call of the program, without waiting; returns None once `stop.env_steps` is reached.

        Raises:
          Recompiled: previous calls recompiled more programs than `run.max_recompiles`.
        """
        count = self.next_count()
        return None if count is None else self.count_call(*self.dispatch(count))

    def dispatch(self, count: int) -> tuple[LoopState, Metrics, Episodes]:
        """Dispatches a call of `count` iterations; `count_call` takes its result. Raises as `advance`."""
        self._recompiles.check()
        if self.run.recorder:
            self.run.recorder.iteration = self.iteration
        with self._recompiles.iteration(self.reporter.count):
            return self.run.program.advance(self.calls.state, self.config.run.seed, self.iteration, count)

    @property
    def calls(self) -> Calls:
        """Returns the calls of the program, beginning with the present state."""
        if self._calls is None:
            self._calls = Calls(
                self.run.program,
                self.state,
                total_env_steps=self._total,
                iteration=self.iteration,
                clock=self.clock,
                timers=self.timers,
                prepare=functools.partial(self.run.policies.prepare, self.run.program),
            )
        return self._calls

    def next_count(self) -> int | None:
        """Returns the number of iterations of the next call; None: `stop.env_steps` is reached."""
        return self.calls.next_count()

    def count_call(self, state: LoopState, metrics: Metrics, report: Episodes) -> StepInfo:
        """Takes the result of a call: state and counters."""
        info = self.calls.count_call(state, metrics, report)
        before, self._latest, self.state = self._latest, info, info.state
        self.version += 1
        self.iteration, self.clock = info.iteration, info.clock
        if self.callback_list:
            self.callback_list.recreated(self._callback_target, self.workers, self.run.program.source)
        if before is not None:
            self._check_finite(before.episodes)
        return info

    def _check_finite(self, report: Episodes) -> None:
        """Raises EnvironmentFailed: too many calls without a finite step, so that no row would ever be due."""
        is_bad = np.any(report.nonfinite) and not np.any(report.steps)
        self._bad_calls = self._bad_calls + 1 if is_bad else 0
        if self._bad_calls == _MOST_BAD_CALLS:
            fix = "find the NaN or infinity, or leave env.on_nonfinite out"
            raise _not_finite(self.config.env, f"each step of {_MOST_BAD_CALLS} calls in a row: {fix}")

    def finish_call(self, info: StepInfo) -> str | None:
        """Builds the row and plays the evaluation that are due after a call; returns a reason to end the run, or None.

        A row covers the previous calls, since the latest call is still running. A row with an evaluation waits for the
        latest call and includes it, so that the row belongs to the evaluated weights.
        """
        return self._make_row(info) or self.end_reason

    @property
    def end_reason(self) -> str | None:
        """Returns the reason of a callback to end the run, or None."""
        return self.callback_list.ended if self.callback_list else None

    def _make_row(self, info: StepInfo) -> str | None:
        reached = self.schedule.is_due(info)
        if (estimates := self.run.estimates) and estimates.is_due(info):
            self.reporter.extra.update(estimates.estimate(self.run.learn.actor(info.state.learner), info.iteration))
            reached = True
        # flush now: the league decides by this row, and validation metrics belong to these weights
        if self.run.policies.decides_by_row or self._validates or self.rows_wait:
            self.reporter.add(info)
            return self.reporter.flush() if reached or self.reporter.due() or self.end_reason else None
        evaluates = self.schedule.is_busy or self.schedule.in_row(1)
        if reached or (evaluates and self.reporter.due_before(info)):
            self.reporter.add(info)
            return self.reporter.flush()
        return self.reporter(info)

    def go_on_as(self, source: "Session", cfg: RunConfig) -> None:
        """Takes config `cfg` and the progress of `source`, whose state was copied to this session's program."""
        self.config, self.clock, self._calls, self._latest = cfg, source.clock_now(), None, None
        self.iteration, self.met = source.iteration, dict(source.met)
        self.reporter.restore(source.reporter.state(), self.timers)
        self.version += 1

    # ------------------------------------------------------------ result rows

    def _finish_row(self, row: dict[str, Any]) -> None:
        """Adds metrics of callbacks, clients and the machine to a new row, and calls the callbacks.

        Raises:
          EnvironmentFailed: environments were not finite, and `env.on_nonfinite` is stop.
        """
        if self.config.env.on_nonfinite == "stop" and (count := row.get("env/nonfinite")):
            fix = "env.on_nonfinite=reset begins a new episode instead"
            raise _not_finite(self.config.env, f"{counted(count, 'step', ',')} up to step {row['env_steps']:,}; {fix}")
        run, count = self.run, self.reporter.count
        state = run.policies.on_row(run.program, self.state, row, count, self._directory)
        if state is not self.state:
            self.replace_state(state)
        row.update(self.callback_list.drain() if self.callback_list else {})
        row.update(self.run.program.drain())
        row[RECOMPILES] = self._recompiles.count
        if self.config.run.log_sys_usage:
            from jrl.metrics import system

            row.update(system.measure_usage())
        _log.info("row %d: %d steps, return %s", self.reporter.count, row["env_steps"], row["episode/return"])
        _log.debug("%s", row)
        trained = self.reporter.trained(row["env_steps"], row["updates"])
        options: dict[str, Any] = {"iteration": self.reporter.count, "trained": trained}
        options |= {"episodes": self.reporter.episodes, "collects": not datasets.alone(self.config)}
        options["lists"] = self.config.run.keep_per_episode_metrics
        trained_before = (self.result or {}).get("num_env_steps_trained_lifetime", 0)
        self.result = results.build_result(row, **options, before=self._row, trained_before=trained_before)
        self._row = dict(row)
        if self.callback_list:
            before = results.flatten(self.result)
            self.callback_list.train_result(self._callback_target, self.result)
            row.update(results.select_changed(before, results.flatten(self.result)))
        self.met |= {
            name: target
            for name, target in self.config.stop.items()
            if progress.is_met(name, row, target, self.config.run.smoothing_episodes)
        }
        if self._task_fn:
            self._apply_task(self._task_fn, self.result)

    # ------------------------------------------------------------ evaluation

    @property
    def evaluated(self) -> bool:
        """Returns whether the latest result row has an evaluation of the present weights."""
        return (self.reporter.row or {}).get("evaluation/weights_version") == self.iteration

    @property
    def validated(self) -> bool:
        """Returns whether the latest result row has metrics of the present weights on held-out data."""
        return self._validates and (self.reporter.row or {}).get("updates") == self.iteration

    def evaluate(self, duration: int | None = None) -> dict[str, Any]:
        """Plays an evaluation with the present weights; returns its metrics, without the prefix `evaluation/`.

        Args:
          duration: replaces `evaluation.duration`; None: that value.
        """
        return self.schedule.play(duration)

    @property
    def evaluation_workers(self) -> Any:
        return self.schedule.evaluations.workers

    # ------------------------------------------------------------ tasks and checkpoints

    def set_task(self, given: Any) -> None:
        """Sets the task of all environments now: see `jrl.envs.task`. EnvPool environments are made again."""
        self._apply_task(lambda result, env, context: given, {})

    def _apply_task(self, fn: Any, result: dict[str, Any]) -> None:
        self._tasks += 1
        state = self.run.apply_task(self.state, fn, result, self.iteration + self._tasks)
        if state is not self.state:
            self.replace_state(state)

    def description(self, cfg: RunConfig | None = None, spec: EnvSpec | None = None) -> dict[str, Any]:
        """Returns the description of a checkpoint; `cfg` and `spec`: of one policy, else of the run."""
        reporter, run = self.reporter, self.run
        now = self.clock_now()
        counts = {"iteration": self.iteration, "env_steps": now.env_steps, "time_s": reporter.seconds()}
        metrics = {**(reporter.row or {}), **reporter.extra}
        # without metrics of other weights
        stale = [*([] if self.evaluated else ["evaluation/"]), *([] if self.validated else ["validation/"])]
        metrics = {name: value for name, value in metrics.items() if not name.startswith(tuple(stale))}
        more = {"counted": self.env_steps, "rows": reporter.state(), "metrics": metrics, "met": dict(self.met)}
        more |= {"agent_steps": now.agent_steps} if run.spec.is_multi_agent else {}
        more |= {"data": run.checksums} if run.checksums else {}
        more |= {"policies_changed": True} if self._policies_changed else {}
        more |= {"devices": run.plan.learners, "guarantee": run.guarantee}
        return checkpoint.build_meta(cfg or self.config, spec or run.spec, counters=counts, **more)

    def write_fault(self, directory: Path, info: StepInfo) -> Path:
        """Writes the files with which `jrl.debug` repeats an update that was not finite; returns the path."""
        cfg, spec = self.config, self.run.spec
        state = jax.device_get(info.state.learner)
        if self.run.policies.several:  # the first policy whose update was refused
            name, state = next(
                item
                for item in self.run.policies.by_name(state).items()
                if getattr(item[1], "fault", None) is not None and np.any(item[1].fault.found)
            )
            cfg, spec = self.run.policies.of(name)
        fault = state.fault
        found = ["loss"] * bool(fault.in_loss) + ["params"] * bool(fault.in_params)
        kind = "rollout" if isinstance(fault.batch, Rollout) else "batch"
        note = {"iteration": info.iteration, "key": fault.key.tolist(), "kind": kind, "found": found}
        path, meta = directory / "nonfinite" / str(info.iteration), {**self.description(cfg, spec), "nonfinite": note}
        checkpoint.write(path, {"learner": state.state, "batch": fault.batch}, meta)
        print(f"not finite: {' and '.join(found)}, before iteration {info.iteration}: the last good state is in {path}")
        return path

    def to_save(self) -> tuple[dict[str, PyTree], dict[str, Any]]:
        """Returns arrays and description of a checkpoint; writes the mark of `data.output`."""
        if self.run.recorder:
            self.run.recorder.mark(self.iteration)
        return self.parts(), self.description()

    def parts(self) -> dict[str, PyTree]:
        """Returns the arrays of a checkpoint."""
        kept = self.run.program.keep(self.state)
        parts = checkpoint.state_parts(kept, self.config.checkpoint, self.config.multi_agent)
        return parts | ({"elo": self.schedule.elo.latest} if self.schedule.elo else {})


def _not_finite(env: EnvConfig, what: str) -> EnvironmentFailed:
    return EnvironmentFailed(f"env.id {env.id}: state, observation or reward are not finite after {what}")


def _set_log_level(level: str) -> None:
    """Sets the level of jrl's loggers, and prints their lines if the program has no log handlers."""
    logger = logging.getLogger("jrl")
    logger.setLevel({"WARN": "WARNING"}.get(level, level))
    if level in ("INFO", "DEBUG") and not logger.hasHandlers():
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
