"""A policy that was trained with jrl and runs without jrl.

    import policy                       # this file
    pi = policy.load()                  # from the directory of this file, or load("another/directory")
    action = pi.act(obs)                # obs [*] -> action, or obs [N, *] -> actions [N, *]

Observations are raw, as the environment returns them: arrays, dicts or tuples. The policy normalises them. Parts that
only the critic reads, `unread` of policy.json, may be left out. Actions are deterministic and in the environment's own
units. `policy.json` names the environment and its spaces. The policy keeps its memory (recurrent state, frame stacks,
the previous action) between calls:

    pi.reset()                          # an episode begins with the next observation
    action = pi.act(obs, reward=r)      # reward before obs, if `reads_reward` of policy.json is true

The caller may keep the memory instead: `action, memory = pi.step(obs, memory)`; memory None begins an episode.

Needs numpy, and jax (format stablehlo), onnxruntime (onnx) or a C compiler (c).
"""

import ctypes
import importlib.util
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MASK = "action_mask"  # item of an observation: the allowed actions


class Policy:
    """An exported policy. `about` is policy.json: format, algorithm, env, env_steps, observation and action space."""

    def __init__(self, directory: str | Path):
        directory = Path(directory)
        self.about: dict[str, Any] = json.loads((directory / "policy.json").read_text())
        if self.about["version"] != 2:
            raise ValueError(f"{directory}: policy version {self.about['version']}, this file reads version 2")
        self._memory_types = [(tuple(m["shape"]), np.dtype(m["dtype"])) for m in self.about["memory"]]
        self._forward = _FORWARD[self.about["format"]](directory)
        self._size: int | None = None
        self._memory: Sequence[np.ndarray] = ()
        self._begins = np.ones(0, bool)

    def act(self, obs: Any, *, reset: Any = None, reward: Any = None, action_mask: Any = None) -> Any:
        """Returns the action for an observation [*], or the actions [N, *] for observations [N, *].

        Args:
          obs: observations; another N than in the previous call begins new episodes.
          reset: [N] bool, rows in which an episode begins with this observation; None: no row.
          reward: [N], or a number, the reward before the observation; needed if policy.json has `reads_reward`.
          action_mask: [K] or [N, K], if the observation does not contain it.
        Raises:
          ValueError: wrong shape; dtype of another kind than the environment's, such as float pixels; a mask that
            allows no action; a missing reward.
        """
        leaves, is_single = self._read_leaves(obs, action_mask)
        size = len(leaves[0])
        if size != self._size:
            self._size, self._memory, self._begins = size, self._start(size), np.ones(size, bool)
        begins = self._begins
        if reset is not None:
            mask = np.asarray(reset, bool).reshape((1,) if is_single else np.shape(reset))
            if mask.shape != (size,):
                raise ValueError(f"reset: expected {size} bools, one for each observation, got {mask.shape}")
            begins = begins | mask
        action, self._memory = self._run(leaves, self._memory, begins, reward)
        self._begins = np.zeros(size, bool)
        return _map(lambda x: x[0], action) if is_single else action

    def step(self, obs: Any, memory: Any = None, *, reward: Any = None, action_mask: Any = None) -> tuple[Any, Any]:
        """Returns (action, memory). The arguments are those of `act`, and the memory.

        `memory`: tuple of arrays [N, ...] from the previous call; None begins an episode in each row.
        """
        leaves, is_single = self._read_leaves(obs, action_mask)
        size = len(leaves[0])
        begins = np.full(size, memory is None)
        action, memory = self._run(leaves, self._start(size) if memory is None else memory, begins, reward)
        return (_map(lambda x: x[0], action) if is_single else action), tuple(memory)

    def reset(self) -> None:
        """Begins new episodes with the next call of `act`."""
        self._size = None

    def _start(self, size: int) -> list[np.ndarray]:
        return [np.zeros((size, *shape), dtype) for shape, dtype in self._memory_types]

    def _run(self, leaves: list[np.ndarray], memory: Any, begins: np.ndarray, reward: Any) -> tuple[Any, Any]:
        inputs = [*leaves, *memory]
        if self.about["reads_reward"]:
            if reward is None and not begins.all():
                raise ValueError(
                    "reward: this policy reads the previous reward: pass reward, or call reset() before an episode"
                )
            reward = np.asarray(0.0 if reward is None else reward, np.float32)
            inputs.append(np.ascontiguousarray(np.broadcast_to(reward, begins.shape)))
        if self.about["reads_begins"]:
            inputs.append(begins)
        outputs = self._forward(inputs)
        num_actions = len(outputs) - len(self._memory_types)
        return _build(self.about["action"], iter(outputs[:num_actions])), outputs[num_actions:]

    def _read_leaves(self, obs: Any, mask: Any) -> tuple[list[np.ndarray], bool]:
        """Returns the arrays of observations [N, *], and whether `obs` is a single observation."""
        space = self.about["observation"]
        if mask is not None:
            names = set(space.get("spaces", ())) - {MASK}
            is_dict = isinstance(obs, Mapping) and set(obs) - {MASK, *self.about.get("unread", ())} == names
            obs = {**(obs if is_dict else {"obs": obs}), MASK: mask}
        arrays: list[tuple[dict[str, Any], np.ndarray, str]] = []
        _flatten(space, obs, "obs", arrays, [f"obs/{name}/" for name in self.about.get("unread", ())])
        leads, leaves = set(), []
        for leaf, x, path in arrays:
            shape, dtype = _shape(leaf), np.dtype(leaf["dtype"])
            lead = x.shape[: x.ndim - len(shape)]
            is_mask = path == f"obs/{MASK}" and bool(self.about["choices"])
            fits = x.shape[len(lead) :] == shape and (is_mask or np.can_cast(x.dtype, dtype, "same_kind"))
            leads.add(lead)
            if len(lead) > 1 or len(leads) > 1 or not fits:
                raise ValueError(f"{path}: expected {dtype} {shape} or (N, *{shape}), got {x.dtype} {x.shape}")
            x = (x != 0 if is_mask else x).astype(dtype, copy=False)
            leaves.append(x if lead else x[None])
            if is_mask:
                self._check_mask(leaves[-1])
        return leaves, leads == {()}

    def _check_mask(self, mask: np.ndarray) -> None:
        start = 0
        for size in self.about["choices"]:
            if not (mask[:, start : start + size] != 0).any(1).all():
                raise ValueError(f"obs/{MASK}: entries {start} to {start + size - 1} of a row are all 0: allow one")
            start += size


