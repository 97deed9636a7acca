"""Speed on one GPU, as one table within `--minutes`: rows in the order of their value, peers measured beside them.

    python scripts/on_gpu.py --out OUT                                      # all rows, 12 minutes
    python scripts/on_gpu.py --out OUT --rows ppo-2048 ppo-16384 --profile
    python scripts/on_gpu.py --out OUT --scale 0.01                         # on a CPU: does every row run?

Each row trains by `python -m jrl.train` in a process of its own. The window of `--seconds` begins after the first
result row with updates, so start-up and compilation are outside of it. Then a peer runs, if it is installed
(`scripts/peers.py`). A measurement ends at its deadline, and its row has the reason; the next row goes on.

OUT/results.jsonl has a line per row with settings, versions and card, OUT/table.md the table. `--profile` adds
OUT/ROW.tar.gz, a trace of `jax.profiler` after the window (`tensorboard --logdir` reads the unpacked folder).
"""

import argparse
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from bench_speed import WORKS, without_criteria
from peers import list_versions

from jrl.callbacks import Callbacks

HERE = Path(__file__).parent
TRACE = "JRL_BENCH_TRACE"  # environment variable: folder of a trace
STARTS_TRACE = "start"  # file in this folder: trace from the next result to the one after it
LEANRL = "LeanRL with compile and cudagraphs, H100 (meta-pytorch/LeanRL)"


class Row(NamedTuple):
    """A line of the table."""

    title: str
    settings: list[str]  # config and overrides
    target: float  # steps per second that jrl should reach
    envs: int | None = None  # environments, which --scale multiplies; None: as in the settings
    peer: tuple[str, str] | None = None  # arguments of peers.py before the number of environments
    ratio: float | None = None  # target of our rate over the peer's
    published: str = ""
    unit: str = "steps/s"
    frames: int = 1  # numbers of the unit per environment step
    needs: tuple[str, ...] = ()  # packages beyond the base install


_CHEETAH = ["env.id=HalfCheetah-v4", "env.num_envs=1"]
_OFF_POLICY = [
    "network.hidden=[256, 256]",
    "network.activation=relu",
    "replay.capacity=1000000",
    "replay.batch_size=256",
    "replay.learning_starts=1000",  # CleanRL: 5,000 and 25,000; the rate is that of learning steps in both
    "algo.exploration.random_timesteps=1000",
    "evaluation.every=1000000000",
]
_CRAFTAX = [
    "configs/ppo.yaml",
    "env.id=craftax:Craftax-Classic-Symbolic-v1",
    "algo.lr=2e-4",
    "algo.gamma=0.99",
    "algo.gae_lambda=0.8",
    "algo.ent_coef=0.01",
    "algo.num_minibatches=8",
    "algo.max_grad_norm=1.0",
    "network.hidden=[512, 512, 512]",
    "rollout.length=64",
]
_PLAYGROUND = [
    "configs/ppo.yaml",
    "env.id=playground:CartpoleBalance",
    "env.reset=first",
    "env.reward_scale=10",
    "algo.lr=1e-3",
    "algo.gamma=0.995",
    "algo.gae_lambda=0.95",
    "algo.clip_eps=0.3",
    "algo.ent_coef=1e-2",
    "algo.normalize_obs=true",
    "algo.num_epochs=16",
    "algo.num_minibatches=32",
    "network.hidden=[32, 32, 32, 32]",
    "network.critic_hidden=[256, 256, 256, 256, 256]",
    "network.activation=silu",
    "rollout.length=480",  # 16 unrolls of 30 steps
]

