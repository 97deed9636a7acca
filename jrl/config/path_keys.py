"""The paths of a config, made absolute at once, because environments may change the working directory."""

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
_EXTERNAL = ("spaces", "token_file", "certificate", "private_key")  # paths in the section `external`


def resolve_paths(cfg: "RunConfig") -> tuple["RunConfig", list[tuple[str, str]]]:
    """Return a config with absolute paths, and (key, message) of each value that cannot be a path."""
    faults: list[tuple[str, str]] = []

    def resolve_key(section: Any, name: str, key: str, read: Callable[[Any, str], Any] = _path) -> Any:
        value = None if section is None else getattr(section, name)
        if value is None:
            return section
        try:
            return dataclasses.replace(section, **{name: read(value, f"{key}.{name}")})
        except InputError as e:
            faults.extend((f"{key}.{name}", line) for line in e.errors)
            return section

    data = dataclasses.replace(cfg.data, output=resolve_key(cfg.data.output, "path", "data.output"))
    data, external = resolve_key(data, "input", "data", _inputs), cfg.external
    for name in _EXTERNAL:
        external = resolve_key(external, name, "external")
    run = resolve_key(cfg.run, "out", "run")
    return dataclasses.replace(cfg, run=run, data=data, external=external), faults


def resolve_external(section: ExternalConfig) -> ExternalConfig:
    """Return the section `external` with absolute paths. Raises InputError: a value cannot be a path."""
    values = {name: getattr(section, name) for name in _EXTERNAL}
    paths: dict[str, Any] = {name: _path(path, f"external.{name}") for name, path in values.items() if path is not None}
    return dataclasses.replace(section, **paths)


def _path(value: Any, key: str) -> str:
    return str(resolve(value, key))


def _inputs(value: Any, key: str) -> Any:
    if isinstance(value, str):
        return _input(value, key)
    inputs = [_input(name, key) for name in value]
    if not isinstance(value, dict):
        return tuple(inputs)
    if len(set(inputs)) < len(inputs):
        twice = next(name for name in inputs if inputs.count(name) > 1)
        same = " and ".join(name for name in value if _input(name, key) == twice)
        raise InputError(f"{key}: expected different paths, got {same}, which are one path: leave one out")
    return dict(zip(inputs, value.values(), strict=True))


def _input(name: str, key: str) -> str:
    """Return an input of data: an absolute path or glob, the name of a function, or `sampler`."""
    if not name or name == SAMPLER or registry.registered(name) is not None:
        return name
    path = resolve(name, key)
    if ":" in name and not os.path.isabs(name) and not os.path.lexists(path):  # package.module:name
        return name
    return resolve_glob(name, key) if _PATTERN & set(name) else str(path)
