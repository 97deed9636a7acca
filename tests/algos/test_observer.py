"""What networks read of observations: statistics leaf by leaf, the user's transform, masks left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import registry
from jrl.algos import observer
from jrl.networks import NetworkConfig
from jrl.types import Box, Dict, Discrete, EnvSpec, InputError, MultiBinary, Tuple, Window

SPACE = Dict(
    (
        ("speed", Box((2,))),
        ("camera", Box((6, 6, 3), "uint8", 0, 255)),
        ("place", Discrete(3)),
        ("more", Tuple((Box(()), Box((3,), "int32", 0, 9)))),
        ("action_mask", MultiBinary((4,))),
    )
)


def rows(key, shape):
    keys = jax.random.split(key, 5)
    return {
        "speed": 3.0 + 2.0 * jax.random.normal(keys[0], (*shape, 2)),
        "camera": jax.random.randint(keys[1], (*shape, 6, 6, 3), 0, 255).astype(jnp.uint8),
        "place": jax.random.randint(keys[2], shape, 0, 3),
        "more": (jax.random.normal(keys[3], shape), jax.random.randint(keys[4], (*shape, 3), 0, 9)),
        "action_mask": jnp.ones((*shape, 4), jnp.int8),
    }


def make(space=SPACE, **options):
    network = NetworkConfig(transform=options.pop("transform", None))
    return observer.make(
        EnvSpec(space, Discrete(4), 1), network, normalize_obs=options.get("normalize_obs", True), axis_name=None
    )


def test_arrays_of_floats_and_integers_of_a_box_each_by_their_own_statistics():
    watch, obs = make(), rows(jax.random.key(0), (50, 4))
    mask = jnp.arange(50)[:, None] + jnp.zeros((1, 4)) < 40  # the last rows do not count
    obs["speed"] = jnp.where(mask[..., None], obs["speed"], 1e6)
    stats = watch.observe(watch.init(), obs, mask)
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
    obs = rows(jax.random.key(1), (8, 6))
    alone = make()
    spec = EnvSpec(SPACE, Discrete(4), 1)
    shared = observer.make(spec, NetworkConfig(), normalize_obs=True, axis_name="d")
    mask = jnp.ones((8, 6), bool)
    split = jax.tree.map(lambda x: jnp.stack(jnp.split(x, 3, axis=1)), (obs, mask))
    stats = jax.vmap(lambda part: shared.observe(shared.init(), *part), axis_name="d")(split)
    for mine, theirs in zip(
        jax.tree.leaves(alone.observe(alone.init(), obs, mask)), jax.tree.leaves(stats), strict=True
    ):
        np.testing.assert_allclose(mine, theirs[2], rtol=1e-5)


def test_nothing_to_do():
    watch = make(normalize_obs=False)
    obs = rows(jax.random.key(0), (3,))
    assert watch.init() == () and watch.see((), obs) is obs and watch.observe((), obs, jnp.ones(3, bool)) == ()
    images = make(Box((6, 6, 3), "uint8", 0, 255))
    assert images.init() == ()


def double(obs):
    """Of one observation: arrays have no batch axis here."""
    assert obs["speed"].shape == (2,)
    return {"fast": obs["speed"] * 2.0, "at": [jax.nn.one_hot(obs["place"], 3)]}


def test_transform_comes_first():
    registry.register("double", double)
    watch, obs = make(transform="double"), rows(jax.random.key(2), (20, 2))
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
