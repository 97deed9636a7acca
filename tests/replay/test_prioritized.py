"""Priorities: who is drawn how often, with which weight, and who never."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from replay_oracle import Oracle, World, assert_trees_equal, jitted, plain, struct

from jrl.replay import prioritized, ring, sum_tree


def small(batch_size=64, num_envs=2, capacity=40, alpha=1.0, beta=1.0, **options):
    sizes = {"capacity": capacity, "num_envs": num_envs, "batch_size": batch_size}
    options = {"gamma": 0.9, "eps": 0.0, **options}
    return jitted(prioritized.make(struct((1,)), struct((), "int32"), alpha=alpha, beta=beta, **sizes, **options))


def leaves(state, columns=2):
    """[C, B]"""
    flags = state.rows.flags
    return np.asarray(sum_tree.get(state.priorities.tree, jnp.arange(flags.size))).reshape(flags.shape)


@jax.jit
def drawn(alpha, priority, keys):
    """What is drawn of 40 rows with these priorities."""
    buffer = prioritized.make(
        struct((1,)), struct((), "int32"), alpha=alpha, beta=0.7, eps=0.0, capacity=60, num_envs=2, batch_size=512,
        gamma=0.9,
    )  # fmt: skip
    state = buffer.set_priority(buffer.add(buffer.init(), plain(20)), jnp.arange(40), priority)
    return jax.vmap(buffer.sample, (None, 0))(state, keys)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_rows_are_drawn_in_proportion_to_priority(alpha):
    rng = np.random.default_rng(0)
    priority = rng.uniform(0.1, 4.0, 40).astype(np.float32)
    batch = jax.device_get(drawn(alpha, priority, jax.random.split(jax.random.key(1), 400)))
    share = np.bincount(batch.index.reshape(-1), minlength=60) / batch.index.size
    probability = priority**alpha / (priority**alpha).sum()
    assert (share[40:] == 0).all()
    np.testing.assert_allclose(share[:40], probability, rtol=0.03)
    # arXiv:1511.05952, section 3.4, over the batch
    weight = (40 * probability[batch.index]) ** -0.7
    np.testing.assert_allclose(batch.weight, weight / weight.max(-1, keepdims=True), rtol=1e-4)


@pytest.mark.slow
def test_a_deep_tree_is_drawn_from_anew_half_way_down(monkeypatch):
    """As one of more than 2^20 rows: in the same proportion, and other rows than the first draw alone leads to."""
    priority = np.random.default_rng(0).uniform(0.1, 4.0, 40).astype(np.float32)

    keys = jax.random.split(jax.random.key(1), 400)
    once = np.asarray(drawn(1.0, priority, keys).index)
    monkeypatch.setattr(sum_tree, "is_deep", lambda size: True)
    again = np.asarray(jax.jit(lambda *given: drawn.__wrapped__(*given))(1.0, priority, keys).index)
    assert (once != again).mean() > 0.5
    probability = np.pad(priority / priority.sum(), (0, 20))
    deviation = np.sqrt(probability / again.size)  # of independent draws; those in strata have less
    assert (np.abs(np.bincount(again.reshape(-1), minlength=60) / again.size - probability) <= 5 * deviation).all()


def test_samples_are_stratified():
    """Of equal priorities, N draws from N equal parts are each row once."""
    buffer = small(batch_size=32, capacity=60)
    state = buffer.add(buffer.init(), plain(16))
    index = buffer.sample(state, jax.random.key(0)).index
    np.testing.assert_array_equal(np.sort(index), np.arange(32))


def test_new_rows_enter_at_the_highest_priority_so_far():
    buffer = small(alpha=0.5, eps=0.25)
    state = buffer.add(buffer.init(), plain(2))
    np.testing.assert_array_equal(leaves(state)[:2], 1.0)
    state = buffer.set_priority(state, jnp.array([0, 1]), jnp.array([3.75, 8.75]))
    np.testing.assert_allclose(leaves(state)[:2], [[2.0, 3.0], [1.0, 1.0]])
    state = buffer.set_priority(state, jnp.array([1]), jnp.array([0.0]))  # what was highest counts, not what is
    state = buffer.add(state, plain(1, 2))
    np.testing.assert_allclose(leaves(state)[:4], [[2.0, 0.5], [1.0, 1.0], [3.0, 3.0], [0.0, 0.0]])


def test_a_priority_of_zero_can_still_be_drawn():
    buffer = small(capacity=10, batch_size=8)
    state = buffer.add(buffer.init(), plain(2))
    state = buffer.set_priority(state, jnp.arange(4), jnp.zeros(4))
    assert buffer.can_sample(state)
    batch = buffer.sample(state, jax.random.key(0))
    np.testing.assert_array_equal(batch.weight, 1.0)


@pytest.mark.parametrize(("stack", "in_step"), some_quick([(1, False), (3, True), (3, False)], (3, True)))
def test_who_can_be_drawn_after_random_adds(stack, in_step):
    """Exactly the rows that are not void and whose successor and frames are there; what is drawn is as in a list."""
    slots, gamma = 14, 0.9
    world, oracle = World(3, 5, stack), Oracle(3, stack, in_step)
    buffer = jitted(
        prioritized.make(
            world.obs,
            world.action,
            capacity=slots * 3,
            num_envs=3,
            batch_size=64,
            gamma=gamma,
            n_step=3,
            alpha=0.6,
            beta=0.4,
            frame_stack=ring.FrameStack(stack),
            in_step=in_step,
        )
    )
    state, rng = buffer.init(), np.random.default_rng(2)
    assert not buffer.can_sample(state)
    for i in range(30):
        restart = range(3) if i == 0 else [b for b in range(3) if rng.random() < 0.2]
        steps = int(rng.choice([1, 1, 7]))
        count = None if in_step else [max(i == 0, min(steps, int(rng.integers(9)))) for _ in range(3)]
        rollout = world.rollout(steps, restart if in_step else [b for b in restart if count[b]], count)
        oracle.add(rollout)
        state = buffer.add(state, rollout)
        live = np.zeros((slots, 3), bool)
        for b, rows in enumerate(oracle.columns):
            for t in range(max(0, len(rows) - slots + stack), len(rows)):
                live[t % slots, b] = rows[t]["mask"]
        np.testing.assert_array_equal(leaves(state) > 0, live)
        assert buffer.can_sample(state) == live.any()
        batch = jax.device_get(buffer.sample(state, jax.random.key(i)))
        for n in range(0, 64, 7):
            slot, b = divmod(int(batch.index[n]), 3)
            end = len(oracle.columns[b])
            t = end - 1 - (end - 1 - slot) % slots
            got = jax.tree.map(lambda x, n=n: x[n], batch)
            assert_trees_equal((got.obs, got.action), (oracle.columns[b][t]["obs"], oracle.columns[b][t]["action"]))
            reward, discount, after = oracle.transition(b, t, 3, gamma)
            assert_trees_equal(got.next_obs, after)
            np.testing.assert_allclose((got.reward, got.discount), (reward, discount), rtol=1e-5, atol=1e-6)
        state = buffer.set_priority(state, batch.index, rng.exponential(size=64).astype(np.float32))
        np.testing.assert_array_equal(leaves(state) > 0, live)


def test_a_row_that_is_gone_takes_no_priority():
    """As when priorities come late: the row has been overwritten, or is none, in between."""
    buffer = small(capacity=20)
    state = buffer.add(buffer.init(), plain(4))
    state = buffer.add(state, plain(1, 4, contiguous=np.zeros(2, bool)))
    before = leaves(state)
    state = buffer.set_priority(state, jnp.array([4 * 2, 4 * 2 + 1, 6 * 2, 9 * 2]), jnp.full((4,), 5.0))
    np.testing.assert_array_equal(leaves(state), before)
    assert (before[[4, 6, 9]] == 0).all()
    assert (before[[3, 5]] > 0).all()


@pytest.mark.slow
def test_beta_follows_environment_steps_on_all_devices():
    beta = ((0.0, 0.0), (400.0, 1.0))
    buffer = small(beta=beta, num_devices=10, capacity=100, batch_size=16)
    state = buffer.init()
    for start in range(0, 20, 5):
        state = buffer.add(state, plain(5, start))
        state = buffer.set_priority(state, jnp.arange(4), jnp.array([1.0, 2.0, 3.0, 4.0]))
        batch = jax.device_get(buffer.sample(state, jax.random.key(start)))
        leaf = leaves(state).reshape(-1)[batch.index]
        expected = (leaf.min() / leaf) ** ((start + 5) * 2 * 10 / 400)
        np.testing.assert_allclose(batch.weight, expected, rtol=1e-4)


def test_the_step_counter_saturates():
    buffer = small()
    state = buffer.init()
    steps = np.uint32(2**32 - 3)
    state = state.replace(priorities=state.priorities.replace(steps=steps))
    for _ in range(2):
        state = buffer.add(state, plain(2))
    assert int(state.priorities.steps) == 2**32 - 1
