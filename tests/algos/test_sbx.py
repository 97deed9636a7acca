"""Losses of TQC and CrossQ beside those of SBX, with the same networks, weights and batch. Skipped without `sbx-rl`."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.algos import critics
from jrl.algos.critic_heads import Critic
from jrl.algos.optimizers import Sgd
from jrl.networks.critics import Atoms, build_critics

pytestmark = pytest.mark.slow
KEY = jax.random.key(7)
STEP = {"lr": 1.0, "optimizer": Sgd(), "learn_ent_coef": False, "ent_coef": 0.3}  # a step is the gradient


class Fixed:
    """The policy's distribution, whose sample is known."""

    def __init__(self, dist, noise):
        self.action, self.density = dist.from_noise(noise)

    def sample(self, seed):
        return self.action

    def log_prob(self, action):
        return self.density


def setting(network=fakes.NETWORK, **overrides):
    """(algo, state, batch of equal weights, the policy's distribution at next_obs)"""
    spec = fakes.spec(fakes.BOX, name="sac")
    algo = fakes.make("sac", spec, network, **STEP, **overrides)
    state = fakes.perturbed(fakes.made_up_state(algo))
    if state.target_params:
        moved = fakes.perturbed(state.replace(params=state.target_params), 0.5).params
        state = state.replace(target_params=moved)
    batch = fakes.batch(algo, spec, algo.actor(state), N=32)
    batch = batch.replace(weight=jnp.ones_like(batch.weight))
    noise = critics.noise(KEY, 32, (2, *fakes.BOX.shape), None)[:, 0]
    dist = Fixed(algo.outputs(state, batch.next_obs)["distribution"], noise)
    return spec, algo, state, batch, dist


def arguments(batch):
    """Arguments of SBX's critic step from observations on; `discount` is 0 at ends."""
    done = jnp.zeros_like(batch.discount)
    return batch.obs, batch.action, batch.next_obs, batch.reward, done, batch.discount, jax.random.PRNGKey(0)


def made(cls, apply, params, **more):
    """A state of SBX whose optimizer subtracts the gradient."""
    return cls.create(apply_fn=apply, params=params, tx=optax.sgd(1.0), **more)


def test_tqc():
    tqc = pytest.importorskip("sbx.tqc.tqc")
    cfg = Critic(kind="quantiles", atoms=5, dropped_atoms=1)
    spec, algo, state, batch, dist = setting(critic=cfg, actor_q="mean")
    critic = build_critics(spec, fakes.NETWORK, 1, Atoms(5, lambda x: x.mean(-1)))
    apply = lambda params, obs, action, rngs=None: critic.outputs(params, obs, action)[0]
    actor, ent_coef = (made(tqc.TrainState, f, {}) for f in (lambda *args: dist, lambda *args: STEP["ent_coef"]))
    one = lambda params, i: jax.tree.map(lambda x: x[i : i + 1], params["critic"])
    pairs = [(one(state.params, i), one(state.target_params, i)) for i in range(2)]
    theirs = [made(tqc.RLTrainState, apply, params, target_params=target) for params, target in pairs]
    with jax.numpy_rank_promotion("allow"):
        found, losses, _ = tqc.TQC.update_critic(8, actor, *theirs, ent_coef, *arguments(batch))
    after, aux = jax.jit(algo.update)(state, batch, KEY)
    np.testing.assert_allclose(aux.metrics["loss/value"], (losses[0] + losses[1]) / 2, rtol=1e-5)
    for i in range(2):
        fakes.assert_close(one(after.params, i), found[i].params, atol=1e-5)


def test_crossq():
    crossq = pytest.importorskip("sbx.crossq.crossq")
    network = dataclasses.replace(fakes.NETWORK, norm="batch_renorm", norm_after_activation=True, activation="relu")
    spec, algo, state, batch, dist = setting(network, target_networks=False)
    critic = build_critics(spec, network, 2)

    def apply(variables, obs, action, train, **more):
        q = critic.apply(variables["params"], obs, action, valid=jnp.ones(len(obs), bool))
        return q[..., None], {"batch_stats": {}}

    actor = made(crossq.BatchNormTrainState, lambda *args, train: dist, {}, batch_stats={})
    ent_coef = made(crossq.TrainState, lambda *args: STEP["ent_coef"], {})
    theirs = made(crossq.BatchNormTrainState, apply, state.params["critic"], batch_stats={})
    with jax.numpy_rank_promotion("allow"):
        found, (loss, _), _ = crossq.CrossQ.update_critic(actor, theirs, ent_coef, *arguments(batch))
    after, aux = jax.jit(algo.update)(state, batch, KEY)
    np.testing.assert_allclose(aux.metrics["loss/value"], loss / 2, rtol=1e-5)
    learned = lambda params: jax.tree.map_with_path(lambda p, x: () if "running" in str(p[-1]) else x, params)
    fakes.assert_close(learned(after.params["critic"]), learned(found.params), atol=1e-4)
