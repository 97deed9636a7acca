"""Sequences against a Python list: every one that can begin, after random adds that wrap around."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replay_oracle import Oracle, World, assert_trees_equal, jitted, plain, struct

from jrl.replay import ring, sequences, sum_tree
from jrl.types import InputError

SLOTS, LENGTH, BURN_IN = 16, 3, 2
WHOLE = LENGTH + BURN_IN


def make(world, stack, alpha=None, batch_size=200):
    return jitted(
        sequences.make(
            world.obs,
            world.action,
            capacity=SLOTS * world.B,
            num_envs=world.B,
            batch_size=batch_size,
            length=LENGTH,
            burn_in=BURN_IN,
            frame_stack=ring.FrameStack(stack),
            extras={"carry": struct((3,)), "value": struct(())},
            alpha=alpha,
            beta=0.5,
        )
    )


@pytest.mark.parametrize(("alpha", "stack"), [(None, 1), (None, 3), (0.6, 1), (0.6, 3)])
def test_every_sequence_is_as_in_a_list(alpha, stack):
    world, oracle = World(3, 1, stack), Oracle(3)
    buffer = make(world, stack, alpha)
    state, rng = buffer.init(), np.random.default_rng(0)
    assert not buffer.can_sample(state)
    for i in range(30):
        restart = range(3) if i == 0 else [b for b in range(3) if rng.random() < 0.2]
        rollout = world.rollout(int(rng.choice([1, 1, 2, 3, 8])), restart)
        state = buffer.add(state, rollout)
        oracle.add(rollout)
        end = len(oracle)
        starts = range(end - min(end, SLOTS - stack), end - WHOLE + 1)
        assert buffer.can_sample(state) == (len(starts) > 0)
        if not starts:
            continue
        sample = jax.device_get(buffer.sample(state, jax.random.key(i)))
        slot, column = np.divmod(sample.index, 3)
        first = end - 1 - (end - 1 - slot) % SLOTS
        assert set(zip(first, column)) <= {(t, b) for t in starts for b in range(3)}
        for n in range(0, 200, 5):
            rows = oracle.columns[column[n]][first[n] : first[n] + WHOLE]
            got = jax.tree.map(lambda x, n=n: x[:, n], sample.rollout.replace(last_obs=(), contiguous=(), carry=()))
            for t, row in enumerate(rows):
                for name in ("obs", "action", "mask"):
                    assert_trees_equal(jax.tree.map(lambda x, t=t: x[t], getattr(got, name)), row[name])
                assert got.extras["value"][t] == row["extras"]["value"]
                if row["mask"]:
                    flags = ("reward", "terminated", "truncated")
                    assert [getattr(got, name)[t] for name in flags] == [row[name] for name in flags]
                else:
                    assert not got.terminated[t]
                    assert not got.truncated[t]
            last = jax.tree.map(lambda x, n=n: x[n], sample.rollout.last_obs)
            if rows[-1]["mask"]:
                assert_trees_equal(last, rows[-1]["next_obs"])
            np.testing.assert_array_equal(sample.rollout.carry[n], rows[0]["extras"]["carry"])
        if alpha is not None:
            leaf = np.asarray(sum_tree.get(state.priorities.tree, jnp.arange(SLOTS * 3))).reshape(SLOTS, 3)
            live = np.zeros((SLOTS, 3), bool)
            live[[t % SLOTS for t in starts]] = True
            np.testing.assert_array_equal(leaf > 0, live)
            state = buffer.set_priority(state, sample.index, rng.exponential(size=200).astype(np.float32))
    assert sample.rollout.obs["place"].shape == (WHOLE, 200, 2)


@pytest.mark.parametrize("alpha", [None, 0.0])
def test_sequences_are_drawn_uniformly(alpha):
    buffer = jitted(
        sequences.make(
            struct((1,)), struct((), "int32"), capacity=40, num_envs=2, batch_size=500, length=4, alpha=alpha
        )
    )
    state = buffer.init()
    for start in range(0, 30, 6):
        state = buffer.add(state, plain(6, start))
    draw = jax.jit(jax.vmap(buffer.sample, (None, 0)))
    sample = draw(state, jax.random.split(jax.random.key(0), 100))
    first = np.asarray(sample.rollout.obs[:, 0, :, 0]).reshape(-1)
    counts = np.bincount(first.astype(int), minlength=30)
    assert (counts[:11] == 0).all()  # 20 slots, one of them the hole: rows 11 .. 29 are there
    assert (counts[27:] == 0).all()
    np.testing.assert_allclose(counts[11:27] / counts.sum(), 1 / 16, rtol=0.1)
    np.testing.assert_array_equal(sample.weight, 1.0)


def test_a_ring_too_short_is_refused():
    options = {"num_envs": 2, "batch_size": 4, "length": 8, "burn_in": 4}
    with pytest.raises(InputError, match=r"replay.capacity: 20 is too small for 2 environments: at least 28"):
        sequences.make(struct((1,)), struct((), "int32"), capacity=20, **options)
    buffer = sequences.make(struct((1,)), struct((), "int32"), capacity=28, **options)
    jax.eval_shape(buffer.add, jax.eval_shape(buffer.init), plain(1))
    with pytest.raises(InputError, match="rollouts of 2 steps"):
        jax.eval_shape(buffer.add, jax.eval_shape(buffer.init), plain(2))
