"""A team against the record of its agents."""

from functools import partial

import games
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.envs.make import make
from jrl.envs.team import join_all_agents
from jrl.envs.transform import transformed
from jrl.errors import InputError
from jrl.types import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Tuple


def test_a_team_sees_and_earns_what_its_agents_do():
    """Two games of three agents: one ends before the others, one comes late, two are cut off by the time limit."""
    script = games.Script()
    env = transformed(script, partial(join_all_agents, agents=("c", "a", "b")))
    assert env.spec == EnvSpec(
        Dict(
            (
                ("agents", Box((3, 1))),
                ("present", MultiBinary((3,))),
                ("state", Box((2,))),
                ("action_mask", MultiBinary((6,))),
            )
        ),
        MultiDiscrete((2, 2, 2)),
        num_envs=2,
    )
    obs = env.reset()
    np.testing.assert_array_equal(obs["present"], np.ones((2, 3)))
    np.testing.assert_array_equal(obs["action_mask"], np.ones((2, 6)))  # what c may do is not said: anything
    action = np.array([[0, 1, 1], [1, 0, 0]], np.int32)
    present = [[1, 1, 0], [1, 0, 1], [1, 0, 1], [1, 0, 1], [1, 1, 1]]  # c acts from the third row on
    masks = [[1, 1, 0, 1, 1, 1], [1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]
    for t, (seen, reward, *_, over, _) in enumerate(games.SCRIPT):
        result = env.step(action)
        np.testing.assert_array_equal(script.actions[-1], [0, 1, 1, 1, 0, 0])
        np.testing.assert_array_equal(result.obs["agents"][..., 0], [seen, [10 * x for x in seen]])
        np.testing.assert_array_equal(result.obs["state"], [[1, 2], [3, 4]])
        np.testing.assert_array_equal(result.obs["present"], [present[t]] * 2, err_msg=f"row {t}")
        np.testing.assert_array_equal(result.obs["action_mask"], [masks[t]] * 2, err_msg=f"row {t}")
        np.testing.assert_array_equal(result.reward, [sum(reward)] * 2)
        np.testing.assert_array_equal(result.truncated, [bool(over)] * 2)
        np.testing.assert_array_equal(result.terminated, [False] * 2)
        assert result.several is None


def test_present_are_those_who_act_on_the_next_step():
    """late_arrivals: whoever comes late or comes back is present before its first action, in every game."""
    env = transformed(make("late_arrivals:late_arrivals", num_envs=2), join_all_agents)
    state, obs = jax.jit(env.reset)(jax.random.key(0))
    assert np.asarray(obs["present"]).tolist() == [[1, 0, 1, 1]] * 2
    step, action, present = jax.jit(env.step), jnp.ones((2, 4), jnp.int32), []
    for t in range(14):
        state, result = step(state, action, jax.random.key(t))
        present.append(["".join(map(str, row)) for row in np.asarray(result.obs["present"])])
    # steady, late, guest, waiting after each step; the seventh begins the next game
    game = ["1011", "1101", "1111", "1111", "1101", "0000", "1011"]
    assert present == [[row] * 2 for row in game * 2]


def test_a_team_of_an_environment_in_jax():
    """The two-step game: half of the reward is each agent's, the state is there once, the next game begins anew."""
    env = transformed(games.two_step(2), join_all_agents)
    assert env.spec.action == MultiDiscrete((2, 2)) and env.spec.agents == () and env.spec.num_envs == 2
    state, obs = jax.jit(env.reset)(jax.random.key(0))
    assert jax.tree.map(jnp.shape, obs) == {"agents": (2, 2, 3), "present": (2, 2), "state": (2, 3)}
    step = jax.jit(env.step)
    first, second = jnp.array([[0, 1], [1, 0]]), jnp.array([[0, 0], [1, 1]])
    rewards, ends = [], []
    for action in (first, second, second, first):
        state, result = step(state, action.astype(jnp.int32), jax.random.key(1))
        rewards.append(result.reward.tolist())
        ends.append(result.terminated.tolist())
        assert not result.truncated.any()
    assert rewards == [[0.0, 0.0], [7.0, 8.0], [0.0, 0.0], [0.0, 0.0]]
    assert ends == [[False, False], [True, True], [False, False], [False, False]]
    np.testing.assert_array_equal(result.obs["state"], [[0, 1, 0], [0, 0, 1]])


TWO, VECTOR = Discrete(2), Box((2,))


def bare(action=TWO, observation=VECTOR, agents=("a", "b")):
    env = games.two_step(1)
    return env._replace(spec=EnvSpec(observation, action, max(1, len(agents)), agents=agents))


@pytest.mark.parametrize(
    ("action", "want"),
    [
        (MultiDiscrete((2, 3)), MultiDiscrete((2, 3, 2, 3))),
        (Box((2,), low=(-1.0, -2.0), high=3.0), Box((4,), low=(-1.0, -2.0, -1.0, -2.0), high=3.0)),
        (Box((1, 2), low=-1.0, high=1.0), Box((4,), low=-1.0, high=1.0)),
    ],
)
def test_actions_of_a_team(action, want):
    assert join_all_agents(bare(action).spec).spec.action == want


def test_an_observation_of_several_parts_and_one_that_is_the_state_alone():
    two = Dict((("x", Box((2,))), ("y", Discrete(3)), ("state", Box((4,)))))
    assert join_all_agents(bare(observation=two).spec).spec.observation["agents"] == Dict(
        (("x", Box((2, 2))), ("y", MultiDiscrete((3, 3))))
    )
    assert join_all_agents(bare(observation=Dict((("state", Box((4,))),))).spec).spec.observation["agents"] == Box(
        (2, 4)
    )


@pytest.mark.parametrize(
    ("env", "agents", "message"),
    [
        (bare(agents=()), None, r"multi_agent\.group: expected an environment with several agents.*leave it out"),
        (bare(), ("a",), r"multi_agent\.group: expected one team of all agents, a, b, got a: name each"),
        (bare(Tuple((Discrete(2),))), None, r"multi_agent\.group: expected agents with Discrete.*leave it out"),
    ],
)
def test_what_cannot_be_a_team(env, agents, message):
    with pytest.raises(InputError, match=message):
        join_all_agents(env.spec, agents=agents)
