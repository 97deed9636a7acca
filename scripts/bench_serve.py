"""How fast does the server answer? Works of fixed time, one JSON line each, on loopback.

    python scripts/bench_serve.py                                   # every work
    python scripts/bench_serve.py latency --clients 16 --seconds 10
    python scripts/bench_serve.py batched --episodes 64
    python scripts/bench_serve.py policies --connections 64
    python scripts/bench_serve.py one --seconds 45 --rllib PYTHON   # and RLlib's example, by an interpreter that has it

`latency`: get_action of so many clients, each over a connection of its own, while PPO learns from what they play;
milliseconds of its median and 99th percentile, and of the longest; of these the time until the policy's call began, and
that of a call; and the same of a server that does not learn, beside it. `batched`: environment steps per second of a
client that plays so many episodes in one request, while PPO learns; `local`: the same of one that acts by itself, and
the share of its steps that the learner got. `policies`: requests per second of `--no-learn`, an MLP.
Clients are one process, which plays no real environment: observations are random, episodes have 200 steps.
`one`: environment steps per second of one client with one CartPole, a step at a time, where the server acts and where
the client does, while PPO learns with the sizes of RLlib's example of an external environment; with `--rllib` that
example, too (scripts/rllib_external.py), in the same run.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from jrl.serve.client import PolicyClient

_PPO = [
    "ppo", "--set=external.observation={box: [4]}", "--set=external.action={discrete: 2}", "--set=rollout.length=128",
    "--set=network.hidden=[64, 64]", "--set=run.report_every=10000", "--stop=env_steps=100000000",
    "--set=stop.episode/return=1e9",
]  # fmt: skip
# PPO's sizes there: two layers of 256, 4,000 steps, 10 passes over minibatches of about 128
_AS_RLLIB = [
    "--set=network.hidden=[256, 256]", "--set=env.num_envs=1", "--set=rollout.length=4000", "--set=algo.num_epochs=10",
    "--set=algo.num_minibatches=32", "--set=run.report_every=4000",
]  # fmt: skip
_LENGTH = 200  # steps of an episode
_SKIPPED = 0.3  # share of the time that is not counted: compilation, and the first rollouts


class Server:
    """`python -m jrl.serve` in a process of its own."""

    def __init__(self, *args: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jrl.serve", *args, "--port=0"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = next(line for line in self._process.stdout if line.startswith("clients: "))
        self.address = line.split()[1]

    def close(self, *, gently: bool = False) -> None:
        (self._process.terminate if gently else self._process.kill)()
        self._process.wait()


async def request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, fields: Any) -> Any:
    """The answer to one request over a connection that stays open."""
    body = json.dumps(fields).encode()
    writer.write(f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
    found = json.loads(await reader.readexactly(size))
    assert b" 20" in head.split(b"\r\n", 1)[0], found
    return found


async def play(address: str, begin: float, end: float, found: list[float]) -> None:
    """Plays until `end`; `found` gets the seconds of each get_action from `begin` on."""
    parts = urllib.parse.urlsplit(address)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    obs = [0.1, 0.2, 0.3, 0.4]
    while time.perf_counter() < end:
        episode = (await request(reader, writer, "/v1/episodes", {}))["episode_id"]
        for _ in range(_LENGTH):
            start = time.perf_counter()
            await request(reader, writer, f"/v1/episodes/{episode}/action", {"observation": obs, "reward": 1.0})
            now = time.perf_counter()
            if start > begin:
                found.append(now - start)
            if now > end:
                break
        await request(reader, writer, f"/v1/episodes/{episode}/end", {"observation": obs, "reward": 1.0})
    writer.close()


async def ask(address: str, begin: float, end: float, found: list[float]) -> None:
    """Asks for actions without an episode; else as `play`."""
    parts = urllib.parse.urlsplit(address)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    while (start := time.perf_counter()) < end:
        await request(reader, writer, "/v1/action", {"observation": [0.1, 0.2, 0.3, 0.4]})
        if start > begin:
            found.append(time.perf_counter() - start)
    writer.close()


def beside(one: Any, address: str, count: int, seconds: float) -> dict[str, float]:
    """The milliseconds and the rate of `count` connections."""
    found: list[float] = []
    begin = time.perf_counter() + _SKIPPED * seconds
    end = begin + (1 - _SKIPPED) * seconds

    async def all_of_them() -> None:
        await asyncio.gather(*(one(address, begin, end, found) for _ in range(count)))

    asyncio.run(all_of_them())
    p50, p99 = np.percentile(found, [50, 99]) * 1e3
    rate = len(found) / ((1 - _SKIPPED) * seconds)
    return {"p50_ms": p50, "p99_ms": p99, "longest_ms": max(found) * 1e3, "requests_per_s": rate}


def latency(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    learning = f"--set=env.num_envs={args.clients}", f"--out={out}"
    found = {}
    for name, settings in (("", (*_PPO, *learning)), ("idle_", (str(out), "--no-learn"))):
        server = Server(*settings)
        try:
            beside(play, server.address, args.clients, _SKIPPED * args.seconds)  # compilation
            before = histograms(server.address)
            each = beside(play, server.address, args.clients, args.seconds)
            each |= longest(before, histograms(server.address))
        finally:
            server.close(gently=not name)  # the second serves what the first has saved
        found |= {f"{name}{key}": value for key, value in each.items()}
    rows = [json.loads(line) for line in (out / "result.jsonl").read_text().splitlines()]
    return {"clients": args.clients, **found, "rows": len(rows), "updates": rows[-1]["updates"] if rows else 0}


def histograms(address: str) -> dict[str, dict[float, int]]:
    """Of what /metrics tells of the waits for the policy's calls, and of the calls: bound -> how many are below it."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for name in ("wait", "inference"):
        buckets = [line for line in lines if line.startswith(f"jrl_{name}_seconds_bucket")]
        found[name] = {float(line.split('le="')[1].split('"')[0]): int(line.split()[-1]) for line in buckets}
    return found


