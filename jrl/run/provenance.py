"""Names the operation that makes a result non-finite: jax evaluates, a search goes back from the result.

    operation = first_bad_operation(fn, args, names, bad=[0])    # why result 0 of `fn(*args)` is not finite
    print(operation)                                             # the primitive, its line, its operands

jax evaluates the function with every intermediate value among its results. From a bad result the search goes back from
operand to operand, so that it never meets what does not reach that result, such as a branch that `where` does not take.
checkify sees no infinities, and jax_debug_infs stops at those that a mask is made of.
"""

import dataclasses
import itertools
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, Literal, jaxpr_as_fun

_MOST_CALLERS = 6  # that are printed


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a function, and where it is written."""

    primitive: str  # as jax calls it
    file: str  # "" if not known
    line: int
    function: str
    text: str  # of the line
    backward: bool  # its line is the one of the forward pass that it comes from
    callers: tuple[str, ...]  # file:line, innermost first
    inside: tuple[str, ...]  # the loops around it, outermost first, with the iteration (from 0)
    operands: tuple[str, ...]  # as `compact` writes them
    result: str
    read: str  # the argument whose numbers were not finite before any operation; "" if it was this operation

    def __str__(self) -> str:
        what = f"{self.primitive}, in the backward pass of" if self.backward else f"{self.primitive}, in"
        lines = [f"first bad operation: {what} {self.function or 'an unknown line'}"]
        if self.read:
            lines = [f"{self.read} is not finite; the first operation to compute with it: {what} {self.function}"]
        lines += [f"  {self.file}:{self.line}", f"    {self.text}"] if self.file else []
        lines += [f"  called at {', '.join(self.callers)}"] if self.callers else []
        lines += [f"  inside {' > '.join(self.inside)}"] if self.inside else []
        return "\n".join([*lines, *(f"  operand {x}" for x in self.operands), f"  result  {self.result}"])


def first_bad_operation(fn: Callable, args: tuple, names: Sequence[str], bad: int) -> Operation | None:
    """Finds the operation of `fn(*args)` whose non-finite result makes a result non-finite.

    Its operands are finite; or, where an argument is not finite, it is the first to compute with that. Infinite
    constants, such as those of a mask, are no finding as long as they stay infinities.

    Args:
      fn: can be traced by jax.
      args: trees of arrays.
      names: of the leaves of `args`, for messages.
      bad: position of the result among the leaves of all.
    Returns:
      The operation; None if the result is finite when every intermediate value is kept.
    """
    trail: list[_Step] = []
    left = _back(jax.make_jaxpr(fn)(*args), jax.tree.leaves(args), bad, None, (), trail)
    if not trail:
        return None
    trail.reverse()
    if left is not None:
        computes = (step for step in trail if step.places[-1].eqn.primitive.name not in _MOVES)
        return _describe(next(computes, trail[0]), names[left[0]])
    # it began in the first step, or that was given an infinite constant: then in the first that adds to it
    adds = (step for step in trail if step.followed is None or _adds(step))
    return _describe(next(adds, trail[0]))


def is_finite(x: Any) -> bool:
    """Returns whether an array, a number or None holds neither infinity nor NaN."""
    return x is None or not _is_float(x) or bool(np.isfinite(np.asarray(x)).all())


def compact(x: Any) -> str:
    """Describes a number, a short array, or the shape and range of a long one."""
    x = np.asarray(x)
    if x.size <= 16:
        return np.array2string(x, precision=4, max_line_width=100).replace("\n", "")
    finite = x[np.isfinite(x)]
    span = f"{finite.min():.4g} .. {finite.max():.4g}" if finite.size else "nothing finite"
    missing = f", {x.size - finite.size} not finite" if finite.size < x.size else ""
    return f"{x.dtype}{list(x.shape)} {span}{missing}"


# ---------------------------------------------------------------- the search


class _Place(NamedTuple):
    """An equation on the way to another; several make the address of an operation."""

    eqn: Any
    iteration: int = 0


class _Step(NamedTuple):
    """An operation on the way back from a bad result."""

    places: tuple[_Place, ...]  # the operation, behind the loops and functions around it
    operands: list[Any]
    result: Any
    followed: np.ndarray | None  # where the operand that the search goes on with is bad; None: it ends here


def _back(
    closed: ClosedJaxpr, args: Sequence[Any], at: int, spots: Any, around: tuple[_Place, ...], trail: list[_Step]
) -> tuple[int, np.ndarray] | None:
    """Follows the bad elements `spots` (None: all) of result `at` of a function back; the way is added to `trail`.

    Returns:
      The argument that they come from, and its elements; None if they begin inside the function.
    """
    jaxpr = closed.jaxpr
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars if not isinstance(v, DropVar)}
    results = jax.jit(jaxpr_as_fun(ClosedJaxpr(jaxpr.replace(outvars=list(made)), closed.consts)))(*args)
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars, *made), (*closed.consts, *args, *results)))
    read = lambda v: v.val if isinstance(v, Literal) else values[v]
    var = jaxpr.outvars[at]
    spots = _within(_bad(read(var)), spots)
    while spots.any() and not isinstance(var, Literal) and var in made:
        eqn = made[var]
        operands = [read(v) for v in eqn.invars]
        inner = _inside(eqn, operands, eqn.outvars.index(var), spots)
        if inner is None:  # an operation: on with the operand of which most is bad
            bad = [_taken(eqn, j, operands, spots) for j in range(len(operands))]
            i = max(range(len(bad)), key=lambda i: bad[i].sum(), default=-1)
            spots = bad[i] if bad else np.zeros((), bool)
            followed = spots if spots.any() else None
            trail.append(_Step((*around, _Place(eqn)), operands, values[var], followed))
        else:
            way = _back(inner.function, inner.args, inner.at, inner.spots, (*around, _Place(eqn, inner.turn)), trail)
            if way is None:
                return None
            i, spots = inner.before + way[0], way[1]
            if np.shape(operands[i]) != spots.shape:  # a row of what a scan goes over
                spots = spots & (np.arange(len(operands[i])) == inner.turn).reshape(-1, *(1,) * spots.ndim)
        var = eqn.invars[i]
    if isinstance(var, Literal) or var not in jaxpr.invars or not spots.any():
        return None
    return jaxpr.invars.index(var), spots


class _Inside(NamedTuple):
    """A function that an equation calls, and the part of its results that is followed."""

    function: ClosedJaxpr
    args: Sequence[Any]
    at: int
    spots: np.ndarray
    before: int = 0  # operands of the equation that stand before the function's
    turn: int = 0  # of a loop


def _inside(eqn, operands: list[Any], at: int, spots: np.ndarray) -> _Inside | None:
    """Returns the loop body, branch or callee behind the bad elements `spots` of result `at`; None: there is none."""
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        branch = min(max(int(operands[0]), 0), len(params["branches"]) - 1)
        return _Inside(params["branches"][branch], operands[1:], at, spots, 1)
    if name in ("scan", "while"):
        return _turn(eqn, operands, at, spots)
    for inner in params.values():  # jit, checkpoint, custom_jvp_call, ...: a function of the same arguments
        if hasattr(inner, "eqns") and _shapes(inner.invars) == _shapes(eqn.invars):
            return _Inside(inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ()), operands, at, spots)
    return None


def _turn(eqn, operands: list[Any], at: int, spots: np.ndarray) -> _Inside | None:
    """Returns the first turn of a loop that makes what it carries, or the followed row of its result, non-finite."""
    params, scan = eqn.params, eqn.primitive.name == "scan"
    body, before = params["jaxpr" if scan else "body_jaxpr"], 0 if scan else params["cond_nconsts"]
    given, rows = operands[before:], list[Any]()
    # what a scan goes over, and what it collects, has an axis more outside than inside
    carries = sum(x == y for x, y in zip(_shapes(body.outvars), _shapes(eqn.outvars)))
    if scan:
        num = sum(x == y for x, y in zip(_shapes(body.invars), _shapes(eqn.invars)))
        given, rows = given[:num], given[num:]
    consts, carry = given[: len(given) - carries], given[len(given) - carries :]
    turns: Iterable[int] = range(params["length"]) if scan else itertools.count()
    turns = reversed(range(params["length"])) if scan and params["reverse"] else turns
    goes_on = None if scan else jaxpr_as_fun(params["cond_jaxpr"])
    step = jax.jit(jaxpr_as_fun(body))
    for i in turns:
        if goes_on is not None and not goes_on(*operands[:before], *carry)[0]:
            break
        args = [*consts, *carry, *(x[i] for x in rows)]
        results = step(*args)
        bad = [_bad(x) for x in results[: len(carry)]]
        if at >= len(carry) and (row := _within(_bad(results[at]), spots[i])).any():
            return _Inside(body, args, at, row, before, i)
        if found := [j for j in (at, *range(len(carry))) if j < len(carry) and bad[j].any()]:
            return _Inside(body, args, found[0], bad[found[0]], before, i)
        carry = results[: len(carry)]
    return None


# operations whose result are elements of their first operand, those that move elements only, those that mix them
_PICKS = {
    "reshape",
    "broadcast_in_dim",
    "squeeze",
    "expand_dims",
    "slice",
    "dynamic_slice",
    "gather",
    "transpose",
    "rev",
}
_MOVES = _PICKS | {"concatenate", "select_n", "pad", "split", "tile", "copy", "copy_p", "device_put", "stop_gradient"}
_MOVES |= {"dynamic_update_slice", "convert_element_type", "bitcast_convert_type", "optimization_barrier"}
_MIXES = {"dot_general", "conv_general_dilated", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort"}


def _taken(eqn, i: int, operands: list[Any], spots: np.ndarray) -> np.ndarray:
    """Returns the bad elements of operand `i` that the elements `spots` of an operation's result are made of."""
    bad, name = _bad(operands[i]), eqn.primitive.name
    if name in _PICKS and i == 0 and bad.any():  # the operation itself says which
        index = jnp.arange(bad.size, dtype=jnp.int32).reshape(bad.shape)
        picked = eqn.primitive.bind(index, *operands[1:], **eqn.params)
        return bad & np.isin(index, np.asarray(picked)[spots])
    return bad if name in _MIXES else _within(bad, spots)


