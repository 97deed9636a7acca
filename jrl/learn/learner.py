"""Learners, which the loop drives: one interface over on-policy and replay-based algorithms."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl import spaces
from jrl.fields.data import Fresh, Replay
from jrl.learn import trace_once
from jrl.ops import collectives, random
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
)


class Learner(NamedTuple):
    """Pure functions around an Algo; `step` may be jitted, mapped over devices and scanned with collection.

    The state is the same on all devices; the replay is each device's own, and () for algorithms without one.
    """

    init: Callable[[Key], PyTree]  # key -> state
    init_replay: Callable[[], PyTree]  # -> replay, empty
    actor: Callable[[PyTree], PyTree]  # state -> Actor
    # (state, replay, Rollout, key) -> (state, replay, metrics); with replay the key may be Keys, and of data sets alone
    # there is no rollout, but None
    step: Callable[[PyTree, PyTree, Any, Any], tuple[PyTree, PyTree, Metrics]]
    # what of the state outlives the process, and a state from it; the rest begins anew
    keep: Callable[[PyTree], PyTree] = lambda state: state
    resume: Callable[[PyTree], PyTree] = lambda kept: kept
    # one update on what the algorithm learns from: (state, batch, key) -> (state, UpdateAux)
    update: Callable[[PyTree, PyTree, Key], tuple[PyTree, UpdateAux]] | None = None
    sample: Callable[[PyTree, Key], PyTree] | None = None  # (replay, key) -> such a batch; None without replay
    can_sample: Callable[[PyTree], Array] | None = None  # replay -> [] bool
    data: "Data | None" = None  # sets that stand in the replay from the start on


class Data(NamedTuple):
    """The data sets in a replay: put there once, and never part of a checkpoint."""

    buffer: Buffer  # one device's
    fill: Callable[[], PyTree]  # -> the replay of all devices with the data in it
    without_rows: Callable[[PyTree], PyTree]  # what of a replay changes, such as priorities: what a checkpoint holds
    with_rows: Callable[[PyTree, PyTree], PyTree]  # (what was bare, a replay with the data) -> that replay with it


class Keys(NamedTuple):
    """The keys of a step whose samples are not its own: who has the same `draw` draws the same rows."""

    draw: Key  # of samples from replay
    update: Key  # of all else


@struct.dataclass
class Kept:
    """The latest N rollouts of one device."""

    rollouts: Rollout  # leaves [N, ...]
    newest: Array  # [] i32, where the latest lies
    count: Array  # [] i32, how many there are


def on_policy(algo: Algo, like: Rollout | None = None) -> Learner:
    """Learns from each rollout once, when it comes; or, where `algo` says so, several times from the latest N.

    A new rollout takes the place of the oldest; then come `algo.data.updates` updates, each on one that is drawn
    from those kept, the same on all devices (arXiv:1912.00167, section 3.2). Where one is kept there is no replay.

    Args:
      algo: on-policy.
      like: shapes and dtypes of one device's rollouts; needed where several are kept.
    Returns:
      A Learner. Metrics are means over the updates.
    """
    if not isinstance(algo.data, Fresh):
        raise ValueError("the algorithm learns from replay: use off_policy")
    kept, updates = algo.data
    if kept > 1 and like is None:
        raise ValueError(f"{kept} rollouts are kept: what is `like` one?")

    def init_replay() -> PyTree:
        if kept == 1:
            return ()
        rollouts = jax.tree.map(lambda x: jnp.zeros((kept, *x.shape), x.dtype), like)
        return Kept(rollouts, jnp.full((), -1, jnp.int32), jnp.zeros((), jnp.int32))

    def keep(replay: Kept, rollout: Rollout) -> Kept:
        at = (replay.newest + 1) % kept
        rollouts = jax.tree.map(lambda ring, x: ring.at[at].set(x), replay.rollouts, rollout)
        return Kept(rollouts, at, jnp.minimum(replay.count + 1, kept))

    def step(state: PyTree, replay: PyTree, rollout: Rollout, key: Key):
        rollout = dataclasses.replace(rollout, count=None)  # padding is masked, more need not be known of it
        if algo.ingest is not None:
            state = algo.ingest(state, rollout)
        if kept == 1 and updates == 1:
            state, aux = algo.update(state, rollout, key)
            return state, replay, aux.metrics
        if kept > 1:
            replay = keep(replay, rollout)  # before it is read: the other way round, XLA would copy it

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
    """Learns from the rollout that the pure functions `transforms` return, in their order.

    A rollout keeps its shapes and dtypes; with several devices each sees its own columns.
    """
    if not transforms:
        return learner

    def step(state: PyTree, replay: PyTree, rollout: Rollout, key: Key):
        for transform in transforms:
            like, rollout = rollout, transform(rollout)
            _same_shapes(transform, like, rollout)
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
    """Adds the metric NO_CHOICE where observations say which actions can be taken: the steps on which none can.

    Args:
      learner: of rollouts in environments of that spec.
      spec: of the environments.
      axis_name: of the mapped axis over devices.
      observed: from a rollout's observations to those of `spec`; None: they are.
    """
    kinds = spaces.by_kind(spec)
    if not any(spaces.masks_actions(kind) for kind in kinds):
        return learner

    def step(state: PyTree, replay: PyTree, rollout: Rollout, key: Key):
        nothing = []
        seen = rollout.obs if observed is None else observed(rollout.obs)
        parts, masks = spaces.parts_by_kind(spec, seen), spaces.rows_by_kind(spec, rollout.mask, 1)
        for kind, obs, rows in zip(kinds, parts, masks, strict=True):
            mask = spaces.split_mask(kind.observation, obs)[1]
            if mask is not None:
                nothing.append(rows & ~spaces.any_allowed(kind.action, mask))
        none = jnp.mean((nothing[0] if len(nothing) == 1 else jnp.concatenate(nothing, 1)).astype(jnp.float32))
        none = collectives.pmax(none, axis_name)
        state, replay, metrics = learner.step(state, replay, rollout, key)
        return state, replay, {**metrics, NO_CHOICE: none}

    return learner._replace(step=step)


def transform_batches(algo: Algo, transforms: Sequence[Callable[[Any], Any]], *, axis_name: str | None = None) -> Algo:
    """Makes each update on the batch that the pure functions `transforms` return, in their order.

    Args:
      algo: any.
      transforms: from a Batch, or a Rollout of an on-policy algorithm, to another, or to (batch, metrics).
      axis_name: of the mapped axis over devices, over which the metrics are averaged.
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


