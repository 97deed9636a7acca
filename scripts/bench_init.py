"""Which initial weights does an algorithm learn best from? The same runs with each, seed after seed, in one process.

    python scripts/bench_init.py --out runs/init.jsonl                          # all algorithms, 8 seeds
    python scripts/bench_init.py --only dqn pqn --init orthogonal uniform --seeds 16

Environments are written in JAX, so that nothing but the learning takes time. Prints one JSON line per run: the mean
over the run of the mean return of the last 100 training episodes (`curve`: how fast it learned), that mean at the end
(`last`), and the mean of 20 greedy episodes with the final weights (`greedy`). Then a table: medians over the seeds,
and the lowest.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl import config

INITS = ("orthogonal", "lecun", "uniform")
_PARTS = 20  # of a run, between which `curve` looks at the returns


class Task(NamedTuple):
    config: str
    env_steps: int
    overrides: tuple[str, ...] = ()


_SMALLER = ("network.hidden=[128,128]", "replay.batch_size=128")  # a sixth of the time
# rl-zoo3's settings of DQN for CartPole-v1; there the target network moves once between two blocks of 128 updates
_ZOO = (
    "env.num_envs=1", "rollout.length=256", "replay.train_every=null", "replay.updates_per_step=0.5",
    "replay.n_step=1", "replay.batch_size=64", "network.hidden=[256,256]", "network.activation=relu",
    "algo.lr=2.3e-3", "algo.target_update_every=128", "algo.exploration.epsilon=[[0,1.0],[8000,0.04]]",
)  # fmt: skip
TASKS = {
    "dqn": Task("configs/dqn.yaml", 100_000),
    "dqn-relu": Task("configs/dqn.yaml", 100_000, ("network.activation=relu",)),
    "c51": Task("configs/c51.yaml", 60_000),
    "qrdqn": Task("configs/qrdqn.yaml", 60_000),
    "rainbow": Task("configs/rainbow.yaml", 60_000),
    "pqn": Task("configs/pqn.yaml", 100_000),
    "sac": Task("configs/sac.yaml", 6_000, _SMALLER),
    "sac-discrete": Task("configs/sac_discrete.yaml", 20_000),
    "td3": Task("configs/td3.yaml", 6_000, _SMALLER),
    "ddpg": Task("configs/ddpg.yaml", 6_000, _SMALLER),
    "dqn-zoo": Task("configs/dqn.yaml", 50_000, _ZOO),
    "dqn-zoo-tanh": Task("configs/dqn.yaml", 50_000, (*_ZOO, "network.activation=tanh")),
}


class Runner:
    """Runs of one task with one kind of initial weights: compiled once, for all seeds."""

    def __init__(self, task: Task, init: str | None):
        from jrl.play import evaluation
        from jrl.run import build

        own = ("env.backend=jax", f"network.init={init or 'null'}", "evaluation.every=1000000000")
        own += ("evaluation.duration=20",)
        each = task.env_steps // _PARTS
        cfg = config.load(
            task.config, (*task.overrides, *own, f"run.report_every={each}", f"stop.env_steps={task.env_steps}")
        )
        self._steps, self._program = task.env_steps, build.run(cfg).program
        self._evaluations = evaluation.Evaluations(cfg)

    def run(self, seed: int) -> dict[str, Any]:
        from jrl.learn.program import train
        from jrl.metrics import episodes

        start, program, returns, due = time.time(), self._program, [], self._steps / _PARTS
        for info in train(program, program.init(seed), seed=seed, total_env_steps=self._steps):
            if info.env_steps >= due:
                due += self._steps / _PARTS
                returns.append(episodes.summarize([info.episodes])["episode/return"])
        last = episodes.summarize([info.episodes])["episode/return"]
        greedy = self._evaluations.play(program.actor(info.state), count=seed, version=0)["return"]
        curve = float(np.nanmean([*returns, last]))
        return {"curve": curve, "last": last, "greedy": greedy, "wall_s": round(time.time() - start, 1)}


def rows(names: list[str], inits: list[str], seeds: int) -> Iterator[dict[str, Any]]:
    for name in names:
        runners = {init: Runner(TASKS[name], init) for init in inits}
        for seed in range(seeds):
            for init, runner in runners.items():
                yield {"task": name, "init": init, "seed": seed, **runner.run(seed)}


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    columns = ("curve", "last", "greedy")
    yield "| task | initial weights | seeds | " + " | ".join(f"{c}: median (least)" for c in columns) + " |"
    yield "| --- " * (3 + len(columns)) + "|"
    for name, init in dict.fromkeys((row["task"], row["init"]) for row in found):
        of = [row for row in found if (row["task"], row["init"]) == (name, init)]
        cells = [f"{statistics.median(r[c] for r in of):.1f} ({min(r[c] for r in of):.1f})" for c in columns]
        yield f"| {name} | {init} | {len(of)} | " + " | ".join(cells) + " |"


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--only", nargs="*", choices=TASKS, help="tasks (default: all)")
    p.add_argument("--init", nargs="*", choices=INITS, default=list(INITS), help="initial weights (default: all)")
    p.add_argument("--seeds", type=int, default=8)
    p.add_argument("--out", type=Path, help="file that the JSON lines are added to")
    args = p.parse_args()
    found = []
    for row in rows(args.only or list(TASKS), args.init, args.seeds):
        found.append(row)
        print(json.dumps(row), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print("\n" + "\n".join(table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
