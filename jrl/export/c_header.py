"""A program as `policy.h`: one function in C that acts for one observation.

Each operation becomes a C expression of its inputs' elements. An expression is stored in an array on the stack if
several operations read it, or if an operation reads its elements several times. Other expressions are part of the
operation that reads them, so an activation function is computed in the loop that adds the bias.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl import spaces
from jrl.export import npz
from jrl.export.policy_function import PolicyFunction
from jrl.export.traced_program import TracedProgram
from jrl.types import Discrete, InputError, Leaf, MultiBinary, MultiDiscrete

Index = tuple[str, ...]  # C expressions, one for each axis; "0" for an axis of one element
Shape = tuple[int, ...]

_TYPES = {
    "bool": "bool",
    "float32": "float",
    "float64": "double",
    **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}

# operation, named as in `interpreter.OPERATIONS` -> C expression of its inputs {0}, {1}, ..., for floats
_EXPRESSIONS = {
    "abs": "fabsf({0})",
    "add": "({0} + {1})",
    "and": "({0} & {1})",
    "clamp": "policy_min(policy_max({0}, {1}), {2})",
    "cos": "cosf({0})",
    "div": "({0} / {1})",
    "eq": "({0} == {1})",
    "erf": "erff({0})",
    "erfc": "erfcf({0})",
    "exp": "expf({0})",
    "expm1": "expm1f({0})",
    "floor": "floorf({0})",
    "ge": "({0} >= {1})",
    "gt": "({0} > {1})",
    "le": "({0} <= {1})",
    "log": "logf({0})",
    "log1p": "log1pf({0})",
    "logistic": "(1.0f / (1.0f + expf(-{0})))",
    "lt": "({0} < {1})",
    "max": "policy_max({0}, {1})",
    "min": "policy_min({0}, {1})",
    "mul": "({0} * {1})",
    "ne": "({0} != {1})",
    "neg": "(-{0})",
    "not": "(~{0})",
    "or": "({0} | {1})",
    "pow": "powf({0}, {1})",
    "round": "rintf({0})",
    "rsqrt": "(1.0f / sqrtf({0}))",
    "select_n": "({0} ? {2} : {1})",
    "sign": "(float)(({0} > 0) - ({0} < 0))",
    "sin": "sinf({0})",
    "sqrt": "sqrtf({0})",
    "square": "({0} * {0})",
    "sub": "({0} - {1})",
    "tanh": "tanhf({0})",
}
_INTEGER_EXPRESSIONS = {
    "abs": "({0} < 0 ? -{0} : {0})",
    "clamp": "({1} < {0} ? {0} : {1} > {2} ? {2} : {1})",
    "max": "({0} > {1} ? {0} : {1})",
    "min": "({0} < {1} ? {0} : {1})",
    "sign": "(({0} > 0) - ({0} < 0))",
}
_INTEGER = {"add", "and", "eq", "ge", "gt", "le", "lt", "mul", "ne", "neg", "not", "or", "select_n", "square", "sub"}

# reduction -> (expression of the result so far and one more element, its start)
_REDUCTIONS = {
    "reduce_and": ("({0} & {1})", "true"),
    "reduce_max": (_EXPRESSIONS["max"], "-INFINITY"),
    "reduce_min": (_EXPRESSIONS["min"], "INFINITY"),
    "reduce_or": ("({0} | {1})", "false"),
    "reduce_sum": ("({0} + {1})", "0"),
}

_HEADER = """\
/* policy.h: the trained policy of a run of jrl ({algorithm}, {env}, {env_steps} environment steps).
 *
 * policy_act reads a raw observation, as the environment returns it, and writes the deterministic action in the
 * environment's own units.{memory_text}
 *
{arguments}
 *
 * C99 or C++, libc and libm; no allocation, no global state. Bytes on the stack: {stack}; of constants: {weights}.
 *
 * An example: cc -std=c99 -O2 main.c -lm
 *
{example}
 */
#ifndef POLICY_H
#define POLICY_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

{tables}
/* A result is NaN if an argument is. */
static inline float policy_max(float a, float b) {{ return a > b || a != a ? a : b; }}
static inline float policy_min(float a, float b) {{ return a < b || a != a ? a : b; }}

{struct}static inline void policy_act({parameters}) {{
{body}
}}

