"""gymnax and brax under the contract, where they are installed."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from env_helpers import Stepper, Trajectory, random_actions

from jrl import config, envs, spaces
from jrl.algos import uniform
from jrl.envs import jax_ids, suites
from jrl.run.store import checkpoint
from jrl.types import Box, Discrete, EnvSpec, InputError, JaxEnv

LIMIT = 5


@pytest.fixture(autouse=True)
def ranks_of_packages():
    """The packages add axes implicitly, which the suite's settings refuse."""
    with jax.numpy_rank_promotion("allow"):
        yield


def require(module):
    """Skips the test unless a suite can be imported."""
    try:
        return suites.import_suite(module)
    except InputError as e:
        pytest.skip(str(e))


def train(*args, out):
    """Trains in a process: threads of a run do not have this file's `ranks_of_packages`."""
    command = [sys.executable, "-m", "jrl.train", *args, "--out", str(out)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


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
        ("xminigrid:MiniGrid-Empty-8x8", (7, 7, 2), Discrete(6), 256),
        pytest.param("navix:Navix-Empty-8x8-v0", (8, 8, 3), Discrete(7), None, marks=pytest.mark.slow),
        pytest.param("craftax:Craftax-Classic-Symbolic-v1", (1345,), Discrete(17), 10_000, marks=pytest.mark.slow),
        pytest.param("playground:CartpoleBalance", (5,), Box((1,), "float32", -1.0, 1.0), 1000, marks=pytest.mark.slow),
    ],
)
def test_the_contract(id, observation, action, limit):
    require({"playground": "mujoco_playground"}.get(name := id.split(":")[0], name))
    env = envs.make(id, num_envs=3)
    spec = env.spec
    assert isinstance(env, JaxEnv) and env.pure and callable(env.close) and hash(spec) is not None
    limit = limit or spec.max_episode_steps  # navix's depends on its version
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


def test_gymnax_options_reach_arguments_of_its_class():
    pytest.importorskip("gymnax")
    make = lambda size: envs.make("gymnax:DeepSea-bsuite", num_envs=2, backend="jax", options={"size": size})
    assert make(5).spec.observation.shape == (5, 5)
    with pytest.raises(InputError, match=r"env.options: gymnax:DeepSea-bsuite refuses {'size': 'five'}"):
        make("five")


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
        ("jumanji:Connector-v2", {}, ["jumanji:Connector-v2", "did you mean", "Connector-v3"]),
        ("navix:Navix-Empty-8x8-v1", {}, ["navix:Navix-Empty-8x8-v1", "did you mean", "Navix-Empty-8x8-v0"]),
        ("navix:Navix-Empty-8x8-v0", {"observation": "symbolc"}, ["env.options.observation", "did you mean symbolic"]),
        ("navix:Navix-Empty-8x8-v0", {"zzz": 1}, ["env.options", "navix:Navix-Empty-8x8-v0", "zzz"]),
    ],
)
def test_errors(id, options, parts):
    require(id.split(":")[0])
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


# ---------------------------------------------------------------- env.reset


class Counting:
    """Environment of one number in the interface of a suite: counts up from a random start, ends at a multiple of 5."""

    spec = EnvSpec(Box((2,), "float32"), Discrete(2), 70, None)

    @staticmethod
    def reset_one(key):
        start = jax.random.randint(key, (), 0, 10**6)
        state = {"start": start, "count": start % 5}
        return state, Counting.observe(state)

    @staticmethod
    def step_one(state, action, key):
        state = {**state, "count": state["count"] + 1}
        return state, Counting.observe(state), jnp.float32(1), state["count"] % 5 == 0

    @staticmethod
    def observe(state):
        return jnp.stack([state["start"], state["count"]]).astype(jnp.float32)


