"""Networks as bundles of pure functions: `build(spec, config, heads) -> Network(init, apply, ...)`.

    net = build(spec, NetworkConfig(), {"policy": Head(4, 0.01), "value": Head(1)})
    params = net.init(key)
    logits, value = net.apply(params, obs)                              # obs [..., *] -> [..., 4], [..., 1]

A recurrent network (`config.core`) acts one step at a time. It learns from a Window of consecutive steps instead of
single observations:

    (logits, value), carry = net.step(params, obs, net.carry(batch_size))   # obs [B, *]
    logits, value = net.apply(params, window)                           # window.obs [N, L, *] -> [N, L, 4], [N, L, 1]
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jrl import spaces
from jrl.errors import did_you_mean
from jrl.fields.hyper import RESIDUAL, NetworkConfig, Options
from jrl.networks.dense import Dense
from jrl.networks.encoders import (
    CNNS,
    DENSE,
    Encoders,
    activated,
    choose,
    cnn,
    default,
    dense_options,
    flattened,
    is_custom,
    is_image,
    last_layer,
    layers,
    single,
    to_float,
)
from jrl.types import Array, EnvSpec, InputError, Key, PyTree, Space, Window, element

if TYPE_CHECKING:
    from jrl.networks import cores

__all__ = ["Head", "Network", "NetworkConfig", "build", "encoded", "is_image", "with_core"]


class Head(NamedTuple):
    """One output of the network: `size` numbers per observation, last layer initialised with gain `scale`.

    With `noise` its layers are `noisy.NoisyDense`, with `noise` as initial deviation.
    """

    size: int
    scale: float = 1.0
    noise: Any = None  # scalar, may be traced; None: ordinary layers
    privileged: bool = False  # reads `NetworkConfig.value_inputs`, too: for values and critics, not for policies


class Network(NamedTuple):
    """Network as pure functions, whatever library it is written in.

    Outputs are f32 [..., size], one per name; without names one per head. `key` draws the noise of noisy layers, and
    dropout except in `step`; None: neither. `valid` [...] bool makes `apply` a learning pass of batch_renorm: it marks
    the rows of the batch's statistics. None: the running statistics normalise.
    """

    init: Callable[[Key], PyTree]  # key -> params
    # (params, obs [..., *], *names, key=None, valid=None) -> outputs [..., size]; with a core (params, Window, ...) ->
    # [N, L, size]
    apply: Callable[..., tuple[Array, ...]]
    carry: Callable[[int], PyTree]  # batch_size -> recurrent state at an episode's start [B, ...]; () without a core
    # (params, obs [B, *], carry, *names, key=None) -> (outputs [B, size], carry)
    step: Callable[..., tuple[tuple[Array, ...], PyTree]]
    # (params, Window, *names, key=None) -> (outputs [N, L, size], recurrent state after the window)
    unroll: Callable[..., tuple[tuple[Array, ...], PyTree]]


def read(cfg: NetworkConfig, space: Space, obs: PyTree) -> PyTree:
    """Converts an observation [..., *] to floats, once for all networks that read it."""
    leaf = single(space, cfg)
    if is_custom(cfg):
        return obs
    if cfg.flatten:
        return flattened(space, cfg, obs)
    return obs if leaf is None else to_float(leaf, jax.tree.leaves(obs)[0], cfg.image_max)


def unprivileged(space: Space, cfg: NetworkConfig) -> tuple[Space, NetworkConfig]:
    """Returns `space` without `cfg.value_inputs`, and the config of networks that read this part."""
    encoders = {path: name for path, name in cfg.encoders.items() if not spaces.is_within(path, cfg.value_inputs)}
    public = spaces.without(space, cfg.value_inputs)
    return public, replace(cfg, value_inputs=(), encoders=Options(encoders))


def encoded(module: nn.Module, cfg: NetworkConfig, space: Space, x: PyTree, name: str, valid: Any = None) -> Array:
    """Returns observations, prepared by `read`, as vectors [N, F]: the output of the encoders or of the user's torso.

    Call it within the compact call of `module`; the encoder is its child `name`.
    """
    if is_custom(cfg):
        from jrl.networks import custom

        return custom.features(module, cfg, space, x, name)
    leaf = single(space, cfg)
    if leaf is None and not cfg.flatten:
        return Encoders(space, cfg, name=f"{name}_encoders")(x, valid)
    encoder = "flat" if leaf is None else default(leaf, cfg)
    return cnn(encoder)(cfg, name=name)(x) if encoder in CNNS else x.reshape(x.shape[0], -1)


def features(module: nn.Module, cfg: NetworkConfig, space: Space, x: PyTree, name: str, valid: Any = None) -> Array:
    """Returns the output of the dense layers after `encoded`. A CNN for a single image and a user's torso have none."""
    leaf = single(space, cfg)
    is_complete = is_custom(cfg) or (leaf is not None and default(leaf, cfg) in CNNS)
    x = encoded(module, cfg, space, x, name, valid)
    return x if is_complete else layers(cfg, name)(x, valid=valid)


