"""Writes tests/fixtures/sb3: tiny models of Stable-Baselines3, and what they return for some observations.

    python scripts/make_sb3_models.py tests/fixtures/sb3     # needs stable_baselines3 and torch, not jrl

`tests/importer/test_importer.py` reads them without either. Files are compressed, and long texts of `data` are dropped.
"""

import argparse
import io
import json
import zipfile
from pathlib import Path

import numpy as np

OFF_POLICY = {"learning_starts": 20, "buffer_size": 100, "batch_size": 8}


def shrink(path: Path) -> None:
    """Compresses a model.zip, without the texts that no import reads."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    data = json.loads(parts["data"])
    for name in ("__doc__", "__annotations__", "__static_attributes__", ":serialized:"):
        for value in data.values():
            if isinstance(value, dict):
                value.pop(name, None)
    for value in data.values():  # methods of a class
        if isinstance(value, dict) and "__module__" in value:
            for name in [name for name in value if name not in (":type:", "__module__")]:
                value.pop(name)
    parts["data"] = json.dumps(data).encode()
    kept = io.BytesIO()
    with zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in parts.items():
            if name != "system_info.txt":
                archive.writestr(name, recompress(content) if name.endswith(".pth") else content)
    path.write_bytes(kept.getvalue())


def recompress(content: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Returns a file of torch as it is, without the padding between its storages."""
    kept = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(kept, "w", compression) as smaller:
        for name in archive.namelist():
            if not name.endswith(("/.format_version", "/.storage_alignment", "/serialization_id", "/version")):
                smaller.writestr(name, archive.read(name))
    return kept.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    import stable_baselines3 as sb3
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    out.mkdir(parents=True, exist_ok=True)
    models = {
        "ppo": (
            sb3.PPO,
            "Pendulum-v1",
            {"n_steps": 16, "batch_size": 8, "n_epochs": 1, "policy_kwargs": {"net_arch": [6]}},
        ),
        "dqn": (sb3.DQN, "CartPole-v1", {**OFF_POLICY, "policy_kwargs": {"net_arch": [6]}}),
        "sac": (sb3.SAC, "Pendulum-v1", {**OFF_POLICY, "policy_kwargs": {"net_arch": [6]}}),
    }
    expected = {}
    for name, (algo, env_id, options) in models.items():
        env = make_vec_env(env_id, seed=1)
        if name == "ppo":
            env = VecNormalize(env)
        model = algo("MlpPolicy", env, seed=1, device="cpu", **options)
        model.learn(40)
        model.save(out / f"{name}.zip")
        shrink(out / f"{name}.zip")
        obs = np.random.default_rng(0).normal(size=(3, *env.observation_space.shape)).round(3).astype(np.float32)
        own = env.normalize_obs(obs).astype(np.float32) if name == "ppo" else obs
        action, _ = model.predict(own, deterministic=True)
        expected[name] = {"obs": obs.tolist(), "action": action.tolist(), "steps": model.num_timesteps}
        with torch.no_grad():
            if name == "ppo":
                env.save(str(out / "vec_normalize.pkl"))
                expected[name]["value"] = model.policy.predict_values(torch.as_tensor(own))[:, 0].tolist()
            elif name == "dqn":
                expected[name]["q"] = model.q_net(torch.as_tensor(own)).tolist()
    (out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
