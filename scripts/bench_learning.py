"""Does it learn? Every task of a table, over several seeds, by the command a user would type.

    python scripts/bench_learning.py --out runs/learning                 # all tasks, 5 seeds
    python scripts/bench_learning.py --only cartpole --seeds 10
    python scripts/bench_learning.py --only data-bc-cartpole data-cql-pendulum --out runs/from_data
    python scripts/bench_learning.py --out runs/learning --table         # trains nothing

The seeds of a task are `python -m jrl.train CONFIG --seeds 5`: one program where its environments are written in JAX,
processes elsewhere. A run passes when the config's criterion (the mean return of the last 100 training episodes, or
that of an evaluation) reaches the threshold within the step budget. A control, which lacks what the task needs, passes
when it does not. A run from data makes all its updates, and passes when its last evaluation is within the bounds;
scripts/make_data.py makes the data sets. Prints one JSON line per run, which --out keeps in summary.jsonl, then a table
with the statistics of `jrl.report`: interquartile means over the seeds and their 95 % bootstrap intervals; exits with 1
if any failed. The same --out again leaves out the tasks that are in it and prints the table of all, so that a table may
be made in several parts. Tasks whose packages are not installed are left out, with a line that says so.
"""

import argparse
import csv
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jrl import config
from jrl.host import files
from jrl.metrics import loggers, plots, progress
from jrl.report import content, figures, runs, statistics

SUMMARY = "summary.jsonl"  # of --out


class Task(NamedTuple):
    name: str
    config: str
    overrides: tuple[str, ...] = ()
    seeds: int | None = None  # at most, where a run is long
    control: bool = False  # it must not reach the threshold
    needs: str | None = None  # a package that is no dependency
    bounds: tuple[float, float] | None = None  # from data: of the last evaluation's return
    first: tuple[str, ...] = ()  # config and overrides of a run whose policy it begins with
    lowest: float = -math.inf  # below which no evaluation may fall


