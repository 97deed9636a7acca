"""Several teams in one game, against the record of their members."""

import itertools
from functools import partial

import games
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from env_helpers import Stepper
from test_agent_kinds import pursuit  # a game of two hunters and one prey

from jrl.envs import multi_agent
from jrl.envs.make import make
from jrl.envs.team import join_all_agents
from jrl.envs.team import join_groups as option
from jrl.envs.transform import transformed
from jrl.errors import InputError
from jrl.types import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Tuple


def grouped(env, groups):
    return transformed(env, partial(option, groups=groups))


def flags(rows, name):
    """[T, agents] of one game, as rows of marks."""
    return ["".join("x" if flag else "." for flag in row) for row in np.array(rows[name]).T]


def played(env, action, steps):
    """What a game's agents get if they take the same action over and over: name -> [T, agents]."""
    stepper = Stepper(env, 0)
    first, found = stepper.reset(), {}
    for _ in range(steps):
        result = stepper.step(action)
        told = result.several
        each = {"obs": result.obs, "reward": result.reward, "terminated": result.terminated}
        each |= {"truncated": result.truncated, "absent": told.absent, "there": told.there, "over": told.over}
        for name, x in each.items():
            found.setdefault(name, []).append(jax.tree.map(np.array, x))
    return first, found


def test_teams_end_when_the_last_of_those_who_are_there_does():
    """late_arrivals: steady xxxxxE, late ..xxxE, guest xE.xE., waiting wxwxwE, all of whom do 1 where they may.

    guest ends in step 1 and late comes in step 2, so that their team goes on without a gap; the others end together.
    """
    groups = {"comers": ["late", "guest"], "stayers": ["waiting", "steady"]}
    env = grouped(make("late_arrivals:late_arrivals", num_envs=1), groups)
    assert env.spec.agents == ("stayers", "comers") and env.spec.num_envs == 2 and env.spec.kinds == ()
    assert env.spec.action == MultiDiscrete((3, 3))
    first, rows = played(env, np.ones((2, 2), np.int32), 8)
    # what steady and waiting, and what late and guest earn in each step; the seventh resets, the eighth is the first
    np.testing.assert_array_equal(np.array(rows["reward"])[:, 0], [1, 22, 41, 62, 81, 102, 0, 1])
    np.testing.assert_array_equal(np.array(rows["reward"])[:, 1], [1, 11, 21, 62, 82, 51, 0, 1])
    assert flags(rows, "terminated") == [".....x..", ".....x.."]
    assert flags(rows, "truncated") == ["........"] * 2
    assert flags(rows, "absent") == ["......x.", "......x."] and flags(rows, "over") == [".....x.."]
    assert flags(rows, "there") == ["xxxxx.xx"] * 2
    # steady, waiting; late, guest: those who act next
    present = lambda i: [first["present"][i].tolist(), *(obs["present"][i].tolist() for obs in rows["obs"])]
    assert present(0) == [[1, 1]] * 6 + [[0, 0], [1, 1], [1, 1]]
    assert present(1) == [[0, 1], [0, 1], [1, 0], [1, 1], [1, 1], [1, 0], [0, 0], [0, 1], [0, 1]]
    masks = [obs["action_mask"].tolist() for obs in rows["obs"]]
    assert masks[1][0] == [1, 1, 1, 1, 0, 0]  # steady may do anything, waiting must wait


def test_a_team_has_lives_like_an_agent_and_who_is_in_none_stays_one():
    env = grouped(make("late_arrivals:late_arrivals", num_envs=2), {"g": ["guest"], "others": ["late", "waiting"]})
    assert env.spec.agents == ("steady", "others", "g") and env.spec.kinds == ((0,), (1,), (2,))
    alone, others, guest = env.spec.observation.items
    assert sorted(dict(alone.items)) == ["action_mask", "obs"] and env.spec.action.items[0] == Discrete(3)
    assert others["agents"] == Box((2, 2), low=0.0, high=(6.0, 3.0, 6.0, 3.0)) and guest["present"] == MultiBinary((1,))
    action = (np.ones(2, np.int32), np.ones((2, 2), np.int32), np.ones((2, 1), np.int32))
    _, rows = played(env, action, 7)
    by_game = lambda name: np.array(rows[name]).reshape(7, 2, -1)
    for name in ("reward", "terminated", "truncated", "absent", "there"):
        np.testing.assert_array_equal(by_game(name)[:, 0], by_game(name)[:, 1])
    one = {name: by_game(name)[:, 0] for name in ("terminated", "absent", "there")}
    assert flags(one, "terminated") == [".....x.", ".....x.", ".x..x.."]
    assert flags(one, "absent") == ["......x", "......x", "..x..xx"]
    assert flags(one, "there") == ["xxxxx.x", "xxxxx.x", "x.xx..x"]
    np.testing.assert_array_equal(by_game("reward")[:, 0], np.array([
        [1, 11, 21, 31, 41, 51, 0], [0, 11, 41, 62, 81, 102, 0], [1, 11, 0, 31, 41, 0, 0],
    ]).T)  # fmt: skip
    steady, _, _ = rows["obs"][2]
    np.testing.assert_array_equal(steady["obs"], [[3, 0], [3, 0]])


