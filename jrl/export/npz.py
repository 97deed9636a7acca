"""A program as JSON and npz, for `interpreter.py`."""

import io
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import export
from jax.lax import RoundingMethod

from jrl.export.interpreter import OPERATIONS
from jrl.export.traced_program import Operation, TracedProgram
from jrl.types import InputError

Types = list[jax.ShapeDtypeStruct]
Attributes = dict[str, Any]


def build_files(program: TracedProgram) -> dict[str, bytes]:
    """Returns `program.json` and `weights.npz`. Raises InputError as `list_operations`."""
    listing, weights = list_operations(program)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **weights)
    return {"program.json": json.dumps(listing, indent=1).encode(), "weights.npz": buffer.getvalue()}


def list_operations(program: TracedProgram) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of `interpreter.build_forward`: the program as plain data, and its arrays by number.

    Raises:
      InputError: operations that the interpreter does not have.
    """
    first = len(program.inputs)
    numbers = {i: k for k, i in enumerate(program.inputs)}
    numbers |= {i: k for k, i in enumerate(program.constants, first)}
    operations: list[dict[str, Any]] = []
    unknown: list[str] = []
    for op in program.operations:
        encoded = encode(op, [program.types[i] for i in op.inputs], [program.types[i] for i in op.outputs])
        if encoded is None:
            unknown.append(op.primitive.name)
            continue
        for output, (name, attributes) in zip(op.outputs, encoded):
            numbers[output] = first + len(program.constants) + len(operations)
            operations.append(
                {
                    "name": name,
                    "inputs": [numbers.get(i, -1) for i in op.inputs],
                    "output": numbers[output],
                    "dtype": find_dtype(program.types[output].dtype).name,
                    "attributes": attributes,
                }
            )
    if unknown:
        raise InputError(
            f"--format npz: the policy uses {', '.join(sorted(set(unknown)))}, which the numpy interpreter does not "
            "have in this form: use --format stablehlo or onnx"
        )
    weights = {str(k): to_numpy_dtype(x) for k, x in enumerate(program.constants.values(), first)}
    listing = {
        "version": 2,
        "inputs": first,
        "constants": len(weights),
        "outputs": [numbers[i] for i in program.outputs],
        "operations": operations,
    }
    return listing, weights


def to_numpy_dtype(x: np.ndarray) -> np.ndarray:
    """Returns an array in a dtype that numpy has without jax."""
    return x.astype(find_dtype(x.dtype))


def find_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which an export computes."""
    # numpy lacks bfloat16; float32 holds its values, and XLA does not round each operation to bfloat16 either
    return np.dtype(np.float32) if dtype.name == "bfloat16" else dtype


def encode(op: Operation, inputs: Types, outputs: Types) -> list[tuple[str, Attributes]] | None:
    """Returns (name in OPERATIONS, attributes) of each output; None: the interpreter lacks the operation."""
    name, params = op.primitive.name, op.params
    if name == "split":
        ends = np.cumsum(params["sizes"]).tolist()
        at_axis = lambda x: [x if axis == params["axis"] else None for axis in range(len(inputs[0].shape))]
        spans = zip([0, *ends[:-1]], ends)
        return [("slice", {"start": at_axis(a), "stop": at_axis(b), "step": at_axis(None)}) for a, b in spans]
    name = _RENAMED.get(name, name)
    if name not in OPERATIONS:
        return None
    # parameters of the other operations, such as `accuracy`, change nothing here
    attributes = _ATTRIBUTES[name](params, inputs, outputs) if name in _ATTRIBUTES else {}
    return None if attributes is None else [(name, attributes)]


def _encode_shape(shape: tuple[Any, ...]) -> list[int | str]:
    return [str(size) if export.is_symbolic_dim(size) else int(size) for size in shape]


def _slice(params: dict[str, Any], inputs: Types, outputs: Types) -> Attributes | None:
    stops = [None if stop == size else stop for stop, size in zip(params["limit_indices"], inputs[0].shape)]
    steps = params["strides"] or [1] * len(stops)
    if any(export.is_symbolic_dim(x) for x in (*params["start_indices"], *filter(None, stops), *steps)):
        return None
    return {"start": list(params["start_indices"]), "stop": stops, "step": list(steps)}


def _pad(params: dict[str, Any], inputs: Types, outputs: Types) -> Attributes | None:
    edges = [list(map(int, edge)) for edge in params["padding_config"]]
    return None if any(x < 0 or inner for *edge, inner in edges for x in edge) else {"edges": [e[:2] for e in edges]}


def _conv(params: dict[str, Any], inputs: Types, outputs: Types) -> Attributes | None:
    dilated = any(d != 1 for d in (*params["lhs_dilation"], *params["rhs_dilation"]))
    grouped = params["feature_group_count"] != 1 or params["batch_group_count"] != 1
    if dilated or grouped or len(inputs[0].shape) != 4 or any(p < 0 for pair in params["padding"] for p in pair):
        return None
    x, kernel, out = params["dimension_numbers"]  # positions of the axes NCHW, OIHW and NCHW
    nhwc, hwio = [x[0], x[2], x[3], x[1]], [kernel[2], kernel[3], kernel[1], kernel[0]]
    back = [0] * 4
    for position, axis in enumerate((out[0], out[2], out[3], out[1])):
        back[axis] = position
    padding = [list(map(int, pair)) for pair in params["padding"]]
    return {"strides": list(params["window_strides"]), "padding": padding, "layout": [nhwc, hwio, back]}


def _dot_general(params: dict[str, Any], inputs: Types, outputs: Types) -> Attributes:
    contract, batch = params["dimension_numbers"]
    return {"contract": [list(map(int, axes)) for axes in contract], "batch": [list(map(int, axes)) for axes in batch]}


_RENAMED = {
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "convert_element_type"), "convert"),
    "conv_general_dilated": "conv2d",
}
_axes = lambda params, inputs, outputs: {"axes": list(params["axes"])}
_axis = lambda params, inputs, outputs: {"axis": params["axes"][0]}
_ATTRIBUTES: dict[str, Callable[[dict[str, Any], Types, Types], Attributes | None]] = {
    "argmax": _axis,
    "argmin": _axis,
    "broadcast_in_dim": lambda params, inputs, outputs: {
        "shape": _encode_shape(params["shape"]),
        "dimensions": list(params["broadcast_dimensions"]),
    },
    "concatenate": lambda params, inputs, outputs: {"axis": params["dimension"]},
    "conv2d": _conv,
    "cumsum": lambda params, inputs, outputs: None if params["reverse"] else {"axis": params["axis"]},
    "div": lambda params, inputs, outputs: {} if np.issubdtype(outputs[0].dtype, np.floating) else None,
    "dot_general": _dot_general,
    "integer_pow": lambda params, inputs, outputs: {"y": params["y"]},
    "iota": lambda params, inputs, outputs: {"shape": _encode_shape(params["shape"]), "dimension": params["dimension"]},
    "pad": _pad,
    **dict.fromkeys(("reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"), _axes),
    "reshape": lambda params, inputs, outputs: {"shape": _encode_shape(params["new_sizes"])},
    "round": lambda params, inputs, outputs: (
        {} if params["rounding_method"] == RoundingMethod.TO_NEAREST_EVEN else None
    ),
    "select_n": lambda params, inputs, outputs: {} if len(inputs) == 3 and inputs[0].dtype == bool else None,
    "slice": _slice,
    "squeeze": lambda params, inputs, outputs: {"axes": list(params["dimensions"])},
    "transpose": lambda params, inputs, outputs: {"axes": list(params["permutation"])},
}
