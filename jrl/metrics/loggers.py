"""Result rows as `result.jsonl`, `progress.csv`, TensorBoard events, to W&B, and to users' loggers.

Files are valid after every row, even if the process was killed mid-row or the disk is full: on opening, a partial last
line is removed, and damaged lines are moved to another file. A resumed run first drops the rows beyond its checkpoint,
so that no step is reported twice.
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

Row = Mapping[str, float | int | str | list[float]]  # lists (such as a number per episode) go to jsonl only

_DAMAGED_SUFFIX = ".damaged"  # suffix of the file with damaged lines

_log = logging.getLogger(__name__)


class Logger(NamedTuple):
    write: Callable[[Row], None]
    close: Callable[[], None]


def check(names: Iterable[str]) -> list[str]:
    """Return the faults in the entries of `run.log`, each with its fix; nothing is opened."""
    errors: list[str] = []
    for name in names:
        try:
            _find_opener(name)
        except InputError as e:
            errors += e.errors
    return errors


def open_loggers(
    directory: str | Path,
    names: Iterable[str],
    resume_at: int | None = None,
) -> Logger:
    """Open one logger that writes to all of `names`.

    Args:
      directory: run directory; made if missing.
      names: "jsonl" (result.jsonl), "csv" (progress.csv), "tensorboard" (tb/), "wandb", and users' functions or classes
        (see `jrl.registry`). They are called with the directory as a Path, and `resume_at` if they have that parameter.
        They return a Logger or an object with write(row) and close().
      resume_at: env_steps of the checkpoint that a run resumes from; rows beyond it are dropped.
    Raises:
      InputError: an unknown name, a missing package, or a function that does not return a logger.
    """
    names = list(names)
    if errors := check(names):
        raise InputError(*errors)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:  # closes the open loggers if another one fails
        loggers = []
        for name in names:
            loggers.append(_find_opener(name)(directory, resume_at))
            stack.callback(loggers[-1].close)
        stack.pop_all()
    return combine_loggers(loggers)


def _find_opener(name: str) -> Callable[[Path, int | None], Logger]:
    """Return the function that opens the logger of an entry of `run.log`. Raises InputError."""
    files: dict[str, Callable[[Path, int | None], Logger]] = {
        "jsonl": lambda directory, resume_at: open_jsonl(directory / "result.jsonl", resume_at),
        "csv": lambda directory, resume_at: open_csv(directory / "progress.csv", resume_at),
        "tensorboard": lambda directory, resume_at: open_tensorboard(directory / "tb", resume_at),
        "wandb": open_wandb,
    }
    if name in files:
        if name == "wandb":
            found = importlib.util.find_spec("wandb")
            if found is None or found.origin is None:  # no origin: a folder wandb/, which W&B itself writes
                raise InputError("run.log wandb: W&B is not installed: pip install wandb, or leave it out")
        return files[name]
    if registry.registered(name) is None and ":" not in name and "." not in name:
        near = difflib.get_close_matches(name, [*files, *registry.all_registered()], 1)
        fix = f"did you mean {near[0]}? " if near else ""
        raise InputError(
            f"run.log: unknown logger {name}: {fix}use {', '.join(files)}, or your own function as package.module:name"
        )
    return _wrap_user_logger(name, registry.load(name, "run.log"))


def _wrap_user_logger(name: str, make: Callable[..., Any]) -> Callable[[Path, int | None], Logger]:
    """Return a user's function or class as an opener. Raises InputError: it has other parameters."""
    try:
        signature: inspect.Signature | None = inspect.signature(make)
    except (TypeError, ValueError):  # a builtin has no signature
        signature = None
    more = ("resume_at",) if signature and "resume_at" in signature.parameters else ()
    if signature:
        try:
            signature.bind(Path(), **dict.fromkeys(more))
        except TypeError as e:
            raise InputError(f"run.log {name}: expected a function of the run directory, a Path: {e}") from e

    def open_logger(directory: Path, resume_at: int | None) -> Logger:
        made = make(directory, **dict.fromkeys(more, resume_at))
        if not all(callable(getattr(made, method, None)) for method in ("write", "close")):
            raise InputError(f"run.log {name}: expected an object with write(row) and close(), got {made!r}")
        return Logger(made.write, made.close)

    return open_logger


