"""BC: against the equations spelled out, what it refuses, and what it learns from with memory."""

import dataclasses
import operator

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_sac_memory
from fakes import assert_close, assert_same, differ
from sac_reference import forward

from jrl.algos import bc, marwil, observer, ppo
from jrl.errors import InputError
from jrl.networks import NetworkConfig
from jrl.rollout.unroll import reset_where
from jrl.types import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Tuple

KEY = jax.random.key(5)
BOX = Box((2,), low=-1.0, high=1.0)
MASKED = Dict((("action_mask", MultiBinary((3,))), ("x", Box((4,)))))
BASE = bc.Config(lr=0.1, adam_eps=1.0, ent_coef=0.3)


def setting(cfg, action=Discrete(3), observation=fakes.VECTOR, network=fakes.NETWORK):  # noqa: B008
    """(algo, a state away from its start, a Batch with void rows)"""
    spec = EnvSpec(observation, action, 8)
    algo = bc.make(cfg, spec, network)
    state = fakes.perturbed(fakes.made_up_state(algo))
    return algo, state, fakes.batch(algo, spec, algo.actor(state))


def adam(cfg, params, gradient):
    """The first step."""
    return jax.tree.map(lambda p, g: p - cfg.lr * g / (jnp.abs(g) + cfg.adam_eps), params, gradient)


