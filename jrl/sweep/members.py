"""Members of a population, and their directories: `members/00`, `members/01`, ..."""

import dataclasses
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl import config
from jrl.config import RunConfig, Sizes
from jrl.errors import InputError
from jrl.host import files, interruption
from jrl.report.runs import MEMBERS

_RECORD_FILE = "population.json"
FAILED = ("failed", interruption.NOT_FINITE)  # prefixes of a failed member's end reason


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
    """Builds the members of a population.

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


@dataclasses.dataclass
class Record:
    """Content of population.json, from which a population resumes."""

    directory: Path  # directory of the population
    member_values: list[dict[str, Any]]  # initial values of each member by dotted key
    sweep: dict[str, Any] = dataclasses.field(default_factory=dict)  # settings of the sweep; {}: only seeds differ
    rounds: list[int] = dataclasses.field(default_factory=list)  # number of members of each round of a sweep
    decisions: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # the scheduler's decisions, in order
    # member -> {why, at, stop}: criterion or fault that ended the member, its steps then, all its criteria
    ended: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def find_end_reason(self, member: MemberSpec) -> str | None:
        """Returns the criterion or fault that ended a member before its budget; None: the member trains on.

        The record is written before the last checkpoint. Without that checkpoint the member trains on, to the same end.
        """
        end = self.ended.get(member.name)
        if end is None or end["stop"] != member.config.stop or read_steps(member) < end["at"]:
            return None
        return str(end["why"])

    def add_end(self, member: MemberSpec, why: str, at: int) -> None:
        """Records a criterion or fault that ended a member at `at` steps; a checkpoint itself shows a spent budget."""
        if why.startswith(FAILED) or at < member.config.stop.get(Sizes(member.config).counts_by, math.inf):
            self.update(ended={**self.ended, member.name: {"why": why, "at": at, "stop": dict(member.config.stop)}})

    def update(self, **fields: Any) -> None:
        """Sets fields, and replaces population.json."""
        vars(self).update(fields)
        self.write()

    def write(self) -> None:
        """Replaces population.json."""
        data = {"members": self.member_values, "sweep": self.sweep, "rounds": self.rounds, "decisions": self.decisions}
        data |= {"ended": dict(sorted(self.ended.items()))}
        files.replace(self.directory / _RECORD_FILE, json.dumps(data, indent=1) + "\n")


def create_directory(cfg: RunConfig, record: Record) -> None:
    """Creates the directory of a new population. Raises InputError: the directory holds a run."""
    directory = record.directory
    if (directory / "config.yaml").exists():
        raise InputError(f"run.out: {directory} holds a run already: add --resume, or choose another --out")
    directory.mkdir(parents=True, exist_ok=True)
    config.write(dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, out=str(directory))), directory)
    record.write()


def read_steps(member: MemberSpec) -> int:
    """Returns the environment steps of a member's latest checkpoint; 0: none. Raises InputError: unreadable."""
    from jrl.run.store import checkpoint

    if not checkpoint.exists(member.directory):
        return 0
    return int(checkpoint.read_meta(checkpoint.locate(member.directory), resumable=True)["env_steps"])


def is_complete(member: MemberSpec) -> bool:
    """Returns whether a member has spent its budget. Raises InputError: its checkpoint cannot be read."""
    return read_steps(member) >= member.config.stop[Sizes(member.config).counts_by]


def is_population(directory: Path) -> bool:
    """Returns whether `directory` is the directory of a population."""
    return (directory / _RECORD_FILE).is_file()


def read_record(directory: Path) -> Record:
    """Reads population.json. Raises InputError: missing or damaged."""
    path = directory / _RECORD_FILE
    try:
        data = json.loads(path.read_text())
        more = {name: data[name] for name in ("sweep", "rounds", "decisions", "ended") if name in data}
        record = Record(directory, data["members"], **more)
        mappings = [*record.member_values, *record.decisions, record.sweep, record.ended, *record.ended.values()]
        if not (isinstance(record.member_values, list) and all(isinstance(part, dict) for part in mappings)):
            raise ValueError("expected a list of members")
        record.rounds = record.rounds or [len(record.member_values)]
        return record
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(f"--resume: {path} cannot be read ({e}): start the population in another --out") from e


def copy_checkpoint(source: MemberSpec, target: MemberSpec) -> None:
    """Replaces a member's checkpoints by the latest checkpoint of another member. Repeating the call is harmless.

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