#endif
"""

_MEMORY_TEXT = """ The caller keeps the memory.
 * policy_reset begins an episode; policy_act updates the memory."""


class _Value(NamedTuple):
    shape: Shape
    type: str  # in C
    at: Callable[[Index], str]  # expression of one element
    is_cheap: bool = True  # `at` computes nothing
    array: str | None = None  # name of an array that holds all elements in C order; None: the elements are elsewhere


class _Argument(NamedTuple):
    declaration: str  # in the parameters of policy_act
    value: str  # in a call
    local: str  # declaration of the caller's variable
    text: str  # comment


def build_files(program: TracedProgram, policy: PolicyFunction) -> dict[str, bytes]:
    """Returns `policy.h`.

    Raises:
      InputError: operations that cannot be written in C, such as convolutions.
    """
    writer = _Writer(program)
    unknown = writer.add_operations()
    if unknown:
        raise InputError(
            f"--format c: the policy uses {', '.join(sorted(unknown))}, and this format has dense and recurrent "
            "networks only: use --format onnx or npz"
        )
    return {"policy.h": _format_header(writer, policy).encode()}


def name_values(name: str, count: int) -> list[str]:
    """Returns `name`, or `name`_0, `name`_1, ... for several values."""
    return [name] if count == 1 else [f"{name}_{i}" for i in range(count)]


# ---------------------------------------------------------------- C text


def _format_header(writer: "_Writer", policy: PolicyFunction) -> str:
    program = writer.program
    num_actions = len(program.outputs) - program.num_memory
    described: list[_Argument] = []
    if writer.has_memory:
        described.append(_Argument("policy_memory *memory", "&memory", "policy_memory memory", "see policy_reset"))
    arrays = [
        *zip(name_values("obs", program.num_obs), spaces.leaves(policy.observation), strict=True),
        *zip(name_values("action", num_actions), spaces.leaves(policy.action), strict=True),
    ]
    types = [*program.inputs[: program.num_obs], *program.outputs[:num_actions]]
    for (name, (path, leaf)), number in zip(arrays, types, strict=True):
        array = f"{writer.type(number)} {name}[{math.prod(leaf.shape)}]"
        const, key = "const " if name.startswith("obs") else "", f"{path}: " if path else ""
        described.append(_Argument(const + array, name, f"{array} = {{0}}", key + _describe(leaf)))
    if program.reads_reward:
        text = "reward of the previous step; ignored at the start of an episode"
        described.insert(-num_actions, _Argument("float reward", "reward", "float reward = 0.0f", text))
    width = max(len(x.declaration) for x in described)
    return _HEADER.format(
        algorithm=policy.about["algorithm"],
        env=policy.about["env"].replace("*/", "* /"),
        env_steps=policy.about["env_steps"],
        memory_text=_MEMORY_TEXT if writer.has_memory else "",
        arguments="\n".join(f" *   {x.declaration:{width}}  {x.text}" for x in described),
        stack=writer.stack,
        weights=writer.constants,
        example="\n".join(f" *   {line}" for line in _example(writer, described)),
        tables="".join(f"{table}\n" for table in writer.tables),
        struct=_struct(writer) if writer.has_memory else "",
        parameters=", ".join(x.declaration for x in described),
        body="\n".join(f"  {line}" for line in writer.body),
    )


def _describe(leaf: Leaf) -> str:
    """Returns shape and range of a space for the comment."""
    shape = f"{type(leaf).__name__} {list(leaf.shape)}" if leaf.shape else type(leaf).__name__
    match leaf:
        case Discrete():
            return f"{shape}: 0 to {leaf.n - 1}"
        case MultiDiscrete():
            return f"{shape}: integers below {list(leaf.nvec)}"
        case MultiBinary():
            return f"{shape}: 0 or 1"
    low, high = (sorted(set(x.ravel().tolist())) for x in leaf.bounds())
    if len(low) == len(high) == 1:
        return f"{shape}: {low[0]:g} to {high[0]:g}"
    low, high = (x.ravel().tolist() for x in leaf.bounds())
    return f"{shape}: {low} to {high}" if len(low) <= 8 else f"{shape}: bounds in policy.json"


def _example(writer: "_Writer", described: Sequence[_Argument]) -> list[str]:
    action = next(x.value for x in described if x.value.startswith("action"))
    return [
        "#include <stdio.h>",
        '#include "policy.h"',
        "int main(void) {",
        *(f"  {x.local};" for x in described),
        *["  policy_reset(&memory);"] * writer.has_memory,
        f"  policy_act({', '.join(x.value for x in described)});",
        f'  printf("%g\\n", (double){action}[0]);',
        "  return 0;",
        "}",
    ]


def _struct(writer: "_Writer") -> str:
    fields = [f"  {value.type} memory_{i}[{math.prod(value.shape)}];" for i, value in enumerate(writer.memory)]
    begins = ["  bool begins;  /* an episode begins with the next observation */"] * writer.program.reads_begins
    set_begins = "  memory->begins = true;\n" if begins else ""
    return (
        "typedef struct {\n" + "\n".join([*fields, *begins]) + "\n} policy_memory;\n\n"
        "/* Begins an episode. */\n"
        "static inline void policy_reset(policy_memory *memory) {\n"
        f"  memset(memory, 0, sizeof *memory);\n{set_begins}}}\n\n"
    )


def _literal(x: Any) -> str:
    """Returns a number of a numpy type as a C expression with exactly its value."""
    if x.dtype == bool:
        return "true" if x else "false"
    if x.dtype.kind in "iu":
        return f"({x})" if x < 0 else f"{x}"
    if not np.isfinite(x):
        return "NAN" if np.isnan(x) else "INFINITY" if x > 0 else "(-INFINITY)"
    text = str(x) + ("f" if x.dtype == np.float32 else "")  # numpy writes the shortest digits that give `x` again
    return f"({text})" if x < 0 else text


def _flat(shape: Shape, index: Index) -> str:
    """Returns the expression of an element's position in C order."""
    terms, stride = [], 1
    for size, i in zip(reversed(shape), reversed(index), strict=True):
        if i != "0":
            terms.append(i if stride == 1 else f"{i} * {stride}")
        stride *= size
    return " + ".join(reversed(terms)) or "0"


