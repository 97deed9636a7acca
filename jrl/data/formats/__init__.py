"""Formats of files of experience, a module each, and the recognition of a path's format.

A module of files has `SUFFIXES`, `read_files(paths) -> EpisodeStore` and `write_file(store, path, compress)`, and
`NESTED` where a directory has the files in directories of its own. A module of directories has `is_one(directory)`,
`read(directory)` and `write(store, directory, compress)`. No reader executes anything that stands in a file.
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
_SETS = Path("runs", "data")  # where shipped configs look for theirs
_MAKER = Path(__file__).parents[3] / "scripts" / "make_data.py"  # makes those; an installed package has no scripts
OF_FILES = ("jrl", "d4rl", "rllib-json", "rllib-parquet")  # a run can write them file by file


def module(name: str) -> Any:
    """Returns the module of a format. Raises InputError: there is none of that name."""
    if name not in NAMES:
        raise InputError(f"data format {name!r}: expected one of {', '.join(NAMES)}")
    return importlib.import_module(f"jrl.data.formats.{'shards' if name == 'jrl' else name.replace('-', '_')}")


def read(
    paths: str | Path | Sequence[str | Path], format: str | None = None, where: Mapping[str, str | int] | None = None
) -> EpisodeStore:
    """Reads data sets as one.

    Args:
      paths: of files, directories of files, or globs of either; several are laid end to end in their order.
      format: one of `NAMES`; None: as each path shows.
      where: labels and the values that episodes have to have, such as `{"policy": "main"}`; None: all episodes.
    Raises:
      InputError: nothing is there, it is of no known format, or something in it is wrong: the file and the mend.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given:
        raise InputError("data: no path is given")
    stores = []
    for name in given:
        with files.reading(name):
            stores += _stores(located(name), format)
    with files.reading(given[0]):
        store = concatenated(stores)
    store = _named(store, str(given[0]) if len(given) == 1 else f"{given[0]} and {len(given) - 1} more")
    return store.where(where) if where else store


def _named(store: EpisodeStore, name: str) -> EpisodeStore:
    return dataclasses.replace(store, meta={**store.meta, "path": name})


def located(path: str | Path) -> list[Path]:
    """Returns the paths that a path or a glob stands for. Raises InputError: there are none."""
    one = resolve(path, "data", "any")
    found = [one] if one.exists() else [Path(p) for p in sorted(glob.glob(resolve_glob(path, "data"), recursive=True))]
    if not found:
        raise InputError(f"data: {path} does not exist: {_instead(one)}")
    return [resolve(p, "data", "any") for p in found]


def _instead(path: Path) -> str:
    name, _, kind = path.name.partition("-")
    if path.parent.parts[-2:] != _SETS.parts or not kind.isalpha():
        return "give a file, a directory of files, or a glob of such"
    make = f"make it with `python {os.path.relpath(_MAKER)} {name} --kinds {kind} --out {path.parent}`, or "
    return make * _MAKER.is_file() + f"record one with `python -m jrl.data record RUN --out {path}`"


def _files_of(path: Path, kind: Any) -> list[Path]:
    """Returns the files of a format, given its module: the path itself, or those in the directory, by name."""
    if not path.is_dir():  # neither a device nor a pipe is a file, and reading one might not end
        return [path] if path.is_file() else []
    # hidden are files that a killed process was writing
    is_file = lambda p: p.is_file() and p.name.endswith(tuple(kind.SUFFIXES)) and not p.name.startswith(".jrl-")
    return sorted(filter(is_file, path.iterdir())) or (
        sorted(filter(is_file, path.rglob("*"))) if getattr(kind, "NESTED", False) else []
    )


def format_of(path: Path) -> str:
    """Returns the format of a file or directory. Raises InputError: it is of none."""
    if path.is_dir():
        for name in NAMES:
            if name not in OF_FILES and module(name).is_one(path):
                return name
    for name in OF_FILES:
        if _files_of(path, module(name)) and (path.is_dir() or path.name.endswith(tuple(module(name).SUFFIXES))):
            return name
    endings = ", ".join(f"{name} ({', '.join(module(name).SUFFIXES)})" for name in OF_FILES)
    raise InputError(f"data: {path} is of no format that is known: expected files of {endings}, or a Minari directory")


def _stores(paths: Sequence[Path], format: str | None) -> list[EpisodeStore]:
    stores: list[EpisodeStore] = []
    for name, same in itertools.groupby(paths, lambda path: format or format_of(path)):
        kind, found = module(name), []
        for path in same:
            if name not in OF_FILES:
                stores.append(_named(kind.read(path), str(path)))
            elif here := _files_of(path, kind):
                found += here
            else:
                raise InputError(f"data: {path} holds no file of the format {name} ({', '.join(kind.SUFFIXES)})")
        stores += [kind.read_files(found)] if found else []
    return stores


def write(store: EpisodeStore, path: str | Path, format: str = "jrl", *, compress: bool = True) -> Path:
    """Writes a data set; of formats of files as one file, data.SUFFIX, in the directory `path` unless it names a file.

    Returns:
      The path of what was written.
    Raises:
      InputError: it exists, or the format cannot hold what the store has.
    """
    kind, path = module(format), resolve(path, "data")
    if format in OF_FILES and not path.name.endswith(tuple(kind.SUFFIXES)):
        path = path / f"data{kind.SUFFIXES[0]}"
    path = resolve(path, "data", "new file" if format in OF_FILES else "new directory")
    if path.exists():
        raise InputError(f"data: {path} exists: choose another path, or remove it")
    try:
        (kind.write_file if format in OF_FILES else kind.write)(store, path, compress=compress)
    except OSError as e:
        raise unwritable(path, "data", e) from e
    return path
