"""EnvConfig, the `env` section of a config, an argument of `jrl.envs.make`. Imports no jax: configs are read first."""

import dataclasses
import re
from typing import Annotated, Any, Literal

from annotated_types import Interval

from jrl.fields.bounds import MOST_STEPS, Backend, Count, Few, Name, NonNegative, Positive
from jrl.fields.validation import Row, section

ASYNCHRONOUS = ("env.batch_size", "env.batch_wait_ms")  # keys of environments that do not wait for each other
Delay = Annotated[int, Interval(ge=0, le=1000)]  # steps
PROCESSES = "env.remote_worker_envs"  # key of environments in worker processes
# names of other libraries -> keys of jrl; `config.sections.SYNONYMS` has the rest
SYNONYMS = {
    "env_id": "env.id", "env_name": "env.id", "env_config": "env.options", "env_kwargs": "env.options",
    "remote_env_batch_wait_ms": "env.batch_wait_ms", "framestack": "env.frame_stack", "num_stack": "env.frame_stack",
    "action_mask_key": "env.action_mask_info", "reward_scaling": "env.reward_scale",
}  # fmt: skip


@section
class EnvConfig:
    """The vector of environments."""

    # name in its library: CartPole-v1, Pong-v5, HalfCheetah-v4; optional if the run learns from data
    id: Name = ""
    backend: Backend = "auto"  # library that steps the environments; auto: the first that has the id
    num_envs: Annotated[int, Interval(ge=1, le=MOST_STEPS)] = 8  # environments in total, over all devices
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # arguments of the environment
    normalize_actions: bool = True  # the policy's actions lie in [-1, 1] and are mapped to the bounds
    clip_actions: bool = True  # clip actions to the bounds
    # null: sign for Atari only; false: not clipped; true: the sign; a number c: to [-c, c]; [low, high]. Reported
    # returns stay unclipped
    clip_rewards: bool | Positive | tuple[float, float] | None = None
    reward_scale: float = 1.0  # factor of the learner's rewards, after clip_rewards
    frame_stack: Few = 1  # number of latest observations that the policy reads; the first of an episode is repeated
    # entry of the infos with the mask of allowed actions; it joins the observation as action_mask. null: the entry
    # action_mask, if the environments have it
    action_mask_info: Name | None = None
    # EnvPool, from the host: environments per step; fewer than num_envs: act on the ones that are ready first
    batch_size: Count | None = None
    remote_worker_envs: bool = False  # Gymnasium: each environment in its own process
    # with worker processes: milliseconds to wait for more environments once one is ready; null: wait for all
    batch_wait_ms: Annotated[float, Interval(ge=0, le=1e9)] | None = None
    # suites in JAX: start states of environments that ended. each: a new one for each; shared(k): k new ones, shared by
    # the environments that ended on a step; first: the first state of each
    reset: Name = "each"
    # environments in JAX whose state, observation or reward is not finite after a step. reset: begin a new episode, and
    # mask the step; stop: end the run with an error; null: not checked
    on_nonfinite: Literal["reset", "stop"] | None = None
    # steps of the environment with each action, fewer at the end of an episode; their rewards are summed. env_steps and
    # all other counts are actions; algo.gamma, horizon and limits of the environment stay per step of the environment
    action_repeat: Count = 1
    # actions that the policy chooses at once, for consecutive steps: its action is [n, *] for the environment's [*], a
    # Box. Fewer are taken at the end of an episode; the rewards are summed, and all counts are as with action_repeat
    action_chunk: Few = 1
    # ranges from which each environment draws these numbers at every reset: {mass: [0.5, 2.0]}. MuJoCo Playground: true
    # (the environment's own function) or package.module:function, which draw a model for each environment
    randomize: dict[str, tuple[float, float]] | bool | Name | None = None
    observe_task: bool = False  # observations have the drawn numbers, an item task [k], each range mapped to [-1, 1]
    # standard deviation of Gaussian noise, added to observations of floats; a mapping: to the named items only
    observation_noise: NonNegative | dict[str, NonNegative] = 0.0
    # steps between an action and its effect; [low, high]: drawn for each episode
    action_delay: Delay | tuple[Delay, Delay] = 0
    horizon: Count | None = None  # steps after which an episode ends; null: the environment's own limit
    soft_horizon: bool = False  # the horizon ends the episode for learner and statistics; the environment continues
    # null: bootstrap at time limits and the horizon, not at terminations; false: bootstrap at no end; true: bootstrap
    # at every end
    no_done_at_end: bool | None = None

    @property
    def waits(self) -> bool:
        """Returns whether all environments wait for each other."""
        return self.batch_size is None and self.batch_wait_ms is None

    @property
    def steps_per_action(self) -> int:
        """Returns the steps of the environment with each action of the policy, fewer at the end of an episode."""
        return self.action_repeat * self.action_chunk

    @property
    def num_processes(self) -> int:
        """Returns the number of worker processes."""
        return self.num_envs if self.remote_worker_envs else 0

    @property
    def limit(self) -> int | None:
        """Returns the steps after which an environment is reset, beside its own limit; None: no such limit."""
        return None if self.soft_horizon else self.horizon

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Returns the ranges of `randomize`; {}: none, or a function of models."""
        return self.randomize if isinstance(self.randomize, dict) else {}

    @property
    def longest_delay(self) -> int:
        """Returns the largest delay of an action, in steps."""
        return self.action_delay[1] if isinstance(self.action_delay, tuple) else self.action_delay

    def waiting(self, num_envs: int) -> "EnvConfig":
        """Returns the section for `num_envs` environments that wait for each other."""
        return dataclasses.replace(self, num_envs=num_envs, batch_size=None, batch_wait_ms=None)


# fmt: off
_RESET = re.compile(r"each|first|shared\([1-9]\d{0,6}\)")
REFUSED = (
    Row("env.reset", lambda c: (
            not _RESET.fullmatch(c.env.reset)
            and f"env.reset: expected each, first or shared(k) such as shared(16), got {c.env.reset!r}"
        )),
    Row("env.randomize", lambda c: [
            f"env.randomize.{name}: expected [low, high] with low < high, got {list(ends)}"
            for name, ends in c.env.ranges.items() if not ends[0] < ends[1]
        ]),
    Row("env.randomize env.options", lambda c: [
            f"env.randomize.{name}: env.options.{name} sets this number, too: leave one of them out"
            for name in c.env.ranges if name in c.env.options
        ]),
    Row("env.randomize env.reset",
        lambda c: c.env.randomize and (c.env.reset.startswith("shared") or (c.env.ranges and c.env.reset != "each")),
        "env.reset: expected each with env.randomize (or first, where models are drawn once), because a start state "
        "belongs to the numbers that it was made with: leave env.reset out"),
    Row("env.observe_task env.randomize", lambda c: c.env.observe_task and not c.env.ranges,
        "env.observe_task: expected ranges in env.randomize, such as {mass: [0.5, 2.0]}, which say which numbers are "
        "observed: set them, or leave env.observe_task out"),
    Row("env.action_delay", lambda c: (
            isinstance(c.env.action_delay, tuple)
            and not c.env.action_delay[0] <= c.env.action_delay[1]
            and f"env.action_delay: expected [low, high] with low <= high, got {list(c.env.action_delay)}"
        )),
    Row("env.clip_rewards", lambda c: (
            isinstance(c.env.clip_rewards, tuple)
            and not c.env.clip_rewards[0] < c.env.clip_rewards[1]
            and f"env.clip_rewards: expected [low, high] with low < high, got {list(c.env.clip_rewards)}"
        )),
    Row("env.action_mask_info", lambda c: c.env.action_mask_info == "",
        "env.action_mask_info: expected the name of an entry of the infos, or null, got '': use null"),
    Row("env.soft_horizon env.horizon", lambda c: c.env.soft_horizon and c.env.horizon is None,
        "env.soft_horizon: expected env.horizon, got null: set env.horizon=100, or leave env.soft_horizon out"),
    Row("env.batch_wait_ms env.remote_worker_envs",
        lambda c: c.env.batch_wait_ms is not None and not c.env.remote_worker_envs,
        "env.batch_wait_ms: expected worker processes, got none: set env.remote_worker_envs=true, or leave "
        "env.batch_wait_ms out"),
)
# fmt: on
