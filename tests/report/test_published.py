"""Published results: the stored data, the comparison, the report beside them, and `jrl reproduce`."""

import importlib.resources
import json
import math

import numpy as np
import pytest
import scipy.stats
from run_files import run

from jrl import config
from jrl.report import __main__ as report
from jrl.report import content, page, published, runs
from jrl.report.content import ReportOptions
from jrl.reproduce import __main__ as reproduce

SAC = next(c for c in published.of_task("HalfCheetah-v4") if c.algorithm == "SAC" and "SimbaV2" in c.source.repository)


def test_stored_curves_are_thin_ordered_and_have_a_source():
    asset = importlib.resources.files("jrl.report") / "assets" / "published.jsonl"
    assert len(asset.read_bytes()) < 300_000
    for curve in published.curves():
        assert 1 <= len(curve.steps) == len(curve.mean) == len(curve.deviation) <= 30
        assert (np.diff(curve.steps) > 0).all() and (curve.deviation >= 0).all()
        assert curve.source.licence in ("MIT", "Apache-2.0") and len(curve.source.commit) == 40
        assert (curve.seeds == 1) == (curve.source.deviation == "episodes")


def test_the_figures_are_those_of_the_files():
    """10 seeds of results/baseline/sac.csv after 49,998 and 99,996 steps."""
    assert SAC.at(49_998) == pytest.approx((4212.3, 524.8), abs=0.1)
    assert (SAC.seeds, SAC.at(99_996)[0], SAC.at(1e9)[0]) == (
        10,
        pytest.approx(6156.4, abs=0.1),
        pytest.approx(11321, abs=1),
    )


def test_rows_of_reproduce_name_a_config_and_a_published_step():
    rows = published.reproducible()
    assert len(rows) >= 14
    for row in rows.values():
        cfg = config.load(row["config"], [f"env.id={row['env']}", *row.get("set", ())])
        curve = published.of_row(row)
        assert curve.steps[0] <= row["steps"] <= 1.01 * curve.steps[-1]
        assert curve.source.metric == "episode/return" or cfg.evaluation.every <= row["steps"]


def test_the_band_of_two_samples_is_welchs():
    ours, theirs = [4370.0, 4682, 5069, 4113, 3878], [4000.0, 4500, 3700, 4200]
    mean, deviation = np.mean(theirs), np.std(theirs, ddof=1)
    found = published.compare(ours, mean, deviation, len(theirs))
    interval = scipy.stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
    assert found.difference - found.half_width == pytest.approx(interval.low)
    assert found.difference + found.half_width == pytest.approx(interval.high)
    assert found.verdict == "inside"


def test_a_single_run_is_one_more_draw_of_the_other_side():
    """t of 2 degrees of freedom is 4.302653, of three runs with deviation 10: 4.302653 * 10 * sqrt(4 / 3) = 49.6828."""
    assert published.compare([90, 100, 110], 150, 77, 1).half_width == pytest.approx(49.6828, abs=1e-3)
    assert published.compare([150], 100, 10, 3).half_width == pytest.approx(49.6828, abs=1e-3)
    assert published.compare([150], 100, 10, 3).verdict == "above by 0.3172"
    assert published.compare([90, 100, 110], 150, 77, 1).verdict == "below by 0.3172"


@pytest.mark.parametrize(
    ("ours", "mean", "verdict"),
    [([500, 500, 500], 500, "inside"), ([499, 499, 499], 500, "below by 1"), ([3], 3, "no band: one run on each side")],
)
def test_verdicts_without_a_deviation(ours, mean, verdict):
    assert published.compare(ours, mean, 0, 1).verdict == verdict


