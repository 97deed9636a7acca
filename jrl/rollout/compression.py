"""Observations on their way between processes: each frame once, what repeats itself as nothing, then zlib or lz4.

Lossless: `unpack(pack(rollout))` is the rollout, bit for bit. Each array is sent as it is where that is shorter.
"""

import dataclasses
import importlib
import importlib.util
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.types import PyTree, Rollout

_MOST_FRAMES = 16  # in a stack
_LEAST_BYTES = 256  # of an array, below which nothing is tried


class Squeezed(NamedTuple):
    """An array as bytes."""

    data: np.ndarray  # u8
    codec: str  # how `data` has to be read: a key of `_codecs()`, or "" for bytes as they are
    dtype: str
    shape: tuple[int, ...]
    # whether row t > 0 along the first axis is told by its difference (exclusive or) to row t - 1
    differences: bool


class Stacked(NamedTuple):
    """Stacks of S frames [T, B, *], of which row t is mostly row t - 1 with one more frame."""

    newest: Squeezed  # [T, B, *frame]
    older: Squeezed  # [n, S - 1, *frame], of those rows that do not follow from the row before, in their order
    follows: np.ndarray  # [T, B] bool, False on row 0
    axis: int  # of the frames in an observation: 0 or -1
    like: tuple[str, tuple[int, ...]]  # dtype and shape of the stacks


class Packed(NamedTuple):
    """The observations of a rollout: those of the T rows with the one after them, [T + 1, B, *]."""

    leaves: tuple[Squeezed | Stacked, ...]


def codec() -> str:
    """Returns the quickest there is here."""
    return "lz4" if importlib.util.find_spec("lz4") else "zlib"


def _codecs(name: str) -> tuple[Callable[[Any], bytes], Callable[[Any], bytes]]:
    if name == "lz4":
        lz4 = importlib.import_module("lz4.frame")
        return lz4.compress, lz4.decompress
    return lambda data: zlib.compress(data, 1), zlib.decompress


def pack(rollout: Rollout, codec: str = "zlib") -> Rollout:
    """Returns `rollout`, of numpy arrays, with a `Packed` in the place of its observations.

    Args:
      codec: "zlib" or "lz4"; what reads it has to have that too.
    """
    leaves = []
    for rows, last in zip(jax.tree.leaves(rollout.obs), jax.tree.leaves(rollout.last_obs), strict=True):
        x = np.concatenate([rows, last[None]])
        axis = _stack_axis(x)
        leaves.append(_squeeze(x, codec) if axis is None else _stack(x, axis, codec))
    return dataclasses.replace(rollout, obs=Packed(tuple(leaves)), last_obs=None)


def unpack(rollout: Rollout, like: PyTree) -> Rollout:
    """Returns what was given to `pack`; `like` is any tree of the structure of its observations."""
    leaves = [_expand(x) if isinstance(x, Squeezed) else _unstack(x) for x in rollout.obs.leaves]
    rebuilt = lambda part: jax.tree.unflatten(jax.tree.structure(like), [part(x) for x in leaves])
    return dataclasses.replace(rollout, obs=rebuilt(lambda x: x[:-1]), last_obs=rebuilt(lambda x: x[-1]))


def num_bytes(tree: PyTree) -> int:
    """Counts the bytes of all arrays, packed ones as they are sent."""
    return sum(x.nbytes for x in jax.tree.leaves(tree) if isinstance(x, np.ndarray))


# ---------------------------------------------------------------- bytes


def _squeeze(x: np.ndarray, codec: str) -> Squeezed:
    x = np.ascontiguousarray(x)
    plain = x.view(np.uint8).reshape(-1) if x.ndim and x.size else np.frombuffer(x.tobytes(), np.uint8)
    raw = Squeezed(plain, "", x.dtype.str, x.shape, False)
    if len(plain) < _LEAST_BYTES:
        return raw
    told = plain.reshape(len(x), -1)
    # images mostly stand still; the bits of other numbers have no such habit
    differences = x.dtype == np.uint8 and len(x) > 1
    if differences:
        told = np.concatenate([told[:1], told[1:] ^ told[:-1]])
    data = np.frombuffer(_codecs(codec)[0](told), np.uint8)
    return raw if len(data) >= len(plain) else Squeezed(data, codec, x.dtype.str, x.shape, differences)


def _expand(x: Squeezed) -> np.ndarray:
    data = x.data if not x.codec else np.frombuffer(_codecs(x.codec)[1](x.data.tobytes()), np.uint8)
    if x.differences:
        data = np.bitwise_xor.accumulate(data.reshape(x.shape[0], -1), 0)
    return data.view(np.uint8).reshape(-1).view(x.dtype).reshape(x.shape)


# ---------------------------------------------------------------- stacks of frames


def _stack_axis(x: np.ndarray) -> int | None:
    """Returns the axis of an observation along which most rows [T, B, *] are the row before, moved by one frame; or
    None.
    """
    if x.ndim < 4 or len(x) < 2:
        return None
    for axis in (0, -1):
        if 2 <= x[0, 0].shape[axis] <= _MOST_FRAMES:
            frames = np.moveaxis(x[:, 0], axis if axis < 0 else axis + 1, 1)  # of the first column
            same = [np.array_equal(a, b) for a, b in zip(frames[1:, :-1], frames[:-1, 1:])]
            if np.mean(same) > 0.5:
                return axis
    return None


def _stack(x: np.ndarray, axis: int, codec: str) -> Stacked:
    frames = np.moveaxis(x, axis if axis < 0 else axis + 2, 2)  # [T, B, S, *frame], a view
    follows = np.zeros(x.shape[:2], bool)
    rest = tuple(range(1, frames.ndim - 1))
    for t in range(1, len(x)):  # a row at a time stays in the cache
        follows[t] = (frames[t, :, :-1] == frames[t - 1, :, 1:]).all(rest)
    newest, older = frames[:, :, -1], frames[:, :, :-1][~follows]
    return Stacked(_squeeze(newest, codec), _squeeze(older, codec), follows, axis, (x.dtype.str, x.shape))


def _unstack(packed: Stacked) -> np.ndarray:
    dtype, shape = packed.like
    x = np.empty(shape, dtype)
    frames = np.moveaxis(x, packed.axis if packed.axis < 0 else packed.axis + 2, 2)
    frames[:, :, -1] = _expand(packed.newest)
    older, at = _expand(packed.older), 0
    for t, follows in enumerate(packed.follows):
        told = np.flatnonzero(~follows)
        if t and follows.any():
            frames[t, :, :-1] = frames[t - 1, :, 1:]
        frames[t, told, :-1] = older[at : at + len(told)]
        at += len(told)
    return x
