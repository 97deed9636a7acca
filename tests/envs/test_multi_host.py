"""Environments of several agents that step on the host: who has which row, and what is refused."""

from typing import ClassVar

import jax
import numpy as np
import pytest
from agent_envs import SEEN, Breaks, Walkers

from jrl import envs
from jrl.envs import gym_ids
from jrl.envs.context import OnFailure
from jrl.envs.make import check, make
from jrl.envs.multi_host import MultiHostEnv
from jrl.errors import EnvironmentFailed, InputError
from jrl.types import Box, Discrete

NAME = "agent_envs"


def stepped(env, steps, action=None):
    """Steps after a reset, stacked: reward, terminated, truncated, absent [T, B], over [T, games]."""
    env.reset()
    rows = []
    for _ in range(steps):
        result = env.step(np.zeros(env.spec.num_envs, np.int32) if action is None else action)
        rows.append((result.reward, result.terminated, result.truncated, *result.several[:2]))
    return [np.stack(part) for part in zip(*rows)]


def test_two_games_of_walkers_by_hand():
    """Each agent ends on its own row and the game goes on; its last observation is its own; the next row is a reset."""
    env = make(f"{NAME}:Walkers", num_envs=2)
    assert env.spec.agents == ("w_0", "w_1", "w_2") and env.spec.num_envs == 6 and env.spec.games == 2
    assert env.spec.observation == Box((2,), "float32", -100.0, 100.0) and env.spec.action == Discrete(3)
    np.testing.assert_array_equal(env.reset()[:, 0], [0, 1, 2, 0, 1, 2])
    assert env.foreach_env(lambda one: one.seeds[0])[1] == env.foreach_env(lambda one: one.seeds[0])[0] + 1
    results = [env.step(np.array([0, 1, 2, 2, 1, 0], np.int32)) for _ in range(7)]
    first, second = env.foreach_env(lambda one: one.given)
    assert first[:3] == [{"w_0": 0, "w_1": 1, "w_2": 2}] * 2 + [{"w_1": 1, "w_2": 2}]
    assert second[:3] == [{"w_0": 2, "w_1": 1, "w_2": 0}] * 2 + [{"w_1": 1, "w_2": 0}]
    column = lambda name, k: [getattr(result, name)[k] for result in results]
    assert [np.flatnonzero(column("terminated", k)).tolist() for k in range(3)] == [[1], [3], [4]]
    assert not np.any([result.truncated for result in results])
    assert [result.several.absent[0] for result in results] == [0, 0, 1, 1, 1, 1, 0]
    assert [result.several.absent[2] for result in results] == [0, 0, 0, 0, 0, 1, 0]
    assert [result.several.over[0] for result in results] == [0, 0, 0, 0, 1, 0, 0]
    assert column("reward", 0) == [1, 1, 0, 0, 0, 0, 1] and column("reward", 2) == [3, 3, 3, 3, 3, 0, 3]
    np.testing.assert_array_equal(results[1].obs[0], [0, 2])  # not that of the next game
    np.testing.assert_array_equal(results[4].obs[2], [2, 5])
    np.testing.assert_array_equal(results[5].obs[:3], [[0, 0], [1, 0], [2, 0]])


def test_a_time_limit_of_the_environment_is_no_end():
    _, terminated, truncated, _, over = stepped(make(f"{NAME}:Walkers", num_envs=1, options={"truncates": ["w_1"]}), 5)
    np.testing.assert_array_equal(truncated.nonzero(), [[3], [1]])
    np.testing.assert_array_equal(terminated.nonzero(), [[1, 4], [0, 2]])
    assert over[4, 0] and not over[3, 0]


def test_the_horizon_truncates_those_that_are_there():
    env = make(f"{NAME}:Walkers", num_envs=1, horizon=3)
    assert env.spec.max_episode_steps == 3
    _, terminated, truncated, absent, over = stepped(env, 5)
    np.testing.assert_array_equal(truncated.nonzero(), [[2, 2], [1, 2]])
    np.testing.assert_array_equal(terminated.nonzero(), [[1], [0]])
    np.testing.assert_array_equal(over[:, 0], [0, 0, 1, 0, 0])
    assert absent[3].all() and not absent[4].any()
    _, terminated, truncated, _, over = stepped(make(f"{NAME}:Walkers", num_envs=1, horizon=4), 4)
    assert terminated[3, 1] and not truncated[3, 1] and truncated[3, 2] and over[3, 0]  # an end at the horizon is one


