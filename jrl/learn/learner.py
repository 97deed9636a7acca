"""Learners: one interface over on-policy, replay-based and data-set algorithms."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl import spaces
from jrl.fields.data import Fresh, Replay
from jrl.ops import collectives, random
from jrl.ops.scans import trace_once
from jrl.types import (
    BROKEN_STACKS,
    NO_CHOICE,
    VALID_SHARE,
    Algo,
    Array,
    Buffer,
    EnvSpec,
    Key,
    Metrics,
    PyTree,
    Rollout,
    UpdateAux,
    drop_stale_normalized_obs,
)  # fmt: skip


class Learner(NamedTuple):
    """Pure functions around an Algo; `step` can be jitted, mapped over devices and scanned together with collection.

    The state is the same on all devices; each device has its own replay, which is () for algorithms without replay.
    """

    init: Callable[[Key], PyTree]  # key -> state
    init_replay: Callable[[], PyTree]  # -> replay, empty
    actor: Callable[[PyTree], PyTree]  # state -> ActorState
    # (state, replay, Rollout, key) -> (state, replay, metrics). With replay the key may be UpdateKeys; with data sets
    # alone the rollout is None
    step: Callable[[PyTree, PyTree, Any, Any], tuple[PyTree, PyTree, Metrics]]
    # state -> checkpoint content, and checkpoint content -> state; the rest of the state is re-initialised
    keep: Callable[[PyTree], PyTree] = lambda state: state
    resume: Callable[[PyTree], PyTree] = lambda kept: kept
    # one update: (state, batch, key) -> (state, UpdateAux)
    update: Callable[[PyTree, PyTree, Key], tuple[PyTree, UpdateAux]] | None = None
    sample: Callable[[PyTree, Key], PyTree] | None = None  # (replay, key) -> batch; None without replay
    can_sample: Callable[[PyTree], Array] | None = None  # replay -> [] bool
    data: "Data | None" = None  # data sets in the replay


class Data(NamedTuple):
    """Data sets in a replay: loaded once, and never part of a checkpoint."""

    buffer: Buffer  # buffer of one device
    fill: Callable[[], PyTree]  # -> replay of all devices, with the data
    without_rows: Callable[[PyTree], PyTree]  # replay -> its changing part, such as priorities, for a checkpoint
    with_rows: Callable[[PyTree, PyTree], PyTree]  # (changing part, replay with the data) -> replay with both


class UpdateKeys(NamedTuple):
    """Separate keys of a step: learners with the same `draw` sample the same rows."""

    draw: Key  # for samples from replay
    update: Key  # for everything else


@struct.dataclass
class Kept:
    """Ring of the latest N rollouts of one device."""

    rollouts: Rollout  # leaves [N, ...]
    newest: Array  # [] i32, index of the latest rollout
    count: Array  # [] i32, number of rollouts


def on_policy(algo: Algo, like: Rollout | None = None) -> Learner:
    """Returns a Learner that learns from each new rollout once, or several times from the latest N rollouts.

    A new rollout replaces the oldest. Then `algo.data.updates` updates follow, each on a random stored rollout, the
    same on all devices (arXiv:1912.00167, section 3.2). With N = 1 there is no replay.

    Args:
      algo: on-policy algorithm.
      like: shapes and dtypes of one device's rollouts; required if N > 1.
    Returns:
      A Learner. Metrics are means over the updates.
    """
    if not isinstance(algo.data, Fresh):
        raise ValueError("algo: expected an on-policy algorithm, got one that learns from replay: use off_policy")
    kept, updates = algo.data
    if kept > 1 and like is None:
        raise ValueError(f"like: expected shapes of a rollout to keep {kept} rollouts, got None")

    def init_replay() -> PyTree:
        if kept == 1:
            return ()
        rollouts = jax.tree.map(lambda x: jnp.zeros((kept, *x.shape), x.dtype), like)
        return Kept(rollouts, jnp.full((), -1, jnp.int32), jnp.zeros((), jnp.int32))

    def keep(replay: Kept, rollout: Rollout) -> Kept:
        index = (replay.newest + 1) % kept
        rollouts = jax.tree.map(lambda ring, x: ring.at[index].set(x), replay.rollouts, rollout)
        return Kept(rollouts, index, jnp.minimum(replay.count + 1, kept))

    def step(state: PyTree, replay: PyTree, rollout: Rollout, key: Key):
        rollout = dataclasses.replace(rollout, count=None)  # not needed: padding is masked
        if algo.ingest is not None:
            state = algo.ingest(state, rollout)
        if kept == 1 and updates == 1:
            state, aux = algo.update(state, rollout, key)
            return state, replay, aux.metrics
        if kept > 1:
            replay = keep(replay, rollout)  # before the reads: in the other order XLA would copy the replay

        def one(state, key):
            draw_key, update_key = jax.random.split(key)
            drawn = rollout
            if kept > 1:
                index = random.integers(draw_key, (), replay.count)
                drawn = jax.tree.map(lambda x: x[index], replay.rollouts)
            state, aux = algo.update(state, drawn, update_key)
            return state, aux.metrics

        state, metrics = jax.lax.scan(one, state, jax.random.split(key, updates))
        return state, replay, jax.tree.map(lambda x: x.mean(0), metrics)

    return Learner(algo.init, init_replay, algo.actor, step, update=algo.update)


def transform_rollouts(learner: Learner, transforms: Sequence[Callable[[Rollout], Rollout]]) -> Learner:
    """Returns a Learner of the rollouts that the pure functions `transforms` return, applied in order.

    A transform keeps a rollout's shapes and dtypes; with several devices it gets the device's own columns.
    """
    if not transforms:
        return learner

    def step(state: PyTree, replay: PyTree, rollout: Rollout, key: Key):
        for transform in transforms:
            like, rollout = rollout, transform(rollout)
            if (before := _shapes(like)) != (after := _shapes(rollout)):
                name = getattr(transform, "__qualname__", transform)
                raise TypeError(f"{name}: expected the rollout's shapes and dtypes {before}, got {after}")
            rollout = drop_stale_normalized_obs(like, rollout)
        return learner.step(state, replay, rollout, key)

    return learner._replace(step=step)


def report_blocked_actions(
    learner: Learner,
    spec: EnvSpec,
    *,
    axis_name: str | None = None,
    observed: Callable[[PyTree], PyTree] | None = None,
) -> Learner:
    """Adds the metric NO_CHOICE, the share of steps whose action mask allows no action, if observations have a mask.

    Args:
      learner: learner of rollouts in environments of `spec`.
      axis_name: mapped axis over devices; None: no such axis.
      observed: rollout observations -> observations of `spec`; None: the identity.
    """
    kinds = spaces.by_kind(spec)
    if not any(spaces.masks_actions(kind) for kind in kinds):
        return learner

    def step(state: PyTree, replay: PyTree, rollout: Rollout, key: Key):
        blocked = []
        whole_obs = rollout.obs if observed is None else observed(rollout.obs)
        parts, masks = spaces.parts_by_kind(spec, whole_obs), spaces.rows_by_kind(spec, rollout.mask, 1)
        for kind, obs, rows in zip(kinds, parts, masks, strict=True):
            mask = spaces.split_mask(kind.observation, obs)[1]
            if mask is not None:
                blocked.append(rows & ~spaces.any_allowed(kind.action, mask))
        share = jnp.mean((blocked[0] if len(blocked) == 1 else jnp.concatenate(blocked, 1)).astype(jnp.float32))
        share = collectives.pmax(share, axis_name)
        state, replay, metrics = learner.step(state, replay, rollout, key)
        return state, replay, {**metrics, NO_CHOICE: share}

    return learner._replace(step=step)


def transform_batches(algo: Algo, transforms: Sequence[Callable[[Any], Any]], *, axis_name: str | None = None) -> Algo:
    """Returns an Algo that updates on the batches that the pure functions `transforms` return, applied in order.

    Args:
      algo: any algorithm.
      transforms: batch -> batch or (batch, metrics). A batch is a Batch, or a Rollout of an on-policy algorithm.
      axis_name: mapped axis over devices, over which the metrics are averaged; None: no such axis.
    """
    if not transforms:
        return algo

    def update(state: PyTree, batch: PyTree, key: Key):
        added: Metrics = {}
        for transform in transforms:
            out = transform(batch)
            before, (batch, metrics) = batch, out if type(out) is tuple else (out, {})
            if isinstance(before, Rollout) and isinstance(batch, Rollout):
                batch = drop_stale_normalized_obs(before, batch)
            added |= metrics
        added = collectives.pmean(added, axis_name)
        state, aux = algo.update(state, batch, key)
        return state, aux._replace(metrics={**aux.metrics, **added})

    return algo._replace(update=update)


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


def _sample_own(buffer: Buffer, axis_name: str | None) -> Callable[[PyTree, Key], PyTree]:
    """Returns the buffer's `sample`, with a key of its own for each device."""

    def sample(replay, key):
        if axis_name is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        return buffer.sample(replay, key)

    return sample


