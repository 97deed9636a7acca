"""Runs a policy that was exported as npz. Needs only numpy, neither jax nor jrl.

`program.json` lists the operations: each has a name in OPERATIONS, the numbers of its inputs and of its output, the
dtype of the output and its attributes. The first numbers are the inputs [N, ...], which start with the observation. The
next numbers are the arrays of `weights.npz`. A size "n" in an attribute means N, "5*n" means 5 N.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

CONV_ROWS = 32  # images per product: the windows of an 84 x 84 x 4 image take half a megabyte


def load(directory: str | Path) -> Callable[..., list[np.ndarray]]:
    """Loads the function from inputs [N, ...] to outputs [N, ...] in a directory.

    Raises:
      OSError: a file is missing.
      ValueError: a file is damaged, or has another version.
    """
    directory = Path(directory)
    program = json.loads((directory / "program.json").read_text())
    if program["version"] != 2:
        raise ValueError(f"{directory}: program version {program['version']}, this file reads version 2")
    with np.load(directory / "weights.npz", allow_pickle=False) as weights:
        return build_forward(program, weights)


def build_forward(program: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Callable[..., list[np.ndarray]]:
    """Returns the function from inputs [N, ...] to outputs [N, ...] of a program and its arrays."""
    first = program["inputs"] + program["constants"]
    constants = [weights[str(i)] for i in range(program["inputs"], first)]
    operations = [_build_operation(**op) for op in program["operations"]]

    start: list[Any] = [*constants, *[None] * len(operations)]

    def forward(*inputs: np.ndarray) -> list[np.ndarray]:
        values = [*inputs, *start]
        with np.errstate(all="ignore"):  # overflow gives inf, as in jax
            for run, numbers, output, unused in operations:
                values[output] = run([values[i] for i in numbers], len(inputs[0]))
                for i in unused:
                    values[i] = None  # frees a layer's activations before the next layer
        return [values[i] for i in program["outputs"]]

    for (_, _, _, unused), last in zip(operations, _find_last_uses(operations, program["outputs"])):
        unused.extend(i for i in last if i >= first)
    return forward


def _build_operation(name: str, inputs: Sequence[int], output: int, dtype: str, attributes: dict[str, Any]) -> tuple:
    """Returns (function of inputs and N, numbers of the inputs, number of the output, list for unused values)."""
    function = OPERATIONS[name]
    output_dtype = np.dtype(dtype)
    is_symbolic = any(isinstance(d, str) for d in attributes.get("shape", ()))

    def run(values: list[np.ndarray], n: int) -> np.ndarray:
        own = attributes
        if is_symbolic:
            own = {**attributes, "shape": [_resolve_size(d, n) for d in attributes["shape"]]}
        return np.asarray(function(*values, **own)).astype(output_dtype, copy=False)

    return run, list(inputs), output, []


def _resolve_size(d: int | str, n: int) -> int:
    return d if isinstance(d, int) else n if d == "n" else int(d.removesuffix("*n")) * n


def _find_last_uses(operations: Sequence[tuple], outputs: Sequence[int]) -> list[list[int]]:
    """Returns, for each operation, its inputs that no later operation reads."""
    later, result = set(outputs), []
    for _, inputs, _, _ in reversed(operations):
        result.append(sorted(set(inputs) - later))
        later.update(inputs)
    return result[::-1]


# ---------------------------------------------------------------- operations, named as in jax.lax


def _broadcast_in_dim(x, shape, dimensions):
    full = [1] * len(shape)
    for size, axis in zip(x.shape, dimensions):
        full[axis] = size
    return np.broadcast_to(x.reshape(full), shape)


def _iota(shape, dimension):
    full = [1] * len(shape)
    full[dimension] = shape[dimension]
    return np.broadcast_to(np.arange(shape[dimension]).reshape(full), shape)


def _slice(x, start, stop, step):
    return x[tuple(map(slice, start, stop, step))]


def _dot_general(x, y, contract, batch):
    """Sums over the axes `contract`. Axes of the result: `batch`, then the other axes of x, then of y."""
    if x.ndim == y.ndim == 2 and contract == [[1], [0]]:
        return x @ y
    rest_x = [a for a in range(x.ndim) if a not in (*contract[0], *batch[0])]
    rest_y = [a for a in range(y.ndim) if a not in (*contract[1], *batch[1])]
    common, rows, columns = ([v.shape[a] for a in axes] for v, axes in ((x, batch[0]), (x, rest_x), (y, rest_y)))
    inner = int(np.prod([x.shape[a] for a in contract[0]], dtype=int))
    flat = lambda sizes: int(np.prod(sizes, dtype=int))
    x = x.transpose(*batch[0], *rest_x, *contract[0]).reshape(*common, flat(rows), inner)
    y = y.transpose(*batch[1], *contract[1], *rest_y).reshape(*common, inner, flat(columns))
    return np.matmul(x, y).reshape(*common, *rows, *columns)


def _conv2d(x, kernel, strides, padding, layout):
    """Convolves. `layout`: axes of x in the order NHWC, of the kernel in HWIO, and of NHWC in the result's order."""
    x = np.pad(x.transpose(layout[0]), [(0, 0), *padding, (0, 0)])
    kernel = kernel.transpose(layout[1])
    height, width, _, features = kernel.shape
    flat = kernel.reshape(-1, features)
    windows = sliding_window_view(x, (height, width), (1, 2))[:, :: strides[0], :: strides[1]]  # [N, H, W, C, h, w]
    out = np.empty((*windows.shape[:3], features), x.dtype)
    for i in range(0, len(x), CONV_ROWS):
        part = windows[i : i + CONV_ROWS]
        rows = part.transpose(0, 1, 2, 4, 5, 3).reshape(-1, len(flat))
        out[i : i + CONV_ROWS] = (rows @ flat).reshape(*part.shape[:3], features)
    return out.transpose(layout[2])


