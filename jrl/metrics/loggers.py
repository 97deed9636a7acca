"""Result rows to files: `result.jsonl`, `progress.csv`, TensorBoard events; to W&B; to a logger of the user's own.

A file is valid after every row, also when the process was killed in the middle of one: the half line is removed when
the file is opened again. A resumed run drops the rows beyond its checkpoint first, so that no step is told twice.
"""

import contextlib
import csv
import difflib
import importlib
import importlib.util
import inspect
import io
import json
import math
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jrl import registry
from jrl.errors import InputError

Row = Mapping[str, float | int | str | list[float]]  # lists, such as of one number per episode, go to jsonl only


class Logger(NamedTuple):
    write: Callable[[Row], None]
    close: Callable[[], None]


def check(names: Iterable[str]) -> list[str]:
    """What is wrong with the entries of `run.log`, each with its mend; nothing is opened."""
    errors: list[str] = []
    for name in names:
        try:
            _opener(name)
        except InputError as e:
            errors += e.errors
    return errors


def open_loggers(directory: str | Path, names: Iterable[str], resume_at: int | None = None) -> Logger:
    """One logger that writes to all of `names`.

    Args:
      directory: the run directory; made if missing.
      names: of "jsonl" (result.jsonl), "csv" (progress.csv), "tensorboard" (tb/), "wandb", and names of the user's own
        (see `jrl.registry`): a function or class that gets the directory as a Path, and `resume_at` if it has a
        parameter of that name, and gives a Logger or an object with write(row) and close().
      resume_at: env_steps of the checkpoint a run resumes from; rows beyond it are dropped.
    Raises:
      InputError: an unknown name, a package that is not installed, or what a function gives is no logger.
    """
    names = list(names)
    if errors := check(names):
        raise InputError(*errors)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:  # closes those that are open, should one of them fail
        loggers = []
        for name in names:
            loggers.append(_opener(name)(directory, resume_at))
            stack.callback(loggers[-1].close)
        stack.pop_all()
    return combine(loggers)


def _opener(name: str) -> Callable[[Path, int | None], Logger]:
    """What opens the logger of an entry of `run.log`. Raises InputError."""
    files: dict[str, Callable[[Path, int | None], Logger]] = {
        "jsonl": lambda directory, resume_at: jsonl(directory / "result.jsonl", resume_at),
        "csv": lambda directory, resume_at: csv_table(directory / "progress.csv", resume_at),
        "tensorboard": lambda directory, resume_at: tensorboard(directory / "tb", resume_at),
        "wandb": wandb,
    }
    if name in files:
        if name == "wandb":
            found = importlib.util.find_spec("wandb")
            if found is None or found.origin is None:  # without a file: a folder wandb/, such as W&B itself leaves
                raise InputError("run.log wandb: W&B is not installed: pip install wandb, or leave it out")
        return files[name]
    if registry.registered(name) is None and ":" not in name and "." not in name:
        near = difflib.get_close_matches(name, [*files, *registry.everything()], 1)
        mend = f"did you mean {near[0]}? " if near else ""
        raise InputError(
            f"run.log: unknown logger {name}: {mend}there are {', '.join(files)}, and functions of yours as "
            "package.module:name"
        )
    return _own(name, registry.load(name, "run.log"))


def _own(name: str, make: Callable[..., Any]) -> Callable[[Path, int | None], Logger]:
    """The user's function or class as an opener. Raises InputError: its parameters are others."""
    try:
        signature: inspect.Signature | None = inspect.signature(make)
    except (TypeError, ValueError):  # a builtin has none
        signature = None
    more = ("resume_at",) if signature and "resume_at" in signature.parameters else ()
    if signature:
        try:
            signature.bind(Path(), **dict.fromkeys(more))
        except TypeError as e:
            raise InputError(f"run.log {name}: it is called with the run directory, a Path: {e}") from e

    def opened(directory: Path, resume_at: int | None) -> Logger:
        made = make(directory, **dict.fromkeys(more, resume_at))
        if not all(callable(getattr(made, method, None)) for method in ("write", "close")):
            raise InputError(f"run.log {name}: expected an object with write(row) and close(), got {made!r}")
        return Logger(made.write, made.close)

    return opened


def combine(loggers: Iterable[Logger]) -> Logger:
    """Writes each row to each of `loggers`; closes them all, also when one fails."""
    loggers = list(loggers)

    def write(row: Row) -> None:
        for logger in loggers:
            logger.write(row)

    def close() -> None:
        with contextlib.ExitStack() as stack:
            for logger in loggers:
                stack.callback(logger.close)

    return Logger(write, close)


def jsonl(path: str | Path, resume_at: int | None = None) -> Logger:
    """Appends one JSON object per row. A key that was seen once is in every later row; what is not finite is null."""
    path = Path(path)
    old = read_rows(path)
    kept = [row for row in old if not _beyond(row, resume_at)]
    if path.exists() and (len(kept) < len(old) or _is_torn(path)):
        _replace(path, "".join(json.dumps(row) + "\n" for row in kept))
    seen = dict.fromkeys(k for row in kept for k in row)
    file = path.open("a", encoding="utf-8")

    def write(row: Row) -> None:
        numbers = {k: _number(v) for k, v in row.items()}
        seen.update(dict.fromkeys(numbers))
        full = {k: _jsonable(v) for k, v in (seen | numbers).items()}
        file.write(json.dumps(full, allow_nan=False) + "\n")
        file.flush()

    return Logger(write, file.close)