def test_a_time_limit_cuts_off_the_teams_of_those_who_were_there():
    """After four steps late and steady are cut off, and guest, who is back; a team that nobody is of ended before."""
    made = make("late_arrivals:late_arrivals", num_envs=1, options={"max_episode_steps": 3})
    env = grouped(made, {"guest": ["guest"], "late": ["late"], "rest": ["steady", "waiting"]})
    action = (np.ones((1, 2), np.int32), np.ones((2, 1), np.int32))
    _, rows = played(env, action, 5)
    assert env.spec.agents == ("rest", "late", "guest") and env.spec.kinds == ((0,), (1, 2))
    assert flags(rows, "truncated") == ["..x..", "..x..", "....."]
    assert flags(rows, "terminated") == [".....", ".....", ".x..."]
    assert flags(rows, "absent") == ["...x.", "xx.xx", "..xx."] and flags(rows, "over") == ["..x.."]
    rest, single = rows["obs"][2]
    # from what is bootstrapped: those who were cut off are there
    np.testing.assert_array_equal(rest["present"], [[1, 1]])
    np.testing.assert_array_equal(single["present"], [[1], [0]])


def test_teams_of_a_host_environment():
    """Two games in which b ends on the second row, c comes on the third, and the limit cuts a and c on the fourth."""
    script = games.Script()
    env = grouped(script, {"one": ("c", "b"), "two": ("a",)})
    assert env.spec.agents == ("two", "one") and env.spec.num_envs == 4
    env.reset()
    action = (np.array([[1], [0]], np.int32), np.array([[1, 0], [0, 1]], np.int32))
    ends, absent = [], []
    for t, (seen, reward, *_) in enumerate(games.SCRIPT):
        result = env.step(action)
        np.testing.assert_array_equal(script.actions[-1], [1, 1, 0, 0, 0, 1])
        two, one = result.obs
        np.testing.assert_array_equal(one["agents"][..., 0], [seen[1:], [10 * x for x in seen[1:]]], err_msg=f"row {t}")
        np.testing.assert_array_equal(two["agents"][..., 0], [seen[:1], [10 * seen[0]]])
        np.testing.assert_array_equal(one["state"], [[1, 2], [3, 4]])
        np.testing.assert_array_equal(result.reward, [reward[0], reward[1] + reward[2]] * 2)
        ends.append((result.terminated.tolist()[:2], result.truncated.tolist()[2:]))
        absent.append(result.several.absent.tolist()[:2])
    no, both = [False, False], [True, True]
    assert ends == [(no, no), (no, no), (no, no), (no, both), (no, no)]
    assert absent == [no, no, no, no, both]


@pytest.mark.slow
def test_agents_of_different_kinds_are_teams_of_their_own():
    made = multi_agent.build(pursuit(noise=0.0), 2)
    env = grouped(made, {"pack": ["hunter_0", "hunter_1"]})
    assert env.spec.agents == ("pack", "prey_0") and env.spec.kinds == ((0,), (1,))
    pack, prey = env.spec.observation.items
    assert pack["agents"] == Box((2, 6)) and prey == made.spec.observation.items[1]
    action = (np.array([[1, 2], [0, 0]], np.int32), np.array([[0.0, 0.5], [0.5, 0.0]], np.float32))
    result = Stepper(env, 0)
    result.reset()
    result = result.step(action)
    plain = Stepper(made, 0)
    plain.reset()
    plain = plain.step((action[0].reshape(4), action[1]))
    np.testing.assert_array_equal(result.obs[0]["agents"].reshape(4, 6), plain.obs[0])
    jax.tree.map(np.testing.assert_array_equal, result.obs[1], plain.obs[1])
    each = np.asarray(plain.reward).reshape(2, 3)
    np.testing.assert_allclose(result.reward, np.stack([each[:, 0] + each[:, 2], each[:, 1]], -1).reshape(-1))