def with_core(cfg: NetworkConfig, module: nn.Module, x: Array, name: str, carry: PyTree, reset: Any):
    """Applies the recurrent core, `module`'s child `name`, to `x` [rows, F]: (y [rows, core size], carry).

    Args:
      carry: recurrent state of each row, or with `reset` before the first step of each window.
      reset: None: each row is one step. [N, L] bool: rows are the steps of N windows.
    """
    from jrl.networks import cores

    core = cores.make(cfg.core, x.shape[-1], dtype=cfg.dtype, weights=cfg.init)
    # not `param` alone: it would trace `init` at each call to compare shapes
    params = module.param(name, core.init) if module.is_initializing() else module.get_variable("params", name)
    if reset is None:
        return core.step(params, x, carry)
    y, carry = _truncated(core, cfg.max_seq_len, params, x.reshape(*reset.shape, x.shape[-1]), carry, reset)
    return y.reshape(-1, core.size), carry


def start_of_core(cfg: NetworkConfig) -> Callable[[int], PyTree] | None:
    """Returns the function from a batch size to the core's state at an episode's start; None without a core."""
    if not cfg.recurrent:
        return None
    from jrl.networks import cores

    return cores.make(cfg.core, 1).carry


def _truncated(core: "cores.Core", limit: int | None, params, x, carry, reset):
    """Unrolls the core with truncated backpropagation: the gradient stops at multiples of `limit` steps."""
    length, parts = reset.shape[1], []
    if limit is None or length <= limit:
        return core.unroll(params, x, carry, reset)
    for start in range(0, length, limit):
        rows = slice(start, start + limit)
        y, carry = core.unroll(params, x[:, rows], jax.lax.stop_gradient(carry), reset[:, rows])
        parts.append(y)
    return jnp.concatenate(parts, 1), carry