def from_data_sets(algo: Algo, buffer: Buffer, *, axis_name: str | None = None) -> Learner:
    """Returns a Learner that makes one gradient step per call on a sample of fixed data sets; schedules count updates.

    Args:
      algo: replay-based algorithm, or algorithm of `Fixed` data; its State has `updates`.
      buffer: one device's share of the data.
      axis_name: mapped axis over devices; None: no such axis.
    Returns:
      A Learner whose `step` gets None as rollout.
    """

    sample = _sample_own(buffer, axis_name)

    def step(state: PyTree, replay: PyTree, rollout: None, key: Key | UpdateKeys):
        sample_key, update_key = key if isinstance(key, UpdateKeys) else jax.random.split(key)
        batch = sample(replay, sample_key)
        state, aux = algo.update(state, batch, update_key)
        if buffer.set_priority is not None and aux.priority is not None:
            replay = buffer.set_priority(replay, batch.index, aux.priority)
        return state, replay, {**aux.metrics, "train/updates": state.updates}

    return Learner(algo.init, buffer.init, algo.actor, step, update=algo.update, sample=sample)


def count_updates(algo: Algo, obs_stats: PyTree) -> Algo:
    """Returns an Algo whose schedules count updates, with fixed observation statistics; (): no normalisation."""

    def init(key: Key) -> PyTree:
        return dataclasses.replace(algo.init(key), obs_stats=obs_stats)

    def update(state: PyTree, batch: PyTree, key: Key):
        state, aux = algo.update(state, batch, key)
        return dataclasses.replace(state, env_steps=state.updates), aux

    return algo._replace(init=init, update=update)


