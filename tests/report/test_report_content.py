"""What a report says: its numbers against those of plain numpy, its parts, its tables."""

import json

import numpy as np
import pytest
from run_files import run, sweep
from scipy import stats

from jrl.errors import InputError
from jrl.report import content, figures, runs, statistics, tables
from jrl.report.content import ReportOptions

LAST = {
    ("CartPole-v1", 1e-3): (400.0, 500.0, 450.0, 300.0),
    ("CartPole-v1", 1e-4): (100.0, 500.0, 150.0),
    ("Acrobot-v1", 1e-3): (-80.0, -90.0, -70.0),
    ("Acrobot-v1", 1e-4): (-100.0, -300.0, -200.0),
}
BOUNDS = {"CartPole-v1": (0.0, 500.0), "Acrobot-v1": (-500.0, -50.0)}
FAST, SLOW = "algo.lr=0.001", "algo.lr=0.0001"


@pytest.fixture
def found(tmp_path):
    for (env, lr), values in LAST.items():
        for seed, value in enumerate(values):
            run(tmp_path / f"{env}-{lr}-{seed}", seed=seed, values=(1 + seed, 600, value), lr=lr, env=env)
    return runs.read([tmp_path])


def row(rows, **wanted):
    (one,) = [one for one in rows if all(one[key] == value for key, value in wanted.items())]
    return one


def test_the_table_of_a_task(found):
    asked = ReportOptions(seed=3, normalize=BOUNDS)
    said = content.content(found, asked)
    assert said["objective"] == "evaluation/return" and {*said["methods"]} == {FAST, SLOW}
    for (task, lr), values in LAST.items():
        one = row(said["per_task"], task=task, method=FAST if lr == 1e-3 else SLOW)
        assert one["seeds"] == len(values) and one["last"] == {"least": min(values), "most": max(values)}
        assert one["best"] == {"mean": 600, "most": 600}
        assert one["iqm"]["value"] == pytest.approx(stats.trim_mean(values, 0.25))
        assert one["median"]["value"] == np.median(values) and one["mean"]["value"] == pytest.approx(np.mean(values))
        assert all(one[name]["low"] < one[name]["value"] < one[name]["high"] for name in ("iqm", "median", "mean"))
    assert said == content.content(found, asked)
    assert said["aggregate"] != content.content(found, asked._replace(seed=4))["aggregate"]


def test_the_table_over_tasks_is_of_normalised_scores(found):
    assert "--normalize" in content.content(found, ReportOptions())["aggregate"]["none"]
    said = content.content(found, ReportOptions(normalize=BOUNDS, against=SLOW))
    assert said["methods"][0] == SLOW and said["aggregate"]["left_out"] == {}
    scores = [(np.array(LAST[task, 1e-3]) - low) / (high - low) for task, (low, high) in BOUNDS.items()]
    one = row(said["aggregate"]["rows"], method=FAST)
    assert one["runs"] == 7
    for name, statistic in (("iqm", statistics.interquartile_mean), ("optimality_gap", statistics.optimality_gap)):
        assert one[name]["value"] == pytest.approx(statistic(scores))
    thresholds, shares = said["profiles"]["thresholds"], said["profiles"]["methods"][FAST]["value"]
    at = 25
    assert shares[at] == pytest.approx(np.mean([np.mean(task > thresholds[at]) for task in scores]))
    over = row(said["curves_over_tasks"], method=FAST)["band"]
    assert over["x"][-1] == 300 and over["value"][-1] == pytest.approx(statistics.interquartile_mean(scores))


def test_a_picture_has_a_panel_for_each_task_and_one_over_all(found, tmp_path):
    from matplotlib.image import imread

    shapes = []
    for options in (ReportOptions(), ReportOptions(normalize=BOUNDS)):
        said = content.content(found, options)
        shapes.append(imread(figures.plot_curves(said, tmp_path / "curves.png")).shape)
    assert shapes[0][0] == shapes[1][0] and shapes[1][1] == pytest.approx(1.5 * shapes[0][1], abs=2)


def test_improvement_is_over_the_reference(found):
    (one,) = content.content(found, ReportOptions(against=SLOW))["improvement"]
    assert (one["method"], one["over"]) == (FAST, SLOW) and sorted(one["tasks"]) == sorted(BOUNDS)
    # 400, 450 and 300 lose against 500, to which 500 is equal; all else is won
    assert one["value"] == pytest.approx(((12 - 3 - 0.5) / 12 + 1) / 2)
    (other,) = content.content(found, ReportOptions(against=FAST))["improvement"]
    assert other["value"] == pytest.approx(1 - one["value"])