def of_cheetah(directory, seeds=3, **more):
    """Runs with 6 evaluations, every 20,000 steps, that end near the published SAC."""
    for seed in range(1, seeds + 1):
        values = [1000.0 * k + 200 * seed for k in range(1, 7)]
        path = run(directory / f"seed-{seed}", seed, values, env="HalfCheetah-v4", algo="sac", budget=120_000, **more)
        lines = [json.loads(line) for line in (path / "result.jsonl").read_text().splitlines()]
        lines = [{**line, "env_steps": 200 * line["env_steps"]} for line in lines]
        (path / "result.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_the_report_has_published_results(tmp_path, capsys):
    of_cheetah(tmp_path / "runs")
    run(tmp_path / "runs" / "own", 0, [1, 2, 3], env="MyEnv-v0", algo="sac")
    assert report.main([str(tmp_path / "runs"), "--published", "--out", str(tmp_path / "report")]) == 0
    assert "MyEnv-v0: no published results are stored: there are some of" in capsys.readouterr().out
    said = json.loads((tmp_path / "report" / "report.json").read_text())["published"]
    assert [task["task"] for task in said] == ["MyEnv-v0", "HalfCheetah-v4"]
    rows = {(row["algorithm"], row["repository"]): row for row in said[1]["rows"]}
    first = said[1]["rows"][0]
    assert (first["algorithm"], first["repository"], first["steps"]) == ("SAC", "DAVIAN-Robotics/SimbaV2", 120_000)
    assert (first["ours"], first["deviation"], first["seeds"], first["verdict"]) == (6400, 200, 3, "inside")
    assert first["mean"] == pytest.approx(SAC.at(120_000)[0])
    assert ("SAC", "vwxyzjn/cleanrl") not in rows  # CleanRL published training episodes after 1M steps
    text = (tmp_path / "report" / "report.md").read_text()
    assert "DAVIAN-Robotics/SimbaV2, Apache-2.0" in text and "published.png" in text
    assert (tmp_path / "report" / "published.png").stat().st_size > 1000


def test_the_page_draws_published_curves(tmp_path):
    found = runs.read([of_cheetah(tmp_path / "runs")])
    options = ReportOptions()
    said = content.content(found, options) | {"published": published.content(found.runs)}
    html = page.html(found, content.to_plain(said), options, tmp_path, "var echarts;")
    assert 'id="published-results"' in html and "SAC, DAVIAN-Robotics/SimbaV2" in html
    data = json.loads(html.partition('id="data">')[2].partition("</script>")[0])
    names = {series["name"] for series in data["charts"]["published"][0]["option"]["series"]}
    assert "ours: sac (3 seeds)" in names and len(names) == 7
    without = page.html(found, content.content(found, options), options, tmp_path, "var echarts;")
    assert "published-results" not in without


def test_other_settings_are_not_compared(tmp_path):
    of_cheetah(tmp_path / "repeated")
    for path in (tmp_path / "repeated").glob("*/config.yaml"):
        path.write_text(path.read_text().replace("id: HalfCheetah-v4", "id: HalfCheetah-v4\n  action_repeat: 2"))
    (task,) = published.content(runs.read([tmp_path / "repeated"]).runs)
    assert not task["rows"] and "env.action_repeat 2: published results have 1" in task["note"]
    assert "HalfCheetah-v4, another task or version" in published.explain_missing("HalfCheetah-v5")


def test_reproduce_compares_finished_seeds_without_training(tmp_path, capsys):
    out = of_cheetah(tmp_path / "row")
    assert reproduce.main(["sac-halfcheetah-50k", "--seeds", "3", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.count("complete, 120,000 steps") == 3
    assert "ours       2,900 ± 200, 3 seeds" in said and "95 % band ± 452.7: below by 859.7" in said
    result = json.loads((out / "result.json").read_text())
    assert (result["returns"], result["seeds"], result["steps"]) == ([2700, 2900, 3100], [1, 2, 3], 50_000)
    assert (result["published"]["licence"], result["published"]["seeds"]) == ("Apache-2.0", 10)
    assert (out / "report" / "report.md").exists() and len(result["curve"]["steps"]) == 30


def test_reproduce_lists_rows_and_refuses_bad_input(tmp_path, capsys):
    assert reproduce.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(published.reproducible())
    for argv, message in (
        ([], "NAME: expected a row"),
        (["no-such-row"], "no-such-row: not a row of the published results: "),
        (["ppo-cartpole", "--seeds", "0"], "--seeds 0: expected 1 or more"),
    ):
        assert reproduce.main([*argv, "--out", str(tmp_path / "none")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_reproduce_trains_and_continues(tmp_path, capsys):
    argv = ["ppo-cartpole-swingup", "--steps", "6000", "--out", str(tmp_path / "row")]
    assert reproduce.main([*argv, "--seeds", "1"]) == 0
    assert reproduce.main([*argv, "--seeds", "2"]) == 0
    said = capsys.readouterr().out
    assert "seed 1: complete" in said and "seed 2 of 2" in said
    result = json.loads((tmp_path / "row" / "result.json").read_text())
    assert result["seeds"] == [1, 2] and all(math.isfinite(x) for x in result["returns"])
