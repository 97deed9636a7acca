"""Sequences against a Python list: every one that can begin, after random adds that wrap around."""

import jax
import numpy as np
import pytest
from cases import some_quick
from replay_oracle import Oracle, World, assert_trees_equal, jitted, plain, struct

from jrl.replay import ring, sequences, sum_tree
from jrl.types import InputError

SLOTS, LENGTH, BURN_IN, N_STEP, GAMMA = 16, 3, 2, 2, 0.9
WHOLE = LENGTH + BURN_IN


def make(world, stack, alpha=None, batch_size=200, in_step=True):
    return jitted(
        sequences.make(
            world.obs,
            world.action,
            capacity=SLOTS * world.B,
            num_envs=world.B,
            batch_size=batch_size,
            gamma=GAMMA,
            length=LENGTH,
            burn_in=BURN_IN,
            n_step=N_STEP,
            frame_stack=ring.FrameStack(stack),
            extras={"carry": struct((3,)), "value": struct(())},
            alpha=alpha,
            beta=0.5,
            in_step=in_step,
        )
    )


def reference(rows, place):
    """(reward, discount, ahead) of the row `place` of a sequence of dicts, by a plain loop."""
    total, discount = 0.0, 1.0
    for t in range(place, min(place + N_STEP, WHOLE)):
        total, discount = total + discount * float(rows[t]["reward"]), discount * GAMMA
        if rows[t]["terminated"]:
            return total, 0.0, t + 1
        if rows[t]["truncated"] or (t + 1 < len(rows) and not rows[t + 1]["mask"]):
            break
    return total, discount, t + 1


@pytest.mark.parametrize(  # every pair of them
    ("alpha", "stack", "in_step"),
    some_quick([(None, 1, True), (None, 3, False), (0.6, 1, False), (0.6, 3, True)], (None, 1, True), (0.6, 1, False)),
)
def test_every_sequence_is_as_in_a_list(alpha, stack, in_step):
    world, oracle = World(3, 1, stack), Oracle(3, stack, in_step)
    buffer = make(world, stack, alpha, in_step=in_step)
    state, rng, leaves = buffer.init(), np.random.default_rng(0), jax.jit(sum_tree.get)
    assert not buffer.can_sample(state)
    for i in range(30):
        restart = range(3) if i == 0 else [b for b in range(3) if rng.random() < 0.1]
        steps = int(rng.choice([1, 1, 2, 3, 8]))
        count = None if in_step else [max(i == 0, min(steps, int(rng.integers(9)))) for _ in range(3)]
        rollout = world.rollout(steps, restart if in_step else [b for b in restart if count[b]], count)
        state = buffer.add(state, rollout)
        oracle.add(rollout)
        ends = [len(rows) for rows in oracle.columns]
        starts = {(t, b) for b in range(3) for t in range(max(0, ends[b] - SLOTS + stack), ends[b] - WHOLE + 1)}
        held = [row["mask"] for b, end in enumerate(ends) for row in oracle.columns[b][max(0, end - SLOTS + stack) :]]
        assert buffer.can_sample(state) == (len(starts) > 0 and any(held))
        if not starts:
            continue
        sample = jax.device_get(buffer.sample(state, jax.random.key(i)))
        slot, column = np.divmod(sample.index, 3)
        end = np.asarray(ends)[column]
        first = end - 1 - (end - 1 - slot) % SLOTS
        assert set(zip(first, column)) <= starts
        live = np.zeros((200, LENGTH), bool)
        for n in range(200):
            rows = oracle.columns[column[n]][first[n] : first[n] + WHOLE]
            behind = np.cumsum(["seam" in row for row in rows]) > 0  # of another episode, in the midst of it perhaps
            live[n] = [row["mask"] and not x for row, x in zip(rows, behind)][BURN_IN:]
            if n % 5:
                continue
            for t, row in enumerate(rows):
                if "frames" in row:
                    continue
                assert_trees_equal(jax.tree.map(lambda x, n=n, t=t: x[n, t], sample.window.obs), row["obs"])
                assert sample.window.reset[n, t] == (not row["mask"])
            if rows[-1]["mask"]:
                assert_trees_equal(jax.tree.map(lambda x, n=n: x[n, WHOLE], sample.window.obs), rows[-1]["next_obs"])
            if rows[0]["mask"]:
                np.testing.assert_array_equal(sample.window.carry[n], rows[0]["extras"]["carry"])
            for t, row in enumerate(rows[BURN_IN:]):
                assert (sample.weight[n, t] > 0) == live[n, t]
                if live[n, t]:
                    assert_trees_equal(jax.tree.map(lambda x, n=n, t=t: x[n, t], sample.action), row["action"])
                    assert sample.extras["value"][n, t] == row["extras"]["value"]
                    reward, discount, ahead = reference(rows, BURN_IN + t)
                    np.testing.assert_allclose(sample.reward[n, t], reward, rtol=1e-5, atol=1e-6)
                    np.testing.assert_allclose(sample.discount[n, t], discount, rtol=1e-5)
                    assert sample.ahead[n, t] == ahead - BURN_IN
        importance = np.ones(200)
        if alpha is not None:
            leaf = np.asarray(leaves(state.priorities.tree, sample.index))
            importance = (leaf.min() / leaf) ** 0.5
        np.testing.assert_allclose(
            sample.weight, live * importance[:, None] / max(live.mean(), 1 / live.size), rtol=1e-5
        )
        if alpha is not None:
            leaf = np.asarray(leaves(state.priorities.tree, np.arange(SLOTS * 3, dtype=np.int32))).reshape(SLOTS, 3)
            drawn = np.zeros((SLOTS, 3), bool)
            for t, b in starts:
                drawn[t % SLOTS, b] = True
            np.testing.assert_array_equal(leaf > 0, drawn)
            state = buffer.set_priority(state, sample.index, rng.exponential(size=200).astype(np.float32))
    assert sample.window.obs["place"].shape == (200, WHOLE + 1, 2)
    assert sample.action["force"].shape == (200, LENGTH, 2)


