"""jrl.host.runtime: variables that are set before jax starts, and programs that are compiled again."""

import json
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from jrl import registry, train
from jrl.api import PPOConfig
from jrl.config.sections import RuntimeConfig
from jrl.errors import InputError
from jrl.host import runtime
from jrl.rollout import ray_cluster
from jrl.rollout.ray_cluster import RunnerOptions
from jrl.run.store import checkpoint

SMALL = [
    "--algo=ppo", "--env=CartPole-v1", "--set=env.backend=jax", "--set=env.num_envs=4", "--set=rollout.length=16",
    "--set=network.hidden=[8]", "--set=rollout.iterations_per_call=1", "--set=run.log=[jsonl]",
    "--set=run.compile_cache=false", "--set=run.report_every=64",
]  # fmt: skip


@pytest.fixture
def environ(monkeypatch):
    """An environment of the test's own."""
    there = dict(os.environ)
    monkeypatch.setattr(os, "environ", there)
    monkeypatch.setattr(runtime, "_for_runners", {})
    return there


# ---------------------------------------------------------------- before jax starts


def test_variables():
    cfg = RuntimeConfig(
        xla_flags="--a=2 --c", preallocate=False, mem_fraction=0.5, cpu_threads=3, env={"X": "text", "Y": 2, "Z": 0.5}
    )
    assert runtime.build_environment(cfg, {"XLA_FLAGS": "--a=1 --b"}) == {
        "X": "text",
        "Y": "2",
        "Z": "0.5",
        "XLA_FLAGS": "--a=1 --b --a=2 --c",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_CLIENT_MEM_FRACTION": "0.5",
        "PJRT_NPROC": "3",
    }
    assert runtime.build_environment(RuntimeConfig(), {"XLA_FLAGS": "--a=1"}) == {}
    again = RuntimeConfig(xla_flags="--a=1")
    assert runtime.build_environment(again, {"XLA_FLAGS": "--a=1 --b"})["XLA_FLAGS"] == "--a=1 --b"  # nothing twice
    assert runtime.build_environment(again, {"XLA_FLAGS": "--a=1 --a=2"})["XLA_FLAGS"] == "--a=1 --a=2 --a=1"
    given = RuntimeConfig(xla_flags="--a", env={"XLA_FLAGS": "--d"})
    assert runtime.build_environment(given, {"XLA_FLAGS": "--b"})["XLA_FLAGS"] == "--d --a"


def test_what_jax_has_read_already_cannot_change(environ):
    jax.devices()
    assert runtime.has_started()
    assert runtime.apply(RuntimeConfig(env={"JRL_TEST": 1})) == ["JRL_TEST=1"] and environ["JRL_TEST"] == "1"
    cfg = RuntimeConfig(preallocate=True, cpu_threads=7, env={"JRL_TEST": 2})
    with pytest.raises(InputError, match=r" XLA_PYTHON_CLIENT_PREALLOCATE, PJRT_NPROC only at its start"):
        runtime.apply(cfg)
    assert environ["JRL_TEST"] == "1" and "PJRT_NPROC" not in environ  # nothing was set
    environ.update(XLA_PYTHON_CLIENT_PREALLOCATE="true", PJRT_NPROC="7")
    assert runtime.apply(cfg) == ["JRL_TEST=2", "XLA_PYTHON_CLIENT_PREALLOCATE=true", "PJRT_NPROC=7"]
    environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.5"
    assert runtime.apply(RuntimeConfig(mem_fraction=0.5))
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environ  # jax takes one of the two only
    with pytest.raises(InputError, match="XLA_CLIENT_MEM_FRACTION"):
        runtime.apply(RuntimeConfig(mem_fraction=0.25))


