"""Evaluation: exactly N episodes, the first of each slot, from a reset, without favour to short ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.envs.graph import Definition, build
from jrl.rollout.evaluate import evaluator
from jrl.types import ActOut, Box, Discrete, EnvSpec, StepResult


def act(actor, obs, carry, key, explore=True):
    action = jnp.full(obs.shape[:1], 1 if explore else 0, jnp.int32)
    return ActOut(action, carry, {})


def short_or_long() -> Definition:
    """Half of the episodes have one step and reward 0, the others ten steps and reward 1."""

    def step(state, action, draws):
        length, elapsed = state[:, 0], state[:, 1] + 1
        done = elapsed >= length
        return jnp.stack([length, elapsed], -1), jnp.where(done & (length > 1), 1.0, 0.0), done

    reset = lambda draws: jnp.stack([jnp.where(draws[0] < 0.5, 1.0, 10.0), jnp.zeros_like(draws[0])], -1)
    return Definition(Box((2,)), Discrete(2), None, 1, reset, step, lambda state: state)


@pytest.mark.parametrize(("num_envs", "num_episodes"), [(400, 400), (40, 400)])
def test_short_episodes_are_not_favoured(num_envs, num_episodes):
    """The first 400 to finish of 400 environments would be nearly all short: a mean of about 0.02 instead of 0.5."""
    evaluate = evaluator(build(short_or_long(), num_envs), act, num_episodes=num_episodes)
    found = evaluate((), jax.random.key(0))
    assert found.returns.shape == found.lengths.shape == (num_episodes,)
    assert abs(found.returns.mean() - 0.5) < 4 * 0.5 / np.sqrt(num_episodes)
    np.testing.assert_array_equal(found.lengths, np.where(found.returns > 0, 10, 1))
    summary = found.summary()
    assert summary["episodes"] == num_episodes
    assert summary["return"] == pytest.approx(found.returns.mean())
    assert summary["length"] == pytest.approx(found.lengths.mean())
    assert (summary["return_min"], summary["return_max"]) == (0.0, 1.0)
    assert summary["return_std"] == pytest.approx(found.returns.std())


class Counting:
    """Host environments: episode k of slot b has b + k + 1 steps and gives 100 b + k on its last; then a reset row."""

    def __init__(self, num_envs):
        self.spec = EnvSpec(Box((1,)), Discrete(2), num_envs)
        self.resets, self.actions = 0, set()

    def reset(self):
        self.resets += 1
        self._episode, self._elapsed = (np.zeros(self.spec.num_envs, int) for _ in range(2))
        self._done = np.zeros(self.spec.num_envs, bool)
        return np.zeros((self.spec.num_envs, 1), np.float32)

    def step(self, action):
        self.actions |= set(action.tolist())
        slot = np.arange(self.spec.num_envs)
        self._episode += self._done
        self._elapsed = np.where(self._done, 0, self._elapsed + 1)
        end = ~self._done & (self._elapsed == slot + self._episode + 1)
        reward = np.where(end, 100.0 * slot + self._episode, 0).astype(np.float32)
        self._done = end
        truncated = end & (slot % 2 == 1)
        return StepResult(np.zeros((self.spec.num_envs, 1), np.float32), reward, end & ~truncated, truncated)

    def close(self):
        pass


def test_each_slot_plays_its_first_episodes():
    env = Counting(4)
    evaluate = evaluator(env, act, num_episodes=10)
    expected = [0, 1, 2, 100, 101, 102, 200, 201, 300, 301]  # 3, 3, 2, 2
    for i in range(2):  # the second time as well: from a reset
        found = evaluate((), jax.random.key(i))
        np.testing.assert_array_equal(found.returns, expected)
        np.testing.assert_array_equal(found.lengths, [1, 2, 3, 2, 3, 4, 3, 4, 4, 5])
    assert env.resets == 2
    assert env.actions == {0}  # explore=False reached act


def test_exploration_on_request():
    env = Counting(2)
    evaluator(env, act, num_episodes=2, explore=True)((), jax.random.key(0))
    assert env.actions == {1}


def test_graph_environments_are_reset_and_follow_the_key():
    evaluate = evaluator(build(short_or_long(), 8), act, num_episodes=20)
    first, again, other = (evaluate((), jax.random.key(k)) for k in (0, 0, 1))
    np.testing.assert_array_equal(first.returns, again.returns)
    assert not np.array_equal(first.returns, other.returns)


def test_episodes_that_never_end():
    task = short_or_long()._replace(reset=lambda draws: jnp.full((draws.shape[1], 2), 1e9))
    task = task._replace(step=lambda state, action, draws: (state, state[:, 0], jnp.zeros(state.shape[:1], bool)))
    with pytest.raises(RuntimeError, match="0 of 3 episodes ended within 128 steps"):
        evaluator(build(task, 2), act, num_episodes=3, max_steps=128)((), jax.random.key(0))