def combine_loggers(loggers: Iterable[Logger]) -> Logger:
    """Return a logger that writes each row to all `loggers`, and closes them all even if one raises."""
    loggers = list(loggers)

    def write(row: Row) -> None:
        failed: OSError | None = None
        for logger in loggers:
            try:
                logger.write(row)
            except OSError as e:  # for example a full disk; the other loggers still get the row
                failed = e
        if failed:
            raise failed

    def close() -> None:
        with contextlib.ExitStack() as stack:
            for logger in loggers:
                stack.callback(logger.close)

    return Logger(write, close)


def open_jsonl(path: str | Path, resume_at: int | None = None) -> Logger:
    """Append one JSON object per row. Each key seen so far is in every later row; non-finite numbers are null."""
    path = Path(path)
    text = lambda rows: "".join(json.dumps(row) + "\n" for row in rows)
    kept = _repair(path, *_read_jsonl(path), resume_at, text)
    keys = dict.fromkeys(k for row in kept for k in row)
    file = path.open("ab", buffering=0)

    def write(row: Row) -> None:
        numbers = {k: _to_python(v) for k, v in row.items()}
        keys.update(dict.fromkeys(numbers))
        full = {k: _to_json(v) for k, v in (keys | numbers).items()}
        files.append(file, (json.dumps(full, allow_nan=False) + "\n").encode())

    return Logger(write, file.close)


def open_csv(path: str | Path, resume_at: int | None = None) -> Logger:
    """Append one line per row. A missing key is empty; a new key becomes a column of the whole file."""
    path = Path(path)
    columns, rows, damaged = _read_csv(path)
    _repair(path, rows, damaged, resume_at, lambda kept: _csv_text(columns, kept, header=True))
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
        files.append(file, _csv_text(columns, [{k: _to_python(v) for k, v in row.items()}]).encode())

    return Logger(write, lambda: file.close())


def open_tensorboard(path: str | Path, resume_at: int | None = None) -> Logger:
    """Write each number of a row as a scalar at its env_steps. A purge event hides rows beyond `resume_at`.

    Events are written here, one record per row: tensorboardX's own writer runs in a thread, which dies silently of a
    full disk.
    """
    from tensorboardX.proto.event_pb2 import Event, SessionLog  # takes 0.2 s, so not at import
    from tensorboardX.proto.summary_pb2 import Summary

    file = _new_event_file(Path(path))

    def add(**event: Any) -> None:
        files.append(file, _encode_record(Event(wall_time=time.time(), **event).SerializeToString()))

    add(file_version="brain.Event:2")
    if resume_at is not None:
        add(session_log=SessionLog(status=SessionLog.START), step=resume_at + 1)

    def write(row: Row) -> None:
        numbers = {key: _to_python(value) for key, value in _scalars(row).items() if key != "env_steps"}
        values = [
            Summary.Value(tag=key, simple_value=number)
            for key, number in numbers.items()
            if not isinstance(number, str) and not _not_finite(number)
        ]
        steps: Any = row["env_steps"]
        add(summary=Summary(value=values), step=int(steps))

    return Logger(write, file.close)


def _new_event_file(directory: Path) -> io.FileIO:
    """Return a new file whose name TensorBoard recognises and sorts after those of earlier processes."""
    directory.mkdir(parents=True, exist_ok=True)
    name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
    for count in range(10_000):
        with contextlib.suppress(FileExistsError):
            return (directory / (f"{name}.{count}" if count else name)).open("xb", buffering=0)
    raise OSError(f"{directory}: all names of event files exist")


