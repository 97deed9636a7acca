"""Every format, for every algorithm: jrl's own actions, in a process that cannot import jrl."""

import importlib.util
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from export_helpers import CONTINUOUS, NORMAL, OWN, VECTOR, load, run_bare, trained
from saved import save

import jrl
from jrl import algos
from jrl.export import formats, policy_function
from jrl.fields.data import RETURN_TO_GO, traits
from jrl.types import Box, Discrete, EnvSpec, MultiDiscrete

NUM = 1000
PIXELS = Box((4, 36, 40), "uint8", 0.0, 255.0)
COLOURS = Box((14, 16, 3), "uint8", 0.0, 255.0)
CELLS = Box((5, 6, 2), "int32", 0.0, (12.0, 4.0) * 30)

CASES = {
    "ppo": ("ppo", EnvSpec(VECTOR, Discrete(3), 1), ["algo.normalize_obs=true"]),
    "marwil_integers": (
        "marwil",
        EnvSpec(MultiDiscrete((2, 5)), MultiDiscrete((3, 4)), 1),
        ["network.shared=true", "network.norm=layer", "network.activation=elu"],
    ),
    "bc_continuous": (
        "bc",
        CONTINUOUS,
        ["algo.normalize_obs=true", "network.activation=silu", "network.state_dependent_std=true"],
    ),
    "ppo_nature": ("ppo", EnvSpec(PIXELS, Discrete(6), 1), []),
    "ppo_grid": ("ppo", EnvSpec(CELLS, Discrete(4), 1), ['network.encoders={"": grid}', "network.encoder_hidden=[8]"]),
    "a2c": ("a2c", CONTINUOUS, ["algo.normalize_obs=true", "network.torso=simba"]),
    "impala": ("impala", EnvSpec(VECTOR, Discrete(3), 1), []),
    "appo": ("appo", EnvSpec(VECTOR, MultiDiscrete((3, 4)), 1), []),
    "pqn": ("pqn", EnvSpec(Discrete(50), Discrete(4), 1), ["network.activation=gelu"]),
    "iqn": ("iqn", EnvSpec(Discrete(50), Discrete(50), 1), []),
    "dqn_rainbow": (
        "dqn",
        EnvSpec(VECTOR, Discrete(7), 1),
        ["algo.dueling=true", "algo.noisy=true", "algo.head=c51", "network.head_hidden=[8]"],
    ),
    "dqn_quantiles": ("dqn", EnvSpec(VECTOR, Discrete(5), 1), ["algo.head=qr", "network.activation=relu"]),
    "sac": ("sac", CONTINUOUS, []),
    "sac_simba_v2": ("sac", CONTINUOUS, ["network.torso=simba_v2", "network.hidden=[16, 16]"]),
    "sac_discrete": ("sac", EnvSpec(VECTOR, Discrete(3), 1), []),
    "td3_renorm": ("td3", CONTINUOUS, ["network.norm=batch_renorm", "network.dropout=0.1"]),
    # exploration with a state, which deterministic actions do not read
    "td3": ("td3", CONTINUOUS, ["algo.exploration.name=ornstein_uhlenbeck"]),
    "td3_impala": ("td3", EnvSpec(COLOURS, NORMAL, 1, None, OWN), ["network.torso=impala"]),
}
# other algorithms: small, with their own kind of actions
_NAMED = {algo for algo, *_ in CASES.values()}
_TEAMS = {name for name in algos.names() if algos.get_config_class(name).in_teams}  # need other environments
# return-conditioned algorithms have a memory
_TOLD = {name for name in algos.names() if RETURN_TO_GO in traits(algos.get_config_class(name)()).reads}
for _name in algos.names():
    if _name not in _NAMED | _TEAMS | _TOLD:
        _discrete = issubclass(Discrete, algos.get_config_class(_name).acts_in)
        CASES[_name] = (_name, EnvSpec(VECTOR, Discrete(50), 1) if _discrete else CONTINUOUS, [])
BLOCKED = {"npz": "jrl,jax,jaxlib,flax,ml_dtypes", "stablehlo": "jrl,flax,optax,orbax", "onnx": "jrl,jax,jaxlib,flax"}
BLOCKED["c"] = BLOCKED["npz"]
NOT_IN_C = ("ppo_nature", "td3_impala")  # convolutions


QUICK = ("ppo", "td3", "dqn_rainbow")  # one of each kind of actions and of networks in make test
each_case = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]


@pytest.fixture(scope="module")
def policies(tmp_path_factory, request):
    """Returns name -> (run directory, observations, jrl's actions, policy function) of the selected cases."""
    root, found = tmp_path_factory.mktemp("runs"), {}
    mine = [
        item.callspec.params for item in request.session.items if item.path == request.path and "callspec" in vars(item)
    ]
    wanted = {"ppo", "td3", *(params["name"] for params in mine if "name" in params)}
    for name, (algo, spec, overrides) in CASES.items():
        if name not in wanted:
            continue
        save(root / name, algo, spec, *overrides, change=trained)
        obs = observations(spec.observation)
        found[name] = root / name, obs, jrl.load(root / name).act(obs), policy_function.load_function(root / name)
    return found


