"""EnvConfig, the `env` section of a config, which `jrl.envs.make` takes. Imports no jax: configs are read before it."""

import dataclasses
from typing import Annotated, Any

from annotated_types import Interval

from jrl.fields.bounds import MOST_STEPS, Backend, Count, Few, Name, Positive
from jrl.fields.validation import Row, section

ASYNCHRONOUS = ("env.batch_size", "env.batch_wait_ms")  # keys of environments that do not wait for each other
PROCESSES = "env.remote_worker_envs"  # key of environments with a process each
# names used by other libraries -> ours, as `settings.sections.SYNONYMS`
SYNONYMS = {
    "env_id": "env.id", "env_name": "env.id", "env_config": "env.options", "env_kwargs": "env.options",
    "remote_env_batch_wait_ms": "env.batch_wait_ms", "framestack": "env.frame_stack", "num_stack": "env.frame_stack",
    "action_mask_key": "env.action_mask_info", "reward_scaling": "env.reward_scale",
}  # fmt: skip


@section
class EnvConfig:
    """The vector of environments."""

    # as its library names it: CartPole-v1, Pong-v5, HalfCheetah-v4; it may be left out where data are learned from
    id: Name = ""
    backend: Backend = "auto"  # who steps it; auto: the first that has the id
    num_envs: Annotated[int, Interval(ge=1, le=MOST_STEPS)] = 8  # environments in all, over all devices
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # passed to the environment as they are
    normalize_actions: bool = True  # the policy's actions lie in [-1, 1] and are mapped to the bounds
    clip_actions: bool = True  # clip actions to the bounds
    # null or false: as they are; true: the sign; a number c: to [-c, c]; [low, high]. Reported returns stay unclipped
    clip_rewards: bool | Positive | tuple[float, float] | None = None
    reward_scale: float = 1.0  # factor of the rewards that the learner sees, after clip_rewards
    frame_stack: Few = 1  # observations are the latest so many, from the first of an episode on
    # entry of the infos that says which actions can be taken; it joins the observation as action_mask. null: the entry
    # action_mask, where the environments have it
    action_mask_info: Name | None = None
    # EnvPool, from the host: environments per step; fewer than a pool has: act on those that are ready first
    batch_size: Count | None = None
    remote_worker_envs: bool = False  # Gymnasium: each environment in a process of its own
    # of worker processes: act once one is ready and so many milliseconds have passed for more; null: wait for all
    batch_wait_ms: Annotated[float, Interval(ge=0, le=1e9)] | None = None
    horizon: Count | None = None  # steps after which an episode is ended; null: the environment's own limit
    soft_horizon: bool = False  # there the episode ends for learner and statistics only: the environment goes on
    # null: true ends are ends, at time limits and the horizon the learner bootstraps; false: every end is one;
    # true: none is, the learner always bootstraps
    no_done_at_end: bool | None = None

    @property
    def waits(self) -> bool:
        """Returns whether all environments wait for each other, unless a pool of EnvPool has only `batch_size`."""
        return self.batch_size is None and self.batch_wait_ms is None

    @property
    def num_processes(self) -> int:
        """Returns the number of processes that step environments beside this one."""
        return self.num_envs if self.remote_worker_envs else 0

    @property
    def limit(self) -> int | None:
        """Returns the steps after which an environment begins anew, whatever its own limit; None: its own alone."""
        return None if self.soft_horizon else self.horizon

    def waiting(self, num_envs: int) -> "EnvConfig":
        """Returns the section for so many environments, which wait for each other."""
        return dataclasses.replace(self, num_envs=num_envs, batch_size=None, batch_wait_ms=None)


REFUSED = (
    Row(
        "env.clip_rewards",
        lambda c: (
            isinstance(c.env.clip_rewards, tuple)
            and not c.env.clip_rewards[0] < c.env.clip_rewards[1]
            and f"env.clip_rewards: expected [low, high] with low < high, got {list(c.env.clip_rewards)}"
        ),
    ),
    Row(
        "env.action_mask_info",
        lambda c: c.env.action_mask_info == "",
        "env.action_mask_info: expected the name of an entry of the infos, or null, got ''",
    ),
    Row(
        "env.soft_horizon env.horizon",
        lambda c: c.env.soft_horizon and c.env.horizon is None,
        "env.soft_horizon: without env.horizon there is none: set it, e.g. env.horizon=100, or leave this out",
    ),
    Row(
        "env.batch_wait_ms env.remote_worker_envs",
        lambda c: c.env.batch_wait_ms is not None and not c.env.remote_worker_envs,
        "env.batch_wait_ms: only worker processes are waited for: set env.remote_worker_envs, or leave it out",
    ),
)
