"""What the outputs of a Q network stand for: each head against plain loops over rows, actions and outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algos import q_heads

N, A = 7, 3
ATOMS = np.linspace(-2.0, 3.0, 6)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rows(size, seed=0):
    """(outputs [N, A, K], greedy policy, soft policy, its bonus, reward, discount)"""
    rng = np.random.default_rng(seed)
    outputs = rng.normal(size=(N, A, size)).astype(np.float32)
    greedy = np.eye(A, dtype=np.float32)[rng.integers(0, A, N)]
    soft = rng.dirichlet(np.ones(A), N).astype(np.float32)
    reward = rng.normal(size=N).astype(np.float32)
    discount = np.float32(0.9) * (rng.random(N) > 0.3)
    return outputs, greedy, soft, -0.5 * np.log(soft), reward, discount.astype(np.float32)


def share(position, i):
    return max(0.0, 1.0 - abs(position - i))


@pytest.mark.parametrize("head", [q_heads.expected("mse"), q_heads.quantiles(5)], ids=["expected", "qr"])
def test_backup_of_returns(head):
    outputs, greedy, soft, bonus, reward, discount = rows(head.size)
    target = head.backup(outputs, greedy, None, reward, discount)
    soft_target = head.backup(outputs, soft, bonus, reward, discount)
    assert target.shape == soft_target.shape == (N, head.size)
    for n in range(N):
        for k in range(head.size):
            best = int(greedy[n].argmax())
            np.testing.assert_allclose(target[n, k], reward[n] + discount[n] * outputs[n, best, k], rtol=1e-5)
            mean = sum(soft[n, a] * (outputs[n, a, k] + bonus[n, a]) for a in range(A))
            np.testing.assert_allclose(soft_target[n, k], reward[n] + discount[n] * mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(head.mean(outputs), outputs.mean(-1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(head.target_mean(target), np.asarray(target).mean(-1), rtol=1e-5, atol=1e-6)


def test_backup_of_a_categorical_distribution():
    head = q_heads.categorical(6, -2.0, 3.0)
    outputs, greedy, soft, bonus, reward, discount = rows(6)
    probs = softmax(outputs)
    np.testing.assert_allclose(head.mean(outputs), (probs * ATOMS).sum(-1), atol=1e-5)
    for policy, shift in ((greedy, None), (soft, bonus)):
        target = head.backup(outputs, policy, shift, reward, discount)
        want = np.zeros((N, 6))
        for n in range(N):
            for a in range(A):
                for k in range(6):
                    z = reward[n] + discount[n] * (ATOMS[k] + (0 if shift is None else shift[n, a]))
                    position = min(max(z, -2.0), 3.0) + 2.0
                    for i in range(6):
                        want[n, i] += policy[n, a] * probs[n, a, k] * share(position, i)
        np.testing.assert_allclose(target, want, atol=1e-5)
        np.testing.assert_allclose(head.target_mean(target), (want * ATOMS).sum(-1), atol=1e-5)


def test_a_greedy_backup_ignores_what_other_actions_put_out():
    head = q_heads.categorical(6, -2.0, 3.0)
    outputs, greedy, _, _, reward, discount = rows(6)
    other = np.where(greedy[..., None] > 0, outputs, 100.0).astype(np.float32)
    a, b = (head.backup(x, greedy, None, reward, discount) for x in (outputs, other))
    np.testing.assert_array_equal(a, b)


def test_loss_of_the_expected_return():
    outputs, target = jnp.array([[1.0], [1.0], [0.0]]), jnp.array([[1.5], [4.0], [-3.0]])
    np.testing.assert_allclose(q_heads.expected("huber").loss(outputs, target), [0.125, 2.5, 2.5])
    np.testing.assert_allclose(q_heads.expected("mse").loss(outputs, target), [0.125, 4.5, 4.5])


def test_loss_of_a_categorical_distribution():
    """KL of (1/2, 1/2, 0) from (1/4, 1/2, 1/4): 1/2 log 2."""
    head = q_heads.categorical(3, 0.0, 2.0)
    outputs = jnp.log(jnp.array([[0.25, 0.5, 0.25]])) + 3.0
    target = jnp.array([[0.5, 0.5, 0.0]])
    np.testing.assert_allclose(head.loss(outputs, target), [0.5 * np.log(2)], rtol=1e-5)
    np.testing.assert_allclose(head.loss(outputs, jnp.array([[0.25, 0.5, 0.25]])), [0.0], atol=1e-6)
    # and its gradient is that of the cross-entropy: predicted minus target
    slope = jax.grad(lambda x: head.loss(x, target)[0])(outputs)
    np.testing.assert_allclose(slope, [[-0.25, 0.0, 0.25]], atol=1e-6)
    # far logits leave it finite
    extreme = jax.value_and_grad(lambda x: head.loss(x, target)[0])(jnp.array([[-1e4, 0.0, 1e4]]))
    assert all(np.isfinite(x).all() for x in extreme)


def test_quantiles_are_learned_by_the_quantile_huber_loss():
    head = q_heads.quantiles(2)
    np.testing.assert_allclose(head.loss(jnp.array([[0.0, 2.0]]), jnp.array([[3.0, -0.5]])), [0.796875], rtol=1e-6)
    assert not head.priority_is_loss and q_heads.categorical(2, 0.0, 1.0).priority_is_loss
