"""The directory of an export: files written beside each other, and nothing of anybody else's overwritten."""

import json
from collections.abc import Mapping
from pathlib import Path

from jrl.errors import InputError
from jrl.fields.paths import resolve

ABOUT = "policy.json"  # names the other files of an export
KIND = "jrl policy"  # its mark


def check_free(out: Path) -> None:
    """Raises InputError if `out` cannot be made, or holds anything that is not an earlier export."""
    resolve(out, "--out", "new directory")
    try:
        names = {path.name for path in out.iterdir()} if out.exists() else set()
        foreign = sorted(names - {"__pycache__", *_exported(out)})  # Python leaves that where a module is imported
    except OSError as e:
        raise InputError(f"--out: cannot write to {out}: {e.strerror}: name another directory") from e
    if foreign:
        some = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise InputError(f"--out: {out} holds {some}, which is no export of jrl's: name another directory")


def write(out: Path, files: Mapping[str, bytes]) -> None:
    """Puts `files`, ABOUT among them, in place of an earlier export.

    All are written before the first one takes its name; ABOUT comes last, so that a directory with it is whole.

    Raises:
      InputError: as `check_free`, or the disk is full; then the earlier export is still there.
    """
    check_free(out)
    partial = {name: out / f"{name}.partial" for name in sorted(files, key=lambda name: name == ABOUT)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:
            for name, path in partial.items():
                path.write_bytes(files[name])
            for name in _exported(out):
                (out / name).unlink(missing_ok=True)
            for name, path in partial.items():
                path.replace(out / name)
        finally:
            for path in partial.values():
                path.unlink(missing_ok=True)
    except OSError as e:
        raise InputError(f"--out: cannot write to {out}: {e.strerror}: name another directory") from e


def _exported(out: Path) -> list[str]:
    """Returns the files of an earlier export, ABOUT first; none if there is not one."""
    try:
        about = json.loads((out / ABOUT).read_text())
        files = about["files"]
        if about["kind"] != KIND or any(Path(name).name != name for name in files):
            return []
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [ABOUT, *files]
