"""Works that learn from data alone, on 100,000 random transitions; as a program, their bare update in a loop.

    python scripts/random_data.py iql [--updates 1500] [--batch 256]

Observations have the sizes of Pendulum's, or of CartPole's where actions are discrete, episodes 200 steps, networks
256 x 256. The program prints one JSON line for `scripts/bench_speed.py --beside`: the updates per second of the
algorithm's pure `update` in one compiled loop over batches that were drawn before, and `run`, the share of them that
the program of a run makes, sampling, metrics and the look at what is not finite included: the median of pairs, in turn.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_STEPS, _LENGTH = 100_000, 200
_PARTS = 9
# name -> (the algorithm's flags, updates of the work)
OFFLINE: dict[str, tuple[str, int]] = {
    "bc": ("name: bc", 40_000),
    "td3bc": ("name: td3, bc_alpha: 2.5", 20_000),
    "iql": ("name: iql", 20_000),
    "cql": ("name: sac, conservative: true", 2_000),
    "dcql": ("name: dqn, conservative: true, double: true", 20_000),
}


def from_data(flags: str, updates: int) -> list[str]:
    """The config and overrides of a work for `scripts/bench_speed.py`."""
    made = "of_choices" if "dqn" in flags else "of_numbers"
    return [
        str(Path(__file__).parent / "random_data.yaml"), f"algo={{{flags}}}",
        f"data.input=scripts.random_data:{made}", f"stop.updates={updates}",
    ]  # fmt: skip


def of_numbers() -> Any:
    """Random transitions of Pendulum's sizes: observations [3], actions [1] in [-1, 1]."""
    from jrl.types import Box

    return _random(3, Box((1,), "float32", -1.0, 1.0))


def of_choices() -> Any:
    """Random transitions of CartPole's sizes: observations [4], two actions."""
    from jrl.types import Discrete

    return _random(4, Discrete(2))


def _random(size: int, action: Any) -> Any:
    from jrl import data
    from jrl.types import Box

    rng = np.random.default_rng(0)

    def episode() -> data.Episode:
        obs = rng.normal(size=(_LENGTH + 1, size)).astype(np.float32)
        numbers = rng.uniform(-1, 1, (_LENGTH, 1)).astype(np.float32)
        choices = rng.integers(0, 2, _LENGTH).astype(np.int32)
        taken = numbers if isinstance(action, Box) else choices
        return data.Episode(obs, taken, rng.normal(size=_LENGTH).astype(np.float32), False, True)

    return data.of_episodes(Box((size,)), action, [episode() for _ in range(_STEPS // _LENGTH)])


def main() -> None:
    import jax
    import jax.numpy as jnp

    from jrl import config
    from jrl.run import build, build_collect, build_data

    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    p.add_argument("name", choices=list(OFFLINE))
    p.add_argument("--updates", type=int, default=4_500, help="in all, in nine parts of which the first warms up")
    p.add_argument("--batch", type=int, default=256)
    args = p.parse_args()
    sys.path.insert(0, str(Path(__file__).parent.parent))  # where data.input finds this module
    path, *overrides = from_data(*OFFLINE[args.name])
    cfg = config.load(path, [*overrides, f"replay.batch_size={args.batch}"])
    found = build_data.inputs(cfg)
    algo = build_collect.algorithm(cfg, found.spec)
    sizes = config.Sizes(cfg)
    buffer, sets = build_data.of_stores(sizes, algo, found.train, found.spec, 1, args.batch, online=None)
    ring = jax.tree.map(lambda x, like: x.reshape(like.shape), sets.fill(), jax.eval_shape(buffer.init))
    drawn = jax.jit(lambda ring: jax.lax.map(lambda i: buffer.sample(ring, jax.random.key(i)), jnp.arange(64)))(ring)

    def loop(state, drawn, count):
        def body(i, state):
            batch = jax.tree.map(lambda x: x[i % 64], drawn)
            return algo.update(state, batch, jax.random.fold_in(jax.random.key(0), i))[0]

        return jax.lax.fori_loop(0, count, body, state)

    bare, state, count = jax.jit(loop, donate_argnums=0), jax.jit(algo.init)(jax.random.key(0)), args.updates // _PARTS
    program = build.run(cfg).program
    learned = program.init(0)

    def timed(fn: Callable[[], Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        made = jax.block_until_ready(fn())
        return made, count / (time.perf_counter() - start)

    rates, shares = [], []
    for part in range(_PARTS):
        state, rate = timed(lambda state=state: bare(state, drawn, count))
        first = part * count
        learned, of_run = timed(lambda learned=learned, first=first: program.advance(learned, 0, first, count)[0])
        rates.append(rate)
        shares.append(of_run / rate)
    median = lambda values: statistics.median(values[1:])  # the first part compiles
    found = {"steps_per_s": round(median(rates), 1), "run": round(median(shares), 3)}
    print(json.dumps({"peer": "bare", "work": f"offline-{args.name}", "batch": args.batch, **found}))


if __name__ == "__main__":
    main()
