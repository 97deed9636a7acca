"""`jrl import`: tiny models of Stable-Baselines3 (`tests/fixtures/sb3`), images, and files that are refused."""

import base64
import io
import json
import pickle
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

import jrl
from jrl import config
from jrl.errors import InputError
from jrl.importer import sb3, torch_file, vec_normalize
from jrl.importer.__main__ import main
from jrl.run import build
from jrl.run.store import checkpoint, resume
from jrl.types import Box, Discrete, EnvSpec

MODELS = Path(__file__).parent.parent / "fixtures" / "sb3"
EXPECTED = json.loads((MODELS / "expected.json").read_text())
ENVS = {"ppo": "Pendulum-v1", "dqn": "CartPole-v1", "sac": "Pendulum-v1"}
FAST = ["--set", "env.backend=jax", "--set", "run.compile_cache=false"]


def imported(name, out):
    statistics = ["--vec-normalize", str(MODELS / "vec_normalize.pkl")] if name == "ppo" else []
    given = [str(MODELS / f"{name}.zip"), "--env", ENVS[name], "--out", str(out), *statistics, *FAST]
    assert main(given) == 0
    return out


def state_of(out):
    meta = checkpoint.read_meta(checkpoint.locate(out))
    algo = build.algorithm(config.override(meta["config"], []), checkpoint.read_spec(meta))
    return algo, resume.restore_learner(checkpoint.locate(out), jax.eval_shape(algo.init, jax.random.key(0)))


@pytest.mark.parametrize("name", ENVS)
def test_a_model_acts_as_stable_baselines3_does(name, tmp_path, capsys):
    out, expected = imported(name, tmp_path / "run"), EXPECTED[name]
    printed = capsys.readouterr().out
    assert f"{name} on {ENVS[name]} after {expected['steps']} steps" in printed
    assert "begins anew" not in printed
    policy, obs = jrl.load(out), np.float32(expected["obs"])
    found = np.stack([np.asarray(policy.act(x)) for x in obs])
    np.testing.assert_allclose(found, np.array(expected["action"]), rtol=1e-6, atol=1e-6)
    if name == "ppo":
        algo_section = checkpoint.read_meta(checkpoint.locate(out))["config"]["algo"]
        assert algo_section["normalize_advantage"] == "minibatch"  # as Stable-Baselines3 normalises
    algo, state = state_of(out)
    assert int(state.env_steps) == expected["steps"]
    outputs = algo.outputs(state, obs)
    for key in {"value", "q"} & expected.keys():
        np.testing.assert_allclose(outputs[key], expected[key], rtol=1e-5, atol=1e-6)


def test_moments_of_the_optimizer_and_slow_copies_are_taken(tmp_path):
    model = sb3.read(MODELS / "sac.zip")
    _, state = state_of(imported("sac", tmp_path / "run"))
    torchs = model.optimizers["critic"]["state"]  # parameters in the order of qf0, qf1
    adam = state.opt_state["critic"][0]
    assert int(adam.count) == int(torchs[0]["step"]) > 0
    for critic, first in ((0, 0), (1, 4)):
        np.testing.assert_array_equal(adam.mu["layers"]["Dense_0"]["kernel"][critic], torchs[first]["exp_avg"].T)
        np.testing.assert_array_equal(adam.nu["head"]["bias"][critic], torchs[first + 3]["exp_avg_sq"])
    slow = state.target_params["critic"]["head"]["kernel"][1]
    np.testing.assert_array_equal(slow, model.weights["critic_target.qf1.2.weight"].T)
    assert float(state.params["log_ent_coef"]) == model.variables["log_ent_coef"][0]


def test_an_imported_run_goes_on(tmp_path, capsys):
    from jrl import train

    out = imported("dqn", tmp_path / "run")
    assert train.main(["--resume", str(out), "--stop", "env_steps=100", "--set", "run.compile_cache=false"]) == 0
    assert f"resume: from {out}/checkpoints/0 at {EXPECTED['dqn']['steps']} steps" in capsys.readouterr().out
    meta = checkpoint.read_meta(checkpoint.locate(out))
    assert meta["env_steps"] >= 100
    learned = checkpoint.read(checkpoint.locate(out), "learner")["params"]["torso"]["Dense_0"]["kernel"]
    before = sb3.read(MODELS / "dqn.zip").weights["q_net.q_net.0.weight"].T
    assert 0 < np.abs(learned - before).max() < 0.1  # some steps of 1e-4 away


# ---------------------------------------------------------------- images, by a plain computation in torch's layout


