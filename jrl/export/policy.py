"""A policy that was trained with jrl and runs without it.

    import policy                       # this file
    pi = policy.load()                  # from the directory of this file, or load("another/directory")
    action = pi.act(obs)                # obs [*] -> action, or obs [N, *] -> actions [N, *]

An observation is what the environment gives, raw: its normalisation is part of the policy. Actions are deterministic
and in the environment's own units. `policy.json` names the environment and its spaces.

Needs numpy and, beside it: nothing (format npz), jax (stablehlo) or onnxruntime (onnx).
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


class Policy:
    """`about` is what policy.json says: format, algorithm, env, env_steps, observation and action space."""

    def __init__(self, directory: str | Path):
        directory = Path(directory)
        self.about: dict[str, Any] = json.loads((directory / "policy.json").read_text())
        if self.about["version"] != 1:
            raise ValueError(f"{directory}: policy version {self.about['version']}, this file reads version 1")
        obs = self.about["observation"]
        self.dtype = np.dtype(obs["dtype"])
        self.shape = tuple(obs.get("shape", [len(obs["nvec"])] if "nvec" in obs else ()))
        self._forward = _FORWARD[self.about["format"]](directory)

    def act(self, obs: Any) -> np.ndarray:
        """The action for one observation [*], or the actions [N, *] for observations [N, *].

        Raises:
          ValueError: `obs` has another shape, or a dtype of another kind than the environment's, such as float pixels.
        """
        obs = np.asarray(obs)
        single = obs.ndim == len(self.shape)
        if obs.shape[not single :] != self.shape or not np.can_cast(obs.dtype, self.dtype, "same_kind"):
            raise ValueError(
                f"obs: expected {self.dtype} {self.shape} or (N, *{self.shape}), got {obs.dtype} {obs.shape}"
            )
        obs = obs.astype(self.dtype, copy=False)
        return self._forward(obs[None])[0] if single else self._forward(obs)


def load(directory: str | Path = Path(__file__).parent) -> Policy:
    """The policy in a directory that `python -m jrl.export` wrote."""
    return Policy(directory)


Forward = Callable[[np.ndarray], np.ndarray]  # obs [N, *] -> action [N, *]


def _npz(directory: Path) -> Forward:
    spec = importlib.util.spec_from_file_location("jrl_policy_interpreter", directory / "interpreter.py")
    assert spec is not None and spec.loader is not None
    interpreter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(interpreter)
    return interpreter.load(directory)


def _stablehlo(directory: Path) -> Forward:
    import jax
    from jax import export

    exported = export.deserialize(bytearray((directory / "policy.jax_export").read_bytes()))
    call = jax.jit(exported.call)  # compiled once for each N
    return lambda obs: np.asarray(call(obs))


def _onnx(directory: Path) -> Forward:
    import onnxruntime

    providers = onnxruntime.get_available_providers()
    session = onnxruntime.InferenceSession(str(directory / "policy.onnx"), providers=providers)
    name = session.get_inputs()[0].name
    return lambda obs: session.run(None, {name: obs})[0]


_FORWARD = {"npz": _npz, "stablehlo": _stablehlo, "onnx": _onnx}
