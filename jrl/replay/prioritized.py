"""Prioritised replay: rows are drawn in proportion to priority ** alpha (arXiv:1511.05952).

Storage, n-step windows and frame stacks are those of the ring; only the sampling differs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl.ops import random, schedules
from jrl.replay import storage, sum_tree
from jrl.replay.layout import Layout
from jrl.replay.layout import State as Rows
from jrl.types import Array, Buffer, Key, PyTree, Rollout

_LEAST = 1e-30  # minimum of priority ** alpha: a row with weight 0 could never be drawn again


@struct.dataclass
class Priorities:
    """Priorities of rows. Slots that must not be drawn have weight 0."""

    tree: Array  # f32, see sum_tree; leaves are (priority + eps) ** alpha
    highest: Array  # [] f32, maximum of all leaves so far: the weight of new rows
    steps: Array  # [] u32, number of added vector steps, or of updates with `by_updates`; saturating


@struct.dataclass
class State:
    rows: Rows
    priorities: Priorities


class Sampler(NamedTuple):
    """Functions of prioritised sampling, for one storage."""

    init: Callable[[], Priorities]
    # (priorities, head before the add, rows after the add, added rollout)
    enter: Callable[[Priorities, Array, Rows, Rollout], Priorities]
    draw: Callable[[Priorities, Key], tuple[Array, Array, Array]]  # -> slot, column, weight [N]
    update: Callable[[Priorities, Array, Array], Priorities]  # (priorities, index [N], priority [N])


def make(
    obs: PyTree,
    action: PyTree,
    *,
    batch_size: int,
    alpha,
    beta,
    eps=1e-6,
    num_devices: int = 1,
    by_updates: bool = False,
    **options: Any,
) -> Buffer:
    """Makes a ring of the latest rows, sampled by priority (arXiv:1511.05952, section 3.3, proportional variant).

    Args:
      obs, action, batch_size, options: see `ring.make`.
      alpha, beta, eps, num_devices, by_updates: see `sampler`.
    Returns:
      A Buffer. New rows get the highest priority so far; masked rows are never drawn. Weights are importance weights, 1
      for the row with the lowest probability.
    Raises:
      InputError: as for `ring.make`.
    """
    rows = storage.make(obs, action, **options)
    by_priority = sampler(
        rows.layout, batch_size, alpha=alpha, beta=beta, eps=eps, num_devices=num_devices, by_updates=by_updates
    )
    return buffer(rows, by_priority, lambda state, *drawn: rows.transitions(state, *drawn))


def buffer(rows: storage.Storage, by_priority: Sampler, read: Callable) -> Buffer:
    """Joins a storage and a sampler; `read(rows, slot, column, weight, key)` makes a sample of the drawn rows."""

    def add(state: State, rollout) -> State:
        after = rows.add(state.rows, rollout)
        return State(after, by_priority.enter(state.priorities, state.rows.head, after, rollout))

    def sample(state: State, key: Key):
        draw_key, window_key = jax.random.split(key)
        return read(state.rows, *by_priority.draw(state.priorities, draw_key), window_key)

    def set_priority(state: State, index, priority) -> State:
        return State(state.rows, by_priority.update(state.priorities, index, priority))

    return Buffer(
        init=lambda: State(rows.init(), by_priority.init()),
        add=add,
        sample=sample,
        can_sample=lambda state: sum_tree.total(state.priorities.tree) > 0,
        size=lambda state: rows.held(state.rows),
        set_priority=set_priority,
        live=lambda state: state.rows.live,
    )


def sampler(
    layout: Layout, batch_size: int, *, alpha, beta, eps=1e-6, num_devices: int = 1, by_updates: bool = False
) -> Sampler:
    """Draws rows in proportion to priority ** alpha, one from each of `batch_size` parts of equal mass.

    Args:
      layout: layout of the ring.
      batch_size: N.
      alpha: exponent of the priorities: 0 is uniform.
      beta: exponent of the importance weights, a Schedule over the environment steps added on all devices, masked steps
        included. 1 corrects completely.
      eps: constant added to each priority.
      num_devices: number of devices that add rows. Each draws from its own rows and divides its weights by their
        maximum.
      by_updates: whether the schedule counts priority updates, one per sample: for data sets, which are fixed.
    Returns:
      A Sampler. Samples of single rows are never masked; longer samples may contain masked rows.
    """
    length = layout.length

    def init() -> Priorities:
        tree = sum_tree.init(layout.slots * layout.columns)
        return Priorities(tree, jnp.ones((), jnp.float32), jnp.zeros((), jnp.uint32))

    def enter(priorities: Priorities, head: Array, after: Rows, rollout: Rollout) -> Priorities:
        tree, steps = priorities.tree, rollout.reward.shape[0]
        most = steps + layout.spare  # slots by which the head can have moved: at a seam by more than the rows
        behind = min(length - 1, most)
        offset = lambda low, high: jnp.arange(low, high)[:, None]
        # rows that can be drawn now; then rows that are still too new, the head, and rows with incomplete frame stacks
        moved = (after.head - head) % layout.slots
        entering = jnp.where(offset(0, most) < moved, head - (length - 1) + offset(0, most), after.head)
        leaving = after.head + offset(-behind, layout.spare)
        slots = jnp.concatenate([entering, leaving]) % layout.slots
        slots, columns = jnp.broadcast_arrays(slots, jnp.arange(layout.columns)[None])
        place = (after.head - slots[:most]) % layout.slots  # from the newest row on, 1
        live = (place >= length) & (place <= after.length)
        if length == 1:  # read the rollout, not the written rows, which XLA would copy
            count = steps if layout.in_step or rollout.count is None else rollout.count[None]
            row = offset(0, most) - (moved - count)
            mask = jnp.take_along_axis(rollout.mask, jnp.broadcast_to(jnp.clip(row, 0, steps - 1), live.shape), 0)
            live &= mask & (row >= 0) & (row < count)
        weight = jnp.pad(jnp.where(live, priorities.highest, 0.0), [(0, behind + layout.spare), (0, 0)])
        added = jnp.uint32(0 if by_updates else steps)
        if not by_updates and not layout.in_step and rollout.count is not None:
            added = (-(-rollout.count.sum() // layout.columns)).astype(jnp.uint32)
        return Priorities(
            tree=sum_tree.update(tree, (slots * layout.columns + columns).reshape(-1), weight.reshape(-1)),
            highest=priorities.highest,
            steps=priorities.steps + jnp.minimum(added, ~priorities.steps),
        )

    def draw(priorities: Priorities, key: Key):
        part = jnp.arange(batch_size) + random.uniform(key, (batch_size,))
        mass = part * (sum_tree.total(priorities.tree) / batch_size)
        again = jax.random.fold_in(key, 1) if sum_tree.is_deep(layout.slots * layout.columns) else None
        index, leaf = sum_tree.find(priorities.tree, mass, again)
        counted = priorities.steps.astype(jnp.float32) * (1 if by_updates else layout.columns * num_devices)
        # (N P(i)) ** -beta divided by its maximum: N and the total cancel
        weight = (leaf.min() / leaf) ** schedules.value(beta, counted)
        return index // layout.columns, index % layout.columns, jnp.where(leaf > 0, weight, 0.0)

    def update(priorities: Priorities, index, priority) -> Priorities:
        leaf = jnp.maximum((priority + eps) ** alpha, _LEAST)
        leaf = jnp.where(sum_tree.get(priorities.tree, index) > 0, leaf, 0.0)  # 0 stays 0: the row must not be drawn
        return Priorities(
            tree=sum_tree.update(priorities.tree, index, leaf),
            highest=jnp.maximum(priorities.highest, leaf.max()),
            steps=priorities.steps + jnp.minimum(jnp.uint32(by_updates), ~priorities.steps),
        )

    return Sampler(init, enter, draw, update)
