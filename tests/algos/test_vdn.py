"""VDN and QMIX: their mixers by hand, acting by agent, absent agents, refusals; test_teams has what they learn."""

import dataclasses
import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import assert_same, perturbed

from jrl.algos import teams, vdn
from jrl.algos.exploration import EpsilonGreedy
from jrl.envs.team import joint_observation
from jrl.errors import InputError
from jrl.networks import NetworkConfig
from jrl.types import Batch, Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete

KEY = jax.random.key(3)
AGENT = Dict((("obs", Box((3,))), ("state", Box((2,))), ("action_mask", MultiBinary((4,)))))
SPEC = EnvSpec(joint_observation(AGENT, 3), MultiDiscrete((4, 4, 4)), 8)
SMALL = NetworkConfig(hidden=(16,))
MIXERS = ("sum", "qmix")


def observations(rows, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "agents": rng.normal(size=(rows, 3, 3)).astype(np.float32),
        "state": rng.normal(size=(rows, 2)).astype(np.float32),
        "present": np.ones((rows, 3), np.int8),
        "action_mask": np.ones((rows, 12), np.int8),
    }


def batch(rows=16, **changes):
    rng = np.random.default_rng(5)
    made = Batch(
        obs=observations(rows),
        action=rng.integers(0, 4, (rows, 3)).astype(np.int32),
        reward=rng.normal(size=rows).astype(np.float32),
        discount=np.full((rows,), 0.9, np.float32),
        next_obs=observations(rows, 1),
        weight=np.ones((rows,), np.float32),
        index=np.arange(rows, dtype=np.int32),
    )
    return dataclasses.replace(made, **changes)


@functools.cache
def learner(mixer):
    """(algo, its first state, its jitted update)"""
    algo = vdn.make(vdn.Config(mixer=mixer, gamma=0.9), SPEC, SMALL)
    return algo, fakes.made_up_state(algo), jax.jit(algo.update)


# ---------------------------------------------------------------- mixers


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_joint_value_rises_with_each_agents(mixer):
    """Whatever the hypernetworks say: by the gradient, at 500 drawn weights of both signs."""
    cfg, rng = vdn.Config(mixer=mixer, mixer_embed=5), np.random.default_rng(0)
    width = 0 if mixer == "sum" else 3 * 5 + 5 + 5 + 1
    q, weights = (jnp.asarray(rng.normal(size=(500, n)), jnp.float32) for n in (3, width))
    slopes = np.asarray(jax.jit(jax.vmap(jax.grad(lambda q, w: teams.mix(cfg, q[None], w[None])[0])))(q, weights))
    assert slopes.shape == (500, 3)
    assert (slopes >= 0).all() and (slopes > 0).mean() > 0.99
    if mixer == "qmix":
        assert float(slopes.std()) > 0.1  # and it is no sum


def test_qmix_against_a_plain_loop():
    """Agents' values 1 and -2, two hidden units: elu of |W1|^T q + b1, times |w2|, plus v."""
    w1, b1, w2, v = [[1.0, -2.0], [-3.0, 0.5]], [0.5, 4.0], [-1.0, 2.0], 0.25
    weights = jnp.array([[*w1[0], *w1[1], *b1, *w2, v]])
    hidden = [1 * 1 + -2 * 3 + 0.5, 1 * 2 + -2 * 0.5 + 4.0]
    want = (np.exp(hidden[0]) - 1) * 1 + hidden[1] * 2 + v
    got = teams.mix(vdn.Config(mixer="qmix", mixer_embed=2), jnp.array([[1.0, -2.0]]), weights)
    np.testing.assert_allclose(got, [want], rtol=1e-6)


