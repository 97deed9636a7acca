"""Schedulers of a sweep: stopped members, copied members and their values, and sweeps that were killed."""

import json
import math
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweep_runs import SMALL, rows

from jrl import config, train
from jrl.algos import ppo
from jrl.errors import InputError
from jrl.fields import schema
from jrl.run.store import checkpoint
from jrl.sweep import __main__, schedule, settings, space, summary, trainer
from jrl.sweep import members as populations
from jrl.sweep import train as sweeps

OPTIONS = [
    "--set=checkpoint.every=64", "--set=algo.lr=log(1e-4,1e-1)", "--set=run.smoothing_episodes=1", "--set=run.seed=1",
]  # fmt: skip
KINDS = {
    "asha": [  # some members end by a criterion
        "--scheduler=asha(eta=2,first=48)", "--samples=4", "--budget=160", "--stop=episode/return=16",
    ],
    "pbt": ["--scheduler=pbt(interval=64,quantile=0.5)", "--samples=4", "--budget=160"],
    "groups": [
        "--scheduler=asha(eta=2,first=48)", "--set=algo.num_epochs=choice(1,2)", "--samples=2", "--budget=96",
        "--max-members=1", "--set=run.smoothing_episodes=100",
    ],
    "tpe": ["--search=tpe", "--samples=4", "--batch=2", "--budget=48"],
}  # fmt: skip


def run(out, *args):
    return __main__.main([*SMALL, *OPTIONS, *args, f"--out={out}"])


# ---------------------------------------------------------------- decisions


def test_rungs_are_factors_of_eta_apart_and_leave_one_point():
    assert schedule.Asha().list_pauses(27_000, 27, 10) == [1000, 3000, 9000]
    assert schedule.Asha(eta=4, first=500).list_pauses(9000, 100, 10) == [500, 2000, 8000]
    assert schedule.Asha().list_pauses(27_000, 27, 2000) == [2000, 6000, 18_000]
    assert schedule.Asha().list_pauses(1000, 2, 10) == []
    with pytest.raises(InputError, match=r"asha: first=5 must be at least 10, .* below the 1000 steps"):
        schedule.Asha(first=5).list_pauses(1000, 9, 10)