def off_policy(
    algo: Algo,
    buffer: Buffer,
    *,
    updates: int,
    learning_starts: int,
    axis_name: str | None = None,
    broken: Callable[[Rollout], Array] | None = None,
) -> Learner:
    """Returns a Learner that adds each rollout to replay, then makes `updates` gradient steps on samples.

    Args:
      algo: replay-based algorithm; its State has `updates`, the number of gradient steps.
      buffer: one device's share of the replay.
      updates: gradient steps per rollout.
      learning_starts: rows in replay, over all devices, before the first gradient step.
      axis_name: mapped axis over devices; None: no such axis.
      broken: Rollout -> share of its rows, [] f32, that this replay cannot reproduce, for the metric BROKEN_STACKS
        until the first gradient step. None: no such metric.
    Returns:
      A Learner. Metrics are means over the gradient steps, NaN without a step; `train/updates` is the total number.
      `replay/valid_share` is the share of unmasked rows among the stored rows.
    """
    ingest = algo.ingest
    if not isinstance(algo.data, Replay):
        raise ValueError("algo: expected an algorithm with replay, got one that learns from rollouts: use on_policy")
    if ingest is None:
        raise ValueError("Algo.ingest: expected a function (state, rollout) -> state, got None: replay needs one")

    sample = _sample_own(buffer, axis_name)

    def split(key: Key | UpdateKeys, i: Any) -> tuple[Key, Key]:
        """Returns the keys of the sample and of the update of gradient step i."""
        if not isinstance(key, UpdateKeys):
            sample_key, update_key = jax.random.split(jax.random.fold_in(key, i))
            return sample_key, update_key
        return jax.random.fold_in(key.draw, i), split(key.update, i)[1]

    def step(state: PyTree, replay: PyTree, rollout: Rollout, key: Key | UpdateKeys):
        before = state.updates
        state, replay = ingest(state, rollout), buffer.add(replay, rollout)
        held, ready = buffer.size(replay), buffer.can_sample(replay)
        live = None if buffer.live is None else buffer.live(replay)
        held, live = collectives.psum((held, live), axis_name)
        ready = collectives.all_devices(ready, axis_name)  # all devices learn, or none

        def draw_and_learn(state, changing, i):
            sample_key, update_key = split(key, i)
            batch = sample(changing or replay, sample_key)
            state, aux = algo.update(state, batch, update_key)
            if buffer.set_priority is not None and aux.priority is not None:
                changing = buffer.set_priority(changing, batch.index, aux.priority)
            return state, changing, aux.metrics

        def body(i, carry):
            state, changing, total, _ = carry
            state, changing, metrics = gradient_step(state, changing, i)
            return state, changing, jax.tree.map(jnp.add, total, metrics), i + 1

        # carry the replay only if the loop changes it: under vmap a loop copies everything that it carries
        changing = () if buffer.set_priority is None else replay
        gradient_step, shapes = trace_once(draw_and_learn, state, changing, jax.ShapeDtypeStruct((), jnp.int32))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[2])
        # a count of 0 instead of a branch around the loop, which would copy the replay
        count = jnp.where(ready & (held >= learning_starts), updates, 0)
        # count in the loop: reading `count` after it would keep a copy of all earlier priorities alive
        state, changing, total, made = jax.lax.fori_loop(0, count, body, (state, changing, zeros, 0))
        metrics = jax.tree.map(lambda x: x / made, total)  # 0 / 0 is NaN
        metrics |= {"replay/size": held, "train/updates": state.updates}
        if live is not None:
            metrics[VALID_SHARE] = live / jnp.maximum(held, 1)
        if broken is not None:
            lost = jax.lax.cond(before == 0, broken, lambda rollout: jnp.zeros(()), rollout)
            metrics[BROKEN_STACKS] = collectives.pmax(lost, axis_name)
        return state, changing or replay, metrics

    return Learner(
        algo.init, buffer.init, algo.actor, step, update=algo.update, sample=sample, can_sample=buffer.can_sample
    )
