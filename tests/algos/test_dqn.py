"""DQN against a slow reference that spells everything out, and each of its options by hand."""

import functools
import math

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from dqn_reference import A, change, first_adam_step, outputs_of, reference_step
from fakes import assert_close, assert_same, differ

from jrl.algos import dqn
from jrl.algos.exploration import EpsilonGreedy, SoftQ
from jrl.networks import NetworkConfig
from jrl.types import Batch, Discrete

KEY = jax.random.key(5)
N = 32
GAMMA = 0.97
LINEAR = NetworkConfig(hidden=(), init="lecun")
BASE = dqn.Config(max_grad_norm=None, lr=1e-2, num_atoms=6, v_min=-3.0, v_max=2.0, num_quantiles=5)


@functools.cache
def _jitted(env_spec, network, hard):
    """The gradient step with the config as an argument: one compilation for all values of the floats."""

    def step(cfg, state, batch, key):
        cfg = change(cfg, tau=1.0) if hard else cfg  # 1 as a Python number is a copy, bit for bit
        return dqn.make(cfg, env_spec, network).update(state, batch, key)

    return jax.jit(step)


def update(cfg, state, batch, key=KEY, network=fakes.NETWORK, actions=A):
    run = _jitted(fakes.spec(Discrete(actions)), network, cfg.tau == 1)
    return run(jax.tree.map(jnp.float32, cfg), state, batch, key)


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


@pytest.mark.parametrize("name", some_quick(OPTIONS, "huber", "c51", "qr munchausen"))
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


def test_munchausen_by_hand():
    """Temperature 1, at s Q = (0, 3), at s' Q = (5, 3)."""
    cfg = change(BASE, munchausen=True, munchausen_temperature=1.0, munchausen_alpha=0.5, munchausen_clip=-2.0)
    soft = math.log(math.exp(5) + math.exp(3))  # sum of pi (Q - log pi) is log sum exp Q
    log_pi = [-math.log(1 + math.exp(3)), 3 - math.log(1 + math.exp(3))]
    assert log_pi[0] < -2 < log_pi[1]
    np.testing.assert_allclose(target_of(cfg, by_hand(0, 1, action=0)), 1 - 0.5 * 2 + 0.5 * soft, rtol=1e-6)
    np.testing.assert_allclose(target_of(cfg, by_hand(0, 1, action=1)), 1 + 0.5 * log_pi[1] + 0.5 * soft, rtol=1e-6)
    # an end has the bonus of its own action, and nothing of s'
    end = by_hand(0, 1, action=1, discount=0.0)
    np.testing.assert_allclose(target_of(cfg, end), 1 + 0.5 * log_pi[1], rtol=1e-6)
    cold = change(cfg, munchausen_temperature=0.01)  # log pi of the worse action is -300, the clip holds it
    np.testing.assert_allclose(target_of(cold, by_hand(0, 1, action=0)), 1 - 0.5 * 2 + 0.5 * 5, rtol=1e-5)


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


@pytest.mark.parametrize("name", some_quick(["mse, double", "munchausen", "c51", "qr"], "munchausen"))
def test_no_gradient_flows_into_targets(name):
    cfg = of_option(name)
    algo, state, batch = setting(cfg, network_of(cfg))

    def value_loss(target_params, next_obs):
        _, aux = jax.jit(algo.update)(state.replace(target_params=target_params), batch.replace(next_obs=next_obs), KEY)
        return aux.metrics["loss/value"]

    gradient = jax.jit(jax.grad(value_loss, (0, 1)))(state.target_params, batch.next_obs)
    for leaf in jax.tree.leaves(gradient):
        assert not np.asarray(leaf).any()


def test_dueling_has_the_stated_size_and_mean():
    network = NetworkConfig(hidden=(256, 256))
    cfg = change(BASE, dueling=True)
    params = jax.eval_shape(dqn.make(cfg, fakes.spec(Discrete(2)), network).init, KEY).params
    assert set(params) == {"torso", "value_head", "advantage_head"}
    assert sum(x.size for x in jax.tree.leaves({k: params[k] for k in ("torso", "value_head")})) == 67_329
    # the mean of Q over actions is V: moving all advantages changes nothing
    algo, state, batch = setting(change(cfg, loss="mse"))
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


