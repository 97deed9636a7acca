"""PPO with mirror images, against a batch to which a plain loop has added them."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import assert_close

import examples.symmetry
from jrl import config
from jrl.algos import actor_critic, ppo
from jrl.algos import agent as agents
from jrl.algos.symmetry import Symmetry
from jrl.envs import classic
from jrl.errors import InputError
from jrl.fields.hyper import Gru
from jrl.networks import NetworkConfig
from jrl.types import Box, Discrete, EnvSpec

KEY = jax.random.key(4)
BOX = Box((2,), low=-1.0, high=1.0)
ONE_STEP = {"num_epochs": 1, "num_minibatches": 1, "max_grad_norm": None}


def turns(obs, action):
    """Two images of each row: the opposite, and the vectors backwards."""
    rows = lambda x: jnp.concatenate([-x, x[:, ::-1]])
    return rows(obs), rows(action)


def opposite(obs, action):
    return -obs, 2 - action


def short(obs, action):
    return obs[:, :2], action


def broken(obs, action):
    raise RuntimeError("no such thing")


def made(action=BOX, path="test_symmetry:turns", **options):
    symmetry = {name: options.pop(name) for name in ("augment", "mirror_loss") if name in options}
    spec = EnvSpec(fakes.VECTOR, action, fakes.COLUMNS)
    cfg = ppo.Config(symmetry=Symmetry(path=path, **symmetry), **{**ONE_STEP, **options})
    algo = ppo.make(cfg, spec, fakes.NETWORK)
    state = fakes.perturbed(fakes.made_up_state(algo))
    return cfg, spec, algo, state, fakes.rollouts(algo, spec, algo.actor(state))[1]


def test_images_join_the_batch_with_the_numbers_of_their_step():
    """They are images of what the environment shows, normalised after that."""
    cfg, spec, algo, state, rollout = made(normalize_obs=True, value_clip_eps=0.2, ent_coef=0.1)
    after, aux = jax.jit(algo.update)(state, rollout, KEY)

    plain = dataclasses.replace(cfg, symmetry=None)
    agent = actor_critic.make_agent(plain, spec, fakes.NETWORK)
    first = agents.with_first_stats(agent, state, rollout)
    rows = agents.cut(agent, ppo.targets(plain, agent, first, rollout)[0], ())
    obs, action = (np.asarray(x).reshape(-1, x.shape[-1]) for x in (rollout.obs, rollout.action))
    action = np.where(np.asarray(rows.weight)[:, None] > 0, action, 0.0)
    seen = lambda x: agent.observer.see(first.obs_stats, jnp.asarray(x))
    images = [(-obs, -action), (obs[:, ::-1], action[:, ::-1])]
    batch = [rows, *(rows.replace(obs=seen(o), action=jnp.asarray(a)) for o, a in images)]
    batch = jax.tree.map(lambda *x: jnp.concatenate(x), *batch)
    of = lambda params, rows: ppo.loss(plain, agent, params, rows, clip_eps=0.2, ent_coef=0.1, kl_coef=0.0)
    gradient, _ = jax.jit(jax.grad(of, has_aux=True))(state.params, batch)
    params, _ = agents.descend(plain, agent, cfg.lr, gradient, state.opt_state, state.params)
    assert_close(after.params, params, atol=1e-4)
    assert fakes.differ(
        after.params, jax.jit(ppo.make(plain, spec, fakes.NETWORK).update)(state, rollout, KEY)[0].params
    )
    own = of(state.params, rows)[1]
    assert_close({name: aux.metrics[name] for name in own}, own)


def test_the_mirror_loss_is_that_of_numpy():
    cfg, spec, algo, state, rollout = made(augment=False, mirror_loss=0.5)
    after, aux = jax.jit(algo.update)(state, rollout, KEY)
    mode = lambda obs: np.asarray(algo.outputs(state, jnp.asarray(obs))["distribution"].mode())
    mask = np.asarray(rollout.mask).reshape(-1)
    obs = np.asarray(rollout.obs).reshape(-1, 4)[mask]
    errors = [(mode(-obs) + mode(obs)) ** 2, (mode(obs[:, ::-1].copy()) - mode(obs)[:, ::-1]) ** 2]
    np.testing.assert_allclose(aux.metrics["loss/mirror"], np.mean(errors), rtol=1e-4)
    plain = ppo.make(dataclasses.replace(cfg, symmetry=None), spec, fakes.NETWORK)
    assert fakes.differ(after.params, jax.jit(plain.update)(state, rollout, KEY)[0].params)


@pytest.mark.slow
def test_discrete_actions_minibatches_and_chunks():
    """Minibatches and chunks split rows, each with its images: a chunk of two rows gives the whole's gradient."""
    whole, chunks = (
        jax.jit(algo.update)(state, rollout, KEY)[0].params
        for size in (None, 2)
        for _, _, algo, state, rollout in [
            made(Discrete(3), "test_symmetry:opposite", microbatch_size=size, num_minibatches=2, num_epochs=2)
        ]
    )
    assert_close(whole, chunks, atol=1e-4)


@pytest.mark.parametrize("name", ["cartpole", "pendulum"])
def test_a_step_of_the_mirror_image_is_the_mirror_image_of_the_step(name):
    """The functions of examples/symmetry.py are symmetries of the environments."""
    task, mirror = getattr(classic, name)(), getattr(examples.symmetry, name)
    rng = np.random.default_rng(0)
    state = tuple(rng.normal(size=(50,)).astype(np.float32) * 0.1 for _ in range(4 if name == "cartpole" else 2))
    action = rng.integers(0, 2, 50) if name == "cartpole" else rng.uniform(-1, 1, (50, 1)).astype(np.float32)
    image, image_action = mirror(task.observe(state), action)
    other = tuple(-x for x in state)
    np.testing.assert_allclose(task.observe(other), image, atol=1e-6)
    after, reward, done = task.step(state, action, None)
    other, same_reward, same_done = task.step(other, image_action, None)
    np.testing.assert_allclose(task.observe(other), mirror(task.observe(after), action)[0], atol=1e-5)
    np.testing.assert_allclose(reward, same_reward, rtol=1e-5)
    np.testing.assert_array_equal(done, same_done)


def test_symmetries_that_cannot_be_used():
    def refuse(message, action=BOX, **options):
        with pytest.raises(InputError, match=message):
            made(action, **options)

    refuse("algo.symmetry.mirror_loss: expected float Box actions", Discrete(3), mirror_loss=1.0)
    refuse("algo.symmetry.path .*broken: it cannot be traced .*RuntimeError: no such", path="test_symmetry:broken")
    refuse(r"expected mirror images \(obs, action\) of M N rows", path="test_symmetry:short")
    refuse("it takes .* and cannot be called as .obs, action.", path="test_symmetry:made_up")
    spec = EnvSpec(fakes.VECTOR, BOX, 4)
    with pytest.raises(InputError, match="the memory of mirror images is not known"):
        cfg = ppo.Config(symmetry=Symmetry(path="test_symmetry:turns"))
        ppo.make(cfg, spec, NetworkConfig(core=Gru(size=4)))


def made_up():
    pass


def test_a_config_has_the_section():
    given = ["algo.symmetry={path: 'test_symmetry:turns', mirror_loss: 0.1}"]
    cfg = config.load(None, given, algo="ppo", env="Pendulum-v1", stop=["env_steps=100"])
    assert cfg.algo.symmetry == Symmetry(path="test_symmetry:turns", mirror_loss=0.1)
    assert config.from_dict(config.to_dict(cfg)) == cfg
