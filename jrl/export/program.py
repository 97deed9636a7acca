"""What a policy computes, as a flat list of primitive operations on a batch whose size is a symbol.

`trace` inlines every jitted or custom-gradient function, computes what does not depend on the observation, and drops
what the action does not depend on (critics, log-probabilities). All formats are made from the result.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.extend import core

from jrl.types import Array, InputError, PyTree, Space

# primitives that stand for the program inside them, and the parameter that holds it
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}


class Operation(NamedTuple):
    """One primitive of JAX; values are known by number."""

    primitive: Any  # jax.extend.core.Primitive
    params: dict[str, Any]  # as in the jaxpr; sizes may be the symbol of the batch
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Program(NamedTuple):
    """A function obs [N, *] -> action [N, *], to be called like one."""

    input: int
    output: int
    operations: tuple[Operation, ...]
    constants: dict[int, np.ndarray]
    types: dict[int, jax.ShapeDtypeStruct]  # of every value; the symbol `batch` stands for N
    batch: Any

    def __call__(self, obs: Array) -> Array:
        values: dict[int, Any] = {i: jnp.asarray(x) for i, x in self.constants.items()}
        values[self.input] = obs
        for op in self.operations:
            params = {name: self._sized(value, obs.shape[0]) for name, value in op.params.items()}
            result = op.primitive.bind(*(values[i] for i in op.inputs), **params)
            values.update(zip(op.outputs, result if op.primitive.multiple_results else [result]))
        return values[self.output]

    def _sized(self, param: Any, size: Any) -> Any:
        if type(param) is tuple:
            return tuple(self._sized(x, size) for x in param)
        return size if export.is_symbolic_dim(param) else param


def trace(act: Callable[[Array, PyTree], Array], observation: Space, carry: Callable[[int], PyTree]) -> Program:
    """The program of `act(obs [N, *], carry [N, ...]) -> action [N, *]`, for every N at least 1.

    Args:
      act: a pure function.
      observation: the space of one observation.
      carry: batch_size -> carry.
    Raises:
      InputError: the action depends on the carry (a recurrent policy), or a size is not a number or N.
    """
    (batch,) = export.symbolic_shape("n")
    obs = jax.ShapeDtypeStruct((batch, *observation.shape), np.dtype(observation.dtype))
    resized = lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)
    rows = jax.tree.map(resized, jax.eval_shape(lambda: carry(1)))
    closed = jax.make_jaxpr(act)(obs, rows)
    tracer = _Tracer(batch)
    inputs = [tracer.value(v.aval) for v in closed.jaxpr.invars]
    (output,) = tracer.walk(closed.jaxpr, closed.consts, inputs)
    operations, used = _needed(tracer.operations, output)
    if used & set(inputs[1:]):
        raise InputError("the action depends on what happened before (a recurrent policy): use jrl.load instead")
    types = {i: tracer.types[i] for i in used | {inputs[0]}}
    # on the host only now: a random key, which deterministic actions do not need, is no numpy array
    constants = {i: np.asarray(x) for i, x in tracer.constants.items() if i in used}
    for t in types.values():
        for size in t.shape:
            if export.is_symbolic_dim(size) and size is not batch and size != batch:
                raise InputError(f"an intermediate result has the size {size}, for a batch of n: it must be n")
    return Program(inputs[0], output, operations, constants, types, batch)


def _needed(operations: list[Operation], output: int) -> tuple[tuple[Operation, ...], set[int]]:
    """The operations that `output` depends on, and their values."""
    used, kept = {output}, []
    for op in reversed(operations):
        if used & set(op.outputs):
            used |= {*op.inputs, *op.outputs}
            kept.append(op)
    return tuple(reversed(kept)), used


def _simpler(eqn: core.JaxprEqn, constants: list[Any]) -> Callable[..., Any] | None:
    """The same by primitives that every format has; None where there is nothing to do."""
    params = eqn.params
    match eqn.primitive.name:
        case "stop_gradient":
            return lambda x: lax.reshape(x, x.shape)
        case "stack":
            return lambda *parts: lax.concatenate([jnp.expand_dims(x, params["axis"]) for x in parts], params["axis"])
        case "reduce_window_max" if _is_max_pool(params):
            return lambda x: _max_pool(x, params["window_dimensions"], params["window_strides"], params["padding"])
        case "gather" if constants[1] is not None:
            return _fixed_slice(params, np.asarray(constants[1]), _shape(eqn.invars[0]))
    return None


def _is_max_pool(params: dict[str, Any]) -> bool:
    dilated = {*params["base_dilation"], *params["window_dilation"]} != {1}
    edges = zip(params["window_dimensions"], params["padding"], strict=True)
    return not dilated and all(0 <= edge < width for width, pair in edges for edge in pair)


def _max_pool(x: Array, window: tuple[int, ...], strides: tuple[int, ...], padding: Any) -> Any:
    """Axis by axis the greatest of shifted slices, padded with the element at the edge, which the window holds anyway.

    The converter to ONNX makes of a window over four axes what onnxruntime cannot run, and cannot pad a batch of n.
    """
    for axis, (width, stride, (low, high)) in enumerate(zip(window, strides, padding, strict=True)):
        if (width, stride) != (1, 1):
            first, last = lax.slice_in_dim(x, 0, 1, 1, axis), lax.slice_in_dim(x, -1, None, 1, axis)
            padded = lax.concatenate([first] * low + [x] + [last] * high, axis)
            reach = stride * ((padded.shape[axis] - width) // stride) + 1
            parts = [lax.slice_in_dim(padded, i, i + reach, stride, axis) for i in range(width)]
            x = functools.reduce(lax.max, parts)
    return x


def _shape(atom: Any) -> tuple[Any, ...]:
    return atom.aval.shape


def _fixed_slice(params: dict[str, Any], start: np.ndarray, shape: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What x[..., 3] becomes where the batch is a symbol: a gather at one place that is known."""
    numbers = params["dimension_numbers"]
    offset, collapsed = numbers.offset_dims, numbers.collapsed_slice_dims
    if start.ndim != 1 or tuple(offset) != tuple(range(len(shape) - len(collapsed))):
        return None
    starts = [0] * len(shape)
    for axis, index in zip(numbers.start_index_map, start.tolist(), strict=True):
        starts[axis] = index
    stops = [a + size for a, size in zip(starts, params["slice_sizes"], strict=True)]
    for axis in numbers.start_index_map:
        if not 0 <= starts[axis] <= stops[axis] <= shape[axis]:
            return None
    return lambda x, _: lax.squeeze(lax.slice(x, starts, stops), collapsed)