def test_asha_stops_points_with_all_their_seeds_and_those_without_a_score_first():
    scores = {"0": 1.0, "1": 9.0, "2": 4.0, "3": 4.0, "4": math.nan, "5": 99.0, "6": 3.0, "7": 3.0}
    members = {name: {"algo.lr": int(name) // 2, "run.seed": int(name) % 2} for name in scores}
    assert schedule.Asha(eta=2).decide(members, scores) == {"stopped": ["6", "7", "4", "5"]}
    assert schedule.Asha(eta=4).decide(members, scores) == {"stopped": ["2", "3", "6", "7", "4", "5"]}


def scored(directory, seeds, *scores):
    """A sweep of two points, each with `seeds` seeds, whose members have these scores."""
    cfg = config.from_dict({"algo": {"name": "ppo"}, "env": {"id": "CartPole-v1"}, "stop": {"env_steps": 96}})
    plan, _, _ = settings.read_settings({}, {"scheduler": "asha(eta=2)"}, ["algo.lr=choice(0.1, 0.2)"])
    changes = [{"algo.lr": lr, "run.seed": seed} for lr in (0.1, 0.2) for seed in range(seeds)]
    kept = populations.Record(directory, changes, dict(schema.plain(plan.settings)), [len(changes)])
    sweep = sweeps.Sweep(cfg, kept)
    for member, score in zip(sweep.members, scores, strict=True):
        member.directory.mkdir(parents=True)
        (member.directory / "result.jsonl").write_text(json.dumps({"env_steps": 48, "episode/return": score}) + "\n")
    return sweep


def test_a_member_that_met_its_criterion_counts_at_the_rung_with_its_last_score(tmp_path, capsys):
    stopped, sweep = {}, scored(tmp_path, 2, 99.0, 1.0, 9.0, 9.0)
    sweep.record.add_end(sweep.members[0], "episode/return", 32)
    sweep.record.add_end(sweep.members[1], "env_steps", 96)
    kept = populations.read_record(tmp_path).ended
    assert kept == {"00": {"why": "episode/return", "at": 32, "stop": {"env_steps": 96}}}
    finished = sweep._find_finished(range(4))
    sweep._decide(types.SimpleNamespace(stop=stopped.update), sweep.members[1:], [], finished, 0, 48)
    assert list(stopped) == ["02", "03"]  # without member 00 it would be "01"
    assert sweep.record.decisions[0]["scores"] == {"00": 99.0, "01": 1.0, "02": 9.0, "03": 9.0}
    assert sweep.record.find_end_reason(sweep.members[0]) is None  # without its last checkpoint the member trains on


def test_a_frozen_member_is_the_worst_and_counts_at_no_rung(tmp_path):
    sweep = scored(tmp_path, 1, 9.0, 9.0)
    sweep.record.add_end(sweep.members[0], "not finite: x", 0)
    assert sweep._read_scores(sweep.members) == {"00": pytest.approx(math.nan, nan_ok=True), "01": 9.0}
    assert sweep._find_finished(range(2)) == [] and sweep.record.find_end_reason(sweep.members[0]) == "not finite: x"
    assert populations.read_record(tmp_path).find_end_reason(sweep.members[0]) == "not finite: x"


def test_points_that_trained_longer_rank_first_and_best_is_a_seed_of_the_best_point(tmp_path, capsys):
    """Neither a lucky seed nor a high score after few steps ranks a point first."""
    points = {
        1: ((400.0, "env_steps"), (440.0, "env_steps")), 2: ((500.0, "env_steps"), (20.0, "episode/return")),
        3: ((900.0, "stopped at 2000"), (900.0, "stopped at 2000")),
        4: ((950.0, "stopped at 6000"), (10.0, "stopped at 6000")),
        5: ((999.0, "env_steps"), (999.0, "failed: status 1")), 6: ((None, "env_steps"), (None, "env_steps")),
    }  # fmt: skip
    cfg = config.from_dict({"algo": {"name": "ppo"}, "env": {"id": "CartPole-v1"}, "stop": {"env_steps": 9000}})
    values = [{"algo.lr": lr, "run.seed": seed} for lr in points for seed in (0, 1)]
    members = populations.build_members(cfg, tmp_path, values)
    ends = {}
    for member, (score, end) in zip(members, (one for pair in points.values() for one in pair), strict=True):
        member.directory.mkdir(parents=True)
        config.write(member.config, member.directory)
        ends[member.name] = end
        row = {"env_steps": 2000, "episode/return": score}
        (member.directory / "result.jsonl").write_text(json.dumps(row) + "\n")
    assert summary.report_end(tmp_path, members, ends, None, ()) == 1
    said = capsys.readouterr().out
    ranked = [line.strip() for line in said.splitlines() if line.startswith("  ")]
    assert ranked == [
        "420  algo.lr=1  (2 seeds)", "260  algo.lr=2  (2 seeds)", "999  algo.lr=5  (2 seeds, 1 without a score)",
        "480  algo.lr=4  (2 seeds, stopped at 6,000 steps)", "900  algo.lr=3  (2 seeds, stopped at 2,000 steps)",
    ]  # fmt: skip
    assert "best: member 01, 440, the best seed of algo.lr=1, copied to" in said
    assert (tmp_path / "best" / "result.jsonl").read_text() == (members[1].directory / "result.jsonl").read_text()


def test_pbt_replaces_the_worst_by_copies_of_the_best_with_nearby_values():
    spaces = {
        "algo.lr": space.parse_space("", "log(1e-4, 1e-2)"),
        "algo.gamma": space.parse_space("", "logit(0.9, 0.99)"),
    }
    scores = {str(i): float(i) for i in range(8)} | {"6": math.nan}
    members = {name: {"algo.lr": 1e-3, "algo.gamma": 0.95, "run.seed": int(name)} for name in scores}
    scheduler = schedule.Pbt(resample=0.0)
    found = scheduler.decide(members, scores, spaces, [0])["copies"]
    assert found == scheduler.decide(members, scores, spaces, [0])["copies"]
    assert {copy["member"] for copy in found} == {"0", "6"} and {copy["source"] for copy in found} <= {"7", "5"}
    odds = 0.95 / 0.05
    for copy in found:
        changed = copy["changed"]
        assert changed["run.seed"] == int(copy["member"])
        assert min(abs(changed["algo.lr"] / 1e-3 - factor) for factor in (1.25, 0.8)) < 1e-5
        gamma = changed["algo.gamma"]
        assert min(abs(gamma / (1 - gamma) / odds - factor) for factor in (1.25, 0.8)) < 1e-3
    drawn = schedule.Pbt(resample=1.0).decide(members, scores, spaces, [0])["copies"]
    assert all(1e-4 <= copy["changed"]["algo.lr"] <= 1e-2 for copy in drawn)
    assert len({copy["changed"]["algo.lr"] for copy in drawn} - {1e-3}) == 2
    without_scores = dict.fromkeys(scores, math.nan)
    assert scheduler.decide(members, without_scores, spaces, [0]) == {"copies": []}
    assert schedule.Pbt(interval=100, burn_in=250).list_pauses(600, 8, 10) == [300, 400, 500]


@pytest.mark.parametrize(
    ("text", "value", "up", "down"),
    [
        ("choice(1, 2, 4)", 2, 4, 1),
        ("choice(1, 2, 4)", 4, 4, 2),
        ("uniform(0, 1)", 0.5, 0.625, 0.4),
        ("uniform(0, 1)", 0.9, 1.0, 0.72),
        ("int(1, 10)", 2, 3, 1),
        ("pow2(16, 64)", 32, 64, 16),
        ("pow2(16, 64)", 16, 32, 16),
    ],
)
def test_perturb_gives_a_nearby_value(text, value, up, down):
    found = space.parse_space("", text)
    assert found.perturb(value, 1.25) == pytest.approx(up)
    assert found.perturb(value, 1 / 1.25) == pytest.approx(down)
    assert found.to_value(found.to_share(value)) == pytest.approx(value)


# ---------------------------------------------------------------- whole sweeps


class Killed(BaseException):
    """Stands in for SIGKILL."""


# a sweep is killed at the n-th moment before or after a write of population.json or a copied checkpoint
MOMENTS = {"asha": 5, "pbt": 7, "groups": 3, "tpe": 3}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k == "asha" else [pytest.mark.slow]) for k in KINDS])
def test_a_killed_sweep_resumes_to_the_same_end(kind, tmp_path, monkeypatch, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(whole, *KINDS[kind]) == 0
    kept = json.loads((whole / "population.json").read_text())
    assert len(kept["decisions"]) == {"asha": 2, "pbt": 2, "groups": 1, "tpe": 0}[kind]
    moments = [MOMENTS[kind]]

    def moment():
        if moments:
            moments[0] -= 1
            if not moments[0]:
                moments.clear()
                raise Killed

    write, copy = populations.Record.write, trainer.copy_checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(populations.Record, "write", lambda *a: (moment(), write(*a), moment()))
        patch.setattr(trainer, "copy_checkpoint", lambda *a: (moment(), copy(*a), moment()))
        with pytest.raises(Killed):
            run(cut, *KINDS[kind])
    assert json.loads((cut / "population.json").read_text()) != kept
    assert __main__.main([f"--resume={cut}"]) == 0
    assert json.loads((cut / "population.json").read_text()) == kept
    for i in range(len(kept["members"])):
        name = f"members/0{i}"
        assert rows(cut / name) == rows(whole / name), name
    assert bool(kept["ended"]) == (kind == "asha")
    said = capsys.readouterr().out
    if kind == "groups":
        assert "stopped at 48" in (whole / "sweep.csv").read_text()
    if kind == "asha":
        ends = re.findall(r"^  \S+  algo.lr=\S+  \(1 seed(?:, 1 without a score)?(.*)\)$", said, re.M)
        assert ends[:4] == ["", ", stopped at 96 steps", *[", stopped at 48 steps"] * 2]
    assert ("warning: " in said) == (kind == "groups")  # its rows are means over a hundred episodes


@pytest.mark.slow  # starts processes, each of which compiles
@pytest.mark.parametrize("scheduler", ["asha(eta=2,first=48)", "pbt(interval=64,quantile=0.5)"])
def test_processes_apply_and_report_the_schedulers_decisions(scheduler, tmp_path, capsys):
    args = f"--scheduler={scheduler}", "--samples=2", "--budget=128", "--processes=2"
    assert run(tmp_path, *args) == 0
    assert "2 members, 2 at once, each in its own process" in capsys.readouterr().out
    kept = json.loads((tmp_path / "population.json").read_text())
    (decision,) = kept["decisions"]
    found = {name: rows(tmp_path / "members" / name) for name in ("00", "01")}
    steps = {name: [row["env_steps"] for row in own] for name, own in found.items()}
    assert all(each == sorted(set(each)) for each in steps.values())
    if scheduler.startswith("asha"):
        assert [name for name, each in steps.items() if each[-1] < 128] == decision["stopped"]
        return
    (copy,) = decision["copies"]
    taker, source = copy["member"], copy["source"]
    paused = next(step for step in steps[source] if step >= decision["at"])  # the taker goes on from there
    for name, own in found.items():
        for row in own:
            copied = name == taker and row["env_steps"] > paused
            lr = copy["changed"]["algo.lr"] if copied else kept["members"][int(name)]["algo.lr"]
            expected = {"pbt/source": int(source if copied else name), "pbt/copies": int(copied), "pbt/algo.lr": lr}
            assert {key: value for key, value in row.items() if key.startswith("pbt/")} == expected
    assert found[taker][-1]["pbt/copies"] == 1


def test_a_member_that_met_its_criterion_does_not_train_on_when_its_sweep_resumes(tmp_path, capsys):
    out = tmp_path / "x"
    assert run(out, "--samples=2", "--budget=1024", "--stop=episode/return=1") == 0
    kept, before = (out / "population.json").read_text(), [rows(out / f"members/0{i}") for i in range(2)]
    assert [*json.loads(kept)["ended"]] == ["00", "01"] and all(found[-1]["env_steps"] < 1024 for found in before)
    assert __main__.main([f"--resume={out}"]) == 0
    assert (out / "population.json").read_text() == kept
    assert __main__.main([f"--resume={out}", "--set=algo.lr=0.5"]) == 2
    assert "--set algo.lr: each member of the sweep has its own value: leave it out" in capsys.readouterr().err
    assert [rows(out / f"members/0{i}") for i in range(2)] == before


@pytest.mark.slow
def test_the_learning_rate_in_a_row_is_the_used_learning_rate(tmp_path, monkeypatch, capsys):
    """On a constant gradient Adam takes steps of its step size: https://github.com/ray-project/ray/issues/62173."""

    def loss(cfg, agent, params, rows, **coefficients):
        zero = jnp.zeros(())
        names = ("loss/policy", "loss/value", "policy/entropy", "policy/approx_kl", "policy/clip_fraction")
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params)), dict.fromkeys(names, zero)

    monkeypatch.setattr(ppo, "loss", loss)
    out = tmp_path / "x"
    settings = ["--scheduler=pbt(interval=64,quantile=0.5,resample=0.5)", "--samples=3", "--budget=160"]
    assert run(out, *settings, "--set=checkpoint.every=16", "--set=algo.adam_eps=1e-12") == 0
    decisions = json.loads((out / "population.json").read_text())["decisions"]
    copied = {copy["member"] for decision in decisions for copy in decision["copies"]}
    assert copied and all(decision["applied"] for decision in decisions)
    steps = 0
    for name in copied:
        member = out / "members" / name
        columns = [(row["updates"], row["pbt/algo.lr"], row["pbt/copies"]) for row in rows(member)]
        assert len({lr for _, lr, _ in columns}) > 1
        assert [row["train/lr"] for row in rows(member)] == pytest.approx([lr for _, lr, _ in columns])
        saved = {int(path.name): path for path in (member / "checkpoints").iterdir()}
        # after a copy the member's checkpoint is the source's, from the row before on
        for (before, _, copies), (now, lr, _), (_, _, then) in zip(columns, columns[1:], columns[2:], strict=False):
            if copies == then and before in saved and now in saved:
                change = kernel(saved[now]) - kernel(saved[before])
                np.testing.assert_allclose(change, -lr * (now - before), rtol=1e-3, atol=1e-6)
                steps += 1
    assert steps > 4


