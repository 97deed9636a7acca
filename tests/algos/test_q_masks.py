"""DQN with action masks, and its scale of values."""

import fakes
import jax
import jax.numpy as jnp
import numpy as np
from dqn_reference import change

from jrl.algos import dqn
from jrl.networks import NetworkConfig
from jrl.ops import returns
from jrl.types import Batch, Box, Dict, Discrete, EnvSpec, MultiBinary

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


def test_values_on_a_small_scale_by_hand():
    x = jnp.array([0.0, 3.0, -8.0, 1e4, -1e-3])
    h = returns.signed_hyperbolic(x)
    np.testing.assert_allclose(h, [0, 1.003, -2.008, np.sqrt(10001) - 1 + 10, -0.0005008749], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(returns.signed_parabolic(h), x, rtol=1e-5, atol=1e-6)
    cfg = change(BASE, value_rescaling=True, double=True)
    after = returns.signed_parabolic(3.0)  # the tables hold h(Q)
    np.testing.assert_allclose(target_of(cfg, batch([1, 1, 1], [1, 1, 0])), 1 + 0.5 * after, rtol=1e-5)
