"""The contract of several agents: rows that are absent, ends of one's own, games that are over, worked out in numpy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from env_helpers import Stepper, assert_same, random_actions
from late_arrivals import late_arrivals

from jrl import envs
from jrl.envs.checker import check_env
from jrl.envs.classic import cartpole
from jrl.envs.jax_env import build as build_one
from jrl.envs.jax_ids import load_definition
from jrl.envs.multi_agent import MultiDefinition, build
from jrl.envs.multi_toys import copy_task, multi_agent_cartpole
from jrl.envs.toys import corridor
from jrl.ops import random
from jrl.types import Box, Dict, Discrete, InputError

GAMES = 5
# id: agents, options, steps that show ends, time limits and second games
CASES: dict[str, tuple[int, dict[str, Any], int]] = {
    "MultiAgentCartPole-v1": (3, {"num_agents": 3, "max_episode_steps": 30}, 120),
    "MultiAgentPendulum-v1": (2, {"max_episode_steps": 7}, 20),
    "TwoStepGame-v0": (2, {}, 12),
    "RockPaperScissors-v0": (2, {"moves": 4}, 20),
    "SimpleSpread-v0": (3, {"max_episode_steps": 6}, 20),
    "SwitchRiddle-v0": (4, {"num_agents": 4}, 60),
    "late_arrivals:late_arrivals": (4, {}, 20),
    "TicTacToe-v0": (2, {}, 60),
    "ConnectFour-v0": (2, {}, 60),
}
WITH_VIEW = sorted(set(CASES) - {"RockPaperScissors-v0"})
QUICK = ("MultiAgentPendulum-v1", "late_arrivals:late_arrivals", "TicTacToe-v0")  # turns, Boxes, agents that come late


def mostly_slow(ids):
    return [pytest.param(id, marks=[] if id in QUICK else [pytest.mark.slow]) for id in ids]


def make(id, num_envs=GAMES, **settings):
    options = {**CASES[id][1], **settings.pop("options", {})}
    return envs.make(id, backend="jax", num_envs=num_envs, options=options, **settings)


class Rows(NamedTuple):
    """T steps of G games with A agents."""

    first: Any  # [G, A, *]
    obs: Any  # [T, G, A, *]
    reward: np.ndarray  # [T, G, A], as the three after it
    terminated: np.ndarray
    truncated: np.ndarray
    absent: np.ndarray
    over: np.ndarray  # [T, G]

    @property
    def ended(self):
        return self.terminated | self.truncated


def rows(env, actions, seed=0):
    """Steps columns of actions [T, B, *] from a reset."""
    stepper, count = Stepper(env, seed), len(env.spec.agents)
    games = lambda x: x.reshape(env.spec.games, count, *x.shape[1:])
    first = jax.tree.map(games, stepper.reset())
    steps = []
    for action in actions:
        r = stepper.step(action)
        columns = jax.tree.map(games, (r.obs, r.reward, r.terminated, r.truncated, r.several.absent))
        steps.append((*columns, r.several.over))
    return Rows(first, *(jax.tree.map(lambda *x: np.stack(x), *part) for part in zip(*steps)))


def of_draws(fn, *arguments):
    """A definition's function, compiled, with numpy out."""
    return jax.tree.map(np.asarray, jax.jit(fn)(*arguments))


def allowed(definition, inner, actions, rng):
    """[G, A] i32: for each agent that has a mask, an action that it allows."""
    obs = of_draws(definition.observe, inner)
    if not isinstance(definition.observation, Dict):
        return actions
    mask = obs["action_mask"] != 0
    return (rng.random(mask.shape) * mask).argmax(-1).astype(np.int32)


