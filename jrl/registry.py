"""User classes and functions by name: `package.module:name`, or a registered name.

    register("my-corridor", make_corridor)        # then env.id my-corridor
    load("my_project.noise:explore", "algo.exploration.path")

A config holds only names, so that it can be written to a file. `reference` returns the name of an object. An object
that no other process could import (defined in a notebook or inside a function) is registered. `find_registered` and
`install` send such objects to the other processes of a run.
"""

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.errors import InputError, did_you_mean, short

_registered: dict[str, Any] = {}


def register(name: str, found: Any) -> None:
    """Registers `found` as `name`; replaces an earlier object of that name."""
    _registered[name] = found


def registered(name: str) -> Any | None:
    """Returns the object registered as `name`; None if there is none."""
    return _registered.get(name)


def reference(found: Any) -> str:
    """Returns a name by which `load` finds this class or function. A string is returned as is."""
    if isinstance(found, str):
        return found
    for known_name, known in _registered.items():
        if known is found:
            return known_name
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    here = sys.modules.get(module or "")
    if module not in (None, "__main__") and name and "." not in name and getattr(here, name, None) is found:
        return f"{module}:{name}"
    base = f"local:{name or type(found).__name__}".replace("<locals>.", "")
    name, count = base, 1
    while name in _registered:
        count += 1
        name = f"{base}-{count}"
    register(name, found)
    return name


def all_registered() -> dict[str, Any]:
    """Returns all registered objects by name, for `install` in another process."""
    return dict(_registered)


def find_registered(tree: Any) -> dict[str, Any]:
    """Returns the registered objects that strings in nested data name, for a process that receives this config."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    tree = getattr(tree, "categories", tree)  # tune.choice of Ray Tune
    if isinstance(tree, list | tuple):
        return {name: found for part in tree for name, found in find_registered(part).items()}
    return {tree: _registered[tree]} if isinstance(tree, str) and tree in _registered else {}


def install(found: Mapping[str, Any]) -> None:
    """Registers the objects of `all_registered` or `find_registered` of another process."""
    _registered.update(found)


def import_module(name: str, what: str) -> Any:
    """Imports a module by its dotted name. Any failure is an InputError whose message begins with `what`."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise InputError(f"{what}: expected a module name, got {short(name)}: use package.module, letters and dots")
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise InputError(
            f"{what}: {name} cannot be imported ({str(e)[:200]}): start the command in the module's directory, or "
            "install the module"
        ) from e
    except (Exception, SystemExit) as e:
        frames = traceback.extract_tb(e.__traceback__)
        place = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else name
        reason = f"{type(e).__name__}: {str(e)[:200]}"
        raise InputError(f"{what}: {name} cannot be imported: {reason} ({place})") from e


def load(path: str, key: str) -> Any:
    """Loads a class or function by name.

    Args:
      path: package.module:name, package.module.name, or a registered name.
      key: config key, for errors.
    Raises:
      InputError: no such class or function; names the key and similar names.

    >>> load("math:sqrt", "algo.exploration.path")(9)
    3.0
    """
    if path in _registered:
        return _registered[path]
    if path.startswith("local:"):
        raise InputError(
            f"{key}: {path} was defined in another process and cannot be imported: move it into a module and use "
            "package.module:name"
        )
    module_name, colon, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not (colon and module_name and name):
        hint = did_you_mean(path, _registered)
        raise InputError(f"{key}: expected package.module:name, such as my_project.mine:fn, got {short(path)}{hint}")
    module = import_module(module_name, f"{key} {short(path)[1:-1]}")
    found = getattr(module, name, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        hint = did_you_mean(name, names) or f": it has {', '.join(names[:20]) or 'none'}"
        raise InputError(f"{key} {short(path)[1:-1]}: {module_name} has no function or class {short(name)[1:-1]}{hint}")
    return found


def check_call(function: Any, key: str, arguments: Sequence[str], options: Mapping[str, Any] | None = None) -> None:
    """Raises InputError unless a user's function can be called with so many arguments and these options.

    Args:
      key: config key and value, for errors.
      arguments: names of the arguments, for errors.
      options: keyword arguments.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some C functions have no signature
        return
    try:
        signature.bind(*arguments, **(options or {}))
    except TypeError as e:
        call = ", ".join((*arguments, *(options or {})))
        raise InputError(f"{key}: it takes {signature} and cannot be called as ({call}): {e}") from e


def class_path(text: str) -> str | None:
    """Returns `package.module:Name` for a dotted path or a printed class; None if no process could import it.

    >>> class_path("<class 'my_project.envs.Corridor'>"), class_path("my_project.envs:Corridor"), class_path("<lambda>")
    ('my_project.envs:Corridor', 'my_project.envs:Corridor', None)
    """
    found = re.fullmatch(r"\s*(?:<class ')?([A-Za-z_][\w.]*?)[.:]([A-Za-z_]\w*)(?:'>)?\s*", text)
    if found is None or found[1].startswith("__main__"):
        return None
    return f"{found[1]}:{found[2]}"


def importable_name(value: Any) -> str | None:
    """Returns the name by which `load` finds a class, a function, or the object that a string names; None: no name."""
    if isinstance(value, str) and registered(value) is None:
        return class_path(value)
    return reference(value) if isinstance(value, str) or callable(value) else None
