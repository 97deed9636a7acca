"""Option `data.output`: a run records the episodes that it collects; a resumed run records no step twice.

Files are numbered and complete. Each checkpoint has a mark in `marks/`: the list of files, and the steps of unfinished
episodes. A resumed run deletes the files written after its mark, and writes these steps as episodes that were cut,
since its environments are reset.
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
from jrl.data.episode import Episode
from jrl.data.formats import shards
from jrl.data.writer import PREFIX, Writer
from jrl.errors import InputError, counted
from jrl.fields.paths import resolve
from jrl.host import files
from jrl.rollout.stitch import Stitch
from jrl.rollout.unroll import RAW_STEPS
from jrl.run.plan import Plan
from jrl.spaces_json import space_to_json
from jrl.types import COUNTS_STEP, NORMALIZED_OBS, POLICY_ID, TEACHER, Algo, EnvSpec, PyTree

# extras that are not recorded: used only for learning, or memory
_NOT_RECORDED = (NORMALIZED_OBS, RAW_STEPS, COUNTS_STEP, POLICY_ID, TEACHER, LEAGUE, "carry", "running_return")
_MARKS = "marks"
_LATEST = 2  # latest marks, which are never deleted: the latest checkpoint may be incomplete


def stitch_options(policies: Policies, columns: Sequence[str] | None) -> dict[str, Any]:
    """Returns options of a Stitch whose episodes are recorded; `columns`: names of extras of episodes; None: all."""
    options = policies.game_options and {**policies.game_options, "policies": policies.labels}
    groups = policies.columns.extras if policies.columns else {}
    return {**options, "extras": functools.partial(_select_extras, groups=groups, columns=columns)}


def _recorded_names(extras: Mapping[str, PyTree], groups: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Returns the names of recorded extras; of several policies, those that all policies have."""
    parts = [extras[label] for label in groups] or [extras]
    return [name for name in parts[0] if name not in _NOT_RECORDED and all(name in part for part in parts)]


def _select_extras(
    extras: Mapping[str, PyTree], groups: Mapping[str, tuple[int, ...]], columns: Sequence[str] | None
) -> dict[str, PyTree]:
    if RAW_STEPS not in extras:
        raise InputError("data.output: expected rollouts with the environments' own rewards, got none: leave it out")
    names = _recorded_names(extras, groups)
    names = names if columns is None else [name for name in columns if name in names]
    if not groups:
        return {name: extras[name] for name in names}
    joined = {name: _join_groups(extras, name, groups) for name in names}
    return {name: tree for name, tree in joined.items() if tree is not None}


def _join_groups(extras: Mapping[str, PyTree], name: str, groups: Mapping[str, tuple[int, ...]]) -> PyTree:
    """Returns an extra of all policies as one array [T, B, ...]; None: shapes or dtypes differ."""
    parts = [(own, jax.tree.leaves(extras[label][name])) for label, own in groups.items()]
    if len({tuple((x.shape[2:], x.dtype) for x in leaves) for _, leaves in parts}) > 1 or len(parts[0][1]) != 1:
        return None
    first = np.asarray(parts[0][1][0])
    blocks, width = first.shape[1] // len(parts[0][0]), sum(len(own) for own, _ in parts)
    whole = np.zeros((len(first), blocks, width, *first.shape[2:]), first.dtype)
    for own, (x,) in parts:
        whole[:, :, list(own)] = np.asarray(x).reshape(len(first), blocks, len(own), *first.shape[2:])
    return whole.reshape(len(first), -1, *first.shape[2:])