def interpreted(definition, num_envs, seed, steps, rng, limit):
    """The contract again, one game and agent after the other: (actions [T, B, *], rows)."""
    count, key, calls = len(definition.agents), jax.random.key(seed), 0
    step_fn, reset_fn, observe = (jax.jit(fn) for fn in (definition.step, definition.reset, definition.observe))

    def draws():
        nonlocal calls
        calls += 1
        return random.uniform(jax.random.fold_in(key, calls), (definition.num_draws, num_envs))

    def here(inner):
        return None if definition.present is None else np.asarray(definition.present(inner))

    def put(i, into, new):
        for x, y in zip(jax.tree.leaves(into), jax.tree.leaves(new), strict=True):
            x[i] = y[i]

    writable = lambda tree: jax.tree.map(np.array, tree)
    inner = writable(reset_fn(draws()))
    first = writable(observe(inner))
    present = here(inner)
    alive = [[present is None or bool(present[i, k]) for k in range(count)] for i in range(num_envs)]
    resets, elapsed = [False] * num_envs, [0] * num_envs
    all_actions, found = [], []
    drawn = random_actions(definition.action, steps, num_envs * count, seed=int(rng.integers(1000)))
    for t in range(steps):
        action = drawn[t].reshape(num_envs, count, *drawn.shape[2:])
        action = allowed(definition, inner, action, rng)
        d = draws()
        moved, reward, ended = writable(step_fn(inner, action, d))
        begun = writable(reset_fn(d))
        out_reward, absent = np.zeros((num_envs, count), np.float32), np.ones((num_envs, count), bool)
        terminated, truncated = np.zeros_like(absent), np.zeros_like(absent)
        over = np.zeros(num_envs, bool)
        for i in range(num_envs):
            put(i, inner, begun if resets[i] else moved)
        present = here(inner)
        for i in range(num_envs):
            if resets[i]:
                resets[i], elapsed[i] = False, 0
                alive[i] = [present is None or bool(present[i, k]) for k in range(count)]
                continue
            elapsed[i] += 1
            for k in range(count):
                gone = present is not None and not present[i, k]
                if alive[i][k]:
                    absent[i, k], out_reward[i, k] = False, reward[i, k]
                    terminated[i, k] = ended[i, k] or gone
                    truncated[i, k] = elapsed[i] == limit and not terminated[i, k]
                    alive[i][k] = not terminated[i, k]
                else:
                    alive[i][k] = present is not None and not gone
            somebody = any(alive[i]) if present is None else present[i].any()
            over[i] = resets[i] = not somebody or elapsed[i] == limit
        all_actions.append(action.reshape(num_envs * count, *action.shape[2:]))
        found.append((writable(observe(inner)), out_reward, terminated, truncated, absent, over))
    return np.stack(all_actions), Rows(first, *(jax.tree.map(lambda *x: np.stack(x), *part) for part in zip(*found)))


def _definition(id, options):
    return load_definition(id, options) if id in envs.ids("jax") else late_arrivals(**options)


@pytest.mark.parametrize("id", mostly_slow(CASES))
def test_the_contract_is_that_of_a_plain_loop(id):
    count, options, steps = CASES[id]
    env = make(id, normalize_actions=False)
    own = {key: value for key, value in options.items() if key != "max_episode_steps"}
    definition = _definition(id, own)
    limit = options.get("max_episode_steps", definition.max_episode_steps)
    assert env.pure and env.spec.num_envs == GAMES * count and env.spec.games == GAMES
    assert env.spec.agents == definition.agents and len(env.spec.agents) == count
    assert env.spec.max_episode_steps == limit

    actions, expected = interpreted(definition, GAMES, 3, steps, np.random.default_rng(1), limit)
    found = rows(env, actions, seed=3)
    for name in ("terminated", "truncated", "absent", "over"):
        assert_same(getattr(found, name), getattr(expected, name))
    for a, b in zip(jax.tree.leaves((found.first, found.obs, found.reward)), jax.tree.leaves(
        (expected.first, expected.obs, expected.reward)), strict=True):  # fmt: skip
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

    # what the words say, whatever a loop may say
    assert found.over.sum() >= 2 * GAMES  # second games are over, too
    assert (found.reward[found.absent] == 0).all() and not found.ended[found.absent].any()
    assert found.absent[1:][found.ended[:-1]].all()  # an end is followed by an absent row
    assert found.absent[1:][found.over[:-1]].all() and not found.over[1:][found.over[:-1]].any()
    for k in range(count):  # who is there on the last row of a game ends on it
        assert (found.ended | found.absent)[..., k][found.over].all()
    if limit == options.get("max_episode_steps"):
        assert found.truncated.any()


