"""Action distributions of policies, batched over leading axes.

Every distribution has `sample(key)`, `mode()`, `log_prob(action)`, `sample_and_log_prob(key)` and `kl(other)`, which is
KL(self || other). All but `TanhGaussian` have `entropy()`. Samples of the two Gaussians carry gradient to their
parameters. Masked actions have a large negative finite logit (-1e9, or the least float32). They are never sampled and
add exactly 0 to entropy and KL; their log-probability is finite.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jrl import spaces
from jrl.ops import random
from jrl.ops.exploration import allowed, masked_logits
from jrl.types import Box, Dict, Discrete, InputError, Leaf, MultiBinary, MultiDiscrete, PyTree, Space, Tuple

__all__ = [
    "ActionHead",
    "Bernoulli",
    "Categorical",
    "DiagGaussian",
    "Joint",
    "MultiCategorical",
    "TanhGaussian",
    "action_distribution",
    "batched",
    "is_distribution",
    "shift_means",
]

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


def _sum(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, terms)


class _RllibNames:
    """Adds RLlib's method names."""

    def logp(self, actions) -> jax.Array:
        """Returns `log_prob(actions)`."""
        return self.log_prob(actions)  # type: ignore[attr-defined]  # of the distribution

    def deterministic_sample(self) -> PyTree:
        """Returns `mode()`."""
        return self.mode()  # type: ignore[attr-defined]


@struct.dataclass
class Categorical(_RllibNames):
    """Distribution over A actions. Actions are [...] int32, results [...] f32.

    >>> dist = Categorical(jnp.log(jnp.array([0.5, 0.25, 0.25])))
    >>> dist.mode(), round(float(jnp.exp(dist.log_prob(jnp.array(2)))), 6)
    (Array(0, dtype=int32), 0.25)
    """

    logits: jax.Array  # [..., A] f32, not normalised

    def sample(self, key) -> jax.Array:
        return jnp.argmax(self.logits + random.gumbel(key, self.logits.shape), axis=-1).astype(jnp.int32)

    def mode(self) -> jax.Array:
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def log_prob(self, action) -> jax.Array:
        """Raises ValueError unless `action` is [...], the batch axes of the logits."""
        _check_shape("action", action, self.logits.shape[:-1])
        # a comparison instead of an index: its gradient is a select, the gradient of an index is a slower scatter
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
class MultiCategorical(_RllibNames):
    """K independent choices with nvec[k] options each. Actions are [..., K] int32, results [...] f32.

    >>> MultiCategorical(jnp.array([0.0, 1.0, 3.0, 2.0, 1.0]), nvec=(2, 3)).mode()
    Array([1, 0], dtype=int32)
    """

    logits: jax.Array  # [..., sum(nvec)] f32, the concatenated logits of the choices
    nvec: tuple[int, ...] = struct.field(pytree_node=False)

    def sample(self, key) -> jax.Array:
        noise = random.gumbel(key, self.logits.shape)
        return MultiCategorical(self.logits + noise, self.nvec).mode()

    def mode(self) -> jax.Array:
        return jnp.stack([choice.mode() for choice in self.choices()], axis=-1)

    def log_prob(self, action) -> jax.Array:
        """Raises ValueError unless `action` is [..., K]."""
        _check_shape("action", action, (*self.logits.shape[:-1], len(self.nvec)))
        return _sum(choice.log_prob(action[..., k]) for k, choice in enumerate(self.choices()))

    def sample_and_log_prob(self, key) -> tuple[jax.Array, jax.Array]:
        action = self.sample(key)
        return action, self.log_prob(action)

    def entropy(self) -> jax.Array:
        return _sum(choice.entropy() for choice in self.choices())

    def kl(self, other: "MultiCategorical") -> jax.Array:
        return _sum(mine.kl(its) for mine, its in zip(self.choices(), other.choices(), strict=True))

    def choices(self) -> list[Categorical]:
        """Returns the K choices as Categoricals."""
        _check_shape("logits", self.logits, (*self.logits.shape[:-1], sum(self.nvec)))
        return [Categorical(logits) for logits in _split(self.logits, self.nvec)]


