"""What the data did after each transition, of every row of a ring that wraps around, against a list of its rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from replay_oracle import Oracle, World, assert_trees_equal, plain, struct

from jrl.replay import prioritized, ring, sequences, storage
from jrl.types import NEXT_ACTION

B, SLOTS = 3, 14


def following(rows, t, steps):
    """The action of the row after a window of `steps` rows, or None: the plain loop."""
    end = t
    while end < min(t + steps, len(rows)):
        row = rows[end]
        end += 1
        if row["terminated"] or row["truncated"] or end == len(rows) or not rows[end]["mask"]:
            break
    return rows[end]["action"] if end < len(rows) and rows[end]["mask"] else None


ROWS = [(n_step, stack, in_step) for n_step, stack in ((1, 1), (3, 1), (1, 3)) for in_step in (True, False)]


@pytest.mark.parametrize(("n_step", "stack", "in_step"), some_quick(ROWS, (1, 3, True), (3, 1, False)))
def test_every_row_is_as_in_a_list(n_step, stack, in_step):
    world = World(B, 0, stack)
    rows = storage.make(
        world.obs,
        world.action,
        capacity=SLOTS * B,
        num_envs=B,
        gamma=0.9,
        n_step=n_step,
        frame_stack=ring.FrameStack(stack) if stack > 1 else None,
        in_step=in_step,
        next_action=True,
    )
    slot, column = (x.reshape(-1) for x in np.mgrid[:SLOTS, :B].astype(np.int32))
    look = jax.jit(lambda state: rows.transitions(state, slot, column, jnp.ones(slot.shape), jax.random.key(0)))
    add, oracle, state = jax.jit(rows.add), Oracle(B, stack, in_step), rows.init()
    rng, seen = np.random.default_rng(1), {True: 0, False: 0}
    for i in range(30):
        steps = int(rng.choice([1, 4]))
        restart = range(B) if i == 0 or rng.random() < 0.1 else []
        rollout = world.rollout(steps, restart)
        state = add(state, rollout)
        oracle.add(rollout)
        found = jax.device_get(look(state).extras[NEXT_ACTION])
        for b in range(B):
            kept = oracle.columns[b]
            for t in range(len(kept) - min(len(kept), SLOTS - stack), len(kept)):
                if not kept[t]["mask"]:
                    continue
                want, at = following(kept, t, n_step), (t % SLOTS) * B + b
                assert found["valid"][at] == (want is not None)
                seen[want is not None] += 1
                if want is not None:
                    assert_trees_equal(jax.tree.map(lambda x, at=at: x[at], found["action"]), want)
    assert min(seen.values()) > 100


def test_sequences_have_one_for_each_of_their_rows():
    """Of actions that count the steps it is the number after; none on the row before an end's and on the newest."""
    options = {"capacity": 120, "num_envs": 2, "batch_size": 64, "gamma": 0.9, "next_action": True}
    buffer = sequences.make(struct((1,)), struct((), "int32"), length=5, burn_in=2, **options)
    batch, steps = _sampled(buffer)
    known = batch.extras[NEXT_ACTION]
    assert known["action"].shape == known["valid"].shape == batch.weight.shape == (64, 5)
    live = np.asarray(batch.weight) > 0
    number = np.asarray(batch.action)
    want = live & (number % 10 != 8) & (number != steps - 1)
    np.testing.assert_array_equal(np.asarray(known["valid"])[live], want[live])
    np.testing.assert_array_equal(np.asarray(known["action"])[want], number[want] + 1)
    assert 0 < want.sum() < live.sum()


@pytest.mark.parametrize("make", some_quick([ring.make, prioritized.make], ring.make))
def test_buffers_hand_it_on_where_they_are_asked(make):
    options = {"capacity": 120, "num_envs": 2, "batch_size": 64, "gamma": 0.9}
    options |= {"alpha": 0.6, "beta": 0.4} if make is prioritized.make else {}
    buffer = make(struct((1,)), struct((), "int32"), next_action=True, **options)
    batch, steps = _sampled(buffer)
    known = batch.extras[NEXT_ACTION]
    number = np.asarray(batch.action)
    want = (number % 10 != 8) & (number != steps - 1)
    live = np.asarray(batch.weight) > 0
    np.testing.assert_array_equal(np.asarray(known["valid"])[live], want[live])
    np.testing.assert_array_equal(np.asarray(known["action"])[live & want], number[live & want] + 1)
    assert _sampled(make(struct((1,)), struct((), "int32"), **options))[0].extras == {}


def _sampled(buffer, steps=37):
    """A sample of two columns of so many rows: an episode's end on the ninth of ten rows, and a masked one behind."""
    number = np.broadcast_to(np.arange(steps, dtype=np.int32)[:, None], (steps, 2))
    rollout = plain(steps, action=number, truncated=number % 10 == 8, mask=number % 10 != 9)
    sample = jax.jit(lambda rollout: buffer.sample(buffer.add(buffer.init(), rollout), jax.random.key(3)))
    return jax.device_get(sample(rollout)), steps
