"""Agents of different spaces in one environment: what they are as columns, and policies of a kind each."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from agent_runs import trained, whole_and_resumed, without
from flax import struct

import jrl
from jrl import agents, config, envs, evaluate
from jrl.agents import fixed
from jrl.config import multi_agent
from jrl.envs import agent_options, team
from jrl.envs import multi_agent as multi_agent_env
from jrl.envs.checker import check_env
from jrl.envs.multi_agent import MultiDefinition
from jrl.envs.transform import transformed
from jrl.errors import InputError
from jrl.export.__main__ import main as export
from jrl.rollout import unroll
from jrl.run import build, network_table, preflight
from jrl.run.session import Session
from jrl.types import ActOut, Box, Dict, Discrete, Tuple

HUNTER, PREY = Box((6,)), Dict((("me", Box((2,))), ("hunters", Box((2, 2)))))
VELOCITY = Box((2,), low=-0.5, high=0.5)
AGENTS, KINDS = ("hunter_0", "prey_0", "hunter_1"), ((0, 2), (1,))
_WAYS = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)


@struct.dataclass
class Places:
    hunters: jax.Array  # [G, 2, 2]
    prey: jax.Array  # [G, 2]


def pursuit(noise: float = 1.0) -> MultiDefinition:
    """Two hunters on a grid are paid minus their distance to the prey, which flies, pays its nearest hunter's and ends
    once it is caught; the hunters go on until the time is over."""

    def reset(draws):
        moved = noise * draws.T.reshape(-1, 3, 2)
        start = jnp.array([[-2.0, 0.0], [2.0, 0.0], [0.0, 1.0]])[None]
        return Places(start[:, :2] + moved[:, :2], start[:, 2] + moved[:, 2])

    def apart(state):
        return jnp.abs(state.hunters - state.prey[:, None]).sum(-1)  # [G, 2]

    def step(state, actions, draws):
        ways, velocity = actions
        state = Places(state.hunters + jnp.asarray(_WAYS)[ways], state.prey + velocity[:, 0])
        away = apart(state)
        nearest, caught = away.min(-1), away.min(-1) < 0.6
        reward = jnp.stack([-away[:, 0], nearest, -away[:, 1]], 1)
        never = jnp.zeros_like(caught)
        return state, reward, jnp.stack([never, caught, never], 1)

    def observe(state):
        others = state.hunters[:, ::-1]
        prey = jnp.broadcast_to(state.prey[:, None], others.shape)
        return (
            jnp.concatenate([state.hunters, prey, others], -1),
            {"me": state.prey[:, None], "hunters": state.hunters[:, None]},
        )

    return MultiDefinition(
        agents=AGENTS,
        observation={"hunter_0": HUNTER, "prey_0": PREY, "hunter_1": HUNTER},
        action={"hunter_0": Discrete(5), "prey_0": VELOCITY, "hunter_1": Discrete(5)},
        max_episode_steps=6,
        num_draws=6,
        reset=reset,
        step=step,
        observe=observe,
        state=Box((6,)),
        view=lambda state: jnp.concatenate([state.hunters.reshape(-1, 4), state.prey], -1),
    )


ID = f"{__name__}:pursuit"
GAMES, STEPS = 4, 16
SMALL = {
    "env": {"id": ID, "num_envs": GAMES},
    "algo": {"name": "ppo", "num_epochs": 1, "num_minibatches": 2},
    "network": {"hidden": [8]},
    "rollout": {"length": STEPS, "iterations_per_call": 1},
    "run": {"compile_cache": False, "log": []},
}


def made(**sections):
    return config.from_dict(config.merge(SMALL, sections))


def chase(actor, obs, carry, key, explore):
    """The first hunter goes right, the second left, the prey down, in each game."""
    hunters, prey = (
        jnp.tile(jnp.array([1, 2]), len(obs[0]) // 2),
        jnp.tile(jnp.array([[0.0, -1.0]]), (len(obs[0]) // 2, 1)),
    )
    return ActOut((hunters, prey), (), {})


# ---------------------------------------------------------------- columns


def test_a_chase_worked_out_by_hand():
    env = envs.make(ID, num_envs=2, options={"noise": 0.0})
    assert env.spec.kinds == KINDS and env.spec.agents == AGENTS and env.spec.num_envs == 6
    assert env.spec.observation == Tuple((HUNTER, PREY))
    assert env.spec.action == Tuple((Discrete(5), Box((2,), low=-1.0, high=1.0)))
    assert env.spec.env_action == Tuple((Discrete(5), VELOCITY))
    collect = unroll.make(env, chase, length=8)
    _, rollout, report = jax.device_get(
        jax.jit(collect.step)(jax.jit(collect.init)(jax.random.key(0)), (), jax.random.key(1))
    )
    hunters, prey = rollout.obs
    assert hunters.shape == (8, 4, 6) and prey["hunters"].shape == (8, 2, 2, 2) and rollout.reward.shape == (8, 6)
    for game in range(2):  # after the first step
        np.testing.assert_allclose(hunters[1, 2 * game], [-1, 0, 0, 0.5, 1, 0])
        np.testing.assert_allclose(hunters[1, 2 * game + 1], [1, 0, 0, 0.5, -1, 0])
        np.testing.assert_allclose(prey["me"][1, game], [0, 0.5])
        np.testing.assert_allclose(prey["hunters"][1, game], [[-1, 0], [1, 0]])
        away = [-1.5, 0, -1.5, -3, -4.5, -6, 0, -1.5]  # caught in the second step; the seventh resets
        expected = np.array([away, [1.5, 0, 0, 0, 0, 0, 0, 1.5], away]).T
        np.testing.assert_allclose(rollout.reward[:, 3 * game : 3 * game + 3], expected)
        there = np.array([[t != 6, t in (0, 1, 7), t != 6] for t in range(8)])
        np.testing.assert_array_equal(rollout.mask[:, 3 * game : 3 * game + 3], there)
    assert np.argwhere(np.asarray(rollout.terminated)).tolist() == [[1, 1], [1, 4]]
    assert np.argwhere(np.asarray(rollout.over)).tolist() == [[5, 0], [5, 1]]
    np.testing.assert_allclose(report.agents.return_sum, [-33, 3, -33])
    np.testing.assert_allclose(hunters[6], hunters[5] + np.array([[1, 0, 0, -0.5, -1, 0], [-1, 0, 0, -0.5, 1, 0]] * 2))


def test_what_is_seen_of_earlier_steps_and_of_all_is_of_each_kind():
    env = envs.make(ID, num_envs=2, options={"noise": 0.0}, frame_stack=2, use_prev_action=True, state=True)
    hunter, prey = env.spec.observation.items
    assert hunter["obs"] == Box((2, 6)) and prey["hunters"] == Box((2, 2, 2), channels=0) and prey["me"] == Box((2, 2))
    assert hunter["prev_action"] == Discrete(5) and prey["prev_action"] == env.spec.action.items[1]
    collect = unroll.make(env, lambda a, obs, *rest: chase(a, (obs[0]["obs"], None), *rest), length=8)
    _, rollout, _ = jax.device_get(
        jax.jit(collect.step)(jax.jit(collect.init)(jax.random.key(0)), (), jax.random.key(1))
    )
    hunters, prey = rollout.obs
    np.testing.assert_array_equal(hunters["prev_action"][:, :2], [[0, 0]] + [[1, 2]] * 6 + [[0, 0]])
    np.testing.assert_allclose(hunters["obs"][1:6, :, 0], hunters["obs"][:5, :, 1])
    np.testing.assert_allclose(prey["prev_action"][1, 0], [0, -1])
    whole = np.asarray(hunters["state"])[1, 0]
    latest = whole[-1] if whole.ndim > 1 else whole
    np.testing.assert_allclose(latest, [-1, 0, 1, 0, 0, 0.5])
    np.testing.assert_allclose(np.asarray(prey["state"])[1, 1], np.asarray(hunters["state"])[1, 3])


def nearer(obs):
    """Hunters see the prey from where they are, the prey sees itself."""
    from_there = lambda own: own[2:4] - own[:2]
    return {name: own["me"] if name == "prey_0" else from_there(own) for name, own in obs.items()}


def test_views_are_of_each_kind():
    env = envs.make(ID, num_envs=2, options={"noise": 0.0})
    seen = transformed(
        env,
        functools.partial(agent_options.apply_observation_fn, path=f"{__name__}:nearer"),
        agent_options.add_agent_ids,
    )
    assert [sorted(dict(part.items)) for part in seen.spec.observation.items] == [["agent_id", "obs"]] * 2
    _, (hunters, prey) = jax.jit(seen.reset)(jax.random.key(0))
    np.testing.assert_array_equal(hunters["agent_id"], [0, 2, 0, 2])
    np.testing.assert_array_equal(prey["agent_id"], [1, 1])
    np.testing.assert_allclose(hunters["obs"], [[2, 1], [-2, 1]] * 2)
    np.testing.assert_allclose(prey["obs"], [[0, 1]] * 2)


def test_what_does_not_fit_is_refused():
    env, both = envs.make(ID, num_envs=2), (np.zeros(4, np.int32), np.zeros((2, 2), np.float32))
    state, _ = env.reset(jax.random.key(0))
    for wrong in (np.zeros(6, np.int32), both[:1], (both[0][:2], both[1]), both[::-1]):
        with pytest.raises(ValueError, match="actions"):
            env.step(state, wrong, jax.random.key(1))
    with pytest.raises(InputError, match=r"multi_agent.group: .*spaces of hunter_0 and prey_0 differ"):
        team.join_all_agents(env.spec)
    with pytest.raises(
        InputError, match=r"MultiDefinition.action: .*each of hunter_0, prey_0, hunter_1, got spaces of a"
    ):
        multi_agent_env.build(pursuit()._replace(action={"a": Discrete(2)}), 2)


def test_the_checker_finds_nothing_wrong():
    assert check_env(f"{__name__}:pursuit", backend="jax", steps=30, num_envs=2).problems == []


# ---------------------------------------------------------------- groups


def test_groups_take_their_columns_also_of_wider_blocks():
    group = fixed.Group(("a", "b"), np.array([[2], [0]]), None, kinds=KINDS)
    seats, width = group.seats(3)
    assert seats.tolist() == [1, 0] and width == 2 and group.kind == 0
    wide = fixed.Group(("a",), np.array([[1, 4]]), None, kinds=KINDS)  # the prey of two games side by side
    seats, width = wide.seats(6)
    assert seats.tolist() == [0, 1] and width == 2 and wide.kind == 1
    obs = np.arange(8), np.arange(4)  # of four games
    np.testing.assert_array_equal(group.of_kind(obs, 3, 0), [1, 0, 3, 2, 5, 4, 7, 6])
    np.testing.assert_array_equal(wide.of_kind(obs, 6, 0), [0, 1, 2, 3])
    hunters = fixed.Group(("h",), np.array([[0, 2]]), None, kinds=KINDS)
    prey = fixed.Group(("p",), np.array([[1]]), None, kinds=KINDS)
    joined = fixed._joined([prey, hunters], 3, [np.arange(4), np.arange(8)])
    jax.tree.map(np.testing.assert_array_equal, joined, (np.arange(8), np.arange(4)))
    swapped = [fixed.Group((n,), np.array([[k]]), None, kinds=KINDS) for n, k in (("b", 2), ("p", 1), ("a", 0))]
    joined = fixed._joined(swapped, 3, [np.array([10, 11]), np.array([5, 6]), np.array([20, 21])])
    jax.tree.map(np.testing.assert_array_equal, joined, (np.array([20, 10, 21, 11]), np.array([5, 6])))


def test_each_column_acts_as_its_policy_alone():
    cfg = preflight.resolved(made(multi_agent={"mapping": "by_agent"}))
    env = envs.make(cfg.env)
    algo, state = build.algorithm(cfg, env.spec), None
    state = jax.jit(algo.init)(jax.random.key(0))
    assert set(state) == set(AGENTS)
    shapes, rng = jax.eval_shape(env.reset, jax.random.key(1))[1], np.random.default_rng(3)
    obs = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)

    def act(algo, state, obs, count):
        run = lambda state, obs: algo.act(algo.actor(state), obs, algo.carry(count), jax.random.key(2), False)
        return jax.device_get(jax.jit(run)(state, obs))

    out = act(algo, state, obs, 3 * GAMES)
    for agent, own_obs, action in (
        ("hunter_0", obs[0][::2], out.action[0][::2]),
        ("hunter_1", obs[0][1::2], out.action[0][1::2]),
        ("prey_0", obs[1], out.action[1]),
    ):
        own_cfg, spec = agents.make(cfg, env.spec).of(agent)
        assert spec.kinds == () and spec.agents == (agent,) and spec.num_envs == GAMES
        alone = build.algorithm(own_cfg, spec)
        expected = act(alone, state[agent], own_obs, GAMES).action
        np.testing.assert_allclose(action, expected, rtol=1e-5)


# ---------------------------------------------------------------- who follows whom

TAG = ("adversary_0", "adversary_1", "agent_0")
TAG_KINDS = {TAG[:2]: "observations of 16", TAG[2:]: "observations of 14"}


def follows(agents=TAG, kinds=None, **section):
    cfg = config.from_dict({**SMALL, "multi_agent": section})
    found = multi_agent.with_agents(cfg, agents, TAG_KINDS if kinds is None else kinds)
    return multi_agent.followers(found.multi_agent)


def test_a_policy_for_each_kind_unless_the_config_says_more():
    assert follows() == {"adversary": TAG[:2], "agent": TAG[2:]}
    assert follows(policies={"agent": {"algo": {"lr": 1e-4}}, "adversary": {}}) == {
        "agent": TAG[2:],
        "adversary": TAG[:2],
    }
    assert follows(mapping="by_agent") == {name: (name,) for name in TAG}
    assert follows(mapping={"agent_.*": "a", ".*": "b"}) == {"b": TAG[:2], "a": TAG[2:]}
    alike = ("agent_0", "agent_1")
    assert follows(alike, {alike[:1]: "x", alike[1:]: "y"}) == {"agent_0": alike[:1], "agent_1": alike[1:]}
    near = ("agent", "agent_x", "agent_1")
    assert follows(near, {("agent", "agent_1"): "x", ("agent_x",): "y"}) == {
        "agent": ("agent", "agent_1"),
        "agent_x": ("agent_x",),
    }
    mixed = ("red", "blue", "green")
    assert follows(mixed, {mixed[:2]: "x", mixed[2:]: "y"}) == {"red": mixed[:2], "green": mixed[2:]}


@pytest.mark.parametrize("section", [{"mapping": "shared"}, {"policies": {"main": {}}}, {"mapping": {".*": "main"}}])
def test_agents_of_different_spaces_do_not_follow_one_policy(section):
    with pytest.raises(InputError) as e:
        follows(**section)
    (message,) = e.value.errors
    policy = "shared" if section == {"mapping": "shared"} else "main"
    assert message.startswith(f"multi_agent.mapping: expected agents of equal spaces to follow policy {policy}, got ")
    assert "adversary_0 (observations of 16) and agent_0 (observations of 14)" in message
    mend = '{"adversary_.*": adversary, "agent_.*": agent}'
    assert f"multi_agent.mapping={mend}" in message
    assert follows(mapping=yaml.safe_load(mend)) == follows()


def test_kinds_are_no_team():
    cfg = config.from_dict({**SMALL, "multi_agent": {"group": {"team": list(TAG)}}})
    with pytest.raises(InputError, match=r"multi_agent.group.team: .*those of adversary_0 and agent_0 differ"):
        multi_agent.check_group(cfg.multi_agent, TAG, TAG_KINDS)


# ---------------------------------------------------------------- runs

BY_REPLAY = {"replay": {"batch_size": 16, "learning_starts": 32, "updates_per_step": 0.25}}


@pytest.mark.slow
def test_a_dqn_and_a_sac_learn_beside_each_other():
    own = {"hunter": {"algo": {"name": "dqn"}, **BY_REPLAY}, "prey": {"algo": {"name": "sac"}, **BY_REPLAY}}
    state, row = trained(made(multi_agent={"policies": own}))
    assert row["policy/hunter/replay/size"] == 2 * 3 * GAMES * STEPS
    assert row["policy/prey/replay/size"] == 3 * GAMES * STEPS
    assert int(state["hunter"].updates) > 0 and int(state["prey"].updates) > 0
    assert np.isfinite(row["policy/hunter/loss/value"]) and np.isfinite(row["policy/prey/loss/policy"])


@pytest.mark.slow
def test_a_run_that_is_resumed_is_the_run_that_was_not_interrupted(tmp_path, capsys):
    """On two devices, with memory."""
    more = {
        "network": {"hidden": [], "core": {"name": "gru", "size": 4}, "use_prev_action": True},
        "env": {"frame_stack": 2},
        "multi_agent": {"agent_id": True},
        "devices": {"fake": 2},
    }
    data = config.merge(SMALL, config.merge({"run": {"log": ["jsonl"], "report_every": 64}}, more))
    rows = whole_and_resumed(tmp_path, data, cut=96, steps=192)
    # what is counted since the row before depends on where that was
    whole, resumed = (without(row, "time", "perf", "/count", "/return_m") for row in rows)
    assert whole == resumed
    policy = jrl.load(tmp_path / "whole", policy="prey")
    assert policy.observation_space == Dict((*PREY.items, ("agent_id", Discrete(3))))
    seen = {"me": np.zeros((3, 2)), "hunters": np.ones((3, 2, 2)), "agent_id": np.ones(3, np.int32)}
    action = policy.act(seen)
    assert action.shape == (3, 2) and (np.abs(action) <= 0.5).all()  # in the environment's units
    assert jrl.load(tmp_path / "whole", policy="hunter").act({"obs": np.zeros(6), "agent_id": 0}).shape == ()
    for name, shape in (("hunter", ()), ("prey", (2,))):  # each with the actions of its own kind
        capsys.readouterr()
        assert export([str(tmp_path / "whole"), f"--policy={name}", f"--out={tmp_path / name}"]) == 0
        assert json.loads(capsys.readouterr().out)["agreement"] == 1.0
        about = json.loads((tmp_path / name / "policy.json").read_text())
        assert tuple(about["action"].get("shape", ())) == shape
    assert evaluate.main([str(tmp_path / "whole"), "--episodes=2", "--json", "--per-episode"]) == 0
    assert json.loads(capsys.readouterr().out)["lengths"] == [6, 6]


def test_the_table_of_parameters_has_each_policy():
    names = network_table.parameters(made())
    assert {name.partition(".")[0] for name in names} == {"hunter", "prey"}


@pytest.mark.slow
def test_whole_episodes_of_each_kind():
    """Rewards are paid for where all are after the step, which each agent sees on its next row, the last one's too."""
    cfg = made(rollout={"batch_mode": "complete_episodes"}, multi_agent={"mapping": {"hunter.*": "h", ".*": "p"}})
    with Session(cfg, endless=True) as session:
        session.start()
        rollout = jax.device_get(session.run.program.collect(session.state, 0, 0)[1])
    by_agent = lambda x: x.reshape(len(x), GAMES, 3)
    mask, reward = by_agent(rollout.mask), by_agent(rollout.reward)
    hunters, prey = rollout.obs[0].reshape(-1, GAMES, 2, 6), rollout.obs[1]
    paid = -np.abs(hunters[..., :2] - hunters[..., 2:4]).sum(-1)
    flown = np.abs(prey["hunters"] - prey["me"][:, :, None]).sum(-1).min(-1)
    expected = np.stack([paid[..., 0], flown, paid[..., 1]], -1)
    live = mask[:-1]
    assert live.sum() > 60 and not mask[-1].any()
    np.testing.assert_allclose(reward[:-1][live], expected[1:][live], rtol=1e-5)
    # what was recorded of an action is as likely as the actions that stand beside it
    for name, kind in (("h", 0), ("p", 1)):
        assert rollout.extras[name]["log_prob"].shape == jax.tree.leaves(rollout.action[kind])[0].shape[:2]
