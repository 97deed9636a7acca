"""--format c: policy.h compiles without a warning, and its actions are those of jrl."""

import re
import shutil
import subprocess

import numpy as np
import pytest
from export_helpers import CONTINUOUS, OWN, VECTOR, load, trained
from saved import save

import jrl
from jrl.errors import InputError
from jrl.export import __main__ as command
from jrl.export import formats, policy_function
from jrl.types import Box, Discrete, EnvSpec

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-O2"]
N, LENGTH = 50, 20

CASES = {
    "ppo": ("ppo", EnvSpec(VECTOR, Discrete(3), 1), []),
    "ppo_continuous": ("ppo", CONTINUOUS, ["algo.normalize_obs=true", "network.layer_norm=true"]),
    "sac": ("sac", CONTINUOUS, ["algo.normalize_obs=true", "network.hidden=[64, 64]"]),
    "dqn": ("dqn", EnvSpec(VECTOR, Discrete(5), 1), ["algo.dueling=true"]),
    "gru": ("ppo", CONTINUOUS, ["network.core={name: gru, size: 16}"]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("gru",) else [pytest.mark.slow]) for name in CASES]
)
def test_actions_are_those_of_jrl(tmp_path, name):
    algo, spec, overrides = CASES[name]
    save(tmp_path / "run", algo, spec, *overrides, change=trained)
    policy = policy_function.load_function(tmp_path / "run")
    assert formats.export(policy, format="c", out=tmp_path / "out")["agreement"] == 1.0
    ours, exported = jrl.load(tmp_path / "run"), load(tmp_path / "out")
    rng, actions = np.random.default_rng(3), []
    for t in range(LENGTH):
        obs = formats.draw_observations(rng, spec.observation, N)
        reset = (rng.random(N) < 0.2) | (t == 0)
        actions.append(ours.act(obs, reset=reset))
        found = exported.act(obs, reset=reset)
        scale = 0.0 if found.dtype == np.int32 else np.ptp(OWN.bounds())
        np.testing.assert_allclose(found, actions[-1], atol=1e-6 * scale, rtol=0)
    assert len(np.unique(actions)) > 1
    assert compile_example(tmp_path / "out", tmp_path / "example") == print_action(ours.act(np.zeros(4, np.float32)))


def compile_example(export, build):
    """Compiles the program in the header's comment; returns what it prints."""
    header = (export / "policy.h").read_text()
    example = re.search(r"#include <stdio.h>.*?\n \*   }\n", header, re.DOTALL)[0].replace("\n *   ", "\n")
    build.mkdir()
    (build / "main.c").write_text(example)
    command = ["cc", *STRICT, "-I", str(export), str(build / "main.c"), "-o", str(build / "main"), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return subprocess.run([str(build / "main")], capture_output=True, text=True).stdout


def print_action(action):
    return f"{np.ravel(action)[0]:g}\n"


def test_numbers_are_exact_and_nan_stays(tmp_path):
    """Each weight is read back bit by bit; an observation that is not finite is not hidden by a clip."""
    save(tmp_path / "run", "ppo", CONTINUOUS, "algo.normalize_obs=true", change=trained)
    policy = policy_function.load_function(tmp_path / "run")
    formats.export(policy, format="c", out=tmp_path / "out")
    numbers = re.findall(r"-?[\d.]+(?:e-?\d+)?(?=f)", (tmp_path / "out" / "policy.h").read_text())
    written = np.array(numbers, np.float32)
    kernels = [x for x in map(np.ravel, weights(jrl.load(tmp_path / "run"))) if x.size == 32]
    assert any(np.isin(x, written).all() for x in kernels)
    assert np.isnan(load(tmp_path / "out").act(np.array([0, np.nan, 0, 0], np.float32))).all()


def weights(actor):
    import jax

    return [np.asarray(x) for x in jax.tree.leaves(actor.weights)]


def test_a_missing_compiler_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert command.main([str(tmp_path / "run"), "--format", "c", "--out", str(tmp_path / "out")]) == 2
    assert "--format c needs a C compiler to check the header, got no-such-compiler" in capsys.readouterr().err


@pytest.mark.slow
def test_convolutions_are_refused(tmp_path):
    save(tmp_path / "run", "ppo", EnvSpec(Box((4, 36, 40), "uint8", 0.0, 255.0), Discrete(3), 1))
    policy = policy_function.load_function(tmp_path / "run")
    with pytest.raises(InputError, match=r"uses conv2d, and this format has .*: use --format onnx or npz"):
        formats.export(policy, format="c", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