def _same_shapes(transform: Callable, before: Rollout, after: Rollout) -> None:
    kind = lambda tree: jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)
    if kind(before) != kind(after):
        name = getattr(transform, "__qualname__", transform)
        raise TypeError(f"{name}: a transform keeps a rollout's shapes and dtypes: {kind(before)} -> {kind(after)}")


def from_data_sets(algo: Algo, buffer: Buffer, *, axis_name: str | None = None) -> Learner:
    """Makes one gradient step on a sample of data sets, to which nothing is added; schedules count updates.

    Args:
      algo: replay-based, or of `Fixed` data; its State has `updates`.
      buffer: one device's share of the data.
      axis_name: of the mapped axis over devices; None outside of one.
    Returns:
      A Learner whose `step` is given no rollout, but None.
    """

    def sample(replay, key):
        if axis_name is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        return buffer.sample(replay, key)

    def step(state: PyTree, replay: PyTree, rollout: None, key: Key | Keys):
        sample_key, update_key = key if isinstance(key, Keys) else jax.random.split(key)
        batch = sample(replay, sample_key)
        state, aux = algo.update(state, batch, update_key)
        if buffer.set_priority is not None and aux.priority is not None:
            replay = buffer.set_priority(replay, batch.index, aux.priority)
        return state, replay, {**aux.metrics, "train/updates": state.updates}

    return Learner(algo.init, buffer.init, algo.actor, step, update=algo.update, sample=sample)


def count_updates(algo: Algo, obs_stats: PyTree) -> Algo:
    """Makes an Algo whose schedules count updates, and whose statistics of observations are given.

    Args:
      algo: whose State is `jrl.algos.agent.State` or has the fields of it that are read here.
      obs_stats: of all data; () where nothing is normalised.
    """

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
    """Adds each rollout to replay, then makes `updates` gradient steps on samples of it.

    Args:
      algo: replay-based; its State has `updates`, the count of gradient steps.
      buffer: one device's share of the replay.
      updates: gradient steps per rollout.
      learning_starts: rows that replay must hold, over all devices, before the first.
      axis_name: of the mapped axis over devices; None outside of one.
      broken: the share of a rollout's rows, [] f32, that this replay cannot give back as they were; the metric
        BROKEN_STACKS says it until the first gradient step. None: there are none.
    Returns:
      A Learner. Metrics are means over the gradient steps, NaN where there were none; `train/updates` counts them all.
      `replay/valid_share` is the share of the rows held that are not masked.
    """
    ingest = algo.ingest
    if not isinstance(algo.data, Replay):
        raise ValueError("the algorithm learns from fresh rollouts: use on_policy")
    if ingest is None:
        raise ValueError("Algo.ingest: expected a function (state, rollout) -> state, got None: replay needs one")

    def sample(replay, key):
        if axis_name is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        return buffer.sample(replay, key)

    def split(key: Key | Keys, i: Any) -> tuple[Key, Key]:
        """Returns the keys of the sample and of the update of gradient step i."""
        if not isinstance(key, Keys):
            sample_key, update_key = jax.random.split(jax.random.fold_in(key, i))
            return sample_key, update_key
        return jax.random.fold_in(key.draw, i), split(key.update, i)[1]

    def step(state: PyTree, replay: PyTree, rollout: Rollout, key: Key | Keys):
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

        # the replay is carried only where the loop changes it: under vmap a loop selects among all that it carries
        changing = () if buffer.set_priority is None else replay
        gradient_step, shapes = trace_once.trace_once(
            draw_and_learn, state, changing, jax.ShapeDtypeStruct((), jnp.int32)
        )
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[2])
        # a count of 0 instead of a branch around the loop: what learns nothing costs nothing, and nothing is copied
        count = jnp.where(ready & (held >= learning_starts), updates, 0)
        # the loop counts: `count`, read once more after it, would be of a copy of all priorities as they were before
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