class _Towers(nn.Module):
    space: Space
    cfg: NetworkConfig
    heads: tuple[tuple[str, Head], ...]

    @nn.compact
    def __call__(self, obs, names, key=None, carry=None, reset=None, valid=None):
        """Returns (outputs, carry). Without `reset` each row is a step, and every tower's state is updated."""
        views, made = dict[bool, Any](), dict[str, Any]()
        outputs, after = {}, dict(carry or {})
        keys: Any = None if key is None else jax.random.split(key, (len(self.heads), len(self.cfg.head_hidden) + 1))
        for i, (name, head) in enumerate(self.heads):
            tower = "torso" if self.cfg.shared else f"{name}_torso"
            if name not in names and (carry is None or reset is not None):
                continue
            if tower not in made:
                reads_all = head.privileged or not self.cfg.value_inputs
                if reads_all not in views:
                    views[reads_all] = self._view(obs, reads_all)
                cfg, space, x = views[reads_all]
                cfg = cfg.of_critics() if head.privileged else cfg
                made[tower] = features(self, cfg, space, x, tower, valid)
                if carry is not None:
                    core = f"{tower}_core"
                    made[tower], after[tower] = with_core(self.cfg, self, made[tower], core, carry[tower], reset)
            if name not in names:
                continue
            y, own = made[tower], self.cfg.of_critics() if head.privileged else self.cfg
            for layer, width in enumerate(self.cfg.head_hidden):
                hidden = functools.partial(Dense, width, **dense_options(own))
                dense = self._dense(head, width, f"{name}_hidden_{layer}", self.cfg.dtype, hidden)
                y = dense(y, None if keys is None else keys[i, layer])
                y = activated(self, own, y, valid, f"{name}_norm_{layer}")
            last = functools.partial(last_layer, own, head.size, scale=head.scale)
            dense = self._dense(head, head.size, f"{name}_head", jnp.float32, last)
            outputs[name] = dense(y, None if keys is None else keys[i, -1])
        return tuple(outputs[name] for name in names), after

    def _view(self, obs, reads_all):
        """Returns (config, space, prepared observation), without `value_inputs` unless `reads_all`."""
        if reads_all:
            return self.cfg, self.space, read(self.cfg, self.space, obs)
        space, cfg = unprivileged(self.space, self.cfg)
        return cfg, space, read(cfg, space, spaces.remove_parts(self.space, self.cfg.value_inputs, obs))

    def _dense(self, head, features, name, dtype, make):
        """Returns a layer of a head as a function (x, key or None) -> y of `dtype`; `make` makes it without noise."""
        if head.noise is not None:
            from jrl.networks.noisy import NoisyDense

            return NoisyDense(features, head.noise, dtype, name=name)
        dense = make(name=name)
        return lambda x, key: dense(x)


def check(space: Space, cfg: NetworkConfig) -> None:
    """Raises InputError if `cfg` does not fit observations of `space`."""
    errors: list[str] = []
    if cfg.recurrent:
        from jrl.networks import cores

        errors += cores.faults(cfg.core)
    errors += _value_input_faults(space, cfg) + cfg.torso_faults()
    if cfg.torso_options and not is_custom(cfg):
        errors.append(
            f"network.torso_options: {cfg.torso} takes no options, only a torso of your own does: leave them out"
        )
    if is_custom(cfg):
        from jrl.networks import custom

        custom.check(cfg, space)
    elif cfg.torso not in (*DENSE, *CNNS):
        errors.append(
            f"network.torso {cfg.torso}: choose one of {', '.join((*DENSE, *CNNS))}, or name your own as "
            "package.module:name"
        )
    elif cfg.torso in CNNS and not cfg.flatten and not any(is_image(leaf) for _, leaf in spaces.leaves(space)):
        errors.append(f"network.torso {cfg.torso} needs image observations of 3 axes, not {space}: use mlp")
    leaf = single(space, cfg)
    if {cfg.torso, cfg.critic_torso} & set(RESIDUAL) and leaf is not None and default(leaf, cfg) in CNNS:
        errors.append(
            "network.torso: residual blocks need a vector before them, and the observation is one image: set "
            'network.encoders={"": nature_cnn}, or network.flatten=true'
        )
    if errors:
        raise InputError(*errors)
    choose(space, cfg)
    if cfg.value_inputs:
        check(*unprivileged(space, cfg))