def kernel(saved):
    """A parameter of a checkpoint's network."""
    learner = checkpoint.read(saved, "learner")
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(learner)}
    return next(np.asarray(leaf) for name, leaf in leaves.items() if "params" in name and leaf.ndim == 2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--scheduler=hyperband"], "--scheduler hyperband: expected none, asha, pbt"),
        (["--scheduler=asha(eta=1)"], "--scheduler asha: eta: expected a whole number in [2, 100], got 1"),
        (["--scheduler=asha(etta=3)"], "--scheduler asha: unknown key etta: did you mean eta?"),
        (["--scheduler=asha(3)"], "--scheduler asha(3): expected each setting once, as key=value: asha(eta=4)"),
        (["--scheduler=asha(eta=2,eta=3)"], "asha(eta=2,eta=3): expected each setting once, as key=value"),
        (["--scheduler=asha(first=4)", "--samples=9"], "asha: first=4 must be at least 16"),
        (["--scheduler=pbt(interval=4)", "--samples=4"], "pbt: interval=4 must be at least 16"),
        (
            ["--scheduler=pbt", "--samples=4", "--set=network.activation=choice(tanh, relu)"],
            "network.activation: pbt changes values",
        ),
        (["--scheduler=pbt", "--samples=4", "--set=algo.num_epochs=int(1, 2)"], "algo.num_epochs: pbt changes values"),
        (["--search=tpe"], "--search tpe: expected a number of points: add --samples N"),
        (
            ["--search=random"],
            "--search random: expected a number of points: add --samples N; without --search the",
        ),
        (["--samples=4", "--batch=2"], "--batch 2: only for --search tpe and gp: leave it out"),
        (["--samples=4", "--objective="], "--objective: expected a key of the result rows, got ''"),
        (["--scheduler=asha", "--samples=4", "--set=run.log=[csv]"], "run.log: a scheduler compares the rows"),
        (
            ["--samples=2", "--objective=evaluation/return"],
            "--objective: there are no evaluations: set evaluation.every",
        ),
        (["--samples=2", "--objective=return"], "--objective: expected a key of the result rows, got 'return'"),
        (["--samples=2", "--set=algo.gamma=uniform(0.9, 1.5)"], "algo.gamma: expected a number in [0, 1]"),
        (["--samples=1", "--set=algo.gamma=choice(.9,.95,1.5,.99,.97)"], "algo.gamma: expected a number in [0, 1]"),
        (["--samples=2", "--set=algo.leraning_rate=log(1e-4,1e-2)"], "unknown key algo.leraning_rate"),
        (["--samples=0"], "sweep.samples: expected a whole number in [1, 100000]"),
        (["--processes=0"], "--processes: expected 1 to 1,000, got 0"),
    ],
)
def test_invalid_settings_are_refused_before_the_start(args, message, tmp_path, capsys):
    assert run(tmp_path / "x", "--budget=224", *args) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("search", ["tpe", "gp"])
