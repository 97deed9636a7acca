"""EnvPool's own asynchronous mode: what each environment says is what it says in a pool that waits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from env_helpers import assert_same, random_actions

from jrl import envs
from jrl.envs import envpool_env

STEPS, NUM_ENVS, BATCH = 80, 7, 3


def make(id, **settings):
    return envs.make(id, backend="envpool", num_envs=NUM_ENVS, seed=5, **settings)


def streams(env, actions):
    """Per environment its first observation and its first STEPS rows; each takes its own actions in order."""
    rows, steps = [[] for _ in range(NUM_ENVS)], np.zeros(NUM_ENVS, int)
    env.reset()
    batches = set()
    while steps.min() <= STEPS:
        ids, result = env.recv()
        assert ids.dtype == np.int32 and len(set(ids)) == len(ids) == env.batch_size
        batches.add(tuple(ids))
        for row, i in enumerate(ids):
            rows[i].append(jax.tree.map(lambda x: x[row].copy(), list(result[:4])))  # noqa: B023  called at once
        env.send(actions[steps[ids] % STEPS, ids], ids)
        steps[ids] += 1
    assert len(batches) > 3  # they came in another order than they went
    return [column[: STEPS + 1] for column in rows]


@pytest.mark.parametrize(
    "id",
    [
        "CartPole-v1",
        "Pendulum-v1",  # behind an action transform
        "WalkerWalk-v1",  # float64 actions, dictionaries, and a reward that EnvPool repeats on reset rows
    ],
)
def test_equal_to_a_pool_that_waits(id):
    options = {"max_episode_steps": 25}
    waits = make(id, host=True, options=options)
    env = make(id, batch_size=BATCH, options=options)
    assert env.spec == waits.spec and env.batch_size == env.least == BATCH
    actions = random_actions(env.spec.action, STEPS, NUM_ENVS)
    found = streams(env, actions)
    first = waits.reset()
    results = [waits.step(action) for action in actions]
    assert sum((r.terminated | r.truncated).sum() for r in results) >= NUM_ENVS * 3
    for i, rows in enumerate(found):
        assert_same(rows[0][0], jax.tree.map(lambda x: x[i], first))  # noqa: B023
        assert rows[0][1] == 0 and not rows[0][2] and not rows[0][3]
        for row, result in zip(rows[1:], results, strict=True):
            assert_same(row, jax.tree.map(lambda x: x[i], list(result[:4])))  # noqa: B023
    env.close()
    waits.close()


def test_results_are_not_written_again():
    env = make("CartPole-v1", batch_size=BATCH)
    env.reset()
    kept = []
    for _ in range(50):
        ids, result = env.recv()
        kept.append((result, [x.copy() for x in result[:4]], ids, ids.copy()))
        env.send(np.zeros(BATCH, np.int32), ids)
    env.close()
    for result, copies, ids, same in kept:
        np.testing.assert_array_equal(ids, same)
        for x, y in zip(result, copies):
            np.testing.assert_array_equal(x, y)


def test_a_reset_in_the_middle_begins_all_episodes():
    """Also of those that are under way, whose results are lost; every environment comes once."""
    env = make("CartPole-v1", batch_size=BATCH)
    env.reset()
    for _ in range(40):  # 20 steps or so each: the pole leans
        ids, result = env.recv()
        env.send(np.ones(BATCH, np.int32), ids)
    env.recv()
    for _ in range(3):
        env.reset()
        seen = []
        while len(seen) <= NUM_ENVS - BATCH:
            ids, result = env.recv()
            assert (np.abs(result.obs) <= 0.05).all() and not result.reward.any()
            seen += ids.tolist()
        assert len(set(seen)) == len(seen)
        env.send(np.ones(len(ids), np.int32), ids)
    env.close()


def test_what_would_wait_for_ever_is_refused():
    env = make("CartPole-v1", batch_size=BATCH)
    env.reset()
    ids = np.concatenate([env.recv()[0] for _ in range(2)])
    with pytest.raises(RuntimeError, match="recv: expected 3 environments under way, got 1"):
        env.recv()
    rest = sorted({*range(NUM_ENVS)} - {*ids.tolist()})
    for wrong in (rest, [*ids[:1], *ids[:1]]):
        with pytest.raises(ValueError, match="under way"):
            env.send(np.zeros(len(wrong), np.int32), wrong)
    for wrong in (np.zeros(3, np.int32), np.full(2, 2, np.int32), np.zeros(2, np.float32), np.zeros((2, 1), np.int32)):
        with pytest.raises(ValueError, match="actions must"):
            env.send(wrong, ids[:2])
    env.send(np.zeros(2, np.int32), ids[:2])
    assert sorted(env.recv()[0]) == sorted([*rest, *ids[:2]])
    env.close()


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_a_reset_row_has_no_reward_whatever_stands_there(xp):
    found = envpool_env._reward(xp.asarray([np.nan, 2.0]), {"elapsed_step": xp.asarray([0, 3])})
    np.testing.assert_array_equal(found, [0.0, 2.0])
    assert found.dtype == np.float32
