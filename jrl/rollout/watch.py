"""A source whose rollouts are shown to callbacks and to `data.output` before they are learned from."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jrl.rollout.source import Wrapper
from jrl.rollout.stitch import Stitch
from jrl.rollout.unroll import RAW_STEPS
from jrl.types import POLICY_ID, Episodes, Key, PyTree, Rollout, drop_stale_normalized_obs


class Watch(Wrapper):
    """A source whose rollouts are shown to callbacks before they are learned from.

    Args:
      source: of the rollouts.
      stitch: (watch, num_envs, worker_index, first column) -> the Stitch that makes their episodes; None: nobody looks
        at episodes.
      batches: functions of watch and rollout; what one returns that is not None takes the rollout's place.
      num_envs: columns of the source.
      keep_record: whether who learns asks for `RAW_STEPS`, too.
      extras: whether episodes have what acting recorded.
    """

    def __init__(
        self,
        source: Any,
        stitch: Callable[["Watch", int, int, int], Stitch] | None,
        batches: Sequence[Callable[["Watch", Rollout], Rollout | None]],
        num_envs: int,
        *,
        keep_record: bool = False,
        extras: bool = False,
    ):
        super().__init__(source)
        self._keep_record, self._extras = keep_record, extras
        self._make, self._batches, self._num_envs = stitch, list(batches), num_envs
        self._stitches: dict[int, Stitch] = {}  # by environment runner; 0 where there is none
        self._numbers: dict[int, tuple[int, int]] = {}  # of a runner's latest rollout: restarts and number

    def next(self, actor: PyTree, key: Key) -> tuple[Rollout, Episodes]:
        rollout, report = self._source.next(actor, key)
        if self._make is not None:
            self._stitch(rollout, self._make)
        if not self._keep_record:
            extras = {name: x for name, x in rollout.extras.items() if name != RAW_STEPS}
            rollout = dataclasses.replace(rollout, extras=extras)
        for fn in self._batches:
            changed = fn(self, rollout)
            rollout = rollout if changed is None else changed
        return rollout, report

    def _stitch(self, rollout: Rollout, make: Callable[..., Stitch]) -> None:
        blocks = self._source.blocks
        if blocks is None:
            if not self._stitches:
                self._stitches[0] = make(self, self._num_envs, 0, 0)
            self._stitches[0].add(rollout, self._source.infos, reset_infos=self._source.reset_infos)
            return
        # a runner's rollout may stand among the columns of another: its episodes are its own
        share = self._num_envs // len(blocks)
        extras = {name: x for name, x in rollout.extras.items() if self._extras or name in (RAW_STEPS, POLICY_ID)}
        host = jax.device_get(dataclasses.replace(rollout, carry=(), extras=extras))
        for block, place in sorted((x, i) for i, x in enumerate(blocks) if x is not None):
            runner, restarts, number = block
            if runner not in self._stitches:
                self._stitches[runner] = make(self, share, runner + 1, runner * share)
            goes_on = self._numbers.get(runner) == (restarts, number - 1)
            self._numbers[runner] = (restarts, number)
            self._stitches[runner].add(_columns(host, place, len(blocks)), goes_on=goes_on)

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
        for stitch in self._stitches.values():
            stitch.reset()
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
