"""The soak test's own judgement, and a short soak of memory; the long one is marked slow."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest

from jrl.errors import InputError

HERE = Path(__file__).parent


def load(name):
    spec = importlib.util.spec_from_file_location(name, HERE.parent / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


soak = load("soak")


def life(leak=0.0, rate=lambda share: 1000.0, seconds=100, noise=0.0):
    """(samples, rows) of a process that warms up for 30 s, keeps `leak` MB/s from then on and does `rate` steps/s."""
    rng = np.random.default_rng(0)
    at = np.arange(0.0, seconds, 0.5)
    mb = 400 + 100 * np.minimum(at / 30, 1) + leak * np.maximum(at - 30, 0) + noise * rng.normal(size=len(at))
    mb[-1] += 60  # the learning curve, after the last row
    rows, steps = [], 0
    for second in range(1, seconds):
        steps += int(rate(second / seconds))
        rows.append({"iteration": steps // 10, "env_steps": steps, "time_s": float(second), "timestamp": float(second)})
    return list(zip(at, mb)), rows


def judge(*args, max_growth=8.0, max_slowdown=0.2, **kwargs):
    return soak.judge(*life(*args, **kwargs), max_growth=max_growth, max_slowdown=max_slowdown)


def test_a_flat_life_is_flat_although_it_began_and_ended_otherwise():
    found = judge(noise=1.0)
    assert found["flat"] and found["why"] == []
    assert abs(found["growth_mb"]) < 1 and found["slowdown"] == pytest.approx(0, abs=1e-6)
    assert found["env_steps"] == 59_000


def test_a_leak_is_found():
    found = judge(leak=0.2, noise=1.0)  # 12 MB in the 60 s that count
    assert not found["flat"] and found["growth_mb"] == pytest.approx(12, abs=1)
    assert "memory grew" in found["why"][0]
    assert judge(leak=0.1)["flat"] and not judge(leak=0.1, max_growth=5.0)["flat"]


def test_a_run_that_slows_down_is_found():
    slower = lambda share: 1000 if share < 0.7 else 700
    found = judge(rate=slower)
    assert not found["flat"] and found["slowdown"] == pytest.approx(0.3)
    assert "slower by 30%" in found["why"][0]
    assert judge(rate=slower, max_slowdown=None)["flat"] and judge(rate=slower, max_slowdown=0.4)["flat"]
    assert judge(rate=lambda share: 700 if share < 0.7 else 1000)["flat"]


def test_every_case_is_a_valid_command(tmp_path):
    for case in soak.CASES:
        words = soak.command(case, [], 500, tmp_path)
        assert words[1:3] == ["-m", "jrl.train"]
        budget = next(word for word in words if "stop.env_steps" in word)
        assert budget == f"--set=stop.env_steps={500 * (64 if case.startswith('ppo') else 16)}"
    words = soak.command(str(HERE.parent / "configs" / "ppo.yaml"), ["env.num_envs=16"], 100, tmp_path)
    assert "--set=stop.episode/return=1e9" in words  # it is not to end before
    with pytest.raises(InputError, match=r"algo\.learning_rate"):
        soak.command("ppo-jax", ["algo.learning_rate=1"], 500, tmp_path)


@pytest.mark.slow
def test_memory_stays_flat():
    found = soak.soak("ppo-jax", iterations=3000, max_growth=8.0, max_slowdown=None, every=0.02)
    assert found["flat"], found
    assert found["iterations"] > 1500 and 100 < found["rss_mb"][0] < 3000


@pytest.mark.slow
def test_a_leaking_environment_is_found(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    leaking = ["--set=env.id=faulty_envs:Leaking", "--max-slowdown=10", "--iterations=150"]
    assert soak.main(["ppo-gymnasium", *leaking]) == 1
    found = json.loads(capsys.readouterr().out)
    steps = found["env_steps"]
    assert not found["flat"]
    assert found["growth_mb"] == pytest.approx(steps * 20_000 / 2**20, rel=0.3)
