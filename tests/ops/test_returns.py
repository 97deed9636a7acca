"""Returns and advantages against numbers worked by hand, plain Python loops, and properties of the reset row."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import returns

# Hyper-parameters are traced: one compilation for each shape.
gae = jax.jit(returns.gae)
lambda_returns = jax.jit(returns.lambda_returns)
vtrace = jax.jit(returns.vtrace)

LAMBDAS = (0.0, 0.5, 0.95, 1.0)
NO, TERMINATED, TRUNCATED = "no", "terminated", "truncated"


def rollout(seed=0, T=23, B=6, end_rate=0.25):
    """Random rows under the contract: a reset row (the row after an end) has reward 0 and does not end."""
    rng = np.random.default_rng(seed)
    done = rng.random((T, B)) < end_rate
    for t in range(1, T):
        done[t] &= ~done[t - 1]
    terminated = done & (rng.random((T, B)) < 0.5)
    reset_row = np.concatenate([np.zeros((1, B), bool), done[:-1]])
    reward = np.where(reset_row, 0.0, rng.normal(size=(T, B))).astype(np.float32)
    value = rng.normal(size=(T + 1, B)).astype(np.float32)
    return reward, terminated, done, value


def lambda_return_by_loop(reward, terminated, done, value, gamma, lambda_):
    """Forward view: the (1 - lambda) lambda^(k-1) mixture of k-step returns, the last one with all the weight left."""
    T, B = reward.shape
    target = np.zeros((T, B))
    for t, b in itertools.product(range(T), range(B)):
        rewards, weight = 0.0, 1.0
        for k in range(T - t):
            row = t + k
            rewards += gamma**k * reward[row, b]
            k_step = rewards + (0.0 if terminated[row, b] else gamma ** (k + 1) * value[row + 1, b])
            if done[row, b] or row == T - 1:
                target[t, b] += weight * k_step
                break
            target[t, b] += weight * (1 - lambda_) * k_step
            weight *= lambda_
    return target


def vtrace_by_loop(reward, terminated, done, value, log_rho, gamma, lambda_, clip_rho, clip_c, clip_pg_rho):
    """Equation 1 as a sum over the rows that follow; advantages from its targets."""
    T, B = reward.shape
    ratio = np.exp(log_rho.astype(np.float64))
    following = np.where(terminated, 0.0, value[1:])
    target = value[:-1].astype(np.float64)
    for t, b in itertools.product(range(T), range(B)):
        trace = 1.0
        for row in range(t, T):
            error = reward[row, b] + gamma * following[row, b] - value[row, b]
            target[t, b] += trace * min(clip_rho, ratio[row, b]) * error
            if done[row, b]:
                break
            trace *= gamma * lambda_ * min(clip_c, ratio[row, b])
    advantage = np.zeros((T, B))
    for t, b in itertools.product(range(T), range(B)):
        after = following[t, b]
        if not done[t, b] and t < T - 1:
            after = lambda_ * target[t + 1, b] + (1 - lambda_) * value[t + 1, b]
        advantage[t, b] = min(clip_pg_rho, ratio[t, b]) * (reward[t, b] + gamma * after - value[t, b])
    return advantage, target


def column(*numbers):
    return np.array(numbers, np.float32)[:, None]


# ---------------------------------------------------------------- numbers worked by hand

# gamma 0.5, lambda 0.5. Rows 0, 1 of an episode that ends in row 1, row 2 the reset row, row 3 of the next episode.
#   reward 1 2 0 3; value 4 2 6 8 10; value[2] = 6 is V of the final observation.
# TD errors, no end:     row 3: 3 + .5*10 - 8 = 0    row 2: 0 + .5*8 - 6 = -2    row 1: 2 + .5*6 - 2 = 3
#                        row 0: 1 + .5*2 - 4 = -2
# advantage, trace .25:  row 3: 0    row 2: -2 + 0 = -2    row 1: 3 - .5 = 2.5    row 0: -2 + .625 = -1.375
# truncated in row 1:    row 1: 3 (bootstraps from 6, no trace)       row 0: -2 + .75 = -1.25
# terminated in row 1:   row 1: 2 - 2 = 0 (no bootstrap, no trace)    row 0: -2 + 0 = -2
HAND = {
    NO: [-1.375, 2.5, -2.0, 0.0],
    TRUNCATED: [-1.25, 3.0, -2.0, 0.0],
    TERMINATED: [-2.0, 0.0, -2.0, 0.0],
}


@pytest.mark.parametrize("end", HAND)
def test_gae_and_lambda_returns_by_hand(end):
    reward, value = column(1, 2, 0, 3), column(4, 2, 6, 8, 10)
    done = column(0, end != NO, 0, 0).astype(bool)
    terminated = column(0, end == TERMINATED, 0, 0).astype(bool)
    advantage, target = gae(reward, terminated, done, value, gamma=0.5, gae_lambda=0.5)
    np.testing.assert_array_equal(advantage[:, 0], HAND[end])
    np.testing.assert_array_equal(target[:, 0], np.add(HAND[end], [4, 2, 6, 8]))  # plus the values
    target = lambda_returns(reward, terminated, done, value, gamma=0.5, lambda_=0.5)
    np.testing.assert_array_equal(target[:, 0], np.add(HAND[end], [4, 2, 6, 8]))


def test_vtrace_by_hand():
    # gamma 0.5, lambda 1, all clips 1, two rows, no end: ratio 1/2 and 4; reward 1 2; value 4 2 6.
    # TD errors: 1 + .5*2 - 4 = -2 and 2 + .5*6 - 2 = 3; rho = c = .5 and 1.
    # v_1 = 2 + 1*3 = 5;  v_0 = 4 + .5*-2 + .5*.5*(5 - 2) = 3.75
    # advantages: 1*(2 + .5*6 - 2) = 3;  .5*(1 + .5*5 - 4) = -.25
    no = np.zeros((2, 1), bool)
    log_rho = np.log(column(0.5, 4))
    advantage, target = vtrace(column(1, 2), no, no, column(4, 2, 6), log_rho, gamma=0.5)
    np.testing.assert_allclose(target[:, 0], [3.75, 5.0], rtol=1e-6)
    np.testing.assert_allclose(advantage[:, 0], [-0.25, 3.0], rtol=1e-6)
    # clip_rho 3: v_1 = 2 + 3*3 = 11, v_0 = 4 - 1 + .25*9 = 5.25;  clip_pg_rho 2: 2*3 = 6, .5*(1 + 5.5 - 4) = 1.25
    advantage, target = vtrace(column(1, 2), no, no, column(4, 2, 6), log_rho, gamma=0.5, clip_rho=3.0, clip_pg_rho=2.0)
    np.testing.assert_allclose(target[:, 0], [5.25, 11.0], rtol=1e-6)
    np.testing.assert_allclose(advantage[:, 0], [1.25, 6.0], rtol=1e-6)


# ---------------------------------------------------------------- plain Python loops


@pytest.mark.parametrize("lambda_", LAMBDAS)
@pytest.mark.parametrize("end", (NO, TERMINATED, TRUNCATED))
@pytest.mark.parametrize("row", (0, 2, 4))  # first, middle, last of five
def test_gae_table(row, end, lambda_):
    """One end of each kind in each place; the row after it is a reset row."""
    reward, terminated, done, value = rollout(seed=row, T=5, B=2, end_rate=0.0)
    done[row, 0], terminated[row, 0] = end != NO, end == TERMINATED
    if end != NO and row < 4:
        reward[row + 1, 0] = 0.0
    expected = lambda_return_by_loop(reward, terminated, done, value, 0.9, lambda_)
    advantage, target = gae(reward, terminated, done, value, gamma=0.9, gae_lambda=lambda_)
    np.testing.assert_allclose(target, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(advantage, expected - value[:-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lambda_", LAMBDAS)
def test_lambda_returns_by_loop(lambda_):
    args = rollout(seed=1, T=23)
    target = lambda_returns(*args, gamma=0.9, lambda_=lambda_)
    np.testing.assert_allclose(target, lambda_return_by_loop(*args, 0.9, lambda_), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lambda_", LAMBDAS)
@pytest.mark.parametrize("clips", ((1.0, 1.0, 1.0), (2.0, 0.7, 1.5), (0.5, 1.2, 0.8)))
def test_vtrace_off_policy_by_loop(clips, lambda_):
    args = (*rollout(seed=4), np.random.default_rng(5).normal(size=(23, 6)).astype(np.float32))
    clip_rho, clip_c, clip_pg_rho = clips
    got = vtrace(*args, gamma=0.9, vtrace_lambda=lambda_, clip_rho=clip_rho, clip_c=clip_c, clip_pg_rho=clip_pg_rho)
    advantage, target = vtrace_by_loop(*args, 0.9, lambda_, *clips)
    np.testing.assert_allclose(got.advantage, advantage, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.target, target, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lambda_", LAMBDAS)
@pytest.mark.parametrize("clip", (1.0, 3.0))
def test_vtrace_on_policy_is_gae(clip, lambda_):
    args = rollout(seed=6)
    advantage, target = gae(*args, gamma=0.9, gae_lambda=lambda_)
    got = vtrace(
        *args, np.zeros((23, 6)), gamma=0.9, vtrace_lambda=lambda_, clip_rho=clip, clip_c=clip, clip_pg_rho=clip
    )
    np.testing.assert_allclose(got.advantage, advantage, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.target, target, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- the contract

TARGETS = {
    "gae": lambda r, te, d, v, rho: gae(r, te, d, v, gamma=0.9, gae_lambda=0.8),
    "lambda": lambda r, te, d, v, rho: lambda_returns(r, te, d, v, gamma=0.9, lambda_=0.8),
    "vtrace": lambda r, te, d, v, rho: vtrace(r, te, d, v, rho, gamma=0.9, vtrace_lambda=0.8),
}


def off_policy_rollout(seed=7):
    return *rollout(seed), np.random.default_rng(seed).normal(size=(23, 6)).astype(np.float32)


@pytest.mark.parametrize("void", (1e3, np.nan))
@pytest.mark.parametrize("name", TARGETS)
def test_reset_row_moves_no_other_row(name, void):
    """Its reward and ratio touch nothing but itself; so does its value after a true end (not after a time limit)."""
    reward, terminated, done, value, log_rho = off_policy_rollout()
    reset_row = np.concatenate([np.zeros((1, 6), bool), done[:-1]])
    after_true_end = np.concatenate([np.zeros((1, 6), bool), terminated])
    before = TARGETS[name](reward, terminated, done, value, log_rho)
    after = TARGETS[name](
        np.where(reset_row, void, reward).astype(np.float32),
        terminated,
        done,
        np.where(after_true_end, void, value).astype(np.float32),
        np.where(reset_row, void, log_rho).astype(np.float32),
    )
    assert reset_row.any() and after_true_end.any()
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(np.asarray(x)[~reset_row], np.asarray(y)[~reset_row])
        assert (np.asarray(x) != np.asarray(y))[reset_row].any()


def test_time_limit_bootstraps_from_the_final_observation():
    """V of the final observation lies in the reset row: it moves the row before by gamma, and no row after it."""
    reward, terminated, done, value = rollout(T=4, B=1, end_rate=0.0)
    done[1] = True
    moved = value.copy()
    moved[2] += 1.0
    before, _ = gae(reward, terminated, done, value, gamma=0.9, gae_lambda=0.5)
    after, _ = gae(reward, terminated, done, moved, gamma=0.9, gae_lambda=0.5)
    # row 1: gamma;  row 0: gamma*lambda*gamma = .9*.5*.9;  row 2, the reset row: -1;  row 3: 0
    np.testing.assert_allclose((after - before)[:, 0], [0.405, 0.9, -1.0, 0.0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TARGETS)
def test_no_gradient_flows_into_targets(name):
    reward, terminated, done, value, log_rho = off_policy_rollout()

    def total(floats):
        reward, value, log_rho = floats
        return sum(x.sum() for x in jax.tree.leaves(TARGETS[name](reward, terminated, done, value, log_rho)))

    for gradient in jax.grad(total)((reward, value, log_rho)):
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


def test_no_gradient_flows_into_hyperparameters():
    reward, terminated, done, value, _ = off_policy_rollout()
    assert (
        jax.jit(jax.grad(lambda gamma: gae(reward, terminated, done, value, gamma=gamma, gae_lambda=0.5)[0].sum()))(0.9)
        == 0
    )


@pytest.mark.parametrize("name", TARGETS)
def test_float32_under_jit_and_vmap(name):
    """One rollout at a time equals all at once; narrow or wide inputs give float32."""
    batches = [off_policy_rollout(seed) for seed in range(3)]
    alone = jax.jit(TARGETS[name])
    together = jax.jit(jax.vmap(TARGETS[name]))(*map(np.stack, zip(*batches, strict=True)))
    for i, batch in enumerate(batches):
        for one, all_ in zip(jax.tree.leaves(alone(*batch)), jax.tree.leaves(together), strict=True):
            assert one.dtype == all_.dtype == jnp.float32
            np.testing.assert_allclose(one, all_[i], rtol=1e-5, atol=1e-5)
    reward, terminated, done, value, log_rho = batches[0]
    narrow = TARGETS[name](reward.astype(np.float64), terminated, done, jnp.bfloat16(value), log_rho)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(narrow))


@pytest.mark.parametrize(("name", "wrong"), [*itertools.product(TARGETS, range(4)), ("vtrace", 4)])
def test_wrong_shape_raises(name, wrong):
    args = list(off_policy_rollout())
    args[wrong] = args[wrong][:, :1]  # would broadcast
    with pytest.raises(ValueError, match=r"\(2[34], 1\)"):
        jax.eval_shape(TARGETS[name], *args)


def test_wrong_shape_is_named():
    reward, terminated, done, value = rollout()
    with pytest.raises(ValueError, match=r"reward is \(23, 6\): value must be \(24, 6\), got \(23, 6\)"):
        gae(reward, terminated, done, value[:-1], gamma=0.9, gae_lambda=0.9)
    with pytest.raises(ValueError, match=r"reward must be \[T, B\], got shape \(23,\)"):
        gae(reward[:, 0], terminated[:, 0], done[:, 0], value[:, 0], gamma=0.9, gae_lambda=0.9)


# ---------------------------------------------------------------- returns that continue over episode ends


@pytest.mark.parametrize("lambda_", (0.0, 0.95, 1.0))
def test_a_continuing_return_is_that_of_the_rows_without_the_masked_ones(lambda_):
    """Several masked rows may follow each other, as of an agent that is absent."""
    reward, _, done, value = rollout(seed=4)
    mask = np.ones(done.shape, bool)
    mask[1:] &= ~done[:-1]
    mask[5:9, 2] = mask[:2, 3] = mask[-3:, 4] = False
    dirty = [np.where(mask, x, np.nan) for x in (reward, value[:-1])]
    found = jax.jit(returns.continuing_gae)(
        dirty[0], mask, np.concatenate([dirty[1], value[-1:]]), gamma=0.9, gae_lambda=lambda_
    )
    for b in range(reward.shape[1]):
        rows = np.flatnonzero(mask[:, b])
        no = np.zeros((len(rows), 1), bool)
        values = np.append(value[rows, b], value[-1, b])[:, None]
        target = lambda_return_by_loop(reward[rows, b][:, None], no, no, values, 0.9, lambda_)
        np.testing.assert_allclose(found[1][rows, b], target[:, 0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[0][rows, b], target[:, 0] - values[:-1, 0], rtol=1e-4, atol=1e-5)


def test_running_returns_are_those_of_a_loop():
    reward, _, done, _ = rollout(seed=5)
    mask = np.concatenate([np.ones((1, 6), bool), ~done[:-1]])
    found, x = jax.jit(returns.running_returns)(np.where(mask, reward, np.nan), mask, 2.0, gamma=0.9), np.full(6, 2.0)
    for t in range(len(reward)):
        x = np.where(mask[t], 0.9 * x + reward[t], x)
        np.testing.assert_allclose(found[t], x, rtol=1e-5)
