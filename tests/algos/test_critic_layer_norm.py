"""Layer norm in what values and not in what acts."""

import dataclasses

import fakes
import jax
import numpy as np
import pytest
from cases import some_quick

from jrl.networks import Head, NetworkConfig, build
from jrl.networks.critics import build_critics
from jrl.types import Box, Discrete, EnvSpec, InputError

KEY = jax.random.key(0)
PLAIN = NetworkConfig(hidden=(8, 6), head_hidden=(5,))
NORMED = dataclasses.replace(PLAIN, critic_norm="layer")
BOX = Box((2,), low=-1.0, high=1.0)


def norms(tree):
    return {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree) if "norm" in str(path).lower()}


@pytest.mark.parametrize("action", some_quick([BOX, Discrete(3)], BOX), ids=str)
def test_critics_are_those_of_layer_norm(action):
    spec = EnvSpec(Box((4,)), action, 1)
    everywhere = build_critics(spec, dataclasses.replace(PLAIN, norm="layer"), 2)
    ours = build_critics(spec, NORMED, 2)
    params = jax.jit(ours.init)(KEY)
    assert norms(params)
    assert not norms(jax.eval_shape(build_critics(spec, PLAIN, 2).init, KEY))
    fakes.assert_same(params, jax.jit(everywhere.init)(KEY))
    rng = np.random.default_rng(0)
    args = rng.normal(size=(5, 4)).astype(np.float32), rng.uniform(-1, 1, (5, 2)).astype(np.float32)
    args = args if isinstance(action, Box) else args[:1]
    fakes.assert_same(jax.jit(ours.apply)(params, *args), jax.jit(everywhere.apply)(params, *args))


def test_of_two_heads_the_value_alone_has_it():
    """In its torso and in layers of its own; the policy's outputs are what they were."""
    heads = {"policy": Head(3, 0.01), "value": Head(1, privileged=True)}
    spec = EnvSpec(Box((4,)), Discrete(3), 1)
    plain, normed = (build(spec, cfg, heads) for cfg in (PLAIN, NORMED))
    params = jax.jit(normed.init)(KEY)
    found = norms(params)
    assert {path for path in found if "policy" in path} == set()
    assert any("value_torso" in path for path in found) and any("value_norm_0" in path for path in found)
    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    without = {name: part for name, part in params.items() if "norm" not in name}
    without["value_torso"] = {name: part for name, part in params["value_torso"].items() if "Norm" not in name}
    (policy, value), (same, other) = jax.jit(normed.apply)(params, obs), jax.jit(plain.apply)(without, obs)
    fakes.assert_same(policy, same)
    assert fakes.differ(value, other)


@pytest.mark.parametrize("action", [BOX, Discrete(3)], ids=str)
@pytest.mark.parametrize("name", ["ppo", "a2c", "impala", "sac", "td3", "iql", "marwil"])
def test_value_and_critics_have_widths_of_their_own(name, action):
    """As net_arch {pi: [7], vf: [11, 13]}: no layer of the policy is 11 or 13 wide, none of value and critics 7."""
    if name == "td3" and action != BOX:
        pytest.skip("td3 has continuous actions")
    cfg = dataclasses.replace(PLAIN, hidden=(7,), critic_hidden=(11, 13), head_hidden=())
    state = jax.eval_shape(fakes.make(name, fakes.spec(action), cfg).init, KEY)
    widths: dict[str, set[int]] = {"actor": set(), "critic": set()}
    params = state.params if isinstance(state.params, dict) else vars(state.params)
    for path, leaf in jax.tree.leaves_with_path(params):
        names = jax.tree_util.keystr(path)
        who = "critic" if "critic" in names or "value" in names else "actor"
        widths[who] |= set(leaf.shape)
    assert {7} <= widths["actor"] and not {11, 13} & widths["actor"]
    assert {11, 13} <= widths["critic"] and 7 not in widths["critic"]


@pytest.mark.parametrize(("name", "changes"), [("dqn", {}), ("ppo", {"shared": True})])
def test_where_no_critic_has_layers_of_its_own_it_is_refused(name, changes):
    with pytest.raises(InputError, match=r"network\.critic_norm: "):
        fakes.make(name, fakes.spec(Discrete(3)), dataclasses.replace(NORMED, **changes))