_PROCESS = """
import json, pathlib, jax
from jrl.host import runtime
from jrl.config.sections import RuntimeConfig
before = runtime.has_started()
runtime.apply(RuntimeConfig(cpu_threads=3, xla_flags="--xla_force_host_platform_device_count=2"))
x = jax.numpy.ones((300, 300))
float((x @ x).sum())
names = [(p / "comm").read_text().strip() for p in pathlib.Path("/proc/self/task").iterdir()]
print(json.dumps([before, runtime.has_started(), jax.device_count(), jax.config.jax_num_cpu_devices, names]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_sets_them_has_them():
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PJRT_NPROC", "NPROC")}
    done = subprocess.run([sys.executable, "-c", _PROCESS], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    before, after, devices, setting, names = json.loads(done.stdout.splitlines()[-1])
    assert (before, after, devices, setting) == (False, True, 2, -1)
    assert sum("XLAEigen" in name for name in names) == 3, names


def test_env_runners_have_the_variables(environ):
    runtime.apply(RuntimeConfig(env={"JRL_TEST": 5}, preallocate=None))
    found = ray_cluster._environment(RunnerOptions(), False)
    assert found == {"JRL_TEST": "5", "JAX_PLATFORMS": "cpu"}
    runtime.apply(RuntimeConfig())
    assert "JRL_TEST" not in ray_cluster._environment(RunnerOptions(), False)


def test_the_builder_applies_them(environ):
    made = PPOConfig().environment("CartPole-v1", backend="jax").debugging(max_recompiles=2)
    made.resources(environment={"JRL_TEST": "a"}, cpu_threads=9)
    cfg = made.to_run_config()
    assert (cfg.runtime, cfg.run.max_recompiles) == (RuntimeConfig(env={"JRL_TEST": "a"}, cpu_threads=9), 2)
    jax.devices()
    with pytest.raises(InputError, match="PJRT_NPROC"):
        made.build()


# ---------------------------------------------------------------- compiled again and again


@jax.jit
def total(x):
    return x.sum()


@jax.jit
def product(x, y):
    return x * y


def watched(most=100):
    """A Recompiles that counts from now on."""
    found = runtime.Recompiles(most)
    found.start()
    with found.iteration(5):  # rows before: of the run that goes on
        pass
    for _ in range(runtime._WARM_UP - 1):
        with found.iteration(6):
            pass
    return found


def test_what_counts_as_compiled_again():
    with watched(1) as it:
        total(jnp.ones(11))  # outside of iterations: a first time
        total(jnp.ones(12))
        with it.iteration(5):  # no row yet
            total(jnp.ones(13))
        with it.iteration(6):
            product(jnp.ones(11), jnp.ones(11))  # for the first time at all
            total(jnp.ones(13))
            other = threading.Thread(target=lambda: total(jnp.ones(14)))
            other.start()
            other.join()
        it.check()
        x = [jnp.ones(n) for n in (15, 16)]
        with it.iteration(6):
            total(x[0])
        it.check()
        with it.iteration(6):
            total(x[1])
            total(x[1])
        with pytest.raises(runtime.Recompiled, match=r"run.max_recompiles: expected at most 1 .* got 2 .*total"):
            it.check()
    assert it.count == 2


def test_a_closed_counter_counts_no_more():
    with watched(3) as it:
        pass
    x = jnp.ones(22)
    total(jnp.ones(21))
    with it.iteration(6):
        total(x)
    assert it.count == 0
    it.close()  # may be called again
    assert runtime.Recompiles(None).check() is None


@pytest.mark.slow
def test_an_ordinary_run_compiles_nothing_again(tmp_path, capsys, environ):
    args = ["--set=run.max_recompiles=0", "--set=runtime.env={JRL_TEST: abc}", "-v", f"--out={tmp_path / 'a'}"]
    more = ["--set=evaluation.every=300", "--set=evaluation.duration=2", "--set=checkpoint.every=200"]
    assert train.main([*SMALL, *args, *more, "--stop=env_steps=900"]) == 0
    assert "runtime: JRL_TEST=abc" in capsys.readouterr().out


def growing(step):
    step.learn(step.sample())
    total(jnp.ones(100 + step.iteration))


def test_a_step_that_feeds_a_new_shape_each_time_ends_the_run(tmp_path, capsys):
    out = tmp_path / "b"
    own = f"--set=custom.training_step={registry.reference(growing)}"
    assert train.main([*SMALL, own, "--set=run.max_recompiles=4", f"--out={out}", "--stop=env_steps=4000"]) == 1
    said = capsys.readouterr().err
    assert "error: run.max_recompiles: expected at most 4" in said and "total" in said
    assert 100 < checkpoint.read_meta(checkpoint.locate(out))["env_steps"] < 64 * 12  # and what it learned is kept