def test_one_that_is_born_later_shows_its_first_observation_on_an_absent_row():
    env = make(f"{NAME}:Walkers", num_envs=1, options={"ends": [9, 9, 9], "born": 2})
    env.reset()
    results = [env.step(np.zeros(3, np.int32)) for _ in range(3)]
    assert [bool(result.several.absent[2]) for result in results] == [True, True, False]
    np.testing.assert_array_equal(results[1].obs[2], [2, 2])
    assert [result.reward[2] for result in results] == [0, 0, 3]


def test_one_that_comes_back_begins_an_episode_of_its_own():
    env = make(f"{NAME}:Faulty", num_envs=1, options={"fault": "back"})
    _, terminated, _, absent, over = stepped(env, 6)
    np.testing.assert_array_equal(absent[:, 0], [0, 0, 1, 1, 0, 1])  # it ends once more, at once
    np.testing.assert_array_equal(terminated[:, 0], [0, 1, 0, 0, 1, 0])
    assert over[4, 0]


def test_one_that_leaves_without_an_end_is_truncated_after_the_first_steps():
    env = make(f"{NAME}:Faulty", num_envs=1, options={"fault": "leaves"}, on_failure=OnFailure(check_steps=0))
    _, terminated, truncated, absent, _ = stepped(env, 3)
    np.testing.assert_array_equal(truncated[:, 1], [1, 0, 0])
    assert not terminated[:, 1].any() and absent[1:, 1].all()


def test_games_end_each_by_itself():
    env = make(f"{NAME}:Walkers", num_envs=2)
    env.reset()
    env.foreach_env(lambda one: setattr(one, "_ends", (1, 1, 1)) if one.seeds[0] % 2 else None)
    odd = env.foreach_env(lambda one: one.seeds[0] % 2 == 1)
    result = env.step(np.zeros(6, np.int32))
    np.testing.assert_array_equal(result.several.over, odd)
    np.testing.assert_array_equal(result.terminated, np.repeat(odd, 3))


# ---------------------------------------------------------------- the global view and masks


def test_the_global_view_is_each_agents():
    env = make(f"{NAME}:Walkers", num_envs=2, options={"state": True})
    assert env.spec.observation["state"].shape == (3,) and env.spec.observation["obs"].shape == (2,)
    env.reset()
    obs = env.step(np.zeros(6, np.int32)).obs
    np.testing.assert_array_equal(obs["state"], [[1, 3, 7]] * 6)
    np.testing.assert_array_equal(obs["obs"][:, 0], [0, 1, 2, 0, 1, 2])


def test_who_has_no_global_view_is_told_so():
    with pytest.raises(InputError, match=r"env.options.state: .*Turns has no method state"):
        make(f"{NAME}:Turns", options={"state": True})


def test_masks_of_infos_join_the_observations():
    env = make(f"{NAME}:MaskedByInfos", num_envs=1)
    np.testing.assert_array_equal(env.reset()["action_mask"], ~np.eye(3, dtype=bool))
    result = env.step(np.array([1, 2, 0], np.int32))
    np.testing.assert_array_equal(result.obs["action_mask"], ~np.eye(3, dtype=bool))
    np.testing.assert_array_equal(result.obs["obs"][:, 1], [1, 1, 1])
    assert env.foreach_env(lambda one: len(one.seeds)) == [1]  # the look at the infos is the first reset


def test_a_mask_that_is_named_and_not_there_is_refused():
    with pytest.raises(InputError, match=r"env.action_mask_info legal: the infos of .* have no such entry"):
        make(f"{NAME}:Walkers", action_mask_info="legal")


# ---------------------------------------------------------------- turns


def allowed(obs):
    """The first action that each column can take."""
    return obs["action_mask"].argmax(-1).astype(np.int32)


@pytest.mark.parametrize("masked", [True, False])
def test_who_waits_may_do_that_alone_and_is_paid_while_it_waits(masked):
    env = make(f"{NAME}:Nim", num_envs=1, options={"masked": masked})
    assert env.spec.action == Discrete(4) and env.spec.observation["action_mask"].shape == (4,)
    obs = env.reset()
    np.testing.assert_array_equal(obs["action_mask"], [[1, 1, 1, 0], [0, 0, 0, 1]])
    result = env.step(np.array([2, 3], np.int32))
    np.testing.assert_array_equal(result.obs["action_mask"], [[0, 0, 0, 1], [1, 1, 1, 0]])
    assert result.obs["left" if masked else "obs"][0, 0] == 4 and not result.several.absent.any()
    result = env.step(np.array([3, 1], np.int32))  # two are left
    np.testing.assert_array_equal(result.obs["action_mask"], [[1, 1, not masked, 0], [0, 0, 0, 1]])
    result = env.step(np.array([1, 3], np.int32))
    np.testing.assert_array_equal(result.reward, [1, -1])
    assert result.terminated.all() and result.several.over.all()
    result = env.step(np.array([0, 0], np.int32))
    assert result.several.absent.all() and not result.terminated.any() and not result.reward.any()
    np.testing.assert_array_equal(result.obs["action_mask"], [[1, 1, 1, 0], [0, 0, 0, 1]])


