"""`data.output`: a run writes the episodes that it collects, and a resumed one none of them twice.

Files are numbered and whole. A checkpoint has a mark beside them, in `marks/`: which files there were, and the steps of
the episodes that were under way. A run that goes on from a checkpoint takes away what was written after its mark, and
writes those steps as episodes that were cut, since its environments begin anew.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrl import spaces
from jrl.agents import Policies
from jrl.agents.policies import rollout_like
from jrl.config import algo_name
from jrl.config.datasets import OutputConfig
from jrl.config.multi_agent import LEAGUE
from jrl.data import store
from jrl.data.formats import shards
from jrl.data.writer import PREFIX, Writer
from jrl.errors import InputError, counted
from jrl.fields.paths import resolve
from jrl.host import files
from jrl.rollout.episode import Episode
from jrl.rollout.stitch import Stitch
from jrl.rollout.unroll import RAW_STEPS
from jrl.run.plan import Plan
from jrl.spaces_json import space_to_json
from jrl.types import COUNTS_STEP, NORMALIZED_OBS, POLICY_ID, Algo, EnvSpec, PyTree

# of what acting records: what is for learning alone, and memories
_UNKEPT = (NORMALIZED_OBS, RAW_STEPS, COUNTS_STEP, POLICY_ID, LEAGUE, "carry", "running_return")
_MARKS = "marks"
_LATEST = 2  # marks that stay whatever checkpoints there are: the latest checkpoint may not be whole yet


def stitch_options(policies: Policies, columns: Sequence[str] | None) -> dict[str, Any]:
    """Returns options of a Stitch whose episodes are written.

    Args:
      policies: of the run that acts.
      columns: names of what acting recorded that episodes have; None: all.
    """
    options = policies.game_options and {**policies.game_options, "policies": policies.labels}
    return {**options, "extras": functools.partial(_kept, groups=_groups(policies), columns=columns)}


def _groups(policies: Policies) -> Mapping[str, tuple[int, ...]]:
    """Returns where several policies record: name in extras -> their columns."""
    return policies.columns.extras if policies.columns else {}


def _recorded_names(extras: Mapping[str, PyTree], groups: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Returns the names of what acting recorded beside the action; of several policies what all of them recorded."""
    parts = [extras[label] for label in groups] or [extras]
    return [name for name in parts[0] if name not in _UNKEPT and all(name in part for part in parts)]


def _kept(
    extras: Mapping[str, PyTree], groups: Mapping[str, tuple[int, ...]], columns: Sequence[str] | None
) -> dict[str, PyTree]:
    if RAW_STEPS not in extras:
        raise InputError("data.output: these rollouts do not say what their environments did: leave it out")
    names = _recorded_names(extras, groups)
    names = names if columns is None else [name for name in columns if name in names]
    if not groups:
        return {name: extras[name] for name in names}
    found = {name: _joined(extras, name, groups) for name in names}
    return {name: tree for name, tree in found.items() if tree is not None}


def _joined(extras: Mapping[str, PyTree], name: str, groups: Mapping[str, tuple[int, ...]]) -> PyTree:
    """Joins what the policies recorded to one array [T, B, ...]; None where shapes or dtypes differ."""
    parts = [(own, jax.tree.leaves(extras[label][name])) for label, own in groups.items()]
    if len({tuple((x.shape[2:], x.dtype) for x in leaves) for _, leaves in parts}) > 1 or len(parts[0][1]) != 1:
        return None
    first = np.asarray(parts[0][1][0])
    blocks, width = first.shape[1] // len(parts[0][0]), sum(len(own) for own, _ in parts)
    whole = np.zeros((len(first), blocks, width, *first.shape[2:]), first.dtype)
    for own, (x,) in parts:
        whole[:, :, list(own)] = np.asarray(x).reshape(len(first), blocks, len(own), *first.shape[2:])
    return whole.reshape(len(first), -1, *first.shape[2:])