@pytest.mark.parametrize("every", [1, 2])
def test_polyak_averaging(every):
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


def test_each_update_has_noise_of_its_own():
    cfg = change(BASE, noisy=True, dueling=True, head="expected", noisy_sigma=0.3)
    _, state, batch = setting(cfg, network_of(cfg))
    first, other = (update(cfg, state, batch, key, network_of(cfg))[0].params for key in (KEY, jax.random.key(0)))
    assert differ(first, other)
    _, state, batch = setting(BASE)
    assert_same(update(BASE, state, batch, KEY)[0], update(BASE, state, batch, jax.random.key(0))[0])


@pytest.mark.parametrize("head", some_quick(["expected", "c51"], "expected"))
def test_noise_is_learned(head):
    cfg = change(BASE, noisy=True, dueling=True, head=head, noisy_sigma=0.3)
    _, state, batch = setting(cfg, network_of(cfg))
    after, _ = update(cfg, state, batch, network=network_of(cfg))
    layers = {"value_hidden_0", "value_head", "advantage_hidden_0", "advantage_head"}
    assert set(state.params) == layers | {"torso"}
    for layer in layers:
        assert set(state.params[layer]) == {"kernel", "kernel_sigma", "bias", "bias_sigma"}
        for name in state.params[layer]:
            assert differ(state.params[layer][name], after.params[layer][name]), (layer, name)


def test_soft_q_takes_better_actions_more_often():
    cfg = change(BASE, exploration=SoftQ(temperature=2.0))
    algo = dqn.make(cfg, fakes.spec(Discrete(2)), LINEAR)
    actor = algo.actor(with_tables(cfg, ONLINE, TARGET))
    obs = jnp.eye(4)[jnp.zeros(4000, jnp.int32)]
    actions = jax.jit(algo.act)(actor, obs, (), KEY).action
    np.testing.assert_allclose(actions.mean(), 1 / (1 + math.exp(1)), atol=0.03)


@pytest.mark.slow
def test_exploration_is_reported():
    steps = jnp.uint32(50)
    for explore, key, want in (
        (EpsilonGreedy(epsilon=((0, 1.0), (100, 0.0))), "policy/epsilon", 0.5),
        (SoftQ(temperature=3.0), "policy/temperature", 3.0),
    ):
        cfg = change(BASE, exploration=explore, lr=((0, 1e-2), (100, 0.0)))
        _, state, batch = setting(cfg)
        _, aux = update(cfg, state.replace(env_steps=steps), batch)
        np.testing.assert_allclose(aux.metrics[key], want, rtol=1e-6)
        np.testing.assert_allclose(aux.metrics["train/lr"], 5e-3, rtol=1e-6)


# ---------------------------------------------------------------- rows and counters


@pytest.mark.parametrize("name", some_quick([*OPTIONS, "noisy"], "huber", "c51", "qr munchausen"))
def test_whatever_stands_on_void_rows(name):
    cfg = of_option(name)
    network = network_of(cfg)
    _, state, batch = setting(cfg, network)
    batch = jax.device_get(batch)
    void = batch.weight == 0
    assert 3 < int(void.sum()) < N
    before = update(cfg, state, batch, network=network)
    assert not np.asarray(before[1].priority)[void].any()
    for value in (1.0, 1e38, np.inf, np.nan):
        fill = lambda x, value=value: np.where(np.expand_dims(void, tuple(range(1, x.ndim))), np.float32(value), x)
        spoiled = batch.replace(
            obs=fill(batch.obs),
            next_obs=fill(batch.next_obs),
            reward=fill(batch.reward),
            discount=fill(batch.discount),
            action=np.where(void, np.int32(2**30), batch.action),
        )
        assert_same(before, update(cfg, state, spoiled, network=network), f"{name} {value}: ")


# ---------------------------------------------------------------- what cannot be