@pytest.mark.parametrize("mixer", MIXERS)
def test_targets_and_errors_are_of_the_joint_value(mixer):
    """One update's loss by hand: the chooser's best action of each agent among those allowed, valued by the target."""
    algo, state, update = learner(mixer)
    other = perturbed(state).params
    state = state.replace(target_params=other)
    allowed = np.ones((16, 12), np.int8)
    allowed[:, 5:8] = 0  # of the second agent action 0 alone
    data = batch(next_obs={**observations(16, 1), "action_mask": allowed})
    _, aux = update(state, data, KEY)
    outputs = jax.jit(algo.outputs)

    def q(params, obs):
        return np.asarray(outputs(state.replace(params=params), obs)["q"])

    def joint(params, obs, action):
        values = np.take_along_axis(q(params, obs), np.asarray(action)[..., None], 2)[..., 0]
        if mixer == "sum":
            return values.sum(1)
        hyper = {name: [{k: np.asarray(v) for k, v in one.items()} for one in layers]
                 for name, layers in params["mixer"].items()}  # fmt: skip
        out = {}
        for name, layers in hyper.items():
            x = np.asarray(obs["state"])
            for i, one in enumerate(layers):
                x = (np.maximum(x, 0) if i else x) @ one["kernel"] + one["bias"]
            out[name] = x
        first = np.einsum("na,nae->ne", values, np.abs(out["w1"]).reshape(16, 3, -1)) + out["b1"]
        hidden = np.where(first > 0, first, np.expm1(np.minimum(first, 0)))
        return (hidden * np.abs(out["w2"])).sum(1) + out["v"][:, 0]

    chosen = q(state.params, data.next_obs).copy()
    chosen[:, 1, 1:] = -np.inf
    target = np.asarray(data.reward) + 0.9 * joint(other, data.next_obs, chosen.argmax(-1))
    error = target - joint(state.params, data.obs, data.action)
    np.testing.assert_allclose(aux.priority, np.abs(error), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(aux.metrics["loss/value"], np.mean(error**2) / 2, rtol=1e-4)


@pytest.mark.parametrize("mixer", MIXERS)
def test_an_absent_agent_changes_nothing(mixer):
    """Neither what it sees nor what it did matters to the update; of one that is present both do."""
    _, state, update = learner(mixer)
    others = np.array([1, 0, 1], np.int8)
    gone = lambda obs: {**obs, "present": obs["present"] * others}
    data = batch()
    absent = dataclasses.replace(data, obs=gone(data.obs), next_obs=gone(data.next_obs))

    def spoiled(data):
        see = lambda obs: {**obs, "agents": obs["agents"] * np.float32([[1], [-7], [1]])}
        action = np.where(others, data.action, 3 - data.action)
        return dataclasses.replace(data, obs=see(data.obs), next_obs=see(data.next_obs), action=action)

    assert_same(update(state, absent, KEY), update(state, spoiled(absent), KEY))
    losses = [float(update(state, x, KEY)[1].metrics["loss/value"]) for x in (data, spoiled(data), absent)]
    assert len(set(losses)) == 3


# ---------------------------------------------------------------- acting


def acted(algo, state, obs, carry=(), explore=True):
    """What acting gives, in numpy."""
    run = lambda state, obs, carry: algo.act(algo.actor(state), obs, carry, KEY, explore=explore)
    return jax.device_get(jax.jit(run)(state, obs, carry))


def test_each_agent_explores_on_its_own():
    """Of two agents, with epsilon 1/2 and two actions, each takes its best in 3/4 of all steps, independently."""
    spec = EnvSpec(joint_observation(Box((3,)), 2), MultiDiscrete((2, 2)), 1)
    algo = vdn.make(vdn.Config(exploration=EpsilonGreedy(epsilon=0.5)), spec, SMALL)
    state = fakes.made_up_state(algo)
    obs = jax.tree.map(lambda x: x[:1, :2], {k: v for k, v in observations(1).items() if k in ("agents", "present")})
    obs = jax.tree.map(lambda x: np.repeat(x, 20_000, 0), obs)
    best = acted(algo, state, obs, explore=False).action
    assert best.shape == (20_000, 2) and best.dtype == jnp.int32
    np.testing.assert_array_equal(best, np.asarray(jax.jit(algo.outputs)(state, obs)["q"]).argmax(-1))
    taken = acted(algo, state, obs).action == best
    np.testing.assert_allclose(taken.mean(0), 0.75, atol=0.02)
    np.testing.assert_allclose(taken.all(1).mean(), 0.75**2, atol=0.02)


def test_the_ladder_has_a_rung_for_each_agent():
    """Agents of neighbouring teams stand one after the other, also in a part of the run's environments."""
    algo = vdn.make(vdn.Config(exploration=EpsilonGreedy(ladder=True)), SPEC, SMALL)
    np.testing.assert_allclose(algo.carry(2), np.arange(6).reshape(2, 3) / 5)
    np.testing.assert_allclose(algo.carry(2, 1, 4), np.arange(3, 9).reshape(2, 3) / 11, rtol=1e-6)
    out = acted(algo, fakes.made_up_state(algo), observations(2), algo.carry(2))
    assert out.action.shape == (2, 3)


@pytest.mark.parametrize("explore", [False, True])
def test_only_allowed_actions_are_taken(explore):
    algo = vdn.make(vdn.Config(exploration=EpsilonGreedy(epsilon=1.0)), SPEC, SMALL)
    mask = np.random.default_rng(0).random((64, 3, 4)) < 0.4
    mask[..., 2] |= ~mask.any(-1)
    obs = {**observations(64), "action_mask": mask.reshape(64, 12).astype(np.int8)}
    action = acted(algo, fakes.made_up_state(algo), obs, explore=explore).action
    assert np.take_along_axis(mask, action[..., None], 2).all()


def test_without_ids_equal_observations_have_equal_values():
    same = {**observations(1), "agents": np.ones((1, 3, 3), np.float32)}
    for agent_id in (False, True):
        algo = vdn.make(vdn.Config(agent_id=agent_id), SPEC, SMALL)
        q = np.asarray(jax.jit(lambda algo=algo: algo.outputs(algo.init(KEY), same))()["q"])[0]
        assert np.array_equal(q[0], q[1]) != agent_id


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("observed", "action", "words"),
    [
        (Box((3,)), Discrete(2), r"not for a single agent: .* multi_agent\.group"),
        (Box((3,)), MultiDiscrete((2, 2)), r"not for a single agent: .* multi_agent\.group"),
        (joint_observation(Box((3,)), 2), MultiDiscrete((2, 3)), r"not the joint action MultiDiscrete\(nvec=\(2, 3\)"),
        (joint_observation(Box((3,)), 2), MultiDiscrete((2, 2, 2)), "not the joint action MultiDiscrete"),
        (joint_observation(Box((3,)), 2), Box((2,), low=-1.0, high=1.0), "not the joint action Box.* sac or td3"),
    ],
    ids=str,
)
def test_spaces_that_are_not_a_teams(observed, action, words):
    with pytest.raises(InputError, match="vdn acts for a team.*" + words):
        vdn.make(vdn.Config(), EnvSpec(observed, action, 1), SMALL)


def test_munchausen_is_refused():
    assert vdn.Config(munchausen=True).validate() == [
        "munchausen is for one agent's policy, not for a team's: leave it out"
    ]
