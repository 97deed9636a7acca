"""Computes jrl/report/assets/published.jsonl from clones of the repositories in published_sources.yaml beside it.

    python scripts/published_curves.py CLONES --write jrl/report/assets/published.jsonl

CLONES has a clone of each repository under OWNER+NAME, or OWNER+NAME/repo; bare clones will do. Files are read at the
commit in published_sources.yaml. Each line of the output is a curve: task, algorithm, source, file, seeds, steps, mean,
deviation.
"""

import argparse
import csv
import gzip
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jrl.fields import schema  # noqa: E402

POINTS, LONGEST = 30, 1_000_000
MUJOCO = ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Ant-v4", "Humanoid-v4")
SIMBA = {
    "sac": "SAC", "droq_utd20": "DroQ, 20 updates per step", "redq_utd20": "REDQ, 20 updates per step",
    "crossq": "CrossQ", "bro_utd2": "BRO, 2 updates per step", "bro_utd10": "BRO, 10 updates per step", "mrq": "MR.Q",
    "simbaV2_utd2": "SimbaV2, 2 updates per step",
}  # fmt: skip
FLASH = {"FlashSAC": "FlashSAC", "baseline/XQC": "XQC"}
DM_CONTROL = {
    "cartpole_swingup": "CartpoleSwingup-v1", "cheetah_run": "CheetahRun-v1", "walker_walk": "WalkerWalk-v1",
    "reacher_easy": "ReacherEasy-v1", "pendulum_swingup": "PendulumSwingup-v1",
}  # fmt: skip
PROPRIO = {
    "mpo": "MPO", "dmpo": "DMPO", "ddpg": "DDPG", "d4pg": "D4PG", "dreamerv3": "DreamerV3", "ppo_fixhp": "PPO",
}  # fmt: skip
PLAYGROUND = ("CartpoleSwingup", "CheetahRun", "WalkerWalk", "ReacherEasy", "FingerSpin")
REPPO = {
    "small_data": "REPPO, small batch", "large_data": "REPPO, large batch", "ppo_brax": "PPO, brax",
    "fasttd3_small": "FastTD3",
}  # fmt: skip
ZOO_TASKS = (
    "CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "LunarLander-v2",
    "LunarLanderContinuous-v2",
)  # fmt: skip
NAMES = {
    "a2c": "A2C", "ars": "ARS", "ddpg": "DDPG", "dqn": "DQN", "ppo": "PPO", "qrdqn": "QR-DQN", "sac": "SAC",
    "td3": "TD3", "tqc": "TQC", "trpo": "TRPO",
}  # fmt: skip
# file -> algorithm, steps; the table's first column of numbers is CleanRL's own
CLEANRL = {
    "docs/benchmark/ppo.md": ("PPO", 500_000), "docs/benchmark/ppo_continuous_action.md": ("PPO", 1_000_000),
    "docs/benchmark/sac.md": ("SAC", 1_000_000), "docs/benchmark/td3.md": ("TD3", 1_000_000),
    "docs/benchmark/ddpg.md": ("DDPG", 1_000_000),
}  # fmt: skip
CLEANRL_SEEDS = 3

Seeds = Mapping[Any, tuple[np.ndarray, np.ndarray]]  # seed -> steps and returns


class Sources:
    """Files of the clones."""

    def __init__(self, clones: Path):
        self.clones = clones
        self.sources = schema.read_mapping(ROOT / "jrl" / "report" / "assets" / "published_sources.yaml")

    def read(self, source: str, path: str) -> bytes:
        """Returns a file at the commit of its source."""
        where = self.clones / self.sources[source]["repository"].replace("/", "+")
        where = where / "repo" if (where / "repo").is_dir() else where
        show = ["git", "-C", str(where), "show", f"{self.sources[source]['commit']}:{path}"]
        return subprocess.run(show, capture_output=True, check=True).stdout

    def rows(self, source: str, path: str) -> list[dict[str, str]]:
        """Returns the rows of a CSV file."""
        return list(csv.DictReader(io.StringIO(self.read(source, path).decode())))


def thin(steps: np.ndarray) -> np.ndarray:
    """Returns the indices of at most POINTS steps, denser at the beginning, where short runs are compared."""
    kept = np.flatnonzero(steps > steps[-1] / 1000)
    if len(kept) <= POINTS:
        return kept
    wanted = np.unique(np.concatenate([np.geomspace(1e4, steps[-1], POINTS - 3), [5e4, 1e5, 2e5]]))
    nearest = [kept[np.abs(steps[kept] - x).argmin()] for x in wanted]
    return np.unique(nearest)


def curve(task: str, algorithm: str, source: str, path: str, steps: Any, values: np.ndarray) -> dict[str, Any]:
    """Returns a line of the output; values f64 [seeds, steps]."""
    steps = np.asarray(steps, float)
    at = thin(steps)
    short = lambda x: [float(f"{number:.5g}") for number in x]
    return {
        "task": task, "algorithm": algorithm, "source": source, "file": path, "seeds": len(values),
        "steps": [round(x) for x in steps[at]], "mean": short(values.mean(0)[at]),
        "deviation": short(values.std(0, ddof=1)[at]),
    }  # fmt: skip


