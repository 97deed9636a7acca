"""Policies that rsl_rl trains here act, value and continue identically as runs of jrl.

Skipped without rsl_rl and torch, which jrl does not need.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jrl
from jrl import config, train
from jrl.importer.__main__ import main
from jrl.run import build
from jrl.run.store import checkpoint, resume

pytest.importorskip("rsl_rl")
pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "scripts" / "make_rsl_rl_models.py"


@pytest.mark.parametrize(
    "options",
    [
        "--activation elu",
        "--activation crelu --std log",
        "--activation relu --plain",
        "--activation tanh --std log --plain",
        "--activation swish",
        "--activation elu --critic-size 5",
    ],
)
def test_a_policy_of_rsl_rl(options, tmp_path, capsys):
    command = [sys.executable, str(SCRIPT), str(tmp_path), *options.split()]
    subprocess.run(command, check=True, capture_output=True, env={"PYTHONPATH": ":".join(sys.path)})
    out = tmp_path / "run"
    common = ["--set", "env.backend=jax", "--set", "run.compile_cache=false"]
    assert main([str(tmp_path / "model_5.pt"), "--env", "Pendulum-v1", "--out", str(out), *common]) == 0
    has_new_critic = "critic-size" in options
    assert ("the critic reads other observations" in capsys.readouterr().out) == has_new_critic
    expected = json.loads((tmp_path / "expected.json").read_text())
    policy, obs = jrl.load(out), np.float32(expected["obs"])
    found = np.stack([np.asarray(policy.act(x)) for x in obs])
    np.testing.assert_allclose(found, expected["action"], rtol=0, atol=1e-6)
    saved = checkpoint.locate(out)
    meta = checkpoint.read_meta(saved)
    algo = build.algorithm(config.override(meta["config"], []), checkpoint.read_spec(meta))
    state = resume.restore_learner(saved, jax.eval_shape(algo.init, jax.random.key(0)))
    if not has_new_critic:
        np.testing.assert_allclose(algo.outputs(state, obs)["value"], expected["value"], rtol=1e-5, atol=1e-6)
    more = f"env_steps={meta['env_steps'] + 200}"
    assert train.main(["--resume", str(out), "--stop", more, "--set", "run.compile_cache=false"]) == 0
    assert "stopped" in capsys.readouterr().out
