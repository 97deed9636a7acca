"""Trees of arrays that RLlib packs into texts: base64 of an LZ4 frame of a pickle. No pickle is executed.

A pickle is a program that calls functions by name. This reader replaces each name that numpy writes by a function of
this file, which builds an array from bytes of the pickle. It refuses all other names.
"""

import base64
import binascii
import io
import math
import pickle
import pickletools
from typing import Any

import jax
import numpy as np

from jrl.data.formats import files
from jrl.types import PyTree

_EXPANSION = 256  # largest ratio of unpacked to packed bytes of LZ4
_SMALL = 2**26  # bytes that are unpacked without a check of the free memory
_NUMBERS_ONLY = "only arrays of numbers are read"


class RefusedData(ValueError):
    """The text is damaged, or contains anything but arrays of numbers."""


def pack(tree: PyTree) -> str:
    """Returns the text of a tree of arrays, as RLlib packs it."""
    return base64.b64encode(_lz4().compress(pickle.dumps(tree, protocol=4))).decode("ascii")


def _lz4() -> Any:
    return files.import_library("lz4.frame", "packed columns")


def unpack(text: str) -> PyTree:
    """Returns the array, or tree of arrays, of a text of RLlib.

    Raises:
      RefusedData: the text is damaged, larger than the memory, or contains anything else.
      InputError: the package lz4 is not installed.
    """
    try:
        frame = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise RefusedData("expected base64, as RLlib packs arrays, got another text") from e
    largest = _EXPANSION * len(frame)
    limit = files.size_limit() if largest > _SMALL else largest
    reader = _lz4().LZ4FrameDecompressor()
    try:
        content = reader.decompress(frame, max_length=min(limit, 2**31 - 1) if largest > limit else -1)
    except (RuntimeError, EOFError) as e:
        raise RefusedData(f"LZ4: {e}") from e
    if not reader.eof:
        raise RefusedData("LZ4: the frame is cut off, or its content is larger than the memory takes")
    if reader.unused_data:
        raise RefusedData("LZ4: there are bytes after the end of the frame")
    return read_pickle(content)


_NAMES = {  # numpy.core: numpy 1; _codecs and __builtin__: bytes in protocol 2
    "numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar", "numpy.core.numeric._frombuffer",
    "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar", "numpy._core.numeric._frombuffer",
    "numpy.dtype", "numpy.ndarray", "_codecs.encode", "__builtin__.bytes",
}  # fmt: skip
_REPEATABLE = {  # opcodes of objects that the pickle may use again
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "GLOBAL",
    "STACK_GLOBAL", "REDUCE",
}  # fmt: skip
_OPCODES = _REPEATABLE | {
    "PROTO", "FRAME", "STOP", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BYTEARRAY8",
    "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "MARK", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "TUPLE", "EMPTY_DICT", "SETITEM", "SETITEMS", "BUILD",
}  # fmt: skip
_MAX_OPCODES = 50_000  # an array takes up to 50; each opcode can make an object of some hundred bytes, or a level


def read_pickle(content: bytes) -> PyTree:
    """Returns the array, or the dict or tuple of arrays, of a pickle of protocol 2 to 5, as views of its bytes.

    Raises:
      RefusedData: the pickle is damaged, or contains anything else.
    """
    try:
        _check_opcodes(content)
        found = _build_tree(NumbersUnpickler(io.BytesIO(content)).load())
    except RefusedData:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, EOFError,
            pickle.UnpicklingError) as e:  # fmt: skip
        raise RefusedData(f"the pickle is damaged ({str(e)[:200] or type(e).__name__})") from e
    if sum(x.nbytes for x in jax.tree.leaves(found)) > len(content):
        raise RefusedData("the pickle uses the bytes of an array more than once")
    return found


