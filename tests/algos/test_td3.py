"""TD3 and DDPG against a slow reference that spells everything out, and each option by hand."""

import dataclasses
import functools

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick
from fakes import assert_close, assert_same, differ

from jrl.algos import critics, td3
from jrl.algos.agent import ActorState
from jrl.algos.exploration import Gaussian
from jrl.types import NEXT_ACTION, Box

KEY = jax.random.key(2)
BOX = Box((2,), low=-1.0, high=1.0)
SPEC = fakes.spec(BOX)
# a large adam_eps makes the first step lr * g / (|g| + eps): the gradient itself is seen, not only its sign
BASE = td3.Config(
    lr=0.1, actor_lr=0.2, adam_eps=1.0, gamma=0.9, tau=0.1, policy_every=1, target_noise=0.6, target_noise_clip=0.4
)
DDPG = dataclasses.replace(BASE, num_critics=1, target_noise=0.0)
N = 32


@functools.cache
def setting(cfg=BASE, seed=0, network=fakes.NETWORK, spec=SPEC):
    """(algo, state, batch), the state away from its start and its targets away from the networks."""
    algo = td3.make(cfg, spec, network)
    state = fakes.perturbed(fakes.made_up_state(algo))
    state = state.replace(target_params=fakes.perturbed(state.replace(params=state.target_params), 0.5).params)
    return algo, state, fakes.batch(algo, spec, algo.actor(state), N=N, seed=seed)


def update(cfg, state, batch, key=KEY):
    constants = {} if cfg.target_noise else {"target_noise": 0}  # DDPG's, whose program draws none
    return fakes.update(td3, cfg, SPEC, fakes.NETWORK, state, batch, key, **constants)


# ---------------------------------------------------------------- the reference


def forward(params, x):
    """One network of two tanh layers, from a tree of its own (no axis of critics)."""
    layers, head = params.get("layers") or params["policy_torso"], params.get("head") or params["policy_head"]
    for name in ("Dense_0", "Dense_1"):
        x = jnp.tanh(x @ layers[name]["kernel"] + layers[name]["bias"][None])
    return x @ head["kernel"] + head["bias"][None]


def q_of(cfg, critic, obs, action):
    x = jnp.concatenate([obs, action], -1)
    return jnp.stack([forward(jax.tree.map(lambda p, i=i: p[i], critic), x)[:, 0] for i in range(cfg.num_critics)])


@functools.partial(jax.jit, static_argnums=0)
def reference(cfg, state, batch, key):
    """(params, target_params, metrics, priority) after one update with Adam's first step, the policy's included."""
    weight, mean = batch.weight, lambda x: jnp.sum(batch.weight * x) / N
    noise = cfg.target_noise * critics.noise(key, N, (2,), None)
    noise = jnp.minimum(jnp.maximum(noise, -cfg.target_noise_clip), cfg.target_noise_clip)
    after = jnp.tanh(forward(state.target_params["actor"], batch.next_obs)) + noise
    after = jnp.minimum(jnp.maximum(after, -1), 1)
    least = q_of(cfg, state.target_params["critic"], batch.next_obs, after).min(0)
    if cfg.critic_bc is not None:
        known = batch.extras[NEXT_ACTION]
        least -= cfg.critic_bc * jnp.where(known["valid"], jnp.square(after - known["action"]).sum(1), 0.0)
    target = batch.reward + batch.discount * least  # a constant

    def critic_loss(critic):
        q = q_of(cfg, critic, batch.obs, batch.action)
        return sum(mean(0.5 * (q[i] - target) ** 2) for i in range(cfg.num_critics))

    adam = lambda params, gradient, lr: jax.tree.map(
        lambda p, g: p - lr * g / (jnp.abs(g) + cfg.adam_eps), params, gradient
    )
    params = dict(state.params)
    params["critic"] = adam(params["critic"], jax.grad(critic_loss)(params["critic"]), cfg.lr)

    of_policy = lambda actor: q_of(cfg, params["critic"], batch.obs, jnp.tanh(forward(actor, batch.obs)))[0]
    size = mean(jnp.abs(of_policy(params["actor"])))  # a constant

    def actor_loss(actor):
        apart = jnp.square(jnp.tanh(forward(actor, batch.obs)) - batch.action)
        if cfg.bc_alpha is not None:
            return mean(-cfg.bc_alpha / size * of_policy(actor) + apart.mean(1))
        if cfg.actor_bc is not None:
            return mean(-of_policy(actor) / size + cfg.actor_bc * apart.sum(1))
        return -mean(of_policy(actor))

    loss, gradient = jax.value_and_grad(actor_loss)(params["actor"])
    params["actor"] = adam(params["actor"], gradient, cfg.actor_lr)
    target_params = jax.tree.map(lambda t, p: (1 - cfg.tau) * t + cfg.tau * p, state.target_params, params)
    q = q_of(cfg, state.params["critic"], batch.obs, batch.action)
    metrics = {
        "loss/value": critic_loss(state.params["critic"]) / cfg.num_critics,
        "loss/policy": loss,
        "value/q": mean(q.mean(0)),
        "value/target": mean(target),
        "train/lr": cfg.lr,
    }
    return params, target_params, metrics, jnp.where(weight > 0, jnp.abs(q - target[None]).mean(0), 0.0)


