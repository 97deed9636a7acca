"""A run on other systems than Linux, as far as Linux can show: their missing modules and functions are made missing."""

import subprocess
import sys

ABSENT = """
import faulthandler, multiprocessing, os, select, signal, sys
import filelock  # filelock uses msvcrt on Windows; on Linux it needs fcntl
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
missing = {
    faulthandler: ["register", "unregister"],
    os: ["fork", "forkpty", "getpgid", "killpg", "memfd_create", "pread", "pwrite", "sched_getaffinity", "sysconf"],
    select: ["epoll", "poll"],
    signal: ["SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "pthread_sigmask", "setitimer"],
}
for module, names in missing.items():
    for name in names:
        delattr(module, name)
known = multiprocessing.get_context
def get_context(method=None):
    if method not in (None, "spawn"):
        raise ValueError(f"cannot find context for {method!r}")
    return known(method)
multiprocessing.get_context = get_context
sys.modules["envpool"] = None
from jrl import train
small = ["--algo=ppo", "--env=CartPole-v1", "--set=env.num_envs=2", "--set=rollout.length=16",
         "--set=network.hidden=[4]", "--stop=env_steps=40", f"--out={sys.argv[1]}"]
assert train.main(small) == 0
sys.exit(train.main([*small, f"--out={sys.argv[1]}-2", "--set=env.remote_worker_envs=true"]))
"""


BLOCKED = """
import sys
for name in ("envpool", "ray"):
    sys.modules[name] = None  # its import fails
from jrl import train
small = ["--algo=ppo", "--env=CartPole-v1", "--set=env.num_envs=2", "--set=rollout.length=16",
         "--set=network.hidden=[4]", "--stop=env_steps=40"]
assert train.main([*small, f"--out={sys.argv[1]}", "--set=env.backend=jax"]) == 0
for setting in ("env.backend=envpool", "env.id=Pong-v5", "env_runners.num=1"):
    assert train.main([*small, f"--out={sys.argv[1]}-2", f"--set={setting}"]) == 2
"""


def test_a_run_needs_neither_envpool_nor_ray(tmp_path):
    """Environments in JAX train without both. A setting that needs one of them names it, before anything starts."""
    command = [sys.executable, "-c", BLOCKED, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run" / "result.jsonl").read_text().splitlines()) >= 2
    pool, pong, ray = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    install = "envpool is not installed: pip install envpool"
    assert pool == f"error: env.backend: {install}, or use env.backend gymnasium or jax"
    assert pong.startswith("error: env.id Pong-v5: not in any backend") and install in pong
    assert ray == (
        "error: env_runners.num: Ray, which runs env runners, is not installed: pip install ray, or set "
        "env_runners.num=0"
    )


def test_a_run_needs_nothing_of_linux_alone(tmp_path):
    """Also without EnvPool's wheel: Gymnasium steps its CartPole. A worker process needs fork, and is refused."""
    command = [sys.executable, "-c", ABSENT, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "env.remote_worker_envs: worker processes need an operating system with fork: leave it out" in done.stderr
    assert len((tmp_path / "run" / "result.jsonl").read_text().splitlines()) >= 2
    assert list((tmp_path / "run" / "checkpoints").iterdir())