def test_curves_end_where_the_shortest_run_does(tmp_path, found):
    run(tmp_path / "short", seed=7, values=(0, 0), env="CartPole-v1")
    said = content.content(runs.read([tmp_path]), ReportOptions(axis="updates"))
    curve = row(said["curves"], task="CartPole-v1", method=FAST)
    assert [len(one["x"]) for one in curve["runs"]] == [3, 3, 3, 3, 2]
    assert (curve["band"]["x"][0], curve["band"]["x"][-1]) == (10, 20)
    assert curve["band"]["value"][0] == pytest.approx(stats.trim_mean([1, 2, 3, 4, 0], 0.25))
    (failure,) = said["failures"]
    assert failure["why"] == "unfinished; its last value counts" and failure["env_steps"] == 200


def test_without_evaluations_the_episodes_of_training_count(tmp_path):
    run(tmp_path / "a", seed=0, values=(1, 2, 3))
    assert content.content(runs.read([tmp_path]), ReportOptions())["notes"] == []
    run(tmp_path / "b", seed=0, values=(4, 5, 6), algo="dqn", key="episode/return")
    said = content.content(runs.read([tmp_path]), ReportOptions())
    assert said["objective"] == "episode/return" and said["notes"][0].startswith("dqn: no run was evaluated")
    assert [failure["why"] for failure in said["failures"]] == [
        "no row has episode/return beside env_steps; it is left out"
    ]
    assert said["methods"] == ["dqn"]
    asked = content.content(runs.read([tmp_path]), ReportOptions(objective="loss"))
    assert asked["notes"] == [] and row(asked["per_task"], method="ppo")["mean"]["value"] == pytest.approx(3 / 7)


@pytest.mark.parametrize(
    "options, says",
    [
        (
            ReportOptions(objective="evaluation/retrun"),
            "--objective evaluation/retrun: no row has it: did you mean evaluation/",
        ),
        (ReportOptions(objective="custom/return"), "did you mean .*evaluation/return"),
        (ReportOptions(against="dqn"), "--against dqn: no such method: there are algo.lr"),
        (
            ReportOptions(against="other", axis="updates"),
            "--against other: none of its runs has evaluation/return beside up",
        ),
        (ReportOptions(against="algo.lr=0.01"), "did you mean algo.lr=0.001"),
        (ReportOptions(normalize={"CartPole-v1": (0.0, 1.0)}), "--normalize: Acrobot-v1 is missing"),
    ],
)
def test_what_runs_do_not_have_is_refused(tmp_path, found, options, says):
    file = tmp_path / "x.csv"
    file.write_text("method,task,seed,step,value\nother,CartPole-v1,0,100,1\n")
    found = found._replace(runs=[*found.runs, *runs.read_csv(file)])
    with pytest.raises(InputError, match=says):
        content.content(found, options)


@pytest.mark.parametrize(
    "text, says",
    [
        ('{"a": [1]}', "a: expected .low, high."), ('{"a": [1, "x"]}', "got"), ('{"a": 3}', "got 3"),
        ('{"a": [2, 2]}', "to differ, got 2 twice"), ("[1]", "expected a mapping"), ("{", "not valid JSON"),
    ],
)  # fmt: skip
def test_a_file_of_bounds_that_is_none_is_refused(tmp_path, text, says):
    path = tmp_path / "scores.json"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        content.read_bounds(path)
    path.write_text('{"a": [-1, 2.5]}')
    assert content.read_bounds(path) == {"a": (-1.0, 2.5)}


def test_scores_are_ranked_on_their_own_task():
    ranked = content._ranked(["a", "b", "a", "b", "b"], np.array([9.0, 1.0, 5.0, 2.0, 2.0]))
    assert ranked == pytest.approx([0.75, 1 / 6, 0.25, 2 / 3, 2 / 3])


