"""Frames, previous actions and rewards in observations: counters worked out by hand, and a plain loop over any rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from env_helpers import KINDS, Stepper, random_actions
from test_limits import counter  # its two environments end after 5 and 2 steps, show and pay the steps so far

from jrl import envs, spaces
from jrl.envs.history import add_history as option
from jrl.envs.history import build_history
from jrl.envs.jax_env import build
from jrl.envs.transform import transformed
from jrl.types import Box, Dict, Discrete, EnvSpec, InputError, JaxEnv, MultiDiscrete, Tuple, element

RESTART = envs.OnFailure(restart=True)

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*", "ignore::UserWarning:gymnasium")


def walk(env, actions, seed=0):
    """Observations [T + 1, B, *] from a reset on, and the StepResults [T, B] of `actions` [T, B]."""
    stepper = Stepper(env)
    try:
        if stepper.graph:
            key = jax.random.key(seed)
            stepper._state, first = (jax.jit(env.reset) if env.pure else env.reset)(key)
        else:
            first = stepper.reset()
        rows = [stepper.step(action) for action in actions]
    finally:
        env.close()
    stack = lambda *x: np.stack([np.asarray(y) for y in x])
    return jax.tree.map(stack, first, *[row.obs for row in rows]), jax.tree.map(stack, *rows)


def looped(obs, result, actions, n):
    """What the rows of a plain environment should become: frames, previous actions, previous rewards, by a loop."""
    frames, prev_action, prev_reward = [np.zeros((*obs.shape[:2], n, *obs.shape[2:]), obs.dtype)], [], []
    frames, steps, num_envs = frames[0], len(actions), obs.shape[1]
    prev_action = np.zeros((steps + 1, num_envs, *actions.shape[2:]), actions.dtype)
    prev_reward = np.zeros((steps + 1, num_envs), np.float32)
    for i in range(num_envs):
        begun = 0
        for t in range(steps + 1):
            ended = t > 1 and (result.terminated[t - 2, i] or result.truncated[t - 2, i])
            failed = t > 0 and result.failed is not None and result.failed[t - 1, i]
            if ended or failed:
                begun = t
            for k in range(n):
                frames[t, i, n - 1 - k] = obs[max(t - k, begun), i]
            if t > begun:
                prev_action[t, i], prev_reward[t, i] = actions[t - 1, i], result.reward[t - 1, i]
    return {"obs": frames, "prev_action": prev_action, "prev_reward": prev_reward}


def make(kind):
    if kind == "jax":
        return build(counter(), 2)
    ready = {"remote_worker_envs": True, "batch_wait_ms": 0.0} if kind == "ready_workers" else {}
    return envs.make("counter_env:Counter", num_envs=2, **ready)


def remember(env, **how):
    return transformed(env, partial(option, **how))


ALL = {"frame_stack": 3, "prev_action": True, "prev_reward": True}


@pytest.mark.parametrize("kind", ["jax", "gymnasium", "ready_workers"])
def test_by_hand_across_ends(kind):
    """The second counter ends with its step 2: row 3 shows the final observation's successor, the first of the next."""
    env = remember(make(kind), **ALL)
    assert env.spec.observation == Dict(
        (("obs", Box((3, 1), *_bounds(kind))), ("prev_action", Discrete(2)), ("prev_reward", Box(())))
    )
    actions = np.ones((6, 2), np.int32)
    obs, result = walk(env, actions)
    assert obs["obs"].dtype == obs["prev_reward"].dtype == np.float32 and obs["prev_action"].dtype == np.int32
    assert obs["obs"][:, 1, :, 0].tolist() == [
        [0, 0, 0], [0, 0, 1], [0, 1, 2], [0, 0, 0], [0, 0, 1], [0, 1, 2], [0, 0, 0]
    ]  # fmt: skip
    assert obs["obs"][:, 0, :, 0].tolist() == [
        [0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [0, 0, 0]
    ]  # fmt: skip
    assert obs["prev_action"].T.tolist() == [[0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 1, 1, 0]]
    assert obs["prev_reward"].T.tolist() == [[0, 1, 2, 3, 4, 5, 0], [0, 1, 2, 0, 1, 2, 0]]
    assert result.terminated.T.tolist() == [[t == 4 for t in range(6)], [t in (1, 4) for t in range(6)]]
    assert result.reward.T.tolist() == [[1, 2, 3, 4, 5, 0], [1, 2, 0, 1, 2, 0]]


def _bounds(kind):
    return ("float32",) if kind == "jax" else ("float32", 0.0, 99.0)


@pytest.mark.parametrize("kind", ["program", "host", "ready_host", "jax"])
def test_equal_to_a_plain_loop(kind):
    """On every interface, over the ends and time limits of CartPole and with continuous actions."""
    how = KINDS[kind] | ({"batch_size": 1} if kind == "ready_host" else {})
    for id, limit in (("CartPole-v1", 30),) if kind != "host" else (("CartPole-v1", 30), ("Pendulum-v1", 20)):
        made = lambda: envs.make(id, num_envs=3, options={"max_episode_steps": limit}, **how)  # noqa: B023
        env = remember(made(), **ALL)
        actions = random_actions(env.spec.action, 70, 3)
        plain, rows = walk(made(), actions)
        obs, result = walk(env, actions)
        assert (rows.terminated | rows.truncated).sum() > 5
        for name, expected in looped(plain, rows, actions, 3).items():
            np.testing.assert_array_equal(obs[name], expected, err_msg=name)
            assert obs[name].dtype == expected.dtype
        for a, b in zip(result[1:4], rows[1:4]):
            np.testing.assert_array_equal(a, b)


def test_a_failed_row_begins_an_episode():
    make = lambda: envs.make("faulty_envs:Crashing", num_envs=3, options={"p_step": 0.03}, on_failure=RESTART)
    actions = random_actions(Discrete(2), 120, 3)
    plain, rows = walk(make(), actions)
    obs, result = walk(remember(make(), **ALL), actions)
    assert rows.failed.sum() > 3 and np.array_equal(result.failed, rows.failed)
    for name, expected in looped(plain, rows, actions, 3).items():
        np.testing.assert_array_equal(obs[name], expected, err_msg=name)
    assert (obs["prev_action"][1:][rows.failed] == 0).all()


# ---------------------------------------------------------------- any space


OBSERVATION = Dict(
    (
        ("vector", Box((2,), "float32", (0.0, -1.0), (1.0, 5.0))),
        ("scalar", Box((), "int8", -3.0, 3.0)),
        ("action_mask", Box((3,), "uint8", 0.0, 1.0)),
        (
            "images",
            Tuple((Box((5, 4), "uint8", 0.0, 255.0), Box((5, 4, 3), "uint8", 0.0, 255.0), Box((3, 5, 4), "uint8"))),
        ),
        ("word", MultiDiscrete((3, 3))),
    )
)


def sample(space, rng, n):
    return jax.tree.map(lambda x: rng.integers(0, 3, (n, *x.shape)).astype(x.dtype), element(space))


@pytest.mark.parametrize("xp", [np, jnp])
def test_what_is_stacked_and_how(xp):
    found = build_history(EnvSpec(OBSERVATION, Dict((("a", Discrete(3)),)), 2), frame_stack=2, prev_action=True)
    shapes = {path: leaf.shape for path, leaf in spaces.leaves(found.spec.observation)}
    assert shapes == {
        "vector": (2, 2), "scalar": (2,), "action_mask": (3,), "word": (2,), "prev_action/a": (),
        "images/0": (2, 5, 4), "images/1": (5, 4, 6), "images/2": (6, 5, 4),
    }  # fmt: skip
    low, high = found.spec.observation["vector"].bounds()
    assert low.tolist() == [[0, -1], [0, -1]] and high.tolist() == [[1, 5], [1, 5]]
    rng = np.random.default_rng(0)
    old, new = (jax.tree.map(xp.asarray, sample(OBSERVATION, rng, 2)) for _ in range(2))
    action, reward = {"a": xp.asarray([1, 2], "int32")}, xp.zeros(2, "float32")
    see = found.see if xp is np else jax.jit(found.see)
    memory, first = see(found.empty(2), old, action, reward, xp.asarray([True, True]))
    assert first["prev_action"]["a"].tolist() == [0, 0]
    _, obs = see(memory, new, action, reward, xp.asarray([False, True]))  # the second begins anew
    for (path, leaf), x in zip(spaces.leaves(found.spec.observation), jax.tree.leaves(obs), strict=True):
        assert isinstance(x, np.ndarray if xp is np else jax.Array), path
        assert (x.shape, x.dtype) == ((2, *leaf.shape), leaf.dtype), path
    assert obs["prev_action"]["a"].tolist() == [1, 0]
    older = lambda x, y, axis, join: np.stack(
        [join([x[0], y[0]], axis), join([y[1], y[1]], axis)]
    )  # of each environment alone
    for got, x, y, axis, join in (
        (obs["vector"], old["vector"], new["vector"], 0, np.stack),
        (obs["scalar"], old["scalar"], new["scalar"], 0, np.stack),
        (obs["images"][0], old["images"][0], new["images"][0], 0, np.stack),
        (obs["images"][1], old["images"][1], new["images"][1], 2, np.concatenate),
        (obs["images"][2], old["images"][2], new["images"][2], 0, np.concatenate),
    ):
        np.testing.assert_array_equal(got, older(np.asarray(x), np.asarray(y), axis, join))
    for name in ("action_mask", "word"):
        np.testing.assert_array_equal(obs[name], new[name])


def test_nothing_to_remember_is_the_environment_itself():
    env = make("jax")
    assert remember(env) is env


# ---------------------------------------------------------------- in a program


def test_states_can_be_donated_and_hold_the_task():
    """State and observation share no buffer, after a jitted reset or an eager one; a task goes through."""
    env = remember(envs.make("Corridor-v0", backend="jax", num_envs=2), **ALL)
    assert isinstance(env, JaxEnv) and env.pure
    for reset in (env.reset, jax.jit(env.reset)):
        leaves = jax.tree.leaves(reset(jax.random.key(0)))
        assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)
    state, _ = env.reset(jax.random.key(0))
    assert env.get_task(env.set_task(state, 9.0)) == 9
    assert make("jax").set_task is None and remember(make("jax"), **ALL).set_task is None


