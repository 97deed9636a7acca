"""Members of a population, and their directories: `members/00`, `members/01`, ..."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl import config
from jrl.config import RunConfig, plan
from jrl.errors import InputError
from jrl.host import files
from jrl.report.runs import MEMBERS

_LIST = "population.json"


class Member(NamedTuple):
    """One member of a population."""

    name: str
    config: RunConfig  # whose run.out is the member's directory
    changed: dict[str, Any]  # dotted key -> value, what differs between members
    told: dict[str, Any] = {}  # noqa: RUF012  # what each of its rows has besides; never changed

    @property
    def directory(self) -> Path:
        """Returns the run directory of the member."""
        assert self.config.run.out is not None
        return Path(self.config.run.out)


def of(cfg: RunConfig, directory: Path, changes: Sequence[Mapping[str, Any]]) -> list[Member]:
    """Makes the members of a population of what they have in common and of each one's values by dotted key.

    Raises InputError: a key or a value that the config does not take.
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
    first, *rest = path
    return {**data, first: _with(data.get(first) or {}, rest, value) if rest else value}


class Ends(NamedTuple):
    """Members that ended by a criterion of their own: who did, and a function to note it."""

    why: Callable[[Member], str | None]  # None: it goes on
    note: Callable[[Member, str, int], None]  # member, why, after how many steps; before its last checkpoint


class Record(NamedTuple):
    """Record of a population, kept in population.json, so that it can be resumed."""

    changes: list[dict[str, Any]]  # of each member what differs, as it began
    sweep: dict[str, Any]  # the settings of the sweep; {} of seeds alone
    rounds: list[int]  # number of members of each round of a sweep
    decisions: list[dict[str, Any]]  # of its scheduler, in the order in which they were made
    # member -> {why, at, stop}: the criterion of its own or the fault that ended it, its steps then, all its criteria
    ended: dict[str, dict[str, Any]] = {}  # noqa: RUF012  # never changed

    def why_ended(self, member: Member) -> str | None:
        """Says by which criterion of its own, or by which fault, the run of a member ended; None: it goes on.

        What is kept is written before the last checkpoint: without that one the member goes on, to the same end.
        """
        own = self.ended.get(member.name)
        if own is None or own["stop"] != member.config.stop or reached(member) < own["at"]:
            return None
        return str(own["why"])

    def write(self, directory: Path) -> None:
        """Replaces what is kept."""
        kept = {"members": self.changes, "sweep": self.sweep, "rounds": self.rounds, "decisions": self.decisions}
        kept |= {"ended": dict(sorted(self.ended.items()))}
        files.replace(directory / _LIST, json.dumps(kept, indent=1) + "\n")


def begin(cfg: RunConfig, directory: Path, record: Record) -> None:
    """Writes what a population is. Raises InputError: the directory has a run already."""
    if (directory / "config.yaml").exists():
        raise InputError(f"run.out: {directory} holds a run already: add --resume, or choose another --out")
    directory.mkdir(parents=True, exist_ok=True)
    config.write(dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, out=str(directory))), directory)
    record.write(directory)


def reached(member: Member) -> int:
    """Returns the steps of a member's latest checkpoint; 0: it has none. Raises InputError: it cannot be read."""
    from jrl.run.store import checkpoint

    if not checkpoint.exists(member.directory):
        return 0
    return int(checkpoint.read_meta(checkpoint.locate(member.directory), resumable=True)["env_steps"])


def is_complete(member: Member) -> bool:
    """Returns whether a member has spent its budget. Raises InputError: its checkpoint cannot be read."""
    return reached(member) >= member.config.stop[plan.counts_by(member.config)]


def is_population(directory: Path) -> bool:
    """Returns whether a directory is that of a population."""
    return (directory / _LIST).is_file()


def read(directory: Path) -> Record:
    """Reads what is kept of a population. Raises InputError."""
    path = directory / _LIST
    try:
        found = json.loads(path.read_text())
        record = Record(found["members"], found.get("sweep", {}), found.get("rounds", []), found.get("decisions", []))
        record = record._replace(ended=found.get("ended", {}))
        mappings = [*record.changes, *record.decisions, record.sweep, record.ended, *record.ended.values()]
        if isinstance(record.changes, list) and all(isinstance(part, dict) for part in mappings):
            return record._replace(rounds=record.rounds or [len(record.changes)])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(f"--resume: {path} cannot be read ({e}): begin the population anew in another --out") from e
    raise InputError(f"--resume: {path} holds no list of members: begin the population anew in another --out")


def copied(source: Member, target: Member) -> None:
    """Replaces the checkpoints of a member by another's latest, as one of its own. May be done again.

    Raises:
      InputError: the source has none.
    """
    from jrl.run.store import checkpoint, checkpoint_json

    saved = checkpoint.locate(source.directory)
    own = target.directory / saved.parent.name / saved.name
    making = own.with_name(f"{own.name}.unfinished")  # which a checkpointer clears away
    shutil.rmtree(making, ignore_errors=True)
    shutil.copytree(saved, making)
    meta = checkpoint_json.read_meta(making)
    checkpoint_json.write(making, {**meta, "config": config.to_dict(target.config)})
    for saved_then in own.parent.glob("[0-9]*"):  # later ones are of a run that is gone back on
        if saved_then.name.isdigit() and int(saved_then.name) >= int(own.name):
            shutil.rmtree(saved_then)
    making.rename(own)
