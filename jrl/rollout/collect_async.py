"""Environments that do not wait for each other: rollouts from results that come in any order.

Whoever has answered is acted upon and sent on. Rows are scattered into a donated [T, B, ...] buffer at (t_b, b), t_b
being the rows that column b has so far; an observation is uploaded once, and stays on the device.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.rollout.collect import FAILURES, FromHost, device_of
from jrl.rollout.unroll import reset_where
from jrl.types import ActOut, AsyncEnv, Episodes, Key, PyTree, Rollout, element

EMPTY = "rollout/void"  # metric: the share of rows that the latest rollout left empty


class AsyncCollector(FromHost):
    """Rollouts [T, B] of environments that answer when they are ready; a Source. Arguments as `FromHost`.

    A column that has its T rows waits for the next rollout, so that one actor makes all rows of a rollout. The rollout
    is complete when every column has T rows, or when so few environments are under way (fewer than `env.least`) that no
    result would come any more. A column has c < T rows then: its rows from c on are masked, with the observation that
    comes after row c - 1, and an episode that goes on is truncated for the learner at row c - 1, from where it
    bootstraps as at any end of a rollout. The episode itself goes on, and so do its statistics; `Rollout.count` is c,
    and replay, which stores no padding, goes on in the column with the next rollout.

    The action that is under way in such a column becomes row 0 of the next rollout, with the extras and the recurrent
    state of when it was chosen: by the actor of the rollout before, or of an earlier one if the environment is slower
    than whole rollouts. So up to `env.least - 1` rows of a rollout lag behind the others. That is right for algorithms
    that correct by `extras["log_prob"]` (V-trace, PPO's ratio) and for replay.

    Raises:
      ValueError: `env.least` is not in 1 .. B.
    """

    def __init__(
        self,
        env: AsyncEnv,
        act: Callable[..., ActOut],
        *,
        carry: Callable[[int], PyTree] = lambda batch_size: (),
        **options: Any,
    ):
        num_envs = env.spec.num_envs
        if not 1 <= env.least <= num_envs:
            raise ValueError(f"env.least is {env.least}: must be in 1..{num_envs}, the number of environments")
        self._initial_of_batch = carry(env.batch_size)
        self._count: np.ndarray  # [B] rows of this rollout whose result has come; -1 before the first observation
        self._under_way: np.ndarray  # [B] bool: an action, or a reset, whose result has not come
        self._carry_before: PyTree  # [B, ...] that the latest action was chosen with
        self._row: PyTree  # (obs, action, extras), [B, ...]: row 0 of the next rollout, where it is under way
        self._last: PyTree  # [B, *] the latest observations
        super().__init__(env, act, carry=carry, **options)
        self._empty = jax.jit(self._empty_row)
        self._begin = jax.jit(self._begin_buffer)
        self._record = jax.jit(self._record_rows, donate_argnums=0)
        self._hold = jax.jit(_scatter, donate_argnums=0)
        self._gather = jax.jit(_gather)
        self._pad = jax.jit(self._pad_buffer, donate_argnums=(0, 1))
        self._pick = jax.jit(reset_where)

    # ------------------------------------------------------------ programs

    def _empty_row(self, actor, key):
        batch = lambda x: jax.ShapeDtypeStruct((self._env.batch_size, *x.shape), x.dtype)
        obs = jax.tree.map(batch, element(self._env.spec.observation))
        out = jax.eval_shape(partial(self._act, explore=self._explore), actor, obs, self._initial_of_batch, key)
        row = (obs, out.action, out.extras)
        return jax.tree.map(lambda x: jnp.zeros((self._env.spec.num_envs, *x.shape[1:]), x.dtype), row)

    def _begin_buffer(self, row):
        """The buffer [T, B, ...] with its row 0, and room for the last observations."""
        buffer = jax.tree.map(lambda x: jnp.zeros((self._length, *x.shape), x.dtype).at[0].set(x), row)
        return buffer, jax.tree.map(jnp.zeros_like, row[0])

    def _record_rows(self, buffer, actor, obs, index, carry, carry_before, key, count):
        t, column, reset = index
        before = _gather(carry, column)
        out = self._act(actor, obs, before, jax.random.fold_in(key, count), self._explore)
        row = (obs, out.action, out.extras)
        buffer = jax.tree.map(lambda b, x: b.at[t, column].set(x, mode="drop"), buffer, row)
        after = reset_where(reset > 0, _gather(self._initial_carry, column), out.carry)
        return buffer, _scatter(carry, column, after), _scatter(carry_before, column, before), out.action

    def _pad_buffer(self, buffer, last, count):
        """Fills columns that have `count` < T rows; (buffer, last observations, the rows under way)."""
        row = jax.tree.map(lambda b: b[jnp.minimum(count, self._length - 1), jnp.arange(count.shape[0])], buffer)
        empty = jnp.arange(self._length)[:, None] > count[None]
        fill = lambda b, x: jnp.where(jnp.expand_dims(empty, tuple(range(2, b.ndim))), x[None], b)
        obs = jax.tree.map(fill, buffer[0], row[0])
        return (obs, *buffer[1:]), reset_where(count < self._length, row[0], last), row

    # ------------------------------------------------------------ from the host

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        """The next rows of every environment."""
        length, num_envs = self._length, self._env.spec.num_envs
        reward = np.zeros((length + 1, num_envs), np.float32)  # index -1: what belongs to no row, of resets
        terminated, truncated, mask, failed = np.zeros((4, length + 1, num_envs), bool)
        can_fail, acts = False, 0
        self.infos = None if self._told is None else [[None] * num_envs for _ in range(length)]
        device = device_of(actor)
        # all of it committed there, as the outputs of a step will be: another kind of input is another compilation
        key, self._carry, self._carry_before, self.columns = jax.device_put(
            (key, self._carry, self._carry_before, self.columns), device
        )
        if self._row is None:
            self._row = jax.device_put(self._empty(actor, key), device)
        buffer, last = jax.device_put(self._begin(self._row), device)
        first_carry = self._pick(self._under_way.copy(), self._carry_before, self._carry)
        self._count = np.minimum(self._count, 0)

        def send(buffer, obs, ids):
            """Acts upon those of `ids` whose column is not full; `obs` [N, *] begins with theirs."""
            nonlocal acts
            live = self._count[ids] < length
            if not live.any():
                return buffer
            index = self._index(self._count[ids], np.where(live, ids, num_envs), self._done[ids])
            with self._timers("act"):
                buffer, self._carry, self._carry_before, action = self._record(
                    buffer, actor, obs, index, self._carry, self._carry_before, key, np.int32(acts)
                )
                action = jax.tree.map(lambda x: np.asarray(x)[: len(ids)][live], action)
            with self._timers("env"):
                self._env.send(action, ids[live])
            self._under_way[ids[live]] = True
            acts += 1
            return buffer

        held = np.flatnonzero(~self._under_way).astype(np.int32)
        for ids in np.split(held, range(self._env.batch_size, len(held), self._env.batch_size)):
            if len(ids):
                buffer = send(buffer, self._gather(self._last, self._index(ids)[0]), ids)
        while np.count_nonzero(self._under_way) >= self._env.least:
            with self._timers("env"):
                answered, result = self._env.recv()
            ids = np.array(answered, np.int32)
            t = self._count[ids]
            self._hear(t, ids)
            mask[t, ids], reward[t, ids] = ~self._done[ids], result.reward
            terminated[t, ids], truncated[t, ids] = result.terminated, result.truncated
            self._done[ids] = result.terminated | result.truncated
            self._count[ids], self._under_way[ids] = t + 1, False
            with self._timers("transfer"):
                obs = jax.device_put(jax.tree.map(self._fixed_size, result.obs), device)
            if result.failed is not None:
                can_fail, failed[t, ids] = True, result.failed
                if result.failed.any():
                    broken = np.isin(np.arange(num_envs), ids[result.failed])
                    self._carry = self._pick(broken, self._initial_carry, self._carry)
            full = t + 1 == length
            if full.any():
                last = self._hold(last, self._index(np.where(full, ids, num_envs))[0], obs)
            buffer = send(buffer, obs, ids)

        count = np.where(self._under_way, np.maximum(self._count, 0), length).astype(np.int32)
        if self._under_way.any():
            buffer, last, self._row = self._pad(buffer, last, count)
        self._last = last
        observed, actions, extras = buffer
        flags = (reward[:length], terminated[:length], truncated[:length], mask[:length])
        rows: Any = (observed, actions, *flags, extras)
        self.columns, rollout, report = self._finish(
            self.columns, rows, last, first_carry, self._started, failed[:length]
        )
        rollout = dataclasses.replace(rollout, count=jax.device_put(count, device))
        self._started = self._started | (self._count >= 0)
        self._measure(count, failed if can_fail else None)
        return rollout, report

    def _hear(self, t, ids) -> None:
        if self._told is None or self.infos is None or self.reset_infos is None:
            return
        for row, column in zip(t.tolist(), ids.tolist()):
            (self.infos[row] if row >= 0 else self.reset_infos)[column] = self._told.latest[column]

    def _measure(self, count, failed) -> None:
        metrics = {EMPTY: 1.0 - float(count.mean()) / self._length}
        before = self.metrics.get(FAILURES)
        if failed is not None or before is not None:
            metrics[FAILURES] = (before or 0.0) + (0.0 if failed is None else float(failed.sum()))
        self._metrics = metrics

    def _index(self, *rows) -> np.ndarray:
        """[k, N] i32 of k lists of at most N numbers; B, which is out of range and dropped, where there is none."""
        index = np.full((len(rows), self._env.batch_size), self._env.spec.num_envs, np.int32)
        for i, row in enumerate(rows):
            index[i, : len(row)] = row
        return index

    def _fixed_size(self, x) -> np.ndarray:
        """A copy of n rows as N, the others 0: the environments may reuse their array while the upload is under way."""
        x = np.asarray(x)
        if len(x) == self._env.batch_size:
            return x.copy()
        out = np.zeros((self._env.batch_size, *x.shape[1:]), x.dtype)
        out[: len(x)] = x
        return out

    def reset(self, key: Key | None = None) -> None:
        super().reset(key)
        num_envs = self._env.spec.num_envs
        self._env.reset()
        self.reset_infos = None if self._told is None else [None] * num_envs
        self._count, self._under_way = np.full(num_envs, -1), np.ones(num_envs, bool)
        self._carry_before = self._initial_carry
        self._row = self._last = None


def _gather(rows: PyTree, column) -> PyTree:
    """[N, ...] of leaves [B, ...]; some row where the column is out of range."""
    return jax.tree.map(lambda x: x.at[column].get(mode="clip"), rows)


def _scatter(rows: PyTree, column, new: PyTree) -> PyTree:
    """Leaves [B, ...] with `new` [N, ...] at `column` [N]; those out of range are dropped."""
    return jax.tree.map(lambda x, y: x.at[column].set(y, mode="drop"), rows, new)
