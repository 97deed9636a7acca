"""Result rows to files: `result.jsonl`, `progress.csv` and TensorBoard events.

A file is valid after every row, also when the process was killed in the middle of one: the half line is removed when
the file is opened again. A resumed run drops the rows beyond its checkpoint first, so that no step is told twice.
"""

import contextlib
import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jrl.errors import InputError

Row = Mapping[str, float | int | str | list[float]]  # lists, such as of one number per episode, go to jsonl only


class Logger(NamedTuple):
    write: Callable[[Row], None]
    close: Callable[[], None]


def open_loggers(directory: str | Path, names: Iterable[str], resume_at: int | None = None) -> Logger:
    """One logger that writes to all of `names`.

    Args:
      directory: the run directory; made if missing.
      names: of "jsonl" (result.jsonl), "csv" (progress.csv), "tensorboard" (tb/).
      resume_at: env_steps of the checkpoint a run resumes from; rows beyond it are dropped.
    Raises:
      InputError: an unknown name.
    """
    openers = {"jsonl": jsonl, "csv": csv_table, "tensorboard": tensorboard}
    files = {"jsonl": "result.jsonl", "csv": "progress.csv", "tensorboard": "tb"}
    names = list(names)
    unknown = [n for n in names if n not in openers]
    if unknown:
        raise InputError(*(f"unknown logger {n}: expected one of {', '.join(openers)}" for n in unknown))
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    return combine([openers[n](directory / files[n], resume_at) for n in names])


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
