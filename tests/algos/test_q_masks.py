"""DQN and PQN with action masks, memory of PQN, and DQN's scale of values."""

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dqn_reference import change
from fakes import assert_close

from jrl.algos import dqn, pqn
from jrl.fields.hyper import Gru
from jrl.networks import NetworkConfig
from jrl.ops import returns
from jrl.types import Batch, Box, Dict, Discrete, EnvSpec, MultiBinary, Rollout

KEY = jax.random.key(0)
A = 3
SPEC = EnvSpec(Dict((("action_mask", MultiBinary((A,))), ("x", Box((4,))))), Discrete(A), 8)
LINEAR = NetworkConfig(hidden=(), init="lecun")
BASE = dqn.Config(max_grad_norm=None, lr=1e-2, num_atoms=6, v_min=-3.0, v_max=9.0, num_quantiles=5, loss="huber")
TABLE = np.float32([[2.0, 0.0, 7.0], [1.0, 4.0, 9.0], [0, 0, 0], [0, 0, 0]])  # Q of the four states
TARGET = np.float32([[0.0, 3.0, 8.0], [5.0, 3.0, 9.0], [0, 0, 0], [0, 0, 0]])


def observed(x, mask):
    return {"x": x, "action_mask": np.broadcast_to(np.asarray(mask, np.int8), (*x.shape[:-1], A))}


def batch(mask, next_mask, **fields):
    """From state 0 to state 1 by action 0, reward 1, discount 0.5."""
    one_hot, one = lambda i: np.eye(4, dtype=np.float32)[[i]], np.ones(1, np.float32)
    return Batch(
        obs=observed(one_hot(0), mask), action=np.int32([0]), reward=one, discount=0.5 * one,
        next_obs=observed(one_hot(1), next_mask), weight=one, index=np.zeros(1, np.int32),
    ).replace(**fields)  # fmt: skip


def target_of(cfg, batch):
    algo = dqn.make(cfg, SPEC, LINEAR)
    table = lambda values: {"q_head": {"kernel": values, "bias": np.zeros(A, np.float32)}}
    state = fakes.made_up_state(algo).replace(params=table(TABLE), target_params=table(TARGET))
    return float(jax.jit(algo.update)(state, batch, KEY)[1].metrics["value/target"])


def test_targets_are_of_allowed_actions_by_hand():
    some = batch([1, 1, 1], [1, 1, 0])
    assert target_of(BASE, some) == 1 + 0.5 * 5
    assert target_of(change(BASE, double=True), some) == 1 + 0.5 * 3  # of the two allowed the online best is action 1
    assert target_of(BASE, batch([1, 1, 1], [0, 0, 0])) == 1 + 0.5 * 9  # a mask that allows nothing allows all
    soft = change(BASE, munchausen=True, munchausen_temperature=1.0, munchausen_alpha=0.5, munchausen_clip=-9.0)
    log_pi = 0.0 - np.log(np.exp(0) + np.exp(3))  # in state 0 the third action is not allowed either
    want = 1 + 0.5 * log_pi + 0.5 * np.log(np.exp(5) + np.exp(3))
    np.testing.assert_allclose(target_of(soft, batch([1, 1, 0], [1, 1, 0])), want, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"double": True, "dueling": True, "head": "c51"}, {"munchausen": True, "dueling": True, "head": "qr"}],
    ids=["c51", "qr"],
)
def test_outputs_of_actions_that_are_not_allowed_do_not_matter(options):
    """Nor does any gradient reach them."""
    cfg = change(BASE, **options)
    algo = dqn.make(cfg, SPEC, LINEAR)
    state = fakes.perturbed(fakes.made_up_state(algo))
    update, size = jax.jit(algo.update), 6 if cfg.head == "c51" else 5
    sample = batch([1, 0, 1], [1, 0, 1])

    def moved(params):
        head = params["advantage_head"]
        return params | {"advantage_head": head | {"bias": head["bias"].at[size : 2 * size].add(5.0)}}

    other = state.replace(params=moved(state.params), target_params=moved(state.target_params))
    (after, aux), (_, other_aux) = update(state, sample, KEY), update(other, sample, KEY)
    assert_close(aux.metrics, other_aux.metrics, atol=1e-5)
    change_of = lambda name: np.asarray(after.params["advantage_head"][name] - state.params["advantage_head"][name])
    kernel = change_of("kernel").reshape(4, A, size)
    assert not kernel[:, 1].any() and not change_of("bias").reshape(A, size)[1].any()
    assert kernel[:, 0].any()


