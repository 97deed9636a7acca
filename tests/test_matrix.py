"""The table of what every algorithm can do: its cells (slow), and how it is made of them."""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_scripts import ROOT, load

from jrl import algos, config

matrix, tasks = load("matrix"), importlib.import_module("matrix_tasks")
Cell = matrix.Cell
SCRIPT = ROOT / "scripts" / "matrix.py"
PAGE = ROOT / "docs" / "matrix.md"  # where `make matrix` writes


def cells():
    learned = dataclasses.replace(Cell("ppo", "mask", "learned"), env_steps=500)
    no = "dqn needs a Discrete action space"
    return [
        learned,
        dataclasses.replace(learned, column="recurrent", env_steps=700),
        Cell("dqn", "mask", "failed", "a return of 1, below 5"),
        Cell("dqn", "recurrent", "refused", no),
        Cell("pqn", "mask", "refused", no),
        dataclasses.replace(learned, algo="pqn", column="recurrent"),
    ]


def test_the_table_has_a_number_for_each_reason(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"before\n{matrix.START}\nold\n{matrix.END}\nafter\n")
    for _ in range(2):  # written again, it is the same
        matrix.write(path, cells())
        before, table, after = re.split(f"{matrix.START}|{matrix.END}", path.read_text())
        assert (before, after) == ("before\n", "\nafter\n")
        assert table.strip().splitlines()[:8] == [
            "|  | mask | recurrent |",
            "| --- | :-: | :-: |",
            "| `ppo` | ✓ | ✓ |",
            "| `dqn` | ✗<sup>1</sup> | -<sup>2</sup> |",
            "| `pqn` | -<sup>2</sup> | ✓ |",
            "",
            "1. a return of 1, below 5",
            "2. dqn needs a Discrete action space",
        ]
        assert "the 3 ✓" in table and "at most 700 steps" in table
    assert matrix.terminal(cells()).splitlines() == [
        "     mask  recurrent",
        "ppo  ✓     ✓",
        "dqn  ✗ 1   - 2",
        "pqn  - 2   ✓",
        "1: a return of 1, below 5",
        "2: dqn needs a Discrete action space",
    ]
    path.write_text("nothing")
    with pytest.raises(matrix.InputError, match="<!-- matrix -->"):
        matrix.write(path, cells())
    assert path.read_text() == "nothing"


def test_an_empty_cell_is_what_the_library_refuses_before_training(monkeypatch):
    cell = matrix.run("dqn", "continuous")
    assert cell.status == "refused" and "Discrete" in cell.reason
    # a mistake in a cell's config is none, though an InputError
    monkeypatch.setitem(tasks.ALGOS, "dqn", {**tasks.ALGOS["dqn"], "replay": {"capacity": -1}})
    cell = matrix.run("dqn", "discrete")
    assert cell.status == "failed" and "replay.capacity" in cell.reason
    # the same error from training is a failure, and so are others
    fails = {"InputError: too late": matrix.InputError("too late"), "ValueError: broken": ValueError("broken")}
    for reason, error in fails.items():

        class Session:
            def __init__(self, cfg, error=error):
                self.error = error

            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

            def start(self):
                pass

            def advance(self):
                raise self.error

            iteration = 0

        monkeypatch.setattr(matrix, "Session", Session)
        cell = matrix.run("ppo", "continuous")
        assert (cell.status, cell.reason) == ("failed", reason)


def test_every_algorithm_can_be_tried():
    assert set(tasks.ALGOS) <= set(algos.names())
    assert all(config.from_dict(tasks.settings(algo, "discrete")) for algo in algos.names() if algo not in tasks.BOX)
    thresholds = [(task.random, task.threshold, task.best) for task in tasks.TASKS.values()]
    assert all(threshold > (random + best) / 2 - 1e-9 for random, threshold, best in thresholds)


# ---------------------------------------------------------------- the cells

_rows: dict[str, dict[str, dict]] = {}


def row(algo: str, directory: Path) -> dict[str, dict]:
    """The cells of an algorithm by column: in a process with XLA as it is used, which this one's flags make slow."""
    if algo not in _rows:
        file = directory / "cells.jsonl"
        env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        command = [sys.executable, str(SCRIPT), "--algo", algo, "--json", str(file)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        found = [json.loads(text) for text in file.read_text().splitlines()]
        assert len(found) == len(matrix.COLUMNS), done.stderr[-3000:]
        _rows[algo] = {cell["column"]: cell for cell in found}
    return _rows[algo]


def on_page() -> dict[tuple[str, str], str]:
    """The mark of each cell of the page: (algorithm, column) -> ✓ or -."""
    text = PAGE.read_text().partition(matrix.START)[2].partition(matrix.END)[0]
    assert text.strip(), "docs/matrix.md has no table: make matrix"
    head, _, *body = [[part.strip() for part in x.split("|")[1:-1]] for x in text.splitlines() if x.startswith("|")]
    return {(name.strip("`"), column): mark[:1] for name, *marks in body for column, mark in zip(head[1:], marks)}


def test_the_page_has_all_cells_and_no_failure():
    found = on_page()
    assert set(found) == {(algo, column) for algo, _ in found for column in matrix.COLUMNS}
    assert {*tasks.ALGOS} <= {algo for algo, _ in found} <= {*algos.names()}
    assert set(found.values()) <= {"✓", "-"}


@pytest.mark.slow
@pytest.mark.parametrize("column", list(matrix.COLUMNS))
@pytest.mark.parametrize("algo", [*tasks.ALGOS, "vdn"])
def test_a_cell_is_what_the_page_says(algo, column, tmp_path):
    cell = row(algo, tmp_path)[column]
    assert cell["status"] != "failed", cell["reason"]
    assert {"learned": "✓", "refused": "-"}[cell["status"]] == on_page()[algo, column]
    if cell["status"] == "learned":
        assert cell["mean_return"] >= cell["threshold"]