def test_a_search_without_its_package_is_refused_with_the_fix(search, tmp_path, capsys, monkeypatch):
    missing = {"tpe": "optuna", "gp": "torch"}[search]
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))  # stands in for the installed package
    monkeypatch.setitem(sys.modules, missing, None)
    assert run(tmp_path / "x", "--budget=224", f"--search={search}", "--samples=4") == 2
    assert f"--search {search}: needs {missing}: pip install {missing}" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("scheduler", "steps"), [pytest.param("none", 96, marks=pytest.mark.slow), ("asha(eta=2,first=32)", 32)]
)
def test_an_objective_that_no_row_has_is_refused_at_the_first_comparison(scheduler, steps, tmp_path, capsys):
    args = "--samples=2", "--budget=96", "--objective=loss/polcy", f"--scheduler={scheduler}"
    assert run(tmp_path / "x", *args) == 2
    fault = "got 'loss/polcy': did you mean loss/policy?"
    assert f"--objective: expected a key of the result rows, {fault}" in capsys.readouterr().err
    assert json.loads((tmp_path / "x" / "population.json").read_text())["decisions"] == []
    assert steps <= rows(tmp_path / "x" / "members" / "00")[-1]["env_steps"] < steps + 32


def test_options_override_the_section_of_a_file(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("""
algo: {name: ppo}
env: {id: CartPole-v1, backend: jax, num_envs: 2}
sweep:
  set: {algo.lr: "log(1e-4, 1e-2, 3)", algo.gamma: "choice(0.9, 0.99)"}
  seeds: 2
  scheduler: asha
""")
    plan, rest, plain = settings.read_settings(
        config.mapping(path), {"seeds": 3, "search": None}, ["algo.gamma=0.9", "env.num_envs=4", "algo.lr=choice(1,2)"]
    )
    assert plan.settings.seeds == 3 and plan.scheduler == schedule.Asha() and list(plan.spaces) == ["algo.lr"]
    assert plan.spaces["algo.lr"].grid_values("") == [1, 2]
    assert plain == ["algo.gamma=0.9", "env.num_envs=4"] and "sweep" not in rest
    assert settings.read_stored_plan(dict(schema.plain(plan.settings))).settings == plan.settings
    path.write_text("sweep: {sedes: 2, set: {algo.lr: 3}}")
    with pytest.raises(InputError, match=r"unknown key sweep\.sedes: did you mean sweep\.seeds"):
        settings.read_settings(config.mapping(path), {}, [])
    assert train.main([str(path)]) == 2
    assert "sweep: the file describes a sweep: run `python -m jrl.sweep" in capsys.readouterr().err