def test_to_wait_in_ones_own_turn_is_an_error():
    env = make(f"{NAME}:Nim", num_envs=1)
    env.reset()
    with pytest.raises(EnvironmentFailed, match="'p_0': expected a move, got the waiting action"):
        env.step(np.array([3, 3], np.int32))


def test_actions_without_numbers_of_agents_that_wait_are_not_read():
    env = make(f"{NAME}:Pour", num_envs=2)
    assert env.spec.action.shape == (2,) and env.spec.observation.shape == (1,)
    env.reset()
    rng, chosen, owed = np.random.default_rng(0), [[], []], np.zeros(4)
    games = [game.env for game in env.games]
    for _ in range(40):
        movers = [{"p_0": 0, "p_1": 1}[game.agent_selection] if game.agents else None for game in games]
        action = rng.uniform(-1, 1, (4, 2)).astype(np.float32)
        result = env.step(action)
        for i, mover in enumerate(movers):
            if not result.several.absent[2 * i]:
                chosen[i].append((mover, (action[2 * i + mover] + 1) / 2))
        owed += result.reward
        assert (result.terminated == np.repeat(result.several.over, 2)).all()
    for i, game in enumerate(games):
        assert [agent for agent, _ in game.taken] == [f"p_{mover}" for mover, _ in chosen[i]]
        np.testing.assert_allclose([action for _, action in game.taken], [action for _, action in chosen[i]], atol=1e-6)
    np.testing.assert_array_equal(owed[0::2], -owed[1::2])


@pytest.mark.parametrize("how", [("Turns", {"turn_based": True}), ("PatientTurns", {})])
def test_rllibs_turns_are_waited_for_where_they_are_declared(how):
    env = make(f"{NAME}:{how[0]}", num_envs=1, options={"length": 3, **how[1]})
    obs = env.reset()
    rewards, ends, absent = [], [], []
    for _ in range(3):
        result = env.step(allowed(obs))
        obs = result.obs
        rewards.append(result.reward.tolist())
        ends.append(result.terminated.tolist())
        absent.append(result.several.absent.tolist())
    assert rewards == [[1, 0], [10, 11], [1, 10]]  # b was not there on the first row, and is paid for it on its own
    assert ends == [[False, False], [False, False], [True, True]] and result.several.over.all()
    assert absent == [[False, True], [False, False], [False, False]]


def test_rllibs_turns_are_refused_where_nobody_says_what_they_are():
    env = make(f"{NAME}:Turns", num_envs=1, options={"length": 4})
    with pytest.raises(InputError, match=r"agent 'a' acted before, then had no observation.*turn_based = True"):
        stepped(env, 5)


def test_rllibs_turns_are_absent_rows_otherwise_and_pay_with_the_next_action():
    env = make(f"{NAME}:Turns", num_envs=1, options={"length": 4, "turn_based": False})
    assert env.spec.action == Discrete(2)
    reward, terminated, _, absent, over = stepped(env, 5)
    np.testing.assert_array_equal(absent, [[0, 1], [1, 0], [0, 1], [1, 0], [1, 1]])
    np.testing.assert_array_equal(reward, [[1, 0], [0, 11], [11, 0], [0, 11], [0, 0]])
    np.testing.assert_array_equal(terminated, [[0, 0], [0, 0], [0, 0], [0, 1], [0, 0]])
    np.testing.assert_array_equal(over[:, 0], [0, 0, 0, 1, 0])


def test_rewards_of_one_game_are_not_owed_in_the_next():
    reward = stepped(make(f"{NAME}:Turns", num_envs=1, options={"length": 1}), 3)[0]
    np.testing.assert_array_equal(reward, [[1, 0], [0, 0], [1, 0]])


