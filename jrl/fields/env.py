"""EnvConfig, the `env` section of a config, an argument of `jrl.envs.make`. Imports no jax: configs are read first."""

import dataclasses
import re
from typing import Annotated, Any, Literal

from annotated_types import Interval

from jrl.fields.bounds import MOST_STEPS, Backend, Count, Few, Name, Positive
from jrl.fields.validation import Row, section

ASYNCHRONOUS = ("env.batch_size", "env.batch_wait_ms")  # keys of environments that do not wait for each other
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
    def num_processes(self) -> int:
        """Returns the number of worker processes."""
        return self.num_envs if self.remote_worker_envs else 0

    @property
    def limit(self) -> int | None:
        """Returns the steps after which an environment is reset, beside its own limit; None: no such limit."""
        return None if self.soft_horizon else self.horizon

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