def _adds(step: _Step) -> bool:
    """Returns whether an operation makes NaN, or more infinities than it was given."""
    bad = _bad(step.result)
    more = step.followed is None or (step.followed.shape == bad.shape and bool((bad & ~step.followed).any()))
    return more or (_is_float(step.result) and bool(np.isnan(np.asarray(step.result)).any()))


def _shapes(variables: Iterable[Any]) -> list[Any]:
    return [getattr(v.aval, "shape", None) for v in variables]


def _bad(x: Any) -> np.ndarray:
    """Returns where an array is not finite; uint32 are the bits of floats (`ops.minibatch.row_taker`)."""
    if getattr(x, "dtype", None) == np.uint32:
        x = np.asarray(x).view(np.float32)
    return ~np.isfinite(np.asarray(x)) if _is_float(x) else np.zeros(np.shape(x), bool)


def _within(bad: np.ndarray, spots: np.ndarray | None) -> np.ndarray:
    """Returns the bad elements that are followed, where the shapes are the same, else all."""
    return bad & spots if spots is not None and spots.shape == bad.shape else bad


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype if hasattr(x, "dtype") else type(x), jnp.inexact)


# ---------------------------------------------------------------- lines


def _describe(step: _Step, read: str = "") -> Operation:
    eqn = step.places[-1].eqn
    frames: list[traceback.FrameSummary] = []
    inside = []
    for place in step.places:
        frames += _frames(place.eqn)
        if (name := place.eqn.primitive.name) in ("scan", "while"):
            inside.append(f"{name}{f' at {_where(frames[-1])}' if frames else ''}, iteration {place.iteration}")
    frame = frames[-1] if frames else traceback.FrameSummary("", 0, "")
    return Operation(
        primitive=eqn.primitive.name,
        file=_short(frame.filename),
        line=frame.lineno or 0,
        function=frame.name,
        text=frame.line or "",
        backward="transpose(" in str(eqn.source_info.name_stack),
        callers=tuple(dict.fromkeys(map(_where, reversed(frames))))[1 : 1 + _MOST_CALLERS],
        inside=tuple(inside),
        operands=tuple(compact(x) for x in step.operands if np.asarray(x).dtype.kind != "O"),
        result=compact(step.result),
        read=read,
    )


def _frames(eqn) -> list[traceback.FrameSummary]:
    """Returns the lines that led to an equation, outermost first, without those of libraries."""
    recorded = eqn.source_info.traceback
    walk = traceback.walk_tb(recorded.as_python_traceback()) if recorded else ()
    return [f for f in traceback.StackSummary.extract(walk, lookup_lines=False) if not _is_library(f.filename)]


_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_OWN = (__file__, f"{_PACKAGE}/debug.py")


def _is_library(filename: str) -> bool:
    return filename in _OWN or "<" in filename or (filename.startswith(_LIBRARIES) and _PACKAGE not in filename)


def _where(frame: traceback.FrameSummary) -> str:
    return f"{_short(frame.filename)}:{frame.lineno}"


def _short(filename: str) -> str:
    """Returns the path of jrl's file from `jrl/` on."""
    return filename.removeprefix(f"{Path(_PACKAGE).parent}/")