def log_prob_and_entropy(params, x, action, allowed=None):
    """Of one row each: of three actions, or of two normal variables."""
    out = forward({"policy_torso": params["policy_torso"], "policy_head": params["policy_head"]}, x)
    if "log_std" not in params:
        odds = jnp.exp(out) * (1.0 if allowed is None else allowed)
        prob = odds / odds.sum(-1, keepdims=True)
        terms = jnp.where(prob > 0, prob * jnp.log(jnp.where(prob > 0, prob, 1.0)), 0.0)
        return jnp.log(prob[jnp.arange(len(x)), action]), -terms.sum(-1), prob.argmax(-1)
    std = jnp.exp(params["log_std"])[None]
    density = jnp.exp(-0.5 * ((action - out) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    entropy = jnp.log(std * np.sqrt(2 * np.pi * np.e)).sum()
    return jnp.log(density).sum(-1), jnp.full(len(x), entropy), out


def test_one_update_of_masked_choices_is_that_of_the_equation():
    algo, state, batch = setting(BASE, observation=MASKED)
    # no row's action is forbidden
    allowed = jnp.asarray(batch.obs["action_mask"], jnp.float32).at[jnp.arange(64), batch.action].set(1.0)
    batch = batch.replace(obs={**batch.obs, "action_mask": allowed.astype(jnp.int8)})
    x = batch.obs["x"]

    def loss(params):
        log_prob, entropy, best = log_prob_and_entropy(params, x, batch.action, allowed)
        terms = [batch.weight * y for y in (-log_prob, entropy, best == batch.action)]
        means = [term.sum() / 64 for term in terms]
        return means[0] - 0.3 * means[1], means

    gradient, means = jax.jit(jax.grad(loss, has_aux=True))(state.params)
    after, aux = jax.jit(algo.update)(state, batch, KEY)
    assert_close(after.params, adam(BASE, state.params, gradient), atol=2e-6)
    wanted = dict(zip(("loss/policy", "policy/entropy", "policy/accuracy"), means, strict=True))
    assert_close(dict(aux.metrics), {**wanted, "train/lr": 0.1}, rtol=1e-4)


@pytest.mark.parametrize("loss_name", ["log_prob", "mse"])
def test_one_update_of_a_box_is_that_of_the_equation(loss_name):
    cfg = dataclasses.replace(BASE, loss=loss_name, ent_coef=0.3 if loss_name == "log_prob" else 0.0)
    algo, state, batch = setting(cfg, BOX)

    def loss(params):
        log_prob, entropy, mean = log_prob_and_entropy(params, batch.obs, batch.action)
        squared = ((mean - batch.action) ** 2).mean(-1)
        error, squared, entropy = (
            (batch.weight * y).sum() / 64 for y in (-log_prob if loss_name == "log_prob" else squared, squared, entropy)
        )
        return error - cfg.ent_coef * entropy, {
            "loss/policy": error, "policy/entropy": entropy, "policy/mse": squared, "train/lr": 0.1
        }  # fmt: skip

    gradient, metrics = jax.jit(jax.grad(loss, has_aux=True))(state.params)
    after, aux = jax.jit(algo.update)(state, batch, KEY)
    assert_close(after.params, adam(cfg, state.params, gradient), atol=2e-6)
    assert_close(dict(aux.metrics), metrics, rtol=1e-4)
    assert differ(state.params["log_std"], after.params["log_std"]) == (loss_name == "log_prob")


def test_agreement_is_of_all_choices_and_of_the_mean_over_the_elements_of_boxes():
    space = Dict((("go", Discrete(3)), ("push", Tuple((MultiDiscrete((2, 2)), Box((3,)))))))
    action = {"go": jnp.array([0, 1, 2, 0]), "push": (jnp.array([[0, 0], [1, 1], [0, 1], [0, 0]]), jnp.ones((4, 3)))}

    class Said:
        def mode(self):
            pushed = action["push"][0].at[1, 0].set(0), action["push"][1].at[0, 0].add(3.0)
            return {"go": action["go"].at[3].set(2), "push": pushed}

    found = bc.agreement(space, Said(), action, jnp.array([2.0, 1.0, 1.0, 0.0]))
    # of rows 0 to 2, of weights 2, 1, 1 over 4 rows, row 1 disagrees; 3^2 over 3 elements, times the weight of row 0
    assert_close(found, {"policy/accuracy": 3 / 4, "policy/mse": 2 * (9 / 3) / 4})


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("action", "named"),
    [(Discrete(3), "Discrete"), (MultiBinary((2,)), "MultiBinary"), (Tuple((BOX, Discrete(2))), "Discrete")],
    ids=str,
)
def test_mse_is_of_boxes_alone(action, named):
    with pytest.raises(InputError, match=rf"algo\.loss mse needs actions of float Boxes, not {named}.*log_prob"):
        bc.make(bc.Config(loss="mse"), EnvSpec(fakes.VECTOR, action, 1), fakes.NETWORK)
    trees = EnvSpec(fakes.VECTOR, Tuple((BOX, BOX)), 1)
    assert bc.make(bc.Config(loss="mse"), trees, fakes.NETWORK)


def test_nothing_would_hold_an_entropy_bonus_beside_mse():
    assert "ent_coef has nothing to hold it" in bc.Config(loss="mse", ent_coef=0.1).validate()[0]
    assert bc.Config(loss="mse").validate() == bc.Config(ent_coef=0.1).validate() == []


# ---------------------------------------------------------------- its network and its memory


def test_its_parameters_are_those_of_the_policy_of_ppo():
    """The same names and numbers, and the same distribution."""
    spec, network = EnvSpec(fakes.VECTOR, BOX, 1), NetworkConfig(hidden=(8,), state_dependent_std=True)
    algo, others = bc.make(bc.Config(), spec, network), (m.make(m.Config(), spec, network) for m in (ppo, marwil))
    state = jax.jit(algo.init)(KEY)
    for other in others:
        theirs = jax.jit(other.init)(KEY)
        own = {name: x for name, x in theirs.params.items() if not name.startswith("value")}
        assert_same(state.params, own)
        said = [jax.jit(a.outputs)(s, jnp.ones((3, 4)))["distribution"] for a, s in ((algo, state), (other, theirs))]
        assert_same(*said)


def with_memory(module, **options):
    """(algo, state, SequenceBatch) of a task with action masks."""
    spec = test_sac_memory.MASKED
    algo = module.make(module.Config(lr=0.1, adam_eps=1.0, **options), spec, test_sac_memory.NETWORK)
    state = fakes.perturbed(fakes.made_up_state(algo))
    return algo, state, fakes.drawn(algo, spec, algo.actor(state))


@pytest.mark.slow
def test_learning_reads_what_acting_would_have_read():
    """One step after the other from an episode's start, over the burn-in and the ends of episodes."""
    algo, state, data = with_memory(bc)
    network = test_sac_memory.NETWORK
    watch = observer.make(test_sac_memory.MASKED, network, normalize_obs=False, axis_name=None)
    net = bc.policy_network(bc.Config(), watch, network)
    rows, steps = data.window.reset[:, :-1].shape
    burn_in = steps - data.action.shape[1]

    @jax.jit
    def step(obs, carry, reset, action):
        dist, carry = net.step(state.params, obs, reset_where(reset, net.carry(rows), carry))
        return dist.log_prob(action), carry

    carry, log_probs, host = net.carry(rows), [], jax.device_get(data)
    reset = np.concatenate([np.zeros((rows, 1), bool), host.window.reset], 1)
    for t in range(steps):
        obs = jax.tree.map(operator.itemgetter((slice(None), t)), host.window.obs)
        log_prob, carry = step(obs, carry, reset[:, t], host.action[:, max(t - burn_in, 0)])
        log_probs += [log_prob] if t >= burn_in else []
    assert host.window.reset[:, :-1].any()
    expected = -np.where(host.weight > 0, host.weight * np.stack(log_probs, 1), 0.0).mean()
    _, aux = jax.jit(algo.update)(state, data, KEY)
    np.testing.assert_allclose(aux.metrics["loss/policy"], expected, rtol=1e-4)