ROWS: dict[str, Row] = {
    "leanrl-ppo-atari": Row(
        "PPO, Atari Breakout, 8 environments, CleanRL's settings",
        ["configs/ppo_atari.yaml", "env.id=Breakout-v5", "algo.value_clip_eps=0.1"],
        target=10_000,
        published=f"6,809: {LEANRL}",
    ),
    "leanrl-ppo": Row(
        "PPO, HalfCheetah-v4, 1 environment, CleanRL's settings",
        ["configs/ppo_mujoco.yaml", *_CHEETAH, "rollout.length=2048", "algo.value_clip_eps=0.2"],
        target=12_000,
        published=f"1,774: {LEANRL}",
    ),
    "leanrl-sac": Row(
        "SAC, HalfCheetah-v4, 1 environment, CleanRL's settings",
        ["configs/sac_mujoco.yaml", *_CHEETAH, *_OFF_POLICY, "algo.lr=1e-3", "algo.actor_lr=3e-4"],
        target=2_200,
        published=f"725: {LEANRL}",
    ),
    "leanrl-td3": Row(
        "TD3, HalfCheetah-v4, 1 environment, CleanRL's settings",
        ["configs/td3.yaml", *_CHEETAH, *_OFF_POLICY, "algo.lr=3e-4"],
        target=2_500,
        published=f"936: {LEANRL}",
    ),
    "ppo-2048": Row(
        "PPO, CartPole in JAX, 2,048 environments",
        WORKS["G2048"],
        target=60e6,
        envs=2048,
        peer=("rejax", "ppo"),
        ratio=1.5,
        published="33.1M (1.38 of Rejax): jrl, H100, 2026-11-26",
    ),
    "ppo-16384": Row(
        "PPO, CartPole in JAX, 16,384 environments",
        WORKS["G2048"],
        target=60e6,
        envs=16384,
        peer=("rejax", "ppo"),
        ratio=1.5,
    ),
    "pong": Row(
        "PPO, Pong through EnvPool, 128 environments, asynchronous; peer: EnvPool alone",
        ["configs/ppo_atari.yaml", "rollout.mode=async", "devices.actors=[0, 0]"],
        target=100_000,
        envs=128,
        peer=("envpool", "Pong-v5"),
        ratio=0.9,
        published="PQN 55.6k (A40, 32 cores, purejaxql README), Cleanba 24.6k (A100, 10 cores)",
        unit="frames/s",
        frames=4,
    ),
    "sac-jax": Row(
        "SAC, Pendulum in JAX, 1 environment, an update per step",
        [*WORKS["W6p"], "env.backend=jax"],
        target=6_100,
        envs=1,
        peer=("rejax", "sac"),
        ratio=1.2,
        published="0.92 of Rejax: jrl, H100, 2026-11-26",
    ),
    "dqn-jax": Row(
        "DQN, CartPole in JAX, 10 environments, an update per 10 steps",
        WORKS["D10"],
        target=78_000,
        envs=10,
        peer=("rejax", "dqn"),
        ratio=1.2,
        published="1.19 of Rejax: jrl, H100, 2026-11-26",
    ),
    "craftax": Row(
        "PPO, Craftax-Classic-Symbolic, 1,024 environments, Craftax_Baselines' settings",
        _CRAFTAX,
        target=500_000,
        envs=1024,
        peer=("craftax", ""),
        ratio=1.2,
        published="278k: one GPU (arXiv:2402.16801)",
        needs=("craftax",),
    ),
    "playground": Row(
        "PPO, playground CartpoleBalance, 2,048 environments, playground's settings",
        _PLAYGROUND,
        target=100_000,
        envs=2048,
        peer=("brax", "CartpoleBalance"),
        ratio=1.1,
        needs=("mujoco_playground",),
    ),
}
EXTRAS = {  # module -> how to install it, and the rows that need it
    "craftax": "pip install 'jrl[suites]'  # craftax",
    "mujoco_playground": "pip install 'jrl[suites]'  # playground",
    # distrax, which Rejax and Craftax_Baselines import, fails on jax 0.10 with the released tensorflow-probability
    "rejax": "pip install rejax==0.1.3 gymnax==0.0.9 six tfp-nightly  # Rejax beside ppo-*, sac-jax, dqn-jax",
    "brax": "pip install playground brax 'jax<0.10'  # beside playground, from its own --peer-python",
    "distrax": "pip install distrax wandb tfp-nightly  # beside craftax, with --craftax-baselines CLONE "
    "of https://github.com/MichaelTMatthews/Craftax_Baselines",
}


class Trace(Callbacks):
    """Traces one call of the program once the file `STARTS_TRACE` is there."""

    folder: Path | None = None

    def on_train_result(self, *, algorithm, result, **kwargs) -> None:
        import jax

        if self.folder is not None:
            jax.profiler.stop_trace()
            (self.folder / STARTS_TRACE).unlink()
            self.folder = None
        elif (folder := Path(os.environ[TRACE])).joinpath(STARTS_TRACE).exists():
            self.folder = folder
            jax.profiler.start_trace(str(folder))


@contextlib.contextmanager
def process(command: list[str], **how: Any) -> Iterator[subprocess.Popen]:
    """Runs a command from the repository's root, and ends it and its children with the block."""
    started = subprocess.Popen(command, cwd=HERE.parent, start_new_session=True, text=True, **how)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # at once: a checkpoint of its replay buffer would take seconds
        started.wait()