def to_data_episode(episode: Episode, labels: Mapping[str, Any]) -> Episode:
    """Returns a copy of an episode of a rollout, with the labels of data sets.

    They are `labels`; `agent` and `policy`, with several agents; `env`; `iteration` of its first step; and `begin`,
    the number of steps before its first row.
    """
    agent_labels = {} if episode.agent_id is None else {"agent": episode.agent_id, "policy": episode.policy_id}
    facts = {"env": episode.env_index, "begin": episode.begin, "iteration": episode.iteration}
    arrays = {name: jax.tree.map(np.array, getattr(episode, name)) for name in ("obs", "action", "reward", "columns")}
    return episode.replace(**arrays, labels={**agent_labels, **labels, **facts})


def list_directories(root: Path, spec: EnvSpec) -> list[Path]:
    """Returns the directory of each kind of agents, named after its first agent."""
    return [root / name for name in spaces.kind_names(spec)]


def open_writers(root: Path, spec: EnvSpec, meta: Mapping[str, Any], output: OutputConfig) -> list[Writer]:
    """Returns a writer for each kind of agents, with notes on normalized actions."""
    options: dict[str, Any] = {name: getattr(output, name) for name in ("format", "max_file_mb", "compress")}
    return [
        Writer(where, kind.observation, kind.action, meta={**meta, **describe_actions(kind)}, **options)
        for where, kind in zip(list_directories(root, spec), spaces.by_kind(spec), strict=True)
    ]


def describe_actions(spec: EnvSpec) -> dict[str, Any]:
    """Returns a data set's notes on normalized actions; {}: actions are the environment's own."""
    if spec.env_action is None or spec.env_action == spec.action:
        return {}
    return {"actions": "normalized", "env_action": space_to_json(spec.env_action)}


