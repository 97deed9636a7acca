"""Numpy arrays in pickles, read without executing any.

A pickle is a program: it names functions and calls them. What reads one here is no unpickler that is told to be
careful. It has the instructions that arrays are written with (`pickletools.genops` parses them), and no way to call
or to change anything: a name is a text, and applying one of those that numpy writes makes an array of bytes that
stand in the pickle. All other names and instructions are refused. So there is nothing to be found in it that
runs, that reads more than the pickle, or that needs more memory than it.
"""

import math
import pickle
import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Refused(ValueError):
    """The pickle is damaged, or holds something else than arrays of numbers."""


class _Name(NamedTuple):
    """Name of something that Python would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class _Empty:
    """An array whose shape and numbers have yet to come; then `array` is it."""

    array: np.ndarray | None = None


class _Mark:
    """Mark on the stack where a list of items begins."""


_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")


def dumps(tree: Any) -> bytes:
    """Returns a pickle of a tree of arrays, as RLlib reads it."""
    return pickle.dumps(tree, protocol=4)


def loads(data: bytes) -> Any:
    """Returns the array that a pickle of protocol 2 to 5 holds, or the dict or tuple of arrays.

    Raises:
      Refused: it holds something else, or is damaged.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                break
            machine.take(opcode.name, argument)
        found = machine.result()
        if _num_bytes(found) > len(data):
            raise Refused("the pickle names the bytes of an array more than once")
    except Refused:
        raise
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, RecursionError) as e:
        raise Refused(f"the pickle is damaged ({e or type(e).__name__})") from e
    return found


class _Machine:
    """Stack and memory of a pickle, and what its instructions do to them."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memory: dict[int, Any] = {}

    def take(self, name: str, argument: Any) -> None:
        """Follows one instruction."""
        stack = self.stack
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memory[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memory[len(self.memory)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memory[argument])
        elif name == "MARK":
            stack.append(_Mark())
        elif name in _TUPLES:
            count = _TUPLES[name]
            self.replace(count, tuple(self.last(count)))
        elif name == "TUPLE":
            stack.append(tuple(self.items()))
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name in ("SETITEM", "SETITEMS"):
            self.set_items(self.items() if name == "SETITEMS" else [stack.pop(-2), stack.pop()])
        elif name == "GLOBAL":
            stack.append(_name(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            self.replace(2, _name(*self.last(2)))
        elif name == "REDUCE":
            self.replace(2, _applied(*self.last(2)))
        elif name == "BUILD":
            self.replace(2, _built(*self.last(2)))
        elif name not in ("PROTO", "FRAME"):
            raise Refused(f"the pickle has the instruction {name}: only arrays of numbers are read")

    def replace(self, count: int, by: Any) -> None:
        """Puts one object in the place of the last ones of the stack."""
        self.stack[len(self.stack) - count :] = [by]

    def last(self, count: int) -> list[Any]:
        """Returns the last `count` objects of the stack."""
        if len(self.stack) < count:
            raise Refused("the pickle is damaged (it takes more than it has)")
        return self.stack[len(self.stack) - count :]

    def items(self) -> list[Any]:
        """Removes the objects behind the last mark from the stack, with the mark, and returns them."""
        at = max(i for i, x in enumerate(self.stack) if isinstance(x, _Mark))
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def set_items(self, items: list[Any]) -> None:
        """Sets keys and values, one after the other, of the dict that stands last."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2 or not all(isinstance(k, str) for k in items[::2]):
            raise Refused("the pickle sets items of something that is no dict of texts")
        target.update(zip(items[::2], items[1::2]))

    def result(self) -> Any:
        """Returns the object that the pickle holds."""
        if len(self.stack) != 1:
            raise Refused("the pickle is damaged (it ends too early)")
        return _finished(self.stack[0], set())


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _name(module: Any, name: Any) -> _Name:
    """Returns the name, if it is one of those that numpy writes."""
    found = _Name(str(module)[:80], str(name)[:80])
    if found not in _KNOWN:
        raise Refused(f"the pickle wants {found}: only arrays of numbers are read")
    return found


def _applied(function: Any, given: Any) -> Any:
    """Applies a name to arguments, as the pickle asks."""
    if not isinstance(function, _Name) or not isinstance(given, tuple) or function not in _APPLIED:
        raise Refused(f"the pickle calls {str(function)[:80]}: only arrays of numbers are read")
    return _APPLIED[function](*given)