# every 250th step and every 100th reset raises
_CRASHING = (
    "env.id=faulty_envs:Crashing",
    "env.options={p_step: 0.004, p_reset: 0.01}",
    "env_runners.restart_failed_sub_environments=true",
    "stop.env_steps=100000",
    "stop.episode/return=150",
)
_RUNNERS = ("rollout.mode=async", "env_runners.num=2")
# what `python -m jrl.config migrate` makes of RLlib's tuned example cartpole-apex-dqn, of two workers
_APEX = (
    "algo={target_update_every: 500, exploration: {name: epsilon_greedy, ladder: true}}",
    "env.num_envs=2",
    "replay={capacity: 50000, batch_size: 64, n_step: 3, prioritized: true, train_every: 2, updates_per_step: 1}",
    "stop.env_steps=100000",
    "stop.episode/return=150",
)
# BC as marwil.yaml has it
_BC_MIXED = (
    "data.input=runs/data/cartpole-mixed", "evaluation.explore=true", "algo.lr=[[0, 2e-3], [4000, 0]]",
    "stop.updates=4000",
)  # fmt: skip
_PENDULUM_EXPERT = ("env.id=Pendulum-v1", "data.input=runs/data/pendulum-expert")
_PENDULUM_MIXED = ("env.id=Pendulum-v1", "data.input=runs/data/pendulum-mixed")
_IQL_PENDULUM = (
    *_PENDULUM_MIXED, "algo.expectile=0.9", "algo.beta=0.5", "algo.gamma=0.95", "algo.tau=0.01", "stop.updates=8000"
)  # fmt: skip
# half a minute to some minutes; BC of 10k updates does not come to 3700
_CHEETAH = (
    "env.id=HalfCheetah-v4", "env.backend=envpool", "data.input=runs/data/halfcheetah-medium",
    "network.hidden=[256, 256]", "network.activation=relu", "algo.normalize_obs=true", "evaluation.every=10000",
)  # fmt: skip
_BC_CHEETAH = (*_CHEETAH, "algo.lr=[[0, 1e-3], [10000, 0]]", "stop.updates=10000", "evaluation.every=2500")
_TD3_BC_CHEETAH = (*_CHEETAH, "algo.bc_alpha=2.5", "algo.lr=3e-4", "algo.tau=0.02", "stop.updates=40000")
_REBRAC_CHEETAH = (*_CHEETAH, "algo.tau=0.02", "stop.updates=30000")
# a policy that begins as the data's, values that do not reach beyond the data, and steps that become smaller
_CQL_CHEETAH = (
    *_CHEETAH, "network.critic_norm=layer", "algo.gamma=0.99", "algo.cql_weight=0.1", "algo.ent_coef=0.02",
    "algo.ent_coef_lr=3e-4", "algo.lr=[[0, 1e-3], [15000, 0]]", "algo.actor_lr=[[0, 1e-3], [15000, 0]]",
    "algo.bc_updates=2500", "replay.batch_size=256", "data.reward.scale=0.1", "evaluation.every=5000",
    "stop.updates=15000",
)  # fmt: skip
_IQL_CHEETAH = (
    *_CHEETAH, "data.reward.normalize=range", "algo.expectile=0.7", "algo.beta=3", "algo.lr=[[0, 1e-3], [40000, 0]]",
    "stop.updates=40000",
)  # fmt: skip
_FORGETS = ("network.core=null",)
TASKS = (
    Task("cartpole", "configs/ppo.yaml"),
    Task("cartpole-jax", "configs/ppo.yaml", ("env.backend=jax",)),
    Task("cartpole-gymnasium", "configs/ppo.yaml", ("env.backend=gymnasium",)),
    Task("pendulum", "configs/ppo_pendulum.yaml"),
    Task("acrobot", "configs/ppo_acrobot.yaml"),
    Task("catch", "configs/ppo_catch.yaml"),
    Task("cartpole-balance", "configs/ppo_dmc.yaml"),
    Task("lunarlander", "configs/ppo_box2d.yaml"),
    Task("halfcheetah", "configs/ppo_mujoco.yaml"),
    Task("a2c-cartpole", "configs/a2c.yaml"),
    Task("pg-cartpole", "configs/pg.yaml"),
    Task("trpo-cartpole", "configs/trpo.yaml"),
    Task("trpo-pendulum", "configs/trpo_pendulum.yaml"),
    Task("vmpo-cartpole", "configs/vmpo.yaml"),
    Task("vmpo-pendulum", "configs/vmpo_pendulum.yaml"),
    Task("spo-cartpole", "configs/spo.yaml"),
    Task("spo-pendulum", "configs/spo_pendulum.yaml"),
    Task("reppo-pendulum", "configs/reppo.yaml"),
    Task("rpo-pendulum", "configs/ppo_rpo.yaml"),
    Task("appo-cartpole", "configs/appo.yaml", ("rollout.mode=async",)),
    Task("impala-cartpole", "configs/impala.yaml", ("rollout.mode=async", "env_runners.num=2")),
    Task("cartpole-async", "configs/ppo.yaml", ("rollout.mode=async",)),
    Task("cartpole-devices", "configs/ppo.yaml", ("devices.fake=4",)),
    Task("cartpole-runners", "configs/ppo.yaml", ("env_runners.num=2",)),
    Task("cartpole-crashing", "configs/ppo.yaml", _CRASHING),
    Task("dqn-cartpole", "configs/dqn.yaml"),
    Task("dqn-cartpole-runners", "configs/dqn.yaml", _RUNNERS),
    Task("apex-cartpole", "configs/dqn.yaml", _APEX),
    Task("apex-cartpole-runners", "configs/dqn.yaml", (*_APEX, *_RUNNERS)),
    Task("c51-cartpole", "configs/c51.yaml"),
    Task("qrdqn-cartpole", "configs/qrdqn.yaml"),
    Task("iqn-cartpole", "configs/iqn.yaml"),
    Task("softq-cartpole", "configs/softq.yaml"),
    Task("rainbow-cartpole", "configs/rainbow.yaml"),
    Task("pqn-cartpole", "configs/pqn.yaml"),
    Task("pqn-cartpole-async", "configs/pqn.yaml", ("rollout.mode=async",)),
    Task("awr-cartpole", "configs/awr.yaml"),
    Task("mpo-pendulum", "configs/mpo.yaml"),
    Task("mpo-cartpole-swingup", "configs/mpo_dmc.yaml"),
    Task("sac-pendulum", "configs/sac.yaml"),
    Task("sac-pendulum-two", "configs/sac.yaml", ("env.num_envs=2",)),
    Task("sac-pendulum-runners", "configs/sac.yaml", ("env.num_envs=2", *_RUNNERS)),
    Task("td3-pendulum", "configs/td3.yaml"),
    Task("ddpg-pendulum", "configs/ddpg.yaml"),
    Task("tqc-pendulum", "configs/tqc.yaml"),
    Task("crossq-pendulum", "configs/crossq.yaml"),
    Task("droq-pendulum", "configs/droq.yaml"),
    Task("redq-pendulum", "configs/redq.yaml"),
    Task("fast-td3-pendulum", "configs/fast_td3.yaml"),
    Task("sac-cartpole", "configs/sac_discrete.yaml"),
    Task("ddpg-mountaincar", "configs/ddpg_mountaincar.yaml"),
    Task("stateless-lstm", "configs/ppo_lstm.yaml"),
    Task("stateless-impala", "configs/impala_lstm.yaml"),
    Task("stateless-r2d2", "configs/r2d2.yaml"),
    Task("repeat-lstm", "configs/ppo_gtrxl.yaml", ("network.core={name: lstm, size: 32}",)),
    Task("repeat-gtrxl", "configs/ppo_gtrxl.yaml"),
    Task("masked-ppo", "configs/ppo_mask.yaml"),
    Task("masked-dqn", "configs/dqn_mask.yaml"),
    Task("her-bitflip", "configs/dqn_her_bitflip.yaml"),
    Task("her-bitflip-control", "configs/dqn_her_bitflip.yaml", ("replay.hindsight=null",), control=True),
    Task("her-pointmaze", "configs/sac_her_pointmaze.yaml"),
    Task("doorkey", "configs/ppo_minigrid.yaml"),
    Task("xminigrid-gru", "configs/ppo_xminigrid.yaml", needs="xminigrid"),
    Task("sac-cartpole-balance", "configs/sac_dmc.yaml"),
    Task(
        "sac-halfcheetah", "configs/sac_mujoco.yaml", ("stop.env_steps=100000", "stop.evaluation/return=3000"), seeds=1
    ),
    # several agents: returns are sums over them
    Task("agents-ppo-cartpole", "configs/multi_cartpole.yaml"),
    Task("agents-ppo-pendulum", "configs/multi_pendulum.yaml"),
    Task("agents-dqn-cartpole", "configs/multi_cartpole_dqn.yaml"),
    Task("agents-sac-pendulum", "configs/masac_pendulum.yaml"),
    Task("agents-td3-pendulum", "configs/maddpg_pendulum.yaml"),
    Task("agents-appo-cartpole", "configs/multi_cartpole_appo.yaml"),
    Task("moves-lstm", "configs/rock_paper_scissors.yaml"),
    Task("moves", "configs/rock_paper_scissors.yaml", (*_FORGETS, "stop.episode/return=6.5")),
    Task("moves-control", "configs/rock_paper_scissors.yaml", _FORGETS, control=True),
    Task("riddle-gru", "configs/switch_riddle.yaml"),
    Task("riddle-control", "configs/switch_riddle.yaml", (*_FORGETS, "stop.evaluation/return=0.1"), control=True),
    Task("spread-ippo", "configs/spread.yaml"),
    Task("spread-ippo-pettingzoo", "configs/spread.yaml", ("env.id=pettingzoo:mpe2.simple_spread_v3",), needs="mpe2"),
    Task("spread-mappo", "configs/spread_mappo.yaml"),
    Task("spread-vdn", "configs/spread_vdn.yaml"),
    Task("spread-pqn-vdn", "configs/spread_pqn_vdn.yaml"),
    Task("two-step-vdn", "configs/vdn.yaml"),
    Task("two-step-vdn-control", "configs/vdn.yaml", ("stop.evaluation/return=8",), control=True),
    Task("two-step-qmix", "configs/qmix.yaml"),
    Task("two-step-ppo", "configs/grouped_ppo.yaml"),
    Task("connect-four", "configs/connect_four.yaml"),
    # from data
    Task("data-bc-cartpole", "configs/bc.yaml", bounds=(475, math.inf)),
    Task("data-bc-pendulum", "configs/bc.yaml", _PENDULUM_EXPERT, bounds=(-200, math.inf)),
    Task("data-marwil-cartpole", "configs/marwil.yaml", bounds=(250, math.inf)),
    Task("data-marwil-control", "configs/bc.yaml", _BC_MIXED, control=True, bounds=(250, math.inf)),
    Task("data-cql-cartpole", "configs/discrete_cql.yaml", bounds=(400, math.inf)),
    Task("data-iql-cartpole", "configs/iql.yaml", bounds=(400, math.inf)),
    Task("data-cql-pendulum", "configs/cql.yaml", bounds=(-250, math.inf)),
    Task("data-iql-pendulum", "configs/iql.yaml", _IQL_PENDULUM, bounds=(-250, math.inf)),
    Task("data-td3-bc-pendulum", "configs/td3_bc.yaml", bounds=(-250, math.inf)),
    Task("data-rebrac-pendulum", "configs/rebrac.yaml", bounds=(-250, math.inf)),
    Task("data-pendulum-control", "configs/bc.yaml", _PENDULUM_MIXED, control=True, bounds=(-300, math.inf)),
    Task("data-cql-halfcheetah", "configs/cql.yaml", _CQL_CHEETAH, bounds=(3700, math.inf)),
    Task("data-iql-halfcheetah", "configs/iql.yaml", _IQL_CHEETAH, bounds=(3700, math.inf)),
    Task("data-td3-bc-halfcheetah", "configs/td3_bc.yaml", _TD3_BC_CHEETAH, bounds=(3700, math.inf)),
    Task("data-rebrac-halfcheetah", "configs/rebrac.yaml", _REBRAC_CHEETAH, bounds=(3700, math.inf)),
    Task("data-halfcheetah-control", "configs/bc.yaml", _BC_CHEETAH, control=True, bounds=(3700, math.inf)),
    Task("data-dt-cartpole", "configs/dt.yaml", bounds=(400, math.inf)),
    Task(
        "data-bc-into-ppo",
        "configs/ppo_from_bc.yaml",
        ("stop.evaluation/return=450",),
        first=("configs/bc.yaml", "data.input=runs/data/cartpole-medium", "stop.updates=2000"),
        lowest=200,
    ),
    Task("rlpd-halfcheetah", "configs/rlpd.yaml", ("stop.env_steps=40000", "stop.evaluation/return=3000")),
    Task("data-dt-cartpole-100", "configs/dt.yaml", ("algo.target_return=100",), bounds=(60, 160)),
)


