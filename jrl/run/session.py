"""A run that is under way: its parts and progress, and changes between two calls of its program.

    with Session(cfg) as session:
        session.start()
        while info := session.advance():
            ...

`jrl.run.runner` drives it to its end, `jrl.api.Algorithm` as long as it is asked to. Callbacks,
curricula and custom evaluations are given it as `algorithm` (or the Algorithm in front of it).
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
from jrl.config import RunConfig, Sizes, datasets
from jrl.errors import InputError
from jrl.host import runtime
from jrl.learn.program import NO_STEPS, Calls, Clock, LoopState, StepInfo
from jrl.metrics import loggers, progress, results
from jrl.metrics.timers import RECOMPILES, Timers
from jrl.run import build, reporter
from jrl.run.evaluation_schedule import Schedule
from jrl.run.policies import BaseSession
from jrl.run.preflight import resolved
from jrl.run.store import checkpoint
from jrl.types import EnvSpec, Episodes, Metrics, PyTree, Rollout

if TYPE_CHECKING:
    from jrl.callbacks import CallbackList
    from jrl.learn.staged import Step
    from jrl.run.manual_steps import ByHand
    from jrl.run.workers import Workers

_log = logging.getLogger(__name__)


class Session(BaseSession):
    """Parts and progress of one run.

    Args:
      cfg: of the run.
      restarts: differs between a run and its continuations.
      face: what callbacks are given as `algorithm`; None: this.
      sinks: get each result row, after callbacks have seen it; more may be appended.
      endless: whether it goes on beyond `stop.env_steps`.
      training_step: what an iteration does; None: as the config says.
      directory: of the run, for videos of evaluations; None: `run.out`.
      run: its parts; None: as the config says.
      external: see `build.run`.
    Attributes:
      config, run: the run and its parts.
      state: LoopState; taken over by the next call.
      iteration, clock: so far; the clock of the calls that are counted.
      reporter: makes the result rows.
      schedule: of evaluations.
      workers, evaluation_workers: collectors and evaluators.
      rows_wait: whether each row waits for the latest call and covers it.
      by_hand: samples, updates and gradients beside the iterations.
    Raises:
      InputError: what cannot be run.
    """

    def __init__(
        self,
        cfg: RunConfig,
        *,
        restarts: int = 0,
        face: Any = None,
        sinks: list[reporter.Sink] | None = None,
        endless: bool = False,
        training_step: "Callable[[Step], Any] | None" = None,
        directory: Path | None = None,
        run: build.Run | None = None,
        external: build.MakeSource | None = None,
    ):
        if errors := loggers.check(cfg.run.log):
            raise InputError(*errors)
        cfg = resolved(cfg)
        self.config, self.timers = cfg, Timers()
        _log_at(cfg.run.log_level)
        self._face = face or self
        self.sinks: list[reporter.Sink] = [] if sinks is None else sinks
        self._total = None if endless else Sizes(cfg).total_steps
        self.version = 0  # of the weights: another number, other weights
        self.callback_list: CallbackList | None = None
        if cfg.custom.callbacks:
            from jrl import callbacks

            if loaded := callbacks.load(cfg.custom.callbacks):
                self.callback_list = callbacks.CallbackList(loaded, keep_per_episode=cfg.run.keep_per_episode_metrics)
        self._task_fn = cfg.custom.env_task and registry.load(cfg.custom.env_task, "custom.env_task")
        self._directory_of_videos, self._training_step, self._external = directory, training_step, external
        self._build(cfg, restarts, run)
        self._directory = directory or (Path(cfg.run.out) if cfg.run.out else None)
        self.state: LoopState
        self.iteration, self.clock = 0, Clock()
        self.result: dict[str, Any] | None = None  # the latest, as callbacks left it
        self.reporter: reporter.Reporter
        self.met: dict[str, float] = {}  # stop criteria that a row has met, and their numbers
        self._policies_changed = False  # some were added or removed
        self._calls: Calls | None = None
        self._latest: StepInfo | None = None
        self._row: dict[str, Any] | None = None  # the latest
        self._tasks = 0
        # checkpoints are compared by data that are held out
        self._validates = (cfg.checkpoint.keep_best_by or "").startswith("validation/")
        self.rows_wait = False

    @functools.cached_property
    def by_hand(self) -> "ByHand":
        from jrl.run.manual_steps import ByHand

        return ByHand(self)

    @functools.cached_property
    def workers(self) -> "Workers":
        from jrl.run.workers import Workers

        return Workers(self)

    def _build(self, cfg: RunConfig, restarts: int, run: build.Run | None = None) -> None:
        self.config = cfg
        self._recompiles = runtime.Recompiles(cfg.run.max_recompiles)
        self.schedule = Schedule(self, self.callback_list, self._face, self._directory_of_videos)
        self.run = run or build.run(
            cfg, timers=self.timers, restarts=restarts, callback_list=self.callback_list,
            training_step=self._training_step, external=self._external,
        )  # fmt: skip

    # ------------------------------------------------------------ beginning and end

    def start(
        self,
        saved: Path | None = None,
        weights: Path | None = None,
        *,
        policy_only: bool = False,
        begin: bool = True,
        anew: bool = False,
    ) -> list[str]:
        """Sets the state to begin with: of a checkpoint, with the weights of one, or fresh.

        Args:
          saved: checkpoint to continue from.
          weights: checkpoint whose weights are taken over.
          policy_only: of them those of the policy alone, not of values.
          begin: whether callbacks are told that the algorithm is made.
          anew: whether the run was begun before, without a checkpoint: what that wrote does not count.
        Returns:
          What there is to say about it.
        Raises:
          InputError: the checkpoint does not fit, or evaluations cannot be played.
        """
        meta = checkpoint.read_meta(saved, resumable=True) if saved else None
        if meta and (self.run.policies.in_checkpoint or meta.get("policies_changed")):
            self._take_policies(meta)
        cfg, program, notes = self.config, self.run.program, []
        self._recompiles.start()
        self.schedule.prepare()
        state = program.init(cfg.run.seed)
        if saved and meta:
            from jrl.run.store import resume

            notes = [f"resume: {note}" for note in resume.notes(saved, cfg, self.run.plan.learners, self.run.data)]
            kept = resume.restore(saved, cfg, program.keep(state), self.run.plan.learners)
            state = program.place(kept)
            notes.append(f"resume: from {saved} at {meta['env_steps']:,} steps")
            steps = meta["env_steps"]
            self.iteration, self.clock = meta["iteration"], Clock(steps, meta.get("agent_steps", steps))
            self.met = dict(meta.get("met") or {})
        elif weights:
            kept = jax.device_get(program.keep(state).learner)
            from jrl.run.store import resume

            learner, lines = resume.weights(weights, kept, policy_only=policy_only)
            notes = [f"init-from: {line}" for line in lines]
            state = program.assign(state, learner)
        notes += self.run.data_notes
        self.state = self.run.policies.ahead(program, state)
        if self.run.recorder:
            notes += self.run.recorder.begin(self._directory, self.iteration, anew=anew)
        self.reporter = reporter.Reporter(
            [self._finish_row, self._to_sinks],
            every=self.run.plan.report_every,
            seconds=cfg.run.report_every_s or 0.0,
            trained=cfg.run.report_every_trained or 0,
            rows_per_update=cfg.replay.batch_size if cfg.replay else None,
            updates_per_iteration=self.run.plan.updates or 1,
            before=lambda: self.schedule.before_row(),  # of the present schedule
            agents=self.run.spec.agents,
            policies=self.run.policies.reported,
            env_steps=self.env_steps,
            time_s=meta["time_s"] if meta else 0.0,
        )
        self.schedule.start()
        if self.run.judge:
            self.run.judge.begin(self.env_steps, self.steps_per_call)
        if saved and meta:
            try:
                self.reporter.restore(meta["rows"], self.timers)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
                raise checkpoint.damaged(saved, f"rows: {e}") from e
        if self.callback_list:
            if begin:
                named = getattr(self._face, "get_policy", lambda name: self._face)
                from jrl.callbacks import DEFAULT_POLICY

                ids = self.run.policies.names or (DEFAULT_POLICY,)
                self.callback_list.begin(self._face, {name: named(name) for name in ids})
            if saved:
                self.callback_list.call("on_checkpoint_loaded", algorithm=self._face)
        self.schedule.begin_first()
        return notes

    def _take_policies(self, meta: Mapping[str, Any]) -> None:
        """Makes the run anew with the policies of a checkpoint, which may have been added or removed."""
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
        """Makes the run anew with other policies.

        States, replays, counters and latest episodes go on, those of policies by their names. Environments begin anew.

        Args:
          cfg: config with the policies.
          given: policy -> the State that it begins with.
        Raises:
          InputError: the mapping names an unknown policy, or the run cannot be made.
        """
        agents.make(cfg).check()
        now, kept = self.clock_now(), jax.device_get(self.run.program.keep(self.state))
        before = self.run.policies
        self._recompiles.close()
        self.schedule.close()
        self.run.program.close()
        self._build(cfg, self.iteration + 1)
        self.by_hand.forget_programs()
        self._recompiles.start()
        self.schedule.prepare()
        program = self.run.program
        fresh = jax.device_get(program.keep(program.init(cfg.run.seed)))
        merged = self.run.policies.continued(fresh, kept, before, given, self.run.plan.learners)
        self.clock = now
        self.replace_state(self.run.policies.ahead(program, program.place(merged)))
        self._policies_changed = True
        self.reporter.follow(self.run.policies.reported)
        self.schedule.start()

    def close(self) -> None:
        """Ends the environments, the evaluation and all else that works for the run. May be called again."""
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

    # ------------------------------------------------------------ going on

    def advance(self) -> StepInfo | None:
        """Makes one call of the program; None once `stop.env_steps` is reached. Dispatched, not waited for.

        Raises:
          Recompiled: the calls before compiled more programs again than `run.max_recompiles`.
        """
        count = self.ahead()
        return None if count is None else self.advanced(*self.call(count))

    def call(self, count: int) -> tuple[LoopState, Metrics, Episodes]:
        """Makes a call of so many iterations, for `advanced` to go on from. Raises as `advance`."""
        self._recompiles.check()
        if self.run.recorder:
            self.run.recorder.iteration = self.iteration
        with self._recompiles.iteration(self.reporter.count):
            return self.run.program.advance(self.calls.state, self.config.run.seed, self.iteration, count)

    @property
    def calls(self) -> Calls:
        """Returns the calls of the program from the present state on."""
        if self._calls is None:
            program = self.run.program
            self._calls = Calls(
                program.rows,
                program.iterations,
                self.state,
                total_env_steps=self._total,
                iteration=self.iteration,
                clock=self.clock,
                timers=self.timers,
                prepare=functools.partial(self.run.policies.ahead, program),
            )
        return self._calls

    def ahead(self) -> int | None:
        """Counts the iterations of the next call; None: `stop.env_steps` is reached."""
        return self.calls.ahead()

    def advanced(self, state: LoopState, metrics: Metrics, report: Episodes) -> StepInfo:
        """Goes on from what a call of the program made."""
        info = self.calls.made(state, metrics, report)
        self._latest, self.state = info, info.state
        self.version += 1
        self.iteration, self.clock = info.iteration, info.clock
        if self.callback_list:
            self.callback_list.recreated(self._face, self.workers, self.run.program.source)
        return info

    @property
    def steps_per_call(self) -> int:
        """Returns the most steps of a call, unless a training step of the user's samples more than once."""
        return self.run.program.iterations * self.run.program.rows

    def after(self, info: StepInfo) -> str | None:
        """Makes the result row and the evaluation that are due after a call; returns why the run should end, or None.

        A row covers the calls before this one, which is under way. One with an evaluation is waited for and covers this
        one, too: its numbers, and what is decided by them, are those of the weights that were evaluated.
        """
        return self._rows_after(info) or self.ended

    @property
    def ended(self) -> str | None:
        """Returns why a callback wants the run to end; None: it goes on."""
        return self.callback_list.ended if self.callback_list else None

    def _rows_after(self, info: StepInfo) -> str | None:
        reached = self.schedule.reached(info)
        if self.run.judge and (found := self.run.judge.after(info, self.run.learn.actor)):
            self.reporter.extra.update(found)
            reached = True
        # metrics of held-out data belong to the weights after this call
        if self.run.policies.decides_by_row or self._validates or self.rows_wait:
            self.reporter.add(info)
            return self.reporter.flush() if reached or self.reporter.due() or self.ended else None
        evaluates = self.schedule.busy or self.schedule.in_row(1)
        if reached or (evaluates and self.reporter.due_before(info)):
            self.reporter.add(info)
            return self.reporter.flush()
        return self.reporter(info)

    def _to_sinks(self, row: dict[str, Any]) -> str | None:
        reasons = [sink(row) for sink in self.sinks]
        return next(filter(None, reasons), None)

    @property
    def env_steps(self) -> int:
        """Returns environment steps of the calls that are counted."""
        return self.clock.env_steps

    def clock_now(self) -> Clock:
        """Returns the clock with the latest call. Waits for it."""
        return self._latest.clock_after() if self._latest else self.clock

    def counted(self) -> int:
        """Returns the environment steps so far, the latest call's included. Waits for it."""
        return self.clock_now().env_steps

    def replace_state(self, state: LoopState, steps: Clock = NO_STEPS) -> None:
        """Goes on from another state, which has learned from so many more steps."""
        now = self.clock_now()
        env_steps, agent_steps = now.env_steps + steps.env_steps, now.agent_steps + steps.agent_steps
        self.clock = now._replace(env_steps=env_steps, agent_steps=agent_steps)
        self.state, self._calls = state, None
        self._latest = None
        self.version += 1

    def go_on_as(self, source: "Session", cfg: RunConfig) -> None:
        """Goes on as another Session, whose state this session's program was given, but with `cfg`."""
        self.config, self.clock, self._calls, self._latest = cfg, source.clock_now(), None, None
        self.iteration, self.met = source.iteration, dict(source.met)
        self.reporter.restore(source.reporter.state(), self.timers)
        self.version += 1

    # ------------------------------------------------------------ result rows

    def _finish_row(self, row: dict[str, Any]) -> None:
        """Puts into a new row what callbacks, clients and the machine say, and lets callbacks change it."""
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
        told: dict[str, Any] = {"iteration": self.reporter.count, "trained": trained}
        told |= {"episodes": self.reporter.episodes, "collects": not datasets.alone(self.config)}
        told["lists"] = self.config.run.keep_per_episode_metrics
        then = (self.result or {}).get("num_env_steps_trained_lifetime", 0)
        self.result = results.build_result(row, **told, before=self._row, trained_before=then)
        self._row = dict(row)
        if self.callback_list:
            before = results.flatten(self.result)
            self.callback_list.train_result(self._face, self.result)
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
        """Plays an evaluation with the present weights, now.

        Args:
          duration: of it; None: as the config says.
        Returns:
          The metrics, without the prefix `evaluation/` that they have in result rows.
        """
        return self.schedule.play(duration)

    @property
    def evaluation_workers(self) -> Any:
        return self.schedule.evaluations.workers

    # ------------------------------------------------------------ tasks and checkpoints

    def set_task(self, given: Any) -> None:
        """Gives all environments a task, at once: see `jrl.envs.task`. EnvPool's are made anew with other options."""
        self._apply_task(lambda result, env, context: given, {})

    def _apply_task(self, fn: Any, result: dict[str, Any]) -> None:
        self._tasks += 1
        state = self.run.apply_task(self.state, fn, result, self.iteration + self._tasks)
        if state is not self.state:
            self.replace_state(state)

    def description(self, cfg: RunConfig | None = None, spec: EnvSpec | None = None) -> dict[str, Any]:
        """Returns the description beside the arrays of a checkpoint; of one policy's with its config and spec."""
        reporter, run = self.reporter, self.run
        now = self.clock_now()
        counts = {"iteration": self.iteration, "env_steps": now.env_steps, "time_s": reporter.seconds()}
        metrics = {**(reporter.row or {}), **reporter.extra}
        # those of other weights say nothing about these
        of_others = [*([] if self.evaluated else ["evaluation/"]), *([] if self.validated else ["validation/"])]
        metrics = {name: value for name, value in metrics.items() if not name.startswith(tuple(of_others))}
        more = {"counted": self.env_steps, "rows": reporter.state(), "metrics": metrics, "met": dict(self.met)}
        more |= {"agent_steps": now.agent_steps} if run.spec.is_multi_agent else {}
        more |= {"data": dict(run.data)} if run.data else {}
        more |= {"policies_changed": True} if self._policies_changed else {}
        more |= {"devices": run.plan.learners, "guarantee": run.guarantee}
        return checkpoint.meta(cfg or self.config, spec or run.spec, counters=counts, **more)

    def write_fault(self, directory: Path, info: StepInfo) -> Path:
        """Writes what `jrl.debug` needs to repeat an update that was not finite; returns the path."""
        cfg, spec = self.config, self.run.spec
        state = jax.device_get(info.state.learner)
        if self.run.policies.several:  # that of the first policy whose update was refused
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
        """Returns the arrays and the description of a checkpoint of now; `data.output` writes its part."""
        if self.run.recorder:
            self.run.recorder.mark(self.iteration)
        return self.parts(), self.description()

    def parts(self) -> dict[str, PyTree]:
        """Returns the arrays of a checkpoint."""
        kept = self.run.program.keep(self.state)
        return checkpoint.state_parts(kept, self.config.checkpoint, self.config.multi_agent)


def _log_at(level: str) -> None:
    """Lets jrl's loggers through from that level on, and shows them where the program has not said how."""
    logger = logging.getLogger("jrl")
    logger.setLevel({"WARN": "WARNING"}.get(level, level))
    if level in ("INFO", "DEBUG") and not logger.hasHandlers():
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