def _check_opcodes(content: bytes) -> None:
    """Refuses opcodes that arrays do not need, or that need more memory or time than the size of the pickle.

    `genops` refuses lengths beyond the pickle. A container that is used again could become a tree of any size.
    """
    memo: dict[int, bool] = {}  # memo index -> whether the object may be used again
    before = ""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        name = opcode.name
        if name not in _OPCODES or count > _MAX_OPCODES:
            what = f"the instruction {name}" if count <= _MAX_OPCODES else f"over {_MAX_OPCODES:,} instructions"
            raise RefusedData(f"the pickle has {what}: {_NUMBERS_ONLY}")
        if name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            place = len(memo) if argument is None else argument
            if place > count:
                raise RefusedData("the pickle is damaged (it skips indices of its memo)")
            memo[place] = before in _REPEATABLE
        elif name in ("BINGET", "LONG_BINGET") and not memo.get(argument or 0):
            raise RefusedData("the pickle uses a tuple or a dict more than once, or a missing object")
        before = name


class NumbersUnpickler(pickle.Unpickler):
    """Reads numbers and arrays of numpy, as `Numbers`; refuses all other names."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _NAMES or "." in name:
            raise RefusedData(f"the pickle wants {module[:80]}.{name[:80]}: {_NUMBERS_ONLY}")
        return _Name(name)


class _Name:
    """Stand-in for a function of numpy: a pickle can neither reach numpy's function nor change this one."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *given: Any) -> Any:
        match self.name, given:
            case "_reconstruct", (_Name(name="ndarray"), _, _):
                return Numbers()
            case "_frombuffer", (data, dtype, shape, order):
                return Numbers(_build_array(data, dtype, shape, order))
            case "scalar", (dtype, data):
                return Numbers(_build_array(data, dtype, (), "C"))
            case "dtype", (str() as name, *_):
                if len(name) > 3 or name[:1] not in ("b", "i", "u", "f"):
                    raise RefusedData(f"the pickle holds an array of dtype {name[:40]!r}: {_NUMBERS_ONLY}")
                return Numbers(np.dtype(name))
            case "encode", (str() as text, "latin1"):  # bytes in protocol 2
                return text.encode("latin1")
            case "bytes", ():
                return b""
        raise RefusedData(f"the pickle calls {self.name} with arguments that no array has: {_NUMBERS_ONLY}")

    def __setstate__(self, state: Any) -> None:
        raise RefusedData(f"the pickle changes an object that is not an array: {_NUMBERS_ONLY}")


class Numbers:
    """Array or dtype. A state may follow: shape, dtype and bytes of an array, or the byte order of a dtype."""

    __slots__ = ("value",)

    def __init__(self, value: Any = None):
        self.value = value

    def __setstate__(self, state: Any) -> None:
        if isinstance(self.value, np.dtype):
            _, order, *rest = state
            if order not in ("<", ">", "|", "=") or any(x is not None for x in rest[:3]):
                raise RefusedData(f"the pickle holds an array of records: {_NUMBERS_ONLY}")
            self.value = self.value.newbyteorder(order) if order != "|" else self.value
        else:
            _, shape, dtype, fortran, data = state
            self.value = _build_array(data, dtype, shape, "F" if fortran else "C")


def _build_array(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    """Returns the array of the bytes, as a view. The bytes must fit the shape."""
    kind = dtype.value if isinstance(dtype, Numbers) else None
    if not isinstance(kind, np.dtype) or not isinstance(data, bytes | bytearray) or order not in ("C", "F"):
        raise RefusedData(f"the pickle holds an array without bytes or dtype: {_NUMBERS_ONLY}")
    if not isinstance(shape, tuple) or len(shape) > 32 or not all(type(n) is int and n >= 0 for n in shape):
        raise RefusedData(f"the pickle holds an array of the shape {str(shape)[:80]}")
    if math.prod(shape) * kind.itemsize != len(data):
        raise RefusedData(f"the pickle holds {len(data)} bytes for an array {shape} of {kind}")
    return np.frombuffer(data, kind).reshape(shape, order=order)


def _build_tree(found: Any) -> PyTree:
    match found:
        case Numbers(value=np.ndarray() as array):
            return array
        case dict() if found and all(isinstance(name, str) for name in found):
            return {name: _build_tree(part) for name, part in found.items()}
        case tuple() if found:
            return tuple(map(_build_tree, found))
    raise RefusedData(f"the pickle holds {str(found)[:80]!r}: {_NUMBERS_ONLY}")
