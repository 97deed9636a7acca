"""What a policy's outputs mean: distributions over actions, batched over leading axes.

Every distribution has `sample(key)`, `mode()`, `log_prob(action)`, `sample_and_log_prob(key)`, `kl(other)`, which is
KL(self || other), and all but `TanhGaussian` have `entropy()`. Samples of the two Gaussians carry gradient to their
parameters. Illegal actions are masked by a large negative finite logit (-1e9, or the least float32): all stays finite.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jrl.ops import random
from jrl.types import Box, Discrete, InputError, MultiDiscrete, Space

__all__ = ["Categorical", "DiagGaussian", "Head", "MultiCategorical", "TanhGaussian", "action_distribution"]

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


def _sum(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, terms)


@struct.dataclass
class Categorical:
    """One of A actions. Actions are [...] int32, results [...] f32."""

    logits: jax.Array  # [..., A] f32, not normalised

    def sample(self, key) -> jax.Array:
        return jnp.argmax(self.logits + random.gumbel(key, self.logits.shape), axis=-1).astype(jnp.int32)

    def mode(self) -> jax.Array:
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def log_prob(self, action) -> jax.Array:
        """Raises ValueError unless `action` is [...], the batch axes of the logits."""
        _check_shape("action", action, self.logits.shape[:-1])
        # A comparison instead of an index: its gradient is a select, that of an index is a scatter.
        taken = lax.broadcasted_iota(jnp.int32, self.logits.shape, self.logits.ndim - 1) == action[..., None]
        return jnp.sum(jnp.where(taken, jax.nn.log_softmax(self.logits), 0.0), axis=-1)

    def sample_and_log_prob(self, key) -> tuple[jax.Array, jax.Array]:
        action = self.sample(key)
        return action, self.log_prob(action)

    def entropy(self) -> jax.Array:
        log_p = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)

    def kl(self, other: "Categorical") -> jax.Array:
        _check_shape("other.logits", other.logits, self.logits.shape)
        log_p = jax.nn.log_softmax(self.logits)
        return jnp.sum(jnp.exp(log_p) * (log_p - jax.nn.log_softmax(other.logits)), axis=-1)


@struct.dataclass
class MultiCategorical:
    """K independent choices, the k-th one of nvec[k]. Actions are [..., K] int32, results [...] f32."""

    logits: jax.Array  # [..., sum(nvec)] f32, the logits of each choice one after the other
    nvec: tuple[int, ...] = struct.field(pytree_node=False)

    def sample(self, key) -> jax.Array:
        noise = random.gumbel(key, self.logits.shape)
        return MultiCategorical(self.logits + noise, self.nvec).mode()

    def mode(self) -> jax.Array:
        return jnp.stack([choice.mode() for choice in self._choices()], axis=-1)

    def log_prob(self, action) -> jax.Array:
        """Raises ValueError unless `action` is [..., K]."""
        _check_shape("action", action, (*self.logits.shape[:-1], len(self.nvec)))
        return _sum(choice.log_prob(action[..., k]) for k, choice in enumerate(self._choices()))

    def sample_and_log_prob(self, key) -> tuple[jax.Array, jax.Array]:
        action = self.sample(key)
        return action, self.log_prob(action)

    def entropy(self) -> jax.Array:
        return _sum(choice.entropy() for choice in self._choices())

    def kl(self, other: "MultiCategorical") -> jax.Array:
        return _sum(mine.kl(its) for mine, its in zip(self._choices(), other._choices(), strict=True))

    def _choices(self) -> list[Categorical]:
        _check_shape("logits", self.logits, (*self.logits.shape[:-1], sum(self.nvec)))
        ends = np.cumsum(self.nvec)[:-1].tolist()
        return [Categorical(logits) for logits in jnp.split(self.logits, ends, axis=-1)]


@struct.dataclass
class DiagGaussian:
    """Independent normal variables. Actions are [..., *] like `mean`, results [...] f32."""

    mean: jax.Array  # [..., *] f32, the last `event_ndim` axes are those of one action
    log_std: jax.Array  # f32, broadcast to the shape of `mean`
    event_ndim: int = struct.field(pytree_node=False, default=1)

    def sample(self, key) -> jax.Array:
        return self.mean + jnp.exp(self._log_std()) * random.normal(key, self.mean.shape)

    def mode(self) -> jax.Array:
        return self.mean

    def log_prob(self, action) -> jax.Array:
        """Raises ValueError unless `action` has the shape of `mean`."""
        _check_shape("action", action, self.mean.shape)
        log_std = self._log_std()
        return self._standard_log_prob((action - self.mean) * jnp.exp(-log_std), log_std)

    def sample_and_log_prob(self, key) -> tuple[jax.Array, jax.Array]:
        return self.from_noise(random.normal(key, self.mean.shape))

    def from_noise(self, noise) -> tuple[jax.Array, jax.Array]:
        """The sample that standard normal numbers of the shape of `mean` make, and its log-probability."""
        log_std = self._log_std()
        return self.mean + jnp.exp(log_std) * noise, self._standard_log_prob(noise, log_std)

    def entropy(self) -> jax.Array:
        return self._sum(self._log_std() + (0.5 + _HALF_LOG_2PI))

    def kl(self, other: "DiagGaussian") -> jax.Array:
        _check_shape("other.mean", other.mean, self.mean.shape)
        mine, its = self._log_std(), other._log_std()
        distance = (self.mean - other.mean) * jnp.exp(-its)
        return self._sum(its - mine + 0.5 * (jnp.exp(2.0 * (mine - its)) + jnp.square(distance) - 1.0))

    def _standard_log_prob(self, noise, log_std):
        return self._sum(-0.5 * jnp.square(noise) - log_std - _HALF_LOG_2PI)

    def _log_std(self):
        return jnp.broadcast_to(self.log_std, self.mean.shape)

    def _sum(self, x):
        return jnp.sum(x, axis=tuple(range(-self.event_ndim, 0)))


@struct.dataclass
class TanhGaussian:
    """tanh of independent normal variables: actions [..., *] in (-1, 1), results [...] f32 (arXiv:1812.05905, app. C).

    The entropy has no closed form; minus the log-probability of `sample_and_log_prob` estimates it, with gradient.
    """

    mean: jax.Array  # [..., *] f32, before tanh
    log_std: jax.Array  # f32, broadcast to the shape of `mean`
    event_ndim: int = struct.field(pytree_node=False, default=1)

    def sample(self, key) -> jax.Array:
        return jnp.tanh(self._base().sample(key))

    def mode(self) -> jax.Array:
        """tanh(mean), the usual choice for acting without noise: the median of each element."""
        return jnp.tanh(self.mean)

    def log_prob(self, action) -> jax.Array:
        """Of given actions; those of +-1 count as the nearest number within. Near them float32 keeps few digits of what
        was before tanh: prefer `sample_and_log_prob`. Raises ValueError unless `action` has the shape of `mean`."""
        _check_shape("action", action, self.mean.shape)
        inside = 1.0 - 2.0**-24  # the greatest float32 below 1
        return self._log_prob_before_tanh(jnp.arctanh(jnp.clip(action, -inside, inside)))

    def sample_and_log_prob(self, key) -> tuple[jax.Array, jax.Array]:
        """The log-probability is computed from the sample before tanh, exact however near to +-1 it lies."""
        return self.from_noise(random.normal(key, self.mean.shape))

    def from_noise(self, noise) -> tuple[jax.Array, jax.Array]:
        """The sample that standard normal numbers of the shape of `mean` make, and its log-probability."""
        before, log_prob = self._base().from_noise(noise)
        return jnp.tanh(before), log_prob - self._log_slope(before)

    def kl(self, other: "TanhGaussian") -> jax.Array:
        """That of the normal variables: an invertible map of both changes nothing."""
        return self._base().kl(other._base())

    def _log_prob_before_tanh(self, before):
        return self._base().log_prob(before) - self._log_slope(before)

    def _log_slope(self, before):
        """log(1 - tanh(u)^2), summed, in a form that neither overflows nor rounds to log(0)."""
        return self._base()._sum(2.0 * (math.log(2.0) - before - jax.nn.softplus(-2.0 * before)))

    def _base(self) -> DiagGaussian:
        return DiagGaussian(self.mean, self.log_std, self.event_ndim)


class Head(NamedTuple):
    """How many numbers the policy network puts out, and the distribution they stand for."""

    size: int
    make: Callable  # (outputs [..., size], log_std=None | [size] | [..., size]) -> distribution; casts to f32


def action_distribution(space: Space, *, squash: bool = False) -> Head:
    """The distribution over the actions of `space`.

    Discrete: Categorical; MultiDiscrete: MultiCategorical; both ignore `log_std`. Box of floats: DiagGaussian, or
    TanhGaussian if `squash`; the outputs are the mean, `log_std` is needed, actions have the shape [..., *space.shape].
    The bounds of a Box are not applied here.

    Args:
      space:  the action space.
      squash: actions of a Box lie in (-1, 1).
    Returns:
      Head(size, make).
    Raises:
      InputError: no distribution for this space. `make`: ValueError, wrong size or no `log_std` for a Box.
    """
    size: int
    build: Callable[..., Categorical | MultiCategorical | DiagGaussian | TanhGaussian]
    match space:
        case Discrete():
            size, build = space.n, lambda outputs, log_std: Categorical(outputs)
        case MultiDiscrete():
            size, build = sum(space.nvec), lambda outputs, log_std: MultiCategorical(outputs, space.nvec)
        case Box() if np.issubdtype(np.dtype(space.dtype), np.floating):
            size, build = math.prod(space.shape), _gaussian(space, TanhGaussian if squash else DiagGaussian)
        case _:
            raise InputError(f"no policy for the action space {space}: use Discrete, MultiDiscrete or a Box of floats")

    def make(outputs, log_std=None):
        _check_shape("outputs", outputs, (*jnp.shape(outputs)[:-1], size))
        return build(jnp.asarray(outputs, jnp.float32), log_std)

    return Head(size, make)


def _gaussian(space, distribution):
    def build(mean, log_std):
        if log_std is None:
            raise ValueError(f"the action space {space} needs log_std")
        log_std = jnp.asarray(log_std, jnp.float32)
        _check_shape("log_std", log_std, (*log_std.shape[:-1], mean.shape[-1]))
        mean, log_std = (jnp.reshape(x, (*x.shape[:-1], *space.shape)) for x in (mean, log_std))
        return distribution(mean, log_std, len(space.shape))

    return build


def _check_shape(name, x, expected):
    if jnp.shape(x) != expected:
        raise ValueError(f"{name} must have shape {expected}, got {jnp.shape(x)}")