@pytest.mark.parametrize("alpha", some_quick([None, 0.0], None))
def test_sequences_are_drawn_uniformly(alpha):
    options = {"capacity": 40, "num_envs": 2, "batch_size": 500, "gamma": 0.5, "n_step": (1, 3), "length": 4}
    buffer = jitted(sequences.make(struct((1,)), struct((), "int32"), alpha=alpha, **options))
    state = buffer.init()
    for start in range(0, 30, 6):
        state = buffer.add(state, plain(6, start))
    draw = jax.jit(jax.vmap(buffer.sample, (None, 0)))
    sample = jax.device_get(draw(state, jax.random.split(jax.random.key(0), 100)))
    first = np.asarray(sample.window.obs[:, :, 0, 0]).reshape(-1)
    counts = np.bincount(first.astype(int), minlength=30)
    assert (counts[:11] == 0).all()  # 20 slots, one of them the hole: rows 11 .. 29 are there
    assert (counts[27:] == 0).all()
    np.testing.assert_allclose(counts[11:27] / counts.sum(), 1 / 16, rtol=0.1)
    np.testing.assert_array_equal(sample.weight, 1.0)
    assert sample.window.carry == ()
    # rows draw their steps on their own, as many as the sequence has left
    steps = np.asarray(sample.ahead)[..., :2].reshape(-1, 2) - np.arange(2)
    for count in (1, 2, 3):
        np.testing.assert_allclose((steps == count).mean(0), 1 / 3, atol=0.02)
    np.testing.assert_allclose((steps[:, 0] == steps[:, 1]).mean(), 1 / 3, atol=0.02)
    np.testing.assert_array_equal(sample.ahead[..., 3], 4)
    np.testing.assert_allclose((np.asarray(sample.ahead[..., 2]) == 3).mean(), 1 / 3, atol=0.02)


def test_a_ring_too_short_is_refused():
    options = {"num_envs": 2, "batch_size": 4, "gamma": 0.9, "length": 8, "burn_in": 4}
    least = r"replay.capacity: 20 is too small for 2 environments: at least 28, for sequences of 12 steps .*max_seq_len"
    with pytest.raises(InputError, match=least):
        sequences.make(struct((1,)), struct((), "int32"), capacity=20, **options)
    buffer = sequences.make(struct((1,)), struct((), "int32"), capacity=28, **options)
    jax.eval_shape(buffer.add, jax.eval_shape(buffer.init), plain(1))
    with pytest.raises(InputError, match="rollouts of 2 steps"):
        jax.eval_shape(buffer.add, jax.eval_shape(buffer.init), plain(2))
