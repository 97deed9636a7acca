"""`devices.platform: auto`: which platform a run uses, and what a continued run uses."""

import jax
import pytest

from jrl import config, train
from jrl.learn import parallel
from jrl.run import platform_choice
from jrl.run.platform_choice import Measurement

SMALL = ["env.backend=jax", "env.num_envs=4", "rollout.length=16", "network.hidden=[8]", "run.compile_cache=false"]


def load(*overrides, algo="ppo"):
    settings = [*SMALL, "devices=auto", *overrides]
    return config.load(None, settings, algo=algo, env="CartPole-v1", stop=["env_steps=256"])


def measured(rates, asked):
    """Returns a `measure` of a machine with the rates {platform: steps/s}, whose first platform is jax's default."""

    def measure(cfg):
        asked.append(cfg.devices.platform)
        platform = cfg.devices.platform or next(iter(rates))
        if rates[platform] is None:
            raise RuntimeError("out of memory")
        return Measurement(platform, rates[platform])

    return measure


@pytest.mark.parametrize(
    ("rates", "platform", "line"),
    [
        ({"gpu": 4918.0, "cpu": 10587.0}, "cpu", "cpu (gpu 4,918 steps/s, cpu 10,587 steps/s)"),
        ({"gpu": 2364.0, "cpu": 289.0}, None, "gpu (gpu 2,364 steps/s, cpu 289 steps/s)"),
        ({"gpu": 10.0, "cpu": 10.0}, None, "gpu (gpu 10 steps/s, cpu 10 steps/s)"),
        ({"tpu": 10.0, "cpu": None}, None, "jax's default (cpu was not measured: out of memory)"),
        ({"gpu": None, "cpu": 10.0}, None, "jax's default (it was not measured: out of memory)"),
    ],
)
def test_the_faster_platform_is_chosen(rates, platform, line):
    cfg, found = platform_choice.choose(load(), measured(rates, []))
    assert (cfg.devices.platform, found) == (platform, f"devices.platform auto: {line}")


def test_a_single_platform_is_not_measured_against_itself():
    asked = []
    cfg, line = platform_choice.choose(load(), measured({"cpu": 7.0}, asked))
    assert asked == [None] and cfg.devices.platform is None
    assert line == "devices.platform auto: cpu (the only platform here)"


@pytest.mark.parametrize(("algo", "overrides"), [("ppo", []), ("dqn", ["replay.learning_starts=200"])])
def test_a_child_process_measures_the_run(algo, overrides):
    cfg = platform_choice.choose(load(*overrides, algo=algo), measured({"gpu": 1.0, "cpu": 2.0}, []))[0]
    found = platform_choice.measure_in_child(cfg, 900)
    assert found.platform == "cpu" and found.rate > 1


def test_an_error_of_the_measured_run_is_one_line():
    cfg = config.override(config.to_dict(load()), ["devices=cpu", "env.id=Nope-v0", "env.backend=auto"])
    with pytest.raises(RuntimeError, match=r"InputError: env.id Nope-v0: not in any backend"):
        platform_choice.measure_in_child(cfg, 900)


def test_a_continued_run_uses_the_recorded_platform(tmp_path, capsys):
    """The command cannot choose here, because this process uses jax already; a continued run does not choose at all."""
    jax.devices()
    out = [f"--out={tmp_path}", *(f"--set={text}" for text in [*SMALL, "devices=auto"])]
    assert train.main(["--algo=ppo", "--env=CartPole-v1", "--stop=env_steps=128", *out]) == 0
    assert "devices.platform auto: cpu (jax uses it in this process already)" in capsys.readouterr().out
    assert config.load(tmp_path / "config.yaml").devices.platform == "cpu"
    assert train.main(["--algo=ppo", "--env=CartPole-v1", "--stop=env_steps=256", "--resume=auto", *out]) == 0
    assert "devices.platform" not in capsys.readouterr().out
    assert config.load(tmp_path / "config.yaml").devices.platform == "cpu"


def test_an_older_checkpoint_recorded_no_platform():
    assert platform_choice.recorded(load(), {"devices": {"fake": None}}).devices.platform is None
    named = config.override(config.to_dict(load()), ["devices=cpu"])
    assert platform_choice.recorded(named, {}).devices.platform == "cpu"


def test_the_cpu_is_named_where_jax_runs_on_it():
    assert parallel.devices(platform="cpu") == parallel.devices()


def test_seeds_and_sweeps_need_one_platform(tmp_path, capsys):
    asked = ["--algo=ppo", "--env=CartPole-v1", "--set=devices=auto", "--stop=env_steps=9", f"--out={tmp_path / 'a'}"]
    assert train.main([*asked, "--seeds=2"]) == 2
    assert "devices.platform: expected cpu or null, since auto measures one run" in capsys.readouterr().err
    assert not (tmp_path / "a").exists() or not list((tmp_path / "a").glob("*.json"))
