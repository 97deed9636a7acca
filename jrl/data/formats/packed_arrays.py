"""Trees of arrays as RLlib packs them into texts: base64 of an LZ4 frame of a pickle. Nothing in a pickle is executed.

A pickle is a program that names functions and calls them. Here each name that numpy writes stands for a function of
this file, which makes an array of bytes in the pickle; all other names are refused.
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

_EXPANSION = 256  # bytes that a byte of LZ4 can stand for
_SMALL = 2**26  # bytes that are unpacked without a look at the free memory
_ONLY = "only arrays of numbers are read"


class Refused(ValueError):
    """The text is damaged, or holds something else than arrays of numbers."""


def packed(tree: PyTree) -> str:
    """Packs a tree of arrays as RLlib does."""
    return base64.b64encode(_lz4().compress(pickle.dumps(tree, protocol=4))).decode("ascii")


def _lz4() -> Any:
    return files.library("lz4.frame", "packed columns")


def unpacked(text: str) -> PyTree:
    """Unpacks the array, or the tree of arrays, that RLlib packed.

    Raises:
      Refused: the text is damaged, takes more than the memory has, or holds something else.
      InputError: the package lz4 is not installed.
    """
    try:
        frame = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise Refused("it is a text, and none that RLlib packs arrays in (base64)") from e
    largest = _EXPANSION * len(frame)
    limit = files.most() if largest > _SMALL else largest
    reader = _lz4().LZ4FrameDecompressor()
    try:
        content = reader.decompress(frame, max_length=min(limit, 2**31 - 1) if largest > limit else -1)
    except (RuntimeError, EOFError) as e:
        raise Refused(f"LZ4: {e}") from e
    if not reader.eof:
        raise Refused("LZ4: the frame is cut off, or its content is larger than the memory takes")
    if reader.unused_data:
        raise Refused("LZ4: bytes stand behind the end of the frame")
    return from_pickle(content)


# ---------------------------------------------------------------- pickles

_NAMES = {  # numpy.core is of numpy 1; _codecs and __builtin__ are how protocol 2 writes bytes
    "numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar", "numpy.core.numeric._frombuffer",
    "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar", "numpy._core.numeric._frombuffer",
    "numpy.dtype", "numpy.ndarray", "_codecs.encode", "__builtin__.bytes",
}  # fmt: skip
_REPEATED = {  # opcodes that make an object which the pickle may name again
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "GLOBAL",
    "STACK_GLOBAL", "REDUCE",
}  # fmt: skip
_OPCODES = _REPEATED | {
    "PROTO", "FRAME", "STOP", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BYTEARRAY8",
    "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "MARK", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "TUPLE", "EMPTY_DICT", "SETITEM", "SETITEMS", "BUILD",
}  # fmt: skip
_MOST_OPCODES = 50_000  # an array takes up to 50; each can make an object of some hundred bytes, or go a level deeper


def from_pickle(content: bytes) -> PyTree:
    """Returns the array that a pickle of protocol 2 to 5 holds, or the dict or tuple of arrays; views of its bytes.

    Raises:
      Refused: it holds something else, or is damaged.
    """
    try:
        _check_opcodes(content)
        found = _tree(_Unpickler(io.BytesIO(content)).load())
    except Refused:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, EOFError,
            pickle.UnpicklingError) as e:  # fmt: skip
        raise Refused(f"the pickle is damaged ({str(e)[:200] or type(e).__name__})") from e
    if sum(x.nbytes for x in jax.tree.leaves(found)) > len(content):
        raise Refused("the pickle names the bytes of an array more than once")
    return found


def _check_opcodes(content: bytes) -> None:
    """Refuses what would take memory or time beyond the size of the pickle, and what arrays do not need.

    Lengths beyond the pickle are an error of `genops`. A container that is named again would be a tree of any size.
    """
    memo: dict[int, bool] = {}  # place -> whether the object there may be named again
    before = ""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        name = opcode.name
        if name not in _OPCODES or count > _MOST_OPCODES:
            what = f"the instruction {name}" if count <= _MOST_OPCODES else f"over {_MOST_OPCODES:,} instructions"
            raise Refused(f"the pickle has {what}: {_ONLY}")
        if name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            place = len(memo) if argument is None else argument
            if place > count:
                raise Refused("the pickle is damaged (it leaves places of its memory out)")
            memo[place] = before in _REPEATED
        elif name in ("BINGET", "LONG_BINGET") and not memo.get(argument or 0):
            raise Refused("the pickle names a tuple or a dict more than once, or what is not there")
        before = name


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _NAMES or "." in name:
            raise Refused(f"the pickle wants {module[:80]}.{name[:80]}: {_ONLY}")
        return _Name(name)


class _Name:
    """A function of numpy's, by its name: a pickle can neither reach the real one nor change this one."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *given: Any) -> Any:
        match self.name, given:
            case "_reconstruct", (_Name(name="ndarray"), _, _):
                return _Numbers()
            case "_frombuffer", (data, dtype, shape, order):
                return _Numbers(_array(data, dtype, shape, order))
            case "scalar", (dtype, data):
                return _Numbers(_array(data, dtype, (), "C"))
            case "dtype", (str() as name, *_):
                if len(name) > 3 or name[:1] not in ("b", "i", "u", "f"):
                    raise Refused(f"the pickle holds an array of dtype {name[:40]!r}: {_ONLY}")
                return _Numbers(np.dtype(name))
            case "encode", (str() as text, "latin1"):  # how protocol 2 writes bytes
                return text.encode("latin1")
            case "bytes", ():
                return b""
        raise Refused(f"the pickle calls {self.name} with something else than arrays have: {_ONLY}")

    def __setstate__(self, state: Any) -> None:
        raise Refused(f"the pickle changes something that is no array: {_ONLY}")


class _Numbers:
    """An array or a dtype, whose state may follow: shape, dtype and bytes of the one, byte order of the other."""

    __slots__ = ("value",)

    def __init__(self, value: Any = None):
        self.value = value

    def __setstate__(self, state: Any) -> None:
        if isinstance(self.value, np.dtype):
            _, order, *rest = state
            if order not in ("<", ">", "|", "=") or any(x is not None for x in rest[:3]):
                raise Refused(f"the pickle holds an array of records: {_ONLY}")
            self.value = self.value.newbyteorder(order) if order != "|" else self.value
        else:
            _, shape, dtype, fortran, data = state
            self.value = _array(data, dtype, shape, "F" if fortran else "C")


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    """Makes an array of the bytes, of which there must be as many as its shape says."""
    kind = dtype.value if isinstance(dtype, _Numbers) else None
    if not isinstance(kind, np.dtype) or not isinstance(data, bytes | bytearray) or order not in ("C", "F"):
        raise Refused(f"the pickle holds an array without bytes or dtype: {_ONLY}")
    if not isinstance(shape, tuple) or len(shape) > 32 or not all(type(n) is int and n >= 0 for n in shape):
        raise Refused(f"the pickle holds an array of the shape {str(shape)[:80]}")
    if math.prod(shape) * kind.itemsize != len(data):
        raise Refused(f"the pickle holds {len(data)} bytes for an array {shape} of {kind}")
    return np.frombuffer(data, kind).reshape(shape, order=order)  # a view: the bytes may be named again


def _tree(found: Any) -> PyTree:
    match found:
        case _Numbers(value=np.ndarray() as array):
            return array
        case dict() if found and all(isinstance(name, str) for name in found):
            return {name: _tree(part) for name, part in found.items()}
        case tuple() if found:
            return tuple(map(_tree, found))
    raise Refused(f"the pickle holds {str(found)[:80]!r}: {_ONLY}")