def starts(mode, steps=8):
    """Returns the starts [steps, B] of the present episodes, and which rows are resets, under a mode of `env.reset`."""
    env = suites.vectorize(Counting.spec, Counting.reset_one, Counting.step_one, mode)
    state, obs = jax.jit(env.reset)(jax.random.key(0))
    step, actions = jax.jit(env.step), jnp.zeros(70, jnp.int32)
    found, resets, ended = [np.asarray(obs[:, 0])], [np.zeros(70, bool)], np.zeros(70, bool)
    for i in range(steps):
        state, result = step(state, actions, jax.random.key(i))
        resets.append(ended)
        ended = np.asarray(result.terminated)
        found.append(np.asarray(result.obs[:, 0]))
        assert (np.asarray(result.obs[resets[-1], 1]) == found[-1][resets[-1]] % 5).all()
    return np.stack(found), np.stack(resets)


def test_each_environment_that_ended_gets_a_state_of_its_own_key():
    """As if all environments were reset by their keys, and the ended ones took theirs."""
    found, resets = starts("each")
    assert resets.any(1).sum() >= 5 and (found[1:][~resets[1:]] == found[:-1][~resets[1:]]).all()
    for i, row in enumerate(resets[1:]):
        keys = jax.random.split(jax.random.split(jax.random.key(i))[1], 70)
        expected = np.asarray(jax.vmap(Counting.reset_one)(keys)[1][:, 0])
        np.testing.assert_array_equal(found[i + 1][row], expected[row])


def test_ended_environments_share_new_states_or_return_to_the_first():
    found, resets = starts("shared(3)")
    for row, is_reset in zip(found, resets):
        if is_reset.sum() > 6:
            assert len({*row[is_reset]}) == 3
    found, resets = starts("first")
    assert resets.any() and (found == found[0]).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "gymnax:CartPole-v1", "reset": "shared(0)"}, r"env.reset: expected each, first or shared\(k\)"),
        ({"id": "CartPole-v1", "backend": "jax", "reset": "first"}, "env.reset: only single agents of suites in JAX"),
        ({"id": "CartPole-v1", "backend": "gymnasium", "reset": "first"}, "env.reset: only single agents of suites"),
    ],
)
def test_resets_that_cannot_be_shared(settings, message):
    with pytest.raises(InputError, match=message):
        envs.make(**{"env": settings.pop("id"), **settings})


@pytest.mark.parametrize("mode", ["each", "shared(2)", "first"])
def test_a_checkpoint_holds_random_keys_and_arrays_without_elements(mode, tmp_path):
    """As in the states of jumanji (keys) and playground (empty arrays); the environment goes on the same."""

    def reset_one(key):
        key, own = jax.random.split(key)
        return {"key": own, "none": jnp.zeros((0, 3), jnp.int32), "x": jax.random.uniform(key)}, jnp.zeros(2)

    def step_one(state, action, key):
        own, key = jax.random.split(state["key"])
        x = state["x"] + jax.random.uniform(key) + state["none"].sum()
        return {**state, "key": own, "x": x}, jnp.stack([x, state["x"]]), x, x > 2

    env = suites.vectorize(EnvSpec(Box((2,)), Discrete(2), 4, 5), reset_one, step_one, mode)
    action, step = jnp.zeros(4, jnp.int32), jax.jit(env.step)
    state, _ = env.reset(jax.random.key(0))
    for i in range(3):
        state, _ = step(state, action, jax.random.key(i))
    meta = checkpoint.build_meta(config.load("ppo"), env.spec, counters={"iteration": 1, "env_steps": 1})
    checkpoint.write(tmp_path / "1", checkpoint.copy_to_host({"env_state": state}), meta)
    found = checkpoint.restore(tmp_path / "1", "env_state", jax.eval_shape(env.reset, jax.random.key(0))[0])
    for i in range(3, 12):
        (state, expected), (found, result) = (step(s, action, jax.random.key(i)) for s in (state, found))
        np.testing.assert_array_equal(result.obs, expected.obs)
    assert result.obs.any()


