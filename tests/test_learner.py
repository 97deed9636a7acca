"""Learners around algorithms and a buffer that only write down what they are asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jrl.fields.data import Fresh, Replay
from jrl.learn import learner, parallel
from jrl.types import BROKEN_STACKS, Algo, Batch, Buffer, Rollout, UpdateAux

ROWS = 4


@struct.dataclass
class State:
    env_steps: jax.Array
    updates: jax.Array
    seen: jax.Array  # sum of all rewards learned from


def make_algo(priority=False, axis_name=None):
    def update(state, batch, key):
        reward = batch.reward.sum()
        if axis_name is not None:
            reward = jax.lax.psum(reward, axis_name)
        state = state.replace(updates=state.updates + 1, seen=state.seen + reward)
        return state, UpdateAux({"loss/value": reward}, batch.reward * 2 if priority else None)

    zero = lambda dtype: jnp.zeros((), dtype)
    return Algo(
        init=lambda key: State(zero(jnp.uint32), zero(jnp.uint32), zero(jnp.float32)),
        actor=lambda state: (),
        carry=lambda batch_size: (),
        act=lambda *args: None,
        update=update,
        data=Replay(),
        ingest=lambda state, rollout: state.replace(env_steps=state.env_steps + rollout.reward.size),
    )


def make_buffer(prioritized=False):
    """Counts rows; a sample is [rows held], its priority is written into the state."""

    def sample(state, key):
        held = state["held"].astype(jnp.float32)[None]
        return Batch(held, held, held, held, held, held, jnp.zeros((1,), jnp.int32))

    return Buffer(
        init=lambda: {"held": jnp.zeros((), jnp.int32), "priority": jnp.zeros((1,), jnp.float32)},
        add=lambda state, rollout: {**state, "held": state["held"] + rollout.reward.size},
        sample=sample,
        can_sample=lambda state: state["held"] > 0,
        size=lambda state: state["held"],
        set_priority=(lambda state, index, priority: {**state, "priority": priority}) if prioritized else None,
    )


def rollout(rows=ROWS):
    x = jnp.zeros((1, rows))
    flags = jnp.zeros((1, rows), bool)
    return Rollout(x, x[0], x, x, flags, flags, ~flags, flags[0], {}, ())


def steps(made, count, rows=ROWS):
    state, replay, step = made.init(None), made.init_replay(), jax.jit(made.step)
    for i in range(count):
        state, replay, metrics = step(state, replay, rollout(rows), jax.random.key(i))
        yield state, replay, metrics


def test_learning_starts_when_enough_is_held_and_updates_are_counted():
    made = learner.off_policy(make_algo(), make_buffer(), updates=3, learning_starts=10)
    found = list(steps(made, 4))
    assert [int(state.updates) for state, _, _ in found] == [0, 0, 3, 6]
    assert [int(state.env_steps) for state, _, _ in found] == [4, 8, 12, 16]
    assert [int(metrics["train/updates"]) for _, _, metrics in found] == [0, 0, 3, 6]
    assert [int(metrics["replay/size"]) for _, _, metrics in found] == [4, 8, 12, 16]
    losses = [float(metrics["loss/value"]) for _, _, metrics in found]
    np.testing.assert_equal(losses, [np.nan, np.nan, 12, 16])  # a mean over the updates; what is added is learned from
    assert float(found[-1][0].seen) == 3 * 12 + 3 * 16


def test_what_replay_cannot_give_back_is_asked_until_something_was_learned():
    broken = lambda rollout: jnp.mean(rollout.reward) + 0.5
    made = learner.off_policy(make_algo(), make_buffer(), updates=3, learning_starts=10, broken=broken)
    assert [float(metrics[BROKEN_STACKS]) for _, _, metrics in steps(made, 5)] == [0.5, 0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("prioritized", [False, True])
def test_priorities_go_back_where_they_are_used(prioritized):
    made = learner.off_policy(make_algo(priority=True), make_buffer(prioritized), updates=2, learning_starts=0)
    *_, (_, replay, _) = steps(made, 2)
    np.testing.assert_array_equal(replay["priority"], [16.0 if prioritized else 0.0])


def test_the_data_are_those_that_the_algorithm_learns_from():
    with pytest.raises(ValueError, match="use on_policy"):
        learner.off_policy(make_algo()._replace(data=Fresh()), make_buffer(), updates=1, learning_starts=0)
    with pytest.raises(ValueError, match="use off_policy"):
        learner.on_policy(make_algo())


def test_on_policy_keeps_no_replay():
    algo = make_algo()._replace(
        data=Fresh(), update=lambda state, rollout, key: (state, UpdateAux({"loss/value": rollout.reward.sum()}))
    )
    made = learner.on_policy(algo)
    _, replay, metrics = made.step(made.init(None), made.init_replay(), rollout(), None)
    assert replay == () and float(metrics["loss/value"]) == 0


# ---------------------------------------------------------------- on-policy, several rollouts kept


@struct.dataclass
class Seen:
    ingested: jax.Array  # [] f32, sum over new rollouts of their numbers
    learned: jax.Array  # [100] f32, updates on each rollout


def make_writer(kept, updates, axis_name=None):
    """An on-policy algorithm that writes down which rollout, by its number, it gets."""

    def update(state, rollout, key):
        number = rollout.reward[0, 0]
        if axis_name is not None:  # where devices draw differently, the mean is another number
            number = jax.lax.pmean(number, axis_name)
        learned = state.learned.at[number.astype(jnp.int32)].add(1.0)
        return state.replace(learned=learned), UpdateAux({"loss/value": number})

    return make_algo()._replace(
        init=lambda key: Seen(jnp.zeros(()), jnp.zeros((100,))),
        update=update,
        ingest=lambda state, rollout: state.replace(ingested=state.ingested + rollout.reward[0, 0]),
        data=Fresh(kept, updates),
    )


def numbered(number, rows=ROWS):
    x = jnp.full((3, rows), number, jnp.float32)
    flags = jnp.zeros((3, rows), bool)
    return Rollout(x, x[0], x, x, flags, flags, ~flags, flags[0], {"log_prob": x}, ())


def test_updates_are_on_the_latest_rollouts():
    kept, updates, total = 3, 4, 60
    made = learner.on_policy(make_writer(kept, updates), jax.eval_shape(lambda: numbered(0)))
    state, replay, step = made.init(None), made.init_replay(), jax.jit(made.step)
    drawn = []
    for number in range(total):
        before = np.asarray(state.learned)
        state, replay, metrics = step(state, replay, numbered(number), jax.random.key(number))
        new = np.asarray(state.learned) - before
        assert new.sum() == updates
        ages = number - np.repeat(np.arange(100), new.astype(int))
        assert ages.min() >= 0 and ages.max() < min(kept, number + 1)
        np.testing.assert_allclose(metrics["loss/value"], (number - ages).mean(), rtol=1e-6)  # a mean over the updates
        drawn += list(ages) if number >= kept else []
    shares = np.bincount(drawn, minlength=kept) / len(drawn)
    np.testing.assert_allclose(shares, 1 / kept, atol=0.12)  # four standard deviations
    assert float(state.ingested) == sum(range(total))  # each once


def test_one_rollout_may_be_learned_from_several_times():
    made = learner.on_policy(make_writer(1, 3))
    assert made.init_replay() == ()
    state, replay, metrics = jax.jit(made.step)(made.init(None), (), numbered(7), jax.random.key(0))
    assert replay == () and float(state.learned[7]) == 3 and float(metrics["loss/value"]) == 7


def test_rollouts_that_are_kept_need_shapes():
    with pytest.raises(ValueError, match="expected shapes of a rollout to keep 2 rollouts"):
        learner.on_policy(make_writer(2, 1))


def test_rollouts_are_kept_in_place():
    """A donated replay stays where it is, and the program makes no copy of it."""
    rows = 4096
    made = learner.on_policy(make_writer(8, 2), jax.eval_shape(lambda: numbered(0, rows)))
    step = jax.jit(made.step, donate_argnums=(0, 1))
    state, replay = made.init(None), made.init_replay()
    analysis = step.lower(state, replay, numbered(0, rows), jax.random.key(0)).compile().memory_analysis()
    whole = sum(x.nbytes for x in jax.tree.leaves(replay))
    assert analysis.alias_size_in_bytes >= whole
    assert analysis.temp_size_in_bytes < whole / 4
    address = lambda replay: [x.unsafe_buffer_pointer() for x in jax.tree.leaves(replay.rollouts)]
    state, replay, _ = step(state, replay, numbered(0, rows), jax.random.key(0))
    before = address(replay)
    _, replay, _ = step(state, replay, numbered(1, rows), jax.random.key(1))
    assert address(replay) == before


def test_devices_begin_together_and_count_together(four_devices):
    made = learner.off_policy(
        make_algo(axis_name=parallel.AXIS), make_buffer(), updates=2, learning_starts=10, axis_name=parallel.AXIS
    )

    def body(state, replay, rollout, key):
        state, replay, metrics = made.step(state, jax.tree.map(lambda x: x[0], replay), rollout, key)
        return state, jax.tree.map(lambda x: x[None], replay), metrics

    specs = (parallel.REPLICATED, parallel.PER_DEVICE, parallel.ROLLOUT, parallel.REPLICATED)
    step = parallel.pmap(body, four_devices, specs, (parallel.REPLICATED, parallel.PER_DEVICE, parallel.REPLICATED))
    state = parallel.replicate(made.init(None), four_devices)
    replay = parallel.shard(jax.tree.map(lambda x: jnp.stack([x] * 4), made.init_replay()), four_devices)
    counts = []
    for i in range(4):
        data = parallel.shard(rollout(4), four_devices, parallel.ROLLOUT)  # one row on each device
        state, replay, metrics = jax.block_until_ready(step(state, replay, data, jax.random.key(i)))
        counts.append((int(state.updates), int(metrics["replay/size"])))
    assert counts == [(0, 4), (0, 8), (2, 12), (4, 16)]
