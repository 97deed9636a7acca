"""Whole episodes only: what of an episode has been collected waits until its end has come.

    source = Complete(source, limit=longest_episode(None, env.spec.max_episode_steps), carry=algo.carry)
    rollout, report = source.next(actor, key)  # [T + limit, B]

For learners that need whole episodes (Monte-Carlo returns, rewards that are known at the end only).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jrl.errors import InputError
from jrl.metrics import episodes
from jrl.ops import minibatch
from jrl.rollout.source import Wrapper
from jrl.types import Array, Episodes, Key, PyTree, Rollout

PADDING = "rollout/padding"  # metric: the share of rows that are no environment step, reset rows included


def longest_episode(horizon: int | None, max_episode_steps: int | None) -> int:
    """Steps that an episode has at most.

    Args:
      horizon: of the config, `env.horizon`.
      max_episode_steps: of the environments' EnvSpec.
    Raises:
      InputError: neither is known.
    """
    found = min((n for n in (horizon, max_episode_steps) if n is not None), default=None)
    if found is None:
        raise InputError(
            "rollout.batch_mode complete_episodes: these environments do not say how long an episode can be, and "
            "rollouts have to hold the longest: set env.horizon, e.g. env.horizon=1000"
        )
    return found


@struct.dataclass
class Waiting:
    """The rows of each column's episode that has not ended."""

    rows: tuple[PyTree, PyTree, Array, PyTree]  # obs, action, reward, extras: [H, B, ...]
    count: Array  # [B] i32, how many there are, from row 0 on


def nothing(rollout: Rollout, limit: int) -> Waiting:
    """No row waits; of the shapes and dtypes of `rollout` [T, B]."""
    rows = (rollout.obs, rollout.action, rollout.reward, rollout.extras)
    empty = lambda x: jnp.zeros((limit, *x.shape[1:]), x.dtype)
    return Waiting(jax.tree.map(empty, rows), jnp.zeros(rollout.contiguous.shape, jnp.int32))


def pack(waiting: Waiting, rollout: Rollout, initial: PyTree) -> tuple[Waiting, Rollout, Array]:
    """The episodes that have ended by the end of `rollout`, and the rows that wait from now on. Pure.

    Args:
      waiting: what the last call returned, or `nothing`; H rows of each column have room.
      rollout: [T, B], the rows that follow. In columns that are not contiguous the rows that wait are dropped.
      initial: recurrent state [B, ...] at an episode's start.
    Returns:
      (waiting, rollout [T + H, B], live [] i32). In each column of the rollout stand whole episodes in their order: the
      rows of one, then a masked row with its last observation, then the next; behind them padding, which is masked and
      no end, and not in its `count`. Row T + H - 1 is always masked. `live` counts the unmasked rows.
      An episode of more than H steps, which the limit should make impossible, is cut: row H is truncated, and the step
      after it is lost to the masked row that follows, unless the rollout ends there.
    """
    limit, length = waiting.rows[2].shape[0], rollout.reward.shape[0]
    count = jnp.where(rollout.contiguous, waiting.count, 0)
    by_column = functools.partial(jax.vmap, in_axes=1, out_axes=1)
    pick = by_column(lambda tree, index: minibatch.row_taker(tree)(index))

    step = jnp.arange(length, dtype=jnp.int32)[:, None]
    void_at = jax.lax.cummax(jnp.where(rollout.mask, -1, step))  # the latest masked row
    place = jnp.where(void_at >= 0, step - void_at - 1, count[None] + step)  # of a row in its episode
    mask = rollout.mask & (place % (limit + 1) != limit)
    done = rollout.terminated | rollout.truncated
    # the observation after the rollout is row T here: it is needed where an episode ends with row T - 1
    after_live = jnp.concatenate([count[None] > 0, mask])
    closed = mask[-1] & (done[-1] | (place[-1] % (limit + 1) == limit - 1))
    closes = jnp.concatenate([~mask, closed[None]]) & after_live
    held = jnp.concatenate([mask, jnp.zeros_like(closed)[None]]) | closes  # other masked rows are dropped

    # stream: the rows that wait, then those that are held; `whole` of its rows belong to whole episodes
    rank = count[None] + jnp.cumsum(held, 0, dtype=jnp.int32) - 1
    whole, total = jnp.where(closes, rank + 1, 0).max(0), rank[-1] + 1
    row = jnp.arange(length + limit, dtype=jnp.int32)
    slot = jnp.where(held, rank, length + limit)
    invert = lambda slot: jnp.zeros(row.shape, jnp.int32).at[slot].set(jnp.arange(length + 1), mode="drop")
    came = by_column(invert)(slot)  # [T + H, B], the row of the rollout that stands there
    waited = row[:, None] < count[None]

    # one gather for all: flags as bits, which are 0 on the rows that wait, none of which is an end
    bits = rollout.terminated + 2 * rollout.truncated.astype(jnp.int32) + 4 * mask
    rows = (rollout.obs, rollout.action, rollout.reward, rollout.extras)
    rows, bits = pick((rows, bits), jnp.minimum(came, length - 1))
    wide = lambda flag, x: jnp.expand_dims(flag, tuple(range(2, x.ndim)))
    last = lambda x, last: jnp.where(wide(came == length, x), last[None], x)
    rows = (jax.tree.map(last, rows[0], rollout.last_obs), *rows[1:])
    rows = jax.tree.map(lambda old, x: jnp.where(wide(waited, x), _longer(old, length), x), waiting.rows, rows)
    live = (waited | ((bits >= 4) & (came < length))) & (row[:, None] < whole[None])
    terminated, truncated = (live & ~waited & ((bits & bit) > 0) for bit in (1, 2))
    # every episode here has ended: one that broke off, or was cut, at a time limit
    last_row = live & ~jnp.concatenate([live[1:], jnp.zeros_like(live[:1])])
    truncated |= last_row & ~terminated

    rest = jnp.minimum(whole[None] + jnp.arange(limit, dtype=jnp.int32)[:, None], length + limit - 1)
    left = pick(rows, rest)
    obs, action, reward, extras = rows
    packed = Rollout(
        obs=obs,
        last_obs=rollout.last_obs,
        action=action,
        reward=jnp.where(live, reward, 0.0),
        terminated=terminated,
        truncated=truncated,
        mask=live,
        contiguous=jnp.zeros_like(rollout.contiguous),
        extras=extras,
        carry=initial,
        count=whole,
    )
    return Waiting(left, total - whole), packed, live.sum(dtype=jnp.int32)


