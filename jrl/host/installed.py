"""Versions of installed packages, and the error about a missing one."""

import functools
import importlib.metadata
import importlib.util

from jrl.errors import InputError


@functools.cache
def version(package: str) -> str | None:
    """Return the version of a package; None: not installed, or a checkout on the path."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def require(package: str, extra: str, user: str) -> None:
    """Check that an optional package is installed.

    Args:
      package: top-level module.
      extra: extra of jrl that installs it.
      user: key, option or command that needs it.
    Raises:
      InputError: the package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{user}: {package} is not installed: pip install 'jrl[{extra}]'")