@pytest.mark.parametrize("id", mostly_slow(CASES))
def test_what_is_done_on_absent_rows_changes_nothing(id):
    count, _, steps = CASES[id]
    env = make(id)
    actions = random_actions(env.spec.action, steps, GAMES * count, seed=5)
    one = rows(env, actions, seed=1)
    absent = one.absent.reshape(actions.shape[:2])
    other = random_actions(env.spec.action, steps, GAMES * count, seed=6)
    changed = np.where(absent.reshape(absent.shape + (1,) * (actions.ndim - 2)), other, actions)
    assert absent.any() and (changed != actions).any()
    assert_same(one, rows(env, changed, seed=1))


@pytest.mark.parametrize("id", mostly_slow(WITH_VIEW))
def test_the_view_of_all_is_one_more_item(id):
    """The same for all agents of a game, of the space that is told, beside what is seen without it."""
    count, _, steps = CASES[id]
    plain, env = make(id), make(id, state=True)
    space, own = env.spec.observation, plain.spec.observation
    own_options = {k: v for k, v in CASES[id][1].items() if k == "num_agents"}
    assert space["state"] == _definition(id, own_options).state
    actions = random_actions(env.spec.action, min(steps, 20), GAMES * count)
    a, b = rows(plain, actions), rows(env, actions)
    view = b.obs.pop("state")
    assert view.shape == (len(actions), GAMES, count, *space["state"].shape)
    assert view.dtype == np.dtype(space["state"].dtype)
    np.testing.assert_array_equal(view, np.repeat(view[:, :, :1], count, axis=2))
    assert len(np.unique(view)) > 1
    low, high = (bound.astype(np.float32) for bound in space["state"].bounds())
    assert (view >= low).all() and (view <= high).all()
    assert_same(b.obs if isinstance(own, Dict) else b.obs["obs"], a.obs)
    assert_same(b[2:], a[2:])


@pytest.mark.parametrize("id", mostly_slow(CASES))
def test_the_checker_finds_nothing_wrong(id):
    report = check_env(id, options=CASES[id][1], steps=40)
    assert report.ok, report.problems


def test_environments_can_be_vmapped():
    """Two seeds side by side are the two seeds one after the other."""
    env = make("late_arrivals:late_arrivals", 2)
    keys = jax.random.split(jax.random.key(0), 2)
    actions = jnp.ones(8, jnp.int32)

    @jax.jit
    def run(key):
        state, _ = env.reset(key)

        def body(state, k):
            state, result = env.step(state, actions, k)
            return state, result

        return jax.lax.scan(body, state, jax.random.split(key, 9))[1]

    assert_same(jax.vmap(run)(keys), jax.tree.map(lambda *x: jnp.stack(x), *[run(key) for key in keys]))
    leaves = jax.tree.leaves(jax.eval_shape(env.reset, keys[0])[0])
    assert all(x.shape[0] == 2 for x in leaves)  # games lead, so that games can be dealt to devices


# ---------------------------------------------------------------- LateArrivals, by hand

# column for column, steps 0 .. 5 and the row after: reward with action 1
_ = None
BY_HAND = {
    "steady": [1, 11, 21, 31, 41, 51, _],
    "late": [_, _, 21, 31, 41, 51, _],
    "guest": [1, 11, _, 31, 41, _, _],
    "waiting": [0, 11, 20, 31, 40, 51, _],
}
ENDS = {"steady": [5], "late": [5], "guest": [1, 4], "waiting": [5]}


def test_late_arrivals_by_hand():
    env = make("late_arrivals:late_arrivals", 1)
    found = rows(env, np.ones((14, 4), np.int32))
    for k, name in enumerate(env.spec.agents):
        expected = BY_HAND[name] * 2  # the second game as the first
        assert found.absent[:, 0, k].tolist() == [x is None for x in expected]
        assert found.reward[:, 0, k].tolist() == [x or 0 for x in expected]
        assert np.flatnonzero(found.terminated[:, 0, k]).tolist() == [*ENDS[name], *(7 + t for t in ENDS[name])]
    assert not found.truncated.any()
    assert np.flatnonzero(found.over[:, 0]).tolist() == [5, 12]
    np.testing.assert_array_equal(found.obs["obs"][:, 0, :, 0], np.tile([1, 2, 3, 4, 5, 6, 0], 2)[:, None].repeat(4, 1))
    # an action 2 while it waits earns what none earns; its mask says so
    waits = found.obs["action_mask"][:, 0, 3].tolist()
    assert waits[1] == [1, 0, 0] and waits[0] == [1, 1, 1]
    assert rows(env, np.full((1, 4), 2, np.int32)).reward[0, 0].tolist() == [2, 0, 2, 0]


