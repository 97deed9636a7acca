"""What every replay buffer here stands on: a time-major ring that holds each row once.

Storage is [C, B, *]: C slots for each of B columns (environments). The slot at the head holds the observation after the
newest row and nothing else, so that every row finds its successor in the next slot, and can be sampled at once. It is
the one hole of the ring.

Written in place when the state is donated: in one program, add first and sample then. The other way round, or when a
number that is read from storage outlives a write to it, XLA copies the buffer.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl.errors import InputError
from jrl.ops import random
from jrl.types import Array, Batch, Key, PyTree, Rollout, SequenceBatch, Window

# State.flags: three bits, and from the fourth on the age: steps since the episode's first observation, at most S - 1
_MASK, _TERMINATED, _TRUNCATED, _AGE = 1, 2, 4, 3


@dataclasses.dataclass(frozen=True)
class FrameStack:
    """Observations are stacks of the last `size` frames, the newest last; a first observation is stacked of itself.

    So do EnvPool and Gymnasium's FrameStackObservation by default. Only images are meant: leaves of three or more axes.
    """

    size: int
    axis: Literal[0, -1] = 0  # of one environment's observation: 0 for [S, H, W], -1 for [H, W, S]


@struct.dataclass
class State:
    """The ring. Row t of the rollouts lies in slot t % C."""

    obs: PyTree  # [C, B, *]; of frame stacks the newest frame
    action: PyTree  # [C, B, *]
    reward: jax.Array  # [C, B] f32
    flags: jax.Array  # [C, B] u8: mask, terminated, truncated, age
    extras: dict[str, PyTree]  # [C, B, *]
    head: jax.Array  # [] i32, the slot of the next row
    length: jax.Array  # [] i32, rows per column that can be sampled: the slots before the head
    stale: jax.Array  # [] i32, vector steps since the newest one with an unmasked row; `length` at most matters


class Storage(NamedTuple):
    """The functions of one ring. Slots and columns are i32 arrays of one shape."""

    init: Callable[[], State]
    add: Callable[[State, Rollout], State]
    valid: Callable[[State, Array, Array], Array]  # (state, slot, column) -> bool: the row is not void
    # (state, slot [N], column [N], weight [N], key) -> Batch
    transitions: Callable[[State, Array, Array, Array, Key], Batch]
    # (state, slot [N], column [N], weight [N], burn_in, key) -> SequenceBatch of the `length` rows from there on
    sequences: Callable[[State, Array, Array, Array, int, Key], SequenceBatch]
    slots: int  # C
    columns: int  # B
    length: int  # rows of a column that a sample spans
    spare: int  # slots that are never sampled: the head, and the oldest S - 1 rows, whose stacks have lost a frame


def make(
    obs: PyTree,
    action: PyTree,
    *,
    capacity: int,
    num_envs: int,
    gamma,
    n_step: int | tuple[int, int] = 1,
    frame_stack: FrameStack | None = None,
    extras: Mapping[str, PyTree] | None = None,
    length: int = 1,
) -> Storage:
    """See `ring.make`; `length` is how many rows of a column a sample spans.

    Raises:
      InputError: capacity, n_step or frame_stack cannot be.
    """
    stack = frame_stack or FrameStack(1)
    slots, spare = capacity // num_envs, stack.size
    low, high = n_step if isinstance(n_step, tuple) else (n_step, n_step)
    extras = dict(extras or {})
    spans = f", for sequences of {length} steps (network.max_seq_len and replay.burn_in)" if length > 1 else ""
    faults = []
    if slots < spare + length + 1:
        least = (spare + length + 1) * num_envs
        faults.append(f"replay.capacity: {capacity} is too small for {num_envs} environments: at least {least}{spans}")
    if not 1 <= low <= high:
        faults.append(f"replay.n_step: {n_step} must be a number >= 1 or a range [low, high] of such")
    if stack.size > 1 and not any(_is_stack(x, stack) for x in jax.tree.leaves(obs)):
        shapes = [x.shape for x in jax.tree.leaves(obs)]
        faults.append(
            f"replay.frame_stack: no {stack.size} frames on axis {stack.axis} of observations {shapes}: use 1"
        )
    if not 1 <= stack.size <= 256 >> _AGE:
        faults.append(f"replay.frame_stack: {stack.size} must be in 1 .. {256 >> _AGE}")
    if faults:
        raise InputError(*faults)

    def init() -> State:
        zeros = lambda x: jnp.zeros((slots, num_envs, *x.shape), x.dtype)
        flat = lambda dtype: jnp.zeros((slots, num_envs), dtype)
        return State(
            obs=jax.tree.map(lambda x: zeros(_stored(x, stack)), obs),
            action=jax.tree.map(zeros, action),
            reward=flat(jnp.float32),
            flags=flat(jnp.uint8),
            extras=jax.tree.map(zeros, extras),
            head=jnp.zeros((), jnp.int32),
            length=jnp.zeros((), jnp.int32),
            stale=jnp.zeros((), jnp.int32),
        )

    def add(state: State, rollout: Rollout) -> State:
        steps = _checked_length(rollout)
        head, new_head = state.head, (state.head + steps) % slots

        def write(ring, rows, at=head):
            rows = rows.astype(ring.dtype)
            if rows.shape[0] == 1:
                return jax.lax.dynamic_update_slice_in_dim(ring, rows, at, 0)
            where = (at + jnp.arange(rows.shape[0])) % slots
            return ring.at[where].set(rows, mode="promise_in_bounds", unique_indices=True)

        def write_obs(ring, rows, last, like):
            if _is_stack(like, stack):
                rows, last = _newest(rows, stack), _newest(last, stack)
            return write(write(ring, rows), last[None], new_head)

        # read once, written once: see the module's docstring
        around = (head - 1 + jnp.arange(2)) % slots
        newest, hole = state.flags.at[around].get(mode="promise_in_bounds")
        # where the environments were restarted, the newest row has lost its successor to row 0 of this rollout: it
        # becomes void, and so the row before it ends its episode's part, with an observation to bootstrap from
        newest = jnp.where(rollout.contiguous, newest, newest >> _AGE << _AGE)
        flags = jnp.concatenate([newest[None], _flags(rollout, hole >> _AGE, stack.size - 1)])
        flags = write(state.flags, flags, (head - 1) % slots)

        live = jnp.where(rollout.mask.any(1), jnp.arange(steps), -1).max()
        return State(
            obs=jax.tree.map(write_obs, state.obs, rollout.obs, rollout.last_obs, obs),
            action=jax.tree.map(write, state.action, rollout.action),
            reward=write(state.reward, rollout.reward),
            flags=flags,
            extras={name: jax.tree.map(write, state.extras[name], rollout.extras[name]) for name in extras},
            head=new_head,
            length=jnp.minimum(state.length + steps, slots - spare),
            stale=jnp.where(live >= 0, steps - 1 - live, jnp.minimum(state.stale + steps, slots)),
        )

    def _checked_length(rollout: Rollout) -> int:
        """T; what does not fit the ring is refused while tracing."""
        steps, columns = rollout.reward.shape
        if columns != num_envs:
            raise ValueError(f"a rollout of {columns} environments for a replay of {num_envs}")
        if steps + spare + length > slots:
            raise InputError(
                f"replay.capacity: {capacity} is too small for rollouts of {steps} steps x {num_envs} environments: "
                f"at least {(steps + spare + length) * num_envs}{spans}"
            )
        kinds = [(obs, rollout.obs, "obs"), (action, rollout.action, "action")]
        if missing := extras.keys() - rollout.extras.keys():
            raise ValueError(f"replay shall hold the extras {sorted(missing)}, which the rollout lacks")
        kinds += [(extras[name], rollout.extras[name], f"extras[{name!r}]") for name in extras]
        for declared, given, name in kinds:
            declared = jax.tree.map(lambda x: ((steps, columns, *x.shape), jnp.dtype(x.dtype)), declared)
            given = jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype)), given)
            if declared != given:
                raise ValueError(f"rollout.{name} is {given} where replay was made for {declared}")
        return steps

    def observation(state: State, slot, column):
        """The observations in these slots, [..., *], stacks rebuilt."""

        def read(ring, like):
            if not _is_stack(like, stack):
                return take(ring, slot, column)
            age = (take(state.flags, slot, column) >> _AGE).astype(jnp.int32)
            back = jnp.stack([jnp.minimum(age, j) for j in range(stack.size - 1, -1, -1)], -1)
            frames = take(ring, (slot[..., None] - back) % slots, column[..., None])
            return jnp.moveaxis(frames, slot.ndim, -1) if stack.axis == -1 else frames

        return jax.tree.map(read, state.obs, obs)

    def valid(state: State, slot, column):
        return (take(state.flags, slot, column) & _MASK) != 0

    def window(state: State, slot, column, steps):
        """The return of the rows from each slot on: `steps` of them, fewer where an episode or the ring ends.

        The one place in replay that makes a target of how rows end.

        Returns:
          reward [N] f32, discount [N] f32, count [N] i32 of the rows.
        """
        offset = jnp.arange(high + 1)[None]
        rows, columns = (slot[:, None] + offset) % slots, column[:, None]
        flags, reward = take(state.flags, rows, columns), take(state.reward, rows[:, :-1], columns)
        # a void row follows upon each end; and where environments were restarted, it is the only sign of one
        end = ((flags[:, :-1] & (_TERMINATED | _TRUNCATED)) != 0) | ((flags[:, 1:] & _MASK) == 0)
        before = jnp.cumsum(end, 1) - end
        ahead = (state.head - slot) % slots
        used = (before == 0) & (offset[:, :-1] < jnp.minimum(steps, ahead)[:, None])
        terminated = (used & ((flags[:, :-1] & _TERMINATED) != 0)).any(1)
        count = used.sum(1, dtype=jnp.int32)
        powers = jnp.asarray(gamma, jnp.float32) ** jnp.arange(high + 1, dtype=jnp.float32)
        reward = jnp.where(used, reward * powers[None, :-1], 0.0).sum(1)
        return reward, jnp.where(terminated, 0.0, powers[count]), count

    def drawn_steps(key: Key, shape: tuple[int, ...]):
        steps = jnp.full(shape, high)
        if low < high:
            steps = low + (random.bits(key, shape) % (high - low + 1)).astype(jnp.int32)
        return steps

    def transitions(state: State, slot, column, weight, key: Key) -> Batch:
        reward, discount, count = window(state, slot, column, drawn_steps(key, slot.shape))
        return Batch(
            obs=observation(state, slot, column),
            action=jax.tree.map(lambda x: take(x, slot, column), state.action),
            reward=reward,
            discount=discount,
            next_obs=observation(state, (slot + count) % slots, column),
            weight=weight,
            index=slot * num_envs + column,
        )

    def sequences(state: State, slot, column, weight, burn_in: int, key: Key) -> SequenceBatch:
        first, of_first = slot, column
        slot, column = jnp.broadcast_arrays((slot[:, None] + jnp.arange(length + 1)[None]) % slots, column[:, None])
        reset = ~valid(state, slot, column)
        rows, columns, live = (x[:, burn_in:-1] for x in (slot, column, ~reset))
        place = jnp.arange(rows.shape[1])[None]
        steps = jnp.minimum(drawn_steps(key, rows.shape), rows.shape[1] - place)  # not beyond the last row
        target = window(state, rows.reshape(-1), columns.reshape(-1), steps.reshape(-1))
        reward, discount, count = (x.reshape(rows.shape) for x in target)
        share = jnp.maximum(live.astype(jnp.float32).mean(), 1.0 / live.size)
        return SequenceBatch(
            window=Window(
                obs=observation(state, slot, column),
                carry=jax.tree.map(lambda x: take(x, first, of_first), state.extras.get("carry", ())),
                reset=reset,
            ),
            action=jax.tree.map(lambda x: take(x, rows, columns), state.action),
            reward=reward,
            discount=discount,
            ahead=place + count,
            weight=jnp.where(live, weight[:, None], 0.0) / share,
            index=first * num_envs + of_first,
        )

    return Storage(init, add, valid, transitions, sequences, slots, num_envs, length, spare)


def take(ring, slot, column):
    """Rows of one leaf [C, B, *]: [..., *] for slots and columns [...]."""
    return ring.at[slot, column].get(mode="promise_in_bounds")


def _is_stack(x, stack: FrameStack) -> bool:
    """Whether an observation leaf of one environment is a stack of frames."""
    return stack.size > 1 and len(x.shape) >= 3 and x.shape[stack.axis] == stack.size


def _newest(x, stack: FrameStack):
    """The last frame of stacks [..., S, H, W] or [..., H, W, S]."""
    return x[..., -1, :, :] if stack.axis == 0 else x[..., -1]


def _stored(x, stack: FrameStack):
    """Shape and dtype of what the ring keeps of an observation leaf."""
    if not _is_stack(x, stack):
        return x
    return jax.eval_shape(lambda: _newest(jnp.zeros(x.shape, x.dtype), stack))


def _flags(rollout: Rollout, age, oldest: int):
    """What `State.flags` says of the rows of a rollout and of the observation after them, [T + 1, B] u8.

    Args:
      age: [B], of row 0 if it continues an episode.
      oldest: the age from which on one is as good as another.
    """
    bit = lambda x, value: jnp.where(x, jnp.uint8(value), jnp.uint8(0))
    flags = bit(rollout.mask, _MASK) | bit(rollout.terminated, _TERMINATED) | bit(rollout.truncated, _TRUNCATED)
    flags = jnp.concatenate([flags, jnp.full_like(flags[:1], _MASK)])  # until the next row comes
    if oldest:
        first = jnp.concatenate([~rollout.contiguous[None], ~rollout.mask])  # an episode begins after a reset row
        row = jnp.arange(first.shape[0], dtype=jnp.int32)[:, None]
        begin = jax.lax.cummax(jnp.where(first, row, -1))
        age = jnp.where(begin >= 0, row - begin, age[None].astype(jnp.int32) + row)
        flags |= jnp.minimum(age, oldest).astype(jnp.uint8) << _AGE
    return flags
