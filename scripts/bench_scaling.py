"""What do more devices bring? The same run on 1 .. N of them, in one process, round after round.

    python scripts/bench_scaling.py configs/ppo_atari.yaml                      # every accelerator of this machine
    python scripts/bench_scaling.py configs/ppo.yaml --fake 4                   # the CPU as four devices
    python scripts/bench_scaling.py configs/ppo.yaml --devices 1 2 8 --set env.backend=jax --out scaling.jsonl

One JSON line for each measurement and round, then a table of medians. What is measured:

    strong   the whole run, the batch of the config shared by all devices
    weak     the whole run, with the config's environments and batch on each device
    update   one update from a batch that lies on the devices: what mapping it over them costs
    collect  environment steps alone, where environments are stepped by EnvPool: one pool and one thread on each device,
             inside programs (`program`) and from the host (`host`)
    check    whether the parameters after 20 updates from the same batches are those of one device

On forced host devices (--fake) all devices share the same cores: there only `check` and the cost of `update` and of
`strong` beside one device mean something.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jrl import config
from jrl.errors import InputError

_UPDATES = 20  # of `check`

Measured = Callable[[float], dict[str, Any]]  # seconds -> a row


def with_devices(cfg: config.RunConfig, count: int, *, weak: bool = False, **rollout: Any) -> config.RunConfig:
    """`cfg` on the first `count` devices; weak: with `count` times as many environments, and as large a batch."""
    devices = dataclasses.replace(cfg.devices, learners=tuple(range(count)), actors=None)
    env, replay = cfg.env, cfg.replay
    if weak:
        env = dataclasses.replace(env, num_envs=env.num_envs * count)
        if replay is not None:
            every = replay.train_every and replay.train_every * count
            replay = dataclasses.replace(replay, batch_size=replay.batch_size * count, train_every=every)
            replay = dataclasses.replace(replay, updates_per_step=replay.updates_per_step / count)
    rollout = dataclasses.replace(cfg.rollout, **rollout)
    return dataclasses.replace(cfg, devices=devices, env=env, replay=replay, rollout=rollout)


def whole_run(cfg: config.RunConfig) -> Measured:
    """Environment steps per second of the run as it is trained, without result rows."""
    import jax

    from jrl.learn.program import train
    from jrl.metrics import episodes
    from jrl.metrics.timers import Timers
    from jrl.run import build

    timers = Timers()
    run = build.run(cfg, timers=timers)
    state = run.program.init(cfg.run.seed)
    infos = train(run.program, state, seed=cfg.run.seed, total_env_steps=10**15, timers=timers)
    for _ in range(4):  # compiles
        jax.block_until_ready(next(infos).metrics)

    def measure(seconds: float) -> dict[str, Any]:
        timers.drain()
        start, steps, calls = time.perf_counter(), 0, 0
        while time.perf_counter() < start + seconds:
            info = next(infos)
            steps, calls = steps + episodes.count_steps(info.episodes), calls + 1
        jax.block_until_ready(info.metrics)
        passed = time.perf_counter() - start
        stages = {name: round(spent / passed, 3) for name, spent in timers.drain().items() if spent}
        return {"steps_per_s": round(steps / passed), "calls": calls, "share": stages}

    return measure


def batches(cfg: config.RunConfig, count: int) -> Iterator[Any]:
    """The rollouts of the first so many iterations, as one device makes them while it learns."""
    import jax

    from jrl.learn import parallel
    from jrl.rollout import sources
    from jrl.run import build

    env = build.environment(dataclasses.replace(cfg, devices=config.DevicesConfig()), num_envs=cfg.env.num_envs)
    algo = build.algorithm(cfg, env.spec)
    length = config.Sizes(cfg).length
    source = sources.make(env, algo.act, key=jax.random.key(1), length=length, carry=algo.carry)
    state, learn = jax.device_put(jax.jit(algo.init)(jax.random.key(0)), jax.local_devices()[0]), jax.jit(algo.update)
    try:
        for i in range(count):
            rollout, _ = source.next(algo.actor(state), jax.random.key(i))
            yield parallel.deal([rollout], parallel.make_mesh(1))
            state, _ = learn(state, rollout, jax.random.key(i))
    finally:
        source.close()


def updates(cfg: config.RunConfig, devices: int, made: list[Any]) -> tuple[Callable[[int], Any], Any]:
    """A function that makes n updates and returns the parameters, and the algorithm's first parameters."""
    import jax

    from jrl.learn import parallel
    from jrl.run import build

    mesh = parallel.make_mesh(devices)
    env = build.environment(cfg, num_envs=1)
    algo = build.algorithm(cfg, env.spec, axis_name=parallel.AXIS)
    env.close()
    body = lambda state, rollout, key: algo.update(state, rollout, key)[0]
    specs = (parallel.REPLICATED, parallel.ROLLOUT, parallel.REPLICATED)
    update = parallel.pmap(body, mesh, specs, parallel.REPLICATED)
    first = parallel.replicate(jax.jit(algo.init)(jax.random.key(0)), mesh)
    dealt = [parallel.deal([rollout], mesh) for rollout in made]

    def run(count: int) -> Any:
        state = first
        for i in range(count):
            state = jax.block_until_ready(update(state, dealt[i % len(dealt)], jax.random.key(i)))
        return state.params

    return run, first.params


