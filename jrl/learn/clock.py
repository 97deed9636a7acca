"""Progress of a run, and what the loop tells after each call of its program."""

from typing import Any, NamedTuple

import numpy as np

from jrl.types import Episodes, Metrics


class Clock(NamedTuple):
    """Progress of a run: what budgets, reports, checkpoints and schedules count by."""

    env_steps: int = 0  # of environments, or of agents where rollout.count_steps_by says so
    agent_steps: int = 0  # of all agents; of environments with one agent the same
    updates: int = 0  # gradient steps; counted when a result row is made
    time_s: float = 0.0  # seconds of training; read when a result row is made

    def after(self, report: Episodes) -> "Clock":
        """Adds the steps of a report, of all devices and iterations in it. Waits for it."""
        total = lambda x: int(np.asarray(x).astype(np.int64).sum())
        steps = total(report.steps)
        agents = total(report.agents.steps) if isinstance(report.agents, Episodes) else steps
        return self._replace(env_steps=self.env_steps + steps, agent_steps=self.agent_steps + agents)


NO_STEPS = Clock()


class StepInfo(NamedTuple):
    """Facts that the loop tells after each call. Arrays may still be under way: reading them waits for the device."""

    state: Any  # a LoopState; valid until the generator is advanced, which donates it
    metrics: Metrics  # name -> scalar, mean over the call's iterations
    episodes: Episodes  # of this call
    iteration: int  # iterations done, this call's included
    clock: Clock  # exact, up to the call before this one, so that counting never waits for the call just begun
    timers: Any  # metrics.timers.Timers

    @property
    def env_steps(self) -> int:
        """Returns environment steps up to the call before this one."""
        return self.clock.env_steps

    def clock_after(self) -> Clock:
        """Returns the clock up to and including this call. Waits for it."""
        return self.clock.after(self.episodes)

    def env_steps_after(self) -> int:
        """Returns the environment steps up to and including this call. Waits for it."""
        return self.clock_after().env_steps
