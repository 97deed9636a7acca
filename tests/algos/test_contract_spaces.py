"""What holds for every algorithm in every space that it supports: actions and observations."""

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from fakes import assert_same, differ

from jrl import algos
from jrl.networks import NetworkConfig
from jrl.types import Box, Discrete, MultiDiscrete

NAMES = algos.names()
KEY = jax.random.key(11)
PPOS_RELATIVES = tuple(name for name in NAMES if CASES[name].like == "ppo")


@pytest.mark.parametrize("name", [n for n in NAMES if fakes.acts_in(n, Box)])
def test_void_actions_of_a_box_change_nothing(name):
    """A huge action on a void row has a log-probability that overflows."""
    env_spec = fakes.spec(fakes.BOX, name=name)
    algo = fakes.make(name, env_spec)
    state = algo.init(KEY)
    data, update = fakes.data(algo, env_spec, algo.actor(state)), jax.jit(algo.update)
    before, aux = update(state, data, KEY)
    void = ~data.mask if algo.on_policy else data.weight == 0
    for value in (7.0, 1e30, np.inf, np.nan):
        action = jnp.where(void[..., None], value, data.action)
        after, spoiled = update(state, data.replace(action=action), KEY)
        assert_same((before, aux.metrics), (after, spoiled.metrics), f"action {value}: ")


ACTIONS = [Discrete(3), MultiDiscrete((3, 2)), fakes.BOX, Box((2, 2), low=-1.0, high=1.0)]
OBSERVATIONS = [
    Box((4, 2)),
    Box((6,), "uint8", 0, 255),
    Discrete(5),
    MultiDiscrete((3, 2)),
    Box((9, 9, 2), "uint8", 0, 255),
]


def supported(actions, *more):
    """Those of PPO's relatives in the slow set."""
    return [
        pytest.param(name, action, *more, marks=[pytest.mark.slow] if name in PPOS_RELATIVES else [])
        for name in NAMES
        for action in actions
        if fakes.acts_in(name, type(action))
    ]


SPACES = supported(ACTIONS, fakes.VECTOR)
SPACES += [
    pytest.param(
        name,
        fakes.spec(name=name).action,
        observation,
        # an image takes ten seconds to compile: one algorithm of each kind
        marks=[pytest.mark.slow] if len(observation.shape) == 3 or name not in ("ppo", "dqn", "sac") else [],
    )
    for name in NAMES
    if name not in PPOS_RELATIVES
    for observation in OBSERVATIONS
]


@pytest.mark.parametrize(("name", "action", "observation"), SPACES, ids=str)
def test_spaces(name, action, observation):
    """Shapes and dtypes of actions, and an update that moves the parameters and leaves them finite."""
    env_spec = fakes.spec(action, observation, name=name)
    network = fakes.NETWORK if len(observation.shape) < 3 else NetworkConfig(torso="impala")
    options = {"normalize_obs": True} if hasattr(fakes.config(name), "normalize_obs") else {}
    algo = fakes.make(name, env_spec, network, **options)
    state = jax.jit(algo.init)(KEY)
    data = fakes.data(algo, env_spec, algo.actor(state), T=4)
    batch = (4, 8) if algo.on_policy else (32,)
    assert data.action.shape == (*batch, *action.shape)
    assert data.action.dtype == action.dtype
    if not isinstance(action, Box):
        high = np.asarray(action.n if isinstance(action, Discrete) else action.nvec) - 1
        flat = np.asarray(data.action).reshape(32, *action.shape)
        np.testing.assert_array_equal(flat.min(0), np.zeros_like(high))
        np.testing.assert_array_equal(flat.max(0), high)  # every choice is taken
    after, aux = jax.jit(algo.update)(state, data, KEY)
    assert differ(state.params, after.params)
    for leaf in jax.tree.leaves((after, aux.metrics)):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize(("name", "action"), supported(ACTIONS), ids=str)
def test_without_exploration_the_best_action_is_taken(name, action):
    env_spec = fakes.spec(action, name=name)
    algo = fakes.make(name, env_spec)
    act = jax.jit(algo.act, static_argnames="explore")
    actor = algo.actor(fakes.perturbed(algo.init(KEY)))
    obs = jax.tree.map(jnp.asarray, fakes.observations(np.random.default_rng(0), env_spec.observation, (8,)))
    best = act(actor, obs, algo.carry(8), KEY, explore=False)
    assert_same(best, act(actor, obs, algo.carry(8), jax.random.key(0), explore=False))
    assert (best.action.shape, best.action.dtype) == ((8, *action.shape), action.dtype)
    samples = [act(actor, obs, algo.carry(8), key, explore=True) for key in jax.random.split(KEY, 200)]
    assert differ(samples[0].action, samples[1].action)
    taken = np.stack([s.action for s in samples])
    # a Gaussian that is not bounded: the mode is the mean
    if isinstance(action, Box) and "log_prob" in best.extras:
        deviation = taken.std(0)
        assert (np.abs(taken.mean(0) - best.action) < 5 * deviation / np.sqrt(200)).all()
    if "log_prob" in best.extras:
        assert (
            np.stack([s.extras["log_prob"] for s in samples]) <= np.asarray(best.extras["log_prob"])[None] + 1e-5
        ).all()