def criterion_of(task: Task) -> str:
    """The metric that the threshold is of."""
    found = config.load(task.config, task.overrides).stop
    return next(key for key in found if key != "env_steps") if task.bounds is None else "evaluation/return"


def title_of(task: Task) -> str:
    """Returns the words above a task's panel: its config, environment, and the overrides beside stop criteria."""
    cfg = config.load(task.config, task.overrides)
    more = [text for text in task.overrides if not text.startswith(("stop.", "env.id="))]
    evaluated = ", evaluations" if criterion_of(task).startswith("evaluation/") else ""
    return "\n".join([f"{Path(task.config).name}: {cfg.env.id}{evaluated}", *more])


def threshold_of(task: Task) -> float:
    """Returns the value of the criterion that a run must reach."""
    found = config.load(task.config, task.overrides).stop
    return found[criterion_of(task)] if task.bounds is None else task.bounds[0]


def draw(tasks: Iterable[Task], out: Path, png: Path) -> None:
    """Draws the seeds of each task in a panel of its own: the metric of its criterion, and its threshold."""
    panels, thresholds = {}, {}
    for task in tasks:
        title, metric = title_of(task), criterion_of(task)
        lines = [run.curve("env_steps", metric) for run in runs.read([out / task.name]).runs]
        lines = [line for line in lines if len(line[0])]
        band = content.interquartile_band([lines], content.ReportOptions(metric)) if lines else None
        panels[title] = {"": (lines, figures.to_band(band))}
        thresholds[title] = threshold_of(task)
    plots.plot_groups(panels, png, x="env_steps", y="return", thresholds=thresholds)


