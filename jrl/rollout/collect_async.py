"""Collection from asynchronous host environments, whose results arrive in any order.

Each environment with a new result gets its next action at once. Rows are scattered into a donated [T, B, ...] buffer at
(t_g, g), where t_g is the number of rows of environment g so far. An observation is uploaded once. An environment with
several agents has one column per agent with the same rows: arrays [G * c, ...] are reshaped to [G, c, ...].
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl import spaces
from jrl.envs import transform
from jrl.rollout.collect import FromHost, device_of
from jrl.rollout.source import FAILURES
from jrl.rollout.unroll import reset_where
from jrl.types import ActOut, AsyncEnv, Episodes, Key, PyTree, Rollout, Several, StepResult

EMPTY = "rollout/void"  # metric: share of empty rows in the latest rollout


class AsyncCollector(FromHost):
    """Rollouts [T, B] of asynchronous environments; a Source. Arguments as for `FromHost`.

    An environment with T rows waits for the next rollout, so that one actor collects all rows of a rollout. A rollout
    is complete when every environment has T rows, or when fewer than `env.least` environments have a pending action,
    because then no more results arrive. A column may thus have c < T rows. Its rows from c on are masked and hold the
    observation after row c - 1. For the learner, an unfinished episode is truncated at row c - 1 and bootstraps there,
    as at every end of a rollout. The episode itself and its statistics continue. `Rollout.count` is c; replay does not
    store the padding and continues the column with the next rollout.

    The pending action of such an environment becomes row 0 of the next rollout, with its original extras and recurrent
    state. An earlier actor chose it: the previous one, or an older one if the environment is slower than a whole
    rollout. So up to `env.least - 1` rows of a rollout are older than the others. Algorithms that correct by
    `extras["log_prob"]` (V-trace, PPO's ratio) and replay allow this.

    Raises:
      ValueError: `env.least` is not in 1 .. G, the number of environments.
    """

    def __init__(
        self,
        env: AsyncEnv,
        act: Callable[..., ActOut],
        *,
        carry: Callable[[int], PyTree] = lambda batch_size: (),
        **options: Any,
    ):
        num_envs = env.spec.games
        if not 1 <= env.least <= num_envs:
            raise ValueError(f"env.least: expected 1 .. {num_envs}, the number of environments, got {env.least}")
        self._games, self._agents = num_envs, env.spec.num_agents
        self._in_place = env.batch_size == num_envs
        self._initial_of_batch = carry(env.batch_size * self._agents)
        self._count: np.ndarray  # [G] number of finished rows of this rollout; -1 before the first observation
        self._under_way: np.ndarray  # [G] bool, environments with a pending action or reset
        self._carry_before: PyTree  # [B, ...] recurrent state before the latest action
        self._row: PyTree  # (obs, action, extras), [B, ...]: row 0 of the next rollout for pending actions
        self._last: PyTree  # [B, *] latest observations
        super().__init__(env, act, carry=carry, **options)
        self._empty = jax.jit(self._empty_row)
        self._begin = jax.jit(self._begin_buffer)
        self._record = jax.jit(self._record_rows, donate_argnums=0)
        self._hold = jax.jit(partial(_scatter, games=num_envs), donate_argnums=0)
        self._gather = jax.jit(partial(_gather, games=num_envs))
        self._pad = jax.jit(self._pad_buffer, donate_argnums=(0, 1))
        self._pick = jax.jit(reset_where)

    # ------------------------------------------------------------ programs

    def _empty_row(self, actor, key):
        spec, size = self._env.spec, self._env.batch_size
        obs = spaces.elements(spec.observation, spaces.columns(spec, size))
        out = jax.eval_shape(partial(self._act, explore=self._explore), actor, obs, self._initial_of_batch, key)
        row = (obs, out.action, out.extras)
        return jax.tree.map(lambda x: jnp.zeros((x.shape[0] // size * self._games, *x.shape[1:]), x.dtype), row)

    def _begin_buffer(self, row):
        """Returns the buffer [T, B, ...] with its row 0, and a buffer of the last observations."""
        buffer = jax.tree.map(lambda x: jnp.zeros((self._length, *x.shape), x.dtype).at[0].set(x), row)
        return buffer, jax.tree.map(jnp.zeros_like, row[0])

    def _record_rows(self, buffer, actor, obs, index, carry, carry_before, key, count):
        (t, game), reset = index[:2], index[2:].T.reshape(-1)
        before = _gather(carry, game, self._games)
        out = self._act(actor, obs, before, jax.random.fold_in(key, count), self._explore)
        row = (obs, out.action, out.extras)

        def write(whole, new):
            cut = _cut(whole, self._games, 1)
            return cut.at[t, game].set(new.reshape(-1, *cut.shape[2:]), mode="drop").reshape(whole.shape)

        after = reset_where(reset > 0, _gather(self._initial_carry, game, self._games), out.carry)
        carry = _scatter(carry, game, after, self._games)
        return jax.tree.map(write, buffer, row), carry, _scatter(carry_before, game, before, self._games), out.action

    def _pad_buffer(self, buffer, last, count):
        """Pads environments with `count` < T rows; returns (buffer, last observations, pending rows)."""
        games, short = self._games, count < self._length
        cut = jax.tree.map(lambda x: _cut(x, games, 1), buffer)
        row = jax.tree.map(lambda x: x[jnp.minimum(count, self._length - 1), jnp.arange(games)], cut)
        empty = jnp.arange(self._length)[:, None] > count[None]
        along = lambda flag, x: jnp.expand_dims(flag, tuple(range(flag.ndim, x.ndim)))
        obs = jax.tree.map(lambda x, new: jnp.where(along(empty, x), new[None], x), cut[0], row[0])
        last = jax.tree.map(
            lambda x, new: jnp.where(along(short, new), new, _cut(x, games, 0)).reshape(x.shape), last, row[0]
        )
        whole = lambda tree, like: jax.tree.map(lambda x, of: x.reshape(of.shape), tree, like)
        row = jax.tree.map(lambda x, of: x.reshape(of.shape[1:]), row, buffer)
        return (whole(obs, buffer[0]), *buffer[1:]), last, row

    # ------------------------------------------------------------ from the host

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        """Returns the next rows of every environment."""
        length, games, agents = self._length, self._games, self._agents
        results, acts = _Results(length, games, agents), 0
        self.infos = None if self._env_infos is None else [[None] * (games * agents) for _ in range(length)]
        device = device_of(actor)
        # committed to the device like the outputs of a step, because other inputs would compile again
        key, self._carry, self._carry_before, self.columns = jax.device_put(
            (key, self._carry, self._carry_before, self.columns), device
        )
        if self._row is None:
            self._row = jax.device_put(self._empty(actor, key), device)
        buffer, last = jax.device_put(self._begin(self._row), device)
        first_carry = self._pick(np.repeat(self._under_way, agents), self._carry_before, self._carry)
        self._count = np.minimum(self._count, 0)

        def send(buffer, obs, ids):
            """Acts in the environments `ids` with less than T rows; `obs` [N * c, *] has their observations."""
            nonlocal acts
            live = self._count[ids] < length
            if not live.any():
                return buffer
            place = self._places(ids)
            reset = (self._done[ids * agents + k] for k in range(agents))
            index = self._index(place, self._count[ids], ids if live.all() else np.where(live, ids, games), *reset)
            with self._timers("act"):
                buffer, self._carry, self._carry_before, action = self._record(
                    buffer, actor, obs, index, self._carry, self._carry_before, key, np.int32(acts)
                )
                action = jax.tree.map(partial(self._rows, place=place[live]), action)
            with self._timers("env"):
                self._env.send(action, ids[live])
            self._under_way[ids[live]] = True
            acts += 1
            return buffer

        held = np.flatnonzero(~self._under_way).astype(np.int32)
        for ids in np.split(held, range(self._env.batch_size, len(held), self._env.batch_size)):
            if len(ids):
                buffer = send(buffer, self._gather(self._last, self._index(self._places(ids), ids)[0]), ids)
        while np.count_nonzero(self._under_way) >= self._env.least:
            with self._timers("env"):
                answered, result = self._env.recv()
            ids = np.array(answered, np.int32)
            t, column = self._count[ids], transform.agent_indices(ids, agents)
            row = t if agents == 1 else np.repeat(t, agents)
            self._store_infos(row, column)
            has_new_episode = results.take((t, ids), (row, column), result, ~self._done[column])
            self._done[column] = result.terminated | result.truncated
            self._count[ids], self._under_way[ids] = t + 1, False
            with self._timers("transfer"):
                obs = jax.device_put(jax.tree.map(partial(self._fixed_size, ids=ids), result.obs), device)
            if has_new_episode is not None and has_new_episode.any():
                is_new = np.isin(np.arange(games * agents), column[has_new_episode])
                self._carry = self._pick(is_new, self._initial_carry, self._carry)
            full = t + 1 == length
            if full.any():
                last = self._hold(last, self._index(self._places(ids), np.where(full, ids, games))[0], obs)
            buffer = send(buffer, obs, ids)

        count = np.where(self._under_way, np.maximum(self._count, 0), length).astype(np.int32)
        if self._under_way.any():
            buffer, last, self._row = self._pad(buffer, last, count)
        self._last = last
        observed, actions, extras = buffer
        flags, failed, several = results.rows()
        self.columns, rollout, report = self._finish(
            self.columns,
            (observed, actions, *flags, extras),
            last,
            first_carry,
            self._started,
            failed,
            several if self._env.spec.agents else None,
        )
        rollout = dataclasses.replace(rollout, count=jax.device_put(np.repeat(count, agents), device))
        self._started = self._started | np.repeat(self._count >= 0, agents)
        self._measure(count, failed if results.can_fail else None)
        return rollout, report

    def _store_infos(self, rows, columns) -> None:
        if self._env_infos is None or self.infos is None or self.reset_infos is None:
            return
        for row, column in zip(rows.tolist(), columns.tolist()):
            (self.infos[row] if row >= 0 else self.reset_infos)[column] = self._env_infos.latest[column]

    def _measure(self, count, failed) -> None:
        metrics = {EMPTY: 1.0 - float(count.mean()) / self._length}
        before = self.metrics.get(FAILURES)
        if failed is not None or before is not None:
            broken = 0.0 if failed is None else failed.reshape(len(failed), self._games, -1).any(-1).sum()
            metrics[FAILURES] = (before or 0.0) + float(broken)
        self._metrics = metrics

    def _places(self, ids) -> np.ndarray:
        """Returns the positions of environments in the batch of N that act together.

        With room for all environments, each has its own position, because some policies identify games by it.
        """
        return ids if self._in_place else np.arange(len(ids))

    def _index(self, place, *rows) -> np.ndarray:
        """Returns k lists of numbers as [k, N] i32, filled with G, which is out of range and dropped."""
        index = np.full((len(rows), self._env.batch_size), self._games, np.int32)
        for i, row in enumerate(rows):
            index[i, place] = row
        return index

    def _rows(self, x, place) -> np.ndarray:
        x = np.asarray(x)
        return x[transform.agent_indices(place, len(x) // self._env.batch_size)]

    def _fixed_size(self, x, ids) -> np.ndarray:
        """Returns a copy of n * c rows as N * c rows, padded with 0.

        A copy, because environments may reuse their array during the upload.
        """
        x = np.asarray(x)
        count = len(x) // len(ids)
        out = np.zeros((count * self._env.batch_size, *x.shape[1:]), x.dtype)
        out[transform.agent_indices(self._places(ids), count)] = x
        return out

    def reset(self, key: Key | None = None) -> None:
        super().reset(key)
        self._env.reset()
        self.reset_infos = None if self._env_infos is None else [None] * self._env.spec.num_envs
        self._count, self._under_way = np.full(self._games, -1), np.ones(self._games, bool)
        self._carry_before = self._initial_carry
        self._row = self._last = None


class _Results:
    """Results of a rollout as arrays [T + 1, B]; the last row takes results of resets and is not returned."""

    def __init__(self, length: int, games: int, agents: int):
        shape = (length + 1, games * agents)
        self._reward, self._over = np.zeros(shape, np.float32), np.zeros((length + 1, games), bool)
        self._terminated, self._truncated, self._mask, self._failed, self._absent = np.zeros((5, *shape), bool)
        self.can_fail = False

    def take(self, game, index, result: StepResult, is_running) -> np.ndarray | None:
        """Stores results; returns the columns whose recurrent state is reset without an episode end, or None.

        Args:
          game, index: (row, environment) and (row, column) of each result.
          result: results of these environments.
          is_running: columns whose episode had not ended.
        """
        self._mask[index], self._reward[index] = is_running, result.reward
        self._terminated[index], self._truncated[index] = result.terminated, result.truncated
        reset = None
        if result.failed is not None:
            self.can_fail, self._failed[index] = True, result.failed
            reset = np.asarray(result.failed)
        if result.several is not None:
            self._absent[index], self._over[game] = result.several.absent, result.several.over
            left = result.several.absent & is_running & (index[0] >= 0)
            reset = left if reset is None else reset | left
        return reset

    def rows(self) -> tuple[tuple[np.ndarray, ...], np.ndarray, Several]:
        """Returns ((reward, terminated, truncated, mask), failed, results of several agents), [T, ...]."""
        flags = (self._reward, self._terminated, self._truncated, self._mask)
        return tuple(x[:-1] for x in flags), self._failed[:-1], Several(self._absent[:-1], self._over[:-1])


def _cut(x, games: int, axis: int):
    """Reshapes G * c columns along `axis` to [..., G, c, ...]; unchanged for c = 1."""
    return x if x.shape[axis] == games else x.reshape(*x.shape[:axis], games, -1, *x.shape[axis + 1 :])


def _gather(rows: PyTree, game, games: int) -> PyTree:
    """Returns rows [N * c, ...] of leaves [G * c, ...]; arbitrary rows for environments out of range."""
    take = lambda x: _cut(x, games, 0).at[game].get(mode="clip").reshape(-1, *x.shape[1:])
    return jax.tree.map(take, rows)


def _scatter(rows: PyTree, game, new: PyTree, games: int) -> PyTree:
    """Writes `new` [N * c, ...] into leaves [G * c, ...] at environments [N]; drops environments out of range."""

    def write(x, y):
        cut = _cut(x, games, 0)
        return cut.at[game].set(y.reshape(-1, *cut.shape[1:]), mode="drop").reshape(x.shape)

    return jax.tree.map(write, rows, new)
