"""Relabelled transitions against a plain record of every episode, on rings that wrap around."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from replay_oracle import Oracle, World, assert_trees_equal, struct

from jrl.replay import prioritized, ring, storage
from jrl.replay.hindsight import Hindsight

B, SLOTS, GAMMA, SHARE = 3, 14, 0.9, 0.75


def goal_reward(achieved, desired):
    """For numpy and jax. Achieved goals are positive integers, all different; stored goals are negative."""
    return (achieved - desired)[:, 0] / 2, (achieved * desired)[:, 0] % 4 == 1


class Goals(World):
    """A World with goals. Some of its ends are those of the stored goal, the others have another reason."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.obs |= {"achieved_goal": struct((1,)), "desired_goal": struct((1,))}

    def _observe(self, b):
        obs = super()._observe(b)
        achieved = obs["place"][:1]
        return {**obs, "achieved_goal": achieved, "desired_goal": -np.floor(achieved / 3) - 1}


def episode(rows, t, kept):
    """The first and the last row of the episode of row t, among rows from `kept` on."""
    goes_on = lambda t: rows[t]["mask"] and not (rows[t]["terminated"] or rows[t]["truncated"])
    first, last = t, t
    while first > kept and goes_on(first - 1):
        first -= 1
    while last + 1 < len(rows) and goes_on(last) and rows[last + 1]["mask"]:
        last += 1
    return first, last


def goals_of(strategy, first, t, last):
    """The rows whose next observation may give the goal of row t."""
    return {"future": range(t, last + 1), "final": [last], "episode": range(first, last + 1)}[strategy]


def transition(rows, t, steps, goal):
    """reward, discount and next observation under a goal; None: the stored goals."""
    total, discount = 0.0, 1.0
    for i, row in enumerate(rows[t : t + steps]):
        if i > 0 and not row["mask"]:
            break
        last, after, end = row, row["next_obs"]["achieved_goal"][None], row["terminated"]
        reward = row["reward"]
        if goal is not None:
            (reward,), (at_goal,) = goal_reward(after, goal[None])
            _, (explained,) = goal_reward(after, row["obs"]["desired_goal"][None])
            end = at_goal or (end and not explained)
        total, discount = total + discount * reward, discount * GAMMA
        if end:
            return total, 0.0, row["next_obs"]
        if row["terminated"] or row["truncated"]:
            break
    return total, discount, last["next_obs"]


CASES = [
    (strategy, n_step, stack, in_step)
    for strategy in ("future", "final", "episode")
    for n_step, stack in ((1, 1), (3, 1), (1, 3))
    for in_step in (True, False)
]