def update_alone(cfg: config.RunConfig, devices: int, made: list[Any]) -> Measured:
    run, _ = updates(cfg, devices, made)
    run(2)

    def measure(seconds: float) -> dict[str, Any]:
        start, count = time.perf_counter(), 0
        while time.perf_counter() < start + seconds:
            run(10)
            count += 10
        return {"updates_per_s": round(count / (time.perf_counter() - start), 2)}

    return measure


def collect_alone(cfg: config.RunConfig, collector: str) -> Measured:
    """Environment steps per second of one pool on each device, with the policy but without learning."""
    import jax

    from jrl.metrics import episodes
    from jrl.run import build_collect

    cfg = dataclasses.replace(cfg, rollout=dataclasses.replace(cfg.rollout, collector=collector))
    source, actor = build_collect.collector(cfg)
    source.next(actor, jax.random.key(0))

    def measure(seconds: float) -> dict[str, Any]:
        start, steps, pending = time.perf_counter(), 0, []
        while time.perf_counter() < start + seconds:
            rollout, report = source.next(actor, jax.random.key(len(pending)))
            jax.block_until_ready(rollout)
            steps += episodes.count_steps(report)
        return {"steps_per_s": round(steps / (time.perf_counter() - start))}

    return measure


def check(cfg: config.RunConfig, devices: int, made: list[Any]) -> dict[str, Any]:
    """The largest difference of a parameter after 20 updates, and whether all devices hold the same.

    Rounding makes differences of 1e-6; a loss with an edge, such as PPO's clip, can make more where a row falls on
    the other side of it.
    """
    import jax
    import numpy as np

    one, many = updates(cfg, 1, made)[0](_UPDATES), updates(cfg, devices, made)[0](_UPDATES)
    leaves = list(zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True))
    apart = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in leaves)
    shards = lambda x: [np.asarray(s.data) for s in x.addressable_shards]
    same = all((shard == shards(b)[0]).all() for _, b in leaves for shard in shards(b))
    return {"largest_difference": apart, "replicas_identical": bool(same)}


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("config", help="YAML file")
    p.add_argument("--set", action="append", default=[], metavar="a.b=v", dest="overrides")
    p.add_argument("--devices", type=int, nargs="+", help="numbers of devices (default: 1, 2, 4 .. all)")
    p.add_argument("--fake", type=int, help="the CPU as so many devices")
    what = ("check", "update", "strong", "weak", "collect")
    p.add_argument("--what", nargs="+", choices=what, default=list(what))
    p.add_argument("--seconds", type=float, default=3.0, help="of each measurement (default 3)")
    p.add_argument("--repeat", type=int, default=3, help="rounds (default 3)")
    p.add_argument("--out", type=Path, help="append the JSON lines here too")
    args = p.parse_args()
    try:
        return measure_all(args)
    except InputError as e:
        print(*(f"error: {line}" for line in e.errors), sep="\n", file=sys.stderr)
        return 2


def measure_all(args: argparse.Namespace) -> int:
    fake = [f"devices.fake={args.fake}"] if args.fake else []
    cfg = config.load(args.config, [*args.overrides, *fake])
    from jrl import envs
    from jrl.learn import parallel

    there = parallel.devices(fake=args.fake).learners.devices.size
    counts = args.devices or [n for n in (2**i for i in range(10)) if n <= there]
    for count in counts:
        parallel.devices(learners=range(count), fake=args.fake)  # says so if there are fewer
    works: dict[tuple[str, int, str], Measured] = {}
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        row["load1"] = round(os.getloadavg()[0], 2)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    on_policy = cfg.replay is None
    made = list(batches(cfg, _UPDATES)) if on_policy and {"check", "update"} & set(args.what) else []
    pooled = envs.resolve(cfg.env.id, cfg.env.backend) == "envpool"
    for count in counts:
        shared = with_devices(cfg, count)
        if "check" in args.what and on_policy and count > 1:
            note({"what": "check", "devices": count, **check(shared, count, made)})
        if "update" in args.what and on_policy:
            works["update", count, ""] = update_alone(shared, count, made)
        if "strong" in args.what:
            works["strong", count, ""] = whole_run(shared)
        if "weak" in args.what and count > 1:
            works["weak", count, ""] = whole_run(with_devices(cfg, count, weak=True))
        if "collect" in args.what and pooled:
            for collector, how in (("auto", "program"), ("host", "host")):
                works["collect", count, how] = collect_alone(with_devices(cfg, count, weak=True), collector)
    for index in range(1, args.repeat + 1):
        for (what, count, how), measure in works.items():
            kind = {"how": how} if how else {}
            note({"what": what, "devices": count, **kind, "round": index, **measure(args.seconds)})
    table(rows)
    return 0


def table(rows: list[dict[str, Any]]) -> None:
    """Medians, and each beside that of one device."""
    found: dict[tuple[str, str, int], list[float]] = {}
    for row in rows:
        rate = row.get("steps_per_s", row.get("updates_per_s"))
        if rate is not None:
            found.setdefault((row["what"], row.get("how", ""), row["devices"]), []).append(rate)
    print("\n| what | devices | median per second | beside one device |\n| --- | --- | --- | --- |")
    for (what, how, count), rates in sorted(found.items()):
        base = found.get(("strong" if what == "weak" else what, how, 1))
        beside = f"{statistics.median(rates) / statistics.median(base):.2f}" if base else ""
        print(f"| {what} {how} | {count} | {statistics.median(rates):,.6g} | {beside} |")


if __name__ == "__main__":
    sys.exit(main())