def test_what_hyper_parameters_have_to_do_with_scores(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(24):
        lr, gamma, kind = 10.0 ** -(1 + i % 4), 0.9 + rng.uniform() / 100, "abc"[i % 3]
        value = 10.0 * (i % 4) + (i % 3 == 1) + rng.uniform()
        run(tmp_path / str(i), seed=0, values=(0.0, 1.0, value), lr=lr, gamma=gamma, kind=kind)
    said = content.content(runs.read([tmp_path]), ReportOptions())
    lr, gamma, kind = (row(said["hyper_parameters"], key=f"algo.{name}") for name in ("lr", "gamma", "kind"))
    assert lr["correlation"] < -0.9 and lr["share"] > 0.9 and lr["recommended"] == "0.0001" and lr["values"] == 4
    # of 24 numbers no two are alike: eight parts of their range are compared
    assert abs(gamma["correlation"]) < 0.5 and gamma["share"] < 0.6 and gamma["by_chance"] == pytest.approx(7 / 23)
    assert gamma["values"] == 24 and kind["correlation"] is None and kind["share"] < 0.2
    # one recommendation: the values that belong together, of the method that stands first
    best = max(said["runs"], key=lambda one: one["last"])["method"]
    assert said["recommendation"]["method"] == said["methods"][0] == said["ranking"]["*"][0] == best
    assert all(f"algo.{name}={found['recommended']}" in best for name, found in (("lr", lr), ("gamma", gamma)))
    assert f"## Recommendation\n\n{best}: the highest evaluation/return, " in tables.to_markdown(said)
    assert kind["by_chance"] == pytest.approx(2 / 23)
    assert said["improvement"] == [] and "--against NAME" in tables.to_markdown(said)
    assert content.content(runs.read([tmp_path / "0", tmp_path / "1"]), ReportOptions())["hyper_parameters"] == []


def test_hyper_parameters_of_runs_that_a_scheduler_stopped_are_compared_at_equal_steps(tmp_path):
    # the members that were stopped were the better, the earlier they are, and the last is the best at its end
    directory = sweep(tmp_path / "asha", lengths=(1, 2, 3))
    said = content.content(runs.read([directory]), ReportOptions())
    assert said["failures"] == [] and [one["last"] for one in said["runs"]] == [30.0, 201.0, 302.0]
    assert [*said["equal_steps"]["scores"].values()] == [30.0, 20.0, 10.0]
    assert "value after 100 env_steps" in said["equal_steps"]["note"] in tables.to_markdown(said)
    (lr,) = said["hyper_parameters"]
    # the value that was best early is not what the report recommends
    survivor = said["runs"][2]["method"]
    assert lr["correlation"] == 1 and survivor == f"algo.lr={lr['recommended']}" == said["recommendation"]["method"]
    assert "302" in said["recommendation"]["why"] and "the scheduler did not stop" in said["recommendation"]["why"]
    assert said["ranking"]["*"] == [one["method"] for one in reversed(said["runs"])]
    (directory / "population.json").unlink()
    unknown = content.content(runs.read([directory]), ReportOptions())
    assert unknown["equal_steps"] == {} and unknown["hyper_parameters"][0]["correlation"] == -1
    assert len(unknown["failures"]) == 2


def test_markdown_and_json_say_it_all(found):
    said = content.content(found, ReportOptions(against=SLOW, normalize=BOUNDS))
    assert json.loads(tables.to_json(said)) == said
    text = tables.to_markdown(said, "curves.png")
    for title in ("Cautions", "Learning curves", "Scores", "Over 2 tasks", "Improvement", "Where they come from"):
        assert f"\n## {title}\n" in text
    assert "![learning curves](curves.png)" in text and f"| {SLOW} (reference) | 3 | 100 to 500 |" in text
    assert f"| `algo.lr` | {SLOW[8:]} | {FAST[8:]} |" in text
    assert "| commit | 0123abc |" in text and "python -m jrl.train ppo  # 13 runs" in text
    assert "## Failures" not in text
    widths = {block: {line.count("|") for line in block.splitlines()} for block in text.split("\n\n") if "|" in block}
    assert all(len(found) == 1 for found in widths.values())


def test_a_bar_in_a_cell_does_not_end_it():
    assert tables.format_table(("a",), [("x|y",)]).splitlines()[2] == "| x\\|y |"


def test_single_runs_have_no_interval(tmp_path):
    run(tmp_path / "a", seed=0, values=(1, 2, 3))
    said = content.content(runs.read([tmp_path]), ReportOptions())
    assert said["per_task"][0]["iqm"] == {"value": 3.0, "low": None, "high": None}
    assert said["curves"][0]["band"] is None and said["improvement"] == [] and said["differences"] == {}
    assert "| ppo | 1 | 3 to 3 | 3 (3) | 3 | 3 | 3 |" in tables.to_markdown(said)
