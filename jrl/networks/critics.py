"""Action values by several networks of one shape, stacked: every leaf of the parameters has an axis of critics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jrl import spaces
from jrl.networks import Head, NetworkConfig, build, check, cores, encoded, read, with_core
from jrl.networks.dense import Dense
from jrl.networks.torsos import Mlp, is_image
from jrl.types import Array, Discrete, EnvSpec, Key, PyTree, Space, Window, element


class Critics(NamedTuple):
    """C critics as pure functions; `jax.tree.map(lambda x: x[i], params)` is the i-th."""

    init: Callable[[Key], PyTree]  # key -> params, leaves [C, ...]
    # (params, obs [N, *], action [N, *]) -> f32 [C, N]; for Discrete actions (params, obs [N, *]) -> f32 [C, N, A].
    # With a core (params, Window [N, L] of carry [C, N, ...], action [N, L, *]) -> [C, N, L], or [C, N, L, A]
    apply: Callable[..., Array]
    carry: Callable[[PyTree, int], PyTree]  # (params, N) -> memory at an episode's start [C, N, ...]; () without a core
    # with a core: (params, Window of carry [C, N, ...]) -> (nothing, the memory after it)
    unroll: Callable[[PyTree, Window], tuple[None, PyTree]]


class _Critic(nn.Module):
    """Dense layers over features and action; the features are the observation, or what encoders make of it."""

    space: Space
    cfg: NetworkConfig

    @nn.compact
    def __call__(self, obs, action, carry=None, reset=None):
        """(value [rows, 1], memory); without an action the memory alone."""
        x = encoded(self, self.cfg, self.space, read(self.cfg, self.space, obs), "torso")
        if carry is not None:
            x, carry = with_core(self.cfg, self, x, "core", carry, reset)
        if action is None:
            return None, carry
        rows = x.shape[0]
        x = jnp.concatenate([x, action.reshape(rows, -1)], -1)
        x = Mlp(self.cfg, name="layers")(x)
        return Dense(1, weights=self.cfg.init, name="head")(x), carry


def build_critics(spec: EnvSpec, cfg: NetworkConfig, num_critics: int) -> Critics:
    """Builds `num_critics` action-value networks.

    For Discrete actions each is `networks.build` with one output per action. Else the action is an input beside what
    encoders and core make of the observation: in front of the layers `cfg.hidden`.

    Critics read all of an observation, `cfg.value_inputs` too. They do not act, so nobody knows their memory before a
    window: `carry` is that of an episode's start, and `unroll` runs on from there.

    One matmul with a batch axis evaluates all of them; on two CPU cores it takes as long as one after the other (two
    critics of 256 x 256, batch 256: within 4% either way), on a GPU it is one kernel.

    Args:
      spec: the environment's spaces.
      cfg: encoders, widths, activation, core; `shared` is not read.
      num_critics: C, at least 1.
    Returns:
      Critics.
    Raises:
      InputError: the network does not fit the observation space.
    """
    space, action = spaces.seen(spec.observation), spec.action
    start = cores.make(cfg.core, 1).carry if cfg.recurrent else None

    def stacked(init: Callable[[Key], PyTree]) -> Callable[[Key], PyTree]:
        return lambda key: jax.vmap(init)(jax.random.split(key, num_critics))

    def repeated(params: PyTree, tree: PyTree) -> PyTree:
        count = jax.tree.leaves(params)[0].shape[0]  # of all critics, or of some
        return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (count, *x.shape)), tree)

    if isinstance(action, Discrete):
        network = build(spec, cfg, {"value": Head(action.n, privileged=True)})

        def each(fn, params, obs):
            axes: Any = Window(None, 0, None)  # type: ignore[arg-type]  # axes, where types say arrays
            return jax.vmap(fn, (0, axes if isinstance(obs, Window) else None))(params, obs)

        return Critics(
            init=stacked(network.init),
            apply=lambda params, obs: each(lambda p, obs: network.apply(p, obs, "value")[0], params, obs),
            carry=lambda params, batch_size: repeated(params, network.carry(batch_size)),
            unroll=lambda params, window: (None, each(lambda p, w: network.unroll(p, w, "value")[1], params, window)),
        )

    check(space, cfg)
    module = _Critic(space, cfg.of_critics())
    image = any(is_image(leaf) for _, leaf in spaces.leaves(space))

    def init(key: Key) -> PyTree:
        zeros = lambda like: jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), element(like))
        memory = None if start is None else start(1)
        return jax.jit(module.init)(key, zeros(space), zeros(action), memory)["params"]

    def run(params: PyTree, obs, action) -> tuple[Any, PyTree]:
        rows, carry, reset = (obs.obs, obs.carry, obs.reset) if isinstance(obs, Window) else (obs, None, None)
        seen = spaces.split_mask(spec.observation, rows)[0]
        # vectors are repeated: the product of one input for all and a kernel for each would be transposed afterwards
        seen, axis = (seen, None) if image else (repeated(params, seen), 0)
        one = lambda params, obs, action, carry: module.apply({"params": params}, obs, action, carry, reset)
        return jax.vmap(one, (0, axis, 0, 0))(params, seen, repeated(params, action), carry)

    def apply(params: PyTree, obs, action) -> Array:
        q = run(params, obs, action)[0][..., 0]
        return q.reshape(q.shape[0], *obs.reset.shape) if isinstance(obs, Window) else q

    return Critics(
        init=stacked(init),
        apply=apply,
        carry=lambda params, batch_size: () if start is None else repeated(params, start(batch_size)),
        unroll=lambda params, window: run(params, window, None),
    )


__all__ = ["Critics", "build_critics"]