class _Tracer:
    def __init__(self, batch: Any):
        self.batch = batch
        self.operations: list[Operation] = []
        self.constants: dict[int, Any] = {}
        self.types: dict[int, jax.ShapeDtypeStruct] = {}

    def value(self, aval: Any) -> int:
        number = len(self.types)
        self.types[number] = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        return number

    def constant(self, x: Any) -> int:
        number = self.value(jax.typeof(x))
        self.constants[number] = x
        return number

    def walk(self, jaxpr: core.Jaxpr, consts: Any, inputs: list[int]) -> list[int]:
        """Appends the operations of a jaxpr; the numbers of its results."""
        numbers: dict[Any, int] = dict(zip(jaxpr.constvars, map(self.constant, consts)))
        numbers |= zip(jaxpr.invars, inputs)
        read = lambda atom: self.constant(atom.val) if isinstance(atom, core.Literal) else numbers[atom]
        for eqn in jaxpr.eqns:
            numbers |= zip(eqn.outvars, self.equation(eqn, [read(atom) for atom in eqn.invars]))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: core.JaxprEqn, inputs: list[int]) -> list[int]:
        inner = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
        if isinstance(inner, core.ClosedJaxpr):
            return self.walk(inner.jaxpr, inner.consts, inputs)
        if isinstance(inner, core.Jaxpr):
            return self.walk(inner, (), inputs)
        symbolic = any(export.is_symbolic_dim(size) for v in eqn.outvars for size in _shape(v))
        if not symbolic and not eqn.effects and all(i in self.constants for i in inputs):
            result = eqn.primitive.bind(*(self.constants[i] for i in inputs), **eqn.params)
            return [self.constant(x) for x in (result if eqn.primitive.multiple_results else [result])]
        simpler = _simpler(eqn, [self.constants.get(i) for i in inputs])
        if simpler is not None:
            closed = jax.make_jaxpr(simpler)(*(self.types[i] for i in inputs))
            return self.walk(closed.jaxpr, closed.consts, inputs)
        outputs = [self.value(v.aval) for v in eqn.outvars]
        self.operations.append(Operation(eqn.primitive, eqn.params, tuple(inputs), tuple(outputs)))
        return outputs