def run(task: Task, seeds: int, out: Path) -> list[dict]:
    """Trains the seeds of a task; a line for each."""
    directory = out / task.name
    shutil.rmtree(directory, ignore_errors=True)  # of a command that did not come to its end
    start = time.time()
    if task.first:
        failed = [f for seed in range(seeds) if (f := from_another(task, seed, directory))]
    else:
        trained(task.config, task.overrides, ["--seeds", str(seeds), "--out", str(directory)])
        table = csv.DictReader((directory / "sweep.csv").read_text().splitlines())
        failed = [row["member"] for row in table if row["ended"].startswith(("failed", "not finite"))]
    wall = round(time.time() - start, 1)
    members = sorted((directory / "members").iterdir())
    return [{**result(task, seed, where, failed), "wall_s": wall} for seed, where in enumerate(members)]


def from_another(task: Task, seed: int, directory: Path) -> str | None:
    """Trains a run that begins with the policy of another; its name if an update was not finite."""
    first, own = directory / "first" / f"{seed:02}", directory / "members" / f"{seed:02}"
    trained(task.first[0], (*task.first[1:], f"run.seed={seed}"), ["--out", str(first)])
    more = ["--init-from", str(first), "--policy-only", "--out", str(own)]
    return own.name if trained(task.config, (*task.overrides, f"run.seed={seed}"), more) else None


