"""Runs read from disk: what a run is, which are of one method, what is wrong with them."""

import json
import os

import numpy as np
import pytest
from run_files import run, sweep

from jrl.errors import InputError
from jrl.report import __main__ as report
from jrl.report import runs, statistics
from jrl.report.content import cautions


def groups(found):
    grouped = {}
    for one in found:
        grouped.setdefault((one.task, one.method), []).append(one)
    return grouped


def test_seeds_of_one_config_are_one_method_named_by_what_differs(tmp_path):
    for i, lr in enumerate((1e-3, 1e-3, 1e-4)):
        run(tmp_path / f"ppo{i}", seed=i, values=(1, 2, 3), lr=lr)
    run(tmp_path / "dqn", seed=0, values=(1, 2, 3), algo="dqn", double=True)
    run(tmp_path / "pendulum", seed=0, values=(1, 2, 3), algo="dqn", double=True, env="Pendulum-v1")
    found = runs.read([tmp_path])
    assert found.cautions == [] and all(one.state == runs.FINISHED for one in found.runs)
    names = {one.path.name: (one.method, one.task, one.seed) for one in found.runs}
    assert names == {
        "dqn": ("dqn", "CartPole-v1", 0),
        "pendulum": ("dqn", "Pendulum-v1", 0),
        "ppo0": ("ppo, algo.lr=0.001", "CartPole-v1", 0),
        "ppo1": ("ppo, algo.lr=0.001", "CartPole-v1", 1),
        "ppo2": ("ppo, algo.lr=0.0001", "CartPole-v1", 2),
    }
    assert {one.method for one in runs.read([tmp_path], by=["algo.name"]).runs} == {"ppo", "dqn"}
    assert {one.method for one in runs.read([tmp_path / "ppo0", tmp_path / "ppo1"]).runs} == {"ppo"}
    with pytest.raises(InputError, match=r"--by algo.lrr: no run has that key .* did you mean algo.lr"):
        runs.read([tmp_path], by=["algo.lrr"])