class Returning:
    """RLlib's interface: b acts where the script has a letter, ends at each E, and is paid 10 to the power of the step.

    At a small e it ends without being there.
    """

    script = "xE.xx..x.e.xx"
    possible_agents: ClassVar = ["a", "b"]

    def __init__(self, config=None):
        from gymnasium import spaces

        self.observation_spaces = dict.fromkeys(self.possible_agents, SEEN)
        self.action_spaces = dict.fromkeys(self.possible_agents, spaces.Discrete(2))

    def _see(self):
        there = self.script[self.t : self.t + 1] in ("x", "E")
        return dict.fromkeys(["a", "b"] if there else ["a"], np.zeros(2, np.float32))

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._see(), {}

    def step(self, actions):
        assert ("b" in actions) == (self.script[self.t] in "xE")
        rewards, ends = {"a": 0.0, "b": 10.0**self.t}, self.script[self.t] in "Ee"
        self.t += 1
        return self._see(), rewards, {"b": ends, "__all__": self.t == len(self.script)}, {"__all__": False}, {}

    def close(self):
        pass


def test_one_that_came_back_is_paid_for_what_it_earns_while_it_is_absent():
    """Each life's rewards are those from its first observation to its end; between two lives nothing is earned."""
    env = make("test_multi_host:Returning", num_envs=1, options={"turn_based": False})
    reward, terminated, _, absent, _ = stepped(env, 13)
    assert "".join(".x"[not flag] for flag in absent[:, 1]) == "xx.xx..x...xx"
    assert np.flatnonzero(terminated[:, 1]).tolist() == [1, 12]  # of the end while it is absent no row can tell
    earned = {0: 1e0, 1: 1e1, 3: 1e3, 4: 1e4, 7: 1e5 + 1e6 + 1e7, 11: 1e11, 12: 1e12}
    np.testing.assert_array_equal(reward[:, 1], np.float32([earned.get(t, 0) for t in range(13)]))


class LateEnd(Walkers):
    """RLlib's interface, one agent of which has an end together with its first observation, and one without a last."""

    observation_space, action_space = SEEN, None
    possible_agents: ClassVar = ["first", "second"]

    def __init__(self):
        from gymnasium import spaces

        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return {"first": np.zeros(2, np.float32)}, {}

    def step(self, actions):
        assert set(actions) <= {"first"}
        if "first" in actions and not hasattr(self, "once"):
            self.once = True
            end = {"first": False, "second": True, "__all__": False}
            return dict.fromkeys(("first", "second"), np.ones(2, np.float32)), {"second": 5.0}, end, {}, {}
        return {}, {}, {"first": False, "__all__": False}, {"first": True, "__all__": True}, {}


def test_an_end_at_the_first_observation_and_one_without_a_last_observation():
    from jrl import registry

    registry.register("late-end", lambda context: LateEnd())
    env = make("late-end", num_envs=1)
    reward, terminated, truncated, absent, over = stepped(env, 3)
    np.testing.assert_array_equal(absent, [[0, 1], [0, 1], [1, 1]])
    assert not terminated.any() and not reward.any()
    np.testing.assert_array_equal(truncated, [[0, 0], [1, 0], [0, 0]])
    np.testing.assert_array_equal(over[:, 0], [0, 1, 0])


# ---------------------------------------------------------------- what is refused, and what fails


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("pair", "the first reset returned a dict: return"),
        ("nobody", "the first reset: agents is empty"),
        ("four", "step 1 returned 4 values"),
        ("list", "step 1: rewards is a list, not a dict by agent"),
        ("stranger", "step 1: agent 'w_9' is not in possible_agents"),
        ("no observation", "step 1: observations has no entry for agent 'w_2', which has not ended"),
        ("no reward", "step 1: rewards has no entry for agent 'w_1'"),
        ("shape", r"step 1: agent 'w_1': observation of shape \(3,\), but the space has \(2,\)"),
        ("flag", r"step 1: terminations\['w_2'\] is 2, a int: put bool"),
        ("reward", "step 1: agent 'w_2': reward 'much' is not a number"),
        ("stays", "step 2: agent 'w_0' has ended, but is still in agents: remove it"),
        ("leaves", "step 1: agent 'w_1' is no longer in agents, but has not ended: set its"),
    ],
)
def test_what_is_no_step_is_refused_with_the_agent_and_the_mend(fault, words):
    with pytest.raises(InputError, match=words):
        stepped(make(f"{NAME}:Faulty", num_envs=1, options={"fault": fault}), 3)