@struct.dataclass
class Bernoulli(_RllibNames):
    """Independent zeros and ones. Actions are [..., *] like `logits`, of the integer `dtype`; results are [...] f32."""

    logits: jax.Array  # [..., *] f32, log(p / (1 - p)); the last `event_ndim` axes belong to one action
    event_ndim: int = struct.field(pytree_node=False, default=1)
    dtype: str = struct.field(pytree_node=False, default="int8")

    def sample(self, key) -> jax.Array:
        return (random.uniform(key, self.logits.shape) < jax.nn.sigmoid(self.logits)).astype(self.dtype)

    def mode(self) -> jax.Array:
        return (self.logits > 0).astype(self.dtype)

    def log_prob(self, action) -> jax.Array:
        """Raises ValueError unless `action` has the shape of `logits`."""
        _check_shape("action", action, self.logits.shape)
        return self._sum(jax.nn.log_sigmoid(jnp.where(action != 0, self.logits, -self.logits)))

    def sample_and_log_prob(self, key) -> tuple[jax.Array, jax.Array]:
        action = self.sample(key)
        return action, self.log_prob(action)

    def entropy(self) -> jax.Array:
        return -self._mean_of(jax.nn.log_sigmoid(self.logits), jax.nn.log_sigmoid(-self.logits))

    def kl(self, other: "Bernoulli") -> jax.Array:
        _check_shape("other.logits", other.logits, self.logits.shape)
        difference = lambda sign: jax.nn.log_sigmoid(sign * self.logits) - jax.nn.log_sigmoid(sign * other.logits)
        return self._mean_of(difference(1.0), difference(-1.0))

    def _mean_of(self, one, zero):
        """Returns the expectation of `one` for action 1 and `zero` for action 0, summed over the action's axes."""
        return self._sum(jax.nn.sigmoid(self.logits) * one + jax.nn.sigmoid(-self.logits) * zero)

    def _sum(self, x):
        return jnp.sum(x, axis=tuple(range(-self.event_ndim, 0)))


@struct.dataclass
class DiagGaussian(_RllibNames):
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
        """Returns the sample for standard normal noise of the shape of `mean`, and its log-probability."""
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
class TanhGaussian(_RllibNames):
    """tanh of independent normal variables: actions [..., *] in (-1, 1), results [...] f32 (arXiv:1812.05905, app. C).

    The entropy has no closed form; minus the log-probability of `sample_and_log_prob` estimates it, with gradient.
    """

    mean: jax.Array  # [..., *] f32, before tanh
    log_std: jax.Array  # f32, broadcast to the shape of `mean`
    event_ndim: int = struct.field(pytree_node=False, default=1)

    def sample(self, key) -> jax.Array:
        return jnp.tanh(self._base().sample(key))

    def mode(self) -> jax.Array:
        """Returns tanh(mean), the median of each element: the usual deterministic action."""
        return jnp.tanh(self.mean)

    def log_prob(self, action) -> jax.Array:
        """Returns the log-probability of actions; +-1 counts as the nearest number inside.

        Near +-1 float32 loses the digits of the value before tanh: prefer `sample_and_log_prob`. Raises ValueError
        unless `action` has the shape of `mean`.
        """
        _check_shape("action", action, self.mean.shape)
        inside = 1.0 - 2.0**-24  # the greatest float32 below 1
        return self._log_prob_before_tanh(jnp.arctanh(jnp.clip(action, -inside, inside)))

    def sample_and_log_prob(self, key) -> tuple[jax.Array, jax.Array]:
        """Draws a sample; its log-probability is computed before tanh, so it is exact near +-1, too."""
        return self.from_noise(random.normal(key, self.mean.shape))

    def from_noise(self, noise) -> tuple[jax.Array, jax.Array]:
        """Returns the sample for standard normal noise of the shape of `mean`, and its log-probability."""
        before, log_prob = self._base().from_noise(noise)
        return jnp.tanh(before), log_prob - self._log_slope(before)

    def kl(self, other: "TanhGaussian") -> jax.Array:
        """Returns the KL divergence before tanh: an invertible map of both variables does not change it."""
        return self._base().kl(other._base())

    def _log_prob_before_tanh(self, before):
        return self._base().log_prob(before) - self._log_slope(before)

    def _log_slope(self, before):
        """Returns log(1 - tanh(u)^2), summed, in a form that neither overflows nor rounds to log(0)."""
        return self._base()._sum(2.0 * (math.log(2.0) - before - jax.nn.softplus(-2.0 * before)))

    def _base(self) -> DiagGaussian:
        return DiagGaussian(self.mean, self.log_std, self.event_ndim)


