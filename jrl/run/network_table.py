"""The parameters of a run's networks: `python -m jrl.config show CONFIG --network`."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jrl.config import RunConfig, without_loss
from jrl.host import runtime
from jrl.run import build, build_collect
from jrl.run.preflight import resolved


def parameters(cfg: RunConfig) -> dict[str, Any]:
    """Returns dotted path -> shape and dtype of each array that a run would learn. Makes one environment.

    Raises:
      InputError: the environment, or the networks for its spaces, cannot be made.
    """
    runtime.apply(cfg.runtime)
    algo = build.algorithm(without_loss(resolved(cfg)), build_collect.spec_of(cfg))
    state = jax.eval_shape(algo.init, jax.random.key(0))
    params = {name: one.params for name, one in state.items()} if isinstance(state, dict) else state.params
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {name(path): x for path, x in jax.tree.leaves_with_path(params)}


def lines(arrays: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a table: each array, each part (first name of a path), and all of them."""
    parts: dict[str, int] = {}
    for name, x in arrays.items():
        part = name.partition(".")[0]
        parts[part] = parts.get(part, 0) + math.prod(x.shape)
    cells = [("name", "shape", "dtype", "parameters")]
    cells += [(name, str(list(x.shape)), str(x.dtype), f"{math.prod(x.shape):,}") for name, x in arrays.items()]
    sums = [(name, "", "", f"{count:,}") for name, count in [*parts.items(), ("all", sum(parts.values()))]]
    widths = [max(map(len, column)) for column in zip(*cells, *sums, strict=True)]
    ruler = "-" * (sum(widths) + 2 * len(widths) - 2)
    for i, (name, shape, dtype, count) in enumerate(cells + sums):
        if i in (1, len(cells)):
            yield ruler
        yield f"{name:{widths[0]}}  {shape:{widths[1]}}  {dtype:{widths[2]}}  {count:>{widths[3]}}"
