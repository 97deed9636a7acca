"""env.json and learning curves."""

import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

from jrl.host import machine
from jrl.metrics import plots

PNG = b"\x89PNG\r\n\x1a\n"


def result(path: Path, rows):
    path.write_text("".join(json.dumps({"env_steps": x, "episode/return": y}) + "\n" for x, y in rows))
    return path


def pixels(path):
    assert path.read_bytes().startswith(PNG)
    from matplotlib.image import imread

    return imread(path)


def blue(path):
    """Pixels near matplotlib's first colour, #1f77b4."""
    return int((np.abs(pixels(path)[..., :3] - np.array([31, 119, 180]) / 255) < 0.1).all(-1).sum())


def test_env_json(tmp_path):
    path = machine.write_env_json(tmp_path / "run", devices=["cpu:0", "cpu:1"])
    content = json.loads(path.read_text())
    assert path == tmp_path / "run" / "env.json"
    assert content["versions"]["python"] == platform.python_version()
    assert set(content["versions"]) == {"python", *machine.PACKAGES}
    assert content["versions"]["jax"] == __import__("jax").__version__
    assert content["devices"] == ["cpu:0", "cpu:1"]
    assert shlex.split(content["command"]) == sys.orig_argv
    assert content["cpu"]["count"] >= content["cpu"]["usable"] >= 1 and content["memory_gib"] > 0


def test_git_state(tmp_path):
    def git(*args):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "a.py").write_text("1")
    assert machine.git_state(tmp_path / "a.py") is None  # not tracked: not this repository's
    git("add", "a.py")
    git("commit", "-m", "one")
    assert machine.git_state(tmp_path / "a.py") == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "a.py").write_text("2")
    assert machine.git_state(tmp_path / "a.py")["dirty"] is True


def test_read_curve_leaves_out_what_is_missing(tmp_path):
    path = result(tmp_path / "r.jsonl", [(10, None), (15, "x"), (17, [1, 2]), (20, 1.0), (30, 2.0)])
    with path.open("a") as file:
        file.write('{"env_steps": 40}\n{"env_steps": 50, "episode/re')
    x, y = plots.read_curve(path)
    np.testing.assert_array_equal(x, [20, 30])
    np.testing.assert_array_equal(y, [1, 2])
    assert [len(a) for a in plots.read_curve(tmp_path / "none.jsonl")] == [0, 0]


def evaluated(path, rows):
    """Rows of (env_steps, episode/return, p10, p90, evaluation/return, its weights_version)."""
    names = ("env_steps", "episode/return", "episode/return_p10", "episode/return_p90", "evaluation/return",
             "evaluation/weights_version")  # fmt: skip
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def test_an_evaluation_is_read_once(tmp_path):
    rows = [(1, 5, 0, 9, None, None), (2, 6, 0, 9, 70.0, 1), (3, 7, 0, 9, 70.0, 1), (4, 8, 0, 9, 70.0, 3)]
    x, y = plots.read_curve(evaluated(tmp_path / "r.jsonl", rows), y="evaluation/return")
    assert (x.tolist(), y.tolist()) == ([2, 4], [70, 70])
    listed = [{"env_steps": 1, "evaluation/return": 7, "evaluation/returns": [7.0]}]  # which the next row repeats not
    assert (
        plots.select_evaluations([*listed, {"env_steps": 2, "evaluation/return": 7, "evaluation/returns": None}])
        == listed
    )


def test_a_learning_curve_shows_the_rows_the_band_evaluations_and_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "save", lambda figure, png: figure)
    rows = [(10, 20.0, 10, 40, None, None), (20, 300.0, 50, 450, 480.0, 1), (30, 480.0, 400, 500, 480.0, 1)]
    path = evaluated(tmp_path / "result.jsonl", rows)
    figure = plots.plot_learning_curve(tmp_path, path, stop={"env_steps": 99, "episode/return": 475})
    axes = figure.axes[0]
    solid, points, dashed = (
        [line.get_xydata().tolist() for line in axes.lines if line.get_linestyle() == style]
        for style in ("-", "None", "--")
    )
    assert solid == [[[10, 20], [20, 300], [30, 480]]]  # not a mean over rows, which are means
    assert points == [[[20, 480]]]
    assert [[y for _, y in line] for line in dashed] == [[475, 475]]
    (band,) = axes.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert {(x, y) for x, _, low, high, *_ in rows for y in (low, high)} <= corners


def test_learning_curve_is_drawn(tmp_path):
    full = result(tmp_path / "full.jsonl", [(n, n**0.5) for n in range(0, 1000, 10)])
    drawn = plots.plot_learning_curve(full, tmp_path / "plots" / "full.png", title="ppo")
    empty = plots.plot_learning_curve(tmp_path / "none.jsonl", tmp_path / "empty.png")
    null = plots.plot_learning_curve(result(tmp_path / "null.jsonl", [(1, None)]), tmp_path / "null.png")
    one = plots.plot_learning_curve(result(tmp_path / "one.jsonl", [(1, 5.0)]), tmp_path / "one.png")
    assert blue(drawn) > 500 and blue(one) > 0
    assert blue(empty) == blue(null) == 0


def test_imports_are_light():
    heavy = ["jax", "matplotlib", "tensorboardX", "rich"]
    names = ", ".join(f"jrl.metrics.{name}" for name in ("loggers", "progress", "timers", "plots"))
    code = f"import sys, {names}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
