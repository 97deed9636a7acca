"""The config of a run: sections, reading and writing, derived numbers, combinations that are refused."""

from jrl.config.plan import Sizes
from jrl.config.reader import (
    DROP,
    algo_name,
    from_dict,
    is_ours,
    load,
    mapping,
    merge,
    override,
    plain,
    read,
    renamed,
    to_dict,
    to_yaml,
    without_loss,
    write,
)
from jrl.config.sections import (
    CheckpointConfig,
    CustomConfig,
    DevicesConfig,
    EnvConfig,
    EnvRunnersConfig,
    EvaluationConfig,
    MultiAgentConfig,
    ReplayConfig,
    RolloutConfig,
    RunConfig,
    RunSettings,
    RuntimeConfig,
)
from jrl.errors import InputError
from jrl.fields.hyper import NetworkConfig

__all__ = [
    "DROP", "CheckpointConfig", "CustomConfig", "DevicesConfig", "EnvConfig", "EnvRunnersConfig", "EvaluationConfig",
    "InputError", "MultiAgentConfig", "NetworkConfig", "ReplayConfig", "RolloutConfig", "RunConfig", "RunSettings",
    "RuntimeConfig", "Sizes", "algo_name", "from_dict", "is_ours", "load", "mapping", "merge", "override", "plain",
    "read", "renamed", "to_dict", "to_yaml", "without_loss", "write",
]  # fmt: skip
