"""Reporter of result rows, and triggers: functions of StepInfo that say when an event is due.

due = every_steps(10_000)
for info in run(...):
    if reason := reporter(info): break
    if due(info): save(info)
"""

import collections
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jrl.config import ReplayConfig
from jrl.learn.program import Clock, StepInfo
from jrl.metrics import episodes as episode_metrics
from jrl.metrics import progress
from jrl.types import BROKEN_STACKS, NO_CHOICE, NOT_FINITE, VALID_SHARE, InputError

Sink = Callable[[dict[str, Any]], str | None]  # result row -> reason to end the run, or None


class Reporter:
    """Makes a result row every `every` environment steps and passes it to the sinks.

    The metrics of a call are read after the next call is dispatched, so that the device never waits for a report. A row
    covers the calls since the previous row: losses of the latest call; sums of episode counts and times.

    Args:
      sinks: functions called with each row, in order; a sink may change the row.
      every, seconds, trained: minimum environment steps, seconds, and learned steps between two rows.
      updates_per_iteration: gradient steps of an iteration.
      rows_per_update: transitions of a gradient step from replay; None: on-policy, each step is learned from once.
      before: called before each row; may change `extra`.
      agents, policies: names of the agents, and policy -> its agents, if there are several agents.
      env_steps, time_s: initial values of a continued run.
    Attributes:
      extra, once: further keys of the next rows, and of the next row only.
      row: latest row; None before the first.
      count, episodes: number of rows so far, and of episodes that ended in these rows.
    """

    def __init__(
        self,
        sinks: list[Sink],
        *,
        every: int,
        updates_per_iteration: int,
        seconds: float = 0.0,
        trained: int = 0,
        rows_per_update: int | None = None,
        before: Callable[[], None] = lambda: None,
        agents: Sequence[str] = (),
        policies: Mapping[str, Sequence[str]] = types.MappingProxyType({}),
        env_steps: int = 0,
        time_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._sinks, self._every, self._updates, self._clock = sinks, every, updates_per_iteration, clock
        self._seconds, self._trained, self._rows_per_update, self._before = seconds, trained, rows_per_update, before
        self._agents, self.policies = agents, policies
        self._pending: list[StepInfo] = []
        self._started = clock() - time_s
        # (time, steps) of the last two rows: the last row of a run may closely follow the previous row
        self._marks = collections.deque([(clock(), env_steps)], maxlen=2)
        self._trained_then = 0
        self.extra: dict[str, Any] = {}
        self.once: dict[str, list[float]] = {}
        self.row: dict[str, Any] | None = None
        self.count = self.episodes = 0
        self._warned = False  # about a replay of mostly masked rows

    def __call__(self, info: StepInfo) -> str | None:
        reason = self.flush() if self.due_before(info) else None
        self.add(info)
        return reason

    def add(self, info: StepInfo) -> None:
        """Adds a call to the next row."""
        self._pending.append(info._replace(state=None))  # the next call donates the state

    def due_before(self, info: StepInfo) -> bool:
        """Returns whether a row of the calls before `info` is due."""
        return bool(self._pending) and self._due(info.env_steps)

    def due(self) -> bool:
        """Returns whether a row with the latest call is due. Waits for the device."""
        return bool(self._pending) and self._due(self._pending[-1].env_steps_after())

    def _due(self, env_steps: int) -> bool:
        now, (then, steps_then) = self._clock(), self._marks[-1]
        if env_steps - steps_then < self._every or now - then < self._seconds:
            return False
        if self._trained == 0:
            return True
        return self.trained(env_steps, self._updates_after(self._pending[-1])) - self._trained_then >= self._trained

    def trained(self, env_steps: int, updates: int) -> int:
        """Returns the learned steps after `env_steps` steps and `updates` updates; with replay, sampled steps."""
        return env_steps if self._rows_per_update is None else updates * self._rows_per_update

    def _updates_after(self, info: StepInfo) -> int:
        # learners with replay start late and count their gradient steps
        return int(np.asarray(info.metrics.get("train/updates", info.iteration * self._updates)))

    def state(self) -> dict[str, Any]:
        """Returns the state of the reporter, as JSON. Waits for the device."""
        pending = None
        if self._pending:
            last = self._pending[-1]
            pending = {
                "iteration": last.iteration,
                "env_steps": last.clock.env_steps,
                "agent_steps": last.clock.agent_steps,
                "metrics": {name: np.asarray(x).item() for name, x in last.metrics.items()},
                "episodes": episode_metrics.to_lists(episode_metrics.merge([info.episodes for info in self._pending])),
            }
        counts = {"env_steps": self.row_steps, "count": self.count, "trained": self._trained_then}
        more = {"extra": dict(self.extra), "once": dict(self.once), "pending": pending}
        return {**counts, "episodes": self.episodes, **more}

    def restore(self, state: Mapping[str, Any], timers: Any) -> None:
        """Restores the result of `state`."""
        number = lambda x: float(x) if isinstance(x, str) else x  # NaN and infinity are strings
        self._marks = collections.deque([(self._clock(), state["env_steps"])], maxlen=2)
        self.count, self._trained_then = state.get("count", 0), state.get("trained", 0)
        self.episodes, self._pending = state.get("episodes", 0), []
        self.extra.update({name: number(x) for name, x in state["extra"].items()})
        self.once = {name: [number(x) for x in values] for name, values in state.get("once", {}).items()}
        if state["pending"] is not None:
            p = state["pending"]
            report = episode_metrics.from_lists(p["episodes"])
            metrics = {name: number(x) for name, x in p["metrics"].items()}
            clock = Clock(p["env_steps"], p.get("agent_steps", p["env_steps"]))
            self._pending = [StepInfo(None, metrics, report, p["iteration"], clock, timers)]

    def flush(self) -> str | None:
        """Makes a row of the pending calls. Waits for the device."""
        return self._write(self._pending[-1].clock_after()) if self._pending else None

    @property
    def row_steps(self) -> int:
        """Returns the environment steps of the latest row, those before a resume included."""
        return self._marks[-1][1]

    def seconds(self) -> float:
        """Returns the seconds of training, those before a resume included."""
        return round(self._clock() - self._started, 3)

    def _write(self, clock: Clock) -> str | None:
        self._before()
        # one transfer for all calls, which takes as long as that of one number
        copies = jax.device_get([(info.metrics, info.episodes) for info in self._pending])
        self._pending = [info._replace(metrics=m, episodes=e) for info, (m, e) in zip(self._pending, copies)]
        last = self._pending[-1]
        now, (then, steps_then) = self._clock(), self._marks[0]
        log_start = time.perf_counter()
        is_positive = lambda name: any(np.max(info.metrics.get(name, 0.0)) > 0 for info in self._pending)
        if is_positive(NO_CHOICE):
            raise InputError(
                "the environment's action_mask allowed no action on a step that was not the last of its episode: "
                "`python -m jrl.check_env` shows where; an episode in which nothing can be done has to end"
            )
        if is_positive(BROKEN_STACKS):
            raise InputError(
                "replay.frame_stack: an observation was not the one before it with one more frame: it is no stack of "
                "the latest frames, and replay could not put it together again: use 1, which stores it whole"
            )
        silent = (NOT_FINITE, NO_CHOICE, BROKEN_STACKS, "train/updates")
        metrics = {name: float(np.asarray(x)) for name, x in last.metrics.items() if name not in silent}
        self._watch_replay(metrics)
        reports = [info.episodes for info in self._pending]
        episodes = episode_metrics.summarize(reports)
        if self._agents:
            episodes |= episode_metrics.summarize_agents(reports, self._agents, self.policies)
        self.count += 1
        clock = clock._replace(updates=self._updates_after(last), time_s=self.seconds())
        self._trained_then = self.trained(clock.env_steps, clock.updates)
        self.row = {
            "env_steps": clock.env_steps,
            **({"agent_steps": clock.agent_steps} if self._agents else {}),
            "iteration": last.iteration,
            "updates": clock.updates,
            "time_s": clock.time_s,
            "timestamp": round(time.time(), 3),
            "perf/steps_per_s": (clock.env_steps - steps_then) / max(now - then, 1e-9),
            **episodes,
            **metrics,
            **dict.fromkeys(_STAGES, 0.0),
            **last.timers.drain(),
            **self.extra,
            **self.once,
        }
        self.once = {}
        self.episodes += int(self.row["episode/count"])
        self._marks.append((now, clock.env_steps))
        self._pending = []
        reasons = [sink(self.row) for sink in self._sinks]
        last.timers.add("log", time.perf_counter() - log_start)
        return next(filter(None, reasons), None)

    def _watch_replay(self, metrics: Mapping[str, Any]) -> None:
        share = metrics.get(VALID_SHARE, 1.0)
        # absent agents have masked rows, too
        if share < _LEAST_VALID and not self._warned and not self._agents:
            self._warned = True
            warnings.warn(
                f"{VALID_SHARE} {share:.2f}: of what replay holds less than {_LEAST_VALID:.0%} can be learned from; "
                "the rest is ends of episodes, and places where an environment did not go on: longer rollouts "
                "(replay.train_every, rollout.length) leave fewer, and so do environments that fail less often",
                RuntimeWarning,
                stacklevel=2,
            )


# episodes of one step have a share of 0.5: a row and its reset row
_LEAST_VALID = 0.45


def is_not_finite(info: StepInfo) -> bool:
    """Returns whether an update of a call was not finite, see `jrl.learn.guard`. Waits for the call."""
    return bool(np.asarray(info.metrics.get(NOT_FINITE, 0.0)) > 0)


def explain_no_update(row: Mapping[str, Any], replay: ReplayConfig | None) -> str:
    """Returns why a run with this last row made no update; "": it made an update, or has no replay."""
    if replay is None or row.get("updates") != 0:
        return ""
    held, least = int(row.get("replay/size", 0)), replay.learning_starts
    if held < least:
        why = f"replay holds {held:,} rows, and learning begins with replay.learning_starts {least:,}"
        fix = "lower it, or raise stop.env_steps"
    else:
        why = f"replay holds {held:,} rows, and not one whole sample of each input"
        fix = "lower replay.n_step, network.max_seq_len or replay.burn_in, or give longer episodes"
    return f"updates: expected at least 1 in {row['env_steps']:,} steps, got 0: {why}: {fix}"


_STAGES = ("time/env", "time/act", "time/transfer", "time/collect", "time/update", "time/log")


def end_by_criteria(stop: Mapping[str, float], window: int = episode_metrics.WINDOW) -> Sink:
    """Returns a sink that ends the run when a metric reaches its target, except `env_steps`.

    `return` and `length` of episodes, agents and policies count once their `window` of episodes is full, since a mean
    over few episodes is noise.
    """
    wanted = {name: value for name, value in stop.items() if name != "env_steps"}

    def sink(row: dict[str, Any]) -> str | None:
        met = (name for name, value in wanted.items() if progress.is_met(name, row, value, window))
        return next((f"{name} {row[name]:.4g} reached {wanted[name]:g}" for name in met), None)

    return sink


def evaluation_ends(stop: Mapping[str, float], found: Mapping[str, Any]) -> bool:
    """Returns whether `end_by_criteria` ends the run by one of the metrics `evaluation/...`."""
    return any(found[name] >= value for name, value in stop.items() if name.startswith("evaluation/") and name in found)


def every_seconds(seconds: float) -> Callable[[StepInfo], bool]:
    """Returns a trigger every `seconds` of wall time, for events that do not change training."""
    due = time.monotonic() + seconds

    def is_due(info: StepInfo) -> bool:
        nonlocal due
        if time.monotonic() < due:
            return False
        due = time.monotonic() + seconds
        return True

    return is_due


def every_steps(steps: int, *, most: float = 0, env_steps: int = 0) -> Callable[[StepInfo], bool]:
    """Returns a trigger for the first call that reaches each multiple of `steps` environment steps.

    Args:
      steps: environment steps between two events.
      most: maximum environment steps of a call. The trigger waits only for a call that can reach the next multiple; a
        longer call is noticed one call later.
      env_steps: initial environment steps, the latest call's included.
    """
    due = env_steps - env_steps % steps + steps

    def is_due(info: StepInfo) -> bool:
        nonlocal due
        if info.env_steps + most < due or (now := info.env_steps_after()) < due:
            return False
        due = now - now % steps + steps
        return True

    return is_due