@pytest.mark.parametrize(
    ("name", "fault", "words"),
    [
        ("Faulty", "pair", r"the reset after step \d+ returned a dict: return \(observations, infos\)"),
        ("Faulty", "no observation", r"step \d+: observations has no entry for agent 'w_2', which has not ended"),
        ("Faulty", "nothing", r"step \d+: agent 'w_2': the observation is None"),
        ("Faulty", "no reward", r"step \d+: rewards has no entry for agent 'w_1'"),
        ("Faulty", "no flag", r"step \d+: terminations has no entry for agent 'w_2'"),
        ("Faulty", "stranger", r"step \d+: agent 'w_9' is not in possible_agents"),
        ("Faulty", "unknown", r"step \d+: rewards has 'w_9', which is not in possible_agents: add it"),
        ("FaultyTurns", "unknown", r"step \d+: rewards has 'c', which is not in possible_agents: add it"),
        ("FaultyTurns", "infos", r"step \d+: infos has 'c', which is not in possible_agents: add it"),
        ("FaultyTurns", "unseen", r"step \d+: agent '[ab]': the observation is None"),
        ("FaultyTurns", "endless", r"step \d+: terminateds has no '__all__'"),
        ("FaultyNim", "unknown", r"step \d+: rewards has 'p_9', which is not in possible_agents"),
        ("FaultyNim", "unpaid", r"step \d+: rewards has no entry for agent 'p_1'"),
        ("FaultyNim", "unseen", r"step \d+: agent 'p_[01]': the observation is None"),
    ],
)
def test_what_is_missing_or_unknown_later_is_refused_as_in_the_first_steps(name, fault, words):
    env = make(f"{NAME}:{name}", num_envs=1, options={"fault": ""})
    obs = env.reset()
    act = lambda obs: allowed(obs) if isinstance(obs, dict) else np.zeros(env.spec.num_envs, np.int32)
    for _ in range(40):
        obs = env.step(act(obs)).obs
    env.foreach_env(lambda one: setattr(one, "_fault", fault))
    with pytest.raises(InputError, match=words):
        for _ in range(12):
            obs = env.step(act(obs)).obs


@pytest.mark.parametrize("check_steps", [0, 32])
@pytest.mark.parametrize("options", [{}, {"state": True}])
def test_a_reset_without_infos_is_refused_before_its_agents_are_taken_for_the_parts(check_steps, options):
    with pytest.raises(InputError, match="the first reset returned a dict: return"):
        env = make(
            f"{NAME}:FaultyPair",
            num_envs=1,
            options={"fault": "pair", **options},
            on_failure=OnFailure(check_steps=check_steps),
        )
        stepped(env, 1)


@pytest.mark.parametrize("remote", [False, True])
def test_flags_of_any_form_from_an_environment_without_close(remote):
    env = make(f"{NAME}:FaultyPair", num_envs=1, options={"fault": "forms"}, remote_worker_envs=remote)
    _, terminated, *_ = stepped(env, 4)
    np.testing.assert_array_equal(terminated, [[0, 0], [1, 0], [0, 0], [0, 1]])


@pytest.mark.parametrize("check_steps", [0, 32])
def test_an_agent_that_stays_after_its_end_is_refused_at_any_step(check_steps):
    env = make(f"{NAME}:Undying", num_envs=1, on_failure=OnFailure(check_steps=check_steps))
    with pytest.raises(InputError, match=r"step 3: agent 'p_1' has ended, but is in agents after its step\(None\)"):
        stepped(env, 3, action=np.full(2, 2, np.int32))


@pytest.mark.parametrize("settings", [{"batch_size": 1}, {"horizon": 5, "soft_horizon": True}])
@pytest.mark.parametrize("name", ["Walkers", "make_walkers"])
def test_what_does_not_go_with_several_agents_is_refused_by_name(settings, name):
    with pytest.raises(InputError, match=f"env.{list(settings)[-1]}"):
        make(f"{NAME}:{name}", num_envs=2, **settings)


def test_an_option_that_is_none_is_refused():
    assert check(f"{NAME}:Walkers", options={"end": 3}) == [
        f"env.options.end: {NAME}:Walkers has no such option: did you mean ends?"
    ]
    assert check(f"{NAME}:Walkers", options={"state": 3}) == ["env.options.state: expected true or false, got 3"]


