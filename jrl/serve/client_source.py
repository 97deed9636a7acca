"""Source of rollouts from clients' episodes."""

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.envs.client_spaces import ClientEnv
from jrl.host.interruption import Interrupted
from jrl.metrics import episodes
from jrl.metrics.timers import Timers
from jrl.rollout.collect import FromHost, device_of
from jrl.rollout.collect_async import EMPTY
from jrl.rollout.source import FAILURES
from jrl.rollout.sources import copied
from jrl.serve.inference import STEP, Inference, Weights
from jrl.serve.row_rings import RowBatch
from jrl.serve.server import Server
from jrl.types import COUNTS_STEP, ActOut, Episodes, Key, PyTree, Rollout

LAG = "external/policy_lag"  # metric: mean number of updates between the weights of the rows and the learner
DROPPED = "external/dropped"  # metric: total steps that no rollout got: too many, or too old
TOO_OLD = "external/too_old"  # metric: total dropped steps that were too old on arrival
UNDER_WAY = "external/episodes"  # metric: episodes in progress
_COMPILED = 3  # calls after which everything is compiled: an update may need two rollouts
_POLL_S = 0.5  # seconds between two checks for the end of the run


class ClientSource(FromHost):
    """Rollouts [T, B] of clients' episodes; a Source.

    Column b holds one episode after the other. A rollout is ready when all active columns have T rows, or after twice
    the time of the first such column. Short columns are padded with masked rows, as in `AsyncCollector`. Clients are
    answered at any time, with the weights of the latest call of `next`. Rows that arrive during an update belong to the
    next rollout. Rows of weights that are `max_lag` updates old are dropped.

    Args:
      env: spaces of the environment.
      act: `Algo.act`.
      server: server of the clients, which the source opens after the first weights, and closes.
      inference: thread that chooses actions.
      interrupted: function that returns whether the run must end.
      max_lag: see above; None: rows of any age.
      version: version of the first call's weights.
      length, carry, timers, options: as `FromHost`.
    """

    def __init__(
        self, env: ClientEnv, act: Callable[..., ActOut], *, server: Server, inference: Inference,
        interrupted: Callable[[], bool], max_lag: int | None, version: int, length: int,
        timers: Timers | None = None, **options: Any,
    ):  # fmt: skip
        table = server.table
        assert table.rows is not None
        self._server = server
        self._table, self._rings, self._inference = table, table.rows, inference
        self._interrupted, self._max_lag, self._version = interrupted, max_lag, version
        self._calls, self._count_agents = 0, bool(options.get("count_agents"))
        super().__init__(env, act, length=length, timers=timers, **options)
        self._add_dropped = jax.jit(_add_dropped_rows)

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        """Publishes the weights `actor`, and return the next rollout. Raises Interrupted: the run must end."""
        device = device_of(actor)
        actor, key = jax.block_until_ready((copied(actor), key))
        self._inference.publish(Weights(actor, key, self._version))
        self._calls += 1
        if self._calls == 1:
            if self._interrupted():  # before the programs of all sizes compile
                raise Interrupted
            self._inference.warm_up()
            self._server.http.open()
            print("clients:", self._server.address.url, flush=True)
        elif self._calls == _COMPILED:
            gc.freeze()  # compiled programs: a full collection would stop all requests for 0.1 s
        batch = self._wait_for_rows()
        self._version += 1
        restarted, total, steps = batch.dropped
        self.columns = jax.device_put(self.columns, device)
        if restarted.any() or steps.any():
            self.columns = self._add_dropped(self.columns, restarted, total, steps)
        rows, last, carry, count = jax.device_put((batch.rows, batch.last_obs, batch.carry, batch.filled), device)
        obs, action, extras = rows
        games, counts = None, {}
        if self._env.spec.is_multi_agent:
            extras = dict(extras)
            games, counts = self._take_finished_games(extras.pop(STEP)), {COUNTS_STEP: extras.pop(COUNTS_STEP)}
        results = (*batch.results, batch.mask)
        self.columns, rollout, report = self._finish(
            self.columns, (obs, action, *results, extras), last, carry, batch.contiguous, batch.failed, games
        )
        if counts and not self._count_agents:
            rollout = dataclasses.replace(rollout, extras={**rollout.extras, **counts})
        # this rollout's update is already counted in `_version`
        lag = self._version - 1 - batch.version[batch.mask]
        self._metrics = {
            LAG: float(lag.mean()) if lag.size else 0.0,
            DROPPED: float(self._rings.dropped),
            TOO_OLD: float(self._table.num_too_old),
            UNDER_WAY: float(len(self._table.episodes)),
            EMPTY: 1.0 - float(batch.filled.mean()) / self._length,
            FAILURES: float(self._rings.failures),
        }
        return dataclasses.replace(rollout, count=count), report

    def _wait_for_rows(self) -> RowBatch:
        oldest = 0 if self._max_lag is None else self._version - self._max_lag
        with self._table.lock:
            while True:
                if self._inference.failure is not None:
                    raise self._inference.failure
                if self._interrupted():  # checked first, because active clients always fill the next rollout
                    raise Interrupted
                if self._max_lag is not None:
                    self._rings.drop_before(oldest)
                wait = self._rings.find_wait()
                if wait == 0:
                    return self._rings.take()
                with self._timers("clients"):
                    self._table.lock.wait(_POLL_S if wait is None else min(wait, _POLL_S))

    def _take_finished_games(self, steps: Any) -> episodes.FinishedGames:
        """Returns the games that ended since the latest rollout. `steps`: extras `STEP` of the rollout."""
        most, finished = steps.size, self._table.finished
        with self._table.lock:
            ended = [finished.popleft() for _ in range(min(most, len(finished)))]
        over, total, length = np.arange(most) < len(ended), np.zeros(most, np.float32), np.zeros(most, np.int32)
        if ended:
            total[: len(ended)], length[: len(ended)] = zip(*ended, strict=True)
        return episodes.FinishedGames(steps, *jax.device_put((over, total, length), steps.device))

    def drain(self) -> dict[str, float]:
        with self._table.lock:
            return self._table.infos.drain()

    def close(self) -> None:
        self._server.close()
        super().close()
        gc.unfreeze()


def _add_dropped_rows(columns: Any, restarted: Any, total: Any, steps: Any) -> Any:
    """Returns episode statistics with the dropped rows, of which only sums exist."""
    keep = lambda x: jnp.where(restarted, 0, x)
    return dataclasses.replace(
        columns,
        episode_return=keep(columns.episode_return) + total,
        return_rest=keep(columns.return_rest),
        length=keep(columns.length) + steps,
        running_return=keep(columns.running_return),
    )