@struct.dataclass
class Joint(_RllibNames):
    """Independent parts: a tree of distributions like a Dict or Tuple space. Actions are trees of the same structure.

    Results are [...] f32, the sums over the parts. Without the entropy of each part there is no joint entropy.

    >>> head = action_distribution(Dict((("move", Discrete(2)), ("jump", MultiBinary((1,))))))
    >>> dist = head.make(jnp.array([-1.0, 0.0, 1.0]))  # jump, and two of move: leaves come by name
    >>> dist.mode()
    {'jump': Array([0], dtype=int8), 'move': Array(1, dtype=int32)}
    """

    parts: PyTree  # tree of distributions [...]

    def sample(self, key) -> PyTree:
        return self._map(lambda part, key: part.sample(key), self._keys(key))

    def mode(self) -> PyTree:
        return self._map(lambda part: part.mode())

    def log_prob(self, action) -> jax.Array:
        """Raises ValueError unless `action` is a tree like `parts` with arrays of the expected shapes."""
        return _sum(part.log_prob(x) for part, x in zip(self._leaves(), self._of(action), strict=True))

    def sample_and_log_prob(self, key) -> tuple[PyTree, jax.Array]:
        keys = self._keys(key)
        drawn = [part.sample_and_log_prob(k) for part, k in zip(self._leaves(), keys, strict=True)]
        return self._tree().unflatten([action for action, _ in drawn]), _sum(log_prob for _, log_prob in drawn)

    def entropy(self) -> jax.Array:
        return _sum(part.entropy() for part in self._leaves())

    def kl(self, other: "Joint") -> jax.Array:
        return _sum(mine.kl(its) for mine, its in zip(self._leaves(), self._of(other.parts), strict=True))

    def _map(self, fn, *others) -> PyTree:
        """Applies `fn` to each part and to the items at the same positions of the lists `others`."""
        return self._tree().unflatten([fn(*args) for args in zip(self._leaves(), *others, strict=True)])

    def _keys(self, key):
        return jax.random.split(key, len(self._leaves()))

    def _leaves(self) -> list[Any]:
        return jax.tree.leaves(self.parts, is_leaf=is_distribution)

    def _tree(self):
        return jax.tree.structure(self.parts, is_leaf=is_distribution)

    def _of(self, tree) -> list[Any]:
        return self._tree().flatten_up_to(tree)


def is_distribution(x: Any) -> bool:
    """Returns whether a tree node is a distribution over one array."""
    return isinstance(x, Categorical | MultiCategorical | Bernoulli | DiagGaussian | TanhGaussian)


def batched(dist: Any) -> Any:
    """Returns the distribution with all arrays [..., *], `log_std` included, so that rows can be selected."""
    match dist:
        case Joint():
            return Joint(dist._map(batched))
        case DiagGaussian() | TanhGaussian():
            return replace(dist, log_std=jnp.broadcast_to(dist.log_std, dist.mean.shape))
    return dist


def shift_means(dist: Any, bound: Any, key) -> Any:
    """Returns the distribution with noise, uniform in [-bound, bound], added to each mean of its DiagGaussians."""

    def shift(part, key):
        if not isinstance(part, DiagGaussian):
            return part
        return replace(part, mean=part.mean + bound * (2.0 * random.uniform(key, part.mean.shape) - 1.0))

    leaves, tree = jax.tree.flatten(dist, is_leaf=is_distribution)
    return jax.tree.unflatten(tree, [shift(*x) for x in zip(leaves, jax.random.split(key, len(leaves)), strict=True)])


class ActionHead(NamedTuple):
    """Output size of a policy network, and the function from outputs to a distribution."""

    size: int
    num_gaussian: int  # number of Gaussian means among the outputs, and of `log_std`; in the order of `spaces.leaves`
    # (outputs [..., size], log_std=None | [num_gaussian] | [..., num_gaussian], mask=None | [..., K] bool) ->
    # distribution; casts to f32. K is `spaces.num_choices` of the action space.
    make: Callable