def _value_input_faults(space: Space, cfg: NetworkConfig) -> list[str]:
    known, key = spaces.part_names(space), "network.value_inputs"
    if cfg.value_inputs and not known:
        got = ", ".join(map(repr, cfg.value_inputs))
        fix = "leave this out"
        if spaces.STATE not in cfg.value_inputs and (hint := did_you_mean(cfg.value_inputs[0], [spaces.STATE])):
            fix += f", or{hint[1:-1]}, the global state of several agents?"
        return [f"{key}: expected names of parts of a Dict observation, got {got} for {space}: {fix}"]
    errors = cfg.sharing_faults()
    for name in cfg.value_inputs:
        if name not in known:
            fix = did_you_mean(name, known) or ": name one of them, or leave it out"
            errors.append(f"{key}: expected names among {', '.join(map(repr, known))}, got {name!r}{fix}")
    if not errors and not spaces.leaves(spaces.without(space, cfg.value_inputs)):
        errors.append(
            f"{key}: expected to leave the policy a part to read, got all of {', '.join(map(repr, known))}: "
            "leave one of them out"
        )
    return errors


def build(spec: EnvSpec, cfg: NetworkConfig, heads: Mapping[str, Head]) -> Network:
    """Builds a network with one output per head.

    `cfg.shared` puts all heads on one torso and core; otherwise each head has its own torso and core. `cfg.head_hidden`
    adds dense layers to each head. Only privileged heads read `cfg.value_inputs` (asymmetric actor-critic,
    arXiv:1710.06542).

    Args:
      spec: environment's spaces; the network reads the whole observation except the action mask.
      cfg: encoders, torso, widths, activation, core.
      heads: name -> Head.
    Returns:
      A Network. `apply(params, obs, *names)` takes observations with any leading axes.
    Raises:
      InputError: encoders, torso, core or `value_inputs` do not fit the observation space.

    >>> from jrl.types import Box, Discrete
    >>> spec = EnvSpec(Box((4,)), Discrete(2), num_envs=8)
    >>> net = build(spec, NetworkConfig(hidden=(16,)), {"policy": Head(2, 0.01), "value": Head(1)})
    >>> logits, value = net.apply(net.init(jax.random.key(0)), jnp.zeros((8, 4)))
    >>> logits.shape, value.shape
    ((8, 2), (8, 1))
    """
    space = spaces.without_mask(spec.observation)
    check(space, cfg)
    module = _Towers(space, cfg, tuple(heads.items()))
    towers = ("torso",) if cfg.shared else tuple(f"{name}_torso" for name in heads)
    recurrent = cfg.recurrent
    start = start_of_core(cfg)

    def carry(batch_size: int) -> PyTree:
        return () if start is None else {tower: start(batch_size) for tower in towers}

    def init(key):
        obs = jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), element(space))
        memory = carry(1) if recurrent else None
        return jax.jit(module.init, static_argnums=2)(key, obs, tuple(heads), None, memory)["params"]

    def run(
        params, obs, names, key, memory=None, reset=None, *, drop=None, valid=None
    ) -> tuple[tuple[Array, ...], PyTree]:
        obs, _ = spaces.split_mask(spec.observation, obs)
        batch = spaces.batch_shape(space, obs)
        outputs: Any
        rngs = {"dropout": drop} if cfg.drops and drop is not None else None
        valid = None if valid is None else valid.reshape(-1)
        names = names or tuple(heads)
        outputs, memory = module.apply({"params": params}, obs, names, key, memory, reset, valid, rngs=rngs)
        return tuple(y.reshape(*batch, y.shape[-1]) for y in outputs), memory

    def apply(params, obs, *names, key=None, valid=None):
        if isinstance(obs, Window):
            return unroll(params, obs, *names, key=key)[0]
        if recurrent:
            raise TypeError("apply: expected a Window for a network with a core, got observations: use `step`")
        return run(params, obs, names, key, drop=key, valid=valid)[0]

    def step(params, obs, carry, *names, key=None):
        if not recurrent:
            return run(params, obs, names, key)[0], carry
        return run(params, obs, names, key, carry)

    def unroll(params, window: Window, *names, key=None):
        if not recurrent:
            return run(params, window.obs, names, key, drop=key)[0], window.carry
        return run(params, window.obs, names, key, window.carry, window.reset, drop=key)

    return Network(init, apply, carry, step, unroll)
