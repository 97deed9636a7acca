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
from fakes import assert_close, assert_same, differ
from sac_reference import forward, one, reference
from scipy import stats

from jrl.algos import critics, sac
from jrl.algos.agent import ActorState
from jrl.algos.exploration import Custom
from jrl.distributions import TanhGaussian
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


@functools.cache
def _jitted(static, action):
    """The update with the config's floats as an argument: one compilation for all of their values."""
    env_spec = fakes.spec(action)
    fill = lambda cfg: dataclasses.replace(cfg, **dict(static))
    return jax.jit(lambda cfg, *args: sac.make(fill(cfg), env_spec, fakes.NETWORK).update(*args))


def update(cfg, state, batch, key=KEY, action=BOX):
    static = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if f.type in (int, bool, int | None)}
    static["actor_q"] = cfg.actor_q
    return _jitted(tuple(static.items()), action)(jax.tree.map(jnp.float32, cfg), state, batch, key)


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


def test_samples_are_those_of_the_distribution():
    rng = np.random.default_rng(0)
    dist = TanhGaussian(*(jnp.asarray(rng.normal(size=(50, 2)), jnp.float32) for _ in range(2)))
    noise = jnp.asarray(rng.normal(size=(50, 2)), jnp.float32)
    from_noise = jax.jit(lambda dist, noise: dist.from_noise(noise))
    action, log_prob = from_noise(dist, noise)
    before = np.asarray(dist.mean, np.float64) + np.exp(np.asarray(dist.log_std, np.float64)) * np.asarray(noise)
    density = stats.norm.logpdf(before, dist.mean, np.exp(np.asarray(dist.log_std, np.float64)))
    want = (density - np.log1p(-(np.tanh(before) ** 2))).sum(-1)
    np.testing.assert_allclose(action, np.tanh(before), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(log_prob, want, rtol=1e-4, atol=1e-4)
    far = TanhGaussian(jnp.full((1, 2), 40.0), jnp.full((1, 2), 2.0))
    far_action, far_log_prob = jax.device_get(from_noise(far, noise[:1]))
    assert (far_action == 1).all()  # the nearest float32
    assert np.isfinite(far_log_prob).all()


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


@pytest.mark.slow
def test_the_first_policy_is_nearly_the_same_everywhere():
    for action, spread in ((BOX, 0.05), (Discrete(3), 0.05)):
        algo, _, batch = setting(action=action)
        state = jax.jit(algo.init)(KEY)
        if action == BOX:
            act = jax.jit(algo.act, static_argnames="explore")
            assert np.abs(act(algo.actor(state), batch.obs, (), KEY, explore=False).action).max() < spread
        else:
            _, aux = update(BASE, state, batch, action=action)
            np.testing.assert_allclose(aux.metrics["policy/entropy"], math.log(3), atol=spread)


def test_without_exploration_the_mode_is_taken():
    algo, state, batch = setting()
    act = jax.jit(algo.act, static_argnames="explore")
    best = act(algo.actor(state), batch.obs, (), KEY, explore=False).action
    assert_same(best, act(algo.actor(state), batch.obs, (), jax.random.key(0), explore=False).action)
    np.testing.assert_allclose(np.arctanh(best), forward(state.params["actor"], batch.obs)[:, :2], rtol=1e-3, atol=1e-4)


def halve(dist, key, env_steps, carry):
    return 0.5 * dist.mode(), carry


def test_a_custom_exploration_gets_the_distribution():
    cfg = dataclasses.replace(BASE, exploration=Custom(path=f"{__name__}:halve"))
    algo, state, batch = setting(cfg)
    act = jax.jit(algo.act, static_argnames="explore")
    best = act(algo.actor(state), batch.obs, (), KEY, explore=False).action
    np.testing.assert_allclose(act(algo.actor(state), batch.obs, (), KEY).action, best / 2, rtol=1e-6)


# ---------------------------------------------------------------- the temperature


@pytest.mark.parametrize("action", some_quick([BOX, Discrete(3)], Discrete(3)), ids=str)
def test_the_temperature_moves_towards_the_target_entropy(action):
    _, state, batch = setting(action=action)
    entropy = float(update(BASE, state, batch, action=action)[1].metrics["policy/entropy"])
    for goal, sign in ((entropy + 1.0, 1), (entropy - 1.0, -1)):
        cfg = dataclasses.replace(BASE, target_entropy=goal)
        after, aux = update(cfg, state, batch, action=action)
        change = float(after.params["log_ent_coef"] - state.params["log_ent_coef"])
        assert change * sign > 0.01, goal  # too little entropy: a higher weight
        np.testing.assert_allclose(aux.metrics["policy/ent_coef"], np.exp(after.params["log_ent_coef"]), rtol=1e-6)


def test_the_temperature_starts_at_ent_coef():
    algo = sac.make(sac.Config(ent_coef=0.2), fakes.spec(BOX), fakes.NETWORK)
    np.testing.assert_allclose(np.exp(jax.jit(algo.init)(KEY).params["log_ent_coef"]), 0.2, rtol=1e-6)


@pytest.mark.slow
def test_a_fixed_temperature_may_be_a_schedule():
    cfg = dataclasses.replace(BASE, learn_ent_coef=False, ent_coef=((0, 0.5), (100, 0.1)))
    _, state, batch = setting(cfg)
    assert "log_ent_coef" not in state.params
    for env_steps, want in ((0, 0.5), (50, 0.3), (200, 0.1)):
        now = state.replace(env_steps=jnp.uint32(env_steps))
        after, aux = update(cfg, now, batch)
        np.testing.assert_allclose(aux.metrics["policy/ent_coef"], want, rtol=1e-6)
        fixed = dataclasses.replace(cfg, ent_coef=((0, want), (100, want)))
        assert_close(after.params, update(fixed, now, batch)[0].params)


# ---------------------------------------------------------------- options


@pytest.mark.slow
def test_policy_every():
    cfg = dataclasses.replace(BASE, policy_every=3)
    _, state, _ = setting(cfg)
    for i in range(1, 8):
        _, _, batch = setting(cfg, seed=i)
        after, aux = update(cfg, state, batch, jax.random.fold_in(KEY, i))
        moved = {name for name in after.params if differ(after.params[name], state.params[name])}
        assert moved == ({"actor", "critic", "log_ent_coef"} if i % 3 == 0 else {"critic"}), i
        assert differ(after.target_params["critic"], state.target_params["critic"])
        assert differ(after.own["policy_metrics"], state.own["policy_metrics"]) == (i % 3 == 0)
        np.testing.assert_array_equal(aux.metrics["loss/policy"], after.own["policy_metrics"]["loss/policy"])
        if i % 3 == 0:  # as without the delay
            each, aux_each = update(BASE, state, batch, jax.random.fold_in(KEY, i))
            assert_close(after, each, atol=1e-6)
            assert_close(aux.metrics, aux_each.metrics)
        state = after


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


@pytest.mark.slow
def test_all_of_the_critics_are_a_choice_too():
    every = dataclasses.replace(BASE, target_critics=2)
    _, state, batch = setting()
    head = jax.tree.map(jnp.zeros_like, state.params["actor"]["policy_head"])
    head["bias"] = head["bias"].at[2:].set(-20.0)
    state = state.replace(params={**state.params, "actor": {**state.params["actor"], "policy_head": head}})
    state.params["log_ent_coef"] = jnp.float32(-20.0)
    targets = [update(cfg, state, batch)[1].metrics["value/target"] for cfg in (every, BASE)]
    np.testing.assert_allclose(*targets, rtol=1e-5)


@pytest.mark.slow
def test_max_grad_norm():
    cfg = dataclasses.replace(BASE, max_grad_norm=1e-3)
    _, state, batch = setting(cfg)
    after, _ = update(cfg, state, batch)
    for name, lr in (("actor", BASE.actor_lr), ("critic", BASE.lr), ("log_ent_coef", BASE.ent_coef_lr)):
        steps = jax.tree.leaves(jax.tree.map(np.subtract, *jax.device_get((after.params[name], state.params[name]))))
        norm = math.sqrt(sum(np.sum(np.float64(x) ** 2) for x in steps))
        np.testing.assert_allclose(norm, lr * 1e-3, rtol=0.01)  # g / (|g| + 1) is g


def test_discrete_expectations_are_those_of_samples():
    """value/target of reward 0 and discount 1 is E[min Q(a) - ent_coef log pi(a)] over the policy's actions."""
    action = Discrete(3)
    algo, state, batch = setting(action=action)
    batch = batch.replace(reward=jnp.zeros(N), discount=jnp.ones(N), weight=jnp.ones(N))
    _, aux = update(BASE, state, batch, action=action)

    @jax.jit
    def soft_values(state, obs):
        q = jnp.stack([forward(one(state.target_params["critic"], i), obs) for i in range(2)]).min(0)
        return q - jnp.exp(state.params["log_ent_coef"]) * jax.nn.log_softmax(forward(state.params["actor"], obs))

    soft = np.asarray(soft_values(state, batch.next_obs))
    act = jax.jit(jax.vmap(lambda key: algo.act(algo.actor(state), batch.next_obs, (), key).action))
    taken = np.asarray(act(jax.random.split(KEY, 2000)))  # [2000, N]
    values = soft[np.arange(N), taken].mean(1)
    error = values.std() / math.sqrt(len(values))
    np.testing.assert_allclose(aux.metrics["value/target"], values.mean(), atol=4 * error)
    assert error < 0.02


# ---------------------------------------------------------------- devices


@pytest.mark.slow
@pytest.mark.parametrize("action", [BOX], ids=str)  # Discrete: the contract suite
def test_four_devices_learn_as_one(action):
    cfg = dataclasses.replace(BASE, num_critics=3, target_critics=2, policy_every=2, max_grad_norm=1.0)
    algo, state, _ = setting(cfg, action)
    mapped = sac.make(cfg, fakes.spec(action), fakes.NETWORK, axis_name="d").update
    four = jax.pmap(mapped, axis_name="d", in_axes=(0, 0, None))
    alone, stacked = state, jax.tree.map(lambda x: jnp.stack([x] * 4), state)
    for i in range(2):
        key, batch = jax.random.fold_in(KEY, i), setting(cfg, action, seed=i)[2]
        shards = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
        alone, aux = jax.jit(algo.update)(alone, batch, key)
        stacked, aux_four = jax.block_until_ready(four(stacked, shards, key))
    for device in range(4):
        assert_close(fakes.part(stacked, device), alone, atol=1e-5, rtol=1e-4)
        assert_close(fakes.part(aux_four.metrics, device), aux.metrics, atol=1e-5, rtol=1e-4)
    assert_close(aux_four.priority.reshape(-1), aux.priority, atol=1e-5, rtol=1e-4)


def test_noise_of_a_device_is_its_part_of_the_whole():
    noise = jax.jit(critics.noise, static_argnums=(1, 2, 3))
    whole = noise(KEY, 12, (2, 3), None)
    part = jax.pmap(lambda key: critics.noise(key, 3, (2, 3), "d"), axis_name="d")(jnp.stack([KEY] * 4))
    # two programs, which one processor or another rounds differently
    np.testing.assert_allclose(np.asarray(part).reshape(12, 2, 3), whole, rtol=1e-6)
    np.testing.assert_allclose([np.mean(noise(KEY, 999, (7,), None)), 1], [0, 1], atol=0.05)
