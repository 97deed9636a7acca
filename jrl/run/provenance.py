"""Where the non-finite numbers of a result come from: a function evaluated operation by operation.

    operation = first_bad_operation(fn, args, names, bad=[0])    # why result 0 of `fn(*args)` is not finite
    print(operation)                                             # the primitive, its line, its operands

Infinities and NaN that do not reach the result, such as those of a branch that `where` does not take, are no finding,
nor are infinite constants, such as those of a mask, as long as they stay infinities.
"""

import dataclasses
import linecache
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, Literal, jaxpr_as_fun

_MOST_TRIED = 16  # operations that are tried for being enough by themselves
_MOST_CALLERS = 6  # that are printed


class Operand(NamedTuple):
    """An operand of an operation, or its result."""

    shape: tuple[int, ...]
    dtype: str
    low: float  # of the finite elements; NaN if there are none
    high: float
    non_finite: int  # elements
    extreme: str  # what is dangerous about it, in words; "" if nothing

    def __str__(self) -> str:
        span = f"{self.low:.4g}" if self.shape == () else f"{self.low:.4g} .. {self.high:.4g}"
        span = "nothing finite" if self.low != self.low else span
        shape = ",".join(map(str, self.shape))
        return f"{self.dtype}[{shape}] {span}" + (f"  <- {self.extreme}" if self.extreme else "")


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
    operands: tuple[Operand, ...]
    result: Operand
    example: str  # one element and its operands, of an elementwise operation; "" otherwise
    read: str  # the argument whose numbers were not finite before any operation; "" if it was this operation

    def __str__(self) -> str:
        what = f"{self.primitive}, in the backward pass of" if self.backward else f"{self.primitive}, in"
        lines = [f"first bad operation: {what} {self.function or 'an unknown line'}"]
        if self.read:
            lines = [f"{self.read} is not finite; the first operation to compute with it: {what} {self.function}"]
        lines += [f"  {self.file}:{self.line}", f"    {self.text}"] if self.file else []
        lines += [f"  called at {', '.join(self.callers)}"] if self.callers else []
        lines += [f"  inside {' > '.join(self.inside)}"] if self.inside else []
        lines += [f"  operand {x}" for x in self.operands]
        return "\n".join([*lines, f"  result  {self.result}", *([f"  {self.example}"] if self.example else [])])


def first_bad_operation(fn: Callable, args: tuple, names: Sequence[str], bad: Sequence[int]) -> Operation | None:
    """The first operation of `fn(*args)` whose non-finite result makes the results `bad` non-finite.

    It has finite operands; or, where an argument is not finite, it is the first to compute with that. Of several whose
    results are mixed on the way, it is the first that is enough without the others.

    Args:
      fn: can be traced by jax.
      args: trees of arrays.
      names: of the leaves of `args`, for messages.
      bad: positions among the leaves of the result.
    Returns:
      The operation; None if evaluating one operation after the other gives finite results.
    """
    closed = jax.make_jaxpr(fn)(*args)
    named = list(zip(names, jax.tree.leaves(args), strict=True))

    def run(only=None):
        interpreter = _Interpreter(only)
        out = interpreter.run(closed.jaxpr, closed.consts, interpreter.arguments(named))
        return interpreter, [out[i] for i in bad]

    interpreter, results = run()
    origins = _union(results)
    events = [key for key in interpreter.events if key in origins]
    if len(events) > 1:
        enough = (key for key in events[:_MOST_TRIED] if not all(is_finite(v.array) for v in run(key)[1]))
        events = [next(enough, events[0])]
    return interpreter.events[events[0]]() if events else None


def is_finite(x: Any) -> bool:
    """Whether an array, a number or None holds neither infinity nor NaN."""
    return not _is_float(x) or bool(np.isfinite(np.asarray(x)).all())


# ---------------------------------------------------------------- evaluation


class _Value(NamedTuple):
    array: Any
    origins: frozenset = frozenset()  # keys of what made it non-finite; none for an infinity that is a constant


class _Place(NamedTuple):
    """An equation on the way to another; several make the address of an operation."""

    eqn: Any
    position: int  # among its neighbours
    iteration: int = 0


