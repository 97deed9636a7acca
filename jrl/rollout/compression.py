"""Lossless compression of observations between processes: frames once, differences between rows, zlib or lz4.

`unpack(pack(rollout))` is the rollout, bit for bit. An array is sent uncompressed if that is shorter.
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

_MOST_FRAMES = 16  # maximum number of frames in a stack
_LEAST_BYTES = 256  # smaller arrays are not compressed


class Squeezed(NamedTuple):
    """A compressed array."""

    data: np.ndarray  # u8
    codec: str  # codec of `data`, see `_codecs`; "": uncompressed
    dtype: str
    shape: tuple[int, ...]
    # whether rows t > 0 along the first axis are stored as difference (exclusive or) to row t - 1
    differences: bool


class Stacked(NamedTuple):
    """Stacks of S frames [T, B, *] in which row t is mostly row t - 1 with one more frame."""

    newest: Squeezed  # [T, B, *frame]
    older: Squeezed  # [n, S - 1, *frame], older frames of the rows that do not follow from the previous row
    follows: np.ndarray  # [T, B] bool, False on row 0
    axis: int  # stack axis of an observation: 0 or -1
    like: tuple[str, tuple[int, ...]]  # dtype and shape of the stacks


class Packed(NamedTuple):
    """Observations of a rollout: the T rows and the last observation, [T + 1, B, *]."""

    leaves: tuple[Squeezed | Stacked, ...]


def codec() -> str:
    """Returns the fastest installed codec."""
    return "lz4" if importlib.util.find_spec("lz4") else "zlib"


def _codecs(name: str) -> tuple[Callable[[Any], bytes], Callable[[Any], bytes]]:
    if name == "lz4":
        lz4 = importlib.import_module("lz4.frame")
        return lz4.compress, lz4.decompress
    return lambda data: zlib.compress(data, 1), zlib.decompress


def pack(rollout: Rollout, codec: str = "zlib") -> Rollout:
    """Returns `rollout`, of numpy arrays, with a `Packed` instead of its observations.

    Args:
      codec: "zlib" or "lz4"; the receiver must have it, too.
    """
    leaves = []
    for rows, last in zip(jax.tree.leaves(rollout.obs), jax.tree.leaves(rollout.last_obs), strict=True):
        x = np.concatenate([rows, last[None]])
        axis = _stack_axis(x)
        leaves.append(_squeeze(x, codec) if axis is None else _stack(x, axis, codec))
    return dataclasses.replace(rollout, obs=Packed(tuple(leaves)), last_obs=None)


def unpack(rollout: Rollout, like: PyTree) -> Rollout:
    """Returns the original rollout of `pack`; `like` is any tree with the structure of its observations."""
    leaves = [_expand(x) if isinstance(x, Squeezed) else _unstack(x) for x in rollout.obs.leaves]
    rebuilt = lambda part: jax.tree.unflatten(jax.tree.structure(like), [part(x) for x in leaves])
    return dataclasses.replace(rollout, obs=rebuilt(lambda x: x[:-1]), last_obs=rebuilt(lambda x: x[-1]))


def num_bytes(tree: PyTree) -> int:
    """Returns the bytes of all arrays, of compressed arrays as sent."""
    return sum(x.nbytes for x in jax.tree.leaves(tree) if isinstance(x, np.ndarray))


# ---------------------------------------------------------------- bytes


def _squeeze(x: np.ndarray, codec: str) -> Squeezed:
    x = np.ascontiguousarray(x)
    plain = x.view(np.uint8).reshape(-1) if x.ndim and x.size else np.frombuffer(x.tobytes(), np.uint8)
    raw = Squeezed(plain, "", x.dtype.str, x.shape, False)
    if len(plain) < _LEAST_BYTES:
        return raw
    rows = plain.reshape(len(x), -1)
    # only for images, which mostly stay the same from row to row
    differences = x.dtype == np.uint8 and len(x) > 1
    if differences:
        rows = np.concatenate([rows[:1], rows[1:] ^ rows[:-1]])
    data = np.frombuffer(_codecs(codec)[0](rows), np.uint8)
    return raw if len(data) >= len(plain) else Squeezed(data, codec, x.dtype.str, x.shape, differences)


def _expand(x: Squeezed) -> np.ndarray:
    data = x.data if not x.codec else np.frombuffer(_codecs(x.codec)[1](x.data.tobytes()), np.uint8)
    if x.differences:
        data = np.bitwise_xor.accumulate(data.reshape(x.shape[0], -1), 0)
    return data.view(np.uint8).reshape(-1).view(x.dtype).reshape(x.shape)


# ---------------------------------------------------------------- stacks of frames


def _stack_axis(x: np.ndarray) -> int | None:
    """Returns the axis along which most rows [T, B, *] are the previous row shifted by one frame, or None."""
    if x.ndim < 4 or len(x) < 2:
        return None
    for axis in (0, -1):
        if 2 <= x[0, 0].shape[axis] <= _MOST_FRAMES:
            frames = np.moveaxis(x[:, 0], axis if axis < 0 else axis + 1, 1)  # first column only
            same = [np.array_equal(a, b) for a, b in zip(frames[1:, :-1], frames[:-1, 1:])]
            if np.mean(same) > 0.5:
                return axis
    return None


def _stack(x: np.ndarray, axis: int, codec: str) -> Stacked:
    frames = np.moveaxis(x, axis if axis < 0 else axis + 2, 2)  # [T, B, S, *frame], a view
    follows = np.zeros(x.shape[:2], bool)
    rest = tuple(range(1, frames.ndim - 1))
    for t in range(1, len(x)):  # row by row, which stays in the cache
        follows[t] = (frames[t, :, :-1] == frames[t - 1, :, 1:]).all(rest)
    newest, older = frames[:, :, -1], frames[:, :, :-1][~follows]
    return Stacked(_squeeze(newest, codec), _squeeze(older, codec), follows, axis, (x.dtype.str, x.shape))


def _unstack(packed: Stacked) -> np.ndarray:
    dtype, shape = packed.like
    x = np.empty(shape, dtype)
    frames = np.moveaxis(x, packed.axis if packed.axis < 0 else packed.axis + 2, 2)
    frames[:, :, -1] = _expand(packed.newest)
    older, start = _expand(packed.older), 0
    for t, follows in enumerate(packed.follows):
        stored = np.flatnonzero(~follows)
        if t and follows.any():
            frames[t, :, :-1] = frames[t - 1, :, 1:]
        frames[t, stored, :-1] = older[start : start + len(stored)]
        start += len(stored)
    return x