def observations(space):
    rng = np.random.default_rng(1)
    obs = formats.draw_observations(rng, space, NUM)
    if space.dtype == "uint8":  # images that differ by more than noise
        obs = (obs * rng.random((NUM, *[n if n < 5 else 1 for n in space.shape]))).astype(np.uint8)
    return obs


@pytest.fixture(scope="module", params=["npz", "stablehlo", "onnx", pytest.param("c", marks=pytest.mark.slow)])
def exported(request, policies, tmp_path_factory):
    """Returns (format, directory of each export, with the actions of a process without jrl beside it)."""
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "c":
        if shutil.which("cc") is None:
            pytest.skip("no C compiler")
        policies = {name: policy for name, policy in policies.items() if name not in NOT_IN_C}
    for name, (_, obs, _, found) in policies.items():
        np.save(root / f"{name}.obs.npy", obs)
        if request.param != "onnx":
            result = formats.export(found, format=request.param, out=root / name)
            assert result["agreement"] == 1.0
    if request.param == "onnx":
        convert([(run, root / name) for name, (run, *_) in policies.items()])
    run_bare(BLOCKED[request.param], *(root / name for name in policies))
    return request.param, root


def convert(runs):
    """Exports to ONNX in another process: jax2onnx replaces functions of jax.numpy permanently."""
    for library in ("jax2onnx", "onnxruntime"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"the onnx extra is not installed: no {library}")
    code = f"""
from pathlib import Path
from jrl.export import formats, policy_function
for run, out in {[(str(run), str(out)) for run, out in runs]}:
    assert formats.export(policy_function.load_function(Path(run)), format="onnx", out=Path(out))["agreement"] == 1.0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_cases_cover_every_algorithm():
    assert {algo for algo, _, _ in CASES.values()} == set(algos.names()) - _TEAMS - _TOLD


@pytest.mark.parametrize("name", each_case)
def test_actions_are_those_of_jrl(exported, policies, name):
    format, root = exported
    if format == "c" and name in NOT_IN_C:
        pytest.skip("--format c has no convolutions")
    expected = policies[name][2]
    for batch in (32, 1):
        found = np.load(root / f"{name}.{batch}.npy")
        assert found.shape == expected.shape and found.dtype == expected.dtype
        assert len(np.unique(found, axis=0)) > 1  # the actions depend on the observation
        tolerance = 0.0 if found.dtype == np.int32 else 1e-5
        np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)


def test_policy_json_describes_the_export(exported):
    format, root = exported
    about = json.loads((root / "td3" / "policy.json").read_text())
    assert about["format"] == format and about["version"] == 2
    assert (about["algorithm"], about["env"], about["env_steps"]) == ("td3", "CartPole-v1", 77)
    assert about["observation"]["shape"] == [4]
    assert (about["action"]["low"], about["action"]["high"]) == ([-2.0, 0.0], [2.0, 1.0])
    assert sorted([*about["files"], "policy.json"]) == sorted(p.name for p in (root / "td3").iterdir() if p.is_file())


@pytest.mark.parametrize(
    ("name", "obs", "message"),
    [
        ("ppo", np.zeros(5, np.float32), r"expected float32 \(4,\) or \(N, \*\(4,\)\), got float32 \(5,\)"),
        ("ppo", np.zeros((2, 2, 4), np.float32), r"got float32 \(2, 2, 4\)"),
        ("ppo", np.float32(1.0), r"got float32 \(\)"),
        pytest.param(
            "ppo_nature",
            np.zeros((4, 36, 40), np.float32),
            r"expected uint8 .* got float32",
            marks=pytest.mark.slow,
        ),
        pytest.param("iqn", np.zeros((2, 1), np.int32), r"got int32 \(2, 1\)", marks=pytest.mark.slow),
    ],
)
def test_observations_of_another_kind_are_refused(exported, name, obs, message):
    if exported[0] == "c" and name in NOT_IN_C:
        pytest.skip("--format c has no convolutions")
    with pytest.raises(ValueError, match=message):
        load(exported[1] / name).act(obs)


def test_other_precisions_lists_and_odd_batches_are_accepted(exported, policies):
    pi, (_, obs, expected) = load(exported[1] / "ppo"), policies["ppo"][:3]
    np.testing.assert_array_equal(pi.act(obs[:7].astype(np.float64)), expected[:7])
    np.testing.assert_array_equal(pi.act(obs[:7].tolist()), expected[:7])
    assert pi.act(obs[3].tolist()) == expected[3]


@pytest.mark.slow
def test_bfloat16_networks(tmp_path):
    """numpy has no bfloat16: the interpreter computes in float32, from rounded parameters."""
    save(tmp_path / "run", "ppo", CONTINUOUS, "network.dtype=bfloat16", "network.norm=layer", change=trained)
    obs = formats.draw_observations(np.random.default_rng(1), VECTOR, NUM)
    for format in ("npz", "stablehlo"):
        formats.export(policy_function.load_function(tmp_path / "run"), format=format, out=tmp_path / format)
        np.testing.assert_allclose(load(tmp_path / format).act(obs), jrl.load(tmp_path / "run").act(obs), atol=0.02)
