"""What every replay buffer here stands on: a time-major ring that holds each row once.

Storage is [C, B, *]: C slots for each of B columns (environments). The slot at the head holds the observation after the
newest row and nothing else, so that every row finds its successor in the next slot, and can be sampled at once.

Rows that do not continue those before them begin one slot later, behind a seam: the slot at the head stays as it is, a
masked row with the observation after the newest. So no row loses its successor. In front of them stand the older frames
of their first observation, where stacks are stored as frames. Windows and sequences end at a seam.

Columns whose environments wait for each other share one head, and a step of all of them is one write. Others have heads
of their own and take as many rows as came (`Rollout.count`): what is padding in a rollout is not stored.

Written in place when the state is donated: in one program, add first and sample then. The other way round, or when a
number that is read from storage outlives a write to it, XLA copies the buffer.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jrl.errors import InputError
from jrl.ops import random
from jrl.types import Array, Batch, Key, PyTree, Rollout, SequenceBatch, Window

# State.flags: three bits, and from the fourth on the age: steps since the episode's first observation, at most S - 1
_MASK, _TERMINATED, _TRUNCATED, _AGE = 1, 2, 4, 3
SEAM = _TRUNCATED  # of a masked row: what comes next does not continue what was before


@dataclasses.dataclass(frozen=True)
class FrameStack:
    """Observations are stacks of the last `size` frames, the newest last; a first observation is stacked of itself.

    So do EnvPool and Gymnasium's FrameStackObservation by default. Only images are meant: leaves of three or more axes.
    Without `restarts` some episodes go on with the frames of the one before, as EnvPool's do behind a lost life: which,
    the observations say.
    """

    size: int
    axis: Literal[0, -1] = 0  # of one environment's observation: 0 for [S, H, W], -1 for [H, W, S]
    restarts: bool = True


@struct.dataclass
class State:
    """The ring. Row t of the rollouts lies in slot t % C."""

    obs: PyTree  # [C, B, *]; of frame stacks the newest frame
    action: PyTree  # [C, B, *]
    reward: jax.Array  # [C, B] f32
    flags: jax.Array  # [C, B] u8: mask, terminated, truncated, age
    extras: dict[str, PyTree]  # [C, B, *]
    head: jax.Array  # i32, the slot of the next row: [], or [1, B] where each column has its own
    length: jax.Array  # as `head`, rows per column that are held: the slots before the head
    live: jax.Array  # [] i32, those of them that are not masked


class Storage(NamedTuple):
    """The functions of one ring. Slots and columns are i32 arrays of one shape."""

    init: Callable[[], State]
    add: Callable[[State, Rollout], State]
    draw: Callable[[State, Key, tuple[int, ...]], tuple[Array, Array]]  # -> slot, column: see `make`
    valid: Callable[[State, Array, Array], Array]  # (state, slot, column) -> bool: the row is not masked
    can_begin: Callable[[State], Array]  # state -> [] bool: one can, and not all rows are masked
    held: Callable[[State], Array]  # state -> [] i32, rows of all columns, masked ones too
    # (state, slot [N], column [N], weight [N], key) -> Batch
    transitions: Callable[[State, Array, Array, Array, Key], Batch]
    # (state, slot [N], column [N], weight [N], burn_in, key) -> SequenceBatch of the `length` rows from there on
    sequences: Callable[[State, Array, Array, Array, int, Key], SequenceBatch]
    slots: int  # C
    columns: int  # B
    length: int  # rows of a column that a sample spans
    spare: int  # slots that are never sampled: the head, and the oldest S - 1 rows, whose stacks have lost a frame
    in_step: bool  # the columns share one head


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
    in_step: bool = True,
) -> Storage:
    """See `ring.make`; `length` is how many rows of a column a sample spans. `draw` is uniform over all rows from which
    one can begin, masked ones too.

    Raises:
      InputError: capacity, n_step or frame_stack cannot be.
    """
    stack = frame_stack or FrameStack(1)
    slots, spare, lead = capacity // num_envs, stack.size, stack.size - 1
    every = jnp.arange(num_envs)
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

    clock = () if in_step else (1, num_envs)  # shape of a number of each head

    def init() -> State:
        zeros = lambda x: jnp.zeros((slots, num_envs, *x.shape), x.dtype)
        flat = lambda dtype: jnp.zeros((slots, num_envs), dtype)
        return State(
            obs=jax.tree.map(lambda x: zeros(_stored(x, stack)), obs),
            action=jax.tree.map(zeros, action),
            reward=flat(jnp.float32),
            flags=flat(jnp.uint8),
            extras=jax.tree.map(zeros, extras),
            head=jnp.zeros(clock, jnp.int32),
            length=jnp.zeros(clock, jnp.int32),
            live=jnp.zeros((), jnp.int32),
        )

    def after(start, count: int):
        """The slots from each head on, [count] or [count, B]; not yet taken round the ring."""
        return start + (jnp.arange(count) if in_step else jnp.arange(count)[:, None])

    def wide(x):
        """[n] or [n, B], of slots -> [n, 1] or [n, B]"""
        return x[:, None] if in_step else x

    def write(ring, rows, slot, real=None):
        """Rows [n, B, *] to their slots; those that are not `real`, of the shape of `slot`, nowhere."""
        rows = rows.astype(ring.dtype)
        if real is not None:
            nowhere = slots + jnp.arange(len(slot))
            slot = jnp.where(real, slot, nowhere if in_step else nowhere[:, None])
        elif in_step and rows.shape[0] == 1:
            return jax.lax.dynamic_update_slice_in_dim(ring, rows, slot[0], 0)
        mode = "promise_in_bounds" if real is None else "drop"
        return ring.at[slot if in_step else (slot, every)].set(rows, mode=mode, unique_indices=True)

    def add(state: State, rollout: Rollout) -> State:
        steps = _checked_length(rollout)
        # of each head: how many rows come, whether they continue what is there, where they begin, where the next will
        count = jnp.full(clock, steps, jnp.int32)
        if not in_step and rollout.count is not None:
            count = jnp.asarray(rollout.count, jnp.int32)[None]
        broken = ~rollout.contiguous
        seam = broken.any() if in_step else broken[None] & (count > 0)
        gap = (seam & (state.length > 0)).astype(jnp.int32)
        first = state.head + gap + jnp.where(seam, lead, 0)
        new_head, most = (first + count) % slots, steps + 1 + lead
        came = None if in_step else jnp.arange(steps)[:, None] < count
        any_came = None if in_step else count > 0
        rows_at, last_at = after(first, steps) % slots, new_head[None] if in_step else new_head
        lead_at = after(state.head + gap, lead) % slots

        # read once, written once: see the module's docstring
        oldest = state.head - state.length
        read = jnp.concatenate([state.head[None] if in_step else state.head, after(oldest, most)]) % slots
        read = state.flags.at[read if in_step else (read, every)].get(mode="promise_in_bounds")
        hole, tail = read[0], read[1:]
        lost = state.length + (first - state.head) + count - (slots - spare)
        lost = (tail & _MASK) * (wide(after(0, most)) < lost)
        cut = False if came is None else came & (count < steps) & (jnp.arange(steps)[:, None] == count - 1)
        age = jnp.where(seam, lead, hole >> _AGE).reshape(-1)
        begun = ~rollout.mask  # an episode begins after a reset row
        if not stack.restarts:
            begun &= _stacked_of_itself(rollout, stack)
        flags = _flags(rollout, cut, jnp.broadcast_to(age, (num_envs,)), lead, begun)
        if not in_step:  # the observation after the rows, where it is not that after the padding
            flags = flags.at[-1].set(jnp.take_along_axis(flags, count, 0)[0] | jnp.uint8(_MASK))
        older = jnp.full((lead, num_envs), SEAM, jnp.uint8)
        flags = jnp.concatenate([(hole >> _AGE << _AGE | SEAM)[None], older, flags])
        where = [state.head[None] if in_step else state.head, lead_at, rows_at, last_at]
        real = [gap > 0, seam, True if came is None else came, True if any_came is None else any_came]
        real = [jnp.broadcast_to(r, x.shape) for r, x in zip(real, where)]
        flags = write(state.flags, flags, jnp.concatenate(where), jnp.concatenate(real))

        def write_obs(ring, rows, last, like):
            if _is_stack(like, stack):
                frames, there = rows, jnp.broadcast_to(seam, lead_at.shape)
                put = lambda ring: write(ring, _older(frames[0], stack), lead_at, there)
                ring = jax.lax.cond(jnp.any(seam), put, lambda ring: ring, ring)
                rows, last = _newest(rows, stack), _newest(last, stack)
            return write(write(ring, rows, rows_at, came), last[None], last_at, any_came)

        put = lambda ring, rows: write(ring, rows, rows_at, came)
        taken = rollout.mask if came is None else rollout.mask & came
        return State(
            obs=jax.tree.map(write_obs, state.obs, rollout.obs, rollout.last_obs, obs),
            action=jax.tree.map(put, state.action, rollout.action),
            reward=put(state.reward, rollout.reward),
            flags=flags,
            extras={name: jax.tree.map(put, state.extras[name], rollout.extras[name]) for name in extras},
            head=new_head,
            length=jnp.minimum(state.length + (first - state.head) + count, slots - spare),
            live=state.live + taken.sum(dtype=jnp.int32) - lost.sum(dtype=jnp.int32),
        )

    def _checked_length(rollout: Rollout) -> int:
        """T; what does not fit the ring is refused while tracing."""
        steps, columns = rollout.reward.shape
        if columns != num_envs:
            raise ValueError(f"a rollout of {columns} environments for a replay of {num_envs}")
        least = steps + spare + max(length, stack.size)
        if least > slots:
            raise InputError(
                f"replay.capacity: {capacity} is too small for rollouts of {steps} steps x {num_envs} environments: "
                f"at least {least * num_envs}{spans}"
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

    def of_column(clock, column):
        return clock if in_step else clock[0, column]

    def valid(state: State, slot, column):
        return (take(state.flags, slot, column) & _MASK) != 0

    def can_begin(state: State):
        return (state.live > 0) & (state.length >= length).any()

    def held(state: State):
        return state.length * num_envs if in_step else state.length.sum(dtype=jnp.int32)

    def draw(state: State, key: Key, shape: tuple[int, ...]):
        bits = random.bits(key, shape)
        # 32 bits modulo at most 2**24 rows or so: no row is preferred by more than a part in 256
        if in_step:
            steps = jnp.maximum(state.length - (length - 1), 1)
            place = (bits % (steps * num_envs).astype(jnp.uint32)).astype(jnp.int32)
            place, column = place // num_envs, place % num_envs
        else:
            each = jnp.maximum(state.length[0] - (length - 1), 0)
            ends = jnp.cumsum(each)
            place = (bits % jnp.maximum(ends[-1], 1).astype(jnp.uint32)).astype(jnp.int32)
            column = jnp.minimum(jnp.searchsorted(ends, place, side="right"), num_envs - 1).astype(jnp.int32)
            place -= (ends - each)[column]
        return (of_column(state.head - state.length, column) + place) % slots, column

    def window(state: State, slot, column, steps):
        """The return of the rows from each slot on: `steps` of them, fewer where an episode or the ring ends.

        The one place in replay that makes a target of how rows end.

        Returns:
          reward [N] f32, discount [N] f32, count [N] i32 of the rows.
        """
        offset = jnp.arange(high + 1)[None]
        rows, columns = (slot[:, None] + offset) % slots, column[:, None]
        flags, reward = take(state.flags, rows, columns), take(state.reward, rows[:, :-1], columns)
        # a masked row follows upon each end; and before a seam it is the only sign of one
        end = ((flags[:, :-1] & (_TERMINATED | _TRUNCATED)) != 0) | ((flags[:, 1:] & _MASK) == 0)
        before = jnp.cumsum(end, 1) - end
        ahead = (of_column(state.head, column) - slot) % slots
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

    def extras_of(state: State, slot, column) -> dict[str, PyTree]:
        kept = {name: x for name, x in state.extras.items() if name != "carry"}
        return jax.tree.map(lambda x: take(x, slot, column), kept)

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
            extras=extras_of(state, slot, column),
        )

    def sequences(state: State, slot, column, weight, burn_in: int, key: Key) -> SequenceBatch:
        first, of_first = slot, column
        slot, column = jnp.broadcast_arrays((slot[:, None] + jnp.arange(length + 1)[None]) % slots, column[:, None])
        reset = ~valid(state, slot, column)
        # behind a seam the memory is not that of the rows: of those, other sequences are made, which begin there
        other = jnp.cumsum(_is_seam(take(state.flags, slot, column)), 1) > 0
        rows, columns, live = (x[:, burn_in:-1] for x in (slot, column, ~reset & ~other))
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
            extras=extras_of(state, rows, columns),
        )

    return Storage(
        init, add, draw, valid, can_begin, held, transitions, sequences, slots, num_envs, length, spare, in_step
    )


def live(flags: np.ndarray, head: np.ndarray, length: np.ndarray, devices: int) -> np.ndarray:
    """What `State.live` is on each of some devices, [D] i32, whose rings lie one behind the other; on the host."""
    flags = flags.reshape(devices, -1, flags.shape[1])
    head, length = (np.broadcast_to(x.reshape(devices, 1, -1), (devices, 1, flags.shape[2])) for x in (head, length))
    age = (head - 1 - np.arange(flags.shape[1])[None, :, None]) % flags.shape[1]
    return (((flags & _MASK) != 0) & (age < length)).sum((1, 2), dtype=np.int32)


def take(ring, slot, column):
    """Rows of one leaf [C, B, *]: [..., *] for slots and columns [...]."""
    return ring.at[slot, column].get(mode="promise_in_bounds")


def _is_stack(x, stack: FrameStack) -> bool:
    """Whether an observation leaf of one environment is a stack of frames."""
    return stack.size > 1 and len(x.shape) >= 3 and x.shape[stack.axis] == stack.size


def broken_stacks(rollout: Rollout, stack: FrameStack) -> Array:
    """The share of a rollout's rows, [] f32, behind which comes an observation that is no such stack: replay could not
    put it together again."""
    follows, alone = _joined(rollout, stack)
    begins = ~rollout.mask[:-1] & rollout.mask[1:]  # of padding nobody knows what stands there
    begins = jnp.concatenate([begins, jnp.zeros_like(begins[:1])])
    first = alone if stack.restarts else alone | follows
    return jnp.mean(((rollout.mask & ~follows) | (begins & ~first)).astype(jnp.float32))


def _stacked_of_itself(rollout: Rollout, stack: FrameStack) -> Array:
    """[T, B] bool: the observation after a row is so many times the same frame."""
    return _joined(rollout, stack)[1]


def _joined(rollout: Rollout, stack: FrameStack) -> tuple[Array, Array]:
    """Of the observation after each row [T, B]: whether its stack goes on with one more frame, and whether it is of one
    frame alone."""
    follows = alone = jnp.ones(rollout.mask.shape, bool)
    for x, last in zip(jax.tree.leaves(rollout.obs), jax.tree.leaves(rollout.last_obs), strict=True):
        if not _is_stack(last[0], stack):
            continue
        frames = lambda x: jnp.moveaxis(x, 2 if stack.axis == 0 else -1, 2)  # [T, B, S, H, W]
        before, after = frames(x), frames(jnp.concatenate([x[1:], last[None]]))
        same = lambda a, b: (a == b).reshape(*a.shape[:2], -1).all(-1)
        follows &= same(after[:, :, :-1], before[:, :, 1:])
        alone &= same(after[:, :, :-1], after[:, :, 1:])
    return follows, alone


def _newest(x, stack: FrameStack):
    """The last frame of stacks [..., S, H, W] or [..., H, W, S]."""
    return x[..., -1, :, :] if stack.axis == 0 else x[..., -1]


def _older(x, stack: FrameStack):
    """All but the last frame of stacks [B, S, H, W] or [B, H, W, S], as rows [S - 1, B, H, W]."""
    frames = jnp.moveaxis(x, 1 if stack.axis == 0 else -1, 0)
    return frames[:-1]


def _is_seam(flags):
    return (flags & (_MASK | SEAM)) == SEAM


def _stored(x, stack: FrameStack):
    """Shape and dtype of what the ring keeps of an observation leaf."""
    if not _is_stack(x, stack):
        return x
    return jax.eval_shape(lambda: _newest(jnp.zeros(x.shape, x.dtype), stack))


def _flags(rollout: Rollout, cut, age, oldest: int, begun):
    """What `State.flags` says of the rows of a rollout and of the observation after them, [T + 1, B] u8.

    Args:
      cut: bool or [T, B], rows whose `truncated` says no more than that no row came after them.
      age: [B], of row 0.
      oldest: the age from which on one is as good as another.
      begun: [T, B] bool, rows behind which stacks begin anew.
    """
    bit = lambda x, value: jnp.where(rollout.mask & x, jnp.uint8(value), jnp.uint8(0))
    flags = (
        bit(True, _MASK)
        | bit(rollout.terminated, _TERMINATED)
        | bit(rollout.truncated & jnp.logical_not(cut), _TRUNCATED)
    )
    flags = jnp.concatenate([flags, jnp.full_like(flags[:1], _MASK)])  # until the next row comes
    if oldest:
        first = jnp.concatenate([jnp.zeros_like(begun[:1]), begun])
        row = jnp.arange(first.shape[0], dtype=jnp.int32)[:, None]
        begin = jax.lax.cummax(jnp.where(first, row, -1))
        age = jnp.where(begin >= 0, row - begin, age[None].astype(jnp.int32) + row)
        flags |= jnp.minimum(age, oldest).astype(jnp.uint8) << _AGE
    return flags
