"""Episodes as callbacks see them, replayed on the host from rollouts; the same for all that collect.

Row by row t = 0 .. T-1, and within a row column by column, an episode is created and started with the row of its first
step, stepped, and ended. It goes on from rollout to rollout. One whose environment or runner broke is dropped without
an end, and so is one whose beginning was not seen.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jrl import spaces
from jrl.rollout.episode import Block, Episode
from jrl.rollout.source import Wrapper
from jrl.rollout.unroll import RAW_STEPS
from jrl.types import POLICY_ID, Episodes, Key, PyTree, Rollout, drop_stale_normalized_obs


class Moments(NamedTuple):
    """Functions called with an `Episode`, or a game of several agents (`replay_games`); None where nothing is."""

    created: Callable[[Any], Any] | None
    start: Callable[[Any], Any] | None
    step: Callable[[Any], Any] | None
    end: Callable[[Any], Any] | None
    finished: Callable[[Any], None]  # after `end`: takes its metrics
    history: int | None  # steps that an episode remembers; None: all
    lock: Any  # held meanwhile: training and an evaluation beside it have the same callbacks


class Replay:
    """Replays the episodes of B columns, from one rollout after the other.

    Args:
      moments: what happens with them.
      ids: numbers for the episodes.
      num_envs: B.
      kinds: of agents, see `EnvSpec.kinds`: an episode has the observations and actions of its agent alone.
      worker_index, env_index, in_evaluation: of the episodes; `env_index` of the first column.
    """

    def __init__(
        self,
        moments: Moments,
        ids: Iterator[int],
        num_envs: int,
        *,
        kinds: Sequence[tuple[int, ...]] = (),
        worker_index: int = 0,
        env_index: int = 0,
        in_evaluation: bool = False,
    ):
        self._moments, self._ids, self._env_index = moments, ids, env_index
        self._worker_index, self._in_evaluation = worker_index, in_evaluation
        self._num_envs, self._kinds = num_envs, kinds
        self.reset()

    def reset(self) -> None:
        """Drops the episodes in flight: the environments begin anew."""
        self._flying: list[Episode | None] = [None] * self._num_envs
        self._told: list[Any] = [None] * self._num_envs  # the info of a reset whose episode has no step yet
        self._began = [False] * self._num_envs
        self._open = np.zeros(self._num_envs, bool)  # what `_derived` knows, of rollouts without a record
        self._length = np.zeros(self._num_envs, np.int32)
        self._total = np.zeros(self._num_envs)

    def __call__(
        self,
        rollout: Rollout,
        infos: Sequence[Sequence[Any]] | None = None,
        *,
        reset_infos: Sequence[Any] | None = None,
        goes_on: bool | None = None,
    ) -> None:
        """Replays a rollout.

        Args:
          rollout: [T, B], with a record in its extras, or whose rewards and flags are the environment's own.
          infos: [T][B] of its rows, None where there is none.
          reset_infos: [B] of the reset before the first rollout.
          goes_on: whether its columns continue those of the call before; None: as the rollout says.
        """
        seen = (rollout.obs, rollout.last_obs, rollout.action) if self._moments.history != 0 else (None, None, None)
        flags = (rollout.mask, rollout.contiguous)
        recorded = rollout.extras.get(RAW_STEPS)
        if recorded is None:
            recorded = {"reward": rollout.reward, "terminated": rollout.terminated, "truncated": rollout.truncated}
        (obs, last_obs, action), flags, found = jax.device_get((seen, flags, recorded))
        mask, contiguous = flags
        if goes_on is not None:
            contiguous = np.full_like(contiguous, goes_on)
        if "length" not in found:
            found |= self._derived(found["reward"], found["terminated"] | found["truncated"], mask, contiguous)
        reward, failed = found["reward"], found["failed"]
        terminated, truncated = found["terminated"], found["truncated"]
        block = Block(obs, last_obs, action, reward, infos)
        self._of_column = self._homes(block)
        self._goes_on(contiguous)
        for column, episode in enumerate(self._flying):
            if episode is not None:
                episode._enter(*self._of_column(column), 0)
        sums = found["length"], found["episode_return"]
        with self._moments.lock:
            self._tell(block, mask, terminated, truncated, failed, *sums, reset_infos)
        self._leave(block, mask, *sums)

    def _goes_on(self, contiguous: np.ndarray) -> None:
        self._flying = [e if goes_on else None for e, goes_on in zip(self._flying, contiguous, strict=True)]

    def _homes(self, block: Block) -> Callable[[int], tuple[Block, int]]:
        """Maps a column to the block that an episode reads and its place there; with kinds, the block of its kind."""
        if not self._kinds:
            return lambda column: (block, column)
        home: dict[int, tuple[Block, int]] = {}
        columns = np.arange(self._num_envs)
        for k, own in enumerate(spaces.split_by_kind(self._kinds, columns)):
            seen = [None if part is None else part[k] for part in (block.obs, block.last_obs, block.action)]
            infos = block.infos and [[row[column] for column in own] for row in block.infos]
            of_kind = Block(seen[0], seen[1], seen[2], block.reward[:, own], infos)
            home |= {column: (of_kind, j) for j, column in enumerate(own.tolist())}
        return home.__getitem__

    def _tell(self, block, mask, terminated, truncated, failed, length, total, reset_infos) -> None:
        moments = self._moments
        begins, ends = mask & (length == 1), mask & (terminated | truncated)
        visited = begins | ends | failed
        if moments.step is not None:
            visited |= mask
        rows, columns = np.nonzero(visited)  # in the order of the docstring above
        flags = (begins, ends, failed, terminated, truncated, length, total)
        each = [x.tolist() for x in (rows, columns, *(x[rows, columns] for x in flags))]
        for t, b, begin, end, broke, terminal, limit, steps, sum_so_far in zip(*each):
            if broke:
                self._flying[b] = None
                continue
            if begin:
                self._begin(block, mask, t, b, reset_infos)
            episode = self._flying[b]
            if episode is None:
                continue
            episode._stop, episode.length, episode.total_reward = t + 1, steps, sum_so_far
            if end:
                episode.terminated, episode.truncated = terminal, limit
            if moments.step is not None:
                moments.step(episode)
            if end:
                if moments.end is not None:
                    moments.end(episode)
                moments.finished(episode)
                self._flying[b] = None

    def _begin(self, block, mask, t: int, b: int, reset_infos) -> None:
        episode, info = self._entered(block, mask, t, b, reset_infos)
        if self._moments.created is not None:
            self._moments.created(episode)
        self._show(episode, info)
        if self._moments.start is not None:
            self._moments.start(episode)

    def _entered(self, block, mask, t: int, b: int, reset_infos) -> tuple[Episode, Any]:
        """Makes a new episode of column b, which begins with row t, and what its reset told."""
        info = self._told[b]
        if t > 0 and block.infos is not None and not mask[t - 1, b]:
            info = self._latest_reset(block, mask, t, b) or info
        elif not self._began[b] and reset_infos is not None:
            info = reset_infos[b]
        self._told[b], self._began[b], self._flying[b] = None, True, None
        self._flying[b] = episode = self._new(b)
        episode._enter(*self._of_column(b), t)
        return episode, info if block.infos is None else info or {}

    @staticmethod
    def _show(episode: Episode, info: Any) -> None:
        episode._reset, episode._info = True, info

    def _new(self, b: int) -> Episode:
        place = (self._env_index + b, self._worker_index, self._in_evaluation)
        return Episode(next(self._ids), *place, self._moments.history)

    def _leave(self, block: Block, mask, length, total) -> None:
        """Ends the block: its rows are told of."""
        steps = len(mask) - np.argmax(mask[::-1], 0)  # the row after the last step; of columns that have one
        for b, episode in enumerate(self._flying):
            if episode is not None:
                if mask[:, b].any():
                    last = int(steps[b])
                    episode._stop, episode.length = last, int(length[last - 1, b])
                    episode.total_reward = float(total[last - 1, b])
                episode._leave()
            if block.infos is not None and not mask[-1, b]:
                self._told[b] = self._latest_reset(block, mask, len(mask), b) or self._told[b]

    @staticmethod
    def _latest_reset(block: Block, mask, t: int, b: int) -> Any:
        """Returns the info of the latest row before t, back to the latest step, that has one."""
        assert block.infos is not None
        while t > 0 and not mask[t - 1, b]:
            t -= 1
            if block.infos[t][b] is not None:
                return block.infos[t][b]
        return None

    def _derived(self, reward, done, mask, contiguous) -> Mapping[str, np.ndarray]:
        """Returns a record of rows whose environments wait for each other: a masked row that follows upon no end
        broke off.
        """
        opened, count, total = (np.where(contiguous, x, 0) for x in (self._open, self._length, self._total))
        found = {"length": np.zeros(mask.shape, np.int32), "episode_return": np.zeros(mask.shape, np.float32)}
        failed = np.zeros(mask.shape, bool)
        opened = opened.astype(bool)
        for t, step in enumerate(mask):
            failed[t] = ~step & opened
            count, total = count + step, total + np.where(step, reward[t], 0)  # in float64
            found["length"][t], found["episode_return"][t] = count, total
            opened = step & ~done[t]
            count, total = count * opened, total * opened
        self._open, self._length, self._total = opened, count, total
        return {**found, "failed": failed}


class Shown(Protocol):
    """Replay of the rollouts of some columns, one after the other; arguments as of `Replay`."""

    def __call__(
        self, rollout: Rollout, infos: Any = None, *, reset_infos: Any = None, goes_on: bool | None = None
    ) -> None: ...

    def reset(self) -> None: ...


class Watch(Wrapper):
    """A source whose rollouts are shown to callbacks before they are learned from.

    Args:
      source: of the rollouts.
      replay: (watch, num_envs, worker_index, env_index) -> who is shown them, such as a Replay; None: nobody looks at
        episodes.
      batches: functions of watch and rollout; what one returns that is not None takes the rollout's place.
      num_envs: columns of the source.
      keep_record: whether who learns asks for `RAW_STEPS`, too.
      extras: whether `replay` asks for all that acting recorded, and not for `RAW_STEPS` alone.
    """

    def __init__(
        self,
        source: Any,
        replay: Callable[["Watch", int, int, int], Shown] | None,
        batches: Sequence[Callable[["Watch", Rollout], Rollout | None]],
        num_envs: int,
        *,
        keep_record: bool = False,
        extras: bool = False,
    ):
        super().__init__(source)
        self._keep_record, self._extras = keep_record, extras
        self._make, self._batches, self._num_envs = replay, list(batches), num_envs
        self._replays: dict[int, Shown] = {}  # by environment runner; 0 where there is none
        self._numbers: dict[int, tuple[int, int]] = {}  # of a runner's latest rollout: restarts and number

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        rollout, report = self._source.next(actor, key)
        if self._make is not None:
            self._replay(rollout, self._make)
        if not self._keep_record:
            extras = {name: x for name, x in rollout.extras.items() if name != RAW_STEPS}
            rollout = dataclasses.replace(rollout, extras=extras)
        for fn in self._batches:
            changed = fn(self, rollout)
            rollout = rollout if changed is None else changed
        return rollout, report

    def _replay(self, rollout: Rollout, make: Callable[..., Shown]) -> None:
        blocks = self._source.blocks
        if blocks is None:
            if not self._replays:
                self._replays[0] = make(self, self._num_envs, 0, 0)
            told = self._source.infos, self._source.reset_infos
            self._replays[0](rollout, told[0], reset_infos=told[1])
            return
        # a runner's rollout may stand among the columns of another: its episodes are its own
        share = self._num_envs // len(blocks)
        extras = {name: x for name, x in rollout.extras.items() if self._extras or name in (RAW_STEPS, POLICY_ID)}
        host = jax.device_get(dataclasses.replace(rollout, carry=(), extras=extras))
        for block, place in sorted((x, i) for i, x in enumerate(blocks) if x is not None):
            runner, restarts, number = block
            if runner not in self._replays:
                self._replays[runner] = make(self, share, runner + 1, runner * share)
            goes_on = self._numbers.get(runner) == (restarts, number - 1)
            self._numbers[runner] = (restarts, number)
            self._replays[runner](_columns(host, place, len(blocks)), goes_on=goes_on)

    @property
    def columns(self) -> Any:
        return self._source.columns

    @columns.setter
    def columns(self, columns: Any) -> None:
        self._drop()
        self._source.columns = columns

    def reset(self, key: Key) -> None:
        self._drop()
        self._source.reset(key)

    def _drop(self) -> None:
        for replay in self._replays.values():
            replay.reset()
        self._numbers.clear()

    def get_sub_environments(self) -> list[Any]:
        """Returns the environments themselves, where they are Python objects of this process."""
        return self._source.foreach_env(lambda env: env)


def _columns(rollout: Rollout, place: int, blocks: int) -> Rollout:
    part = lambda size: slice(place * (size // blocks), (place + 1) * (size // blocks))
    rows = lambda tree: jax.tree.map(lambda x: x[:, part(x.shape[1])], tree)
    last = lambda tree: jax.tree.map(lambda x: x[part(len(x))], tree)
    flat = {name: last(getattr(rollout, name)) for name in ("last_obs", "contiguous", "count")}
    others = ("obs", "action", "reward", "terminated", "truncated", "mask", "extras", "over")
    return Rollout(**flat, **{name: rows(getattr(rollout, name)) for name in others}, carry=())


def placed(changed: Any, like: Rollout, name: str) -> Rollout:
    """Returns a changed rollout, on the devices of the one that it was made from; `name` says who changed it.

    Raises:
      TypeError: it is none, or of other shapes or dtypes.
    """
    kind = lambda tree: jax.tree.map(lambda x: f"{getattr(x, 'dtype', type(x))}{list(np.shape(x))}", tree)
    if not isinstance(changed, Rollout):
        raise TypeError(f"{name} returned {type(changed).__name__}: expected a Rollout, or None for no change")
    if kind(changed) != kind(like):
        raise TypeError(f"{name} returned a Rollout of other shapes or dtypes: {kind(changed)} instead of {kind(like)}")
    put = lambda x, old: jax.device_put(x, old.sharding) if isinstance(old, jax.Array) else np.asarray(x)
    return jax.tree.map(put, drop_stale_normalized_obs(like, changed), like)