def measure(row: Row, seconds: float, scale: float, end: float, trace: Path | None) -> dict[str, Any]:
    """Trains until `seconds` after the first result row with updates.

    Args:
      end: time of `time.monotonic` at which the training is stopped.
      trace: empty folder for a trace; None: no trace.
    Returns:
      `steps_per_s`, `updates_per_s`, `return` and `env_steps`, or `error`.
    """
    config, *overrides = row.settings
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "stderr", "w+") as stderr:
        settings = [*overrides, *run_settings(row, scale), "run.log=[jsonl]"]
        traced = [] if trace is None else ["--set=custom.callbacks=[on_gpu:Trace]"]
        command = [sys.executable, "-m", "jrl.train", config, *(f"--set={o}" for o in settings), *traced]
        command += ["--out", f"{folder}/run"]
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, TRACE: str(trace or ""), "PYTHONPATH": path}
        with process(command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment) as training:
            rows: list[dict[str, Any]] = []
            while training.poll() is None and time.monotonic() < end:
                time.sleep(0.2)
                rows = [r for r in read_rows(Path(folder) / "run" / "result.jsonl") if r["updates"]]
                if rows and rows[-1]["time_s"] - rows[0]["time_s"] >= seconds:
                    break
            if trace is not None and len(rows) > 1:
                wait_for_trace(trace, training, end)
            failed = training.poll() is not None
        if len(rows) < 2:
            stderr.seek(0)
            return {"error": stderr.read().strip()[-300:] if failed else f"{len(rows)} result rows at the deadline"}
    span = {name: rows[-1][name] - rows[0][name] for name in ("env_steps", "updates", "time_s")}
    return {
        "steps_per_s": round(span["env_steps"] / span["time_s"], 1),
        "updates_per_s": round(span["updates"] / span["time_s"], 1),
        "return": rows[-1].get("episode/return"),
        "env_steps": rows[-1]["env_steps"],
    }


def run_settings(row: Row, scale: float) -> list[str]:
    """Returns overrides behind those of the row: its size, a result row about each second, and a run without an end."""
    config, *overrides = row.settings
    settings = without_criteria(str(HERE.parent / config), overrides)
    if row.envs is not None:
        settings.append(f"env.num_envs={scaled(row.envs, scale)}")
    if "craftax" in row.needs:
        settings.append(f"env.reset=shared({max(1, scaled(row.envs or 1, scale) // 16)})")  # as its optimistic resets
    return [
        *settings,
        "stop.env_steps=1000000000000",
        f"run.report_every={max(1, round(row.target / row.frames * scale))}",
    ]


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Returns the complete result rows of a run that goes on."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for_trace(folder: Path, training: subprocess.Popen, end: float) -> None:
    (folder / STARTS_TRACE).touch()
    while (folder / STARTS_TRACE).exists() and training.poll() is None and time.monotonic() < end:
        time.sleep(0.2)