def load(directory: str | Path = Path(__file__).parent) -> Policy:
    """Loads the policy in a directory that `python -m jrl.export` wrote."""
    return Policy(directory)


# ---------------------------------------------------------------- spaces of policy.json


def _shape(leaf: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(leaf.get("shape", [len(leaf["nvec"])] if "nvec" in leaf else ()))


def _flatten(space: Mapping[str, Any], x: Any, path: str, found: list, unread: Sequence[str]) -> None:
    """Appends (space, array, path) of each array that the policy reads to `found`, in the order of names."""
    if space["kind"] == "Dict":
        names = sorted(space["spaces"])
        if isinstance(x, Mapping):
            ignored = [name for name in x if name not in names and any(p.startswith(f"{path}/{name}/") for p in unread)]
            x = {name: part for name, part in x.items() if name not in ignored}
        if not isinstance(x, Mapping) or sorted(x) != names:
            got = sorted(x) if isinstance(x, Mapping) else type(x).__name__
            raise ValueError(f"{path}: expected a dict of {', '.join(names)}, got {got}")
        for name in names:
            _flatten(space["spaces"][name], x[name], f"{path}/{name}", found, unread)
    elif space["kind"] == "Tuple":
        if not isinstance(x, tuple | list) or len(x) != len(space["spaces"]):
            raise ValueError(f"{path}: expected a tuple of {len(space['spaces'])}, got {type(x).__name__}")
        for i, part in enumerate(space["spaces"]):
            _flatten(part, x[i], f"{path}/{i}", found, unread)
    else:
        found.append((space, np.asarray(x), path))


def _build(space: Mapping[str, Any], arrays: Any) -> Any:
    if space["kind"] == "Dict":
        return {name: _build(space["spaces"][name], arrays) for name in sorted(space["spaces"])}
    if space["kind"] == "Tuple":
        return tuple(_build(part, arrays) for part in space["spaces"])
    return next(arrays)


def _map(fn: Callable[[np.ndarray], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _map(fn, x) for name, x in tree.items()}
    return tuple(_map(fn, x) for x in tree) if isinstance(tree, tuple) else fn(tree)


# ---------------------------------------------------------------- formats

Forward = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]  # inputs [N, ...] -> outputs [N, ...]


def _npz(directory: Path) -> Forward:
    spec = importlib.util.spec_from_file_location("jrl_policy_interpreter", directory / "interpreter.py")
    assert spec is not None and spec.loader is not None
    interpreter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(interpreter)
    forward = interpreter.load(directory)
    return lambda inputs: forward(*inputs)


def _stablehlo(directory: Path) -> Forward:
    import jax
    from jax import export

    exported = export.deserialize(bytearray((directory / "policy.jax_export").read_bytes()))
    call = jax.jit(exported.call)  # compiles for each N
    return lambda inputs: [np.asarray(x) for x in call(*inputs)]


def _onnx(directory: Path) -> Forward:
    import onnxruntime

    providers = onnxruntime.get_available_providers()
    session = onnxruntime.InferenceSession(str(directory / "policy.onnx"), providers=providers)
    names = [x.name for x in session.get_inputs()]
    return lambda inputs: session.run(None, dict(zip(names, inputs, strict=True)))


def _c(directory: Path) -> Forward:
    about = json.loads((directory / "policy.json").read_text())
    obs, actions = _list_leaves(about["observation"]), _list_leaves(about["action"])
    memory = [(tuple(m["shape"]), np.dtype(m["dtype"])) for m in about["memory"]]
    flags = [*["reward"] * about["reads_reward"], *["begins"] * about["reads_begins"]]
    number = lambda name, values: [f"{name}_{i}" for i in range(len(values))]
    kept = number("memory", memory)
    names = [*number("obs", obs), *kept, *flags, *number("action", actions), *number("next", memory)]
    x = {name: f"x[{i}]" for i, name in enumerate(names)}  # one row of each input and output
    fields = [name for name in names if name in kept or name == "begins"]  # members of policy_memory
    arguments = [
        *["&m"] * bool(fields),
        *(f"(const void *){x[name]}" for name in number("obs", obs)),
        *(f"*(float *){x[name]}" for name in flags if name == "reward"),
        *(f"(void *){x[name]}" for name in number("action", actions)),
    ]
    source = f"""
#include "policy.h"
void act(int rows, char **x, const int *row_bytes) {{
  {"policy_memory m;" if fields else ""}
  for (; rows > 0; rows--) {{
    {" ".join(f"memcpy(&m.{name}, {x[name]}, sizeof m.{name});" for name in fields)}
    policy_act({", ".join(arguments)});
    {" ".join(f"memcpy({x[new]}, m.{name}, sizeof m.{name});" for name, new in zip(kept, number("next", memory)))}
    for (int i = 0; i < {len(names)}; i++) x[i] += row_bytes[i];
  }}
}}
"""
    with tempfile.TemporaryDirectory() as build:
        library = str(Path(build) / "policy.so")
        compiler = [os.environ.get("CC", "cc"), "-std=c99", "-O2", "-shared", "-fPIC", "-I", str(directory)]
        subprocess.run([*compiler, "-x", "c", "-", "-o", library, "-lm"], input=source, text=True, check=True)
        act = ctypes.CDLL(library).act

    def forward(inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        rows = len(inputs[0])
        outputs = [np.empty((rows, *shape), dtype) for shape, dtype in [*actions, *memory]]
        arrays = [*map(np.ascontiguousarray, inputs), *outputs]
        pointers = (ctypes.c_void_p * len(arrays))(*(x.ctypes.data for x in arrays))
        act(rows, pointers, (ctypes.c_int * len(arrays))(*(x.nbytes // rows for x in arrays)))
        return outputs

    return forward


def _list_leaves(space: Mapping[str, Any]) -> list[tuple[tuple[int, ...], np.dtype]]:
    if "spaces" in space:
        parts = space["spaces"]
        parts = [parts[name] for name in sorted(parts)] if space["kind"] == "Dict" else parts
        return [leaf for part in parts for leaf in _list_leaves(part)]
    return [(_shape(space), np.dtype(space["dtype"]))]


_FORWARD = {"npz": _npz, "stablehlo": _stablehlo, "onnx": _onnx, "c": _c}
