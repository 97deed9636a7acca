"""Computation of a policy, as a flat list of primitive operations on a batch whose size is a symbol.

`trace` inlines every jitted or custom-gradient function, computes what does not depend on the observation, and drops
what the action, now or later, does not depend on (critics, log-probabilities). All formats are made from the result.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.extend import core

from jrl.types import Array, InputError, PyTree, Space, element

# primitives that stand for the program inside them, and the parameter that holds it
_CALLS = {
    **dict.fromkeys(("jit", "pjit", "remat2", "checkpoint"), "jaxpr"),
    **dict.fromkeys(("closed_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}


class Operation(NamedTuple):
    """One primitive of JAX; values are known by number."""

    primitive: Any  # jax.extend.core.Primitive
    params: dict[str, Any]  # as in the jaxpr; sizes may be the symbol of the batch
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Program(NamedTuple):
    """A function of arrays [N, ...] to arrays [N, ...], to be called like one.

    Inputs: those of the observation, in the order of `jrl.spaces.leaves`; the memory's; the reward, if `reads_reward`;
    begins, if `reads_begins`. Outputs: those of the action, in the same order; the memory's.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    num_obs: int
    num_memory: int  # arrays of the memory on which actions depend; 0 without
    reads_reward: bool
    reads_begins: bool
    operations: tuple[Operation, ...]
    constants: dict[int, np.ndarray]
    types: dict[int, jax.ShapeDtypeStruct]  # of every value; the symbol `batch` stands for N
    batch: Any
    # of a function of weights: those of the constants, which come last, that are such: (value, which leaf of them)
    weights: tuple[tuple[int, int], ...] = ()

    def __call__(self, *inputs: Array) -> tuple[Array, ...]:
        values: dict[int, Any] = {i: jnp.asarray(x) for i, x in self.constants.items()}
        values.update(zip(self.inputs, inputs, strict=True))
        for op in self.operations:
            params = op.params
            if inputs:
                params = {name: self._sized(value, inputs[0].shape[0]) for name, value in params.items()}
            result = op.primitive.bind(*(values[i] for i in op.inputs), **params)
            values.update(zip(op.outputs, result if op.primitive.multiple_results else [result]))
        return tuple(values[i] for i in self.outputs)

    @property
    def memory(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes [N, ...] and dtypes of the memory."""
        return tuple(self.types[i] for i in self.inputs[self.num_obs : self.num_obs + self.num_memory])

    def _sized(self, param: Any, size: Any) -> Any:
        if type(param) is tuple:
            return tuple(self._sized(x, size) for x in param)
        return multiple(param) * size if export.is_symbolic_dim(param) else param


def trace(
    step: Callable[..., tuple[PyTree, PyTree]],
    observation: Space,
    memory: Callable[[int], PyTree],
    weights: tuple[PyTree, ...] = (),
) -> Program:
    """Traces the program of `step(*weights, obs, memory, reward, begins) -> (action, memory)`, for every N >= 1.

    Args:
      step: a pure function, see `jrl.export.source.Source`.
      observation: the space of one observation.
      memory: batch_size -> what is remembered [N, ...].
      weights: arrays that other ones can take the place of afterwards: nothing is computed of them beforehand.
    Raises:
      InputError: a size is not a number or N.
    """
    (batch,) = export.symbolic_shape("n")
    sized = lambda x: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype)
    obs, start = element(observation), jax.eval_shape(lambda: memory(1))
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), start)
    scalars = [jax.ShapeDtypeStruct((batch,), np.dtype(dtype)) for dtype in ("float32", "bool")]
    leaves = jax.tree.leaves(weights)
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
    arguments = (*given, jax.tree.map(sized, obs), rows, *scalars)
    closed, results = jax.make_jaxpr(step, return_shape=True)(*arguments)
    tracer = _Tracer(batch)
    inputs = [tracer.value(v.aval) for v in closed.jaxpr.invars]
    outputs = tracer.walk(closed.jaxpr, closed.consts, inputs)
    parameters, inputs = inputs[: len(leaves)], inputs[len(leaves) :]
    num_obs, num_actions = len(jax.tree.leaves(obs)), len(jax.tree.leaves(results[0]))
    before, after = inputs[num_obs:-2], outputs[num_actions:]
    kept: list[int] = []  # arrays of the memory on which the action depends, now or by way of other arrays of it
    while True:
        wanted = [*outputs[:num_actions], *(after[i] for i in kept)]
        operations, used = _needed(tracer.operations, wanted)
        found = [i for i, number in enumerate(before) if number in used]
        if found == kept:
            break
        kept = found
    reward, begins = inputs[-2:]
    flags = [number for number in (reward, begins) if number in used]
    inputs = [*inputs[:num_obs], *(before[i] for i in kept), *flags]
    read = tuple((number, i) for i, number in enumerate(parameters) if number in used)
    types = {i: tracer.types[i] for i in {*used, *inputs}}
    # on the host only now: a random key, which deterministic actions do not need, is no numpy array
    constants = {i: np.asarray(x) for i, x in tracer.constants.items() if i in used}
    constants |= {number: np.asarray(leaves[i]) for number, i in read}
    for t in types.values():
        for size in t.shape:
            if export.is_symbolic_dim(size) and not multiple(size):
                raise InputError(f"an intermediate result has the size {size}, for a batch of n: it must be a multiple")
    reads = (reward in used, begins in used)
    return Program(tuple(inputs), tuple(wanted), num_obs, len(kept), *reads, operations, constants, types, batch, read)


def multiple(size: Any) -> int:
    """Returns k of a symbolic size k n; 0 where it is none."""
    found = re.fullmatch(r"(?:(\d+)\*)?n", str(size))
    return int(found[1] or 1) if found else 0


def _needed(operations: list[Operation], outputs: list[int]) -> tuple[tuple[Operation, ...], set[int]]:
    """Returns the operations that `outputs` depend on, and their values."""
    used, kept = set(outputs), []
    for op in reversed(operations):
        if used & set(op.outputs):
            used |= {*op.inputs, *op.outputs}
            kept.append(op)
    return tuple(reversed(kept)), used


def _simpler(eqn: core.JaxprEqn, constants: list[Any]) -> Callable[..., Any] | None:
    """Returns the same by primitives that every format has; None where there is nothing to do."""
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
        case "scatter-add" if constants[1] is not None:
            return _fixed_add(params, np.asarray(constants[1]), _shape(eqn.invars[0]))
    return None


def _is_max_pool(params: dict[str, Any]) -> bool:
    dilated = {*params["base_dilation"], *params["window_dilation"]} != {1}
    edges = zip(params["window_dimensions"], params["padding"], strict=True)
    return not dilated and all(0 <= edge < width for width, pair in edges for edge in pair)


def _max_pool(x: Array, window: tuple[int, ...], strides: tuple[int, ...], padding: Any) -> Any:
    """Returns the greatest of shifted slices, axis by axis, padded with the edge, which the window holds anyway.

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


def _keeps_state_only(scan: core.JaxprEqn) -> bool:
    """Returns whether a scan goes over no rows and collects none, each of which has an axis less inside."""
    body, shapes = scan.params["jaxpr"], lambda variables: [_shape(v) for v in variables]
    return shapes(body.jaxpr.invars) == shapes(scan.invars) and shapes(body.jaxpr.outvars) == shapes(scan.outvars)


def _fixed_slice(params: dict[str, Any], start: np.ndarray, shape: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Replaces x[..., 3] where the batch is a symbol by a gather at one place that is known."""
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


def _fixed_add(params: dict[str, Any], start: np.ndarray, shape: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Replaces x.at[3].add(y) where the place along the first axis is known by padding and a sum."""
    numbers = params["dimension_numbers"]
    single = start.shape == (1,) and numbers.inserted_window_dims == (0,) and not numbers.operand_batching_dims
    if (
        not single
        or numbers.scatter_dims_to_operand_dims != (0,)
        or numbers.update_window_dims != tuple(range(len(shape) - 1))
    ):
        return None
    before = int(start[0])
    if not 0 <= before < shape[0]:
        return None
    edges = [(before, shape[0] - before - 1, 0), *[(0, 0, 0)] * (len(shape) - 1)]
    return lambda x, _, y: x + lax.pad(y[None], np.zeros((), y.dtype), edges)


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
        """Appends the operations of a jaxpr, and returns the numbers of its results."""
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
        if eqn.primitive.name == "scan" and _keeps_state_only(eqn):
            return self.repeated(eqn.params, inputs)
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

    def repeated(self, params: dict[str, Any], inputs: list[int]) -> list[int]:
        """Writes out a loop over a state alone, such as `fori_loop` with a fixed number of turns."""
        body = params["jaxpr"]
        num_consts = len(inputs) - len(body.jaxpr.outvars)
        consts, state = inputs[:num_consts], inputs[num_consts:]
        for _ in range(params["length"]):
            state = self.walk(body.jaxpr, body.consts, [*consts, *state])
        return state
