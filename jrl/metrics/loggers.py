"""Result rows as `result.jsonl`, `progress.csv`, TensorBoard events, to W&B, and to users' loggers.

Files are valid after every row, even if the process was killed mid-row or the disk is full: on opening, a partial last
line and damaged lines are removed. A resumed run first drops the rows beyond its checkpoint, so that no step is
reported twice.
"""

import contextlib
import csv
import difflib
import errno
import functools
import importlib
import importlib.util
import inspect
import io
import json
import logging
import math
import os
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

_FLUSH_S = 2.0  # minimum time between two flushes of TensorBoard's events

_log = logging.getLogger(__name__)


class Logger(NamedTuple):
    write: Callable[[Row], None]
    close: Callable[[], None]


def check(names: Iterable[str]) -> list[str]:
    """Returns the faults in the entries of `run.log`, each with its fix; nothing is opened."""
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
    """Opens one logger that writes to all of `names`.

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
    """Returns the function that opens the logger of an entry of `run.log`. Raises InputError."""
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
    """Returns a logger that writes each row to all `loggers`, and closes them all even if one raises."""
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
    """Appends one JSON object per row. Each key seen so far is in every later row; non-finite numbers are null."""
    path = Path(path)
    rows, damaged = _read_jsonl(path)
    kept = _drop_rows(path, rows, len(damaged), resume_at)
    if path.exists():
        files.replace(path, "".join(json.dumps(row) + "\n" for row in kept))
    keys = dict.fromkeys(k for row in kept for k in row)
    file = path.open("ab", buffering=0)

    def write(row: Row) -> None:
        numbers = {k: _to_python(v) for k, v in row.items()}
        keys.update(dict.fromkeys(numbers))
        full = {k: _to_json(v) for k, v in (keys | numbers).items()}
        files.append(file, (json.dumps(full, allow_nan=False) + "\n").encode())

    return Logger(write, file.close)


def open_csv(path: str | Path, resume_at: int | None = None) -> Logger:
    """Appends one line per row. A missing key is empty; a new key becomes a column of the whole file."""
    path = Path(path)
    columns, rows, damaged = _read_csv(path)
    files.replace(path, _csv_text(columns, _drop_rows(path, rows, damaged, resume_at), header=True))
    file = path.open("ab", buffering=0)

    def write(row: Row) -> None:
        nonlocal file, columns
        row = _scalars(row)
        if new := [k for k in row if k not in columns]:
            columns = columns + new
            files.replace(path, _csv_text(columns, _read_csv(path)[1], header=True))
            file.close()
            file = path.open("ab", buffering=0)
        files.append(file, _csv_text(columns, [row]).encode())

    return Logger(write, lambda: file.close())


def open_tensorboard(path: str | Path, resume_at: int | None = None) -> Logger:
    """Writes each number of a row as a scalar at its env_steps. A purge event hides rows beyond `resume_at`.

    tensorboardX's SummaryWriter writes in a thread, which waits forever after a full disk; its EventsWriter does not.
    """
    Path(path).mkdir(parents=True, exist_ok=True)
    flushed = 0.0

    @functools.cache
    def open_writer() -> Any:
        from tensorboardX.event_file_writer import EventsWriter  # takes 0.2 s, so not before the first update

        # a suffix, because the name counts seconds only: no two files may have one name
        return EventsWriter(str(Path(path) / "events"), f".{time.time_ns()}")

    if resume_at is not None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        open_writer().write_event(Event(wall_time=time.time(), session_log=start, step=resume_at + 1))

    def write(row: Row) -> None:
        nonlocal flushed
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        writer, numbers = open_writer(), _scalars(row)
        values = [
            Summary.Value(tag=key, simple_value=number)
            for key, number in numbers.items()
            if key != "env_steps" and not isinstance(number, str) and not _not_finite(number)
        ]
        now, steps = time.time(), int(numbers["env_steps"])
        writer.write_event(Event(wall_time=now, summary=Summary(value=values), step=steps))
        if now - flushed > _FLUSH_S:  # a flush waits for the disk
            writer.flush()
            flushed = now

    def close() -> None:
        if open_writer.cache_info().currsize:
            open_writer().close()

    return Logger(write, close)


def open_wandb(directory: str | Path, resume_at: int | None = None) -> Logger:
    """Writes rows to Weights & Biases (https://wandb.ai), with the run's config; W&B's files are in `directory`/wandb.

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
        numbers = _scalars(row)
        run.log({k: v for k, v in numbers.items() if not _not_finite(v)}, step=int(numbers["env_steps"]))

    return Logger(write, run.finish)


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Returns the rows of a jsonl file, without damaged lines and a partial last line; empty without a file."""
    return _read_jsonl(Path(path))[0]


def read_damaged(path: str | Path) -> tuple[list[dict[str, Any]], str]:
    """Returns the rows as `read_rows`, and a description of the damage; empty: no damage."""
    path = Path(path)
    rows, damaged = _read_jsonl(path)
    lines = counted(len(damaged), "damaged line") * bool(damaged)
    return rows, " and ".join(filter(None, [lines, "half a last line" * (path.exists() and _is_torn(path))]))


def _read_jsonl(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns rows and damaged lines, without a partial last line."""
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
        found = json.loads(line, parse_int=lambda x: int(x) if len(x) <= 300 else math.inf)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _drop_rows(path: Path, rows: list[dict[str, Any]], damaged: int, resume_at: int | None) -> list[dict[str, Any]]:
    """Returns the rows without those beyond `resume_at`, with a warning if the file has damaged lines."""
    if damaged:
        _log.warning("%s: dropped %s; all other rows stay", path, counted(damaged, "damaged line"))
    beyond = lambda steps: resume_at is not None and steps not in (None, "") and float(steps) > resume_at
    return [row for row in rows if not beyond(row.get("env_steps"))]


def _to_python(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _scalars(row: Row) -> dict[str, Any]:
    return {key: _to_python(value) for key, value in row.items() if not isinstance(value, list)}


def _to_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_json(x) for x in value]
    return None if _not_finite(value) else value


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _has_steps(row: Mapping[str, Any]) -> bool:
    steps = row.get("env_steps")
    if steps in (None, ""):
        return True
    try:
        return math.isfinite(float(steps))
    except (TypeError, ValueError, OverflowError):
        return False


def _is_torn(path: Path) -> bool:
    """Returns whether the last line is partial: the process was killed while writing it."""
    return path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")


def _read_csv(path: Path) -> tuple[list[str], list[dict[str, str]], int]:
    """Returns columns, rows and the number of damaged lines, without a partial last line."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    header, *lines = text[: text.rfind("\n") + 1].splitlines() or [""]
    columns = _csv_fields(header)
    if not all(name.isprintable() and name and name != "\ufffd" for name in columns) or len({*columns}) < len(columns):
        return [], [], 1 + len(lines)  # a damaged header: all lines are damaged
    rows = [dict(zip(columns, fields)) for line in lines if len(fields := _csv_fields(line)) == len(columns)]
    rows = [row for row in rows if _has_steps(row)]
    return columns, rows, len(lines) - len(rows)


def _csv_fields(line: str) -> list[str]:
    """Returns the fields of a line; []: an empty or damaged line."""
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return []


def _csv_text(columns: list[str], rows: Iterable[Mapping[str, Any]], *, header: bool = False) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header and columns:
        writer.writeheader()
    one_line = lambda x: " ".join(x.splitlines()) if isinstance(x, str) else x
    writer.writerows({k: one_line(v) for k, v in row.items()} for row in rows)
    return text.getvalue()
