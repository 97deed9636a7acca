"""Noise on the parameters that act: when it is drawn, what it does, and how its deviation adapts."""

import dataclasses
import functools
import inspect

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jrl.algos.exploration import ParameterNoiseAction, ParameterNoiseQ
from jrl.learn import parallel
from jrl.networks import NetworkConfig

KEY = jax.random.key(4)
NETWORK = NetworkConfig(hidden=(16, 16), norm="layer")
CONFIGS = {
    "dqn": ParameterNoiseQ(std=0.2, epsilon=0.3, factor=1.25, redraw_every=100, random_share=0.0),
    "pqn": ParameterNoiseQ(std=0.2, epsilon=0.3, factor=1.25, redraw_every=100, random_share=0.0),
    "td3": ParameterNoiseAction(std=0.2, target_std=0.15, factor=1.25, redraw_every=100),
}


def each(*quick):
    """Every algorithm that has it; in the quick set those named."""
    marks = lambda name: [] if name in quick else pytest.mark.slow
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CONFIGS])


@functools.cache
def made(name):
    """The algorithm, a state away from the first policy, and a rollout."""
    algo = fakes.make(name, network=NETWORK, exploration=CONFIGS[name])
    state = fakes.perturbed(jax.jit(algo.init)(KEY))
    return algo, state, fakes.rollout(algo, fakes.spec(name=name), algo.actor(state))


def at(state, env_steps, std=None):
    noise = state.own["noise"] if std is None else state.own["noise"].replace(std=jnp.float32(std))
    return state.replace(env_steps=jnp.uint32(env_steps), own={**state.own, "noise": noise})


def difference(actor):
    """The noise, flat, of the layers that get it, and of those that do not."""
    noise = jax.tree.map(lambda a, b: np.ravel(a - b), *jax.device_get((actor.noisy, actor.params)))
    leaves = jax.tree_util.tree_leaves_with_path(noise)
    norm = lambda path: "Norm" in jax.tree_util.keystr(path)
    return tuple(np.concatenate([x for p, x in leaves if norm(p) == which]) for which in (False, True))


@each("dqn")
def test_noise_is_drawn_anew_after_so_many_steps(name):
    algo, state, _ = made(name)
    first, still = difference(algo.actor(at(state, 0)))
    assert first.size > 300 and still.size > 30
    np.testing.assert_allclose(first.std(), 0.2, rtol=0.15)
    assert not still.any()
    np.testing.assert_array_equal(difference(algo.actor(at(state, 99)))[0], first)
    other = difference(algo.actor(at(state, 100)))[0]
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.2
    np.testing.assert_allclose(difference(algo.actor(at(state, 0, std=0.4)))[0], 2 * first, atol=1e-6)
    another = fakes.perturbed(jax.jit(algo.init)(jax.random.key(5)))  # another seed of the run
    assert abs(np.corrcoef(first, difference(algo.actor(another))[0])[0, 1]) < 0.2


@each("td3")
def test_the_perturbed_parameters_act_and_the_others_where_nothing_is_explored(name):
    algo, state, _ = made(name)
    actor, obs = algo.actor(at(state, 0, std=1.0)), jnp.asarray(np.random.default_rng(0).normal(size=(200, 4)), "f")
    exchanged = actor.replace(params=actor.noisy, noisy=actor.params)
    act = jax.jit(lambda actor, explore: algo.act(actor, obs, algo.carry(200), KEY, explore=explore), static_argnums=1)
    np.testing.assert_array_equal(act(actor, True).action, act(exchanged, False).action)
    np.testing.assert_array_equal(act(actor, False).action, act(exchanged, True).action)
    assert not np.array_equal(act(actor, True).action, act(actor, False).action)
    if name == "pqn":  # values, from which targets are made, are of the parameters that learn
        np.testing.assert_array_equal(act(actor, True).extras["value"], act(actor, False).extras["value"])


@functools.cache
def _jitted(fn):
    return jax.jit(fn, static_argnames="explore" if "explore" in inspect.signature(fn).parameters else ())


def distance(name, algo, state, obs):
    """By numpy, from what the algorithm does with the two sets of parameters."""
    actor = _jitted(algo.actor)(state)
    if name == "td3":
        act = _jitted(algo.act)
        exact, noisy = (act(actor, obs, algo.carry(len(obs)), KEY, explore=e).action for e in (False, True))
        return np.sqrt(np.mean((np.asarray(exact, np.float64) - noisy) ** 2))
    q = [_q(algo, params, obs) for params in (actor.params, actor.noisy)]
    p, other = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in q)
    return np.mean(np.sum(p * np.log(p / other), -1))


def _q(algo, params, obs):
    from jrl import networks
    from jrl.networks import Head

    net = networks.build(fakes.spec(), NetworkConfig(hidden=(16, 16), norm="layer", shared=True), {"q": Head(3)})
    names = {name.replace("q_torso", "torso"): leaf for name, leaf in params.items()}
    return np.asarray(jax.jit(lambda names: net.apply(names, obs, "q")[0])(names), np.float64)


TARGET = {"dqn": -np.log(1 - 0.3 + 0.1), "pqn": -np.log(1 - 0.3 + 0.1), "td3": 0.15}


@each("td3")
def test_the_deviation_goes_where_the_distance_comes_to_its_target(name):
    algo, state, rollout = made(name)
    ingest = jax.jit(algo.ingest or (lambda state, rollout: algo.update(state, rollout, KEY)[0]))
    seen = set()
    for std in (0.01, 0.05, 0.1, 0.2, 0.5, 2.0):
        before = at(state, 0, std=std)
        far = distance(name, algo, before, rollout.last_obs) > TARGET[name]
        after = ingest(before, rollout)
        np.testing.assert_allclose(after.own["noise"].std, std / 1.25 if far else std * 1.25, rtol=1e-5)
        assert after.own["noise"].seed == before.own["noise"].seed
        seen.add(far)
    assert seen == {False, True}


@pytest.mark.slow
def test_any_number_of_devices_adapts_the_same():
    algo, state, rollout = made("dqn")
    mapped = fakes.make("dqn", network=NETWORK, exploration=CONFIGS["dqn"], axis_name=parallel.AXIS)
    mesh = parallel.make_mesh(4)
    ingest = parallel.pmap(mapped.ingest, mesh, (P(), parallel.ROLLOUT), P())
    alone = jax.jit(algo.ingest)
    for std in (0.05, 0.1, 0.2):
        one = alone(at(state, 0, std=std), rollout)
        many = ingest(parallel.replicate(at(state, 0, std=std), mesh), parallel.shard(rollout, mesh, parallel.ROLLOUT))
        fakes.assert_same(one, jax.device_get(many))


def test_without_it_a_state_has_no_further_leaf():
    for name in CONFIGS:
        algo = fakes.make(name)
        state = fakes.made_up_state(algo)
        assert (hasattr(state, "noise"), algo.actor(state).noisy) == (False, ())


def test_floats_of_the_config_can_be_vmapped():
    _, state, rollout = made("td3")
    cfgs = [
        dataclasses.replace(CONFIGS["td3"], target_std=target, factor=factor) for target, factor in ((9, 2), (0, 3))
    ]
    batch = jax.tree.map(lambda *x: jnp.asarray(x, jnp.float32), *cfgs)
    ingest = lambda cfg: (
        fakes.make("td3", network=NETWORK, exploration=cfg).ingest(at(state, 0), rollout).own["noise"].std
    )
    np.testing.assert_allclose(jax.jit(jax.vmap(ingest))(batch), [0.2 * 2, 0.2 / 3], rtol=1e-6)
