"""SAC against a slow reference that spells everything out, and each of its options by hand."""

import dataclasses
import functools
import itertools
import math

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from fakes import assert_close
from sac_reference import reference

from jrl.algos import critics, sac
from jrl.algos.agent import ActorState
from jrl.types import Batch, Box, Discrete

KEY = jax.random.key(2)
BOX = Box((2,), low=-1.0, high=1.0)
# a large adam_eps makes the first step lr * g / (|g| + eps): the gradient itself is seen, not only its sign
BASE = sac.Config(lr=0.1, actor_lr=0.2, ent_coef_lr=0.3, ent_coef=0.7, adam_eps=1.0, gamma=0.9, tau=0.1)
N = 32


@functools.cache
def setting(cfg=BASE, action=BOX, observation=fakes.VECTOR, seed=0, network=fakes.NETWORK):
    """(algo, state, batch), the state away from its start and its targets away from the critics."""
    env_spec = fakes.spec(action, observation)
    algo = sac.make(cfg, env_spec, network)
    state = fakes.perturbed(fakes.made_up_state(algo))
    moved = fakes.perturbed(state.replace(params=state.target_params["critic"]), 0.5).params
    state = state.replace(target_params={"critic": moved})
    return algo, state, fakes.batch(algo, env_spec, algo.actor(state), N=N, seed=seed)


def update(cfg, state, batch, key=KEY, action=BOX):
    return fakes.update(sac, cfg, fakes.spec(action), fakes.NETWORK, state, batch, key)


CASES = {
    "default": {},
    "goal": {"target_entropy": -0.5, "actor_q": "mean", "num_critics": 3},
    "fixed temperature, conservative": {  # and the highest backup, where actions are sampled
        "learn_ent_coef": False,
        "num_critics": 1,
        "conservative": True,
        "cql_actions": 2,
        "cql_temperature": 0.5,
        "cql_weight": 2.0,
    },
    "learned weight": {
        "conservative": True,
        "cql_target_gap": 1.5,
        "cql_actions": 1,
        "deterministic_backup": True,
        "bc_updates": 1,
    },
}


@pytest.mark.parametrize(
    ("case", "action"),
    some_quick(
        [(case, action) for case in CASES for action in (BOX, Discrete(3))],
        ("default", BOX), ("learned weight", Discrete(3)),
    ),
    ids=str,
)  # fmt: skip
def test_one_update_by_hand(case, action):
    """Targets are constants there, so that a gradient through them would be seen."""
    cfg = dataclasses.replace(BASE, **CASES[case])
    if not cfg.learn_ent_coef and action == BOX:
        cfg = dataclasses.replace(cfg, cql_max_q_backup=True)
    _, state, batch = setting(cfg, action)
    assert 4 < int((batch.weight == 0).sum()) < N / 2
    after, aux = update(cfg, state, batch, action=action)
    params, target_critic, metrics, priority = reference(cfg, state, batch, KEY, action)
    assert_close(dict(after.params), params, atol=2e-6, rtol=2e-5)
    assert_close(after.target_params["critic"], target_critic, atol=2e-6, rtol=2e-5)
    assert set(aux.metrics) == set(metrics)
    for name, want in metrics.items():
        np.testing.assert_allclose(aux.metrics[name], want, rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(aux.priority, priority, rtol=1e-4, atol=1e-5)
    assert int(after.updates) == 1


def test_td_gradient_with_numbers():
    """Two critics q = a x: 0.5 mean(w (a x - y)^2), summed; d/da = mean(w (a x - y) x)."""
    x, target, weight = jnp.array([1.0, 2.0]), jnp.array([3.0, 1.0]), jnp.array([0.5, 1.5])
    nothing = jnp.zeros(2)
    batch = Batch(x[:, None], nothing, nothing, nothing, x[:, None], weight, jnp.arange(2))
    q = lambda a, batch: a[:, None] * batch.obs[None, :, 0]
    td_gradient = jax.jit(lambda target: critics.td_gradient(q, jnp.array([1.0, 2.0]), batch, target, None))
    gradient, metrics, priority = td_gradient(target)
    # errors [[-2, 1], [-1, 3]]
    np.testing.assert_allclose(gradient, [(0.5 * -2 * 1 + 1.5 * 1 * 2) / 2, (0.5 * -1 * 1 + 1.5 * 3 * 2) / 2])
    np.testing.assert_allclose(priority, [1.5, 2.0])
    np.testing.assert_allclose(metrics["loss/value"], (0.5 * (0.5 * 4 + 1.5 * 1) + 0.5 * (0.5 * 1 + 1.5 * 9)) / 4)
    np.testing.assert_allclose(metrics["value/q"], (0.5 * 1.5 + 1.5 * 3) / 2)
    np.testing.assert_allclose(metrics["value/target"], (0.5 * 3 + 1.5 * 1) / 2)

    assert float(jax.jit(jax.grad(lambda a: td_gradient(a * target)[0].sum()))(1.0)) == 0


# ---------------------------------------------------------------- the policy


def test_actions_stay_within_bounds_and_deviations_too():
    """Whatever the network puts out: the deviation is in exp(-20) .. exp(2)."""
    algo, state, batch = setting()
    act = jax.jit(algo.act, static_argnames="explore")
    for scale in (1e3, -1e3):
        head = jax.tree.map(lambda x, s=scale: s * jnp.ones_like(x), state.params["actor"]["policy_head"])
        params = {**state.params, "actor": {**state.params["actor"], "policy_head": head}}
        wild = state.replace(params=params)
        for explore in (False, True):
            action = act(algo.actor(wild), batch.obs, (), KEY, explore=explore).action
            assert (np.abs(action) <= 1).all()
        after, aux = update(BASE, wild, batch)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((after, aux)))
    still = state.params["actor"] | {"policy_head": jax.tree.map(jnp.zeros_like, state.params["actor"]["policy_head"])}

    def deviation(algo):
        acted = jax.jit(jax.vmap(lambda actor, key: algo.act(actor, batch.obs, (), key).action, (None, 0)))
        return np.arctanh(np.asarray(acted(ActorState(still, ()), KEYS))).std()

    np.testing.assert_allclose(deviation(algo), 1.0, rtol=0.1)
    narrow = setting(network=dataclasses.replace(fakes.NETWORK, log_std_init=-1.5))[0]
    np.testing.assert_allclose(deviation(narrow), math.exp(-1.5), rtol=0.1)