def result(task: Task, seed: int, directory: Path, failed: list[str]) -> dict:
    """What a run of a task came to."""
    rows = loggers.read_rows(directory / "result.jsonl")
    last, criterion = rows[-1] if rows else {}, criterion_of(task)
    returns = [r[criterion] for r in rows if r.get(criterion) is not None]
    if task.bounds is None:
        cfg = config.load(task.config, task.overrides)
        wanted, window = {**cfg.stop, "env_steps": math.inf}, cfg.run.smoothing_episodes
        # of all rows: that of the end comes after the one that ended the run
        reached = any(progress.is_met(name, row, value, window) for row in rows for name, value in wanted.items())
    else:
        reached = bool(returns) and task.bounds[0] <= returns[-1] <= task.bounds[1]
    reached = reached and min(returns, default=math.inf) >= task.lowest
    return {
        "task": task.name,
        "seed": seed,
        "passed": reached != task.control and directory.name not in failed,
        "env_steps": last.get("env_steps", 0),
        "criterion": criterion,
        "return": returns[-1] if returns else None,
        "best": max(returns, default=None),
        "lowest": min(returns, default=None),
        "updates": last.get("updates", 0),
    }


def trained(path: str, overrides: tuple[str, ...], more: list[str]) -> int:
    """Trains as a user would; the exit status, 0 or 1."""
    settings = [f"--set={o}" for o in (*overrides, "run.log=[jsonl]")]
    command = [sys.executable, "-m", "jrl.train", path, *settings, *more]
    tests = str(Path(__file__).parent.parent / "tests")  # for environments that fail on purpose
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": tests})
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    print(done.stderr[-3000:] if done.returncode else "", end="", file=sys.stderr)
    return done.returncode