OPERATIONS: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "argmax": lambda x, axis: np.argmax(x, axis),
    "argmin": lambda x, axis: np.argmin(x, axis),
    "broadcast_in_dim": _broadcast_in_dim,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "concatenate": lambda *parts, axis: np.concatenate(parts, axis),
    "conv2d": _conv2d,
    "convert": lambda x: x,  # to the dtype of the output
    "cos": np.cos,
    "cumsum": lambda x, axis: np.cumsum(x, axis),
    "div": np.divide,
    "dot_general": _dot_general,
    "eq": np.equal,
    "erf": np.vectorize(math.erf, [float]),
    "erfc": np.vectorize(math.erfc, [float]),
    "exp": np.exp,
    "expm1": np.expm1,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "integer_pow": lambda x, y: np.power(x, y),
    "iota": _iota,
    "le": np.less_equal,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": lambda x: 0.5 * np.tanh(0.5 * x) + 0.5,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "pad": lambda x, value, edges: np.pad(x, edges, constant_values=value),
    "pow": np.power,
    "reduce_and": lambda x, axes: x.all(tuple(axes)),
    "reduce_max": lambda x, axes: x.max(tuple(axes)),
    "reduce_min": lambda x, axes: x.min(tuple(axes)),
    "reduce_or": lambda x, axes: x.any(tuple(axes)),
    "reduce_sum": lambda x, axes: x.sum(tuple(axes)),
    "reshape": lambda x, shape: x.reshape(shape),
    "round": np.rint,  # to even
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "select_n": lambda which, *cases: np.where(which, cases[1], cases[0]),
    "sign": np.sign,
    "sin": np.sin,
    "slice": _slice,
    "sqrt": np.sqrt,
    "square": np.square,
    "squeeze": lambda x, axes: x.squeeze(tuple(axes)),
    "sub": np.subtract,
    "tanh": np.tanh,
    "transpose": lambda x, axes: x.transpose(axes),
}
