"""How fast is it? Works of fixed size, each measured by the command a user would type, in rounds beside other programs.

    python scripts/bench_speed.py                                   # every work, 3 rounds, one JSON line each, a table
    python scripts/bench_speed.py W1 G256 --repeat 5 --out speed.jsonl
    python scripts/bench_speed.py W1 --beside peers.txt             # a command per line that prints one JSON line
    python scripts/bench_speed.py M1 M2 M20 M20s --repeat 5 --beside peers.txt      # several agents
    python scripts/bench_speed.py offline-iql offline-cql --beside peers.txt        # updates on data sets
    python scripts/bench_speed.py to475 to475s sweep                                # 16 seeds beside one; 256 members
    python scripts/bench_speed.py G256 G2048 --longer 5                             # on a GPU, where they end at once

A work runs `python -m jrl.train` in a process of its own. Its rate is environment steps (learning included) between
30% and 100% of the run, so that start-up and compilation are outside it; `cold` and `warm` measure just those. `to475`
and `to475s` are the seconds from the start of a process, whose programs are in the compile cache, until one run, or
all of 16 seeds, have a return of 475; `sweep` those until 64 step sizes of four seeds each have made 100k steps each,
with all that they write. Commands of `--beside` run in the same rounds, one after the other, and are compared by their
field `steps_per_s`: on a shared machine only a ratio of one run counts. Ratios are printed where a peer's line says
whose `work` it did. In a command, `{i}` is the number of the round. Of several agents an environment step is one of
the game, however many they are; of several seeds it is one of any member; from data alone a step is an update, and
`python scripts/random_data.py iql` beside it is the bare update in a loop.
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.ticker import EngFormatter
from random_data import OFFLINE, from_data

from jrl.callbacks import Callbacks
from jrl.config import load
from jrl.metrics import plots

_OWN = "custom.callbacks=[scripts.bench_speed"
_CARTPOLE = ["configs/ppo.yaml", "algo.gamma=0.99", "algo.gae_lambda=0.95", "algo.ent_coef=0.01"]


def _in_jax(num_envs: int, steps: int) -> list[str]:
    return [*_CARTPOLE, "algo.lr=1e-3", "env.backend=jax", f"env.num_envs={num_envs}", f"stop.env_steps={steps}"]


_DQN = [
    "configs/dqn.yaml",
    "network.hidden=[64, 64]",
    "network.activation=relu",
    "algo.lr=1e-3",
    "replay.batch_size=128",
    "replay.learning_starts=1000",
    "evaluation.every=null",
]
_D10 = [
    *_DQN,
    "env.backend=jax",
    "env.num_envs=10",
    "replay.train_every=10",
    "replay.updates_per_step=0.1",
    "replay.capacity=10000",
]
_SAC = [
    "configs/sac.yaml",
    "network.hidden=[256, 256]",
    "network.activation=relu",
    "env.num_envs=1",
    "replay.train_every=1",
    "replay.updates_per_step=1",
    "replay.batch_size=256",
    "replay.learning_starts=500",
    "evaluation.every=1000000000",
]


def _critics(config: str, updates: int, steps: int) -> list[str]:
    """A config of other critics, with the sizes of W6p and `updates` per step."""
    return [f"configs/{config}.yaml", *_SAC[1:], f"replay.updates_per_step={updates}", f"stop.env_steps={steps}"]


def _twenty(mapping: str) -> list[str]:
    """Twenty agents with a policy each, or one that has all the columns."""
    agents = ["configs/multi_cartpole.yaml", "env.options.num_agents=20"]
    return [*agents, f"multi_agent.mapping={mapping}", "stop.env_steps=200000"]


# JaxMARL's settings of its IPPO (baselines/IPPO/config/ippo_ff_mpe.yaml), whose step size decays over the whole run
_SPREAD = [
    "configs/spread.yaml",
    "algo.lr=[[0, 2.5e-4], [2000000, 0]]",
    "algo.gamma=0.99",
    "algo.gae_lambda=0.95",
    "algo.num_epochs=4",
    "algo.num_minibatches=4",
    "rollout.length=128",
    "env.num_envs=16",
]


class AtTheEnd(Callbacks):
    """A custom metric of each episode, from its sums alone."""

    history = 0

    def on_episode_end(self, *, episode, **kwargs) -> None:
        episode.custom_metrics["steps"] = episode.length


class AtEachStep(Callbacks):
    """A custom metric of each episode, from each of its steps."""

    infos = False

    def on_episode_step(self, *, episode, **kwargs) -> None:
        episode.user_data["angle"] = max(episode.user_data.get("angle", 0.0), abs(float(episode.last_obs[2])))

    def on_episode_end(self, *, episode, **kwargs) -> None:
        episode.custom_metrics["angle"] = episode.user_data["angle"]


WORKS: dict[str, list[str]] = {  # name -> config and overrides; stop criteria beside env_steps are removed
    "W1": [*_CARTPOLE, "env.num_envs=8", "algo.lr=1e-3", "stop.env_steps=1000000"],
    "W2": [*_CARTPOLE, "env.num_envs=64", "algo.lr=2.5e-3", "stop.env_steps=2000000"],
    "W1a": [*_CARTPOLE, "env.num_envs=8", "algo.lr=1e-3", "rollout.mode=async", "stop.env_steps=1000000"],
    "W2a": [*_CARTPOLE, "env.num_envs=64", "algo.lr=2.5e-3", "rollout.mode=async", "stop.env_steps=2000000"],
    # what callbacks cost
    "W1e": [*_CARTPOLE, "env.num_envs=8", "algo.lr=1e-3", f"{_OWN}:AtTheEnd]", "stop.env_steps=500000"],
    "W1s": [*_CARTPOLE, "env.num_envs=8", "algo.lr=1e-3", f"{_OWN}:AtEachStep]", "stop.env_steps=200000"],
    "W3": ["configs/ppo_mujoco.yaml", "env.id=HalfCheetah-v5", "stop.env_steps=150000"],
    "W4": ["configs/ppo_atari.yaml", "env.num_envs=8", "algo.num_minibatches=4", "stop.env_steps=12288"],
    "G4": _in_jax(4, 2_000_000),
    "G64": _in_jax(64, 3_000_000),
    "G256": _in_jax(256, 4_000_000),
    "G2048": _in_jax(2048, 6_000_000),
    # replay: what a step costs with its gradient steps
    "W5": [*_DQN, "env.num_envs=8", "replay.train_every=32", "replay.updates_per_step=0.25", "stop.env_steps=200000"],
    "D10": [*_D10, "stop.env_steps=600000"],
    "W6p": [*_SAC, "env.id=Pendulum-v1", "stop.env_steps=6000"],
    "W6h": [*_SAC, "env.id=HalfCheetah-v5", "stop.env_steps=6000"],
    # critics: an update per step, of droq 20
    "tqc": _critics("tqc", 1, 6000),
    "crossq": _critics("crossq", 1, 6000),
    "droq": _critics("droq", 20, 1200),
    "simba": [
        *_critics("simba", 1, 6000),
        "env.backend=auto",
        "network.hidden=[128]",
        "network.critic_hidden=[256, 256]",
    ],
    # an evolution strategy of 8 linear policies
    "ars": ["configs/ars.yaml", "evaluation.every=1000000000", "stop.env_steps=2000000"],
    # 16 seeds as one program
    "G4s": _in_jax(4, 500_000),
    "D10s": [*_D10, "stop.env_steps=200000"],
    "P64": ["configs/pqn.yaml", "env.num_envs=64", "stop.env_steps=2000000"],
    # several agents
    "M1": [*_SPREAD, "stop.env_steps=1000000"],
    "M2": ["configs/multi_cartpole.yaml", "stop.env_steps=2000000"],
    "M20": _twenty("by_agent"),
    "M20s": _twenty("shared"),
}
WORKS |= {f"offline-{name}": from_data(*algo) for name, algo in OFFLINE.items()}
SEEDS = {"G4s": 16, "D10s": 16}
LABELS = {  # of a work in a picture
    "W1": "PPO, CartPole, EnvPool, 8 environments",
    "W2": "PPO, CartPole, EnvPool, 64 environments",
    "W1a": "PPO, CartPole, asynchronous, 8 environments",
    "W2a": "PPO, CartPole, asynchronous, 64 environments",
    "W1e": "PPO, CartPole, 8 environments, on_episode_end",
    "W1s": "PPO, CartPole, 8 environments, on_episode_step",
    "W3": "PPO, HalfCheetah, EnvPool, 8 environments",
    "W4": "PPO, Pong from pixels, EnvPool, 8 environments",
    "G4": "PPO, CartPole in JAX, 4 environments",
    "G64": "PPO, CartPole in JAX, 64 environments",
    "G256": "PPO, CartPole in JAX, 256 environments",
    "G2048": "PPO, CartPole in JAX, 2048 environments",
    "W5": "DQN, CartPole, EnvPool, an update per 4 steps",
    "D10": "DQN, CartPole in JAX, an update per 10 steps",
    "W6p": "SAC, Pendulum, EnvPool, an update per step",
    "W6h": "SAC, HalfCheetah, EnvPool, an update per step",
    "tqc": "TQC, Pendulum, EnvPool, an update per step",
    "crossq": "CrossQ, Pendulum, EnvPool, an update per step",
    "droq": "DroQ, Pendulum, EnvPool, 20 updates per step",
    "simba": "SimBa, Pendulum, EnvPool, an update per step",
    "ars": "ARS, CartPole, EnvPool, 8 environments",
    "G4s": "PPO, CartPole in JAX, 4 environments, 16 seeds",
    "D10s": "DQN, CartPole in JAX, 10 environments, 16 seeds",
    "P64": "PQN, CartPole, EnvPool, 64 environments",
    "M1": "PPO, SimpleSpread in JAX, 16 environments",
    "M2": "PPO, 2 CartPoles with 2 policies, 8 environments",
    "M20": "PPO, 20 CartPoles with 20 policies, 8 environments",
    "M20s": "PPO, 20 CartPoles with 1 policy, 8 environments",
    **{f"offline-{name}": f"{name} from a data set" for name in OFFLINE},
}
PEERS = {
    "sb3": "Stable-Baselines3",
    "sb3_contrib": "SB3-contrib",
    "sbx": "SBX",
    "rejax": "Rejax",
    "rllib": "RLlib",
    "d3rlpy": "d3rlpy",
}
BESIDE = {"M20": "M20s", "G4s": "G64", "to475s": "to475"}  # works that are compared with another of ours


class Start(NamedTuple):
    """What is measured in seconds from the start of a process."""

    settings: list[str]  # config and overrides
    warm: bool = False  # programs are in the compile cache already
    until: float | None = 475.0  # the mean return that all seeds reach; None: the first row
    seeds: int | None = None
    spaces: tuple[str, ...] = ()  # of a sweep, whose process is waited for


STARTS = {
    "warm": Start(["configs/ppo.yaml", "run.report_every=1", "stop.env_steps=5000"], warm=True, until=None),
    "cold": Start(["configs/ppo.yaml"]),
    "cold-jax": Start(["configs/ppo.yaml", "env.backend=jax"]),
    # one run, 16 seeds, and 256 members with all that they write
    "to475": Start(_in_jax(4, 1_000_000), warm=True),
    "to475s": Start(_in_jax(4, 1_000_000), warm=True, seeds=16),
    "sweep": Start(_in_jax(4, 100_000), seeds=4, spaces=("algo.lr=log(1e-5,1e-1,64)",)),
}


def train(
    config: str,
    overrides: Iterable[str],
    *,
    cache: Path,
    keep_criteria: bool,
    seeds: int | None = None,
    spaces: tuple[str, ...] = (),
) -> tuple[float, list[list[dict]]]:
    """Runs the command that trains; returns the time of its start and the result rows of each seed or member."""
    out = Path(tempfile.mkdtemp())
    settings = [f"--set={o}" for o in (*overrides, *spaces)]
    if not keep_criteria:
        settings += [f"--set={o}" for o in without_criteria(config, overrides)]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
    settings += ["--seeds", str(seeds)] if seeds else []
    module = "jrl.sweep" if spaces else "jrl.train"
    command = [sys.executable, "-m", module, config, *settings, "--out", str(out / "run")]
    start = time.time()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    files = sorted(out.glob("run/members/*/result.jsonl")) if seeds else [out / "run" / "result.jsonl"]
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    shutil.rmtree(out)
    return start, rows


def without_criteria(config: str, overrides: Iterable[str]) -> list[str]:
    """Overrides by which a run ends with its budget alone."""
    return [f"stop.{name}=1e9" for name in load(config, overrides).stop if name not in ("env_steps", "updates")]


def steady_rate(rows: list[dict], skip: float = 0.3) -> float:
    """Environment steps per second from `skip` of the run to its end."""
    last = rows[-2]  # the last row may follow at once
    first = next(r for r in rows if r["env_steps"] >= skip * last["env_steps"])
    return (last["env_steps"] - first["env_steps"]) / (last["time_s"] - first["time_s"])


def measure(work: str, longer: float = 1.0) -> dict[str, Any]:
    """One run of a work, so many times as long: `steps_per_s`; or `seconds` for a start."""
    if work in WORKS:
        config, *overrides = WORKS[work]
        if longer != 1:
            budget = {name: x for name, x in load(config, overrides).stop.items() if name in ("env_steps", "updates")}
            overrides += [f"stop.{name}={round(longer * x)}" for name, x in budget.items()]
        with tempfile.TemporaryDirectory() as cache:
            _, of_all = train(config, overrides, cache=Path(cache), keep_criteria=False, seeds=SEEDS.get(work))
        rate, rows = sum(map(steady_rate, of_all)), of_all[0]
        first = next(r for r in rows if r["env_steps"] >= 0.3 * rows[-2]["env_steps"])
        per_step = (rows[-2]["updates"] - first["updates"]) / (rows[-2]["env_steps"] - first["env_steps"])
        return {"steps_per_s": round(rate), "updates_per_s": round(rate * per_step, 1)}
    return seconds(STARTS[work])


def seconds(work: Start) -> dict[str, Any]:
    """Seconds from the start of a process until all its runs are where they are measured; of a sweep until its end."""
    config, *overrides = work.settings
    with tempfile.TemporaryDirectory() as cache:
        asked = {"cache": Path(cache), "keep_criteria": not work.spaces, "seeds": work.seeds, "spaces": work.spaces}
        if work.warm:
            train(config, overrides, **asked)
        start, of_all = train(config, overrides, **asked)
    if work.spaces:
        return {"seconds": round(time.time() - start, 2), "members": len(of_all), "env_steps": total(of_all)}
    there = [row for rows in of_all if (row := reached(rows, work.until)) is not None]
    if len(there) < len(of_all):
        return {"error": f"{len(of_all) - len(there)} of {len(of_all)} runs did not reach {work.until}"}
    row = max(there, key=lambda row: row["timestamp"])
    return {
        "seconds": round(row["timestamp"] - start, 2),
        "env_steps": row["env_steps"],
        "return": row["episode/return"],
    }


def reached(rows: list[dict], until: float | None) -> dict | None:
    """The first row with such a return; None: there is none."""
    return next((row for row in rows if until is None or (row["episode/return"] or 0) >= until), None)


def total(of_all: list[list[dict]]) -> int:
    """Environment steps of all members."""
    return sum(rows[-1]["env_steps"] for rows in of_all)


def peer(command: str, index: int) -> dict[str, Any]:
    """One run of somebody else's program, which prints a JSON line."""
    done = subprocess.run(shlex.split(command.replace("{i}", str(index))), capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"error": done.stderr[-300:], "returncode": done.returncode}
    return json.loads(lines[-1])


