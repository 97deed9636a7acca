"""Conservative Q-learning: many actions at once, masks, chunks.

Loss and gradients of one update are compared with the equations in test_sac.py and test_dqn.py; memory, void rows and
devices are settings of test_contract.py.
"""

import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from fakes import assert_close, assert_same, differ

from jrl.algos import conservative, critics, dqn, sac
from jrl.fields import hyper
from jrl.networks import NetworkConfig
from jrl.networks.critics import build_critics
from jrl.types import Batch, Box, Dict, Discrete, EnvSpec, InputError, Window

KEY = jax.random.key(4)
BOX = Box((2,), low=-1.0, high=1.0)
SPEC = fakes.spec(BOX)
NETWORK = NetworkConfig(hidden=(8,))
CQL = {"conservative": True, "cql_actions": 3}


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# ---------------------------------------------------------------- many actions for each observation


NETWORKS = {
    "normalised layers": NetworkConfig(hidden=(8, 8), norm="layer"),
    "no layers": NetworkConfig(hidden=()),
}


@pytest.mark.parametrize("network", some_quick(NETWORKS, "no layers"))
def test_many_actions_are_valued_as_one_after_the_other(network):
    critic = build_critics(SPEC, NETWORKS[network], 2)
    obs, actions, weights = normal(0, 5, 4), normal(1, 5, 3, 2), normal(2, 2, 5, 3)
    together = lambda params: critic.apply_each(params, obs, actions)
    alone = lambda params: jnp.stack([critic.apply(params, obs, actions[:, k]) for k in range(3)], -1)
    weighed = lambda params, f: (jnp.sum(weights * f(params)), f(params))

    @jax.jit
    def both(key):
        params = critic.init(key)
        return [jax.grad(weighed, has_aux=True)(params, f) for f in (together, alone)]

    found = both(KEY)
    assert found[0][1].shape == (2, 5, 3)
    assert_close(*found)


@pytest.mark.slow
def test_many_actions_with_memory_and_a_dictionary():
    space = Dict((("a", Box((3,))), ("b", Box((2,)))))
    critic = build_critics(EnvSpec(space, BOX, 4), NetworkConfig(hidden=(6,), core=hyper.Gru(size=5)), 2)
    params, (rows, length) = jax.jit(critic.init)(KEY), (4, 3)
    reset = jnp.zeros((rows, length), bool).at[1, 1].set(True)
    obs = {"a": normal(0, rows, length, 3), "b": normal(1, rows, length, 2)}
    window, actions = Window(obs, critic.carry(params, rows), reset), normal(2, rows, length, 3, 2)
    alone = lambda *args: jnp.stack([critic.apply(*args, actions[:, :, k]) for k in range(3)], -1)
    q, want = jax.jit(lambda *args: (critic.apply_each(*args, actions), alone(*args)))(params, window)
    assert q.shape == (2, rows, length, 3)
    assert_close(q, want)


# ---------------------------------------------------------------- the soft maximum


def test_masked_actions_do_not_count():
    q = jnp.array([[1.0, 5.0, 2.0], [1.0, 2.0, 3.0]])
    mask = jnp.array([[True, False, True], [False, False, False]])  # nothing allowed counts as everything
    want = [0.5 * np.log(np.exp(2.0) + np.exp(4.0)), 0.5 * np.log(np.exp([2.0, 4.0, 6.0]).sum())]
    of_all = lambda q: (
        conservative.soft_maximum_over_actions(q, mask, 0.5).sum(),
        conservative.soft_maximum_over_actions(q, mask, 0.5),
    )
    slope, found = jax.device_get(jax.jit(jax.grad(of_all, has_aux=True))(q))
    np.testing.assert_allclose(found, want, rtol=1e-6)
    assert slope[0, 1] == 0
    np.testing.assert_allclose(slope.sum(-1), 1.0, rtol=1e-6)


def test_no_gradient_reaches_the_values_of_masked_actions():
    """Only the first action is ever allowed: then there is nothing to bring down, and nothing moves but by the data."""
    space = Dict((("obs", Box((3,))), ("action_mask", Box((3,), "int8", 0, 1))))
    spec = EnvSpec(space, Discrete(3), 8)
    algo = dqn.make(dqn.Config(conservative=True, cql_weight=50.0, lr=0.1), spec, NETWORK)
    state, rows = fakes.perturbed(fakes.made_up_state(algo)), 16
    see = lambda seed: {
        "obs": normal(seed, rows, 3),
        "action_mask": jnp.tile(jnp.array([[1, 0, 0]], jnp.int8), (rows, 1)),
    }
    ones = jnp.ones(rows)
    batch = Batch(see(0), jnp.zeros(rows, jnp.int32), ones, 0.9 * ones, see(1), ones, jnp.arange(rows))
    after, aux = jax.jit(algo.update)(state, batch, KEY)
    np.testing.assert_allclose(aux.metrics["value/gap"], 0.0, atol=1e-5)
    both = jax.device_get((after.params, state.params))
    heads = [next(x for name, x in p.items() if name.endswith("head")) for p in both]
    unseen = [head["kernel"].reshape(*head["kernel"].shape[:-1], 3)[..., 1:] for head in heads]
    assert_same(*unseen)
    assert differ(*both)


