"""Action values by several networks of one shape, stacked: every leaf of the parameters has an axis of critics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jrl.networks import Head, NetworkConfig, build
from jrl.networks.dense import Dense
from jrl.networks.torsos import TORSOS, Mlp, is_image, kernel_init, to_float
from jrl.types import Array, Discrete, EnvSpec, Key, PyTree, Space


class Critics(NamedTuple):
    """C critics as two pure functions; `jax.tree.map(lambda x: x[i], params)` is the i-th."""

    init: Callable[[Key], PyTree]  # key -> params, leaves [C, ...]
    # (params, obs[N, *], action[N, *]) -> f32 [C, N]; for Discrete actions (params, obs[N, *]) -> f32 [C, N, A]
    apply: Callable[..., Array]


class _Critic(nn.Module):
    """Dense layers over features and action; the features are the observation, or for images those of a torso."""

    space: Space
    cfg: NetworkConfig

    @nn.compact
    def __call__(self, obs, action):
        x = to_float(self.space, obs)
        if is_image(self.space) and self.cfg.torso != "mlp":
            torso = TORSOS["nature_cnn" if self.cfg.torso == "auto" else self.cfg.torso]
            x = torso(self.cfg, name="torso")(x)
        rows = x.shape[0]
        x = jnp.concatenate([x.reshape(rows, -1), action.reshape(rows, -1)], -1)
        x = Mlp(self.cfg, name="layers")(x)
        return Dense(1, dtype=self.cfg.dtype, kernel_init=kernel_init(self.cfg, 1.0), name="head")(x)


def build_critics(spec: EnvSpec, cfg: NetworkConfig, num_critics: int) -> Critics:
    """Builds `num_critics` action-value networks.

    For Discrete actions each is `networks.build` with one output per action. Else the action is an input beside the
    observation: in front of the layers `cfg.hidden`, and behind the convolutions where the observation is an image.

    One matmul with a batch axis evaluates all of them; on two CPU cores it takes as long as one after the other (two
    critics of 256 x 256, batch 256: within 4% either way), on a GPU it is one kernel.

    Args:
      spec: the environment's spaces.
      cfg: torso, widths, activation; `shared` is not read.
      num_critics: C, at least 1.
    Returns:
      Critics.
    Raises:
      InputError: the torso does not fit the observation space.
    """
    network = build(spec, cfg, {"value": Head(spec.action.n if isinstance(spec.action, Discrete) else 1)})

    def stacked(init: Callable[[Key], PyTree]) -> Callable[[Key], PyTree]:
        return lambda key: jax.vmap(init)(jax.random.split(key, num_critics))

    if isinstance(spec.action, Discrete):
        per_action = lambda params, obs: network.apply(params, obs, "value")[0]
        return Critics(stacked(network.init), jax.vmap(per_action, (0, None)))

    module, observation, action = _Critic(spec.observation, cfg), spec.observation, spec.action

    def init(key: Key) -> PyTree:
        obs = jnp.zeros((1, *observation.shape), observation.dtype)
        return jax.jit(module.init)(key, obs, jnp.zeros((1, *action.shape), jnp.float32))["params"]

    def apply(params: PyTree, obs, action) -> Array:
        one: Any = lambda params, obs, action: module.apply({"params": params}, obs, action)
        count = jax.tree.leaves(params)[0].shape[0]  # of all critics, or of some
        repeat = lambda x: jnp.broadcast_to(x[None], (count, *x.shape))
        # vectors are repeated: the product of one input for all and a kernel for each would be transposed afterwards
        each = (0, None, 0) if is_image(observation) else (0, 0, 0)
        q = jax.vmap(one, each)(params, obs if is_image(observation) else repeat(obs), repeat(action))
        return q[..., 0].astype(jnp.float32)

    return Critics(stacked(init), apply)


__all__ = ["Critics", "build_critics"]
