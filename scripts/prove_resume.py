"""Is a run that was killed and resumed the same as one that was not? To the last bit.

    python scripts/prove_resume.py configs/ppo.yaml configs/pqn.yaml --set env.backend=jax --stop env_steps=60000
    python scripts/prove_resume.py configs/dqn.yaml --stop env_steps=20000 --kills 3

Trains once without interruption, and once more with `--resume auto` after every SIGKILL: at random moments, every other
one while a checkpoint is being written; and after one SIGTERM. Then compares the arrays of the last checkpoints
(learner, replay, environments) and the result rows, times aside. Prints one JSON line per config; exits with 1 if
anything differs.

`checkpoint.exact` is set, without which environments that cannot be stored (EnvPool, Gymnasium) would not be the same,
and `checkpoint.replay=full`.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from jrl import config
from jrl.config import Sizes
from jrl.metrics.loggers import read_rows
from jrl.run.store import checkpoint

_TIMES = ("time", "perf/", "evaluation/time_s", "sys/")  # what may differ


def command(args: argparse.Namespace, path: str, out: Path) -> list[str]:
    """The training command of both runs."""
    cfg = config.load(path, args.overrides, stop=args.stop)
    total = int(cfg.stop[Sizes(cfg).counts_by])
    settings = [f"checkpoint.every={max(1, total // 12)}", "checkpoint.exact=true", "checkpoint.replay=full"]
    settings = [
        f"--set={s}" for s in (*settings, "run.log=[jsonl]", f"run.report_every={max(1, total // 40)}", *args.overrides)
    ]
    limits = [f"--stop={name}=1e9" for name in cfg.stop if name != Sizes(cfg).counts_by]
    limits += [f"--stop={s}" for s in args.stop]
    return [sys.executable, "-m", "jrl.train", path, *settings, *limits, "--resume", "auto", "--out", str(out)]


def progress(out: Path, counted: str) -> int:
    """`env_steps` or, where a run learns from data alone, `updates` in the latest result row."""
    rows = read_rows(out / "result.jsonl")
    return rows[-1][counted] if rows else 0


def run_until(process: subprocess.Popen, out: Path, counted: str, reached: float, *, in_save: bool) -> bool:
    """Waits for so many steps, then for a save to be under way if asked; False if the process ends before."""
    while process.poll() is None:
        if progress(out, counted) >= reached and (not in_save or any((out / "checkpoints").glob("*.unfinished"))):
            return True
        time.sleep(0.002)
    return False


def interrupted(
    train: list[str], out: Path, counted: str, total: int, kills: int, rng: random.Random
) -> list[dict[str, Any]]:
    """Kills and resumes, ends it once by SIGTERM, then lets it end; returns where it was interrupted."""
    done = []
    for i in range(kills + 1):
        steps, in_save = total * (i + rng.random()) / (kills + 2), i % 2 == 1 and i < kills
        number = signal.SIGKILL if i < kills else signal.SIGTERM
        process = subprocess.Popen(train, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        killed = run_until(process, out, counted, steps, in_save=in_save)
        process.send_signal(number)
        error = process.communicate()[1].decode()
        if not killed:
            raise SystemExit(f"the run ended before it was killed: give it more steps\n{error[-2000:]}")
        if killed and process.returncode not in (-number, 128 + number):
            raise SystemExit(f"exit status {process.returncode} after {number.name}\n{error[-2000:]}")
        done.append({counted: progress(out, counted), "signal": number.name, "in_save": in_save})
    subprocess.run(train, check=True, stdout=subprocess.DEVNULL)
    return done


def differences(a: Path, b: Path) -> list[str]:
    """What differs between two complete runs."""
    found = []
    ends = [checkpoint.locate(run) for run in (a, b)]
    metas = [checkpoint.read_meta(end) for end in ends]
    for name in ("iteration", "env_steps", "counted", "rows"):
        for meta in metas if name == "rows" else ():
            meta[name]["extra"] = {k: v for k, v in meta[name]["extra"].items() if not k.startswith(_TIMES)}
        if metas[0][name] != metas[1][name]:
            found.append(f"{name}: {metas[0][name]} and {metas[1][name]}"[:300])
    for part in metas[0]["checksums"].keys() | metas[1]["checksums"].keys():
        x, y = (dict(jax.tree.leaves_with_path(checkpoint.read(end, part))) for end in ends)
        same = x.keys() == y.keys()
        names = [k for k in x if not same or x[k].tobytes() != y[k].tobytes()]
        found += [f"{part}: {jax.tree_util.keystr(k)}" for k in names]
    rows = [[{k: v for k, v in row.items() if not k.startswith(_TIMES)} for row in map(dict, read_rows(run))]
            for run in (a / "result.jsonl", b / "result.jsonl")]  # fmt: skip
    if len(rows[0]) != len(rows[1]):
        found.append(f"{len(rows[0])} and {len(rows[1])} result rows")
    for p, q in zip(*rows):
        if p != q:
            keys = [k for k in p.keys() | q.keys() if p.get(k) != q.get(k)]
            found.append(f"row at {p['env_steps']}: " + ", ".join(f"{k} {p.get(k)} and {q.get(k)}" for k in keys))
    return found


def prove(args: argparse.Namespace, path: str, out: Path) -> bool:
    """Whether both runs of one config are the same; prints what was seen."""
    whole, killed = out / "whole", out / "killed"
    subprocess.run(command(args, path, whole), check=True, stdout=subprocess.DEVNULL)
    end = checkpoint.read_meta(checkpoint.locate(whole))
    counted = Sizes(config.load(path, args.overrides, stop=args.stop)).counts_by
    rng = random.Random(args.seed)
    kills = interrupted(command(args, path, killed), killed, counted, end["counted"], args.kills, rng)
    found = differences(whole, killed)
    seen = {"config": path, "overrides": args.overrides, "guarantee": end["guarantee"], "kills": kills}
    print(json.dumps({**seen, "identical": not found, "differences": found[:20]}), flush=True)
    return not found


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("configs", nargs="+", help="YAML files")
    p.add_argument("--set", action="append", default=[], metavar="a.b=v", dest="overrides")
    p.add_argument("--stop", action="append", default=[], metavar="metric=v", help="e.g. env_steps=20000")
    p.add_argument("--kills", type=int, default=5)
    p.add_argument("--seed", type=int, default=0, help="of the moments")
    args = p.parse_args()
    same = []
    for path in args.configs:
        with tempfile.TemporaryDirectory() as out:
            same.append(prove(args, path, Path(out)))
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