def as_data(episode: Episode, labels: Mapping[str, Any]) -> store.Episode:
    """Returns a copy of an episode as data sets have it.

    Its labels are `agent` and `policy` of several agents, those that are given, `env`, `iteration`, in which it began,
    and `begin`, the steps that it had before its first row.
    """
    named = {} if episode.agent_id is None else {"agent": episode.agent_id, "policy": episode.policy_id}
    labels = {**named, **labels, "env": episode.env_index, "begin": episode.begin, "iteration": episode.iteration}
    rows = jax.tree.map(np.array, (episode.actions, episode.rewards, episode.extras))
    action, reward, columns = rows
    return store.Episode(episode.obs, action, reward, episode.terminated, episode.truncated, columns, labels)


def directories(root: Path, spec: EnvSpec) -> list[Path]:
    """Returns the directories of the data sets: each kind of agents has one, named after the first of them."""
    return [root / name for name in spaces.kind_names(spec)]


def writers(root: Path, spec: EnvSpec, meta: Mapping[str, Any], output: OutputConfig) -> list[Writer]:
    """Makes a writer for each kind of agents, whose files say what is special about their actions."""
    options: dict[str, Any] = {"max_file_mb": output.max_file_mb, "compress": output.compress}
    return [
        Writer(where, one.observation, one.action, format=output.format, meta={**meta, **actions(one)}, **options)
        for where, one in zip(directories(root, spec), spaces.by_kind(spec), strict=True)
    ]


def actions(spec: EnvSpec) -> dict[str, Any]:
    """Returns a data set's notes on actions that are not the environment's own; {} where they are."""
    if spec.env_action is None or spec.env_action == spec.action:
        return {}
    return {"actions": "normalized", "env_action": space_to_json(spec.env_action)}


