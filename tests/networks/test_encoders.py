"""Observations as trees: which encoder reads which array, what it makes of it, what the torso sees."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import networks, spaces
from jrl.envs.history import build_history
from jrl.networks import Head, NetworkConfig
from jrl.networks.encoders import choose, flattened, grid_values
from jrl.spaces_json import space_from_json, space_to_json
from jrl.types import Box, Dict, Discrete, EnvSpec, InputError, MultiBinary, MultiDiscrete, Tuple, element

SPACE = Dict(
    (
        ("place", Discrete(3)),
        ("camera", Box((6, 6, 1), "uint8", 0, 255)),
        ("pair", Tuple((Box((2,)), MultiDiscrete((2, 3))))),
        ("bits", MultiBinary((2,))),
    )
)
OBS = {
    "place": np.int32(2),
    "camera": np.full((6, 6, 1), 51, np.uint8),
    "pair": (np.array([0.5, -1.0], np.float32), np.array([1, 0], np.int32)),
    "bits": np.array([1, 0], np.int8),
}
HEADS = {"policy": Head(4), "value": Head(1)}


def build(cfg, space=SPACE):
    return networks.build(EnvSpec(space, Discrete(4), 1), cfg, HEADS)


def batch(shape):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *np.shape(x))), OBS)


ALIKE = [("cam_left", ("cam", "left")), ("a/b", ("a", "b")), ("a/b_c", ("a_b", "c"))]


@pytest.mark.parametrize(
    "names", [pytest.param(x, marks=[pytest.mark.slow] if x is not ALIKE[1] else []) for x in ALIKE]
)
def test_names_that_are_alike_have_encoders_of_their_own(names):
    one, (first, second) = names
    space = Dict(((one, Box((2,))), (first, Dict(((second, Box((3,))),)))))
    paths = [path for path, _ in spaces.leaves(space)]
    network = build(NetworkConfig(hidden=(5,), encoders=dict.fromkeys(paths, "mlp"), encoder_hidden=(7,)), space)
    params = jax.jit(network.init)(jax.random.key(0))
    found = params["policy_torso_encoders"].values()
    assert sorted(part["Dense_0"]["kernel"].shape for part in found) == [(2, 7), (3, 7)]


def test_flatten_is_the_preprocessor_of_old():
    x = flattened(SPACE, NetworkConfig(), batch((2,)))
    # bits, camera, pair, place: the order of names; integers one-hot
    expected = [1, 0, *[0.2] * 36, 0.5, -1, 0, 1, 1, 0, 0, 0, 0, 1]
    np.testing.assert_allclose(x, [expected] * 2, rtol=1e-6)
    network = build(NetworkConfig(hidden=(5,), flatten=True))
    params = jax.jit(network.init)(jax.random.key(0))
    assert params["policy_torso"]["Dense_0"]["kernel"].shape == (len(expected), 5)


def test_an_encoder_per_array():
    cfg = NetworkConfig(hidden=(5,), encoders={"place": "embedding", "pair/0": "mlp"}, encoder_hidden=(7,))
    assert choose(SPACE, cfg) == {
        "bits": "flat", "camera": "small_cnn", "pair/0": "mlp", "pair/1": "flat", "place": "embedding"
    }  # fmt: skip
    network = build(cfg)
    params = jax.jit(network.init)(jax.random.key(0))
    # bits 2, camera 128, pair 7 and 5, place 7
    assert params["policy_torso"]["Dense_0"]["kernel"].shape == (2 + 128 + 7 + 5 + 7, 5)
    assert params["policy_torso_encoders"]["encoder_place"]["table"].shape == (3, 7)
    logits, value = jax.device_get(jax.jit(network.apply)(params, batch((3, 2))))
    assert logits.shape == (3, 2, 4) and value.shape == (3, 2, 1)
    alone = jax.jit(lambda params, obs: network.apply(params, obs, "policy"))(params, batch((1,)))
    np.testing.assert_allclose(logits[1, 1], np.asarray(alone[0])[0], atol=1e-6)


@pytest.fixture(scope="module")
def applied():
    """A network of every array with its parameters, compiled once."""
    network = build(NetworkConfig(hidden=(8,)))
    return functools.partial(jax.jit(network.apply), jax.jit(network.init)(jax.random.key(0)))


@pytest.mark.parametrize("path", ["bits", "camera", "pair/0", "place"])
def test_every_array_is_read(path, applied):
    other = {**OBS, **({"pair": (OBS["pair"][0] + 1, OBS["pair"][1])} if path == "pair/0" else {})}
    if path == "bits":
        other["bits"] = 1 - OBS["bits"]
    elif path == "camera":
        other["camera"] = OBS["camera"] + np.uint8(100)
    elif path == "place":
        other["place"] = np.int32(0)
    mine, theirs = (applied(jax.tree.map(lambda x: np.asarray(x)[None], o))[0] for o in (OBS, other))
    assert np.abs(np.asarray(mine) - theirs).max() > 1e-4


@pytest.mark.slow
def test_image_max():
    grid = Box((7, 7, 3), "uint8", 0, 10)
    obs = np.full((1, 7, 7, 3), 5, np.uint8)
    network = build(NetworkConfig(image_max=10.0), grid)
    params = jax.jit(network.init)(jax.random.key(0))
    apply, half = (jax.jit(n.apply) for n in (network, build(NetworkConfig(image_max=20.0), grid)))
    found = np.asarray(apply(params, obs)[0])
    np.testing.assert_allclose(found, half(params, obs * np.uint8(2))[0], atol=1e-6)
    assert np.abs(found - half(params, obs)[0]).max() > 1e-6


def test_a_single_array_in_a_dict_is_that_array():
    inside, bare = (
        build(NetworkConfig(hidden=(5,)), Dict((("x", Box((3,))),))),
        build(NetworkConfig(hidden=(5,)), Box((3,))),
    )
    params = jax.jit(bare.init)(jax.random.key(0))
    assert jax.tree.structure(params) == jax.tree.structure(jax.eval_shape(inside.init, jax.random.key(0)))
    x = np.ones((2, 3), np.float32)
    found, want = jax.jit(lambda p: (inside.apply(p, {"x": x})[0], bare.apply(p, x)[0]))(params)
    np.testing.assert_array_equal(found, want)


def test_integers_that_are_images_are_numbers():
    board = Box((4, 4, 2), "int32", 0, 5)
    params = jax.eval_shape(build(NetworkConfig(hidden=(5,)), board).init, jax.random.key(0))
    assert params["policy_torso"]["Dense_0"]["kernel"].shape == (32, 5)


GRID = Box((7, 7, 2), "int32", 0, (12.0, 4.0) * 49)


def test_a_grid_is_embedded_by_channel():
    """Exchanging two ids and their rows of the table changes nothing: an id is a name, not a number."""
    network = build(NetworkConfig(hidden=(5,), encoders={"": "grid"}, encoder_hidden=(3,)), GRID)
    params = jax.device_get(jax.jit(network.init)(jax.random.key(0)))
    encoder = params["policy_torso_encoders"]["encoder_"]
    assert encoder["table"].shape == (13 + 5, 3) and encoder["Conv_0"]["kernel"].shape == (2, 2, 6, 16)
    assert params["policy_torso"]["Dense_0"]["kernel"].shape == (4 * 4 * 64, 5)
    obs = np.stack([np.random.default_rng(0).integers(0, n, (2, 7, 7)) for n in (13, 5)], -1).astype(np.int32)
    apply = jax.jit(lambda params, obs: network.apply(params, obs, "policy")[0])
    found = np.asarray(apply(params, obs))
    swapped, swap = obs.copy(), np.arange(13)
    swap[[2, 12]] = swap[[12, 2]]
    swapped[..., 0] = swap[obs[..., 0]]
    assert np.abs(found - np.asarray(apply(params, swapped))).max() > 1e-4
    encoder["table"] = encoder["table"][np.append(swap, range(13, 18))]
    np.testing.assert_allclose(np.asarray(apply(params, swapped)), found, atol=1e-6)
    # beyond its bounds an integer is the nearest inside, and not an id of the other channel
    beyond, last = (np.where([True, False], np.int32(x), obs) for x in (14, 12))
    np.testing.assert_array_equal(np.asarray(apply(params, beyond)), np.asarray(apply(params, last)))


@pytest.mark.parametrize(
    ("space", "values"),
    [
        (Box((5, 4), "int8", -1, 10), ((-1,), (12,))),  # one channel
        (Box((2, 5, 4), "uint8", 0, 255), ((0, 0), (256, 256))),  # channels first, as two frames of one channel
        (Box((4, 4, 2), "int32", (0.0, 3.0) * 16, (2.0, 4.0) * 16), ((0, 3), (3, 2))),
        (Box((4, 4, 6), "int32", 0, (2.0, 1.0) * 48), ((0,) * 6, (3, 2) * 3)),  # three frames of two channels
        (Box((6, 4, 4), "int32", 0, (2.0,) * 48 + (1.0,) * 48), ((0,) * 6, (3, 3, 3, 2, 2, 2))),
    ],
)
def test_tables_of_a_grid_have_a_row_for_each_value_of_a_channel(space, values):
    assert grid_values(space) == values
    assert choose(space, NetworkConfig(encoders={"": "grid"})) == {"": "grid"}


@pytest.mark.parametrize(
    ("frame", "num", "values"),
    [
        (Box((5, 7, 2), "int32", 0, (12.0, 4.0) * 35), 4, (13, 5) * 4),  # more channels than rows
        (Box((5, 4), "uint8", 0, 3), 8, (4,) * 8),  # more frames than rows
        (Box((4, 4, 6), "int32", 0, (2.0, 1.0) * 48), 2, (3, 2) * 6),  # more channels than rows in a frame
    ],
)
def test_stacked_grids_keep_their_channels(frame, num, values):
    """Also when the space is read from a checkpoint."""
    history = build_history(EnvSpec(frame, Discrete(2), 1), frame_stack=num)
    stacked = history.spec.observation
    assert grid_values(stacked) == ((0,) * len(values), values)
    assert space_from_json(json.loads(json.dumps(space_to_json(stacked)))) == stacked
    assert "channels" not in space_to_json(frame)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (Box((3, 7, 2), "int32", 0, 5), "4 x 4 cells or more, not (3, 7, 2): use mlp or flat"),
        (Box((7, 7, 2), "int32"), "bounds with at most 256 values, not inf: set the Box's low and high"),
        (Box((7, 7, 2), "int32", 0, 256), "bounds with at most 256 values, not 257"),
        (Box((7, 7, 2), "float32", 0, 5), "a Box of integers with 2 or 3 axes"),
    ],
)
def test_a_grid_that_cannot_be_embedded_is_refused(space, message):
    with pytest.raises(InputError) as e:
        choose(space, NetworkConfig(encoders={"": "grid"}))
    assert message in str(e.value)


def test_the_mask_is_not_read():
    space = Dict((("x", Box((3,))), ("action_mask", MultiBinary((4,)))))
    network = build(NetworkConfig(hidden=(5,)), space)
    params = jax.jit(network.init)(jax.random.key(0))
    assert params["policy_torso"]["Dense_0"]["kernel"].shape == (3, 5)
    obs = {"x": jnp.ones((1, 3)), "action_mask": jnp.ones((1, 4), jnp.int8)}
    other = {**obs, "action_mask": jnp.zeros((1, 4), jnp.int8)}
    apply = jax.jit(network.apply)
    np.testing.assert_array_equal(apply(params, obs)[0], apply(params, other)[0])


def test_elements_have_the_dtypes_of_the_space():
    assert jax.tree.map(lambda x: str(x.dtype), element(SPACE)) == {
        "place": "int32", "camera": "uint8", "pair": ("float32", "int32"), "bits": "int8"
    }  # fmt: skip
