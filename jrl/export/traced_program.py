"""A policy as a flat list of primitive operations on a batch of symbolic size.

`trace` inlines jitted and custom-gradient functions, and computes values that do not depend on the observation. It
drops values that no action depends on, now or later (critics, log-probabilities). All formats use the result.
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

# primitives that call a jaxpr -> the parameter that holds the jaxpr
_CALLS = {
    **dict.fromkeys(("jit", "pjit", "remat2", "checkpoint"), "jaxpr"),
    **dict.fromkeys(("closed_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}


class Operation(NamedTuple):
    """A primitive of JAX. Values have numbers."""

    primitive: Any  # jax.extend.core.Primitive
    params: dict[str, Any]  # as in the jaxpr; sizes may be symbolic
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class TracedProgram(NamedTuple):
    """A callable from arrays [N, ...] to arrays [N, ...].

    Inputs: leaves of the observation, in the order of `jrl.spaces.leaves`; leaves of the memory; the reward, if
    `reads_reward`; begins, if `reads_begins`. Outputs: leaves of the action, in the same order; leaves of the memory.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    num_obs: int
    num_memory: int  # memory arrays on which actions depend
    reads_reward: bool
    reads_begins: bool
    operations: tuple[Operation, ...]
    constants: dict[int, np.ndarray]
    types: dict[int, jax.ShapeDtypeStruct]  # shape and dtype of every value
    batch: Any  # the symbol for N
    # constants that are weights: (number of the value, index of the weights' leaf)
    weights: tuple[tuple[int, int], ...] = ()

    def __call__(self, *inputs: Array) -> tuple[Array, ...]:
        values: dict[int, Any] = {i: jnp.asarray(x) for i, x in self.constants.items()}
        values.update(zip(self.inputs, inputs, strict=True))
        for op in self.operations:
            params = op.params
            if inputs:
                params = {name: self.replace_batch(value, inputs[0].shape[0]) for name, value in params.items()}
            result = op.primitive.bind(*(values[i] for i in op.inputs), **params)
            values.update(zip(op.outputs, result if op.primitive.multiple_results else [result]))
        return tuple(values[i] for i in self.outputs)

    @property
    def memory(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes [N, ...] and dtypes of the memory."""
        return tuple(self.types[i] for i in self.inputs[self.num_obs : self.num_obs + self.num_memory])

    def replace_batch(self, param: Any, size: Any) -> Any:
        """Returns a shape, or another parameter of an operation, with the number `size` for N."""
        if type(param) is tuple:
            return tuple(self.replace_batch(x, size) for x in param)
        return _find_multiple(param) * size if export.is_symbolic_dim(param) else param


def trace(
    step: Callable[..., tuple[PyTree, PyTree]],
    observation: Space,
    memory: Callable[[int], PyTree],
    weights: tuple[PyTree, ...] = (),
) -> TracedProgram:
    """Traces `step(*weights, obs, memory, reward, begins) -> (action, memory)` for every N >= 1.

    Args:
      step: pure function, see `jrl.export.policy_function.PolicyFunction`.
      observation: space of an observation.
      memory: batch size N -> memory [N, ...].
      weights: arrays that can be replaced later: no operation on weights is computed here.
    Raises:
      InputError: a size that is neither a number nor a multiple of N.
    """
    (batch,) = export.symbolic_shape("n")
    batched = lambda x: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype)
    obs, start = element(observation), jax.eval_shape(lambda: memory(1))
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), start)
    scalars = [jax.ShapeDtypeStruct((batch,), np.dtype(dtype)) for dtype in ("float32", "bool")]
    leaves = jax.tree.leaves(weights)
    weight_types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
    arguments = (*weight_types, jax.tree.map(batched, obs), rows, *scalars)
    closed, results = jax.make_jaxpr(step, return_shape=True)(*arguments)
    tracer = _Tracer(batch)
    inputs = [tracer.add_value(v.aval) for v in closed.jaxpr.invars]
    outputs = tracer.add_jaxpr(closed.jaxpr, closed.consts, inputs)
    parameters, inputs = inputs[: len(leaves)], inputs[len(leaves) :]
    num_obs, num_actions = len(jax.tree.leaves(obs)), len(jax.tree.leaves(results[0]))
    before, after = inputs[num_obs:-2], outputs[num_actions:]
    kept: list[int] = []  # memory arrays on which the action depends, directly or through other memory arrays
    while True:
        wanted = [*outputs[:num_actions], *(after[i] for i in kept)]
        operations, used = _find_needed(tracer.operations, wanted)
        read_memory = [i for i, number in enumerate(before) if number in used]
        if read_memory == kept:
            break
        kept = read_memory
    reward, begins = inputs[-2:]
    flags = [number for number in (reward, begins) if number in used]
    inputs = [*inputs[:num_obs], *(before[i] for i in kept), *flags]
    read = tuple((number, i) for i, number in enumerate(parameters) if number in used)
    types = {i: tracer.types[i] for i in {*used, *inputs}}
    # only used constants: a random key, which deterministic actions do not use, cannot become a numpy array
    constants = {i: np.asarray(x) for i, x in tracer.constants.items() if i in used}
    constants |= {number: np.asarray(leaves[i]) for number, i in read}
    for t in types.values():
        for size in t.shape:
            if export.is_symbolic_dim(size) and not _find_multiple(size):
                raise InputError(
                    f"intermediate results: expected sizes that are multiples of the batch size n, got {size}"
                )
    reads = (reward in used, begins in used)
    return TracedProgram(
        tuple(inputs), tuple(wanted), num_obs, len(kept), *reads, operations, constants, types, batch, read
    )


def _find_multiple(size: Any) -> int:
    """Returns k of a symbolic size k n; 0: another size."""
    match = re.fullmatch(r"(?:(\d+)\*)?n", str(size))
    return int(match[1] or 1) if match else 0


def _find_needed(operations: list[Operation], outputs: list[int]) -> tuple[tuple[Operation, ...], set[int]]:
    used, kept = set(outputs), []
    for op in reversed(operations):
        if used & set(op.outputs):
            used |= {*op.inputs, *op.outputs}
            kept.append(op)
    return tuple(reversed(kept)), used


def _simplify(eqn: core.JaxprEqn, constants: list[Any]) -> Callable[..., Any] | None:
    """Returns an equal function of primitives that every format has; None: the primitive stays."""
    params = eqn.params
    match eqn.primitive.name:
        case "stop_gradient":
            return lambda x: lax.reshape(x, x.shape)
        case "stack":
            return lambda *parts: lax.concatenate([jnp.expand_dims(x, params["axis"]) for x in parts], params["axis"])
        case "reduce_window_max" if _is_max_pool(params):
            return lambda x: _max_pool(x, params["window_dimensions"], params["window_strides"], params["padding"])
        case "gather" if constants[1] is not None:
            return _replace_gather(params, np.asarray(constants[1]), _shape(eqn.invars[0]))
        case "gather":
            return _replace_lookup(params, _shape(eqn.invars[0]))
        case "scatter-add" if constants[1] is not None:
            return _replace_scatter(params, np.asarray(constants[1]), _shape(eqn.invars[0]))
    return None


def _is_max_pool(params: dict[str, Any]) -> bool:
    is_dilated = {*params["base_dilation"], *params["window_dilation"]} != {1}
    edges = zip(params["window_dimensions"], params["padding"], strict=True)
    return not is_dilated and all(0 <= edge < width for width, pair in edges for edge in pair)


def _max_pool(x: Array, window: tuple[int, ...], strides: tuple[int, ...], padding: Any) -> Any:
    """Returns the maximum of shifted slices, axis by axis. The padding repeats edge values, which each window contains.

    onnxruntime cannot run jax2onnx's window over four axes, and jax2onnx cannot pad a batch of symbolic size.
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
    body, shapes = scan.params["jaxpr"], lambda variables: [_shape(v) for v in variables]
    return shapes(body.jaxpr.invars) == shapes(scan.invars) and shapes(body.jaxpr.outvars) == shapes(scan.outvars)


def _replace_gather(params: dict[str, Any], start: np.ndarray, shape: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Returns a slice instead of a gather at one constant index, such as x[..., 3]."""
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


def _replace_lookup(params: dict[str, Any], shape: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Returns a product with one-hot vectors instead of a gather of rows of a table, such as table[index]."""
    numbers = params["dimension_numbers"]
    rows = (numbers.collapsed_slice_dims, numbers.start_index_map, params["slice_sizes"][1:]) == ((0,), (0,), shape[1:])
    if len(shape) != 2 or not rows:
        return None
    return lambda table, index: jax.nn.one_hot(index[..., 0], shape[0], dtype=table.dtype) @ table


def _replace_scatter(params: dict[str, Any], start: np.ndarray, shape: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Returns padding and a sum instead of x.at[3].add(y) at a constant index of the first axis."""
    numbers = params["dimension_numbers"]
    is_single = start.shape == (1,) and numbers.inserted_window_dims == (0,) and not numbers.operand_batching_dims
    if (
        not is_single
        or numbers.scatter_dims_to_operand_dims != (0,)
        or numbers.update_window_dims != tuple(range(len(shape) - 1))
    ):
        return None
    index = int(start[0])
    if not 0 <= index < shape[0]:
        return None
    edges = [(index, shape[0] - index - 1, 0), *[(0, 0, 0)] * (len(shape) - 1)]
    return lambda x, _, y: x + lax.pad(y[None], np.zeros((), y.dtype), edges)


class _Tracer:
    def __init__(self, batch: Any):
        self.batch = batch
        self.operations: list[Operation] = []
        self.constants: dict[int, Any] = {}
        self.types: dict[int, jax.ShapeDtypeStruct] = {}

    def add_value(self, aval: Any) -> int:
        number = len(self.types)
        self.types[number] = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        return number

    def add_constant(self, x: Any) -> int:
        number = self.add_value(jax.typeof(x))
        self.constants[number] = x
        return number

    def add_jaxpr(self, jaxpr: core.Jaxpr, consts: Any, inputs: list[int]) -> list[int]:
        """Appends the operations of a jaxpr; returns the numbers of its results."""
        numbers: dict[Any, int] = dict(zip(jaxpr.constvars, map(self.add_constant, consts)))
        numbers |= zip(jaxpr.invars, inputs)
        read = lambda atom: self.add_constant(atom.val) if isinstance(atom, core.Literal) else numbers[atom]
        for eqn in jaxpr.eqns:
            numbers |= zip(eqn.outvars, self.add_equation(eqn, [read(atom) for atom in eqn.invars]))
        return [read(atom) for atom in jaxpr.outvars]

    def add_equation(self, eqn: core.JaxprEqn, inputs: list[int]) -> list[int]:
        inner = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
        if isinstance(inner, core.ClosedJaxpr):
            return self.add_jaxpr(inner.jaxpr, inner.consts, inputs)
        if isinstance(inner, core.Jaxpr):
            return self.add_jaxpr(inner, (), inputs)
        if eqn.primitive.name == "scan" and _keeps_state_only(eqn):
            return self.unroll_loop(eqn.params, inputs)
        is_symbolic = any(export.is_symbolic_dim(size) for v in eqn.outvars for size in _shape(v))
        if not is_symbolic and not eqn.effects and all(i in self.constants for i in inputs):
            result = eqn.primitive.bind(*(self.constants[i] for i in inputs), **eqn.params)
            return [self.add_constant(x) for x in (result if eqn.primitive.multiple_results else [result])]
        simplified = _simplify(eqn, [self.constants.get(i) for i in inputs])
        if simplified is not None:
            closed = jax.make_jaxpr(simplified)(*(self.types[i] for i in inputs))
            return self.add_jaxpr(closed.jaxpr, closed.consts, inputs)
        outputs = [self.add_value(v.aval) for v in eqn.outvars]
        self.operations.append(Operation(eqn.primitive, eqn.params, tuple(inputs), tuple(outputs)))
        return outputs

    def unroll_loop(self, params: dict[str, Any], inputs: list[int]) -> list[int]:
        """Appends the operations of all iterations of a loop without scanned values, such as `fori_loop`."""
        body = params["jaxpr"]
        num_consts = len(inputs) - len(body.jaxpr.outvars)
        consts, state = inputs[:num_consts], inputs[num_consts:]
        for _ in range(params["length"]):
            state = self.add_jaxpr(body.jaxpr, body.consts, [*consts, *state])
        return state
