"""What of a run's environments and loggers can be refused before one is made."""

from jrl import envs
from jrl.errors import InputError
from jrl.metrics import loggers
from jrl.settings.config import RunConfig
from jrl.settings.plan import num_learners, num_pools


def check_env(cfg: RunConfig) -> None:
    """Checks the environments and loggers of a run without making one. Imports the environments' library.

    Raises:
      InputError: what is wrong with them.
      ImportError: that library is not there.
    """
    env, runners = cfg.env, cfg.env_runners
    errors = envs.check(
        env.id,
        env.backend,
        env.options,
        num_envs=env.num_envs // num_pools(cfg, num_learners(cfg) or 1),
        batch_size=env.batch_size,
        remote_worker_envs=env.remote_worker_envs,
        batch_wait_ms=env.batch_wait_ms,
        restart_failed=runners.restart_failed_sub_environments,
        step_timeout_s=runners.env_step_timeout_s,
        horizon=env.horizon,
        soft_horizon=env.soft_horizon,
        action_mask_info=env.action_mask_info,
        frame_stack=env.frame_stack,
    )
    errors += loggers.check(cfg.run.log)
    if errors:
        raise InputError(*errors)