THREE = dataclasses.replace(BASE, num_critics=3)


@pytest.mark.parametrize("cfg", some_quick([BASE, DDPG, THREE], BASE), ids=["td3", "ddpg", "three"])
def test_one_update_by_hand(cfg):
    """Targets are constants there, so that a gradient through them would be seen."""
    _, state, batch = setting(cfg)
    assert 4 < int((batch.weight == 0).sum()) < N / 2
    after, aux = update(cfg, state, batch)
    params, target_params, metrics, priority = reference(cfg, state, batch, KEY)
    assert_close(dict(after.params), params, atol=2e-6, rtol=2e-5)
    assert_close(dict(after.target_params), target_params, atol=2e-6, rtol=2e-5)
    assert set(aux.metrics) == set(metrics)
    for name, want in metrics.items():
        np.testing.assert_allclose(aux.metrics[name], want, rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(aux.priority, priority, rtol=1e-4, atol=1e-5)
    assert int(after.updates) == 1


def test_policy_and_targets_every_few_steps():
    cfg = dataclasses.replace(BASE, policy_every=3)
    algo, state, _ = setting(cfg)
    for i in range(1, 8):
        batch, key = fakes.batch(algo, SPEC, algo.actor(state), N=N, seed=i), jax.random.fold_in(KEY, i)
        after, aux = update(cfg, state, batch, key)
        assert differ(after.params["critic"], state.params["critic"])
        for old, new in (
            (state.params["actor"], after.params["actor"]),
            (state.target_params["actor"], after.target_params["actor"]),
            (state.target_params["critic"], after.target_params["critic"]),
            (state.opt_state["actor"], after.opt_state["actor"]),
            (state.own["policy_loss"], after.own["policy_loss"]),
        ):
            assert differ(old, new) == (i % 3 == 0), i
        np.testing.assert_array_equal(aux.metrics["loss/policy"], after.own["policy_loss"])
        if i % 3 == 0:  # as without the delay
            assert_close(after, update(BASE, state, batch, key)[0], atol=1e-6)
        state = after


def test_the_policy_follows_the_first_critic():
    _, state, batch = setting()
    frozen = dataclasses.replace(BASE, lr=0.0)  # so that both runs have the critics that they start with
    want = update(frozen, state, batch)[0].params["actor"]
    for i, same in ((0, False), (1, True)):
        critic = jax.tree.map(lambda x, i=i: x.at[i].add(0.3), state.params["critic"])
        after = update(frozen, state.replace(params={**state.params, "critic": critic}), batch)[0]
        assert differ(after.params["actor"], want) != same


# ---------------------------------------------------------------- acting


def test_actions():
    """tanh of the network; noise of the given deviation, clipped; nothing random without exploration."""
    algo, state, batch = setting(dataclasses.replace(BASE, exploration=Gaussian(std=0.3)))
    act = jax.jit(algo.act, static_argnames="explore")
    best = act(algo.actor(state), batch.obs, (), KEY, explore=False).action
    np.testing.assert_allclose(best, np.tanh(forward(state.params["actor"], batch.obs)), rtol=1e-5, atol=1e-6)
    assert_same(best, act(algo.actor(state), batch.obs, (), jax.random.key(9), explore=False).action)
    actor = algo.actor(state)
    taken = np.stack(jax.device_get([act(actor, batch.obs, (), key).action for key in jax.random.split(KEY, 200)]))
    assert np.abs(taken).max() <= 1
    inside = np.abs(np.asarray(best)) < 0.2
    assert inside.sum() > 3
    np.testing.assert_allclose((taken - best[None])[:, inside].std(), 0.3, rtol=0.1)
    huge = jax.tree.map(lambda x: 1e4 * x, state.params["actor"])
    assert np.abs(act(ActorState(huge, (), state.env_steps), batch.obs, (), KEY).action).max() <= 1


def test_the_first_actions_are_near_0():
    algo, _, batch = setting()
    first = jax.jit(lambda obs: algo.act(algo.actor(algo.init(KEY)), obs, (), KEY, explore=False).action)
    assert np.abs(first(batch.obs)).max() < 0.05
