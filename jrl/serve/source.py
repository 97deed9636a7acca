"""Rollouts of what clients play."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.envs.client_spaces import ClientEnv
from jrl.host import gc_pauses
from jrl.host.interruption import Interrupted
from jrl.metrics import episodes
from jrl.metrics.timers import Timers
from jrl.rollout.collect import FromHost, device_of
from jrl.rollout.collect_async import EMPTY
from jrl.rollout.source import FAILURES
from jrl.rollout.sources import copied
from jrl.serve.columns import Taken
from jrl.serve.inference import STEP, Inference, Weights
from jrl.serve.server import Server
from jrl.types import COUNTS_STEP, ActOut, Episodes, Key, PyTree, Rollout

LAG = "external/policy_lag"  # metric: updates that the weights which chose the rows are behind, on average
DROPPED = "external/dropped"  # metric: steps so far that no learner got: they came too fast, or were too old
TOO_OLD = "external/too_old"  # metric: those of them that came too late, which their clients were told
UNDER_WAY = "external/episodes"  # metric: episodes under way
_COMPILED = 3  # calls after which all of an iteration is compiled: an update may need two rollouts
_LOOK_S = 0.5  # seconds between two looks at whether the run is to end


class ClientSource(FromHost):
    """Rollouts [T, B] of episodes that clients play; a Source.

    Column b is one episode after the other. A rollout is complete when all columns at work have T rows, or when twice
    the time has passed that the first of them took; short columns are padded with masked rows, as those of an
    `AsyncCollector` are. Clients are answered at any time, by the weights of the latest call of `next`: rows that come
    while the learner works are in the next rollout, those of weights that are `max_lag` updates behind are dropped.

    Args:
      env: the spaces.
      act: `Algo.act`.
      server, inference: answer clients; the source closes the server.
      begin: called once the first weights are there; clients may come.
      interrupted: whether the run is to end.
      max_lag: see above; None: all rows count.
      version: of the weights of the first call.
      length, carry, timers, options: as `FromHost`.
    """

    def __init__(
        self, env: ClientEnv, act: Callable[..., ActOut], *, server: Server, inference: Inference,
        begin: Callable[[], None], interrupted: Callable[[], bool], max_lag: int | None, version: int, length: int,
        timers: Timers | None = None, **options: Any,
    ):  # fmt: skip
        table = server.table
        assert table.columns is not None
        self._server = server
        self._table, self._rows, self._inference = table, table.columns, inference
        self._begin, self._interrupted, self._max_lag, self._version = begin, interrupted, max_lag, version
        self._calls, self._count_agents = 0, bool(options.get("count_agents"))
        super().__init__(env, act, length=length, timers=timers, **options)
        self._forget = jax.jit(_forgotten)

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        """Acts with `actor` from now on, and gives the rows that have come. Raises Interrupted: the run is to end."""
        device = device_of(actor)
        actor, key = jax.block_until_ready((copied(actor), key))
        self._inference.publish(Weights(actor, key, self._version))
        self._calls += 1
        if self._calls == 1:
            if self._interrupted():  # before programs for all sizes of requests are compiled
                raise Interrupted
            gc_pauses.pause_gc()
            self._begin()
        elif self._calls == _COMPILED:
            gc_pauses.freeze_objects()
        taken = self._taken()
        self._version += 1
        restarted, total, steps = taken.lost
        self.columns = jax.device_put(self.columns, device)
        if restarted.any() or steps.any():
            self.columns = self._forget(self.columns, restarted, total, steps)
        rows, last, carry, count = jax.device_put((taken.rows, taken.last_obs, taken.carry, taken.filled), device)
        observed, action, extras = rows
        told, leads = None, {}
        if self._env.spec.is_multi_agent:
            extras = dict(extras)
            told, leads = self._games(extras.pop(STEP)), {COUNTS_STEP: extras.pop(COUNTS_STEP)}
        flags = (taken.ends.reward, taken.ends.terminated, taken.ends.truncated, taken.mask)
        self.columns, rollout, report = self._finish(
            self.columns, (observed, action, *flags, extras), last, carry, taken.contiguous, taken.failed, told
        )
        if leads and not self._count_agents:
            rollout = dataclasses.replace(rollout, extras={**rollout.extras, **leads})
        self._measure(taken)
        return dataclasses.replace(rollout, count=count), report

    def _taken(self) -> Taken:
        """Waits for a rollout."""
        oldest = 0 if self._max_lag is None else self._version - self._max_lag
        with self._table.lock:
            while True:
                if self._inference.failure is not None:
                    raise self._inference.failure
                if self._interrupted():  # also where rows are there: clients go on, and there would always be some
                    raise Interrupted
                if self._max_lag is not None:
                    self._rows.drop_before(oldest)
                wait = self._rows.wait()
                if wait == 0:
                    return self._rows.take()
                with self._timers("clients"):
                    self._table.lock.wait(_LOOK_S if wait is None else min(wait, _LOOK_S))

    def _games(self, steps: Any) -> episodes.FinishedGames:
        """Returns the games that have ended since the latest rollout."""
        most, finished = steps.size, self._table.finished
        with self._table.lock:
            ended = [finished.popleft() for _ in range(min(most, len(finished)))]
        over, total, length = np.arange(most) < len(ended), np.zeros(most, np.float32), np.zeros(most, np.int32)
        if ended:
            total[: len(ended)], length[: len(ended)] = zip(*ended, strict=True)
        return episodes.FinishedGames(steps, *jax.device_put((over, total, length), steps.device))

    def _measure(self, taken: Taken) -> None:
        played = taken.mask
        # this rollout's update makes the weights of the next version
        lag = float((self._version - 1 - taken.version)[played].mean()) if played.any() else 0.0
        self._metrics = {
            LAG: lag,
            DROPPED: float(self._rows.dropped),
            TOO_OLD: float(self._table.too_old),
            UNDER_WAY: float(len(self._table.episodes)),
            EMPTY: 1.0 - float(taken.filled.mean()) / self._length,
            FAILURES: float(self._rows.failures),
        }

    def drain(self) -> dict[str, float]:
        with self._table.lock:
            return self._table.infos.drain()

    def close(self) -> None:
        self._server.close()
        super().close()
        gc_pauses.unfreeze_objects()


def _forgotten(columns: Any, restarted: Any, total: Any, steps: Any) -> Any:
    """Returns episode statistics with the rows that were dropped, of which there is nothing but their sum."""
    keep = lambda x: jnp.where(restarted, 0, x)
    return dataclasses.replace(
        columns,
        episode_return=keep(columns.episode_return) + total,
        return_rest=keep(columns.return_rest),
        length=keep(columns.length) + steps,
        running_return=keep(columns.running_return),
    )


def capacity(length: int, *, replay: bool, bytes_per_row: int, num: int) -> int:
    """Returns rows of a column that wait for the learner: with replay what 256 MiB hold, 4096 at most; else the
    newest T.
    """
    return max(4 * length, min(4096, 2**28 // (bytes_per_row * num))) if replay else length
