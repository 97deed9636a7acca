"""Exploration under action masks and of trees of actions: none invalid, and the log-probability of what chose it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from scipy import stats

from jrl import distributions, spaces
from jrl.algos import exploration, parameter_noise, uniform
from jrl.algos.exploration import (
    Custom,
    EpsilonGreedy,
    Gaussian,
    ParameterNoiseAction,
    ParameterNoiseQ,
    Random,
    SoftQ,
    Stochastic,
)
from jrl.errors import InputError
from jrl.fields.hyper import Lstm, NetworkConfig
from jrl.types import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

N = 100_000
KEY = jax.random.key(11)
TREE = Dict(
    (
        ("b", Tuple((MultiDiscrete((2, 3)), Box((2,), low=(0.0, -1.0), high=(4.0, 2.0))))),
        ("a", Discrete(4)),
        ("c", MultiBinary((2,))),
    )
)


def masks(*sizes):
    """[8, sum(sizes)] bool: of each choice at least one action is allowed, in row 0 all."""
    rng, out = np.random.default_rng(sum(sizes)), []
    for n in sizes:
        mask = rng.random((8, n)) < 0.5
        mask[np.arange(8), np.arange(8) % n] = True
        mask[0] = True
        out.append(mask)
    return np.concatenate(out, -1)


def tiled(x):
    return jnp.tile(jnp.asarray(x), (N // 8, 1))


def choices_of(space, action):
    """The single choices in an action, one after the other as in a mask, each [N], and how many actions each has."""
    arrays = []
    for (_, leaf), x in zip(spaces.leaves(space), jax.tree.leaves(action), strict=True):
        if isinstance(leaf, Discrete):
            arrays.append((np.asarray(x), leaf.n))
        if isinstance(leaf, MultiDiscrete):
            arrays += [(np.asarray(x)[:, k], n) for k, n in enumerate(leaf.nvec)]
    return arrays


def assert_valid(space, action, mask):
    """None that is masked, and each of the others under each row of the mask. Returns their counts."""
    start, found = 0, []
    for taken, n in choices_of(space, action):
        got = np.zeros((8, n), int)
        np.add.at(got, (np.arange(N) % 8, taken), 1)
        np.testing.assert_array_equal(got > 0, mask[:, start : start + n])
        start += n
        found.append(got)
    assert start == mask.shape[-1]
    return found


def assert_uniform(found):
    for got in found:
        for row in got:
            assert (row > 0).sum() == 1 or stats.chisquare(row[row > 0]).pvalue > 1e-4


SOME_Q = (EpsilonGreedy(epsilon=0.5), SoftQ(temperature=2.0), ParameterNoiseQ(random_share=0.5), Random())
SOME = [
    *[(cfg, Discrete(5)) for cfg in SOME_Q],
    *[(cfg, TREE) for cfg in (Stochastic(), Random())],
    *[
        pytest.param(cfg, space, marks=pytest.mark.slow)
        for cfg in (Stochastic(), Random())
        for space in (Discrete(5), MultiDiscrete((3, 2)))
    ],
]


@pytest.mark.parametrize(("cfg", "space"), SOME, ids=lambda x: getattr(x, "name", type(x).__name__))
def test_no_action_is_masked_and_every_other_one_occurs(cfg, space):
    """Nor among the first ones, which are random."""
    mask = masks(*[n for _, n in choices_of(space, jax.tree.map(lambda x: x[None], zeros(space)))])
    kind = "q" if cfg in SOME_Q and isinstance(space, Discrete) else "distribution"
    if not isinstance(cfg, Random):
        cfg = dataclasses.replace(cfg, random_timesteps=100)
    explorer = exploration.make(cfg, space, (kind,))
    head = distributions.action_distribution(space)
    # what is masked looks best
    outputs = np.concatenate([np.where(mask, 0.0, 5.0), np.zeros((8, head.size - mask.shape[-1]))], -1)

    @jax.jit
    def act(outputs, mask, env_steps):
        output = outputs if kind == "q" else head.make(outputs, jnp.zeros(head.num_gaussian), mask)
        return explorer.sample(output, KEY, env_steps, (), mask)[0]

    expected = zeros(space)
    for env_steps in (99, 100):
        action = act(tiled(outputs), tiled(mask), jnp.uint32(env_steps))
        assert jax.tree.structure(action) == jax.tree.structure(expected)
        for x, one in zip(jax.tree.leaves(action), jax.tree.leaves(expected), strict=True):
            assert (x.shape, x.dtype) == ((N, *one.shape), one.dtype)
        found = assert_valid(space, action, mask)
        if env_steps == 99 or isinstance(cfg, Random | Stochastic):
            assert_uniform(found)


def zeros(space):
    return spaces.map_leaves(lambda leaf: np.zeros(leaf.shape, leaf.dtype), space)


def test_uniform_actions_of_a_tree():
    action = jax.jit(lambda: uniform.sample(TREE, KEY, (N,)))()
    arrays = [np.asarray(x).reshape(N, -1) for x in jax.tree.leaves(action)]
    joint = np.concatenate([arrays[0], arrays[1], arrays[3]], -1) @ np.array([24, 12, 4, 2, 1])
    assert stats.chisquare(np.bincount(joint, minlength=96)).pvalue > 1e-3
    for x, low, width in zip(arrays[2].T, (0.0, -1.0), (4.0, 3.0), strict=True):
        assert stats.kstest(x, stats.uniform(low, width).cdf).pvalue > 1e-3
    # 4 * 2 * 3 choices, an area of 4 * 3, two coins
    np.testing.assert_allclose(uniform.log_prob(TREE), -np.log(24) - np.log(12) - 2 * np.log(2))


@pytest.mark.parametrize("space", (Discrete(9), TREE), ids=("Discrete", "Dict"))
def test_the_log_probability_of_a_random_action_counts_what_is_allowed(space):
    mask = np.array(
        [[1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 0, 0, 1, 1, 0, 1], [0, 0, 0, 1, 0, 0, 0, 0, 1], [0] * 9], bool
    )
    # of a, of b/0's two choices; a choice of which nothing is allowed has all
    allowed = [(9,), (5,), (2,), (9,)] if isinstance(space, Discrete) else [(4, 2, 3), (2, 1, 2), (1, 2, 1), (4, 2, 3)]
    rest = 0.0 if isinstance(space, Discrete) else -np.log(12) - 2 * np.log(2)
    by_hand = np.array([-sum(np.log(n)) + rest for n in map(np.array, allowed)])
    head = distributions.action_distribution(space)
    dist = jax.jit(head.make)(jnp.zeros((4, head.size)), jnp.zeros(head.num_gaussian), jnp.asarray(mask))
    for cfg in (Random(), Stochastic(random_timesteps=10)):
        act = jax.jit(exploration.make(cfg, space, ("distribution",)).sample_and_log_prob)
        np.testing.assert_allclose(act(dist, KEY, jnp.uint32(9), (), jnp.asarray(mask))[1], by_hand, rtol=1e-5)
    action, log_prob, _ = act(dist, KEY, jnp.uint32(10), (), jnp.asarray(mask))
    np.testing.assert_allclose(log_prob, jax.jit(lambda d, a: d.log_prob(a))(dist, action), rtol=1e-5)
    assert np.isfinite(log_prob).all()


# ---------------------------------------------------------------- a user's own


def best(output, key, env_steps, carry):
    return (jnp.argmax(output, -1) if isinstance(output, jax.Array) else output.mode()), carry


def test_what_a_custom_one_gets_knows_the_mask():
    mask = masks(5)
    q = jnp.asarray(np.where(mask, 0.0, 5.0) - np.arange(5), jnp.float32)
    expected = np.argmax(mask, -1)
    custom = functools.partial(Custom, path=f"{__name__}:best")
    by_q = exploration.make(custom(), Discrete(5), ("q",)).sample(q, KEY, jnp.uint32(0), (), jnp.asarray(mask))[0]
    np.testing.assert_array_equal(by_q, expected)
    dist = distributions.action_distribution(Discrete(5)).make(q, mask=jnp.asarray(mask))
    explorer = exploration.make(custom(), Discrete(5), ("distribution",))
    action, log_prob, _ = explorer.sample_and_log_prob(dist, KEY, jnp.uint32(0), (), jnp.asarray(mask))
    np.testing.assert_array_equal(action, expected)
    assert np.all(log_prob > -10)


def test_noise_on_actions_needs_a_box():
    with pytest.raises(InputError, match=r"gaussian over actions needs a Box action space, not Dict"):
        exploration.make(Gaussian(), TREE, ("action",))


# ---------------------------------------------------------------- parameter noise


@struct.dataclass
class State:
    env_steps: jax.Array
    own: dict


@pytest.mark.slow
@pytest.mark.parametrize("cfg", (ParameterNoiseQ(std=0.5, epsilon=0.4, factor=2.0), ParameterNoiseAction(factor=2.0)))
def test_parameter_noise_of_observations_that_are_trees(cfg):
    """What is masked counts neither in the distance of the policies nor in that of an epsilon-greedy one."""
    over_q = isinstance(cfg, ParameterNoiseQ)
    space = Discrete(3) if over_q else Box((3,), low=-1, high=1)
    params = {"w": jnp.zeros((3,))}
    policy = lambda params, obs: obs["x"] + obs["pair"][0] * params["w"][None]
    adapted = functools.partial(parameter_noise.adapt, cfg, policy, action_space=space, axis_name=None)
    state = State(jnp.uint32(0), parameter_noise.init_noise(cfg, KEY))
    std = lambda state: state.own["noise"].std
    obs = {"x": jnp.zeros((4, 3)), "pair": (jnp.ones((4, 1)), jnp.zeros((4, 2)))}
    assert std(adapted(state, params, obs)) in (cfg.std * 2, cfg.std / 2)
    if not over_q:
        return
    # one action: no noise makes a difference, and none is asked for; the other rows ask for -log(1 - 0.4 + 0.2)
    mask = jnp.asarray([[True, False, False]] * 3 + [[True, True, False]])
    for scale in (1.0, 5.0, 50.0):
        before = State(jnp.uint32(0), {"noise": state.own["noise"].replace(std=jnp.float32(scale))})
        w = np.float64(parameter_noise.perturb(cfg, before.own, params, before.env_steps)["w"])[:2]
        p = np.exp(w - w.max()) / np.exp(w - w.max()).sum()
        far = np.log(0.5) - np.log(p).mean() > -np.log(0.8)  # KL of the even policy from (p, 1 - p); both over 4 rows
        after = std(adapted(before, params, obs, mask))
        np.testing.assert_allclose(after, scale / 2 if far else scale * 2, rtol=1e-6)


def test_parameter_noise_is_refused_with_memory():
    memory, none = NetworkConfig(core=Lstm()), NetworkConfig()
    for cfg, other in ((ParameterNoiseQ(), "epsilon_greedy"), (ParameterNoiseAction(), "gaussian")):
        with pytest.raises(InputError, match=rf"parameter_noise: not with network.core lstm: use {other}"):
            parameter_noise.refuse_memory(cfg, memory)
        parameter_noise.refuse_memory(cfg, none)