class Recorder:
    """Records the episodes of a run's rollouts.

    Attributes:
      iteration: present iteration of the run.
    Raises:
      InputError: `data.output.columns` names an unknown extra.
    """

    def __init__(self, plan: Plan, algo: Algo):
        cfg = plan.cfg
        self._output: OutputConfig = cfg.data.output
        self._options = stitch_options(plan.policies, self._output.columns)
        self._spec = plan.policies.policy_spec
        self._meta = {"env": cfg.env.id, "source": "jrl", "algo": algo_name(cfg)}
        self.iteration = 0
        self._stitches: dict[int, Stitch] = {}  # by first column
        self._writers: list[Writer] = []
        self._directories: list[Path] = []
        self._checkpoints: Path | None = None
        if wanted := self._output.columns:
            self._check_columns(plan, algo, wanted)

    def _check_columns(self, plan: Plan, algo: Algo, wanted: Sequence[str]) -> None:
        like = rollout_like(plan, plan.spec, algo, length=1, num_envs=plan.spec.num_envs)
        columns = plan.policies.columns
        known = _recorded_names(like.extras, columns.extras if columns else {})
        if missing := [name for name in wanted if name not in known]:
            raise InputError(
                f"data.output.columns: expected some of {', '.join(known) or 'none'}, got {', '.join(missing)}: leave "
                "the others out"
            )

    # ------------------------------------------------------------ start and end

    def begin(self, directory: Path | None, iteration: int, *, starts_over: bool = False) -> list[str]:
        """Opens the files; returns notes for the user.

        Args:
          directory: run directory.
          iteration: iteration of the checkpoint that the run continues from; 0: a new run.
          starts_over: whether a new run replaces an earlier attempt, whose files are deleted.
        Raises:
          InputError: there is no path, or the directory has files of another run.
        """
        path = self._output.path or (directory and directory / "data")
        if path is None:
            raise InputError("data.output.path: expected a directory, got none: this run has no run directory")
        self._checkpoints = directory and directory / "checkpoints"
        root = resolve(path, "data.output.path", "new directory")
        self._directories = list_directories(root, self._spec)
        notes = [self._delete_later(where, iteration, starts_over=starts_over) for where in self._directories]
        self._writers = open_writers(root, self._spec, self._meta, self._output)
        for kind, where in enumerate(self._directories):
            pending = where / _MARKS / f"{iteration}.npz"
            if pending.exists():
                for episode in shards.read_files([pending]).episodes():
                    labels = {name: label.item() for name, label in episode.labels.items()}
                    self._writers[kind].add(episode.replace(labels=labels))
        if not all((where / _MARKS / f"{iteration}.json").exists() for where in self._directories):
            self.mark(iteration)
        return [f"data: episodes are written to {root}", *(f"data: {note}" for note in notes if note)]

    def _delete_later(self, where: Path, iteration: int, *, starts_over: bool) -> str:
        """Deletes the files written after a checkpoint; returns a note on them."""
        present = {path.name: path for path in where.glob(f"{PREFIX}-*")} if where.is_dir() else {}
        mark = where / _MARKS / f"{iteration}.json"
        if iteration == 0 and not starts_over and present:
            raise InputError(
                f"data.output.path: expected a new directory, got {where} with {counted(len(present), 'file')}: choose "
                "another path, or remove the directory"
            )
        if not mark.exists():
            if present and iteration:
                return f"{where} has no mark of this checkpoint: its files stay, and steps may be recorded twice"
            return ""
        known = set(json.loads(mark.read_text())["files"])
        later = [path for name, path in present.items() if name not in known]
        for path in later:
            path.unlink()
        for number in _numbers(where / _MARKS):
            if number > iteration:
                _remove(where / _MARKS, number)
        return f"{counted(len(later), 'file')} of steps after the checkpoint were removed from {where}" if later else ""

    def close(self) -> None:
        """Writes the remaining episodes; unfinished episodes are cut."""
        for stitch in self._stitches.values():
            for episode in stitch.reset():
                self.write(episode)
        for writer in self._writers:
            writer.close()

    # ------------------------------------------------------------ rollouts

    def write(self, episode: Episode) -> None:
        """Writes an episode of a rollout."""
        self._writers[episode.kind].add(to_data_episode(episode, {}))

    def stitch(self, source: Any, num_envs: int, worker_index: int, first: int) -> Stitch:
        """Returns a Stitch of `num_envs` columns from column `first` on, whose episodes are recorded."""
        if (replaced := self._stitches.get(first)) is not None:  # its environments were replaced
            for episode in replaced.reset():
                self.write(episode)
        stitch = Stitch(num_envs, first=first, iteration=lambda: self.iteration, **self._options)
        self._stitches[first] = stitch
        return stitch

    # ------------------------------------------------------------ checkpoints

    def mark(self, iteration: int) -> None:
        """Writes the mark of a checkpoint: closes the files, and saves the steps of unfinished episodes."""
        unfinished = [episode for _, stitch in sorted(self._stitches.items()) for episode in stitch.unfinished()]
        for kind, (where, writer) in enumerate(zip(self._directories, self._writers, strict=True)):
            writer.close()
            marks = where / _MARKS
            marks.mkdir(exist_ok=True)
            pending = marks / f"{iteration}.npz"
            pending.unlink(missing_ok=True)
            if episodes := [to_data_episode(episode, {}) for episode in unfinished if episode.kind == kind]:
                spec = spaces.by_kind(self._spec)[kind]
                shards.write_file(store.of_episodes(spec.observation, spec.action, episodes), pending, compress=False)
            names = sorted(path.name for path in where.glob(f"{PREFIX}-*"))
            files.replace(marks / f"{iteration}.json", json.dumps({"files": names}))
            self._prune(marks)

    def _prune(self, marks: Path) -> None:
        saved = self._checkpoints.glob("*") if self._checkpoints else ()
        kept = {"0", *(path.name for path in saved)}
        for number in _numbers(marks)[:-_LATEST]:
            if str(number) not in kept:
                _remove(marks, number)


def _numbers(marks: Path) -> list[int]:
    return sorted({int(path.stem) for path in marks.iterdir() if path.stem.isdigit()})


def _remove(marks: Path, number: int) -> None:
    for suffix in (".json", ".npz"):
        (marks / f"{number}{suffix}").unlink(missing_ok=True)
