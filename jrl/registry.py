"""The user's own classes and functions by name: `package.module:name`, or a name under which one was registered.

    register("my-corridor", make_corridor)        # then env.id my-corridor
    load("my_project.noise:explore", "algo.exploration.path")

A config holds names only, so that it can be written down. `reference` gives the name of an object; one that no other
process could import by it (it was made in a notebook, or inside a function) is registered, and travels to the
processes of this run with `find_registered` and `install`.
"""

import difflib
import importlib
import re
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from jrl.errors import InputError, short

_registered: dict[str, Any] = {}


def register(name: str, found: Any) -> None:
    """Makes `found` known as `name`, in the place of another of that name."""
    _registered[name] = found


def registered(name: str) -> Any | None:
    """Returns what was registered under that name, None for an unknown one."""
    return _registered.get(name)


def reference(found: Any) -> str:
    """Returns a name by which `load` finds this class or function; a text is one already."""
    if isinstance(found, str):
        return found
    for known_as, known in _registered.items():
        if known is found:
            return known_as
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
    """Returns all that is registered, for `install` in another process."""
    return dict(_registered)


def find_registered(tree: Any) -> dict[str, Any]:
    """Returns the registered names that the texts in nested data mention, for a process that gets this config."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    tree = getattr(tree, "categories", tree)  # a choice of Ray Tune's
    if isinstance(tree, list | tuple):
        return {name: found for part in tree for name, found in find_registered(part).items()}
    return {tree: _registered[tree]} if isinstance(tree, str) and tree in _registered else {}


def install(found: Mapping[str, Any]) -> None:
    """Registers what `all_registered` returned."""
    _registered.update(found)


def import_module(name: str, what: str) -> Any:
    """Imports the module of a dotted name. Raises InputError that begins with `what`, whatever happens meanwhile."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise InputError(f"{what}: {short(name)} is no name of a module: expected package.module, letters and dots")
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise InputError(
            f"{what}: {name} cannot be imported ({str(e)[:200]}): start the command where the module lies, or "
            "install it"
        ) from e
    except (Exception, SystemExit) as e:
        frames = traceback.extract_tb(e.__traceback__)
        at = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else name
        told = f"{type(e).__name__}: {str(e)[:200]}"
        raise InputError(f"{what}: {name} cannot be imported: {told} ({at})") from e


def load(path: str, key: str) -> Any:
    """Loads the class or function of a name.

    Args:
      path: package.module:name, package.module.name, or a registered name.
      key: of the config, for errors.
    Raises:
      InputError: there is none; names the key and what would do.

    >>> load("math:sqrt", "algo.exploration.path")(9)
    3.0
    """
    if path in _registered:
        return _registered[path]
    if path.startswith("local:"):
        raise InputError(
            f"{key}: {path} is a class or function of another process that cannot be imported: put it into a module, "
            "and name it as package.module:name"
        )
    module_name, colon, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not (colon and module_name and name):
        near = difflib.get_close_matches(path[:80], _registered, 1)
        mend = f": did you mean {near[0]}?" if near else ""
        raise InputError(f"{key}: expected package.module:name, such as my_project.mine:fn, got {short(path)}{mend}")
    module = import_module(module_name, f"{key} {short(path)[1:-1]}")
    found = getattr(module, name, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        near = difflib.get_close_matches(name[:80], names, 1)
        mend = f"did you mean {near[0]}?" if near else f"it has {', '.join(names[:20]) or 'none'}"
        raise InputError(
            f"{key} {short(path)[1:-1]}: {module_name} has no function or class {short(name)[1:-1]}: {mend}"
        )
    return found


def class_path(text: str) -> str | None:
    """Returns `package.module:Name` of a dotted path or of a printed class; None of what no process could import.

    >>> class_path("<class 'my_project.envs.Corridor'>"), class_path("my_project.envs:Corridor"), class_path("<lambda>")
    ('my_project.envs:Corridor', 'my_project.envs:Corridor', None)
    """
    found = re.fullmatch(r"\s*(?:<class ')?([A-Za-z_][\w.]*?)[.:]([A-Za-z_]\w*)(?:'>)?\s*", text)
    if found is None or found[1].startswith("__main__"):
        return None
    return f"{found[1]}:{found[2]}"


def importable_name(value: Any) -> str | None:
    """Returns the name by which `load` finds a class or function, which may itself be given; None: there is none."""
    if isinstance(value, str) and registered(value) is None:
        return class_path(value)
    return reference(value) if isinstance(value, str) or callable(value) else None
