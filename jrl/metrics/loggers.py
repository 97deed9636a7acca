"""Result rows to files: `result.jsonl`, `progress.csv`, TensorBoard events; to W&B; to a logger of the user's own.

A file is valid after every row, also when the process was killed in the middle of one or the disk is full: the half
line is removed when the file is opened again, and what else is no row is set aside. A resumed run drops the rows beyond
its checkpoint first, so that no step is told twice.
"""

import contextlib
import csv
import difflib
import errno
import importlib
import importlib.util
import inspect
import io
import json
import logging
import math
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jrl import registry
from jrl.errors import InputError, counted
from jrl.host import files

Row = Mapping[str, float | int | str | list[float]]  # lists, such as of one number per episode, go to jsonl only


_SET_ASIDE = ".damaged"  # suffix of the file that takes what is no row

_log = logging.getLogger(__name__)


class Logger(NamedTuple):
    write: Callable[[Row], None]
    close: Callable[[], None]


def check(names: Iterable[str]) -> list[str]:
    """Lists the faults in the entries of `run.log`, each with its mend; nothing is opened."""
    errors: list[str] = []
    for name in names:
        try:
            _opener(name)
        except InputError as e:
            errors += e.errors
    return errors


def open_loggers(
    directory: str | Path,
    names: Iterable[str],
    resume_at: int | None = None,
) -> Logger:
    """Opens one logger that writes to all of `names`.

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
    """Returns the function that opens the logger of an entry of `run.log`. Raises InputError."""
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
        near = difflib.get_close_matches(name, [*files, *registry.all_registered()], 1)
        mend = f"did you mean {near[0]}? " if near else ""
        raise InputError(
            f"run.log: unknown logger {name}: {mend}there are {', '.join(files)}, and functions of yours as "
            "package.module:name"
        )
    return _own(name, registry.load(name, "run.log"))


def _own(name: str, make: Callable[..., Any]) -> Callable[[Path, int | None], Logger]:
    """Returns the user's function or class as an opener. Raises InputError: its parameters are others."""
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
    """Writes each row to each of `loggers`, and closes them all, also when one of them fails."""
    loggers = list(loggers)

    def write(row: Row) -> None:
        failed: OSError | None = None
        for logger in loggers:
            try:
                logger.write(row)
            except OSError as e:  # such as a full disk; the other loggers still get the row
                failed = e
        if failed:
            raise failed

    def close() -> None:
        with contextlib.ExitStack() as stack:
            for logger in loggers:
                stack.callback(logger.close)

    return Logger(write, close)


def jsonl(path: str | Path, resume_at: int | None = None) -> Logger:
    """Appends one JSON object per row. A key that was seen once is in every later row; what is not finite is null."""
    path = Path(path)
    text = lambda rows: "".join(json.dumps(row) + "\n" for row in rows)
    kept = _repaired(path, *_read_jsonl(path), resume_at, text)
    seen = dict.fromkeys(k for row in kept for k in row)
    file = path.open("ab", buffering=0)

    def write(row: Row) -> None:
        numbers = {k: _number(v) for k, v in row.items()}
        seen.update(dict.fromkeys(numbers))
        full = {k: _jsonable(v) for k, v in (seen | numbers).items()}
        files.append(file, (json.dumps(full, allow_nan=False) + "\n").encode())

    return Logger(write, file.close)


def csv_table(path: str | Path, resume_at: int | None = None) -> Logger:
    """Appends one line per row. A missing key is empty; a new one becomes a column of the whole file."""
    path = Path(path)
    columns, rows, damaged = _read_csv(path)
    _repaired(path, rows, damaged, resume_at, lambda kept: _csv_text(columns, kept, header=True))
    file = path.open("ab", buffering=0)

    def write(row: Row) -> None:
        nonlocal file, columns
        row = _scalars(row)
        new = [k for k in row if k not in columns]
        if new:
            rows = _read_csv(path)[1]
            files.replace(path, _csv_text(columns + new, rows, header=True))
            file.close()
            columns, file = columns + new, path.open("ab", buffering=0)
        files.append(file, _csv_text(columns, [{k: _number(v) for k, v in row.items()}]).encode())

    return Logger(write, lambda: file.close())


def tensorboard(path: str | Path, resume_at: int | None = None) -> Logger:
    """Writes each number of a row as a scalar at its env_steps. Rows beyond `resume_at` are hidden by a purge event.

    The events are written here, one record per row: tensorboardX's own writer does it in a thread, which dies of a full
    disk without telling.
    """
    from tensorboardX.proto.event_pb2 import Event, SessionLog  # a fifth of a second: not at import
    from tensorboardX.proto.summary_pb2 import Summary

    file = _new_event_file(Path(path))

    def add(**event: Any) -> None:
        files.append(file, _record(Event(wall_time=time.time(), **event).SerializeToString()))

    add(file_version="brain.Event:2")
    if resume_at is not None:
        add(session_log=SessionLog(status=SessionLog.START), step=resume_at + 1)

    def write(row: Row) -> None:
        numbers = {key: _number(value) for key, value in _scalars(row).items() if key != "env_steps"}
        values = [
            Summary.Value(tag=key, simple_value=number)
            for key, number in numbers.items()
            if not isinstance(number, str) and not _not_finite(number)
        ]
        steps: Any = row["env_steps"]
        add(summary=Summary(value=values), step=int(steps))

    return Logger(write, file.close)


