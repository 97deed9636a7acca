"""RLlib's JSON files: a line for each SampleBatch or MultiAgentBatch, plain, gzipped or in a zip archive.

`ray/rllib/offline/json_writer.py` of ray 2.60 writes them. Columns are lists, or packed arrays (`rllib_columns`), in
which no pickle is executed. Lists have no dtypes: their numbers are float32 and int32 where that loses nothing.
"""

import contextlib
import gzip
import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.data.formats import files, packed_arrays
from jrl.data.formats import rllib_columns as names
from jrl.data.formats.transitions import numbered
from jrl.data.store import EpisodeStore
from jrl.errors import InputError
from jrl.fields.paths import written
from jrl.types import Dict, PyTree, Space, Tuple

SUFFIXES = (".json", ".json.gz", ".zip")
_LONGEST = 2**30  # characters of a line
_PART = 2**20  # characters after which the room is looked at again
_OBJECTS = 16  # bytes that Python's objects take for a character of JSON, at most: a digit and a comma are a pointer
_DEFAULT = "default_policy"  # RLlib's name of the only one


class _Rows(NamedTuple):
    where: str  # file and line
    policy: str | None  # None: a SampleBatch
    columns: dict[str, PyTree]  # [n, *] each
    lists: frozenset[str]  # columns that were lists: they have no dtypes

    @property
    def num_steps(self) -> int:
        return len(jax.tree.leaves(self.columns[names.ACTIONS])[0])


def read_files(paths: Sequence[Path]) -> EpisodeStore:
    """Reads files whose episodes may go on from one to the next. Raises InputError: file, line and what is wrong."""
    left_out: set[str] = set()
    rows = [part for path in paths for part in _file(path, left_out) if part.num_steps]
    name = names.name_of(paths)
    if not rows:
        raise InputError(f"data: {name}: there is no transition in it")
    notes = [f"left out: {', '.join(sorted(left_out))}, of which not every step has a row of numbers"] * bool(left_out)
    columns = _joined(rows, left_out, notes)
    labels = {}
    if any(part.policy is not None for part in rows):
        each = np.array([part.policy or _DEFAULT for part in rows])
        labels[names.POLICY] = np.repeat(each, [part.num_steps for part in rows])
    agents = columns.get(names.AGENT_ID, columns.get(names.AGENT))
    if agents is not None and (labels or (agents != agents[0]).any()):
        labels[names.AGENT_LABEL] = agents.reshape(-1)
    if names.EPISODE in columns:
        labels[names.EPISODE] = columns[names.EPISODE].reshape(-1)
    return names.store_of_columns(columns, labels, name, notes)


def _file(path: Path, left_out: set[str]) -> Iterator[_Rows]:
    read, looked_at = 0, 0
    with files.reading(path):
        for name, lines in _texts(path):
            number = 0
            while line := lines.readline(_LONGEST):
                number += 1
                read += len(line)  # a compressed file may unpack to anything: no header announces how much
                if read > looked_at + _PART or len(line) > _PART:
                    files.check_size(path, read + _OBJECTS * len(line))
                    looked_at = read
                if line.strip():
                    yield from _line(line, f"{name}, line {number}", left_out)


def _texts(path: Path) -> Iterator[tuple[str, io.TextIOBase]]:
    if path.suffix != ".zip":
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            yield f"data: {path}", file
        return
    with zipfile.ZipFile(path) as archive:
        found = [name for name in sorted(archive.namelist()) if name.endswith(".json")]
        if not found:
            raise InputError(f"data: {path} has no member NAME.json: it is no archive of RLlib's")
        for name in found:
            yield f"data: {path}, {name}", io.TextIOWrapper(archive.open(name), "utf-8")


