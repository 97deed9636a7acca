"""The ring against a Python list: every row that can be sampled, after random adds that wrap around."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from replay_oracle import Oracle, World, assert_trees_equal, jitted, plain, struct

from jrl.replay import ring, storage
from jrl.types import InputError

B, SLOTS, GAMMA = 3, 14, 0.9


@functools.cache
def programs(n_step, stack, axis, in_step):
    """The world's storage, and its functions jitted; `look` reads all slots of all columns at once."""
    world = World(B, 0, stack, axis)
    rows = storage.make(
        world.obs,
        world.action,
        capacity=SLOTS * B + 2,  # not a whole number of vector steps
        num_envs=B,
        gamma=GAMMA,
        n_step=n_step,
        frame_stack=ring.FrameStack(stack, axis) if stack > 1 else None,
        extras={"value": struct(())},
        in_step=in_step,
    )
    slot, column = (x.reshape(-1) for x in np.mgrid[:SLOTS, :B].astype(np.int32))

    def look(state, key):
        batch = rows.transitions(state, slot, column, jnp.ones(slot.shape), key)
        return batch, rows.valid(state, slot, column)

    return rows, jax.jit(rows.add, donate_argnums=0), jax.jit(look)


def check(batch, valid, oracle, n_step, spare):
    """All rows of the oracle that the ring shall have; returns how many windows it saw of each length."""
    low, high = n_step if isinstance(n_step, tuple) else (n_step, n_step)
    seen = np.zeros(high + 1, int)
    batch, valid = jax.device_get((batch, valid))
    for b in range(B):
        end = len(oracle.columns[b])
        for t in range(end - min(end, SLOTS - spare), end):
            i, row = (t % SLOTS) * B + b, oracle.columns[b][t]
            got = jax.tree.map(lambda x, i=i: x[i], batch)
            assert got.index == i
            assert valid[i] == row["mask"]
            if not row["mask"]:
                continue
            assert_trees_equal(got.obs, row["obs"])
            assert_trees_equal(got.action, row["action"])
            assert got.extras["value"] == row["extras"]["value"]
            # a next_obs is no other's: it says which of the windows this is
            for n in range(low, high + 1):
                reward, discount, after = oracle.transition(b, t, n, GAMMA)
                if got.next_obs["place"][0] == after["place"][0]:
                    break
            assert_trees_equal(got.next_obs, after)
            np.testing.assert_allclose(got.reward, reward, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(got.discount, discount, rtol=1e-6)
            seen[n] += 1
    return seen


@pytest.mark.parametrize(  # one step, several, a drawn number x frames x in step or not: every pair
    ("n_step", "stack", "axis", "in_step"),
    some_quick(
        [
            (1, 1, 0, True), (3, 1, 0, True), ((1, 3), 2, 0, True), (3, 4, -1, True),
            (1, 3, 0, False), ((2, 5), 1, 0, False), (3, 4, -1, False),
        ],
        ((1, 3), 2, 0, True), (3, 4, -1, False),
    ),
)  # fmt: skip
def test_every_row_is_as_in_a_list(n_step, stack, axis, in_step):
    rows, add, look = programs(n_step, stack, axis, in_step)
    rng, seen = np.random.default_rng(1), 0
    for seed in range(3):
        world, oracle = World(B, seed, stack, axis, ends=(0.1, 0.3, 0.6)[seed]), Oracle(B, stack, in_step)
        state = rows.init()
        for i in range(25 if isinstance(n_step, tuple) else 15):
            steps = int(rng.choice([1, 1, 7 if stack < 4 else 6]))
            # all restart at first, as they do in life, some from time to time, one now and then twice in a row
            restart = range(B) if i == 0 else [b for b in range(B) if rng.random() < (0.05, 0.2, 0.0)[seed]]
            count = None if in_step else [min(steps, int(rng.integers(9))) for _ in range(B)]
            if count:  # what begins anew has rows that say so
                restart = [b for b in restart if count[b] or i == 0]
            rollout = world.rollout(steps, restart, count)
            state = add(state, rollout)
            oracle.add(rollout)
            seen += check(*look(state, jax.random.key(i)), oracle, n_step, stack)
            held = [rows[-(SLOTS - stack) :] for rows in oracle.columns]
            np.testing.assert_array_equal(np.broadcast_to(state.length, (1, B))[0], [len(rows) for rows in held])
            assert int(state.live) == sum(row["mask"] for rows in held for row in rows)
    low, high = n_step if isinstance(n_step, tuple) else (n_step, n_step)
    assert (seen[low : high + 1] > 50).all()  # windows of every length were there


def small(batch_size=64, num_envs=2, capacity=40, **options):
    return jitted(
        ring.make(
            struct((1,)), struct((), "int32"), capacity=capacity, num_envs=num_envs, batch_size=batch_size, **options
        )
    )


def test_a_row_can_be_sampled_at_once_with_its_successor():
    buffer = small(gamma=0.5, n_step=3)
    state = buffer.init()
    assert not buffer.can_sample(state)
    assert buffer.size(state) == 0
    state = buffer.add(state, plain(1))
    assert buffer.can_sample(state)
    assert buffer.size(state) == 2
    batch = buffer.sample(state, jax.random.key(0))
    np.testing.assert_array_equal(batch.obs, 0.0)
    np.testing.assert_array_equal(batch.next_obs, 1.0)
    np.testing.assert_array_equal(batch.discount, 0.5)  # one step, though three were asked for: there are no more
    np.testing.assert_array_equal(batch.weight, 1.0)


def test_n_step_by_hand():
    """Column 0: rows 0..3 of an episode truncated at row 2. Column 1: terminated at row 2."""
    gamma = 0.5
    buffer = small(gamma=gamma, n_step=2, batch_size=256)
    end, reset = np.zeros((4, 2), bool), np.ones((4, 2), bool)
    end[2], reset[3] = True, False
    rollout = plain(4, mask=reset, truncated=end & [True, False], terminated=end & [False, True])
    batch = jax.device_get(buffer.sample(buffer.add(buffer.init(), rollout), jax.random.key(1)))
    expected = {  # (row, column): reward, discount, next_obs
        (0, 0): (0 + 0.5 * 1, 0.25, 2),
        (1, 0): (1 + 0.5 * 2, 0.25, 3),
        (2, 0): (2, 0.5, 3),
        (0, 1): (0 + 0.5 * 1, 0.25, 2),
        (1, 1): (1 + 0.5 * 2, 0.0, 3),
        (2, 1): (2, 0.0, 3),
    }
    live = batch.weight > 0
    index = batch.index[live]
    assert {(i // 2, i % 2) for i in index} == set(expected)
    got = np.stack([batch.reward, batch.discount, batch.next_obs[:, 0]], 1)[live]
    np.testing.assert_allclose(got, [expected[i // 2, i % 2] for i in index])


def test_a_random_number_of_steps_is_uniform():
    buffer = small(gamma=0.5, n_step=(2, 5), batch_size=1000, capacity=2000)
    state = buffer.add(buffer.init(), plain(900))
    batch = buffer.sample(state, jax.random.key(2))
    count = np.asarray(batch.next_obs - batch.obs)[:, 0]
    np.testing.assert_allclose([(count == n).mean() for n in range(1, 7)], [0, 0.25, 0.25, 0.25, 0.25, 0], atol=0.05)
    np.testing.assert_allclose(batch.discount, 0.5**count)


def test_sampling_is_uniform_over_the_rows_that_are_not_void():
    buffer = small(batch_size=512, capacity=40, gamma=0.9)
    state, rng = buffer.init(), np.random.default_rng(3)
    for start in range(0, 50, 5):  # goes round
        mask = rng.random((5, 2)) < 0.6
        state = buffer.add(state, plain(5, start, mask=mask))
    draw = jax.jit(jax.vmap(buffer.sample, (None, 0)))
    batch = jax.device_get(draw(state, jax.random.split(jax.random.key(4), 400)))
    live = batch.weight > 0
    slots, columns = np.divmod(batch.index[live], 2)
    valid = np.asarray(state.flags & 1, bool)
    valid[int(state.head)] = False  # the hole
    assert 15 < valid.sum() < 35
    counts = np.zeros((20, 2))
    np.add.at(counts, (slots, columns), 1)
    assert (counts[~valid] == 0).all()
    expected = live.sum() / valid.sum()
    assert ((counts[valid] - expected) ** 2 / expected).sum() < 1.9 * valid.sum()  # chi-square, p < 1e-3
    # of two candidates both must be void for a void sample
    void = 1 - valid.sum() / 38
    np.testing.assert_allclose(1 - live.mean(), void**2, rtol=0.05)
    # the rest weighs the same, 1 on average
    np.testing.assert_allclose(batch.weight.mean(-1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(batch.weight, live / live.mean(-1, keepdims=True), rtol=1e-6)


def test_a_replay_of_void_rows_cannot_be_sampled():
    buffer = small(gamma=0.9, capacity=16)
    void = np.zeros((2, 2), bool)
    state = buffer.add(buffer.init(), plain(2, mask=void))
    assert not buffer.can_sample(state)
    np.testing.assert_array_equal(buffer.sample(state, jax.random.key(0)).weight, 0.0)
    one = np.array([[True, False], [False, False]])
    state = buffer.add(state, plain(2, 2, mask=one))
    for start in range(4, 10, 2):  # until the one row that is not void is overwritten
        assert buffer.can_sample(state)
        assert (np.asarray(buffer.sample(state, jax.random.key(0)).weight) > 0).any()
        state = buffer.add(state, plain(2, start, mask=void))
    assert not buffer.can_sample(state)


@pytest.mark.parametrize("in_step", some_quick([True, False], True))
def test_what_does_not_continue_costs_a_slot_and_no_transition(in_step):
    """The newest row keeps its successor, in a void slot, and bootstraps from it; the new rows begin behind."""
    buffer = small(gamma=0.5, n_step=3, batch_size=256, in_step=in_step)
    state = buffer.add(buffer.init(), plain(3))
    state = buffer.add(state, plain(2, 100, contiguous=np.array([True, False])))
    batch = jax.device_get(buffer.sample(state, jax.random.key(0)))
    got = {
        int(batch.index[i]): (batch.reward[i], batch.discount[i], batch.next_obs[i, 0])
        for i in np.flatnonzero(batch.weight)
    }
    assert got[2 * 2 + 1] == (2.0, 0.5, 3.0)
    assert got[1 * 2 + 1] == (1.0 + 1.0, 0.25, 3.0)
    assert got[4 * 2 + 1] == (100 + 50.5, 0.25, 102.0)
    if in_step:  # the other column has the seam, too
        assert set(got) == {slot * 2 + column for slot in (0, 1, 2, 4, 5) for column in (0, 1)}
        assert got[2 * 2] == (2.0, 0.5, 3.0)
    else:
        assert set(got) == {0, 2, 4, 6, 8} | {1, 3, 5, 9, 11}
        assert got[1 * 2] == (1 + 1 + 25, 0.125, 101.0)
    assert buffer.size(state) == (12 if in_step else 11)
    assert buffer.live(state) == 10


def test_gamma_may_be_traced():
    def discount(gamma):
        buffer = small(gamma=gamma, n_step=2)
        return buffer.sample(buffer.add(buffer.init(), plain(8)), jax.random.key(0)).discount

    both = jax.jit(jax.vmap(discount))(jnp.array([0.5, 0.9]))
    assert not np.array_equal(both[0], both[1])
    np.testing.assert_allclose(both[1], discount(0.9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 5}, "replay.capacity: 5 is too small for 2 environments: at least 6"),
        ({"n_step": 0}, "replay.n_step: 0"),
        ({"n_step": (3, 2)}, r"replay.n_step: \(3, 2\)"),
        ({"frame_stack": ring.FrameStack(4)}, r"replay.frame_stack: no 4 frames on axis 0 of observations \[\(1,\)\]"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        small(gamma=0.9, **options)


def test_a_rollout_that_does_not_fit_is_refused_while_tracing():
    buffer = small(gamma=0.9, capacity=20)
    jax.eval_shape(buffer.add, buffer.init(), plain(8))
    with pytest.raises(InputError, match=r"replay.capacity: 20 is too small for rollouts of 9 steps x 2 .*at least 22"):
        jax.eval_shape(buffer.add, buffer.init(), plain(9))
    with pytest.raises(ValueError, match="rollout: expected 2 environments, got 3"):
        jax.eval_shape(buffer.add, buffer.init(), plain(2, num_envs=3))
    with pytest.raises(ValueError, match=r"rollout.obs: expected .*float32.* got .*float16"):
        jax.eval_shape(buffer.add, buffer.init(), plain(2, obs=np.zeros((2, 2, 1), np.float16)))
    with pytest.raises(ValueError, match=r"rollout.extras: expected \['value'\]"):
        buffer = small(gamma=0.9, extras={"value": struct(())})
        jax.eval_shape(buffer.add, buffer.init(), plain(2))
