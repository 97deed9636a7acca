"""The config of a run: sections, reading and writing, derived numbers, refused combinations."""

from jrl.config.plan import Sizes, discount_by_action, with_population
from jrl.config.reader import (
    DROP,
    algo_name,
    from_dict,
    is_jrl_config,
    load,
    mapping,
    merge,
    override,
    plain,
    read,
    to_dict,
    to_yaml,
    with_present_names,
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
    "RuntimeConfig", "Sizes", "algo_name", "discount_by_action", "from_dict", "is_jrl_config", "load", "mapping",
    "merge", "override", "plain", "read", "to_dict", "to_yaml", "with_population", "with_present_names", "without_loss",
    "write",
]  # fmt: skip
