"""gymnax and brax under the contract, where they are installed."""

import sys

import jax
import numpy as np
import pytest
from env_helpers import Stepper, Trajectory, random_actions

from jrl import envs
from jrl.envs import jax_ids
from jrl.types import Box, Discrete, InputError, JaxEnv

LIMIT = 5


def run(id, actions, *, seed=0, options=None):
    stepper = Stepper(envs.make(id, num_envs=actions.shape[1], options=options), seed)
    first = stepper.reset()
    return Trajectory(first, *(np.stack(column) for column in zip(*[stepper.step(a)[:5] for a in actions])))


def assert_equal(a, b, upto=None):
    for x, y in zip(a, b):
        np.testing.assert_array_equal(x[:upto], y[:upto])


@pytest.mark.parametrize(
    ("id", "observation", "action", "limit"),
    [
        ("gymnax:CartPole-v1", (4,), Discrete(2), 500),
        pytest.param("gymnax:Pendulum-v1", (3,), Box((1,), "float32", -1.0, 1.0), 200, marks=pytest.mark.slow),
        pytest.param("gymnax:Catch-bsuite", (10, 5), Discrete(3), 1000, marks=pytest.mark.slow),
        pytest.param("gymnax:FourRooms-misc", (4,), Discrete(4), 500, marks=pytest.mark.slow),
        ("brax:fast", (2,), Box((1,), "float32", -1.0, 1.0), 1000),
    ],
)
def test_the_contract(id, observation, action, limit):
    pytest.importorskip(id.split(":")[0])
    env = envs.make(id, num_envs=3)
    spec = env.spec
    assert isinstance(env, JaxEnv) and env.pure and callable(env.close) and hash(spec) is not None
    assert spec.observation.shape == observation and spec.max_episode_steps == limit and spec.num_envs == 3
    assert (spec.action.shape, spec.action.dtype) == (action.shape, action.dtype)
    actions = random_actions(spec.action, 3 * (LIMIT + 1), 3)
    free = run(id, actions)
    limited = run(id, actions, options={"max_episode_steps": LIMIT})
    assert limited.obs.shape == (len(actions), 3, *observation)
    assert limited.first.dtype == limited.obs.dtype == np.dtype(spec.observation.dtype)
    assert limited.reward.dtype == np.float32 and limited.terminated.dtype == limited.truncated.dtype == bool
    if isinstance(spec.observation, Box):
        low, high = (b.astype(np.float32) for b in spec.observation.bounds())
        assert (limited.obs >= low - 1e-6).all() and (limited.obs <= high + 1e-6).all()
    assert_equal(limited, run(id, actions, options={"max_episode_steps": LIMIT}))
    # the limit truncates and does not terminate, and the final observation is the one that an unlimited run has there
    unended = ~free.done[: LIMIT - 1].any(0)
    assert unended.any()
    truncated = limited.truncated[:LIMIT, unended]
    assert truncated[-1].all() and not truncated[:-1].any() and not limited.terminated[:LIMIT, unended].any()
    for x, y in zip(limited[:3], free[:3]):
        np.testing.assert_array_equal(x[:LIMIT], y[:LIMIT])
    # the row after an end is void, whatever its action
    rows = limited.reset_row
    assert rows.sum() >= 2 * unended.sum()
    assert (limited.reward[rows] == 0).all() and not limited.done[rows].any()
    other = (actions + 1) % spec.action.n if isinstance(spec.action, Discrete) else -actions
    mask = rows.reshape(rows.shape + (1,) * len(spec.action.shape))
    flipped = np.where(mask, other, actions)
    assert_equal(limited, run(id, flipped, options={"max_episode_steps": LIMIT}))
    with pytest.raises(ValueError, match="actions must"):
        env.step(jax.jit(env.reset)(jax.random.key(0))[0], actions[0][:2], jax.random.key(1))