def _longer(x: Array, more: int) -> Array:
    """[H, ...] -> [H + more, ...]"""
    return jnp.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)])


class Complete(Wrapper):
    """Rollouts [T + limit, B] of whole episodes, from those [T, B] of `source`; a Source. See `pack`.

    A call collects until at least one episode has ended, so that nothing learns from padding alone. The episodes'
    report is that of the source: it counts steps when they are taken, not when they are learned from. Waits for the
    rollout. Metric `rollout/padding`.

    Args:
      source: whose columns that are not `contiguous` have begun new episodes.
      limit: H, steps that an episode has at most; more is padding.
      carry: batch_size -> recurrent state at an episode's start, `Algo.carry`.
    """

    def __init__(self, source: Any, *, limit: int, carry: Callable[[int], PyTree] = lambda batch_size: ()):
        super().__init__(source)
        if limit < 1:
            raise ValueError(f"limit: expected at least 1 step, got {limit}")
        self._limit, self._carry = limit, carry
        self._pack: Callable | None = None
        self._waiting: Waiting
        self._initial: PyTree
        self._padding: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        return self._source.metrics | ({} if self._padding is None else {PADDING: self._padding})

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        """The episodes that have ended; `key` is that of the first rollout that is collected for them."""
        reports, again = [], 0
        while True:
            rollout, report = self._source.next(actor, jax.random.fold_in(key, again) if again else key)
            reports.append(report)
            if self._pack is None:
                self._begin(rollout)
            assert self._pack is not None
            self._waiting, packed, live = self._pack(self._waiting, rollout, self._initial)
            steps, again = int(live), again + 1
            # more rows than an episode can have without an end are masked: environments that break all the time
            if steps or again * rollout.reward.shape[0] > self._limit + 1:
                break
        self._padding = 1.0 - steps / packed.mask.size
        return packed, reports[0] if len(reports) == 1 else episodes.add_up(reports)

    def _begin(self, rollout: Rollout) -> None:
        """Columns may lie on several devices: theirs stay where they are."""
        lies = jax.tree.map(lambda x: x.sharding, jax.tree.map(jnp.asarray, rollout))
        initial = self._carry(rollout.reward.shape[1])
        rows = (lies.obs, lies.action, lies.reward, lies.extras)
        # committed there, as the outputs of a call will be: another kind of input is another compilation
        self._waiting = jax.device_put(nothing(rollout, self._limit), Waiting(rows, lies.contiguous))
        self._initial = jax.device_put(initial, jax.tree.map(lambda _: lies.contiguous, initial))
        shardings = (Waiting(rows, lies.contiguous), lies.replace(carry=None, count=lies.contiguous), None)
        self._pack = jax.jit(pack, donate_argnums=0, out_shardings=shardings)

    def discontinue(self) -> None:
        """None of its rollouts continues another."""

    def reset(self, key: Key) -> None:
        """All environments to the start of an episode; the rows that wait are dropped."""
        self._pack = None
        self._source.reset(key)