def test_one_that_fails_is_made_anew_and_its_columns_say_so():
    Breaks.made = 0
    env = make(f"{NAME}:Breaks", num_envs=2, on_failure=OnFailure(restart=True))
    env.reset()
    results = [env.step(np.zeros(6, np.int32)) for _ in range(4)]
    # w_0 of the game that broke had ended on the row before
    np.testing.assert_array_equal(results[2].failed, [0, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(results[2].several.absent, [1, 1, 1, 1, 0, 0])
    assert not results[2].several.over.any() and env.num_restarts == 1
    np.testing.assert_array_equal(results[2].obs[:3, 1], [0, 0, 0])
    np.testing.assert_array_equal(results[3].several.absent, [0, 0, 0, 1, 0, 0])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Walkers", {"state": True}),
        ("Turns", {"turn_based": True}),
        ("Unequal", {}),
    ],
)
def test_games_in_processes_are_those_of_this_process(name, options):
    plain, apart = (make(f"{NAME}:{name}", num_envs=2, options=options, remote_worker_envs=on) for on in (False, True))
    try:
        assert apart.spec == plain.spec
        for env in (plain, apart):
            env.infos.wanted = True
        jax.tree.map(np.testing.assert_array_equal, apart.reset(), plain.reset())
        kinds, spaces = plain.spec.kinds, plain.spec.action
        parts = zip(spaces.items, kinds, strict=True) if kinds else [(spaces, range(plain.spec.num_envs // 2))]
        action = tuple(np.zeros((2 * len(own), *space.shape), space.dtype) for space, own in parts)
        for _ in range(8):
            found, expected = (env.step(action if kinds else action[0]) for env in (apart, plain))
            jax.tree.map(np.testing.assert_array_equal, found, expected)
            assert apart.infos.latest == plain.infos.latest
        assert apart.foreach_env(lambda env: type(env).__name__) == plain.foreach_env(lambda env: type(env).__name__)
    finally:
        apart.close()


def test_a_game_in_a_process_that_fails_is_made_anew():
    env = make(f"{NAME}:Breaks", num_envs=1, on_failure=OnFailure(restart=True), remote_worker_envs=True)
    env.reset()
    failed = [env.step(np.zeros(3, np.int32)).failed.any() for _ in range(4)]
    env.close()
    assert failed.count(True) == 1 and env.num_restarts == 1


# ---------------------------------------------------------------- which ids have several agents


@pytest.mark.parametrize(
    ("id", "known"),
    [
        (f"{NAME}:Walkers", True),
        (f"{NAME}:Turns", True),  # its constructor says so
        (f"{NAME}:make_walkers", None),
        ("counter_env:Counter", False),
        ("CartPole-v1", False),
        ("pettingzoo:mpe2.simple_spread_v3", True),
        (f"{NAME}:Nowhere", False),
    ],
)
def test_ids_of_several_agents(id, known):
    assert gym_ids.is_declared(id, {}) is known
    assert envs.is_multi_agent(id) is bool(known)


def test_a_function_that_does_not_say_what_it_makes_is_looked_at():
    env = make(f"{NAME}:make_walkers", num_envs=2, options={"ends": [1, 1, 1]})
    assert isinstance(env, MultiHostEnv) and stepped(env, 1)[4].all()
    assert make(f"{NAME}:make_walkers", num_envs=1, options={"state": True}).spec.observation["state"].shape == (3,)


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(InputError, match=r"env.id pettingzoo:no_such_suite.game_v1: .*no_such_suite"):
        make("pettingzoo:no_such_suite.game_v1")


# ---------------------------------------------------------------- around them


def test_wrappers_hand_on_what_several_agents_tell():
    env = make(f"{NAME}:Walkers", num_envs=1, no_done_at_end=True, frame_stack=2, use_prev_reward=True)
    env.reset()
    results = [env.step(np.zeros(3, np.int32)) for _ in range(4)]
    assert results[1].terminated[0] and env.spec.bootstraps
    assert results[2].several.absent.tolist() == [True, False, False] and env.spec.agents == ("w_0", "w_1", "w_2")
    np.testing.assert_array_equal(results[3].obs["obs"][1], [[1, 3], [1, 4]])
    assert results[3].obs["prev_reward"].tolist() == [0, 2, 3]


def test_infos_are_kept_by_column():
    env = make(f"{NAME}:Walkers", num_envs=2)
    env.infos.wanted = True
    env.reset()
    env.step(np.zeros(6, np.int32))
    assert env.infos.latest == [{"t": 1}] * 6
    env.infos.latest[5]["t"] = 7  # a copy: that of nobody else
    env.step(np.zeros(6, np.int32))
    assert env.infos.latest[0] == {"t": 2}