def test_of_many_keys_that_differ_a_name_has_enough_to_tell_methods_apart():
    keys = "abcdef"
    configs = {i: {f"algo.{key}": i if key == "c" else i // 2 for key in keys} for i in range(4)}
    assert runs.method_names(configs) == {i: f"algo.c={i}" for i in range(4)}
    few = {i: {f"algo.{key}": i for key in "abcd"} for i in range(2)}
    assert runs.method_names(few)[1] == "algo.a=1, algo.b=1, algo.c=1, algo.d=1"
    assert runs.method_names({0: configs[0], 1: {**configs[0], "run.seed": 5, "stop.env_steps": 7}}) == {0: "", 1: ""}


def test_members_are_runs_and_what_is_named_twice_is_read_once(tmp_path):
    whole = run(tmp_path / "x", seed=9, values=(1,))
    for i in range(3):
        (run(whole / "members" / f"0{i}", seed=i, values=(1, 2, i)) / "env.json").unlink()
    found = runs.read([whole, whole / "members" / "01", tmp_path])
    assert [one.seed for one in found.runs] == [0, 1, 2]
    assert found.runs[0].provenance["git"]["commit"] == "0123abc"  # of what made them together


def test_an_evaluation_counts_once(tmp_path):
    directory = run(tmp_path / "run", seed=0, values=(5, 5, 7, 6))
    rows = [json.loads(line) for line in (directory / "result.jsonl").read_text().splitlines()]
    rows[1] = {**rows[0], "env_steps": 200}  # no new one
    (directory / "result.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (one,) = runs.read([directory]).runs
    steps, values = one.curve("env_steps", "evaluation/return")
    assert steps.tolist() == [100, 300, 400] and values.tolist() == [5, 7, 6]
    assert (one.last("updates", "evaluation/return"), one.best("time_s", "evaluation/return")) == (6, 7)
    assert one.column("loss")[2] == 1 and np.isnan(one.column("none")).all() and one.reached("env_steps") == 400


def test_the_best_mean_is_one_over_enough_episodes(tmp_path):
    directory = run(tmp_path / "run", seed=0, values=(500, 20, 30), key="episode/return")
    lines = (directory / "result.jsonl").read_text().splitlines()
    rows = [{**json.loads(line), "episode/window": n} for line, n in zip(lines, (2, 10, 10), strict=True)]
    (directory / "result.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (one,) = runs.read([directory]).runs
    assert one.best("env_steps", "episode/return") == 30


@pytest.mark.parametrize(
    "broken, state, says",
    [
        (lambda d: d.joinpath("result.jsonl").open("a").write('{"env_st'), runs.FINISHED, "half a last line"),
        (lambda d: d.joinpath("result.jsonl").open("a").write("x\n{}}\n"), runs.FINISHED, "2 damaged lines"),
        (lambda d: d.joinpath("result.jsonl").write_text(""), runs.EMPTY, "no result row yet"),
        (lambda d: d.joinpath("env.json").write_text("[1"), runs.FINISHED, "env.json is no JSON"),
        (lambda d: d.joinpath("config.yaml").write_text("a: [1"), None, "is left out"),
        (lambda d: d.joinpath("config.yaml").write_text("{1: 2, stop: 3, env: x}"), runs.UNFINISHED, "300 env_steps"),
        (lambda d: (d / "result.jsonl").unlink() or os.mkfifo(d / "result.jsonl"), None, "it is not a file"),
        (
            lambda d: d.joinpath("result.jsonl").write_text('{"env_steps": 300, "evaluation/return": NaN}\nNaN\n'),
            runs.FINISHED,
            "1 damaged line",
        ),
        (
            lambda d: d.joinpath("result.jsonl").write_text('{"env_steps": 100, "evaluation/return": 1}\n'),
            runs.UNFINISHED,
            "not finished: 100 of 300 env_steps",
        ),
    ],
)
def test_a_broken_run_is_one_caution(tmp_path, broken, state, says):
    run(tmp_path / "sound", seed=1, values=(1, 2, 3))
    directory = run(tmp_path / "broken", seed=0, values=(1, 2, 3))
    broken(directory)
    found = runs.read([tmp_path])
    (said,) = found.cautions
    assert said.startswith(f"{directory}") and says in said and "\n" not in said
    assert {one.path.name: one.state for one in found.runs}.get("broken") == state


ODD_ROWS = ("9" * 400, "1e308", "-1e308", "Infinity", "[1e308, " + "9" * 400 + "]", '"x"', "{}", "[[1], null]", "true")
ODD_NAME = "<script>alert(1)</script> ![x](http://evil) $\\\\frac{$ | `c` *b* \\n# heading"
ODD_ENV = [
    {"git": "x", "cpu": 3, "versions": [1], "devices": "x", "command": ["x"], "platform": {}, "memory_gib": "x"},
    {"git": {"commit": [1], "dirty": {}}, "cpu": {"model": [1]}, "versions": {"jax": [1]}, "devices": [3, {"a": 1}]},
    {"memory_gib": 10**300, "command": "x" * 30_000, "platform": ODD_NAME},
]


def test_an_odd_run_leaves_the_report_of_the_others_whole(tmp_path, capsys):
    """Whatever the files of one run hold: the others are in the report, and names are text in report.md."""
    for i in range(2):
        run(tmp_path / "runs" / f"sound{i}", seed=i, values=(1, 2, 3 + i))
    odd = [run(tmp_path / "runs" / f"odd{i:02}", seed=i, values=(1, 2, 3)) for i in range(len(ODD_ROWS) + 7)]
    names = ("evaluation/return", "env_steps", "time/env", "hist/x", "episode/window", "updates")
    for directory, value in zip(odd, ODD_ROWS):
        fields = "".join(f', "{name}": {value}' for name in names if name != "env_steps" or value != "true")
        (directory / "result.jsonl").write_text(f'{{"loss": 1{fields}}}\n{{"env_steps": 200{fields}}}\n')
    *directories, name, algo, task, long = odd[len(ODD_ROWS) :]
    for directory, facts in zip(directories, ODD_ENV, strict=True):
        (directory / "env.json").write_text(json.dumps(facts))
    change = lambda directory, old, new: (directory / "config.yaml").write_text(
        (directory / "config.yaml").read_text().replace(old, new)
    )
    change(name, "0.001", f'"{ODD_NAME}"')
    change(algo, "name: ppo", "name: [{a: 1}]")
    change(task, "CartPole-v1", f'"{ODD_NAME}"')
    change(long, "0.001", "x" * 30_000)
    before = [(tmp_path / "runs" / f"sound{i}").resolve() for i in range(2)]
    assert report.main([str(tmp_path / "runs"), f"--out={tmp_path / 'report'}"]) == 0
    told = json.loads((tmp_path / "report" / "report.json").read_text())
    assert {str(path) for path in before} <= {one["name"] for one in told["runs"] if one["last"] is not None}
    text = (tmp_path / "report" / "report.md").read_text()
    assert "<script" not in text and "![x]" not in text and "\n# heading" not in text and "$\\\\frac" in text
    assert max(map(len, capsys.readouterr().out.splitlines())) < 2_000


def test_how_a_run_ended(tmp_path):
    def state(name, **options):
        (one,) = runs.read([run(tmp_path / name, seed=0, **options)]).runs
        return one.state

    assert state("whole", values=(1, 2, 3)) == runs.FINISHED
    assert state("short", values=(1, 2)) == runs.UNFINISHED
    (tmp_path / "fault" / "nonfinite" / "7").mkdir(parents=True)
    (tmp_path / "fault").rename(tmp_path / "kept")
    directory = run(tmp_path / "fault", seed=0, values=(1, 2))
    (tmp_path / "kept" / "nonfinite").rename(directory / "nonfinite")
    found = runs.read([directory])
    assert found.runs[0].state == runs.NOT_FINITE and "not finite: 200 of 300" in found.cautions[0]


def test_members_that_a_scheduler_stopped_are_one_caution(tmp_path):
    found = runs.read([sweep(tmp_path / "asha", lengths=(1, 2, 3, 1))])
    assert [one.state for one in found.runs] == [runs.STOPPED, runs.STOPPED, runs.FINISHED, runs.STOPPED]
    assert found.cautions == []
    (said,) = [line for line in cautions(groups(found.runs), "env_steps") if "stopped" in line]
    assert said.startswith("3 of 4 runs stopped by the scheduler of a sweep after 100 to 200 env_steps")
    assert not [line for line in cautions(groups(found.runs[2:3]), "env_steps") if "stopped" in line]
    (tmp_path / "asha" / "population.json").write_text("[1")
    broken = runs.read([tmp_path / "asha"])
    assert [one.state for one in broken.runs].count(runs.UNFINISHED) == 3
    assert len(broken.cautions) == 4 and "population.json cannot be read" in broken.cautions[0]


def test_a_copy_tells_whose_it_was_last(tmp_path):
    directory = sweep(tmp_path / "pbt", lengths=(3, 3, 3), copies=[("00", "01"), ("02", "01"), ("00", "02")])
    found = runs.read([directory, run(tmp_path / "00", seed=3, values=(1, 2, 3))])
    assert [one.source for one in found.runs] == ["02", None, "01", None]
    assert {one.state for one in found.runs} == {runs.FINISHED}


@pytest.mark.parametrize("made", [None, "empty", "file"])
def test_what_is_no_run_is_refused(tmp_path, made):
    path = tmp_path / "x"
    if made == "empty":
        path.mkdir()
    if made == "file":
        path.write_text("")
    with pytest.raises(InputError, match=r"does not exist|holds no run|is no run directory") as e:
        runs.read([path, path])
    assert len(e.value.errors) == 2


def test_runs_without_any_row_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"none of the runs has a result row yet: .*no result row yet"):
        runs.read([run(tmp_path / "x", seed=0, values=())])


def test_rows_of_others(tmp_path):
    file = tmp_path / "sb3.csv"
    file.write_text("method,task,seed,step,value,time_s\nppo,CartPole-v1,1,200,3,2\nppo,CartPole-v1,1,100,2.5,1\n")
    directory = run(tmp_path / "run", seed=0, values=(1, 2, 3))
    one, other = runs.read([directory, file]).runs
    assert (one.method, other.method) == ("ppo", "ppo of sb3.csv")
    assert [x.tolist() for x in other.curve("env_steps", "anything")] == [[100, 200], [2.5, 3]]
    assert other.curve("time_s", "anything")[0].tolist() == [1, 2] and len(other.curve("updates", "anything")[0]) == 0
    assert runs.only_method(file) == "ppo"


@pytest.mark.parametrize(
    "text, says",
    [
        ("method,task,seed,value\na,b,0,1\n", "lacks step"),
        ("", "lacks method"),
        ("method,task,seed,step,value\n", "has no rows"),
        ("method,task,seed,step,value\na,b,0,1,x\n", ":2: expected a whole number"),
        ("method,task,seed,step,value\na,b,0.5,1,1\n", ":2: expected a whole number"),
        ("method,task,seed,step,value\na,b,0,1\n", ":2: expected a whole number"),
        ("method,task,seed,step,value\n" + "a,b,0,1,nan\n" * 7, "and 2 more such lines"),
    ],
)
def test_a_csv_file_that_is_no_such_is_refused(tmp_path, text, says):
    file = tmp_path / "x.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=says):
        runs.read([file])


def test_what_is_doubtful_about_runs(tmp_path):
    for seed in (0, 1):
        run(tmp_path / f"a{seed}", seed=seed, values=(1, 2, 3))
    run(tmp_path / "again", seed=1, values=(1, 2, 4))
    run(tmp_path / "long", seed=2, values=(1, 2, 4, 4), budget=400)
    run(tmp_path / "idle", seed=3, values=(1, 2, 4), unused=1)
    said = cautions(groups(runs.read([tmp_path]).runs), "env_steps")
    assert len(said) == 6 and said[0].startswith("fewer than 5 seeds: ") and said[1].startswith("one task, ")
    text = "\n".join(said)
    assert "has seed 1 more than once: " in text and f"{tmp_path / 'a1'}, {tmp_path / 'again'}" in text
    assert f"under the seeds 0, 1: {tmp_path / 'a0'}, {tmp_path / 'a1'}: they are one run, not 2" in text
    assert f"{tmp_path / 'again'}, {tmp_path / 'idle'}: algo.unused changed nothing" in text
    assert "unequal budgets on CartPole-v1: 300 env_steps of" in text and f"400 of {tmp_path / 'long'}" in text


def test_a_method_that_is_compared_with_nothing_is_told(tmp_path):
    file = tmp_path / "sb3.csv"
    lines = "".join(f"sb3,CartPole,{seed},{step},{seed + step}\n" for seed in range(5) for step in (100, 300))
    file.write_text(f"method,task,seed,step,value\n{lines}")
    for seed in range(5):
        run(tmp_path / str(seed), seed=seed, values=(1, 2 + seed / 10, 3))
    assert cautions(groups(runs.read([tmp_path, file]).runs), "env_steps") == [
        "ppo is compared with nothing: no other method has CartPole-v1 (see --by)",
        "sb3 is compared with nothing: no other method has CartPole (see --by)",
    ]


def test_sound_runs_are_not_doubted(tmp_path):
    for env in ("CartPole-v1", "Acrobot-v1"):
        for seed in range(5):
            run(tmp_path / f"{env}{seed}", seed=seed, values=(1, 2 + seed / 10, 3 + seed / 7), env=env)
    assert cautions(groups(runs.read([tmp_path]).runs), "time_s") == []


def test_other_machines_and_commits_are_told(tmp_path):
    for seed in range(5):
        directory = run(tmp_path / str(seed), seed=seed, values=(1, 2 + seed / 10, 3), env=f"E{seed % 2}")
        env = json.loads((directory / "env.json").read_text())
        env["git"]["commit"], env["cpu"]["model"] = f"c{seed % 2}", f"m{seed % 2}"
        (directory / "env.json").write_text(json.dumps(env))
    found = groups(runs.read([tmp_path]).runs)
    assert "runs of 2 commits" in cautions(found, "env_steps")[-1]
    assert "seconds of 2 machines" in cautions(found, "time_s")[-1]


def test_curves_that_were_reported_at_other_points_have_one_axis():
    """Two tasks of lines y = slope * x: at every point the mean of the middle half of the slopes, times x."""
    rng = np.random.default_rng(0)
    slopes = [rng.uniform(1, 2, 4), rng.uniform(3, 4, 4)]
    tasks = [[(x, slope * x) for slope in own for x in [np.sort(rng.uniform(1, 9, 30))]] for own in slopes]
    grid, found = statistics.efficiency(tasks, points=11, replicates=300)
    ends = [(x[0], x[-1]) for own in tasks for x, _ in own]
    assert grid[0] == max(first for first, _ in ends) and grid[-1] == min(last for _, last in ends)
    middle = np.sort(np.concatenate(slopes))[2:6].mean()
    assert found.value == pytest.approx(middle * grid)
    width = (found.high - found.low) / grid
    assert width.min() > 0 and width == pytest.approx(np.full(11, width[0]))  # whole runs are drawn
    late = (np.array([10.0, 11.0]), np.array([1.0, 1.0]))
    assert statistics.efficiency([*tasks, [late]]) is None
