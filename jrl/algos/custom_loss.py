"""User-defined losses: see `jrl.algos` for their arguments and results."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrl.types import Array, InputError, Metrics, PyTree

RowsLoss = Callable[[PyTree, Any], tuple[Array, Metrics]]  # (params, batch) -> (scalar, metrics)
# (params, batch) -> (scalar, (metrics, priority [N]))
ReplayLoss = Callable[[PyTree, Any], tuple[Array, tuple[Metrics, Array]]]
Loss = Callable[[RowsLoss, Any, PyTree, Any], tuple[Array, Metrics]]  # (default, net, params, batch)


def over_rows(loss: Loss | None, default: RowsLoss, net: Any, *, metrics: Sequence[str] = ()) -> RowsLoss:
    """Returns the user's loss, or `default` if there is none.

    Args:
      loss: user's loss, or None.
      default: algorithm's own loss.
      net: algorithm's network.
      metrics: names of metrics that the algorithm reads.
    Raises:
      InputError: raised by the returned function if the user's loss returns an invalid result.
    """
    if loss is None:
        return default

    def chosen(params: PyTree, batch: Any) -> tuple[Array, Metrics]:
        value, found = _checked(loss(default, net, params, batch))
        if missing := [name for name in metrics if name not in found]:
            raise InputError(
                f"custom.loss: the config needs the metric {', '.join(missing)}, which it does not return: "
                "pass on those of default(params, batch)"
            )
        return value, found

    return chosen


def over_replay(loss: Loss | None, default: ReplayLoss, net: Any) -> ReplayLoss:
    """Returns the loss as `over_rows` does; priorities come from the algorithm's own loss."""
    if loss is None:
        return default

    def without_priority(params: PyTree, batch: Any) -> tuple[Array, Metrics]:
        value, (metrics, _) = default(params, batch)
        return value, metrics

    chosen = over_rows(loss, without_priority, net)

    def with_priority(params: PyTree, batch: Any) -> tuple[Array, tuple[Metrics, Array]]:
        value, metrics = chosen(params, batch)
        # no extra cost if the user's loss calls the default: the compiler merges both calls
        _, (_, priority) = default(jax.lax.stop_gradient(params), batch)
        return value, (metrics, priority)

    return with_priority


def _checked(result: Any) -> tuple[Array, Metrics]:
    expected = "custom.loss: it must return (loss, metrics), a scalar and a dict of scalars by name: "
    if not isinstance(result, tuple) or len(result) != 2:
        what = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise InputError(f"{expected}got {what}")
    value, metrics = result
    if not isinstance(metrics, dict) or not all(isinstance(name, str) for name in metrics):
        raise InputError(f"{expected}its metrics are {type(metrics).__name__} instead of a dict with names as keys")
    for name, scalar in {"the loss": value, **metrics}.items():
        if not _is_scalar(scalar):
            raise InputError(f"{expected}{name} is {_described(scalar)}: take the mean over the rows")
    if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise InputError(f"{expected}the loss is {_described(value)}: make it a float")
    return jnp.asarray(value), {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()}


def _is_scalar(x: Any) -> bool:
    return isinstance(x, bool | int | float) or (hasattr(x, "shape") and x.shape == ())


def _described(x: Any) -> str:
    return f"{x.dtype} {x.shape}" if hasattr(x, "shape") else type(x).__name__
