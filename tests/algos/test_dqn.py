"""DQN against a slow reference that spells everything out, and each of its options by hand."""

import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from dqn_reference import A, change, first_adam_step, outputs_of, reference_step
from fakes import assert_close, assert_same, differ

from jrl.algos import dqn
from jrl.algos.exploration import EpsilonGreedy
from jrl.networks import NetworkConfig
from jrl.types import Batch, Discrete

KEY = jax.random.key(5)
N = 32
LINEAR = NetworkConfig(hidden=(), init="lecun")
BASE = dqn.Config(max_grad_norm=None, lr=1e-2, num_atoms=6, v_min=-3.0, v_max=2.0, num_quantiles=5)


def update(cfg, state, batch, key=KEY, network=fakes.NETWORK, actions=A):
    hard = {"tau": 1.0} if cfg.tau == 1 else {}  # 1 as a Python number is a copy, bit for bit
    return fakes.update(dqn, cfg, fakes.spec(Discrete(actions)), network, state, batch, key, **hard)


@functools.cache
def setting(cfg, network=fakes.NETWORK, seed=0):
    """(algo, state, batch): target and online parameters differ, a quarter of the rows is void."""
    env_spec = fakes.spec(Discrete(A))
    algo = dqn.make(cfg, env_spec, network)
    state = fakes.perturbed(fakes.made_up_state(algo, seed))
    state = state.replace(target_params=fakes.perturbed(fakes.made_up_state(algo, seed + 1)).params)
    return algo, state, fakes.batch(algo, env_spec, algo.actor(state), N=N, seed=seed)


_MUNCHAUSEN = {"munchausen": True, "munchausen_temperature": 0.3}
OPTIONS = {
    "huber": {},
    "mse, double": {"loss": "mse", "double": True},
    "dueling, conservative": {"dueling": True, "double": True, "conservative": True, "cql_weight": 0.7},
    "munchausen": _MUNCHAUSEN,
    "c51": {"head": "c51", "double": True, "dueling": True},
    "c51, conservative": {"head": "c51", "conservative": True, **_MUNCHAUSEN},
    "qr": {"head": "qr", "double": True, "conservative": True},
    "qr munchausen": {"head": "qr", "dueling": True, **_MUNCHAUSEN},
}


def network_of(cfg):
    return change(fakes.NETWORK, head_hidden=(8,)) if cfg.dueling else fakes.NETWORK


def of_option(name):
    # a large eps makes Adam's first step proportional to the gradient where that is small
    return change(BASE, adam_eps=1e-2, **OPTIONS.get(name, {"noisy": True, "double": True}))


@pytest.mark.parametrize("name", some_quick(OPTIONS, "huber", "qr munchausen"))
def test_against_the_reference(name):
    cfg = of_option(name)
    network = network_of(cfg)
    _, state, batch = setting(cfg, network)
    gradient, metrics, priority = reference_step(cfg, network, state, batch)
    after, aux = update(cfg, state, batch, network=network)
    for key, want in metrics.items():
        np.testing.assert_allclose(aux.metrics[key], want, rtol=1e-4, atol=1e-5, err_msg=key)
    np.testing.assert_allclose(aux.priority, priority, rtol=1e-3, atol=1e-5)
    assert_close(after.params, first_adam_step(cfg, state.params, gradient), atol=1e-5)
    assert differ(after.params, state.params)
    assert int(after.updates) == 1 and int(after.env_steps) == 0


# ---------------------------------------------------------------- by hand


def by_hand(obs, next_obs, *, action=0, reward=1.0, discount=0.5):
    """One transition; observations are one-hot, so that a linear network is a table."""
    one_hot = lambda i: jnp.eye(4)[jnp.array([i])]
    return Batch(
        obs=one_hot(obs),
        action=jnp.array([action], jnp.int32),
        reward=jnp.array([reward]),
        discount=jnp.array([discount]),
        next_obs=one_hot(next_obs),
        weight=jnp.ones(1),
        index=jnp.zeros(1, jnp.int32),
    )


def table(values, bias=None):
    """Parameters of the linear network whose Q is values [4, A]."""
    values = jnp.asarray(values, jnp.float32)
    return {"q_head": {"kernel": values, "bias": jnp.zeros(values.shape[1])}}


def with_tables(cfg, online, target):
    state = fakes.made_up_state(dqn.make(cfg, fakes.spec(Discrete(2)), LINEAR))
    return state.replace(params=table(online), target_params=table(target))


ONLINE = [[2.0, 0.0], [1.0, 4.0], [0, 0], [0, 0]]
TARGET = [[0.0, 3.0], [5.0, 3.0], [0, 0], [0, 0]]


def target_of(cfg, batch):
    state = with_tables(cfg, ONLINE, TARGET)
    return float(update(cfg, state, batch, network=LINEAR, actions=2)[1].metrics["value/target"])


def test_double_values_the_online_networks_choice():
    step, end = by_hand(0, 1), by_hand(0, 1, discount=0.0)
    assert target_of(BASE, step) == 1 + 0.5 * 5  # the target network's best
    assert target_of(change(BASE, double=True), step) == 1 + 0.5 * 3  # the online network's best is action 1
    assert target_of(BASE, end) == target_of(change(BASE, double=True), end) == 1