@pytest.mark.slow  # compiles for seconds
def test_states_of_suites_fit_into_a_checkpoint(tmp_path):
    """xminigrid keeps a random key in its state."""
    require("xminigrid")
    small = ["--set=env.num_envs=4", "--set=rollout.length=32", "--stop=env_steps=600"]
    train("ppo_xminigrid", *small, out=tmp_path / "run")
    assert list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("view", ["symbolic_first_person", "categorical", "rgb"])
@pytest.mark.slow  # compiles for seconds
def test_navix_shows_what_its_function_returns(view):
    """Also where an episode ends: navix's own step would begin the next one."""
    navix = require("navix")
    actions = random_actions(Discrete(7), 20, 2)
    found = run("navix:Navix-DoorKey-5x5-v0", actions, options={"max_episode_steps": 9, "observation": view})
    env = navix.make("Navix-DoorKey-5x5-v0", max_steps=99, observation_fn=getattr(navix.observations, view))
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 1), 2)  # as Stepper's first key
    for b in range(2):
        timestep = reset(keys[b])
        np.testing.assert_array_equal(found.first[b], timestep.observation)
        for t in range(9):
            timestep = step(timestep, actions[t, b])
            np.testing.assert_array_equal(found.obs[t, b], timestep.observation)
            assert found.reward[t, b] == timestep.reward
        assert found.truncated[8, b] and found.reset_row[9, b]


# ---------------------------------------------------------------- teams


@pytest.mark.parametrize(
    ("id", "fields"),
    [
        ("LevelBasedForaging-v0", {"agents_view"}),
        pytest.param("Connector-v3", set(), marks=pytest.mark.slow),
        pytest.param("Cleaner-v0", {"agents_locations"}, marks=pytest.mark.slow),
        pytest.param("SearchAndRescue-v0", {"searcher_views", "positions"}, marks=pytest.mark.slow),
    ],
)
def test_teams_of_jumanji_are_jumanji_itself(id, fields):
    """The record of two games of 12 steps, with a limit of 8, equals jumanji's own steps."""
    jumanji = require("jumanji")
    games, limit = 2, 8
    env = envs.make(f"jumanji:{id}", num_envs=games, state=True, options={"max_episode_steps": limit})
    plain = jumanji.make(id, time_limit=limit)
    size, stepper = len(env.spec.agents), Stepper(env)
    assert size == plain.action_spec.shape[0] and env.spec.num_envs == games * size
    by_game = lambda x: x.reshape(games, size, *x.shape[1:])
    first = stepper.reset()
    obs, rng, record = first, np.random.default_rng(0), [(None, first, None)]
    for _ in range(12):
        if "action_mask" in obs:
            action = np.array([rng.choice(np.flatnonzero(m)) for m in obs["action_mask"]], np.int32)
        else:
            action = rng.uniform(-1, 1, (games * size, 2)).astype(np.float32)
        result = stepper.step(action)
        obs = result.obs
        record.append((by_game(action), obs, result))
    step = jax.jit(plain.step)
    for game, key in enumerate(jax.random.split(jax.random.fold_in(jax.random.key(0), 1), games)):
        inner, timestep = plain.reset(key)
        acting = np.ones(size, bool)
        for t, (action, obs, result) in enumerate(record):
            if t > 0:
                inner, timestep = step(inner, action[game])
                reward = np.where(acting, np.broadcast_to(timestep.reward, size), 0)
                np.testing.assert_allclose(by_game(result.reward)[game], reward, rtol=1e-6)
                np.testing.assert_array_equal(by_game(result.several.absent)[game], ~acting)
                ends = by_game(result.terminated | result.truncated)[game]
                over = bool(timestep.last())
                assert result.several.over[game] == over
                acting &= ~ends
                assert not (over and acting.any())
            assert {*obs} == {*timestep.observation._fields, "state"}
            for name, x in obs.items():
                if name not in ("state", "action_mask"):
                    seen = np.asarray(getattr(timestep.observation, name))
                    expected = seen if name in fields else np.broadcast_to(seen, (size, *seen.shape))
                    np.testing.assert_allclose(by_game(x)[game], expected, rtol=1e-6)
            states = by_game(obs["state"])[game]
            assert (states == states[0]).all() and states[0].size > 1
            if t > 0 and over:
                break
        assert over and t <= limit
        _, _, after = record[t + 1]
        assert by_game(after.several.absent)[game].all() and not by_game(after.reward)[game].any()