def measure_peer(row: Row, seconds: float, args: argparse.Namespace, end: float) -> dict[str, Any]:
    """Returns the JSON line of `peers.py`, or `error`."""
    assert row.peer is not None
    kind, work = row.peer
    if kind == "craftax" and args.craftax_baselines is None:
        return {"error": "--craftax-baselines FOLDER was not given"}
    work = work or str(args.craftax_baselines.resolve())
    command = [kind, work, str(scaled(row.envs or 1, args.scale)), f"--seconds={seconds}", f"--scale={args.scale}"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with process([args.peer_python, str(HERE / "peers.py"), *command], **how) as peer:
        try:
            out, err = peer.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return {"error": "stopped at its deadline"}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": err.strip()[-300:]}


def scaled(envs: int, scale: float) -> int:
    return envs if envs <= 16 else max(4, round(envs * scale))


def card() -> str:
    """Returns the name of the GPU, or of the machine."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().replace("\n", ", ")
    return "no GPU"


def run_row(name: str, args: argparse.Namespace, end: float) -> dict[str, Any]:
    """Measures a row and its peer, each until its deadline or `end`; returns the line of results.jsonl."""
    row = ROWS[name]
    line: dict[str, Any] = {"row": name, **row._asdict(), "card": card(), "versions": list_versions()}
    seconds = max(2.0, args.seconds * args.scale)
    stop = lambda: min(end, time.monotonic() + args.deadline)
    if packages := missing(row):
        return {**line, "ours": {"error": f"{', '.join(packages)} is not installed"}}
    with tempfile.TemporaryDirectory() as trace:
        line["ours"] = measure(row, seconds, args.scale, stop(), Path(trace) if args.profile else None)
        if args.profile and any(Path(trace).iterdir()):
            shutil.make_archive(str(args.out / name), "gztar", trace)
    if row.peer is not None:
        line["theirs"] = measure_peer(row, seconds, args, stop())
    return line


def warm_up(names: list[str], args: argparse.Namespace, end: float) -> None:
    """Compiles the programs of all rows and peers at once, into the cache that the measurements read."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(args.out / "programs"))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    here = [ROWS[name] for name in names if not missing(ROWS[name])]
    sharing = mock.patch.dict(os.environ, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    with sharing, concurrent.futures.ThreadPoolExecutor(2 * len(here) + 1) as pool:
        for row in here:
            pool.submit(measure, row, 0.0, args.scale, end, None)
            if row.peer is not None and row.peer[0] != "envpool":
                pool.submit(measure_peer, row, 0.0, args, end)


def missing(row: Row) -> list[str]:
    return [package for package in row.needs if importlib.util.find_spec(package) is None]


def format_table(lines: list[dict[str, Any]], skipped: list[str]) -> str:
    """Returns the results in Markdown; rates are in the row's unit."""
    text = ["| row | jrl | peer, same call | ratio | target | published |", "| --- | --- | --- | --- | --- | --- |"]
    for line in lines:
        row = ROWS[line["row"]]
        ours, theirs = (line.get(who, {}).get("steps_per_s") for who in ("ours", "theirs"))
        show = lambda rate, row=row: "" if rate is None else f"{rate * row.frames:,.0f} {row.unit}"
        fault = lambda who, line=line: short(line.get(who, {}).get("error", ""))
        target = f"{row.target:,.0f}" + (f", {row.ratio} x" if row.ratio else "")
        peer = "" if row.peer is None else f"{row.peer[0]}: {show(theirs) or fault('theirs')}"
        ratio = f"{ours / theirs:.2f}" if ours and theirs else ""
        text.append(f"| {row.title} | {show(ours) or fault('ours')} | {peer} | {ratio} | {target} | {row.published} |")
    text += [f"| {ROWS[name].title} | not measured: no time left | | | | |" for name in skipped]
    if lines:
        versions = ", ".join(f"{name} {version}" for name, version in lines[0]["versions"].items())
        text += ["", f"{lines[0]['card']}, {os.cpu_count()} CPU cores; Python {sys.version.split()[0]}, {versions}"]
    return "\n".join(text)


def short(error: str) -> str:
    """Returns the last line of an error, as a cell of a table."""
    return error.strip().splitlines()[-1][-120:].replace("|", "/") if error.strip() else ""


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("--out", type=Path, required=True, help="folder of results.jsonl, table.md and traces")
    p.add_argument("--rows", nargs="*", choices=ROWS, help=f"of {', '.join(ROWS)} (default: all, in this order)")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further override of all rows")
    p.add_argument("--minutes", type=float, default=12.0, help="time for all rows (default 12)")
    p.add_argument("--seconds", type=float, default=12.0, help="measured window of each program (default 12)")
    p.add_argument("--deadline", type=float, default=150.0, help="most seconds of a program (default 150)")
    p.add_argument("--warm", type=float, default=0.0, help="seconds for compiling all rows at once, before the first")
    p.add_argument("--scale", type=float, default=1.0, help="factor of environments and window, to try the rows")
    p.add_argument("--profile", action="store_true", help="add a trace of each row")
    p.add_argument("--peer-python", default=sys.executable, help="interpreter with the peers (default: this one)")
    p.add_argument("--craftax-baselines", type=Path, help="clone of Craftax_Baselines")
    args = p.parse_args()
    start = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    print("Base: `make train`'s environment, and on a GPU pip install 'jrl[cuda]'. Not installed here:")
    print("\n".join(f"  {how}" for module, how in EXTRAS.items() if importlib.util.find_spec(module) is None) or "  -")
    names, lines, skipped = args.rows or list(ROWS), [], []
    for name in names:
        ROWS[name].settings.extend(args.set)
    if args.warm:
        warm_up(names, args, start + args.warm)
        print(f"compiled: {time.monotonic() - start:.0f} s", flush=True)
    for name in names:
        left = 60 * args.minutes - (time.monotonic() - start)
        if left < 20:
            skipped.append(name)
            continue
        try:
            line = run_row(name, args, start + 60 * args.minutes)
        except Exception as e:  # the next rows go on
            line = {"row": name, "card": card(), "versions": list_versions(), "ours": {"error": f"{e!r}"}}
        with (args.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{name}: {json.dumps({who: line[who] for who in ('ours', 'theirs') if who in line})}", flush=True)
        lines.append(line)
    table = format_table(lines, skipped)
    (args.out / "table.md").write_text(table + "\n")
    print(f"\n{table}\n{(time.monotonic() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