def _new_event_file(directory: Path) -> io.FileIO:
    """Returns a file of a name that TensorBoard looks for, and that sorts behind those of earlier processes."""
    directory.mkdir(parents=True, exist_ok=True)
    name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
    for count in range(10_000):
        with contextlib.suppress(FileExistsError):
            return (directory / (f"{name}.{count}" if count else name)).open("xb", buffering=0)
    raise OSError(f"{directory}: all names of event files are taken")


def _record(data: bytes) -> bytes:
    """Returns a record of a TFRecord file: length, checksum of the length, data, checksum of the data."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(data))
    checksum = lambda x: struct.pack("<I", masked_crc32c(x))
    return length + checksum(length) + data + checksum(data)


def wandb(directory: str | Path, resume_at: int | None = None) -> Logger:
    """Writes rows to Weights & Biases (https://wandb.ai), with the config of the run; its own files are in
    `directory`/wandb.

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
    """Returns the rows of a jsonl file, without what is no row, such as a half last line; none if there is no file."""
    return _read_jsonl(Path(path))[0]


def read_damaged(path: str | Path) -> tuple[list[dict[str, Any]], str]:
    """Reads as `read_rows`, and tells in words what of the file is no row; empty for nothing."""
    path = Path(path)
    rows, damaged = _read_jsonl(path)
    lines = counted(len(damaged), "damaged line") * bool(damaged)
    return rows, " and ".join(filter(None, [lines, "half a last line" * (path.exists() and _is_torn(path))]))


def _read_jsonl(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns rows, and the lines that are none; without a half last line."""
    if not path.exists():
        return [], []
    if not path.is_file():  # a pipe or a device may have no end
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    rows, damaged = [], []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
        row = _json_object(line)
        if row is not None and _has_steps(row):
            rows.append(row)
        elif line.strip():
            damaged.append(line)
    return rows, damaged


def _json_object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line, parse_int=_int)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _int(digits: str) -> int | float:
    """Returns a whole number, or infinity where no float is as large."""
    return int(digits) if len(digits) <= 300 else float(digits)


def _repaired(
    path: Path, rows: list[dict[str, Any]], damaged: list[str], resume_at: int | None, text: Callable[..., str]
) -> list[dict[str, Any]]:
    """Rewrites a file without its damaged lines, half a last line, and rows beyond `resume_at`; returns its rows.

    Lines that are no rows, such as a power cut leaves, go into a file of their own.
    """
    if damaged:
        aside = path.with_name(path.name + _SET_ASIDE)
        with aside.open("ab", buffering=0) as file:
            files.append(file, "".join(line + "\n" for line in damaged).encode())
        _log.warning("%s: %d damaged lines were set aside in %s; all others stay", path, len(damaged), aside.name)
    beyond = lambda steps: resume_at is not None and steps not in (None, "") and float(steps) > resume_at
    kept = [row for row in rows if not beyond(row.get("env_steps"))]
    if path.exists() and (len(kept) < len(rows) or damaged or _is_torn(path)):
        files.replace(path, text(kept))
    return kept


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _scalars(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not isinstance(value, list)}


def _jsonable(value: Any) -> Any:
    if isinstance(value, list):
        return [_jsonable(x) for x in value]
    return None if _not_finite(value) else value


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _has_steps(row: Mapping[str, Any]) -> bool:
    """Returns whether `env_steps`, where a row has them, are a number."""
    steps = row.get("env_steps")
    if steps in (None, ""):
        return True
    try:
        return math.isfinite(float(steps))
    except (TypeError, ValueError, OverflowError):
        return False


def _is_torn(path: Path) -> bool:
    """Returns whether the last line lacks its end: the process was killed while writing it."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _read_csv(path: Path) -> tuple[list[str], list[dict[str, str]], list[str]]:
    """Returns columns, rows, and the lines that are none; without a half last line."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    header, *lines = text[: text.rfind("\n") + 1].split("\n")[:-1] or [""]
    columns = _csv_fields(header) or []
    if not all(name.isprintable() and name and name != "\ufffd" for name in columns) or len({*columns}) < len(columns):
        return [], [], [header, *lines]  # its numbers have no names
    rows, damaged = [], []
    for line in lines:
        fields = _csv_fields(line)
        row = dict(zip(columns, fields or ()))
        if fields is not None and len(fields) == len(columns) and _has_steps(row):
            rows.append(row)
        elif line.strip():
            damaged.append(line)
    return columns, rows, damaged


def _csv_fields(line: str) -> list[str] | None:
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return None


def _csv_text(columns: list[str], rows: Iterable[Mapping[str, Any]], *, header: bool = False) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header and columns:
        writer.writeheader()
    one_line = lambda x: " ".join(x.splitlines()) if isinstance(x, str) else x
    writer.writerows({k: one_line(v) for k, v in row.items()} for row in rows)
    return text.getvalue()