def longest(before: dict[str, dict[float, int]], after: dict[str, dict[float, int]]) -> dict[str, float]:
    """Milliseconds that all of them took at most, and all but one in a thousand: bounds of the histograms."""
    found = {}
    for name in before:
        counts = {bound: count - before[name][bound] for bound, count in after[name].items()}
        for share, key in ((0.999, "p999"), (1.0, "longest")):
            bound = next(b for b, count in counts.items() if count >= share * counts[float("inf")])
            found[f"{name}_{key}_ms"] = bound * 1e3
    return found


def batched(args: argparse.Namespace, out: Path, mode: str = "remote") -> dict[str, Any]:
    server = Server(*_PPO, f"--set=env.num_envs={args.episodes}", f"--out={out}")
    try:
        client, count = PolicyClient(server.address, inference_mode=mode), args.episodes
        ids, obs = client.start_episodes(count), np.zeros((count, 4), np.float32)
        steps, rng = 0, np.random.default_rng(0)
        begin = time.perf_counter() + _SKIPPED * args.seconds
        end = begin + (1 - _SKIPPED) * args.seconds
        while (now := time.perf_counter()) < end:
            over = rng.random(count) < 1 / _LENGTH
            ids = client.steps(ids, obs, np.ones(count), terminated=over, final_observations=obs).episodes
            steps += count if now > begin else 0
    finally:
        server.close()
    return {"episodes": count, "steps_per_s": steps / ((1 - _SKIPPED) * args.seconds)}


def local(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    found = batched(args, out, "local")
    rows = [json.loads(line) for line in (out / "result.jsonl").read_text().splitlines()]
    learned, dropped = (rows[-1][name] if rows else 0 for name in ("env_steps", "external/dropped"))
    return {**found, "learned": learned / max(1, learned + dropped)}


def policies(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    train = [
        "ppo",
        "--env=CartPole-v1",
        "--set=env.backend=jax",
        "--set=network.hidden=[64, 64]",
        "--stop=env_steps=1024",
    ]
    subprocess.run([sys.executable, "-m", "jrl.train", *train, f"--out={out}"], check=True, stdout=subprocess.DEVNULL)
    server = Server(str(out), "--no-learn")
    try:
        return {"connections": args.connections, **beside(ask, server.address, args.connections, args.seconds)}
    finally:
        server.close()


def one(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in ("remote", "local"):
        server = Server(*_PPO, *_AS_RLLIB, f"--out={out / mode}")
        try:
            found[f"{mode}_steps_per_s"] = cartpole(server.address, mode, args.seconds)
        finally:
            server.close()
        rows = [json.loads(line) for line in (out / mode / "result.jsonl").read_text().splitlines()]
        returns = [x for row in rows if (x := row.get("episode/return", np.nan)) == x]
        found[f"{mode}_return"] = returns[-1] if returns else None
    if args.rllib:
        command = [args.rllib, str(Path(__file__).with_name("rllib_external.py")), f"--seconds={args.seconds}"]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        theirs = json.loads(told)
        found |= {"rllib": theirs["version"], "rllib_steps_per_s": theirs["steps_per_s"]}
        found["rllib_return"] = theirs["return"]
    return found


def cartpole(address: str, mode: str, seconds: float) -> float:
    """Steps per second of one CartPole that is played a step at a time."""
    client, env = PolicyClient(address, inference_mode=mode), gymnasium.make("CartPole-v1")
    begin = time.perf_counter() + _SKIPPED * seconds
    end, steps = begin + (1 - _SKIPPED) * seconds, 0
    while (now := time.perf_counter()) < end:
        episode, (obs, _), over = client.start_episode(), env.reset(), False
        while not over and now < end:
            obs, reward, terminated, truncated, _ = env.step(int(client.get_action(episode, obs)))
            client.log_returns(episode, float(reward))
            over, now = terminated or truncated, time.perf_counter()
            steps += now > begin
        client.end_episode(episode, obs, truncated=not terminated)
    return steps / ((1 - _SKIPPED) * seconds)


WORKS = {"latency": latency, "batched": batched, "local": local, "policies": policies, "one": one}


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("works", nargs="*", metavar="WORK", help=f"of {', '.join(WORKS)}; none: all")
    p.add_argument("--clients", type=int, default=16)
    p.add_argument("--episodes", type=int, default=64)
    p.add_argument("--connections", type=int, default=64)
    p.add_argument("--seconds", type=float, default=15.0)
    p.add_argument("--rllib", metavar="PYTHON", help="of `one`: an interpreter that has ray[rllib] and torch")
    args = p.parse_args()
    for name in args.works or WORKS:
        with tempfile.TemporaryDirectory() as made:
            found = WORKS[name](args, Path(made) / "run")
        print(json.dumps({"work": name, **{k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}}))


if __name__ == "__main__":
    main()
