"""Checks of a run before it begins, for commands that begin none."""

from jrl.config import RunConfig
from jrl.config.plan import num_learners, num_pools
from jrl.errors import InputError
from jrl.metrics import loggers
from jrl.run import build_policies
from jrl.run.build_collect import check_environments


def check(cfg: RunConfig) -> RunConfig:
    """Checks the environments and loggers of a run without making one. Imports the environments' library.

    Returns:
      The config, with what only the environment can say of its agents.
    Raises:
      InputError: what is wrong with them.
      ImportError: that library is not there.
    """
    errors = loggers.check(cfg.run.log)
    try:
        check_environments(cfg, num_pools(cfg, num_learners(cfg) or 1))
    except InputError as e:
        errors += e.errors
    if errors:
        raise InputError(*errors)
    return build_policies.resolved(cfg)
