"""The five classic tasks are Gymnasium's: step for step, in their specs and where they start."""

import gymnasium
import jax
import numpy as np
import pytest
from env_helpers import kolmogorov_smirnov, random_actions

from jrl.envs.jax_env import build
from jrl.envs.jax_ids import load_definition
from jrl.types import Box, Discrete

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:gymnasium")
IDS = ["CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1"]
# of the states from which single steps are compared: beyond what random actions reach (walls, full speed, the goal)
RANGES = {
    "CartPole-v1": ([-2.4, -3, -0.21, -3], [2.4, 3, 0.21, 3]),
    "Pendulum-v1": ([-10, -8], [10, 8]),
    "MountainCar-v0": ([-1.2, -0.07], [0.6, 0.07]),
    "MountainCarContinuous-v0": ([-1.2, -0.07], [0.6, 0.07]),
    "Acrobot-v1": ([-np.pi, -np.pi, -4 * np.pi, -9 * np.pi], [np.pi, np.pi, 4 * np.pi, 9 * np.pi]),
}


def gymnasium_step(env, state, action):
    """One step of Gymnasium's environment from `state`: observation, reward, terminated, next state."""
    env.state = np.asarray(state, np.float64)
    env.steps_beyond_terminated = None  # of CartPole
    obs, reward, terminated, truncated, _ = env.step(action)
    assert not truncated
    return obs, reward, terminated, np.asarray(env.state)


def compare(task, env, state, action, tolerance=2e-5):
    """Steps both from states [B, k]; returns ours. Float32 against float64."""
    draws = np.zeros((task.num_draws, len(state)), np.float32)
    ours, reward, end = jax.jit(task.step)(tuple(np.asarray(state).T), action, draws)
    obs = np.asarray(task.observe(ours))
    theirs = [gymnasium_step(env, s, a if a.shape else int(a)) for s, a in zip(np.asarray(state), action)]
    np.testing.assert_allclose(obs, np.stack([t[0] for t in theirs]), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(reward, np.array([t[1] for t in theirs]), rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(end, [t[2] for t in theirs])
    ours = np.stack(ours, -1)  # angles included, which observations show up to whole turns
    np.testing.assert_allclose(ours, np.stack([t[3] for t in theirs]), rtol=tolerance, atol=tolerance)
    return ours, np.asarray(end)


@pytest.mark.parametrize("id", IDS)
def test_steps_equal_gymnasium_along_episodes(id):
    """Each step starts from our state, so that rounding cannot grow; an ended episode starts afresh."""
    task, env = load_definition(id, {}), gymnasium.make(id).unwrapped
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    fresh = lambda: np.stack(jax.jit(task.reset)(rng.random((task.num_draws, 4), np.float32)), -1)
    state, steps = fresh(), 300
    for action in random_actions(task.action, steps, 4):
        state, end = compare(task, env, state, action)
        state = np.where(end[:, None], fresh(), state)
    assert np.isfinite(state).all()


@pytest.mark.parametrize("id", IDS)
def test_steps_equal_gymnasium_from_anywhere(id):
    task, env = load_definition(id, {}), gymnasium.make(id).unwrapped
    env.reset(seed=0)
    low, high = (np.array(x) for x in RANGES[id])
    rng = np.random.default_rng(1)
    state = rng.uniform(low, high, (1500, len(low)))
    corner = rng.choice([0.0, 1.0], state.shape)
    state[:100] = (low + (high - low) * corner)[:100]  # the corners, too: walls and full speed
    action = random_actions(task.action, 1, len(state))[0]
    if isinstance(task.action, Box):
        action *= 1.5  # beyond the bounds, which the dynamics clip
    # Acrobot's arm at 28 rad/s, over 0.2 s, in four stages: rounding grows to some 5e-4
    tolerance = 1e-3 if id == "Acrobot-v1" else 2e-5
    _, end = compare(task, env, state.astype(np.float32), action, tolerance)
    assert id == "Pendulum-v1" or 0 < end.sum() < len(end)  # both sides of the end were seen


@pytest.mark.parametrize("id", IDS)
def test_spec_equals_gymnasium(id):
    spec = build(load_definition(id, {}), 3).spec
    theirs = gymnasium.make(id)
    assert spec.num_envs == 3
    assert spec.max_episode_steps == gymnasium.spec(id).max_episode_steps
    assert spec.observation.shape == theirs.observation_space.shape
    assert spec.observation.dtype == str(theirs.observation_space.dtype)
    np.testing.assert_allclose(spec.observation.bounds()[0], theirs.observation_space.low, rtol=1e-6)
    np.testing.assert_allclose(spec.observation.bounds()[1], theirs.observation_space.high, rtol=1e-6)
    if isinstance(theirs.action_space, gymnasium.spaces.Discrete):
        assert spec.action == Discrete(int(theirs.action_space.n))
    else:
        assert spec.action.shape == theirs.action_space.shape
        np.testing.assert_allclose(spec.action.bounds(), (theirs.action_space.low, theirs.action_space.high))


@pytest.mark.parametrize(
    "id", ["Pendulum-v1", *(pytest.param(id, marks=pytest.mark.slow) for id in IDS if id != "Pendulum-v1")]
)
def test_starts_are_distributed_as_gymnasiums(id):
    """The first start from the reset's key, later ones from a step's."""
    env = gymnasium.make(id).unwrapped
    theirs = []
    for seed in range(500):
        env.reset(seed=seed)
        theirs.append(np.asarray(env.state, np.float64))
    theirs = np.stack(theirs)
    low, high = theirs.min(0), theirs.max(0)
    margin = 0.02 * (high - low) + 1e-7  # 500 draws leave about 1/500 of the range at either end

    graph = build(load_definition(id, {})._replace(max_episode_steps=1), 4096)
    state, _ = jax.jit(graph.reset)(jax.random.key(0))
    starts = [np.stack(state.inner, -1)]
    action = np.zeros((4096, *graph.spec.action.shape), graph.spec.action.dtype)
    step = jax.jit(graph.step)
    for i in range(2):  # an episode of one step, then the row that resets
        state, _ = step(state, action, jax.random.key(1 + i))
    starts.append(np.stack(state.inner, -1))
    for ours in starts:
        assert (ours >= low - margin).all() and (ours <= high + margin).all()
        assert (ours.min(0) <= low + margin).all() and (ours.max(0) >= high - margin).all()
        for ours_i, theirs_i in zip(ours.T, theirs.T):  # 0.12: chance 1 in 10,000 when they are equal
            assert kolmogorov_smirnov(ours_i.astype(np.float64), theirs_i) < 0.12
    assert not np.array_equal(*starts)
    assert len(np.unique(starts[0][:, 0])) > 4000  # each environment its own start
