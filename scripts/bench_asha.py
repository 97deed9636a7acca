"""Does ASHA find what the whole grid finds? 27 step sizes of PPO on CartPole, by the command a user would type.

    python scripts/bench_asha.py --out runs/asha                     # 5 repetitions of two minutes on two cores
    python scripts/bench_asha.py --out runs/asha --repetitions 1 --seeds 2 --budget 8192

Each repetition has seeds of its own. It trains the grid, all step sizes to the budget, and the same points under
`--scheduler asha`, and holds when ASHA's best step size is within a factor of 2 of the grid's best and it made less
than a third of the grid's steps. Prints a JSON line for each, and exits with 1 if one does not hold. The score of a
step size is the mean over its seeds of the return of the last 100 episodes.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

_KEY = "algo.lr"
_POINTS = 27
_COMMON = ("env.backend=jax", "env.num_envs=4", "run.report_every=1", "run.log=[jsonl]")


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--out", type=Path, default=Path("runs/asha"))
    p.add_argument("--repetitions", type=int, default=5)
    p.add_argument("--seeds", type=int, default=16)
    p.add_argument("--budget", type=int, default=12288, help="steps of a member")
    args = p.parse_args()
    first = args.budget // 8  # the first rung: 27 go there, 9 to three times as far, 3 to the end: .28 of the grid
    held = []
    for i in range(args.repetitions):
        common = ["--seeds", str(args.seeds), "--budget", str(args.budget), "--set", f"run.seed={1000 * (i + 1)}"]
        grid = sweep(args.out / f"grid_{i}", *common)
        asha = sweep(args.out / f"asha_{i}", *common, "--scheduler", f"asha(eta=3,first={first})")
        row = {
            "repetition": i,
            "grid_best": best(grid, args.budget),
            "asha_best": best(asha, args.budget),
            "steps": sum(int(m["env_steps"]) for m in asha) / sum(int(m["env_steps"]) for m in grid),
        }
        row["factor"] = max(row["grid_best"] / row["asha_best"], row["asha_best"] / row["grid_best"])
        held.append(row["factor"] <= 2 and row["steps"] < 1 / 3)
        print(json.dumps(row | {"holds": held[-1]}), flush=True)
    print(f"{sum(held)} of {len(held)} repetitions hold")
    return 0 if all(held) else 1


def sweep(out: Path, *arguments: str) -> list[dict[str, str]]:
    """Trains the sweep; the rows of its table, one for each member."""
    command = [sys.executable, "-m", "jrl.sweep", "ppo", "--env", "CartPole-v1", "--out", str(out)]
    command += [f"--set={setting}" for setting in (*_COMMON, f"{_KEY}=log(1e-5,1,{_POINTS})")]
    command += ["--stop", "episode/return=1e9", *arguments]  # no member ends by what it reached
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    with (out / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def best(members: list[dict[str, str]], budget: int) -> float:
    """The step size with the highest mean score, of those that were trained to the budget."""
    scores = defaultdict(list)
    for member in members:
        if int(member["env_steps"]) >= budget:
            scores[float(member[_KEY])].append(float(member["last"]))
    return max(scores, key=lambda lr: sum(scores[lr]) / len(scores[lr]))


if __name__ == "__main__":
    sys.exit(main())