def test_samples_are_constants_and_their_densities_right():
    """The mean over samples of 1 / density is the volume of the Box, whichever distribution they are of."""
    algo = sac.make(sac.Config(**CQL), SPEC, NETWORK)
    state = fakes.made_up_state(algo)
    batch = fakes.batch(algo, SPEC, algo.actor(state), N=64)
    agent = algo.init.args[1]
    cfg = sac.Config(conservative=True, cql_actions=1000)

    @jax.jit
    def draw(params, batch, key):
        dist = critics.policy_output(agent, params, batch.obs, 0)
        there = conservative.sampled(dist, cfg.cql_actions, key, None)
        return conservative.with_samples(cfg, agent, batch, dist, there, jax.random.key(1)).extras

    drawn = jax.device_get(draw(state.params["actor"], batch, KEY)[conservative.SAMPLED])
    assert drawn.action.shape == (64, 3000, 2)
    volumes = np.exp(-np.float64(drawn.log_prob).reshape(64, 3, 1000)).mean((0, 2))
    np.testing.assert_allclose(volumes[0], 4.0, rtol=1e-5)
    np.testing.assert_allclose(volumes[1:], 4.0, rtol=0.1)
    assert np.abs(drawn.action).max() <= 1
    assert differ(drawn.action[:, 1000:2000], drawn.action[:, 2000:])


ALL = sac.Config(
    **CQL, cql_target_gap=1.0, cql_max_q_backup=True, num_critics=3, target_critics=2, adam_eps=1.0, lr=0.1
)


@functools.cache
def whole():
    """(state, batch, what one device makes of them at once)"""
    algo = sac.make(ALL, SPEC, NETWORK)
    state = fakes.perturbed(fakes.made_up_state(algo))
    batch = fakes.batch(algo, SPEC, algo.actor(state), N=32)
    return state, batch, jax.jit(algo.update)(state, batch, KEY)


@pytest.mark.slow
def test_chunks_of_rows_change_nothing(monkeypatch):
    state, batch, want = whole()
    monkeypatch.setattr(conservative, "_CHUNK", 9 * 4 * 8)  # four rows at once
    traced = jax.jit(sac.make(ALL, SPEC, NETWORK).update).trace(state, batch, KEY)
    assert "scan" in str(traced.jaxpr)
    parts = traced.lower().compile()(state, batch, KEY)
    assert_close(parts[0], want[0], atol=1e-5)
    assert_close(parts[1].metrics, want[1].metrics, atol=1e-5)


# ---------------------------------------------------------------- its place in SAC


def test_the_weight_grows_until_the_gap_is_small_and_is_bounded():
    of = lambda goal: sac.make(sac.Config(**CQL, cql_target_gap=goal, cql_weight=2.0), SPEC, NETWORK)
    algo = of(1.0)
    state = fakes.made_up_state(algo)
    assert_close(state.params["log_cql_weight"], np.log(np.float32(2.0)))
    batch = fakes.batch(algo, SPEC, algo.actor(state))
    update = jax.jit(lambda goal, state: of(goal).update(state, batch, KEY)[0].params["log_cql_weight"])
    moved = {goal: float(update(goal, state) - state.params["log_cql_weight"]) for goal in (-50.0, 50.0)}
    assert moved[-50.0] > 1e-4 and moved[50.0] < -1e-4
    most = state.replace(params={**state.params, "log_cql_weight": jnp.float32(14.0)})
    assert float(update(-50.0, most)) <= np.log(1e6) + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("action", [BOX, Discrete(3)], ids=str)
def test_the_first_updates_imitate(action):
    """In them nothing that the critics say reaches the policy; after them it does."""
    spec = fakes.spec(action)
    algo = sac.make(sac.Config(conservative=True, cql_actions=2, bc_updates=2), spec, NETWORK)
    state = fakes.perturbed(fakes.made_up_state(algo))
    batch = fakes.batch(algo, spec, algo.actor(state))
    other = state.replace(params={**state.params, "critic": jax.tree.map(lambda x: -x, state.params["critic"])})
    update = jax.jit(algo.update)
    for count, same in ((0, True), (1, True), (2, False)):
        pair = [update(s.replace(updates=jnp.uint32(count)), batch, KEY)[0].params["actor"] for s in (state, other)]
        assert differ(*pair) != same, count


# ---------------------------------------------------------------- what it is for


def test_what_is_refused():
    with pytest.raises(InputError, match=r"cql_max_q_backup takes the best of sampled actions, .* set it to false"):
        sac.make(sac.Config(conservative=True, cql_max_q_backup=True), fakes.spec(Discrete(3)), NETWORK)
    for options in ({"cql_target_gap": 1.0}, {"cql_max_q_backup": True}):
        assert [f"{next(iter(options))} is a part of CQL: set conservative=true, or leave it out"] == sac.Config(
            **options
        ).validate()
    assert "cql_weight" in sac.Config(conservative=True, cql_target_gap=1.0, cql_weight=0.0).validate()[0]
