"""Values that learn before the policy does: for a policy that was trained elsewhere."""

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick

from jrl.algos import appo, ppo, sac, td3
from jrl.errors import InputError
from jrl.networks import NetworkConfig
from jrl.types import Algo


def learned(algo: Algo, updates: int):
    """The States before and after each of so many updates on rollouts of the policy as it is."""
    state, update = fakes.made_up_state(algo), jax.jit(algo.update)
    found = [state]
    for i in range(updates):
        rollout = fakes.rollout(algo, fakes.spec(), algo.actor(state), seed=i)
        state, _ = update(state, rollout, jax.random.key(i))
        found.append(state)
    return found


def of_policy(state):
    """Parameters that the policy reads, and those that it does not."""
    named = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(state.params)}
    return ({k: x for k, x in named.items() if "value" not in k}, {k: x for k, x in named.items() if "value" in k})


@pytest.mark.parametrize("module", some_quick([ppo, appo], ppo))
def test_the_policy_begins_to_learn_after_the_value(module):
    cfg = module.Config(policy_after=2, num_epochs=2, num_minibatches=2, ent_coef=0.01, lr=1e-3)
    first, one, two, three = learned(module.make(cfg, fakes.spec(), NetworkConfig(hidden=(8,))), 3)
    (policy, value), (policy_1, value_1), (policy_2, _), (policy_3, value_3) = map(of_policy, (first, one, two, three))
    assert policy and value
    jax.tree.map(np.testing.assert_array_equal, (policy, policy), (policy_1, policy_2))
    assert all(np.any(value[k] != value_1[k]) for k in value)
    # no step of the first four, which Adam takes whole, is longer than the step size
    moved = max(float(jnp.abs(policy_3[k] - policy[k]).max()) for k in policy)
    assert 0 < moved <= 4 * 1e-3 * 1.01
    assert all(np.any(value_1[k] != value_3[k]) for k in value)


def test_a_shared_torso_is_refused():
    with pytest.raises(InputError, match="policy_after"):
        ppo.make(ppo.Config(policy_after=1), fakes.spec(), NetworkConfig(shared=True))


# ---------------------------------------------------------------- from replay


def replayed(module, updates, **options):
    """The States before and after each of so many updates on one batch."""
    algo = module.make(module.Config(**options), fakes.spec(fakes.BOX), NetworkConfig(hidden=(8,)))
    state = fakes.made_up_state(algo)
    slow = {"critic": jax.tree.map(lambda x: 0.5 * x, state.target_params["critic"])}  # which has a way to go
    state = state.replace(target_params={**state.target_params, **slow})
    batch, update, found = fakes.data(algo, fakes.spec(fakes.BOX), algo.actor(state)), jax.jit(algo.update), [state]
    for i in range(updates):
        found.append(update(found[-1], batch, jax.random.key(i))[0])
    return found


def kept(state):
    """What a policy that does not learn leaves: all parameters and optimizers but the critics'."""
    rest = lambda tree: {name: x for name, x in tree.items() if name != "critic"}
    return rest(state.params), rest(state.opt_state), rest(state.target_params)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "every"), [(sac, 1), (sac, 2), (td3, 1), (td3, 2)])
def test_the_policy_begins_to_learn_after_the_critics(module, every):
    first, one, two, three, four = replayed(module, 4, policy_after=2, policy_every=every)
    jax.tree.map(np.testing.assert_array_equal, kept(first), kept(one))
    jax.tree.map(np.testing.assert_array_equal, kept(first), kept(two))
    moved = lambda a, b: all(np.any(x != y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    assert moved(first.params["critic"], one.params["critic"]) and moved(one.params["critic"], two.params["critic"])
    assert moved(first.target_params["critic"], two.target_params["critic"])  # or they would learn what is not so
    before, after = (two, three) if every == 1 else (three, four)
    jax.tree.map(np.testing.assert_array_equal, kept(first), kept(before))
    assert moved(before.params["actor"], after.params["actor"])


def test_imitation_needs_updates_of_the_policy():
    (fault,) = sac.Config(policy_after=10, bc_updates=10).validate()
    assert "bc_updates 10 must be more than policy_after 10" in fault
    assert not sac.Config(policy_after=10, bc_updates=11).validate() and not sac.Config(policy_after=10).validate()
