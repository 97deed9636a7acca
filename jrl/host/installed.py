"""Versions of installed packages."""

import functools
import importlib.metadata


@functools.cache
def version(package: str) -> str | None:
    """Returns the version of a package; None where it is not installed, jrl's too in a checkout that is on the path."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