def work_of(row: dict[str, Any]) -> str:
    """Our name of the work that a line is about: a peer tells it, or the algorithm, environments and seeds."""
    kinds = {"ppo-gymnax": "G", "dqn-gymnax": "D"}  # environments written in JAX
    if kind := kinds.get(row.get("work", "")):
        return f"{kind}{row.get('envs')}{'s' if row.get('seeds', 1) > 1 else ''}"
    return row["name"] if row["name"] in WORKS else row.get("work", row["name"])


def ratios(rows: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[float, list[float]]]:
    """(work, who else did it) -> the ratio of the medians of their steps per second, and of those of each round; of
    works that are measured in seconds that of the seconds."""
    found: dict[str, dict[str, dict[int, float]]] = {}  # work -> who -> round -> steps per second, or seconds
    for row in rows:
        if value := row.get("steps_per_s") or row.get("seconds"):
            found.setdefault(work_of(row), {}).setdefault(row.get("peer", "jrl"), {})[row["round"]] = value
    for work, other in BESIDE.items():
        if work in found and other in found:
            found[work][other] = found[other]["jrl"]
    made = {}
    for work, who in found.items():
        ours = who.pop("jrl", {})
        for name, theirs in who.items():
            if both := sorted(ours.keys() & theirs.keys()):
                median = lambda rate, both=both: statistics.median(rate[i] for i in both)
                made[work, name] = median(ours) / median(theirs), [ours[i] / theirs[i] for i in both]
    return made


