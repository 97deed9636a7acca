"""Kinds of critics, a section of SAC and TD3: `algo.critic: {kind: quantiles, atoms: 25, dropped_atoms: 2}`.

    mse        the expected return, by half the squared TD error
    quantiles  TQC (arXiv:2005.04269): quantiles of the return. The target pools the atoms of all target critics without
               the largest `dropped_atoms` of each critic
    c51        the return's distribution on fixed atoms (arXiv:1707.06887). The target is the distribution of the target
               critic with the least mean, as in FastTD3 (arXiv:2505.22642)
    hl_gauss   the expected return, by classification (arXiv:2403.03950): the cross-entropy from a histogram of a normal
               distribution around the target of mse

A critic of K atoms has K outputs for an action; its value is their mean. The policy, CQL and `outputs` read values.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Interval

from jrl.algos import q_heads
from jrl.fields.bounds import Amount
from jrl.ops import distributional
from jrl.types import Array, hyperparams

# most atoms that are removed one by one. On CPU sorting 256 x 50 atoms took 2 ms, and removing 4 of 50 takes 0.3 ms
_MOST_REMOVED = 16


@hyperparams
class Critic:
    """Kind of the critics and of their loss."""

    kind: Literal["mse", "quantiles", "c51", "hl_gauss"] = "mse"
    atoms: Annotated[int, Interval(ge=2, le=65_536)] | None = None  # null: 25 quantiles, 101 of the other kinds
    dropped_atoms: Amount = 0  # quantiles: largest atoms that a target leaves out, times the number of target critics
    value_range: tuple[float, float] | None = None  # c51, hl_gauss: [lowest, highest] return that they represent

    @property
    def num_atoms(self) -> int:
        return self.atoms or (25 if self.kind == "quantiles" else 101)

    def validate(self) -> list[str]:
        """Returns one message per invalid combination of values, with the fix."""
        errors: list[str] = []
        if self.kind == "mse" and self.atoms is not None:
            errors.append("critic.atoms: mse has one output: set critic.kind to quantiles, c51 or hl_gauss")
        if self.kind != "quantiles" and self.dropped_atoms:
            errors.append(f"critic.dropped_atoms: {self.kind} drops no atoms: set critic.kind to quantiles")
        if self.dropped_atoms >= self.num_atoms:
            most = self.num_atoms - 1
            errors.append(f"critic.dropped_atoms: expected at most {most}, got {self.dropped_atoms}: lower it")
        has_range = self.kind in ("c51", "hl_gauss")
        if has_range and self.value_range is None:
            errors.append(
                f"critic.value_range: expected the range of returns for {self.kind}, got null: set it, e.g. [-10, 10]"
            )
        if self.value_range is not None and not has_range:
            errors.append(f"critic.value_range: {self.kind} has no range: leave it out, or use c51 or hl_gauss")
        if self.value_range is not None and not self.value_range[0] < self.value_range[1]:
            errors.append(f"critic.value_range: expected [low, high] with low < high, got {list(self.value_range)}")
        return errors


class CriticHead(NamedTuple):
    """Interpretation of a critic's K outputs for an action."""

    size: int  # K
    mean: Callable[[Array], Array]  # outputs [..., K] -> value [...]
    loss: Callable[[Array, Array], Array]  # (outputs [N, K], target [N, M] or, without `pool`, [N]) -> [N], >= 0
    target_mean: Callable[[Array], Array]  # target -> its expected return [N]
    priority_is_loss: bool  # priorities of replay are the losses; otherwise absolute TD errors of values
    # outputs [C, ..., A, K] of all critics for A actions -> those of a target [..., A, M]; None: the target is a value
    pool: Callable[[Array], Array] | None = None
    # (outputs [N, A, M] of s', policy [N, A], bonus [N, A], reward [N], discount [N]) -> target [N, M]: see `q_heads`
    backup: Callable[..., Array] | None = None


def make(cfg: Critic) -> CriticHead | None:
    """Returns the head of a section, whose floats may be traced; None for mse, whose critics have one output."""
    match cfg.kind:
        case "mse":
            return None
        case "quantiles":
            return _quantiles(cfg.num_atoms, cfg.dropped_atoms)
    assert cfg.value_range is not None
    return (_categorical if cfg.kind == "c51" else _histogram)(cfg.num_atoms, *cfg.value_range)


def _quantiles(num_atoms: int, dropped: int) -> CriticHead:
    head = q_heads.quantiles(num_atoms)

    def pool(outputs: Array) -> Array:
        pooled, count = jnp.moveaxis(outputs, 0, -2).reshape(*outputs.shape[1:-1], -1), outputs.shape[0] * dropped
        if count > _MOST_REMOVED or (count and outputs.shape[-2] > 1):  # atoms of several actions are mixed by rank
            return jnp.sort(pooled)[..., : pooled.shape[-1] - count]
        for _ in range(count):  # the last atom takes the place of the largest
            place = jax.lax.broadcasted_iota(jnp.int32, pooled.shape, pooled.ndim - 1)
            is_largest = place == jnp.argmax(pooled, -1, keepdims=True)
            pooled = jnp.where(is_largest, pooled[..., -1:], pooled)[..., :-1]
        return pooled

    loss = lambda outputs, target: head.loss(outputs, target) / num_atoms  # a mean, as in the paper
    return CriticHead(num_atoms, head.mean, loss, head.target_mean, False, pool, head.backup)


def _categorical(num_atoms: int, low: Any, high: Any) -> CriticHead:
    head = q_heads.categorical(num_atoms, low, high)

    def pool(outputs: Array) -> Array:
        least = jnp.argmin(head.mean(outputs), 0)
        return jnp.take_along_axis(outputs, least[None, ..., None], 0)[0]

    return CriticHead(num_atoms, head.mean, head.loss, head.target_mean, True, pool, head.backup)


def _histogram(num_atoms: int, low: Any, high: Any) -> CriticHead:
    width = (high - low) / num_atoms
    centers = low + width * (jnp.arange(num_atoms, dtype=jnp.float32) + 0.5)
    mean = lambda outputs: jnp.einsum("...k,k->...", jax.nn.softmax(outputs), centers, precision="highest")

    def loss(outputs: Array, target: Array) -> Array:
        histogram = distributional.gaussian_histogram(target, low=low, high=high, num_bins=num_atoms)
        return -jnp.sum(histogram * jax.nn.log_softmax(outputs), -1)

    return CriticHead(num_atoms, mean, loss, lambda target: target, False)
