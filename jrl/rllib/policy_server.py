"""Arguments of RLlib's PolicyServerInput: its address, and spaces as the section `external` writes them."""

import ast
import math
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

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
_DTYPES = {"float16": "float32", "float64": "float32", "int64": "int32", "bool_": "bool"}


def is_named(value: Any, name: str = NAME) -> bool:
    """Returns whether a value is the class of that name, its path, or a function that makes one."""
    if isinstance(value, str):
        return re.split(r"[.:]", value)[-1] == name
    code = getattr(value, "__code__", None)
    names = (getattr(value, "__name__", ""), type(value).__name__, *(code.co_names if code else ()))
    return name in (*names, *(code.co_freevars if code else ()))


def address(value: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns (host, port) of a PolicyServerInput; None for what is not known.

    Args:
      value: the path of the class; or a function, which is called with the IOContext of the first worker and a class
        in the place of RLlib's that notes its arguments.
      options: RLlib's `input_config`, which a path is made with.
    """
    found: dict[str, Any] = {}

    def note(ioctx: Any = None, address: Any = None, port: Any = None, *rest: Any, **more: Any) -> None:
        found.update(address=address, port=port)

    if isinstance(value, types.FunctionType):
        names, cells = value.__code__.co_freevars, value.__closure__ or ()
        closure = tuple(types.CellType(note) if name == NAME else cell for name, cell in zip(names, cells, strict=True))
        globals_ = {**value.__globals__, NAME: note}
        its = types.FunctionType(value.__code__, globals_, value.__name__, value.__defaults__, closure)
        worker = types.SimpleNamespace(num_workers=1, worker_index=1)
        try:
            its(types.SimpleNamespace(worker_index=1, num_workers=1, worker=worker, config={}, input_config=options))
        except Exception:  # the user's own code, which may need more of RLlib
            found.clear()
    found = found or dict(options)
    return found.get("address"), found.get("port")


def space(given: Any, *, acts: bool) -> dict[str, Any] | None:
    """Returns a space as `external.observation` and `external.action` write it; None: it cannot be read.

    Args:
      given: a space of Gymnasium, its text as in params.json, or the written form.
      acts: whether it is of actions, whose bounds count.
    """
    if isinstance(given, Mapping) and not hasattr(given, "spaces"):
        return dict(given)
    try:
        return _written(_parsed(given) if isinstance(given, str) else given, acts)
    except (ValueError, TypeError, SyntaxError, AttributeError):
        return None


def _written(given: Any, acts: bool) -> dict[str, Any]:
    kind = getattr(given, "kind", type(given).__name__)
    if kind == "Box":
        return _box(given, acts)
    if kind == "Discrete" and int(getattr(given, "start", 0)) == 0:
        return {"discrete": int(given.n)}
    if kind == "MultiDiscrete":
        return {"multi_discrete": _plain(given.nvec)}
    if kind == "MultiBinary":
        sizes = _plain(given.n)
        return {"multi_binary": sizes if isinstance(sizes, list) else [sizes]}
    if kind == "Dict":
        return {"dict": {name: _written(part, acts) for name, part in given.spaces.items()}}
    if kind == "Tuple":
        return {"tuple": [_written(part, acts) for part in given.spaces]}
    raise ValueError(kind)


def _box(given: Any, acts: bool) -> dict[str, Any]:
    name = str(getattr(given.dtype, "name", given.dtype))
    name = _DTYPES.get(name, name)
    found: dict[str, Any] = {"box": [int(n) for n in given.shape]}
    if name != "float32":
        found["dtype"] = name
    if acts and name == "float32":
        for bound, none in (("low", -math.inf), ("high", math.inf)):
            numbers = _plain(getattr(given, bound))
            flat = _flat(numbers)
            if set(flat) - {none}:
                found[bound] = flat[0] if len(set(flat)) == 1 else numbers
    return found


def _plain(x: Any) -> Any:
    x = x.tolist() if hasattr(x, "tolist") else x
    return [_plain(part) for part in x] if isinstance(x, Sequence) else x


def _flat(x: Any) -> list[Any]:
    return [number for part in x for number in _flat(part)] if isinstance(x, list) else [x]


def _parsed(text: str) -> Any:
    """Returns a stand-in of a Gymnasium space for `_written`. Raises ValueError, SyntaxError: the text is not a space.

    >>> vars(_parsed("Discrete(2)"))
    {'kind': 'Discrete', 'n': 2}
    """
    text = re.sub(r"""['"]?(\w+)['"]?\s*:\s*(?=[A-Z])""", r"\1=", text.strip())  # Dict('a': Box(...))
    text = re.sub(r"(?<=[\w.\]])\s+(?=[-\d\[in])", ", ", text)  # arrays as numpy prints them
    return _value(ast.parse(text, mode="eval").body)


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str()):
            return node.value
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.Tuple() | ast.List():
            return [_value(part) for part in node.elts]
        case ast.Name(id="inf"):
            return math.inf
        case ast.Name():
            return node.id
        case ast.Call(func=ast.Name(id=kind)):
            named = {str(part.arg): _value(part.value) for part in node.keywords}
            return _stand_in(kind, [_value(part) for part in node.args], named)
    raise ValueError(ast.dump(node))


def _stand_in(kind: str, args: list[Any], named: dict[str, Any]) -> Any:
    made: dict[str, Any] = {"kind": kind}
    if kind == "Box" and any(isinstance(x, list) for x in args[2:3]):
        made |= {"low": args[0], "high": args[1], "shape": args[2], "dtype": args[3] if len(args) > 3 else "float32"}
    elif kind == "Box":  # as Gym wrote it once: its shape alone
        shape = args[0] if args and isinstance(args[0], list) else args
        made |= {"low": -math.inf, "high": math.inf, "shape": shape, "dtype": "float32"}
    elif kind == "Dict":
        made["spaces"] = named
    elif kind == "Tuple":
        made["spaces"] = args[0] if len(args) == 1 and isinstance(args[0], list) else args
    elif kind in ("Discrete", "MultiBinary", "MultiDiscrete"):
        made |= {"nvec" if kind == "MultiDiscrete" else "n": args[0], **named}
    else:
        raise ValueError(kind)
    return types.SimpleNamespace(**made)