def plot(rows: list[dict[str, Any]], png: Path) -> None:
    """Draws the median steps per second of each work as bars, with a line from the lowest to the highest round: jrl's
    and, where a command of `--beside` ran the same work, the peer's.
    """
    found: dict[str, dict[str, list[float]]] = {name: {} for name in WORKS}
    for row in rows:
        if (work := work_of(row)) in found and row.get("steps_per_s"):
            found[work].setdefault(row.get("peer", "jrl"), []).append(row["steps_per_s"])
    works = [w for w in found if found[w]]
    peers = sorted({p for w in works for p in found[w]}, key=lambda p: (p != "jrl", p))
    bars = [(work, name) for work in works for name in peers if name in found[work]]
    figure = plots.make_figure((10, 1.4 + 0.16 * len(works) + 0.22 * len(bars)))
    axes = figure.add_subplot()
    ticks: dict[str, list[float]] = {work: [] for work in works}
    at = 0.0
    for i, (work, name) in enumerate(bars):
        at += 1.0 if i and work == bars[i - 1][0] else 1.7  # the bars of a work lie side by side
        ticks[work].append(at)
        values = found[work][name]
        width, most = statistics.median(values), max(values)
        axes.barh(at, width, 0.9, color=f"C{peers.index(name)}", label=PEERS.get(name, name))
        if len(values) > 1:
            axes.plot([min(values), most], [at, at], color="0.2", linewidth=1.2)
        axes.annotate(f"{width:,.0f}", (most, at), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks([statistics.mean(ticks[work]) for work in works], [LABELS[work] for work in works], fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.1, y=0.01)
    axes.set_xlabel("environment steps per second, learning included (logarithmic)")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    labels = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))  # one entry per name
    figure.legend(labels.values(), labels.keys(), ncols=len(labels), loc="outside upper center", frameon=False)
    plots.save(figure, png)


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("works", nargs="*", metavar="WORK", help=f"of {', '.join([*WORKS, *STARTS])} (default: all)")
    p.add_argument("--repeat", type=int, default=3, help="rounds (default 3)")
    p.add_argument("--longer", type=float, default=1.0, help="times the steps of each work, for a fast machine")
    p.add_argument("--beside", type=Path, help="file of commands to run in the same rounds")
    p.add_argument("--out", type=Path, help="append the JSON lines here too")
    p.add_argument("--plot", type=Path, help="draw all rows of --out into this PNG (with --repeat 0: nothing else)")
    args = p.parse_args()
    if args.plot and not args.out:
        p.error("--plot draws the rows of --out: give that too")
    unknown = [w for w in args.works if w not in WORKS and w not in STARTS]
    if unknown:
        p.error(f"unknown works {unknown}: choose from {[*WORKS, *STARTS]}")
    lines = args.beside.read_text().splitlines() if args.beside else []
    peers = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[float]] = {}
    measured: list[dict[str, Any]] = []
    for index in range(1, args.repeat + 1):
        for name in [*(args.works or [*WORKS, *STARTS]), *peers]:
            ours = name in WORKS or name in STARTS
            row = {"name": name, "round": index, **(measure(name, args.longer) if ours else peer(name, index))}
            row["load1"] = round(os.getloadavg()[0], 2)
            print(json.dumps(row), flush=True)
            measured.append(row)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            value = row.get("steps_per_s", row.get("seconds"))
            if value is not None:
                found.setdefault(name, []).append(value)
    if args.plot:
        plot([json.loads(line) for line in args.out.read_text().splitlines()], args.plot)
    print("\n| work | median | lowest | highest |\n| --- | --- | --- | --- |")
    for name, values in found.items():
        print(f"| {name} | {statistics.median(values):,.6g} | {min(values):,.6g} | {max(values):,.6g} |")
    for (work, other), (ratio, each) in ratios(measured).items():
        print(f"\n{work} / {other}: {ratio:.2f} of the medians; by rounds {', '.join(f'{x:.2f}' for x in each)}")


if __name__ == "__main__":
    main()