class _Interpreter:
    """Evaluates a jaxpr equation by equation, and keeps for every non-finite value which events it comes from.

    An event is an operation whose result is not finite although its operands are, or an argument that is not finite.
    With `only`, every other event is undone: zeros stand for its non-finite elements.
    """

    def __init__(self, only: tuple | None = None):
        self.only = only
        self.events: dict[tuple, Callable[[], Operation | None]] = {}  # in the order of evaluation
        self._readers: dict[tuple, Operation] = {}  # the first to compute with an argument that is not finite
        self._movers: dict[tuple, Operation] = {}  # the first to pass it on

    def arguments(self, named: Iterable[tuple[str, Any]]) -> list[_Value]:
        values = []
        for name, array in named:
            key = ("", name)
            if is_finite(array):
                values.append(_Value(array))
            elif self.only in (None, key):
                self.events[key] = partial(self._reader, key)
                values.append(_Value(array, frozenset([key])))
            else:
                values.append(_Value(_zeroed(array)))
        return values

    def _reader(self, key: tuple) -> Operation | None:
        return self._readers.get(key, self._movers.get(key))

    def run(self, jaxpr, consts, args: Sequence[_Value], path: tuple[_Place, ...] = ()) -> list[_Value]:
        env = dict(zip(jaxpr.constvars, map(_Value, consts))) | dict(zip(jaxpr.invars, args))
        read = lambda v: _Value(_constant(v)) if isinstance(v, Literal) else env[v]
        uses = [*((i, v) for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars)]
        uses += [(len(jaxpr.eqns), v) for v in jaxpr.outvars]
        last = {v: i for i, v in uses if not isinstance(v, Literal)}
        for i, eqn in enumerate(jaxpr.eqns):
            inputs = [read(v) for v in eqn.invars]
            env.update(zip(eqn.outvars, self._equation(jaxpr, eqn, inputs, (*path, _Place(eqn, i)))))
            for v in (*eqn.invars, *eqn.outvars):
                if not isinstance(v, Literal) and last.get(v, i) == i:
                    env.pop(v, None)
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, jaxpr, eqn, inputs: list[_Value], path: tuple[_Place, ...]) -> list[_Value]:
        origins = _union(inputs)
        inner = self._descend(eqn, inputs, path) if origins else None
        if inner is not None:
            return inner
        whole = _evaluate(jaxpr, eqn, [v.array for v in inputs])
        finite = all(map(is_finite, whole))
        if not origins:
            if finite:
                return [_Value(x) for x in whole]
            inner = self._descend(eqn, inputs, path)
            if inner is not None and (self.only is not None or not all(is_finite(v.array) for v in inner)):
                return inner
        if origins:
            moved = eqn.primitive.name in _MOVES
            # floats may be carried as the bits of integers, which are always finite: their origins go with them
            out = [_Value(x, origins if not is_finite(x) or (moved and _is_integer(x)) else frozenset()) for x in whole]
            readers = self._movers if moved else self._readers
            for key in (key for key in origins - readers.keys() if key[0] == "" and not finite):
                readers[key] = _describe(path, inputs, whole, read=key[1])
            return out
        if not any(map(_has_nan, whole)) and not all(is_finite(v.array) for v in inputs):
            return [_Value(x) for x in whole]  # a constant infinity that is passed on
        key = tuple((place.position, place.iteration) for place in path)
        if self.only not in (None, key):
            return [_Value(x if is_finite(x) else _zeroed(x)) for x in whole]
        self.events[key] = partial(_describe, path, inputs, whole)
        return [_Value(x, frozenset() if is_finite(x) else frozenset([key])) for x in whole]

    def _descend(self, eqn, inputs: list[_Value], path: tuple[_Place, ...]) -> list[_Value] | None:
        """The results of an equation that contains others; None if it does not."""
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._scan(params, inputs, path)
        if name == "while":
            test, body = params["cond_jaxpr"], params["body_jaxpr"]
            n, m = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            carry, iteration = inputs[m:], 0
            while bool(jaxpr_as_fun(test)(*(v.array for v in inputs[:n] + carry))[0]):
                carry = self.run(body.jaxpr, body.consts, inputs[n:m] + carry, _at(path, iteration))
                iteration += 1
            return carry
        if name == "cond":
            branch = params["branches"][min(max(int(inputs[0].array), 0), len(params["branches"]) - 1)]
            return self.run(branch.jaxpr, branch.consts, inputs[1:], path)
        if name in _CALLS or name.startswith("remat"):
            inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
            return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs, path)
        return None

    def _scan(self, params, inputs: list[_Value], path: tuple[_Place, ...]) -> list[_Value] | None:
        body, n, m, length = params["jaxpr"], params["num_consts"], params["num_carry"], params["length"]
        consts, carry, xs = inputs[:n], inputs[n : n + m], inputs[n + m :]
        if length == 0:
            return None
        rows: list[list[_Value]] = []
        for i in reversed(range(length)) if params["reverse"] else range(length):
            row = []
            for x in xs:
                array = jax.lax.dynamic_index_in_dim(x.array, i, keepdims=False)
                row.append(_Value(array, x.origins if not is_finite(array) or _is_integer(array) else frozenset()))
            out = self.run(body.jaxpr, body.consts, [*consts, *carry, *row], _at(path, i))
            carry = out[:m]
            rows.append(out[m:])
        ys = list(zip(*(reversed(rows) if params["reverse"] else rows)))
        return [*carry, *(_Value(_stack([v.array for v in y]), _union(y)) for y in ys)]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CALLS = _names(
    "jit pjit closed_call core_call checkpoint custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_lin"
)
_MOVES = _names(
    "reshape broadcast_in_dim squeeze expand_dims slice dynamic_slice dynamic_update_slice gather concatenate select_n "
    "transpose rev pad copy copy_p convert_element_type bitcast_convert_type optimization_barrier stop_gradient split "
    "tile device_put"
)
_ELEMENTWISE = _names(
    "add add_any sub mul div rem neg max min pow integer_pow square sqrt rsqrt cbrt exp exp2 expm1 log log1p logistic "
    "tanh sinh cosh tan atanh acosh asin acos erf_inv lgamma digamma convert_element_type"
)