def test_the_gradient_is_that_of_q_at_the_action_taken_only():
    """Semi-gradient: with obs and next_obs different states of a table, the row of next_obs does not move."""
    cfg = change(BASE, loss="mse", adam_eps=1.0, double=True)
    state = with_tables(cfg, ONLINE, TARGET)
    after, aux = update(cfg, state, by_hand(0, 1, action=1), network=LINEAR, actions=2)
    moved = np.asarray(after.params["q_head"]["kernel"]) - np.float32(ONLINE)
    error = (1 + 0.5 * 3) - 0.0
    want = np.zeros((4, 2))
    want[0, 1] = 1e-2 * error / (error + 1.0)  # Adam's first step with eps 1
    np.testing.assert_allclose(moved, want, atol=1e-6)
    np.testing.assert_allclose(aux.priority, [error], rtol=1e-6)


def test_moving_all_advantages_of_a_dueling_network_changes_nothing():
    """The mean of Q over actions is V; its sizes are in tests/test_network_table.py."""
    algo, state, batch = setting(change(BASE, dueling=True, loss="mse"))
    moved = jax.tree.map(lambda x: x, state.params)
    moved["advantage_head"] = {**moved["advantage_head"], "bias": moved["advantage_head"]["bias"] + 5.0}
    step = jax.jit(algo.update)
    first, second = (step(state.replace(params=p), batch, KEY)[1] for p in (state.params, moved))
    np.testing.assert_allclose(first.metrics["value/q"], second.metrics["value/q"], rtol=1e-4)


# ---------------------------------------------------------------- target network


def run(cfg, count):
    """(params, target_params) after 0 .. count gradient steps."""
    _, state, batch = setting(cfg)
    seen = [(state.params, state.target_params)]
    for i in range(count):
        state, _ = update(cfg, state, batch, jax.random.fold_in(KEY, i))
        seen.append((state.params, state.target_params))
    return seen


def test_hard_updates_copy():
    seen = run(change(BASE, target_update_every=3), 7)
    for i in range(1, 8):
        if i % 3 == 0:
            assert_same(seen[i][1], seen[i][0])
        else:
            assert_same(seen[i][1], seen[i - 1][1])
            assert differ(seen[i][1], seen[i][0])


def test_polyak_averaging():
    every = 2
    seen = run(change(BASE, target_update_every=every, tau=0.25), 4)
    for i in range(1, 5):
        want = seen[i - 1][1]
        if i % every == 0:
            want = jax.tree.map(lambda t, p: 0.75 * t + 0.25 * p, want, seen[i][0])
        assert_close(seen[i][1], want, atol=1e-6)


# ---------------------------------------------------------------- noise and exploration


def test_noise_explores_and_is_silent_without_exploration():
    cfg = change(BASE, noisy=True, noisy_sigma=2.0, exploration=EpsilonGreedy(epsilon=0.0))
    algo, state, batch = setting(cfg)
    act = jax.jit(algo.act, static_argnames="explore")
    actor, keys = algo.actor(state), jax.random.split(KEY, 20)
    quiet = [act(actor, batch.obs, (), key, explore=False).action for key in keys]
    noisy = np.stack([act(actor, batch.obs, (), key).action for key in keys])
    assert_same(quiet[0], quiet[1])
    assert (noisy.std(0) > 0).mean() > 0.5
    mean_params = jax.tree.map(lambda x: x, state.params)
    for head in [k for k in mean_params if k.endswith("_head")]:
        mean_params[head] = {k: v for k, v in mean_params[head].items() if "sigma" not in k}
    np.testing.assert_array_equal(quiet[0], outputs_of(cfg, fakes.NETWORK, mean_params, batch.obs)[..., 0].argmax(-1))


@pytest.mark.slow
def test_each_use_of_a_network_has_noise_of_its_own():
    """Where s' is s, the discount 1, the reward 0 and the target a copy, one noise would give TD errors of 0."""
    targets = []
    for double in (False, True):
        cfg = change(BASE, noisy=True, double=double)
        _, state, batch = setting(cfg)
        state = state.replace(target_params=state.params)
        batch = batch.replace(next_obs=batch.obs, reward=jnp.zeros(N), discount=jnp.ones(N), weight=jnp.ones(N))
        smallest = []
        for action in range(A):  # one of them is greedy
            _, aux = update(cfg, state, batch.replace(action=jnp.full(N, action)))
            smallest.append(aux.priority)
        targets.append(aux.metrics["value/target"])
        assert (np.min(smallest, 0) > 1e-4).mean() > 0.9
        silent = jax.tree_util.tree_map_with_path(
            lambda path, x: x * 0 if "sigma" in jax.tree_util.keystr(path) else x, state.params
        )
        state = state.replace(params=silent, target_params=silent)
        smallest = [update(cfg, state, batch.replace(action=jnp.full(N, a)))[1].priority for a in range(A)]
        np.testing.assert_allclose(np.min(smallest, 0), 0, atol=1e-5)
    assert targets[1] < targets[0]  # with a noise of its own, the choice is not always the best


@pytest.mark.slow
def test_noise_is_learned():
    cfg = change(BASE, noisy=True, dueling=True, head="expected", noisy_sigma=0.3)
    _, state, batch = setting(cfg, network_of(cfg))
    after, _ = update(cfg, state, batch, network=network_of(cfg))
    layers = {"value_hidden_0", "value_head", "advantage_hidden_0", "advantage_head"}
    assert set(state.params) == layers | {"torso"}
    for layer in layers:
        assert set(state.params[layer]) == {"kernel", "kernel_sigma", "bias", "bias_sigma"}
        for name in state.params[layer]:
            assert differ(state.params[layer][name], after.params[layer][name]), (layer, name)
