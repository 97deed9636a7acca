"""Arguments of RLlib's PolicyServerInput: its address, and spaces in the form of the section `external`."""

import ast
import re
import types
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


def find_address(value: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return (host, port) of a PolicyServerInput, with None for unknown parts.

    Args:
      value: path of the class, or a function (IOContext) -> PolicyServerInput. The function is called with the context
        of the first worker, and with a stand-in for the class that records its arguments.
      options: RLlib's `input_config`, the arguments of a path.
    """
    found: dict[str, Any] = {}

    def record(ioctx: Any = None, address: Any = None, port: Any = None, *rest: Any, **more: Any) -> None:
        found.update(address=address, port=port)

    if isinstance(value, types.FunctionType) and NAME not in value.__code__.co_freevars:
        globals_ = {**value.__globals__, NAME: record}
        function = types.FunctionType(value.__code__, globals_, argdefs=value.__defaults__, closure=value.__closure__)
        worker = types.SimpleNamespace(num_workers=1, worker_index=1)
        try:
            context = {"worker_index": 1, "num_workers": 1, "worker": worker, "config": {}, "input_config": options}
            function(types.SimpleNamespace(**context))
        except Exception:  # user code, which may need more of RLlib
            found.clear()
    found = found or dict(options)
    return found.get("address"), found.get("port")


def convert_space(given: Any, key: str) -> dict[str, Any]:
    """Return a space in the form of `external.observation` and `external.action`.

    Args:
      given: Gymnasium space, its text as in params.json, or the form of `external`.
      key: observation_space, or action_space; only the latter keeps bounds.
    Raises:
      InputError: another value.
    """
    if isinstance(given, Mapping) and not hasattr(given, "spaces"):
        return dict(given)
    try:
        return _write_space(_parse_space(given) if isinstance(given, str) else given, key == "action_space")
    except (ValueError, TypeError, SyntaxError, AttributeError):
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


def _parse_space(text: str) -> Any:
    """Return the Gymnasium space of a text. Raises ValueError, TypeError, SyntaxError, AttributeError.

    >>> _parse_space("Discrete(2)"), _parse_space("Box([-4.8 -inf], [4.8 inf], (2,), float32)").shape
    (Discrete(2), (2,))
    """
    text = re.sub(r"""['"]?(\w+)['"]?\s*:\s*(?=[A-Z])""", r"\1=", text.strip())  # Dict('a': Box(...))
    text = re.sub(r"(?<=[\w.\]])\s+(?=[-\d\[in])", ", ", text)  # arrays as numpy prints them
    return _parse_node(ast.parse(text, mode="eval").body)


def _parse_node(node: ast.AST) -> Any:
    from gymnasium import spaces  # here, because most configurations have no spaces

    args: Any
    match node:
        case ast.Constant(value=bool() | int() | float() | str()):
            return node.value
        case ast.UnaryOp(op=ast.USub()):
            return -_parse_node(node.operand)
        case ast.Tuple() | ast.List():
            return [_parse_node(part) for part in node.elts]
        case ast.Name():
            return np.inf if node.id == "inf" else node.id
        case ast.Call(func=ast.Name(id="Box")):
            args = [np.array(x) if isinstance(x, list) else x for x in map(_parse_node, node.args)]
            if len(args) < 3:  # only a shape, as old Gym wrote it
                args = [-np.inf, np.inf, np.hstack(args)]
            dtype = str(args[3]) if len(args) > 3 else "float64"
            return spaces.Box(*args[:3], dtype=np.dtype(dtype.replace("float32", "float64")))  # bounds as written
        case ast.Call(func=ast.Name(id="Discrete" | "MultiBinary" | "MultiDiscrete" | "Dict" | "Tuple" as kind)):
            args = list(map(_parse_node, node.args))
            named = {str(part.arg): _parse_node(part.value) for part in node.keywords}
            return spaces.Tuple(args) if kind == "Tuple" and len(args) > 1 else getattr(spaces, kind)(*args, **named)
    raise ValueError(ast.dump(node))