def test_the_horizon_truncates_those_who_are_there():
    """At 3 the guest has left and all others are truncated; at 2 its own end comes first, and late never came."""
    at_three = rows(make("late_arrivals:late_arrivals", 1, horizon=3), np.ones((5, 4), np.int32))
    assert at_three.truncated[2, 0].tolist() == [True, True, False, True] and not at_three.terminated[2].any()
    assert at_three.over[:, 0].tolist() == [False, False, True, False, False]
    at_two = rows(make("late_arrivals:late_arrivals", 1, horizon=2), np.ones((5, 4), np.int32))
    assert at_two.truncated[1, 0].tolist() == [True, False, False, True]
    assert at_two.terminated[1, 0].tolist() == [False, False, True, False]
    assert at_two.absent[2].all() and at_two.over[1, 0]


def test_an_end_is_followed_by_an_absent_row_though_present_says_otherwise():
    """Somebody who is always present and ends every other step; and a game that nobody leaves is not over."""

    def step(t, actions, draws):
        ended = jnp.stack([(t + 1) % 2 == 0, jnp.zeros(t.shape, bool)], -1)
        return t + 1, jnp.ones(ended.shape), ended

    definition = late_arrivals()._replace(
        agents=("dies", "lives"), step=step, present=lambda t: jnp.ones((t.shape[0], 2), bool),
        observe=lambda t: jnp.stack([t, t], -1).astype(jnp.float32), observation=Box(()), max_episode_steps=7,
    )  # fmt: skip
    found = rows(build(definition, 1), np.zeros((9, 2), np.int32))
    #                                       t = 0  1  2  3  4  5  6  reset
    assert found.absent[:, 0, 0].tolist() == [0, 0, 1, 0, 1, 0, 1, 1, 0]
    assert found.terminated[:, 0, 0].tolist() == [0, 1, 0, 1, 0, 1, 0, 0, 0]
    assert found.absent[:, 0, 1].tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 0]
    assert found.over[:, 0].tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert found.truncated[6, 0].tolist() == [False, True]


# ---------------------------------------------------------------- copies of a task


def test_one_agents_cartpole_is_cartpole_to_the_bit():
    one, many = build_one(cartpole(), 6), build(multi_agent_cartpole(1), 6)
    actions = random_actions(one.spec.action, 150, 6)
    a, b = Stepper(one, 4), Stepper(many, 4)
    assert_same(a.reset(), b.reset())
    for action in actions:
        x, y = a.step(action), b.step(action)
        assert_same(x, y._replace(several=None))
        np.testing.assert_array_equal(y.several.over, x.terminated | x.truncated)
    assert many.spec._replace(agents=()) == one.spec


def test_who_falls_stands_still_until_the_last_has_fallen():
    found = rows(make("MultiAgentCartPole-v1"), random_actions(Discrete(2), 120, 15))
    fallen = found.absent[1:] & ~found.absent[1:].all(-1, keepdims=True)  # in a game that goes on
    assert fallen.sum() > 20
    np.testing.assert_array_equal(found.obs[1:][fallen], found.obs[:-1][fallen])
    assert np.isfinite(found.obs).all()


def test_a_task_of_one_agent_has_no_place_in_several():
    with pytest.raises(InputError, match=r"copy_task: .*task"):
        copy_task(corridor(), 2)


# ---------------------------------------------------------------- make