def test_a_soft_horizon_begins_anew():
    """At a horizon of 3 the first counter goes on from 3; what its observation tells does not."""
    env = envs.make("test_limits:counter", backend="jax", num_envs=2, horizon=3, soft_horizon=True)
    obs, _ = walk(remember(env, frame_stack=2, prev_reward=True), np.ones((6, 2), np.int32))
    assert obs["obs"][:, 0, :, 0].tolist() == [[0, 0], [0, 1], [1, 2], [2, 3], [3, 3], [3, 4], [4, 5]]
    assert obs["prev_reward"][:, 0].tolist() == [0, 1, 2, 3, 0, 4, 5]


# ---------------------------------------------------------------- errors


def test_errors():
    spec = EnvSpec(Discrete(3), Discrete(2), 1)
    with pytest.raises(InputError, match=r"env\.frame_stack: expected an observation with a Box, got Discrete"):
        build_history(spec, frame_stack=2)
    mask = Dict((("action_mask", Box((2,))), ("place", Discrete(2))))
    with pytest.raises(InputError, match="with a Box, got Dict"):
        build_history(spec._replace(observation=mask), frame_stack=2)
    own = Dict((("prev_reward", Box(())),))
    with pytest.raises(InputError, match=r"network\.use_prev_reward: the observation has a part prev_reward"):
        build_history(spec._replace(observation=own), prev_reward=True)