def test_gymnax_cartpole_ends_beyond_the_threshold_and_starts_afresh():
    pytest.importorskip("gymnax")
    trajectory = run("gymnax:CartPole-v1", np.ones((40, 4), np.int32))
    final = trajectory.obs[trajectory.terminated]
    assert len(final) >= 8 and (np.abs(final[:, 2]) > 12 * np.pi / 180).all()
    assert (np.abs(trajectory.obs[trajectory.reset_row]) <= 0.05).all() and not trajectory.truncated.any()
    starts = trajectory.obs[trajectory.reset_row]
    assert len({row.tobytes() for row in starts}) == len(starts)


@pytest.mark.parametrize("option", ["max_episode_steps", "max_steps_in_episode"])
def test_gymnax_shows_the_part_of_the_limit_that_is_over(option):
    """DiscountingChain observes time / limit: 0.1 after one step of ten, 1 at the end."""
    pytest.importorskip("gymnax")
    trajectory = run("gymnax:DiscountingChain-bsuite", np.zeros((10, 2), np.int32), options={option: 10})
    np.testing.assert_allclose(trajectory.obs[:, 0, 1], np.arange(1, 11) / 10, rtol=1e-6)
    assert trajectory.truncated[:, 0].tolist() == [False] * 9 + [True]


def test_gymnax_options_reach_its_parameters():
    """Gravity of no effect on the first step from rest, of some on later ones."""
    pytest.importorskip("gymnax")
    actions = np.ones((6, 2), np.int32)
    light, heavy = (run("gymnax:CartPole-v1", actions, options={"gravity": g}) for g in (1.0, 20.0))
    np.testing.assert_array_equal(light.first, heavy.first)
    assert not np.allclose(light.obs[-1], heavy.obs[-1])


def test_gymnax_limit_keeps_its_type():
    """BernoulliBandit's limit is a float, and its program has no place for an integer."""
    pytest.importorskip("gymnax")
    actions = np.zeros((3, 2), np.int32)
    assert run("gymnax:BernoulliBandit-misc", actions).obs.shape[:2] == (3, 2)


@pytest.mark.parametrize(
    ("id", "options", "parts"),
    [
        ("gymnax:CartPole-v2", {}, ["gymnax:CartPole-v2", "did you mean", "CartPole-v1"]),
        ("gymnax:CartPole-v1", {"gravty": 1.0}, ["env.options.gravty", "did you mean gravity"]),
        ("gymnax:CartPole-v1", {"max_episode_steps": 0}, ["max_episode_steps", "positive integer"]),
        ("brax:halfcheeta", {}, ["brax:halfcheeta", "did you mean", "halfcheetah"]),
        ("brax:inverted_pendulum", {"zzz": 1}, ["env.options", "brax:inverted_pendulum", "zzz"]),
    ],
)
def test_errors(id, options, parts):
    pytest.importorskip(id.split(":")[0])
    with pytest.raises(InputError) as caught:
        envs.make(id, num_envs=2, options=options)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("id", ["gymnax:CartPole-v1", "brax:ant"])
def test_a_package_that_is_not_installed(id, monkeypatch):
    monkeypatch.setattr(jax_ids.importlib.util, "find_spec", lambda name: None)
    package = id.split(":")[0]
    (error,) = envs.check(id)
    assert id in error and "not installed" in error and f"pip install {package}" in error
    with pytest.raises(InputError, match=f"pip install {package}"):
        envs.make(id, num_envs=2)


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ("import no_such_six", "gymnax needs no_such_six, which is not installed: pip install no_such_six"),
        ("from jax import no_such_name", "cannot import name 'no_such_name' from 'jax'"),
        ("import gymnax.no_such_part", "gymnax is not installed: pip install gymnax"),
    ],
)
def test_what_is_missing_is_named(text, mend, tmp_path, monkeypatch):
    """A package that is there may need another one that is not, or another version of one."""
    (tmp_path / "gymnax").mkdir()
    (tmp_path / "gymnax" / "__init__.py").write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "gymnax"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as e:
        envs.make("gymnax:CartPole-v1", num_envs=1)
    assert str(e.value).startswith("env.id gymnax:...: ") and mend in str(e.value)
