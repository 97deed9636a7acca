"""Plan of a run: its sizes once the environments and devices are known, and its policies."""

import dataclasses
import functools
import math

from jax.sharding import Mesh

from jrl import agents
from jrl.config import Sizes
from jrl.learn import parallel
from jrl.types import EnvSpec

_ROWS_ON_GPU = 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class Plan(Sizes):
    """Sizes and policies of a run or an env runner, made once and passed on."""

    spec: EnvSpec  # environments of one pool
    devices: parallel.Devices | None = None  # devices of the run; None: an env runner, which learns nothing

    @functools.cached_property
    def policies(self) -> agents.Policies:
        return agents.make(self.cfg, self.spec)

    @functools.cached_property
    def learners(self) -> int:
        """Returns the number of devices that learn."""
        return 1 if self.devices is None else self.mesh.devices.size

    @property
    def mesh(self) -> Mesh:
        """Returns the devices that learn."""
        assert self.devices is not None
        return self.devices.learners

    @property
    def on_gpu(self) -> bool:
        """Returns whether the devices that learn are GPUs."""
        return self.devices is not None and self.mesh.devices.flat[0].platform == "gpu"

    @property
    def rows_per_call(self) -> int:
        """Returns the most rows in one call of a fused program; more on a GPU, which is done with the usual number."""
        most = super().rows_per_call
        return max(most, min(_ROWS_ON_GPU, 16 * self.rows)) if self.on_gpu else most

    @functools.cached_property
    def pools(self) -> int:
        """Returns the number of parts of the environments: env runners, or devices that act."""
        return self.num_pools(self.learners)

    @functools.cached_property
    def whole_episode_rows(self) -> int:
        """Returns the rows of a rollout of whole episodes beyond `length`; 0 if episodes may be cut.

        Raises:
          InputError: there is no known limit of an episode's length.
        """
        if self.cfg.rollout.batch_mode == "truncate_episodes":
            return 0
        from jrl.rollout import complete

        longest = complete.longest_episode(self.spec.max_episode_steps)
        # whole minibatches of whole sequences, of each policy, and of a size that can be cut into equal parts
        each = [Sizes(group.cfg) for group in self.policies.groups]
        sequence = lambda own: (own.cfg.network.recurrent and own.cfg.network.max_seq_len) or 1
        unit = math.lcm(*((own.passes.num_minibatches or 1) * sequence(own) for own in each), 16)
        return -(-(self.length + longest) // unit) * unit - self.length

    @functools.cached_property
    def learned_length(self) -> int:
        """Returns the steps of a rollout as it is learned from."""
        return self.length + self.whole_episode_rows

    @functools.cached_property
    def is_refilled(self) -> bool:
        """Returns whether a resumed run fills its replay anew."""
        return self.cfg.replay is not None and self.cfg.checkpoint.replay == "none"