def of_seeds(task: str, algorithm: str, source: str, path: str, seeds: Seeds) -> dict[str, Any]:
    """Returns the curve of seeds at the steps that all have, or that lie in their common range."""
    common = sorted(set.intersection(*(set(steps) for steps, _ in seeds.values())))
    if len(common) < 5:  # each seed has steps of its own
        low, high = max(x[0] for x, _ in seeds.values()), min(x[-1] for x, _ in seeds.values())
        common = list(np.linspace(low, high, POINTS))
    common = [x for x in common if x <= LONGEST]
    return curve(task, algorithm, source, path, common, np.stack([np.interp(common, *xy) for xy in seeds.values()]))


def long_table(found: Sources, source: str, path: str, algorithm: str, tasks: Sequence[str]) -> Iterator[dict]:
    """Yields the curves of a file with a row per task, seed and step."""
    rows = [row for row in found.rows(source, path) if row["metric"] == "avg_return"]
    for task in tasks:
        seeds: dict[str, dict[float, list[float]]] = {}
        for row in rows:
            if row["env_name"] == task:
                seeds.setdefault(row["seed"], {}).setdefault(float(row["env_step"]), []).append(float(row["value"]))
        mean = {seed: {x: sum(y) / len(y) for x, y in sorted(own.items())} for seed, own in seeds.items()}
        arrays = {seed: (np.array([*own]), np.array([*own.values()])) for seed, own in mean.items()}
        if arrays:
            yield of_seeds(task, algorithm, source, path, arrays)


def dm_control(found: Sources) -> Iterator[dict]:
    for name, algorithm in PROPRIO.items():
        path = f"scores/dmc_proprio-{name}.json.gz"
        runs = json.loads(gzip.decompress(found.read("dreamerv3", path)))
        for task, ours in DM_CONTROL.items():
            own = [run for run in runs if run["task"] == f"dmc_{task}"]
            seeds = {run["seed"]: (np.array(run["xs"], float), np.array(run["ys"], float)) for run in own}
            yield of_seeds(ours, algorithm, "dreamerv3", path, seeds)


def playground(found: Sources) -> Iterator[dict]:
    for task in PLAYGROUND:
        for name, algorithm in REPPO.items():
            path = f"results/{task}_{name}.csv"
            rows = found.rows("reppo", path)[1:]
            trials = [key for key in rows[0] if key.startswith("trial")]
            table = np.array([[float(row[key] or "nan") for row in rows] for key in trials])
            table = table[np.isfinite(table).all(1)]
            steps = np.array([float(row["steps"]) for row in rows])
            kept = steps <= 50.1e6
            yield curve(f"playground:{task}", algorithm, "reppo", path, steps[kept], table[:, kept])


def zoo(found: Sources) -> Iterator[dict]:
    for line in found.read("zoo", "benchmark.md").decode().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[0] in NAMES and cells[1] in ZOO_TASKS:
            size = {"k": 1e3, "M": 1e6}[cells[4][-1]]
            yield {
                "task": cells[1], "algorithm": NAMES[cells[0]], "source": "zoo", "file": "benchmark.md", "seeds": 1,
                "steps": [round(float(cells[4][:-1]) * size)], "mean": [float(cells[2])],
                "deviation": [float(cells[3])],
            }  # fmt: skip


def cleanrl(found: Sources) -> Iterator[dict]:
    for path, (algorithm, steps) in CLEANRL.items():
        for line in found.read("cleanrl", path).decode().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            number = re.match(r"(-?[\d.]+) ± ([\d.]+)", cells[1]) if len(cells) > 1 else None
            if number and cells[0] in (*MUJOCO, *ZOO_TASKS):
                yield {
                    "task": cells[0], "algorithm": algorithm, "source": "cleanrl", "file": path,
                    "seeds": CLEANRL_SEEDS, "steps": [steps], "mean": [float(number[1])],
                    "deviation": [float(number[2])],
                }  # fmt: skip


def curves(found: Sources) -> Iterator[dict]:
    """Yields all curves."""
    for name, algorithm in SIMBA.items():
        yield from long_table(found, "simbav2", f"results/baseline/{name}.csv", algorithm, MUJOCO)
    for name, algorithm in FLASH.items():
        yield from long_table(found, "flashsac", f"results/stateRL_cpusim/{name}.csv", algorithm, MUJOCO)
    for part in (dm_control, playground, zoo, cleanrl):
        yield from part(found)


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    p.add_argument("clones", type=Path, metavar="CLONES")
    p.add_argument("--write", type=Path, metavar="FILE", required=True)
    args = p.parse_args()
    lines = [json.dumps(line, separators=(", ", ": "), ensure_ascii=False) for line in curves(Sources(args.clones))]
    args.write.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{args.write}: {len(lines)} curves")
    return 0


if __name__ == "__main__":
    sys.exit(main())
