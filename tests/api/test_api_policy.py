"""Acting through the API with memory, masks, and observations that are trees: state in, state out."""

import types

import jax
import numpy as np
import pytest

from jrl import agents, config
from jrl.envs.history import build_history
from jrl.play.actor import Actor
from jrl.rllib.policy import ActionPolicy
from jrl.run import build
from jrl.types import Box, Dict, Discrete, EnvSpec, MultiBinary

VECTOR, NORMAL = Box((4,)), Box((2,), "float32", -1.0, 1.0)
OWN = Box((2,), "float32", (-2.0, 0.0), (2.0, 10.0))
CORE = "network.core={name: lstm, size: 8}"


def policies(spec, *overrides, own=None):
    """The API's policy and that of `jrl.load`, with the same large parameters."""
    cfg = config.load(None, ["network.hidden=[8]", *overrides], algo="ppo", env="CartPole-v1", stop=["env_steps=1000"])
    if own is not None:
        spec = spec._replace(env_observation=own)
    algo = build.algorithm(cfg, spec)
    state, rng = jax.jit(algo.init)(jax.random.key(1)), np.random.default_rng(0)
    state = state.replace(params=jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype(x.dtype), state.params))
    session = types.SimpleNamespace(
        version=0, policies=(), actor=lambda policy=None: algo.actor(state), learner_state=lambda policy=None: state,
        run=types.SimpleNamespace(policies=agents.make(cfg, spec)),
    )  # fmt: skip
    made: object = ActionPolicy(session, Actor(algo, spec, cfg, seed=cfg.run.seed))
    return made, Actor(algo, spec, cfg, state)


def test_memory_goes_in_and_out():
    policy, loaded = policies(EnvSpec(VECTOR, Discrete(6), 1), CORE)
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(15, 4)).astype(np.float32)
    expected = [loaded.act(x) for x in obs]
    state, actions = policy.get_initial_state(), []
    assert policy.is_recurrent() and {x.shape for x in jax.tree.leaves(state)} == {(8,)}
    for x in obs:
        action, state, extras = policy.compute_single_action(x, state, explore=False)
        actions.append(action)
        assert extras["log_prob"].shape == ()
    assert actions == expected and len(set(actions)) > 1
    action, after, _ = policy.compute_single_action(obs[0], explore=False)  # without a state an episode begins
    assert action == expected[0]
    many, states, _ = policy.compute_actions(obs[:2], jax.tree.map(lambda x: np.stack([x, x]), after), explore=False)
    second = policy.compute_single_action(obs[1], after, explore=False)
    assert many[1] == second[0] == expected[1]
    named, _, _ = policy.compute_actions({"a": obs[0], "b": obs[1]}, explore=False)
    assert named["a"] == expected[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, atol=1e-6), states, second[1])
    assert policy.value_function(obs).shape == (15,)


def test_the_step_before_in_the_environments_units():
    past = {"frame_stack": 2, "prev_action": True, "prev_reward": True}
    told = build_history(EnvSpec(VECTOR, NORMAL, 1, None, OWN), **past)
    settings = ["env.frame_stack=2", "network.use_prev_action=true", "network.use_prev_reward=true"]
    policy, loaded = policies(told.spec, *settings, own=VECTOR)
    assert policy.observation_space == loaded.observation_space == VECTOR
    rng = np.random.default_rng(0)
    state, reward, seen, told_twice = policy.get_initial_state(), 0.0, [], 0
    for t in range(10):
        obs = rng.normal(size=4)
        expected = loaded.act(obs, reward=reward)
        if t and (np.abs((seen[-1] - [0, 5]) / [2, 5]) < 1).all():  # nothing was clipped: the same by what it did
            past = {"prev_action": seen[-1], "prev_reward": reward}
            given, _, _ = policy.compute_single_action(obs, state, explore=False, **past)
            np.testing.assert_allclose(given, expected, atol=1e-3)
            told_twice += 1
        found, state, _ = policy.compute_single_action(obs, state, explore=False, prev_reward=reward)
        np.testing.assert_allclose(found, expected, atol=1e-4)
        seen.append(found)
        reward = float(rng.normal())
    assert told_twice > 0
    assert np.std(seen, 0).min() > 0.1
    with pytest.raises(ValueError, match="use_prev_reward"):
        policy.compute_single_action(obs, state)


def test_a_dict_is_one_observation_a_batch_or_observations_by_agent():
    spec = EnvSpec(Dict((("place", VECTOR), ("kind", Discrete(3)), ("action_mask", MultiBinary((3,))))), Discrete(3), 1)
    policy, _ = policies(spec)
    rng = np.random.default_rng(0)
    mask = np.eye(3, dtype=np.int8)
    batch = {"place": rng.normal(size=(3, 4)).astype(np.float32), "kind": np.arange(3), "action_mask": mask}
    rows = [{name: x[i] for name, x in batch.items()} for i in range(3)]
    assert policy.get_initial_state() == [] and not policy.is_recurrent()
    assert [policy.compute_single_action(row, []) for row in rows] == [0, 1, 2]
    assert policy.compute_actions(batch).tolist() == [0, 1, 2]
    assert policy.compute_actions({"x": rows[1], "y": rows[2]}) == {"x": 1, "y": 2}
    assert policy.dist_class is not None and policy.value_function(batch).shape == (3,)
    with pytest.raises(ValueError, match="observation/action_mask: entries 0 to 2 are all 0"):
        policy.compute_single_action({**rows[0], "action_mask": np.zeros(3)})
    with pytest.raises(
        ValueError, match=r"prev_action: this policy does not read prev_action \(network.use_prev_action\)"
    ):
        policy.compute_single_action(rows[0], prev_action=1)