@pytest.mark.parametrize(
    ("strategy", "n_step", "stack", "in_step"), some_quick(CASES, ("future", 3, 1, False), ("episode", 1, 3, True))
)
def test_every_relabelled_transition_is_as_in_a_list(strategy, n_step, stack, in_step):
    """Seams, resets, padding and the ring's end: the goal is of the same episode, reward and end are those of it."""
    world = Goals(B, 0, stack)
    rows = storage.make(
        world.obs,
        world.action,
        capacity=SLOTS * B,
        num_envs=B,
        gamma=GAMMA,
        n_step=n_step,
        frame_stack=ring.FrameStack(stack) if stack > 1 else None,
        in_step=in_step,
        hindsight=Hindsight(strategy, SHARE, goal_reward),
    )
    slot, column = (x.reshape(-1) for x in np.mgrid[:SLOTS, :B].astype(np.int32))
    keys = jax.random.split(jax.random.key(0), 150)
    read = lambda state, key: rows.transitions(state, slot, column, jnp.ones(slot.shape), key)
    look = jax.jit(jax.vmap(read, (None, 0)))
    add, oracle, state = jax.jit(rows.add), Oracle(B, stack, in_step), rows.init()
    rng, heads = np.random.default_rng(1), np.zeros(B, int)
    count, seen = collections.Counter(), collections.Counter()
    for i in range(30):
        steps = int(rng.choice([1, 4]))
        length = np.full(B, steps) if in_step else rng.integers(0, steps + 1, B)
        anew = (rng.random(1 if in_step else B) < 0.1) | (i in (0, 27))
        rollout = world.rollout(steps, np.flatnonzero(anew & (length > 0)), length)
        state = add(state, rollout)
        oracle.add(rollout)
        if i % 6 < 5:  # the last time behind a seam
            continue
        batch = jax.device_get(look(state, keys))
        heads = np.broadcast_to(np.asarray(state.head), (1, B))[0]
        for b, kept in enumerate(oracle.columns):
            oldest = max(0, len(kept) - (SLOTS - stack))
            for t in range(oldest, len(kept)):
                if not kept[t]["mask"]:
                    continue
                at = (heads[b] - len(kept) + t) % SLOTS * B + b
                first, last = episode(kept, t, oldest)
                wanted = {float(kept[j]["next_obs"]["achieved_goal"][0]) for j in goals_of(strategy, first, t, last)}
                desired = batch.obs["desired_goal"][:, at, 0]
                assert set(desired) == {*wanted, float(kept[t]["obs"]["desired_goal"][0])}  # each of them, no other
                count["new"] += (desired > 0).sum()
                count["all"] += len(desired)
                for goal in np.unique(desired):
                    k = np.flatnonzero(desired == goal)[0]
                    new = batch.obs["desired_goal"][k, at] if goal > 0 else None
                    total, discount, after = transition(kept, t, n_step, new)
                    np.testing.assert_allclose(batch.reward[k, at], total, rtol=1e-4)
                    np.testing.assert_allclose(batch.discount[k, at], discount, rtol=1e-5)
                    take = lambda tree, i=(k, at): jax.tree.map(lambda x: x[i], tree)
                    set_goal = lambda obs, new=new: obs if new is None else {**obs, "desired_goal": new}
                    assert_trees_equal(take(batch.obs), set_goal(kept[t]["obs"]))
                    assert_trees_equal(take(batch.next_obs), set_goal(after))
                    seen[new is not None, discount == 0] += 1
    assert abs(count["new"] / count["all"] - SHARE) < 0.01
    assert min(seen.values()) > 9 and len(seen) == 4


def test_new_goals_are_equally_likely():
    world = Goals(1, 0, 1, 0, 0.0)  # one episode without an end
    options = {"capacity": 12, "num_envs": 1, "batch_size": 4000, "gamma": GAMMA}
    buffer = ring.make(world.obs, world.action, hindsight=Hindsight("future", 1.0, goal_reward), **options)
    state = buffer.add(buffer.init(), world.rollout(10, [0]))
    batch = jax.device_get(jax.jit(buffer.sample)(state, jax.random.key(0)))
    steps = (batch.obs["desired_goal"] - batch.obs["achieved_goal"])[batch.index == 0, 0]
    values, counts = np.unique(steps, return_counts=True)
    distance = values / values.min()  # a step of this world adds the same number
    np.testing.assert_array_equal(distance, np.arange(1, 11))
    assert counts.min() > 0.6 * counts.mean()


def test_priorities_belong_to_rows_of_any_goal():
    world = Goals(2, 0)
    options = {"capacity": 40, "num_envs": 2, "batch_size": 64, "gamma": GAMMA, "alpha": 1.0, "beta": 0.0, "eps": 0.0}
    buffer = prioritized.make(world.obs, world.action, hindsight=Hindsight("final", 0.5, goal_reward), **options)
    state = buffer.add(buffer.init(), world.rollout(12, [0, 1]))
    batch = jax.jit(buffer.sample)(state, jax.random.key(0))
    one = int(batch.index[0])
    state = buffer.set_priority(state, batch.index, jnp.where(batch.index == one, 1.0, 0.0))
    again = jax.device_get(jax.jit(buffer.sample)(state, jax.random.key(1)))
    is_one = again.index == one
    assert is_one.sum() > 5
    assert len(np.unique(again.obs["desired_goal"][is_one])) == 2  # its stored goal, and its episode's last
