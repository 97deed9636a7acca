"""Arguments of RLlib's PolicyServerInput: its address, and spaces as the section `external` writes them."""

import ast
import re
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from jrl.errors import InputError, short

NAME, CLIENT = "PolicyServerInput", "PolicyClient"
# key of jrl -> why it means nothing where clients play
NO_USE = {
    "env_runners.num": "one server answers all clients, at one port",
    "rollout.mode": "clients are answered while it learns",
    "rollout.batch_mode": "rollouts are of steps as they come, and episodes go on in the next",
    "env.horizon": "clients end their episodes",
    "env.batch_wait_ms": "external.max_wait_ms says how long a request waits for others",
    **dict.fromkeys(
        ("env.remote_worker_envs", "env_runners.max_requests_in_flight", "env_runners.compress_observations"),
        "clients play the episodes",
    ),
}
_DTYPES = {"float16": "float32", "float64": "float32", "int64": "int32"}


def is_named(value: Any, name: str = NAME) -> bool:
    """Return whether a value is the class of that name, its path, or a function that makes one."""
    if isinstance(value, str):
        return re.split(r"[.:]", value)[-1] == name
    code = getattr(value, "__code__", None)
    names = (getattr(value, "__name__", ""), type(value).__name__, *(code.co_names if code else ()))
    return name in (*names, *(code.co_freevars if code else ()))


def address(value: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return (host, port) of a PolicyServerInput; None for what is not known.

    Args:
      value: the path of the class; or a function, which is called with the IOContext of the first worker and a class
        in the place of RLlib's that notes its arguments.
      options: RLlib's `input_config`, which a path is made with.
    """
    found: dict[str, Any] = {}

    def note(ioctx: Any = None, address: Any = None, port: Any = None, *rest: Any, **more: Any) -> None:
        found.update(address=address, port=port)

    if isinstance(value, types.FunctionType) and NAME not in value.__code__.co_freevars:
        globals_ = {**value.__globals__, NAME: note}
        its = types.FunctionType(value.__code__, globals_, argdefs=value.__defaults__, closure=value.__closure__)
        worker = types.SimpleNamespace(num_workers=1, worker_index=1)
        try:
            its(types.SimpleNamespace(worker_index=1, num_workers=1, worker=worker, config={}, input_config=options))
        except Exception:  # the user's own code, which may need more of RLlib
            found.clear()
    found = found or dict(options)
    return found.get("address"), found.get("port")


def space(given: Any, key: str) -> dict[str, Any]:
    """Return a space as `external.observation` and `external.action` write it.

    Args:
      given: a space of Gymnasium, its text as in params.json, or the written form.
      key: observation_space, or action_space, whose bounds count.
    Raises:
      InputError: it cannot be read.
    """
    if isinstance(given, Mapping) and not hasattr(given, "spaces"):
        return dict(given)
    try:
        return _written(_parsed(given) if isinstance(given, str) else given, key == "action_space")
    except (ValueError, TypeError, SyntaxError, AttributeError):
        expected = "expected a space of Gymnasium, or one as {box: [4]} and {discrete: 2}"
        raise InputError(f"{key}: {expected}, got {short(str(given))}") from None


def _written(given: Any, acts: bool) -> dict[str, Any]:
    match type(given).__name__:
        case "Box":
            return _box(given, acts)
        case "Discrete" if int(getattr(given, "start", 0)) == 0:
            return {"discrete": int(given.n)}
        case "MultiDiscrete":
            return {"multi_discrete": np.asarray(given.nvec).tolist()}
        case "MultiBinary":
            return {"multi_binary": np.atleast_1d(given.n).tolist()}
        case "Dict":
            return {"dict": {name: _written(part, acts) for name, part in given.spaces.items()}}
        case "Tuple":
            return {"tuple": [_written(part, acts) for part in given.spaces]}
    raise ValueError(given)


def _box(given: Any, acts: bool) -> dict[str, Any]:
    name = np.dtype(given.dtype).name
    name = _DTYPES.get(name, name)
    found: dict[str, Any] = {"box": list(map(int, given.shape))} | ({"dtype": name} if name != "float32" else {})
    if acts and name == "float32":
        for bound, none in (("low", -np.inf), ("high", np.inf)):
            numbers = np.asarray(getattr(given, bound))
            if (numbers != none).any():
                found[bound] = float(numbers.flat[0]) if (numbers == numbers.flat[0]).all() else numbers.tolist()
    return found


def _parsed(text: str) -> Any:
    """Return the Gymnasium space of a text. Raises ValueError, TypeError, SyntaxError, AttributeError.

    >>> _parsed("Discrete(2)"), _parsed("Box([-4.8 -inf], [4.8 inf], (2,), float32)").shape
    (Discrete(2), (2,))
    """
    text = re.sub(r"""['"]?(\w+)['"]?\s*:\s*(?=[A-Z])""", r"\1=", text.strip())  # Dict('a': Box(...))
    text = re.sub(r"(?<=[\w.\]])\s+(?=[-\d\[in])", ", ", text)  # arrays as numpy prints them
    return _value(ast.parse(text, mode="eval").body)


def _value(node: ast.AST) -> Any:
    from gymnasium import spaces  # here: most configurations have no spaces

    args: Any
    match node:
        case ast.Constant(value=bool() | int() | float() | str()):
            return node.value
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.Tuple() | ast.List():
            return [_value(part) for part in node.elts]
        case ast.Name():
            return np.inf if node.id == "inf" else node.id
        case ast.Call(func=ast.Name(id="Box")):
            args = [np.array(x) if isinstance(x, list) else x for x in map(_value, node.args)]
            if len(args) < 3:  # its shape alone, as Gym wrote it once
                args = [-np.inf, np.inf, np.hstack(args)]
            dtype = str(args[3]) if len(args) > 3 else "float64"
            return spaces.Box(*args[:3], dtype=np.dtype(dtype.replace("float32", "float64")))  # bounds as written
        case ast.Call(func=ast.Name(id="Discrete" | "MultiBinary" | "MultiDiscrete" | "Dict" | "Tuple" as kind)):
            args, named = list(map(_value, node.args)), {str(part.arg): _value(part.value) for part in node.keywords}
            return spaces.Tuple(args) if kind == "Tuple" and len(args) > 1 else getattr(spaces, kind)(*args, **named)
    raise ValueError(ast.dump(node))
