"""What networks read of observations: statistics leaf by leaf, the user's transform, masks left alone."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import some_quick

from jrl import registry
from jrl.algos import observer
from jrl.networks import NetworkConfig
from jrl.ops import normalize
from jrl.types import (
    NORMALIZED_OBS,
    Box,
    Dict,
    Discrete,
    EnvSpec,
    InputError,
    MultiBinary,
    Tuple,
    Window,
    drop_stale_normalized_obs,
)

SPACE = Dict(
    (
        ("speed", Box((2,))),
        ("camera", Box((6, 6, 3), "uint8", 0, 255)),
        ("place", Discrete(3)),
        ("more", Tuple((Box(()), Box((3,), "int32", 0, 9)))),
        ("action_mask", MultiBinary((4,))),
    )
)


def rows(seed, shape):
    rng = np.random.default_rng(seed)
    return {
        "speed": (3.0 + 2.0 * rng.normal(size=(*shape, 2))).astype(np.float32),
        "camera": rng.integers(0, 255, (*shape, 6, 6, 3)).astype(np.uint8),
        "place": rng.integers(0, 3, shape).astype(np.int32),
        "more": (rng.normal(size=shape).astype(np.float32), rng.integers(0, 9, (*shape, 3)).astype(np.int32)),
        "action_mask": np.ones((*shape, 4), np.int8),
    }


def make(space=SPACE, **options):
    network = NetworkConfig(transform=options.pop("transform", None))
    return observer.make(
        EnvSpec(space, Discrete(4), 1), network, normalize_obs=options.get("normalize_obs", True), axis_name=None
    )


def test_arrays_of_floats_and_integers_of_a_box_each_by_their_own_statistics():
    watch, obs = make(), rows(0, (50, 4))
    mask = np.arange(50)[:, None] + np.zeros((1, 4)) < 40  # the last rows do not count
    obs["speed"] = np.where(mask[..., None], obs["speed"], np.float32(1e6))
    stats = jax.jit(watch.observe)(watch.init(), obs, mask)
    seen = watch.see(stats, obs)
    for read in (lambda o: o["speed"], lambda o: o["more"][0], lambda o: o["more"][1]):
        counted = np.asarray(read(obs), np.float64)[:40].reshape(160, -1)
        expected = (counted - counted.mean(0)) / counted.std(0)
        np.testing.assert_allclose(np.asarray(read(seen))[:40].reshape(160, -1), expected, atol=1e-4)
    for name in ("camera", "place", "action_mask"):
        assert seen[name] is obs[name]
    assert watch.mask(seen).shape == (50, 4, 4) and watch.mask(seen).all()
    assert watch.mask(Window(seen, (), mask)).dtype == bool


def test_shares_of_devices_make_the_same_statistics():
    obs = rows(1, (8, 6))
    alone = make()
    spec = EnvSpec(SPACE, Discrete(4), 1)
    shared = observer.make(spec, NetworkConfig(), normalize_obs=True, axis_name="d")
    mask = np.ones((8, 6), bool)
    split = jax.tree.map(lambda x: np.stack(np.split(x, 3, axis=1)), (obs, mask))
    stats = jax.jit(jax.vmap(lambda part: shared.observe(shared.init(), *part), axis_name="d"))(split)
    whole = jax.jit(alone.observe)(alone.init(), obs, mask)
    for mine, theirs in zip(*map(jax.tree.leaves, (whole, stats)), strict=True):
        np.testing.assert_allclose(mine, np.asarray(theirs)[2], rtol=1e-5)


def test_nothing_to_do():
    watch = make(normalize_obs=False)
    obs = rows(0, (3,))
    assert watch.init() == () and watch.see((), obs) is obs and watch.observe((), obs, jnp.ones(3, bool)) == ()
    images = make(Box((6, 6, 3), "uint8", 0, 255))
    assert images.init() == ()


def double(obs):
    """Of one observation: arrays have no batch axis here."""
    assert obs["speed"].shape == (2,)
    return {"fast": obs["speed"] * 2.0, "at": [jax.nn.one_hot(obs["place"], 3)]}


def test_transform_comes_first():
    registry.register("double", double)
    watch, obs = make(transform="double"), rows(2, (20, 2))
    assert watch.spec.observation["obs"] == Dict((("at", Tuple((Box((3,)),))), ("fast", Box((2,)))))
    stats = watch.observe(watch.init(), obs, jnp.ones((20, 2), bool))
    seen = watch.see(stats, obs)
    doubled = 2.0 * np.asarray(obs["speed"])
    expected = (doubled - doubled.mean((0, 1))) / doubled.std((0, 1))
    np.testing.assert_allclose(seen["obs"]["fast"], expected, atol=1e-4)
    assert isinstance(seen["obs"]["at"], tuple) and seen["action_mask"] is obs["action_mask"]


@pytest.mark.parametrize(
    ("function", "message"),
    [(lambda obs: obs + 1, "cannot be traced"), (lambda obs: {1: obs["speed"]}, "expected an array")],
)
def test_transforms_that_cannot_be(function, message):
    registry.register("wrong", function)
    with pytest.raises(InputError, match=rf"network\.transform wrong: .*{message}"):
        make(transform="wrong")


STILL = {"normalize_obs": True, "lr": 0.0}  # nothing moves but the statistics
WEIGHTS = {"ppo": ("policy/clip_fraction", 0), "appo": ("policy/rho", 1), "impala": ("policy/rho", 1)}


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
def test_statistics_alone_change_no_importance_weight(name):
    """Rollouts by actors of up to two updates before, whose statistics were others: what they saw is learned from."""
    algo, spec = fakes.make(name, **STILL), fakes.spec(name=name)
    state, update = fakes.perturbed(fakes.made_up_state(algo)), jax.jit(fakes.learn(algo))
    state = state.replace(**({"target_params": jax.tree.map(jnp.copy, state.params)} if name == "appo" else {}))
    metric, want = WEIGHTS[name]
    actors, stats = [algo.actor(state)], []
    for i in range(5):
        rollout = fakes.rollout(algo, spec, actors[max(0, i - 2)], seed=i)
        state, aux = update(state, rollout, jax.random.key(1))
        actors.append(algo.actor(state))
        stats.append(np.asarray(state.obs_stats.mean))
        if i > 2:  # its actor had statistics
            np.testing.assert_allclose(aux.metrics["policy/approx_kl"], 0.0, atol=1e-6)
            np.testing.assert_allclose(aux.metrics[metric], want, atol=1e-6)
    assert np.abs(stats[-1] - stats[0]).max() > 0.1
    # observations that somebody has changed since are normalised anew
    changed = drop_stale_normalized_obs(rollout, rollout.replace(obs=rollout.obs + 1.0))
    metrics = update(state, changed, jax.random.key(1))[1].metrics
    assert metrics["policy/approx_kl"] > 1e-4 or abs(metrics[metric] - want) > 1e-4
    assert drop_stale_normalized_obs(rollout, rollout.replace(reward=-rollout.reward)).extras is rollout.extras


@pytest.mark.parametrize(
    ("name", "shared"),
    some_quick([("ppo", True), ("ppo", False), ("a2c", False), ("impala", False), ("pqn", False)], ("ppo", False)),
)
def test_the_first_rollout_is_read_by_its_own_statistics(name, shared):
    """As one whose statistics were there before; what acting has recorded of raw observations is computed anew."""
    network = dataclasses.replace(fakes.NETWORK, shared=shared)
    algo, spec = fakes.make(name, network=network, normalize_obs=True), fakes.spec(name=name)
    state, update = fakes.perturbed(fakes.made_up_state(algo)), jax.jit(algo.update)
    rollout = fakes.rollout(algo, spec, algo.actor(state))
    far = rollout.replace(obs=100.0 + 10.0 * rollout.obs, last_obs=100.0 + 10.0 * rollout.last_obs)
    got, aux = update(state, far, jax.random.key(1))
    known = state.replace(obs_stats=got.obs_stats)
    extras = {
        **far.extras,
        NORMALIZED_OBS: {"obs": normalize.normalize(got.obs_stats, far.obs), "valid": jnp.ones((8, 8), bool)},
    }
    if "value" in extras:
        net = jax.jit(algo.outputs)
        found = [jax.device_get(net(known, x)) for x in np.asarray(far.obs)]
        extras["value"] = np.stack([x["q"].max(-1) if name == "pqn" else x["value"] for x in found])
    want, want_aux = update(known, far.replace(extras=extras), jax.random.key(1))
    fakes.assert_close(got.params, want.params, atol=1e-5)
    for metric, x in want_aux.metrics.items():
        np.testing.assert_allclose(aux.metrics[metric], x, rtol=1e-3, atol=1e-5, err_msg=metric)
    as_it_is = normalize.init((4,)).replace(count=jnp.float32(1), m2=jnp.ones(4))
    raw, _ = update(state.replace(obs_stats=as_it_is), far, jax.random.key(1))
    assert fakes.differ(raw.params, got.params)
