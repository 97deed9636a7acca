"""Short runs of `jrl train ENV`, one for each candidate config, of which the best one continues."""

import contextlib
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.errors import InputError
from jrl.host import files, interruption

DIRECTORY = "trials"
RESULTS = "result.jsonl"
_POLL_S = 0.1  # time between two checks of the processes
_SMOOTHED = "episode/return"  # mean of the latest 100 training episodes


def count_at_once(device: str) -> int:
    """Returns the number of trials that run at once: half the number of cores, since one run keeps two busy.

    On other devices than the CPU it is 1, because a process of jax takes most of the memory of a GPU.
    """
    return max(1, (os.cpu_count() or 1) // 2) if device == "cpu" else 1


def run(directory: Path, configs: Mapping[str, str], overrides: Sequence[str], seconds: float, at_once: int) -> str:
    """Trains each config for `seconds` and makes `directory` the run of the best one.

    A trial is a process `python -m jrl.train` in `directory/trials/NAME`, without evaluations. Its time begins with its
    first result row, so that compilation does not count. A trial without an ended episode, or that failed, is the
    worst. Equal trials: the first one wins.

    Args:
      directory: new run directory.
      configs: YAML texts by the names of the trials.
      overrides: texts of `--set`, for each trial.
      seconds: training time of each trial.
      at_once: number of trials that run at once.
    Returns:
      The name of the best trial, whose files are then those of `directory`.
    Raises:
      InputError: no trial has a checkpoint.
      SystemExit: SIGINT, SIGTERM or SIGHUP; the trials are killed.
    """
    waiting, running = list(configs), dict[str, subprocess.Popen]()
    ends, scores = dict[str, float](), dict[str, float]()
    watched = interruption.watch_signals("the trials end, without a checkpoint")
    with watched as interrupted, contextlib.ExitStack() as processes:
        while waiting or running:
            if interrupted:
                raise SystemExit(interrupted.exit_status)
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                running[name] = _start(directory, name, configs[name], overrides)
                processes.callback(running[name].kill)
            for name, process in list(running.items()):
                own, now = directory / DIRECTORY / name, time.monotonic()
                if name not in ends and (own / RESULTS).exists() and (own / RESULTS).stat().st_size:
                    ends[name] = now + seconds
                if process.poll() is not None:
                    del running[name]
                    scores[name], words = _score(own)
                    print(f"trial {name}: {words}", flush=True)
                elif now > ends.get(name, math.inf):
                    ends[name] = math.inf
                    process.terminate()  # the process saves a checkpoint
            time.sleep(_POLL_S)
    best = max(configs, key=lambda name: scores[name])
    if scores[best] == -math.inf and not any(
        (directory / DIRECTORY / name / "checkpoints").exists() for name in configs
    ):
        raise InputError(
            f"all trials failed: {directory / DIRECTORY / best / 'console.txt'} has the first one's output; "
            "--minutes 1 trains without trials"
        )
    shutil.copytree(directory / DIRECTORY / best, directory, dirs_exist_ok=True)
    return best


def read_last(directory: Path) -> dict[str, Any]:
    """Returns the last result row of a run, empty without rows."""
    from jrl.metrics import loggers

    path = directory / RESULTS
    rows = loggers.read_rows(path) if path.exists() else []
    return rows[-1] if rows else {}


def _start(directory: Path, name: str, text: str, overrides: Sequence[str]) -> subprocess.Popen:
    own = directory / DIRECTORY / name
    own.mkdir(parents=True)
    files.replace(own / "trial.yaml", text)
    command = [sys.executable, "-m", "jrl.train", str(own / "trial.yaml"), "--out", str(own)]
    command += [word for given in (*overrides, "evaluation.interval=null") for word in ("--set", given)]
    with (own / "console.txt").open("w") as out:
        # new session: a terminal's Ctrl-C reaches this process only, which ends the trials
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def _score(directory: Path) -> tuple[float, str]:
    """Returns the return at the end of a trial, and a line about it."""
    last = read_last(directory)
    if not last:
        return -math.inf, "it failed: console.txt in its directory has its output"
    found = last.get(_SMOOTHED)
    if found is None or not math.isfinite(found):
        return -math.inf, f"no episode ended within {last['env_steps']:,} steps"
    return found, f"return {found:.4g} after {last['env_steps']:,} steps"