@pytest.mark.slow
def test_one_team_of_all_earns_what_it_does_without_a_name():
    """All agents in one group, and as `team` has them: the same rows, but for the name and whose rows begin a game."""
    plain, named = (
        transformed(games.two_step(3), join_all_agents),
        grouped(games.two_step(3), {"all": ("first", "second")}),
    )
    assert named.spec._replace(agents=()) == plain.spec
    a, b = Stepper(plain, 0), Stepper(named, 0)
    jax.tree.map(np.testing.assert_array_equal, a.reset(), b.reset())
    for t in range(7):
        action = np.array([[t % 2, 1], [1, t // 2 % 2], [1, 1]], np.int32)
        x, y = a.step(action), b.step(action)
        jax.tree.map(np.testing.assert_array_equal, x, y._replace(several=None))
        np.testing.assert_array_equal(y.several.over, x.terminated)


def test_spaces_that_the_policy_does_not_act_in_are_put_together_too():
    wide = Box((1,), low=-2.0, high=2.0)
    spec = EnvSpec(Box((3,)), Box((1,), low=-1.0, high=1.0), 3, env_action=wide, agents=("a", "b", "c"))
    found = option(spec, groups={"t": ["c", "a"]}).spec
    assert found.agents == ("t", "b") and found.num_envs == 2
    assert found.env_action == Tuple((Box((2,), low=-2.0, high=2.0), wide))
    with pytest.raises(InputError, match=r"multi_agent\.group: expected agents with Discrete.*leave it out"):
        option(spec._replace(action=Dict((("x", wide),)), env_action=None), groups={"t": ["a"]})


def test_a_team_goes_on_on_the_host_where_one_comes_as_the_other_leaves():
    """Walkers: w_0 ends after two steps, when w_2 comes; w_1 after four; w_2 after five, and w_k earns k + 1 a step."""
    env = grouped(make("agent_envs:Walkers", num_envs=1, options={"born": 2}), {"relay": ["w_0", "w_2"]})
    assert env.spec.agents == ("relay", "w_1")
    _, rows = played(env, (np.zeros((1, 2), np.int32), np.zeros(1, np.int32)), 7)
    np.testing.assert_array_equal(np.array(rows["reward"])[:, 0], [1, 1, 3, 3, 3, 0, 1])
    np.testing.assert_array_equal(np.array(rows["reward"])[:, 1], [2, 2, 2, 2, 0, 0, 2])
    assert flags(rows, "terminated") == ["....x..", "...x..."] and flags(rows, "absent") == [".....x.", "....xx."]
    present = [obs[0]["present"][0].tolist() for obs in rows["obs"]]
    assert present == [[1, 0], [0, 1], [0, 1], [0, 1], [0, 0], [1, 0], [1, 0]]


IN_JAX = ("late_arrivals:late_arrivals", "TicTacToe-v0")


@pytest.mark.parametrize("id", [*IN_JAX, "agent_envs:Walkers", "agent_envs:Nim", "agent_envs:Turns"])
def test_who_is_there_acts_next(id):
    options = {"max_episode_steps": 9} if id in IN_JAX else {"turn_based": False} if id.endswith("Turns") else {}
    own = {"options": options} if options else {}
    env = make(id, num_envs=4, **own)
    stepper, rng, told = Stepper(env, 1), np.random.default_rng(0), []
    obs = stepper.reset()
    for _ in range(30):
        drawn = rng.random((env.spec.num_envs, env.spec.action.n))
        allowed = obs["action_mask"] != 0 if isinstance(obs, dict) and "action_mask" in obs else 1
        result = stepper.step((drawn * allowed).argmax(-1).astype(np.int32))
        obs = jax.tree.map(np.array, result.obs)
        told.append(jax.tree.map(np.array, result.several))
    for now, after in itertools.pairwise(told):
        np.testing.assert_array_equal(now.there, ~after.absent)
    assert any((~one.there).any() for one in told)


def test_who_acts_next_follows_from_the_rows_where_nobody_comes_late():
    env = make("MultiAgentCartPole-v1", num_envs=3, options={"num_agents": 3, "max_episode_steps": 20})
    quiet = env._replace(step=lambda *args: _untold(env.step(*args)))
    groups = {"pair": ["agent_0", "agent_2"]}
    a, b = Stepper(grouped(env, groups), 0), Stepper(grouped(quiet, groups), 0)
    a.reset(), b.reset()
    rng, ended = np.random.default_rng(0), 0
    for _ in range(90):
        action = (rng.integers(0, 2, (3, 2)).astype(np.int32), rng.integers(0, 2, 3).astype(np.int32))
        x, y = a.step(action), b.step(action)
        jax.tree.map(np.testing.assert_array_equal, x, y)
        ended += int(np.asarray(x.terminated).sum())
    assert ended > 6


def _untold(stepped):
    state, result = stepped
    return state, result._replace(several=result.several._replace(there=None))


@pytest.mark.slow
def test_a_gap_is_no_end():
    """Whoever is away without an end is away: the learner cuts there, and bootstraps from what was seen last."""
    env = games.two_step(1)

    def step(state, action, key):
        state, result = env.step(state, action, key)
        away = jnp.array([False, False])
        return state, result._replace(several=result.several._replace(there=away))

    found = grouped(env._replace(step=step), {"a": ["first"], "b": ["second"]})
    stepper = Stepper(found, 0)
    stepper.reset()
    result = stepper.step(np.array([[1], [1]], np.int32))
    assert not result.terminated.any() and not result.truncated.any() and not result.several.there.any()
