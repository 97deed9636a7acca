"""Members of a population, and their directories: `members/00`, `members/01`, ..."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl import config
from jrl.config import RunConfig, Sizes
from jrl.errors import InputError
from jrl.host import files
from jrl.report.runs import MEMBERS

_RECORD_FILE = "population.json"


class MemberSpec(NamedTuple):
    """Name, config and differing values of a population's member."""

    name: str
    config: RunConfig  # its `run.out` is the member's directory
    values: dict[str, Any]  # dotted key -> value, for keys whose values differ between members
    row_extras: dict[str, Any] = {}  # noqa: RUF012  # columns added to each result row; never changed

    @property
    def directory(self) -> Path:
        """Run directory of the member."""
        assert self.config.run.out is not None
        return Path(self.config.run.out)


def build_members(cfg: RunConfig, directory: Path, values: Sequence[Mapping[str, Any]]) -> list[MemberSpec]:
    """Build the members of a population.

    Args:
      cfg: config that members share.
      directory: directory of the population.
      values: dotted key -> value of each member.
    Raises:
      InputError: unknown key or invalid value.
    """
    width = max(2, len(str(len(values) - 1)))
    common, members = config.to_dict(cfg), []
    for i, own in enumerate(values):
        name = f"{i:0{width}}"
        data = common
        for key, value in {**own, "run.out": str(directory / MEMBERS / name)}.items():
            data = _set_value(data, key.split("."), value)
        members.append(MemberSpec(name, config.from_dict(data), dict(own)))
    return members


def _set_value(data: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    first, *rest = path
    return {**data, first: _set_value(data.get(first) or {}, rest, value) if rest else value}


class EndLog(NamedTuple):
    """Functions that look up and record why members ended before their budget."""

    find_reason: Callable[[MemberSpec], str | None]  # None: the member has not ended
    add: Callable[[MemberSpec, str, int], None]  # member, reason, environment steps; called before the last checkpoint


class Record(NamedTuple):
    """Content of population.json, from which a population resumes."""

    member_values: list[dict[str, Any]]  # initial values of each member by dotted key
    sweep: dict[str, Any]  # settings of the sweep; {} for a population of seeds
    rounds: list[int]  # number of members of each round of a sweep
    decisions: list[dict[str, Any]]  # decisions of the scheduler, in order
    # member -> {why, at, stop}: criterion or fault that ended the member, its steps then, all its criteria
    ended: dict[str, dict[str, Any]] = {}  # noqa: RUF012  # never changed

    def find_end_reason(self, member: MemberSpec) -> str | None:
        """Return the criterion or fault that ended a member; None: the member trains on.

        The record is written before the last checkpoint. Without that checkpoint the member trains on, to the same end.
        """
        end = self.ended.get(member.name)
        if end is None or end["stop"] != member.config.stop or read_steps(member) < end["at"]:
            return None
        return str(end["why"])

    def write(self, directory: Path) -> None:
        """Replace population.json in `directory`."""
        data = {"members": self.member_values, "sweep": self.sweep, "rounds": self.rounds, "decisions": self.decisions}
        data |= {"ended": dict(sorted(self.ended.items()))}
        files.replace(directory / _RECORD_FILE, json.dumps(data, indent=1) + "\n")


def create_directory(cfg: RunConfig, directory: Path, record: Record) -> None:
    """Create the directory of a new population. Raises InputError: the directory holds a run."""
    if (directory / "config.yaml").exists():
        raise InputError(f"run.out: {directory} holds a run already: add --resume, or choose another --out")
    directory.mkdir(parents=True, exist_ok=True)
    config.write(dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, out=str(directory))), directory)
    record.write(directory)


def read_steps(member: MemberSpec) -> int:
    """Return the environment steps of a member's latest checkpoint; 0: no checkpoint. Raises InputError: unreadable."""
    from jrl.run.store import checkpoint

    if not checkpoint.exists(member.directory):
        return 0
    return int(checkpoint.read_meta(checkpoint.locate(member.directory), resumable=True)["env_steps"])


def is_complete(member: MemberSpec) -> bool:
    """Return whether a member has spent its budget. Raises InputError: its checkpoint cannot be read."""
    return read_steps(member) >= member.config.stop[Sizes(member.config).counts_by]


def is_population(directory: Path) -> bool:
    """Return whether `directory` is the directory of a population."""
    return (directory / _RECORD_FILE).is_file()


def read_record(directory: Path) -> Record:
    """Read population.json. Raises InputError: missing or damaged."""
    path = directory / _RECORD_FILE
    try:
        data = json.loads(path.read_text())
        record = Record(data["members"], data.get("sweep", {}), data.get("rounds", []), data.get("decisions", []))
        record = record._replace(ended=data.get("ended", {}))
        mappings = [*record.member_values, *record.decisions, record.sweep, record.ended, *record.ended.values()]
        if not (isinstance(record.member_values, list) and all(isinstance(part, dict) for part in mappings)):
            raise ValueError("expected a list of members")
        return record._replace(rounds=record.rounds or [len(record.member_values)])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(f"--resume: {path} cannot be read ({e}): start the population in another --out") from e


def copy_checkpoint(source: MemberSpec, target: MemberSpec) -> None:
    """Replace a member's checkpoints by the latest checkpoint of another member. Repeating the call is harmless.

    Raises:
      InputError: the source has no checkpoint.
    """
    from jrl.run.store import checkpoint

    saved = checkpoint.locate(source.directory)
    path = target.directory / saved.parent.name / saved.name
    partial = path.with_name(f"{path.name}.unfinished")  # the checkpointer deletes directories of this name
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(saved, partial)
    meta = checkpoint.read_meta(partial)
    checkpoint.write_meta(partial, {**meta, "config": config.to_dict(target.config)})
    for other in path.parent.glob("[0-9]*"):  # later checkpoints belong to the replaced run
        if other.name.isdigit() and int(other.name) >= int(path.name):
            shutil.rmtree(other)
    partial.rename(path)
