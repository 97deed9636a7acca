"""Which runs a population has, and where they are: `members/00`, `members/01`, ... of its directory."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl.errors import InputError
from jrl.host import files
from jrl.report.runs import MEMBERS
from jrl.settings import config, plan
from jrl.settings.config import RunConfig

_LIST = "population.json"


class Member(NamedTuple):
    """One run of a population."""

    name: str
    config: RunConfig  # whose run.out is the member's directory
    changed: dict[str, Any]  # dotted key -> value, what differs between members

    @property
    def directory(self) -> Path:
        """Where the member's run directory is."""
        assert self.config.run.out is not None
        return Path(self.config.run.out)


def of(cfg: RunConfig, directory: Path, changes: Sequence[Mapping[str, Any]]) -> list[Member]:
    """Makes the members of a population.

    Args:
      cfg: what they have in common.
      directory: of the population.
      changes: of each, values by dotted key.
    Raises:
      InputError: a key or a value that the config does not take.
    """
    width = max(2, len(str(len(changes) - 1)))
    common, found = config.to_dict(cfg), []
    for i, changed in enumerate(changes):
        name = f"{i:0{width}}"
        out = directory / MEMBERS / name
        data = common
        for key, value in {**changed, "run.out": str(out)}.items():
            data = _with(data, key.split("."), value)
        found.append(Member(name, config.from_dict(data), dict(changed)))
    return found


def _with(data: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A nested mapping with one value changed."""
    first, *rest = path
    return {**data, first: _with(data.get(first) or {}, rest, value) if rest else value}


def write(cfg: RunConfig, directory: Path, members: Sequence[Member]) -> None:
    """Writes what the population is, config.yaml and population.json, so that it can be gone on with."""
    directory.mkdir(parents=True, exist_ok=True)
    config.write(dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, out=str(directory))), directory)
    files.replace(directory / _LIST, json.dumps({"members": [m.changed for m in members]}, indent=1) + "\n")


def is_complete(member: Member) -> bool:
    """Whether the run of a member has spent its budget. Raises InputError: its checkpoint cannot be read."""
    from jrl.run import checkpoint

    if not checkpoint.exists(member.directory):
        return False
    meta = checkpoint.read_meta(checkpoint.locate(member.directory), resumable=True)
    return bool(meta["env_steps"] >= member.config.stop[plan.counts_by(member.config)])


def is_population(directory: Path) -> bool:
    """Whether a directory is that of a population."""
    return (directory / _LIST).is_file()


def read(directory: Path) -> list[dict[str, Any]]:
    """Reads what differs between the members of a population. Raises InputError."""
    path = directory / _LIST
    try:
        found = json.loads(path.read_text())["members"]
        if isinstance(found, list) and all(isinstance(changed, dict) for changed in found):
            return found
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(f"--resume: {path} cannot be read ({e}): begin the population anew in another --out") from e
    raise InputError(f"--resume: {path} holds no list of members: begin the population anew in another --out")
