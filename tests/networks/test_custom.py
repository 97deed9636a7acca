"""The user's own torsos: three kinds, the same numbers; every algorithm, memory, checkpoints; what does not fit."""

import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jrl
from jrl import config as configs
from jrl import networks, registry
from jrl.algos import sac
from jrl.api import PPOConfig
from jrl.errors import InputError
from jrl.fields.hyper import Gru
from jrl.networks import Head, NetworkConfig, critics, custom
from jrl.types import Batch, Box, Dict, Discrete, EnvSpec, MultiBinary, Window

SPACE = Dict((("n", Discrete(3)), ("image", Box((2, 2, 1), "uint8", 0, 255)), ("x", Box((4,)))))
SPEC = EnvSpec(SPACE, Discrete(2), 4)


def joined(obs):
    """[N, 3 + 4 + 4]"""
    image = obs["image"].reshape(-1, 4) / 255.0
    return jnp.concatenate([jax.nn.one_hot(obs["n"], 3), image, obs["x"]], -1)


def flat(obs):
    return joined(obs) if isinstance(obs, dict) else obs


class Linen(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, obs):
        return nn.tanh(nn.Dense(self.width)(flat(obs)))


class Nnx(nnx.Module):
    def __init__(self, space, *, width=8, rngs):
        size = 11 if isinstance(space, Dict) else space.shape[0]
        self.layers = nnx.List([nnx.Linear(size, width, rngs=rngs)])

    def __call__(self, obs):
        for layer in self.layers:
            obs = nnx.tanh(layer(flat(obs)))
        return obs


def pair(space, width=8):
    size = 11 if isinstance(space, Dict) else space.shape[0]

    def init(key):
        return [(jax.random.normal(key, (size, width)) / size**0.5, np.zeros(width, np.float32))]

    def apply(params, obs):
        (kernel, bias), *_ = params
        return jnp.tanh(flat(obs) @ kernel + bias[None])

    return init, apply


KINDS = {"linen": Linen, "nnx": Nnx, "pair": pair}


def quick(kind):
    """This kind in the quick set, the others beside it."""
    return [k if k == kind else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]


