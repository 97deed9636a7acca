"""The config of a run: sections, reading and writing, derived numbers, combinations that are refused."""

from jrl.config.reader import (
    DROP as DROP,
)
from jrl.config.reader import (
    CheckpointConfig as CheckpointConfig,
)
from jrl.config.reader import (
    CustomConfig as CustomConfig,
)
from jrl.config.reader import (
    DevicesConfig as DevicesConfig,
)
from jrl.config.reader import (
    EnvConfig as EnvConfig,
)
from jrl.config.reader import (
    EnvRunnersConfig as EnvRunnersConfig,
)
from jrl.config.reader import (
    EvaluationConfig as EvaluationConfig,
)
from jrl.config.reader import (
    InputError as InputError,
)
from jrl.config.reader import (
    MultiAgentConfig as MultiAgentConfig,
)
from jrl.config.reader import (
    NetworkConfig as NetworkConfig,
)
from jrl.config.reader import (
    ReplayConfig as ReplayConfig,
)
from jrl.config.reader import (
    RolloutConfig as RolloutConfig,
)
from jrl.config.reader import (
    RunConfig as RunConfig,
)
from jrl.config.reader import (
    RunSettings as RunSettings,
)
from jrl.config.reader import (
    RuntimeConfig as RuntimeConfig,
)
from jrl.config.reader import (
    algo_name as algo_name,
)
from jrl.config.reader import (
    batch_plan as batch_plan,
)
from jrl.config.reader import (
    from_dict as from_dict,
)
from jrl.config.reader import (
    is_ours as is_ours,
)
from jrl.config.reader import (
    load as load,
)
from jrl.config.reader import (
    mapping as mapping,
)
from jrl.config.reader import (
    merge as merge,
)
from jrl.config.reader import (
    override as override,
)
from jrl.config.reader import (
    plain as plain,
)
from jrl.config.reader import (
    read as read,
)
from jrl.config.reader import (
    renamed as renamed,
)
from jrl.config.reader import (
    to_dict as to_dict,
)
from jrl.config.reader import (
    to_yaml as to_yaml,
)
from jrl.config.reader import (
    without_loss as without_loss,
)
from jrl.config.reader import (
    write as write,
)
