"""JaxMARL's environments under the contract of several agents, where that package is installed."""

import jax
import numpy as np
import pytest

from jrl import check_env, envs
from jrl.errors import InputError
from jrl.types import Box, Discrete

pytest.importorskip("jaxmarl")


@pytest.fixture(autouse=True)
def _ranks_as_theirs():
    with jax.numpy_rank_promotion("allow"):
        yield


SPREAD = "jaxmarl:MPE_simple_spread_v3"


def stepped(env, steps, action):
    """Results of so many steps, and the observations before the first."""
    step = jax.jit(env.step)
    state, first = jax.jit(env.reset)(jax.random.key(0))
    results = []
    for t in range(steps):
        state, result = step(state, action, jax.random.key(t + 1))
        results.append(jax.tree.map(np.asarray, result))
    return np.asarray(first), results


def test_the_step_limit_truncates_and_the_last_observation_is_kept():
    env = envs.make(SPREAD, num_envs=3)
    assert env.spec.agents == ("agent_0", "agent_1", "agent_2") and env.spec.num_envs == 9
    assert env.spec.observation == Box((18,)) and env.spec.action == Discrete(5) and env.spec.max_episode_steps == 25
    _, results = stepped(env, 52, np.zeros(9, np.int32))
    over = np.stack([result.several.over for result in results])
    np.testing.assert_array_equal(np.flatnonzero(over.all(1)), [24, 50])
    assert over.sum() == 6 and not any(result.terminated.any() for result in results)
    last, fresh = results[24], results[25]
    assert last.truncated.all() and fresh.several.absent.all() and not fresh.reward.any()
    # nobody pushed: the last positions are about those before, and the next game's are others
    np.testing.assert_allclose(last.obs[:, 2:4], results[23].obs[:, 2:4], atol=0.2)
    assert np.abs(fresh.obs[:, 2:4] - last.obs[:, 2:4]).max() > 0.2


def test_the_mean_return_of_random_agents():
    env = envs.make(SPREAD, num_envs=400)
    state, _ = jax.jit(env.reset)(jax.random.key(0))

    def body(carry, key):
        state, total = carry
        action = jax.random.randint(key, (1200,), 0, 5)
        state, result = env.step(state, action, key)
        return (state, total + result.reward), result.several.over

    keys = jax.random.split(jax.random.key(1), 25)
    (_, total), over = jax.jit(lambda carry: jax.lax.scan(body, carry, keys))((state, np.zeros(1200, np.float32)))
    sums = np.asarray(total).reshape(400, 3).sum(-1)
    assert over[-1].all() and abs(sums.mean() + 79.0) < 4 * sums.std() / 20 + 0.5  # -79.0 per game, -26.3 per agent


def test_a_true_end_before_the_limit_and_at_it():
    env = envs.make("jaxmarl:switch_riddle", num_envs=2)
    spec = env.spec
    _, told = stepped(env, 2, np.full(spec.num_envs, _tell(), np.int32))
    assert told[0].terminated.all() and not told[0].truncated.any() and told[1].several.absent.all()
    _, silent = stepped(env, spec.max_episode_steps, np.zeros(spec.num_envs, np.int32))
    assert silent[-1].truncated.all() and not silent[-1].terminated.any()


def _tell():
    import jaxmarl

    return jaxmarl.make("switch_riddle").game_actions["TELL"]


def test_a_horizon_is_a_limit():
    _, results = stepped(envs.make(SPREAD, num_envs=1, horizon=4), 4, np.zeros(3, np.int32))
    assert [bool(result.several.over[0]) for result in results] == [False, False, False, True]


def test_the_checker_finds_no_problem():
    report = check_env(SPREAD, steps=60)
    assert report.ok, report.problems


def test_unknown_names_are_refused():
    with pytest.raises(InputError, match="did you mean MPE_simple_spread_v3"):
        envs.make("jaxmarl:MPE_simple_spread_v4")


@pytest.mark.parametrize(
    ("name", "kinds", "sizes"),
    [
        ("MPE_simple_tag_v3", ((0, 1, 2), (3,)), (16, 14)),
        ("MPE_simple_speaker_listener_v4", ((0,), (1,)), (3, 11)),
    ],
)
def test_agents_of_different_spaces_have_columns_by_kind(name, kinds, sizes):
    env = envs.make(f"jaxmarl:{name}", num_envs=2)
    assert env.spec.kinds == kinds and tuple(part.shape[0] for part in env.spec.observation.items) == sizes
    state, obs = jax.jit(env.reset)(jax.random.key(0))
    assert [x.shape for x in obs] == [(2 * len(kind), size) for kind, size in zip(kinds, sizes, strict=True)]
    action = tuple(np.zeros(2 * len(kind), np.int32) for kind in kinds)
    _, result = jax.jit(env.step)(state, action, jax.random.key(1))
    assert result.reward.shape == (env.spec.num_envs,) and [x.shape for x in result.obs] == [x.shape for x in obs]


@pytest.mark.parametrize(("name", "size"), [("MPE_simple_spread_v3", 3 * 18), ("SMAX", 120)])
def test_the_view_of_all_is_the_environments_or_all_observations_joined(name, size):
    env = envs.make(f"jaxmarl:{name}", num_envs=2, state=True)
    _, obs = jax.jit(env.reset)(jax.random.key(0))
    count = len(env.spec.agents)
    state = np.asarray(obs["state"]).reshape(2, count, size)
    assert dict(env.spec.observation.items)["state"] == Box((size,))
    np.testing.assert_array_equal(state, np.repeat(state[:, :1], count, 1))
    if name != "SMAX":  # which has `world_state`
        np.testing.assert_array_equal(state[:, 0], np.asarray(obs["obs"]).reshape(2, size))
