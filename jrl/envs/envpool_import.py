"""Import of EnvPool that defers its task families, which saves a second before the first step of a run.

`import envpool` loads the compiled library of every task family (and matplotlib), only because each package
`envpool.FAMILY` holds the `registration.py` with its ids. Here a family is loaded when its first attribute is used.
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def load() -> Any:
    """Import the module `envpool`. Raises ImportError: it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "envpool" in sys.modules:
            import envpool
        else:
            with _families_deferred():
                import envpool
    return envpool


@contextlib.contextmanager
def _families_deferred() -> Iterator[None]:
    finder = _Families()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Families(importlib.abc.MetaPathFinder):
    """Finds EnvPool's packages that have a registration."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("envpool."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None or spec.origin is None or spec.submodule_search_locations is None:
            return None
        if not (Path(spec.origin).parent / "registration.py").is_file():
            return None
        spec.loader = _Deferred(spec.loader)
        return spec


class _Deferred(importlib.abc.Loader):
    """Executes a module at the first access to a missing attribute."""

    def __init__(self, loader: importlib.abc.Loader):
        self._loader, self._lock = loader, threading.RLock()

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        def __getattr__(name: str) -> Any:
            # the interpreter looks for dunder names in every module: they must not load the family
            if not (name.startswith("__") and name.endswith("__")):
                with self._lock:
                    if module.__dict__.pop("__getattr__", None) is not None:
                        module.__loader__ = self._loader
                        if module.__spec__ is not None:
                            module.__spec__.loader = self._loader
                        try:
                            self._loader.exec_module(module)
                        except BaseException:  # keep the hook, so that the next access raises the same error
                            module.__dict__["__getattr__"] = __getattr__
                            raise
                if name in module.__dict__:
                    return module.__dict__[name]
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__dict__["__getattr__"] = __getattr__