def _evaluate(jaxpr, eqn, arrays: list[Any]) -> list[Any]:
    """The results of one equation of `jaxpr`; what is dropped is None."""
    given = {v: x for v, x in zip(eqn.invars, arrays) if not isinstance(v, Literal)}
    kept = [v for v in eqn.outvars if not isinstance(v, DropVar)]
    one = jaxpr.replace(constvars=[], invars=list(given), outvars=kept, eqns=[eqn], effects=eqn.effects)
    results = iter(jaxpr_as_fun(ClosedJaxpr(one, ()))(*given.values()))
    return [None if isinstance(v, DropVar) else next(results) for v in eqn.outvars]


def _at(path: tuple[_Place, ...], iteration: int) -> tuple[_Place, ...]:
    return (*path[:-1], path[-1]._replace(iteration=iteration))


def _describe(path: tuple[_Place, ...], inputs: list[_Value], results: list[Any], read: str = "") -> Operation:
    eqn, name = path[-1].eqn, path[-1].eqn.primitive.name
    frames: list[traceback.FrameSummary] = []
    inside = []
    for place in path:
        frames += _frames(place.eqn)
        if place.eqn.primitive.name in ("scan", "while") and place is not path[-1]:
            where = f" at {_where(frames[-1])}" if frames else ""
            inside.append(f"{place.eqn.primitive.name}{where}, iteration {place.iteration}")
    frame = frames[-1] if frames else None
    callers = dict.fromkeys(map(_where, reversed(frames)))
    result = next(np.asarray(x) for x in results if not is_finite(x))
    arrays = [np.asarray(v.array) for v in inputs if _is_number(v.array)]
    example = ""
    if all(x.shape in ((), result.shape) for x in arrays) and name in _ELEMENTWISE:
        at = tuple(map(int, np.argwhere(~np.isfinite(result))[0]))
        values = ", ".join(f"{float(x[at if x.shape else ()]):.6g}" for x in arrays)
        example = f"at {list(at)}: " if at else ""
        example += f"{name}({values}) = {float(result[at]):.6g}"
    return Operation(
        primitive=name,
        file=_short(frame.filename) if frame else "",
        line=frame.lineno or 0 if frame else 0,
        function=frame.name if frame else "",
        text=linecache.getline(frame.filename, frame.lineno or 0).strip() if frame else "",
        backward="transpose(" in str(eqn.source_info.name_stack),
        callers=tuple(callers)[1 : 1 + _MOST_CALLERS],
        inside=tuple(inside),
        operands=tuple(_operand(name, i, x) for i, x in enumerate(arrays)),
        result=_operand("", 0, result),
        example=example,
        read=read,
    )


