"""python -m jrl.plot: learning curves of run directories."""

import json
from pathlib import Path

import pytest

from jrl import plot
from jrl.fields import schema
from jrl.metrics import plots


def run(directory: Path, seed: int, lr: float = 1e-3, rows=((10, 1.0), (20, 2.0))) -> Path:
    directory.mkdir()
    config = {
        "algo": {"name": "ppo", "lr": lr}, "env": {"id": "CartPole-v1"}, "run": {"seed": seed, "out": str(directory)},
        "stop": {"episode/return": 475},
    }  # fmt: skip
    (directory / "config.yaml").write_text(schema.dump(config))
    lines = [json.dumps({"env_steps": x, "episode/return": y}) for x, y in rows]
    (directory / "result.jsonl").write_text("".join(line + "\n" for line in lines))
    return directory


def test_the_command_draws_one_run_or_several(tmp_path, capsys):
    runs = [run(tmp_path / str(i), seed=i) for i in range(2)]
    assert plot.main([str(runs[0])]) == 0
    assert capsys.readouterr().out.strip() == str(runs[0] / "learning_curve.png")
    several = tmp_path / "all.png"
    assert plot.main([*map(str, runs), "--out", str(several)]) == 0
    assert several.read_bytes().startswith(b"\x89PNG") and (runs[0] / "learning_curve.png").exists()


def test_several_runs_have_the_means_of_their_seeds_and_the_target(tmp_path, monkeypatch):
    runs = [run(tmp_path / str(i), seed=i, lr=lr, rows=((10, i), (20, 9))) for i, lr in enumerate((1e-3, 1e-4, 1e-3))]
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, png: drawn.append(figure) or png)
    assert plot.plot(runs, tmp_path / "all.png") == tmp_path / "all.png"
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["algo.lr=0.001 (2 runs)", "algo.lr=0.0001"]
    lines = [line.get_xydata().tolist() for line in axes.lines]
    assert [[1, 475], [0, 475]] in [line[::-1] for line in lines]
    assert any(line[0] == [10, 1] and len(line) > 2 for line in lines)  # the mean of 0 and 2


def test_a_population_has_its_band(tmp_path, monkeypatch, capsys):
    for i, lr in enumerate((1e-3, 1e-3, 1e-4)):
        run_directory = tmp_path / "population" / "members" / str(i)
        run_directory.parent.mkdir(parents=True, exist_ok=True)
        run(run_directory, seed=i, lr=lr, rows=((10, 1.0 + i), (20, 2.0 + i)))
    drawn, plot_groups = [], plots.plot_groups

    def recorded(panels, png, **axes):
        drawn.append((panels, axes))
        return plot_groups(panels, png, **axes)

    monkeypatch.setattr(plots, "plot_groups", recorded)
    assert plot.main([str(tmp_path / "population")]) == 0
    png = tmp_path / "population" / "learning_curve.png"
    assert capsys.readouterr().out.strip() == str(png) and png.read_bytes().startswith(b"\x89PNG")
    ((panels, axes),) = drawn
    assert axes == {"x": "env_steps", "y": "episode/return", "thresholds": {}}
    lines, (grid, middle, low, high) = panels["CartPole-v1"]["algo.lr=0.001"]
    assert len(lines) == 2 and grid[-1] == 20 and middle[-1] == 2.5 and (low[-1], high[-1]) == (2.0, 3.0)
    assert panels["CartPole-v1"]["algo.lr=0.0001"][1] is None  # a single run has no interval
    assert plot.main([str(tmp_path / "population"), "--y", "loss"]) == 2
    assert "no result row has both env_steps and loss" in capsys.readouterr().err


@pytest.mark.parametrize(
    "broken, says",
    [
        (lambda directory: directory.joinpath("config.yaml").unlink(), "holds no run: expected config.yaml"),
        (lambda directory: directory.joinpath("result.jsonl").write_text(""), "it has no result row yet"),
        (
            lambda directory: directory.joinpath("result.jsonl").write_text('{"env_steps": 1}\n'),
            "no result row has both env_steps and episode/return",
        ),
    ],
)
def test_what_cannot_be_drawn_is_told(tmp_path, capsys, broken, says):
    directory = run(tmp_path / "run", seed=0)
    broken(directory)
    assert plot.main([str(directory)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error
