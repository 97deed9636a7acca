"""PQN of a team: the joint value, absent agents, masks, memory, refusals."""

import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from fakes import assert_same, flags, perturbed
from test_vdn import KEY, MIXERS, SMALL, SPEC, acted, observations

from jrl.algos import pqn, teams
from jrl.envs.team import joint_observation
from jrl.errors import InputError
from jrl.fields.hyper import Gru
from jrl.networks import NetworkConfig
from jrl.ops import returns
from jrl.types import Box, Discrete, EnvSpec, MultiDiscrete, Rollout

T, B = 8, 8
WHOLE = {"num_epochs": 1, "num_minibatches": 1, "max_grad_norm": None, "lr": 0.1, "gamma": 0.9, "q_lambda": 0.5}
NETWORKS = {"no memory": SMALL, "memory": NetworkConfig(hidden=(6,), core=Gru(size=5), max_seq_len=4)}


@functools.cache
def acting(act, greedy):
    """The jitted steps of a policy, compiled once for all rollouts."""
    fresh = lambda x, keep: jnp.expand_dims(keep, range(1, x.ndim))  # the memory begins anew after a reset row

    @jax.jit
    def run(actor, obs, valid, start):
        def step(carry, row):
            seen, keep = row
            out = act(actor, seen, carry, KEY, explore=not greedy)
            carry = jax.tree.map(lambda old, new: jnp.where(fresh(new, keep), new, old), start, out.carry)
            return carry, (out.action, out.extras["value"])

        return jax.lax.scan(step, start, (obs, valid))[1]

    return run


def rollout_of(algo, state, obs, rng, greedy=False):
    """(a Rollout [T, B] in which the policy acted, the value of the joint action that is best [T + 1, B])."""
    terminated, truncated, valid = flags(rng, T, B)
    start, run = algo.carry(B), acting(algo.act, greedy)
    action, value = jax.device_get(run(algo.actor(state), obs, np.concatenate([valid, valid[-1:]]), start))
    reward = np.where(valid, rng.normal(size=(T, B)), 0).astype(np.float32)
    made = Rollout(
        obs=jax.tree.map(lambda x: x[:-1], obs), last_obs=jax.tree.map(lambda x: x[-1], obs), action=action[:-1],
        reward=reward, terminated=terminated, truncated=truncated, mask=valid, contiguous=np.ones(B, bool),
        extras={"value": value[:-1]}, carry=start,
    )  # fmt: skip
    return made, value


def seen(seed=0, **changes):
    """Observations [T + 1, B, *]."""
    obs = jax.tree.map(lambda x: x.reshape(T + 1, B, *x.shape[1:]), observations((T + 1) * B, seed))
    return {**obs, **changes}


@functools.cache
def learner(mixer, network="no memory"):
    """(algo, its first state, its jitted update)"""
    algo = pqn.make(pqn.Config(mixer=mixer, **WHOLE), SPEC, NETWORKS[network])
    return algo, fakes.made_up_state(algo), jax.jit(algo.update)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixer", "network"),
    [*((mixer, "no memory") for mixer in MIXERS), ("qmix", "memory")],
)
def test_targets_and_the_loss_are_of_the_joint_value(mixer, network):
    """Greedy actions under masks: Q_tot of them is the value that acting recorded, and lambda-returns are of that."""
    algo, state, update = learner(mixer, network)
    state, rng = perturbed(state), np.random.default_rng(3)
    mask = np.concatenate([np.ones((T + 1, B, 3, 1)), rng.random((T + 1, B, 3, 3)) < 0.5], -1)
    obs = seen(action_mask=mask.reshape(T + 1, B, 12).astype(np.int8))
    rollout, value = rollout_of(algo, state, obs, rng, greedy=True)
    assert np.take_along_axis(mask[:-1], np.asarray(rollout.action)[..., None], -1).all()
    done = rollout.terminated | rollout.truncated
    target = np.asarray(returns.lambda_returns(rollout.reward, rollout.terminated, done, value, gamma=0.9, lambda_=0.5))
    _, aux = update(state, rollout, KEY)
    mean = lambda x: np.sum(rollout.mask * x) / rollout.mask.sum()
    np.testing.assert_allclose(aux.metrics["value/target"], mean(target), rtol=1e-4)
    np.testing.assert_allclose(aux.metrics["value/q"], mean(value[:-1]), rtol=1e-4)
    np.testing.assert_allclose(aux.metrics["loss/q"], mean(0.5 * (value[:-1] - target) ** 2), rtol=1e-4)


def test_the_recorded_value_is_the_sum_of_each_agents_best_allowed():
    algo = pqn.make(pqn.Config(mixer="sum"), SPEC, SMALL)
    state, mask = fakes.made_up_state(algo), np.ones((8, 12), np.int8)
    mask[:, 5:8] = 0  # of the second agent action 0 alone
    obs = {**observations(8), "action_mask": mask}
    out = acted(algo, state, obs)
    q = np.asarray(jax.jit(algo.outputs)(state, obs)["q"])
    assert out.action.shape == (8, 3) and q.shape == (8, 3, 4)
    np.testing.assert_allclose(out.extras["value"], q[:, 0].max(-1) + q[:, 1, 0] + q[:, 2].max(-1), rtol=1e-5)
    greedy = acted(algo, state, obs, explore=False).action
    np.testing.assert_array_equal(greedy, np.stack([q[:, 0].argmax(-1), np.zeros(8), q[:, 2].argmax(-1)], -1))


@pytest.mark.slow
@pytest.mark.parametrize("mixer", some_quick(MIXERS, "qmix"))
def test_an_absent_agent_changes_nothing(mixer):
    """Neither what it sees nor what it did matters to the update; of one that is present both do."""
    algo, state, update = learner(mixer)

    def results(present):
        obs = seen(present=np.broadcast_to(np.array([1, present, 1], np.int8), (T + 1, B, 3)))
        spoiled = {**obs, "agents": obs["agents"] * np.float32([[1], [-7], [1]])}
        rollout, _ = rollout_of(algo, state, obs, np.random.default_rng(3))
        other, _ = rollout_of(algo, state, spoiled, np.random.default_rng(3))
        action = np.where([True, False, True], rollout.action, 3 - rollout.action)
        return update(state, rollout, KEY), update(state, other.replace(action=action), KEY)

    assert_same(*results(0))
    losses = [float(aux.metrics["loss/q"]) for _, aux in results(1)]
    assert losses[0] != losses[1]


def test_a_mixer_needs_a_team_and_a_team_a_mixer():
    with pytest.raises(InputError, match=r"pqn with algo\.mixer qmix acts for a team.* multi_agent\.group"):
        pqn.make(pqn.Config(mixer="qmix"), EnvSpec(Box((3,)), Discrete(2), 1), SMALL)
    with pytest.raises(InputError, match=r"algo\.mixer: expected sum or qmix for a team .* none: set algo.mixer"):
        pqn.make(pqn.Config(), EnvSpec(joint_observation(Box((3,)), 2), MultiDiscrete((2, 2)), 1), SMALL)
    assert not teams.is_team(EnvSpec(Box((3,)), MultiDiscrete((2, 2)), 1))
