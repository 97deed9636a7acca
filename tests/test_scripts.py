"""The benchmark scripts, without the benchmarks."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from jrl import algos, config
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
    # in a game of two the mean return is 0
    self_play = cfg.multi_agent is not None and cfg.multi_agent.self_play is not None
    self_play = self_play or path.stem == "kuhn_poker" or path.stem.startswith("alphazero_")
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


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_the_rows_of_a_gpu_are_valid_configs(monkeypatch, scale):
    monkeypatch.chdir(ROOT)
    bench = load("on_gpu")
    for row in bench.ROWS.values():
        path, *overrides = row.settings
        cfg = config.load(path, [*overrides, *bench.run_settings(row, scale)])
        assert cfg.run.report_every and all(cfg.stop[name] >= 1e9 for name in cfg.stop)


def test_the_table_of_a_gpu_has_each_row_and_its_reason():
    bench = load("on_gpu")
    lines = [
        {"row": "pong", "ours": {"steps_per_s": 900.0}, "theirs": {"steps_per_s": 1000.0}, "versions": {}, "card": "H"},
        {"row": "sac-jax", "ours": {"steps_per_s": 9.0}, "theirs": {"error": "Traceback\nno rejax | here"}},
        {"row": "craftax", "ours": {"error": "craftax is not installed"}},
    ]
    pong, sac, craftax, skipped, *_ = bench.format_table(lines, ["playground"]).splitlines()[2:]
    assert "| 3,600 frames/s | envpool: 4,000 frames/s | 0.90 | 100,000, 0.9 x |" in pong
    assert "| 9 steps/s | rejax: no rejax / here |  |" in sac
    assert "| craftax is not installed |" in craftax and "not measured: no time left" in skipped


@pytest.mark.slow
def test_a_row_of_a_gpu_is_measured_and_a_peer_that_fails_does_not_end_the_table(tmp_path, monkeypatch):
    """On the CPU, with four environments; rejax is not among the packages of the tests."""
    bench = load("on_gpu")
    arguments = ["--rows", "ppo-2048", "dqn-jax", "--scale", "0.001", "--profile", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", *arguments])
    bench.main()
    first, second = map(json.loads, (tmp_path / "out" / "results.jsonl").read_text().splitlines())
    assert first["ours"]["steps_per_s"] > 0 and first["ours"]["updates_per_s"] > 0 and first["versions"]["jax"]
    assert second["ours"]["steps_per_s"] > 0 and ("error" in second["theirs"] or second["theirs"]["steps_per_s"] > 0)
    assert (tmp_path / "out" / "ppo-2048.tar.gz").stat().st_size > 1000
    assert (tmp_path / "out" / "table.md").read_text().count("steps/s") >= 2


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


def test_the_page_of_reproduced_results_is_that_of_its_rows():
    """Otherwise: python scripts/reproduced_page.py"""
    module = load("reproduced_page")
    assert module.page() == (ROOT / "docs" / "reproduced.md").read_text(encoding="utf-8")
    for row in module.results().values():
        if name := module.picture(row):
            assert 0 < (ROOT / "docs" / "images" / name).stat().st_size <= 40_000


def test_published_curves_keep_the_steps_of_short_runs():
    steps = np.arange(0, 1_000_001, 2000.0)
    kept = steps[load("published_curves").thin(steps)]
    assert len(kept) <= 30 and {50_000, 100_000, 200_000, 1_000_000} <= {*kept} and kept[0] >= 2000
