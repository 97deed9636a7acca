"""Residual torsos and weights of norm 1, next to plain numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import InputError
from jrl.networks import Head, NetworkConfig, build
from jrl.networks.critics import build_critics
from jrl.types import Box, Dict, Discrete, EnvSpec

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
BOX = EnvSpec(Box((4,)), Box((2,), low=-1.0, high=1.0), 1)
SPEC = EnvSpec(Box((4,)), Discrete(3), 1)
TORSOS = ("simba", "simba_v2", "bro", "flash")
each = pytest.mark.parametrize("torso", TORSOS)


def network(torso, **options):
    return NetworkConfig(torso=torso, hidden=(8, 8), activation="relu", **options)


# ---------------------------------------------------------------- plain


def dense(params, x):
    kernel = params["kernel"] if "kernel" in params else params["unit_kernel"]
    return x @ kernel + params.get("bias", 0.0)


def layer_norm(params, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * params["scale"] + params["bias"]


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


relu = lambda x: np.maximum(x, 0.0)


def simba(p, x):
    x = dense(p["Dense_0"], x)
    for i in range(2):
        y = dense(p[f"Dense_{2 * i + 1}"], layer_norm(p[f"LayerNorm_{i}"], x))
        x = x + dense(p[f"Dense_{2 * i + 2}"], relu(y))
    return layer_norm(p["LayerNorm_2"], x)


def bro(p, x):
    x = relu(layer_norm(p["LayerNorm_0"], dense(p["Dense_0"], x)))
    for i in (1, 3):
        y = relu(layer_norm(p[f"LayerNorm_{i}"], dense(p[f"Dense_{i}"], x)))
        x = x + layer_norm(p[f"LayerNorm_{i + 1}"], dense(p[f"Dense_{i + 1}"], y))
    return x


def simba_v2(p, x):
    """The factor of a scaler is its parameter times its start and divided by its first value, equal for all but a."""
    scale = lambda i: p[f"Scaler_{i}"]["scale"]
    x = unit(np.concatenate([x, np.full((len(x), 1), 3.0)], -1))
    x = unit(scale(0) * dense(p["Dense_0"], x))
    for i in (1, 3):
        y = relu(scale(i) * dense(p[f"Dense_{i}"], x)) + 1e-8
        y = unit(dense(p[f"Dense_{i + 1}"], y))
        x = unit(x + scale(i + 1) * (1 / 3) / (1 / np.sqrt(8)) * (y - x))
    return x


def flash(p, x):
    """With running statistics, as in acting."""

    def norm(i, x):
        q = p[f"BatchRenorm_{i}"]
        return (x - q["running_mean"]) / np.sqrt(q["running_var"] + 1e-3) * q["scale"] + q["bias"]

    x = dense(p["Dense_0"], norm(0, x))
    for i in (1, 3):
        y = dense(p[f"Dense_{i + 1}"], relu(norm(i, dense(p[f"Dense_{i}"], x))))
        x = x + relu(norm(i + 1, y))
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * p["RMSNorm_0"]["scale"]


def head(torso, p, x):
    if torso != "simba_v2":
        return dense(p, x)
    return dense(p["Dense_1"], p["Scaler_0"]["scale"] * dense(p["Dense_0"], x))


PLAIN = {"simba": simba, "simba_v2": simba_v2, "bro": bro, "flash": flash}


def changed(params):
    """Parameters of which none is 0 or 1, so that each matters."""
    changed = jax.tree.map(lambda x: np.float64(x) + RNG.normal(size=x.shape) * 0.3, params)
    positive = lambda path, x: np.abs(x) + 0.5 if "running_var" in jax.tree_util.keystr(path) else x
    return jax.tree.map_with_path(positive, changed)


@each
def test_policies_by_hand(torso):
    net = build(SPEC, network(torso), {"policy": Head(3), "value": Head(1, privileged=True)})
    params = changed(jax.jit(net.init)(KEY))
    obs = RNG.normal(size=(5, 4))
    got = jax.jit(net.apply)(jax.tree.map(jnp.float32, params), jnp.float32(obs))
    for name, found in zip(("policy", "value"), got, strict=True):
        want = head(torso, params[f"{name}_head"], PLAIN[torso](params[f"{name}_torso"], obs))
        np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-4)


@each
def test_critics_by_hand_for_one_and_several_actions(torso):
    critics = build_critics(BOX, network("auto", critic_torso=torso), 2)
    params = changed(jax.jit(critics.init)(KEY))
    obs, actions = RNG.normal(size=(5, 4)), RNG.normal(size=(5, 3, 2))
    obs32, actions32 = np.float32(obs), np.float32(actions)
    params32 = jax.tree.map(jnp.float32, params)
    each = jax.jit(critics.apply_each)(params32, obs32, actions32)
    one = jax.jit(critics.apply)(params32, obs32, actions32[:, 1])
    for c in range(2):
        own = jax.tree.map(lambda x, c=c: x[c], params)
        for k in range(3):
            rows = np.concatenate([obs, actions[:, k]], -1)
            want = head(torso, own["head"], PLAIN[torso](own["layers"], rows))[:, 0]
            np.testing.assert_allclose(each[c, :, k], want, rtol=1e-3, atol=1e-4)
            if k == 1:
                np.testing.assert_allclose(one[c], want, rtol=1e-3, atol=1e-4)


def test_first_weights():
    """Without `init` the blocks of SimBa have He's variance; SimbaV2 begins as the mean of its blocks."""
    net = build(SPEC, NetworkConfig(torso="simba", hidden=(64,), shared=True), {"q": Head(3)})
    torso = jax.jit(net.init)(KEY)["torso"]
    assert np.std(torso["Dense_1"]["kernel"]) == pytest.approx(np.sqrt(2 / 64), rel=0.05)
    assert np.std(torso["Dense_2"]["kernel"]) == pytest.approx(np.sqrt(2 / 256), rel=0.05)
    np.testing.assert_allclose(torso["Dense_0"]["kernel"] @ torso["Dense_0"]["kernel"].T, np.eye(4), atol=1e-5)
    net = build(SPEC, NetworkConfig(torso="simba_v2", hidden=(64, 64), shared=True), {"q": Head(3)})
    torso = jax.jit(net.init)(KEY)["torso"]
    gain = np.sqrt(2 / 64)
    starts = [gain, gain / 2, 1 / 8, gain / 2, 1 / 8]
    for i, start in enumerate(starts):
        np.testing.assert_allclose(torso[f"Scaler_{i}"]["scale"], start, rtol=1e-6)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"torso": "simba", "hidden": (8, 4)}, r"network\.hidden: expected one width.*got \[8, 4\]"),
        ({"torso": "bro", "hidden": ()}, r"network\.hidden: expected one width"),
        ({"torso": "simba", "hidden": (8,), "norm": "layer"}, r"network\.norm: expected none, as simba has its own"),
        ({"hidden": (8,), "critic_torso": "simba_v2", "dropout": 0.1}, r"network\.critic_dropout: expected 0"),
        ({"torso": "impala", "critic_torso": "simba"}, r"network\.critic_torso: expected network\.torso auto, mlp"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(InputError, match=message):
        build(SPEC, NetworkConfig(**options), {"policy": Head(3), "value": Head(1, privileged=True)})


def test_images():
    """One image has no vector for the blocks, unless `encoders` names its CNN."""
    image = EnvSpec(Box((14, 14, 3), "uint8", 0, 255), Discrete(3), 1)
    with pytest.raises(InputError, match="residual blocks need a vector before them, and the observation is one image"):
        build(image, network("simba"), {"q": Head(3)})
    encoded = dataclasses.replace(network("simba"), encoders={"": "small_cnn"})
    params = jax.eval_shape(build(image, encoded, {"q": Head(3)}).init, KEY)
    assert params["q_torso"]["Dense_0"]["kernel"].shape[1] == 8
    both = EnvSpec(Dict((("camera", image.observation), ("speed", Box((2,))))), Discrete(3), 1)
    params = jax.eval_shape(build(both, network("simba"), {"q": Head(3)}).init, KEY)
    assert params["q_torso"]["Dense_0"]["kernel"].shape[1] == 8