def csv_table(path: str | Path, resume_at: int | None = None) -> Logger:
    """Appends one line per row. A missing key is empty; a new one becomes a column of the whole file."""
    path = Path(path)
    columns: list[str] = []
    if path.exists() and path.stat().st_size:
        columns, old = _read_csv(path)
        kept = [row for row in old if not _beyond(row, resume_at)]
        if len(kept) < len(old) or _is_torn(path):
            _replace(path, _csv_text(columns, kept, header=True))
    file = path.open("a", encoding="utf-8", newline="")

    def write(row: Row) -> None:
        nonlocal file, columns
        row = _scalars(row)
        new = [k for k in row if k not in columns]
        if new:
            file.close()
            rows = _read_csv(path)[1]
            columns = columns + new
            _replace(path, _csv_text(columns, rows, header=True))
            file = path.open("a", encoding="utf-8", newline="")
        file.write(_csv_text(columns, [{k: _number(v) for k, v in row.items()}]))
        file.flush()

    return Logger(write, lambda: file.close())


def tensorboard(path: str | Path, resume_at: int | None = None) -> Logger:
    """Each number of a row as a scalar at its env_steps. Rows beyond `resume_at` are hidden by a purge event."""
    from tensorboardX import SummaryWriter  # a fifth of a second: not at import
    from tensorboardX.proto.summary_pb2 import Summary

    purge = None if resume_at is None else resume_at + 1
    writer = SummaryWriter(str(path), purge_step=purge, flush_secs=10)

    def write(row: Row) -> None:
        numbers = {key: _number(value) for key, value in _scalars(row).items() if key != "env_steps"}
        values = [
            Summary.Value(tag=key, simple_value=number)
            for key, number in numbers.items()
            if not isinstance(number, str) and not _not_finite(number)
        ]
        steps: Any = row["env_steps"]
        # one event per row: add_scalar makes one per number, at thirty times the cost
        assert writer.file_writer is not None
        writer.file_writer.add_summary(Summary(value=values), int(steps))

    return Logger(write, writer.close)


def wandb(directory: str | Path, resume_at: int | None = None) -> Logger:
    """Rows to Weights & Biases (https://wandb.ai), with the config of the run; its own files are in `directory`/wandb.

    The project is the folder that the run directory lies in, the name that of the run directory; WANDB_PROJECT and
    WANDB_NAME say otherwise. With WANDB_MODE=offline nothing is sent: `wandb sync` does that later. A continued run is
    the same one there; rows that W&B has already stay as they are, whatever `resume_at`.

    Raises:
      InputError: W&B refuses, such as for want of a login.
    """
    client = importlib.import_module("wandb")
    directory = Path(directory).resolve()
    kept, described = directory / "wandb_id.txt", directory / "config.yaml"
    if not kept.exists():
        kept.write_text(uuid.uuid4().hex[:16])
    try:
        run = client.init(
            dir=str(directory),
            project=os.environ.get("WANDB_PROJECT") or directory.parent.name or "jrl",
            name=os.environ.get("WANDB_NAME") or directory.name,
            id=kept.read_text().strip(),
            resume="allow",
            config=yaml.safe_load(described.read_text(encoding="utf-8")) if described.exists() else None,
        )
    except client.Error as e:
        raise InputError(f"run.log wandb: {e}: log in with `wandb login`, or set WANDB_MODE=offline") from e

    def write(row: Row) -> None:
        numbers = {key: _number(value) for key, value in _scalars(row).items()}
        run.log({k: v for k, v in numbers.items() if not _not_finite(v)}, step=int(numbers["env_steps"]))

    return Logger(write, run.finish)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a jsonl file, without a half last line; none if there is no file."""
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    return [json.loads(line) for line in lines if line.strip()]


def _number(value: Any) -> Any:
    """Numpy and jax scalars as Python's."""
    return value.item() if hasattr(value, "item") else value


def _scalars(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not isinstance(value, list)}


def _jsonable(value: Any) -> Any:
    if isinstance(value, list):
        return [_jsonable(x) for x in value]
    return None if _not_finite(value) else value


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _beyond(row: Mapping[str, Any], resume_at: int | None) -> bool:
    steps = row.get("env_steps")
    return resume_at is not None and steps not in (None, "") and float(steps) > resume_at


def _is_torn(path: Path) -> bool:
    """Whether the last line lacks its end: the process was killed while writing it."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows, without a half last line."""
    text = path.read_text(encoding="utf-8", errors="replace")
    reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
    return list(reader.fieldnames or []), list(reader)


def _csv_text(columns: list[str], rows: Iterable[Mapping[str, Any]], *, header: bool = False) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header and columns:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _replace(path: Path, text: str) -> None:
    """The file holds either what it held or `text`, whenever the process dies."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
