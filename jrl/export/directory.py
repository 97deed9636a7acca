"""Directory of an export. Files that are not part of an export are never overwritten."""

import json
from collections.abc import Mapping
from pathlib import Path

from jrl.errors import InputError, format_names
from jrl.fields.paths import resolve

ABOUT = "policy.json"  # lists the other files of an export
KIND = "jrl policy"  # marks ABOUT


def check_free(out: Path) -> None:
    """Raises InputError if `out` cannot be created, or holds files that are not an earlier export."""
    resolve(out, "--out", "new directory")
    try:
        names = {path.name for path in out.iterdir()} if out.exists() else set()
        foreign = sorted(names - {"__pycache__", *_list_files(out)})  # importing policy.py creates __pycache__
    except OSError as e:
        raise InputError(f"--out: cannot write to {out}: {e.strerror}: name another directory") from e
    if foreign:
        raise InputError(f"--out: {out} holds {format_names(foreign, 3)}, not an export of jrl: name another directory")


def write(out: Path, files: Mapping[str, bytes]) -> None:
    """Writes `files` instead of an earlier export.

    All files are written before the first is renamed. ABOUT is renamed last, so a directory with ABOUT is complete.

    Args:
      out: directory of the export.
      files: name -> content, including ABOUT.
    Raises:
      InputError: as `check_free`, or the disk is full; the earlier export stays.
    """
    check_free(out)
    partial = {name: out / f"{name}.partial" for name in sorted(files, key=lambda name: name == ABOUT)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:
            for name, path in partial.items():
                path.write_bytes(files[name])
            for name in _list_files(out):
                (out / name).unlink(missing_ok=True)
            for name, path in partial.items():
                path.replace(out / name)
        finally:
            for path in partial.values():
                path.unlink(missing_ok=True)
    except OSError as e:
        raise InputError(f"--out: cannot write to {out}: {e.strerror}: name another directory") from e


def _list_files(out: Path) -> list[str]:
    """Returns the files of an earlier export, ABOUT first; []: no export."""
    try:
        about = json.loads((out / ABOUT).read_text())
        files = about["files"]
        if about["kind"] != KIND or any(Path(name).name != name for name in files):
            return []
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [ABOUT, *files]