class Recorder:
    """Writes the episodes of a run's rollouts.

    Args:
      plan: of the run, with `data.output`.
      algo: that acts.
    Attributes:
      iteration: of the run, under way.
    Raises:
      InputError: columns that acting does not record.
    """

    def __init__(self, plan: Plan, algo: Algo):
        cfg = plan.cfg
        self._output: OutputConfig = cfg.data.output
        self._options = stitch_options(plan.policies, self._output.columns)
        self._spec = plan.policies.seen
        self._meta = {"env": cfg.env.id, "source": "jrl", "algo": algo_name(cfg)}
        self.iteration = 0
        self._stitches: dict[int, Stitch] = {}  # by the number of the first column
        self._writers: list[Writer] = []
        self._directories: list[Path] = []
        self._checkpoints: Path | None = None
        self._check_columns(plan, algo)

    def _check_columns(self, plan: Plan, algo: Algo) -> None:
        wanted = self._output.columns
        if not wanted:
            return
        like = rollout_like(plan, plan.spec, algo, length=1, num_envs=plan.spec.num_envs)
        known = _recorded_names(like.extras, _groups(plan.policies))
        if missing := [name for name in wanted if name not in known]:
            there = f"there are {', '.join(known)}" if known else "it records none: leave data.output.columns out"
            raise InputError(f"data.output.columns: acting records no {', '.join(missing)}: {there}")

    # ------------------------------------------------------------ beginning and end

    def begin(self, directory: Path | None, iteration: int, *, anew: bool = False) -> list[str]:
        """Opens the files.

        Args:
          directory: of the run.
          iteration: of the checkpoint that the run goes on from; 0 at its start.
          anew: at the start of a run that was begun before: what that wrote does not count.
        Returns:
          What there is to say about it.
        Raises:
          InputError: no place is given, or there are files of another run.
        """
        path = self._output.path or (directory and directory / "data")
        if path is None:
            raise InputError("data.output.path is missing: expected a directory: this run has none of its own")
        self._checkpoints = directory and directory / "checkpoints"
        root = resolve(path, "data.output.path", "new directory")
        self._directories = directories(root, self._spec)
        gone = [self._go_back(one, iteration, anew=anew) for one in self._directories]
        self._writers = writers(root, self._spec, self._meta, self._output)
        for kind, where in enumerate(self._directories):
            pending = where / _MARKS / f"{iteration}.npz"
            if pending.exists():
                for episode in shards.read_files([pending]).episodes():
                    labels = {name: label.item() for name, label in episode.labels.items()}
                    self._writers[kind].add(episode._replace(labels=labels))
        if not all((where / _MARKS / f"{iteration}.json").exists() for where in self._directories):
            self.mark(iteration)
        told = [f"data: episodes are written to {root}"]
        return [*told, *(f"data: {line}" for line in gone if line)]

    def _go_back(self, where: Path, iteration: int, *, anew: bool) -> str:
        """Removes the files that a checkpoint does not know of; returns a note on them."""
        there = {path.name: path for path in where.glob(f"{PREFIX}-*")} if where.is_dir() else {}
        mark = where / _MARKS / f"{iteration}.json"
        if iteration == 0 and not anew and there:
            raise InputError(
                f"data.output.path: {where} holds a data set already, of {counted(len(there), 'file')}: choose another "
                "path, or remove it"
            )
        if not mark.exists():
            if there and iteration:
                return f"{where} has no mark of this checkpoint: its files stay, with steps that may come twice"
            return ""
        known = set(json.loads(mark.read_text())["files"])
        later = [path for name, path in there.items() if name not in known]
        for path in later:
            path.unlink()
        for number in _numbers(where / _MARKS):
            if number > iteration:
                _remove(where / _MARKS, number)
        return f"{counted(len(later), 'file')} of steps after the checkpoint were removed from {where}" if later else ""

    def close(self) -> None:
        """Writes what is left; the episodes under way are cut."""
        for stitch in self._stitches.values():
            stitch.reset()
        for writer in self._writers:
            writer.close()

    # ------------------------------------------------------------ rollouts

    def stitch(self, source: Any, num_envs: int, worker_index: int, first: int) -> Stitch:
        """Returns the Stitch of `num_envs` columns from `first` on, whose episodes are written; for `Watch`."""
        before = self._stitches.get(first)
        if before is not None:  # of environments that are gone
            before.reset()
        write = lambda episode: self._writers[episode.kind].add(as_data(episode, {}))
        stitch = Stitch(num_envs, take=write, first=first, iteration=lambda: self.iteration, **self._options)
        self._stitches[first] = stitch
        return stitch

    # ------------------------------------------------------------ checkpoints

    def mark(self, iteration: int) -> None:
        """Marks what is written for a run that resumes here: closes the files, and keeps what is not written."""
        under_way = [episode for _, stitch in sorted(self._stitches.items()) for episode in stitch.under_way()]
        for kind, (where, writer) in enumerate(zip(self._directories, self._writers, strict=True)):
            writer.close()
            marks = where / _MARKS
            marks.mkdir(exist_ok=True)
            pending = marks / f"{iteration}.npz"
            pending.unlink(missing_ok=True)
            if episodes := [as_data(episode, {}) for episode in under_way if episode.kind == kind]:
                one = spaces.by_kind(self._spec)[kind]
                shards.write_file(store.of_episodes(one.observation, one.action, episodes), pending, compress=False)
            names = sorted(path.name for path in where.glob(f"{PREFIX}-*"))
            files.replace(marks / f"{iteration}.json", json.dumps({"files": names}))
            self._forget(marks)

    def _forget(self, marks: Path) -> None:
        numbers = _numbers(marks)
        there = self._checkpoints
        kept = {int(p.name) for p in there.iterdir() if p.name.isdigit()} if there and there.is_dir() else set()
        for number in numbers[:-_LATEST]:
            if number and number not in kept:
                _remove(marks, number)


def _numbers(marks: Path) -> list[int]:
    return sorted({int(path.stem) for path in marks.iterdir() if path.stem.isdigit()})


def _remove(marks: Path, number: int) -> None:
    for suffix in (".json", ".npz"):
        (marks / f"{number}{suffix}").unlink(missing_ok=True)
