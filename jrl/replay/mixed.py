"""Several buffers as one, with a fixed number of rows of each per sample: experience and data sets.

buffer = mixed.make([online, data], [128, 128])     # half of each batch is of the data (arXiv:2302.02948, RLPD)
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jrl.types import Array, Buffer, Key, PyTree, Rollout


@struct.dataclass
class State:
    """The states of all parts."""

    parts: tuple[PyTree, ...]


def make(parts: Sequence[Buffer], sizes: Sequence[int], *, online: bool) -> Buffer:
    """Makes one buffer of several.

    Args:
      parts: buffers whose samples are Batches, or SequenceBatches, with the same leaves.
      sizes: rows per sample of each part, in order.
      online: whether the first part receives new rows and defines the size; else nothing can be added.
    Returns:
      A Buffer whose samples are the concatenated samples of the parts; each part's weights are 1 on average.
    """
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    begins = [end - size for end, size in zip(ends, sizes, strict=True)]
    counted = parts[:1] if online else parts

    def add(state: State, rollout: Rollout) -> State:
        if not online:
            raise ValueError("add: expected a buffer with online=True, got data sets, which are fixed")
        return State((parts[0].add(state.parts[0], rollout), *state.parts[1:]))

    def sample(state: State, key: Key) -> Any:
        keys = jax.random.split(key, len(parts))
        drawn = [part.sample(s, k) for part, s, k in zip(parts, state.parts, keys, strict=True)]
        return jax.tree.map(lambda *x: jnp.concatenate(x), *drawn)

    def set_priority(state: State, index: Array, priority: Array) -> State:
        cut = lambda part, s, i, j: part.set_priority(s, index[i:j], priority[i:j]) if part.set_priority else s
        return State(tuple(map(cut, parts, state.parts, begins, ends)))

    def total(name: str, state: State) -> Array:
        return sum((getattr(part, name)(s) for part, s in zip(counted, state.parts, strict=False)), jnp.int32(0))

    return Buffer(
        init=lambda: State(tuple(part.init() for part in parts)),
        add=add,
        sample=sample,
        can_sample=lambda state: jnp.stack([p.can_sample(s) for p, s in zip(parts, state.parts, strict=True)]).all(),
        size=lambda state: total("size", state),
        set_priority=set_priority if any(part.set_priority for part in parts) else None,
        live=(lambda state: total("live", state)) if all(part.live for part in counted) else None,
    )
