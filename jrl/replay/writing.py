"""Writes a rollout's rows into a ring."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.errors import InputError
from jrl.replay import frames
from jrl.replay.layout import AGE, MASK, SEAM, TERMINATED, TRUNCATED, Layout, State
from jrl.types import PyTree, Rollout


class _Places(NamedTuple):
    """Destinations of a rollout's rows: numbers per head and slots, see `Layout`."""

    num_rows: jax.Array  # i32, number of new rows
    seam: jax.Array  # bool, the new rows do not continue the stored rows
    gap: jax.Array  # i32, 1 if the slot at the head stays, as a seam
    moved: jax.Array  # i32, number of slots from the head to the first new row
    head: jax.Array  # i32, slot after the new rows: the new head
    hole: jax.Array  # slot at the old head
    lead: jax.Array  # slots of the older frames of the first observation
    rows: jax.Array  # slots of the new rows
    last: jax.Array  # slot of the observation after the new rows
    is_row: jax.Array | None  # [T, B] bool, False for padding; None: no padding
    has_rows: jax.Array | None  # [1, B] bool; None: all columns have rows


def add(layout: Layout, state: State, rollout: Rollout) -> State:
    """Adds the rows of a rollout as the newest of the ring.

    Raises:
      InputError: the ring is too small for the rows; while tracing.
      ValueError: the rollout does not have the ring's shapes and dtypes.
    """
    _check(layout, rollout)
    at = _places(layout, state, rollout)
    hole, lost = _read(layout, state, at, rollout.reward.shape[0])
    new = _flags_of(layout, rollout, at, hole)

    def put_obs(ring, rows, last, like):
        stack = layout.stack
        if frames.is_stack(like, stack):
            stacks, there = rows, jnp.broadcast_to(at.seam, at.lead.shape)
            put = lambda ring: _write(layout, ring, frames.older(stacks[0], stack), at.lead, there)
            ring = jax.lax.cond(jnp.any(at.seam), put, lambda ring: ring, ring)
            rows, last = frames.newest(rows, stack), frames.newest(last, stack)
        return _write(layout, put_rows(ring, rows), last[None], at.last, at.has_rows)

    put_rows = lambda ring, rows: _write(layout, ring, rows, at.rows, at.is_row)
    taken = rollout.mask if at.is_row is None else rollout.mask & at.is_row
    return State(
        obs=jax.tree.map(put_obs, state.obs, rollout.obs, rollout.last_obs, layout.obs),
        action=jax.tree.map(put_rows, state.action, rollout.action),
        reward=put_rows(state.reward, rollout.reward),
        flags=_write_flags(layout, state.flags, new, at),
        extras={name: jax.tree.map(put_rows, state.extras[name], rollout.extras[name]) for name in layout.extras},
        head=at.head,
        length=jnp.minimum(state.length + at.moved + at.num_rows, layout.slots - layout.spare),
        live=state.live + taken.sum(dtype=jnp.int32) - lost.sum(dtype=jnp.int32),
    )


def _check(layout: Layout, rollout: Rollout) -> None:
    """Raises the errors of `add`."""
    steps, columns = rollout.reward.shape
    if columns != layout.columns:
        raise ValueError(f"rollout: expected {layout.columns} environments, got {columns}")
    least = steps + layout.spare + max(layout.length, layout.stack.size)
    if least > layout.slots:
        raise InputError(layout.too_small(least, f"rollouts of {steps} steps x "))
    kinds: list[tuple[PyTree, PyTree, str]] = [
        (layout.obs, rollout.obs, "obs"),
        (layout.action, rollout.action, "action"),
    ]
    if missing := layout.extras.keys() - rollout.extras.keys():
        raise ValueError(f"rollout.extras: expected {sorted(missing)} for replay, got {sorted(rollout.extras)}")
    kinds += [(layout.extras[name], rollout.extras[name], f"extras[{name!r}]") for name in layout.extras]
    for declared, given, name in kinds:
        declared = jax.tree.map(lambda x: ((steps, columns, *x.shape), jnp.dtype(x.dtype)), declared)
        given = jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype)), given)
        if declared != given:
            raise ValueError(f"rollout.{name}: expected {declared} as in the replay, got {given}")


def _places(layout: Layout, state: State, rollout: Rollout) -> _Places:
    steps, slots = rollout.reward.shape[0], layout.slots
    count = jnp.full(layout.clock, steps, jnp.int32)
    if not layout.in_step and rollout.count is not None:
        count = jnp.asarray(rollout.count, jnp.int32)[None]
    broken = ~jnp.asarray(rollout.contiguous)
    seam = broken.any() if layout.in_step else broken[None] & (count > 0)
    gap = (seam & (state.length > 0)).astype(jnp.int32)
    first = state.head + gap + jnp.where(seam, layout.lead, 0)
    head = (first + count) % slots
    return _Places(
        num_rows=count,
        seam=seam,
        gap=gap,
        moved=first - state.head,
        head=head,
        hole=layout.slot_of(state.head),
        lead=layout.after(state.head + gap, layout.lead) % slots,
        rows=layout.after(first, steps) % slots,
        last=layout.slot_of(head),
        is_row=None if layout.in_step else jnp.arange(steps)[:, None] < count,
        has_rows=None if layout.in_step else count > 0,
    )


