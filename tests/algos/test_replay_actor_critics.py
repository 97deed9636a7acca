"""What SAC and TD3 have in common: how they begin, whose step size is whose, and that they learn a bandit."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_sac
import test_td3
from fakes import assert_same, differ

from jrl.algos import sac, td3
from jrl.algos.exploration import Gaussian, Stochastic
from jrl.networks import NetworkConfig
from jrl.types import Box, EnvSpec

KEY = jax.random.key(2)
# their settings, and the step size of each part
OF = {"sac": test_sac, "td3": test_td3}
RATES = {
    "sac": {"critic": "lr", "actor": "actor_lr", "log_ent_coef": "ent_coef_lr"},
    "td3": {"critic": "lr", "actor": "actor_lr"},
}
both = pytest.mark.parametrize("name", OF)


@pytest.mark.parametrize(
    ("name", "exploration"), [("sac", Stochastic(random_timesteps=50)), ("td3", Gaussian(random_timesteps=50))]
)
def test_random_actions_at_the_start(name, exploration):
    """They count environment steps, not gradient steps, and do not look at the observation."""
    algo, state, batch = OF[name].setting(dataclasses.replace(OF[name].BASE, exploration=exploration))
    act = jax.jit(lambda state, obs: algo.act(algo.actor(state), obs, algo.carry(len(obs)), KEY).action)
    ingest = jax.jit(algo.ingest)
    assert_same(act(state, batch.obs), act(state, 2 * batch.obs))
    rollout = fakes.rollout(algo, fakes.spec(test_sac.BOX), algo.actor(state))
    steps = int(rollout.mask.sum())
    assert 0 < steps < 50 < 2 * steps
    for _ in range(2):
        state = ingest(state, rollout)
    assert int(state.env_steps) == 2 * steps
    assert differ(act(state, batch.obs), act(state, 2 * batch.obs))


@both
def test_step_sizes_are_schedules_and_separate(name):
    of, rates = OF[name], RATES[name]
    _, state, batch = of.setting()
    moved = lambda cfg, state: {
        part for part in rates if differ(of.update(cfg, state, batch)[0].params[part], state.params[part])
    }
    later = dict.fromkeys(rates.values(), ((0, 0.0), (10, 0.0), (10, 0.1), (20, 0.1)))
    for part, field in rates.items():
        cfg = dataclasses.replace(of.BASE, **{**later, field: ((0, 0.1), (20, 0.1))})
        assert moved(cfg, state) == {part}
        assert moved(cfg, state.replace(env_steps=jnp.uint32(2**31))) == set(rates)
    # null: that of the critics
    others = [field for field in rates.values() if field != "lr"]
    same, spelt = (dataclasses.replace(of.BASE, **dict.fromkeys(others, lr)) for lr in (None, of.BASE.lr))
    assert_same(of.update(same, state, batch), of.update(spelt, state, batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "make", "steps"),
    [
        (sac.Config(lr=1e-2, ent_coef_lr=3e-2, ent_coef=0.1, target_entropy=-1.5), sac.make, 1500),
        (td3.Config(lr=1e-2, exploration=Gaussian(std=0.3)), td3.make, 600),
        (td3.Config(lr=1e-2, exploration=Gaussian(std=0.3), num_critics=1, policy_every=1), td3.make, 600),
    ],
    ids=["sac", "td3", "ddpg"],
)
def test_they_learn_a_bandit(cfg, make, steps):
    """Reward -(action - obs)^2, one step: the policy's mode comes to obs, SAC's entropy to its target."""
    algo = make(cfg, EnvSpec(Box((1,)), Box((1,), low=-1.0, high=1.0), 1), NetworkConfig(hidden=(32, 32)))

    @jax.jit
    def run(state):
        def step(state, key):
            obs = jax.random.uniform(key, (64, 1), minval=-0.7, maxval=0.7)
            action = algo.act(algo.actor(state), obs, (), key).action
            reward = -jnp.sum((action - obs) ** 2, -1)
            batch = fakes.Batch(obs, action, reward, jnp.zeros(64), obs, jnp.ones(64), jnp.arange(64))
            state, aux = algo.update(state, batch, jax.random.fold_in(key, 1))
            return state, aux.metrics

        return jax.lax.scan(step, state, jax.random.split(KEY, steps))

    state, metrics = run(fakes.made_up_state(algo))
    obs = jnp.array([[-0.5], [0.0], [0.5]])
    act = jax.jit(algo.act, static_argnames="explore")
    np.testing.assert_allclose(act(algo.actor(state), obs, (), KEY, explore=False).action, obs, atol=0.1)
    if "policy/entropy" in metrics:
        np.testing.assert_allclose(metrics["policy/entropy"][-300:].mean(), cfg.target_entropy, atol=0.1)
