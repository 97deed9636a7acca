"""What the loop drives: one interface over on-policy and replay-based algorithms."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jrl.types import Algo, Buffer, Key, Metrics, PyTree, Rollout


class Learner(NamedTuple):
    """Pure functions around an Algo; `step` may be jitted, mapped over devices and scanned with collection.

    The state is the same on all devices; the replay is each device's own, and () for algorithms without one.
    """

    init: Callable[[Key], PyTree]  # key -> state
    init_replay: Callable[[], PyTree]  # -> replay, empty
    actor: Callable[[PyTree], PyTree]  # state -> Actor
    # (state, replay, rollout, key) -> (state, replay, metrics)
    step: Callable[[PyTree, PyTree, Rollout, Key], tuple[PyTree, PyTree, Metrics]]
    # what of the state outlives the process, and a state from it; the rest begins anew
    keep: Callable[[PyTree], PyTree] = lambda state: state
    resume: Callable[[PyTree], PyTree] = lambda kept: kept


def on_policy(algo: Algo) -> Learner:
    """Learns from each rollout once, when it comes."""

    def step(state: PyTree, replay: PyTree, rollout: Rollout, key: Key):
        state, aux = algo.update(state, rollout, key)
        return state, replay, aux.metrics

    return Learner(algo.init, lambda: (), algo.actor, step)


def off_policy(
    algo: Algo, buffer: Buffer, *, updates: int, learning_starts: int, axis_name: str | None = None
) -> Learner:
    """Adds each rollout to replay, then makes `updates` gradient steps on samples of it.

    Args:
      algo: replay-based; its State has `updates`, the count of gradient steps.
      buffer: one device's share of the replay.
      updates: gradient steps per rollout.
      learning_starts: rows that replay must hold, over all devices, before the first.
      axis_name: of the mapped axis over devices; None outside of one.
    Returns:
      A Learner. Metrics are means over the gradient steps, NaN where there were none; `train/updates` counts them all.
    """
    ingest = algo.ingest
    if ingest is None:
        raise ValueError("the algorithm learns on-policy: it has no ingest")

    def sample(replay, key):
        if axis_name is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        return buffer.sample(replay, key)

    def step(state: PyTree, replay: PyTree, rollout: Rollout, key: Key):
        state, replay = ingest(state, rollout), buffer.add(replay, rollout)
        held, ready = buffer.size(replay), buffer.can_sample(replay)
        if axis_name is not None:  # all devices learn, or none
            held, ready = jax.lax.psum(held, axis_name), jax.lax.pmin(ready.astype(jnp.int32), axis_name) > 0

        def gradient_step(state, changing, key):
            sample_key, update_key = jax.random.split(key)
            batch = sample(changing or replay, sample_key)
            state, aux = algo.update(state, batch, update_key)
            if buffer.set_priority is not None and aux.priority is not None:
                changing = buffer.set_priority(changing, batch.index, aux.priority)
            return state, changing, aux.metrics

        def body(i, carry):
            state, changing, total = carry
            state, changing, metrics = gradient_step(state, changing, jax.random.fold_in(key, i))
            return state, changing, jax.tree.map(jnp.add, total, metrics)

        # the replay is carried only where the loop changes it: under vmap a loop selects among all that it carries
        changing = () if buffer.set_priority is None else replay
        metrics = jax.eval_shape(gradient_step, state, changing, key)[2]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)
        # a count of 0 instead of a branch around the loop: what learns nothing costs nothing, and nothing is copied
        count = jnp.where(ready & (held >= learning_starts), updates, 0)
        state, changing, total = jax.lax.fori_loop(0, count, body, (state, changing, zeros))
        mean = jax.tree.map(lambda x: x / count, total)  # 0 / 0 is NaN
        return state, changing or replay, {**mean, "replay/size": held, "train/updates": state.updates}

    return Learner(algo.init, buffer.init, algo.actor, step)
