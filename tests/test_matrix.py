"""The table of what every algorithm can do: its cells (slow), and how it is made of them."""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from test_scripts import ROOT, load

from jrl import algos, config, envs
from jrl.types import Dict, Discrete, EnvSpec, JaxEnv, MultiBinary, MultiDiscrete, Rollout

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


def test_cells_of_an_earlier_run_are_not_run_again(tmp_path, monkeypatch, capsys):
    file, other = tmp_path / "cells.jsonl", tmp_path / "other.jsonl"
    known = dataclasses.replace(cells()[0], column="team", mean_return=9.0, threshold=8.0, random=1.0)
    file.write_text(json.dumps(dataclasses.asdict(known)) + "\n")
    ran = []
    monkeypatch.setattr(matrix, "run", lambda algo, column, seed: ran.append(column) or Cell(algo, column, "refused"))
    arguments = ["--algo", "ppo", "--column", "async", "team", "--reuse", str(file), "--json", str(other)]
    assert matrix.main(arguments) == 0
    assert ran == ["async"] and matrix.read(other) == [Cell("ppo", "async", "refused"), known]
    assert "return 9, at least 8 (random 1)" in capsys.readouterr().out


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


def test_forbidden_actions_are_counted_by_hand():
    """Of MultiDiscrete (2, 3), an action with either part forbidden is one; a reset row takes none."""
    can = jnp.array([[1, 0, 1, 1, 0], [1, 1, 0, 1, 1], [1, 0, 1, 1, 0], [0, 1, 0, 0, 1]])[:, None]
    action = jnp.array([[0, 1], [1, 0], [1, 2], [1, 2]])[:, None]  # right, wrong, wrong but not taken, right
    mask = jnp.array([True, True, False, True])[:, None]
    space = Dict((("action_mask", MultiBinary((5,))), ("place", Discrete(2))))
    env = JaxEnv(EnvSpec(space, MultiDiscrete((2, 3)), 1, None), None, None)
    obs = {"action_mask": can, "place": jnp.zeros((4, 1), jnp.int32)}
    nothing = jnp.zeros((4, 1))
    rollout = Rollout(obs, None, action, nothing, nothing, nothing, mask, None, {}, ())
    assert matrix.count_forbidden(env, rollout) == (3, 1)


def test_arrays_differ_by_a_bit():
    a = {"x": jnp.array([1.0, jnp.nan]), "y": jnp.zeros(2)}
    assert matrix.differences(a, dict(a)) == []
    assert matrix.differences(a, a | {"y": jnp.array([0.0, -0.0])}) == ["['y']"]


def test_every_algorithm_can_be_tried():
    assert set(tasks.ALGOS) <= set(algos.names())
    assert all(config.from_dict(tasks.settings(algo, "discrete")) for algo in tasks.names() if algo not in tasks.BOX)
    thresholds = [(task.random, task.threshold, task.best) for task in tasks.TASKS.values()]
    assert all(threshold > (random + best) / 2 - 1e-9 for random, threshold, best in thresholds)


def test_several_agents_have_the_tasks_of_one():
    own, team, alone = (tasks.settings("sac", column) for column in ("several agents", "team", "async"))
    assert (own["env"]["id"], own["env"]["options"]["task"]) == (tasks.TWO, alone["env"]["id"])
    assert own["multi_agent"] == {"mapping": "by_agent"} and "multi_agent" not in alone
    assert team["env"]["options"]["task"] == tasks.ECHO and "mixer" not in team["algo"]
    assert tasks.settings("pqn", "team")["algo"]["mixer"] == "sum" == tasks.settings("vdn", "async")["algo"]["mixer"]
    assert "mixer" not in tasks.settings("pqn", "several agents")["algo"]
    one, two = tasks.task_of("dqn", "async"), tasks.task_of("dqn", "team")
    assert (two.random, two.threshold, two.best) == (2 * one.random, 2 * one.threshold, 2 * one.best)
    env = envs.make(tasks.TWO, num_envs=3, options={"task": "Catch-v0"})
    assert env.spec.agents == ("agent_0", "agent_1") and env.spec.num_envs == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", list(tasks.TASKS))
def test_random_actions_get_what_the_table_says(name):
    task = tasks.TASKS[name]
    assert matrix.random_return(task) == pytest.approx(task.random, abs=0.03 * (task.best - task.random))


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