def _line(line: str, where: str, left_out: set[str]) -> Iterator[_Rows]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as e:
        whose = "the line is damaged or cut off" if line.lstrip().startswith("{") else "this is no line of RLlib's"
        raise InputError(f"{where}: {whose} ({e}): remove the line, or write the file anew") from e
    kind = found.pop("type", None) if isinstance(found, dict) else None
    if kind == "SampleBatch":
        yield _rows(found, where, None, left_out)
    elif kind == "MultiAgentBatch" and isinstance(batches := found.get("policy_batches"), dict):
        for policy, columns in batches.items():
            if not isinstance(columns, dict):
                raise InputError(f"{where}: policy {policy} has no columns: write the file anew")
            yield _rows(columns, where, policy, left_out)
    else:
        expected = "expected an object whose type is SampleBatch or MultiAgentBatch"
        raise InputError(f"{where}: this is no line of RLlib's: {expected}")


def _rows(given: dict[str, Any], where: str, policy: str | None, left_out: set[str]) -> _Rows:
    if missing := [name for name in names.REQUIRED if name not in given]:
        raise InputError(f"{where}: the columns {', '.join(missing)} are missing: write obs and actions")
    columns: dict[str, PyTree] = {}
    for name in (k for k in given if k not in names.LEFT_OUT):
        try:
            columns[name] = _column(given[name], texts=name in (names.EPISODE, names.AGENT_ID))
        except (ValueError, TypeError, OverflowError, RecursionError) as e:
            if name in names.NEEDED or isinstance(given[name], str):
                raise InputError(f"{where}: column {name}: {e}") from e
            left_out.add(name)
    left_out |= given.keys() & {names.INFOS}
    counts = names.REWARDS if names.REWARDS in columns else names.ACTIONS
    rows = next((len(x) for x in jax.tree.leaves(columns[counts]) if np.ndim(x)), 0)
    for name in list(columns):
        leaves = jax.tree.leaves(columns[name])
        if any(np.ndim(x) == 0 or len(x) != rows for x in leaves) or not leaves:
            if name in names.NEEDED:
                raise InputError(f"{where}: column {name}: it has not {rows} rows, as {counts} has: give each step one")
            left_out.add(name)
            del columns[name]
    return _Rows(where, policy, columns, frozenset(k for k in columns if not isinstance(given[k], str)))


def _column(value: Any, *, texts: bool = False) -> PyTree:
    """Returns the array of a column, or the tree of arrays, of numbers or of `texts`. Raises ValueError: it is none."""
    if isinstance(value, str):
        return packed_arrays.unpacked(value)
    if isinstance(value, dict):
        return {name: _column(part) for name, part in value.items()}
    if texts and isinstance(value, list) and value and all(isinstance(x, str) for x in value):
        return files.texts(value, "its ids")
    try:
        found = np.array(value)
    except ValueError as e:
        raise ValueError("its rows have different shapes: they make no array") from e
    if found.dtype.kind not in "biuf":
        raise ValueError("it has something else than numbers in it")
    return found


def _joined(rows: Sequence[_Rows], left_out: set[str], notes: list[str]) -> dict[str, PyTree]:
    first, found = rows[0], {}
    for name in dict.fromkeys(name for part in rows for name in part.columns if name not in left_out):
        if lacking := [part for part in rows if name not in part.columns]:
            if name in (names.REWARDS, names.NEXT_OBS, names.EPISODE, names.T):
                where = lacking[0].where
                raise InputError(f"{where}: the column {name} is missing, which other lines have: write it, too")
            notes.append(f"the column {name} is not in all of the lines, and was left out")
            continue
        expected = names.shapes(first.columns[name])
        for part in rows:
            if (shape := names.shapes(part.columns[name])) != expected:
                what = f"column {name} has rows of the shape {shape}, where the first line has {expected}"
                mend = "policies with spaces of their own go into files of their own"
                raise InputError(f"{part.where}: {what}: {mend}")
        column = jax.tree.map(lambda *x: np.concatenate(x), *(part.columns[name] for part in rows))
        is_list = name not in names.KEYS and all(name in part.lists for part in rows)
        found[name] = jax.tree.map(_narrow, column) if is_list else column
    return found


def _narrow(x: np.ndarray) -> np.ndarray:
    """Returns the numbers of a list as float32 or int32, if they stay the same."""
    if x.dtype.kind not in "iuf":
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        found = x.astype(np.float32 if x.dtype.kind == "f" else np.int32)
    return found if np.array_equal(found, x, equal_nan=x.dtype.kind == "f") else x


