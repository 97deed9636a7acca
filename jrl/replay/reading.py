"""Draws rows from a ring and makes batches of them. Slots and columns are i32 arrays of one shape."""

import functools

import jax
import jax.numpy as jnp

from jrl.ops import random
from jrl.replay import frames, hindsight
from jrl.replay.hindsight import ACHIEVED, DESIRED, Goals
from jrl.replay.layout import AGE, MASK, TERMINATED, TO_END, TRUNCATED, Layout, State, is_seam, take, take_all
from jrl.types import NEXT_ACTION, Array, Batch, Key, PyTree, SequenceBatch, Window


def valid(layout: Layout, state: State, slot: Array, column: Array) -> Array:
    """Returns whether each row is unmasked."""
    return (take(state.flags, slot, column) & MASK) != 0


def can_begin(layout: Layout, state: State) -> Array:
    """Returns [] bool: whether a sample can begin at some row, and some row is unmasked."""
    return (state.live > 0) & (state.length >= layout.length).any()


def held(layout: Layout, state: State) -> Array:
    """Returns the number of rows over all columns, [] i32, masked rows included."""
    return state.length * layout.columns if layout.in_step else state.length.sum(dtype=jnp.int32)


def draw(layout: Layout, state: State, key: Key, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Draws slots and columns of this shape, uniformly over all rows that can begin a sample, masked or not."""
    columns, length = layout.columns, layout.length
    bits = random.bits(key, shape)
    # 32 bits modulo about 2**24 rows: probabilities differ by at most 1 in 256
    if layout.in_step:
        steps = jnp.maximum(state.length - (length - 1), 1)
        place = (bits % (steps * columns).astype(jnp.uint32)).astype(jnp.int32)
        place, column = place // columns, place % columns
    else:
        each = jnp.maximum(state.length[0] - (length - 1), 0)
        ends = jnp.cumsum(each)
        place = (bits % jnp.maximum(ends[-1], 1).astype(jnp.uint32)).astype(jnp.int32)
        column = jnp.minimum(jnp.searchsorted(ends, place, side="right"), columns - 1).astype(jnp.int32)
        place -= (ends - each)[column]
    return (layout.at_column(state.head - state.length, column) + place) % layout.slots, column


def transitions(layout: Layout, state: State, slot: Array, column: Array, weight: Array, key: Key) -> Batch:
    """Returns the transitions that begin at rows [N]."""
    goals = None if layout.hindsight is None else _draw_goals(layout, state, slot, column, jax.random.fold_in(key, 1))
    relabel = (lambda obs: obs) if goals is None else functools.partial(hindsight.relabel, goals)
    if layout.to_end:
        to_end = take_all(state.extras[TO_END], slot, column)
        reward, discount, count = to_end["reward"], to_end["discount"], to_end["steps"]
    else:
        reward, discount, count = _window(layout, state, slot, column, _drawn_steps(layout, key, slot.shape), goals)
    return Batch(
        obs=relabel(_observation(layout, state, slot, column)),
        action=jax.tree.map(lambda x: take(x, slot, column), state.action),
        reward=reward,
        discount=discount,
        next_obs=relabel(_observation(layout, state, (slot + count) % layout.slots, column)),
        weight=weight,
        index=slot * layout.columns + column,
        extras=_extras(layout, state, slot, column, count),
    )


def sequences(
    layout: Layout, state: State, slot: Array, column: Array, weight: Array, burn_in: int, key: Key
) -> SequenceBatch:
    """Returns the sequences of `length` rows from rows [N] on; `burn_in` rows recover the recurrent state."""
    first, of_first = slot, column
    span = jnp.arange(layout.length + 1)[None]
    slot, column = jnp.broadcast_arrays((slot[:, None] + span) % layout.slots, column[:, None])
    reset = ~valid(layout, state, slot, column)
    # after a seam the recurrent state does not belong to the rows; other sequences begin there
    other = jnp.cumsum(is_seam(take(state.flags, slot, column)), 1) > 0
    rows, columns, live = (x[:, burn_in:-1] for x in (slot, column, ~reset & ~other))
    place = jnp.arange(rows.shape[1])[None]
    steps = jnp.minimum(_drawn_steps(layout, key, rows.shape), rows.shape[1] - place)  # at most to the last row
    target = _window(layout, state, rows.reshape(-1), columns.reshape(-1), steps.reshape(-1))
    reward, discount, count = (x.reshape(rows.shape) for x in target)
    share = jnp.maximum(live.astype(jnp.float32).mean(), 1.0 / live.size)
    return SequenceBatch(
        window=Window(
            obs=_observation(layout, state, slot, column),
            carry=jax.tree.map(lambda x: take(x, first, of_first), state.extras.get("carry", ())),
            reset=reset,
        ),
        action=jax.tree.map(lambda x: take(x, rows, columns), state.action),
        reward=reward,
        discount=discount,
        ahead=place + count,
        weight=jnp.where(live, weight[:, None], 0.0) / share,
        index=first * layout.columns + of_first,
        extras=_extras(layout, state, rows, columns, count),
    )


def _observation(layout: Layout, state: State, slot: Array, column: Array) -> PyTree:
    """Reads the observations in these slots, [..., *], and rebuilds frame stacks."""
    stack = layout.stack

    def read(ring, like):
        if not frames.is_stack(like, stack):
            return take(ring, slot, column)
        age = (take(state.flags, slot, column) >> AGE).astype(jnp.int32)
        back = jnp.stack([jnp.minimum(age, j) for j in range(stack.size - 1, -1, -1)], -1)
        found = take(ring, (slot[..., None] - back) % layout.slots, column[..., None])
        return jnp.moveaxis(found, slot.ndim, -1) if stack.axis == -1 else found

    return jax.tree.map(read, state.obs, layout.obs)


def _extras(layout: Layout, state: State, slot: Array, column: Array, count: Array) -> dict[str, PyTree]:
    """Reads the extras of transitions of `count` rows that begin in these slots, all [...]."""
    kept = {name: x for name, x in state.extras.items() if name not in ("carry", TO_END)}
    found = take_all(kept, slot, column)
    if not layout.next_action:
        return found
    after = (slot + count) % layout.slots
    has_action = (after != layout.at_column(state.head, column)) & valid(layout, state, after, column)
    return {**found, NEXT_ACTION: {"action": take_all(state.action, after, column), "valid": has_action}}


def _drawn_steps(layout: Layout, key: Key, shape: tuple[int, ...]) -> Array:
    low, high = layout.reach
    if low == high:
        return jnp.full(shape, high)
    return low + (random.bits(key, shape) % (high - low + 1)).astype(jnp.int32)


def _draw_goals(layout: Layout, state: State, slot: Array, column: Array, key: Key) -> Goals:
    """Draws goals that the episodes of these rows [N] achieved, from the rows that the ring still has."""
    assert layout.hindsight is not None
    slots, head = layout.slots, layout.at_column(state.head, column)
    age_at = lambda slot: (take(state.flags, slot, column) >> AGE).astype(jnp.int32)
    age, newest = age_at(slot), (head - slot) % slots
    most = min(slots - 1, layout.hindsight.max_steps or slots)
    ahead = jnp.ones_like(slot)  # observations of an episode are those with consecutive ages: a binary search
    for bit in reversed(range((most - 1).bit_length())):
        further = ahead + (1 << bit)
        is_same = (further <= newest) & (age_at((slot + further) % slots) == age + further)
        ahead = jnp.where(is_same, further, ahead)
    # behind a seam the age counts the older frames, too
    older = jnp.where(is_seam(take(state.flags, (slot - age) % slots, column)), layout.lead, 0) if layout.lead else 0
    behind = jnp.minimum(age - older, (slot - head + layout.at_column(state.length, column)) % slots)
    # without barriers XLA's CPU backend draws again for each element of a goal, and reads goals again for each use:
    # relabelling 128 samples of 15 bits takes 23 us without them, 17 us with them
    steps, is_new = jax.lax.optimization_barrier(hindsight.draw(layout.hindsight, key, ahead, behind))
    return Goals(jax.lax.optimization_barrier(take(state.obs[ACHIEVED], (slot + steps) % slots, column)), is_new)


def _window(
    layout: Layout, state: State, slot: Array, column: Array, steps: Array, goals: Goals | None = None
) -> tuple[Array, Array, Array]:
    """Returns the n-step return from each slot on, over `steps` rows, or fewer at the end of an episode or the ring.

    Only this function in replay turns episode ends into targets. New goals change the rewards and the true ends.

    Returns:
      reward [N] f32, discount [N] f32, count [N] i32 of the rows.
    """
    slots, (_, high) = layout.slots, layout.reach
    offset = jnp.arange(high + 1)[None]
    rows, columns = (slot[:, None] + offset) % slots, column[:, None]
    flags, reward = take(state.flags, rows, columns), take(state.reward, rows[:, :-1], columns)
    # a masked row follows each end; before a seam it is the only sign of an end
    end = ((flags[:, :-1] & (TERMINATED | TRUNCATED)) != 0) | ((flags[:, 1:] & MASK) == 0)
    if goals is not None:
        assert layout.hindsight is not None
        achieved = take(state.obs[ACHIEVED], rows[:, 1:], columns)
        desired = take(state.obs[DESIRED], rows[:, :-1], columns)
        stored_end = (flags[:, :-1] & TERMINATED) != 0
        reward, at_end = hindsight.recompute(layout.hindsight, goals, achieved, desired, reward, stored_end)
        end |= at_end
    before = jnp.cumsum(end, 1) - end
    ahead = (layout.at_column(state.head, column) - slot) % slots
    used = (before == 0) & (offset[:, :-1] < jnp.minimum(steps, ahead)[:, None])
    terminated = (used & ((flags[:, :-1] & TERMINATED) != 0)).any(1) if goals is None else (used & at_end).any(1)
    count = used.sum(1, dtype=jnp.int32)
    powers = jnp.asarray(layout.gamma, jnp.float32) ** jnp.arange(high + 1, dtype=jnp.float32)
    reward = jnp.where(used, reward * powers[None, :-1], 0.0).sum(1)
    return reward, jnp.where(terminated, 0.0, powers[count]), count
