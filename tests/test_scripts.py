"""The benchmark scripts, without the benchmarks."""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jrl import algos, config, train
from jrl.config import Sizes, datasets
from jrl.sweep import settings

ROOT = Path(__file__).parent.parent


def load(name):
    if str(ROOT / "scripts") not in sys.path:  # where a script finds its parts
        sys.path.append(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BREAKS = load("break_things").BREAKS


@pytest.mark.parametrize("name", BREAKS)
def test_a_known_mistake_can_still_be_made(name):
    """The script itself takes minutes."""
    found = BREAKS[name]
    assert (ROOT / found.file).read_text().count(found.old) == 1 and found.new != found.old
    for test in found.tests:
        file, _, function = test.partition("::")
        assert f"def {function}" in (ROOT / file).read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_is_valid_and_has_a_return_criterion(path):
    data = config.mapping(path)
    if "sweep" in data:
        sweep, data, _ = settings.read_settings(data, {}, [])
        cfg = config.load(data)
        settings.check_spaces(cfg, sweep)
        assert sweep.list_pauses(cfg, 27)
    cfg = config.load(data)
    self_play = cfg.multi_agent is not None and cfg.multi_agent.self_play is not None  # what one wins another loses
    from_data = datasets.alone(cfg)  # learns from all updates; what it reaches is what evaluations say
    assert self_play or from_data or any(name.endswith("/return") for name in cfg.stop)
    assert not (from_data or "evaluation/return" in cfg.stop) or cfg.evaluation.every
    # the greedy policy of a Q function or an actor can fall from one update to the next: the best weights are kept
    off_policy = cfg.replay is not None
    assert not off_policy or (cfg.evaluation.every and cfg.checkpoint.keep_best_by == "evaluation/return")
    assert not from_data or "python scripts/make_data.py" in path.read_text()
    assert config.from_dict(config.to_dict(cfg)) == cfg


def test_the_works_are_valid_configs(monkeypatch):
    monkeypatch.chdir(ROOT)
    bench = load("bench_speed")
    for name, (path, *overrides) in {**bench.WORKS, **{k: v.settings for k, v in bench.STARTS.items()}}.items():
        cfg = config.load(path, overrides)
        assert cfg.stop[Sizes(cfg).counts_by] > 0, name
    for task in load("bench_learning").TASKS:
        assert any(name != "env_steps" for name in config.load(task.config, task.overrides).stop), task.name
        assert (task.bounds is not None) == datasets.alone(config.load(task.config, task.overrides)), task.name


@pytest.mark.slow
def test_a_table_of_learning_is_made_in_parts(tmp_path, monkeypatch, capsys):
    bench = load("bench_learning")
    small = (
        "env.backend=jax", "env.num_envs=2", "network.hidden=[4]", "rollout.length=8", "algo.num_epochs=1",
        "algo.num_minibatches=1", "run.report_every=16", "run.smoothing_episodes=1", "run.compile_cache=false",
        "stop.env_steps=64",
    )  # fmt: skip
    path = str(ROOT / "configs" / "ppo.yaml")
    tasks = [bench.Task(f"to-{n}", path, (*small, f"stop.episode/return={n}"), control=n > 99) for n in (100, 5, 200)]
    asked = []

    def in_this_process(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, train.main(command[3:]), "", "")

    def table(*args):
        monkeypatch.setattr(sys, "argv", ["bench_learning.py", f"--out={tmp_path / 'x'}", *args])
        status = bench.main()
        lines = capsys.readouterr().out.splitlines()
        return status, [line.split(" | ") for line in lines if line.startswith("| to-")]

    monkeypatch.setattr(bench, "TASKS", tasks)
    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=in_this_process))
    status, ((name, threshold, budget, passed, steps, *_),) = table("--only", "to-5", "--seeds=2")
    assert (status, name, threshold, budget, passed) == (0, "| to-5", "5", "64", "2/2") and " to " in steps
    (tmp_path / "x" / "to-100").mkdir()  # of a command that was killed
    assert [row[0] for row in table("--only", "to-100", "--seeds=2")[1]] == ["| to-100", "| to-5"]
    count = len(asked)
    assert [row[3] for row in table("--only", "to-5", "to-100", "--seeds=2")[1]] == ["2/2", "2/2"]
    png = tmp_path / "learning.png"
    assert len(table("--table", f"--plot={png}")[1]) == 2 and len(asked) == count
    assert png.read_bytes()[:4] == b"\x89PNG"
    runs = [tmp_path / "x" / "to-5" / "members" / f"0{i}" / "config.yaml" for i in range(2)]
    assert [config.load(str(run)).run.seed for run in runs] == [0, 1]


def test_a_panel_of_the_learning_figure_names_its_config_and_threshold(monkeypatch):
    monkeypatch.chdir(ROOT)
    bench = load("bench_learning")
    tasks = {task.name: task for task in bench.TASKS}
    told = lambda name: tuple(of(tasks[name]) for of in (bench.title_of, bench.criterion_of, bench.threshold_of))
    assert told("cartpole") == ("ppo.yaml: CartPole-v1", "episode/return", 475)
    assert told("cartpole-jax") == ("ppo.yaml: CartPole-v1\nenv.backend=jax", "episode/return", 475)
    assert told("sac-pendulum") == ("sac.yaml: Pendulum-v1, evaluations", "evaluation/return", -250)
    titles = [bench.title_of(task) for task in bench.TASKS if not task.control]
    assert not [title for title in titles if "graph" in title]


def test_programs_of_all_algorithms_are_compared():
    assert sorted(load("compare_programs").OPTIONS) == sorted(algos.names())