def _fit(shape: Shape, index: Index) -> Index:
    """Returns the index of an operand that is broadcast: a scalar, or an array with axes of one element."""
    return tuple("0" if size == 1 else i for size, i in zip(shape, index, strict=True)) if shape else ()


def _loops(shape: Shape, letter: str, body: Callable[[Index], list[str]]) -> list[str]:
    """Returns loops over `shape` around body(index)."""
    index = tuple("0" if size == 1 else f"{letter}{axis}" for axis, size in enumerate(shape))
    lines = body(index)
    for i, size in reversed(list(zip(index, shape, strict=True))):
        if size != 1:
            loop = f"for (int {i} = 0; {i} < {size}; {i}++)"
            single = f"{loop} {lines[0]}"
            is_short = len(lines) == 1 and len(single) < 110
            lines = [single] if is_short else [f"{loop} {{", *(f"  {line}" for line in lines), "}"]
    return lines


# ---------------------------------------------------------------- operations


class _Writer:
    """Translates a program: `body` has the statements, `tables` the constants."""

    def __init__(self, program: TracedProgram):
        self.program = program
        self.body: list[str] = []
        self.tables: list[str] = []
        self.stack = self.constants = 0  # bytes
        self.arrays = 0  # on the stack
        self.values: dict[int, _Value] = {}
        self.reads = Counter([*(i for op in program.operations for i in op.inputs), *program.outputs])
        self.has_memory = bool(program.num_memory or program.reads_begins)
        inputs = list(program.inputs)
        names = name_values("obs", program.num_obs) + [f"memory->memory_{i}" for i in range(program.num_memory)]
        for number, name in zip(inputs, names):
            self.values[number] = self.array(number, name)
            self.body += [] if self.reads[number] else [f"(void){name};"]
        self.memory = [self.values[i] for i in inputs[program.num_obs :][: program.num_memory]]
        flags = ["reward"] * program.reads_reward + ["memory->begins"] * program.reads_begins
        for number, name in zip(inputs[len(names) :], flags, strict=True):
            self.values[number] = _of_scalar(self.shape(number), self.type(number), name)

    def add_operations(self) -> set[str]:
        """Appends all statements; returns the names of unknown operations, after which the text is incomplete."""
        program, unknown = self.program, set[str]()
        for op in program.operations:
            types = [[program.types[i] for i in numbers] for numbers in (op.inputs, op.outputs)]
            encoded = npz.encode(op, *types) or []
            for output, (name, attributes) in zip(op.outputs, encoded):
                if unknown:
                    break
                value = self.translate(name, [self.read(i) for i in op.inputs], output, attributes)
                if value is None:
                    unknown.add(name)
                else:
                    self.values[output] = self.store(value) if self.reads[output] > 1 else value
            if not encoded:
                unknown.add(op.primitive.name)
        if not unknown:
            self.add_outputs()
        return unknown

    def add_outputs(self) -> None:
        num_actions = len(self.program.outputs) - self.program.num_memory
        # new arrays, because a later memory can depend on an earlier one
        results = [self.store(self.read(i), force=k >= num_actions) for k, i in enumerate(self.program.outputs)]
        names = name_values("action", num_actions) + [f"memory->memory_{i}" for i in range(self.program.num_memory)]
        for name, value in zip(names, results, strict=True):
            self.assign(name, value)
        if self.program.reads_begins:
            self.body.append("memory->begins = false;")

    def shape(self, number: int) -> Shape:
        """Returns the shape of a value for one observation."""
        return self.program.replace_batch(self.program.types[number].shape, 1)

    def type(self, number: int) -> str:
        dtype = npz.find_dtype(self.program.types[number].dtype).name
        if dtype not in _TYPES:
            raise InputError(f"--format c: the policy has numbers of type {dtype}, which C99 lacks: use --format npz")
        return _TYPES[dtype]

    def read(self, number: int) -> _Value:
        """Returns a value; a constant is written as a table when it is first read."""
        if number not in self.values:
            x = npz.to_numpy_dtype(self.program.constants[number])
            flat, name = x.ravel(), f"policy_weights_{len(self.tables)}"
            if flat.size and (flat == flat[0]).all():
                self.values[number] = _of_scalar(x.shape, self.type(number), _literal(flat[0]))
            else:
                self.values[number] = self.array(number, name, x.shape)
                rows = [", ".join(_literal(y).strip("()") for y in flat[i : i + 8]) for i in range(0, flat.size, 8)]
                declared = f"static const {self.type(number)} {name}[{flat.size}]"
                self.tables.append(f"{declared} = {{  /* {list(x.shape)} */\n  " + ",\n  ".join(rows) + "};\n")
                self.constants += x.nbytes
        return self.values[number]

    def array(self, number: int, name: str, shape: Shape | None = None) -> _Value:
        return _of_array(self.shape(number) if shape is None else shape, self.type(number), name)

    def declare(self, shape: Shape, type: str) -> _Value:
        """Declares an array on the stack."""
        name, size = f"v{self.arrays}", math.prod(shape)
        self.arrays += 1
        self.body.append(f"{type} {name}[{size}];")
        self.stack += size * np.dtype(next(k for k, v in _TYPES.items() if v == type)).itemsize
        return _of_array(shape, type, name)

    def assign(self, name: str, value: _Value) -> None:
        statement = lambda index: [f"{name}[{_flat(value.shape, index)}] = {value.at(index)};"]
        self.body += _loops(value.shape, "i", statement)

    def store(self, value: _Value, force: bool = False) -> _Value:
        """Returns the value as an array, or as it is if reading an element of it computes nothing."""
        if value.is_cheap and not force:
            return value
        stored = self.declare(value.shape, value.type)
        assert stored.array is not None
        self.assign(stored.array, value)
        return stored

    def translate(self, name: str, inputs: list[_Value], output: int, attributes: dict[str, Any]) -> _Value | None:
        """Returns the result of an operation; None: unknown."""
        shape, type = self.shape(output), self.type(output)
        method = getattr(self, f"_{name}", None)
        if method is not None:
            return method(inputs, shape, type, **{k: v for k, v in attributes.items() if k != "shape"})
        if name in _REDUCTIONS:
            return self.reduce(name, inputs[0], shape, type, **attributes)
        return self.elementwise(name, inputs, shape, type)

    def elementwise(self, name: str, inputs: list[_Value], shape: Shape, type: str) -> _Value | None:
        is_float = inputs[-1].type in ("float", "double")
        template = _EXPRESSIONS.get(name)
        if template is None or not (is_float or name in _INTEGER or name in _INTEGER_EXPRESSIONS):
            return None
        if not is_float:
            template = _INTEGER_EXPRESSIONS.get(name, template)
        if name == "not" and type == "bool":
            template = "(!{0})"
        if type in ("int8_t", "int16_t", "uint8_t", "uint16_t"):
            template = f"({type}){template}"  # C computes with int
        is_repeated = lambda k, x: template.count(f"{{{k}}}") > 1 or math.prod(x.shape) < math.prod(shape)
        inputs = [self.store(x) if is_repeated(k, x) else x for k, x in enumerate(inputs)]
        at = lambda index: template.format(*(x.at(_fit(x.shape, index)) for x in inputs))
        return _Value(shape, type, at, is_cheap=False)

    def _integer_pow(self, inputs: list[_Value], shape: Shape, type: str, *, y: int) -> _Value | None:
        at = lambda index: f"powf({inputs[0].at(index)}, {y}.0f)"
        return _Value(shape, type, at, is_cheap=False) if type == "float" else None

    # views: named as the operation, arguments: inputs, shape and type of the result, attributes

    def _convert(self, inputs: list[_Value], shape: Shape, type: str) -> _Value:
        (x,) = inputs
        if type == x.type:
            return x
        template = "({} != 0)" if type == "bool" else f"({type}){{}}"
        return _Value(shape, type, lambda index: template.format(x.at(index)), is_cheap=x.is_cheap)

    def _iota(self, inputs: list[_Value], shape: Shape, type: str, *, dimension: int) -> _Value:
        return _Value(shape, type, lambda index: f"({type}){index[dimension]}")

    def _broadcast_in_dim(self, inputs: list[_Value], shape: Shape, type: str, *, dimensions) -> _Value:
        x = self.store(inputs[0]) if math.prod(inputs[0].shape) < math.prod(shape) else inputs[0]
        at = lambda index: x.at(_fit(x.shape, tuple(index[axis] for axis in dimensions)))
        return _Value(shape, type, at, x.is_cheap)

    def _reshape(self, inputs: list[_Value], shape: Shape, type: str, **_: Any) -> _Value:
        (x,) = inputs
        axes = [axis for axis, size in enumerate(shape) if size != 1]
        if [shape[axis] for axis in axes] == [size for size in x.shape if size != 1]:

            def at(index: Index) -> str:
                rest = iter([index[axis] for axis in axes])
                return x.at(tuple("0" if size == 1 else next(rest) for size in x.shape))

            return _Value(shape, type, at, x.is_cheap, x.array)
        x = x if x.array else self.store(x, force=True)
        assert x.array is not None
        return _of_array(shape, type, x.array)

    _squeeze = _reshape

    def _slice(self, inputs: list[_Value], shape: Shape, type: str, *, start, stop, step) -> _Value:
        (x,) = inputs

        def move(i: str, first: int | None, step: int | None) -> str:
            return _shift(i if i == "0" or (step or 1) == 1 else f"{i} * {step}", first or 0)

        at = lambda index: x.at(tuple(map(move, index, start, step)))
        return _Value(shape, type, at, x.is_cheap)

    def _transpose(self, inputs: list[_Value], shape: Shape, type: str, *, axes) -> _Value:
        (x,) = inputs
        at = lambda index: x.at(tuple(index[axes.index(axis)] for axis in range(len(axes))))
        return _Value(shape, type, at, x.is_cheap)

    # operations with statements of their own

    def _concatenate(self, inputs: list[_Value], shape: Shape, type: str, *, axis: int) -> _Value:
        result, first = self.declare(shape, type), 0
        for part in inputs:
            move = lambda index, first=first: (*index[:axis], _shift(index[axis], first), *index[axis + 1 :])
            statement = lambda index, part=part, move=move: [f"{result.at(move(index))} = {part.at(index)};"]
            self.body += _loops(part.shape, "i", statement)
            first += part.shape[axis]
        return result

    def _pad(self, inputs: list[_Value], shape: Shape, type: str, *, edges) -> _Value:
        x, value = inputs
        result = self.store(_of_scalar(shape, type, value.at(())), force=True)
        move = lambda index: tuple(_shift(i, low) for i, (low, _) in zip(index, edges))
        self.body += _loops(x.shape, "i", lambda index: [f"{result.at(move(index))} = {x.at(index)};"])
        return result

    def _dot_general(self, inputs: list[_Value], shape: Shape, type: str, *, contract, batch) -> _Value:
        x, y = map(self.store, inputs)
        result = self.store(_of_scalar(shape, type, "0"), force=True)
        rest_x, rest_y = (
            [a for a in range(len(v.shape)) if a not in (*contract[k], *batch[k])] for k, v in enumerate((x, y))
        )

        def place(k: int, rest: list[int], kept: Index, others: Index, summed: Index) -> Index:
            index = dict(zip(batch[k], kept)) | dict(zip(rest, others)) | dict(zip(contract[k], summed))
            return tuple(index[axis] for axis in sorted(index))

        sizes = lambda v, axes: tuple(v.shape[a] for a in axes)
        # the innermost loop is over the outputs: compilers vectorise it without reordering a sum
        over_y = lambda b, r, k: (
            lambda c: [
                f"{result.at((*b, *r, *c))} += {x.at(place(0, rest_x, b, r, k))} * {y.at(place(1, rest_y, b, c, k))};"
            ]
        )
        over_sum = lambda b, r: lambda k: _loops(sizes(y, rest_y), "j", over_y(b, r, k))
        over_x = lambda b: lambda r: _loops(sizes(x, contract[0]), "k", over_sum(b, r))
        self.body += _loops(sizes(x, batch[0]), "b", lambda b: _loops(sizes(x, rest_x), "i", over_x(b)))
        return result

    def reduce(self, name: str, x: _Value, shape: Shape, type: str, *, axes) -> _Value:
        template, start = _REDUCTIONS[name]
        if name in ("reduce_max", "reduce_min"):
            x = self.store(x)
            if type not in ("float", "double"):  # integers have no infinity: begin with the first element
                template = _INTEGER_EXPRESSIONS[name.removeprefix("reduce_")]
        kept = [axis for axis in range(len(x.shape)) if axis not in axes]
        begin = start if type in ("float", "double", "bool") or name == "reduce_sum" else None
        first = lambda index: x.at(_merge(kept, index, axes, ("0",) * len(axes)))
        result = self.store(_Value(shape, type, lambda index: begin or first(index)), force=True)
        add = lambda index: (
            lambda k: [f"{result.at(index)} = {template.format(result.at(index), x.at(_merge(kept, index, axes, k)))};"]
        )
        self.body += _loops(shape, "i", lambda index: _loops(tuple(x.shape[a] for a in axes), "k", add(index)))
        return result

    def _argmax(self, inputs: list[_Value], shape: Shape, type: str, *, axis: int, sign: str = ">") -> _Value:
        x = self.store(inputs[0])
        result = self.store(_of_scalar(shape, type, "0"), force=True)

        def compare(index: Index) -> list[str]:
            i = f"k{axis}"
            at = lambda k: x.at((*index[:axis], k, *index[axis:]))
            one, best = at(i), at(f"{result.at(index)}")
            is_nan = f" || ({one} != {one} && {best} == {best})" if x.type in ("float", "double") else ""
            size = x.shape[axis]
            condition = f"{one} {sign} {best}{is_nan}"
            return [f"for (int {i} = 1; {i} < {size}; {i}++) if ({condition}) {result.at(index)} = {i};"]

        self.body += _loops(shape, "i", compare)
        return result

    def _argmin(self, inputs: list[_Value], shape: Shape, type: str, *, axis: int) -> _Value:
        return self._argmax(inputs, shape, type, axis=axis, sign="<")


def _of_array(shape: Shape, type: str, name: str) -> _Value:
    return _Value(shape, type, lambda index: f"{name}[{_flat(shape, index)}]", array=name)


def _of_scalar(shape: Shape, type: str, text: str) -> _Value:
    return _Value(shape, type, lambda index: text)


def _shift(i: str, first: int) -> str:
    return i if not first else str(first) if i == "0" else f"({i} + {first})"


def _merge(axes_a: Sequence[int], a: Index, axes_b: Sequence[int], b: Index) -> Index:
    index = dict(zip(axes_a, a)) | dict(zip(axes_b, b))
    return tuple(index[axis] for axis in sorted(index))