def _encode_record(data: bytes) -> bytes:
    """Return a TFRecord: length, checksum of the length, data, checksum of the data."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(data))
    checksum = lambda x: struct.pack("<I", masked_crc32c(x))
    return length + checksum(length) + data + checksum(data)


def open_wandb(directory: str | Path, resume_at: int | None = None) -> Logger:
    """Write rows to Weights & Biases (https://wandb.ai), with the run's config; W&B's files are in `directory`/wandb.

    The project is the name of the parent folder, the run's name that of the run directory; WANDB_PROJECT and WANDB_NAME
    override them. With WANDB_MODE=offline nothing is sent; `wandb sync` sends it later. A continued run stays the same
    W&B run; its existing rows stay, whatever `resume_at`.

    Raises:
      InputError: W&B refuses, for example without a login.
    """
    client = importlib.import_module("wandb")
    directory = Path(directory).resolve()
    id_file, config_file = directory / "wandb_id.txt", directory / "config.yaml"
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex[:16])
    try:
        run = client.init(
            dir=str(directory),
            project=os.environ.get("WANDB_PROJECT") or directory.parent.name or "jrl",
            name=os.environ.get("WANDB_NAME") or directory.name,
            id=id_file.read_text().strip(),
            resume="allow",
            config=yaml.safe_load(config_file.read_text(encoding="utf-8")) if config_file.exists() else None,
        )
    except client.Error as e:
        raise InputError(f"run.log wandb: {e}: log in with `wandb login`, or set WANDB_MODE=offline") from e

    def write(row: Row) -> None:
        numbers = {key: _to_python(value) for key, value in _scalars(row).items()}
        run.log({k: v for k, v in numbers.items() if not _not_finite(v)}, step=int(numbers["env_steps"]))

    return Logger(write, run.finish)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a jsonl file, without damaged lines and a partial last line; empty without a file."""
    return _read_jsonl(Path(path))[0]


def read_damaged(path: str | Path) -> tuple[list[dict[str, Any]], str]:
    """Return the rows as `read_rows`, and a description of the damage; empty: no damage."""
    path = Path(path)
    rows, damaged = _read_jsonl(path)
    lines = counted(len(damaged), "damaged line") * bool(damaged)
    return rows, " and ".join(filter(None, [lines, "half a last line" * (path.exists() and _is_torn(path))]))


def _read_jsonl(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return rows and damaged lines, without a partial last line."""
    if not path.exists():
        return [], []
    if not path.is_file():  # a pipe or a device may be endless
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
        found = json.loads(line, parse_int=_parse_int)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _parse_int(digits: str) -> int | float:
    """Return an integer; infinity if no float is as large."""
    return int(digits) if len(digits) <= 300 else float(digits)


def _repair(
    path: Path, rows: list[dict[str, Any]], damaged: list[str], resume_at: int | None, text: Callable[..., str]
) -> list[dict[str, Any]]:
    """Rewrite a file without damaged lines, a partial last line, and rows beyond `resume_at`; return its rows.

    Damaged lines, such as after a power cut, are moved to another file.
    """
    if damaged:
        aside = path.with_name(path.name + _DAMAGED_SUFFIX)
        with aside.open("ab", buffering=0) as file:
            files.append(file, "".join(line + "\n" for line in damaged).encode())
        _log.warning("%s: moved %d damaged lines to %s; all others stay", path, len(damaged), aside.name)
    beyond = lambda steps: resume_at is not None and steps not in (None, "") and float(steps) > resume_at
    kept = [row for row in rows if not beyond(row.get("env_steps"))]
    if path.exists() and (len(kept) < len(rows) or damaged or _is_torn(path)):
        files.replace(path, text(kept))
    return kept


def _to_python(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _scalars(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not isinstance(value, list)}


def _to_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_json(x) for x in value]
    return None if _not_finite(value) else value


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _has_steps(row: Mapping[str, Any]) -> bool:
    """Return whether a row's `env_steps`, if present, is a number."""
    steps = row.get("env_steps")
    if steps in (None, ""):
        return True
    try:
        return math.isfinite(float(steps))
    except (TypeError, ValueError, OverflowError):
        return False


def _is_torn(path: Path) -> bool:
    """Return whether the last line is partial: the process was killed while writing it."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _read_csv(path: Path) -> tuple[list[str], list[dict[str, str]], list[str]]:
    """Return columns, rows and damaged lines, without a partial last line."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    header, *lines = text[: text.rfind("\n") + 1].split("\n")[:-1] or [""]
    columns = _csv_fields(header) or []
    if not all(name.isprintable() and name and name != "\ufffd" for name in columns) or len({*columns}) < len(columns):
        return [], [], [header, *lines]  # a damaged header: all lines are damaged
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