@pytest.mark.slow  # compiles for seconds
@pytest.mark.parametrize("state", [False, True])
def test_a_team_of_jumanji_learns_with_one_policy_and_with_the_global_state(state, tmp_path):
    require("jumanji")
    asked = ["multi_agent.state=true", "network.value_inputs=[state]"] if state else []
    settings = ["env.num_envs=4", "rollout.length=32", "multi_agent.agent_id=true", *asked]
    args = ["--algo=ppo", "--env=jumanji:LevelBasedForaging-v0", "--stop=env_steps=300"]
    train(*args, *(f"--set={x}" for x in settings), out=tmp_path / "run")


# ---------------------------------------------------------------- masks and games by turns


def play_at_random(id, steps, num_envs=32):
    """Plays allowed actions, drawn uniformly; returns the masks before each step, and the results."""
    env = envs.make(id, num_envs=num_envs)
    assert spaces.masks_actions(env.spec)

    def step(carry, key):
        state, obs = carry
        mask = obs["action_mask"] != 0
        action = uniform.sample(env.spec.action, key, mask.shape[:1], mask)
        state, result = env.step(state, action, key)
        return (state, result.obs), (mask, result)

    scan = lambda key: jax.lax.scan(step, env.reset(key), jax.random.split(key, steps))[1]
    masks, results = jax.device_get(jax.jit(scan)(jax.random.key(0)))
    return env.spec, masks, results


@pytest.mark.slow  # compiles for seconds
@pytest.mark.parametrize("id", ["jumanji:Snake-v1", "jumanji:Game2048-v1", "jumanji:Tetris-v0", "pgx:2048"])
def test_allowed_actions_end_no_game_by_themselves(id):
    pytest.importorskip(id.split(":")[0])
    spec, masks, results = play_at_random(id, 300)
    assert spec.agents == () and masks.shape[2:] == (spaces.num_choices(spec.action),) and masks.any(-1).all()
    assert results.terminated.any() and results.reward.sum() > 0 and np.isfinite(results.reward).all()


@pytest.mark.parametrize("id", ["pgx:tic_tac_toe", pytest.param("pgx:connect_four", marks=pytest.mark.slow)])
def test_games_of_pgx_are_played_by_turns(id):
    pytest.importorskip("pgx")
    spec, masks, results = play_at_random(id, 60)
    assert spec.agents == ("player_0", "player_1")
    two = lambda x: x.reshape(len(x), -1, 2, *x.shape[2:])
    masks, reward, ended, over = two(masks), two(results.reward), two(results.terminated), results.several.over
    waits = masks[..., -1]
    assert (masks[..., :-1].any(-1) != waits).all()
    assert (waits[1:].sum(-1) == 1)[~over[:-1]].all()  # one player moves, the other waits
    assert (reward.sum(-1) == 0).all() and (ended.all(-1) == over).all() and over.sum() > 30
    assert {*np.unique(reward)} == {-1.0, 0.0, 1.0}


def test_an_illegal_move_in_pgx_loses():
    """Waiting is illegal for the player that moves."""
    pytest.importorskip("pgx")
    env = envs.make("pgx:tic_tac_toe", num_envs=8)
    state, obs = env.reset(jax.random.key(0))
    state, _ = env.step(state, jnp.where(obs["action_mask"][:, -1] != 0, 9, 4), jax.random.key(1))
    moves = np.asarray(obs["action_mask"][:, -1] != 0)  # the other player moves now
    _, result = env.step(state, jnp.full(16, 9), jax.random.key(2))
    np.testing.assert_array_equal(result.reward, np.where(moves, -1.0, 1.0))
    assert result.terminated.all()
