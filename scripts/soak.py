"""Does a long run stay as it is? Memory and speed over thousands of iterations, by the command a user would type.

    python scripts/soak.py                                           # every case, one JSON line each
    python scripts/soak.py ppo-jax dqn-envpool --iterations 20000
    python scripts/soak.py configs/sac.yaml --set env.num_envs=1     # a config as a case

A case is `python -m jrl.train` in a process of its own, with small networks, one iteration per call, evaluations,
result rows and checkpoints, so that as much happens beside the compiled programs as can. The first 40% of it are
warm-up; of the rest, a straight line through the samples of its resident memory may rise by `--max-growth` MB at most,
and the rate of the last third may be lower than that of the first by the share `--max-slowdown` at most. Exits with 1
if any case is not flat.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jrl import config
from jrl.errors import InputError
from jrl.metrics.loggers import read_rows

WARM_UP = 0.4  # of the run: compilation, the first checkpoint and the first evaluation, a replay that fills

_SMALL = ["env.id=CartPole-v1", "env.num_envs=4", "network.hidden=[16]"]
_PPO = ["algo.name=ppo", *_SMALL, "rollout.length=16", "algo.num_epochs=1", "algo.num_minibatches=2"]
_DQN = [
    "algo.name=dqn",
    *_SMALL,
    "rollout.length=4",
    "replay.capacity=2000",
    "replay.learning_starts=200",
    "replay.batch_size=32",
    "replay.updates_per_step=0.25",
]
_IN_JAX = ["env.backend=jax", "rollout.iterations_per_call=1"]
_ENVPOOL = ["env.backend=envpool", "rollout.iterations_per_call=1"]

FAST, SLOW = 30_000, 5_000  # iterations; the second where environments are stepped from Python

CASES: dict[str, list[str]] = {  # name -> settings
    "ppo-jax": [*_PPO, *_IN_JAX],
    "dqn-jax": [*_DQN, *_IN_JAX],
    "ppo-envpool": [*_PPO, *_ENVPOOL],
    "dqn-envpool": [*_DQN, *_ENVPOOL],
    "ppo-gymnasium": [*_PPO, "env.backend=gymnasium"],
    "dqn-gymnasium": [*_DQN, "env.backend=gymnasium"],
}


def command(case: str, settings: Sequence[str], iterations: int, out: Path) -> list[str]:
    """The command of a case: a name of CASES or a config file, for so many iterations.

    Raises:
      InputError: bad settings.
    """
    path = None if case in CASES else case
    chosen = [*CASES.get(case, []), *settings]
    # any budget will do to learn how many rows an iteration has
    cfg = config.load(path, [*chosen, "stop.env_steps=1000000000"])
    rows = config.Sizes(cfg).rows
    steps = iterations * rows
    chosen += [f"stop.{name}=1e9" for name in cfg.stop if name != "env_steps"]
    chosen += [
        f"stop.env_steps={steps}",
        f"run.report_every={max(rows, steps // 200)}",
        f"checkpoint.every={max(rows, steps // 12)}",
        f"evaluation.every={max(rows, steps // 12)}",
        "evaluation.duration=2",
    ]
    config.load(path, chosen)
    settings_args = [f"--set={setting}" for setting in chosen]
    return [sys.executable, "-m", "jrl.train", *([path] if path else []), *settings_args, "--out", str(out)]


def default_iterations(case: str) -> int:
    return FAST if case.endswith(("-jax", "-envpool")) else SLOW


def resident_mb(pid: int) -> float | None:
    """Memory that a process holds, in MB; None when it has ended."""
    status = Path(f"/proc/{pid}/status")
    try:
        if status.exists():
            found = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmRSS:")]
        else:
            found = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True).stdout.split()
    except OSError:  # it ended meanwhile
        return None
    return int(found[0]) / 1024 if found else None


def growth(samples: Sequence[tuple[float, float]]) -> float:
    """By how much a straight line (least squares) through (time, MB) rises from the first sample to the last."""
    at, mb = np.asarray(samples, float).T
    return float(np.polyfit(at - at[0], mb, 1)[0] * (at[-1] - at[0]))


def slowdown(rows: Sequence[dict[str, Any]]) -> float:
    """The share by which the last third of the rows is slower than the first.

    Of each third the upper quartile of the rates between two rows: what others do on the machine for a while leaves it.
    """
    rates = [
        (b["env_steps"] - a["env_steps"]) / (b["time_s"] - a["time_s"])
        for a, b in itertools.pairwise(rows)
        if b["time_s"] > a["time_s"]
    ]
    third = len(rates) // 3
    return float(1.0 - np.percentile(rates[-third:], 75) / np.percentile(rates[:third], 75))


def judge(
    samples: Sequence[tuple[float, float]],
    rows: Sequence[dict[str, Any]],
    *,
    max_growth: float,
    max_slowdown: float | None,
) -> dict[str, Any]:
    """What is found in the part after the warm-up.

    Args:
      samples: (seconds since 1970, MB) of the whole life of the process.
      rows: result rows.
      max_growth: in MB.
      max_slowdown: a share; None: speed is not judged.
    Returns:
      `flat`, `why` (what is not), `growth_mb`, `slowdown`, ...
    Raises:
      ValueError: too few samples or rows to say anything.
    """
    rows = [row for row in rows if row["env_steps"] >= WARM_UP * rows[-1]["env_steps"]]
    # what follows the last row is the end of the process: its learning curve needs matplotlib
    samples = [s for s in samples if rows[0]["timestamp"] <= s[0] <= rows[-1]["timestamp"]]
    if len(samples) < 10 or len(rows) < 10:
        raise ValueError(f"{len(samples)} samples of {len(rows)} rows after the warm-up say nothing: more iterations")
    found = {
        "iterations": rows[-1]["iteration"] - rows[0]["iteration"],
        "env_steps": rows[-1]["env_steps"] - rows[0]["env_steps"],
        "seconds": round(samples[-1][0] - samples[0][0], 1),
        "rss_mb": [round(statistics.median(mb for _, mb in part), 1) for part in (samples[:5], samples[-5:])],
        "growth_mb": round(growth(samples), 2),
        "slowdown": round(slowdown(rows), 3),
    }
    why = []
    if found["growth_mb"] > max_growth:
        why.append(f"memory grew by {found['growth_mb']} MB, more than {max_growth:g}")
    if max_slowdown is not None and found["slowdown"] > max_slowdown:
        why.append(f"the last third was slower by {found['slowdown']:.0%}, more than {max_slowdown:.0%}")
    return {**found, "flat": not why, "why": why}


def soak(
    case: str,
    settings: Sequence[str] = (),
    *,
    iterations: int,
    max_growth: float,
    max_slowdown: float | None,
    every: float = 0.05,
) -> dict[str, Any]:
    """Trains and judges; `every` so many seconds the memory is read.

    Raises:
      InputError: bad settings.
      RuntimeError: the run failed; the end of what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="jrl_soak_") as directory:
        out, samples = Path(directory, "run"), []
        words = command(case, settings, iterations, out)
        with Path(directory, "log").open("w+") as log:
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
            try:
                while process.poll() is None:
                    if (mb := resident_mb(process.pid)) is not None:
                        samples.append((time.time(), mb))
                    time.sleep(every)
            finally:
                process.kill()
                process.wait()
            log.seek(0)
            if process.returncode:
                raise RuntimeError(f"{case}: exit status {process.returncode}\n{log.read()[-2000:]}")
        rows = read_rows(out / "result.jsonl")
    return {"case": case, **judge(samples, rows, max_growth=max_growth, max_slowdown=max_slowdown)}


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description="Do memory and speed stay flat over thousands of iterations?", allow_abbrev=False
    )
    p.add_argument("cases", nargs="*", metavar="CASE", help=f"YAML files, or of {', '.join(CASES)}; none: all of these")
    p.add_argument("--set", action="append", default=[], metavar="a.b=v", dest="overrides", help="for every case")
    p.add_argument("--iterations", type=int, help=f"default: {FAST}; {SLOW} for Gymnasium and config files")
    p.add_argument("--max-growth", type=float, default=8.0, metavar="MB", help="after the warm-up (default: 8)")
    p.add_argument("--max-slowdown", type=float, default=0.2, metavar="SHARE", help="of the last third (default: 0.2)")
    args = p.parse_args(argv)
    flat = True
    for case in args.cases or CASES:
        try:
            row = soak(
                case,
                args.overrides,
                iterations=args.iterations or default_iterations(case),
                max_growth=args.max_growth,
                max_slowdown=args.max_slowdown,
            )
        except InputError as e:
            print(*(f"error: {line}" for line in e.errors), sep="\n", file=sys.stderr)
            return 2
        print(json.dumps(row), flush=True)
        flat = flat and row["flat"]
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
