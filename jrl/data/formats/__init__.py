"""File formats of data sets, each a module.

A format whose data sets are independent files has `SUFFIXES`, `read_files(paths) -> EpisodeStore` and
`write_file(store, path, compress)`; `NESTED` if the files may be in subdirectories. A format whose data sets are
directories has `is_data_set(directory)`, `read(directory)` and `write(store, directory, compress)`. No reader executes
content of a file.
"""

import dataclasses
import glob
import importlib
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.data.formats import files
from jrl.data.store import EpisodeStore, concatenated
from jrl.errors import InputError
from jrl.fields.paths import resolve, resolve_glob, unwritable

NAMES = ("jrl", "minari", "d4rl", "rllib-json", "rllib-parquet")  # in configs and commands
_SHIPPED_DATA = Path("runs", "data")  # directory of the data sets of shipped configs
_MAKE_DATA = Path(__file__).parents[3] / "scripts" / "make_data.py"  # makes them; an installed package has no scripts
FILE_FORMATS = ("jrl", "d4rl", "rllib-json", "rllib-parquet")  # formats of independent files


def load_format(name: str) -> Any:
    """Returns the module of a format. Raises InputError: unknown format."""
    if name not in NAMES:
        raise InputError(f"data format {name!r}: expected one of {', '.join(NAMES)}")
    return importlib.import_module(f"jrl.data.formats.{'shards' if name == 'jrl' else name.replace('-', '_')}")


def read(
    paths: str | Path | Sequence[str | Path], format: str | None = None, where: Mapping[str, str | int] | None = None
) -> EpisodeStore:
    """Returns one or several data sets as one store.

    Args:
      paths: files, directories of files, or globs; episodes have the order of the paths.
      format: format of `NAMES`; None: found by each path.
      where: labels with the values of the episodes to read, such as `{"policy": "main"}`; None: all episodes.
    Raises:
      InputError: a path does not exist, has an unknown format, or is damaged; names the file and a fix.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given:
        raise InputError("data: expected at least one path, got none")
    stores = []
    for name in given:
        with files.reading(name):
            stores += _read_stores(find_paths(name), format)
    with files.reading(given[0]):
        store = concatenated(stores)
    store = _with_path(store, str(given[0]) if len(given) == 1 else f"{given[0]} and {len(given) - 1} more")
    return store.where(where) if where else store


def _with_path(store: EpisodeStore, name: str) -> EpisodeStore:
    return dataclasses.replace(store, meta={**store.meta, "path": name})


def find_paths(path: str | Path) -> list[Path]:
    """Returns the existing paths of a path or glob. Raises InputError: none exists."""
    literal = resolve(path, "data", "any")
    paths = [literal] if literal.exists() else sorted(glob.glob(resolve_glob(path, "data"), recursive=True))
    if not paths:
        raise InputError(f"data: {path} does not exist: {_suggest_path(literal)}")
    return [resolve(p, "data", "any") for p in paths]


def _suggest_path(path: Path) -> str:
    name, _, kind = path.name.partition("-")
    if path.parent.parts[-2:] != _SHIPPED_DATA.parts or not kind.isalpha():
        return "give a file, a directory of files, or a glob"
    make = f"make it with `python {os.path.relpath(_MAKE_DATA)} {name} --kinds {kind} --out {path.parent}`, or "
    return make * _MAKE_DATA.is_file() + f"record one with `python -m jrl.data record RUN --out {path}`"


def _list_files(path: Path, kind: Any) -> list[Path]:
    """Returns the files of a format, given its module: the path itself, or the directory's files by name."""
    if not path.is_dir():  # without devices and pipes: reading might not end
        return [path] if path.is_file() else []
    # hidden files are unfinished files of a killed process
    is_file = lambda p: p.is_file() and p.name.endswith(tuple(kind.SUFFIXES)) and not p.name.startswith(".jrl-")
    return sorted(filter(is_file, path.iterdir())) or (
        sorted(filter(is_file, path.rglob("*"))) if getattr(kind, "NESTED", False) else []
    )


def find_format(path: Path) -> str:
    """Returns the format of a file or directory. Raises InputError: unknown format."""
    if path.is_dir():
        for name in NAMES:
            if name not in FILE_FORMATS and load_format(name).is_data_set(path):
                return name
    for name in FILE_FORMATS:
        if _list_files(path, load_format(name)) and (
            path.is_dir() or path.name.endswith(tuple(load_format(name).SUFFIXES))
        ):
            return name
    endings = ", ".join(f"{name} ({', '.join(load_format(name).SUFFIXES)})" for name in FILE_FORMATS)
    raise InputError(f"data: unknown format of {path}: expected files of {endings}, or a Minari directory")


def _read_stores(paths: Sequence[Path], format: str | None) -> list[EpisodeStore]:
    stores: list[EpisodeStore] = []
    for name, same in itertools.groupby(paths, lambda path: format or find_format(path)):
        kind, found = load_format(name), []
        for path in same:
            if name not in FILE_FORMATS:
                stores.append(_with_path(kind.read(path), str(path)))
            elif here := _list_files(path, kind):
                found += here
            else:
                raise InputError(f"data: {path} has no file of the format {name} ({', '.join(kind.SUFFIXES)})")
        stores += [kind.read_files(found)] if found else []
    return stores


def write(store: EpisodeStore, path: str | Path, format: str = "jrl", *, compress: bool = True) -> Path:
    """Writes a data set and returns its path.

    Args:
      path: new directory; for a format of `FILE_FORMATS` a new file, or the directory of a new file data.SUFFIX.
      format: format of `NAMES`.
      compress: whether to compress the arrays.
    Raises:
      InputError: the path exists, or the format cannot express the store.
    """
    kind, path = load_format(format), resolve(path, "data")
    if format in FILE_FORMATS and not path.name.endswith(tuple(kind.SUFFIXES)):
        path = path / f"data{kind.SUFFIXES[0]}"
    path = resolve(path, "data", "new file" if format in FILE_FORMATS else "new directory")
    if path.exists():
        raise InputError(f"data: {path} exists: choose another path, or remove it")
    try:
        (kind.write_file if format in FILE_FORMATS else kind.write)(store, path, compress=compress)
    except OSError as e:
        raise unwritable(path, "data", e) from e
    return path