KEYS = jax.random.split(KEY, 20)


# ---------------------------------------------------------------- the temperature


def test_the_temperature_starts_at_ent_coef():
    algo = sac.make(sac.Config(ent_coef=0.2), fakes.spec(BOX), fakes.NETWORK)
    np.testing.assert_allclose(np.exp(jax.jit(algo.init)(KEY).params["log_ent_coef"]), 0.2, rtol=1e-6)


# ---------------------------------------------------------------- options


@pytest.mark.slow
def test_targets_of_a_random_few_critics():
    """Each target is that of some pair, and every pair comes up."""
    few = dataclasses.replace(BASE, num_critics=4, target_critics=2)
    two = dataclasses.replace(BASE, num_critics=2)
    _, state, batch = setting(dataclasses.replace(BASE, num_critics=4), seed=8)
    # without reward and noise to tell apart: the policy's noise depends on the key
    head = state.params["actor"]["policy_head"]
    quiet = {"kernel": head["kernel"].at[:, 2:].set(0.0), "bias": head["bias"].at[2:].set(-20.0)}
    state = state.replace(params={**state.params, "actor": {**state.params["actor"], "policy_head": quiet}})
    state.params["log_ent_coef"] = jnp.float32(-20.0)
    pairs = {}
    for pair in itertools.combinations(range(4), 2):
        at = lambda tree, pair=pair: jax.tree.map(lambda x: x[jnp.array(pair)], tree)
        small = state.replace(params={**state.params, "critic": at(state.params["critic"])})
        opt_state = {**state.opt_state, "critic": setting(two)[1].opt_state["critic"]}
        small = small.replace(target_params={"critic": at(state.target_params["critic"])}, opt_state=opt_state)
        pairs[pair] = float(update(two, small, batch)[1].metrics["value/target"])
    values = np.array(list(pairs.values()))
    assert np.abs(values[:, None] - values[None])[~np.eye(6, dtype=bool)].min() > 1e-3
    seen = []
    for i in range(60):
        target = float(update(few, state, batch, jax.random.fold_in(KEY, i))[1].metrics["value/target"])
        distance = np.abs(values - target)
        assert distance.min() < 1e-4
        seen.append(int(distance.argmin()))
    assert set(seen) == set(range(6))
    assert np.bincount(seen).max() < 25


# ---------------------------------------------------------------- devices


def test_noise_of_a_device_is_its_part_of_the_whole():
    noise = jax.jit(critics.noise, static_argnums=(1, 2, 3))
    whole = noise(KEY, 12, (2, 3), None)
    part = jax.pmap(lambda key: critics.noise(key, 3, (2, 3), "d"), axis_name="d")(jnp.stack([KEY] * 4))
    # two programs, which one processor or another rounds differently
    np.testing.assert_allclose(np.asarray(part).reshape(12, 2, 3), whole, rtol=1e-6)
    np.testing.assert_allclose([np.mean(noise(KEY, 999, (7,), None)), 1], [0, 1], atol=0.05)