def test_make_knows_which_have_several_agents():
    assert all(envs.is_multi_agent(id) and envs.resolve(id) == "jax" for id in CASES)
    assert all(not envs.is_multi_agent(id) for id in ("CartPole-v1", "Catch-v0", "gymnax:CartPole-v1", "no-such"))
    assert envs.is_multi_agent("test_multi_agent:mine") and envs.is_multi_agent("test_multi_agent:MINE")
    assert envs.make("MultiAgentCartPole-v1", num_envs=4).spec.num_envs == 8
    env = envs.make("test_multi_agent:mine", num_envs=3, options={"num_agents": 4, "max_episode_steps": 9})
    assert env.spec.num_envs == 12 and env.spec.max_episode_steps == 9


def mine(num_agents: int = 2) -> MultiDefinition:
    return multi_agent_cartpole(num_agents)


MINE = multi_agent_cartpole(2)


@pytest.mark.parametrize(
    ("settings", "key", "mend"),
    [
        ({"id": "MultiAgentCartPole-v1", "soft_horizon": True, "horizon": 5}, "env.soft_horizon", "leave it out"),
        ({"id": "MultiAgentCartPole-v1", "options": {"num_agents": 0}}, "env.options.num_agents", "use 1 or more"),
        ({"id": "SwitchRiddle-v0", "options": {"num_agents": 2.5}}, "env.options.num_agents", "use 3 or more"),
        ({"id": "SimpleSpread-v0", "options": {"agents": 3}}, "env.options.agents", "num_agents"),
        ({"id": "RockPaperScissors-v0", "options": {"moves": 0}}, "env.options.moves", "use 15"),
        ({"id": "RockPaperScissors-v0", "options": {"opponent": "me"}}, "env.options.opponent", "use learn"),
        ({"id": "RockPaperScissors-v0", "state": True}, "multi_agent.state:", "global state"),
        ({"id": "Catch-v0", "backend": "jax", "state": True}, "multi_agent.state:", "leave it out"),
        ({"id": "late_arrivals:late_arrivals", "action_mask_info": "mask"}, "env.action_mask_info", "leave it out"),
    ],
)
def test_what_does_not_go_is_refused_by_name(settings, key, mend):
    with pytest.raises(InputError) as e:
        envs.make(settings.pop("id"), num_envs=2, **settings)
    assert str(e.value).startswith(key) and mend in str(e.value)


def test_a_definition_of_other_shapes_is_refused():
    plain = late_arrivals()
    step = lambda t, actions, draws: (t + 1, jnp.zeros(t.shape), jnp.zeros(t.shape, bool))
    for wrong, name in (({"step": step}, "step"), ({"present": lambda t: t < 3}, "present")):
        env = build(plain._replace(**wrong), 2)
        with pytest.raises(InputError, match=rf"MultiDefinition\.{name}: expected arrays of shape \(2, 4\)"):
            state, _ = jax.jit(env.reset)(jax.random.key(0))
            env.step(state, jnp.zeros(8, jnp.int32), jax.random.key(0))
    for agents in ((), ("a", "a", "b", "c")):
        with pytest.raises(InputError, match=r"MultiDefinition\.agents"):
            build(plain._replace(agents=agents), 2)


# ---------------------------------------------------------------- wrappers hand the columns on


def test_histories_begin_anew_for_whoever_comes():
    """Two frames, the previous action and reward: of the guest and of late, who come while the game goes on."""
    env = make("late_arrivals:late_arrivals", 1, frame_stack=2, use_prev_action=True, use_prev_reward=True)
    found = rows(env, np.ones((8, 4), np.int32))
    frames = found.obs["obs"][:, 0, :, :, 0]  # [T, A, 2], the steps that were over
    steps = np.arange(8)
    for k, name in enumerate(env.spec.agents):
        alone = [x is None for x in BY_HAND[name]] + [BY_HAND[name][0] is None]
        now = np.array([1, 2, 3, 4, 5, 6, 0, 1])
        before = np.where(alone, now, now - 1)
        np.testing.assert_array_equal(frames[:, k], np.stack([before, now], -1))
        np.testing.assert_array_equal(found.obs["prev_action"][:, 0, k], np.where(alone, 0, 1))
        np.testing.assert_array_equal(found.obs["prev_reward"][:, 0, k], found.reward[steps, 0, k])
