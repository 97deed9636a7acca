"""Arguments of RLlib's PolicyServerInput: its address, and spaces in the form of the section `external`."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jrl.errors import InputError, short

NAME, CLIENT = "PolicyServerInput", "PolicyClient"
# key of jrl -> reason why it has no effect with clients
NO_USE = {
    "env_runners.num": "one server answers all clients, at one port",
    "rollout.mode": "the server answers clients while it learns",
    "rollout.batch_mode": "an episode continues in the next rollout",
    "env.horizon": "clients end their episodes",
    "env.batch_wait_ms": "external.max_wait_ms is the time that a request waits for others",
    **dict.fromkeys(
        ("env.remote_worker_envs", "env_runners.max_requests_in_flight", "env_runners.compress_observations"),
        "clients play the episodes",
    ),
}
_DTYPES = {"float16": "float32", "float64": "float32", "int64": "int32"}


def is_named(value: Any, name: str = NAME) -> bool:
    """Return whether a value is the class of this name, its path, or a function that creates an object of it."""
    if isinstance(value, str):
        return re.split(r"[.:]", value)[-1] == name
    code = getattr(value, "__code__", None)
    names = (getattr(value, "__name__", ""), type(value).__name__, *(code.co_names if code else ()))
    return name in (*names, *(code.co_freevars if code else ()))


def convert_space(given: Any, key: str) -> dict[str, Any]:
    """Return a space in the form of `external.observation` and `external.action`.

    Args:
      given: Gymnasium space, or the form of `external`.
      key: observation_space, or action_space; only the latter keeps bounds.
    Raises:
      InputError: another value.
    """
    if isinstance(given, Mapping) and not hasattr(given, "spaces"):
        return dict(given)
    try:
        return _write_space(given, key == "action_space")
    except (ValueError, TypeError, AttributeError):
        expected = "expected a Gymnasium space, or a mapping such as {box: [4]} or {discrete: 2}"
        raise InputError(f"{key}: {expected}, got {short(str(given))}") from None


def _write_space(given: Any, acts: bool) -> dict[str, Any]:
    match type(given).__name__:
        case "Box":
            return _write_box(given, acts)
        case "Discrete" if int(getattr(given, "start", 0)) == 0:
            return {"discrete": int(given.n)}
        case "MultiDiscrete":
            return {"multi_discrete": np.asarray(given.nvec).tolist()}
        case "MultiBinary":
            return {"multi_binary": np.atleast_1d(given.n).tolist()}
        case "Dict":
            return {"dict": {name: _write_space(part, acts) for name, part in given.spaces.items()}}
        case "Tuple":
            return {"tuple": [_write_space(part, acts) for part in given.spaces]}
    raise ValueError(given)


def _write_box(given: Any, acts: bool) -> dict[str, Any]:
    name = np.dtype(given.dtype).name
    name = _DTYPES.get(name, name)
    found: dict[str, Any] = {"box": list(map(int, given.shape))} | ({"dtype": name} if name != "float32" else {})
    if acts and name == "float32":
        for bound, none in (("low", -np.inf), ("high", np.inf)):
            numbers = np.asarray(getattr(given, bound))
            if (numbers != none).any():
                found[bound] = float(numbers.flat[0]) if (numbers == numbers.flat[0]).all() else numbers.tolist()
    return found