def action_distribution(space: Space, *, squash: bool = False) -> ActionHead:
    """Makes the head for the actions of `space`.

    Discrete: Categorical; MultiDiscrete: MultiCategorical; MultiBinary: Bernoulli. These ignore `log_std`. Box of
      floats: DiagGaussian, or TanhGaussian if `squash`; the outputs are the mean, `log_std` is required, and actions
      have the shape [..., *space.shape]. The bounds of a Box are not applied here. Dict and Tuple: Joint; `outputs`,
      `log_std` and `mask` are concatenated over its leaves in the order of `spaces.leaves`.

    No gradient reaches the outputs of masked actions. A choice without an allowed option counts as fully allowed,
    because masked rows need a finite distribution, too.

    Args:
      space:  action space.
      squash: whether actions of a Box lie in (-1, 1).
    Returns:
      ActionHead(size, num_gaussian, make).
    Raises:
      InputError: no distribution for this space. `make`: ValueError, wrong size, or no `log_std` for a Box.

    Three outputs for three actions, one of them masked; two means and deviations for a Box:

    >>> head = action_distribution(Discrete(3))
    >>> head.size, jax.nn.softmax(head.make(jnp.zeros(3), mask=jnp.array([True, False, True])).logits)
    (3, Array([0.5, 0. , 0.5], dtype=float32))
    >>> head = action_distribution(Box((2,)), squash=True)
    >>> head.size, head.num_gaussian, head.make(jnp.zeros(2), log_std=jnp.zeros(2)).mode()
    (2, 2, Array([0., 0.], dtype=float32))
    """
    parts = [_part(leaf, squash, path) for path, leaf in spaces.leaves(space)]
    if not parts:
        raise InputError(f"no policy for the action space {space}: it has no actions")
    composite = isinstance(space, Dict | Tuple)
    sizes, gaussians = [part.size for part in parts], [part.num_gaussian for part in parts]
    choices = [part.num_choices for part in parts]
    size, num_gaussian, num_choices = sum(sizes), sum(gaussians), sum(choices)

    def make(outputs, log_std=None, mask=None):
        batch = jnp.shape(outputs)[:-1]
        _check_shape("outputs", outputs, (*batch, size))
        outputs = jnp.asarray(outputs, jnp.float32)
        if num_gaussian:
            if log_std is None:
                raise ValueError(f"the action space {space} needs log_std")
            log_std = jnp.asarray(log_std, jnp.float32)
            _check_shape("log_std", log_std, (*log_std.shape[:-1], num_gaussian))
        if mask is not None:
            _check_shape("mask", mask, (*batch, num_choices))
            mask = jnp.asarray(mask, bool)
        if not composite:
            return parts[0].build(outputs, log_std, mask)
        missing = [None] * len(parts)
        log_stds: Sequence[Any] = _split(log_std, gaussians) if num_gaussian else missing
        masks: Sequence[Any] = missing if mask is None else _split(mask, choices)
        part_args = zip(parts, _split(outputs, sizes), log_stds, masks, strict=True)
        return Joint(spaces.from_leaves(space, [part.build(*args) for part, *args in part_args]))

    return ActionHead(size, num_gaussian, make)


class _Part(NamedTuple):
    """Part of a ActionHead for one array of the actions."""

    size: int
    num_gaussian: int
    num_choices: int
    build: Callable[..., Any]  # (outputs, log_std, mask) -> distribution


def _part(space: Leaf, squash: bool, path: str) -> _Part:
    match space:
        case Discrete(n):
            return _Part(n, 0, n, lambda outputs, log_std, mask: Categorical(masked_logits(outputs, mask)))
        case MultiDiscrete(nvec):

            def choices(outputs, log_std, mask):
                if mask is not None:  # each choice by itself: one without an allowed option does not affect the others
                    mask = jnp.concatenate([allowed(one) for one in _split(mask, nvec)], axis=-1)
                return MultiCategorical(masked_logits(outputs, mask), nvec)

            return _Part(sum(nvec), 0, sum(nvec), choices)
        case MultiBinary(shape, dtype):
            binary = lambda outputs, log_std, mask: Bernoulli(_shaped(outputs, shape), len(shape), dtype)
            return _Part(math.prod(shape), 0, 0, binary)
        case Box(shape, dtype) if np.issubdtype(np.dtype(dtype), np.floating):
            kind = TanhGaussian if squash else DiagGaussian
            gaussian = lambda mean, log_std, mask: kind(_shaped(mean, shape), _shaped(log_std, shape), len(shape))
            return _Part(math.prod(shape), math.prod(shape), 0, gaussian)
    part = f" ({path})" if path else ""
    raise InputError(
        f"no policy for the action space {space}{part}: use Discrete, MultiDiscrete, MultiBinary or a Box of floats, "
        "or a Dict or Tuple of them"
    )


def _shaped(x, shape):
    return jnp.reshape(x, (*x.shape[:-1], *shape))


def _split(x, sizes: Sequence[int]) -> list[jax.Array]:
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), axis=-1)


def _check_shape(name, x, expected):
    if jnp.shape(x) != expected:
        raise ValueError(f"{name} must have shape {expected}, got {jnp.shape(x)}")