@pytest.fixture(autouse=True)
def _names_of_its_own(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


def config(found, **more):
    registry.register("mine", found)
    return NetworkConfig(torso="mine", **more)


def draw(batch):
    rng = np.random.default_rng(0)
    return {
        "n": rng.integers(0, 3, batch, np.int32),
        "image": rng.integers(0, 256, (*batch, 2, 2, 1), np.uint8),
        "x": rng.normal(size=(*batch, 4)).astype(np.float32),
    }


@pytest.mark.parametrize("kind", quick("linen"))
def test_features_by_hand(kind):
    cfg = config(KINDS[kind], torso_options={"width": 5}, shared=True)
    net = networks.build(SPEC, cfg, {"policy": Head(2), "value": Head(1)})
    params = jax.jit(net.init)(jax.random.key(0))
    assert set(params) == {"torso", "policy_head", "value_head"}
    bias, kernel = sorted(jax.tree.leaves(params["torso"]), key=np.ndim)
    assert (bias.shape, kernel.shape) == ((5,), (11, 5))
    assert type(kernel) is type(bias) is type(params["value_head"]["bias"])  # arrays, not boxes around them
    obs = draw((2, 3))
    features = np.tanh(np.asarray(joined(jax.tree.map(lambda x: x.reshape(6, *x.shape[2:]), obs))) @ kernel)
    head = params["value_head"]
    (value,) = jax.jit(net.apply, static_argnums=2)(params, obs, "value")
    expected = features @ head["kernel"] + np.asarray(head["bias"])[None]
    np.testing.assert_allclose(value.reshape(6, 1), expected, atol=1e-5)
    # one torso for each head otherwise, with numbers of its own
    network = networks.build(SPEC, config(KINDS[kind]), {"policy": Head(2), "value": Head(1)})
    apart = jax.jit(network.init)(jax.random.key(0))
    a, b = (max(jax.tree.leaves(apart[f"{n}_torso"]), key=np.ndim) for n in ("policy", "value"))
    assert a.shape == b.shape == (11, 8) and float(jnp.abs(a - b).min()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", quick("pair"))
def test_critics_each_have_their_own(kind):
    spec = SPEC._replace(action=Box((2,)))
    made = critics.build_critics(spec, config(KINDS[kind], hidden=(6,)), 2)
    params = jax.jit(made.init)(jax.random.key(0))
    kernel = max(jax.tree.leaves(params["torso"]), key=np.ndim)
    assert kernel.shape == (2, 11, 8) and float(jnp.abs(kernel[0] - kernel[1]).min()) > 0
    obs, action = draw((3,)), jnp.ones((3, 2))
    q = jax.jit(made.apply)(params, obs, action)
    assert q.shape == (2, 3)
    features = np.tanh(np.asarray(joined(obs)) @ kernel[1])
    layer, head = (jax.tree.map(lambda x: np.asarray(x[1]), params[n]) for n in ("layers", "head"))
    hidden = np.tanh(np.concatenate([features, action], -1) @ layer["Dense_0"]["kernel"])
    np.testing.assert_allclose(q[1], (hidden @ head["kernel"])[:, 0], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", quick("linen"))
def test_behind_it_stands_the_core(kind):
    net = networks.build(SPEC, config(KINDS[kind], core=Gru(size=3)), {"policy": Head(2)})
    params = jax.jit(net.init)(jax.random.key(0))
    obs, carry, steps = draw((2, 4)), net.carry(2), []
    step = jax.jit(net.step)
    for t in range(4):
        (y,), carry = step(params, jax.tree.map(lambda x, t=t: x[:, t], obs), carry)
        steps.append(y)
    window = Window(obs=obs, carry=net.carry(2), reset=jnp.zeros((2, 4), bool))
    (together,) = jax.jit(net.apply)(params, window)
    np.testing.assert_allclose(together, jnp.stack(steps, 1), atol=1e-5)
    gradient = jax.jit(jax.grad(lambda p: net.apply(p, window)[0].sum()))(params)
    assert all(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(gradient["policy_torso"]))


# ---------------------------------------------------------------- algorithms and checkpoints


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def ppo(kind, **more):
    made = PPOConfig().environment("CartPole-v1", backend="jax").env_runners(num_envs=4, rollout_fragment_length=8)
    made = made.training(num_epochs=1, num_minibatches=1, lr=0.1, model={"torso": KINDS[kind], **more})
    return made.learners(learners=[0, 1]).reporting(min_sample_timesteps_per_iteration=1).debugging(log=[])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ppo_on_two_devices_and_from_its_checkpoint(kind, tmp_path):
    with ppo(kind, core={"name": "gru", "size": 4}).build() as algo:
        before = algo.get_weights()["default_policy"]["params"]
        algo.train()
        trained = algo.get_weights()["default_policy"]["params"]
        jax.tree.map(
            lambda a, b: np.testing.assert_array_compare(np.not_equal, a, b),
            before["policy_torso"],
            trained["policy_torso"],
        )
        algo.save(str(tmp_path / "saved"))
    with ppo(kind, core={"name": "gru", "size": 4}).build() as other:
        other.restore(str(tmp_path / "saved"))
        same(other.get_weights()["default_policy"]["params"], trained)
    policy = jrl.load(tmp_path / "saved")
    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    net = networks.build(
        EnvSpec(Box((4,)), Discrete(2), 5), policy.config.network, {"policy": Head(2), "value": Head(1)}
    )
    (logits,), _ = net.step(trained, obs, net.carry(5), "policy")
    assert policy.act(obs).tolist() == logits.argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", quick("nnx"))
def test_an_update_of_sac_moves_every_torso(kind):
    algo = sac.make(
        sac.Config(lr=0.1), SPEC._replace(action=Box((2,), low=-1.0, high=1.0)), config(KINDS[kind], hidden=(8,))
    )
    state = jax.jit(algo.init)(jax.random.key(0))
    ones, obs = jnp.ones((3,)), draw((3,))
    batch = Batch(obs, jnp.zeros((3, 2)), ones, ones, obs, ones, jnp.arange(3))
    after, _ = jax.jit(algo.update)(state, batch, jax.random.key(1))
    torsos = lambda state: jax.tree.leaves([state.params["actor"]["policy_torso"], state.params["critic"]["torso"]])
    for old, new in zip(torsos(state), torsos(after), strict=True):
        assert float(jnp.abs(old - new).max()) > 0


# ---------------------------------------------------------------- what does not fit


class Statistics(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return nn.BatchNorm(use_running_average=False)(obs["x"])


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, obs):
        return nn.Dropout(0.5, deterministic=False)(obs["x"])


class NnxStatistics(nnx.Module):
    def __init__(self, space, *, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, obs):
        return self.norm(obs["x"])


class NnxDropped(nnx.Module):
    def __init__(self, space, *, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, obs):
        return self.drop(obs["x"])


class Neither:
    def __init__(self, space):
        pass


def with_apply(apply, params=()):
    return lambda space: (lambda key: params, apply)


BAD = {
    "statistics": (Statistics, {}, "batch_stats"),
    "dropout": (Dropped, {}, "random numbers"),
    "nnx statistics": (NnxStatistics, {}, "norm.mean \\(BatchStat\\)"),
    "nnx dropout": (NnxDropped, {}, "drop.rngs.key \\(RngKey\\)"),
    "no network": (Neither, {}, "expected a class of flax.linen.Module .* got a class"),
    "made already": (Linen(), {}, "got a Linen instance"),
    "misspelt": (Linen, {"widht": 3}, "network.torso_options: mine has no option widht: did you mean width"),
    "not ours to set": (Nnx, {"rngs": 3}, "has no option rngs: it takes width"),
    "missing": (lambda space, depth: None, {}, "missing a required argument: 'depth'"),
    "no pair": (lambda space: 3, {}, r"expected two functions \(init, apply\), got int: 3"),
    "no rows": (with_apply(lambda params, obs: obs["x"].sum(0)), {}, r"expected \[3, F\] .* got float32\[4\]"),
    "integers": (with_apply(lambda params, obs: obs["n"][:, None]), {}, r"got int32\[3, 1\]"),
    "two": (with_apply(lambda params, obs: (obs["x"], obs["x"])), {}, "expected one array .* got a tuple"),
    "integer parameter": (with_apply(lambda params, obs: obs["x"], {"step": 3}), {}, "of floats, got step int32"),
    "its own error": (with_apply(lambda params, obs: obs["y"]), {}, r"KeyError in line \d+ of .*test_custom.py: 'y'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_one_clear_error(name):
    found, options, message = BAD[name]
    cfg = config(found, torso_options=options)
    with pytest.raises(InputError, match=message) as e:
        custom.check(cfg, SPACE)
    (line,) = e.value.errors
    assert line.startswith(("network.torso mine: ", "network.torso_options: "))
    with pytest.raises(InputError, match=message):
        networks.build(SPEC, cfg, {"policy": Head(2)}).init(jax.random.key(0))


def test_encoders_are_not_for_it():
    with pytest.raises(InputError) as e:
        custom.check(config(Linen, encoders={"x": "mlp"}, flatten=True))
    assert [line.split(":")[0] for line in e.value.errors] == ["network.encoders", "network.flatten"]


def test_a_name_that_is_not_there():
    with pytest.raises(InputError, match=r"network\.torso jrl\.no_such:Net: jrl\.no_such cannot be imported"):
        networks.build(SPEC, NetworkConfig(torso="jrl.no_such:Net"), {"policy": Head(2)})


def test_a_torso_without_parameters_and_one_made_within_a_trace():
    space = MultiBinary((4,))
    cfg = config(lambda space: (lambda key: (), lambda params, obs: obs * jnp.ones(4)[None]))
    net = networks.build(EnvSpec(space, Discrete(2), 1), cfg, {"policy": Head(2)})
    init = jax.jit(net.init)  # the first to need the torso
    params = init(jax.random.key(0))
    assert set(params) == {"policy_head"}
    obs = np.array([[0, 1, 1, 0]], np.int8)
    assert net.apply(params, obs)[0].shape == (1, 2)  # what it made then is of no trace


def test_given_as_an_object_it_is_a_name_in_the_config():
    made = PPOConfig().training(model={"torso": Linen, "torso_options": {"width": 4}, "hidden": [8]})
    tree = made.to_dict()["network"]
    assert registry.load(tree["torso"], "network.torso") is Linen
    assert (tree["torso_options"], tree["hidden"]) == ({"width": 4}, [8])
    cfg = made.environment("CartPole-v1").to_run_config()
    assert configs.from_dict(configs.to_dict(cfg)) == cfg
    here = PPOConfig().update_from_dict({"network": {"torso": lambda space: None}}).to_dict()["network"]["torso"]
    assert here.startswith("local:") and registry.load(here, "network.torso")(SPACE) is None


# ---------------------------------------------------------------- the guide

DOCS = Path(__file__).parents[2] / "docs"


def test_the_snippets_of_the_guide(monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "networks.md").read_text(), re.S)
    module = types.ModuleType("my_project.nets")
    monkeypatch.setitem(sys.modules, "my_project.nets", module)
    for block in blocks:
        assert len([line for line in block.splitlines() if line]) <= 12
        exec(block, vars(module))
    camera = Dict((("image", Box((6, 6, 3), "uint8", 0, 255)), ("pose", Box((2,)))))
    sizes = {}
    for name, space in {"Camera": camera, "Wide": Box((4,)), "fourier": Box((4,))}.items():
        cfg = NetworkConfig(torso=f"my_project.nets:{name}", torso_options={"width": 5})
        net = networks.build(EnvSpec(space, Discrete(2), 1), cfg, {"policy": Head(2)})
        params = jax.eval_shape(net.init, jax.random.key(0))
        sizes[name] = (
            sum(x.size for x in jax.tree.leaves(params["policy_torso"])),
            params["policy_head"]["kernel"].shape[0],
        )
    image = 3 * 3 * 3 * 16 + 16 + (6 * 6 * 16 + 2) * 5 + 5
    assert sizes == {"Camera": (image, 5), "Wide": (4 * 5 + 5, 5), "fourier": (4 * 5, 10)}
    assert module.config.to_dict()["network"]["torso"] == "my_project.nets:Wide"
