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


def test_a_run_needs_nothing_of_linux_alone(tmp_path):
    """Also without EnvPool's wheel: Gymnasium steps its CartPole. A worker process needs fork, and is refused."""
    command = [sys.executable, "-c", ABSENT, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "env.remote_worker_envs: worker processes need an operating system with fork: leave it out" in done.stderr
    assert len((tmp_path / "run" / "result.jsonl").read_text().splitlines()) >= 2
    assert list((tmp_path / "run" / "checkpoints").iterdir())