def _read(layout: Layout, state: State, at: _Places, steps: int) -> tuple[jax.Array, jax.Array]:
    """Returns the flags at each head [B], and which oldest rows [n, B] are overwritten and unmasked.

    Flags are read once, and written once: see `jrl.replay.storage`.
    """
    most = steps + 1 + layout.lead
    slot = jnp.concatenate([at.hole, layout.after(state.head - state.length, most)]) % layout.slots
    found = state.flags.at[_index(layout, slot)].get(mode="promise_in_bounds")
    lost = state.length + at.moved + at.num_rows - (layout.slots - layout.spare)
    oldest = layout.after(0, most)
    return found[0], (found[1:] & MASK) * ((oldest[:, None] if layout.in_step else oldest) < lost)


def _flags_of(layout: Layout, rollout: Rollout, at: _Places, hole: jax.Array) -> jax.Array:
    """Returns the flags [1 + S - 1 + T + 1, B] of seam, older frames, rows and the observation after them.

    Args:
      hole: [B], flags at each old head.
    """
    dtype = layout.flags_dtype
    steps, (columns,) = rollout.reward.shape[0], rollout.contiguous.shape
    bit = lambda x, value: jnp.where(rollout.mask & x, dtype(value), dtype(0))
    cut: jax.Array | bool = False  # rows that are `truncated` only because padding follows
    if at.is_row is not None:
        cut = at.is_row & (at.num_rows < steps) & (jnp.arange(steps)[:, None] == at.num_rows - 1)
    truncated = rollout.truncated & jnp.logical_not(cut)
    flags = bit(True, MASK) | bit(rollout.terminated, TERMINATED) | bit(truncated, TRUNCATED)
    flags = jnp.concatenate([flags, jnp.full_like(flags[:1], MASK)])  # valid until the next row overwrites it
    if layout.most_age:
        age = jnp.where(at.seam, layout.lead, hole >> AGE).reshape(-1)
        flags |= _ages(layout, rollout, jnp.broadcast_to(age, (columns,))) << AGE
    if not layout.in_step:  # the observation after the rows, not after the padding
        flags = flags.at[-1].set(jnp.take_along_axis(flags, at.num_rows, 0)[0] | dtype(MASK))
    older = jnp.full((layout.lead, columns), SEAM, dtype)
    return jnp.concatenate([(hole >> AGE << AGE | SEAM)[None], older, flags])


def _ages(layout: Layout, rollout: Rollout, age: jax.Array) -> jax.Array:
    """Returns the ages [T + 1, B], at most `most_age`, of the rows and the next observation.

    `age` [B] is the age of row 0.
    """
    begins = frames.begin_anew(rollout, layout.stack)
    first = jnp.concatenate([jnp.zeros_like(begins[:1]), begins])
    row = jnp.arange(first.shape[0], dtype=jnp.int32)[:, None]
    begin = jax.lax.cummax(jnp.where(first, row, -1))
    age = jnp.where(begin >= 0, row - begin, age[None].astype(jnp.int32) + row)
    return jnp.minimum(age, layout.most_age).astype(layout.flags_dtype)


def _write_flags(layout: Layout, ring: jax.Array, new: jax.Array, at: _Places) -> jax.Array:
    """Writes the flags of `_flags_of` into the ring, in one write."""
    is_row, has_rows = (True if x is None else x for x in (at.is_row, at.has_rows))
    where = [at.hole, at.lead, at.rows, at.last]
    real = [jnp.broadcast_to(r, x.shape) for r, x in zip([at.gap > 0, at.seam, is_row, has_rows], where)]
    return _write(layout, ring, new, jnp.concatenate(where), jnp.concatenate(real))


def _write(layout: Layout, ring, rows, slot, real=None):
    """Writes rows [n, B, *] into their slots; skips rows that are not `real` (shape of `slot`)."""
    rows = rows.astype(ring.dtype)
    if real is not None:
        nowhere = layout.slots + jnp.arange(len(slot))
        slot = jnp.where(real, slot, nowhere if layout.in_step else nowhere[:, None])
    elif layout.in_step and rows.shape[0] == 1:
        return jax.lax.dynamic_update_slice_in_dim(ring, rows, slot[0], 0)
    mode = "promise_in_bounds" if real is None else "drop"
    return ring.at[_index(layout, slot)].set(rows, mode=mode, unique_indices=True)


def _index(layout: Layout, slot):
    """Returns the index of slots in all columns."""
    return slot if layout.in_step else (slot, layout.every)
