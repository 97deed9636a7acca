"""RLlib's JSON files: a line for each SampleBatch or MultiAgentBatch, plain, gzipped or in a zip archive.

`ray/rllib/offline/json_writer.py` of ray 2.60 writes them. Columns are lists or packed arrays (`packed_arrays`). Lists
have no dtypes: their numbers become float32 and int32 if no value changes.
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
from jrl.data.formats.transitions import number_groups
from jrl.data.store import EpisodeStore
from jrl.errors import InputError
from jrl.fields.paths import written
from jrl.types import Dict, PyTree, Space, Tuple

SUFFIXES = (".json", ".json.gz", ".zip")
_MAX_LINE = 2**30  # characters of a line
_CHECK_EVERY = 2**20  # characters between two checks of the memory
_BYTES_PER_CHARACTER = 16  # largest size of Python's objects: a digit and a comma become a pointer
_DEFAULT = "default_policy"  # RLlib's name of a single policy


class _Batch(NamedTuple):
    where: str  # file and line, for messages
    policy: str | None  # None: a SampleBatch
    columns: dict[str, PyTree]  # [n, *] each
    lists: frozenset[str]  # columns that are lists in the file, without dtypes

    @property
    def num_steps(self) -> int:
        return len(jax.tree.leaves(self.columns[names.ACTIONS])[0])


def read_files(paths: Sequence[Path]) -> EpisodeStore:
    """Returns several files as one store; an episode may continue in the next file.

    Raises:
      InputError: damaged files; names the line.
    """
    left_out: set[str] = set()
    rows = [part for path in paths for part in _read_file(path, left_out) if part.num_steps]
    name = names.name_files(paths)
    if not rows:
        raise InputError(f"data: {name}: expected transitions, got none")
    notes = [f"left out: {', '.join(sorted(left_out))}, without numbers for each step"] * bool(left_out)
    columns = _join_batches(rows, left_out, notes)
    labels = {}
    if any(part.policy is not None for part in rows):
        each = np.array([part.policy or _DEFAULT for part in rows])
        labels[names.POLICY] = np.repeat(each, [part.num_steps for part in rows])
    agents = columns.get(names.AGENT_ID, columns.get(names.AGENT))
    if agents is not None and (labels or (agents != agents[0]).any()):
        labels[names.AGENT_LABEL] = agents.reshape(-1)
    if names.EPISODE in columns:
        labels[names.EPISODE] = columns[names.EPISODE].reshape(-1)
    return names.build_store(columns, labels, name, notes)


def _read_file(path: Path, left_out: set[str]) -> Iterator[_Batch]:
    read = checked = 0
    with files.reading(path):
        for name, lines in _open_texts(path):
            number = 0
            while line := lines.readline(_MAX_LINE):
                number += 1
                read += len(line)  # the header of a compressed file does not give its unpacked size
                if read > checked + _CHECK_EVERY or len(line) > _CHECK_EVERY:
                    files.check_size(path, read + _BYTES_PER_CHARACTER * len(line))
                    checked = read
                if line.strip():
                    yield from _parse_line(line, f"{name}, line {number}", left_out)


def _open_texts(path: Path) -> Iterator[tuple[str, io.TextIOBase]]:
    if path.suffix != ".zip":
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            yield f"data: {path}", file
        return
    with zipfile.ZipFile(path) as archive:
        found = [name for name in sorted(archive.namelist()) if name.endswith(".json")]
        if not found:
            raise InputError(f"data: {path}: expected an archive of RLlib with a member NAME.json, got none")
        for name in found:
            yield f"data: {path}, {name}", io.TextIOWrapper(archive.open(name), "utf-8")


def _parse_line(line: str, where: str, left_out: set[str]) -> Iterator[_Batch]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as e:
        fault = "the line is damaged or cut off" if line.lstrip().startswith("{") else "this is not a line of RLlib"
        raise InputError(f"{where}: {fault} ({e}): remove the line, or write the file again") from e
    kind = found.pop("type", None) if isinstance(found, dict) else None
    if kind == "SampleBatch":
        yield _parse_batch(found, where, None, left_out)
    elif kind == "MultiAgentBatch" and isinstance(batches := found.get("policy_batches"), dict):
        for policy, columns in batches.items():
            if not isinstance(columns, dict):
                raise InputError(f"{where}: policy {policy} has no columns: write the file again")
            yield _parse_batch(columns, where, policy, left_out)
    else:
        expected = "expected an object whose type is SampleBatch or MultiAgentBatch"
        raise InputError(f"{where}: this is not a line of RLlib: {expected}")


def _parse_batch(given: dict[str, Any], where: str, policy: str | None, left_out: set[str]) -> _Batch:
    if missing := [name for name in names.REQUIRED if name not in given]:
        raise InputError(f"{where}: the columns {', '.join(missing)} are missing: write obs and actions")
    columns: dict[str, PyTree] = {}
    for name in (k for k in given if k not in names.LEFT_OUT):
        try:
            columns[name] = _parse_column(given[name], texts=name in (names.EPISODE, names.AGENT_ID))
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
                raise InputError(f"{where}: column {name}: expected {rows} rows, as {counts} has: give each step a row")
            left_out.add(name)
            del columns[name]
    return _Batch(where, policy, columns, frozenset(k for k in columns if not isinstance(given[k], str)))


def _parse_column(value: Any, *, texts: bool = False) -> PyTree:
    """Returns a column as an array, or tree of arrays, of numbers or texts. Raises ValueError: other values."""
    if isinstance(value, str):
        return packed_arrays.unpack(value)
    if isinstance(value, dict):
        return {name: _parse_column(part) for name, part in value.items()}
    if texts and isinstance(value, list) and value and all(isinstance(x, str) for x in value):
        return files.build_text_array(value, "its ids")
    try:
        found = np.array(value)
    except ValueError as e:
        raise ValueError("expected rows of one shape") from e
    if found.dtype.kind not in "biuf":
        raise ValueError("expected numbers")
    return found


def _join_batches(rows: Sequence[_Batch], left_out: set[str], notes: list[str]) -> dict[str, PyTree]:
    first, found = rows[0], {}
    for name in dict.fromkeys(name for part in rows for name in part.columns if name not in left_out):
        if lacking := [part for part in rows if name not in part.columns]:
            if name in (names.REWARDS, names.NEXT_OBS, names.EPISODE, names.T):
                where = lacking[0].where
                raise InputError(f"{where}: the column {name} is missing, but other lines have it: write it, too")
            notes.append(f"the column {name} was left out: some lines lack it")
            continue
        expected = names.row_shapes(first.columns[name])
        for part in rows:
            if (shape := names.row_shapes(part.columns[name])) != expected:
                what = f"column {name}: expected rows of the shape {expected}, as in the first line, got {shape}"
                raise InputError(f"{part.where}: {what}: write policies with different spaces to different files")
        column = jax.tree.map(lambda *x: np.concatenate(x), *(part.columns[name] for part in rows))
        is_list = name not in names.KEYS and all(name in part.lists for part in rows)
        found[name] = jax.tree.map(_narrow, column) if is_list else column
    return found


def _narrow(x: np.ndarray) -> np.ndarray:
    """Returns the numbers of a list as float32 or int32, if no value changes."""
    if x.dtype.kind not in "iuf":
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        found = x.astype(np.float32 if x.dtype.kind == "f" else np.int32)
    return found if np.array_equal(found, x, equal_nan=x.dtype.kind == "f") else x


def write_file(store: EpisodeStore, path: Path, *, compress: bool) -> None:
    """Writes a file that RLlib reads: a line for each episode, or for each game of several agents.

    Args:
      store: data set; the file keeps its labels `policy`, `agent` and `eps_id`, but no other labels and no spaces.
      path: NAME.json, NAME.json.gz, or NAME.zip with a member NAME.json.
      compress: whether to pack obs, new_obs, and columns with dtypes that lists would lose.
    Raises:
      InputError: RLlib's files cannot express the store.
    """
    for what, space in (("observations", store.observation), ("actions", store.action_space)):
        if not compress and _has_tuple(space):
            raise InputError(f"{store.name}: {what} with a Tuple cannot be lists: write with compression")
    with written(path) as temporary, contextlib.ExitStack() as stack:
        raw: Any = stack.enter_context(open(temporary, "wb"))
        if path.suffix == ".zip":
            archive = stack.enter_context(zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED, compresslevel=1))
            raw = stack.enter_context(archive.open(f"{path.stem}.json", "w", force_zip64=True))
        elif path.suffix == ".gz":
            raw = stack.enter_context(gzip.GzipFile("", "wb", 1, raw, mtime=0))
        for line in _build_lines(store, compress):
            raw.write(json.dumps(line).encode() + b"\n")


def _has_tuple(space: Space) -> bool:
    return isinstance(space, Tuple) or (isinstance(space, Dict) and any(_has_tuple(part) for _, part in space.items))


def _build_lines(store: EpisodeStore, compress: bool) -> Iterator[dict[str, Any]]:
    """Yields a line for each episode, or for each game of several agents, with the rows of each policy."""
    columns = names.build_columns(store)
    packs = {name for name, column in columns.items() if compress and _must_pack(name, column)}
    several = names.POLICY in store.labels or names.AGENT_LABEL in store.labels
    policies = store.labels.get(names.POLICY, np.full(store.num_episodes, _DEFAULT)).astype(str)
    agents = store.labels.get(names.AGENT_LABEL, np.zeros(store.num_episodes, np.int64))
    if agents.dtype.kind not in "iu":
        columns[names.AGENT_ID], agents = np.repeat(agents, store.lengths()), number_groups(agents)
    columns[names.AGENT] = np.repeat(agents, store.lengths())
    columns[names.UNROLL] = np.repeat(np.arange(store.num_episodes), store.lengths())
    ends = np.cumsum(store.lengths())
    bounds = np.stack([ends - store.lengths(), ends], 1)
    game_ids = number_groups(names.build_episode_ids(store))
    order = np.argsort(game_ids, kind="stable")
    for game in np.split(order, np.flatnonzero(np.diff(game_ids[order])) + 1):  # the episodes of each game
        batches = {}
        for policy in dict.fromkeys(policies[game]):
            rows = np.concatenate([np.arange(*bounds[e]) for e in game if policies[e] == policy])
            part = {name: jax.tree.map(lambda x, rows=rows: x[rows], column) for name, column in columns.items()}
            packed = {name: packed_arrays.pack(x) if name in packs else _to_lists(x) for name, x in part.items()}
            batches[str(policy)] = packed
        if several:
            yield {"type": "MultiAgentBatch", "count": int(store.lengths()[game].max()), "policy_batches": batches}
        else:
            yield {"type": "SampleBatch", **batches[str(policies[game[0]])]}


def _must_pack(name: str, column: PyTree) -> bool:
    """Returns whether to pack a column: a list would change it, or take more space."""
    if name in (names.OBS, names.NEXT_OBS) or not isinstance(column, np.ndarray):
        return True
    wide = {"f": np.float64, "i": np.int64, "u": np.int64}.get(column.dtype.kind, column.dtype)  # dtype of a read list
    return name not in names.KEYS and _narrow(column.astype(wide)).dtype != column.dtype


def _to_lists(tree: PyTree) -> Any:
    return {name: _to_lists(part) for name, part in tree.items()} if isinstance(tree, dict) else tree.tolist()
