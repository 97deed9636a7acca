"""`jrl import` of rsl_rl: tiny policies of releases 2 and 5 (`tests/fixtures/rsl_rl`), and files that are refused."""

import json
import pickle
import shutil
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

import jrl
from jrl import config
from jrl.errors import InputError
from jrl.importer import rsl_rl, torch_file
from jrl.importer.__main__ import main
from jrl.run import build
from jrl.run.store import checkpoint, resume

MODELS = Path(__file__).parent.parent / "fixtures" / "rsl_rl"
FAST = ["--set", "env.backend=jax", "--set", "run.compile_cache=false"]


def tree_of(name):
    return torch_file.read_tensors((MODELS / name / "model_5.pt").read_bytes())


def error(capsys, *argv):
    assert main([*map(str, argv)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["v2", "v5"])
def test_a_policy_acts_as_rsl_rl_does(name, tmp_path, capsys):
    out = tmp_path / "run"
    assert main([str(MODELS / name / "model_5.pt"), "--env", "Pendulum-v1", "--out", str(out), *FAST]) == 0
    printed = capsys.readouterr().out
    iterations = tree_of(name)["iter"]
    assert f"ppo on Pendulum-v1 after {iterations * 8 * 8} steps" in printed  # 8 steps of the file, 8 environments
    assert "anew" not in printed
    expected = json.loads((MODELS / name / "expected.json").read_text())
    policy, obs = jrl.load(out), np.float32(expected["obs"])
    found = np.stack([np.asarray(policy.act(x)) for x in obs])
    np.testing.assert_allclose(found, expected["action"], rtol=0, atol=1e-6)
    meta = checkpoint.read_meta(checkpoint.locate(out))
    cfg = config.override(meta["config"], [])
    assert (cfg.algo.gamma, cfg.algo.num_epochs, cfg.rollout.length) == (0.97, 2, 8)
    algo = build.algorithm(cfg, checkpoint.read_spec(meta))
    state = resume.restore_learner(checkpoint.locate(out), jax.eval_shape(algo.init, jax.random.key(0)))
    outputs = algo.outputs(state, obs)
    np.testing.assert_allclose(outputs["value"], expected["value"], rtol=1e-5, atol=1e-6)
    tree = tree_of(name)
    std = tree["model_state_dict"]["std"] if name == "v2" else tree["actor_state_dict"]["distribution.std_param"]
    np.testing.assert_allclose(np.exp(outputs["distribution"].log_std[0]), std, rtol=1e-6)
    torchs = tree["optimizer_state_dict"]["state"]  # std, then the actor's layers, then the critic's
    (adam,) = (node for node in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(node))
    assert int(adam.count) == int(torchs[0]["step"]) > 0
    means = [entry["exp_avg"] * (std if i == 0 else 1) for i, entry in torchs.items()]
    mine = np.concatenate([np.ravel(x) for x in jax.tree.leaves(adam.mu)])
    np.testing.assert_allclose(np.sort(mine), np.sort(np.concatenate([np.ravel(x) for x in means])), rtol=1e-6)


def is_adam(node):
    return hasattr(node, "mu") and hasattr(node, "nu")


def test_the_activation_is_required(tmp_path, capsys):
    path = shutil.copy(MODELS / "v5" / "model_5.pt", tmp_path)
    found = error(capsys, path, "--env", "Pendulum-v1", "--out", tmp_path / "run", *FAST)
    assert (
        f"expected the activation in {tmp_path}/params/agent.yaml, got none: give --set network.activation=elu" in found
    )
    assert not (tmp_path / "run").exists()
    model, statistics = rsl_rl.read(Path(path))
    found = rsl_rl.settings(model, statistics, ["network.activation=elu"])
    assert found.config["network"] == {"hidden": [6, 5], "critic_hidden": [7]}
    assert "the file has no hyper-parameters: rsl_rl's defaults, with rollout.length=24" in found.notes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "actor: {activation: gelu}",
            "expected elu, crelu, relu, tanh, swish, the same for actor and critic, got gelu",
        ),
        ("{actor: {activation: elu}, critic: {activation: tanh}}", "got elu, tanh: jrl has no equivalent"),
        ("actor: [", "not valid YAML"),
        ("a: !!python/tuple [1]", "not valid YAML"),
        ("{actor: {activation: elu}, algorithm: {gamma: high}}", "algo.gamma"),
        ("actor: elu", "expected the activation"),
    ],
)
def test_a_config_that_does_not_fit(tmp_path, capsys, text, expected):
    path = shutil.copy(MODELS / "v5" / "model_5.pt", tmp_path)
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "agent.yaml").write_text(text)
    assert expected in error(capsys, path, "--env", "Pendulum-v1", "--out", tmp_path / "run", *FAST)


def renamed(tmp_path, *pairs):
    """Returns the file of release 5 with other texts of the same length in its pickle."""
    path = tmp_path / "model_5.pt"
    with zipfile.ZipFile(MODELS / "v5" / "model_5.pt") as archive, zipfile.ZipFile(path, "w") as changed:
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith("data.pkl"):
                for old, new in pairs:
                    assert old in content
                    assert len(old) == len(new)
                    content = content.replace(old, new)
            changed.writestr(name, content)
    shutil.copytree(MODELS / "v5" / "params", tmp_path / "params", dirs_exist_ok=True)
    return path


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (
            [(b"mlp.0.weight", b"rnn.0.weight")],
            "got an array actor.rnn.0.weight: recurrent, convolutional and distilled",
        ),
        ([(b"mlp.0.weight", b"mlp.4.weigh_")], "got an array actor.4.weigh_"),
        ([(b"actor_state_dict", b"agent_state_dict")], "expected a Gaussian with one deviation per action"),
        ([(b"actor_state_dict", b"a2222_state_dict"), (b"critic_state_dict", b"c22222_state_dict")], "another tree"),
        ([(b"iter", b"time")], "got another tree"),
        ([(b"mlp.0.bias", b"mlp.9.bias")], "got no hidden layer of the actor"),
    ],
)
def test_other_policies_are_refused(tmp_path, capsys, pairs, expected):
    path = renamed(tmp_path, *pairs)
    assert expected in error(capsys, path, "--env", "Pendulum-v1", "--out", tmp_path / "run", *FAST)
    assert not (tmp_path / "run").exists()


def test_other_spaces_are_refused(capsys):
    model = MODELS / "v5" / "model_5.pt"
    assert "--env: expected observations of [3], as" in error(capsys, model, "--env", "CartPole-v1", *FAST)
    assert "a .pt of rsl_rl has its statistics" in error(
        capsys, model, "--env", "Pendulum-v1", "--vec-normalize", MODELS / "v5" / "expected.json"
    )


def test_nothing_of_a_file_is_executed(tmp_path, capsys):
    path = tmp_path / "model_1.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Path.touch))
    assert "the pickle wants" in error(capsys, path, "--env", "Pendulum-v1", *FAST)
    path.write_bytes(b"x")
    with pytest.raises(InputError, match="got another file \\(it is not a zip archive\\)"):
        rsl_rl.read(path)
