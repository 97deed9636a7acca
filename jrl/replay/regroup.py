"""Conversion of a stored replay to another number of devices or another kind of collection."""

from typing import Any

import jax
import numpy as np

from jrl.replay import storage
from jrl.replay.layout import AGE, MASK, SEAM, TERMINATED, TRUNCATED, State
from jrl.replay.prioritized import Priorities
from jrl.types import PyTree


def regroup(state: PyTree, old: int, new: int) -> PyTree:
    """Redistributes the columns of `old` devices over `new` devices, on the host.

    Args:
      state: state of a buffer of `jrl.replay`, the devices' parts concatenated: rings [old * C, B / old, *].
      old, new: number of devices.
    Returns:
      The state for `new` devices: rings [new * C, B / new, *]. Each row keeps its slot and its priority.
    """
    if old == new:
        return state
    rings = [x for x in jax.tree.leaves(state, is_leaf=_is_part) if isinstance(x, State)]
    slots, columns = rings[0].reward.shape[0] // old, rings[0].reward.shape[1] * old

    def ring(x):
        if x.ndim == 1:  # head and step counts, the same on all devices
            return np.resize(x, new)
        rows = len(x) // old  # per device: the slots, or 1 for a head per column
        by_column = np.moveaxis(x.reshape(old, rows, columns // old, *x.shape[2:]), 1, 0)
        dealt = by_column.reshape(rows, new, columns // new, *x.shape[2:])
        return np.moveaxis(dealt, 1, 0).reshape(new * rows, columns // new, *x.shape[2:])

    def priorities(found: Priorities) -> Priorities:
        trees = found.tree.reshape(old, -1)
        size = slots * columns // old
        leaves = ring(trees[:, trees.shape[1] // 2 :][:, :size].reshape(old * slots, columns // old))
        built = np.stack([_tree(part.reshape(-1)) for part in leaves.reshape(new, slots, -1)])
        highest = np.resize(found.highest.max(), new).astype(found.highest.dtype)
        return Priorities(built.reshape(-1), highest, np.resize(found.steps.max(), new))

    def part(x):
        if isinstance(x, Priorities):
            return priorities(x)
        dealt = jax.tree.map(ring, x)
        return dealt.replace(live=storage.live(dealt.flags, dealt.head, dealt.length, new))

    return jax.tree.map(part, state, is_leaf=_is_part)


def convert(found: PyTree, like: PyTree, devices: int) -> PyTree:
    """Returns a replay stored by another version or kind of collection, in the form of this run.

    Args:
      found: stored replay, in dicts.
      like: replay of this run.
      devices: number of devices of the stored replay.
    """
    if not isinstance(found, dict):
        return found
    rings = [x for x in jax.tree.leaves(like, is_leaf=_is_part) if isinstance(x, State)]
    if not rings:
        return found
    if "flags" in found:
        return _converted_ring(found, rings[0], devices)
    new = dict(found)
    if "priorities" in new and rings[0].head.ndim < new["rows"]["head"].ndim:
        new["priorities"] = dict(new["priorities"], tree=_turned_tree(new["priorities"]["tree"], new["rows"]))
    if "rows" in new:
        new["rows"] = _converted_ring(new["rows"], rings[0], devices)
    return new


def _converted_ring(found: dict[str, Any], like: State, devices: int) -> dict[str, Any]:
    old = dict(found)
    if old.pop("stale", None) is not None:
        old["live"] = storage.live(old["flags"], old["head"], old["length"], devices)
    if old["flags"].dtype != like.flags.dtype:  # hindsight was turned on or off
        flags = old["flags"].astype(np.uint32)
        age = np.minimum(flags >> AGE, np.iinfo(like.flags.dtype).max >> AGE)
        old["flags"] = (age << AGE | flags & (MASK | TERMINATED | TRUNCATED)).astype(like.flags.dtype)
    if like.head.ndim > old["head"].ndim:  # stored with one head for all columns, now one head per column
        own = {name: np.tile(old[name][:, None], old["flags"].shape[1]) for name in ("head", "length")}
        old |= own
    elif like.head.ndim < old["head"].ndim:  # stored with one head per column, now one head for all
        old |= _in_step(old)
    return old


def _in_step(ring: dict[str, Any]) -> dict[str, Any]:
    """Returns the changed parts of a ring with one head per column when it gets one head for all columns, at slot 0.

    Columns with fewer rows than the longest are padded with masked rows in front.
    """
    head, length = ring["head"], ring["length"]  # [D, B]
    kept = {name: ring[name] for name in ("obs", "action", "reward", "extras", "flags") if name in ring}
    turned = jax.tree.map(lambda x: _turned(x, head), kept)
    devices, slots = len(head), len(turned["flags"]) // len(head)
    behind = slots - np.arange(slots)[None, :, None]  # distance to the head; 1 for the newest row
    empty = (behind > length[:, None]) & (behind <= length.max())
    turned["flags"] = np.where(empty.reshape(turned["flags"].shape), np.uint8(SEAM), turned["flags"])
    clock = lambda x: np.full(devices, x, np.int32)
    return {**turned, "head": clock(0), "length": clock(length.max())}


def _turned(x: Any, head: np.ndarray) -> np.ndarray:
    """Rotates the rings [D * C, B, *] of D devices so that they begin at each column's head [D, B]."""
    devices, columns = head.shape
    rings = np.asarray(x).reshape(devices, -1, *x.shape[1:])
    slot = (np.arange(rings.shape[1])[None, :, None] + head[:, None]) % rings.shape[1]
    return rings[np.arange(devices)[:, None, None], slot, np.arange(columns)].reshape(x.shape)


def _turned_tree(trees: np.ndarray, ring: dict[str, Any]) -> np.ndarray:
    """Returns the priorities of the rows that `_in_step` moved."""
    parts, size = np.reshape(trees, (len(ring["head"]), -1)), np.size(ring["flags"]) // len(ring["head"])
    leaves = parts[:, parts.shape[1] // 2 :][:, :size].reshape(ring["flags"].shape)
    moved = _turned(leaves, ring["head"]).reshape(len(parts), -1)
    return np.concatenate([_tree(part) for part in moved])


def _is_part(x) -> bool:
    return isinstance(x, State | Priorities)


def _tree(leaves: np.ndarray) -> np.ndarray:
    """Returns the tree that `sum_tree.init` and one update of every leaf make."""
    level = np.zeros(1 << max(len(leaves) - 1, 0).bit_length(), np.float32)
    level[: len(leaves)] = leaves
    levels = [level]
    while levels[0].size > 1:
        pairs = levels[0].reshape(-1, 2)
        levels.insert(0, pairs[:, 0] + pairs[:, 1])
    return np.concatenate([np.zeros(1, np.float32), *levels])


__all__ = ["convert", "regroup"]
