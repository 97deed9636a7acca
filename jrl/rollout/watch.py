"""Source wrapper that passes rollouts to callbacks and `data.output` before learning."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jrl.rollout.source import Wrapper
from jrl.rollout.stitch import Stitch
from jrl.rollout.unroll import RAW_STEPS
from jrl.types import Episodes, Key, PyTree, Rollout, drop_stale_normalized_obs


class Watch(Wrapper):
    """A source that passes its rollouts to callbacks before learning.

    Args:
      source: source of the rollouts.
      stitch: (watch, num_envs, worker_index, first column) -> Stitch of these columns; None: no episodes are built.
      batches: functions (watch, rollout) -> rollout that replaces it, or None for no change.
      num_envs: number of columns of the source.
      take: called with each episode that has ended or was cut.
      keep_record: keep `RAW_STEPS` in the rollout, for the learner.
    """

    def __init__(
        self,
        source: Any,
        stitch: Callable[["Watch", int, int, int], Stitch] | None,
        batches: Sequence[Callable[["Watch", Rollout], Rollout | None]],
        num_envs: int,
        *,
        take: Callable[[Any], Any] = lambda episode: None,
        keep_record: bool = False,
    ):
        super().__init__(source)
        self._take, self._keep_record = take, keep_record
        self._build_stitch, self._batches, self._num_envs = stitch, list(batches), num_envs
        self._stitches: dict[int, Stitch] = {}  # by env runner; 0 without env runners
        self._latest: dict[int, tuple[int, int]] = {}  # env runner -> (restarts, number) of its latest rollout

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        rollout, report = self._source.next(actor, key)
        if self._build_stitch is not None:
            self._add_to_stitches(rollout, self._build_stitch)
        if not self._keep_record:
            extras = {name: x for name, x in rollout.extras.items() if name != RAW_STEPS}
            rollout = dataclasses.replace(rollout, extras=extras)
        for fn in self._batches:
            changed = fn(self, rollout)
            rollout = rollout if changed is None else changed
        return rollout, report

    def _add_to_stitches(self, rollout: Rollout, make: Callable[..., Stitch]) -> None:
        blocks = self._source.blocks
        if blocks is None:
            if not self._stitches:
                self._stitches[0] = make(self, self._num_envs, 0, 0)
            self._take_all(self._stitches[0].add(rollout, self._source.infos, reset_infos=self._source.reset_infos))
            return
        # a runner's rollout can be in any block of columns, but its episodes belong to the runner
        share = self._num_envs // len(blocks)
        host = jax.device_get(dataclasses.replace(rollout, carry=()))
        for block, index in sorted((x, i) for i, x in enumerate(blocks) if x is not None):
            runner, restarts, number = block
            if runner not in self._stitches:
                self._stitches[runner] = make(self, share, runner + 1, runner * share)
            goes_on = self._latest.get(runner) == (restarts, number - 1)
            self._latest[runner] = (restarts, number)
            self._take_all(self._stitches[runner].add(_take_block(host, index, len(blocks)), goes_on=goes_on))

    def _take_all(self, episodes: Sequence[Any]) -> None:
        for episode in episodes:
            self._take(episode)

    @property
    def columns(self) -> Any:
        return self._source.columns

    @columns.setter
    def columns(self, columns: Any) -> None:
        self._reset_stitches()
        self._source.columns = columns

    def reset(self, key: Key) -> None:
        self._reset_stitches()
        self._source.reset(key)

    def _reset_stitches(self) -> None:
        for stitch in self._stitches.values():
            self._take_all(stitch.reset())
        self._latest.clear()

    def get_sub_environments(self) -> list[Any]:
        """Returns the environments. Raises InputError: they are not Python objects of this process."""
        return self._source.foreach_env(lambda env: env)


def _take_block(rollout: Rollout, index: int, blocks: int) -> Rollout:
    part = lambda size: slice(index * (size // blocks), (index + 1) * (size // blocks))
    rows = lambda tree: jax.tree.map(lambda x: x[:, part(x.shape[1])], tree)
    last = lambda tree: jax.tree.map(lambda x: x[part(len(x))], tree)
    flat = {name: last(getattr(rollout, name)) for name in ("last_obs", "contiguous", "count")}
    others = ("obs", "action", "reward", "terminated", "truncated", "mask", "extras", "over")
    return Rollout(**flat, **{name: rows(getattr(rollout, name)) for name in others}, carry=())


def check_changed_rollout(changed: Any, like: Rollout, name: str) -> Rollout:
    """Returns a rollout that a callback changed, on the devices of the original rollout `like`.

    Args:
      changed: result of the callback.
      like: the original rollout.
      name: name of the callback, for error messages.
    Raises:
      TypeError: `changed` is not a rollout, or has other shapes or dtypes.
    """
    kind = lambda tree: jax.tree.map(lambda x: f"{getattr(x, 'dtype', type(x))}{list(np.shape(x))}", tree)
    if not isinstance(changed, Rollout):
        raise TypeError(f"{name} returned {type(changed).__name__}: expected a Rollout, or None for no change")
    if kind(changed) != kind(like):
        raise TypeError(f"{name} returned a Rollout of other shapes or dtypes: {kind(changed)} instead of {kind(like)}")
    put = lambda x, old: jax.device_put(x, old.sharding) if isinstance(old, jax.Array) else np.asarray(x)
    return jax.tree.map(put, drop_stale_normalized_obs(like, changed), like)
