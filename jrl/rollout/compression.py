"""Lossless compression of observations between processes, by zlib or lz4.

`unpack(pack(rollout))` is the rollout, bit for bit. Rows of a column are stored one after the other, so that equal
frames of a stack are within the window of both codecs.
"""

import dataclasses
import importlib
import importlib.util
import zlib
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.types import PyTree, Rollout


class Packed(NamedTuple):
    """A compressed array of observations: the T rows and the last observation, [T + 1, B, *]."""

    data: bytes
    dtype: str
    shape: tuple[int, ...]  # [B, T + 1, *]


def codec() -> str:
    """Returns the fastest installed codec, "lz4" or "zlib"."""
    return "lz4" if importlib.util.find_spec("lz4") else "zlib"


def _lz4() -> Any:
    return importlib.import_module("lz4.frame")


def pack(rollout: Rollout, codec: str) -> Rollout:
    """Returns `rollout`, of numpy arrays, with a list of `Packed` instead of its observations."""

    def squeeze(rows: np.ndarray, last: np.ndarray) -> Packed:
        x = np.swapaxes(np.concatenate([rows, last[None]]), 0, 1)
        raw = x.tobytes()
        return Packed(_lz4().compress(raw) if codec == "lz4" else zlib.compress(raw, 1), x.dtype.str, x.shape)

    leaves = zip(jax.tree.leaves(rollout.obs), jax.tree.leaves(rollout.last_obs), strict=True)
    return dataclasses.replace(rollout, obs=[squeeze(*pair) for pair in leaves], last_obs=None)


def unpack(rollout: Rollout, like: PyTree, codec: str) -> Rollout:
    """Returns the original rollout of `pack`; `like` is any tree with the structure of its observations."""

    def expand(packed: Packed) -> np.ndarray:
        raw = (_lz4() if codec == "lz4" else zlib).decompress(packed.data)
        return np.swapaxes(np.frombuffer(raw, packed.dtype).reshape(packed.shape), 0, 1)

    obs = jax.tree.unflatten(jax.tree.structure(like), list(map(expand, rollout.obs)))
    rows, last = (jax.tree.map(lambda x, part=part: x[part], obs) for part in (slice(-1), -1))
    return dataclasses.replace(rollout, obs=rows, last_obs=last)


def num_bytes(tree: PyTree) -> int:
    """Returns the bytes of all arrays, of compressed arrays as sent."""
    return sum(len(x) if isinstance(x, bytes) else getattr(x, "nbytes", 0) for x in jax.tree.leaves(tree))
