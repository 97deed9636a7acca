"""The paths of a config: absolute from the start, since environments may change the working directory."""

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jrl import registry
from jrl.config.datasets import SAMPLER
from jrl.config.external import ExternalConfig
from jrl.errors import InputError
from jrl.fields.paths import resolve, resolve_glob

if TYPE_CHECKING:
    from jrl.config.sections import RunConfig

_PATTERN = set("*?[")
EXTERNAL = ("spaces", "token_file", "certificate", "private_key")  # paths of that section


def resolved(cfg: "RunConfig") -> tuple["RunConfig", list[tuple[str, str]]]:
    """Returns a config with all its paths absolute, and (key, message) of each that cannot be a path."""
    faults: list[tuple[str, str]] = []

    def taken(section: Any, name: str, key: str, read: Callable[[Any, str], Any] = _path) -> Any:
        """Returns a section with one of its paths absolute."""
        given = None if section is None else getattr(section, name)
        if given is None:
            return section
        try:
            return dataclasses.replace(section, **{name: read(given, f"{key}.{name}")})
        except InputError as e:
            faults.extend((f"{key}.{name}", line) for line in e.errors)
            return section

    data = dataclasses.replace(cfg.data, output=taken(cfg.data.output, "path", "data.output"))
    data, served = taken(data, "input", "data", _inputs), cfg.external
    for name in EXTERNAL:
        served = taken(served, name, "external")
    run = taken(cfg.run, "out", "run")
    return dataclasses.replace(cfg, run=run, data=data, external=served), faults


def external(section: ExternalConfig) -> ExternalConfig:
    """Returns the section of a server alone with its paths absolute. Raises InputError: one cannot be a path."""
    given = {name: getattr(section, name) for name in EXTERNAL}
    found: dict[str, Any] = {name: _path(path, f"external.{name}") for name, path in given.items() if path is not None}
    return dataclasses.replace(section, **found)


def _path(given: Any, key: str) -> str:
    return str(resolve(given, key))


def _inputs(given: Any, key: str) -> Any:
    if isinstance(given, str):
        return _input(given, key)
    found = [_input(name, key) for name in given]
    if not isinstance(given, dict):
        return tuple(found)
    if len(set(found)) < len(found):
        twice = next(name for name in found if found.count(name) > 1)
        raise InputError(f"{key}: {' and '.join(n for n in given if _input(n, key) == twice)} are one path: give one")
    return dict(zip(found, given.values(), strict=True))


def _input(name: str, key: str) -> str:
    """Returns an input of data: an absolute glob or path, or the name of a function or of the environments."""
    if not name or name == SAMPLER or registry.registered(name) is not None:
        return name
    path = resolve(name, key)
    if ":" in name and not os.path.isabs(name) and not os.path.lexists(path):  # package.module:name
        return name
    return resolve_glob(name, key) if _PATTERN & set(name) else str(path)