# ---------------------------------------------------------------- writing


def write_file(store: EpisodeStore, path: Path, *, compress: bool) -> None:
    """Writes a file that RLlib reads: a line for each episode, or of several agents for each game.

    Args:
      store: of its labels only `policy`, `agent` and `eps_id` have a place in the file, and its spaces have none.
      path: NAME.json, NAME.json.gz, or NAME.zip, which holds NAME.json.
      compress: obs and new_obs are packed, and columns whose dtypes lists would lose.
    Raises:
      InputError: RLlib's files cannot hold it.
    """
    for what, space in (("observations", store.observation), ("actions", store.action_space)):
        if not compress and _has_tuple(space):
            raise InputError(f"{store.name}: the {what} have a Tuple, which lists cannot tell: write with compression")
    with written(path) as temporary, contextlib.ExitStack() as stack:
        raw: Any = stack.enter_context(open(temporary, "wb"))
        if path.suffix == ".zip":
            archive = stack.enter_context(zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED, compresslevel=1))
            raw = stack.enter_context(archive.open(f"{path.stem}.json", "w", force_zip64=True))
        elif path.suffix == ".gz":
            raw = stack.enter_context(gzip.GzipFile("", "wb", 1, raw, mtime=0))
        for line in _lines(store, compress):
            raw.write(json.dumps(line).encode() + b"\n")


def _has_tuple(space: Space) -> bool:
    return isinstance(space, Tuple) or (isinstance(space, Dict) and any(_has_tuple(part) for _, part in space.items))


def _lines(store: EpisodeStore, compress: bool) -> Iterator[dict[str, Any]]:
    """Yields a line for each episode, or of several agents for each game, with the rows of each policy."""
    columns = names.columns_of(store)
    packs = {name for name, column in columns.items() if compress and _is_packed(name, column)}
    several = names.POLICY in store.labels or names.AGENT_LABEL in store.labels
    policies = store.labels.get(names.POLICY, np.full(store.num_episodes, _DEFAULT)).astype(str)
    agents = store.labels.get(names.AGENT_LABEL, np.zeros(store.num_episodes, np.int64))
    if agents.dtype.kind not in "iu":
        columns[names.AGENT_ID], agents = np.repeat(agents, store.lengths()), numbered(agents)
    columns[names.AGENT] = np.repeat(agents, store.lengths())
    columns[names.UNROLL] = np.repeat(np.arange(store.num_episodes), store.lengths())
    ends = np.cumsum(store.lengths())
    bounds = np.stack([ends - store.lengths(), ends], 1)
    for game in _groups(numbered(names.episode_ids(store))):
        batches = {}
        for policy in dict.fromkeys(policies[game]):
            rows = np.concatenate([np.arange(*bounds[e]) for e in game if policies[e] == policy])
            part = {name: jax.tree.map(lambda x, rows=rows: x[rows], column) for name, column in columns.items()}
            packed = {name: packed_arrays.packed(x) if name in packs else _lists(x) for name, x in part.items()}
            batches[str(policy)] = packed
        if several:
            yield {"type": "MultiAgentBatch", "count": int(store.lengths()[game].max()), "policy_batches": batches}
        else:
            yield {"type": "SampleBatch", **batches[str(policies[game[0]])]}


def _groups(numbers: np.ndarray) -> list[np.ndarray]:
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)


def _is_packed(name: str, column: PyTree) -> bool:
    """Returns whether a column is packed where columns may be: lists would change it, or take more room."""
    if name in (names.OBS, names.NEXT_OBS) or not isinstance(column, np.ndarray):
        return True
    wide = {"f": np.float64, "i": np.int64, "u": np.int64}.get(column.dtype.kind, column.dtype)  # as a list is read
    return name not in names.KEYS and _narrow(column.astype(wide)).dtype != column.dtype


def _lists(tree: PyTree) -> Any:
    return {name: _lists(part) for name, part in tree.items()} if isinstance(tree, dict) else tree.tolist()
