"""Trained policies that come with jrl: `entries` lists them, `extract` writes one as a run directory.

    jrl zoo list
    jrl zoo play cartpole
    jrl zoo get cartpole --out runs/cartpole

An entry is a zip file of a run directory: `config.yaml` and one checkpoint, which jrl evaluates, records, exports and
trains further as any other. `entries.json` holds its measured results. `scripts/zoo.py` adds an entry.
"""

import difflib
import json
import zipfile
from pathlib import Path
from typing import Any

from jrl.errors import InputError, shown

HERE = Path(__file__).parent


def entries() -> dict[str, dict[str, Any]]:
    """Returns the entries by name.

    An entry has: `algorithm`, `env` (id), `env_steps` (steps of training), `return` and `return_std` (mean and
    deviation over `episodes` episodes of evaluation), `seed`, `needs` (an extra to install, or null).
    """
    return json.loads((HERE / "entries.json").read_text(encoding="utf-8"))


def extract(name: str, directory: Path) -> None:
    """Writes entry `name` as a new run directory.

    Raises:
      InputError: there is no such entry, or `directory` exists and is not empty.
    """
    check_name(name)
    if directory.exists() and any(directory.iterdir()):
        raise InputError(f"--out: {directory} is not empty: choose another directory")
    with zipfile.ZipFile(HERE / f"{name}.zip") as file:
        file.extractall(directory)


def check_name(name: str) -> None:
    """Raises InputError if there is no entry `name`."""
    known = entries()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(known)}"
        raise InputError(f"zoo: no policy has the name {shown(name)}: {hint}")
