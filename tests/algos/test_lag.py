"""IMPALA and APPO on rollouts of older policies: the exact answers of a chain, and probes under lag."""

import functools

import numpy as np
import probes
import pytest

# what their losses need beside it, how to clip nothing, and how near APPO, which bounds its steps, comes
CHAIN = {
    "impala": {"lr": 1e-2, "ent_coef": 0.5, "max_grad_norm": None},
    "appo": {"lr": 1e-2, "ent_coef": 0.5, "normalize_advantage": False, "target_update_every": 2},
}
UNCLIPPED = {"impala": {"clip_rho": 100.0, "clip_pg_rho": 100.0}}
UNCLIPPED["appo"] = {**UNCLIPPED["impala"], "clip_target_ratio": 100.0}
SOFTMAX = np.exp(probes.CHAIN_REWARD / 0.5) / np.exp(probes.CHAIN_REWARD / 0.5).sum(1, keepdims=True)
both = pytest.mark.parametrize("name", CHAIN)


@pytest.mark.slow
@both
def test_unclipped_the_policy_that_acts_does_not_matter(name):
    """Reward plus entropy is best with pi = softmax(reward / ent_coef), as no action has a say in the next state."""
    policy, value = probes.learn_chain(name, **CHAIN[name], **UNCLIPPED[name])
    np.testing.assert_allclose(policy, SOFTMAX, atol=1e-3)
    np.testing.assert_allclose(value, probes.chain_values(SOFTMAX), atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "clip_rho", "clip_c", "atol", "apart"),
    [("impala", 1.0, 1.0, 1e-3, 0.02), ("impala", 0.8, 0.5, 1e-3, 0.02), ("appo", 1.0, 1.0, 0.02, 0.05)],
)
def test_clipped_the_values_are_those_of_a_policy_between(name, clip_rho, clip_c, atol, apart):
    """Between the one that acts and the one that learns, whatever clip_c (arXiv:1802.01561, section 4.1)."""
    policy, value = probes.learn_chain(name, **CHAIN[name], clip_rho=clip_rho, clip_c=clip_c)
    want = probes.chain_values(probes.between(policy, clip_rho))
    assert np.abs(want - probes.chain_values(policy)).min() > apart  # which is another policy
    np.testing.assert_allclose(value, want, atol=atol)


@pytest.mark.slow
@both
def test_without_the_correction_values_and_policy_are_wrong(name):
    policy, value = probes.learn_chain(name, corrected=False, **CHAIN[name])
    assert np.abs(value - probes.chain_values(policy)).min() > 0.3
    assert np.abs(policy - SOFTMAX).max() > 0.1
    if name == "impala":
        np.testing.assert_allclose(value, probes.chain_values(probes.CHAIN_POLICY), atol=1e-3)  # of the one that acts


LAGS = range(probes.MAX_LAG + 1)


@functools.cache
def of_each_lag(name):
    """(value, act) by the lag of the actors."""
    options = {"target_update_every": 2} if name == "appo" else {}
    return probes.train_each(name, (probes.obs_and_action_dependent_reward(),) * len(LAGS), lag=LAGS, **options)


@pytest.mark.slow
@pytest.mark.parametrize("lag", LAGS)
@both
def test_known_answers_with_actors_of_older_updates(name, lag):
    value, act = of_each_lag(name)[lag]
    np.testing.assert_array_equal(act([-1.0, 1.0]), [0, 1])
    np.testing.assert_allclose(value([-1.0, 1.0]), [1.0, 1.0], atol=0.15)
