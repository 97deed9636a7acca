"""The parameters of a run's networks: `python -m jrl.config show CONFIG --network`."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax

from jrl.config import RunConfig, without_loss
from jrl.host import runtime
from jrl.run import build, build_collect
from jrl.run.preflight import resolved


class LayerRow(NamedTuple):
    """One array of parameters."""

    name: str  # dotted path; its first part is the part of the networks that it belongs to
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def rows(cfg: RunConfig) -> list[LayerRow]:
    """Returns the arrays that a run would learn, in the order of their names; none is made.

    Makes one environment, for its spaces.

    Raises:
      InputError: the environment, or the networks for its spaces, cannot be made.
    """
    runtime.apply(cfg.runtime)
    algo = build.algorithm(without_loss(resolved(cfg)), build_collect.spec_of(cfg))
    state = jax.eval_shape(algo.init, jax.random.key(0))
    params = {name: one.params for name, one in state.items()} if isinstance(state, dict) else state.params
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return [LayerRow(name(path), tuple(x.shape), str(x.dtype)) for path, x in jax.tree.leaves_with_path(params)]


def totals(found: list[LayerRow]) -> dict[str, int]:
    """Returns the number of parameters by part of the networks."""
    parts = {row.name.partition(".")[0]: 0 for row in found}
    for row in found:
        parts[row.name.partition(".")[0]] += row.size
    return parts


def lines(found: list[LayerRow]) -> Iterator[str]:
    """Yields the lines of a table: each array, each part, and all of them."""
    cells = [("name", "shape", "dtype", "parameters")]
    cells += [(row.name, str(list(row.shape)), row.dtype, f"{row.size:,}") for row in found]
    parts = totals(found)
    sums = [(name, "", "", f"{count:,}") for name, count in parts.items()]
    sums.append(("all", "", "", f"{sum(parts.values()):,}"))
    widths = [max(len(cell) for cell in column) for column in zip(*cells, *sums, strict=True)]
    ruler = "-" * (sum(widths) + 2 * len(widths) - 2)
    for i, (name, shape, dtype, count) in enumerate(cells + sums):
        if i in (1, len(cells)):
            yield ruler
        yield f"{name:{widths[0]}}  {shape:{widths[1]}}  {dtype:{widths[2]}}  {count:>{widths[3]}}"