def _reconstructed(kind: Any, shape: Any, code: Any) -> _Empty:
    if kind != _Name("numpy", "ndarray"):
        raise Refused(f"the pickle holds a {kind}: only arrays of numbers are read")
    return _Empty()


def _dtype(name: Any, align: Any = False, copy: Any = True) -> np.dtype:
    if not isinstance(name, str) or len(name) > 3 or name[:1] not in ("b", "i", "u", "f"):
        raise Refused(f"the pickle holds an array of dtype {str(name)[:40]!r}: only arrays of numbers are read")
    return np.dtype(name)


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    return _array(buffer, dtype, shape, order)


def _scalar(dtype: Any, data: Any) -> np.ndarray:
    return _array(data, dtype, (), "C")


def _encoded(text: Any, encoding: Any) -> bytes:
    """Returns the bytes that protocol 2 writes as a text of the characters 0 to 255."""
    if encoding != "latin1":
        raise Refused(f"the pickle wants a text encoded as {str(encoding)[:40]}: only arrays of numbers are read")
    return bytes(text.encode("latin1"))


def _no_bytes() -> bytes:
    return b""


_APPLIED: dict[_Name, Callable[..., Any]] = {
    **{_Name(m, "_reconstruct"): _reconstructed for m in _MODULES[:2]},
    **{_Name(m, "scalar"): _scalar for m in _MODULES[:2]},
    **{_Name(m, "_frombuffer"): _from_buffer for m in _MODULES[2:]},
    _Name("numpy", "dtype"): _dtype,
    _Name("_codecs", "encode"): _encoded,
    _Name("__builtin__", "bytes"): _no_bytes,
}
_KNOWN = {*_APPLIED, _Name("numpy", "ndarray")}


def _built(target: Any, state: Any) -> Any:
    """Gives `target` its state: a dtype its byte order, an array its shape and numbers."""
    if isinstance(target, np.dtype):
        _, order, *rest = state
        if order not in ("<", ">", "|", "=") or any(x is not None for x in rest[:3]):
            raise Refused("the pickle holds an array of records: only arrays of numbers are read")
        return target.newbyteorder(order) if order != "|" else target
    if not isinstance(target, _Empty):
        raise Refused("the pickle changes something that is no array: only arrays of numbers are read")
    _, shape, dtype, fortran, data = state
    target.array = _array(data, dtype, shape, "F" if fortran else "C")
    return target


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    """Makes an array of the bytes, of which there must be as many as its shape says."""
    if isinstance(data, list):
        raise Refused("the pickle holds an array of objects: only arrays of numbers are read")
    if not isinstance(dtype, np.dtype) or not isinstance(data, bytes | bytearray) or order not in ("C", "F"):
        raise Refused("the pickle holds an array without bytes or dtype")
    if not isinstance(shape, tuple) or len(shape) > 32 or not all(type(n) is int and n >= 0 for n in shape):
        raise Refused(f"the pickle holds an array of the shape {str(shape)[:80]}")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise Refused(f"the pickle holds {len(data)} bytes for an array {shape} of {dtype}")
    native = np.frombuffer(data, dtype).reshape(shape, order=order)
    return native.astype(dtype.newbyteorder("="), copy=False)


def _finished(found: Any, seen: set[int]) -> Any:
    """Returns the tree of arrays, all in their places. Refuses anything else, and an object that is in it twice."""
    if id(found) in seen:
        raise Refused("the pickle names an array or a dict more than once")
    seen.add(id(found))
    if isinstance(found, _Empty):
        found = found.array
    if isinstance(found, np.ndarray):
        return found
    if not isinstance(found, dict | tuple) or not found:
        raise Refused(f"the pickle holds {str(found)[:80]!r}: only arrays of numbers are read")
    if isinstance(found, dict):
        return {k: _finished(v, seen) for k, v in found.items()}
    return tuple(_finished(v, seen) for v in found)


def _num_bytes(found: Any) -> int:
    if isinstance(found, np.ndarray):
        return found.nbytes
    return sum(map(_num_bytes, found.values() if isinstance(found, dict) else found))