@pytest.mark.slow
def test_pqn_with_memory_and_masks_against_a_walk():
    """Sequences of 4 steps: the loss is that of Q by the memory that acting had, across ends."""
    network = NetworkConfig(hidden=(6,), core=Gru(size=5), max_seq_len=4)
    cfg = pqn.Config(num_epochs=1, num_minibatches=1, max_grad_norm=None, lr=0.0, gamma=0.9, q_lambda=0.5)
    algo = pqn.make(cfg, SPEC, network)
    state, T, B = fakes.perturbed(fakes.made_up_state(algo)), 8, 8
    rng = np.random.default_rng(3)
    mask = np.concatenate([np.ones((T + 1, B, 1)), rng.random((T + 1, B, 2)) < 0.5], -1)
    obs = {"x": rng.normal(size=(T + 1, B, 4)).astype(np.float32), "action_mask": mask.astype(np.int8)}
    terminated, truncated, valid = fakes.flags(rng, T, B)
    start, act = algo.carry(B), jax.jit(algo.act, static_argnames="explore")
    carry, action, value = start, [], []
    for t in range(T + 1):
        out = act(algo.actor(state), jax.tree.map(lambda x, t=t: x[t], obs), carry, KEY, explore=False)
        action.append(out.action)
        value.append(out.extras["value"])
        keep = valid[min(t, T - 1)][:, None]  # the memory begins anew after a reset row
        carry = jax.tree.map(lambda old, new, keep=keep: np.where(keep, new, old), start, out.carry)
    action, value = np.stack(action), np.stack(value)  # greedy: Q of the action is the value that acting saw
    reward = np.where(valid, rng.normal(size=(T, B)), 0).astype(np.float32)
    target = returns.lambda_returns(reward, terminated, terminated | truncated, value, gamma=0.9, lambda_=0.5)
    rollout = Rollout(
        obs=jax.tree.map(lambda x: x[:-1], obs), last_obs=jax.tree.map(lambda x: x[-1], obs), action=action[:-1],
        reward=reward, terminated=terminated, truncated=truncated, mask=valid,
        contiguous=np.ones(B, bool), extras={"value": value[:-1]}, carry=start,
    )  # fmt: skip
    assert not valid[:4].all() and not valid[4:].all()  # ends in both sequences
    _, aux = jax.jit(algo.update)(state, rollout, KEY)
    mean = lambda x: (valid * np.asarray(x)).sum() / valid.sum()
    np.testing.assert_allclose(aux.metrics["value/target"], mean(target), rtol=1e-4)
    np.testing.assert_allclose(aux.metrics["value/q"], mean(value[:-1]), rtol=1e-4)
    np.testing.assert_allclose(aux.metrics["loss/q"], mean(0.5 * (value[:-1] - target) ** 2), rtol=1e-4)


def test_values_on_a_small_scale_by_hand():
    x = jnp.array([0.0, 3.0, -8.0, 1e4, -1e-3])
    h = returns.signed_hyperbolic(x)
    np.testing.assert_allclose(h, [0, 1.003, -2.008, np.sqrt(10001) - 1 + 10, -0.0005008749], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(returns.signed_parabolic(h), x, rtol=1e-5, atol=1e-6)
    cfg = change(BASE, value_rescaling=True, double=True)
    after = returns.signed_parabolic(3.0)  # the tables hold h(Q)
    np.testing.assert_allclose(target_of(cfg, batch([1, 1, 1], [1, 1, 0])), 1 + 0.5 * after, rtol=1e-5)