def test_the_rate_leaves_out_the_start_and_the_last_row():
    bench = load("bench_speed")
    rows = [{"env_steps": s, "time_s": t} for s, t in ((10, 9.0), (300, 10.0), (600, 11.0), (1000, 12.0), (1001, 12.0))]
    assert bench.steady_rate(rows) == pytest.approx(350)


def test_ratios_are_of_the_same_rounds():
    bench = load("bench_speed")
    ours = [{"name": "M20", "round": i, "steps_per_s": x} for i, x in ((1, 50), (2, 80), (3, 60))]
    shared = [{"name": "M20s", "round": i, "steps_per_s": x} for i, x in ((1, 100), (2, 80))]  # the third failed
    peer = [{"name": "python p", "peer": "p", "work": "M20", "round": i, "steps_per_s": 10} for i in (1, 2, 3)]
    other = [
        {"name": "python q", "peer": "q", "work": "M2", "round": 1, "steps_per_s": 7},
        {"name": "cold", "round": 1},
    ]
    starts = [{"name": name, "round": 1, "seconds": x} for name, x in (("to475", 3.0), ("to475s", 7.5), ("cold", 9.0))]
    found = bench.ratios([*ours, *shared, *peer, *other, *starts])
    assert found == {
        ("M20", "p"): (6.0, [5.0, 8.0, 6.0]),
        ("M20", "M20s"): (pytest.approx(65 / 90), [0.5, 1.0]),
        ("to475s", "to475"): (2.5, [2.5]),
    }


def test_seconds_are_until_the_last_run_is_there(monkeypatch):
    bench = load("bench_speed")
    rows = [
        [{"timestamp": 10.0 + i + n, "env_steps": 100 * n, "episode/return": 250 * n} for n in (1, 2)] for i in (0, 3)
    ]
    asked = []

    def train(config, overrides, **options):
        asked.append(options)
        return 10.0, rows

    monkeypatch.setattr(bench, "train", train)
    assert bench.measure("to475s") == {"seconds": 5.0, "env_steps": 200, "return": 500}
    assert [one["seeds"] for one in asked] == [16, 16] and asked[0]["cache"] == asked[1]["cache"]  # the first compiles
    assert bench.measure("warm")["seconds"] == 4.0  # until the first row
    found = bench.measure("sweep")
    assert found["members"] == 2 and found["env_steps"] == 400
    assert asked[-1]["spaces"] and asked[-1]["seeds"] == 4 and not asked[-1]["keep_criteria"]
    rows[1].pop()
    assert bench.measure("to475s")["error"] == "1 of 2 runs did not reach 475.0"


def test_the_figure_shows_ours_beside_the_peers(tmp_path):
    rows = [
        {"name": "W1", "steps_per_s": 90_000},
        {"name": "python sb3", "peer": "sb3", "work": "W1", "steps_per_s": 11_000},
        {"name": "python rejax", "peer": "rejax", "work": "ppo-gymnax", "envs": 4, "steps_per_s": 160_000},
        {"name": "cold", "seconds": 7.0},
    ]
    bench = load("bench_speed")
    bench.plot(json.loads(json.dumps(rows)), tmp_path / "figures" / "speed.png")
    assert (tmp_path / "figures" / "speed.png").read_bytes()[:4] == b"\x89PNG"
    # words, one for each work: its code is of no use to a reader
    assert set(bench.WORKS) == set(bench.LABELS) and len(set(bench.LABELS.values())) == len(bench.LABELS)
    kept = [json.loads(line) for line in (ROOT / "docs" / "images" / "speed.jsonl").read_text().splitlines()]
    assert {row.get("peer") for row in kept} == {
        None,
        "sb3",
        "sbx",
        "rejax",
    }  # of which the picture in the docs is drawn


def test_reading_data_is_timed_beside_the_barest_reader(monkeypatch, capsys, tmp_path):
    pytest.importorskip("pyarrow")
    bench = load("bench_data")
    monkeypatch.setattr(sys, "argv", ["bench_data.py", "--mb", "2", "--rounds", "1"])
    assert bench.main() == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["format"] for row in rows] == list(bench.FORMATS)
    assert all(row["files"] and row["ratio"] > 0 for row in rows)
    store = bench.episodes(2)
    assert 1.8e6 < sum(x.nbytes for x in (store.obs, store.action, store.reward)) < 2.2e6
    for kind in ("jrl", "rllib-parquet"):  # the bare reader finds the same files
        bench.data.write(store, tmp_path / kind, kind)
        assert bench.bare(tmp_path / kind) >= 3


def test_the_page_of_rllibs_features_is_what_the_script_tries(monkeypatch):
    """The page and the table agree, and what can be tried without training is true."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = importlib.import_module("rllib_features")
    features = script.table()
    assert script.page(features) == (ROOT / script.PAGE).read_text()
    cheap = [feature for several in features.values() for feature in several if not feature.slow]
    assert len(cheap) > 100
    assert {feature.name: wrong for feature in cheap if (wrong := script.attempt(feature))} == {}
    # a check that is not true is found
    assert "expected 1, got 2" in script.attempt(cheap[0]._replace(check=lambda: script.equal(2, 1)))
    assert "algorithm lacks no_such_method" in script.attempt(
        cheap[0]._replace(check=script.has("algorithm", "no_such_method"))
    )
    assert "was taken" in script.attempt(cheap[0]._replace(check=script.refuses("training", gamma=0.9)))
    assert "was taken" in script.attempt(cheap[0]._replace(check=script.unmigrated({"gamma": 0.9})))
