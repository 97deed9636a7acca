"""What holds for every algorithm in every space that it supports: actions and observations."""

import functools

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


@functools.cache
def learner(name, action, observation):
    """(algo, a state away from its start, what it learns from, act, update): compiled once for all tests of the spaces.

    Observations are normalised where they can be.
    """
    env_spec = fakes.spec(action, observation, name=name)
    network = NetworkConfig(hidden=(8,)) if len(observation.shape) < 3 else NetworkConfig(torso="impala")
    options = {"normalize_obs": True} if hasattr(fakes.config(name), "normalize_obs") else {}
    algo = fakes.make(name, env_spec, network, **options)
    state = fakes.perturbed(fakes.init_state(algo))
    data = fakes.data(algo, env_spec, algo.actor(state))
    return algo, state, data, jax.jit(algo.act, static_argnames="explore"), jax.jit(algo.update)


SQUARE = Box((2, 2), low=-1.0, high=1.0)
ACTIONS = [Discrete(3), MultiDiscrete((3, 2)), SQUARE, fakes.BOX]
IMAGE = Box((9, 9, 2), "uint8", 0, 255)
# vectors are those of all other tests
OBSERVATIONS = [Box((4, 2)), Box((6,), "uint8", 0, 255), Discrete(5), MultiDiscrete((3, 2))]


def seen(name, action):
    """The observations of this action in all tests: other ones for each action and algorithm."""
    return OBSERVATIONS[(ACTIONS.index(action) + NAMES.index(name)) % len(OBSERVATIONS)]


@pytest.mark.parametrize("name", [n for n in NAMES if fakes.acts_in(n, Box)])
def test_void_actions_of_a_box_change_nothing(name):
    """A huge action on a void row has a log-probability that overflows."""
    algo, state, data, _, update = learner(name, SQUARE, seen(name, SQUARE))
    before, aux = update(state, data, KEY)
    void = np.asarray(~data.mask if algo.on_policy else data.weight == 0)
    for value in (7.0, 1e30, np.inf, np.nan):
        action = np.where(void[..., None, None], np.float32(value), data.action)
        after, spoiled = update(state, data.replace(action=jnp.asarray(action)), KEY)
        assert_same((before, aux.metrics), (after, spoiled.metrics), f"action {value}: ")


def supported(actions):
    """Those of PPO's relatives in the slow set."""
    return [
        pytest.param(name, action, seen(name, action), marks=[pytest.mark.slow] if name in PPOS_RELATIVES else [])
        for name in NAMES
        for action in actions
        if fakes.acts_in(name, type(action)) and not (action is fakes.BOX and CASES[name].like)
    ]


SPACES = supported(ACTIONS)
_PAIRS = [param.values for param in SPACES]
SPACES += [
    pytest.param(
        name,
        fakes.spec(name=name).action,
        observation,
        # an image takes ten seconds to compile: one algorithm of each kind
        marks=[pytest.mark.slow] if observation is IMAGE or name not in ("ppo", "dqn", "sac") else [],
    )
    for name in NAMES
    if name not in PPOS_RELATIVES
    for observation in (*OBSERVATIONS, IMAGE)
    if not any(of == name and observed == observation for of, _, observed in _PAIRS)
]


@pytest.mark.parametrize(("name", "action", "observation"), SPACES, ids=str)
def test_spaces(name, action, observation):
    """Shapes and dtypes of actions, and an update that moves the parameters and leaves them finite."""
    algo, state, data, act, update = learner(name, action, observation)
    taken = data.action if algo.on_policy else act(algo.actor(state), data.obs, algo.carry(64), KEY).action
    assert taken.shape == ((8, 8) if algo.on_policy else (64,)) + action.shape
    assert taken.dtype == data.action.dtype == action.dtype
    if not isinstance(action, Box):
        high = np.asarray(action.n if isinstance(action, Discrete) else action.nvec) - 1
        flat = np.asarray(taken).reshape(64, *action.shape)
        np.testing.assert_array_equal(flat.min(0), np.zeros_like(high))
        np.testing.assert_array_equal(flat.max(0), high)  # every choice is taken
    after, aux = update(state, data, KEY)
    assert differ(state.params, after.params)
    for leaf in jax.tree.leaves((after, aux.metrics)):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize(("name", "action", "observation"), supported(ACTIONS), ids=str)
def test_without_exploration_the_best_action_is_taken(name, action, observation):
    algo, state, data, act, _ = learner(name, action, observation)
    actor = algo.actor(state)
    obs = jax.tree.map(lambda x: x[0], data.obs) if algo.on_policy else data.obs
    rows = len(jax.tree.leaves(obs)[0])
    best = act(actor, obs, algo.carry(rows), KEY, explore=False)
    assert_same(best, act(actor, obs, algo.carry(rows), jax.random.key(0), explore=False))
    assert (best.action.shape, best.action.dtype) == ((rows, *action.shape), action.dtype)
    samples = jax.device_get([act(actor, obs, algo.carry(rows), key) for key in jax.random.split(KEY, 200)])
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