def convolved(x, kernel, bias, stride):
    """ReLU of a convolution of x [C, H, W] with kernel [F, C, h, w]."""
    size = kernel.shape[-1]
    rows, cols = ((n - size) // stride + 1 for n in x.shape[1:])
    place = lambda i, j: x[:, i * stride : i * stride + size, j * stride : j * stride + size]
    out = [[np.einsum("chw,fchw->f", place(i, j), kernel) + bias for j in range(cols)] for i in range(rows)]
    return np.maximum(np.transpose(out, (2, 0, 1)), 0)


@pytest.mark.parametrize("shape", [(3, 36, 44), (44, 36, 2)])
def test_a_nature_cnn_reads_images_as_torch_does(shape):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, shape).astype(np.uint8)
    first = image if shape[0] == 3 else image.transpose(2, 0, 1)
    channels = first.shape[0]
    draw = lambda *size: rng.normal(0, 0.1, size).astype(np.float32)
    shapes = [("cnn.0", (32, channels, 8, 8)), ("cnn.2", (64, 32, 4, 4)), ("cnn.4", (64, 64, 3, 3))]
    weights = {}
    x = first / np.float32(255)
    for (name, size), stride in zip(shapes, (4, 2, 1), strict=True):
        kernel, bias = draw(*size), draw(size[0])
        weights |= {f"q_net.features_extractor.{name}.weight": kernel, f"q_net.features_extractor.{name}.bias": bias}
        x = convolved(x, kernel, bias, stride)
    for name, size in (("features_extractor.linear.0", (512, x.size)), ("q_net.0", (5, 512)), ("q_net.2", (4, 5))):
        weights |= {f"q_net.{name}.weight": draw(*size), f"q_net.{name}.bias": draw(size[0])}
    dense = lambda name, x: weights[f"q_net.{name}.weight"] @ x + weights[f"q_net.{name}.bias"]
    features = np.maximum(dense("features_extractor.linear.0", x.ravel()), 0)
    expected = dense("q_net.2", np.maximum(dense("q_net.0", features), 0))
    model = sb3.Model(Path("model.zip"), "dqn", {}, weights, {}, {})
    spec = EnvSpec(Box(shape, "uint8", 0, 255), Discrete(4), 1)
    cfg = config.load(sb3.settings(model, None).config, env="CartPole-v1")
    assert cfg.network.head_hidden == (5,)
    algo = build.algorithm(cfg, spec)
    state = algo.init(jax.random.key(0))
    found = sb3.params(model, weights.__getitem__, sb3._image_size(model, spec))
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, dict(state.params))
    q = algo.outputs(state.replace(params=found), image[None])["q"][0]
    np.testing.assert_allclose(q, expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- refused files


class Bomb:
    """A pickle that would write a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def zipped(path, parts):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return path


def parts_of(name="ppo"):
    with zipfile.ZipFile(MODELS / f"{name}.zip") as archive:
        return {part: archive.read(part) for part in archive.namelist()}


def with_data(**changes):
    parts = parts_of()
    return {**parts, "data": json.dumps({**json.loads(parts["data"]), **changes})}


def error(capsys, *argv):
    assert main([*map(str, argv)]) == 2
    return capsys.readouterr().err


def test_nothing_of_a_file_is_executed(tmp_path, capsys):
    target = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(target))
    pickle.loads(bomb)
    assert target.exists()  # the file is dangerous
    target.unlink()
    inner = io.BytesIO()
    zipped(inner, {"archive/data.pkl": bomb})
    for part in ("policy.pth", "policy.optimizer.pth", "pytorch_variables.pth"):
        path = zipped(tmp_path / "model.zip", {**parts_of(), part: inner.getvalue()})
        assert f"{part}: the pickle wants" in error(capsys, path, "--env", "Pendulum-v1")
    serialized = {":type:": "<class 'dict'>", ":serialized:": base64.b64encode(bomb).decode()}
    path = zipped(tmp_path / "model.zip", with_data(policy_kwargs=serialized))
    sb3.settings(sb3.read(path), None)
    (tmp_path / "vec.pkl").write_bytes(bomb)
    found = error(capsys, MODELS / "ppo.zip", "--env", "Pendulum-v1", "--vec-normalize", tmp_path / "vec.pkl")
    assert "is not a file of VecNormalize (the pickle wants" in found
    assert not target.exists()


def test_a_pickle_cannot_change_the_reader():
    """BUILD on a name of the pickle must not change a function of this process."""
    code = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x01\x00\x00\x00aK\x01sb."
    inner = io.BytesIO()
    zipped(inner, {"archive/data.pkl": code})
    with pytest.raises(torch_file.RefusedFile, match="changes a function"):
        torch_file.read_tensors(inner.getvalue())


@pytest.mark.parametrize(
    ("shape", "stride", "offset"), [((4,), (2,), 0), ((3,), (1,), 2), ((9,), (0,), 0), ((2,), (-1,), 1)]
)
def test_a_tensor_stays_within_its_storage(shape, stride, offset):
    storage = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(torch_file._rebuild_tensor(storage, 1, (3,), (1,)), [1, 2, 3])
    with pytest.raises(torch_file.RefusedFile):
        torch_file._rebuild_tensor(storage, offset, shape, stride)


CONTRIB = {"__module__": "sb3_contrib.tqc.policies"}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (b"no archive", "got another file (it is not a zip archive)"),
        ({"x": ""}, "got another file (it has no data and policy.pth)"),
        ({**parts_of(), "data": "{"}, "got another file"),
        (with_data(policy_class=CONTRIB), "got a policy of sb3_contrib.tqc.policies: train it here"),
        (with_data(policy_class=None), "got a policy of None"),
        (with_data(num_timesteps="many"), "got values of other types (ValueError: invalid literal"),
        (with_data(use_sde=True), "expected use_sde=False, got True"),
        (with_data(policy_kwargs={"activation_fn": "<class 'torch.nn.modules.activation.GELU'>"}), "got GELU"),
        (with_data(policy_kwargs={"features_extractor_class": "<class 'mine.Net'>"}), "got <class 'mine.Net'>"),
        ({**parts_of(), "policy.pth": parts_of()["policy.optimizer.pth"]}, "expected named arrays"),
        ({**parts_of(), "policy.pth": parts_of("dqn")["policy.pth"]}, "expected an array action_net.weight"),
        ({**parts_of(), "policy.pth": b"x"}, "policy.pth: it is not a zip archive"),
    ],
)
def test_other_files_are_refused(tmp_path, capsys, parts, expected):
    path = tmp_path / "model.zip"
    path.write_bytes(parts) if isinstance(parts, bytes) else zipped(path, parts)
    found = error(capsys, path, "--env", "Pendulum-v1", "--out", tmp_path / "run", *FAST)
    assert found.startswith("error: ")
    assert expected in found
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["none.zip", "--env", "CartPole-v1"], "model: expected a file model.zip or model_N.pt, got none.zip, which"),
        ([MODELS / "dqn.zip", "--env", "Acrobot-v1"], "--env: expected observations of [4], as"),
        ([MODELS / "dqn.zip", "--env", "CartPole-v9"], "did you mean CartPole-v1"),
        ([MODELS / "dqn.zip", "--env", "CartPole-v1", "--vec-normalize", MODELS / "vec_normalize.pkl"],
         "--vec-normalize: expected statistics of"),
        ([MODELS / "dqn.zip", "--env", "CartPole-v1", "--vec-normalize", "none"], "none does not exist"),
        ([MODELS / "dqn.zip", "--env", "CartPole-v1", "--set", "network.hidden=[7]"],
         "expected q_head.kernel of shape [7, 2], got [6, 2]"),
    ],
)  # fmt: skip
def test_bad_arguments(tmp_path, capsys, argv, expected):
    assert expected in error(capsys, *argv, "--out", tmp_path / "run", "--set", "run.compile_cache=false")


def test_texts_of_schedules_and_noise():
    text = lambda text: {"x": {"value_schedule": text}}
    number = lambda data, notes: sb3._number(data, "x", 0.5, notes, "algo.y")
    notes = []
    assert number({"x": 0.1}, notes) == 0.1
    assert number(text("ConstantSchedule(val=2.5e-05)"), notes) == 2.5e-5
    assert number(text("LinearSchedule(start=0.1, end=0.0, end_fraction=0.5)"), notes) == [[0, 0.1], [0.5, 0.0]]
    assert notes == []
    assert number(text("<function f at 0x7f00>"), notes) == 0.5
    assert notes == ["x cannot be read: algo.y=0.5"]
    noise = lambda kind, sigma: {"action_noise": {":type:": f"<class '{kind}'>", "_sigma": sigma}}
    assert sb3._noise({"action_noise": None}, notes) == 0.0
    assert sb3._noise(noise("stable_baselines3.common.noise.NormalActionNoise", "[0.2 0.2]"), notes) == 0.2
    assert len(notes) == 1
    assert sb3._noise(noise("OrnsteinUhlenbeckActionNoise", "[0.5]"), notes) == 0.1
    assert len(notes) == 2


def test_statistics_are_those_of_the_file():
    found = vec_normalize.read(MODELS / "vec_normalize.pkl")
    assert found.obs is not None and found.returns is not None
    assert found.obs.mean.shape == (3,)
    assert found.obs.num == pytest.approx(40, abs=10)
    assert found.clip_reward == 10
    with pytest.raises(InputError, match="expected epsilon=1e-08"):
        vec_normalize._statistics(
            {"norm_obs": False, "norm_reward": True, "epsilon": 1e-4, "clip_obs": 10.0,
             "ret_rms": _moments(), "obs_rms": None, "clip_reward": 10.0}
        )  # fmt: skip


def _moments():
    found = vec_normalize._RunningMeanStd()
    found.attributes = {"mean": np.zeros(()), "var": np.ones(()), "count": 1.0}
    return found