def _operand(primitive: str, position: int, x) -> Operand:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    wide = x.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (np.nan, np.nan)
    most = float(jnp.finfo(x.dtype).max) if floating else np.inf
    said = [f"{x.size - finite.size} of {x.size} not finite"] if finite.size < x.size else []
    if finite.size and floating:
        divides = (primitive in ("div", "rem") and position == 1) or primitive in ("rsqrt", "log")
        said += ["has zeros"] if divides and not finite.all() else []
        said += ["below zero"] if primitive in ("log", "sqrt", "rsqrt") and low < 0 else []
        said += ["not above -1"] if primitive == "log1p" and low <= -1 else []
        said += ["exp of it overflows"] if primitive in ("exp", "expm1", "exp2") and high > np.log(most) else []
        said += ["its square overflows"] if max(abs(low), abs(high)) > np.sqrt(most) else []
    return Operand(x.shape, str(x.dtype), low, high, x.size - finite.size, ", ".join(said))


def _frames(eqn) -> list[traceback.FrameSummary]:
    """The lines that led to an equation, outermost first, without those of libraries.

    They begin at the function that was traced: for an operation inside a library's jitted function there are none.
    """
    recorded = eqn.source_info.traceback
    if recorded is None:
        return []
    walk = traceback.walk_tb(recorded.as_python_traceback())
    return [f for f in traceback.StackSummary.extract(walk, lookup_lines=False) if not _is_library(f.filename)]


_HERE = Path(__file__).resolve()
_PACKAGE = _HERE.parents[1]
_STDLIB = Path(sysconfig.get_path("stdlib")).resolve()


def _is_library(filename: str) -> bool:
    path = Path(filename).resolve()
    if path.is_relative_to(_PACKAGE):
        return path in (_HERE, _PACKAGE / "debug.py")
    foreign = "site-packages" in path.parts or "dist-packages" in path.parts
    return foreign or path.is_relative_to(_STDLIB) or filename.startswith("<")


def _where(frame: traceback.FrameSummary) -> str:
    return f"{_short(frame.filename)}:{frame.lineno}"


def _short(filename: str) -> str:
    """Of a file of jrl, from `jrl/` on."""
    path = Path(filename).resolve()
    return str(path.relative_to(_PACKAGE.parent)) if path.is_relative_to(_PACKAGE) else filename


# ---------------------------------------------------------------- arrays


def _union(values: Iterable[_Value]) -> frozenset:
    return frozenset().union(*(v.origins for v in values))


def _is_float(x) -> bool:
    return x is not None and jnp.issubdtype(x.dtype if hasattr(x, "dtype") else type(x), jnp.inexact)


def _is_integer(x) -> bool:
    return x is not None and jnp.issubdtype(x.dtype if hasattr(x, "dtype") else type(x), jnp.integer)


def _is_number(x) -> bool:
    return _is_float(x) or _is_integer(x) or x.dtype == bool


def _has_nan(x) -> bool:
    return _is_float(x) and bool(np.isnan(np.asarray(x)).any())


def _constant(literal):
    dtype = getattr(literal.aval, "dtype", None)
    return literal.val if dtype is None else np.asarray(literal.val, dtype)


def _zeroed(x):
    """Zeros for what is not finite."""
    x = np.asarray(x)
    return jnp.asarray(np.where(np.isfinite(x), x, np.zeros_like(x)))


def _stack(rows: list[Any]):
    # in numpy where it is one: a concatenation of a thousand operands takes long to compile
    return jnp.asarray(np.stack(rows)) if _is_float(rows[0]) or _is_integer(rows[0]) else jnp.stack(rows)