def by_task(results: list[dict]) -> Iterator[tuple[Task, str, list[dict]]]:
    """Each task that has results, in the order of the table, how many of its runs passed, and the runs."""
    for task in TASKS:
        if rows := [r for r in results if r["task"] == task.name]:
            yield task, f"{sum(r['passed'] for r in rows)}/{len(rows)}", rows


def of_seeds(rows: list[dict], key: str) -> str:
    """The interquartile mean of a number of each seed, with its 95 % interval where there are several."""
    found = statistics.estimate(statistics.interquartile_mean, [[r[key] for r in rows]])
    digits = 1 if abs(found.value) < 100 else 0
    value, low, high = (f"{float(x):,.{digits}f}" for x in found)
    return value if len(rows) < 2 else f"{value} ({low} to {high})"


def print_steps(results: list[dict]) -> None:
    """A table of how long runs took to their thresholds; seconds are those of all seeds, one program or one by one."""
    if results:
        head = "| task | threshold | budget | passed | steps to threshold (95 % interval) | most | wall s, all seeds |"
        print(f"\n{head}", "| --- " * 7 + "|", sep="\n")
    for task, passed, rows in by_task(results):
        stop, most = config.load(task.config, task.overrides).stop, max(r["env_steps"] for r in rows)
        print(
            f"| {task.name} | {stop[criterion_of(task)]:g} | {stop['env_steps']:,} | {passed} | "
            f"{of_seeds(rows, 'env_steps')} | {most:,} | {rows[0]['wall_s']:,} |"
        )


def print_returns(results: list[dict]) -> None:
    """A table of what runs from data end with."""
    if results:
        head = "| task | passed | updates | last (95 % interval) | best | wall s, all seeds |"
        print(f"\n{head}", "| --- " * 6 + "|", sep="\n")
    for task, passed, rows in by_task(results):
        last, best = (of_seeds(rows, key) for key in ("return", "best"))
        print(f"| {task.name} | {passed} | {rows[0]['updates']:,} | {last} | {best} | {rows[0]['wall_s']:,} |")


def trained_before(out: Path) -> dict[str, list[dict]]:
    """Of each task that --out has its lines."""
    found: dict[str, list[dict]] = {}
    for row in loggers.read_rows(out / SUMMARY):
        found.setdefault(row["task"], []).append(row)
    return found


def keep(out: Path, results: dict[str, list[dict]]) -> None:
    """Replaces what --out has."""
    files.replace(out / SUMMARY, "".join(json.dumps(row) + "\n" for rows in results.values() for row in rows))


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--only", nargs="*", choices=[t.name for t in TASKS], help="tasks (default: all)")
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--out", type=Path, default=Path("runs/learning"))
    p.add_argument("--table", action="store_true", help="train nothing: the table of what --out has")
    p.add_argument("--plot", type=Path, help="draw the learning curves into this PNG")
    args = p.parse_args()
    if args.out.exists() and not (args.out / SUMMARY).exists():
        p.error(f"{args.out} is no directory of this script: choose another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    results = trained_before(args.out)
    keep(args.out, results)
    for task in [t for t in TASKS if not args.only or t.name in args.only] if not args.table else []:
        if task.needs and importlib.util.find_spec(task.needs) is None:
            print(f"{task.name}: left out, {task.needs} is not installed", flush=True)
            continue
        seeds = min(args.seeds, task.seeds or args.seeds)
        if len(results.get(task.name, ())) >= seeds:
            print(f"{task.name}: {args.out} has it", flush=True)
            continue
        results[task.name] = run(task, seeds, args.out)
        print(*map(json.dumps, results[task.name]), sep="\n", flush=True)
        keep(args.out, results)
    every = [row for rows in results.values() for row in rows]
    from_data = [t.name for t in TASKS if t.bounds is not None]
    print_steps([r for r in every if r["task"] not in from_data])
    print_returns([r for r in every if r["task"] in from_data])
    if args.plot:
        draw((task for task, *_ in by_task(every)), args.out, args.plot)
    return 0 if all(r["passed"] for r in every) else 1


if __name__ == "__main__":
    sys.exit(main())
